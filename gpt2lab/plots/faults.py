"""Figures of faults: the phases of a job, which rank holds which boxes, the cost of each time between saves."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..planner.failures import Phase
from .forms import cell, name_rows, numbers, patches
from .style import COLORS, THINGS, figure, rank_color

KINDS = {
    "work": {"color": COLORS["forward"]},
    "save": {"color": COLORS["update"]},
    "lost": {"facecolor": COLORS["wait"], "edgecolor": COLORS["other"], "hatch": "///", "linewidth": 0},
    "restart": {"color": COLORS["other"]},
}


def lives(jobs: dict[str, list[Phase]], failures: Sequence[float], length: float = 0) -> Figure:
    """A bar for each job: what it does when; the failures, which are the same for all jobs, are dotted lines.

    The time axis is at least `length` hours long: pictures to compare get the same one.
    """
    fig, ax = figure(8, 0.9 + 0.5 * len(jobs), grid=False)
    for y, spans in enumerate(jobs.values()):
        for kind, look in KINDS.items():
            mine = [(s.start, s.length) for s in spans if s.kind == kind]
            ax.broken_barh(mine, (y - 0.35, 0.7), **look)
        ax.text(spans[-1].end, y, f"  {spans[-1].end:.1f}", va="center", fontsize=9)
    end = max(spans[-1].end for spans in jobs.values())
    for at in failures:
        if at < end:
            ax.axvline(at, color=COLORS["comm"], ls=":", lw=1)
    name_rows(ax, jobs)
    ax.set(xlabel="hours", xlim=(0, 1.08 * max(end, length)))
    fig.legend(handles=patches(KINDS), loc="outside upper right", ncols=len(KINDS), fontsize=9)
    return fig


def boxes_held(layouts: dict[str, tuple[tuple[int, int], list[list[tuple]]]]) -> Figure:
    """Matrices in boxes: `layouts[title]` is a shape and, for every rank, (offsets, sizes) of the boxes it holds."""
    fig, axes = figure(8, 4.0, 1, len(layouts), squeeze=False, grid=False)
    for ax, (title, (shape, ranks)) in zip(axes[0], layouts.items(), strict=True):
        for rank, boxes in enumerate(ranks):
            for (row, column), (height, width) in boxes:
                text, middle = str(rank) if height > 0.05 * shape[0] else "", row + height / 2
                cell(ax, column, middle, width, height, rank_color(rank), text, ec="white", lw=1)
        ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[0, shape[1]], yticks=[0, shape[0]])
        ax.set(xlabel="column", ylabel="row")
        ax.set_title(title, fontsize=9)
    return fig


def time_lost(
    curves: dict[str, tuple[Sequence[float], Sequence[float]]],
    dots: dict[str, tuple[Sequence[float], Sequence[float]]],
    best: dict[str, float],
) -> Figure:
    """Share of time lost against the minutes between saves: formula as a line, simulation as dots, the best dashed."""
    fig, ax = figure(8, 3.2)
    for i, (name, (minutes, lost)) in enumerate(curves.items()):
        color = THINGS[3 + i % 2]
        ax.plot(minutes, [100 * x for x in lost], color=color, label=name)
        ax.plot(dots[name][0], [100 * x for x in dots[name][1]], "o", ms=4, color=color)
        ax.axvline(best[name], color=color, ls="--", lw=1)
    ax.set(xscale="log", xlabel="minutes of work between saves", ylabel="% lost", ylim=(0, 60))
    marks = [m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500) if ax.get_xlim()[0] < m < ax.get_xlim()[1]]
    numbers(ax.xaxis, marks)
    fig.legend(loc="outside upper right", ncols=len(curves), fontsize=9)
    return fig
