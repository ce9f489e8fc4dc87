"""What each rank of a plan holds when it holds most: weights, gradients, optimizer, activations, logits, buffers.

A step is walked through, operation by operation, and every moment at which memory can be highest is noted: the loss,
the first backward, the sums that end the step. All numbers are bytes, computed; the tests compare them with what the
allocator of live ranks counted. What torch itself keeps, and messages under way, are not in it.

Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4. ZeRO: Rajbhandari et al. 2020.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ..parallel.zero import costs as zero
from ..schedules import Op
from .kept import (
    block_elements,
    inputs_only,
    kept_between,
    kept_by_block,
    kept_by_stage,
    largest_matrix,
    logits_bytes,
    made_at_once,
    part_elements,
    stream_bytes,
)
from .sends import owned, tied
from .share import RankShare, check, order_of

MOMENTS = {"adamw": 2, "sgd": 0}
CHUNK = 128  # tokens whose logits a chunked loss holds at a time
ATTENTION = 14  # numbers a token and channel that attention's backward holds while keys and values travel


@dataclass(frozen=True)
class Held:
    """Bytes that one rank of a pipeline's stage (`stage`: its place in the pipeline) holds at its fullest moment."""

    stage: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}

    @cached_property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def memory(
    plan, config, rows: int, length: int, itemsize: int = 4, optimizer: str = "adamw"
) -> tuple[Held, ...]:
    """What the fullest rank of each pipeline stage holds in a step; without a pipeline there is one stage.

    Raises ValueError where the plan cannot run the model, as `Plan.check` says, or for an unknown optimizer.
    """
    check(plan, config, rows, length)
    if optimizer not in MOMENTS:
        raise ValueError(f"There is no optimizer {optimizer!r} here. Use {' or '.join(MOMENTS)}.")
    whole = RankShare(plan, config, rows, length, itemsize)
    return fullest([replace(whole, pp=stage) for stage in range(plan.pp)], optimizer)


def fullest(shares: Iterable[RankShare], optimizer: str = "adamw") -> tuple[Held, ...]:
    """What the fullest of the context ranks beside each of these ranks holds."""
    return tuple(
        max((of_rank(one, optimizer) for one in _beside(share)), key=lambda h: h.total) for share in shares
    )


def _beside(share: RankShare) -> list[RankShare]:
    """The context rank with the most tokens, and where ranks borrow unequally the last one, which borrows most."""
    sizes, name = share.table.sizes if share.table else [0], share.plan.exchange
    unequal = len(sizes) - 1 if name == "triangle" or name.startswith("halo") else 0
    return (
        [replace(share, cp=place) for place in {sizes.index(max(sizes)), unequal}] if share.table else [share]
    )


def of_rank(share: RankShare, optimizer: str = "adamw") -> Held:
    """What one rank holds at its fullest moment in a step, the first one apart."""
    walk = _Walk(share, MOMENTS[optimizer])
    for op in _order(share):
        walk.forward(op) if op.kind == "F" else walk.backward(op)
    walk.finish()
    return Held(share.pp, **walk.fullest)


def _order(share: RankShare) -> list[Op]:
    """The operations of the rank, of a pipeline of as many micro-batches as fill it where that is enough."""
    plan = share.plan
    if plan.pp == 1:
        # from the second one on, where sums are under way the third, they are alike or have fewer rows
        return [Op(kind, 0, i) for i in range(min(plan.micro, 2 + (plan.zero > 1))) for kind in "FB"]
    bounded = plan.schedule not in ("gpipe", "breadth_first", "terapipe")
    enough = min(plan.micro, 2 * plan.pp) if bounded else plan.micro
    return order_of(plan, enough).orders[share.pp]


