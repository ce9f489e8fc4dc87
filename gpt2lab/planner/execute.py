"""From a plan that was found to what runs on live ranks: stages, each cut in its own way."""

from ..sharding.staged import CutStage
from .cuts import ChainPlan, ChainProblem

LINK_NAMES = {"whole": "", "sample": "batch", "attribute": "seq"}


def stages_of(problem: ChainProblem, plan: ChainPlan) -> list[CutStage]:
    """The stages that `sharding.staged` runs, for operators that `gpt2_cuts` made, clustered or not."""
    found: list[CutStage] = []
    link, last = 0, sum(op.links for op in problem.operators) - 1
    for n, (op, at) in enumerate(zip(problem.operators, plan, strict=True)):
        shape = problem.mesh(at.first, at.count)
        own = [i for i, size in enumerate(shape.values()) if size > 1]
        mesh = {axis: size for axis, size in shape.items() if size > 1}
        choices = []
        for k in range(link, link + op.links):
            names = LINK_NAMES | {"parameter": "vocab" if k in (0, last) else "heads" if k % 2 else "ff"}
            choices.append(tuple(names[at.cut[i]] for i in own))
        if n and plan[n - 1].devices == at.devices:
            choices = [*found.pop().choices, *choices]
        found.append(CutStage(link + op.links - len(choices), tuple(choices), tuple(at.devices), mesh))
        link += op.links
    return found
