"""No plan costs less than its bound says, and a search that is told so finds what brute force finds."""

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import accumulate, product

import pytest
from planting import planted

from gpt2lab.commands.plan import wired
from gpt2lab.model import PRESETS
from gpt2lab.plan import Plan
from gpt2lab.planner import bounds as bounds_file
from gpt2lab.planner import space
from gpt2lab.planner.bounds import Bounds
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.cost import predict
from gpt2lab.planner.memory import memory
from gpt2lab.planner.models import find_model
from gpt2lab.planner.problem import PRECISIONS, find_cluster
from gpt2lab.planner.share import order_of
from gpt2lab.planner.space import PRUNED, SCHEDULES, candidates, proposals, runs

CASES = {
    "gpus": ("h100x64", 64, "7b", 128, 2048, "bf16-mixed"),
    "slow wires": ("v100x64", 16, "gpt2-medium", 48, 1024, "bf16-mixed-fp32-grads"),
    "cores": ("laptop", 4, "nano", 12, 32, "float32"),
    "cores, of which few are faster": ("laptop", 2, "nano", 1, 16, "float32"),
    "long": ("a100x64", 16, "llama3-8b", 16, 8192, "bf16"),
    "thin wires": ("h100x64", 16, "gpt2-xl", 50, 1024, "bf16-mixed"),
    "thin wires, three cards": ("h100x64", 12, "gpt2-large", 23, 1024, "bf16"),
}
THIN = {
    "thin wires": (None, 1.25e9),
    "thin wires, three cards": (3, 1e8),
}  # cards, bytes a second of a machine
SLOWED = {"cores, of which few are faster": ((1, 0.3), (2, 0.5))}


def cluster_of(name: str, ranks: int, thin: str = ""):
    """So many ranks of a cluster, perhaps on wires of `THIN`."""
    found = wired(find_cluster(name).with_devices(ranks), *THIN.get(thin, (None, None)))
    return replace(found, slowed=SLOWED.get(thin, found.slowed))


def too_high(name: str, count: int = 20, seed: int = 1) -> list[str]:
    """Of some plans of a case those that are said to cost less than their bounds, with both ratios."""
    cluster, ranks, model, rows, length, precision = CASES[name]
    cluster, config = cluster_of(cluster, ranks, name), find_model(model, length)
    itemsize, mixed = PRECISIONS[precision]
    least, found, known = Bounds(config, cluster, rows, length, itemsize, mixed), [], {}
    for plan in random.Random(seed).sample(list(candidates(config, cluster, rows, length)), count):
        said = predict(plan, config, rows, length, cluster, itemsize, True, known, mixed)
        (seconds, size), fullest = least.of(plan), least.fullest(plan)
        in_time, in_memory = seconds / said.seconds, (size / said.memory, fullest / said.memory)
        if not (0 < in_time <= 1 + 1e-9 and 0 < min(in_memory) <= max(in_memory) <= 1 + 1e-9):
            found.append(f"{plan}: {in_time:.3f} {in_memory}")
        if least.ideal(plan.world) > said.seconds:
            found.append(f"{plan}: ideal")
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("name", CASES)
def test_no_plan_costs_less_than_its_bound(name):
    assert not too_high(name)


def test_sums_between_machines_are_no_slower_than_their_cards():
    """A step of few tokens on two machines is mostly such sums."""
    cluster, config = find_cluster("a100x64").with_devices(16), find_model("gpt2-xl", 64)
    itemsize, mixed = PRECISIONS["bf16-mixed"]
    least = Bounds(config, cluster, 16, 64, itemsize, mixed)
    for plan in (Plan(dp=16), Plan(dp=16, zero=1)):
        said = predict(plan, config, 16, 64, cluster, itemsize, mixed=mixed)
        assert said.parts["dp+cp"] > 0.4 * said.seconds >= 0.4 * least.of(plan)[0]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("pp=4,dp=16,micro=32", 0.9),
        ("pp=4,dp=16,micro=32,zero=1,schedule=interleaved", 0.8),
        ("pp=4,dp=4,cp=4,micro=128,zero=1,schedule=zb_v,exchange=heads", 0.9),
        ("dp=64,micro=8,zero=3,shard=8,refill=true", 0.9),
        ("dp=64,micro=8,zero=2", 0.9),
        ("dp=64,micro=8,zero=3,refill=true", 0.6),  # gathered twice
    ],
)
def test_what_thin_wires_cost_most_is_in_the_bound(text, share):
    """Else thousands of plans are predicted for nothing: a search for 64 GPUs on 10 Gbit/s did not end in minutes."""
    cluster, config, plan = cluster_of("h100x64", 64, "thin wires"), find_model("13b", 4096), Plan.parse(text)
    itemsize, mixed = PRECISIONS["bf16-mixed"]
    said = predict(plan, config, 512, 4096, cluster, itemsize, mixed=mixed).seconds
    assert share * said < Bounds(config, cluster, 512, 4096, itemsize, mixed).of(plan)[0] <= said * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("pp=16,tp=8,micro=32,sp=true", 0.975),
        ("pp=8,dp=2,tp=8,micro=16,zero=1,schedule=interleaved,sp=true", 0.975),
        ("pp=16,tp=8,micro=32,schedule=zb_h1,sp=true", 0.97),
        ("pp=16,tp=8,micro=64,zero=1,schedule=zb_v,exchange=heads,sp=true", 0.98),
        ("pp=16,dp=2,cp=2,tp=2,micro=7,schedule=zb_v,sp=true,recompute=true", 0.8),
        ("dp=128,micro=4,zero=3,refill=true", 0.94),
        ("dp=16,tp=8,micro=4,sp=true", 0.98),
    ],
)
def test_what_the_fullest_stage_holds_is_in_the_bound(text, share):
    """Else plans that do not fit are predicted: a search for 405 billion on 1,024 GPUs did not end in four minutes."""
    cluster, config, plan = cluster_of("h100x64", 128), find_model("70b", 4096), Plan.parse(text)
    itemsize, mixed = PRECISIONS["bf16-mixed"]
    said = max(held.total for held in memory(plan, config, 512, 4096, itemsize, mixed=mixed))
    assert share * said < Bounds(config, cluster, 512, 4096, itemsize, mixed).fullest(plan) <= said


