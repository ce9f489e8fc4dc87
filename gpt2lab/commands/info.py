"""What this machine is, how fast it multiplies matrices, and how big the presets are."""

import torch

from ..machine import fast, speed
from ..model import PRESETS

OPTIONS = {}


def run(args) -> None:
    """Print the machine, the matmul rate for one thread and for all, and the presets."""
    for key, value in speed.machine().items():
        print(f"{key:12}{value}")
    _say_rates("float32")
    for switch in (fast.huge_pages(), fast.onednn()):
        print(f"{switch.name}: {'on' if switch.on else 'off'} ({switch.found})")
    _say_rates("with these")
    print()
    for name, c in PRESETS.items():
        print(
            f"{name:12}{c.parameters:>13,} parameters, {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}"
        )


def _say_rates(how: str) -> None:
    """The rate of matrix products on one thread and on all."""
    for n in sorted({1, torch.get_num_threads()}):
        with speed.using_threads(n):
            rate = speed.matmul_rate() / 1e9
        print(f"{'matmul':12}{rate:.0f} GFLOP/s on {n} thread{'s' * (n > 1)} ({how}, measured)")
