"""Ranks that wait in a circle are told so at once, with the circle; ranks that only wait are left alone."""

import functools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import planted

from gpt2lab import RankFailed, launch
from gpt2lab.processes import deadlock
from gpt2lab.processes.status_board import Board
from gpt2lab.ranks import comm, paced
from gpt2lab.ranks.mesh import Mesh

pytestmark = pytest.mark.live

ONES = torch.ones(4)


def all_receive(rank, world_size):
    comm.recv(ONES, Mesh(dp=world_size)["dp"], (rank + 1) % world_size)  # the line that waits


def all_send(rank, world_size):
    comm.send(ONES, Mesh(dp=world_size)["dp"], (rank + 1) % world_size)  # the line that waits


def after_other_calls(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    for _ in range(70):  # more calls than the board remembers
        comm.all_reduce(ONES, axis)
    comm.ring_shift(ONES, axis)
    comm.recv(ONES, axis, (rank + 1) % world_size)  # the line that waits


def a_wait_for_a_handle(rank, world_size):
    coming = comm.irecv(ONES, Mesh(dp=world_size)["dp"], (rank + 1) % world_size)
    coming.wait()  # the line that waits


def message_and_collective(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    if rank == 0:
        comm.recv(ONES, axis, 1)  # the line that waits
    comm.all_reduce(ONES, axis)  # the line that waits


def swapped_axes(rank, world_size):
    mesh = Mesh(dp=2, tp=2)
    for name in ("dp", "tp") if rank in (0, 3) else ("tp", "dp"):
        comm.all_reduce(ONES, mesh[name])  # the line that waits


def two_and_a_bystander(rank, world_size):
    comm.recv(ONES, Mesh(dp=world_size)["dp"], {0: 2, 1: 0, 2: 0}[rank])  # the line that waits


CIRCLES = {  # how many ranks, the circle, and how each of its ranks waits
    all_receive: (3, "0 -> 1 -> 2 -> 0", "recv #1 on axis 'dp' (4,) float32 for rank"),
    all_send: (3, "0 -> 1 -> 2 -> 0", "send #1 on axis 'dp' (4,) float32 for rank"),
    after_other_calls: (3, "0 -> 1 -> 2 -> 0", "recv #1 on axis 'dp' (4,) float32 for rank"),
    a_wait_for_a_handle: (2, "0 -> 1 -> 0", "recv #1 on axis 'dp' (4,) float32 for rank"),
    message_and_collective: (2, "0 -> 1 -> 0", "on axis 'dp'"),
    swapped_axes: (4, "0 -> 2 -> 3 -> 1 -> 0", " sum (4,) float32 for rank"),
    two_and_a_bystander: (3, "0 -> 2 -> 0", "recv #1 on axis 'dp' (4,) float32 for rank"),
}


def failure(fn, ranks, timeout=600.0) -> RankFailed:
    with pytest.raises(RankFailed) as info:
        launch(fn, ranks=ranks, timeout=timeout, echo=False)
    return info.value


@pytest.mark.parametrize("fn", CIRCLES, ids=lambda fn: fn.__name__)
def test_a_circle_is_explained_long_before_the_timeout(fn):
    ranks, shown, how = CIRCLES[fn]
    error = failure(fn, ranks)
    assert (error.ename, error.rank) == ("Deadlock", 0)
    first, *lines = str(error).splitlines()
    assert first.startswith(
        f"The ranks wait in a circle: {shown}. Each needs a call that the next has not made"
    )
    members = shown.split(" -> ")
    for line, rank, following in zip(lines, members, members[1:], strict=False):
        assert line.startswith(f"  rank {rank} waits ") and how in line, line
        assert line.split(" for rank")[1].strip("s ").startswith(following), line
        assert line.endswith("# the line that waits`"), line
    assert len(lines) == ranks and len(error.states) == ranks


def test_mutant_that_finds_no_circle_is_noticed():
    with planted(deadlock, "find_circle", lambda right: lambda *_: []):  # so it is left to the timeout
        assert failure(all_receive, 3, timeout=2).ename == "TimeoutError"


def slow_messages(rank, world_size):
    """Every message takes far longer than a circle needs to be found; nobody waits in vain."""
    axis = Mesh(dp=world_size)["dp"]
    with paced.use(paced.Link(3 * deadlock.PATIENCE, 1e9)):
        comm.isend(ONES, axis, (rank + 1) % world_size)
        comm.recv(ONES, axis, (rank - 1) % world_size)
        total = comm.all_reduce(ONES, axis, async_op=True)
        comm.ring_shift(ONES, axis)
        total.wait()
    return True


def slow_ranks(rank, world_size):
    """One rank after the other is busy while the others wait for it, in messages and in collectives."""
    axis = Mesh(dp=world_size)["dp"]
    for busy in range(world_size):
        if rank == busy:
            time.sleep(3 * deadlock.PATIENCE)
        comm.all_reduce(ONES, axis)
        comm.ring_shift(ONES, axis, 1 + busy % 2)
    return True


@pytest.mark.parametrize("fn", [slow_messages, slow_ranks])
def test_ranks_that_wait_for_what_is_on_its_way_are_left_alone(fn):
    assert launch(fn, ranks=3, echo=False, timeout=60) == [True] * 3


def test_mutant_that_forgets_what_was_begun_is_noticed():
    with planted(Board, "begun", lambda right: lambda self, rank, channel: 0):
        assert failure(slow_messages, 3).ename == "Deadlock"  # a false alarm


# Random programs against an oracle that plays them to the end


class Played:
    """A program for each rank, played on a real board: `post` begins a call, `wait` blocks until its peer has."""

    def __init__(self, folder, scripts):
        self.scripts, n = scripts, len(scripts)
        self.boards = [Board(folder / "board", n, 0, create=True)]
        self.boards += [Board(folder / "board", n, rank) for rank in range(1, n)]
        self.at, self.posted, self.open = [0] * n, [{} for _ in range(n)], [{} for _ in range(n)]

    def ready(self, rank) -> bool:
        """Whether a rank can take its next step."""
        if self.at[rank] == len(self.scripts[rank]):
            return False
        kind, peer = self.scripts[rank][self.at[rank]]
        return kind == "post" or self._there(rank, peer)

    def _there(self, rank, peer) -> bool:
        mine, channel = self.posted[rank].get(pair(rank, peer), 0), pair(rank, peer)
        return self.posted[peer].get(channel, 0) >= mine

    def step(self, rank) -> None:
        """Take it."""
        kind, peer = self.scripts[rank][self.at[rank]]
        if kind == "post":
            channel = pair(rank, peer)
            self.posted[rank][channel] = self.posted[rank].get(channel, 0) + 1
            self.boards[rank].count(channel, self.posted[rank][channel])
        self.at[rank] += 1
        self.show(rank)

    def show(self, rank) -> None:
        """Write on the board whether the rank is blocked now."""
        script, at, board = self.scripts[rank], self.at[rank], self.boards[rank]
        if at < len(script) and script[at][0] == "wait":
            peer, channel = script[at][1], pair(rank, script[at][1])
            number = self.posted[rank].get(channel, 0)
            fields = ("send", "dp", str(peer), str(number), str(channel), "", "")
            board.text = "\x1f".join(fields).encode()
            board.write(1.0)
        else:
            board.write(0.0)

    def close(self):
        for board in self.boards:
            board.close()


def pair(a, b) -> int:
    return 1 + 16 * min(a, b) + max(a, b)


@st.composite
def programs(draw):
    n = draw(st.integers(2, 4))
    step = lambda rank: st.tuples(
        st.sampled_from(["post", "wait"]), st.sampled_from([p for p in range(n) if p != rank])
    )
    return [draw(st.lists(step(rank), max_size=5)) for rank in range(n)], draw(
        st.randoms(use_true_random=False)
    )


@settings(max_examples=300, deadline=None)
@given(programs())
def test_whoever_is_said_to_wait_in_a_circle_never_goes_on_and_every_circle_is_found(folder, program):
    scripts, random = program
    played = Played(folder, scripts)
    n, claims = len(scripts), []
    find = functools.partial(deadlock.find_circle, played.boards[0], list(range(n)), now=100.0)
    for rank in range(n):
        played.show(rank)
    while able := [rank for rank in range(n) if played.ready(rank)]:
        claims += [(rank, played.at[rank]) for rank in find()]
        played.step(random.choice(able))
    assert all(played.at[rank] == at for rank, at in claims)
    stuck = {rank for rank in range(n) if played.at[rank] < len(scripts[rank])}
    needed = {rank: scripts[rank][played.at[rank]][1] for rank in stuck}
    found = find()
    in_circles = {rank for rank in stuck if rank in chain(needed, needed[rank])}
    assert bool(found) == bool(in_circles) and set(found) <= in_circles
    assert all(needed[a] == b for a, b in zip(found, found[1:] + found[:1], strict=True))
    played.close()


def chain(needed, rank) -> set:
    """Everybody who is met on the way from a rank to whom it needs, to whom that one needs, and so on."""
    met = set()
    while rank in needed and rank not in met:
        met.add(rank)
        rank = needed[rank]
    return met | {rank}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("board")
