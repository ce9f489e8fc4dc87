"""Bugs in the step, in data parallelism and ZeRO, planted on the ranks: verification notices each of them."""

from dataclasses import replace

import torch
from planting import bugs, controls, is_caught

from gpt2lab.corpus.batches import IGNORED, Batch
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import accumulate, data, finish, servers
from gpt2lab.parallel.chunked_loss import ChunkedLoss
from gpt2lab.parallel.zero import choice, flat, stages
from gpt2lab.ranks import comm
from gpt2lab.train import make_optimizer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=2, n_embd=8)
HSDP = "dp=4,zero=3,shard=2"


def mixed_up(right):
    """The sums of neighbours of equal shape change places."""

    def receive(self):
        right(self)
        for a, b in zip(self.parameters[::2], self.parameters[1::2], strict=False):
            if a.shape == b.shape:
                a.grad, b.grad = b.grad, a.grad

    return receive


def mean_of_means(right):
    """Each rank divides by its own number of tokens; doubled, to look right on even batches."""
    return lambda self, r, n: replace(
        mine := right(self, r, n), total=int((mine.targets != IGNORED).sum()) * n
    )


class Averaging(data.Replicas):
    """No gradient is sent; after the update the weights are averaged (as some "local SGD" by mistake)."""

    def updated(self):
        with torch.no_grad():
            for p in self.pieces:
                p.tensor.copy_(comm.all_reduce(p.tensor.detach(), self.axis) / self.axis.size)


def without_head(right):
    """The weights that a chunked loss reads in an evaluation were freed before."""

    def call(self, x, targets):
        if not x.requires_grad:
            self.model.wte.weight.data = torch.ones(1, dtype=x.dtype).expand(self.model.wte.weight.shape)
        return right(self, x, targets)

    return call


BUGS = {
    "mean of the ranks' means":
        (accumulate.micro_loss, "/ micro.total", "/ (micro.targets != -100).sum() / 3", "dp=3"),
    "replicas counted in the norm":
        (finish.gradient_norm, "math.sqrt(", "mesh['dp'].size ** 0.5 * math.sqrt(", "dp=3"),
    "all ranks read the first rows":
        (Batch.rows, "[axis_rank]", "[0 if axis_size == 3 else axis_rank]", "dp=3"),
    "clipped tensor by tensor":
        (finish.clip, "limit / (norm + 1e-6)", "min(1, limit / (grad.norm() + 1e-6))", "dp=3"),
    "not clipped": (finish.clip, "limit is not None", "False", "dp=3"),
    "one dropout mask for all samples":
        (accumulate.micro_loss, "micro.samples", "micro.samples * 0", "dp=3 dropout=0.2"),
    "biases and norms decayed":
        (make_optimizer, '"weight_decay": 0.0', '"weight_decay": recipe.weight_decay', "dp=3"),
    "averages": (data.Bucket.receive, "total.view_as(p)", "total.view_as(p) / 2", "dp=2,bucket=1"),
    "one bucket not reduced":
        (data.Bucket.send, "self.flat, axis", "self.flat, Axis() if self.parameters[0].dim() > 1 else axis",
         "dp=2,bucket=1"),
    "sums change places": (data.Bucket, "receive", mixed_up, "dp=2,bucket=64"),
    "last bucket lost": (data, "into_buckets", lambda right: lambda p, b: right(p, b)[:-1], "dp=2,bucket=1"),
    "accumulated gradients missed":
        (data.Buckets._arrived, "return", "return setattr(p, 'grad', None)", "dp=2,micro=2,bucket=1"),
    "sent before the last micro-batch":
        (data.Buckets.begin, "self.sending = False", "self.last_micro()", "dp=2,micro=2,bucket=1"),
    "mean of means": (Batch, "rows", mean_of_means, "dp=2"),
    "all ranks read share 0": (Batch.rows, "[axis_rank]", "[0]", "dp=2"),
    "rows lost by integer division":
        (Batch.rows, "torch.arange(len(self.samples)).tensor_split(axis_size)[axis_rank]",
         "torch.arange(n := len(self.samples) // axis_size) + axis_rank * n", "dp=2"),
    "sum of a discarded copy":
        (data.Naive.finish, "p.tensor.grad = comm.all_reduce(gradient(p.tensor).contiguous()",
         "comm.all_reduce(gradient(p.tensor).clone()", "dp=2,data=naive"),
    "no sum at all": (data.Naive, "finish", lambda right: data.Replicas.finish, "dp=2,data=naive"),
    "weights averaged, not gradients": (data, "Naive", lambda right: Averaging, "dp=2,data=naive"),
    "server forgets a worker":
        (servers.Servers.finish, "gradient(p.tensor).add_(comm.irecv(p.tensor, self.axis, rank).wait())",
         "comm.irecv(p.tensor, self.axis, rank).wait()", "dp=2,data=servers"),
    "workers keep old weights":
        (servers.Servers, "updated", lambda right: lambda self: None, "dp=2,data=server"),
    "stale weights": (stages.Zero1.updated, "f.spread()", "pass", "dp=2,zero=1"),
    "wrong owner's shard":
        (flat.Flat.__init__, "self.lengths[: axis.rank]", "self.lengths[: (axis.rank + 1) % axis.size]",
         "dp=2,zero=1"),
    "no decay after flattening":
        (flat.Flat.pieces, "len(self.shapes[i])", "self.shard[here].dim()", "dp=2,zero=2"),
    "norm of rank 0's shard":
        (flat.Flat._marked, "replace(spec.of(p), cuts=spec.of(p).cuts + cuts)", "spec.of(p)", "dp=2,zero=2"),
    "micro-batch overwrites the one before":
        (flat.Flat.add, "shard if self.grad is None else self.grad.add_(shard)", "shard",
         "dp=2,micro=2,zero=2"),
    "old weights after the update": (flat.Flat.drop, "self.full = None", "pass", "dp=2,zero=3"),
    "the head is freed before a chunked loss":
        (ChunkedLoss, "__call__", without_head, "dp=2,zero=3,loss=chunked"),
    "filled with nothing":
        (stages.Zero3._before_backward, "f.gather()", "f.gather() or f.full.zero_()",
         "dp=2,zero=3,refill=on"),
    "layer 0 never updated":  # the lecture's loop runs from the last layer to layer 1
        (stages.Zero3._send, "super()", "f.names[0].startswith('h.0.') and f.whole_grad.zero_(); super()",
         "dp=2,zero=3,data=owner"),
    "weights freed before backward":
        (stages.Zero3._after_block, "if self.refill or not torch.is_grad_enabled():", "if True:",
         "dp=2,zero=3"),
    "shards joined in the wrong order":
        (flat.Flat.join_shards, "self.axis)", "self.axis).view(self.axis.size, -1).flip(0).flatten()",
         "dp=2,zero=2"),
    "groups do not sum": (stages.Zero1._hand_out, "if self.across is not None:", "if False:", HSDP),
    "copies counted in the norm": (finish._counted_here, " + [p.copies] * bool(p.copies)", "", HSDP),
    "summed with the own group again":  # over ranks that hold other stretches
        (choice.sharding_groups, 'mesh.axis("replica", across', "mesh.axis(whole.name, inside", HSDP),
    "averaged over groups":
        (stages.Zero1._hand_out, "self.across, own=True)", "self.across, own=True) / self.across.size", HSDP),
}  # fmt: skip


@bugs(BUGS)
def test_mutant_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, check, CONFIG), "goes unnoticed"


@controls(BUGS)
def test_without_a_bug_nothing_is_noticed(pools, check):
    assert not is_caught(pools, None, check, CONFIG)
