"""Sharded folders: every rank writes the boxes it holds, any rank of any other layout reads the boxes it needs.

torch.distributed.checkpoint does the work: it decides which rank writes which box (replicas share the work), checks
that the boxes make up each tensor, and on reading finds the boxes that overlap. Added here: a folder is written under
another name and renamed when complete, and a digest of every file is compared before anything is read.
"""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from . import index
from .boxes import Box
from .state import STATE, digest, parse, text, wrong_file

INDEX = ".metadata"  # torch's own list of tensors and boxes


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


class CannotSave(OSError):
    """A checkpoint that could not be written; the message says where, why, and what is still there."""


@dataclass(frozen=True)
class Entry:
    """What this rank holds of one tensor: its whole shape and the boxes, in the form that torch asks for."""

    shape: tuple[int, ...]
    boxes: list[Box]

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        return [self._item(name, box) for box in self.boxes]

    def _item(self, name: str, box: Box) -> WriteItem:
        properties = meta.TensorProperties.create_from_tensor(box.tensor)
        data = TensorWriteData(_chunk(box), properties, torch.Size(self.shape))
        return WriteItem(
            meta.MetadataIndex(name, torch.Size(box.offsets)), WriteItemType.SHARD, tensor_data=data
        )

    def __create_chunk_list__(self) -> list[meta.ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def box(self, index: meta.MetadataIndex) -> torch.Tensor:
        """The memory of the box at the index's offset."""
        return next(b.tensor for b in self.boxes if torch.Size(b.offsets) == index.offset)

    def copy(self) -> "Entry":
        """A copy with its own memory, which training does not change."""
        return Entry(self.shape, [Box(b.offsets, b.tensor.clone()) for b in self.boxes])


def _chunk(box: Box) -> meta.ChunkStorageMetadata:
    return meta.ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.size())


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index):
        return self.state_dict[index.fqn].box(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn].box(index)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, into a folder `.partial`; the coordinator renames it when every rank has written."""

    def __init__(self, folder: Path, files: dict[str, str], state: dict):
        super().__init__(folder.with_suffix(".partial"), sync_files=True)
        self.folder, self.files, self.state = folder, files, state

    def prepare_local_plan(self, plan):
        return plan  # the coordinator makes the folder later, once, when it has the plans of all ranks

    def prepare_global_plan(self, plans):
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        try:
            written = super().write_data(plan, planner)
            written.wait()
        except RuntimeError as error:
            raise _refusal(error) from None
        mine = sorted(self.path.glob(f"{plan.storage_data.prefix}*"))
        digests = {file.name: digest(file) for file in mine}
        (self.path / f"{plan.storage_data.prefix}.sha256").write_text(json.dumps(digests))
        return written

    def finish(self, metadata, results):
        super().finish(metadata, results)
        sealed = {}
        for file in self.path.glob("*.sha256"):
            sealed |= json.loads(file.read_text())
            file.unlink()
        for name, words in self.files.items():
            (self.path / name).write_text(words)
        sealed |= {name: digest(self.path / name) for name in (INDEX, *self.files)}
        state = self.state | {"sha256": dict(sorted(sealed.items()))}
        (self.path / STATE).write_text(text(state))
        for file in [*self.path.iterdir(), self.path]:
            _flush(file)
        _replace(self.path, self.folder)


class _Reader(dcp.FileSystemReader):
    """torch's reader, with the list of tensors read by `index`, which runs nothing."""

    def read_metadata(self, *_, **__):
        """The list of tensors. Raises BadCheckpoint."""
        try:
            found = index.read(Path(self.path) / INDEX, {file.name for file in Path(self.path).iterdir()})
        except ValueError as error:
            raise BadCheckpoint(str(error)) from None
        found.storage_meta = meta.StorageMeta(load_id=self.load_id)
        return found


def write(folder: Path, entries: dict[str, Entry], files: dict[str, str], state: dict, world, group) -> None:
    """Write a folder together: all ranks of `world` with their entries, over the process group `group`.

    `files` are texts that go into the folder, `state` what `read_state` gives back. Raises CannotSave on every rank.
    """
    writer = _Writer(folder, files, state)
    try:
        _quietly(
            dcp.save,
            entries,
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=group,
            no_dist=world == 1,
        )
    except (
        dcp.api.CheckpointException
    ) as error:  # a lost peer raises another error, which the launcher explains
        rank, cause = _first(error)
        shutil.rmtree(writer.path, ignore_errors=True)  # frees the space on a full disk
        raise CannotSave(
            f"The checkpoint {folder} could not be written: {cause} (rank {rank}). Older ones are as they were."
        ) from None


def _refusal(error: BaseException) -> BaseException:
    """The operating system's error, where torch's own message (a position in an archive) hides it."""
    inner = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    return inner or error


def _first(error: dcp.api.CheckpointException) -> tuple[int, str]:
    """The rank that failed first, and why, from torch's exception."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return rank, getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"


def read(folder: Path, entries: dict[str, Entry], world: int = 1) -> None:
    """Fill the boxes of the entries from a folder; with `world` > 1 all ranks call it together."""
    reader, planner = _Reader(folder), _LoadPlanner()
    try:
        _quietly(dcp.load, entries, storage_reader=reader, planner=planner, no_dist=world == 1)
    except dcp.api.CheckpointException as error:
        raise BadCheckpoint(f"{folder} cannot be read: {_first(error)[1]}.") from None


def is_sharded(folder: Path) -> bool:
    """Whether a folder was written by `write`."""
    return (folder / INDEX).exists() or (folder / STATE).exists()


def whole(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a folder whose names start with `prefix`, without it; read by this process alone.

    Whether the folder is whole says `read_state`. Raises BadCheckpoint.
    """
    shapes = _Reader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(m.size, dtype=m.properties.dtype)
        for name, m in shapes.items()
        if name.startswith(prefix)
    }
    read(folder, {n: Entry(tuple(t.shape), [Box((0,) * t.dim(), t)]) for n, t in tensors.items()})
    return {name.removeprefix(prefix): t for name, t in tensors.items()}


def read_state(folder: Path, rank: int = 0, world: int = 1, check_files: bool = True) -> tuple[dict, str]:
    """The state of a folder, and what is wrong with the files that this rank checks ("": nothing)."""
    if not (folder / STATE).is_file():
        return (
            {},
            f"{folder} is not a checkpoint: it has no {STATE}. Name a run's folder, or a checkpoint in it.",
        )
    try:
        state = parse((folder / STATE).read_bytes())
    except ValueError as error:
        return {}, f"{folder / STATE} is damaged: {error}."
    sealed = sorted(state["sha256"].items())[rank::world] if check_files else []
    return state, wrong_file(folder, sealed)


def remove(folder: Path) -> None:
    """Delete a folder so that its rest does not look like a checkpoint if this is interrupted.

    Raises CannotSave.
    """
    gone = folder.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        folder.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise CannotSave(f"The old checkpoint {folder} could not be deleted: {error.strerror}.") from None


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


def _quietly(call, *args, **kwargs):
    """Call torch without its own deprecation and environment warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        return call(*args, **kwargs)
