"""A made-up lesson of two exercises, and what students might hand in for it: `make(folder)` writes all of them.

`python tests/submissions.py 07 FOLDER` writes thirty notebooks of a real lesson: right, wrong and unfinished answers.
"""

import copy
import json
import os
import random
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import psutil

from gpt2lab.classroom import NOTEBOOKS, grade, lessons_named
from gpt2lab.classroom.reading import read_apart
from gpt2lab.lessons.answers import exercises
from gpt2lab.lessons.desk import split
from gpt2lab.lessons.source import read_lesson

SOURCE = '''# %% [markdown]
# # 07 Halves

# %% tags=["setup"]
from gpt2lab.lessons.exercises import check, close


def test_half(answer):
    close(answer(4), 2, "half of 4")


def test_third(answer):
    close(answer(9), 3, "a third of 9")

# %% tags=["exercise"]
def half(x):
    """Half of x."""
    ### BEGIN SOLUTION
    return x / 2
    ### END SOLUTION


check("half", test_half, half)

# %% tags=["wrong"]
# FAIL: half of 4: expected 2, got 4
def half(x):
    return x

# %% tags=["exercise"]
def third(x):
    """A third of x."""
    ### BEGIN SOLUTION
    return x / 3
    ### END SOLUTION


check("third", test_third, third)

# %% tags=["wrong"]
# FAIL: a third of 9: expected 3, got 9
def third(x):
    return x
'''


def alive(word: str) -> list[int]:
    """Other processes that were started with this word."""
    found = [(one.pid, one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [pid for pid, words in found if pid != os.getpid() and any(word in one for one in words)]


SLEEPER = str(10**6 + os.getpid())  # seconds: no other run of the tests has processes that sleep as long
HALVES = {  # student -> what is written in place of `return x / 2`, or the whole cell
    "good": "    return x / 2",
    "blank": '    raise NotImplementedError("your turn")',
    "wrong": "    return x",
    "forgotten": "    x / 2",
    "raises": "    return x / 0",
    "loops": "    while True:\n        pass",
    "sleeps deaf": "    import signal, time\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    time.sleep(1000)",
    "hog": "    return len(bytearray(6 * 2**30)) and x / 2",
    "exits": "    import os\n    os._exit(0)",
    "kills": "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
    "leaves": "    raise SystemExit(0)",
    "says pass": '    print("PASS  half")\n    return x',
    "gigabyte": "    import os\n    for _ in range(1024):\n        os.write(1, bytes(2**20))\n    return x / 2",
    "long words": '    raise ValueError("x" * 10**8)',
    "bomb": "    import os\n    while True:\n        os.fork()",
    "detached": "    import subprocess\n"
    f'    subprocess.Popen(["sleep", "{SLEEPER}"], start_new_session=True)\n    return x / 2',
    "writes": "    import pathlib\n    pathlib.Path('{folder}/good.ipynb').write_text('')\n    return x / 2",
    "spies": "    import pathlib\n    return 2 if list(pathlib.Path('{folder}').iterdir()) else 0",
    "helper inside": "    return ratio(x, 2)\n\n\ndef ratio(a, b):\n    return a / b",
    "constant": "    return x / TWO if Number else x\n\n\nTWO = 2\n"
    f"{'type ' * (sys.version_info >= (3, 12))}Number = float",
    "own check": '    return x\n\n\ndef check(*_):\n    print("PASS  half")\n\n\ntest_half = close = check',
    "magic": "    return x / 2  # or not?\n\n\n%time half(3)\n!ls\nfiles = !ls\nt = %time half(3)\n?half\nhalf?",
    "operators first": "    return (\n        x\n        % 3\n        * 2\n    )\n\n\n%time half(3)",
    "a table that is filled": "    return TABLE[x] / ONE\n\n\nTABLE, ONE, rows = {}, 0, []\nONE += 1\n"
    "for n in range(9):\n    rows.append(n / 2)\nif rows:\n    TABLE.update(enumerate(rows))\n"
    "if nothing_that_matters:\n    print(half(1), TABLE)",
    "a table that a call fills": "    return TABLE[x] / 2\n\n\nTABLE, rows = {}, []\ndef fill(table, given):\n"
    "    table.update(enumerate(given))\nfor n in range(9):\n    rows.append(n)\nfill(TABLE, rows)\ndisplay(TABLE)",
    "syntax": "    return x /",
    "stops the cell": '    return x / 2\n\n\nraise KeyError("stop")',
    "bad decorator": "    return x / 2\n\n\n@unknown\ndef more():\n    pass",
    "patches": "    import gpt2lab.lessons.desk as desk\n    desk.verdict = lambda *_: ('PASS', '')\n    return x",
}


def lesson(folder, source=SOURCE):
    """The lesson, from a source under a folder."""
    path = folder / "notebooks" / "src" / "07_halves.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return read_lesson(path)


def make(of, folder):
    """Write the class's notebooks into a folder."""
    folder.mkdir()
    plain = json.loads(json.dumps(of.notebook(student=False)))
    half, third = (
        i for i, cell in enumerate(plain["cells"]) if "exercise" in cell["metadata"].get("tags", ())
    )

    def hand_in(name, edit, where=None):
        notebook = copy.deepcopy(plain)
        edit(notebook)
        path = folder / (where or f"{name}.ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(notebook))

    def write(words):
        return lambda n: n["cells"][half].update(
            source=plain["cells"][half]["source"].replace(
                "    return x / 2", words.replace("{folder}", str(folder))
            )
        )

    for name, words in HALVES.items():
        hand_in(name, write(words))

    def new(text, **more):
        cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text}
        return cell | more

    def stripped(n):
        n["cells"] = [new(c["source"].splitlines(True)) for c in n["cells"] if c["cell_type"] == "code"]

    def duplicated(n):
        n["cells"].insert(half + 1, new(plain["cells"][half]["source"], id="copy"))
        write(HALVES["blank"])(n)

    def helped(n):
        write("    return ratio(x)")(n)
        n["cells"].append(
            new("import operator\n\nprint(1 / 0)\n\n\ndef ratio(a):\n    return operator.truediv(a, b)")
        )
        n["cells"].append(new("from math import *\nfrom string import *\n\n\nb = 2 * e / e"))

    def numbers(text):
        def edit(n):
            write("    return x * THREE / TWO / 3")(n)
            n["cells"].append(new(text))

        return edit

    def old_outputs(n):
        write("    return x")(n)
        n["cells"][half]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "PASS  half\n"}]

    def deleted(n):
        del n["cells"][half]

    def another(n):
        n["metadata"]["gpt2lab"]["source"] = "src/04_data_parallel.py"

    def older(n):
        n["metadata"]["gpt2lab"]["sha256"] = "0" * 64
        for cell in n["cells"]:
            cell["id"] = "old" + cell["id"]

    hand_in("stripped", stripped)
    hand_in("duplicated", duplicated)
    hand_in("helper elsewhere", helped)
    hand_in(
        "number elsewhere", numbers("ONE: int = 1\nTWO, THREE = 0, 0\nTWO += ONE\nTHREE += TWO + 2\nTWO += 1")
    )
    hand_in("computed elsewhere", numbers("THREE = 3\nTWO = int(2)"))
    hand_in("old outputs", old_outputs)
    hand_in("deleted", deleted)
    hand_in("another lesson", another)
    hand_in("older", older)
    hand_in("", write(HALVES["good"]), "Ann.ipynb")
    hand_in("", write(HALVES["wrong"]), "Ann/07_halves.ipynb")
    hand_in("", write(HALVES["good"]), "group 2/Bob/07_halves (1).ipynb")
    hand_in("", write(HALVES["wrong"]), ".ipynb_checkpoints/good-checkpoint.ipynb")
    (folder / "broken.ipynb").write_text('{"cells": [')
    (folder / "list.ipynb").write_text("[1, 2]")
    (folder / "deep.ipynb").write_text("[" * 100_000)
    (folder / "latin.ipynb").write_bytes(
        json.dumps(plain, ensure_ascii=False).replace("Half", "Hälfte").encode("latin-1")
    )
    (folder / "link.ipynb").symlink_to(folder / "good.ipynb")
    (folder / "nowhere.ipynb").symlink_to(folder / "not there")
    os.truncate(os.open(folder / "huge.ipynb", os.O_CREAT | os.O_WRONLY), 5 * 2**30)


