"""What tensor and sequence parallelism cost a rank: bytes sent and activations kept, exactly, by formula. No torch.

B rows of T tokens, width C, H heads, n ranks of which this is `rank`; uneven shares as `tensor_split` makes them.
"""

from collections import Counter
from dataclasses import dataclass

from ..machine.arguments import checked
from ..ranks.traffic import all_gather_cost, all_reduce_cost, reduce_scatter_cost, split_sizes


@checked(rows=0, length=0, width=1, heads=1, ranks=1, itemsize=1, total=0, rank=0, numbers=0)
@dataclass(frozen=True)
class Shape:
    """The sizes that costs depend on; `itemsize` is the bytes of a number."""

    rows: int
    length: int
    width: int
    heads: int
    ranks: int
    itemsize: int = 4

    def share(self, total: int, rank: int) -> int:
        """A rank's part of `total` things."""
        return split_sizes(total, self.ranks)[rank]

    def tokens(self) -> list[int]:
        """Bytes of every rank's tokens in a (B, T, C), for sequence parallelism."""
        line = self.rows * self.width * self.itemsize
        return [line * t for t in split_sizes(self.length, self.ranks)]

    def chunks(self, numbers: int) -> list[int]:
        """Bytes of the chunks of an all-reduce."""
        return [self.itemsize * c for c in split_sizes(numbers, self.ranks)]


def enter_cost(shape: Shape, rank: int = 0, sp: bool = False, lean: bool = True) -> tuple[list, list]:
    """What a column-parallel layer sends, forward and backward: lists of (operation, bytes, messages)."""
    if not sp:
        whole = shape.chunks(shape.rows * shape.length * shape.width)
        return [], [("all_reduce", *all_reduce_cost(whole, rank))]
    gather = ("all_gather", *all_gather_cost(shape.tokens(), rank))
    return [gather], [("reduce_scatter", *reduce_scatter_cost(shape.tokens(), rank))] + [gather] * lean


def leave_cost(shape: Shape, rank: int = 0, sp: bool = False) -> tuple[list, list]:
    """What a row-parallel layer, or the embedding, sends: the same the other way round, and nothing again."""
    return enter_cost(shape, rank, sp, lean=False)[::-1]


def loss_cost(shape: Shape, rank: int = 0) -> list:
    """What the loss sends forward: the largest logit of each token, then two sums; backward it sends nothing."""
    chunks = (shape.chunks(k * shape.rows * shape.length) for k in (1, 2))
    return [("all_reduce", *all_reduce_cost(each, rank)) for each in chunks]


@checked(layers=(0, 10_000), rank=0)
def step_bytes(shape: Shape, layers: int, rank: int = 0, sp: bool = False, lean: bool = True) -> Counter:
    """Bytes that a rank sends for the forward and backward of a whole model, by operation.

    Of each layer 4 all-reduces of (B, T, C), of embedding and head one each, and of the loss those of (B, T) numbers.
    Sequence parallel: as many all-gathers and reduce-scatters, which is the same when T divides evenly; `lean`, an
    all-gather more for each column-parallel layer and the head.
    """
    total = Counter()
    twice = [*enter_cost(shape, rank, sp, lean), *leave_cost(shape, rank, sp)]
    for calls, times in (*((calls, 2 * layers + 1) for calls in twice), (loss_cost(shape, rank), 1)):
        for op, size, _ in calls:
            total[op] += times * size
    return total


@checked(rank=0)
def kept_bytes(shape: Shape, rank: int = 0, sp: bool = False, lean: bool = True) -> int:
    """Activations that a rank keeps of one layer for backward (no dropout, attention without the T x T matrix).

    Whole between the layers: two inputs of norms, two outputs of norms, 4 B T C, and 4 B T means and deviations.
    Cut by heads and hidden features: q, k, v, attention's output and its B H T softmax sums, 2 x 4 C around gelu.
    So B T C (4 + 12/n) numbers; with sequence parallelism 16/n. Korthikanti et al. 2022, table 2, in 16 bit and
    with dropout masks: s b h (10 + 24/t) and s b h 34/t.
    """
    b, t, c = shape.rows, shape.length, shape.width
    own = shape.share(t, rank) if sp else t
    norms = b * own * (4 * c + 4)
    if sp and not lean:
        norms += 2 * b * (t - own) * c  # the gathered inputs of both column-parallel layers
    hidden = shape.share(4 * c, rank)
    cut = b * t * (4 * c // shape.ranks + 2 * hidden + shape.heads // shape.ranks)
    return shape.itemsize * (norms + cut)
