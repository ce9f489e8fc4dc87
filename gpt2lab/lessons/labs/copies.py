"""The hottest expert twice: copies of busy experts, dealt out so that every rank computes about as many rows.

A rank has room for so many experts. Where most rows fall on one, it gets a copy; its rows are shared out evenly among
its copies, and the gradients of copies are summed.

DeepSeek-AI 2025, "EPLB", https://github.com/deepseek-ai/EPLB.
"""

from copy import deepcopy

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...experts.mixture import Mixture
from ...experts.rows import Dispatch
from ...machine.arguments import checked
from ...model import GPT2, GPT2Config
from ...parallel.expert import SpreadExperts, apply_expert, check
from ...plan import Plan
from ...ranks import comm
from ...ranks.mesh import Axis, Mesh
from .instruments import bytes_sent


@checked(load=0, ranks=1, room=1)
def dealt(load: list[int], ranks: int, room: int) -> list[list[int]]:
    """The experts of each rank, of which it has room for so many, by the rows of each expert. Raises ValueError."""
    count = len(load)
    if not count <= ranks * room <= count * ranks:
        raise ValueError(
            f"{ranks} ranks with room for {room} do not fit {count} experts. Use {-(-count // ranks)}."
        )
    copies = [1] * count
    for _ in range(ranks * room - count):
        copies[max((e for e in range(count) if copies[e] < ranks), key=lambda e: load[e] / copies[e])] += 1
    held, rows = [[] for _ in range(ranks)], [0.0] * ranks
    for e in sorted(range(count), key=lambda e: -load[e] / copies[e]):
        # Those with the most room first, so that in the end no rank has room only for what it has.
        for rank in sorted(range(ranks), key=lambda r: (len(held[r]), rows[r]))[: copies[e]]:
            held[rank].append(e)
            rows[rank] += load[e] / copies[e]
    return held


class CopiedExperts(SpreadExperts):
    """Experts as `held[rank]` says, some on several ranks; a row travels to one of its expert's copies.

    Forward and backward: the exchanges of `SpreadExperts`, with places in the place of experts, `room` on a rank.
    Bytes per rank: `expert.bytes_sent` with as many experts as there are places.
    """

    def __init__(self, mesh: Mesh, config, held: list[list[int]]):
        super().__init__(mesh, None, config)
        every = [e for experts in held for e in experts]
        self.places = [[p for p, e in enumerate(every) if e == one] for one in range(config.experts)]
        self.count = len(every)

    def send(self, rows, counts):
        """Rows (M, C), sorted by expert, are sorted by place and begin to travel."""
        place = torch.cat([self.shares(e, n) for e, n in enumerate(counts.tolist())])
        order = place.argsort(stable=True)
        return super().send(Dispatch.apply(rows, order), torch.bincount(place, minlength=self.count)), order

    def shares(self, expert: int, count: int) -> torch.Tensor:
        """The places (count,) of an expert's rows, evenly; each rank begins with another copy."""
        copies = torch.tensor(self.places[expert]).roll(self.axis.rank)
        return copies.repeat_interleave(torch.tensor(comm.split_sizes(count, len(copies))))

    def arrive(self, sent):
        """The rows of all ranks, sorted by place."""
        rows, counts, way = super().arrive(sent[0])
        return rows, counts, (way, sent[1])

    def back(self, rows, way):
        """The output of every row, in the order in which they were given to `send`."""
        return Dispatch.apply(super().back(rows, way[0]), way[1].argsort())


def deal(mixture: Mixture, mesh: Mesh, held: list[list[int]]) -> dict[int, Axis]:
    """Move the experts of a spread mixture to where `held` says; gives, of those here with copies, who has them.

    Bytes per rank: the weights of an expert for each rank that gets it from here.
    """
    axis, mine, sent, copied = mesh["ep"], {}, [], {}
    for e in range(mixture.config.experts):
        ranks = [rank for rank, experts in enumerate(held) if e in experts]
        source = e * axis.size // mixture.config.experts
        if axis.rank == source:
            weights = parameters_to_vector(mixture.experts[str(e)].parameters()).detach()
            sent += [comm.isend(weights, axis, to) for to in ranks if to != source]
            mine[e] = mixture.experts[str(e)]
        elif axis.rank in ranks:
            mine[e] = deepcopy(next(iter(mixture.experts.values())))
            weights = comm.irecv(parameters_to_vector(mine[e].parameters()), axis, source).wait()
            vector_to_parameters(weights, mine[e].parameters())
        if len(ranks) > 1:
            copied[e] = mesh.axis(f"copies of expert {e}", [[axis.ranks[r] for r in ranks]])
    for message in sent:
        message.wait()
    mixture.experts = torch.nn.ModuleDict({str(e): mine[e] for e in held[axis.rank]})
    mixture.ranks = CopiedExperts(mesh, mixture.config, held)
    return {e: ranks for e, ranks in copied.items() if ranks}


def sum_copies(mixture: Mixture, copied: dict[int, Axis]) -> None:
    """Give all copies of an expert the sum of their gradients.

    Bytes per rank: 2 (c-1)/c of an expert's weights for each one here that has c copies.
    """
    for e, axis in copied.items():
        weights = list(mixture.experts[str(e)].parameters())
        total = comm.all_reduce(parameters_to_vector(p.grad for p in weights), axis)
        for p, grad in zip(weights, total.split([p.numel() for p in weights]), strict=True):
            p.grad = grad.view_as(p)


def run(rank: int, world_size: int, config: GPT2Config, mixture: Mixture, x, grad, room: int = 0) -> tuple:
    """A mixture on live ranks, each with its rows of x (B, T, C); with `room`, once its experts are dealt out.

    Gives the output (b, T, C), gradients by name with that of x, the rows of each expert, how many of them this rank
    computes, and the bytes that it sends: weights, rows and their counts, gradients.
    """
    check(config, Plan(dp=world_size, ep=world_size), *x.shape[:2])
    model, mesh, copied, sent = GPT2(config), Mesh(dp=world_size, ep=world_size), {}, []
    model.h["0"].mlp = mixture
    apply_expert(model, mesh)
    mine, grad = (t.tensor_split(world_size)[rank] for t in (x, grad))
    with torch.no_grad():
        mixture(mine)
    load = comm.all_reduce(mixture.chosen, mesh["ep"]).tolist()
    comm.clear_log()
    if room:
        copied = deal(mixture, mesh, dealt(load, world_size, room))
    sent.append(bytes_sent())
    grouped, computed = mixture.grouped, []
    mixture.grouped = lambda rows, counts: computed.append(len(rows)) or grouped(rows, counts)
    comm.clear_log()
    y = mixture(mine.requires_grad_())
    y.backward(grad)
    sent.append(bytes_sent())
    comm.clear_log()
    sum_copies(mixture, copied)
    sent.append(bytes_sent())
    for name, p in mixture.named_parameters():
        if not name.startswith("experts."):
            p.grad = comm.all_reduce(p.grad, mesh["ep"])
    gradients = {n: p.grad for n, p in mixture.named_parameters()} | {"x": mine.grad}
    return y.detach(), gradients, load, computed[0], sent
