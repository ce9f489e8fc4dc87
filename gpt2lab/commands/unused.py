"""Words of a plan that change nothing beside its other words: refused where somebody has typed them.

Plans that a program makes, and those of runs that were recorded before, are not asked: there such a word is harmless.
"""

from ..machine.words import refuse
from ..plan import Plan
from ..schedules.registry import find

OF_PIPELINES = ("schedule", "chunks", "active")
OF_SEQUENCES = ("layout", "exchange", "hops")


def without_effect(plan: Plan) -> dict[str, str]:
    """The words that change nothing in this plan, whatever their value, each with the reason."""
    found, options = {}, find(plan.schedule).options
    if plan.pp == 1:
        found |= dict.fromkeys(OF_PIPELINES, "pp=1 has no pipeline")
    elif not {"chunks", "slices"} & set(options):
        found["chunks"] = f"schedule={plan.schedule} has one way to cut the model"
    if plan.cp == 1:
        found |= dict.fromkeys(OF_SEQUENCES, "cp=1 leaves sequences whole")
    elif not plan.exchange.startswith("halo"):
        found["hops"] = f"exchange={plan.exchange} has no halo"
    if plan.ep == 1:
        found["node"] = "ep=1 sends no rows to experts"
    if plan.dp * plan.cp == 1:
        found |= dict.fromkeys(("data", "bucket"), "one replica has nobody to sum gradients with")
    elif plan.data != "bucket" or plan.zero:
        found["bucket"] = f"zero={plan.zero} has none" if plan.zero else f"data={plan.data} has none"
    return found


def refuse_without_effect(text: str) -> None:
    """Raise ValueError for a plan's text that says a word without effect, with the reason."""
    said = Plan.said(text)
    refuse(said, without_effect(Plan.parse(text)), lambda word: f"{word}={said[word]}")
