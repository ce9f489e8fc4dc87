"""Figures of collectives: a sweep over sizes with its fits, and ranks' data as coloured blocks, before and after."""

from itertools import count

from matplotlib.figure import Figure

from ..machine import links
from .forms import cell, lines, text_at
from .style import COLORS, HUES, MARKS, THINGS, figure, ink, rank_color, variant


def sweep_figure(rows, models=()) -> Figure:
    """Time and bus bandwidth over size: a colour per operation, a mark per number of ranks; dashed lines are fits.

    Full marks were fitted, hollow ones were not; the right panel shows how well those are predicted. rows: dicts
    of what, ranks, bytes, seconds, bus. models: dicts of what, ranks, predicted (seconds by bytes), predicted
    over measured.
    """
    fig, ((left, middle), (right, free)) = figure(8, 6.4, 2, 2)
    free.remove()
    names = list(dict.fromkeys(row["what"] for row in rows))
    counts = sorted({row["ranks"] for row in rows})
    fits = {(m["what"], m["ranks"]): m for m in models}
    for i, name in enumerate(names):
        for j, n in enumerate(counts):
            mine = [r for r in rows if r["what"] == name and r["ranks"] == n]
            sizes, times = [r["bytes"] for r in mine], [r["seconds"] * 1e3 for r in mine]
            fit = fits.get((name, n), {"predicted": {}, "predicted over measured": {}})
            unseen = fit["predicted over measured"]
            look = {"color": HUES[i % len(HUES)], "marker": MARKS[j % len(MARKS)], "markersize": 4, "lw": 1}
            seen = [k for k, size in enumerate(sizes) if size not in unseen]
            hollow = [k for k, size in enumerate(sizes) if size in unseen]
            left.plot(sizes, times, label=f"{name}, {n} ranks", markevery=seen, **look)
            left.plot(sizes, times, markevery=hollow, markerfacecolor="white", **look)
            fitted = [1e3 * t for t in fit["predicted"].values()]
            left.plot(list(fit["predicted"]), fitted, "--", color=look["color"], lw=0.8)
            middle.plot(sizes, [r["bus"] / 1e9 for r in mine], **look)
            right.plot(list(unseen), list(unseen.values()), markerfacecolor="white", **look)
    left.set(yscale="log", title="time in ms (measured; dashed: fitted)")
    middle.set(yscale="log", title="bus bandwidth in GB/s (measured)")
    wrong = [max(v, 1 / v) for m in models for v in m["predicted over measured"].values()]
    most = 1.1 * max([2, *wrong])  # as far below one as above it, and nothing cut off
    right.set(yscale="log", ylim=(1 / most, most), title="predicted / measured, sizes not fitted")
    right.set_yticks([0.5, 1, 2], ["half", "equal", "twice"])
    right.minorticks_off()
    right.axhline(1, color="black", lw=0.8)
    for ax in (left, middle, right):
        ax.set(xscale="log", xlabel="bytes")
    fig.legend(*left.get_legend_handles_labels(), loc="center", bbox_to_anchor=(0.78, 0.25), title=" ")
    return fig


def compared_by_formula(ranks: int = 64, latency_us: float = 5, gigabytes_per_s: float = 25) -> Figure:
    """Alpha-beta times of all-reduces over size; at the vertical line, if any, the ring overtakes the tree."""
    link = links.Link(latency_us * 1e-6, gigabytes_per_s * 1e9)
    fig, ax = figure(8, 3.4)
    sizes = [2.0**k for k in range(10, 31)]
    times = {name: [links.all_reduce_time(name, ranks, s, link) for s in sizes] for name in links.ALL_REDUCE}
    lines(ax, sizes, times, map(variant, count()), scale=1e3)
    title = f"all-reduce on {ranks} ranks"
    if crossing := links.crossing(ranks, link):
        ax.axvline(crossing, color=THINGS[1], ls="-.", lw=1.2)
    else:
        title += ": the ring is never slower than the tree"
    ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms", title=title)
    ax.minorticks_off()  # thrice as fast to draw
    ax.legend(fontsize=8, ncols=2)
    return fig


def transports_figure(rows) -> Figure:
    """Time of a call against size over each backend, one panel for each number of ranks; dashed is the slower one.

    rows: dicts of ranks, bytes, call, and seconds by backend.
    """
    counts = sorted({row["ranks"] for row in rows})
    fig, panels = figure(4 * len(counts), 3.8, cols=len(counts), squeeze=False, sharey=True)
    for ax, n in zip(panels[0], counts, strict=True):
        for i, call in enumerate(dict.fromkeys(row["call"] for row in rows)):
            mine = [row for row in rows if (row["ranks"], row["call"]) == (n, call)]
            for backend, look in zip(mine[0]["seconds"], ("o-", "s--"), strict=False):
                points = zip(*((row["bytes"], row["seconds"][backend] * 1e3) for row in mine), strict=True)
                color = variant(i)["color"]
                ax.plot(*points, look, color=color, ms=4, lw=1.2, label=f"{call}, {backend}")
        ax.set(xscale="log", yscale="log", xlabel="bytes")
        ax.set_title(f"{n} ranks: time of a call in ms (measured)")
    panels[0][0].legend(fontsize=8)
    return fig


def blocks(before, after, title: str = "", owners=None, own: str = "") -> Figure:
    """What each rank holds, before and after: a row per rank, a block per number, in the colour of its first owner.

    before, after: a list of sequences, one per rank. owners: the same shape as after, the rank that each block came
    from, or None where it is a sum of several. own: "before" or "after", where a rank has only the block of its place.
    """
    fig, axes = figure(8, 0.7 + 0.45 * len(before), cols=2, grid=False)
    first = [[rank] * len(row) for rank, row in enumerate(before)]
    width = max((len(row) for row in [*before, *after]), default=1)
    for ax, rows, whose, name in ((axes[0], before, first, "before"), (axes[1], after, owners, "after")):
        for rank, row in enumerate(rows):
            for place, value in enumerate(row):
                owner = whose[rank][place] if whose else None
                color = COLORS["wait"] if owner is None else rank_color(owner)
                column = rank if len(row) == 1 and name == own else place
                if name != own or column == rank:
                    cell(ax, column + 0.04, rank + 0.5, 0.92, 0.84, color, edgecolor="white")
                    look = {"fontsize": 9, "color": ink(color, 0.5)}  # black on more colours than elsewhere
                    text_at(ax, column + 0.5, rank + 0.5, f"{value:g}", **look)
        ax.set(xlim=(0, width), ylim=(len(rows), 0), title=f"{title}: {name}" if title else name, xticks=[])
        ax.set_yticks([r + 0.5 for r in range(len(rows))], [f"rank {r}" for r in range(len(rows))])
    return fig
