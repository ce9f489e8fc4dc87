"""Batches that are a pure function of (seed, step, global sample index), whatever the number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..machine.arguments import checked
from .shards import TRAIN_SHARE

IGNORED = -100  # a target with this value does not count (the ignore_index of torch's cross-entropy)


@dataclass(frozen=True)
class Batch:
    """b rows and t columns of one global batch.

    `total` is always the number of target tokens of the *global* batch: the summed loss is divided by it once.
    """

    tokens: torch.Tensor  # (b, t) int64
    targets: torch.Tensor  # (b, t) int64: the token after each token; IGNORED ones do not count
    positions: torch.Tensor  # (t,) int64: the columns' positions in the sequence
    samples: torch.Tensor  # (b,) int64: global sample indices
    total: int

    def rows(self, axis_rank: int, axis_size: int) -> "Batch":
        """The rows of one rank of an axis, by tensor_split: when uneven, the first ranks hold one more."""
        mine = torch.arange(len(self.samples)).tensor_split(axis_size)[axis_rank]
        return replace(self, **{name: getattr(self, name)[mine] for name in ("tokens", "targets", "samples")})

    def columns(self, index: torch.Tensor) -> "Batch":
        """The columns at `index` (t,), as a context-parallel layout gives them; targets are already shifted."""
        cut = {"tokens": self.tokens[:, index], "targets": self.targets[:, index]}
        return replace(self, **cut, positions=self.positions[index])

    def to(self, device) -> "Batch":
        """The same batch on another device; to a GPU from pinned memory, for which the host does not wait."""
        names, to_gpu = ("tokens", "targets", "positions", "samples"), torch.device(device).type == "cuda"

        def moved(t):
            return t.pin_memory().to(device, non_blocking=True) if to_gpu and not t.is_cuda else t.to(device)

        return replace(self, **{name: moved(getattr(self, name)) for name in names})

    def micro(self, count: int) -> list["Batch"]:
        """The rows as `count` micro-batches, as even as possible; `total` is unchanged, so their losses add."""
        return [self.rows(i, count) for i in range(count)]

    def check(self, words: int, positions: int) -> None:
        """Raise ValueError for a batch that is empty, too long, or has tokens or targets outside the `words`."""
        rows, columns = self.tokens.shape
        if not rows or not columns or not self.total:
            raise ValueError(
                f"A batch of {rows} rows of {columns} tokens with {self.total} targets has nothing to learn from. Use "
                "at least 1 of each."
            )
        if columns > positions:
            raise ValueError(
                f"{columns} tokens a row do not fit into {positions} positions. Use at most {positions}."
            )
        self._check_range("token", self.tokens, self.tokens.new_zeros((), dtype=torch.bool), words)
        self._check_range("target", self.targets, self.targets == IGNORED, words)

    def _check_range(self, kind: str, values: torch.Tensor, allowed: torch.Tensor, words: int) -> None:
        outside = ((values < 0) | (values >= words)) & ~allowed
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(
                f"The {kind} {values[row, column]} in row {row}, column {column} is outside the vocabulary, 0 to "
                f"{words - 1}. Make the tokens with this model's tokenizer."
            )


@checked(rows=1, length=1)
class Batches:
    """Batches without end of `rows` windows of `length` tokens, drawn at random positions of a split.

    `at(step)` depends on (seed, step, global sample index) alone. `source` is a Shard, an array of tokens, or
    anything of integers with a length and slices. Raises ValueError when the split is shorter than a window.
    """

    def __init__(self, source: Sequence[int], rows: int, length: int, seed: int = 0, split: str = "train"):
        if split not in ("train", "val"):
            raise ValueError(f"There is no split {split!r}. Use 'train' or 'val'.")
        self.rows, self.length, self.seed, self.split = rows, length, seed, split
        self.source = source
        border = int(len(source) * TRAIN_SHARE)
        self.first, self.count = (0, border) if split == "train" else (border, len(source) - border)
        if self.count < length + 1:
            or_less = f", or at most {self.count - 1} tokens a sequence" if self.count > 1 else ""
            raise ValueError(
                f"A sequence of {length} tokens needs {length + 1} tokens, but the {split} split here "
                f"has {self.count}. Use a longer text{or_less}."
            )

    @checked(step=0)
    def at(self, step: int, rows: range | None = None) -> Batch:
        """The global batch of a step, or only its rows in `rows`; `total` is global either way."""
        mine = range(self.rows) if rows is None else rows
        if mine and not 0 <= min(mine) <= max(mine) < self.rows:
            raise ValueError(
                f"Rows {mine} are not all in a batch of {self.rows} rows (0 to {self.rows - 1})."
            )
        samples = np.asarray(mine, dtype=np.int64) + step * self.rows
        windows = np.empty((len(mine), self.length + 1), np.int64)
        for window, sample in zip(windows, samples, strict=True):
            start = self.start(int(sample))
            window[:] = self.source[start : start + self.length + 1]
        block = torch.from_numpy(windows)
        tokens, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        positions, samples = torch.arange(self.length), torch.from_numpy(samples)
        return Batch(tokens, targets, positions, samples, self.rows * self.length)

    def start(self, sample: int) -> int:
        """Where the window of a global sample begins: random, but a function of (seed, sample) alone."""
        places = self.count - self.length
        return self.first + int(np.random.Philox(key=self.seed, counter=sample).random_raw() % places)
