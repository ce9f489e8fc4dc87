"""Checkers of lesson 18: ranks to blame, flat ranges as boxes, atomic folders, how often to save."""

import contextlib
import itertools
import math
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

from ...parallel.boxes import rectangles
from ..labs.faults import NEW_MACHINE, hours
from . import Puzzle, Task, live, run_there
from .differences import is_number, listed

HANGS = (
    ("a rank that left", {0: [2], 1: [2], 2: []}),
    ("a bystander that nobody waits for", {0: [], 1: [2], 2: []}),
    ("the first rank is to blame", {0: [], 1: [0], 2: [1]}),
    ("a chain: 0 waits for 1, which waits for 3", {0: [1], 1: [3], 2: [1], 3: []}),
    ("a rank that waits for two", {0: [1, 2], 1: [0], 2: []}),
    ("a ring of three that wait for each other", {0: [1], 1: [2], 2: [0]}),
    ("a deadlock of two beside a bystander", {0: [], 1: [2], 2: [1]}),
)


def _hang(chance) -> dict[int, list[int]]:
    ranks = range(chance.randint(2, 8))
    others = lambda rank: [other for other in ranks if other != rank]
    return {rank: chance.sample(others(rank), chance.choice((0, 1, 1, 1, 2)) % len(ranks)) for rank in ranks}


def _blamed(found: list, waits: dict[int, list[int]]) -> dict:
    (got,) = listed(found)
    guilty = {rank for whom in waits.values() for rank in whom if not waits[rank]} or {None}
    return {
        f"return a rank or None, not {got!r}": got is not None and got not in list(waits),
        f"rank {got} waits itself, so it is not the cause. Whom does it wait for?": lambda: waits.get(got),
        f"blame {_who(min(guilty))}, not {_who(got)}": lambda: got not in guilty,
    }


def _who(rank: int | None) -> str:
    return "nobody (a deadlock)" if rank is None else f"rank {rank}"


culprit = Task(
    None,
    shown={f"{name}, {waits}": (waits,) for name, waits in HANGS},
    what="ranks that wait, {}",
    drawn=lambda chance: (_hang(chance),),
    call=lambda answer, waits: [answer(waits)],
    rules=_blamed,
    count=60,
)
"""Exercise: the rank to blame for a hang, given which ranks each rank waits for."""


def _part(chance) -> tuple[int, int, int, int]:
    rows, columns = chance.randint(1, 9), chance.randint(1, 12)
    return rows, columns, *sorted(chance.choices(range(rows * columns + 1), k=2))


def _filled(boxes, rows: int, columns: int, start: int, stop: int) -> dict:
    covered = [
        (row + i) * columns + column + j
        for (row, column), (height, width) in boxes
        for i in range(height)
        for j in range(width)
    ]
    fewest, right = len(rectangles((rows, columns), start, stop)), list(range(start, stop))
    return {
        f"your boxes hold {covered[:8]}..., in this order; they should hold {start} to {stop - 1}": covered
        != right,
        f"{fewest} boxes do, you use {len(boxes)}. Join whole rows": len(boxes) != fewest,
    }


stretch = Task(
    None,
    [(4, 6, 6, 18), (4, 6, 0, 24), (4, 6, 2, 5), (4, 6, 2, 15), (3, 5, 4, 6), (4, 6, 7, 7), (5, 1, 1, 4)],
    what="elements {2} to {3} of a {0} x {1} matrix",
    drawn=_part,
    rules=_filled,
    count=100,
)
"""Exercise: the boxes of a matrix that a flat stretch of its elements fills."""


class _Crash(Exception):
    """The power fails."""


def whole_or_absent(answer) -> None:
    """Exercise: write a folder of files so that whoever looks at its name sees all of it or nothing."""
    files = {"a": "alpha", "b": "beta", "c": "gamma"}
    with tempfile.TemporaryDirectory() as home:
        _saves(answer, Path(home, "checkpoint"), files, "without any crash")
    for last in range(len(files)):
        with tempfile.TemporaryDirectory() as home:
            target = Path(home, "checkpoint")
            begun = run_there(_crashed, answer, files, str(target), last)
            assert begun, "your function never calls write(file, text), which is what crashes here"
            assert not target.exists(), (
                f"a crash in file {last + 1} of {len(files)} left a torn folder under the final name"
            )
            _saves(answer, target, LATER, f"after a crash in file {last + 1}")
    _kill_everywhere(answer, files, {})
    with tempfile.TemporaryDirectory() as home:
        _saves(answer, _standing(Path(home), OLD), files, "over an old folder")
    _kill_everywhere(answer, files, OLD)


LATER = {"e": "epsilon"}  # the files of the save after a crash
OLD = {"a": "an old alpha", "b": "an old beta", "d": "an old delta"}
"""What is in the folder over which an answer saves."""


def _standing(home: Path, old: dict[str, str]) -> Path:
    """The folder to save into, which exists when there are old files."""
    target = Path(home, "checkpoint")
    for name, text in old.items():
        target.mkdir(exist_ok=True)
        Path(target, name).write_text(text)
    return target


