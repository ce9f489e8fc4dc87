"""The mesh: ranks arranged on named axes. It is passed explicitly as an argument; there is no global mesh.

Ranks are laid out as one array of shape (pp, dp, cp, tp): tensor-parallel ranks are neighbours (the fastest links),
pipeline stages are furthest apart. An axis is one line through that array.
"""

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations

import numpy as np
import torch
import torch.distributed as dist

from ..machine.arguments import checked
from ..processes import status_board
from . import comm
from .axis import Axis as Axis

NAMES = ("pp", "dp", "cp", "tp")


@checked(ep=1, node=1)
class Mesh:
    """`Mesh(pp=2, tp=2)` inside a rank: `mesh["tp"]` is an axis, `mesh["dp", "cp"]` joins two.

    `ep` neighbours of the data axis share out the experts (axis "ep"); the dp/ep ranks with the same ones are "edp".
    Where every `node` of them share a machine, "ep_inside" are those of one, "ep_between" one of each machine.
    `messages` names the axes along which messages from one rank to another travel ("dp+cp": the two joined); on GPUs
    only these get what carries messages. By default all do.

    `Mesh()` is the serial mesh, `Mesh(alone=True)` the serial mesh of one rank among several. Every rank must make the
    mesh, with the same sizes, because groups are created by all ranks together. Raises ValueError when the product of
    the sizes is not the number of ranks.
    """

    def __init__(
        self,
        *,
        alone: bool = False,
        ep: int = 1,
        node: int = 1,
        messages: Sequence[str] | None = None,
        **sizes: int,
    ):
        unknown = set(sizes) - set(NAMES)
        if unknown:
            raise ValueError(
                f"No axis is called {', '.join(sorted(unknown))}. The axes are {', '.join(NAMES)}."
            )
        self.sizes = {name: sizes.get(name, 1) for name in NAMES}
        world_size = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if math.prod(self.sizes.values()) != world_size:
            wanted = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
            raise ValueError(
                f"{wanted} is a mesh of {math.prod(self.sizes.values())} ranks, but the world has {world_size}."
            )
        if self.sizes["dp"] % ep or ep % node:
            raise ValueError(
                f"dp={self.sizes['dp']} cannot be rows of ep={ep} with node={node}. Use divisors of each."
            )
        self.rank = dist.get_rank() if world_size > 1 else 0
        self.grid = np.arange(world_size).reshape(tuple(self.sizes.values()))  # (pp, dp, cp, tp)
        self.world = Axis("world", tuple(range(world_size)), self.rank)
        self._axes = {n: self._make(n, messages) for n in [*((n,) for n in NAMES), ("dp", "cp")]}
        self._axes |= self._expert_axes(ep, node, messages)

    def __getitem__(self, names: str | Sequence[str]) -> Axis:
        return self._axes[(names,) if isinstance(names, str) else tuple(names)]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.sizes.items() if s > 1)})"

    def coordinates(self) -> dict[str, int]:
        """The position of this rank on each axis."""
        position = np.argwhere(self.grid == self.rank)[0]
        return dict(zip(NAMES, map(int, position), strict=True))

    def lines(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """All lines of the mesh along these axes, each a tuple of global ranks."""
        along = [NAMES.index(n) for n in names]
        across = [i for i in range(len(NAMES)) if i not in along]
        length = math.prod(self.grid.shape[i] for i in along)
        return [tuple(map(int, line)) for line in self.grid.transpose(*across, *along).reshape(-1, length)]

    def _make(self, names: tuple[str, ...], messages: Sequence[str] | None) -> Axis:
        name = "+".join(names)
        return self.axis(name, self.lines(names), messages=messages is None or name in messages)

    def _expert_axes(self, ep: int, node: int, messages: Sequence[str] | None) -> dict[tuple[str, ...], Axis]:
        """Each data axis as rows of `ep` neighbours: along a row are all experts, along a column copies of some."""
        if ep == 1:
            alone = {("ep",): Axis("ep", (self.rank,)), ("ep_inside",): Axis(), ("ep_between",): Axis()}
            return alone | {("edp",): self["dp"], ("edp", "cp"): self["dp", "cp"]}
        shape = (-1, self.sizes["dp"] // ep, ep, self.sizes["cp"])
        tables = np.array(self.lines(["dp", "cp"])).reshape(shape)
        rows = tables.transpose(0, 1, 3, 2).reshape(-1, ep)
        lines = {
            "ep": rows,
            "edp": tables.transpose(0, 2, 3, 1).reshape(-1, shape[1]),
            "edp+cp": tables.transpose(0, 2, 1, 3).reshape(-1, shape[1] * shape[3]),
        }
        if node > 1:
            machines = rows.reshape(len(rows), ep // node, node)
            lines["ep_inside"] = machines.reshape(-1, node)
            lines["ep_between"] = machines.transpose(0, 2, 1).reshape(-1, ep // node)
        sent = {n: messages is None or n in messages for n in lines}
        axes = {tuple(n.split("+")): self.axis(n, at.tolist(), messages=sent[n]) for n, at in lines.items()}
        return {("ep_inside",): Axis(), ("ep_between",): axes[("ep",)]} | axes

    def axis(
        self, name: str, lines: Sequence[Sequence[int]], own: bool = False, messages=True
    ) -> Axis | None:
        """The line that contains this rank (None: no line does), after a group was made for every line.

        All ranks call this together. A line of all ranks shares the world's group, and so its order of messages,
        unless it shall have its `own`. Without `messages` it carries only calls that all its ranks make. Raises
        ValueError for a line that does not ascend: torch sorts a group's ranks.
        """
        mine, lines = None, [tuple(line) for line in lines]
        apart = one_queue_a_pair()
        if wrong := [line for line in lines if line != tuple(sorted(set(line)))]:
            right = tuple(sorted(set(wrong[0])))
            raise ValueError(
                f"Ranks {wrong[0]} of axis {name!r} do not ascend, as a group's do. Use {right}."
            )
        for line in lines:
            shared = len(line) == self.grid.size and not own or len(line) == 1
            group = None if shared else self._group(name, line)
            ways = [self._group(name, line) if messages else None for _ in "ud" if apart and len(line) > 1]
            if self.rank in line:
                mine = Axis(name, line, line.index(self.rank), group, *ways, silent=apart and not messages)
        if mine and mine.up:
            open_pairs(mine)
        return mine

    def _group(self, name: str, line: tuple[int, ...]):
        status_board.enter("new_group", name, [r for r in line if r != self.rank], 0)
        group = dist.new_group(line, timeout=_timeout())
        status_board.leave()
        return group

    def side_group(self):
        """A second process group of all ranks, for a background thread: its messages never mix with those of training.

        All ranks call this together; it returns None where there is only one.
        """
        ranks = list(self.world.ranks)
        return dist.new_group(ranks, timeout=_timeout(), backend="gloo") if len(ranks) > 1 else None


def one_queue_a_pair() -> bool:
    """Whether all messages of a pair of ranks, in both directions, pass one after the other as posted, as with NCCL.

    Two ranks that both receive before they send would wait forever: so each direction gets a group of its own.
    """
    return dist.is_initialized() and "nccl" in dist.distributed_c10d.get_backend_config()


def _timeout(group=None) -> timedelta:
    """The timeout of a group, or of the default group, which torch's new_group does not inherit by itself."""
    group = group or dist.distributed_c10d._get_default_group()
    own = getattr(group, "timeout", None)  # a group written in Python, such as the shared-memory one
    return own or group._get_backend(group._device_types[0]).options._timeout


def open_pairs(axis: Axis) -> None:
    """Open the connection of every pair, both ways, in the same order on all ranks.

    NCCL opens one at its first message and blocks until both ranks do: in another order they could wait in a circle.
    """
    nothing = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    for source, to in sorted(permutations(range(axis.size), 2), key=lambda pair: (min(pair), max(pair))):
        if axis.rank == source:
            comm.isend(nothing, axis, to).wait()
        elif axis.rank == to:
            comm.irecv(nothing, axis, source).wait()
