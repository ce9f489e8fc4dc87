"""Loss curves: of one run, or of several on top of each other with how far they are from the first one."""

from matplotlib.figure import Figure

from .style import SERIAL, THINGS, figure, variant


def curves(runs: dict[str, list[float]], floor: float = 1e-17) -> Figure:
    """Left the losses of all runs by step, right the distance of each run from the first, on a log scale.

    The first run, the serial one, is black and thick. A distance of exactly zero is drawn at `floor`.
    """
    fig, (losses, apart) = figure(8, 3.0, 1, 2)
    (reference, expected), *others = runs.items()
    losses.plot(expected, color=SERIAL, lw=5, alpha=0.35, label=reference)
    for i, (name, run) in enumerate(others):
        color = variant(i)["color"]
        losses.plot(run, "--", color=color, lw=1.8, label=name)
        distance = [max(abs(a - b), floor) for a, b in zip(run, expected, strict=True)]
        apart.plot(distance, "o-", ms=3, color=color, label=name)
    losses.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    top = max(10, 2 * apart.dataLim.y1)
    apart.set(xlabel="step", yscale="log", ylim=(floor / 3, top), title=f"Distance from {reference}")
    if any(floor in line.get_ydata() for line in apart.lines):
        apart.set(ylabel=f"nats (equal: drawn at {floor:g})")
    losses.legend()
    return fig


def loss_curve(log: list[dict]) -> Figure:
    """Training loss of every step and validation loss where it was taken, from a run's log."""
    fig, ax = figure(7, 3.2)
    ax.plot([e["step"] for e in log], [e["loss"] for e in log], color=THINGS[4], lw=1, label="training")
    vals = [e for e in log if "val" in e]
    ax.plot([e["step"] for e in vals], [e["val"] for e in vals], "o-", color=SERIAL, ms=4, label="validation")
    ax.set(xlabel="step", ylabel="loss (nats a token)", title="Loss of this run (measured)")
    ax.legend()
    return fig
