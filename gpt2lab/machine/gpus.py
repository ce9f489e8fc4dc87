"""The GPUs of this machine, and which one is a rank's.

Ranks may share GPUs where NCCL is 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1` is set. They take turns there, so it
is for seeing that a plan runs on GPUs and is right, not for speed.
"""

import ctypes
import os
from contextlib import suppress

SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
SINCE = (2, 30)


def available() -> int:
    """How many GPUs PyTorch can use.

    CUDA, which begins here, loads all kernels now. To load one at its first use (its default) it waits until the GPU is
    idle, and a receive that was posted early keeps the GPU busy (NVIDIA, CUDA programming guide, "Lazy Loading").
    """
    import torch

    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus_needed(ranks: int) -> str:
    """What so many ranks of this machine lack to compute on GPUs, in words; empty where they can."""
    found = available()
    if found >= ranks or (found and os.environ.get(SHARE) == "1" and nccl_version() >= SINCE):
        return ""
    shared = f" (ranks share GPUs with NCCL {'.'.join(map(str, SINCE))} and {SHARE}=1)" if found else ""
    return f"a GPU for each of the {ranks} ranks of this machine, and PyTorch sees {found or 'none'}{shared}"


def take_gpu(rank: int):
    """The device of the rank with this number on this machine, which this process computes on from now on."""
    import torch

    torch.cuda.set_device(gpu := torch.device("cuda", rank % available()))
    return gpu


def nccl_version() -> tuple[int, int, int]:
    """That of the library which runs (torch tells the one that it was built with); zeros where it is in none."""
    found = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    return found.value // 10000, found.value // 100 % 100, found.value % 100
