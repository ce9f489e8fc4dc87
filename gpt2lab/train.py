"""The one training step, for every plan: forward and backward, finish the gradients, clip, update."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .machine.arguments import MORE, checked
from .machine.words import refuse
from .parallel import finish, muon
from .plan import Parallel, Plan
from .ranks import comm, trace
from .ranks.mesh import Axis


@checked(lr=0, eps=0, weight_decay=0, clip=(MORE, math.inf), warmup=0, decay_steps=0)
@dataclass(frozen=True)
class Recipe:
    """The optimizer's settings. Defaults suit small runs; `LLMC` is the recipe of llm.c's CPU trainer.

    Raises ValueError for settings that no run can have, or that would change nothing.
    """

    optimizer: str = "adamw"  # "sgd", or "muon": AdamW, but Muon for the matrices of the blocks
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices only
    clip: float | None = 1.0  # largest norm of the whole gradient
    warmup: int = 0  # steps in which the rate rises from zero
    decay_steps: int | None = None  # steps after which the cosine has reached lr / 10; None: constant rate
    seed: int = 0
    autocast: bool = False  # matrix products in bfloat16; weights, sums and updates stay as they are

    def __post_init__(self):
        idle = ("betas", "eps") if self.optimizer == "sgd" else ()
        given = [name for name in idle if getattr(self, name) != getattr(Recipe, name)]
        refuse(given, dict.fromkeys(idle, "sgd keeps no moments"), str)
        if self.decay_steps is not None and self.warmup > self.decay_steps:
            raise ValueError(
                f"The rate cannot rise for warmup = {self.warmup} steps and have fallen after decay_steps = "
                f"{self.decay_steps}. Use a warmup of at most {self.decay_steps}."
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0): linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay_steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup) / max(1, self.decay_steps - self.warmup))
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def check(self, plan: Plan) -> None:
        """Raise ValueError, before any process starts, for plans that this recipe cannot train."""
        if self.optimizer == "muon":
            muon.check(plan)


LLMC = Recipe(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip=None)


@dataclass(frozen=True)
class Result:
    """What one step reports: the global mean loss, the gradient's norm before clipping, the learning rate."""

    loss: float
    norm: float
    lr: float


LOWER = "Try a lower learning rate."


