"""What the arguments of a public call may be: what is not gets one sentence, before any work is done.

`@checked(rows=1, share=(0, 1))` above a function or a dataclass: each argument must be of the kind that its annotation
says, and a number at least as large as said there, or in that range; a list of such numbers is not empty. A NaN never
fits, an infinity only in a range.
"""

import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from itertools import chain
from numbers import Integral, Real
from types import NoneType, UnionType

MORE = math.ulp(0.0)
"""The least number that is more than 0."""
FINITE = sys.float_info.max
OBJECTS = {  # what is known by an attribute, as not every room may import its class; and how to get one
    "config": ("n_embd", "a GPT2Config, such as PRESETS['nano']"),
    "plan": ("axes", "a plan, such as Plan.parse('dp=2')"),
    "model": ("wte", "a GPT2"),
    "batch": ("targets", "a batch, such as Batches(shard, 8, 128).at(0)"),
    "problem": ("graph", "a problem, such as Placing(graph, cluster)"),
}
NUMBERS = {int: (Integral, "a whole number"), float: (Real, "a number")}
MANY = (Sequence, Iterable, Collection, list, tuple)
NAMES = {bool: "True or False", str: "a text", NoneType: "None", Callable: "a function", Mapping: "a dict"}
NAMES |= dict.fromkeys(MANY, "a list")


def checked(**ranges):
    """The function or dataclass, which raises ValueError for an argument that it cannot work with."""

    def wrap(call):
        inner = call.__init__ if inspect.isclass(call) else call
        own, parameters = call.__name__, inspect.signature(inner).parameters.values()
        rules = {p.name: (_kind(p), ranges.get(p.name)) for p in parameters}
        places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        quick = {  # most values are of exactly their type and, if whole numbers, large enough
            name: (kind, least)
            for name, (kind, least) in rules.items()
            if kind is not float and (least is None or kind is int and type(least) is not tuple)
        }

        @functools.wraps(inner)
        def told(*args, **kwargs):
            for name, value in chain(zip(places, args, strict=False), kwargs.items()):
                kind, least = quick.get(name, (None, None))
                if kind is Parameter.empty or type(value) is kind and (least is None or least <= value):
                    continue
                # of other names Python says what is wrong
                if name in rules and not _fits(value, *rules[name]):
                    said = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
                    raise ValueError(f"{name} = {said} does not fit {own}. Use {_words(*rules[name])}.")
            try:
                return inner(*args, **kwargs)
            except IndexError as error:
                given = dict(zip(places, args, strict=False)) | kwargs
                if "rank" not in given:
                    raise
                raise ValueError(
                    f"There is no rank {given['rank']} in {own}. Use 0, or one that there is."
                ) from error

        if inner is call:
            return told
        call.__init__ = told
        return call

    return wrap


def _kind(p: Parameter):
    """What kind of thing a parameter takes; Parameter.empty: any."""
    if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) or isinstance(p.annotation, str):
        return Parameter.empty
    known = OBJECTS.get(p.name, Parameter.empty) if p.default is Parameter.empty else Parameter.empty
    return known if p.annotation is Parameter.empty else p.annotation


def _limits(limits) -> tuple[float, float]:
    if isinstance(limits, tuple):
        return limits
    return (-FINITE if limits is None else limits), FINITE


def _fits(value, kind, limits) -> bool:
    if kind is Parameter.empty:
        return True
    if type(value) is kind and kind is not float and type(limits) is not tuple:  # most values: quickly
        return limits is None or kind is not int or limits <= value
    if kind in NUMBERS:
        least, most = _limits(limits)
        return isinstance(value, NUMBERS[kind][0]) and least <= value <= most
    if isinstance(kind, UnionType):
        return any(_fits(value, k, limits) for k in typing.get_args(kind))
    if kind is bool:
        return isinstance(value, Integral) and value in (0, 1)
    if isinstance(kind, tuple):  # of OBJECTS
        return hasattr(value, kind[0])
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Callable:
        return callable(value)
    if origin in MANY:
        return _all_fit(value, origin, inner, limits)
    if not inspect.isclass(origin) or not isinstance(value, origin):
        return not inspect.isclass(origin)
    return not (origin in (dict, Mapping) and inner) or all(
        _fits(v, inner[1], limits) for v in value.values()
    )


def _all_fit(value, origin, inner, limits) -> bool:
    """Whether a list, or what can be gone through like one, has members that all fit."""
    if isinstance(value, str | Mapping) or not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        return False
    if not inner or not isinstance(value, list | tuple):
        return True
    if not value and limits is not None:
        return False
    if origin is tuple and ... not in inner:
        return len(inner) == len(value) and all(map(_fits, value, inner, [limits] * len(value)))
    return all(_fits(v, inner[0], limits) for v in value)


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
