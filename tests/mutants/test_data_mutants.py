"""Bugs in data parallelism and ZeRO, planted on the ranks: verification notices each of them."""

from dataclasses import replace

import pytest
import torch
from planting import is_noticed, planted
from trained import in_flight, run

from gpt2lab import RankFailed
from gpt2lab.corpus.batches import IGNORED, Batch
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import data, servers
from gpt2lab.parallel.zero import flat, stages
from gpt2lab.ranks import comm

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=2, n_embd=8)


@pytest.fixture
def ranks(pools):
    return pools[2]


def afterwards(change):
    """A bug that first does the right thing, then `change(self)`."""

    def make(right):
        def wrong(self, *args):
            result = right(self, *args)
            change(self)
            return result

        return wrong

    return make


def instead(wrong):
    """A bug that does something else."""
    return lambda right: wrong


def averaged(bucket):
    for p in bucket.parameters:
        p.grad = p.grad / 2


def first_bucket_stays_home(right):
    def send(self, axis):
        right(self, replace(axis, ranks=(0,), rank=0) if self.parameters[0].dim() > 1 else axis)

    return send


def mixed_up(self):
    """The sums of neighbours of equal shape change places."""
    for a, b in zip(self.parameters[::2], self.parameters[1::2], strict=False):
        if a.shape == b.shape:
            a.grad, b.grad = b.grad, a.grad


def local_total(right):
    """Each rank divides by its own number of tokens: a mean of means, halved to look right on even batches."""

    def rows(self, rank, size):
        mine = right(self, rank, size)
        return replace(mine, total=int((mine.targets != IGNORED).sum()) * size)

    return rows


def discarded_copy(self):
    for p in self.pieces:
        comm.all_reduce(p.tensor.grad.clone(), self.axis)


def weights_averaged(self):
    """No gradient is sent; after the update the weights are averaged (as some "local SGD" by mistake)."""
    with torch.no_grad():
        for p in self.pieces:
            p.tensor.copy_(comm.all_reduce(p.tensor.detach(), self.axis) / self.axis.size)


def lost_rows(self, rank, size):
    each = len(self.samples) // size
    return self._pick(torch.arange(rank * each, (rank + 1) * each))


def deaf_server(right):
    """The server forgets what the last worker pushed, but receives it."""

    def finish(self):
        kept = [p.tensor.grad.clone() for p in self.pieces if p.tensor.numel()]
        right(self)
        for p, grad in zip([p for p in self.pieces if p.tensor.numel()], kept, strict=True):
            p.tensor.grad = grad

    return finish


def neighbours_shard(right):
    def __init__(self, named, axis, place=0):
        right(self, named, axis, place)
        self.first = self.length * ((axis.rank + 1) % axis.size)

    return __init__


def no_decay(right):
    return lambda self: [replace(p, decay=p.tensor.dim() >= 2) for p in right(self)]


def overwritten(self, shard):
    self.grad = shard


def never_dropped(right):
    """The parameters look freed, but the next gather finds the old weights."""

    def drop(self):
        old = self.full
        right(self)
        self.full = old

    return drop


def filled_with_nothing(self, i):
    for f in self.blocks[i]:
        f.gather()
        f.full.zero_()


def layer_0_forgotten(right):
    """The lecture's loop runs from the last layer to layer 1."""

    def _send(self, f):
        if f.names[0].startswith("h.0."):
            f.whole_grad.zero_()
        right(self, f)

    return _send


def shrinking(right):
    """The owner's old gradient is not cleared but divided by the ranks (the lecture's reduce with AVG)."""

    def _hand_out(self):
        right(self)
        for f in self.flats:
            f.grad = torch.cat([p.tensor.grad for p in self.pieces if p.name in f.names] or [f.shard[:0]]) / 2
            f.grad = f.grad if len(f.grad) == f.length else torch.zeros_like(f.shard)

    return _hand_out


