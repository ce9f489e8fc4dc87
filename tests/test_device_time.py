"""The log says when a call was over on a GPU, without waiting for it: on a GPU that exists only here."""

import pickle
import time
from collections import Counter, deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from planting import rewritten

from gpt2lab.machine import device_time
from gpt2lab.machine.device_time import DeviceTime
from gpt2lab.processes import status_board
from gpt2lab.ranks import call, paced, trace, traffic, unfinished
from gpt2lab.ranks.call import Call, Handle, perform
from gpt2lab.ranks.mesh import Axis

BEHIND = 1000.0  # seconds that the GPU's clock is behind the host's
AXIS = Axis("dp", (0, 1), 0)


class Stream:
    """Work in order, all of it done at `until`, a time of the host."""

    def __init__(self, until=0.0, priority=0):
        self.until = until if priority else float("inf")  # of the pool that communicators use


class GPU:
    """A host whose clock is set by hand, and a GPU that works beside it."""

    def __init__(self):
        self.now, self.current, self.waits = 0.0, Stream(priority=-1), []

    def event(self, enable_timing=False):
        """One of CUDA's events: recorded behind what a stream holds now, and not waited for before it is read."""
        assert enable_timing
        this = SimpleNamespace(at=None, over=False)

        def record(stream=None):
            this.at = max(self.now, (stream or self.current).until)

        def synchronize():
            assert this.at < float("inf"), "the host waits for a message that it has not sent yet"
            self.now, this.over = max(self.now, this.at), True
            self.waits.append(this.at)

        def elapsed_time(other):
            assert this.over and other.over, "an event that has not come has no time"
            return 1e3 * ((other.at - BEHIND) - (this.at - BEHIND))

        this.record, this.synchronize, this.elapsed_time = record, synchronize, elapsed_time
        return this

    def work(self, until: float):
        """The Work of a call that is over at `until`: who waits for it waits on the GPU, and the host goes on."""

        def wait():
            self.current.until = max(self.current.until, until)

        def no_callback():
            pytest.fail("a callback runs on a stream that a communicator may use")

        future = SimpleNamespace(add_done_callback=lambda callback: no_callback())
        return SimpleNamespace(wait=wait, get_future=lambda: future, is_completed=lambda: self.now >= until)


@pytest.fixture
def gpu(monkeypatch):
    """The GPU in the place of CUDA's, and its host's clock in the place of ours."""
    made = GPU()
    clock = SimpleNamespace(perf_counter=lambda: made.now, sleep=time.sleep)
    for module in (call, device_time):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(device_time, "_zero", None)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(unfinished, "calls", deque())
    traffic.clear_log(), trace.clear()
    yield made
    traffic.clear_log(), trace.clear()


ON_GPU = SimpleNamespace(is_cuda=True)


def summed(start, result=ON_GPU) -> Call:
    """A sum as torch makes it: only with async_op it gives its Work, else it waits for it."""
    begin = lambda group, async_op: start() if async_op else start().wait()
    return Call("all_reduce", AXIS, "", begin, result, cost=(8, 1))


def message(start, result=ON_GPU) -> Call:
    return Call("send", AXIS, "", lambda **_: start(), result, sends=((1, 8),), pair=(0, 1))


def paced_message(start, result=ON_GPU) -> Call:
    """A message that was due at once."""
    return message(lambda: (work := paced._Delayed()).started.set_result(start()) or work, result)


def overlapped(gpu, which=summed, result=ON_GPU) -> float:
    """The end of a call that lasts from 1 to 5 while the GPU computes until 9 and the host goes on at 2."""
    gpu.now, gpu.current.until = 1.0, 9.0
    handle = perform(which(lambda: gpu.work(5.0), result), async_op=True)
    gpu.now = 2.0
    handle.wait()
    assert gpu.now == 2.0 and len(gpu.waits) == 1, "nothing but the first zero was waited for"
    return traffic.log[-1].end


@pytest.mark.parametrize("result", [ON_GPU, [ON_GPU, ON_GPU]], ids=["one", "two"])
@pytest.mark.parametrize("which", [summed, message, paced_message])
def test_a_call_beside_computing_ends_when_the_stream_that_waits_goes_on(gpu, which, result):
    assert overlapped(gpu, which, result) == 9.0