@checked()
class Trainer:
    """Trains a `Parallel` model; every rank makes one and calls `step` with the same global batch."""

    def __init__(self, parallel: Parallel, recipe: Recipe = Recipe()):
        self.parallel, self.recipe, self.steps = parallel, recipe, 0
        recipe.check(parallel.plan)
        self.optimizer = make_optimizer(parallel.sync.pieces, recipe, parallel.mesh["tp"])

    @checked()
    def gradients(self, batch) -> tuple[float, float]:
        """Loss and gradient norm of a global batch; afterwards every piece holds its part of the whole gradient."""
        for p in (*self.parallel.model.parameters(), *(piece.tensor for piece in self.parallel.sync.pieces)):
            p.grad = None
        self.parallel.sync.begin()
        with self._autocast():
            loss = self.parallel.engine.run(self.parallel.mine(batch), self._key(), self.parallel.sync)
        norm = self._finish()
        return self._global_losses(loss).item(), norm

    def step(self, batch) -> Result:
        """One update on a global batch. Raises FloatingPointError, before any weight changes, on NaN or infinity."""
        if self.parallel.plan.asynchronous:
            return self.stream([batch])[0]
        loss, norm = self.gradients(batch)
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise FloatingPointError(self._culprit(loss))
        return Result(loss, norm, self._update(norm))

    @checked()
    def stream(self, batches: Iterable, asked: Callable[[], bool] | None = None) -> list[Result]:
        """One update on each global batch, by stages of an asynchronous pipeline that do not wait for each other.

        On other plans one step after the other. Where `asked` begins to say on rank 0 that an asynchronous run shall
        end, the next two batches are the last, on every rank; there are fewer results then.
        Clipping is by the norm of each stage's own gradient; the norm reported is that of all stages together.
        Raises FloatingPointError on the stage whose gradient's norm is NaN or infinity; others may have updated then.
        """
        parallel, squares, rates = self.parallel, [], []
        if not parallel.plan.asynchronous:
            return [self.step(batch) for batch in batches]
        self.optimizer.zero_grad()

        def update():
            norm = self._finish()
            if not math.isfinite(norm):
                stage = parallel.mesh["pp"].rank
                raise FloatingPointError(
                    f"Step {self.steps}: the norm of stage {stage}'s gradient is {norm}. It was not used, but other "
                    "stages may have updated; resume a checkpoint with a lower learning rate."
                )
            rates.append(self._update(norm))
            squares.append(norm * norm)
            self.optimizer.zero_grad()

        mine = [parallel.mine(batch) for batch in batches]
        with self._autocast():
            losses = parallel.engine.stream(mine, self._key(), parallel.sync, update, asked)
        losses = self._global_losses(losses)
        squares = comm.all_reduce(torch.tensor(squares, dtype=torch.float64), parallel.mesh["pp"])
        return list(map(Result, losses.tolist(), squares.sqrt().tolist(), rates))

    def _key(self):
        """What dropout's random numbers hang on, (seed, step), or None where there is no dropout."""
        return (self.recipe.seed, self.steps) if self.parallel.model.config.draws else None

    def _finish(self) -> float:
        """Complete the gradients after the last backward; returns their norm.

        Order: sum over data and context ranks, sums that are partial over tensor ranks, tied embedding, norm.
        """
        mesh, sync, engine = self.parallel.mesh, self.parallel.sync, self.parallel.engine
        with trace.span("finish gradients", kind="comm"):
            sync.finish()
            finish.sum_partial(sync.pieces, mesh)
            engine.tie(sync.pieces, mesh)
            return finish.gradient_norm(sync.pieces, mesh, engine.norm_axis)

    def _update(self, norm: float) -> float:
        """Clip and step the optimizer; returns the learning rate."""
        rate = self.recipe.rate(self.steps)
        with trace.span("update", kind="update"):
            finish.clip(self.parallel.sync.pieces, norm, self.recipe.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            finish.balance(self.parallel.sync.pieces, self.parallel.model.config)
            self.parallel.sync.updated()
        self.steps += 1
        return rate

    @checked()
    @torch.no_grad()
    def evaluate(self, batches: Iterable) -> float:
        """Mean loss over global batches, without dropout and without gradients.

        Raises FloatingPointError where it is NaN or infinity, ValueError where there is no batch.
        """
        with self._autocast():
            evaluated = lambda batch: self.parallel.engine.evaluate(self.parallel.mine(batch))
            losses = [self._global_losses(evaluated(batch)).item() for batch in batches]
        if not losses:
            raise ValueError("There is no batch to evaluate. Give at least 1.")
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean):
            raise FloatingPointError(f"After step {self.steps} the loss in evaluation is {mean}. {LOWER}")
        return mean

    def check_finite(self) -> None:
        """Raise FloatingPointError, the same on every rank, where a weight or a moment is NaN or infinity."""
        moments = lambda piece: self.optimizer.state.get(piece.tensor, {}).values()
        if where := self._where(lambda piece: [piece.tensor, *filter(torch.is_tensor, moments(piece))]):
            raise FloatingPointError(
                f"After step {self.steps} {where} is not finite. Nothing was saved. {LOWER}"
            )

    def _where(self, tensors: Callable[[finish.Piece], list[torch.Tensor]]) -> str:
        """Each rank's first piece of which one of these tensors is not finite, in words; empty where none has one."""
        pieces = self.parallel.sync.pieces
        bad = next((p.name for p in pieces if not all(t.isfinite().all() for t in tensors(p))), None)
        found = comm.gather_objects(bad, self.parallel.mesh.world)
        return ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(found) if name)

    def _autocast(self):
        # Its cache of 16-bit weights would outlive the updates of a stream.
        how = {"enabled": self.recipe.autocast, "cache_enabled": not self.parallel.plan.asynchronous}
        return torch.autocast(self.parallel.device.type, torch.bfloat16, **how)

    def _global_losses(self, loss) -> torch.Tensor:
        """The sums of all ranks' parts; tensor-parallel ranks hold the same part, which counts once."""
        mesh = self.parallel.mesh
        part = torch.as_tensor(loss).detach().to("cpu", torch.float64)
        return comm.all_reduce(part if mesh["tp"].rank == 0 else torch.zeros_like(part), mesh.world)

    def _culprit(self, loss: float) -> str:
        """What is not finite, and on which rank, as one sentence that is the same on every rank."""
        where = self._where(lambda piece: [piece.tensor.grad])
        norm = "the gradient's norm (its squares overflow)"
        where = f"the gradient of {where}" if where else norm if math.isfinite(loss) else f"the loss ({loss})"
        return f"Step {self.steps}: {where} is not finite. Nothing was updated; try a lower learning rate."


ADAMS = "exp_avg", "exp_avg_sq"


def moments_of(piece: finish.Piece, recipe: Recipe) -> tuple[str, ...]:
    """What the recipe's optimizer keeps of a piece besides the weight, by PyTorch's names, each of its shape."""
    if piece.spec.load or recipe.optimizer == "sgd":
        return ()
    return ("momentum_buffer",) if recipe.optimizer == "muon" and muon.by_muon(piece) else ADAMS


def make_optimizer(
    held: list[finish.Piece], recipe: Recipe, tensor_axis: Axis | None = None
) -> torch.optim.Optimizer:
    """The recipe's optimizer over this rank's pieces: weight decay for matrices only, AdamW fused."""
    groups = [
        {"params": [p.tensor for p in held if p.decay], "weight_decay": recipe.weight_decay},
        {"params": [p.tensor for p in held if not p.decay and not p.spec.load], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr)
    how = {"lr": recipe.lr, "betas": recipe.betas, "eps": recipe.eps, "fused": True}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, **how)
    if recipe.optimizer == "muon":
        return muon.Muon(groups, held, tensor_axis or Axis(), **how)
    raise ValueError(f"There is no optimizer {recipe.optimizer!r} here. Use adamw, muon or sgd.")
