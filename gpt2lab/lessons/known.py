"""Write what is known of wrong answers, for the judge of exercises: `python -m gpt2lab.lessons.known [NN ...]`."""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest.mock import patch

from .answers import as_expected, exercises, mistake_of, setup, words_of
from .desk import Desk, split
from .exercises import engine
from .source import Lesson, read_lesson


class Asked(dict):
    """A table of mistakes that knows none, and notes the digest that is looked up."""

    key = ""

    def get(self, key, default=None):
        """Nothing."""
        self.key = key
        return default


def in_own_words(desk: Desk, body: str, answer: str, checks: str) -> tuple[list[tuple[str, str, str]], str]:
    """(verdicts on an answer in the judge's own words, the digest of what it gave, or "")."""
    asked = Asked()
    with patch.object(engine, "known", lambda: asked):
        return desk.verdicts(body, answer, checks), asked.key


def met_in(lesson: Lesson) -> dict[str, str]:
    """{digest of what a wrong answer gives: its words, or its mistake where the judge says these words by itself}."""
    desk, known = Desk(lesson.name, setup(lesson)), {}
    for exercise in exercises(lesson):
        body, checks = split(exercise.cell.solved())
        for cell in exercise.wrong:
            found, key = in_own_words(desk, body, cell.text, checks)
            if key:
                said = as_expected(found, words_of(cell))
                known[key] = mistake_of(cell)[0] if said else words_of(cell)
    return known


def main(numbers: list[str]) -> None:
    """Try the wrong answers of some lessons, or of all."""
    known = json.loads(engine.KNOWN.read_text())
    for path in sorted(Path("notebooks/src").glob("*.py")):
        if not numbers or path.name[:2] in numbers:
            with contextlib.redirect_stdout(io.StringIO()):
                known[path.name[:2]] = dict(sorted(met_in(read_lesson(path)).items()))
    engine.KNOWN.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
