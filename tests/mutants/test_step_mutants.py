"""Bugs in the training step itself, which every plan shares: verification notices each of them."""

import importlib
from contextlib import contextmanager
from functools import partial

import pytest
from planting import is_noticed

from gpt2lab.parallel import accumulate, finish
from gpt2lab.reference import CONFIG


@pytest.fixture
def ranks(pools):
    return pools[3]


def mean_of_means(model, micro, key):
    loss = accumulate.right(model, micro, key)
    return loss * micro.total / (micro.targets != -100).sum() / 3


def norm_with_replicas(held, mesh):
    return finish.right(held, mesh) * mesh["dp"].size ** 0.5


def first_rows_for_everyone(self, axis_rank, axis_size):
    return type(self).right(self, 0 if axis_size == 3 else axis_rank, axis_size)


def clip_each_by_itself(held, norm, limit):
    for p in held:
        own = p.tensor.grad.norm().item()
        finish.right([p], own, limit)


def no_clipping(held, norm, limit):
    pass


def one_noise_for_all(model, micro, key):
    from dataclasses import replace

    return accumulate.right(model, replace(micro, samples=micro.samples * 0), key)


def decay_everything(held, recipe, tensor_axis=None):
    import torch

    return torch.optim.AdamW(
        [p.tensor for p in held], recipe.lr, recipe.betas, recipe.eps, weight_decay=recipe.weight_decay
    )


MUTANTS = {
    "mean of the ranks' means": ("parallel.accumulate", "micro_loss", mean_of_means),
    "replicas counted in the norm": ("parallel.finish", "gradient_norm", norm_with_replicas),
    "all ranks read the first rows": ("corpus.batches", "Batch.rows", first_rows_for_everyone),
    "clipped tensor by tensor": ("parallel.finish", "clip", clip_each_by_itself),
    "not clipped": ("parallel.finish", "clip", no_clipping),
    "one dropout mask for all samples": ("parallel.accumulate", "micro_loss", one_noise_for_all),
    "biases and norms decayed": ("train", "make_optimizer", decay_everything),
}


@contextmanager
def in_place(module, path, bug):
    """Put the bug in place of the right function (kept as `right` beside it) for the time of a `with` block."""
    home = importlib.import_module(f"gpt2lab.{module}")
    *owner, name = path.split(".")
    place = getattr(home, owner[0]) if owner else home
    right = getattr(place, name)
    place.right = right
    setattr(place, name, bug)
    try:
        yield
    finally:
        setattr(place, name, right)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_noticed(ranks, name):
    from dataclasses import replace

    config = replace(CONFIG, dropout=0.2) if "dropout" in name else CONFIG
    assert is_noticed(ranks, partial(in_place, *MUTANTS[name]), "dp=3", config), f"nobody noticed: {name}"
