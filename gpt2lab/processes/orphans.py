"""No process and no folder outlives the notebook's kernel, however the kernel dies.

Linux sends the forkserver a signal when its parent dies; it then removes the private folders and exits, and its own
death kills every rank, even one that is stopped or holds the GIL. On other systems a thread in each rank does this.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
ASKS_TO_END = [signal.SIGINT, signal.SIGHUP, signal.SIGTERM]
TOKEN = os.urandom(4).hex()
PARENT = "GPT2LAB_FORKSERVER_PARENT"
PRELOAD = "GPT2LAB_FORKSERVER_PRELOAD"
CLOSED = "GPT2LAB_FORKSERVER_CLOSED"
RANKS = "GPT2LAB_RANKS"  # in the environment of a rank and of what it starts: the private folder of its ranks
STACK = "stack."  # begins the name of a file in that folder that a rank and its forks hold open


def own_folders() -> str:
    """How the names of this process's private folders begin; another container may have its number, and share /tmp."""
    return f"gpt2lab-{os.getpid()}-{TOKEN}-"


def die_with_parent(sig: int) -> None:
    """Ask Linux to send `sig` to this process when its parent dies; a no-op on other systems."""
    _ask_linux(PR_SET_PDEATHSIG, int(sig))


def closed_to_others() -> None:
    """No process of this user may read or trace this one from now on, nor its forks; a no-op on other systems."""
    _ask_linux(PR_SET_DUMPABLE, 0)


def open_to_others() -> None:
    """Other processes of this user may read this one again, which a closed one has forked; a no-op on other systems."""
    _ask_linux(PR_SET_DUMPABLE, 1)


def adopt() -> None:
    """What children of this process leave behind becomes its own child; a no-op on other systems."""
    _ask_linux(PR_SET_CHILD_SUBREAPER, 1)


def _ask_linux(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_children(process: int) -> None:
    """Kill what a process has started, and what that has started; on Linux, which names them."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                end_children(child)
                os.kill(child, signal.SIGKILL)


def process_state(process: int) -> str:
    """The letter by which Linux tells what a process does, such as T for stopped; empty where it does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def end_descendants(folders: str) -> None:
    """Kill the ranks whose private folder begins so, and what they have started, also if nobody is its parent any more.

    Linux shows what a program was started with, and what a fork holds open.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if int(process.name) != os.getpid() and _descends(process, folders):
                os.kill(int(process.name), signal.SIGKILL)


def _descends(process: Path, folders: str) -> bool:
    if f"{RANKS}={folders}".encode() in (process / "environ").read_bytes():
        return True
    links, real = [], os.path.realpath(folders)  # Linux says where a file is, not by which links it was found
    for file in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed
            links.append(os.readlink(file))
    return any(link.startswith(real) and f"/{STACK}" in link for link in links)


def _parent_died(folders: str, sockets: str) -> None:
    if hasattr(signal, "SIGRTMIN"):
        signal.signal(signal.SIGRTMIN, signal.SIG_IGN)  # Linux sends one for each thread of the parent
    end_descendants(f"{tempfile.gettempdir()}/{folders}")
    for folder in Path(tempfile.gettempdir()).glob(f"{folders}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if sockets:
        shutil.rmtree(sockets, ignore_errors=True)
    os._exit(0)


def exit_with_parent() -> None:
    """In the forkserver: exit (which ends every rank) when the process that started it is gone.

    That process puts into the environment `own_folders`, whether its main thread starts the forkserver, and the folder
    of multiprocessing's sockets. For Linux the parent is the *thread* that forked, so if another thread did, its end
    must not count as the parent's death. Ctrl-C, a closed terminal and SIGTERM, which `timeout` and schedulers send to
    all processes, are the parent's business, also while torch is imported here.
    """
    for number in ASKS_TO_END:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)
    folders, thread, sockets = (os.environ.get(PARENT, "") + "  ").split(" ", 2)
    if not folders:
        return
    if thread == "main" and sys.platform == "linux":
        signal.signal(signal.SIGRTMIN, lambda *_: _parent_died(folders, sockets.strip()))
        die_with_parent(signal.SIGRTMIN)  # nobody else sends it
    if os.getppid() != int(folders.split("-")[1]):
        _parent_died(folders, sockets.strip())
