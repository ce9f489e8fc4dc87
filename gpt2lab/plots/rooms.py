"""The rooms of the package and who imports whom, read from the source files and drawn in layers.

A line that would only repeat a longer way (a imports b, b imports c, so a stands on c) is left out; a line that
passes a layer gets a place of its own there, so that no line crosses a box (Sugiyama, Tagawa & Toda 1981).
"""

import ast
from pathlib import Path

import networkx as nx
from matplotlib import colormaps
from matplotlib.figure import Figure

from .style import figure

ROOM_OF = {"cli": "commands", "launch": "processes", "Ranks": "processes"}  # names that live in another room
SWEEPS = 12


def uses(package: Path) -> dict[str, set[str]]:
    """Room -> the rooms that its files import, also inside functions."""
    found: dict[str, set[str]] = {}
    init = package / "__init__.py"
    own = {getattr(node, "name", "") for node in ast.parse(init.read_text()).body} if init.exists() else ()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0].startswith("__"):
            continue
        room = ROOM_OF.get(parts[0], parts[0])
        found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found[room] |= {ROOM_OF.get(name, name) for name in _rooms(node, parts)} - {room, *own}
    return found


def _rooms(node: ast.ImportFrom, parts: tuple[str, ...]) -> set[str]:
    """The rooms that one import names, for a file at `parts` of the package."""
    module = node.module.split(".") if node.module else []
    if node.level == 0:
        home = module[1:] if module[:1] == ["gpt2lab"] else None
    else:
        home = [*parts[: len(parts) - node.level], *module]
    if home is None:
        return set()
    return {home[0]} if home else {alias.name for alias in node.names}


def layers(known: dict[str, set[str]]) -> dict[str, int]:
    """The layer of every room: 0 where it imports no other room, else one above the highest that it imports.

    Raises ValueError where rooms import each other in a circle.
    """
    graph = nx.DiGraph(known)
    try:
        rows = list(nx.topological_generations(graph.reverse()))
    except nx.NetworkXUnfeasible:
        circle = nx.find_cycle(graph)
        way = " -> ".join([circle[0][0], *(below for _, below in circle)])
        raise ValueError(f"{way} is a circle of imports.") from None
    return {room: height for height, row in enumerate(rows) for room in row}


def direct(known: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The pairs (room, below) that no longer way joins too."""
    return set(nx.transitive_reduction(nx.DiGraph(known)).edges)


def _placed(heights: dict[str, int], edges) -> tuple[list[list], list[list]]:
    """The nodes of every layer in order, and every edge as a chain of nodes; (edge, layer) are places of lines."""
    rows: list[list] = [[] for _ in range(max(heights.values(), default=-1) + 1)]
    for room, y in sorted(heights.items()):
        rows[y].append(room)
    chains = []
    for edge in sorted(edges):
        passed = [(edge, y) for y in range(heights[edge[0]] - 1, heights[edge[1]], -1)]
        for place in passed:
            rows[place[1]].append(place)
        chains.append([edge[0], *passed, edge[1]])
    near: dict = {}
    for chain in chains:
        for a, b in zip(chain, chain[1:], strict=False):
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
    for _ in range(SWEEPS):  # every node moves to the mean of its neighbours
        x = {node: (i + 0.5) / len(row) for row in rows for i, node in enumerate(row)}
        for row in rows:
            row.sort(key=lambda node: sum(x[n] for n in near.get(node, [node])) / len(near.get(node, [node])))
            x |= {node: (i + 0.5) / len(row) for i, node in enumerate(row)}
    return rows, chains


def rooms(package=None) -> Figure:
    """The package as layers: every room stands on those that it imports, and nothing imports upwards."""
    known = uses(Path(package) if package else Path(__file__).parents[1])
    heights = layers(known)
    rows, chains = _placed(heights, direct(known))
    fig, ax = figure(8, 0.8 + 0.62 * len(rows))
    ax.set_axis_off()
    weight = lambda node: 1.0 if isinstance(node, str) else 0.45  # a passing line is narrower than a box
    spot = {}
    for y, row in enumerate(rows):
        total, before = sum(map(weight, row)), 0.0
        for node in row:
            spot[node] = (10 * (before + weight(node) / 2) / total, y)
            before += weight(node)
    shade = lambda y: colormaps["viridis"](0.85 * y / max(len(rows) - 1, 1))  # no rank's colour
    for chain in chains:
        x, y = zip(*(spot[node] for node in chain), strict=True)
        ax.plot(x, y, color=shade(heights[chain[0]]), lw=1.1, alpha=0.75, zorder=1)
    for room, y in sorted(heights.items()):
        box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": shade(y), "lw": 1.8}
        ax.text(*spot[room], room, ha="center", va="center", size=8.5, bbox=box, zorder=2)
    ax.set(xlim=(0, 10), ylim=(-0.4, len(rows) - 0.6))
    return fig
