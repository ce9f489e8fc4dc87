"""Messages as strict as NCCL's, on the CPU: what is posted between two ranks passes one after the other, both ways.

Of an unbatched send or receive NCCL makes a kernel in the one queue that a pair of ranks has in a group, so a later
message of the pair waits for an earlier one, whatever its direction; and the first of a pair in a group blocks until
the other rank has posted one as well. Two ranks that both receive before they send wait forever.
"""

import queue
import threading
from contextlib import contextmanager

import torch.distributed as dist
from planting import planted

from gpt2lab.ranks import mesh


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


@contextmanager
def strict(apart: bool = True):
    """Inside the block messages are strict; `apart`: as for NCCL, each direction has a group of its own."""
    pairs, send, receive = Pairs(), dist.isend, dist.irecv
    with (
        planted(dist, "isend", lambda _: lambda x, to, group=None: pairs.post(send, x, to, group)),
        planted(dist, "irecv", lambda _: lambda x, source, group=None: pairs.post(receive, x, source, group)),
        planted(mesh, "one_queue_a_pair", lambda _: lambda: apart and dist.is_initialized()),
    ):
        yield
