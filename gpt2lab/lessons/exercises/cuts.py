"""Checkers of lesson 06: which cut for which layer of AlexNet sends the least, and letters of weights."""

from itertools import pairwise

from ...model import GPT2, GPT2Config
from ...reference import CONFIG
from . import Task, returned, scored

RANKS, IMAGES = 8, 128
MAKES = {"batch": "images", "columns": "features", "rows": "sums"}
"""What each cut leaves on a rank: its images' outputs, its features of all, or its part of a sum of all."""

CHANGES = {
    ("images", "batch"): 0,
    ("images", "columns"): 2,  # an all-gather forward, a reduce-scatter backward
    ("images", "rows"): 2 / RANKS,  # an all-to-all each way
    ("features", "batch"): 2 / RANKS,
    ("features", "columns"): 2,
    ("features", "rows"): 0,
    ("sums", "batch"): 2,
    ("sums", "columns"): 4,  # an all-reduce each way
    ("sums", "rows"): 2,
}
"""What it costs to give the next layer what its cut needs: times (n-1)/n of the activations in between."""

BAR, BEST = 45, 39.3


def megabytes(cuts: list[str]) -> float:
    """What a rank sends in a step, forward and backward, in MB of float32: gradients of weights, and activations."""
    from ...plots.tensor import ALEXNET  # not above: a rank draws nothing

    assert len(cuts) == len(ALEXNET), f"AlexNet has {len(ALEXNET)} layers, and you cut {len(cuts)}"
    strange = [cut for cut in cuts if str(cut) not in MAKES]
    assert not strange, f"{strange[0]!r} is no cut. Use batch, columns or rows"
    total = 2 * sum(w for (_, w, _), cut in zip(ALEXNET, cuts, strict=True) if cut == "batch")
    for (_, _, activations), (cut, following) in zip(ALEXNET, pairwise([*cuts, "batch"]), strict=True):
        total += CHANGES[MAKES[cut], following] * IMAGES * activations
    return (RANKS - 1) / RANKS * 4 / 1e6 * total


def choose(answer) -> str:
    """Exercise: the cut of each of AlexNet's eight layers; the score is what a rank sends."""
    cuts = returned(answer())
    cuts = cuts.split() if isinstance(cuts, str) else list(cuts)
    return scored(round(megabytes(cuts), 1), "MB", bar=BAR, best=BEST)


WEIGHTS = [name for name, _ in GPT2(GPT2Config(8, 8, 1, 1, 8)).named_parameters()]


def _letters(name: str, sp: bool) -> str:
    """The letters of a weight and its gradient on axis tp, by the package's own types."""
    from ...plan import Plan, build
    from ...ranks.mesh import Mesh
    from ...transport.pretended import one_of
    from ..labs.typed import types_of
    from ..labs.types import GRADIENT

    plan = Plan(tp=2, sp=sp)
    with one_of(0, 2):
        kind = types_of(build(plan, CONFIG, Mesh(**plan.axes)), name)["tp"]
    return kind + GRADIENT[kind]


def _weight(chance) -> tuple[str, bool]:
    """A weight of any layer, and whether there is sequence parallelism."""
    layer = chance.randrange(CONFIG.n_layer)
    return chance.choice(WEIGHTS).replace("h.0.", f"h.{layer}."), chance.random() < 0.5


letters = Task(
    _letters,
    [(name, sp) for sp in (False, True) for name in WEIGHTS],
    what="{0}, sp={1}",
    drawn=_weight,
    like=lambda found, _: "".join(found),
    closed=("gpt2lab.lessons.labs", "gpt2lab.parallel"),
)
