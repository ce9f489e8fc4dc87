"""Figures of the sharding algebra: cut products, the cost matrix, marks spreading over a graph, what programs send."""

from itertools import product as every

from matplotlib.collections import PatchCollection
from matplotlib.patches import Polygon, Rectangle

from ..sharding.layout import places
from .forms import bars, heat, name_columns, patches, rectangle, text_at
from .style import COLORS, HUES, THINGS, figure, rank_color
from .tensor import WHOLE, cut_product

KNOWN = THINGS[4]
HOW = {None: None, 0: "rows", 1: "columns", "sum": "partial"}
KINDS = {"all-reduce": COLORS["comm"]}
KINDS |= dict(zip(("all-gather", "reduce-scatter", "all-to-all"), (*HUES[:2], HUES[3]), strict=True))


def product(options):
    """C = A B under each option of its description: who of two ranks holds what, and what must be sent for C."""
    cuts = [option for option in options if option.index not in ("", "partial")]
    fig, axes = figure(8, 2.5, 1, len(cuts))
    for ax, option in zip(axes, cuts, strict=True):
        ax.set(xlim=(-0.3, 8.9), ylim=(-1.7, 3.3), aspect="equal")
        ax.set_axis_off()
        ax.text(4, 2.9, f"cut along {option.index}", ha="center", weight="bold")
        matrices = [(2, 2.4, HOW[place]) for place in (*option.inputs, option.output)]
        cut_product(ax, matrices, "ABC", 2)
        sent = "a sum: all-reduce of C" if option.output == "sum" else "nothing: C stays cut"
        text_at(ax, 4, -1.2, sent, color=COLORS["comm"] if option.output == "sum" else "black")
    return fig


def cost_matrix(names: list[str], table: list[list]):
    """The cost matrix of all changes of layout: from the row's to the column's."""
    fig, ax = figure(0.75 * len(names) + 2.2, 0.55 * len(names) + 1.4)
    most = max(max(row) for row in table) or 1
    heat(ax, table, "{:,}", "bytes a rank", size=8, vmin=0, vmax=most, shrink=0.8)
    name_columns(ax, names)
    ax.set_yticks(range(len(names)), names)
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set(xlabel="to", ylabel="from")
    return fig


