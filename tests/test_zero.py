"""ZeRO in every stage: the same bits, memory and order of calls; parts, shards, groups; PyTorch's own beside it."""

from types import SimpleNamespace

import pytest
import torch
from planting import under
from trained import TINY, run

from gpt2lab import RankFailed
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.machine import memory
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.zero import stages
from gpt2lab.parallel.zero.costs import owned_elements, paper_bytes, parts, shard_length
from gpt2lab.parallel.zero.flat import into_groups, part_of
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch

DEEP = GPT2Config(vocab_size=64, n_positions=32, n_layer=8, n_head=4, n_embd=64)


def test_evaluation_and_training_can_alternate(pools):
    """Prefetched weights must not be stale after an update."""

    def losses(trainer, batch):
        found = []
        for _ in range(3):
            found += [trainer.evaluate([batch]), trainer.step(batch).loss]
        return found

    for plan in ("dp=2,zero=3", "dp=2,zero=3,data=owner"):
        found = run(pools, losses, plan, lr=0.1)[0]
        assert found[0::2] == pytest.approx(found[1::2], rel=1e-12)
        assert found == pytest.approx(run(pools, losses, "dp=1", lr=0.1)[0], rel=1e-9)


# ---- bytes held and sent


def in_flight(trainer, batch):
    """Of a step of ZeRO-3: each block as it computes, and the parts whose gather is under way just then."""
    sync, seen = trainer.parallel.sync, []
    for i, block in trainer.parallel.model.h.items():
        block.mlp.register_forward_pre_hook(
            lambda _, x, i=i: seen.append(
                (f"h.{i}", [part_of(f.names[0]) for f in sync.flats if f.coming is not None])
            )
        )
    trainer.step(batch)
    return seen


def test_the_next_block_is_under_way_while_a_block_computes(pools):
    """Forward: block i+1, and the head after the last. Backward: block i-1, unless its weights are only filled again.
    An owner's broadcast is waited for.
    """
    forward = [("h.0", ["h.1"]), ("h.1", ["h.2"]), ("h.2", ["ln_f"])]
    backward = [("h.2", ["h.1"]), ("h.1", ["h.0"]), ("h.0", [])]
    nothing = [(block, []) for block, _ in forward + backward]
    for more, seen in (("", forward + backward), (",data=owner", nothing), (",refill=on", forward)):
        assert run(pools, in_flight, f"dp=2,zero=3{more}") == [seen] * 2, more


# ---- gradients that do not come, or come in another order


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_with_some_of_its_gradients_is_summed_with_zeros(pools, stage):
    """Memory is not cleared before gradients are collected in it; what never comes counts as zero."""

    def partly(trainer, batch):
        sync, model = trainer.parallel.sync, trainer.parallel.model
        for f in sync.flats:
            f.gather()
        for _ in range(2):  # the second one is added to the first
            (model.ln_f.weight.sum() + 3 * model.h["1"].attn.c_proj.bias.sum()).backward()
        sync.finish()
        return {n: g.unique().tolist() for n, g in trainer.parallel.gradients().items()}

    for found in run(pools, partly, f"dp=2,zero={stage}"):
        assert found.pop("ln_f.weight") == [4.0] and found.pop("h.1.attn.c_proj.bias") == [12.0]
        assert all(values == [0.0] for values in found.values()), found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_sum_parts_in_another_order_are_refused(pools, stage):
    """Blocks are of equal shape: summed crosswise, nothing but the part's name could tell."""

    def crosswise(trainer, batch):
        sync, model = trainer.parallel.sync, trainer.parallel.model
        for f in sync.flats:
            f.gather()
        for i in (0, 1) if trainer.parallel.mesh.rank else (1, 0):
            sum(p.sum() for p in model.h[str(i)].parameters()).backward()
        sync.finish()

    with pytest.raises(RankFailed, match=r"(?s)reduce_scatter h\.[01]\..* reduce_scatter h\.[01]\."):
        run(pools, crosswise, f"dp=2,zero={stage}")


def test_the_papers_figure_1():
    held = paper_bytes(7.5e9, 64)
    gigabytes = {stage: round(sum(parts.values()) / 1e9, 1) for stage, parts in held.items()}
    assert gigabytes == {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}


def test_parts_are_the_blocks_and_what_lies_outside():
    model = GPT2(TINY)
    names = [[n for n, _ in group] for group in into_groups(model)]
    assert list(parts(model)) == ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f"]
    assert len(names) == 3 + TINY.n_layer and len(names[2]) == 12
    assert sum(parts(model).values()) == TINY.parameters


# ---- memory over a step, by allocation events


def test_zero_3_is_a_saw_tooth_below_the_flat_line(pools):
    """Gathered weights come and go, at most two blocks of them at a time; gradients never pile up."""
    block = 8 * parts(GPT2(DEEP))["h.0"]
    replicas = run(pools, memory.over_a_step, "dp=2,recompute=on", DEEP)[0]
    sharded = run(pools, memory.over_a_step, "dp=2,zero=3", DEEP)[0]
    # Replicas hold 8 blocks each of weights, gradients and two moments. Shards hold half of that, beside two blocks of
    # weights, and the gradients of one block as they come, as they are joined, and as they are summed.
    assert max(replicas) > 4 * 8 * block
    assert max(sharded) < 0.5 * 4 * 8 * block + 6 * block < 0.75 * max(replicas)
    drops = sum(1 for a, b in zip(sharded, sharded[1:], strict=False) if a - b >= block / 2)
    assert drops >= 2 * DEEP.n_layer


