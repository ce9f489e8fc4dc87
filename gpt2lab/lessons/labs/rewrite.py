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


def adamw(w, g, m, v, t: int, lr: float, decay: float, betas=(0.9, 0.999), eps: float = 1e-8) -> None:
    """Step t (from 1) of AdamW on flat weights, in place, with moments m and v: element by element, so on any shard."""
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    w.mul_(1 - lr * decay)
    w.sub_(lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))


class Update:
    """A graph at work on one rank: whole flat weights (P,), and moments as long as what this rank updates."""

    def __init__(self, graph: tuple[GraphOp, ...], weights: torch.Tensor, axis: Axis):
        self.graph, self.weights, self.axis, self.t = graph, weights, axis, 0
        self.sizes = traffic.split_sizes(len(weights), axis.size)
        whole = any(op.kind == "update" and not op.input.startswith("shard") for op in graph)
        first = 0 if whole else sum(self.sizes[: axis.rank])
        self.here = slice(first, first + (len(weights) if whole else self.sizes[axis.rank]))
        self.moments = torch.zeros_like(weights[self.here]), torch.zeros_like(weights[self.here])

    def step(self, gradient: torch.Tensor, lr: float, decay: float) -> None:
        """Run the graph: `gradient` (P,) is that of this rank's rows, and the weights become the new ones."""
        self.t += 1
        values = {"gradient": gradient}
        for op in self.graph:
            values[op.output] = getattr(self, op.kind.replace("-", "_"))(values[op.input], lr, decay)
        self.weights = values["new weights"]

    def all_reduce(self, x, *_):
        """The sum, everywhere."""
        return comm.all_reduce(x, self.axis)

    def reduce_scatter(self, x, *_):
        """The sum, of which this rank keeps its shard."""
        return comm.reduce_scatter(x, self.axis)

    def all_gather(self, x, *_):
        """Everybody's shards, joined."""
        return comm.all_gather(x, self.axis, 0, self.sizes)

    def update(self, gradient, lr, decay):
        """The new weights, where there is a gradient for them."""
        mine = self.weights[self.here].clone()
        adamw(mine, gradient, *self.moments, self.t, lr, decay)
        return mine


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
    update = Update(graph, torch.linspace(-1, 1, 1003), Mesh(dp=world_size)["dp"])
    for gradient in torch.randn(20, 1003, generator=torch.Generator().manual_seed(rank)):
        comm.clear_log()
        update.step(gradient, 1e-2, decay)
    return update.weights, bytes_sent(), sum(m.nbytes for m in update.moments)


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
