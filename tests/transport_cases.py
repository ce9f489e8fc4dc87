"""What every call of a transport must give, as one-line serial formulas: exact, whatever the order of sums.

Integers have all their bits at random, so that sums run over. Fractions are whole numbers, and any normal numbers on
two ranks, where no order shows. `check(group, ranks, size, dtype)` runs inside a rank and returns the names of calls
that were wrong.
"""

from functools import partial, reduce

import torch
import torch.distributed as dist

SIZES = (0, 1, 7, 1000, 40_000, 600_001)  # elements: empty, below and above what one slot holds
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # torch adds none of them
BITWISE = {
    "BAND": partial(reduce, torch.bitwise_and),
    "BOR": partial(reduce, torch.bitwise_or),
    "BXOR": partial(reduce, torch.bitwise_xor),
}
HOW = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: stack.sum(0) / len(stack),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
} | BITWISE


def ways(dtype: torch.dtype) -> list[str]:
    """The reductions that are exact for a dtype (the average of complex numbers is not)."""
    if dtype in FLOATS:
        return [how for how in HOW if how not in BITWISE]
    if dtype in INTEGERS:
        return [how for how in HOW if how != "AVG"]
    return ["SUM"] if dtype in COMPLEX else []


def tensor(rank: int, size: int, dtype: torch.dtype, salt: int = 0, count: int = 3) -> torch.Tensor:
    """What a rank of so many begins with: other numbers on each."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    draw = lambda: torch.randint(-2, 3, (size,), generator=generator)
    if dtype in COMPLEX:
        return torch.complex(draw().double(), draw().double()).to(dtype)
    if dtype in FLOATS and count == 2:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    if dtype in FLOATS or dtype is torch.bool:
        return draw().to(dtype)
    bits = torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def combined(how: str, ranks, size, dtype, salt=0) -> torch.Tensor:
    """The combination of all ranks' tensors, computed by one."""
    return HOW[how](torch.stack([tensor(r, size, dtype, salt, len(ranks)) for r in ranks])).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits (torch compares no float8)."""
    raw = lambda x: x.contiguous().view(torch.uint8)
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def uneven(size: int, count: int) -> list[int]:
    """Lengths that differ, one of them 0 where there are three or more."""
    return [size * (p + 1) // count if p != 1 or count < 3 else 0 for p in range(count)]


def check(group, ranks: list[int], size: int, dtype: torch.dtype) -> list[str]:
    """Run every call once; returns what went wrong."""
    me, count = dist.get_rank(group), len(ranks)
    mine = tensor(ranks[me], size, dtype)
    wrong = []

    def expect(name, found, wanted):
        if not same_bits(found, wanted):
            wrong.append(f"{name} of {size} {dtype} on {count} ranks")

    for how in ways(dtype) if size < SIZES[-1] else ["SUM"]:  # a large one goes the same way, in rounds
        _reductions(group, ranks, me, size, dtype, how, expect)
    for root in {0, count - 1}:
        x = mine.clone()
        dist.broadcast(x, group_src=root, group=group)
        expect("broadcast", x, tensor(ranks[root], size, dtype))
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


def _reductions(group, ranks, me, size, dtype, how, expect) -> None:
    """Everything that combines, in one way."""
    op, count, lengths = getattr(dist.ReduceOp, how), len(ranks), uneven(size, len(ranks))
    mine = partial(tensor, ranks[me], dtype=dtype, count=count)
    x = mine(size)
    dist.all_reduce(x, op, group=group)
    expect(f"all_reduce {how}", x, combined(how, ranks, size, dtype))
    for root in {0, count - 1}:
        x = mine(size)
        dist.reduce(x, op=op, group_dst=root, group=group)
        if me == root:
            expect(f"reduce {how}", x, combined(how, ranks, size, dtype))
    out = torch.empty(lengths[me], dtype=dtype)
    parts = [mine(n, salt=p) for p, n in enumerate(lengths)]
    dist.reduce_scatter(out, parts, op, group=group)
    expect(f"reduce_scatter {how}", out, combined(how, ranks, lengths[me], dtype, me))
    out = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_single(out, mine(count * size), op, group=group)
    everything = combined(how, ranks, count * size, dtype)
    expect(f"reduce_scatter_single {how}", out, everything[me * size : (me + 1) * size])


def _lists(group, ranks, me, size, dtype, expect) -> None:
    """all_gather and all_to_all: as lists of different lengths, and as one tensor."""
    count = len(ranks)
    lengths = uneven(size, count)
    outs = [torch.empty(n, dtype=dtype) for n in lengths]
    dist.all_gather(outs, tensor(ranks[me], lengths[me], dtype), group=group)
    for r, out, n in zip(ranks, outs, lengths, strict=True):
        expect("all_gather", out, tensor(r, n, dtype))
    whole = torch.empty(count * size, dtype=dtype)
    dist.all_gather_single(whole, tensor(ranks[me], size, dtype), group=group)
    expect("all_gather_single", whole, torch.cat([tensor(r, size, dtype) for r in ranks]))

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
    twice = lambda x: torch.cat([x, x])
    first, second, total = torch.empty_like(mine), twice(torch.empty_like(mine)), torch.ones(3)
    works = [
        dist.irecv(first, group_src=source, group=group),
        dist.irecv(second, group_src=source, group=group),
        dist.all_reduce(total, group=group, async_op=True),
        dist.isend(mine, group_dst=to, group=group),
        dist.isend(twice(mine), group_dst=to, group=group),
    ]
    for work in reversed(works):
        work.wait()
    expect("first message", first, theirs(source))
    expect("second message", second, twice(theirs(source)))
    expect("all_reduce beside messages", total, torch.full((3,), float(count)))
