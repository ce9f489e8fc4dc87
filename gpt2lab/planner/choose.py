"""Which plan: all that can run are predicted, and the best one for a goal is chosen, with its reasons.

What cannot win is left out, and every reason is counted: `space.PRUNED`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..machine.arguments import MORE, checked
from ..machine.patience import patiently
from ..plan import Plan
from .bounds import Bounds
from .cost import Prediction, classes, predict, timed
from .problem import Cluster
from .share import RankShare, check
from .space import FEW, proposals, runs, worlds

LARGE = 10  # plans that are predicted on more devices though they cannot fit: what more memory would win
NEAR = 1.05  # times the second best plan's seconds up to which what a plan holds is asked on more devices
LEAST = "time", "memory", "devices"


@dataclass(frozen=True)
class PricedPlan:
    """A plan and what it costs."""

    plan: Plan
    prediction: Prediction


@checked(rows=1, length=1, memory=(MORE, float("inf")), seconds=(MORE, float("inf")), itemsize=1, mixed=0)
@dataclass(frozen=True)
class Goal:
    """What is wanted of a step of `rows` sequences of `length` tokens: the least of one thing under limits on others.

    `least` is time, memory or devices; `memory` is bytes a rank (None: what the device has), `seconds` a step;
    `itemsize` and `mixed` are a precision of `problem.PRECISIONS`. Raises ValueError for an unknown one.
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

    def order(self, plan: Plan, seconds: float, size: float) -> tuple:
        """What is compared between plans that meet the goal, the smaller the better."""
        first = plan.world if self.least == "devices" else size
        return (seconds, size) if self.least == "time" else (first, seconds)

    def key(self, found: PricedPlan) -> tuple:
        """The same of a plan that has been predicted."""
        return self.order(found.plan, found.prediction.seconds, found.prediction.memory)


@dataclass(frozen=True)
class Choice:
    """The best plan for a goal and why; `front`: plans that none beats in both time and memory, fastest first.

    Of clusters of more than `space.FEW` devices the front has only plans that were predicted on the way to the best.
    `rejected` says how many plans were left out or did not meet the goal, by reason; `tried` how many were predicted.
    """

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    front: tuple[PricedPlan, ...]
    rejected: dict[str, int]
    tried: int


class _Search:
    """What has been predicted so far, and which plans can still win."""

    def __init__(self, config, cluster: Cluster, goal: Goal):
        self.config, self.cluster, self.goal = config, cluster, goal
        self.many = cluster.devices > FEW
        self.limit = cluster.device.memory if goal.memory is None else goal.memory
        self.rejected, self.known, self.large = Counter(), {}, 0
        self.found: list[PricedPlan] = []
        self.front: list[PricedPlan] = []
        self.met: list[PricedPlan] = []  # the two best that meet the goal
        self.fits: PricedPlan | None = None  # the fastest for which there is memory

    @property
    def best(self) -> PricedPlan | None:
        """What meets the goal best so far."""
        return self.met[0] if self.met else None

    def run(self, watch: Callable = iter) -> None:
        """Predict all that can win, the most promising first."""
        config, rows, length = self.config, self.goal.rows, self.goal.length
        bounds = Bounds(config, self.cluster, rows, length, self.goal.itemsize, self.goal.mixed)
        # who wants few devices is answered by the first of them that suffice
        for world in sorted(worlds(self.cluster.devices), reverse=self.goal.least != "devices"):
            if self.hopeless(Plan(dp=world), bounds.ideal(world), 0):
                self.rejected["numbers of ranks that cannot win"] += 1
                continue
            asked = config, self.cluster, world, rows, length, self.rejected
            every = [(*bounds.of(plan), plan) for plan in proposals(*asked)]
            # what is good in both leaves few to a front, what is good for the goal few to a choice
            promise = lambda one: self.goal.order(one[2], *one[:2]) if self.many else one[0] * one[1]
            for seconds, size, plan in watch(sorted(every, key=promise)):
                why = self.hopeless(plan, seconds, size)
                if not why and (size <= self.limit or not self.many):
                    size = max(size, bounds.fullest(plan))
                    why = self.hopeless(plan, seconds, size)
                if why:
                    self.rejected[why] += 1
                elif runs(plan, config, rows, length, self.rejected):
                    if self.slower(plan, size):
                        self.rejected["cannot win"] += 1
                    else:
                        self.add(plan)

    def hopeless(self, plan: Plan, seconds: float, size: float) -> str:
        """Why a plan that takes so much at least cannot win, if so: in time and memory, on many devices by the goal."""
        if self.beaten(seconds, size):
            return "cannot win"
        if self.many and self.best and self.goal.order(plan, seconds, size) >= self.goal.key(self.best):
            return "cannot win"
        late = self.fits and self.fits.prediction.seconds <= seconds and seconds > self.goal.seconds
        if self.many and late:
            return "cannot win"
        self.large += size > self.limit
        return "needs more memory by far" if self.many and size > self.limit and self.large > LARGE else ""

    def beaten(self, seconds: float, size: float) -> bool:
        """Whether one of the front is as fast and holds as little."""
        return any(f.prediction.seconds <= seconds and f.prediction.memory <= size for f in self.front)

    def slower(self, plan: Plan, size: float) -> bool:
        """Whether a plan takes longer than is of interest: its time is known sooner than what it holds."""
        if len(self.met) < 2:
            return False
        goal, second = self.goal, self.met[1]
        share = RankShare(plan, self.config, goal.rows, goal.length, goal.itemsize, mixed=goal.mixed)
        seconds = timed(classes(share), self.cluster, self.known)[1]
        near = goal.order(second.plan, NEAR * second.prediction.seconds, second.prediction.memory)
        return goal.order(plan, seconds, size) > near and (self.many or self.beaten(seconds, size))

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
                self.met = sorted([*self.met, one], key=goal.key)[:2]


