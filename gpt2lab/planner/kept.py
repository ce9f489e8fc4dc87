"""Bytes that a rank keeps of a unit of work from forward to backward, and between its halves: a block's, a stage's."""

from collections import Counter
from functools import lru_cache

from ..parallel.context import costs as context
from ..parallel.context.exchanges import ALIASES
from ..ranks.traffic import split_sizes
from ..schedules.formulas import kept_for_weights
from . import tensor_costs
from .experts import kept_more
from .share import EXPERT, RankShare

CHUNK = 128  # tokens whose logits a chunked loss holds at a time


def inputs_only(share: RankShare) -> bool:
    """Whether a block keeps its input alone and runs again in backward."""
    return share.again[0] > 0 and not (share.plan.pp > 1 and share.plan.zero < 3)


def stream_bytes(share: RankShare, rows: int, tokens: int) -> int:
    """Bytes of (B, T, C) between two blocks; with sequence parallelism of this rank's tokens alone."""
    own = split_sizes(tokens, share.plan.tp)[share.tp] if share.plan.sp else tokens
    return share.itemsize * rows * own * share.config.n_embd


def logits_bytes(share: RankShare, rows: int, tokens: int) -> int:
    """Bytes of the logits of a unit, of which a rank has its part of the vocabulary; in chunks they are never whole."""
    if share.plan.loss == "chunked":
        return 0
    words = split_sizes(share.config.vocab_size, share.plan.tp)[share.tp]
    return max(4, share.itemsize) * rows * tokens * words


def largest_matrix(share: RankShare, position: int) -> int:
    """Bytes of the largest matrix of a block, whose gradient is there before it is added to others."""
    c, layers = share.config.n_embd, share.parts.layers[position]
    return share.itemsize * c * split_sizes(share.net.mlp, share.plan.tp)[share.tp] * bool(layers)


def kept_by_stage(share: RankShare, position: int, rows: int, tokens: int) -> Counter:
    """Bytes that a stage keeps of one unit from forward to backward."""
    stream = stream_bytes(share, rows, tokens)
    kept = lambda layer: stream if inputs_only(share) else kept_by_block(share, rows, tokens, layer)
    found = Counter(activations=sum(kept(layer) for layer in share.parts.layers[position]))
    if position == share.depth - 1:
        found["activations"] += kept_by_head(share, rows, tokens)
        if share.plan.loss == "chunked":
            found["gradients"] = share.itemsize * share.config.vocab_size * share.config.n_embd
        found["logits"] = logits_bytes(share, rows, tokens)
    return found


def kept_by_head(share: RankShare, rows: int, tokens: int) -> int:
    """Bytes that the last norm keeps: its input, its output, two numbers a token; a chunked loss, its gradient too."""
    stream = stream_bytes(share, rows, tokens)
    return (2 + (share.plan.loss == "chunked")) * stream + 2 * stream // share.config.n_embd


def kept_by_block(share: RankShare, rows: int, tokens: int, layer: int) -> int:
    """Bytes that one block keeps, of experts if it has some."""
    return kept_by_dense_block(share, rows, tokens) + kept_more(share, layer, rows, tokens)


