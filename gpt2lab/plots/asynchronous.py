"""Figures of lesson 09: which version is read, how many are kept, how stale gradients are, what that does to a loss."""

from collections import Counter

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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
                left, wide = micro + 0.5 * half, [0, 0.5, 0.5, 0]
                tall = [stage, stage, stage + 1, stage + 1]
                ax.fill([left + w for w in wide], tall, color=_shade(stream, op))
                ax.text(left + 0.25, stage + 0.5, stream.reads[op], ha="center", va="center", fontsize=8)
        ax.axhline(stage, color="white", linewidth=2)
    for micro in range(count + 1):
        ax.axvline(micro, color="white", linewidth=3)
    ax.set(xlim=(0, count), xlabel="micro-batch (left: forward, right: backward)", title=title)
    ax.set_xticks([m + 0.5 for m in range(count)], range(count))
    _stage_rows(ax, stages)
    return fig


def _stage_rows(ax, stages: int) -> None:
    ax.set_ylim(stages, 0)
    ax.set_yticks([s + 0.5 for s in range(stages)], [f"stage {s}" for s in range(stages)])
    ax.tick_params(length=0)
    ax.grid(False)


def _shade(stream, op: Op) -> list[float]:
    """The colour of an operation: the darker the more updates the weights that it reads lack."""
    share = min(1.0, stream.staleness(op) / max(1, stream.schedule.ranks - 1))
    return [1 - (0.05 + 0.95 * share) * (1 - c) for c in (0.80, 0.47, 0.65)]


def in_time(stream, timeline, title: str = "") -> Figure:
    """Stages by time: each operation with the version that it reads, the darker the more updates it lacks (backwards
    have a frame); below, how many versions each stage keeps.
    """
    stages, end = len(timeline.rows), float(timeline.makespan)
    fig, (ax, below) = figure(8, 2.6 + 0.3 * stages, 2, sharex=True, height_ratios=[0.3 * stages, 1.1])
    inside = {"ha": "center", "va": "center", "fontsize": 7, "in_layout": False}  # halves the time to draw
    for stage, row in enumerate(timeline.rows):
        boxes, name = [], f"stage {stage}"
        for box in row:
            start, width = float(box.start), float(box.end - box.start)
            edge = "gray" if box.op.kind == "B" else "lightgray"
            look = {"facecolor": _shade(stream, box.op), "edgecolor": edge, "linewidth": 0.6}
            boxes.append(Rectangle((start + 0.04, stage + 0.06), width - 0.08, 0.88, **look))
            middle = start + width / 2, stage + 0.5
            ax.text(*middle, stream.reads[box.op], **inside)
        ax.add_collection(PatchCollection(boxes, match_original=True))
        times = [0, *(float(box.end) for box in row)]
        held = [1, *map(len, stream.held(stage))]
        below.step(times, held, where="post", label=name, **_nested(stage, stages))
    ax.set(xlim=(0, end), title=title)
    _stage_rows(ax, stages)
    below.set(xlabel="time (a forward takes 1)", ylabel="versions kept", ylim=(0, None))
    below.yaxis.get_major_locator().set_params(integer=True)
    below.legend(fontsize=8, ncols=stages, loc="upper left", bbox_to_anchor=(0, -0.42))
    return fig


def _nested(stage: int, stages: int) -> dict:
    """The look of a stage's line: later stages are thinner, so that lines on one height all show."""
    return {"color": rank_color(stage), "linewidth": 1.5 + 2 * (stages - 1 - stage)}


def kept(records: dict[str, list], title: str = "") -> Figure:
    """Versions that each stage keeps after each of its operations; one panel a scheme, one line a stage."""
    fig, axes = figure(8, 2.4, cols=len(records), sharey=True, squeeze=False)
    for ax, (name, stages) in zip(axes[0], records.items(), strict=True):
        for stage, record in enumerate(stages):
            held = [len(read.held) for read in record]
            ax.step(
                range(len(held)),
                held,
                label=f"stage {stage}",
                **_nested(stage, len(stages)),
            )
        ax.set(xlabel="operation", title=name)
    axes[0][0].set(ylabel="versions kept", ylim=(0, None))
    axes[0][0].yaxis.get_major_locator().set_params(integer=True)
    axes[0][-1].legend(fontsize=8)
    return fig


