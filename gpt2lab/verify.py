"""Whether a parallel run equals the serial one: losses, every gradient, its norm, and weights after several steps.

`reference` is the serial run, in plain PyTorch; a pipeline without a flush is compared with `emulate` instead. All of
it runs in float64.
"""

from dataclasses import dataclass

import torch

from .corpus.batches import Batch
from .emulate import Emulator
from .machine import gpus
from .machine.arguments import checked
from .machine.patience import patiently
from .model import GPT2Config
from .parallel.pipeline.stages import homes_of
from .parallel.pipeline.versions import stream_of
from .plan import Plan, build
from .processes.launch import Ranks, launch
from .ranks import comm
from .ranks.mesh import Mesh
from .reference import (
    CONFIG,
    DEPTHS,
    EXPERTS,
    RECIPES,
    Serial,
    after_steps,
    default_dtype,
    example_batch,
    example_weights,
    serial_run,
    serial_start,
)
from .train import Recipe, Trainer

TOLERANCE = 1e-10
# A shallow comparison of a stream trains too, as all its numbers come after an update.
STREAMED = {"gradients": RECIPES[:1], "steps": RECIPES[1:], "full": RECIPES}
VERSIONS = ("versions read", "bytes of versions kept")
# no arithmetic in these: not a bit may differ
EXACT = ("initial weights", "every parameter has an owner", *VERSIONS)


@dataclass(frozen=True)
class Claim:
    """One thing that was compared: the largest relative error, in which tensor, on which rank."""

    name: str
    error: float
    tensor: str = ""
    rank: int = 0

    @property
    def size(self) -> float:
        """The error; not a number is worse than any number."""
        return self.error if self.error == self.error else float("inf")

    @property
    def digits(self) -> str:
        """The error as text that no machine's rounding changes: 0 where it must be, < 1e-12, or the number."""
        if self.name in EXACT and self.error == 0:
            return "0"
        return "< 1e-12" if self.error < 1e-12 else f"{self.error:.1e}"


@dataclass(frozen=True)
class Streamed:
    """What the serial emulator of a pipeline without a flush computes with a recipe."""

    recipe: Recipe
    losses: list[float]  # of each batch
    norms: list[float]  # of each update
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Report:
    """All claims about one plan; `ok` when every error is within the tolerance."""

    plan: Plan
    claims: list[Claim]
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the plan is equal to the serial run. (NaN is not within any tolerance.)"""
        return all(self._holds(c) for c in self.claims)

    def _holds(self, claim: Claim) -> bool:
        return claim.error <= (0 if claim.name in EXACT else self.tolerance)

    def table(self, exact: bool = False) -> str:
        """The claims as text: one line each, with the largest error, and where it is if it is too large.

        `exact` prints the digits of rounding too, which differ between machines, and the tensor on every line.
        """
        against = "an emulator of its staleness" if self.plan.asynchronous else "serial GPT-2"
        lines = [
            f"{self.plan} on {self.plan.world} rank{'s' * (self.plan.world > 1)}, float64, against {against}"
        ]
        for c in self.claims:
            verdict = "equal" if self._holds(c) else "DIFFERS"
            error = f"{c.error:.1e}" if exact else c.digits
            where = f"{c.tensor} on rank {c.rank}" if c.tensor and (exact or verdict != "equal") else ""
            lines.append(f"  {verdict:8}{c.name:32}{error:>10}  {where}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


@checked()
def verify(
    plan: Plan | str,
    config: GPT2Config | None = None,
    rows: int = 7,
    length: int = 11,
    ranks: Ranks | None = None,
    depth: str = "full",
    device: str = "cpu",
) -> Report:
    """Compare a plan with the serial run on live ranks (`ranks`: a running pool to use).

    Without a `config` the model is CONFIG, or EXPERTS for a plan with ep. `depth`: "gradients" stops after losses,
    gradients and their norm; "steps" adds two updates by AdamW; "full" five by SGD and five by AdamW; "muon" three by
    Muon and AdamW. With device "cuda" the plan runs on GPUs over NCCL; the serial run stays on the CPU.

    Raises ValueError, before any process starts, when the plan cannot run this model, or not on this device or pool.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth={depth!r} is unknown. Use one of {', '.join(DEPTHS)}.")
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    config = config or (EXPERTS if plan.ep > 1 else CONFIG)
    plan.check(config, rows, length)
    for recipe, _ in DEPTHS[depth]:
        recipe.check(plan)
    if ranks is not None and ranks.size != plan.world:
        raise ValueError(
            f"{plan} needs a pool of {plan.world}, and this one has {ranks.size} ranks. Use another."
        )
    if device != "cpu" and (lacking := gpus.gpus_needed(plan.world)):
        raise ValueError(f"device={device!r} needs {lacking}. Use cpu.")
    job = plan, config, rows, length, depth, expected(plan, config, rows, length, depth)
    if ranks is not None:
        found = ranks.run(compare, *job, device=device)
    elif plan.world == 1:
        found = [compare(0, 1, *job, device=device)]
    else:
        backend = "nccl" if device == "cuda" else None
        found = launch(compare, *job, device=device, ranks=plan.world, backend=backend)
    return Report(plan, worst(found))


def worst(found: list[list[Claim]]) -> list[Claim]:
    """Of what all ranks found (`compare`), each claim where its error is largest; NaN is worse than any number."""
    return [max(claims, key=lambda claim: claim.size) for claims in zip(*found, strict=True)]


