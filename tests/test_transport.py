"""Shared memory as a backend of torch.distributed: exact, and loud about faults."""

import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from planting import planted
from transport_cases import COMPLEX, FLOATS, INTEGERS, MOVED, SIZES, check
from transport_edges import CHECKS, RANKS, examine

from gpt2lab import Ranks, kept, transport
from gpt2lab.machine import memory as watched
from gpt2lab.transport.engine import CHECK_EVERY, ProgressEngine, Request
from gpt2lab.transport.memory import NOTE, SLOTS, TOKEN, WORD, Memory
from gpt2lab.transport.moves import SMALL, all_reduce
from gpt2lab.transport.stream import VIEWS, Incoming, Need, Outgoing, Slot, StreamEnds

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]
LINES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 2, 4), (1, 4)]


@pytest.fixture(scope="module")
def pool():
    with Ranks(5, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


def group_of(line, backend=None, **options):
    """A process group, made once a rank; all ranks call this together."""
    key = (line, backend, *options.items())
    if key not in kept:
        kept[key] = dist.new_group(line, backend=backend, **options)
    return kept[key]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX + MOVED, ids=str)
def test_every_call_is_exact_for_any_size_on_any_ranks(pool, dtype):
    def work(rank, world_size):
        wrong = []
        for line in LINES:
            group = group_of(line)
            if rank in line:
                for size in SIZES if dtype is torch.float64 else SIZES[2:4]:
                    wrong += check(group, list(line), size, dtype)
        return wrong

    assert pool.run(work) == [[]] * 5


def test_a_call_under_way_moves_while_nobody_waits_for_it(pool):
    def work(rank, world_size):
        x = torch.ones(1 << 20)
        handle = dist.all_reduce(x, async_op=True)
        deadline = time.monotonic() + 20
        while not handle.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        done = handle.is_completed()
        future = dist.all_reduce(x, async_op=True).get_future()
        return done, float(future.wait()[0][0])

    assert pool.run(work) == [(True, 25.0)] * 5


def test_tensors_of_a_call_that_is_over_are_held_by_their_owner_alone(pool):
    """However slow the engine's thread goes on: memory that is let go of is free at once."""

    class Slow(threading.Condition):
        def __exit__(self, *error):
            super().__exit__(*error)
            time.sleep(0.2 if threading.current_thread().name == "shm" else 0.0)

    def work(rank, world_size):
        alive = []
        with planted(threading, "Condition", lambda _: Slow):
            group = dist.new_group(range(world_size))
        for with_future in (False, True):
            x = torch.ones(5)
            seen, handle = weakref.ref(x), dist.all_reduce(x, group=group, async_op=True)
            future = handle.get_future() if with_future else None
            while not handle.is_completed():
                time.sleep(0.01)
            handle.wait()
            del x, handle, future
            alive.append(seen() is not None)
            dist.barrier()
        return alive

    assert pool.run(work) == [[False, False]] * 5


def test_memory_is_freed_where_it_can_be_seen(pool):
    """An input that its caller has let go of lives as long as the handle: the engine's thread never frees one."""

    def work(rank, world_size):
        out, size = torch.empty(1000), 4 * 1000 * world_size
        with watched.allocations() as events:
            for _ in range(20):
                handle = dist.reduce_scatter_tensor(out, torch.ones(1000 * world_size), async_op=True)
                while not handle.is_completed():
                    time.sleep(0.001)
                handle.wait()
                del handle
        return sum(event.bytes for event in events if abs(event.bytes) == size)

    assert pool.run(work) == [0] * 5


