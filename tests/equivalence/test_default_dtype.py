"""The table of equality where torch's default dtype is float64: what computes in a fixed float32 is off by 1e-8."""

import pytest
import torch
from equality import rows
from warm import reference

from gpt2lab.plan import Plan
from gpt2lab.verify import Report, compare, worst

DEEP = (
    "each strategy",
    "experts",
    "without a flush",
)  # groups whose updates are compared under both defaults


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_plan_equals_the_serial_run_where_64_bits_are_the_default(pools, row):
    depth = "muon" if row.depth == "muon" else "steps" if row.group in DEEP else "gradients"
    plan, sizes = Plan.parse(row.plan), (row.config, row.rows, row.length)
    right = reference(plan, *sizes, depth)
    found = pools[plan.world].run(compare, plan, *sizes, depth, right, default=torch.float64)
    assert Report(plan, worst(found)).ok, f"{row}\n{Report(plan, worst(found))}"
