"""The timeline: one row a rank, one bar a span, colours by kind of work, communication as a strip below."""

from matplotlib.figure import Figure

from .forms import kinds_of_work, legend_above, name_rows, text_at
from .style import COLORS, figure, rank_color

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
MAIN, STRIP = 0.56, 0.2  # heights of the work bar and of the communication strip, in rows


def timeline(
    spans, title: str = "", unit: str = "ms", names: bool = True, clock: str = "", length: float = 0.0
) -> Figure:
    """Draw spans (objects with name, kind, start, end, rank, lane) of any number of ranks.

    `clock` says where the numbers come from (measured, paced, simulated); it is shown on the time axis, which
    is at least `length` seconds long: pictures to compare get the same one.
    """
    spans = list(spans)
    scale = UNITS[unit]
    ranks = sorted({s.rank for s in spans})
    row = {rank: i for i, rank in enumerate(ranks)}
    zero = min((s.start for s in spans), default=0.0)
    length = max(length, max((s.end for s in spans), default=1.0) - zero)
    fig, ax = figure(8, 1.1 + 0.5 * max(len(ranks), 1))
    for s in spans:
        strip = s.lane != "work"
        height, center = (STRIP, row[s.rank] + 0.4) if strip else (MAIN, row[s.rank])
        left, width = (s.start - zero) * scale, (s.end - s.start) * scale
        ax.barh(center, width, height, left, color=COLORS[s.kind], edgecolor="white", linewidth=0.5)
        if names and not strip and s.end - s.start > 0.012 * length * max(len(s.name), 1):
            text_at(ax, left + width / 2, center, s.name, on=COLORS[s.kind], fontsize=8, clip_on=True)
    ax.set_xlim(-0.01 * length * scale, 1.01 * length * scale)
    _label(ax, ranks, title, f"time in {unit}" + (f" ({clock})" if clock else ""))
    kinds = [kind for kind in COLORS if kind in {s.kind for s in spans}]
    if kinds != ["other"]:  # a key that says nothing but "other"
        legend_above(ax, max(len(kinds), 1), handles=kinds_of_work(kinds))
    return fig


def _label(ax, ranks, title: str, x_label: str) -> None:
    name_rows(ax, [f"rank {rank}" for rank in ranks])
    for tick, rank in zip(ax.get_yticklabels(), ranks, strict=True):
        tick.set_color(rank_color(rank))
        tick.set_fontweight("bold")
    ax.set_xlabel(x_label)
    ax.set_title(title, pad=24)
