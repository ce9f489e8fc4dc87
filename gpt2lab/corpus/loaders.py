"""Two ways in which a rank comes by its rows of the global batch: it reads them, or rank 0 reads all and deals them.

llm.c lets each rank read; the BSC port lets one read and scatter, which changes the shape of a share more easily.
Both give the same bits.
"""

import torch

from ..ranks import comm
from ..ranks.mesh import Axis
from .batches import Batch, Batches


def share(batches: Batches, axis: Axis, place: int) -> range:
    """The rows of the rank at `place`: as even as can be, the first ranks hold one more."""
    rows = torch.arange(batches.rows).tensor_split(axis.size)[place]
    return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)


def each_reads(batches: Batches, step: int, axis: Axis) -> Batch:
    """Every rank reads its own rows and no others. Bytes between ranks: none."""
    return batches.at(step, share(batches, axis, axis.rank))


def one_reads(batches: Batches, step: int, axis: Axis) -> Batch:
    """Rank 0 of the axis reads the whole batch and sends everybody else their rows; only rank 0 touches the source.

    Bytes that rank 0 sends: 16 for each token of the others (a token and a target of 8 bytes).
    """
    length, mine = batches.length, share(batches, axis, axis.rank)
    if axis.rank == 0:
        batch = batches.at(step)
        pair = torch.stack([batch.tokens, batch.targets])  # (2, B, T)
        for place in range(1, axis.size):
            rows = share(batches, axis, place)
            if rows:
                comm.send(pair[:, rows.start : rows.stop], axis, place)
        pair = pair[:, : len(mine)]
    else:
        pair = torch.empty(2, len(mine), length, dtype=torch.int64)
        pair = comm.recv(pair, axis, 0) if mine else pair
    samples = torch.arange(mine.start, mine.stop) + step * batches.rows
    return Batch(pair[0], pair[1], torch.arange(length), samples, batches.rows * length)
