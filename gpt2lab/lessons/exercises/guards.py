"""What an answer may not open while it is tried, and what it may not change."""

import sys
from contextlib import contextmanager
from functools import wraps

# no_grad, and messages
OPEN = ("torch.autograd.grad_mode", "torch.autograd.function", "torch._functorch.utils")


@contextmanager
def closed(
    *modules: str, words: str = "torch would do this in one call; here it is closed. Write what it does"
):
    """Calling a Python function of these modules raises AssertionError in the block: they are what is to be written."""

    def watch(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(modules) and name not in OPEN:
            raise AssertionError(
                words
                if name.startswith("torch.")
                else f"{name}.{frame.f_code.co_name} knows the answer, and it is closed here. Write it yourself"
            )

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def unaided(answer, *modules: str):
    """`answer` with these modules closed to it."""

    @wraps(answer)
    def tried(*args, **kwargs):
        with closed(*modules):
            return answer(*args, **kwargs)

    return tried


def by_hand():
    """No autograd in the block: an answer that asks it for the backward it should write raises AssertionError."""
    words = (
        "autograd would give this in one call; here it is closed. Write what it does, with products and sums"
    )
    return closed("torch.autograd", "torch._functorch", "torch._ops", words=words)


def guarded() -> dict[str, dict]:
    """The names and values of every module that judges, as they are now."""
    mine = __name__.rpartition(".")[0]
    return {name: dict(vars(module)) for name, module in list(sys.modules.items()) if name.startswith(mine)}


def restored(before: dict[str, dict]) -> list[str]:
    """Put back what differs from `before` in modules that judge; returns the names of what an answer had replaced."""
    found = []
    for name, values in before.items():
        now = vars(sys.modules[name])
        changed = [key for key, value in values.items() if key not in now or now[key] is not value]
        found += [f"{name.rpartition('.')[2]}.{key}" for key in changed]
        now.update({key: values[key] for key in changed})
    return found
