"""Any plan for any model: refused in the parent with numbers and a way out, or it builds on every rank.

That it equals the serial run then is in `equivalence/test_random_plans`.
"""

import re
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import cases, plans, pretended

from gpt2lab import RankFailed
from gpt2lab import verify as verification
from gpt2lab.cli import main
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import tensor
from gpt2lab.plan import Plan, build
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import verify

pytestmark = pytest.mark.live

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
QUICK = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


class Started(Exception):
    """A process would have been started now."""


class NoRanks(Ranks):
    """Stands where live ranks would be, as many as a plan needs."""

    size = ANY

    def __init__(self):
        """Without processes."""

    def run(self, *_, **__):
        """End the call that would have used them."""
        raise Started


def refusal(plan, config, rows, length) -> str | None:
    """Why `verify` refuses, before it starts any process; None where it would start ranks."""
    try:
        verify(plan, config, rows, length, ranks=NoRanks())
    except ValueError as error:
        return str(error)
    except Started:
        return None
    raise AssertionError("neither refused nor started")


def same_reason(a: str, b: str) -> bool:
    """Whether two refusals say the same of other numbers."""
    bare = lambda text: re.sub(r"[\d ,.()%=]+|ranks?|heads?|s\b", " ", text.split("Use ")[0])
    return bare(a) == bare(b)


def ways_out(plan: Plan, text: str) -> list[Plan]:
    """The plans that a refusal names as possible: `Use tp=1, 2, 3 or 6.`, `pp=5 or less`."""
    found = []
    for axis, numbers in re.findall(r"\b(pp|dp|cp|tp|micro|chunks|zero)=(\d+(?:, \d+)*(?: or \d+)?)", text):
        found += [replace(plan, **{axis: int(number)}) for number in re.findall(r"\d+", numbers)]
    return found


def check_refusal(plan, config, rows, length, text):
    """One sentence with the numbers and a way out; every plan it names is free of that fault."""
    assert re.search(r"\d|=\w|'\w+'", text), text
    assert re.search(r"\b(Use|Did you mean|Leave|There are|Take|Give)\b", text), text
    assert len(text) < 400 and "\n" not in text, text
    for other in ways_out(plan, text.split("Use ", 1)[-1]) if "Use " in text else []:
        again = refusal(other, config, rows, length)
        assert again is None or not same_reason(text, again), f"{plan}: {text}\nbut {other}: {again}"


@QUICK
@given(cases(), st.data())
def test_a_plan_is_refused_with_a_way_out_or_builds_on_every_rank(case, data):
    plan, config, rows, length = case
    text = refusal(*case)
    if text is not None:
        check_refusal(*case, text)
        return
    some = {0, plan.world - 1, data.draw(st.integers(0, plan.world - 1))}
    for rank in sorted(some):
        with pretended(rank, plan.world):
            parallel = build(plan, config, Mesh(**plan.axes), torch.float64)
            batch = verification.example_batch(config, rows, length)
            assert len(parallel.mine(batch)) == plan.micro


@pytest.mark.parametrize("axis", ["pp", "tp", "dp"])
def test_the_command_line_refuses_them_before_any_process_starts(axis, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "gpt2lab.processes.pool.Pool.__init__", lambda *_: pytest.fail("a process was started")
    )
    many = {"pp": "pp=64", "tp": "tp=64", "dp": "dp=64"}[axis]
    for command in (["train", "--steps", "1", "--batch", "2"], ["verify"]):
        assert main([*command, "--plan", many]) == 2
        assert re.search(r"\d.* Use ", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_mutant_that_lets_heads_be_cut_is_noticed(pools, monkeypatch):
    """What would follow if nobody refused: an error on a rank, or wrong numbers."""
    monkeypatch.setattr(tensor, "check", lambda *_: None)
    with pytest.raises((AssertionError, RankFailed)):
        assert verify(Plan(tp=3), CONFIG, 4, 8, ranks=pools[3]).ok


def test_mutant_with_a_wrong_way_out_is_noticed(monkeypatch):
    def check(config, plan, rows, length):
        if config.n_head % plan.tp:
            raise ValueError(f"{config.n_head} heads cannot be split over tp={plan.tp}. Use tp=3 or 4.")

    monkeypatch.setattr(tensor, "check", check)
    case = Plan(tp=5), CONFIG, 4, 8
    with pytest.raises(AssertionError, match="but tp=3: 4 heads cannot be split over tp=3"):
        check_refusal(*case, refusal(*case))


def test_mutant_without_a_way_out_is_noticed():
    with pytest.raises(AssertionError):
        check_refusal(Plan(tp=5), CONFIG, 4, 8, "4 heads cannot be split over tp=5.")


@given(plans())
def test_every_random_plan_reads_back(plan):
    assert Plan.parse(str(plan)) == plan
