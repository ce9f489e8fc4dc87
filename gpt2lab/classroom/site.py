"""The lessons as pages: `python -m gpt2lab.classroom.site FOLDER [--teachers]` writes what Sphinx builds them from.

Pages are made from the built notebooks, which are not run again: the student's text, each exercise with its solution
folded beneath it. Only the pictures of sliders are drawn (`frames`), and kept for the next time.
"""

import argparse
import gc
import json
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from html import escape
from itertools import repeat
from pathlib import Path

import nbformat

from ..lessons.source import Lesson
from ..machine.checksum import sources
from . import NOTEBOOKS, guide, lessons_named
from .frames import draw_explorers

STATIC = Path(__file__).with_name("static")
PAGES = ("glossary", "symptoms")
RUN = """:::{{admonition}} Run this lesson
:class: tip
```bash
make lab    # then open work/{name}.ipynb
```
:::"""


def slug(term: str) -> str:
    """The anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-")


def terms(glossary: str) -> dict[str, str]:
    """Term in lower case -> its anchor, of the headings of the glossary and of the other names under them."""
    found = {}
    for part in re.split(r"^### ", glossary, flags=re.M)[1:]:
        name, _, text = part.partition("\n")
        also = re.search(r"^\*Also:\* (.+)$", text, re.M)
        for one in [name, *(also[1].split(", ") if also else [])]:
            found[one.strip().lower()] = slug(name.strip())
    return found


def bold(text: str) -> list[str]:
    """What a text sets in bold."""
    return [re.sub(r"\s+", " ", m) for m in re.findall(r"\*\*([^*]{2,60}?)\*\*", text)]


def page(lesson: Lesson, anchors: dict[str, str], explorers: dict[str, list[dict]]) -> nbformat.NotebookNode:
    """The page of a lesson, from its notebook for students; solutions are folded beneath the last hint."""
    student = nbformat.read(lesson.path.parents[1] / f"{lesson.name}.ipynb", 4)
    solved = {cell.id: cell.solved() for cell in lesson.cells}
    cells, linked, solution = [], set(), []
    new = nbformat.v4.new_markdown_cell
    for i, cell in enumerate(student.cells):
        tags, drawn = cell.metadata.get("tags", ()), explorers.get(cell.id, ())
        if "hint" not in tags:
            cells, solution = cells + solution, []
        if "exercise" in tags:
            fold = {"tags": ["hide-input"], "mystnb": {"code_prompt_show": "Show a solution"}}
            solution = [nbformat.v4.new_code_cell(solved[cell.id], metadata=fold)]
        if cell.cell_type == "code":
            cells += _described(cell, bool(drawn) and all(explorer["posters"] for explorer in drawn))
        else:
            cells.append(new(_linked(cell.source, anchors, linked)))
        cells += [new(RUN.format(name=lesson.name))] if i == 0 else []
        cells += [new(_player(explorer, lesson.name)) for explorer in drawn]
    student.cells = cells + solution
    return student


def _linked(text: str, anchors: dict[str, str], linked: set[str]) -> str:
    """Link each term of the glossary where the lesson first sets it in bold."""

    def link(found):
        anchor = anchors.get(re.sub(r"\s+", " ", found[1]).lower())
        if not anchor or anchor in linked:
            return found[0]
        linked.add(anchor)
        return f"[**{found[1]}**](glossary.md#{anchor})"

    return re.sub(r"\*\*([^*]{2,60}?)\*\*", link, text)


def _described(cell, drawn: bool) -> list:
    """The cell, and one without code for each further figure, because MyST knows one alt text a cell.

    Imports are folded; posters that explorers show as well are marked; lines that only speak of the lab go.
    """
    parts = [[]]
    for output in cell.outputs:
        if str(output.get("text", "")).startswith("Open this lesson with"):
            continue
        if _alt(output) and any(map(_alt, parts[-1])):
            parts.append([])
        parts[-1].append(output)
    new = nbformat.v4.new_code_cell
    cells = [cell, *(new(cell.source, metadata={"tags": ["remove-input"]}) for _ in parts[1:])]
    for one, outputs in zip(cells, parts, strict=True):
        shown, one.outputs = next(filter(_alt, outputs), None), outputs
        one.metadata["mystnb"] = {"image": shown["metadata"]["image/png"]} if shown else {}
    tags = cell.metadata.setdefault("tags", [])
    if cell.metadata.get("jupyter"):
        tags.append("hide-input")
        cell.metadata["mystnb"]["code_prompt_show"] = "Show the imports"
    if drawn and all(len(part) == 2 and _alt(part[0]) for part in parts):  # only figures and captions
        for one in cells:
            one.metadata["tags"].append("poster")
    return cells


def _alt(output) -> str:
    return output.get("metadata", {}).get("image/png", {}).get("alt", "")


def _player(explorer: dict, name: str) -> str:
    """A box that the script of the page fills with sliders; without a script the poster above it remains."""
    data = escape(json.dumps(explorer | {"folder": f"_static/frames/{name}/"}))
    return f'<div class="explorer" data-explorer="{data}"></div>'


def _frames(lesson: Lesson, kept: Path) -> dict[str, list[dict]]:
    """The explorers of a lesson: drawn, or those of the last time when nothing has changed since."""
    made = [sources(), lesson.digest]
    folder = kept / lesson.name
    known = json.loads((folder / "frames.json").read_text()) if (folder / "frames.json").exists() else {}
    if known.get("made") != made:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        known = {"made": made, "explorers": draw_explorers(lesson, folder)}
        (folder / "frames.json").write_text(json.dumps(known))
    return known["explorers"]


def write_pages(folder: Path, lessons: list[Lesson], teachers: bool = False) -> None:
    """Write all that Sphinx reads."""
    notebooks = lessons[0].path.parents[1]
    kept = folder / "_static" / "frames"
    kept.mkdir(parents=True, exist_ok=True)
    for file in [*folder.glob("*.ipynb"), *folder.glob("*.md")]:
        file.unlink()
    for file in [*STATIC.iterdir(), *(notebooks.parent / "figures").glob("*.svg")]:
        shutil.copy(file, folder / "_static" if file.suffix in (".css", ".js", ".svg") else folder)
    (folder / "handout.md").unlink()
    anchors = terms((notebooks / "glossary.md").read_text())
    with ProcessPoolExecutor(2, initializer=gc.disable) as pool:  # a tenth quicker, for a few hundred MB
        explorers = [*pool.map(_frames, lessons[::-1], repeat(kept))][::-1]  # the last ones take longest
    for lesson, found in zip(lessons, explorers, strict=True):
        nbformat.write(page(lesson, anchors, found), folder / f"{lesson.name}.ipynb")
    for name in PAGES:
        shutil.copy(notebooks / f"{name}.md", folder)
    (folder / "reading.md").write_text(guide.reading(lessons))
    pages = [*PAGES, "reading"]
    if teachers:
        intro, *parts = re.split(r"^## ", guide.guide(lessons), flags=re.M)
        for lesson, part in zip(lessons, parts, strict=True):
            # "Teaching": search shows the page beside the lesson's own title
            text = "# Teaching " + part.replace("\n### ", "\n## ")
            (folder / f"teach_{lesson.name}.md").write_text(text)
        (folder / "teachers.md").write_text(f"{intro}\n```{{toctree}}\n:glob:\n:maxdepth: 1\nteach_*\n```\n")
        pages.append("teachers")
    _write_index(folder / "index.md", lessons, pages)


def _write_index(file: Path, lessons: list[Lesson], pages: list[str]) -> None:
    """Fill in the first page: README's goals, the guide's minutes, and the names of the other pages."""
    readme = (lessons[0].path.parents[2] / "README.md").read_text()
    goals = dict(re.findall(r"^\| \[(\d\d) [^|]*\| ([^|]*) \|", readme, re.M))
    names = [lesson.name for lesson in lessons]
    took = [guide.minutes(lesson) for lesson in lessons]
    rows = [
        f"| [{guide.title(lesson)}]({lesson.name}.ipynb) | {goals.get(lesson.name[:2], '')} | {minutes} |"
        for lesson, minutes in zip(lessons, took, strict=True)
    ]
    made = {"rows": "\n".join(rows), "lessons": "\n".join(names), "pages": "\n".join(pages)}
    file.write_text(file.read_text().format(**made, first=names[0], hours=round(sum(took) / 60)))


def main() -> None:
    """The command line of the Makefile."""
    parser = argparse.ArgumentParser(prog="python -m gpt2lab.classroom.site", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teachers", action="store_true", help="also the teacher's guide")
    options = parser.parse_args()
    folder = options.folder
    if any(folder.glob("*")) and not (folder / "_static" / "frames").is_dir():
        parser.error(f"{folder} holds other files, which would be deleted. Use a new one, as build/site.")
    write_pages(folder, lessons_named(NOTEBOOKS, []), options.teachers)


if __name__ == "__main__":
    main()
