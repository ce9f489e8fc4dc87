"""What lesson 18 runs besides its own code: messages made comparable, accidents on disks, torchrun, lives of jobs."""

import contextlib
import io
import random
import re
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ...planner.failures import life
from ...reference import CONFIG
from ...storage import checkpoint
from .instruments import trainer_by as trainer


def said(error) -> list[str]:
    """A failure's message without a traceback's frames and without what differs from run to run: seconds, cells."""
    lines = re.sub(r"\d+\.\d s", "a while", re.sub(r"Cell In\[\d+\]", "Cell", str(error))).splitlines()
    if error.ename == "Mismatch":  # rank 1 and whichever of the others met first; the later of them raises it
        sides = [line.split(";")[0] for line in lines if " on axis " in line]
        other = lambda side: re.sub("calls ", "called ", re.sub("rank [02] ", "another rank ", side))
        return [re.sub(r"rank \d", "a rank", lines[0]), *sorted(map(other, sides))]
    frames = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    inside = lambda i, line: frames and i >= frames[0] and line.startswith((" ", "Tr"))
    kept = [line for i, line in enumerate(lines) if not inside(i, line)]
    return [line for line in kept if not line.startswith("  (")]


def flipped(x: torch.Tensor, bit: int = 55) -> torch.Tensor:
    """A copy of x, in float64, with another bit in its first number: 55 makes it 256 times as large, or as small."""
    wrong = x.detach().clone().view(torch.int64)
    wrong.view(-1)[0] ^= 1 << bit
    return wrong.view(x.dtype)


def one_sentence(rank: int, world_size: int, action: str, plan: str, place: str, layers: int) -> str | None:
    """What a rank says when its checkpoint cannot be saved or loaded."""
    one = trainer(plan, replace(CONFIG, n_layer=layers))
    quota = 10_000 if action == "save within a quota" and rank == 1 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (quota, resource.RLIM_INFINITY))
    try:
        if action == "load":
            checkpoint.load(place, one)
        else:
            checkpoint.save(one, place)
    except (checkpoint.CannotSave, checkpoint.BadCheckpoint) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def try_it(ranks, disk: str, action: str, plan: str, place, layers: int = CONFIG.n_layer) -> str:
    """What every rank says, the same sentence, without the folder that each run has anew."""
    (words,) = set(ranks.run(one_sentence, action, plan, str(place), layers))
    return words.replace(f"{disk}/", "")


class TwoHeads(torch.nn.Module):
    """Two linear layers, of which a loss may need only the first."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x, both=True):
        """One number, from one layer or from both."""
        return self.one(x).sum() + (self.two(x).sum() if both else 0)


def torchrun(disk: str):
    """gpt2lab's training under torchrun, 12 steps on two ranks, as a process of psutil."""
    import psutil

    options = "--plan dp=2 --batch 2 --sequence 16 --steps 12 --save 2 --evaluate 1000 --no-fast --sample 0"
    ranks = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 -m gpt2lab train"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, *shlex.split(ranks), *shlex.split(options), "--out", f"{disk}/runs"]
    return psutil.Popen(command, **quiet)


def wait_until(agent, true):
    """Wait until `true()`, or until the process is over; what `true()` gave last."""
    while not (given := true()) and agent.poll() is None:
        time.sleep(0.02)
    return given


def exported(main, run: Path, disk: str) -> str:
    """What `gpt2lab export` prints, called through the command line's `main`, without what differs from run to run."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["export", "--run", str(run), "--out", f"{disk}/model"])
    return printed.getvalue().replace(f"{disk}/", "").replace(run.name, "RUN")


def failures(
    seed: int, mean: float, end: float, early: float | None = None, until: float = 0.0
) -> list[float]:
    """Hours at which something fails, every `mean` hours on average, and every `early` before the hour `until`."""
    chance, found = random.Random(seed), [0.0]
    while found[-1] < end:
        found.append(found[-1] + chance.expovariate(1 / (early if found[-1] < until else mean)))
    return found[1:]


def lives(minutes: int, hours_between: int):
    """A day's work that saves after so many minutes and fails every so many hours; 5 minutes a save, 10 a restart."""
    from ...plots.faults import lives as drawn  # a rank that runs this lesson's code draws nothing

    strikes = failures(19, hours_between, 600)
    jobs = {f"every {minutes} min": life(minutes / 60, 5 / 60, 10 / 60, strikes, 12.0)}
    return drawn(jobs, strikes, length=28)


def hours(saves, strikes, work: float = 24.0, save: float = 1 / 12, restart: float = 1 / 6) -> float:
    """How long `work` hours take with a save at each of these hours of work, and failures at these hours."""
    now, done, points = 0.0, 0.0, [*saves, work]
    while done < work:
        point = next(p for p in points if p > done)
        end = now + point - done + (save if point < work else 0)
        hit = next((h for h in strikes if now <= h < end), None)
        now, done = (end, point) if hit is None else (hit + restart, done)
    return now


NEW_MACHINE = tuple(tuple(failures(seed, 12.0, 80.0, early=1.0, until=6.0)) for seed in range(100))
"""A hundred lives of a new machine: it fails every hour in its first 6 hours, later every 12 hours."""
