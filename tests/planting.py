"""Plant a bug for the time of a `with` block: the ground of every mutant test.

A bug is a line of a table, by what is wrong, with the check that must see it:

    BUGS = {"no warm-up": (Recipe.rate, "step < self.warmup", "False", test_the_rate_rises)}

It is (function, right text, wrong text), or (owner, name, make) where `make` gives the wrong thing for the right one.
The check is a test (with what is no fixture of it: `(test_rates, 3)`), or a plan that is compared with the serial run.
"""

import ast
import functools
import inspect
import sys
import tempfile
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import CodeType

import pytest
from warm import reference

from gpt2lab import verify
from gpt2lab.plan import Plan
from gpt2lab.processes.launch import RankFailed

SIZES = 7, 11  # rows and tokens of the batch: nothing divides
PASSED = set()  # checks that pass without a bug: each is asked once
REMEMBER = (
    "gpt2lab.planner", "gpt2lab.sharding", "gpt2lab.parallel", "gpt2lab.lessons.labs", "gpt2lab.transport",
)  # fmt: skip


def bugs(table: dict):
    """Run a test with each `bug` and `check` of a table."""
    cases = [pytest.param(bug, check, id=name) for name, (*bug, check) in table.items()]
    return pytest.mark.parametrize("bug, check", cases)


def controls(table: dict):
    """Run a test with each `check` of a table of live bugs: without a bug all is equal."""
    return pytest.mark.parametrize("check", sorted({row[-1].split(" raises=")[0] for row in table.values()}))


@contextmanager
def planting(bug):
    """Plant a bug: None (nothing), a line of a table, or a call that makes one."""
    if not bug:
        yield
        return
    made = bug() if callable(bug) else (rewritten if isinstance(bug[2], str) else planted)(*bug)
    with made:
        forget()
        try:
            yield
        finally:
            forget()


@contextmanager
def planted(owner, name: str, make):
    """Replace `owner.name` by `make(right)`, where `right` is what stood there, and put it back afterwards."""
    own, right = vars(owner).get(name), getattr(owner, name)
    wrong = make(right)
    setattr(owner, name, staticmethod(wrong) if isinstance(own, staticmethod) else wrong)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def all_planted(*bugs):
    """Several bugs (owner, name, make) at once; one that is None plants nothing."""
    with ExitStack() as stack:
        for bug in filter(None, bugs):
            stack.enter_context(planted(*bug))
        yield


@contextmanager
def rewritten(function, right: str, wrong: str):
    """Run other text in place of a function's: all who have the function run it."""
    function = _standing(_plain(function))
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(right) == 1, f"{function.__qualname__} has changed: {right!r} is not there once"
    tree, free = ast.parse(text.replace(right, wrong)), function.__code__.co_freevars
    tree.body[0].decorator_list = []
    if free:  # what it has from around it, such as the class for super()
        around = ast.parse(f"def around({', '.join(free)}): pass")
        around.body[0].body, tree = tree.body, around
    code = compile(tree, function.__code__.co_filename, "exec")
    before, function.__code__ = function.__code__, next(_codes(code, function.__name__))
    try:
        yield
    finally:
        function.__code__ = before


def _standing(function):
    """The function that its name gives here: a rank may have been sent a copy, where torch has wrapped it meanwhile."""
    if "<locals>" in function.__qualname__:
        return function
    return _plain(attrgetter(function.__qualname__)(sys.modules[function.__module__]))


def _plain(function):
    """What a property, a cached function, or a wrapper around one runs."""
    return inspect.unwrap(getattr(function, "fget", None) or getattr(function, "func", function))


def forget() -> None:
    """Empty what functions of rooms that only compute remember: it was computed by other text."""
    for name in [name for name in sys.modules if name.startswith(REMEMBER)]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def under(bug, job):
    """A job of ranks while a bug is planted on them; here it is seen that it still can be."""
    with planting(bug):
        pass

    def run(*args):
        with planting(bug):
            return job(*args)

    return run


def compare_with_bug(rank, world_size, right, bug, plan, config, depth):
    """What `verify.compare` finds on this rank while a bug is planted."""
    with planting(bug):
        return verify.compare(rank, world_size, plan, config, *SIZES, depth, right)


def _codes(code: CodeType, name: str):
    """The code of every function of this name, the outer ones first."""
    inside = [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    yield from (inner for inner in inside if inner.co_name == name)
    for inner in inside:
        yield from _codes(inner, name)


def is_noticed(ranks, bug, plan, config, limit: float = 1e-6, depths=()) -> bool:
    """Whether the comparison with the serial run notices a bug: one step first, and training only if that is equal."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    for depth in depths or (("full",) if plan.asynchronous else ("gradients", "full")):
        right = reference(plan, config, *SIZES, depth)
        if noticed(ranks.run(compare_with_bug, right, bug, plan, config, depth), limit):
            return True
    return False


def is_caught(pools, bug, check: str, config, limit: float = 1e-6) -> bool:
    """Whether the check of a live bug sees it: a plan, perhaps with dropout, and what it raises if it must end so.

    `dp=2`, `pp=2,tp=2 raises=Mismatch`, `dp=3 dropout=0.2`.
    """
    plan, *words = check.split()
    said = dict(word.split("=") for word in words)
    if "dropout" in said:
        config = replace(config, dropout=float(said["dropout"]))
    try:
        return is_noticed(pools[Plan.parse(plan).world], bug, plan, config, limit) and "raises" not in said
    except RankFailed as error:
        if error.ename != said.get("raises"):
            raise
        return True


def noticed(found, limit: float = 1e-6) -> bool:
    """Whether some rank saw an error far above rounding (or not a number)."""
    return any(not claim.error <= limit for claims in found for claim in claims)


def passes(check) -> bool:
    """Whether a test passes; a refusal that comes too late or too early is a failure as well."""
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return False
    return True


def is_killed(bug, check, **fixtures) -> bool:
    """Whether a check that passes without a bug fails with it."""
    test, *given = check if isinstance(check, tuple) else (check,)
    call = lambda: called(test, *given, **fixtures)
    if check not in PASSED:
        call()
        PASSED.add(check)
    with planting(bug):
        return not passes(call)


def called(test, *given, **fixtures):
    """Call a test as pytest does: what is not given comes from the fixtures of its file, or from these."""
    with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
        made = {"monkeypatch": patches, "tmp_path": Path(folder)} | fixtures

        def call(function, *first):
            function = inspect.unwrap(function)
            home = vars(sys.modules[getattr(function, "func", function).__module__])
            names = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
            for name in names[len(first) :]:
                if name not in made:
                    made[name] = call(home[name])
            return function(*first, **{name: made[name] for name in names[len(first) :]})

        return call(test, *given)
