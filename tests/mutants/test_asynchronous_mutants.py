"""Bugs in pipelines without a flush, planted on live ranks: the comparison with the emulator notices each of them."""

from dataclasses import replace

import test_asynchronous
from planting import bugs, controls, is_caught, is_killed

from gpt2lab.model import GPT2Config
from gpt2lab.parallel import finish
from gpt2lab.parallel.data import Naive, Replicas
from gpt2lab.parallel.pipeline import versions
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.versions import Asynchronous, Embedding, Ending, Stash
from gpt2lab.schedules import Op
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)
STASHED, MIXED, DOUBLE = "pp=2,schedule=pipedream", "pp=2,schedule=ampnet", "pp=2,micro=2,schedule=2bw"
VERTICAL = "pp=2,micro=1,schedule=pipedream_vertical"


def early(right):
    return lambda self, wanted: right(self, wanted if len(wanted) == 1 else wanted - {min(wanted)})


def table(change):
    """The engine gets another version table than the emulator."""

    def make(right):
        def changed(plan, batches):
            stream = right(plan, batches)
            return replace(stream, reads={op: change(stream, op, v) for op, v in stream.reads.items()})

        return changed

    return make


def updated_one_batch_late(right):
    def late(self, norm):
        now = [None if p.tensor.grad is None else p.tensor.grad.clone() for p in self.parallel.sync.pieces]
        for p, grad in zip(self.parallel.sync.pieces, getattr(self, "before", now), strict=True):
            p.tensor.grad = grad
        self.before = now
        return right(self, norm)

    return late


BUGS = {
    "newest is read":
        (Stash, "use", lambda right: lambda self, version: right(self, max(self.versions)), STASHED),
    "stashed after the update":
        (Asynchronous._update, "stash.used = version", "stash.push(); stash.used = version", STASHED),
    "kept without a copy": (Stash.push, "p.data.clone()", "p.data", STASHED),
    "freed one operation early": (Stash, "free", early, f"{STASHED} raises=KeyError"),
    "never freed": (Stash, "free", lambda right: lambda self, wanted: None, STASHED),
    "first parameter not exchanged":
        (Stash.use, "zip(self.parameters, stored,", "zip(self.parameters[1:], stored[1:],", DOUBLE),
    "divided twice":
        (PipelineStep._through, "/ unit.total", "/ unit.total / self.engine.table.args[0].micro", DOUBLE),
    "one version older on later stages":
        (versions, "stream_of", table(lambda stream, op, v: max(0, v - (op.stage > 0))), VERTICAL),
    "backward reads what forward read":
        (versions, "stream_of", table(lambda stream, op, v: stream.reads[op._replace(kind="F")]), MIXED),
    "newest in 2BW":
        (versions, "stream_of", table(lambda stream, op, v: min(stream.batch(op), v + (op.stage == 1))),
         DOUBLE),
    "stage 0 reads as the last":
        (versions, "stream_of",
         table(lambda stream, op, v: max(0, stream.reads[Op("F", 0, op.micro)] - (op.stage == 0))), VERTICAL),
    "head sends no gradient":
        (Asynchronous.tie, "give(piece.tensor.grad,", "give(piece.tensor.grad.zero_(),", MIXED),
    "head updates its copy too": (Asynchronous.tie, "piece.tensor.grad = None", "pass", MIXED),
    "head stays as it was":
        (Embedding.pull, "self.weight.data.copy_(comm", "(comm", MIXED),
    "head reads one version late":
        (Embedding.pull, "self.weight.data.copy_(comm",
         "self.version and self.weight.data.copy_(self.before); self.before = (comm", STASHED),
    "replicas update apart":
        (Naive, "finish", lambda right: Replicas.finish, "pp=2,dp=2,data=naive,schedule=pipedream"),
    "updated one batch late": (Trainer, "_update", updated_one_batch_late, STASHED),
    "clipped by the matrices alone":
        (finish.gradient_norm, "not p.spec.load", "not p.spec.load and p.tensor.dim() > 1", STASHED),
    "dropout of the first batch":
        (PipelineStep._through, "*self.key", "self.key[0], 0", f"{MIXED} dropout=0.2"),
}  # fmt: skip

ENDS = test_asynchronous.test_an_end_is_told_to_every_rank_before_the_batch_and_two_more_run
ENDED = {
    "an end that nobody hears": (Ending.before, "if ends else self.batches", "if False else self.batches", ENDS),
    "an end of what may be posted": (Ending, "AHEAD", lambda right: 1, ENDS),
    "an end that the last rank does not hear": (Ending.before, "range(1, self.all.size)", "range(1, 2)", ENDS),
    "a look for each operation": (Ending.before, "self.told <= batch and ", "", ENDS),
    "an end a batch late": (Ending.before, "self.told + self.AHEAD if", "self.told + 3 if", ENDS),
}  # fmt: skip


@bugs(ENDED)
def test_the_mutant_of_an_end_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


@bugs(BUGS)
def test_the_mutant_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, check, CONFIG), "nobody noticed"


@controls(BUGS)
def test_without_a_mutant_the_same_plan_is_equal(pools, check):
    assert not is_caught(pools, None, check, replace(CONFIG, dropout=0.2), 1e-10)
