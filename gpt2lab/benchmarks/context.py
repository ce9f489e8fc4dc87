"""Attention over a split sequence, forward and backward, against two rivals.

Each rank holds T / N tokens. Rivals are serial attention, torch's own on one rank, and PyTorch's ring attention. Its
public `context_parallel` has no rule for the CPU, so the private function inside it is called, with the CPU's kernel.
All take turns in the same ranks. How long ranks wait comes from their trace.
"""

import statistics
import warnings
from collections.abc import Callable

import torch

from ..model import GPT2Config, causal_attention
from ..parallel.context import attention, exchanges
from ..parallel.context.costs import imbalance
from ..plan import Plan
from ..ranks import comm, trace
from ..ranks.mesh import Mesh
from . import race, rivals
from .race import Contest, Heat

SERIAL, RIVAL = "serial", "PyTorch's ring"


def run(args) -> dict[str, float]:
    """Print milliseconds, ratios over serial attention, waiting, and the balance of counted work."""
    splits = [tuple(split.split(":")) for split in args.splits.split(",")]
    shapes = [(1, args.heads, length, args.width) for length in args.lengths]
    for world in args.ranks:
        for shape in shapes:
            check(splits, world, shape, args.window)
    over = None if args.no_rival or args.window is not None else args.over
    print(
        f"one thread a rank, {args.heads} heads of {args.width}, forward and backward; {rivals.carriers(args.over)}"
    )
    return race.run(heats(args.ranks, shapes, (splits, args.window, over)), args.rounds, warm_up=1)


def heats(worlds: list[int], shapes: list[tuple], given: tuple):
    """A heat for each number of ranks and length."""
    for n in worlds:
        for shape in shapes:
            yield Heat(f"{{}}, {n} ranks, T={shape[2]}", contest, (shape, *given), n, (SERIAL, RIVAL), notes)


def check(splits, world: int, shape, window: int | None) -> None:
    """Raise ValueError, before any rank starts, for a split that cannot be timed here."""
    _, heads, length, width = shape
    config = GPT2Config(n_head=heads, n_embd=heads * width, n_positions=length, window=window)
    for name, exchange in (split if len(split) == 2 else (split[0], "") for split in splits):
        exchanges.check(config, Plan(cp=world, layout=name, exchange=exchange), 1, length)
        if exchange.startswith("halo-x"):
            raise ValueError(
                f"{name}:{exchange} exchanges a layer's input, and only attention is timed here. "
                f"Use {exchange.replace('halo-x', 'halo-kv')}."
            )


def notes(found: race.Outcome) -> dict[str, str]:
    """How long ranks wait, how evenly they compute; how far PyTorch's results are from ours, or why it has none."""
    said = {}
    for name in found.times.keys() - {SERIAL, RIVAL}:
        waits, pairs = zip(*(middle(of_rank[name]) for of_rank in found.more), strict=True)
        said[name] = (
            f"ranks wait {1e3 * min(waits):.1f} to {1e3 * max(waits):.1f} ms; "
            f"busiest / mean {float(imbalance([int(n) for n in pairs])):.2f}"
        )
    differs, error = zip(*found.facts, strict=True)
    said[RIVAL] = f"results differ by {max(differs):.0e}"
    return said | ({SERIAL: f"{RIVAL} does not run here: {error[0]}"} if error[0] else {})


def middle(turns: list[tuple[float, int]]) -> list[float]:
    """The medians of what was waited and computed in each turn."""
    return [statistics.median(values) for values in zip(*turns, strict=True)]


def contest(rank: int, world_size: int, shape, splits, window: int | None, over: str | None) -> Contest:
    """Attention under every split, serial on rank 0, and PyTorch's; facts: how far it differs, why it does not run."""
    mesh = Mesh(cp=world_size)
    inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    serial = lambda q, k, v: causal_attention(q, k, v, torch.arange(shape[2]), window)
    ways = {SERIAL: both_ways(serial, inputs) if rank == 0 else lambda: None}
    for name, exchange in splits:
        ways[f"{name}:{exchange}"] = our_attention(mesh, name, exchange, inputs, window)
    differs, error = 0.0, ""
    if over:
        try:
            theirs = their_ring(rivals.rival_group(over), rank, world_size, inputs)
            differs = difference(theirs(), our_attention(mesh, "zigzag", "ring", inputs, None)())
            ways[RIVAL] = theirs
        except Exception as found:
            error = f"{type(found).__name__}: {str(found).splitlines()[0][:140]}"

    def clear(name):
        trace.clear()
        attention.work.clear()

    after = lambda *_: (waited(), attention.work["forward"])
    return Contest(ways, clear, after, facts=lambda: (differs, error))


def waited() -> float:
    """Seconds that this rank waited for others since the trace was cleared."""
    waits = [s for s in trace.spans(with_comm=False) if s.kind == "wait"]
    inside = lambda e: any(s.start <= e.start <= s.end for s in waits)
    blocking = [e for e in comm.log if e.op == "all_to_all" and not inside(e)]  # those of heads have no span
    return sum(w.end - w.start for w in (*waits, *blocking))


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
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
