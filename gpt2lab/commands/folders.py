"""Where runs are kept: a new folder for each, and how to find one again."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path

from ..model import PRESETS
from ..run import Options
from ..storage import checkpoint
from ..storage.reading import digest, look


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


def options_of(source: Path) -> Options:
    """The options that the run of a checkpoint was started with.

    Raises ValueError, with the file's name, where they cannot be read or are not those that the checkpoint has seen.
    """
    file, known = source.parent / "options.json", {f.name: f.type for f in fields(Options)}
    sealed = look(source, check_files=False)[0].get("options_sha256")
    try:
        if sealed and digest(file) != sealed:
            raise ValueError(f"its sha256 is not the one in {source / 'state.json'}")
        said = json.loads(file.read_text())
        if not isinstance(said, dict):
            raise ValueError(f"it holds a {type(said).__name__} in place of options")
        for name, value in said.items():
            if name not in known:
                raise ValueError(f"there is no option {name!r}")
            if type(value) is not known[name] and not (known[name] is float and type(value) is int):
                raise ValueError(f"{name} is {value!r}, not {known[name].__name__}")
            if name == "config" and value not in PRESETS:
                raise ValueError(f"there is no model {value!r}")
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}. Start a new run, or mend the file by hand.") from None
    return Options(**said)


def _made(out: Path, name: str) -> Path:
    """A new folder of this name, or name-1, name-2 ... where another run has begun in the same second."""
    out.mkdir(parents=True, exist_ok=True)  # fails, with its name, where it is a file or a link to nothing
    for number in count():
        folder = out / (f"{name}-{number}" if number else name)
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
