"""Operators on the ranks where they are placed, and stages cut by hand: live, equal to the serial block and run."""

import random

import pytest
import torch
from planting import under

from gpt2lab.lessons.labs import placement as lab
from gpt2lab.model import GPT2Config
from gpt2lab.planner.balance import every_cut
from gpt2lab.planner.problem import gpt2_block

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
X = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def error_and_bytes(pool, where, groups, parallel):
    found = pool.run(lab.run_placed, where, CONFIG, X, groups, parallel)
    return lab.furthest(found, lab.run_serially(CONFIG, X, parallel)), [f[3] for f in found]


@pytest.mark.parametrize("groups, parallel", [(1, False), (1, True), (2, False), (4, True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_placed_block_equals_the_serial_one_and_sends_what_is_predicted(pools, groups, parallel, seed):
    graph = gpt2_block(CONFIG, 3, 7, groups, parallel, itemsize=8)
    draw = random.Random(seed)
    where = [draw.randrange(3) for _ in range(len(graph) - 1)] + [2]
    error, sent = error_and_bytes(pools[3], where, groups, parallel)
    assert error < 1e-12 and sent == lab.bytes_of_placement(graph, where)


def test_a_branch_with_the_weights_of_another_is_noticed(pools):
    k_has_those_of_q = lambda right: lambda *given: right(*given) | {"k": right(*given)["q"]}
    where = [0, 0, 0, 1, 2, 0, 0, 0, 1, 2, 1, 0]
    assert error_and_bytes(pools[3], where, 1, False)[0] < 1e-12
    found = pools[3].run(under((lab, "block_functions", k_has_those_of_q), lab.run_placed), where, CONFIG, X)
    assert lab.furthest(found, lab.run_serially(CONFIG, X)) > 1e-3


def test_every_cut_of_the_layers_trains_the_same(pools):
    cuts = [lab.blocks_of(bounds) for bounds in every_cut(CONFIG.n_layer + 2, 2)]
    assert cuts == [[range(0, n), range(n, 3)] for n in (0, 1, 2, 3)]
    found = pools[2].run(lab.steps_with_cuts, cuts, CONFIG, 4, 8, 2)
    losses = [loss for _, all_losses in found for loss in all_losses]
    assert max(losses) - min(losses) < 1e-5 and len(losses) == 8


def test_a_device_is_fitted_to_measured_products():
    device, found = lab.measured_device((16, 64, 256), seconds=0.01)
    assert device.rate > 0 and device.launch >= 0 and all(seconds > 0 for seconds in found.values())


def test_layer_times_name_every_layer():
    found = lab.layer_times(CONFIG, 2, 8, repeat=1)
    assert len(found) == CONFIG.n_layer + 2 and all(f > 0 and b > 0 for f, b in found)
