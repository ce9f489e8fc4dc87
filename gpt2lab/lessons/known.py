"""Write what is known of wrong answers, for the judge of exercises: `python -m gpt2lab.lessons.known [NN ...]`."""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest.mock import Mock, patch

from .answers import as_expected, exercises, mistake_of, setup, words_of
from .desk import Desk, split
from .exercises import engine
from .source import Lesson, read_lesson


def met_in(lesson: Lesson) -> dict[str, str]:
    """{digest of what a wrong answer gives: its words, or its mistake where the judge says these words by itself}."""
    desk, known = Desk(lesson.name, setup(lesson)), {}
    for exercise in exercises(lesson):
        body, checks = split(exercise.cell.solved())
        for cell in exercise.wrong:
            with patch.object(engine, "known", return_value=Mock(get=Mock(return_value=None))) as nothing:
                found = desk.verdicts(body, cell.text, checks)
            if asked := nothing.return_value.get.call_args:  # what it gave has a digest, which was looked up
                said = as_expected(found, words_of(cell))
                known[asked.args[0]] = mistake_of(cell)[0] if said else words_of(cell)
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
