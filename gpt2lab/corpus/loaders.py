"""How a rank gets its share of the global batch: it reads the share itself, or rank 0 reads everything and scatters.

In llm.c each rank reads; in the BSC port one rank reads and scatters, which makes other shapes of a share easier. Both
give the same bits, for each of the SHAPES: whole rows, contiguous tokens, every n-th token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..machine.arguments import checked
from ..ranks import comm
from ..ranks.mesh import Axis
from .batches import Batch, Batches

SHAPES = ("rows", "contiguous", "interleaved")


@checked(rows=1, length=1)
class InOrder(Batches):
    """Batches in the order of the text, as in llm.c: `rows` consecutive windows of `length` tokens each.

    An epoch has `steps` batches; then the text starts again, and tokens that do not fill a batch are left out. Raises
    ValueError when the text is shorter than one batch and the target of its last token.
    """

    def __init__(self, source: Sequence[int], rows: int, length: int):
        self.source, self.rows, self.length = source, rows, length
        self.steps = max(len(source) - 1, 0) // (rows * length)
        if not self.steps:
            fewer = f", or at most {(len(source) - 1) // length} rows" if len(source) > length else ""
            raise ValueError(
                f"A batch of {rows} rows of {length} tokens needs {rows * length + 1:,} tokens, including the "
                f"target of the last, but the text has {len(source):,}. "
                f"Use a longer text{fewer}."
            )

    def start(self, sample: int) -> int:
        """Where the window of a global sample begins: behind that of the sample before it."""
        return sample % (self.steps * self.rows) * self.length


def share(batches: Batches, axis: Axis, rank: int, shape: str = "rows") -> tuple[range, range]:
    """The rows and columns of one rank of the axis: as even as possible, the first ranks have one more.

    Raises ValueError for a shape that is not in SHAPES.
    """
    rows, columns = range(batches.rows), range(batches.length)
    if shape == "rows":
        return _part(rows, axis.size, rank), columns
    if shape == "contiguous":
        return rows, _part(columns, axis.size, rank)
    if shape == "interleaved":
        return rows, columns[rank :: axis.size]
    raise ValueError(f"There is no shape {shape!r} of a share. Use one of: {', '.join(SHAPES)}.")


def each_reads(batches: Batches, step: int, axis: Axis, shape: str = "rows") -> Batch:
    """Every rank reads only the rows of its share and keeps its columns. Bytes between ranks: none."""
    rows, columns = share(batches, axis, axis.rank, shape)
    return batches.at(step, rows).columns(_whole(columns))


def one_reads(batches: Batches, step: int, axis: Axis, shape: str = "rows") -> Batch:
    """Rank 0 of the axis reads the whole batch and sends every other rank its share; only rank 0 reads the source.

    Bytes that rank 0 sends: 16 for each token of the others (a token and a target of 8 bytes).
    """
    rows, columns = share(batches, axis, axis.rank, shape)
    if axis.rank == 0:
        batch = batches.at(step)
        pair = torch.stack([batch.tokens, batch.targets])  # (2, B, T)
        for place in range(1, axis.size):
            part = _cut(pair, *share(batches, axis, place, shape))
            if part.numel():
                comm.send(part, axis, place)
        pair = _cut(pair, rows, columns)
    else:
        pair = torch.empty(2, len(rows), len(columns), dtype=torch.int64)
        pair = comm.recv(pair, axis, 0) if pair.numel() else pair
    samples = _whole(rows) + step * batches.rows
    return Batch(pair[0], pair[1], _whole(columns), samples, batches.rows * batches.length)


def joined(parts: Sequence[Batch]) -> tuple[Batch, np.ndarray]:
    """The global batch (B, T) of which these are the ranks' shares, and the rank of each token (B, T).

    Raises ValueError unless every token is in exactly one share.
    """
    samples = torch.cat([part.samples for part in parts]).unique()
    positions = torch.cat([part.positions for part in parts]).unique()
    tokens, targets = torch.zeros(2, len(samples), len(positions), dtype=torch.int64)
    owner, copies = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for rank, part in enumerate(parts):
        place = (
            torch.searchsorted(samples, part.samples)[:, None],
            torch.searchsorted(positions, part.positions),
        )
        tokens[place], targets[place], owner[place] = part.tokens, part.targets, rank
        copies[place] += 1
    if not (copies == 1).all():
        raise ValueError(
            f"Of the batch's {copies.numel()} tokens, {(copies == 0).sum()} are in no share and "
            f"{(copies > 1).sum()} are in more than one."
        )
    return Batch(tokens, targets, positions, samples, parts[0].total), owner.numpy()


def _part(whole: range, parts: int, part: int) -> range:
    sizes = comm.split_sizes(len(whole), parts)
    return whole[sum(sizes[:part]) : sum(sizes[: part + 1])]


def _cut(pair: torch.Tensor, rows: range, columns: range) -> torch.Tensor:
    return pair[:, rows.start : rows.stop, columns.start : columns.stop : columns.step].contiguous()


def _whole(numbers: range) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