@pytest.mark.parametrize("more", ["", ",loss=chunked", ",refill=on", ",data=owner"])
def test_nothing_whole_outlives_an_evaluation_or_a_step(pools, more):
    def left(trainer, batch):
        found, flats = [], trainer.parallel.sync.flats
        for call in (lambda: trainer.evaluate([batch]), lambda: trainer.step(batch)):
            call()
            found += [f.names for f in flats if f.full is not None or f.coming is not None or f.users]
        return found

    assert run(pools, left, f"dp=2,zero=3{more}") == [[]] * 2


def test_an_update_waits_for_a_gather_that_is_under_way(pools):
    """It reads the shards that the update has just changed, and what it writes is freed."""

    def late(trainer, batch):
        flat, waited = trainer.parallel.sync.flats[0], []
        flat.start_gather()
        right = flat.coming.wait
        flat.coming = SimpleNamespace(wait=lambda: waited.append(right()))
        trainer.parallel.sync.updated()
        return len(waited), flat.coming

    assert run(pools, late, "dp=2,zero=3") == [(1, None)] * 2


# ---- without a second forward: emptied weights are filled again for backward


def blocks_run(trainer, batch):
    """How often blocks run forward in a step, bytes sent, and the gradients."""
    calls = []
    for block in trainer.parallel.model.h.values():
        block.register_forward_hook(lambda *_: calls.append(1))
    comm.clear_log()
    trainer.gradients(batch)
    sent = sum(size for (_, axis), (_, size, _) in comm.traffic().items() if axis == "dp+cp")
    return len(calls), sent, [p.tensor.grad for p in trainer.parallel.sync.pieces]


def test_refilled_weights_cost_no_second_forward_and_no_byte(pools):
    """The same gathers and sums, half as many forwards, and the same bits."""
    again, refilled = (run(pools, blocks_run, f"dp=2,zero=3{more}") for more in ("", ",refill=on"))
    for (forwards, sent, grads), (once, same, equal) in zip(again, refilled, strict=True):
        assert (forwards, once, sent) == (2 * TINY.n_layer, TINY.n_layer, same)
        assert all(map(torch.equal, grads, equal))


def inside_blocks(trainer, batch):
    """Bytes behind the blocks' weights after forward, while a graph has saved them, and after backward."""
    parallel = trainer.parallel
    micro, blocks = parallel.mine(batch)[0], [p for b in parallel.model.h.values() for p in b.parameters()]
    loss = parallel.model.loss(parallel.model(micro.tokens), micro.targets) / batch.total
    after_forward = memory.bytes_of([p.data for p in blocks])
    loss.backward()
    parallel.sync.finish()
    return after_forward, memory.bytes_of([p.data for p in blocks])


def test_emptied_weights_are_really_gone(pools):
    assert run(pools, inside_blocks, "dp=2,zero=3,refill=on") == [(0, 0)] * 2


def test_mutant_that_never_empties_is_noticed(pools):
    bug = stages.Zero3, "_after_block", lambda right: lambda self, i, y: None
    step = lambda *_: inside_blocks(trainer_by("dp=2,zero=3,refill=on", TINY), example_batch(TINY, 7, 11))
    assert all(after_forward > 0 for after_forward, _ in pools[2].run(under(bug, step)))


# ---- half-precision weights


def test_bfloat16_weights_with_float32_masters(pools):
    """Weights travel in 16 bits; the optimizer adds up in 32, so small updates are not lost."""

    def train(trainer, batch):
        masters = {p.tensor.dtype for p in trainer.parallel.sync.pieces}
        losses = [trainer.step(batch).loss for _ in range(20)]
        weights = list(trainer.parallel.model.parameters())
        same = any(torch.equal(w, w.bfloat16().float()) for w in trainer.parallel.weights().values())
        return masters, {w.dtype for w in weights}, losses, same

    for stage in (1, 2, 3):
        found = run(pools, train, f"dp=2,zero={stage}", dtype=torch.bfloat16, lr=1e-2)
        for masters, weights, losses, same in found:
            assert masters == {torch.float32} and weights == {torch.bfloat16}
            assert losses[-1] < losses[0] - 0.3
            assert not same  # the masters carry digits that 16 bits have no room for


def test_bytes_held_with_masters(pools):
    """2 bytes a weight and 4 n-th parts of a master and two moments: the paper's K = 12."""

    def measure(trainer, batch):
        trainer.step(batch)
        return memory.held(trainer.parallel.model, trainer.parallel.sync, trainer.optimizer)

    sizes = parts(GPT2(TINY))
    for rank, found in enumerate(run(pools, measure, "dp=2,zero=1", dtype=torch.bfloat16)):
        shards = sum(shard_length(s, 2) for s in sizes.values())
        mine = sum(owned_elements(s, 2, rank) for s in sizes.values())
        assert found["weights"] == 2 * 2 * shards + 4 * shards
        assert found["optimizer"] == 8 * mine


# --- hybrid sharding: groups of ranks that share


def test_a_rank_holds_what_a_group_of_its_size_holds(pools):
    def held(trainer, batch):
        trainer.step(batch)
        sync, state = trainer.parallel.sync, trainer.optimizer.state
        moments = sum(s["exp_avg"].numel() for s in state.values())
        return sum(t.numel() for t in sync.weight_memory()), moments

    assert run(pools, held, "dp=4,zero=3,shard=2") == run(pools, held, "dp=2,zero=3") * 2
