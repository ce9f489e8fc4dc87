"""Messages as strict as NCCL's, on the CPU: they pass in posting order, and a wait does not block the host.

Of an unbatched send or receive NCCL makes a kernel in the one queue that a pair of ranks has in a group, so a later
message of the pair waits for an earlier one, whatever its direction; and the first of a pair in a group blocks until
the other rank has posted one as well. Two ranks that both receive before they send wait forever.

`wait` only orders what comes later on the device after the call; the host goes on. Here it goes on until an operation
touches the memory of a call that is under way. Who touches it without having waited at all has a race on a GPU,
whatever the times on this machine: Race.
"""

import queue
import threading
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from planting import planted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gpt2lab.ranks import mesh

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single")
COLLECTIVES += ("broadcast", "reduce", "scatter", "gather", "all_to_all_single")
WITHOUT_TENSORS = ("all_gather_object", "barrier")  # who waits in one moves tensors of calls under way


class Race(RuntimeError):
    """An operation touched the memory of a call that nobody has waited for."""


class Posted:
    """The Work of a message in a queue."""

    def __init__(self, start):
        self.start, self.error, self.done = start, None, threading.Event()

    def wait(self):
        """Return when it has passed."""
        self.done.wait()
        if self.error:
            raise self.error


class Pairs:
    """The queues of this rank: one for each group and other rank, each with a thread that passes its messages on."""

    def __init__(self):
        self.queues = {}

    def post(self, call, x, peer, group):
        """Put a message into the queue of its pair; the first one waits for the peer's first."""
        name = getattr(group, "group_name", "world"), frozenset((dist.get_rank(), peer))
        if name not in self.queues:
            self.queues[name] = queue.Queue()
            threading.Thread(target=self._pass, args=(self.queues[name],), daemon=True).start()
            store, key = dist.distributed_c10d._get_default_store(), f"{name[0]} {sorted(name[1])}"
            store.set(f"{key} {dist.get_rank()}", "here")
            store.wait([f"{key} {peer}"])
        message = Posted(lambda: call(x, peer, group=group).wait())
        self.queues[name].put(message)
        return message

    @staticmethod
    def _pass(messages):
        while True:
            message = messages.get()
            try:
                message.start()
            except Exception as error:
                message.error = error
            message.done.set()


class UnderWay:
    """The Work of a call on a device: `reads` and `writes` are the tensors that it still uses."""

    def __init__(self, name: str, reads, writes):
        self.name, self.reads, self.writes = name, list(reads), list(writes)
        self.work, self.waited = None, False

    def wait(self):
        """Order what comes later after the call, and return at once."""
        self.waited = True


class Order(TorchDispatchMode):
    """Sees every operation of this thread, and lets it wait for, or stumble over, the calls whose memory it touches."""

    def __init__(self):
        super().__init__()
        self.calls, self.inside = [], False

    def begin(self, name: str, start, reads=(), writes=()) -> UnderWay:
        """Start a call in order: after those that use its tensors."""
        call = UnderWay(name, reads, writes)
        self.touch(name, [*call.reads, *call.writes], call.writes)
        call.work = self.alone(start)
        self.calls.append(call)
        return call

    def alone(self, act):
        """Something that the transport does, whose own copies are none of this class's business."""
        before, self.inside = self.inside, True
        try:
            return act()
        finally:
            self.inside = before

    def touch(self, name: str, tensors, written) -> None:
        """Complete the calls that use one of these tensors. Raises Race where nobody has waited for one."""
        touched, written = ({where(t) for t in some} for some in (tensors, written))
        for call in list(self.calls):
            used = {where(t) for t in call.writes}
            if touched & used or written & {where(t) for t in call.reads}:
                if not call.waited:
                    raise Race(f"{name} touches the memory of {call.name}, which nobody has waited for.")
                self.complete(call)

    def complete(self, call: UnderWay) -> None:
        """Block until a call is over."""
        self.alone(call.work.wait)
        self.calls.remove(call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.calls and not self.inside and not only_a_shape(func):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            schema = func._schema.arguments
            named = [
                *zip(schema, args, strict=False),
                *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
            ]
            changed = [v for a, v in named if a.alias_info and a.alias_info.is_write]
            self.touch(str(func), tensors, [t for t in tree_leaves(changed) if isinstance(t, torch.Tensor)])
        return func(*args, **kwargs)


def where(x: torch.Tensor) -> int:
    """What memory a tensor is in. The calls under way hold theirs, so no other has the same."""
    return x.untyped_storage()._cdata


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The same memory, without x's count of changes: autograd must not see when the numbers arrive."""
    return x.data


def only_a_shape(func) -> bool:
    """Whether an operation looks at no numbers: views, and new tensors of a shape."""
    return func.is_view or "empty" in func._schema.name or "detach" in func._schema.name


def deferred(order: Order, name: str, right):
    """A collective that a Work stands for, whether its caller asked for one or not."""

    def call(*args, group=None, async_op=False):
        first, second = (
            [t for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in (args[:1], args[1:])
        )
        writes, reads = (second, first) if name == "gather" else (first, second)
        same = tree_map_only(torch.Tensor, memory_of, args)
        return order.begin(name, lambda: right(*same, group=group, async_op=True), reads, writes)

    return call


@contextmanager
def strict(apart: bool = True):
    """Inside the block messages are strict; `apart`: as for NCCL, each direction has a group of its own."""
    pairs, order, send, receive = Pairs(), Order(), dist.isend, dist.irecv

    def strict_send(x, to, group=None):
        return order.begin(f"a send to {to}", lambda: pairs.post(send, memory_of(x), to, group), [x])

    def strict_receive(x, source, group=None):
        start = lambda: pairs.post(receive, memory_of(x), source, group)
        return order.begin(f"a receive from {source}", start, (), [x])

    with ExitStack() as stack:
        stack.enter_context(planted(dist, "isend", lambda _: strict_send))
        stack.enter_context(planted(dist, "irecv", lambda _: strict_receive))
        stack.enter_context(
            planted(mesh, "one_queue_a_pair", lambda _: lambda: apart and dist.is_initialized())
        )
        for name in ("tolist", "numpy"):  # these read memory without an operation
            reading = lambda right, name=name: lambda x: order.touch(name, [x], ()) or right(x)
            stack.enter_context(planted(torch.Tensor, name, reading))
        for name in COLLECTIVES:
            stack.enter_context(planted(dist, name, lambda right, name=name: deferred(order, name, right)))
        for name in WITHOUT_TENSORS:
            unseen = lambda right: lambda *args, **kw: order.alone(lambda: right(*args, **kw))
            stack.enter_context(planted(dist, name, unseen))
        with order:
            yield order
        for call in list(order.calls):
            order.complete(call)
