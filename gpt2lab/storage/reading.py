"""The folder of a checkpoint: safetensors files of boxes, and JSON. It is whole or absent, and nothing in it can run.

config.json             the sizes of the model
rank0.safetensors ...   what each rank wrote: a box of a tensor under the name `weight.wte.weight@128,0`, its offsets
state.json              the step, a digest of each other file, and at the end one of itself, the seal

Digests are compared before anything is read. `writing` writes such folders.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..machine.arguments import checked
from ..parallel.boxes import Box, Entry, check_complete, fill
from ..ranks import comm
from ..ranks.mesh import Axis

STATE, CONFIG = "state.json", "config.json"
TENSORS = ".safetensors"
BEFORE = ".metadata"  # only folders of the version before have this file
ALONE = Axis()
NAMED = re.compile(r"checkpoint-([0-9]{7,})(\.old)?")
NEEDED = {"step": int, "plan": str, "optimizer": str, "sha256": dict}


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def key(name: str, offsets: tuple[int, ...]) -> str:
    """The name of a box in a file."""
    return f"{name}@{','.join(map(str, offsets))}"


def digest(file: Path) -> str:
    """The sha256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def text(state: dict) -> str:
    """The text of state.json: the state, and the digest of its text without this last entry."""
    seal = hashlib.sha256(json.dumps(state, indent=2).encode()).hexdigest()
    return json.dumps(state | {"seal": seal}, indent=2) + "\n"


def parse(data: bytes) -> dict:
    """The state in such a text. Raises ValueError that says what is wrong with it."""
    try:
        state = json.loads(data)
        state.pop("seal")
        as_written = text(state).encode() == data
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        as_written = False
    if not as_written:
        raise ValueError("it is not the text that was written, whose sha256 is at its end")
    for name, kind in NEEDED.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"its {name!r} is missing or of another type")
    files = state["sha256"]
    if state["step"] < 0 or CONFIG not in files or not any(name.endswith(TENSORS) for name in files):
        raise ValueError(f"its step is negative, or it has no digest of {CONFIG} or of the tensors")
    return state


@checked()
def all_in(run: str | Path) -> list[Path]:
    """The complete checkpoints that a run has saved, oldest first: a copy by another name is the user's own."""
    return sorted((p for p in Path(run).glob("checkpoint-*") if _age(p) and is_one(p)), key=_age)


def _age(folder: Path) -> tuple:
    """The step in a checkpoint's name, and whether it has taken the place of its `.old`; () for any other name."""
    found = NAMED.fullmatch(folder.name)
    return (int(found[1]), not found[2]) if found else ()


def is_one(folder: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (folder / STATE).is_file()


def was_one(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one."""
    return (folder / STATE).exists() or any(folder.glob(f"rank*{TENSORS}"))


def look(folder: Path, rank: int = 0, world: int = 1, check_files: bool = True) -> tuple[dict, str]:
    """The state of a folder, and what is wrong with the files that this rank checks ("": nothing)."""
    if not is_one(folder):
        why = f"is not a checkpoint: it has no {STATE}. Name a run's folder, or a checkpoint in it."
        return {}, f"{folder} {why}"
    if (folder / BEFORE).exists():
        why = "was written by the version before, whose files are no longer read. Convert its run:"
        return {}, f"{folder} {why} gpt2lab convert {folder.parent} NEW"
    try:
        state = parse((folder / STATE).read_bytes())
    except ValueError as error:
        return {}, f"{folder / STATE} is damaged: {error}."
    for name, right in sorted(state["sha256"].items())[rank::world] if check_files else ():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            return state, f"{file} is missing."
        if digest(file) != right:
            return state, f"{file} is damaged: its sha256 is not the one in {STATE}."
    return state, ""


@checked()
def read_state(folder: str | Path, world: Axis = ALONE) -> dict:
    """The state of a checkpoint whose files equal their digests; ranks of the axis `world` share the checking.

    Raises BadCheckpoint, on every rank, with the way out.
    """
    folder = Path(folder)
    state, wrong = look(folder, world.rank, world.size)
    found = [w for w in comm.gather_objects(wrong, world) if w]
    if found:
        mine = _age(folder) or (state.get("step", math.inf),)
        older = [p for p in reversed(all_in(folder.parent)) if _age(p) < mine and not look(p)[1]]
        way = "No older one is whole: train again."
        if older:
            way = f"Go on with an older one: --resume {older[0]}."
        raise BadCheckpoint(f"{found[0]} {way}" if state or older else found[0])
    return state


def stored(folder: Path) -> dict[str, list[Box]]:
    """All boxes in a folder that `read_state` has found whole, by tensor; only the heads of its files are read.

    Raises ValueError.
    """
    found = defaultdict(list)
    for name in (n for n in look(folder, check_files=False)[0]["sha256"] if n.endswith(TENSORS)):
        try:
            file = safe_open(folder / name, "pt")
            for key in file.offset_keys():
                tensor, _, at = key.partition("@")
                part, offsets = file.get_slice(key), tuple(map(int, at.split(","))) if at else ()
                sizes = tuple(part.get_shape())
                if len(offsets) != len(sizes):
                    raise ValueError(f"{key} is the name of a tensor of shape {sizes}")
                found[tensor].append(Box(offsets, sizes, part))
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{name} is no file of boxes: {error}") from None
    return found


def read(folder: Path, entries: dict[str, Entry], world: Axis = ALONE) -> None:
    """Fill the boxes of the entries, those of each rank of `world`, from a folder that `read_state` has found whole.

    Raises BadCheckpoint, on every rank and before anything is read, where it does not hold each tensor exactly once.
    """
    there, wrong = {}, ""
    try:
        there = stored(folder)
        for name, entry in entries.items():
            check_complete(name, entry.shape, [(s.offsets, s.sizes) for s in there.get(name, ())])
    except ValueError as error:
        wrong = str(error)
    found = [w for w in comm.gather_objects(wrong, world) if w]
    if found:
        raise BadCheckpoint(f"{folder} cannot be read: {found[0]}.")
    for name, entry in entries.items():
        for box in entry.boxes:
            for source in there[name]:
                fill(box, source)
