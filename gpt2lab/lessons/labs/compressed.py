"""Gradients in fewer bytes: numbers of few bits, low rank, and what was not sent kept for the next step.

A code turns numbers into bytes and back. What a message says and what was kept add up to what was to be sent, bit for
bit: a code rounds to fewer bits, and its scale is a power of two, so that the difference is a float again.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent" (the kept error); Karimireddy et al. 2019, arXiv:1901.09847 (why
it is needed); Vogels et al. 2019, "PowerSGD", arXiv:1905.13727; Wang et al. 2023, "ZeRO++", arXiv:2306.10209 (scales by
block).
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from ...ranks import comm
from ...ranks.axis import Axis
from .replicas import over_ranks, train


class Bfloat16:
    """A code of 2 bytes a number: the upper half of a float32."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers (P,) as bytes."""
        return x.bfloat16().view(torch.uint8)

    def decode(self, message: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The numbers of a message, of the shape and type of `like`."""
        return message.view(torch.bfloat16).to(like.dtype)


@dataclass(frozen=True)
class Scaled:
    """A code of `bits` a number, and for each block a byte: the exponent of its scale.

    Whole numbers from -most to most, or float8 (e4m3).
    """

    bits: int = 8
    most: int = 127
    float8: bool = False
    block: int = 32

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers (P,) as bytes; the last block is filled up with zeros."""
        blocks = torch.nn.functional.pad(x, (0, -len(x) % self.block)).view(-1, self.block)
        exponents = (blocks.abs().amax(1) / self.most).frexp().exponent.clamp(-126, 127)
        scaled = blocks / torch.exp2(exponents.to(x.dtype))[:, None]
        if self.float8:
            codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = (scaled.round() + self.most).to(torch.uint8)
        places = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        packed = (codes.view(-1, len(places)) << places).sum(1, dtype=torch.uint8)
        return torch.cat([packed, (exponents + 126).to(torch.uint8)])

    def decode(self, message: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The numbers of a message, of the shape and type of `like`."""
        count = -(-len(like) // self.block)
        packed, exponents = message.split([len(message) - count, count])
        places = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        codes = ((packed[:, None] >> places) & (2**self.bits - 1)).flatten()
        numbers = codes.view(torch.float8_e4m3fn) if self.float8 else codes.short() - self.most
        scales = torch.exp2(exponents.to(like.dtype) - 126)
        return (numbers.to(like.dtype).view(-1, self.block) * scales[:, None]).flatten()[: len(like)]


CODES = {
    "bfloat16": Bfloat16(),
    "float8": Scaled(most=448, float8=True),
    "int8": Scaled(),
    "2 bits": Scaled(bits=2, most=1),
}


def sent_and_kept(code, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The message of x (P,), the numbers that it says, and what they leave out: sent + kept = x, bit for bit.

    Raises FloatingPointError for numbers that a code cannot say.
    """
    most = 15 if x.dtype == torch.float16 else 126  # so that its scale is finite
    if not (x.abs() < 2.0**most).all():  # nor is NaN
        raise FloatingPointError(
            f"A number to send is not finite, or 2^{most} and more. Use a lower learning rate."
        )
    message = code.encode(x)
    sent = code.decode(message, x)
    return message, sent, x - sent


class CodedSum:
    """The sum over ranks in coded messages; with `feedback` what a message leaves out is added to the next one.

    Each rank sends every other its stretch, sums the stretch that it has got, and sends the sum to all: 2 (n-1)/n
    coded gradients, as a ring's all-reduce. All ranks get the same bits.
    """

    def __init__(self, code, feedback: bool):
        self.code, self.feedback = code, feedback
        self.kept = defaultdict(float)  # by tensor, and of it what is sent first and second

    def __call__(self, name, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The sum of all ranks' x, as far as it has come through."""
        whole = x.flatten() + self.kept[name, "first"]
        parts = whole.tensor_split(axis.size)
        messages, _, kept = zip(*(sent_and_kept(self.code, part) for part in parts), strict=True)
        mine = parts[axis.rank]
        came = comm.all_to_all(messages, axis, [messages[axis.rank].shape] * axis.size)
        total = sum(self.code.decode(message, mine) for message in came) + self.kept[name, "second"]
        message, _, kept_of_total = sent_and_kept(self.code, total)
        if self.feedback:
            self.kept[name, "first"], self.kept[name, "second"] = torch.cat(kept), kept_of_total
        sizes = [len(m) for m in messages]
        sums = comm.all_gather(message, axis, 0, sizes).split(sizes)
        return torch.cat([self.code.decode(m, p) for m, p in zip(sums, parts, strict=True)]).view_as(x)


class PowerSum:
    """The sum of matrices (R, C) as a product of (R, r) and (r, C), each summed over the ranks; all else as it is.

    Exact where the sum has at most rank r, and no row at right angles to those of before. Messages: (R + C) r numbers.
    """

    def __init__(self, rank: int, feedback: bool):
        self.rank, self.feedback = rank, feedback
        self.kept, self.right = defaultdict(float), {}

    def __call__(self, name, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The sum of all ranks' x, as far as its rank allows."""
        if x.dim() != 2 or self.rank * sum(x.shape) >= x.numel():
            return comm.all_reduce(x, axis)
        x = x + self.kept[name]
        if name not in self.right or not self.right[name].any():  # the same on all ranks
            generator = torch.Generator().manual_seed(0)
            self.right[name] = torch.randn(x.size(1), self.rank, generator=generator, dtype=x.dtype)
        left, _ = torch.linalg.qr(comm.all_reduce(x @ self.right[name], axis))
        mine = x.mT @ left
        self.right[name] = comm.all_reduce(mine, axis)
        if self.feedback:
            self.kept[name] = x - left @ mine.mT
        return left @ self.right[name].mT


def trained(
    rank: int, world_size: int, way: str, feedback: bool, source, make, steps: int, lr: float
) -> tuple:
    """Losses of `replicas.train` where gradients are summed this way ("all", a code, "rank 2"), and bytes a step."""
    if way == "all":
        summed = lambda name, x, axis: comm.all_reduce(x, axis)
    else:
        kind, _, number = way.partition("rank ")
        summed = PowerSum(int(number), feedback) if number else CodedSum(CODES[kind], feedback)
    sent, place = [], [0]

    def one(x, axis):
        place[0] += 1
        return summed(place[0], x, axis)

    def next_step(model, axis):
        place[0] = 0
        sent.append(sum(e.bytes for e in comm.log))
        comm.clear_log()

    comm.clear_log()
    run = train(rank, world_size, source, make, steps, lr=lr, summed=one, updated=next_step)
    return run, sent[-1] if sent else 0


def compared(pool, ways, *how) -> dict[tuple[str, bool], tuple[int, float, float]]:
    """By way and feedback: bytes of a step on the first rank, the last loss, and how far the weights end from right.

    The distance is in parts of the way that the right weights went.
    """
    _, _, start = pool.run(trained, "all", False, *how[:2], 0, how[-1])[0][0]
    (_, _, exact), found = pool.run(trained, "all", False, *how)[0][0], {}
    way_of_exact = torch.cat([(exact[name] - w).flatten() for name, w in start.items()])
    for way in ways:
        for feedback in (True, False):
            runs = pool.run(trained, way, feedback, *how)
            off = torch.cat([(w - exact[name]).flatten() for name, w in runs[0][0][2].items()])
            loss = over_ranks([run for run, _ in runs])[-1]
            found[way, feedback] = runs[0][1], loss, (off.norm() / way_of_exact.norm()).item()
    return found
