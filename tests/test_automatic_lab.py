"""Lesson 17: its problem, live plans, the explorer over the real planner, and the record of predicted and measured."""

import pytest

from gpt2lab.benchmarks.plans import agreement, compared
from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.lessons.labs import explorer
from gpt2lab.model import PRESETS
from gpt2lab.planner.cuts import Assignment
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


def test_five_plans_are_three_uniform_ones_and_two_pipelines():
    plans = lab.five_plans(lab.live_problem()).values()
    stages = [[(at.first, *at.cut) for at in dict.fromkeys(plan)] for plan in plans]
    rows, weights = "sample", "parameter"
    whole = [[(0, rows, rows)], [(0, weights, weights)], [(0, rows, weights)]]
    assert stages == whole + [[(0, "whole", cut), (2, "whole", cut)] for cut in (rows, weights)]


def test_live_plans_have_the_serial_loss_and_the_predicted_bytes(pools):
    given = lab.live_problem()
    every = lab.five_plans(given) | lab.more_plans(given, 1)
    chosen = ("data between, tensor inside", "two stages, data inside", "drawn 1", "MCMC (FlexFlow)")
    plans = {name: every[name] for name in chosen}
    staged = lab.staged_plans(lab.chain(given), given, plans)
    want = lab.summed_loss(given.rows, given.length, given.micros)
    found = pools[4].run(lab.run_plans, staged, given.rows, given.length, given.micros, 1)
    for name in plans:
        losses = [one[name][1] for one in found if one[name][1] is not None]
        assert losses and losses == pytest.approx([want] * len(losses), rel=1e-12)
        assert all(one[name][3] for one in found) and all(one[name][0] > 0 for one in found)
    used = {rank for at in plans["MCMC (FlexFlow)"] for rank in at.devices}
    sent_by_the_idle = [one["MCMC (FlexFlow)"][2] for one in found[2:]]
    assert used == {0, 1} and sent_by_the_idle == [0, 0]


def asked(memory_GB=4.0, link_GBps=10.0, model="nano", devices=2, rows=4, length=32):
    return model, devices, memory_GB, link_GBps, rows, length


def binding(**numbers):
    where = asked(**numbers)
    machine, goal = explorer.machine_of(*where[:4]), explorer.goal_of(where[0], *where[4:])
    return explorer.binds(explorer.chosen(*where), PRESETS[where[0]], machine, goal)


def test_what_binds_is_what_helps():
    free, slow = binding(), binding(link_GBps=1e-3)
    assert free["devices"] > 40 and free["memory"] == 0 and set(free) == set(slow)
    limit = explorer.chosen(*asked()).prediction.memory / 1e9
    assert binding(memory_GB=0.9 * limit)["memory"] > 0
    least = explorer.chosen(*asked(link_GBps=1e-6)).plan  # so slow a link that the second node is of no use
    assert least.world == 1 and binding(link_GBps=1e-6)["link between nodes"] == 0


@pytest.mark.parametrize("devices", [2, 4])
def test_the_explorer_draws_the_planners_choice(devices):
    choice = explorer.chosen(*asked(devices=devices))
    fig = explorer.explorer(*asked(devices=devices))
    feasible, ranks, binds, clock = fig.axes
    assert str(choice.plan) in fig.get_suptitle()
    assert len(feasible.lines[0].get_xdata()) == len(choice.front)
    numbers = [text.get_text() for text in ranks.texts if text.get_text().isdigit()]
    assert numbers == [str(rank) for rank in range(choice.plan.world)]
    assert len(binds.patches) == 4 and len(clock.get_yticklabels()) == choice.plan.pp
    assert clock.get_xlim()[1] == pytest.approx(1e3 * choice.prediction.seconds)


def test_the_explorer_says_what_is_short_and_what_is_too_large_to_run():
    short = explorer.explorer(*asked(memory_GB=0.01)).axes[0].texts[0].get_text()
    assert short.startswith("No plan of up to 2 ranks fits into")
    large = explorer.explorer(*asked(model="gpt2", memory_GB=80.0), "yes").get_suptitle()
    assert large.endswith("too large to run here: take nano or mini, and four devices")


def test_the_explorer_runs_a_small_plan():
    title = explorer.explorer(*asked(rows=2, length=16), "yes").get_suptitle()
    assert title.endswith("on live ranks here (paced)")


def test_the_record_of_predicted_and_measured_holds_what_it_is_said_to_hold():
    found = agreement(compared(explorer.recorded()))
    assert found["plans"] >= 100 and found["rank correlation"] >= 0.9
    assert found["chosen over best measured"] <= 1.1
    assert found["median error of the time"] <= 0.15
    assert found["share with memory within 5 %"] == 1
