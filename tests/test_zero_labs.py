"""Labs on ZeRO: whole weights on a rank, the update rewritten to shards, a lecture's ZeRO-3 and its bugs."""

from functools import partial

import pytest
import torch
from lesson_cells import definitions
from planting import planted, under
from trained import TINY, run

from gpt2lab.lessons.labs import lecture_zero3, residency, rewrite
from gpt2lab.lessons.labs.lecture_zero3 import first_weight, serial
from gpt2lab.lessons.labs.rewrite import UPDATE, GraphOp, Update, account
from gpt2lab.machine import memory
from gpt2lab.model import GPT2
from gpt2lab.parallel.zero import flat, stages
from gpt2lab.parallel.zero.costs import owner_of, parts, shard_length
from gpt2lab.plots import zero as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import default_dtype

# --- whole weights are on a rank only while needed


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
    assert {part: len(spans) for part, spans in seen.spans.items()} == {p: 1 + is_block(p) for p in SIZES}
    assert seen.under_way() == 0 < run(pools, residency.of_a_step, "dp=2,zero=3")[0].under_way()


KEPT = []


def kept_by_a_name(right):
    """The parameters let go, but something else, as a graph would, does not."""

    def drop(self):
        KEPT.append(self.full)
        right(self)

    return drop


def anyway(right):
    return lambda self, i: [f.start_gather() for f in ([*self.blocks, self.last][i] if i >= 0 else [])]


