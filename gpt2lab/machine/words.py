"""Words of the command line: how an option is typed, and the way out for a name that nobody knows."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", form: str = "{}") -> str:
    """`Did you mean NAME?`, the known name nearest to `word` written in `form`; `otherwise` where none is near."""
    near = difflib.get_close_matches(word, known, 1)
    return f"Did you mean {form.format(near[0])}?" if near else otherwise


def choose(known: Iterable[str]) -> str:
    """The other way out: all known names."""
    return f"Choose from {', '.join(known)}."


def flag(name: str) -> str:
    """How an option of this name is typed: --weight-decay."""
    return f"--{name.replace('_', '-')}"
