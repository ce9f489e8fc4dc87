"""One training step compared with transformers' GPT2LMHeadModel, and what each switch for speed gives, rung by rung.

Every rung runs in a process of its own, because huge pages are decided when a process starts; rungs take turns, so
that other load on the machine affects all of them, and medians count. All use fused AdamW and the same batch.
"""

import json
import os
import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F

from ..machine import fast, speed
from ..machine.huge_pages import TUNABLE
from ..machine.timing import stopwatch
from ..model import GPT2, PRESETS, GPT2Config
from ..parallel.chunked_loss import apply_chunked_loss
from . import race, rivals
from .race import Contest, Heat

RUNGS = ("transformers", "ours, plain", "+ chunked loss", "+ huge pages", "+ oneDNN matmul")


def run(args) -> dict[str, float]:
    """Print the median step of every rung, its ratio to transformers', and how near the machine's limit the last is."""
    from ..plots.benchmarks import ladder

    times = {rung: [] for rung in RUNGS}
    ways = {rung: partial(measured_elsewhere, rung, args) for rung in RUNGS}
    contest = Contest(ways, own=True, after=lambda rung, seconds: times[rung].extend(seconds))
    work = speed.flops_per_token(PRESETS[args.config], args.length) * args.rows * args.length
    rates = dict.fromkeys(RUNGS, (work / 1e9, "GFLOP/s"))
    heat = Heat("{}", contest, rivals=dict.fromkeys(RUNGS[1:], RUNGS[:1]), work=rates)
    middle = race.run([heat], args.rounds, warm_up=0)
    torch.set_num_threads(args.threads)
    fast.onednn()
    limit = work / speed.matmul_rate()
    print(f"  at the matmul rate here the last rung would take {limit / middle[RUNGS[-1]]:.0%} of its time;")
    print(f"  its matrix products alone take {limit / middle[RUNGS[0]]:.3f} of transformers")
    race.save_race(args.out, args.config, times, ladder(middle))
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
    x, y = rivals.random_batch(sizes, rows, length)
    model = GPT2(sizes) if "ours, plain" in reached else their_model(sizes)
    loss = lambda: model.loss(model(x), y) / y.numel()
    if rung == "transformers":
        loss = lambda: F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
    if "+ chunked loss" in reached:
        apply_chunked_loss(model)
    if "+ oneDNN matmul" in reached:
        fast.onednn()
    step = rivals.training_step(loss, rivals.fused_adamw(model.parameters()))
    return [stopwatch(step) for _ in range(steps + 1)][1:]  # the first one makes the optimizer's state


def their_model(config: GPT2Config):
    """transformers' GPT2LMHeadModel of these sizes without dropout."""
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    sizes = {n: getattr(config, n) for n in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(TheirConfig(**sizes, **off))


if __name__ == "__main__":
    name, config, *numbers = sys.argv[1:]
    print(json.dumps(seconds_of(name, config, *map(int, numbers))))
