"""Build the notebooks: `python -m gpt2lab.lessons.build [NN ...] [--check] [--fresh]`.

Every source under notebooks/src becomes a student notebook and a solution, both executed with static
pictures. A second build gives the same bytes: no times, no widget state, no addresses. Cells tagged
`measured` keep the outputs of the last build as long as their text is the same, unless --fresh asks to
measure again. Where only words have changed, and no lesson is named, no cell runs.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import nbformat

from .source import Lesson, read_lesson

PRIVATE = re.compile(r"0x[0-9a-f]{6,}|/(?:home|root|tmp|work|Users|usr)/\w+")


def targets(lesson: Lesson) -> dict[Path, bool]:
    """The two notebooks of a lesson: path -> whether it is the student's."""
    folder = lesson.path.parent.parent
    name = f"{lesson.name}.ipynb"
    return {folder / name: True, folder / "solutions" / name: False}


def outdated(lesson: Lesson) -> list[str]:
    """Which notebooks of a lesson do not hold what its source says, or never ran; empty when none."""
    stale = []
    for path, student in targets(lesson).items():
        if not path.exists():
            stale.append(f"{path.name} is missing")
        elif _frozen(nbformat.read(path, 4)) != _frozen(lesson.notebook(student)):
            stale.append(f"{path.parent.name}/{path.name} differs from its source")
        elif any(c.cell_type == "code" and c.execution_count is None for c in nbformat.read(path, 4).cells):
            stale.append(f"{path.parent.name}/{path.name} holds cells that never ran")
    return stale


def _frozen(notebook) -> tuple:
    kept = ("tags", "jupyter")  # what a browser adds is no change
    cells = [(c.id, c.cell_type, c.source, [c.metadata.get(name) for name in kept]) for c in notebook.cells]
    return notebook.metadata.get("gpt2lab", {}).get("sha256"), cells


def build_lesson(lesson: Lesson, fresh: bool = False) -> float:
    """Execute and write both notebooks of a lesson; returns the seconds it took.

    Raises RuntimeError when a cell fails, writes to stderr, or shows an address or a private path.
    """
    start = time.perf_counter()
    for path, student in targets(lesson).items():
        notebook = lesson.notebook(student)
        path.parent.mkdir(parents=True, exist_ok=True)
        execute(notebook, path.parent, strict=not student)
        for cell in notebook.cells:
            _tidy(cell, path.name)
        if path.exists() and not fresh:
            _keep_measured(nbformat.read(path, 4), notebook)
        nbformat.write(notebook, path)
    return time.perf_counter() - start


def reword(lesson: Lesson) -> bool:
    """Write a lesson's new words around what its cells gave last; False where a cell's code is new or never ran."""
    changed, code = [], lambda notebook: [c for c in notebook.cells if c.cell_type == "code"]
    for path, student in targets(lesson).items():
        new = lesson.notebook(student)
        ran = [c for c in code(nbformat.read(path, 4)) if c.execution_count] if path.exists() else []
        if [c.source for c in code(new)] != [c.source for c in ran]:
            return False
        for cell, before in zip(code(new), ran, strict=True):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
        changed.append((new, path))
    for new, path in changed:
        nbformat.write(new, path)
    return True


def execute(notebook, folder, strict: bool) -> None:
    """Run all cells in place in a kernel that starts in `folder`, exercises strict or lenient."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    settings = {
        "GPT2LAB_STATIC": "1",
        "GPT2LAB_STRICT": str(int(strict)),
        "OMP_NUM_THREADS": "1",  # sums in the same order on any number of cores
        "PYTHONHASHSEED": "0",
        "COLUMNS": "100",
    }
    metadata = dict(notebook.metadata)
    with patch.dict(os.environ, settings), tempfile.TemporaryDirectory() as sockets:
        NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/k"}),  # over TCP it warns
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    notebook.metadata = nbformat.from_dict(metadata)


def _tidy(cell, notebook: str) -> None:
    """Merge neighbouring prints and refuse outputs that would leak or differ elsewhere."""
    if cell.cell_type != "code":
        return
    merged = []
    for output in cell.outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    cell.outputs = merged
    for output in merged:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if output.get("name") == "stderr" or (match := PRIVATE.search(text)):
            what = "writes to stderr" if output.get("name") == "stderr" else f"shows {match[0]}"
            first = cell.source.split("\n")[0]
            raise RuntimeError(
                f"{notebook}: the cell {first!r} {what}, which differs elsewhere:\n{text[:1000]}"
            )


def _keep_measured(old, new) -> None:
    """Keep the outputs of `measured` cells whose text is the same."""
    outputs = {c.id: c.outputs for c in old.cells if c.cell_type == "code" and c.get("execution_count")}
    for cell in new.cells:
        if "measured" in cell.metadata.get("tags", ()) and cell.id in outputs:
            cell.outputs = outputs[cell.id]


def lessons(folder, names=()) -> list[Lesson]:
    """The lessons under `folder`/src, all or those whose name starts with one of `names`.

    Raises ValueError when a name fits none.
    """
    found = sorted(Path(folder, "src").glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(path.stem.startswith(name) for path in found):
            raise ValueError(
                f"no lesson starts with {name!r}. There are: {', '.join(path.stem for path in found)}."
            )
    chosen = [path for path in found if path.stem.startswith(tuple(names) or "")]
    return [read_lesson(path) for path in chosen]


def main(arguments=None) -> int:
    """The command line; returns 1 when --check finds an outdated notebook."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt2lab.lessons.build", description="Build the notebooks."
    )
    parser.add_argument(
        "names", nargs="*", help="lessons to build whether outdated or not, such as 03; default: outdated"
    )
    parser.add_argument("--folder", default="notebooks", help="where src/ is (default: notebooks)")
    parser.add_argument(
        "--check", action="store_true", help="build nothing; complain if anything is outdated"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again in cells tagged measured")
    options = parser.parse_args(arguments)
    chosen = lessons(options.folder, options.names)
    if options.check:
        stale = [reason for lesson in chosen for reason in outdated(lesson)]
        print(
            "\n".join(stale) + "\nRun `make notebooks`." if stale else f"{len(chosen)} lessons are up to date"
        )
        return int(bool(stale))
    for lesson in chosen:
        if not options.names and (not outdated(lesson) or reword(lesson)):
            continue
        print(f"{lesson.name}: {build_lesson(lesson, options.fresh):.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
