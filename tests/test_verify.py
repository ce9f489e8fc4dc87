"""The check that everything rests on passes for right plans; tests/mutants shows that it fails for wrong ones."""

import re

from gpt2lab.cli import main
from gpt2lab.verify import Claim, Plan, Report


def test_the_table_names_the_tensor_and_the_rank():
    text = Report(Plan(dp=2), [Claim("every gradient", 0.5, "h.0.ln_1.weight", 1)]).table()
    assert "DIFFERS" in text and "h.0.ln_1.weight on rank 1" in text and "5.0e-01" in text


def test_a_table_of_what_is_equal_hides_the_digits_of_rounding_unless_asked():
    report = Report(
        Plan(dp=2), [Claim("every gradient", 3.2e-16, "h.0.ln_1.weight", 1), Claim("loss", 2e-16)]
    )
    assert "< 1e-12" in str(report) and "ln_1" not in str(report)
    exact = report.table(exact=True).splitlines()
    assert exact[1].split() == ["equal", "every", "gradient", "3.2e-16", "h.0.ln_1.weight", "on", "rank", "1"]
    assert exact[2].split() == ["equal", "loss", "2.0e-16"]


def test_the_command_names_the_largest_error_of_each_claim_and_its_tensor(capsys):
    assert main(["verify", "--plan", "serial"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "weights after" in line]
    assert len(lines) == 2 and all(
        re.search(r"\d\.\de[-+]\d\d  [\w.]+ on rank 0$", line) for line in lines
    ), lines
