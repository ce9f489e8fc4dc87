"""comm.py on live ranks: exact both ways, exact in bytes and messages, loud about calls that do not fit."""

import inspect
import itertools
import queue
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from comm_checks import CASES, CHECKS, integers
from planting import planted

from gpt2lab import RankFailed, Ranks, kept
from gpt2lab.ranks import buffers, call, comm, paced
from gpt2lab.ranks.mesh import Axis, Mesh
from gpt2lab.transport.pretended import one_of

pytestmark = pytest.mark.live

LINES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 2, 4), (1, 4)]


@pytest.fixture(scope="module")
def pool():
    with Ranks(5, echo=False, timeout=60) as ranks:
        yield ranks


def axes(rank, world_size) -> list[Axis]:
    """The axes that this rank is on: 1 to 5 ranks, neighbours or not. Groups are made once a rank."""
    if "axes" not in kept:
        mesh = Mesh(dp=world_size)
        kept["axes"] = [axis for line in LINES if (axis := mesh.axis(f"line {line}", [line])) is not None]
    return kept["axes"]


@pytest.mark.parametrize("name", CASES)
def test_every_primitive_is_exact_both_ways_and_counted_exactly(pool, name):
    def work(rank, world_size):
        for axis in axes(rank, world_size):
            for check in CHECKS:
                check(name, axis)
        return len(axes(rank, world_size))

    assert pool.run(work) == [sum(r in line for line in LINES) for r in range(5)]


