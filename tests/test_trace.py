"""Spans from live ranks, joined, drawn, and written as a Chrome trace."""

import json
import time
from collections import Counter, deque

import pytest
import torch

from gpt2lab import launch
from gpt2lab.machine import memory
from gpt2lab.plan import Plan, build
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, trace, traffic
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.ranks.trace import Span
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.train import Trainer

pytestmark = pytest.mark.live

SPANS = [
    Span("forward 0", "forward", 0.0, 2.0, 0),
    Span("backward 0", "backward", 2.0, 5.0, 0),
    Span("all_reduce dp", "comm", 4.0, 6.0, 0, "comm"),
    Span("forward 0", "forward", 1.0, 3.0, 1),
]


@pytest.fixture(autouse=True)
def fresh():
    trace.clear()
    yield
    trace.clear()


def test_a_span_is_recorded_with_its_rank_even_when_its_body_raises(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(KeyError), trace.span("forward 1", kind="forward"):
        raise KeyError
    (found,) = trace.spans()
    assert (found.name, found.kind, found.rank, found.lane) == ("forward 1", "forward", 3, "work")
    assert found.end >= found.start


def test_the_latest_calls_and_spans_are_kept_and_a_full_log_is_not_counted(monkeypatch):
    few = [deque(maxlen=3) for _ in range(2)]
    monkeypatch.setattr(trace, "_spans", few[0])
    for step in range(5):
        with trace.span(f"step {step}"):
            pass
    assert [s.name for s in trace.spans(with_comm=False)] == ["step 2", "step 3", "step 4"]
    monkeypatch.setattr(traffic, "log", few[1])
    monkeypatch.setattr(traffic, "LATEST", 3)
    for size in range(2):
        few[1].append(traffic.Event("send", "dp", size, 1, 0.0, 1.0))
    assert traffic.traffic() == {("send", "dp"): (2, 1, 2)}
    few[1].append(few[1][0])
    with pytest.raises(RuntimeError, match="keeps the latest 3 calls and is full. Use clear_log"):
        traffic.traffic()


def work(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    with trace.span("forward 0", kind="forward"):
        time.sleep(0.01)
    comm.all_reduce(torch.ones(4), axis)
    return trace.spans()


def test_spans_and_communication_of_live_ranks_join_on_one_clock():
    every = trace.merge(launch(work, ranks=2, echo=False))
    assert min(s.start for s in every) == 0.0
    for rank in (0, 1):
        forward, call = (
            next(s for s in every if s.rank == rank and s.kind == k) for k in ("forward", "comm")
        )
        assert (call.name, call.lane) == ("all_reduce dp", "comm")
        assert forward.end <= call.start
    # an all-reduce ends on no rank before every rank has started it
    calls = [s for s in every if s.kind == "comm"]
    assert max(c.start for c in calls) <= min(c.end for c in calls)


def test_chrome_trace_has_a_process_a_rank_and_microseconds(tmp_path):
    path = trace.save_chrome(SPANS, tmp_path / "new" / "folder" / "trace.json")
    assert trace.save_chrome(SPANS, path) == path
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    boxes = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert len(boxes) == len(SPANS)
    backward = boxes[0, "backward 0"]
    assert (backward["ts"], backward["dur"], backward["cat"]) == (2e6, 3e6, "backward")
    assert boxes[0, "all_reduce dp"]["tid"] != backward["tid"]


def test_no_spans_is_an_empty_picture_not_an_error():
    assert timeline([]).axes and trace.chrome([])["traceEvents"] == []


def profiled_step(rank, world_size):
    """The names of our spans in a step, what PyTorch's profiler has under these names, and its parents of matmuls."""
    plan = Plan.parse("pp=2,micro=3")
    trainer = Trainer(build(plan, CONFIG, Mesh(**plan.axes)))
    batch = example_batch(CONFIG, 7, 11)
    trace.clear()
    with memory.profiled() as profile:
        trainer.step(batch)
    own = Counter(s.name for s in trace.spans(with_comm=False))
    events = list(profile.events())
    inside = {e.cpu_parent.name for e in events if e.name == "aten::linear" and e.cpu_parent}
    return own, Counter(e.name for e in events if e.name in own), inside


def test_pytorchs_profiler_sees_our_spans_with_its_operations_inside(pools):
    for stage, (own, theirs, inside) in enumerate(pools[2].run(profiled_step)):
        assert own == theirs and {"F0", "B2", "update"} <= set(own), stage
        assert {"F0", "F1", "F2"} <= inside


def test_without_a_profiler_a_span_asks_for_nothing_of_it(monkeypatch):
    monkeypatch.setattr(trace, "record_function", None)
    with trace.span("alone"):
        pass
    with memory.profiled(), pytest.raises(TypeError), trace.span("seen"):
        pass
