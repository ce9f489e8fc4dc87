"""Checkers of lesson 04: a step of data parallelism, a bucketed reducer, bytes, unequal shares, a puzzle of buckets."""

from functools import partial

import torch

from ...model import GPT2
from ...parallel.zero.costs import all_reduce_bytes
from ...reference import CONFIG, example_batch, serial_gradients
from .differences import Between, randoms
from .engine import Puzzle, Task, run_there
from .guards import PACKAGE
from .ranked import ranked, sent
from .reducer import reducer as reducer


def _batch():
    """Seven rows that only `mine` holds: the lesson's example batch is another."""
    return example_batch(CONFIG, 7, 11, seed=4)


def _two_steps(axis, answer) -> tuple:
    """The gradients of all parameters in two steps, and the bytes sent."""
    model, batch = GPT2(CONFIG).double(), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    grads = []
    for _ in range(2):
        answer(model, optimizer, batch.rows(axis.rank, axis.size), batch.total, axis)
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    return *grads, sent()


def _in_one(rank: int) -> tuple:
    batch, model = _batch(), GPT2(CONFIG).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    grads = []
    for _ in range(2):
        grads.append(serial_gradients(model, batch)[1])
        optimizer.step()
    best = 2 * 4 * 8 * sum(p.numel() for p in model.parameters()) // 3  # two steps of 2 (n - 1)/n S
    return *grads, Between(best // 2, best + 32 * len(grads[0]))


three_lines = ranked(
    ("the gradients of step 1", "the gradients of step 2", "bytes sent through comm in two steps"),
    _in_one,
    _two_steps,
    3,
    shown={"seven rows on three live ranks": ()},
    tolerance=1e-9,
)
"""Exercise: the gradients of a step of data parallelism, on three live ranks with seven rows, for two steps."""


step_bytes = Task(
    lambda elements, ranks, micro, each: all_reduce_bytes(elements, ranks, 0, each),
    shown={
        "a rank alone sends nothing": (1000, 1, 1, 4),
        "1000 floats, 4 ranks: reduce-scatter and all-gather, each (n-1)/n of 4000 bytes": (1000, 4, 1, 4),
        "1000 floats, 8 ranks: (n-1)/n grows to 1, it does not grow with n": (1000, 8, 1, 4),
        "five micro-batches: only the last one's backward sends": (1000, 4, 5, 4),
        "16-bit gradients": (1000, 4, 1, 2),
        "900 floats, 3 ranks, which is no power of two": (900, 3, 1, 4),
    },
    what="{} numbers on {} ranks, {} micro-batches, {} bytes each",
    drawn=lambda chance: (5040 * chance.randint(1, 99), chance.randint(1, 10), chance.randint(1, 9), 4),
    closed=("gpt2lab.parallel",),
)
"""Exercise: what one rank sends in a step of data parallelism."""


def _shares(counts: list[int], *shape: int, seed: int = 0) -> tuple[list, list[int]]:
    return randoms(seed, *[shape] * len(counts)), counts


def _new(answer, gradients, counts):
    found = answer(gradients, counts)
    assert not any(found is one for one in gradients), "give a new tensor: this one is the library's"
    return found


global_gradient = Task(
    lambda gradients, counts: sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts),
    shown={
        "shares of 30, 20 and 20 tokens": _shares([30, 20, 20], 3),
        "two ranks with shares of 1 and 5 tokens": _shares([1, 5], 3),
        "one rank, whose share is all": _shares([4], 3),
    },
    what="gradients of three dimensions, shares of {1} tokens",
    drawn=lambda chance: _shares(
        [chance.randint(1, 9) for _ in range(chance.randint(1, 5))], 2, 1, 3, seed=chance.randrange(99)
    ),
    call=partial(run_there, _new),
    closed=(PACKAGE,),
    count=5,
)
"""Exercise: the gradient of the mean loss from per-rank means and token counts."""


