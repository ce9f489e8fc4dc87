"""Checkers of lesson 01: parameters, AdamW, a layer norm's backward, accumulation, a KV cache, what to keep."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import by_hand, close, closed, returned, scored
from .engine import Task


def parameters(answer) -> None:
    """Exercise: how many parameters a GPT-2 has, the tied head counted once."""
    tiny = answer(vocab=10, positions=4, layers=0, width=2)
    close(tiny, 10 * 2 + 4 * 2 + 2 * 2, "no blocks: two embeddings and ln_f; the head is tied, count it once")
    close(
        answer(10, 4, 1, 2) - tiny,
        12 * 4 + 13 * 2,
        "one block of width 2: 12 C^2 weights, and 13 C in biases and norms",
    )
    sizes(answer)


sizes = Task(
    lambda vocab, positions, layers, width: (
        (vocab + positions + 2) * width + layers * (12 * width + 13) * width
    ),
    shown={"GPT-2 small": (50257, 1024, 12, 768)},
    what="{} words, {} positions, {} layers of width {}",
    drawn=lambda chance: tuple(chance.randint(1, 99) for _ in range(4)),
)
"""The second half of `parameters`."""


def adamw(answer) -> None:
    """Exercise: AdamW of two weights that step in turn, one with decay, against torch's over 20 steps."""
    torch.manual_seed(0)
    draw = lambda: torch.randn(7, dtype=torch.float64)
    both = [(0.0, "20 steps without decay", draw()), (0.1, "20 steps with decay 0.1", draw())]
    theirs = [torch.nn.Parameter(w.clone()) for *_, w in both]
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-3}
    groups = [{"params": [p], "weight_decay": decay} for p, (decay, *_) in zip(theirs, both, strict=True)]
    optimizer = torch.optim.AdamW(groups, **options)
    states = [(w, torch.zeros_like(w), torch.zeros_like(w)) for *_, w in both]
    for step in range(20):
        for p in theirs:
            p.grad = draw()
        optimizer.step()
        for i, (decay, what, _) in enumerate(both):
            with closed("torch.optim"):
                states[i] = returned(
                    answer(states[i][0], theirs[i].grad, *states[i][1:], step + 1, *options.values(), decay)
                )
            if step in (0, 19):
                when = "after step 1 (correct the bias of both moments; eps outside the root)"
                close(
                    states[i][0],
                    theirs[i],
                    f"{what}, {'at the end, of two that step in turn' if step else when}",
                )


