"""Figures of tensor parallelism: tilings of a product, one layer with its edges, bytes against tokens, memory."""

from matplotlib.patches import Patch, Rectangle

from .style import COLORS, THINGS, figure, rank_color

WHOLE = "#DDDDDD"
THREE_WAYS = (
    ("rows of X", "rows", None, "rows", "forward: nothing\nbackward: sum dW"),
    ("columns of W", None, "columns", "columns", "forward: nothing, Y stays cut\nbackward: sum dX"),
    ("the inner dim", "columns", "rows", "partial", "forward: sum Y\nbackward: nothing, dX stays cut"),
)


def tilings(ranks: int = 2):
    """Y = X W cut in three ways: which rank holds which part of X, W and Y, and what is sent."""
    fig, axes = figure(9, 2.6, 1, 3)
    for ax, (title, x, w, y, sent) in zip(axes, THREE_WAYS, strict=True):
        ax.set(xlim=(-0.2, 8.2), ylim=(-2.3, 3.6), aspect="equal")
        ax.set_axis_off()
        ax.text(4, 3.1, title, ha="center", weight="bold")
        for left, width, height, cut, name in ((0, 2, 2.4, x, "X"), (3, 2, 2, w, "W"), (6, 2, 2.4, y, "Y")):
            _matrix(ax, left, 2.4 - height, width, height, cut, ranks)
            ax.text(left + width / 2, -0.45, name, ha="center", va="center")
        ax.text(2.5, 1.2, "x", ha="center", va="center")
        ax.text(5.5, 1.2, "=", ha="center", va="center")
        ax.text(4, -1.0, sent, ha="center", va="top", fontsize=9)
    return fig


def _matrix(ax, left, bottom, width, height, cut, ranks):
    """One matrix, in the colours of the ranks that hold its parts; grey when all hold it; hatched partial sums."""
    if cut is None:
        ax.add_patch(Rectangle((left, bottom), width, height, fc=WHOLE, ec="white"))
    for r in range(ranks if cut else 0):
        if cut == "rows":
            place = (left, bottom + height * (ranks - 1 - r) / ranks), width, height / ranks
        elif cut == "columns":
            place = (left + width * r / ranks, bottom), width / ranks, height
        else:
            shift = 0.25 * (ranks - 1 - r)
            place = (left + shift - 0.2, bottom + shift - 0.1), width, height
        ax.add_patch(
            Rectangle(*place, fc=rank_color(r), ec="white", hatch="//" if cut == "partial" else None)
        )


STEPS = ("ln", "f", "qkv", "heads", "proj", "g", "+", "ln", "f", "up", "gelu", "down", "g", "+")
CUT = {"qkv", "heads", "proj", "up", "gelu", "down"}
SHAPES = {
    "qkv": "B T 3C/{n}",
    "heads": "B H/{n} T D",
    "proj": "B T C",
    "up": "B T 4C/{n}",
    "gelu": "B T 4C/{n}",
}
SHAPES |= {"down": "B T C"}
"""What a rank of n has after the parts of a layer that are cut; after `proj` and `down` it is a partial sum."""


