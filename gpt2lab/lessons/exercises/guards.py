"""What an answer may not open while it is tried, what it may not change, and how long it may look for an answer."""

import sys
import threading
from contextlib import contextmanager
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from types import FunctionType

from .differences import UNROLLED

PACKAGE = __name__.partition(".")[0]
# no_grad, messages, vmap, the end of `closed` itself, what asks an answer across processes and says how it ended, and
# what shows a tensor (for which torch asks for its tangent) or a table
OPEN = (
    "torch.autograd.grad_mode",
    "torch.autograd.function",
    "torch.autograd.forward_ad.unpack_dual",
    __name__,
)
OPEN += tuple(f"torch._functorch.{name}" for name in ("apis", "predispatch", "utils", "vmap"))
OPEN += tuple(f"{PACKAGE}.classroom.{name}" for name in ("apart", "peer", "verdicts"))
OPEN += tuple(f"{PACKAGE}.{name}" for name in ("lessons.display", "lessons.environment", "machine.checksum"))

JUDGES = __name__.rpartition(".")[0], f"{PACKAGE}.lessons.labs"
"""Modules that judge, and those with the numbers that they judge by: nothing in them may change."""

ASKED = "builtins", "math", "numpy"
"""Libraries whose functions are called to judge: none of them may be replaced."""
COMPARE = "equal", "allclose"
"""The functions of torch of which this holds too. Others torch itself replaces, when it first compiles."""

LIBRARIES = (
    sys.prefix,
    sys.base_prefix,
    str(Path(__file__).parents[2]),
    "<frozen ",  # Python's own import
    *(path for path in sys.path if path.endswith("-packages")),  # a user's own, or another environment's
)
"""Where code lies that is no answer's."""

NO_STEPS = (
    *(path for path in LIBRARIES if not path.endswith(PACKAGE)),
    str(Path(__file__).parents[2] / "classroom"),
)
"""Where code lies whose steps are no answer's: other libraries, and what asks an answer across processes."""

