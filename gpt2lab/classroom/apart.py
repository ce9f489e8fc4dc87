"""Each answer in a process of its own; its checker in another one, which asks it for values and decides.

The judge forks a process for the checker, and that one forks the answer's, which forgets every other line, defines the
answer, and then only gets arguments and gives plain values (`values`). Functions of either side can be called by the
other. Linux lets no process of the same user read or trace judge and checker (PR_SET_DUMPABLE). With the exercise ends
all that was started for it.

Where a checker starts ranks for an answer, it hands on to them, unread, the functions and classes as the answer's
process packs them: they run there, and what ranks give is read as what nobody trusts (`untrusted`).

What is no plain value, such as an object of an answer's class, stays where it is: a checker lets a function of its own
run there (`exercises.run_there`), and decides by what this gives. One that hands it over runs beside the answer, which
could forge its verdict, for its own exercise only. `judged` says which way.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import getitem

import psutil

from ..lessons import exercises
from ..lessons.desk import Desk, defined, titles
from ..lessons.exercises.guards import frames_closed
from ..processes import forkserver
from ..processes.by_value import packed
from ..processes.orphans import adopt, closed_to_others, die_with_parent
from ..processes.results import untrusted
from .carried import by_value, forget
from .peer import Gone, Peer, unpacked
from .values import NotPlain
from .verdicts import TOLD, WORDS, ended, is_verdict, late

SPARE = 2
"""Seconds after which an answer that Python could not stop is killed."""
WARM = 60
"""Seconds in which a process must be ready on a busy machine."""
PACKED, RUN = "the functions, packed", "run this"
"""Names, which no function has, by which an answer's process gives its functions for ranks, and runs one of ours."""


def judged(desk: Desk, before: str, answer: str, checks: str, pipe: int) -> tuple[list, bool]:
    """The verdicts [name, status, words] on an answer, as `Desk.verdicts`, and whether the answer could not reach them.

    `pipe` is what only this process may write to.
    """
    names = titles(checks)
    if {"live", "ranked"} & vars(desk.names.get("exercises", desk)).keys():
        with suppress(OSError, EOFError):  # who asks for ranks will be told why there are none
            forkserver.lend()  # no answer pays for it that the first ranks start slowly
    for across, deed in ((True, _ask_across), (False, _judge_beside)):
        with _forked(lambda line, deed=deed: deed(desk, before, answer, checks, line), pipe) as other:
            try:
                other.hear(WARM)
                found = other.hear(exercises.LIMIT + SPARE)
            except AssertionError as error:
                return [[name, "FAIL", str(error)] for name in names], across
        if across and "unlike" in found:
            continue
        match found.get("verdicts"):
            case [*lines] if all(map(is_verdict, lines)) and [line[0] for line in lines] == names:
                return lines, across
        return [[name, "FAIL", TOLD] for name in names], across


class Other:
    """The process at the other end of a line; `over` says why it cannot be asked any more."""

    def __init__(self, process: int, line: socket.socket):
        self.process, self.line, self.peer, self.over = process, line, Peer(line), ""

    def __reduce__(self):
        """To a rank go the functions of the answer themselves, by name."""
        return _on_rank, (self.ask(PACKED, (), {}),)

    def ask(self, name: str, args: tuple, kwargs: dict):
        """What its function gives; raises what that raised, and AssertionError with words where the process is over."""
        if self.over:
            raise AssertionError(self.over)
        if threading.current_thread() is not threading.main_thread():
            raise NotPlain("pretended ranks ask at the same time, and there is one line")
        try:
            return self.peer.call(name, args, kwargs)
        except Gone as gone:
            raise self._end(str(gone)) from None
        except (Exception, SystemExit, NotPlain):
            raise
        except BaseException:  # the time of `exercises.verdict` is over
            self._end(late(exercises.LIMIT))
            raise

    def hear(self, seconds: float) -> dict:
        """Its next message, which must begin within so many seconds; AssertionError with words where none comes."""
        if not select.select([self.line], [], [], seconds)[0]:
            raise self._end(late(exercises.LIMIT))
        self.line.settimeout(seconds)
        try:
            return self.peer.hear()
        except Gone as gone:
            raise self._end(str(gone)) from None
        finally:
            self.line.settimeout(None)

    def _end(self, words: str) -> AssertionError:
        """End the process, and say why: in these words, or how it has ended by itself."""
        os.kill(self.process, signal.SIGKILL)  # no matter to one that has ended by itself
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.over = words or ended(status)
        return AssertionError(self.over)


