"""Pages made from the lessons: the teacher's guide, and the list of what to read."""

import re

from ..lessons.answers import exercises, words_of
from ..lessons.source import Lesson, prose

WORDS_A_MINUTE, CELL, EXERCISE = 120, 0.5, 6
"""What a lesson takes: words read in a foreign language, minutes for a code cell and for an exercise."""
READ_ON = re.compile(
    r"(?:^## (?:Links|Further reading|Sources|Read on)\s*\n"
    r"|\*\*(?:Sources:|Read on\.|Further\*\*:)|Background:|Read also:)(?:\*\*)?(.*)",
    re.M | re.S,
)


def minutes(lesson: Lesson) -> int:
    """Minutes that a lesson takes, to the next five: computed from its words, cells and exercises."""
    words = len(lesson.prose.split())
    code = sum(c.kind == "code" and not {"wrong", "setup"} & set(c.tags) for c in lesson.cells)
    return 5 * round((words / WORDS_A_MINUTE + code * CELL + len(exercises(lesson)) * EXERCISE) / 5)


def title(lesson: Lesson) -> str:
    """The lesson's own title, such as 01 GPT-2."""
    return heading(lesson, lesson.cells[0])


def before(lesson: Lesson) -> list[str]:
    """The numbers of earlier lessons that a lesson builds on: 00 to 03, and those that its text names."""
    named = re.findall(r"\b[Ll]essons? (\d\d)", lesson.prose)
    return sorted({"00", "01", "02", "03", *named} & {f"{i:02d}" for i in range(int(lesson.name[:2]))})


def heading(lesson: Lesson, cell) -> str:
    """The heading under which a cell stands."""
    above = lesson.cells[: lesson.cells.index(cell) + 1]
    found = re.findall(r"^#+ (.+)$", prose(above), re.M)
    return found[-1] if found else lesson.name


def to_skip(lesson: Lesson) -> list[str]:
    """What to leave out in 45 minutes: subsections, what a stopwatch measures, and exercises after the second."""
    inner = [f'"{h}"' for h in re.findall(r"^### (?!Exercise)(.+)$", lesson.prose, re.M)]
    clocks = dict.fromkeys(f'"{heading(lesson, c)}"' for c in lesson.cells if "measured" in c.tags)
    later = [t for e in exercises(lesson)[2:] for t in e.titles]
    return [
        *inner,
        *(f"the stopwatch in {c}" for c in clocks if c not in inner),
        *(f"exercise {t!r}" for t in later),
    ]


def guide(lessons: list[Lesson]) -> str:
    """The teacher's guide in Markdown, a section a lesson."""
    from .site import bold, slug, terms

    folder = lessons[0].path.parents[1]
    glossary = (folder / "glossary.md").read_text()
    anchors, names = terms(glossary), {slug(h): h for h in re.findall(r"^### (.+)$", glossary, re.M)}
    exam = dict(
        re.findall(r"^## (\d\d)[^\n]*\n(.*?)(?=^## |\Z)", (folder / "exam.md").read_text(), re.M | re.S)
    )
    known, parts = set(), ["# For teachers", "Made from the lessons. Minutes are computed, not measured.", ""]
    for lesson in lessons:
        new = dict.fromkeys(anchors[b.lower()] for b in bold(lesson.prose) if b.lower() in anchors)
        told = [f"[{names[term]}](glossary.md#{term})" for term in new if term not in known]
        known |= set(new)
        where = dict.fromkeys(f'"{heading(lesson, c)}"' for c in lesson.cells if "measured" in c.tags)
        parts += [
            f"## {title(lesson)}",
            f"- **Minutes:** {minutes(lesson)}, with {len(exercises(lesson))} exercises.",
            f"- **Before it:** {', '.join(before(lesson)) or 'nothing'}.",
            f"- **Terms that it introduces:** {', '.join(told) or 'none'}.",
            f"- **Depends on the machine:** {'; '.join(where) or 'nothing'}.",
            f"- **In 45 minutes, skip:** {'; '.join(to_skip(lesson)) or 'nothing'}.",
            "",
            "### Expected misconceptions",
            "",
            *_misconceptions(lesson),
            "### Exam questions",
            "",
            exam.get(lesson.name[:2], "None yet.\n").strip(),
            "",
        ]
    return "\n".join(parts) + "\n"


def _misconceptions(lesson: Lesson) -> list[str]:
    """Each planted wrong answer with the words that it gets."""
    lines = []
    for exercise in exercises(lesson):
        lines += [f"**{', '.join(exercise.titles)}**", ""]
        for wrong in exercise.wrong:
            code = wrong.text.partition("\n")[2].strip()
            lines += [f'FAIL, saying "{words_of(wrong)}":', "", f"```python\n{code}\n```", ""]
    return lines


def reading(lessons: list[Lesson]) -> str:
    """What every lesson's end says to read."""
    parts = ["# What to read", ""]
    for lesson in lessons:
        found = READ_ON.search(lesson.prose)
        if found:
            parts += [f"## {title(lesson)}", "", found[1].strip(), ""]
    return "\n".join(parts) + "\n"
