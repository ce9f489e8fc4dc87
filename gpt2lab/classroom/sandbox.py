"""A process for answers that nobody has read: limited in time, memory, files and processes, and cut off where possible.

Linux namespaces, where the system has them, take away the network, hide all other processes, end whatever is left
behind, and make the file system read-only but for a folder that is thrown away; submissions and solutions are hidden.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOME = Path(__file__).parents[2]
SETUP = 120
"""Seconds in which a lesson's own setup must be done, on a busy machine."""
GRACE = 5
"""Seconds after which an answer that Python could not stop is killed."""
UNSHARE = ["unshare", "-r", "-p", "-f", "--kill-child", "--mount-proc", "-n"]
SHELL = """mount --bind "$1" "$1" && mount -o remount,bind,ro / ; shift
mount -t tmpfs -o size=2g none /dev/shm
while [ "$1" != -- ]; do mount -t tmpfs -o ro none "$1"; shift; done; shift
"$@"; exit $?"""


@dataclass(frozen=True)
class Limits:
    """What an answer may use: seconds for one exercise, GiB of memory and processes for all that it starts."""

    seconds: float = 30
    gib: float = 4
    processes: int = 64


@cache
def isolated() -> bool:
    """Whether this system lets a user make namespaces."""
    with contextlib.suppress(OSError):
        return not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    return False


def sentence() -> str:
    """What the processes are kept from, for the report."""
    if isolated():
        return "Answers ran without a network, on a read-only file system, and nothing that they started is left."
    return (
        "This system has no namespaces for users (unshare): answers could use the network and change files. "
        "Limits of time, memory and processes held."
    )


def run_judge(job: dict, limits: Limits, hide=()) -> Iterator[dict]:
    """The steps that a judge tells of, and at last {"broke": words} when it did not reach its end."""
    with tempfile.TemporaryDirectory(prefix="gpt2lab-", ignore_cleanup_errors=True) as home:
        mark, (pipe, end) = uuid.uuid4().hex, os.pipe()
        process = subprocess.Popen(
            _command(home, end, limits, hide),
            env=_environment(home, mark),
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[end],
            start_new_session=True,
        )
        os.close(end)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(job).encode())
            yield from _watched(process, pipe, limits)
        finally:
            os.close(pipe)
            _end(process, mark)


def _command(home: str, end: int, limits: Limits, hide) -> list[str]:
    judge = ["-P", "-m", f"{__package__}.judge", str(end), str(limits.seconds), str(limits.gib)]
    if not isolated():
        return [sys.executable, *judge]
    paths = HOME / "gpt2lab", sys.prefix, sys.base_prefix, sys.executable, home
    needed = [Path(p).resolve() for p in paths]
    folders = [Path(folder).resolve() for folder in hide]
    hidden = [str(f) for f in folders if f.is_dir() and not any(p.is_relative_to(f) for p in needed)]
    return [*UNSHARE, "sh", "-c", SHELL, "sh", home, *hidden, "--", sys.executable, *judge]


def _environment(home: str, mark: str) -> dict[str, str]:
    import matplotlib

    for file in Path(matplotlib.get_cachedir()).glob("fontlist*.json"):  # else each judge looks for all fonts
        shutil.copy(file, home)
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "GPT2LAB_BACKEND") if key in os.environ}
    folders = dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR", "IPYTHONDIR"), home)
    plain = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0", "GPT2LAB_STATIC": "1"}
    return kept | folders | plain | {"PYTHONPATH": str(HOME), "GPT2LAB_JUDGE": mark}


def _watched(process, pipe: int, limits: Limits) -> Iterator[dict]:
    """Steps from the pipe, until it closes or a limit is passed."""
    text, broke, deadline, look = b"", "", time.monotonic() + SETUP, 0.0
    while not broke:
        now = time.monotonic()
        if now > look:
            broke, look = _beyond(process, limits), now + 0.1
        if not broke and now > deadline:
            broke = f"no end after {limits.seconds:g} s. Does a loop of yours never stop?"
        if broke or not select.select([pipe], [], [], 0.1)[0]:
            continue
        if not (some := os.read(pipe, 1 << 16)):
            break
        *lines, text = (text + some).split(b"\n")
        for line in lines:
            step = json.loads(line)
            if "done" in step:
                return
            deadline = time.monotonic() + (limits.seconds + GRACE if "begin" in step else SETUP)
            yield step
    if not broke:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        broke = f"the process that ran your code ended in the middle of it ({_how(process.returncode)})"
    yield {"broke": broke}


def _how(code: int | None) -> str:
    number = code - 128 if code and code > 128 else -(code or 0)
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"exit status {code}"


def _beyond(process, limits: Limits) -> str:
    """Which limit all processes together have passed, in words; empty when none."""
    import psutil

    memory = count = 0
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            count += 1
            with contextlib.suppress(psutil.Error):
                info = one.memory_info()
                memory += info.rss - getattr(info, "shared", 0)
    if count > limits.processes:
        return f"more than {limits.processes} processes were started"
    return f"more than {limits.gib:g} GiB of memory were used" if memory > limits.gib * 2**30 else ""


def _end(process, mark: str) -> None:
    """End the judge and everything that it started, also what has left its group."""
    import psutil

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for one in [] if isolated() else psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get("GPT2LAB_JUDGE") == mark:
                one.kill()
                one.wait(GRACE)
