"""How often to save: lives of jobs add up, Young's interval is best, the figures show what they are given."""

import math
import random

import pytest

from gpt2lab.planner.failures import LongJob, Phase, best_interval, daly_interval, goodput, life, share_lost
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
    assert spans == [("work", 0, 2), ("save", 2, 2.5), ("lost", 2.5, 3), ("restart", 3, 4), ("work", 4, 6)]
    assert kinds(life(2, 0.5, 1, [2.2, 2.9], 4))[:3] == [
        ("lost", 0, 2.2),
        ("restart", 2.2, 3.2),
        ("work", 3.2, 5.2),
    ]


def test_a_save_in_the_background_counts_when_it_is_written():
    work_of = lambda *strikes: kinds(life(2, 0.5, 1, strikes, 4, write=1.0))
    assert work_of(3.5) == kinds(life(2, 0.5, 1, [3.5], 4))  # written by then
    assert work_of(3.4)[:3] == [("lost", 0, 3.4), ("restart", 3.4, 4.4), ("work", 4.4, 6.4)]
    assert work_of(3.4, 4.45, 5.0)[:3] == [("lost", 0, 3.4), ("restart", 3.4, 4.4), ("lost", 4.4, 4.45)]
    with pytest.raises(ValueError, match="longer than the 2 between saves. Use a longer interval"):
        life(2, 0.5, 1, [], 4, write=2.1)


@pytest.mark.parametrize("write", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_lives_have_no_gaps_and_do_all_the_work(seed, write):
    chance = random.Random(seed)
    strikes = [chance.uniform(0, 40) for _ in range(12)]
    spans = life(chance.uniform(0.1, 3), 0.2, 0.3, strikes, 20, write)
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
    for write in (0.0, best / 2):
        lost = life(best, save, 0.0, strikes[1:], 20_000, write)[-1].end / 20_000 - 1
        assert lost == pytest.approx(share_lost(best, save, failures, write=write), rel=0.1)


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


CALM = LongJob(1000, 1e9, 24.0, 0.01, 0.1, 1.0)
LLAMA = LongJob(2048, 54 * 24 / 419 * 2048, 12.0, 1 / 60, 0.25, best_interval(1 / 60, 54 * 24 / 419))


def test_without_failures_only_saves_are_lost():
    for policy in ("wait", "hot spare", "elastic"):
        assert goodput(CALM, policy, 1010.0) == pytest.approx(1 / 1.01, rel=1e-3)


def test_with_a_spare_at_once_goodput_is_the_expected_one():
    """3.1 hours between failures, as on 16,384 GPUs; Daly 2006, equation 13, without failures in a restart."""
    m, t = LLAMA.failures, LLAMA.interval
    said = t / ((m + LLAMA.restart) * (math.exp((t + LLAMA.save) / m) - 1))
    seen = [goodput(LLAMA, "hot spare", 2000.0, spares=1000, seed=s) for s in range(8)]
    assert sum(seen) / 8 == pytest.approx(said, abs=0.005) and 0.8 < said < 0.9
    assert said == pytest.approx(1 / (1 + share_lost(t, LLAMA.save, m, LLAMA.restart)), abs=0.02)


def test_waiting_for_repairs_loses_most_and_few_spares_are_enough():
    found = {
        name: goodput(LLAMA, policy, 5000.0, spares)
        for name, policy, spares in (
            ("wait", "wait", 0),
            ("one", "hot spare", 1),
            ("ten", "hot spare", 10),
            ("many", "hot spare", 100),
            ("elastic", "elastic", 0),
        )
    }
    assert found["wait"] < found["one"] < found["ten"] <= found["many"] + 0.005
    assert found["wait"] == pytest.approx(3.09 / (3.09 + 12.25) * 0.86, rel=0.1)
    assert found["wait"] < found["elastic"] < found["many"]


def test_an_elastic_job_of_two_works_at_half_speed_while_one_is_away():
    two = LongJob(2, 200.0, 50.0, 1e-9, 0.0, 0.01)
    assert goodput(two, "elastic", 200_000.0) == pytest.approx(200 / 250, abs=0.02)


def test_dalys_interval_is_youngs_where_failures_are_rare_and_shorter_by_a_save_at_least_where_not():
    assert daly_interval(1, 1e8) == pytest.approx(best_interval(1, 1e8), rel=1e-3)
    assert daly_interval(10, 3) == 3
    lost = lambda t: (
        3.0 * math.exp(0.1 / 3) * (math.exp((t + 0.5) / 3) - 1) / t
    )  # Daly 2006, equation 20, M = 3
    found = daly_interval(0.5, 3.0)
    assert lost(found) < lost(best_interval(0.5, 3.0)) and lost(found) < 1.001 * min(
        lost(0.01 * i) for i in range(1, 900)
    )