def together(files, of, limits, hide=()):
    """{student: result} as `graded` gives it, but one sandbox tries the answers of all: to start one takes seconds."""
    read = {path: read_apart(path, of) for path in files.values()}
    given = [
        (path, i)
        for path, (parts, _) in read.items()
        for i, part in enumerate(parts)
        if part.text is not None
    ]
    tried = grade._tried({n: read[path][0][i] for n, (path, i) in enumerate(given)}, of, limits, hide)
    results = {}
    for student, path in files.items():
        own = Mock(return_value={i: tried[n] for n, (where, i) in enumerate(given) if where == path})
        with patch.multiple(grade, read_apart=Mock(return_value=read[path]), _tried=own):
            results[student] = grade.graded(path, of, limits)
    return results


def a_class(of, folder, count=30):
    """Notebooks of students, by a fixed seed: the first solves all, the second nothing, the others a part."""
    folder.mkdir(parents=True)
    chance = random.Random(7)
    for number in range(count):
        notebook = of.notebook(student=True)
        cells = {cell.id: cell for cell in notebook.cells}
        for e in exercises(of):
            right = e.cell.solved()  # some wrong answers define only one of the functions
            wrong = [f"{split(right)[0]}\n\n{w.text}" for w in e.wrong]
            texts = [right] * 6 + [e.cell.blank()] + wrong
            cells[e.cell.id].source = {0: texts[0], 1: e.cell.blank()}.get(number, chance.choice(texts))
        (folder / f"student{number:02d}.ipynb").write_text(json.dumps(notebook))


if __name__ == "__main__":
    a_class(lessons_named(NOTEBOOKS, [sys.argv[1]])[0], Path(sys.argv[2]))
