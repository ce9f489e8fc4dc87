"""Switches that make one process faster on a CPU. Each is off where its check fails, and reports what it found.

No switch changes a result beyond float32 rounding, or any result in float64.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .speed import matmul_rate


@dataclass(frozen=True)
class Switch:
    """A switch by name, whether it is on, and what its check found."""

    name: str
    on: bool
    found: str


def huge_pages() -> Switch:
    """Whether the memory of a step is kept for the next, in huge pages, which saves many thousand page faults a step.

    glibc reads this setting when a process starts: so the command line sets it and starts itself again (`fast_start`),
    and ranks start with it. The check counts the page faults of writing 64 MB that were used before.
    """
    if platform.libc_ver()[0] != "glibc":
        return Switch("huge pages", False, "only glibc has a setting to keep memory")
    import resource

    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(1 << 24).fill_(0.0)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    small = (1 << 26) // resource.getpagesize()
    return Switch("huge pages", faults < small // 4, f"64 MB take {faults} page faults, {small} at most")


def onednn(agree: Callable[[bool], bool] = bool) -> Switch:
    """Multiply float32 matrices with oneDNN, if that is as exact as usual on this processor, and faster.

    The setting permits bfloat16; processors without bfloat16 units still compute in float32, about twice as fast as
    with MKL on some, slower on others. It is on if the error against float64 is at most four times that of MKL and a
    matrix product is at least 10 % faster.

    Ranks measure different times, but replicas that multiply differently would drift apart: `agree`, called once on
    every rank, turns this rank's finding into one for all ranks.
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
    """Whether the check passes on this rank, and what it found; restores torch's initial setting."""
    if not torch.backends.mkldnn.is_available():
        return False, "this torch has no oneDNN"
    setting.fp32_precision = "none"  # so that a second call measures the same
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


def _matmul_error() -> float:
    """The largest error of a product in the three forms of a training step: x W^T, dy W, dy^T x."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    forms = ((a, b.T), (a, b), (a.T, b))
    return max(((x @ y).double() - x.double() @ y.double()).abs().max().item() for x, y in forms)


def _matmul_rate() -> float:
    """Products a second of a matrix of the size of a training step's."""
    return matmul_rate(768, seconds=0.1)
