"""What a whole plan costs: seconds of a step, part by part, bytes sent, memory. Arithmetic, for any number of ranks.

Seconds = operations / rate + bytes moved / bandwidth + a launch for each operator; messages by the alpha-beta model on
the link that the mesh gives to their axis; a pipeline by its schedule on a clock. Ranks that do the same are looked at
once. Where a machine has fewer cores than ranks, its ranks share them.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3; bytes as in `sends`, memory as in
`memory`.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from ..machine.arguments import checked
from ..machine.speed import flops_per_token
from ..parallel.pipeline.stages import Parts
from ..parallel.zero.costs import backward_and_sums
from ..plan import Plan
from ..schedules import Cost, Timeline, simulate
from .memory import Held, fullest
from .models import Transformer
from .problem import Cluster
from .seconds import UPDATE, RankOnCluster, causal_pairs, routed
from .sends import by_axis, exchanges, finish_sends, gradient_sends, sends, stage_ways
from .share import RankShare, check, check_price, frame, order_of, rank_parts


@dataclass(frozen=True)
class Prediction:
    """What a step of a plan costs. `parts` are the seconds of the slowest rank, and add up to `seconds`.

    `sent` is bytes a step by axis, of the rank that sends most. `held` has the fullest rank of each class of stages.
    `flops` is the model's operations in a step, recomputation not counted, `mfu` the share of the peak that they are.
    """

    seconds: float
    parts: dict[str, float]
    held: tuple[Held, ...]
    sent: dict[str, int]
    flops: float
    mfu: float
    causal: float  # `mfu` with those pairs of attention alone that are computed

    @cached_property
    def memory(self) -> int:
        """Bytes of the fullest rank."""
        return max(held.total for held in self.held)


@checked(rows=1, length=1, itemsize=1)
def predict(
    plan,
    config,
    rows: int,
    length: int,
    cluster: Cluster,
    itemsize: int = 4,
    checked: bool = False,
    known: dict | None = None,
    mixed: int = 0,
) -> Prediction:
    """What a step of the plan costs on the cluster; `checked`: the plan is known to run the model.

    `known` is a dict that keeps what several plans on one cluster have in common; `itemsize` and `mixed` are a
    precision of `problem.PRECISIONS`. Sums of experts' gradients hide behind nothing. Raises ValueError where the plan
    cannot run the model, has no price (`share.why_no_price`), needs more devices than the cluster has, or where the
    rate of such numbers is not known.
    """
    if not checked:
        check(plan, config, rows, length)
    check_price(plan, config)
    if plan.world > cluster.devices:
        raise ValueError(
            f"{plan} needs {plan.world} devices and the cluster has {cluster.devices}. Use a smaller plan or more "
            "devices."
        )
    shares = classes(RankShare(plan, config, rows, length, itemsize, mixed=mixed))
    parts, seconds, sent = timed(shares, cluster, {} if known is None else known)
    ask = config.flops_per_token if isinstance(config, Transformer) else partial(flops_per_token, config)
    flops = ask(length) * rows * length
    device = cluster.device.with_numbers(itemsize)
    used = flops / (seconds * plan.world * (device.peak or device.rate))
    idle = 12 * config.n_layer * config.n_embd * rows * (length**2 - causal_pairs(length, config.window))
    found = seconds, dict(parts), fullest(shares), dict(sent), flops
    return Prediction(*found, used, used * (1 - idle / flops))


def timed(shares: list[RankShare], cluster: Cluster, known: dict) -> tuple[dict, float, dict]:
    """Seconds by part and in all; bytes by axis of the rank that sends most. `shares` are the plan's `classes`."""
    plan = shares[0].plan  # how the loss is computed changes what is held, but no time and no message
    alike = plan if plan.loss == "whole" else replace(plan, loss="whole")
    if alike not in known:
        machines = [RankOnCluster(cluster, share) for share in shares]
        every = (by_axis(sends(share)) for share in shares)
        most = max(every, key=lambda found: sum(b for b, _ in found.values()))
        known[alike] = *_step(machines, known), {axis: size for axis, (size, _) in most.items()}
    return known[alike]


