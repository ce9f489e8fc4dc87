"""A rank raises, dies, hangs or returns nonsense: the right rank is named, fast, and nothing is left."""

import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE, needs_backend, promptly, until

from gpt2lab import RankFailed, Ranks, launch, transport
from gpt2lab.processes import rank_process, status_board, watch
from gpt2lab.processes.pool import Pool
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.transport.engine import PeerLost

pytestmark = pytest.mark.live


def failure(fn, *args, **kwargs) -> RankFailed:
    """The RankFailed that a launch ends with; how soon each fault is told is held by test_soak.py."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as info:
        launch(fn, *args, echo=False, **kwargs)
    assert time.monotonic() - start < PATIENCE + kwargs.get("timeout", 0)
    return info.value


def children() -> list[int]:
    import multiprocessing

    return [child.pid for child in multiprocessing.active_children()]


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """The first launch imports torch in the forkserver; the tests are about the others."""
    launch(hang_free, ranks=1, timeout=100)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    until(lambda: not children())  # on a busy machine one that was killed is missed a little later


def work(rank, culprit):
    if rank == culprit:
        raise NotImplementedError(f"to do on {rank}")  # the line that must be shown


def raise_on(rank, world_size, culprit, teardown=0.0):
    axis = Mesh(dp=world_size)["dp"]
    try:
        work(rank, culprit)  # called here
        comm.barrier(axis)
    finally:
        if teardown:
            dist.destroy_process_group()
            time.sleep(teardown if rank == culprit else 0.0)  # its peers fail, and tell so, long before it


@pytest.mark.parametrize(
    ("ranks", "culprit", "teardown"), [(2, 0, 0.0), (2, 0, 1.5), (2, 1, 0.0), (3, 1, 1.5), (4, 3, 0.0)]
)
def test_a_rank_that_raises_is_named_with_its_source_line(ranks, culprit, teardown):
    error = failure(raise_on, culprit, ranks=ranks, teardown=teardown)
    assert (error.rank, error.ename) == (culprit, "NotImplementedError")
    assert f"to do on {culprit}" in str(error)
    assert "# called here" in str(error) and "# the line that must be shown" in str(error)
    assert set(error.states) == set(range(ranks))
    assert str(error).count("Traceback") == 1 and "rank_process.py" not in str(error)


def test_the_text_shows_the_lines_of_a_notebook_cell():
    import linecache
    import types

    source = "def work(rank, world_size):\n    deep = {}\n    return deep[rank]  # cell line\n"
    name = "/tmp/ipykernel_9/8.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = types.ModuleType("__main__")
    exec(compile(source, name, "exec"), vars(module))
    error = failure(module.work, ranks=2)
    assert "return deep[rank]  # cell line" in str(error)
    assert "ipykernel" not in str(error) and "Cell, line 3, in work" in str(error)


def die(rank, world_size, culprit, how):
    axis = Mesh(dp=world_size)["dp"]
    comm.all_reduce(torch.ones(2), axis)
    if rank == culprit:
        if isinstance(how, int):
            os.kill(os.getpid(), how)
        elif how == "segfault":
            ctypes.string_at(0)
        elif how == "exit":
            os._exit(0)
        elif how == "returns first":
            return threading.Timer(0.5, os._exit, (0,)).start()
        else:
            sys.exit(0)
    comm.all_reduce(torch.ones(2), axis)


@pytest.mark.parametrize(
    ("how", "words", "ename"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", "ProcessDied"),
        (signal.SIGTERM, "was killed by SIGTERM", "ProcessDied"),
        (signal.SIGABRT, "was killed by SIGABRT", "ProcessDied"),
        ("segfault", "was killed by SIGSEGV", "ProcessDied"),
        ("exit", "left with exit code 0 before it returned a result", "ProcessDied"),
        ("returns first", "left with exit code 0 after it had returned a result", "ProcessDied"),
        ("sys.exit", "raised SystemExit", "SystemExit"),
    ],
)
def test_a_rank_that_dies_is_named_not_its_innocent_peers(how, words, ename):
    error = failure(die, 1, how, ranks=3)
    assert (error.rank, error.ename) == (1, ename)
    assert f"rank 1 {words}" in str(error)
    if ename == "ProcessDied":
        assert "all_reduce #1 on axis 'dp'" in str(error)


def leave_while_the_server_sleeps(rank, world_size):
    if rank == 1:
        server = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {server}"])
        os.kill(server, signal.SIGSTOP)
        os._exit(3)
    time.sleep(100)


def test_an_exit_code_that_is_told_late_is_waited_for():
    assert "rank 1 left with exit code 3" in str(failure(leave_while_the_server_sleeps, ranks=2))


def takes_long_to_die(rank, world_size, seconds):
    """The main thread of rank 1 ends by itself, which others see; its process is killed later."""
    axis = Mesh(dp=world_size)["dp"]
    comm.all_reduce(torch.ones(2), axis)
    if rank == 1:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)  # exit, of this thread alone
    comm.all_reduce(torch.ones(2), axis)


@pytest.mark.skipif(sys.platform != "linux", reason="exit by its number is Linux's")
def test_a_rank_that_takes_long_to_die_is_named_and_not_who_has_lost_it():
    """As where the system kills one that holds much memory: to give it back takes seconds."""
    error = failure(takes_long_to_die, 3 * watch.LONG_GRACE, ranks=2)
    assert (error.rank, error.ename) == (1, "ProcessDied") and "rank 1 was killed by SIGKILL" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are Linux's")
def test_a_rank_that_is_gone_and_not_reported_yet_is_waited_for():
    """Between its end and the report of it; else who has lost it would be named."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    members = [SimpleNamespace(process=SimpleNamespace(pid=pid)) for pid in (gone.pid, os.getpid())]
    dying = [Pool.is_dying(SimpleNamespace(members=members), rank) for rank in range(2)]
    assert dying == [True, False]


