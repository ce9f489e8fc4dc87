"""What ranks write on the status board, and what their parent makes of it: no ranks, only their records."""

import contextlib
import itertools
import os
import pathlib
import threading
import time
import zlib
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt2lab import transport
from gpt2lab.lessons.labs.faults import said
from gpt2lab.processes import deadlock, status_board
from gpt2lab.processes.failure import RankFailed
from gpt2lab.processes.pool import Pool
from gpt2lab.processes.status_board import SLOTS, Activity, Board
from gpt2lab.processes.watch import Watch
from gpt2lab.ranks import call
from gpt2lab.transport.engine import Mismatch

LONG_AGO = 60.0  # seconds


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The board of one rank, to which `enter` and `leave` write."""
    made = Board(tmp_path / "board", 1, 0, create=True)
    monkeypatch.setattr(status_board, "_board", made)
    yield made
    made.close()


def test_a_call_that_ends_late_does_not_end_the_next_one(board):
    first = status_board.enter("isend", "dp", (1,), 1)
    second = status_board.enter("all_reduce", "dp", (1,), 1)
    status_board.leave(first)
    assert board.read(0).op == "all_reduce" and board.read(0).since > 0
    status_board.leave(second)
    assert board.read(0).since == 0


def test_an_old_call_is_not_announced_over_a_newer_one(board):
    first = status_board.enter("isend", "dp", (1,), 1)
    assert status_board.enter("irecv", "dp", (1,), 1, instead=first) == first + 1
    assert status_board.enter("isend", "dp", (1,), 2, instead=first) == first
    assert board.read(0).op == "irecv"


def test_a_channel_counts_its_calls(board):
    status_board.announce("the axis dp", 7, "all_reduce (4,)", "dp", ())
    assert board.begun(0, zlib.crc32(b"the axis dp")) == 7


def test_a_note_over_which_another_is_written_while_it_is_read_is_not_believed(board, monkeypatch):
    board.note(5, b"this one")
    assert board.noted(0, 5) == "this one"
    right = status_board.struct.unpack_from
    late = lambda *args: (board.note(5 + SLOTS, b"64 calls later"), right(*args))[1]
    monkeypatch.setattr(status_board.struct, "unpack_from", late)
    assert board.noted(0, 5) is None


def long_calls(n: int, most: int, off: int) -> list[tuple[str, str]]:
    """What the last two of n ranks call, with numbers up to `most`; where `off`, the last of them counts one less."""
    every, one_less = [most] * n, [*[most] * (n - 2), most - off, 0]
    sent = lambda numbers: f"all_to_all float32 {','.join(map(str, every))} {','.join(map(str, numbers))}"
    sizes = lambda numbers: f"all_gather dim -2 sizes {numbers} of (2, 8, 1024, 64) float32"
    many = lambda op, last: f"{op} {(most,) * 500 + (last,)} float32"  # longer than a board has room for
    right = [*every[:-2], most, 0]
    return [
        (sent(every), sent(one_less)),
        (sizes(right), sizes(one_less)),
        (many("send", most), many("recv", most - off)),
        (many("scatter", most), many("scatter", most - off)),
    ]


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("most", [9, 10**18])
@pytest.mark.parametrize("n", [2, 32, 64])
def test_calls_are_compared_to_their_last_digit_however_long_they_are(tmp_path, monkeypatch, n, most, off):
    boards = {rank: Board(tmp_path / "board", n, rank, create=rank == n - 2) for rank in (n - 2, n - 1)}

    def begins(rank, peer, number, signature):
        monkeypatch.setattr(status_board, "_board", boards[rank])
        agree = lambda mine, theirs, other: call._fit(mine, theirs, rank, other)
        status_board.announce("world", number, signature, "a long name" * 99, [peer], agree)

    for number, (one, other) in enumerate(long_calls(n, most, off)):
        begins(n - 2, n - 1, number, one)
        with pytest.raises(Mismatch, match=f"rank {n - 2} called") if off else contextlib.nullcontext():
            begins(n - 1, n - 2, number, other)


def test_a_lesson_prints_the_same_whoever_meets_a_mismatch(tmp_path, monkeypatch):
    boards = [Board(tmp_path / "board", 3, rank, create=rank == 0) for rank in range(3)]

    def prints(number, ranks):
        with pytest.raises(Mismatch) as met:
            for rank in ranks:
                monkeypatch.setattr(status_board, "_board", boards[rank])
                signature = f"all_reduce ({3 if rank == 1 else 4},)"
                status_board.announce("dp", number, signature, "dp", {0, 1, 2} - {rank})
        return said(RankFailed(f"rank {rank} raised Mismatch\n\n{met.value}", rank, "Mismatch"))

    said_in_each_order = {
        "\n".join(prints(i, order)).replace(f"#{i}", "#")
        for i, order in enumerate(itertools.permutations(range(3)))
    }
    assert len(said_in_each_order) == 1


WAITING = f"{transport.__path__[0]}/engine.py", f"{torch.distributed.__path__[0]}/c10d.py"
IN_PYTHON = pathlib.__file__, threading.__file__, "<frozen importlib._bootstrap>"


@pytest.mark.parametrize("inner", ["", *IN_PYTHON], ids=lambda name: Path(name).stem)
@pytest.mark.parametrize("outer", [*WAITING, __file__, np.__file__], ids=lambda name: Path(name).stem)
def test_a_rank_that_looks_whether_its_peer_lives_still_waits(inner, outer):
    lines = [f'File "{name}", line 1 in f' for name in ([inner] if inner else []) + [outer, __file__]]
    pool = SimpleNamespace(stopped=lambda rank: "", _frames=lambda rank: lines)
    assert bool(Pool.inside(pool, 0, blocked=True)) == (outer not in WAITING)


def test_a_long_call_is_on_the_board_with_all_of_its_ranks(tmp_path, monkeypatch):
    n = 64
    board, peers = Board(tmp_path / "board", n, 0, create=True), tuple(range(1, n))
    monkeypatch.setattr(status_board, "_board", board)
    where = f'File "{"folder/" * 999}file.py", line 7'
    for detail in (f"dim -2 sizes {[10**18] * n} of (4,) float32", "x" * 10_000):
        status_board.enter("all_gather", "a long name" * 99, peers, 7, detail, "world", where)
        found = board.read(0)
        assert (found.op, found.peers, found.number, found.where[-7:]) == ("all_gather", peers, 7, " line 7")
        assert found.since and found.channel and (found.detail == detail) == (len(detail) < 2_000)


class Records:
    """A board on which each reading of a rank shows the next of its records, and the last one from then on."""

    def __init__(self, *of_each):
        self.of_each = [list(records) for records in of_each]

    def read(self, rank: int) -> Activity:
        """The record that is next."""
        records = self.of_each[rank]
        return records.pop(0) if len(records) > 1 else records[0]

    def begun(self, rank: int, channel: int) -> int:
        """Nobody has begun anything."""
        return 0


def receives(rank: int, calls: int = 1) -> Activity:
    """Rank 0 or 1 waits for the other's message."""
    return Activity(
        rank, time.monotonic() - LONG_AGO, calls, "recv", "dp", (1 - rank,), calls, "(4,)", "", 7 + rank
    )


