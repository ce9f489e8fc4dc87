"""Labs on plans: operators placed by hand, the explorer over the planner, the trade-off map and the decision path."""

import json
import random
import statistics
from dataclasses import replace

import pytest
import torch
from lesson_cells import after, definitions
from planting import under

from gpt2lab.benchmarks.plans import agreement, compared
from gpt2lab.lessons.exercises import trade_off as exercises
from gpt2lab.lessons.labs import automatic, decisions, explorer, placement, trade_off
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner.balance import every_cut
from gpt2lab.planner.cuts import Assignment
from gpt2lab.planner.problem import find_cluster, gpt2_block
from gpt2lab.planner.search import PLANNERS, stages_of
from gpt2lab.plots.trade_off import envelopes, trade_off_map
from gpt2lab.reference import example_batch, example_weights, serial_gradients, serial_model
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.staged import Staged
from gpt2lab.sharding.tofu import LinkChain

# --- operators on the ranks where they are placed


CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
X = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def error_and_bytes(pool, where, groups, parallel):
    found = pool.run(placement.run_placed, where, CONFIG, X, groups, parallel)
    return placement.furthest(found, placement.run_serially(CONFIG, X, parallel)), [f[3] for f in found]


@pytest.mark.parametrize("groups, parallel", [(1, False), (1, True), (2, False), (4, True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_placed_block_equals_the_serial_one_and_sends_what_is_predicted(pools, groups, parallel, seed):
    graph = gpt2_block(CONFIG, 3, 7, groups, parallel, itemsize=8)
    draw = random.Random(seed)
    where = [draw.randrange(3) for _ in range(len(graph) - 1)] + [2]
    error, sent = error_and_bytes(pools[3], where, groups, parallel)
    predicted = definitions("16", "def bytes_of_placement")["bytes_of_placement"]
    assert error < 1e-12 and sent == predicted(graph, where)


def test_a_branch_with_the_weights_of_another_is_noticed(pools):
    k_has_those_of_q = lambda right: lambda *given: right(*given) | {"k": right(*given)["q"]}
    where = [0, 0, 0, 1, 2, 0, 0, 0, 1, 2, 1, 0]
    assert error_and_bytes(pools[3], where, 1, False)[0] < 1e-12
    found = pools[3].run(
        under((placement, "block_functions", k_has_those_of_q), placement.run_placed), where, CONFIG, X
    )
    assert placement.furthest(found, placement.run_serially(CONFIG, X)) > 1e-3


def test_every_cut_of_the_layers_trains_the_same(pools):
    cuts = [placement.blocks_of(bounds) for bounds in every_cut(CONFIG.n_layer + 2, 2)]
    assert cuts == [[range(0, n), range(n, 3)] for n in (0, 1, 2, 3)]
    found = pools[2].run(placement.steps_with_cuts, cuts, CONFIG, 4, 8, 2)
    losses = [loss for _, all_losses in found for loss in all_losses]
    assert max(losses) - min(losses) < 1e-5 and len(losses) == 8


def test_a_device_is_fitted_to_measured_products():
    device, found = placement.measured_device((16, 64, 256), seconds=0.01)
    assert device.rate > 0 and device.launch >= 0 and all(seconds > 0 for seconds in found.values())


def test_layer_times_name_every_layer():
    found = placement.layer_times(CONFIG, 2, 8, repeat=1)
    assert len(found) == CONFIG.n_layer + 2 and all(f > 0 and b > 0 for f, b in found)


# --- lesson 17


def test_plans_are_told_in_short_and_belong_to_a_family():
    half = (Assignment(0, 2, ("whole", "sample")), Assignment(2, 2, ("whole", "attribute")))
    assert (automatic.words(half), automatic.plan_family(half)) == ("-S | -A", "stages, cut inside")
    alone = (Assignment(0, 1), Assignment(1, 1))
    assert (automatic.words(alone), automatic.plan_family(alone)) == ("-- | --", "stages")
    assert automatic.plan_family((Assignment(0, 4, ("sample", "parameter")),) * 2) == "cut over all devices"


def test_a_slow_link_makes_stages_and_a_fast_one_cuts():
    best = lambda slow: automatic.plan_family(PLANNERS["Alpa"].plan(automatic.problem(slow)).plan)
    assert best(20e6) == "stages, cut inside" and best(2e9) == "cut over all devices"


def test_five_plans_are_three_uniform_ones_and_two_pipelines():
    plans = after("17", "live = ")["five"].values()
    stages = [[(at.first, *at.cut) for at in dict.fromkeys(plan)] for plan in plans]
    rows, weights = "sample", "parameter"
    whole = [[(0, rows, rows)], [(0, weights, weights)], [(0, rows, weights)]]
    assert stages == whole + [[(0, "whole", cut), (2, "whole", cut)] for cut in (rows, weights)]


def test_live_plans_have_the_serial_loss_and_the_predicted_bytes(pools):
    names = after("17", "live = ")
    given, config = names["live"], automatic.LIVE
    plans = {name: names["five"][name] for name in ("data between, tensor inside", "two stages, data inside")}
    plans["MCMC (FlexFlow)"] = PLANNERS["MCMC (FlexFlow)"].plan(given).plan
    chain = LinkChain(captured_gpt2(config, given.rows, given.length))
    staged = {name: Staged(chain, stages_of(given, plan)) for name, plan in plans.items()}
    found = pools[4].run(automatic.run_plans, staged, given.rows, given.length, given.micros, 1)
    batch = example_batch(config, given.rows * given.micros, given.length)
    want = batch.total * serial_gradients(serial_model(config, example_weights(config)), batch)[0].item()
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
    longer, all_of_it = (explorer.explorer(*asked(length=n)).get_suptitle() for n in (1024, 128))
    assert longer == f"{all_of_it}\nrows of 128 tokens, all that nano has"


@pytest.mark.live
def test_the_explorer_runs_a_small_plan():
    title = explorer.explorer(*asked(rows=2, length=16), "yes").get_suptitle()
    assert title.endswith("on live ranks here (paced)")


def test_the_record_of_predicted_and_measured_holds_what_it_is_said_to_hold():
    found = agreement(compared(json.loads(explorer.RECORD.read_text())))
    assert found["plans"] >= 100 and found["rank correlation"] >= 0.9
    assert found["chosen over best measured"] <= 1.1
    assert found["median error of the time"] <= 0.15
    assert found["share with memory within 5 %"] == 1


# --- lesson 20


SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=4, n_embd=16)


def counted_as_computed(counted, ranks, *sizes):
    assert list(counted) == list(trade_off.STRATEGIES)
    for strategy, point in counted.items():
        computed = trade_off.compute(strategy, ranks, *sizes)
        assert (point.sent, point.messages) == (computed.sent, computed.messages), strategy
        assert point.flops == pytest.approx(computed.flops, rel=1e-12), strategy
        assert point.held == pytest.approx(computed.held, rel=0.25), strategy


@pytest.mark.slow  # lesson 20 counts them on 2 live ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_computed_is_what_live_ranks_counted(pools, ranks):
    counted = trade_off.count(trade_off.STRATEGIES, ranks, SMALL, 8, 16, pools[ranks])
    counted_as_computed(counted, ranks, SMALL, 8, 16)


def test_a_strategy_on_one_rank_is_the_serial_run():
    alone = trade_off.compute("data", 1, SMALL, 8, 16)
    assert (alone.sent, alone.messages, alone.flops) == (0, 0, 1.0)
    counted = trade_off.count_step(0, 1, Plan(), SMALL, 8, 16)
    assert counted.held == pytest.approx(alone.held, rel=0.1) and counted.sent == 0
    # forward and backward of all matrices: 6 operations a weight and token (attention's kernel apart)
    matrices = 12 * SMALL.n_layer * SMALL.n_embd**2 + SMALL.vocab_size * SMALL.n_embd
    assert counted.flops == 6 * matrices * 8 * 16


@pytest.mark.slow
def test_the_record_is_what_live_ranks_count(pools):
    for ranks, points in trade_off.recorded().items():
        again = trade_off.count(
            trade_off.STRATEGIES, ranks, trade_off.SMALL, trade_off.ROWS, trade_off.TOKENS, pools[ranks]
        )
        for strategy, point in points.items():
            same = replace(again[strategy], held=point.held)
            assert same == point and again[strategy].held == pytest.approx(point.held, rel=0.05), strategy


@pytest.mark.parametrize("ranks", trade_off.RANKS)
def test_what_is_computed_is_what_was_recorded(ranks):
    recorded, sizes = trade_off.recorded()[ranks], (trade_off.SMALL, trade_off.ROWS, trade_off.TOKENS)
    counted_as_computed(recorded, ranks, *sizes)


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
        same.append(found.axes == choices[name].axes)
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
    assert short.sums == pytest.approx(4 * flat.sums)
    assert short.exposed == pytest.approx(short.sums - 2 / 3) != 0
    # of a ring with a rank in each machine
    one_card = 2 * 2 * case.config.parameters / 8 / network.between.bandwidth
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
    lines = {s: [(n, trade_off.compute(s, n, SMALL, 8, 16)) for n in (2, 4)] for s in trade_off.STRATEGIES}
    fig = trade_off_map(lines, trade_off.compute("data", 1, SMALL, 8, 16), mark=4)
    left, right = fig.axes
    assert left.get_xlabel().startswith("MB") and len(left.collections) == len(lines)
    families = [t.get_text() for t in left.get_legend().get_texts()]
    assert families == ["data", "ZeRO", "tensor", "pipeline", "context"]
    sizes = [one.get_sizes().tolist() for one in left.collections]
    assert sizes == [[30, 100]] * len(lines)  # the mark of 4 ranks is large
    assert sum("% work" in t.get_text() for t in right.texts) == 2  # recompute, ZeRO-3
    shapes = decisions.mesh_shapes(decisions.CAPSTONE["two H100 machines"])
    first = shapes[0].pp, shapes[0].dp, shapes[0].tp
    bold = [t.get_weight() for t in envelopes(shapes, first).axes[0].get_yticklabels()]
    assert bold == ["bold"] + ["normal"] * (len(shapes) - 1)
