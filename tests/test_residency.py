"""Whole weights are on a rank only while needed: one layer beside what it owns, counted by memory, not by name."""

import pytest
import torch
from planting import planted
from trained import TINY, run

from gpt2lab.lessons.labs import residency
from gpt2lab.machine import memory
from gpt2lab.model import GPT2
from gpt2lab.parallel.zero import flat, stages
from gpt2lab.parallel.zero.costs import owner_of, parts, shard_length
from gpt2lab.plots import zero as plots

SIZES = parts(GPT2(TINY))
BLOCK = SIZES["h.0"]


def without_prefetch(trainer, batch):
    trainer.parallel.sync.prefetch = False
    return residency.of_a_step(trainer, batch)


def own(world: int, rank: int, wanted=lambda part: True) -> int:
    """Elements of the parts that a rank owns as a whole."""
    owners = {part: owner_of(i, len(SIZES), world) for i, part in enumerate(SIZES)}
    return sum(size for part, size in SIZES.items() if owners[part] == rank and wanted(part))


def is_block(part: str) -> bool:
    return part.startswith("h.")


@pytest.mark.parametrize("world", [2, 3, 5])
def test_an_owner_holds_its_own_parts_and_one_layer(pools, world):
    """Exactly, on every rank; beside them the tied embedding, from its first use to its second."""
    for rank, seen in enumerate(run(pools, residency.of_a_step, f"dp={world},zero=3,data=owner")):
        assert max(seen.blocks) == 8 * (own(world, rank, is_block) + BLOCK)
        assert max(seen.held) == 8 * (own(world, rank) + SIZES["wte"] + BLOCK)
        assert seen.held[0] == seen.held[-1] == 8 * own(world, rank)
        assert set(seen.owned) == {p for i, p in enumerate(SIZES) if owner_of(i, len(SIZES), world) == rank}


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("step", "layers"), [(without_prefetch, 1), (residency.of_a_step, 2)])
def test_flat_shards_and_one_layer_or_with_prefetch_two(pools, world, step, layers):
    """Padding included; a layer that is on its way has its room already."""
    shards = sum(shard_length(size, world) for part, size in SIZES.items() if is_block(part))
    for seen in run(pools, step, f"dp={world},zero=3"):
        assert max(seen.blocks) == 8 * (shards + layers * world * shard_length(BLOCK, world))
        assert seen.owned == []


def test_parts_come_and_go_in_order(pools):
    seen = run(pools, without_prefetch, "dp=2,zero=3")[0]
    events = sorted(event for spans in seen.spans.values() for span in spans for event in span)
    assert events == list(range(1, len(seen.held)))
    assert {part: len(spans) for part, spans in seen.spans.items()} == dict.fromkeys(SIZES, 1) | {
        "h.0": 2,
        "h.1": 2,
        "h.2": 2,
    }
    assert seen.under_way() == 0 < run(pools, residency.of_a_step, "dp=2,zero=3")[0].under_way()


KEPT = []


def kept_by_a_name(right):
    """The parameters let go, but something else, as a graph would, does not."""

    def drop(self):
        KEPT.append(self.full)
        right(self)

    return drop


BUGS = {
    "freed in name only": (flat.Flat, "drop", kept_by_a_name),
    "forward keeps the weights": (stages.Zero3, "_after_block", lambda right: lambda self, i, y: None),
    "prefetched though nobody may": (
        stages.Zero3,
        "_prefetch",
        lambda right: (
            lambda self, i: [f.start_gather() for f in ([*self.blocks, self.last][i] if i >= 0 else [])]
        ),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_mutant_holds_more(pools, name):
    def planted_step(trainer, batch):
        with planted(*BUGS[name]):
            return residency.of_a_step(trainer, batch)

    for rank, seen in enumerate(run(pools, planted_step, "dp=2,zero=3,data=owner")):
        assert max(seen.blocks) > 8 * (own(2, rank, is_block) + BLOCK)


def test_watched_memory_counts_until_the_last_holder_lets_go():
    alive, x = memory.Alive(), torch.zeros(10, dtype=torch.float64)
    alive.watch(x)
    alive.watch(x[2:4])  # the same memory
    view = x[:3]
    assert alive.bytes() == 80
    del x
    assert alive.bytes() == 80
    del view
    assert alive.bytes() == 0


def test_the_figure_shows_the_comings_and_goings_and_the_bytes(pools):
    seen = run(pools, residency.of_a_step, "dp=2,zero=3,data=owner")
    fig = plots.residency({f"rank {rank}": one for rank, one in enumerate(seen)}, 8 * TINY.parameters)
    for column, one in enumerate(seen):
        chart, curve = fig.axes[column], fig.axes[2 + column]
        bars = {(bar.get_x(), bar.get_width()) for bar in chart.patches}
        assert {(here, gone - here) for spans in one.spans.values() for _, here, gone in spans} <= bars
        assert [h * 1e6 for h in curve.lines[1].get_ydata()] == pytest.approx(one.held)
        assert curve.lines[0].get_ydata()[0] * 1e6 == pytest.approx(8 * TINY.parameters)
