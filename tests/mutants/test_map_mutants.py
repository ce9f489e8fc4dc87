"""Bugs in the trade-off map: noticed by the record of live ranks, by live ranks, or by a number known beforehand."""

import pytest
import test_planner_labs as labs
from planting import bugs, is_killed, under

from gpt2lab.lessons.labs import trade_off as lab
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner import sends

pytestmark = pytest.mark.mutant
TINY = GPT2Config(vocab_size=37, n_positions=8, n_layer=2, n_head=2, n_embd=8)


def computed():
    for ranks in lab.RANKS:
        labs.test_what_is_computed_is_what_was_recorded(ranks)


def of_all_ranks():
    """The most of bytes and messages, and all operations over those of the serial run."""
    points = [lab.Point(1, 5, 2, 3.0), lab.Point(4, 2, 3, 4.0)]
    assert lab.most(points, lab.Point(0, 0, 0, 2.0)) == lab.Point(4, 5, 3, 3.5)


PRODUCTS = labs.test_a_strategy_on_one_rank_is_the_serial_run
COMPUTED = {
    "one rank for all": (lab.busiest_places, "(axis,) = [", "return [{}]\n    (axis,) = [", computed),
    "the last rank alone":
        (lab.busiest_places, "{0, min(1, plan.world - 1), plan.world - 1}", "{plan.world - 1}", computed),
    "half the micro-batches": (lab.plan_of, "m=2 * ranks", "m=ranks", computed),
    "the rank that sends least": (lab.compute, "max(sum(", "min(sum(", computed),
    "calls for messages": (lab.compute, 'most_of("messages")', 'most_of("calls")', computed),
    "all ranks' memory": (lab.compute, "max(h.total", "sum(h.total", computed),
    "the head runs again": (lab.operations, ".again[0] * blocks", ".again[0] * head", computed),
    "twice the work again": (lab.operations, "1 + RankShare", "1 + 2 * RankShare", computed),
    "one sum at the end": (sends.finish_sends, "found + 2 *", "found + ", computed),
    "one call a layer": (sends.stage_ways, "call.times(2 * layers)", "call.times(layers)", computed),
    "nothing goes back":
        (sends._to_stages, "[message] * there, [message] * back", "[message] * there, []", computed),
    "as many sums as gathers": (sends._zero, "reduce] += reduced[key]", "reduce] += gathered[key]", computed),
    "the first product alone":
        (lab.Products.__torch_dispatch__, "flops += formula", "flops = formula", PRODUCTS),
    "each product twice": (lab.Products.__torch_dispatch__, "+= formula", "+= 2 * formula", PRODUCTS),
    "the least of ranks": (lab.most, "max(getattr(p, what)", "min(getattr(p, what)", of_all_ranks),
    "one rank's operations": (lab.most, "sum(p.flops for p in points)", "points[0].flops", of_all_ranks),
}  # fmt: skip


@bugs(COMPUTED)
def test_a_wrong_formula_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


COUNTED = {
    "a step besides": (
        "        comm.clear_log()\n",
        "        Trainer(build(plan, config, mesh)).step(batch)\n",
    ),
    "the longest call": (
        "sum(getattr(e, what) for e in comm.log)",
        "max(getattr(e, what) for e in comm.log)",
    ),
    "messages for bytes": ('("bytes", "messages"))', '("messages", "bytes"))'),
    "nothing before the step": ("before[-1].held + max", "max"),
    "what is held at the end": ("max(a.held for a in during)", "during[-1].held"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_wrong_count_is_noticed_by_the_formulas(pools, name):
    """Of a pipeline and of ZeRO-3, on live ranks, with the bug in the lab and without."""
    plans = [Plan.parse("pp=2,micro=4"), Plan.parse("dp=2,zero=3")]
    count = under((lab.count_step, *COUNTED[name]), lab.count_all)
    for counted, expected in ((lab.count_all, True), (count, False)):
        found, same = pools[2].run(counted, plans, TINY, 4, 8), []
        for i, strategy in enumerate(("pipeline, 1F1B", "ZeRO-3")):
            point = lab.most([of_rank[i] for of_rank in found], lab.Point(1, 0, 0, 1.0))
            other = lab.compute(strategy, 2, TINY, 4, 8)
            near = abs(other.held / point.held - 1) < 0.3
            same.append((point.sent, point.messages) == (other.sent, other.messages) and near)
        assert all(same) is expected, (same, found)
