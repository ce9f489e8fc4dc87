"""How long the cells of a lesson run: `python tests/cell_seconds.py [07 ...]` writes it into notebooks/minutes.toml.

The solution runs once, as it is built. On a quiet machine, two lessons never at once.
"""

import re
import sys
import time

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.lessons.build import execute

if __name__ == "__main__":
    for lesson in lessons_named(NOTEBOOKS, sys.argv[1:]):
        begin = time.perf_counter()
        execute(lesson.notebook(student=False), NOTEBOOKS / "solutions", strict=True)
        seconds = time.perf_counter() - begin
        file, number = NOTEBOOKS / "minutes.toml", lesson.name[:2]
        line = re.compile(rf"(^\[{number}\]\nseconds = )\d+", re.M)
        file.write_text(line.sub(rf"\g<1>{seconds:.0f}", file.read_text()))
        print(f"{lesson.name}: {seconds:.0f} s", flush=True)
