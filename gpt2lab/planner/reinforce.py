"""Learning where to place operators: REINFORCE with a baseline (Williams 1992; Mirhoseini et al. 2017).

The policy is a table of logits, one row an operator and one column a device. A placement is drawn from it, timed on the
simulator, and the draws of placements better than the baseline become more likely.
"""

from dataclasses import dataclass

import numpy as np

from ..machine.arguments import checked
from ..machine.patience import patiently
from .placement import Placed


@dataclass(frozen=True)
class Learned:
    """The best placement that was drawn, and each round's mean and best cost in seconds, penalties included."""

    best: Placed
    means: tuple[float, ...]
    bests: tuple[float, ...]


@checked(rounds=(1, 100_000), batch=(1, 100_000), seed=0, rate=0, keep=(0, 1))
def reinforce(
    problem, seed: int = 0, rounds: int = 100, batch: int = 16, rate: float = 3.0, keep: float = 0.9
) -> Learned:
    """Learn a placement in `rounds` of `batch` draws.

    The reward is minus the cost over that of one device; the baseline is its moving average (`keep` of the old one).
    A placement that exceeds a memory is never the best, it only costs its penalty.
    """
    rng, devices = np.random.default_rng(seed), problem.cluster.devices
    logits = np.zeros((len(problem.graph), devices))
    scale, baseline = sum(problem.times), None
    best, seconds, means, bests = None, float("inf"), [], []
    for _ in patiently(range(rounds), "rounds of learning"):
        chances = _softmax(logits)
        draws = (rng.random((batch, len(logits), 1)) > chances.cumsum(1)[:, :-1]).sum(-1)
        costs = [problem.cost(draw) for draw in draws.tolist()]
        for draw, cost in zip(draws.tolist(), costs, strict=True):
            if cost < seconds and problem.fits(draw):
                best, seconds = tuple(draw), cost
        rewards = -np.array(costs) / scale
        baseline = rewards.mean() if baseline is None else keep * baseline + (1 - keep) * rewards.mean()
        chosen = np.eye(devices)[draws]
        logits += rate * ((rewards - baseline)[:, None, None] * (chosen - chances)).mean(0) * len(logits)
        means.append(float(np.mean(costs)))
        bests.append(seconds)
    if best is None:
        raise ValueError(f"None of {rounds * batch} placements drawn fits. Use more rounds, or more memory.")
    return Learned(Placed(best, seconds, rounds * batch), tuple(means), tuple(bests))


def _softmax(logits):
    grown = np.exp(logits - logits.max(1, keepdims=True))
    return grown / grown.sum(1, keepdims=True)
