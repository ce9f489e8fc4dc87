"""One problem for all searches: a chain of operators, each on a block of devices and cut there; and its clock.

Every operator has a run of neighbouring devices, its block, and on each of the block's two mesh axes a cut. `x` leads
between nodes, `y` stays inside one. Forward and backward of one micro-batch are one job; a device runs micro-batches
in order. Seconds are for a step of `micros` micro-batches; sums of gradients, once a step, are shared out to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, wraps
from itertools import product
from math import inf, prod

from ..machine.arguments import checked
from ..machine.links import Link
from ..sharding.cost import path, step_cost
from ..sharding.layout import Layout, fits
from .problem import STATE, Cluster, Operator

CUTS = ("whole", "sample", "attribute", "parameter")
"""FlexFlow's dimensions (Jia et al. 2019): rows of the batch, tokens, and weights (vocabulary, heads, hidden features).
Its fourth, the operator, is the choice of a block. `whole`: each device does the same."""
STREAM = {"sample": 0, "attribute": 1}  # the dimension of (rows, tokens, width) that a cut leaves cut


@checked(flops=0, output=0, weights=0, kept=0, units=1, links=1)
@dataclass(frozen=True)
class CutOperator(Operator):
    """An operator with the sizes in bytes of the tensors that are summed, gathered or scattered where it is cut.

    A parameter cut sums the tensors `summed`, forward and backward together; an attribute cut gathers or scatters
    the tensors `gathered`. `units` are the heads, features or words that a parameter cut shares out; `links` says how
    many links of `sharding.tofu`'s chain it stands for.
    """

    summed: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    units: int = 1
    links: int = 1


@checked(rows=1, length=1, itemsize=1)
def gpt2_cuts(config, rows: int, length: int, itemsize: int = 4) -> tuple[CutOperator, ...]:
    """GPT-2 as the chain embed, attn.0, mlp.0, ..., head: what `sharding.tofu` calls links, by formula."""
    c, v, tokens = config.n_embd, config.vocab_size, rows * length
    stream, token = itemsize * tokens * c, itemsize * tokens
    size = lambda numbers: itemsize * numbers
    positions = min(length, config.n_positions)
    table = size((v + config.n_positions) * c)
    found = [CutOperator("embed", 2 * c * tokens, stream, table, 0, (stream,), (), v)]
    for i in range(config.n_layer):
        attn = tokens * (8 * c * c + 4 * positions * c), stream, size(4 * c * c + 6 * c)
        kept = token * (6 * c + 2 + config.n_head)
        found.append(CutOperator(f"attn.{i}", *attn, kept, (stream,) * 2, (stream,) * 6, config.n_head))
        mlp = tokens * 16 * c * c, stream, size(8 * c * c + 7 * c), token * (10 * c + 2)
        found.append(CutOperator(f"mlp.{i}", *mlp, (stream,) * 2, (), 4 * c))
    loss = 2 * c * v * tokens, itemsize, size((v + 2) * c), token * (c + 2 + v)
    return (*found, CutOperator("head", *loss, (stream, token, token, token), (), v))


def merged(operators: Sequence[CutOperator]) -> CutOperator:
    """Neighbours as one operator, which is cut in one way."""
    total = lambda name: sum(getattr(op, name) for op in operators)
    joined = lambda name: sum((getattr(op, name) for op in operators), ())
    first, last = operators[0], operators[-1]
    return CutOperator(
        first.name if first is last else f"{first.name}..{last.name}",
        total("flops"),
        last.output,
        total("weights"),
        total("kept"),
        joined("summed"),
        joined("gathered"),
        min(op.units for op in operators),
        total("links"),
    )


@checked(first=0, count=1)
@dataclass(frozen=True)
class Assignment:
    """The devices first .. first + count - 1, and what each of the axes x and y cuts."""

    first: int
    count: int
    cut: tuple[str, str] = ("whole", "whole")

    @property
    def devices(self) -> range:
        """The numbers of the devices."""
        return range(self.first, self.first + self.count)


ChainPlan = tuple[Assignment, ...]
"""An assignment for each operator."""


@checked(first=0, count=1, node=1)
def block_mesh(first: int, count: int, node: int) -> dict[str, int]:
    """The shape of a block: a part of a node, whole nodes, or else devices joined by the slow links."""
    if first // node == (first + count - 1) // node:
        return {"x": 1, "y": count}
    if first % node == count % node == 0:
        return {"x": count // node, "y": node}
    return {"x": count, "y": 1}


@checked(rows=1, length=1, width=1, micros=1, itemsize=1, shared=0, plan=0, number=0, first=0, behind=0)
@dataclass(frozen=True)
class ChainProblem:
    """Operators on a cluster, for a step of `micros` micro-batches of (rows, length) tokens of `width` numbers."""

    operators: tuple[CutOperator, ...]
    cluster: Cluster
    rows: int
    length: int
    width: int
    micros: int = 4
    itemsize: int = 4
    cuts: tuple[str, ...] = CUTS
    shared: int = 0  # how many micro-batches share one sum of gradients; 0: all

    def __post_init__(self):
        for name in ("work", "change", "job", "held"):  # searches ask for the same again and again
            object.__setattr__(self, name, _kept(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def links(self) -> dict[str, Link]:
        """The link of each axis of a block."""
        network = self.cluster.network
        return {"x": network.between, "y": network.inside or network.between}

    def mesh(self, first: int, count: int) -> dict[str, int]:
        """The shape of a block on this cluster."""
        return block_mesh(first, count, self.cluster.network.node)

    def blocks(self) -> list[tuple[int, int]]:
        """Every run of neighbouring devices, as (first, count)."""
        n = self.cluster.devices
        return [(first, count) for first in range(n) for count in range(1, n - first + 1)]

    def assignments(self, number: int, block: tuple[int, int]) -> list[Assignment]:
        """All cuts of an operator on a block; an axis of one device cuts nothing."""
        mesh, units = self.mesh(*block), self.operators[number].units
        limits = {"sample": self.rows, "attribute": self.length, "parameter": units}
        found = []
        for cut in product(*(self.cuts if n > 1 else ("whole",) for n in mesh.values())):
            parts = lambda kind, cut=cut: prod(
                n for n, c in zip(mesh.values(), cut, strict=True) if c == kind
            )
            if all(parts(kind) <= limit for kind, limit in limits.items()):
                found.append(Assignment(*block, cut))
        return found

    def work(self, number: int, at: Assignment) -> float:
        """Seconds of an operator and micro-batch, forward and backward, with what its own cut sends."""
        op, mesh, device = self.operators[number], self.mesh(at.first, at.count), self.cluster.device
        axes = {kind: tuple(a for a, c in zip(mesh, at.cut, strict=True) if c == kind) for kind in CUTS}
        parts = prod(mesh[a] for kind in CUTS[1:] for a in axes[kind])
        data, own = axes["sample"] + axes["attribute"], axes["parameter"]
        seconds = device.time(op.flops / parts) + device.time(2 * op.flops / parts)
        seconds += sum(self._sum(size, own, data, mesh) for size in op.summed)
        rest = axes["sample"] + own
        seconds += sum(self._sum(size, axes["attribute"], rest, mesh, half=True) for size in op.gathered)
        return seconds + self._sum(op.weights, data, own, mesh) / (self.shared or self.micros)

    def _sum(self, size, over, cut, mesh, half=False) -> float:
        """Seconds to sum a tensor over axes (`half`: only to gather it), when other axes cut it."""
        over = tuple(a for a in over if mesh[a] > 1)
        start = Layout(((*cut, *over),)) if half else Layout((cut,), tuple((a, "sum") for a in over))
        shape = (max(size // self.itemsize, prod(mesh.values())),)
        return _path_seconds(self, start, Layout((cut,)), shape, mesh) if over else 0.0

    def layout(self, cut: Sequence[str]) -> Layout:
        """The layout of the result (rows, tokens, width) of an operator that is cut so."""
        lies = Layout.whole(3)
        for axis, kind in zip("xy", cut, strict=True):
            if kind in STREAM:
                dim = STREAM[kind]
                lies = lies.cut(dim, (*lies.cuts[dim], axis))
        return lies

    def change(self, before: tuple[str, str], after: tuple[str, str], block: tuple[int, int]) -> float:
        """Seconds from one cut to the next one on the same block: the result there, its gradient back."""
        mesh, shape = self.mesh(*block), (self.rows, self.length, self.width)
        a, b = self.layout(before), self.layout(after)
        if a == b:
            return 0.0
        if not fits(a, shape, mesh) or not fits(b, shape, mesh):
            return inf
        return _path_seconds(self, a, b, shape, mesh) + _path_seconds(self, b, a, shape, mesh)

    def enter(self, number: int, at: Assignment, near: bool) -> float:
        """Seconds until an operator's input has come from another block, and its gradient is back there.

        It goes once over one link, a fast one if `near`; each device gets a part, and gathers what more it needs.
        """
        size = self.operators[number - 1].output
        part = ("sample", "sample")
        gather = self.change(part, at.cut, (at.first, at.count))
        link = self.links["y" if near else "x"]
        return link.time(2 * size, 2) + (gather if gather < inf else 0.0)

    def near(self, a: Assignment, b: Assignment) -> bool:
        """Whether two blocks lie in one node."""
        return len({self.cluster.node(d) for at in (a, b) for d in at.devices}) == 1

    def job(self, number: int, before: Assignment | None, at: Assignment) -> float:
        """Seconds of an operator and micro-batch after the operator before it, which is on `before`."""
        if before is None:
            return self.work(number, at)
        if before.devices == at.devices:
            return self.change(before.cut, at.cut, (at.first, at.count)) + self.work(number, at)
        return self.enter(number, at, self.near(before, at)) + self.work(number, at)

    def held(self, number: int, at: Assignment, behind: int) -> float:
        """Bytes that an operator keeps on each of its devices, with so many changes of block behind it."""
        op, mesh = self.operators[number], self.mesh(at.first, at.count)
        cut = lambda kinds: prod(n for n, c in zip(mesh.values(), at.cut, strict=True) if c in kinds)
        flying = min(self.micros, behind + 1)
        return STATE * op.weights / cut(("parameter",)) + flying * op.kept / cut(CUTS[1:])

    def memory(self, plan: ChainPlan) -> list[float]:
        """Bytes on every device: states, and activations of the micro-batches in flight, as in 1F1B."""
        held, behind = [0.0] * self.cluster.devices, 0
        for number in reversed(range(len(plan))):
            at = plan[number]
            for device in at.devices:
                held[device] += self.held(number, at, behind)
            behind += number > 0 and plan[number - 1].devices != at.devices
        return held

    def evaluate(self, plan: ChainPlan) -> float:
        """Seconds of a step, infinite where a device's memory is exceeded."""
        if self.cluster.device.memory < inf and max(self.memory(plan)) > self.cluster.device.memory:
            return inf
        return Clock(self, plan).seconds


