"""Plans: read, printed back, refused in one sentence."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2lab import verify
from gpt2lab.cli import main
from gpt2lab.compositions import PAIRS, WITH_EXPERTS, WITHOUT_FLUSH
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.run import Options
from gpt2lab.schedules.registry import FREE, GENERATORS
from gpt2lab.verify import Claim

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_a_printed_plan_reads_back_equal(dp, tp, micro, recompute, zero):
    plan = Plan(dp=dp, tp=tp, micro=micro, recompute=recompute, zero=zero)
    assert Plan.parse(str(plan)) == plan


def test_serial_has_three_spellings():
    assert Plan.parse("serial") == Plan.parse("") == Plan.parse(" dp=1 ") == Plan()


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("dp=two", "dp=two is not a whole number. Use for example dp=2."),
        ("dp=0", "dp=0 is no number of parts. Use dp=1 or more."),
        ("recmpute=on", "it knows no 'recmpute'. Did you mean recompute=...?"),
        ("recompute=maybe", "recompute=maybe is neither on nor off."),
        ("dp", "dp= is not a whole number"),
        ("dp=²", "dp=² is not a whole number. Use for example dp=2."),
        ("dp=２", "dp=２ is not a whole number. Use for example dp=2."),
        ("micro=1_0", "micro=1_0 is not a whole number. Use for example micro=2."),
        ("dp=٢", "dp=٢ is not a whole number."),
        ("dp=--2", "dp=--2 is not a whole number."),
        ("dp=2,tp=2,dp=3", "A plan says dp once, and 'dp=2,tp=2,dp=3' says it twice."),
    ],
)
def test_a_wrong_plan_is_one_sentence_with_the_way_out(text, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?").replace(".", r"\.")):
        Plan.parse(text)


@pytest.mark.parametrize("name", [generator.name for generator in GENERATORS + FREE])
def test_every_spelling_of_a_schedule_is_the_same_plan(name):
    plan = Plan(pp=2, micro=4, schedule=name)
    for said in (name.upper(), name.title(), name.replace("_", "-"), name.replace("_", "-").upper()):
        assert Plan.parse(f"pp=2,micro=4,schedule={said}") == plan == Plan(pp=2, micro=4, schedule=said)
        assert str(replace(plan, schedule=said)) == str(plan)


def test_more_replicas_than_rows_are_refused_before_any_process_starts():
    with pytest.raises(ValueError, match=r"\(8 x 1 = 8\)\. Use at least 8 rows"):
        Plan(dp=8).check(CONFIG, rows=7, length=11)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("dp=2,zero=-1", "zero=-1 is no stage of ZeRO. Use zero=1, 2 or 3, or 0"),
        ("tp=2,schedule=1b1f", "There is no pipeline schedule '1b1f'. There are naive"),
        ("dp=2,exchange=letters", "there is no exchange called 'letters'. Use one of"),
        ("dp=2,layout=zigzg", "there is no layout called 'zigzg'. Use one of"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_also_where_nobody_would_ask_for_it(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        Plan.parse(text).check(CONFIG, rows=7, length=11)


def test_what_the_plan_says_of_loss_and_micro_batches_is_not_overruled():
    assert Options(plan="loss=whole").the_plan().loss == "whole"
    assert Options(plan="dp=2").the_plan().loss == "chunked"
    assert Options(plan="micro=2", accumulate=2).the_plan().micro == 2
    for options in ({"plan": "micro=4", "accumulate": 2}, {"plan": "loss=chunked", "chunked": False}):
        with pytest.raises(ValueError, match="Leave one of them out"):
            Options(**options).the_plan()


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="Sequences of 17 tokens do not fit into 16 positions. Use 1 to 16."):
        Plan().check(CONFIG, rows=7, length=17)


def test_a_serial_build_is_the_serial_model():
    parallel = build(Plan(), CONFIG, Mesh())
    assert sum(p.tensor.numel() for p in parallel.sync.pieces) == CONFIG.parameters


@pytest.mark.parametrize("error", [2e-16, 0.5, math.nan])
def test_plans_verify_prints_each_plan_with_its_largest_error_and_fails_when_one_differs(
    error, monkeypatch, capsys
):
    claims = [Claim("loss", 1e-16, "loss"), Claim("every gradient", error, "wpe.weight", 3)]
    monkeypatch.setattr(verify, "verify", lambda plan, config: verify.Report(Plan.parse(plan), claims))
    assert main(["plans", "--verify", "--ranks", "4"]) == (0 if error < 1e-10 else 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PAIRS) + len(WITH_EXPERTS) + len(WITHOUT_FLUSH)
    assert all("every gradient, wpe.weight on rank 3" in line for line in lines)
    assert all(line.startswith("equal" if error < 1e-10 else "DIFFERS") for line in lines)
