"""The same bits as gloo: reductions of integers on 2 to 4 ranks, of floats on 2; and what has no meaning is refused.

Calls that only move bits are compared with what was sent, in `transport_cases`.
"""

import pytest
import torch
import torch.distributed as dist
from planting import planted
from transport_cases import COMPLEX, FLOATS, HOW, INTEGERS, same_bits, uneven, ways

from gpt2lab import Ranks, kept, transport

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]
# Not with gloo: it knows no int16, gathers no complex numbers, and adds bools as bytes (True + True is a byte of 2).
DTYPES = FLOATS + (torch.uint8, torch.int8, torch.int32, torch.int64)
SIZES = (1, 7, 5001)
LARGE = 600_001  # elements: several slots of the transport where they have four bytes or more


@pytest.fixture(scope="module")
def pool():
    with Ranks(4, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


def groups(line):
    """The same ranks over shared memory and over gloo, made once; all ranks call this together."""
    for backend in ("shm", "gloo"):
        if (line, backend) not in kept:
            kept[line, backend] = dist.new_group(line, backend=backend)
    return [kept[line, backend] for backend in ("shm", "gloo")]


def drawn(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """All bits of an integer at random, normal numbers else."""
    generator = torch.Generator().manual_seed(rank)
    if dtype in INTEGERS:
        return torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(
            dtype
        )
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def reductions(group, me, count, size, dtype, how):
    """What every call that combines gives on this rank."""
    op, lengths = getattr(dist.ReduceOp, how), uneven(size, count)
    mine, wide = drawn(me, size, dtype), drawn(me, count * size, dtype)
    x = mine.clone()
    dist.all_reduce(x, op, group=group)
    yield "all_reduce", x
    x = mine.clone()
    dist.reduce(x, op=op, group_dst=count - 1, group=group)
    yield "reduce", x if me == count - 1 else mine
    out = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_single(out, wide, op, group=group)
    yield "reduce_scatter_single", out
    out = torch.empty(lengths[me], dtype=dtype)
    dist.reduce_scatter(out, list(wide[: sum(lengths)].split(lengths)), op, group=group)
    yield "reduce_scatter", out


def differences(rank, world_size, dtype, bug=lambda right: right) -> list[str]:
    """The calls in which this rank got other bits over shared memory than over gloo."""
    from gpt2lab.transport import kinds

    wrong = []
    for line in [(0, 1), (0, 1, 2), (0, 1, 2, 3)] if dtype in INTEGERS else [(0, 1)]:
        pair = groups(line)
        if rank in line:
            with planted(kinds, "COMBINE", bug):
                wrong += _differences(pair, rank, len(line), dtype)
    return wrong


def _differences(pair, me, count, dtype) -> list[str]:
    wrong = []
    for size, hows in [*((size, ways(dtype)) for size in SIZES), (LARGE, ["SUM"])]:
        for how in hows:
            both = [reductions(group, me, count, size, dtype, how) for group in pair]
            for (name, ours), (_, theirs) in zip(*both, strict=True):
                if not same_bits(ours, theirs):
                    wrong.append(f"{name} {how} of {size} {dtype} on {count} ranks")
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_gloo(pool, dtype):
    assert pool.run(differences, dtype) == [[]] * 4


def adds_in_half_the_digits(right):
    return right | {"SUM": lambda a, b, out: out.copy_(a.float() + b.float())}


def cuts_what_it_should_round(right):
    """The lower half of a float32 away: a bfloat16, but never the next larger one."""
    cut = lambda x: (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return right | {"SUM": lambda a, b, out: out.copy_(cut(a.float() + b.float()))}


def takes_or_for_exclusive_or(right):
    return right | {"BXOR": right["BOR"]}


@pytest.mark.parametrize(
    ("dtype", "bug"),
    [
        (torch.float64, adds_in_half_the_digits),
        (torch.bfloat16, cuts_what_it_should_round),
        (torch.uint8, takes_or_for_exclusive_or),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mutant_with_other_bits_is_noticed(pool, dtype, bug):
    word = "BXOR" if dtype is torch.uint8 else "SUM"
    assert all(word in found[0] for found in pool.run(differences, dtype, bug)[:2])


def test_not_a_number_wins_every_maximum_and_minimum_on_every_rank(pool):
    """Unlike gloo, whose `<` a NaN always fails, so that it depends on the order of ranks who sees it."""

    def work(rank, world_size):
        found = []
        for size in (3, 200_000):  # one exchange, and in parts
            for how in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                x = torch.full((size,), float(rank))
                x[rank :: world_size + 1] = torch.nan  # each rank has its own, and one place is all numbers
                dist.all_reduce(x, how)
                places = torch.arange(size) % (world_size + 1) < world_size
                found.append(torch.equal(x.isnan(), places))
        return all(found)

    assert pool.run(work) == [True] * 4


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX, ids=str)
def test_a_reduction_without_a_meaning_is_refused_in_words(pool, dtype):
    senseless = [how for how in HOW if how not in ways(dtype)]
    if dtype in COMPLEX:
        senseless.remove("AVG")  # means something, and is not exact

    def work(rank, world_size):
        told = []
        for how in senseless:
            try:
                dist.all_reduce(torch.ones(5, dtype=dtype), getattr(dist.ReduceOp, how))
                told.append("")
            except (RuntimeError, ValueError) as error:
                told.append(str(error))
        after = torch.full((5,), rank)
        dist.all_reduce(after)  # nothing has moved, so the group goes on
        return told, after.tolist()

    for told, after in pool.run(work):
        assert after == [6] * 5
        for how, text in zip(senseless, told, strict=True):
            assert how in text and ("cannot combine" in text or dtype in COMPLEX), text
