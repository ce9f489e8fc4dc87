"""Text, tokens and batches. Importing a name of this package loads only the file it lives in."""

import importlib

_HOMES = {
    "Batch": "batches",
    "Batches": "batches",
    "Shard": "shards",
    "plays": "shards",
    "shakespeare": "shards",
    "encoding": "tokenizer",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
