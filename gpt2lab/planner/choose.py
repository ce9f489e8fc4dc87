"""Which plan: all that can run are predicted, and the best one for a goal is chosen, with its reasons.

Plans that another one beats whatever the machine are left out, and every reason is counted: `PRUNED`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..machine.arguments import MORE, checked
from ..plan import Plan
from ..schedules.registry import NAMES
from .bounds import Bounds
from .cost import Prediction, predict
from .problem import Cluster
from .share import check

SCHEDULES = "1f1b", "interleaved", "zb_h1", "zb_v"
PRUNED = {
    "refused": "the plan cannot run this model: Plan.check says why",
    "tensor ranks on two nodes": "its sums, four a layer, would cross the slow link",
    "tensor ranks without sequence parallelism": "beyond four ranks sp=true holds less for about the same bytes",
    "ZeRO-2 or 3 beside a pipeline": "they gather or sum the weights again for every micro-batch",
    "short sequences cut over ranks": "beyond four ranks context parallelism is for 4,096 tokens or more, 1,024 a rank",
    "other schedules": f"tried are {', '.join(SCHEDULES)}; the others hold more, or the model twice",
    "cannot win": "its operations alone take longer, or its weights and activations more bytes, than what was found",
    "numbers of ranks that cannot win": "too few for the operations, all of them working all the time",
    "needs more memory by far": "weights, gradients and activations alone; the first such plans are predicted",
}
WHOLE = 4  # ranks up to which nothing is left out that could run
FEW = 8  # devices up to which this holds for plans of so few ranks, and every number of ranks is tried
LARGE = 10  # plans that are predicted on more devices though they cannot fit: what more memory would win
LEAST = "time", "memory", "devices"


@checked(rows=1, length=1, memory=(MORE, float("inf")), seconds=(MORE, float("inf")), itemsize=1)
@dataclass(frozen=True)
class Goal:
    """What is wanted of a step of `rows` sequences of `length` tokens: the least of one thing under limits on others.

    `least` is time, memory or devices; `memory` is bytes a rank (None: what the device has), `seconds` a step;
    `itemsize` and `mixed` are a precision of `problem.PRECISIONS`; of pipelines only the `schedules` are tried.
    Raises ValueError for an unknown one.
    """

    rows: int
    length: int
    least: str = "time"
    memory: float | None = None
    seconds: float = float("inf")
    itemsize: int = 4
    mixed: int = 0
    schedules: tuple[str, ...] = SCHEDULES

    def __post_init__(self):
        if self.least not in LEAST:
            raise ValueError(f"A goal cannot be the least {self.least!r}. Use {', '.join(LEAST)}.")

    def order(self, plan: Plan, seconds: float, size: float) -> tuple:
        """What is compared between plans that meet the goal, the smaller the better."""
        first = {"time": seconds, "memory": size, "devices": plan.world}[self.least]
        return first, *((size,) if self.least == "time" else (seconds,))

    def key(self, found: "PricedPlan") -> tuple:
        """The same of a plan that has been predicted."""
        return self.order(found.plan, found.prediction.seconds, found.prediction.memory)


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
    for world in worlds(cluster.devices):
        for plan in _proposals(config, cluster, world, rows, length, rejected):
            if _runs(plan, config, rows, length, rejected):
                yield plan


def _proposals(
    config,
    cluster: Cluster,
    world: int,
    rows: int,
    length: int,
    rejected: Counter,
    schedules: tuple = SCHEDULES,
) -> Iterator[Plan]:
    """The same of so many ranks, before each is asked whether it runs."""
    many, node = pruned(world, cluster), cluster.network.node
    for pp, dp, cp, tp in factors(world):
        mesh = Plan(pp=pp, dp=dp, cp=cp, tp=tp)
        if many and 1 < node < tp:
            rejected["tensor ranks on two nodes"] += 1
        elif many and cp > 1 and length < max(4096, 1024 * cp):
            rejected["short sequences cut over ranks"] += 1
        elif _runs(mesh, config, rows, length, rejected):
            yield from _options(mesh, rows, many, schedules, rejected)


def _runs(plan: Plan, config, rows: int, length: int, rejected: Counter) -> bool:
    """Whether a plan can run the model; else it is counted as refused."""
    try:
        check(plan, config, rows, length)
    except ValueError:
        rejected["refused"] += 1
        return False
    return True


def _options(mesh: Plan, rows: int, many: bool, schedules: tuple, rejected: Counter) -> Iterator[Plan]:
    """All that a mesh leaves open: micro-batches, schedule, ZeRO, exchange, sp, recomputation, loss."""
    most = rows // mesh.dp
    micros = {m for m in range(1, most + 1) if most % m == 0 or m in [mesh.pp * k for k in (1, 2, 4, 8)]}
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
    tried = schedules if mesh.pp > 1 else SCHEDULES[:1]
    rejected["other schedules"] += (len(NAMES) - len(tried)) * len(micros) * (mesh.pp > 1)
    for micro, zero, more, sp, loss, schedule in product(
        sorted(micros), zeros, exchanges, sps, losses, tried
    ):
        plan = replace(mesh, micro=micro, zero=zero, sp=sp, loss=loss, schedule=schedule, **more)
        yield plan
        if zero < 3 or mesh.pp > 1:  # without a pipeline stage 3 runs blocks again anyway
            yield replace(plan, recompute=True)


class _Search:
    """What has been predicted so far, and which plans can still win."""

    def __init__(self, config, cluster: Cluster, goal: Goal):
        self.config, self.cluster, self.goal = config, cluster, goal
        self.limit = cluster.device.memory if goal.memory is None else goal.memory
        self.rejected, self.known, self.large = Counter(), {}, 0
        self.found: list[PricedPlan] = []
        self.front: list[PricedPlan] = []
        self.best: PricedPlan | None = None  # that meets the goal
        self.fits: PricedPlan | None = None  # the fastest for which there is memory

    def run(self, watch: Callable = iter) -> None:
        """Predict all that can win, the most promising first."""
        config, rows, length = self.config, self.goal.rows, self.goal.length
        bounds = Bounds(config, self.cluster, rows, length, self.goal.itemsize, self.goal.mixed)
        for world in reversed(worlds(self.cluster.devices)):
            if self.hopeless(Plan(dp=world), bounds.ideal(world), 0):
                self.rejected["numbers of ranks that cannot win"] += 1
                continue
            asked = self.cluster, world, rows, length, self.rejected, self.goal.schedules
            plans = _proposals(config, *asked)
            every = [(*bounds.of(plan), plan) for plan in plans]
            for seconds, size, plan in watch(
                sorted(every, key=lambda one: self.goal.order(one[2], *one[:2]))
            ):
                if why := self.hopeless(plan, seconds, size):
                    self.rejected[why] += 1
                elif _runs(plan, config, rows, length, self.rejected):
                    self.add(plan)

    def hopeless(self, plan: Plan, seconds: float, size: float) -> str:
        """Why a plan that takes so much at least cannot win, if so: in time and memory, on many devices by the goal."""
        many = pruned(plan.world, self.cluster)
        if any(f.prediction.seconds <= seconds and f.prediction.memory <= size for f in self.front):
            return "cannot win"
        if many and self.best and self.goal.order(plan, seconds, size) >= self.goal.key(self.best):
            return "cannot win"
        late = self.fits and self.fits.prediction.seconds <= seconds and seconds > self.goal.seconds
        if many and late:
            return "cannot win"
        self.large += size > self.limit
        return "needs more memory by far" if many and size > self.limit and self.large > LARGE else ""

    def add(self, plan: Plan) -> None:
        """Predict a plan."""
        goal = self.goal
        asked = self.config, goal.rows, goal.length, self.cluster, goal.itemsize, True, self.known, goal.mixed
        one = PricedPlan(plan, predict(plan, *asked))
        p = one.prediction
        self.found.append(one)
        self.front = pareto([*self.front, one])
        if p.memory <= self.limit:
            self.fits = min(self.fits or one, one, key=lambda f: f.prediction.seconds)
            if p.seconds <= goal.seconds:
                self.best = min(self.best or one, one, key=goal.key)


@checked()
def parallelize(config, cluster: Cluster, goal: Goal, watch: Callable = iter) -> Choice:
    """The plan that meets a goal best on a cluster, by prediction; `watch` sees the candidates pass, as tqdm does.

    What each takes at least is known at once (`bounds`), so only those that can still win are predicted. Raises
    ValueError, with what is short and by how much, where no plan meets the goal.
    """
    check(Plan(), config, goal.rows, goal.length)
    search = _Search(config, cluster, goal)
    search.run(watch)
    if not search.best:
        raise ValueError(_short(search))
    best, found, rejected = search.best, search.found, search.rejected
    if best.plan.world > 1 and all(f.plan != Plan() for f in found):
        search.add(Plan())  # the reasons compare with it
    rejected["needs more memory"] = sum(f.prediction.memory > search.limit for f in found)
    rejected["takes more time"] = sum(f.prediction.seconds > goal.seconds for f in found)
    reasons = _reasons(best, found, search.limit, goal)
    shown = {reason: count for reason, count in rejected.items() if count}
    return Choice(best.plan, best.prediction, reasons, tuple(search.front), shown, len(found))


def pareto(found: list[PricedPlan]) -> list[PricedPlan]:
    """The plans that no other beats in time and memory, fastest first."""
    front, least = [], float("inf")
    for one in sorted(found, key=lambda f: (f.prediction.seconds, f.prediction.memory, f.plan.world)):
        if one.prediction.memory < least:
            front.append(one)
            least = one.prediction.memory
    return front


def _short(search: _Search) -> str:
    """What no plan has enough of, in a sentence."""
    cluster, goal, limit = search.cluster, search.goal, search.limit
    ranks = f"{cluster.devices} rank{'s' * (cluster.devices > 1)}"
    if not search.fits:
        again = _Search(
            search.config, cluster, replace(goal, least="memory", memory=float("inf"), seconds=float("inf"))
        )
        again.run()
        need = again.best.prediction.memory
        return (
            f"No plan of up to {ranks} fits into {in_bytes(limit)} a rank: the smallest, {again.best.plan}, "
            f"needs {in_bytes(need)}, {in_bytes(need - limit)} more. Use more memory, more ranks, or fewer rows."
        )
    fast = search.fits
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
        f"{WORDS.get(name, name)} {seconds / p.seconds:.0%}" for name, seconds in large if seconds
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


WORDS = {
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
