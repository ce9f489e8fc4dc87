"""The program that every rank runs: one option for each operator, and changes of layout between them.

An operator is cut along an index along which propagation has cut one of its operands or its result. Where several
are possible, the one with the fewest bytes wins: those that bring the operands there, and those that bring the result
where it should lie. A change that was made once is kept for later readers.

A partial sum is completed at once, except where its one reader is linear in it and completing that one's result costs
no more: there the sum is made later, of several terms together.
"""

import itertools
from dataclasses import dataclass

from ..machine.arguments import checked
from .cost import FREE, Path, added, path
from .describe import Option
from .graph import Graph, Node
from .halo import Halo
from .layout import Layout, Mesh, Place, fits
from .propagate import Spread


@dataclass(frozen=True)
class Change:
    """A value, of `element` bytes an element, goes from one layout to another."""

    value: str
    way: Path
    element: int

    @property
    def ends(self) -> tuple[Layout, Layout]:
        """The layout before and the layout after."""
        return self.way.layouts[0], self.way.layouts[-1]

    def calls(self) -> list[tuple[str, str, str]]:
        """(collective, axis, value) of each step."""
        return [(step.kind, step.axis, self.value) for step in self.way.steps]

    def cost(self, mesh: Mesh, place: Place) -> tuple[int, int]:
        """(bytes, messages) that the rank at `place` sends."""
        return self.way.cost(mesh, place, self.element)


@dataclass(frozen=True)
class Run:
    """A node runs on parts of its inputs in these layouts, and its result lies in `output`.

    With a `halo`, rows of its input (forward) or of its result (backward) go between neighbours.
    """

    node: Node
    inputs: tuple[Layout, ...]
    output: Layout
    halo: Halo | None = None

    def calls(self) -> list[tuple[str, str, str]]:
        """The halo, if there is one, as a collective."""
        return [("halo", self.halo.axis, self.node.name)] if self.halo else []

    def cost(self, mesh: Mesh, place: Place) -> tuple[int, int]:
        """(bytes, messages) that the rank at `place` sends for the halo."""
        return self.halo.cost(mesh, place) if self.halo else (0, 0)


@checked(place=0)
@dataclass(frozen=True)
class Program:
    """The same for all ranks: what to do one after the other, and the layouts of inputs and results."""

    graph: Graph
    mesh: dict[str, int]
    steps: tuple[Change | Run, ...]
    layouts: dict[str, Layout]
    results: dict[str, Layout]

    def changes(self) -> list[tuple[str, str, str]]:
        """(collective, axis, value) of everything that is sent, in order."""
        return [sent for step in self.steps for sent in step.calls() if sent[0] not in FREE]

    def cost(self, place: Place) -> tuple[int, int]:
        """(bytes, messages) that the rank at `place` sends."""
        return added(step.cost(self.mesh, place) for step in self.steps)


@checked(mesh=1)
def partition(graph: Graph, spread: Spread, mesh: Mesh) -> Program:
    """The program for the layouts that `propagate` found."""
    return _Partitioner(graph, spread.layouts, dict(mesh)).program(spread.results)


