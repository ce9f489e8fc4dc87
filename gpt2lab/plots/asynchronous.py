"""Figures of lesson 09: which version is read, how many are kept, how stale gradients are, what that does to a loss."""

from collections import Counter

from matplotlib.figure import Figure

from ..schedules import Op
from .style import COLORS, THINGS, figure, rank_color


def version_map(stream, count: int = 10, title: str = "") -> Figure:
    """Stages by micro-batches: the version that the forward (left) and the backward (right) of each reads; the darker
    the more updates it lacks.
    """
    stages = stream.schedule.ranks
    fig, ax = figure(8, 0.9 + 0.32 * stages)
    for stage in range(stages):
        for micro in range(count):
            for half, kind in enumerate("FB"):
                op = Op(kind, stage, micro)
                late, left = stream.staleness(op), micro + 0.5 * half
                shade = min(1.0, late / max(1, stages - 1))
                color = [1 - shade * (1 - c) for c in (0.80, 0.47, 0.65)]
                ax.fill(
                    [left, left + 0.5, left + 0.5, left], [stage, stage, stage + 1, stage + 1], color=color
                )
                ax.text(left + 0.25, stage + 0.5, stream.reads[op], ha="center", va="center", fontsize=8)
        ax.axhline(stage, color="white", linewidth=2)
    for micro in range(count + 1):
        ax.axvline(micro, color="white", linewidth=3)
    ax.set(
        xlim=(0, count), ylim=(stages, 0), xlabel="micro-batch (left: forward, right: backward)", title=title
    )
    ax.set_xticks([m + 0.5 for m in range(count)], range(count))
    ax.set_yticks([s + 0.5 for s in range(stages)], [f"stage {s}" for s in range(stages)])
    ax.tick_params(length=0)
    ax.grid(False)
    return fig


def kept(records: dict[str, list], title: str = "") -> Figure:
    """Versions that each stage keeps after each of its operations; one panel a scheme, one line a stage."""
    fig, axes = figure(8, 2.4, cols=len(records), sharey=True, squeeze=False)
    for ax, (name, stages) in zip(axes[0], records.items(), strict=True):
        for stage, record in enumerate(stages):
            held = [len(read.held) for read in record]
            ax.step(
                range(len(held)),
                [h + 0.05 * stage for h in held],
                color=rank_color(stage),
                label=f"stage {stage}",
            )
        ax.set(xlabel="operation", title=name)
    axes[0][0].set(ylabel="versions kept", ylim=(0, None))
    axes[0][0].yaxis.get_major_locator().set_params(integer=True)
    axes[0][-1].legend(fontsize=8)
    return fig


def staleness(logs: dict[str, list], title: str = "") -> Figure:
    """How many updates each applied gradient lacked, one panel a rule, the same axes for all."""
    fig, axes = figure(8, 2.4, cols=len(logs), sharex=True, sharey=True)
    for ax, (name, log) in zip(axes, logs.items(), strict=True):
        count = Counter(entry.staleness for entry in log)
        ax.bar(list(count), list(count.values()), color=COLORS["update"], edgecolor="gray")
        mean = sum(entry.staleness for entry in log) / len(log)
        ax.set(title=f"{name}: mean {mean:.1f}", xlabel="updates missed")
    axes[0].set_ylabel("gradients")
    return fig


def curves(
    losses: dict[tuple[str, float], list[float]], time_of: dict[str, float], smooth: int = 8
) -> Figure:
    """Loss by batches (top) and by simulated time (bottom), a column for each learning rate, a line for each scheme.

    `time_of` says how long a scheme takes for a batch.
    """
    rates = sorted({rate for _, rate in losses})
    fig, axes = figure(8, 4.2, 2, len(rates), sharey=True, squeeze=False)
    colors = dict(zip(time_of, ("#000000", *THINGS[3:], COLORS["backward"], COLORS["update"]), strict=False))
    for column, rate in enumerate(rates):
        for name, seconds in time_of.items():
            values = losses[name, rate]
            mean = [
                sum(values[max(0, i - smooth) : i + 1]) / len(values[max(0, i - smooth) : i + 1])
                for i in range(len(values))
            ]
            for ax, scale in zip(axes[:, column], (1, seconds), strict=True):
                ax.plot(
                    [scale * (i + 1) for i in range(len(mean))],
                    mean,
                    color=colors[name],
                    label=name,
                    linewidth=1.3,
                    linestyle="--" if name == "ampnet" else "-",
                )
        axes[0, column].set(title=f"learning rate {rate:g}", xlabel="batches")
        axes[1, column].set(xlabel="simulated time")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    axes[0, -1].legend(fontsize=8)
    return fig
