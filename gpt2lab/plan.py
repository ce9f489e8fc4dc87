"""A plan says how training is split: parsed from text, checked before any process starts, built in a fixed order.

dp=2,tp=2               two replicas, each over two tensor-parallel ranks
pp=4,micro=8,schedule=1f1b    four pipeline stages
"""

import difflib
import importlib
from dataclasses import dataclass, fields

import torch

from .model import GPT2, GPT2Config
from .parallel import spec
from .parallel.accumulate import Accumulate
from .parallel.chunked_loss import apply_chunked_loss
from .parallel.recompute import apply_recompute
from .ranks.mesh import NAMES, Mesh
from .schedules.registry import find


@dataclass(frozen=True)
class Plan:
    """Ranks on each axis, and the options of each strategy. `Plan()` is the serial run."""

    pp: int = 1  # pipeline stages
    dp: int = 1  # data-parallel replicas
    cp: int = 1  # parts of the sequence
    tp: int = 1  # tensor-parallel parts
    micro: int = 1  # micro-batches of a step: accumulated, or sent through the pipeline
    data: str = "bucket"  # how gradients are summed: bucket, naive, server, servers; owner with zero=3
    bucket: int = 1024  # KiB of gradients in one message
    zero: int = 0  # ZeRO stage: what the replicas share out
    schedule: str = "1f1b"  # of the pipeline
    chunks: int = 2  # model chunks a rank, for interleaved schedules
    layout: str = "contiguous"  # which tokens a context-parallel rank owns
    exchange: str = "kv"  # how context-parallel ranks see each other's keys and values
    hops: int = 0  # how many ranks away a halo may come from; 0: as many as the window needs
    sp: bool = False  # sequence parallelism on the tensor-parallel axis
    loss: str = "whole"  # chunked: never hold the whole logits
    recompute: bool = False  # keep only the blocks' inputs for backward; on a pipeline, the stages'

    @classmethod
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
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean {near[0]}=...?" if near else f"It may say {', '.join(known)}."
                raise ValueError(f"A plan cannot say {item!r}: it knows no {key!r}. {hint}")
            if key in values:
                raise ValueError(
                    f"A plan says {key} once, and {text!r} says it twice. Leave one of them out."
                )
            values[key] = _value(key, value, known[key].type)
        return values

    def __post_init__(self):
        for name in (*NAMES, "micro", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is no number of parts. Use {name}=1 or more.")

    def __str__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{k}={str(v).lower() if v is True else v}" for k, v in said.items()) or "serial"

    @property
    def world(self) -> int:
        """How many ranks the plan needs."""
        return self.pp * self.dp * self.cp * self.tp

    def check(self, config: GPT2Config, rows: int, length: int) -> None:
        """Raise ValueError, in the parent and before any process starts, where this plan cannot run this model."""
        if length > config.n_positions:
            raise ValueError(
                f"Sequences of {length} tokens do not fit into {config.n_positions} positions. "
                f"Use at most {config.n_positions}."
            )
        if rows < self.dp * self.micro:
            raise ValueError(
                f"{rows} rows cannot be dealt to dp={self.dp} replicas in micro={self.micro} micro-batches each "
                f"({self.dp} x {self.micro} = {self.dp * self.micro}). Use at least {self.dp * self.micro} rows."
            )
        if self.loss not in ("whole", "chunked"):
            raise ValueError(
                f"loss={self.loss} is no way to compute the loss. Use loss=whole or loss=chunked."
            )
        if self.loss == "chunked" and self.tp > 1:
            raise ValueError(
                f"loss=chunked needs the whole vocabulary on a rank, and tp={self.tp} cuts it. Use loss=whole, or tp=1."
            )
        _check_names(self)
        for strategy in STRATEGIES:
            if strategy.wanted(self):
                strategy.check(config, self, rows, length)


def _check_names(plan: Plan) -> None:
    """Raise ValueError for a name that does not exist, also where its axis has one rank and nobody would ask."""
    find(plan.schedule)
    CONTEXT.module.exchange(plan.exchange)
    CONTEXT.module.layout(plan.layout, 1, 1)


def _value(key: str, text: str, kind):
    """A plan's value as the type of its field."""
    if kind is bool:
        if text.lower() not in ("true", "false", "on", "off", "1", "0"):
            raise ValueError(f"{key}={text} is neither on nor off. Use {key}=true or {key}=false.")
        return text.lower() in ("true", "on", "1")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}={text} is not a whole number. Use for example {key}=2.") from None


