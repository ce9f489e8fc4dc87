"""A staged plan trains: gradients by stages, one norm over all of them, clip, update, and shared weights renewed."""

import math
from collections.abc import Callable, Sequence

import torch

from ..parallel.finish import Piece, clip
from ..parallel.spec import Spec
from ..ranks import comm
from .run_staged import StageRunner
from .staged import Staged


class StageTrainer:
    """One rank of a staged plan, with its parts of the weights and of the optimizer's state.

    `recipe` has the settings of `train.Recipe`, of which the rate stays as it is; `train.make_optimizer` makes the
    optimizer. A weight that two stages use, the tied embedding, is updated where its gradient is summed, and sent.
    Bytes per rank: those of `Staged.cost` and `Staged.update_cost`.
    """

    def __init__(self, staged: Staged, weights: dict[str, torch.Tensor], recipe, make_optimizer: Callable):
        self.runner, self.recipe = StageRunner(staged), recipe
        self.weights = {name: part.clone() for name, part in self.runner.parts(weights).items()}
        graph = self.runner.program.graph
        self.pieces = [
            Piece(name, part, Spec(), weights[name].dim() >= 2)
            for name, part in self.weights.items()
            if f"grad {name}" in graph.outputs
        ]
        self.optimizer = make_optimizer(self.pieces, recipe)

    def step(self, batches: Sequence[dict[str, torch.Tensor]]) -> tuple[float | None, float]:
        """(mean loss, None where another stage has it; norm of the gradient) of an update on all micro-batches."""
        found = self.runner.run(self.weights, batches)
        targets = sum(batch["targets"].numel() for batch in batches)
        for p in self.pieces:
            p.tensor.grad = (found[f"grad {p.name}"] / targets).reshape(p.tensor.shape)
        square = sum((self._counted(p) for p in self.pieces), torch.zeros((), dtype=torch.float64))
        norm = math.sqrt(comm.all_reduce(square, self.runner.world).item())
        clip(self.pieces, norm, self.recipe.clip)
        self.optimizer.step()
        self.runner.renew(self.weights)
        return (found["loss"].item() / targets if "loss" in found else None), norm

    def _counted(self, p: Piece) -> torch.Tensor:
        """The sum of squares of a gradient's part, on one of the ranks that hold the same."""
        lies = self.runner.program.results[f"grad {p.name}"]
        copies = [axis for name, axis in self.runner.axes.items() if lies.on(name) is None]
        return p.tensor.grad.double().square().sum() * all(axis.rank == 0 for axis in copies)
