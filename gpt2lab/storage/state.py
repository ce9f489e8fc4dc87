"""state.json of a checkpoint: the step, the digests of all other files, and a digest of itself at its end.

The last one, the seal, is the sha256 of the file's own text with zeros where the seal stands. So no byte of a
checkpoint can change unnoticed, and a checkpoint stays one folder that is renamed when it is whole.
"""

import hashlib
import json
import re
from pathlib import Path

STATE = "state.json"
ZEROS = "0" * 64
SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"\n}\n\Z')
NEEDED = {"step": int, "plan": str, "optimizer": str, "sha256": dict}
BEFORE = {*NEEDED, "options", "val"}  # what files said that were written before there was a seal
FILES = (".metadata", "config.json")


def digest(file: Path) -> str:
    """The sha256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def text(state: dict) -> str:
    """The text of state.json, sealed."""
    blank = json.dumps(state | {"seal": ZEROS}, indent=2) + "\n"
    return blank.replace(ZEROS, hashlib.sha256(blank.encode()).hexdigest())


def parse(data: bytes) -> dict:
    """The state in such a text. Raises ValueError that says what is wrong with it."""
    found = SEAL.search(data)
    if found:
        blank = data[: found.start(1)] + ZEROS.encode() + data[found.end(1) :]
        if hashlib.sha256(blank).hexdigest().encode() != found[1]:
            raise ValueError("its sha256 is not the one at its end")
    try:
        state = json.loads(data)
    except ValueError:
        raise ValueError("it is not the JSON text that was written") from None
    if not isinstance(state, dict) or not (found or state.keys() <= BEFORE):
        raise ValueError("it has no digest of itself at its end")
    for name, kind in NEEDED.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"its {name!r} is missing or of another type")
    lacking = [name for name in FILES if name not in state["sha256"]]
    if lacking or state["step"] < 0 or not any(name.endswith(".distcp") for name in state["sha256"]):
        raise ValueError(f"it has no digest of {lacking[0] if lacking else 'the tensors'}")
    state.pop("seal", None)
    return state


def wrong_file(folder: Path, sealed: list[tuple[str, str]]) -> str:
    """What is wrong with the first of these (file, digest) that is missing or changed; empty where none is."""
    for name, right in sealed:
        file = folder / name
        if Path(name).name != name or not file.is_file():
            return f"{file} is missing."
        if digest(file) != right:
            return f"{file} is damaged: its sha256 is not the one in {STATE}."
    return ""
