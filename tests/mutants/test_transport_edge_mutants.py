"""Bugs planted at the edges of the transport: ends of rings, lengths at a limit, odd types, orders, last ranks, bells.

Each check is a call at one edge, on three ranks, with its right answer as a serial formula; each bug is other text in
one function. A group is made for each run, so that a bug leaves nothing behind.
"""

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import pytest
import torch
import torch.distributed as dist
from planting import bugs, planted, planting, rewritten
from transport_cases import same_bits

from gpt2lab import Ranks, transport
from gpt2lab.transport import engine, group, kinds, memory, moves, semaphores, stream

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]
RANKS = 3


def drawn(rank: int, size: int, dtype=torch.float64, salt: int = 0) -> torch.Tensor:
    """All bits at random, so that nothing fits by chance; small whole numbers where they are added."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def counted(rank: int, size: int, dtype=torch.float64) -> torch.Tensor:
    """Whole numbers whose sums are exact, other ones at every place and on every rank."""
    return torch.arange(size, dtype=torch.int32).mul_(7).add_(3 * rank).remainder_(11).to(dtype)


def lengths_at_the_limits(group, rank, keys):
    """Sums and gathers of a byte less, as much and a byte more than each limit."""
    limits = (moves.SMALL, moves.CHUNK, memory.MESSAGE_SLOT, memory.SLOT)
    for size in (0, *(limit + more for limit in limits for more in (-1, 0, 1)), 2 * memory.SLOT + 1):
        x = counted(rank, size, torch.uint8)
        dist.all_reduce(x, group=group)
        yield f"a sum of {size} bytes", x, sum(counted(r, size, torch.uint8) for r in range(RANKS))
        out = torch.empty(RANKS * size, dtype=torch.uint8)
        dist.all_gather_single(out, counted(rank, size, torch.uint8), group=group)
        yield (
            f"a gather of {size} bytes",
            out,
            torch.cat([counted(r, size, torch.uint8) for r in range(RANKS)]),
        )


def uneven_parts(group, rank, keys):
    """Parts of which one is empty, one fits and one takes several slots."""
    lengths = [600_001, 0, 5]
    out = torch.empty(lengths[rank])
    parts = [counted(rank + p, n, torch.float32) for p, n in enumerate(lengths)]
    dist.reduce_scatter(out, parts, group=group)
    yield "a scattered sum", out, sum(counted(r + rank, lengths[rank], torch.float32) for r in range(RANKS))
    outs = [torch.empty(n) for n in lengths]
    dist.all_gather(outs, drawn(rank, lengths[rank], torch.float32), group=group)
    for r, found in enumerate(outs):
        yield f"the shard of {r}", found, drawn(r, lengths[r], torch.float32)
    outs = [torch.empty(n) for n in lengths]
    dist.all_to_all(outs, [drawn(rank, lengths[rank], torch.float32, p) for p in range(RANKS)], group=group)
    for r, found in enumerate(outs):
        yield f"the part from {r}", found, drawn(r, lengths[r], torch.float32, rank)


def rings_go_round(group, rank, keys):
    """Four slots and a few bytes from each rank, other ones in each, and messages of two and a few, twice around."""
    for root in range(RANKS):
        x = drawn(rank, 4 * memory.SLOT + 5, torch.uint8)
        dist.broadcast(x, root, group=group)
        yield f"a broadcast from {root}", x, drawn(root, 4 * memory.SLOT + 5, torch.uint8)
    size = 2 * memory.MESSAGE_SLOT + 5
    for turn in range(2):
        found = torch.empty(size, dtype=torch.uint8)
        works = [
            dist.irecv(found, (rank - 1) % RANKS, group=group),
            dist.isend(drawn(rank, size, torch.uint8, turn), (rank + 1) % RANKS, group=group),
        ]
        for work in works:
            work.wait()
        yield f"message {turn}", found, drawn((rank - 1) % RANKS, size, torch.uint8, turn)


def a_late_reader(group, rank, keys):
    """Rank 2 comes to a broadcast of five slots when rank 0 has left it, which it cannot without rank 2."""
    x = drawn(rank, 5 * memory.SLOT, torch.uint8)
    if rank == 2:
        keys.seen("left 0", right=0.2, bug=20)
    dist.broadcast(x, 0, group=group)
    if rank == 0:
        keys.write("left 0")
    yield "a late broadcast", x, drawn(0, 5 * memory.SLOT, torch.uint8)


def a_sleeping_writer(group, rank, keys):
    """Nobody reads a broadcast of five slots before its writer can write no more."""
    x = drawn(rank, 5 * memory.SLOT, torch.uint8)
    with keys.told_of_sleep(rank):
        if rank:
            keys.seen("asleep 0", right=30, bug=30)
        dist.broadcast(x, 0, group=group)
    yield "a broadcast", x, drawn(0, 5 * memory.SLOT, torch.uint8)


def odd_types(group, rank, keys):
    """Types of 1, 2, 8 and 16 bytes with all their bits, one after the other in lengths that are equal."""
    for dtype in (torch.float64, torch.int64, torch.complex128, torch.bool, torch.bfloat16, torch.uint16):
        bits = lambda r, dtype=dtype: (
            drawn(r, 1001, dtype) if dtype is not torch.bool else drawn(r, 1001, torch.int8) > 0
        )
        x = bits(rank)
        dist.broadcast(x, 1, group=group)
        yield f"a broadcast of {dtype}", x, bits(1)
        outs = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(outs, bits(rank), group=group)
        yield f"a gather of {dtype}", torch.cat(outs), torch.cat([bits(r) for r in range(RANKS)])


def strides(group, rank, keys):
    """Every second number of a tensor, and a transposed one, larger than a slot."""
    for view in (lambda x: x[::2], lambda x: x.view(200, -1).t()):
        x = view(counted(rank, 600_000))
        dist.all_reduce(x, group=group)
        yield (
            "a strided sum",
            x.contiguous(),
            sum(view(counted(r, 600_000)) for r in range(RANKS)).contiguous(),
        )
        y = view(counted(rank, 600_000))
        dist.broadcast(y, 2, group=group)
        yield "a strided broadcast", y.contiguous(), view(counted(2, 600_000)).contiguous()


def the_same_bits_everywhere(group, rank, keys):
    """A sum of numbers whose order shows, small and large: all ranks have one result."""
    for size in (999, 99_999):
        x = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        dist.all_reduce(x, group=group)
        outs = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(outs, x, group=group)
        for r, found in enumerate(outs):
            yield f"the sum of {r}", found, x


def another_length_is_refused(group, rank, keys):
    """Five numbers for those who expect four."""
    x = torch.ones(5 if rank == 1 else 4)
    yield (
        "five for four",
        torch.tensor(refused(lambda: dist.broadcast(x, 1, group=group))),
        torch.tensor(rank != 1),
    )


def another_type_is_refused(group, rank, keys):
    """Four whole numbers for four others: as many bytes, and not the same."""
    x = torch.ones(4, dtype=torch.int32) if rank == 1 else torch.ones(4)
    yield (
        "other types",
        torch.tensor(refused(lambda: dist.broadcast(x, 1, group=group))),
        torch.tensor(rank != 1),
    )


def refused(call) -> bool:
    """Whether a call ends with a mismatch."""
    try:
        call()
    except engine.Mismatch:
        return True
    return False


def nobody_leaves_a_barrier_early(group, rank, keys):
    """Rank 2 comes when rank 0 has left it, which it cannot without rank 2."""
    if rank == 2:
        keys.seen("left 0", right=0.2, bug=20)
        yield "rank 0 has left", torch.tensor(keys.known("left 0")), torch.tensor(False)
    dist.barrier(group=group)
    if rank == 0:
        keys.write("left 0")


def two_receivers(group, rank, keys):
    """Rank 1 asks for its message when rank 2 has had the one that was sent after it."""
    if rank == 0:
        for work in [dist.isend(drawn(0, 1000, salt=to), to, group=group) for to in (1, 2)]:
            work.wait()
        return
    if rank == 1:
        yield "in time", torch.tensor(keys.seen("received", right=30, bug=1)), torch.tensor(True)
    found = torch.empty(1000, dtype=torch.float64)
    dist.recv(found, 0, group=group)
    if rank == 2:
        keys.write("received")
    yield "a message", found, drawn(0, 1000, salt=rank)


def two_senders(group, rank, keys):
    """Rank 0 asks rank 1 first, which sends when rank 2's message has come."""
    if rank == 1:
        yield "in time", torch.tensor(keys.seen("received", right=30, bug=1)), torch.tensor(True)
    if rank:
        dist.send(drawn(rank, 1000), 0, group=group)
        return
    found = torch.empty(2, 1000, dtype=torch.float64)
    works = [dist.irecv(found[source - 1], source, group=group) for source in (1, 2)]
    works[1].wait()
    keys.write("received")
    works[0].wait()
    yield "both", found, torch.stack([drawn(1, 1000), drawn(2, 1000)])


