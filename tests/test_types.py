"""Types of parallel programs: the table is closed under gradients, plans are well typed, planted bugs are not."""

import pytest
import torch
from planting import is_killed, planted

from gpt2lab.compositions import Composition
from gpt2lab.lessons.labs import meshes, typed, types
from gpt2lab.lessons.labs.types import ARROWS, GRADIENT, IllTyped, Types
from gpt2lab.parallel import tensor
from gpt2lab.plan import Plan
from gpt2lab.ranks.axis import Axis
from gpt2lab.reference import CONFIG, EXPERTS
from gpt2lab.transport.pretended import one_of

BACK = {"all_to_all": "all_to_all", "ring_shift": "ring_shift"}  # the call that each makes on the way back
for there, back in (
    ("copy_to", "reduce_from"),
    ("all_gather", "reduce_scatter"),
    ("gather_replicated", "scatter_to"),
    ("broadcast", "reduce"),
    ("gather", "scatter"),
):
    BACK |= {there: back, back: there}
SEEN = {  # what types say of the planted bugs; of all others nothing
    "bias added n times": "add(V, I) on axis tp",
    "f is missing": "linear(I, V, V) on axis tp",
    "g sums backward as well": "add(R, I) on axis tp",
    "norms never summed": "add(V, I) on axis tp",
    "clipped before the sum": "pow(P) on axis dp",
    "tied gradient not summed": "the gradient of wte.weight is P on axis tie",
    "summed over dp, not dp+cp": "the gradient of wte.weight is P on axis cp",
}
PLANS = "tp=2", "tp=2,sp=on", "dp=2,cp=2,tp=2", "pp=2,dp=2,micro=2", "cp=2,exchange=heads", "dp=2,ep=2"


def test_what_a_call_makes_backward_has_the_types_of_the_gradients():
    assert set(BACK) == set(ARROWS) - {"all_reduce"}
    for call, back in BACK.items():
        (takes, *_), makes = ARROWS[call]
        assert GRADIENT[makes] in ARROWS[back][0] and ARROWS[back][1] == GRADIENT[takes], call
    assert all(GRADIENT[GRADIENT[kind]] == kind for kind in GRADIENT)


@pytest.mark.parametrize("plan", PLANS)
def test_plans_are_well_typed(plan):
    assert typed.typed(Plan.parse(plan), EXPERTS if "ep" in plan else CONFIG) == "well typed"


