"""How a parameter was cut. Norm, checkpoints, counts and verification all read it, so none of them can disagree."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..ranks import comm
from ..ranks.mesh import Axis, Mesh


@dataclass(frozen=True)
class Cut:
    """One cut: dimension `dim` of `length` elements over mesh axis `axis`, separately in each of `groups` equal parts.

    GPT-2's fused q, k, v has three groups: each third is cut by heads. Sizes are `tensor_split`'s.
    """

    axis: str
    dim: int
    length: int
    groups: int = 1

    def sizes(self, parts: int) -> list[int]:
        """Length of every rank's slice along `dim`."""
        return [self.groups * s for s in comm.split_sizes(self.length // self.groups, parts)]


@dataclass(frozen=True)
class Spec:
    """What a parameter is on this mesh: its cuts, the axes over which its gradient is only a partial sum, its ties.

    `tied_copy` marks the second holder of a shared weight (the head's copy of the embedding on the last stage),
    `expert` what lives on one rank of the expert axis, and `load` the bias that balances experts, which is no weight:
    its gradient is an excess load, and has no part in the norm.
    """

    cuts: tuple[Cut, ...] = ()
    partial: tuple[str, ...] = ()
    tied_copy: bool = False
    expert: bool = False
    load: bool = False

    @property
    def axes(self) -> set[str]:
        """Names of the mesh axes over which the parameter is cut, or on one rank of which it lives."""
        return {c.axis for c in self.cuts} | ({"ep"} if self.expert else set())

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the axes whose ranks hold copies for other tokens: over them its gradient is summed."""
        return ("edp", "cp") if self.expert else ("dp", "cp")


def of(p: torch.Tensor) -> Spec:
    """The Spec of a parameter; an uncut, replicated one has an empty Spec."""
    return getattr(p, "spec", Spec())


def mark(p: torch.Tensor, **changes) -> None:
    """Change fields of a parameter's Spec in place."""
    p.spec = replace(of(p), **changes)


def slice_of(t: torch.Tensor, place: int, parts: int, dim: int, groups: int = 1) -> torch.Tensor:
    """The slice at `place` of `parts` along `dim`, taken from each of `groups` equal parts and joined."""
    return torch.cat([g.tensor_split(parts, dim)[place] for g in t.chunk(groups, dim)], dim)


def cut(p: nn.Parameter, axis: Axis, dim: int, groups: int = 1) -> nn.Parameter:
    """This rank's slice of a parameter, as a new parameter that remembers how it was cut."""
    new = nn.Parameter(slice_of(p.data, axis.rank, axis.size, dim, groups), p.requires_grad)
    new.__dict__.update(p.__dict__)
    mark(new, cuts=(*of(p).cuts, Cut(axis.name, dim, p.size(dim), groups)))
    return new


def full(t: torch.Tensor, spec: Spec, mesh: Mesh) -> torch.Tensor:
    """The whole tensor of which every rank holds the slice `t`; all ranks of the cut axes call it together."""
    for c in reversed(spec.cuts):
        axis = mesh[c.axis]
        sizes = c.sizes(axis.size)
        shards = comm.all_gather(t.detach(), axis, c.dim, sizes).split(sizes, c.dim)
        thirds = [s.chunk(c.groups, c.dim) for s in shards]
        t = torch.cat([third[g] for g in range(c.groups) for third in thirds], c.dim)
    return t
