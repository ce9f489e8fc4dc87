"""What live ranks send, hold and keep is what the formulas say, byte for byte: padding and uneven chunks included."""

from dataclasses import replace

import pytest
import torch
from equality import spelled_out
from tensor_cases import CONFIG, kept_of_a_layer, of_a_layer, step_traffic
from trained import TINY, run

from gpt2lab.lessons.labs.node_traffic import BETWEEN, INSIDE, by_class
from gpt2lab.machine.memory import after_backward
from gpt2lab.model import GPT2
from gpt2lab.parallel.zero.costs import (
    all_reduce_bytes,
    bucket_bytes_sent,
    bytes_held,
    messages_sent,
    owner_bytes_sent,
    parts,
    shard_length,
    zero_bytes_sent,
)
from gpt2lab.parallel.zero.flat import owner_of
from gpt2lab.plan import Plan
from gpt2lab.planner import tensor_costs
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch

MODEL = GPT2(TINY).double()
SIZES = parts(MODEL)


def sent(trainer, batch):
    """Bytes of a step, over the axis of those who have other rows."""
    trainer.step(batch)
    return sum(size for (_, axis), (_, size, _) in comm.traffic().items() if axis == "dp+cp")


def sums(trainer, batch):
    """Bytes of each sum of gradients in a step, in order."""
    trainer.step(batch)
    return [e.bytes for e in comm.log if e.op == "all_reduce" and e.axis == "dp+cp"]


def links(trainer, batch):
    """Bytes of a step in a group, which has a machine of its own, and of one to the next."""
    trainer.step(example_batch(TINY, 12, 11))
    found = by_class(comm.log, trainer.parallel.mesh.rank, trainer.parallel.plan.shard)
    return {key: size for key, size in found.items() if key[0] != "world"}


def of_links(plan, rank):
    """Only the shard's gradient leaves a group, once a step, however many micro-batches."""
    inside = zero_bytes_sent(SIZES, plan.zero, plan.shard, plan.micro, 8)
    groups, lengths = plan.dp // plan.shard, [shard_length(size, plan.shard) for size in SIZES.values()]
    across = sum(all_reduce_bytes(length, groups, rank // plan.shard, 8) for length in lengths)
    return {("dp+cp", INSIDE): inside, ("replica", BETWEEN): across}


def of_owner(plan, rank):
    """A view of length 0 would still keep a whole block's summed gradients; one number stands in for every part."""
    mine = sum(size for i, size in enumerate(SIZES.values()) if owner_of(i, len(SIZES), plan.dp) == rank)
    return {"weights": 8 * (mine + len(SIZES)), "gradients": 8 * mine, "optimizer": 16 * mine}


def of_emptied(plan, rank):
    """As in stage 3, without the element that stands in for each part."""
    held = bytes_held(SIZES, 3, plan.dp, rank, 8)
    return held | {"weights": held["weights"] - 8 * len(SIZES)}


FORMULAS = [  # what is counted on every rank, the plans, and the formula
    (sums, "dp={2|3|5},bucket=2 dp={2|3},micro=2,bucket=2 dp=3,bucket=1 dp=3,data=naive",
     lambda p, rank: messages_sent(MODEL, 0 if p.data == "naive" else 1024 * p.bucket, p.dp, rank)),
    (sent, "dp={2|3|5},bucket=2 dp={2|3},micro=2,bucket=2",
     lambda p, rank: bucket_bytes_sent(MODEL, 2048, p.dp, rank)),
    (sent, "dp={2|3|5},zero={1|2|3} dp=2,micro=3,zero={1|2|3}",
     lambda p, rank: zero_bytes_sent(SIZES, p.zero, p.dp, p.micro, 8)),
    (sent, "dp={1|2|3|5},zero=3,data=owner dp=2,micro=3,zero=3,data=owner",
     lambda p, rank: owner_bytes_sent(SIZES, p.dp, rank, p.micro, 8)),
    (links, "dp={4,shard=2|6,shard=2|6,shard=3},micro={1|2},zero={1|2|3}", of_links),
    (after_backward, "dp={1|2|3|5},zero={0|1|2|3}",
     lambda p, rank: bytes_held(SIZES, p.zero, p.dp, rank, 8)),
    (after_backward, "dp={1|2|3|5},zero=3,data=owner", of_owner),
    (after_backward, "dp={2|3},zero=3,refill=on", of_emptied),
]  # fmt: skip
CASES = [
    pytest.param(counted, plan, formula, id=f"{counted.__name__} {plan}")
    for counted, plans, formula in FORMULAS
    for text in plans.split()
    for plan in spelled_out(text)
]


@pytest.mark.parametrize("counted, plan, formula", CASES)
def test_bytes_of_data_parallelism_are_those_of_the_formula(pools, counted, plan, formula):
    for rank, found in enumerate(run(pools, counted, plan)):
        assert found == formula(Plan.parse(plan), rank)


def test_messages_and_owners_are_many():
    assert all(len(messages_sent(MODEL, size, 2, 0)) > 4 for size in (0, 1024, 2048))
    assert len(set(messages_sent(MODEL, 1024, 3, 0))) > 3
    assert sum(of_owner(Plan(dp=5), rank)["gradients"] for rank in range(5)) == 8 * TINY.parameters


# ---- tensor and sequence parallelism

TWELVE_HEADS = replace(CONFIG, n_head=12)
CUTS = [
    (False, True),
    (True, True),
    (True, False),
]  # whether the sequence is cut, and the gathered input let go


def cut(length, n, element=8):
    return tensor_costs.Shape(3, length, CONFIG.n_embd, 12, n, element)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [11, 12])
@pytest.mark.parametrize("sp, lean", CUTS)
def test_bytes_of_tensor_parallelism_are_those_of_the_formula(pools, n, length, sp, lean):
    shape = cut(length, n)
    for rank, found in enumerate(pools[n].run(step_traffic, TWELVE_HEADS, 3, length, sp, lean)):
        assert found == tensor_costs.step_bytes(shape, CONFIG.n_layer, rank, sp, lean)
    if not (sp and lean):  # 4 all-reduces of (B, T, C), or as much: each 2 (n-1)/n of it a rank
        layers = [of_a_layer(shape, rank, sp, lean).total() for rank in range(n)]
        assert sum(layers) == 4 * 2 * (n - 1) * 3 * length * CONFIG.n_embd * 8


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length, dtype", [(11, torch.float32), (11, torch.float64), (12, torch.float64)])
@pytest.mark.parametrize("sp, lean", CUTS)
def test_activations_kept_are_those_of_the_formula(pools, n, length, dtype, sp, lean):
    shape = cut(length, n, dtype.itemsize)
    found = pools[n].run(kept_of_a_layer, TWELVE_HEADS, 3, length, dtype, sp, lean)
    assert found == [tensor_costs.kept_bytes(shape, rank, sp, lean) for rank in range(n)]
    if sp and lean and length == 12:
        softmax = 3 * 12 * (12 // n) * 8
        assert found[0] - softmax == 3 * 12 * (16 * 24 + 4) * 8 / n


def test_one_rank_keeps_sixteen_activations():
    kept = kept_of_a_layer(0, 1, TWELVE_HEADS, 3, 11, torch.float64, False, True)
    assert kept == tensor_costs.kept_bytes(cut(11, 1)) == 3 * 11 * (16 * 24 + 4 + 12) * 8
