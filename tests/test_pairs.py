"""The tests' own choice of cases: no pair is lost, and few cases are enough."""

import itertools

from pairs import all_pairs


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