def _kept(call):
    known = cache(call)

    @wraps(call)
    def asked(*args, **kwargs):
        try:
            return known(*args, **kwargs)
        except TypeError:  # a list, which no cache can look for
            return call(*args, **kwargs)

    return asked


@lru_cache(maxsize=100_000)
def _steps(src, dst, shape, mesh_items, element) -> tuple[tuple[str, int, int], ...]:
    """(axis, bytes, messages) of the first device, for each step of the cheapest way."""
    mesh = dict(mesh_items)
    way, first = path(src, dst, shape, mesh), dict.fromkeys(mesh, 0)
    pairs = zip(way.steps, way.layouts, strict=False)
    return tuple((s.axis, *step_cost(s, shape, lies, mesh, first, element)) for s, lies in pairs)


def _path_seconds(problem, src, dst, shape, mesh) -> float:
    steps = _steps(src, dst, shape, tuple(mesh.items()), problem.itemsize)
    return sum(problem.links[axis].time(size, messages) for axis, size, messages in steps)


@checked(number=0, plan=0)
class Clock:
    """When each operator of each micro-batch ends. `timed` counts the jobs that were timed for it.

    `changed` is FlexFlow's delta simulation: only jobs are timed again whose own seconds, or those that they wait for,
    have changed (Jia et al. 2019, section 5.3).
    """

    def __init__(self, problem: ChainProblem, plan: ChainPlan, old: "Clock | None" = None):
        self.problem, self.plan, count = problem, plan, len(plan)
        self.jobs = [problem.job(n, plan[n - 1] if n else None, at) for n, at in enumerate(plan)]
        self.waits = _waits(plan)
        changed = lambda n: self.jobs[n] != old.jobs[n] or self.waits[n] != old.waits[n]
        touched = [old is None or changed(n) for n in range(count)]
        self.ends = [0.0] * (count * problem.micros) if old is None else list(old.ends)
        moved, self.timed = set(), 0
        for number in range(len(self.ends)):
            n = number % count
            needs = [number - back for back in self.waits[n] if number >= back]
            if touched[n] or not moved.isdisjoint(needs):
                end = max((self.ends[i] for i in needs), default=0.0) + self.jobs[n]
                self.timed += 1
                if end != self.ends[number]:
                    self.ends[number] = end
                    moved.add(number)

    @property
    def seconds(self) -> float:
        """When the last job ends."""
        return max(self.ends)

    def changed(self, number: int, at: Assignment) -> "Clock":
        """The clock of the plan in which one operator is assigned anew."""
        return Clock(self.problem, (*self.plan[:number], at, *self.plan[number + 1 :]), self)


def _waits(plan: ChainPlan) -> list[tuple[int, ...]]:
    """For each operator how many jobs back those are that it waits for: its input, and the last on each device."""
    count, found = len(plan), []
    for n, at in enumerate(plan):
        waits = {1} if n else set()
        for device in at.devices:
            on = (back for back in range(1, count + 1) if device in plan[(n - back) % count].devices)
            waits.add(next(on))
        found.append(tuple(sorted(waits)))
    return found
