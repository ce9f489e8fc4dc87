"""Bugs planted in the shared-memory transport: the checks of the ordinary tests notice each of them."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from planting import bugs, planted, planting, under
from transport_cases import check

from gpt2lab import RankFailed, Ranks, transport
from gpt2lab.transport import engine, group, kinds, memory, moves, semaphores, stream

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]
ALIKE = "if len({out.numel() for out in outs}) == 1 else outs"  # else somebody stumbles over their lengths


def given_back_early(right):
    def following(self, size, kind):
        there = yield from right(self, size, kind)
        type(self).release(self)
        time.sleep(0.01)
        self.release = lambda: None
        return there

    return following


BUGS = {
    "the last rank's part is forgotten in a sum":
        (moves.exchange_slots, "return everyone", "return [*everyone[:-1], 0 * x]"),
    "a neighbour's part is shared":
        (moves.all_gather, "step =", f"outs = [*outs[1:], outs[0]] {ALIKE}; step ="),
    "all-to-all puts parts in the wrong places":
        (moves.all_to_all, "outs[ends.rank].copy_", f"outs = outs[::-1] {ALIKE}; outs[ends.rank].copy_"),
    "broadcast is always from rank 0": (moves.broadcast, "if ends", "root = 0\n    if ends"),
    "the last chunk of a large tensor is lost":
        (moves._chunks, "element_size())\n", "element_size())[:-1]\n"),
    "a slot is written while it is read":
        (stream.Outgoing._reclaim, "for reader in self._in_use[0]:", "for reader in ():"),
    "a slot is given back before it is read": (stream.Incoming, "next", given_back_early),
    "results stay in the flat copy": (group._back, "x.detach().copy_(flat.view(x.shape))", "pass"),
    "a delivery of another call is believed":
        (stream.Incoming.next, "if there != size or what != kind:", "if False:"),
    "MAX is a sum": (kinds, "COMBINE", lambda right: {**right, "MAX": torch.add}),
    "a receive stands in the way of a send":
        (engine.ProgressEngine._enter, "default(lane,", "default('all',"),
    "a send does not wait for its receiver": (stream.Outgoing.settle, "while self._in_use:", "while False:"),
}  # fmt: skip


def examine(rank, world_size, bug) -> list[str]:
    """All checks of this rank with a bug planted (None: none); what they find."""
    with planting(bug):
        try:
            return _checks(rank, world_size, patience=2 if bug else 60)
        except (engine.Mismatch, engine.PeerLost) as error:  # anything else is a mistake of this file
            return [f"{type(error).__name__}: {error}"]


def _checks(rank, world_size, patience) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=patience))
    wrong = []
    for size in (7, 500_001):
        wrong += check(group, list(range(world_size)), size, torch.float64)
    strided = torch.full((6, 5), rank + 1.0).t()
    dist.all_reduce(strided, group=group)
    if not strided.eq(6).all():
        wrong.append("strided")
    for late in range(world_size):  # one rank reads late: nobody may overtake it
        x = torch.full((500_000,), rank + 1.0)
        if rank == late:
            time.sleep(0.02)
        for root in range(world_size):
            y = x.clone()
            dist.broadcast(y, root, group=group)
            if not y.eq(root + 1.0).all():
                wrong.append("broadcast to a late rank")
    return wrong + _foreign(rank, patience) + _rendezvous(rank, world_size)


def _foreign(rank, patience) -> list[str]:
    """Rank 0 sums four numbers, the others five: nobody may believe what comes."""
    group = dist.new_group(timeout=timedelta(seconds=patience))
    try:
        dist.all_reduce(torch.ones(5 - (rank == 0)), group=group)
    except RuntimeError:
        return []
    return ["five numbers were added to four"]


def _rendezvous(rank, world_size) -> list[str]:
    """Everybody only sends: nobody may come back."""
    if rank == world_size - 1:
        return []
    brief = dist.new_group(
        list(range(world_size - 1)), timeout=timedelta(seconds=0.3), use_local_synchronization=True
    )
    try:
        dist.send(torch.ones(3), 1 - rank, group=brief)
    except RuntimeError:
        return []
    return ["a send came back without a receiver"]


def tells(right):
    """A sleep before which the sleeper says so; what comes between the two must still wake it."""

    def wait(semaphore, seconds):
        dist.distributed_c10d._get_default_store().set(f"asleep {dist.get_rank()}", "")
        return right(semaphore, seconds)

    return wait


def a_sum(rank, world_size) -> bool:
    """Rank 1 comes to a sum when rank 0 sleeps."""
    x = torch.ones(3)
    dist.all_reduce(x)
    return bool(x.eq(world_size).all())


def full_slots(rank, world_size) -> bool:
    """Rank 1 reads what fills all slots of rank 0 when that sleeps."""
    x = torch.full((4 * memory.SLOT,), rank, dtype=torch.uint8)
    dist.broadcast(x, 0)
    dist.barrier()
    return bool(x.eq(0).all())


def asleep(rank, world_size, call) -> bool:
    """A call to which rank 1 comes when rank 0 sleeps; nothing but the bell may wake it."""
    with planted(engine, "CHECK_EVERY", lambda _: 1000.0), planted(semaphores, "wait", tells):
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["asleep 0"])
        return call(rank, world_size)


SILENT = {
    "nobody rings":  # but another bell
        (stream.Outgoing.deliver, "semaphores.post(wakeup)", "semaphores.post(pair.free)", a_sum),
    "a slot given back is not told":
        (stream.Incoming.release, "if self._memory.raw[self._pair.wanted]:", "if False:", full_slots),
    "a writer does not say that it waits":
        (stream.Outgoing._reclaim, "self._memory.raw[pair.wanted] = 1\n            semaphores.post(self._wakeup)",
         "pass", full_slots),
}  # fmt: skip


@pytest.mark.parametrize("call", [a_sum, full_slots])
def test_a_rank_that_sleeps_is_woken_by_its_bell_alone(call):
    with Ranks(2, echo=False, timeout=20, backend="shm") as ranks:
        assert ranks.run(asleep, call) == [True, True]


@bugs(SILENT)
def test_mutant_that_leaves_a_rank_asleep_is_killed(bug, check):
    with Ranks(2, echo=False, timeout=3, backend="shm") as ranks, pytest.raises(RankFailed, match="rank 0"):
        ranks.run(under(bug, asleep), check)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, echo=False, timeout=30, backend="shm") as made:
        yield made


def test_without_a_bug_all_is_right(ranks):
    assert ranks.run(examine, None) == [[]] * 3


@pytest.mark.parametrize("name", BUGS)
def test_mutant_is_killed(name, ranks):
    assert any(ranks.run(examine, BUGS[name])), name
