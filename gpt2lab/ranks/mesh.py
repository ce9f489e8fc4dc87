"""The mesh: which ranks share what. Passed explicitly to whoever needs it; there is no global one.

Ranks are laid out as one array of shape (pp, dp, cp, tp): tensor parallel ranks are neighbours (the fastest links),
pipeline stages lie furthest apart. An axis is one line through that array.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from ..processes import status_board

NAMES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """The ranks along one line of the mesh, as one of them sees it.

    `ranks` are global ranks, `rank` is this rank's place among them, `group` torch's process group (None: the world).
    """

    name: str = ""
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: object = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """How many ranks the axis has."""
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the others."""
        return tuple(r for r in self.ranks if r != self.ranks[self.rank])


class Mesh:
    """`Mesh(pp=2, tp=2)` inside a rank: its axes by name; `mesh["dp", "cp"]` joins two; `Mesh()` is the serial mesh,
    and `Mesh(alone=True)` is the serial mesh of one rank among others that does not want to talk to them.

    Every rank of the world must make it, with the same sizes, because groups are created by all ranks together.
    Raises ValueError when the sizes do not multiply to the number of ranks.
    """

    joined = (("dp", "cp"),)

    def __init__(self, *, alone: bool = False, **sizes: int):
        unknown = set(sizes) - set(NAMES)
        if unknown:
            raise ValueError(
                f"no axis is called {', '.join(sorted(unknown))}. The axes are {', '.join(NAMES)}."
            )
        self.sizes = {name: sizes.get(name, 1) for name in NAMES}
        world_size = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if math.prod(self.sizes.values()) != world_size:
            wanted = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
            raise ValueError(
                f"{wanted} is a mesh of {math.prod(self.sizes.values())} ranks; here are {world_size}."
            )
        self.rank = dist.get_rank() if world_size > 1 else 0
        self.grid = np.arange(world_size).reshape(tuple(self.sizes.values()))  # (pp, dp, cp, tp)
        self.world = Axis("world", tuple(range(world_size)), self.rank)
        self._axes = {names: self._make(names) for names in [*((n,) for n in NAMES), *self.joined]}

    def __getitem__(self, names: str | Sequence[str]) -> Axis:
        return self._axes[(names,) if isinstance(names, str) else tuple(names)]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.sizes.items() if s > 1)})"

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank (default: this one) stands on each axis."""
        place = np.argwhere(self.grid == (self.rank if rank is None else rank))[0]
        return dict(zip(NAMES, map(int, place), strict=True))

    def lines(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """All lines of the mesh along these axes, each a tuple of global ranks."""
        along = [NAMES.index(n) for n in names]
        across = [i for i in range(len(NAMES)) if i not in along]
        length = math.prod(self.grid.shape[i] for i in along)
        return [tuple(map(int, line)) for line in self.grid.transpose(*across, *along).reshape(-1, length)]

    def _make(self, names: tuple[str, ...]) -> Axis:
        return self.axis("+".join(names), self.lines(names))

    def axis(self, name: str, lines: Sequence[Sequence[int]]) -> Axis | None:
        """The line with this rank in it; all ranks call this together, and groups are made for every line.

        None where no line holds this rank.
        """
        mine = None
        for line in lines:
            line = tuple(line)
            whole = len(line) == self.grid.size
            if whole or len(line) == 1:
                group = None
            else:
                status_board.enter("new_group", name, [r for r in line if r != self.rank], 0)
                group = dist.new_group(line, timeout=_timeout())
                status_board.leave()
            if self.rank in line:
                mine = Axis(name, line, line.index(self.rank), group)
        return mine

    def side_group(self):
        """A second process group of all ranks, for a thread in the background: its messages never mix with training's.

        All ranks call it together; None on one rank.
        """
        ranks = list(self.world.ranks)
        return dist.new_group(ranks, timeout=_timeout(), backend="gloo") if len(ranks) > 1 else None


def _timeout(group=None) -> timedelta:
    """A group's timeout; without one the world's, which torch's new_group does not inherit by itself."""
    group = group or dist.distributed_c10d._get_default_group()
    own = getattr(group, "timeout", None)  # a group written in Python, such as the shared-memory one
    return own or group._get_backend(group._device_types[0]).options._timeout
