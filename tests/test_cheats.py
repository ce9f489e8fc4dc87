"""Answers that are right for the shown cases only, or by another way than asked, do not pass."""

import math
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lesson_cells import across, judged

from gpt2lab.experts.rows import Combine
from gpt2lab.lessons import exercises
from gpt2lab.lessons.desk import Desk
from gpt2lab.lessons.exercises import (
    automatic,
    context,
    cuts,
    data,
    differences,
    experts,
    gpt2,
    hardware,
    meshes,
    pipeline,
    placement,
    predictions,
    start,
    tasks,
    tensor,
    trade_off,
    travelling_sum,
    verdict,
)
from gpt2lab.lessons.exercises.engine import SEED, Task
from gpt2lab.lessons.exercises.guards import closed, guarded, restored
from gpt2lab.lessons.exercises.watching import memories
from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.lessons.labs import decisions, rings
from gpt2lab.machine import timing
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import expert, finish
from gpt2lab.parallel.zero.costs import all_reduce_bytes
from gpt2lab.planner import placement as planned
from gpt2lab.plots import tensor as figures
from gpt2lab.ranks import comm
from gpt2lab.reference import CONFIG, example_batch, example_weights, serial_gradients, serial_model
from gpt2lab.schedules import Cost

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


BOTH = pytest.mark.parametrize(
    "judge", [Desk.verdicts, pytest.param(across, marks=pytest.mark.rotates)], ids=["notebook", "grader"]
)
"""What a checker asks of a call in its own process, it asks of one in the answer's."""

# --- a right answer with a mistake in it

