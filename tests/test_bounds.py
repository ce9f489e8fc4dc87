"""No plan costs less than its bound says, and a search that is told so finds what brute force finds."""

import random
import time

import pytest
from planting import planted

from gpt2lab.model import PRESETS
from gpt2lab.plan import Plan
from gpt2lab.planner import bounds as bounds_file
from gpt2lab.planner.bounds import Bounds
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.cost import predict
from gpt2lab.planner.models import find_model
from gpt2lab.planner.problem import PRECISIONS, find_cluster
from gpt2lab.planner.space import PRUNED, SCHEDULES, candidates

CASES = {
    "gpus": ("h100x64", 64, "7b", 128, 2048, "bf16-mixed"),
    "slow wires": ("v100x64", 16, "gpt2-medium", 48, 1024, "bf16-mixed-fp32-grads"),
    "cores": ("laptop", 4, "nano", 12, 32, "float32"),
    "long": ("a100x64", 16, "llama3-8b", 16, 8192, "bf16"),
}


def too_high(name: str, count: int = 20, seed: int = 1) -> list[str]:
    """Of some plans of a case those that are said to cost less than their bounds, with both ratios."""
    cluster, ranks, model, rows, length, precision = CASES[name]
    cluster, config = find_cluster(cluster).with_devices(ranks), find_model(model, length)
    itemsize, mixed = PRECISIONS[precision]
    least, found, known = Bounds(config, cluster, rows, length, itemsize, mixed), [], {}
    for plan in random.Random(seed).sample(list(candidates(config, cluster, rows, length)), count):
        said = predict(plan, config, rows, length, cluster, itemsize, True, known, mixed)
        seconds, size = least.of(plan)
        if not (0 < seconds <= said.seconds * (1 + 1e-9) and 0 < size <= said.memory * (1 + 1e-9)):
            found.append(f"{plan}: {seconds / said.seconds:.3f} {size / said.memory:.3f}")
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


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_work", lambda *unit: (0, 0, 12_000)),
        ("UPDATE", 9_000),
        ("kept_by_dense_block", lambda *unit: 10**12),
        ("stream_bytes", lambda *unit: 10**12),
        ("pairs_seen", lambda share, tokens: 10**9),
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


@pytest.mark.slow
def test_70_billion_parameters_on_512_gpus_are_answered_soon():
    """Ten seconds of two quiet cores; here of processor time, so that a busy machine does not matter much."""
    start = time.process_time()
    goal = Goal(1024, 4096, itemsize=2, mixed=2)
    found = parallelize(find_model("70b"), find_cluster("h100x64").with_devices(512), goal)
    assert found.plan.world == 512 and found.prediction.memory <= 80e9
    assert time.process_time() - start < 20
