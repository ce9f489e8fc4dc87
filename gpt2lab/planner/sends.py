"""What a rank sends in a step, axis by axis, in exact bytes and messages: the strategies' formulas, added up.

Nothing here is measured: the tests compare every sum with the log of live ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

from ..parallel.context import costs as context
from ..parallel.context.exchanges import ALIASES
from ..parallel.context.layouts import layout
from ..parallel.data import into_buckets
from ..parallel.expert import bytes_sent
from ..parallel.servers import share_out
from ..parallel.zero.flat import owner_of
from ..ranks.traffic import all_gather_cost, all_reduce_cost, chain_cost, split_sizes
from . import tensor_costs
from .gathers import gather_counts, reduce_counts
from .share import EXPERT, RankShare, check_price, frame


@dataclass(frozen=True)
class AxisTraffic:
    """`calls` alike, which together send `bytes` in `messages` one after the other, along an axis of the mesh."""

    axis: str
    op: str
    bytes: int
    messages: int
    calls: int = 1

    def times(self, count: int) -> "AxisTraffic":
        """So many of them."""
        return AxisTraffic(self.axis, self.op, self.bytes * count, self.messages * count, self.calls * count)


def all_reduce(axis: str, elements: int, ranks: int, rank: int, element: int) -> list[AxisTraffic]:
    """An all-reduce of so many elements; a single rank sends nothing."""
    chunks = [element * c for c in split_sizes(elements, ranks)]
    return [AxisTraffic(axis, "all_reduce", *all_reduce_cost(chunks, rank))] if ranks > 1 else []


def stage_ways(share: RankShare, stage: int, rows: int, tokens: int) -> dict[str, list[AxisTraffic]]:
    """What the rank sends for `rows` sequences of `tokens` (its own) through a stage, to the other axes and stages.

    In its "forward", when the forward runs "again", and in its "backward".
    """
    position, plan = share.stages[stage], share.plan
    layers, shape = len(share.parts.layers[position]), share.shape(rows, tokens)
    blocks, ends = ([], []), ([], [])
    if plan.tp > 1:
        enter = tensor_costs.enter_cost(shape, share.tp, plan.sp)
        leave = tensor_costs.leave_cost(shape, share.tp, plan.sp)
        for way in (0, 1):
            calls = _calls("tp", enter[way] + leave[way])
            blocks[way].extend(call.times(2 * layers) for call in calls if layers)
            ends[way].extend(_calls("tp", leave[way]) * (position == 0))
            ends[way].extend(_calls("tp", enter[way]) * (position == share.depth - 1))
        if position == share.depth - 1:
            wide = replace(shape, itemsize=max(4, share.itemsize))
            ends[0].extend(_calls("tp", tensor_costs.loss_cost(wide, share.tp)))
    for way, found in enumerate(_attention(share, rows)):
        blocks[way].extend([found.times(layers)] if layers else [])
    again = blocks[0] * share.again[0] + ends[0] * share.again[1]
    there, back = _to_stages(share, stage, rows, tokens)
    return {"forward": blocks[0] + ends[0] + there, "again": again, "backward": blocks[1] + ends[1] + back}


def _calls(axis: str, calls: list) -> list[AxisTraffic]:
    return [AxisTraffic(axis, *call) for call in calls]


def _attention(share: RankShare, rows: int):
    """What one block's exchange of keys and values sends, forward and backward."""
    plan, config = share.plan, share.config
    if plan.cp == 1:
        return
    name = ALIASES.get(plan.exchange, plan.exchange)
    c, keys = config.n_embd, share.net.keys  # queries and what attention gives are as wide as the model
    narrow = {"heads": (c + keys) // 2, "qkv": (c + 2 * keys) // 3}.get(name, keys)
    numbers = rows * c if name.startswith("halo-x") else rows * narrow // plan.tp
    pieces = 2 * plan.cp  # a coarse table says the same of equal parts, much sooner
    coarse = config.window is None and plan.layout in ("contiguous", "zigzag") and share.length % pieces == 0
    scale = share.length // pieces if coarse else 1
    table = layout(plan.layout, share.length // scale, plan.cp)
    found = _exchange(name, table, share.cp, numbers * scale, config.window)
    for way in ("forward", "backward"):
        size, messages = found[way]
        yield AxisTraffic("cp", name, size * share.itemsize, messages)


_exchange = lru_cache(maxsize=4096)(context.sent)


def _to_stages(share: RankShare, stage: int, rows: int, tokens: int) -> tuple[list, list]:
    """The stage's output to the next one, its input's gradient to the one before, where those are on another rank."""
    schedule, position = frame(share.plan), share.stages[stage]
    own = split_sizes(tokens, share.plan.tp)[share.tp] if share.plan.sp else tokens
    message = AxisTraffic("pp", "isend", rows * own * share.config.n_embd * share.itemsize, 1)
    other = lambda neighbour: schedule.placement[neighbour] != schedule.placement[stage]
    there = position < schedule.depth - 1 and other(stage + 1)
    back = position > 0 and other(stage - 1)
    return [message] * there, [message] * back


@lru_cache(maxsize=256)
def gradient_sends(share: RankShare) -> list[AxisTraffic]:
    """What summing gradients over replicas sends in a step, and what brings new weights back to them."""
    plan = share.plan
    if plan.zero:
        return _zero(share)
    if plan.data in ("server", "servers"):
        return _served(share)
    found = []
    for experts in (False, True):
        sizes = [p.elements for p in share.parameters if p.expert == experts]
        if plan.data == "bucket":
            sizes = _buckets(tuple(sizes), share.gradient, plan.bucket)
        axis, ranks, place = share.replicas(experts)
        for size, count in Counter(sizes).items():
            found += [s.times(count) for s in all_reduce(axis, size, ranks, place, share.gradient)]
    return found


@lru_cache(maxsize=1024)
def _buckets(sizes: tuple[int, ...], itemsize: int, kib: int) -> list[int]:
    like = lambda size: SimpleNamespace(numel=lambda: size, element_size=lambda: itemsize)
    return [sum(w.numel() for w in group) for group in into_buckets([*map(like, sizes)], 1024 * kib)]


def _zero(share: RankShare) -> list[AxisTraffic]:
    plan, found, gathered, reduced = share.plan, [], gather_counts(share), reduce_counts(share)
    across, counts = plan.dp * plan.cp // share.sharing[0], Counter()
    for number, (key, size) in enumerate(share.sizes.items()):
        axis, ranks, place = share.replicas(key[1] >= EXPERT)
        if ranks == 1:
            continue
        if plan.data == "owner":
            owner, whole = owner_of(number, len(share.sizes), ranks), size * share.itemsize
            gather = chain_cost(whole, place == (owner - 1) % ranks)
            reduce = chain_cost(whole, place == owner)
        else:
            shard, bytes_each = share.shards[key], (share.itemsize, share.gradient)
            gather, reduce = (all_gather_cost([shard * e] * ranks, place) for e in bytes_each)
            if across > 1:
                found += all_reduce("replica", shard, across, share.place // ranks, share.master)
        counts[axis, "all_gather", *gather] += gathered[key]
        counts[axis, "reduce_scatter", *reduce] += reduced[key]
    return found + [AxisTraffic(*call).times(count) for call, count in counts.items()]


def _served(share: RankShare) -> list[AxisTraffic]:
    """Every gradient to its server, every new weight from it."""
    (ranks, place), sizes = share.sharing, {p.name: p.elements for p in share.parameters}
    found = []
    for name, server in share_out(sizes, 1 if share.plan.data == "server" else ranks).items():
        count = ranks - 1 if server == place else 1
        found.append(AxisTraffic("dp+cp", "isend", count * sizes[name] * share.itemsize, count))
    return found


def finish_sends(share: RankShare) -> list[AxisTraffic]:
    """What ends a step: partial sums over tensor ranks, what two stages hold both, the norm, the loss."""
    plan, world = share.plan, share.plan.world
    partial = owned(share, "partial")
    found = all_reduce("tp", partial, plan.tp, share.tp, share.master) if partial else []
    twin, elements = tied(share)
    if elements:
        found += all_reduce("tie", elements, 2, int(share.pp > twin), share.master)
    return found + 2 * all_reduce("world", 1, world, share.number, 8)


def tied(share: RankShare) -> tuple[int, int]:
    """The stage that holds some parameters too, and their elements: the embedding's other end, or the other copy."""
    schedule = frame(share.plan)
    if schedule.copies == 2:
        twin, wanted = schedule.ranks - 1 - share.pp, "all"
    else:
        ends = schedule.placement[0], schedule.placement[-1]
        twin, wanted = ends[share.pp == ends[0]], "wte"
        if share.pp not in ends or not share.net.tied:
            return twin, 0
    return twin, 0 if twin == share.pp else owned(share, wanted)


WANTED = {
    "all": lambda p: True,
    "partial": lambda p: p.partial,
    "wte": lambda p: p.name == "wte.weight",
}


def owned(share: RankShare, wanted: str) -> int:
    """Elements of the parameters that are `WANTED`, or of the parts of them that this rank's optimizer steps."""
    (ranks, place), plan, total = share.sharing, share.plan, 0
    for number, (part, group) in enumerate(share.groups.items()):
        size = share.shards[part] if plan.zero else share.sizes[part]
        if part[1] >= EXPERT:
            total += size * (wanted == "all")
            continue
        low = place * size if plan.zero else 0
        start, high = 0, low + size
        if plan.zero and plan.data == "owner":
            mine = owner_of(number, len(share.sizes), ranks) == place
            low, high = 0, share.sizes[part] * mine
        for p in group:
            if WANTED[wanted](p):
                total += max(0, min(start + p.elements, high) - max(start, low))
            start += p.elements
    return total


def exchanges(share: RankShare) -> list[AxisTraffic]:
    """Tokens to their experts and back, and their gradients, in every layer with experts and micro-batch.

    Each expert gets equally many, as expert choice routes; other routers send as much where they are balanced.
    Lepikhin et al. 2020, "GShard", section 3.
    """
    plan, experts, n = share.plan, share.config.experts, share.plan.ep
    if n == 1:
        return []
    first, found = share.dp - share.dp % n, []
    even = replace(experts, router="expert_choice", top_k=experts.top_k)
    of_row = experts.experts // n * even.room(share.length)
    mine = [split_sizes(split_sizes(share.rows, plan.dp)[first + i], plan.micro) for i in range(n)]
    for micro, count in Counter(zip(*mine, strict=True)).items():
        rows = [[r * of_row] * n for r in micro]
        sent = bytes_sent(rows, share.config.n_embd, experts.experts, share.itemsize, 1 + share.again[0])
        one = AxisTraffic("ep", "all_to_all", *sent[share.dp - first])
        found.append(one.times(count * len(share.mixtures)))
    return found


def sends(share: RankShare) -> list[AxisTraffic]:
    """All that the rank sends in a step. Raises ValueError where no formula says it (`why_no_price`)."""
    check_price(share.plan, share.config)
    found = [*gradient_sends(share), *finish_sends(share), *exchanges(share)]
    for stage in share.stages:
        for (rows, tokens), count in share.units(stage).items():
            ways = stage_ways(share, stage, rows, tokens).values()
            found += [s.times(count) for sent in ways for s in sent]
    return found


def by_axis(found: Iterable[AxisTraffic]) -> dict[str, tuple[int, int]]:
    """(bytes, messages) by axis."""
    total = defaultdict(lambda: (0, 0))
    for s in found:
        total[s.axis] = total[s.axis][0] + s.bytes, total[s.axis][1] + s.messages
    return {axis: sums for axis, sums in total.items() if any(sums)}
