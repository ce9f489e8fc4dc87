"""Where ranks are forked from: one process that has torch and this package in memory, and ends with its parent."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
import types

from ..machine.huge_pages import ask_for_huge_pages
from .orphans import ASKS_TO_END, CLOSED, PARENT, PRELOAD, own_folders

STARTING = threading.Lock()
ENDING = 10.0
"""Seconds that a process server may take to end."""
_lent = 0  # the process whose server its forks use too
# rooms that draw, measure or grade, which ranks seldom need
ONLY_HERE = ("benchmarks", "classroom", "cli", "commands", "plots")


def context(closed: bool = False):
    """A forkserver, with what it preloads in huge pages; spawn where there is no forkserver (Windows).

    Where it starts `closed`, no process may read or trace it; ranks may read each other.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    if _lent and os.getpid() != _lent:
        return chosen
    chosen.set_forkserver_preload(["gpt2lab.processes.preload"])
    from multiprocessing import resource_tracker
    from multiprocessing.forkserver import ensure_running

    main = threading.current_thread() is threading.main_thread()
    before = dict(os.environ)
    try:
        with _held_back(ASKS_TO_END[1:2]):
            resource_tracker.ensure_running()  # holds SIGINT and SIGTERM back itself, and then lets them through again
        with _held_back(ASKS_TO_END):  # one in between would leave the folder of sockets behind
            folder = multiprocessing.util.get_temp_dir()
            if not os.path.isdir(folder):
                said = "by which processes start, is gone. Restart this program, or the notebook's kernel."
                raise OSError(f"The folder {folder}, {said}")
            os.environ[PARENT] = f"{own_folders()} {'main' if main else 'other'} {folder}"
            needed = (name for name in loaded() if (name + ".").split(".")[1] not in ONLY_HERE)
            os.environ[PRELOAD] = " ".join(needed)
            os.environ |= {CLOSED: "1"} if closed else {}
            ask_for_huge_pages()
            ensure_running()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise OSError(
            f"The name of the folder TMPDIR={tempfile.gettempdir()} is too long for a socket in it. Set TMPDIR to a "
            "shorter one, such as /tmp."
        ) from None
    finally:
        for name in (PARENT, PRELOAD, CLOSED, "GLIBC_TUNABLES"):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
    return chosen


def lend() -> None:
    """See that a closed process server runs, which from now on also starts the ranks of this process's forks.

    One that a fork has made to end refuses, until it has ended and another can start.
    """
    global _lent
    until = time.monotonic() + ENDING
    while True:
        ready = context(closed=True).Process(target=loaded, daemon=True)
        try:
            with without_main():
                ready.start()
            break
        except (OSError, EOFError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    ready.join()
    _lent = os.getpid()


def _after_fork() -> None:
    """After a fork the parent's process server is none of this process's, whose first ranks start another.

    One that was lent is used as it is: only the parent can wait for it, and start it anew.
    """
    from multiprocessing import forkserver

    server = forkserver.ensure_running.__self__  # the one object of multiprocessing that knows the server
    if _lent:
        server.ensure_running = lambda: None
    else:
        server.__init__()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def loaded() -> list[str]:
    """The names of all modules of this package that this process has imported."""
    return [name for name in list(sys.modules) if name.split(".")[0] == __name__.split(".")[0]]


@contextlib.contextmanager
def _held_back(signals):
    """Hold signals back, also in processes that start meanwhile, until they ignore them (`exit_with_parent`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def without_main():
    """Hide the caller's script while processes start: ranks get functions by value and must not run it again."""
    main = sys.modules.get("__main__")
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
