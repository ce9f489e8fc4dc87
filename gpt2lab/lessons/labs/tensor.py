"""What lesson 06 runs beside its own code: a second form with other messages, planted bugs, paced sums."""

import torch
import torch.nn.functional as F

from ...parallel import sequence, tensor
from ...ranks import comm, paced, trace
from ...ranks.mesh import Mesh
from .instruments import asleep, bytes_sent, differing


def gelu_slope(z: torch.Tensor) -> torch.Tensor:
    """The derivative of gelu at z."""
    z = z.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(z).sum(), z)[0]


def columns_only(rank, world_size, x, weights, seed=1.0, summed=True):
    """Every matrix cut by columns: the output, this rank's gradients, `summed` or not, and bytes sent forward."""
    axis, gather = Mesh(tp=world_size)["tp"], comm.all_gather if summed else comm.gather_replicated
    mine = [w.tensor_split(world_size, 1)[rank].clone().requires_grad_() for w in weights]
    comm.clear_log()
    for w in mine:
        x = gather(F.gelu(x @ w), axis, 1)
    sent = bytes_sent()
    x.square().sum().backward(torch.tensor(seed))
    return x.detach(), [w.grad for w in mine], sent


def _bias_everywhere(self, x):
    return self.edge.leave(F.linear(x, self.weight) + self.bias)


BUGS = {
    "bias added n times": (tensor.RowLinear, "forward", _bias_everywhere),
    "f is missing": (tensor.Edge, "enter", lambda self, x: x),
    "g sums backward as well": (
        tensor.Edge,
        "leave",
        lambda self, x: comm.copy_to(comm.reduce_from(x, self.axis), self.axis),
    ),
    "norms never summed": (sequence, "_partial", lambda axis, *modules, biases=(): None),
}
"""Wrong lines by name: where they stand, and what stands there instead."""


def noticed(ranks, plan: str, config, *bugs: str) -> list[str]:
    """Which checks of `verify` notice each bug, planted on live `ranks`."""
    found = {bug: differing(ranks, BUGS[bug], plan, config, 7, 11) for bug in bugs}
    return [f"{bug}: noticed by {names or 'nobody'}" for bug, names in found.items()]


def three_layers_backward(rank, world_size, overlap: bool):
    """Spans of a paced backward of three column-parallel layers, sums beside the weights' gradients or not."""
    axis, grad = Mesh(tp=world_size)["tp"], torch.ones(64, 1024, dtype=torch.float32)
    comm.all_reduce(grad, axis)  # connect, and begin together
    trace.clear()
    with paced.use(paced.Link(latency=0.001, bandwidth=30e6)):
        for layer in (2, 1, 0):
            asleep(f"dX{layer}", "backward", 0.02)
            under_way = comm.all_reduce(grad, axis, async_op=True)
            if not overlap:
                grad = under_way.wait()
            asleep(f"dW{layer}", "weight", 0.02)
            if overlap:
                grad = under_way.wait()
    return trace.spans()
