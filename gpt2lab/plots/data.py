"""Figures of data parallelism: replicas that agree, buckets, the busiest rank, and who reads what."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .style import SERIAL, THINGS, figure, rank_color


def checksums(maps: dict[str, list[list[str]]]) -> Figure:
    """Rank x step maps of digests: within a step, ranks of equal weights have equal colours.

    `maps[title][rank][step]` is any text; only equality counts.
    """
    fig, axes = figure(8, 0.9 + 0.35 * len(next(iter(maps.values()))), 1, len(maps), squeeze=False)
    for ax, (title, digests) in zip(axes[0], maps.items(), strict=True):
        for step in range(len(digests[0])):
            seen = []
            for rank, row in enumerate(digests):
                if row[step] not in seen:
                    seen.append(row[step])
                kind = seen.index(row[step])
                color = rank_color(kind)
                ink = "black" if sum(to_rgb(color)) > 1.7 else "white"
                ax.barh(rank, 0.9, 0.8, step - 0.45, color=color)
                ax.text(step, rank, "abcdefgh"[kind], ha="center", va="center", color=ink, fontsize=9)
        steps = len(digests[0])
        ax.set(title=title, xlabel="step", yticks=range(len(digests)), xlim=(-0.7, steps - 0.3))
        ax.set_yticklabels([f"rank {r}" for r in range(len(digests))])
        ax.invert_yaxis()
        ax.grid(visible=False)
    return fig


def distances(runs: dict[str, list[float]], ylabel: str, floor: float = 1e-17) -> Figure:
    """Lines by step on a log scale; zero is drawn at `floor`."""
    fig, ax = figure(8, 2.8)
    for i, (name, values) in enumerate(runs.items()):
        ax.plot([max(v, floor) for v in values], "o-", ms=3, color=rank_color(i), label=name)
    ax.set(xlabel="step", ylabel=ylabel, yscale="log", ylim=(floor / 3, None))
    ax.legend(ncols=2, fontsize=8)
    return fig


def sizes(tensors: list[int], buckets: list[int]) -> Figure:
    """Sizes in bytes of the messages, one a tensor and one a bucket, the largest first."""
    fig, axes = figure(8, 2.6, 1, 2, sharey=True)
    for ax, values, title in zip(
        axes, (tensors, buckets), ("one message a tensor", "one a bucket"), strict=True
    ):
        ax.bar(range(len(values)), sorted(values, reverse=True), width=1, color=THINGS[4])
        ax.set(yscale="log", title=f"{title}: {len(values)}", xlabel="messages, the largest first")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("bytes")
    return fig


def u_curve(curves: dict[str, list[tuple[int, float]]]) -> Figure:
    """Step time, over that of the best size, against bucket size: `curves[name]` lists (bytes, seconds)."""
    fig, ax = figure(8, 2.9)
    for i, (name, points) in enumerate(curves.items()):
        x, y = zip(*points, strict=True)
        best = int(np.argmin(y))
        ax.plot(x, [t / y[best] for t in y], "o-", ms=4, color=rank_color(i), label=name)
        ax.plot(x[best], 1, "*", ms=13, color=rank_color(i))
    top = max(t for points in curves.values() for _, t in points) / min(
        t for p in curves.values() for _, t in p
    )
    ax.set(
        xscale="log",
        xlabel="bytes in a bucket",
        ylabel="time / that of the best",
        ylim=(0.9, min(3, 1.1 * top)),
    )
    ax.legend()
    return fig


def busiest(
    formulas: dict[str, list[float]], ranks: list[int], counted: dict[str, tuple[int, float]]
) -> Figure:
    """Bytes sent by the busiest rank, in units of the gradients' size, against the number of ranks."""
    fig, ax = figure(8, 2.9)
    for i, (name, values) in enumerate(formulas.items()):
        ax.plot(ranks, values, ("-", "-", "--")[i % 3], lw=2.5, color=rank_color(i), label=name)
        if name in counted:
            ax.plot(
                *counted[name], "o", color=rank_color(i), ms=7 + 5 * i, mfc="none", mew=2
            )  # none hides another
    ax.set(xlabel="ranks", ylabel="sent / size of the model", xticks=ranks)
    ax.legend()
    return fig


def shapes(owners: dict[str, np.ndarray]) -> Figure:
    """Who holds which token of the batch: grids (rows, tokens) of ranks, one a way of sharing."""
    fig, axes = figure(8, 1.9, 1, len(owners))
    for ax, (title, grid) in zip(axes, owners.items(), strict=True):
        for row in range(grid.shape[0]):
            for column in range(grid.shape[1]):
                ax.barh(row, 0.92, 0.86, column - 0.46, color=rank_color(int(grid[row, column])))
        ax.set(title=title, xlabel="token", yticks=range(grid.shape[0]), xticks=[0, grid.shape[1] - 1])
        ax.set(xlim=(-0.7, grid.shape[1] - 0.3))
        ax.invert_yaxis()
        ax.grid(visible=False)
    axes[0].set_ylabel("row")
    ranks = sorted({int(r) for grid in owners.values() for r in grid.flat})
    handles = [Patch(color=rank_color(r), label=f"rank {r}") for r in ranks]
    fig.legend(handles=handles, loc="outside right center", fontsize=9)
    return fig


def hidden(optimizers: dict[str, tuple[list[float], list[float]]]) -> Figure:
    """For each optimizer the losses of a right run and of one with wrong gradients."""
    fig, axes = figure(8, 2.6, 1, len(optimizers), sharey=True)
    for ax, (name, (right, wrong)) in zip(axes, optimizers.items(), strict=True):
        ax.plot(right, color=SERIAL, lw=5, alpha=0.35, label="right")
        ax.plot(wrong, "--", color=rank_color(1), label="gradients times 8")
        ax.set(title=name, xlabel="step")
        ax.legend()
    losses = [loss for right, _ in optimizers.values() for loss in right]
    axes[0].set(ylabel="loss (nats a token)", ylim=(min(losses) - 0.5, max(losses) + 0.5))
    return fig
