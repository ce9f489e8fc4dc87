"""From a plan that was found to what runs on live ranks: a uniform one by `plan.build`, any other by stages."""

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


def uniform(problem: ChainProblem, plan: ChainPlan) -> str | None:
    """The text of a `Plan` that cuts every operator alike, as this plan does; None where it does not.

    A pipeline's stages are then equally large blocks; where it cuts the layers is `plan.build`'s own choice.
    """
    if len({(at.count, at.cut) for at in plan}) > 1:
        return None
    names = {"sample": "dp", "attribute": "cp", "parameter": "tp", "whole": None}
    sizes = {"pp": len({at.first for at in plan}), "dp": 1, "cp": 1, "tp": 1}
    for size, kind in zip(problem.mesh(plan[0].first, plan[0].count).values(), plan[0].cut, strict=True):
        if size > 1 and names[kind] is None:
            return None
        sizes |= {names[kind]: sizes[names[kind]] * size} if size > 1 else {}
    said = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return ",".join(said + ([f"micro={problem.micros}"] if sizes["pp"] > 1 else [])) or "serial"