class _Partitioner:
    def __init__(self, graph: Graph, wishes: dict[str, Layout], mesh: dict[str, int]):
        self.graph, self.wishes, self.mesh = graph, wishes, mesh
        self.readers = graph.readers()
        self.have: dict[str, list[Layout]] = {}
        self.steps: list[Change | Run] = []
        self.terms = {axis: self._find_terms(axis) for axis in mesh}

    def program(self, results: dict[str, Layout]) -> Program:
        for node in self.graph.nodes.values():
            if node.op == "input":
                self.have[node.name] = [self.wishes[node.name]]
            else:
                self._run(node)
        for result, value in self.graph.outputs.items():
            self._bring(value, results[result])
        layouts = {name: self.wishes[name] for name in self.graph.inputs}
        return Program(self.graph, self.mesh, tuple(self.steps), layouts, results)

    def _way(self, value: str, target: Layout) -> Path:
        """The cheapest change from a layout in which the value is there."""
        ways = [path(one, target, self.graph.nodes[value].shape, self.mesh) for one in self.have[value]]
        return min(ways, key=lambda way: way.total(self.mesh))

    def _bring(self, value: str, target: Layout) -> None:
        if target not in self.have[value]:
            self.steps.append(Change(value, self._way(value, target), self.graph.nodes[value].element))
            self.have[value].append(target)

    def _run(self, node: Node) -> None:
        """Choose the options of one node, bring its inputs there, and its result where it should lie."""
        choices = [self._candidates(node, axis) for axis in self.mesh]
        plans = self._plans(node, choices)
        if not plans:  # the cuts of two axes meet in a dimension that is too short for both
            whole = [o for o in node.options if o.index == ""]
            plans = self._plans(node, [[*some, *whole] for some in choices])
        _, _, run = min(plans, key=lambda plan: plan[:2])
        for value, need in zip(node.inputs, run.inputs, strict=True):
            self._bring(value, need)
        self.steps.append(run)
        self.have[node.name], target = [run.output], self._target(node, run.output)
        self._bring(node.name, target)
        self.have[node.name] = [target]

    def _plans(self, node: Node, choices) -> list[tuple[int, int, Run]]:
        """(bytes, number, run) of every combination of options, one an axis, that fits the shapes."""
        plans = []
        for number, options in enumerate(itertools.product(*choices)):
            needs, natural = self._layouts(node, options)
            shapes = [self.graph.nodes[i].shape for i in node.inputs]
            halos = [(axis, o) for axis, o in zip(self.mesh, options, strict=True) if o.halos]
            if len(halos) <= 1 and all(
                fits(n, s, self.mesh) for n, s in zip((*needs, natural), (*shapes, node.shape), strict=True)
            ):
                read = self.graph.nodes[node.inputs[0]] if halos else None
                halo = Halo.of(*halos[0], node, read, needs[0], natural) if halos else None
                plans.append((self._bytes(node, needs, natural), number, Run(node, needs, natural, halo)))
        return plans

    def _bytes(self, node: Node, needs, natural: Layout) -> int:
        """What all ranks send if inputs are brought there, and the result where it was wished, without waiting."""
        ways = [(self._way(v, need), self.graph.nodes[v]) for v, need in zip(node.inputs, needs, strict=True)]
        ways.append((path(natural, self.wishes[node.name], node.shape, self.mesh), node))
        return sum(way.total(self.mesh, of.element)[0] for way, of in ways)

    def _candidates(self, node: Node, axis: str) -> list[Option]:
        """Cuts along which an operand or the result is cut already; partial sums as they come; or nothing."""
        now = [self.have[value][0].on(axis) for value in node.inputs]
        wish = self.wishes[node.name].on(axis)
        agrees = lambda place, at: isinstance(place, int) and place == at
        waits = lambda o: o.index == "partial" and ("sum", "sum") in zip(o.inputs, now, strict=True)
        cuts = [o for o in node.options if agrees(o.output, wish) or any(map(agrees, o.inputs, now))]
        return [*filter(waits, node.options), *(cuts or [o for o in node.options if o.index == ""])]

    def _layouts(self, node: Node, options) -> tuple[tuple[Layout, ...], Layout]:
        """The layouts of inputs and result under one option for each axis."""
        ranks = [len(self.graph.nodes[i].shape) for i in node.inputs]
        needs = [_joined(rank, self.mesh, [o.inputs[n] for o in options]) for n, rank in enumerate(ranks)]
        return tuple(needs), _joined(len(node.shape), self.mesh, [o.output for o in options])

    def _target(self, node: Node, natural: Layout) -> Layout:
        """Where a result should lie: as it was wished; or still partial, where that is better."""
        target = self.wishes[node.name]
        for axis, op in natural.partial:
            if op == "sum" and self._may_wait(node, axis):
                cuts = tuple(tuple(a for a in cut if a != axis) for cut in target.cuts)
                target = Layout(cuts, target.partial).summed(axis, "sum")
        return target

    def _may_wait(self, node: Node, axis: str) -> bool:
        readers = self.readers[node.name]
        if len(readers) != 1 or readers[0] == "output":
            return False
        reader = self.graph.nodes[readers[0]]
        mine = reader.inputs.index(node.name)
        return self._price(reader, axis) <= self._price(node, axis) and any(
            option.index == "partial" and option.inputs[mine] == "sum" and self._can_sum(reader, option, axis)
            for option in reader.options
        )

    def _price(self, node: Node, axis: str) -> int:
        """Bytes to complete a sum over one axis and leave the result as it was wished."""
        whole, wish = Layout.whole(len(node.shape)), self.wishes[node.name].on(axis)
        done = whole if wish is None else whole.cut(wish, (axis,))
        mesh = {axis: self.mesh[axis]}
        return path(whole.summed(axis, "sum"), done, node.shape, mesh).total(mesh, node.element)[0]

    def _can_sum(self, node: Node, option: Option, axis: str) -> bool:
        """Whether all inputs that the option wants as terms of a sum are terms already, or whole."""
        return all(
            at != "sum" or value in self.terms[axis] or self.wishes[value].on(axis) is None
            for value, at in zip(node.inputs, option.inputs, strict=True)
        )

    def _find_terms(self, axis: str) -> set[str]:
        """The values that come into being as terms of a sum over an axis."""
        self.terms = {axis: (found := set())}
        for node in self.graph.nodes.values():
            cut = lambda o, node=node: any(
                isinstance(at, int) and at == self.wishes[v].on(axis) and v not in found
                for v, at in zip(node.inputs, o.inputs, strict=True)
            )
            joins = lambda o, node=node: (
                self._can_sum(node, o, axis)
                and any(at == "sum" and v in found for v, at in zip(node.inputs, o.inputs, strict=True))
            )
            options = [o for o in node.options if (joins(o) if o.index == "partial" else cut(o))]
            if options and all(o.output == "sum" for o in options):
                found.add(node.name)
        return found


def _joined(rank: int, mesh: Mesh, placements) -> Layout:
    layout = Layout.whole(rank)
    for axis, at in zip(mesh, placements, strict=True):
        if isinstance(at, int):
            layout = layout.cut(at, (*layout.cuts[at], axis))
        elif at:
            layout = layout.summed(axis, at)
    return layout
