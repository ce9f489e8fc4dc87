"""Pictures of placements and cuts: a graph coloured by device, what ran when, learning, layers and their stages."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..planner.balance import every_cut, slowest
from .forms import bars, cell, chart, heat, legend_above, name_columns, name_rows, text_at
from .style import COLORS, PLATE, SERIAL, THINGS, figure, rank_color


def placed(
    graph, where: Sequence[int], simulated, path: Sequence[int] = (), title: str = "", length: float = 0
) -> Figure:
    """The graph coloured by device, its critical `path` thick, above the time that each operator and message takes.

    The time axis is at least `length` seconds long: pictures to compare get the same one.
    """
    fig, (ax, below) = figure(8, 4.6, 2, height_ratios=[1.5, 1])
    _graph(ax, graph, where, path)
    ax.set_title(title)
    _gantt(below, simulated, length)
    return fig


def _columns(graph) -> list[int]:
    """For each operator how many are before it on the longest way there."""
    found: list[int] = []
    for n in range(len(graph)):
        found.append(1 + max((found[u] for u in graph.before[n]), default=-1))
    return found


def _graph(ax, graph, where, path) -> None:
    columns, place = _columns(graph), {}
    for column in range(max(columns) + 1):
        members = [n for n, c in enumerate(columns) if c == column]
        before = [place[u][1] for n in members for u in graph.before[n]] or [0.0]
        alone = len(members) == 1  # then it is level with what it reads
        middle = sum(before) / len(before) if alone else 0.0
        for i, n in enumerate(members):
            place[n] = column, middle + (len(members) - 1) / 2 - i
    thick = set(pairwise(path))
    for u, v in graph.edges:
        (x0, y0), (x1, y1) = place[u], place[v]
        between = [y for x, y in place.values() if x0 < x < x1]
        sag = max(0.0, y0 - min(between) + 0.75) if between and y0 == y1 else 0.0  # below all that it passes
        color, width = (SERIAL, 2.2) if (u, v) in thick else (THINGS[1], 1)
        along = [t / 20 for t in range(21)]
        x = [x0 + (x1 - x0) * t for t in along]
        y = [y0 + (y1 - y0) * t - 4 * sag * t * (1 - t) for t in along]
        ax.plot(x, y, color=color, linewidth=width, zorder=1)
    for n, (x, y) in place.items():
        color = rank_color(where[n])
        ax.scatter(x, y, s=420, color=color, zorder=2, edgecolor="white")
        text_at(ax, x, y, where[n], on=color, fontsize=9, zorder=3)
        look = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "bbox": PLATE}
        ax.annotate(graph.operators[n].name, (x, y), (0, 13), **look)
    ax.set_axis_off()
    ax.margins(0.04, 0.2)


def _gantt(ax, simulated, length: float = 0, names: bool = True) -> None:
    """A row a device, its jobs in its colour; messages as thin lines below their sender; at least `length` seconds."""
    devices, end = 1 + max(job.device for job in simulated.jobs), max(length, simulated.makespan)
    for job, (start, stop) in zip(simulated.jobs, simulated.spans, strict=True):
        color, edge = rank_color(job.device), {"edgecolor": "white", "linewidth": 0.4}
        room = (stop - start) / (0.0085 * end) if names else 0  # letters
        text = next((t for t in (job.name, job.name.split(".")[-1]) if len(t) < room), "")
        cell(ax, 1e3 * start, job.device, 1e3 * (stop - start), 0.55, color, text, size=8, **edge)
    for m in simulated.messages:
        row = m.source + 0.38
        ax.plot([1e3 * m.start, 1e3 * m.end], [row, row], color=COLORS["comm"], linewidth=2.5)
    name_rows(ax, [f"device {d}" for d in range(devices)])
    ax.set(ylim=(devices - 0.4, -0.5), xlim=(0, 1e3 * end))
    also = "; thin: messages" if names else "\nthin: messages"  # a narrow panel has room for no names
    ax.set_xlabel(f"time in ms (simulated); {1e3 * simulated.makespan:.3g} ms in all{also}")


def simulated_steps(runs: dict) -> Figure:
    """When the devices work in each of several simulated steps, on one time axis."""
    fig, axes = figure(8, 0.4 + 1.4 * len(runs), len(runs), 1, sharex=True)
    for ax, (name, simulated) in zip(axes, runs.items(), strict=True):
        _gantt(ax, simulated, names=False)
        ax.set(title=f"{name}: {1e3 * simulated.makespan:.0f} ms", xlabel="")
    axes[-1].set(xlabel="time in ms (simulated)", xlim=(0, 1e3 * max(s.makespan for s in runs.values())))
    return fig


def learning(learned, optimum: float, greedy: float) -> Figure:
    """The mean and the best time of every round, with the optimum and the greedy placement as lines; in ms."""
    rounds = range(1, len(learned.means) + 1)
    found = {"mean of the round's draws": learned.means, "best so far": learned.bests}

    def also(ax):
        ax.axhline(1e3 * greedy, color=THINGS[1], linestyle=":", label="list scheduling")
        ax.axhline(1e3 * optimum, color=SERIAL, linestyle="--", label="optimum (branch and bound)")

    labels = {"xlabel": "round of 16 placements", "ylabel": "ms (simulated)"}
    return chart(rounds, found, THINGS[:2:-1], (8, 3), also, {"fontsize": 8}, scale=1e3, **labels)


def layers(
    times: Sequence[float], cuts: dict[str, Sequence[int]], names: Sequence[str], clock: str
) -> Figure:
    """A row a cut: the layers one after the other, as long as they take, in the colour of their stage."""
    fig, ax = figure(8, 1.2 + 0.55 * len(cuts))
    for row, bounds in enumerate(cuts.values()):
        slow = max(sum(times[a:b]) for a, b in pairwise(bounds))
        for stage, (a, b) in enumerate(pairwise(bounds)):
            left = 0.0
            for n in range(a, b):
                y = row + (stage - (len(bounds) - 2) / 2) * 0.8 / (len(bounds) - 1)
                height, edge = 0.75 / (len(bounds) - 1), {"edgecolor": "white", "linewidth": 0.8}
                text = names[n] if times[n] > 0.04 * slow and len(bounds) < 5 else ""
                cell(ax, 1e3 * left, y, 1e3 * times[n], height, rank_color(stage), text, size=9, **edge)
                left += times[n]
        ax.plot([1e3 * slow] * 2, [row - 0.42, row + 0.42], color=SERIAL, linewidth=2)
    name_rows(ax, cuts)
    ax.set_xlabel(f"ms of a stage, forward and backward ({clock}); black: the slowest stage")
    return fig


def cost_surface(times: Sequence[float], cuts: dict[str, Sequence[int]], clock: str) -> Figure:
    """The slowest stage of every cut into three stages, in ms: a square a cut; those of `cuts` are framed."""
    layers = len(times)
    fig, ax = figure(7.5, 0.9 + 0.34 * layers)
    surface = np.full((layers - 2, layers - 2), np.nan)
    for bounds in every_cut(layers, 3):
        surface[bounds[2] - 2, bounds[1] - 1] = 1e3 * slowest(times, bounds)
    look = {"aspect": "auto", "extent": (0.5, layers - 1.5, layers - 0.5, 1.5)}
    heat(ax, surface, "{:.3g}", f"slowest stage, ms ({clock})", size=8, **look)
    for (name, (_, a, b, _)), style in zip(cuts.items(), ("-", "--"), strict=False):
        ax.add_patch(Rectangle((a - 0.5, b - 0.5), 1, 1, fill=False, linewidth=2.5, linestyle=style))
        ax.plot([], [], color="black", linewidth=2.5, linestyle=style, label=name)
    ax.set(xlabel="first layer of stage 1", ylabel="first layer of stage 2", yticks=range(2, layers))
    ax.legend(fontsize=8, loc="upper right")
    return fig


def two_bars(rows: dict[str, tuple[float, float]], labels: tuple[str, str], unit: str) -> Figure:
    """A row a thing, two bars each."""
    fig, ax = figure(8, 1.1 + 0.6 * len(rows))
    for i, label in enumerate(labels):
        places = [row + 0.19 * (2 * i - 1) for row in range(len(rows))]
        values = [pair[i] for pair in rows.values()]
        bars(ax, values, THINGS[3 + i], height=0.36, size=8, at=places, label=label)
    name_rows(ax, rows)
    ax.margins(x=0.1)
    ax.set_xlabel(unit)
    legend_above(ax, 2)
    return fig


def three_steps(times: Sequence[float], bounds: Sequence[int], where: Sequence[int], simulated) -> Figure:
    """Partition, place, schedule: the layers in stages, the stages on devices of two nodes, and what runs when."""
    fig, (one, two, three) = figure(8, 2.9, 1, 3, width_ratios=[1, 0.9, 1.7])
    for stage, (a, b) in enumerate(pairwise(bounds)):
        one.bar(range(a, b), [1e3 * t for t in times[a:b]], 0.85, color=rank_color(stage))
        text_at(one, (a + b - 1) / 2, -0.05e3 * max(times), stage, fontsize=9)
        if b < len(times):
            one.axvline(b - 0.5, color=SERIAL, linewidth=1)
    one.set_xlabel("layers of each stage", labelpad=18)
    one.set(title="1. partition", ylabel="ms a layer", xticks=[])
    for stage, device in enumerate(where):
        x, y = device // 2, 1 - device % 2
        color = rank_color(device)
        two.scatter(x, y, s=1500, color=color, marker="s", zorder=2)
        text_at(two, x, y, f"stage\n{stage}", on=color, fontsize=9, zorder=3)
    for a, b in pairwise(where):
        ends = [(d // 2, 1 - d % 2) for d in (a, b)]
        slow = a // 2 != b // 2
        style = {"color": COLORS["comm"], "linewidth": 3} if slow else {"color": THINGS[1], "linewidth": 1.5}
        two.plot(*zip(*ends, strict=True), zorder=1, **style)
    two.set(title="2. place (orange: slow link)", xlim=(-0.6, 1.6), ylim=(-0.6, 1.6), yticks=[])
    name_columns(two, ["node 0", "node 1"])
    two.grid(False)
    _gantt(three, simulated, names=False)
    three.set_title("3. schedule")
    return fig
