"""A pipeline schedule as a picture: the time row of each rank, its memory row under it, a mark at the peak."""

from itertools import pairwise

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from .forms import bars, chart, legend_above, name_rows, numbers, rectangle, text_at
from .style import COLORS, HELD, THINGS, figure, paler, rank_color

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
NAMES = {"F": "forward", "B": "whole backward", "I": "input gradient", "W": "weight gradient"}
SPELT = ("1F1B", "GPipe", "ZB-H1", "ZB-H2", "ZB-V", "Chimera", "DualPipe", "TeraPipe", "PipeDream", "AMPNet")
TITLES = {title.lower().replace("-", "_"): title for title in SPELT}
TITLES |= {"naive": "naive", "interleaved": "interleaved 1F1B", "breadth_first": "breadth-first"}
TITLES |= {"dualpipe_v": "DualPipeV", "pipedream_vertical": "vertical sync", "2bw": "PipeDream-2BW"}
"""How papers spell the name of a schedule."""
TIME, MEMORY = 0.5, 0.34  # heights of the two rows of a rank, in rows


def schedule(
    timeline, title: str = "", memory: bool = True, seen=None, unit: str = "forwards of a rank", end=None
) -> Figure:
    """Draw a simulated `Timeline`; boxes carry the micro-batch, later chunks of a rank are paler.

    `seen` are boxes (rank, start, end) of a live run in the same unit, drawn dark under the simulated ones.
    `unit` names the unit of time; `end` is where the axis ends, so that several pictures can share it.
    """
    ranks = len(timeline.rows)
    fig, ax = figure(8, 1.1 + (0.5 if memory else 0.32) * ranks)
    end = float(max([end or 0, timeline.makespan, *(box[2] for box in seen or [])]))
    most = max(float(timeline.schedule.activations(r)) for r in range(ranks))
    for rank, row in enumerate(timeline.rows):
        _boxes(ax, timeline.schedule, rank, row, end)
        if timeline.cost.joint is not None:
            _pairs(ax, rank, row)
        if memory:
            _memory(ax, timeline, rank, most)
    for rank, start, stop in seen or []:
        rectangle(ax, start, rank + 0.08, stop - start, 0.24, COLORS["other"], lw=0.5)
    _frame(ax, timeline, title, end, unit)
    _legend(ax, timeline, memory, bool(seen))
    return fig


def _boxes(ax, plan, rank, row, end) -> None:
    """The time row: a box for each operation, its micro-batch inside where there is room."""
    chunks = plan.stages_of(rank)
    tops, feet = [], []
    for box in row:
        start, width = float(box.start), float(box.end - box.start)
        pale = 0.55 * chunks.index(box.op.stage) / max(1, len(chunks) - 1)
        tops.append(_box(start, rank - 0.45, width, TIME, box.op.kind, pale))
        if plan.splits and box.op.kind == "B":  # a whole backward among split ones: both halves at once
            feet.append(_box(start, rank - 0.45 + 0.75 * TIME, width, 0.25 * TIME, "W", pale))
        text = str(box.op.micro)
        if width > 0.012 * end * len(text):
            text_at(ax, start + width / 2, rank - 0.2, text, fontsize=8, clip_on=True)
    for patches in (tops, feet):
        ax.add_collection(PatchCollection(patches, match_original=True))


def _pairs(ax, rank, row) -> None:
    """A frame around every forward and backward that run as one."""
    for first, second in pairwise(row):
        if first.op.kind == "F" and second.op.kind == "B" and first.op.stage != second.op.stage:
            place = (float(first.start), rank - 0.45), float(second.end - first.start), TIME
            ax.add_patch(Rectangle(*place, fill=False, ec="black", lw=1.3, zorder=3))


def _box(left, top, width, height, kind, pale) -> Rectangle:
    """A box in the colour of its kind, mixed with white the more the later the chunk."""
    color = paler(COLORS[KINDS[kind]], pale)
    return Rectangle((left, top), width, height, facecolor=color, edgecolor="white", linewidth=0.5)


def _memory(ax, timeline, rank, most) -> None:
    """The memory row: activations held, as steps, with a mark and the number at the first peak."""
    steps = timeline.memory(rank)
    times = [float(t) for t, _ in steps] + [float(timeline.makespan)]
    held = [float(h) for _, h in steps] + [float(steps[-1][1])]
    base = rank + 0.45
    scaled = [base - MEMORY * h / most for h in held]
    ax.fill_between(times, base, scaled, step="post", color=rank_color(rank), alpha=0.35, linewidth=0)
    peak = held.index(max(held))
    ax.plot(times[peak], scaled[peak], marker="v", color=rank_color(rank), markersize=4)
    look = {"textcoords": "offset points", "fontsize": 8, "va": "center"}
    ax.annotate(f"{held[peak]:.3g}", (times[peak], scaled[peak]), (4, -3), **look)


