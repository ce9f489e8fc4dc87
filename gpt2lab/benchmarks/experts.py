"""`python -m gpt2lab bench experts`: our mixture of experts beside transformers' Mixtral block, and a plain loop.

The same weights, Mixtral's router, gated experts without biases; forward and backward of one block, taking turns.
"""

import argparse
from dataclasses import replace

import torch

from ..experts.mixture import Experts, Mixture, looped
from ..model import PRESETS
from .step import medians


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--experts", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--top-k", type=int, default=2, help="how many a token asks for (default 2)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the batch (default 1024)")
    parser.add_argument("--width", type=int, default=256, help="embedding width C (default 256)")
    parser.add_argument("--hidden", type=int, default=0, help="hidden width of an expert (default 4 C)")
    parser.add_argument("--steps", type=int, default=20, help="timed turns of each (default 20)")


def run(args: argparse.Namespace) -> int:
    """Print medians and ratios, and how far outputs and gradients are apart."""
    hidden = args.hidden or 4 * args.width
    ours, theirs = pair(args.experts, args.top_k, args.width, hidden)
    x = torch.randn(1, args.tokens, args.width)
    found = [gradients(block, x) for block in (ours, theirs)]
    apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))
    contestants = [
        lambda: gradients(ours, x),
        lambda: gradients(theirs, x),
        lambda: gradients(lambda x: looped(ours, x), x),
    ]
    mine, other, loop = medians(args.steps, *contestants)
    print(
        f"{args.experts} experts, top {args.top_k}, {args.tokens} tokens, C={args.width}, H={hidden}, float32"
    )
    print(
        f"  ours {1e3 * mine:.1f} ms, transformers {1e3 * other:.1f} ms, ratio {mine / other:.2f} (measured)"
    )
    print(f"  every expert on every token {1e3 * loop:.1f} ms, ratio {mine / loop:.2f}; apart by {apart:.0e}")
    return 0


def pair(experts: int, top_k: int, width: int, hidden: int):
    """Our mixture and transformers' block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    said = Experts(experts, top_k, gated=True, hidden=hidden, balance=0.0)
    ours = Mixture(replace(PRESETS["nano"], n_embd=width, n_head=1, experts=said), 0)
    sizes = {"hidden_size": width, "intermediate_size": hidden}
    config = MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=top_k)
    config._experts_implementation = "eager"  # a loop over the experts; the grouped one is for GPUs
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
