"""Training in 16 bits on live ranks: with float32 master weights, without them, and what becomes of sums in bfloat16.

Micikevicius et al. 2018, "Mixed precision training": weights in 16 bits for computing, a 32-bit copy for the update.
"""

import torch

from ...model import GPT2Config
from ...plan import Plan
from ...planner.memory import memory
from ...reference import CONFIG, example_batch, example_weights
from ...train import Recipe
from .instruments import trainer_by

RECIPE = Recipe("adamw", lr=2e-4, weight_decay=0.0, clip=None)


def train(rank: int, world_size: int, text: str, dtype: torch.dtype, steps: int = 25):
    """Losses of `steps` updates of a plan with weights of a type, and the share of weights that the updates moved.

    `zero` keeps float32 master weights where `dtype` is narrower; a plan without it updates the narrow weights.
    """
    trainer, batch = trainer_by(text, CONFIG, RECIPE, dtype), example_batch(CONFIG, 8, 11)
    parallel = trainer.parallel
    parallel.load(example_weights(CONFIG))
    weights = lambda: torch.cat([p.detach().flatten() for p in parallel.model.parameters()])
    before = weights()
    losses = [trainer.step(batch).loss for _ in range(steps)]
    return losses, (weights() != before).double().mean().item()


def memory_by_part(models: dict[str, tuple[int, int]], ranks: int) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by part on the fullest rank, by model ((layers, width) of a GPT-2) and ZeRO stage.

    Weights in 16 bits with float32 masters, a sequence of 2,048 tokens a rank, only blocks' inputs kept.
    """
    plans = {"replicas": "dp=1,zero=1"} | {f"stage {k}": f"dp={ranks},zero={k}" for k in (1, 2, 3)}
    found = {}
    for name, (layers, width) in models.items():
        config = GPT2Config(n_positions=2048, n_layer=layers, n_head=width // 128, n_embd=width)
        held = lambda plan, config=config: memory(plan, config, plan.dp, 2048, itemsize=2)[0].parts
        found[name] = {stage: held(Plan.parse(f"{text},recompute=on")) for stage, text in plans.items()}
    return found
