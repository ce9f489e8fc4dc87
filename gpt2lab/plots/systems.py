"""The table of systems as a figure: techniques over systems, grouped by the models that they are best for."""

from itertools import groupby

from matplotlib.figure import Figure

from .style import THINGS, figure

OURS = "gpt2lab"


def systems_table(systems, techniques: dict[str, str], models: dict[str, str]) -> Figure:
    """A mark for every tick: full and blue where a test of ours backs it, grey where a paper does.

    `systems` have `name`, `model` and `ticks`, model by model; `techniques` and `models` give the words of each key.
    """
    fig, ax = figure(13, 0.3 * len(techniques) + 2.1)
    rows = {key: row for row, key in enumerate(techniques)}
    for x, one in enumerate(systems):
        look = {"color": THINGS[4], "s": 90} if one.name == OURS else {"color": THINGS[1], "s": 45}
        ax.scatter([x] * len(one.ticks), [rows[key] for key in one.ticks], zorder=3, **look)
    start = 0
    for i, (model, group) in enumerate(groupby(systems, key=lambda one: one.model)):
        width = len(list(group))
        if i % 2 == 0:
            ax.axvspan(start - 0.5, start + width - 0.5, color="#F2F2F2", zorder=0)
        words = models[model].replace(" ", "\n") if width < 4 else models[model]
        ax.text(start + (width - 1) / 2, -0.75, words, ha="center", va="bottom", weight="bold", fontsize=9)
        start += width
    ax.set_xticks(range(len(systems)), [one.name for one in systems], rotation=45, ha="right", fontsize=8)
    for label, one in zip(ax.get_xticklabels(), systems, strict=True):
        label.set(weight="bold", color=THINGS[4]) if one.name == OURS else None
    ax.set_yticks(range(len(rows)), techniques.values())
    ax.set(xlim=(-0.5, len(systems) - 0.5), ylim=(len(rows) - 0.5, -0.6))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return fig
