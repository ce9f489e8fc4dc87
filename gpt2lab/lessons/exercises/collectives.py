"""Checkers of lesson 03: algorithms written on messages are run on live ranks, and their messages are played again.

A right sum is not enough: the bytes, messages and rounds between each two ranks are checked as well.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import close, live, returned, scored
from .engine import Task, by_chance


class Wire:
    """What an answer may use: its place, and messages to other places; everything is noted for the checker."""

    def __init__(self, axis):
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self.noted = []

    def isend(self, x, to: int):
        """Start sending x to place `to`; wait for the handle before the end."""
        from ...ranks import comm

        self.noted.append(("send", to % self.size, x.nbytes))
        number, begun = sum(kind == "send" for kind, *_ in self.noted) - 1, x.clone()

        def left():
            self.noted.append(("wait", number, 0))
            assert torch.equal(x, begun), (
                f"rank {self.rank} wrote into a tensor between isend and wait: what has not left may be sent changed"
            )

        return Going(comm.isend(x, self.axis, to % self.size), left)

    def send(self, x, to: int) -> None:
        """Send x to place `to` and wait until it has left."""
        self.isend(x, to).wait()

    def recv(self, like, source: int):
        """Wait for a tensor of the shape of `like` from place `source`."""
        from ...ranks import comm

        self.noted.append(("recv", source % self.size, like.nbytes))
        return comm.irecv(like, self.axis, source % self.size).wait()


@dataclass
class Going:
    """A message in transit; waiting for it is recorded."""

    handle: object
    note: Callable

    def wait(self) -> None:
        """Return when it has left."""
        self.handle.wait()
        self.note()


def _on_a_rank(rank, world_size, answer, count, seed):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    wire = Wire(Mesh(dp=world_size)["dp"])
    x = _input(rank, count, seed)
    comm.clear_log()
    result = answer(x, wire)
    beside = {e.op for e in comm.log} - {"send", "recv"}
    return result, wire.noted, beside, torch.equal(x, _input(rank, count, seed))


def _input(rank: int, count: int, seed: int | None = None):
    if seed is None:  # thirds: float32 shows
        return torch.arange(count, dtype=torch.float64) / 3 + 100 * rank**2 + rank
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank))


def _play(answer, ranks: int, count: int, seed: int | None):
    """Results and noted messages of a live run."""
    what = f"with {count} numbers on {ranks} ranks"
    found = live(_on_a_rank, answer, count, seed, ranks=ranks, what=what)
    assert all(same for *_, same in found), "your function changed its input x; work on a copy"
    assert all(result is not None for result, *_ in found), (
        "your function returned None. Is the return missing?"
    )
    for rank, (_, noted, beside, _) in enumerate(found):
        assert not beside, (
            f"{what}: rank {rank} also called {', '.join(sorted(beside))}: what counts is what goes over `wire`"
        )
        sent, waited = len(_sends(noted)), len({number for kind, number, _ in noted if kind == "wait"})
        assert sent == waited, (
            f"{what}: rank {rank} waited for {waited} of its {sent} sends. What has not left may still change"
        )
    return [result for result, *_ in found], [noted for _, noted, *_ in found]


def _sends(noted):
    return [(to, size) for kind, to, size in noted if kind == "send"]


def rounds(noted: list[list[tuple]]) -> int:
    """Play messages again: each takes one round, a rank sends one at a time. The rounds until all have arrived.

    A message is sent when it is started, or when the one before it was sent; a rank waits for what it receives.
    """
    ranks = range(len(noted))
    clock, at, ends = [0 for _ in ranks], [0 for _ in ranks], [[0] for _ in ranks]
    coming = defaultdict(deque)
    while any(at[r] < len(noted[r]) for r in ranks):
        before = list(at)
        for r in ranks:
            while at[r] < len(noted[r]):
                kind, peer, _ = noted[r][at[r]]
                if kind == "recv" and not coming[peer, r]:
                    break
                at[r] += 1
                if kind == "send":
                    ends[r].append(max(clock[r], ends[r][-1]) + 1)
                    coming[r, peer].append(ends[r][-1])
                else:  # of a send that is waited for, `peer` is the number
                    until = coming[peer, r].popleft() if kind == "recv" else ends[r][1 + peer]
                    clock[r] = max(clock[r], until)
        assert at != before, "a rank receives a message that no rank has sent"
    assert not any(coming.values()), "a message was sent that no rank received"
    return max(last for of_one in ends for last in of_one)


NUMBER = 8  # bytes of a float64, of which all inputs consist


def ring(answer) -> None:
    """Exercise: a ring all-reduce."""
    for n, count in ((3, 6), (2, 4), (4, 9), (3, 7)):
        _ring_of(answer, n, count)
    by_chance(lambda chance: _ring_of(answer, 5, chance.randint(8, 30), chance.randrange(1000)), 1)


def _ring_of(answer, n: int, count: int, seed: int | None = None) -> None:
    results, noted = _play(answer, n, count, seed)
    case = f"{n} ranks, {count} numbers of {NUMBER} bytes"
    sizes = [NUMBER * part.numel() for part in torch.arange(count).tensor_split(n)]
    least, most = (2 * (sum(sizes) - edge) for edge in (max(sizes), min(sizes)))
    for rank, result in enumerate(results):
        sends = _sends(noted[rank])
        off = [to for to, _ in sends if to != (rank + 1) % n]
        assert not off, f"{case}: on a ring rank {rank} sends to its right neighbour only, not to {off[0]}"
        assert len(sends) == 2 * (n - 1), (
            f"{case}: rank {rank} sent {len(sends)} messages; n-1 steps add up, n-1 hand out: {2 * (n - 1)}"
        )
        total = sum(size for _, size in sends)
        assert least <= total <= most, (
            f"{case}: rank {rank} sent {total} bytes; chunks of 1/n make it {least} to {most}"
        )
        close(result, sum(_input(r, count, seed) for r in range(n)), f"{case}: the sum on rank {rank}")
    needed, best = rounds(noted), 2 * (n - 1)
    assert needed <= best, (
        f"{case}: your messages take {needed} rounds, a ring takes {best}: all ranks send at the same time"
    )


def tree(answer) -> None:
    """Exercise: a broadcast of rank 0's tensor in about log2 n rounds."""
    for n in (2, 3, 4, 5):
        _tree_of(answer, n)
    by_chance(lambda chance: _tree_of(answer, 8, chance.randrange(1000)), 1)


