"""What the forkserver imports once, so that a new rank starts in a few hundredths of a second.

Only `orphans` of this package is imported here: so new ranks read its other files as they are now. `exit_with_parent`
runs first, because the imports take seconds, in which the parent may be killed. torch._dynamo is imported because the
first optimizer of a process imports it, which would cost every rank two seconds.
"""

import gc

from . import orphans

orphans.exit_with_parent()

import cloudpickle  # noqa: E402, F401
import numpy  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402, F401

gc.freeze()  # no rank looks through all of this for garbage again, and copies the pages where it lies
