"""What the fault tests need to know about processes: find ours by a mark in their environment, wait until gone."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from gpt2lab import transport

MARK = "GPT2LAB_TEST_MARK"
PATIENCE = 60.0  # a guard against hanging tests; what is promised is 3 s or less, and `promptly` holds it


class Marked:
    """A script in a process of its own, marked so that every process it leaves behind is found, and ended."""

    def __init__(self, source: str, folder: Path):
        self.mark = uuid.uuid4().hex
        self.temp = Path(tempfile.mkdtemp(dir=folder))  # its private folders are made below this one
        path = self.temp / "script.py"
        path.write_text(source)
        env = os.environ | {MARK: self.mark, "TMPDIR": str(self.temp), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, path], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self) -> "Marked":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def wait_for_line(self, text: str) -> None:
        """Read the script's output until a line holds the text."""
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"the script ended without the line {text!r}")

    def others(self) -> list[int]:
        """Living processes that carry the mark, the script itself left out."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def folders(self) -> list[Path]:
        """Private folders of ranks, and of their sockets, that are still there."""
        return [*self.temp.glob("gpt2lab-*"), *self.temp.glob("pymp-*")]

    def close(self) -> None:
        """End the script and whatever it left."""
        for pid in [self.process.pid, *self.others()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        self.process.stdout.close()
        self.process.wait()


def marked(mark: str) -> list[int]:
    """Processes that carry a mark in their environment and are not zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def needs_backend(name: str) -> None:
    """Skip a test where this system does not have the backend."""
    if name == transport.NAME and not transport.AVAILABLE:
        pytest.skip(f"this system has no semaphores in shared memory, so no backend {name}")


def promptly(attempt, seconds: float, tries: int = 12) -> None:
    """The quickest of a few attempts, each of which returns the seconds that it took, keeps what is promised.

    A loaded machine is late now and then; what is slow by itself is late every time.
    """
    took = []
    while len(took) < tries and min(took, default=seconds) >= seconds:
        took.append(attempt())
    told = ", ".join(f"{t:.1f}" for t in took)
    assert min(took) < seconds, f"promised within {seconds:g} s, took {told} s"


def until(condition, patience: float = PATIENCE) -> float:
    """Wait until the condition holds and return the seconds it took; AssertionError after `patience`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < patience, f"not so after {patience:g} s"
        time.sleep(0.02)
    return time.monotonic() - start