def test_threads_of_one_rank_may_call_beside_each_other(pool):
    def work(rank, world_size):
        a, b = group_of((0, 1, 2, 3, 4), None), group_of((0, 1, 2, 3, 4), "shm")
        totals = {}

        def sum_up(name, group):
            for _ in range(20):
                x = torch.ones(50_000)
                dist.all_reduce(x, group=group)
            totals[name] = float(x[-1])

        threads = [threading.Thread(target=sum_up, args=item) for item in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return totals

    assert pool.run(work) == [{"a": 5.0, "b": 5.0}] * 5


@pytest.fixture(scope="module")
def eight():
    with Ranks(8, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


def looks_while_waiting(rank, world_size, bug=lambda right: right) -> int:
    """How often this rank looks whether it may go on while all wait a second for rank 0."""
    looks = []

    def counted(right):
        wait = bug(right)
        return lambda *args: looks.append(1) or wait(*args)

    dist.barrier()
    with planted(transport.semaphores, "wait", counted):
        if rank == 0:
            time.sleep(1.0)
        dist.barrier()
    return len(looks)


def test_eight_waiting_ranks_leave_the_cores_to_those_who_work(eight):
    assert max(eight.run(looks_while_waiting)) < 100  # about 12


def test_mutant_that_spins_while_it_waits_is_noticed(eight):
    # about 100,000, and fewer where cores are busy
    assert max(eight.run(looks_while_waiting, lambda right: lambda semaphore, seconds: False)) > 1000


def test_eight_ranks_go_on_together_however_few_cores_there_are(eight):
    """Each has its turn: sums, messages around the ring and broadcasts from everybody, in which all need all."""

    def work(rank, world_size):
        right, left, before = (rank + 1) % world_size, (rank - 1) % world_size, time.process_time()
        for turn in range(25):
            total, got, told = torch.full((9,), rank + turn), torch.empty(9), torch.full((9,), float(rank))
            dist.all_reduce(total)
            sending = dist.isend(torch.full((9,), float(rank)), right)
            dist.recv(got, left)
            sending.wait()
            dist.broadcast(told, turn % world_size)
            assert total.eq(28 + 8 * turn).all() and got.eq(left).all() and told.eq(turn % world_size).all()
        return time.process_time() - before

    assert max(eight.run(work)) < 1.0  # of a processor; nobody spends his turn on looking whether it has come


def test_what_it_cannot_do_it_says(pool):
    def work(rank, world_size):
        def refused(call):
            try:
                call()
            except (ValueError, RuntimeError) as error:
                return str(error)
            return ""

        x = torch.ones(3)
        return [
            refused(lambda: dist.isend(x, (rank + 1) % 5, tag=3)),
            refused(lambda: dist.recv(x)),
            refused(lambda: dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2.0))),
            refused(lambda: dist.all_gather_single(torch.ones(7), x)),
        ]

    tag, source, how, rows = pool.run(work)[0]
    assert "tag=3" in tag and "Name the source" in source and "PREMUL_SUM" in how and "7 rows" in rows


def a_group(patience=60):
    """Of all three ranks, for one test: after a fault it is of no use."""
    return dist.new_group(timeout=timedelta(seconds=patience))


def caught(call) -> tuple[str, float]:
    """What a call raises, and how long it took."""
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.fixture(scope="module")
def three():
    with Ranks(RANKS, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_edge_is_right(check, three):
    assert three.run(examine, check) == [[]] * RANKS


def test_a_late_rank_is_named(three):
    def work(rank, world_size):
        group = a_group(patience=1)
        if rank == 1:
            time.sleep(2)
            return "", 0
        return caught(lambda: dist.all_reduce(torch.ones(3), group=group))

    (text, _), _, (other, _) = three.run(work)
    assert "rank 1 has not come, while rank 0 waited for it in all_reduce" in text
    assert "rank 1 has not come" in other or "rank 0" in other


def test_a_wait_ends_when_it_was_asked_to_and_the_call_goes_on(three):
    def work(rank, world_size):
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["rank 0 has lost its patience"])
        total = torch.ones(3)
        handle = dist.all_reduce(total, async_op=True)
        text = ""
        if rank == 0:
            text, _ = caught(lambda: handle.wait(timedelta(seconds=0.2)))
            store.set("rank 0 has lost its patience", text)
        handle.wait()
        assert handle.is_success()
        return text, total.tolist()

    (text, _), *_ = found = three.run(work)
    assert "rank 0 waited for rank" in text and "in all_reduce for 0.2 s" in text
    assert [total for *_, total in found] == [[3.0] * 3] * 3


def test_a_rank_that_leaves_is_named_at_once(three):
    def work(rank, world_size):
        group = a_group()
        if rank == 2:
            dist.destroy_process_group(group)
            return "", 0
        return caught(lambda: dist.barrier(group))

    (text, seconds), *_ = three.run(work)
    assert "rank 2 has left the group, while rank 0 waited for it in barrier" in text
    assert seconds < 10  # the group waits 60


