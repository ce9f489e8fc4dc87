"""gpt2lab: understand, run and check how GPT-2 is trained in parallel."""

import sys
from importlib import import_module

# Imported on first use, so that `import gpt2lab` stays quick (torch takes seconds).
_HOMES = {
    "launch": "gpt2lab.processes.launch",
    "Ranks": "gpt2lab.processes.launch",
    "RankFailed": "gpt2lab.processes.launch",
    "kept": "gpt2lab.processes.launch",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'gpt2lab' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
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
