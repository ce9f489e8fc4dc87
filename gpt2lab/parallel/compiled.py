"""A model whose blocks torch.compile has made faster, and its end: head and loss as one."""

import shutil

import torch

from .chunked_loss import ChunkedLoss


def check(plan) -> None:
    """Raise ValueError where torch.compile cannot work: it needs a C++ compiler and blocks that are whole."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise ValueError("--compile needs a C++ compiler (g++ or clang++), and none is here. Leave it out.")
    if (plan.pp, plan.cp, plan.tp, plan.zero) != (1, 1, 1, 0):
        raise ValueError(
            f"--compile takes whole blocks, and {plan} cuts them. Use a plan with dp alone, or none."
        )


def compile_model(model) -> None:
    """Compile a model for training; its output is no logits then.

    A vocabulary of odd width takes a GPU three times as long as an even one. Inside one graph of head and loss the
    compiler adds columns to the logits and takes them away again, which costs no copy.
    """
    for block in model.h.values():
        block.compile()
    if not isinstance(model.loss, ChunkedLoss):
        head, loss = model.head, model.loss
        model.head, model.loss = (lambda x, pick=None: x), torch.compile(lambda x, y: loss(head(x), y))
