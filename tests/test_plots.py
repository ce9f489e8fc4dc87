"""Figures show the numbers that they are given: at the right place, of the right rank or stage, in the right unit."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex

import gpt2lab
from gpt2lab.experts.mixture import Experts
from gpt2lab.lessons.labs import experts as lab
from gpt2lab.lessons.labs.sharding import MLP
from gpt2lab.model import PRESETS
from gpt2lab.parallel.zero.costs import paper_bytes
from gpt2lab.plan import Plan
from gpt2lab.planner.balance import every_cut, slowest
from gpt2lab.planner.events import Job, simulate_jobs
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.plots import (
    automatic,
    collectives,
    experts,
    forms,
    hardware,
    mesh,
    placement,
    planner,
    scale,
    schedule,
    sharding,
    steps,
    style,
    tensor,
    zero,
)
from gpt2lab.plots import gpt2 as plots
from gpt2lab.plots.benchmarks import dashboard
from gpt2lab.plots.curves import curves
from gpt2lab.plots.data import checksums, hidden, loss_lines
from gpt2lab.plots.rooms import direct, layers, rooms, uses
from gpt2lab.plots.style import COLORS, THINGS, png, rank_color
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks.trace import Span
from gpt2lab.schedules import make, simulate
from gpt2lab.schedules.registry import FREE, GENERATORS


def faces(patches) -> list[str]:
    """The colour of each patch."""
    return [to_hex(p.get_facecolor()) for p in patches]


def test_a_form_puts_each_number_at_its_place():
    """Sums, numbers at bars, texts in boxes, means of runs, and the parts of a cut matrix."""
    _, (ax, below) = style.figure(rows=2)
    forms.stacked(ax, {"a": {"x": 1, "y": 2}, "b": {"y": 4}}, {"x": "red", "y": "blue"}, says="{:g}")
    assert [(t.get_text(), t.get_position()) for t in ax.texts] == [("3", (3, 0)), ("4", (4, 1))]
    with pytest.raises(ValueError, match=r"'a' has \['z'\], but there are looks for \['x'\] only"):
        forms.stacked(below, {"a": {"x": 1, "z": 2}}, {"x": "red"})
    forms.lines(ax, None, dict.fromkeys("abc", [1, 2]), ["red", "blue"], scale=2)
    drawn = [(line.get_label(), line.get_color(), line.get_ydata().tolist()) for line in ax.lines]
    assert drawn == [("a", "red", [2, 4]), ("b", "blue", [2, 4]), ("c", "red", [2, 4])]  # nobody is left out
    forms.bars(below, [5, -1], "red", "{:g}", at=(2, 3))
    forms.cell(below, 2, 7, 4, 1, "black", "in")
    marks = [(t.get_text(), t.get_position(), t.get_color()) for t in below.texts]
    assert marks == [("5", (5, 2), "black"), ("-1", (0, 3), "black"), ("in", (4, 7), "white")]
    forms.band(below, (0, 1), [[1, 5], [3, 5], [5, 8]], "red", scale=2)
    assert below.lines[0].get_ydata().tolist() == [6, 12]
    assert {tuple(map(float, v)) for v in below.collections[0].get_paths()[0].vertices} == {
        (0, 2), (0, 10), (1, 10), (1, 16),
    }  # fmt: skip
    _, ax = style.figure()
    tensor.cut_product(ax, [(2, 2, "rows"), (2, 2, None), (2, 2, "columns")], "ABC", 2)
    place = [(p.get_x(), round(p.get_y(), 1), to_hex(p.get_facecolor())) for p in ax.patches]
    first, second = (to_hex(rank_color(r)) for r in (0, 1))
    assert place == [
        (0, 1.4, first), (0, 0.4, second), (3, 0.4, "#dddddd"), (6, 0.4, first), (7, 0.4, second),
    ]  # fmt: skip


def test_a_bar_of_a_timeline_is_in_the_row_of_its_rank_from_its_start_in_milliseconds():
    spans = [Span("a", "forward", 5.0, 5.5, rank=3), Span("b", "backward", 5.5, 5.75, rank=7)]
    ax = timeline([*spans, Span("c", "comm", 5.5, 6.0, rank=7, lane="comm")]).axes[0]
    bars = [(p.get_x(), p.get_width(), round(p.get_y() + p.get_height() / 2, 3)) for p in ax.patches]
    assert bars == [(0, 500, 0), (500, 250, 1), (500, 500, 1.4)]
    assert faces(ax.patches) == [to_hex(COLORS[k]) for k in ("forward", "backward", "comm")]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 3", "rank 7"]
    assert ax.get_xlabel() == "time in ms"
    assert timeline(spans, unit="s", clock="paced").axes[0].get_xlabel() == "time in s (paced)"


def test_a_box_of_a_schedule_is_in_the_row_of_its_rank_and_says_its_micro_batch():
    simulated = simulate(make("1f1b", 3, 4))
    ax = schedule.schedule(simulated, unit="slots").axes[0]
    inside = [t for t in ax.texts if t.get_ha() == "center"]
    drawn = [(t.get_position()[0], round(t.get_position()[1] + 0.2), t.get_text()) for t in inside]
    boxes = [(rank, box) for rank, row in enumerate(simulated.rows) for box in row]
    assert drawn == [(float(b.start + b.end) / 2, rank, str(b.op.micro)) for rank, b in boxes]
    for rank, row in enumerate(simulated.rows):
        colors = [to_hex(c) for c in ax.collections[3 * rank].get_facecolors()]
        assert colors == [to_hex(COLORS[schedule.KINDS[box.op.kind]]) for box in row]
        shape = [path.get_extents() for path in ax.collections[3 * rank].get_paths()]
        assert [(e.x0, e.x1) for e in shape] == [(float(b.start), float(b.end)) for b in row]
        assert {round(e.y0, 2) for e in shape} == {round(rank - 0.45, 2)}
    assert ax.get_xlim() == (0, float(simulated.makespan)) and ax.get_xlabel() == "time in slots"
    marks = [(line.get_xdata()[0], round(line.get_ydata()[0], 2)) for line in ax.lines]
    assert [y for _, y in marks] == [round(r + 0.45 - 0.34 * (3 - r) / 3, 2) for r in range(3)]
    assert [x for x, _ in marks] == [2, 2, 2]


def test_the_later_chunk_of_a_rank_is_the_paler_one():
    simulated = simulate(make("interleaved", 2, 2))
    (ax,) = schedule.schedule(simulated, memory=False).axes
    of_rank = ax.collections[2].get_facecolors()  # two collections a rank
    first, second = simulated.schedule.stages_of(1)
    shade = lambda stage: [
        float(c[:3].sum())
        for c, b in zip(of_rank, simulated.rows[1], strict=True)
        if b.op.stage == stage and b.op.kind == "F"
    ]
    assert max(shade(first)) < min(shade(second))


def test_a_comparison_has_each_number_in_its_panel():
    rows = [("gpipe", 0.3, 0.25, 8.0, 1, 96), ("zb_h2", 0.2, 0.0, 7.0, 2, 95)]
    panels = schedule.side_by_side(rows).axes
    widths = [[round(p.get_width(), 6) for p in ax.patches] for ax in panels]
    assert widths == [[30, 20, 25, 0], [8, 7], [1, 2], [96, 95]]
    assert [ax.get_xlabel() for ax in panels] == ["bubble, %", "peak activations", "weights", "KiB sent"]
    assert [t.get_text() for t in panels[0].get_yticklabels()] == ["GPipe", "ZB-H2"]
    assert schedule.TITLES.keys() == {one.name for one in GENERATORS + FREE}  # none shows its plan word


def test_a_panel_of_the_dashboard_has_medians_in_milliseconds_and_the_range():
    machine = dict.fromkeys(("system", "cores", "memory", "torch", "commit"), "x")
    seconds = {"step": {"ours": [0.2, 0.1, 0.4], "ddp": [0.02, 0.03]}}
    fig = dashboard({"seconds": seconds, "rounds": 3, "machine": machine})
    ax = fig.axes[0]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines] == [(200, 0), (25, 1)]
    ranges = [tuple(c.get_segments()[0][:, 0]) for c in ax.collections]
    assert [tuple(map(round, r)) for r in ranges] == [(100, 400), (20, 30)]
    assert [to_hex(line.get_color()) for line in ax.lines] == [to_hex(THINGS[4]), to_hex(THINGS[1])]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["ours  200", "ddp  25"]
    assert fig.get_supxlabel().startswith("ms (measured, median and range of 3 rounds")


def test_a_sweep_is_in_milliseconds_and_gigabytes_and_its_fits_are_dashed():
    row = {"what": "all_reduce", "ranks": 2}
    rows = [row | {"bytes": b, "seconds": s, "bus": 5e8 * s} for b, s in ((8, 0.5), (16, 0.75))]
    fit = row | {"predicted": {8: 0.25}, "predicted over measured": {16: 1.25}}
    left, middle, right = collectives.sweep_figure(rows, [fit]).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[500, 750], [500, 750], [250]]
    assert [line.get_linestyle() for line in left.lines] == ["-", "-", "--"]
    assert [line.get_markevery() for line in left.lines] == [[0], [1], None]
    assert [list(line.get_xydata().ravel()) for line in middle.lines] == [[8, 0.25, 16, 0.375]]
    assert list(right.lines[0].get_xydata().ravel()) == [16, 1.25]
    assert "in ms" in left.get_title("left") and "GB/s" in middle.get_title("left")


@pytest.mark.parametrize("ranks, crosses", [(2, False), (3, False), (4, True), (1024, True)])
def test_a_line_is_where_the_ring_overtakes_the_tree_and_without_one_the_title_says_why(ranks, crosses):
    (ax,) = collectives.compared_by_formula(ranks).axes
    assert len(ax.lines) == 6 + crosses
    assert ("the ring is never slower than the tree" in ax.get_title("left")) != crosses


def test_blocks_are_where_they_lie_in_the_colour_of_their_first_owner():
    before, after = collectives.blocks([[1], [2]], [[1, 2], [3, 4]], owners=[[0, 1], [None, 0]]).axes
    place = lambda p: (round(p.get_x()), round(p.get_y()), to_hex(p.get_facecolor()))
    hues = [to_hex(rank_color(r)) for r in (0, 1)]
    assert [place(p) for p in before.patches] == [(0, 0, hues[0]), (0, 1, hues[1])]
    assert [place(p) for p in after.patches] == [
        (0, 0, hues[0]), (1, 0, hues[1]), (0, 1, "#dddddd"), (1, 1, hues[0]),
    ]  # fmt: skip
    assert [t.get_text() for t in after.texts] == ["1", "2", "3", "4"]


def test_bars_of_memory_stand_on_each_other_and_circles_are_what_ranks_hold():
    held = {"a": {"weights": 1e6, "gradients": 2e6, "optimizer": 4e6}}
    ax = zero.bars(held, "MB", {"a": 6.5e6}).axes[0]
    assert [(p.get_x(), p.get_width()) for p in ax.patches] == [(0, 1), (1, 2), (3, 4)]
    assert ax.texts[0].get_text().strip() == "7.0 MB" and ax.get_xlabel() == "MB on each rank"
    assert list(ax.lines[0].get_xdata()) == [6.5]


def test_figure_1_has_the_published_gigabytes():
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al. 2020)."""
    held = {str(stage): parts for stage, parts in paper_bytes(7.5e9, 64).items()}
    totals = [float(t.get_text().split()[0]) for t in zero.bars(held, "GB").axes[0].texts]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_a_step_s_memory_is_in_megabytes_with_a_mark_at_the_peak():
    ax = zero.memory_over_a_step({"a": [1e6, 5e6, 2e6]}).axes[0]
    assert list(ax.lines[0].get_ydata()) == [1, 5, 2] and list(ax.lines[0].get_xdata()) == [0, 0.5, 1]
    assert (ax.lines[1].get_xdata()[0], ax.lines[1].get_ydata()[0]) == (0.5, 5)


