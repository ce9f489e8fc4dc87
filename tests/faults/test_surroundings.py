"""Many launches at once, hardly any shared memory, a full disk: it works, or one clear line says why not."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import PATIENCE, Marked, needs_backend

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces and /proc"),
]

MANY = """
from concurrent.futures import ThreadPoolExecutor
import torch
from gpt2lab import launch
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

def work(rank, world_size, number):
    axis, found = Mesh(dp=world_size)["dp"], []
    for step in range(5):
        found.append(comm.all_reduce(torch.tensor([number * (rank + 1) + step]), axis).item())
    return found

def one(number):
    return launch(work, number, ranks=2, echo=False, timeout=100) == [[3 * number + 2 * s for s in range(5)]] * 2

with ThreadPoolExecutor(4) as threads:
    print("right:", sum(threads.map(one, range({first}, {first} + 20))))
"""


def test_twice_twenty_launches_at_once_each_get_their_own_sum(tmp_path):
    one, other = (Marked(MANY.format(first=first), tmp_path) for first in (1000, 5000))
    with one, other:
        for parent in (one, other):
            parent.wait_for_line("right: 20")
            assert parent.process.wait(PATIENCE) == 0
            assert not parent.folders()


SUSPENDED = """
import time
from gpt2lab import launch

def work(rank, world_size):
    print("ready", flush=True)
    for _ in range(8):
        time.sleep(0.1)
    return rank

print("found", launch(work, ranks=2, timeout=1.5, echo="live"))
"""


def test_ranks_that_were_suspended_with_their_parent_are_not_stuck(tmp_path):
    """Ctrl-Z and `fg`: twice the timeout passes, in which nothing could move."""
    with Marked(SUSPENDED, tmp_path) as script:
        script.wait_for_line("ready")
        everyone = [script.process.pid, *script.others()]
        for signal_, pause in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
            for pid in everyone if pause else reversed(everyone):
                os.kill(pid, signal_)
            time.sleep(pause)
        script.wait_for_line("found [0, 1]")


def private_mounts() -> list[str]:
    """The command under which mounts are seen by nobody else; skips the test where the system does not permit it."""
    for how in (["unshare", "-m"], ["unshare", "-rm"]):
        if shutil.which(how[0]) is None:
            continue
        tried = subprocess.run([*how, "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True)
        if tried.returncode == 0:
            return how
    pytest.skip("private mounts (unshare -m) are not permitted here")


def alone(script: str, tmp_path, *arguments) -> list[str]:
    """Run a script in a mount namespace of its own; returns the lines that it printed."""
    return told(script, tmp_path, private_mounts(), *arguments).splitlines()


def told(script: str, tmp_path, how=(), *arguments) -> str:
    """What a script prints in a process of its own; `how` is the command that it is started with."""
    path = tmp_path / "script.py"
    path.write_text(script)
    env = {key: value for key, value in os.environ.items() if key != "GPT2LAB_BACKEND"}
    command = [*how, sys.executable, path, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


TINY = """
import subprocess, sys
def mounted(path, size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=1777", "none", path], check=True)
mounted("/dev/shm", 16)

import torch
from gpt2lab import launch
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

def work(rank, world_size):
    big = comm.all_reduce(torch.ones(1_000_000), Mesh(dp=world_size)["dp"])
    return big  # 4 MB from each rank

found = launch(work, ranks=3, backend=sys.argv[1], timeout=60)
print([(len(x), x.unique().item()) for x in found])
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_need_no_room_in_dev_shm(tmp_path, backend):
    needs_backend(backend)
    assert alone(TINY, tmp_path, backend) == ["[(1000000, 3.0), (1000000, 3.0), (1000000, 3.0)]"]


FULL = """
import os, pathlib, subprocess, sys, tempfile
folder = sys.argv[1]
def size(kilobytes, first=""):
    options = f"{first}size={kilobytes}k,mode=1777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)

size(4)
os.environ["TMPDIR"] = folder
assert tempfile.gettempdir() == folder
import torch
from gpt2lab import launch
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

def work(rank, world_size, much):
    return comm.all_reduce(torch.ones(1), Mesh(dp=world_size)["dp"]).item()

for kilobytes, much in [(k, b"") for k in (8, 64, 84, 88, 92, 96, 104, 128, 400)] + [(400, bytes(400_000))]:
    size(kilobytes, "remount,")
    try:
        print(kilobytes, launch(work, much, ranks=3, timeout=20))
    except OSError as error:
        print(kilobytes, error)
    left = [path.name for path in pathlib.Path(folder).glob("gpt2lab-*")]
    assert not left, left
"""


def test_a_full_disk_is_one_clear_line(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    lines = alone(FULL, tmp_path, str(folder))
    works = "[3.0, 3.0, 3.0]"
    full = f"{folder} is full: the ranks share files there"
    verdicts = [line.split(" ", 1)[1] for line in lines]
    assert len(lines) == 10
    assert all(v == works or (v.startswith(full) and "set TMPDIR" in v) for v in verdicts), lines
    assert verdicts[0].startswith(full) and verdicts[8] == works and verdicts[9].startswith(full), lines


EMPTIED = """
import multiprocessing.util, shutil
from gpt2lab import launch

launch(lambda rank, world_size: rank, ranks=2)
shutil.rmtree(multiprocessing.util.get_temp_dir())
try:
    launch(lambda rank, world_size: rank, ranks=2)
except OSError as error:
    print("told:", error)
"""


def test_a_folder_of_sockets_that_a_cleaner_took_away_is_named_with_the_way_out(tmp_path):
    with Marked(EMPTIED, tmp_path) as running:
        said = running.process.stdout.read()
    assert re.search(r"told: The folder \S+, by which processes start, is gone\. Restart this program", said)


LIMITED = """
import os, resource, sys
number = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (number, number))
from gpt2lab import cli
status = cli.main("train --plan dp=2 --steps 1 --batch 2 --sequence 8 --no-fast --sample 0".split() + sys.argv[2:])
print("status", status)
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="the limit binds another user")
@pytest.mark.parametrize("number", [3, 5, 6])
def test_who_may_start_no_more_processes_is_told_in_one_sentence(number, tmp_path):
    """Refused are the process server's forks, then a thread in a rank; neither shows a traceback above it."""
    user = str(50_000 + os.getpid() % 10_000)  # nobody else's processes count
    how = ["setpriv", "--reuid", user, "--clear-groups", "--inh-caps", "+dac_override"]
    how += ["--ambient-caps", "+dac_override"]
    text = told(LIMITED, tmp_path, how, str(number), "--out", str(tmp_path / "runs"))
    assert "no more processes or threads are allowed. Allow them: ulimit -u 4096.\n" in text, text
    assert "Traceback" not in text and "status 1\n" in text, text
