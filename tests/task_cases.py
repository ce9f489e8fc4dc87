"""A small GPT-2 as tasks, in float64, whose sizes nothing divides, and how to compare two of them."""

from dataclasses import replace

import torch

from gpt2lab.lessons.labs.instruments import apart
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.tasks.gpt2 import Blocks, GPT2Tasks

CONFIG = GPT2Config(vocab_size=37, n_positions=13, n_layer=2, n_head=3, n_embd=12)
SMALL = Blocks(tokens=20, rows=2, heads=2, columns=9, weights=60, updates=100)
WHOLE = Blocks(tokens=0, rows=0, weights=0, updates=0)
ROWS, LENGTH = 7, 11


def model():
    made = GPT2(CONFIG).double()
    made.load_state_dict(example_weights(CONFIG))
    return made


def batch(iteration=0):
    found = example_batch(CONFIG, ROWS, LENGTH)
    return replace(found, tokens=(found.tokens + iteration) % CONFIG.vocab_size)


def made(blocks=SMALL, optimizer=None):
    give = lambda iteration: (batch(iteration).tokens, batch(iteration).targets)
    options = {"optimizer": optimizer} if optimizer else {}
    return GPT2Tasks(model(), ROWS, LENGTH, give, blocks, total=batch().total, **options)


def worst(found, want):
    assert found.keys() == want.keys()
    return apart(found, want)


def same(one, other):
    pairs = zip((one.weights, one.gradients), (other.weights, other.gradients), strict=True)
    return one.losses == other.losses and all(torch.equal(a[n], b[n]) for a, b in pairs for n in a)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=0.01, weight_decay=0.1, fused=True)


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)
