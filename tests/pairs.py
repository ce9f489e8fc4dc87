"""Few cases that hold every pair of values of every two parameters; `make test-all` takes the whole product."""

import itertools
import os


def all_pairs(*values, legal=lambda *case: True) -> list[tuple]:
    """Cases of the product of `values`, in its order: every two values that meet in a legal case meet in one of these.

    With SLOW in the environment, all legal cases.
    """
    every = [case for case in itertools.product(*values) if legal(*case)]
    if os.environ.get("SLOW"):
        return every
    missing, chosen = set().union(*map(_pairs, every)), []
    while missing:
        best = max(every, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return [case for case in every if case in chosen]


def _pairs(case) -> set:
    return set(itertools.combinations(enumerate(case), 2))