def fills_the_stack_of_c(rank, world_size, how):
    axis = Mesh(dp=world_size)["dp"]
    comm.all_reduce(torch.ones(2), axis)
    if rank != 1:
        return comm.all_reduce(torch.ones(2), axis)
    sys.setrecursionlimit(10**9)  # Python's own counter, which would raise RecursionError before
    nested = []
    for _ in range(100_000):
        nested = [nested]
    if how == "inside a call":
        return comm.gather_objects(nested, axis)
    if how == "in a thread":
        thread = threading.Thread(target=json.dumps, args=(nested,))
        thread.start()
        thread.join()
    if how == "in a callback":
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        sort, two = ctypes.CDLL(None).qsort, (ctypes.c_int * 2)(2, 1)
        again = kind(lambda a, b: sort(two, 2, 4, again) or 0)
        again(None, None)
    return nested if how == "as a result" else json.dumps(nested)


@pytest.mark.parametrize("how", ["in json", "in a thread", "in a callback", "inside a call", "as a result"])
def test_a_rank_that_fills_the_stack_of_c_is_named_soon(how):
    """It dies by a signal, whatever Python was doing; `nothing_left` looks for what it leaves."""

    with Ranks(3, timeout=60, echo=False) as pool:

        def told() -> float:
            assert pool.run(hang_free) == [3.0] * 3  # on new ranks
            start = time.monotonic()
            with pytest.raises(RankFailed, match="rank 1 was killed by SIGSEGV") as info:
                pool.run(fills_the_stack_of_c, how)
            took = time.monotonic() - start
            assert (info.value.rank, info.value.ename) == (1, "ProcessDied") and children() == []
            return took

        promptly(told, 2.0)


