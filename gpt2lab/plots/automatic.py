"""Pictures of searches for plans: how many there are, who finds what, plans as grids with their clocks."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from ..planner.cuts import ChainPlan, ChainProblem, Clock
from .forms import cell, equal_where, legend_right, lines, name_columns, name_rows
from .style import COLORS, HUES, PLATE, SERIAL, THINGS, WAYS, figure, variant

CUT_COLORS = {"whole": COLORS["wait"], "sample": WAYS["data"]}
CUT_COLORS |= {"attribute": WAYS["context"], "parameter": WAYS["tensor"]}


def how_many(operators: Sequence[int], counts: dict[str, Sequence[int]]) -> Figure:
    """Numbers of plans over numbers of operators; the axis counts powers of ten, so numbers may have any size."""
    fig, ax = figure(8, 3)
    powers = {name: map(math.log10, row) for name, row in counts.items()}
    lines(ax, operators, powers, HUES, marker="o", markersize=3)
    ax.axhline(80, color=SERIAL, linewidth=0.8, label="atoms of the visible universe")
    ax.set(xlabel="operators", ylabel="plans: powers of ten (counted)")
    legend_right(ax)
    return fig


def searches(found: dict, best: float) -> Figure:
    """The best plan so far as a multiple of the optimum, over evaluations and over seconds; dots: the end."""
    fig, axes = figure(8, 3.2, 1, 2, sharey=True)
    for hue, (name, one) in zip(HUES, found.items(), strict=False):
        value = [seconds / best for _, seconds in one.trace]
        panels = ([n for n, _ in one.trace], one.evaluations), (one.seen, one.took)
        for ax, (along, end) in zip(axes, panels, strict=True):
            ax.step([*along, end], [*value, value[-1]], where="post", color=hue, label=name)
            ax.scatter(end, value[-1], s=30, color=hue, zorder=3)
    for ax, along in zip(axes, ("evaluations (counted)", "seconds of searching (measured)"), strict=True):
        ax.axhline(1, color=SERIAL, linestyle="--", linewidth=1)
        ax.set(xscale="log", xlabel=along)
    axes[0].set_ylabel("best so far / optimum")
    legend_right(axes[1])
    return fig


def plan_and_clock(problem: ChainProblem, plan: ChainPlan, title: str = "", length: float = 0) -> Figure:
    """Left the plan: operators across, devices down, colours for cuts; right when the devices work.

    The time axis is at least `length` ms long: pictures to compare get the same one.
    """
    fig, (left, right) = figure(8, 1.2 + 0.45 * problem.cluster.devices, 1, 2, width_ratios=[1, 1.5])
    _grid(left, problem, plan)
    _clock(right, problem, plan)
    right.set_xlim(0, max(length, right.get_xlim()[1]))
    left.set_title(title or "operators (across) on devices (down)")
    return fig


def _grid(ax, problem, plan) -> None:
    for n, at in enumerate(plan):
        shape = list(problem.mesh(at.first, at.count).values())
        kinds = [kind for kind, size in zip(at.cut, shape, strict=True) if size > 1] or ["whole"]
        width = 0.92 / len(kinds)
        for device in at.devices:
            for half, kind in enumerate(kinds):
                letter = "-" if kind == "whole" else kind[0].upper()
                cell(ax, n - 0.46 + half * width, device, width, 0.92, CUT_COLORS[kind], letter)
    node = problem.cluster.network.node
    for d in range(node, problem.cluster.devices, node):
        ax.axhline(d - 0.5, color=COLORS["comm"], linewidth=2)
    name_columns(ax, [op.name.replace("..", "\n- ") for op in problem.operators], fontsize=8)
    ax.set(yticks=range(problem.cluster.devices), ylabel="device", ylim=(problem.cluster.devices - 0.4, -0.6))
    ax.grid(False)


def _clock(ax, problem, plan) -> None:
    clock, count = Clock(problem, plan), len(plan)
    for number, end in enumerate(clock.ends):
        n, micro = number % count, number // count
        long = clock.jobs[n]
        text = micro if long > 0.02 * clock.seconds else ""
        for device in plan[n].devices:
            look = {"size": 8, "edgecolor": "white", "linewidth": 0.3}
            cell(ax, 1e3 * (end - long), device, 1e3 * long, 0.8, THINGS[micro % 3], text, **look)
    name_rows(ax, range(problem.cluster.devices))
    ax.set_ylim(problem.cluster.devices - 0.4, -0.6)
    ax.set_xlabel(f"ms (simulated), {1e3 * clock.seconds:.3g} in all\na shade is a micro-batch")


def by_bandwidth(links: Sequence[float], seconds: dict[str, Sequence[float]], best: Sequence[str]) -> Figure:
    """Seconds of each family's best plan over the slow link's bandwidth; dots where a family is the best one."""
    fig, ax = figure(8, 3)
    for i, (name, row) in enumerate(seconds.items()):
        ax.plot([b / 1e6 for b in links], [1e3 * t for t in row], label=name, **variant(i))
        dots = [(b / 1e6, 1e3 * t) for b, t, winner in zip(links, row, best, strict=True) if winner == name]
        ax.scatter(*zip(*dots, strict=True), s=28, color=variant(i)["color"]) if dots else None
    ax.set(xscale="log", xlabel="bandwidth between nodes, MB/s", ylabel="ms a step (simulated)")
    ax.legend(fontsize=8)
    return fig


def predicted_measured(pairs: dict[str, tuple[float, float]], names: Sequence[str]) -> Figure:
    """Seconds of each plan predicted (across) and on live ranks (up); those of `names` are labelled."""
    fig, ax = figure(8, 3.6)
    values = [1e3 * t for pair in pairs.values() for t in pair]
    ends, free = [0.6 * min(values), 1.6 * max(values)], {"left": 0.0, "right": 0.0}
    for name, (predicted, seen) in sorted(pairs.items(), key=lambda one: one[1][1]):
        shown, x, y = name in names, 1e3 * predicted, 1e3 * seen
        crowded = any(0.3 < a / predicted < 0.93 and 0.9 < b / seen < 1.1 for a, b in pairs.values())
        ax.scatter(x, y, s=40 if shown else 18, color=THINGS[4] if shown else THINGS[1], zorder=3)
        if shown:
            side = "left" if predicted > seen or crowded else "right"  # away from the line and from dots
            place = x, max(y, free[side])  # and above the text before it
            free[side] = place[1] * (ends[1] / ends[0]) ** 0.06
            look = {"textcoords": "offset points", "fontsize": 8, "ha": side, "va": "center", "bbox": PLATE}
            ax.annotate(name, place, (8 if side == "left" else -8, 0), **look)
    equal_where(ax, ends, linestyle="--")
    ax.set(xlabel="ms predicted (computed)", ylabel="ms on live ranks (paced)")
    ax.margins(x=0.3)
    return fig


def three_panels(problem: ChainProblem, operators: Sequence, plan: ChainPlan) -> Figure:
    """Partition, place, schedule: operators of each cluster, its devices with their cuts, and the clock."""
    fig, (one, two, three) = figure(8, 3, 1, 3, width_ratios=[0.9, 1.1, 1.4])
    one.bar(range(len(operators)), [op.flops / 1e6 for op in operators], 0.85, color=THINGS[1])
    left = 0
    for op, at, after in zip(problem.operators, plan, plan[1:], strict=False):
        left += op.links
        border = {"linewidth": 0.8, "linestyle": ":"} if at.devices == after.devices else {"linewidth": 2}
        one.axvline(left - 0.5, color=SERIAL, **border)
    name_columns(one, [op.name for op in operators], rotation=90, fontsize=8)
    one.set(title="1. partition", ylabel="million operations")
    _grid(two, problem, plan)
    two.set_title("2. place, and cut")
    _clock(three, problem, plan)
    three.set_title("3. schedule")
    return fig