def _frame(ax, timeline, title, end, unit) -> None:
    ranks = len(timeline.rows)
    ax.set(xlim=(0, end), ylim=(ranks - 0.45, -0.55), xlabel=f"time in {unit}")
    ax.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)], fontweight="bold")
    ax.tick_params(axis="y", length=0, pad=12)
    for rank in range(ranks):  # a patch in the rank's colour: some of them are too pale for letters
        place = {"transform": ax.get_yaxis_transform(), "clip_on": False, "color": rank_color(rank)}
        ax.add_patch(Rectangle((-0.013, rank - 0.2), 0.009, 0.4, **place))
    ax.grid(axis="y", visible=False)
    ax.set_title(title, pad=24)


def _legend(ax, timeline, memory, live) -> None:
    """What the colours are: kinds of work, later chunks, a live run, and what the rows of memory hold."""
    ranks, plan = len(timeline.rows), timeline.schedule
    kinds = [k for k in NAMES if any(box.op.kind == k for row in timeline.rows for box in row)]
    keys = [(_key(k, plan.splits), NAMES[k]) for k in kinds]
    chunks = max(len(plan.stages_of(r)) for r in range(ranks))
    if chunks > 1:
        words = "the paler, the later the chunk"
        if chunks == 2:
            words = "pale: second copy" if plan.copies == 2 else "pale: second chunk"
        keys.append((Patch(facecolor="white", edgecolor=THINGS[1]), words))
    if live:
        keys.append((Patch(color=COLORS["other"]), "seen on live ranks"))
    if memory:
        held = tuple(Patch(color=rank_color(r), alpha=0.35, lw=0) for r in range(min(ranks, 4)))
        keys.append((held, "activations held"))
    handles, labels = zip(*keys, strict=True)
    joined, narrow = {tuple: HandlerTuple(ndivide=None, pad=0)}, {"columnspacing": 0.7, "handletextpad": 0.4}
    legend_above(
        ax, len(keys), handles=handles, labels=labels, handler_map=joined, handlelength=1.2, **narrow
    )


def _key(kind: str, splits: bool):
    """What the legend shows for a kind: one colour, or both of a whole backward among split ones."""
    if kind == "B" and splits:
        return Patch(color=COLORS["backward"]), Patch(color=COLORS["weight"])
    return Patch(color=COLORS[KINDS[kind]])


def micro_batches(speed: dict[int, float], ranks: int) -> Figure:
    """By the number of micro-batches m: the processor's `speed`, 1 - bubble of GPipe or 1F1B, and their product."""
    counts, top = list(speed), max(speed.values())
    busy = {m: m / (m + ranks - 1) for m in counts}
    curves = {
        "speed of the processor": [speed[m] / top for m in counts],
        "1 - bubble": busy.values(),
        "product": [speed[m] / top * busy[m] for m in counts],
    }
    looks = [{"color": c, "marker": m} for c, m in ((THINGS[4], "o"), (THINGS[3], "s"), ("black", "^"))]
    labels = {"xlabel": "micro-batches", "ylabel": "share of the ideal", "xscale": "log", "ylim": (0, 1.05)}
    also, legend = lambda ax: numbers(ax.xaxis, counts), {"loc": "lower center", "ncols": 3}
    return chart(counts, curves, looks, (8, 2.8), also, legend, **labels)


def side_by_side(rows: list[tuple], title: str = "") -> Figure:
    """Schedules side by side, a row each.

    rows: (name, bubble as a share of the makespan and of the worst own span, peak activations, copies of the weights,
    KiB sent).
    """
    fig, axes = figure(8, 1.0 + 0.3 * len(rows), cols=4, sharey=True, width_ratios=[2, 1.4, 0.9, 1.2])
    names, bubbles, spans, held, weights, sent = zip(*rows, strict=True)
    places = range(len(rows))
    thin = {"edgecolor": THINGS[1], "linewidth": 0.5, "size": 8}
    two = (-0.2, bubbles, "wait", "makespan"), (0.2, spans, "other", "own span")
    for shift, shares, kind, label in two:
        at, percent = [y + shift for y in places], [100 * b for b in shares]
        bars(axes[0], percent, COLORS[kind], height=0.4, at=at, label=f"of the {label}", **thin)
    hues = HELD["activations"], HELD["weights"], COLORS["comm"]
    for ax, values, color in zip(axes[1:], (held, weights, sent), hues, strict=True):
        bars(ax, values, color, **thin)
    name_rows(axes[0], [TITLES.get(name, name) for name in names])
    legend_above(axes[0], 2)
    for ax, label in zip(axes, ("bubble, %", "peak activations", "weights", "KiB sent"), strict=True):
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.28)
    axes[0].set_title(title, pad=20)
    return fig
