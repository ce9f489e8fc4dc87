"""The race: whose turn it is, which turns count, and ratios taken turn by turn; no test asserts a measured time."""

from argparse import Namespace

import torch

from gpt2lab.benchmarks import experts, race
from gpt2lab.benchmarks.race import Contest, Heat, Outcome
from gpt2lab.machine.timing import Times


class Clock:
    """A stopwatch that is set forward by hand."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(race.time, "perf_counter", lambda: self.now)

    def takes(self, *seconds):
        """A contestant whose calls take so long, one after the other."""
        left = iter(seconds)

        def call():
            self.now += next(left)

        return call


def test_contestants_take_turns_and_only_their_own_time_counts(monkeypatch):
    clock, order = Clock(monkeypatch), []

    def before(name):
        order.append(name)
        clock.now += 50.0

    ways = {"a": clock.takes(9.0, 1.0, 3.0), "b": clock.takes(7.0, 4.0, 4.0)}
    counted = []
    contest = Contest(
        ways, before, after=lambda *seen: counted.append(seen), facts=lambda: {"a": {"turns": 3}}
    )
    spans, facts = race.turns(contest, 2, 1, ready=lambda: order.append("ready"))
    assert order == ["a", "ready", "b", "ready"] * 3 and facts == {"a": {"turns": 3}}
    assert {name: [end - start for start, end in found] for name, found in spans.items()} == {
        "a": [1.0, 3.0],
        "b": [4.0, 4.0],
    }
    assert counted == [("a", None), ("b", None)] * 2  # the turns that count


def test_a_turn_of_several_calls_is_told_by_the_seconds_of_one(monkeypatch):
    clock = Clock(monkeypatch)
    found = race.turns(Contest({"a": clock.takes(*range(8))}, calls=4), 1, 1)
    assert Outcome.of([found]).times["a"].median == (4 + 5 + 6 + 7) / 4


def test_who_times_itself_is_believed_and_of_several_seconds_the_median_counts():
    contest = Contest({"a": lambda: [3.0, 1.0, 2.0], "b": lambda: 5.0}, own=True)
    found = Outcome.of([race.turns(contest, 2, 0)])
    assert found.times == {"a": Times((2.0, 2.0)), "b": Times((5.0, 5.0))}


def test_a_turn_of_ranks_lasts_from_the_last_arrival_to_the_last_end():
    ranks = [({"a": [(0.0, 5.0), (10.0, 11.0)]}, {}), ({"a": [(1.0, 4.0), (10.5, 12.5)]}, {"a": {}})]
    found = Outcome.of(ranks)
    assert found.times["a"].trials == (4.0, 2.0) and found.facts == [{}, {"a": {}}]


def test_a_rank_without_a_way_changes_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    works = race.turns(Contest({"a": clock.takes(5.0)}), 1, 0)
    idles = race.turns(Contest({"a": None}), 1, 0)  # it arrives 5 s later, when all is over
    assert Outcome.of([works, idles]).times["a"].trials == (5.0,)


def test_ratios_are_those_of_turns_that_follow_one_another():
    """A machine that gets four times as slow in the middle changes no ratio; the ratio of medians would be 1.25."""
    times = {
        "ours": Times((1.0, 1.0, 4.0, 4.0)),
        "theirs": Times((2.0, 2.0, 8.0, 8.0)),
        "other": Times((1.0,) * 4),
    }
    found = Outcome(times, [{"ours": {"steps": 3}}])
    assert found.ratio("ours", "theirs").trials == (0.5,) * 4
    against, work = {"ours": ("theirs", "absent"), "other": ("theirs",)}, {"theirs": (10.0, "tokens/s")}
    heat = Heat("{}, 2 ranks", None, rivals=against, work=work)
    ours, note, theirs, other = heat.rows(found).splitlines()
    assert ours.startswith("  ours, 2 ranks ") and ours.endswith("0.500 (0.500 to 0.500) of theirs")
    assert "2500.000 ms (1000.000 to 4000.000)" in ours and note.strip() == "steps 3"
    assert theirs.endswith(", 2 tokens/s") and other.endswith(" of theirs")


def test_a_race_returns_medians_by_name_and_size(capsys):
    ways = {"a": lambda: None, "b": lambda: None}
    found = race.run(
        [Heat("{}, small", Contest(ways)), Heat("{}", Contest(ways), rivals={"a": ("b",)})], 2, 0
    )
    assert list(found) == ["a, small", "b, small", "a", "b"] and min(found.values()) >= 0
    assert capsys.readouterr().out.count(" of b") == 1


def who(rank, world_size, word):
    return Contest({word: lambda: None}, facts=lambda: {word: {"rank": rank, "of": world_size}})


def test_on_ranks_every_rank_makes_the_contest(pools):
    found = Outcome.of(pools[2].run(race.on_rank, who, "a", 3, 1))
    assert found.told("a") == "rank 0 to 1; of 2" and len(found.times["a"].trials) == 3


def test_of_a_number_the_smallest_and_the_largest_of_all_ranks_are_told_and_words_of_the_first():
    facts = [{"a": {"differs by": apart, "orders:": word}} for apart, word in ((2e-7, "x"), (1e-7, "y"))]
    assert Outcome({}, facts).told("a") == "differs by 1e-07 to 2e-07; orders: x"
    assert not Outcome({}, facts).told("b")
    assert Outcome({}, [{"a": {"n": 1.0}}] * 2).told("a") == "n 1"


def test_a_heat_for_every_combination_of_the_sizes():
    args = Namespace(ranks=[2, 4], rows=3, names=["x", "y"])
    found = [
        (one.ranks, one.names, one.more, one.rows) for one in race.each(args, "ranks", "names", more=[0])
    ]
    assert found == [(2, "x", 0, 3), (2, "y", 0, 3), (4, "x", 0, 3), (4, "y", 0, 3)]


def test_every_turn_of_the_mixtures_makes_gradients_anew():
    """One that added to those of the turn before would read and write them once more than its rivals."""
    block, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    seen = [
        experts.gradients(block, x, lambda block, x: block(x)) and block.weight.grad.clone() for _ in range(2)
    ]
    assert torch.equal(*seen)