PLANS = partial(patiently, what="plans", falling="most cannot win and are passed over")


@checked()
def parallelize(config, cluster: Cluster, goal: Goal, watch: Callable = PLANS) -> Choice:
    """The plan that meets a goal best on a cluster, by prediction; `watch` sees the candidates pass, as tqdm does.

    What each takes at least is known at once (`bounds`), so only those that can still win are predicted. Raises
    ValueError, with what is short and by how much, where no plan meets the goal.
    """
    check(Plan(), config, goal.rows, goal.length)
    search = _Search(config, cluster, goal)
    search.run(watch)
    if not search.best:
        raise ValueError(_short(search, watch))
    best, found, rejected = search.best, search.found, search.rejected
    if best.plan.world > 1 and all(f.plan != Plan() for f in found):
        search.add(Plan())  # the reasons compare with it
    rejected["needs more memory"] = sum(f.prediction.memory > search.limit for f in found)
    rejected["takes more time"] = sum(f.prediction.seconds > goal.seconds for f in found)
    reasons = _reasons(best, found, search.limit, goal)
    return Choice(best.plan, best.prediction, reasons, tuple(search.front), dict(+rejected), len(found))


def pareto(found: list[PricedPlan]) -> list[PricedPlan]:
    """The plans that no other beats in time and memory, fastest first."""
    front, least = [], float("inf")
    for one in sorted(found, key=lambda f: (f.prediction.seconds, f.prediction.memory, f.plan.world)):
        if one.prediction.memory < least:
            front.append(one)
            least = one.prediction.memory
    return front


def _short(search: _Search, watch: Callable) -> str:
    """What no plan has enough of, in a sentence."""
    cluster, goal, limit = search.cluster, search.goal, search.limit
    ranks = f"{cluster.devices} rank{'s' * (cluster.devices > 1)}"
    if not search.fits:
        smallest = replace(goal, least="memory", memory=float("inf"), seconds=float("inf"))
        again = _Search(search.config, cluster, smallest)
        again.run(watch)
        need = again.best.prediction.memory
        return (
            f"No plan of up to {ranks} fits into {in_bytes(limit)} a rank: the smallest, {again.best.plan}, "
            f"needs {in_bytes(need)}, {in_bytes(need - limit)} more. Use more memory, more ranks, or fewer rows."
        )
    fast, fits = search.fits, f" that fits into {in_bytes(limit)} a rank" if limit < float("inf") else ""
    return (
        f"No plan of up to {ranks}{fits} takes "
        f"{in_seconds(goal.seconds)} or less: the fastest, {fast.plan}, takes {in_seconds(fast.prediction.seconds)}, "
        f"{in_seconds(fast.prediction.seconds - goal.seconds)} more. Use more or faster devices, or allow more time."
    )


def _reasons(best: PricedPlan, found: list[PricedPlan], limit: float, goal: Goal) -> tuple[str, ...]:
    """Why this plan: what it spends its time on, which limit it is near, and the nearest others."""
    p = best.prediction
    large = sorted(p.parts.items(), key=lambda part: -part[1])[:3]
    words = WORDS | ({"dp+cp": "gradients' sums and weights' gathers"} if best.plan.zero else {})
    said = ", ".join(f"{words.get(name, name)} {part / p.seconds:.0%}" for name, part in large if part)
    reasons = [f"of its {in_seconds(p.seconds)} a step are {said}"]
    serial = next((f for f in found if f.plan == Plan()), None)
    if serial and best.plan.world > 1:
        times = serial.prediction.seconds / p.seconds
        need = serial.prediction.memory
        fits = f" and would need {in_bytes(need)}" if need > limit else ""
        reasons.append(f"one rank takes {times:.2f} times as long{fits}")
    if limit < float("inf"):
        reasons.append(f"its fullest rank holds {in_bytes(p.memory)} of {in_bytes(limit)}")
    faster = [f for f in found if f.prediction.seconds < p.seconds and f.prediction.memory > limit]
    if faster:
        one = min(faster, key=lambda f: f.prediction.memory)
        need, times = in_bytes(one.prediction.memory), one.prediction.seconds / p.seconds
        reasons.append(f"{one.plan} would take {times:.2f} of its time but needs {need} a rank")
    meets = lambda p: p.memory <= limit and p.seconds <= goal.seconds
    others = [f for f in found if f.plan != best.plan and meets(f.prediction)]
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
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB" if size < 1024 else f"{size:,.0f} GiB"


@checked(seconds=(-float("inf"), float("inf")))
def in_seconds(seconds: float) -> str:
    """Seconds with a unit."""
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if abs(seconds) >= 0.9995 else f"{1e3 * seconds:.3g} ms"
