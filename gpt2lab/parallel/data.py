"""Data parallelism: every rank holds the whole model and some rows of the batch; gradients are summed.

There are two forms here, one blocking message per tensor, and buckets sent while backward runs; `servers` has a third.
All equal the serial run, and none divides: the loss was divided by the global number of target tokens.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from functools import cached_property

import torch

from ..ranks import comm
from ..ranks.mesh import Axis
from . import spec
from .base import on_gradient
from .finish import Piece

BUCKET_BYTES = 1 << 20


class Replicas:
    """What sums gradients over the data axis; `pieces` are the tensors that the optimizer of this rank steps.

    This one has replicated weights on one rank alone: there is nothing to sum. All other forms build on it.
    """

    def __init__(self, model, axis: Axis, experts: Axis | None = None):
        self.axis, self.experts = axis, experts or axis
        self.unsharded = [Piece(n, p, spec.of(p), p.dim() >= 2) for n, p in model.named_parameters()]

    @cached_property
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer steps: all of the model here."""
        return self.unsharded

    def axis_of(self, p: torch.Tensor) -> Axis:
        """The axis along which the gradient of a parameter is summed."""
        return self.experts if spec.of(p).expert else self.axis

    def begin(self) -> None:
        """A step begins: forget what one before it, which was interrupted, has left."""

    def last_micro(self) -> None:
        """The next backward is the step's last: a form that overlaps starts sending in it."""

    def finish(self) -> None:
        """Complete the sum over the axis: after this every piece's `.grad` is its part of the global gradient.

        Every piece gets a gradient, also where no row used it.
        """
        for p in self.pieces:
            gradient(p.tensor)

    def updated(self) -> None:
        """The optimizer has stepped the pieces: bring the new weights to where the model needs them."""

    def weight_memory(self) -> list[torch.Tensor]:
        """The tensors that hold what the optimizer steps on this rank."""
        return [p.tensor for p in self.pieces]

    def gradient_memory(self) -> list[torch.Tensor]:
        """The tensors that hold gradients on this rank at this moment, of the model's parameters and of the pieces."""
        return [p.tensor.grad for p in (*self.unsharded, *self.pieces) if p.tensor.grad is not None]

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces (weights, gradients, moments), whole over the data axis, by name."""
        return {p.name: v for p, v in zip(self.pieces, values, strict=True)}


class Naive(Replicas):
    """One blocking all-reduce per tensor when backward is over: nothing overlaps, small tensors pay full latency.

    Forward: nothing. Backward: nothing; after it a SUM of every gradient.
    Bytes per rank: 2 (n-1)/n of the gradients' bytes a step, in one message round per tensor.
    """

    def finish(self) -> None:
        """Sum every gradient, one after the other."""
        for p in self.pieces:
            p.tensor.grad = comm.all_reduce(gradient(p.tensor).contiguous(), self.axis_of(p.tensor), own=True)


class Buckets(Replicas):
    """Gradients are sent in buckets while backward computes the next ones.

    Forward: nothing. Backward: a hook notes each finished gradient; when all of a bucket are there, it leaves as one
    asynchronous all-reduce. Micro-batches before the last send nothing: their gradients just add up in `.grad`.
    Bytes per rank: 2 (n-1)/n of the gradients' bytes a step, however many micro-batches (Li et al. 2020, section 3.2).
    """

    def __init__(self, model, axis: Axis, bucket_bytes: int = BUCKET_BYTES, experts: Axis | None = None):
        super().__init__(model, axis, experts)
        kinds = [[p for p in model.parameters() if spec.of(p).expert is kind] for kind in (False, True)]
        groups = [group for parameters in kinds for group in into_buckets(parameters, bucket_bytes)]
        if kinds[1]:  # in the order in which backward completes them
            order = {p: i for i, p in enumerate(model.parameters())}
            groups.sort(key=lambda group: -min(order[p] for p in group))
        self.buckets = [Bucket(group) for group in groups]
        self.sending = False
        for number, bucket in enumerate(self.buckets):
            for p in bucket.parameters:
                on_gradient(p, self._arrived, number)

    def begin(self) -> None:
        """Until the last micro-batch gradients only add up."""
        self.sending = False

    def last_micro(self) -> None:
        """From now on gradients are final when they arrive, so full buckets may leave."""
        self.sending, self.sent = True, 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def _arrived(self, number: int, p: torch.Tensor) -> None:
        if not self.sending:
            return
        bucket = self.buckets[number]
        if p not in bucket.missing:
            raise RuntimeError(
                f"A gradient of shape {tuple(p.shape)} changed after its bucket was full. "
                "Call last_micro() right before the last backward of a step."
            )
        bucket.missing.remove(p)
        # Every rank must send in the same order, so a full bucket waits for those before it.
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self.sent]
        bucket.send(self.axis_of(bucket.parameters[0]))
        self.sent += 1

    def finish(self) -> None:
        """Send what is left (parameters that no row used), and wait for all sums."""
        if not self.sending:
            self.last_micro()
        while self.sent < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            bucket.receive()
        self.sending = False

    def gradient_memory(self) -> list[torch.Tensor]:
        """Gradients in their parameters, and those in buckets that are being sent."""
        return super().gradient_memory() + [b.flat for b in self.buckets if b.flat is not None]


class Bucket:
    """Gradients that are sent together as one flat message; a large one is sent alone, without a copy."""

    def __init__(self, parameters: list[torch.Tensor]):
        self.parameters, self.missing, self.handle, self.flat = parameters, set(), None, None

    def send(self, axis: Axis) -> None:
        """Start the sum of this bucket's gradients."""
        grads = [gradient(p).flatten() for p in self.parameters]
        self.flat = grads[0] if len(grads) == 1 else torch.cat(grads)
        for p in self.parameters:
            p.grad = None  # `flat` holds it now
        self.handle = comm.all_reduce(self.flat, axis, async_op=True, own=True)

    def receive(self) -> None:
        """Wait for the sum; the gradients become views of it."""
        flat = self.handle.wait()
        for p, total in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = total.view_as(p)
        self.handle = self.flat = None


def gradient(p: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter; zero, and kept as such, where no row of this rank used it."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def into_buckets(parameters: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """Group parameters in reverse order, the order in which backward finishes them, up to `bucket_bytes` each.

    A tensor of that size or more gets a bucket of its own and does not close the one that is being filled.
    """
    full, filling, size = [], [], 0
    for p in reversed(parameters):
        bytes_of_p = p.numel() * p.element_size()
        if bytes_of_p >= bucket_bytes:
            full.append([p])
            continue
        if size + bytes_of_p > bucket_bytes:
            full.append(filling)
            filling, size = [], 0
        filling.append(p)
        size += bytes_of_p
    return full + [filling] * bool(filling)


def apply_data(model, axis: Axis, plan, experts: Axis | None = None) -> Replicas:
    """The data-parallel strategy that the plan names, for a model that all other strategies have edited.

    Gradients of what is spread over the expert axis are summed along `experts`, over its own replicas alone.
    """
    if axis.size == 1:
        return Replicas(model, axis)
    if plan.data == "naive":
        return Naive(model, axis, experts)
    return Buckets(model, axis, 1024 * plan.bucket, experts)


FORMS = ("naive", "bucket", "server", "servers")


def check(config, plan, rows: int, length: int) -> None:
    """Any number of replicas can share the rows; the form must exist."""
    if plan.data not in FORMS:
        raise ValueError(f"data={plan.data} is unknown. Use data={', '.join(FORMS)}.")
    if plan.bucket < 1:
        raise ValueError(f"bucket={plan.bucket} KiB holds no gradient. Use bucket=1 or more.")
