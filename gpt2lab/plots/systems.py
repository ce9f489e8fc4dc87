"""The table of systems as a figure: systems by techniques, grouped by the models that they are best for."""

import re
from itertools import groupby

from matplotlib.figure import Figure

from .style import THINGS, figure, paler

OURS = "gpt2lab"


def systems_table(systems, techniques: dict[str, str], models: dict[str, str]) -> Figure:
    """A mark for every tick: full and blue where a test of ours backs it, grey where a paper does.

    `systems` have `name`, `model`, `paper` and `ticks`, model by model; `techniques` and `models` give the words of
    each key. Behind a name stands the first year of its paper.
    """
    fig, ax = figure(8, 0.25 * len(systems) + 1.6)
    columns = {key: x for x, key in enumerate(techniques)}
    for y, one in enumerate(systems):
        look = {"color": THINGS[4], "s": 90} if one.name == OURS else {"color": THINGS[1], "s": 45}
        ax.scatter([columns[key] for key in one.ticks], [y] * len(one.ticks), zorder=3, **look)
    start = 0
    for i, (model, group) in enumerate(groupby(systems, key=lambda one: one.model)):
        height = len(list(group))
        if i % 2 == 0:
            ax.axhspan(start - 0.5, start + height - 0.5, color=paler(THINGS[2], 0.75), zorder=0)
        words = models[model].replace(" ", "\n")
        ax.text(len(columns) - 0.3, start + (height - 1) / 2, words, va="center", weight="bold", fontsize=9)
        start += height
    years = [re.search(r" (\d{4})\b", one.paper) for one in systems]
    names = [f"{one.name}, {year[1]}" if year else one.name for one, year in zip(systems, years, strict=True)]
    ax.set_yticks(range(len(systems)), names, fontsize=8)
    for label, one in zip(ax.get_yticklabels(), systems, strict=True):
        label.set(weight="bold", color=THINGS[4]) if one.name == OURS else None
    ax.set_xticks(range(len(columns)), techniques.values(), rotation=45, ha="left", fontsize=9)
    ax.xaxis.tick_top()
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(systems) - 0.5, -0.5))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return fig
