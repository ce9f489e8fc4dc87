"""A rank runs its stage of `staged`: micro-batches in 1F1B order, each stage's program by the interpreter."""

from collections.abc import Sequence

import torch

from ..ranks import comm
from ..ranks.mesh import Axis
from ..ranks.mesh import Mesh as World
from ..schedules import make
from .crossing import Box, Crossing
from .interpret import Interpreter, real_shape
from .layout import local_shape, places
from .reshard import follow
from .staged import CutStage, Passed, Staged

FLOATS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes an element


def _stage_axes(stages: Sequence[CutStage], idle: int = 0) -> tuple[Axis, dict[str, Axis]]:
    """The axis of all ranks, and the axes of this rank's own stage, if any; all ranks call this together.

    Raises ValueError when the stages do not use every rank but `idle` ones.
    """
    world = World(dp=idle + sum(len(stage.ranks) for stage in stages))
    mine = next((stage.mesh for stage in stages if world.rank in stage.ranks), ())
    axes = {}
    for name in sorted({name for stage in stages for name in stage.mesh}):
        lines = [line for stage in stages for line in stage.lines(name)]
        axes[name] = world.axis(name, lines)
    return world.world, {name: axes[name] for name in mine}


class StageRunner:
    """One rank of a staged plan: `step(weights, micro-batches)` gives its parts of the loss and of all gradients.

    A plan may leave `idle` ranks without a stage: they have no parts.
    """

    def __init__(self, staged: Staged, idle: int = 0):
        self.staged = staged
        self.world, self.axes = _stage_axes(staged.stages, idle)
        self.stage = next((n for n, s in enumerate(staged.stages) if self.world.rank in s.ranks), None)
        if self.stage is None:
            return
        self.program = staged.programs[self.stage]
        self.interpreter = Interpreter(self.program, self.axes)
        self.border = staged.border(self.stage)
        self.sums: dict[str, torch.Tensor] = {}
        self.values: dict[int, dict] = {}
        self.going: list = []

    @torch.no_grad()
    def step(self, weights: dict[str, torch.Tensor], batches: Sequence[dict[str, torch.Tensor]]) -> dict:
        """Forward and backward of all micro-batches: this rank's parts of its results, summed over them."""
        if self.stage is None:
            return {}
        parts, self.sums, self.left = self._parts(weights), {}, len(batches)
        for op in make("1f1b", len(self.staged.stages), len(batches)).orders[self.stage]:
            if op.kind == "F":
                self._forward(op.micro, parts, batches[op.micro])
            else:
                self._backward(op.micro)
        for handle in self.going:
            handle.wait()
        self.going = []
        return {name: part for name, part in self.sums.items() if not name.startswith("out ")}

    def _parts(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts of the weights that its stage uses. Raises ValueError for another type than captured."""
        own = [name for name in self.program.graph.inputs if name in weights]
        for name in own:
            dtype = FLOATS[self.program.graph.nodes[name].element]
            if weights[name].dtype != dtype:
                raise ValueError(
                    f"{name} is {weights[name].dtype}, but its stage was captured for {dtype}. Use .to({dtype}), "
                    f"or capture with dtype={weights[name].dtype}."
                )
        return {name: self.interpreter.part(name, weights[name]) for name in own}

    def _passing(self, kind: str, end: str) -> list[Passed]:
        return [p for p in self.staged.passed if p.kind == kind and getattr(p, end) == self.stage]

    def _forward(self, micro: int, parts, batch) -> None:
        given = dict(parts)
        for name in self.program.graph.inputs:
            if name in batch:
                given[name] = self.interpreter.part(name, batch[name])
        given |= {p.name: self._receive(p) for p in self._passing("F", "target")}
        late = [p.name for kind in ("B", "once") for p in self._passing(kind, "target")]
        self.values[micro] = self.interpreter.begin(given, late)
        self.interpreter.advance(self.values[micro], 0, self.border)
        for p in self._passing("F", "source"):
            self._send(p, self.values[micro][p.value][self.program.results[f"out {p.value}"]])

    def _backward(self, micro: int) -> None:
        values, self.left = self.values.pop(micro), self.left - 1
        for p in self._passing("B", "target"):
            self.interpreter.put(values, p.name, self._receive(p))
        for p in self._passing("once", "target"):  # others' sum comes with the last micro-batch
            empty = torch.zeros(self._shape(p), dtype=FLOATS[p.crossing.element])
            self.interpreter.put(values, p.name, empty if self.left else self._receive(p))
        self.interpreter.advance(values, self.border, None)
        for name, part in self.interpreter.results(values).items():
            self.sums[name] = self.sums[name] + part if name in self.sums else part
        for p in self._passing("B", "source"):
            self._send(p, values[p.value][self.program.results[f"out {p.value}"]])
        for p in [] if self.left else self._passing("once", "source"):
            self._send(p, self.sums[f"out {p.value}"])

    def _shape(self, p: Passed) -> tuple[int, ...]:
        node = self.program.graph.nodes[p.name]
        return real_shape(node, self.program.layouts[p.name], self.interpreter.mesh, self.interpreter.at)

    def _send(self, p: Passed, part: torch.Tensor) -> None:
        crossing, rank = p.crossing, self.world.rank
        part = part.reshape(_shape_at(crossing.source, crossing, rank))
        has = crossing.source.boxes(crossing.shape)[rank]
        for source, to, piece in crossing.pieces():
            if source == rank:
                self.going.append(comm.isend(part[_within(piece, has)].contiguous(), self.world, to))

    def _receive(self, p: Passed) -> torch.Tensor:
        crossing, rank = p.crossing, self.world.rank
        wants = crossing.arrival.boxes(crossing.shape)[rank]
        part = torch.empty(_shape_at(crossing.arrival, crossing, rank), dtype=FLOATS[crossing.element])
        for source, to, piece in crossing.pieces():
            if to == rank:
                here = _within(piece, wants)
                part[here] = comm.irecv(torch.empty_like(part[here]), self.world, source).wait()
        return follow(part, crossing.way, self.axes).reshape(self._shape(p))


def _shape_at(side, crossing: Crossing, rank: int) -> tuple[int, ...]:
    place = places(side.mesh)[side.ranks.index(rank)]
    return local_shape(crossing.shape, side.layout, side.mesh, place)


def _within(piece: Box, whole: Box) -> tuple[slice, ...]:
    """A piece as slices of a part that begins where `whole` does."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(piece, whole, strict=True))
