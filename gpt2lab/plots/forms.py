"""The forms of which all figures are made, each written once: rows, bars, lines, boxes, maps of numbers, graphs.

A form draws into axes (`ax`) what it is given; what a figure means, its colours and its labels, stays with the figure.
"""

from itertools import cycle

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from .style import COLORS, SERIAL, figure, ink, plain_log


def text_at(ax, x: float, y: float, text, on=None, **look):
    """Write a text with its middle at (x, y), in black or in white, whichever can be read on the colour `on`."""
    color = {} if on is None else {"color": ink(on)}
    return ax.text(x, y, text, **{"ha": "center", "va": "center"} | color | look)


# ---- axes and keys


def name_rows(ax, names, **look) -> None:
    """Name the rows 0, 1, 2 ... of a figure, the first on top, without lines along them."""
    ax.set_yticks(range(len(names)), list(names), **look)
    ax.yaxis.set_inverted(True)
    ax.grid(visible=False, axis="y")


def name_columns(ax, names, **look) -> None:
    """Name the columns 0, 1, 2 ... of a figure."""
    ax.set_xticks(range(len(names)), list(names), **look)


def numbers(axis, values, texts=None) -> None:
    """Mark an axis, mostly a logarithmic one, with these numbers and nothing between them."""
    axis.set_ticks(list(values), labels=list(map(str, texts or values)))
    axis.set_minor_locator(NullLocator())


def legend_above(ax, count: int = 1, **look) -> None:
    """A legend on top of the axes, at the left, in `count` columns."""
    ax.legend(**{"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": count, "fontsize": 8} | look)


def legend_right(ax, **look) -> None:
    """A legend right of the axes, which hides no line."""
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), **look)


def look_of(own) -> dict:
    """A look as matplotlib's keywords; it may be given as a colour alone."""
    return own if isinstance(own, dict) else {"color": own}


def patches(looks: dict) -> list[Patch]:
    """What a legend shows for {what: colour, or look}."""
    return [Patch(label=what, **look_of(own)) for what, own in looks.items()]


def kinds_of_work(kinds) -> list[Patch]:
    """What a legend shows for these kinds of work, in this order."""
    return patches({"weight gradient" if kind == "weight" else kind: COLORS[kind] for kind in kinds})


# ---- lines and points


def lines(ax, x, curves: dict, looks, scale: float = 1, **shared) -> None:
    """A line for each of `curves`, {name: values}, times `scale`, over x (None: 0, 1, 2 ...); `looks` come in turn.

    A look is a colour or a dict; `shared` is what all lines have.
    """
    for (name, values), own in zip(curves.items(), cycle(looks), strict=False):
        places = range(len(values)) if x is None else x
        ax.plot(places, [scale * v for v in values], label=name, **shared | look_of(own))


def chart(
    x, curves, looks, size=(8, 3), also=None, legend=None, shared=None, scale: float = 1, **axes
) -> Figure:
    """A figure with a line for each of `curves`, as `lines` draws them; its axes get the labels and scales `axes`.

    `also(ax)` draws what else there is; `legend`, as matplotlib takes it, may lie outside the axes.
    """
    fig, ax = figure(*size)
    lines(ax, x, curves, looks, scale, **shared or {})
    ax.set(**axes)
    if also:
        also(ax)
    legend = legend or {}
    (fig if "outside" in legend.get("loc", "") else ax).legend(**legend)
    return fig


def band(ax, x, runs, color, scale: float = 1, alpha: float = 0.2, **look) -> None:
    """The mean of several runs over x as a line, and from the least to the most as a band."""
    values = scale * np.array(runs)
    ax.plot(x, values.mean(0), color=color, **look)
    ax.fill_between(x, values.min(0), values.max(0), color=color, alpha=alpha, linewidth=0)


def peak(ax, x, values, color, **look) -> None:
    """Mark the first of the highest of these values."""
    top = max(range(len(values)), key=values.__getitem__)
    ax.plot(x[top], values[top], "v", color=color, **look)


