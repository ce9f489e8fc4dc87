"""`python -m gpt2lab bench step`: one training step of GPT-2 beside transformers' in the same run; generation speed.

Both models take turns, so that a busy moment of the machine hits both; medians count. Both use fused AdamW.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .. import speed
from ..generate import generate
from ..model import GPT2, PRESETS, GPT2Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark; the defaults are llm.c's batch and the smallest published model."""
    parser.add_argument("--config", choices=list(PRESETS), default="gpt2")
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="sequences in a step (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each model (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default 32; 0: none)")


def run(args: argparse.Namespace) -> int:
    """Print step times, their ratio, the share of the measured matmul rate, and tokens/s of generation."""
    torch.set_num_threads(args.threads)
    config = PRESETS[args.config]
    ours, theirs = step_times(config, args.rows, args.length, args.steps)
    work = speed.flops_per_token(config, args.length) * args.rows * args.length
    share = work / ours / speed.matmul_rate()
    print(f"one step of {args.config}, B={args.rows}, T={args.length}, float32, {args.threads} threads")
    print(f"  ours         {1e3 * ours:8.0f} ms   {share:.0%} of the measured matmul rate")
    print(f"  transformers {1e3 * theirs:8.0f} ms   ratio ours / theirs {ours / theirs:.3f}")
    if args.tokens:
        fast, slow = generation_speed(config, args.tokens)
        print(
            f"  generating {args.tokens} tokens after {args.tokens}: {fast:.1f} tokens/s with the cache, "
            f"{slow:.1f} without"
        )
    return 0


def step_times(config: GPT2Config, rows: int, length: int, steps: int) -> tuple[float, float]:
    """Median seconds of one training step: our model's and that of transformers' GPT2LMHeadModel."""
    ours = GPT2(config)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    return medians(
        steps,
        stepper(ours, lambda: ours.loss(ours(x), y) / y.numel()),
        stepper(*their_model(config, x, y)),
    )


def their_model(config: GPT2Config, x: torch.Tensor, y: torch.Tensor):
    """transformers' GPT2LMHeadModel of these sizes without dropout, and a function that gives its loss on x, y."""
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    sizes = {n: getattr(config, n) for n in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    theirs = GPT2LMHeadModel(TheirConfig(**sizes, **off))
    return theirs, lambda: F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())


def timed(function: Callable[[], None], repeat: int) -> list[float]:
    """Seconds of each call, after one that does not count."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times[1:]


def stepper(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A function that does one training step: gradients dropped, forward, backward, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def medians(repeat: int, *functions: Callable[[], None]) -> tuple[float, ...]:
    """Median seconds of each function; they take turns, after one call of each that does not count."""
    times = [[] for _ in functions]
    for turn in range(repeat + 1):
        for function, of_function in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if turn:
                of_function.append(time.perf_counter() - start)
    return tuple(map(statistics.median, times))


def generation_speed(config: GPT2Config, tokens: int) -> tuple[float, float]:
    """Tokens a second after a prompt of as many tokens as are generated: with the cache, and without."""
    model, prompt = GPT2(config), [[1] * tokens]
    with_cache = lambda: generate(model, prompt, tokens, stop=None)
    without = lambda: generate(model, prompt, tokens, stop=None, cache=False)
    return tuple(tokens / seconds for seconds in medians(1, with_cache, without))
