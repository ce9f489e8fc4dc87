"""Figures of lesson 09: which version is read, how many are kept, how stale gradients are, what that does to a loss."""

from collections import Counter

from matplotlib.figure import Figure

from ..schedules import Op
from .style import COLORS, SERIAL, THINGS, figure, rank_color


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
    axes[0].yaxis.get_major_locator().set_params(integer=True)
    return fig


def curves(losses: dict[tuple, list[float]], times: dict[str, float], every: int = 1) -> Figure:
    """Loss by batches (top) and by simulated time (bottom), a column for each learning rate, a line for each scheme.

    `losses[scheme, rate, warm-up]` are means over `every` batches; `times` is what a scheme takes for a batch.
    """
    rates = sorted({rate for _, rate, _ in losses})
    fig, axes = figure(8, 4.4, 2, len(rates), sharey=True, squeeze=False)
    for (scheme, rate, warmup), values in losses.items():
        for ax, unit in zip(axes[:, rates.index(rate)], (1, times[scheme]), strict=True):
            ax.plot(
                [unit * every * (i + 1) for i in range(len(values))],
                values,
                color=_scheme_color(scheme, times),
                label=scheme + f", warm-up {warmup}" * bool(warmup),
                linewidth=1.4,
                linestyle=":" if warmup else "--" if scheme == "ampnet" else "-",
            )
    for column, rate in enumerate(rates):
        axes[0, column].set(title=f"learning rate {rate:g}", xlabel="batches")
        axes[1, column].set(xlabel="simulated time")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    axes[1, -1].legend(fontsize=8)
    return fig


def tradeoff(losses: dict[tuple, list[float]], times: dict[str, float]) -> Figure:
    """The loss at the end by the share of time that ranks work: a panel for each learning rate, a dot for each run."""
    rates = sorted({rate for _, rate, _ in losses})
    fig, axes = figure(8, 2.6, 1, len(rates), sharex=True, sharey=True, squeeze=False)
    for (scheme, rate, warmup), values in losses.items():
        label = scheme + f", warm-up {warmup}" * bool(warmup)
        color, mark = _scheme_color(scheme, times), "v" if warmup else "o"
        ax = axes[0, rates.index(rate)]
        ax.plot(1 / times[scheme], sum(values[-3:]) / 3, mark, color=color, label=label, alpha=0.8)
        ax.set(title=f"learning rate {rate:g}", xlabel="busy", xlim=(0.5, 1.05))
    axes[0, 0].set_ylabel("loss at the end")
    axes[0, -1].legend(fontsize=8, loc="center")
    return fig


def _scheme_color(scheme: str, schemes) -> str:
    colors = (SERIAL, *THINGS[3:], COLORS["backward"], COLORS["update"])
    return colors[list(schemes).index(scheme)]
