"""Figures of windowed attention: what is in a halo, how its rows travel, when it is cheaper than heads."""

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from ..parallel.context.layouts import hops, layout
from ..planner.problem import CLUSTERS
from .context import volumes
from .forms import heat, legend_above, rectangle, text_at
from .style import HUES, RC, THINGS, figure, paler, rank_color

EXCHANGES = dict(zip(("heads", "halo of x", "halo of k, v"), HUES, strict=False))
"""Colour of each exchange of windowed attention."""


def halo_mask(tokens: int, ranks: int, window: int) -> Figure:
    """The band of windowed attention, own keys in the rank's colour, keys borrowed from a neighbour hatched."""
    table = layout("contiguous", tokens, ranks)
    fig, ax = figure(5.2, 4, grid=False)
    for q in range(tokens):
        color = rank_color(table.owners[q])
        for k in range(max(0, q - window), q + 1):
            own = table.owners[k] == table.owners[q]
            look = {} if own else {"fc": paler(color, 0.6), "ec": THINGS[0], "hatch": "////"}
            rectangle(ax, k, q, 1, 1, color, lw=0.4, **look)
    for edge in np.cumsum(table.sizes)[:-1]:
        ax.axhline(edge, color="black", lw=0.8), ax.axvline(edge, color="black", lw=0.8)
    ax.set(xlim=(0, tokens), ylim=(tokens, 0), xlabel="key", ylabel="query", aspect="equal")
    return fig


def halo_arrows(sizes, window: int) -> Figure:
    """Shards with the halo in front of each: left the rows' way forward, right their gradients' way back."""
    fig, axes = figure(8, 2.6, cols=2, grid=False)
    ends, titles = np.cumsum((0, *sizes)), ("forward: rows", "backward: gradients, added")
    for ax, title, ahead in zip(axes, titles, (True, False), strict=True):
        for r, first in enumerate(ends[:-1]):
            y = len(sizes) - 1 - r
            for t in range(max(0, first - window), ends[r + 1]):
                own = t >= first
                look = {} if own else {"fc": "white", "ec": rank_color(r), "hatch": "////"}
                rectangle(ax, t, y - 0.3, 1, 0.6, rank_color(r), lw=0.8, **look)
                text_at(ax, t + 0.5, y, t, fontsize=8, color="white" if own else "black")
            if r:
                for t in range(max(0, first - window), first):
                    a, b = (t + 0.5, y + 0.68), (t + 0.5, y + 0.32)
                    style = {"arrowstyle": "->", "lw": 1.6, "color": rank_color(r - 1 if ahead else r)}
                    ax.annotate("", b if ahead else a, a if ahead else b, arrowprops=style)
        ax.set(xlim=(0, ends[-1]), ylim=(-0.5, len(sizes) - 0.5), title=title, xlabel="token")
        ax.set_yticks(range(len(sizes)), [f"rank {r}" for r in reversed(range(len(sizes)))])
    return fig


