"""Plans by what they cost: predicted time and memory of those that none beats, and predicted against measured."""

from matplotlib.figure import Figure

from .style import SERIAL, figure, rank_color


def front_figure(choice) -> Figure:
    """Time and memory of the plans that none beats in both, the chosen one marked."""
    fig, ax = figure(7.4, 3.6)
    times = [f.prediction.seconds for f in choice.front]
    sizes = [f.prediction.memory / 2**30 for f in choice.front]
    ax.plot(times, sizes, "o-", color=rank_color(0), drawstyle="steps-post", label="none beats these in both")
    for f, x, y in zip(choice.front, times, sizes, strict=True):
        ax.annotate(str(f.plan), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=6)
    best = choice.prediction
    ax.plot([best.seconds], [best.memory / 2**30], "*", ms=14, color=SERIAL, label=f"chosen: {choice.plan}")
    ax.set(
        xlabel="seconds of a step",
        ylabel="GiB of the fullest rank",
        title="Plans (predicted)",
        ylim=(0, None),
    )
    ax.legend(fontsize=8)
    return fig


def predicted_and_measured(rows: list[dict]) -> Figure:
    """Every plan's time and memory: predicted across, measured up; the line is where both are equal."""
    fig, axes = figure(9, 4, 1, 2)
    for ax, what, scale, unit in zip(
        axes, ("seconds", "bytes"), (1, 2**-20), ("s a step", "MiB"), strict=True
    ):
        for world in sorted({row["ranks"] for row in rows}):
            mine = [row for row in rows if row["ranks"] == world]
            x, y = ([row[f"{kind}_{what}"] * scale for row in mine] for kind in ("predicted", "measured"))
            ax.plot(
                x, y, "o", ms=4, alpha=0.7, color=rank_color(world), label=f"{world} rank{'s' * (world > 1)}"
            )
        ends = [
            f(row[f"{kind}_{what}"] * scale for row in rows for kind in ("predicted", "measured"))
            for f in (min, max)
        ]
        ax.plot(ends, ends, color=SERIAL, lw=1)
        ax.set(xscale="log", yscale="log", xlabel=f"predicted, {unit}", ylabel=f"measured, {unit}")
    axes[0].legend(fontsize=8)
    return fig
