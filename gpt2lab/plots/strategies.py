"""The picture of all strategies: a model as a cube of layers, width and data, cut among four ranks in six ways."""

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_rgb

from .forms import rectangle
from .style import COLORS, figure, paler, rank_color

RANKS = 4


@dataclass(frozen=True)
class Sharing:
    """What a strategy splits: along which edge of the cube, and which share of each thing a rank then holds.

    `edge` is "data" (front to back), "width" (left to right), "layers" (bottom to top) or "experts" (the upper half
    left to right, the lower half front to back). Shares are of a batch's tokens, the weights, the optimizer's state.
    """

    name: str
    edge: str
    label: str
    data: float = 1.0
    weights: float = 1.0
    state: float = 1.0


STRATEGIES = (
    Sharing("data parallel", "data", "batch", data=1 / RANKS),
    Sharing("ZeRO", "data", "batch", data=1 / RANKS, weights=1 / RANKS, state=1 / RANKS),
    Sharing("context parallel", "data", "sequence", data=1 / RANKS),
    Sharing("tensor parallel", "width", "batch", weights=1 / RANKS, state=1 / RANKS),
    Sharing("pipeline parallel", "layers", "batch", weights=1 / RANKS, state=1 / RANKS),
    Sharing("expert parallel", "experts", "batch", data=1 / RANKS, weights=1 / 3, state=1 / 3),
)
"""How each strategy cuts training among four ranks. ZeRO stands for its third stage; with four experts, 8 C^2 each,
and attention's 4 C^2 on every rank, a rank holds 12 of the 36 C^2 weights of a layer."""

EDGES = {"width": np.array([1.0, 0.0]), "layers": np.array([0.0, 1.0]), "data": np.array([0.45, 0.30])}


def strategies():
    """One cube a strategy, each slab in the colour of the rank that computes it, over bars of what ranks hold."""
    fig, axes = figure(8, 5.2, 2, len(STRATEGIES) // 2)
    for ax, cut in zip(axes.flat, STRATEGIES, strict=True):
        ax.set_aspect("equal")
        ax.set_axis_off()
        ax.set(xlim=(-0.28, 1.5), ylim=(-0.95, 1.68))
        ax.text(0.6, 1.5, cut.name, ha="center", fontsize=11, weight="bold")
        if cut.edge == "experts":
            slabs(ax, "data", 0.0, 0.48)
            slabs(ax, "width", 0.52, 0.48)
        elif cut.edge == "data" and cut.weights < 1:  # all have whole weights to compute, and keep a part
            slabs(ax, "data", front=0.42)
            slabs(ax, "width", depth=0.1)
        else:
            slabs(ax, cut.edge)
        _edge_names(ax, cut.label)
        bars(ax, cut)
    return fig


def slabs(ax, edge: str, bottom=0.0, height=1.0, front=0.0, depth=1.0) -> None:
    """Draw the cube from `bottom` up and from `front` back, one slab a rank along `edge`, the hindmost first."""
    hindmost_first = range(RANKS - 1, -1, -1) if edge == "data" else range(RANKS)
    for rank in hindmost_first:
        start = {"width": 0.0, "layers": bottom, "data": front}
        size = {"width": 1.0, "layers": height, "data": depth - front}
        start[edge], size[edge] = start[edge] + rank * size[edge] / RANKS, size[edge] / RANKS - 0.035
        block(ax, start, size, rank_color(rank))


def block(ax, start: dict, size: dict, color: str) -> None:
    """Draw a block of the cube: its front, its lighter top and its darker side."""
    origin = sum(start[e] * EDGES[e] for e in EDGES)
    w, h, d = (size[e] * EDGES[e] for e in ("width", "layers", "data"))
    for corner, a, b, light in ((origin, w, h, 0.0), (origin + h, w, d, 0.45), (origin + w, h, d, -0.3)):
        face = np.array([corner, corner + a, corner + a + b, corner + b])
        ax.fill(*face.T, color=_shade(color, light), ec="white", lw=0.4)


def _shade(color: str, light: float):
    """The colour mixed with white (light > 0) or black (light < 0)."""
    return paler(color, light) if light > 0 else [c * (1 + light) for c in to_rgb(color)]


def _edge_names(ax, label: str) -> None:
    ax.text(0.5, -0.06, "width", ha="center", va="top", fontsize=8)
    ax.text(-0.06, 0.5, "layers", ha="right", va="center", rotation=90, fontsize=8)
    ax.text(1.25, 0.10, label, ha="center", va="top", rotation=34, rotation_mode="anchor", fontsize=8)


def bars(ax, cut: Sharing) -> None:
    """Below a cube: the share of data, weights and optimizer state that each rank holds."""
    for row, (name, share) in enumerate((("data", cut.data), ("weights", cut.weights), ("state", cut.state))):
        y = -0.42 - 0.22 * row
        ax.text(0.22, y + 0.06, name, ha="right", va="center", fontsize=8)
        for rank in range(RANKS):
            x = 0.3 + 0.29 * rank
            for width, color in ((0.24, "none"), (0.24 * share, rank_color(rank))):
                rectangle(ax, x, y, width, 0.12, color, ec=COLORS["other"], lw=0.6)
