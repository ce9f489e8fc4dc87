"""One training iteration of GPT-2 as tasks: forward, backward by hand, AdamW, in blocks that you choose.

Every task declares the block of tokens, heads, columns or weights that it touches. The gradient of a weight is summed
over all tokens inside one task, so the order of a sum, and with it the bits, do not depend on how the tasks are run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from ..algorithms import kernels
from ..machine.arguments import checked
from ..model import GPT2
from ..ranks import comm
from ..ranks.mesh import Axis
from . import messages
from .graph import TaskGraph, reads, updates, writes

ALONE = Axis()
LINEAR = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 1}
"""The linear layers of a block, and how many times C outputs each has."""


@checked(tokens=0, rows=0, heads=0, columns=0, weights=0, updates=0)
@dataclass(frozen=True)
class Blocks:
    """How large the pieces of work are, 0 for all in one piece; the defaults give each of two workers a few large ones.

    `tokens` of the flattened batch; `rows` and `heads` in attention; `columns` of a linear layer's output; `weights`:
    elements of a weight whose gradient one task computes; `updates`: elements that one task of AdamW updates.
    """

    tokens: int = 128
    rows: int = 2
    heads: int = 0
    columns: int = 0
    weights: int = 2_400_000
    updates: int = 2_400_000


@checked(length=(0, 10**9), size=0)
def ranges(length: int, size: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of this size, the last perhaps smaller; size 0 means one block."""
    size = size or max(length, 1)
    return [(start, min(length, start + size)) for start in range(0, length, size)]


def tokens_of(rows: tuple[int, int], length: int) -> tuple[int, int]:
    """(start, stop) of the tokens of some rows, of which each has `length`."""
    return rows[0] * length, rows[1] * length


