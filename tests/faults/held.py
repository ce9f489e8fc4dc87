"""What a process holds, counted in /proc: who leaks holds more from fault to fault."""

import os
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass
class Held:
    """What a process holds: descriptors, threads, living children and grandchildren, files, memory."""

    descriptors: int
    threads: int
    children: int
    files: int
    kilobytes: int

    @classmethod
    def now(cls, folder: Path, pid: int | None = None) -> "Held":
        """Count it, of this process or another; `folder` is where private folders are made."""
        pid = pid or os.getpid()
        descriptors, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        files = sum(1 for _ in folder.rglob("*"))
        return cls(descriptors, threads, descendants(pid), files, resident(pid))

    def check(self, early: "Held", megabytes: float) -> None:
        """Fail where more is held than early, or more memory by so much."""
        assert replace(self, kilobytes=0) == replace(early, kilobytes=0)
        assert self.kilobytes - early.kilobytes < megabytes * 1024, (early, self)


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