def expected(plan: Plan, config: GPT2Config, rows: int, length: int, depth: str) -> Serial | list[Streamed]:
    """What a plan is held against: the serial run, or without a flush what an emulator gives for each recipe."""
    if not plan.asynchronous:
        return serial_run(config, rows, length, depth)
    batches, start = _batches(plan, config, rows, length), example_weights(config)
    stream, homes = stream_of(plan, len(batches)), homes_of(config, plan.pp)
    found = []
    for recipe in STREAMED[depth]:
        emulator = Emulator(config, start, stream, homes, recipe).run(batches, plan.dp)
        found.append(Streamed(recipe, emulator.losses, emulator.norms, emulator.weights))
    return found


@torch.enable_grad()
def compare(
    rank: int,
    world_size: int,
    plan: Plan,
    config: GPT2Config,
    rows: int,
    length: int,
    depth: str = "full",
    right: Serial | list[Streamed] | None = None,
    default: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Claim]:
    """What one rank finds when it runs the plan together with the others.

    `right`: what `expected` gave for this plan, model, batch and depth; `default`: torch's default dtype meanwhile.
    """
    with default_dtype(default):
        right = right or expected(plan, config, rows, length, depth)
        mesh, start = Mesh(**plan.axes), example_weights(config)
        parallel = build(plan, config, mesh, torch.float64, device=device)
        initial = serial_start(config) if plan.asynchronous else right.initial
        claims = [_claim("initial weights", parallel.weights(), initial, rank)]
        if plan.asynchronous:
            claims += _stream(parallel, start, _batches(plan, config, rows, length), right, rank)
        else:
            claims += _steps(parallel, start, example_batch(config, rows, length), right, depth, rank)
        return [*claims, _owners(parallel, start)]


def _steps(parallel, start: dict, batch, serial: Serial, depth: str, rank: int) -> list[Claim]:
    """Losses, gradients, their norm, and the weights after the updates of each recipe."""
    parallel.load(start)
    mine = Trainer(parallel)
    my_loss, my_norm = mine.gradients(batch)
    losses = {"training": my_loss, "evaluation": mine.evaluate([batch])}
    claims = [
        _claim("every gradient", parallel.gradients(), serial.gradients, rank),
        _claim("gradient norm", {"norm": _double(my_norm)}, {"norm": serial.norm}, rank),
    ]
    for (recipe, steps), after in zip(DEPTHS[depth], serial.after, strict=True):
        parallel.load(start)
        trainer = Trainer(parallel, recipe)
        updates = range(steps)
        for _ in patiently(updates, f"{recipe.optimizer} updates of the plan") if rank == 0 else updates:
            trainer.step(batch)
        name = after_steps(recipe, steps)
        claims.append(_claim(f"weights {name}", parallel.weights(), after, rank))
        losses[f"evaluation {name}"] = trainer.evaluate([batch])
    numbers = {name: _double(loss) for name, loss in losses.items()}
    return [_claim("loss", numbers, serial.losses, rank), *claims]


def _batches(plan: Plan, config: GPT2Config, rows: int, length: int) -> list[Batch]:
    """A stream of 3 p batches: each number of a pipeline without a flush comes after an update."""
    return [example_batch(config, rows, length, 1 + t) for t in range(3 * plan.pp)]


def _stream(parallel, start: dict, batches: list[Batch], streams: list[Streamed], rank: int) -> list[Claim]:
    """The same of a pipeline without a flush, against a serial emulator of its staleness for each recipe.

    Besides losses and weights: did each operation read the version that the table says, and were the bytes of all
    versions kept after it those of the table?
    """
    claims = []
    for right in streams:
        parallel.load(start)
        found = Trainer(parallel, right.recipe).stream(batches)
        pairs = {"loss": right.losses, "norm": right.norms}
        mine = {n: _double([getattr(r, n) for r in found]) for n in pairs}
        serial = {n: _double(numbers) for n, numbers in pairs.items()}
        claims.append(_claim(f"losses and norms, {right.recipe.optimizer}", mine, serial, rank))
        name = f"weights after {len(batches)} {right.recipe.optimizer} updates"
        claims.append(_claim(name, parallel.weights(), right.weights, rank))
    return [*claims, *_as_the_table_says(parallel, stream_of(parallel.plan, len(batches)), rank)]


def _as_the_table_says(parallel, stream, rank: int) -> list[Claim]:
    """How many operations of the last stream read another version, or left other bytes of versions, than the table."""
    stage, record = parallel.mesh["pp"].rank, parallel.engine.record
    own = [p for p in parallel.sync.pieces if not p.spec.tied_copy]
    size = sum(p.tensor.numel() * p.tensor.element_size() for p in own)
    read = sum(r.version != stream.reads[r.op] for r in record)
    pairs = zip(record, stream.held(stage), strict=True)
    kept = sum((r.held, r.bytes) != (v, size * len(v)) for r, v in pairs)
    return [Claim(VERSIONS[0], float(read), rank=rank), Claim(VERSIONS[1], float(kept), rank=rank)]


def _owners(parallel, start: dict) -> Claim:
    """Whether all ranks together hold every parameter."""
    world = parallel.mesh.world
    names = set().union(*comm.gather_objects(set(parallel.weights()), world))
    missing = set(start) ^ names
    return Claim("every parameter has an owner", float(len(missing)), ", ".join(sorted(missing)), world.rank)


def _claim(name: str, mine: dict, serial: dict, rank: int) -> Claim:
    """The largest relative error over the tensors this rank holds: max |a - b| / max |b|, tensor by tensor."""
    claims = [Claim(name, relative_error(t.cpu(), serial[n]), n, rank) for n, t in mine.items()]
    return max(claims, key=lambda claim: claim.size)


def _double(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b| of two tensors of one shape; infinite, which max() keeps, where it is not a number."""
    size = b.detach().abs().max().double().clamp_min(1e-300)  # which is 0 in float32
    error = ((a.detach() - b.detach()).abs().max() / size).item()
    return error if error == error else float("inf")
