"""Checkers of lesson 01: parameters, AdamW, a layer norm's backward, accumulation, a KV cache, what to keep."""

import weakref
from collections.abc import Set
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import Puzzle, Task, by_chance, close, closed, refuse, returned, run_there
from .differences import CHANGED
from .guards import without_autograd

parameters = Task(
    lambda vocab, positions, layers, width: (
        (vocab + positions + 2) * width + layers * (12 * width + 13) * width
    ),
    shown={
        "no blocks: two embeddings and ln_f; the head is tied, count it once": (10, 4, 0, 2),
        "one block of width 2: 12 C^2 weights, and 13 C in biases and norms": (10, 4, 1, 2),
        "GPT-2 small": (50257, 1024, 12, 768),
    },
    what="{} words, {} positions, {} layers of width {}",
    drawn=lambda chance: tuple(chance.randint(1, 999) for _ in range(4)),
)
"""Exercise: how many parameters a GPT-2 has, the tied head counted once."""


def adamw(answer) -> None:
    """Exercise: AdamW of two weights that step in turn, one with decay, against torch's over 20 steps."""
    _adamw(answer, 0, (7,), 0.1, (0.9, 0.95), 1e-3, 0.1)
    by_chance(partial(_adamw_by_chance, answer), 1)


def _adamw_by_chance(answer, chance) -> None:
    betas = chance.uniform(0.5, 0.9), chance.uniform(0.5, 0.99)
    others = chance.random(), betas, chance.uniform(1e-3, 0.1), chance.uniform(0.05, 0.5)
    _adamw(answer, chance.randrange(99), (chance.randint(2, 5), 3), *others)


