"""How fast this machine is, and how much of it a training step uses."""

import os
import platform
import statistics
import time
from contextlib import contextmanager

import torch

from ..model import GPT2Config
from . import gpus
from .arguments import checked
from .timing import finish_devices, stopwatch


@contextmanager
def using_threads(count: int):
    """Inside, torch's operations use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_rate(size: int = 0, seconds: float = 0.3, dtype=torch.float32, device="cpu") -> float:
    """Measured floating-point operations per second of a square matrix product, with the current number of threads.

    The size is by default one that fills the device: 1024, on a GPU 8192. The fastest trial counts: other processes on
    the same cores can only make it slower.
    """
    size = size or (8192 if torch.device(device).type == "cuda" else 1024)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = lambda: (torch.mm(a, b), finish_devices())
    product()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        times.append(stopwatch(product))
    return 2 * size**3 / min(times)


def copy_rate(size: int, seconds: float = 0.1) -> float:
    """Measured bytes per second of a copy in memory that touches `size` bytes: half are read, half are written.

    Short copies are repeated until they take long enough to be measured; the median of the trials counts.
    """
    source = torch.ones(size // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)  # the first write also allocates the pages
    repeats = max(1, (1 << 20) // size)
    copies = lambda: [target.copy_(source) for _ in range(repeats)]
    times, begin = [], time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        times.append(stopwatch(copies) / repeats)
    return size / statistics.median(times)


@checked(length=1)
def flops_per_token(config: GPT2Config, length: int) -> int:
    """Operations of forward and backward for one token: 6 N + 12 L C T (PaLM 2022, appendix B).

    N excludes the position embedding, which is looked up and not multiplied, and the experts that a token is not sent
    to; attention counts as if it were not causal.
    """
    weights = config.parameters - config.n_positions * config.n_embd
    if config.experts:
        weights += config.experts.added(config, active=True) - config.experts.added(config)
    return 6 * weights + 12 * config.n_layer * config.n_embd * length


def machine() -> dict[str, str]:
    """This machine: processor, cores, memory, torch, and the devices and features that torch can use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0
    cuda = "none"
    if found := gpus.available():
        cuda = f"{found} x {torch.cuda.get_device_name()}"
    slow = "emulated: --autocast is slower than float32"
    return {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{memory:.0f} GiB" if memory else "unknown",
        "torch": torch.__version__,
        "bfloat16": "in hardware" if bfloat16_in_hardware() else slow,
        "GPUs": cuda,
    }


def bfloat16_in_hardware() -> bool:
    """Whether this processor multiplies matrices in bfloat16 in hardware (AMX, AVX512-BF16, Arm's BF16)."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("amx_bf16", "amx_tile", "avx512_bf16", "bf16", "sve_bf16"))
