"""Our mixture of experts beside transformers' Mixtral block, and the products alone.

The same weights, Mixtral's router, gated experts without biases; forward and backward of one block, taking turns in one
process, so with equally many threads. transformers computes the experts in a loop ("eager"), or in one call a product
("grouped_mm"), which is its default. The products alone, on memory that is there, are what no program with these
matrices can do without. All of it twice: as torch comes, and with the oneDNN products that `gpt2lab train` turns on.
"""

from dataclasses import replace

import torch

from ..experts.mixture import Experts, Mixture, looped
from ..machine import fast
from ..model import PRESETS
from ..verify import relative_error
from . import race
from .race import Contest, Heat

EAGER, GROUPED = "transformers, eager", "transformers, grouped_mm"


def run(args) -> dict[str, float]:
    """Print medians and ratios, and how far outputs and gradients are apart."""
    hidden = args.hidden or 4 * args.width
    torch.set_num_threads(args.threads)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    ours, eager = pair(args.experts, args.top_k, args.width, hidden)
    grouped = pair(args.experts, args.top_k, args.width, hidden, "grouped_mm")[1]
    x = torch.randn(1, args.tokens, args.width)
    apart = max(map(relative_error, gradients(ours, x), gradients(eager, x)))
    ways = {
        "ours": lambda: gradients(ours, x),
        GROUPED: lambda: gradients(grouped, x),
        EAGER: lambda: gradients(eager, x),
        "the products alone": products(ours.kept.tolist(), args.width, hidden),
        "every expert on every token": lambda: gradients(ours, x, looped),
    }
    facts = {"ours": {"ours and transformers' apart by": apart}}
    against = {way: (GROUPED, EAGER) for way in ways if way not in (GROUPED, EAGER)}
    raced = lambda label: race.run(
        [Heat(label, Contest(ways, facts=lambda: facts), rivals=against)], args.rounds
    )
    plain, switch = raced("{}"), fast.onednn()
    if not switch.on:
        print(f"{switch.name} stays off: {switch.found}")
        return plain
    quick = raced("{}, oneDNN")
    ratios = ", ".join(f"{quick['ours, oneDNN'] / plain[rival]:.2f}" for rival in (GROUPED, EAGER))
    print(f"ours as `gpt2lab train` runs it, to transformers' two as they come: {ratios}")
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    return plain | quick


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


def gradients(block, x, forward=lambda block, x: block(x)) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of x of one forward and backward; the weights get theirs too, anew."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = forward(block, x)
    y.square().sum().backward()
    return y.detach(), x.grad