def _adamw(
    answer, seed: int, shape: tuple, rate: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    torch.manual_seed(seed)
    draw = lambda: torch.randn(shape, dtype=torch.float64)
    both = [(0.0, "20 steps without decay", draw()), (decay, f"20 steps with decay {decay:.3g}", draw())]
    theirs = [torch.nn.Parameter(w.clone()) for *_, w in both]
    options = {"lr": rate, "betas": betas, "eps": eps}
    groups = [{"params": [p], "weight_decay": own} for p, (own, *_) in zip(theirs, both, strict=True)]
    optimizer = torch.optim.AdamW(groups, **options)
    states = [(w, torch.zeros_like(w), torch.zeros_like(w)) for *_, w in both]
    for step in range(20):
        for p in theirs:
            p.grad = draw()
        optimizer.step()
        for i, (own, what, _) in enumerate(both):
            grad = theirs[i].grad.clone()
            with closed("torch.optim", "torch._ops", "torch._fused"):
                given = states[i][0], grad, *states[i][1:], step + 1, *options.values(), own
                states[i] = list(returned(answer(*given)))
            if step in (0, 19):
                when = "after step 1 (correct the bias of both moments; eps outside the root)"
                close(
                    states[i][0],
                    theirs[i],
                    f"{what}, {'at the end, of two that step in turn' if step else when}",
                )
            assert torch.equal(grad, theirs[i].grad), f"{what}: right, but {CHANGED}"


def _norm_gradient(grad, x, weight, eps):
    x = x.clone().requires_grad_()
    F.layer_norm(x, x.shape[-1:], weight, eps=eps).backward(grad)
    return x.grad


def _norm(seed: int, *shape: int) -> tuple:
    torch.manual_seed(seed)
    sizes = shape, shape, shape[-1:]
    return *(torch.randn(size, dtype=torch.float64) for size in sizes), 0.1


norm_backward = Task(
    _norm_gradient,
    shown={"rows of 8": _norm(1, 3, 5, 8)},
    what="rows drawn by chance",
    drawn=lambda chance: _norm(chance.randrange(99), chance.randint(1, 4), chance.randint(3, 9)),
    call=without_autograd,
    count=5,
)
"""Exercise: the gradient of a layer norm's input, against autograd."""


def _accumulated(answer, sizes: list[int], before: int):
    """What the micro-batches add to w.grad, which holds `before` when they come; they must pass through autograd."""
    torch.manual_seed(sum(sizes))
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    w, micros, rows = draw(3), [(draw(n, 3), draw(n)) for n in sizes], sum(sizes)
    found, flowed, through, needed, held = run_there(_followed, answer, w, micros, before)
    refuse(
        f"micro-batches of {sizes} rows",
        {
            "w.grad is None: call backward() on each micro-batch's loss": found is None,
            "no backward() came to w: the gradient has to come from there, not from a formula of yours": (
                not flowed
            ),
            f"backward() came to w {len(flowed)} times: once for each of {len(micros)} micro-batches is enough": (
                len(flowed) > len(micros)
            ),
            f"{held} numbers are kept for backward at once, where the largest micro-batch needs {needed}: "
            "call backward() before the next micro-batch begins, or nothing is saved": held > needed,
            "w.grad held a gradient before the first micro-batch, which yours lost: add, do not clear": lambda: (
                before and torch.allclose(found, _summed(w, micros))
            ),
            "what backward() brought is not what w.grad got: leave the adding to backward()": lambda: (
                not torch.allclose(sum(flowed), found - before)
            ),
        },
    )
    passed = [
        grad is not None and torch.allclose(grad, _through(x, y, w, rows))
        for grad, (x, y) in zip(through, micros, strict=True)
    ]
    return found - before, _summed(w, micros), all(passed)


def _followed(answer, w, micros: list, before: int) -> tuple:
    """w.grad, what came to w and to each x, and how many numbers were kept at once: by the largest alone, by all."""
    w, micros = w.clone().requires_grad_(), [(x.clone().requires_grad_(), y) for x, y in micros]
    rows, flowed = sum(len(y) for _, y in micros), []
    with _saved() as needed:
        answer(w.detach().clone().requires_grad_(), [max(micros, key=lambda micro: len(micro[1]))], rows)
    for x, _ in micros:
        x.grad = None
    w.register_hook(flowed.append)
    w.grad = torch.full_like(w, before) if before else None
    with _saved() as held:
        answer(w, list(micros), rows)
    found = [
        None if grad is None else grad.detach() for grad in (w.grad, *flowed, *(x.grad for x, _ in micros))
    ]
    return found[0], found[1 : len(flowed) + 1], found[len(flowed) + 1 :], needed.most, held.most


def _through(x, y, w, rows: int):
    """The gradient of a micro-batch's x."""
    return 2 / rows * (x @ w - y)[:, None] * w


def _summed(w, micros):
    """The gradient of the mean over all rows."""
    x, y = map(torch.cat, zip(*micros, strict=True))
    return 2 * x.T @ (x @ w - y) / len(y)


accumulation = Task(
    None,
    shown=[([7], 0), ([4, 3], 0), ([1, 2, 4], 3), ([2, 3], 0)],
    what="micro-batches of {} rows",
    drawn=lambda chance: ([chance.randint(1, 5) for _ in range(chance.randint(1, 4))], chance.choice((0, 2))),
    call=_accumulated,
    rules=lambda found, sizes, before: {
        "divide each sum by the rows of the whole batch": not torch.allclose(*found[:2], rtol=1e-12),
        "right, but no gradient comes to x: a formula of yours stands in the place of the loss": not found[2],
    },
    count=5,
)
"""Exercise: the gradient of a batch from micro-batches of unequal size, in float64."""


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


TOKENS = (256, 1024, 8192)

what_to_keep = Puzzle(
    lambda found: sum(rebuilding(kept, tokens) for kept, tokens in zip(found, TOKENS, strict=True)),
    "C² operations a token",
    bar=16,
    best=15.3,
    cases=[(tokens,) for tokens in TOKENS],
    rules=lambda found: {
        sentence: broken
        for kept, tokens in zip(found, TOKENS, strict=True)
        for sentence, broken in _kept_wrongly(kept, tokens).items()
    },
)
"""Puzzle: what of a block to keep in little room, for three lengths."""


def _kept_wrongly(kept, tokens: int) -> dict:
    listed = isinstance(kept, list | tuple | Set)
    strange = [name for name in kept if name not in PARTS] if listed else []
    held = 1 + sum(PARTS[name][0] for name in set(kept) - set(strange)) if listed else 0
    return {
        f"return a list of names, not {kept!r}": not listed,
        f"{strange[:1]} is none of {', '.join(PARTS)}": strange,
        f"T = {tokens}: input and kept are {held} B T C, and there is room for {ROOM}": held > ROOM,
    }
