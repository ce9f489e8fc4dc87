"""Attention over a split sequence, forward and backward, against two rivals.

Each rank holds T / N tokens. Rivals are serial attention, torch's own on one rank, and PyTorch's ring attention. Its
public `context_parallel` has no rule for the CPU, so the private function inside it is called, with the CPU's kernel.
All take turns in the same ranks. How long ranks wait comes from their trace.
"""

import statistics
import warnings
from collections.abc import Callable

import torch

from ..machine.words import in_a_line
from ..model import GPT2Config, causal_attention
from ..parallel.context import attention, exchanges
from ..parallel.context.costs import imbalance
from ..plan import Plan
from ..ranks import comm, trace
from ..ranks.mesh import Mesh
from . import race, rivals
from .race import Contest

SERIAL, RIVAL = "serial", "PyTorch's ring"


def run(args) -> dict[str, float]:
    """Print milliseconds, ratios over serial attention, waiting, and the balance of counted work."""
    splits = [tuple(split.split(":")) for split in args.splits.split(",")]
    for one in race.each(args, "ranks", "lengths", splits=[splits]):
        check(one)
    against = dict.fromkeys(map(":".join, splits), (SERIAL, RIVAL))
    how = {"label": "{{}}, {ranks} ranks, T={lengths}", "warm_up": 1, "splits": [splits]}
    return race.over_sizes(contest, args, against, "lengths", **how)


def check(args) -> None:
    """Raise ValueError, before any rank starts, for a split that cannot be timed here."""
    width = args.heads * args.width
    config = GPT2Config(n_head=args.heads, n_embd=width, n_positions=args.lengths, window=args.window)
    if args.window is not None and args.window >= args.lengths - 1:
        raise ValueError(
            f"A window of {args.window} hides none of {args.lengths} tokens. Leave it out, or make it smaller."
        )
    for split in args.splits:
        name, exchange = split if len(split) == 2 else (split[0], "")
        exchanges.check(config, Plan(cp=args.ranks, layout=name, exchange=exchange), 1, args.lengths)
        if exchange.startswith("halo-x"):
            raise ValueError(
                f"{name}:{exchange} exchanges a layer's input, and only attention is timed here. "
                f"Use {exchange.replace('halo-x', 'halo-kv')}."
            )


def contest(rank: int, world_size: int, args) -> Contest:
    """Attention under every split, serial on rank 0, and PyTorch's.

    Facts: how long ranks wait, how evenly they compute; how far PyTorch's results are from ours, or why it has none.
    """
    mesh, length, window = Mesh(cp=world_size), args.lengths, args.window
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 1, args.heads, length, args.width, generator=generator).unbind()
    serial = lambda q, k, v: causal_attention(q, k, v, torch.arange(length), window)
    ways = {SERIAL: both_ways(serial, inputs) if rank == 0 else None}
    for name, exchange in args.splits:
        ways[f"{name}:{exchange}"] = our_attention(mesh, name, exchange, inputs, window)
    seen, facts = {name: [] for name in ways}, {}
    if window is None:
        try:
            theirs = their_ring(rivals.rival_group(args.over), rank, world_size, inputs)
            apart = difference(theirs(), our_attention(mesh, "zigzag", "ring", inputs, None)())
            facts[RIVAL], ways[RIVAL] = {"results differ by": apart}, theirs
        except Exception as found:
            why = in_a_line(found)
            facts[SERIAL] = {f"{RIVAL} does not run here:": why}

    def clear(name):
        trace.clear()
        attention.work.clear()

    def keep(name, _):
        if name in seen:
            seen[name].append((waited(), attention.work["forward"]))

    def told():
        for name in list(seen)[1:]:
            waits, pairs = (statistics.median(values) for values in zip(*seen[name], strict=True))
            balance = imbalance(comm.gather_objects(int(pairs), mesh["cp"]))
            facts[name] = {"ranks wait, ms": 1e3 * waits, "busiest / mean": f"{float(balance):.2f}"}
        return facts

    return Contest(ways, clear, keep, facts=told)


def waited() -> float:
    """Seconds that this rank waited for others since the trace was cleared."""
    blocks = lambda s: s.kind == "wait" or s.name.startswith("all_to_all")  # that of heads has no other span
    return rivals.covered(filter(blocks, trace.spans()))


def both_ways(attend: Callable, inputs) -> Callable:
    """A function that runs attention forward and backward, and returns its output and three gradients."""
    *leaves, grad = inputs

    def run():
        q, k, v = (t.detach().requires_grad_() for t in leaves)
        y = attend(q, k, v)
        y.backward(grad)
        return y.detach(), q.grad, k.grad, v.grad

    return run


def our_attention(mesh: Mesh, name: str, exchange: str, inputs, window: int | None) -> Callable:
    """Attention of this rank's tokens under one split; all ranks make it together."""
    roots = exchanges.root_axes(mesh, name) if exchange == "kv-roots" else ()
    split = exchanges.Split(mesh["cp"], name, exchange, window, roots)
    mine = split(inputs[0].size(2))
    return both_ways(lambda q, k, v: split.core(q, k, v, mine, window), [t[:, :, mine] for t in inputs])


def their_ring(group, rank: int, world_size: int, inputs) -> Callable:
    """PyTorch's ring attention, which is zigzag, on this rank's two chunks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    def kernel_backward(*, grad_out, query, key, value, out, logsumexp, is_causal):
        return attention.FLASH_BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    chunks = [t.chunk(2 * world_size, 2) for t in inputs]
    q, k, v, grad = (torch.cat((c[rank], c[-1 - rank]), 2) for c in chunks)

    def run():
        y, lse, *_ = theirs._templated_ring_attention(
            group, 2, attention.FLASH, q, k, v, is_causal=True, dropout_p=0.0
        )
        back = theirs._templated_ring_attention_backward(
            group, 2, kernel_backward, grad, "grad_out", q, k, v, y, lse, is_causal=True
        )
        return y, *back[:3]

    return run


def difference(one, other) -> float:
    """The largest difference of two runs' outputs and gradients."""
    return torch.stack([(a - b).abs().max() for a, b in zip(one, other, strict=True)]).max().item()
