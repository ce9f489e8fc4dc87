"""Hybrid sharding: inside a group ZeRO, across groups replicas; equal to serial, and the bytes by link class."""

import pytest
import torch
from trained import TINY, run

from gpt2lab.model import GPT2
from gpt2lab.parallel.zero.costs import all_reduce_bytes, parts, shard_length, zero_bytes_sent
from gpt2lab.ranks import comm
from gpt2lab.ranks.node_traffic import BETWEEN, INSIDE, by_class
from gpt2lab.reference import example_batch
from gpt2lab.storage import checkpoint


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("world, shard", [(4, 2), (6, 2), (6, 3)])
def test_bytes_inside_a_group_and_across_are_the_formula(pools, stage, micro, world, shard):
    """With a machine for each group only the shard's gradient leaves it, once a step."""

    def sent(trainer, batch):
        trainer.step(example_batch(TINY, 12, 11))
        return by_class(comm.log, trainer.parallel.mesh.rank, shard)

    for rank, found in enumerate(run(pools, sent, f"dp={world},micro={micro},zero={stage},shard={shard}")):
        sizes, group = parts(GPT2(TINY)), rank // shard
        inside = zero_bytes_sent(sizes, stage, shard, micro, 8)
        lengths = [shard_length(size, shard) for size in sizes.values()]  # once, however many micro-batches
        across = sum(all_reduce_bytes(length, world // shard, group, 8) for length in lengths)
        assert {key: size for key, size in found.items() if key[0] != "world"} == {
            ("dp+cp", INSIDE): inside,
            ("replica", BETWEEN): across,
        }


def test_a_rank_holds_what_a_group_of_its_size_holds(pools):
    def held(trainer, batch):
        trainer.step(batch)
        sync, state = trainer.parallel.sync, trainer.optimizer.state
        moments = sum(s["exp_avg"].numel() for s in state.values())
        return sum(t.numel() for t in sync.weight_memory()), moments

    assert run(pools, held, "dp=4,zero=3,shard=2") == run(pools, held, "dp=2,zero=3") * 2


def test_replicas_have_the_same_bits(pools):
    def train(trainer, batch):
        for _ in range(3):
            trainer.step(batch)
        return [p.tensor for p in trainer.parallel.sync.pieces]

    a, b, c, d = run(pools, train, "dp=4,zero=3,shard=2", dtype=torch.float32)
    for mine, other in ((a, c), (b, d)):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def test_saved_in_groups_resumed_on_any_plan(pools, tmp_path):
    def save(trainer, batch):
        trainer.step(batch)
        checkpoint.save(trainer, tmp_path)
        return trainer.step(batch).loss

    def resume(trainer, batch):
        checkpoint.load(checkpoint.all_in(tmp_path)[-1], trainer)
        return trainer.step(batch).loss

    saved = run(pools, save, "dp=4,zero=3,shard=2")
    for plan in ("dp=4,zero=3,shard=2", "dp=2,zero=1", "dp=3"):
        assert run(pools, resume, plan)[0] == pytest.approx(saved[0], rel=1e-12)
