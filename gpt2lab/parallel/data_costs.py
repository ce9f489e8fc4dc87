"""What data parallelism and ZeRO hold and send, by formula, in exact bytes: padding and uneven chunks included.

The tests compare each number with what live ranks really hold and send.
"""

from ..ranks.comm import split_sizes
from .data import into_buckets
from .zero import into_groups


def parts(model) -> list[int]:
    """Elements of each part that ZeRO shards: the blocks, and the modules outside them."""
    return [sum(p.numel() for _, p in group) for group in into_groups(model)]


def padded(elements: int, ranks: int) -> int:
    """Elements of a shard: an equal share, rounded up."""
    return -(-elements // ranks)


def owned_elements(elements: int, ranks: int, rank: int) -> int:
    """Real elements, without padding, in a rank's shard."""
    share = padded(elements, ranks)
    return max(0, min(elements - rank * share, share))


def bytes_held(sizes: list[int], stage: int, ranks: int, rank: int, element: int = 4) -> dict[str, int]:
    """Bytes at the end of backward, for parts of `sizes` elements of `element` bytes and AdamW's two moments.

    In stage 3 one element per part stands in for the freed weights. Optimizer state has no padding.
    """
    shards = sum(padded(s, ranks) for s in sizes)
    weights = {0: sum(sizes), 1: ranks * shards, 2: ranks * shards, 3: shards + len(sizes)}
    gradients = {0: sum(sizes), 1: sum(sizes), 2: shards, 3: shards}
    mine = sum(owned_elements(s, ranks, rank) for s in sizes)
    moments = 2 * (mine if stage else sum(sizes))
    return {
        "weights": element * weights[stage],
        "gradients": element * gradients[stage],
        "optimizer": element * moments,
    }


def all_reduce_bytes(elements: int, ranks: int, rank: int, element: int = 4) -> int:
    """Bytes that a rank sends in one all-reduce: each chunk but its own once, and all but the next rank's once more."""
    if ranks == 1:
        return 0
    chunks = split_sizes(elements, ranks)
    return element * (2 * elements - chunks[rank] - chunks[(rank + 1) % ranks])


def bucket_bytes_sent(model, bucket_bytes: int, ranks: int, rank: int) -> int:
    """Bytes that a rank sends in a step of bucketed data parallelism, however many micro-batches it has."""
    buckets = into_buckets(list(model.parameters()), bucket_bytes)
    element = next(model.parameters()).element_size()
    return sum(all_reduce_bytes(sum(p.numel() for p in b), ranks, rank, element) for b in buckets)


def zero_bytes_sent(sizes: list[int], stage: int, ranks: int, micro: int = 1, element: int = 4) -> int:
    """Bytes that each rank sends in a step of ZeRO over parts of `sizes` in the order of `parts` (no other axis).

    The first part is the token embedding, used at both ends; the second the positions; the last the final norm.
    """
    moved = [(ranks - 1) * padded(s, ranks) * element for s in sizes]
    if stage == 1:
        return 2 * sum(moved)
    if stage == 2:
        return (micro + 1) * sum(moved)
    gathers = 2 * sum(moved) - moved[1] - moved[-1]  # positions and the final norm are gathered once
    return micro * (gathers + sum(moved))


def paper_bytes(parameters: float, ranks: int, optimizer: int = 12) -> dict[int, float]:
    """Bytes a rank by ZeRO stage, as in Figure 1 of the paper: 2-byte weights and gradients, K = `optimizer`."""
    return {
        0: (4 + optimizer) * parameters,
        1: 4 * parameters + optimizer * parameters / ranks,
        2: 2 * parameters + (2 + optimizer) * parameters / ranks,
        3: (4 + optimizer) * parameters / ranks,
    }
