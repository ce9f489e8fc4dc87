"""Figures of hardware and timing: rates of memory and links, trials, speed-up, overlap."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from ..planner import metrics
from .forms import legend_right, name_rows, numbers, patches, text_at
from .style import COLORS, RIGHT, THINGS, WRONG, figure, variant

RATE = EngFormatter("B/s")
"""How bytes a second are written: 12.3 GB/s."""


def memory(rates: dict[int, float], published: dict[str, float], call: float) -> Figure:
    """Bytes a second of a copy against the bytes it touches; `published` rates as levels.

    `call` are the seconds that an empty call takes: left of the dotted line the call is what is measured.
    """
    fig, ax = figure(8, 3.8)
    sizes = list(rates)
    ax.plot(sizes, list(rates.values()), "o-", color=THINGS[4], label="copy here (measured)")
    edge = sizes[-1] * 40
    ceiling = [s for s in np.geomspace(sizes[0], edge, 60) if s / call < max(rates.values()) * 4]
    ax.plot(ceiling, [s / call for s in ceiling], ":", color=THINGS[1], label="as fast as calls can begin")
    for name, rate in published.items():
        ax.axhline(rate, color=THINGS[3], lw=1)
        ax.text(edge, rate * 1.08, name, ha="right", va="bottom", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="bytes touched", ylabel="bytes a second")
    ax.set(xlim=(sizes[0] / 1.5, edge * 1.2), ylim=(min(*rates.values(), *published.values()) / 2, 3e13))
    ticks = [2**b for b in range(12, 31, 4) if 2**b >= sizes[0]]
    ax.set_xticks(ticks, [f"{t >> 20} MiB" if t >> 20 else f"{t >> 10} KiB" for t in ticks])
    ax.yaxis.set_major_formatter(RATE)
    ax.minorticks_off()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.25), fontsize=8)
    return fig


def ladder(here: dict[str, float], published: dict[str, float], derived: dict[str, float]) -> Figure:
    """Bytes per second of every path of data, fastest first: measured here, published, and derived from these."""
    kinds = {"measured here": here, "published": published, "derived": derived}
    paths = [(rate, name, kind) for kind, of in kinds.items() for name, rate in of.items()]
    paths.sort(reverse=True)
    fig, ax = figure(8, 0.9 + 0.3 * len(paths))
    colors = dict(zip(kinds, THINGS[:1:-1], strict=True))
    low = paths[-1][0] / 4
    for row, (rate, _, kind) in enumerate(paths):
        ax.barh(row, rate - low, 0.7, low, color=colors[kind])
        ax.text(rate * 1.1, row, RATE(float(f"{rate:.3g}")), va="center", fontsize=8)
    ax.set(xscale="log", xlim=(low, paths[0][0] * 12), xlabel="bytes a second")
    name_rows(ax, [name for _, name, _ in paths], fontsize=9)
    ax.legend(handles=patches(colors), loc="lower right", fontsize=8)
    return fig


def scaling(rates: dict[str, dict[int, float]], cores: int) -> Figure:
    """Total rate of n ranks over that of one rank, by number of ranks; what would be ideal on `cores` is dashed."""
    fig, ax = figure(8, 3)
    counts = sorted({n for of_one in rates.values() for n in of_one})
    ax.plot(counts, [min(n, cores) for n in counts], "--", color=THINGS[1], label=f"ideal with {cores} cores")
    for i, (name, by_ranks) in enumerate(rates.items()):
        gained = [rate / by_ranks[1] for rate in by_ranks.values()]
        ax.plot(list(by_ranks), gained, "o-", color=variant(i)["color"], label=name)
    ax.set(xlabel="ranks at the same time", ylabel="all ranks / one rank", xticks=counts, ylim=(0, None))
    legend_right(ax)
    return fig


def mistakes(panels: dict[str, dict[str, list[float]]]) -> Figure:
    """One panel a mistake: its trials in milliseconds in order, wrong and right, each with a line at the median."""
    fig, axes = figure(8, 2.9, 1, len(panels), squeeze=False)
    for ax, (title, series) in zip(axes[0], panels.items(), strict=True):
        for (name, times), color in zip(series.items(), (WRONG, RIGHT), strict=False):
            values = [1e3 * t for t in times]
            ax.plot(range(1, len(values) + 1), values, "o", ms=4, color=color, label=name)
            ax.axhline(np.median(values), color=color, lw=1, alpha=0.6)
        ax.set(title=title, xlabel="trial", yscale="log")
        low, high = ax.get_ylim()
        ax.set_ylim(low / 1.3, high * 6)
        ticks = [t for k in range(-3, 5) for t in (10.0**k, 3 * 10.0**k) if low / 1.3 <= t <= high * 6]
        numbers(ax.yaxis, ticks, [f"{t:g}" for t in ticks])
        ax.legend(fontsize=8, loc="upper right", handletextpad=0.1)
    axes[0][0].set_ylabel("ms")
    return fig


def speedups(points: dict[str, tuple[int, float]], fractions) -> Figure:
    """Amdahl's curves for serial fractions, with points (workers, speed-up); on the right Karp-Flatt of the points."""
    fig, (left, right) = figure(8, 3.6, 1, 2, width_ratios=(2, 1))
    workers = np.geomspace(1, 1024, 100)
    left.plot(workers, workers, "--", color=THINGS[1], label="ideal")
    for fraction, shade in zip(fractions, np.linspace(0.35, 1, len(fractions)), strict=True):
        curve = [metrics.amdahl(fraction, p) for p in workers]
        left.plot(workers, curve, color=THINGS[0], alpha=shade, lw=1.5)
        left.text(1.1 * workers[-1], curve[-1], f"{100 * fraction:.3g} %", va="center", fontsize=8)
    for i, (name, (p, gained)) in enumerate(points.items()):
        left.plot(p, gained, "o", color=variant(i)["color"], ms=8, mec="white", label=name)
        right.barh(i, 100 * metrics.karp_flatt(gained, p), 0.6, color=variant(i)["color"])
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="speed-up", ylim=(0.3, 130))
    numbers(left.xaxis, [1, 2, 8, 32, 112, 512])
    numbers(left.yaxis, [0.5, 1, 2, 5, 10, 25, 100])
    left.legend(fontsize=8, loc="upper left")
    name_rows(right, points, fontsize=8)
    right.set(xlabel="% (Karp-Flatt)", title="serial fraction")
    return fig