def _tree_of(answer, n: int, seed: int | None = None) -> None:
    results, noted = _play(answer, n, 3, seed)
    for rank, result in enumerate(results):
        close(result, _input(0, 3, seed), f"{n} ranks: what rank {rank} has in the end")
    sizes = {size for script in noted for _, size in _sends(script)}
    assert sizes <= {3 * NUMBER}, f"{n} ranks: messages of {sorted(sizes)} bytes; the tensor has {3 * NUMBER}"
    total = sum(len(_sends(script)) for script in noted)
    assert total == n - 1, f"{n} ranks: {total} messages; each of the {n - 1} others needs exactly one"
    needed, best = rounds(noted), (n - 1).bit_length()
    busiest = max(len(_sends(script)) for script in noted)
    assert busiest <= best, (
        f"{n} ranks: one rank sends {busiest} messages; in a tree nobody sends more than {best}"
    )
    assert needed <= best, (
        f"{n} ranks: {needed} rounds; whoever has the tensor should send in every round, that takes {best}"
    )


def to_all(answer) -> None:
    """Exercise: all-to-all from messages: chunk p of every rank goes to rank p, straight."""
    for n in (2, 3, 4):
        _to_all_of(answer, n, 2 * n + 1)  # not a multiple: chunks differ in length
    by_chance(lambda chance: _to_all_of(answer, 5, chance.randint(8, 30), chance.randrange(1000)), 1)


