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


@pytest.mark.parametrize("name", [generator.name for generator in GENERATORS + FREE])
def test_every_spelling_of_a_schedule_is_the_same_plan(name):
    plan = Plan(pp=2, micro=4, schedule=name)
    for said in (name.upper(), name.title(), name.replace("_", "-"), name.replace("_", "-").upper()):
        assert Plan.parse(f"pp=2,micro=4,schedule={said}") == plan == Plan(pp=2, micro=4, schedule=said)
        assert str(replace(plan, schedule=said)) == str(plan)


def test_what_the_plan_says_of_loss_and_micro_batches_is_not_overruled():
    assert Options(plan="loss=whole").the_plan().loss == "whole"
    assert Options(plan="dp=2").the_plan().loss == "chunked"
    assert Options(plan="micro=2", accumulate=2).the_plan().micro == 2
    for options in ({"plan": "micro=4", "accumulate": 2}, {"plan": "loss=chunked", "chunked": False}):
        with pytest.raises(ValueError, match="Leave one of them out"):
            Options(**options).the_plan()


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
