"""The figures of lessons 00 and 01 show the numbers they are given."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

import gpt2lab
from gpt2lab.model import PRESETS
from gpt2lab.plots import gpt2 as plots
from gpt2lab.plots.curves import curves
from gpt2lab.plots.data import checksums
from gpt2lab.plots.rooms import direct, layers, rooms, uses
from gpt2lab.plots.style import png, rank_color
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks.trace import Span


def test_curves_show_each_run_and_its_distance_from_the_first():
    fig = curves({"serial": [3.0, 2.0], "a": [3.0, 2.0], "b": [3.0, 2.5]})
    losses, apart = fig.axes
    assert apart.get_ylabel() == "nats (equal: drawn at 1e-17)"
    assert not curves({"serial": [3.0], "a": [3.5]}).axes[1].get_ylabel()
    assert [list(line.get_ydata()) for line in losses.lines] == [[3, 2], [3, 2], [3, 2.5]]
    assert [list(line.get_ydata()) for line in apart.lines] == [[1e-17, 1e-17], [1e-17, 0.5]]


def test_rooms_are_read_from_the_imports(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "data.py").write_text(
        "from ..ranks import comm\nfrom .. import spec\nimport torch\n"
    )
    (tmp_path / "train.py").write_text("from gpt2lab.plan import Plan\nfrom torch.nn import Linear\n")
    assert uses(tmp_path) == {"parallel": {"ranks", "spec"}, "train": {"plan"}}
    assert len(rooms(tmp_path).axes[0].lines) == 3


def test_a_line_that_repeats_a_longer_way_is_left_out():
    known = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}
    assert layers(known) == {"a": 2, "b": 1, "c": 0, "d": 1}
    assert direct(known) == {("a", "b"), ("b", "c"), ("d", "c")}
    with pytest.raises(ValueError, match="a -> b -> a is a circle of imports"):
        layers({"a": {"b"}, "b": {"a"}})


def test_colours_of_ranks_are_for_ranks_only():
    for fig in (rooms(), checksums({"no sum": [["x"], ["y"], ["z"]]})):
        shown = [line.get_color() for ax in fig.axes for line in ax.lines]
        shown += [bar.get_facecolor() for ax in fig.axes for bar in ax.patches]
        shown += [
            t.get_bbox_patch().get_edgecolor() for ax in fig.axes for t in ax.texts if t.get_bbox_patch()
        ]
        assert len(shown) > 2 and not {to_hex(color) for color in shown} & {rank_color(r) for r in range(8)}


def test_a_timeline_has_a_key_unless_all_it_could_say_is_other():
    key = lambda *kinds: timeline([Span("a", kind, 0.0, 1.0) for kind in kinds]).axes[0].get_legend()
    assert key("other") is None
    assert [text.get_text() for text in key("other", "forward").get_texts()] == ["forward", "other"]


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
            if not any(
                np.allclose(end, ax.transData.transform(text.get_position())) for end in points[[0, -1]]
            ):
                along = np.vstack([np.linspace(a, b, 200) for a, b in zip(points, points[1:], strict=False)])
                inside = (along > (x0, y0)).all(1) & (along < (x1, y1)).all(1)
                assert not inside.any(), text.get_text()


def test_memory_bars_add_up():
    ax = plots.memory({"all": {"weights": 1.0, "state": 2.0}, "less": {"weights": 1.0}}).axes[0]
    assert [text.get_text().strip() for text in ax.texts] == ["3.0", "1.0"]
    assert [patch.get_width() for patch in ax.patches] == [1, 2, 1]


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
