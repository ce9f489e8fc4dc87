"""What an answer does on a rank: what it calls, sends, hears and holds, and whether gradients come through it."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from unittest.mock import patch

import torch

from ...machine.memory import Alive
from ...ranks import comm
from ...ranks.call import begun
from .ranked import through_comm


@contextmanager
def noted(place, name: str, calls: list):
    """Append `name` to `calls` whenever `place.name` is called in the block."""
    plain = getattr(place, name)

    @wraps(plain)
    def again(*args, **kwargs):
        calls.append(name)
        return plain(*args, **kwargs)

    with patch.object(place, name, again):
        yield


def no_gradient(y, x) -> bool:
    """Whether the gradient of sum(y * y) / 2 over all ranks, where y has the numbers of all x once, is not x."""
    if not y.requires_grad:
        return True
    (grad,) = torch.autograd.grad(y, x, y.detach(), allow_unused=True)
    return grad is None or not torch.equal(grad, x.detach())


@dataclass
class Seen:
    """What one rank did with messages: payloads by target, sources it asked, sends that nobody waited for, memory."""

    sent: list = field(default_factory=list)  # (position of the target, copy of what was sent)
    asked: list = field(default_factory=list)  # positions of sources
    unwaited: int = 0
    held: Alive = field(default_factory=Alive)  # what came in messages


@contextmanager
def watched():
    """Watch messages between two ranks in the block; gives a `Seen`, which is complete when the block has ended."""
    seen, going, isend, irecv = Seen(), [], comm.isend, comm.irecv  # send asks isend, and recv irecv

    def started(x, axis, to):
        seen.sent.append((to % axis.size, x.detach().clone()))
        going.append(isend(x, axis, to))
        return going[-1]

    def posted(like, axis, source):
        seen.asked.append(source % axis.size)
        return irecv(like, axis, source)

    with patch.object(comm, "isend", started), patch.object(comm, "irecv", posted), received(seen.held.watch):
        yield seen
    seen.unwaited = sum(handle.waits_for() != "nobody" for handle in going)


def unread(seen: list[Seen]) -> list[tuple[int, int, int]]:
    """(source, target, how many) of messages that no rank received, from what all ranks of one axis did."""
    found = []
    for source, one in enumerate(seen):
        for target, other in enumerate(seen):
            left = sum(to == target for to, _ in one.sent) - sum(asked == source for asked in other.asked)
            if left > 0:
                found.append((source, target, left))
    return found


@contextmanager
def received(tell):
    """Call `tell(message)` for whatever this rank receives in a message in the block, as soon as it waited for it."""
    irecv, wait, coming = comm.irecv, comm.Handle.wait, weakref.WeakSet()  # recv asks irecv

    def posted(like, axis, source):
        coming.add(handle := irecv(like, axis, source))
        return handle

    def awaited(handle):
        found = wait(handle)
        if handle in coming:  # once, although one may wait twice
            coming.discard(handle)
            tell(found)
        return found

    with patch.object(comm, "irecv", posted), patch.object(comm.Handle, "wait", awaited):
        yield


def memories(least: int) -> set[int]:
    """The addresses of all memory of `least` bytes or more that tensors use in this process, wherever they are kept.

    What torch keeps in a layout of its own (sparse, oneDNN's) has no storage to look at.
    """
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds and thing.layout == torch.strided]
    return {s.data_ptr() for s in map(torch.Tensor.untyped_storage, tensors) if s.nbytes() >= least}


class Watched(list):
    """The order of F and B of one rank. While it is run, what comes in `loud` entries is twice what was sent.

    Raises AssertionError when after F no graph is in memory, or when in the end, with nothing `loud`, messages that
    have come, or other tensors that want a gradient, are in memory still.
    """

    def __init__(self, entries, loud=()):
        super().__init__(entries)
        self.loud = loud

    def __reduce__(self):
        return Watched, (self[:], self.loud)

    def __iter__(self):
        graphs = lambda: [t for t in gc.get_objects() if type(t) is torch.Tensor and t.requires_grad]
        before = begun() - len(comm.log)
        with through_comm(), watched() as seen:
            for entry in super().__iter__():
                with received(lambda message: message.mul_(2)) if entry in self.loud else nullcontext():
                    yield entry
                assert entry[0] == "B" or any(t.grad_fn for t in graphs()), (
                    "after F no graph is kept for B, which would compute forward again: F puts (x, y) into s.kept"
                )
            assert self.loud or not (seen.held.bytes() or graphs()), (
                "B takes its pair out of s.kept, but what came is in memory: is there a second list that keeps it?"
            )
        beside = {e.op for e in comm.log} - {"send", "recv"}
        assert not beside, f"stages send by comm.isend alone; yours also calls {', '.join(sorted(beside))}"
        missing = begun() - len(comm.log) - before - seen.unwaited
        assert not missing, (
            f"{missing} calls of comm are neither over nor on their way: leave the log as it is"
        )


class Counted(list):
    """A list that counts how many of its entries are looked at."""

    looked = 0

    def __getitem__(self, place):
        self.looked += 1
        return super().__getitem__(place)

    def __iter__(self):
        self.looked += len(self)
        return super().__iter__()