BACKWARDS = {  # ms at which each gradient is final, kB of each; ms of a message's latency, kB a ms of the link
    "equal layers": ([20 * (i + 1) for i in range(8)], [100] * 8, 20, 12.5),
    "uneven layers": ([10, 15, 40, 45, 70, 75, 100, 105, 130, 135], [40, 300] * 5, 6, 20),
    "a large embedding": ([10 * (i + 1) for i in range(10)] + [105], [100] * 10 + [600], 12, 25),
}


def exposed(groups, ready, sizes, latency: float, rate: float) -> float:
    """Milliseconds from the end of backward to the last sum, where these groups of gradients leave in this order."""
    free = 0.0
    for group in groups:
        free = max(free, max(ready[i] for i in group)) + latency + sum(sizes[i] for i in group) / rate
    return free - ready[-1]


def _no_buckets(found) -> dict:
    said = {}
    for groups, (name, (ready, *_)) in zip(found, BACKWARDS.items(), strict=True):
        sent, want = [i for group in groups for i in group], range(len(ready))
        missing, twice = set(want) - set(sent), {i for i in sent if sent.count(i) > 1}
        others = set(sent) - set(want)
        said |= {
            f"{name}: one of your buckets is empty, and would be a message without a gradient": [] in groups,
            f"{name}: the gradients {sorted(missing)} never leave, and replicas drift apart": missing,
            f"{name}: the gradients {[*twice]} are in two buckets, and would be summed twice": twice,
            f"{name}: there is no gradient {[*others]}, they are 0 to {len(want) - 1}": others,
        }
    return said | {
        "all in one bucket overlaps nothing with backward": all(len(groups) == 1 for groups in found),
        "each gradient by itself pays the latency": all(len(g) == 1 for groups in found for g in groups),
    }


group_gradients = Puzzle(
    lambda found: sum(map(exposed, found, *zip(*BACKWARDS.values(), strict=True))),
    "ms exposed",
    bar=108,
    best=103,
    read=lambda found: [[list(group) for group in groups] for groups in found],
    rules=_no_buckets,
    cases=[*BACKWARDS.values()],
)
"""Puzzle: buckets for three backwards, with the least time that no backward hides."""


def _code(unit: float):
    """What a message says of x (P,): the nearest multiples of `unit`, or for 0 signs and the mean size."""
    return lambda x: (x / unit).round() * unit if unit else x.sign() * x.abs().mean()


def _feedback(step, gradients, unit: float):
    """All that is sent where `step(code, gradient, kept)` gives what is sent and kept."""
    code, sent, kept = _code(unit), [], torch.zeros_like(gradients[0])
    for gradient in gradients:
        message, kept = step(code, gradient, kept)
        sent.append(message)
    return sent


def _gradients(chance) -> tuple:
    gradients = randoms(chance.randrange(10**6), *[(5,)] * chance.randint(3, 9))
    return gradients, chance.choice((0.0, 0.25, 0.5))


SIX = [torch.tensor([0.31, 1.42, -2.63], dtype=torch.float64) for _ in range(6)]

FORGETS = {  # c is the code, g a gradient, k what was kept
    "those messages say all digits: code what you send": lambda c, g, k: (g, k),
    "nothing of what was left out is ever sent": lambda c, g, k: (c(g), k),
    "what was kept before is lost where it did not come through": lambda c, g, k: (c(g + k), g - c(g)),
    "what is kept grows for ever: take off what was sent of it": lambda c, g, k: (c(g + k), k + g - c(g)),
    "what was kept is sent uncoded": lambda c, g, k: (c(g) + k, g - c(g)),
}

feedback = Task(
    partial(_feedback, lambda code, g, kept: (code(g + kept), g + kept - code(g + kept))),
    {"six gradients": (SIX, 1.0), "six gradients in another code, their signs and mean size": (SIX, 0.0)},
    what="some gradients",
    drawn=_gradients,
    call=lambda answer, gradients, unit: answer(gradients, _code(unit)),
    mistakes={words: partial(_feedback, step) for words, step in FORGETS.items()},
)
"""Exercise: error feedback, with codes that round, or send signs alone."""
