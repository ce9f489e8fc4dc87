"""Figures of data parallelism: replicas that agree, buckets, the busiest rank, and who reads what."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .forms import band, cell, name_rows, patches, stacked, text_at
from .style import COLORS, HELD, HUES, RIGHT, SERIAL, THINGS, WRONG, figure, rank_color, variant

PHASES = {
    "forward, backward": COLORS["forward"],
    "reduce": COLORS["comm"],
    "update": COLORS["update"],
    "broadcast": THINGS[3],
    "rest": COLORS["wait"],
}


def checksums(maps: dict[str, list[list[str]]]) -> Figure:
    """Rank x step maps of digests: within a step, ranks of equal weights have equal colours.

    `maps[title][rank][step]` is any text; only equality counts.
    """
    fig, axes = figure(
        8, 0.9 + 0.35 * len(next(iter(maps.values()))), 1, len(maps), squeeze=False, grid=False
    )
    for ax, (title, digests) in zip(axes[0], maps.items(), strict=True):
        for step, column in enumerate(zip(*digests, strict=True)):
            seen = list(dict.fromkeys(column))
            for rank, digest in enumerate(column):
                kind = seen.index(digest)
                cell(ax, step - 0.45, rank, 0.9, 0.8, HUES[kind], "abcdefgh"[kind])
        name_rows(ax, [f"rank {r}" for r in range(len(digests))])
        ax.set(title=title, xlabel="step", xlim=(-0.7, len(digests[0]) - 0.3))
    return fig


def loss_lines(
    lines: dict[str, list[float]],
    marks: dict[str, list[float]],
    serial: list[float] | None = None,
    ylabel: str = "loss (nats a token)",
) -> Figure:
    """Losses by step: the serial run thick and black, a line for each rank, or a right and a wrong run, and marks."""
    fig, ax = figure(8, 2.8)
    if serial:
        ax.plot(serial, color=SERIAL, lw=6, alpha=0.3, label="serial")
    for i, (name, values) in enumerate(lines.items()):
        color = rank_color(i) if name.startswith("rank") else (RIGHT, WRONG)[i]
        ax.plot(values, "o-", ms=3, lw=1.2, color=color, label=name)
    for name, values in marks.items():
        ax.plot(values, "x", ms=8, mew=2, color=COLORS["comm"], label=name)
    ax.set(xlabel="step", ylabel=ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    fig.legend(loc="outside right center")
    return fig


def rows_by_rank(ways: dict[str, list[list[int]]], count: int) -> Figure:
    """Which of `count` rows each rank has, a strip for each way of splitting; rows that no rank has are red.

    `ways[name][rank]` lists rows.
    """
    fig, ax = figure(8, 0.7 + 0.45 * len(ways), grid=False)
    for y, shares in enumerate(ways.values()):
        owner = {row: rank for rank, share in enumerate(shares) for row in share}
        for row in range(count):
            color, text = (rank_color(owner[row]), f"rank {owner[row]}") if row in owner else (WRONG, "lost")
            hatch = "" if row in owner else "//"
            cell(ax, row - 0.47, y, 0.94, 0.8, color, hatch=hatch, ec="white")
            text_at(ax, row, y, text, on=color, fontsize=9, weight="bold")
    name_rows(ax, ways)
    ax.set(xlabel="row of the batch", xticks=range(count), xlim=(-0.6, count - 0.4))
    return fig


def bucket_sizes(tensors: list[int], buckets: list[int]) -> Figure:
    """Sizes in bytes of the messages, one a tensor and one a bucket, the largest first."""
    fig, axes = figure(8, 2.6, 1, 2, sharey=True)
    panels = (tensors, "one message a tensor"), (buckets, "one a bucket")
    for ax, (values, title) in zip(axes, panels, strict=True):
        ax.bar(range(len(values)), sorted(values, reverse=True), width=1, color=HELD["gradients"])
        ax.set(yscale="log", title=f"{title}: {len(values)}", xlabel="messages, the largest first")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        says = f"token embedding, {max(values) / 1e6:.0f} MB:\nfinal last"
        there = 0.1 * len(values), 0.6 * max(values)
        ax.annotate(says, (0, max(values)), there, fontsize=9, va="center", arrowprops={"arrowstyle": "-"})
    axes[0].set(ylabel="bytes", ylim=(1e3, 5e8))
    return fig


def u_curve(curves: dict[str, list[tuple[int, float]]], xlabel: str = "bytes in a bucket") -> Figure:
    """Time, over that of the best size, against the size of a piece: `curves[name]` lists (size, seconds).

    Sizes that take more than three times the best are outside the picture.
    """
    fig, ax = figure(8, 2.9)
    for i, (name, points) in enumerate(curves.items()):
        x, y = zip(*points, strict=True)
        best = int(np.argmin(y))
        ax.plot(x, [t / y[best] for t in y], "o-", ms=4, color=THINGS[4 - i], label=name)
        ax.plot(x[best], 1, "*", ms=13, color=THINGS[4 - i])
    times = [time for points in curves.values() for _, time in points]
    top = min(3, 1.1 * max(times) / min(times))
    ax.set(xscale="log", xlabel=xlabel, ylabel="time / that of the best", ylim=(0.9, top))
    ax.legend()
    return fig


def busiest(
    formulas: dict[str, list[float]], ranks: list[int], counted: dict[str, tuple[int, float]]
) -> Figure:
    """Bytes sent by the busiest rank, in units of the gradients' size, against the number of ranks."""
    fig, ax = figure(8, 2.9)
    for i, (name, values) in enumerate(formulas.items()):
        ax.plot(ranks, values, ("-", "-", "--")[i % 3], lw=2.5, color=variant(i)["color"], label=name)
        if name in counted:
            look = {"ms": 7 + 5 * i, "mfc": "none", "mew": 2}  # none hides another
            ax.plot(*counted[name], "o", color=variant(i)["color"], **look)
    ax.set(xlabel="ranks", ylabel="sent / size of the model", xticks=ranks)
    ax.legend()
    return fig