def box_plot(runs: dict[str, list[float]]) -> Figure:
    """Times of iterations by condition: box between the quartiles, line at the median, every iteration a dot."""
    fig, ax = figure(8, 0.9 + 0.5 * len(runs))
    for row, times in enumerate(runs.values()):
        values = 1e3 * np.array(times)
        ax.boxplot(values, positions=[row], orientation="horizontal", widths=0.5, showfliers=False)
        spread = row + 0.3 * (np.arange(len(values)) % 5 - 2) / 5
        ax.plot(values, spread, ".", ms=4, color=THINGS[4], alpha=0.6)
    name_rows(ax, runs)
    ax.set(xlabel="ms", xlim=(0, None))
    return fig


def lanes(pieces: int, compute: float, comm: float) -> Figure:
    """Computing and sending of `pieces`, one thing at a time and overlapped, with the bound below; times in ms."""
    fig, axes = figure(8, 3.4, 2, 1, sharex=True)
    ends = metrics.sequential(pieces, compute, comm), metrics.overlapped(pieces, compute, comm)
    for ax, apart, end in zip(axes, (True, False), ends, strict=True):
        computed = sent = 0.0
        for i in range(pieces):
            begin = sent if apart else computed
            computed = begin + compute
            sent = max(sent, computed) + comm
            works = (begin, compute, "backward"), (sent - comm, comm, "comm")
            for row, (start, took, kind) in enumerate(works):
                ax.barh(row, took, 0.8, start, color=COLORS[kind], edgecolor="white")
                if took > 0.03 * ends[0]:
                    text_at(ax, start + took / 2, row, i, fontsize=8)
        ax.axvline(end, color="black", lw=1)
        ax.set(title=f"{'one after the other' if apart else 'overlapped'}: {end:g} ms")
        name_rows(ax, ["compute", "send"])
    bound = pieces * max(compute, comm)
    axes[1].axvline(bound, color=THINGS[1], ls=":", lw=2)
    axes[1].text(bound, -0.55, f"never below {bound:g} ", ha="right", fontsize=8, color=THINGS[1])
    axes[1].set_xlabel("ms")
    return fig


def roofline(points: dict[str, list[tuple[float, float]]], bandwidth: float, cached: float) -> Figure:
    """Operations a second against operations for each byte touched; the roof is `bandwidth`, and the best point.

    A dashed roof is that of `cached`, the bandwidth of the cache. Points far under the roof pay for their calls.
    """
    fig, ax = figure(8, 3.4)
    peak, x = max(y for line in points.values() for _, y in line), np.geomspace(0.05, 200, 60)
    ax.plot(x, np.minimum(peak, bandwidth * x), color=THINGS[0], lw=2, label="roof: memory, then arithmetic")
    look = {"color": THINGS[1], "lw": 1.2, "label": "roof: cache, then arithmetic"}
    ax.plot(x, np.minimum(peak, cached * x), "--", **look)
    ax.axvline(peak / bandwidth, color=THINGS[1], lw=1, ls=":")
    ax.text(peak / bandwidth * 1.1, peak / 150, f"balance: {peak / bandwidth:.0f}", fontsize=9)
    for (name, line), color in zip(points.items(), THINGS[3:], strict=False):
        ax.plot(*zip(*line, strict=True), "o", color=color, label=name)
    ax.set(xlabel="operations for each byte touched", ylabel="operations a second")
    ax.set(xscale="log", yscale="log", xlim=(0.05, 200), ylim=(peak / 1e4, peak * 3))
    ax.legend(fontsize=9, loc="lower right")
    return fig
