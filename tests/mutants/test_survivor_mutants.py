"""Bugs that the suite did not see when they were first planted, each with the test that sees it now."""

import pickle
from collections import deque
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import test_checkpoint
import test_effects
import torch
from planting import bugs, is_killed

from gpt2lab import run, verify
from gpt2lab.experts.mixture import Experts
from gpt2lab.model import GPT2, Dropout, GPT2Config, Noise
from gpt2lab.parallel import data, finish, servers, spec, tensor
from gpt2lab.parallel.boxes import Entry
from gpt2lab.parallel.pipeline import mailbox, versions
from gpt2lab.parallel.zero import stages
from gpt2lab.parallel.zero.flat import Flat
from gpt2lab.plan import Plan
from gpt2lab.planner import failures, fit, seconds
from gpt2lab.ranks import call, comm
from gpt2lab.ranks.mesh import Axis
from gpt2lab.schedules import Op, Timeline
from gpt2lab.sharding.interpret import Interpreter
from gpt2lab.storage import checkpoint
from gpt2lab.tasks.graph import TaskGraph
from gpt2lab.tasks.scheduler import Scheduler
from gpt2lab.train import Trainer, make_optimizer
from gpt2lab.transport import stream

pytestmark = pytest.mark.mutant
ELEMENTS = test_effects.test_dropout_is_the_reference_element_by_element
NORM = test_effects.test_the_norm_counts_every_element_of_a_large_tensor
EVALUATION = test_effects.test_an_evaluation_is_the_mean_over_its_batches_under_autocast_too
RATES = test_effects.test_each_step_takes_its_own_rate_and_gives_it_to_the_optimizer
WORST = test_effects.test_the_worst_rank_and_the_worst_element_count
IN_32 = test_effects.test_gradients_of_16_bits_add_up_in_32_under_32_bit_masters
KEY = test_effects.test_the_dropout_of_a_step_depends_on_seed_and_step
COPY = test_effects.test_a_copy_for_the_background_has_memory_of_its_own


def bubble():
    """Two ranks that are busy for 4 and 8 of 10."""
    two = SimpleNamespace(rows=[[], []], makespan=10, busy=lambda rank: (4, 8)[rank])
    assert Timeline.bubble.fget(two) == Fraction(8, 20)


def freedom():
    """The interval of the latency by numpy's own least squares: four samples leave two degrees of freedom."""
    samples = np.array([[1, 1e6, 2e-3], [2, 1e6, 2.1e-3], [1, 4e6, 5e-3], [3, 9e6, 13e-3]])
    x = samples[:, :2] / samples[:, 2:]
    (alpha, _), (squares,), *_ = np.linalg.lstsq(x, np.ones(4), rcond=None)
    wide = 4.302653 * (squares / 2 * np.linalg.inv(x.T @ x)[0, 0]) ** 0.5  # Student's t, 97.5 %
    assert fit.fit(samples).latency[1] == pytest.approx(alpha + wide)


def stub(kind, **attributes):
    """An object of a class that has only what one of its methods asks for."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def together():
    """A stream that is resumed at step 3 stops at 4, where an evaluation is due."""
    trainer = SimpleNamespace(steps=3, parallel=SimpleNamespace(plan=SimpleNamespace(asynchronous=True)))
    assert run._together(trainer, run.Options(steps=100, save=10, evaluate=4)) == 1
    assert run._together(trainer, run.Options(steps=100, save=10, bench=True)) == 7


def decay():
    assert run.Options(steps=5, warmup=10).the_recipe().decay_steps == 10


def refilled():
    """Backward runs from the last block to the first."""
    asked = []
    stages.Zero3._before_backward(SimpleNamespace(blocks=[[], [], []], _prefetch=asked.append), 1)
    assert asked == [0]


def sums():
    """A part that is being filled holds gradients, too."""
    part = SimpleNamespace(grad=torch.zeros(2), whole_grad=torch.zeros(3))
    found = stub(stages.Zero2, under_way=None, flats=[part], unsharded=[], pieces=[]).gradient_memory()
    assert [len(t) for t in found] == [2, 3]


def forgotten():
    """An evaluation without a head, as a schedule may make it, leaves nothing to the next step."""
    zero = stub(stages.Zero3, kept=2, flats=[])
    zero.updated()
    assert zero.kept == 0


def completed():
    """The experts lie between the first and the last dense parameter: backward completes them first."""
    model = GPT2(GPT2Config(37, 8, 1, 2, 8, experts=Experts(2, 2)))
    inside = {id(p) for name, p in model.named_parameters() if ".mlp.experts." in name}
    with patch.object(data.spec, "of", lambda p: spec.Spec(expert=id(p) in inside)):
        buckets = data.Buckets(model, Axis("dp", (0,), 0), 1 << 30).buckets
    assert inside and [all(id(p) in inside for p in b.parameters) for b in buckets] == [True, False]


def shares():
    assert servers.share_out({"a": 1, "b": 1, "c": 2}, 2) == {"c": 0, "a": 1, "b": 1}


def buffered():
    """Two receives are posted before the first is needed."""
    posted, ops = [], [Op("F", 1, micro) for micro in range(3)]
    with patch.object(mailbox.comm, "irecv", lambda *call: posted.append(call)):
        mailbox.Mailbox(
            SimpleNamespace(units=9, incoming=[{1: ops}]), Axis("pp", (0, 1), 0), lambda op: op, 2
        )
    assert [call[0] for call in posted] == ops[:2]


def given():
    """The gradient that leaves has memory of its own: the sender's is clipped in place meanwhile."""
    grad, sent = torch.ones(2), []
    versions.Embedding.give(
        SimpleNamespace(send=lambda value, end: sent.append(value), first=range(1)), grad, 0
    )
    grad.zero_()
    assert sent[0].sum() == 2


