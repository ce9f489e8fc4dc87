"""What a run reports, in float32, bfloat16 and under autocast: its losses and its norm are sums in enough bits."""

import pytest
import torch

from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.train import Recipe, Trainer

HOW = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}
SUMS = {"float32": 1e-6, "autocast": 1e-3, "bfloat16": 1e-3}  # against sums in 64 bits


def reported(rank, world_size, plan, how, length) -> dict[str, float]:
    """How far the reported numbers are from sums in 64 bits of the same token losses and gradients, relatively."""
    config = GPT2Config(vocab_size=37, n_positions=128, n_layer=2, n_head=1, n_embd=8)
    plan, batch = Plan.parse(plan), example_batch(config, 128, length)
    start = {n: t.to(HOW[how]) for n, t in example_weights(config).items()}
    parallel, model = build(plan, config, Mesh(**plan.axes), HOW[how]), GPT2(config).to(HOW[how])
    parallel.load(start)
    model.load_state_dict(start)
    trainer = Trainer(parallel, Recipe(autocast=how == "autocast"))
    with torch.no_grad(), trainer._autocast():
        logits = model(batch.tokens).double().flatten(0, 1)
    right = torch.nn.functional.cross_entropy(logits, batch.targets.flatten()).item()
    loss, norm = trainer.gradients(batch)
    grads = [
        g for held in comm.gather_objects(parallel.gradients(), parallel.mesh.world) for g in held.items()
    ]
    square = sum(g.double().square().sum().item() for g in dict(grads).values())
    found = {
        "training": loss / right,
        "evaluation": trainer.evaluate([batch]) / right,
        "norm": norm / square**0.5,
    }
    return {name: abs(ratio - 1) for name, ratio in found.items()}


@pytest.mark.parametrize(
    "plan", ["", "micro=128", "dp=2,micro=64", "pp=2,micro=128", "pp=2,micro=16,schedule=zb_v"]
)
@pytest.mark.parametrize("loss", ["whole", "chunked"])
@pytest.mark.parametrize("how", SUMS)
def test_reported_losses_and_norms_are_sums_in_enough_bits(pools, how, loss, plan):
    """Sums of 1,024 to 16,384 token losses; in 16 bits each token's loss is rounded, but not their sum."""
    plan = f"{plan},loss={loss}".strip(",")
    for length in (8, 128):
        found = pools[Plan.parse(plan).world].run(reported, plan, how, length)[0]
        assert max(found.values()) <= SUMS[how], (length, found)