def a_thread_beside_a_sleeper(group, rank, keys):
    """Rank 0 sleeps in a receive when another of its threads sends; nothing but the bell may wake it for that."""
    found = torch.empty(1000, dtype=torch.float64)
    if rank == 0:
        with keys.told_of_sleep(rank):
            other = threading.Thread(
                target=lambda: keys.seen("asleep 0") and dist.send(drawn(0, 1000), 1, group=group)
            )
            other.start()
            dist.recv(found, 1, group=group)
            other.join()
        yield "what came", found, drawn(1, 1000)
    if rank == 1:
        work = dist.irecv(found, 0, group=group)
        end = time.monotonic() + (1 if keys.bug else 30)
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.002)
        yield "in time", torch.tensor(work.is_completed()), torch.tensor(True)
        dist.send(drawn(1, 1000), 0, group=group)
        work.wait()


class Keys:
    """What ranks tell each other beside the transport; how long they wait for it differs with a bug planted."""

    def __init__(self, number: int, bug: bool):
        store = dist.distributed_c10d._get_default_store()
        self.store, self.bug = dist.PrefixStore(f"edge {number}", store), bug

    def write(self, key: str) -> None:
        self.store.set(key, "")

    def known(self, key: str) -> bool:
        return self.store.check([key])

    def seen(self, key: str, right: float = 30, bug: float = 30) -> bool:
        """Wait until a rank has written it, at most so long; whether one has."""
        end = time.monotonic() + (bug if self.bug else right)
        while not (there := self.known(key)) and time.monotonic() < end:
            time.sleep(0.002)
        return there

    @contextmanager
    def told_of_sleep(self, rank: int):
        """Write when this rank falls asleep, from which nothing but a bell wakes it."""
        tell = lambda right: lambda *how: self.write(f"asleep {rank}") or right(*how)
        with planted(engine, "CHECK_EVERY", lambda _: 1000.0), planted(semaphores, "wait", tell):
            yield


