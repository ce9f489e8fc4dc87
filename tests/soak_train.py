"""What a long `train` holds, sampled: memory, descriptors, threads, files. `python tests/soak_train.py MINUTES RANKS`.

Prints a line now and then, and at the end the growth from a fifth of the time on; 1 where it is more than allowed.
Beside other work on the machine, count its own shared memory: `unshare -m sh -c "mount -t tmpfs none /dev/shm; ..."`.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from gpt2lab import cli
from gpt2lab.commands import train
from gpt2lab.machine import huge_pages
from gpt2lab.ranks import comm, trace

SAMPLES = 100
on_rank = train._on_rank  # what each rank of the command runs
ALLOWED = {"parent MB": 16, "rank MB": 40, "descriptors": 0.5, "threads": 0.5, "shm": 0.5, "temporary": 0.5}
# In means: a sample may fall into a save, but what stays is 1 or more. Of a rank's 40 MB, 30 are for the latest calls
# and spans that it keeps (50,000 of each), as long as there are fewer.
ALLOWED |= {"log bytes a step": 0.05}  # relative: a line a step, and numbers of a similar length
MOST = {"calls kept": trace.LATEST, "spans kept": trace.LATEST}  # of each rank, whenever one looks
TRAIN = "--batch 4 --sequence 8 --evaluate 50 --save 200 --keep 2 --sample 0 --no-fast --steps 1000000000"


def look_now_and_then(rank, world_size, asks, options, place, *rest):
    """A rank that trains, and writes every second how many calls and spans it keeps."""

    def look():
        while True:
            Path(place, f"kept-{rank}.new").write_text(f"{len(comm.log)} {len(trace._spans)}")
            Path(place, f"kept-{rank}.new").rename(Path(place, f"kept-{rank}"))
            time.sleep(1)

    threading.Thread(target=look, daemon=True).start()
    return on_rank(rank, world_size, asks, options, place, *rest)


def sample(parent: psutil.Process, folder: Path) -> dict[str, float]:
    """What the command and its ranks hold now."""
    everyone = [parent, *parent.children(recursive=True)]
    held = [p.memory_info().rss / 1e6 for p in everyone]
    log = next(folder.glob("runs/*/log.jsonl"))
    kept = [[int(n) for n in file.read_text().split()] for file in folder.glob("runs/*/kept-?")]
    steps = log.read_bytes().count(b"\n")
    return {
        "parent MB": held[0],
        "rank MB": max(held[1:]),
        "descriptors": sum(p.num_fds() for p in everyone),
        "threads": sum(p.num_threads() for p in everyone),
        "shm": len(os.listdir("/dev/shm")),
        "temporary": sum(1 for _ in (folder / "tmp").rglob("*")),
        "calls kept": max(calls for calls, _ in kept),
        "spans kept": max(spans for _, spans in kept),
        "log bytes a step": log.stat().st_size / max(steps, 1),
        "steps": steps,
    }


def growth(found: list[dict[str, float]]) -> dict[str, float]:
    """From the second fifth to the last of the samples, in means: one sample may fall into a save."""
    fifth = max(len(found) // 5, 1)
    mean = lambda part, name: sum(s[name] for s in part) / len(part)
    early, late = found[fifth : 2 * fifth], found[-fifth:]
    grown = {name: mean(late, name) - mean(early, name) for name in ALLOWED}
    return grown | {"log bytes a step": grown["log bytes a step"] / mean(early, "log bytes a step")}


def main(minutes: float, ranks: int) -> int:
    """Train so long, sample, and say what grew."""
    huge_pages.ask_for_huge_pages()  # as the command does
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        (folder / "tmp").mkdir()
        command = [sys.executable, __file__, "train", "--plan", f"dp={ranks}", *TRAIN.split()]
        env = os.environ | {"TMPDIR": str(folder / "tmp")}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
        parent, start = psutil.Process(process.pid), time.monotonic()
        try:
            begun = lambda: [*folder.glob("runs/*/log.jsonl"), *folder.glob("runs/*/kept-?")]
            while process.poll() is None and len(begun()) < 1 + ranks:
                time.sleep(0.2)
            while process.poll() is None and time.monotonic() - start < 60 * minutes:
                found.append(sample(parent, folder))
                if len(found) % 10 == 1:
                    print({name: round(value, 1) for name, value in found[-1].items()}, flush=True)
                time.sleep(60 * minutes / SAMPLES)
        finally:
            process.terminate()  # ends it as Ctrl-C does, which is ignored where a shell started this in the background
            status = process.wait(120)
        left = [f.name for kind in ("gpt2lab-*", "pymp-*") for f in (folder / "tmp").glob(kind)]
    grown = growth(found)
    print(f"{found[-1]['steps']} steps on {ranks} ranks; growth:", {n: round(v, 2) for n, v in grown.items()})
    print("left in the temporary folder:", left, "- exit status", status)
    kept = {name: max(s[name] for s in found) for name in MOST}
    print("most calls and spans that a rank kept:", kept)
    more = [name for name in ALLOWED if grown[name] > ALLOWED[name]]
    more += [name for name in MOST if kept[name] > MOST[name]]
    print("more than allowed:", more)
    return int(status != 0 or bool(left) or bool(more))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train._on_rank = look_now_and_then
        sys.exit(cli.main(sys.argv[1:]))
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
