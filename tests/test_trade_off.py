"""The trade-off map: what is computed for a strategy is what live ranks counted; the decision path; the capstone."""

import statistics
from dataclasses import replace

import pytest

from gpt2lab.lessons.exercises import trade_off as exercises
from gpt2lab.lessons.labs import decisions
from gpt2lab.lessons.labs import trade_off as lab
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner.problem import find_cluster
from gpt2lab.plots.trade_off import envelopes, trade_off_map

SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=4, n_embd=16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_computed_is_what_live_ranks_counted(pools, ranks):
    counted = lab.count(lab.STRATEGIES, ranks, SMALL, 8, 16, pools[ranks])
    for strategy, point in counted.items():
        computed = lab.compute(strategy, ranks, SMALL, 8, 16)
        assert (point.sent, point.messages) == (computed.sent, computed.messages), strategy
        assert point.flops == pytest.approx(computed.flops, rel=1e-12), strategy
        assert point.held == pytest.approx(computed.held, rel=0.25), strategy


def test_a_strategy_on_one_rank_is_the_serial_run():
    alone = lab.compute("data", 1, SMALL, 8, 16)
    assert (alone.sent, alone.messages, alone.flops) == (0, 0, 1.0)
    counted = lab.count_step(0, 1, Plan(), SMALL, 8, 16)
    assert counted.held == pytest.approx(alone.held, rel=0.1) and counted.sent == 0
    # forward and backward of all matrices: 6 operations a weight and token (attention's kernel apart)
    matrices = 12 * SMALL.n_layer * SMALL.n_embd**2 + SMALL.vocab_size * SMALL.n_embd
    assert counted.flops == 6 * matrices * 8 * 16


@pytest.mark.slow
def test_the_record_is_what_live_ranks_count(pools):
    for ranks, points in lab.recorded().items():
        again = lab.count(lab.STRATEGIES, ranks, lab.SMALL, lab.ROWS, lab.TOKENS, pools[ranks])
        for strategy, point in points.items():
            same = replace(again[strategy], held=point.held)
            assert same == point and again[strategy].held == pytest.approx(point.held, rel=0.05), strategy


@pytest.mark.parametrize("ranks", lab.RANKS)
def test_what_is_computed_is_what_was_recorded(ranks):
    points = lab.recorded()[ranks]
    assert list(points) == list(lab.STRATEGIES)
    for strategy, point in points.items():
        computed = lab.compute(strategy, ranks, lab.SMALL, lab.ROWS, lab.TOKENS)
        assert (point.sent, point.messages) == (computed.sent, computed.messages), strategy
        assert point.flops == pytest.approx(computed.flops, rel=1e-12), strategy
        assert point.held == pytest.approx(computed.held, rel=0.25), strategy


CASES = decisions.GRID | decisions.CAPSTONE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_gpt2lab_plan_chooses(name):
    assert CASES[name].chosen() == decisions.recorded()[name]


@pytest.mark.parametrize("name", ["two V100 machines", "two A100 machines, few rows"])
def test_the_bar_of_the_capstone_is_what_gpt2lab_plan_chooses(name):
    assert CASES[name].chosen() == decisions.recorded()[name]


def test_the_decision_path_keeps_up_with_the_planner():
    """The agreement that lesson 20 tells."""
    choices, slower, same = decisions.recorded(), [], []
    assert list(choices) == list(CASES)
    for name, case in CASES.items():
        found, passed = decisions.decide(case)
        assert case.fits(found) and (passed[-1].tp, passed[-1].pp) == (found.tp, found.pp)
        slower.append(case.seconds(found) / case.seconds(choices[name]) - 1)
        same.append(decisions.same_mesh(str(found), str(choices[name])))
    assert min(slower) > -0.05 and statistics.median(slower) < 0.1
    assert max(slower) < 0.3 and sum(same) >= 0.75 * len(same)


