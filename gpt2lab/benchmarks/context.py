"""`gpt2lab bench context`: attention over a split sequence, forward and backward, against two rivals.

Each rank holds T / N tokens. Rivals are serial attention, torch's own on one rank, and PyTorch's ring attention. Its
public `context_parallel` has no rule for the CPU, so the private function inside it is called, with the CPU's kernel.
All take turns in the same ranks; the slowest rank of a round counts. How long ranks wait comes from their trace.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from ..model import GPT2Config, causal_attention
from ..parallel.context import attention, exchanges
from ..parallel.context.costs import imbalance
from ..plan import Plan
from ..processes.launch import Ranks
from ..ranks import comm, trace
from ..ranks.mesh import Mesh
from . import rivals

DEFAULT = "contiguous:kv,contiguous:ring,interleaved:ring,zigzag:ring,zigzag:kv,contiguous:heads"
SERIAL, RIVAL = "serial", "PyTorch's ring"


QUICK = "--worlds 2 --lengths 512 --splits zigzag:ring,contiguous:kv,contiguous:heads"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes; the defaults take about two minutes on two cores."""
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks (default 2 4)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="of a head (default 32)")
    parser.add_argument("--window", type=int, help="tokens that a token sees before itself (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="timed rounds; medians count (default 3)")
    parser.add_argument("--splits", default=DEFAULT, help="layout:exchange, with commas between")
    parser.add_argument("--no-rival", action="store_true", help="leave out PyTorch's ring attention")
    rivals.add_argument(parser)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print milliseconds, ratios over serial attention, waiting, and the balance of counted work."""
    splits = [tuple(split.split(":")) for split in args.splits.split(",")]
    shapes = [(1, args.heads, length, args.width) for length in args.lengths]
    for world in args.worlds:
        for shape in shapes:
            check(splits, world, shape, args.window)
    over = None if args.no_rival or args.window is not None else args.over
    seconds = {}
    for world in args.worlds:
        print(f"{world} ranks, one thread each, {args.heads} heads of {args.width}, forward and backward;")
        print(f"  {rivals.carriers(args.over)}")
        with Ranks(world, timeout=300, echo=False) as ranks:
            for shape in shapes:
                found = ranks.run(measure, splits, shape, args.window, args.repeat, over)
                summary_lines(shape[2], found)
                timed = {name: one["seconds"] for name, one in found[0].items() if "seconds" in one}
                seconds |= {f"{name}, {world} ranks, T={shape[2]}": s for name, s in timed.items()}
    return seconds


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


def summary_lines(length: int, found: list[dict]) -> None:
    """The lines of one length, from what every rank found."""
    serial = found[0][SERIAL]["seconds"]
    print(f"  T={length}: serial attention {1e3 * serial:.1f} ms")
    for name, first in found[0].items():
        if name == SERIAL:
            continue
        if "error" in first:
            print(f"    {name} does not run here: {first['error']}")
            continue
        line = f"    {name:20}{1e3 * first['seconds']:8.1f} ms, {first['seconds'] / serial:5.2f} of serial"
        if name == RIVAL:
            ours = found[0].get("zigzag:ring")
            ratio = f"; ours takes {ours['seconds'] / first['seconds']:.2f} of it" if ours else ""
            print(f"{line}{ratio}; results differ by {max(f[name]['differs'] for f in found):.0e}")
        else:
            waits = [1e3 * f[name]["wait"] for f in found]
            work = float(imbalance([f[name]["pairs"] for f in found]))
            print(f"{line}; ranks wait {min(waits):.1f} to {max(waits):.1f} ms; busiest / mean {work:.2f}")


def measure(rank: int, world_size: int, splits, shape, window, repeat: int, over: str | None) -> dict:
    """For each contestant the median seconds of a round's slowest rank, this rank's wait and the pairs it computed."""
    mesh = Mesh(cp=world_size)
    inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    serial = lambda q, k, v: causal_attention(q, k, v, torch.arange(shape[2]), window)
    contestants = {SERIAL: both_ways(serial, inputs) if rank == 0 else lambda: None}
    for name, exchange in splits:
        contestants[f"{name}:{exchange}"] = our_attention(mesh, name, exchange, inputs, window)
    found = {}
    if over:
        try:
            theirs = their_ring(rivals.rival_group(over), rank, world_size, inputs)
            found[RIVAL] = {
                "differs": difference(theirs(), our_attention(mesh, "zigzag", "ring", inputs, None)())
            }
            contestants[RIVAL] = theirs
        except Exception as error:
            found[RIVAL] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:140]}"}
    rounds = {name: [] for name in contestants}
    for turn in range(repeat + 1):
        for name, attend in contestants.items():
            if turn:  # the first round is for warming up
                rounds[name].append(one_round(attend, mesh["cp"]))
            else:
                attend()
    for name, turns in rounds.items():
        seconds, waits, pairs = (statistics.median(values) for values in zip(*turns, strict=True))
        found[name] = found.get(name, {}) | {"seconds": seconds, "wait": waits, "pairs": int(pairs)}
    return found


def one_round(attend: Callable, axis) -> tuple[float, float, int]:
    """Seconds of the slowest rank, seconds that this one waited, and the pairs it computed forward."""
    comm.barrier(axis)
    trace.clear()
    attention.work.clear()
    start = time.perf_counter()
    attend()
    took = torch.tensor(time.perf_counter() - start)
    waits = [s for s in trace.spans(with_comm=False) if s.kind == "wait"]
    inside = lambda e: any(s.start <= e.start <= s.end for s in waits)
    blocking = [e for e in comm.log if e.op == "all_to_all" and not inside(e)]  # those of heads have no span
    waited = sum(w.end - w.start for w in (*waits, *blocking))
    return comm.all_reduce(took, axis, "max").item(), waited, attention.work["forward"]


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
