"""The decision path: questions in an order in which a reader can answer them, and the plan that they lead to."""

from dataclasses import dataclass, replace

from ...model import GPT2Config
from ...plan import Plan
from ...planner.memory import memory
from ...planner.problem import Cluster


@dataclass(frozen=True)
class Workload:
    """A model, a cluster and a batch of `rows` sequences of `length` tokens; numbers of `itemsize` bytes."""

    config: GPT2Config
    cluster: Cluster
    rows: int
    length: int
    itemsize: int = 2

    def fits(self, plan: Plan) -> bool:
        """Whether the plan is legal, and its fullest rank has memory enough."""
        try:
            held = memory(plan, self.config, self.rows, self.length, self.itemsize)
        except ValueError:
            return False
        return max(one.total for one in held) <= self.cluster.device.memory


@dataclass(frozen=True)
class Envelope:
    """What a shape of the mesh costs besides computing, on the back of an envelope: in parts of the computing time."""

    tp: int
    pp: int
    dp: int
    sums: float
    tensor: float
    bubble: float
    launches: float
    local: bool

    @property
    def exposed(self) -> float:
        """What backward, two thirds of the computing, does not hide of the sums; behind a pipeline all of them."""
        return self.sums if self.pp > 1 else max(0.0, self.sums - 2 / 3)

    @property
    def total(self) -> float:
        """All of it."""
        return self.exposed + self.tensor + self.bubble + self.launches

    def micro(self, rows: int) -> int:
        """Micro-batches: four times as many as stages, if there are rows enough."""
        return min(rows // self.dp, 4 * self.pp) if self.pp > 1 else 1


def envelope(case: Workload, tp: int, pp: int) -> Envelope:
    """Four costs of a shape, each a short formula, against 6 P operations for each token.

    Gradients: 2 P / (tp pp) numbers on the slowest link between replicas. Tensor parallelism: 8 (t - 1) / t numbers a
    token and channel of each layer, on the fast link. A bubble: (p - 1) / m. Launches: 36 a layer and micro-batch.
    """
    config, network, device = case.config, case.cluster.network, case.cluster.device
    dp, fast = case.cluster.devices // (tp * pp), (network.inside or network.between).bandwidth
    local = tp * dp <= network.node
    tokens, wire = (
        case.rows * case.length / case.cluster.devices,
        fast if local else network.between.bandwidth,
    )
    compute = 6 * config.parameters * tokens / device.rate
    shape = Envelope(tp, pp, dp, 0, 0, 0, 0, local)
    micro = shape.micro(case.rows)
    return replace(
        shape,
        sums=2 * case.itemsize * config.parameters / (tp * pp * wire * compute) * (dp > 1),
        tensor=8 * (tp - 1) * case.itemsize * device.rate / (72 * config.n_embd * fast),
        bubble=(pp - 1) / micro,
        launches=36 * config.n_layer / pp * micro * device.launch / compute,
    )


def mesh_shapes(case: Workload) -> list[Envelope]:
    """Every shape with rows and heads enough, the cheapest first."""
    devices, node, config = case.cluster.devices, case.cluster.network.node, case.config
    found = [
        envelope(case, tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8, 16)
        if tp <= node
        and config.n_head % tp == 0
        and pp <= config.n_layer
        and devices // (tp * pp) in range(1, case.rows + 1)
    ]
    return sorted(found, key=lambda one: (one.total, one.tp, one.pp))


def memory_ladder(case: Workload, shape: Envelope):
    """Plans of one shape, in the order in which memory should be bought.

    Shards of the state cost no bytes more (ZeRO-2, where gradients travel once or on fast links, else ZeRO-1); smaller
    micro-batches cost launches; computing blocks twice costs a third of the operations.
    """
    most = case.rows // shape.dp
    first = shape.micro(case.rows)
    micros = [m for m in (first << i for i in range(12)) if m < most] + [most]
    for again in (False, True):
        for micro in micros:
            zero = 0 if shape.dp == 1 else 2 if micro == 1 or shape.local else 1
            yield Plan(
                pp=shape.pp,
                dp=shape.dp,
                tp=shape.tp,
                micro=micro,
                zero=zero,
                sp=shape.tp > 1,
                recompute=again,
            )


def decide(case: Workload) -> tuple[Plan | None, list[Envelope]]:
    """The plan of the cheapest shape that can be made to fit, and the shapes on the way to it; None where none fits."""
    passed = []
    for shape in mesh_shapes(case):
        passed.append(shape)
        if plan := next(filter(case.fits, memory_ladder(case, shape)), None):
            return plan, passed
    return None, passed
