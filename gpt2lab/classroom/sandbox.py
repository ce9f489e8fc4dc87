"""A process for answers that nobody has read: limited in time, memory, files and processes, and cut off where possible.

Linux namespaces, where the system gives them to users, take away the network, other processes and the file system:
answers see a root of their own, read-only, with the interpreter and this package, less what knows the answers (see
`carried`), and two folders in memory of a stated size, which end with them. They keep no capability with which they
could change that, and can make no namespace.

What remains: where a checker must run beside the answer (`apart` says when, and each result says so), the answer could
forge the verdict of that exercise; memory and processes are measured ten times a second, so an answer can pass their
limits for a moment.
"""

import contextlib
import json
import math
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import carried
from .verdicts import TOLD, ended, is_verdict, late

HOME = Path(__file__).parents[2]
SETUP = 120
"""Seconds in which a lesson's own setup must be done, on a busy machine."""
GRACE = 5
"""Seconds in which a judge that has said its last ends."""
FILES = 512
"""MiB of files that an answer may write into its working folder, and as much again into /dev/shm."""
LINE = 2**20
"""Bytes of one step that a judge tells; no honest one comes near."""
NEVER = threading.Event()
"""For calls that nobody stops."""
SYSTEM = [f"/{name}" for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "sys/devices/system/cpu")]
SYSTEM += [f"/etc/{name}" for name in ("ld.so.cache", "alternatives", "fonts", "localtime")]
SYSTEM += [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
UNSHARE = ["setpriv", "--pdeathsig", "KILL", "unshare", "-rmpfin", "--kill-child", "sh", "-c"]
SHELL = r"""set -e; at=/run; PATH=$PATH:/usr/sbin:/usr/bin:/sbin:/bin; room="size=$1m,nr_inodes=50000,mode=1777"; shift
mount -t tmpfs -o size=1m,mode=755 none $at; cd $at; mkdir -p proc etc tmp old dev/shm
mount -t proc none proc; mount -t tmpfs -o "$room" none tmp; mount -t tmpfs -o "$room" none dev/shm
echo 0 > proc/sys/user/max_user_namespaces; (echo 0 > proc/sys/kernel/shmmni) 2> tmp/.said || :
echo 'student:x:0:0::/tmp:/bin/sh' > etc/passwd; echo '127.0.0.1 localhost' > etc/hosts
ln -s /proc/self/fd dev/fd
while [ "$1" != -- ]; do
  if [ -L "$1" ]; then mkdir -p ".${1%/*}"; cp -P "$1" ".$1"
  elif [ -d "$1" ]; then mkdir -p ".$1"; mount --rbind "$1" ".$1"
  elif [ -e "$1" ]; then mkdir -p ".${1%/*}"; : > ".$1"; mount --bind "$1" ".$1"; fi
  shift
done; shift
while [ "$1" != -- ]; do mount -t tmpfs -o size=4k none ".$1"; shift; done; shift
while [ "$1" != -- ]; do : > ".$1"; mount --bind "$1" ".$1"; shift; done; shift
while [ "$1" != -- ]; do cp "$1" tmp; shift; done; shift
while read -r _ _ _ _ on _; do case $on in
  $at/tmp|$at/dev/shm) ;;
  $at/*) mount -o remount,bind,ro "$(printf "$on")" ;; esac
done < /proc/self/mountinfo
pivot_root . old; cd /; umount -l old; rmdir old; mount -o remount,bind,ro /; cd /tmp
exec setpriv --pdeathsig KILL --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


class Stopped(Exception):
    """The grader was stopped while this ran."""


@dataclass(frozen=True)
class Limits:
    """What an answer may use: seconds for one exercise, GiB of memory and processes for all that it starts."""

    seconds: float = 30
    gib: float = 4
    processes: int = 64


@cache
def missing() -> str:
    """Why this system cannot cut answers off, in the words of the program that tried; empty when it can."""
    try:
        done = subprocess.run(_cut_off(["true"]), capture_output=True, text=True, timeout=SETUP)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1][:200] if done.returncode else ""


def isolated() -> bool:
    """Whether answers are cut off from network, files and other processes."""
    return not missing()


def sentence() -> str:
    """What the processes are kept from, for the report."""
    if isolated():
        return (
            "Answers ran without a network, on a read-only file system with the interpreter and this package only, "
            f"with {FILES} MiB for files, as much in /dev/shm, and nothing that they started is left."
        )
    return (
        f"This system could not cut answers off ({missing()}): answers could use the network, and read and change "
        "files. Limits of time, memory and processes held."
    )


def run_judge(job: dict, limits: Limits, hide=(), stop: threading.Event = NEVER) -> Iterator[dict]:
    """The steps that a judge tells of, and at last {"broke": words} when it did not reach its end.

    Raises Stopped, with nothing left running, when `stop` is set.
    """
    with contextlib.ExitStack() as stack:
        mark, (pipe, end), home = uuid.uuid4().hex, os.pipe(), "/tmp"
        judge = ["-P", "-m", f"{__package__}.judge", str(end), str(limits.seconds), str(limits.gib)]
        command = [sys.executable, *judge]
        if isolated():
            command = _cut_off(command, hide)
        else:
            new = tempfile.TemporaryDirectory(prefix="gpt2lab-", ignore_cleanup_errors=True)
            home = stack.enter_context(new)
            for file in _fonts():
                shutil.copy(file, home)
        process = subprocess.Popen(
            command,
            env=_environment(home, mark),
            cwd="/" if isolated() else home,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[end],
            start_new_session=True,
        )
        os.close(end)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(job | {"checkers": carried.texts()}).encode())
            yield from _watched(process, pipe, limits, [i for i, _ in job["answers"]], stop)
        finally:
            os.close(pipe)
            _end(process, mark)


def _cut_off(command: list[str], hide=()) -> list[str]:
    """The command, in namespaces and with a root of its own; `hide` are folders that must not be seen there."""
    python = [sys.prefix, sys.base_prefix, Path(sys.executable).resolve(), HOME / "gpt2lab"]
    python += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    needed = {Path(p) for one in python for p in (one, Path(one).resolve())}
    inside = lambda p, others: any(p.is_relative_to(q) for q in others)
    folders = [p for p in sorted(needed) if not inside(p, {*needed, Path("/usr")} - {p})]
    hidden = [p for one in hide if (p := Path(one).resolve()).is_dir() and inside(p, [*folders, "/usr"])]
    hidden = [p for p in hidden if not any(q.is_relative_to(p) for q in needed)]
    rooms = {carried.FOLDER, carried.FOLDER.resolve()}
    shown = [room / name for room in rooms for name in carried.SHOWN]
    words = [FILES, *SYSTEM, *folders, "--", *hidden, *rooms, "--", *shown, "--", *_fonts(), "--", *command]
    return [*UNSHARE, SHELL, "sh", *map(str, words)]


@cache
def _fonts() -> list[Path]:
    """The files without which each judge would look for all fonts."""
    import matplotlib

    return list(Path(matplotlib.get_cachedir()).glob("fontlist*.json"))


def _environment(home: str, mark: str) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "GPT2LAB_BACKEND") if key in os.environ}
    folders = dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR", "IPYTHONDIR"), home)
    plain = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0", "GPT2LAB_STATIC": "1"}
    paths = {"PYTHONPATH": str(HOME), "PYTHONUSERBASE": site.getuserbase(), "GPT2LAB_JUDGE": mark}
    return kept | folders | plain | paths


def _watched(process, pipe: int, limits: Limits, waiting: list, stop: threading.Event) -> Iterator[dict]:
    """Steps from the pipe, until it closes or a limit is passed."""
    text, broke, at, deadline, look = b"", "", None, time.monotonic() + SETUP, 0.0
    while not broke:
        now = time.monotonic()
        if stop.is_set():
            raise Stopped
        if now > look:
            broke, look = _beyond(process, limits), now + 0.1
        if not broke and now > deadline:
            broke = late(limits.seconds)
        if broke or not select.select([pipe], [], [], 0.1)[0]:
            continue
        if not (some := os.read(pipe, 1 << 16)):
            break
        *lines, text = (text + some).split(b"\n")
        for line in lines:
            step = _step(line, waiting, at)
            if not step or "done" in step:
                break
            at = waiting.pop(0) if "begin" in step else None
            # The judge itself sees to the seconds of an answer: this is for one that an answer has stopped.
            deadline = time.monotonic() + SETUP + (0 if at is None else 3 * limits.seconds)
            yield step
        else:
            step = len(text) < LINE
        if not step:
            broke = TOLD
        elif step is not True and "done" in step:
            return
    if not broke:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        broke = ended(process.returncode)
    yield {"broke": broke}


def _step(line: bytes, waiting: list, at) -> dict | None:
    """A line as a step that is due now: the next answer begins, the one begun ends, or all are done; else None."""
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match step:
        case {"done": True}:
            return {"done": True} if at is None and not waiting else None
        case {"begin": i}:
            return {"begin": i} if at is None and [i] == waiting[:1] else None
        case {
            "end": i,
            "verdicts": [*verdicts],
            "seconds": int() | float() as seconds,
            "apart": bool(apart),
        } if i == at:
            if math.isfinite(seconds) and all(map(is_verdict, verdicts)):
                return {"end": i, "verdicts": verdicts, "seconds": float(seconds), "apart": apart}
    return None


def _beyond(process, limits: Limits) -> str:
    """Which limit all processes together have passed, in words; empty when none."""
    import psutil

    own = mapped = count = 0
    files: dict[int, int] = {}  # shared memory without a name: it counts also where no process maps it
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            count += 1
            with contextlib.suppress(psutil.Error, OSError):
                info = one.memory_info()
                own += info.rss - getattr(info, "shared", 0)
                if sys.platform == "linux":
                    mapped += _shared(one.pid, files)
    if count > limits.processes:
        return f"more than {limits.processes} processes were started"
    memory = own + max(mapped, sum(files.values()))
    return f"more than {limits.gib:g} GiB of memory were used" if memory > limits.gib * 2**30 else ""


def _shared(pid: int, files: dict[int, int]) -> int:
    """Bytes of shared memory that a process maps; the files of such memory that it holds open go into `files`."""
    with os.scandir(f"/proc/{pid}/fd") as opened:
        for entry in opened:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    info = os.stat(entry.path)
                    files[info.st_ino] = 512 * info.st_blocks
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


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
