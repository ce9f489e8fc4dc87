"""Figures of many machines: bytes that cross, collectives against ranks, scaling curves, published steps, policies."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from matplotlib.figure import Figure

from .forms import chart, numbers, stacked
from .mesh import AXES
from .style import COLORS, HUES, MARKS, SERIAL, THINGS, WAYS, figure, paler, variant

FAMILIES = ("dp", "tp x dp", "tp x pp x dp", "ZeRO-3", "cp x dp", "HSDP", "ep=8 x dp", "ep=64 x dp", "ZeRO-1")
SHADES = (*WAYS.values(), HUES[6], *THINGS[1:3], paler(WAYS["ZeRO"], 0.45))
LOOKS = {
    name: {"color": color, "marker": mark} for name, color, mark in zip(FAMILIES, SHADES, MARKS, strict=False)
}
"""Colour and mark of each family of plans, the same in all figures of scaling."""
ABOVE = {"loc": "outside upper right", "ncols": 3, "fontsize": 9}


def _powers(values: Sequence[int]):
    """What makes an axis logarithmic with these numbers as marks."""

    def mark(ax):
        ax.set_xscale("log", base=2)
        numbers(ax.xaxis, values, [f"{n:,}" for n in values])
        ax.tick_params(axis="x", labelsize=8)

    return mark


def crossed(bytes_by_place: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars: MB that leave a machine in a step, by placement and axis."""
    fig, ax = figure(8, 1.9)
    looks = {axis: AXES[axis] for axis in ("dp+cp", "tp")}
    in_mb = lambda found: {axis: found[axis] / 1e6 for axis in looks if axis in found}
    sizes = {place: in_mb(found) for place, found in bytes_by_place.items()}
    stacked(ax, sizes, looks, says=" {:.1f} MB")
    most = max(sum(of.values()) for of in bytes_by_place.values()) / 1e6
    ax.set(xlabel="MB a step out of a machine", xlim=(0, 1.15 * most))
    ax.grid(visible=True, axis="y")
    fig.legend(loc="outside upper right", ncols=2, fontsize=9)
    return fig


def all_reduces(worlds: Sequence[int], seconds: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Milliseconds of an all-reduce against the number of ranks, a line an algorithm."""
    looks = [{"color": color, "marker": mark, "ms": 5} for color, mark in zip(HUES, MARKS, strict=False)]
    labels = {"yscale": "log", "xlabel": "GPUs", "ylabel": "ms", "title": title}
    legend = {"loc": "outside right upper", "fontsize": 9}
    return chart(worlds, seconds, looks, (8, 3.2), _powers(worlds), legend, scale=1e3, **labels)


def scaling(
    curves: Mapping[str, Mapping[int, tuple[float, bool]]], ylabel: str, title: str, ideal=None
) -> Figure:
    """`curves[family][n]` is a value and whether the plan fits into memory (filled) or not (hollow, dotted)."""
    worlds = sorted({n for curve in curves.values() for n in curve})
    fig, ax = figure(8, 3.4)
    for name, curve in curves.items():
        fit = [n for n in sorted(curve) if curve[n][1]]
        look = LOOKS[name] | {"ms": 6}
        ax.plot(sorted(curve), [curve[n][0] for n in sorted(curve)], ":", lw=1, mfc="white", **look)
        ax.plot(fit, [curve[n][0] for n in fit], lw=2, label=name, **look)
    if ideal:
        ax.plot(worlds, [ideal(n) for n in worlds], color=COLORS["other"], ls="--", lw=1, label="ideal")
    _powers(worlds)(ax)
    ax.set(xlabel="GPUs", ylabel=ylabel, title=title, yscale="log" if ideal else "linear")
    fig.legend(loc="outside right upper", fontsize=9)
    return fig


def beside_published(rows: Sequence[tuple[str, str, float]], marked: Collection[str] = ()) -> Figure:
    """(name, source, error): a dot for each row, a line for each source; the band is 20 % either way.

    Rows whose names are `marked` have another colour and shape.
    """
    sources = list(dict.fromkeys(source for _, source, _ in rows))
    fig, ax = figure(8, 0.8 + 0.42 * len(sources))
    for y, source in enumerate(sources):
        mine = [(100 * error, name) for name, where, error in rows if where == source]
        for yes, look, color in ((False, "o", THINGS[0]), (True, "D", THINGS[3])):
            dots = [e for e, name in mine if (name in marked) == yes]
            ax.plot(dots, [y] * len(dots), look, color=color, ms=8, alpha=0.6)
        e, name = max(mine, key=lambda one: abs(one[0]))
        side = "right" if e > 0 else "left"
        ax.annotate(name, (e, y), (0, 7), textcoords="offset points", fontsize=8, ha=side)
    ax.axvspan(-20, 20, color=COLORS["wait"], alpha=0.4, zorder=0)
    ax.axvline(0, color=SERIAL, lw=1, zorder=1)
    ax.set(xlabel="predicted seconds of a step, % above the published ones", ylim=(len(sources) - 0.5, -0.7))
    ax.set_yticks(range(len(sources)), labels=[textwrap.fill(s, 40) for s in sources], fontsize=8)
    return fig


def goodputs(
    spares: Sequence[int], found: Mapping[str, Sequence[float]], flat: Mapping[str, float]
) -> Figure:
    """Work kept, in percent: lines against the number of spare machines, and policies without spares as levels."""

    def also(ax):
        for color, (name, value) in zip(THINGS[3:], flat.items(), strict=False):
            ax.axhline(100 * value, color=color, ls="--", label=name)

    looks, marks = map(variant, count(2)), {"marker": "o", "ms": 4}
    labels = {"xlabel": "spare machines", "ylabel": "% of the work without faults", "ylim": (0, 100)}
    return chart(spares, found, looks, (8, 3), also, ABOVE, marks, 100, **labels)


def stragglers(ranks: Sequence[int], late: Mapping[str, Sequence[float]]) -> Figure:
    """How much later the slowest of n ranks comes, in percent of the mean."""
    later = {name: [100 * (v - 1) for v in values] for name, values in late.items()}
    looks, marks = map(variant, count()), {"marker": "o", "ms": 4}
    labels = {"xlabel": "ranks that wait for each other in every step", "ylabel": "% longer"}
    return chart(ranks, later, looks, (8, 2.6), _powers(ranks), ABOVE, marks, ylim=(0, None), **labels)
