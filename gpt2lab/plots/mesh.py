"""Figures of device meshes: the cube of ranks, bytes by class of link, placements, bugs, what goes together."""

import math
from collections.abc import Sequence
from itertools import chain, cycle

from matplotlib.figure import Figure

from .forms import cell, chart, name_columns, name_rows, numbers, patches, stacked, text_at
from .style import HUES, MARKS, SERIAL, THINGS, WAYS, figure, ink, paler, plain_log, variant

AXES = {"tp": WAYS["tensor"], "cp": WAYS["context"], "dp+cp": WAYS["data"], "pp": WAYS["pipeline"]}
AXES |= {"tie": THINGS[2], "world": SERIAL}
"""Colour of each axis of the mesh where bytes are stacked by axis."""

KINDS = ("loss", "every gradient", "gradient norm", "loss curve")
COMPARED = dict(zip(KINDS, zip((SERIAL, THINGS[1]) * 2, MARKS, strict=False), strict=True))
"""Colour and mark of what is compared with a serial run."""

STEPS = ((1.0, 0.0), (0.5, 0.42), (0.0, -1.0))  # on paper: the innermost axis, the next one, the outermost
NODE = paler(THINGS[2], 0.5)


def cube(lines: dict[str, list[tuple[int, ...]]], nodes: Sequence[int]) -> Figure:
    """The mesh as a cube, once for every axis: a group has a colour and a bar, a node is a grey patch.

    `lines[axis]` are the groups of an axis, as `Mesh.lines` gives them, for two or three axes, outermost first;
    `nodes[r]` is the node of rank r.
    """
    sizes = [len(groups[0]) for groups in lines.values()]
    place = {r: _corner(r, sizes) for r in range(math.prod(sizes))}
    fig, panels = figure(8, 2.4 if len(sizes) < 3 else 2.5, 1, len(lines))
    for ax, (axis, groups) in zip(panels, lines.items(), strict=True):
        for node in sorted(set(nodes)):
            _patch(ax, [place[r] for r in place if nodes[r] == node])
        for group in chain(*lines.values()):  # all edges of the cube, thin
            x, y = zip(*(place[r] for r in group), strict=True)
            ax.plot(x, y, color=THINGS[1], lw=1, zorder=1.5)
        for hue, group in zip(cycle(HUES), groups, strict=False):
            x, y = zip(*(place[r] for r in group), strict=True)
            ax.plot(x, y, color=hue, lw=5, solid_capstyle="round", zorder=2)
            ax.scatter(x, y, s=330, color=hue, zorder=3)
            for rank in group:
                text_at(ax, *place[rank], rank, on=hue, weight="bold")
        apart = groups[0][1] - groups[0][0]
        ax.set_title(f"{axis}: ranks {apart} apart" if apart > 1 else f"{axis}: neighbours")
        ax.margins(0.28)
        ax.set(aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return fig


def _corner(rank: int, sizes: list[int]) -> tuple[float, float]:
    """The position of a rank in the drawing; the innermost axis goes to the right."""
    x = y = 0.0
    # with two axes the outer one runs down, as rows of a table do
    steps = STEPS if len(sizes) > 2 else (STEPS[0], STEPS[2])
    for size, (dx, dy) in zip(reversed(sizes), steps, strict=True):
        rank, along = divmod(rank, size)
        x, y = x + 1.5 * along * dx, y + 1.5 * along * dy
    return x, y


def _patch(ax, corners: list[tuple[float, float]]) -> None:
    """A grey patch with round corners around the ranks of a node: their outline, drawn with a very wide pen."""
    middle = [sum(c) / len(corners) for c in zip(*corners, strict=True)]
    around = sorted(corners, key=lambda c: math.atan2(c[1] - middle[1], c[0] - middle[0]))
    x, y = zip(*around, around[0], strict=True)
    look = {"color": NODE, "zorder": 1, "solid_joinstyle": "round", "solid_capstyle": "round"}
    ax.plot(x, y, lw=38, **look)
    ax.fill(x, y, color=NODE, zorder=1)


def traffic_by_class(plans: dict[str, dict[tuple[str, str], float]]) -> Figure:
    """Megabytes sent by all ranks for each plan: a bar inside nodes and one between them, stacked by axis.

    An axis with less than a thousandth of the bytes is left out.
    """
    classes = sorted({c for sent in plans.values() for _, c in sent}, reverse=True)
    most = max(sum(sent.values()) for sent in plans.values())
    largest = lambda axis: max(sent.get((axis, c), 0) for sent in plans.values() for c in classes)
    shown = {axis: color for axis, color in AXES.items() if largest(axis) > most / 1e3}
    fig, panels = figure(8, 1.2 + 0.36 * len(plans), 1, len(classes), sharey=True, sharex=True, squeeze=False)
    for panel, name in zip(panels[0], classes, strict=True):
        sizes = {p: {a: sent.get((a, name), 0) / 1e6 for a in shown} for p, sent in plans.items()}
        stacked(panel, sizes, shown, 0.62, " {:.1f}")
        panel.set(title=name, xlabel="MB sent by all ranks in a step")
        panel.margins(x=0.16)
    fig.legend(handles=patches(shown), title="axis", fontsize=9, loc="outside right center")
    return fig


def placements(seconds: dict[str, dict[str, tuple[float, float]]]) -> Figure:
    """For each plan and each placement a bar of the milliseconds seen, and a diamond at those predicted."""
    names = list(next(iter(seconds.values())))
    fig, ax = figure(8, 0.9 + 0.62 * len(seconds))
    inside = {"textcoords": "offset points", "va": "center", "fontsize": 9}
    for i, name in enumerate(names):
        ms = [[1e3 * s for s in found[name]] for found in seconds.values()]
        places = [row + 0.36 * (i - (len(names) - 1) / 2) for row in range(len(ms))]
        ax.barh(places, [seen for _, seen in ms], 0.32, color=THINGS[2 * i], label=name)
        look = {"marker": "D", "s": 34, "color": "white", "edgecolor": SERIAL, "zorder": 3}
        marks = ax.scatter([predicted for predicted, _ in ms], places, label="predicted", **look)
        for y, (_, seen) in zip(places, ms, strict=True):
            ax.annotate(f"{seen:.0f}", (0, y), (4, 0), color=ink(THINGS[2 * i]), **inside)
    name_rows(ax, seconds)
    ax.set(xlabel="ms that the links add to a step")
    ax.margins(x=0.08)
    fig.legend(handles=[*ax.containers, marks], loc="outside right center", fontsize=9)
    return fig


def bugs(runs: dict[str, list[float]], errors: dict[str, dict[str, float]]) -> Figure:
    """Left the loss curves of the right run (first, black) and of wrong ones; right what each is wrong by.

    `errors[name]` are relative errors by what was compared (COMPARED), on a log scale.
    """
    fig, (losses, wrong) = figure(8, 3.4, 1, 2, width_ratios=(2, 3))
    (right, expected), *others = runs.items()
    losses.plot(expected, color=SERIAL, lw=6, alpha=0.3, label=right)
    for i, (_, run) in enumerate(others):
        losses.plot(run, lw=1.4, **variant(i))
    losses.set(xlabel="step", ylabel="loss (nats a token)", title="what you would look at")
    losses.legend()
    wrong.axvspan(1e-19, 1e-10, color=THINGS[2], alpha=0.35, lw=0)
    for at, words in ((1e-13, "equal"), (1e-5, "wrong")):
        wrong.text(at, -0.35, words, ha="center", va="top", color=THINGS[0])
    for row, found in enumerate(errors.values()):
        for i, (kind, value) in enumerate(found.items()):
            color, marker = COMPARED[kind]
            label = kind if row == 0 else None
            y = row + 0.2 * (i - (len(found) - 1) / 2)  # side by side where they are equal
            wrong.scatter(max(value, 1e-16), y, s=40, marker=marker, color=color, label=label, zorder=3)
        line = {"transform": wrong.get_yaxis_transform(), "lw": 2} | variant(row)  # the key of the left panel
        wrong.plot((0.01, 0.08), (row, row), **line)
    wrong.set_yticks(range(len(errors)), list(errors), fontsize=9)
    wrong.set(xscale="log", xlim=(1e-19, 30), ylim=(len(errors) - 0.5, -0.5), xlabel="relative error")
    wrong.set(xticks=[10.0**k for k in range(-15, 1, 3)], title="what is wrong, by verify's limit")
    look = {"loc": "outside lower right", "ncols": len(COMPARED), "fontsize": 9}
    fig.legend(*wrong.get_legend_handles_labels(), **look)
    return fig


def strategy_pairs(names: Sequence[str], tested: dict[tuple[str, str], list[str]]) -> Figure:
    """Which strategies go together: the number of tested plans that use both, darker for more.

    `tested` is `compositions.table()`.
    """
    fig, ax = figure(7.2, 3.6, grid=False)
    most = max(map(len, tested.values()))
    for row, a in enumerate(names):
        for col, b in enumerate(names[: row + 1]):
            count = len(tested.get((a, b), ()))
            share = 0.15 + 0.85 * count / most if count else 0.0
            shade = paler(AXES["dp+cp" if a != b else "pp"], 1 - share)
            cell(ax, col - 0.47, row, 0.94, 0.9, shade, str(count) if count else "–")
    name_rows(ax, names)
    name_columns(ax, names, rotation=35, ha="right")
    ax.set(xlim=(-0.6, len(names) - 0.4), ylim=(len(names) - 0.4, -0.6))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return fig


def threads_or_ranks(batch: Sequence[int], seconds: dict[str, list[float]]) -> Figure:
    """Milliseconds per step over the rows of a batch, a line for each plan on the same cores."""

    def also(ax):
        plain_log(ax.yaxis)
        numbers(ax.xaxis, batch)

    labels = {"xscale": "log", "xlabel": "rows of the batch", "ylabel": "ms a step"}
    shared = {"marker": "o", "lw": 2}
    return chart(batch, seconds, THINGS[3:], (6.4, 2.8), also, shared=shared, scale=1e3, **labels)
