"""What data parallelism and ZeRO hold and send, by formula, in exact bytes: padding and uneven chunks included.

The tests compare each number with what live ranks really hold and send.
"""

from ...machine.arguments import checked
from ...ranks.traffic import all_reduce_cost, split_sizes
from ..data import into_buckets
from .flat import into_groups, owner_of, part_of


def parts(model) -> dict[str, int]:
    """Elements of each part that ZeRO shards, in the order of use: wte, wpe, h.0, h.1, ..., ln_f (no other axis)."""
    return {part_of(group[0][0]): sum(p.numel() for _, p in group) for group in into_groups(model)}


@checked(elements=0, ranks=1)
def shard_length(elements: int, ranks: int) -> int:
    """Elements of a shard: an equal share, rounded up."""
    return -(-elements // ranks)


def owned_elements(elements: int, ranks: int, rank: int) -> int:
    """Real elements, without padding, in a rank's shard."""
    share = shard_length(elements, ranks)
    return max(0, min(elements - rank * share, share))


@checked(sizes=0, stage=(0, 3), ranks=1, rank=0, element=1)
def bytes_held(sizes: dict[str, int], stage: int, ranks: int, rank: int, element: int = 4) -> dict[str, int]:
    """Bytes at the end of backward, for the `parts` of a model, `element` bytes each, and AdamW's two moments.

    In stage 3 one element per part replaces the freed weights. Optimizer state has no padding.
    """
    whole = sum(sizes.values())
    shards = sum(shard_length(s, ranks) for s in sizes.values())
    mine = sum(owned_elements(s, ranks, rank) for s in sizes.values())
    return {
        "weights": element * {0: whole, 1: ranks * shards, 2: ranks * shards, 3: shards + len(sizes)}[stage],
        "gradients": element * (shards if stage >= 2 else whole),
        "optimizer": element * 2 * (mine if stage else whole),
    }


@checked(elements=0, ranks=(1, 10**6), rank=0, element=1)
def all_reduce_bytes(elements: int, ranks: int, rank: int, element: int = 4) -> int:
    """Bytes that a rank sends in one all-reduce: each chunk but its own once, and all but the next rank's once more."""
    return element * all_reduce_cost(split_sizes(elements, ranks), rank)[0]


def messages_sent(model, bucket_bytes: int, ranks: int, rank: int) -> list[int]:
    """Bytes that a rank sends in each all-reduce of a step, however many micro-batches: 0 is one message a tensor."""
    parameters = list(model.parameters())
    groups = into_buckets(parameters, bucket_bytes) if bucket_bytes else [[p] for p in parameters]
    element = parameters[0].element_size()
    return [all_reduce_bytes(sum(p.numel() for p in group), ranks, rank, element) for group in groups]


def bucket_bytes_sent(model, bucket_bytes: int, ranks: int, rank: int) -> int:
    """Bytes that a rank sends in a step of bucketed data parallelism, however many micro-batches it has."""
    return sum(messages_sent(model, bucket_bytes, ranks, rank))


def backward_and_sums(buckets: int, backward: float, message: float, overlap: bool = True) -> float:
    """Seconds until all gradients are summed: each of `buckets` equal buckets takes `message` seconds on the link.

    A bucket leaves when it is full and the link is free. The gradients come evenly during the `backward` seconds;
    without `overlap` the first bucket leaves after them.
    """
    link_free = 0.0
    for bucket in range(buckets):
        full = backward * (bucket + 1) / buckets if overlap else backward
        link_free = max(full, link_free) + message
    return link_free


def gathers(part: str) -> int:
    """How often stage 3 gathers a part in a micro-batch: blocks for forward and again for backward, the rest once."""
    return 2 if part.startswith("h.") else 1


@checked(sizes=0, stage=(1, 3), ranks=1, micro=1, element=1)
def zero_bytes_sent(sizes: dict[str, int], stage: int, ranks: int, micro: int = 1, element: int = 4) -> int:
    """Bytes that each rank sends in a step of ZeRO, for the `parts` of a model."""
    moved = {part: (ranks - 1) * shard_length(s, ranks) * element for part, s in sizes.items()}
    if stage == 1:
        return 2 * sum(moved.values())
    if stage == 2:
        return (micro + 1) * sum(moved.values())
    return micro * sum((gathers(part) + 1) * m for part, m in moved.items())


def owner_bytes_sent(sizes: dict[str, int], ranks: int, rank: int, micro: int = 1, element: int = 4) -> int:
    """The same where whole parts have an owner, which broadcasts (the chain ends silently) and gets the sums."""
    sent = 0
    for i, (part, size) in enumerate(sizes.items()):
        owner = owner_of(i, len(sizes), ranks)
        sent += gathers(part) * size * (rank != (owner - 1) % ranks) + size * (rank != owner)
    return micro * element * sent if ranks > 1 else 0


@checked(parameters=0, ranks=1)
def paper_bytes(parameters: float, ranks: int) -> dict[int, dict[str, float]]:
    """Bytes a rank by ZeRO stage and kind, as in Figure 1 of the paper: 2-byte weights and gradients, K = 12."""
    first = {"weights": (2, 3), "gradients": (2, 2), "optimizer": (12, 1)}  # bytes, and the stage that shares
    part = lambda stage, shared: parameters / (ranks if stage >= shared else 1)
    return {stage: {kind: b * part(stage, s) for kind, (b, s) in first.items()} for stage in range(4)}