def _to_all_of(answer, n: int, count: int, seed: int | None = None) -> None:
    results, noted = _play(answer, n, count, seed)
    for rank, result in enumerate(results):
        assert isinstance(result, list | tuple), f"return a list of {n} chunks, not {type(result).__name__}"
        want = torch.cat([_input(r, count, seed).tensor_split(n)[rank] for r in range(n)])
        close(
            torch.cat(list(result)),
            want,
            f"{n} ranks: the chunks on rank {rank}, in order of their senders",
        )
        sends = sorted(_sends(noted[rank]))
        sizes = [NUMBER * part.numel() for part in torch.arange(count).tensor_split(n)]
        right = [(p, size) for p, size in enumerate(sizes) if p != rank]
        assert sends == right, (
            f"{n} ranks: rank {rank} sent {sends} as (to, bytes); one chunk straight to each other is {right}"
        )
    needed, best = rounds(noted), n - 1
    assert needed <= best, (
        f"{n} ranks: your messages take {needed} rounds instead of {best}: start all sends before you receive"
    )


def used_twice(rank, world_size, copy):
    """The gradient of copy(x) + x: autograd passes the same gradient to both branches."""
    from ...ranks.mesh import Mesh

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (copy(x, Mesh(tp=world_size)["tp"]) + x).sum().backward()
    return x.grad.item()


bus = Task(
    lambda n, size, seconds: (n - 1) * size / seconds,
    shown={
        "n=4, 100 bytes out, 1 s (the whole array is n times the output)": (4, 100.0, 1.0),
        "n=2, 8e9 bytes out, 0.5 s": (2, 8e9, 0.5),
        "n=3, 90 bytes out, 2 s": (3, 90.0, 2.0),
    },
    what="n={}, {} bytes out, {} s",
    drawn=lambda chance: (chance.randint(1, 64), 1e6 * chance.randint(1, 99), chance.randint(1, 9) / 8),
)
"""Exercise: bus bandwidth of a reduce-scatter from the bytes of its *output* on one rank."""


RANKS, CHUNKS = 8, 4


def in_rounds(answer) -> str:
    """Puzzle: rank 0's chunks on all ranks in few rounds; then live ranks send what the rounds say."""
    rounds = list(returned(answer()))
    held = [set(range(CHUNKS) if rank == 0 else ()) for rank in range(RANKS)]
    for number, messages in enumerate(rounds, 1):
        _one_round(f"round {number}", messages, held)
    for rank, chunks in enumerate(held):
        missing = set(range(CHUNKS)) - chunks
        assert not missing, f"after {len(rounds)} rounds rank {rank} lacks chunk {min(missing)}"
    words = scored(len(rounds), "rounds", bar=7, best=6)
    for rank, got in enumerate(live(_sent_in_rounds, rounds, ranks=RANKS)):
        close(got, torch.arange(CHUNKS), f"the chunks of live rank {rank}")
    return words


def _one_round(when: str, messages, held: list[set[int]]) -> None:
    """Note what ranks hold after a round."""
    for message in messages:
        assert len(message) == 3, f"{when}: {message} is no (from, to, chunk)"
        sender, receiver, chunk = message
        known = {sender, receiver} <= set(range(RANKS)) and chunk in range(CHUNKS)
        assert known and sender != receiver, (
            f"{when}: {message}, but two ranks of 0 to {RANKS - 1} and a chunk of 0 to {CHUNKS - 1} are wanted"
        )
        assert chunk in held[sender], (
            f"{when}: rank {sender} sends chunk {chunk}, which it did not hold before"
        )
    for place, does in enumerate(("sends", "receives")):
        for rank, times in Counter(message[place] for message in messages).items():
            assert times == 1, f"{when}: rank {rank} {does} {times} chunks; one is allowed"
    for _, receiver, chunk in messages:
        held[receiver].add(chunk)


def _sent_in_rounds(rank, world_size, rounds):
    """The chunks that this rank has in the end, each a number."""
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, chunks = Mesh(dp=world_size)["dp"], torch.full((CHUNKS, 1), -1.0)
    if rank == 0:
        chunks = torch.arange(float(CHUNKS))[:, None]
    for messages in rounds:
        going = [comm.isend(chunks[c].clone(), axis, to) for sender, to, c in messages if sender == rank]
        for sender, to, c in messages:
            if to == rank:
                chunks[c] = comm.irecv(chunks[c].clone(), axis, sender).wait()
        for handle in going:
            handle.wait()
    return chunks[:, 0]