def test_reductions_and_asynchronous_calls_give_what_blocking_ones_give(pool):
    def work(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        n = axis.size
        x = integers(6 * n, seed=axis.rank)
        everyone = [integers(6 * n, seed=r) for r in range(n)]
        for op, serial in (("sum", sum), ("max", lambda xs: torch.stack(xs).amax(0))):
            handle = comm.all_reduce(x, axis, op, async_op=True)
            assert torch.equal(handle.wait(), serial(everyone))
            assert handle.wait() is handle.wait()  # a second wait gives the same and logs nothing
            assert torch.equal(comm.all_reduce(x, axis, op), serial(everyone))
        assert torch.equal(comm.all_reduce(x, axis, "min"), torch.stack(everyone).amin(0))
        assert torch.equal(x, everyone[axis.rank])
        flat = comm.gather_flat(x, axis, async_op=True).wait()
        assert torch.equal(flat, torch.cat(everyone))
        piece = comm.reduce_scatter_flat(x, axis, async_op=True).wait()
        assert torch.equal(piece, sum(everyone).chunk(n)[axis.rank])
        assert comm.gather_objects({"place": axis.rank}, axis) == [{"place": r} for r in range(n)]
        own = x.clone()
        assert comm.all_reduce(own, axis, own=True).data_ptr() == own.data_ptr()

    pool.run(work)


ASYNCHRONOUS = {  # x (3, place + 2), the axis, whether to go on beside it
    "all_reduce": lambda x, a, beside: comm.all_reduce(x[:, :2], a, async_op=beside),
    "gather_flat": lambda x, a, beside: comm.gather_flat(x[0, :2], a, async_op=beside),
    "reduce_scatter_flat": lambda x, a, beside: comm.reduce_scatter_flat(
        x[0, 0].repeat(2 * a.size), a, async_op=beside
    ),
    "all_gather": lambda x, a, beside: comm.all_gather(x, a, 1, widths(a), async_op=beside),
    "reduce_scatter": lambda x, a, beside: comm.reduce_scatter(x[:, :2], a, async_op=beside),
    "broadcast": lambda x, a, beside: comm.broadcast(x[:, :2], a, a.size - 1, async_op=beside),
    "reduce": lambda x, a, beside: comm.reduce(x[:, :2], a, async_op=beside),
    "scatter": lambda x, a, beside: comm.scatter(x[:, :2], a, 0, a.size - 1, async_op=beside),
    "gather": lambda x, a, beside: comm.gather(x, a, 1, 0, widths(a), async_op=beside),
    "all_to_all": lambda x, a, beside: comm.all_to_all(
        [x] * a.size, a, [(3, width) for width in widths(a)], async_op=beside
    ),
    "barrier": lambda x, a, beside: comm.barrier(a, async_op=beside),
    "shift": lambda x, a, beside: comm.ring_shift(x, a, 1, (3, widths(a)[a.rank - 1]), async_op=beside),
}


ROOTED = {
    "broadcast": comm.broadcast,
    "reduce": comm.reduce,
    "scatter": lambda x, axis, last: comm.scatter(x, axis, 0, last),
    "gather": lambda x, axis, last: comm.gather(x, axis, 0, last),
    "send": lambda x, axis, last: comm.recv(x, axis, 0) if axis.rank else comm.send(x, axis, last),
}


def there_and_back(name, axis, last):
    """What a call gives, the gradient of what it was given, and what both log."""
    x = integers(6, seed=axis.rank).requires_grad_()
    comm.clear_log()
    y = ROOTED[name](x, axis, last)
    y.backward(torch.ones_like(y))
    return y.tolist(), x.grad.tolist(), [(e.op, e.bytes, e.messages, e.targets) for e in comm.log]


@pytest.mark.parametrize("name", ROOTED)
def test_the_last_position_is_also_minus_one_as_in_a_list(pool, name):
    def work(rank, world_size):
        for axis in (axis for axis in axes(rank, world_size) if axis.size == 2):
            assert there_and_back(name, axis, -1) == there_and_back(name, axis, 1)

    pool.run(work)


GIVEN = {"dim": 1, "root": 1, "to": 1, "source": 1, "by": 1, "shape": (4, 4), "shapes": [(4, 2), (4, 2)]}
BOTH_WAYS = [
    n
    for n, f in vars(comm).items()
    if hasattr(f, "__code__") and f.__code__.co_qualname.startswith("adjoint.")
]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_call_and_its_way_back_take_every_argument_by_the_name_that_help_shows(name):
    names = [*inspect.signature(getattr(comm, name)).parameters]
    given = GIVEN | {
        "sizes": [4, 4] if "gather" in name else [2, 2],
        "parts": [torch.ones(4, 2).requires_grad_()] * 2,
    }
    given |= {n: torch.ones(4, 4).requires_grad_() for n in ("x", "like")}
    with one_of(0, 2):
        y = getattr(comm, name)(**{n: given[n] for n in names if n != "axis"}, axis=Mesh(dp=2)["dp"])
        sum(part.sum() for part in (y if isinstance(y, list) else [y])).backward()
    x = given[names[0]]
    assert (x[0] if isinstance(x, list) else x).grad is not None


def test_a_message_has_one_group_on_both_ends_also_where_one_counts_from_the_end():
    axis = Axis("pp", (0, 1, 2), 0, up="up", down="down")
    for source, to in itertools.permutations(range(3), 2):
        assert {axis.way(s, t) for s in (source, source - 3) for t in (to, to - 3)} == {axis.way(source, to)}
    assert (axis.way(0, -1), axis.way(-1, 0)) == ("up", "down")


def widths(axis):
    return [place + 2 for place in range(axis.size)]


def logged(call):
    """What a call gives, as a list of tensors, and what it logs."""
    comm.clear_log()
    result = call()
    events = [(e.op, e.axis, e.bytes, e.messages) for e in comm.log]
    return result if isinstance(result, list) else [] if result is None else [result], sorted(events)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_calls_give_and_log_what_blocking_ones_do(pool, name):
    def work(rank, world_size):
        for axis in axes(rank, world_size):
            x = integers(3, axis.rank + 2, seed=axis.rank)
            blocking, events = logged(lambda x=x, axis=axis: ASYNCHRONOUS[name](x, axis, False))
            handle = ASYNCHRONOUS[name](x, axis, True)
            later, same_events = logged(handle.wait)
            again, no_events = logged(handle.wait)  # a second wait gives the same and logs nothing
            assert same_events == events and no_events == [] and bool(events) == (axis.size > 1)
            assert len(later) == len(blocking) and all(a is b for a, b in zip(again, later, strict=True))
            if name != "reduce" or axis.rank == 0:  # elsewhere what a reduce leaves means nothing
                assert all(map(torch.equal, later, blocking))

    pool.run(work)


def goes_on_before_the_last_one_comes(rank, world_size, name):
    """The last rank makes its call only after a word to all the others, who wait for it beside theirs."""
    axis = Mesh(dp=world_size)["dp"]
    x, last = integers(3, axis.rank + 2, seed=axis.rank), axis.size - 1
    if axis.rank < last:
        handle = ASYNCHRONOUS[name](x, axis, True)
    if name == "shift":  # words of another kind than the call's, so that they do not queue behind it
        comm.barrier(axis)
    elif axis.rank < last:
        comm.recv(torch.empty(1), axis, last)
    else:
        for peer in range(last):
            comm.send(torch.ones(1), axis, peer)
    if axis.rank == last:
        handle = ASYNCHRONOUS[name](x, axis, True)
    handle.wait()


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_call_returns_before_its_peers_have_come(pool, name):
    pool.run(goes_on_before_the_last_one_comes, name)


def test_an_asynchronous_call_that_blocks_is_noticed():
    def work(rank, world_size):
        blocks = lambda right: lambda *args, async_op=False: comm.finished(right(*args), async_op)
        with planted(comm, "gather", blocks):
            goes_on_before_the_last_one_comes(rank, world_size, "gather")

    with pytest.raises(RankFailed) as info, Ranks(2, echo=False, timeout=5) as two:
        two.run(work)
    assert info.value.ename in ("Deadlock", "TimeoutError")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_other_types_pass_unchanged(pool, dtype):
    def work(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        x = torch.arange(5, dtype=dtype) + axis.rank
        total = comm.all_reduce(x, axis)
        assert total.dtype == dtype
        assert torch.equal(total, sum(torch.arange(5, dtype=dtype) + r for r in range(axis.size)))
        assert torch.equal(comm.broadcast(x, axis, 0), torch.arange(5, dtype=dtype))

    pool.run(work)


def test_strided_tensors_are_handled_not_misread(pool):
    calls = (
        comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.ring_shift,
        lambda x, axis: comm.broadcast(x, axis, 1), lambda x, axis: comm.reduce(x, axis, 2),
    )  # fmt: skip

    def work(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        whole = integers(4, 6, seed=rank)
        for view in (whole.T, whole[:, ::2], whole[1:3, 1:5], whole.flip(0), whole[0].expand(3, 6)):
            for give in calls:
                found = give(view, axis)
                assert torch.equal(found, give(view.contiguous(), axis)) and found.is_contiguous()
        with pytest.raises(ValueError, match="contiguous buffer"):
            comm.all_reduce(whole.T, axis, own=True)

    pool.run(work)


def test_a_shift_all_the_way_round_gives_memory_of_its_own(pool):
    def work(rank, world_size):
        x = torch.ones(3)
        comm.ring_shift(x, Mesh(dp=world_size)["dp"], by=world_size).zero_()
        return x.sum().item()

    assert pool.run(work) == [3.0] * 5


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def reduced_with_a_nan(rank, world_size, sign=1.0):
    """Where a NaN of one rank is not a NaN here after an all-reduce, or its neighbours are not the right numbers."""
    axis = Mesh(dp=world_size)["dp"]
    wrong = []
    for culprit in range(world_size):
        for dtype in FLOATS:
            x = torch.tensor([-1.0, 2.0, -torch.inf, 0.0], dtype=dtype) * (rank + 1)
            x[1] = sign * torch.nan if rank == culprit else torch.inf
            top = [-1.0, torch.nan, -torch.inf, 0.0]
            for op, want in (("max", top), ("min", [-world_size, *top[1:]]), ("sum", None)):
                own = comm.all_reduce(x.clone(), axis, op, own=True)
                later = comm.all_reduce(x, axis, op, async_op=True).wait()
                want = want or [-sum(range(world_size + 1)), *top[1:]]
                right = torch.tensor(want, dtype=dtype)
                if not all(
                    torch.equal(got.nan_to_num(7), right.nan_to_num(7))
                    and got.isnan().tolist() == [0, 1, 0, 0]
                    for got in (own, later, comm.all_reduce(x, axis, op))
                ):
                    wrong.append((culprit, dtype, op))
    return wrong


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_of_any_rank_is_a_nan_on_every_rank(pool, sign):
    assert pool.run(reduced_with_a_nan, sign) == [[]] * 5


NAN_MUTANTS = {
    "a NaN counts as infinity": lambda x, op: x.nan_to_num(torch.inf if op == "max" else -torch.inf),
    "a NaN stays on its side": lambda x, op: -x.nan_to_num(torch.inf if op == "max" else -torch.inf),
}


@pytest.mark.parametrize("bug", NAN_MUTANTS)
def test_mutant_of_nan_in_a_maximum_is_noticed(pool, bug):
    make = NAN_MUTANTS[bug]

    def work(rank, world_size):
        with planted(buffers, "ranked", lambda right: lambda x, op: right(make(x, op), op)):
            return reduced_with_a_nan(rank, world_size)

    assert all(pool.run(work))


def test_a_maximum_counts_the_bytes_that_travel(pool):
    def work(rank, world_size):
        axis, found = Mesh(dp=world_size)["dp"], []
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int32):
            comm.clear_log()
            comm.all_reduce(torch.ones(10, dtype=dtype), axis, "max")
            found.append(comm.log[-1].bytes)
        return found

    each = 2 * (5 - 1) * 2  # elements that leave a rank: chunks of 2, twice to 4 others
    assert pool.run(work) == [[8 * each, 4 * each, 4 * each, 4 * each]] * 5


def test_what_autograd_would_lose_and_what_cannot_be_is_refused(pool):
    def work(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        x = torch.ones(4, requires_grad=True)
        for bad, words in [
            (lambda: comm.all_reduce(x, axis), "no backward of its own. Use copy_to"),
            (lambda: comm.isend(x, axis, 0), "isend has no backward"),
            (lambda: comm.all_reduce(x.detach(), axis, "mean"), "'mean' is not one of sum, max, min"),
            (lambda: comm.all_gather(x, axis, 0, [4, 4]), "rank . of 5 holds 4"),
            (lambda: comm.reduce_scatter(x, axis, 0, [1, 1, 1, 1, 1]), "do not cut length 4 into 5 parts"),
            (lambda: comm.all_to_all([x], axis), "1 parts for 5 ranks"),
            (lambda: comm.send(x, axis, rank), "is this rank itself"),
            (lambda: comm.reduce_scatter_flat(x.detach(), axis), "a multiple of 5"),
        ]:
            with pytest.raises(ValueError, match=words):
                bad()

    pool.run(work)


# Two ranks that do not fit together


def differently(rank, world_size, first, second):
    """Rank 0 does one thing, the others another."""
    axis = Mesh(dp=world_size)["dp"]
    comm.barrier(axis)
    (first if rank == 0 else second)(axis)


ONES = torch.ones(6)
MISFITS = {
    "shape": (lambda a: comm.all_reduce(ONES, a), lambda a: comm.all_reduce(ONES[:5], a)),
    "dtype": (lambda a: comm.all_reduce(ONES, a), lambda a: comm.all_reduce(ONES.double(), a)),
    "dtype of a number": (
        lambda a: comm.all_reduce(ONES[0], a),
        lambda a: comm.all_reduce(ONES[0].double(), a),
    ),
    "root of a number": (lambda a: comm.broadcast(ONES[0], a, 0), lambda a: comm.broadcast(ONES[0], a, 1)),
    "message of a number": (lambda a: comm.send(ONES[0], a, 1), lambda a: comm.recv(ONES[:3], a, 0)),
    "reduce operation": (lambda a: comm.all_reduce(ONES, a), lambda a: comm.all_reduce(ONES, a, "max")),
    "operation": (lambda a: comm.all_reduce(ONES, a), lambda a: comm.broadcast(ONES, a)),
    "root": (lambda a: comm.broadcast(ONES, a, 0), lambda a: comm.broadcast(ONES, a, 1)),
    "order": (
        lambda a: (comm.all_gather(ONES, a), comm.all_reduce(ONES, a)),
        lambda a: (comm.all_reduce(ONES, a), comm.all_gather(ONES, a)),
    ),
    "sizes": (lambda a: comm.all_gather(ONES, a, 0, [6, 6]), lambda a: comm.all_gather(ONES[:4], a)),
    "parts": (
        lambda a: comm.all_to_all([ONES, ONES], a),
        lambda a: comm.all_to_all([ONES[:2], ONES[:4]], a, [(6,), (4,)]),
    ),
    "message": (lambda a: comm.send(ONES, a, 1), lambda a: comm.recv(ONES[:3], a, 0)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_mismatch_is_named_at_once_with_both_sides(what):
    start = time.monotonic()
    with pytest.raises(RankFailed) as info, Ranks(2, echo=False, timeout=600) as two:
        two.run(differently, *MISFITS[what])
    assert time.monotonic() - start < 300  # at once, not after the timeout
    error = str(info.value)
    assert info.value.ename == "Mismatch" and "Two ranks made calls that do not match" in error
    assert error.count("#") >= 2 and error.count("test_comm.py") >= 2
    assert "  rank 0 call" in error and "  rank 1 call" in error


# Paced links


def two_messages(rank, axis, to) -> tuple[float, float]:
    """When a rank began and ended while rank 0 sends two messages of 10 kB to another; all ranks have one clock."""
    start = time.perf_counter()
    if rank == 0:
        for handle in [comm.isend(torch.ones(2500), axis, to) for _ in range(2)]:
            handle.wait()
    elif rank == to:
        for _ in range(2):
            comm.recv(torch.empty(2500), axis, 0)
    return start, time.perf_counter()


def test_messages_that_wait_for_their_time_keep_no_process_alive(monkeypatch):
    threads = []
    thread = lambda **how: threads.append(how) or SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(paced, "threading", SimpleNamespace(Thread=thread))
    paced._Queue()
    assert [how["daemon"] for how in threads] == [True]


def test_paced_links_hold_messages_back_by_pair():
    table = paced.Network(paced.Link(0.4, 1e6), inside=paced.Link(0.001, 1e9), node=2)

    def work(rank, world_size):
        axis, found = Mesh(dp=world_size)["dp"], {}
        with paced.use(table):
            for to in (1, 2):
                comm.barrier(axis)
                found[to] = [two_messages(rank, axis, to) for _ in range(5)]
        return found

    with Ranks(4, echo=False) as ranks:
        sender, _, receiver, _ = ranks.run(work)
    # two messages of 10 kB pass one after the other; the latency of the second overlaps the first
    assert min(end - start for start, end in sender[2]) >= 0.4 + 2 * 0.01
    # inside the node a message need not wait for the latency outside
    assert min(end - start for start, end in sender[1]) < 0.4
    arrived = [end - start for (start, _), (_, end) in zip(sender[2], receiver[2], strict=True)]
    assert min(arrived) >= 0.4 + 2 * 0.01


def test_a_paced_collective_takes_the_rings_time_and_overlaps_with_work():
    link = paced.Link(0.05, 1e9)

    def work(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        with paced.use(link):
            comm.clear_log()
            comm.all_reduce(ONES, axis)
            start = time.perf_counter()
            handle = comm.all_reduce(ONES, axis, async_op=True)
            time.sleep(0.2)
            handle.wait()
            return comm.log[0].end - comm.log[0].start, comm.log[1].end - start

    with Ranks(2, echo=False) as ranks:
        found = ranks.run(work)
    for blocking, hidden in found:
        assert blocking >= 2 * (2 - 1) * 0.05
        assert hidden >= 2 * (2 - 1) * 0.05


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [("3,0 2,0", True), ("3,0 1,0", False), ("2,0 2,0", False), ("3,9 2,9", True), ("0,2 0,3", False)],
)
def test_all_to_alls_match_where_both_ways_do(theirs, fits):
    """Whoever comes second sees it: rank 0 sends 2 numbers to rank 1, and expects 3 of it."""
    assert call._fit("all_to_all float32 0,2 0,3", f"all_to_all float32 {theirs}", 0, 1) == fits


def test_collectives_of_a_paced_network_follow_each_other(monkeypatch):
    monkeypatch.setattr(paced, "_free_at", 0.0)
    with paced.use(paced.Link(0.25, float("inf"))):
        ends = [paced.delay((0, 1), 0, really, 0, 1) for really in (100.0, 100.0, 200.0)]
    assert ends == [100.25, 100.5, 200.25]


def test_the_latency_of_a_paced_message_overlaps_the_bytes_of_the_next():
    """Each of 100 bytes at 1,000 a second: due a tenth of a second after each other, whatever the latency."""
    messages = paced._Queue.__new__(paced._Queue)  # without the thread that starts them
    messages.free_at, messages.waiting = 0.0, queue.Queue()
    for _ in range(2):
        messages.put(paced.Link(0.5, 1000), 100, None)
    first, second = (messages.waiting.get()[0] for _ in range(2))
    assert second - first == pytest.approx(0.1)


def test_no_message_starts_before_an_earlier_paced_one(monkeypatch):
    monkeypatch.setattr(paced, "_queues", {})
    started, works = [], {}

    def deliver(name):
        work = SimpleNamespace(wait=lambda: None)
        works[name] = paced.deliver(0, 1, 8, lambda: started.append(name) or work)

    with paced.use(paced.Link(0.2, float("inf"))):
        deliver("paced")
    deliver("after it")
    assert not started
    works["after it"].wait()
    deliver("at once")
    assert started == ["paced", "after it", "at once"]


def test_a_handle_keeps_nothing_of_what_is_sent():
    """The backend does, as long as it needs it."""
    x = torch.ones(4)
    sent = weakref.ref(x)
    starts = call.Call("all_reduce", Axis("dp", (0, 1), 0), "", lambda x=x, **how: SimpleNamespace())
    handle = call.perform(starts, async_op=True)
    del x
    assert sent() is None and handle.waits_for().startswith("all_reduce")
