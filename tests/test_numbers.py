"""Every public function that asks for numbers or texts alone, at odd ones: a value or one sentence, and soon."""

import importlib
import inspect
import itertools
import math
import pkgutil
import re
import time

import pytest

from gpt2lab import planner, schedules, sharding, tasks

ODD = (
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    10**12,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    (),
    None,
    True,
    object(),
    {},
    b"",
)
ROOMS = planner, schedules, sharding, tasks
KINDS = {int, float, str, bool, "int", "float", "str", "bool", "int | None"}
SOON = 20  # five seconds, on a machine that does other things as well
SENTENCE = re.compile(r"[^\n]+[.?!]", re.DOTALL)
LATER = {"gpt2lab.planner.sends"}  # only called by predictions, which have checked the plan


def functions():
    """(name, function, how many arguments it must have)"""
    for room in ROOMS:
        for info in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            module = importlib.import_module(info.name)
            for name, found in vars(module).items():
                own = inspect.isfunction(found) and found.__module__ == info.name and info.name not in LATER
                if own and not name.startswith("_"):
                    asked = inspect.signature(found).parameters.values()
                    needed = [p for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
                    if needed and all(p.annotation in KINDS for p in needed):
                        yield f"{info.name}.{name}", found, len(needed)


FUNCTIONS = {name: (found, count) for name, found, count in functions()}


def answered(call, *values) -> str:
    """What is wrong with the answer to a call; empty for a value or one sentence."""
    begin = time.perf_counter()
    try:
        found = call(*values)
        if inspect.isgenerator(found):
            list(itertools.islice(found, 100))
    except Exception as error:
        sentence = isinstance(error, ValueError | TypeError) and SENTENCE.fullmatch(str(error))
        return "" if sentence else f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - begin
    return "" if seconds < SOON else f"an answer after {seconds:.0f} s"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_numbers_are_answered_with_a_value_or_a_sentence(name):
    """All arguments alike, and each alone beside twos."""
    call, count = FUNCTIONS[name]
    bad = {}
    for value in ODD:
        alone = ([value if i == k else 2 for k in range(count)] for i in range(count))
        for values in ([value] * count, *alone):
            if said := answered(call, *values):
                bad[repr(values)] = said
    assert not bad


def test_there_are_many_of_them():
    assert len(FUNCTIONS) > 60
