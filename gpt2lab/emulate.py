"""Asynchronous pipelines, serially: one process that reads the version table and does what it says, in plain PyTorch.

It keeps every version of every stage's weights and shares no code with the engine, so that a mistake there shows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from .corpus.batches import IGNORED, Batch
from .machine.patience import patiently
from .model import GPT2, GPT2Config, Noise
from .schedules import Op
from .schedules.asynchronous import Stream

HEAD = "head_weight"


class TwoEnds(GPT2):
    """GPT-2 whose head has a weight of its own: in a pipeline it may be another version than the embedding's."""

    def __init__(self, config: GPT2Config):
        super().__init__(config)
        self.head_weight = torch.nn.Parameter(self.wte.weight.detach().clone())

    def head(self, x, pick=None):
        """Logits (B, T, V) by the head's own weight."""
        return F.linear(self.ln_f(x), self.head_weight)


class Emulator:
    """A stream of batches, one micro-batch after the other; `homes` says which stage owns which parameter.

    After `run`, `losses` have a number for each batch, `norms` one for each update of all stages, and `weights` is what
    all updates have made.
    """

    def __init__(self, config: GPT2Config, start: dict, stream: Stream, homes: dict[str, int], recipe):
        self.model, self.stream, self.recipe = TwoEnds(config).double(), stream, recipe
        self.stages = [{} for _ in range(stream.schedule.depth)]
        for name, home in homes.items():
            self.stages[home][name] = start[name].clone().requires_grad_()
        self.optimizers = [torchs_optimizer([*weights.values()], recipe) for weights in self.stages]
        self.history = [[_copy(weights)] for weights in self.stages]  # by stage and version
        self.losses, self._norms = [], [[] for _ in self.stages]

    def run(self, batches: Sequence[Batch], replicas: int = 1) -> "Emulator":
        """All batches, each cut into rows of replicas and then micro-batches; returns itself."""
        for t, batch in enumerate(patiently(batches, "batches of the serial emulator")):
            every = torch.arange(len(batch.samples))
            rows = [part.tensor_split(self.stream.per_update) for part in every.tensor_split(replicas)]
            loss = 0.0
            for j in range(self.stream.per_update):
                for replica in rows:
                    loss += self._micro_batch(batch, replica[j], t, t * self.stream.per_update + j)
            self.losses.append(loss)
            for stage in range(len(self.stages)):
                replicas_of_stage = len(self.stream.schedule.ranks_of(stage))
                if (t + 1) % replicas_of_stage == 0:  # the end of their round
                    self._update(stage)
        return self

    @property
    def norms(self) -> list[float]:
        """The norm of the gradient of every update, all stages together."""
        return [torch.stack(stages).norm().item() for stages in zip(*self._norms, strict=True)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The newest weights of all stages, by name."""
        return {name: w for versions in self.history for name, w in versions[-1].items()}

    def read(self, kind: str, micro: int) -> dict[str, torch.Tensor]:
        """The weights that the forwards (F) or the backwards (B) of a micro-batch read, stage by stage."""
        found, last = {}, len(self.stages) - 1
        for s, versions in enumerate(self.history):
            found |= versions[self.stream.reads[Op(kind, s, micro)]]
        return found | {HEAD: self.history[0][self.stream.tied[Op(kind, last, micro)]]["wte.weight"]}

    def _micro_batch(self, batch: Batch, rows, t: int, micro: int) -> float:
        forward, backward = self.read("F", micro), self.read("B", micro)
        noise = Noise(self.recipe.seed, t, batch.samples[rows]) if self.model.config.dropout else None
        loss, found = mixed_gradient(
            self.model, forward, backward, batch.tokens[rows], batch.targets[rows], batch.total, noise
        )
        found["wte.weight"] = found["wte.weight"] + found.pop(HEAD)
        for weights in self.stages:
            for name, w in weights.items():
                w.grad = found[name] if w.grad is None else w.grad + found[name]
        return loss

    def _update(self, stage: int) -> None:
        """Clip by the stage's own norm, update, and remember the new version."""
        weights, optimizer = self.stages[stage], self.optimizers[stage]
        limit = self.recipe.clip or float("inf")
        self._norms[stage].append(torch.nn.utils.clip_grad_norm_(weights.values(), limit))
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.rate(len(self._norms[stage]) - 1)
        optimizer.step()
        optimizer.zero_grad()
        self.history[stage].append(_copy(weights))


def mixed_gradient(model, forward: dict, backward: dict, tokens, targets, total: int, noise=None):
    """Loss and gradients by name where the forward reads some weights and the backward finds others in their place.

    Where both are the same it is torch's gradient of the model at these weights, of whatever versions they are.
    """
    leaves = {name: w.clone().requires_grad_() for name, w in forward.items()}
    names = {w.untyped_storage().data_ptr(): name for name, w in leaves.items()}

    def pack(saved):
        name = names.get(saved.untyped_storage().data_ptr())
        return saved if name is None else (name, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(saved):
        return saved if isinstance(saved, torch.Tensor) else backward[saved[0]].as_strided(*saved[1:])

    with saved_tensors_hooks(pack, unpack):
        logits = functional_call(model, leaves, (tokens,), {"noise": noise})
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = loss / total
    found = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, found, strict=True))


def torchs_optimizer(weights: list[torch.Tensor], recipe) -> torch.optim.Optimizer:
    """torch's SGD, or its AdamW, with weight decay for matrices only."""
    matrices, others = [p for p in weights if p.dim() >= 2], [p for p in weights if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)


def _copy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in weights.items()}
