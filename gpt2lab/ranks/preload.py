"""What the forkserver imports once, so that a new rank starts in a few hundredths of a second.

The forkserver is a clean, single-threaded process from which ranks are forked. It dies together with the
notebook's kernel, however the kernel dies, and takes its ranks and their private folders with it.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import cloudpickle  # noqa: F401
import numpy  # noqa: F401
import torch
import torch._dynamo
import torch.distributed  # noqa: F401

PR_SET_PDEATHSIG = 1
FOLDER_PREFIX = "gpt2lab-"


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
    """In the forkserver: leave (and so end every rank) when the process that started it is gone."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: _parent_died(parent))
    die_with_parent(signal.SIGTERM)


# Set by the launcher while it starts the forkserver from its main thread: the death signal follows the
# *thread* that forked.
if os.environ.get("GPT2LAB_GUARD_FORKSERVER") == str(os.getppid()):
    guard_forkserver()
