"""Checkers of lesson 09: which version is read, a stash of versions, PipeDream-2BW's update, the SSP rule."""

import inspect

import torch

from ...schedules import Op
from ...schedules.asynchronous import make_stream
from ..labs import servers_on_arrival as servers
from . import close, returned

SCHEMES = ("ampnet", "pipedream", "pipedream_vertical")


def version(answer) -> None:
    """Exercise: the version that the forward or the backward of micro-batch t reads on stage s of p."""
    for scheme in SCHEMES:
        for p in (1, 2, 3, 4):
            stream = make_stream(scheme, p, 9)
            for s in range(p):
                for t in range(9):
                    for kind in "FB":
                        _same_version(answer(scheme, p, s, t, kind), stream, scheme, Op(kind, s, t))


def _same_version(got, stream, scheme: str, op: Op) -> None:
    want, p = stream.reads[op], stream.schedule.ranks
    returned(got)
    assert got >= 0, f"{scheme}, {p} stages: {op} cannot read version {got}: the first version is 0"
    forward = stream.reads[op._replace(kind="F")]
    if got != want and op.kind == "B" and got == forward:
        raise AssertionError(
            f"{scheme}, {p} stages: nothing is stashed, so {op} finds version {want}, not {got}"
        )
    if got != want and op.kind == "B" and want == forward:
        raise AssertionError(f"{scheme}, {p} stages: {op} must read version {want}, which its forward read")
    if got != want and scheme == "pipedream_vertical":
        raise AssertionError(
            f"vertical sync, {p} stages: all stages read what stage 0 reads; {op}: {want}, not {got}"
        )
    assert got == want, (
        f"{scheme}, {p} stages: before {op} the stage has updated {want} times, you say {got}. Walk along its order"
    )


def stash(answer: type, run) -> None:
    """Exercise: use, push and free of a stash. `run(cls)` gives the claims of a live pipeline that uses it."""
    p = torch.nn.Parameter(torch.zeros(2))
    mine = answer([p])
    for new in (1, 2):
        mine.push()
        p.data.fill_(new)
        mine.used = new
    assert mine.versions == {0, 1, 2}, (
        f"after two pushes versions 0, 1, 2 are there, yours has {sorted(mine.versions)}"
    )
    mine.use(0)
    assert p.tolist() == [0, 0], (
        f"use(0) must bring back the zeros that push saw, here are {p.tolist()}: a copy?"
    )
    mine.use(2)
    assert p.tolist() == [2, 2], (
        f"use(0), then use(2): version 2 is lost, here are {p.tolist()}. Exchange, do not drop"
    )
    assert mine.versions == {0, 1, 2}, (
        f"use() makes no version and drops none, but now there are {sorted(mine.versions)}"
    )
    size = p.numel() * p.element_size()
    assert mine.bytes == 3 * size, (
        f"three versions are {3 * size} bytes, yours are {mine.bytes}: one is there twice"
    )
    mine.use(0)
    mine.free(frozenset({0, 2}))
    assert 1 not in mine.versions, f"free() forgets nothing: {{0, 2}} leaves {sorted(mine.versions)}"
    mine.free(frozenset({2}))
    assert mine.versions == {2}, (
        f"version 0 is freed while it is in use: {{2}} leaves {sorted(mine.versions)}; the newest must take its place"
    )
    assert p.tolist() == [2, 2], "version 0 was in use when it was freed: the newest must take its place"
    for claim in run(answer):
        assert claim.error <= 1e-10, (
            f"on live ranks: {claim.name} differs on rank {claim.rank} ({claim.error:.1e})"
        )


def double_buffered(answer) -> None:
    """Exercise: one update of 2BW, from (old, new) weights to the next two."""
    asked = []

    def gradient(w):
        asked.append(w)
        return 0.5 * w + 1.0

    old, new, lr = 8.0, 4.0, 0.5
    got = answer(old, new, gradient, lr)
    returned(got)
    assert len(got) == 2, f"return two versions, (old, new); yours has {len(got)}"
    assert len(asked) == 1, f"an update needs one gradient, yours computed {len(asked)}"
    assert asked[0] != new, (
        "your gradient is at the newest weights: that is a pipeline with a flush. Which does 2BW read?"
    )
    close(asked[0], old, "the gradient is taken at the older weights")
    assert got[1] != old - lr * 5.0, (
        "the gradient is right, but it must be added to the newest weights, not to the old ones"
    )
    close(got[1], new - lr * 5.0, "the new version, W(t) - lr g(W(t-1))")
    close(got[0], new, "after the update the version before it becomes the old one")
    path = [(old, new)]
    for _ in range(4):
        path.append(answer(*path[-1], gradient, lr))
    want = [old, new]
    for _ in range(4):
        want.append(want[-1] - lr * (0.5 * want[-2] + 1.0))
    close([w for _, w in path], want[1:], "five versions in a row")


def bounded(answer) -> None:
    """Exercise: may a worker start its next step under SSP with a bound?"""
    assert len(inspect.signature(answer).parameters) == 3, "the rule takes clock, slowest and bound"
    right = servers.may_start
    for bound in (0, 1, 3, None):
        for clock in range(6):
            for slowest in range(clock + 1):
                got = answer(clock, slowest, bound)
                returned(got)
                if got == right(clock, slowest, bound):
                    continue
                where = f"bound {bound}: a worker that has done {clock} steps, the slowest {slowest}"
                if clock == slowest:
                    raise AssertionError(f"{where}: nobody would ever start, a deadlock")
                if bound is None:
                    raise AssertionError(f"{where}: without a bound nobody waits")
                lead = clock - slowest
                raise AssertionError(
                    f"{where}: it is {lead} ahead and must {'not ' if got else ''}start"
                    + (", that is one too many" if got and lead == bound + 1 else "")
                )
