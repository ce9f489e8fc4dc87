"""Plant a bug for the time of a `with` block: the ground of every mutant test."""

import ast
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from types import CodeType

import pytest
from warm import reference, unpacked

from gpt2lab import verify
from gpt2lab.plan import Plan

SIZES = 7, 11  # rows and tokens of the batch: nothing divides


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
    function = inspect.unwrap(function.fget if isinstance(function, property) else function)
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


def compare_with_bug(rank, world_size, serial, bug, plan, config, depth):
    """What `verify.compare` finds on this rank while a bug is planted, or a context manager that plants is open."""
    plant = bug if callable(bug) else lambda: all_planted(bug)
    with plant():
        return verify.compare(rank, world_size, plan, config, *SIZES, depth, unpacked(serial))


def _codes(code: CodeType, name: str):
    """The code of every function of this name, the outer ones first."""
    inside = [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    yield from (inner for inner in inside if inner.co_name == name)
    for inner in inside:
        yield from _codes(inner, name)


def is_noticed(ranks, bug, plan, config, limit: float = 1e-6) -> bool:
    """Whether the comparison with the serial run notices a bug: one step first, and training only if that is equal."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    for depth in ("full",) if plan.asynchronous else ("gradients", "full"):
        serial = reference(config, *SIZES, depth)
        if noticed(ranks.run(compare_with_bug, serial, bug, plan, config, depth), limit):
            return True
    return False


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


def is_killed(bug, check) -> bool:
    """Whether a test that passes without a bug fails with it: the arguments of `rewritten`, or a call that plants."""
    check()
    with bug() if callable(bug) else rewritten(*bug):
        return not passes(check)
