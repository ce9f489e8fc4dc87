"""The log says when a call was over on a GPU, without waiting for it: on a GPU that exists only here."""

import pickle
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from planting import rewritten

from gpt2lab.machine import device_time
from gpt2lab.machine.device_time import DeviceTime
from gpt2lab.ranks import call, trace, traffic
from gpt2lab.ranks.call import Call, Handle, perform
from gpt2lab.ranks.mesh import Axis

BEHIND = 1000.0  # seconds that the GPU's clock is behind the host's
AXIS = Axis("dp", (0, 1), 0)


class Stream:
    """Work in order, all of it done at `until`, a time of the host."""

    def __init__(self, until=0.0):
        self.until = until


class GPU:
    """A host whose clock is set by hand, and a GPU that works beside it."""

    def __init__(self):
        self.now, self.current, self.waits, self.pool = 0.0, Stream(), [], 0.0

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

    def work(self, until: float, with_future=True):
        """The Work of a call that is over at `until`: who waits for it waits on the GPU, and the host goes on."""

        def wait():
            self.current.until = max(self.current.until, until)

        def tell(callback):
            before, self.current = self.current, Stream(until)
            callback(None)
            self.current = before

        future = SimpleNamespace(add_done_callback=tell)
        return SimpleNamespace(wait=wait, **({"get_future": lambda: future} if with_future else {}))


@pytest.fixture
def gpu(monkeypatch):
    """The GPU in the place of CUDA's, and its host's clock in the place of ours."""
    made = GPU()
    clock = SimpleNamespace(perf_counter=lambda: made.now, sleep=time.sleep)
    for module in (call, device_time):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(device_time, "_zero", None)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: Stream(0.0 if priority else made.pool))
    traffic.clear_log(), trace.clear()
    yield made
    traffic.clear_log(), trace.clear()


ON_GPU = SimpleNamespace(is_cuda=True)
SUM, MESSAGE = Call.ring("all_reduce", AXIS, "", (8, 1)), Call("send", AXIS, "", 8, 1, pair=(0, 1))


def overlapped(gpu, which=SUM, result=ON_GPU, with_future=True) -> float:
    """The end of a call that lasts from 1 to 5 while the GPU computes until 9 and the host goes on at 2."""
    gpu.now, gpu.current.until = 1.0, 9.0
    handle = perform(which, lambda _: gpu.work(5.0, with_future), result, async_op=True)
    gpu.now = 2.0
    handle.wait()
    assert gpu.now == 2.0 and len(gpu.waits) == 1, "nothing but the first zero was waited for"
    return traffic.log[-1].end


@pytest.mark.parametrize("result", [ON_GPU, [ON_GPU, ON_GPU]], ids=["one", "two"])
@pytest.mark.parametrize("which", [SUM, MESSAGE], ids=["collective", "message"])
def test_a_call_beside_computing_ends_when_it_is_over_on_the_gpu(gpu, which, result):
    assert overlapped(gpu, which, result) == 5.0


def test_without_a_future_it_ends_when_the_stream_that_waits_goes_on(gpu):
    assert overlapped(gpu, with_future=False) == 9.0


def test_a_call_that_computing_waits_for_ends_when_it_is_over_on_the_gpu(gpu):
    gpu.now = 1.0
    perform(SUM, lambda _: gpu.work(5.0).wait(), ON_GPU)
    assert gpu.now == 1.0 and traffic.log[-1].start == 1.0
    (span,) = trace.spans()
    assert (span.start, span.end, gpu.now) == (1.0, 5.0, 5.0)


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
    perform(SUM, lambda _: gpu.work(5.0).wait(), ON_GPU)
    assert pickle.loads(pickle.dumps(traffic.log[-1])).end == 5.0


@contextmanager
def no_gpu(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("nothing on the CPU asks for an event"))
        yield


@pytest.mark.parametrize("result", [torch.ones(3), [torch.ones(3)], [], None], ids=str)
def test_a_call_on_the_cpu_never_asks_for_an_event(result, monkeypatch):
    with no_gpu(monkeypatch):
        perform(SUM, lambda _: None, result)
    assert type(traffic.log[-1].ended) is float
    traffic.clear_log()


MUTANTS = {
    "the host's time is taken": (Handle.note_completion, "self._now()", "time.perf_counter()"),
    "messages have no end of their own": (perform, " or handle._now is DeviceTime", ""),
    "the first of several tensors is not looked at": (Handle.__init__, "result[0] if", "result if"),
    "the host waits at once": (DeviceTime.__init__, "self._event.record()", "self._event.record(), float(self)"),
    "seconds are milliseconds": (DeviceTime.__float__, "/ 1e3", ""),
}  # fmt: skip


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_is_killed(bug, gpu):
    def right() -> bool:
        try:
            return overlapped(gpu, MESSAGE, [ON_GPU]) == 5.0
        except AssertionError:
            return False

    with rewritten(*MUTANTS[bug]):
        assert not right()


def test_no_clock_waits_where_every_stream_of_the_communicators_pool_holds_a_message(gpu):
    gpu.current.until = gpu.pool = float("inf")
    assert float(device_time._recent_zero()[1]) == 0.0


@pytest.mark.parametrize("stream", ["", "torch.cuda.Stream()"], ids=["the current one", "of NCCL's pool"])
def test_mutant_whose_zero_waits_for_a_message_is_killed(stream, gpu):
    gpu.current.until = gpu.pool = float("inf")
    with (
        rewritten(device_time._recent_zero, "torch.cuda.Stream(priority=-1)", stream),
        pytest.raises(AssertionError, match="has not sent yet"),
    ):
        DeviceTime()
