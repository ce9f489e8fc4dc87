"""A task declares the parts of tensors that it touches; edges follow from program order, exactly where two conflict."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..machine.arguments import checked

EXCLUSIVE = ("writes", "updates")
SHARED = ("reads", "reduces", "concurrent")
"""Modes of access. Two that overlap must keep their order, unless both have the same one of the SHARED modes."""


@dataclass(frozen=True)
class Access:
    """`mode` says how the part `box` of a tensor is touched: one (start, stop) for each of its leading dims."""

    mode: str
    tensor: str
    box: tuple[tuple[int, int], ...] = ()

    def overlaps(self, other: "Access") -> bool:
        """Whether both touch some element (dims without an entry are touched whole)."""
        if self.tensor != other.tensor:
            return False
        return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(self.box, other.box, strict=False))

    def covers(self, other: "Access") -> bool:
        """Whether every element that the other touches is touched here; both boxes have all dims."""
        return all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(self.box, other.box, strict=True))

    def conflicts(self, other: "Access") -> bool:
        """Whether the order of the two matters."""
        return not (self.mode == other.mode and self.mode in SHARED) and self.overlaps(other)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box of a tensor, sharing its memory."""
        return tensor[tuple(slice(*ends) for ends in self.box)]

    def __str__(self) -> str:
        return f"{self.mode} {self.tensor}[{', '.join(f'{a}:{b}' for a, b in self.box)}]"


def _mode(name: str, what: str) -> Callable[..., Access]:
    def access(tensor: str, *box) -> Access:
        return Access(name, tensor, box)

    access.__name__, access.__qualname__, access.__doc__ = name, name, f"An access that {what}"
    return access


reads = _mode("reads", "leaves the part as it is.")
writes = _mode("writes", "replaces the part, whatever was there.")
updates = _mode("updates", "reads the part and replaces it.")
reduces = _mode("reduces", "adds to the part: in any order, but one task at a time (OmpSs-2: commutative).")
concurrent = _mode("concurrent", "may go on beside others of its kind: the task itself makes that safe.")


@dataclass(eq=False)
class Task:
    """A piece of work: `body` is called with one view for each access, in the order of the accesses.

    `loop` names the parallel loop that it is an iteration of. `wire` is set for communication: tasks of one wire start
    in program order (see `messages`). `locks` are the tensors that it reduces into.
    """

    number: int
    name: str
    body: Callable
    accesses: tuple[Access, ...]
    views: tuple[torch.Tensor, ...]
    loop: str = ""
    kind: str = "other"
    priority: int = 0
    wire: str = ""
    locks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name!r} ({', '.join(map(str, self.accesses))})"


@checked()
class TaskGraph:
    """Tasks in program order, and between them the fewest edges that order every two conflicting accesses.

    `before[v]` are the tasks with an edge to v, `ancestors[v]` all that must be over before v, as the bits of one whole
    number. `compared` counts the pairs of accesses that were compared to find the edges.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.tasks = tensors, []
        self.before: list[tuple[int, ...]] = []
        self.ancestors: list[int] = []
        self.compared = 0
        self._touched: dict[str, list[tuple[Access, int]]] = defaultdict(list)

    def add(self, name: str, body: Callable, *accesses: Access, **options) -> Task:
        """Append a task; `options` are those of `Task`. Raises ValueError for a part that the tensor does not have."""
        whole = tuple(self._whole(name, access) for access in accesses)
        views = tuple(access.part(self.tensors[access.tensor]) for access in whole)
        locks = tuple(sorted({a.tensor for a in whole if a.mode == "reduces"}))
        task = Task(len(self.tasks), name, body, whole, views, locks=locks, **options)
        self._append(task)
        return task

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every edge (first, then)."""
        return ((u, v) for v, predecessors in enumerate(self.before) for u in predecessors)

    def across(self) -> list[tuple[int, ...]]:
        """For each task the tasks of the iteration before that it must wait for, when all are run again and again.

        Computed from a program that is twice as long: the edges of its second half to its first.
        """
        n, twice = len(self.tasks), TaskGraph(self.tensors)
        for task in self.tasks + self.tasks:
            twice._append(task)
        return [tuple(u for u in twice.before[n + v] if u < n) for v in range(n)]

    def _append(self, task: Task) -> None:
        number, conflicting = len(self.tasks), set()
        for access in task.accesses:
            conflicting |= {other for old, other in self._touched[access.tensor] if access.conflicts(old)}
            self.compared += len(self._touched[access.tensor])
        self.tasks.append(task)
        for access in task.accesses:  # later tasks need an edge only to the last writer of a part
            touched = self._touched[access.tensor]
            if access.mode in EXCLUSIVE:
                touched[:] = [(old, other) for old, other in touched if not access.covers(old)]
            touched.append((access, number))
        kept, reached = [], 0
        for other in sorted(conflicting, reverse=True):
            if not reached >> other & 1:
                kept.append(other)
            reached |= self.ancestors[other] | 1 << other
        self.before.append(tuple(kept))
        self.ancestors.append(reached)

    def _whole(self, name: str, access: Access) -> Access:
        """The access with all dims of its tensor; None stands for a whole dim."""
        if access.tensor not in self.tensors:
            said = f"task {name!r} {access.mode} {access.tensor!r}, which is none of the tensors here"
            raise ValueError(f"{said}. Use one of them.")
        shape = tuple(self.tensors[access.tensor].shape)
        parts = [*access.box, *[None] * (len(shape) - len(access.box))]
        box = tuple((0, n) if part is None else part for part, n in zip(parts, shape, strict=False))
        inside = all(0 <= start < stop <= n for (start, stop), n in zip(box, shape, strict=True))
        if len(parts) > len(shape) or not inside:
            text = f"task {name!r} {access}: {access.tensor} has the shape {shape}. Stay inside it."
            raise ValueError(text)
        return Access(access.mode, access.tensor, box)
