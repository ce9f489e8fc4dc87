"""Every row of the table of equality, on live ranks, in float64; and what the table must hold.

Torch's default dtype is float32 meanwhile, as users have it: what computes in the default dtype is off by 1e-8.
`test_default_dtype` runs them with float64 as the default.
"""

import pytest
from equality import ROWS, SLOW_ROWS, rows, spelled_out

from gpt2lab.compositions import WITHOUT_FLUSH, plans_by_pair
from gpt2lab.experts.mixture import ROUTERS
from gpt2lab.parallel.context.exchanges import EXCHANGES
from gpt2lab.parallel.data import FORMS
from gpt2lab.plan import Plan
from gpt2lab.processes.launch import Ranks
from gpt2lab.schedules import NAMES
from gpt2lab.schedules.registry import FREE
from gpt2lab.verify import verify

AXES = ("pipeline", "data", "context", "tensor", "expert")


def equal(row, ranks):
    """Run a row; every claim holds."""
    report = verify(row.plan, row.config, row.rows, row.length, ranks, row.depth)
    assert report.ok, f"{row}\n{report}"


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_plan_equals_the_serial_run(pools, row):
    equal(row, pools[Plan.parse(row.plan).world])


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", SLOW_ROWS, ids=str)
def test_a_large_plan_equals_the_serial_run(row):
    with Ranks(Plan.parse(row.plan).world, echo=False, timeout=120) as ranks:
        equal(row, ranks)


def test_every_strategy_schedule_exchange_router_and_kind_of_pair_has_a_row_of_full_depth():
    deep = [row for row in ROWS if row.depth == "full"]
    plans = [Plan.parse(row.plan) for row in deep]
    free = {generator.name for generator in FREE}
    assert {p.schedule for p in plans if p.pp > 1} >= {*NAMES, *free}
    assert {p.exchange for p in plans if p.cp > 1} >= set(EXCHANGES)
    assert {p.data for p in plans if p.dp > 1 and not p.zero} >= set(FORMS)
    assert {row.config.experts.router for row in deep if row.config.experts} == set(ROUTERS)
    assert {p.zero for p in plans} == {0, 1, 2, 3} and {p.shard > 0 for p in plans if p.zero} == {True, False}
    found = plans_by_pair([row for row in deep if not Plan.parse(row.plan).asynchronous])
    assert not [(a, b) for a in AXES for b in AXES if not found.get((a, b))]
    with_free = plans_by_pair(WITHOUT_FLUSH)
    assert all(with_free.get(("pipeline", axis)) for axis in ("data", "context", "tensor"))
    every = plans_by_pair(ROWS)
    assert all(every[f"ZeRO-{stage}", axis] for stage in (1, 2, 3) for axis in ("tensor", "pipeline"))


def test_rows_are_met_once_and_braces_are_spelled_out():
    keys = [(row.plan, row.config, row.rows, row.length, row.depth == "muon") for row in ROWS]
    assert len(keys) == len(set(keys)), {key[0] for key in keys if keys.count(key) > 1}
    assert spelled_out("a {b|c}=1,{d|}") == ["a b=1,d", "a b=1,", "a c=1,d", "a c=1,"]
