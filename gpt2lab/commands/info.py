"""What this machine is, how fast it multiplies matrices, and how big the presets are."""

import torch

from ..machine import fast, speed
from ..model import PRESETS


def add_arguments(parser) -> None:
    """The command has no options."""


def run(args) -> int:
    """Print the machine, the matmul rate for one thread and for all, and the presets."""
    for key, value in speed.machine().items():
        print(f"{key:12}{value}")
    threads = torch.get_num_threads()
    for n in sorted({1, threads}):
        torch.set_num_threads(n)
        print(
            f"{'matmul':12}{speed.matmul_rate() / 1e9:.0f} GFLOP/s on {n} thread{'s' * (n > 1)} (float32, measured)"
        )
    torch.set_num_threads(threads)
    for switch in fast.switch_on():
        print(f"{switch.name}: {'on' if switch.on else 'off'} ({switch.found})")
    for n in sorted({1, threads}):
        torch.set_num_threads(n)
        print(
            f"{'matmul':12}{speed.matmul_rate() / 1e9:.0f} GFLOP/s on {n} thread{'s' * (n > 1)} (with these, measured)"
        )
    torch.set_num_threads(threads)
    print()
    for name, c in PRESETS.items():
        print(
            f"{name:12}{c.parameters:>13,} parameters, {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}"
        )
    return 0
