"""Bugs in Muon, planted on the ranks: the comparison with torch's own Muon on one process notices each of them."""

import pytest
from equality import MODELS
from planting import bugs, controls, is_killed, is_noticed

from gpt2lab import verify
from gpt2lab.parallel import muon
from gpt2lab.plan import Plan
from gpt2lab.run import Options

GRAMS = "[x @ x.mT for x in xs]"
BUGS = {
    "products not summed": (muon.orthogonalised, f"_summed({GRAMS}, cuts, axis)", GRAMS, "tp=2"),
    "an iteration less": (muon.orthogonalised, "range(ITERATIONS)", "range(ITERATIONS - 1)", "serial"),
    "rows taken for columns": (muon.orthogonalised, "cut == 0", "cut == 1", "tp=2"),
    "rate by the slice": (muon.Muon._whole, "shape[cut.dim] = cut.length", "pass", "tp=2"),
    "no look ahead": (muon.Muon.step, "grad.lerp(momentum, MOMENTUM)", "momentum", "serial"),
    "embeddings too": (muon.by_muon, 'piece.decay and piece.name.startswith("h.")', "piece.decay", "serial"),
    "no weight decay": (muon.Muon.step, 'p.mul_(1 - group["lr"] * group["weight_decay"])', "pass", "serial"),
}


def off(pools, bug, plan, limit=1e-6) -> bool:
    ranks = pools[Plan.parse(plan).world]
    return is_noticed(ranks, bug, plan, MODELS["tiny"], limit, depths=("muon",))


@bugs(BUGS)
def test_the_bug_is_noticed(pools, bug, check):
    assert off(pools, bug, check), "nobody noticed"


def test_a_bug_in_a_step_that_torch_has_wrapped_reaches_the_ranks(pools):
    """An optimizer made here wraps its class's step: what ranks are then sent for the table's is a copy."""
    assert verify.verify("serial", MODELS["tiny"], depth="muon").ok
    *bug, check = BUGS["no look ahead"]
    assert off(pools, bug, check)


@controls(BUGS)
def test_nothing_is_noticed_without_a_bug(pools, check):
    assert not off(pools, None, check, 1e-10)


def zero_1_is_refused():
    with pytest.raises(ValueError, match="zero=1 cuts weights flat"):
        Options(plan="dp=2,zero=1", optimizer="muon").check()


REFUSES_LESS = {
    "one stage of ZeRO not refused": (
        muon.check,
        "if plan.zero and",
        "if plan.zero == 3 and",
        zero_1_is_refused,
    ),
    "options do not ask": (Options.check, "self.the_recipe().check(plan)", "pass", zero_1_is_refused),
}


@bugs(REFUSES_LESS)
def test_a_mutant_that_refuses_less_is_noticed(bug, check):
    assert is_killed(bug, check)
