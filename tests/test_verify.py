"""The check that everything rests on passes for right plans; tests/mutants shows that it fails for wrong ones."""

import re
from dataclasses import replace

import pytest

from gpt2lab import verify
from gpt2lab.cli import main
from gpt2lab.verify import Claim, Plan, Report


def test_the_table_names_the_tensor_and_the_rank():
    text = Report(Plan(dp=2), [Claim("every gradient", 0.5, "h.0.ln_1.weight", 1)]).table()
    assert "DIFFERS" in text and "h.0.ln_1.weight on rank 1" in text and "5.0e-01" in text


def test_a_table_of_what_is_equal_hides_the_digits_of_rounding_unless_asked():
    claims = Claim("every gradient", 3.2e-16, "h.0.ln_1.weight", 1), Claim("loss", 2e-16)
    report = Report(Plan(dp=2), list(claims))
    assert "< 1e-12" in str(report) and "ln_1" not in str(report)
    exact = report.table(exact=True).splitlines()
    assert exact[1].split() == ["equal", "every", "gradient", "3.2e-16", "h.0.ln_1.weight", "on", "rank", "1"]
    assert exact[2].split() == ["equal", "loss", "2.0e-16"]


def test_the_command_names_the_largest_error_of_each_claim_and_its_tensor(capsys):
    assert main(["verify", "--plan", "serial"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "weights after" in line]
    named = [re.search(r"\d\.\de[-+]\d\d  [\w.]+ on rank 0$", line) for line in lines]
    assert len(named) == 2 and all(named), lines


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,schedule=pipedream"])
def test_ranks_are_held_against_what_one_process_computed_before(pools, monkeypatch, plan):
    """A long serial run on the ranks would be a silence of all of them, which is taken for a hang."""
    right = verify.expected

    def doubled(*given):
        found = right(*given)
        if isinstance(found, list):
            return [replace(one, norms=[2 * norm for norm in one.norms]) for one in found]
        return replace(found, norm=2 * found.norm)

    monkeypatch.setattr(verify, "expected", doubled)
    wrong = [c.name for c in verify.verify(plan, ranks=pools[2], depth="gradients").claims if c.error > 1e-10]
    assert len(wrong) == 1 and "norm" in wrong[0]
