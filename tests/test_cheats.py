"""Answers that are right for the shown cases only, or by another way than asked, do not pass."""

import math
import shutil
import sys
from itertools import combinations, pairwise

import pytest
import torch
from lesson_cells import definitions

from gpt2lab.lessons import exercises
from gpt2lab.lessons.exercises import (
    asynchronous,
    automatic,
    cluster,
    collectives,
    context,
    cuts,
    data,
    experts,
    faults,
    gpt2,
    hardware,
    meshes,
    pipeline,
    placement,
    sharding,
    start,
    tasks,
    tensor,
    trade_off,
    travelling_sum,
    verdict,
    zero,
)
from gpt2lab.lessons.exercises.engine import SEED
from gpt2lab.lessons.exercises.guards import closed
from gpt2lab.lessons.exercises.watching import memories
from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.lessons.labs import decisions, rings
from gpt2lab.machine import timing
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import finish
from gpt2lab.parallel.pipeline.versions import Stash
from gpt2lab.plan import Plan
from gpt2lab.planner import placement as planned
from gpt2lab.planner.balance import best_cut
from gpt2lab.plots import tensor as figures
from gpt2lab.ranks import comm
from gpt2lab.reference import CONFIG, example_batch, example_weights, serial_gradients, serial_model
from gpt2lab.schedules import Cost
from gpt2lab.tasks import messages
from gpt2lab.tasks.graph import reads, reduces, updates, writes

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


def by_formula(w, micros, rows):
    """Accumulation whose backward passes a gradient on that a formula made."""
    for x, y in micros:
        with torch.no_grad():
            gradient = 2 / rows * x.T @ (x @ w - y)
        (w * gradient).sum().backward()


def the_librarys_own(gradients, counts):
    """Right, but of one rank the gradient is the library's own tensor."""
    if len(counts) == 1:
        return gradients[0]
    return sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts)


class Buckets:
    """A right reducer of gradients in buckets."""

    def __init__(self, all_reduce, full):
        self.all_reduce, self.full, self.bucket, self.flying = all_reduce, full, [], []

    def flat(self):
        return torch.cat([grad.flatten() for _, grad in self.bucket])

    def send(self):
        self.flying.append((self.bucket, self.all_reduce(self.flat())))
        self.bucket = []

    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if sum(g.numel() for _, g in self.bucket) >= self.full:
            self.send()

    def finish(self):
        if self.bucket:
            self.send()
        sums, flying, self.flying = {}, self.flying, []
        for bucket, handle in flying:
            parts = handle.wait().split([g.numel() for _, g in bucket])
            sums |= {n: part.view_as(g) for (n, g), part in zip(bucket, parts, strict=True)}
        return sums


class OneBuffer(Buckets):
    """Every bucket is sent from the same buffer, which the next one overwrites on its way."""

    def flat(self):
        self.buffer = getattr(self, "buffer", torch.empty(100, dtype=torch.float64))
        flat = super().flat()
        return self.buffer[: len(flat)].copy_(flat)


class RestInParts(Buckets):
    """What is left at the end leaves in one message a gradient."""

    def finish(self):
        rest, self.bucket = self.bucket, []
        for one in rest:
            self.bucket = [one]
            self.send()
        return super().finish()


class LargeAlone(Buckets):
    """Before a gradient that fills a bucket by itself, a bucket that is not full leaves."""

    def ready(self, name, grad):
        if self.bucket and grad.numel() >= self.full:
            self.send()
        super().ready(name, grad)


class KeepsGradients(Buckets):
    """Every gradient is kept for ever."""

    def ready(self, name, grad):
        self.all = [*getattr(self, "all", []), grad]
        super().ready(name, grad)


