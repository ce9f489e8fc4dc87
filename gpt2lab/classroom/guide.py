"""Pages made from the lessons: the teacher's guide, and the list of what to read."""

import difflib
import re
import tomllib

from ..lessons.answers import exercises, mistake_of, words_of
from ..lessons.desk import split
from ..lessons.source import SOLUTION, Lesson, prose

WORDS, LINES, EXERCISE, SOLVED = 120, 10, 5, 1.5
"""Words and lines of code read in a minute; minutes of an exercise and of a line of its solution. Fitted to two lessons
that were timed: 07 took 100 to 130 minutes, 17 took 90."""
ABOUT = """Made from the lessons. Minutes are fitted to two lessons that were timed; those in which cells run
stand where they have been measured. In 45 minutes also leave questions, appendices and what to read for home. Under
*Expected misconceptions* lines with - are the solution's, and lines with + stand there instead."""
READ_ON = re.compile(r"^## Read on\s*\n(.*?)(?=\n+\*\*Next|\Z)", re.M | re.S)


def planned(lesson: Lesson) -> dict:
    """What notebooks/minutes.toml says of a lesson: the `seconds` of its cells, and what to `skip` in 45 minutes."""
    return tomllib.loads((lesson.path.parents[1] / "minutes.toml").read_text())[lesson.name[:2]]


def spent(lesson: Lesson, cells=None) -> dict[str, float]:
    """Minutes of a lesson, or of some of its cells, by what they are spent on; those of cells only where measured."""
    cells = lesson.cells if cells is None else cells
    shown = [c for c in cells if c.kind == "code" and not {"wrong", "setup", "exercise"} & set(c.tags)]
    solutions = [len(SOLUTION.search(c.text)[0].splitlines()) - 2 for c in cells if "exercise" in c.tags]
    found = {"to read": len(prose(cells).split()) / WORDS}
    found["for the code"] = sum(len(c.text.split("\n")) for c in shown) / LINES
    found[f"for {len(solutions)} exercises"] = len(solutions) * EXERCISE + sum(solutions) * SOLVED
    seconds = planned(lesson)["seconds"]
    return found | ({"while cells run": seconds / 60} if seconds else {})


def minutes(lesson: Lesson, cells=None) -> int:
    """Minutes that a lesson, or some of its cells, takes, to the next five."""
    return 5 * round(sum(spent(lesson, cells).values()) / 5)


def title(lesson: Lesson) -> str:
    """The lesson's own title, such as 01 GPT-2."""
    return heading(lesson, lesson.cells[0])


def before(lesson: Lesson) -> list[str]:
    """The numbers of earlier lessons that a lesson builds on: 00 to 03, and those that its text names."""
    named = re.findall(r"\b[Ll]essons? (\d\d)", prose(lesson.cells))
    return sorted({"00", "01", "02", "03", *named} & {f"{i:02d}" for i in range(int(lesson.name[:2]))})


def heading(lesson: Lesson, cell) -> str:
    """The heading under which a cell stands."""
    above = lesson.cells[: lesson.cells.index(cell) + 1]
    found = re.findall(r"^#+ (.+)$", prose(above), re.M)
    return found[-1] if found else lesson.name


def guide(lessons: list[Lesson]) -> str:
    """The teacher's guide in Markdown, a section a lesson."""
    from .site import bold, slug, terms

    folder = lessons[0].path.parents[1]
    glossary = (folder / "glossary.md").read_text()
    anchors, names = terms(glossary), {slug(h): h for h in re.findall(r"^### (.+)$", glossary, re.M)}
    exam = (folder / "exam.md").read_text()
    questions = dict(re.findall(r"^## (\d\d)[^\n]*\n(.*?)(?=^## |\Z)", exam, re.M | re.S))
    known, parts = set(), ["# For teachers", ABOUT, ""]
    for lesson in lessons:
        new = dict.fromkeys(anchors[b.lower()] for b in bold(prose(lesson.cells)) if b.lower() in anchors)
        told = [f"[{names[term]}](glossary.md#{term})" for term in new if term not in known]
        known |= set(new)
        where = dict.fromkeys(f'"{heading(lesson, c)}"' for c in lesson.cells if "measured" in c.tags)
        parts += [
            f"## {title(lesson)}",
            f"- **Minutes:** {minutes(lesson)}: {', '.join(f'{m:.0f} {what}' for what, m in spent(lesson).items())}.",
            f"- **Before it:** {', '.join(before(lesson)) or 'nothing'}.",
            f"- **Terms that it introduces:** {', '.join(told) or 'none'}.",
            f"- **Depends on the machine:** {'; '.join(where) or 'nothing'}.",
            f"- **In 45 minutes, skip:** {'; '.join(planned(lesson)['skip'])}.",
            "",
            "### Expected misconceptions",
            "",
            *_misconceptions(lesson),
            "### Exam questions",
            "",
            questions.get(lesson.name[:2], "None yet.\n").strip(),
            "",
        ]
    return "\n".join(parts) + "\n"


def _misconceptions(lesson: Lesson) -> list[str]:
    """Each planted wrong answer: what is mistaken, the words that it gets, and how it differs from the solution."""
    lines = []
    for exercise in exercises(lesson):
        lines += [f"**{', '.join(exercise.titles)}**", ""]
        for wrong in exercise.wrong:
            mistake, code = mistake_of(wrong)
            said = f'FAIL, saying "{words_of(wrong)}":'
            lines += [f"{mistake} {said}".strip(), "", _difference(exercise.cell.solved(), code), ""]
    return lines


def _difference(solution: str, wrong: str) -> str:
    """The lines by which a wrong answer differs from the solution, in Markdown; all of it where most lines differ."""
    right = re.sub(r'\n *"""[^"]*"""', "", split(solution)[0])
    # comments are left out
    plain = (re.sub(r"(^|  ) *# .*|^ *### .*", "", text, flags=re.M) for text in (right, wrong))
    before, after = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in plain)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[3:]
    if sum(line[0] in "+-" for line in lines) < len(after):
        return "```diff\n" + "\n".join("..." if line[0] == "@" else line for line in lines) + "\n```"
    return f"```python\n{wrong}\n```"


def reading(lessons: list[Lesson]) -> str:
    """What every lesson's end says to read."""
    parts = ["# What to read", ""]
    for lesson in lessons:
        if found := READ_ON.search(prose(lesson.cells)):
            parts += [f"## {title(lesson)}", "", found[1].strip(), ""]
    return "\n".join(parts) + "\n"
