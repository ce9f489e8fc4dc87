"""A plan says how training is split: parsed from text, checked before any process starts, built in a fixed order.

dp=2,tp=2               two replicas, each over two tensor-parallel ranks
pp=4,micro=8,schedule=1f1b    four pipeline stages
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from .experts.mixture import set_total
from .generate import generate
from .machine.arguments import checked
from .machine.words import did_you_mean
from .model import GPT2, GPT2Config
from .parallel import boxes, data, expert, sequence, servers, spec, tensor
from .parallel.accumulate import Accumulate
from .parallel.base import Engine
from .parallel.chunked_loss import apply_chunked_loss
from .parallel.context import exchanges as context
from .parallel.finish import Piece
from .parallel.pipeline import engine as pipeline
from .parallel.pipeline import versions
from .parallel.pipeline.generate import generate_streams
from .parallel.recompute import apply_recompute
from .parallel.zero import choice as zero
from .ranks.mesh import NAMES, Mesh
from .schedules.registry import FREE, find


@checked(bucket=0, active=0, hops=0)
@dataclass(frozen=True)
class Plan:
    """Ranks on each axis, and the options of each strategy. `Plan()` is the serial run."""

    pp: int = 1  # pipeline stages
    dp: int = 1  # data-parallel replicas
    ep: int = 1  # how many neighbours of them share out the experts
    node: int = 1  # how many neighbours of those share a machine: rows travel within it first, then between
    cp: int = 1  # parts of the sequence
    tp: int = 1  # tensor-parallel parts
    micro: int = 1  # micro-batches of a step: accumulated, or sent through the pipeline
    data: str = "bucket"  # how gradients are summed: bucket, naive, server, servers; owner with zero=3
    bucket: int = 1024  # KiB of gradients in one message
    zero: int = 0  # ZeRO stage: what the replicas share out
    refill: bool = False  # zero=3 without a second forward: fill again what the graph saved of the weights
    shard: int = 0  # how many neighbours share it out (HSDP), as replicas of other groups; 0: all replicas
    schedule: str = "1f1b"  # of the pipeline
    chunks: int = 2  # model chunks a rank, for interleaved schedules
    active: int = 0  # micro-batches in progress, for schedules without a flush; 0: as many as stages
    layout: str = "contiguous"  # which tokens a context-parallel rank owns
    exchange: str = "kv"  # how context-parallel ranks see each other's keys and values
    hops: int = 0  # how many ranks away a halo may come from; 0: as many as the window needs
    sp: bool = False  # sequence parallelism on the tensor-parallel axis
    loss: str = "whole"  # chunked: never hold the whole logits
    recompute: bool = False  # keep only the blocks' inputs for backward; on a pipeline, the stages'

    @classmethod
    @checked()
    def parse(cls, text: str) -> "Plan":
        """The plan of a text such as `dp=2,tp=2`; `serial` and the empty text are the serial plan."""
        return cls(**cls.said(text))

    @classmethod
    def said(cls, text: str) -> dict:
        """What a text says of a plan, by field; the rest has its default."""
        known, values = {f.name: f for f in fields(cls)}, {}
        for item in text.replace(" ", "").split(",") if text.strip() not in ("", "serial") else []:
            key, _, value = item.partition("=")
            if key not in known:
                hint = did_you_mean(key, known, f"It may say {', '.join(known)}.", "{}=...")
                raise ValueError(f"A plan cannot say {item!r}: it knows no {key!r}. {hint}")
            if key in values:
                raise ValueError(
                    f"A plan says {key} once, and {text!r} says it twice. Leave one of them out."
                )
            values[key] = _value(key, value, known[key].type)
        return values

    def __post_init__(self):
        # as the registry names it
        object.__setattr__(self, "schedule", self.schedule.lower().replace("-", "_"))
        for name in (*NAMES, "ep", "node", "micro", "chunks"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} is no number of parts. Use {name}=1 or more.")

    def __str__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{k}={str(v).lower() if v is True else v}" for k, v in said.items()) or "serial"

    @property
    def axes(self) -> dict:
        """The size of every mesh axis, and along which of them messages travel: `Mesh(**plan.axes)`."""
        experts = {"ep": self.ep, "node": self.node} if self.ep > 1 else {}
        messages = ("pp", "cp", "dp+cp") if _served(self) else ("pp", "cp")
        return {name: getattr(self, name) for name in NAMES} | experts | {"messages": messages}

    @cached_property
    def world(self) -> int:
        """How many ranks the plan needs."""
        return math.prod(getattr(self, name) for name in NAMES)

    @property
    def asynchronous(self) -> bool:
        """Whether stages update by themselves, without a flush."""
        return self.pp > 1 and find(self.schedule) in FREE

    @checked()
    def check(self, config: GPT2Config, rows: int, length: int) -> None:
        """Raise ValueError, in the parent and before any process starts, where this plan cannot run this model."""
        if not 1 <= length <= config.n_positions:
            raise ValueError(
                f"Sequences of {length} tokens do not fit into {config.n_positions} positions. "
                f"Use 1 to {config.n_positions}."
            )
        for number, what in ((config.parameters, "parameters"), (rows * length, "tokens in a batch")):
            if number > 10**14:
                raise ValueError(f"{min(number, 10**300):.1e} {what} fit into no machine. Use fewer.")
        if rows < self.dp * self.micro:
            raise ValueError(
                f"{rows} rows cannot be dealt to dp={self.dp} replicas in micro={self.micro} micro-batches each "
                f"({self.dp} x {self.micro} = {self.dp * self.micro}). Use at least {self.dp * self.micro} rows."
            )
        if self.loss not in ("whole", "chunked"):
            raise ValueError(f"loss={self.loss} is unknown. Use loss=whole or loss=chunked.")
        if self.loss == "chunked" and self.tp > 1:
            raise ValueError(
                f"loss=chunked needs the whole vocabulary on a rank, and tp={self.tp} cuts it. Use loss=whole, or tp=1."
            )
        find(self.schedule)  # these names must exist, also where their axis has one rank
        if self.active and not self.asynchronous:
            raise ValueError(
                f"active={self.active} is for pipelines without a flush, and this is schedule={self.schedule} over "
                f"pp={self.pp}. Leave it out, or use schedule=ampnet or pipedream."
            )
        context.exchange(self.exchange)
        context.layout(self.layout, 1, 1)
        if (self.shard or self.refill) and not self.zero:
            said = f"shard={self.shard}" if self.shard else "refill=on"
            raise ValueError(
                f"{said} says how ZeRO shards. Use {'zero=1, 2 or 3' if self.shard else 'zero=3'} with it."
            )
        for strategy in _strategies(self):
            strategy.check(config, self, rows, length)


def _strategies(plan: Plan) -> list:
    """The files of the strategies that a plan uses, in the order of `build`; each has its own `check`."""
    used = {
        pipeline: plan.pp > 1,
        versions: plan.asynchronous,
        tensor: plan.tp > 1,
        sequence: plan.sp,
        context: plan.cp > 1,
        zero: plan.zero,
        data: not plan.zero,
        servers: _served(plan),
        expert: True,
    }
    return [file for file, wanted in used.items() if wanted]


def _served(plan: Plan) -> bool:
    return not plan.zero and plan.data in ("server", "servers")


def _value(key: str, text: str, kind):
    """A plan's value as the type of its field."""
    if kind is bool:
        if text.lower() not in ("true", "false", "on", "off", "1", "0"):
            raise ValueError(f"{key}={text} is neither on nor off. Use {key}=true or {key}=false.")
        return text.lower() in ("true", "on", "1")
    if kind is int and not re.fullmatch("[+-]?[0-9]{1,4000}", text):  # int() takes more: 1_0, other scripts
        raise ValueError(f"{key}={text} is not a whole number. Use for example {key}=2.")
    return kind(text)


