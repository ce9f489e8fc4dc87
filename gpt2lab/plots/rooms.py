"""The rooms of the package and who imports whom, read from the source files themselves."""

import ast
from pathlib import Path

from matplotlib.figure import Figure

from .style import figure, rank_color

LEVELS = (
    ("corpus", "model", "ranks", "schedules", "planner"),
    ("generate", "spec", "plots"),
    ("parallel",),
    ("plan",),
    ("train", "verify"),
    ("commands", "lessons"),
)


def uses(package: Path) -> dict[str, set[str]]:
    """Room -> the rooms that its files import, also inside functions."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found.setdefault(parts[0], set()).update(_rooms(node, parts))
    return {room: others - {room} for room, others in found.items()}


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


def rooms(package=None) -> Figure:
    """The package as storeys: every room stands on those that it imports, and nothing imports upwards."""
    package = Path(package) if package else Path(__file__).parents[1]
    known = uses(package)
    fig, ax = figure(8, 4.2)
    ax.set_axis_off()
    place = {}
    for y, names in enumerate(LEVELS):
        for i, name in enumerate(names):
            place[name] = ((i + 0.5) / len(names) * 10, y)
    for room, others in known.items():
        for other in sorted(others & set(place)):
            if room in place and place[room][1] > place[other][1]:
                ax.plot(
                    *zip(place[room], place[other], strict=True),
                    color=rank_color(place[room][1]),
                    lw=1,
                    alpha=0.6,
                )
    for name, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.45", "fc": "white", "ec": rank_color(y), "lw": 2}
        ax.text(x, y, name, ha="center", va="center", bbox=box)
    ax.set(xlim=(0, 10), ylim=(-0.5, len(LEVELS) - 0.5))
    return fig
