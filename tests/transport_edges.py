"""Calls at the edges of the shared-memory transport: ends of rings, lengths at a limit, odd types, orders, bells.

Each check is a call at one edge, on three ranks, with its right answer as a serial formula. `examine` runs one on a
rank, in a group made for it, so that a bug that is planted there leaves nothing behind.
"""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from planting import planted, planting
from transport_cases import same_bits

from gpt2lab.transport import engine, kinds, memory, moves, semaphores

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
        everyone = [counted(r, size, torch.uint8) for r in range(RANKS)]
        x, out = everyone[rank].clone(), torch.empty(RANKS * size, dtype=torch.uint8)
        dist.all_reduce(x, group=group)
        yield f"a sum of {size} bytes", x, sum(everyone)
        dist.all_gather_single(out, everyone[rank], group=group)
        yield f"a gather of {size} bytes", out, torch.cat(everyone)


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
    """Rank 1, the only reader, asks for a message of five slots when its writer can write no more, and sleeps."""
    x = drawn(rank, 5 * memory.MESSAGE_SLOT, torch.uint8)
    with keys.told_of_sleep(rank):
        if rank == 0:
            dist.send(x, 1, group=group)
        if rank == 1:
            keys.seen("asleep 0")
            dist.recv(x, 0, group=group)
            yield "a message", x, drawn(0, 5 * memory.MESSAGE_SLOT, torch.uint8)
    yield "in time", *keys.in_time()


def a_sleeper_in_a_sum(group, rank, keys):
    """Ranks 1 and 2 come to a sum when rank 0 sleeps in it."""
    x = counted(rank, 3)
    with keys.told_of_sleep(rank):
        if rank:
            keys.seen("asleep 0")
        dist.all_reduce(x, group=group)
    yield "in time", *keys.in_time()
    yield "a sum", x, sum(counted(r, 3) for r in range(RANKS))


def strides(group, rank, keys):
    """Every second number of a tensor, and a transposed one, larger than a slot."""
    for view in (lambda x: x[::2], lambda x: x.view(200, -1).t()):
        of = lambda r, view=view: view(counted(r, 600_000))
        right, outs = [of(r) for r in range(RANKS)], [of(0) for _ in range(RANKS)]
        x, y = of(rank), of(rank)
        dist.all_gather(outs, x, group=group)
        yield "a strided gather", torch.stack(outs), torch.stack(right)
        dist.all_reduce(x, group=group)
        yield "a strided sum", x, sum(right)
        dist.broadcast(y, 2, group=group)
        yield "a strided broadcast", y, right[2]


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
    yield "five for four", refused(lambda: dist.broadcast(x, 1, group=group)), torch.tensor(rank != 1)


def parts_of_another_length_are_refused(group, rank, keys):
    """Rank 1 sums parts of five numbers, the others parts of four."""
    size = 5 if rank == 1 else 4
    call = lambda: dist.reduce_scatter_tensor(torch.empty(size), torch.ones(RANKS * size), group=group)
    yield "parts of five and of four", refused(call), torch.tensor(True)


def another_type_is_refused(group, rank, keys):
    """Four whole numbers for four others: as many bytes, and not the same."""
    x = torch.ones(4, dtype=torch.int32) if rank == 1 else torch.ones(4)
    yield "other types", refused(lambda: dist.broadcast(x, 1, group=group)), torch.tensor(rank != 1)


def refused(call) -> torch.Tensor:
    """Whether a call ends with a mismatch."""
    try:
        call()
    except engine.Mismatch:
        return torch.tensor(True)
    return torch.tensor(False)


def nobody_leaves_a_barrier_early(group, rank, keys):
    """Rank 2 comes when rank 0 has left it, which it cannot without rank 2."""
    if rank == 2:
        keys.seen("left 0", right=0.2, bug=20)
        yield "rank 0 has left", torch.tensor(keys.known("left 0")), torch.tensor(False)
    dist.barrier(group=group)
    if rank == 0:
        keys.write("left 0")


def a_send_ends_with_its_receive(group, rank, keys):
    """Rank 1 asks for a message when rank 0 has come back from sending it, which it cannot without rank 1."""
    if rank == 1:
        keys.seen("sent", right=0.2, bug=20)
        yield "rank 0 has come back", torch.tensor(keys.known("sent")), torch.tensor(False)
        dist.recv(torch.empty(3), 0, group=group)
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
        keys.write("sent")


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

    def __init__(self, group_name: str, bug: bool):
        store = dist.distributed_c10d._get_default_store()
        self.store, self.bug = dist.PrefixStore(f"edge {group_name}", store), bug
        self.start = time.monotonic()

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
        """Write when this rank falls asleep, from which a bell wakes it: else it is late."""
        tell = lambda right: lambda *how: self.write(f"asleep {rank}") or right(*how)
        for_ever = planted(engine, "CHECK_EVERY", lambda _: 4.0 if self.bug else 1000.0)
        with for_ever, planted(semaphores, "wait", tell):
            yield

    def in_time(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether nobody has slept too long since the check began, and that it must be so."""
        took = time.monotonic() - self.start
        return torch.tensor(took < (3 if self.bug else 60)), torch.tensor(True)


CHECKS = (
    lengths_at_the_limits, rings_go_round, a_late_reader, a_sleeping_writer, a_sleeper_in_a_sum,
    strides, the_same_bits_everywhere, another_length_is_refused, parts_of_another_length_are_refused,
    another_type_is_refused, nobody_leaves_a_barrier_early, a_send_ends_with_its_receive, two_receivers, two_senders,
    a_thread_beside_a_sleeper,
)  # fmt: skip


def examine(rank, world_size, check, bug=None) -> list[str]:
    """What a check finds wrong on this rank, with other text in one function or without."""
    with planting(bug):
        kinds.number.cache_clear()
        group = dist.new_group(timeout=timedelta(seconds=2 if bug else 60))
        try:
            calls = check(group, rank, Keys(group.group_name, bug is not None))
            return [name for name, found, wanted in calls if not same_bits(found, wanted)]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            kinds.number.cache_clear()
            dist.destroy_process_group(group)
