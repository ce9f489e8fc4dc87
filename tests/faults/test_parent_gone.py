"""The notebook's kernel, or a script, is killed or interrupted: nothing of ours is left, and nothing is reachable."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from processes import MARK, PATIENCE, Marked, marked, needs_backend, promptly, until

from gpt2lab.processes.launch import RankFailed, Ranks

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

SCRIPT = """
import time
from gpt2lab import Ranks, launch

def work(rank, world_size):
    import ctypes, os, signal, time, torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        print("up", flush=True)
    {state}
    dist.all_reduce(torch.ones(1))

{start}
"""
BLOCKED = "time.sleep(1000) if rank == 1 else None"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else None"
LIVE = "launch(work, ranks=3, echo='live', timeout=600)"
IDLE = "pool = Ranks(3, echo='live'); pool.run(work); time.sleep(1000)"
THREAD = "import threading; t = threading.Thread(target=lambda: " + LIVE + "); t.start(); t.join()"


@pytest.fixture
def script(tmp_path):
    started = []

    def start(state: str = "pass", how: str = LIVE) -> Marked:
        started.append(Marked(SCRIPT.format(state=state, start=how), tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


def nothing_left(script: Marked) -> bool:
    return not script.others() and not script.folders()


KILLED = {  # what the ranks do, and how they were started
    "blocked in a collective": (BLOCKED, LIVE),
    "stopped": (STOPPED, LIVE),
    "holding the GIL": ("ctypes.PyDLL(None).sleep(1000)", LIVE),
    "computing": ("while True: torch.ones(1000).sum()", LIVE),
    "an idle pool": ("pass", IDLE),
    "from a thread": (BLOCKED, THREAD),
}


@pytest.mark.parametrize("state", KILLED)
def test_killing_the_parent_leaves_nothing(script, state):
    def killed() -> float:
        running = script(*KILLED[state])
        running.wait_for_line("up")
        assert len(running.others()) >= 4  # three ranks and the forkserver
        running.process.kill()
        files = state != "from a thread"  # where nobody is left who would remove them
        return until(lambda: nothing_left(running) if files else not running.others())

    promptly(killed, 2.0)


def test_killing_the_parent_leaves_the_folders_of_another_one_of_that_number(script):
    """Processes of two containers that share /tmp."""
    running = script(how=LIVE)
    running.wait_for_line("up")
    other = running.temp / f"gpt2lab-{running.process.pid}-0123abcd-of another"
    other.mkdir()
    running.process.kill()
    until(lambda: running.folders() == [other])


def test_killing_the_parent_while_ranks_start_leaves_nothing(script):
    for early in (0.0, 0.05, 0.15):
        running = script(how=LIVE)
        until(lambda running=running: len(running.others()) > 1)  # a process server clears away
        time.sleep(early)
        running.process.kill()
        until(lambda running=running: nothing_left(running))


TWICE = """
import os, signal, tempfile
from gpt2lab.processes import orphans

def again():
    os.kill(os.getpid(), signal.SIGRTMIN)
    return real()

