"""Parameter servers: data parallelism in which each weight is updated in one place and fetched from there.

Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.
"""

from dataclasses import replace

import torch

from ..ranks import comm
from ..ranks.mesh import Axis
from . import spec
from .data import Replicas, gradient
from .finish import Piece, empty


class Servers(Replicas):
    """Parameter servers: whole tensors ("keys") live on a server, which alone holds their optimizer state.

    Forward: nothing. Backward: nothing; after it every rank pushes each gradient to the key's server, which sums and
    updates; then every rank pulls the new weights. All wait for all, so the result is that of an all-reduce.
    Bytes per rank, of S in total with s on this server: S - s pushed and (n-1) s pulled from it. With one server
    the busiest rank handles 2 (n-1) S; with the keys shared out evenly every rank sends 2 (n-1)/n S, like a ring.
    """

    def __init__(self, model, axis: Axis, servers: int):
        super().__init__(model, axis)
        self.keys, self.others = self.pieces, [r for r in range(axis.size) if r != axis.rank]
        self.server = share_out({key.name: key.tensor.numel() for key in self.keys}, servers)
        mine = [key for key in self.keys if self.server[key.name] == axis.rank]
        self.away = [key for key in self.keys if self.server[key.name] != axis.rank]
        self.pieces = [_owned(key, axis) for key in mine] or [empty(self.keys[0])]

    def finish(self) -> None:
        """Push every gradient to its server, which adds them up in the order of the ranks."""
        push = lambda key: comm.isend(gradient(key.tensor), self.axis, self.server[key.name])
        pushed = [push(key) for key in self.away]
        for p in self.pieces:
            for rank in self.others if p.tensor.numel() else []:
                gradient(p.tensor).add_(comm.irecv(p.tensor, self.axis, rank).wait())
            gradient(p.tensor)
        for handle in pushed:
            handle.wait()
        for key in self.away:
            key.tensor.grad = None

    @torch.no_grad()
    def updated(self) -> None:
        """Every rank pulls the weights that the others serve."""
        served = [p.tensor for p in self.pieces if p.tensor.numel()]
        sent = [comm.isend(weight, self.axis, rank) for weight in served for rank in self.others]
        for key in self.away:
            key.tensor.copy_(comm.irecv(key.tensor, self.axis, self.server[key.name]).wait())
        for handle in sent:
            handle.wait()

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of every key, broadcast by its server."""
        mine = {p.name: v for p, v in zip(self.pieces, values, strict=True) if v.numel()}
        here = lambda key: mine.get(key.name, torch.empty_like(key.tensor, requires_grad=False)).detach()
        return {k.name: comm.broadcast(here(k), self.axis, self.server[k.name]) for k in self.keys}


def _owned(piece: Piece, axis: Axis) -> Piece:
    """A piece that exists on one rank of the data axis only, marked so that the norm counts it there."""
    length = piece.tensor.size(0)
    cuts = tuple(spec.Cut(name, 0, length) for name in axis.name.split("+"))
    return replace(piece, spec=replace(piece.spec, cuts=piece.spec.cuts + cuts))


def share_out(sizes: dict[str, int], servers: int) -> dict[str, int]:
    """Which server keeps which key: the largest first, each to the server with the least so far."""
    load, server = [0] * servers, {}
    for key in sorted(sizes, key=lambda k: -sizes[k]):
        server[key] = load.index(min(load))
        load[server[key]] += sizes[key]
    return server


def apply_servers(model, axis: Axis, plan) -> Replicas:
    """One server for all weights, or as many as there are ranks."""
    if axis.size == 1:
        return Replicas(model, axis)
    return Servers(model, axis, 1 if plan.data == "server" else axis.size)


def check(config, plan, rows: int, length: int) -> None:
    """Servers hold whole tensors, so nothing else may cut the model."""
    if plan.tp * plan.pp > 1:
        raise ValueError(
            f"Parameter servers keep whole tensors, but tp={plan.tp}, pp={plan.pp} cut the model. Use data=bucket."
        )
