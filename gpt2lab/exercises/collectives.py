"""Checkers of lesson 03: algorithms written on messages are run on live ranks, and their messages are played again.

A right sum is not enough: who sent how much to whom, in how many messages and in how many rounds is checked as well.
"""

import torch

from . import close


class Wire:
    """What an answer may use: its place, and messages to other places; every message is noted for the checker."""

    def __init__(self, axis):
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self.noted = []

    def isend(self, x, to: int):
        """Start sending x to place `to`; wait for the handle before the end."""
        from ..ranks import comm

        self.noted.append(("send", to % self.size, x.numel()))
        return comm.isend(x, self.axis, to % self.size)

    def send(self, x, to: int) -> None:
        """Send x to place `to` and wait until it has left."""
        self.isend(x, to).wait()

    def recv(self, like, source: int):
        """Wait for a tensor of the shape of `like` from place `source`."""
        from ..ranks import comm

        self.noted.append(("recv", source % self.size, like.numel()))
        return comm.irecv(like, self.axis, source % self.size).wait()


def _on_a_rank(rank, world_size, answer, count):
    from ..ranks.mesh import Mesh

    wire = Wire(Mesh(dp=world_size)["dp"])
    x = _input(rank, count)
    result = answer(x, wire)
    return result, wire.noted, torch.equal(x, _input(rank, count))


def _input(rank: int, count: int):
    return torch.arange(count, dtype=torch.float64) + 100 * rank


def _play(answer, ranks: int, count: int):
    """Results and noted messages of a live run; a deadlock becomes one sentence."""
    from ..ranks.launch import RankFailed, launch

    try:
        found = launch(_on_a_rank, answer, count, ranks=ranks, echo=False, timeout=4)
    except RankFailed as error:
        if error.ename in ("Deadlock", "TimeoutError"):
            raise AssertionError(f"on {ranks} ranks yours wait for each other for ever. {error}") from None
        if error.ename == "Mismatch":
            raise AssertionError(f"a message of yours does not fit its receiver. {error}") from None
        raise
    assert all(same for *_, same in found), "your function changed its input x; work on a copy"
    return [result for result, *_ in found], [noted for _, noted, _ in found]


def _sends(noted):
    return [(to, count) for kind, to, count in noted if kind == "send"]


def rounds(noted: list[list[tuple]]) -> int:
    """Play messages again, each taking one round in which sender and receiver do nothing else: rounds needed."""
    clock, at = [0] * len(noted), [0] * len(noted)
    while any(at[r] < len(noted[r]) for r in range(len(noted))):
        moved = False
        for r, script in enumerate(noted):
            if at[r] == len(script) or script[at[r]][0] != "send":
                continue
            peer = script[at[r]][1]
            if at[peer] < len(noted[peer]) and noted[peer][at[peer]][:2] == ("recv", r):
                clock[r] = clock[peer] = max(clock[r], clock[peer]) + 1
                at[r], at[peer], moved = at[r] + 1, at[peer] + 1, True
        assert moved, "a message was sent that nobody received in its turn"
    return max(clock)


def ring(answer) -> None:
    """Exercise: a ring all-reduce."""
    for n, count in ((3, 6), (2, 4), (4, 8), (3, 7)):
        results, noted = _play(answer, n, count)
        case = f"{n} ranks, {count} numbers"
        for rank, result in enumerate(results):
            sends = _sends(noted[rank])
            off = [to for to, _ in sends if to != (rank + 1) % n]
            assert not off, (
                f"{case}: on a ring rank {rank} sends to its right neighbour only, not to {off[0]}"
            )
            assert len(sends) == 2 * (n - 1), (
                f"{case}: rank {rank} sent {len(sends)} messages; n-1 steps add up, n-1 hand out: {2 * (n - 1)}"
            )
            sizes = [len(c) for c in torch.arange(count).tensor_split(n)]
            total, least = sum(c for _, c in sends), 2 * count - 2 * max(sizes)
            most = 2 * count - 2 * min(sizes)
            assert least <= total <= most, (
                f"{case}: rank {rank} sent {total} numbers; chunks of 1/n make it {least} to {most}"
            )
            close(result, sum(_input(r, count) for r in range(n)), f"{case}: the sum on rank {rank}")


def tree(answer) -> None:
    """Exercise: a broadcast of rank 0's tensor in about log2 n rounds."""
    for n in (2, 3, 4, 5):
        results, noted = _play(answer, n, 3)
        for rank, result in enumerate(results):
            close(result, _input(0, 3), f"{n} ranks: what rank {rank} has in the end")
        total = sum(len(_sends(script)) for script in noted)
        assert total == n - 1, f"{n} ranks: {total} messages; each of the {n - 1} others needs exactly one"
        needed, best = rounds(noted), (n - 1).bit_length()
        assert needed <= best, (
            f"{n} ranks: {needed} rounds; whoever has the tensor should send in every round, that takes {best}"
        )


def to_all(answer) -> None:
    """Exercise: all-to-all from messages: chunk p of every rank goes to rank p, straight."""
    for n in (2, 3, 4):
        count = 2 * n
        results, noted = _play(answer, n, count)
        for rank, result in enumerate(results):
            want = torch.cat([_input(r, count).tensor_split(n)[rank] for r in range(n)])
            close(
                torch.cat(list(result)),
                want,
                f"{n} ranks: the chunks on rank {rank}, in order of their senders",
            )
            sends = sorted(_sends(noted[rank]))
            right = [(p, 2) for p in range(n) if p != rank]
            assert sends == right, (
                f"{n} ranks: rank {rank} sent {sends} as (to, numbers); one chunk straight to each other is {right}"
            )


def used_twice(rank, world_size, copy):
    """The gradient of copy(x) + x: autograd hands one and the same gradient to both branches."""
    from ..ranks.mesh import Mesh

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (copy(x, Mesh(tp=world_size)["tp"]) + x).sum().backward()
    return x.grad.item()


def predict(guess: float, measured: float, what: str, unit: str = "bytes") -> float:
    """Score a prediction: 1 for exact, 0 for wrong by a factor of four or more; prints one line."""
    import math

    score = (
        max(0.0, 1 - abs(math.log(guess / measured, 4)))
        if guess > 0 and measured > 0
        else float(guess == measured)
    )
    print(f"{what}: you say {guess:,.0f} {unit}, counted {measured:,.0f} {unit}. Score {score:.1f} of 1.")
    return score


def bus(answer) -> None:
    """Exercise: bus bandwidth of a reduce-scatter from the bytes of its *output* on one rank."""
    close(answer(4, 100.0, 1.0), 300.0, "n=4, 100 bytes out, 1 s (the whole array is n times the output)")
    close(answer(2, 8e9, 0.5), 16e9, "n=2, 8e9 bytes out, 0.5 s")
