"""A rank's result on its way to the parent: a small one through the pipe, a large one through shared memory."""

import io
import os
import pickle
from pathlib import Path

LARGE = 1_000_000  # bytes; a pipe takes half a minute for 1 GB
_shared = None  # the file of the last large result


def pack(value, spare: Path) -> dict:
    """The value as a message; the bytes of a large one lie in memory that is shared, or where there is none in `spare`.

    That memory is the rank's until it packs its next result.
    """
    global _shared
    buffers = []
    packed = _packed(value, buffers)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    if len(packed) + sum(sizes) <= LARGE:
        return {"kind": "result", "value": packed, "buffers": [bytes(b.raw()) for b in buffers]}
    _shared, file = _open(spare)
    for part in (packed, *(buffer.raw() for buffer in buffers)):
        _shared.write(part)
    _shared.flush()
    return {"kind": "result", "file": str(file), "sizes": [len(packed), *sizes]}


def _open(spare: Path):
    """A new file to write to, and the path by which the parent opens it."""
    if not hasattr(os, "memfd_create"):
        return open(spare, "wb"), spare
    handle = os.memfd_create("result", os.MFD_CLOEXEC)
    return open(handle, "wb"), Path(f"/proc/{os.getpid()}/fd/{handle}")


def unpack(message: dict):
    """What `pack` packed."""
    if "value" in message:
        return pickle.loads(message["value"], buffers=message["buffers"])
    with open(message["file"], "rb") as source:
        parts = [bytearray(size) for size in message["sizes"]]
        for part in parts:
            source.readinto(part)
    return pickle.loads(parts[0], buffers=parts[1:])


def _packed(value, buffers: list) -> bytes:
    """The value as bytes, by value where it is from a cell; `buffers` gets the memory of its large CPU tensors."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing):
            if type(thing) is torch.Tensor and _plain(thing):
                flat = thing.contiguous().view(-1).view(torch.uint8)
                return _tensor, (flat.numpy(), thing.dtype, thing.shape)
            return super().reducer_override(thing)

    out = io.BytesIO()
    Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return out.getvalue()


def _plain(tensor) -> bool:
    """Whether a tensor is nothing but large memory of this process."""
    large = tensor.numel() * tensor.element_size() > LARGE
    special = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return large and tensor.device.type == "cpu" and not tensor.is_sparse and not special


def _tensor(array, dtype, shape):
    """A tensor over the memory of an array."""
    import torch

    return torch.from_numpy(array).view(dtype).view(shape)