def test_calls_that_do_not_fit_are_named_with_both_sides(three):
    def work(rank, world_size):
        x, group = torch.ones(4 + (rank == 1)), a_group()
        text, _ = caught(
            lambda: dist.broadcast(x, 0, group) if rank == 2 else dist.all_reduce(x, group=group)
        )
        again, _ = caught(lambda: dist.barrier(group)) if text else ("", 0)
        return text, again

    found = three.run(work)
    both = "rank 0 and rank 1 made calls that do not match: all_reduce SUM float32 expects 16 bytes but received 20"
    assert both in found[0][0] and found[0][0] == found[0][1]
    other = "broadcast float32 of root 0 expects 16 bytes but received 16 bytes of all_reduce SUM float32"
    assert other in found[2][0]


def rank_0_of(ranks: int):
    """The memory of a group whose other ranks are played by the test, and the engine of its rank 0."""
    descriptor = os.memfd_create("test")
    memory = Memory(descriptor, ranks)
    os.close(descriptor)
    memory.prepare(bytes(32))
    for rank in range(ranks):
        memory.sign(rank)
    engine = ProgressEngine(memory, 0, [f"rank {r}" for r in range(ranks)], 60, ranks)
    engine._thread = threading.current_thread()  # nobody drives beside the test
    return memory, engine


def hears_from(memory, *peers):
    """The steps of a call that needs a delivery of each peer in turn."""
    for peer in peers:
        yield Need(memory.pair(peer, 0, messages=False).full, peer)


def come(call):
    """What a move gives whose needs are there already."""
    try:
        while True:
            assert transport.semaphores.take(next(call).semaphore)
    except StopIteration as end:
        return end.value


def test_every_part_of_the_memory_has_a_place_of_its_own_and_every_semaphore_is_initialised():
    descriptor, prepared, ranks = os.memfd_create("test"), [], range(3)
    memory = Memory(descriptor, len(ranks))
    os.close(descriptor)
    with planted(transport.semaphores, "prepare", lambda right: prepared.append):
        memory.prepare(bytes(TOKEN))
    pairs = [memory.pair(w, r, messages) for w in ranks for r in ranks for messages in (False, True)]
    assert {*prepared} == {*map(memory.wakeup, ranks), *(at for pair in pairs for at in pair[:2])}
    slots = [slot for w in ranks for r in (None, *ranks) for slot in memory.slots(w, r)]
    parts = [(0, TOKEN), *((slot.data_ptr() - memory.base, len(slot)) for slot in slots)]
    parts += [(at - memory.base, transport.semaphores.SIZE) for at in prepared]
    parts += [part for pair in pairs for part in ((pair.wanted, WORD), (pair.notes, SLOTS * NOTE))]
    parts = [*sorted(parts), (memory.size, 0)]
    assert parts[0] == (0, TOKEN) and all(at + size <= after for (at, size), (after, _) in pairwise(parts))


def test_a_driver_sleeps_where_nobody_has_woken_it_and_one_look_answers_all_who_have():
    memory, engine = rank_0_of(2)
    bell, slept, engine._spin = memory.wakeup(0), [], 0.0
    with planted(transport.semaphores, "wait", lambda right: lambda *args: slept.append(args)):
        engine._sleep()
        assert slept == [(bell, CHECK_EVERY)]
        for _ in range(2):
            transport.semaphores.post(bell)
        engine._sleep()
    assert len(slept) == 1 and not transport.semaphores.take(bell)


def test_a_large_sum_tells_how_large_it_is():
    """What a rank that calls it with another length compares."""
    memory, _ = rank_0_of(3)
    next(all_reduce(StreamEnds(memory, 0), 3, torch.ones(SMALL), torch.add))
    come(Incoming(memory, 0, 1, messages=False).next(4 * SMALL, kind=3))


def test_a_writer_asks_to_be_woken_only_while_it_waits():
    """A reader that still wakes it later takes a core from those who work."""
    memory, _ = rank_0_of(2)
    out, coming = Outgoing(memory, 0), Incoming(memory, 0, 1, messages=False)
    for _ in range(SLOTS):
        come(out.claim())
        out.deliver([1], 8, kind=3)
    asks = lambda: memory.raw[memory.pair(0, 1, messages=False).wanted]
    waiting = out.claim()
    need = next(waiting)
    assert asks() and not transport.semaphores.take(need.semaphore)
    come(coming.next(8, kind=3))
    coming.release()
    assert transport.semaphores.take(need.semaphore)
    come(waiting)
    assert not asks()


