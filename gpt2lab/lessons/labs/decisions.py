"""The decision path: questions in an order in which a reader can answer them, and the plan that they lead to.

python -m gpt2lab.lessons.labs.decisions    writes decisions.json: what `gpt2lab plan` chooses for every case
"""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ...model import PRESETS, GPT2Config
from ...plan import Plan
from ...planner.choose import Goal, parallelize
from ...planner.cost import predict
from ...planner.memory import memory
from ...planner.problem import Cluster, find_cluster

RECORD = Path(__file__).with_suffix(".json")


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

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of a step."""
        return predict(plan, self.config, self.rows, self.length, self.cluster, self.itemsize).seconds

    def chosen(self) -> Plan:
        """What `gpt2lab plan` chooses."""
        goal = Goal(self.rows, self.length, itemsize=self.itemsize)
        return parallelize(self.config, self.cluster, goal).plan


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
    idle: float = 0.0

    @property
    def exposed(self) -> float:
        """What backward, two thirds of the computing, does not hide of the sums; behind a pipeline all of them."""
        return self.sums if self.pp > 1 else max(0.0, self.sums - 2 / 3)

    @property
    def total(self) -> float:
        """All of it."""
        return (1 + self.exposed + self.tensor + self.bubble + self.launches) / (1 - self.idle) - 1

    def micro(self, rows: int) -> int:
        """Micro-batches: four times as many as stages, if there are rows enough."""
        return min(rows // self.dp, 4 * self.pp) if self.pp > 1 else 1


def envelope(case: Workload, tp: int, pp: int, devices: int = 0) -> Envelope:
    """Four costs of a shape on so many devices (0: all), each a short formula, against 6 P operations for each token.

    Gradients: 2 P / (tp pp) numbers around a ring of replicas, inside a machine or over the node / tp cards that it
    has in each. Tensor parallelism: 8 (t - 1) / t numbers a token and channel of each layer, on the fast link. A
    bubble: (p - 1) / 3 m, of ZB-H1 (ZB-V has less), the last stage's head, which weighs V / 12 C layers, and
    2 (p - 1 + m) messages that stages wait for. Launches: 36 a layer and micro-batch.
    """
    config, network, device = case.config, case.cluster.network, case.cluster.device
    devices = devices or case.cluster.devices
    dp, fast = devices // (tp * pp), (network.inside or network.between).bandwidth
    local = tp * dp <= network.node
    cards = min(network.node // tp, dp) * network.between.bandwidth
    tokens, wire = case.rows * case.length / devices, fast if local else min(fast, cards)
    compute = 6 * config.parameters * tokens / device.rate
    shape = Envelope(tp, pp, dp, 0, 0, 0, 0, local, 1 - devices / case.cluster.devices)
    micro, head = shape.micro(case.rows), config.vocab_size / (12 * config.n_embd)
    slowest = (config.n_layer / pp + head) / ((config.n_layer + head) / pp)
    border = network.between.bandwidth if devices > network.node else fast
    message = case.rows / dp / micro * case.length * config.n_embd * case.itemsize / tp / border
    waits = 2 * (pp - 1 + micro) * message / compute * (pp > 1)
    return replace(
        shape,
        sums=2 * case.itemsize * config.parameters / (tp * pp * wire * compute) * (dp > 1),
        tensor=8 * (tp - 1) * case.itemsize * device.rate / (72 * config.n_embd * fast),
        bubble=slowest * (1 + (pp - 1) / (3 * micro)) - 1 + waits,
        launches=36 * config.n_layer / pp * micro * device.launch / compute,
    )


def mesh_shapes(case: Workload) -> list[Envelope]:
    """Every shape with rows and heads enough, on all devices or on those of one machine, the cheapest first."""
    devices, node, config = case.cluster.devices, case.cluster.network.node, case.config
    found = [
        envelope(case, tp, pp, used)
        for used in {devices, min(node, devices)}
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8, 16)
        if tp <= node
        and config.n_head % tp == 0
        and pp <= config.n_layer
        and used // (tp * pp) in range(1, case.rows + 1)
    ]
    return sorted(found, key=lambda one: (one.total, one.tp, one.pp, one.idle))


def memory_ladder(case: Workload, shape: Envelope):
    """Plans of one shape, in the order in which memory should be bought.

    Shards of the state cost no bytes more (ZeRO-2 where gradients travel once, else ZeRO-1); smaller micro-batches cost
    launches; computing blocks twice costs a third of the operations.
    """
    most = case.rows // shape.dp
    first = shape.micro(case.rows)
    micros = [m for m in (first << i for i in range(12)) if m < most] + [most]
    for again in (False, True):
        for micro in micros:
            zero = 0 if shape.dp == 1 else 2 if micro == 1 else 1
            two = 2 * shape.pp <= case.config.n_layer  # of which ZB-V makes a stage
            schedule = "1f1b" if shape.pp == 1 or again else "zb_v" if two else "zb_h1"
            sizes = {"pp": shape.pp, "dp": shape.dp, "tp": shape.tp, "sp": shape.tp > 1}
            yield Plan(**sizes, micro=micro, zero=zero, recompute=again, schedule=schedule)


def decide(case: Workload) -> tuple[Plan | None, list[Envelope]]:
    """The plan of the cheapest shape that can be made to fit, and the shapes on the way to it; None where none fits.

    A shape without stages that fits only in several micro-batches has its gradients summed after the last one (ZeRO-1),
    so backward hides nothing of them: then a dearer shape may be cheaper.
    """
    shapes, best = mesh_shapes(case), None
    for i, shape in enumerate(shapes):
        if best and best[0] <= shape.total:
            break
        if plan := next(filter(case.fits, memory_ladder(case, shape)), None):
            late = plan.zero == 1 and plan.pp == 1
            found = shape.total + late * (shape.sums - shape.exposed) / (1 - shape.idle), i, plan
            best = min(best or found, found)
    return (best[2], shapes[: best[1] + 1]) if best else (None, shapes)


CAPSTONE = {
    "two V100 machines": Workload(
        GPT2Config(n_positions=2048, n_layer=24, n_head=16, n_embd=2048),
        find_cluster("v100x64").with_devices(16),
        64,
        1024,
    ),
    "two H100 machines": Workload(GPT2Config(), find_cluster("h100x64").with_devices(16), 256, 1024),
    "two A100 machines, few rows": Workload(
        GPT2Config(n_positions=2048, n_layer=32, n_head=32, n_embd=4096),
        find_cluster("a100x64").with_devices(16),
        16,
        2048,
    ),
}
"""The cases of the capstone: models, clusters and batches of 16-bit numbers."""
GRID = {
    f"{model}, {cluster}, {rows} rows": Workload(PRESETS[model], find_cluster(cluster), rows, 1024)
    for model, cluster, rows in product(("gpt2", "gpt2-xl"), ("h100x64", "a100x64", "v100x64"), (64, 512))
}
"""Models, clusters and batches on which the path is compared with `gpt2lab plan`."""


def recorded() -> dict[str, Plan]:
    """What `gpt2lab plan` chose for each case of both when the record was written."""
    return {name: Plan.parse(text) for name, text in json.loads(RECORD.read_text()).items()}


if __name__ == "__main__":
    found = {name: str(case.chosen()) for name, case in (GRID | CAPSTONE).items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