def staleness(missed: dict[str, list[int]], title: str = "") -> Figure:
    """How many updates each applied gradient lacked, one panel a rule, the same axes for all."""
    fig, axes = figure(8, 2.4, cols=len(missed), sharex=True, sharey=True)
    for ax, (name, lacked) in zip(axes, missed.items(), strict=True):
        count = Counter(lacked)
        ax.bar(list(count), list(count.values()), color=COLORS["update"], edgecolor="gray")
        ax.set(title=f"{name}: mean {sum(lacked) / len(lacked):.1f}", xlabel="updates missed")
    axes[0].set_ylabel("gradients")
    axes[0].yaxis.get_major_locator().set_params(integer=True)
    return fig


def loss_by_rule(found: dict[str, list[tuple]]) -> Figure:
    """The loss by updates and by time of each rule: `found[rule]` holds (times, losses) for each seed."""
    fig, (by_updates, by_time) = figure(8, 2.8, cols=2, sharey=True)
    for (name, seeds), color in zip(found.items(), (SERIAL, *THINGS[3:]), strict=False):
        times, losses = zip(*seeds, strict=True)
        for ax, x in ((by_updates, [6 * n for n in range(len(losses[0]))]), (by_time, _means(times))):
            _band(ax, x, losses, color=color, label=name)
    by_updates.set(xlabel="updates", ylabel="loss")
    by_time.set(xlabel="time (a fast worker's step takes 1)")
    by_time.legend()
    return fig


def _means(seeds) -> list[float]:
    return [sum(values) / len(values) for values in zip(*seeds, strict=True)]


def _band(ax, x, seeds, color, **look) -> None:
    """The mean of the seeds as a line, and from the least to the most as a band."""
    ax.plot(x, _means(seeds), color=color, linewidth=1.4, **look)
    least, most = zip(*((min(v), max(v)) for v in zip(*seeds, strict=True)), strict=True)
    ax.fill_between(x, least, most, color=color, alpha=0.2, linewidth=0)


def curves(losses: dict[tuple, list[list[float]]], times: dict[str, float], every: int = 1) -> Figure:
    """Loss by batches (top) and by simulated time (bottom), a column for each learning rate, a line for each scheme.

    `losses[scheme, rate, warm-up]` are a list for each seed of means over `every` batches, drawn as mean and range;
    `times` is what a scheme takes for a batch.
    """
    rates = sorted({rate for _, rate, _ in losses})
    fig, axes = figure(8, 4.4, 2, len(rates), sharey=True, squeeze=False)
    for (scheme, rate, warmup), seeds in losses.items():
        for ax, unit in zip(axes[:, rates.index(rate)], (1, times[scheme]), strict=True):
            _band(
                ax,
                [unit * every * (i + 1) for i in range(len(seeds[0]))],
                seeds,
                color=_scheme_color(scheme, times),
                label=scheme + f", warm-up {warmup}" * bool(warmup),
                linestyle=":" if warmup else "--" if scheme == "ampnet" else "-",
            )
    for column, rate in enumerate(rates):
        axes[0, column].set(title=f"learning rate {rate:g}", xlabel="batches")
        axes[1, column].set(xlabel="simulated time")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return fig


def tradeoff(losses: dict[tuple, list[list[float]]], times: dict[str, float]) -> Figure:
    """The loss at the end by the share of time that ranks work: a panel for each rate, a dot for each run and seed."""
    rates = sorted({rate for _, rate, _ in losses})
    fig, axes = figure(8, 2.6, 1, len(rates), sharex=True, sharey=True, squeeze=False)
    for (scheme, rate, warmup), seeds in losses.items():
        label = scheme + f", warm-up {warmup}" * bool(warmup)
        color, mark = _scheme_color(scheme, times), "v" if warmup else "o"
        ax, ends = axes[0, rates.index(rate)], [sum(values[-3:]) / 3 for values in seeds]
        ax.plot([1 / times[scheme]] * len(ends), ends, mark, color=color, label=label, alpha=0.6)
        ax.set(title=f"learning rate {rate:g}", xlabel="busy", xlim=(0.5, 1.05))
    axes[0, 0].set_ylabel("loss at the end")
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return fig


def _scheme_color(scheme: str, schemes) -> str:
    colors = (SERIAL, *THINGS[3:], COLORS["backward"], COLORS["update"])
    return colors[list(schemes).index(scheme)]
