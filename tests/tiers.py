"""What `make test` leaves for another day, and what it never leaves: whatever belongs to what has changed.

Tests that start ranks or a browser, tests marked `rotates`, mutants, wrong answers of exercises and lessons rotate in
seven parts, TODAY=0..6; the table of equality and the other files of `DAILY` do not, nor does the rest. A commit takes
the day after its parent's, so seven commits see everything; TODAY=all leaves nothing out, and is what CI runs. Without
TODAY in the environment (a test called by hand) nothing is left out either. Changed is what differs from the parent
commit: the last commit and files that are not committed yet; the closest files of tests to it run whole (`close`).
"""

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[1]
DAYS = 7
PROOF = "test_blanks_are_todo_and_wrong_answers_fail"
DAILY = ("equivalence/test_equal", "test_refused", "test_comm", "test_transport")
"""Files that start ranks on every day: the table of equality, refusals, calls. Over gloo, where only the messages
differ, they rotate as well."""
MOST = 5  # lessons that run because a module changed that they import, the most direct
FILES = 30  # of the files of tests so many


def git(*words: str) -> list[str]:
    """The lines that git answers; none where there is no repository."""
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def commits() -> int | None:
    """The number of the newest commit in the line of first parents; None where there is no repository."""
    count = git("rev-list", "--count", "--first-parent", "HEAD")
    return int(count[0]) if count else None


def day_of_commit() -> str:
    """The day of the newest commit; everything where there is none."""
    return "all" if commits() is None else str(commits() % DAYS)


def today() -> str:
    """A day, or all."""
    return os.environ.get("TODAY", "all")


def drawn(name: str, day: str | None = None) -> bool:
    """Whether what rotates under this name runs today."""
    day = day or today()
    return day == "all" or crc32(name.encode()) % DAYS == int(day)


def runs(path: str, test: str, rotates: bool, day: str | None = None) -> bool:
    """Whether a test runs on a day: where it does not rotate, where its turn is, where it belongs to a change.

    Where the tests of a file share what is made once for all of them, the file has one turn.
    """
    daily = path.removeprefix("tests/").removesuffix(".py") in DAILY
    daily &= os.environ.get("GPT2LAB_BACKEND") != "gloo"
    turn = path if shares(path) else test
    return daily or not rotates or drawn(turn, day) or path in close(frozenset(changed()))[0]


@cache
def shares(path: str) -> bool:
    """Whether a file makes something once for all of its tests."""
    return 'scope="module"' in (ROOT / path).read_text()


@cache
def may_rotate(path: str) -> bool:
    """Whether some test of a file may rotate."""
    text = (ROOT / path).read_text()
    return "mutants/" in path or any(word in text for word in ("pools", "mark.live", "mark.rotates"))


@cache
def changed() -> frozenset[str]:
    """The files that the last commit or an uncommitted edit touches, from the root of the checkout."""
    since = git("diff", "--name-only", "HEAD~1") or git("diff", "--name-only", "HEAD")
    return frozenset([*since, *git("ls-files", "--others", "--exclude-standard")])


@cache
def imported(path: str) -> frozenset[str]:
    """The files of the package and of the tests that a Python file imports by name, or names in a mutant's path."""
    text, found = re.sub(r"^[%!].*$", "", (ROOT / path).read_text(), flags=re.MULTILINE), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = Path(path).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("gpt2lab."):
            parts = str(node.value).split(".")
            found |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
    stems = [name.replace(".", "/") for name in found]
    files = [
        f"{folder}{stem}{end}"
        for stem in stems
        for folder in ("", "tests/")
        for end in (".py", "/__init__.py")
    ]
    return frozenset(file for file in files if (ROOT / file).is_file())


@cache
def near(path: str) -> frozenset[str]:
    """A test file, what it imports, and what that imports: a change there is seen best from here."""
    first = imported(path)
    return frozenset([path, *first, *(file for one in first for file in imported(one))])


@cache
def close(changed: frozenset[str]) -> tuple[list[str], list[str]]:
    """The files of tests that changed or are closest to what did, and those that wait for their day.

    A file is closest that has the name of what changed, or of its room; then that which imports little besides.
    """
    words = {word for file in changed for word in Path(file).with_suffix("").parts[1:]}
    words -= {"parallel", "mutants"}  # tests there have the name of a strategy

    def closeness(path: str) -> tuple[bool, bool, float, bool]:
        name, mine = Path(path).stem.removeprefix("test_"), imported(path)
        named = any(f"{name}_".startswith(f"{word}_") for word in words)
        share = len(mine & changed) / max(1, sum(file.startswith("gpt2lab") for file in mine))
        return path in changed, named, share, not changed.isdisjoint(near(path))

    every = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    how = {path: closeness(path) for path in every if may_rotate(path)}
    found = sorted((path for path in how if any(how[path])), key=how.get, reverse=True)
    own = sum(path in changed for path in found)
    return found[: own + FILES], found[own + FILES :]


def touched(path: str) -> int:
    """How much of a file changed: itself counts most, then each file that it imports."""
    return 100 * (path in changed()) + len(imported(path) & changed())


def lessons(day: str | None = None) -> tuple[list[str], list[str]]:
    """Numbers of the lessons to run, and of those that import what changed and are left out."""
    sources = {path.name[:2]: f"notebooks/src/{path.name}" for path in (ROOT / "notebooks/src").glob("*.py")}
    if (day or today()) == "all":
        return sorted(sources), []
    weight = {n: touched(source) for n, source in sources.items()}
    direct = [n for n in sorted(sources, key=lambda n: (-weight[n], n)) if weight[n]]
    own = [n for n in direct if weight[n] >= 100]
    kept = own + [n for n in direct if n not in own][: max(0, MOST - len(own))]
    turn = [n for i, n in enumerate(sorted(sources)) if i % DAYS == int(day or today())]
    return sorted({*kept, *turn}), sorted({*direct} - {*kept, *turn})


def tests_of_lesson(number: str) -> list[str]:
    """What tests a lesson: the proof of its exercises, and files that import a lab or a picture of it."""
    (source,) = (ROOT / "notebooks/src").glob(f"{number}_*.py")
    rooms = ("gpt2lab/lessons/labs/", "gpt2lab/lessons/exercises/", "gpt2lab/plots/")
    own = {f for f in imported(f"notebooks/src/{source.name}") if f.startswith(rooms)}
    own -= {"gpt2lab/plots/style.py", "gpt2lab/lessons/exercises/__init__.py"}
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    proof = f"tests/test_exercises.py::{PROOF}[{source.stem}]"
    return [proof, *(path for path in paths if imported(path) & own)]
