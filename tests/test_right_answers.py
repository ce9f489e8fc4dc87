"""Right answers in a style of their own pass: numpy's integers, lists for tuples, another order of a path."""

import math
from functools import partial
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from random import Random

import numpy as np
import pytest
import torch
from lesson_cells import across, judged

from gpt2lab.lessons import exercises, table
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
    hardware,
    meshes,
    pipeline,
    placement,
    predictions,
    replicas,
    sharding,
    start,
    tensor,
    trade_off,
    verdict,
)
from gpt2lab.lessons.exercises.engine import SEED, Task
from gpt2lab.machine.checksum import summ
from gpt2lab.planner.balance import best_cut
from gpt2lab.ranks import comm
from gpt2lab.schedules import Op
from gpt2lab.schedules.asynchronous import free_running

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


# --- the lesson's solution in another style

ORDER = 'order + [("B", i) for i in range(m - warm_up, m)]'
CHANGED = {  # what the style is: (exercise, text of its solution, what stands there instead, and so on)
    "one rank without calls":
        ("a step of ZeRO-1", "    length", "    if ranks == 1:\n        return weights - rate * gradient\n    length"),
    "1F1B in integers of numpy":
        ("1F1B", f"return {ORDER}", f"return [[kind, torch.tensor(i).numpy()[()]] for kind, i in {ORDER}]"),
    "1F1B in tensors": ("1F1B", f"return {ORDER}", f"return [(kind, torch.tensor(i)) for kind, i in {ORDER}]"),
    "micro-batches that are taken from the list":
        ("accumulation", "for x, y in micros:", "while micros:\n        x, y = micros.pop(0)"),
    "AdamW one by one": ("AdamW by hand", "return w", "yield w", "step), m, v", "step)\n    yield from (m, v)"),
    "a clock that is asked once more":
        ("a stopwatch", "times = []", "start, times = clock(), []", "return times", "return tuple(times)"),
    "groups in an array, the last first": ("groups", "[tuple(map(int, line)) for line in lines]", "lines[::-1]"),
    "boxes one by one":
        ("stretch", "found.append(((row, column), (max(height, 1), width)))",
         "yield [row, column], [max(height, 1), width]", "    return found", ""),
    "two versions one by one": ("the update of 2BW", "return new, ", "yield new\n    yield "),
    "wrong replicas in a frozen set": ("which replica", "return found", "return frozenset(found)"),
    "wrong replicas by numpy's integers":
        ("which replica", "return found", "return {(torch.tensor(rank).numpy()[()], name) for rank, name in found}"),
    "an axis by its place in an array":
        ("which axis gets the fast links", "max(gain, key=gain.get)", "np.array([*gain])[np.argmax([*gain.values()])]"),
    "gradients in arrays":
        ("combine_backward", "grad = grad[token]",
         "grad, rows, weights = grad.numpy()[token], rows.numpy(), weights.numpy()"),
    "names that are keys of a dict":
        ("unbeaten", "return [name for name, p", "return {name: p for name, p", ".values())]", ".values())}.keys()"),
    "a rank in a tensor": ("who is to blame", "next((rank for", "next((torch.tensor(rank) for"),
    "bounds in a tensor":
        ("the best cut", "return best[len(times), stages][1]", "return torch.tensor(best[len(times), stages][1])"),
    "names that are values of a dict":
        ("unbeaten", "return [name for name, p", "return {name: name for name, p",
         ".values())]", ".values())}.values()"),
    "the rest before the first stage":
        ("Alpa's recurrence", "if m <= d and", "if m <= d and least(i, d - m) < found and"),
    "gates in a list of small integers":
        ("gate", "return best.indices, weights, place < room", "return [best.indices.int(), weights, place < room]"),
    "gates in lists of tensors":
        ("gate", "return best.indices, weights, place < room",
         "return list(best.indices), list(weights), [list(row) for row in place < room]"),
}  # fmt: skip
TRAVELS = (
    "the sum that travels", "coming.wait() + own", "own.add_(coming.wait())", "return total", "return total.tolist()",
    "comm.ring_shift(total, axis, async_op=True, shape=(sizes[place], total.size(1)))",
)  # fmt: skip
MESSAGES = """comm.irecv(total.new_empty(sizes[place], 2), axis, (axis.rank {source} 1) % axis.size)
        comm.isend(total, axis, (axis.rank {to} 1) % axis.size).wait()"""
