"""The moments of a step at which a rank may hold most: its operations one after the other, in bytes, computed."""

from collections import Counter
from functools import cache

from ..schedules import Op
from .experts import in_backward
from .kept import (
    block_elements,
    inputs_only,
    kept_between,
    kept_by_block,
    kept_by_head,
    kept_by_stage,
    largest_matrix,
    logits_bytes,
    made_at_once,
    part_elements,
    stream_bytes,
    transient,
    weights_held,
)
from .sends import owned, tied
from .share import EXPERT, RankShare

CHUNK = 128  # tokens whose logits a chunked loss holds at a time


class Walk:
    """A step of one rank: what it holds now, by part, and what it held at the fullest moment so far."""

    def __init__(self, share: RankShare, moments: int, placement: tuple[int, ...]):
        self.share, self.plan, self.e, self.placement = share, share.plan, share.itemsize, placement
        self.sizes = share.sizes
        self.tied = share.net.tied
        self.wte = max(part_elements(share, "wte"), part_elements(share, share.net.head))
        self.arrived = set()  # positions with gradients
        # bytes by part: of all of it, of its shards, of what is gathered, of what is summed last, and of that's shards
        self.whole, shards, self.gathered, self.summed, self.sums = (Counter() for _ in range(5))
        self.experts = Counter()
        self.wide = share.mixed or share.master  # bytes of a gradient in a shard
        for key, size in self.sizes.items():
            part, experts = key[0], key[1] >= EXPERT
            self.whole[part] += self.e * size
            self.experts[part] += self.e * size * experts
            shards[part] += self.wide * share.shards[key]
            # what nobody shares lies whole in its shard already, if that has the same numbers
            apart = share.sharers(key) > 1 or share.master > self.e or self.plan.refill
            self.gathered[part] += self.e * size * apart
            self.summed[part] += self.e * size * (not experts)  # a block's experts are summed before all else
            self.sums[part] += self.wide * share.shards[key] * (not experts)
        # bytes of gradients that a backward leaves
        whole = Counter({part: size * share.gradient // self.e for part, size in self.whole.items()})
        self.left = shards if self.plan.zero > 1 else whole
        # of its gradient, which is summed at once
        self.wte_shard = max(self.left["wte"], self.left[share.net.head]) * (self.plan.zero > 1)
        self._fullest, self._most = ({}, {}), -1
        state = moments * share.master * owned(share, "all")
        self.now = Counter(weights=self._weights(), optimizer=state)
        self.kept: dict[tuple[int, int], dict[str, int]] = {}
        self.kept_by_stage = cache(lambda *unit: kept_by_stage(share, *unit))
        self.kept_by_blocks = cache(
            lambda position, *unit: [kept_by_block(share, *unit, i) for i in share.parts.layers[position]]
        )
        if self.plan.loss == "chunked" and share.parts.last:
            tokens = min(CHUNK, share.micro_rows[0] * share.tokens)
            self.now["buffers"] = self.e * tokens * share.config.vocab_size

    def note(self, **more: int) -> None:
        """What is held now, and this besides, is held at the same moment."""
        total = sum(self.now.values()) + sum(more.values())
        if total > self._most:
            self._most, self._fullest = total, (dict(self.now), more)

    def _hold(self, parts: dict[str, int], sign: int = 1) -> None:
        """These bytes, by part, are held from now on (sign=-1: no longer)."""
        for part, size in parts.items():
            self.now[part] += sign * size

    @property
    def fullest(self) -> Counter:
        """What was held at the fullest moment so far, by part."""
        now, more = self._fullest
        held = Counter(now) + Counter(more)
        held["buffers"] += held.pop("messages", 0) + held.pop("sums", 0)
        return held

    def _weights(self) -> int:
        """Bytes of weights between two steps, and of the shards that the optimizer steps."""
        share = self.share
        mine = sum((share.shards if self.plan.zero else share.sizes).values())
        whole = sum(share.sharers(part) * size for part, size in share.shards.items())
        return weights_held(share, mine, whole if self.plan.zero else mine)

    def start_sum(self, size: int) -> None:
        """So many bytes are being summed from now on (stages 2 and 3); what was before has arrived."""
        self.now["sums"] = size * (self.plan.zero > 1 and self.share.sharing[0] > 1)

    def unit(self, op: Op) -> tuple[int, int, int]:
        """The position of an operation, its rows and its tokens a row."""
        return self.share.stages[op.stage], self.share.micro_rows[op.micro], self.share.tokens

    def travel(self, beside: list[Op]) -> None:
        """Hold the messages of these operations, which are under way while the next one runs."""
        self.now["messages"] = sum(stream_bytes(self.share, *self.unit(one)[1:]) for one in beside)

    def _keeps(self, op: Op) -> dict[str, int]:
        """Bytes of a unit by part; its output too, where that went to another rank."""
        (position, *sizes), after = self.unit(op), op.stage + 1
        kept = Counter(self.kept_by_stage(position, *sizes))
        if position < self.share.depth - 1 and self.placement[after] != self.placement[op.stage]:
            kept["activations"] += stream_bytes(self.share, *sizes)
        return kept

    def forward(self, op: Op) -> None:
        """Run a stage forward and keep what its backward needs."""
        position, rows, tokens = self.unit(op)
        kept, last = self._keeps(op), position == self.share.depth - 1
        logits = logits_bytes(self.share, rows, tokens) if last else 0
        weights = self._gathered(position)
        self._embed(position)
        narrow = logits * self.e // max(4, self.e) if self.e < 4 and self.plan.tp > 1 else 0
        self.note(weights=weights, activations=kept["activations"], logits=2 * logits + narrow)
        if self.plan.pp > 1 and self.plan.recompute:
            kept = {"activations": stream_bytes(self.share, rows, tokens) if position else 0}
        self.kept[op.stage, op.micro] = kept
        self._hold(kept)

    def backward(self, op: Op) -> None:
        """Run a stage backward, or the half of it that an operation is: loss, head, blocks from the last, embedding."""
        position, rows, tokens = self.unit(op)
        if op.kind == "W" and position:
            return self._second_half(op, position)
        if op.kind == "I" and not position:
            return  # the first stage does all of it in W
        held = self.kept.pop((op.stage, op.micro))
        if self.plan.pp > 1 and self.plan.recompute:
            self._hold(held, -1)
            held = self._keeps(op)
            self._hold(held)
            self._embed(position)
        if position == self.share.depth - 1:
            self._loss(held, rows, tokens, (position > 0 or not self.tied) and op.kind == "B", op.kind == "I")
            if op.kind == "B":
                self.start_sum(0)  # ln_f's, which is small
        self._blocks(position, rows, tokens, held, op.kind == "I")
        self._hold(held, -1)
        if op.kind == "I":
            left = {"activations": kept_between(self.share, position, rows, tokens)}
            self.kept[op.stage, op.micro] = left
            self._hold(left)
            if self.plan.zero == 3:
                self.now["weights"] = self._weights() + self.e * block_elements(self.share, position)
        else:
            self._arrive(position)

    def _second_half(self, op: Op, position: int) -> None:
        """The weights' gradients: the products whose operands the first half left."""
        if position == self.share.depth - 1:  # the head's, which a chunked loss left, and torch's copy of it
            copies = (self.plan.loss != "chunked") + (self.plan.zero > 1 or position not in self.arrived)
            self.note(gradients=self.e * self.wte * copies + self.wte_shard)
            self.start_sum(0)  # it leaves when what was before has arrived
        self._products(op, position)
        self._hold(self.kept.pop((op.stage, op.micro)), -1)
        if self.plan.zero == 3:  # from the first half to the second the blocks' weights stay
            self.now["weights"] = self._weights()
        self.start_sum(0)
        self._arrive(position)

    def _products(self, op: Op, position: int) -> None:
        """The blocks' products, from the last block to the first; biases and norms come when all of them are over.

        So in stage 2 no block's gradients are complete before that: they fill, while operands and the head's sum leave.
        In stage 3 all are there already, and are summed block by block.
        """
        layers, matrix = self.share.parts.layers[position], largest_matrix(self.share, position)
        if self.plan.zero != 2:
            blocks = [f"h.{layer}" for layer in self.share.parts.blocks] * (self.plan.zero > 1)
            joined = max((self.whole[block] + self.summed[block] for block in blocks), default=0)
            return self.note(buffers=max(joined, matrix))
        head = self.e * self.wte * (position == self.share.depth - 1)  # a chunked loss has left it
        operands = self.kept[op.stage, op.micro]["activations"] - head * (self.plan.loss == "chunked")
        for over in {0, len(layers) - 1} if layers else ():
            filling = sum(self.whole[f"h.{layer}"] for layer in layers[len(layers) - 1 - over :])
            self.note(
                gradients=head + self.wte_shard * bool(head),
                activations=-operands * over // len(layers),
                buffers=filling + 2 * matrix,
            )

    def _embed(self, position: int) -> None:
        """The embedding, whole beside the first block and one of another position, which are coming (stage 3)."""
        coming = self._gathered(position, min(2, len(self.share.stages)))
        self.note(weights=(self._whole_wte() + coming) * (position == 0))

    def _loss(self, held: dict, rows: int, tokens: int, sent: bool, half: bool) -> None:
        """The loss: its gradient beside the probabilities, then the head's weight gradient beside the former alone.

        `sent`: that gradient is complete, as it is where another rank has the embedding, and its sum begins at once.
        """
        logits = logits_bytes(self.share, rows, tokens)
        self.note(weights=self._whole_wte(), logits=logits * (1 if self.plan.tp > 1 else 2))
        head = 0 if self.plan.loss == "chunked" else self.e * self.wte
        self.note(weights=self._whole_wte(), gradients=head)
        self.now["logits"] -= held.pop("logits", 0)
        if sent:
            self.start_sum(0)  # it leaves when what was before has arrived
            self.note(weights=self._whole_wte(), gradients=head + self.wte_shard)
        over = kept_by_head(self.share, rows, tokens, half)
        held["activations"] -= over
        self.now["activations"] -= over

    def _blocks(self, position: int, rows: int, tokens: int, held: dict, half: bool) -> None:
        """The blocks' backward, which runs from the last to the first.

        What is held rises and falls evenly, so it is highest in one of the first two or of the last two to run.
        """
        layers, sharded = self.share.parts.layers[position], self.plan.zero > 1
        new = position not in self.arrived and not half
        head = made_at_once(self.share, position, 0) if half else self._head(position, new)
        if not layers:
            self.note(gradients=head)
            return self.start_sum(0)
        plain = transient(self.share, rows, tokens, 0 if half else largest_matrix(self.share, position))
        kept, again = self.kept_by_blocks(position, rows, tokens), inputs_only(self.share)
        others = len(layers) - 1
        for done in sorted({0, min(1, others), max(0, others - 1), others}):
            here, after = (f"h.{layers[min(others, others + i - done)]}" for i in (0, 1))
            # a block's gradients joined, while those of the one after it are being summed
            block = self.whole[here]
            summed = (self.summed[after] + self.sums[after] * (not new)) * sharded
            late = self.experts[here] * (new and not sharded)
            inside, of_experts, gone = in_backward(self.share, self.experts[here], rows * tokens, plain, late)
            running = inside + (kept[others - done] if again else block * sharded)
            running = max(running, block * (1 + sharded) * again * (not half))
            made = sum(self.left[f"h.{layer}"] for layer in layers[len(layers) - done :]) * new
            over = -held["activations"] * sum(kept[others + 1 - done :]) // max(1, sum(kept))
            if half and done:
                made += made_at_once(self.share, position, len(layers)) - head
            self.note(
                weights=self._gathered(position, 1 if 0 < done == others else 2),
                gradients=head + made + of_experts + summed * (done > 0),
                activations=over - gone,
                buffers=running,
            )
            if not done and not half:
                self.start_sum(0)

    def _head(self, position: int, new: bool) -> int:
        """Bytes of the head's weight gradient while the blocks run backward; a chunked loss made it in forward.

        It waits for the embedding's, if that is here, or is complete, and in stages 2 and 3 summed.
        """
        if position < self.share.depth - 1:
            return 0
        late = not position and self.tied
        if not late and self.plan.zero > 1:
            return self.wte_shard * new
        return self.e * self.wte * (self.plan.loss != "chunked" and (new or late))

    def _arrive(self, position: int) -> None:
        """All gradients of a stage are there: those of the embedding's two uses are added up at the end."""
        new, plan, wte = position not in self.arrived, self.plan, self.e * self.wte
        summed = 0 if new else self.wte_shard  # the sum of this one, beside that of those before
        both = position == 0 == self.share.depth - 1 and self.tied
        if new:
            self.now["gradients"] += self._gradients(position)
            self.arrived.add(position)
        if position == 0:
            # the gradients of both uses and, where torch cannot add in place, their sum: one of them is held already,
            # but for shards; the shard is there when the sum has left
            there = 1 + both + (both and not plan.sp and plan.loss != "chunked")
            late = self.wte_shard * (new if both else -(not new))
            self.note(gradients=wte * (there - (new and plan.zero < 2)) - late)
            self.start_sum(wte + summed)
        elif layers := self.share.parts.layers[position]:  # the first block's sum leaves amid what runs next
            last = f"h.{layers[0]}", 0  # what no rank has cut: a norm's gradients come last
            self.start_sum(self.e * self.sizes[last] + self.wide * self.share.shards[last] * (not new))

    def finish(self) -> None:
        """The sums that end a step: over replicas, over what two stages hold both."""
        share = self.share
        self.note()
        self.start_sum(0)
        if self.plan.zero == 1 and not share.mixed:  # else gradients lie in one buffer and are summed in it
            self._join()
        self.note(buffers=2 * share.master * tied(share)[1])
        if self.plan.zero in (1, 2):
            self.note(buffers=share.master * max(share.shards.values()))

    def _join(self) -> None:
        """Stage 1 joins the gradients of one part after the other, from the end, and keeps a shard of each."""
        share = self.share
        for key, group in reversed(share.groups.items()):
            size, ranks = self.sizes[key], share.sharers(key)
            shard = share.shards[key]
            copied = len(group) > 1 or size % ranks
            self.note(gradients=self.e * (ranks * shard * bool(copied) + shard * (key[1] < EXPERT)))
            self.now["gradients"] += share.master * shard - self.e * size

    def _gradients(self, position: int) -> int:
        """Bytes of gradients that a stage's backward leaves."""
        parts = self.share.parts_at(position)
        if self.tied and (self.arrived - {position}) & {0, self.share.depth - 1}:
            parts -= {"wte"}
        return sum(self.left[part] for part in parts)

    def _gathered(self, position: int, most: int = 2) -> int:
        """Whole weights of two blocks, the one that computes and the one that is coming (stage 3)."""
        blocks = self.share.parts.blocks
        if self.plan.zero < 3 or not self.share.parts.layers[position]:
            return 0
        return sum(self.gathered[f"h.{layer}"] for layer in blocks[:most])

    def _whole_wte(self) -> int:
        """The embedding is whole from its first use to its last (stage 3)."""
        return max(self.gathered["wte"], self.gathered[self.share.net.head]) * (self.plan.zero == 3)
