"""The benchmark of tasks writes what it promises, and its pictures show the numbers that they are given."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpt2lab.benchmarks import tasks as bench
from gpt2lab.cli import main
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.planner import metrics
from gpt2lab.plots import tasks as plots
from gpt2lab.ranks.trace import Span
from gpt2lab.tasks import check
from gpt2lab.tasks.graph import TaskGraph, reads, updates, writes

TINY = GPT2Config(vocab_size=32, n_positions=8, n_layer=1, n_head=2, n_embd=8)


@pytest.mark.live
def test_one_command_runs_every_version_and_writes_json_and_dashboard(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", TINY)
    monkeypatch.setattr(bench, "on_rank", lambda rank, world_size, args: [0.5] * args.iterations)
    words = "bench tasks --config nano --rows 2 --length 8 --runs 2 --iterations 3 --versions"
    assert main([*words.split(), *bench.VERSIONS, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "nano.json").read_text())
    assert tuple(report["versions"]) == tuple(report["seconds"]) == bench.VERSIONS
    assert all(len(runs) == 2 and len(runs[0]) == 3 for runs in report["seconds"].values())
    assert {"mean", "spread", "first"} == set(report["versions"]["sequential"])
    assert {"speedup", "efficiency", "karp_flatt"} < set(report["versions"]["taskiter"])
    assert report["published"]["fork-join"] == 1.43
    assert (tmp_path / "nano.png").stat().st_size > 10_000
    assert all(name in said for name in bench.VERSIONS)


FOUND = {"tasks": [[3.0, 2.0, 2.0]], "sequential": [[9.0, 2.0, 4.0], [5.0, 3.0, 5.0]]}


def test_the_first_iteration_stands_apart():
    rows = bench.summary(FOUND, 2)
    assert rows["sequential"] == {"mean": 3.5, "spread": 1.0, "first": 7.0}
    assert rows["tasks"]["speedup"] == 1.75 and rows["tasks"]["efficiency"] == 0.875


def test_efficiency_is_drawn_against_one_worker_whatever_was_named_first():
    for found, bars in ((FOUND, [0.875, 0.5]), ({"tasks": FOUND["tasks"]}, [0.5])):
        _, right = plots.dashboard(found, 2, {"sequential": 112.0, "x": 2.0}).axes
        assert [bar.get_width() for bar in right.patches] == bars
        assert "against sequential" in right.get_title("left")


def test_published_figures_give_the_published_metrics():
    speedup = bench.PUBLISHED["sequential"] / bench.PUBLISHED["fork-join"]
    assert round(speedup, 1) == 24.5 and round(speedup / 112, 2) == 0.22


def test_a_rebuilt_graph_is_the_same_graph():
    args = SimpleNamespace(config="nano", rows=2, length=8, workers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "nano", TINY)
        graph = bench.one_process(args).graph
    again = bench.rebuilt(graph)
    assert again.before == graph.before and [t.name for t in again.tasks] == [t.name for t in graph.tasks]


SPANS = [
    Span("a", "forward", 1.0, 1.2, 0, "worker 0"),
    Span("b", "backward", 1.1, 1.4, 0, "worker 1"),
    Span("sum", "comm", 1.2, 1.4, 0, "messages"),
]


def test_work_is_counted_without_messages():
    assert [(s.name, s.rank) for s in plots.at_work(SPANS)] == [("a", 0), ("b", 1)]
    slept = [*SPANS, Span("nothing is ready", "wait", 1.2, 1.3, 0, "worker 0")]
    assert metrics.shares(slept, 2) == pytest.approx(
        {"backward": 0.375, "forward": 0.25, "wait": 0.125, "between tasks": 0.25}
    )
    assert metrics.shares(SPANS, 2)["wait"] == 0
    assert plots.at_work(slept) == plots.at_work(SPANS)


def test_pictures_show_every_bar_every_edge_and_the_average():
    fig = plots.workers(SPANS, path=["b"])
    above, below = fig.axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["messages", "worker 0", "worker 1"]
    assert len(above.patches) == 3 and above.lines[0].get_xydata().round().tolist() == [[100, 2], [400, 2]]
    assert "1.25 at work" in below.get_xlabel()
    several = plots.workers([*SPANS, replace(SPANS[0], rank=1)])
    assert several.axes[0].get_yticklabels()[0].get_text() == "rank 0, messages"
    graph = TaskGraph({"x": torch.zeros(4)})
    graph.add("w", print, writes("x"))
    graph.add("r", print, reads("x", (0, 2)))
    graph.add("u", print, updates("x", (2, 4)))
    shown = plots.graph(graph, check.levels(graph), check.critical_path(graph)).axes[0].texts
    assert sorted(text.get_text() for text in shown) == ["", "", "r", "u", "w"]  # two arrows, three names
    drawn = plots.grain({"one": [(4, 2, 3, 5)], "other": [(4, 6, 7, 8)]})
    assert [line.get_ydata()[0] for ax in drawn.axes for line in ax.lines] == [2, 6, 3, 7, 5, 8]
