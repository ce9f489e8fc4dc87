"""What each switch for speed gives: one training step, rung by rung, beside transformers' GPT2LMHeadModel.

Every rung runs in a process of its own, because huge pages are decided when a process starts; rungs take turns, and
medians count. All use fused AdamW and the same batch.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from .. import fast, speed
from ..chunked_loss import apply_chunked_loss
from ..fast_start import TUNABLE
from ..model import GPT2, PRESETS

RUNGS = ("transformers", "ours, plain", "+ chunked loss", "+ huge pages", "+ oneDNN matmul")


def add_arguments(parser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--config", choices=list(PRESETS), default="gpt2")
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="sequences in a step (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="turns of every rung (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--figure", metavar="FILE", help="also draw the ladder to a .png or .svg file")


def run(args) -> int:
    """Print the median step of every rung and its ratio to transformers'."""
    times = {rung: [] for rung in RUNGS}
    for _ in range(args.turns):
        for rung in RUNGS:
            times[rung] += measured_elsewhere(rung, args)
    medians = {rung: statistics.median(t) for rung, t in times.items()}
    print(
        f"one step of {args.config}, B={args.rows}, T={args.length}, float32, {args.threads} threads (measured)"
    )
    for rung, seconds in medians.items():
        print(f"  {rung:18}{seconds * 1e3:8.0f} ms   {seconds / medians['transformers']:.3f} of transformers")
    torch.set_num_threads(args.threads)
    fast.onednn()
    tokens = args.rows * args.length
    rate = speed.flops_per_token(PRESETS[args.config], args.length) * tokens / medians[RUNGS[-1]]
    print(
        f"  the last rung does {rate / 1e9:.0f} GFLOP/s, {rate / speed.matmul_rate():.0%} of the matmul rate here"
    )
    if args.figure:
        from ..plots import ladder, style

        style.save(ladder.ladder(medians), Path(args.figure))
    return 0


def measured_elsewhere(rung: str, args) -> list[float]:
    """Seconds of the timed steps of one rung, in a fresh process."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if RUNGS.index(rung) >= RUNGS.index("+ huge pages"):
        env["GLIBC_TUNABLES"] = TUNABLE
    words = [rung, args.config, *map(str, (args.rows, args.length, args.steps, args.threads))]
    command = [sys.executable, "-m", "gpt2lab.benchmarks.ladder", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(rung: str, config: str, rows: int, length: int, steps: int, threads: int) -> list[float]:
    """Seconds of each timed step of a rung, in this process."""
    from .step import stepper, their_model, timed

    torch.set_num_threads(threads)
    level, sizes = RUNGS.index(rung), PRESETS[config]
    tokens = torch.randint(sizes.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    if level == 0:
        model, loss = their_model(sizes, x, y)
        return timed(stepper(model, loss), steps)
    if level >= RUNGS.index("+ oneDNN matmul"):
        fast.onednn()
    model = GPT2(sizes)
    if level >= RUNGS.index("+ chunked loss"):
        apply_chunked_loss(model)
    return timed(stepper(model, lambda: model.loss(model(x), y) / y.numel()), steps)


if __name__ == "__main__":
    name, config, *numbers = sys.argv[1:]
    print(json.dumps(seconds_of(name, config, *map(int, numbers))))
