"""Tensors that are not contiguous: every call gives, forward and backward, what it gives for a contiguous copy."""

import pytest
import torch
from comm_checks import integers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planting import under

from gpt2lab import RankFailed, Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

pytestmark = pytest.mark.live

RANKS = 3


@pytest.fixture(scope="module")
def pool(pools):
    return pools[RANKS]


@pytest.fixture(scope="module")
def gloo_pool():
    """Ranks over gloo, which reads a tensor as it lies in memory: strides that get through do harm there."""
    with Ranks(RANKS, echo=False, timeout=60, backend="gloo") as ranks:
        yield ranks


@st.composite
def views(draw):
    """A shape and a chain of view operations on it; every rank applies the same to numbers of its own."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    steps = st.tuples(
        st.sampled_from(
            ["transpose", "every second", "inner part", "expand", "windows", "diagonal", "column"]
        ),
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return shape, draw(st.lists(steps, min_size=1, max_size=4))


def viewed(x: torch.Tensor, steps) -> torch.Tensor:
    """Apply the steps that fit; none of them copies."""
    for name, i, j in steps:
        i, j = i % max(1, x.dim()), j % max(1, x.dim())
        if name == "transpose":
            x = x.transpose(i, j)
        elif name == "every second":
            x = x[(slice(None),) * i + (slice(j % 2, None, 2),)] if x.size(i) > 1 else x
        elif name == "inner part":
            x = x.narrow(i, 1, x.size(i) - 2) if x.size(i) > 2 else x
        elif name == "expand" and x.dim() < 4:
            x = x.unsqueeze(i).expand(*x.shape[:i], 3, *x.shape[i:])
        elif name == "windows" and x.dim() < 4 and x.size(i) > 2:
            x = x.unfold(i, 2, 1)  # overlapping
        elif name == "diagonal" and x.dim() > 1 and i != j:
            x = x.diagonal(0, i, j)
        elif name == "column" and x.dim() > 1:
            x = x.select(i, 0)
    return x


def exchanged(x, axis, dim):
    """All-to-all of uneven parts, which are views themselves."""
    sizes = comm.split_sizes(x.size(dim), axis.size)
    shape = lambda: [*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :]]
    return torch.cat(comm.all_to_all(x.split(sizes, dim), axis, [shape() for _ in sizes]), dim)


def sent(x, axis, dim):
    """A blocking message from rank 0 to rank 2, whose buffer is like x too."""
    if axis.rank == 0:
        return x * 0 + comm.send(x, axis, 2)
    return comm.recv(x * 0, axis, 0) if axis.rank == 2 else x * 1


CALLS = {
    "copy_to": lambda x, a, dim: comm.copy_to(x, a),
    "reduce_from": lambda x, a, dim: comm.reduce_from(x, a),
    "all_gather": lambda x, a, dim: comm.all_gather(x, a, dim),
    "gather_replicated": lambda x, a, dim: comm.gather_replicated(x, a, dim),
    "reduce_scatter": lambda x, a, dim: comm.reduce_scatter(x, a, dim),
    "scatter_to": lambda x, a, dim: comm.scatter_to(x, a, dim),
    "broadcast": lambda x, a, dim: comm.broadcast(x, a, 1),
    "reduce": lambda x, a, dim: comm.reduce(x, a, 2),
    "scatter": lambda x, a, dim: comm.scatter(x, a, dim, 1),
    "gather": lambda x, a, dim: comm.gather(x, a, dim, 1),
    "all_to_all": exchanged,
    "ring_shift": lambda x, a, dim: comm.ring_shift(x, a, 2),
    "send and recv": sent,
}
PLAIN = {
    "all_reduce max": lambda x, a, dim: comm.all_reduce(x, a, "max"),
    "all_reduce later": lambda x, a, dim: comm.all_reduce(x, a, async_op=True).wait(),
    "gather_flat": lambda x, a, dim: comm.gather_flat(x.select(dim, 0).flatten()[:1], a),
    "gather_flat of a line": lambda x, a, dim: comm.gather_flat(line(x), a),
    "reduce_scatter_flat": lambda x, a, dim: comm.reduce_scatter_flat(
        line(x).expand(RANKS, -1).T.flatten(), a
    ),
    "messages": lambda x, a, dim: later(x, a),
}


def line(x):
    """A one-dimensional view of x, strided like x."""
    while x.dim() > 1:
        x = x[0]
    return x


def later(x, axis):
    """An asynchronous message around the ring."""
    going = comm.isend(x, axis, (axis.rank + 1) % axis.size)
    coming = comm.irecv(x, axis, (axis.rank - 1) % axis.size)
    return coming.wait() + 0 * going.wait()


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last dimension first in memory and with gaps."""
    wide = torch.full((2 * x.size(-1), *x.shape[:-1]), 99.0, dtype=x.dtype)
    wide[::2] = x.movedim(-1, 0)
    return wide[::2].movedim(0, -1)


def dense(x: torch.Tensor) -> torch.Tensor:
    """The same numbers without gaps, the last dimension first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def compare(rank, world_size, chains):
    """Names of the calls that give another result for a view, or for another layout on each rank, than for a copy."""
    axis, wrong = Mesh(dp=world_size)["dp"], set()
    for shape, steps in chains:
        whole = viewed(integers(*shape, seed=rank), steps)
        dim = len(steps) % max(1, whole.dim())
        if not whole.dim() or not whole.numel():
            continue
        copy = whole.clone(memory_format=torch.contiguous_format)
        differently = [copy, dense(whole), strided(whole)][rank]
        for name, call in (PLAIN | CALLS).items():
            right = call(copy, axis, dim)
            same = [torch.equal(call(x, axis, dim), right) for x in (whole, differently)]
            if not all(same) or not torch.equal(whole, copy):
                wrong.add(name)
        for name, call in CALLS.items():
            x, y = whole.detach().requires_grad_(), copy.detach().requires_grad_()
            there, here = call(x, axis, dim), call(y, axis, dim)
            weight = integers(*here.shape, seed=50 + rank)
            (back,) = torch.autograd.grad(there, x, strided(weight))
            (right,) = torch.autograd.grad(here, y, weight)
            if not torch.equal(back, right):
                wrong.add(name)
    return sorted(wrong)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains=st.lists(views(), min_size=4, max_size=4))
def test_any_view_gives_what_its_contiguous_copy_gives(pool, chains):
    assert pool.run(compare, chains) == [[]] * RANKS


SOME = [([4, 6], [("transpose", 0, 1)]), ([3, 4, 5], [("transpose", 0, 2), ("every second", 1, 0)])]


def test_the_views_are_not_contiguous():
    assert not any(viewed(torch.zeros(shape), steps).is_contiguous() for shape, steps in SOME)
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(strided(x), x) and not strided(x).is_contiguous()


MUTANTS = {  # what keeps tensors contiguous, left out
    "a copy that keeps its strides": (comm, "fresh", lambda right: lambda x: x.detach().clone()),
    "a buffer like its model": (torch, "empty_like", lambda right: lambda x, **_: right(x)),
    "a message as it lies in memory": (comm.isend, "x.detach().contiguous()", "x.detach()"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_that_lets_strides_through_is_noticed(gloo_pool, bug):
    """Numbers are wrong, or the backend refuses what is strided."""
    try:
        found = gloo_pool.run(under(MUTANTS[bug], compare), SOME)
    except RankFailed as error:
        found = [str(error)]
        assert "contiguous" in found[0], error
    assert any(found)
