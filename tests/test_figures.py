"""The pictures in figures/ are what our code draws; figures of lessons look alike and carry captions and alt text."""

import ast
import base64
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import is_color_like

from gpt2lab.classroom.verdicts import STATUSES
from gpt2lab.experts.mixture import Experts
from gpt2lab.lessons import display, explore, show, show_source, table
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.plots.draw import PICTURES, draw_all
from gpt2lab.plots.strategies import RANKS, STRATEGIES, strategies
from gpt2lab.plots.style import COLORS, HUES, RIGHT, VERDICTS, WRONG, figure, png, rank_color, svg
from gpt2lab.plots.style import RANKS as HUES_OF_RANKS
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch

FIGURES = Path(__file__).parents[1] / "figures"
PLANS = {
    "data parallel": "dp=4",
    "ZeRO": "dp=4,zero=3",
    "context parallel": "cp=4",
    "tensor parallel": "tp=4",
    "pipeline parallel": "pp=4,micro=4",
    "expert parallel": "dp=4,ep=4",
}
CONFIG = GPT2Config(vocab_size=64, n_positions=16, n_layer=8, n_head=4, n_embd=32)


def test_the_pictures_are_fresh(tmp_path):
    drawn = {path.name: path.read_bytes() for path in draw_all(tmp_path)}
    committed = {path.name: path.read_bytes() for path in FIGURES.iterdir()}
    assert drawn == committed, "run `make figures`"


def test_every_picture_is_used():
    texts = [path.read_text() for path in FIGURES.parent.glob("*.md")]
    texts += [path.read_text() for path in FIGURES.parent.glob("notebooks/src/*.py")]
    for name in PICTURES:
        assert any(f"figures/{name}" in text for text in texts), name


def held(rank, world_size, text):
    """Shares of a batch's tokens, of the weights and of the optimizer's state that this rank holds."""
    plan = Plan.parse(text)
    config = replace(CONFIG, experts=Experts(4)) if plan.ep > 1 else CONFIG
    parallel = build(plan, config, Mesh(**plan.axes), torch.float64)
    batch = example_batch(config, 8, 16)
    data = sum(micro.tokens.numel() for micro in parallel.mine(batch)) / batch.tokens.numel()
    pieces = [piece.tensor for piece in parallel.sync.pieces]
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*parallel.model.parameters(), *pieces)
    }
    weights = sum(memory.values()) / 8 / config.parameters  # whatever shapes say: ZeRO-3 frees whole weights
    state = sum(t.numel() for t in pieces) / config.parameters
    return data, weights, state


@pytest.mark.parametrize("cut", STRATEGIES, ids=lambda cut: cut.name)
def test_declared_shares_are_what_ranks_hold(cut, pools):
    for share in pools[RANKS].run(held, PLANS[cut.name]):
        assert share == pytest.approx((cut.data, cut.weights, cut.state), abs=0.1)


def test_no_two_strategies_are_drawn_alike():
    drawn = {}
    for ax in strategies().axes:
        name, *labels = (text.get_text() for text in ax.texts)
        drawn[name] = str(labels), b"".join(p.get_path().vertices.tobytes() for p in ax.patches)
    cubes = {(labels, shapes) for labels, shapes in drawn.values()}
    assert len(cubes) == len(STRATEGIES)
    assert drawn["ZeRO"][1] != drawn["data parallel"][1]


