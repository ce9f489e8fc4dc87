"""Switches that make one process faster on a CPU. Each is off where its check fails, and says what it found.

None changes a result beyond float32 rounding; float64 is untouched.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .huge_pages import ask_for_huge_pages
from .speed import matmul_rate

__all__ = ["Switch", "ask_for_huge_pages", "huge_pages", "onednn", "switch_on"]


@dataclass(frozen=True)
class Switch:
    """A switch by name, whether it is on, and what its check found."""

    name: str
    on: bool
    found: str


def huge_pages() -> Switch:
    """Whether a step's memory is kept for the next one, in huge pages: hundreds of thousands of page faults less.

    glibc reads this when a process starts, so the command line sets it and starts itself again (`fast_start`), and
    ranks start with it. Seen by writing 64 MB that were used before.
    """
    if platform.libc_ver()[0] != "glibc":
        return Switch("huge pages", False, "only glibc can be told to keep memory")
    import resource

    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(1 << 24).fill_(0.0)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    small = (1 << 26) // resource.getpagesize()
    return Switch("huge pages", faults < small // 4, f"64 MB take {faults} page faults, {small} at most")


def onednn(agree: Callable[[bool], bool] = bool) -> Switch:
    """Multiply float32 matrices through oneDNN, if on this processor that is as exact as usual, and faster.

    The setting permits bfloat16; processors without bfloat16 units compute in float32 all the same, about twice as
    fast as through MKL on some, slower on others. Accepted when the error against float64 stays within four times
    that of MKL and a matrix product is at least a tenth faster.

    Each rank has a stopwatch of its own, and replicas that multiply in two ways drift apart: `agree`, called once on
    every rank, turns what this one has found into what holds for all.
    """
    setting = torch.backends.mkldnn.matmul
    here, found = _exact_and_faster(setting)
    on = agree(here)
    if here != on:
        found += "; not so on every rank"
    if on:
        setting.fp32_precision = "bf16"
    return Switch("oneDNN matmul", on, found)


def _exact_and_faster(setting) -> tuple[bool, str]:
    """Whether the check is passed here, and what it has found; leaves the setting as torch starts."""
    if not torch.backends.mkldnn.is_available():
        return False, "this torch has no oneDNN"
    setting.fp32_precision = "none"  # so that a second call finds what the first one found
    usual, rate = _matmul_error(), _matmul_rate()
    try:
        setting.fp32_precision = "bf16"
        error, gain = _matmul_error(), _matmul_rate() / rate
    except RuntimeError as refusal:
        return False, f"refused: {refusal}"
    finally:
        setting.fp32_precision = "none"
    found = f"error {error:.1e} against float64, usually {usual:.1e}; {gain:.2f} times as fast"
    return error <= 4 * usual and gain >= 1.1, found


def _matmul_error(size: int = 512) -> float:
    """The largest error of a product in the three forms of a training step: x W^T, dy W, dy^T x."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    forms = ((a, b.T), (a, b), (a.T, b))
    return max(((x @ y).double() - x.double() @ y.double()).abs().max().item() for x, y in forms)


def _matmul_rate() -> float:
    """Products a second of a matrix of the size of a training step's."""
    return matmul_rate(768, seconds=0.1)


def switch_on(agree: Callable[[bool], bool] = bool) -> list[Switch]:
    """Turn on what can be turned on in a running process; returns all switches as they are now. `agree`: see onednn."""
    return [huge_pages(), onednn(agree)]
