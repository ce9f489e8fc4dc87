"""A rank's result on its way to the parent: a small one through the pipe, a large one through shared memory."""

import contextlib
import dataclasses
import io
import os
import pickle
import sys
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
        return unpickled(message["value"], message["buffers"])
    import torch

    ends = list(accumulate(size + -size % ALIGNED for size in message["sizes"]))
    whole = torch.from_file(message["file"], shared=True, size=ends[-1], dtype=torch.uint8).numpy()
    # shared memory has no name; where there is none, the next result is a new file
    with contextlib.suppress(OSError):
        os.unlink(message["file"])
    starts = zip([0, *ends], message["sizes"], strict=False)
    first, *others = (memoryview(whole)[start : start + size] for start, size in starts)
    return unpickled(first, others)


PLAIN = {
    "builtins": {"complex", "frozenset", "range", "set", "slice", "bytearray"},
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "fractions": {"Fraction"},
    "gpt2lab.machine.memory": {"Alive"},
    "gpt2lab.processes.results": {"_tensor"},
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "Tensor", "device"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.nn.parameter": {"Parameter"},
    **{f"{core}.multiarray": {"_reconstruct", "scalar"} for core in ("numpy.core", "numpy._core")},
    **{f"{core}.numeric": {"_frombuffer"} for core in ("numpy.core", "numpy._core")},
}
"""What a result is made of that may come from those whom nobody trusts, by module."""
_trusted = True


@contextlib.contextmanager
def untrusted():
    """In the block results are plain values (PLAIN, and dataclasses of the package); all else is refused."""
    global _trusted
    before, _trusted = _trusted, False
    try:
        yield
    finally:
        _trusted = before


class _Plain(pickle.Unpickler):
    """Makes plain values alone; raises UnpicklingError for what would run what came with them."""

    def find_class(self, module: str, name: str):
        """The class or function of this name, where it is one of a plain value."""
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        import torch

        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        found = getattr(sys.modules.get(module), name, None)
        if module == "torch" and isinstance(found, torch.dtype):
            return found
        ours = module.startswith("gpt2lab.") and isinstance(found, type)
        if ours and (dataclasses.is_dataclass(found) or issubclass(found, tuple)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def unpickled(data, buffers=()):
    """What was pickled; in a block of `untrusted` only where it is plain."""
    return (
        pickle.loads(data, buffers=buffers) if _trusted else _Plain(io.BytesIO(data), buffers=buffers).load()
    )


class _Pieces(list):
    """What a pickler writes, piece by piece: large bytes come as they are, without a copy."""

    def write(self, piece) -> None:
        """What picklers call."""
        self.append(piece.raw() if isinstance(piece, pickle.PickleBuffer) else piece)


def _packed(value, buffers: list) -> list:
    """The value as pieces of bytes, by value where from a cell; `buffers` gets the memory of what is large in it."""
    import torch

    from . import by_value

    class Pickler(by_value.Pickler):
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
