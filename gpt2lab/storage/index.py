"""torch's list of the tensors and boxes of a checkpoint, read without letting the file run anything.

The list is a pickle, a program that may call whatever it names. Checkpoints are downloaded and passed on, so only the
names are admitted here that torch itself writes into such a list; all of them just hold values.
"""

import math
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as meta

ADMITTED = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "bfloat16", "float16", "float32", "float64"),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows the admitted names and no others."""

    def find_class(self, module, name):
        if name not in ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of tensors needs")
        return super().find_class(module, name)


def read(file: Path, known: set[str]) -> meta.Metadata:
    """The list in a file whose boxes all lie in the `known` files beside it.

    Raises ValueError, with the file's name, for anything else; whatever the file says, none of its code has run.
    """
    try:
        with open(file, "rb") as opened:
            found = _Reader(opened).load()
        _check(found, known)
        needed = sum(
            math.prod(t.size) * t.properties.dtype.itemsize for t in found.state_dict_metadata.values()
        )
        held = sum((file.parent / name).stat().st_size for name in known)
        if needed > held:
            raise ValueError(f"its tensors have {needed:,} bytes, and the files beside it {held:,}")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing.") from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise ValueError(f"{file} is no list of tensors of a checkpoint: {error}. It was not used.") from None
    return found


def _check(found, known: set[str]) -> None:
    """Raise ValueError unless it is a list of tensors whose bytes lie in known files."""
    if type(found) is not meta.Metadata or not isinstance(found.storage_data, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    for name, tensor in found.state_dict_metadata.items():
        if not isinstance(name, str) or type(tensor) is not meta.TensorStorageMetadata:
            raise ValueError(f"{name!r} is no tensor")
        if (
            not isinstance(tensor.properties.dtype, torch.dtype)
            or type(tensor.size) is not torch.Size
            or (min(tensor.size, default=0) < 0)
        ):
            raise ValueError(f"{name!r} has no type or shape")
    for place in found.storage_data.values():
        if place.relative_path not in known:
            raise ValueError(
                f"it looks for tensors in {place.relative_path!r}, which is no file of this checkpoint"
            )
