"""What each switch for speed gives."""

from matplotlib.figure import Figure

from .forms import bars, name_rows
from .style import COLORS, figure


def ladder(seconds: dict[str, float]) -> Figure:
    """Bars of the step time of every rung, as ratios to the first."""
    fig, ax = figure(7, 0.5 + 0.38 * len(seconds))
    first = next(iter(seconds.values()))
    names, ratios = list(seconds), [s / first for s in seconds.values()]
    bars(ax, ratios, [COLORS["wait"]] + [COLORS["forward"]] * (len(names) - 1), " {:.2f}", 0.8, size=10)
    name_rows(ax, names)
    ax.set(xlabel=f"step time, {names[0]} = 1", xlim=(0, max(ratios) * 1.12))
    return fig