class Far:
    """A function or a class of the other process, with the signature of the blank one. To a rank it goes itself."""

    def __init__(self, name: str, blank: Callable, other: Other):
        self.__name__ = self.__qualname__ = name
        self.__wrapped__, self.other = blank, other

    def __call__(self, *args, **kwargs):
        return self.other.ask(self.__name__, args, kwargs)

    def __reduce__(self):
        return getitem, (self.other, self.__name__)

    def run_there(self, run: Callable, *given):
        """What `run(it, *given)` gives in the other process."""
        return self.other.ask(RUN, (packed(run), self.__name__, *given), {})


def _on_rank(functions: bytes) -> dict[str, Callable]:
    if multiprocessing.parent_process() is None:
        raise NotPlain("a function that asks another process goes to ranks alone")
    return unpacked(functions)


@contextlib.contextmanager
def _forked(run: Callable, *secret: int) -> Iterator[Other]:
    """A fork that does `run(line)`, without these files; it ends, with all that it has started, with the block."""
    before = set(psutil.Process().children(recursive=True))  # what has nothing to do with the fork
    ours, theirs = socket.socketpair()
    process = os.fork()
    if not process:
        try:
            for file in (ours.fileno(), *secret):
                os.close(file)
            die_with_parent(signal.SIGKILL)
            run(theirs)
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    try:
        yield Other(process, ours)
    finally:
        ours.close()
        while left := set(psutil.Process().children(recursive=True)) - before:
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
                with suppress(ChildProcessError):
                    os.waitpid(one.pid, 0)


def _ask_across(desk: Desk, before: str, answer: str, checks: str, line: socket.socket) -> None:
    """In a fork: the checker here, the answer in a fork of its own. Tells the verdicts, or that this cannot be."""
    closed_to_others()
    adopt()
    peer, given, found = Peer(line), dict(desk.names), []
    by_value()
    desk.run(before, given)
    with _forked(lambda line: _answer(desk, before, answer, line), line.fileno()) as other:
        try:
            said = other.hear(exercises.LIMIT + SPARE).get("ready")
        except AssertionError as error:
            said = str(error)
        peer.tell(ready=True)
        if said:
            return peer.tell(verdicts=[[name, "FAIL", str(said)[:WORDS]] for name in titles(checks)])
        for name in defined(before):
            given[name] = Far(name, given[name], other)

        def check(name, test, *args, **kwargs):
            status, words = exercises.verdict(test, *args, **kwargs)
            found.append([name, status, str(words)[:WORDS]])

        try:
            with untrusted():
                desk.run(checks, given | {"check": check})
            peer.tell(verdicts=found)
        except NotPlain as error:
            peer.tell(unlike=str(error))


def _answer(desk: Desk, before: str, answer: str, line: socket.socket) -> None:
    """In a fork of that: define the answer, say so, and call its functions as the checker asks."""
    peer, names = Peer(line, trusted=True), dict(desk.names)
    forget()
    desk.run(before, names)
    try:
        desk.run(answer, names)
    except (Exception, SystemExit) as error:
        peer.tell(ready=f"your cell does not run: {type(error).__name__}: {error}")

    def run(deed: bytes, name: str, *given):
        return exercises.called(exercises.without_frames(unpacked(deed)), (names[name], *given), "")

    ours = lambda: {name: names[name] for name in defined(before) if name in names}
    names |= {RUN: run, PACKED: lambda: packed(ours())}
    peer.tell(ready="")
    while True:
        peer.answer(peer.hear(), names)


def _judge_beside(desk: Desk, before: str, answer: str, checks: str, line: socket.socket) -> None:
    """In a fork: checker and answer together."""
    peer = Peer(line)
    by_value()
    peer.tell(ready=True)
    said = frames_closed()
    found = desk.verdicts(before, answer, checks)
    if said:
        found = [(name, "FAIL", said[0]) for name, *_ in found]
    peer.tell(verdicts=[[name, status, str(words)[:WORDS]] for name, status, words in found])