def norm_backward(answer) -> None:
    """Exercise: the gradient of a layer norm's input, against autograd."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight, grad = torch.randn(8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    F.layer_norm(x, (8,), weight, eps=0.1).backward(grad)
    given = [t.detach().clone() for t in (grad, x, weight)]
    with by_hand():
        got = returned(answer(*given, 0.1))
    assert all(map(torch.equal, given, (grad, x, weight))), (
        "your function changed what it was given; work on copies"
    )
    first = grad * weight / (x.detach().var(-1, keepdim=True, unbiased=False) + 0.1).sqrt()
    assert got.dtype == x.dtype, f"the gradient of a {x.dtype} came as {got.dtype}"
    other = F.layer_norm(x, (8,), weight, eps=1e-5)
    assert not torch.allclose(got, torch.autograd.grad(other, x, grad)[0]), (
        "`eps` is given; it is not always 1e-5"
    )
    assert not torch.allclose(got, first), "g over the standard deviation is only the first of three terms"
    close(
        got.sum(-1),
        torch.zeros(3, 5),
        "a constant added to x changes nothing, so gradients sum to zero",
        1e-9 * 1e300,
    )
    forgotten = torch.autograd.grad(F.layer_norm(x, (8,), None, eps=0.1), x, grad)[0]
    assert not torch.allclose(got, forgotten), "the gradient passes through `weight` first: g = grad * weight"
    hint = "x also moves the mean and the standard deviation, so two terms are taken off g = grad * weight"
    close(got, x.grad, hint)


def accumulation(answer) -> None:
    """Exercise: the gradient of a batch from micro-batches of unequal size, in float64."""
    torch.manual_seed(2)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    flowed = []
    w.register_hook(flowed.append)
    most = None
    for sizes, before in (([7], 0), ([4, 3], 0), ([1, 2, 4], 3), ([2, 3], 0)):
        rows = sum(sizes)
        (whole,) = torch.autograd.grad(((x[:rows] @ w - y[:rows]) ** 2).mean(), w)
        w.grad = before * torch.ones(3, dtype=torch.float64) if before else None
        micros = list(zip(x[:rows].split(sizes), y[:rows].split(sizes), strict=True))
        flowed.clear()
        with _saved() as held:
            answer(w, micros, rows)
        assert w.grad is not None, "w.grad is None: call backward() on each micro-batch's loss"
        assert held.most, (
            "autograd kept nothing: the gradient has to come from backward(), not from a formula of yours"
        )
        most = most or held.most / 7
        assert held.most <= most * max(sizes) + len(w), (
            f"micro-batches of {sizes} rows keep {held.most} numbers for backward at once, {max(sizes)} rows need "
            f"{most * max(sizes):g}: call backward() before the next micro-batch begins, or nothing is saved"
        )
        assert not before or not torch.allclose(w.grad, whole), (
            "w.grad held a gradient before the first micro-batch, which yours lost: add, do not clear"
        )
        assert torch.allclose(sum(flowed), w.grad - before), (
            "what backward() brought is not what w.grad got: leave the adding to backward()"
        )
        close(
            w.grad - before,
            whole,
            f"micro-batches of {sizes} rows: divide each sum by the rows of the whole batch",
            1e-12,
        )


class _Held:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor):
        self.tensor = tensor


@contextmanager
def _saved():
    """Counts what autograd keeps for backward inside the block: `.most` is the most numbers at any time."""
    held, found = weakref.WeakSet(), SimpleNamespace(most=0)

    def pack(tensor):
        box = _Held(tensor)
        held.add(box)
        found.most = max(found.most, sum(one.tensor.numel() for one in held))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        yield found


cache_bytes = Task(
    lambda layers, width, batch, tokens, each: 2 * layers * width * batch * tokens * each,
    shown={
        "one layer, one channel, one token: a key and a value": (1, 1, 1, 1, 1),
        "GPT-2 small, one text of 1024 tokens in float32": (12, 768, 1, 1024, 4),
        "eight texts in 16 bit: mind batch and bytes of a number": (12, 768, 8, 1024, 2),
        "GPT-2 XL, one text of 1024 tokens in float32": (48, 1600, 1, 1024, 4),
    },
    what="{} layers, width {}, {} texts of {} tokens, {} bytes each",
    drawn=lambda chance: tuple(chance.randint(1, 30) for _ in range(5)),
)
"""Exercise: the bytes of a KV cache."""


ROOM, WIDTH = 8, 768
PARTS = {
    "ln_1": (1, 0, 0),
    "qkv": (3, 6, 0),
    "attention": (1, 0, 4),
    "x2": (1, 2, 0),
    "ln_2": (1, 0, 0),
    "wide": (4, 8, 0),
    "gelu": (4, 0, 0),
}
"""What a block saves besides its input: name -> (sizes in B T C, operations a token to rebuild it in C² and in T C)."""


def rebuilding(kept, tokens: int) -> float:
    """Operations a token, in C², that rebuild what is not kept."""
    return sum(
        square + straight * tokens / WIDTH
        for name, (_, square, straight) in PARTS.items()
        if name not in kept
    )


def what_to_keep(answer) -> str:
    """Puzzle: what of a block to keep in little room, for three lengths."""
    total = 0.0
    for tokens in (256, 1024, 8192):
        kept = returned(answer(tokens))
        assert isinstance(kept, list | tuple | set), f"return a list of names, not {kept!r}"
        strange = [name for name in kept if name not in PARTS]
        assert not strange, f"{strange[0]!r} is none of {', '.join(PARTS)}"
        held = 1 + sum(PARTS[name][0] for name in set(kept))
        assert held <= ROOM, f"T = {tokens}: input and kept are {held} B T C, and there is room for {ROOM}"
        total += rebuilding(kept, tokens)
    return scored(round(total, 1), "C² operations a token", bar=16, best=15.3)
