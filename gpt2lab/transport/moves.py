"""Every collective and message as a generator on streams: what one rank writes, what it reads, in which order.

Tensors are flat and contiguous here. A tensor of any size is sent in rounds of one slot; with two slots per rank
the next round can be written while the last is read. Rounds are the same on all ranks, so no call can wait for a
later one.

`ends` are this rank's ends of all streams; `kind` is the number of the call's kind, which is sent with every delivery.
"""

SMALL = 1 << 17  # bytes up to which an all-reduce is one exchange
CHUNK = 1 << 18  # bytes of one exchange: they fit into the cache of a core


def exchange_slots(ends, kind, x):
    """Deliver x to all; returns all ranks' x, in rank order, as views of their slots until `release`."""
    size = x.numel() * x.element_size()
    slot = yield from ends.out.claim()
    everyone = [slot.like(x).copy_(x)] * ends.ranks
    ends.out.deliver(ends.peers, size, kind)
    for peer in ends.peers:
        there = yield from ends.coming[peer].next(size, kind)
        everyone[peer] = there.like(x)
    return everyone


def release(ends) -> None:
    """Free the slots of an exchange."""
    for peer in ends.peers:
        ends.coming[peer].release()


def all_reduce(ends, kind, x, combine):
    """x becomes the combination of all ranks' x, the same bits on every rank.

    A small tensor, or one of two ranks, is combined whole on every rank: one exchange instead of two.
    """
    size = x.numel() * x.element_size()
    if ends.ranks == 1:
        return
    if ends.ranks > 2 and size > SMALL:
        for chunk in _chunks(x, ends.out.size):
            yield from _reduce_then_share(ends, kind, chunk, combine)
        return
    for chunk in _chunks(x, CHUNK):
        everyone = yield from exchange_slots(ends, kind, chunk)
        combine(everyone[0], everyone[1], out=chunk)
        for other in everyone[2:]:
            combine(chunk, other, out=chunk)
        release(ends)


def _reduce_then_share(ends, kind, x, combine):
    """A reduce-scatter and an all-gather of one slot: rank r combines the r-th part of x for all ranks."""
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
    """out becomes the combination of all ranks' parts[rank]; parts may differ in length."""
    width = out.element_size()
    step = ends.out.size // ends.ranks // width
    out.copy_(parts[ends.rank])
    for start in range(0, max(part.numel() for part in parts), step):
        rows = [part[start : start + step] for part in parts]
        size = sum(row.numel() for row in rows) * width
        slot = yield from ends.out.claim()
        for peer in ends.peers:
            slot.like(rows[peer], peer * step * width).copy_(rows[peer])
        ends.out.deliver(ends.peers, size, kind)
        mine = out[start : start + step]
        for peer in ends.peers:
            there = yield from ends.coming[peer].next(size, kind)
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
    """On the root, x becomes the combination of all ranks' x."""
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
    """outs[r] becomes rank r's parts[rank]: in step s, rank r sends to rank r + s and receives from rank r - s."""
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
    """Send x to one rank; done when that rank has read it, so two ranks that both send first wait forever."""
    stream = ends.send_to[to]
    yield from _give(stream, kind, x, (to,))
    yield from stream.settle()


def recv(ends, kind, x, source):
    """x becomes the tensor that one rank sends."""
    yield from _take(ends.recv_from[source], kind, x)


def _give(stream, kind, x, readers):
    """Deliver x to the readers, a slot at a time; no-op for an empty tensor."""
    for chunk in _chunks(x, stream.size):
        slot = yield from stream.claim()
        slot.like(chunk).copy_(chunk)
        stream.deliver(readers, chunk.numel() * chunk.element_size(), kind)


def _take(stream, kind, x):
    """x becomes what was delivered, a slot at a time."""
    for chunk in _chunks(x, stream.size):
        there = yield from stream.next(chunk.numel() * chunk.element_size(), kind)
        chunk.copy_(there.like(chunk))
        stream.release()


def _chunks(x, size):
    """x cut into chunks of at most `size` bytes; none for an empty tensor."""
    if x.numel() * x.element_size() <= size:
        return (x,) if x.numel() else ()
    return x.split(size // x.element_size())


def barrier(ends, kind):
    """An empty delivery from every rank to every other."""
    yield from ends.out.claim()
    ends.out.deliver(ends.peers, 0, kind)
    for peer in ends.peers:
        yield from ends.coming[peer].next(0, kind)
        ends.coming[peer].release()
