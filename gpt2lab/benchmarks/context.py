"""`python -m gpt2lab bench context`: attention over a split sequence against serial attention, forward and backward.

Each rank holds T / N tokens; the serial run uses one rank with all of them, in the same session. PyTorch's own context
parallelism is tried as a rival in the same ranks; where it cannot run on this platform, its error is printed instead.
"""

import argparse
import statistics
import time

import torch

from ..model import causal_attention
from ..parallel.context import ALIASES, EXCHANGES, Split
from ..parallel.layouts import LAYOUTS, layout
from ..ranks import comm
from ..ranks.launch import Ranks
from ..ranks.mesh import Mesh

DEFAULT = "contiguous:kv,contiguous:ring,interleaved:ring,zigzag:ring,zigzag:kv,contiguous:heads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes; the defaults take about half a minute on two cores."""
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--lengths", default="1024,2048", help="tokens (default 1024,2048; try 4096,8192)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="of a head (default 32)")
    parser.add_argument("--repeat", type=int, default=3, help="timed rounds; medians count (default 3)")
    parser.add_argument("--splits", default=DEFAULT, help="layout:exchange, with commas between")
    parser.add_argument("--no-rival", action="store_true", help="leave out PyTorch's own context parallelism")


def run(args: argparse.Namespace) -> int:
    """Print milliseconds and ratios over serial attention, and how long ranks wait for the last one."""
    worlds, lengths = ([int(x) for x in text.split(",")] for text in (args.worlds, args.lengths))
    splits = [tuple(split.split(":")) for split in args.splits.split(",")]
    for name, exchange in splits:
        if name not in LAYOUTS or ALIASES.get(exchange, exchange) not in EXCHANGES:
            raise ValueError(
                f"{name}:{exchange} is no split. Layouts: {', '.join(LAYOUTS)}. Exchanges: {', '.join(EXCHANGES)}."
            )
    for world in worlds:
        with Ranks(world, timeout=120, echo=False) as ranks:
            print(f"{world} ranks, one thread each, {args.heads} heads of {args.width}, forward and backward")
            for length in lengths:
                shape = (1, args.heads, length, args.width)
                serial = ranks.run(time_serial, shape, args.repeat)[0]
                print(
                    f"  T={length}: serial attention (torch, one thread) {1e3 * serial[0]:.0f} ms;", end=" "
                )
                print(f"serial in our blocks {1e3 * serial[1]:.0f} ms")
                for name, exchange in splits:
                    found = ranks.run(time_split, name, exchange, shape, args.repeat)
                    slowest, work = max(seconds for seconds, _ in found), [pairs for _, pairs in found]
                    print(
                        f"    {name:12}{exchange:8} {1e3 * slowest:7.0f} ms  {slowest / serial[1]:5.2f} of our "
                        f"serial, {slowest / serial[0]:5.2f} of torch's; busiest / mean {_over_mean(work):.2f}"
                    )
            if not args.no_rival:
                print(
                    "  torch.distributed.tensor.experimental.context_parallel:",
                    ranks.run(rival, lengths[0])[0],
                )
    return 0


def _over_mean(values) -> float:
    return max(values) * len(values) / sum(values)


def _median(function, repeat: int, before=lambda: None) -> float:
    times = []
    for turn in range(repeat + 1):
        before()
        start = time.perf_counter()
        function()
        if turn:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _inputs(shape):
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)).unbind()


def time_serial(rank: int, world_size: int, shape, repeat: int) -> tuple[float, float]:
    """Median seconds of serial attention on rank 0 while the others wait: torch's kernel, then our blocks."""
    from ..parallel.blockwise import block_attention

    axis, everyone = Mesh(cp=world_size)["cp"], range(shape[2])
    times = (0.0, 0.0)
    if rank == 0:
        q, k, v, grad = _inputs(shape)
        at = torch.arange(shape[2])
        runs = (
            lambda q, k, v: causal_attention(q, k, v, at),
            lambda q, k, v: block_attention(q, k, v, everyone, everyone, None, 128),
        )
        times = tuple(_median(lambda f=f: _both_ways(f, q, k, v, grad), repeat) for f in runs)
    comm.barrier(axis)
    return times


def _both_ways(attend, q, k, v, grad) -> None:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    attend(*leaves).backward(grad)


def time_split(rank: int, world_size: int, name: str, exchange: str, shape, repeat: int) -> tuple[float, int]:
    """Median seconds of one layer's attention on this rank's tokens, and the pairs it computed a round."""
    from ..parallel import blockwise

    axis = Mesh(cp=world_size)["cp"]
    split = Split(axis, name, exchange, None)
    mine = split(layout(name, shape[2], world_size).tokens)
    q, k, v, grad = (t[:, :, mine] for t in _inputs(shape))
    blockwise.work.clear()
    attend = lambda q, k, v: split.core(q, k, v, mine, None)
    seconds = _median(lambda: _both_ways(attend, q, k, v, grad), repeat, lambda: comm.barrier(axis))
    return seconds, blockwise.work["forward"] // (repeat + 1)


def rival(rank: int, world_size: int, length: int) -> str:
    """PyTorch's own context parallelism on the same ranks: `works`, or the error that it raises here."""
    import warnings

    import torch.nn.functional as F

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.experimental import context_parallel

            mesh = init_device_mesh("cpu", (world_size,))
            q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return "works"
    except Exception as error:
        return f"does not run here ({type(error).__name__}: {str(error).strip().splitlines()[0][:140]})"
