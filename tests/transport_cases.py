"""What every call of a transport must give, as one-line serial formulas on integers: exact, whatever the order of sums.

`check(group, ranks, size, dtype)` runs inside a rank and returns the names of calls that were wrong.
"""

import torch
import torch.distributed as dist

SIZES = (0, 1, 7, 1000, 40_000, 600_001)  # elements: empty, below and above what one slot holds
HOW = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}


def tensor(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small integers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-2, 3, (size,), generator=generator).to(dtype)


def combined(how: str, ranks, size, dtype, salt=0) -> torch.Tensor:
    """The combination of all ranks' tensors, computed by one."""
    stack = torch.stack([tensor(r, size, dtype, salt) for r in ranks])
    return HOW[how](stack, 0).to(dtype)


def uneven(size: int, count: int) -> list[int]:
    """Lengths that differ, one of them 0 where there are three or more."""
    return [size * (p + 1) // count if p != 1 or count < 3 else 0 for p in range(count)]


def check(group, ranks: list[int], size: int, dtype: torch.dtype) -> list[str]:
    """Run every call once; returns what went wrong."""
    me, count = dist.get_rank(group), len(ranks)
    mine = tensor(ranks[me], size, dtype)
    wrong = []

    def expect(name, found, wanted):
        if not torch.equal(found, wanted):
            wrong.append(f"{name} of {size} {dtype} on {count} ranks")

    for how in HOW:
        x = mine.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, how), group=group)
        expect(f"all_reduce {how}", x, combined(how, ranks, size, dtype))
    for root in {0, count - 1}:
        x = mine.clone()
        dist.broadcast(x, group_src=root, group=group)
        expect("broadcast", x, tensor(ranks[root], size, dtype))
        x = mine.clone()
        dist.reduce(x, group_dst=root, group=group)
        expect("reduce", x, combined("SUM", ranks, size, dtype) if me == root else mine)
        outs = [torch.empty_like(mine) for _ in ranks] if me == root else None
        dist.gather(mine, outs, group_dst=root, group=group)
        for r, out in zip(ranks, outs or [], strict=False):
            expect("gather", out, tensor(r, size, dtype))
        parts = [tensor(r, size, dtype, 7) for r in ranks] if me == root else None
        out = torch.empty_like(mine)
        dist.scatter(out, parts, group_src=root, group=group)
        expect("scatter", out, tensor(ranks[me], size, dtype, 7))
    _lists(group, ranks, me, size, dtype, expect)
    _messages(group, me, count, mine, lambda r: tensor(ranks[r], size, dtype), expect)
    dist.barrier(group=group)
    return wrong


def _lists(group, ranks, me, size, dtype, expect) -> None:
    """all_gather, reduce_scatter and all_to_all: as lists of different lengths, and as one tensor."""
    count = len(ranks)
    lengths = uneven(size, count)
    outs = [torch.empty(n, dtype=dtype) for n in lengths]
    dist.all_gather(outs, tensor(ranks[me], lengths[me], dtype), group=group)
    for r, out, n in zip(ranks, outs, lengths, strict=True):
        expect("all_gather", out, tensor(r, n, dtype))
    whole = torch.empty(count * size, dtype=dtype)
    dist.all_gather_single(whole, tensor(ranks[me], size, dtype), group=group)
    expect("all_gather_single", whole, torch.cat([tensor(r, size, dtype) for r in ranks]))

    out = torch.empty(lengths[me], dtype=dtype)
    dist.reduce_scatter(out, [tensor(ranks[me], n, dtype, p) for p, n in enumerate(lengths)], group=group)
    expect("reduce_scatter", out, combined("SUM", ranks, lengths[me], dtype, me))
    out = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_single(out, tensor(ranks[me], count * size, dtype), group=group)
    everything = combined("SUM", ranks, count * size, dtype)
    expect("reduce_scatter_single", out, everything[me * size : (me + 1) * size])

    outs = [torch.empty(n, dtype=dtype) for n in lengths]  # from each what its place says
    dist.all_to_all(outs, [tensor(ranks[me], lengths[me], dtype, p) for p in range(count)], group=group)
    for r, out, n in zip(ranks, outs, lengths, strict=True):
        expect("all_to_all", out, tensor(r, n, dtype, me))
    coming, going = lengths, [lengths[me]] * count
    out = torch.empty(sum(coming), dtype=dtype)
    dist.all_to_all_single(out, tensor(ranks[me], sum(going), dtype), coming, going, group=group)
    parts = [tensor(r, count * n, dtype)[me * n : (me + 1) * n] for r, n in zip(ranks, lengths, strict=True)]
    expect("all_to_all_single", out, torch.cat(parts))
    out = torch.empty(count * size, dtype=dtype)
    dist.all_to_all_single(out, tensor(ranks[me], count * size, dtype), group=group)
    parts = [tensor(r, count * size, dtype)[me * size : (me + 1) * size] for r in ranks]
    expect("all_to_all_single, even", out, torch.cat(parts))


def _messages(group, me, count, mine, theirs, expect) -> None:
    """Everybody receives before it sends, twice around the ring, with an all-reduce in between."""
    if count == 1:
        return
    to, source = (me + 1) % count, (me - 1) % count
    first, second, total = torch.empty_like(mine), torch.empty_like(mine), torch.ones(3)
    works = [
        dist.irecv(first, group_src=source, group=group),
        dist.irecv(second, group_src=source, group=group),
        dist.all_reduce(total, group=group, async_op=True),
        dist.isend(mine, group_dst=to, group=group),
        dist.isend(2 * mine, group_dst=to, group=group),
    ]
    for work in reversed(works):
        work.wait()
    expect("first message", first, theirs(source))
    expect("second message", second, 2 * theirs(source))
    expect("all_reduce beside messages", total, torch.full((3,), float(count)))
