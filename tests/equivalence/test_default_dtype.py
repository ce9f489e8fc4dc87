"""The table of equality where torch's default dtype is float64: what computes in a fixed float32 is off by 1e-8."""

import pytest
import torch
from equality import rows

from gpt2lab.plan import Plan
from gpt2lab.verify import Report, compare, worst

DEEP = (
    "each strategy",
    "experts",
    "without a flush",
)  # groups whose updates are compared under both defaults


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_plan_equals_the_serial_run_where_64_bits_are_the_default(pools, row):
    plan, sizes = Plan.parse(row.plan), (row.rows, row.length)
    depth = "muon" if row.depth == "muon" else "steps" if row.group in DEEP else "gradients"
    found = pools[plan.world].run(compare, plan, row.config, *sizes, depth, default=torch.float64)
    assert Report(plan, worst(found)).ok, f"{row}\n{Report(plan, worst(found))}"
