"""A pool of ranks: their processes, pipes, private folder and status board."""

import contextlib
import errno
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from ..machine.words import CROWDED
from . import forkserver
from .failure import outside_python, own_frame, with_source
from .orphans import STACK, end_children, end_descendants, own_folders, process_state
from .rank_process import HEADER, rank_main
from .status_board import Board

LONGEST_LINE = 1_000_000  # bytes of a printed line that are shown
MOST_PRINTED = 10_000_000  # bytes that a rank may print in one job; more would take minutes to show
LINE_END = 50  # bytes that the end of a line counts as
RESERVE = 1 << 16  # bytes that ranks will write into the private folder later: store, stacks
# where a rank is that waits in a call: its innermost line outside Python's own library
WAITS = re.compile(r"(transport/\w+|ranks/(call|paced|collectives)|torch/distributed/\w+)\.py")
# a fork has no ranks; multiprocessing would end them when it ends
os.register_at_fork(after_in_child=lambda: multiprocessing.process._children.clear())


class Member:
    """One rank as its parent sees it: the process, the pipe for messages and the pipe for what it prints."""

    def __init__(self, rank: int, process, pipe: Connection, output: int):
        self.rank, self.process, self.pipe, self.output = rank, process, pipe, output
        self.received = bytearray()
        self.printed, self.cut, self.shown = bytearray(), 0, 0

    def messages(self) -> list[bytes] | None:
        """Read what has arrived without waiting and return the complete messages; None at the end of the pipe."""
        try:
            chunk = os.read(self.pipe.fileno(), 1 << 20)
        except OSError:
            return None
        if not chunk:
            return None
        self.received += chunk
        complete = []
        while len(self.received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self.received)
            if len(self.received) < HEADER.size + length:
                break
            complete.append(bytes(self.received[HEADER.size : HEADER.size + length]))
            del self.received[: HEADER.size + length]
        return complete

    def lines(self, last: bool = False) -> list[str] | None:
        """Read printed text and return its complete lines (with `last`, also one without a line end)."""
        try:
            chunk = b"" if last else os.read(self.output, 1 << 16)
        except OSError:
            chunk = b""
        if self.shown > MOST_PRINTED:
            return [] if chunk else None
        found, parts = [], chunk.split(b"\n")
        for part in parts[:-1]:
            self._print(part)
            found.append(self._line())
        self._print(parts[-1])
        if last and self.printed:
            found.append(self._line())
        self.shown += len(chunk) + LINE_END * len(found)
        if self.shown > MOST_PRINTED:
            self.printed, self.cut = bytearray(), 0
            most = f"{MOST_PRINTED:,} bytes, the end of a line counted as {LINE_END}"
            found.append(f"... this rank printed more than {most}; the rest is not shown")
        return found if chunk or found else None

    def _print(self, part: bytes) -> None:
        """Add to the line that is not complete yet; of what is too long only the length is kept."""
        fits = part[: LONGEST_LINE - len(self.printed)]
        self.printed += fits
        self.cut += len(part) - len(fits)

    def _line(self) -> str:
        """The line, now complete."""
        text = self.printed.decode(errors="replace") + f" ... and {self.cut:,} bytes more" * bool(self.cut)
        self.printed, self.cut = bytearray(), 0
        return text


