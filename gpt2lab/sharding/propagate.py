"""A few marks spread over a graph until nothing changes: which values are cut, and along what.

Each mesh axis spreads by itself. In a round every operator looks at its inputs and its result: where one of them is cut
along an index, it proposes to cut the others, as yet unmarked, along the same index. All proposals of a round are made
from the same state and taken together, so the order in which operators are visited cannot matter.

Priorities, in this order: marks of a lower number first, to the end; from operands to a result before the other way;
operators element by element, then reshapes and transpositions, then all others; what earlier operands say. A mark is
never changed.

Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML Computation Graphs", section 3.5.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from ..machine.arguments import checked
from ..machine.words import did_you_mean
from .graph import Graph, Node
from .layout import Layout, Mesh, check, fits
from .operators import POINTWISE, RESHAPES

MOVES = (*RESHAPES, "permute", "piece", "cat")
WHOLE = -1


@checked()
@dataclass(frozen=True)
class Mark:
    """A layout, by names (`heads:y`) or in the papers' form (`RS1RR`), that a value is to have.

    Marks of a lower `priority` spread first. An axis that the mark does not name stays open, unless it is `closed`:
    then no rank has less than the whole along it.
    """

    layout: str
    priority: int = 0
    closed: bool = False


@dataclass(frozen=True)
class Spread:
    """The layout of every value and of every result, and what each round decided."""

    layouts: dict[str, Layout]
    results: dict[str, Layout]
    rounds: list[dict[str, Layout]]


@checked(mesh=1)
def propagate(graph: Graph, marks: Mapping[str, str | Mark], mesh: Mesh) -> Spread:
    """Spread marks, by names of values in which * stands for anything, to a fixed point.

    A result lies as its mark says, or as the input that it belongs to: `grad W` and `new W` as W.
    Raises ValueError for a mark that fits no value, or no layout of its value, or contradicts one of its priority.
    """
    marks = {name: m if isinstance(m, Mark) else Mark(m) for name, m in marks.items()}
    state = {name: {} for name in graph.nodes}  # of each value: axis -> dimension, or WHOLE
    rounds, fixed = [], {}
    for priority in sorted({m.priority for m in marks.values()}):
        own = {name: m for name, m in marks.items() if m.priority == priority}
        fresh = _place_marks(graph, own, mesh, state, fixed)
        rounds.append({name: _layout(graph.nodes[name], state[name], mesh) for name in fresh})
        while fresh := _round(graph, mesh, state):
            rounds.append({name: _layout(graph.nodes[name], state[name], mesh) for name in fresh})
    layouts = {name: _layout(node, state[name], mesh) for name, node in graph.nodes.items()}
    marked = {result for result in graph.outputs for pattern in marks if fnmatch.fnmatch(result, pattern)}
    results = {
        result: layouts[value] if result in marked else layouts.get(owner(result), layouts[value])
        for result, value in graph.outputs.items()
    }
    return Spread(layouts, results, rounds)


@checked()
def owner(result: str) -> str:
    """The input that a result belongs to, by its name: `grad W` and `new W` to W."""
    return result.partition(" ")[2]


def _layout(node: Node, state: dict, mesh: Mesh) -> Layout:
    return Layout(tuple(tuple(a for a in mesh if state.get(a) == d) for d in range(len(node.shape))))


def read_layout(graph: Graph, name: str, text: str, mesh: Mesh) -> Layout:
    """The layout that a mark's text means for a value, checked against its shape."""
    node = graph.nodes[name]
    if ":" in text or not text:
        names = graph.names.get(name)
        if names is None:
            raise ValueError(f"the dimensions of {name!r} have no names. Write its mark as in S0R.")
        layout = Layout.named(text, names)
    else:
        layout = Layout.parse(text, list(mesh))
    try:
        check(layout, node.shape, mesh)
    except ValueError as error:
        raise ValueError(f"mark {text!r} of {name!r}, whose shape is {node.shape}: {error}") from None
    for axis, op in layout.partial:
        raise ValueError(
            f"mark {text!r} of {name!r} asks for terms of a {op} over {axis!r}, which only operators make. "
            f"Use {Layout(layout.cuts).text(list(mesh))}."
        )
    ordered = _layout(node, {axis: layout.on(axis) for axis in mesh}, mesh)
    if layout != ordered:
        raise ValueError(
            f"mark {text!r} of {name!r} cuts a dimension by axes in another order than the mesh has. "
            f"Use {ordered.text(list(mesh))}."
        )
    return layout


