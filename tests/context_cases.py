"""What the tests of sequence splitting run inside ranks: a small GPT-2, split, against the serial one."""

import itertools

import torch
from pairs import all_pairs
from planting import planting

from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.context import attention
from gpt2lab.parallel.context.exchanges import apply_context
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import relative_error

LAYOUTS = ("contiguous", "unequal", "interleaved", "zigzag")
FULL = ("qkv", "kv-allreduce", "kv", "kv-roots", "triangle", "ring", "double-ring", "heads")
HALOS = tuple(
    f"halo-{what}-{way}" for what in ("kv", "x") for way in ("sendrecv", "isend", "allgather", "alltoall")
)
ROWS, HEADS = 2, 12


def config(window=None, dropout=0.0):
    """Twelve heads, so that 2, 3 and 4 ranks can share them."""
    return GPT2Config(
        vocab_size=13, n_positions=64, n_layer=1, n_head=HEADS, n_embd=24, window=window, dropout=dropout
    )


def legal(layout: str, exchange: str, window) -> bool:
    """Halos need a window and whole slices; everything else goes with everything."""
    return not exchange.startswith("halo") or (window is not None and layout in ("contiguous", "unequal"))


def paired(exchanges, lengths, windows, layouts=LAYOUTS):
    """Legal (layout, exchange, length, window) in which every two values meet that meet in any."""
    found = all_pairs(exchanges, layouts, lengths, windows, legal=lambda ex, lay, t, w: legal(lay, ex, w))
    return [(lay, ex, t, w) for ex, lay, t, w in found]


def cases(exchanges, lengths, windows, layouts=LAYOUTS):
    """Every legal (layout, exchange, length, window)."""
    every = itertools.product(layouts, exchanges, lengths, windows)
    return [(lay, ex, t, w) for lay, ex, t, w in every if legal(lay, ex, w)]


def data(length: int):
    """Tokens and targets (B, T)."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(13, (2, ROWS, length), generator=generator)


def serial(length: int, window):
    """Logits and the summed loss's gradients of the whole model on whole sequences."""
    model = weights(GPT2(config(window)).double())
    tokens, targets = data(length)
    logits = model(tokens)
    model.loss(logits, targets).backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def weights(model):
    """Weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def split_run(mesh: Mesh, layout: str, exchange: str, length: int, window, tile=1) -> dict:
    """Errors against the serial run, and what was sent and computed, of one forward and backward on this rank."""
    axis = mesh["cp"]
    model = weights(GPT2(config(window)).double())
    plan = Plan(cp=axis.size, layout=layout, exchange=exchange)
    split = apply_context(model, mesh, plan)
    mine = split(length)
    object.__setattr__(split.share, "tile", tile)
    tokens, targets = (x[:, mine] for x in data(length))
    comm.clear_log()
    attention.work.clear()
    rows = []
    for block in model.h.values():
        block.mlp.register_forward_hook(lambda module, inputs, output: rows.append(output.size(1)))
    logits = model(tokens, mine)
    forward = sent()
    model.loss(logits, targets).backward()
    backward = tuple(b - a for a, b in zip(forward, sent(), strict=True))
    work = dict(attention.work)
    whole, expected = serial(length, window)
    grads = comm.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]), axis)
    error = relative_error(logits, whole[:, mine]) if len(mine) else 0.0
    return {
        "error": max(error, relative_error(grads, expected)),
        "sent": {"forward": forward, "backward": backward},
        "mlp rows": sum(rows),
        "work": {k: v / (ROWS * HEADS) for k, v in work.items()},
    }


def sent() -> tuple[int, int]:
    """Numbers (float64) and messages sent so far."""
    return sum(e.bytes for e in comm.log) // 8, sum(e.messages for e in comm.log)


def run_all(rank, world_size, wanted, sizes=None, mutant=None) -> list[dict]:
    """split_run of every case, with a bug planted if one is given."""
    mesh = Mesh(**(sizes or {"cp": world_size}))
    with planting(mutant):
        return [split_run(mesh, *case) for case in wanted]
