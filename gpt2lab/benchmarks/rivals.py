"""What races share: a batch, a step of ours and of PyTorch's, the backend that carries theirs, and how spans add up."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..model import GPT2Config
from ..plan import Parallel, Plan, build
from ..planner import metrics
from ..ranks import trace
from ..ranks.mesh import Mesh
from ..verify import relative_error


def rival_group(over: str) -> dist.ProcessGroup:
    """A group of all ranks on the named backend; all ranks call this together."""
    return dist.new_group(backend=over)


def rival_mesh(over: str):
    """The same as a device mesh of one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(rival_group(over), "cpu")


def random_batch(
    config: GPT2Config, rows: int, length: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (rows, length); every token has a target."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def fused_adamw(parameters) -> torch.optim.Optimizer:
    """What makes every update in a race: fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def training_step(loss: Callable[[], torch.Tensor], optimizer, sync=None) -> Callable[[], None]:
    """A function that does one step: forward, backward, the sum of our gradients by `sync`, update.

    PyTorch's strategies sum within backward. Gradients are dropped at the end: while the other contestant runs, their
    memory is needed.
    """

    def step():
        if sync:
            sync.last_micro()
        with trace.span("forward", "forward"):
            value = loss()
        with trace.span("backward", "backward"):
            value.backward()
        if sync:
            with trace.span("finish", "wait"):
                sync.finish()
        with trace.span("update", "update"):
            optimizer.step()
            if sync:
                sync.updated()
        optimizer.zero_grad()

    return step


def our_step(plan: str, config: GPT2Config, x, y, total: int) -> tuple[Parallel, Callable[[], None]]:
    """The model as a plan without a pipeline spreads it, and its step on this rank's x and y (B, T)."""
    plan = Plan.parse(plan)
    parallel = build(plan, config, Mesh(**plan.axes), torch.get_default_dtype())
    loss = lambda: parallel.model.loss(parallel.model(x), y) / total
    optimizer = fused_adamw([piece.tensor for piece in parallel.sync.pieces])
    return parallel, training_step(loss, optimizer, parallel.sync)


def covered(spans) -> float:
    """Seconds in which one of a rank's spans is under way, or more of them."""
    return sum(end - start for stretches in metrics.busy(spans).values() for start, end in stretches)


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The fact of two contestants' gradients: the largest relative difference, tensor by tensor."""
    return {"gradients differ by": max(relative_error(g, theirs[name]) for name, g in ours.items())}
