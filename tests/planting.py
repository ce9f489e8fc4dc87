"""Plant a bug for the time of a `with` block: the ground of every mutant test."""

import ast
import inspect
import textwrap
from contextlib import ExitStack, contextmanager

import pytest
from warm import reference, unpacked

from gpt2lab import verify
from gpt2lab.plan import Plan
from gpt2lab.reference import RECIPES

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
    tree = ast.parse(text.replace(right, wrong))
    tree.body[0].decorator_list = []
    names = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, names)
    before = function.__code__
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


def compare_with_bug(rank, world_size, serial, bug, plan, config, recipes):
    """What `verify.compare` finds on this rank while a bug is planted, or a context manager that plants is open."""
    plant = bug if callable(bug) else lambda: all_planted(bug)
    with plant():
        return verify.compare(rank, world_size, plan, config, *SIZES, recipes, unpacked(serial))


def is_noticed(ranks, bug, plan, config, limit: float = 1e-6) -> bool:
    """Whether the comparison with the serial run notices a bug: one step first, and training only if that is equal."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    for recipes in (RECIPES,) if plan.asynchronous else ((), RECIPES):
        serial = reference(config, *SIZES, recipes)
        if noticed(ranks.run(compare_with_bug, serial, bug, plan, config, recipes), limit):
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
    """Whether a test that passes without a bug, given as the arguments of `rewritten`, fails with it."""
    check()
    with rewritten(*bug):
        return not passes(check)
