"""One line of the mesh, as one of its ranks sees it: what every call is made on."""

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Axis:
    """The ranks along one line of the mesh, as one of them sees it.

    `ranks` are global ranks, `rank` is this rank's position among them, `group` torch's process group (None: all).
    `up` and `down` carry messages to a later and to an earlier position, where one group could not carry both; a
    `silent` axis was made without them.
    """

    name: str = ""
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: object = field(default=None, repr=False, compare=False)
    up: object = field(default=None, repr=False, compare=False)
    down: object = field(default=None, repr=False, compare=False)
    silent: bool = field(default=False, repr=False, compare=False)

    @cached_property
    def size(self) -> int:
        """How many ranks the axis has."""
        return len(self.ranks)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The global ranks of the others."""
        return tuple(r for r in self.ranks if r != self.ranks[self.rank])

    def at(self, position: int) -> bool:
        """Whether this rank is at a position; -1 is the last. Raises IndexError where there is none."""
        return range(self.size)[position] == self.rank

    def way(self, source: int, to: int):
        """The group of a message from one position to another (-1: the last). Raises ValueError where there is none."""
        if self.silent:
            raise ValueError(
                f"Axis {self.name!r} was made for calls of all its ranks, and on GPUs carries no message between two. "
                f"Make it with them: Mesh(..., messages=[{self.name!r}]), or mesh.axis(..., messages=True)."
            )
        return (self.up if source % self.size < to % self.size else self.down) or self.group