def _kill_everywhere(answer, files: dict[str, str], old: dict[str, str]) -> None:
    """Let a child process save, once for each of its operations on files, and end it there with SIGKILL."""
    with tempfile.TemporaryDirectory() as home:
        (found,) = live(_killed_saves, answer, files, home, old, ranks=1)
    over = "over an old folder: " * bool(old)
    for operation, left, finished, _, _ in found:
        assert not operation.startswith(("os.system", "os.posix_spawn", "os.exec", "subprocess.")), (
            f"`{operation}` starts another program, which nobody can stop between its own operations here: write the "
            "files by write(file, text)"
        )
        assert left in (None, files, old or None), (
            f"{over}a SIGKILL before `{operation}` leaves {sorted(left)} of {sorted(files)} under the final name, "
            "some perhaps half written. No `except` runs then; only a rename of the finished folder is safe"
        )
        assert left is not None or finished or not old, (
            f"{over}a SIGKILL before `{operation}` leaves no folder under the final name, and the new one is not "
            "complete beside it. Write all of the new folder before you move the old one away"
        )
    for operation, _, _, mended, beside in found:
        assert mended in (files, LATER), (
            f"{over}after a SIGKILL before `{operation}` the next save, of {LATER}, does not get through: {mended}"
        )
        assert not beside, (
            f"{over}after a SIGKILL before `{operation}` and one more save {beside[0]} stays beside the folder. "
            "After many crashes the disk is full; clear away what a killed call has left"
        )
    assert len(found) > len(files), (
        "your function writes no files beside target. Another folder may be on another disk: a rename is a copy then"
    )


def _killed_saves(rank, world_size, answer, files, home, old):
    """Of each kill: operation, files under the final name or None, whether some folder has all of the new ones.

    Then, after one more save, the files under the final name, and what is beside.
    """
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads; the child only touches files
        for number in range(1, 100):
            Path(home, str(number)).mkdir()
            target, (reading, writing) = _standing(Path(home, str(number)), old), os.pipe()
            child = os.fork()
            if not child:
                _save_until(number, answer, files, target, writing)
            os.close(writing)
            _, status = os.waitpid(child, 0)
            operation = os.read(reading, 1000).decode()
            os.close(reading)
            if not os.WIFSIGNALED(status):
                return found
            left = _read(target) if target.exists() else None
            finished = any(_read(Path(one)) == files for one, inner, _ in os.walk(target.parent) if not inner)
            safe = not left or left == old
            mended = _mended(answer, LATER, target) if safe else left
            beside = sorted(file.name for file in target.parent.iterdir() if file != target) if safe else []
            found.append((operation, left, finished, mended, beside))
    return found


def _save_until(number: int, answer, files, target: Path, pipe: int) -> None:
    """In a child: save, and die before operation `number`; never returns."""
    count = 0

    def before(event, given):
        nonlocal count
        if not any(str(target.parent) in str(x) for x in given):
            return
        count += 1
        if count == number:
            os.write(pipe, event.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def write(file, text):
        for part in (text[:2], text):  # half, then all of it
            Path(file).write_text(part)

    try:
        sys.addaudithook(before)
        answer(target, dict(files), write)
    finally:
        os._exit(0)


def _mended(answer, files, target):
    target = Path(target)
    try:
        answer(target, dict(files), lambda file, text: Path(file).write_text(text))
    except OSError as error:
        return str(error)
    return _read(target) if target.exists() else None


def _read(target: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in target.iterdir()} if target.is_dir() else {}


def _crashed(answer, files, target: str, last: int) -> int:
    """How many files a save begins whose power fails in number `last`."""
    begun = []

    def write(file: Path, text: str) -> None:
        begun.append(file)
        Path(file).write_text(text if len(begun) <= last else text[:2])
        if len(begun) > last:
            raise _Crash

    with contextlib.suppress(_Crash):
        answer(Path(target), dict(files), write)
    return len(begun)


def _saves(answer, target: Path, files: dict[str, str], when: str) -> None:
    """The answer must write the whole folder now."""
    found = run_there(_mended, answer, files, str(target))
    assert not isinstance(found, str), f"{when}, what is there already stops the next save: {found}"
    assert target.is_dir(), f"{when} there is no folder of the final name"
    assert found == files, f"{when} the folder should hold {files}, not {found}"


interval = Task(
    lambda save, failures: math.sqrt(2 * save * failures),
    shown=[(10.0, 3600.0), (60.0, 86400.0)],
    what="a save of {:g} s, a failure every {:g} s (it loses half an interval, on average)",
    drawn=lambda chance: (float(chance.randint(1, 99)), float(chance.randint(1000, 99999))),
    tolerance=1e-6,
)
"""Exercise: the work between two saves that loses least (Young 1974)."""


def _hours(found) -> list:
    numbers = isinstance(found, list) and all(map(is_number, found))
    assert numbers, f"a list of hours of work; not {found!r}"
    return found


def _no_saves(found) -> dict:
    first, last = min(found, default=1), max(found, default=0)
    said = {
        f"a save after {last:g}: hours, not minutes": last > 48,
        f"a save after {first:g} hours of work has nothing to save": first <= 0,
    }
    for i, (a, b) in enumerate(itertools.pairwise(found), 1):
        said[
            f"save number {i + 1} comes after {b:g} hours of work and number {i} after {a:g}: "
            "give them in ascending order"
        ] = a >= b
    return said | {f"the job has 24 hours of work, and a save after {last:g} is not in it": last >= 24}


saves = Puzzle(
    lambda found: sum(hours(found, strikes) for strikes in NEW_MACHINE) / len(NEW_MACHINE),
    "hours",
    bar=30.7,
    best=30.27,
    digits=2,
    read=_hours,
    rules=_no_saves,
)
"""Puzzle: the hours of work after which a job on a new machine saves; the score is its mean time in hours."""
