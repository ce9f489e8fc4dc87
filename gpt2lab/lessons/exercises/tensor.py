"""Checkers of lesson 06: which rows of the fused q, k, v a rank holds, f and g, the vocabulary-parallel loss."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from ...model import GPT2, GPT2Config
from ...ranks import comm
from ...ranks.mesh import Mesh
from . import Task, returned
from .collectives import used_twice
from .differences import Between, Most, listed, randoms, whole
from .guards import PACKAGE
from .ranked import ALL, ranked, sent


def _sizes(chance) -> tuple[int, int, int]:
    """A width, heads, and ranks that divide them."""
    ranks = chance.randint(1, 8)
    heads = ranks * chance.randint(1, 3)
    return heads * chance.randint(1, 5), heads, ranks


qkv = Task(
    lambda width, heads, ranks: list(torch.arange(3 * width).view(3, ranks, -1).transpose(0, 1).flatten(1)),
    shown=[(8, 4, 2), (24, 6, 3), (16, 4, 4)],
    what="width {}, {} heads on {} ranks",
    closed=(PACKAGE,),
    drawn=_sizes,
    call=lambda answer, width, heads, ranks: [
        listed(list(returned(answer(rank, ranks, heads, width)))) for rank in range(ranks)
    ],
    rules=whole,
)
"""Exercise: the rows of c_attn.weight that belong to one rank, by heads."""


MLP = (3, 4), (4, 6), (6, 4)  # x and two matrices


def _mlp_in_one(x, up, down):
    """The loss of the MLP in one process."""
    return (F.gelu(x @ up) @ down).square().sum()


def _mlp_on_a_rank(axis, f, g) -> tuple:
    x, up, down = randoms(0, *MLP)
    x, up = x.requires_grad_(), up.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_()
    entered = f(x, axis)
    y = F.gelu(entered @ up) @ down.tensor_split(axis.size, 0)[axis.rank]
    before, left = y.detach().clone(), g(y, axis)
    loss = left.square().sum()
    loss.backward()
    names = [type(t.grad_fn).__name__.removesuffix("Backward") for t in (entered, left)]
    size, same = sent(), torch.equal(before, y)
    again = _with_another_axis(
        f, g, x.detach(), up.detach(), down.tensor_split(axis.size, 0)[axis.rank], axis
    )
    return names, same, loss.item(), up.grad, x.grad, used_twice(axis.rank, axis.size, f), again, size


def _with_another_axis(f, g, x, up, down, axis):
    """The gradient of x (1, 3, 4) in the same MLP, where f and g are also called along an axis of one rank."""
    alone = Mesh(tp=axis.size, dp=1)["dp"]
    x = x[None].requires_grad_()
    loss = g(F.gelu(f(x, axis) @ up) @ down, axis).square().sum()
    g(f(torch.ones(2, requires_grad=True), alone), alone)
    loss.backward()
    return x.grad[0]


def _mlp_right(rank: int) -> tuple:
    whole = [t.requires_grad_() for t in randoms(0, *MLP)]
    loss = _mlp_in_one(*whole)
    loss.backward()
    x, up = whole[0].grad, whole[1].grad.tensor_split(3, 1)[rank]
    once = 3 * 4 * 8 * 4 // 3  # an all-reduce of y (3, 4) in float64, 2 (n - 1)/n of its bytes
    return ["MyF", "MyG"], True, loss.item(), up, x, 3 + 1, x, 2 * once


edges = ranked(
    (
        "the functions that autograd sees",
        "whether g leaves the partial sums as they were",
        "the loss, for which g has to sum in forward,",
        "the gradient of the first matrix",
        "the gradient of x, for which f has to sum in backward,",
        "the gradient of f(x) + x",
        "the gradient of x when f and g are called along another axis before backward",
        "bytes sent, an all-reduce forward (g) and one backward (f),",
    ),
    _mlp_right,
    _mlp_on_a_rank,
    3,
    answers=2,
    shown={"a two-layer MLP": ()},
)
"""Exercise: Megatron's f and g as autograd functions, tried in a two-layer MLP on three ranks."""


def _attention(heads: int, width: int, ranks: int):
    """A GPT-2 attention, and an input (2, 5, C) or (3, 3, C)."""
    config = GPT2Config(vocab_size=8, n_positions=8, n_layer=1, n_head=heads, n_embd=heads * width)
    attn = GPT2(config).double().h["0"].attn
    *drawn, x = randoms(1, *(p.shape for p in attn.parameters()), (5 - ranks, 1 + width, heads * width))
    for p, value in zip(attn.parameters(), drawn, strict=True):
        p.data = value / 5
    return attn, x


def _flops(run) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


PARTS = "c_attn.weight", "c_attn.bias", "c_proj.weight"


def _attention_on_a_rank(axis, answer, *case: int) -> tuple:
    (attn, x), kept = _attention(*case), []
    flops = _flops(lambda: kept.append(answer(x.requires_grad_(), attn, axis)))
    returned(kept[0]).square().sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in attn.named_parameters()}
    parts = [grads[name] for name in PARTS]
    return kept[0].detach(), x.grad, flops, sent(), grads["c_proj.bias"], *parts