def test_bars_beside_each_other_are_of_their_program_and_place():
    ax = zero.beside({"one": [1, 2], "two": [3, 4]}, "rank", "MB").axes[0]
    middles = [(round(p.get_x() + p.get_width() / 2, 2), p.get_height()) for p in ax.patches]
    assert middles == [(-0.2, 1), (0.8, 2), (0.2, 3), (1.2, 4)]


def test_a_moment_is_told_in_milliseconds_and_its_boxes_are_the_ranks():
    moment = steps.Moment(0.25, (("F0", "forward"), None), (("x",), ()), ((0, 1, "2 KiB"),))
    assert steps._title(moment) == "after 250 ms, arrows: 2 KiB"
    assert [steps.size_of(n) for n in (1023, 1024, 3 << 10)] == ["1023 B", "1 KiB", "3 KiB"]
    ax = steps.strip([([], []), ([], [])], 1, [moment]).axes[0]
    boxes = [p for p in ax.patches if hasattr(p, "get_width")]
    assert [round(p.get_x(), 1) for p in boxes] == [0.1, 1.1]
    assert [to_hex(p.get_edgecolor()) for p in boxes] == [to_hex(rank_color(r)) for r in (0, 1)]
    assert ax.texts[0].get_text() == "rank 0: F0"


