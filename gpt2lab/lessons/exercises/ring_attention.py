"""Checker of lesson 10's backward of ring attention, on three, two and four live ranks."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...machine.memory import Alive
from ...ranks import comm
from ...ranks.mesh import Mesh
from . import by_chance, close, closed, live, returned
from .differences import named, randoms
from .ranked import counted
from .watching import received


def ring_backward(answer) -> None:
    """Exercise: the backward of ring attention on live ranks; k, v and their gradients go round."""
    for n, words in ((3, "three live ranks"), (2, "two live ranks"), (4, "four live ranks")):
        _ring_backward_on(answer, n, words)
    by_chance(
        lambda chance: _ring_backward_on(answer, 2, "other numbers on two ranks", chance.randint(1, 99)), 1
    )


def _ring_backward_on(answer, n: int, words: str, seed: int = 0) -> None:
    q, k, v, grad = (x.requires_grad_() for x in randoms(seed, *4 * [(12, 2 + n)]))
    _attend(q, k, v)[0].backward(grad.detach())
    found, t, block = live(_backward_on_a_rank, answer, seed, ranks=n, what=words), 12 // n, _flops(n)
    best = n * 4 * t * q.size(1) * 8  # n shifts of k, v, dk, dv (t, D)
    for rank, (given, *_, same, _, _) in enumerate(found):
        table = named("dq", "dk", "dv")(returned(given), f"rank {rank}")
        for (name, got), want in zip(table.items(), (q.grad, k.grad, v.grad), strict=True):
            close(got, want[t * rank :][:t], f"{name} on rank {rank}" + f" of {n}" * (n != 3), 1e-9)
        assert same, (
            f"rank {rank} changed what it was given: q, k, v and the rest belong to others; make new ones"
        )
    calls = [sum(event.op == op for *_, log, _, _, _, _ in found for event in log) for op in ("send", "recv")]
    for rank, (*_, log, flops, _, _, _) in enumerate(found):
        ops, to = {event.op for event in log}, {to for event in log for to, _ in event.targets}
        assert ops <= {"send", "recv"} and to <= {(rank - 1) % n, (rank + 1) % n}, (
            f"rank {rank} of {n} called {sorted(ops)} and sent to {sorted(to)}: on a ring only neighbours talk"
        )
        sent = sum(event.bytes for event in log)
        assert sent <= best, f"rank {rank} sent {sent} bytes; k, v and two gradients once round are {best}"
        blocks = flops / block
        assert blocks <= rank + 1, (
            f"rank {rank} computes the products of {blocks:g} blocks, and sees {rank + 1}: skip what is masked"
        )
    assert calls[0] == calls[1], (
        f"{calls[1]} messages were received, and {calls[0]} sends were waited for: what has not left may still change"
    )
    said = [words for _, words, *_ in found if words]
    assert not said, said[0][0]
    for rank, (_, _, log, *_) in enumerate(found[:-1]):
        sent, least = sum(event.bytes for event in log), best // (2 * n)
        assert sent >= least, (
            f"rank {rank} sent {sent} bytes; its k and v, which later ranks need, are {least}"
        )
    for rank, (*_, computed, most) in enumerate(found):
        for others, flops in enumerate(computed, 1):
            assert flops > (others - 2) * block, (
                f"rank {rank} of {n} had the keys of {others} other ranks when it had computed with "
                f"{flops / block:g} blocks: a ring uses a block before it takes the one after the next"
            )
        assert most <= 2 or rank < n - 1, (
            f"rank {rank} of {n} holds the keys of {most} others at once: let go of a block when you have used it"
        )


def _flops(n: int) -> int:
    """Of the five products of one block, (t, D) by (D, t) or (t, t) by (t, D), on each of n ranks."""
    return 5 * 2 * (12 // n) ** 2 * (2 + n)


def _attend(q, k, v):
    scores = (q @ k.T / q.size(1) ** 0.5).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def _backward_on_a_rank(rank, world_size, answer, seed):
    axis, (q, k, v, grad) = Mesh(cp=world_size)["cp"], randoms(seed, *4 * [(12, 2 + world_size)])
    out, lse = _attend(q, k, v)
    t = 12 // world_size
    mine = [x[t * rank :][:t].clone() for x in (q, k, v, out, lse, grad)]
    before, counter, computed = [x.clone() for x in mine], FlopCounterMode(display=False), {}
    marks = [{x[t * r, 0].item() for x in (k, v)} for r in range(rank)]  # of blocks that this rank needs
    blocks, held = [Alive() for _ in marks], [0]

    def note(message):
        """Of each block that comes: the flops so far, and how many are in memory with it."""
        numbers = set(message.flatten().tolist())
        for other in range(rank):
            if marks[other] & numbers:
                computed.setdefault(other, counter.get_total_flops())
                blocks[other].watch(message)
        held.append(sum(block.bytes() > 0 for block in blocks))

    with (
        counted() as said,
        counter,
        received(note),
        closed("torch.autograd", "torch._functorch", "gpt2lab.parallel"),
    ):
        given = answer(*mine, axis)
    same = all(map(torch.equal, before, mine))
    return given, said, [*comm.log], counter.get_total_flops(), same, [*computed.values()], max(held)
