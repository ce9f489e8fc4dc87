"""Which plan: all that can run are predicted, and the best one for a goal is chosen, with its reasons.

Plans that another one beats whatever the machine are left out, and every reason is counted: `PRUNED`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..machine.arguments import MORE, checked
from ..plan import Plan
from .cost import Prediction, predict
from .problem import Cluster
from .share import check

PRUNED = {
    "refused": "the plan cannot run this model: Plan.check says why",
    "tensor ranks on two nodes": "its sums, four a layer, would cross the slow link",
    "tensor ranks without sequence parallelism": "beyond four ranks sp=true holds less for about the same bytes",
    "ZeRO-2 or 3 beside a pipeline": "they gather or sum the weights again for every micro-batch",
    "recomputation that is not needed": "beyond four ranks only where the plan without it does not fit",
    "other schedules than 1F1B": "beyond four ranks they are tried where 1F1B was best",
    "short sequences cut over ranks": "beyond four ranks context parallelism is for 4,096 tokens or more, 1,024 a rank",
}
SCHEDULES = "1f1b", "interleaved", "zb_h1"  # gpipe takes 1f1b's time and holds more; the others need m >= 2 p
WHOLE = 4  # ranks up to which nothing is left out that could run
FEW = 8  # devices up to which this holds for plans of so few ranks, and every number of ranks is tried
BEST = 10  # pipelines for which, on more devices, other schedules are tried
LEAST = "time", "memory", "devices"


@checked(rows=1, length=1, memory=(MORE, float("inf")), seconds=(MORE, float("inf")), itemsize=1)
@dataclass(frozen=True)
class Goal:
    """What is wanted of a step of `rows` sequences of `length` tokens: the least of one thing under limits on others.

    `least` is time, memory or devices; `memory` is bytes a rank (None: what the device has), `seconds` a step;
    `itemsize` and `mixed` are a precision of `problem.PRECISIONS`.
    Raises ValueError for an unknown one.
    """

    rows: int
    length: int
    least: str = "time"
    memory: float | None = None
    seconds: float = float("inf")
    itemsize: int = 4
    mixed: int = 0

    def __post_init__(self):
        if self.least not in LEAST:
            raise ValueError(f"A goal cannot be the least {self.least!r}. Use {', '.join(LEAST)}.")

    def key(self, found: "PricedPlan"):
        """What is compared between plans that meet the goal, the smaller the better."""
        p = found.prediction
        order = {"time": (p.seconds, p.memory), "memory": (p.memory, p.seconds)}
        return order.get(self.least, (found.plan.world, p.seconds))


@dataclass(frozen=True)
class PricedPlan:
    """A plan and what it costs."""

    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Choice:
    """The best plan for a goal and why; `front`: plans that none beats in both time and memory, fastest first.

    `rejected` says how many plans were left out or did not meet the goal, by reason; `tried` how many were predicted.
    """

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    front: tuple[PricedPlan, ...]
    rejected: dict[str, int]
    tried: int


@checked(world=(1, 10**6), axes=(1, 8))
def factors(world: int, axes: int = 4) -> Iterator[tuple[int, ...]]:
    """All ways to write `world` as a product of so many sizes, in order."""
    if axes == 1:
        yield (world,)
        return
    for first in (d for d in range(1, world + 1) if world % d == 0):
        for rest in factors(world // first, axes - 1):
            yield first, *rest


@checked(devices=(1, 10**6))
def worlds(devices: int) -> list[int]:
    """How many ranks are tried: every number up to FEW, then the divisors of the cluster's size."""
    return [n for n in range(1, devices + 1) if n <= min(devices, FEW) or devices % n == 0]


def pruned(world: int, cluster: Cluster) -> bool:
    """Whether plans of so many ranks are left out by the rules of `PRUNED`."""
    return world > WHOLE or cluster.devices > FEW


def candidates(
    config, cluster: Cluster, rows: int, length: int, rejected: Counter | None = None
) -> Iterator[Plan]:
    """The plans that are worth predicting, small worlds first; `rejected` counts those that are not, by reason."""
    rejected = Counter() if rejected is None else rejected
    node = cluster.network.node
    for world in worlds(cluster.devices):
        many = pruned(world, cluster)
        for pp, dp, cp, tp in factors(world):
            mesh = Plan(pp=pp, dp=dp, cp=cp, tp=tp)
            if many and 1 < node < tp:
                rejected["tensor ranks on two nodes"] += 1
            elif many and cp > 1 and length < max(4096, 1024 * cp):
                rejected["short sequences cut over ranks"] += 1
            elif not _runs(mesh, config, rows, length, rejected):
                continue
            else:
                yield from _options(mesh, config, rows, length, many, rejected)


