"""Is a task graph right, is it the least, and how parallel is it?"""

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations, groupby

from ..machine.arguments import checked
from .graph import Task, TaskGraph


@checked()
def races(graph: TaskGraph, before: list | None = None) -> list[tuple[str, str, str]]:
    """Pairs of tasks with conflicting accesses that no path of edges orders, each with the first such access.

    `before`: edges to judge in place of the graph's own. All pairs of accesses to a tensor are compared, so this
    does not depend on how the graph finds its edges.
    """
    ancestors = ancestors_of(graph.before if before is None else before)
    users = defaultdict(list)
    for task in graph.tasks:
        for access in task.accesses:
            users[access.tensor].append((task, access))
    unordered = {}
    for accesses in users.values():
        for (first, a), (then, b) in combinations(accesses, 2):
            if first is not then and b.conflicts(a) and not ancestors[then.number] >> first.number & 1:
                unordered.setdefault((first.number, then.number), (first.name, then.name, str(b)))
    return [unordered[pair] for pair in sorted(unordered)]


def ancestors_of(before) -> list[int]:
    """For each task all tasks that some path of edges puts before it, as the bits of a number."""
    ancestors: list[int] = []
    for predecessors in before:
        bits = 0
        for u in predecessors:
            bits |= ancestors[u] | 1 << u
        ancestors.append(bits)
    return ancestors


@checked()
def needless(graph: TaskGraph) -> list[tuple[int, int]]:
    """Edges that can be left out: another path orders the two tasks too, or their accesses do not conflict."""
    before, tasks = graph.before, graph.tasks
    ancestors = ancestors_of(before)

    def is_needed(u: int, v: int) -> bool:
        implied = any(ancestors[w] >> u & 1 for w in before[v] if w != u)
        return not implied and any(b.conflicts(a) for a in tasks[u].accesses for b in tasks[v].accesses)

    return [(u, v) for v, predecessors in enumerate(before) for u in predecessors if not is_needed(u, v)]


def independent_loops(graph: TaskGraph) -> list[list[Task]]:
    """The tasks as parallel loops: neighbours with the same `loop`, in program order.

    Raises ValueError when two tasks of one loop depend on each other, so that it is no parallel loop.
    """
    loops = [list(loop) for _, loop in groupby(graph.tasks, lambda task: task.loop or task.number)]
    for loop in loops:
        numbers = {task.number for task in loop}
        for task in loop:
            if first := numbers.intersection(graph.before[task.number]):
                other = graph.tasks[min(first)].name
                text = f"loop {task.loop!r} cannot run in parallel: {task.name!r} needs {other!r} of the same loop."
                raise ValueError(f"{text} Give them different loops.")
    return loops


ONE = lambda task: 1.0  # the cost of a task where all cost the same


@checked()
def work(graph: TaskGraph, cost: Callable[[Task], float] = ONE) -> float:
    """T_1: what all tasks cost together, the time of one worker."""
    return sum(map(cost, graph.tasks))


@checked()
def levels(graph: TaskGraph, cost: Callable[[Task], float] = ONE) -> list[float]:
    """For each task the cost of the most costly chain that begins with it: the usual priority of a scheduler."""
    longest = [0.0] * len(graph.tasks)
    for v in range(len(longest) - 1, -1, -1):
        longest[v] += cost(graph.tasks[v])
        for u in graph.before[v]:
            longest[u] = max(longest[u], longest[v])
    return longest


@checked()
def span(graph: TaskGraph, cost: Callable[[Task], float] = ONE) -> float:
    """T_inf: the cost of the critical path, the time with as many workers as there are tasks."""
    return max(levels(graph, cost), default=0.0)


@checked()
def critical_path(graph: TaskGraph, cost: Callable[[Task], float] = ONE) -> list[Task]:
    """A most costly chain of tasks, each waiting for the one before."""
    longest, path = levels(graph, cost), []
    after = defaultdict(list)
    for u, v in graph.edges():
        after[u].append(v)
    candidates = list(range(len(longest)))
    while candidates:
        best = max(candidates, key=lambda v: (longest[v], -v))
        path.append(graph.tasks[best])
        candidates = after[best]
    return path


def parallelism(graph: TaskGraph, cost: Callable[[Task], float] = ONE) -> float:
    """T_1 / T_inf: how many workers the graph can keep busy on average; 0 where there is no work."""
    return work(graph, cost) / (span(graph, cost) or 1.0)