def unread():
    """Three micro-batches are under way before an update of two: two versions, and one."""
    schedule = SimpleNamespace(replicas=0, promise=[4])
    assert versions.unread(SimpleNamespace(schedule=schedule, per_update=2)) == 1 + 2


def active():
    """A token meets top_k experts of all: so many operations count."""
    config, experts = GPT2Config(37, 8, 1, 2, 8), Experts(8, 2)
    each = 8 * 8 * 8 + 5 * 8
    assert experts.added(config, active=True) == 8 * 8 + (2 - 1) * each
    assert experts.added(config) == 8 * 8 + (8 - 1) * each


def woken():
    """A writer that is about to sleep wakes itself: a reader may have freed the slot a moment before."""
    pair, posted = SimpleNamespace(free="free", wanted=0), []
    writer = stub(
        stream.Outgoing,
        _in_use=deque([[1]]),
        _ends={1: (pair, None)},
        _memory=SimpleNamespace(raw=[0]),
        _wakeup="w",
    )
    with (
        patch.object(stream.semaphores, "take", lambda _: False),
        patch.object(stream.semaphores, "post", posted.append),
    ):
        next(writer._reclaim())
    assert posted == ["w"]


def objects():
    """What a rank sends of an object: one copy to each of the others."""
    calls, value = [], list(range(50))
    with patch.object(call, "perform", lambda call, *_: calls.append(call)):
        comm.gather_objects(value, Axis("dp", (0, 1, 2), 0))
    assert calls[0].cost[0] == 2 * len(pickle.dumps(value))


def urgent():
    """Of ready tasks that with the higher priority is first."""
    graph, ran = TaskGraph({}), []
    for name, priority in (("late", 0), ("soon", 5)):
        graph.add(name, lambda name=name: ran.append(name), priority=priority)
    Scheduler(graph, 1).run()
    assert ran == ["soon", "late"]


def freed():
    """A value that no later step reads is given back."""
    step = SimpleNamespace(node=SimpleNamespace(name="c", inputs=("a", "b")), inputs="xx", output="x")
    values, program = {"a": {"x": 1}, "b": {"x": 2}}, SimpleNamespace(steps=[step])
    Interpreter.advance(SimpleNamespace(program=program, last={0: ["a"]}, call=lambda *_: 3), values)
    assert values == {"b": {"x": 2}, "c": {"x": 3}}


def replicas():
    """Groups of two replicas, each over two tensor ranks, are four ranks apart."""
    share = SimpleNamespace(plan=Plan(dp=4, tp=2, zero=1, shard=2))
    assert seconds.RankOnCluster.rings.func(SimpleNamespace(share=share))["replica"] == (2, 4)


def lost():
    assert failures.share_lost(10.0, 1.0, 100.0, 5.0) == pytest.approx(0.1 + 0.1)


