"""The process group that torch.distributed calls: each call becomes a move that the engine runs.

PyTorch's Python calls and its C++ code (DDP, FSDP2, functional collectives of DTensor) find the methods below by their
names, which are PyTorch's.
"""

from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from . import kinds, moves
from .engine import ProgressEngine, Request, SharedMemoryWork
from .memory import connect
from .stream import StreamEnds


def create(opts, _):
    """Make this rank's part of a new group; torch.distributed calls this on every rank."""
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    return SharedMemoryGroup(opts.store, opts.group_rank, ranks, opts.timeout.total_seconds())


SEVERAL = ("all_gather", "gather", "all_to_all")  # moves into several tensors
ROOTED = ("broadcast", "reduce", "gather", "scatter")  # their root is a part of the call's kind


class NamedGroup(dist.ProcessGroup):
    """What torch.distributed asks of a group that is written in Python: its backend's name, and those it has given."""

    backend = ""  # the name that the backend is registered under
    _name = ""

    def getBackendName(self) -> str:
        """The name the backend is registered under."""
        return self.backend

    def setGroupName(self, name: str) -> None:
        """Set the name that torch.distributed gives; functional collectives find the group by it."""
        self._name = name

    def getGroupName(self) -> str:
        """The name torch.distributed gave."""
        return self._name


