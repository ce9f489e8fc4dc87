"""The update of a step as a small graph, and ZeRO as a rewrite of it.

Every rank has a gradient (P,) of its own rows; in the end every rank has the same new weights (P,). A graph says which
operations lead from the one to the other. It can be rewritten, accounted for, and run on live ranks.

Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training"; Alpa (Zheng et al. 2022,
section 4.2) applies it after planning.
"""

from dataclasses import dataclass

import torch

from ...ranks import comm, traffic
from ...ranks.mesh import Axis, Mesh
from .instruments import bytes_sent


@dataclass(frozen=True)
class GraphOp:
    """One operation of a graph: a collective, or the optimizer's `update`; values are names."""

    kind: str  # all-reduce, reduce-scatter, all-gather, update; anything else only reads
    input: str
    output: str = ""


UPDATE = (GraphOp("all-reduce", "gradient", "sum"), GraphOp("update", "sum", "new weights"))
"""Data parallelism: sum everything, update everything, on every rank."""


def rewrite(graph: tuple[GraphOp, ...]) -> tuple[GraphOp, ...]:
    """Where the update alone reads a sum, each rank sums and updates its shard, and the new shards are joined."""
    new = []
    for op in graph:
        readers = [other.kind for other in graph if other.input == op.output]
        if op.kind == "all-reduce" and readers == ["update"]:
            new.append(GraphOp("reduce-scatter", op.input, f"shard of the {op.output}"))
        elif op.kind == "update" and any(f"shard of the {op.input}" == before.output for before in new):
            shard = f"shard of the {op.output}"
            new += [
                GraphOp("update", f"shard of the {op.input}", shard),
                GraphOp("all-gather", shard, op.output),
            ]
        else:
            new.append(op)
    return tuple(new)


class Update:
    """A graph at work on one rank: whole flat weights (P,), and torch's AdamW of those that this rank updates."""

    def __init__(
        self, graph: tuple[GraphOp, ...], weights: torch.Tensor, axis: Axis, lr: float, decay: float
    ):
        sizes = traffic.split_sizes(len(weights), axis.size)
        whole = any(op.kind == "update" and not op.input.startswith("shard") for op in graph)
        self.graph, self.weights = graph, weights
        self.mine = (weights if whole else weights.split(sizes)[axis.rank]).clone()
        self.adam = torch.optim.AdamW([self.mine], lr=lr, weight_decay=decay)
        self.calls = {
            "all-reduce": lambda x: comm.all_reduce(x, axis),
            "reduce-scatter": lambda x: comm.reduce_scatter(x, axis),
            "all-gather": lambda x: comm.all_gather(x, axis, 0, sizes),
            "update": self.update,
        }

    def step(self, gradient: torch.Tensor) -> None:
        """Run the graph: `gradient` (P,) is that of this rank's rows, and the weights become the new ones."""
        values = {"gradient": gradient}
        for op in self.graph:
            values[op.output] = self.calls[op.kind](values[op.input])
        self.weights = values["new weights"]

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        """The new weights, where there is a gradient for them."""
        self.mine.grad = gradient
        self.adam.step()
        return self.mine

    @property
    def moments(self) -> int:
        """Bytes of the moments, which are as long as what this rank updates."""
        return sum(m.nbytes for m in self.adam.state[self.mine].values() if m.dim())


@dataclass(frozen=True)
class Row:
    """What an operation costs one rank: bytes sent, of optimizer state that it keeps, and of the value it makes."""

    op: GraphOp
    sent: int
    state: int
    made: int


def account(graph: tuple[GraphOp, ...], elements: int, ranks: int, rank: int, element: int = 4) -> list[Row]:
    """Every operation's cost on a rank, for P = `elements` of `element` bytes, uneven shards included."""
    sizes = [element * size for size in traffic.split_sizes(elements, ranks)]
    bytes_of = lambda value: sizes[rank] if value.startswith("shard") else sum(sizes)
    costs = {
        "all-reduce": traffic.all_reduce_cost,
        "reduce-scatter": traffic.reduce_scatter_cost,
        "all-gather": traffic.all_gather_cost,
    }
    sent = lambda op: costs[op.kind](sizes, rank)[0] if op.kind in costs else 0
    state = lambda op: 2 * bytes_of(op.input) if op.kind == "update" else 0
    return [Row(op, sent(op), state(op), bytes_of(op.output)) for op in graph]


def twenty_updates(rank: int, world_size: int, graph: tuple[GraphOp, ...], decay: float):
    """The weights after twenty updates of 1003 by a graph, bytes that the last one sent, and bytes of moments."""
    update = Update(graph, torch.linspace(-1, 1, 1003), Mesh(dp=world_size)["dp"], 1e-2, decay)
    for gradient in torch.randn(20, 1003, generator=torch.Generator().manual_seed(rank)):
        comm.clear_log()
        update.step(gradient)
    return update.weights, bytes_sent(), update.moments


def before_and_after(ranks) -> tuple[list[str], dict[str, list[Row]]]:
    """The update and its rewriting on live `ranks`: what there is to say, and the accounts of both graphs."""
    graphs = {"before": UPDATE, "after": rewrite(UPDATE)}
    costs = {name: account(graph, 1003, ranks.size, 0) for name, graph in graphs.items()}
    lines, found = [], {}
    for decay in (0.0, 0.01):
        found = {name: ranks.run(twenty_updates, graph, decay)[0] for name, graph in graphs.items()}
        same = torch.equal(found["before"][0], found["after"][0])
        lines.append(f"the same bits after 20 steps, decay {decay}: {same}")
    for name, (_, *counted) in found.items():
        exact = counted == [sum(row.sent for row in costs[name]), sum(row.state for row in costs[name])]
        steps = " ".join(f"{row.op.input} -> {row.op.kind} ->" for row in costs[name])
        lines.append(f"{name}: {steps} new weights")
        lines.append(f"  {counted[0]:,} bytes sent, {counted[1]:,} of moments, as accounted for: {exact}")
    return lines, costs
