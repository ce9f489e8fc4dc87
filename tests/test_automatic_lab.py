"""Lesson 17's problem and live plans: what binds, families of plans, losses and bytes of plans on four ranks."""

from math import inf

import pytest

from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.planner.cuts import Assignment
from gpt2lab.planner.execute import uniform
from gpt2lab.planner.search import PLANNERS


def test_plans_are_told_in_short_and_belong_to_a_family():
    half = (Assignment(0, 2, ("whole", "sample")), Assignment(2, 2, ("whole", "attribute")))
    assert (lab.words(half), lab.plan_family(half)) == ("-S | -A", "stages, cut inside")
    alone = (Assignment(0, 1), Assignment(1, 1))
    assert (lab.words(alone), lab.plan_family(alone)) == ("-- | --", "stages")
    assert lab.plan_family((Assignment(0, 4, ("sample", "parameter")),) * 2) == "cut over all devices"


def test_a_slow_link_makes_stages_and_a_fast_one_cuts():
    best = lambda slow: lab.plan_family(PLANNERS["Alpa"].plan(lab.problem(slow)).plan)
    assert best(20e6) == "stages, cut inside" and best(2e9) == "cut over all devices"


def test_what_binds_is_what_helps():
    slow = lab.problem(1e6, layers=3, cuts=("sample",))
    plan = (Assignment(0, 4, ("sample", "sample")),) * 3
    won = lab.binding(slow, plan)
    assert 40 < won["slow link"] < 50 and won["compute"] < 10 and won["memory"] == 0
    tight = lab.problem(1e6, memory=30e6, layers=3, cuts=("sample",))
    fits = PLANNERS["every pipeline"].plan(tight)
    assert lab.binding(tight, fits.plan)["memory"] > 0
    assert PLANNERS["every pipeline"].plan(lab.problem(1e6, memory=1e6, layers=3)).seconds == inf


def test_five_plans_are_three_uniform_ones_and_two_pipelines():
    given = lab.live_problem()
    texts = [uniform(given, plan) for plan in lab.five_plans(given).values()]
    assert texts == ["dp=4", "tp=4", "dp=2,tp=2", "pp=2,dp=2,micro=2", "pp=2,tp=2,micro=2"]


def test_live_plans_have_the_serial_loss_and_the_predicted_bytes(pools):
    given = lab.live_problem()
    every = lab.five_plans(given) | lab.more_plans(given, 1)
    plans = {
        name: every[name] for name in ("data between, tensor inside", "two stages, data inside", "drawn 1")
    }
    staged = lab.staged_plans(lab.chain(given), given, plans)
    want = lab.summed_loss(given.rows, given.length, given.micros)
    found = pools[4].run(lab.run_plans, staged, given.rows, given.length, given.micros, 1)
    for name in plans:
        losses = [one[name][1] for one in found if one[name][1] is not None]
        assert losses and losses == pytest.approx([want] * len(losses), rel=1e-12)
        assert all(one[name][3] for one in found) and all(one[name][0] > 0 for one in found)
