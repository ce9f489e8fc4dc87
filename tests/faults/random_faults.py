"""Random faults, one after the other, on one pool of ranks: each with the verdict that must come back."""

import ctypes
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt2lab import RankFailed, Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

RANKS = 3
HANG = 0.6  # the timeout while a rank is made to hang
ONES = torch.ones(6)


def misbehave(rank, world_size, kind, culprit, before):
    """Some good calls, then one in which the culprit does not do what the others do, then another good one."""
    axis = Mesh(dp=world_size)["dp"]
    for _ in range(before):
        comm.all_reduce(ONES, axis)
    if kind == "unpicklable result":
        return (i for i in range(3)) if rank == culprit else None
    if rank == culprit and kind == "skipped call":
        return None
    if rank == culprit and kind in ON_ONE:
        ON_ONE[kind](axis)
    elif kind == "circle of messages":
        comm.recv(ONES, axis, (axis.rank + 1) % axis.size)
    else:
        comm.all_reduce(ONES, axis)
        comm.all_gather(ONES, axis)
    comm.all_reduce(ONES, axis)
    return None


def complain(axis):
    raise LookupError(f"rank {axis.rank} complains")


ON_ONE = {  # what the culprit does instead of an all-reduce and an all-gather
    "raise": complain,
    "SIGKILL": lambda axis: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda axis: ctypes.string_at(0),
    "exit code 0": lambda axis: os._exit(0),
    "sleep": lambda axis: time.sleep(1000),
    "SIGSTOP": lambda axis: os.kill(os.getpid(), signal.SIGSTOP),
    "two calls swapped": lambda axis: (comm.all_gather(ONES, axis), comm.all_reduce(ONES, axis)),
    "another shape": lambda axis: comm.all_reduce(ONES[:4], axis),
    "another dtype": lambda axis: comm.all_reduce(ONES.double(), axis),
    "another operation": lambda axis: comm.all_reduce(ONES, axis, "max"),
    "another collective": lambda axis: comm.broadcast(ONES, axis, 0),
}
DIED = {
    "SIGKILL": "killed by SIGKILL",
    "segmentation fault": "killed by SIGSEGV",
    "exit code 0": "exit code 0",
}
HANGS = ("sleep", "SIGSTOP", "skipped call")
MISMATCHES = {  # what stands in the culprit's line alone
    "two calls swapped": " all_gather dim",
    "another shape": "(4,)",
    "another dtype": "float64",
    "another operation": "max",
    "another collective": "broadcast",
}
KINDS = [*ON_ONE, "skipped call", "circle of messages", "unpicklable result"]


def right_verdict(kind: str, culprit: int, error: RankFailed) -> bool:
    """Whether an error names the right rank for the right reason."""
    text, named = str(error), error.rank == culprit
    if kind == "raise":
        return named and error.ename == "LookupError" and f"rank {culprit} complains" in text
    if kind in DIED:
        return named and error.ename == "ProcessDied" and DIED[kind] in text
    if kind in HANGS:
        word = {"SIGSTOP": "is stopped", "sleep": "time.sleep(1000)"}.get(kind, "has returned")
        line = next((line for line in text.splitlines() if line.startswith(f"  rank {culprit} ")), "")
        return named and error.ename == "TimeoutError" and word in line
    if kind in MISMATCHES:
        lines = [line for line in text.splitlines() if line.startswith(f"  rank {culprit} call")]
        return error.ename == "Mismatch" and any(MISMATCHES[kind] in line.split(" #")[0] for line in lines)
    if kind == "circle of messages":
        return error.ename == "Deadlock" and "0 -> 1 -> 2 -> 0" in text
    return named and error.ename == "TypeError" and "cannot be sent back" in text


def total(rank, world_size):
    """What a healthy pool computes."""
    return comm.all_reduce(torch.tensor([2.0**rank]), Mesh(dp=world_size)["dp"]).item()


@dataclass
class Held:
    """What this process holds: descriptors, threads, living children and grandchildren, files, memory."""

    descriptors: int
    threads: int
    children: int
    files: int
    kilobytes: int

    @classmethod
    def now(cls, folder: Path) -> "Held":
        """Count it; `folder` is where private folders are made."""
        descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        files = sum(1 for _ in folder.rglob("*"))
        return cls(descriptors, threads, descendants(os.getpid()), files, resident(os.getpid()))


def descendants(pid: int) -> int:
    """Living processes below a process (zombies included: they too are never to stay)."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    below, todo = 0, [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        below += len(children)
        todo += children
    return below


def resident(pid: int) -> int:
    """Kilobytes of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@dataclass
class Outcome:
    """What a soak found: wrong verdicts, how often each kind came, what was held early and in the end, slowest hang."""

    wrong: list[str]
    kinds: Counter
    early: Held
    late: Held
    slowest: float = 0.0


def soak(count: int, backend: str, folder: Path, seed: int = 0) -> Outcome:
    """`count` random faults on one pool, a healthy run after each."""
    draw, wrong, kinds, early, slowest = random.Random(seed), [], Counter(), None, 0.0
    with Ranks(RANKS, echo=False, backend=backend) as pool:
        pool.run(total)
        for number in range(count):
            kind = KINDS[number % len(KINDS)] if number < len(KINDS) else draw.choice(KINDS)
            culprit, before = draw.randrange(RANKS), draw.randrange(3)
            pool.timeout = HANG if kind in HANGS else 60.0
            start = time.monotonic()
            try:
                pool.run(misbehave, kind, culprit, before)
                wrong.append(f"{number}: {kind} on rank {culprit} went unnoticed")
            except RankFailed as error:
                if not right_verdict(kind, culprit, error):
                    wrong.append(f"{number}: {kind} on rank {culprit}: {error.ename}, {error}")
            slowest = max(slowest, time.monotonic() - start - (HANG if kind in HANGS else 0))
            kinds[kind] += 1
            pool.timeout = 60.0
            if pool.run(total) != [2.0**RANKS - 1] * RANKS:
                wrong.append(f"{number}: after {kind} a wrong sum")
            if number == min(count // 2, 40):
                early = Held.now(folder)
        return Outcome(wrong, kinds, early, Held.now(folder), slowest)
