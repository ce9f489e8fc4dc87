"""Writing the folder of a checkpoint: by all ranks together, each its boxes; whole, or not there at all.

It is written under another name, sent to the disk, and renamed when it is complete. Three rounds in which ranks tell
each other how they fare: what everybody holds, what everybody has written, that the folder has its name.
"""

import contextlib
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from ..parallel.boxes import Entry, check_complete
from .reading import NAMED, STATE, TENSORS, digest, key, text


class CannotSave(OSError):
    """A checkpoint that could not be written; the message says where, why, and what is still there."""


def write(
    folder: Path, entries: dict[str, Entry], texts: dict, state: dict, rank: int, gather: Callable
) -> None:
    """Write a folder together with all ranks, each with its entries; `gather(value)` lists the values of all ranks.

    `texts` are its other files, `state` is what `read_state` gives back. Raises CannotSave on every rank.
    """
    partial = folder.with_suffix(".partial")

    def together(work, *args) -> list:
        """What `work` returns on each rank, unless a disk stops one of them."""
        try:
            found = work(partial, rank, *args), ""
        except OSError as error:
            found = None, error.strerror or repr(error)
        everywhere = gather(found)
        stopped = [(failed, why) for failed, (_, why) in enumerate(everywhere) if why]
        if stopped:
            shutil.rmtree(partial, ignore_errors=True)  # frees the space on a full disk
            raise CannotSave(
                f"The checkpoint {folder} could not be written: {stopped[0][1]} (rank {stopped[0][0]}). "
                "Older ones are as they were."
            )
        return [value for value, _ in everywhere]

    held = together(_begin, entries)
    digests = together(_write_mine, entries, who_writes(held)[rank])
    together(_finish, folder, texts, state, dict(digests))


def _begin(partial: Path, rank: int, entries: dict[str, Entry]) -> dict[str, tuple]:
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    return {name: (e.shape, [(b.offsets, b.sizes) for b in e.boxes]) for name, e in entries.items()}


def _write_mine(partial: Path, rank: int, entries: dict[str, Entry], mine: list[tuple]) -> tuple[str, str]:
    boxes = {(name, b.offsets): b.tensor for name, e in entries.items() for b in e.boxes}
    file = partial / f"rank{rank}{TENSORS}"
    save_tensors({key(*which): boxes[which].contiguous() for which in mine}, file)
    return file.name, digest(file)


def _finish(
    partial: Path, rank: int, folder: Path, texts: dict, state: dict, digests: dict[str, str]
) -> None:
    if rank == 0:
        for name, words in texts.items():
            (partial / name).write_text(words)
        sealed = digests | {name: digest(partial / name) for name in texts}
        (partial / STATE).write_text(text(state | {"sha256": dict(sorted(sealed.items()))}))
        for file in (*(partial / name for name in (*texts, STATE)), partial):
            _flush(file)
        _replace(partial, folder)


def who_writes(held: list[dict[str, tuple]]) -> list[list[tuple]]:
    """Which boxes, as (name, offsets), each rank writes, given what each holds, as name -> (shape, boxes).

    What several ranks hold is written by the one that has the least to write. Raises ValueError where the boxes of
    all ranks do not make up each tensor.
    """
    shapes, boxes = {}, defaultdict(lambda: defaultdict(list))  # of each tensor: the ranks that hold a box
    for rank, entries in enumerate(held):
        for name, (shape, found) in entries.items():
            shapes[name] = shape
            for box in found:
                boxes[name][box].append(rank)
    for name, shape in shapes.items():
        check_complete(name, shape, boxes[name])
    holders = [(ranks, name, box) for name, found in boxes.items() for box, ranks in found.items()]
    load, mine = [0] * len(held), [[] for _ in held]
    for ranks, name, (offsets, sizes) in sorted(holders, key=lambda h: len(h[0])):
        least = min(ranks, key=load.__getitem__)
        load[least] += math.prod(sizes)
        mine[least].append((name, offsets))
    return mine


def remove(folder: Path) -> None:
    """Delete a folder so that its rest does not look like a checkpoint if this is interrupted.

    Raises CannotSave.
    """
    try:
        shutil.rmtree(folder.rename(folder.with_suffix(".partial")))
    except OSError as error:
        raise CannotSave(f"The old checkpoint {folder} could not be deleted: {error.strerror}.") from None


def remove_partial(run: Path) -> None:
    """Delete what saves and removals that were killed have left in a run; nobody else may be writing there."""
    for rest in run.glob("checkpoint-*.partial"):
        if NAMED.fullmatch(rest.stem):
            shutil.rmtree(rest, ignore_errors=True)


def save_tensors(tensors: dict, file: Path, **more) -> None:
    """Write a file of tensors to the disk itself, as open to others as its folder is. Raises OSError."""
    try:
        save_file(tensors, file, **more)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
    with contextlib.suppress(PermissionError):  # a file system that has no modes
        file.chmod(file.parent.stat().st_mode & 0o666)  # the library makes it private
    _flush(file)


def _replace(partial: Path, folder: Path) -> None:
    """Rename the finished folder; an older one of the same name stays valid, as `.old`, until then."""
    old = folder.with_suffix(".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    """Write a file to the disk itself, which must come before the rename of its folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
