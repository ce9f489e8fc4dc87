"""What the tests of tensor and sequence parallelism run on the ranks."""

from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from gpt2lab.lessons.labs import rings
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import tensor
from gpt2lab.parallel.sequence import apply_sequence
from gpt2lab.parallel.tensor import apply_tensor, weight_gradients
from gpt2lab.planner.tensor_costs import step_bytes
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)


def tokens_and_targets(config, rows, length):
    generator = torch.Generator().manual_seed(5)
    block = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    return block[:, :-1], block[:, 1:]


def cut_model(mesh, config, sp, lean, dtype=torch.float64):
    """The model, cut over the tensor axis of the mesh."""
    model = GPT2(config).to(dtype)
    apply_tensor(model, mesh)
    if sp:
        apply_sequence(model, mesh, lean=lean)
    return model


def step_traffic(rank, world_size, config, rows, length, sp, lean):
    """Bytes sent in one forward and backward, by operation."""
    model = cut_model(Mesh(tp=world_size), config, sp, lean)
    tokens, targets = tokens_and_targets(config, rows, length)
    comm.clear_log()
    model.loss(model(tokens), targets).backward()
    return Counter({op: size for (op, _), (_, size, _) in comm.traffic().items()})


def of_a_layer(shape, rank=0, sp=False, lean=True):
    """Bytes that a rank sends for one layer and step, by formula."""
    return step_bytes(shape, 1, rank, sp, lean) - step_bytes(shape, 0, rank, sp, lean)


def kept_for_backward(model, run) -> tuple[dict[int, torch.Tensor], object]:
    """What `run` keeps for backward, one tensor of each storage, parameters not counted; and what it returns."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return kept, out


def bytes_kept(model, run) -> int:
    """Their bytes."""
    return sum(t.untyped_storage().nbytes() for t in kept_for_backward(model, run)[0].values())


def kept_of_a_layer(rank, world_size, config, rows, length, dtype, sp, lean):
    """Bytes that one block keeps for backward."""
    model = cut_model(Mesh(tp=world_size), config, sp, lean, dtype)
    mine = len(torch.arange(length).tensor_split(world_size)[rank]) if sp else length
    x = torch.randn(rows, mine, config.n_embd, dtype=dtype, requires_grad=True)
    return bytes_kept(model, lambda: model.h["0"](x, torch.arange(length)))


# --- a model whose layers compute in parts, while a ring carries the next one


class GatheredProduct(torch.autograd.Function):
    """`F.linear(all_gather(x), weight, bias)` of tokens x (B, T_r, C), in parts; it keeps x alone for backward.

    Bytes per rank: an all-gather forward, a reduce-scatter and an all-gather backward, as `lean`.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, axis, sizes):
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sizes, ctx.biased, parts = axis, sizes, bias is not None, {}
        rings.gathered(
            x, axis, sizes, lambda place, part: parts.update({place: F.linear(part, weight, bias)})
        )
        return torch.cat([parts[place] for place in range(axis.size)], 1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grads, found = grad.split(ctx.sizes, 1), []
        of_x = rings.scattered(lambda place: grads[place] @ weight, ctx.axis, ctx.sizes)
        use = lambda place, part: found.append(weight_gradients(grads[place], part, ctx.biased))
        rings.gathered(x, ctx.axis, ctx.sizes, use)
        of_weight, of_bias = zip(*found, strict=True)
        return of_x, sum(of_weight), sum(of_bias) if ctx.biased else None, None, None


class ScatteredProduct(torch.autograd.Function):
    """`reduce_scatter(F.linear(x, weight))` of x (B, T, C / n), in parts.

    Bytes per rank: a reduce-scatter forward, an all-gather backward.
    """

    @staticmethod
    def forward(ctx, x, weight, axis, sizes):
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sizes, parts = axis, sizes, x.split(sizes, 1)
        return rings.scattered(lambda place: F.linear(parts[place], weight), axis, sizes)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        parts, of_x, of_weight = x.split(ctx.sizes, 1), {}, []

        def use(place, part):
            of_x[place] = part @ weight
            of_weight.append(weight_gradients(part, parts[place], False)[0])

        rings.gathered(grad, ctx.axis, ctx.sizes, use)
        return torch.cat([of_x[place] for place in range(ctx.axis.size)], 1), sum(of_weight), None, None


def apply_rings(model) -> None:
    """Let the layers of a model that `apply_sequence` has edited compute in parts; the head stays as it is."""
    for module in model.modules():
        if isinstance(module, tensor.ColumnLinear):
            module.forward = partial(_column, module)
        if isinstance(module, tensor.RowLinear):
            module.forward = partial(_row, module)


def _column(layer, x):
    return GatheredProduct.apply(x, layer.weight, layer.bias, layer.edge.axis, layer.edge.sizes)


def _row(layer, x):
    layer.edge.length = x.size(1)
    return ScatteredProduct.apply(x, layer.weight, layer.edge.axis, layer.edge.sizes) + layer.bias