def hang(rank, world_size, how):
    axis = Mesh(dp=world_size)["dp"]
    comm.all_reduce(torch.ones(2), axis)
    if rank == 1:
        if how == "sleep":
            time.sleep(1000)  # laggard
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "gil":
            ctypes.PyDLL(None).sleep(1000)  # laggard
        elif how == "spin":
            while True:  # laggard
                pass  # laggard
        elif how == "print":
            while True:  # laggard
                print("a line")  # laggard
        elif how == "skip":
            return
    comm.all_reduce(torch.ones(3), axis)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("sleep", "time.sleep(1000)  # laggard"),
        ("stop", "is stopped (SIGSTOP)"),
        ("gil", "ctypes.PyDLL(None).sleep(1000)  # laggard"),
        ("spin", "# laggard"),
        ("print", "# laggard"),  # once it has printed as much as is shown
        ("skip", "has returned from the function already"),
    ],
)
def test_a_hang_says_who_waits_where_for_whom_and_where_the_laggard_is(how, where):
    error = failure(hang, how, ranks=3, timeout=2.0)
    assert (error.rank, error.ename) == (1, "TimeoutError")
    text = str(error)
    waits = [line for line in text.splitlines() if "waits" in line]
    assert [line.split(" waits ")[0].strip() for line in waits] == ["rank 0", "rank 2"]
    for line in waits:
        assert "all_reduce #2 on axis 'dp' sum (3,) float32 for rank 1;" in line
        assert "`comm.all_reduce(torch.ones(3), axis)`" in line
    (laggard,) = (line for line in text.splitlines() if line.startswith("  rank 1 "))
    assert where in laggard