def test_a_circle_is_believed_when_two_readings_agree():
    now = time.monotonic()
    one, other = receives(0), receives(1)
    assert deadlock.find_circle(Records([one], [other]), [0, 1], now) == [0, 1]
    assert deadlock.find_circle(Records([one, receives(0, 2)], [other]), [0, 1], now) == []


@pytest.mark.parametrize(
    ("detail", "needed"), [("dim 0 (4,) float32", [1]), ("(0, 4) float32", []), ("(4, 4... 5c0e", [])]
)
def test_a_collective_in_which_a_part_is_empty_may_not_need_all(detail, needed):
    entry = Activity(0, time.monotonic() - LONG_AGO, 1, "all_gather", "dp", (1,), 1, detail, "", 7)
    assert deadlock.needs(Records([entry], [entry]), entry, time.monotonic()) == needed


def watch(entry, held: float = 0.0) -> Watch:
    """A parent's look at two ranks that have made no call for a minute; each had no core for `held` seconds of it."""
    seconds = [0.0]
    pool = SimpleNamespace(
        members=[SimpleNamespace(rank=rank, pipe=None) for rank in (0, 1)],
        up={0, 1},
        board=Records([entry(0)], [entry(1)]),
        held_up=lambda rank: seconds[0],
        folder=SimpleNamespace(exists=lambda: True),
        stack=lambda rank: "is busy",
        inside=lambda rank, blocked: "",
    )
    found = Watch(pool, 1.5, print)
    found.calls = {rank: entry(rank).calls for rank in (0, 1)}
    found.back = time.monotonic() - LONG_AGO
    found.sign_of_life = dict.fromkeys((0, 1), found.back)
    found._drain, seconds[0] = lambda: None, held
    return found


