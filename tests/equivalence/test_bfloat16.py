"""Every composition trains under autocast and in bfloat16, as near to the serial run as 8 bits of mantissa allow.

The tolerances are stated for the whole gradient: the norm of the difference over the norm of the serial gradient.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from context_cases import paired
from planting import under

from gpt2lab import RankFailed
from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS, WITHOUT_FLUSH, Composition
from gpt2lab.emulate import Emulator
from gpt2lab.parallel.context import attention
from gpt2lab.parallel.context.exchanges import EXCHANGES
from gpt2lab.parallel.context.layouts import LAYOUTS
from gpt2lab.parallel.pipeline.stages import homes_of
from gpt2lab.parallel.pipeline.versions import stream_of
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.train import Recipe, Trainer

LOSS, GRADIENT = 5e-3, 4e-2  # relative; rounding to bfloat16 is 4e-3 for each number
STREAM = {"autocast": 2e-3, "bfloat16": 1e-2}  # of a stream's losses, against 64 bits, while weights change
HOW = {"autocast": torch.float32, "bfloat16": torch.bfloat16}


def built(plan, config, how):
    """A model by a plan, with the weights of the example in the numbers of `how`."""
    plan = Plan.parse(plan)
    parallel = build(plan, config, Mesh(**plan.axes), HOW[how])
    parallel.load({n: t.to(HOW[how]) for n, t in example_weights(config).items()})
    return parallel


def gradients(plan, config, how):
    """Loss and whole gradients, by name, of one step in 16 bits."""
    parallel = built(plan, config, how)
    loss, _ = Trainer(parallel, Recipe(autocast=how == "autocast")).gradients(example_batch(config, 8, 11))
    return loss, parallel.gradients()


serial = cache(partial(gradients, "serial"))


def errors(rank, world_size, plan, config, how, right, serial) -> tuple[float, float]:
    """How far loss and gradient are from those of the serial run in the same numbers, relatively."""
    loss, grads = gradients(plan, config, how)
    assert all(g.isfinite().all() for g in grads.values())
    apart = sum((g.double() - serial[n].double()).square().sum() for n, g in grads.items())
    size = sum(serial[n].double().square().sum() for n in grads)
    return abs(loss / right - 1), (apart / size).sqrt().item()


def check(pools, plan, config):
    for how in ("autocast", "bfloat16"):
        for found in pools[Plan.parse(plan).world].run(errors, plan, config, how, *serial(config, how)):
            assert found[0] <= LOSS and found[1] <= GRADIENT, (plan, how, found)


def some(compositions, *numbers):
    """These in every run; the others in `make test-all`."""
    slow = pytest.mark.slow
    return [c if n in numbers else pytest.param(c, marks=slow) for n, c in enumerate(compositions)]


@pytest.mark.parametrize("composition", PAIRS, ids=lambda c: c.plan)
def test_pairs(pools, composition):
    check(pools, composition.plan, composition.config)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", (*TRIPLES, *ALL), ids=lambda c: c.plan)
def test_three_and_four_axes(pools, composition):
    check(pools, composition.plan, composition.config)


def stream_error(rank, world_size, plan, config, how) -> float:
    """How far a stream's losses in 16 bits are from those of the emulator of its staleness, at most, relatively."""
    recipe = Recipe("sgd", lr=0.1, clip=0.5, autocast=how == "autocast")
    parallel = built(plan, config, how)
    plan = parallel.plan
    batches = [example_batch(config, 8, 11, 1 + t) for t in range(2 * plan.pp)]
    found = Trainer(parallel, recipe).stream(batches)
    assert all(t.isfinite().all() for t in parallel.weights().values())
    stream, homes = stream_of(plan, len(batches)), homes_of(config, plan.pp)
    exact = {n: t.to(HOW[how]).double() for n, t in example_weights(config).items()}
    emulator = Emulator(config, exact, stream, homes, replace(recipe, autocast=False))
    right = emulator.run(batches, plan.dp).losses
    return max(abs(r.loss / loss - 1) for r, loss in zip(found, right, strict=True))


@pytest.mark.parametrize("composition", some(WITHOUT_FLUSH, 1, 4), ids=lambda c: c.plan)
def test_without_a_flush(pools, composition):
    for how in STREAM:
        ranks = pools[Plan.parse(composition.plan).world]
        found = ranks.run(stream_error, composition.plan, composition.config, how)
        assert max(found) <= STREAM[how], (how, found)


@pytest.mark.parametrize("composition", some(WITH_EXPERTS, 1, 5), ids=lambda c: f"{c.plan} {c.router}")
def test_experts(pools, composition):
    check(pools, composition.plan, composition.config)


IN_LAYOUTS = paired(EXCHANGES, (11,), (None, 3), tuple(LAYOUTS))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_in_every_layout(pools, exchange):
    for layout, _, _, window in (case for case in IN_LAYOUTS if case[1] == exchange):
        config = replace(Composition("", window).config, n_layer=1)
        check(pools, f"cp=2,exchange={exchange},layout={layout}", config)


def test_mutant_whose_stream_reads_16_bit_copies_of_old_weights_is_noticed(pools):
    bug = Trainer._autocast, "not self.parallel.plan.asynchronous", "True"
    one = WITHOUT_FLUSH[4]
    found = pools[4].run(under(bug, stream_error), one.plan, one.config, "autocast")
    assert min(found) > 2 * STREAM["autocast"]


def test_mutant_that_sums_exponentials_in_16_bits_is_noticed(pools):
    """A log-sum-exp in the type of the queries: torch's kernel refuses it."""
    job = under((attention, "summable", lambda right: lambda x: x), errors)
    config = Composition("").config
    with pytest.raises(RankFailed, match="BFloat16"):
        pools[2].run(job, "cp=2", config, "bfloat16", *serial(config, "bfloat16"))