@dataclass(frozen=True)
class Strategy:
    """One step of `build`: the file it lives in, its apply function, and when a plan wants it."""

    file: str
    apply: str
    wanted: object

    def check(self, config, plan, rows, length):
        """Let the strategy's own file refuse what it cannot split."""
        self.module.check(config, plan, rows, length)

    def __call__(self, *args):
        return getattr(self.module, self.apply)(*args)

    @property
    def module(self):
        """The strategy's file, imported when first needed."""
        return importlib.import_module(f"gpt2lab.parallel.{self.file}")


PIPELINE = Strategy("pipeline.engine", "apply_pipeline", lambda plan: plan.pp > 1)
TENSOR = Strategy("tensor", "apply_tensor", lambda plan: plan.tp > 1)
SEQUENCE = Strategy("sequence", "apply_sequence", lambda plan: plan.sp)
CONTEXT = Strategy("context.exchanges", "apply_context", lambda plan: plan.cp > 1)
DATA = Strategy("data", "apply_data", lambda plan: plan.zero == 0)
ZERO = Strategy("zero.stages", "apply_zero", lambda plan: plan.zero != 0)
STRATEGIES = (PIPELINE, TENSOR, SEQUENCE, CONTEXT, DATA, ZERO)


@dataclass
class Parallel:
    """A model spread over the mesh, ready to train: what `build` returns and the trainer drives."""

    plan: Plan
    mesh: Mesh
    model: GPT2
    engine: object  # .run(micros, key, sync) -> loss;  .tie(pieces, mesh)
    sync: object  # the data-parallel strategy: .pieces, .last_micro(), .finish(), .updated(), .gather(), .scatter()
    specs: dict[str, spec.Spec]
    columns: object = (
        None  # length -> index of the tokens of a sequence that this rank owns; None: all of them
    )

    def mine(self, batch):
        """This rank's part of a global batch: its rows, its columns, in micro-batches."""
        dp = self.mesh["dp"]
        batch = batch.rows(dp.rank, dp.size)
        if self.columns:
            batch = batch.columns(self.columns(batch.tokens.size(1)))
        return [micro.to(self.device) for micro in batch.micro(self.plan.micro)]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.model.parameters()).device

    def gather(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by name, of values that belong to the pieces; only the parameters of this stage."""
        return {n: spec.full(t, self.specs[n], self.mesh) for n, t in self.sync.gather(values).items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, by name, as the serial model has them; only those of this stage."""
        return self.gather([p.tensor.detach() for p in self.sync.pieces])

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients, likewise."""
        return self.gather([p.tensor.grad for p in self.sync.pieces])

    def scatter(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What `gather` undoes: for every piece, this rank's part of the whole tensors."""
        return self.sync.scatter({n: spec.local(tensors[n], s, self.mesh) for n, s in self.specs.items()})

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over whole weights by name: each rank keeps its own part."""
        for piece, value in zip(self.sync.pieces, self.scatter(weights), strict=True):
            piece.tensor.copy_(value)
        self.sync.updated()


def build(
    plan: Plan, config: GPT2Config, mesh: Mesh, dtype=torch.float32, seed: int = 0, device="cpu"
) -> Parallel:
    """The model of `seed`, spread over the mesh as the plan says; each rank's part on its `device`.

    Order: pipeline, tensor, sequence, context, recompute, data or ZeRO. Each strategy edits the model in place.
    """
    model = GPT2(config, seed).to(device, dtype)
    engine = PIPELINE(model, mesh, plan) if PIPELINE.wanted(plan) else Accumulate(model)
    for strategy in (TENSOR, SEQUENCE):
        if strategy.wanted(plan):
            strategy(model, mesh, plan)
    columns = CONTEXT(model, mesh, plan) if CONTEXT.wanted(plan) else None
    if plan.loss == "chunked":
        apply_chunked_loss(model)
    if plan.recompute and not PIPELINE.wanted(plan):
        apply_recompute(model)
    specs = {name: spec.of(p) for name, p in model.named_parameters()}
    sync = (ZERO if ZERO.wanted(plan) else DATA)(model, mesh["dp", "cp"], plan)
    return Parallel(plan, mesh, model, engine, sync, specs, columns)
