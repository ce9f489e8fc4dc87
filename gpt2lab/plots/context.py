"""Figures of sequence splitting: the owner of each token, each rank's work, what is sent."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from ..parallel.context import costs
from ..parallel.context.layouts import LAYOUTS, TokenLayout, layout
from .forms import cell, heat, legend_above, name_columns, name_rows, patches, stacked, text_at
from .style import COLORS, HELD, figure, paler, rank_color

KERNELS = ("forward", "dQ", "dK,dV by key", "MLP")


def token_owners(tables: list[TokenLayout]) -> Figure:
    """The token axis of every layout, coloured by owner."""
    fig, ax = figure(8, 0.6 + 0.45 * len(tables), grid=False)
    for row, table in enumerate(tables):
        for t, rank in enumerate(table.owners):
            text = rank if table.tokens <= 40 else ""
            cell(ax, t, row, 1, 0.76, rank_color(rank), text, size=8, edgecolor="white", lw=0.5)
    name_rows(ax, [table.name for table in tables])
    ax.set(xlim=(0, tables[0].tokens), ylim=(len(tables) - 0.5, -0.5), xlabel="position in the sequence")
    return fig


def mask(ax, table: TokenLayout) -> None:
    """The causal mask, each query's row in its owner's colour; rows rank after rank, columns by position."""
    picture = np.ones((table.tokens, table.tokens, 3))
    for row, q in enumerate(table.order):
        picture[row, : q + 1] = to_rgb(rank_color(table.owners[q]))
    ax.imshow(picture, interpolation="nearest", aspect="auto")
    for edge in np.cumsum(table.sizes)[:-1]:
        ax.axhline(edge - 0.5, color="black", lw=0.8)
    ax.grid(visible=False)
    ax.set(xlabel="key", ylabel="queries", xticks=[])
    ends = np.cumsum((0, *table.sizes))
    ax.set_yticks((ends[1:] + ends[:-1] - 1) / 2, [f"rank {r}" for r in range(table.ranks)], fontsize=8)


def picker(name: str, exchange: str, ranks: int, tokens: int) -> Figure:
    """One layout with one exchange: the mask by owner, the work of four kernels, what each rank sends (width 64)."""
    table = layout(name, tokens, ranks)
    fig, (left, middle, right) = figure(8, 3.2, cols=3, width_ratios=(1, 1.5, 1.2))
    mask(left, table)
    left.set_title(f"{name}, {tokens} tokens")
    work_bars(middle, table, by_heads=exchange == "heads")
    sent, below = [costs.sent(exchange, table, r, 64) for r in range(ranks)], np.zeros(ranks)
    for kind in ("forward", "backward"):
        numbers = np.array([s[kind][0] / 1e3 for s in sent])
        right.bar(range(ranks), numbers, bottom=below, color=COLORS[kind], label=kind)
        below += numbers
    most = [costs.sent("qkv", table, r, 64) for r in range(ranks)]  # one axis for all exchanges
    top = max(s["forward"][0] + s["backward"][0] for s in most) / 1e3
    right.set(title=f"{exchange}: sent in a layer", ylabel="thousand numbers", ylim=(0, 1.2 * top))
    right.set(xlabel="rank", xticks=range(ranks))
    right.legend(fontsize=8, ncols=2, loc="upper left")
    return fig


def layer_stack(table: TokenLayout) -> Figure:
    """The token axis through embedding, two layers and loss, coloured by owner; arrows: keys, values, gradients."""
    parts = ["embedding", *["layer norm", "attention", "MLP"] * 2, "loss"]
    fig, ax = figure(8, 0.8 + 0.36 * len(parts), grid=False)
    for row, part in enumerate(reversed(parts)):
        weight = "bold" if part == "attention" else None
        text_at(ax, -0.2, row, part, ha="right", fontsize=9, weight=weight)
        for t, rank in enumerate(table.owners):
            cell(ax, t, row, 1, 0.6, rank_color(rank), edgecolor="white", lw=0.5)
        if part == "attention":
            ends = np.cumsum(table.sizes)
            for a, b in zip(ends, ends[1:], strict=False):
                left, right = a - table.sizes[0] / 2, b - table.sizes[-1] / 2
                ways = (left, right, 0.42, "forward"), (right, left, 0.58, "backward")
                for start, stop, down, kind in ways:
                    arrow = {"arrowstyle": "-|>", "lw": 1.5, "color": COLORS[kind]}
                    ax.annotate("", (stop, row - down), (start, row - down), arrowprops=arrow)
    ax.set(xlim=(-3.2, table.tokens), ylim=(-0.6, len(parts) - 0.4), xlabel="position in the sequence")
    ax.set(xticks=np.arange(0, table.tokens, 4), yticks=[])
    arrows = {"keys and values, forward": "forward", "their gradients, backward": "backward"}
    legend_above(ax, 2, handles=patches({what: COLORS[kind] for what, kind in arrows.items()}))
    return fig


def kernels(runs: dict) -> Figure:
    """Milliseconds of each kernel on each rank, a dot a layer, a panel each; `runs` has spans by layout."""
    fig, axes = figure(8, 3, cols=3)
    for ax, kernel in zip(axes, ("attention", "MLP", "dQ, dK, dV"), strict=True):
        for place, spans in enumerate(runs.values()):
            for r in (0, 1):
                took = [1e3 * (s.end - s.start) for s in spans if s.rank == r and s.name == kernel]
                x = place + 0.4 * r - 0.2
                ax.plot(np.linspace(x - 0.1, x + 0.1, len(took)), took, "o", color=rank_color(r), ms=5)
        ax.set_xticks(range(len(runs)), list(runs), fontsize=8)
        ax.set(title=kernel, ylim=(0, None), xlim=(-0.6, len(runs) - 0.4))
    axes[0].set_ylabel("milliseconds")
    keys = patches({f"rank {r}": rank_color(r) for r in (0, 1)})
    axes[1].legend(handles=keys, fontsize=8, loc="lower center")  # the MLP's dots are far from zero
    return fig


def work_bars(ax, table: TokenLayout, by_heads: bool = False) -> None:
    """Work of every rank in four kernels, over the mean: bars at 1 are balanced, as attention `by_heads` always is."""
    width = 0.8 / table.ranks
    for place, kernel in enumerate(KERNELS):
        loads = np.array(costs.work(table, kernel), float)
        if by_heads and kernel != "MLP":
            loads[:] = 1
        for r, load in enumerate(loads / loads.mean()):
            ax.bar(place - 0.4 + (r + 0.5) * width, load, width * 0.9, color=rank_color(r))
    ax.axhline(1, color="black", lw=0.8)
    ax.set_xticks(range(len(KERNELS)), [k.replace(" by", "\nby") for k in KERNELS], fontsize=8)
    ax.set(title="work over the mean", ylim=(0, max(2.0, ax.get_ylim()[1])))


def busiest_over_mean(tokens: int, ranks: int) -> Figure:
    """The busiest rank over the mean, for every kernel and layout."""
    kernels = [k for k in costs.KERNELS if k != "dK,dV by query"]
    tables = [layout(name, tokens, ranks) for name in LAYOUTS]
    values = np.array([[float(costs.imbalance(costs.work(t, k))) for k in kernels] for t in tables])
    fig, ax = figure(8, 2.6)
    heat(ax, values, "{:.2f}", "busiest / mean", vmin=1, vmax=3, aspect="auto")
    name_columns(ax, [k.replace(" ", "\n", 1) for k in kernels])
    ax.set_yticks(range(len(tables)), list(LAYOUTS))
    return fig


def contributions(values) -> Figure:
    """How much each rank (row) contributes to the key gradients of each rank's tokens (column); zeros stay white."""
    values = np.asarray(values, float)
    fig, ax = figure(4.6, 3.2)
    shown = np.where(values > 0, values, np.nan)
    heat(ax, shown, "{:.2f}", "norm of dK", vmin=0)
    for row, column in np.argwhere(values <= 0):
        text_at(ax, column, row, "0")
    name_columns(ax, [f"tokens of {r}" for r in range(len(values))], fontsize=8)
    ax.set_yticks(range(len(values)), [f"from rank {r}" for r in range(len(values))], fontsize=8)
    return fig


