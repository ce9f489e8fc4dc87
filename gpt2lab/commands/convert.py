"""Turn what the version before has saved, a run or one checkpoint, into the files that this version reads.

    gpt2lab convert runs/<time> runs/converted              a run with all its checkpoints
    gpt2lab train --resume runs/converted                   goes on where it ended

OLD stays as it is. Digests are compared first. Old files are pickles, programs that may call whatever they name: they
are read by torch's reader of weights, which calls nothing, and admits only the names below, as records without code.
"""

import hashlib
import io
import json
import pickletools
import re
import shutil
import struct
import zipfile
from pathlib import Path

import torch

from ..machine.options import Setting
from ..parallel.boxes import Box, Entry
from ..storage import checkpoint, writing
from ..storage.reading import BEFORE, CONFIG, STATE, BadCheckpoint, digest

ADMITTED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex StorageMeta ChunkStorageMetadata TensorProperties TensorStorageMetadata "
        "_MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
}
NAMES = [f"{module}.{name}" for module, names in ADMITTED.items() for name in names.split()]
SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"\n}\n\Z')
# what states said before they had one
WITHOUT_SEAL = {"step", "plan", "optimizer", "sha256", "options", "val"}
BESIDE = ("options.json", "log.jsonl", "job")
OPTIONS = {
    "old": Setting("a run's folder, or a checkpoint in it", Path, metavar="OLD", placed=True),
    "new": Setting("a folder that does not exist yet", Path, metavar="NEW", placed=True),
}


class Record:
    """What a list of tensors says of a thing, in place of torch's own class for it."""

    def __init__(self, *said):
        self.said = said

    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {"said": state})


def run(args) -> None:
    """Convert one checkpoint or all of a run, and say how to go on."""
    old, new = args.old, args.new
    for ending in ("", ".partial", ".old"):  # the last two are deleted where a checkpoint is written
        if (place := new.with_suffix(ending) if ending else new).exists():
            raise ValueError(f"{place} exists already. Use the name of a new folder.")
    found = [] if checkpoint.is_one(old) else checkpoint.all_in(old)
    pairs = {new / p.stem: p for p in found} or {new: old}  # a `.old` only where its successor is not there
    try:
        for target, source in pairs.items():
            entries, texts, state = read_before(source)
            writing.write(target, entries, texts, state, rank=0, gather=lambda value: [value])
            print(f"{source} (step {state['step']}, plan {state['plan']}) is now {target}")
        for name in BESIDE if found else ():
            if (old / name).exists():
                shutil.copyfile(old / name, new / name)
    except BaseException:  # half a run would look like one
        for place in (new, new.with_suffix(".partial")):
            shutil.rmtree(place, ignore_errors=True)
        raise


def read_before(folder: Path) -> tuple[dict[str, Entry], dict[str, str], dict]:
    """All tensors, the other files and the state of a checkpoint of the version before. Raises BadCheckpoint."""
    if not (folder / BEFORE).is_file():
        raise BadCheckpoint(
            f"{folder} is no checkpoint of the version before: it has no {BEFORE}. Name one, or a run."
        )
    try:
        state = _state(folder)
        return _entries(folder), {CONFIG: (folder / CONFIG).read_text()}, state
    except Exception as error:  # a damaged pickle may fail in any way
        why = "it asks for more than tensors and a list of them" if "GLOBAL" in str(error) else error
        raise BadCheckpoint(f"{folder} is damaged, so it was not converted: {why}.") from None


def _state(folder: Path) -> dict:
    """The state of a folder whose files equal their digests. Raises ValueError or OSError."""
    data = (folder / STATE).read_bytes()
    found = SEAL.search(data)
    blank = data.replace(found[1], b"0" * 64) if found else b""
    if found and hashlib.sha256(blank).hexdigest().encode() != found[1]:
        raise ValueError(f"the sha256 of {STATE} is not the one at its end")
    try:
        state = json.loads(data)
    except ValueError:
        raise ValueError(f"{STATE} is not the JSON text that was written") from None
    if not found and state.keys() - WITHOUT_SEAL:
        raise ValueError(f"{STATE} has no sha256 of itself at its end")
    state.pop("seal", None)
    files = state.pop("sha256")
    for name in sorted({*files, BEFORE, CONFIG}):
        if Path(name).name != name or digest(folder / name) != files.get(name):
            raise ValueError(f"the sha256 of {name} is not the one in {STATE}")
    return state


def _entries(folder: Path) -> dict[str, Entry]:
    """Every tensor, as the boxes in which it was saved."""
    found = _safely(_archive(older((folder / BEFORE).read_bytes())))
    entries = {name: Entry(tuple(said.size), []) for name, said in found.state_dict_metadata.items()}
    for index, place in found.storage_data.items():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it looks for tensors in {place.relative_path!r}")
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            tensor = _safely(file.read(place.length))
        entries[index.fqn].boxes.append(Box(tuple(index.offset), tuple(tensor.shape), tensor))
    return entries


def _safely(archive: bytes):
    """What torch's reader of weights finds in an archive of torch.save; nothing in it is called."""
    with torch.serialization.safe_globals([(Record, name) for name in NAMES]):
        return torch.load(io.BytesIO(archive), weights_only=True)


def _archive(pickled: bytes) -> bytes:
    """An archive as torch.save writes it, around a pickle."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3")
    return archive.getvalue()


def older(pickled: bytes) -> bytes:
    """A pickle of protocol 4 in protocol 2, which torch's reader of weights knows; it is not run.

    The older protocol has no names that are made of two texts, so every text is written where it is used.
    """
    ops = list(pickletools.genops(pickled))
    ends = [at for _, _, at in ops[1:]] + [len(pickled)]
    out, memo, count = [b"\x80\x02"], {}, 0  # in the memo: a text, or how to get what is no text
    for (code, value, at), end in zip(ops, ends, strict=True):
        if code.name == "MEMOIZE":
            memo[count] = out[-1] if isinstance(out[-1], str) else b"j" + struct.pack("<I", count)
            out += [] if isinstance(out[-1], str) else [b"r" + struct.pack("<I", count)]
            count += 1
        elif code.name == "STACK_GLOBAL":
            name, module = out.pop(), out.pop()
            out.append(f"c{module}\n{name}\n".encode())
        elif code.name in ("BINGET", "LONG_BINGET"):
            out.append(memo[value])
        elif code.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            out.append(value)
        elif code.name not in ("PROTO", "FRAME"):
            out.append(pickled[at:end])
    texts = (word.encode() if isinstance(word, str) else None for word in out)
    pairs = zip(out, texts, strict=True)
    return b"".join(w if t is None else b"X" + struct.pack("<I", len(t)) + t for w, t in pairs)
