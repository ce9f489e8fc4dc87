"""gpt2lab: understand, run and check how GPT-2 is trained in parallel."""

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
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
