"""The backend of PyTorch's own strategies in a benchmark: gloo, as they are shipped, or the same as ours."""

import torch.distributed as dist

from .. import transport


def carriers(over: str) -> str:
    """A line that says which backend carries our bytes and PyTorch's."""
    return f"ours over {transport.default()}, PyTorch's own over {over} (measured)"


def rival_group(over: str) -> dist.ProcessGroup:
    """A group of all ranks on the named backend; all ranks call this together."""
    return dist.new_group(backend=over)


def rival_mesh(over: str):
    """The same as a device mesh of one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(rival_group(over), "cpu")
