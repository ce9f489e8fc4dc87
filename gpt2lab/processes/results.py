"""A rank's result on its way to the parent: a small one through the pipe, a large one through shared memory."""

import contextlib
import os
import pickle
from itertools import accumulate
from pathlib import Path

LARGE = 1_000_000  # bytes; a pipe takes half a minute for 1 GB
ALIGNED = 64  # bytes
_shared = None  # the file of the last large result


def pack(value, spare: Path) -> dict:
    """The value as a message; the bytes of a large one lie in memory that is shared, or where there is none in `spare`.

    The rank forgets that memory when it packs its next result.
    """
    global _shared
    buffers = []
    parts = [_packed(value, buffers), *([buffer.raw()] for buffer in buffers)]
    sizes = [sum(map(len, part)) for part in parts]
    if sum(sizes) <= LARGE:
        first, *others = (b"".join(part) for part in parts)
        return {"kind": "result", "value": first, "buffers": others}
    if _shared:
        _shared.close()
    _shared, file = _open(spare)
    for part, size in zip(parts, sizes, strict=True):
        _shared.writelines([*part, bytes(-size % ALIGNED)])
    _shared.flush()
    return {"kind": "result", "file": str(file), "sizes": sizes}


def _open(spare: Path):
    """A new file to write to, and the path by which the parent opens it."""
    if not hasattr(os, "memfd_create"):
        return open(spare, "wb"), spare
    handle = os.memfd_create("result", os.MFD_CLOEXEC)
    return open(handle, "wb"), Path(f"/proc/{os.getpid()}/fd/{handle}")


def unpack(message: dict):
    """What `pack` packed. Large tensors stay where the rank has written them: nothing is copied."""
    if "value" in message:
        return pickle.loads(message["value"], buffers=message["buffers"])
    import torch

    ends = list(accumulate(size + -size % ALIGNED for size in message["sizes"]))
    whole = torch.from_file(message["file"], shared=True, size=ends[-1], dtype=torch.uint8).numpy()
    # shared memory has no name; where there is none, the next result is a new file
    with contextlib.suppress(OSError):
        os.unlink(message["file"])
    starts = zip([0, *ends], message["sizes"], strict=False)
    first, *others = (memoryview(whole)[start : start + size] for start, size in starts)
    return pickle.loads(first, buffers=others)


class _Pieces(list):
    """What a pickler writes, piece by piece: large bytes come as they are, without a copy."""

    def write(self, piece) -> None:
        """What picklers call."""
        self.append(piece.raw() if isinstance(piece, pickle.PickleBuffer) else piece)


def _packed(value, buffers: list) -> list:
    """The value as pieces of bytes, by value where from a cell; `buffers` gets the memory of what is large in it."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing):
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and _plain(thing):
                memory = pickle.PickleBuffer(thing.detach().reshape(-1).view(torch.uint8).numpy())
                return _tensor, (memory, thing.dtype, (*thing.shape,), type(thing), thing.requires_grad)
            return super().reducer_override(thing)

    out = _Pieces()
    inside = lambda buffer: memoryview(buffer).nbytes <= LARGE or buffers.append(buffer)
    Pickler(out, protocol=5, buffer_callback=inside).dump(value)
    return out


def _plain(tensor) -> bool:
    """Whether a tensor is nothing but memory of this process; torch takes a tenth of a millisecond for each."""
    strided = str(tensor.layout) == "torch.strided" and not tensor.is_quantized
    as_they_are = strided and not (tensor.is_conj() or tensor.is_neg() or vars(tensor))
    return tensor.device.type == "cpu" and as_they_are and tensor.is_leaf and tensor.numel() > 0


def _tensor(memory, dtype, shape, kind, learns):
    """A tensor over memory that holds its numbers."""
    import torch

    plain = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    return torch.nn.Parameter(plain, learns) if kind is torch.nn.Parameter else plain.requires_grad_(learns)