def waits(rank: int) -> Activity:
    """A rank in a call whose peers may be on their way."""
    return Activity(rank, time.monotonic() - LONG_AGO, 3, "broadcast", "dp", (1 - rank,), 3)


def works(rank: int) -> Activity:
    """A rank outside any call."""
    return Activity(rank, 0.0, 3, "all_reduce", "dp", (1 - rank,), 3)


@pytest.mark.parametrize("entry", [waits, works])
def test_ranks_that_do_not_move_are_stuck_but_not_where_the_parent_did_not_look(entry):
    with pytest.raises(RankFailed, match="nothing moved for 1.5 s"):
        watch(entry)._check_progress()
    stopped = watch(entry)  # all of them, as by Ctrl-Z
    stopped.looked = time.monotonic() - LONG_AGO
    stopped._check_progress()


def test_a_rank_that_has_no_core_is_not_stuck():
    watch(works, held=LONG_AGO)._check_progress()


def test_a_process_has_no_core_for_a_part_of_the_seconds_that_there_were():
    pool = SimpleNamespace(members=[SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))])
    assert 0 <= Pool.held_up(pool, 0) < time.monotonic()


@pytest.mark.parametrize(("theirs", "waits"), [(2, False), (1, True)])
def test_in_a_call_that_keeps_no_host_a_rank_waits_for_those_that_are_in_another(theirs, waits):
    """So it is on GPUs: nobody counts which calls of a channel have begun."""
    sums = lambda rank, number: [Activity(rank, time.monotonic(), 1, "all_reduce", "dp", (1 - rank,), number)]
    said = deadlock.states(Records(sums(0, 2), sums(1, theirs)), [0, 1], (), time.monotonic())
    assert ("for rank 1" in said[0]) == waits


def test_a_rank_that_has_ended_is_dead_though_its_pipe_is_open():
    """A process that it has started may keep it so."""
    (pipe, kept), (ended, its_end), (output, silent) = Pipe(duplex=False), os.pipe(), os.pipe()
    os.close(its_end)
    member = SimpleNamespace(rank=0, pipe=pipe, output=output, process=SimpleNamespace(sentinel=ended))
    found = Watch(SimpleNamespace(members=[member], held_up=lambda rank: 0.0), 1.5, print)
    found._listen()
    assert [*found.dead] == [0]
    kept.close()
    pipe.close()
    for end in (ended, output, silent):
        os.close(end)


def test_a_rank_that_only_lost_a_peer_is_no_cause():
    raised = {rank: {"time": float(rank), "lost_peer": lost} for rank, lost in enumerate([True, False])}
    found = Watch._causes(SimpleNamespace(raised=raised, suspects={2: {"time": 2.0}}, dead={3: 3.0}))
    assert found == {1: 1.0, 2: 2.0, 3: 3.0}
