"""Sequence parallelism: where tensor parallelism holds whole activations, each rank holds some of the tokens.

Norms, dropout and residual sums work token by token, so their (B, T, C) can be cut along T. An all-reduce is a
reduce-scatter and an all-gather: the first now ends a row-parallel layer, the second begins a column-parallel one.
The bytes are the same, the memory between the layers is 1/n.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2, arXiv:2205.05198.
"""

from functools import partial

from ..ranks import comm
from ..ranks.mesh import Axis
from . import spec
from .tensor import Edge, vocab_head


class SequenceEdge(Edge):
    """The pair g-bar and g of the paper, along T: activations outside are (B, T_r, C), any T, uneven shards.

    Forward: `enter` gathers the tokens, `leave` sums and keeps the own ones. Backward: the reverse.
    Bytes per rank: (n-1)/n B T C numbers in each of the four. `lean` keeps only the own tokens for backward and
    gathers them once more there: (n-1)/n B T C numbers more a column-parallel layer, B T C (1 - 1/n) less memory.
    """

    def __init__(self, axis: Axis, lean: bool = True):
        super().__init__(axis, overlap=lean)
        self.length = 0

    @property
    def sizes(self) -> list[int]:
        """How many of the `length` tokens of the current sequence each rank has."""
        return comm.split_sizes(self.length, self.axis.size)

    def enter(self, x):  # (B, T_r, C) -> (B, T, C)
        """All tokens, which each rank uses differently."""
        return comm.all_gather(x, self.axis, 1, self.sizes)

    def leave(self, x):  # (B, T, C) -> (B, T_r, C)
        """The sum over the ranks, of which this rank keeps its tokens."""
        self.length = x.size(1)
        return comm.reduce_scatter(x, self.axis, 1, self.sizes)

    def back(self, grad, x):
        """The sum of all tokens' gradients, of which this rank keeps its own, and all tokens once more."""
        sizes = comm.split_sizes(grad.size(1), self.axis.size)
        of_x = comm.reduce_scatter(grad, self.axis, 1, sizes)
        return comm.finished(of_x, async_op=True), comm.all_gather(x, self.axis, 1, sizes)

    def mine(self, positions):
        """The positions (T_r,) of the own tokens; of (B, T) its columns."""
        return positions.split(self.sizes, -1)[self.axis.rank]


def apply_sequence(model, mesh, plan=None, lean: bool = True) -> None:
    """Turn a model that `apply_tensor` has cut into one whose activations between the layers are cut along T.

    Forward: an all-gather and a reduce-scatter of (B, T, C) for each all-reduce of tensor parallelism. Backward:
    likewise, and with `lean` one more all-gather a column-parallel layer. Each rank's gradients of norms, row
    biases and positions come from its own tokens: they are partial sums, marked so, and summed once a step.
    Bytes per rank: those of tensor parallelism (`lean`: half as much again in backward) and the partial sums.
    """
    edge = SequenceEdge(mesh["tp"], lean)
    model.tokens_here = lambda length: comm.split_sizes(length, edge.axis.size)[edge.axis.rank]
    for module in model.modules():
        if hasattr(module, "edge"):
            module.edge = edge
    for block in model.h.values():
        block.register_forward_pre_hook(partial(_note_length, edge))
        rows = [part.c_proj for part in (block.attn, block.mlp) if hasattr(part, "c_proj")]
        routers = [block.mlp.router] if hasattr(block.mlp, "router") else []
        _partial(edge.axis, block.ln_1, block.ln_2, *routers, biases=rows)
        _own_positions(edge, 1, block.drop_attn, block.drop_mlp, block.mlp)
    if model.wpe is not None:
        _partial(edge.axis, model.wpe)
        _own_positions(edge, 0, model.wpe)
        _own_positions(edge, 1, model.drop)
    if model.ln_f is not None:
        _partial(edge.axis, model.ln_f)
        model.head = partial(vocab_head, model, edge)


def _note_length(edge, block, inputs):
    """A block gets the positions of all tokens: on a pipeline stage nothing else tells how long the sequence is."""
    edge.length = inputs[1].size(-1)


def _own_positions(edge, place: int, *modules) -> None:
    """Let modules that get positions as their argument `place` see those of the own tokens."""

    def narrow(module, inputs):
        return *inputs[:place], edge.mine(inputs[place]), *inputs[place + 1 :]

    for module in modules:
        module.register_forward_pre_hook(narrow)


def _partial(axis: Axis, *modules, biases=()) -> None:
    """Mark parameters whose gradients are sums over this rank's tokens only."""
    for p in [p for m in modules for p in m.parameters()] + [m.bias for m in biases]:
        spec.mark(p, partial=(*spec.of(p).partial, axis.name))


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError where there are no tensor-parallel ranks to share the sequence."""
    if plan.tp == 1:
        raise ValueError(
            "sp=true cuts activations over the tensor-parallel ranks, but tp=1. Use tp=2 or more, or cp for a "
            "sequence split of its own."
        )
