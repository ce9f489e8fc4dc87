"""Which device runs which operator: lower bounds, list scheduling, branch and bound, brute force.

Finding the best placement is NP-hard (Graham et al. 1979). A placement is a device for each operator; operators run in
the order of their longest remaining path, so the placement decides everything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..machine.arguments import checked
from ..machine.patience import patiently
from .events import Job, Simulated, simulate_jobs
from .problem import STATE, Cluster, OperatorGraph

MOST = 200_000  # placements, or parts of them, that a search for the best may try: about ten seconds
PENALTY = 10.0  # times a placement's seconds for every time that a device's memory is exceeded in full


@dataclass(frozen=True)
class Placed:
    """A placement found: the device of every operator, its seconds, and how many placements were timed for it."""

    where: tuple[int, ...]
    seconds: float
    timed: int


DEVICE = lambda placing: placing.cluster.devices - 1  # the last one


@checked(where=0, n=0, device=DEVICE, source=DEVICE, target=DEVICE)
class Placing:
    """The problem of placing a graph's operators on a cluster's devices for their forward."""

    def __init__(self, graph: OperatorGraph, cluster: Cluster):
        self.graph, self.cluster = graph, cluster
        self.times = [cluster.device.time(op.flops) for op in graph.operators]
        self.memory = [STATE * op.weights + op.kept for op in graph.operators]
        self.tail = _longest_tail(graph, self.times)
        self.order = sorted(range(len(graph)), key=lambda n: (-self.tail[n], n))

    def critical_path(self) -> tuple[float, list[int]]:
        """The longest path of computing, which no number of devices shortens: its seconds and its operators."""
        path = [max(range(len(self.graph)), key=lambda n: self.tail[n])]
        while self.graph.after[path[-1]]:
            path.append(max(self.graph.after[path[-1]], key=lambda n: self.tail[n]))
        return self.tail[path[0]], path

    def load(self) -> float:
        """All work, shared out evenly: no placement is faster than this either."""
        return sum(self.times) / self.cluster.devices

    def lower_bound(self) -> float:
        """The larger of the critical path and the load; messages would only add to it."""
        return max(self.critical_path()[0], self.load())

    def simulate(self, where: Sequence[int]) -> Simulated:
        """Every job and message of a placement on the clock."""
        place = {n: i for i, n in enumerate(self.order)}
        ops = self.graph.operators
        needs = lambda n: tuple((place[u], ops[u].output) for u in self.graph.before[n])
        jobs = [Job(ops[n].name, where[n], self.times[n], needs(n)) for n in self.order]
        return simulate_jobs(jobs, self.cluster)

    def held(self, where: Sequence[int]) -> list[float]:
        """Bytes on every device: weights, gradients, optimizer state, and what is kept for backward."""
        held = [0.0] * self.cluster.devices
        for size, device in zip(self.memory, where, strict=True):
            held[device] += size
        return held

    def cost(self, where: Sequence[int]) -> float:
        """Seconds of a placement, multiplied by 1 + PENALTY x (bytes too many / memory)."""
        limit = self.cluster.device.memory
        excess = sum(max(0.0, held - limit) / limit for held in self.held(where))
        return self.simulate(where).makespan * (1 + PENALTY * excess)

    def fits(self, where: Sequence[int]) -> bool:
        """Whether no device holds more than its memory."""
        return max(self.held(where)) <= self.cluster.device.memory

    def begin(self, n: int, device: int, done: dict, free: Sequence[float], where: dict) -> float:
        """When operator n could start on a device if every message had its link for itself."""
        arrivals = (done[u] + self.hop(u, where[u], device) for u in self.graph.before[n])
        return max(free[device], max(arrivals, default=0))

    def hop(self, n: int, source: int, target: int) -> float:
        """Seconds of a message with the result of operator n on a link of its own."""
        link = self.cluster.network.link(source, target)
        return 0 if source == target else link.time(self.graph.operators[n].output)


def _longest_tail(graph: OperatorGraph, times: Sequence[float]) -> list[float]:
    """For each operator the longest path of times from its start to the end of the graph."""
    tail = [0.0] * len(graph)
    for n in reversed(range(len(graph))):
        tail[n] = times[n] + max((tail[v] for v in graph.after[n]), default=0)
    return tail


@checked()
def exhaustive_placement(problem: Placing) -> Placed:
    """The best of all devices ^ operators placements that fit. Raises ValueError where none fits, or for too many."""
    if (count := problem.cluster.devices ** len(problem.graph)) > MOST:
        raise ValueError(
            f"{min(count, 10**300):.1e} placements take too long to try. Use branch_and_bound, or list_schedule."
        )
    every = patiently(product(range(problem.cluster.devices), repeat=len(problem.graph)), "placements", count)
    found = [(problem.simulate(where).makespan, where) for where in every if problem.fits(where)]
    if not found:
        raise _too_large(problem)
    seconds, where = min(found)
    return Placed(where, seconds, len(found))


@checked()
def list_schedule(problem: Placing) -> Placed:
    """Greedy: each operator in order goes to the device with room where it ends first (HEFT, Topcuoglu et al. 2002).

    Raises ValueError where an operator finds no device with room for it.
    """
    devices = range(problem.cluster.devices)
    free, room = [0.0] * len(devices), [problem.cluster.device.memory] * len(devices)
    where, done = {}, {}
    for n in problem.order:
        able = [d for d in devices if room[d] >= problem.memory[n]]
        if not able:
            raise _too_large(problem)
        begin = {d: problem.begin(n, d, done, free, where) for d in able}
        where[n] = min(able, key=lambda d: (begin[d], d))
        done[n] = free[where[n]] = begin[where[n]] + problem.times[n]
        room[where[n]] -= problem.memory[n]
    chosen = tuple(where[n] for n in range(len(problem.graph)))
    return Placed(chosen, problem.simulate(chosen).makespan, 1)


@checked()
def branch_and_bound(problem: Placing) -> Placed:
    """The best placement that fits, without timing those that a lower bound rules out.

    The bound of a part is the time at which an operator begins if no message waits for another, and its longest
    remaining path; and the load. Devices of one node without work are alike, so only the first of them is tried. Raises
    ValueError where none fits, or where the search finds no end.
    """
    search = _Search(problem)
    search.extend(0, {}, {}, [0.0] * problem.cluster.devices, [0.0] * problem.cluster.devices)
    if search.best is None:
        raise _too_large(problem)
    return Placed(search.best, search.seconds, search.timed)


class _Search:
    def __init__(self, problem: Placing):
        self.problem, self.best, self.seconds, self.timed = problem, None, float("inf"), 0
        self.parts = patiently(range(MOST), "parts of placements")  # it rarely needs all
        network = problem.cluster.network
        self.alike = not network.pairs and network.node in (1, max(network.node, problem.cluster.devices))

    def extend(self, depth: int, where, done, free, held) -> None:
        """Try all devices for the next operator, the most promising first."""
        problem = self.problem
        if next(self.parts, None) is None:
            raise ValueError(
                f"{MOST:,} parts of placements were tried, and more are left. Use list_schedule."
            )
        if depth == len(problem.graph):
            chosen = tuple(where[n] for n in range(depth))
            seconds = problem.simulate(chosen).makespan
            self.timed += 1
            if seconds < self.seconds:
                self.best, self.seconds = chosen, seconds
            return
        n = problem.order[depth]
        for bound, d, begin in sorted(self._choices(n, where, done, free, held)):
            if bound >= self.seconds * (1 - 1e-12):
                return
            row, size = list(free), list(held)
            row[d], size[d] = begin + problem.times[n], held[d] + problem.memory[n]
            self.extend(depth + 1, where | {n: d}, done | {n: row[d]}, row, size)

    def _choices(self, n, where, done, free, held):
        """(bound, device, when n can begin there) for every device with room."""
        problem, used = self.problem, set(where.values())
        for d in range(problem.cluster.devices):
            if held[d] + problem.memory[n] > problem.cluster.device.memory:
                continue
            if self.alike and d not in used and d != len(used):
                continue
            begin = problem.begin(n, d, done, free, where)
            yield max(begin + problem.tail[n], problem.load()), d, begin


def _too_large(problem: Placing) -> ValueError:
    need, device, size = sum(problem.memory), problem.cluster.device.memory, max(problem.memory)
    have = device * problem.cluster.devices
    if size > device:
        name = problem.graph.operators[problem.memory.index(size)].name
        return ValueError(
            f"{name} alone needs {size / 2**20:.4g} MiB, a device has {device / 2**20:.4g} MiB: "
            f"{(size - device) / 2**20:.4g} MiB are short. Cut the operator, or take devices with more memory."
        )
    return ValueError(
        f"No placement fits: the operators need {need / 2**20:.4g} MiB, {problem.cluster.devices} devices have "
        f"{have / 2**20:.4g} MiB, in pieces that do not suit. Use more devices, or devices with more memory."
    )
