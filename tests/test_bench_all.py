"""All benchmarks in rounds, and two files of them compared: on recorded numbers, no test asserts a measured one."""

import json
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import pytest

from gpt2lab import cli
from gpt2lab.benchmarks import everything, races
from gpt2lab.plots.benchmarks import dashboard, is_rival, milliseconds, round_ticks

MACHINE = {"system": "Linux", "cores": "2", "memory": "24 GiB", "torch": "2.13.0", "commit": "a"}


def report(rounds=5, **seconds):
    return {
        "machine": MACHINE,
        "quick": True,
        "rounds": rounds,
        "minutes": 1,
        "seconds": seconds,
        "failed": {},
    }


BEFORE = report(
    tensor={"ours, 2 ranks": [1.0, 1.1, 1.2, 1.0, 1.1], "DTensor, 2 ranks": [2.0, 2.1, 2.0, 2.2, 2.0]},
    launch={"warm": [0.10, 0.10, 0.10, 0.10, 0.10], "gone": [1.0] * 5},
)
AFTER = report(
    tensor={"ours, 2 ranks": [0.8, 0.9, 0.8, 0.7, 0.8], "DTensor, 2 ranks": [2.1, 3.0, 3.1, 2.9, 3.0]},
    launch={"warm": [0.104, 0.104, 0.104, 0.104, 0.104], "new": [1.0] * 5},
) | {"machine": MACHINE | {"commit": "b"}}


def test_only_changes_beyond_the_spread_have_a_verdict():
    words = {row[1]: row[-1] for row in everything.changes(BEFORE, AFTER)}
    assert words == {
        "ours, 2 ranks": "faster",
        "DTensor, 2 ranks": "within the spread",  # its median rose by half, but one sample of five did not
        "warm": "same",  # apart, but by 4 %
    }
    words = {row[1]: row[-1] for row in everything.changes(AFTER, BEFORE)}
    assert words["ours, 2 ranks"] == "slower"


@pytest.mark.parametrize("a, b, said", [(5, 5, "slower"), (4, 4, "slower"), (3, 4, "too few rounds")])
def test_a_verdict_needs_rounds_enough_that_chance_rarely_gives_one(a, b, said):
    assert everything.verdict([1.0] * a, [2.0] * b) == said
    assert everything.chance(5, 5) == 2 / 252


def test_the_comparison_names_what_differs_and_what_changed():
    text = everything.comparison(BEFORE, AFTER)
    assert "commit: a -> b" in text and "3 numbers, 5 and 5 rounds: 1 changed" in text and "quick" not in text
    other = AFTER | {"quick": False, "machine": MACHINE | {"commit": "\x1b[2J"}}
    assert everything.comparison(BEFORE, other).startswith("commit: a -> ?[2J\nquick: True -> False\n")
    (line,) = [line for line in text.splitlines() if line.startswith("tensor")]
    assert line.split()[-4:] == ["1100.000", "800.000", "0.73", "faster"]
    assert len(everything.comparison(BEFORE, AFTER, every=True).splitlines()) == len(text.splitlines()) + 2
    slow = report(machine={"matrix product": [1.0] * 5}), report(machine={"matrix product": [2.0] * 5})
    assert "The machine itself runs at another speed" in everything.comparison(*slow)
    assert "no verdicts" in everything.comparison(
        report(3, x={"y": [1, 1, 1]}), report(3, x={"y": [2, 2, 2]})
    )


def test_files_are_compared_on_the_command_line_and_others_are_refused(tmp_path, capsys):
    for name, one in (("a", BEFORE), ("b", AFTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "faster" in capsys.readouterr().out
    (tmp_path / "other.json").write_text("[1]")
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "other.json")]) == 2
    assert "other.json is no report of `gpt2lab bench --all`" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(everything.RACES))
def test_quick_sizes_take_the_place_of_the_defaults(name):
    race = races.RACES[name]
    assert vars(races.arguments(name)) == race.options | {"quick": False}
    assert race.quick and race.quick.keys() <= race.options.keys()
    assert vars(races.arguments(name, quick=True)) == race.options | race.quick | {"quick": False}
    assert vars(races.arguments(name, ["--quick"])) == race.options | race.quick | {"quick": True}
    assert not [word for word in race.options if races.OPTIONS[word].kind is bool and race.options[word]]


