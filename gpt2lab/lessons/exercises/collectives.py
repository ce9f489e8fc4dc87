"""Checkers of lesson 03: algorithms written on messages are run on live ranks, and their messages are played again.

A right sum is not enough: the bytes, messages and rounds between each two ranks are checked as well.
"""

from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import torch

from ...ranks import comm
from ...ranks.mesh import Mesh
from . import close, live, returned, scored
from .differences import UNROLLED, Between, Most, listed
from .engine import Task
from .ranked import ALL, ranked


class Wire:
    """What an answer may use: its place, and messages to other places; everything is noted for the checker."""

    def __init__(self, axis):
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self.noted = []

    def isend(self, x, to: int):
        """Start sending x to place `to`; wait for the handle before the end."""
        self.noted.append(("send", to % self.size, x.nbytes))
        number, begun = sum(kind == "send" for kind, *_ in self.noted) - 1, x.clone()
        going = comm.isend(x, self.axis, to % self.size)

        def wait():
            going.wait()
            self.noted.append(("wait", number, 0))
            assert torch.equal(x, begun), (
                f"rank {self.rank} wrote into a tensor between isend and wait: what has not left may be sent changed"
            )

        return SimpleNamespace(wait=wait)

    def send(self, x, to: int) -> None:
        """Send x to place `to` and wait until it has left."""
        self.isend(x, to).wait()

    def recv(self, like, source: int):
        """Wait for a tensor of the shape of `like` from place `source`."""
        self.noted.append(("recv", source % self.size, like.nbytes))
        return comm.irecv(like, self.axis, source % self.size).wait()


def _input(rank: int, count: int, seed: int | None = None):
    if seed is None:  # thirds: float32 shows
        return torch.arange(count, dtype=torch.float64) / 3 + 100 * rank**2 + rank
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank))


def _heard(axis, answer, count: int, seed: int | None) -> tuple:
    """The result, the input afterwards, calls beside the wire, sends without a wait, and the notes of all ranks."""
    wire, x = Wire(axis), _input(axis.rank, count, seed)
    result = answer(x, wire)
    result = list(result) if isinstance(result, UNROLLED) else result
    calls = Counter(f"send of {e.bytes} bytes" if e.op == "send" else e.op for e in comm.log)
    beside = {*calls - Counter(f"send of {size} bytes" for _, size in _sends(wire.noted))} - {"recv"}
    waited = {number for kind, number, _ in wire.noted if kind == "wait"}
    over = min(len(waited), sum(e.op == "send" for e in comm.log))
    notes = comm.gather_objects(wire.noted, axis)
    return result, x, beside, len(_sends(wire.noted)) - over, notes


CLEAN = "the input x", "calls beside `wire`", "sends that nobody waited for"
"""What is the same in all three exercises: x stays, only `wire` is used, what leaves is waited for."""


def _sends(noted):
    return [(to, size) for kind, to, size in noted if kind == "send"]


def rounds(noted: list[list[tuple]]) -> int:
    """Play messages again: each takes one round, a rank sends one at a time. The rounds until all have arrived.

    A message is sent when it is started, or when the one before it was sent; a rank waits for what it receives.
    """
    ranks = range(len(noted))
    clock, at, ends = [0 for _ in ranks], [0 for _ in ranks], [[0] for _ in ranks]
    coming = defaultdict(deque)
    while any(at[r] < len(noted[r]) for r in ranks):
        before = list(at)
        for r in ranks:
            while at[r] < len(noted[r]):
                kind, peer, _ = noted[r][at[r]]
                if kind == "recv" and not coming[peer, r]:
                    break
                at[r] += 1
                if kind == "send":
                    ends[r].append(max(clock[r], ends[r][-1]) + 1)
                    coming[r, peer].append(ends[r][-1])
                else:  # of a send that is waited for, `peer` is the number
                    until = coming[peer, r].popleft() if kind == "recv" else ends[r][1 + peer]
                    clock[r] = max(clock[r], until)
        assert at != before, "a rank receives a message that no rank has sent"
    assert not any(coming.values()), "a message was sent that no rank received"
    return max(last for of_one in ends for last in of_one)


NUMBER = 8  # bytes of a float64, of which all inputs consist


def _on_a_ring(axis, answer, n: int, count: int, seed=None) -> tuple:
    result, *clean, notes = _heard(axis, answer, count, seed)
    sends = _sends(notes[axis.rank])
    return result, *clean, {to for to, _ in sends}, len(sends), sum(size for _, size in sends), rounds(notes)


def _of_a_ring(rank: int, n: int, count: int, seed=None) -> tuple:
    sizes = [NUMBER * part.numel() for part in torch.arange(count).tensor_split(n)]
    least, most = (2 * (sum(sizes) - edge) for edge in (max(sizes), min(sizes)))
    total, steps = sum(_input(r, count, seed) for r in range(n)), 2 * (n - 1)
    clean = _input(rank, count, seed), set(), 0
    return total, *clean, {(rank + 1) % n}, steps, Between(least, most), Most(steps)


ring = ranked(
    ("the sum", *CLEAN, "neighbours sent to", "messages", "bytes sent, as chunks of 1/n,", "rounds"),
    _of_a_ring,
    _on_a_ring,
    lambda n, *_: n,
    shown=[(3, 6), (2, 4), (4, 9), (3, 7)],
    what="{} ranks, {} numbers of 8 bytes",
    drawn=lambda chance: (5, chance.randint(8, 30), chance.randrange(1000)),
    count=1,
)
"""Exercise: a ring all-reduce: n - 1 steps add up, n - 1 hand out, and all ranks send at the same time."""