def test_a_call_that_computing_waits_for_ends_when_it_is_over_on_the_gpu(gpu):
    gpu.now = 1.0
    perform(summed(lambda: gpu.work(5.0)))
    assert gpu.now == 1.0 and traffic.log[-1].start == 1.0
    (span,) = trace.spans()
    assert (span.start, span.end, gpu.now) == (1.0, 5.0, 5.0)


class Board:
    """What would be on the status board."""

    def __init__(self, monkeypatch):
        self.shown, self.entries = "", 0
        monkeypatch.setattr(status_board, "enter", self.enter)
        monkeypatch.setattr(status_board, "leave", self.leave)

    def enter(self, op, axis, peers, number, detail, channel, where="", instead=None):
        if instead in (None, self.entries):
            self.shown, self.entries = f"{op} #{number}{' blocked' * bool(channel)}", self.entries + 1
        return self.entries

    def leave(self, entry=None):
        if entry in (None, self.entries):
            self.shown = ""


def test_a_call_that_hangs_on_the_gpu_stays_on_the_board_until_it_is_over(gpu, monkeypatch):
    board = Board(monkeypatch)
    monkeypatch.setattr(call, "_numbers", Counter())
    monkeypatch.setattr(unfinished, "LOOK_EVERY", 0.01)
    perform(summed(lambda: gpu.work(5.0)))
    assert board.shown == "all_reduce #1", "the host goes on, and nothing may count it as blocked"
    perform(summed(lambda: gpu.work(7.0)))
    later = perform(message(lambda: gpu.work(3.0)), async_op=True)
    assert board.shown == "all_reduce #1", "a call that begins does not hide it"
    gpu.now = 6.0
    wait_until(lambda: board.shown == "all_reduce #2")
    gpu.now = 8.0
    wait_until(lambda: board.shown == "")
    later.wait()
    assert board.shown == "" and not unfinished.calls


def test_mutant_that_lets_torch_wait_for_a_call_hides_that_it_hangs(gpu, monkeypatch):
    board = Board(monkeypatch)
    with rewritten(perform, "async_op or on_gpu", "async_op"):
        perform(summed(lambda: gpu.work(5.0)))
    assert board.shown == ""


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_zero_is_taken_anew_and_never_behind_a_message_under_way(gpu):
    gpu.current.until = float("inf")  # a receive, whose sender waits for what this host sends next
    first = DeviceTime()
    gpu.current.until, gpu.now = 0.0, device_time.LASTS + 1
    second = DeviceTime()
    assert gpu.waits == [0.0, device_time.LASTS + 1] and float(second) == device_time.LASTS + 1
    assert first is not second


def test_what_was_read_goes_to_other_processes_as_a_number(gpu):
    gpu.now = 3.0
    assert pickle.loads(pickle.dumps(DeviceTime())) == 3.0
    perform(summed(lambda: gpu.work(5.0)))
    assert pickle.loads(pickle.dumps(traffic.log[-1])).end == 5.0


@contextmanager
def no_gpu(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("nothing on the CPU asks for an event"))
        yield


@pytest.mark.parametrize("result", [torch.ones(3), [torch.ones(3)], [], None], ids=str)
def test_a_call_on_the_cpu_never_asks_for_an_event(result, monkeypatch):
    with no_gpu(monkeypatch):
        perform(summed(lambda: SimpleNamespace(wait=lambda: None), result))
    assert type(traffic.log[-1].ended) is float
    traffic.clear_log()


MUTANTS = {
    "the host's time is taken": (Handle.join, "self._now()", "time.perf_counter()"),
    "a callback on the GPU": (perform, "not on_gpu", "True"),
    "the first of several tensors is not looked at": (Handle.__init__, "result[0] if", "result if"),
    "the host waits at once": (DeviceTime.__init__, "self._event.record()", "self._event.record(), float(self)"),
    "seconds are milliseconds": (DeviceTime.__float__, "/ 1e3", ""),
}  # fmt: skip


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_is_killed(bug, gpu):
    def right() -> bool:
        try:
            return overlapped(gpu, summed, [ON_GPU]) == 9.0
        except (AssertionError, pytest.fail.Exception):
            return False

    with rewritten(*MUTANTS[bug]):
        assert not right()


@pytest.mark.parametrize("stream", ["", "torch.cuda.Stream()"])
def test_mutant_whose_zero_waits_for_a_message_is_killed(stream, gpu):
    gpu.current.until = float("inf")
    with (
        rewritten(device_time._recent_zero, "torch.cuda.Stream(priority=-1)", stream),
        pytest.raises(AssertionError, match="has not sent yet"),
    ):
        DeviceTime()
