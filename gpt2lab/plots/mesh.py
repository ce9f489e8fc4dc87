"""Figures of device meshes: the cube of ranks coloured by group, and bytes per class of link."""

from matplotlib.figure import Figure

from .style import THINGS, figure, rank_color


def cube(lines: dict[str, list[tuple[int, ...]]], node: int) -> Figure:
    """The ranks in a row, once for every axis, coloured by the group they belong to; `node` ranks share a frame.

    `lines[axis]` are the groups of an axis, each a tuple of ranks, as `Mesh.lines` gives them.
    """
    fig, ax = figure(8, 0.9 + 0.55 * len(lines))
    ranks = sum(len(line) for line in next(iter(lines.values())))
    for row, groups in enumerate(lines.values()):
        for color, group in enumerate(groups):
            for rank in group:
                ax.barh(row, 0.9, 0.72, rank - 0.45, color=rank_color(color))
                ax.text(rank, row, str(rank), ha="center", va="center", color="white", fontweight="bold")
    for edge in range(node, ranks, node):
        ax.axvline(edge - 0.5, color="black", lw=1.5, ls="--")
    ax.set_yticks(range(len(lines)), list(lines))
    ax.set(xticks=[], xlim=(-0.6, ranks - 0.4), title=f"groups by axis; dashed: borders of nodes of {node}")
    ax.invert_yaxis()
    ax.grid(visible=False)
    return fig


def by_class(plans: dict[str, dict[tuple[str, str], float]]) -> Figure:
    """Kilobytes sent by all ranks for each plan: a bar inside nodes and one between them, stacked by axis."""
    classes = sorted({c for sent in plans.values() for _, c in sent}, reverse=True)
    axes = sorted({a for sent in plans.values() for a, _ in sent})
    fig, panels = figure(8, 1.1 + 0.4 * len(plans), 1, len(classes), sharey=True, squeeze=False)
    for panel, name in zip(panels[0], classes, strict=True):
        for row, sent in enumerate(plans.values()):
            left = 0.0
            for color, axis in enumerate(axes):
                size = sent.get((axis, name), 0) / 1e3
                label = axis if row == 0 else None
                panel.barh(row, size, 0.6, left, color=THINGS[::-1][color % len(THINGS)], label=label)
                left += size
        panel.set(title=name, xlabel="kB sent by all ranks in a step")
    panels[0][0].set_yticks(range(len(plans)), list(plans))
    panels[0][0].invert_yaxis()
    panels[0][-1].legend(title="axis", fontsize=8)
    return fig
