"""No process and no folder outlives the notebook's kernel, however the kernel dies.

Linux sends the forkserver a signal when its parent dies; it removes the private folders and leaves, and its own
death kills every rank, also one that is stopped or holds the GIL. Elsewhere a thread in each rank does the work.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

PR_SET_PDEATHSIG = 1
FOLDER_PREFIX = "gpt2lab-"
GUARD = "GPT2LAB_GUARD_FORKSERVER"


def die_with_parent(sig: int) -> None:
    """Ask Linux to send `sig` to this process when its parent dies; elsewhere do nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)


def remove_folders(parent: int) -> None:
    """Delete the private folders that process `parent` made for its ranks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{parent}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _parent_died(parent: int) -> None:
    remove_folders(parent)
    os._exit(0)


def guard_forkserver() -> None:
    """In the forkserver: leave (and so end every rank) when the process that started it is gone.

    The launcher leaves its process number in the environment, and whether its main thread starts the forkserver:
    Linux counts the end of the *thread* that forked as the parent's death, so other threads get no such signal.
    """
    parent, _, thread = os.environ.get(GUARD, "").partition(" ")
    if not parent:
        return
    if thread == "main":
        signal.signal(signal.SIGTERM, lambda *_: _parent_died(int(parent)))
        die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        _parent_died(int(parent))