TRIED_ONCE = {  # on live ranks, or nothing is drawn
    "the rate before the sum":
        ("a step of ZeRO-1", "rate * reduce_scatter(gradient)", "reduce_scatter(rate * gradient)"),
    "rounds one by one":
        ("four chunks in few rounds", "rounds.append(messages)", "yield iter(messages)", "    return rounds", ""),
    "rounds in tensors": ("four chunks in few rounds", "append(messages)", "append(torch.tensor(messages))"),
    "buckets in tensors":
        ("buckets for three links", "return best[-1][1]", "return [*map(torch.tensor, best[-1][1])]"),
    "numbers of micro-batches in pairs":
        ("room for three", 'f"{kind}{kinds[:i].count(kind)}"', "(kind, kinds[:i].count(kind))"),
    "numbers of micro-batches in tensors":
        ("your schedule", 'f"{kind}{kinds[:i].count(kind)}"', "(kind, torch.tensor(kinds[:i].count(kind)))"),
    "names in frozen sets": ("what to keep", "(list(c) for", "(frozenset(c) for"),
    "accesses one by one": ("what the tasks touch", "return {", "yield from {"),
    "messages one by one":
        ("all-to-all", "came = [mine if p == wire.rank else wire.recv(mine, p) for p in range(wire.size)]",
         "yield from (mine if p == wire.rank else wire.recv(mine, p) for p in range(wire.size))",
         "    return came", ""),
    "messages in the values of a dict": ("all-to-all", "return came", "return dict(enumerate(came)).values()"),
    "a sum that travels in messages of its own": (*TRAVELS, MESSAGES.format(to="+", source="-")),
    "a sum that travels to the left":
        (*TRAVELS, MESSAGES.format(to="-", source="+"), "term((axis.rank - 1", "term((axis.rank + 1",
         "rank - hop", "rank + hop"),
    "Muon as it was published":
        ("Muon by rows", "axis).sqrt()", "axis).sqrt().add(1e-7)", "return x", "return x.numpy()"),
    "weights that are gathered again only where they are needed":
        ("gathered twice", "        flat = comm.gather_flat(shard, ctx.axis)\n", "",
         "torch.zeros_like(flat)", "shard.new_zeros(len(shard) * ctx.axis.size)", "of_x = grad @ flat[",
         "of_x = ctx.needs_input_grad[0] or None\n        of_x = of_x and grad @ comm.gather_flat(shard, ctx.axis)["),
    "attention with a softmax by hand":
        ("attention by heads", "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
         "later = torch.ones(x.size(1), x.size(1)).triu(1) > 0\n"
         "    y = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v"),
    "rows there and back in lists":
        ("there and back", "torch.stack(comm.all_to_all(list(by_rank), axis))",
         "[t.tolist() for t in comm.all_to_all(list(by_rank), axis)]",
         "for n in table.sum(1)]", "for n in map(sum, table)]",
         "rows.split(table.sum(1).tolist())", "rows.split([*map(sum, table)])"),
    "a table as all-to-all gives it":
        ("there and back", "table = torch.stack(comm.all_to_all(list(by_rank), axis))",
         "table = comm.all_to_all(list(by_rank), axis)", "for n in table.sum(1)]", "for n in map(sum, table)]"),
    "zeros of the type that is the lesson's default":
        ("ring attention, backward", "dq, moving = torch.zeros_like(q)", "dq, moving = torch.zeros(t, D)"),
    "a message for which memory of the lesson's default type is kept":
        ("give back", "comm.irecv(grad[:window].clone(),", "comm.irecv(torch.empty(window, grad.size(1)),"),
    "a sum that is scattered over both axes":
        ("cheaper path", "comm.reduce_scatter(x, x_axis, 0)",
         "comm.reduce_scatter(comm.reduce_scatter(x, x_axis, 0), y_axis, 0)",
         "comm.all_reduce(half, y_axis)", "comm.all_gather(half, y_axis, 0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED | TRIED_ONCE)
def test_a_solution_in_another_style_passes(name, monkeypatch):
    for number in range(1 if name in TRIED_ONCE else 3):
        monkeypatch.setenv(SEED, str(number))
        title, *texts = (CHANGED | TRIED_ONCE)[name]
        status, why = judged(title, *zip(texts[::2], texts[1::2], strict=True))
        assert status == "PASS", why


@pytest.mark.rotates
@pytest.mark.parametrize("name", CHANGED | TRIED_ONCE)
def test_a_solution_in_another_style_passes_through_the_grader_too(name):
    title, *texts = (CHANGED | TRIED_ONCE)[name]
    status, why = judged(title, *zip(texts[::2], texts[1::2], strict=True), judge=across)
    assert status == "PASS", why


# --- answers of another kind


def coded_one_by_one(gradients, code):
    """Error feedback by sums: of all gradients, and of all that was sent; messages come from a generator."""
    total = said = 0
    for gradient in gradients:
        total = total + gradient
        message = code(total - said)
        said = said + message
        yield message


def ring(q, k, v, o, L, grad, axis, ahead, own_last):
    """The backward of ring attention: the next block comes while one is computed (`ahead`) or afterwards."""
    n, r, (t, D) = axis.size, axis.rank, q.shape
    dq, delta = torch.zeros_like(q), (grad * o).sum(-1, keepdim=True)
    block, gradients = torch.stack([k, v]), torch.zeros(2, t, D, dtype=q.dtype)
    if own_last:
        block = comm.ring_shift(block, axis)
    for step in range(n):
        owner, coming = (r - step - own_last) % n, None
        if ahead and step < n - 1:
            coming, going = comm.irecv(block, axis, (r - 1) % n), comm.isend(block, axis, (r + 1) % n)
        if owner <= r:
            k, v = block
            hidden = torch.ones(t, t).triu(1 + t * (r - owner)) > 0
            p = ((q @ k.T / D**0.5).masked_fill(hidden, -torch.inf) - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            gradients = gradients + torch.stack([ds.T @ q, p.T @ grad])
        if coming:
            block = coming.wait()
            going.wait()
        elif step < n - 1:
            block = comm.ring_shift(block, axis)
        if step < n - own_last:
            gradients = comm.ring_shift(gradients, axis)
    return dq, *gradients


def merged(logits, targets, first, axis):
    """The loss of a cut vocabulary from log-sum-exps that go round, as a tensor of one element."""
    here = (targets >= first) & (targets < first + logits.size(1))
    picked = logits[torch.arange(len(targets)), (targets - first).clamp(0, logits.size(1) - 1)]
    moving = total = torch.stack([logits.logsumexp(-1), picked.where(here, 0)])
    for _ in range(axis.size - 1):
        moving = comm.ring_shift(moving, axis)
        total = torch.stack([torch.logaddexp(total[0], moving[0]), total[1] + moving[1]])
    return (total[0] - total[1]).sum().reshape(1)


class MyGather(torch.autograd.Function):
    """Columns gathered by shifts around a ring, there and back."""

    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis, parts, r = axis, {axis.rank: y}, axis.rank
        for step in range(1, axis.size):
            parts[(r - step) % axis.size] = comm.ring_shift(parts[(r - step + 1) % axis.size], axis)
        return torch.hstack([parts[rank] for rank in range(axis.size)])

    @staticmethod
    def backward(ctx, grad):
        axis, columns = ctx.axis, grad.chunk(ctx.axis.size, 1)
        total = columns[(axis.rank - 1) % axis.size]
        for step in range(2, axis.size + 1):
            total = comm.ring_shift(total.contiguous(), axis) + columns[(axis.rank - step) % axis.size]
        return total, None


def a_share_of_each(held, mesh):
    """The norm from every replica's part, in as many shares as there are replicas."""
    square = 0.0
    for p in held:
        if not p.spec.tied_copy:
            copies = math.prod(mesh[a].size for a in ("dp", "tp") if a not in p.spec.axes)
            square += float(torch.linalg.vector_norm(p.tensor.grad)) ** 2 / copies
    return np.sqrt(sum(comm.gather_objects(square, mesh.world)))


def updates_counted(scheme, p, s, t, kind):
    """The version that is read, counted along the order of the stage."""
    stage = 0 if scheme == "pipedream_vertical" else s
    order = free_running(p, t + 1).orders[stage]
    until = order.index(Op(kind if scheme == "ampnet" else "F", stage, t))
    return sum(op.kind == "B" for op in order[:until])


def from_the_end(cost, operators, devices, t_max):
    """Alpa's recurrence as a table, filled from its last row."""
    least = {(operators, d): math.inf if d else 0 for d in range(devices + 1)}
    for k in reversed(range(operators)):
        for d in range(devices + 1):
            ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
            times = [cost(k, i, m) + least[i, d - m] for i, m in ways if cost(k, i, m) <= t_max]
            least[k, d] = min(times, default=np.inf)
    return least[0, devices]


def turned_and_doubled(i, a, b):
    """A row of the same equation, times -2."""
    row = np.zeros(a + b + a * b)
    row[i], row[a + b :].reshape(a, b)[i] = 2, -2
    return row


def spread_over(sizes, machine):
    """The axes of which some group is on more than one machine, group by group."""
    place = np.arange(math.prod(sizes.values())).reshape(*sizes.values()) // machine
    return [name for dim, name in enumerate(sizes) if (place.min(dim) != place.max(dim)).any()]


def all_pairs(times, edges):
    """The critical path from the longest paths between every two operators, one more operator allowed in between."""
    n = len(times)
    length, after = np.full((n, n), -np.inf), {edge: edge[1] for edge in edges}
    for u, v in edges:
        length[u, v] = times[v]
    for k in range(n):
        for i in range(n):
            for j in range(n):
                if length[i, k] + length[k, j] > length[i, j]:
                    length[i, j], after[i, j] = length[i, k] + length[k, j], after[i, k]
    np.fill_diagonal(length, 0)
    i, j = np.unravel_index((length + np.array(times)[:, None]).argmax(), (n, n))
    path = [i]
    while path[-1] != j:
        path.append(after[path[-1], j])
    return times[i] + length[i, j], path


def in_an_array(times, edges):
    """The critical path as an array, also where it is a single operator."""
    seconds, path = all_pairs(times, edges)
    return np.float64(seconds), np.array(path)


def spares(machines, each, repair, save, restart):
    """Spares as numpy's integer, and hours as its number."""
    broken = machines * repair / each
    count = np.int64(np.ceil(broken + 2 * np.sqrt(broken)))
    return count, np.sqrt(2 * save * each / (machines - count))


RIGHT = {
    start.global_mean: lambda sums, counts: torch.tensor([sum(sums) / sum(counts)]),
    pipeline.traffic: lambda p, m, b, T, C: torch.tensor([8 * (p - 1) * m * b * T * C]),
    collectives.bus: lambda n, out, t: np.array([(n - 1) * out / t]),
    meshes.coordinates: lambda rank, sizes: dict(
        zip(sizes, np.unravel_index(rank, list(sizes.values())), strict=True)
    ),
    placement.critical_path: all_pairs,
    asynchronous.version: updates_counted,
    automatic.recurrence: from_the_end,
    automatic.program_row: turned_and_doubled,
    cluster.crosses: spread_over,
    context.contributors: lambda root, ranks: set(range(ranks)) - set(range(root)),
    sharding.costs: lambda n, M: {
        "P -> S0": M - M / n,
        "S0 -> R": np.float64(M - M / n),
        "S0 -> S1": (M - M / n) / n,
    },
    pipeline.idle: lambda name, p, f, i, w: (p - 1) * (f + i + w if name == "1f1b" else f + i - w),
    pipeline.bubble: lambda p, m: np.float64(p - 1) / (m + p - 1),
    pipeline.in_flight: lambda rank, p, m: np.minimum(m, p - rank),
    pipeline.slicing: lambda times, p: np.sum(times) + (p - 1) * np.max(times),
    hardware.together: lambda spans: max(end for _, end in spans) - max(start for start, _ in spans),
    hardware.overlap: lambda k, c, s: c + (k - 1) * max(c, s) + s,
    hardware.serial_fraction: lambda S, p: (1 / S - 1 / p) / (1 - 1 / p),
    trade_off.tokens: lambda rate, bandwidth, itemsize: 2 * itemsize / bandwidth / (4 / rate),
    start.traffic: lambda count, each, n: 2 * (n - 1) / n * count * each,
    data.feedback: coded_one_by_one,
    data.step_bytes: lambda count, n, micro, each: 2 * (n - 1) / n * count * each,
    faults.culprit: lambda waits: max(
        (other for whom in waits.values() for other in whom if not waits[other]), default=None
    ),
    replicas.keepers: lambda n: (
        np.array([*range(1, 3), 0, *((r ^ 1) - 1 for r in range(4, n + 1))][:n])
        if n % 2
        else np.arange(n)[::-1]
    ),
    context.smallest_shard: lambda sizes, window: np.all(
        [size >= min(window, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes[:-1])]
    ),
    tensor.qkv: lambda rank, n, heads, width: np.arange(3 * width).reshape(3, n, -1)[:, rank].ravel(),
}


@pytest.mark.parametrize("task", RIGHT, ids=lambda task: getattr(task, "__name__", "") or task.what)
def test_right_answers_pass_whatever_is_drawn(task, monkeypatch):
    for number in range(3):
        monkeypatch.setenv(SEED, str(number))
        assert verdict(task, RIGHT[task]) == ("PASS", "")


def _types(arguments) -> list[type]:
    return [type(one) for one in arguments]


ROOMS = [import_module(f"{exercises.__name__}.{room.name}") for room in iter_modules(exercises.__path__)]
DRAWN = {
    name: one for room in ROOMS for name, one in vars(room).items() if isinstance(one, Task) and one.drawn
}


@pytest.mark.parametrize("name", [name for name, task in DRAWN.items() if not task.call])
def test_drawn_arguments_are_of_the_types_of_those_that_are_shown(name):
    task = DRAWN[name]
    shown = [_types(given) for _, given in task.cases]
    for number in range(20):
        assert _types(task.drawn(Random(number))) in shown


def ranges(times, stages):
    """The blocks of each stage, one after the other."""
    bounds = best_cut([sum(pair) for pair in times], stages)
    return (range(max(a - 1, 0), min(b - 1, len(times) - 2)) for a, b in pairwise(bounds))


ONCE = {
    "the mean in the default type":
        (start.global_mean, lambda sums, counts: torch.tensor(sums).sum() / torch.tensor(counts).sum()),
    "a ring ahead": (context.ring_backward, partial(ring, ahead=True, own_last=False)),
    "a ring that ends at home": (context.ring_backward, partial(ring, ahead=False, own_last=True)),
    "a ring ahead that ends at home": (context.ring_backward, partial(ring, ahead=True, own_last=True)),
    "a mean that shows what it was given":
        (start.global_mean, lambda sums, counts: (
            table([[summ(torch.tensor(sums))]], ["sums"]) or sum(sums) / sum(counts))),
    "gradients of a row by vmap, and what was given is shown":
        (experts.combine_backward, lambda grad, rows, weights, token: print(grad) or (
            torch.vmap(torch.mul)(grad[token], weights), torch.vmap(torch.dot)(grad[token], rows))),
    "places in tuples": (experts.placed, lambda: ((0, 3, 6), (0, 2, 5), (1, 3, 4), (0, 2, 7))),
    "a loss from a ring": (tensor.vocabulary_loss, merged),
    "columns that are gathered by shifts": (tensor.gathered_columns, lambda y, axis: MyGather.apply(y, axis)),
    "a norm of shares": (meshes.norm, a_share_of_each),
    "keys of a dict": (meshes.axes, lambda: dict.fromkeys(("pp", "dp", "cp", "tp")).keys()),
    "an array of one number":
        (predictions.crossing, lambda: np.array([(2 * 63 - 2 * 6) * 5e-6 * 25e9 / (2 * 6 - 2 * 63 / 64)])),
    "ranges one by one": (placement.balanced, ranges),
    "spares in tensors": (cluster.spares_and_saves, lambda *given: map(torch.tensor, spares(*given))),
    "a path in an array": (placement.critical_path, in_an_array),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_an_answer_of_another_kind_passes(name):
    status, why = verdict(*ONCE[name])
    assert status == "PASS", why


def messages_in_a_list(have, want):
    """Who sends what, as it was once asked for: the last who has a stretch sends it."""
    found = []
    for to, (first, last) in enumerate(want):
        for source, (begin, end) in enumerate(have):
            low, high = max(first, begin), min(last, end)
            if low < high and have[to] != have[source] and have[source] not in have[source + 1 :]:
                found.append((source, to, low, high))
    return np.array(found).reshape(-1, 4)


def test_a_list_of_messages_is_sent_on_live_ranks():
    assert verdict(meshes.messages, messages_in_a_list) == ("PASS", "")
    status, why = verdict(meshes.messages, lambda have, want: messages_in_a_list(have, want)[1:])
    assert status == "FAIL" and "got nan" in why, why


PUZZLES = {
    cuts.choose: lambda: np.array(["batch"] * 5 + ["rows", "columns", "rows"]),
    placement.unlike: lambda: [(0, 3, 6, 11, 14), ["slow", "slow", "fast", "fast"]],
    automatic.staged: lambda: ((2, ("-P", "-P")), (1, ("--",)), (1, ("--",))),
    faults.saves: lambda: np.append(np.arange(0.4, 3.8, 0.4), np.arange(4.8, 24, 1.2)),
    cluster.spares_and_saves: spares,
    meshes.axes: lambda: ("pp", "dp", "cp", "tp"),
    context.spread: lambda: np.array([[0, 5, 11], [1, 6, 9], [2, 7, 8], [3, 4, 10]]),
    context.place: lambda: [np.array(points) for points in ([0, 2, 7, 10], [1, 3, 8, 9], [4, 5, 6, 11])],
    experts.placed: lambda: torch.tensor([[0, 3, 6], [0, 2, 5], [1, 3, 4], [0, 2, 7]]),
    asynchronous.stages: lambda: (np.array([2, 3, 3, 2]), 4),
}


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: getattr(puzzle, "unit", "") or puzzle.__name__)
def test_puzzles_take_tuples_for_lists_and_numbers_of_numpy(puzzle):
    status, score = verdict(puzzle, PUZZLES[puzzle])
    assert status == "PASS", score
