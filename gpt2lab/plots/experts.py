"""Figures of mixtures of experts: how tokens travel, who chose whom, load over time, what a choice of width costs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from .style import COLORS, HUES, THINGS, figure, ink, rank_color


def flow(choices: Sequence[Sequence[int]] = ((0, 2, 3, 0), (2, 1, 0, 2)), experts: int = 4):
    """Tokens of two ranks on their way to experts of two ranks; what crosses the middle is what travels."""
    fig, ax = figure(9, 3.4)
    ax.set(xlim=(-0.4, 10.6), ylim=(-0.5, 4.5))
    ax.set_axis_off()
    tokens = [(rank, e) for rank, row in enumerate(choices) for e in row]
    heights = np.linspace(4, 0, len(tokens))
    rooms = np.linspace(3.6, 0.4, experts)
    for x, title in ((0.3, "tokens"), (2.6, "router"), (5.1, "expert"), (7.6, "weighted"), (9.9, "tokens")):
        ax.text(x, 4.45, title, ha="center", weight="bold")
    for (rank, e), y in zip(tokens, heights, strict=True):
        for x in (0, 9.6):
            ax.add_patch(Rectangle((x, y - 0.17), 0.6, 0.34, fc=rank_color(rank), ec="white"))
        away = rank != e * 2 // experts
        style = {"color": COLORS["comm"] if away else COLORS["other"], "lw": 1.6 if away else 0.8}
        for begin, end in (((0.65, y), (4.6, rooms[e])), ((5.6, rooms[e]), (9.55, y))):
            ax.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=8, **style))
    for e, y in enumerate(rooms):
        rank = e * 2 // experts
        color = rank_color(rank)
        ax.add_patch(Rectangle((4.65, y - 0.3), 0.9, 0.6, fc=color, ec="white"))
        ax.text(5.1, y, f"E{e}", ha="center", va="center", color=ink(color))
    return fig


def written(text: str, routings: Mapping[str, Sequence[int]]):
    """A line of text once a routing, each letter on the colour of the expert that it asks for first."""
    fig, axes = figure(9, 0.95 * len(routings), len(routings), 1)
    for ax, (title, experts) in zip(axes, routings.items(), strict=True):
        ax.set(xlim=(0, len(text)), ylim=(0, 1))
        ax.set_axis_off()
        ax.set_title(title)
        for i, (letter, e) in enumerate(zip(text, experts, strict=True)):
            ax.add_patch(Rectangle((i, 0), 1, 1, fc=HUES[e % 8], ec="white", lw=0.4))
            look = {"ha": "center", "va": "center", "family": "monospace"}
            ax.text(i + 0.5, 0.5, letter, color=ink(HUES[e % 8]), **look)
    return fig


def loads(histories: Mapping[str, np.ndarray], window: int = 10):
    """Each expert's share of the choices, a running mean over `window` steps, one panel a way to balance.

    The even share is dashed.
    """
    fig, axes = figure(9, 2.8, 1, len(histories), sharey=True, squeeze=False)
    for ax, (name, shares) in zip(axes[0], histories.items(), strict=True):
        for e, line in enumerate(shares.T):
            mean = np.convolve(line, np.ones(window) / window, "valid")
            ax.plot(np.arange(len(mean)) + window, mean, color=HUES[e % 8], lw=1.2)
        ax.axhline(1 / shares.shape[1], color=THINGS[1], ls="--", lw=1)
        ax.set(title=name, xlabel="step", ylim=(0, None))
    axes[0][0].set_ylabel("share of all choices")
    return fig


def running_losses(curves: Mapping[str, Sequence[Sequence[float]]], tokens: int, window: int = 10):
    """Training losses of several runs a name against tokens seen, each a running mean over `window` steps."""
    fig, ax = figure(8, 3)
    for i, (name, runs) in enumerate(curves.items()):
        for j, curve in enumerate(runs):
            mean = np.convolve(curve, np.ones(window) / window, "valid")
            seen, label = tokens * (np.arange(len(mean)) + window), name if j == 0 else None
            ax.plot(seen, mean, label=label, color=THINGS[(0, 3, 4)[i % 3]], lw=1)
    ax.set(xlabel="tokens seen", ylabel="loss (nats a letter)")
    ax.legend()
    return fig


def pays(machines: Mapping[str, tuple[float, float, int, int]], widths=(256, 65536)):
    """Seconds on the wire per second of products against the hidden width, for (flop/s, bytes/s, ranks, bytes)."""
    fig, ax = figure(8, 3.2)
    width = np.geomspace(*widths, 50)
    for i, (name, (flops, wire, ranks, element)) in enumerate(machines.items()):
        share = 4 * element * (ranks - 1) / ranks / wire * flops / (12 * width)
        ax.loglog(width, share, label=name, color=THINGS[(3, 4, 0)[i % 3]])
    ax.axhline(1, color=THINGS[1], ls="--", lw=1)
    ax.set(xlabel="hidden width H of an expert", ylabel="wire time / compute time")
    ax.legend()
    return fig


def spread(found, row_bytes: int, title: str = ""):
    """Left: choices by expert, on the colour of its rank, those without room hatched. Right: KiB that each rank sends.

    `found` has choices (ranks, E) `asked` and `served`, and `rows` (ranks, ranks) from each rank to each.
    """
    asked, served, ranks = found.asked.sum(0), found.served.sum(0), len(found.rows)
    fig, (left, right) = figure(9, 3.2, 1, 2, width_ratios=[1.7, 1])
    places = np.arange(len(asked))
    colors = [rank_color(e * ranks // len(asked)) for e in places]
    left.bar(places, served, 0.8, color=colors)
    left.bar(places, asked - served, 0.8, served, color="white", edgecolor=colors, hatch="////", linewidth=0)
    left.axhline(asked.mean(), color=THINGS[0], ls="--", lw=1)
    left.set(xlabel="expert, on the colour of its rank", ylabel="choices", title=title)
    left.set_ylim(0, max(3 * asked.mean(), 1.05 * asked.max()))  # posters to compare get the same axes
    away = found.rows * (1 - np.eye(ranks, dtype=int))
    there, back = (row_bytes / 1024 * away.sum(axis) for axis in (1, 0))
    hues = [rank_color(r) for r in range(ranks)]
    right.bar(range(ranks), there, 0.8, color=hues)
    right.bar(range(ranks), back, 0.8, there, color=hues, alpha=0.45)
    right.set(xlabel="rank", title="KiB sent (pale: results back)", xticks=range(ranks))
    even = 2 * row_bytes / 1024 * asked.sum() * (ranks - 1) / ranks**2
    right.set_ylim(0, max(1.5 * even, 1.05 * (there + back).max()))
    for ax in (left, right):
        ax.grid(axis="x", visible=False)
    return fig