def adamw(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of llm.c's CPU trainer, with which the published figures were measured."""
    return torch.optim.AdamW(tensors, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True)


@checked(rows=(1, 10**6), length=(1, 10**6), total=0)
class GPT2Tasks:
    """The tensors and the `graph` of one iteration on (rows, length) tokens; each run appends its loss to `losses`.

    `weights` and `gradients`, of the last iteration, are kept under the model's names.
    `batches(iteration)` gives (tokens, targets), both (rows, length), of which `total` targets count on all ranks
    together; without it the graph can only be looked at. With an `axis` of several ranks each has rows of its own, or,
    `sliced`, its part of every sequence: then `batches` gives those tokens. Tasks sum the gradients over the axis.
    """

    def __init__(
        self,
        model: GPT2,
        rows: int,
        length: int,
        batches: Callable | None,
        blocks: Blocks = Blocks(),
        *,
        total: int = 0,
        optimizer: Callable = adamw,
        axis: Axis = ALONE,
        sliced: bool = False,
    ):
        if model.config.window is not None or model.config.dropout or model.config.experts:
            raise ValueError(
                "Tasks are made of a dense GPT-2 that sees all tokens, without dropout. Use such a GPT2Config."
            )
        if sliced and length < axis.size:
            raise ValueError(
                f"{length} tokens cannot be spread over {axis.size} ranks. Use at most {length}."
            )
        if axis.size > 1 and not sliced and not total:
            raise ValueError(
                f"{axis.size} ranks have rows of their own. Give total, the number of targets of all ranks together."
            )
        self.config, self.rows, self.blocks = model.config, rows, blocks
        self.slices = comm.split_sizes(length, axis.size) if sliced else [length]
        self.place = axis.rank if sliced else 0
        self.length, self.first = self.slices[self.place], sum(self.slices[: self.place])
        self.batches, self.total, self.optimizer, self.axis = batches, total or rows * length, optimizer, axis
        self._size = self.config.n_embd // self.config.n_head
        self.losses: list[float] = []
        self.iteration = 0
        self.weights = {name: w.detach().clone() for name, w in model.named_parameters()}
        self.gradients = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        named = {f"d.{name}": gradient for name, gradient in self.gradients.items()}
        self.graph = TaskGraph(self.weights | named | self._buffers())
        self._tokens = ranges(rows * self.length, blocks.tokens)
        self._forward()
        self._backward()
        self._finish()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Activations and their gradients, each a tensor of its own, so that no task waits for a buffer to be free.

        (tokens, width) each; `shares` are those of attention, (rows, heads, length, keys seen). Of a sliced sequence:
        `kv` are keys and values of an earlier slice, `part` is what a later one adds to the gradients of the own ones.
        """
        c, n, layers = self.config.n_embd, self.rows * self.length, range(self.config.n_layer)
        widths = {"x": c, "ln_1": c, "qkv": 3 * c, "y": c, "mid": c, "ln_2": c, "fc": 4 * c}
        sizes = {f"{name}.{i}": width for name, width in widths.items() for i in layers}
        sizes |= {f"x.{self.config.n_layer}": c, "ln_f": c}
        sizes |= {f"d.{name}": width for name, width in sizes.items()}
        sizes |= {f"{norm}.{i}.stats": 2 for norm in ("ln_1", "ln_2") for i in layers}
        sizes |= {f"gelu.{i}": 4 * c for i in layers} | {"ln_f.stats": 2, "logits": self.config.vocab_size}
        new = self.weights["wte.weight"].new_zeros
        made = {name: new(n, width) for name, width in sizes.items()} | {"losses": new(n)}
        shares = (self.rows, self.config.n_head, self.length, self.first + self.length)
        made |= {f"shares.{i}": new(shares) for i in layers}
        for s, length in enumerate(self.slices[: self.place]):
            made |= {
                f"{name}.{i}.{s}": new(self.rows * length, 2 * c) for name in ("kv", "d.kv") for i in layers
            }
        for s in range(self.place + 1, len(self.slices)):
            made |= {f"part.{i}.{s}": new(n, 2 * c) for i in layers}
        return made | {name: torch.zeros(n, dtype=torch.int64) for name in ("tokens", "targets")}

    def _add(self, loop: str, body: Callable, *accesses, kind: str, at=()) -> None:
        where = ", ".join(f"{a}:{b}" for a, b in at)
        self.graph.add(f"{loop} {where}".strip(), body, *accesses, loop=loop, kind=kind)

    def _over_tokens(self, loop: str, body: Callable, accesses: Callable, kind: str) -> None:
        """A parallel loop over the blocks of tokens, whose tasks have `accesses(block)`."""
        for block in self._tokens:
            self._add(loop, body, *accesses(block), kind=kind, at=[block])

    def _pieces(self, weight: str, elements: int) -> list[tuple[int, int]]:
        """The rows of a weight in blocks of so many elements."""
        tensor = self.graph.tensors[weight]
        return ranges(len(tensor), elements and max(1, elements // (tensor.numel() // len(tensor))))

    def _load(self, *parts) -> None:
        batch = self.batches(self.iteration)
        self.iteration += 1
        for part, given in zip(parts, batch, strict=True):
            part.copy_(given.reshape(-1))

    def _forward(self) -> None:
        last, positions = self.config.n_layer, (self.first, self.first + self.length)
        self._add("load", self._load, writes("tokens"), writes("targets"), kind="other")
        for rows in ranges(self.rows, self.blocks.rows):
            block = tokens_of(rows, self.length)
            inputs = reads("tokens", block), reads("wte.weight"), reads("wpe.weight", positions)
            self._add("embed", kernels.embed, *inputs, writes("x.0", block), kind="forward", at=[block])
        for i in range(last):
            self._norm(f"h.{i}.ln_1", f"x.{i}", f"ln_1.{i}")
            self._linear("attn.c_attn", i, kernels.linear, f"ln_1.{i}", (), [f"qkv.{i}"])
            self._attention(i)
            self._linear("attn.c_proj", i, kernels.linear_residual, f"y.{i}", [f"x.{i}"], [f"mid.{i}"])
            self._norm(f"h.{i}.ln_2", f"mid.{i}", f"ln_2.{i}")
            self._linear("mlp.c_fc", i, kernels.linear_gelu, f"ln_2.{i}", (), [f"fc.{i}", f"gelu.{i}"])
            self._linear("mlp.c_proj", i, kernels.linear_residual, f"gelu.{i}", [f"mid.{i}"], [f"x.{i + 1}"])
        self._norm("ln_f", f"x.{last}", "ln_f")
        head = lambda b: (reads("ln_f", b), reads("wte.weight"), writes("logits", b))
        self._over_tokens("head", kernels.logits, head, "forward")
        loss = lambda b: (reads("targets", b), updates("logits", b), writes("losses", b))
        self._over_tokens("loss", kernels.loss, loss, "forward")
        mean = lambda losses: self.losses.append(losses.sum().item() / self.total)
        self._add("mean loss", mean, reads("losses"), kind="other")

    def _norm(self, name: str, x: str, y: str) -> None:
        norm = reads(f"{name}.weight"), reads(f"{name}.bias")
        accesses = lambda b: (reads(x, b), *norm, writes(y, b), writes(f"{y}.stats", b))
        self._over_tokens(y, kernels.layer_norm, accesses, "forward")

    def _linear(self, name: str, i: int, body: Callable, x: str, also, outputs) -> None:
        """A linear layer, over blocks of tokens and of columns; its tasks read `also` beside x."""
        for block in self._tokens:
            for columns in ranges(LINEAR[name] * self.config.n_embd, self.blocks.columns):
                layer = (reads(f"h.{i}.{name}.{part}", columns) for part in ("weight", "bias"))
                inputs = reads(x, block), *layer
                beside = (reads(tensor, block, columns) for tensor in also)
                out = (writes(tensor, block, columns) for tensor in outputs)
                at = [block, columns] if self.blocks.columns else [block]
                self._add(f"{name}.{i}", body, *inputs, *beside, *out, kind="forward", at=at)

    def _heads(self, rows) -> Iterator[tuple]:
        """The blocks of heads of some rows: (rows, heads), their tokens, their columns of q."""
        for heads in ranges(self.config.n_head, self.blocks.heads):
            yield (rows, heads), tokens_of(rows, self.length), (heads[0] * self._size, heads[1] * self._size)

    def _keys(self, i: int, rows, columns, d: str = "") -> Iterator[tuple]:
        """Where k and v lie, or their gradients (d="d."), slice by slice, the own one last."""
        for s, length in enumerate(self.slices[: self.place + 1]):
            name, first = (f"qkv.{i}", 1) if s == self.place else (f"kv.{i}.{s}", 0)
            for start in (first * self.config.n_embd, (first + 1) * self.config.n_embd):
                yield d + name, tokens_of(rows, length), (start + columns[0], start + columns[1])

    def _attention(self, i: int) -> None:
        """Each block of rows begins with messages: own keys and values to later slices, those of earlier ones here."""
        c, body = self.config.n_embd, partial(kernels.attention, size=self._size)
        for rows in ranges(self.rows, self.blocks.rows):
            for s in range(self.place + 1, len(self.slices)):
                own = tokens_of(rows, self.length), (c, 3 * c)
                messages.send(self.graph, f"send keys.{i} to {s}", self.axis, s, f"qkv.{i}", *own)
            for s, length in enumerate(self.slices[: self.place]):
                part = f"kv.{i}.{s}", tokens_of(rows, length)
                messages.receive(self.graph, f"receive keys.{i} from {s}", self.axis, s, *part)
            for at, tokens, columns in self._heads(rows):
                inputs = [(f"qkv.{i}", tokens, columns), *self._keys(i, rows, columns)]
                outputs = writes(f"shares.{i}", *at), writes(f"y.{i}", tokens, columns)
                accesses = *(reads(*part) for part in inputs), *outputs
                self._add(f"attention.{i}", body, *accesses, kind="forward", at=at)

    def _backward(self) -> None:
        last, scale = self.config.n_layer, 1 / self.total
        head = lambda b: (reads("logits", b), reads("wte.weight"), writes("d.ln_f", b))
        self._over_tokens("d.head", partial(kernels.head_backward, scale=scale), head, "backward")
        for rows in self._pieces("wte.weight", self.blocks.weights):
            accesses = reads("logits", None, rows), reads("ln_f"), writes("d.wte.weight", rows)
            self._add(
                "w.head", partial(kernels.head_weights, scale=scale), *accesses, kind="weight", at=[rows]
            )
        self._norm_backward("ln_f", f"x.{last}", "ln_f")
        for i in reversed(range(last)):
            self._linear_backward("mlp.c_proj", i, f"d.x.{i + 1}", f"gelu.{i}", f"d.fc.{i}", [f"fc.{i}"])
            self._linear_backward("mlp.c_fc", i, f"d.fc.{i}", f"ln_2.{i}", f"d.ln_2.{i}")
            self._norm_backward(f"h.{i}.ln_2", f"mid.{i}", f"ln_2.{i}", f"d.x.{i + 1}")
            self._linear_backward("attn.c_proj", i, f"d.mid.{i}", f"y.{i}", f"d.y.{i}")
            self._attention_backward(i)
            self._linear_backward("attn.c_attn", i, f"d.qkv.{i}", f"ln_1.{i}", f"d.ln_1.{i}")
            self._norm_backward(f"h.{i}.ln_1", f"x.{i}", f"ln_1.{i}", f"d.mid.{i}")
        for rows in self._pieces("wte.weight", self.blocks.weights):
            body = partial(kernels.embed_backward, first=rows[0])
            accesses = reads("tokens"), reads("d.x.0"), updates("d.wte.weight", rows)
            self._add("w.embed", body, *accesses, kind="weight", at=[rows])
        body = partial(kernels.positions_backward, rows=self.rows, first=self.first)
        self._add("w.positions", body, reads("d.x.0"), writes("d.wpe.weight"), kind="weight")

    def _norm_backward(self, name: str, x: str, y: str, residual: str = "") -> None:
        beside = lambda b: [reads(residual, b)] if residual else []
        inputs = lambda b: (reads(f"d.{y}", b), reads(x, b), reads(f"{y}.stats", b))
        accesses = lambda b: (*inputs(b), reads(f"{name}.weight"), writes(f"d.{x}", b), *beside(b))
        self._over_tokens(f"d.{y}", kernels.layer_norm_backward, accesses, "backward")
        outputs = writes(f"d.{name}.weight"), writes(f"d.{name}.bias")
        self._add(f"w.{y}", kernels.layer_norm_weights, *inputs(None), *outputs, kind="weight")

    def _linear_backward(self, name: str, i: int, dy: str, x: str, dx: str, before=()) -> None:
        """The gradients of a linear layer's input, or of what stands `before` the gelu that made it, and weights."""
        weight = f"h.{i}.{name}.weight"
        beside = lambda b: [reads(tensor, b) for tensor in before]
        accesses = lambda b: (reads(dy, b), reads(weight), *beside(b), writes(dx, b))
        body = kernels.gelu_backward if before else kernels.linear_backward
        self._over_tokens(f"d.{name}.{i}", body, accesses, "backward")
        for rows in self._pieces(weight, self.blocks.weights):
            outputs = writes(f"d.{weight}", rows), writes(f"d.h.{i}.{name}.bias", rows)
            body, inputs = kernels.linear_weights, (reads(dy, None, rows), reads(x))
            self._add(f"w.{name}.{i}", body, *inputs, *outputs, kind="weight", at=[rows])

    def _attention_backward(self, i: int) -> None:
        """Each block of rows ends with messages: gradients of keys and values go where these came from."""
        c, body = self.config.n_embd, partial(kernels.attention_backward, size=self._size)
        for rows in ranges(self.rows, self.blocks.rows):
            for at, tokens, columns in self._heads(rows):
                own = [(f"d.y.{i}", tokens, columns), (f"qkv.{i}", tokens, columns)]
                inputs = [*own, *self._keys(i, rows, columns)]
                outputs = [(f"d.qkv.{i}", tokens, columns), *self._keys(i, rows, columns, "d.")]
                accesses = [reads(*part) for part in [*inputs, (f"shares.{i}", *at)]]
                accesses += [writes(*part) for part in outputs]
                self._add(f"d.attention.{i}", body, *accesses, kind="backward", at=at)
            for s, length in enumerate(self.slices[: self.place]):
                part = f"d.kv.{i}.{s}", tokens_of(rows, length)
                messages.send(self.graph, f"send d.keys.{i} to {s}", self.axis, s, *part)
            for s in range(self.place + 1, len(self.slices)):
                own = tokens_of(rows, self.length)
                name = f"receive d.keys.{i} from {s}"
                messages.receive(self.graph, name, self.axis, s, f"part.{i}.{s}", own)
                accesses = updates(f"d.qkv.{i}", own, (c, 3 * c)), reads(f"part.{i}.{s}", own)
                self._add(f"add d.keys.{i} from {s}", kernels.add, *accesses, kind="backward", at=[rows])

    def _finish(self) -> None:
        """Sum the gradients over the ranks, in the order in which they appear, then update. Vectors go together."""
        if self.axis.size > 1:
            for parts in self._parts(self.blocks.weights):
                accesses = (updates(f"d.{name}", rows) for name, rows in parts)
                messages.all_reduce(self.graph, f"sum {_name(parts)}", self.axis, *accesses, loop="sum")
        for parts in self._parts(self.blocks.updates):
            weights = [self.weights[name][slice(*rows)] for name, rows in parts]
            for weight, (name, rows) in zip(weights, parts, strict=True):
                weight.grad = self.gradients[name][slice(*rows)]
            body = partial(lambda step, *_: step(), self.optimizer(weights).step)
            accesses = [updates(*part) for part in parts] + [reads(f"d.{name}", rows) for name, rows in parts]
            self.graph.add(f"update {_name(parts)}", body, *accesses, loop="update", kind="update")

    def _parts(self, elements: int) -> Iterator[list]:
        """The weights as lists of (name, rows): blocks of a matrix, or all vectors of a layer; the last layer first."""
        layer = lambda name: int(name.split(".")[1]) if name.startswith("h.") else self.config.n_layer
        order = sorted(self.weights, key=lambda name: (name.startswith("w"), -layer(name)))
        for name in order:
            if self.weights[name].dim() == 2:
                yield from ([(name, rows)] for rows in self._pieces(name, elements))
        for _, names in groupby((name for name in order if self.weights[name].dim() == 1), layer):
            yield [(name, (0, len(self.weights[name]))) for name in names]


def _name(parts) -> str:
    """A block of a matrix, or the layer whose vectors these are."""
    name, rows = parts[0]
    return f"{name} {rows[0]}:{rows[1]}" if len(parts) == 1 else f"vectors of {name.split('.ln')[0]}"
