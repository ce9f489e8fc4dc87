"""Checkpoints of a training run: saved on one plan, resumed on any other.

A checkpoint is a folder: config.json, state.json with the step and the digests, and one file a rank with the boxes of
weights and Adam's moments that it wrote. It is whole or absent. `export` makes the Hugging Face layout of it.
"""

import math
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..machine.arguments import checked
from ..parallel.boxes import Entry
from ..ranks import comm
from ..train import Trainer, moments_of
from . import huggingface, reading, writing
from .reading import CONFIG, BadCheckpoint, all_in, look, read_state

CannotSave, is_one = writing.CannotSave, reading.is_one


def name(step: int) -> str:
    """The folder of a step's checkpoint inside its run."""
    return f"checkpoint-{step:07d}"


@checked()
def best(run: str | Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss; None where none was validated."""
    losses = {p: look(p, check_files=False)[0].get("val") for p in all_in(run)}
    validated = [p for p in losses if isinstance(losses[p], float) and math.isfinite(losses[p])]
    return min(validated, key=losses.get) if validated else None


@checked(keep=1)
class Saver:
    """Writes the checkpoints of one run; every rank makes one and calls it at the same steps.

    The `keep` newest stay, and the best by validation. With `background=True` a save only copies what the rank holds;
    the files are written while training goes on, and `finish` (or the next save) waits for them.
    """

    def __init__(self, trainer: Trainer, run: str | Path, keep: int = 2, background: bool = False):
        self.trainer, self.run, self.keep, self.background = trainer, Path(run), keep, background
        self.world, self.thread, self.failed = trainer.parallel.mesh.world, None, None
        self.gather = partial(comm.gather_objects, axis=self.world)
        if background:
            aside = replace(self.world, group=trainer.parallel.mesh.side_group())
            self.gather = partial(comm.gather_objects, axis=aside, aside=True)

    def save(self, **notes) -> Path:
        """Save the state after `trainer.steps` steps. `notes` go into state.json (`val`: the validation loss).

        Raises FloatingPointError, before anything is written, where a weight is not finite.
        """
        self.finish()
        self.trainer.check_finite()
        trainer, parallel = self.trainer, self.trainer.parallel
        folder = self.run / name(trainer.steps)
        state = {"step": trainer.steps, "plan": str(parallel.plan), "optimizer": trainer.recipe.optimizer}
        held = entries(trainer, copies=not parallel.plan.asynchronous)
        files = {CONFIG: huggingface.config_text(parallel.model)}
        if not self.background:
            self._write(folder, held, files, state | notes)
            return folder
        job = folder, {n: e.copy() for n, e in held.items()}, files, state | notes
        self.thread = threading.Thread(target=self._try, args=job, daemon=True)
        self.thread.start()
        return folder

    def finish(self) -> None:
        """Wait for the save under way. Raises what stopped it: CannotSave, on every rank, where a disk did."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def _try(self, *args) -> None:
        try:
            self._write(*args)
        except Exception as error:  # nobody sees what a thread raises: finish() does
            self.failed = error

    def _write(self, folder: Path, held: dict, files: dict, state: dict) -> None:
        writing.write(folder, held, files, state, self.world.rank, self.gather)
        if self.world.rank == 0:
            writing.remove_partial(self.run)
            for old in all_in(self.run)[: -self.keep]:
                if old != best(self.run):
                    writing.remove(old)


def save(trainer: Trainer, run: str | Path, keep: int = 2, **notes) -> Path:
    """Save the state after `trainer.steps` steps under the folder `run`; all ranks call it, each writes its part."""
    return Saver(trainer, run, keep).save(**notes)


def entries(trainer: Trainer, copies: bool = True) -> dict[str, Entry]:
    """What this rank holds of every tensor of a checkpoint: weights and, once there are any, Adam's moments.

    Without `copies`, a tied weight's second holder is left out: without a flush only the first one updates its moments.
    """
    parallel, found = trainer.parallel, {}
    for piece in parallel.sync.pieces:
        if not piece.tensor.numel() or piece.spec.tied_copy and not copies:
            continue
        state = trainer.optimizer.state.get(piece.tensor, {})
        moments = [kind for kind in moments_of(piece, trainer.recipe) if kind in state]
        kinds = {"weight": piece.tensor} | {kind: state[kind] for kind in moments}
        for kind, tensor in kinds.items():
            found[f"{kind}.{piece.name}"] = parallel.entry_of(piece, tensor)
    return found


@checked()
def load(folder: str | Path, trainer: Trainer) -> dict:
    """Give the trainer, on any plan, the weights, moments and step of a checkpoint; returns its state."""
    parallel, folder = trainer.parallel, Path(folder)
    state = read_state(folder, parallel.mesh.world)
    config = huggingface.read_config(folder)
    if config != parallel.model.config:
        raise BadCheckpoint(
            f"{folder} holds another model: {config}, not {parallel.model.config}. Resume it with its own."
        )
    if state["step"] and state["optimizer"] != trainer.recipe.optimizer:
        raise BadCheckpoint(
            f"{folder} was trained with {state['optimizer']}, whose state {trainer.recipe.optimizer} cannot go on "
            f"from. Resume with {state['optimizer']}, or start from its exported weights."
        )
    for piece in parallel.sync.pieces if state["step"] else ():
        if moments := {kind: torch.zeros_like(piece.tensor) for kind in moments_of(piece, trainer.recipe)}:
            count = torch.tensor(float(state["step"]), device=piece.tensor.device)
            trainer.optimizer.state[piece.tensor] = {"step": count, **moments}
    reading.read(folder, entries(trainer), parallel.mesh.world)
    with torch.no_grad():
        parallel.sync.updated()
    trainer.steps = state["step"]
    return state


@checked()
def export(folder: str | Path, to: str | Path) -> None:
    """Write a checkpoint's model in the Hugging Face layout, on one process, whatever plan has saved it."""
    huggingface.save(huggingface.load(folder, dtype=None), to)
