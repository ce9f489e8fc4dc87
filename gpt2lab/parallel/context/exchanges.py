"""Context parallelism: a layout splits the tokens of a sequence over ranks; an exchange lets attention see the rest.

Everything but attention works token by token, so it needs no change: the model runs on a rank's own tokens with
their true positions, and only the `core` slot of each attention is replaced. Weight gradients are partial sums over
the sequence and are summed over the context axis together with data parallelism's.
"""

from contextlib import contextmanager
from functools import partial

import torch

from ...model import causal_attention
from ...ranks.mesh import Axis
from . import borrow, halo
from .borrow import Share, borrowing
from .layouts import check_hops, everyone, layout, loans, seen, widths
from .ring import double_ring, ring
from .ulysses import heads

EXCHANGES = {
    "qkv": borrow.gather_qkv,
    "kv-allreduce": borrowing(everyone, borrow.gather, borrow.by_all_reduce),
    "kv": borrowing(everyone, borrow.gather, borrow.by_reduce_scatter),
    "kv-roots": borrowing(everyone, borrow.gather, borrow.by_roots),
    "triangle": borrowing(seen, *borrow.moved_by(borrow.isend_irecv)),
    "ring": ring,
    "double-ring": double_ring,
    "heads": heads,
    **{f"halo-kv-{way}": borrowing(loans, *borrow.moved_by(move)) for way, move in borrow.WAYS.items()},
    **{f"halo-x-{way}": halo.halo_x for way in borrow.WAYS},
}
ALIASES = {"halo-kv": "halo-kv-alltoall", "halo-x": "halo-x-alltoall"}


def exchange(name: str):
    """The exchange called `name`, a function (q, k, v, share) -> y. Raises ValueError that lists the names."""
    if ALIASES.get(name, name) not in EXCHANGES:
        raise ValueError(
            f"there is no exchange called {name!r}. Use one of {', '.join([*EXCHANGES, *ALIASES])}."
        )
    return EXCHANGES[ALIASES.get(name, name)]


class Split:
    """One rank's view of the split: called with a sequence length, it says which tokens are this rank's."""

    def __init__(self, axis: Axis, layout_name: str, exchange_name: str, window: int | None, roots=()):
        self.axis, self.layout, self.window, self.roots = axis, layout_name, window, roots
        self.exchange = ALIASES.get(exchange_name, exchange_name)
        self.attend = exchange(exchange_name)
        if self.exchange == "kv-roots" and len(roots) != axis.size:
            raise ValueError(
                f"exchange kv-roots needs one axis of contributors for each of {axis.size} roots, and here are "
                f"{len(roots)}. Give roots=root_axes(mesh, {layout_name!r})."
            )
        self.share: Share | None = None
        self._checked = None

    def __call__(self, length: int) -> torch.Tensor:
        """The index of this rank's tokens in a sequence of `length`; the model calls that follow are about these."""
        table = layout(self.layout, length, self.axis.size)
        self.share = Share(table, self.axis, self.window, roots=self.roots)
        self._checked = None
        return torch.tensor(self.share.mine, dtype=torch.long)

    def core(self, q, k, v, positions, window):
        """What takes the place of `attn.core`: attention of the own tokens to the whole sequence."""
        extra = widths(self.share.table, self.axis.rank, self.window)[0] if self._widens else 0
        self._check(positions, q.size(-2) - extra, k.size(-2) - extra)
        return self.attend(q, k, v, self.share)

    def widen(self, attn, module, inputs):
        """Before c_attn, where the layer's input is exchanged: the own rows of x (B, t, C), the halo before them."""
        if attn.core == causal_attention:  # unsplit
            return None
        way = self.exchange.removeprefix("halo-x-")
        return halo.halo_exchange(inputs[0], self.share, self.window, dim=1, way=way)

    def install(self, block) -> None:
        """Let a block attend through the exchange, and widen its input where that is what is exchanged."""
        block.attn.core = self.core
        if self._widens:
            block.attn.c_attn.register_forward_pre_hook(partial(self.widen, block.attn))

    @property
    def _widens(self) -> bool:
        return self.exchange.startswith("halo-x")

    def _check(self, positions, queries: int, keys: int):
        if self.share is None:
            raise ValueError("The length of the sequence is not known yet. Call the split with it first.")
        if keys != queries:
            raise ValueError(
                f"generation is not split over context ranks: {queries} new tokens cannot look back at a cache of "
                f"{keys} here. Generate with cp=1: every rank holds all weights, so `unsplit(model)` is enough."
            )
        if positions is self._checked:  # all layers get the same tensor: read it, which stops a GPU, once
            return
        if tuple(positions.flatten().tolist()) != self.share.mine:
            raise ValueError(
                f"rank {self.axis.rank} of {self.axis.name}={self.axis.size} owns positions {_few(self.share.mine)} "
                f"but was given {_few(positions.flatten().tolist())}. Pass the true positions of its own tokens; for "
                f"generation, which is not split, call unsplit(model) first."
            )
        self._checked = positions