CHECKS = (
    lengths_at_the_limits, uneven_parts, rings_go_round, a_late_reader, a_sleeping_writer, odd_types, strides,
    the_same_bits_everywhere, another_length_is_refused, another_type_is_refused, nobody_leaves_a_barrier_early,
    two_receivers, two_senders, a_thread_beside_a_sleeper,
)  # fmt: skip

BUGS = {
    "a chunk is a number longer than its slot":
        (moves._chunks, "x.split(size // x.element_size())", "x.split(size + 1)", lengths_at_the_limits),
    "a part of a sum is read at its sender's place":
        (moves._reduce_then_share, "like(mine, starts[ends.rank])", "like(mine, starts[peer])",
         lengths_at_the_limits),
    "places in a later round count from the whole tensor":
        (moves._reduce_then_share, " - x.storage_offset()", "", lengths_at_the_limits),
    "views of a slot are remembered without their place":
        (stream.Slot.like, "key = (x.numel(), x.dtype, at)", "key = (x.numel(), x.dtype)",
         lengths_at_the_limits),
    "views of a slot are remembered without their type":
        (stream.Slot.like, "key = (x.numel(), x.dtype, at)", "key = (x.numel(), at)", odd_types),
    "a scattered sum has as many rounds as its shortest part":
        (moves.reduce_scatter, "max(part.numel()", "min(part.numel()", uneven_parts),
    "a gather has as many rounds as its shortest shard":
        (moves.all_gather, "max(out.numel()", "min(out.numel()", uneven_parts),
    "an all-to-all ends when this rank has sent its part":
        (moves.all_to_all, "max(len(going), len(coming))", "len(going)", uneven_parts),
    "a delivery's note is written behind the ring":
        (stream.Outgoing.deliver, "% SLOTS * NOTE", "* NOTE", rings_go_round),
    "a delivery's note is read behind the ring":
        (stream.Incoming.next, "% SLOTS * NOTE", "* NOTE", rings_go_round),
    "the first note is read again": (stream.Incoming.next, "self._read += 1", "pass", rings_go_round),
    "every delivery lies in the first slot":
        (stream.Outgoing.deliver, "(self._next + 1) % SLOTS", "0", a_sleeping_writer),
    "a writer believes in one slot more":
        (stream.Outgoing.claim, "len(self._in_use) == SLOTS", "len(self._in_use) > SLOTS", a_sleeping_writer),
    "a writer waits for the first of its readers alone":
        (stream.Outgoing._reclaim, "in self._in_use[0]:", "in self._in_use[0][:1]:", a_late_reader),
    "a delivery that is too long is believed":
        (stream.Incoming.next, "there != size", "there < size", another_length_is_refused),
    "a delivery of another kind is believed":
        (stream.Incoming.next, " or what != kind", "", another_type_is_refused),
    "the kind of a call says nothing of its type":
        (kinds.number, "DTYPES.index(dtype)", "0", another_type_is_refused),
    "a strided tensor counts as flat": (group._flat, ".contiguous()", "", strides),
    "each rank adds from itself on":
        (moves.exchange_slots, "return everyone", "return everyone[ends.rank :] + everyone[: ends.rank]",
         the_same_bits_everywhere),
    "a barrier does not wait for the last rank":
        (moves.barrier, "for peer in ends.peers:", "for peer in ends.peers[:-1]:",
         nobody_leaves_a_barrier_early),
    "sends to several ranks stand in one line":
        (group.SharedMemoryGroup.send, 'lane=("send", to)', 'lane=("send",)', two_receivers),
    "receives from several ranks stand in one line":
        (group.SharedMemoryGroup.recv, 'lane=("recv", source)', 'lane=("recv",)', two_senders),
    "a new request does not wake who sleeps for another":
        (engine.ProgressEngine._enter, "semaphores.post(self._wakeup)", "pass", a_thread_beside_a_sleeper),
}  # fmt: skip


