"""The moments of a step at which a rank may hold most: its operations one after the other, in bytes, computed."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import chain

from ..schedules import Op
from .experts import in_backward
from .gathers import WholeWeights
from .kept import (
    CHUNK,
    Holding,
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


class Walk(Holding):
    """A step of one rank: what it holds now, by part, and what it held at the fullest moment so far."""

    def __init__(self, share: RankShare, moments: int, placement: tuple[int, ...]):
        self.share, self.plan, self.e, self.placement = share, share.plan, share.itemsize, placement
        self.sizes, self.tied, layers = share.sizes, share.net.tied, share.parts.layers
        self.wte = max(part_elements(share, "wte"), part_elements(share, share.net.head))
        self.arrived, self.last = set(), len(layers) - 1  # positions with gradients, and the last one
        # bytes by part: of all of it, of its shards, experts, what is gathered, what is summed last, and that's shards
        self.whole, shards, self.experts, self.gathered, self.summed, self.sums = (
            Counter() for _ in range(6)
        )
        # whether a first half makes the head's gradient; it is summed last then
        self.made = self.plan.loss == "chunked" or self.plan.sp
        # of a block that runs again what tensor parallelism cuts is complete last, of others what it does not
        self.cut_last = self.plan.tp > 1 and inputs_only(share)
        self.wide = share.mixed or share.master  # bytes of a gradient in a shard
        for key, size in self.sizes.items():
            part, experts = key[0], key[1] >= EXPERT
            self.whole[part] += self.e * size
            self.experts[part] += self.e * size * experts
            shards[part] += self.wide * share.shards[key]
            # what nobody shares lies whole in its shard already, if that has the same numbers
            apart = share.sharers(key) > 1 or share.master > self.e or self.plan.refill
            self.gathered[part] += self.e * size * apart
            last = key[1] == self.cut_last  # a block's experts are summed before all else
            self.summed[part] += self.e * size * last
            self.sums[part] += self.wide * share.shards[key] * last
        # bytes of gradients that a backward leaves
        whole = Counter({part: size * share.gradient // self.e for part, size in self.whole.items()})
        self.left = shards if self.plan.zero > 1 else whole
        # of its gradient, which is summed at once
        self.wte_shard = max(self.left["wte"], self.left[share.net.head]) * (self.plan.zero > 1)
        super().__init__(weights=self._weights(), optimizer=moments * share.master * owned(share, "all"))
        self.here = WholeWeights(share.parts, self.plan, share.net.head) if self.plan.zero == 3 else None
        self.kept: dict[tuple[int, int], dict[str, int]] = {}
        self.forwarded: set[tuple[int, int, str]] = set()  # units that wait for their backward
        self.kept_by_stage = cache(partial(kept_by_stage, share))
        self.kept_between = cache(partial(kept_between, share))
        self.kept_by_blocks = cache(lambda at, *unit: [kept_by_block(share, *unit, i) for i in layers[at]])

    def _weights(self) -> int:
        """Bytes of weights between two steps, and of the shards that the optimizer steps."""
        mine = sum((self.share.shards if self.plan.zero else self.sizes).values())
        whole = sum(self.share.sharers(part) * size for part, size in self.share.shards.items())
        return weights_held(self.share, mine, whole if self.plan.zero else mine)

    def start_sum(self, size: int) -> None:
        """So many bytes are being summed from now on (stages 2 and 3); what was before has arrived."""
        self.now["sums"] = size * (self.plan.zero > 1 and self.share.sharing[0] > 1)

    def unit(self, op: Op) -> tuple[int, int, int]:
        """The position of an operation, its rows and its tokens a row."""
        return self.share.stages[op.stage], self.share.micro_rows[op.micro], self.share.tokens

    def travel(self, coming: list[Op], sent: list[Op]) -> None:
        """Hold the messages of these operations, which are under way while the next one runs.

        What a stage has sent forward is its unit's output, which that keeps itself until its backward.
        """
        copy = lambda position, rows, _: self.plan.recompute or self.plan.sp and not position and rows > 1
        kept = lambda one: (one.stage, one.micro, one.kind) in self.forwarded and not copy(*self.unit(one))
        apart = [one for one in sent if not kept(one)]
        self.now["messages"] = sum(stream_bytes(self.share, *self.unit(one)[1:]) for one in coming + apart)

    def _keeps(self, op: Op) -> dict[str, int]:
        """Bytes of a unit by part; its output too, where that went to another rank."""
        (position, *sizes), after = self.unit(op), op.stage + 1
        kept = Counter(self.kept_by_stage(position, *sizes))
        if position < self.last and self.placement[after] != self.placement[op.stage]:
            kept["activations"] += stream_bytes(self.share, *sizes)
        return kept

    def forward(self, op: Op) -> None:
        """Run a stage forward and keep what its backward needs."""
        position, rows, tokens = self.unit(op)
        kept = self._keeps(op)
        logits = logits_bytes(self.share, rows, tokens) * (position == self.last)
        self._again(position, graph=not self.plan.recompute)
        # a chunk's buffer is new for another number of tokens
        if self.plan.loss == "chunked" and position == self.last:
            chunk = self.e * min(CHUNK, rows * tokens) * self.share.config.vocab_size
            self.note(activations=kept["activations"], buffers=chunk * (chunk != self.now["buffers"]))
            self.now["buffers"] = chunk
        narrow = logits * self.e // max(4, self.e) if self.e < 4 and self.plan.tp > 1 else 0
        self.note(activations=kept["activations"], logits=2 * logits + narrow)
        if self.plan.pp > 1 and self.plan.recompute:
            kept = {"activations": stream_bytes(self.share, rows, tokens) if position else 0}
        self.kept[op.stage, op.micro] = kept
        self.forwarded.add((op.stage, op.micro, "F"))
        self.hold(kept)

    def backward(self, op: Op) -> None:
        """Run a stage backward, or the half of it that an operation is: loss, head, blocks from the last, embedding."""
        position, rows, tokens = self.unit(op)
        if op.kind == "W" and position:
            return self._second_half(op, position)
        if op.kind == "I" and not position:
            return  # the first stage does all of it in W
        held, half = self.kept.pop((op.stage, op.micro)), op.kind == "I"
        self.forwarded.remove((op.stage, op.micro, "F"))
        if self.plan.pp > 1 and self.plan.recompute:
            self.hold(held, -1)
            held = self._keeps(op)
            self.hold(held)
            self._again(position)
        stops = self._whole(self.here and self.here.backward(position, half))
        if position == self.last:
            next(stops, None)
            self._loss(held, rows, tokens, half, (position > 0 or not self.tied) and not half)
        self._blocks(position, rows, tokens, held, half, stops)
        deque(stops, maxlen=0)
        self.hold(held, -1)
        if not half:
            return self._arrive(position)
        blocks = len(self.share.parts.layers[position])
        left = {"activations": self.kept_between(position, rows, tokens, blocks)}
        self.kept[op.stage, op.micro] = left
        self.hold(left)

    def _second_half(self, op: Op, position: int) -> None:
        """The weights' gradients: the products whose operands the first half left."""
        last, sizes = position == self.last, self.kept.pop((op.stage, op.micro))
        if last and not self.made:
            self._head_again(0)
            self.free(sizes, self.kept_between(*self.unit(op), 0))
        elif last and self.here:
            self.start_sum(0)  # ln_f's gradients come first
        there = self._products(position, sizes["activations"])
        self.hold(sizes, -1)
        if last and self.made:
            self.now["sums"] *= self.plan.zero != 2  # it left while the blocks' filled
            self._head_again(there)
        if self.here:  # from the first half to the second the blocks' weights stay
            self.here.reduce(position)
            next(self._whole(()), None)
        self.start_sum(0)
        self._arrive(position, True)

    def _head_again(self, there: int) -> None:
        """The head's gradient and torch's copy of it, beside what is under way, then beside what comes of its sum."""
        copies = 1 + (self.plan.zero > 1 or self._is_first(self.last))
        self.note(gradients=self.e * self.wte * copies + there)
        self.start_sum(0)
        self.note(gradients=self.e * self.wte * copies + self.wte_shard + there)

    def _products(self, position: int, operands: int) -> int:
        """The blocks' products, from the last block to the first; biases and norms come when all of them are over.

        So in stage 2 no block's gradients are complete before that: they fill, while operands and the head's sum leave.
        In stage 3 all are there already, and are summed block by block. Returns bytes of gradients that are new then.
        """
        share, layers, zero = self.share, self.share.parts.layers[position], self.plan.zero
        matrix, head = largest_matrix(share, position), self.e * self.wte * (position == self.last)
        there = sum(self.left[f"h.{layer}"] for layer in layers) * (position not in self.arrived)
        stays = head * (self.plan.loss == "chunked") + made_at_once(share, position, len(layers))
        others = max(0, len(layers) - 1)
        if zero < 2:
            self.note(gradients=there, activations=stays - operands)
        elif self.here and layers and self.here.users[f"h.{layers[0]}"] > 1 and self.plan.tp == 1:
            # the weights stay for another unit, and a shard comes
            matrix += self.left[f"h.{layers[0]}"] * min(1, others)
        for over in {0, others * (zero == 2)} if layers else ():
            blocks = sum(self.whole[f"h.{layer}"] for layer in layers[others - over :])
            self.note(
                gradients=(head + self.wte_shard) * bool(head and zero == 2 and not self.made),
                activations=-(operands - stays) * over // len(layers),
                buffers=blocks * (zero > 1) + matrix * (1 + (zero == 2)),
            )
        return there

    def _whole(self, stops: Iterable[str] | None) -> Iterator[None]:
        """Hold the weights that are whole at each stop of a pass, and after it (stage 3)."""
        for _ in chain(stops, [""]) if self.here else ():
            self.now["whole"] = sum(self.gathered[part] for part in self.here.coming.union(self.here.users))
            yield

    def _again(self, position: int, graph: bool = True) -> None:
        """The weights of a forward: the embedding is whole beside the first block."""
        for _ in self._whole(self.here and self.here.forward(position, graph)):
            self.note()

    def _loss(self, held: dict, rows: int, tokens: int, half: bool, sent: bool) -> None:
        """The loss: its gradient beside the probabilities, then the head's weight gradient beside the former alone.

        `sent`: that gradient is complete, as it is where another rank has the embedding, and its sum begins at once.
        """
        logits = logits_bytes(self.share, rows, tokens)
        self.note(logits=logits * (1 if self.plan.tp > 1 else 2))
        head = 0 if self.plan.loss == "chunked" else self.e * self.wte
        entered = self.e * rows * tokens * self.share.config.n_embd * self.plan.sp  # gathered again
        self.note(gradients=max(head, entered), buffers=2 * entered)
        self.now["logits"] -= held.pop("logits", 0)
        if sent:
            self.start_sum(0)  # it leaves when what was before has arrived
            self.note(gradients=head + self.wte_shard)
        if half or sent and (self.plan.zero > 1 or not self._is_first(self.last)):
            # a chunked loss's waits for W with all else, is summed, or has been added to what was there
            self.now["gradients"] -= held.pop("gradients", 0)
        if not half:
            self.start_sum(0)  # ln_f's, which is small
        self.free(held, kept_by_head(self.share, rows, tokens))

    def _blocks(self, position: int, rows: int, tokens: int, held: dict, half: bool, stops: Iterator) -> None:
        """The blocks' backward, which runs from the last to the first.

        What is held rises and falls evenly, so it is highest in one of the first two or of the last two to run.
        """
        layers, sharded = self.share.parts.layers[position], self.plan.zero > 1 and not half
        new = position not in self.arrived and not half
        waits = lambda done: self.kept_between(position, rows, tokens, done) if half else 0
        # the head's gradient waits for the embedding's, if that is here; or is complete, and in stages 2 and 3 summed
        late, first = not position and self.tied, self._is_first(position)
        head = self.e * self.wte * (self.plan.loss != "chunked" and (first or late))
        head = self.wte_shard * first if self.plan.zero > 1 and not late else head
        head *= position == self.last and not half
        if not layers:
            return self.note(gradients=head + waits(0))
        again = inputs_only(self.share)
        matrix = largest_matrix(self.share, position) * (again or not half)
        plain = transient(self.share, rows, tokens, matrix)
        kept, stream = self.kept_by_blocks(position, rows, tokens), stream_bytes(self.share, rows, tokens)
        others = len(layers) - 1
        for done in range(len(layers)):
            next(stops, None)
            if done not in (0, min(1, others), max(0, others - 1), others):
                continue
            here, after = (f"h.{layers[min(others, others + i - done)]}" for i in (0, 1))
            block = self.whole[here]  # its gradients joined, while those of the one after it are being summed
            summed = (self.summed[after] + self.sums[after] * (not new)) * sharded
            late = self.experts[here] * (new and not sharded)
            inside, of_experts, gone = in_backward(self.share, self.experts[here], rows * tokens, plain, late)
            running = inside + (kept[others - done] if again else block * sharded)
            running = max(running, block * (1 + sharded) * again)
            made = sum(self.left[f"h.{layer}"] for layer in layers[len(layers) - done :]) * new
            over = done * stream if again else sum(kept[others + 1 - done :])
            self.note(
                gradients=head + made + waits(done) + of_experts + summed * (done > 0),
                activations=-over - gone,
                buffers=running + stream * (done > 0 and position < self.last),
            )
            if not done and not half:
                self.start_sum(0)

    def _arrive(self, position: int, split: bool = False) -> None:
        """All gradients of a stage are there: those of the embedding's two uses are added up at the end."""
        new, first = position not in self.arrived, self._is_first(position)
        plan, wte, summed = self.plan, self.e * self.wte, 0 if first else self.wte_shard
        both = position == 0 == self.last and self.tied
        if new:
            parts = self.share.parts_at(position) - ({"wte"} if not first else set())
            self.now["gradients"] += sum(self.left[part] for part in parts)
            self.arrived.add(position)
        if position == 0:
            self.start_sum(0)  # the positions' gradients come first
            # the gradients of both uses and, where torch cannot add in place, their sum: one of them is held already,
            # but for shards; the shard is there when the sum has left
            there = 1 + both + (both and not plan.sp and plan.loss != "chunked")
            late = self.wte_shard * (first if both else -(not first))
            self.note(gradients=wte * (there - (first and plan.zero < 2)) - late)
        if position == 0 or split and self.made and position == self.last:
            self.start_sum(wte + summed)
        elif layers := self.share.parts.layers[position]:  # the first block's sum leaves amid what runs next
            last = f"h.{layers[0]}", self.cut_last and not split
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
        share, before = self.share, 0
        for key, group in reversed(share.groups.items()):
            size, ranks, shard = self.sizes[key], share.sharers(key), share.shards[key]
            copied = len(group) > 1 or size % ranks  # then they are freed before the sum
            self.note(gradients=self.e * shard * (ranks if copied else 1) + before)
            self.now["gradients"] += share.master * shard - self.e * size
            before = self.e * ranks * shard  # what was joined last is there until the next is

    def _is_first(self, position: int) -> bool:
        """Whether a backward of this position gives the first gradient of its use of the embedding here."""
        return position not in self.arrived and not (self.tied and self.arrived & {0, self.last})
