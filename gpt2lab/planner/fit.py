"""Fit latency and bandwidth to measured times, and say how sure the fit is.

time = messages * alpha + bytes * beta, by least squares of *relative* errors, so that 4 KB counts as much as 16 MB.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..machine.arguments import checked
from ..machine.links import Link


@checked(latency=0, bandwidth=(0, math.inf))
@dataclass(frozen=True)
class Fit:
    """A fitted link with 95 % intervals."""

    link: Link
    latency: tuple[float, float]
    bandwidth: tuple[float, float]
    r2: float

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Which of latency and bandwidth the samples do not determine: its cost may be zero."""
        open_ends = {"latency": self.latency[0] <= 0, "bandwidth": math.isinf(self.bandwidth[1])}
        return tuple(name for name, is_open in open_ends.items() if is_open)

    def __str__(self) -> str:
        low, high = (x * 1e6 for x in self.latency)
        latency = f"latency {self.link.latency * 1e6:.0f} us (95 %: {low:.0f} to {high:.0f})"
        if "latency" in self.undetermined:
            latency = f"latency undetermined (95 %: below {high:.0f} us)"
        low, high = (x / 1e9 for x in self.bandwidth)
        bandwidth = f"bandwidth {self.link.bandwidth / 1e9:.2f} GB/s (95 %: {low:.2f} to {high:.2f})"
        if "bandwidth" in self.undetermined:
            bandwidth = f"bandwidth undetermined (95 %: above {low:.2f} GB/s)"
        return f"{latency}, {bandwidth}, r2 {self.r2:.3f}"


@checked(samples=0)
def fit(samples: Sequence[tuple[float, float, float]]) -> Fit:
    """Fit (messages, bytes, seconds) samples. Raises ValueError for fewer than three, or for sizes all equal."""
    from scipy.special import stdtrit

    table = np.asarray(samples, dtype=float)
    if len(table) < 3:
        raise ValueError(
            f"A line through {len(table)} points does not show its error. Measure three sizes or more."
        )
    x = table[:, :2] / table[:, 2:]  # divided by the time: each row must then give 1
    if np.linalg.matrix_rank(x) < 2:
        raise ValueError("All samples have the same bytes per message. Measure different sizes.")
    normal = np.linalg.inv(x.T @ x)
    alpha, beta = normal @ x.T @ np.ones(len(x))
    errors = 1 - x @ (alpha, beta)
    freedom = len(x) - 2
    variance = float(errors @ errors) / freedom
    # the 97.5 % point of Student's t widens an interval from few samples
    wide = float(stdtrit(freedom, 0.975)) * np.sqrt(variance * np.diag(normal))
    beta = max(beta, 1e-15)
    fastest = math.inf if beta <= wide[1] else 1 / (beta - wide[1])
    predicted = table[:, :2] @ (alpha, beta)
    residual = np.sum((table[:, 2] - predicted) ** 2)
    total = np.sum((table[:, 2] - table[:, 2].mean()) ** 2)
    return Fit(
        Link(max(float(alpha), 0.0), 1 / float(beta)),
        (max(0.0, float(alpha - wide[0])), max(0.0, float(alpha + wide[0]))),
        (1 / float(beta + wide[1]), float(fastest)),
        float(1 - residual / total),
    )
