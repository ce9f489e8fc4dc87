"""What the arguments of a public call may be: what is not gets one sentence, before any work is done.

`@checked(rows=1, share=(0, 1))` above a function or a class, of which then every public method is looked at too: each
argument must be of the kind that its annotation says, and a number at least as large as said there, or in that range;
a list of such numbers is not empty. A NaN never fits, an infinity only in a range. For a method the largest number
may be a function of its object: `rank=lambda schedule: schedule.ranks - 1`. What is not there is said as well.
"""

import functools
import inspect
import math
import os
import re
import stat
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType

MORE = math.ulp(0.0)
"""The least number that is more than 0."""
FINITE, LARGEST = sys.float_info.max, 2**28
EMPTY = Parameter.empty
OBJECTS = {  # what is known by an attribute, as not every room may import its class; and how to get one
    "config": ("n_embd", "a GPT2Config, such as PRESETS['nano']"),
    "plan": ("axes", "a plan, such as Plan.parse('dp=2')"),
    "model": ("wte", "a GPT2"),
    "batch": ("targets", "a batch, such as Batches(shard, 8, 128).at(0)"),
    "problem": ("graph", "a problem, such as Placing(graph, cluster)"),
}
UNFIT = re.compile(r"zip\(\) argument|(max|min)\(\) arg is an empty|.* is not in (list|tuple)|tuple.index")
"""What Python says where lists do not fit each other."""
NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}
MANY = (Sequence, Iterable, Collection, list, tuple)
NAMES = {bool: "True or False", str: "a text", NoneType: "None", Callable: "a function", Mapping: "a dict"}
NAMES |= dict.fromkeys(MANY, "a list")


def checked(**ranges):
    """The function or class, which raises ValueError for an argument that it cannot work with."""

    def wrap(call, owner=None):
        for name, method in [*vars(call).items()] if inspect.isclass(call) else ():
            if inspect.isfunction(method) and name[0] != "_" and method.__code__.co_name != "told":
                setattr(call, name, wrap(method, call))
        inner, owner = (call.__init__, call) if inspect.isclass(call) else (call, owner)
        own, parameters = call.__name__, inspect.signature(inner).parameters.values()
        rules = {p.name: (_kind(p, owner), ranges.get(p.name)) for p in parameters}
        places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        limit = lambda least: (math.inf, 0) if callable(least) else _limits(least)
        quick = {name: (name, _exact(kind), *limit(least)) for name, (kind, least) in rules.items()}
        order = [quick[name] for name in places]

        def look(name, value, args) -> None:
            kind, least = rules[name]
            limits = (0, least(args[0])) if callable(least) and kind is int else least
            if not _fits(kind)(value, limits):
                raise ValueError(f"{name} = {_short(value)} does not fit {own}. Use {_words(kind, limits)}.")

        @functools.wraps(inner)
        def told(*args, **kwargs):
            given = zip(args, order, strict=False)
            if kwargs:
                given = *given, *((value, quick[name]) for name, value in kwargs.items() if name in quick)
            for value, (name, kinds, least, most) in given:
                kind = type(value)
                at_once = not kinds or kind in kinds and (kind not in NUMBERS or least <= value <= most)
                if not at_once:
                    look(name, value, args)
            try:
                return inner(*args, **kwargs)
            except (LookupError, ValueError) as error:
                given = dict(zip(places, args, strict=False)) | kwargs
                said, found = ", ".join(f"{k} = {_short(v)}" for k, v in given.items() if k != "self"), ""
                if isinstance(error, LookupError) and ("rank" in given or _raised_in(call, error)):
                    found = f"{own} finds nothing at {said}. Use what there is, from 0 on."
                elif UNFIT.match(str(error)) and _raised_in(call, error):
                    found = f"{own} cannot join {said}. Use as many of each, and names that there are."
                if not found:
                    raise
                raise ValueError(found) from error

        if inner is call:
            return told
        call.__init__ = told
        return call

    return wrap


def contents(file: str | Path) -> bytes:
    """What is in a file. Raises ValueError for one that is too large, or a pipe or device, which may never end."""
    found = os.stat(file)
    if found.st_size > LARGEST or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ValueError(f"{file} is no regular file of at most {LARGEST:,} bytes. Use another file.")
    return Path(file).read_bytes()