def _runs(plan: Plan, config, rows: int, length: int, rejected: Counter, alike: int = 1) -> bool:
    """Whether a plan can run the model; else it is counted as refused, with those that are refused as it is."""
    try:
        check(plan, config, rows, length)
    except ValueError:
        rejected["refused"] += alike
        return False
    return True


def _options(mesh: Plan, config, rows: int, length: int, many: bool, rejected: Counter) -> Iterator[Plan]:
    """All that a mesh leaves open: micro-batches, schedule, ZeRO, exchange, sp, recomputation, loss."""
    most = rows // mesh.dp
    micros = [m * mesh.pp for m in (1, 2, 4, 8)] if mesh.pp > 1 else [1, 2, 4, 8, 16, 32, 64]
    micros = sorted(
        {m for m in micros if m <= most} | {most} & ({1} if mesh.pp == 1 and not many else {most})
    )
    zeros = range(4) if mesh.dp * mesh.cp > 1 else [0]
    if many and mesh.pp > 1 and len(zeros) > 1:
        rejected["ZeRO-2 or 3 beside a pipeline"] += 2 * len(micros)
        zeros = range(2)
    exchanges = (
        [{}] if mesh.cp == 1 else [{}, {"layout": "zigzag", "exchange": "ring"}, {"exchange": "heads"}]
    )
    sps = [False, True] if mesh.tp > 1 else [False]
    if many and mesh.tp > 1:
        rejected["tensor ranks without sequence parallelism"] += len(micros)
        sps = [True]
    losses = ["whole", "chunked"] if mesh.tp == 1 else ["whole"]
    schedules = SCHEDULES if mesh.pp > 1 and not many else SCHEDULES[:1]
    for micro, zero, more, sp, loss, schedule in product(micros, zeros, exchanges, sps, losses, schedules):
        said = {"micro": micro, "zero": zero, "sp": sp, "loss": loss, "schedule": schedule} | more
        plan = replace(mesh, **said)
        alone = zero == 3 and mesh.pp == 1  # without a pipeline stage 3 runs blocks again anyway
        if _runs(plan, config, rows, length, rejected, 2 - alone):
            yield plan
            if not alone:
                yield replace(plan, recompute=True)


@checked()
def parallelize(config, cluster: Cluster, goal: Goal, watch: Callable = iter) -> Choice:
    """The plan that meets a goal best on a cluster, by prediction; `watch` sees the candidates pass, as tqdm does.

    Raises ValueError, with what is short and by how much, where no plan meets it.
    """
    check(Plan(), config, goal.rows, goal.length)
    rejected: Counter = Counter()
    limit = cluster.device.memory if goal.memory is None else goal.memory
    known: dict = {}
    ask = lambda plan: PricedPlan(
        plan, predict(plan, config, goal.rows, goal.length, cluster, goal.itemsize, True, known, goal.mixed)
    )
    found: list[PricedPlan] = []
    fits: set[Plan] = set()
    for plan in watch(candidates(config, cluster, goal.rows, goal.length, rejected)):
        if plan.recompute and pruned(plan.world, cluster) and replace(plan, recompute=False) in fits:
            rejected["recomputation that is not needed"] += 1
            continue
        found.append(ask(plan))
        if found[-1].prediction.memory <= limit:
            fits.add(plan)
    if cluster.devices > WHOLE:
        piped = [f for f in found if f.plan in fits and f.plan.pp > 1 and pruned(f.plan.world, cluster)]
        piped.sort(key=goal.key)
        rejected["other schedules than 1F1B"] += (len(SCHEDULES) - 1) * len(piped[BEST:])
        tried = [replace(f.plan, schedule=name) for f in piped[:BEST] for name in SCHEDULES[1:]]
        found += [ask(plan) for plan in tried if _runs(plan, config, goal.rows, goal.length, rejected)]
    good = [f for f in found if f.prediction.memory <= limit and f.prediction.seconds <= goal.seconds]
    rejected["needs more memory"] = sum(f.prediction.memory > limit for f in found)
    rejected["takes more time"] = sum(f.prediction.seconds > goal.seconds for f in found)
    if not good:
        raise ValueError(_short(found, limit, goal, cluster))
    best = min(good, key=goal.key)
    reasons = _reasons(best, found, limit, goal)
    shown = {reason: count for reason, count in rejected.items() if count}
    return Choice(best.plan, best.prediction, reasons, tuple(pareto(found)), shown, len(found))


