"""Bugs in the pipeline engine, planted on live ranks: verification notices each of them."""

from dataclasses import replace

import torch
from planting import bugs, controls, is_caught

from gpt2lab import verify
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.pipeline import engine, stages, step
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.pipeline.mailbox import Mailbox
from gpt2lab.parallel.pipeline.split_backward import Linear, Work
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.token_slices import SliceCache

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)


def nothing(right):
    return lambda *_: None


def receive_buffer_reused(right):
    def into_one_buffer(self, op):
        value = right(self, op)
        if op.kind != "F" or value.shape[0] != 2:
            return value
        if not hasattr(self, "buffer"):
            self.buffer = value.clone()
        self.buffer.data.copy_(value)  # as the network does, unseen by autograd
        return self.buffer

    return into_one_buffer


def last_in_first_out(right):
    def swapped(self, op):
        twin = op._replace(micro=op.micro ^ 1)
        both = op.kind == "I" and twin in self.source and self.like(op).shape == self.like(twin).shape
        return right(self, twin if both else op)

    return swapped


def other_layers(change):
    """A rank thinks that stages hold other layers than they do."""

    def make(right):
        def parts_of(*given):
            parts = right(*given)
            return stages.Parts(tuple(change(i, r) for i, r in enumerate(parts.layers)), parts.mine)

        return parts_of

    return make


def from_zero(right):
    return lambda *given: [replace(u, positions=torch.arange(len(u.positions))) for u in right(*given)]


BUGS = {
    "loss not divided": (PipelineStep._through, " / unit.total", "", "1f1b"),
    "loss divided by its own tokens":
        (PipelineStep._through, "unit.total", "((unit.targets != -100).sum() * self.schedule.micros)",
         "1f1b"),
    "targets of another micro-batch":
        (PipelineStep._through, "unit.targets", "unit.targets.roll(1, 0)", "gpipe"),
    "noise by the place in the micro-batch":
        (PipelineStep._through, "unit.samples", "torch.arange(len(unit.samples))", "1f1b dropout=0.2"),
    "embedding not tied": (Pipeline, "tie", nothing, "1f1b"),
    "embedding summed on one end only":
        (Pipeline.tie, "tensor.grad = total", "tensor.grad = tensor.grad if self.axis.rank else total", "zb_h1"),
    "tied copy counted in the norm":
        (stages.spec, "mark", lambda right: lambda p, **changes: None, "interleaved"),
    "receive buffer reused": (Mailbox, "take", receive_buffer_reused, "gpipe"),
    "gradients taken last in, first out": (Mailbox, "take", last_in_first_out, "gpipe"),
    "input gradient not sent": (PipelineStep._send_back, "op, grad)", "op, torch.zeros_like(grad))", "1f1b"),
    "embedding left out of backward": (Work.__init__, "output, before, list", "output, None, list", "zb_v"),
    "last layer of a stage skipped":
        (engine, "parts_of", other_layers(lambda stage, layers: layers if stage else layers[:-1]), "1f1b"),
    "a layer run by both stages":
        (engine, "parts_of", other_layers(lambda stage, r: range(r.start - 1, r.stop) if stage else r),
         "1f1b"),
    "weight gradient dropped":
        (PipelineStep.weight_gradient, "self.held[unit].weight_gradient()",
         "op.micro and self.held[unit].weight_gradient()", "zb_h1"),
    "weight gradient of one layer dropped":
        (Work.weight_gradient, "while self.linears:", "while self.linears[1:]:", "zb_h2"),
    "weight gradient counted in both halves":
        (Work.input_gradient, "of_x, *grads =",
         "torch.autograd.backward(self.output, grad, retain_graph=True); of_x, *grads =", "zb_h2"),
    "biases and norms lost between the halves":
        (Work.input_gradient, "if g is not None", "if g is not None and p.dim() > 1", "zb_v"),
    "gradients of other tokens": (Linear.keep, "self.dy = dy", "self.dy = dy.roll(1, 1)", "zb_h1"),
    "copies not summed": (Pipeline, "tie", nothing, "chimera"),
    "only the embedding of copies summed":
        (Pipeline.tie, "piece.name in self.shared", 'piece.name == "wte.weight"', "dualpipe"),
    "copies averaged":
        (Pipeline.tie, "tensor.grad = total", "tensor.grad = total / 2", "chimera"),
    "earlier slices get no gradient": (SliceCache.take_made, "return made", "return []", "terapipe"),
    "earlier slices forgotten":
        (SliceCache, "extend", lambda right: lambda self, attn, k, v, positions: (k, v), "terapipe"),
    "every slice starts at position zero": (step, "cut_columns", from_zero, "terapipe"),
    "forward run again with other noise":  # what runs again does so with gradients
        (PipelineStep._through, "*self.key", "self.key[0], self.key[1] + torch.is_grad_enabled()",
         "1f1b,recompute=true dropout=0.2"),
    "slices run again see the later ones":
        (SliceCache.extend, "*past[: self.at],", "*past[: self.at], *past[self.at + 1 :],",
         "terapipe,recompute=true"),
    "only the last micro-batch in the loss":
        (PipelineStep.forward, "self.loss += output.detach()", "self.loss = output.detach().double()",
         "gpipe"),
    "activations sent in single precision":
        (Mailbox.give, "comm.isend(value,", "comm.isend(value.float().to(value.dtype),", "1f1b"),
}  # fmt: skip


@bugs(BUGS)
def test_the_mutant_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, f"pp=2,micro=4,schedule={check}", CONFIG, 1e-9), "nobody noticed"


@controls(BUGS)
def test_without_a_mutant_the_same_plan_is_equal(pools, check):
    assert not is_caught(pools, None, f"pp=2,micro=4,schedule={check}", CONFIG, verify.TOLERANCE)
