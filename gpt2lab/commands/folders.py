"""Where runs are kept: a new folder for each, and how to find one again."""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from ..run import Options
from ..storage import checkpoint


def newest(out: Path) -> Path:
    """The newest run under `out` that has a checkpoint; ValueError where there is none."""
    runs = [run for run in out.glob("*") if checkpoint.all_in(run)]
    if not runs:
        raise ValueError(
            f"There is no run with a checkpoint in {out}/. Say where one is, or start one: python -m gpt2lab train."
        )
    return max(runs)


def begun(here, options: Options, out: str) -> Path | None:
    """The folder that this job made, with the same options, before its launcher started it again."""
    mine = here.job, json.dumps(asdict(options), indent=2) + "\n"
    said = lambda job: (job.read_text(), (job.parent / "options.json").read_text())
    found = [job for job in Path(out).glob("*/job") if here.restarts and said(job) == mine]
    return max(found).parent if found and here.job else None


def new(options: Options, out: str, job: str = "") -> Path | None:
    """A folder for this run, with its options and the launcher's name of the job in it; none for a benchmark."""
    if options.bench:
        return None
    folder = _made(Path(out), time.strftime("%Y%m%d-%H%M%S"))
    (folder / "options.json").write_text(json.dumps(asdict(options), indent=2) + "\n")
    (folder / "job").write_text(job)
    return folder


def _made(out: Path, name: str) -> Path:
    """A new folder of this name, or name-1, name-2 ... where another run has begun in the same second."""
    for number in count():
        folder = out / (f"{name}-{number}" if number else name)
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