class Pool:
    """Living ranks. `kill` ends them at once and leaves nothing behind."""

    def __init__(self, ranks: int, backend: str, timeout: float):
        with forkserver.STARTING:
            context = forkserver.context()
        self.folder = Path(tempfile.mkdtemp(prefix=own_folders()))
        self.members: list[Member] = []
        self.jobs, self.owner, self.up = 0, os.getpid(), set()
        try:
            with _room(self.folder):
                (self.folder / "reserve").write_bytes(bytes(RESERVE))
                self.board = Board(self.folder / "board", ranks, create=True)
                (self.folder / "reserve").unlink()
            with forkserver.STARTING, forkserver.without_main():
                for rank in range(ranks):
                    self.members.append(self._start(context, rank, ranks, backend, timeout))
        except BaseException:
            self.kill()
            raise

    def _start(self, context, rank: int, ranks: int, backend: str, timeout: float) -> Member:
        ours, theirs = context.Pipe(duplex=True)
        reading, writing = os.pipe()
        output = Connection(writing, readable=False)
        own = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # it ends by itself
        arguments = (rank, ranks, str(self.folder), backend, timeout, theirs, output, own)
        process = context.Process(target=rank_main, args=arguments, name=f"rank {rank}", daemon=True)
        try:
            with theirs, output, _room(self.folder):
                process.start()
        except BaseException:
            os.close(reading)
            ours.close()
            raise
        return Member(rank, process, ours, reading)

    def send(self, job: bytes) -> None:
        """Give every rank the same job: through a file, so that a stopped rank cannot block the parent."""
        path = self.folder / f"job.{self.jobs}"
        with _room(self.folder):
            path.write_bytes(job)
        for member in self.members:
            member.shown = 0
            with contextlib.suppress(OSError):  # Watch finds a dead rank and reports its exit code
                member.pipe.send_bytes(str(self.jobs).encode())
        self.jobs += 1

    def finish_job(self) -> None:
        """Delete the job's file once every rank has answered."""
        (self.folder / f"job.{self.jobs - 1}").unlink(missing_ok=True)

    def alive(self) -> bool:
        """Whether every rank is alive, and the folder that they share is there."""
        return self.folder.exists() and all(member.process.is_alive() for member in self.members)

    def kill(self) -> None:
        """End every rank, wait until it is gone, close every descriptor and delete the folder.

        An interrupt meanwhile is raised afterwards. A fork of this process ends none.
        """
        if os.getpid() != self.owner:
            return
        with _interrupts_later():
            self._kill()

    def _kill(self) -> None:
        ended = False  # one of them by itself, before its children were found
        for member in self.members:
            with contextlib.suppress(Exception):
                end_children(member.process.pid)
                ended |= process_state(member.process.pid) in ("", "Z", "X")
                member.process.kill()
        for member in self.members:
            member.process.join(5)
            member.pipe.close()
            os.close(member.output)
            with contextlib.suppress(ValueError):
                member.process.close()
        if ended:
            end_descendants(str(self.folder))
        self.members = []
        if hasattr(self, "board"):
            self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # multiprocessing fails at its end where somebody has deleted it
            os.makedirs(multiprocessing.util.get_temp_dir(), exist_ok=True)

    def held_up(self, rank: int) -> float:
        """Seconds that a rank was ready to run but had no core, in which it is not stuck (0.0 if unknown)."""
        try:
            fields = Path(f"/proc/{self.members[rank].process.pid}/schedstat").read_text().split()
            return int(fields[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def stopped(self, rank: int) -> str:
        """The state of a rank that a signal has stopped, in words; empty for any other rank."""
        pid = self.members[rank].process.pid
        return f"is stopped (SIGSTOP), process {pid}" if process_state(pid) == "T" else ""

    def is_dying(self, rank: int) -> bool:
        """Whether a rank's main thread has ended: some of it is still there, or it is gone and not reported yet."""
        state = process_state(self.members[rank].process.pid)
        return state == "Z" or (not state and bool(process_state(os.getpid())))  # where Linux tells

    def stack(self, rank: int) -> str:
        """Where a rank without progress is now: `is stopped (SIGSTOP)` or a line of its Python stack."""
        if stopped := self.stopped(rank):
            return stopped
        if rank not in self.up:
            return "is still starting"
        frames = self._frames(rank)
        return f"is at {with_source(own_frame(frames))}" if frames else "is busy and shows no Python stack"

    def inside(self, rank: int, blocked: bool) -> str:
        """What a rank in a call does there, as `is stopped (SIGSTOP)`; empty where it only waits.

        One that is not `blocked` by its call may be anywhere: it is the rank's GPU that waits.
        """
        if (stopped := self.stopped(rank)) or not blocked:
            return stopped
        frames = self._frames(rank)
        waits = WAITS.search(next(filter(outside_python, frames), "")) if frames else True
        return "" if waits else f"hangs at {with_source(own_frame(frames))}"

    def _frames(self, rank: int) -> list[str]:
        """The lines of the Python stack that a rank writes to a file when it is asked to, the innermost first."""
        path = self.folder / f"{STACK}{rank}"
        try:
            seen = path.stat().st_size
            os.kill(self.members[rank].process.pid, signal.SIGUSR1)
            deadline, text, before = time.monotonic() + 2, "", None
            while (
                text != before or text[-1:] != "\n"
            ) and time.monotonic() < deadline:  # written line by line
                time.sleep(0.03)
                before, text = text, path.read_bytes()[seen:].decode(errors="replace")
            return [line.strip() for line in text.splitlines() if line.strip().startswith("File")]
        except OSError:
            return []  # the rank has ended, or its folder was deleted


@contextlib.contextmanager
def _interrupts_later():
    """Raise KeyboardInterrupt at the end of the block if there was one inside."""
    came = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _room(folder: Path):
    """Turn the error of a full disk, or of a process server that may not fork, into one sentence with the way out."""
    try:
        yield
    except (EOFError, BlockingIOError):
        raise OSError(CROWDED) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"{folder.parent} is full: the ranks share files there. Free some space, or set TMPDIR to another folder."
        ) from None