def examine(rank, world_size, number, check, bug=None) -> list[str]:
    """What a check finds wrong on this rank, with other text in one function or without."""
    with planting(bug):
        kinds.number.cache_clear()
        group = dist.new_group(timeout=timedelta(seconds=2 if bug else 60))
        try:
            calls = check(group, rank, Keys(number, bug is not None))
            return [name for name, found, wanted in calls if not same_bits(found, wanted)]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            kinds.number.cache_clear()
            dist.destroy_process_group(group)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(RANKS, echo=False, timeout=60, backend="shm") as made:
        yield made


numbers = count()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_bug_every_edge_is_right(check, ranks):
    assert ranks.run(examine, next(numbers), check) == [[]] * RANKS


@bugs(BUGS)
def test_mutant_at_an_edge_is_killed(bug, check, ranks):
    assert any(ranks.run(examine, next(numbers), check, bug))


def overlaps(ranks: int) -> bool:
    """Whether two things in the shared memory lie on each other, or beyond its end."""
    descriptor = os.memfd_create("edges")
    shared = memory.Memory(descriptor, ranks)
    os.close(descriptor)
    there = [(0, memory.TOKEN)]
    for rank in range(ranks):
        there += [(shared._page(rank), memory.WORD + 1), (shared.wakeup(rank) - shared.base, semaphores.SIZE)]
        there += [(slot.data_ptr() - shared.base, memory.SLOT) for slot in shared.slots(rank)]
        for reader in range(ranks):
            slots = shared.slots(rank, reader)
            there += [(slot.data_ptr() - shared.base, memory.MESSAGE_SLOT) for slot in slots]
            for pair in (shared.pair(rank, reader, messages) for messages in (False, True)):
                there += [(at - shared.base, semaphores.SIZE) for at in (pair.full, pair.free)]
                there += [(pair.wanted, memory.WORD), (pair.notes, memory.SLOTS * memory.NOTE)]
    there.sort()
    ends = [start + size for start, size in there]
    return ends[-1] > shared.size or any(
        end > start for end, (start, _) in zip(ends, there[1:], strict=False)
    )


LAYOUT = {
    "messages share the semaphores of collectives": (memory.Memory.pair, "2 * messages", "0"),
    "notes of messages begin in those of collectives":
        (memory.Memory.pair, "(SLOTS * NOTE + WORD)", "SLOTS * NOTE"),
    "the first rank's page is the token's": (memory.Memory._page, "(1 + rank)", "rank"),
    "messages lie in the last stream": (memory.Memory.__init__, "+ ranks * SLOTS", "+ (ranks - 1) * SLOTS"),
    "both directions of a pair are one":
        (memory.Memory._pair, "writer * self.ranks + reader", "writer + reader"),
}  # fmt: skip


@pytest.mark.parametrize("count_of_ranks", range(1, 6))
def test_no_two_things_in_the_memory_overlap(count_of_ranks):
    assert not overlaps(count_of_ranks)


@pytest.mark.parametrize("bug", LAYOUT)
def test_mutant_of_the_layout_is_killed(bug):
    with rewritten(*LAYOUT[bug]):
        assert overlaps(3)


def test_a_kind_is_told_with_its_type_and_its_root_and_the_mutant_is_killed():
    told = lambda: kinds.kind_name(kinds.number("broadcast", torch.int16, root=2))
    assert told() == "broadcast int16 of root 2"
    with rewritten(kinds.kind_name, "root - 1", "root"):
        assert told() != "broadcast int16 of root 2"
