"""Bugs in pipelines without a flush, planted on live ranks: the comparison with the emulator notices each of them."""

from dataclasses import replace

import pytest
from planting import is_noticed

from gpt2lab.model import GPT2Config
from gpt2lab.parallel import finish
from gpt2lab.parallel.data import Naive, Replicas
from gpt2lab.parallel.pipeline import versions
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.versions import Asynchronous, Embedding, Stash
from gpt2lab.plan import Plan
from gpt2lab.processes.launch import RankFailed
from gpt2lab.schedules import Op
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)
STASHED, MIXED, DOUBLE = "pp=2,schedule=pipedream", "pp=2,schedule=ampnet", "pp=2,micro=2,schedule=2bw"
VERTICAL = "pp=2,micro=1,schedule=pipedream_vertical"


def newest_is_read(right):
    return lambda self, version: right(self, max(self.versions))


def stashed_after_the_update(right):
    def late(self, stash, version, wanted, update):
        right(self, stash, version, frozenset(), update)
        if version - 1 in wanted:
            stash.kept[version - 1] = [p.data.clone() for p in stash.parameters]

    return late


def kept_without_a_copy(right):
    def alias(self):
        self.kept[self.used] = [p.data for p in self.parameters]

    return alias


def freed_one_operation_early(right):
    def eager(self, wanted):
        right(self, wanted if len(wanted) == 1 else wanted - {min(wanted)})

    return eager


def never_freed(right):
    return lambda self, wanted: None


def first_parameter_not_exchanged(right):
    def some(self, version):
        first = self.parameters[0].data.clone()
        right(self, version)
        self.parameters[0].data.copy_(first)

    return some


def divided_twice(right):
    def halved(self, op, x):
        work = right(self, op, x)
        if self._last(op):
            work.output = work.output / self.engine.table.args[0].micro
        return work

    return halved


def table(change):
    """The engine gets another version table than the emulator."""

    def make(right):
        def changed(plan, batches):
            stream = right(plan, batches)
            return replace(stream, reads={op: change(stream, op, v) for op, v in stream.reads.items()})

        return changed

    return make


one_version_older_on_later_stages = table(lambda stream, op, v: max(0, v - (op.stage > 0)))
backward_reads_what_forward_read = table(lambda stream, op, v: stream.reads[op._replace(kind="F")])
newest_in_2bw = table(lambda stream, op, v: min(stream.batch(op), v + (op.stage == 1)))
stage_0_reads_as_the_last = table(
    lambda stream, op, v: max(0, stream.reads[Op("F", 0, op.micro)] - (op.stage == 0))
)


def head_sends_no_gradient(right):
    def silent(self, pieces, mesh):
        for p in pieces:
            if p.spec.tied_copy:
                p.tensor.grad.zero_()
        right(self, pieces, mesh)

    return silent


def head_updates_its_copy_too(right):
    def both(self, pieces, mesh):
        kept = {p.name: p.tensor.grad.clone() for p in pieces}
        right(self, pieces, mesh)
        for p in pieces:
            p.tensor.grad = kept[p.name] if p.spec.tied_copy else p.tensor.grad

    return both


def head_stays_as_it_was(right):
    def deaf(self, version):
        before = self.weight.data.clone() if self.weight is not None else None
        right(self, version)
        if before is not None:
            self.weight.data.copy_(before)

    return deaf


def head_reads_one_version_late(right):
    def late(self, version):
        while self.ends.rank in self.last and self.version < version:
            if self.version:
                self.weight.data.copy_(self.before)
            self.before, self.version = self.receive(0), self.version + 1

    return late


def replicas_update_apart(right):
    return Replicas.finish


def updated_one_batch_late(right):
    def late(self, norm):
        now = [None if p.tensor.grad is None else p.tensor.grad.clone() for p in self.parallel.sync.pieces]
        for p, grad in zip(self.parallel.sync.pieces, getattr(self, "before", now), strict=True):
            p.tensor.grad = grad
        self.before = now
        return right(self, norm)

    return late


def clipped_by_the_matrices_alone(right):
    return lambda pieces, mesh, ranks: right([p for p in pieces if p.tensor.dim() > 1], mesh, ranks)


def dropout_of_the_first_batch(right):
    def first(self, op, x):
        key = self.key
        self.key = key and (key[0], 0)
        found = right(self, op, x)
        self.key = key
        return found

    return first


MUTANTS = {
    newest_is_read: (Stash, "use", STASHED),
    stashed_after_the_update: (Asynchronous, "_update", STASHED),
    kept_without_a_copy: (Stash, "push", STASHED),
    freed_one_operation_early: (Stash, "free", STASHED),
    never_freed: (Stash, "free", STASHED),
    first_parameter_not_exchanged: (Stash, "use", DOUBLE),
    divided_twice: (PipelineStep, "_through", DOUBLE),
    one_version_older_on_later_stages: (versions, "stream_of", VERTICAL),
    backward_reads_what_forward_read: (versions, "stream_of", MIXED),
    newest_in_2bw: (versions, "stream_of", DOUBLE),
    stage_0_reads_as_the_last: (versions, "stream_of", VERTICAL),
    head_sends_no_gradient: (Asynchronous, "tie", MIXED),
    head_updates_its_copy_too: (Asynchronous, "tie", MIXED),
    head_stays_as_it_was: (Embedding, "pull", MIXED),
    head_reads_one_version_late: (Embedding, "pull", STASHED),
    replicas_update_apart: (Naive, "finish", "pp=2,dp=2,data=naive,schedule=pipedream"),
    updated_one_batch_late: (Trainer, "_update", STASHED),
    clipped_by_the_matrices_alone: (finish, "norm_among", STASHED),
    dropout_of_the_first_batch: (PipelineStep, "_through", MIXED),
}


@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.__name__)
def test_the_mutant_is_noticed(pools, bug):
    owner, name, plan = MUTANTS[bug]
    config = replace(CONFIG, dropout=0.2) if "dropout" in bug.__name__ else CONFIG
    try:
        found = is_noticed(pools[Plan.parse(plan).world], (owner, name, bug), plan, config)
    except RankFailed as error:
        assert "KeyError" in str(error)  # a version that was wanted is gone
        return
    assert found, f"nobody noticed: {bug.__name__}"


@pytest.mark.parametrize("plan", sorted({plan for _, _, plan in MUTANTS.values()}))
def test_without_a_mutant_the_same_plan_is_equal(pools, plan):
    config = replace(CONFIG, dropout=0.2)
    assert not is_noticed(pools[Plan.parse(plan).world], None, plan, config, limit=1e-10)