def _place_marks(graph: Graph, marks: dict[str, Mark], mesh: Mesh, state, fixed) -> list[str]:
    """Take over the marks of one priority; `fixed` has what marks have said: (value, axis) -> (dimension, priority)."""
    known = {**{name: name for name in graph.nodes}, **graph.outputs, **graph.aliases}
    placed = []
    for pattern, mark in marks.items():
        found = fnmatch.filter(known, pattern)
        if not found:
            hint = did_you_mean(pattern, known, f"Inputs are {', '.join(graph.inputs[:4])} ...", "{!r}")
            raise ValueError(f"a mark names {pattern!r}, but the program has no such value. {hint}")
        for name in dict.fromkeys(known[one] for one in found):
            node, layout = graph.nodes[name], read_layout(graph, name, mark.layout, mesh)
            for axis in mesh:
                dim = WHOLE if layout.on(axis) is None else layout.on(axis)
                if dim == WHOLE and not mark.closed:
                    continue
                if (name, axis) not in fixed:
                    fixed[name, axis], state[name][axis] = (dim, mark.priority), dim
                elif fixed[name, axis][0] != dim and fixed[name, axis][1] == mark.priority:
                    both = " and ".join(
                        "whole" if d == WHOLE else f"cut along {d}" for d in (fixed[name, axis][0], dim)
                    )
                    raise ValueError(
                        f"two marks of {name!r} say that axis {axis!r} leaves it {both}. "
                        "Leave one out, or give it a higher priority number: then the other stands."
                    )
            if not fits(_layout(node, state[name], mesh), node.shape, mesh):
                raise ValueError(
                    f"all marks of {name!r} together make {_layout(node, state[name], mesh).text(list(mesh))}, "
                    f"more parts than its shape {node.shape} has. Use fewer ranks, or leave a mark out."
                )
            placed.append(name)
    return placed


def _round(graph: Graph, mesh: Mesh, state) -> list[str]:
    """Take the best proposal for each value that has any, of the first level at which there is one."""
    proposals: dict[tuple[str, str], tuple] = {}
    for number, node in enumerate(graph.nodes.values()):
        names = (*node.inputs, node.name)
        for axis in mesh:
            if not any(state[name].get(axis, WHOLE) != WHOLE for name in names):
                continue
            for rank, target, dim in _proposals(node, names, axis, state):
                entry = (target != node.name, level(node)), rank, number, dim
                if _room(graph.nodes[target], axis, dim, mesh, state[target]):
                    proposals[target, axis] = min(entry, proposals.get((target, axis), entry))
    for result, value in graph.outputs.items():
        for axis, dim in state.get(owner(result), {}).items():
            if dim != WHOLE and axis not in state[value]:
                proposals[value, axis] = (False, 0), -1, -1, dim
    if not proposals:
        return []
    first = min(entry[0] for entry in proposals.values())
    taken = [(target, axis, entry[-1]) for (target, axis), entry in proposals.items() if entry[0] == first]
    order = list(mesh)
    changed = []
    for target, axis, dim in sorted(taken, key=lambda one: order.index(one[1])):
        if _room(graph.nodes[target], axis, dim, mesh, state[target]):
            state[target][axis] = dim
            changed.append(target)
        else:
            state[target][axis] = WHOLE
    return list(dict.fromkeys(changed)) or _round(graph, mesh, state)


def level(node: Node) -> int:
    """How early an operator may speak: 0 element by element, 1 moves, 2 all others."""
    return 0 if node.op in POINTWISE else 1 if node.op in MOVES else 2


def _proposals(node: Node, names, axis, state):
    """(place of who says it, value, dimension) of what one operator proposes for one axis."""
    at = [state[name].get(axis) for name in names]
    for option in node.options:
        rows = [*zip(names, (*option.inputs, option.output), at, strict=True)]
        says = [n for n, (_, dim, now) in enumerate(rows) if isinstance(dim, int) and now == dim]
        for name, dim, now in rows if says else ():
            if isinstance(dim, int) and now is None:
                yield says[0], name, dim


def _room(node: Node, axis: str, dim: int, mesh: Mesh, state: dict) -> bool:
    """Whether the dimension is long enough for this axis beside those that cut it already."""
    return fits(_layout(node, state | {axis: dim}, mesh), node.shape, mesh)