@pytest.mark.parametrize("text", ["pp=2,dp=2", "pp=2,cp=2"])
def test_a_pipeline_of_zero_3_keeps_its_blocks_inputs_alone(text):
    """Its bound was three times what it holds, so that it was left out."""
    cluster, config = cluster_of("h100x64", 4), find_model("gpt2", 1024)
    plan, least = Plan.parse(f"{text},zero=3,micro=4,loss=chunked"), Bounds(config, cluster, 64, 1024, 2)
    said = max(held.total for held in memory(plan, config, 64, 1024, 2))
    assert 0.5 * said < max(least.of(plan)[1], least.fullest(plan)) <= said


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v", "gpipe"])
def test_as_many_micro_batches_are_on_their_way_as_orders_have(name):
    for pp, chunks, micro in product((2, 3, 5), (2, 3), (1, 2, 6, 7, 15, 31)):
        order = order_of(Plan(pp=pp, schedule=name, chunks=chunks), micro)
        kinds = [op.kind for op in order.orders[0] if op.stage == 0 and op.kind != "W"]
        most = max(accumulate(1 if kind == "F" else -1 for kind in kinds))
        assert most <= min(micro, pp * bounds_file._passing(name, chunks))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_work", lambda *unit: (0, 0, 12_000)),
        ("UPDATE", 9_000),
        ("kept_by_dense_block", lambda *unit: 10**12),
        ("stream_bytes", lambda *unit: 10**12),
        ("pairs_seen", lambda share, tokens: 10**9),
        ("_passing", lambda *asked: 1e-4),
        ("kept_between", lambda *unit: 10**12),
        ("part_elements", lambda *unit: 10**9),
    ],
)
def test_mutant_with_a_bound_that_is_too_high_is_noticed(name, wrong):
    with planted(bounds_file, name, lambda right: wrong):
        assert too_high("cores", 40)


@pytest.mark.rotates
def test_a_search_that_leaves_out_the_hopeless_finds_the_best_of_all():
    config, cluster = (
        PRESETS["nano"],
        find_cluster("h100x64").with_devices(16),
    )  # beyond what is tried in full
    every = {plan: predict(plan, config, 32, 64, cluster, 2) for plan in candidates(config, cluster, 32, 64)}
    limit = sorted(p.memory for p in every.values())[len(every) // 4]
    for least in ("time", "memory", "devices"):
        goal = Goal(32, 64, least, limit, itemsize=2)
        found = parallelize(config, cluster, goal)
        key = lambda plan, p, goal=goal: goal.order(plan, p.seconds, p.memory)
        best = min(key(plan, p) for plan, p in every.items() if p.memory <= limit)
        assert key(found.plan, found.prediction) == pytest.approx(best, rel=1e-9)
        assert found.rejected["cannot win"] > 0 and found.tried < len(every)
        assert set(found.rejected) <= {*PRUNED, "needs more memory", "takes more time"}


def test_what_was_found_by_hand_is_in_the_space():
    every = set(map(str, candidates(PRESETS["mini"], find_cluster("laptop"), 12, 32)))
    assert {"pp=2,micro=2,schedule=zb_v", "pp=2,micro=3", "dp=2,micro=3,zero=2", "pp=2,dp=2,micro=6"} <= every
    assert {schedule for schedule in SCHEDULES if any(f"schedule={schedule}" in text for text in every)} == {
        "interleaved", "zb_h1", "zb_v"
    }  # fmt: skip


def test_stages_that_hold_nothing_are_refused_at_once_and_those_without_a_layer_left_out():
    """For the sentence of a refusal `Plan.check` tries all other numbers of stages, which took half a minute of 126."""
    config, nobody = find_model("gpt2", 64, n_layer=3), Counter()
    for pp, schedule in product(range(2, 9), SCHEDULES):
        plan, why = Plan(pp=pp, micro=2 * pp, schedule=schedule), ""
        try:
            plan.check(config, 32, 64)
        except ValueError as error:
            why = str(error)
        with planted(space, "check", lambda right: lambda *asked: None):
            assert runs(plan, config, 32, 64, nobody) != ("leave nothing for rank" in why), plan
    left_out = Counter()
    found = {
        plan.pp for plan in proposals(config, cluster_of("h100x64", 16), 16, 32, 64, left_out) if plan.pp > 1
    }
    assert found == {2} and left_out["stages without a layer"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "rows", "thin"),
    [("70b", 512, 1024, ""), ("13b", 64, 512, "thin wires"), ("llama3-405b", 1024, 2048, "")],
)
def test_hundreds_of_gpus_and_thin_wires_are_answered_soon(model, ranks, rows, thin):
    """Ten seconds of two quiet cores; here of processor time, so that a busy machine does not matter much."""
    start = time.process_time()
    found = parallelize(
        find_model(model), cluster_of("h100x64", ranks, thin), Goal(rows, 4096, itemsize=2, mixed=2)
    )
    assert found.plan.world == ranks and found.prediction.memory <= 80e9
    assert time.process_time() - start < 20