@dataclass
class Parallel:
    """A model spread over the mesh, ready to train: what `build` returns and the trainer drives."""

    plan: Plan
    mesh: Mesh
    model: GPT2
    engine: Engine
    sync: data.Replicas
    specs: dict[str, spec.Spec]
    columns: Callable | None = None  # length -> which of a sequence's tokens this rank owns; None: all

    def mine(self, batch):
        """This rank's part of a global batch: its rows, its columns, in micro-batches.

        Raises ValueError, the same on every rank, where the batch does not fit the model.
        """
        batch.check(self.model.config.vocab_size, self.model.config.n_positions)
        dp = self.mesh["dp"]
        if self.model.config.experts:
            set_total(self.model, batch.total)
        batch = batch.rows(dp.rank, dp.size)
        if self.columns:
            batch = batch.columns(self.columns(batch.tokens.size(1)))
        return [micro.to(self.device) for micro in batch.micro(self.plan.micro)]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.model.parameters()).device

    def generate(self, prompts, new: int, streams: int = 1, **how) -> list[list[int]]:
        """The texts that the serial model writes, on every rank; `how` is what `generate.generate` understands.

        Replicas and context ranks all do the same work; a pipeline passes the rows through in `streams` groups.
        Raises ValueError for a plan whose head gives no logits, and what a pipeline cannot do.
        """
        if self.plan.loss == "chunked":
            raise ValueError("loss=chunked leaves no logits to choose from. Generate with loss=whole.")
        if self.plan.pp > 1 and not {"cache", "slide"}.isdisjoint(how):
            raise ValueError(
                "a pipeline generates with its cache and within the context. Leave cache and slide out."
            )
        axis, words = self.mesh["tp"], self.model.config.vocab_size
        gather = (lambda logits: tensor.whole_logits(logits, axis, words)) if axis.size > 1 else None
        with context.whole_sequences(self.model):
            if self.plan.pp > 1:
                return generate_streams(self.engine, prompts, new, streams, gather=gather, **how)
            return generate(self.model, prompts, new, gather=gather, **how)

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by name, of values that belong to the pieces; only the parameters of this stage."""
        return {n: spec.full(t, self.specs[n], self.mesh) for n, t in self.sync.whole(values).items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, by name, as the serial model has them; only those of this stage."""
        return self.whole([p.tensor.detach() for p in self.sync.pieces])

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients, likewise."""
        return self.whole([p.tensor.grad for p in self.sync.pieces])

    def entry_of(self, piece: Piece, tensor: torch.Tensor) -> boxes.Entry:
        """Where the elements of `tensor`, which is cut as the piece is, are in the whole parameter."""
        shape = piece.within or piece.tensor.shape
        return boxes.entry_of(tensor, shape, piece.start, self.specs[piece.name], self.mesh)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over whole weights by name: each rank keeps its own part. Raises ValueError for another shape."""
        for piece in (p for p in self.sync.pieces if p.tensor.numel()):
            here, given = self.entry_of(piece, piece.tensor), boxes.whole(weights[piece.name])
            if here.shape != given.shape:
                raise ValueError(
                    f"{piece.name} has the shape {here.shape} here and {given.shape} among these weights. Use those of "
                    "a model of the same configuration."
                )
            for box in here.boxes:
                boxes.fill(box, *given.boxes)
        self.sync.updated()


