"""The loss curve of a training run."""

from matplotlib.figure import Figure

from .style import SERIAL, THINGS, figure


def loss_curve(log: list[dict]) -> Figure:
    """Training loss of every step and validation loss where it was taken, from a run's log."""
    fig, ax = figure(7, 3.2)
    ax.plot([e["step"] for e in log], [e["loss"] for e in log], color=THINGS[4], lw=1, label="training")
    vals = [e for e in log if "val" in e]
    ax.plot([e["step"] for e in vals], [e["val"] for e in vals], "o-", color=SERIAL, ms=4, label="validation")
    ax.set(xlabel="step", ylabel="loss (nats a token)", title="Loss of this run (measured)")
    ax.legend()
    return fig
