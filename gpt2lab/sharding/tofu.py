"""Tofu: ranks are halved again and again, and each time a dynamic program cuts every link of a chain once.

GPT-2's graph becomes a chain at its borders, the values through which everything passes from the tokens to the loss.
Between two of them lies a *link*, forward and backward: the embedding, an attention, an MLP, the head with its loss. A
link is cut along one dimension, given by its name: so are all its inputs that have it, and the borders if they have
it. What that sends inside is counted in the partitioned link; at a border the activation and its gradient change their
layouts; the tied embedding does so between first and last link. A halving is one more mesh axis of two ranks.

Wang, Huang & Li 2019, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning", section 5.
"""

import itertools
import math
from dataclasses import replace

from ..machine.arguments import checked
from ..machine.patience import patiently
from .cost import path
from .describe import Option
from .graph import Graph, Node
from .layout import Layout, Mesh, fits, places
from .partition import Program, partition
from .propagate import Mark, propagate

STREAM = ("batch", "seq", "embd")
"""The dimensions of what goes from link to link."""
WHOLE = ("qkv", "positions")
"""Dimensions that are not cut: of three, and of which most is not used."""
Choice = tuple[str, ...]
"""Of one link: the dimension that each mesh axis cuts."""


@checked(link=0, first=lambda c: c.count, last=lambda c: c.count, mesh=1)
class LinkChain:
    """GPT-2's gradients as a chain of links, and what cutting them costs."""

    def __init__(self, graph: Graph):
        if not graph.aliases or "norm" in graph.outputs:
            raise ValueError(
                f"a graph with {len(graph.aliases)} borders and the results {', '.join(list(graph.outputs)[:3])} ... "
                "is no chain of links. Use captured_gpt2(config, rows, length) without a recipe."
            )
        if short := [n for n, dims in graph.names.items() if len(dims) != len(graph.nodes[n].shape)]:
            raise ValueError(
                f"{short[0]} has a dimension of length 1, which no axis cuts. Use at least 2 rows, tokens and heads."
            )
        self.graph, self.number = _with_crossings(graph)
        self.count = 1 + max(self.number.values())
        self.links = [self.between_links(n, n + 1) for n in range(self.count)]
        self.known = {}

    def between_links(self, first: int, last: int) -> Graph:
        """The operators of the links first .. last - 1 as a graph of its own."""
        return _links(self.graph, self.number, range(first, last))

    def marks(self, link: int, choice: Choice, mesh: Mesh) -> dict[str, Mark]:
        """The marks of a link's inputs and borders.

        Raises ValueError where a tensor is too short for them.
        """
        marks = _marks(self.links[link], choice, mesh)
        if marks is None:
            raise ValueError(
                f"link {link} cannot be cut along {' and '.join(filter(None, choice))} on {dict(mesh)}: a tensor is "
                "too short. Use fewer ranks for it, or cut it along another dimension."
            )
        return marks

    def choices(self, link: int, before: Choice, mesh: Mesh) -> list[Choice]:
        """What one link can be cut along by the last axis of the mesh, when earlier axes cut it as `before`."""
        of_inputs = self.links[link].names.values()
        dims = sorted({d for dims in of_inputs for d in dims} - set(WHOLE))
        return [c for d in dims if math.isfinite(self.inside(link, c := (*before, d), mesh))]

    def inside(self, link: int, choice: Choice, mesh: Mesh) -> float:
        """Bytes that all ranks send in one link, forward and backward; infinite where a tensor is too short."""
        graph = self.links[link]
        key = tuple((n.op, n.shape) for n in graph.nodes.values()), tuple(choice), tuple(mesh.items())
        if key not in self.known:
            marks = _marks(graph, choice, mesh)
            program = marks and partition(graph, propagate(graph, marks, mesh), mesh)
            self.known[key] = bytes_of_all(program) if marks else math.inf
        return self.known[key]

    def between(self, a: Choice, b: Choice, mesh: Mesh) -> int:
        """Bytes for the activation from a link to the next one, and for its gradient back."""
        border = self.graph.nodes[self.graph.aliases["border 0"]]
        return _there_and_back(border, STREAM, a, b, mesh)

    def tied(self, first: Choice, last: Choice, mesh: Mesh) -> int:
        """The same for weights that first and last link read. Where both are cut alike, their gradients' partial
        sums are added before they travel, once instead of twice."""
        cost = 0
        for name in set(self.links[0].names) & set(self.links[-1].names):
            node, dims = self.graph.nodes[name], self.graph.names[name]
            cost += _there_and_back(node, dims, first, last, mesh)
            if first == last:
                lies = terms = _layout(dims, first, mesh)
                for axis in set(mesh) - set(lies.axes):
                    terms = terms.summed(axis, "sum")
                cost -= path(terms, lies, node.shape, mesh).total(mesh, node.element)[0]
        return cost

    def cost(self, choices: list[Choice], mesh: Mesh) -> float:
        """Bytes that all ranks send for the whole chain, each link priced alone; the program may send less, or more.

        A border is priced as if the link before it first completed its sums; `partition` may go from a sum directly
        to the layout behind the border. Where all links are cut alike it is exact: compare `bytes_of_all(program)`.
        """
        inside = sum(self.inside(n, choice, mesh) for n, choice in enumerate(choices))
        borders = sum(self.between(a, b, mesh) for a, b in itertools.pairwise(choices))
        return inside + borders + self.tied(choices[0], choices[-1], mesh)

    def halve(self, before: list[Choice], mesh: Mesh) -> list[Choice]:
        """The cheapest choices for one more axis, by dynamic programming along the chain from each first choice.

        Raises ValueError where a link has no dimension that is long enough.
        """
        rows, ways = [self.choices(n, before[n], mesh) for n in patiently(range(self.count), "links")], []
        if [] in rows:
            raise ValueError(
                f"link {rows.index([])} cannot be cut once more for {dict(mesh)}: each of its dimensions is too short. "
                "Use fewer ranks."
            )
        for first in rows[0]:
            best = {first: (0.0, [first])}
            for n, row in enumerate(rows[1:], 1):
                best = {
                    c: min(
                        (cost + self.between(a, c, mesh) + self.inside(n, c, mesh), [*way, c])
                        for a, (cost, way) in best.items()
                    )
                    for c in row
                }
            ways += [way for _, way in best.values()]
        return min(ways, key=lambda way: (self.cost(way, mesh), way))

    def recursive(self, axes: str) -> list[list[Choice]]:
        """The choices after each halving, one for each letter: an axis of two ranks."""
        found = [[()] * self.count]
        for n in range(len(axes)):
            found.append(self.halve(found[-1], dict.fromkeys(axes[: n + 1], 2)))
        return found[1:]

    def program(self, choices: list[Choice], mesh: Mesh) -> Program:
        """The whole graph, cut as chosen. A weight that two links read lies as the first wants it."""
        marks = {}
        for link, choice in reversed(list(zip(self.links, choices, strict=True))):
            marks |= _marks(link, choice, mesh)
        return partition(self.graph, propagate(self.graph, marks, mesh), mesh)