def _attention_right(rank: int, heads: int, width: int, ranks: int) -> tuple:
    attn, x = _attention(heads, width, ranks)
    y = attn(x.requires_grad_(), None)
    y.square().sum().backward()
    rows, tokens, channels = x.shape
    products, scores_and_sums = 4 * channels, 2 * tokens
    serial = 2 * rows * tokens * channels * (products + scores_and_sums)
    once = 2 * 2 * x.numel() * 8 * (ranks - 1) // ranks  # an all-reduce of x forward and one backward
    parts = [attn.get_parameter(name).grad / ranks for name in PARTS]
    return y.detach(), x.grad, Most(serial / ranks), once, attn.c_proj.bias.grad, *parts


attention = ranked(
    (
        "the output",
        "the gradient of x, which every rank's heads read,",
        "operations, for its own heads only,",
        "bytes sent, by g forward and f backward,",
        "the gradient of c_proj.bias",
        *(f"the parts of the gradient of {name} {ALL}" for name in PARTS),
    ),
    _attention_right,
    _attention_on_a_rank,
    lambda heads, width, ranks: ranks,
    shown=[(6, 4, 3), (12, 2, 2)],
    what="{} heads of width {} on {} ranks",
    tolerance=1e-9,
)
"""Exercise: the attention of a GPT-2 block by heads on three and on two live ranks, forward and backward."""


def _logits(scale: float, *targets: int, ranks: int = 3, seed: int = 0) -> tuple:
    """(parts of the logits along a vocabulary of 37, targets); those shown are the first and last token of each."""
    (logits,) = randoms(seed, (len(targets), 37))
    return (scale * logits).split(comm.split_sizes(37, ranks), -1), torch.tensor(targets)


def _loss_on_a_rank(axis, answer, parts, targets) -> tuple:
    value = answer(
        mine := parts[axis.rank].clone(), targets, sum(p.size(1) for p in parts[: axis.rank]), axis
    )
    return None if value is None else float(value), sent(), mine


def _loss_right(rank: int, parts, targets) -> tuple:
    ranks = len(parts)
    few = 2 * 5 * len(targets) * 8 * (ranks - 1) // ranks  # five numbers a token summed; logits are more
    loss = F.cross_entropy(torch.cat(parts, 1), targets, reduction="sum").item()
    return loss, Between(8, few), parts[rank]


vocabulary_loss = ranked(
    ("the loss", "bytes sent, a few numbers a token,", "the logits that it was given"),
    _loss_right,
    _loss_on_a_rank,
    lambda parts, targets: len(parts),
    "gpt2lab.parallel",
    shown={
        words: _logits(scale, 0, 12, 13, 24, 25, 36)
        for words, scale in (("small logits", 1.0), ("logits up to 9000", 3000.0))
    },
    what="targets {1}",
    drawn=lambda chance: _logits(9.0, *chance.choices(range(37), k=8), ranks=2, seed=chance.randrange(999)),
    count=1,
)
"""Exercise: the loss of logits that are cut along the vocabulary, 37 tokens on three ranks, then on two."""


def _columns_on_a_rank(axis, answer, ranks: int, seed: int, *widths: int) -> tuple:
    (x, *weights), asked = randoms(seed, *pairwise((5, *widths))), []
    mine = [w.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_() for w in weights]
    for w in mine:
        x = answer(F.gelu(x @ w), axis)
        if x.requires_grad:
            x.register_hook(lambda grad: asked.append((grad, grad.clone())))
    forward = sent()
    in_turn = {e.op for e in comm.log} & {"broadcast", "gather", "reduce", "scatter"}
    answer(torch.ones(1, 1, requires_grad=True), Mesh(tp=axis.size, dp=1)["dp"])
    x.square().sum().backward(torch.tensor(1 / axis.size, dtype=x.dtype))
    same = all(torch.equal(*pair) for pair in asked)
    grads = [w.grad for w in reversed(mine)]
    return x.detach(), type(x.grad_fn).__name__, forward, in_turn, *grads, sent() - forward, same


def _columns_right(rank: int, ranks: int, seed: int, *widths: int) -> tuple:
    x, *weights = randoms(seed, *pairwise((5, *widths)))
    for w in weights:
        x = F.gelu(x @ w.requires_grad_())
    x.square().sum().backward()
    gather = (ranks - 1) * 5 * sum(widths[1:]) // ranks * 8  # 5 rows: the others' columns pass through a rank
    grads = [w.grad.tensor_split(ranks, 1)[rank] for w in reversed(weights)]
    return x.detach(), "MyGatherBackward", gather, set(), *grads, gather, True


gathered_columns = ranked(
    (
        "the output, the ranks' columns side by side,",
        "the function that autograd sees",
        "bytes sent forward",
        "calls in which one rank sends or receives for all, one after the other,",
        *(f"the gradient of matrix {layer}" for layer in (2, 1, 0)),
        "bytes sent backward",
        "whether backward leaves the gradients that it is given as they were",
    ),
    _columns_right,
    _columns_on_a_rank,
    lambda ranks, *_: ranks,
    shown={"three matrices": (3, 3, 4, 6, 9, 3)},
    what="three matrices on {0} ranks, and widths {2} to {5}",
    drawn=lambda chance: (2, chance.randrange(99), *(2 * chance.randint(4, 9) for _ in range(4))),
    count=1,
    tolerance=1e-9,
)
"""Exercise: columns gathered forward, and what backward does then, in a net of three matrices, on live ranks."""