BUGS = {
    "freed in name only": (flat.Flat, "drop", kept_by_a_name),
    "forward keeps the weights": (stages.Zero3, "_after_block", lambda right: lambda self, i, y: None),
    "prefetched though nobody may": (stages.Zero3, "_prefetch", anyway),
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


# --- the update as a graph, rewritten to shards


SHARDED = rewrite.rewrite(UPDATE)
P, STEPS, RATE = 37, 20, 1e-2


def start() -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(rank: int):
    """A rank's gradients of 20 steps."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(STEPS, P, generator=generator, dtype=torch.float64)


def run_graph(rank, world_size, graph, decay):
    """The weights after 20 steps, bytes sent in one of them, and of moments kept."""
    update = Update(graph, start(), Mesh(dp=world_size)["dp"], RATE, decay)
    for gradient in gradients(rank):
        comm.clear_log()
        update.step(gradient)
    sent = sum(size for _, size, _ in comm.traffic().values())
    return update.weights, sent, update.moments


def torch_adamw(world: int, decay: float) -> torch.Tensor:
    w = start().requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=RATE, weight_decay=decay)
    for t in range(STEPS):
        w.grad = sum(gradients(rank)[t] for rank in range(world))
        optimizer.step()
    return w.detach()


def test_the_rewrite():
    assert [op.kind for op in SHARDED] == ["reduce-scatter", "update", "all-gather"]
    assert SHARDED[0].input == UPDATE[0].input and SHARDED[-1].output == UPDATE[-1].output
    assert rewrite.rewrite(SHARDED) == SHARDED


def test_a_sum_that_somebody_else_reads_as_a_whole_stays():
    graph = (*UPDATE, GraphOp("norm", "sum"))
    assert rewrite.rewrite(graph) == graph


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("world", [2, 3])
def test_both_graphs_are_torch_s_adamw(pools, world, decay):
    want = torch_adamw(world, decay)
    whole, sharded = (pools[world].run(run_graph, graph, decay) for graph in (UPDATE, SHARDED))
    for found in (*whole, *sharded):
        assert torch.allclose(found[0], want, rtol=1e-12, atol=1e-12)
    if world == 2:  # two addends have one order
        assert all(torch.equal(found[0], whole[0][0]) for found in (*whole, *sharded))
    for rank in range(world):
        for graph, found in ((UPDATE, whole[rank]), (SHARDED, sharded[rank])):
            rows = account(graph, P, world, rank, 8)
            assert (sum(row.sent for row in rows), sum(row.state for row in rows)) == found[1:]
        assert whole[rank][2] == 2 * 8 * P and sharded[rank][2] < 2 * 8 * (P / world + 1)
    assert sum(found[1] for found in sharded) == sum(found[1] for found in whole)


WRONG_UPDATES = {
    "moments forgotten": (Update.update, "self.adam.step()", "self.adam.state.clear(); self.adam.step()"),
    "not element by element": (Update.update, "= gradient\n", "= gradient / gradient.norm()\n"),
    "decay inside the moments": (Update.__init__, "AdamW", "Adam"),
}


@pytest.mark.parametrize("name", WRONG_UPDATES)
def test_mutant_of_the_update_is_noticed(pools, name):
    wrong = pools[2].run(under(WRONG_UPDATES[name], run_graph), SHARDED, 0.01)[0]
    assert not torch.allclose(wrong[0], torch_adamw(2, 0.01), rtol=1e-6)


def test_the_figure_says_what_is_sent_kept_and_made():
    fig = plots.graphs({"before": account(UPDATE, 1000, 4, 0), "after": account(SHARDED, 1000, 4, 0)})
    texts = [text.get_text().replace("\n", " ") for text in fig.axes[0].texts]
    assert {*texts} >= {
        "all-reduce sends 6.0 kB", "update moments 8.0 kB", "reduce-scatter sends 3.0 kB",
        "update moments 2.0 kB", "all-gather sends 3.0 kB", "shard of the sum 1.0 kB",
    }  # fmt: skip


# --- a lecture's ZeRO-3


X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


with default_dtype(torch.get_default_dtype()):  # which the set-up of the lesson changes
    zero3 = partial(lecture_zero3.zero3, step=definitions("05", "def lectures_step")["lectures_step"])


def equal(found, expected) -> bool:
    return all(log.equals(expected) for log in found)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_without_its_bugs_it_equals_serial(pools, world):
    assert equal(pools[world].run(zero3, X), serial(X))
    assert equal(pools[world].run(zero3, X, replicas=True), serial(X))
    assert not serial(X).equals(serial(X, 1e-6)) and not serial(X).equals(serial(X, frozen=[3]))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_bug_is_the_program_that_the_recursions_say(pools, world):
    bugs = (  # switches of the program, and of the recursion that it then is
        ({"stop": 0}, {"frozen": [0]}),
        ({"clear": False}, {"keep": 1 / world}),  # old gradients shrink
        ({"clear": False, "replicas": True}, {"keep": 1.0}),  # they pile up
        ({"clear": False, "stop": 0}, {"keep": 1 / world, "frozen": [0]}),
    )
    for switches, recursion in bugs:
        found = pools[world].run(zero3, X, steps=8, **switches)
        assert equal(found, serial(X, steps=8, **recursion)) and not equal(found, serial(X, steps=8))
        layer_0_stays = torch.equal(found[0].weights[0], first_weight(X).detach())
        assert layer_0_stays == ("stop" in switches)


@pytest.mark.parametrize(("world", "layers"), [(2, 4), (3, 6), (4, 8)])
def test_a_graph_keeps_what_was_borrowed(pools, world, layers):
    """L - L/n layers by the end of forward; without a graph one, while it computes; replicas borrow nothing."""
    foreign = layers - layers // world
    for log in pools[world].run(zero3, X, graph=True, steps=1, layers=layers):
        forward, backward = log.borrowed[: layers + foreign], log.borrowed[layers + foreign :]
        assert forward == sorted(forward) and forward[-1] == foreign
        assert set(forward) >= {*range(1, foreign + 1)}
        assert set(backward) == {foreign, foreign + 1}
    for log in pools[world].run(zero3, X, layers=layers):
        assert log.borrowed.count(1) == 2 * foreign * 5 and set(log.borrowed) == {0, 1}
        assert log.borrowed[-1] == 0
    assert set(pools[world].run(zero3, X, replicas=True)[0].borrowed) == {0}
    assert equal(pools[world].run(zero3, X, graph=True), serial(X))
