"""Bytes per class of link: every byte counted once, and in the class of the ranks that it travels between."""

from dataclasses import replace

import pytest
import torch

from gpt2lab.compositions import plans_by_pair
from gpt2lab.lessons.labs.node_traffic import BETWEEN, INSIDE, by_class, price, total
from gpt2lab.machine.links import Link, Network
from gpt2lab.plan import Plan, build
from gpt2lab.plots import mesh as plots
from gpt2lab.plots.style import png
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.train import Trainer

LONG = replace(CONFIG, n_layer=8)


def sent(rank, world, text, nodes, config=CONFIG, rows=7):
    plan = Plan.parse(text)
    one = Trainer(build(plan, config, Mesh(**plan.axes)))
    comm.clear_log()
    one.step(example_batch(config, rows, 12))
    found = by_class(comm.log, rank, nodes)
    assert sum(found.values()) == sum(e.bytes for e in comm.log)
    return found


def test_tensor_parallel_neighbours_stay_inside_a_node_and_replicas_talk_between(pools):
    for found in pools[4].run(sent, "dp=2,tp=2", 2):
        assert ("tp", BETWEEN) not in found and ("dp+cp", INSIDE) not in found
        assert found["tp", INSIDE] > 0 and found["dp+cp", BETWEEN] > 0
    for found in pools[4].run(sent, "pp=2,tp=2,micro=2", 2):
        assert found["pp", BETWEEN] > 0 and found["tie", BETWEEN] > 0
    first, second, *_ = pools[4].run(sent, "pp=4,micro=2", 2)
    assert first["pp", INSIDE] > 0 and ("pp", BETWEEN) not in first
    assert second["pp", INSIDE] == second["pp", BETWEEN]


def test_an_interleaved_pipeline_sends_from_its_last_rank_to_its_first(pools):
    """Of eight stages on four ranks, stage s lives on rank s % 4, so 3 sends on to 0."""
    nodes, border = (
        (0, 0, 1, 1),
        8 * 12 * CONFIG.n_embd * 4,
    )  # bytes between two stages, all micro-batches together
    right: list[dict] = [{} for _ in nodes]
    for stage in range(7):
        here, there = stage % 4, (stage + 1) % 4
        for source, target in ((here, there), (there, here)):  # forward and backward
            key = "pp", INSIDE if nodes[source] == nodes[target] else BETWEEN
            right[source][key] = right[source].get(key, 0) + border
    found = pools[4].run(sent, "pp=4,micro=4,schedule=interleaved", nodes, LONG, 8)
    assert [{key: size for key, size in of.items() if key[0] == "pp"} for of in found] == right


def direct(rank, world):
    """Where the bytes of each kind of call go, as the log has it."""
    axis, found = Mesh(dp=world)["dp"], {}
    calls = {
        "all_reduce": lambda: comm.all_reduce(torch.zeros(4), axis),
        "scatter": lambda: comm.scatter(torch.zeros(4), axis, 0, 1),
        "gather": lambda: comm.gather(torch.zeros(1), axis, 0, 1),
        "all_to_all": lambda: comm.all_to_all([torch.zeros(p) for p in range(4)], axis, [(rank,)] * 4),
        "ring_shift": lambda: comm.ring_shift(torch.zeros(1), axis, 2),
    }
    for name, call in calls.items():
        comm.clear_log()
        call()
        found[name] = [target for e in comm.log for target in e.targets]
    comm.clear_log()
    comm.ring_shift(torch.zeros(250), axis, 1)
    return found, price(comm.log, rank, Network(SLOW, FAST, node=2))


def test_the_log_says_to_whom_each_call_sends_and_a_message_pays_for_its_own_link(pools):
    found = pools[4].run(direct)
    for rank, (sent, seconds) in enumerate(found):
        assert [target for target, _ in sent["all_reduce"]] == [(rank + 1) % 4]
        assert sent["scatter"] == ([(0, 4), (2, 4), (3, 4)] if rank == 1 else [])
        assert sent["gather"] == ([(1, 4)] if rank != 1 else [])
        assert sent["all_to_all"] == [(p, 4 * p) for p in range(1, 4) if p != rank]
        assert sent["ring_shift"] == [((rank + 2) % 4, 4)]
        assert seconds == pytest.approx(1e-3 if rank % 2 == 0 else 0.5 + 1.0)


FAST, SLOW = Link(0.0, 1e6), Link(0.5, 1e3)


