"""Checkers of lesson 04: a step of data parallelism, a bucketed reducer, bytes, unequal shares, a puzzle of buckets."""

import torch

from ...model import GPT2
from ...parallel.zero.costs import all_reduce_bytes
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...reference import CONFIG, example_batch
from . import close, live, returned, scored


class Line:
    """A link that remembers what it was asked to carry; sums arrive when waited for."""

    def __init__(self):
        self.messages, self.waited = [], 0

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
        return self.flat + torch.arange(1.0, len(self.flat) + 1, dtype=self.flat.dtype)


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
    _reduced_live(answer)


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


def three_lines(answer) -> None:
    """Exercise: the gradients of a step of data parallelism, on three live ranks with seven rows, for two steps."""
    found = live(_two_steps, answer, ranks=3, what="three live ranks")
    batch, model = example_batch(CONFIG, 7, 11), GPT2(CONFIG).double()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    size = 8 * sum(p.numel() for p in model.parameters())
    best = 2 * 4 * size // 3  # two steps of 2 (n - 1)/n S
    for step in range(2):
        optimizer.zero_grad()
        _part(model, batch, batch.total).backward()
        want = [p.grad for p in model.parameters()]
        per_rank = [steps[step] for steps, _ in found]
        _summed_right(per_rank, want, names, step, [sent for _, sent in found])
        optimizer.step()
    for rank, (_, sent) in enumerate(found):
        assert sent <= best + 16 * len(names) * 2, (
            f"rank {rank} sent {sent} bytes in two steps. An all-reduce of each gradient takes {best}"
        )


def _summed_right(per_rank, want, names, step: int, sent: list[int]) -> None:
    """One step's gradients of all ranks against those of one process."""
    assert all(g is not None for grads in per_rank for g in grads), (
        "a gradient is None: was backward() called?"
    )
    ratio = {round(float(grads[0].norm() / want[0].norm()), 6) for grads in per_rank}
    if any(not torch.equal(a, b) for grads in per_rank for a, b in zip(per_rank[0], grads, strict=True)):
        assert any(sent), (
            "replicas drift apart: each rank steps by the gradient of its own rows, nothing was sent"
        )
        raise AssertionError(
            "replicas drift apart although bytes were sent: all_reduce leaves its input as it was, keep its result"
        )
    assert ratio != {round(1 / len(per_rank), 6)}, "a third of the right gradient: it is summed, not averaged"
    for grads in per_rank:
        for name, got, right in zip(names, grads, want, strict=True):
            hint = "divide each rank's sum of losses by the tokens of *all* ranks, and sum gradients once"
            close(got, right, f"step {step + 1}, the gradient of {name} ({hint})", 1e-9)


def _two_steps(rank, world_size, answer):
    """([gradients of all parameters] of two steps, bytes sent)."""
    axis = Mesh(dp=world_size)["dp"]
    model, batch = GPT2(CONFIG).double(), example_batch(CONFIG, 7, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    grads = []
    comm.clear_log()
    for _ in range(2):
        answer(model, optimizer, batch.rows(rank, world_size), batch.total, axis)
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return grads, sum(size for _, size, _ in comm.traffic().values())


def step_bytes(answer) -> None:
    """Exercise: what one rank sends in a step of data parallelism."""
    close(answer(elements=1000, ranks=1, micro=1, each=4), 0, "a rank alone sends nothing")
    close(
        answer(1000, 4, 1, 4),
        all_reduce_bytes(1000, 4, 0, 4),
        "1000 floats, 4 ranks: reduce-scatter and all-gather, each (n-1)/n of 4000 bytes",
    )
    close(answer(1000, 8, 1, 4), 7000, "1000 floats, 8 ranks: (n-1)/n grows to 1, it does not grow with n")
    close(answer(1000, 4, 5, 4), 6000, "five micro-batches: only the last one's backward sends")
    close(answer(1000, 4, 1, 2), 3000, "16-bit gradients")


def global_gradient(answer) -> None:
    """Exercise: the gradient of the mean loss from per-rank means and token counts."""
    torch.manual_seed(0)
    grads = [torch.randn(3, dtype=torch.float64) for _ in range(3)]
    counts = [30, 20, 20]
    want = sum(g * c for g, c in zip(grads, counts, strict=True)) / 70
    got = returned(answer([g.clone() for g in grads], counts))
    mean = sum(grads) / 3
    assert not torch.allclose(got, mean), (
        "that is the mean of means: ranks with 30 tokens must weigh more than those with 20"
    )
    assert not torch.allclose(got, sum(grads)), (
        "that is the sum of means: weigh each by its share of the 70 tokens"
    )
    close(got, want, "shares of 30, 20 and 20 tokens")
    close(answer(grads[:2], [1, 5]), (grads[0] + 5 * grads[1]) / 6, "two ranks with shares of 1 and 5 tokens")


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


def group_gradients(answer) -> str:
    """Puzzle: buckets for three backwards, with the least time that no backward hides."""
    total, counts = 0.0, []
    for name, case in BACKWARDS.items():
        groups = returned(answer(*(list(x) if isinstance(x, list) else x for x in case)))
        groups = [list(group) for group in groups]
        assert all(groups), f"{name}: one of your buckets is empty, and would be a message without a gradient"
        sent, want = sorted(i for group in groups for i in group), list(range(len(case[0])))
        missing, twice = set(want) - set(sent), {i for i in sent if sent.count(i) > 1}
        assert not missing, f"{name}: the gradients {sorted(missing)} never leave, and replicas drift apart"
        assert not twice, (
            f"{name}: the gradients {sorted(twice)} are in two buckets, and would be summed twice"
        )
        counts.append((len(groups), len(want)))
        total += exposed(groups, *case)
    assert any(n > 1 for n, _ in counts), (
        f"{total:g} ms exposed: all in one bucket overlaps nothing with backward"
    )
    assert any(n < most for n, most in counts), (
        f"{total:g} ms exposed: each gradient by itself pays the latency"
    )
    return scored(total, "ms exposed", bar=108, best=103)
