"""Functions of a cell or a script on their way to another process: by value, with all that they need."""

import functools
import io
import pickle

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, which sends a function by value, but one that `functools.cache` wraps by a name only.

    Here that one goes as it would without its wrap, and begins there with nothing kept.
    """

    def reducer_override(self, thing):
        """What pickle asks first how to send a thing."""
        if isinstance(thing, functools._lru_cache_wrapper) and not _importable(thing):
            return _cached, (thing.__wrapped__, thing.cache_parameters())
        return super().reducer_override(thing)


def packed(value) -> bytes:
    """The value as bytes for cloudpickle to read."""
    out = io.BytesIO()
    Pickler(out).dump(value)
    return out.getvalue()


def _importable(function) -> bool:
    """Whether another process finds the function by its name."""
    try:
        pickle.dumps(function)
    except (AttributeError, pickle.PicklingError):
        return False
    return function.__module__ != "__main__"


def _cached(function, parameters: dict):
    return functools.lru_cache(**parameters)(function)
