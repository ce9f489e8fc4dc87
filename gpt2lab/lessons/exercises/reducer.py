"""Checker of lesson 04's bucketed reducer: on a line that notes what leaves when, then by hooks on two live ranks."""

import torch

from ...model import GPT2
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...reference import CONFIG, example_batch
from . import close, live
from .watching import Held


class Line:
    """A link that remembers what it was asked to carry; sums arrive when waited for."""

    def __init__(self):
        self.messages, self.waited, self.sums = [], 0, Held()

    def all_reduce(self, flat):
        """Start summing a flat tensor with that of another rank, which holds 1, 2, 3, ... in it."""
        self.messages.append(flat)
        return Sum(self, flat)


class Sum:
    """What `all_reduce` gives: `.wait()` returns the sum."""

    def __init__(self, line, flat):
        self.line, self.flat = line, flat.clone()

    def wait(self):
        """The sum of both ranks."""
        self.line.waited += 1
        total = self.flat + torch.arange(1.0, len(self.flat) + 1, dtype=self.flat.dtype)
        self.line.sums.add(total)
        return total


SHAPES = {  # in the order in which backward finishes them; a bucket holds 8 elements or more
    "head": (2, 3),
    "second": (2,),  # 8 elements are exactly enough
    "first": (3, 3),
    "norm": (4,),
    "scale": (1,),
    "embedding": (2, 4),
    "positions": (2, 1),  # never fills a bucket
}
FULL = 8


def buckets(sizes, full: int) -> list[int]:
    """Elements of each bucket that is sent as soon as it holds `full` or more; the last one may hold fewer."""
    found, held = [], 0
    for size in sizes:
        held += size
        if held >= full:
            found.append(held)
            held = 0
    return found + [held] * (held > 0)


def reducer(answer) -> None:
    """Exercise: gradients join a bucket as they come; a full bucket leaves at once; finish() gives the sums.

    First on a line that only notes, where everything can be seen; then by hooks on two live ranks, twice.
    """
    line = Line()
    mine = {
        name: torch.full(shape, float(i), dtype=torch.float64)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    work, sizes = answer(line.all_reduce, FULL), [g.numel() for g in mine.values()]
    want = buckets(sizes, FULL)
    left, due = [], []
    for number, (name, grad) in enumerate(mine.items(), 1):
        work.ready(name, grad)
        left.append([len(m) for m in line.messages])
        due.append([size for size in buckets(sizes[:number], FULL) if size >= FULL])
    _in_time(left, due, sizes)
    assert not line.waited, (
        "you waited while backward ran: keep what all_reduce returns, and wait in finish()"
    )
    sums = work.finish()
    sent = [len(m) for m in line.messages]
    assert sums is not None, "finish() returned None: return the sums by name"
    assert sum(sent) >= sum(sizes), (
        f"only {sum(sent)} of {sum(sizes)} elements were sent: the last bucket is not full, and must go too"
    )
    assert sent == want, f"messages of {sent} elements, expected {want}: send when the bucket holds 8 or more"
    assert set(sums) == set(mine), f"finish() returned {sorted(sums)}, expected {sorted(mine)}"
    place, other = 0, [i for size in want for i in range(1, size + 1)]
    for name, grad in mine.items():
        assert sums[name].shape == grad.shape, (
            f"{name} came back as {tuple(sums[name].shape)}, not as {tuple(grad.shape)}: give each its shape again"
        )
        theirs = torch.tensor(other[place : place + grad.numel()], dtype=torch.float64).view_as(grad)
        close(sums[name], grad + theirs, f"{name} (each tensor gets its own part of the summed bucket)")
        place += grad.numel()
    del sums
    _second_step(line, work, mine)
    _reduced_live(answer)


def _second_step(line: Line, work, mine: dict) -> None:
    """Another step with the same reducer, in which the last bucket is exactly full."""
    line.messages, line.waited, first, line.sums = [], 0, line.sums, Held()
    for name in ("head", "second"):
        work.ready(name, mine[name])
    assert [len(m) for m in line.messages] == [8], (
        f"in the second step messages of {[len(m) for m in line.messages]} elements have left after 8: "
        "what is counted has to begin anew in finish()"
    )
    try:
        sums = work.finish()
    except (RuntimeError, ValueError) as error:
        raise AssertionError(f"nothing was left for finish() to send, and it sent that: {error}") from None
    assert line.waited == 1, f"in the second step finish() waited for {line.waited} sums, and 1 was under way"
    assert set(sums) == {"head", "second"}, f"in the second step finish() returned {sorted(sums)}"
    kept = len(first.alive())
    assert not kept, (
        f"after the second step {kept} sums of the first are in memory still, and nobody will ask for them: "
        "a reducer that keeps them holds all gradients of all steps"
    )


def _in_time(left: list[list[int]], due: list[list[int]], sizes: list[int]) -> None:
    """Whether after each gradient the messages that have left are those that are due."""
    assert left[-1], (
        "nothing was sent while backward ran: send a bucket as soon as it holds 8 elements or more"
    )
    assert left[1] != sizes[:2], (
        "one message a tensor: let tensors gather until a bucket holds 8 elements or more"
    )
    assert left == due or left[1:] != due[:-1], (
        "each bucket leaves one gradient late: look at its size when a gradient has joined it, not before"
    )
    for number, (sent, right) in enumerate(zip(left, due, strict=True), 1):
        assert sent == right, (
            f"after {number} gradients of {sizes[:number]} elements messages of {sent} have left, {right} are due: "
            "count elements, not tensors; 8 are enough"
        )


def _reduced_live(answer) -> None:
    full = 3000
    found = live(_hooked, answer, full, ranks=2, what="two live ranks")
    batch, model = example_batch(CONFIG, 7, 11), GPT2(CONFIG).double()
    sizes = [p.numel() for p in model.parameters()]
    for step in range(2):
        model.zero_grad()
        _part(model, batch, batch.total).backward()
        for rank, steps in enumerate(found):
            sums, messages, order = steps[step]
            what = f"two live ranks, step {step + 1}"
            for name, p in model.named_parameters():
                assert name in sums, (
                    f"{what}: finish() of rank {rank} has no {name}. Does a step begin empty?"
                )
                close(sums[name], p.grad, f"{what}: the summed gradient of {name} on rank {rank}", 1e-9)
            expected = len(buckets(order, full))
            assert messages == expected, f"{what}: {messages} all-reduces, the hooks fill {expected} buckets"
        assert sorted(order) == sorted(sizes)
        _descend(model)


def _hooked(rank, world_size, answer, full):
    """Two steps with one reducer, called by the hooks of autograd: (sums, messages, sizes in order) of each."""
    axis = Mesh(dp=world_size)["dp"]
    model, batch = GPT2(CONFIG).double(), example_batch(CONFIG, 7, 11)
    work = answer(lambda flat: comm.all_reduce(flat, axis, async_op=True), full)
    found, order = [], []

    def hook(name):
        def ready(p):
            order.append(p.numel())
            work.ready(name, p.grad)

        return ready

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(hook(name))
    for _ in range(2):
        model.zero_grad()
        comm.clear_log()
        _part(model, batch.rows(rank, world_size), batch.total).backward()
        sums = {name: total.clone() for name, total in work.finish().items()}
        found.append((sums, len(comm.log), list(order)))
        order.clear()
        for name, p in model.named_parameters():
            p.grad = sums.get(name, p.grad)
        _descend(model)
    return found


def _part(model, batch, total):
    return model.loss(model(batch.tokens), batch.targets) / total


def _descend(model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
