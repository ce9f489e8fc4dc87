"""PyTorch's own strategies over shared memory: DDP, FSDP2, DTensor and its pipeline schedules, equal to serial."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpt2lab import Ranks, transport
from gpt2lab.verify import relative_error

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]
ROUND = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
FOLDED = ("ZBVZeroBubble", "DualPipeV")  # the first rank holds the first stage and the last
SINGLE = ("GPipe", "1F1B")  # one stage a rank
WIDTH, MICROS, ROWS = 7, 6, 12


@pytest.fixture(scope="module")
def pool():
    with Ranks(3, echo=False, timeout=60, backend="shm") as ranks:
        yield ranks


def test_data_parallel_sharded_and_tensor_parallel_strategies_equal_serial(pool):
    def work(rank, world_size):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.nn.parallel import DistributedDataParallel

        def trained(wrap):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5)).double()
            model = wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(world_size, 7, generator=generator, dtype=torch.float64)
                optimizer.zero_grad()
                mine = x[rank : rank + 1] if wrap is not alone else x
                model(mine).square().sum(1).mean().backward()
                optimizer.step()
            whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
            return [whole(p.detach()) for p in model.parameters()]

        alone = lambda model: model
        mesh = init_device_mesh("cpu", (world_size,))
        serial = trained(alone)
        worst = []
        for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
            pairs = zip(trained(wrap), serial, strict=True)
            worst += [float((a - b).abs().max()) for a, b in pairs]
        torch.manual_seed(0)
        w, x = torch.randn(10, 4, dtype=torch.float64), torch.randn(3, 10, dtype=torch.float64)
        product = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(w, mesh, [Shard(0)])
        worst.append(float((product.full_tensor() - x @ w).abs().max()))
        return max(worst)

    assert max(pool.run(work)) < 1e-14


def layers(count: int) -> nn.ModuleList:
    """One layer a stage, the same on every rank."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count))


def summed(found, wanted):
    """The loss; summed, so that micro-batches add up to the batch."""
    return (found - wanted).square().sum()


def pipelined(rank, world_size, name, bug=None):
    """The largest difference of this rank's gradients, and of the losses, from those of the serial run."""
    from torch.distributed import pipelining

    depth = world_size if name in SINGLE else 2 * world_size
    second = 2 * world_size - 1 - rank if name in FOLDED else rank + world_size
    mine = [rank] if name in SINGLE else [rank, second]
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    serial, net, group = layers(depth), layers(depth), dist.new_group(range(world_size))
    loss = summed(nn.Sequential(*serial)(x), y)
    loss.backward()

    if bug and rank == 1:
        bug(group)
    stages = [pipelining.PipelineStage(net[n], n, depth, torch.device("cpu"), group=group) for n in mine]
    build = getattr(pipelining.schedules, f"Schedule{name}")
    schedule = build(stages[0] if name in SINGLE else stages, MICROS, loss_fn=summed, scale_grads=False)
    losses, last = [], depth - 1 in mine
    schedule.step(*([x] if 0 in mine else []), **({"target": y, "losses": losses} if last else {}))
    worst = relative_error(sum(losses), loss) if last else 0.0
    for n in mine:
        for ours, theirs in zip(serial[n].parameters(), net[n].parameters(), strict=True):
            worst = max(worst, relative_error(theirs.grad, ours.grad))
    return worst


@pytest.mark.parametrize("name", ROUND + FOLDED)
def test_pipeline_schedules_equal_serial(pool, name):
    assert max(pool.run(pipelined, name)) < 1e-13


def stretch(factor, group):
    """What rank 1 sends on is multiplied by a factor; a vote, which is an integer, stays."""
    right, longer = group.send, lambda x: factor * x if x.is_floating_point() else x
    group.send = lambda tensors, *where: right([longer(x) for x in tensors], *where)


@pytest.mark.parametrize("name, factor", [("1F1B", 1.001), ("ZBVZeroBubble", 1.001), ("1F1B", math.nan)])
def test_mutant_that_sends_something_else_between_stages_is_noticed(pool, name, factor):
    assert max(pool.run(pipelined, name, partial(stretch, factor))) > 1e-6
