"""Words of the command line: how an option is typed, and the way out for a name that nobody knows."""

import difflib
from collections.abc import Callable, Iterable

CROWDED = "no more processes or threads are allowed. Allow them: ulimit -u 4096."
"""What a system that starts none is answered with."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", form: str = "{}") -> str:
    """`Did you mean NAME?`, the known name nearest to `word`, BF16 to bf16, in `form`; `otherwise` where none is."""
    near = difflib.get_close_matches(word.lower(), names := {name.lower(): name for name in known}, 1)
    return f"Did you mean {form.format(names[near[0]])}?" if near else otherwise


def choose(known: Iterable[str]) -> str:
    """The other way out: all known names."""
    return f"Choose from {', '.join(known)}."


def flag(name: str) -> str:
    """How an option of this name is typed: --weight-decay."""
    return f"--{name.replace('_', '-')}"


def refuse(given: Iterable[str], idle: dict[str, str], typed: Callable[[str], str] = flag) -> None:
    """Raise ValueError where one of the given options changes nothing, with the reason; `typed` is how it is typed."""
    for name in (name for name in given if name in idle):
        raise ValueError(f"{typed(name)} would change nothing: {idle[name]}. Leave it out.")


def in_a_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text, which may be empty."""
    return f"{type(error).__name__}: {str(error)[:200].partition(chr(10))[0]}"
