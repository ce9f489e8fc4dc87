"""The plans that a search looks at: meshes, and what each leaves open; every rule that leaves some out is counted.

`PRUNED` has the rules. Up to a few ranks only other schedules and exchanges are left out of what could run.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from ..machine.arguments import checked
from ..plan import Plan
from ..schedules.registry import NAMES
from .problem import Cluster
from .share import check, rank_parts

SCHEDULES = "1f1b", "interleaved", "zb_h1", "zb_v"
PRUNED = {
    "refused": "the plan cannot run this model: Plan.check says why",
    "tensor ranks on two nodes": "its sums, four a layer, would cross the slow link",
    "tensor ranks without sequence parallelism": "beyond four ranks sp=true holds less for a quarter more bytes",
    "ZeRO-2 or 3 beside a pipeline": "they gather or sum the weights again for every micro-batch",
    "other groups of HSDP": "ZeRO-2 and 3 share among all replicas or among those of a machine",
    "stages without a layer": "they would have the embedding or the head alone, and all others wait for them",
    "short sequences cut over ranks": "beyond four ranks context parallelism is for 4,096 tokens or more, 1,024 a rank",
    "other schedules": f"tried are {', '.join(SCHEDULES)}; the others hold more, or the model twice",
    "other exchanges": "tried are kv, ring over zigzag, and heads",
    "cannot win": "it takes longer, or its weights and activations alone more bytes, than what was found",
    "numbers of ranks that cannot win": "too few for the operations, all of them working all the time",
    "needs more memory by far": "weights, gradients and activations alone; the first such plans are predicted",
}
WHOLE = 4  # ranks up to which only other schedules and exchanges are left out of what could run
FEW = 8  # devices up to which this holds for plans of so few ranks, and every number of ranks is tried


@checked(world=(1, 10**6), axes=(1, 8))
def factors(world: int, axes: int = 4) -> Iterator[tuple[int, ...]]:
    """All ways to write `world` as a product of so many sizes, in order."""
    if axes == 1:
        yield (world,)
        return
    for first in (d for d in range(1, world + 1) if world % d == 0):
        for rest in factors(world // first, axes - 1):
            yield first, *rest


@checked(devices=(1, 10**6))
def worlds(devices: int) -> list[int]:
    """How many ranks are tried: every number up to FEW, then the divisors of the cluster's size."""
    return [n for n in range(1, devices + 1) if n <= min(devices, FEW) or devices % n == 0]


@checked(world=1)
def pruned(world: int, cluster: Cluster) -> bool:
    """Whether plans of so many ranks are left out by the rules of `PRUNED`."""
    return world > WHOLE or cluster.devices > FEW


def candidates(
    config, cluster: Cluster, rows: int, length: int, rejected: Counter | None = None
) -> Iterator[Plan]:
    """The plans that are worth predicting, small worlds first; `rejected` counts those that are not, by reason."""
    rejected = Counter() if rejected is None else rejected
    for world in worlds(cluster.devices):
        for plan in proposals(config, cluster, world, rows, length, rejected):
            if runs(plan, config, rows, length, rejected):
                yield plan


def proposals(
    config, cluster: Cluster, world: int, rows: int, length: int, rejected: Counter
) -> Iterator[Plan]:
    """The same of so many ranks, before each is asked whether it runs."""
    many, node = pruned(world, cluster), cluster.network.node
    for pp, dp, cp, tp in factors(world):
        mesh = Plan(pp=pp, dp=dp, cp=cp, tp=tp)
        if many and 1 < node < tp:
            rejected["tensor ranks on two nodes"] += 1
        elif many and pp > config.n_layer:
            rejected["stages without a layer"] += 1
        elif many and cp > 1 and length < max(4096, 1024 * cp):
            rejected["short sequences cut over ranks"] += 1
        elif runs(mesh, config, rows, length, rejected):
            yield from _options(mesh, rows, many, node, rejected)


def runs(plan: Plan, config, rows: int, length: int, rejected: Counter) -> bool:
    """Whether a plan can run the model; else it is counted as refused."""
    try:
        if _idle(plan.pp, plan.schedule, plan.chunks, config):
            raise ValueError
        check(plan, config, rows, length)
    except ValueError:
        rejected["refused"] += 1
        return False
    return True


@lru_cache(maxsize=1024)
def _idle(pp: int, schedule: str, chunks: int, config) -> bool:
    """Whether a rank would hold nothing: `Plan.check` would try all other numbers of stages to name those that run."""
    if pp > config.n_layer + 2:
        return True
    held = (rank_parts(Plan(pp=pp, schedule=schedule, chunks=chunks), config, rank) for rank in range(pp))
    return not all(part.first or part.last or part.blocks for part in held)


def _options(mesh: Plan, rows: int, many: bool, node: int, rejected: Counter):
    """All that a mesh leaves open: micro-batches, schedule, ZeRO, exchange, sp, recomputation, loss."""
    most = rows // mesh.dp
    together, here = mesh.dp * mesh.cp, node // mesh.tp
    micros = [m for m in range(1, most + 1) if most % m == 0 or m in [mesh.pp * k for k in (1, 2, 4, 8)]]
    zeros = [{"zero": stage} for stage in range(4 if together > 1 else 1)]
    if many and mesh.pp > 1 and len(zeros) > 1:
        rejected["ZeRO-2 or 3 beside a pipeline"] += 2 * len(micros)
        zeros = zeros[:2]
    zeros += [{"zero": 3, "refill": True}] * (len(zeros) > 2 and mesh.pp == 1)
    if 1 < here < together and together % here == 0:  # HSDP
        zeros += [more | {"shard": here} for more in zeros[2:]]
        rejected["other groups of HSDP"] += len(micros)
    exchanges = [{}, {"layout": "zigzag", "exchange": "ring"}, {"exchange": "heads"}][: 1 + 2 * (mesh.cp > 1)]
    rejected["other exchanges"] += len(micros) * (mesh.cp > 1)
    sps = [False, True] if mesh.tp > 1 else [False]
    if many and mesh.tp > 1:
        rejected["tensor ranks without sequence parallelism"] += len(micros)
        sps = [True]
    losses = ["whole", "chunked"] if mesh.tp == 1 else ["whole"]
    tried = SCHEDULES if mesh.pp > 1 else SCHEDULES[:1]
    rejected["other schedules"] += (len(NAMES) - len(tried)) * len(micros) * (mesh.pp > 1)
    axes = Plan.said(str(mesh))
    for micro, zero, more, sp, loss, schedule in product(micros, zeros, exchanges, sps, losses, tried):
        said = axes | zero | more | {"micro": micro, "sp": sp, "loss": loss, "schedule": schedule}
        yield Plan(**said)
        if zero["zero"] < 3 or mesh.pp > 1:  # without a pipeline stage 3 runs blocks again, or refills them
            yield Plan(**said, recompute=True)
