"""Switches that make one process faster on a CPU. Each is off where its check fails, and says what it found.

None changes a result beyond float32 rounding; float64 is untouched.
"""

import os
from dataclasses import dataclass

import torch

from .fast_start import TUNABLE, ask_for_huge_pages
from .speed import matmul_rate

__all__ = ["Switch", "ask_for_huge_pages", "huge_pages", "onednn", "switch_on"]


@dataclass(frozen=True)
class Switch:
    """A switch by name, whether it is on, and what its check found."""

    name: str
    on: bool
    found: str


def huge_pages() -> Switch:
    """Ask the allocator for huge pages: a step then takes thousands of page faults instead of hundreds of thousands.

    glibc reads this when a process starts, so the command line sets it and starts itself again (`fast_start`).
    """
    on = TUNABLE in os.environ.get("GLIBC_TUNABLES", "")
    return Switch("huge pages", on, f"GLIBC_TUNABLES {'has' if on else 'lacks'} {TUNABLE}")


def onednn() -> Switch:
    """Multiply float32 matrices through oneDNN, if on this processor that is as exact as usual, and faster.

    The setting permits bfloat16; processors without bfloat16 units compute in float32 all the same, about twice as
    fast as through MKL on some, slower on others. Accepted when the error against float64 stays within four times
    that of MKL and a matrix product is at least a tenth faster.
    """
    if not torch.backends.mkldnn.is_available():
        return Switch("oneDNN matmul", False, "this torch has no oneDNN")
    setting = torch.backends.mkldnn.matmul
    before, usual, rate = setting.fp32_precision, _matmul_error(), _matmul_rate()
    try:
        setting.fp32_precision = "bf16"
        error, gain = _matmul_error(), _matmul_rate() / rate
    except RuntimeError as refusal:
        return Switch("oneDNN matmul", False, f"refused: {refusal}")
    on = error <= 4 * usual and gain >= 1.1
    if not on:
        setting.fp32_precision = before
    return Switch(
        "oneDNN matmul",
        on,
        f"error {error:.1e} against float64, usually {usual:.1e}; {gain:.2f} times as fast",
    )


def _matmul_error(size: int = 512) -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    return ((a @ b).double() - a.double() @ b.double()).abs().max().item()


def _matmul_rate() -> float:
    """Products a second of a matrix of the size of a training step's."""
    return matmul_rate(768, seconds=0.1)


def switch_on() -> list[Switch]:
    """Turn on what can be turned on in a running process; returns all switches as they are now."""
    return [huge_pages(), onednn()]
