"""Figures of the model itself: its parts with shapes, its weights, and what the optimizer does."""

from matplotlib.figure import Figure

from .forms import chart, rectangle, text_at
from .style import COLORS, HELD, SERIAL, THINGS, figure

PARTS = (
    ("tokens", "(B, T)", "other"),
    ("wte[tokens] + wpe[0..T-1]", "(B, T, C)", "weight"),
    ("ln_1", "(B, T, C)", "update"),
    ("attn.c_attn", "(B, T, 3C)", "forward"),
    ("attn.core: H heads", "(B, H, T, D)", "comm"),
    ("attn.c_proj", "(B, T, C)", "forward"),
    ("ln_2", "(B, T, C)", "update"),
    ("mlp.c_fc, gelu", "(B, T, 4C)", "forward"),
    ("mlp.c_proj", "(B, T, C)", "forward"),
    ("ln_f", "(B, T, C)", "update"),
    ("logits = x wte^T", "(B, T, V)", "weight"),
    ("loss: sum over tokens", "scalar", "other"),
)
"""Every part of GPT-2 in order: name, shape of what comes out, colour."""


def anatomy(layers: int) -> Figure:
    """GPT-2 from bottom to top: each part with the shape of its output, and the residual stream next to them."""
    fig, ax = figure(8, 5.2)
    ax.set_axis_off()
    ax.set(xlim=(-0.6, 10), ylim=(-0.7, len(PARTS) - 0.3))
    stream, left, right = 1.3, 2.5, 5.5
    for y, (name, shape, kind) in enumerate(PARTS):
        rectangle(ax, left, y - 0.27, right - left, 0.54, COLORS[kind], ec="none", alpha=0.45)
        text_at(ax, 4.0, y, name, family="DejaVu Sans Mono")
        ax.text(6.9, y, shape, va="center", family="DejaVu Sans Mono")
    arrow = {"arrowstyle": "->", "lw": 1.6, "color": SERIAL, "shrinkA": 0, "shrinkB": 0}
    for y in (0, 2, 3, 4, 6, 7, 9, 10):  # to the part above
        ax.annotate("", (4.0, y + 0.73), (4.0, y + 0.27), arrowprops=arrow)
    ax.plot([left, stream, stream], [1, 1, 9], color=SERIAL, lw=1.6)
    for y in (2, 6, 9):  # the stream is read by the norms
        ax.annotate("", (left, y), (stream, y), arrowprops=arrow)
    for y in (5, 8):  # what the halves of a block add to it
        ax.annotate("", (stream, y), (left, y), arrowprops=arrow)
        text_at(ax, stream, y, "+", bbox={"boxstyle": "circle,pad=0.1", "fc": "white"})
    ax.plot([9.3, 9.5, 9.5, 9.3], [1.6, 1.6, 8.4, 8.4], color=SERIAL, lw=1.2)
    ax.text(9.62, 5, f"{layers} blocks", rotation=90, va="center")
    ax.text(0.6, 5, "residual stream", rotation=90, va="center", ha="center")
    return fig


def histograms(kinds: dict[str, tuple[object, float]]) -> Figure:
    """How the fresh weights of each kind are spread: kind -> (values, the standard deviation intended)."""
    fig, axes = figure(8, 2.6, 1, len(kinds))
    for ax, (kind, (values, std)) in zip(axes, kinds.items(), strict=True):
        ax.hist(values, bins=60, color=HELD["weights"], density=True)
        for x in (-std, std):
            ax.axvline(x, color=SERIAL, lw=1, ls="--")
        ax.set(title=kind, yticks=[], xlim=(-0.085, 0.085), xlabel="weight")
    return fig


def normalised(gradients, updates: dict[str, object], rate: float) -> Figure:
    """The size of each weight's update against that of its gradient: name of the optimizer -> updates."""
    fig, ax = figure(8, 2.8)
    for i, (name, values) in enumerate(updates.items()):
        ax.scatter(gradients, values, s=12, color=THINGS[-1 - i], alpha=0.5, lw=0, label=name)
    ax.axhline(rate, color=SERIAL, lw=1, ls="--", zorder=0)
    ax.text(min(gradients), rate * 2, "learning rate", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="size of the gradient", ylabel="size of the update")
    ax.set(ylim=(None, 30 * rate))
    ax.legend(markerscale=3)
    return fig


def per_token(times: dict[str, list[float]]) -> Figure:
    """What each new token costs, by its position: name -> one number a token."""
    count = range(1, 1 + max(map(len, times.values())))
    return chart(count, times, THINGS[::-1], (8, 2.6), xlabel="new token", ylabel="ms", ylim=(0, None))
