"""Bugs in the pipeline engine, planted on live ranks: verification notices each of them."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from planting import is_noticed

from gpt2lab import verify
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.pipeline import engine, stages, step, token_slices
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.pipeline.mailbox import Mailbox
from gpt2lab.parallel.pipeline.split_backward import Linear, Work
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.token_slices import SliceCache
from gpt2lab.ranks import comm

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)


@pytest.fixture
def ranks(pools):
    return pools[2]


def loss_not_divided(patch):
    right = PipelineStep._through
    undivided = lambda self, op, x: _with_units(self, op, x, right, total=1)
    patch(PipelineStep, "_through", undivided)


def _with_units(step, op, x, right, **changes):
    """Run `_through` while the micro-batch of `op` is changed."""
    unit = step.units[op.micro]
    step.units[op.micro] = replace(unit, **changes)
    try:
        return right(step, op, x)
    finally:
        step.units[op.micro] = unit


def loss_divided_by_its_own_tokens(patch):
    right = PipelineStep._through

    def mean_of_means(self, op, x):
        own = int((self.units[op.micro].targets != -100).sum()) * self.schedule.micros
        return _with_units(self, op, x, right, total=own)

    patch(PipelineStep, "_through", mean_of_means)


def targets_of_another_micro_batch(patch):
    right = PipelineStep._through

    def shifted(self, op, x):
        targets = self.units[op.micro].targets
        return _with_units(self, op, x, right, targets=targets.roll(1, 0))

    patch(PipelineStep, "_through", shifted)


def noise_by_the_place_in_the_micro_batch(patch):
    right = PipelineStep._through

    def local(self, op, x):
        samples = self.units[op.micro].samples
        return _with_units(self, op, x, right, samples=torch.arange(len(samples)))

    patch(PipelineStep, "_through", local)


def embedding_not_tied(patch):
    patch(Pipeline, "tie", lambda self, pieces, mesh: None)


def embedding_summed_on_one_end_only(patch):
    right = Pipeline.tie

    def one_end(self, pieces, mesh):
        own = {p.name: p.tensor.grad.clone() for p in pieces}
        right(self, pieces, mesh)
        for p in pieces if self.axis.rank else ():
            p.tensor.grad = own[p.name]

    patch(Pipeline, "tie", one_end)


def tied_copy_counted_in_the_norm(patch):
    patch(stages.spec, "mark", lambda p, **changes: None)


def receive_buffer_reused(patch):
    right = Mailbox.take

    def into_one_buffer(self, op):
        value = right(self, op)
        if op.kind != "F" or value.shape[0] != 2:
            return value
        if not hasattr(self, "buffer"):
            self.buffer = value.clone()
        self.buffer.data.copy_(value)  # as the network does, unseen by autograd
        return self.buffer

    patch(Mailbox, "take", into_one_buffer)


def gradients_taken_last_in_first_out(patch):
    right = Mailbox.take

    def swapped(self, op):
        twin = op._replace(micro=op.micro ^ 1)
        both = op.kind == "I" and twin in self.source and self.like(op).shape == self.like(twin).shape
        return right(self, twin if both else op)

    patch(Mailbox, "take", swapped)


def input_gradient_not_sent(patch):
    right = PipelineStep._send_back
    patch(PipelineStep, "_send_back", lambda self, op, grad: right(self, op, torch.zeros_like(grad)))


def embedding_left_out_of_backward(patch):
    right = Work.__init__
    patch(Work, "__init__", lambda self, x, output, before=None, *more: right(self, x, output, None, *more))


def last_layer_of_a_stage_skipped(patch):
    right = engine.parts_of

    def short(schedule, rank, config):
        parts = right(schedule, rank, config)
        layers = tuple(r[:-1] if i == 0 else r for i, r in enumerate(parts.layers))
        return stages.Parts(layers, parts.mine)

    patch(engine, "parts_of", short)


def a_layer_run_by_both_stages(patch):
    right = engine.parts_of

    def long(schedule, rank, config):
        parts = right(schedule, rank, config)
        layers = tuple(range(r.start - 1, r.stop) if i else r for i, r in enumerate(parts.layers))
        return stages.Parts(layers, parts.mine)

    patch(engine, "parts_of", long)


def weight_gradient_dropped(patch):
    right = PipelineStep.weight_gradient

    def forgetful(self, op):
        right(self, op) if op.micro else self.held.pop((op.stage, op.micro))

    patch(PipelineStep, "weight_gradient", forgetful)


def weight_gradient_of_one_layer_dropped(patch):
    right = Work.weight_gradient

    def forgetful(self):
        self.linears = self.linears[1:]
        right(self)

    patch(Work, "weight_gradient", forgetful)


def weight_gradient_counted_in_both_halves(patch):
    right = Work.input_gradient

    def both(self, grad):
        torch.autograd.backward(self.output, grad, retain_graph=True)
        return right(self, grad)

    patch(Work, "input_gradient", both)


def biases_and_norms_lost_between_the_halves(patch):
    right = Work.input_gradient

    def matrices_only(self, grad):
        of_x = right(self, grad)
        self.kept = {t: g for t, g in self.kept.items() if t.dim() > 1}
        return of_x

    patch(Work, "input_gradient", matrices_only)


def gradients_of_other_tokens(patch):
    right = Linear.keep

    def shifted(self, dy):
        right(self, dy.roll(1, 1))

    patch(Linear, "keep", shifted)


def copies_not_summed(patch):
    patch(Pipeline, "tie", lambda self, pieces, mesh: None)


def only_the_embedding_of_copies_summed(patch):
    right = Pipeline.tie

    def wte_only(self, pieces, mesh):
        self.shared = {"wte.weight"}
        right(self, pieces, mesh)

    patch(Pipeline, "tie", wte_only)


def copies_averaged(patch):
    def mean(self, pieces, mesh):
        for p in pieces:
            p.tensor.grad = comm.all_reduce(p.tensor.grad, self.twins) / 2

    patch(Pipeline, "tie", mean)


def earlier_slices_get_no_gradient(patch):
    patch(SliceCache, "take_made", lambda self: [])


def earlier_slices_forgotten(patch):
    def alone(self, attn, k, v, positions):
        return k, v

    patch(SliceCache, "extend", alone)


def slices_run_again_see_the_later_ones(patch):
    def everything(self, attn, k, v, positions):
        past = self.past.setdefault(attn, [])
        keys, values = zip(*past, (k, v), strict=True)
        past.append(tuple(t.detach().requires_grad_() for t in (k, v)))
        self.made += zip((k, v), past[-1], strict=True)
        return torch.cat(keys, -2), torch.cat(values, -2)

    patch(SliceCache, "extend", everything)


def every_slice_starts_at_position_zero(patch):
    right = token_slices.cut_columns

    def restart(micro, count, lengths=None):
        units = right(micro, count, lengths)
        return [replace(u, positions=torch.arange(len(u.positions))) for u in units]

    patch(step, "cut_columns", restart)


def forward_run_again_with_other_noise(patch):
    right = PipelineStep._recall

    def fresh(self, op):
        key, self.key = self.key, (self.key[0], self.key[1] + 1)
        try:
            return right(self, op)
        finally:
            self.key = key

    patch(PipelineStep, "_recall", fresh)


def only_the_last_micro_batch_in_the_loss(patch):
    right = PipelineStep.forward

    def overwrite(self, op):
        if self._last(op):
            self.loss.zero_()
        right(self, op)

    patch(PipelineStep, "forward", overwrite)


def activations_sent_in_single_precision(patch):
    right = Mailbox.give
    patch(Mailbox, "give", lambda self, op, value: right(self, op, value.float().to(value.dtype)))


MUTANTS = {
    loss_not_divided: "1f1b",
    loss_divided_by_its_own_tokens: "1f1b",
    targets_of_another_micro_batch: "gpipe",
    noise_by_the_place_in_the_micro_batch: "1f1b",
    embedding_not_tied: "1f1b",
    embedding_summed_on_one_end_only: "zb_h1",
    tied_copy_counted_in_the_norm: "interleaved",
    receive_buffer_reused: "gpipe",
    gradients_taken_last_in_first_out: "gpipe",
    input_gradient_not_sent: "1f1b",
    embedding_left_out_of_backward: "zb_v",
    last_layer_of_a_stage_skipped: "1f1b",
    a_layer_run_by_both_stages: "1f1b",
    weight_gradient_dropped: "zb_h1",
    weight_gradient_of_one_layer_dropped: "zb_h2",
    weight_gradient_counted_in_both_halves: "zb_h2",
    biases_and_norms_lost_between_the_halves: "zb_v",
    gradients_of_other_tokens: "zb_h1",
    copies_not_summed: "chimera",
    only_the_embedding_of_copies_summed: "dualpipe",
    copies_averaged: "chimera",
    earlier_slices_get_no_gradient: "terapipe",
    earlier_slices_forgotten: "terapipe",
    every_slice_starts_at_position_zero: "terapipe",
    forward_run_again_with_other_noise: "1f1b,recompute=true",
    slices_run_again_see_the_later_ones: "terapipe,recompute=true",
    only_the_last_micro_batch_in_the_loss: "gpipe",
    activations_sent_in_single_precision: "1f1b",
}


@contextmanager
def in_place(bug):
    """Plant the bug for the time of a `with` block; None plants nothing."""
    undo = []

    def patch(place, name, wrong):
        undo.append((place, name, getattr(place, name)))
        setattr(place, name, wrong)

    if bug is not None:
        bug(patch)
    try:
        yield
    finally:
        for place, name, right in reversed(undo):
            setattr(place, name, right)


@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.__name__)
def test_the_mutant_is_noticed(ranks, bug):
    plan = f"pp=2,micro=4,schedule={MUTANTS[bug]}"
    config = replace(CONFIG, dropout=0.2) if "noise" in bug.__name__ else CONFIG
    assert is_noticed(ranks, partial(in_place, bug), plan, config, 1e-9), f"nobody noticed: {bug.__name__}"


@pytest.mark.parametrize("name", sorted({*MUTANTS.values()}))
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_without_a_mutant_the_same_plan_is_equal(ranks, name, dropout):
    plan = f"pp=2,micro=4,schedule={name}"
    assert not is_noticed(ranks, None, plan, replace(CONFIG, dropout=dropout), verify.TOLERANCE)
