"""Figures of tensor parallelism: tilings of a product, one layer with its edges, bytes against tokens, memory."""

from .forms import beside, legend_above, name_columns, patches, rectangle, stacked, text_at
from .style import COLORS, HELD, THINGS, WAYS, figure, rank_color

WHOLE = COLORS["wait"]
THREE_WAYS = (
    ("rows of X", "rows", None, "rows", "forward: nothing\nbackward: sum dW"),
    ("columns of W", None, "columns", "columns", "forward: nothing, Y stays cut\nbackward: sum dX"),
    ("the inner dim", "columns", "rows", "partial", "forward: sum Y\nbackward: nothing, dX stays cut"),
)


def tilings():
    """Y = X W cut in three ways: which of two ranks holds which part of X, W and Y, and what is sent."""
    fig, axes = figure(8, 2.6, 1, 3)
    for ax, (title, x, w, y, sent) in zip(axes, THREE_WAYS, strict=True):
        ax.set(xlim=(-0.2, 8.2), ylim=(-2.3, 3.6), aspect="equal")
        ax.set_axis_off()
        ax.text(4, 3.1, title, ha="center", weight="bold")
        cut_product(ax, [(2, 2.4, x), (2, 2, w), (2, 2.4, y)], "XWY", 2)
        ax.text(4, -1.0, sent, ha="center", va="top", fontsize=9)
    return fig


def cut_product(ax, matrices, names, ranks: int) -> None:
    """A product "A x B = C" in the colours of the ranks that hold its parts; `matrices` are (width, height, cut).

    A matrix is grey where all hold it (`cut` None), cut by "rows" or "columns", or a hatched "partial" sum.
    """
    for left, (width, height, cut), name in zip((0, 3, 6), matrices, names, strict=True):
        bottom = 2.4 - height
        if cut is None:
            rectangle(ax, left, bottom, width, height, WHOLE)
        for r in range(ranks if cut else 0):
            if cut == "rows":
                place = left, bottom + height * (ranks - 1 - r) / ranks, width, height / ranks
            elif cut == "columns":
                place = left + width * r / ranks, bottom, width / ranks, height
            else:
                shift = 0.25 * (ranks - 1 - r)
                place = left + shift - 0.2, bottom + shift - 0.1, width, height
            rectangle(ax, *place, rank_color(r), hatch="//" if cut == "partial" else None)
        text_at(ax, left + width / 2, -0.45, name)
    text_at(ax, 2.5, 1.2, "x")
    text_at(ax, 5.5, 1.2, "=")


STEPS = ("ln", "f", "qkv", "heads", "proj", "g", "+", "ln", "f", "up", "gelu", "down", "g", "+")
CUT = {"qkv", "heads", "up", "gelu"}
PARTIAL = {"proj", "down"}
SHAPES = {"qkv": "B T\n3C/{n}", "heads": "B H/{n}\nT D", "proj": "B T\nC", "down": "B T\nC"}
SHAPES |= dict.fromkeys(("up", "gelu"), "B T\n4C/{n}")
"""What a rank of n has after the parts of a layer that are cut; after `proj` and `down` it is a partial sum."""


def layer(ranks: int = 2):
    """One layer from left to right, with tensor parallelism above and with sequence parallelism below."""
    fig, axes = figure(8, 3.4, 2, 1)
    for ax, sp in zip(axes, (False, True), strict=True):
        ax.set(xlim=(-2.1, len(STEPS) + 0.2), ylim=(-0.75, 1.35))
        ax.set_axis_off()
        ax.text(-2.05, 0.5, "tensor and\nsequence" if sp else "tensor", va="center", weight="bold")
        for i, name in enumerate(STEPS):
            _step(ax, i, name, sp, ranks)
    key = {f"part of rank {r}": rank_color(r) for r in range(ranks)} | {"whole on every rank": WHOLE}
    key["communication: forward / backward"] = COLORS["comm"]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.08), "ncols": ranks + 2, "fontsize": 8}
    axes[1].legend(handles=patches(key), **place)
    return fig


WORDS = {"f": ("-\nsum", "all-gather\nreduce-\nscatter"), "g": ("sum\n-", "reduce-\nscatter\nall-gather")}
"""What the operators f and g of Megatron do forward and backward, without and with sequence parallelism."""


def _step(ax, i, name, sp, ranks):
    shape, look = SHAPES.get(name, "B T/{n}\nC" if sp else "B T\nC").format(n=ranks), {"fontsize": 8}
    if name in WORDS:
        shape, look = WORDS[name][sp], {"fontsize": 8}
        rectangle(ax, i + 0.35, 0, 0.3, 1, COLORS["comm"])
    elif name in PARTIAL:  # of whole size on each rank, one before the other
        for r in reversed(range(ranks)):
            shift, size = 0.2 * r / ranks, 0.2 * (ranks - 1) / ranks
            place = i + 0.05 + shift, shift, 0.9 - size, 1 - size
            rectangle(ax, *place, rank_color(r), hatch="//")
    elif name in CUT:  # along features or heads: side by side
        for r in range(ranks):
            rectangle(ax, i + r / ranks * 0.9 + 0.05, 0, 0.9 / ranks, 1, rank_color(r))
    elif sp:  # along the tokens: one above the other
        for r in range(ranks):
            rectangle(ax, i + 0.05, 1 - (r + 1) / ranks, 0.9, 1 / ranks, rank_color(r))
    else:
        rectangle(ax, i + 0.05, 0, 0.9, 1, WHOLE)
    text_at(ax, i + 0.5, -0.06, shape, va="top", **look)
    style = "italic" if name in WORDS else None
    ax.text(i + 0.5, 1.1, name, ha="center", fontsize=9, style=style)