def pareto(found: list[PricedPlan]) -> list[PricedPlan]:
    """The plans that no other beats in time and memory, fastest first."""
    front, least = [], float("inf")
    for one in sorted(found, key=lambda f: (f.prediction.seconds, f.prediction.memory, f.plan.world)):
        if one.prediction.memory < least:
            front.append(one)
            least = one.prediction.memory
    return front


def _short(found: list[PricedPlan], limit: float, goal: Goal, cluster: Cluster) -> str:
    """What no plan has enough of, in a sentence."""
    ranks = f"{cluster.devices} rank{'s' * (cluster.devices > 1)}"
    fitting = [f for f in found if f.prediction.memory <= limit]
    if not fitting:
        least = min(found, key=lambda f: (f.prediction.memory, f.prediction.seconds))
        need = least.prediction.memory
        return (
            f"No plan of up to {ranks} fits into {in_bytes(limit)} a rank: the smallest, {least.plan}, "
            f"needs {in_bytes(need)}, {in_bytes(need - limit)} more. Use more memory, more ranks, or fewer rows."
        )
    fast = min(fitting, key=lambda f: f.prediction.seconds)
    late = fast.prediction.seconds - goal.seconds
    return (
        f"No plan of up to {ranks} that fits into {in_bytes(limit)} a rank takes "
        f"{in_seconds(goal.seconds)} or less: the fastest, {fast.plan}, takes {in_seconds(fast.prediction.seconds)}, "
        f"{in_seconds(late)} more. Use more or faster devices, or allow more time."
    )


def _reasons(best: PricedPlan, found: list[PricedPlan], limit: float, goal: Goal) -> tuple[str, ...]:
    """Why this plan: what it spends its time on, which limit it is near, and the nearest others."""
    p = best.prediction
    large = sorted(p.parts.items(), key=lambda part: -part[1])[:3]
    said = ", ".join(
        f"{NAMES.get(name, name)} {seconds / p.seconds:.0%}" for name, seconds in large if seconds
    )
    reasons = [f"of its {in_seconds(p.seconds)} a step are {said}"]
    serial = next((f for f in found if f.plan == Plan()), None)
    if serial and best.plan.world > 1:
        times = serial.prediction.seconds / p.seconds
        fits = (
            ""
            if serial.prediction.memory <= limit
            else f" and would need {in_bytes(serial.prediction.memory)}"
        )
        reasons.append(f"one rank takes {times:.2f} times as long{fits}")
    if limit < float("inf"):
        reasons.append(f"its fullest rank holds {in_bytes(p.memory)} of {in_bytes(limit)}")
    faster = [f for f in found if f.prediction.seconds < p.seconds and f.prediction.memory > limit]
    if faster:
        one = min(faster, key=lambda f: f.prediction.memory)
        need = in_bytes(one.prediction.memory)
        reasons.append(
            f"{one.plan} would take {one.prediction.seconds / p.seconds:.2f} of its time but needs {need} a rank"
        )
    others = [f for f in found if f.plan != best.plan and f.prediction.memory <= limit]
    most = max(f.plan.world for f in found)
    if wide := [f for f in others if f.plan.world == most > best.plan.world]:
        one = min(wide, key=goal.key)
        times = one.prediction.seconds / p.seconds
        reasons.append(f"the best of {most} ranks, {one.plan}, takes {times:.2f} times as long")
    if others:
        one = min(others, key=goal.key)
        said = f"takes {in_seconds(one.prediction.seconds)}"
        said = f"holds {in_bytes(one.prediction.memory)}" if goal.least == "memory" else said
        reasons.append(f"the next best, {one.plan}, {said}")
    return tuple(reasons)


NAMES = {
    "compute": "computing",
    "recompute": "running blocks again",
    "bubble": "waiting in the pipeline",
    "cores": "waiting for a core",
    "update": "the update",
    "tp": "tensor ranks' sums",
    "cp": "keys and values under way",
    "dp+cp": "gradients' sums",
    "replica": "sums across groups",
    "tie": "the tied embedding",
    "world": "norm and loss",
}


@checked(size=(-float("inf"), float("inf")))
def in_bytes(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}" if size < 1024 else f"{size:,.0f} {unit}"
        size /= 1024
    return ""


@checked(seconds=(-float("inf"), float("inf")))
def in_seconds(seconds: float) -> str:
    """Seconds with a unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
