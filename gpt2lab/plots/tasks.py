"""Pictures of tasks: who ran what and when, how many work at once, the graph, the benchmark's dashboard."""

import statistics
from dataclasses import replace

from matplotlib.figure import Figure

from ..planner.metrics import average_parallelism, profile
from .forms import chart, kinds_of_work, legend_above, name_rows
from .style import COLORS, HUES, PLATE, SERIAL, THINGS, figure


def workers(spans, title: str = "", path=(), clock: str = "measured", length: float = 0) -> Figure:
    """One row a worker of each rank, a bar a task; below, how many work at once.

    `path`: names of the tasks of a critical path, which are outlined and joined by a line. The time axis is at least
    `length` seconds long: pictures to compare get the same one.
    """
    spans = list(spans)
    lanes = sorted({(s.rank, s.lane) for s in spans})
    zero, end = min(s.start for s in spans), max(s.end for s in spans)
    ratios = [0.5 + len(lanes), 1.6]
    fig, (ax, below) = figure(8, 1.9 + 0.42 * len(lanes), 2, sharex=True, height_ratios=ratios)
    for s in spans:
        place = lanes.index((s.rank, s.lane))
        edge = {"edgecolor": "black", "linewidth": 1.2} if s.name in path else {"linewidth": 0}
        ax.barh(place, 1e3 * (s.end - s.start), 0.7, 1e3 * (s.start - zero), color=COLORS[s.kind], **edge)
    on_path = sorted((s for s in spans if s.name in path), key=lambda s: s.start)
    corners = [(1e3 * (t - zero), lanes.index((s.rank, s.lane))) for s in on_path for t in (s.start, s.end)]
    if corners:
        ax.plot(*zip(*corners, strict=True), color="black", linewidth=0.8)
    ranks = {rank for rank, _ in lanes}
    name = "{1}" if len(ranks) == 1 else "rank {0}" if len(ranks) == len(lanes) else "rank {0}, {1}"
    name_rows(ax, [name.format(*lane) for lane in lanes])
    ax.set_title(title, pad=22)
    kinds = [kind for kind in COLORS if kind in {s.kind for s in spans}]
    if len(kinds) > 1:
        legend_above(ax, len(kinds), handles=kinds_of_work(kinds))
    working = at_work(spans)
    times, counts = zip(*profile(working), strict=True)
    below.step([1e3 * (t - zero) for t in times], counts, where="post", color=SERIAL, linewidth=0.8)
    below.axhline(average_parallelism(working), color=THINGS[3], linestyle="--")
    below.set(ylim=(0, max(counts) + 0.6), yticks=range(0, max(counts) + 1, 1 + max(counts) // 3))
    below.set(xlim=(0, 1e3 * max(end - zero, length)), ylabel="at work")
    below.set_xlabel(f"time in ms ({clock}); dashed: {average_parallelism(working):.2f} at work on average")
    return fig


def at_work(spans) -> list:
    """The spans in which workers compute, each worker numbered as if it were a rank, for `planner.metrics`."""
    busy = [s for s in spans if s.kind not in ("comm", "wait")]
    lanes = sorted({(s.rank, s.lane) for s in busy})
    return [replace(s, rank=lanes.index((s.rank, s.lane))) for s in busy]


def graph(task_graph, levels, path=(), title: str = "") -> Figure:
    """Tasks as dots, each right of all that it waits for; edges as arrows, those of a critical path thick."""
    deepest = max(levels)
    column = [round(deepest - level) for level in levels]
    rows, place = {}, {}
    for task in task_graph.tasks:
        x = column[task.number]
        place[task.number] = (x, rows.setdefault(x, 0))
        rows[x] += 1
    height = max(rows.values())
    fig, ax = figure(8, 0.9 + 0.6 * height)
    centered = {n: (x, y - (rows[x] - 1) / 2) for n, (x, y) in place.items()}
    numbers, slant = [task.number for task in path], 35 * (deepest > 5)  # degrees
    thick = set(zip(numbers, numbers[1:], strict=False))
    for u, v in task_graph.edges():
        color, width = (SERIAL, 2) if (u, v) in thick else (THINGS[1], 0.8)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 5, "shrinkB": 6}
        ax.annotate("", centered[v], centered[u], arrowprops=arrow, zorder=1)
    for task in task_graph.tasks:
        x, y = centered[task.number]
        edge = "black" if task.number in numbers else "white"
        ax.scatter(x, y, s=110, color=COLORS[task.kind], edgecolor=edge, zorder=2)
        side = -1 if y < 0 else 1  # names of the lower rows stand below, away from the arrows
        turned = {"rotation": slant * side, "rotation_mode": "anchor", "ha": "left" if slant else "center"}
        at = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": PLATE}
        ax.annotate(task.name, (x, y), (0, 12 * side), **at, **turned)
    ax.set_axis_off()
    ax.margins(0.06, 0.75)
    ax.set_title(title, pad=32 if slant else 6)
    return fig


def grain(series: dict[str, list]) -> Figure:
    """Block size against parallelism, overhead and time; rows are (block, parallelism, runtime / work, time in ms)."""
    fig, axes = figure(8, 2.8, 1, 3)
    labels = ("work / critical path", "runtime / work", "time, ms")
    for column, (ax, label) in enumerate(zip(axes, labels, strict=True), 1):
        for number, (name, sizes) in enumerate(series.items()):
            blocks, values = zip(*((row[0], row[column]) for row in sizes), strict=True)
            look = {"lw": 4 - 2.5 * number, "ms": 9 - 4 * number}  # thinner on top, where lines are equal
            ax.plot(blocks, values, "o-", color=THINGS[4 - number], label=name, **look)
        ax.set(ylim=(0, None), title=label)
        ax.set_xscale("log", base=2)
    axes[1].set_xlabel("tokens in a block")
    axes[2].legend(fontsize=8)
    return fig


def executors(sizes: list[int], found: dict[str, list[float]]) -> Figure:
    """Elements of a block against the milliseconds of a loop, a line an executor."""
    colors = SERIAL, *HUES[:2], *HUES[3:]
    scaled = lambda ax: (ax.set_xscale("log", base=2), ax.set_ylim(0))
    labels = {"xlabel": "elements in a block", "ylabel": "ms (median)"}
    return chart(sizes, found, colors, (8, 3), scaled, {"fontsize": 8}, {"marker": "o"}, **labels)


def times(found: dict[str, list[float]], title: str = "") -> Figure:
    """One row a version: its times as dots, the median as a bar."""
    fig, ax = figure(8, 0.9 + 0.38 * len(found))
    for place, values in enumerate(found.values()):
        ax.barh(place, statistics.median(values), 0.6, color=THINGS[2])
        ax.plot(values, [place] * len(values), "|", color="black", markersize=9)
    name_rows(ax, found)
    ax.set(xlabel="ms (bar: median)", title=title)
    return fig


def dashboard(found: dict[str, list[list[float]]], count: int, published: dict[str, float]) -> Figure:
    """Every iteration of every version, the first apart; speed-ups with the published ones beside."""
    fig, (left, right) = figure(8, 3.4, 1, 2, width_ratios=[1.6, 1])
    for hue, (name, runs) in zip(HUES, found.items(), strict=False):
        for run in runs:
            left.plot(range(1, len(run)), [1e3 * s for s in run[1:]], "-", color=hue, alpha=0.6)
            left.plot(0, 1e3 * run[0], "x", color=hue)
        left.plot([], [], color=hue, label=name)
    left.set(ylim=(0, None), xlabel="iteration (x: the first)", title="ms an iteration (measured)")
    left.legend(fontsize=8, loc="lower right")
    means = {name: statistics.mean(s for run in runs for s in run[1:]) for name, runs in found.items()}
    against = lambda times, workers: {
        name: times["sequential"] / seconds / workers
        for name, seconds in times.items()
        if "sequential" in times and name != "sequential"
    }
    own, theirs = against(means, count), against(published, 112)
    colors = [
        *(hue for name, hue in zip(means, HUES, strict=False) if name in own),
        *(THINGS[2] for _ in theirs),
    ]
    for place, (share, color) in enumerate(zip([*own.values(), *theirs.values()], colors, strict=True)):
        right.barh(place, share, 0.6, color=color)
    name_rows(right, [*own, *(f"{name} (112, from a paper)" for name in theirs)], fontsize=8)
    right.grid(visible=True, axis="y")
    right.axvline(1, color="black", linewidth=0.8)
    right.set_title(f"efficiency, {count} workers,\nagainst sequential")
    return fig