@pytest.mark.parametrize("router, plan", [("deepseek", "tp=2,sp=on"), ("mixtral", "dp=2,ep=2,tp=2,sp=on")])
def test_what_would_arrive_decides_nothing(router, plan, monkeypatch):
    """Memory that nobody has written holds anything: here the worst."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert typed.typed(Plan.parse(plan), Composition("", router=router).config) == "well typed"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "pp=2,schedule=pipedream"])
def test_plans_whose_sums_types_do_not_know_are_refused_and_not_accused(plan):
    with pytest.raises(ValueError, match=f"Types do not know .*{plan.split(',')[1]}.*Use zero=0"):
        typed.typed(Plan.parse(plan), CONFIG)


def test_plans_that_cannot_run_are_refused_in_their_own_words():
    with pytest.raises(
        ValueError, match="loss=chunked needs the whole vocabulary on a rank, and tp=2 cuts it"
    ):
        typed.typed(Plan.parse("tp=2,loss=chunked"), CONFIG)


def test_a_forgotten_g_is_refused():
    forgotten = tensor.Edge, "leave", lambda right: lambda self, x: x
    said = meshes.planted(0, 1, forgotten, lambda *_: typed.typed(Plan.parse("tp=2"), CONFIG))
    assert said.startswith("add(V, I) on axis tp")


def test_types_see_seven_of_the_planted_bugs():
    found = {bug: typed.refusal(lesson, bug) for lesson, bug in typed.BUGS}
    assert {bug for bug, said in found.items() if said != "well typed"} == set(SEEN) and len(found) == 16
    assert all(found[bug].startswith(said) for bug, said in SEEN.items()), found


def test_verify_sees_a_bug_that_types_do_not(pools):
    bug = "12", "experts' gradients divided"
    assert typed.verify_and_types(pools, *bug) == ("every gradient, gradient norm", "well typed")


def test_an_i_stays_alone_and_terms_of_a_sum_are_added_scaled_and_moved_and_nothing_else():
    kinds = Types()
    p, q, r, v, i = (kinds.give(torch.ones(2, 2), dp=kind) for kind in "PPRVI")
    with kinds:
        for sums in (
            *(p + q, 2 * p, p @ r, p / r, torch.cat([p, q]).T.T.flatten(), p.sum(), sum([p, q])),
            *(p.mean(), p[0], p.clone().add_(q), torch.add(p, other=q, alpha=2), p.to(torch.float64)),
        ):
            assert kinds.of(sums) == {"dp": "P"}
        for wrong in (
            lambda: p * q,
            lambda: p + 1.0 * r,
            lambda: p + torch.ones(2, 2),
            lambda: p.exp(),
            lambda: p @ v,
            lambda: r / p,
            lambda: torch.div(torch.ones(2, 2), p),
            lambda: p + 1,
            lambda: 0.5 - p,
            lambda: torch.add(p, other=r),
            lambda: torch.nn.functional.linear(p, r, bias=r[0]),
            lambda: torch.nn.functional.linear(p, r, r[0]),
        ):
            with pytest.raises(IllTyped, match="on axis dp: of terms"):
                wrong()
        for other in (r, v):
            for add in (lambda x: x + i, lambda x: torch.add(x, other=i)):
                with pytest.raises(IllTyped, match="the gradient of I would be one rank's part"):
                    add(other)
        room = kinds.give(torch.zeros(2, 2), dp="R")
        room[0] = v[0]
        assert kinds.of(room) == {"dp": "V"}
        assert [kinds.of(x) for x in (i * i, r * v, torch.ones(2))] == [{"dp": "I"}, {"dp": "V"}, {}]


def test_a_call_refuses_what_it_does_not_take():
    kinds, axis = Types(), Axis("tp", (0, 1), 0)
    with kinds.calls(), pytest.raises(IllTyped, match="copy_to of V on axis tp: it takes I."):
        types.comm.copy_to(kinds.give(torch.ones(2), tp="V"), axis)


@pytest.mark.parametrize(
    "call, takes, makes", [("all_gather", "V", "R"), ("broadcast", "V", "R"), ("reduce", "P", "V")]
)
def test_what_a_call_brings_later_has_its_type(call, takes, makes):
    kinds, axis = Types(), Axis("tp", (0, 1), 0)
    with one_of(0, 2), kinds.calls():
        x = kinds.give(torch.ones(2, 2), tp=takes)
        later = getattr(types.comm, call)(x, axis, async_op=True)
        assert kinds.of(later.wait()) == {"tp": makes} and kinds.of(later.wait() * 2) == {"tp": makes}


WRONG = {
    "an I may meet others": (types._joined, 'if "I" in found', 'if "X" in found'),
    "any operator may take terms": (types._joined, "name in LINEAR and", ""),
    "two terms may be multiplied": (types._joined, "terms == 1 and", ""),
    "a term may meet what varies": (types._joined, 'found <= {"P", "R"}', "True"),
    "a constant may be added to a term": (types._joined, "terms == len(kinds)", "True"),
    "a bias may be added to terms": (types._joined, "len(kinds) < 3", "True"),
    "gradients left as terms": (typed.typed, 'kind == "P"', 'kind == "X"'),
}


def test_the_tied_embedding_is_summed():
    assert typed.refusal("15", "tied gradient not summed") != "well typed"


@pytest.mark.parametrize("mutant", WRONG)
def test_a_mutant_without_a_rule_is_noticed(mutant):
    test = test_an_i_stays_alone_and_terms_of_a_sum_are_added_scaled_and_moved_and_nothing_else
    assert is_killed(WRONG[mutant], test_the_tied_embedding_is_summed if "left" in mutant else test)


def test_a_mutant_with_a_wrong_gradient_is_noticed():
    wrong = lambda: planted(typed, "GRADIENT", lambda right: right | {"R": "R"})
    assert is_killed(wrong, lambda: test_plans_are_well_typed("pp=2,dp=2,micro=2"))