def _few(numbers) -> str:
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")


def apply_context(model, mesh, plan) -> Split:
    """Replace the attention core of every block; returns the Split that distributes the tokens.

    Forward and backward: what the exchange says, once a layer. Nothing else of the model communicates.
    """
    roots = root_axes(mesh, plan.layout) if plan.exchange == "kv-roots" else ()
    split = Split(mesh["cp"], plan.layout, plan.exchange, model.config.window, roots)
    for block in model.h.values():
        split.install(block)
    return split


def root_axes(mesh, layout_name: str) -> tuple[Axis | None, ...]:
    """For each root the axis of the ranks that may contribute to it: those after it in slices, else all ranks.

    All ranks of the mesh call it together.
    """
    sliced = layout_name in ("contiguous", "unequal")
    after = lambda root: [line[root:] if sliced else line for line in mesh.lines(["cp"])]
    return tuple(mesh.axis("cp", after(root), messages=False) for root in range(mesh["cp"].size))


@contextmanager
def whole_sequences(model):
    """Inside, every rank attends to whole sequences, as for generation; afterwards the split is there again."""
    cores = {block: block.attn.core for block in model.h.values()}
    unsplit(model)
    try:
        yield
    finally:
        for block, core in cores.items():
            block.attn.core = core


def unsplit(model) -> None:
    """Take the split out of the model again, for generation or for whole sequences on every rank."""
    for block in model.h.values():
        block.attn.core = causal_attention


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError, before any process starts, where a layout and an exchange cannot split this model.

    Every layout goes with every exchange, except that heads must divide and halos need a window and whole slices.
    """
    exchange(plan.exchange)
    table = layout(plan.layout, length, plan.cp)
    mine = config.n_head // plan.tp
    if plan.exchange == "heads" and mine % plan.cp:
        fits = ", ".join(str(n) for n in range(1, mine + 1) if mine % n == 0)
        raise ValueError(
            f"{mine} attention heads a rank cannot be exchanged for tokens over cp={plan.cp} ranks "
            f"({mine} % {plan.cp} = {mine % plan.cp}). Use cp={fits}, or another exchange."
        )
    if plan.exchange.startswith("halo"):
        if config.window is None:
            raise ValueError(
                f"exchange={plan.exchange} is for windowed attention, and this model attends to all {length} tokens. "
                f"Give its configuration a window, or use exchange=ring or kv."
            )
        loans(table, config.window)
        check_hops(table, config.window, plan.hops or plan.cp)
    if plan.sp and plan.exchange.startswith("halo-x"):
        raise ValueError(
            f"exchange={plan.exchange} widens the layer's input, which sp=true has cut among the tensor ranks. "
            f"Use exchange={plan.exchange.replace('halo-x', 'halo-kv')}, or leave sp out."
        )