def test_the_envelope_has_the_formulas_of_the_lesson():
    case = decisions.Workload(
        GPT2Config(n_positions=2048, n_layer=32, n_head=32, n_embd=4096), find_cluster("h100x64"), 64, 2048
    )
    device, network = case.cluster.device, case.cluster.network
    wide = decisions.envelope(case, 8, 1)
    assert wide.tensor == pytest.approx(8 * 7 * 2 * device.rate / (72 * 4096 * network.inside.bandwidth))
    assert wide.bubble == 0 and not wide.local and wide.dp == 8
    piped, head = decisions.envelope(case, 1, 8), 50257 / 12 / 4096
    slowest = 8 * (4 + head) / (32 + head)
    compute = 6 * case.config.parameters * 2048 / device.rate
    message = 2048 * 4096 * 2 / network.between.bandwidth  # eight rows a replica: eight micro-batches of one
    assert piped.local and piped.tensor == 0
    assert piped.bubble == pytest.approx(slowest * (1 + 7 / 24) - 1 + 2 * (7 + 8) * message / compute)
    flat = decisions.envelope(case, 1, 1)
    # tokens that backward needs to hide the sums: a ring over whole machines has all their eight cards
    hidden = 2 * device.rate / (2 * 8 * network.between.bandwidth)
    assert flat.sums == pytest.approx(2 / 3 * hidden / 2048)
    assert flat.exposed == 0 < flat.sums and piped.exposed == piped.sums
    short = decisions.envelope(replace(case, length=512), 1, 1)
    assert (
        short.sums == pytest.approx(4 * flat.sums) and short.exposed == pytest.approx(short.sums - 2 / 3) != 0
    )
    one_card = (
        2 * 2 * case.config.parameters / 8 / network.between.bandwidth
    )  # of a ring with a rank in each machine
    assert wide.sums == pytest.approx(one_card * device.rate / (6 * case.config.parameters * 2048))
    one_machine = decisions.envelope(case, 8, 1, 8)
    assert one_machine.idle == 7 / 8 and one_machine.total >= 7 and not flat.idle
    assert [one.total for one in decisions.mesh_shapes(case)] == sorted(
        one.total for one in decisions.mesh_shapes(case)
    )


def test_nothing_fits_is_said_with_no_plan():
    tiny = find_cluster("v100x64").with_devices(2)
    case = decisions.Workload(
        GPT2Config(n_positions=2048, n_layer=96, n_head=96, n_embd=12288), tiny, 2, 2048
    )
    assert decisions.decide(case)[0] is None and not case.fits(Plan.parse("dp=2"))


def test_a_plan_is_scaled_down_with_its_strategies():
    small = exercises.scaled(Plan.parse("pp=8,dp=8,tp=8,micro=32,zero=2,sp=on"))
    assert str(small) == "pp=2,dp=2,tp=2,micro=3,zero=2,sp=true"
    assert str(exercises.scaled(Plan.parse("dp=8,micro=16"))) == "dp=2,micro=3"


def test_the_map_shows_every_strategy_and_what_is_done_twice():
    lines = {s: [(n, lab.compute(s, n, SMALL, 8, 16)) for n in (2, 4)] for s in lab.STRATEGIES}
    fig = trade_off_map(lines, lab.compute("data", 1, SMALL, 8, 16), mark=4)
    left, right = fig.axes
    assert left.get_xlabel().startswith("MB") and len(left.collections) == len(lines)
    sizes = [one.get_sizes().tolist() for one in left.collections]
    assert sizes == [[30, 100]] * len(lines)  # the mark of 4 ranks is large
    assert sum("operations" in t.get_text() for t in right.texts) == 2  # recompute, ZeRO-3
    shapes = decisions.mesh_shapes(decisions.CAPSTONE["two H100 machines"])
    first = shapes[0].pp, shapes[0].dp, shapes[0].tp
    bold = [t.get_weight() for t in envelopes(shapes, first).axes[0].get_yticklabels()]
    assert bold == ["bold"] + ["normal"] * (len(shapes) - 1)
