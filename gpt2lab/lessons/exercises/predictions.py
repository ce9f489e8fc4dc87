"""Questions of lesson 03 that take a number: predict first, then look; what counts is the factor between the two.

At the end the checker of a sum in a fixed order.
"""

import math
import time
from random import Random

import torch

from ..labs import order
from . import Task, returned, unaided
from .differences import is_number
from .guards import PACKAGE


def score(guess: float, found: float) -> float:
    """1 for the right number, 0 for one that is wrong by a factor of four or more."""
    return max(0.0, 1 - abs(math.log(guess / found, 4)))


def _guess(answer) -> float:
    """The learner's number, without a look at what the package knows."""
    return unaided(answer, PACKAGE)()


def _compare(guess: float | None, found, unit: str, clock: str, least: float, hint: str) -> None:
    """Print guess, truth `found()` and score; raise AssertionError with the hint when the score is below `least`."""
    returned(guess)
    assert is_number(guess) and guess > 0, f"a number of {unit} above 0 is asked for, not {guess!r}"
    guess, found = float(guess.item() if hasattr(guess, "item") else guess), found()
    points = score(guess, found)
    print(f"You say {guess:,.4g} {unit}; {clock}: {found:,.4g}. Score {points:.2f} of 1.")
    way = "small" if guess < found else "large"
    factor = max(guess / found, found / guess)
    assert points >= least, f"too {way} by a factor of {factor:.3g}. {hint}"


def _all_reduce(rank, world_size, numbers, link=None):
    """Bytes and messages that this rank sent in a ring all-reduce, and the faster of two, in seconds."""
    from ...algorithms import ring
    from ...ranks import comm, paced
    from ...ranks.mesh import Mesh

    axis, x, seconds = Mesh(dp=world_size)["dp"], torch.ones(numbers), []
    for _ in range(2):
        comm.barrier(axis)
        comm.clear_log()
        start = time.perf_counter()
        with paced.use(link):
            ring.all_reduce(x, axis)
        seconds.append(time.perf_counter() - start)
    return sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log), min(seconds)


_counted: dict[tuple, list] = {}


def _live(ranks: int, numbers: int, link=None) -> list:
    """What every rank counted: one run is enough, because another would count the same."""
    from ...processes.launch import launch

    case = ranks, numbers, link
    if case not in _counted:
        _counted[case] = launch(_all_reduce, numbers, link, ranks=ranks)
    return _counted[case]


def sent(answer) -> None:
    """Bytes that each rank sends in an all-reduce of a million float32 numbers on 4 ranks."""
    hint = "S = 4,000,000 bytes; each half of the ring sends all chunks but one."
    _compare(_guess(answer), lambda: _live(4, 1_000_000)[0][0], "bytes", "counted", 0.999, hint)


def messages(answer) -> None:
    """Messages that each rank sends in a ring all-reduce on 5 ranks."""
    hint = "One message a step: n - 1 steps add up, and then?"
    _compare(_guess(answer), lambda: _live(5, 1000)[0][1], "messages", "counted", 0.999, hint)


def seconds(answer) -> None:
    """Seconds of a ring all-reduce of 100 kB on 4 ranks over links of 50 ms and 1 MB/s.

    The verdict compares with the link's time for what was counted; the run on paced links is printed beside it.
    """
    from ...ranks.paced import Link

    guess, link = _guess(answer), Link(latency=0.05, bandwidth=1e6)
    found = _live(4, 25_000, link)
    size, count, _ = found[0]
    hint = "2 (n - 1) messages pay the latency, 2 (n - 1)/n S bytes the bandwidth; add both."
    print(f"The paced run took {max(took for *_, took in found):.2f} s.")
    computed = count * link.latency + size / link.bandwidth
    _compare(guess, lambda: computed, "s", "computed from what was counted", 0.99, hint)


def crossing(answer) -> None:
    """Bytes from which the ring beats the binomial tree on 64 ranks over links of 5 us and 25 GB/s."""
    from ...machine import links

    link = links.Link(latency=5e-6, bandwidth=25e9)
    hint = "Set 2 * 63 alpha + 2 * 63/64 S beta equal to 2 * 6 (alpha + S beta) and solve for S."
    _compare(_guess(answer), lambda: links.crossing(64, link), "bytes", "computed", 0.95, hint)


def _numbers(chance, count: int = 0) -> tuple[list[torch.Tensor]]:
    """Float32 numbers of very different sizes: `count` tensors of them, or 2 to 16."""
    generator = torch.Generator().manual_seed(chance.randrange(10**6))
    draw = lambda: torch.randn(40, generator=generator, dtype=torch.float32)
    return ([draw() * torch.exp(draw()) for _ in range(count or 2 ** chance.randint(1, 4))],)


def _far_first(parts):
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


fixed_order = Task(
    order.tree,
    {f"{count} tensors": _numbers(Random(count), count) for count in (4, 8)},
    what="some tensors",
    drawn=_numbers,
    mistakes={
        "one after the other: who has the last half alone cannot begin": lambda parts: sum(
            parts[1:], parts[0]
        ),
        "a sum in float64, rounded: nearer, but other bits than a half and a half": lambda parts: sum(
            part.double() for part in parts
        ).float(),
        "the two halves added first, not neighbours": _far_first,
        "the order hangs on the numbers, so each step has another": lambda parts: order.tree(
            sorted(parts, key=lambda part: part.abs().sum())
        ),
    },
    closed=("gpt2lab.lessons.labs", "gpt2lab.algorithms"),
    tolerance=0.0,
)
"""Exercise: a sum whose order is a tree, the same bits wherever its halves are computed."""