def test_choices_of_experts_stand_on_their_rank_s_colour_and_bytes_leave_the_rank_that_sends_them():
    found = lab.routed(8, 2, 1.0, 1.0)
    left, right = experts.spread(found, 2048).axes
    heights = lambda ax: [p.get_height() for p in ax.patches]
    assert heights(left) == [*found.served.sum(0), *(found.asked - found.served).sum(0)]
    assert faces(left.patches[:8]) == [to_hex(rank_color(e // 2)) for e in range(8)]
    owned = found.served.reshape(4, 4, 2).sum(2)  # what each rank sends to the experts of each
    away, guests = (owned.sum(dim) - owned.diagonal() for dim in (1, 0))
    assert heights(right) == [*2 * away, *2 * guests]


def test_no_skew_is_even_and_room_is_what_the_package_gives_an_expert():
    even = lab.routed(8, 2, 3.0, 0.0)
    assert even.dropped == 0 and even.asked.sum() == 4 * 256 * 2 == even.rows.sum()
    assert even.asked.sum(0).max() < 1.15 * even.asked.sum() / 8
    tight = lab.routed(8, 2, 0.5, 0.0)
    assert tight.served.max() == Experts(8, 2, capacity=0.5).room(256) == 32
    assert lab.routed(8, 1, 1.0, 2.0).dropped > lab.routed(8, 1, 1.0, 1.0).dropped > 0.1


def test_tiles_name_the_ranks_that_hold_them():
    tensors = {name: MLP[name] for name in ("x", "c_fc.weight", "hidden", "c_proj.weight")}
    tiles = lambda **layout: sharding.who_holds(tensors, layout, {"x": 2, "y": 2}).axes
    x, _, hidden, _ = tiles(batch="x", ff="y")
    assert [t.get_text() for t in hidden.texts] == ["0", "1", "0", "1", "2", "3", "2", "3"]
    assert [t.get_text() for t in x.texts] == ["0 1"] * 4 + ["2 3"] * 4
    assert {t.get_text() for t in tiles(seq="x")[1].texts} == {"0 1 2 3"}  # a weight: all


def test_simulated_steps_share_an_axis_and_say_their_length():
    jobs = [Job("a", 0, 0.1, ()), Job("b", 1, 0.2, ((0, 0),))]
    pair = Cluster(2, Device(1))
    fig = placement.simulated_steps({"one": simulate_jobs(jobs[:1], pair), "two": simulate_jobs(jobs, pair)})
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["one: 100 ms", "two: 300 ms"]
    assert {round(ax.get_xlim()[1]) for ax in fig.axes} == {300}


def test_a_square_of_the_cost_surface_is_the_slowest_stage_of_its_cut_and_the_chosen_cut_is_framed():
    times = [0.001, 0.004, 0.002, 0.003, 0.007]
    ax = placement.cost_surface(times, {"best": (0, 2, 4, 5), "equal": (0, 1, 3, 5)}, "computed").axes[0]
    drawn = {t.get_position(): t.get_text() for t in ax.texts}
    assert drawn == {(a, b): f"{1e3 * slowest(times, (0, a, b, 5)):.3g}" for _, a, b, _ in every_cut(5, 3)}
    assert drawn[2, 4] == "7" and drawn[1, 2] == "12"
    frames = [(p.get_x() + 0.5, p.get_y() + 0.5, p.get_linestyle()) for p in ax.patches]
    assert frames == [(2, 4, "-"), (1, 3, "--")]


def test_the_key_of_an_explored_plan_is_inside_the_picture():
    found = SimpleNamespace(memory=1e9, seconds=1.0, parts={"world": 0.1, "update": 0.1})
    choice = SimpleNamespace(plan=Plan(pp=2), prediction=found, front=[SimpleNamespace(prediction=found)])
    fig = planner.explored("title", choice, 2e9, {"link between nodes": 1}, simulate(make("zb_h1", 2, 4)))
    fig.draw_without_rendering()
    key = fig.axes[3].get_legend()
    assert len(key.get_texts()) == 5 and key.get_window_extent().x1 < fig.bbox.x1


# --- of lessons 00 and 01


def test_curves_show_each_run_and_its_distance_from_the_first():
    fig = curves({"serial": [3.0, 2.0], "a": [3.0, 2.0], "b": [3.0, 2.5]})
    losses, apart = fig.axes
    assert apart.get_ylabel() == "nats (equal: drawn at 1e-17)"
    assert not curves({"serial": [3.0], "a": [3.5]}).axes[1].get_ylabel()
    assert curves({"serial": [3.0], "a": [90.0]}).axes[1].get_ylim()[1] > 87
    assert [list(line.get_ydata()) for line in losses.lines] == [[3, 2], [3, 2], [3, 2.5]]
    assert [list(line.get_ydata()) for line in apart.lines] == [[1e-17, 1e-17], [1e-17, 0.5]]


def test_rooms_are_read_from_the_imports(tmp_path):
    (tmp_path / "parallel").mkdir()
    data = "from ..ranks import comm\nfrom .. import spec\nimport torch\n"
    (tmp_path / "parallel" / "data.py").write_text(data)
    (tmp_path / "train.py").write_text("from gpt2lab.plan import Plan\nfrom torch.nn import Linear\n")
    assert uses(tmp_path) == {"parallel": {"ranks", "spec"}, "train": {"plan"}}
    assert len(rooms(tmp_path).axes[0].lines) == 3


def test_numbers_of_plans_are_drawn_as_powers_of_ten_however_large_they_are():
    ax = automatic.how_many([1, 2, 3], {"cuts": [1, 1000, 10**400]}).axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx([0, 3, 400])


def test_a_line_that_repeats_a_longer_way_is_left_out():
    known = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}
    assert layers(known) == {"a": 2, "b": 1, "c": 0, "d": 1}
    assert direct(known) == {("a", "b"), ("b", "c"), ("d", "c")}
    with pytest.raises(ValueError, match="a -> b -> a is a circle of imports"):
        layers({"a": {"b"}, "b": {"a"}})


def test_colours_of_ranks_are_for_ranks_only():
    for fig in (rooms(), checksums({"no sum": [["x"], ["y"], ["z"]]})):
        shown = [line.get_color() for ax in fig.axes for line in ax.lines]
        shown += [color for ax in fig.axes for color in faces(ax.patches)]
        boxes = [t.get_bbox_patch() for ax in fig.axes for t in ax.texts]
        shown += [box.get_edgecolor() for box in boxes if box]
        assert len(shown) > 2 and not {to_hex(color) for color in shown} & {rank_color(r) for r in range(8)}


def test_a_way_to_share_work_out_and_what_memory_holds_have_their_colours_in_all_lessons():
    ways = zip(("dp+cp", "tp", "pp", "cp"), ("dp", "tp x dp", "tp x pp x dp", "cp x dp"), strict=True)
    for (axis, plans), way in zip(ways, ("data", "tensor", "pipeline", "context"), strict=True):
        assert mesh.AXES[axis] == scale.LOOKS[plans]["color"] == style.WAYS[way]
    lines = tensor.crossover(4).axes[0].lines
    assert [line.get_color() for line in lines[:2]] == [style.WAYS["data"], style.WAYS["tensor"]]
    weights, activations = (to_hex(style.HELD[part]) for part in ("weights", "activations"))
    assert faces(tensor.alexnet().axes[0].patches[:16]) == [weights] * 8 + [activations] * 8
    assert len({str(look["color"]) for look in scale.LOOKS.values()}) == len(scale.LOOKS)


def test_right_and_wrong_have_one_pair_of_colours():
    right, wrong = to_hex(style.RIGHT), to_hex(style.WRONG)
    assert faces(zero.beside({"right": [1], "bug 1": [2]}, "x", "y").axes[0].patches) == [right, wrong]
    trials = hardware.mistakes({"no barrier": {"without": [0.2], "with": [0.1]}}).axes[0].lines
    losses = hidden(dict.fromkeys("ab", ([2, 1], [2, 3]))).axes[0].lines[::-1]
    alive = zero.alive({"bug 2": [1, 2], "right": [1, 1]}, 2).axes[0].lines[1:]
    for drawn in (
        trials[::2],
        losses,
        alive,
        loss_lines({"with": [1], "without": [2]}, {}).axes[0].lines[::-1],
    ):
        assert [to_hex(line.get_color()) for line in drawn] == [wrong, right]


def test_a_timeline_has_a_key_unless_all_it_could_say_is_other():
    key = lambda *kinds: timeline([Span("a", kind, 0.0, 1.0) for kind in kinds]).axes[0].get_legend()
    assert key("other") is None
    assert [text.get_text() for text in key("other", "forward").get_texts()] == ["forward", "other"]


@pytest.mark.rotates
def test_rooms_show_the_whole_package_and_no_line_crosses_a_box():
    fig = rooms()
    ax = fig.axes[0]
    here = {path.stem for path in Path(gpt2lab.__file__).parent.iterdir() if not path.name.startswith("__")}
    assert {text.get_text() for text in ax.texts} == here - {"cli"}
    fig.draw_without_rendering()
    for text in ax.texts:
        x0, y0, x1, y1 = text.get_bbox_patch().get_window_extent().extents
        for line in ax.lines:
            points = ax.transData.transform(line.get_xydata())
            middle = ax.transData.transform(text.get_position())
            if not any(np.allclose(end, middle) for end in points[[0, -1]]):
                along = np.vstack([np.linspace(a, b, 200) for a, b in zip(points, points[1:], strict=False)])
                inside = (along > (x0, y0)).all(1) & (along < (x1, y1)).all(1)
                assert not inside.any(), text.get_text()


def test_the_anatomy_names_every_part_with_its_shape():
    texts = [text.get_text().strip() for text in plots.anatomy(PRESETS["nano"].n_layer).axes[0].texts]
    for name, shape, _ in plots.PARTS:
        assert name in texts and shape in texts
    assert "4 blocks" in texts


def test_dots_and_lines_are_where_the_numbers_are():
    fig = plots.normalised([1e-4, 1e-3], {"AdamW": [1e-3, 1e-3], "SGD": [1e-7, 1e-6]}, 1e-3)
    adamw, sgd = (np.asarray(dots.get_offsets()) for dots in fig.axes[0].collections)
    assert adamw.tolist() == [[1e-4, 1e-3], [1e-3, 1e-3]] and sgd.tolist() == [[1e-4, 1e-7], [1e-3, 1e-6]]
    lines = plots.per_token({"slow": [3, 4], "fast": [1, 1]}).axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[3, 4], [1, 1]]
    assert len({to_hex(line.get_color()) for line in lines}) == 2


def test_histograms_mark_the_intended_deviation():
    values = np.random.default_rng(0).normal(0, 0.02, 500)
    fig = plots.histograms({"wte": (values, 0.02), "c_proj": (values / 2, 0.01)})
    marks = [[float(line.get_xdata()[0]) for line in ax.lines] for ax in fig.axes]
    assert marks == [[-0.02, 0.02], [-0.01, 0.01]] and png(fig)[:4] == b"\x89PNG"
