"""Of what the gradients of live stages are gradients: torch's own at the weights that each scheme promises, or none."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from gpt2lab.corpus.batches import IGNORED
from gpt2lab.emulate import HEAD, TwoEnds
from gpt2lab.lessons.labs.staleness import homes_of
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import default_dtype, example_batch, example_weights
from gpt2lab.train import Recipe, Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)
BATCHES, LR = [example_batch(CONFIG, 7, 11, t) for t in range(8)], 0.1


@default_dtype(torch.float64)
def every_update(rank, world_size, text):
    """Each update of this stage: its gradients, and its weights before it; the last weights at the end."""
    plan, seen = Plan.parse(text), []
    parallel = build(plan, CONFIG, Mesh(**plan.axes), torch.float64)
    parallel.load(example_weights(CONFIG))
    trainer = Trainer(parallel, Recipe("sgd", lr=LR, clip=None, weight_decay=0.0))
    own, right = [p for p in parallel.sync.pieces if not p.spec.tied_copy], trainer._update

    def update(norm):
        seen.append(
            [
                {p.name: t.detach().clone() for p, t in pairs}
                for pairs in ([(p, p.tensor.grad) for p in own], [(p, p.tensor) for p in own])
            ]
        )
        return right(norm)

    trainer._update = update
    trainer.stream(BATCHES)
    return seen, {name: p.detach().clone() for name, p in parallel.model.named_parameters()}


def true_gradient(weights, batch):
    """Torch's gradient, by name, of the serial model at these weights; the head may have a version of its own."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    logits = functional_call(TwoEnds(CONFIG).double(), leaves, (batch.tokens,))
    loss = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    found = dict(zip(leaves, torch.autograd.grad(loss / batch.total, list(leaves.values())), strict=True))
    return found | {"wte.weight": found["wte.weight"] + found.pop(HEAD)}


def distance(a, b):
    norm = lambda grads: torch.stack([g.norm() for g in grads.values()]).norm()
    return (norm({name: a[name] - b[name] for name in b}) / norm(b)).item()


READS = {  # version of stage s of n for batch t
    "pp=4,schedule=pipedream": lambda s, n, t: max(0, t - (n - 1 - s)),
    "pp=4,schedule=pipedream_vertical": lambda s, n, t: max(0, t - (n - 1)),
    "pp=2,micro=2,schedule=2bw": lambda s, n, t: max(0, t - 1),
    "pp=3,micro=3,schedule=2bw": lambda s, n, t: max(0, t - 1),
    "pp=4,schedule=ampnet": None,
}


@pytest.mark.parametrize("text", READS)
def test_the_gradient_is_torchs_at_the_weights_of_the_paper_or_that_of_no_weights(pools, text):
    plan, version = Plan.parse(text), READS[text]
    found, homes = pools[plan.pp].run(every_update, text), homes_of(CONFIG, plan.pp)
    last = [weights for _, weights in found]
    assert torch.equal(last[0]["wte.weight"], last[-1]["wte.weight"])  # both ends of the embedding, drained
    whole = lambda read: {name: read(stage)[name] for name, stage in homes.items()}
    at = lambda v: whole(lambda stage: found[stage][0][v][1])
    for t, batch in enumerate(BATCHES):
        gradient = whole(lambda stage, t=t: found[stage][0][t][0])
        for stage, (seen, end) in enumerate(found):  # the update is w(t+1) = w(t) - lr g, on each stage
            after = seen[t + 1][1] if t + 1 < len(seen) else end
            for name, w in seen[t][1].items():
                assert torch.allclose(after[name], w - LR * gradient[name], rtol=0, atol=1e-14), (stage, name)
        if version:
            read = whole(lambda stage, t=t: found[stage][0][version(stage, plan.pp, t)][1])
            head = found[0][0][version(0, plan.pp, t)][1]["wte.weight"]
            assert distance(gradient, true_gradient({**read, HEAD: head}, batch)) < 1e-12
        elif t >= plan.pp:
            every = [at(v) for v in range(t + 1)]
            apart = [distance(gradient, true_gradient({**w, HEAD: w["wte.weight"]}, batch)) for w in every]
            assert min(apart) > 1e-3, apart
