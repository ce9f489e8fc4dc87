"""Figures of many machines: bytes that cross, collectives against ranks, scaling curves, published steps, policies."""

import textwrap
from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure

from .style import COLORS, HUES, THINGS, figure, variant

MARKS = "os^Dvp"


def _powers(ax, numbers: Sequence[int]) -> None:
    """A logarithmic axis with the numbers themselves as marks."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(numbers), labels=[f"{n:,}" for n in numbers])
    ax.tick_params(axis="x", labelsize=8)
    ax.minorticks_off()


def crossed(bytes_by_place: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars: MB that leave a machine in a step, by placement and axis."""
    fig, ax = figure(8, 1.9)
    colors = {"dp+cp": THINGS[4], "tp": THINGS[3]}
    for y, found in enumerate(bytes_by_place.values()):
        left = 0.0
        for axis, color in colors.items():
            size = found.get(axis, 0) / 1e6
            ax.barh(y, size, left=left, color=color, label=axis if y == 0 else None)
            left += size
        ax.text(left, y, f" {left:.1f} MB", va="center", fontsize=9)
    ax.set(
        yticks=range(len(bytes_by_place)),
        yticklabels=list(bytes_by_place),
        xlabel="MB a step out of a machine",
    )
    ax.set_xlim(0, 1.15 * max(sum(f.values()) for f in bytes_by_place.values()) / 1e6)
    ax.invert_yaxis()
    fig.legend(loc="outside upper right", ncols=2, fontsize=9)
    return fig


def all_reduces(worlds: Sequence[int], seconds: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Milliseconds of an all-reduce against the number of ranks, a line an algorithm."""
    fig, ax = figure(8, 3.2)
    for color, mark, (name, times) in zip(HUES, MARKS, seconds.items(), strict=False):
        ax.plot(worlds, [1e3 * t for t in times], color=color, marker=mark, ms=5, label=name)
    _powers(ax, worlds)
    ax.set(yscale="log", xlabel="GPUs", ylabel="ms", title=title)
    fig.legend(loc="outside right upper", fontsize=9)
    return fig


def scaling(
    curves: Mapping[str, Mapping[int, tuple[float, bool]]], ylabel: str, title: str, ideal=None
) -> Figure:
    """`curves[family][n]` is a value and whether the plan fits into memory (filled) or not (hollow, dotted)."""
    worlds = sorted({n for curve in curves.values() for n in curve})
    fig, ax = figure(8, 3.4)
    for color, mark, (name, curve) in zip(HUES, MARKS, curves.items(), strict=False):
        numbers = sorted(curve)
        ax.plot(numbers, [curve[n][0] for n in numbers], color=color, lw=1, ls=":")
        fit = [n for n in numbers if curve[n][1]]
        ax.plot(fit, [curve[n][0] for n in fit], color=color, lw=2)
        for n in numbers:
            ax.plot(n, curve[n][0], mark, color=color, mfc=color if curve[n][1] else "white", ms=6)
        ax.plot([], [], color=color, marker=mark, label=name)
    if ideal:
        ax.plot(worlds, [ideal(n) for n in worlds], color=COLORS["other"], ls="--", lw=1, label="ideal")
    _powers(ax, worlds)
    ax.set(xlabel="GPUs", ylabel=ylabel, title=title, yscale="log" if ideal else "linear")
    fig.legend(loc="outside right upper", fontsize=9)
    return fig


def beside_published(
    rows: Sequence[tuple[str, str, float]], off: float = 0.2, marked: Collection[str] = ()
) -> Figure:
    """(name, source, error): a dot for each row, a line for each source; the band is `off` either way.

    Rows whose names are `marked` have another colour and shape.
    """
    sources = list(dict.fromkeys(source for _, source, _ in rows))
    fig, ax = figure(8, 0.8 + 0.42 * len(sources))
    for y, source in enumerate(sources):
        mine = [(100 * error, name) for name, where, error in rows if where == source]
        for yes, look, color in ((False, "o", THINGS[0]), (True, "D", "red")):
            dots = [e for e, name in mine if (name in marked) == yes]
            ax.plot(dots, [y] * len(dots), look, color=color, ms=8, alpha=0.6)
        e, name = max(mine, key=lambda one: abs(one[0]))
        side = "right" if e > 0 else "left"
        ax.annotate(name, (e, y), (0, 7), textcoords="offset points", fontsize=7, ha=side)
    ax.axvspan(-100 * off, 100 * off, color=COLORS["wait"], alpha=0.4, zorder=0)
    ax.axvline(0, color="black", lw=1)
    ax.set(xlabel="predicted seconds of a step, % above the published ones", ylim=(len(sources) - 0.5, -0.7))
    ax.set_yticks(range(len(sources)), labels=[textwrap.fill(s, 40) for s in sources], fontsize=8)
    return fig


def goodputs(
    spares: Sequence[int], found: Mapping[str, Sequence[float]], flat: Mapping[str, float]
) -> Figure:
    """Work kept, in percent: lines against the number of spare machines, and policies without spares as levels."""
    fig, ax = figure(8, 3)
    for i, (name, values) in enumerate(found.items()):
        ax.plot(spares, [100 * v for v in values], marker="o", ms=4, label=name, **variant(i + 2))
    for color, (name, value) in zip(THINGS[3:], flat.items(), strict=False):
        ax.axhline(100 * value, color=color, ls="--", label=name)
    ax.set(xlabel="spare machines", ylabel="% of the work without faults", ylim=(0, 100))
    fig.legend(loc="outside upper right", ncols=3, fontsize=9)
    return fig


def stragglers(numbers: Sequence[int], late: Mapping[str, Sequence[float]]) -> Figure:
    """How much later the slowest of n ranks comes, in percent of the mean."""
    fig, ax = figure(8, 2.6)
    for i, (name, values) in enumerate(late.items()):
        ax.plot(numbers, [100 * (v - 1) for v in values], marker="o", ms=4, label=name, **variant(i))
    _powers(ax, numbers)
    ax.set(xlabel="ranks that wait for each other in every step", ylabel="% longer", ylim=(0, None))
    fig.legend(loc="outside upper right", ncols=3, fontsize=9)
    return fig