class _Walk:
    """A step of one rank: what it holds now, by part, and what it held at the fullest moment so far."""

    def __init__(self, share: RankShare, moments: int):
        self.share, self.plan, self.e = share, share.plan, share.itemsize
        self.sizes = share.sizes
        self.wte = part_elements(share, "wte")
        self.arrived, self.under_way = set(), 0  # positions with gradients; bytes that are being summed
        self.fullest, self.most = Counter(), -1
        state = moments * share.master * owned(share, "all")
        self.now = Counter(weights=self._weights(), optimizer=state)
        self.kept: dict[tuple[int, int], Counter] = {}
        chunks = self.plan.loss == "chunked" and share.parts.last
        self.now["buffers"] = (
            chunks * self.e * min(CHUNK, share.micro_rows[0] * share.slices[0]) * share.config.vocab_size
        )

    def note(self, **more: int) -> None:
        """What is held now, and this besides, is held at the same moment."""
        total = sum(self.now.values()) + sum(more.values())
        if total > self.most:
            self.most, self.fullest = total, self.now + Counter(more)

    def _weights(self) -> int:
        """Bytes of weights between two steps, and of the shards that the optimizer steps."""
        share, (ranks, _) = self.share, self.share.sharing
        if not self.plan.zero:
            return self.e * sum(self.sizes.values())
        if self.plan.data == "owner":
            return share.master * owned(share, "all")
        shards = sum(zero.shard_length(n, ranks) for n in self.sizes.values())
        if self.plan.zero == 3:
            return share.master * shards
        masters = share.master * shards if share.master > self.e else 0
        return self.e * ranks * shards + masters

    def unit(self, op: Op) -> tuple[int, int, int]:
        """The position of an operation, its rows and its tokens a row."""
        slices = self.share.slices
        rows = self.share.micro_rows[op.micro // len(slices)]
        return self.share.stages[op.stage], rows, slices[op.micro % len(slices)]

    def forward(self, op: Op) -> None:
        """Run a stage forward and keep what its backward needs."""
        position, rows, tokens = self.unit(op)
        kept, last = kept_by_stage(self.share, position, rows, tokens), position == self.share.depth - 1
        logits = logits_bytes(self.share, rows, tokens) if last else 0
        weights = self._gathered(position)
        self.note(weights=weights, activations=kept["activations"], logits=2 * logits)
        if self.plan.pp > 1 and self.plan.recompute:
            kept = Counter(activations=stream_bytes(self.share, rows, tokens) if position else 0)
        self.kept[op.stage, op.micro] = kept
        self.now += kept

    def backward(self, op: Op) -> None:
        """Run a stage backward, or the half of it that an operation is: loss, head, blocks from the last, embedding."""
        position, rows, tokens = self.unit(op)
        if op.kind == "W" and position:  # the products whose operands the first half left
            parts = (
                max((part_elements(self.share, f"h.{i}") for i in self.share.parts.blocks), default=0)
                * self.e
                * (self.plan.zero > 1)
            )
            self.note(buffers=max(2 * parts, largest_matrix(self.share, position)))
            if (
                position == self.share.depth - 1
            ):  # the head's, which a chunked loss left, and torch's copy of it
                copies = (self.plan.loss != "chunked") + (self.plan.zero > 1 or position not in self.arrived)
                self.note(gradients=self.e * self.wte * copies + self._wte_shard())
            self.now -= self.kept.pop((op.stage, op.micro))
            if self.plan.zero == 3:  # from the first half to the second the blocks' weights stay
                self.now["weights"] = self._weights()
            self._arrive(position)
            return
        if op.kind == "I" and not position:
            return  # the first stage does all of it in W
        held = self.kept.pop((op.stage, op.micro))
        if self.plan.pp > 1 and self.plan.recompute:
            self.now -= held
            held = kept_by_stage(self.share, position, rows, tokens)
            self.now += held
        if position == self.share.depth - 1:
            self._loss(held, rows, tokens)
        self._blocks(position, rows, tokens, held, op.kind == "I")
        self.now -= held
        if op.kind == "I":
            self.kept[op.stage, op.micro] = left = Counter(
                activations=kept_between(self.share, position, rows, tokens)
            )
            self.now += left
            if self.plan.zero == 3:
                self.now["weights"] = self._weights() + self.e * block_elements(self.share, position)
        else:
            self._arrive(position)

    def _loss(self, held: Counter, rows: int, tokens: int) -> None:
        """The loss: its gradient beside the probabilities, then the head's weight gradient beside the former alone."""
        logits = logits_bytes(self.share, rows, tokens)
        before = self.under_way  # of the micro-batch before: gradients that are being summed (stages 2 and 3)
        self.note(weights=self._whole_wte(), logits=logits * (1 if self.plan.tp > 1 else 2), buffers=before)
        head = 0 if self.plan.loss == "chunked" else self.e * self.wte
        self.note(weights=self._whole_wte(), gradients=head)
        self.now["logits"] -= held.pop("logits", 0)

    def _blocks(self, position: int, rows: int, tokens: int, held: Counter, half: bool) -> None:
        """The blocks' backward: highest in the last block, which runs first, or in the first, beside all gradients."""
        layers, zero_stage = self.share.parts.layers[position], self.plan.zero
        last = position == self.share.depth - 1
        head = self.e * self.wte * (last and self.plan.loss != "chunked" and zero_stage < 2)
        head = made_at_once(self.share, position, 0) if half else head
        if not layers:
            return self.note(gradients=head)
        block = self.e * part_elements(self.share, f"h.{layers[0]}")
        inside = self._transient(rows, tokens, 0 if half else largest_matrix(self.share, position))
        again = kept_by_block(self.share, rows, tokens) if inputs_only(self.share) else 0
        whole = block * (
            zero_stage > 1
        )  # gradients of a block joined, and those of the next one being summed
        running = max(again + inside + whole * (not again), (block + whole) * bool(again) * (not half))
        self.note(weights=self._gathered(position), gradients=head, buffers=running)
        others = len(layers) - 1
        left = -held["activations"] * others // len(layers)
        new = position not in self.arrived and not half
        made = (self._gradients(position) - head) * others // len(layers) if new else 0
        made += (made_at_once(self.share, position, len(layers)) - head) * half
        coming = self._gathered(position) if others else block * (zero_stage == 3)
        self.note(
            weights=coming, gradients=head + made + whole * bool(others), activations=left, buffers=running
        )

    def _arrive(self, position: int) -> None:
        """All gradients of a stage are there: those of the embedding's two uses are added up at the end."""
        new, plan, wte = position not in self.arrived, self.plan, self.e * self.wte
        summed = 0 if new else self._wte_shard()  # the sum of this one, beside that of those before
        self.under_way = wte + summed if plan.zero > 1 and position == 0 else 0
        both = position == 0 == self.share.depth - 1
        if new:
            self.now["gradients"] += self._gradients(position)
            self.arrived.add(position)
        if position == 0:
            # the gradients of both uses and, where torch cannot add in place, their sum: one of them is held already,
            # but for shards; the shard is there when the sum has left
            there = 1 + both + (both and not plan.sp and plan.loss != "chunked")
            late = self._wte_shard() * (new if both else -(not new))
            self.note(gradients=wte * (there - (new and plan.zero < 2)) - late)

    def _wte_shard(self) -> int:
        """Bytes of the embedding's summed gradient that stay here, where it is summed as soon as it is there."""
        return self.share.master * zero.shard_length(self.wte, self.share.sharing[0]) * (self.plan.zero > 1)

    def finish(self) -> None:
        """The sums that end a step: over replicas, over what two stages hold both."""
        share, (ranks, _) = self.share, self.share.sharing
        self.note()
        if self.plan.zero == 1:
            self._join()
        if self.plan.pp > 1:
            self.note(buffers=2 * share.master * tied(share)[1])
        if self.plan.zero in (1, 2):
            self.note(buffers=share.master * max(zero.shard_length(n, ranks) for n in self.sizes.values()))

    def _join(self) -> None:
        """Stage 1 joins the gradients of one part after the other, from the end, and keeps a shard of each."""
        share, (ranks, _) = self.share, self.share.sharing
        for key, group in reversed(share.groups.items()):
            size = self.sizes[key]
            shard = zero.shard_length(size, ranks)
            copied = len(group) > 1 or size % ranks
            self.note(gradients=self.e * (ranks * shard * bool(copied) + shard))
            self.now["gradients"] += share.master * shard - self.e * size

    def _gradients(self, position: int) -> int:
        """Bytes of gradients that a stage's backward leaves."""
        share, (ranks, _) = self.share, self.share.sharing
        ends = {"wte": (0, share.depth - 1), "wpe": (0,), "ln_f": (share.depth - 1,)}
        total = 0
        for (part, _), size in self.sizes.items():
            layer = int(part[2:]) if part.startswith("h.") else None
            here = layer in share.parts.layers[position] if layer is not None else position in ends[part]
            done = part == "wte" and self.arrived - {position} & set(ends["wte"])
            if here and not done:
                total += (
                    share.master * zero.shard_length(size, ranks) if self.plan.zero > 1 else self.e * size
                )
        return total

    def _gathered(self, position: int) -> int:
        """Whole weights of two blocks, the one that computes and the one that is coming (stage 3)."""
        if self.plan.zero < 3:
            return 0
        layers = self.share.parts.layers[position]
        two = min(2, len(layers)) if self.plan.data != "owner" else 1
        return self.e * sum(part_elements(self.share, f"h.{layer}") for layer in layers[:two])

    def _whole_wte(self) -> int:
        """The embedding is whole from its first use to its last (stage 3)."""
        return self.e * self.wte if self.plan.zero == 3 else 0

    def _transient(self, rows: int, tokens: int, matrix: int) -> int:
        """What the backward of a block holds besides: gradients of its output and hidden layer, and of one matrix.

        Where keys and values travel, attention's own backward holds more.
        """
        plan, c = self.plan, self.e * self.share.config.n_embd
        stream = rows * tokens * c + stream_bytes(self.share, rows, tokens) * plan.sp
        mlp = stream + rows * tokens * 4 * c // plan.tp + matrix
        travels = plan.cp > 1 and plan.exchange != "heads" and not plan.exchange.startswith("halo")
        return max(mlp, ATTENTION * rows * tokens * c // plan.tp if travels else 0)
