"""Hybrid sharding: a rank holds what a rank of a group alone would, and saves what any plan resumes."""

import pytest
import torch
from trained import run

from gpt2lab.storage import checkpoint


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