def test_views_of_a_slot_are_kept_up_to_a_number():
    slot, number = Slot(torch.zeros(4 * VIEWS + 8, dtype=torch.uint8)), torch.zeros(1)
    first = weakref.ref(slot.like(number))
    assert slot.like(number) is first()
    for place in range(4, 4 * VIEWS + 8, 4):
        slot.like(number, place)
    assert first() is None


def test_a_rank_that_is_gone_is_missed_however_often_the_bell_rings():
    memory, engine = rank_0_of(2)
    memory.leave(1)
    done = threading.Event()

    def ring():
        until = time.monotonic() + 5
        while not done.wait(0.01) and time.monotonic() < until:
            transport.semaphores.post(memory.wakeup(0))

    ringing = threading.Thread(target=ring)
    ringing.start()
    text, seconds = caught(lambda: engine.run("lane", Request("barrier", hears_from(memory, 1))))
    done.set()
    ringing.join()
    assert "rank 1 has left the group" in text and seconds < 4


def test_who_has_delivered_and_left_is_not_taken_for_who_is_late():
    memory, engine = rank_0_of(3)
    call = Request("barrier", hears_from(memory, 1, 2))
    engine.begin("lane", call)
    transport.semaphores.post(memory.pair(1, 0, messages=False).full)
    memory.leave(1)
    engine._check_peers()
    assert call.error is None and call.need.peer == 2
    memory.leave(2)
    engine._check_peers()
    assert str(call.error).startswith("rank 2 has left the group, while rank 0 waited for it in barrier")


def test_a_process_lives_until_it_has_ended_whatever_its_name():
    renamed = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) Z 1 (', 0, 0, 0); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", renamed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    assert transport.memory._lives(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not transport.memory._lives(child.pid)  # it has ended, and nobody has asked how
    child.communicate()
    assert not transport.memory._lives(child.pid)


def test_patience_counts_from_the_last_progress():
    memory, engine = rank_0_of(3)
    call = Request("barrier", hears_from(memory, 1, 2))
    engine.begin("lane", call)
    call.since -= 59
    transport.semaphores.post(memory.pair(1, 0, messages=False).full)
    engine._check_peers()
    call.since -= 59
    engine._check_peers()
    assert call.error is None
    call.since -= 2
    engine._check_peers()
    assert "rank 2 has not come" in str(call.error)


def test_a_fault_that_a_look_around_finds_ends_the_calls_of_other_lanes_too():
    def fails():
        yield from hears_from(memory, 1)
        raise ValueError("no room")

    memory, engine = rank_0_of(3)
    calls = [Request("recv", fails()), Request("recv", hears_from(memory, 2))]
    for lane, call in enumerate(calls):
        engine.begin(lane, call)
    transport.semaphores.post(memory.pair(1, 0, messages=False).full)
    engine._check_peers()
    assert [str(call.error) for call in calls] == ["no room"] * 2 and all(call.done for call in calls)


def test_after_a_fault_no_other_call_goes_on():
    memory, engine = rank_0_of(2)
    pairs, went_on = [memory.pair(1, 0, messages) for messages in (False, True)], []

    def fails():
        yield Need(pairs[0].full, 1)
        raise ValueError("the fault")

    def follows():
        yield Need(pairs[1].full, 1)
        went_on.append(True)

    calls = [Request("first", fails()), Request("second", follows())]
    for lane, call in enumerate(calls):
        engine.begin(lane, call)
    for pair in pairs:  # both could go on now
        transport.semaphores.post(pair.full)
    for call in calls:
        with pytest.raises(ValueError, match="the fault"):
            engine.wait(call)
    assert not went_on


def test_nothing_is_left_over():
    def holdings(rank, world_size):
        for _ in range(3):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(300_000), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
        del group
        for thread in threading.enumerate():  # each of a group that is gone ends by itself
            if thread.name == "shm":
                thread.join(20)
        alive = [thread.name for thread in threading.enumerate() if thread.name == "shm"]
        opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        mapped = Path("/proc/self/maps").read_text().splitlines()
        named = [file for file in (*opened, *mapped) if "/dev/shm/" in file]
        return sum("memfd" in file for file in opened), len(alive), named

    with Ranks(2, echo=False, backend="shm") as ranks:
        # the world's own memory; no thread, and nothing that has a name in /dev/shm
        assert ranks.run(holdings) == [(1, 0, [])] * 2
