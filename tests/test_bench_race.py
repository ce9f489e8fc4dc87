"""The race: whose turn it is, which turns count, and ratios taken turn by turn; no test asserts a measured time."""

import pytest

from gpt2lab.benchmarks import race
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
    contest = Contest(ways, before, after=lambda name, _: len(order), facts=lambda: list(order))
    spans, more, facts = race.turns(contest, 2, 1, ready=lambda: order.append("ready"))
    assert order == ["a", "ready", "b", "ready"] * 3 == facts
    assert {name: [end - start for start, end in found] for name, found in spans.items()} == {
        "a": [1.0, 3.0],
        "b": [4.0, 4.0],
    }
    assert more == {"a": [6, 10], "b": [8, 12]}  # of the turns that count


def test_a_turn_of_several_calls_is_told_by_the_seconds_of_one(monkeypatch):
    clock = Clock(monkeypatch)
    spans, *_ = race.turns(Contest({"a": clock.takes(*range(8))}, calls=4), 1, 1)
    assert Outcome.of([(spans, {}, None)]).times["a"].median == (4 + 5 + 6 + 7) / 4


def test_who_times_itself_is_believed_and_of_several_seconds_the_median_counts():
    spans, more, _ = race.turns(Contest({"a": lambda: [3.0, 1.0, 2.0], "b": lambda: 5.0}, own=True), 2, 0)
    found = Outcome.of([(spans, more, None)])
    assert found.times == {"a": Times((2.0, 2.0)), "b": Times((5.0, 5.0))}


def test_a_turn_of_ranks_lasts_from_the_last_arrival_to_the_last_end():
    ranks = [({"a": [(0.0, 5.0), (10.0, 11.0)]}, {}, 1), ({"a": [(1.0, 4.0), (10.5, 12.5)]}, {}, 2)]
    found = Outcome.of(ranks)
    assert found.times["a"].trials == (4.0, 2.0) and found.facts == [1, 2]


def test_ratios_are_those_of_turns_that_follow_one_another():
    """A machine that gets four times as slow in the middle changes no ratio; the ratio of medians would be 1.25."""
    times = {
        "ours": Times((1.0, 1.0, 4.0, 4.0)),
        "theirs": Times((2.0, 2.0, 8.0, 8.0)),
        "other": Times((1.0,) * 4),
    }
    found = Outcome(times, [], [])
    assert found.ratio("ours", "theirs").trials == (0.5,) * 4
    heat = Heat("{}, 2 ranks", None, rivals=("theirs", "absent"), notes=lambda found: {"ours": "so it is"})
    ours, note, theirs, other = heat.rows(found).splitlines()
    assert ours.startswith("  ours, 2 ranks ") and ours.endswith("0.500 (0.500 to 0.500) of theirs")
    assert "2500.000 ms (1000.000 to 4000.000)" in ours and note.strip() == "so it is"
    assert " of " not in theirs and other.endswith(" of theirs")


def test_a_race_returns_medians_by_name_and_size(capsys):
    ways = {"a": lambda: None, "b": lambda: None}
    found = race.run([race.here(ways, "{}, small"), race.here(ways, rivals=("b",))], 2, 0)
    assert list(found) == ["a, small", "b, small", "a", "b"] and min(found.values()) >= 0
    assert capsys.readouterr().out.count(" of b") == 1


def who(rank, world_size, word):
    return Contest({word: lambda: None}, facts=lambda: (rank, world_size))


def test_on_ranks_every_rank_makes_the_contest(pools):
    found = Outcome.of(pools[2].run(race.on_rank, who, ("a",), 3, 1))
    assert found.facts == [(0, 2), (1, 2)] and len(found.times["a"].trials) == 3


@pytest.mark.parametrize("apart", [[1e-7, 2e-7]])
def test_the_largest_difference_of_all_ranks_is_told(apart):
    assert race.apart("theirs")(Outcome({}, apart, [])) == {"theirs": "gradients differ by 2e-07"}
