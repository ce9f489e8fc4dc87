"""Ranks on one machine that talk through shared memory: a backend of torch.distributed, registered by name.

    import gpt2lab.transport
    gpt2lab.transport.register()
    dist.init_process_group("shm", ...)        # DDP, FSDP2, DTensor and pipelining run over it unchanged

Read in this order: `semaphores` (how ranks wait), `memory` (what is shared), `stream` (one writer, some readers, a few
slots), `moves` (every collective in a few lines on streams), `engine` (runs them and reports faults), `kinds` (a call's
kind as a number), `group` (what torch.distributed calls).
"""

import os
from contextlib import suppress

from . import semaphores

NAME = "shm"
__all__ = ["AVAILABLE", "NAME", "default", "register"]


def _memory_can_be_shared() -> bool:
    """Whether this system has anonymous memory files that can be opened again by their path in /proc."""
    with suppress(AttributeError, OSError), open(os.memfd_create("gpt2lab", os.MFD_CLOEXEC), "wb") as file:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{file.fileno()}", os.O_RDWR))
        return True
    return False


AVAILABLE = semaphores.AVAILABLE and _memory_can_be_shared()


def default() -> str:
    """The backend for ranks of one machine: what GPT2LAB_BACKEND names, else "shm" where it works, else "gloo"."""
    return os.environ.get("GPT2LAB_BACKEND") or (NAME if AVAILABLE else "gloo")


def register() -> None:
    """Register the backend with torch.distributed; a second call is a no-op."""
    import torch.distributed as dist

    from .group import create

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
