"""What rotates comes once in seven days, what belongs to a change at once; a choice of cases misses no pair."""

import itertools
import subprocess
import sys
import tomllib

import pytest
import tiers
from pairs import all_pairs

FILES = ["tests/mutants/test_text_mutants.py", "tests/test_mesh.py"]
DAYS = [str(day) for day in range(tiers.DAYS)]


def test_a_name_is_drawn_on_one_day_of_seven_and_in_everything():
    for name in ("a", "b", "tests/test_x.py::test_y[1]"):
        assert [tiers.drawn(name, day) for day in DAYS].count(True) == 1 and tiers.drawn(name, "all")


def test_names_spread_over_the_days():
    count = [sum(tiers.drawn(str(n), day) for n in range(7000)) for day in DAYS]
    assert sum(count) == 7000 and min(count) > 800


COLLECT = """
import os, sys, pytest
for os.environ["TODAY"] in sys.argv[2:]:
    print(f"day {os.environ['TODAY']}", flush=True)
    pytest.main(["--collect-only", sys.argv[1]])
"""


@pytest.mark.rotates
@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_all_days_are_those_of_everything(file):
    call = [sys.executable, "-c", COLLECT, file, *DAYS, "all"]
    said = subprocess.run(call, cwd=tiers.ROOT, capture_output=True, text=True).stdout.split("\nday ")
    *by_day, every = [{line for line in day.splitlines() if line.startswith(file)} for day in said]
    assert set().union(*by_day) == every and len(by_day) == len(DAYS) and len(every) > 5, said
    if file not in tiers.close(tiers.changed())[0]:
        assert len(every) <= sum(map(len, by_day)) < len(DAYS) * len(every)


@pytest.mark.parametrize("day", DAYS)
def test_of_the_bugs_made_by_hand_each_day_sees_nearly_all_by_the_test_that_is_named_alone(monkeypatch, day):
    files = tomllib.loads((tiers.ROOT / "tests/power/planted.toml").read_text())
    left = []
    for file, bugs in files.items():
        monkeypatch.setattr(tiers, "changed", lambda file=file: {file})
        for what, killer in ((what, bug["killer"]) for what, bug in bugs.items()):
            path = killer.split("::")[0]
            left += [] if tiers.runs(path, killer, tiers.may_rotate(path), day) else [what]
    assert len(left) <= 0.03 * sum(map(len, files.values())), left


def test_the_lessons_of_all_days_are_all_lessons(monkeypatch):
    monkeypatch.setattr(tiers, "changed", frozenset)
    by_day = [tiers.lessons(day)[0] for day in DAYS]
    assert sorted(sum(by_day, [])) == tiers.lessons("all")[0] == [f"{n:02d}" for n in range(21)]


def test_of_lessons_that_import_what_changed_the_most_direct_run_and_the_others_are_told(monkeypatch):
    monkeypatch.setattr(tiers, "changed", lambda: {"gpt2lab/plan.py", "notebooks/src/05_zero.py"})
    first, left = tiers.lessons("0")
    assert "05" in first and left and not set(first) & set(left)
    turn = {f"{n:02d}" for n in range(0, 21, 7)}
    assert len(set(first) - turn) <= tiers.MOST
    both = {*first, *left} - turn
    assert all(
        "gpt2lab/plan.py" in tiers.imported(str(p.relative_to(tiers.ROOT))) or "05" in p.name
        for p in (tiers.ROOT / "notebooks/src").glob("*.py")
        if p.name[:2] in both
    )


def test_what_is_edited_or_imports_what_is_edited_is_touched(monkeypatch):
    monkeypatch.setattr(tiers, "changed", lambda: {"gpt2lab/parallel/tensor.py", "tests/test_zero.py"})
    assert (
        tiers.touched("tests/test_zero.py") >= 100 > tiers.touched("tests/mutants/test_tensor_mutants.py") > 0
    )
    assert not tiers.touched("tests/test_tiers.py")


def test_of_files_of_tests_the_closest_run_whole_and_the_others_are_told(monkeypatch):
    first, left = tiers.close(frozenset({"gpt2lab/ranks/comm.py", "tests/test_zero.py"}))
    assert first[0] == "tests/test_zero.py" and "tests/test_comm.py" in first[1:4]
    assert len(first) == tiers.FILES + 1 and left and not set(first) & set(left)
    changed = {"gpt2lab/ranks/comm.py"}
    assert all(not changed.isdisjoint(tiers.near(path)) for path in left)
    assert tiers.close(frozenset({"README.md"})) == ([], [])
    monkeypatch.setattr(tiers, "changed", lambda: changed)
    late = next(path for path in left if not tiers.shares(path))
    assert [tiers.runs(late, "a", True, day) for day in DAYS].count(True) == 1
    assert all(tiers.runs("tests/test_comm.py", "a", True, day) for day in DAYS)


@pytest.mark.parametrize("number, file", [("07", "tests/test_pipeline.py"), ("09", "tests/test_context.py")])
def test_a_lesson_s_tests_are_its_proof_and_the_files_that_import_its_labs(number, file):
    first, *others = tiers.tests_of_lesson(number)
    assert f"[{number}_" in first and others and all((tiers.ROOT / path).exists() for path in others)


# --- the choice of cases


def met(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_of_the_product_is_in_few_cases(monkeypatch):
    monkeypatch.delenv("SLOW", raising=False)
    values = "abcd", range(8), (2, 5), (None, 1, 3)
    chosen = all_pairs(*values)
    assert met(chosen) == met(itertools.product(*values))
    assert 4 * 8 <= len(chosen) < 45 and len(set(chosen)) == len(chosen)


def test_what_is_not_legal_is_not_chosen_and_its_pairs_are_not_missed(monkeypatch):
    monkeypatch.delenv("SLOW", raising=False)
    legal = lambda a, b, c: a != b
    assert met(all_pairs("ab", "ab", "xy", legal=legal)) == met(["abx", "aby", "bax", "bay"])


def test_make_test_all_takes_the_whole_product(monkeypatch):
    monkeypatch.setenv("SLOW", "1")
    assert all_pairs("ab", "cd", "ef") == list(itertools.product("ab", "cd", "ef"))
