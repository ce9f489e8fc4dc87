"""A lesson's source, `notebooks/src/NN_name.py`, and the two notebooks that are built from it.

Markers: `### BEGIN SOLUTION` and `### END SOLUTION` inside a cell enclose what students write (nbgrader's
markers). Tags of a cell: `setup` (helpers that exercises need, and imports, which are folded in a cell of their own),
`exercise`, `wrong` (a wrong answer: never part of a notebook, used by CI), `measured` (outputs differ from run to
run), `hint` (text after an exercise, folded, for students only), `slide` (its code is shown on the projector),
`ranks 4` (runs on live ranks: in notebooks its first line is `%%ranks 4`).
"""

import ast
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .environment import YOUR_TURN

BLANK = f'raise NotImplementedError("{YOUR_TURN}")'
SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION[ \t]*$", re.S | re.M)
ON_RANKS = re.compile(r"ranks \d+")
MARKER = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION[ \t]*\n?", re.M)
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FORM = "1"  # raise it when notebooks must be rebuilt because this package changed


@dataclass(frozen=True)
class Cell:
    """A cell: `kind` is "code" or "markdown"; `id` follows from the text, so edits move no other id."""

    id: str
    kind: str
    text: str
    tags: tuple[str, ...]

    def solved(self) -> str:
        """The text with the solution, without markers."""
        return MARKER.sub("", self.text).rstrip()

    def on_ranks(self) -> str:
        """The first line of a cell that runs on live ranks; of others nothing."""
        return "".join(f"%%{tag}\n" for tag in self.tags if ON_RANKS.fullmatch(tag))

    def blank(self) -> str:
        """The text that students see: a line that raises NotImplementedError in place of each solution."""
        text = SOLUTION.sub(lambda match: match[1] + BLANK, self.text)
        return f"<details><summary>Hint</summary>\n\n{text}\n\n</details>" if "hint" in self.tags else text


def prose(cells) -> str:
    """The text of the markdown cells among these."""
    return "\n\n".join(cell.text for cell in cells if cell.kind == "markdown")


@dataclass(frozen=True)
class Lesson:
    """A lesson read from its percent source."""

    path: Path
    cells: tuple[Cell, ...]
    digest: str

    @property
    def name(self) -> str:
        """The stem, such as 00_start_here."""
        return self.path.stem

    def notebook(self, student: bool):
        """The notebook without outputs; `student` leaves the exercises blank."""
        import nbformat  # a second or two, which a process that only reads a student's notebook does not need

        cells = []
        for cell in self.cells:
            if "wrong" in cell.tags or ("hint" in cell.tags and not student):
                continue
            make = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
            text = cell.on_ranks() + (cell.blank() if student else cell.solved())
            cells.append(make(text, id=cell.id, metadata=_metadata(cell)))
        mark = {"source": f"src/{self.path.name}", "sha256": self.digest}
        return nbformat.v4.new_notebook(cells=cells, metadata={**METADATA, "gpt2lab": mark})


def _metadata(cell: Cell) -> dict:
    """The cell's tags, with nbval's own name for outputs that may differ; a cell that only imports is folded."""
    tags = [*cell.tags, *["nbval-ignore-output"] * ("measured" in cell.tags)]
    found = {"tags": tags} if tags else {}
    if "setup" in cell.tags and only_imports(cell.text):
        found["jupyter"] = {"source_hidden": True}
    return found


def only_imports(text: str) -> bool:
    """Whether a cell imports and does nothing else."""
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(text).body)


def read_lesson(path) -> Lesson:
    """Read a lesson from its percent source.

    Raises ValueError when a tag is unknown, a marker has no partner, or a solution is outside an exercise.
    """
    return _read(Path(path), Path(path).read_text())


@cache
def _read(path: Path, text: str) -> Lesson:
    import jupytext

    cells, seen = [], {}
    for raw in jupytext.reads(text, fmt="py:percent").cells:
        tags = tuple(raw.metadata.get("tags", ()))
        key = hashlib.sha256(f"{raw.cell_type}\n{raw.source}".encode()).hexdigest()[:10]
        seen[key] = seen.get(key, 0) + 1
        cell = Cell(key if seen[key] == 1 else f"{key}-{seen[key]}", raw.cell_type, raw.source, tags)
        _validate(path, cell)
        cells.append(cell)
    shown = [(c.kind, c.text, c.tags) for c in cells if "wrong" not in c.tags]
    digest = hashlib.sha256(f"{FORM}\n{shown}".encode()).hexdigest()
    return Lesson(path, tuple(cells), digest)


def _validate(path: Path, cell: Cell) -> None:
    known = {"setup", "exercise", "wrong", "measured", "hint", "slide"}
    first = cell.text.strip().split("\n")[0]
    if unknown := {tag for tag in cell.tags if not ON_RANKS.fullmatch(tag)} - known:
        raise ValueError(
            f"{path.name}: unknown tag {unknown.pop()!r} at {first!r}. Known: {', '.join(sorted(known))}."
        )
    if ("### BEGIN" in cell.text or "### END" in cell.text) and "### " in SOLUTION.sub("", cell.text):
        raise ValueError(f"{path.name}: a solution marker without its partner at {first!r}.")
    if SOLUTION.search(cell.text) and "exercise" not in cell.tags:
        raise ValueError(f'{path.name}: a solution outside a cell tagged "exercise" at {first!r}.')
    if "hint" in cell.tags and cell.kind != "markdown":
        raise ValueError(f"{path.name}: the hint at {first!r} must be text: # %% [markdown].")
    if "exercise" in cell.tags and not (SOLUTION.search(cell.text) and "check(" in cell.text):
        raise ValueError(f"{path.name}: the exercise at {first!r} needs solution markers and a check(...).")
