"""Numbers over shared memory: a NaN wins every maximum, and what has no meaning is refused."""

import pytest
import torch
import torch.distributed as dist
from transport_cases import COMPLEX, FLOATS, HOW, INTEGERS, ways

from gpt2lab import Ranks, transport

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]


@pytest.fixture(scope="module")
def pool():
    with Ranks(4, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


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