def shapes(owners: dict[str, np.ndarray]) -> Figure:
    """Which rank holds which token of the batch: a grid (rows, tokens) of ranks for each way of sharing."""
    fig, axes = figure(8, 1.9, 1, len(owners), grid=False)
    for ax, (title, grid) in zip(axes, owners.items(), strict=True):
        for (row, column), rank in np.ndenumerate(grid):
            cell(ax, column - 0.46, row, 0.92, 0.86, rank_color(int(rank)))
        name_rows(ax, range(grid.shape[0]))
        ax.set(title=title, xlabel="token", xticks=[0, grid.shape[1] - 1], xlim=(-0.7, grid.shape[1] - 0.3))
    axes[0].set_ylabel("row")
    ranks = sorted({int(r) for grid in owners.values() for r in grid.flat})
    handles = patches({f"rank {r}": rank_color(r) for r in ranks})
    fig.legend(handles=handles, loc="outside right center", fontsize=9)
    return fig


def hidden(optimizers: dict[str, tuple[list[float], list[float]]]) -> Figure:
    """For each optimizer the losses of a right run and of one with wrong gradients."""
    fig, axes = figure(8, 2.6, 1, len(optimizers), sharey=True)
    for ax, (name, (right, wrong)) in zip(axes, optimizers.items(), strict=True):
        ax.plot(right, color=RIGHT, lw=5, alpha=0.35, label="right")
        ax.plot(wrong, "--", color=WRONG, label="gradients times 8")
        ax.set(title=name, xlabel="step")
        ax.legend()
    losses = [loss for right, _ in optimizers.values() for loss in right]
    axes[0].set(ylabel="loss (nats a token)", ylim=(min(losses) - 0.5, max(losses) + 0.5))
    return fig


def phases(ways: dict[str, dict[str, float]], published: dict[str, float], titles: tuple[str, str]) -> Figure:
    """Left the times of an update's parts for each way, stacked; right the published times of the same parts.

    `ways[name][part]` and `published[part]` are times in milliseconds.
    """
    fig, axes = figure(8, 2.6, 1, 2, width_ratios=(3, 2))
    for ax, bars, title in zip(axes, (ways, {"": published}), titles, strict=True):
        stacked(ax, bars, PHASES, 0.6, ec="white", inside=0.08)
        ax.set(title=title, xlabel="ms")
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(ways) - 0.5 if len(bars) > 1 else 1.5, -0.5 if len(bars) > 1 else -1.5)
    named = patches({part: color for part, color in PHASES.items() if part != "rest"})  # too thin to be seen
    fig.legend(handles=named, loc="outside lower center", ncols=len(named), fontsize=9)
    return fig


def thresholds(least: dict[str, float]) -> Figure:
    """Time of the messages over time of computing against the tokens of a rank, for machines where they are equal at
    `least[name]` tokens."""
    fig, ax = figure(8, 3.0)
    x = np.logspace(0, 6, 50)
    for i, (name, tokens) in enumerate(least.items()):
        ax.plot(x, tokens / x, color=variant(i)["color"], lw=2.5, label=name)
        ax.plot(tokens, 1, "o", color=variant(i)["color"])
        ax.annotate(f"{tokens:,.0f}", (tokens, 1), (3, 5), textcoords="offset points", fontsize=9)
    ax.axhline(1, color="black", lw=1, ls="--")
    ax.set(xscale="log", yscale="log", xlim=(1, 1e6), ylim=(0.02, 50), xlabel="tokens of a rank")
    ax.set_ylabel("messages / computing (time)")
    ax.legend()
    return fig


def bands(curves: dict[str, list[list[float]]], begin: int = 0, **axes) -> Figure:
    """Losses, or what `axes` say, by step from `begin` on: the mean of runs as a line, least to most as a band."""
    fig, ax = figure(8, 3.0)
    for i, (name, runs) in enumerate(curves.items()):
        band(ax, range(begin, begin + len(runs[0])), runs, HUES[i], label=name)
    ax.set(**{"xlabel": "step", "ylabel": "loss (nats a token)"} | axes)
    ax.legend()
    return fig
