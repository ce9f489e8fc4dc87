"""Bugs planted in the shared-memory transport: the checks of the ordinary tests notice each of them."""

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from planting import planted
from transport_cases import check

from gpt2lab import RankFailed, Ranks, transport

pytestmark = pytest.mark.skipif(
    not transport.AVAILABLE, reason="this system has no semaphores in shared memory"
)


def alike(outs) -> bool:
    """Whether tensors can be exchanged without anybody stumbling over their lengths."""
    return len({out.numel() for out in outs}) == 1


def forget_the_last(right):
    def exchange_slots(ends, kind, x):
        everyone = yield from right(ends, kind, x)
        return [*everyone[:-1], torch.zeros_like(x)]

    return exchange_slots


def share_a_neighbours_part(right):
    return lambda ends, kind, outs, x: right(ends, kind, [*outs[1:], outs[0]] if alike(outs) else outs, x)


def take_from_the_other_side(right):
    def all_to_all(ends, kind, outs, parts):
        return right(ends, kind, outs[::-1] if alike(outs) else outs, parts)

    return all_to_all


def always_from_rank_0(right):
    return lambda ends, kind, x, root: right(ends, kind, x, 0)


def drop_the_last_chunk(right):
    return lambda x, size: right(x, size)[: max(1, len(right(x, size)) - 1)]


def reuse_a_slot_that_is_read(right):
    def reclaim(self):
        self._in_use.popleft()
        return iter(())

    return reclaim


def give_back_before_reading(right):
    def following(self, size, kind):
        there = yield from right(self, size, kind)
        late_release = type(self).release
        late_release(self)
        time.sleep(0.01)
        self.release = lambda: None
        return there

    return following


def leave_the_copy(right):
    return lambda tensors, flats: None


def believe_any_delivery(right):
    def following(self, size, kind):
        from gpt2lab.transport.memory import NOTE, SLOTS
        from gpt2lab.transport.stream import Need, _note

        yield Need(self._pair.full, self.writer)
        slot, _, _ = _note.unpack_from(self._memory.raw, self._pair.notes + self._read % SLOTS * NOTE)
        self._read += 1
        return self._slots[slot]

    return following


def sum_instead(right):
    return {**right, "MAX": torch.add}


def one_lane(right):
    return lambda self, lane, call: right(self, "all", call)


def send_and_go(right):
    return lambda self: iter(())


BUGS = {
    "the last rank's part is forgotten in a sum": ("moves", "exchange_slots", forget_the_last),
    "a neighbour's part is shared": ("moves", "all_gather", share_a_neighbours_part),
    "all-to-all puts parts in the wrong places": ("moves", "all_to_all", take_from_the_other_side),
    "broadcast is always from rank 0": ("moves", "broadcast", always_from_rank_0),
    "the last chunk of a large tensor is lost": ("moves", "_chunks", drop_the_last_chunk),
    "a slot is written while it is read": ("stream.Outgoing", "_reclaim", reuse_a_slot_that_is_read),
    "a slot is given back before it is read": ("stream.Incoming", "next", give_back_before_reading),
    "results stay in the flat copy": ("group", "_back", leave_the_copy),
    "a delivery of another call is believed": ("stream.Incoming", "next", believe_any_delivery),
    "MAX is a sum": ("kinds", "COMBINE", sum_instead),
    "a receive stands in the way of a send": ("engine.ProgressEngine", "_enter", one_lane),
    "a send does not wait for its receiver": ("stream.Outgoing", "settle", send_and_go),
}


def named_alike(right, wrong):
    """The wrong one under the right one's name: a group knows its moves by their names."""
    return functools.update_wrapper(wrong, right) if callable(wrong) else wrong


def examine(rank, world_size, bug) -> list[str]:
    """All checks of this rank with a bug planted (None: none); what they find."""
    from contextlib import nullcontext

    from gpt2lab.transport import engine, group, kinds, moves, stream
    from gpt2lab.transport.engine import Mismatch, PeerLost

    rooms = {"engine": engine, "group": group, "kinds": kinds, "moves": moves, "stream": stream}
    if bug is not None:
        home, name, make = bug
        room, _, owner = home.partition(".")
        home = getattr(rooms[room], owner) if owner else rooms[room]
        bug = home, name, lambda right: named_alike(right, make(right))
    with planted(*bug) if bug else nullcontext():
        try:
            return _checks(rank, world_size, patience=2 if bug else 60)
        except (Mismatch, PeerLost) as error:  # anything else is a mistake of this file
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