def equal_where(ax, ends, **look) -> None:
    """The line on which predicted and seen are equal, on logarithmic axes with plain numbers."""
    ax.plot(ends, ends, color=SERIAL, linewidth=1, **look)
    plain_log(ax.xaxis), plain_log(ax.yaxis)


# ---- bars


def bars(
    ax, values, color, says: str = " {:.3g}", height: float = 0.7, size: float = 9, at=None, **look
) -> None:
    """A horizontal bar for each value, in rows 0, 1, 2 ... or `at`, with its number at the end as `says` has it."""
    places, values = range(len(values)) if at is None else at, list(values)
    ax.barh(places, values, height, color=color, **look)
    for place, value in zip(places, values, strict=True):
        ax.text(max(value, 0), place, says.format(value), va="center", fontsize=size)


def stacked(
    ax, named: dict[str, dict], looks: dict, height: float = 0.8, says: str = "", inside: float = 0, **look
) -> None:
    """A row for each of `named`, {row: {part: amount}}, its parts one after the other, their sum at the end.

    `looks[part]` is a colour or a look; `says` is the format of the sum. Parts longer than the share `inside` of the
    longest row carry their own number. Raises ValueError for a part without a look.
    """
    longest, shown = max(sum(parts.values()) for parts in named.values()), set()
    for row, (name, parts) in enumerate(named.items()):
        if strange := parts.keys() - looks.keys():
            raise ValueError(f"{name!r} has {sorted(strange)}, but there are looks for {list(looks)} only.")
        left = 0.0
        for part in (part for part in looks if part in parts):
            amount, own = parts[part], look | look_of(looks[part])
            ax.barh(row, amount, height, left, label=None if part in shown else part, **own)
            shown.add(part)
            if inside and amount > inside * longest:
                text_at(ax, left + amount / 2, row, f"{amount:.0f}", on=own["color"])
            left += amount
        if says:
            ax.text(left, row, says.format(left), va="center", fontsize=9)
    name_rows(ax, named)


def beside(ax, groups: dict[str, list], colors, fill: float = 1.0) -> None:
    """Vertical bars of several things side by side: `groups[thing][place]`; `fill`: the share of its room of a bar."""
    width = 0.8 / len(groups)
    for i, ((name, values), color) in enumerate(zip(groups.items(), cycle(colors), strict=False)):
        places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(values))]
        ax.bar(places, values, width * fill, color=color, label=name)


# ---- boxes: in time, in a table, in a drawing


def cell(ax, left, row, width, height, color, text="", size: float = 9, **look) -> None:
    """A box that begins at `left`, with its middle in `row`, and a text inside that can be read on its colour."""
    ax.barh(row, width, height, left, color=color, **look)
    if text != "":
        text_at(ax, left + width / 2, row, text, on=color, fontsize=size)


def rectangle(ax, left, bottom, width, height, color, **look) -> None:
    """A rectangle of a drawing, white at its edges; the limits of the axes stay as they are."""
    ax.add_patch(Rectangle((left, bottom), width, height, **{"fc": color, "ec": "white"} | look))


# ---- maps of numbers


def heat(ax, values, says=None, label: str = "", ticks=None, size=None, shrink=1, **look):
    """A coloured square for each of `values` (rows, columns), with its number as `says` has it; none where it is NaN.

    `label` and `ticks` are those of the bar of colours, `look` is what `Axes.imshow` takes.
    """
    image = ax.imshow(values, **look)
    left, right, bottom, top = image.get_extent()
    height, width = np.shape(values)
    for (row, column), value in np.ndenumerate(np.asarray(values)):
        if says and value == value:
            x, y = left + (column + 0.5) * (right - left) / width, top + (row + 0.5) * (bottom - top) / height
            text_at(ax, x, y, says.format(value), on=image.cmap(image.norm(value)), fontsize=size)
    ax.grid(visible=False)
    ax.figure.colorbar(image, ax=ax, label=label, ticks=ticks, shrink=shrink)
