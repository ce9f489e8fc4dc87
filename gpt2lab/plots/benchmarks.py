"""All benchmarks on one page, and what each switch for speed gives."""

import math
import statistics
import textwrap

from matplotlib.figure import Figure

from .forms import bars, name_rows, numbers
from .style import COLORS, THINGS, figure

SHOWN = 8
"""At most so many points a panel; the rest is in the JSON file."""


def dashboard(report: dict) -> Figure:
    """A panel a benchmark: median milliseconds (points, log scale) and the range of the rounds (pale lines).

    `report` is what `everything.collect` returns. Rivals are grey, ours blue.
    """
    found = {name: whats for name, whats in report["seconds"].items() if whats}
    rows = math.ceil(len(found) / 3)
    fig, panels = figure(13, 0.6 + 1.9 * rows, rows, 3, squeeze=False)
    for ax in panels.flat[len(found) :]:
        ax.set_axis_off()
    for ax, (name, whats) in zip(panels.flat, found.items(), strict=False):
        some = {what: [1e3 * s for s in samples] for what, samples in list(whats.items())[:SHOWN]}
        for row, (what, samples) in enumerate(some.items()):
            color = THINGS[1] if is_rival(what) else THINGS[4]
            ax.hlines(row, min(samples), max(samples), color=color, lw=4, alpha=0.4)
            ax.plot(statistics.median(samples), row, "o", color=color)
        texts = [f"{shortened(what)}  {milliseconds(statistics.median(s))}" for what, s in some.items()]
        ax.set_yticks(range(len(some)), texts, fontsize=8)
        low, high = min(map(min, some.values())), max(map(max, some.values()))
        ax.set(title=name, xscale="log", ylim=(len(some) - 0.5, -0.5), xlim=(low / 1.5, high * 1.5))
        ticks = round_ticks(low / 1.5, high * 1.5)
        numbers(ax.xaxis, ticks, [f"{t:g}" for t in ticks])
    machine = report["machine"]
    fig.supxlabel(
        f"ms (measured, median and range of {report['rounds']} rounds; grey: rivals) on {machine['system']}, "
        f"{machine['cores']} cores, {machine['memory']}, torch {machine['torch']}, {machine['commit']}",
        fontsize=9,
    )
    return fig


def shortened(what: str) -> str:
    """A name of at most 36 characters; a longer plan ends in dots behind a comma, and the JSON file has all of it."""
    return textwrap.shorten(what if " " in what else what.replace(",", ", "), 36, placeholder=" ...")


def milliseconds(ms: float) -> str:
    """A time with about three digits."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers 1, 2, 5, 10 ... between two limits; only powers of ten where these are many."""
    every = [step * 10.0**e for e in range(-4, 6) for step in (1, 2, 5)]
    inside = [t for t in every if low <= t <= high]
    return inside if len(inside) < 6 else [t for t in inside if t in every[::3]]


RIVALS = ("transformers", "ddp", "fully_shard", "dtensor", "torch", "pytorch", "gloo", "serial", "sequential")


def is_rival(what: str) -> bool:
    """Whether a name is that of something we compare with."""
    return any(word in what.lower().replace(",", " ").replace("'", " ").split() for word in RIVALS)


def ladder(seconds: dict[str, float]) -> Figure:
    """Bars of the step time of every rung, as ratios to the first."""
    fig, ax = figure(7, 0.5 + 0.38 * len(seconds))
    first = next(iter(seconds.values()))
    names, ratios = list(seconds), [s / first for s in seconds.values()]
    bars(ax, ratios, [COLORS["wait"]] + [COLORS["forward"]] * (len(names) - 1), " {:.2f}", 0.8, size=10)
    name_rows(ax, names)
    ax.set(xlabel=f"step time, {names[0]} = 1", xlim=(0, max(ratios) * 1.12))
    return fig