def spreading(graph, rounds, axes, step: int, columns: int = 8):
    """A graph of few nodes after `step` rounds of propagation: marks spread from box to box."""
    known, fresh = {}, set()
    for number, decided in enumerate(rounds[:step]):
        known |= decided
        fresh = set(decided) if number == step - 1 else fresh
    nodes = list(graph.nodes.values())
    rows = -(-len(nodes) // columns)
    fig, ax = figure(8, 0.62 * rows + 0.6)
    ax.set(xlim=(0, columns), ylim=(-rows - 0.45, 0.05))
    ax.set_axis_off()
    for i, node in enumerate(nodes):
        x, y = i % columns, -(i // columns) - 1
        color = COLORS["comm"] if node.name in fresh else KNOWN if node.name in known else WHOLE
        rectangle(ax, x + 0.03, y + 0.06, 0.94, 0.86, color)
        title = node.name if node.op == "input" else node.op
        text = known[node.name].text(axes) if node.name in known else "?"
        text_at(ax, x + 0.5, y + 0.64, title, on=color, fontsize=8)
        text_at(ax, x + 0.5, y + 0.3, text, on=color, fontsize=9, weight="bold")
    _key(ax)
    return fig


def spreading_model(rows: dict[str, list[str]], rounds, step: int, columns: int = 48):
    """Parts of a model as rows of squares, one for each value, after `step` rounds of propagation."""
    fresh, before = set(rounds[step - 1]), set().union(*rounds[: step - 1])
    lines = {part: -(-len(values) // columns) for part, values in rows.items()}
    fig, ax = figure(8, 0.19 * sum(lines.values()) + 0.12 * len(rows) + 0.5)
    ax.set(xlim=(-6, columns), ylim=(-sum(lines.values()) - 0.6 * len(rows) - 2.2, 0.5))
    ax.set_axis_off()
    top, squares, colors = 0.0, [], []
    for part, values in rows.items():
        ax.text(-0.5, top - lines[part] / 2, part, ha="right", va="center", fontsize=8)
        for i, name in enumerate(values):
            squares.append(Rectangle((i % columns + 0.06, top - i // columns - 0.94), 0.88, 0.88))
            colors.append(COLORS["comm"] if name in fresh else KNOWN if name in before else WHOLE)
        top -= lines[part] + 0.6
    ax.add_collection(PatchCollection(squares, fc=colors, ec="none"), autolim=False)
    _key(ax)
    return fig


def _key(ax) -> None:
    key = {"decided in this round": COLORS["comm"], "decided before": KNOWN, "not cut so far": WHOLE}
    ax.legend(handles=patches(key), ncols=3, loc="lower center", fontsize=8, bbox_to_anchor=(0.5, -0.02))


def program_messages(programs: dict, border: int):
    """What partitioned programs send, from the first operator to the last; `border` is where backward begins."""
    fig, axes = figure(8, 0.75 * len(programs) + 0.9, len(programs), 1, sharex=True, grid=False)
    for ax, (name, sent) in zip(axes, programs.items(), strict=True):
        for at, kind, size in sent:
            ax.vlines(at, 0, size, color=KINDS[kind], lw=2)
        top = max((size for _, _, size in sent), default=1)
        ax.set(ylim=(0, 1.15 * top), yticks=[])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        ax.axvline(border, color=COLORS["other"], ls="--", lw=1)
    axes[-1].set_xlabel("operator of the program: forward, then (dashed line) backward; height: elements")
    used = [k for k in KINDS if any(kind == k for sent in programs.values() for _, kind, _ in sent)]
    handles = patches({k: KINDS[k] for k in used})
    fig.legend(handles=handles, ncols=len(used), loc="outside upper center", fontsize=8)
    return fig


def intra_inter(bytes_sent: dict[str, float], idle: dict[str, float]):
    """Two products, cut and placed (in this order) on two ranks: who holds what, bytes, share of time without work."""
    fig, (picture, left, right) = figure(8, 2.2, 1, 3, sharey=True)
    picture.set(title="X W1 W2; a colour is a rank", xlim=(-0.2, 3.4), ylim=(-0.5, 1.5))
    halves = [(1.2, -0.3, 0.4, 0.6), (1.6, -0.3, 0.4, 0.6), (2.4, 0, 0.8, 0.3), (2.4, -0.3, 0.8, 0.3)]
    for n, box in enumerate([*halves, (1.2, 0.7, 0.8, 0.6), (2.4, 0.7, 0.8, 0.6)]):
        rectangle(picture, *box, rank_color(n % 2))
    for y in range(2):
        rectangle(picture, 0, y - 0.3, 0.8, 0.6, WHOLE)
    picture.set(xticks=[], yticks=range(2))
    picture.set_yticklabels(bytes_sent)
    left.set_title("bytes sent by both ranks"), right.set_title("idle, % of the time")
    for ax, values, kind in ((left, bytes_sent, "comm"), (right, idle, "wait")):
        bars(ax, values.values(), COLORS[kind], " {:,.0f}", 0.6)
        ax.set_xlim(0, 1.25 * max(*values.values(), 1))
    for ax in fig.axes:
        ax.grid(visible=False, axis="y")
    picture.spines[:].set_visible(False)
    return fig


def who_holds(tensors: dict, layout: dict[str, str], mesh: dict[str, int], title: str = ""):
    """Who holds what of named tensors under a layout, {name of a dimension: mesh axis of two}; dimensions in halves.

    Rows are all dimensions but the last. The numbers are ranks; two colours are two ranks that hold the same, grey all.
    """
    fig, axes = figure(8, 2.7, 1, len(tensors))
    for ax, (name, dims) in zip(axes, tensors.items(), strict=True):
        for cell in every((0, 1), repeat=len(dims)):
            at = {layout[d]: half for d, half in zip(dims, cell, strict=True) if d in layout}
            held = [r for r, one in enumerate(places(mesh)) if at.items() <= one.items()]
            y = -sum(half * 2**n for n, half in enumerate(reversed(cell[:-1])))
            left, right, low, high = cell[-1] + 0.02, cell[-1] + 0.98, y + 0.03, y + 0.97
            one, other = (rank_color(held[0]), rank_color(held[-1])) if len(held) < 3 else (WHOLE, WHOLE)
            rectangle(ax, left, low, 0.96, 0.94, one, ec="none")
            ax.add_patch(Polygon([(left, low), (right, low), (right, high)], fc=other))
            plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            text_at(ax, cell[-1] + 0.5, y + 0.5, " ".join(map(str, held)), fontsize=9, bbox=plate)
        ax.set(xlim=(0, 2), ylim=(1 - 2 ** (len(dims) - 1), 1), xticks=[], yticks=[], title=name)
        ax.set(xlabel=dims[-1], ylabel=" x ".join(dims[:-1]))
        ax.spines[:].set_visible(False)
    fig.suptitle(title, x=0.01, ha="left", fontsize=10)
    return fig
