"""Hybrid sharding: inside a group ZeRO, across groups replicas; equal to serial, and the bytes by link class."""

import pytest
import torch
from planting import noticed, planted
from trained import TINY, run

from gpt2lab.model import GPT2
from gpt2lab.parallel import finish
from gpt2lab.parallel.zero import choice, stages
from gpt2lab.parallel.zero.costs import all_reduce_bytes, parts, shard_length, zero_bytes_sent
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.node_traffic import BETWEEN, INSIDE, by_class
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.storage import checkpoint
from gpt2lab.verify import compare


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


def not_summed_across(right):
    def hand_out(self):
        across, self.across = self.across, None
        right(self)
        self.across = across

    return hand_out


def copies_counted(right):
    return lambda p, mesh: p.tensor.grad.flatten()


def groups_of_neighbours_twice(right):
    """Replicas are taken for those of the own group: the sum is over ranks that hold other stretches."""

    def groups(mesh, shard):
        inside, _ = right(mesh, shard)
        return inside, inside

    return groups


def averaged(right):
    def hand_out(self):
        for f in self.flats:
            f.grad = f.grad / self.across.size
        right(self)

    return hand_out


MUTANTS = {
    "groups do not sum": (stages.Zero1, "_hand_out", not_summed_across),
    "copies counted in the norm": (finish, "_counted_here", copies_counted),
    "summed with the own group again": (choice, "sharding_groups", groups_of_neighbours_twice),
    "averaged over groups": (stages.Zero1, "_hand_out", averaged),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(pools, name):
    def with_bug(rank, world_size):
        with planted(*MUTANTS[name]):
            return compare(rank, world_size, Plan.parse("dp=4,zero=3,shard=2"), CONFIG, 7, 11, "gradients")

    assert noticed(pools[4].run(with_bug))
