"""What proves both notebooks of a lesson in one kernel: the solution, strictly, and then what students run otherwise.

The student's notebook differs from the solution in its exercise cells, which are blank. So after the solution's last
cell come the blank exercises and, in their order, all cells that read a name which those cells set, or which such a
cell sets again, and so on: every other cell would compute what it has computed before. What an exercise changes
without setting a name is not seen here; `make test-all` runs the students' notebooks from their first cell to the last.

`python tests/run_all.py FOLDER [NUMBER...]` writes one notebook for each lesson (of these numbers) into the folder.
"""

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import no_address_parser  # noqa: F401

from gpt2lab.classroom.statements import as_python

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LENIENT = 'import os\n\nos.environ["GPT2LAB_STRICT"] = "0"'
UNCHECKED = {"tags": ["nbval-ignore-output"]}


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Names:
    """The names that a cell sets, that it reads from cells before it, and that its functions read when called."""

    sets: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)


def names(source: str) -> Names:
    """What a cell has to do with the others: statement by statement, as it runs."""
    found = Names()
    for statement in ast.parse(as_python(source)).body:
        before = set(found.sets)
        loops = [node for node in ast.walk(statement) if isinstance(node, (ast.For, ast.comprehension))]
        own = {name for loop in loops for name in stored(loop.target)}
        own -= {name for loop in loops for name in loaded(loop.iter)}
        _note(statement, found, before | own)
    return found


def _note(node: ast.AST, found: Names, known: set[str]) -> None:
    if isinstance(node, SCOPES):
        found.later |= loaded(node) - stored(node) - {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        found.sets |= {node.name} - {""} if hasattr(node, "name") else set()
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        found.sets |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            found.sets.add(node.id)
        elif node.id not in known:
            found.reads.add(node.id)
    inner = Names() if isinstance(node, COMPREHENSIONS) else found
    for child in ast.iter_child_nodes(node):
        _note(child, inner, known)
    if inner is not found:
        found.reads |= inner.reads
        found.later |= inner.later


def stored(node: ast.AST) -> set[str]:
    """All names that are set in a piece of code."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def loaded(node: ast.AST) -> set[str]:
    """All names that are read in a piece of code."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def otherwise(cells) -> list:
    """The code cells of a student's notebook that need not compute what they compute in the solution."""
    code = [(cell, names(cell.source)) for cell in cells if cell.cell_type == "code"]
    ever: set[str] = set()  # names that some chosen cell sets: what a function finds when it is called
    while True:
        chosen, changed = [], set()
        for cell, of in code:
            exercise = "exercise" in cell.metadata.get("tags", ())
            if exercise or of.reads & changed or of.later & ever:
                chosen.append(cell)
                changed |= of.sets
            else:
                changed -= of.sets  # set again, as in the solution
        found = ever.union(*(of.sets for cell, of in code if cell in chosen))
        if found == ever:
            return chosen
        ever = found


def combined(solution, student):
    """One notebook: the solution with its outputs, then what students run otherwise, with any output."""
    new = nbformat.v4.new_code_cell
    again = [new(LENIENT, metadata=UNCHECKED)]
    again += [new(cell.source, metadata=UNCHECKED) for cell in otherwise(student.cells)]
    return nbformat.v4.new_notebook(cells=[*solution.cells, *again], metadata=solution.metadata)


def main(folder: Path, numbers=()) -> None:
    """Write the notebooks of these lessons, or of all."""
    for path in sorted(path for path in NOTEBOOKS.glob("*.ipynb") if not numbers or path.name[:2] in numbers):
        solution = nbformat.read(NOTEBOOKS / "solutions" / path.name, 4)
        nbformat.write(combined(solution, nbformat.read(path, 4)), folder / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
