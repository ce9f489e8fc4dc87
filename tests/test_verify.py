"""The check that everything rests on passes for right plans; tests/mutants shows that it fails for wrong ones."""

import re

import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.ranks import comm
from gpt2lab.verify import Claim, Plan, Report, verify


@pytest.fixture
def ranks(pools):
    return pools[3]


def test_serial_equals_plain_pytorch():
    report = verify("serial")
    assert report.ok, report
    assert {c.name for c in report.claims} >= {"loss", "every gradient", "gradient norm"}


def test_a_report_with_not_a_number_is_not_ok():
    assert not Report(Plan(), [Claim("loss", float("nan"))]).ok


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
    assert len(lines) == 2 and all(re.search(r"\de-\d\d  [\w.]+ on rank 0$", line) for line in lines), lines


def test_comm_refuses_a_graph_that_it_would_cut(ranks):
    def cut(rank, world_size):
        from gpt2lab.ranks.mesh import Mesh

        return comm.all_reduce(torch.ones(2, requires_grad=True), Mesh(dp=3)["dp"])

    with pytest.raises(RuntimeError, match="all_reduce has no backward of its own"):
        ranks.run(cut)
