"""Figures of ZeRO: who holds what, memory over a step, which weights are where and when."""

from matplotlib.figure import Figure

from .style import THINGS, figure, rank_color

THREE = ("weights", "gradients", "optimizer")


def bars(stages: dict[str, dict[str, float]], unit: str, measured: dict[str, float] | None = None) -> Figure:
    """Stacked bars of weights, gradients and optimizer state per rank; circles mark totals that were measured."""
    fig, ax = figure(8, 0.9 + 0.42 * len(stages))
    names = list(stages)
    left = [0.0] * len(names)
    for kind, color in zip(THREE, (THINGS[4], THINGS[3], THINGS[2]), strict=True):
        sizes = [stages[n][kind] for n in names]
        ax.barh(names, sizes, left=left, color=color, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, total in enumerate(left):
        ax.text(total, y, f"  {total:,.1f} {unit}", va="center", fontsize=9)
    if measured:
        ax.plot([measured[n] for n in names], range(len(names)), "ko", ms=7, mfc="none", label="measured")
    ax.set(xlabel=f"{unit} on each rank", xlim=(0, 1.15 * max(left)))
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    return fig


def over_a_step(curves: dict[str, list[float]], unit: str = "MB", legend: str = "lower right") -> Figure:
    """Memory held over one step: `curves[name]` lists bytes in the order of allocation events."""
    fig, ax = figure(8, 3.2)
    for i, (name, held) in enumerate(curves.items()):
        x = [j / max(len(held) - 1, 1) for j in range(len(held))]
        color = THINGS[0] if i == 0 else rank_color(i)
        ax.plot(x, [h / 1e6 for h in held], lw=1.2, color=color, label=name, drawstyle="steps-post")
        top = max(range(len(held)), key=held.__getitem__)
        ax.plot(x[top], held[top] / 1e6, "v", color=color)
    ax.set(xlabel="one step, in allocation events", ylabel=unit, ylim=(0, None))
    ax.legend(loc=legend)
    return fig


def residency(rows: dict[str, list[tuple[int, int, int]]], marks: dict[str, int]) -> Figure:
    """Which part's whole weights are present over the events of a step, hatched while they are on their way.

    `rows[part]` lists (asked for, here, gone).
    """
    fig, ax = figure(8, 0.9 + 0.24 * len(rows))
    for y, (_, spans) in enumerate(rows.items()):
        for asked, here, gone in spans:
            ax.barh(y, here - asked, 0.75, asked, color="white", edgecolor=THINGS[4], hatch="////")
            ax.barh(y, gone - here, 0.75, here, color=THINGS[4], edgecolor=THINGS[4])
    for text, x in marks.items():
        ax.axvline(x, color="black", lw=1, ls="--")
        ax.text(x, -0.9, text, ha="center", fontsize=9)
    ax.set(xlabel="gathers and releases, in order", yticks=range(len(rows)))
    ax.set_yticklabels(list(rows))
    ax.invert_yaxis()
    return fig


def lines(runs: dict[str, list[float]], xlabel: str, ylabel: str, log: bool = False) -> Figure:
    """Several lines over steps."""
    fig, ax = figure(8, 2.8)
    for i, (name, values) in enumerate(runs.items()):
        ax.plot(values, ("o-", "s--", "^:")[i % 3], ms=4, color=rank_color(i), label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    ax.legend()
    return fig


def moved(layers: dict[str, list[float]]) -> Figure:
    """How far each layer's weights moved, in two programs side by side."""
    fig, ax = figure(8, 2.6)
    width = 0.8 / len(layers)
    for i, (name, values) in enumerate(layers.items()):
        ax.bar([x + i * width for x in range(len(values))], values, width, color=rank_color(i), label=name)
    ax.set(xlabel="layer", ylabel="distance moved", xticks=range(len(values)))
    ax.legend(loc="upper left", bbox_to_anchor=(0, 1.2), ncols=2)
    return fig
