"""gpt2lab: understand, run and check how GPT-2 is trained in parallel."""

import sys
from importlib import import_module

__all__ = ["RankFailed", "Ranks", "kept", "launch"]


def __getattr__(name: str):
    """The names of `processes.launch`, on first use, so that `import gpt2lab` stays quick (torch takes seconds)."""
    if name not in __all__:
        raise AttributeError(f"module 'gpt2lab' has no attribute {name!r}")
    try:
        return getattr(import_module("gpt2lab.processes.launch"), name)
    except ModuleNotFoundError as error:
        raise ImportError(lacking(error)) from None


def lacking(error: ModuleNotFoundError) -> str:
    """What to do where a package that gpt2lab needs is not installed."""
    return (
        f"gpt2lab needs {error.name}, which {sys.executable} does not have. Use the Python of the environment that "
        "`make lab` builds: .venv/bin/python."
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