def classes(share: RankShare) -> list[RankShare]:
    """A rank of each class of stages that differ in their layers; of equal stages the first and the last."""
    found: dict[tuple, list[int]] = {}
    for stage in range(share.plan.pp):
        found.setdefault(_kind(share, stage), []).append(stage)
    return [replace(share, pp=stage) for alike in found.values() for stage in sorted({alike[0], alike[-1]})]


def _step(machines: list[RankOnCluster], known: dict) -> tuple[dict[str, float], float]:
    """Seconds of a step: by part, on the rank that decides, and in all."""
    plan = machines[0].share.plan  # what ends a step hardly depends on what was before
    often = plan.zero > 1 or machines[0].overlaps
    again, micro = often and plan.recompute, plan.micro if often else 1
    alike = replace(plan, loss="whole", recompute=again, micro=micro), "ends"
    if alike not in known:
        known[alike] = {m.share.pp: _end(m) for m in machines}
    ends = known[alike]
    slowest = max(machines, key=lambda m: sum(ends[m.share.pp].values()))
    work = {m.share.pp: _work(m) for m in machines}
    share = slowest.share
    if share.plan.pp == 1:
        parts = work[share.pp]
    else:
        busy = max(machines, key=lambda m: sum(work[m.share.pp].values()))
        parts = work[busy.share.pp]
        whole = _pipeline(machines)
        shared = 0.0
        if cores := busy.cluster.cores:  # timed as if each rank had a core, but all work has to find one
            parts = Counter({name: seconds / busy.crowd for name, seconds in parts.items()})
            whole /= busy.crowd
            shared = max(0.0, _all_work(machines, work) / busy.crowd / min(cores, share.plan.world) - whole)
        parts = parts + Counter(bubble=max(0.0, whole - sum(parts.values())), cores=shared)
    parts = parts + ends[share.pp]
    return dict(parts), sum(parts.values())


def _all_work(machines: list[RankOnCluster], work: dict[int, Counter]) -> float:
    """Seconds of all ranks' work together; stages of a class are alike."""
    share = machines[0].share
    kinds = {_kind(share, m.share.pp): sum(work[m.share.pp].values()) for m in machines}
    total = sum(kinds[_kind(share, stage)] for stage in range(share.plan.pp))
    return total * share.plan.dp * share.plan.cp * share.plan.tp


def _kind(share: RankShare, rank: int) -> tuple[tuple[int, bool, bool], ...]:
    """For each position of a pipeline rank how many layers it has, and whether it has an end."""
    parts = rank_parts(share.plan, share.config, rank)
    return tuple(_kind_of(parts, position) for position in parts.mine)


def _kind_of(parts: Parts, position: int) -> tuple[int, bool, bool]:
    return len(parts.layers[position]), position == 0, position == len(parts.layers) - 1


def _work(machine: RankOnCluster) -> Counter:
    """Seconds of a rank in all forwards and backwards of a step, by part."""
    share, total = machine.share, machine.travel(exchanges(machine.share))
    total["compute"] += routed(machine)
    for stage in share.stages:
        for (rows, tokens), count in share.units(stage).items():
            for found in machine.times(stage, rows, tokens).values():
                for name, seconds in found.items():
                    total[name] += count * seconds
    return total


def _pipeline(machines: list[RankOnCluster]) -> float:
    """Seconds from the first forward to the last backward of a pipeline."""
    plan = machines[0].share.plan  # of which the clock asks nothing else
    alike = Plan(pp=plan.pp, micro=plan.micro, schedule=plan.schedule, chunks=plan.chunks)
    return pipeline_seconds(alike, *_stage_seconds(machines), _factors(machines[0].share))


@lru_cache(maxsize=4096)
def pipeline_seconds(plan, forward: tuple, first: tuple, second: tuple, hop: float, factors: tuple) -> float:
    """The makespan that `schedules.simulate` finds of the plan's schedule, much sooner.

    Seconds of a full unit's `forward`, input and weight gradient by position, and of a message between two ranks;
    `factors` are the shares of a full unit that each unit has. An operation waits for its rank and for a neighbouring
    stage: whatever else it needs is on its own rank, and earlier.
    """
    schedule, done = order_of(plan, plan.micro), {}
    depth, home, free = schedule.depth, schedule.placement, [0.0] * schedule.ranks
    takes = {"F": forward, "I": first, "W": second, "B": [a + b for a, b in zip(first, second, strict=True)]}
    steps = {"F": -1, "I": 1, "B": 1, "W": 0}  # how far away is the stage that it waits for
    left = [list(reversed(order)) for order in schedule.orders]
    while any(left):
        for rank, order in enumerate(left):
            while order:
                kind, stage, unit = order[-1]
                start, other = free[rank], stage + (step := steps[kind])
                if step and other // depth == stage // depth:  # in the same copy of the model
                    if (step, other, unit) not in done:
                        break
                    start = max(start, done[step, other, unit] + hop * (home[other] != rank))
                done[step, stage, unit] = free[rank] = start + takes[kind][stage % depth] * factors[unit]
                order.pop()
    return max(free)