def stop_inside_a_call():
    """Stop this process as soon as its main thread is inside a sum."""
    mine = lambda: status_board._board.read(1)
    until(lambda: mine().op == "all_reduce" and mine().since)
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_while_it_waits(rank, world_size, calls):
    axis = Mesh(dp=world_size)["dp"]
    victim = comm.gather_objects(os.getpid(), axis)[1]
    if rank == 1:
        threading.Thread(target=stop_inside_a_call).start()
    else:
        until(lambda: Path(f"/proc/{victim}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
    for _ in range(calls):
        comm.all_reduce(torch.ones(3), axis)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_rank_that_is_stopped_inside_a_call_is_named_whatever_the_others_do(calls):
    """After one call they may have returned, with what it had sent before; in the second they wait for it."""
    error = failure(stopped_while_it_waits, calls, ranks=3, timeout=1.5)
    assert (error.rank, error.ename) == (1, "TimeoutError")
    said = error.states[1]
    assert re.match(r"is stopped \(SIGSTOP\), process \d+, in all_reduce #2 on axis 'dp'", said), said


def hangs_inside(rank, world_size, backend):
    def all_reduce(*_, **__):
        time.sleep(1000)  # the culprit

    if rank == 2:  # its call has begun on the board, and no byte has left
        (transport.moves if backend == "shm" else dist).all_reduce = all_reduce
    comm.all_reduce(torch.ones(3), Mesh(dp=world_size)["dp"])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_hangs_inside_a_call_is_named_and_not_those_that_wait_there(backend):
    needs_backend(backend)
    error = failure(hangs_inside, backend, ranks=3, timeout=1.5, backend=backend)
    assert (error.rank, error.ename) == (2, "TimeoutError")
    assert re.match(r"hangs at .*# the culprit`, in all_reduce #1 on axis 'dp'", error.states[2])
    assert all(error.states[rank].startswith("waits") for rank in (0, 1))


def waits_on_a_gpu(rank, world_size):
    """As `unfinished` says of a call on a GPU: the rank is in it, and its host goes on."""
    if rank == 0:
        status_board.enter("all_reduce", "dp", [1], 1, "sum (3,) float32", "", "here")
    time.sleep(1000)  # elsewhere


def test_a_rank_whose_gpu_waits_is_not_said_to_hang_where_its_host_is():
    error = failure(waits_on_a_gpu, ranks=2, timeout=1.5)
    assert (error.rank, error.ename) == (1, "TimeoutError")
    assert re.match(r"waits .* in all_reduce #1 on axis 'dp' sum \(3,\) float32 for rank 1", error.states[0])


def deletes_the_folder(rank, world_size, folder, again):
    comm.barrier(Mesh(dp=world_size)["dp"])
    if rank == 1:
        shutil.rmtree(next(folder.glob("gpt2lab-*")))
    comm.barrier(Mesh(dp=world_size)["dp"])
    return again and dist.new_group([0, 1])


def test_a_rank_that_deletes_the_private_folder_is_survived_or_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Ranks(2, timeout=1.5, echo=False) as pool:
        assert pool.run(deletes_the_folder, tmp_path, False) == [False] * 2
        assert pool.run(hang_free) == [2.0] * 2  # on new ranks
        with pytest.raises(
            RankFailed, match="Their private folder .*, in which they meet, has been del"
        ) as told:
            pool.run(deletes_the_folder, tmp_path, True)
        assert (told.value.rank, told.value.ename) == (None, "TimeoutError")
        assert pool.run(hang_free) == [2.0] * 2


def test_ranks_that_all_sleep_time_out_and_steady_ranks_do_not():
    error = failure(lambda rank, _: time.sleep(1000), ranks=2, timeout=0.5)
    assert error.ename == "TimeoutError" and "time.sleep(1000)" in str(error)

    def steady(rank, world_size):
        for _ in range(30):
            time.sleep(0.1)
            print(".", flush=True)

    launch(steady, ranks=2, timeout=2.0, echo=False)


def test_many_ranks_on_few_cores():
    def work(rank, world_size):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    assert launch(work, ranks=32, timeout=60) == [sum(range(32))] * 32


def test_an_interrupt_ends_the_run_and_the_next_one_works():
    with Ranks(2, timeout=60, echo=False) as pool:

        def interrupted() -> float:
            assert pool.run(hang_free) == [2.0, 2.0]
            threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                pool.run(lambda rank, _: time.sleep(1000))
            assert children() == []
            return time.monotonic() - start - 0.3

        promptly(interrupted, 1.0)
        assert pool.run(hang_free) == [2.0, 2.0]


def test_ctrl_c_in_a_terminal_ends_the_parents_run_not_an_idle_rank():
    with Ranks(2, timeout=60, echo=False) as pool:
        pids = pool.run(lambda rank, _: os.getpid())
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert pool.run(lambda rank, _: os.getpid()) == pids


OWN_SERVER = """
import multiprocessing, os, signal
from gpt2lab import Ranks

if __name__ == "__main__":
    own = multiprocessing.get_context("forkserver").Process(target=print)
    own.start()
    own.join()
    with Ranks(2, echo=False) as pool:
        pids = pool.run(lambda rank, _: os.getpid())
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGHUP)
        assert pool.run(lambda rank, _: os.getpid()) == pids
"""


def test_ranks_of_a_process_server_that_was_there_before_do_not_hear_ctrl_c_either(tmp_path):
    """It has not done what ours does when it starts."""
    (tmp_path / "script.py").write_text(OWN_SERVER)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def hang_free(rank, world_size):
    return comm.all_reduce(torch.ones(1), Mesh(dp=world_size)["dp"]).item()


def test_a_dropped_pool_ends_its_ranks():
    pool = Ranks(2, echo=False)
    pids = pool.run(lambda rank, _: os.getpid())
    del pool
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    with contextlib.suppress(ChildProcessError):
        assert children() == []


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerLost("rank 1 is gone"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (BrokenPipeError("Broken pipe"), True),
        (RuntimeError("the shapes differ"), False),
    ],
)
def test_an_error_says_whether_it_is_only_of_a_lost_peer(error, lost):
    """Then another rank may still report that it failed first."""
    assert rank_process._report(error)["lost_peer"] == lost
