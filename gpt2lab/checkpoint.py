"""Checkpoints: whole tensors by name, so that what one plan has saved any other plan can load.

A checkpoint is a folder: config.json and model.safetensors in the Hugging Face layout, optimizer.safetensors with both
moments of Adam, and state.json with the step and a digest of every file. It is written beside its place and renamed
when complete, so that it is whole or absent.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from . import pretrained
from .model import GPT2
from .ranks import comm
from .train import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = "state.json"


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def name(step: int) -> str:
    """The folder of a step's checkpoint inside its run."""
    return f"checkpoint-{step:07d}"


def all_in(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(
        p for p in Path(run).glob("checkpoint-*") if p.suffix != ".partial" and (p / STATE).exists()
    )


def save(trainer: Trainer, run: str | Path, keep: int = 2, **notes) -> Path:
    """Save the state after `trainer.steps` steps under the folder `run`; all ranks call it, rank 0 writes.

    The `keep` newest checkpoints stay. `notes` go into state.json.
    """
    parallel, folder = trainer.parallel, Path(run) / name(trainer.steps)
    weights, moments = _whole(parallel, parallel.weights()), {}
    if trainer.recipe.optimizer == "adamw":
        for kind in MOMENTS:
            held = [_moment(trainer.optimizer, p.tensor, kind) for p in parallel.sync.pieces]
            whole = _whole(parallel, parallel.gather(held))
            moments |= {f"{kind}.{n}": t.contiguous() for n, t in whole.items()}
    if parallel.mesh.rank == 0:
        model = GPT2(parallel.model.config).to(next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
        _write(folder, model, moments, {"step": trainer.steps, "plan": str(parallel.plan), **notes})
        for old in all_in(run)[:-keep]:
            shutil.rmtree(old)
    comm.barrier(parallel.mesh.world)
    return folder


def _moment(optimizer, tensor, kind: str) -> torch.Tensor:
    state = optimizer.state.get(tensor, {})
    return state[kind] if kind in state else torch.zeros_like(tensor)


def _whole(parallel, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all pipeline stages."""
    whole = {}
    for stage in comm.gather_objects(mine, parallel.mesh["pp"]):
        whole |= stage
    return whole


def _write(folder: Path, model: GPT2, moments: dict, state: dict) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pretrained.save(model, partial)
    save_file(moments, partial / "optimizer.safetensors")
    state["sha256"] = {f.name: _digest(f) for f in sorted(partial.iterdir())}
    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for file in [*partial.iterdir(), partial]:
        _flush(file)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    """Make sure that the disk has it before a rename says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_state(folder: str | Path) -> dict:
    """The state of a checkpoint, its files compared with their digests. Raises BadCheckpoint."""
    folder = Path(folder)
    if not (folder / STATE).exists():
        raise BadCheckpoint(f"{folder} is no checkpoint: it has no {STATE}.")
    state = json.loads((folder / STATE).read_text())
    for file, digest in state["sha256"].items():
        if not (folder / file).exists() or _digest(folder / file) != digest:
            raise BadCheckpoint(
                f"{folder / file} is damaged or missing: its sha256 is not the one in {STATE}."
            )
    return state


def load(folder: str | Path, trainer: Trainer) -> dict:
    """Give the trainer, on any plan, the weights, moments and step of a checkpoint; returns its state."""
    state, parallel = read_state(folder), trainer.parallel
    dtype = parallel.sync.pieces[0].tensor.dtype
    model = pretrained.load(folder, dtype)
    if model.config != parallel.model.config:
        raise BadCheckpoint(f"{folder} holds another model: {model.config}, not {parallel.model.config}.")
    parallel.load(dict(model.named_parameters()))
    moments = load_file(Path(folder) / "optimizer.safetensors")
    if moments and state["step"]:
        step = torch.tensor(float(state["step"]))
        for kind in MOMENTS:
            whole = {n.removeprefix(kind + "."): t for n, t in moments.items() if n.startswith(kind + ".")}
            for piece, value in zip(parallel.sync.pieces, parallel.scatter(whole), strict=True):
                trainer.optimizer.state[piece.tensor][kind] = value.to(dtype).clone()
                trainer.optimizer.state[piece.tensor]["step"] = step.clone()
    trainer.steps = state["step"]
    return state
