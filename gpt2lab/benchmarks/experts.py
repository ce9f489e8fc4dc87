"""`gpt2lab bench experts`: our mixture of experts beside transformers' Mixtral block, and the products alone.

The same weights, Mixtral's router, gated experts without biases; forward and backward of one block, taking turns in one
process, so with equally many threads. transformers computes the experts in a loop ("eager"), or in one call a product
("grouped_mm"), which is its default. The products alone, on memory that is there, are what no program with these
matrices can do without. All of it twice: as torch comes, and with the oneDNN products that `gpt2lab train` turns on.
"""

import argparse
from dataclasses import replace

import torch

from ..experts.mixture import Experts, Mixture, looped
from ..machine import fast
from ..model import PRESETS
from .step import medians

QUICK = "--tokens 256 --width 64 --steps 5"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--experts", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--top-k", type=int, default=2, help="how many a token asks for (default 2)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the batch (default 1024)")
    parser.add_argument("--width", type=int, default=256, help="embedding width C (default 256)")
    parser.add_argument("--hidden", type=int, default=0, help="hidden width of an expert (default 4 C)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="timed turns of each (default 20)")


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print medians and ratios, and how far outputs and gradients are apart."""
    hidden = args.hidden or 4 * args.width
    torch.set_num_threads(args.threads)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    ours, eager = pair(args.experts, args.top_k, args.width, hidden)
    grouped = pair(args.experts, args.top_k, args.width, hidden, "grouped_mm")[1]
    x = torch.randn(1, args.tokens, args.width)
    found = [gradients(block, x) for block in (ours, eager)]
    apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))
    contestants = {
        "ours": lambda: gradients(ours, x),
        "transformers, grouped_mm": lambda: gradients(grouped, x),
        "transformers, eager": lambda: gradients(eager, x),
        "the products alone": products(ours.kept.tolist(), args.width, hidden),
        "every expert on every token": lambda: gradients(lambda x: looped(ours, x), x),
    }
    print(
        f"{args.experts} experts, top {args.top_k}, {args.tokens} tokens, C={args.width}, H={hidden}, float32, "
        f"{args.threads} threads (measured); ours and transformers' apart by {apart:.0e}"
    )
    plain = medians(args.steps, *contestants.values())
    _table("as torch comes", plain, contestants)
    switch = fast.onednn()
    if switch.on:
        quick = medians(args.steps, *contestants.values())
        _table("with oneDNN's products", quick, contestants)
        ratios = ", ".join(f"{quick[0] / other:.2f}" for other in plain[1:3])
        print(f"ours as `gpt2lab train` runs it, to transformers' two as they come: {ratios}")
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    else:
        print(f"{switch.name} stays off: {switch.found}")
    return dict(zip(contestants, plain, strict=True))


def _table(title: str, seconds: tuple[float, ...], contestants: dict) -> None:
    print(f"{title}:")
    for name, time in zip(contestants, seconds, strict=True):
        ratios = ", ".join(f"{time / other:.2f}" for other in seconds[1:3])
        print(f"  {name:28}{1e3 * time:7.1f} ms, to transformers' two {ratios}")


def products(counts: list[int], width: int, hidden: int):
    """A function that multiplies only: two products forward and four backward of each expert's `counts` rows."""
    x, dy = (torch.randn(sum(counts), width) for _ in range(2))
    inner, both = torch.randn(sum(counts), hidden), torch.randn(sum(counts), 2 * hidden)
    up, down = torch.randn(2 * hidden, width), torch.randn(width, hidden)
    outs = [torch.empty_like(t) for t in (both, x, inner, x)]
    of_weights = [(torch.empty_like(up), torch.empty_like(down)) for _ in counts]

    def multiply():
        slices = (torch.split(t, counts) for t in (x, dy, inner, both, *outs))
        for a, d, h, g, *out, (of_up, of_down) in zip(*slices, of_weights, strict=True):
            pairs = (a, up.T), (h, down.T), (d, down), (g, up), (g.T, a), (d.T, h)
            for (left, right), result in zip(pairs, (*out, of_up, of_down), strict=True):
                torch.mm(left, right, out=result)

    return multiply


def pair(experts: int, top_k: int, width: int, hidden: int, how: str = "eager"):
    """Our mixture and transformers' block with the same weights, which computes its experts in one of its ways."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    said = Experts(experts, top_k, gated=True, hidden=hidden, balance=0.0)
    ours = Mixture(replace(PRESETS["nano"], n_embd=width, n_head=1, experts=said), 0)
    sizes = {"hidden_size": width, "intermediate_size": hidden}
    config = MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=top_k)
    config._experts_implementation = how
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        for e, expert in enumerate(ours.experts.values()):
            theirs.experts.gate_up_proj[e] = torch.cat([expert.c_gate.weight, expert.c_fc.weight])
            theirs.experts.down_proj[e] = expert.c_proj.weight
    return ours, theirs


def gradients(block, x) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of x of one forward and backward; the weights get theirs too."""
    for p in block.parameters() if hasattr(block, "parameters") else ():
        p.grad = None
    x = x.clone().requires_grad_()
    y = block(x)
    y.square().sum().backward()
    return y.detach(), x.grad
