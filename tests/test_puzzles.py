"""The scored puzzles: the best known scores are what they are said to be, and limits bind."""

from itertools import combinations, product

import pytest

from gpt2lab.lessons.exercises import cuts, pipeline, prefetch
from gpt2lab.lessons.labs import schedules as lab
from gpt2lab.schedules import Cost, check, make, simulate


def test_no_cut_of_alexnet_sends_less_than_the_best():
    scores = [cuts.megabytes(choice) for choice in product(cuts.MAKES, repeat=8)]
    assert min(scores) == pytest.approx(cuts.BEST, abs=0.05)
    assert cuts.megabytes(["batch"] * 5 + ["columns"] * 3) > cuts.BAR > cuts.BEST


def merged(gathers, sums):
    """Every order of second gathers and sums that keeps the order of each."""
    places = range(len(gathers) + len(sums))
    for chosen in combinations(places, len(gathers)):
        one, other = iter(gathers), iter(sums)
        yield [next(one if place in chosen else other) for place in places]


def test_no_order_of_the_link_in_the_order_of_use_is_faster_than_the_best():
    blocks, best = range(len(prefetch.SIZES)), []
    for kept in (kept for size in blocks for kept in combinations(blocks, size)):
        gathers = [f"G{i}" for i in reversed(blocks) if i not in kept]
        for rest in merged(gathers, [f"R{i}" for i in reversed(blocks)]):
            try:
                best.append(prefetch.makespan([f"G{i}" for i in blocks] + rest))
            except AssertionError:
                continue
    assert min(best) == prefetch.BEST and len(best) > 100


def test_room_on_the_link_binds(monkeypatch):
    once = ["G0", "G1", "G2", "G3", "G4", "R4", "R3", "R2", "R1", "R0"]
    with pytest.raises(AssertionError, match="waits at G2 for ever"):
        prefetch.makespan(once)
    monkeypatch.setattr(prefetch, "ROOM", sum(prefetch.SIZES))
    assert prefetch.makespan(once) == prefetch.BEST  # room for all blocks is no faster than the best order


@pytest.mark.parametrize("name, time", [("1f1b", 49), ("zb_h1", 41)])
def test_what_the_puzzle_of_split_backwards_says_of_known_schedules(name, time):
    found = simulate(make(name, pipeline.RANKS, pipeline.MICROS), pipeline.COST)
    assert found.makespan == time > 40


@pytest.mark.parametrize("ranks, micros", [(2, 2), (4, 4), (4, 9), (5, 3)])
def test_gems_holds_one_activation_and_has_the_published_bubble(ranks, micros):
    schedule = lab.gems(ranks, micros)
    check(schedule)
    assert [schedule.peak(rank) for rank in range(ranks)] == [1] * ranks
    ideal, whole = 3 * micros, micros * (2 * ranks + 1) + ranks - 1
    assert float(simulate(schedule, Cost(1, backward=2)).bubble) == pytest.approx(1 - ideal / whole)


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_both_formulas_of_chimera_hold_for_as_many_micro_batches_as_ranks(ranks):
    for name, simulated, formula, *_ in lab.both_ways(ranks, ranks):
        assert simulated == formula, name
