"""The figures of lessons 00 and 01 show the numbers they are given."""

import numpy as np
from matplotlib.colors import to_hex

from gpt2lab.model import PRESETS
from gpt2lab.plots import gpt2 as plots
from gpt2lab.plots.curves import curves
from gpt2lab.plots.rooms import LEVELS, rooms, uses
from gpt2lab.plots.style import png


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


def test_rooms_show_the_whole_package():
    names = {text.get_text() for text in rooms().axes[0].texts}
    assert names == {name for level in LEVELS for name in level}


def test_memory_bars_add_up():
    ax = plots.memory({"all": {"weights": 1.0, "state": 2.0}, "less": {"weights": 1.0}}).axes[0]
    assert [text.get_text().strip() for text in ax.texts] == ["3.0", "1.0"]
    assert [patch.get_width() for patch in ax.patches] == [1, 2, 1, 0]


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
