"""Bugs in the trade-off map: noticed by the record of live ranks, by live ranks, or by a number known beforehand."""

import pytest
from planting import rewritten

from gpt2lab.lessons.labs import trade_off as lab
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner import sends

pytestmark = pytest.mark.mutant
TINY = GPT2Config(vocab_size=37, n_positions=8, n_layer=2, n_head=2, n_embd=8)


def computed_is_wrong() -> bool:
    """Whether some strategy's formula gives something else than live ranks counted."""
    for forgotten in (lab.compute, sends.gradient_sends):
        forgotten.cache_clear()
    for ranks, points in lab.recorded().items():
        for name, point in points.items():
            other = lab.compute(name, ranks, lab.SMALL, lab.ROWS, lab.TOKENS)
            exact = (point.sent, point.messages) == (other.sent, other.messages)
            if not exact or abs(point.flops - other.flops) > 1e-9 or abs(other.held / point.held - 1) > 0.25:
                return True
    return False


COMPUTED = [
    (lab.busiest_places, "(axis,) = [", "return [{}]\n    (axis,) = ["),
    (lab.busiest_places, "{0, min(1, plan.world - 1), plan.world - 1}", "{plan.world - 1}"),
    (lab.plan_of, "m=2 * ranks", "m=ranks"),
    (lab.compute, "max(sum(", "min(sum("),
    (lab.compute, 'most_of("messages")', 'most_of("calls")'),
    (lab.compute, "max(h.total", "sum(h.total"),
    (lab.operations, ".again[0] * blocks", ".again[0] * head"),
    (lab.operations, "1 + RankShare", "1 + 2 * RankShare"),
    (sends.finish_sends, "found + 2 *", "found + "),
    (sends.stage_ways, "call.times(2 * layers)", "call.times(layers)"),
    (sends._to_stages, "[message] * there, [message] * back", "[message] * there, []"),
    (
        sends._zero,
        "reduce] += reduced[key]",
        "reduce] += gathered[key]",
    ),
]


@pytest.mark.parametrize("bug", COMPUTED, ids=lambda bug: f"{bug[0].__name__}: {bug[2][:30]}")
def test_a_wrong_formula_is_noticed_by_what_live_ranks_counted(bug):
    try:
        with rewritten(*bug):
            assert computed_is_wrong()
    finally:
        assert not computed_is_wrong()


def counted_with(rank, world_size, bug):
    """What this rank counts of a pipeline and of ZeRO-3 while a bug is in the lab."""
    plans = [Plan.parse("pp=2,micro=4"), Plan.parse("dp=2,zero=3")]
    if bug is None:
        return lab.count_all(rank, world_size, plans, TINY, 4, 8)
    with rewritten(getattr(lab, bug[0]), *bug[1:]):
        return lab.count_all(rank, world_size, plans, TINY, 4, 8)


COUNTED = [
    ("count_step", "        comm.clear_log()\n", "        Trainer(build(plan, config, mesh)).step(batch)\n"),
    ("count_step", "sum(getattr(e, what) for e in comm.log)", "max(getattr(e, what) for e in comm.log)"),
    ("count_step", '("bytes", "messages"))', '("messages", "bytes"))'),
    ("count_step", "before[-1].held + max", "max"),
    ("count_step", "max(a.held for a in during)", "during[-1].held"),
]


@pytest.mark.parametrize("bug", COUNTED, ids=lambda bug: bug[2].strip()[:40])
def test_a_wrong_count_is_noticed_by_the_formulas(pools, bug):
    right, wrong = (pools[2].run(counted_with, one) for one in (None, bug))
    for found, expected in ((right, True), (wrong, False)):
        same = []
        for i, name in enumerate(("pipeline, 1F1B", "ZeRO-3")):
            point = lab.most([of_rank[i] for of_rank in found], lab.Point(1, 0, 0, 1.0))
            other = lab.compute(name, 2, TINY, 4, 8)
            near = abs(other.held / point.held - 1) < 0.3
            same.append((point.sent, point.messages) == (other.sent, other.messages) and near)
        assert all(same) is expected, (same, found)


def products_are_wrong() -> bool:
    """Whether one rank counts something else than 6 operations for each weight of a matrix and token."""
    matrices = 12 * TINY.n_layer * TINY.n_embd**2 + TINY.vocab_size * TINY.n_embd
    point = lab.count_step(0, 1, Plan(), TINY, 4, 8)
    return point.flops != 6 * matrices * 4 * 8


@pytest.mark.parametrize("wrong", ["self.flops = formula", "self.flops += 2 * formula"])
def test_a_wrong_sum_of_products_is_noticed_by_a_closed_form(wrong):
    assert not products_are_wrong()
    with rewritten(lab.Products.__torch_dispatch__, "self.flops += formula", wrong):
        assert products_are_wrong()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("max(getattr(p, what)", "min(getattr(p, what)"), ("sum(p.flops for p in points)", "points[0].flops")],
)
def test_a_wrong_rank_is_noticed(right, wrong):
    points = [lab.Point(1, 5, 2, 3.0), lab.Point(4, 2, 3, 4.0)]
    expected = lab.Point(4, 5, 3, 3.5)
    assert lab.most(points, lab.Point(0, 0, 0, 2.0)) == expected
    with rewritten(lab.most, right, wrong):
        assert lab.most(points, lab.Point(0, 0, 0, 2.0)) != expected
