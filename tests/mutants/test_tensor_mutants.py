"""Bugs in tensor and sequence parallelism, planted on the ranks: verification notices each of them."""

import importlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from planting import is_noticed

from gpt2lab.model import GPT2Config
from gpt2lab.parallel import sequence, spec, tensor
from gpt2lab.ranks import comm

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=16)
PARTLY_DROPPED = replace(CONFIG, dropout=0.2)


@pytest.fixture
def ranks(pools):
    return pools[2]


def without_f(self, x):
    return x


def g_that_sums_twice(self, x):
    """torch.distributed.nn.functional.all_reduce does this: its backward reduces again."""
    return comm.copy_to(comm.reduce_from(x, self.axis), self.axis)


def bias_on_every_rank(self, x):
    return self.edge.leave(F.linear(x, self.weight) + self.bias)


def qkv_cut_as_one(self, linear, edge, groups=1):
    tensor.ColumnLinear.right(self, linear, edge, 1)


def rank_zeros_shard_for_all(p, axis, dim, groups=1):
    alike = p.size(dim) % axis.size == 0  # uneven slices would not even fit
    return spec.right(p, replace(axis, rank=0) if alike else axis, dim, groups)


def shards_drawn_anew(p, axis, dim, groups=1):
    new = spec.right(p, axis, dim, groups)
    generator = torch.Generator().manual_seed(0)
    new.data = torch.randn(new.shape, generator=generator, dtype=new.dtype)
    return new


def softmax_over_the_shard(logits, targets, axis, first):
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    chosen = logits.log_softmax(-1).gather(-1, place.where(here, 0)[:, None])[:, 0]
    return -comm.reduce_from(chosen.where(here & (targets != -100), 0).sum(), axis)


def own_maximum(logits, targets, axis, first):
    """Each rank subtracts its own maximum: the sums of exponentials do not belong together."""
    real = comm.all_reduce
    comm.all_reduce = lambda x, axis, op="sum", **more: x if op == "max" else real(x, axis, op, **more)
    try:
        return tensor.VocabLoss.right(logits, targets, axis, first)
    finally:
        comm.all_reduce = real


def first_token_off_by_one(vocab_size, axis):
    return tensor.right(vocab_size, axis) + axis.rank


def mean_instead_of_sum(self, x):
    return comm.reduce_from(x, self.axis) / self.axis.size


def rows_of_all_ranks_looked_up(self, tokens):
    """Tokens of other ranks are not masked to zero."""
    return self.edge.leave(F.embedding((tokens - self.first).clamp(0, len(self.weight) - 1), self.weight))


def replicas_counted_twice(held, mesh):
    total = sum(p.tensor.grad.square().sum() for p in held)
    return comm.all_reduce(total, mesh.world).sqrt().item()


def partial_sums_left_alone(held, mesh):
    pass


def nothing_marked(axis, *modules, biases=()):
    pass


def row_biases_forgotten(axis, *modules, biases=()):
    sequence.right(axis, *modules)


def gather_without_sum(self, x):
    """all_gather whose backward keeps the own slice: right only where all ranks use the result alike."""
    return comm.gather_replicated(x, self.axis, 1, self.sizes)


def linear_with_wrong_gather(self, x, weight, bias=None):
    return F.linear(gather_without_sum(self, x), weight, bias)


def positions_from_zero(self, positions):
    return positions[..., : self.sizes[self.axis.rank]]


TENSOR, SEQUENCE = "parallel.tensor", "parallel.sequence"
MUTANTS = {
    "f is missing": (TENSOR, "Edge.enter", without_f, "tp=2"),
    "g sums in backward too": (TENSOR, "Edge.leave", g_that_sums_twice, "tp=2"),
    "g takes the mean": (TENSOR, "Edge.leave", mean_instead_of_sum, "tp=2"),
    "row bias added on every rank": (TENSOR, "RowLinear.forward", bias_on_every_rank, "tp=2"),
    "q, k, v cut as one matrix": (TENSOR, "ColumnLinear.__init__", qkv_cut_as_one, "tp=2"),
    "rank 0's shard on all ranks": ("parallel.spec", "cut", rank_zeros_shard_for_all, "tp=2"),
    "shards drawn anew with one seed": ("parallel.spec", "cut", shards_drawn_anew, "tp=2"),
    "softmax over the shard": (TENSOR, "_VocabLoss.apply", softmax_over_the_shard, "tp=2"),
    "no shared maximum": (TENSOR, "_VocabLoss.apply", own_maximum, "tp=2"),
    "vocabulary offset off by one": (TENSOR, "first_token", first_token_off_by_one, "tp=2"),
    "foreign tokens not masked": (TENSOR, "VocabEmbedding.forward", rows_of_all_ranks_looked_up, "tp=2"),
    "replicas counted twice in the norm": (
        "parallel.finish",
        "gradient_norm",
        replicas_counted_twice,
        "tp=2",
    ),
    "partial sums not completed": ("parallel.finish", "sum_partial", partial_sums_left_alone, "tp=2,sp=on"),
    "norms not marked partial": (SEQUENCE, "_partial", nothing_marked, "tp=2,sp=on"),
    "row biases not marked partial": (SEQUENCE, "_partial", row_biases_forgotten, "tp=2,sp=on"),
    "gather without the sum in backward": (
        SEQUENCE,
        "SequenceEdge.linear",
        linear_with_wrong_gather,
        "tp=2,sp=on",
    ),
    "positions counted from zero": (SEQUENCE, "SequenceEdge.mine", positions_from_zero, "tp=2,sp=on"),
}


@contextmanager
def in_place(module, path, bug):
    """Put the bug in place of the right function (kept as `right` beside it) for the time of a `with` block."""
    home = importlib.import_module(f"gpt2lab.{module}")
    *owner, name = path.split(".")
    place = getattr(home, owner[0]) if owner else home
    own, right = name in vars(place), getattr(place, name)
    place.right = right
    setattr(place, name, staticmethod(bug) if name == "apply" else bug)
    if path == "_VocabLoss.apply":
        home.VocabLoss.right = staticmethod(right)
    try:
        yield
    finally:
        setattr(place, name, right) if own else delattr(place, name)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_noticed(ranks, name):
    *bug, plan = MUTANTS[name]
    assert is_noticed(ranks, partial(in_place, *bug), plan, CONFIG), f"nobody noticed: {name}"


def shifted_masks(edge, place, *modules):
    """Dropout of the own tokens drawn for positions from zero on every rank."""
    shift = lambda module, inputs: (
        *inputs[:place],
        inputs[place][..., : edge.sizes[edge.axis.rank]] if place else edge.mine(inputs[place]),
        *inputs[place + 1 :],
    )
    for module in modules:
        module.register_forward_pre_hook(shift)


def test_equal_dropout_masks_in_the_cut_region_are_noticed(ranks):
    bug = partial(in_place, SEQUENCE, "_own_positions", shifted_masks)
    assert is_noticed(ranks, bug, "tp=2,sp=on", PARTLY_DROPPED)
    assert not is_noticed(ranks, bug, "tp=2,sp=on", CONFIG, 1e-10)


def test_nothing_is_noticed_without_a_bug(ranks):
    """The bugs are put back, and the plan itself is right: what is noticed above is the bug."""
    for plan in ("tp=2", "tp=2,sp=on"):
        assert not is_noticed(ranks, None, plan, CONFIG, 1e-10)
    assert len(MUTANTS) >= 12