def _stage_seconds(machines: list[RankOnCluster]) -> tuple[tuple, tuple, tuple, float]:
    """Seconds of a unit's forward, input and weight gradients by position, and of a message between two stages."""
    machine, share = machines[0], machines[0].share
    by_kind = {_kind(share, m.share.pp): m for m in machines}
    schedule, found = frame(share.plan), []
    for stage in range(schedule.depth):
        m = by_kind[_kind(share, schedule.placement[stage])]
        wanted = _kind_of(share.parts, schedule.position(stage))
        like = next(s for s, p in m.share.stages.items() if _kind_of(share.parts, p) == wanted)
        ways = m.times(like, *max(m.share.units(like)))
        times = {way: sum(parts.values()) for way, parts in ways.items()}
        weights = ways["backward"]["compute"] / 2
        found.append((times["forward"], times["again"] + times["backward"] - weights, weights))
    any_stage = next(iter(share.stages))
    ways = stage_ways(share, any_stage, *max(share.units(any_stage))).values()
    passed = [s for sent in ways for s in sent if s.axis == "pp"]
    hop = max((sum(machine.travel([s]).values()) for s in passed), default=0.0)
    return *zip(*found, strict=True), hop


def _factors(share: RankShare) -> tuple[float, ...]:
    """The share of a full unit that each unit of work has."""
    rows, slices = max(share.micro_rows), max(share.slices)
    return tuple(r * t / rows / slices for r in share.micro_rows for t in share.slices)


@checked(rows=1, length=1, itemsize=1)
def timetable(plan, config, rows: int, length: int, cluster: Cluster, itemsize: int = 4) -> Timeline:
    """When every stage works in a step, as its prediction has it, up to the last backward."""
    plan.check(config, rows, length)
    check_price(plan, config)
    machines = [RankOnCluster(cluster, s) for s in classes(RankShare(plan, config, rows, length, itemsize))]
    *times, hop = _stage_seconds(machines)
    factors = _factors(machines[0].share)
    return simulate(order_of(plan, plan.micro), Cost(*map(list, times), hop=hop, factors=factors))


def _end(machine: RankOnCluster) -> Counter:
    """Seconds after the last backward: what is left of the gradients' sums, the norm, the update, the new weights."""
    share = machine.share
    sums = [s for s in gradient_sends(share) if s.axis != "edp+cp"]
    of_experts = [s for s in gradient_sends(share) if s.axis == "edp+cp"]
    total = Counter()
    for axis, seconds in machine.travel(sums).items():
        total[axis] += _exposed(machine, seconds, sum(s.calls for s in sums)) if seconds else 0.0
    total += machine.travel([*of_experts, *finish_sends(share)])
    shared = share.sharers if share.plan.zero else lambda part: 1
    mine = sum(size / shared(part) for part, size in share.sizes.items())
    total["update"] = machine.work(0, UPDATE * share.master * mine, len(share.parameters))
    return total


def _exposed(machine: RankOnCluster, seconds: float, messages: int) -> float:
    """Seconds of the gradients' sums that no backward hides: overlap needs something that works beside the ranks."""
    plan = machine.share.plan
    if not machine.overlaps or plan.data != "bucket" or plan.zero == 1:
        return seconds
    # stage 3 gathers in forward, too
    ways = ("forward", "again", "backward") if plan.zero == 3 else ("backward",)
    units = [machine.times(stage, *max(machine.share.units(stage))) for stage in machine.share.stages]
    unit = sum(sum(seconds[way].values()) for seconds in units for way in ways)
    hidden = unit * (plan.micro if plan.zero > 1 else 1)
    return backward_and_sums(messages, hidden, seconds / messages) - hidden
