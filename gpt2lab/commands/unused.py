"""Words of a plan that change nothing beside its other words: refused where somebody has typed them.

Plans that a program makes, and those of runs that were recorded before, are not asked: there such a word is harmless.
"""

from ..machine.words import refuse
from ..plan import Plan
from ..schedules.registry import find

OF_PIPELINES = ("schedule", "chunks", "active")


def without_effect(plan: Plan) -> dict[str, str]:
    """The words that change nothing in this plan, each with the reason."""
    replicas, cuts = plan.dp * plan.cp, {"chunks", "slices"} & set(find(plan.schedule).options)
    by, found = f"zero={plan.zero}" if plan.zero else f"data={plan.data}", {}
    if plan.pp == 1:
        found |= dict.fromkeys(OF_PIPELINES, "pp=1 has no pipeline")
    if plan.cp == 1:
        found |= dict.fromkeys(("layout", "exchange", "hops"), "cp=1 leaves sequences whole")
    if replicas == 1:
        found |= dict.fromkeys(("data", "bucket"), "one replica has nobody to sum gradients with")
    others = {  # of ZeRO on one replica, stage 2 collects a block's gradients and stage 3 runs blocks again
        "chunks": not cuts and f"schedule={plan.schedule} has one way to cut the model",
        "hops": not plan.exchange.startswith("halo") and f"exchange={plan.exchange} has no halo",
        "node": plan.ep == 1 and "ep=1 sends no rows to experts",
        "bucket": by != "data=bucket" and f"{by} has none",
        "zero": replicas == plan.zero == 1 and "one replica has nobody to share its optimizer with",
        "shard": replicas == plan.shard and f"all {replicas} replicas share without it",
        "recompute": plan.zero == 3 and plan.pp == 1 and not plan.refill and "zero=3 runs blocks again",
    }
    return {word: why for word, why in others.items() if why} | found


def refuse_without_effect(text: str, narrow: bool = False, muon: bool = False) -> None:
    """Raise ValueError for a plan's text that says a word without effect, with the reason.

    One replica too has 32-bit masters of `narrow` (16-bit) weights by ZeRO, and the owners of matrices that Muon needs.
    """
    used = ["zero=1"] * narrow + ["data=owner"] * muon
    said = Plan.said(text)
    typed = lambda word: word if isinstance(said[word], bool) else f"{word}={said[word]}"
    refuse([word for word in said if typed(word) not in used], without_effect(Plan.parse(text)), typed)
