"""One rank's training step on a device that does not exist: which plans mix it with tensors of the CPU.

    python tests/device_steps.py PLAN...

Tensors are fake here: they have a shape and a device, but no numbers, and PyTorch refuses every operation that mixes
two devices, as it would with a real GPU. Collectives do nothing. Prints a JSON object: for every plan what went wrong
on its first and last stage, or the devices of its weights and gradients. Under `mutant` it says what a forgotten move
of the batch gives.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from plan_cases import pretended
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration as registration

from gpt2lab.corpus.batches import Batch
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.context.exchanges import Split
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=8)


class Gpu(registration._DummyBackendModule):
    """What PyTorch wants to know of a device before it is autocast on."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def move(model, device, dtype):
    """Module.to, which cannot swap fake parameters."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else torch.nn.Parameter(p.detach().to(device, dtype))
    return model


def devices(text: str, rank: int) -> list[str]:
    """Where weights and gradients are after a step and an evaluation of one rank of a plan."""
    plan = Plan.parse(text)
    config = replace(CONFIG, n_layer=4 if plan.pp > 1 else 1)
    fakes = (  # what needs numbers
        (torch.nn.Module, "to", move),
        (torch.Tensor, "item", lambda _: 1.0),
        (torch.Tensor, "__float__", lambda _: 1.0),
        (torch.Tensor, "__bool__", lambda _: True),
        (Split, "_check", lambda *_: None),
        (Batch, "check", lambda *_: None),
    )
    with ExitStack() as stack:
        stack.enter_context(pretended(rank, plan.world))
        for fake in fakes:
            stack.enter_context(patch.object(*fake))
        stack.enter_context(FakeTensorMode())
        tokens, positions, samples = torch.ones(7, 12, dtype=torch.long), torch.arange(12), torch.arange(7)
        batch = Batch(tokens, tokens.clone(), positions, samples, tokens.numel())
        trainer = Trainer(build(plan, config, Mesh(**plan.axes), device="gpu"))
        trainer.step(batch)
        trainer.evaluate([batch])
        held = [p.tensor for p in trainer.parallel.sync.pieces]
        return sorted({str(t.device) for t in [*held, *(h.grad for h in held)]})


def outcome(text: str) -> list:
    """The devices of the first stage's and the last stage's first rank, or what went wrong."""
    plan, found = Plan.parse(text), []
    for rank in sorted({0, plan.world // plan.pp * (plan.pp - 1)}):
        try:
            found.append(devices(text, rank))
        except Exception as error:
            found.append(f"rank {rank}: {type(error).__name__}: {error}"[:500])
    return found


if __name__ == "__main__":
    registration._setup_privateuseone_for_python_backend("gpu", Gpu())
    found = {text: outcome(text) for text in sys.argv[1:]}
    with patch.object(Batch, "to", lambda batch, _: batch):
        found["mutant"] = outcome("dp=2")
    print(json.dumps(found))
