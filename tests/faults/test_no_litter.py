"""However a rank ends, the programs that it has started end too, and theirs, wherever they stand by then."""

import ctypes
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from planting import rewritten
from processes import Marked, until

from gpt2lab import RankFailed, Ranks
from gpt2lab.processes import orphans, pool

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]


def start_programs(folder: str, rank: int) -> None:
    """A program and one that it has started, one in a session of its own, and a fork; their numbers go to a file."""
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    outer = subprocess.Popen([sys.executable, "-S", "-c", child], stdout=subprocess.PIPE, text=True)
    inner = int(outer.stdout.readline())
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    fork = os.fork()
    if not fork:
        time.sleep(1000)
    file = Path(folder, f"{os.getpid()} {rank}")
    file.write_text(f"{outer.pid} {inner} {apart.pid} {fork}")
    file.rename(Path(folder, f"programs of {rank}"))


def fail() -> None:
    raise ValueError("on purpose")


ENDS = {
    "an exception": fail,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "a signal of its own": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "a segmentation fault": lambda: ctypes.string_at(0),
    "a signal from outside": lambda: time.sleep(1000),
    "the end of the process server": lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(1000),
}


def work(rank, world_size, folder, how):
    start_programs(folder, rank)
    dist.barrier()
    if rank == 1:
        Path(folder, "rank 1").write_text(str(os.getpid()))
        ENDS[how]()
    dist.barrier()


def programs(folder: Path) -> list[int]:
    """The processes that the ranks have started, by what they wrote."""
    return [int(number) for file in folder.glob("programs of *") for number in file.read_text().split()]


def running(processes: list[int]) -> list[int]:
    """Those that run; one that has ended and that nobody has asked for does not."""
    found = []
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        found += [process] * (state not in "ZX")
    return found


@pytest.fixture
def folder(tmp_path):
    """Where ranks write what they have started; whatever is left of it is ended."""
    yield tmp_path
    for process in running(programs(tmp_path)):
        os.kill(process, signal.SIGKILL)


def killed_from_outside(folder: Path) -> None:
    """Kill rank 1 as soon as it has written its number."""
    until(lambda: (folder / "rank 1").exists() and (folder / "rank 1").read_text())
    os.kill(int((folder / "rank 1").read_text()), signal.SIGKILL)


def left_by(how: str, folder: Path) -> list[int]:
    """What ranks have started in a run that ends so."""
    outside = threading.Thread(target=killed_from_outside, args=(folder,))
    if how == "a signal from outside":
        outside.start()
    with Ranks(2, echo=False, timeout=60) as ranks, pytest.raises(RankFailed):
        ranks.run(work, str(folder), how)
    if outside.ident:
        outside.join()
    assert len(found := programs(folder)) == 8
    return found


@pytest.mark.parametrize("how", ENDS)
def test_what_ranks_have_started_ends_with_them(how, folder):
    found = left_by(how, folder)
    until(lambda: not running(found))


def test_a_fork_is_found_where_tmpdir_is_a_link_and_while_it_closes_something(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    folder = tmp_path / "link" / "gpt2lab-1-of ranks"
    folder.mkdir()
    with open(folder / f"{orphans.STACK}0", "w") as held:
        fork = subprocess.Popen(["sleep", "1000"], pass_fds=[held.fileno()])
    right = os.readlink
    late = lambda path: right("/nowhere" if str(path) == f"/proc/{fork.pid}/fd/0" else path)
    monkeypatch.setattr(os, "readlink", late)
    try:
        assert orphans._descends(Path(f"/proc/{fork.pid}"), str(folder))
    finally:
        fork.kill()
        fork.wait()


MUTANTS = {
    "nobody looks for what a dead rank has left": (pool.Pool._kill, "if ended:", "if False:"),
    "a program is not known by its environment": (orphans._descends, "return True", "pass"),
    "a fork is not known by what it holds open": (orphans._descends, "any(link", "False and any(link"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_that_leaves_programs_behind_is_noticed(bug, folder):
    with rewritten(*MUTANTS[bug]):
        assert running(left_by("os._exit", folder))


@pytest.mark.parametrize("how", ["is killed", "ends with its pool"])
def test_what_an_idle_rank_has_started_ends_with_it(how, folder):
    with Ranks(2, echo=False, timeout=60) as ranks:
        ranks.run(lambda rank, world_size: start_programs(str(folder), rank))
        assert len(running(found := programs(folder))) == 8
        victim = ranks.run(lambda rank, world_size: os.getpid())[1]
        if how == "is killed":
            os.kill(victim, signal.SIGKILL)
            until(lambda: not running([victim]))
    until(lambda: not running(found))


def test_a_fork_of_the_parent_ends_no_rank(folder):
    """The fork ends as a program does: with what was to be done at its end."""
    script = """
import os, sys
from gpt2lab import Ranks
ranks = Ranks(2, echo=False, timeout=60)
before = ranks.run(lambda rank, world_size: os.getpid())
if not os.fork():
    sys.exit()
os.wait()
assert ranks.run(lambda rank, world_size: os.getpid()) == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


LAUNCH = "launch(work, ranks=2, echo='live', timeout=600)"
FROM = {
    "the main thread": LAUNCH,
    "another thread": f"t = threading.Thread(target=lambda: {LAUNCH}); t.start(); t.join()",
}


@pytest.mark.parametrize("place", FROM)
def test_what_ranks_have_started_ends_with_a_parent_that_is_killed(place, folder):
    head = (
        "import os, subprocess, sys, threading, time\nfrom pathlib import Path\nfrom gpt2lab import launch\n"
    )
    body = f"def work(rank, world_size):\n    start_programs({str(folder)!r}, rank)\n    time.sleep(1000)\n"
    source = head + textwrap.dedent(inspect.getsource(start_programs)) + body + FROM[place]
    with Marked(source, folder) as script:
        until(lambda: len(programs(folder)) == 8)
        script.process.kill()
        found = programs(folder)
        until(lambda: not running(found) and not script.others())