def read_table(file: str | Path, parse: Callable, what: str) -> dict:
    """The words of a file with their values. Raises ValueError where it cannot be read as `what`."""
    try:
        if isinstance(found := parse(contents(file).decode("utf-8-sig")), dict):
            return found
        why = "it is no table of words"
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error).removesuffix(". Use another file.")
    raise ValueError(f"{file} cannot be read as {what}: {why}. Use another file.")


def said_in(file: str, word: str, value, kind, limits=None):
    """The value that a file has for a word. Raises ValueError, with both names, where it does not fit."""
    if isinstance(value, bool) != (kind is bool) or not _fits(kind)(value, limits):
        raise ValueError(f"{file} says {word} = {_short(value)}. Use {_words(kind, limits)}.")
    return value


def _short(value) -> str:
    """A value as Python writes it, as far as it can be read in a sentence."""
    said = " ".join(repr(value).split())
    return said if len(said) <= 80 else f"{said[:80]}..."


def _raised_in(call, error: BaseException) -> bool:
    """Whether an error was raised in the file of a call, and not in what that has called elsewhere."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    return files <= {inspect.getfile(inspect.unwrap(call)), "<string>", __file__}


def _kind(p: Parameter, owner):
    """What kind of thing a parameter takes, for a method of the class `owner`; EMPTY: any."""
    if isinstance(p.annotation, str) and owner:  # as its own class is not there yet
        return eval(p.annotation, {owner.__name__: owner})
    if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) or isinstance(p.annotation, str):
        return EMPTY
    known = OBJECTS.get(p.name, EMPTY) if p.default is EMPTY else EMPTY
    return known if p.annotation is EMPTY else p.annotation


def _exact(kind) -> tuple:
    """The types whose values fit this kind without a closer look, a number's within its limits; (): all fit."""
    if isinstance(kind, UnionType):
        return sum(map(_exact, typing.get_args(kind)), ())
    return () if kind is EMPTY else (float, int) if kind is float else (kind,)


def _limits(limits) -> tuple[float, float]:
    if isinstance(limits, tuple):
        return limits
    return (-FINITE if limits is None else limits), FINITE


@functools.cache
def _fits(kind) -> Callable:
    """What says whether a value of this kind fits, within limits."""
    if kind is EMPTY:
        return lambda value, limits: True
    if kind in NUMBERS:
        number = NUMBERS[kind][0]
        within = lambda value, least, most: least <= value <= most
        return lambda value, limits: isinstance(value, number) and within(value, *_limits(limits))
    if isinstance(kind, UnionType):
        tests = [*map(_fits, typing.get_args(kind))]
        return lambda value, limits: any(test(value, limits) for test in tests)
    if kind is bool:
        return lambda value, limits: isinstance(value, Integral) and value in (0, 1)
    if isinstance(kind, tuple):  # of OBJECTS
        return lambda value, limits: hasattr(value, kind[0])
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Callable:
        return lambda value, limits: callable(value)
    if origin in MANY:
        return lambda value, limits: _all_fit(value, origin, inner, limits)
    if not inspect.isclass(origin):
        return lambda value, limits: True
    if origin not in (dict, Mapping) or not inner:
        return lambda value, limits: isinstance(value, origin)
    each = _fits(inner[1])
    return lambda value, limits: isinstance(value, origin) and all(each(v, limits) for v in value.values())


def _all_fit(value, origin, inner, limits) -> bool:
    """Whether a list, or what can be gone through like one, has members that all fit."""
    if isinstance(value, str | Mapping) or not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        return False
    if not inner or not isinstance(value, list | tuple):
        return True
    if not value and limits is not None:
        return False
    if origin is tuple and ... not in inner:
        return len(inner) == len(value) and all(_fits(inner[n])(v, limits) for n, v in enumerate(value))
    each = _fits(inner[0])
    return all(each(v, limits) for v in value)


def _words(kind, limits) -> str:
    """What fits."""
    if kind in NUMBERS:
        (least, most), what = _limits(limits), NUMBERS[kind][1]
        if most < FINITE:
            return f"{what} {'of more than 0, at most' if least == MORE else f'from {least:,} to'} {most:,}"
        more = "" if least == -FINITE else f" of {'more than 0' if least == MORE else f'{least:,} or more'}"
        return what + more
    if isinstance(kind, UnionType):
        return " or ".join(_words(k, limits) for k in typing.get_args(kind))
    if isinstance(kind, tuple):
        return kind[1]
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    maps = origin in (dict, Mapping)
    each = f" of which each is {_words(inner[maps], limits)}" if inner and (maps or origin in MANY) else ""
    return NAMES.get(origin, f"a {origin.__name__}") + each
