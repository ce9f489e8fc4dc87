"""Bugs that show only when strategies are combined; each is planted, and the comparison with serial must notice it."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from planting import is_noticed

from gpt2lab import RankFailed
from gpt2lab.corpus.batches import Batch
from gpt2lab.parallel import accumulate, finish
from gpt2lab.parallel.pipeline import engine, step
from gpt2lab.parallel.spec import Spec
from gpt2lab.plan import Parallel
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG
from gpt2lab.train import Trainer

MUTANTS = {}


def mutant(plan, owner, name, refused=None):
    """Register a function that makes the wrong version from the right one, and the plan on which it must show.

    `refused` names the error that stops it outright; without it the comparison with serial must notice.
    """

    def register(make):
        MUTANTS[make.__name__.replace("_", " ")] = (plan, (owner, name, make), refused)
        return make

    return register


@pytest.fixture
def ranks(pools):
    return pools[4]


@mutant("dp=2,tp=2", finish, "gradient_norm")
def the_norm_counts_tensor_parallel_replicas_twice(right):
    def norm(held, mesh):
        square = sum(p.tensor.grad.double().pow(2).sum() for p in held)
        return comm.all_reduce(square, mesh["tp"]).sqrt().item()

    return norm


@mutant("pp=2,tp=2", finish, "gradient_norm")
def the_tied_copy_counts_in_the_norm(right):
    def norm(held, mesh):
        forget = [finish.Piece(p.name, p.tensor, Spec(p.spec.cuts, p.spec.partial), p.decay) for p in held]
        return right(forget, mesh)

    return norm


@mutant("pp=2,dp=2", finish, "gradient_norm")
def the_norm_is_the_stage_s_own(right):
    return lambda held, mesh: right([p for p in held if mesh["pp"].rank == 0] or held[:0], mesh)


@mutant("pp=2,dp=2", engine.Pipeline, "tie")
def the_tied_gradient_is_not_summed(right):
    return lambda self, held, mesh: None


@mutant("pp=2,tp=2", engine.Pipeline, "tie", refused="Mismatch")
def the_tied_gradient_is_summed_over_all_stages_and_tensor_ranks(right):
    def tie(self, held, mesh):
        for p in held:
            if p.name in self.shared:
                p.tensor.grad = comm.all_reduce(p.tensor.grad, mesh["tp"])
        right(self, held, mesh)

    return tie


@mutant("pp=2,dp=2,micro=2", step.PipelineStep, "_through")
def the_loss_is_divided_by_the_micro_batches_once_more(right):
    def through(self, op, x):
        work = right(self, op, x)
        if self._last(op):
            work.output = work.output / 2
        return work

    return through


@mutant("dp=2,tp=2", accumulate, "micro_loss")
def the_loss_is_divided_by_the_replica_s_own_tokens(right):
    def loss(model, micro, key):
        return right(model, micro, key) * micro.total / (micro.targets != -100).sum() / 2

    return loss


@mutant("dp=2,cp=2", Mesh, "__getitem__")
def gradients_are_summed_over_data_ranks_only(right):
    return lambda self, names: right(self, "dp" if names == ("dp", "cp") else names)


@mutant("dp=2,tp=2", Mesh, "__getitem__", refused="Mismatch")
def gradients_are_summed_over_the_wrong_axis(right):
    return lambda self, names: right(self, "tp" if names == ("dp", "cp") else names)


@mutant("tp=2,dp=2,sp=on", finish, "sum_partial")
def partial_gradients_stay_partial(right):
    return lambda held, mesh: None


@mutant("tp=2,dp=2,sp=on,zero=2", finish, "sum_partial")
def partial_gradients_are_summed_over_the_data_axis(right):
    def total(held, mesh):
        return right([finish.Piece(p.name, p.tensor, Spec(partial=("dp",) if p.spec.partial else ()), p.decay)
                      for p in held], mesh)  # fmt: skip

    return total


@mutant("dp=2,tp=2", Parallel, "mine", refused="Mismatch")
def rows_are_dealt_by_the_global_rank(right):
    def mine(self, batch):
        return batch.rows(self.mesh.rank, self.mesh.world.size).micro(self.plan.micro)

    return mine


@mutant("cp=2,tp=2", Batch, "columns", refused="ValueError")
def positions_start_at_zero_on_every_context_rank(right):
    def columns(self, index):
        part = right(self, index)
        return Batch(part.tokens, part.targets, part.positions - part.positions[0], part.samples, part.total)

    return columns


@mutant("dp=2,tp=2", Trainer, "_global_loss")
def the_reported_loss_counts_tensor_parallel_ranks(right):
    def total(self, loss):
        return comm.all_reduce(loss.double(), self.parallel.mesh.world).item()

    return total


@mutant("dp=2,zero=1,tp=2", finish, "clip")
def each_rank_clips_by_its_shard(right):
    def clip(held, norm, limit):
        own = float(np.sqrt(sum(p.tensor.grad.pow(2).sum().item() for p in held)))
        right(held, own, limit)

    return clip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_noticed(ranks, name):
    plan, bug, refused = MUTANTS[name]
    if refused:
        with pytest.raises(RankFailed) as error:
            is_noticed(ranks, bug, plan, CONFIG)
        assert error.value.ename == refused
    else:
        assert is_noticed(ranks, bug, plan, CONFIG), f"nobody noticed: {name}"


@pytest.mark.parametrize("plan", sorted({plan for plan, *_ in MUTANTS.values()}))
def test_without_a_bug_nothing_is_noticed(ranks, plan):
    assert not is_noticed(ranks, None, plan, CONFIG, 1e-10)
