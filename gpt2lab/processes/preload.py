"""What the forkserver imports once, so that a new rank starts in a few hundredths of a second.

Nothing of this package that a reader may edit is among it: new ranks see the files as they are now. The guard comes
first, because the imports take seconds in which the parent may be killed. torch._dynamo is among them because the first
optimizer of a process imports it: two seconds of a core, which every rank would spend by itself.
"""

from . import orphans

orphans.guard_forkserver()

import cloudpickle  # noqa: E402, F401
import numpy  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402, F401