SURVIVED = {
    "a stream stops at wrong steps":
        (run._together, "*(n - trainer.steps % n for n in every)", "*every", together),
    "a cosine shorter than the warm-up":
        (run.Options.the_recipe, "max(self.steps, self.warmup)", "self.steps", decay),
    "backward prefetches the block after": (stages.Zero3._before_backward, "i - 1", "i + 1", refilled),
    "whole gradients are not counted":
        (stages.Zero2.gradient_memory, "(f.grad, f.whole_grad)", "(f.grad,)", sums),
    "uses of the embedding outlive an update": (stages.Zero3.updated, "self.kept = 0", "pass", forgotten),
    "buckets by their last parameter": (data.Buckets.__init__, "-min(order[p]", "-max(order[p]", completed),
    "servers in the order of names": (servers.share_out, "key=lambda k: -sizes[k]", "key=str", shares),
    "one receive is posted": (mailbox.Mailbox.__init__, "range(2)", "range(1)", buffered),
    "the gradient is sent as it lies": (versions.Embedding.give, "grad.clone()", "grad", given),
    "half a version is none":
        (versions.unread, "-(-max(1, schedule.promise[0] - 1) // table.per_update)",
         "max(1, schedule.promise[0] - 1) // table.per_update", unread),
    "a token meets all experts":
        (Experts.added, "self.top_k if active else self.experts", "self.experts", active),
    "nobody wakes the writer": (stream.Outgoing._reclaim, "semaphores.post(self._wakeup)", "pass", woken),
    "one copy of an object for all":
        (comm.gather_objects, "others * len(pickle.dumps(value))", "len(pickle.dumps(value))", objects),
    "the least urgent task first": (Scheduler.__init__, "-t.priority", "t.priority", urgent),
    "values that nobody reads are kept": (Interpreter.advance, "del values[name]", "pass", freed),
    "replicas as far apart as tensor ranks":
        (seconds.RankOnCluster.rings.func, "plan.tp * shard)", "plan.tp)", replicas),
    "dropout key without the seed":
        (Trainer._key, "(self.recipe.seed, self.steps)", "(0, self.steps)", KEY),
    "dropout key without the step":
        (Trainer._key, "(self.recipe.seed, self.steps)", "(self.recipe.seed, 0)", KEY),
    "evaluate returns the last loss":
        (Trainer.evaluate, "sum(losses) / len(losses)", "losses[-1]", EVALUATION),
    "evaluate outside autocast": (Trainer.evaluate, "with self._autocast():", "if True:", EVALUATION),
    "the norm loses the last element": (finish._norms, "x[end:]", "x[end:-1]", NORM),
    "rate one step ahead":
        (Trainer._update, "self.recipe.rate(self.steps)", "self.recipe.rate(self.steps + 1)", RATES),
    "the group's rate is the constant":
        (Trainer._update, 'group["lr"] = rate', 'group["lr"] = self.recipe.lr', RATES),
    "validation on the training split":
        (run._loop, 'Batches(*sizes, "val")', 'Batches(*sizes, "train")',
         test_effects.test_validation_is_on_five_batches_of_the_other_split),
    "validation of one batch, five times":
        (run._loop, "val.at(i) for i in range(5)", "val.at(0) for i in range(5)",
         test_effects.test_validation_is_on_five_batches_of_the_other_split),
    "batch seed 0":
        (run._loop, 'Batches(*sizes, "train")', 'Batches(*sizes[:3], 0, "train")',
         test_effects.test_the_seed_is_that_of_weights_and_of_batches),
    "the matrices do not decay":
        (make_optimizer, '"weight_decay": recipe.weight_decay', '"weight_decay": 0.0',
         (test_effects.test_an_option_changes_the_run, "weight_decay")),
    "no clipping":
        (finish.clip, "norm + 1e-6 > limit", "False", (test_effects.test_an_option_changes_the_run, "clip")),
    "the first entry of a step counts":
        (run.read_log, 'entries[-1]["step"] >= entry["step"]', 'entries[-1]["step"] > entry["step"]',
         test_effects.test_the_later_entry_of_a_step_counts),
    "dropout without / (1 - p)": (Dropout.forward, " / (1 - self.p)", "", ELEMENTS),
    "all channels share a mask":
        (Noise.keep, "h + channels.long() * 0x85EBCA6B", "h + 0 * channels.long()", ELEMENTS),
    "an element of exactly p goes": (Noise.keep, ">= p", "> p", ELEMENTS),
    "only rank 0 counts": (verify.worst, "max(claims, key=lambda claim: claim.size)", "claims[0]", WORST),
    "exact claims given the tolerance":
        (verify.Report._holds, "0 if claim.name in EXACT else self.tolerance", "self.tolerance",
         (test_effects.test_where_there_is_no_arithmetic_not_a_bit_may_differ, verify.EXACT[0])),
    "background copy without clone":
        (Entry.copy, 'b.tensor.to("cpu", copy=True)', 'b.tensor.to("cpu")', COPY),
    "the best prefers NaN":
        (checkpoint.best, " and math.isfinite(losses[p])", "",
         (test_checkpoint.test_the_best_is_never_one_whose_loss_is_no_number, float("nan"))),
    "SGD resumes at step 0":
        (checkpoint.load, 'trainer.steps = state["step"]', "trainer.steps = 0",
         test_effects.test_a_resumed_sgd_goes_on_at_its_step_and_an_export_keeps_its_numbers),
    "export always float64":
        (checkpoint.export, "dtype=None", "dtype=__import__('torch').float64",
         test_effects.test_a_resumed_sgd_goes_on_at_its_step_and_an_export_keeps_its_numbers),
    "gradients added in 16 bits":
        (Flat.add, "shard = shard.to(self.shard.dtype)",
         "self.grad = None if self.grad is None else self.grad.to(shard.dtype)", IN_32),
    "vocabulary loss without 32-bit sums":
        (tensor.VocabLoss.__call__, "summable(logits)", "logits",
         test_effects.test_the_loss_over_a_cut_vocabulary_sums_in_32_bits),
    "bubble of the idlest rank":
        (Timeline.bubble, "sum(map(self.busy, range(len(self.rows))))",
         "len(self.rows) * min(map(self.busy, range(len(self.rows))))", bubble),
    "fit with n - 1 freedom": (fit.fit, "len(x) - 2", "len(x) - 1", freedom),
    "time lost without restart": (failures.share_lost, "interval / 2 + restart", "interval / 2", lost),
}  # fmt: skip


@bugs(SURVIVED)
def test_mutant_that_once_survived_is_killed(bug, check):
    assert is_killed(bug, check), "nobody noticed"
