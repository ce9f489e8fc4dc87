"""Published formulas against the tables of their papers, and against what this package counts."""

import pytest

from gpt2lab.planner import balance
from gpt2lab.planner.published_steps import step_flops
from gpt2lab.planner.tensor_costs import Shape, kept_bytes
from gpt2lab.schedules import Cost, make, simulate


@pytest.mark.parametrize(
    ("layers", "width", "batch", "gpus", "teraflops", "days"),
    [(96, 12288, 1536, 1024, 140, 34), (128, 25600, 3072, 3072, 163, 84)],
)
def test_training_days_of_narayanan_2021(layers, width, batch, gpus, teraflops, days):
    """Section 5.1: GPT-3 on 300 billion tokens takes 34 days, a trillion parameters on 450 billion tokens 84."""
    tokens = 300e9 if layers == 96 else 450e9
    flops = step_flops(batch, 2048, layers, width, 51200) * tokens / (batch * 2048)
    assert flops / (gpus * teraflops * 1e12) / 86400 == pytest.approx(days, rel=0.04)


def test_recomputation_adds_a_third_of_the_layers():
    full, none = (step_flops(1, 2048, 96, 12288, 0, r) for r in (True, False))
    assert full / none == pytest.approx(4 / 3)


def test_our_layer_keeps_what_the_paper_says_without_its_dropout_masks():
    """32 bytes in 16 bit beside the 34 of Korthikanti et al. 2022, table 2: no dropout masks (two of one byte)."""
    shape = Shape(1, 1024, 768, 12, 1, 2)
    assert kept_bytes(shape) / (1024 * 768) == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize(("times", "cut"), [((1, 2, 3, 4, 5, 6), (4, 2)), ((6, 5, 4, 3, 2, 1), (2, 4))])
def test_linear_partitions_of_six_layers(times, cut):
    """The textbook's two rows: [1, 2, 3, 4][5, 6] and, the other way round, two layers and four."""
    bounds = balance.best_cut(times, 2)
    assert tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False)) == cut


@pytest.mark.parametrize(
    ("name", "bubble", "held"),
    [
        ("1f1b", lambda pp, f, b, w, both: (pp - 1) * (f + b), lambda pp: pp),
        ("zb_h1", lambda pp, f, b, w, both: (pp - 1) * (f + b - 2 * w), lambda pp: pp),
        ("dualpipe", lambda pp, f, b, w, both: (pp / 2 - 1) * (both + b - 3 * w), lambda pp: pp + 1),
    ],
)
def test_deepseek_v3_table_2(name, bubble, held):
    """Its ZB1P is ZB-H1; its B is a whole backward; DualPipe holds the weights twice and one activation more."""
    pp, f, i, w = 8, 2, 3, 1
    joint = f + i + w - 1
    timeline = simulate(
        make(name, pp, 20), Cost(f, i, w, joint=joint) if name == "dualpipe" else Cost(f, i, w)
    )
    ends = timeline.makespan if name == "dualpipe" else max(timeline.span(r) for r in range(pp))
    idle = ends - min(timeline.busy(r) for r in range(pp))
    assert idle == bubble(pp, f, i + w, w, joint)
    assert max(timeline.schedule.peak(r) for r in range(pp)) == held(pp)
    assert {timeline.schedule.weights(r) for r in range(pp)} == {2 if name == "dualpipe" else 1}