real, tempfile._get_default_tempdir = tempfile._get_default_tempdir, again
os.environ[orphans.PARENT] = f"gpt2lab-{os.getppid()}-0123abcd- main "
orphans.exit_with_parent()
os.kill(os.getpid(), signal.SIGRTMIN)
"""


def test_a_parent_with_several_threads_whose_death_is_told_more_than_once_leaves_no_process_server():
    assert subprocess.run([sys.executable, "-c", TWICE], timeout=PATIENCE).returncode == 0


@pytest.mark.parametrize("state, again", [*product(list(KILLED)[:2], [None, 0.002]), ("stopped", 0.03)])
def test_ctrl_c_once_or_twice_close_together_ends_a_script_and_its_ranks(script, state, again):
    running = script(*KILLED[state])
    running.wait_for_line("up")
    running.process.send_signal(signal.SIGINT)
    if again:
        time.sleep(again)
        running.process.send_signal(signal.SIGINT)
    running.process.wait(PATIENCE)
    until(lambda: nothing_left(running))
    text = running.process.stdout.read()
    assert again or ("KeyboardInterrupt" in text and "resource_tracker" not in text)


def test_an_interrupt_of_the_first_launch_is_only_a_keyboard_interrupt(script):
    """Ctrl-C reaches every process of a terminal, also those that are being started."""
    for early in (0.0, 0.3, 1.0):
        running = script(BLOCKED, LIVE)
        until(lambda running=running: running.folders())
        time.sleep(early)
        for pid in (*running.others(), running.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        running.process.wait(PATIENCE)
        until(lambda running=running: nothing_left(running))
        text = running.process.stdout.read()
        assert text.count("Traceback") <= 1 and text.count("KeyboardInterrupt") == 1, text


def test_the_end_of_the_process_server_is_told_as_such():
    import multiprocessing

    with Ranks(2, echo=False, timeout=60) as pool:
        pool.run(lambda rank, world_size: rank)
        with pytest.raises(RankFailed, match="The process that all ranks were started from is gone") as told:
            pool.run(
                lambda rank, world_size: rank or os.kill(os.getppid(), signal.SIGKILL) or time.sleep(1000)
            )
        assert told.value.rank is None and multiprocessing.active_children() == []
        assert pool.run(lambda rank, world_size: rank) == [0, 1]


def sockets(pids) -> set[str]:
    """Inodes of all sockets that the processes hold."""
    links = (f"/proc/{pid}/fd/{name}" for pid in pids for name in os.listdir(f"/proc/{pid}/fd"))
    targets = (os.readlink(link) for link in links)
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def network(table: str, inodes: set[str]) -> list[str]:
    """Local addresses of a table of /proc/net at which the sockets can be reached: listening TCP, any UDP."""
    rows = [row.split() for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    open_ = "0A" if table.startswith("tcp") else "07"
    return [row[1].split(":")[0] for row in rows if row[9] in inodes and row[3] == open_]


def local(inodes: set[str]) -> list[Path]:
    """Names in the file system at which the sockets listen."""
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = [row for row in rows if row[6] in inodes and int(row[3], 16) & 0x10000]
    return [Path(row[7] if len(row) > 7 else "no name") for row in accepting]


@pytest.mark.parametrize(("backend", "addresses"), [("gloo", {"0100007F"}), ("shm", set())])
def test_only_loopback_is_listened_on_and_what_is_private_is_private(script, backend, addresses, monkeypatch):
    needs_backend(backend)
    monkeypatch.setenv("GPT2LAB_BACKEND", backend)
    running = script("time.sleep(1000)")
    running.wait_for_line("up")
    (folder,) = (f for f in running.folders() if f.name.startswith("gpt2lab-"))
    assert folder.stat().st_mode & 0o777 == 0o700
    inodes = sockets(running.others())
    assert set(network("tcp", inodes)) == addresses  # 127.0.0.1, little-endian
    assert not [a for table in ("tcp6", "udp", "udp6") for a in network(table, inodes)]
    for path in local(inodes):  # the forkserver's
        assert path.parent.stat().st_mode & 0o777 == 0o700, path


CELL = """
import ctypes, os, signal, time
import torch, torch.distributed as dist
from gpt2lab import launch, RankFailed
def work(rank, world_size, how=""):
    dist.all_reduce(torch.ones(1))
    print("here", rank, flush=True)
    if how == "sleep": time.sleep(1000)
    if how == "stop" and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
    if how == "gil": ctypes.PyDLL(None).sleep(1000)
    if how == "raise": raise ValueError(rank)  # shown
    dist.all_reduce(torch.ones(1))
    return rank
"""


@pytest.fixture
def kernel(monkeypatch):
    from jupyter_client.manager import KernelManager

    mark = f"kernel-{os.getpid()}-{time.monotonic_ns()}"
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {MARK: mark}, stderr=-3)
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=100)
    yield manager, client, mark
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    manager.context.destroy()
    until(lambda: not marked(mark))


def run_cell(client, code: str, on_output=None) -> str:
    """Execute a cell and return what it showed; `on_output` is called once, at its first printed line."""
    shown = []

    def output(message):
        nonlocal on_output
        content = message["content"]
        shown.append(content.get("text") or content.get("data", {}).get("text/plain") or "")
        shown.extend(content.get("traceback", []))
        if on_output is not None and message["msg_type"] == "stream":
            on_output()
            on_output = None

    client.execute_interactive(code, timeout=100, output_hook=output, allow_stdin=False)
    return "\n".join(shown)


def interrupted(manager, client, code: str) -> float:
    """Interrupt a cell at its first printed line; the seconds until the cell has ended."""
    at = []

    def interrupt():
        at.append(time.monotonic())
        manager.interrupt_kernel()

    assert "KeyboardInterrupt" in run_cell(client, code, on_output=interrupt)
    return time.monotonic() - at[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_real_kernel_interrupted_goes_on_and_killed_leaves_nothing(kernel):
    manager, client, mark = kernel
    run_cell(client, CELL)
    assert "[0, 1, 2]" in run_cell(client, "launch(work, ranks=3)")
    for how in ("sleep", "stop", "gil"):
        code = f"launch(work, ranks=3, echo='live', how={how!r}, timeout=600)"
        promptly(lambda code=code: interrupted(manager, client, code), 1.0)
        until(lambda: len(marked(mark)) <= 3)  # the kernel, the forkserver, its resource tracker
        assert "[0, 1, 2]" in run_cell(client, "launch(work, ranks=3)")
    text = run_cell(
        client, "try: launch(work, ranks=2, how='raise')\nexcept RankFailed as error: print(error)"
    )
    assert "Cell In[" in text and "raise ValueError(rank)  # shown" in text
    code = "launch(work, ranks=3, echo='live', how='stop', timeout=600)"
    client.execute(code)
    until(lambda: len(marked(mark)) > 3)
    os.kill(manager.provisioner.pid, signal.SIGKILL)
    until(lambda: not marked(mark))