BUGS = {
    "averages": (data.Bucket, "receive", afterwards(averaged), "dp=2,bucket=1"),
    "one bucket not reduced": (data.Bucket, "send", first_bucket_stays_home, "dp=2,bucket=1"),
    "sums change places": (data.Bucket, "receive", afterwards(mixed_up), "dp=2,bucket=64"),
    "last bucket lost": (data, "into_buckets", lambda right: lambda p, b: right(p, b)[:-1], "dp=2,bucket=1"),
    "accumulated gradients missed": (
        data.Buckets,
        "_arrived",
        lambda right: lambda self, i, p: right(self, i, p) if self.sending else setattr(p, "grad", None),
        "dp=2,micro=2,bucket=1",
    ),
    "sent before the last micro-batch": (
        data.Buckets,
        "__init__",
        afterwards(data.Buckets.last_micro),
        "dp=2,micro=2,bucket=1",
    ),
    "mean of means": (Batch, "rows", local_total, "dp=2"),
    "all ranks read share 0": (Batch, "rows", lambda right: lambda self, r, n: right(self, 0, n), "dp=2"),
    "rows lost by integer division": (Batch, "rows", instead(lost_rows), "dp=2"),
    "sum of a discarded copy": (data.Naive, "finish", instead(discarded_copy), "dp=2,data=naive"),
    "no sum at all": (data.Naive, "finish", instead(data.Replicas.finish), "dp=2,data=naive"),
    "weights averaged, not gradients": (
        data,
        "Naive",
        lambda right: type("Averaging", (data.Replicas,), {"updated": weights_averaged}),
        "dp=2,data=naive",
    ),
    "server forgets a worker": (servers.Servers, "finish", deaf_server, "dp=2,data=servers"),
    "workers keep old weights": (servers.Servers, "updated", instead(lambda self: None), "dp=2,data=server"),
    "stale weights": (stages.Zero1, "updated", instead(lambda self: None), "dp=2,zero=1"),
    "wrong owner's shard": (flat.Flat, "__init__", neighbours_shard, "dp=2,zero=1"),
    "no decay after flattening": (flat.Flat, "pieces", no_decay, "dp=2,zero=2"),
    "norm of rank 0's shard": (flat.Flat, "_marked", lambda right: lambda self, p: p.spec, "dp=2,zero=2"),
    "micro-batch overwrites the one before": (flat.Flat, "add", instead(overwritten), "dp=2,micro=2,zero=2"),
    "old weights after the update": (flat.Flat, "drop", never_dropped, "dp=2,zero=3"),
    "filled with nothing": (
        stages.Zero3,
        "_before_backward",
        instead(filled_with_nothing),
        "dp=2,zero=3,refill=on",
    ),
    "layer 0 never updated": (stages.Zero3, "_send", layer_0_forgotten, "dp=2,zero=3,data=owner"),
    "old gradient shrinks": (stages.Zero1, "_hand_out", shrinking, "dp=2,zero=3"),
    "weights freed before backward": (
        stages.Zero3,
        "_after_block",
        lambda right: lambda self, i: [f.drop() for f in self.blocks[i]] and None,
        "dp=2,zero=3",
    ),
    "shards joined in the wrong order": (
        flat.Flat,
        "join_shards",
        lambda right: lambda self, shard: right(self, shard).view(self.axis.size, -1).flip(0).flatten(),
        "dp=2,zero=2",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_mutant_is_noticed(ranks, name):
    *bug, plan = BUGS[name]
    try:
        assert is_noticed(ranks, tuple(bug), plan, CONFIG), f"{name} goes unnoticed"
    except RankFailed as error:
        assert error.ename != "TimeoutError", error


@pytest.mark.parametrize("plan", sorted({bug[-1] for bug in BUGS.values()}))
def test_without_a_bug_nothing_is_noticed(ranks, plan):
    assert not is_noticed(ranks, None, plan, CONFIG)


LATE = {
    "nothing prefetched": instead(lambda self, i: None),
    "only forward prefetches": lambda right: (
        lambda self, i: right(self, -1 if torch.is_grad_enabled() else i)
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_mutant_that_only_costs_time_is_noticed(ranks, name):
    """The results are the same bits: what is under way inside the blocks tells."""

    def planted_in_flight(trainer, batch):
        with planted(stages.Zero3, "_prefetch", LATE[name]):
            return in_flight(trainer, batch)

    right, wrong = (run({2: ranks}, how, "dp=2,zero=3") for how in (in_flight, planted_in_flight))
    assert right[0] == right[1] != wrong[0] == wrong[1]
