"""What the forkserver imports once, so that a new rank starts in a few hundredths of a second.

`exit_with_parent` runs first, because the imports take seconds, in which the parent may be killed. torch._dynamo is
imported because the first optimizer of a process imports it, which would cost every rank two seconds. Of this package
it is what every rank needs to join the others, and what the parent has imported and names in the environment.
"""

import contextlib
import gc
import importlib
import os
import sys

from . import orphans

orphans.exit_with_parent()
if os.environ.pop(orphans.CLOSED, ""):
    orphans.closed_to_others()

import cloudpickle  # noqa: E402, F401
import numpy  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401

from .forkserver import loaded  # noqa: E402

for name in ("..transport.group", ".launchers", *os.environ.pop(orphans.PRELOAD, "").split()):
    with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong with it
        importlib.import_module(name, __package__)


def _without_a_fork(kind, error, trace) -> None:
    """The parent tells who may start no more processes; of everything else Python prints a traceback."""
    if not isinstance(error, BlockingIOError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _without_a_fork


def _written(file: str) -> int:
    """When a file was last written, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


FILES = {file: _written(file) for name in loaded() if (file := getattr(sys.modules[name], "__file__", None))}
gc.freeze()  # no rank looks through all of this for garbage again, and copies the pages where it lies


def changed() -> bool:
    """Whether a file of this package is no longer as it was imported here."""
    return any(_written(file) != when for file, when in FILES.items())