def crossover(width: int = 768, ranks: int = 2, counted=()):
    """Numbers a rank sends for a two-layer MLP and step, against the tokens of a batch, cut by data and by columns.

    `counted` are (tokens, by data, by columns) of real runs, drawn as dots.
    """
    fig, ax = figure(8, 2.9)
    share, most = 2 * (ranks - 1) / ranks, 10 * width
    tokens = [most * i / 50 for i in range(51)]
    by_data, by_columns = WAYS["data"], WAYS["tensor"]
    ax.plot(tokens, [share * 8 * width**2] * 51, color=by_data, label="batch cut: gradients, 8 C²")
    activations = [share * 2 * t * width for t in tokens]
    ax.plot(tokens, activations, color=by_columns, label="matrices cut: activations, 2 x B T C")
    for t, rows, features in counted:
        ax.plot(t, rows, "o", color=by_data)
        ax.plot(t, features, "o", color=by_columns)
    ax.axvline(4 * width, color=COLORS["other"], ls="--", lw=1)
    ax.text(4 * width, 1, f"  B T = 4 C = {4 * width:,}", va="top", transform=ax.get_xaxis_transform())
    ax.set(xlabel="tokens in the batch, B T", ylabel="numbers sent a rank", xlim=(0, most), ylim=(0, None))
    ax.legend(loc="lower right")
    return fig


def shards(weights, titles):
    """Weight matrices side by side as heat maps on one colour scale, to see what is alike."""
    fig, axes = figure(8, 2.5, 1, len(weights), grid=False)
    most = max(float(abs(w).max()) for w in weights)
    for ax, weight, title in zip(axes, weights, titles, strict=True):
        image = ax.imshow(weight, vmin=-most, vmax=most, cmap="RdBu", aspect="auto")
        ax.set(title=title, xlabel="outputs", ylabel="inputs")
    fig.colorbar(image, ax=axes)
    return fig


def memory(kept: dict[str, list[float]], ranks: list[int]):
    """Activations of a layer on one rank, relative to one rank's, for every way and number of ranks."""
    fig, ax = figure(8, 2.8)
    beside(ax, kept, THINGS[::-1], fill=0.92)
    name_columns(ax, [f"{n} ranks" if n > 1 else "1 rank" for n in ranks])
    ax.set(ylabel="activations of a layer\n(one rank = 1)")
    ax.legend()
    return fig


def bytes_and_flops(
    rows: int, length: int, width: int, ranks: int, rate: float = 100e12, link: float = 100e9
):
    """Time of one layer's step on a rank: computing at `rate` flops/s, sending 16-bit numbers over `link` bytes/s."""
    fig, ax = figure(8, 2.2)
    tokens, times = rows * length, {}
    for n in sorted({1, ranks}):
        flops = 6 * tokens * 12 * width**2 + 12 * tokens * length * width
        send = 4 * 2 * (n - 1) / n * tokens * width * 2 / link * 1e3
        times[f"{n} rank{'s' * (n > 1)}"] = {"matrix products": flops / n / rate * 1e3, "4 all-reduces": send}
    stacked(ax, times, {"matrix products": COLORS["forward"], "4 all-reduces": COLORS["comm"]})
    ax.yaxis.set_inverted(False)
    ax.grid(visible=True, axis="y")
    ax.set(xlabel="ms of one layer's step", title=f"{link / 1e9:g} GB/s: B={rows}, T={length}, C={width}")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return fig


ALEXNET = (  # layer, weights, activations of one image (Krizhevsky et al. 2012, one column)
    ("conv1", 34_944, 290_400),
    ("conv2", 614_656, 186_624),
    ("conv3", 885_120, 64_896),
    ("conv4", 1_327_488, 64_896),
    ("conv5", 884_992, 43_264),
    ("fc6", 37_752_832, 4_096),
    ("fc7", 16_781_312, 4_096),
    ("fc8", 4_097_000, 1_000),
)


def alexnet():
    """Weights and activations of AlexNet by layer: for convolutions cut the batch, for dense layers the matrix."""
    fig, ax = figure(8, 2.7)
    names, weights, activations = zip(*ALEXNET, strict=True)
    found = {"weights": weights, "activations of 128 images": [128 * a for a in activations]}
    beside(ax, found, (HELD["weights"], HELD["activations"]), fill=0.95)
    ax.axvspan(-0.5, 4.5, color=COLORS["wait"], alpha=0.35, zorder=0)
    ax.text(2, 3e8, "cut the batch", ha="center")
    ax.text(6, 3e8, "cut the matrices", ha="center")
    name_columns(ax, names)
    ax.set(yscale="log", ylabel="numbers", xlim=(-0.5, 7.5), ylim=(1e4, 1e9))
    legend_above(ax, 2)
    return fig