@lru_cache(maxsize=4096)
def kept_by_dense_block(share: RankShare, rows: int, tokens: int) -> int:
    """Bytes that a dense block keeps, by the formulas of tensor, sequence and context parallelism."""
    plan, config, e, net = share.plan, share.config, share.itemsize, share.net
    kept = tensor_costs.kept_bytes(share.shape(rows, tokens), share.tp, plan.sp)
    kept += e * rows * tokens * net.kept_more // plan.tp
    if plan.cp == 1:
        return kept
    name = ALIASES.get(plan.exchange, plan.exchange)
    whole = context.kept_numbers(config, rows, share.table, share.cp, name)
    if net.keys < net.n_embd and name != "heads":
        # what is borrowed, keys and values alone, is as narrow as they are
        own = context.kept_numbers(config, rows, share.table, share.cp, "ring")
        whole = own + (whole - own) * net.keys // net.n_embd
    # outside attention as tensor parallelism keeps it; attention's own is cut by heads
    outside = rows * tokens * (12 * config.n_embd + 4)
    inside = (whole - outside) // plan.tp
    return kept + e * (inside - rows * tokens * (4 * config.n_embd // plan.tp + config.n_head // plan.tp))


def part_elements(share: RankShare, name: str) -> int:
    """Elements of a part of the weights, such as `wte` or `h.3`, that are here."""
    return sum(share.sizes.get((name, kind), 0) for kind in range(2 * EXPERT))


def weights_held(share: RankShare, mine: float, whole: float) -> float:
    """Bytes of `whole` elements of weights between two steps, and of the `mine` that the optimizer steps."""
    e, master = share.itemsize, share.master
    if share.plan.zero == 3:  # this package's has no other weights than its masters
        return (master + e * bool(share.mixed)) * mine
    return e * whole + master * (master > e) * mine


def kept_between(share: RankShare, position: int, rows: int, tokens: int, layers: int) -> int:
    """Bytes that wait for a unit's weight gradients: operands of its products, and gradients that are there.

    Of the head and of so many of the position's layers.
    """
    config, plan, net, n = share.config, share.plan, share.net, rows * tokens
    c, last = config.n_embd, position == share.depth - 1
    words, there = config.vocab_size * last, 0
    if plan.loss == "chunked":  # the head's gradient is there, what it was made of is gone
        words, there = 0, words * c
    if plan.zero == 3:  # blocks run again in the first half, which gives all of their gradients
        there += sum(part_elements(share, f"h.{layer}") for layer in share.parts.layers[position][:layers])
        layers = 0
    if plan.sp:
        operands = layers * n * (2 * c + (c + net.active * net.mlp) // plan.tp)
        return share.itemsize * (there + operands) + made_at_once(share, position, layers)
    # operands of the products of keys and values, and of the MLP, that are wider or narrower than GPT-2's
    more = layers * n * (2 * (net.keys - c) + net.active * (2 + net.gated) * net.mlp - 8 * c)
    whole = n * c * (4 * layers + bool(words)) * (plan.tp > 1)  # what tensor ranks have in common is not cut
    operands = whole + (kept_for_weights(n, c, layers, words) + more - whole) // plan.tp
    return share.itemsize * (there + operands)


def made_at_once(share: RankShare, position: int, layers: int) -> int:
    """Bytes of weights' gradients that the first half of a backward makes in so many layers and the head.

    Column-parallel layers of sequence parallelism: they gather their tokens for both halves at once.
    """
    c, last = share.config.n_embd, position == share.depth - 1
    net, matrix = share.net, largest_matrix(share, position)
    column = share.itemsize * c * ((c + 2 * net.keys) // share.plan.tp) + matrix * net.mlps * (1 + net.gated)
    return (layers * column + share.itemsize * part_elements(share, share.net.head) * last) * share.plan.sp


def transient(share: RankShare, rows: int, tokens: int, matrix: int) -> int:
    """Bytes that a block's backward holds besides: gradients of its output and hidden layer, and of a `matrix`.

    A first half makes no weight's gradient (0); it has the hidden layer's on both its sides. Where keys and values
    travel, attention's own backward may hold more.
    """
    plan, net, c = share.plan, share.net, share.itemsize * share.config.n_embd
    stream = rows * tokens * c + stream_bytes(share, rows, tokens) * plan.sp
    hidden = rows * tokens * share.itemsize * net.mlp * net.active * (1 + net.gated) // plan.tp
    mlp = stream + hidden + (matrix or hidden)
    if plan.cp == 1 or plan.exchange == "heads" or plan.exchange.startswith("halo"):
        return mlp
    again = inputs_only(share)
    apart = 2 + (not again) + 2 * (not matrix)  # of these tensor ranks hold all
    held = rows * tokens * c * (apart + in_attention(share) / plan.tp) + 2 * hidden * (not matrix)
    made = 9 * matrix // 4 * again  # all gradients of its matrices but those of queries, keys and values
    return max(mlp, int(held) + made - kept_by_dense_block(share, rows, tokens))


def in_attention(share: RankShare) -> float:
    """Numbers a token and channel that a block holds amid attention's backward, besides its input.

    Counted in dry runs: of a ring, of one pass over all rows, or where their gradients are given back.
    """
    plan, way = share.plan, ALIASES.get(share.plan.exchange, share.plan.exchange)
    jumps = plan.layout != "contiguous"  # rows are put in order
    if way.endswith("ring"):
        return 19 + 3 * (plan.cp - 1 if jumps else share.cp)
    rows = (3 if way == "qkv" else 2) * plan.cp
    copies = {"kv-roots": 2, "triangle": 3}.get(way, 4) + jumps
    return max(10 - jumps + 5.5 * plan.cp, copies * rows + (2 if way in ("qkv", "kv-allreduce") else 4))


class Holding:
    """What a rank holds now, by part, and what it held at the fullest moment so far."""

    def __init__(self, **now: int):
        self.now, self._fullest, self._most = Counter(now), ({}, {}), -1

    def note(self, **more: int) -> None:
        """What is held now, and this besides, is held at the same moment."""
        total = sum(self.now.values()) + sum(more.values())
        if total > self._most:
            self._most, self._fullest = total, (dict(self.now), more)

    def hold(self, parts: dict[str, int], sign: int = 1) -> None:
        """These bytes, by part, are held from now on (sign=-1: no longer)."""
        for part, size in parts.items():
            self.now[part] += sign * size

    def free(self, held: dict[str, int], size: int) -> None:
        """So many bytes of a unit's activations are held no longer."""
        held["activations"] -= size
        self.now["activations"] -= size

    @property
    def fullest(self) -> Counter:
        """What was held at the fullest moment so far, by part."""
        now, more = self._fullest
        held = Counter(now) + Counter(more)
        held["buffers"] += held.pop("messages", 0) + held.pop("sums", 0)
        held["weights"] += held.pop("whole", 0)
        return held
