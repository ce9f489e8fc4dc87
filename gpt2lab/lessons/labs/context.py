"""Programs that lessons 10 and 11 time or get wrong on live ranks, besides their own code."""

import torch
import torch.nn.functional as F

from ...machine.checksum import summ
from ...model import GPT2, GPT2Config
from ...parallel.context import attention, halo
from ...parallel.context.borrow import Share
from ...parallel.context.exchanges import Split, apply_context
from ...parallel.context.layouts import layout, widths
from ...plan import Plan
from ...ranks import comm, trace
from ...ranks.mesh import Mesh
from ...verify import relative_error
from .instruments import begin, bytes_sent


def sent(numbers: int = 8) -> int:
    """How many numbers of `numbers` bytes each this rank has sent since the log was cleared."""
    return bytes_sent() // numbers


def _batch(rows: int = 3, length: int = 12):
    batch = torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(0))
    return batch[:, :-1], batch[:, 1:]


def _pair(layers: int = 1, window: int | None = None):
    config = GPT2Config(vocab_size=50, n_positions=64, n_layer=layers, n_head=4, n_embd=32, window=window)
    return GPT2(config).double(), GPT2(config).double()


def _error(serial, model, axis) -> float:
    """The largest difference of gradients, summed over ranks, relative to the largest serial one."""
    found = comm.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]), axis)
    want = torch.cat([p.grad.flatten() for p in serial.parameters()])
    return relative_error(found, want)


def edges(rank: int, world_size: int, bug: str = "none") -> tuple:
    """A step of a split model with a bug at the edges: (loss, error of its gradients, position rows trained)."""
    axis, (serial, model), (tokens, targets) = Mesh(cp=world_size)["cp"], _pair(2), _batch()
    (serial.loss(serial(tokens), targets) / targets.numel()).backward()
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size))(11)
    x, y, embed = tokens[:, mine], targets[:, mine].clone(), model.embed
    if bug == "local positions":
        model.embed = lambda x, positions, noise=None: embed(x, torch.arange(len(mine)), noise)
    if bug == "targets shifted after the split":
        y[:, -1] = -100  # the next token is on another rank: no target
    count = y.numel() if bug == "each rank divides by its own count" else targets.numel()
    loss = model.loss(model(x, mine), y) / count
    loss.backward()
    rows = model.wpe.weight.grad.norm(dim=1).nonzero().flatten().tolist()
    return comm.all_reduce(loss.detach(), axis).item(), _error(serial, model, axis), rows


def one_layer(rank: int, world_size: int, exchange: str, name: str, length: int) -> tuple:
    """A step of one layer: numbers sent forward and backward, pairs computed, error of gradients, digest of logits."""
    axis, (serial, model), tokens = Mesh(cp=world_size)["cp"], _pair(), torch.arange(length).expand(2, -1)
    plan = Plan(cp=world_size, layout=name, exchange=exchange)
    mine = apply_context(model, Mesh(cp=world_size), plan)(length)
    serial.loss(serial(tokens), tokens).backward()
    attention.work.clear()
    comm.clear_log()
    logits = model(tokens[:, mine], mine)
    forward = sent()
    model.loss(logits, tokens[:, mine]).backward()
    backward = sent() - forward
    error = _error(serial, model, axis)
    return forward, backward, dict(attention.work), error, summ(logits.detach())


def timed_layers(rank: int, world_size: int, name: str, layers: int = 5, length: int = 2048) -> list:
    """Spans of the kernels of real layers with a layout, forward and backward, nothing paced."""
    axis = Mesh(cp=world_size)["cp"]
    split = Split(axis, name, "kv", None)
    mine = split(length)
    q, k, v, grad = torch.randn(4, 1, 8, len(mine), 32)
    mlp = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(q)
    for turn in range(layers + 1):
        if turn == 1:  # the first was for warming up
            begin(axis)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y = split.core(*leaves, mine, None)
        with trace.span("MLP", kind="other"):
            mlp(y.detach().transpose(1, 2).flatten(2))
        y.backward(grad)
    return trace.spans(with_comm=False)


def checked_by_autograd(rank: int, world_size: int, way: str, after: int = 0, tokens: int = 7) -> bool:
    """`torch.autograd.gradcheck` of a halo of two rows, over the rows of all ranks.

    It moves one number of the whole sequence after the other, so that all ranks call it at the same time.
    """
    table, axis = layout("contiguous", tokens, world_size), Mesh(cp=world_size)["cp"]
    share, sizes = Share(table, axis, 2), [len(own) for own in table.positions]
    wide = [own + sum(widths(table, r, 2, after)) for r, own in enumerate(sizes)]

    def halos(x):
        own = comm.scatter_to(x, axis, sizes=sizes)
        extended = halo.halo_exchange(own, share, 2, after, dim=0, way=way)
        return comm.gather_replicated(extended, axis, sizes=wide)

    x = torch.randn(tokens, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.autograd.gradcheck(halos, x.requires_grad_(), raise_exception=False)


def attend_on_a_graph(rank: int, world_size: int, parts, q, k, v, grad) -> tuple:
    """Attention along edges: (points, rows lent, rows sent there and back, y, dQ, dK, dV) of this rank."""
    axis, mine, width = Mesh(cp=world_size)["cp"], parts[rank], q.size(-1)
    looks = wanted(parts)  # [a][b]: the points of rank b that rank a looks at; all ranks know it
    lent = [[mine.index(t) for t in looks[r][rank]] for r in range(world_size)]
    borrowed = [len(points) for points in looks[rank]]
    kv = torch.stack((k[mine], v[mine]), 1)
    comm.clear_log()
    got = comm.all_to_all([kv[rows] for rows in lent], axis, [(n, 2, width) for n in borrowed])
    held = [*mine, *(t for points in looks[rank] for t in points)]
    own, wide = q[mine].requires_grad_(), torch.cat([kv, *got]).requires_grad_()
    y = F.scaled_dot_product_attention(own, *wide.unbind(1), attn_mask=NEIGHBOURS[mine][:, held])

    dq, dwide = torch.autograd.grad(y, (own, wide), grad[mine])
    dkv, *back = dwide.split([len(mine), *borrowed])
    dkv = dkv.clone()
    home = comm.all_to_all(back, axis, [(len(rows), 2, width) for rows in lent])
    for rows, gradients in zip(lent, home, strict=True):
        dkv.index_add_(0, torch.tensor(rows, dtype=torch.long), gradients)
    return mine, sum(map(len, lent)), sent() // (2 * width), y.detach(), dq, *dkv.unbind(1)


_GRID = torch.tensor([[7, 2, 10, 4], [0, 9, 5, 11], [3, 8, 1, 6]])  # a number for each point of a grid
_PLACE = (torch.arange(12)[:, None, None] == _GRID).nonzero()[:, 1:]  # (12, 2): row and column of each number
NEIGHBOURS = (_PLACE[:, None] - _PLACE).abs().sum(-1) <= 1
"""(12, 12): whether point a looks at point b, in a grid of 3 x 4 points with mixed-up numbers."""


def wanted(parts) -> list[list[list[int]]]:
    """[a][b]: the points of rank b that points of rank a look at; empty for a rank itself."""
    looks = lambda a, t: bool(NEIGHBOURS[list(parts[a]), t].any())
    ranks = range(len(parts))
    return [[[t for t in parts[b] if a != b and looks(a, t)] for b in ranks] for a in ranks]
