"""One training step compared with transformers' GPT2LMHeadModel, and what each switch for speed gives, rung by rung.

Every rung runs in a process of its own, because huge pages are decided when a process starts; rungs take turns, so
that other load on the machine affects all of them, and medians count. All use fused AdamW and the same batch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ..machine import fast, speed
from ..machine.huge_pages import TUNABLE
from ..model import GPT2, PRESETS, GPT2Config
from ..parallel.chunked_loss import apply_chunked_loss

WARM_UP = 3  # turns until both contestants' memory has settled: the first steps take 25 % longer
RUNGS = ("transformers", "ours, plain", "+ chunked loss", "+ huge pages", "+ oneDNN matmul")


QUICK = "--config nano --rows 2 --length 64 --steps 5 --turns 1"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark; the defaults are llm.c's batch and the smallest published model."""
    parser.add_argument("--config", choices=list(PRESETS), default="gpt2")
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="sequences in a step (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="turns of every rung (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--out", default="runs/step", help="folder for the figure and the JSON file")


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print the median step of every rung, its ratio to transformers', and how near the machine's limit the last is."""
    from ..plots import ladder, style

    times = {rung: [] for rung in RUNGS}
    for _ in range(args.turns):
        for rung in RUNGS:
            times[rung] += measured_elsewhere(rung, args)
    middle = {rung: statistics.median(t) for rung, t in times.items()}
    print(
        f"one step of {args.config}, B={args.rows}, T={args.length}, float32, {args.threads} threads (measured)"
    )
    for rung, seconds in middle.items():
        print(f"  {rung:18}{seconds * 1e3:8.0f} ms   {seconds / middle['transformers']:.3f} of transformers")
    torch.set_num_threads(args.threads)
    fast.onednn()
    work = speed.flops_per_token(PRESETS[args.config], args.length) * args.rows * args.length
    rate, limit = work / middle[RUNGS[-1]], speed.matmul_rate()
    print(f"  the last rung does {rate / 1e9:.0f} GFLOP/s, {rate / limit:.0%} of the matmul rate here;")
    print(
        f"  at that rate its matrix products alone take {work / limit / middle['transformers']:.3f} of transformers"
    )
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{args.config}.json").write_text(json.dumps(times, indent=1))
    style.save_figure(ladder.ladder(middle), folder / f"{args.config}.png")
    print(f"Saved {folder / args.config}.png and .json")
    return middle


def measured_elsewhere(rung: str, args) -> list[float]:
    """Seconds of the timed steps of one rung, in a fresh process."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if RUNGS.index(rung) >= RUNGS.index("+ huge pages"):
        env["GLIBC_TUNABLES"] = TUNABLE
    words = [rung, args.config, *map(str, (args.rows, args.length, args.steps, args.threads))]
    command = [sys.executable, "-m", "gpt2lab.benchmarks.step", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(rung: str, config: str, rows: int, length: int, steps: int, threads: int) -> list[float]:
    """Seconds of each timed step of a rung, in this process."""
    torch.set_num_threads(threads)
    level, sizes = RUNGS.index(rung), PRESETS[config]
    tokens = torch.randint(sizes.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    if level == 0:
        theirs = their_model(sizes)
        return timed(
            stepper(theirs, lambda: F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())), steps
        )
    if level >= RUNGS.index("+ oneDNN matmul"):
        fast.onednn()
    ours = GPT2(sizes)
    if level >= RUNGS.index("+ chunked loss"):
        apply_chunked_loss(ours)
    return timed(stepper(ours, lambda: ours.loss(ours(x), y) / y.numel()), steps)


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


def timed(function: Callable[[], None], repeat: int) -> list[float]:
    """Seconds of each call, after one that does not count."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times[1:]


def medians(
    repeat: int, *functions: Callable[[], None], before: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Median seconds of each function; they take turns, after WARM_UP calls of each that do not count.

    `before` runs before each of them and is not timed: on several ranks, the barrier that starts them together.
    """
    times = [[] for _ in functions]
    for turn in range(repeat + WARM_UP):
        for function, of_function in zip(functions, times, strict=True):
            before()
            start = time.perf_counter()
            function()
            if turn >= WARM_UP:
                of_function.append(time.perf_counter() - start)
    return tuple(map(statistics.median, times))


if __name__ == "__main__":
    name, config, *numbers = sys.argv[1:]
    print(json.dumps(seconds_of(name, config, *map(int, numbers))))
