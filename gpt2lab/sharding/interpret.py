"""A rank runs its part of a partitioned program: ATen's operators on parts, changes of layout in between.

Most operators run on parts as they are. Shapes among the arguments become those of the part; look-ups in a cut table
give zero for what lies elsewhere; numbers made from their place are made for this rank's place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..machine.arguments import checked
from .graph import Node
from .layout import Layout, box, local_shape
from .operators import RESHAPES
from .partition import Change, Program, Run
from .reshard import Axes, exchange_rows, follow, place, shard, sizes


def real_shape(node: Node, layout: Layout, mesh, at) -> tuple[int, ...]:
    """The shape of a rank's part as a tensor: the factors of each dimension multiplied."""
    local = local_shape(node.shape, layout, mesh, at)
    ends = list(accumulate(node.groups, initial=0))
    return tuple(math.prod(local[a:b]) for a, b in zip(ends, ends[1:], strict=False))


@checked()
@dataclass
class Interpreter:
    """One rank of a program. `run(inputs)` takes whole tensors, or this rank's parts with `parts=True`."""

    program: Program
    axes: Axes

    def __post_init__(self):
        self.mesh, self.at = sizes(self.axes), place(self.axes)
        if self.mesh != self.program.mesh:
            raise ValueError(
                f"the program is for the mesh {self.program.mesh}, but the ranks form {self.mesh}. Use that."
            )
        self.last = _last_use(self.program)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole input."""
        node, layout = self.program.graph.nodes[name], self.program.layouts[name]
        part = shard(whole.reshape(node.shape), layout, self.axes)
        return part.reshape(real_shape(node, layout, self.mesh, self.at))

    @torch.no_grad()
    def run(self, inputs: dict[str, torch.Tensor], parts: bool = False) -> dict[str, torch.Tensor]:
        """This rank's parts of the results, in the layouts `program.results`.

        Raises ValueError for an input that is missing.
        """
        given = (
            inputs
            if parts
            else {n: self.part(n, inputs[n]) for n in self.program.graph.inputs if n in inputs}
        )
        values = self.begin(given)
        self.advance(values)
        return self.results(values)

    def begin(self, parts: dict[str, torch.Tensor], late: Sequence[str] = ()) -> dict:
        """All values before the first step; inputs called `late` come afterwards, by `put`."""
        if missing := set(self.program.graph.inputs) - set(parts) - set(late):
            raise ValueError(f"the program also needs {', '.join(sorted(missing))}.")
        values: dict = {}
        for name in self.program.graph.inputs:
            if name not in late:
                self.put(values, name, parts[name])
        return values

    def put(self, values: dict, name: str, part: torch.Tensor) -> None:
        """Set this rank's part of an input."""
        values[name] = {self.program.layouts[name]: part}

    def advance(self, values: dict, first: int = 0, last: int | None = None) -> None:
        """Take the steps first .. last - 1."""
        for number, step in list(enumerate(self.program.steps))[first:last]:
            if isinstance(step, Change):
                self._change(step, values)
            else:
                given = [values[v][layout] for v, layout in zip(step.node.inputs, step.inputs, strict=True)]
                values[step.node.name] = {step.output: self.call(step, given)}
            for name in self.last.get(number, ()):
                del values[name]

    def results(self, values: dict) -> dict[str, torch.Tensor]:
        """This rank's parts of the results."""
        outputs = self.program.graph.outputs
        return {result: values[outputs[result]][at] for result, at in self.program.results.items()}

    def _change(self, change: Change, values) -> None:
        node, (src, dst) = self.program.graph.nodes[change.value], change.ends
        x = values[change.value][src].reshape(local_shape(node.shape, src, self.mesh, self.at))
        moved = follow(x, change.way, self.axes)
        values[change.value][dst] = moved.reshape(real_shape(node, dst, self.mesh, self.at))

    def call(self, run: Run, given: list[torch.Tensor]) -> torch.Tensor:
        """One operator on this rank's parts."""
        node = run.node
        shape = real_shape(node, run.output, self.mesh, self.at)
        if node.op in ("unfold", "unfold_backward"):
            return self._windows(run, given[0], list(shape))
        if node.op in RESHAPES:
            return given[0].reshape(shape)
        if node.op == "expand":
            return given[0].expand(shape)
        if node.op == "full":
            return node.call([], list(shape))
        if node.op == "arange":
            whole = node.call([]).reshape(node.shape)
            return whole[box(node.shape, run.output, self.mesh, self.at)].reshape(shape)
        if node.op == "piece":
            x, count, dim, number = node.call.arguments(given)
            return x.chunk(count, dim)[number]
        if node.op in LOOK_UPS:
            return LOOK_UPS[node.op](node.call.arguments(given), self._rows(run))
        return node.call(given)

    def _windows(self, run: Run, x: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """Windows over a dimension, or their sum; rows of the halo come before, and go back after."""
        back, halo = run.node.op == "unfold_backward", run.halo
        dim = run.node.call.args[2 if back else 1] % (x.dim() - back)
        if back:
            shape[dim] = x.size(dim) + x.size(-1) - 1
            x = run.node.call([x], x, shape)
        if halo:
            x = exchange_rows(x, dim, halo.spans(self.mesh), self.axes[halo.axis])
        return x if back else run.node.call([x])

    def _rows(self, run: Run) -> torch.Tensor:
        """The numbers of those rows of a look-up's table that are here, in order: its rows may be several factors."""
        node, layout = run.node, run.output
        dim = node.call.args[1] if node.op in ("gather", "scatter") else 0
        if node.op in ("embedding", "gather"):
            node, layout = self.program.graph.nodes[node.inputs[0]], run.inputs[0]
        first = sum(node.groups[:dim])
        factors = slice(first, first + node.groups[dim])
        shape, lies = node.shape[factors], Layout(layout.cuts[factors])
        return torch.arange(math.prod(shape)).view(shape)[box(shape, lies, self.mesh, self.at)].flatten()


def _here(index, rows):
    """Which of the indices are among these rows, and their place there (any for the others)."""
    place = torch.searchsorted(rows, index.contiguous()).clamp(max=len(rows) - 1)
    return rows[place] == index, place


def _embedding(args, rows):
    here, row = _here(args[1], rows)
    return torch.embedding(args[0], row).where(here[..., None], 0)


def _embedding_backward(args, rows):
    here, row = _here(args[1], rows)
    grad = args[0].where(here[..., None], 0)
    return torch.ops.aten.embedding_dense_backward(grad, row, len(rows), -1, False)


def _gather(args, rows):
    here, row = _here(args[2], rows)
    return args[0].gather(args[1], row).where(here, 0)


def _scatter(args, rows):
    x, dim, index, value = args
    return x.masked_fill(index == rows.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]), value)


LOOK_UPS = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _gather,
    "scatter": _scatter,
}


def _last_use(program: Program) -> dict[int, list[str]]:
    """Which values are read for the last time by which step."""
    last = {}
    for number, step in enumerate(program.steps):
        for name in (step.value,) if isinstance(step, Change) else (*step.node.inputs, step.node.name):
            last[name] = number
    kept = set(program.graph.outputs.values())
    found: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in kept:
            found.setdefault(number, []).append(name)
    return found
