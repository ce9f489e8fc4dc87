"""Right answers in a style of their own pass: numpy's integers, lists for tuples, another order of a path."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

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
    predictions,
    replicas,
    sharding,
    start,
    tensor,
    trade_off,
    travelling_sum,
    verdict,
    zero,
)
from gpt2lab.lessons.exercises.engine import SEED
from gpt2lab.ranks import comm
from gpt2lab.schedules import Op
from gpt2lab.schedules.asynchronous import free_running

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


def with_numpy(rank, p, m):
    """1F1B whose micro-batches are numpy's integers."""
    warm_up = min(m, p - 1 - rank)
    order = [["F", i] for i in np.arange(warm_up)]
    for i in np.arange(m - warm_up):
        order += [["F", warm_up + i], ["B", i]]
    return order + [["B", i] for i in np.arange(m - warm_up, m)]


def test_1f1b_in_integers_of_numpy():
    assert verdict(pipeline.order, with_numpy) == ("PASS", "")


def scaled_first(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """ZeRO-1 whose gradient has the learning rate in it before it is summed."""
    n = len(weights) // ranks
    return all_gather(weights[rank * n :][:n] - reduce_scatter(rate * gradient))


def test_zero_with_the_rate_before_the_sum():
    assert verdict(zero.step, scaled_first) == ("PASS", "")


def alone_or_not(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """ZeRO-1 in which a rank that is alone asks nobody."""
    if ranks == 1:
        return weights - rate * gradient
    return scaled_first(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather)


@pytest.mark.parametrize("number", range(4))
def test_zero_of_one_rank_without_calls(number, monkeypatch):
    monkeypatch.setenv(SEED, str(number))
    assert verdict(zero.step, alone_or_not) == ("PASS", "")


def as_published(x, axis):
    """Muon by rows with the small number that its authors add to the norm, and an array of numpy."""
    x = x / (comm.all_reduce(x.square().sum(), axis).sqrt() + 1e-7)
    for _ in range(5):
        gram = comm.all_reduce(x.T @ x, axis)
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x.numpy()


class OnlyWhereItIsNeeded(torch.autograd.Function):
    """A layer whose weight is gathered for backward where somebody wants the gradient of x."""

    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ comm.gather_flat(shard, axis)[: math.prod(shape)].view(shape).T

    @staticmethod
    def backward(ctx, grad):
        (x, shard), size, of_x = ctx.saved_tensors, math.prod(ctx.shape), None
        if ctx.needs_input_grad[0]:
            of_x = grad @ comm.gather_flat(shard, ctx.axis)[:size].view(ctx.shape)
        rest = shard.new_zeros(len(shard) * ctx.axis.size - size)
        of_w = comm.reduce_scatter_flat(torch.cat([(grad.T @ x).flatten(), rest]), ctx.axis)
        return of_x, of_w, None, None


def test_weights_that_are_gathered_again_only_where_they_are_needed():
    assert verdict(zero.linear, lambda *given: OnlyWhereItIsNeeded.apply(*given)) == ("PASS", "")


def test_muon_as_it_was_published():
    assert verdict(zero.muon_rows, as_published) == ("PASS", "")


def coded_one_by_one(gradients, code):
    """Error feedback by sums: of all gradients, and of all that was sent; messages come from a generator."""
    total = said = 0
    for gradient in gradients:
        total = total + gradient
        message = code(total - said)
        said = said + message
        yield message


def by_the_best_end(ready, sizes, latency, rate):
    """The best buckets, each as a tensor."""
    best = [(0.0, [])]
    for j in range(1, len(sizes) + 1):
        ends = [
            max(done, ready[j - 1]) + latency + sum(sizes[i:j]) / rate for i, (done, _) in enumerate(best)
        ]
        i = int(np.argmin(ends))
        best.append((ends[i], [*best[i][1], i]))
    return torch.arange(len(sizes)).tensor_split(best[-1][1][1:])


def update_one_by_one(old, new, gradient, lr):
    yield new
    yield new - lr * gradient(old)


def test_the_global_mean_in_the_default_type():
    mean = lambda sums, counts: torch.tensor(sums).sum() / torch.tensor(counts).sum()
    assert verdict(start.global_mean, mean) == ("PASS", "")


def attention_by_hand(x, attn, axis):
    """Attention by heads with a softmax of one's own, whose products are counted too."""
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    later = torch.ones(x.size(1), x.size(1)).triu(1) > 0
    y = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


def quarters(x, x_axis, y_axis):
    """The sum over both axes: scattered over both, gathered over both."""
    quarter = comm.reduce_scatter(comm.reduce_scatter(x, x_axis, 0), y_axis, 0)
    return comm.all_gather(comm.all_gather(quarter, y_axis, 0), x_axis, 0)


def test_a_sum_that_is_scattered_over_both_axes():
    assert verdict(sharding.cheaper_path, quarters) == ("PASS", "")


def test_attention_with_a_softmax_by_hand():
    assert verdict(tensor.attention, attention_by_hand) == ("PASS", "")


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


@pytest.mark.parametrize("ahead, own_last", [(True, False), (False, True), (True, True)])
def test_rings_of_other_styles(ahead, own_last):
    assert verdict(context.ring_backward, partial(ring, ahead=ahead, own_last=own_last)) == ("PASS", "")


def gate_in_a_list(p, room):
    """The two best experts of each token, first choices first, one after the other."""
    best, taken = p.topk(2, -1), [0] * p.size(1)
    kept = torch.zeros(len(p), 2, dtype=torch.bool)
    for choice in (0, 1):
        for token, expert in enumerate(best.indices[:, choice].tolist()):
            kept[token, choice] = taken[expert] < room
            taken[expert] += 1
    return [best.indices.int(), best.values / best.values.sum(-1, keepdim=True), kept]


def there_in_a_list(rows, counts, axis):
    """The rows that come, and how many from each rank as plain lists."""
    mine = counts.view(axis.size, -1)
    table = [t.tolist() for t in comm.all_to_all(list(mine), axis)]
    shapes = [(sum(n), rows.size(1)) for n in table]
    return [torch.cat(comm.all_to_all(rows.split(mine.sum(1).tolist()), axis, shapes)), table]


def back_from_lists(rows, table, counts, axis):
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    return torch.cat(comm.all_to_all(rows.split([sum(n) for n in table]), axis, shapes))


def test_experts_in_lists_and_tuples():
    assert verdict(experts.gating, gate_in_a_list) == ("PASS", "")
    places = (0, 3, 6), (0, 2, 5), (1, 3, 4), (0, 2, 7)
    assert verdict(experts.placed, lambda: places)[0] == "PASS"


def messages_in_a_list(have, want):
    """Who sends what, as it was once asked for: the last who has a stretch sends it."""
    found = []
    for to, (first, last) in enumerate(want):
        for source, (begin, end) in enumerate(have):
            low, high = max(first, begin), min(last, end)
            if low < high and have[to] != have[source] and have[source] not in have[source + 1 :]:
                found.append((source, to, low, high))
    return np.array(found).reshape(-1, 4)


@pytest.mark.live
def test_a_list_of_messages_is_sent_on_live_ranks():
    assert verdict(meshes.messages, messages_in_a_list) == ("PASS", "")
    status, why = verdict(meshes.messages, lambda have, want: messages_in_a_list(have, want)[1:])
    assert status == "FAIL" and "got nan" in why, why


def one_by_one(x, wire):
    """All-to-all that gives its chunks one by one."""
    chunks = x.tensor_split(wire.size)
    going = [wire.isend(chunk, p) for p, chunk in enumerate(chunks) if p != wire.rank]
    for p in range(wire.size):
        yield chunks[p] if p == wire.rank else wire.recv(chunks[wire.rank], p)
    for handle in going:
        handle.wait()


def by_sender(x, wire):
    """The same as the values of a dict."""
    return dict(enumerate(one_by_one(x, wire))).values()


def rounds_one_by_one():
    """The puzzle's rounds and their messages from generators."""
    held = [set(range(4)), *(set() for _ in range(7))]
    for t in range(6):
        messages = []
        for rank in range(8):
            partner = rank ^ 2 ** (t % 3)
            if new := held[rank] - held[partner]:
                chunk = min(new, key=lambda chunk: sum(chunk in of for of in held))
                messages.append((rank, partner, chunk))
        for _, to, chunk in messages:
            held[to].add(chunk)
        yield iter(messages)


def rounds_of_tensors():
    return [torch.tensor(list(messages)) for messages in rounds_one_by_one()]


def test_messages_one_by_one_and_in_tensors():
    for answer in (one_by_one, by_sender):
        assert verdict(collectives.to_all, answer) == ("PASS", "")
    for answer in (rounds_one_by_one, rounds_of_tensors):
        assert verdict(collectives.in_rounds, answer) == ("PASS", "6 rounds (bar 7, best known 6)")


def travelling(term, axis, sizes, way):
    """The sum that travels to the right (1) or to the left (-1), with messages of its own."""
    n, r = axis.size, axis.rank
    total = term((r - way) % n)
    for hop in range(2, n + 1):
        place = (r - way * hop) % n
        coming = comm.irecv(total.new_empty(sizes[place], 2), axis, (r - way) % n)
        going = comm.isend(total, axis, (r + way) % n)
        own = term(place)
        going.wait()
        total = own.add_(coming.wait())
    return total.tolist()


@pytest.mark.parametrize("way", [1, -1])
def test_sums_that_travel_either_way(way):
    assert verdict(travelling_sum.travelling_sum, partial(travelling, way=way)) == ("PASS", "")


def merged(logits, targets, first, axis):
    """The loss of a cut vocabulary from log-sum-exps that go round, as a tensor of one element."""
    here = (targets >= first) & (targets < first + logits.size(1))
    picked = logits[torch.arange(len(targets)), (targets - first).clamp(0, logits.size(1) - 1)]
    moving = total = torch.stack([logits.logsumexp(-1), picked.where(here, 0)])
    for _ in range(axis.size - 1):
        moving = comm.ring_shift(moving, axis)
        total = torch.stack([torch.logaddexp(total[0], moving[0]), total[1] + moving[1]])
    return (total[0] - total[1]).sum().reshape(1)


def test_a_loss_from_a_ring():
    assert verdict(tensor.vocabulary_loss, merged) == ("PASS", "")


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


def test_columns_that_are_gathered_by_shifts():
    assert verdict(tensor.gathered_columns, lambda y, axis: MyGather.apply(y, axis)) == ("PASS", "")


def a_share_of_each(held, mesh):
    """The norm from every replica's part, in as many shares as there are replicas."""
    square = 0.0
    for p in held:
        if not p.spec.tied_copy:
            copies = math.prod(mesh[a].size for a in ("dp", "tp") if a not in p.spec.axes)
            square += float(torch.linalg.vector_norm(p.tensor.grad)) ** 2 / copies
    return np.sqrt(sum(comm.gather_objects(square, mesh.world)))


def test_a_norm_of_shares():
    assert verdict(meshes.norm, a_share_of_each) == ("PASS", "")


def test_rows_there_and_back_in_lists():
    assert verdict(experts.exchange, there_in_a_list, back_from_lists) == ("PASS", "")


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


def all_but_the_waiting(waits):
    """Who is waited for and does not wait, as a tensor of one rank."""
    found = {other for whom in waits.values() for other in whom} - {rank for rank in waits if waits[rank]}
    return torch.tensor(min(found)) if found else None


def frozen(digests):
    """The wrong replicas as a set that cannot change."""
    held = lambda name: [d[name] for d in digests]
    ranks = range(len(digests))
    return frozenset(
        (r, n) for n in digests[0] for r in ranks if 2 * held(n).count(digests[r][n]) <= len(ranks)
    )


def lines_of_ranks(axis, sizes):
    """The groups of an axis as an array, the last group first."""
    grid = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    return np.moveaxis(grid, list(sizes).index(axis), -1).reshape(-1, sizes[axis])[::-1]


def boxes_one_by_one(rows, columns, start, stop):
    """The boxes of a stretch, from a generator."""
    while start < stop:
        row, column = divmod(start, columns)
        height = 1 if column else max(1, (stop - start) // columns)
        width = min(columns - column, stop - start)
        yield [row, column], [height, width]
        start += height * width


def one_after_the_other(w, micros, rows):
    """Gradients of micro-batches that are taken from the list."""
    while micros:
        x, y = micros.pop(0)
        ((x @ w - y).square().sum() / rows).backward()


def asked_too_early(call, count, barrier, synchronise, clock):
    """A stopwatch that asks the clock once before the barrier too."""
    call()
    synchronise()
    begin, found = clock(), []
    for _ in range(count):
        barrier()
        begin = clock()
        call()
        synchronise()
        found.append(clock() - begin)
    return tuple(found)


def one_f_one_b_in_tensors(rank, p, m):
    """1F1B whose micro-batches are tensors."""
    return [(kind, torch.tensor(int(i))) for kind, i in with_numpy(rank, p, m)]


RIGHT = {
    pipeline.order: one_f_one_b_in_tensors,
    start.global_mean: lambda sums, counts: torch.tensor([sum(sums) / sum(counts)]),
    pipeline.traffic: lambda p, m, b, T, C: torch.tensor([8 * (p - 1) * m * b * T * C]),
    collectives.bus: lambda n, out, t: np.array([(n - 1) * out / t]),
    meshes.placement: lambda sent, inside, between: np.array(sorted(sent))[
        np.argmin(
            [
                sum((inside if a == near else between).time(size, n) for a, (n, size) in sent.items())
                for near in sorted(sent)
            ]
        )
    ],
    gpt2.accumulation: one_after_the_other,
    hardware.benchmark: asked_too_early,
    meshes.coordinates: lambda rank, sizes: dict(
        zip(sizes, np.unravel_index(rank, list(sizes.values())), strict=True)
    ),
    meshes.groups: lines_of_ranks,
    placement.critical_path: all_pairs,
    faults.stretch: boxes_one_by_one,
    experts.combine_backward: lambda grad, rows, weights, token: (
        grad.numpy()[token] * weights.numpy()[:, None],
        (grad.numpy()[token] * rows.numpy()).sum(1),
    ),
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
    trade_off.unbeaten: lambda points: {
        name: p
        for name, p in points.items()
        if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values())
    }.keys(),
    start.traffic: lambda count, each, n: 2 * (n - 1) / n * count * each,
    data.feedback: coded_one_by_one,
    asynchronous.double_buffered: update_one_by_one,
    data.step_bytes: lambda count, n, micro, each: 2 * (n - 1) / n * count * each,
    faults.culprit: lambda waits: max(
        (other for whom in waits.values() for other in whom if not waits[other]), default=None
    ),
    replicas.odd_ones: lambda digests: {
        (np.int64(r), name)
        for name in digests[0]
        for r, own in enumerate(digests)
        if 2 * [d[name] for d in digests].count(own[name]) <= len(digests)
    },
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
    for number in range(6):
        monkeypatch.setenv(SEED, str(number))
        assert verdict(task, RIGHT[task]) == ("PASS", "")


def spares(machines, each, repair, save, restart):
    """Spares as numpy's integer, and hours as its number."""
    broken = machines * repair / each
    count = np.int64(np.ceil(broken + 2 * np.sqrt(broken)))
    return count, np.sqrt(2 * save * each / (machines - count))


def in_pairs(rank):
    """Room for three, in pairs as in 1F1B."""
    kinds = ["FFFBFBFBFBFBFBBB", "FFFBBFBFFBBFBFBB", "FFFBBBFFBFBBFFBB", "FBFBFBFBFBFBFBFB"][rank]
    return [(kind, kinds[:place].count(kind)) for place, kind in enumerate(kinds)]


def in_tensors(rank):
    """Lesson 08's puzzle in pairs whose micro-batches are tensors."""
    kinds = [
        "FFFFIWFIWIFWFIWFIWIWIWIW",
        "FFFFIWIWIWFIFFWFIIWIIWWW",
        "FFFIIWFIWIFWFFWIFIWIWIWW",
        "FIFIFIFIWWFIWFIFWIFIWWWW",
    ][rank]
    return [(kind, torch.tensor(kinds[:place].count(kind))) for place, kind in enumerate(kinds)]


def test_a_schedule_whose_micro_batches_are_tensors():
    assert verdict(pipeline.design, in_tensors)[0] == "PASS"


PUZZLES = {
    data.group_gradients: by_the_best_end,
    pipeline.squeezed: in_pairs,
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


@pytest.mark.parametrize(
    "task, answer",
    [
        (meshes.axes, lambda: dict.fromkeys(("pp", "dp", "cp", "tp")).keys()),
        (trade_off.unbeaten, lambda points: {n: n for n in trade_off_names(points)}.values()),
        (predictions.crossing, lambda: np.array([(2 * 63 - 2 * 6) * 5e-6 * 25e9 / (2 * 6 - 2 * 63 / 64)])),
    ],
)
def test_keys_and_values_of_a_dict_are_lists_and_an_array_of_one_is_a_number(task, answer):
    assert verdict(task, answer)[0] == "PASS"


@pytest.mark.parametrize(
    "task, answer",
    [
        (placement.critical_path, in_an_array),
        (cluster.spares_and_saves, lambda *given: map(torch.tensor, spares(*given))),
        (placement.cut, lambda times, stages: torch.tensor(best_by_table(times, stages))),
        (placement.balanced, lambda times, stages: (r for r in blocks_by_table(times, stages))),
        (faults.culprit, all_but_the_waiting),
        (replicas.odd_ones, frozen),
    ],
)
def test_arrays_tensors_and_generators_are_lists(task, answer):
    status, why = verdict(task, answer)
    assert status == "PASS", why


def best_by_table(times, stages):
    """The best cut from a table of the best cuts of the first layers."""
    best = {(0, 0): (0, (0,))}
    for s in range(1, stages + 1):
        for j in range(s, len(times) + 1):
            ways = [(best[i, s - 1], i) for i in range(j) if (i, s - 1) in best]
            best[j, s] = min((max(slow, sum(times[i:j])), (*bounds, j)) for (slow, bounds), i in ways)
    return best[len(times), stages][1]


def blocks_by_table(times, stages):
    bounds = best_by_table([sum(pair) for pair in times], stages)
    return [range(max(a - 1, 0), min(b - 1, len(times) - 2)) for a, b in pairwise(bounds)]


def trade_off_names(points):
    beaten = lambda p: any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values())
    return [name for name, p in points.items() if not beaten(p)]