def heads_or_halos(window: int, ranks: int, tokens: int) -> Figure:
    """Rows of C numbers that the busiest rank sends: heads, a causal halo of the input, one of keys and values."""
    rows = min(window, tokens // ranks * (ranks - 1))
    amounts = {"heads": 4 * (ranks - 1) * tokens / ranks**2, "halo of x": rows, "halo of k, v": 2 * rows}
    bars = [(name, amount, amount) for name, amount in amounts.items()]
    return volumes(bars, "rows of C numbers, sent by the busiest rank")


def anemoi(tokens: int, width: int, window: int, heads: int) -> Figure:
    """Left: one exchange of a layer over the GPUs, by heads and by halos of x. Right: halos over the link's speed.

    Numbers of two bytes; left, links of 50 GB/s (InfiniBand, 400 Gbit/s) and 10 microseconds a message.
    """
    latency, rate = 1e-5, CLUSTERS["h100x64"].device.rate  # seconds; operations a second
    fig, (left, right) = figure(8, 3.4, cols=2)
    ranks, row = np.array([2, 4, 8, 16]), 2.0 * width
    by_heads = 4 * (ranks - 1) * (latency + tokens / ranks**2 * row / 50e9)
    by_halo = np.full(len(ranks), 2 * (latency + window * row / 50e9))
    left.plot(ranks, 1e3 * by_heads, "o-", color=EXCHANGES["heads"], label=f"heads (at most {heads} ranks)")
    left.plot(ranks, 1e3 * by_halo, "s-", color=EXCHANGES["halo of x"], label="halo of x, both sides")
    left.set(xlabel="GPUs", ylabel="milliseconds, forward", ylim=(0, None), xticks=ranks)
    speeds = np.geomspace(1e10, 1e12, 50)
    ways = (4, "-", "halo of x", "right"), (6, "--", "with the halo's q computed too", "left")
    for products, look, name, side in ways:
        twice = 2 * window * products * width**2 / rate
        times, cross = 2 * window * row / speeds + twice, rate * 2 / (products * width)
        right.loglog(speeds / 1e9, 1e6 * times, ls=look, color=EXCHANGES["halo of x"], label=name)
        same = f"equal at {cross / 1e9:.0f} GB/s"
        meet = cross / 1e9, 1e6 * 4 * window * row / cross
        right.plot(*meet, "o", color="black")
        place = (7, 3) if side == "left" else (-7, -9)
        right.annotate(same, meet, place, textcoords="offset points", fontsize=8, ha=side)
    label = "halo of k, v"
    right.loglog(speeds / 1e9, 1e6 * 4 * window * row / speeds, color=EXCHANGES[label], label=label)
    right.set(xlabel="GB/s of a link, each way", ylabel="microseconds, forward")
    for ax in (left, right):
        ax.legend(fontsize=8)
    return fig


def break_even(tokens: int, most: int, windows, counted=()) -> Figure:
    """Rows of C numbers an inner rank sends forward, over the ranks: heads against two-sided halos of the input.

    `counted` holds (ranks, rows) from live ranks, drawn as dots.
    """
    ranks = np.arange(2, most + 1)
    fig, ax = figure(8, 3.4)
    ax.plot(ranks, 4 * (ranks - 1) / ranks**2 * tokens, color=EXCHANGES["heads"], label="heads: 4 (N-1)/N² T")
    for place, window in enumerate(windows):
        style = ("--", "-.", ":")[place % 3]
        label = f"halos on both sides, {window} wide: 2 x {window}"
        ax.axhline(2 * window, color=EXCHANGES["halo of x"], ls=style, label=label)
    if counted:
        look = {"color": THINGS[0], "ms": 7, "zorder": 3, "label": "counted on live ranks"}
        ax.plot(*zip(*counted, strict=True), "o", **look)
    ax.set(xlabel="ranks N", ylabel="rows of C numbers sent forward")
    ax.legend(fontsize=8)
    return fig


def legal_windows(tokens: int, most: int) -> Figure:
    """How many hops a causal window needs, over the number of ranks; the line is the rule `half of the last shard`."""
    ranks, windows = range(2, most + 1), range(1, tokens // 2 + 1)
    values = np.array([[hops(layout("contiguous", tokens, n), w) for n in ranks] for w in windows], float)
    fig, ax = figure(8, 3.4)
    look = {"cmap": colormaps[RC["image.cmap"]].resampled(4), "vmin": 0.5, "vmax": 4.5, "aspect": "auto"}
    look |= {"origin": "lower", "extent": (1.5, most + 0.5, 0.5, windows[-1] + 0.5)}
    heat(ax, np.minimum(values, 4), None, "hops (4 or more)", range(1, 5), **look)
    rule = [layout("contiguous", tokens, n).sizes[-1] // 2 + 0.5 for n in ranks]
    ax.step(ranks, rule, where="mid", color="black", label="half of the last shard (first rule)")
    ax.set(xlabel="ranks", ylabel=f"window, of {tokens} tokens")
    legend_above(ax)
    return fig
