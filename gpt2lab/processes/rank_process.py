"""The main function of a rank's process: join the group, then call one function after the other."""

import contextlib
import datetime
import faulthandler
import importlib
import io
import linecache
import os
import re
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

from .. import transport
from ..machine import gpus
from . import status_board
from .forkserver import loaded
from .orphans import ASKS_TO_END, RANKS, STACK, die_with_parent, end_children, open_to_others
from .results import pack

HEADER = struct.Struct("<Q")
LONGEST_REPORT = 20_000  # characters of a traceback
LOST_PEER = re.compile(r"gloo/|Connection closed by peer|Connection reset|Broken pipe|PeerLost")


class _Kept(dict):
    """A dictionary that lives as long as its rank; a function sent to the ranks refers to it and never copies it."""

    def __reduce__(self):
        return "kept"


kept = _Kept()


def rank_main(
    rank: int,
    world: int,
    folder: str,
    backend: str,
    timeout: float,
    pipe: Connection,
    output: Connection,
    ends_alone: bool,
):
    """The main function of a rank: set up the process, then run jobs until the parent closes the pipe.

    A rank runs the package as its files are now, not as the forkserver imported them.
    """
    preload = sys.modules.get(f"{__package__}.preload")  # none where ranks are spawned
    if preload and preload.changed():
        for name in loaded():
            del sys.modules[name]
        anew = importlib.import_module(__name__).rank_main
        return anew(rank, world, folder, backend, timeout, pipe, output, ends_alone)
    try:
        _protect(folder, rank, pipe, ends_alone)
        _redirect(output)
        _join_group(rank, world, folder, backend, timeout)
    except BaseException as error:
        _send(pipe, _report(error))
        return
    _send(pipe, {"kind": "up"})
    while True:
        try:
            number = int(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        _send(pipe, _call(Path(folder, f"job.{number}"), rank, world, pipe))


def _protect(folder: str, rank: int, pipe: Connection, ends_alone: bool) -> None:
    """Die with the parent, ignore Ctrl-C (the parent handles it), write the stack on SIGUSR1 even with the GIL held.

    SIGTERM ends a rank only if it `ends_alone`: not where the parent handles that signal, which may reach all of them.
    """
    die_with_parent(signal.SIGKILL)
    open_to_others()  # ranks open each other's memory, and a closed process server may have forked this one
    for number in ASKS_TO_END:
        signal.signal(number, signal.SIG_IGN)
    if ends_alone:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, args=(folder, pipe), daemon=True).start()
    stack = open(Path(folder, f"{STACK}{rank}"), "w")  # noqa: SIM115 (open as long as the rank lives)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


def _leave_with_parent(folder: str, pipe: Connection) -> None:
    """End this rank when the parent is gone or has closed its end of the pipe."""
    sentinel = parent_process().sentinel
    poll = select.poll()
    poll.register(sentinel, select.POLLIN)
    poll.register(pipe.fileno(), 0)  # no events: poll then reports only that the other end was closed
    poll.poll()
    end_children(os.getpid())
    if wait([sentinel], 0):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _redirect(output: Connection) -> None:
    """Send what this rank prints, also from C++, to the parent, which shows it in the cell that launched it."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(file, line_buffering=True, errors="replace"))


def _join_group(rank: int, world: int, folder: str, backend: str, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    from .launchers import WITH_GPUS

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), **{RANKS: folder})
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    status_board.attach(Path(folder, "board"), rank, world)
    if backend == transport.NAME:
        transport.register()
    gpu = None
    if backend == "nccl":
        backend, gpu = WITH_GPUS, gpus.take_gpu(rank)
    store = dist.FileStore(str(Path(folder, "store")), world)
    # longer than the parent's timeout, because the parent can explain a hang
    longest = datetime.timedelta(seconds=2 * timeout + 60)
    sizes = {"rank": rank, "world_size": world, "timeout": longest, "device_id": gpu}
    dist.init_process_group(backend, store=store, **sizes)


def _call(job: Path, rank: int, world: int, pipe: Connection) -> dict:
    """Run one job and return its result or its error as a message; the job's file holds the function by value."""
    import cloudpickle

    with _early_report(pipe):
        try:
            lines, payload = cloudpickle.loads(job.read_bytes())
            linecache.cache.update(lines)
            function, args, kwargs = cloudpickle.loads(payload)
            value = function(rank, world, *args, **kwargs)
        except BaseException as error:
            return _report(error, skip=1)
        finally:
            _flush()
    try:
        return pack(value, job.with_name(f"result.{rank}"))
    except Exception as error:
        what = f"The result of rank {rank} (a {type(value).__name__}) cannot be sent back: {error}."
        return _report(TypeError(f"{what} Return numbers, strings, tensors, or lists and dicts of them."))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


@contextlib.contextmanager
def _early_report(pipe: Connection):
    """Report an exception before a rank destroys its process group because of it.

    Its peers fail as soon as the group is gone; without this report they would be blamed.
    """
    import torch.distributed as dist

    real = dist.destroy_process_group

    def destroy(*args, **kwargs):
        error = sys.exc_info()[1]
        if error is not None:
            _send(pipe, _report(error) | {"kind": "suspect"})
        return real(*args, **kwargs)

    dist.destroy_process_group = destroy
    try:
        yield
    finally:
        dist.destroy_process_group = real


def _report(error: BaseException, skip: int = 0) -> dict:
    """An exception as plain strings; `skip` leaves out the launcher's own frames."""
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    last = "".join(traceback.format_exception_only(error))
    lost = getattr(error, "lost_peer", False) or bool(LOST_PEER.search(last))
    name = type(error).__name__
    if len(text) > LONGEST_REPORT:
        half = LONGEST_REPORT // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
    if "daemonic processes are not allowed" in text:
        text += "A rank cannot start processes of its own: use threads (or num_workers=0), or launch more ranks.\n"
    return {"kind": "raised", "ename": name, "text": text, "time": time.monotonic(), "lost_peer": lost}


def _send(pipe: Connection, message: dict) -> None:
    import cloudpickle

    body = cloudpickle.dumps(message)
    view = memoryview(HEADER.pack(len(body)) + body)
    while view:
        view = view[os.write(pipe.fileno(), view) :]
