"""A line between two processes: either may call functions of the other, with plain values, one call at a time."""

import base64
import builtins
import json
import socket
import threading
from collections.abc import Callable, Iterator

import cloudpickle
import torch

from ..lessons.exercises.guards import in_force, watched
from .values import DTYPES, NotPlain, decode, encode, renew
from .verdicts import TOLD

LARGEST = 2**26
"""Bytes of a message."""
LONGEST = 10**6
"""Values that are taken from an iterator."""
TEXT = 10_000
"""Characters that are told of an error."""


def unpacked(functions: bytes) -> dict | Callable:
    """Functions, or functions by name, that were packed where who made them runs anyway."""
    return cloudpickle.loads(functions)


def _noted(watches: dict) -> dict:
    return {kind: watch.noted for kind, watch in watches.items()}


def _note(watches: dict, message: dict) -> None:
    """What is noted of a call moves with it from process to process: at both ends it is as if there were one."""
    for kind, noted in message["noted"].items():
        if kind in watches:  # Python switches one off that has raised
            watches[kind].noted[:] = noted


class Gone(Exception):
    """The other process has ended (no words), or says what none says."""


class Peer:
    """One end of the line. Where the other end is `trusted`, it may say how a call is watched."""

    def __init__(self, line: socket.socket, trusted: bool = False):
        self.line, self.trusted, self.turn = line, trusted, threading.RLock()
        self.offered: list[Callable] = []
        self.raised: list[BaseException] = []  # by functions of this end, for the case that it comes back

    def call(self, name: str | int, args: tuple, kwargs: dict):
        """What a function of the other end gives or raises; arguments that it changes are changed here too.

        Raises Gone, and NotPlain for what cannot be told.
        """
        watches = in_force()  # they watch the answer, where that runs, and what it calls here
        with self.turn, watched(**dict.fromkeys(watches)):
            return self._call(name, [list(args), kwargs], watches)

    def _call(self, name, given: list, watches: dict):
        how = {"grad": torch.is_grad_enabled(), "float": str(torch.get_default_dtype())}
        if not self.trusted:
            how["watches"] = base64.b64encode(cloudpickle.dumps(watches)).decode()
        self.tell(call=name, given=self._plain(given), noted=_noted(watches), **how)
        while "call" in (message := self.hear()):
            self.answer(message, watches=watches)
        try:
            _note(watches, message)
            changed = decode(message.get("changed"), self._reach)
            found = self._error(message) if "raised" in message else decode(message["value"], self._reach)
            if changed is not None:
                renew(given, changed)
        except Exception:
            raise Gone(TOLD) from None
        if "raised" in message:
            raise found
        return found

    def answer(self, message: dict, names: dict | None = None, watches: dict | None = None) -> None:
        """Do the call that the other end asks for, of a function in `names` or one offered, and tell what came."""
        try:
            if self.trusted:
                watches = cloudpickle.loads(base64.b64decode(message["watches"]))
            _note(watches, message)
            name, given = message["call"], decode(message["given"], self._reach)
            function = names[name] if names and isinstance(name, str) else self.offered[name]
        except Exception:
            raise Gone(TOLD) from None
        before = json.dumps(self._plain(given))
        if self.trusted:
            torch.set_default_dtype(DTYPES[message["float"]])
            torch.set_grad_enabled(message["grad"])
        try:
            told = {"value": self._result(function, given, watches)}
            if (now := self._plain(given)) != json.loads(before):
                told["changed"] = now
            return self.tell(noted=_noted(watches), **told)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            told = self._words(error)
        except NotPlain as error:
            if not self.trusted:
                raise
            told = self._words(AssertionError(f"your function gave what cannot be judged: {error}"))
        self.tell(noted=_noted(watches), **told)

    def _result(self, function: Callable, given: list, watches: dict):
        args, kwargs = given
        with watched(**watches):
            found = function(*args, **kwargs)
            if one_by_one := isinstance(found, Iterator):
                found = [one for one, _ in zip(found, range(LONGEST), strict=False)]
        told = self._plain(found)
        return {"iterator": told["list"]} if one_by_one else told

    def tell(self, **message) -> None:
        """Send a message. Raises NotPlain where it is too long, and Gone."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST:
            raise NotPlain(f"{len(data):,} bytes are too much for one call, the limit is {LARGEST:,}")
        try:
            self.line.sendall(len(data).to_bytes(8, "big") + data)
        except OSError:
            raise Gone from None

    def hear(self) -> dict:
        """The next message. Raises Gone."""
        size = int.from_bytes(self._bytes(8), "big")
        try:
            message = json.loads(self._bytes(size)) if size <= LARGEST else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Gone(TOLD)
        return message

    def _bytes(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                more = self.line.recv(min(size - len(found), 2**20))
            except OSError:
                more = b""
            if not more:
                raise Gone
            found += more
        return bytes(found)

    def _plain(self, value):
        """The value as it is told: of what an answer gives, which may be of any class, the content."""
        return encode(value, self._offer, content=self.trusted)

    def _offer(self, function: Callable) -> int:
        """The number by which the other end can call a function."""
        if function not in self.offered:
            self.offered.append(function)
        return self.offered.index(function)

    def _reach(self, number: int) -> Callable:
        """The function that calls the other end's function of this number."""
        return lambda *args, **kwargs: self.call(number, args, kwargs)

    def _words(self, error: BaseException) -> dict:
        """An error as a message: names of its classes, its text, and its number where it came from the other end."""
        self.raised.append(error)
        try:
            text = str(error)[:TEXT]
        except Exception:
            text = ""
        names = [kind.__name__ for kind in type(error).__mro__]
        return {
            "raised": names,
            "text": text,
            "number": len(self.raised) - 1,
            "back": getattr(error, "back", None),
        }

    def _error(self, message: dict) -> BaseException:
        """The error that a message tells of: one that was raised here comes back as it was."""
        names, text, back = message["raised"], str(message["text"]), message["back"]
        if isinstance(back, int) and 0 <= back < len(self.raised):
            return self.raised[back]
        known = [getattr(builtins, name, None) for name in names]
        known = [k for k in known if isinstance(k, type) and issubclass(k, Exception | SystemExit)]
        own = {"__str__": lambda _: text, "__init__": lambda *_: None, "back": message["number"]}
        return type(names[0], tuple(known[:1]) or (Exception,), own)()
