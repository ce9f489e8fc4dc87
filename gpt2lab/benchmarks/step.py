"""One training step compared with transformers' GPT2LMHeadModel, and what each switch for speed gives, rung by rung.

Every rung runs in a process of its own, because huge pages are decided when a process starts; rungs take turns, so
that other load on the machine affects all of them, and medians count. All use fused AdamW and the same batch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..machine import fast, speed
from ..machine.huge_pages import TUNABLE
from ..machine.timing import stopwatch
from ..model import GPT2, PRESETS, GPT2Config
from ..parallel.chunked_loss import apply_chunked_loss
from . import race
from .race import Contest, Heat

RUNGS = ("transformers", "ours, plain", "+ chunked loss", "+ huge pages", "+ oneDNN matmul")


def run(args) -> dict[str, float]:
    """Print the median step of every rung, its ratio to transformers', and how near the machine's limit the last is."""
    from ..plots import ladder

    print(
        f"one step of {args.config}, B={args.rows}, T={args.length}, float32, {args.threads} threads (measured)"
    )
    times = {rung: [] for rung in RUNGS}
    ways = {rung: partial(measured_elsewhere, rung, args) for rung in RUNGS}
    contest = Contest(ways, own=True, after=lambda rung, seconds: times[rung].extend(seconds))
    middle = race.run([Heat("{}", lambda: contest, rivals=RUNGS[:1])], args.rounds, warm_up=0)
    torch.set_num_threads(args.threads)
    fast.onednn()
    work = speed.flops_per_token(PRESETS[args.config], args.length) * args.rows * args.length
    rate, limit = work / middle[RUNGS[-1]], speed.matmul_rate()
    print(f"  the last rung does {rate / 1e9:.0f} GFLOP/s, {rate / limit:.0%} of the matmul rate here;")
    print(
        f"  at that rate its matrix products alone take {work / limit / middle['transformers']:.3f} of transformers"
    )
    race.save_race(args.out, args.config, times, ladder.ladder(middle))
    return middle


def measured_elsewhere(rung: str, args) -> list[float]:
    """Seconds of the timed steps of one rung, in a fresh process."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if RUNGS.index(rung) >= RUNGS.index("+ huge pages"):
        env["GLIBC_TUNABLES"] = TUNABLE
    words = [rung, args.config, *map(str, (args.rows, args.length, args.iterations, args.threads))]
    command = [sys.executable, "-m", __name__, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(rung: str, config: str, rows: int, length: int, steps: int, threads: int) -> list[float]:
    """Seconds of each timed step of a rung, in this process."""
    torch.set_num_threads(threads)
    reached, sizes = RUNGS[: RUNGS.index(rung) + 1], PRESETS[config]
    tokens = torch.randint(sizes.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    model = GPT2(sizes) if "ours, plain" in reached else their_model(sizes)
    loss = lambda: model.loss(model(x), y) / y.numel()
    if rung == "transformers":
        loss = lambda: F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    if "+ chunked loss" in reached:
        apply_chunked_loss(model)
    if "+ oneDNN matmul" in reached:
        fast.onednn()
    step = stepper(model, loss)
    return [stopwatch(step) for _ in range(steps + 1)][1:]  # the first one makes the optimizer's state


def their_model(config: GPT2Config):
    """transformers' GPT2LMHeadModel of these sizes without dropout."""
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    sizes = {n: getattr(config, n) for n in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(TheirConfig(**sizes, **off))


def stepper(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A function that does one training step: gradients dropped, forward, backward, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    name, config, *numbers = sys.argv[1:]
    print(json.dumps(seconds_of(name, config, *map(int, numbers))))
