"""Bugs in tensor and sequence parallelism, planted on the ranks: verification notices each of them."""

import torch.nn.functional as F
from planting import bugs, controls, is_caught

from gpt2lab.model import GPT2Config
from gpt2lab.parallel import finish, sequence, spec, tensor
from gpt2lab.ranks import comm

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=16)
TP, SP = "tp=2", "tp=2,sp=on"
SHIFTED = (  # dropout of the own tokens drawn for positions from zero on every rank
    sequence._own_positions, "edge.mine(inputs[place])",
    "(inputs[place][..., : edge.sizes[edge.axis.rank]] if place else edge.mine(inputs[place]))",
)  # fmt: skip
BUGS = {
    "f is missing": (tensor.Edge.enter, "comm.copy_to(x, self.axis)", "x", TP),
    "g sums in backward too":  # as torch.distributed.nn.functional.all_reduce does
        (tensor.Edge.leave, "comm.reduce_from(x, self.axis)",
         "comm.copy_to(comm.reduce_from(x, self.axis), self.axis)", TP),
    "g takes the mean": (tensor.Edge.leave, "self.axis)", "self.axis) / self.axis.size", TP),
    "row bias added on every rank":
        (tensor.RowLinear.forward, "self.weight)) + self.bias", "self.weight) + self.bias)", TP),
    "q, k, v cut as one matrix":
        (tensor.ColumnLinear.__init__, "self.edge = edge", "self.edge, groups = edge, 1", TP),
    "rank 0's shard on all ranks":  # uneven slices would not even fit
        (spec.cut, "axis.rank, axis.size", "axis.rank * (p.size(dim) % axis.size > 0), axis.size", TP),
    "shards drawn anew with one seed":
        (spec.cut, "groups), p.", "groups).normal_(generator=torch.Generator().manual_seed(0)), p.", TP),
    "softmax over the shard":
        (tensor._VocabLoss.forward, "comm.all_reduce(sums, axis, own=True)",
         "sums[0], comm.all_reduce(sums[1].clone(), axis)", TP),
    "no shared maximum":  # the sums of exponentials do not belong together
        (tensor._VocabLoss.forward, 'comm.all_reduce(logits.amax(-1), axis, "max")', "logits.amax(-1)", TP),
    "vocabulary offset off by one": (tensor.first_token, "axis.rank])", "axis.rank]) + axis.rank", TP),
    "foreign tokens not masked": (tensor.VocabEmbedding.forward, " * here[..., None]", "", TP),
    "replicas counted twice in the norm":
        (finish.gradient_norm, "_counted_here(p, mesh)", "p.tensor.grad.flatten()", TP),
    "partial sums not completed": (finish, "sum_partial", lambda right: lambda held, mesh: None, SP),
    "norms not marked partial": (sequence, "_partial", lambda right: lambda *_, **__: None, SP),
    "row biases not marked partial": (sequence._partial, " + [m.bias for m in biases]", "", SP),
    "gather without the sum in backward":  # right only where all ranks use the result alike
        (sequence.SequenceEdge, "linear",
         lambda right: lambda self, x, weight, bias=None:
         F.linear(comm.gather_replicated(x, self.axis, 1, self.sizes), weight, bias), SP),
    "positions counted from zero":
        (sequence.SequenceEdge.mine, "positions.split(self.sizes, -1)[self.axis.rank]",
         "positions[..., : self.sizes[self.axis.rank]]", SP),
    "equal dropout masks in the cut region": (*SHIFTED, f"{SP} dropout=0.2"),
}  # fmt: skip


@bugs(BUGS)
def test_the_bug_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, check, CONFIG), "nobody noticed"


@controls(BUGS)
def test_nothing_is_noticed_without_a_bug(pools, check):
    assert not is_caught(pools, None, check, CONFIG, 1e-10)


def test_equal_masks_are_no_bug_where_nothing_is_dropped(pools):
    assert not is_caught(pools, SHIFTED, SP, CONFIG, 1e-10)
