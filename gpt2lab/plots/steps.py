"""A recorded run of live ranks, step by step: who computes, who sends what to whom, what each rank holds.

A run is, for each rank, its spans and its communication log: `launch(fn)` where fn returns `trace.spans(False),
list(comm.log)`. Spans of the lane "holds" say what a rank holds and how long.
"""

from dataclasses import dataclass, replace

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from .forms import rectangle, text_at
from .style import COLORS, figure, rank_color

GRAIN = 0.012
"""What happens within this share of the whole time counts as one moment."""


@dataclass(frozen=True)
class Moment:
    """The state of all ranks from `time` (seconds from the start) on, until the next moment.

    work: (name, kind) of each rank, or None. holds: names, for each rank. sends: (source, target, words).
    """

    time: float
    work: tuple
    holds: tuple[tuple[str, ...], ...]
    sends: tuple[tuple[int, int, str], ...]

    @property
    def words(self) -> str:
        """The moment in a sentence, for those who do not see it."""
        busy = [f"rank {r}: {w[0]}" for r, w in enumerate(self.work) if w]
        sent = [f"rank {a} sends {what} to rank {b}" for a, b, what in self.sends]
        return "; ".join(busy + sent) or "nobody computes or sends"


def moments(run) -> list[Moment]:
    """The moments of a run at which something begins or ends, in order."""
    zero, end = extent(run)
    times = sorted(t - zero for spans, log in run for x in (*spans, *log) for t in (x.start, x.end))
    grain, groups = GRAIN * (end - zero), []
    for t in times:
        if not groups or t - groups[-1][1] > grain:
            groups.append([t, t])
        groups[-1][1] = t
    borders = [(a[0], (a[1] + b[0]) / 2) for a, b in zip(groups, groups[1:], strict=False)]
    found = []
    for time, inside in borders:  # the state in the middle between two groups
        state = Moment(time, *_state(run, zero + inside))
        if not found or replace(state, time=found[-1].time) != found[-1]:
            found.append(state)
    return found


def extent(run) -> tuple[float, float]:
    """When a run begins and ends, in seconds of the ranks' clock."""
    every = [x for spans, log in run for x in (*spans, *log)]
    return min(x.start for x in every), max(x.end for x in every)


def _state(run, now: float) -> tuple:
    here = [[s for s in spans if s.start <= now < s.end] for spans, _ in run]
    work = [max((s for s in mine if s.lane == "work"), key=lambda s: s.start, default=None) for mine in here]
    holds = [tuple(sorted({s.name for s in mine if s.lane == "holds"})) for mine in here]
    sends = [
        (rank, target, f"{e.op.replace('_', '-')} {size_of(size)}".removeprefix("send "))
        for rank, (_, log) in enumerate(run)
        for e in log
        if e.start <= now < e.end
        for target, size in e.targets
    ]
    return tuple(w and (w.name, w.kind) for w in work), tuple(holds), tuple(sends)


def size_of(size: int) -> str:
    """Bytes in a unit that fits."""
    return f"{size} B" if size < 1 << 10 else f"{size / 1024:.3g} KiB"


def strip(run, count: int = 3, every: list[Moment] | None = None) -> Figure:
    """A few moments of a run as pictures one under the other, those at which most is sent among them."""
    every = every or moments(run)
    count, n = min(count, len(every)), len(run)
    parts = [every[len(every) * i // count : len(every) * (i + 1) // count] for i in range(count)]
    chosen = [max(part, key=lambda m: (len(m.sends), sum(w is not None for w in m.work))) for part in parts]
    fig, axes = figure(8, 1.25 * count, rows=count, squeeze=False)
    for ax, moment in zip(axes[:, 0], chosen, strict=True):
        _draw(ax, moment)
        ax.set(xlim=(-0.05, n), ylim=(-0.6, 1.35), title=_title(moment))
        ax.axis("off")
    return fig


def _title(moment: Moment) -> str:
    said = ", ".join(sorted({what for _, _, what in moment.sends})[:3])
    return f"after {moment.time * 1e3:.0f} ms" + (f", arrows: {said}" if said else "")


def _draw(ax, moment: Moment) -> None:
    for rank, (work, holds) in enumerate(zip(moment.work, moment.holds, strict=True)):
        color = COLORS[work[1]] if work else "white"
        rectangle(ax, rank + 0.1, 0, 0.7, 0.5, color, ec=rank_color(rank), lw=2)
        words = f"rank {rank}" + (f": {work[0]}" if work else "")
        text_at(ax, rank + 0.45, 0.25, words, on=color, fontsize=9)
        text_at(ax, rank + 0.45, -0.08, _lines(holds), va="top", fontsize=8)
    for source, target, _ in moment.sends:
        side = 0.24 if target > source else -0.08  # no arrow ends where another one begins
        ends = (source + 0.45 + side, 0.52), (target + 0.45 - side, 0.52)
        near = min(1, len(moment.work) / 4)  # few ranks stand far apart
        height = 0.35 * near / abs(target - source) ** 0.6
        bend = f"arc3,rad={-height if target > source else height:.3f}"
        look = {"arrowstyle": "-|>", "mutation_scale": 9, "color": COLORS["comm"], "connectionstyle": bend}
        ax.add_patch(FancyArrowPatch(*ends, clip_on=False, **look))


def _lines(names) -> str:
    return "\n".join(", ".join(names[i : i + 4]) for i in range(0, min(len(names), 12), 4))
