"""How often to save: lives of jobs add up, Young's interval is best, the figures show what they are given."""

import random

import pytest

from gpt2lab.planner.failures import Phase, best_interval, life, share_lost
from gpt2lab.plots import faults as plots


def kinds(spans):
    return [(s.kind, round(s.start, 9), round(s.end, 9)) for s in spans]


def test_an_undisturbed_life_saves_between_its_pieces_of_work():
    assert kinds(life(2, 0.5, 1, [], 5)) == [
        ("work", 0, 2),
        ("save", 2, 2.5),
        ("work", 2.5, 4.5),
        ("save", 4.5, 5),
        ("work", 5, 6),
    ]


def test_a_failure_loses_what_was_not_saved_and_one_in_a_save_loses_the_save():
    spans = kinds(life(2, 0.5, 1, [3.0, 6.2], 4))
    assert spans == [
        ("work", 0, 2),
        ("save", 2, 2.5),
        ("lost", 2.5, 3),
        ("restart", 3, 4),
        ("work", 4, 6),
    ]
    assert kinds(life(2, 0.5, 1, [2.2, 2.9], 4))[:3] == [
        ("lost", 0, 2.2),
        ("restart", 2.2, 3.2),
        ("work", 3.2, 5.2),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_lives_have_no_gaps_and_do_all_the_work(seed):
    chance = random.Random(seed)
    spans = life(chance.uniform(0.1, 3), 0.2, 0.3, [chance.uniform(0, 40) for _ in range(12)], 20)
    assert spans[0].start == 0 and all(a.end == b.start for a, b in zip(spans, spans[1:], strict=False))
    assert sum(s.length for s in spans if s.kind == "work") == pytest.approx(20)


def test_young_s_interval_loses_least_and_simulated_lives_agree_while_failures_are_rare():
    save, failures = 0.01, 5.0
    best = best_interval(save, failures)
    for other in (best / 2, best * 0.9, best * 1.1, best * 2):
        assert share_lost(best, save, failures) < share_lost(other, save, failures)
    chance, strikes = random.Random(0), [0.0]
    while strikes[-1] < 50_000:
        strikes.append(strikes[-1] + chance.expovariate(1 / failures))
    lost = life(best, save, 0.0, strikes[1:], 20_000)[-1].end / 20_000 - 1
    assert lost == pytest.approx(share_lost(best, save, failures), rel=0.1)


def test_figures_of_faults_show_what_they_are_given():
    fig = plots.lives({"often": life(1, 0.5, 1, [1.2], 3), "rarely": [Phase("work", 0, 4)]}, [1.2, 99.0])
    ax = fig.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["often", "rarely"]
    assert len(ax.lines) == 1 and ax.texts[1].get_text().strip() == "4.0"
    boxes = [[((0, 0), (2, 4))], [((2, 0), (1, 4)), ((3, 0), (1, 4))]]
    held = plots.boxes_held({"a plan": ((4, 4), boxes)}).axes[0]
    assert sum(p.get_width() * p.get_height() for p in held.patches) == 16
    lost = plots.time_lost({"x": ([1, 2], [0.1, 0.2])}, {"x": ([1], [0.3])}, {"x": 1.5}).axes[0]
    assert [list(line.get_ydata()) for line in lost.lines[:2]] == [[10, 20], [30]]
    assert list(lost.lines[2].get_xdata()) == [1.5, 1.5]
