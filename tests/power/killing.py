"""Run tests against one mutant after the other, in a copy of the checkout; write who noticed it first."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from .mutate import Mutant
from .reaching import ROOT

SECONDS = 40  # of processor time, for each mutant; then it is not decided
MOST = 400  # tests, the most direct ones

COLLECTED = "while tests are collected"
"""The killer of a mutant with which the tests cannot even be imported."""

RESULTS = Path(__file__).parent / "results.tsv"


def results() -> dict[str, tuple[str, str]]:
    """What is known: mutant -> (killed, lives, not decided or not reached; the test that noticed it first).

    By hand also: changes nothing, and why.
    """
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {name: (said, killer) for name, said, killer in (one.split("\t") for one in lines)}


def line(name: str, said: str, killer: str) -> str:
    """A mutant as `results` reads it."""
    return f"{name}\t{said}\t{killer}\n"


def candidates(mutant: Mutant, tests: dict, by_function: dict) -> list[str]:
    """The tests that enter the mutant's function: those first that are short and enter little else."""
    found = by_function.get(f"{mutant.file} {mutant.function}", [])
    order = sorted(found, key=lambda t: (tests[t]["seconds"] + 0.05) * tests[t]["functions"])
    chosen, spent = [], 0.0
    for test in order[:MOST]:
        spent += tests[test]["seconds"]
        if chosen and spent > SECONDS:
            break
        chosen.append(test)
    return chosen


def decided(mutant: Mutant, copy: "Copy", recorded) -> tuple[str, str]:
    """(killed, lives, not decided or not reached; the killer): by its known killer, else by what `recorded()` gives.

    A known killer, which is short, has noticed a bug with which it does not end.
    """
    if mutant.killer and copy.try_out(mutant, [mutant.killer])[0] != "lives":
        return "killed", mutant.killer
    chosen = candidates(mutant, *recorded())
    return copy.try_out(mutant, chosen) if chosen else ("not reached", "")


class Copy:
    """A copy of the checkout's files that git knows, in which one file at a time has a bug."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="power"))
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True
        )
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        for word in ("init -q", "add .", "-c user.name=x -c user.email=x@x commit -qm x"):  # tests ask git
            subprocess.run(["git", *word.split()], cwd=self.folder, check=True)

    def still_dies(self, mutant: Mutant, killer: str) -> bool:
        """Whether the test that once noticed a mutant is still there and notices it (or does not end with it)."""
        with suppress(RuntimeError):
            tests = ["tests", "--collect-only"] if killer == COLLECTED else [killer]
            return self.try_out(mutant, tests)[0] != "lives"
        return False

    def try_out(self, mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        """(killed, lives or not decided; the killer) of a mutant."""
        path = self.folder / mutant.file
        right = path.read_text()
        path.write_text(mutant.text())
        try:
            return self._run(tests)
        finally:
            path.write_text(right)

    def _run(self, tests: list[str]) -> tuple[str, str]:
        first = self.folder / "first-failure"
        first.unlink(missing_ok=True)
        env = os.environ | {"TODAY": "all", "POWER_FIRST": str(first), "PYTHONDONTWRITEBYTECODE": "1"}
        env["PYTHONPATH"] = os.pathsep.join(
            map(str, (self.folder, self.folder / "tests", Path(__file__).parent / "recorder"))
        )
        call = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "power_first", "--timeout", "60", *tests]
        with open(self.folder / "said", "w+") as said:
            code = _within_seconds(call, cwd=self.folder, env=env, stdout=said, stderr=said)
            said.seek(0)
            if code == 4 and "not found:" in (text := said.read()):
                raise RuntimeError(
                    f"Tests have changed: record again what they reach, or name another killer.\n{text}"
                )
        killer = first.read_text() if first.exists() else ""
        if killer or code in (1, 2, 3, 4):  # an error while tests are collected is seen as well
            return "killed", killer or COLLECTED
        return ("lives", "") if code == 0 else ("not decided", "")


def _within_seconds(call: list[str], **how) -> int:
    """The exit code of a command that ends by itself, or is ended after SECONDS of processor time."""
    run = subprocess.Popen(call, stdin=subprocess.DEVNULL, start_new_session=True, **how)
    spent = {}
    while run.poll() is None:
        time.sleep(0.25)
        spent |= processor_seconds(run.pid)
        if sum(spent.values()) > SECONDS:
            break
    _end(run)
    return run.wait()


def _end(run: subprocess.Popen) -> None:
    """End the processes of a run that are still there."""
    for pid in processor_seconds(run.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processor_seconds(session: int) -> dict[int, float]:
    """Seconds of processor that the processes of a session, and those whom they have started, took so far."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1]), int(fields[3])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    inside = {pid for pid, (_, own) in parents.items() if own == session}
    while more := {p for p, (parent, _) in parents.items() if parent in inside} - inside:
        inside |= more
    return {pid: seconds[pid] for pid in inside}