def volumes(rows, what: str = "thousand numbers sent by all ranks in a layer") -> Figure:
    """What is sent, per (label, forward, backward)."""
    fig, ax = figure(8, 0.8 + 0.36 * len(rows))
    sent = {label: {"forward": forward, "backward": backward} for label, forward, backward in rows}
    stacked(ax, sent, {kind: COLORS[kind] for kind in ("forward", "backward")})
    ax.grid(visible=True, axis="y")
    ax.set_xlabel(what)
    legend_above(ax, 2)
    return fig


def memory(config, rows: int, tokens: int) -> Figure:
    """llm.c's activation tensors on the last rank of a contiguous split, in megabytes of float32, by kind."""
    kinds = {"q, k, v": ("qkv",), "attention rows": ("preatt", "att"), "logits": ("logits", "probs")}
    held = {}
    for n in (1, 2, 4):
        table, parts = layout("contiguous", tokens, n), 2 if n > 1 else 3
        found = costs.activations(config, rows, table, n - 1, parts)
        one = {kind: 4e-6 * sum(found[name] for name in names) for kind, names in kinds.items()}
        held[f"{n} rank{'s' * (n > 1)}"] = one | {"all other": 4e-6 * sum(found.values()) - sum(one.values())}
    fig, ax = figure(8, 2.6)
    shades = (paler(HELD["activations"], 0.8 * share / 3) for share in range(4))
    stacked(ax, held, dict(zip((*kinds, "all other"), shades, strict=True)))
    ax.grid(visible=True, axis="y")
    ax.set_xlabel("megabytes")
    ax.legend(fontsize=8, ncols=4, loc="lower right")
    return fig
