"""The trade-off map: bytes held against bytes sent, messages, and operations done twice, for every strategy."""

import re

from matplotlib.figure import Figure

from .forms import legend_above, name_rows, stacked
from .style import MARKS, SERIAL, THINGS, WAYS, figure


def trade_off_map(lines: dict[str, list[tuple[int, object]]], serial, mark: int = 0, frame=None) -> Figure:
    """Left a line for each strategy over growing numbers of ranks, the last one largest; right messages and repeats.

    A family has a colour, a strategy of it a marker, on the right too.
    `lines[strategy]` are (ranks, point) with `held`, `sent`, `messages`, `flops`; `serial` is the point of one rank;
    points of `mark` ranks are larger. `frame` are the ends of both axes, for maps to compare.
    """
    fig, (ax, right) = figure(8, 4.6, 1, 2, width_ratios=(3, 1))
    unit, name = (1e9, "GB") if serial.held > 1e9 else (1e6, "MB")
    ax.axhline(serial.held / unit, color=SERIAL, lw=1, ls="--")
    place = {"va": "bottom", "fontsize": 8, "transform": ax.get_yaxis_transform()}
    ax.text(0.01, serial.held / unit, "one rank alone", **place)
    families = [re.split(r"\W", name)[0] for name in lines]
    for i, (family, line) in enumerate(zip(families, lines.values(), strict=True)):
        color, x = WAYS[family], [p.sent / unit for _, p in line]
        marker = MARKS[families[:i].count(family)]
        y = [p.held / unit for _, p in line]
        ax.plot(x, y, color=color, lw=1, alpha=0.7)
        sizes = [30 + 70 * (n == mark) for n, _ in line]
        ax.scatter(x, y, s=sizes, marker=marker, color=color, zorder=3, label=family * (marker == MARKS[0]))
        ranks, last = next(((n, p) for n, p in line if n == mark), line[-1])
        twice = f"  +{100 * (last.flops - 1):.0f} % work" if last.flops > 1.001 else ""
        # no bar: a log axis has no zero for it to begin at
        right.plot(last.messages, i, marker, color=color, ms=9)
        words, beside = f"{last.messages:,}{twice}", right.get_yaxis_transform()
        right.text(1.05, i, words, va="center", fontsize=8, transform=beside)
    ax.set(xscale="log", yscale="log", ylabel=f"{name} held by a rank")
    ax.set_xlabel(f"{name} sent by a rank in a step")
    legend_above(ax, len(WAYS), scatterpoints=1, columnspacing=0.8, handletextpad=0)
    if frame:
        ax.set(xlim=frame[0], ylim=frame[1])
    name_rows(right, lines, fontsize=8)
    right.set(xscale="log", xlabel=f"messages of a rank\nin a step, {ranks} ranks")
    counts = [p.messages for line in lines.values() for _, p in line]
    right.set_xlim(min(counts) / 2, max(counts) * 2)
    ax.minorticks_off(), right.minorticks_off()
    return fig


def envelopes(shapes, chosen) -> Figure:
    """Bars of what each shape of the mesh costs besides computing, by kind; the chosen (pp, dp, tp) is in bold."""
    fig, ax = figure(8, 0.8 + 0.34 * len(shapes))
    kinds = {"gradients not hidden": WAYS["data"], "tensor sums": WAYS["tensor"]}
    kinds |= {"bubble": WAYS["pipeline"], "launches": THINGS[2]}
    percent = {}
    for s in shapes:
        parts = (s.exposed, s.tensor, s.bubble, s.launches)
        percent[f"pp={s.pp}, dp={s.dp}, tp={s.tp}"] = {k: 100 * p for k, p in zip(kinds, parts, strict=True)}
    stacked(ax, percent, kinds, 0.7, " {:.0f} %")
    for label, shape in zip(ax.get_yticklabels(), shapes, strict=True):
        label.set_weight("bold" if (shape.pp, shape.dp, shape.tp) == chosen else "normal")
    ax.set(xlabel="percent of the computing time")
    ax.margins(x=0.12)
    fig.legend(loc="outside right center", fontsize=9)
    return fig
