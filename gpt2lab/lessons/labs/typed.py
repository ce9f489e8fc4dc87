"""Plans of the package as typed programs (`types`), and what types say of the bugs of four lessons."""

from dataclasses import replace

import torch

from ...corpus.batches import IGNORED, Batch
from ...experts.mixture import Mixture
from ...model import GPT2
from ...parallel import data, finish
from ...plan import Parallel, Plan, build
from ...ranks.mesh import Mesh
from ...reference import CONFIG, EXPERTS, example_batch, serial_run
from ...transport.pretended import one_of
from ...verify import TOLERANCE, compare, worst
from . import meshes, tensor
from .types import GRADIENT, IllTyped, Types


def types_of(parallel: Parallel, name: str) -> dict[str, str]:
    """What a weight is on each axis, by its Spec: V where it is cut, else whole, and used alike (I) or not (R)."""
    spec, mesh = parallel.specs[name], parallel.mesh
    tensor_parallel = "V" if "tp" in spec.axes else "R" if "tp" in spec.partial else "I"
    found = {"dp": "V" if spec.expert else "R", "cp": "R", "tp": tensor_parallel}
    found = {axis: kind for axis, kind in found.items() if mesh[axis].size > 1}
    return found | ({"tie": "R"} if name in getattr(parallel.engine, "shared", ()) else {})


def typed(plan: Plan, config) -> str:
    """Run a plan's forward, and the sums that finish its gradients, on types: "well typed", or what is refused.

    On this process alone, which is rank 0 while it lasts; of a pipeline its first stage. Raises ValueError for ZeRO,
    and for a plan that cannot run this model.
    """
    plan.check(config, 7, 11)
    if plan.zero or plan.asynchronous:
        raise ValueError(f"Types do not know the sums of {plan}. Use zero=0, and a schedule with a flush.")
    with one_of(0, plan.world), torch.no_grad(), Types().calls() as types:
        parallel = build(replace(plan, data="naive"), config, Mesh(**plan.axes), torch.float64)
        for name, p in parallel.model.named_parameters():
            p.grad = torch.zeros_like(p)
            types.give(p, **types_of(parallel, name))
            types.give(p.grad, **{axis: GRADIENT[kind] for axis, kind in types.of(p).items()})
        try:
            _forward(parallel, types)
            parallel.sync.finish()
            finish.sum_partial(parallel.sync.pieces, parallel.mesh)
            parallel.engine.tie(parallel.sync.pieces, parallel.mesh)
            for name, p in parallel.model.named_parameters():
                if left := [axis for axis, kind in types.of(p.grad).items() if kind == "P"]:
                    raise IllTyped(f"the gradient of {name} is P on axis {left[0]} after the step. Sum it.")
        except IllTyped as error:
            return str(error)
    return "well typed"


def _forward(parallel: Parallel, types: Types) -> None:
    """The loss of this rank's first micro-batch; of a stage without the head, what it sends on."""
    model, batch = parallel.model, parallel.mine(example_batch(parallel.model.config, 7, 11))[0]
    mine = {axis: "V" for axis in ("dp", "cp") if parallel.mesh[axis].size > 1}
    x = model.embed(types.give(batch.tokens, **mine), batch.positions)
    for block in model.h.values():
        x = model.run_block(block, x, batch.positions)
    if model.ln_f is not None:
        model.loss(model.head(x), batch.targets) / batch.total


# ---- the planted bugs of lessons 06, 10, 12 and 15


def _times(factor: float, experts: bool):
    """The sums of gradients, and after them a factor for those of the experts, or for all others."""

    def make(right):
        def finished(self):
            right(self)
            for p in self.pieces:
                p.tensor.grad *= factor if p.spec.expert == experts else 1

        return finished

    return data.Naive, "finish", make


def _columns(edit):
    """A rank's columns of a batch, edited."""
    return Batch, "columns", lambda right: lambda self, index: edit(right(self, index))


def _last_target_lost(batch):
    targets = batch.targets.clone()
    targets[:, -1] = IGNORED
    return replace(batch, targets=targets)


def _own_positions(right):
    return lambda self, tokens, positions, noise=None: right(
        self, tokens, torch.arange(len(positions)), noise
    )


def _detached(right):
    return lambda self, logits, scores, *rest: right(self, logits.detach(), scores.detach(), *rest)


WRONG = [(owner, name, lambda right, wrong=wrong: wrong) for owner, name, wrong in tensor.BUGS.values()]
BUGS = {
    **{("06", bug): ("tp=2", *made) for bug, made in zip(tensor.BUGS, WRONG, strict=True)},
    ("10", "local positions"): ("cp=2", GPT2, "embed", _own_positions),
    ("10", "targets shifted after the split"): ("cp=2", *_columns(_last_target_lost)),
    ("10", "each rank divides by its own count"): (
        "cp=2",
        *_columns(lambda batch: replace(batch, total=int((batch.targets != IGNORED).sum()))),
    ),
    ("12", "experts' gradients averaged"): ("dp=2,ep=2,data=naive", *_times(2.0, experts=True)),
    ("12", "experts' gradients divided"): ("dp=2,ep=2,data=naive", *_times(0.5, experts=True)),
    ("12", "load loss detached"): ("dp=2,ep=2", Mixture, "losses", _detached),
    ("12", "load balanced on each rank"): (
        "dp=2,ep=2",
        Mixture,
        "_grouped",
        lambda right: lambda self, x: x.flatten(0, 1)[None],
    ),
    **{("15", title): bug for title, bug in meshes.BUGS.items()},
}
"""(lesson, bug): the plan on which it shows, and what `meshes.planted` needs."""
BUGS["06", "norms never summed"] = ("tp=2,sp=on", *BUGS["06", "norms never summed"][1:])


def refusal(lesson: str, bug: str) -> str:
    """What types say of a planted bug, on this process alone."""
    text, *planted = BUGS[lesson, bug]
    return meshes.planted(0, 1, planted, lambda *_: typed(Plan.parse(text), _config(text)))


def verify_and_types(pools: dict, lesson: str, bug: str) -> tuple[str, str]:
    """What `verify` finds of a planted bug on live ranks (`pools` by their number), and what types say, in short."""
    text, *planted = BUGS[lesson, bug]
    plan, config = Plan.parse(text), _config(text)
    serial = serial_run(config, 7, 11, "gradients")
    claims = worst(
        pools[plan.world].run(meshes.planted, planted, compare, plan, config, 7, 11, "gradients", serial)
    )
    found = ", ".join(claim.name for claim in claims if not claim.error <= TOLERANCE)
    return found or "equal", refusal(lesson, bug).split(": ")[0].split(". ")[0]


def _config(text: str):
    return EXPERTS if "ep" in Plan.said(text) else CONFIG
