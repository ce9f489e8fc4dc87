"""Bugs in Muon, planted on the ranks: the comparison with torch's own Muon on one process notices each of them."""

from functools import partial

import pytest
from equality import MODELS
from planting import SIZES, compare_with_bug, is_killed, noticed, rewritten
from warm import reference

from gpt2lab.parallel import muon
from gpt2lab.plan import Plan
from gpt2lab.run import Options

TINY = MODELS["tiny"]


def rewritten_on_the_rank(function, right, wrong):
    owner, _, name = function.rpartition(".")
    return rewritten(getattr(getattr(muon, owner) if owner else muon, name), right, wrong)


GRAMS = "[x @ x.mT for x in xs]"
MUTANTS = {
    "products not summed": ("tp=2", "orthogonalised", f"_summed({GRAMS}, cuts, axis)", GRAMS),
    "an iteration less": ("serial", "orthogonalised", "range(ITERATIONS)", "range(ITERATIONS - 1)"),
    "rows taken for columns": ("tp=2", "orthogonalised", "cut == 0", "cut == 1"),
    "rate by the slice": ("tp=2", "Muon._whole", "shape[cut.dim] = cut.length", "pass"),
    "no look ahead": ("serial", "Muon.step", "grad.lerp(momentum, MOMENTUM)", "momentum"),
    "embeddings too": ("serial", "by_muon", 'piece.decay and piece.name.startswith("h.")', "piece.decay"),
    "no weight decay": ("serial", "Muon.step", 'p.mul_(1 - group["lr"] * group["weight_decay"])', "pass"),
}


def found(ranks, name):
    plan, *text = MUTANTS[name] if name else ("tp=2",)
    plan = Plan.parse(plan)
    bug = partial(rewritten_on_the_rank, *text) if text else ()
    serial = reference(TINY, *SIZES, "muon")
    if plan.world == 1:
        return [compare_with_bug(0, 1, serial, bug, plan, TINY, "muon")]
    return ranks.run(compare_with_bug, serial, bug, plan, TINY, "muon")


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_noticed(pools, name):
    assert noticed(found(pools[2], name)), f"nobody noticed: {name}"


def test_nothing_is_noticed_without_a_bug(pools):
    assert not noticed(found(pools[2], None), 1e-10)


def zero_1_is_refused():
    with pytest.raises(ValueError, match="zero=1 cuts weights flat"):
        Options(plan="dp=2,zero=1", optimizer="muon").check()


@pytest.mark.parametrize(
    "bug",
    [
        (muon.check, "if plan.zero and", "if plan.zero == 3 and"),
        (Options.check, "self.the_recipe().check(plan)", "pass"),
    ],
    ids=["one stage of ZeRO not refused", "options do not ask"],
)
def test_a_mutant_that_refuses_less_is_noticed(bug):
    assert is_killed(bug, zero_1_is_refused)
