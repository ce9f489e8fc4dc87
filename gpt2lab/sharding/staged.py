"""GPT-2's chain of links as pipeline stages, each cut in its own way over a group of ranks of its own.

A stage's program is that of its links, forward and backward, as in `tofu`. What one stage makes and another reads
crosses between their ranks. The head's part of the tied embedding's gradient crosses once a step, summed over the
micro-batches; all else once for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..machine.arguments import checked
from .cost import added
from .crossing import Crossing, Side
from .layout import lines_along, places, ranks
from .partition import Change, Program, partition
from .propagate import propagate
from .tofu import Choice, LinkChain, beyond


@checked(first=0, ranks=0, mesh=1)
@dataclass(frozen=True)
class CutStage:
    """The links first .. first + len(choices) - 1, cut as chosen on a mesh of these ranks."""

    first: int
    choices: tuple[Choice, ...]
    ranks: tuple[int, ...]
    mesh: dict[str, int]

    def lines(self, name: str) -> list[tuple[int, ...]]:
        """The ranks along one axis of the mesh, line by line; none where it has no such axis."""
        return lines_along(self.mesh, name, self.ranks) if name in self.mesh else []


@dataclass(frozen=True)
class Passed:
    """A value that crosses from one stage to another; there it is the input `name`."""

    value: str
    name: str
    source: int
    target: int
    crossing: Crossing
    kind: str  # F forward, B backward, once


@checked(stage=0, rank=0, micros=1)
class Staged:
    """The programs of all stages, and what crosses between them.

    Raises ValueError for stages that do not join to the whole chain, or that share a rank, or whose mesh has not as
    many ranks as they name, or lines of ranks that do not ascend.
    """

    def __init__(self, chain: LinkChain, stages: Sequence[CutStage]):
        self.chain, self.stages = chain, tuple(stages)
        _check(chain, stages)
        self.programs = [self._program(stage) for stage in stages]

    def _program(self, stage: CutStage) -> Program:
        last = stage.first + len(stage.choices)
        graph = self.chain.between_links(stage.first, last)
        marks = {}
        for n, choice in reversed(list(enumerate(stage.choices, stage.first))):
            marks |= self.chain.marks(n, choice, stage.mesh)
        marks = {name: mark for name, mark in marks.items() if name in graph.nodes}
        return partition(graph, propagate(graph, marks, stage.mesh), stage.mesh)

    @cached_property
    def passed(self) -> list[Passed]:
        """Everything that crosses, in the order in which stages read it."""
        made = {value: n for n, one in enumerate(self.programs) for value in one.graph.outputs.values()}
        found = []
        for n, program in enumerate(self.programs):
            for name in program.graph.inputs:
                value = name.removesuffix(beyond(""))
                if made.get(value, n) == n:
                    continue
                source = made[value]
                kind = "F" if source < n else "B" if name != value else "once"
                found.append(Passed(value, name, source, n, self._crossing(value, name, source, n), kind))
        return found

    def _crossing(self, value: str, name: str, source: int, target: int) -> Crossing:
        here, there = self.programs[source], self.programs[target]
        node = here.graph.nodes[value]
        leaves = Side(self.stages[source].ranks, here.mesh, here.results[f"out {value}"])
        enters = Side(self.stages[target].ranks, there.mesh, there.layouts[name])
        return Crossing(node.shape, node.element, leaves, enters)

    def border(self, stage: int) -> int:
        """How many steps of a stage's program are forward: all, for the last one."""
        late = {p.name for p in self.passed if p.target == stage and p.kind == "B"}
        steps = self.programs[stage].steps
        reads = lambda s: {s.value} if isinstance(s, Change) else set(s.node.inputs)
        return next((n for n, step in enumerate(steps) if reads(step) & late), len(steps))

    def cost(self, rank: int, micros: int) -> tuple[int, int]:
        """(bytes, messages) that a rank sends in forward and backward of so many micro-batches."""
        costs = [(1 if p.kind == "once" else micros, p.crossing.cost(rank)) for p in self.passed]
        for stage, program in zip(self.stages, self.programs, strict=True):
            if rank in stage.ranks:
                costs.append((micros, program.cost(places(stage.mesh)[stage.ranks.index(rank)])))
        return added((times * size, times * messages) for times, (size, messages) in costs)


def _check(chain: LinkChain, stages: Sequence[CutStage]) -> None:
    end = 0
    for stage in stages:
        if stage.first != end or not stage.choices:
            raise ValueError(
                f"A stage of {len(stage.choices)} links begins with link {stage.first}, but link {end} comes next. "
                "Give each stage a link or more, and leave none out."
            )
        if len(stage.ranks) != ranks(stage.mesh):
            raise ValueError(
                f"A stage has {len(stage.ranks)} ranks, but its mesh {stage.mesh} has {ranks(stage.mesh)}. "
                "Name a rank for each place of the mesh."
            )
        for line in (line for name in stage.mesh for line in stage.lines(name)):
            if line != tuple(sorted(line)):
                raise ValueError(
                    f"A stage has the ranks {line} in a line of its mesh, but groups of ranks run in ascending order. "
                    f"Use {tuple(sorted(line))}."
                )
        end += len(stage.choices)
    if end != chain.count:
        raise ValueError(
            f"The stages end with link {end - 1}, but the chain has {chain.count} links. Add a stage."
        )
    used = [rank for stage in stages for rank in stage.ranks]
    if twice := sorted({rank for rank in used if used.count(rank) > 1}):
        raise ValueError(f"Rank {twice[0]} belongs to two stages. Give each stage ranks of its own.")
