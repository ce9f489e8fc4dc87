"""Every collective and message as a generator on streams: what one rank writes, what it reads, in which order.

Tensors are flat and contiguous here. A tensor of any size goes in rounds, one slot a round; two slots a rank let the
next round be written while the last is read. Rounds are the same on all ranks, so no call can wait for a later one.

`ends` are this rank's ends of all streams; `kind` is the number of the call's kind, which travels with every delivery.
"""

SMALL = 1 << 17  # bytes up to which an all-reduce is one exchange
PIECE = 1 << 18  # bytes of one exchange: they stay in the cache of a core


def exchange(ends, kind, x):
    """Deliver x to all; returns everybody's x, in rank order, in their slots. Give them back with `release`."""
    size = x.numel() * x.element_size()
    slot = yield from ends.out.claim()
    everyone = [slot.like(x).copy_(x)] * ends.ranks
    ends.out.deliver(ends.peers, size, kind)
    for peer in ends.peers:
        there = yield from ends.coming[peer].next(size, kind)
        everyone[peer] = there.like(x)
    return everyone


def release(ends) -> None:
    """Give the slots of an exchange back."""
    for peer in ends.peers:
        ends.coming[peer].release()


def all_reduce(ends, kind, x, combine):
    """x becomes the combination of everybody's x, the same bits on every rank.

    Where a tensor is small, or there are two ranks, every rank combines everything: one exchange, not two.
    """
    size = x.numel() * x.element_size()
    if ends.ranks == 1:
        return
    if ends.ranks > 2 and size > SMALL:
        for chunk in _chunks(x, ends.out.size):
            yield from _reduce_then_share(ends, kind, chunk, combine)
        return
    for chunk in _chunks(x, PIECE):
        everyone = yield from exchange(ends, kind, chunk)
        combine(everyone[0], everyone[1], out=chunk)
        for other in everyone[2:]:
            combine(chunk, other, out=chunk)
        release(ends)


def _reduce_then_share(ends, kind, x, combine):
    """A reduce-scatter and an all-gather of one slot: rank r combines the r-th part of x for all."""
    size, width = x.numel() * x.element_size(), x.element_size()
    parts = x.tensor_split(ends.ranks)
    starts = [width * (part.storage_offset() - x.storage_offset()) for part in parts]
    mine = parts[ends.rank]
    slot = yield from ends.out.claim()
    for peer in ends.peers:
        slot.like(parts[peer], starts[peer]).copy_(parts[peer])
    ends.out.deliver(ends.peers, size, kind)
    for peer in ends.peers:
        there = yield from ends.coming[peer].next(size, kind)
        combine(mine, there.like(mine, starts[ends.rank]), out=mine)
        ends.coming[peer].release()
    yield from all_gather(ends, kind, parts, mine)


def reduce_scatter(ends, kind, out, parts, combine):
    """out becomes the combination of everybody's parts[rank]; parts may differ in length."""
    width = out.element_size()
    step = ends.out.size // ends.ranks // width
    out.copy_(parts[ends.rank])
    for start in range(0, max(part.numel() for part in parts), step):
        row = lambda rank, start=start: parts[rank][start : start + step]
        slot = yield from ends.out.claim()
        for peer in ends.peers:
            slot.like(row(peer), peer * step * width).copy_(row(peer))
        ends.out.deliver(ends.peers, ends.out.size, kind)
        mine = out[start : start + step]
        for peer in ends.peers:
            there = yield from ends.coming[peer].next(ends.out.size, kind)
            combine(mine, there.like(mine, ends.rank * step * width), out=mine)
            ends.coming[peer].release()


def all_gather(ends, kind, outs, x):
    """outs[r] becomes rank r's x; they may differ in length."""
    step = ends.out.size // x.element_size()
    if outs[ends.rank].data_ptr() != x.data_ptr():
        outs[ends.rank].copy_(x)
    for start in range(0, max(out.numel() for out in outs), step):
        yield from _give(ends.out, kind, x[start : start + step], ends.peers)
        for peer in ends.peers:
            yield from _take(ends.coming[peer], kind, outs[peer][start : start + step])


def broadcast(ends, kind, x, root):
    """x becomes the root's x."""
    if ends.rank == root:
        yield from _give(ends.out, kind, x, ends.peers)
    else:
        yield from _take(ends.coming[root], kind, x)


def reduce(ends, kind, x, root, combine):
    """On the root, x becomes the combination of everybody's x."""
    if ends.rank != root:
        yield from _give(ends.out, kind, x, (root,))
        return
    for chunk in _chunks(x, ends.out.size):
        for peer in ends.peers:
            there = yield from ends.coming[peer].next(chunk.numel() * chunk.element_size(), kind)
            combine(chunk, there.like(chunk), out=chunk)
            ends.coming[peer].release()


def gather(ends, kind, outs, x, root):
    """On the root, outs[r] becomes rank r's x; they may differ in length."""
    if ends.rank != root:
        yield from _give(ends.out, kind, x, (root,))
        return
    outs[root].copy_(x)
    for peer in ends.peers:
        yield from _take(ends.coming[peer], kind, outs[peer])


def scatter(ends, kind, out, parts, root):
    """out becomes the root's parts[rank]; they may differ in length."""
    if ends.rank != root:
        yield from _take(ends.coming[root], kind, out)
        return
    out.copy_(parts[root])
    for peer in ends.peers:
        yield from _give(ends.out, kind, parts[peer], (peer,))


def all_to_all(ends, kind, outs, parts):
    """outs[r] becomes what rank r has for this one: in step s everybody gives to s places on and takes from s back."""
    outs[ends.rank].copy_(parts[ends.rank])
    for distance in range(1, ends.ranks):
        to, source = (ends.rank + distance) % ends.ranks, (ends.rank - distance) % ends.ranks
        going, coming = _chunks(parts[to], ends.out.size), _chunks(outs[source], ends.out.size)
        for number in range(max(len(going), len(coming))):
            if number < len(going):
                yield from _give(ends.out, kind, going[number], (to,))
            if number < len(coming):
                yield from _take(ends.coming[source], kind, coming[number])


def send(ends, kind, x, to):
    """Give x to one rank; over when that rank has taken it, so two that only send wait for each other."""
    stream = ends.send_to[to]
    yield from _give(stream, kind, x, (to,))
    yield from stream.settle()


def recv(ends, kind, x, source):
    """x becomes what one rank sends."""
    yield from _take(ends.recv_from[source], kind, x)


def _give(stream, kind, x, readers):
    """Deliver x to the readers, a slot at a time; nothing of an empty tensor."""
    for chunk in _chunks(x, stream.size):
        slot = yield from stream.claim()
        slot.like(chunk).copy_(chunk)
        stream.deliver(readers, chunk.numel() * chunk.element_size(), kind)


def _take(stream, kind, x):
    """x becomes what was given, a slot at a time."""
    for chunk in _chunks(x, stream.size):
        there = yield from stream.next(chunk.numel() * chunk.element_size(), kind)
        chunk.copy_(there.like(chunk))
        stream.release()


def _chunks(x, size):
    """x cut into what fits into a slot of `size` bytes; nothing of an empty tensor."""
    if x.numel() * x.element_size() <= size:
        return (x,) if x.numel() else ()
    return x.split(size // x.element_size())


def barrier(ends, kind):
    """Nothing moves; everybody hears from everybody."""
    yield from ends.out.claim()
    ends.out.deliver(ends.peers, 0, kind)
    for peer in ends.peers:
        yield from ends.coming[peer].next(0, kind)
        ends.coming[peer].release()
