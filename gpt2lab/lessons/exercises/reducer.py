"""Checker of lesson 04's bucketed reducer: on a line that notes what leaves when, then by hooks on two live ranks."""

import gc
import math
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...model import GPT2
from ...ranks import comm
from ...reference import CONFIG, example_batch, serial_gradients
from .engine import Task, run_there
from .ranked import ranked, start_counting


class Line:
    """A link that remembers how many elements it was asked to carry at a time; sums arrive when waited for."""

    def __init__(self):
        self.messages, self.waited, self.held = [], 0, set()

    def all_reduce(self, flat):
        """Start summing a flat tensor with that of another rank, which holds 1, 2, 3, ... in it."""
        self.messages.append(len(flat))
        return Sum(self, flat)

    def hold(self, tensor):
        """Look later whether the memory of a tensor is in use still."""
        self.held.add(StorageWeakRef(tensor.untyped_storage()))


class Sum:
    """What `all_reduce` gives: `.wait()` returns the sum."""

    def __init__(self, line, flat):
        self.line, self.flat, self.sent = line, flat, flat.clone()

    def wait(self):
        """The sum of both ranks."""
        self.line.waited += 1
        assert torch.equal(self.flat, self.sent), (
            "the numbers that all_reduce was given are changed before wait(): they are still on their way"
        )
        total = self.flat + torch.arange(1.0, len(self.flat) + 1, dtype=self.flat.dtype)
        self.line.hold(total)
        return total


SHAPES = {  # in the order in which backward finishes them; a bucket holds 8 elements or more
    "head": (2, 3),
    "second": (2,),  # 8 elements are exactly enough
    "first": (3, 3),
    "norm": (4,),
    "scale": (1,),
    "embedding": (2, 5),  # joins the bucket that is there, although it would fill one alone
    "positions": (2, 1),
    "bias": (3,),  # with the one before it never fills a bucket
}
FULL = 8
STEPS = {"": [*SHAPES], " of the second step": ["head", "second"], " of the third step": [*SHAPES]}


def buckets(sizes, full: int) -> list[int]:
    """Elements of each bucket that is sent as soon as it holds `full` or more; the last one may hold fewer."""
    found, held = [], 0
    for size in sizes:
        held += size
        if held >= full:
            found.append(held)
            held = 0
    return found + [held] * (held > 0)


def _on_a_line(answer) -> dict:
    """What leaves when on a line that only notes, and what finish() gives, in three steps of one reducer."""
    line, sizes = Line(), [math.prod(shape) for shape in SHAPES.values()]
    work, found, held = answer(line.all_reduce, FULL), {}, []
    for step, names in STEPS.items():
        line.messages, line.waited, line.held = [], 0, set()
        held.append(line.held)
        for number, name in enumerate(names, 1):
            line.hold(gradient := _gradient(name))
            work.ready(name, gradient)
            found[f"messages after gradients of {sizes[:number]} elements{step}"] = [*line.messages]
        found[f"waits while backward runs{step}"] = line.waited
        try:
            sums = work.finish()
        except (RuntimeError, ValueError) as error:
            raise AssertionError(f"finish(){step} raises {error}: has it something to send?") from None
        found[f"messages after finish(){step}"] = line.messages
        found[f"waits in finish(){step}"] = line.waited
        found[f"what finish() returns{step}"] = sums and {name: total.clone() for name, total in sums.items()}
        del sums
    gc.collect()  # what a class holds that was made in a call stays until then
    return found | {
        "gradients and sums of the first step that are in memory still": sum(
            not memory.expired() for memory in held[0]
        )
    }


def _leaves() -> dict:
    """The same of a right reducer; the other rank has 1, 2, 3, ... in each message."""
    sizes, found = [math.prod(shape) for shape in SHAPES.values()], {}
    for step, names in STEPS.items():
        for number in range(1, len(names) + 1):
            full = [size for size in buckets(sizes[:number], FULL) if size >= FULL]
            found[f"messages after gradients of {sizes[:number]} elements{step}"] = full
        want = buckets(sizes[: len(names)], FULL)
        other = torch.cat([torch.arange(1.0, n + 1, dtype=torch.float64) for n in want])
        parts = zip(names, other.split(sizes[: len(names)]), strict=True)
        found |= {
            f"waits while backward runs{step}": 0,
            f"messages after finish(){step}": want,
            f"waits in finish(){step}": len(want),
            f"what finish() returns{step}": {n: _gradient(n) + part.view(SHAPES[n]) for n, part in parts},
        }
    return found | {"gradients and sums of the first step that are in memory still": 0}


def _gradient(name: str) -> torch.Tensor:
    return torch.full(SHAPES[name], float(list(SHAPES).index(name)), dtype=torch.float64)


on_a_line = Task(_leaves, shown={"a line": ()}, call=partial(run_there, _on_a_line))


def _step_by_step(rank: int) -> list[tuple]:
    """Gradients of two steps in one process, and how many buckets the hooks fill."""
    batch, model, found = example_batch(CONFIG, 7, 11), GPT2(CONFIG).double(), []
    for _ in range(2):
        found.append((serial_gradients(model, batch)[1], True))
        _descend(model)
    return tuple(x for step in found for x in step)


on_two_ranks = ranked(
    tuple(f"{what} {n}" for n in (1, 2) for what in ("the sums of step", "one message a bucket in step")),
    _step_by_step,
    lambda axis, answer: _hooked(axis, answer, 3000),
    2,
    shown={"two live ranks": ()},
    tolerance=1e-9,
)


def reducer(answer) -> None:
    """Exercise: gradients join a bucket as they come; a full bucket leaves at once; finish() gives the sums.

    First on a line that only notes, where everything can be seen; then by hooks on two live ranks, twice.
    """
    on_a_line(answer)
    on_two_ranks(answer)


def _hooked(axis, answer, full: int) -> tuple:
    """Two steps with one reducer, called by the hooks of autograd: the sums, and whether each bucket is a message."""
    model, batch = GPT2(CONFIG).double(), example_batch(CONFIG, 7, 11)
    mine = batch.rows(axis.rank, axis.size)
    work = answer(lambda flat: comm.all_reduce(flat, axis, async_op=True), full)
    found, order = [], []

    def ready(name, p):
        order.append(p.numel())
        work.ready(name, p.grad)

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(partial(ready, name))
    for _ in range(2):
        model.zero_grad()
        start_counting()
        (model.loss(model(mine.tokens), mine.targets) / batch.total).backward()
        sums = {name: total.clone() for name, total in work.finish().items()}
        found += [sums, len(comm.log) == len(buckets(order, full))]
        order.clear()
        for name, p in model.named_parameters():
            p.grad = sums.get(name, p.grad)
        _descend(model)
    return tuple(found)


def _descend(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