def silent_bell(right):
    """Deliveries are posted, but nobody is woken for them."""

    def deliver(self, readers, size, kind):
        ends = self._ends
        self._ends = {reader: (pair, pair.free) for reader, (pair, _) in ends.items()}  # another one is rung
        right(self, readers, size, kind)
        self._ends = ends

    return deliver


def tells(right):
    """A sleep before which the sleeper says so; what comes between the two must still wake it."""

    def wait(semaphore, seconds):
        dist.distributed_c10d._get_default_store().set(f"asleep {dist.get_rank()}", "")
        return right(semaphore, seconds)

    return wait


def sleepers(rank, world_size, make) -> bool:
    """Rank 1 comes to a sum when rank 0 sleeps, and nothing but the bell may wake it."""
    from gpt2lab.transport import engine, semaphores, stream

    with (
        planted(engine, "CHECK_EVERY", lambda _: 1000.0),
        planted(stream.Outgoing, "deliver", make),
        planted(semaphores, "wait", tells),
    ):
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["asleep 0"])
        x = torch.ones(3)
        dist.all_reduce(x)
    return bool(x.eq(world_size).all())


def keep_the_slot_for_oneself(right):
    """A slot is given back, but its writer is not told, though it waits."""

    def release(self):
        from gpt2lab.transport import semaphores

        semaphores.post(self._pair.free)

    return release


def wait_in_silence(right):
    """A writer that waits for a slot does not say so."""

    def reclaim(self):
        from gpt2lab.transport import semaphores
        from gpt2lab.transport.stream import Need

        for reader in self._in_use[0]:
            pair, _ = self._ends[reader]
            if not semaphores.take(pair.free):
                yield Need(pair.free, reader)
        self._in_use.popleft()

    return reclaim


def full_slots(rank, world_size, owner="", name="", make=None) -> bool:
    """Rank 1 reads what fills all slots of rank 0 when that sleeps; nothing but the bell may wake it for the rest."""
    from contextlib import nullcontext

    from gpt2lab.transport import engine, memory, semaphores, stream

    bug = planted(getattr(stream, owner), name, make) if make else nullcontext()
    with planted(engine, "CHECK_EVERY", lambda _: 1000.0), planted(semaphores, "wait", tells), bug:
        x = torch.full((4 * memory.SLOT,), rank, dtype=torch.uint8)
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["asleep 0"])
        dist.broadcast(x, 0)
        dist.barrier()
    return bool(x.eq(0).all())


SILENT = {
    "a slot given back is not told": ("Incoming", "release", keep_the_slot_for_oneself),
    "a writer does not say that it waits": ("Outgoing", "_reclaim", wait_in_silence),
}


def test_a_writer_that_waits_for_a_slot_is_woken_by_its_bell_alone():
    with Ranks(2, echo=False, timeout=20, backend="shm") as ranks:
        assert ranks.run(full_slots) == [True, True]


@pytest.mark.parametrize("bug", SILENT)
def test_mutant_that_leaves_a_writer_asleep_is_killed(bug):
    with Ranks(2, echo=False, timeout=3, backend="shm") as ranks, pytest.raises(RankFailed):
        ranks.run(full_slots, *SILENT[bug])


def test_a_sleeping_rank_is_woken_by_its_bell_alone():
    with Ranks(2, echo=False, timeout=20, backend="shm") as ranks:
        assert ranks.run(sleepers, lambda right: right) == [True, True]


def test_mutant_that_does_not_ring_is_killed():
    with Ranks(2, echo=False, timeout=3, backend="shm") as ranks, pytest.raises(RankFailed, match="rank 0"):
        ranks.run(sleepers, silent_bell)


def test_without_a_bug_all_is_right():
    with Ranks(3, echo=False, timeout=30, backend="shm") as ranks:
        assert ranks.run(examine, None) == [[]] * 3


@pytest.mark.parametrize("bug", BUGS)
def test_mutant_is_killed(bug):
    with Ranks(3, echo=False, timeout=30, backend="shm") as ranks:
        assert any(ranks.run(examine, BUGS[bug])), bug