class SharedMemoryGroup(NamedGroup):
    """Ranks of one machine; every tensor goes through memory that they share."""

    backend = "shm"

    def __init__(self, store, rank: int, global_ranks: list[int], timeout: float):
        super().__init__(rank, len(global_ranks))
        self._memory = memory = connect(store, rank, len(global_ranks))
        self._ends = StreamEnds(memory, rank)
        world_size = dist.get_world_size() if dist.is_initialized() else len(global_ranks)
        self._engine = ProgressEngine(memory, rank, [f"rank {r}" for r in global_ranks], timeout, world_size)
        self.timeout = timedelta(seconds=timeout)

    def allreduce(self, tensors, opts=None):
        """Every tensor becomes the combination over all ranks."""
        opts = opts or dist.AllreduceOptions()
        steps = [self._reduced(moves.all_reduce, x, opts) for x in tensors]
        return self._begin("all_reduce", opts, tensors, steps)

    def reduce(self, tensors, opts):
        """On the root, every tensor becomes the combination over all ranks."""
        steps = [self._reduced(moves.reduce, x, opts, opts.rootRank) for x in tensors]
        return self._begin("reduce", opts, tensors, steps)

    def broadcast(self, tensors, opts):
        """Every tensor becomes the root's."""
        steps = [self._moved(moves.broadcast, [x], opts.rootRank) for x in tensors]
        return self._begin("broadcast", opts, tensors, steps)

    def allgather(self, outputs, inputs, opts=None):
        """outputs[i][r] becomes rank r's inputs[i]."""
        pairs = zip(outputs, inputs, strict=True)
        steps = [self._moved(moves.all_gather, outs, _flat(x)) for outs, x in pairs]
        return self._begin("all_gather", opts, outputs, steps, inputs)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        """outputs[i] becomes all ranks' inputs[i], concatenated."""
        return self.allgather([self._cut(out) for out in outputs], inputs, opts)

    def all_gather_single(self, output, x, opts=None):
        """The output becomes all ranks' x, concatenated."""
        return self.all_gather_single_coalesced([output], [x], opts)

    def gather(self, outputs, inputs, opts):
        """On the root, outputs[0][r] becomes rank r's inputs[0]."""
        outs = outputs[0] if outputs else []
        steps = self._moved(moves.gather, outs, _flat(inputs[0]), opts.rootRank)
        return self._begin("gather", opts, outputs, [steps], inputs)

    def scatter(self, outputs, inputs, opts):
        """outputs[0] becomes the root's inputs[0][rank]."""
        parts = [_flat(x) for x in inputs[0]] if inputs else []
        steps = self._moved(moves.scatter, outputs, parts, opts.rootRank)
        return self._begin("scatter", opts, outputs, [steps], inputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        """outputs[i] becomes the combination of all ranks' inputs[i][rank]."""
        opts = opts or dist.ReduceScatterOptions()
        steps = [
            self._reduced(moves.reduce_scatter, out, opts, [_flat(x) for x in parts])
            for out, parts in zip(outputs, inputs, strict=True)
        ]
        return self._begin("reduce_scatter", opts, outputs, steps, inputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        """outputs[i] becomes the combination of this rank's part of all ranks' inputs[i]."""
        return self.reduce_scatter(outputs, [self._cut(_flat(x)) for x in inputs], opts)

    def reduce_scatter_single(self, output, x, opts=None):
        """The output becomes the combination of this rank's part of all ranks' x."""
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def alltoall(self, outputs, inputs, opts=None):
        """outputs[r] becomes rank r's inputs[rank]."""
        steps = self._moved(moves.all_to_all, outputs, [_flat(x) for x in inputs])
        return self._begin("all_to_all", opts, outputs, [steps], inputs)

    def all_to_all_single(self, output, x, coming, going, opts=None):
        """The same for concatenated parts, cut along dimension 0 into the given lengths, or evenly."""
        outs = output.split(list(coming)) if coming else self._cut(output)
        parts = x.split(list(going)) if going else self._cut(x)
        return self.alltoall(list(outs), list(parts), opts)

    allreduce_coalesced, alltoall_base = allreduce, all_to_all_single
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def send(self, tensors, to, tag=0):
        """Send a tensor to one rank; done when that rank has received it."""
        steps = moves.send(self._ends, _message(tensors[0], tag), _flat(tensors[0]), to)
        return self._begin("send", None, tensors, [steps], lane=("send", to))

    def recv(self, tensors, source, tag=0):
        """Receive a tensor from one rank."""
        steps = self._moved(moves.recv, tensors, source, kind=_message(tensors[0], tag))
        return self._begin("recv", None, tensors, [steps], lane=("recv", source))

    def recv_anysource(self, tensors, tag=0):
        """Not supported: each pair of ranks has a stream of its own."""
        raise ValueError("Backend 'shm' cannot receive from any rank. Name the source (src=...).")

    def barrier(self, opts=None):
        """Done when every rank has called it."""
        steps = [moves.barrier(self._ends, kinds.number("barrier", torch.uint8))]
        return self._begin("barrier", opts, [], steps)

    def _begin(self, name, opts, outputs, steps, inputs=(), lane="collective"):
        """Give a request to the engine, and drive the engine here unless the call is asynchronous."""
        request = Request(name, chain.from_iterable(steps))
        asynchronous = opts is None or opts.asyncOp
        (self._engine.begin if asynchronous else self._engine.run)(lane, request)
        return SharedMemoryWork(self._engine, request, list(outputs), inputs)

    def _moved(self, move, outs, *rest, kind=None):
        """The steps of a move into tensors of any shape and stride."""
        flats = [_flat(out) for out in outs]
        first = flats if move.__name__ in SEVERAL else flats[0]
        root = rest[-1] if move.__name__ in ROOTED else None
        kind = kind or kinds.number(move.__name__, (flats or rest)[0].dtype, root=root)
        yield from move(self._ends, kind, first, *rest)
        _back(outs, flats)

    def _reduced(self, move, x, opts, *rest):
        """The steps of a move that combines, into a tensor of any shape and stride."""
        how = opts.reduceOp.op.name
        if how not in kinds.COMBINE:
            raise ValueError(f"Backend 'shm' cannot combine by {how}. Use {', '.join(kinds.COMBINE)}.")
        if why := kinds.refusal(how, x.dtype):
            raise ValueError(f"Backend 'shm' cannot combine {x.dtype} by {how}: {why}")

        def steps():
            flat = _flat(x)
            kind = kinds.number(move.__name__, x.dtype, how, rest[-1] if move.__name__ in ROOTED else None)
            yield from move(self._ends, kind, flat, *rest, kinds.COMBINE[how])
            if how == "AVG":
                flat.div_(self._ends.ranks)
            _back([x], [flat])

        return steps()

    def _cut(self, x):
        """One part for each rank, along dimension 0."""
        if x.size(0) % self._ends.ranks:
            raise ValueError(
                f"{x.size(0)} rows cannot be cut into {self._ends.ranks} equal parts, one for each rank."
            )
        return list(x.chunk(self._ends.ranks))

    def shutdown(self) -> None:
        """Leave the group: a rank that still waits for this one fails within CHECK_EVERY."""
        self._memory.leave(self._ends.rank)
        self._engine.close()

    abort = shutdown


def _flat(x: torch.Tensor) -> torch.Tensor:
    """One dimension, contiguous: a view where possible, else a copy."""
    if x.dim() == 1 and x.is_contiguous() and not x.requires_grad:
        return x
    return x.detach().reshape(-1).contiguous()  # of every second number `reshape` alone is a view


def _back(tensors, flats) -> None:
    """Copy results back into tensors whose strides needed a flat copy."""
    for x, flat in zip(tensors, flats, strict=True):
        if x.data_ptr() != flat.data_ptr():
            x.detach().copy_(flat.view(x.shape))


def _message(x: torch.Tensor, tag: int) -> int:
    if tag:
        raise ValueError(f"tag={tag}: backend 'shm' has no tags; the messages of a pair arrive in order.")
    return kinds.number("message", x.dtype)
