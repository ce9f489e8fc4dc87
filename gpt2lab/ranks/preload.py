"""What the forkserver imports once, so that a new rank starts in a few hundredths of a second.

Nothing of this package that a reader may edit is among it: new ranks see the files as they are now.
"""

import os

import cloudpickle  # noqa: F401
import numpy  # noqa: F401
import torch
import torch.distributed  # noqa: F401

from gpt2lab.ranks.guard import GUARD, guard_forkserver

# Set by the launcher while it starts the forkserver from its main thread: the death signal follows the
# *thread* that forked.
if os.environ.get(GUARD) == str(os.getppid()):
    guard_forkserver()