@checked()
def bytes_of_all(program: Program) -> int:
    """Bytes that all ranks send."""
    return sum(program.cost(place)[0] for place in places(program.mesh))


def _with_crossings(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """The graph in which each border has two values, one on either side; and the link of each operator.

    An operator that reads only inputs belongs to whoever reads it.
    """
    made = {value: int(name.split()[-1]) for name, value in graph.aliases.items()}
    back = {value for name, value in graph.aliases.items() if name.startswith("grad")}
    nodes, number = {}, {}
    for node in graph.nodes.values():
        inputs = tuple(beyond(v) if v in made else v for v in node.inputs)
        nodes[node.name] = replace(node, inputs=inputs)
        if found := [number[v] for v in inputs if v in number]:
            number[node.name] = min(found)
        if node.name in made:
            n = made[node.name]
            number[node.name] = n + (node.name in back)
            number[beyond(node.name)] = n + (node.name not in back)
            cuts = [Option(f"i{d}", (d,), d) for d in range(len(node.shape))]
            options = (*cuts, Option("partial", ("sum",), "sum"), Option("", (None,), None))
            nodes[beyond(node.name)] = Node(
                beyond(node.name), "view", (node.name,), node.shape, node.groups, options, node.element
            )
    stream = {side: STREAM for value in made for side in (value, beyond(value))}
    return replace(graph, nodes=nodes, names=graph.names | stream), number


def beyond(value: str) -> str:
    """The name of a border's value on the other side."""
    return f"{value} beyond"


def _links(graph: Graph, number: dict[str, int], links: range) -> Graph:
    came = {beyond(value) for value, of in number.items() if of not in links}
    own = [name for name, of in number.items() if of in links and name not in came]
    todo, members = own[:], set(own)
    while todo:
        for value in graph.nodes[todo.pop()].inputs:
            if value not in number and graph.nodes[value].op != "input" and value not in members:
                members.add(value)
                todo.append(value)
    read = {v for name in members for v in graph.nodes[name].inputs} - members
    as_input = lambda node: replace(node, op="input", inputs=(), options=(), call=None)
    nodes = {
        name: as_input(node) if name in read else node
        for name, node in graph.nodes.items()
        if name in members | read
    }
    outside = {v for name, node in graph.nodes.items() if name not in members for v in node.inputs}
    outputs = {f"out {name}": name for name in members & outside if name in number}
    outputs |= {result: value for result, value in graph.outputs.items() if value in members}
    return Graph(nodes, outputs, {name: dims for name, dims in graph.names.items() if name in nodes})


def _layout(dims: tuple[str, ...], choice: Choice, mesh: Mesh) -> Layout:
    return Layout(tuple(tuple(a for a, d in zip(mesh, choice, strict=True) if d == dim) for dim in dims))


def _marks(graph: Graph, choice: Choice, mesh: Mesh) -> dict[str, Mark] | None:
    """The marks of a link's inputs and borders; None where a tensor is too short for them."""
    layouts = {name: _layout(dims, choice, mesh) for name, dims in graph.names.items()}
    if not all(fits(layout, graph.nodes[name].shape, mesh) for name, layout in layouts.items()):
        return None
    return {name: Mark(layout.text(list(mesh)), closed=True) for name, layout in layouts.items()}


def _there_and_back(node: Node, dims, a: Choice, b: Choice, mesh: Mesh) -> int:
    there, back = (_layout(dims, c, mesh) for c in (a, b))
    ways = path(there, back, node.shape, mesh), path(back, there, node.shape, mesh)
    return sum(way.total(mesh, node.element)[0] for way in ways)
