"""Where runs are kept: a new folder for each, and how to find one again."""

import json
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..run import Options


def newest(out: Path, more: str = "") -> Path:
    """The run under `out` that has saved a checkpoint last. Where there is none, ValueError, which ends in `more`."""
    runs, saved = [run for run in out.glob("*") if any(run.glob("checkpoint-*"))], {}
    if runs:  # only then: torch takes seconds
        from ..storage import checkpoint
        from ..storage.reading import STATE

        found = {run: checkpoint.all_in(run)[-1:] for run in runs}
        saved = {run: (last[0] / STATE).stat().st_mtime_ns for run, last in found.items() if last}
    if not saved:
        raise ValueError(
            f"There is no run with a checkpoint in {out}/. Say where one is, or train one in about two "
            f"minutes: gpt2lab train. {more}".rstrip()
        )
    return max(sorted(saved), key=saved.get)


def folder_for(source: Path | None, options: "Options", out: str, here=None) -> Path | None:
    """Where a run writes: in a new folder, in that of its newest checkpoint, in the one that its job has begun.

    An older checkpoint goes on in a new one, a benchmark in none. `here` is the rank that a launcher started.
    """
    if options.bench:
        return None
    home = Path(source.parent.parent if source else out)
    job, again = (here.job, here.restarts) if here else ("", 0)
    mine = job, json.dumps(asdict(options), indent=2) + "\n"
    said = lambda file: (file.read_text(), (file.parent / "options.json").read_text())
    if source and is_newest(source):
        return source.parent
    begun = [file for file in sorted(home.glob("*/job")) if job and again and said(file) == mine]
    if begun:
        return max(begun, key=lambda file: file.stat().st_mtime_ns).parent
    if source and again:
        return source.parent
    folder = new(options, home, job)
    if source:
        print(f"{source.parent} has newer checkpoints than {source.name}, so this run goes on in {folder}")
    return folder


def check_place(source: Path | None, options: "Options", out: str) -> None:
    """Raise ValueError or OSError where a run with these options could not write, before others start it."""
    if not options.bench:
        home = _made(source.parent.parent if source else out)
        with TemporaryFile(dir=home), occupied(source.parent if source and is_newest(source) else None):
            pass


def is_newest(source: Path) -> bool:
    """Whether no checkpoint of its run is newer, so that it goes on there."""
    from ..storage import checkpoint

    newest = checkpoint.all_in(source.parent)[-1:]
    return not newest or source.samefile(newest[0])


@contextmanager
def occupied(folder: Path | None):
    """Keep other processes from training in a run's folder, until this one leaves or dies. Raises ValueError."""
    if not folder:
        return (yield)
    with open(folder / "job", "ab") as file:
        try:
            from fcntl import LOCK_EX, LOCK_NB, flock

            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            said = f"Another process is training in {folder}. Wait for its end, or start a run of your own."
            raise ValueError(said) from None
        except (ImportError, OSError):
            pass  # Windows, or a disk without locks
        yield


def new(options: "Options", out: str | Path, job: str = "") -> Path:
    """A folder for this run, with its options and the launcher's name of the job in it."""
    _made(out)
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in count():  # where another run has begun in the same second
        with suppress(FileExistsError):
            (folder := Path(out, f"{name}-{number}" if number else name)).mkdir()
            break
    (folder / "options.json").write_text(json.dumps(asdict(options), indent=2) + "\n")
    (folder / "job").write_text(job)
    return folder


def _made(out: str | Path) -> Path:
    """The folder of runs, made where it is not there; an error, with its name, where it cannot be."""
    if (written := str(out)) != written.encode(errors="ignore").decode():
        raise ValueError(f"{written!r} is not valid UTF-8, which safetensors asks for. Use another name.")
    Path(out).mkdir(parents=True, exist_ok=True)
    return Path(out)


def options_of(source: Path) -> "Options":
    """The options with which a checkpoint was trained, or its run was started.

    Raises ValueError, with the file's name, where they cannot be read or are not those that the checkpoint has seen.
    """
    from ..model import PRESETS
    from ..run import Options
    from ..storage.reading import digest, look

    file, known = source.parent / "options.json", {f.name: f.type for f in fields(Options)}
    state = look(source, check_files=False)[0]
    try:
        if digest(file) != state.get("options_sha256", digest(file)):
            raise ValueError(f"its sha256 is not the one in {source / 'state.json'}")
        said = state.get("options") or json.loads(file.read_text())  # those of the last resume
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