def _on_a_tree(axis, answer, n: int, seed=None, count: int = 3) -> tuple:
    result, *clean, notes = _heard(axis, answer, count, seed)
    sends = _sends(notes[axis.rank])
    return result, *clean, max((size for _, size in sends), default=0), len(sends), len(sends), rounds(notes)


def _of_a_tree(rank: int, n: int, seed=None, count: int = 3) -> tuple:
    best = (n - 1).bit_length()
    clean, each = (_input(rank, count, seed), set(), 0), rank < n - 1  # n - 1 messages in all
    return _input(0, count, seed), *clean, Most(count * NUMBER), int(each), Most(best), Most(best)


tree = ranked(
    (
        "the tensor",
        *CLEAN,
        "bytes of the largest message",
        f"messages {ALL}",
        "messages, of which nobody sends more than there are rounds,",
        "rounds, in each of which whoever has the tensor can send,",
    ),
    _of_a_tree,
    _on_a_tree,
    lambda n, *_: n,
    shown=[(2,), (3,), (4,), (5,)],
    what="{} ranks",
    drawn=lambda chance: (8, chance.randrange(1000), chance.randint(4, 9)),
    count=1,
)
"""Exercise: a broadcast of rank 0's tensor in about log2 n rounds."""


def _chunks(axis, answer, n: int, count: int, seed=None) -> tuple:
    result, *clean, notes = _heard(axis, answer, count, seed)
    return result, *clean, sorted(_sends(notes[axis.rank])), rounds(notes)


def _of_all(rank: int, n: int, count: int, seed=None) -> tuple:
    sends = [(p, NUMBER * part.numel()) for p, part in enumerate(torch.arange(count).tensor_split(n))]
    chunks = [_input(r, count, seed).tensor_split(n)[rank] for r in range(n)]
    return chunks, _input(rank, count, seed), set(), 0, sends[:rank] + sends[rank + 1 :], Most(n - 1)


to_all = ranked(
    ("the list of chunks, in the order of their senders,", *CLEAN, "what it sends, (to, bytes),", "rounds"),
    _of_all,
    _chunks,
    lambda n, *_: n,
    shown=[(2, 5), (3, 7), (4, 9)],
    what="{} ranks, {} numbers",
    drawn=lambda chance: (5, chance.randint(8, 30), chance.randrange(1000)),
    count=1,
)
"""Exercise: all-to-all from messages: chunk p of every rank goes to rank p, straight; lengths may differ."""


def used_twice(rank, world_size, copy):
    """The gradient of copy(x) + x: autograd passes the same gradient to both branches."""
    from ...ranks.mesh import Mesh

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (copy(x, Mesh(tp=world_size)["tp"]) + x).sum().backward()
    return x.grad.item()


bus = Task(
    lambda n, size, seconds: (n - 1) * size / seconds,
    shown={
        "n=4, 100 bytes out, 1 s (the whole array is n times the output)": (4, 100.0, 1.0),
        "n=2, 8e9 bytes out, 0.5 s": (2, 8e9, 0.5),
        "n=3, 90 bytes out, 2 s": (3, 90.0, 2.0),
    },
    what="n={}, {} bytes out, {} s",
    drawn=lambda chance: (chance.randint(1, 64), 1e6 * chance.randint(1, 99), chance.randint(1, 9) / 8),
)
"""Exercise: bus bandwidth of a reduce-scatter from the bytes of its *output* on one rank."""


RANKS, CHUNKS = 8, 4


def in_rounds(answer) -> str:
    """Puzzle: rank 0's chunks on all ranks in few rounds; then live ranks send what the rounds say."""
    rounds = list(listed(returned(answer())))
    held = [set(range(CHUNKS) if rank == 0 else ()) for rank in range(RANKS)]
    for number, messages in enumerate(rounds, 1):
        _one_round(f"round {number}", messages, held)
    for rank, chunks in enumerate(held):
        missing = set(range(CHUNKS)) - chunks
        assert not missing, f"after {len(rounds)} rounds rank {rank} lacks chunk {min(missing)}"
    words = scored(len(rounds), "rounds", bar=7, best=6)
    for rank, got in enumerate(live(_sent_in_rounds, rounds, ranks=RANKS)):
        close(got, torch.arange(CHUNKS), f"the chunks of live rank {rank}")
    return words


def _one_round(when: str, messages, held: list[set[int]]) -> None:
    """Note what ranks hold after a round."""
    for message in messages:
        assert len(message) == 3, f"{when}: {message} is no (from, to, chunk)"
        sender, receiver, chunk = message
        known = {sender, receiver} <= set(range(RANKS)) and chunk in range(CHUNKS)
        assert known and sender != receiver, (
            f"{when}: {message}, but two ranks of 0 to {RANKS - 1} and a chunk of 0 to {CHUNKS - 1} are wanted"
        )
        assert chunk in held[sender], (
            f"{when}: rank {sender} sends chunk {chunk}, which it did not hold before"
        )
    for place, does in enumerate(("sends", "receives")):
        for rank, times in Counter(message[place] for message in messages).items():
            assert times == 1, f"{when}: rank {rank} {does} {times} chunks; one is allowed"
    for _, receiver, chunk in messages:
        held[receiver].add(chunk)


def _sent_in_rounds(rank, world_size, rounds):
    """The chunks that this rank has in the end, each a number."""
    axis, chunks = Mesh(dp=world_size)["dp"], torch.full((CHUNKS, 1), -1.0)
    if rank == 0:
        chunks = torch.arange(float(CHUNKS))[:, None]
    for messages in rounds:
        going = [comm.isend(chunks[c].clone(), axis, to) for sender, to, c in messages if sender == rank]
        for sender, to, c in messages:
            if to == rank:
                chunks[c] = comm.irecv(chunks[c].clone(), axis, sender).wait()
        for handle in going:
            handle.wait()
    return chunks[:, 0]