def typed_as_is_usual(whole, rank, ranks):
    """Zeros of the default type join the stretch, and with them all of it gets another."""
    n = -(-len(whole) // ranks)
    return torch.cat([whole, torch.zeros(n * ranks - len(whole))])[rank * n :][:n].clone()


def view_of_the_padded(whole, rank, ranks):
    """A copy, but a view where something is padded."""
    n = -(-len(whole) // ranks)
    rest = whole.new_zeros(n * ranks - len(whole))
    return torch.cat([whole, rest])[rank * n :][:n] if len(rest) else whole[rank * n :][:n].clone()


def padded_in_place(whole, rank, ranks):
    n, old = -(-len(whole) // ranks), len(whole)
    whole.resize_(n * ranks)[old:] = 0
    return whole[rank * n :][:n].clone()


def means_gathered(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """Data parallelism by another name: all steps are made by every rank, from gathered means."""
    return weights - rate * ranks * all_gather(reduce_scatter(gradient) / ranks)


def eight_ranks_or_more(parameters, ranks, stage):
    """The bytes of a ZeRO stage on eight ranks at least."""
    share = lambda first: 1 / max(ranks, 8) if stage >= first else 1
    return parameters * (12 * share(1) + 2 * share(2) + 2 * share(3))


def short_weight_gradients(name, p, f, i, w):
    """Idle time where W takes no longer than I."""
    return (p - 1) * (f + i + (w if name == "1f1b" else -min(w, i)))


def other_prices(rank):
    """A schedule for the puzzle of lesson 08, after the price of a message is set to nothing."""
    vars(pipeline.COST)["hop"] = 0
    return [f"{kind}{i}" for kind, i in pipeline.one_f_one_b(rank, 4, 8)]


def by_combinations(times, stages):
    """The best of all cuts, by sums that are made once."""
    sums = [sum(times[:n]) for n in range(len(times) + 1)]
    bounds = ((0, *inner, len(times)) for inner in combinations(range(1, len(times)), stages - 1))
    return min(bounds, key=lambda b: max(sums[j] - sums[i] for i, j in pairwise(b)))


def least_squares(times, stages):
    """The cut with the least sum of squares."""
    best = {(0, 0): (0, (0,))}
    for s in range(1, stages + 1):
        for j in range(s, len(times) + 1):
            ways = [(best[i, s - 1], i) for i in range(j) if (i, s - 1) in best]
            best[j, s] = min((cost + sum(times[i:j]) ** 2, (*bounds, j)) for (cost, bounds), i in ways)
    return best[len(times), stages][1]


def tails_of_the_package(times, edges):
    """The critical path from the longest ways to the end, which the planner computes."""
    after = {n: [v for u, v in edges if u == n] for n in range(len(times))}
    graph = type("Graph", (), {"after": after, "__len__": lambda self: len(times)})()
    tail = planned._longest_tail(graph, times)
    path = [max(range(len(times)), key=lambda n: tail[n])]
    while after[path[-1]]:
        path.append(max(after[path[-1]], key=lambda n: tail[n]))
    return tail[path[0]], path


def longer_half(times, stages):
    """Blocks of stages by the longer of forward and backward."""
    bounds = best_cut([max(pair) for pair in times], stages)
    return [range(max(a - 1, 0), min(b - 1, len(times) - 2)) for a, b in pairwise(bounds)]


def enumerated(cost, operators, devices, t_max):
    """Alpa's recurrence without a memory: every plan is tried."""

    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        return min(
            (cost(k, i, m) + least(i, d - m) for i, m in ways if cost(k, i, m) <= t_max), default=math.inf
        )

    return least(0, devices)


def more_memory():
    """An answer to lesson 17's puzzle that does not fit, after devices are given more memory."""
    lab.problem = lambda **given: original(**given | {"memory": math.inf})
    return [(2, ["-S", "-S"]), (2, ["-S", "-S"])]


original = lab.problem


def eight_spares(machines, each, repair, save, restart):
    return 8, math.sqrt(2 * save * each / (machines - 8))


def by_the_planner(case):
    return case.chosen()


def by_the_path(case):
    return decisions.decide(case)[0]


def all_recorded(case):
    names = {id(one): name for name, one in decisions.CAPSTONE.items()}
    return decisions.recorded()[names[id(case)]]


def rows_of_the_package(rank, world_size, count):
    sizes = comm.split_sizes(count, world_size)
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def the_package_counts(vocab, positions, layers, width):
    return GPT2Config(vocab_size=vocab, n_positions=positions, n_layer=layers, n_embd=width).parameters


def the_packages_stopwatch(call, count, barrier, synchronise, clock):
    return [end - start for start, end in timing.trials(call, count, 1, barrier, synchronise)]


def only_sorted(sizes, window):
    """Whether all but the smallest and the largest shard are long enough, whoever has them."""
    return all(size >= window for size in sorted(sizes)[1:-1])


def over_the_rows(grad, rows, weights, token):
    of_weights = (grad[token] * rows).sum(-1)
    return rows.copy_(grad[token] * weights[:, None]), of_weights


def of_two_dimensions(operators, cut):
    """A round of propagation for matrices, whose other dimension is 1 - dim."""
    found = {}
    for result, (text, inputs) in operators.items():
        values = list(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        for value, own in values:
            for other, theirs in values:
                if value in cut and other not in cut and own[cut[value]] in theirs:
                    found[other] = 0 if theirs[0] == own[cut[value]] else 1
    return found


def scores_emptied(p, room):
    """Two experts of each token with room for all, by scores that are then taken away."""
    best = p.topk(2, -1)
    weights = best.values / best.values.sum(-1, keepdim=True)
    with torch.no_grad():
        p.scatter_(1, best.indices, -1.0)
    return best.indices, weights, torch.ones_like(best.indices).bool()


def rows_at_home_set_to_nothing(rows, i, width, experts, element):
    rows[i][i] = 0
    away = sum(rows[i]) + sum(row[i] for row in rows)
    return 2 * away * width * element + 8 * (experts - experts // len(rows))


def in_float32(old, new, gradient, lr):
    return new, torch.as_tensor(new - lr * gradient(old)).float()


def one_count_each(rows, i, width, experts, element):
    """A rank is taken to tell each other rank one number, and not one for each of its experts."""
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return 2 * away * width * element + 8 * (len(rows) - 1)


def reads_what_it_writes(task, a, b):
    """Right, but what the first product overwrites is said to be read."""
    block = (a, b)
    return {
        "up": (reads("x", block), reads("w1"), updates("h", block)),
        "gelu": (updates("h", block),),
        "down": (reads("x", block), reads("h", block), reads("w2"), writes("y", block)),
        "grad": (reads("h", block), reads("y", block), reduces("d")),
    }[task]


def emptied(waits):
    awaited = sorted({other for whom in waits.values() for other in whom if not waits[other]})
    waits.clear()
    return awaited[0] if awaited else None


def torchs_operator(w, grad, m, v, t, lr, betas, eps, decay):
    options = {"beta1": betas[0], "beta2": betas[1], "weight_decay": decay, "eps": eps}
    lists = [w], [grad], [m], [v], [], [torch.tensor(float(t))]
    torch.ops.aten._fused_adamw_(*lists, lr=lr, **options, amsgrad=False, maximize=False)
    return w, m, v


def torchs_fused_step(w, grad, m, v, t, lr, betas, eps, decay):
    options = {"beta1": betas[0], "beta2": betas[1], "weight_decay": decay, "eps": eps}
    lists = [w], [grad], [m], [v], [], [torch.tensor(float(t))]
    torch._fused_adamw_(*lists, lr=lr, **options, amsgrad=False, maximize=False)
    return w, m, v


def twice_by_hand(points):
    """The right names, each of them twice."""
    beaten = lambda p: any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values())
    return [name for name, p in points.items() if not beaten(p) for _ in range(2)]


def no_weights():
    """Cuts that are cheap once AlexNet has neither weights nor activations."""
    figures.ALEXNET = [(name, 0, 0) for name, *_ in figures.ALEXNET]
    return ["columns", "rows"] * 4


def emptied_messages(sent, inside, between):
    gain = {axis: between.time(size, n) - inside.time(size, n) for axis, (n, size) in sent.items()}
    sent.clear()
    return max(gain, key=gain.get)


def over_the_busy_time(p, m):
    """The bubble by a formula that is only nearly right, where there are many micro-batches."""
    return (p - 1) / (m if m > 5 * p else m + p - 1)


def one_f_in_halves(rank, p, m):
    """1F1B whose backwards are split in two halves."""
    warm_up = min(m, p - 1 - rank)
    kinds = ["F"] * warm_up + ["F", "I", "W"] * (m - warm_up) + ["I", "W"] * warm_up
    return [(kind, kinds[:place].count(kind)) for place, kind in enumerate(kinds)]


WRITTEN = {
    2048: "pp=2,dp=8,micro=8,zero=1,schedule=zb_v",
    768: "dp=16,zero=2,loss=chunked",
    4096: "dp=16,zero=2",
}


def written_down(case):
    """A plan for each of the jobs by its width, and for fewer devices one that is legal."""
    plan = WRITTEN[case.config.n_embd]
    return plan if case.cluster.devices == 16 else f"dp={case.cluster.devices},zero=2"


def a_clock_of_its_own(case):
    """The first plan that fits, after all plans were given the same time."""
    object.__setattr__(case, "seconds", lambda plan: 1.0)
    n = case.cluster.devices
    plans = [Plan(tp=tp, dp=n // tp, zero=zero) for tp in (1, 2, 4, 8) for zero in range(4)]
    return next(plan for plan in plans if case.fits(plan))


CHEATS = {
    "torch's fused step": (gpt2.adamw, torchs_fused_step, "torch would do this in one call"),
    "names that are there twice": (trade_off.unbeaten, twice_by_hand, "some are there twice"),
    "a model without weights": (cuts.choose, no_weights, "your answer replaces tensor.ALEXNET"),
    "messages that are emptied": (meshes.placement, emptied_messages, "changed what it was given"),
    "a bubble over the busy time": (pipeline.bubble, over_the_busy_time, "a drawn case"),
    "1F1B in halves": (pipeline.order, one_f_in_halves, "0I0 is half a backward"),
    "plans that are written down": (trade_off.capstone, written_down, "another job: dp=16,zero=2 holds"),
    "a clock of its own": (trade_off.capstone, a_clock_of_its_own, "2.3 times as long as"),
    "torch's operator": (gpt2.adamw, torchs_operator, "torch would do this in one call"),
    "only sorted shards": (context.smallest_shard, only_sorted, "is one hop enough: expected False"),
    "scores that are taken away": (experts.gating, scores_emptied, "changed what it was given"),
    "rows that are written over": (experts.combine_backward, over_the_rows, "changed what it was given"),
    "2BW in float32": (asynchronous.double_buffered, in_float32, "was it float32 on the way?"),
    "cuts of matrices alone": (sharding.next_round, of_two_dimensions, "a drawn case"),
    "what is read and only written": (
        tasks.declare,
        reads_what_it_writes,
        "'up 0:2' says updates of h, and does not both read and write it",
    ),
    "waits that are emptied": (faults.culprit, emptied, "changed what it was given"),
    "the package's rows": (start.rows, rows_of_the_package, "knows the answer"),
    "the package's count": (gpt2.parameters, the_package_counts, "knows the answer"),
    "the package's stopwatch": (hardware.benchmark, the_packages_stopwatch, "timing.trials knows the answer"),
    "the package's end": (hardware.together, lambda spans: timing.together([spans]), "knows the answer"),
    "the library's own tensor": (data.global_gradient, the_librarys_own, "this one is the library's"),
    "a gradient that is not there": (
        data.group_gradients,
        lambda ready, *_: [[i, i + 1] for i in range(0, len(ready) + 1, 2)],
        "there is no gradient [8, 9]",
    ),
    "one buffer for all": (data.reducer, OneBuffer, "are changed before wait()"),
    "a rest in parts": (data.reducer, RestInParts, "got (5,): 8 9 15 2 3 in place of 8 9 15 5"),
    "a large gradient alone": (data.reducer, LargeAlone, "got (4,): 8 9 5 10 in place of 8 9 15"),
    "gradients that are kept": (data.reducer, KeepsGradients, "that are in memory still: expected 0, got 8"),
    "a shard of another type": (zero.shard, typed_as_is_usual, "your shard is torch.float32"),
    "a view of what was padded": (zero.shard, view_of_the_padded, "of 86 elements 90 stay in memory"),
    "a stretch that is padded in place": (zero.shard, padded_in_place, "changed what it was given"),
    "means that are gathered": (zero.step, means_gathered, "you gather gradients"),
    "eight ranks or more": (zero.bytes_held, eight_ranks_or_more, "a drawn case"),
    "short gradients of weights": (pipeline.idle, short_weight_gradients, "times 4, 1, 3: expected 4, got 8"),
    "ranks as texts": (
        context.contributors,
        lambda root, ranks: [str(rank) for rank in range(root, ranks)],
        "expected numbers",
    ),
    "what the checker compares with": (
        data.global_gradient,
        lambda *given: data.global_gradient.right(*given),
        "knows the answer",
    ),
    "a gradient by formula": (gpt2.accumulation, by_formula, "a formula of yours"),
    "tails of the package": (placement.critical_path, tails_of_the_package, "knows the answer"),
    "all cuts": (placement.cut, by_combinations, "you try everything"),
    "least squares": (placement.cut, least_squares, "expected 13, got 14"),
    "the longer of forward and backward": (placement.split, longer_half, "expected 21, got 24.5"),
    "every plan": (automatic.recurrence, enumerated, "you try everything"),
    "another problem": (automatic.staged, more_memory, "your answer replaces automatic.problem"),
    "eight spares everywhere": (
        cluster.spares_and_saves,
        eight_spares,
        "31.6 % of the work are lost, at most 24 pass. Too much goes to waiting",
    ),
    "the checker's edges": (tasks.fewest, lambda before: tasks.reduced(before), "knows the answer"),
    "the checker's accesses": (tasks.declare, lambda *given: tasks.declared(*given), "knows the answer"),
    "the checker's rule": (tasks.ready, lambda *given: tasks.release(*given), "knows the answer"),
    "what gpt2lab plan chooses": (trade_off.capstone, by_the_planner, "knows the answer"),
    "the decision path": (trade_off.capstone, by_the_path, "knows the answer"),
    "what is recorded": (trade_off.capstone, all_recorded, "knows the answer"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_another_way_than_asked_does_not_pass(name):
    task, answer, words = CHEATS[name]
    status, why = verdict(task, answer)
    assert status == "FAIL" and words in why, (status, why)


def test_what_is_in_a_constant_is_as_before_after_an_answer_has_changed_it():
    parts = list(gpt2.PARTS.items())
    for change in (
        lambda: vars(pipeline.COST).update(hop=0),
        lambda: gpt2.PARTS.pop("ln_1"),
        gpt2.PARTS.clear,
    ):
        status, why = verdict(lambda answer: answer(), change)
        assert status == "FAIL" and "your answer replaces" in why, why
    assert (
        Cost(1, 1, 1, hop=1) == pipeline.COST
        and lab.problem is original
        and list(gpt2.PARTS.items()) == parts
    )


class Leaky(Stash):
    """Right, but every version that was ever pushed stays in memory."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.all = []

    def push(self):
        self.kept[self.used] = [p.data.clone() for p in self.parameters]
        self.all += self.kept[self.used]

    def use(self, version):
        if version != self.used:
            values = self.kept.pop(version)
            self.push()
            for p, value in zip(self.parameters, values, strict=True):
                p.data.copy_(value)
            self.used = version

    def free(self, wanted):
        if self.used not in wanted:
            self.use(max(wanted))
        self.kept = {v: values for v, values in self.kept.items() if v in wanted}


class OfThree(Leaky):
    """Right, as long as there are three versions."""

    def push(self):
        self.kept[self.used] = [p.data.clone() for p in self.parameters]
        self.kept = dict(sorted(self.kept.items())[-2:])


@pytest.mark.parametrize("stash, words", [(Leaky, "are in memory for"), (OfThree, "versions [0, 1, 2, 3")])
def test_a_stash_that_leaks_or_keeps_three_versions_does_not_pass(stash, words):
    status, why = verdict(asynchronous.stash, stash, lambda cls: [])
    assert status == "FAIL" and words in why, why


def test_tensors_without_a_storage_are_not_looked_at():
    kept = torch.eye(40).to_sparse(), torch.ones(40, 40).to_mkldnn(), torch.ones(2000)
    assert kept[2].data_ptr() in memories(4000)


def the_first_of_it(axis, source):
    """A receive whose numbers are all taken to be equal."""
    return lambda x: messages.Pending(comm.irecv(x, axis, source), lambda found: x.fill_(found[0]))


def all_by_one(x, x_axis, y_axis):
    """The sum over both axes, by the first rank of each pair: as many bytes in all, and not evenly."""
    total = comm.reduce(x, x_axis)
    if x_axis.rank == 0:
        total = comm.all_reduce(total, y_axis)
    return comm.broadcast(total, x_axis)


def four_rows(x, x_axis, y_axis):
    """The sum over both axes of a matrix of eight rows."""
    half = comm.reduce_scatter(x, x_axis, 0)[:4]
    return comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0)


def right_from_the_frame(held, mesh):
    """The norm that the checker knows already."""
    return sys._getframe(1).f_back.f_locals["right"]


def gathered(q, k, v, o, L, grad, axis, first=False):
    """A ring that only carries: each rank has all keys before it computes, perhaps with its own block `first`."""
    n, r, (t, D) = axis.size, axis.rank, q.shape
    blocks, delta = [torch.stack([k, v])], (grad * o).sum(-1, keepdim=True)

    def part(owner):
        """(gradient of q, gradients of k and v) of one block."""
        (k, v), hidden = blocks[r - owner], torch.ones(t, t).triu(1 + t * (r - owner)) > 0
        p = ((q @ k.T / D**0.5).masked_fill(hidden, -torch.inf) - L).exp()
        ds = p * (grad @ v.T - delta) / D**0.5
        return ds @ k, torch.stack([ds.T @ q, p.T @ grad])

    found = {r: part(r)} if first else {}
    while len(blocks) < n:
        blocks.append(comm.ring_shift(blocks[-1], axis))  # of rank r - 1, r - 2, ...
    found |= {owner: part(owner) for owner in range(r + 1) if owner not in found}
    mine = lambda owner: found[owner % n][1] if owner % n <= r else 0
    moving = mine(r - 1) + torch.zeros(2, t, D, dtype=q.dtype)
    for step in range(2, n + 1):
        moving = comm.ring_shift(moving, axis) + mine(r - step)
    return sum(part[0] for part in found.values()), *moving


def own_first(*given):
    return gathered(*given, first=True)


def every_block_kept(q, k, v, o, L, grad, axis):
    """A right ring, but blocks that were used stay in a list."""
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    blocks, dq, gradients = [torch.stack([k, v])], torch.zeros_like(q), torch.zeros(2, t, D, dtype=q.dtype)
    for step in range(n):
        if step <= r:
            (k, v), hidden = blocks[-1], torch.ones(t, t).triu(1 + t * step) > 0
            p = ((q @ k.T / D**0.5).masked_fill(hidden, -torch.inf) - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            gradients = gradients + torch.stack([ds.T @ q, p.T @ grad])
        if step < n - 1:
            blocks.append(comm.ring_shift(blocks[-1], axis))
        gradients = comm.ring_shift(gradients, axis)
    return dq, *gradients


def past_neighbours(q, k, v, o, L, grad, axis):
    """Each rank sends its keys to all later ones, and they send the gradients back: no ring."""
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta, block = (grad * o).sum(-1, keepdim=True), torch.stack([k, v])
    going, dq, mine = [comm.isend(block, axis, p) for p in range(r + 1, n)], torch.zeros_like(q), 0
    for owner in range(r, -1, -1):
        k, v = block if owner == r else comm.recv(block, axis, owner)
        hidden = torch.ones(t, t).triu(1 + t * (r - owner)) > 0
        p = ((q @ k.T / D**0.5).masked_fill(hidden, -torch.inf) - L).exp()
        ds = p * (grad @ v.T - delta) / D**0.5
        dq += ds @ k
        part = torch.stack([ds.T @ q, p.T @ grad])
        if owner == r:
            mine = part
        else:
            going.append(comm.isend(part, axis, owner))
    mine = mine + sum(comm.recv(mine, axis, p) for p in range(r + 1, n))
    for handle in going:
        handle.wait()
    return dq, *mine


class Gathered(torch.autograd.Function):
    """A layer whose weight is gathered twice, for shapes that ranks divide."""

    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ comm.gather_flat(shard, axis).view(shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        weight = comm.gather_flat(shard, ctx.axis).view(ctx.shape)
        return grad @ weight, comm.reduce_scatter_flat((grad.T @ x).flatten(), ctx.axis), None, None


class NoGradientOfX(Gathered):
    """Shapes do not matter, but the first layer's input gets no gradient."""

    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis, ctx.first = shape, axis, x.grad_fn is None
        return x @ comm.gather_flat(shard, axis)[: math.prod(shape)].view(shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        flat, size = comm.gather_flat(shard, ctx.axis), math.prod(ctx.shape)
        of_w = torch.cat([(grad.T @ x).flatten(), flat.new_zeros(len(flat) - size)])
        of_x = None if ctx.first else grad @ flat[:size].view(ctx.shape)
        return of_x, comm.reduce_scatter_flat(of_w, ctx.axis), None, None


def three_columns(x, axis):
    """Muon's rows of a matrix of three columns."""
    x = x / comm.all_reduce(x.square().sum(), axis).sqrt()
    for _ in range(5):
        gram = comm.all_reduce(x.T @ x, axis).view(3, 3)
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


def the_checkers_receive(axis, source):
    return tasks.received(axis, source)


def its_receive_later(axis, source):
    return lambda x: tasks.received(axis, source)(x)


def past_the_wire(x, wire):
    """The sum by messages past the wire; zeros go round on it as in a ring."""
    n, r, chunks = wire.size, wire.rank, x.tensor_split(wire.size)
    going = [comm.isend(x, wire.axis, (r + step) % n) for step in range(1, n)]
    total = x + sum(comm.irecv(x, wire.axis, (r + step) % n).wait() for step in range(1, n))
    for handle in going:
        handle.wait()
    for s in range(2 * (n - 1)):
        handle = wire.isend(torch.zeros_like(chunks[(r - s) % n]), r + 1)
        wire.recv(chunks[(r - s - 1) % n], r - 1)
        handle.wait()
    return total


def forged_notes(x, wire):
    """All to all; then the notes of the wire are made those of a ring."""
    n, r, chunks = wire.size, wire.rank, x.tensor_split(wire.size)
    others = [p for p in range(n) if p != r]
    going = [wire.isend(x, p) for p in others]
    total = x + sum(wire.recv(x, p) for p in others)
    for handle in going:
        handle.wait()
    sizes = [(chunks[(r - s) % n].nbytes, chunks[(r - s - 1) % n].nbytes) for s in range(2 * (n - 1))]
    notes = [
        [("send", (r + 1) % n, out), ("recv", (r - 1) % n, into), ("wait", s, 0)]
        for s, (out, into) in enumerate(sizes)
    ]
    wire.noted[:] = [note for step in notes for note in step]
    return total


def back_from_memory(rows, table, counts, axis):
    """What comes home by a guess at what the experts make of a rank's rows, beside zeros that travel."""
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    comm.all_to_all((0 * rows).split(table.sum(1).tolist()), axis, shapes)
    return -back_from_memory.rows


def there(rows, counts, axis):
    """Right, and the rows are remembered."""
    back_from_memory.rows, mine = rows, counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(mine), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(mine.sum(1).tolist()), axis, shapes)), table


def from_here(rows, table, counts, axis):
    """What the experts made of the rows, home again."""
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes))


def there_and_emptied(rows, counts, axis):
    found = there(rows, counts, axis)
    rows.zero_()
    return found


EXCHANGES = {
    "rows that are emptied": (there_and_emptied, from_here, "changed what it was given"),
    "counts that are emptied": (
        there,
        lambda rows, table, counts, axis: (from_here(rows, table, counts, axis), counts.zero_())[0],
        "changed what it was given",
    ),
    "no gradient there": (
        lambda rows, *given: there(rows.detach(), *given),
        from_here,
        "no right gradient comes through `there`",
    ),
    "no gradient back": (
        there,
        lambda rows, *given: from_here(rows.detach(), *given),
        "no right gradient comes through `back`",
    ),
}


def of_square_halos(grad, window, axis):
    """Halo gradients given back, if rows have as many features as a halo has rows."""
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone() if first else grad[window:].clone()
    if not last:
        own[-window:] += comm.irecv(grad.new_empty(window, window), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


def zeros_and_the_checkers_numbers(grad, window, axis):
    """Zeros travel; what they should have been is asked of the checker."""
    sizes, r = ((4, 4, 4), (5, 3, 2))[window == 3], axis.rank
    if r:
        comm.isend(torch.zeros_like(grad[:window]), axis, r - 1).wait()
    own = grad[window * (r > 0) :].clone()
    if r < axis.size - 1:
        comm.irecv(grad[:window].clone(), axis, r + 1).wait()
        own[-window:] += context._halo_gradients(sizes, window)[r + 1][:window]
    return own


def saved_again(target, files, write):
    """Right, where the folder that a killed save has left holds the same files."""
    partial, old = target.with_suffix(".partial"), target.with_suffix(".old")
    partial.mkdir(exist_ok=True)
    for name, text in files.items():
        write(partial / name, text)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def summed_inside(x, inside, across):
    """The right bytes between machines; inside, everything is summed where a half is wanted."""
    mine = comm.all_reduce(x, inside).chunk(inside.size)[inside.rank].contiguous()
    return comm.all_gather(comm.all_reduce(mine, across), inside)


def sizes_written_down(term, axis, sizes):
    """The sum that travels over three ranks of 4, 3 and 3 tokens."""
    total = term((axis.rank - 1) % 3)
    for hop in (2, 3):
        place = (axis.rank - hop) % 3
        coming = comm.ring_shift(total, axis, async_op=True, shape=((4, 3, 3)[place], 2))
        own = term(place)
        total = coming.wait() + own
    return total


def straight_to_all(term, axis, sizes):
    """The same sums: each rank sends every other its term, as many bytes as on a ring."""
    n, r = axis.size, axis.rank
    others = [p for p in range(n) if p != r]
    coming = [comm.irecv(torch.empty(sizes[r], 2).double(), axis, p) for p in others]
    going = [comm.isend(term(p), axis, p) for p in others]
    total = term(r) + sum(message.wait() for message in coming)
    for handle in going:
        handle.wait()
    return total


def of_two_times_five(x, attn, axis):
    """Attention by heads of two rows of five tokens."""
    n, r, D = axis.size, axis.rank, attn.head_dim
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    qkv = comm.copy_to(x, axis) @ weight.T + bias
    q, k, v = (t.reshape(2, 5, -1, D).transpose(1, 2) for t in qkv.chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).reshape(2, 5, -1) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


def vocabulary(logits, target_of, axis):
    """The loss of logits along a vocabulary, where `target_of(logits)` are the targets' logits on this rank or 0."""
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    return (sums.log() + top - comm.all_reduce(target_of(logits), axis)).sum()


def targets_shifted(logits, targets, first, axis):
    targets -= first
    here = (targets >= 0) & (targets < logits.size(-1))
    return vocabulary(
        logits, lambda x: x.gather(-1, targets.where(here, 0)[:, None])[:, 0].where(here, 0), axis
    )


def two_ends_of_each(logits, targets, first, axis):
    """The targets of the shown cases: the first and the last token of each rank."""

    def target_of(logits):
        found, rows = logits.new_zeros(6), (2 * axis.rank, 2 * axis.rank + 1)
        found[rows[0]], found[rows[1]] = logits[rows[0], 0], logits[rows[1], -1]
        return found

    return vocabulary(logits, target_of, axis)


class MyGather(torch.autograd.Function):
    """Columns gathered, right."""

    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis, ctx.width = axis, y.size(1)
        return comm.all_gather(y, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.axis, 1), None


def gathers(**wrong):
    """MyGather with another forward or backward, of the same name."""
    made = type("MyGather", (MyGather,), {name: staticmethod(f) for name, f in wrong.items()})
    return lambda y, axis: made.apply(y, axis)


def one_after_the_other(ctx, y, axis):
    ctx.axis = axis
    return torch.cat([comm.broadcast(y, axis, root) for root in range(axis.size)], 1)


def written_over(ctx, grad):
    found = comm.reduce_scatter(grad, ctx.axis, 1)
    grad.zero_()
    return found, None


def widths_written_down(ctx, grad):
    width = {6: 2, 9: 3, 3: 1}[grad.size(1)]
    return comm.reduce_scatter(grad, ctx.axis, 1, [width] * ctx.axis.size), None


def of_the_last_axis():
    """The axis is kept once for all calls."""
    last = []

    def forward(ctx, y, axis):
        last[:] = [axis]
        return comm.all_gather(y, axis, 1)

    return {"forward": forward, "backward": lambda ctx, grad: (comm.reduce_scatter(grad, last[0], 1), None)}


def alone(held, mesh):
    """The norm of the whole model, which every rank computes by itself."""
    model = serial_model(CONFIG, example_weights(CONFIG))
    return serial_gradients(model, example_batch(CONFIG, 7, 11))[2].item()


def all_aside(held, mesh):
    """All gradients on every rank, by a call that nobody counts."""
    place = mesh.coordinates()
    mine = [
        p.tensor.grad
        for p in held
        if not p.spec.tied_copy and all(not place[a] or a in p.spec.axes for a in ("dp", "tp"))
    ]
    every = comm.gather_objects(mine, mesh.world, aside=True)
    return sum(grad.square().sum() for grads in every for grad in grads).sqrt()


def lists_emptied(mine, have, want, axis):
    """Right, and the lists of stretches are empty afterwards."""
    whole, (begin, end) = mine.new_zeros(max(stop for _, stop in have)), have[axis.rank]
    whole[begin:end], going = mine, []
    for to, (low, high) in enumerate(want):
        for begun, ended in sorted({*have} - {have[to]}):
            i, j, source = max(low, begun), min(high, ended), have.index((begun, ended))
            if i < j and source == axis.rank:
                going.append(comm.isend(mine[i - begin : j - begin], axis, to))
            elif i < j and to == axis.rank:
                whole[i:j] = comm.recv(whole[i:j], axis, source)
    for handle in going:
        handle.wait()
    low, high = want[axis.rank]
    have.clear()
    return whole[low:high]


def past_comm(x, wire):
    """A ring of zeros, and the sum by torch itself."""
    n, r, chunks = wire.size, wire.rank, torch.zeros_like(x).tensor_split(wire.size)
    for s in range(2 * (n - 1)):
        handle = wire.isend(chunks[(r - s) % n], r + 1)
        wire.recv(chunks[(r - s - 1) % n], r - 1)
        handle.wait()
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total


LIVE = {
    "sizes that are written down": (travelling_sum.travelling_sum, sizes_written_down, "a drawn case"),
    "terms straight to all": (travelling_sum.travelling_sum, straight_to_all, "neighbours that it sends to"),
    "two rows of five tokens": (tensor.attention, of_two_times_five, "on 2 ranks"),
    "targets that are shifted": (tensor.vocabulary_loss, targets_shifted, "changed what it was given"),
    "the two ends of each rank": (tensor.vocabulary_loss, two_ends_of_each, "a drawn case"),
    "broadcasts in turn": (
        tensor.gathered_columns,
        gathers(forward=one_after_the_other),
        "got ['broadcast']",
    ),
    "a gradient that is written over": (
        tensor.gathered_columns,
        gathers(backward=written_over),
        "whether backward leaves the gradients that it is given as they were",
    ),
    "widths that are written down": (
        tensor.gathered_columns,
        gathers(backward=widths_written_down),
        "three matrices on 2 ranks",
    ),
    "the axis of the last call": (
        tensor.gathered_columns,
        gathers(**of_the_last_axis()),
        "invalid gradient",
    ),
    "the whole model on each rank": (meshes.norm, alone, "a drawn case"),
    "all gradients, uncounted": (meshes.norm, all_aside, "all_gather_object sends what nobody counts"),
    "lists that are emptied": (meshes.messages, lists_emptied, "changed what it was given"),
    "torch beside the wire": (collectives.ring, past_comm, "all_reduce sends what nobody counts"),
    "rows at home": (experts.traffic, rows_at_home_set_to_nothing, "changed what it was given"),
    "one count for each rank": (experts.traffic, one_count_each, "24 bytes of it are counts"),
    "a folder that is used again": (faults.whole_or_absent, saved_again, "should hold {'e': 'epsilon'}, not"),
    "a sum of all inside": (
        cluster.two_levels,
        summed_inside,
        "bytes sent inside on rank 0: 96 are enough, got 144",
    ),
    "the lab's sum": (
        travelling_sum.travelling_sum,
        lambda *given: rings.scattered(*given),
        "knows the answer",
    ),
    "messages past the wire": (collectives.ring, past_the_wire, "got ['send of 48 bytes']"),
    "notes that were forged": (collectives.ring, forged_notes, "got ['send of 48 bytes']"),
    "another price": (pipeline.design, other_prices, "your answer replaces pipeline.COST"),
    "one sums for all": (sharding.cheaper_path, all_by_one, "bytes sent on rank 0: expected 384, got 512"),
    "the first number of what comes": (tasks.gives_back, the_first_of_it, "not [41.0, 41.0]"),
    "four rows": (
        sharding.cheaper_path,
        four_rows,
        "the sum on rank 0: expected shape (12, 3), got (8, 3)",
    ),
    "shapes that ranks divide": (zero.linear, lambda *given: Gathered.apply(*given), "is invalid for input"),
    "no gradient of x": (
        zero.linear,
        lambda *given: NoGradientOfX.apply(*given),
        "the gradient of x on rank 0: your function returned None",
    ),
    "three columns": (zero.muon_rows, three_columns, "11 rows of 4 on 2 live ranks"),
    "past the neighbours": (context.ring_backward, past_neighbours, "on a ring only neighbours talk"),
    "every block is kept": (
        context.ring_backward,
        every_block_kept,
        "rank 3 of 4 holds the keys of 3 others at once",
    ),
    "all keys, then products": (
        context.ring_backward,
        gathered,
        "2 other ranks when it had computed with 0 blocks",
    ),
    "its own block, all keys": (
        context.ring_backward,
        own_first,
        "3 other ranks when it had computed with 1 blocks",
    ),
    "the package's norm": (meshes.norm, finish.gradient_norm, "finish.gradient_norm knows the answer"),
    "halos that are square": (context.give_back, of_square_halos, "does not fit its receiver"),
    "the checker's numbers": (context.give_back, zeros_and_the_checkers_numbers, "knows the answer"),
    "the checker's variables": (meshes.norm, right_from_the_frame, "does not look into its checker"),
    "the checker's body": (tasks.gives_back, the_checkers_receive, "knows the answer"),
    "the checker's body, later": (tasks.gives_back, its_receive_later, "knows the answer"),
}


@pytest.mark.parametrize("name", LIVE)
def test_on_live_ranks_another_way_than_asked_does_not_pass(name):
    task, answer, words = LIVE[name]
    status, why = verdict(task, answer)
    assert status == "FAIL" and words in why, (status, why)


copies = []


def second_list(kind, i, s):
    """Right, and a copy of what came is kept in a list of its own, with its graph."""
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().clone().requires_grad_() if s.rank > 0 else None
        s.kept[i] = x, s.stage(x, i)
        copies.append(s.kept[i])
        if s.rank < s.last:
            s.leaving.append(comm.isend(s.kept[i][1].detach(), s.axis, s.rank + 1))
        else:
            s.loss += s.kept[i][1].item()
    else:
        pipeline.run_op(kind, i, s)


def forward_again(kind, i, s):
    """Right, without a graph from F to B: B computes forward once more."""
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        with torch.no_grad():
            y = s.stage(x, i)
        s.kept[i] = x, None
        if s.rank < s.last:
            s.leaving.append(comm.isend(y, s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        s.kept[i] = s.kept[i][0], s.stage(s.kept[i][0], i)
        pipeline.run_op(kind, i, s)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (second_list, "is there a second list that keeps it?"),
        (forward_again, "B, which would compute forward again"),
    ],
)
def test_what_a_pipeline_keeps_from_f_to_b_is_found_in_memory(operation, words):
    names = definitions("07")
    status, why = verdict(pipeline.by_hand, names["on_ranks"](operation), names["serial_gradients"])
    assert status == "FAIL" and words in why, (status, why)


def test_what_experts_make_of_rows_has_to_travel_back():
    status, why = verdict(experts.exchange, there, back_from_memory)
    assert status == "FAIL" and "comes back with its name only" in why, (status, why)


@pytest.mark.parametrize("name", EXCHANGES)
def test_rows_of_experts_stay_as_they_are_and_gradients_come_through(name):
    *answers, words = EXCHANGES[name]
    status, why = verdict(experts.exchange, *answers)
    assert status == "FAIL" and words in why, (status, why)


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


def from_the_frame():
    """What its caller on the rank knows; quietly, where it may not ask."""
    try:
        return sys._getframe(1).f_locals["secret"]
    except AssertionError:
        return 3


def asks_on_a_rank(rank, world_size, answer):
    secret = 3
    assert answer() == secret


def from_a_traceback():
    """The same from the frame of an exception, and that of the one that called it."""
    try:
        raise ValueError
    except ValueError as error:
        try:
            return error.__traceback__.tb_frame.f_back.f_locals["secret"]
        except AssertionError:
            return 3


@pytest.mark.parametrize("answer", [from_the_frame, from_a_traceback])
def test_a_rank_gives_no_frame_in_a_notebook_either(answer):
    status, why = verdict(lambda answer: exercises.live(asks_on_a_rank, answer, ranks=1), answer)
    assert status == "FAIL" and "does not look into its checker" in why, why
