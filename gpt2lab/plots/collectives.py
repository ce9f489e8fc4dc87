"""Figures of collectives: a sweep over sizes with its fits, and ranks' data as coloured blocks, before and after."""

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import figure, rank_color

MARKS = "osv^DPX*"


def sweep_figure(rows, models=(), clock: str = "measured") -> Figure:
    """Time and bus bandwidth against size, one colour an operation, full for the fewest ranks, dashed lines the fits.

    rows: dicts of what, ranks, bytes, seconds, bus. models: dicts of what, ranks, predicted (seconds by bytes).
    """
    fig, (left, right) = figure(10, 4, cols=2)
    names = list(dict.fromkeys(row["what"] for row in rows))
    counts = sorted({row["ranks"] for row in rows})
    for i, name in enumerate(names):
        for j, n in enumerate(counts):
            mine = [r for r in rows if r["what"] == name and r["ranks"] == n]
            look = {"color": rank_color(i), "marker": MARKS[j % len(MARKS)], "markersize": 4, "lw": 1}
            label = f"{name}, {n} ranks"
            left.plot([r["bytes"] for r in mine], [r["seconds"] * 1e3 for r in mine], label=label, **look)
            right.plot([r["bytes"] for r in mine], [r["bus"] / 1e9 for r in mine], **look)
            for m in models:
                if (m["what"], m["ranks"]) == (name, n):
                    times = [seconds * 1e3 for seconds in m["predicted"].values()]
                    left.plot(list(m["predicted"]), times, "--", color=rank_color(i), lw=0.8)
    for ax, title in (
        (left, f"time in ms ({clock}; dashed: fitted)"),
        (right, f"bus bandwidth in GB/s ({clock})"),
    ):
        ax.set(xscale="log", yscale="log", xlabel="bytes", title=title)
    left.legend(fontsize=6, ncols=2)
    return fig


def transports_figure(rows) -> Figure:
    """Time of a call against size over each backend, one panel for each number of ranks; dashed is the slower one.

    rows: dicts of ranks, bytes, call, and seconds by backend.
    """
    counts = sorted({row["ranks"] for row in rows})
    fig, panels = figure(4.6 * len(counts), 3.8, cols=len(counts), squeeze=False, sharey=True)
    for ax, n in zip(panels[0], counts, strict=True):
        for i, call in enumerate(dict.fromkeys(row["call"] for row in rows)):
            mine = [row for row in rows if (row["ranks"], row["call"]) == (n, call)]
            for backend, look in zip(mine[0]["seconds"], ("o-", "s--"), strict=False):
                times = [row["seconds"][backend] * 1e3 for row in mine]
                label = f"{call}, {backend}" if n == counts[0] else None
                ax.plot(
                    [row["bytes"] for row in mine],
                    times,
                    look,
                    color=rank_color(i),
                    ms=4,
                    lw=1.2,
                    label=label,
                )
        ax.set(
            xscale="log", yscale="log", xlabel="bytes", title=f"{n} ranks: time of a call in ms (measured)"
        )
    panels[0][0].legend(fontsize=7)
    return fig


def blocks(before, after, title: str = "", owners=None) -> Figure:
    """What each rank holds, before and after: one row a rank, one block a number, coloured by whose it was.

    before, after: a list of sequences, one a rank. owners: the same shape as after, the rank each block came from,
    or None where it is a sum of several.
    """
    fig, axes = figure(9, 0.7 + 0.45 * len(before), cols=2)
    first = [[rank] * len(row) for rank, row in enumerate(before)]
    width = max((len(row) for row in [*before, *after]), default=1)
    for ax, rows, whose, name in ((axes[0], before, first, "before"), (axes[1], after, owners, "after")):
        for rank, row in enumerate(rows):
            for place, value in enumerate(row):
                owner = whose[rank][place] if whose else None
                _block(ax, place, rank, f"{value:g}", owner)
        ax.set(xlim=(0, width), ylim=(len(rows), 0), title=f"{title}: {name}" if title else name)
        ax.set_yticks([r + 0.5 for r in range(len(rows))], [f"rank {r}" for r in range(len(rows))])
        ax.set_xticks([])
        ax.grid(visible=False)
    return fig


def _block(ax, x: int, y: int, text: str, owner: int | None) -> None:
    color = "#DDDDDD" if owner is None else rank_color(owner)
    ax.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=color, edgecolor="white"))
    bright = sum(weight * part for weight, part in zip((0.3, 0.59, 0.11), to_rgb(color), strict=True))
    ink = "black" if bright > 0.5 else "white"
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, fontsize=9)