@pytest.mark.parametrize(
    "line", ["data --steps 77", "generate --trials 77", "context --repeat 77", "tasks --runs 77"]
)
def test_what_is_typed_counts_more_than_quick_and_by_older_names_too(line):
    name, *words = line.split()
    for typed in (words, ["--quick", *words], ["--rounds", "77"]):
        assert races.arguments(name, typed).rounds == 77
    step = races.arguments("step", ["--turns", "8", "--steps", "9"])
    assert (step.rounds, step.iterations) == (8, 9)
    assert races.arguments("context", ["--worlds", "3", "5"]).ranks == [3, 5]


def test_rounds_take_turns_a_failure_stops_one_benchmark_and_time_is_limited(tmp_path, monkeypatch):
    calls, turn = [], count(1)

    def one(name, quick, folder):
        calls.append(name)
        if name == "bad" and calls.count("bad") == 2:
            raise RuntimeError("no such wire\nmore")
        return {"what": float(next(turn))}

    monkeypatch.setattr(everything, "run_one", one)
    monkeypatch.setattr(everything, "machine_speed", lambda: {"matrix product": 1.0})
    found = everything.collect(tmp_path, rounds=3, chosen=["good", "bad"])
    assert calls == ["good", "bad", "good", "bad", "good"] and found["rounds"] == 3
    assert found["seconds"]["good"]["what"] == [1.0, 3.0, 4.0] and found["seconds"]["bad"]["what"] == [2.0]
    assert found["failed"] == {"bad": "RuntimeError: no such wire"}
    monkeypatch.setattr(everything, "run_one", Mock(side_effect=AssertionError))  # without a word
    assert everything.collect(tmp_path, rounds=1, chosen=["good"])["failed"] == {"good": "AssertionError: "}
    monkeypatch.setattr(everything, "run_one", one)
    assert everything.collect(tmp_path, rounds=3, minutes=0.0, chosen=["good"])["rounds"] == 1


@pytest.mark.live
def test_one_command_writes_numbers_figure_and_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(everything, "RACES", {"sharding": races.RACES["sharding"]})
    small = {"width": 16, "rows": 2, "length": 4, "rounds": 1}
    monkeypatch.setitem(races.RACES, "sharding", replace(races.RACES["sharding"], quick=small))
    assert cli.main(["bench", "--all", "--quick", "--rounds", "2", "--out", str(tmp_path)]) == 0
    saved = everything.read_report(tmp_path / "all.json")
    assert {"system", "cores", "torch", "commit", "load before"} <= set(saved["machine"])
    assert {name: [len(s) for s in whats.values()] for name, whats in saved["seconds"].items()} == {
        "machine": [2, 2],
        "sharding": [2, 2],
    }
    assert (tmp_path / "all.png").stat().st_size > 5_000 and "2 rounds" in capsys.readouterr().out
    assert (tmp_path / "sharding.txt").read_text().count(
        "gpt2lab bench sharding --rounds 1 --ranks 2 --rows 2"
    ) == 2


def test_the_dashboard_has_a_panel_a_benchmark_and_rivals_are_grey():
    fig = dashboard(BEFORE)
    shown = [ax for ax in fig.axes if ax.axison]
    assert [ax.get_title(loc="left") for ax in shown] == ["tensor", "launch"]
    assert [t.get_text() for t in shown[0].get_yticklabels()] == [
        "ours, 2 ranks  1100",
        "DTensor, 2 ranks  2000",
    ]
    assert is_rival("torch's, 1f1b, 2 ranks")
    assert is_rival("all_reduce, 1 KiB, gloo")
    assert not is_rival("ours, torchless")
    assert round_ticks(0.4, 3) == [0.5, 1, 2] and round_ticks(0.4, 3000) == [1, 10, 100, 1000]
    assert milliseconds(1234.5) == "1234" and milliseconds(0.12345) == "0.123"
