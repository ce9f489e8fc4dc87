"""Plans by what they cost: predicted time and memory of those that none beats, and predicted against measured."""

from textwrap import wrap

from matplotlib.figure import Figure

from .forms import bars, cell, equal_where, kinds_of_work, legend_above, name_rows
from .schedule import KINDS
from .style import COLORS, SERIAL, THINGS, figure, plain_log, rank_color, variant


def predicted_and_measured(rows: list[dict]) -> Figure:
    """Every plan's time and memory: predicted across, measured up; the line is where both are equal."""
    fig, axes = figure(8, 4, 1, 2)
    panels = (("seconds", 1, "s a step"), ("bytes", 2**-20, "MiB"))
    for ax, (what, scale, unit) in zip(axes, panels, strict=True):
        value = lambda kind, some, what=what, scale=scale: [scale * row[f"{kind}_{what}"] for row in some]
        for i, world in enumerate(sorted({row["ranks"] for row in rows})):
            mine = [row for row in rows if row["ranks"] == world]
            x, y = value("predicted", mine), value("measured", mine)
            look = {"ms": 4, "alpha": 0.7, "color": variant(i)["color"]}
            ax.plot(x, y, "o", label=f"{world} rank{'s' * (world > 1)}", **look)
        both = value("predicted", rows) + value("measured", rows)
        equal_where(ax, [min(both), max(both)])
        ax.set(xlabel=f"predicted, {unit}", ylabel=f"measured, {unit}")
    axes[0].legend(fontsize=8)
    return fig


ENDS = dict.fromkeys(("dp+cp", "replica", "tie", "world"), "comm") | {"update": "update", "cores": "wait"}
"""What ends a step, as parts of a prediction, and the colour that it has."""


def explored(title: str, choice=None, limit: float = 0, binds: dict | None = None, clock=None) -> Figure:
    """What is feasible, what binds, the chosen plan's mesh and its clock; without a choice the reason alone."""
    if choice is None:
        fig, ax = figure(8, 1.2)
        ax.set_axis_off()
        ax.text(0, 0.5, "\n".join(wrap(title, 92)), va="center")
        return fig
    fig, panels = figure(8, 5.4, 2, 2, width_ratios=[1, 1.5], height_ratios=[1.1, 1])
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    _feasible(panels[0][0], choice, limit)
    _binds(panels[1][0], binds)
    _mesh(panels[0][1], choice.plan)
    _clock(panels[1][1], choice, clock)
    return fig


def _feasible(ax, choice, limit: float) -> None:
    """Memory and time that some plan needs no more of, right of the limit in grey."""
    sizes = [f.prediction.memory / 1e9 for f in choice.front]
    times = [1e3 * f.prediction.seconds for f in choice.front]
    right, top = 1.3 * max(*sizes, choice.prediction.memory / 1e9), 1.15 * max(times)
    edge = [*sizes[::-1], right], [*times[::-1], times[0]]
    ax.fill_between(*edge, top, step="post", alpha=0.25, color=THINGS[4])
    ax.plot(sizes, times, "o", ms=4, color=THINGS[4])
    beyond = limit / 1e9 < right
    if beyond:
        ax.axvspan(limit / 1e9, right, color=THINGS[1], alpha=0.45)
    ax.plot(choice.prediction.memory / 1e9, 1e3 * choice.prediction.seconds, "*", ms=14, color=SERIAL)
    words = "GB a device" + "; grey: more than it has" * beyond
    ax.set(xlabel=words, ylabel="ms a step", xlim=(0, right))
    plain_log(ax.yaxis)
    ax.tick_params(axis="y", labelsize=8)
    ax.set(ylim=(0.7 * min(times), top), title="feasible; dots: unbeaten")


def _binds(ax, binds: dict) -> None:
    """Bars of what each thing would win."""
    colors = [COLORS["comm" if "link" in what else "other"] for what in binds]
    bars(ax, binds.values(), colors, " {:.0f} %", 0.6)
    ax.set(title="what binds", xlabel="% won if twice as good", xlim=(0, 1.25 * max(10, *binds.values())))
    name_rows(ax, binds)


def _mesh(ax, plan) -> None:
    """The ranks as a table: a row and a colour for each stage; groups of the axes inside a stage have gaps between."""
    columns = plan.world // plan.pp
    for rank in range(plan.world):
        stage, column = divmod(rank, columns)
        left = column + 0.3 * (column // plan.tp + column // (plan.tp * plan.cp))
        cell(ax, left, stage, 0.9, 0.9, rank_color(stage), rank if columns <= 32 else "", size=8)
    inside = {"dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
    across = ", ".join(f"{axis}={size}" for axis, size in inside.items() if size > 1)
    ax.set(title=f"the ranks, a row a stage{': ' * bool(across)}{across}")
    ax.set(xlim=(0, max(4, left + 1)), ylim=(max(2, plan.pp) - 0.5, -0.5))
    ax.set_axis_off()


def _clock(ax, choice, clock) -> None:
    """What every stage does when, then what ends the step."""
    parts, whole = choice.prediction.parts, choice.prediction.seconds
    ends = {name: parts[name] for name in ENDS if parts.get(name, 0) > 0}
    scale = 1e3 * (whole - sum(ends.values())) / float(clock.makespan)
    for stage, row in enumerate(clock.rows):
        boxes = [(scale * float(b.start), scale * float(b.end - b.start)) for b in row]
        colors = [COLORS[KINDS[b.op.kind]] for b in row]
        ax.broken_barh(boxes, (stage - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.4)
        left = scale * float(clock.makespan)
        for name, seconds in ends.items():
            ax.barh(stage, 1e3 * seconds, 0.8, left, color=COLORS[ENDS[name]])
            left += 1e3 * seconds
    done = {KINDS[b.op.kind] for row in clock.rows for b in row}
    shown = [kind for kind in ("forward", "backward", "weight") if kind in done]
    keys = kinds_of_work([*shown, *dict.fromkeys(ENDS[name] for name in ends)])
    right = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    legend_above(ax, 5, handles=keys, handlelength=1, columnspacing=1, handletextpad=0.4, **right)
    name_rows(ax, [f"stage {s}" for s in range(len(clock.rows))])
    ax.set(xlabel="ms (predicted)", xlim=(0, 1e3 * whole))