def dealt(rank, world, text):
    """Bytes of an all-reduce of 8 numbers along each axis by class, and its price, for both ways to deal ranks."""
    mesh, found = Mesh(**Plan.parse(text).axes), []
    comm.clear_log()
    comm.all_reduce(torch.zeros(8), mesh["tp"])
    for nodes in ((0, 0, 1, 1), (0, 1, 0, 1)):
        seconds = price(comm.log, rank, Network.placed(nodes, FAST, SLOW))
        found.append((by_class(comm.log, rank, nodes), seconds))
    assert by_class(comm.log, rank, 2) == found[0][0]
    return found


def test_the_same_bytes_cross_nodes_when_ranks_are_dealt_round_robin_and_cost_more(pools):
    found = pools[4].run(dealt, "dp=2,tp=2")
    blocks, robin = ([mine[i] for mine in found] for i in (0, 1))
    assert total(sent for sent, _ in blocks) == {("tp", INSIDE): 4 * 32}
    assert total(sent for sent, _ in robin) == {("tp", BETWEEN): 4 * 32}
    for cheap, dear in zip(blocks, robin, strict=True):
        assert cheap[1] == pytest.approx(32e-6)  # two messages of 16 bytes
        assert dear[1] == pytest.approx(2 * 0.5 + 32e-3)


def test_a_cube_joins_the_ranks_of_each_group_and_frames_the_nodes():
    apart = {"pp": 4, "dp": 2, "tp": 1}
    lines = {name: [(r, r + by) for r in range(8) if not r & by] for name, by in apart.items()}
    fig = plots.cube(lines, [r // 4 for r in range(8)])
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    assert titles == ["pp: ranks 4 apart", "dp: ranks 2 apart", "tp: neighbours"]
    for ax in fig.axes:
        assert sorted(text.get_text() for text in ax.texts) == [str(r) for r in range(8)]
        assert len({t.get_position() for t in ax.texts}) == 8 and len(ax.patches) == 2  # two nodes
        assert len(ax.collections) == 4  # four groups
        thin = [line.get_data() for line in ax.lines if line.get_linewidth() == 1]
        edges = {tuple(sorted(zip(*line, strict=True))) for line in thin}
        assert len(edges) == 12  # of a cube


def test_bytes_by_class_are_stacked_to_their_sum():
    fig = plots.traffic_by_class(
        {"dp=2,tp=2": {("tp", INSIDE): 2e6, ("dp+cp", BETWEEN): 1e6, ("tp", BETWEEN): 4e6}}
    )
    assert [ax.get_title(loc="left") for ax in fig.axes] == [INSIDE, BETWEEN]
    assert [ax.texts[0].get_text().strip() for ax in fig.axes] == ["2.0", "5.0"]


def test_placements_show_what_was_seen_beside_what_was_predicted():
    fig = plots.placements({"dp=2,tp=2": {"blocks": (0.1, 0.12), "round robin": (0.3, 0.28)}})
    (ax,) = fig.axes
    assert [round(bar.get_width()) for bar in ax.patches] == [120, 280]
    assert [round(float(dots.get_offsets()[0][0])) for dots in ax.collections] == [100, 300]
    assert [text.get_text() for text in fig.legends[0].texts] == ["blocks", "round robin", "predicted"]


def test_bugs_show_each_curve_and_each_error():
    runs = {"serial": [2.0, 1.0], "a": [2.0, 1.0], "b": [2.0, 1.5]}
    fig = plots.bugs(runs, {"a": {"loss": 0.5, "loss curve": 0.0}, "b": {"loss": 1e-3, "loss curve": 0.5}})
    losses, wrong = fig.axes
    assert [list(line.get_ydata()) for line in losses.lines] == list(runs.values())
    assert [float(dots.get_offsets()[0][0]) for dots in wrong.collections] == [0.5, 1e-16, 1e-3, 0.5]


def test_the_triangle_of_strategies_counts_tested_plans():
    fig = plots.strategy_pairs(["data", "tensor"], plans_by_pair())
    pairs = ("data", "data"), ("tensor", "data"), ("tensor", "tensor")
    assert [text.get_text() for text in fig.axes[0].texts] == [
        str(len(plans_by_pair()[pair])) for pair in pairs
    ]
    assert png(fig)[:4] == b"\x89PNG"


def test_lines_of_threads_and_ranks_are_in_milliseconds():
    fig = plots.threads_or_ranks((1, 2), {"threads": [0.1, 0.2], "ranks": [0.2, 0.2]})
    assert [[round(y) for y in line.get_ydata()] for line in fig.axes[0].lines] == [[100, 200], [200, 200]]
