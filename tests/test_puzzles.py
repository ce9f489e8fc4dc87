"""The scored puzzles: the best known scores are what they are said to be, and limits bind."""

from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import pytest

from gpt2lab.lessons.exercises import (
    asynchronous,
    automatic,
    collectives,
    cuts,
    experts,
    gpt2,
    pipeline,
    placement,
    prefetch,
    tasks,
)
from gpt2lab.lessons.labs import schedules as lab
from gpt2lab.lessons.labs.tasks import one_layer
from gpt2lab.planner.search import PLANNERS
from gpt2lab.schedules import Cost, check, make, simulate
from gpt2lab.tasks.gpt2 import Blocks


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


@pytest.mark.rotates
def test_no_stages_of_pipedream_within_the_room_are_faster_than_the_best():
    found, count = [], len(asynchronous.TIMES)
    for ends in (e for n in range(asynchronous.RANKS) for e in combinations(range(1, count), n)):
        layers = [b - a for a, b in zip((0, *ends), (*ends, count), strict=True)]
        for active in range(1, len(layers) + 1):
            room = max(kept * one for kept, one in asynchronous.room_of(layers, active))
            found.append((room, layers, active))
    fit = [(layers, active) for room, layers, active in found if room <= asynchronous.ROOM]
    assert len(found) == 463 and len(fit) < 400
    assert min(asynchronous.time_of(*one) for one in fit) == asynchronous.BEST


def test_no_other_experts_on_one_rank_make_the_best_places_faster():
    best = [[0, 3, 6], [0, 2, 5], [1, 3, 4], [0, 2, 7]]
    assert experts.time_of_layer(best) == experts.BEST
    for rank, held in product(range(4), combinations(range(8), experts.SLOTS)):
        others = best[:rank] + [list(held)] + best[rank + 1 :]
        if set().union(*others) == set(range(8)):
            assert experts.time_of_layer(others) >= experts.BEST, others


def test_rows_of_an_expert_stay_at_home_or_are_shared_out_among_its_copies():
    rows = experts.routes([[0, 1, 2], [0, 3, 4], [5, 6], [7]])
    assert rows[0][0] == 240 + 24 + 60 and rows[0][1] == 36 + 36
    assert rows[3][0] == 84 / 2 + 36 + 108 and sum(map(sum, rows)) == sum(map(sum, experts.ASKED))


def test_no_block_size_alone_makes_the_best_blocks_faster():
    best = Blocks(tokens=24, rows=3, heads=1, columns=0, weights=0, updates=0)
    time = lambda **sizes: tasks.time_of(one_layer(4, 16, replace(best, **sizes)))
    assert time() == tasks.BEST
    menu = {"tokens": (16, 22, 32), "rows": (1, 2), "heads": (2,), "columns": (48,), "weights": (2048,)}
    for name, size in ((name, size) for name, sizes in menu.items() for size in sizes):
        assert time(**{name: size}) >= tasks.BEST, (name, size)


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


def test_nothing_that_fits_is_rebuilt_in_fewer_operations_than_the_best():
    names, total = list(gpt2.PARTS), 0.0
    choices = [c for size in range(len(names) + 1) for c in combinations(names, size)]
    fitting = [c for c in choices if 1 + sum(gpt2.PARTS[name][0] for name in c) <= gpt2.ROOM]
    for tokens in (256, 1024, 8192):
        total += min(gpt2.rebuilding(kept, tokens) for kept in fitting)
    assert round(total, 1) == 15.3 and 1 + sum(size for size, *_ in gpt2.PARTS.values()) == 16
    assert min(sum(gpt2.rebuilding(kept, t) for t in (256, 1024, 8192)) for kept in fitting) == 18


def test_fewer_rounds_than_the_best_cannot_hand_out_the_chunks():
    """The last chunk leaves rank 0 in round 4 at the earliest; who has a chunk at most doubles in a round."""
    after, ranks = collectives.CHUNKS, 2
    while ranks < collectives.RANKS:
        after, ranks = after + 1, 2 * ranks
    assert after == 6


@pytest.mark.rotates
def test_no_cut_for_unlike_devices_is_faster_than_the_best():
    layers, found = placement.LAYERS, []
    for devices in sorted(set(permutations(["fast", "fast", "slow", "slow"]))):
        for inner in combinations(range(1, len(layers)), 3):
            milliseconds, held = placement.unlike_step((0, *inner, len(layers)), devices)
            fits = all(h <= placement.UNLIKE[d].memory / 1e9 for h, d in zip(held, devices, strict=True))
            found.append((milliseconds, fits))
    best = min(milliseconds for milliseconds, fits in found if fits)
    assert best == pytest.approx(placement.BEST, abs=0.05) and min(found)[0] < best  # memory binds


def test_no_stages_for_little_memory_are_faster_than_the_best():
    given = automatic.puzzle()
    found = PLANNERS["every pipeline"].plan(given)
    assert 1e3 * found.seconds == pytest.approx(automatic.BEST, abs=0.05)
    free = replace(given, cluster=replace(given.cluster, device=replace(given.cluster.device, memory=inf)))
    assert 1e3 * PLANNERS["Alpa"].plan(free).seconds < automatic.BEST - 0.1  # memory binds
