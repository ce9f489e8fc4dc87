"""A pipeline schedule as a picture: the time row of each rank, its memory row under it, a mark at the peak."""

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .style import COLORS, figure, rank_color

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
NAMES = {"F": "forward", "B": "whole backward", "I": "input gradient", "W": "weight gradient"}
TIME, MEMORY = 0.5, 0.34  # heights of the two rows of a rank, in rows


def schedule(
    timeline, title: str = "", memory: bool = True, seen: list | None = None, unit: str = ""
) -> Figure:
    """Draw a simulated `Timeline`; boxes carry the micro-batch, later chunks of a rank are hatched.

    `seen` are boxes (rank, start, end) of a live run in the same unit, drawn dark under the simulated ones.
    `unit` names the unit of time.
    """
    ranks = len(timeline.rows)
    fig, ax = figure(8, 1.1 + (0.5 if memory else 0.32) * ranks)
    end = max([float(timeline.makespan), *(float(box[2]) for box in seen or [])])
    most = max(float(timeline.schedule.activations(r)) for r in range(ranks))
    for rank, row in enumerate(timeline.rows):
        _boxes(ax, timeline.schedule, rank, row, end)
        if memory:
            _memory(ax, timeline, rank, most)
    for rank, start, stop in seen or []:
        box = Rectangle((start, rank + 0.08), stop - start, 0.24, fc=COLORS["other"], ec="white", lw=0.5)
        ax.add_patch(box)
    _frame(ax, timeline, title, end, unit, bool(seen))
    return fig


def _boxes(ax, plan, rank, row, end) -> None:
    """The time row: a box for each operation, its micro-batch inside where there is room."""
    chunks = plan.stages_of(rank)
    for hatch in ("", "////"):
        boxes = [b for b in row if bool(hatch) == (chunks.index(b.op.stage) % 2 == 1)]
        patches = [Rectangle((float(b.start), rank - 0.45), float(b.end - b.start), TIME) for b in boxes]
        colors = [COLORS[KINDS[b.op.kind]] for b in boxes]
        ax.add_collection(
            PatchCollection(patches, facecolor=colors, edgecolor="white", linewidth=0.5, hatch=hatch)
        )
    for box in row:
        text, width = str(box.op.micro), float(box.end - box.start)
        if width > 0.011 * end * len(text):
            middle = float(box.start) + width / 2
            ax.text(middle, rank - 0.2, text, ha="center", va="center", fontsize=7, clip_on=True)


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
    ax.annotate(
        f"{held[peak]:g}",
        (times[peak], scaled[peak]),
        (3, -2),
        textcoords="offset points",
        fontsize=7,
        va="top",
    )


def _frame(ax, timeline, title, end, unit, live) -> None:
    ranks = len(timeline.rows)
    ax.set_xlim(0, end)
    ax.set_ylim(ranks - 0.45, -0.55)
    ax.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    for rank, tick in enumerate(ax.get_yticklabels()):
        tick.set_color(rank_color(rank))
        tick.set_fontweight("bold")
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"time in {unit}" if unit else "time")
    ax.set_title(title, pad=24)
    kinds = [k for k in NAMES if any(box.op.kind == k for row in timeline.rows for box in row)]
    handles = [Patch(color=COLORS[KINDS[k]], label=NAMES[k]) for k in kinds]
    if any(len(timeline.schedule.stages_of(r)) > 1 for r in range(ranks)):
        handles.append(Patch(facecolor="white", edgecolor="gray", hatch="////", label="second chunk or copy"))
    if live:
        handles.append(Patch(color=COLORS["other"], label="seen on live ranks"))
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), fontsize=8)


def compare(points: list[tuple[str, float, float]], title: str = "") -> Figure:
    """Schedules side by side: (name, bubble as a share of the makespan, peak activations), one row each."""
    fig, (left, right) = figure(8, 0.9 + 0.27 * len(points), cols=2, sharey=True)
    rows = range(len(points))
    left.barh(rows, [100 * bubble for _, bubble, _ in points], color=COLORS["wait"], edgecolor="gray")
    right.barh(rows, [held for _, _, held in points], color=COLORS["forward"])
    for row, (_, bubble, held) in enumerate(points):
        left.text(100 * bubble, row, f" {100 * bubble:.1f} %", va="center", fontsize=8)
        right.text(held, row, f" {held:g}", va="center", fontsize=8)
    left.set_yticks(rows, [name for name, _, _ in points])
    left.invert_yaxis()
    left.set_xlabel("bubble, % of the makespan")
    right.set_xlabel("peak activations of the fullest rank")
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.18)
    left.set_title(title)
    return fig
