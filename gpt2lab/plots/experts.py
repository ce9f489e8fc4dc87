"""Figures of mixtures of experts: how tokens travel, who chose whom, load over time, what a choice of width costs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch

from .forms import cell, name_columns, name_rows, rectangle, text_at
from .style import COLORS, HUES, THINGS, figure, rank_color, variant

MEAN_OF = 10  # steps of a running mean


def flow():
    """Tokens of two ranks on their way to four experts; what crosses between the ranks is what travels."""
    fig, ax = figure(8, 3.4)
    ax.set(xlim=(-0.4, 10.6), ylim=(-0.5, 4.5))
    ax.set_axis_off()
    choices = ((0, 2), (3, 1), (0, 1)), ((2, 3), (0, 3), (2, 1))
    tokens = [(rank, asked) for rank, row in enumerate(choices) for asked in row]
    heights = np.linspace(4, 0, len(tokens))
    rooms = np.linspace(3.6, 0.4, 4)
    for x, title in ((0.3, "tokens"), (2.6, "router"), (5.1, "expert"), (7.6, "weighted"), (9.9, "tokens")):
        ax.text(x, 4.45, title, ha="center", weight="bold")
    for (rank, asked), y in zip(tokens, heights, strict=True):
        for x in (0, 9.6):
            rectangle(ax, x, y - 0.17, 0.6, 0.34, rank_color(rank))
        for e in asked:
            away = rank != e // 2
            style = {"color": COLORS["comm"] if away else COLORS["other"], "lw": 1.6 if away else 0.8}
            for begin, end in (((0.65, y), (4.6, rooms[e])), ((5.6, rooms[e]), (9.55, y))):
                ax.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=8, **style))
    for e, y in enumerate(rooms):
        color = rank_color(e // 2)
        rectangle(ax, 4.65, y - 0.3, 0.9, 0.6, color)
        text_at(ax, 5.1, y, f"E{e}", on=color)
    return fig


def room(asked: Sequence[tuple[int, int]], experts: int, room: int):
    """Two choices a token, best first, in the order in which they are let in; an expert takes `room` of them."""
    fig, ax = figure(8, 0.45 * experts + 1, grid=False)
    order = [(token, choice) for choice in (0, 1) for token in range(len(asked))]
    taken = [0] * experts
    for x, (token, choice) in enumerate(order):
        e = asked[token][choice]
        kept, taken[e] = taken[e] < room, taken[e] + 1
        color = HUES[e % 8] if kept else "white"
        look = {"ec": "white"} if kept else {"ec": HUES[e % 8], "hatch": "////", "lw": 0}
        cell(ax, x + 0.05, e, 0.9, 0.9, color, f"{taken[e]}" if kept else "full", size=10, **look)
    ax.axvline(len(asked), color=THINGS[1], lw=1)
    ticks = [f"token {token}" for token, _ in order]
    name_rows(ax, [f"E{e}" for e in range(experts)])
    ax.set(xlim=(0, len(order)), ylim=(experts - 0.5, -0.5))
    ax.set_xticks(np.arange(len(order)) + 0.5, ticks, fontsize=8)
    ax.set_title(f"first choices, then second ones; room for {room} an expert")
    return fig


def by_letter(experts: Mapping[str, np.ndarray], letters):
    """Maps of each letter's choices among eight experts, (B, T) numbers for letters (B, T); commonest letters first."""
    fig, axes = figure(8, 1.5 * len(experts), len(experts), 1, sharex=True, grid=False)
    letters = np.asarray(letters)
    common = np.bincount(letters.ravel()).argsort()[::-1][:40]
    names = {10: "\u21b5", 32: "\u2423"}
    for ax, (title, asked) in zip(axes, experts.items(), strict=True):
        shares = np.array([np.bincount(np.asarray(asked)[letters == one], minlength=8) for one in common]).T
        image = ax.imshow(shares / shares.sum(0), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        ax.set(title=title, ylabel="expert", yticks=range(0, 8, 2))
    name_columns(axes[-1], [names.get(one, chr(one)) for one in common])
    axes[-1].set_xlabel("letter, the commonest first")
    fig.colorbar(image, ax=axes, label="share of the letter's first choices", fraction=0.03)
    return fig


def loads(histories: Mapping[str, np.ndarray]):
    """Each expert's share of the choices on top of the others', a running mean, one panel a way to balance.

    Dashed lines are where the borders are when all shares are even.
    """
    fig, axes = figure(8, 2.8, 1, len(histories), sharey=True, squeeze=False, grid=False)
    for ax, (name, shares) in zip(axes[0], histories.items(), strict=True):
        steps, means = zip(*map(_running_mean, shares.T), strict=True)
        labels = [f"E{e}" for e in range(len(means))]
        ax.stackplot(steps[0], means, colors=HUES, labels=labels, edgecolor="white", lw=0.3)
        for border in np.arange(1, len(means)) / len(means):
            even = ax.axhline(border, color="black", ls="--", lw=0.6)
        ax.set(title=name, xlabel="step", ylim=(0, 1), xlim=(steps[0][0], steps[0][-1]))
    axes[0][0].set_ylabel("share of all choices")
    even.set_label("even shares")
    fig.legend(handles=[*axes[0][-1].collections[::-1], even], loc="outside right center", fontsize=8)
    return fig


def _running_mean(values):
    """Steps and the means of the values up to each."""
    mean = np.convolve(values, np.full(MEAN_OF, 1 / MEAN_OF), "valid")
    return np.arange(len(mean)) + MEAN_OF, mean


def running_losses(curves: Mapping[str, Sequence[Sequence[float]]], tokens: int):
    """Training losses of several runs a name against tokens seen, each a running mean over MEAN_OF steps."""
    fig, ax = figure(8, 3)
    for i, (name, runs) in enumerate(curves.items()):
        for j, curve in enumerate(runs):
            steps, mean = _running_mean(curve)
            label = name if j == 0 else None
            ax.plot(tokens * steps, mean, label=label, color=THINGS[(0, 3, 4)[i % 3]], lw=1)
    ax.set(xlabel="tokens seen", ylabel="loss (nats a token)")
    ax.legend()
    return fig


def pays(machines: Mapping[str, tuple[float, float, int, int]]):
    """Seconds on the wire per second of products (three matrices) by width, for (flop/s, bytes/s, ranks, bytes)."""
    fig, ax = figure(8, 3.2)
    width = np.geomspace(256, 65536, 50)
    for i, (name, (flops, wire, ranks, element)) in enumerate(machines.items()):
        share = 4 * element * (ranks - 1) / ranks / wire * flops / (6 * 3 * width)
        ax.loglog(width, share, label=name, color=variant(i)["color"])
    ax.axhline(1, color=THINGS[1], ls="--", lw=1)
    ax.text(width[-1], 1.15, "above: the wire decides", ha="right", color=THINGS[0], fontsize=9)
    ax.set(xlabel="hidden width H of an expert", ylabel="wire time / compute time")
    ax.legend()
    return fig


def spread(found, row_bytes: int, title: str = ""):
    """Left: choices by expert, on the colour of its rank, those without room hatched. Right: KiB that each rank sends.

    `found` has choices (ranks, E) `asked` and `served`, and `rows` (ranks, ranks) from each rank to each.
    """
    asked, served, ranks = found.asked.sum(0), found.served.sum(0), len(found.rows)
    fig, (left, right) = figure(8, 3.2, 1, 2, width_ratios=[1.7, 1])
    places = np.arange(len(asked))
    colors = [rank_color(e * ranks // len(asked)) for e in places]
    left.bar(places, served, 0.8, color=colors)
    left.bar(places, asked - served, 0.8, served, color="white", edgecolor=colors, hatch="////", linewidth=0)
    left.axhline(asked.mean(), color=THINGS[0], ls="--", lw=1, label="even share")
    left.legend(loc="upper right")
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
