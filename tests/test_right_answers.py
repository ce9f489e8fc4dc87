"""Right answers in a style of their own pass: numpy's integers, lists for tuples, another order of a path."""

import numpy as np
import pytest
import torch

from gpt2lab.lessons.exercises import (
    context,
    data,
    faults,
    hardware,
    pipeline,
    start,
    tensor,
    trade_off,
    verdict,
    zero,
)
from gpt2lab.lessons.exercises.engine import SEED
from gpt2lab.ranks import comm


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


def with_numpy(rank, p, m):
    """1F1B whose micro-batches are numpy's integers."""
    warm_up = min(m, p - 1 - rank)
    order = [["F", i] for i in np.arange(warm_up)]
    for i in np.arange(m - warm_up):
        order += [["F", warm_up + i], ["B", i]]
    return order + [["B", i] for i in np.arange(m - warm_up, m)]


def test_1f1b_in_integers_of_numpy():
    assert verdict(pipeline.order, with_numpy) == ("PASS", "")


def scaled_first(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """ZeRO-1 whose gradient has the learning rate in it before it is summed."""
    n = len(weights) // ranks
    return all_gather(weights[rank * n :][:n] - reduce_scatter(rate * gradient))


def test_zero_with_the_rate_before_the_sum():
    assert verdict(zero.step, scaled_first) == ("PASS", "")


def test_the_global_mean_in_the_default_type():
    mean = lambda sums, counts: torch.tensor(sums).sum() / torch.tensor(counts).sum()
    assert verdict(start.global_mean, mean) == ("PASS", "")


def attention_by_hand(x, attn, axis):
    """Attention by heads with a softmax of one's own, whose products are counted too."""
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    later = torch.ones(x.size(1), x.size(1)).triu(1) > 0
    y = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


@pytest.mark.live
def test_attention_with_a_softmax_by_hand():
    assert verdict(tensor.attention, attention_by_hand) == ("PASS", "")


RIGHT = {
    pipeline.idle: lambda name, p, f, i, w: (p - 1) * (f + i + w if name == "1f1b" else f + i - w),
    pipeline.bubble: lambda p, m: np.float64(p - 1) / (m + p - 1),
    pipeline.in_flight: lambda rank, p, m: np.minimum(m, p - rank),
    pipeline.slicing: lambda times, p: np.sum(times) + (p - 1) * np.max(times),
    hardware.together: lambda spans: max(end for _, end in spans) - max(start for start, _ in spans),
    hardware.overlap: lambda k, c, s: c + (k - 1) * max(c, s) + s,
    hardware.serial_fraction: lambda S, p: (1 / S - 1 / p) / (1 - 1 / p),
    trade_off.tokens: lambda rate, bandwidth, itemsize: 2 * itemsize / bandwidth / (4 / rate),
    trade_off.unbeaten: lambda points: {
        name
        for name, p in points.items()
        if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values())
    },
    start.traffic: lambda count, each, n: 2 * (n - 1) / n * count * each,
    data.step_bytes: lambda count, n, micro, each: 2 * (n - 1) / n * count * each,
    faults.culprit: lambda waits: max(
        (other for whom in waits.values() for other in whom if not waits[other]), default=None
    ),
    context.smallest_shard: lambda sizes, window: np.all(
        [size >= min(window, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes[:-1])]
    ),
    tensor.qkv: lambda rank, n, heads, width: np.arange(3 * width).reshape(3, n, -1)[:, rank].ravel(),
}


@pytest.mark.parametrize("task", RIGHT, ids=lambda task: getattr(task, "__name__", "") or task.what)
def test_right_answers_pass_whatever_is_drawn(task, monkeypatch):
    for number in range(6):
        monkeypatch.setenv(SEED, str(number))
        assert verdict(task, RIGHT[task]) == ("PASS", "")