def layer(ranks: int = 2):
    """One layer from left to right, with tensor parallelism above and with sequence parallelism below."""
    fig, axes = figure(9, 3.4, 2, 1)
    for ax, sp in zip(axes, (False, True), strict=True):
        ax.set(xlim=(-1.6, len(STEPS) + 0.2), ylim=(-0.75, 1.35))
        ax.set_axis_off()
        ax.text(-1.55, 0.5, "tensor and\nsequence" if sp else "tensor", va="center", weight="bold")
        for i, name in enumerate(STEPS):
            _step(ax, i, name, sp, ranks)
    axes[1].legend(
        handles=[
            *(Patch(color=rank_color(r), label=f"part of rank {r}") for r in range(ranks)),
            Patch(color=WHOLE, label="whole on every rank"),
            Patch(color=COLORS["comm"], label="communication: forward / backward"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.08),
        ncols=ranks + 2,
        fontsize=8,
    )
    return fig


def _step(ax, i, name, sp, ranks):
    if name in "fg":
        words = {
            ("f", False): "-\nsum",
            ("g", False): "sum\n-",
            ("f", True): "all-gather\nreduce-\nscatter",
            ("g", True): "reduce-\nscatter\nall-gather",
        }
        ax.add_patch(Rectangle((i + 0.35, 0), 0.3, 1, fc=COLORS["comm"], ec="white"))
        ax.text(i + 0.5, -0.06, words[name, sp], ha="center", va="top", fontsize=8)
        ax.text(i + 0.5, 1.1, name, ha="center", fontsize=9, style="italic")
        return
    if name in CUT:  # along features or heads: side by side
        for r in range(ranks):
            ax.add_patch(
                Rectangle((i + r / ranks * 0.9 + 0.05, 0), 0.9 / ranks, 1, fc=rank_color(r), ec="white")
            )
    elif sp:  # along the tokens: one above the other
        for r in range(ranks):
            box = (i + 0.05, 1 - (r + 1) / ranks), 0.9, 1 / ranks
            ax.add_patch(Rectangle(*box, fc=rank_color(r), ec="white"))
    else:
        ax.add_patch(Rectangle((i + 0.05, 0), 0.9, 1, fc=WHOLE, ec="white"))
    shape = SHAPES.get(name, "B T/{n} C" if sp else "B T C").format(n=ranks)
    ax.text(i + 0.5, -0.06, shape, ha="center", va="top", fontsize=7.5)
    ax.text(i + 0.5, 1.1, name, ha="center", fontsize=9)


def crossover(width: int = 768, ranks: int = 2, counted=()):
    """Numbers a rank sends for a two-layer MLP and step, against the tokens of a batch, cut by data and by columns.

    `counted` are (tokens, by data, by columns) of real runs, drawn as dots.
    """
    fig, ax = figure(8, 2.9)
    share, most = 2 * (ranks - 1) / ranks, 10 * width
    tokens = [most * i / 50 for i in range(51)]
    by_data, by_columns = THINGS[3:]
    ax.plot(tokens, [share * 8 * width**2] * 51, color=by_data, label="batch cut: gradients, 8 C²")
    activations = [share * 2 * t * width for t in tokens]
    ax.plot(tokens, activations, color=by_columns, label="matrices cut: activations, 2 x B T C")
    for t, data, columns in counted:
        ax.plot(t, data, "o", color=by_data)
        ax.plot(t, columns, "o", color=by_columns)
    ax.axvline(4 * width, color=COLORS["other"], ls="--", lw=1)
    ax.text(4 * width, 1, f"  B T = 4 C = {4 * width:,}", va="top", transform=ax.get_xaxis_transform())
    ax.set(xlabel="tokens in the batch, B T", ylabel="numbers sent a rank", xlim=(0, most), ylim=(0, None))
    ax.legend(loc="lower right")
    return fig


def shards(weights, titles):
    """Weight matrices side by side as heat maps on one colour scale, to see what is alike."""
    fig, axes = figure(8, 2.5, 1, len(weights))
    most = max(float(abs(w).max()) for w in weights)
    for ax, weight, title in zip(axes, weights, titles, strict=True):
        image = ax.imshow(weight, vmin=-most, vmax=most, cmap="RdBu", aspect="auto")
        ax.set(title=title, xlabel="outputs", ylabel="inputs")
        ax.grid(False)
    fig.colorbar(image, ax=axes)
    return fig


def memory(kept: dict[str, list[float]], ranks: list[int]):
    """Activations of a layer on one rank, relative to one rank's, for every way and number of ranks."""
    fig, ax = figure(8, 2.8)
    width = 0.8 / len(kept)
    for i, (name, values) in enumerate(kept.items()):
        places = [k + (i - (len(kept) - 1) / 2) * width for k in range(len(ranks))]
        ax.bar(places, values, width * 0.92, label=name, color=THINGS[4 - i])
    ax.set_xticks(range(len(ranks)), [f"{n} ranks" if n > 1 else "1 rank" for n in ranks])
    ax.set(ylabel="activations of a layer\n(one rank = 1)")
    ax.legend()
    return fig


def bytes_and_flops(
    rows: int, length: int, width: int, ranks: int, rate: float = 100e12, link: float = 100e9
):
    """Time of one layer's step on a rank: computing at `rate` flops/s, sending 16-bit numbers over `link` bytes/s."""
    fig, ax = figure(8, 2.2)
    tokens, names, compute, send = rows * length, [], [], []
    for n in sorted({1, ranks}):
        flops = 6 * tokens * 12 * width**2 + 12 * tokens * length * width
        names.append(f"{n} rank{'s' * (n > 1)}")
        compute.append(flops / n / rate * 1e3)
        send.append(4 * 2 * (n - 1) / n * tokens * width * 2 / link * 1e3)
    ax.barh(names, compute, color=COLORS["forward"], label="matrix products")
    ax.barh(names, send, left=compute, color=COLORS["comm"], label="4 all-reduces")
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


def alexnet(batch: int = 128):
    """Weights and activations of AlexNet by layer: for convolutions cut the batch, for dense layers the matrix."""
    fig, ax = figure(8, 2.7)
    names = [name for name, _, _ in ALEXNET]
    at = range(len(names))
    ax.bar([i - 0.2 for i in at], [w for _, w, _ in ALEXNET], 0.38, color=THINGS[4], label="weights")
    values = [batch * a for _, _, a in ALEXNET]
    ax.bar([i + 0.2 for i in at], values, 0.38, color=THINGS[3], label=f"activations of {batch} images")
    ax.axvspan(-0.5, 4.5, color=COLORS["wait"], alpha=0.35, zorder=0)
    ax.text(2, 3e8, "cut the batch", ha="center")
    ax.text(6, 3e8, "cut the matrices", ha="center")
    ax.set_xticks(at, names)
    ax.set(yscale="log", ylabel="numbers", xlim=(-0.5, 7.5), ylim=(1e4, 1e9))
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8)
    return fig