FRAMES = {
    f"sys.{name}"
    for name in ("_getframe", "_current_frames", "_current_exceptions", "setprofile", "settrace")
}
FRAMES |= {f"gc.get_{name}" for name in ("objects", "referrers", "referents")}
FRAMES |= {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
"""What gives the frames of other functions, by the names of Python's audit events and of attributes."""


@contextmanager
def closed(
    *modules: str, words: str = "torch would do this in one call; here it is closed. Write what it does"
):
    """Calling a function of these modules raises AssertionError in the block: they are what is to be written.

    A name may be that of one function, such as "gpt2lab.verify.verify". An answer may neither read the checker's
    variables through its frames nor end this watch; where it catches what is raised, the block raises it at its end.
    """

    def watch(frame, event, called):
        if event == "c_call" and called in (sys._getframe, sys.setprofile, sys.settrace):
            asks = frame.f_back if frame.f_globals.get("__name__") == "inspect" else frame
            if not asks.f_code.co_filename.startswith(LIBRARIES):
                said.append(f"sys.{called.__name__} is closed here: an answer does not look into its checker")
        elif event in ("call", "c_call"):
            own = event == "call"
            module = frame.f_globals.get("__name__", "") if own else getattr(called, "__module__", "")
            name = f"{module}.{frame.f_code.co_name if own else called.__name__}"
            if name.startswith(modules) and module not in OPEN and name not in OPEN:
                knows = f"{name} knows the answer, and it is closed here. Write it yourself"
                said.append(words if name.startswith("torch.") else knows)
        if said:
            raise AssertionError(said[0])

    said = watch.noted = []
    with watched(profile=watch):
        yield
    assert not said, said[0]


@contextmanager
def watched(**watches):
    """Calls in the block are told to `profile`, steps to `trace`, where given, also of threads that begin there.

    Those of other blocks are told no more, until this one ends.
    """
    alone = threading.current_thread() is threading.main_thread()  # else blocks would end in another order
    places = [(room, kind) for room in (threading, sys)[not alone :] for kind in watches]
    before = [(getattr(room, f"set{kind}"), getattr(room, f"get{kind}")()) for room, kind in places]
    try:
        for (put, _), (_, kind) in zip(before, places, strict=True):
            put(watches[kind])
        yield
    finally:
        for put, watch in before:
            put(watch)


def in_force() -> dict:
    """What `closed` and `patient` have set here, for `watched`. What one has noted so far is its list `noted`."""
    found = {"trace": sys.gettrace(), "profile": sys.getprofile()}
    return {kind: watch for kind, watch in found.items() if hasattr(watch, "noted")}


def frames_closed() -> list[str]:
    """For good, in this process: code outside LIBRARIES that asks for a frame gets an AssertionError instead.

    It would read its checker's variables there. Returns the list of all that is asked for from now on: an answer may
    catch what is raised. A signal's handler is given its frame unasked.
    """
    _lists_of_asked().append(said := [])
    return said


@cache
def _lists_of_asked() -> list[list[str]]:
    """The lists to write into. One hook for all: several would ask for a frame in turn because another has."""
    lists, asking = [], threading.local()

    def hook(event: str, given: tuple) -> None:
        name = given[1] if event == "object.__getattr__" else event
        pretends = event in ("compile", "code.__new__") and str(given[1]).startswith(LIBRARIES)  # its file
        if not (pretends or name in FRAMES) or vars(asking):
            return
        asking.now = True
        try:
            if _asked_by_an_answer(sys._getframe(1)):
                words = f"{name} is closed here: an answer does not look into its checker"
                for said in lists:
                    said.append(words)
                raise AssertionError(words)
        finally:
            del asking.now

    sys.addaudithook(hook)
    return lists


def _asked_by_an_answer(frame) -> bool:
    """Whether this code is no library's, or one that hands on frames or their variables to such code."""
    before = None
    while frame.f_back and frame.f_globals.get("__name__") in ("inspect", "traceback"):
        before, frame = frame, frame.f_back
    if frame.f_code.co_filename.startswith(LIBRARIES):
        return False
    if before is None or before.f_globals["__name__"] == "inspect":
        return True
    return before.f_code.co_name.startswith("walk_") or bool(before.f_locals.get("capture_locals"))


def unaided(answer, *modules: str):
    """`answer` with these modules closed to it, also while it makes what it gives one by one."""

    @wraps(answer)
    def tried(*args, **kwargs):
        with closed(*modules):
            found = answer(*args, **kwargs)
            return list(found) if isinstance(found, UNROLLED) else found

    if there := getattr(answer, "run_there", None):
        tried.run_there = lambda run, *given: there(partial(_unaided_there, run, modules), *given)
    return tried


def _unaided_there(run, modules: tuple, answer, *given):
    return run(unaided(answer, *modules), *given)


def by_hand():
    """No autograd in the block: an answer that asks it for the backward it should write raises AssertionError."""
    words = (
        "autograd would give this in one call; here it is closed. Write what it does, with products and sums"
    )
    calls = (f"torch._ops.{name}" for name in ("aten", "__call__", "redispatch"))
    own = "gpt2lab.algorithms", "gpt2lab.experts"
    return closed("torch.autograd", "torch._functorch", *calls, *own, words=words)


def without_autograd(answer, *given):
    """What an answer gives `by_hand`: a `call` of a Task."""
    with by_hand():
        return answer(*given)


@contextmanager
def patient(what: str, most: int = 300_000):
    """AssertionError where the Python code in the block takes more than so many steps: who tries everything does."""
    words = f"{what} takes more than {most:,} steps: you try everything. Keep the best of each part, and build on it"

    def count(frame, *_):
        if frame.f_code.co_filename.startswith(NO_STEPS):
            return None
        steps[0] += 1
        assert steps[0] < most, words
        return count

    steps = count.noted = [0]
    with watched(trace=count):
        yield
    assert steps[0] < most, words


def guarded() -> dict[str, dict]:
    """The values by name in every module that judges, as they are now, and what is in them.

    Of the other modules of the package it is the constants, functions and classes, by which is judged; of a few
    libraries what can be called.
    """
    modules = [
        (n, m) for n, m in list(sys.modules.items()) if n.startswith(PACKAGE) or n in (*ASKED, "torch")
    ]
    return {
        name: {
            key: (value, dict(_contents(name, key, value)))
            for key, value in vars(module).items()
            if _judges(name, key, value)
        }
        for name, module in modules
    }


def _judges(name: str, key: str, value) -> bool:
    if name.startswith(PACKAGE):
        return name.startswith(JUDGES) or key.isupper() or isinstance(value, type | FunctionType)
    return callable(value) if name in ASKED else key in COMPARE


def restored(before: dict[str, dict]) -> list[str]:
    """Put back what differs from `before` in modules that judge; returns the names of what an answer had replaced."""
    found = []
    for name, values in before.items():
        now = vars(sys.modules[name])
        for key, (value, inside) in values.items():
            table = _contents(name, key, value)
            kept = [k for k in table if isinstance(getattr(type(value), str(k), None), cached_property)]
            other = [k for k in {**table, **inside} if table.get(k) is not inside.get(k) and k not in kept]
            if now.get(key) is not value or other:
                found.append(f"{name.rpartition('.')[2]}.{key}")
            now[key] = value
            if other and isinstance(value, type | FunctionType):
                for k in other:
                    setattr(value, k, inside[k]) if k in inside else delattr(value, k)
            elif other:  # all anew, so that the order is as before too
                known = {k: table[k] for k in kept}
                table.clear()
                table.update(inside | known)
    return found


def _contents(name: str, key: str, value) -> dict:
    """What is in a constant that is a table, in an object of ours that should not change, such as a price, in a class
    of ours (what can be called) or a function (what it does).
    """
    if isinstance(value, type | FunctionType):
        if not str(value.__module__).startswith(PACKAGE):
            return {}
        if isinstance(value, FunctionType):
            return {k: getattr(value, k) for k in ("__code__", "__defaults__", "__kwdefaults__")}
        methods = staticmethod | classmethod | property
        return {k: v for k, v in vars(value).items() if callable(v) or isinstance(v, methods)}
    if not name.startswith(PACKAGE):
        return {}
    if isinstance(value, dict) and key.isupper() and key != "STATUS":
        return value
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    return vars(value) if frozen and hasattr(value, "__dict__") else {}