@checked()
def build(
    plan: Plan,
    config: GPT2Config,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Parallel:
    """The model of `seed`, spread over the mesh as the plan says; each rank's part on its `device`.

    Order: pipeline, tensor, sequence, context, expert, recompute, data or ZeRO. Each strategy edits the model in place.
    """
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"There is no device {device!r}. Use cpu or cuda.") from None
    model = GPT2(config, seed).to(device, dtype)
    apply_engine = versions.apply_asynchronous if plan.asynchronous else pipeline.apply_pipeline
    engine = apply_engine(model, mesh, plan) if plan.pp > 1 else Accumulate(model)
    if plan.tp > 1:
        tensor.apply_tensor(model, mesh, plan)
    if plan.sp:
        sequence.apply_sequence(model, mesh, plan)
    columns = context.apply_context(model, mesh, plan) if plan.cp > 1 else None
    if config.experts:
        expert.apply_expert(model, mesh)
    if plan.loss == "chunked":
        apply_chunked_loss(model)
    if plan.recompute and plan.pp == 1:
        apply_recompute(model)
    specs = {name: spec.of(p) for name, p in model.named_parameters()}
    replicas = mesh["dp", "cp"]
    if plan.zero:
        sync = zero.apply_zero(model, mesh, plan)
    elif _served(plan):
        sync = servers.apply_servers(model, replicas, plan)
    else:
        sync = data.apply_data(model, replicas, plan, mesh["edp", "cp"])
    return Parallel(plan, mesh, model, engine, sync, specs, columns)
