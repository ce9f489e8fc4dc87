"""The style of all figures: what each colour means, a new figure in that style, and its bytes.

Plots take data and return a `Figure`; nothing here uses pyplot, so no figure is shown twice or left open. The colours
of both palettes can be told apart with the common kinds of colour blindness (Okabe & Ito 2008; Tol 2021).
"""

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from ..corpus.storage import replacing

COLORS = {
    "forward": "#56B4E9",
    "backward": "#009E73",
    "weight": "#F0E442",
    "update": "#CC79A7",
    "comm": "#D55E00",
    "wait": "#DDDDDD",
    "other": "#555555",
}
"""Colour of each kind of work; `weight` is the weight-gradient half of a split backward."""

SERIAL = "#000000"
"""Colour of the serial run that everything is compared with."""

RANKS = ("#332288", "#CC6677", "#44AA99", "#DDCC77", "#117733", "#88CCEE", "#882255", "#999933")

THINGS = ("#444444", "#8A8A8A", "#C8C8C8", "#E69F00", "#0072B2")
"""Colours of things that are neither ranks nor kinds of work: what memory holds, variants that are compared."""

HELD = dict(zip(("weights", "gradients", "optimizer", "activations"), THINGS[:0:-1], strict=True))
"""Colour of each thing that memory holds."""

PLATE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
"""What stands under a name to keep lines out of it."""

HUES = (*THINGS[:2:-1], THINGS[0], *(COLORS[k] for k in ("backward", "update", "forward", "comm", "weight")))
"""Colours of up to eight things that are no ranks, in figures that show no kinds of work."""

WAYS = dict(zip(("data", "tensor", "pipeline", "ZeRO", "context"), HUES, strict=False))
"""Colour of each way to share the work out, and of what its axis of the mesh sends."""

RIGHT, WRONG = "#00794F", "#B42318"
VERDICTS = {"PASS": RIGHT, "TODO": COLORS["other"], "FAIL": WRONG}
"""Colours of what is right and what is wrong, in figures and in verdicts; white letters on them can be read."""

MARKS = "os^DvpXPd*"
"""Marks of points, in the order in which figures take them."""

RC = {
    "figure.dpi": 96,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.prop_cycle": matplotlib.cycler(color=HUES),
    "image.cmap": "YlOrRd",
    "legend.frameon": False,
    "svg.hashsalt": "gpt2lab",
    "svg.fonttype": "path",
}


def style() -> None:
    """Make this style matplotlib's default from now on."""
    matplotlib.rcParams.update(RC)


def paler(color, share: float) -> list[float]:
    """A colour mixed with white, which has this share."""
    return [c + (1 - c) * share for c in to_rgb(color)]


def rank_color(rank: int) -> str:
    """The colour of a rank, the same in every figure; from rank 8 on the colours return, each round paler."""
    return to_hex(paler(RANKS[rank % len(RANKS)], 1 - 0.65 ** (rank // len(RANKS))))


def variant(i: int) -> dict[str, str]:
    """Look of the line of the i-th of several things that a figure compares and that are no ranks."""
    return {
        "color": (THINGS[4], THINGS[3], THINGS[0])[i % 3],
        "linestyle": ("-", ":", "--")[i // 3 % 3],
    }


def ink(color: str, limit: float = 0.55) -> str:
    """Black or white, whichever can be read on a colour (by its luma, ITU-R BT.601: black above `limit`)."""
    return "black" if np.dot(to_rgb(color), (0.299, 0.587, 0.114)) > limit else "white"


def figure(
    width: float = 8, height: float = 3.2, rows: int = 1, cols: int = 1, grid: bool = True, **subplots
):
    """A new figure in this style: (Figure, axes). Sizes in inches; a width of 8 fits a notebook cell.

    Its axes have lines of a `grid`, or none. `subplots` goes to `Figure.subplots` (sharex, width_ratios, squeeze ...).
    """
    style()
    fig = Figure(figsize=(width, height), layout="constrained")
    axes = fig.subplots(rows, cols, **subplots)
    for ax in fig.axes:
        ax.grid(grid)
    return fig, axes


def plain_log(axis) -> None:
    """Make an axis logarithmic with 1, 2, 3 and 5 times each power of ten as plain numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def png(fig: Figure, colours: int | None = None) -> bytes:
    """The figure as PNG at its own dots per inch (96); the same figure always gives the same bytes.

    With so many `colours` at most it takes a third of the bytes. It is drawn once, where `Figure.savefig` draws twice:
    to lay out, and to paint.
    """
    canvas, buffer = FigureCanvasAgg(fig), io.BytesIO()
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    if colours:
        image = image.quantize(colours, dither=Image.Dither.NONE)
    image.save(buffer, "png", optimize=bool(colours))
    return buffer.getvalue()


def svg(fig: Figure | str) -> str:
    """The figure as SVG text, without a date: the same figure always gives the same text.

    What is the text of an SVG already stays as it is.
    """
    if isinstance(fig, str):
        return fig
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def save_figure(fig: Figure | str, path) -> Path:
    """Write the figure to a .svg or .png file, make its folder if necessary, and return the path.

    The text of an SVG is written to a .svg file. Raises ValueError for a file of another kind.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(
            f"A picture is written as .svg or .png, not as {path.name}. Use one of these endings."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(svg(fig).encode() if path.suffix == ".svg" else png(fig))
    return path
