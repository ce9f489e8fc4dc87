"""The mesh: ranks arranged on named axes. It is passed explicitly as an argument; there is no global mesh.

Ranks are laid out as one array of shape (pp, dp, cp, tp): tensor-parallel ranks are neighbours (the fastest links),
pipeline stages are furthest apart. An axis is one line through that array.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from ..machine.arguments import checked
from ..processes import status_board

NAMES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """The ranks along one line of the mesh, as one of them sees it.

    `ranks` are global ranks, `rank` is this rank's position among them, `group` torch's process group (None: all).
    `up` and `down` carry messages to a later and to an earlier position, where one group could not carry both.
    """

    name: str = ""
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: object = field(default=None, repr=False, compare=False)
    up: object = field(default=None, repr=False, compare=False)
    down: object = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """How many ranks the axis has."""
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the others."""
        return tuple(r for r in self.ranks if r != self.ranks[self.rank])

    def way(self, source: int, to: int):
        """The group of a message from one position to another."""
        return (self.up if source < to else self.down) or self.group


@checked(ep=1, node=1)
class Mesh:
    """`Mesh(pp=2, tp=2)` inside a rank: `mesh["tp"]` is an axis, `mesh["dp", "cp"]` joins two.

    `ep` neighbours of the data axis share out the experts (axis "ep"); the dp/ep ranks with the same ones are "edp".
    Where every `node` of them share a machine, "ep_inside" are those of one, "ep_between" one of each machine.

    `Mesh()` is the serial mesh, `Mesh(alone=True)` the serial mesh of one rank among several. Every rank must make the
    mesh, with the same sizes, because groups are created by all ranks together. Raises ValueError when the product of
    the sizes is not the number of ranks.
    """

    joined = (("dp", "cp"),)

    def __init__(self, *, alone: bool = False, ep: int = 1, node: int = 1, **sizes: int):
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
        self._axes = {names: self._make(names) for names in [*((n,) for n in NAMES), *self.joined]}
        self._axes |= self._expert_axes(ep, node)

    def __getitem__(self, names: str | Sequence[str]) -> Axis:
        return self._axes[(names,) if isinstance(names, str) else tuple(names)]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.sizes.items() if s > 1)})"

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The position of a rank (default: this one) on each axis."""
        position = np.argwhere(self.grid == (self.rank if rank is None else rank))[0]
        return dict(zip(NAMES, map(int, position), strict=True))

    def lines(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """All lines of the mesh along these axes, each a tuple of global ranks."""
        along = [NAMES.index(n) for n in names]
        across = [i for i in range(len(NAMES)) if i not in along]
        length = math.prod(self.grid.shape[i] for i in along)
        return [tuple(map(int, line)) for line in self.grid.transpose(*across, *along).reshape(-1, length)]

    def _make(self, names: tuple[str, ...]) -> Axis:
        return self.axis("+".join(names), self.lines(names))

    def _expert_axes(self, ep: int, node: int) -> dict[tuple[str, ...], Axis]:
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
        axes = {tuple(n.split("+")): self.axis(n, found.tolist()) for n, found in lines.items()}
        return {("ep_inside",): Axis(), ("ep_between",): axes[("ep",)]} | axes

    def axis(self, name: str, lines: Sequence[Sequence[int]], own: bool = False) -> Axis | None:
        """The line that contains this rank (None: no line does), after a group was made for every line.

        All ranks call this together. A line of all ranks shares the world's group, and so its order of messages,
        unless it shall have its `own`. Raises ValueError for a line that does not ascend: torch sorts a group's ranks.
        """
        mine, apart, lines = None, one_queue_a_pair(), [tuple(line) for line in lines]
        if wrong := [line for line in lines if line != tuple(sorted(set(line)))]:
            right = tuple(sorted(set(wrong[0])))
            raise ValueError(
                f"Ranks {wrong[0]} of axis {name!r} do not ascend, as a group's do. Use {right}."
            )
        for line in lines:
            shared = len(line) == self.grid.size and not own or len(line) == 1
            group = None if shared else self._group(name, line)
            ways = [self._group(name, line) for _ in "ud"] if apart and len(line) > 1 else ()
            if self.rank in line:
                mine = Axis(name, line, line.index(self.rank), group, *ways)
        if mine and mine.up:
            from .point_to_point import open_pairs

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
