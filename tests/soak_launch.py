"""What many launches leave behind, and whether they become slower.

    TMPDIR=EMPTY python tests/soak_launch.py COUNT RANKS

Prints the first and the last hundred's seconds, measured: of the clock and of all processors, which other work on the
machine does not change much; 1 where something grew or the last took more than 1.2 times what the first did.
"""

import os
import sys
import time
from pathlib import Path

import psutil
import torch

from gpt2lab import launch
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

PART = 100  # launches that are compared
SLOWER, MEGABYTES = 1.2, 8


def total(rank, world_size):
    """Something that needs all ranks."""
    return float(comm.all_reduce(torch.ones(5), Mesh(dp=world_size)["dp"]).sum())


def processors() -> float:
    """Seconds of processors that this process, its children and all that they waited for have used."""
    here = psutil.Process()
    return sum(sum(p.cpu_times()[:4]) for p in (here, *here.children(recursive=True)))


def held(folder: Path) -> dict[str, float]:
    """What this process and the process server hold between two launches."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "MB": sum(p.memory_info().rss for p in everyone) / 1e6,
        "descriptors": sum(p.num_fds() for p in everyone),
        "threads": sum(p.num_threads() for p in everyone),
        "processes": len(everyone),
        "shm": len(os.listdir("/dev/shm")),
        "temporary": len(list(folder.iterdir())),
    }


def main(count: int, ranks: int) -> int:
    """Launch so often, and say what grew."""
    folder, clock, used, found = Path(os.environ["TMPDIR"]), [], [], []
    for i in range(count + 10):  # the first ten warm up
        if i >= 10 and (i - 10) % PART == 0:
            found.append(held(folder))
            print(i - 10, {n: round(v, 1) for n, v in found[-1].items()}, flush=True)
        start, before = time.perf_counter(), processors()
        assert launch(total, ranks=ranks, echo=False) == [5.0 * ranks] * ranks
        clock.append(time.perf_counter() - start)
        used.append(processors() - before)
    found.append(held(folder))
    clock, used = clock[10:], used[10:]
    for what, seconds in (("clock", clock), ("processors", used)):
        first, last = sum(seconds[:PART]), sum(seconds[-PART:])
        print(f"{what}: first {PART} in {first:.1f} s, last {PART} in {last:.1f} s, ratio {last / first:.2f}")
    grown = {n: found[-1][n] - found[1][n] for n in found[0]}
    print("growth from the first hundred on:", {n: round(v, 1) for n, v in grown.items()})
    slower = sum(used[-PART:]) > SLOWER * sum(used[:PART])
    return int(slower or any(v > (MEGABYTES if n == "MB" else 0) for n, v in grown.items()))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
