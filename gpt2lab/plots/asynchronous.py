"""Figures of lesson 09: which version is read, how many are kept, how stale gradients are, what that does to a loss."""

from collections import Counter

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..schedules import Op
from .forms import band, rectangle, text_at
from .schedule import TITLES
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
                op, left = Op(kind, stage, micro), micro + 0.5 * half
                shade = _shade(stream, op)
                rectangle(ax, left, stage, 0.5, 1, shade, ec=shade)
                text_at(ax, left + 0.25, stage + 0.5, stream.reads[op], fontsize=8)
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
    for stage, row in enumerate(timeline.rows):
        boxes = []
        for one in row:
            start, width = float(one.start), float(one.end - one.start)
            edge = THINGS[1 if one.op.kind == "B" else 2]
            look = {"facecolor": _shade(stream, one.op), "edgecolor": edge, "linewidth": 0.6}
            boxes.append(Rectangle((start + 0.04, stage + 0.06), width - 0.08, 0.88, **look))
            middle = start + width / 2, stage + 0.5  # without the texts the layout takes half the time
            text_at(ax, *middle, stream.reads[one.op], fontsize=8, in_layout=False)
        ax.add_collection(PatchCollection(boxes, match_original=True))
    times = [[0, *(float(one.end) for one in row)] for row in timeline.rows]
    held = [[1, *map(len, stream.held(stage))] for stage in range(stages)]
    _versions(below, times, held, "post")
    ax.set(xlim=(0, end), title=title)
    _stage_rows(ax, stages)
    below.set(xlabel="time (a forward takes 1)", ylabel="versions kept", ylim=(0, None))
    below.legend(fontsize=8, ncols=stages, loc="upper left", bbox_to_anchor=(0, -0.42))
    return fig


def _versions(ax, times, held, where: str = "pre") -> None:
    """Versions kept over time, a line a stage; later stages are thinner, so that lines on one height all show."""
    for stage, (x, y) in enumerate(zip(times, held, strict=True)):
        look = {"color": rank_color(stage), "linewidth": 1.5 + 2 * (len(held) - 1 - stage)}
        ax.step(x, y, where=where, label=f"stage {stage}", **look)
    ax.yaxis.get_major_locator().set_params(integer=True)


def kept(records: dict[str, list]) -> Figure:
    """Versions that each stage keeps after each of its operations; one panel a scheme, one line a stage."""
    fig, axes = figure(8, 2.4, cols=len(records), sharey=True, squeeze=False)
    for ax, (name, stages) in zip(axes[0], records.items(), strict=True):
        held = [[len(read.held) for read in record] for record in stages]
        _versions(ax, [range(len(of_one)) for of_one in held], held)
        ax.set(xlabel="operation", title=TITLES.get(name, name))
    axes[0][0].set(ylabel="versions kept", ylim=(0, None))
    axes[0][-1].legend(fontsize=8)
    return fig


def staleness(missed: dict[str, list[int]]) -> Figure:
    """How many updates each applied gradient lacked, one panel a rule, the same axes for all."""
    fig, axes = figure(8, 2.4, cols=len(missed), sharex=True, sharey=True)
    for ax, (name, lacked) in zip(axes, missed.items(), strict=True):
        count = Counter(lacked)
        ax.bar(list(count), list(count.values()), color=COLORS["update"], edgecolor=THINGS[1])
        ax.set(title=f"{name}: mean {sum(lacked) / len(lacked):.1f}", xlabel="updates missed")
    axes[0].set_ylabel("gradients")
    axes[0].yaxis.get_major_locator().set_params(integer=True)
    return fig


def loss_by_rule(found: dict[str, list[tuple]]) -> Figure:
    """The loss by updates and by time of each rule: `found[rule]` holds (times, losses) for each seed."""
    fig, (by_updates, by_time) = figure(8, 2.8, cols=2, sharey=True)
    for (name, seeds), color in zip(found.items(), (SERIAL, *THINGS[3:]), strict=False):
        times, losses = zip(*seeds, strict=True)
        mean = [sum(of_seeds) / len(of_seeds) for of_seeds in zip(*times, strict=True)]
        for ax, x in ((by_updates, [6 * n for n in range(len(losses[0]))]), (by_time, mean)):
            band(ax, x, losses, color, linewidth=1.4, label=name)
    by_updates.set(xlabel="updates", ylabel="loss (nats a token)")
    by_time.set(xlabel="time (a fast worker's step takes 1)")
    by_time.legend()
    return fig


def curves(losses: dict[tuple, list[list[float]]], times: dict[str, float], every: int = 1) -> Figure:
    """Loss by batches (top) and by simulated time (bottom), a column for each learning rate, a line for each scheme.

    `losses[scheme, rate, warm-up]` are a list for each seed of means over `every` batches, drawn as mean and range;
    `times` is what a scheme takes for a batch.
    """

    def draw(column, seeds, scheme, look):
        style = ":" if "warm-up" in look["label"] else "--" if scheme == "ampnet" else "-"
        for ax, unit in zip(column, (1, times[scheme]), strict=True):
            x = [unit * every * (i + 1) for i in range(len(seeds[0]))]
            wide = 3.2 if scheme == "pipedream" else 1.4  # AMPNet lies on it
            band(ax, x, seeds, linewidth=wide, linestyle=style, **look)

    labels = {"xlabel": "batches"}, {"xlabel": "simulated time", "title": ""}
    return _by_rate(losses, times, draw, 4.4, labels, "loss (nats a token)")


def tradeoff(losses: dict[tuple, list[list[float]]], times: dict[str, float]) -> Figure:
    """The loss at the end by the share of time that ranks work: a panel for each rate, a dot for each run and seed."""

    def draw(column, seeds, scheme, look):
        ends, mark = [sum(values[-3:]) / 3 for values in seeds], "v" if "warm-up" in look["label"] else "o"
        fill = "none" if mark == "v" else "full"
        column[0].plot([1 / times[scheme]] * len(ends), ends, mark, alpha=0.6, fillstyle=fill, **look)

    labels = [{"xlabel": "busy", "xlim": (0.5, 1.05)}]
    return _by_rate(losses, times, draw, 2.6, labels, "loss at the end\n(nats a token)", sharex=True)


def _by_rate(losses, schemes, draw, figure_height: float, labels, ylabel: str, **shared) -> Figure:
    """A column of panels for each learning rate: `draw` adds the seeds of a scheme, `labels` are those of the rows."""
    rates = sorted({rate for _, rate, _ in losses})
    colors = dict(zip(schemes, (SERIAL, *THINGS[3:], COLORS["backward"], COLORS["update"]), strict=False))
    fig, axes = figure(8, figure_height, len(labels), len(rates), sharey=True, squeeze=False, **shared)
    for (scheme, rate, warmup), seeds in losses.items():
        label = TITLES.get(scheme, scheme) + f", warm-up {warmup}" * bool(warmup)
        draw(axes[:, rates.index(rate)], seeds, scheme, {"color": colors[scheme], "label": label})
    for row, label in zip(axes, labels, strict=True):
        for ax, rate in zip(row, rates, strict=True):
            ax.set(**{"title": f"learning rate {rate:g}"} | label)
        row[0].set_ylabel(ylabel)
    fig.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return fig