# --- how figures of lessons look


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: a list of (data, metadata)."""
    import IPython.display

    seen = []

    def fake(thing, metadata=None, raw=False):
        seen.append((thing if raw else {"text/markdown": thing.data}, metadata))

    monkeypatch.setattr(IPython.display, "display", fake)
    monkeypatch.setenv("GPT2LAB_STATIC", "1")
    return seen


PAGE, LETTERS = 8, 8  # inches that a page shows, wider figures are made smaller; points of letters
WIDTH = re.compile(r"\bfigure\((\d+\.?\d*)")
SIZE = re.compile(r"""\b(?:font|label)?size["']?(?:: float = |: |=)["']?(\d+\.?\d*|\w+-small|small)\b""")


def too_wide_or_small(source: str) -> list[str]:
    """Widths of figures that are wider than a page, and sizes of letters that are too small there."""
    wide = [found for found in WIDTH.findall(source) if float(found) > PAGE]
    return wide + [found for found in SIZE.findall(source) if "small" in found or float(found) < LETTERS]


def test_letters_of_figures_have_eight_points_on_a_page():
    """A cell that is marked `measured` may show a picture that is as old, and as wide, as its numbers."""
    for path in FIGURES.parent.glob("gpt2lab/plots/*.py"):
        assert path.name == "benchmarks.py" or not too_wide_or_small(path.read_text()), path.name
    for path in FIGURES.parent.glob("notebooks/**/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            about = [output.get("metadata", {}).get("image/png") for output in cell.get("outputs", ())]
            wide = [one["alt"] for one in about if one and one["width"] > 96 * PAGE]
            assert not wide or "measured" in cell["metadata"].get("tags", ()), (path.name, wide)
    wrong = "figure(9, 3)\nf(fontsize=7)\nf({'labelsize': 7.5})\ndef g(size: float = 6)\nh(size='x-small')"
    assert too_wide_or_small(wrong) == ["9", "7", "7.5", "6", "x-small"]


def draw(height):
    fig, ax = figure(4, 2)
    ax.plot([0, height])
    return fig


def test_a_figure_carries_alt_text_and_a_caption_that_says_where_numbers_come_from(shown):
    show(draw(1), "paced", "a line.", "a line from 0 to 1")
    (image, metadata), (caption, _) = shown
    assert metadata["image/png"]["alt"] == image["text/plain"][9:-1] == "a line from 0 to 1"
    assert caption["text/markdown"] == "*Paced: a line.*"
    with pytest.raises(ValueError, match="'guessed' does not say"):
        show(draw(1), "guessed", "a line.", "a line")


def test_before_a_reader_a_figure_has_twice_the_dots_and_a_click_shows_them_all(shown, monkeypatch):
    monkeypatch.setenv("GPT2LAB_STATIC", "0")
    fig = draw(1)
    for _ in range(2):  # the second time as the first
        show(fig, "paced", "a line.", 'a "line" from 0 to 1')
    image = shown[2][0]
    assert image == shown[0][0]
    assert image["text/plain"] == '[figure: a "line" from 0 to 1]' and "image/png" not in image
    assert (
        'alt="a &quot;line&quot; from 0 to 1"' in image["text/html"] and 'width="384"' in image["text/html"]
    )
    data = base64.b64decode(re.search(r"base64,([^\"]+)", image["text/html"])[1])
    assert int.from_bytes(data[16:20]) == 2 * 384  # the width that the PNG names


@pytest.mark.parametrize("why", ["", "half of 4: expected <2>, got 4"])
@pytest.mark.parametrize("status", STATUSES)
def test_a_verdict_is_a_box_before_a_reader_and_the_same_line_everywhere_else(
    status, why, shown, monkeypatch, capsys
):
    display.show_verdict(status, "half", why)
    assert not shown
    monkeypatch.setenv("GPT2LAB_STATIC", "0")
    display.show_verdict(status, "half", why)  # no notebook
    line = capsys.readouterr().out.splitlines()[0]
    assert not shown and line == f"{status}  half" + (f": {why}" if why else "")
    monkeypatch.setattr("IPython.get_ipython", lambda: True)
    display.show_verdict(status, "half", why)
    box = shown[0][0]
    assert box["text/plain"] == line and not capsys.readouterr().out
    assert re.sub("<[^>]+>", "", box["text/html"]) == html.escape(line)
    assert VERDICTS[status] in box["text/html"]


def test_static_explore_shows_posters_and_draws_the_ends_of_every_control(shown, capsys):
    drawn = []

    def record(height, color):
        drawn.append((height, color))
        return draw(height)

    explore(record, "drawing", "height {height}", "a {color} line", height=(1, 5, 2), color=["red", "blue"])
    assert drawn == [(1, "red"), (5, "red"), (2, "red"), (2, "blue"), (2, "red")]
    assert shown[1][0]["text/markdown"] == "*Drawing: height 2*" and len(shown) == 2
    assert "vary height, color" in capsys.readouterr().out


def test_live_explore_makes_a_widget_for_every_control():
    import ipywidgets

    style = {"description_width": "7ch"}
    controls = [(1, 5, 2), (0.0, 1.0, 0.5), ["a", "b"]]
    made = [display._widget(ipywidgets, "x", control, style) for control in controls]
    assert [type(w).__name__ for w in made] == ["IntSlider", "FloatSlider", "Dropdown"]
    assert [w.value for w in made] == [2, 0.5, "a"]
    assert {w.style.description_width for w in made} == {"7ch"}  # sliders begin below each other


def test_a_progress_bar_is_there_while_an_explorer_draws(monkeypatch):
    import ipywidgets

    bars, seen = [], []
    made = ipywidgets.IntProgress
    monkeypatch.setattr(ipywidgets, "IntProgress", lambda **look: bars.append(made(**look)) or bars[-1])
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    monkeypatch.setenv("GPT2LAB_STATIC", "0")

    def record(height):
        seen.append(bars[0].layout.visibility)
        return draw(height)

    explore(record, "drawing", "height {height}", "a line", height=(1, 5, 2))
    assert seen == ["visible"] and bars[0].layout.visibility == "hidden"


def test_sources_and_tables_are_shown_as_text(shown):
    show_source(rank_color)
    table([("a", 1234567, 0.123456), ("b | c", 2, 3.0)], ["name", "n", "x"])
    source, rows = (thing["text/markdown"] for thing, _ in shown)
    assert source.startswith("`gpt2lab/plots/style.py`\n```python\ndef rank_color(")
    rows = rows.splitlines()
    assert rows[1:] == ["| :-- | --: | --: |", "| a | 1,234,567 | 0.1235 |", r"| b \| c | 2 | 3 |"]


def test_the_same_figure_gives_the_same_bytes():
    assert png(draw(1)) == png(draw(1)) != png(draw(2))
    assert svg(draw(1)) == svg(draw(1)) and "date" not in svg(draw(1)).lower()


def linear(color):
    """A hex colour as linear RGB."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


SIGHTS = {  # Machado, Oliveira & Fernandes 2009: full colour vision, protanopia, deuteranopia
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
}


def lab(color, sight):
    """CIE L*a*b* of a colour as somebody with this sight perceives it."""
    r, g, b = (sum(m * c for m, c in zip(row, linear(color), strict=True)) for row in SIGHTS[sight])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (max(v, 0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    "palette",
    [tuple(COLORS.values()), HUES_OF_RANKS, HUES, (RIGHT, WRONG)],
    ids=["kinds", "ranks", "things", "verdicts"],
)
def test_colours_stay_apart_for_the_colour_blind(palette, sight):
    seen = [lab(color, sight) for color in palette]
    apart = {
        (palette[i], palette[j]): sum((a - b) ** 2 for a, b in zip(seen[i], seen[j], strict=True)) ** 0.5
        for i in range(len(palette))
        for j in range(i)
    }
    closest = min(apart, key=apart.get)
    assert apart[closest] > 10, f"{closest}: {apart[closest]:.1f}"


def test_white_letters_can_be_read_on_verdicts():
    """A contrast of 4.5 at least (WCAG 2.1)."""
    for r, g, b in map(linear, VERDICTS.values()):
        assert 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) > 4.5


def test_one_file_names_colours():
    """A thing keeps its colour in all lessons, because every other file asks style.py for it."""
    package = Path(display.__file__).parents[1]
    for path in (*package.glob("plots/*.py"), *package.glob("lessons/*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        named = {
            w for w in words if re.search(r"#[0-9A-Fa-f]{6}\b", w) or w[2:].isalpha() and is_color_like(w)
        }
        assert path.name == "style.py" or named <= {"black", "white", "none"}, (path, named)


def test_ranks_beyond_the_palette_keep_distinct_colours():
    assert len({rank_color(r) for r in range(32)}) == 32 and rank_color(3) == HUES_OF_RANKS[3].lower()


def test_lines_without_a_colour_of_their_own_do_not_get_the_colour_of_a_rank():
    _, ax = figure()
    drawn = [ax.plot([0, 1])[0].get_color() for _ in range(8)]
    assert drawn == list(HUES) and not set(HUES) & set(HUES_OF_RANKS)