GIVEN = "changed what it was given"
REDUCER, VOCABULARY, COLUMNS = "the bucketed reducer", "loss over a cut vocabulary", "columns gathered"
RING, ATTENTION, THERE, BY_HAND = (
    "ring all-reduce", "ring attention, backward", "there and back", "F and B by hand",
)  # fmt: skip
SHIFTED = "        moving = comm.ring_shift(moving, axis)\n"
GRADIENTS = "        moving[2:] = comm.ring_shift(moving[2:].clone(), axis)\n"
ALL_KEYS = "while len(every) < n: every.append(comm.ring_shift(every[-1], axis))\n"
CHANGED = {  # what is wrong: (exercise, text of its solution, what stands there instead, ..., the verdict's words)
    "names that are there twice":
        ("unbeaten", "points.values())]", "points.values()) for _ in range(2)]", "some are there twice"),
    "a clock of its own":  # and the last plan that fits, as all take as long
        ("a planner", "    n, found", "    object.__setattr__(case, 'seconds', lambda plan: 1.0)\n    n, found",
         "min(found)", "max(found)", "2.7 times as long as"),
    "messages that are emptied":
        ("which axis gets the fast links", "    return max", "    sent.clear()\n    return max", GIVEN),
    "a bubble over the busy time":
        ("bubble of GPipe", "(m + p - 1)", "(m if m > 5 * p else m + p - 1)", "a drawn case"),
    "1F1B in another order of micro-batches":
        ("1F1B", "    for i in range(m - warm_up):", "    order[1:] = order[:0:-1]\n    for i in range(m - warm_up):",
         "the order [0, 2, 1, 3"),
    "1F1B in halves":
        ("1F1B", '("B", i)]\n', '("I", i), ("W", i)]\n', '[("B", i) for i', '[(half, i) for half in "IW" for i',
         "0I0 is half a backward"),
    "only sorted shards":
        ("one hop", "min(window, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes[:-1])",
         "window for size in sorted(sizes)[1:-1]", "is one hop enough: expected False"),
    "scores that are taken away":
        ("gate", "    return best", "    p.detach().scatter_(1, best.indices, -1.0)\n    return best", GIVEN),
    "rows that are written over":
        ("combine_backward", "return grad * weights[:, None], (grad * rows).sum(-1)",
         "of_weights = (grad * rows).sum(-1)\n    return rows.copy_(grad * weights[:, None]), of_weights", GIVEN),
    "cuts of matrices alone":
        ("one round", "theirs.index(index)", "0 if theirs[0] == index else 1", "a drawn case"),
    "what is read and only written":
        ("what the tasks touch", 'writes("h", block)', 'updates("h", block)',
         "'up 0:2' says updates of h, and does not both read and write it"),
    "waits that are emptied":
        ("who is to blame", "    return next(", "    found = next(",
         ", None)", ", None)\n    waits.clear()\n    return found", GIVEN),
    "the library's own tensor":
        ("unequal shares", "    return ", "    if len(counts) == 1:\n        return gradients[0]\n    return ",
         "this one is the library's"),
    "one buffer for all":
        (REDUCER, "self.all_reduce(flat)", "self.all_reduce(self.buffer[: len(flat)].copy_(flat))",
         "self.flying = [], []", "self.flying, self.buffer = [], [], torch.empty(100, dtype=torch.float64)",
         "are changed before wait()"),
    "a rest in parts":
        (REDUCER, "        if self.bucket:\n            self.send()",
         "        rest = self.bucket\n        for self.bucket in [[one] for one in rest]:\n            self.send()",
         "got (5,): 8 9 15 2 3 in place of 8 9 15 5"),
    "a large gradient alone":
        (REDUCER, "        self.bucket.append",
         "        if self.bucket and grad.numel() >= self.full:\n            self.send()\n        self.bucket.append",
         "got (4,): 8 9 5 10 in place of 8 9 15"),
    "gradients that are kept":
        (REDUCER, "self.flying = [], []", "self.flying, self.all = [], [], []",
         "        self.bucket.append", "        self.all.append(grad)\n        self.bucket.append",
         "that are in memory still: expected 0, got 8"),
    "a shard of another type": ("a shard", "whole.new_zeros", "torch.zeros", "your shard is torch.float64"),
    "a view of what was padded":
        ("a shard", "    return padded", "    mine = padded",
         ".clone()", "\n    return mine if len(padded) > len(whole) else mine.clone()",
         "of 86 elements 90 stay in memory"),
    "a stretch that is padded in place":
        ("a shard", "padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])",
         "old, padded = len(whole), whole.resize_(length * ranks)\n    padded[old:] = 0", GIVEN),
    "means that are gathered":
        ("a step of ZeRO-1", "all_gather(mine - rate * reduce_scatter(gradient))",
         "weights - rate * ranks * all_gather(reduce_scatter(gradient) / ranks)", "you gather gradients"),
    "eight ranks or more": ("bytes held", "1 / ranks", "1 / max(ranks, 8)", "a drawn case"),
    "short gradients of weights": ("idle time", "i - w", "i - min(w, i)", "times 4, 1, 3: expected 4, got 8"),
    "a gradient by formula":
        ("accumulation", "(errors.sum() / rows)", "(w * (2 / rows * x.T @ (x @ w - y)).detach()).sum()",
         "a formula of yours"),
    "least squares":
        ("the best cut", "(sum(times[:j]),", "(sum(times[:j]) ** 2,",
         "(max(best[i, s - 1][0], sum(times[i:j])),", "(best[i, s - 1][0] + sum(times[i:j]) ** 2,",
         "expected 13, got 14"),
    "the longer of forward and backward":
        ("beat equal counts, live", "f + b for f, b in", "max(pair) for pair in", "expected 21, got 24.5"),
    "every plan": ("Alpa's recurrence", "    @cache\n", "", "you try everything"),
    "eight spares everywhere":
        ("spares and saves", "math.ceil(broken + 2 * math.sqrt(broken))", "8",
         "31.6 % of the work are lost, at most 24 pass. Too much goes to waiting"),
    "terms straight to all":  # as many bytes as on a ring
        ("the sum that travels", "    total = term((axis.rank - 1) % axis.size)",
         "    r, others = axis.rank, [p for p in range(axis.size) if p != axis.rank]\n"
         "    coming = [comm.irecv(torch.empty(sizes[r], 2).double(), axis, p) for p in others]\n"
         "    going = [comm.isend(term(p), axis, p) for p in others]\n"
         "    total = term(r) + sum(message.wait() for message in coming)\n    [handle.wait() for handle in going]",
         "    for hop in range(2, axis.size + 1):", "    for hop in ():", "neighbours that it sends to"),
    "targets that are shifted": (VOCABULARY, "targets - first", "targets.sub_(first)", GIVEN),
    "letters of one norm of a block":
        ("letters of weights", '"ln_" in', '"ln_1" in name or "ln_f" in', "h.0.ln_2.weight, sp=False"),
    "letters of one layer":
        ("letters of weights", '"ln_" in', 'name[1:] in (".0.ln_1.weight", ".0.ln_1.bias", ".0.ln_2.weight", '
         '".0.ln_2.bias") or "ln_f" in', "a drawn case"),
    "numbers of AdamW as they were shown":
        ("AdamW by hand", "    m =", "    betas = 0.9, 0.95\n    m =", "a drawn case"),
    "an eps as it was shown": ("AdamW by hand", "    m =", "    eps = 1e-3\n    m =", "a drawn case"),
    "a gradient that is squared": ("AdamW by hand", "grad**2", "grad.pow_(2)", GIVEN),
    "the two ends of each rank":  # which are the targets of the shown cases
        (VOCABULARY, "target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)",
         "r, target = 2 * axis.rank, logits.new_zeros(6)\n"
         "    target[r], target[r + 1] = logits[r, 0], logits[r + 1, -1]", "a drawn case"),
    "broadcasts in turn":
        (COLUMNS, "comm.all_gather(y, axis, 1)",
         "torch.cat([comm.broadcast(y, axis, root) for root in range(axis.size)], 1)", "got ['broadcast']"),
    "a gradient that is written over":
        (COLUMNS, "        return comm.reduce_scatter(grad, ctx.axis, 1), None",
         "        found = comm.reduce_scatter(grad, ctx.axis, 1)\n        grad.zero_()\n        return found, None",
         "whether backward leaves the gradients that it is given as they were"),
    "widths that are written down":
        (COLUMNS, "ctx.axis, 1)", "ctx.axis, 1, [{6: 2, 9: 3, 3: 1}[grad.size(1)]] * ctx.axis.size)",
         "three matrices on 2 ranks"),
    "the axis of the last call":
        (COLUMNS, "ctx.axis = axis", "MyGather.axis = axis",
         "grad, ctx.axis", "grad, MyGather.axis", "invalid gradient"),
    "lists that are emptied":
        ("who sends what", "    return torch", "    have.clear()\n    return torch", GIVEN),
    "messages past the wire":  # where zeros go round as in a ring
        (RING, "x.tensor_split", "torch.zeros_like(x).tensor_split", "    return torch.cat(chunks)",
         "    others = [(r + step) % n for step in range(1, n)]\n"
         "    going = [comm.isend(x, wire.axis, p) for p in others]\n"
         "    total = x + sum(comm.irecv(x, wire.axis, p).wait() for p in others)\n"
         "    [handle.wait() for handle in going]\n    return total", "got ['send of 48 bytes']"),
    "notes that were forged":  # which say nothing of messages beside those of the ring
        (RING, "    return torch.cat(chunks)",
         "    noted, others = wire.noted[:], [p for p in range(n) if p != r]\n"
         "    going = [wire.isend(x, p) for p in others]\n    total = x + sum(wire.recv(x, p) for p in others)\n"
         "    [handle.wait() for handle in going]\n    wire.noted[:] = noted\n    return total",
         "got ['send of 48 bytes']"),
    "rows at home": ("sent", "n = len(rows)", "n, rows[i][i] = len(rows), 0", GIVEN),
    "one count for each rank":
        ("sent", "8 * (experts - experts // n)", "8 * (n - 1)", "24 bytes of it are counts"),
    "an old folder that goes first":
        ("whole or absent", "    partial.mkdir()\n",
         "    partial.mkdir()\n    if target.exists():\n        target.rename(old)\n        shutil.rmtree(old)\n",
         "the new one is not complete beside it"),
    "an old folder that is moved first":
        ("whole or absent", "    partial.mkdir()\n",
         "    shutil.rmtree(old, ignore_errors=True)\n    if target.exists():\n        target.rename(old)\n"
         "    partial.mkdir()\n", "the new one is not complete beside it"),
    "a folder that is used again":
        ("whole or absent", "    shutil.rmtree(partial, ignore_errors=True)\n    partial.mkdir()",
         "    partial.mkdir(exist_ok=True)", "should hold {'e': 'epsilon'}, not"),
    "a sum of all inside":
        ("two levels", "comm.reduce_scatter(x, inside)",
         "comm.all_reduce(x, inside).chunk(inside.size)[inside.rank].contiguous()",
         "bytes sent inside on rank 0: 96 are enough, got 144"),
    "the first number of what comes":
        ("a receive that gives its core back", "x.copy_", "lambda found: x.fill_(found[0])", "not [41.0, 41.0]"),
    "one sums for all":  # as many bytes in all, and not evenly
        ("cheaper path", "    half = comm.reduce_scatter(x, x_axis, 0)\n",
         "    total = comm.reduce(x, x_axis)\n    total = total if x_axis.rank else comm.all_reduce(total, y_axis)\n",
         "comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0)", "comm.broadcast(total, x_axis)",
         "bytes sent on rank 0: expected 384, got 512"),
    "shapes that ranks divide":
        ("gathered twice", "[: shape[0] * shape[1]].view(shape)", ".view(shape)", "is invalid for input"),
    "no gradient of x":  # of the first layer's
        ("gathered twice", "= shape, axis\n", "= shape, axis\n        ctx.first = x.grad_fn is None\n",
         "of_x = grad", "of_x = None if ctx.first else grad",
         "the gradient of x on rank 0: your function returned None"),
    "every block is kept":
        (ATTENTION, "    for step", "    kept = []\n    for step", "        moving = comm",
         "        kept.append(moving)\n        moving = comm", "rank 3 of 4 holds the keys of 3 others at once"),
    "all keys, then products":
        (ATTENTION, "    for step", f"    every = [moving[:2]]\n    {ALL_KEYS}    for step",
         "= moving[:2]", "= every[step]", SHIFTED, GRADIENTS, "2 other ranks when it had computed with 0 blocks"),
    "its own block, all keys":
        (ATTENTION, "    for step", "    every = [moving[:2]]\n    for step", "= moving[:2]", "= every[step]",
         SHIFTED, f"        {ALL_KEYS}{GRADIENTS}", "3 other ranks when it had computed with 1 blocks"),
    "past the neighbours":  # keys to all later ranks, gradients back
        (ATTENTION, "    for step",
         "    going = [comm.isend(moving[:2].clone(), axis, p) for p in range(r + 1, n)]\n    for step",
         "= moving[:2]", "= comm.recv(moving[:2].clone(), axis, owner) if step else moving[:2]",
         "            moving[2] += ds.T @ q\n            moving[3] += p.T @ grad\n",
         "            part = torch.stack([ds.T @ q, p.T @ grad])\n            if step:\n"
         "                going.append(comm.isend(part, axis, owner))\n            else:\n"
         "                moving[2:] += part\n", SHIFTED, "",
         "    return dq", "    moving[2:] += sum(comm.recv(moving[2:].clone(), axis, p) for p in range(r + 1, n))\n"
         "    [handle.wait() for handle in going]\n    return dq", "on a ring only neighbours talk"),
    "halos that are square":
        ("give back", "irecv(grad[:window].clone()", "irecv(grad.new_empty(window, window)",
         "does not fit its receiver"),
    "the checker's numbers":  # and zeros travel
        ("give back", "isend(grad[:window].clone()", "isend(torch.zeros_like(grad[:window])",
         "        own[-window:] += comm", "        comm", "1).wait()\n",
         "1).wait()\n        sizes = ((4, 4, 4), (5, 3, 2))[window == 3]\n"
         "        own[-window:] += exercises._halo_gradients(sizes, window)[axis.rank + 1][:window]\n",
         "knows the answer"),
    "rows that are emptied":
        (THERE, "return torch.cat(comm.all_to_all(rows.split(by_rank",
         "return (torch.cat(comm.all_to_all(rows.split(by_rank",
         "shapes)), table", "shapes)), rows.zero_())[0], table", GIVEN),
    "counts that are emptied":
        (THERE, "return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes))",
         "return (torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes)), counts.zero_())[0]",
         GIVEN),
    "no gradient there":
        (THERE, "rows.split(by_rank", "rows.detach().split(by_rank", "no right gradient comes through `there`"),
    "no gradient back":
        (THERE, "rows.split(table", "rows.detach().split(table", "no right gradient comes through `back`"),
    "a guess at what comes back":  # beside zeros that travel
        (THERE, "    by_rank = ", "    comm.guess, by_rank = rows, ",
         "    return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes))",
         "    comm.all_to_all((0 * rows).split(table.sum(1).tolist()), axis, shapes)\n    return -comm.guess",
         "comes back with its name only"),
    "all versions stay in memory":
        ("a stash", "        self.kept[self.used] = [p.data.clone() for p in self.parameters]",
         "        self.kept[self.used] = [p.data.clone() for p in self.parameters]\n"
         "        self.all = [*getattr(self, 'all', []), self.kept[self.used]]", "are in memory for"),
    "a stash of three versions":
        ("a stash", "        self.kept[self.used] = [p.data.clone() for p in self.parameters]",
         "        self.kept[self.used] = [p.data.clone() for p in self.parameters]\n"
         "        self.kept = dict(sorted(self.kept.items())[-2:])", "versions [0, 1, 2, 3"),
    "a second list of activations":
        (BY_HAND, ".wait().requires", ".wait().clone().requires", "= x, y\n",
         "= x, y\n        run_op.copies = [*getattr(run_op, 'copies', []), (x, y)]\n",
         "is there a second list that keeps it?"),
    "forward again":
        (BY_HAND, "        y = s.stage(x, i)\n        s.kept[i] = x, y",
         "        with torch.no_grad():\n            y = s.stage(x, i)\n        s.kept[i] = x, None",
         "x, y = s.kept.pop(i)", "x, _ = s.kept.pop(i)\n        y = s.stage(x, i)",
         "B, which would compute forward again"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", CHANGED)
def test_a_solution_with_a_mistake_in_it_does_not_pass(name, judge):
    title, *texts, words = CHANGED[name]
    status, why = judged(title, *zip(texts[::2], texts[1::2], strict=True), judge=judge)
    assert status == "FAIL" and words in why, (status, why)


# --- another way than asked


def fused(call, w, grad, m, v, t, lr, betas, eps, decay):
    """AdamW by one of torch's own steps."""
    options = {"beta1": betas[0], "beta2": betas[1], "weight_decay": decay, "eps": eps}
    lists = [w], [grad], [m], [v], [], [torch.tensor(float(t))]
    call(*lists, lr=lr, **options, amsgrad=False, maximize=False)
    return w, m, v


def other_prices(rank):
    """A schedule for the puzzle of lesson 08, after the price of a message is set to nothing."""
    vars(pipeline.COST)["hop"] = 0
    return [f"{kind}{i}" for kind, i in pipeline.one_f_one_b(rank, 4, 8)]


def by_combinations(times, stages):
    """The best of all cuts, by sums that are made once."""
    sums = [sum(times[:n]) for n in range(len(times) + 1)]
    bounds = ((0, *inner, len(times)) for inner in combinations(range(1, len(times)), stages - 1))
    return min(bounds, key=lambda b: max(sums[j] - sums[i] for i, j in pairwise(b)))


def more_memory():
    """An answer to lesson 17's puzzle that does not fit, after devices are given more memory."""
    lab.problem = lambda **given: original(**given | {"memory": math.inf})
    return [(2, ["-S", "-S"]), (2, ["-S", "-S"])]


original = lab.problem


def no_weights():
    """Cuts that are cheap once AlexNet has neither weights nor activations."""
    figures.ALEXNET = [(name, 0, 0) for name, *_ in figures.ALEXNET]
    return ["columns", "rows"] * 4


WRITTEN = {
    2048: "pp=2,dp=8,micro=8,zero=1,schedule=zb_v",
    768: "dp=16,zero=2,loss=chunked",
    4096: "dp=16,zero=2",
}


def written_down(case):
    """A plan for each of the jobs by its width, and for fewer devices one that is legal."""
    plan = WRITTEN[case.config.n_embd]
    return plan if case.cluster.devices == 16 else f"dp={case.cluster.devices},zero=2"


def in_a_thread(ask):
    """An answer that asks in a thread of its own, to which a profile of this one means nothing."""

    def answer(*given):
        found = []

        def quietly():
            with suppress(AssertionError):
                found.append(ask(*given))

        thread = threading.Thread(target=quietly)
        thread.start()
        thread.join()
        return found.pop()

    return answer


def alone(held, mesh):
    """The norm of the whole model, which every rank computes by itself."""
    model = serial_model(CONFIG, example_weights(CONFIG))
    return serial_gradients(model, example_batch(CONFIG, 7, 11))[2].item()


KNOWS, ONE_CALL = "knows the answer", "torch would do this in one call"
CHEATS = {
    "torch's fused step": (gpt2.adamw, partial(fused, torch._fused_adamw_), ONE_CALL),
    "torch's operator": (gpt2.adamw, partial(fused, torch.ops.aten._fused_adamw_), ONE_CALL),
    "a model without weights": (cuts.choose, no_weights, "your answer replaces tensor.ALEXNET"),
    "another price": (pipeline.design, other_prices, "your answer replaces pipeline.COST"),
    "another problem": (automatic.staged, more_memory, "your answer replaces automatic.problem"),
    "plans that are written down": (trade_off.capstone, written_down, "another job: dp=16,zero=2 holds"),
    "a gradient that is not there":
        (data.group_gradients, lambda ready, *_: [[i, i + 1] for i in range(0, len(ready) + 1, 2)],
         "there is no gradient [8, 9]"),
    "ranks as texts":
        (context.contributors, lambda root, ranks: [str(rank) for rank in range(root, ranks)], "expected numbers"),
    "all cuts": (placement.cut, by_combinations, "you try everything"),
    "the package's rows": (start.rows, lambda rank, n, count: range(comm.split_sizes(count, n)[rank]), KNOWS),
    "the package's rows, in a thread":
        (start.rows, in_a_thread(lambda rank, n, count: range(comm.split_sizes(count, n)[rank])), KNOWS),
    "the package's count": (gpt2.parameters, lambda *sizes: GPT2Config(*sizes).parameters, KNOWS),
    "the package's bytes": (predictions.sent, lambda: all_reduce_bytes(1_000_000, 4, 0, 4), KNOWS),
    "the package's bytes of a mixture":
        (experts.traffic, lambda rows, i, *sizes: expert.bytes_sent(rows, *sizes)[i][0], KNOWS),
    "the package's backward":
        (experts.combine_backward,
         lambda grad, *saved: Combine.backward(SimpleNamespace(saved_tensors=saved), grad)[:2], KNOWS),
    "rows as numbers with a point":
        (start.rows, lambda rank, n, count: [float(x) for x in np.array_split(range(count), n)[rank]], "are whole"),
    "rows of heads as numbers with a point":
        (tensor.qkv, lambda rank, n, _, width: np.arange(3.0 * width).reshape(3, n, -1)[:, rank].ravel(), "are whole"),
    "the package's stopwatch":
        (hardware.benchmark, lambda call, count, barrier, *more: timing.trials(call, count, 1, barrier),
         "timing.trials knows the answer"),
    "the package's end": (hardware.together, lambda spans: timing.together([spans]), KNOWS),
    "the package's norm": (meshes.norm, finish.gradient_norm, "finish.gradient_norm knows the answer"),
    "tails of the package": (placement.critical_path, lambda times, edges: planned._longest_tail(edges, times), KNOWS),
    "what the checker compares with":
        (data.global_gradient, lambda *given: data.global_gradient.right(*given), KNOWS),
    "the checker's edges": (tasks.fewest, lambda before: tasks.reduced(before), KNOWS),
    "the checker's accesses": (tasks.declare, lambda *given: tasks.declared(*given), KNOWS),
    "the checker's rule": (tasks.ready, lambda *given: tasks.release(*given), KNOWS),
    "the checker's body": (tasks.gives_back, lambda *given: tasks.received(*given), KNOWS),
    "the checker's body, later": (tasks.gives_back, lambda *given: lambda x: tasks.received(*given)(x), KNOWS),
    "the checker's variables":
        (meshes.norm, lambda held, mesh: sys._getframe(1).f_back.f_locals["right"], "does not look into its checker"),
    "the lab's sum": (travelling_sum.travelling_sum, lambda *given: rings.scattered(*given), KNOWS),
    "what gpt2lab plan chooses": (trade_off.capstone, lambda case: case.chosen(), KNOWS),
    "the decision path": (trade_off.capstone, lambda case: decisions.decide(case)[0], KNOWS),
    "what is recorded": (trade_off.capstone, lambda case: decisions.recorded()[case], KNOWS),
    "the whole model on each rank": (meshes.norm, alone, "a drawn case"),
}  # fmt: skip


TWICE = """
def f(*given):
    try:
        return cheat(*given)
    except AssertionError:
        return cheat(*given)
"""


@BOTH
@pytest.mark.parametrize("name", CHEATS)
def test_another_way_than_asked_does_not_pass(name, judge):
    task, answer, words = CHEATS[name]
    if judge is across:  # there it also asks again where it is refused
        desk = Desk("made up", [f"from test_cheats import CHEATS\ntask, cheat, _ = CHEATS[{name!r}]"])
        ((_, status, why),) = across(desk, "def f(): ...", TWICE, 'check("f", task, f)')
        words = "" if "replaces" in words else words  # its own process has nothing to replace
    else:
        status, why = verdict(task, answer)
    assert status == "FAIL" and words in why, (status, why)


# --- what guards checkers


def test_what_is_in_a_constant_is_as_before_after_an_answer_has_changed_it():
    parts = list(gpt2.PARTS.items())
    for change in (
        lambda: vars(pipeline.COST).update(hop=0),
        lambda: gpt2.PARTS.pop("ln_1"),
        gpt2.PARTS.clear,
    ):
        status, why = verdict(lambda answer: answer(), change)
        assert status == "FAIL" and "your answer replaces" in why, why
    for replace in (
        lambda: setattr(Task, "__call__", print),
        lambda: setattr(exercises.close, "__code__", (lambda *_: None).__code__),
        lambda: setattr(differences.difference, "__defaults__", (math.inf,)),
        lambda: setattr(np, "abs", lambda x: 0 * x),
        lambda: setattr(torch, "equal", print),
        lambda: setattr(Task, "own", print),
    ):
        status, why = verdict(lambda answer: answer(), replace)
        assert status == "FAIL" and "your answer replaces" in why, why
    assert Cost(1, 1, 1, hop=1) == pipeline.COST and not hasattr(Task, "own") and np.abs(-1) == 1
    assert verdict(start.global_mean, lambda sums, counts: 7)[0] == "FAIL"
    assert lab.problem is original and list(gpt2.PARTS.items()) == parts


def test_what_a_constant_has_computed_about_itself_is_no_change_and_stays(monkeypatch):
    @dataclass(frozen=True)
    class Price:
        unit: int

        @cached_property
        def of_two(self) -> list:
            return [2 * self.unit]

    monkeypatch.setattr(pipeline, "PRICE", price := Price(3), raising=False)
    before = guarded()
    computed = price.of_two
    assert restored(before) == []
    vars(price)["unit"] = 0
    assert restored(before) == ["pipeline.PRICE"]
    assert price == Price(3) and price.of_two is computed


def test_tensors_without_a_storage_are_not_looked_at():
    kept = torch.eye(40).to_sparse(), torch.ones(40, 40).to_mkldnn(), torch.ones(2000)
    assert kept[2].data_ptr() in memories(4000)


def test_who_catches_what_a_closed_door_says_does_not_pass_either():
    def quietly(ask):
        try:
            return ask()
        except AssertionError:
            return None

    for ask in (lambda: sys._getframe(0), lambda: sys.setprofile(None), lambda: exercises.close(1, 1, "x")):
        with (
            pytest.raises(AssertionError, match="closed here"),
            closed("gpt2lab.lessons.exercises.differences"),
        ):
            quietly(ask)


def asks_on_a_rank(rank, world_size, look):
    """The answer is right if it finds the secret, or guesses it where it may not look."""

    def answer():
        try:
            return look()
        except AssertionError:
            return 3

    secret = 3
    assert answer() == secret


def from_a_traceback():
    try:
        raise ValueError
    except ValueError as error:
        return error.__traceback__.tb_frame.f_back.f_back.f_locals["secret"]


@pytest.mark.parametrize("look", [lambda: sys._getframe(2).f_locals["secret"], from_a_traceback])
def test_a_rank_gives_no_frame_in_a_notebook_either(look):
    status, why = verdict(lambda answer: exercises.live(asks_on_a_rank, answer, ranks=1), look)
    assert status == "FAIL" and "does not look into its checker" in why, why
