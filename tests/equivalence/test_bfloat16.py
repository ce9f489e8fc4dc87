"""Every composition trains under autocast and in bfloat16, as near to the serial run as 8 bits of mantissa allow.

The tolerances are stated for the whole gradient: the norm of the difference over the norm of the serial gradient.
"""

from dataclasses import replace

import pytest
import torch
from planting import planted, rewritten

from gpt2lab import kept
from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS, WITHOUT_FLUSH, Composition
from gpt2lab.emulate import Emulator
from gpt2lab.parallel.context import attention
from gpt2lab.parallel.context.exchanges import EXCHANGES
from gpt2lab.parallel.context.layouts import LAYOUTS
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.schedules.asynchronous import make_stream
from gpt2lab.schedules.registry import find
from gpt2lab.train import Recipe, Trainer

LOSS, GRADIENT = 5e-3, 4e-2  # relative; rounding to bfloat16 is 4e-3 for each number
STREAM = {
    "autocast": 2e-3,
    "bfloat16": 1e-2,
}  # of losses without a flush, against 64 bits, while weights change
HOW = {"autocast": torch.float32, "bfloat16": torch.bfloat16}


def gradients(rank, world_size, plan, config, how):
    """Loss and whole gradients, by name, of one step in 16 bits."""
    plan = Plan.parse(plan)
    mesh = Mesh(**plan.axes) if plan.world > 1 else Mesh(alone=True)
    parallel = build(plan, config, mesh, HOW[how])
    parallel.load({n: t.to(HOW[how]) for n, t in example_weights(config).items()})
    loss, _ = Trainer(parallel, Recipe(autocast=how == "autocast")).gradients(example_batch(config, 8, 11))
    return loss, parallel.gradients()


def errors(rank, world_size, plan, config, how) -> tuple[float, float]:
    """How far loss and gradient are from those of the serial run in the same numbers, relatively."""
    loss, grads = gradients(rank, world_size, plan, config, how)
    if (config, how) not in kept:  # once a rank, as long as it lives
        kept[config, how] = gradients(rank, world_size, "serial", config, how)
    right, serial = kept[config, how]
    assert all(g.isfinite().all() for g in grads.values())
    apart = sum((g.double() - serial[n].double()).square().sum() for n, g in grads.items())
    size = sum(serial[n].double().square().sum() for n in grads)
    return abs(loss / right - 1), (apart / size).sqrt().item()


def check(pools, plan, config):
    for how in ("autocast", "bfloat16"):
        for found in pools[Plan.parse(plan).world].run(errors, plan, config, how):
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
    plan = Plan.parse(plan)
    mesh, start = Mesh(**plan.axes), {n: t.to(HOW[how]) for n, t in example_weights(config).items()}
    batches = [example_batch(config, 8, 11, 1 + t) for t in range(2 * plan.pp)]
    parallel = build(plan, config, mesh, HOW[how])
    parallel.load(start)
    found = Trainer(parallel, Recipe("sgd", lr=0.1, clip=0.5, autocast=how == "autocast")).stream(batches)
    assert all(t.isfinite().all() for t in parallel.weights().values())
    held = comm.gather_objects((mesh["pp"].rank, list(parallel.specs)), mesh.world)
    homes = {name: stage for stage, names in sorted(held, reverse=True) for name in names}
    stream = make_stream(find(plan.schedule).name, plan.pp, len(batches), plan.micro, plan.active or None)
    exact = {n: t.double() for n, t in start.items()}
    right = (
        Emulator(config, exact, stream, homes, Recipe("sgd", lr=0.1, clip=0.5)).run(batches, plan.dp).losses
    )
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


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_in_every_layout(pools, exchange):
    for layout in LAYOUTS:
        for window in (None, 3):
            plan = f"cp=2,exchange={exchange},layout={layout}"
            config = replace(Composition(plan, window).config, n_layer=1)
            try:
                Plan.parse(plan).check(config, 8, 11)
            except ValueError:
                continue
            check(pools, plan, config)


def test_mutant_whose_stream_reads_16_bit_copies_of_old_weights_is_noticed(pools):
    def with_bug(rank, world_size, one):
        with rewritten(Trainer._autocast, "not self.parallel.plan.asynchronous", "True"):
            return stream_error(rank, world_size, one.plan, one.config, "autocast")

    assert min(pools[4].run(with_bug, WITHOUT_FLUSH[4])) > 2 * STREAM["autocast"]


def test_mutant_that_sums_exponentials_in_16_bits_is_noticed(pools):
    """A log-sum-exp in the type of the queries: torch's kernel refuses it, or the error is seen."""

    def with_bug(rank, world_size):
        with planted(attention, "summable", lambda right: lambda x: x):
            try:
                return errors(rank, world_size, "cp=2", Composition("").config, "bfloat16")[1]
            except RuntimeError as error:
                return str(error)

    assert all("BFloat16" in found for found in pools[2].run(with_bug))
