"""Figures of ZeRO: who holds what, memory over a step, which weights are where and when."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import forms
from .forms import cell, chart, legend_above, peak, stacked, text_at
from .style import COLORS, HELD, RIGHT, THINGS, WRONG, figure, rank_color, variant

PARTS = {kind: HELD[kind] for kind in ("weights", "gradients", "optimizer")}
STAGES = {0: "replicas", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def bars(
    stages: dict[str, dict[str, float]],
    unit: str,
    live: dict[str, float] | None = None,
    where: str = "on each rank",
) -> Figure:
    """Stacked bars of bytes that a rank holds, by what they are for (HELD); circles mark what live ranks hold."""
    fig, ax = figure(8, 0.9 + 0.42 * len(stages))
    held = {name: {kind: size / UNITS[unit] for kind, size in of.items()} for name, of in stages.items()}
    stacked(ax, held, HELD, height=0.7, says="  {:,.1f} " + unit)
    if live:
        on_ranks = [live[name] / UNITS[unit] for name in stages]
        ax.plot(on_ranks, range(len(stages)), "ko", ms=7, mfc="none", label="on a live rank")
    longest = max(sum(parts.values()) for parts in held.values())
    ax.set(xlabel=f"{unit} {where}", xlim=(0, 1.3 * longest))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # bars may be equally long
    return fig


def who_holds_what(held: dict[int, dict[str, float]], ranks: int) -> Figure:
    """Weights, gradients and optimizer state on every rank, whole or its own slice: `held[stage][kind]` bytes each."""
    fig, axes = figure(8, 2.6, len(STAGES), ranks, sharex=True, sharey=True)
    for stage, row in zip(STAGES, axes, strict=True):
        for rank, ax in enumerate(row):
            for place, (kind, color) in enumerate(PARTS.items()):
                tall, sliced = held[0][kind] ** 0.5, held[stage][kind] < held[0][kind]
                part = (1 - (rank + 1) / ranks, 1 / ranks) if sliced else (0, 1)
                ax.bar(place, tall, 0.8, color="white", edgecolor=COLORS["wait"])
                ax.bar(place, part[1] * tall, 0.8, part[0] * tall, color=color, label=kind)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if stage == 0:
                ax.set_title(f"rank {rank}")
        row[0].set_ylabel(STAGES[stage], rotation=0, ha="right", va="center")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def flat_stretch(sizes: dict[str, int], ranks: int) -> Figure:
    """Parameters of these sizes laid out one after the other and padded, and below them the shard of each rank."""
    fig, ax = figure(8, 1.5, grid=False)
    total, left = sum(sizes.values()), 0
    share = -(-total // ranks)
    for name, size in sizes.items():
        cell(ax, left, 1, size, 0.8, THINGS[2], edgecolor="white")
        text_at(ax, left + size / 2, 1.55, name, fontsize=8)
        left += size
    cell(ax, left, 1, share * ranks - total, 0.8, "white", ec=THINGS[1], hatch="///")
    text_at(ax, (left + share * ranks) / 2, 1.55, "padding", fontsize=8)
    for rank in range(ranks):
        cell(ax, rank * share, 0, share, 0.8, rank_color(rank), f"rank {rank}", size=10, edgecolor="white")
        ax.vlines((rank + 1) * share, -0.4, 1.4, color="black", lw=1, ls=":")
    ax.set_yticks([1, 0], ["parameters", "shards"])
    ax.set(xlim=(0, share * ranks), xticks=range(0, share * ranks + 1, share), xlabel="element")
    return fig


def by_part(models: dict[str, dict[str, dict[str, float]]], room: float) -> Figure:
    """Bytes by part for each model and stage, logits and buffers as one.

    Bars longer than three times `room` GB are cut off.
    """
    fig, axes = figure(8, 1.2 + 0.8 * len(models), len(models), sharex=True)
    end = 3 * room
    for ax, (model, stages) in zip(axes, models.items(), strict=True):
        held = {stage: {k: size / 1e9 for k, size in parts.items()} for stage, parts in stages.items()}
        for y, parts in enumerate(held.values()):
            parts["logits, buffers"] = parts.pop("logits") + parts.pop("buffers")
            total, beyond = sum(parts.values()), sum(parts.values()) > end
            where = {"ha": "right", "color": "white"} if beyond else {"ha": "left"}
            text_at(ax, min(total, end), y, f" {total:,.0f} GB{' →' * beyond} ", fontsize=8, **where)
        stacked(ax, held, HELD | {"logits, buffers": THINGS[0]}, height=0.75)
        ax.axvline(room, color="black", ls="--", lw=1)
        ax.text(room, len(stages) - 0.55, f" a GPU of {room:g} GB", fontsize=8, va="bottom")
        ax.set(title=model, xlim=(0, end), ylim=(len(stages) - 0.5, -0.5))
    axes[-1].set_xlabel("GB on each rank")
    axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, fontsize=8)
    return fig


def memory_over_a_step(curves: dict[str, list[float]], legend: str = "lower right") -> Figure:
    """Memory held over one step: `curves[name]` lists bytes in the order of allocation events."""
    fig, ax = figure(8, 3.2)
    for i, (name, held) in enumerate(curves.items()):
        x, held = [j / max(len(held) - 1, 1) for j in range(len(held))], [h / 1e6 for h in held]
        color = variant(i)["color"]
        ax.plot(x, held, lw=1.2, color=color, label=name, drawstyle="steps-post")
        peak(ax, x, held, color)
    ax.set(xlabel="one step, in allocation events", ylabel="MB", ylim=(0, None))
    ax.legend(loc=legend)
    return fig


def residency(columns: dict, replicas: float) -> Figure:
    """Which part's whole weights are on a rank over the events of a step, and below the bytes of weights it holds.

    `columns[title]` is a `Residency`; `replicas`: the bytes of all weights, a flat line.
    """
    parts = list(next(iter(columns.values())).spans)
    shared = {"sharey": "row", "height_ratios": [len(parts), 6]}
    fig, axes = figure(8, 1.9 + 0.2 * len(parts), 2, len(columns), **shared)
    for column, (title, seen) in enumerate(columns.items()):
        chart, curve = axes[:, column]
        end = len(seen.held) - 1
        for y, part in enumerate(parts):
            if part in seen.owned:
                chart.barh(y, end, 0.75, color=THINGS[2])
            for asked, here, gone in seen.spans[part]:
                coming = {"edgecolor": THINGS[4], "hatch": "/////", "lw": 0}
                cell(chart, asked, y, here - asked, 0.75, "white", **coming)
                cell(chart, here, y, gone - here, 0.75, THINGS[4])
        chart.set(title=title, xticklabels=[], xlim=(0, end))
        chart.set_yticks(range(len(parts)), parts, fontsize=8)
        curve.axhline(replicas / 1e6, color=THINGS[0], lw=1.5)
        held = [h / 1e6 for h in seen.held]
        curve.plot(held, color=THINGS[4], lw=1.2, drawstyle="steps-post")
        peak(curve, range(end + 1), held, THINGS[4])
        curve.set(xlabel="event", xlim=(0, end), ylim=(0, 1.25 * replicas / 1e6))
        for ax in (chart, curve):
            for x in seen.marks.values():
                ax.axvline(x, color="black", lw=1, ls="--")
        for x in seen.marks.values():
            curve.text(x, 0, " backward", fontsize=8, va="bottom")
    axes[0, 0].invert_yaxis()
    axes[1, 0].set_ylabel("MB")
    axes[1, 0].text(1, 1.04 * replicas / 1e6, "replicas", fontsize=8)
    return fig


def lines(runs: dict[str, list[float]], ylabel: str) -> Figure:
    """Several lines over steps."""
    colors = [RIGHT if name == "right" else THINGS[i] for name, i in zip(runs, (4, 3, 0, 1), strict=False)]
    looks = [{"color": color, "ls": ls} for color, ls in zip(colors, ("-", "--", ":", "-"), strict=False)]
    whole = lambda ax: ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    labels = {"xlabel": "step", "ylabel": ylabel}
    return chart(None, runs, looks, (8, 2.8), whole, {"fontsize": 8}, {"lw": 1.8}, **labels)


def beside(groups: dict[str, list[float]], xlabel: str, ylabel: str) -> Figure:
    """Bars of several programs side by side, for every layer or rank: `groups[program][place]`."""
    fig, ax = figure(8, 2.6)
    forms.beside(ax, groups, (RIGHT, WRONG) if "right" in groups else THINGS[::-1])
    ax.set(xlabel=xlabel, ylabel=ylabel, xticks=range(max(map(len, groups.values()))))
    legend_above(ax, 2, fontsize=10)
    return fig


def alive(curves: dict[str, list[int]], replicas: float) -> Figure:
    """Weights that are alive over the operations of a step, in units of a layer, and those of replicas."""
    fig, ax = figure(8, 2.6)
    ax.axhline(replicas, color=THINGS[0], lw=1.5, label="replicas")
    looks = {"color": WRONG, "ls": "-"}, {"color": RIGHT, "ls": "--"}
    forms.lines(ax, None, curves, looks, lw=1.6, drawstyle="steps-post")
    highest = max(replicas, *map(max, curves.values()))
    ax.set(xlabel="operations of a step", ylabel="layers", ylim=(0, 1.35 * highest))
    ax.legend(loc="upper left", ncols=3)
    return fig


def graphs(titles: dict[str, list]) -> Figure:
    """Small graphs from left to right: `titles[title]` lists rows (op, bytes sent, of state, of the value it makes).

    A box is an operation, an arrow a value with its bytes; dark arrows are values that are whole.
    """
    fig, ax = figure(8, 1.5 * len(titles))
    most = max(len(rows) for rows in titles.values())
    whole = max(row.made for rows in titles.values() for row in rows)
    for y, (title, rows) in enumerate(titles.items()):
        ax.text(0, y - 0.48, title, fontsize=10, weight="bold")
        values = [(rows[0].op.input, whole), *((row.op.output, row.made) for row in rows)]
        for x, (value, size) in enumerate(values):
            look = {"arrowstyle": "->", "color": THINGS[0 if size == whole else 1], "lw": 4 * size / whole}
            end = x + (0.66 if x < len(rows) else 0.55)
            ax.annotate("", (end, y), (x - 0.34 * (x > 0), y), arrowprops=look)
            text = f"{value}\n{size / 1e3:.1f} kB".replace("of the ", "of the\n")
            text_at(ax, x + 0.16, y + 0.1, text, va="top", fontsize=8)
        for x, row in enumerate(rows, 1):
            cost = f"sends {row.sent / 1e3:.1f}" if row.sent else f"moments {row.state / 1e3:.1f}"
            color = COLORS["comm" if row.sent else "update"]
            plate = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "none"}
            text_at(ax, x - 0.34, y, f"{row.op.kind}\n{cost} kB", on=color, fontsize=8, bbox=plate)
    ax.set(xlim=(-0.1, most + 0.7), ylim=(len(titles) - 0.4, -0.65))
    ax.set_axis_off()
    return fig
