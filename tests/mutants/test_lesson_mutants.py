"""What lessons print as proof says something else when what it proves is broken: cells run with a bug planted.

Only claims whose cells compute in this process; those made on live ranks have mutants in the files of their rooms.
"""

import contextlib
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from planting import planted
from test_search_mutants import no_changes, own_jobs_only

from gpt2lab.lessons.answers import setup
from gpt2lab.lessons.desk import Desk
from gpt2lab.lessons.source import read_lesson
from gpt2lab.planner import alpa, balance, reinforce
from gpt2lab.planner.cuts import Clock
from gpt2lab.planner.placement import Placing
from gpt2lab.planner.search import PLANNERS, Planner, every_pipeline, exhaustive, one_device, only, soap
from gpt2lab.sharding import tofu

SOURCES = Path(__file__).parents[2] / "notebooks" / "src"


@dataclass(frozen=True)
class Claim:
    """What a lesson prints, and of each cell that this takes, in order, the unique text from which on it is run."""

    lesson: str
    cells: tuple[str, ...]
    says: str


PLACING = Claim(
    "16", ('config = PRESETS["mini"]', "pair = Cluster(2"), "equal: True; no placement beats the bound: True"
)
CUTS = Claim(
    "16",
    ('config = PRESETS["mini"]', "small = GPT2Config(", "graph = gpt2_layers(small"),
    "slowest stage of the DP's cut is the smallest of all: True\nno step is shorter: True",
)
RACE = "problem = lab.problem(slow", "names = ["
NOBODY = Claim("17", RACE, "nobody beats the exhaustive search: True")
LEARNED = Claim("17", RACE, "learning found the best of all 256 placements: True")
DELTA = Claim("17", ("shorter = lab.problem(",), "the best one takes as long in full: True")
INSIDE = Claim("17", ("costs, change = ",), "together [0, 0, 0]: 6; least of all eight: 6")
TOFU = Claim("14", ("config = GPT2Config(", "short = tofu.LinkChain("), "finds the least of all: True")


@cache
def lesson(number: str):
    """The lesson whose number this is."""
    return read_lesson(next(SOURCES.glob(f"{number}_*.py")))


def printed(claim: Claim) -> str:
    """What the cells of a claim print, in names of their own."""
    of = lesson(claim.lesson)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        desk = Desk(of.name, setup(of))
        for text in claim.cells:
            (cell,) = (c for c in of.cells if c.kind == "code" and "wrong" not in c.tags and text in c.text)
            desk.run(cell.text[cell.text.index(text) :], desk.names)
    return out.getvalue()


def last_choices(right):
    """The dynamic program without its memory: the last way to cut each link."""
    return lambda self, before, mesh: [self.choices(n, before[n], mesh)[-1] for n in range(self.count)]


def one_device_only(right):
    return lambda logits: (np.arange(logits.shape[1]) == 0) * np.ones_like(logits)


PLACEMENTS = Planner(soap, only(one_device), exhaustive(every_pipeline))
BUGS = {
    "the bound is too large": (
        PLACING,
        lambda: planted(Placing, "lower_bound", lambda right: lambda self: 1.2 * right(self)),
    ),
    "the cut has equal counts": (
        CUTS,
        lambda: planted(balance, "best_cut", lambda right: lambda t, s: balance.equal_count(len(t), s)),
    ),
    "the exhaustive search does not cut": (
        NOBODY,
        lambda: patch.dict(PLANNERS, {"every pipeline": PLACEMENTS}),
    ),
    "all is drawn for one device": (LEARNED, lambda: planted(reinforce, "_softmax", one_device_only)),
    "only the changed operator is timed again": (DELTA, lambda: planted(Clock, "changed", own_jobs_only)),
    "the integer program ignores changes of layout": (
        INSIDE,
        lambda: planted(alpa, "intra_operator", no_changes),
    ),
    "the dynamic program takes last choices": (
        TOFU,
        lambda: planted(tofu.LinkChain, "halve", last_choices),
    ),
}


@pytest.mark.parametrize(
    "claim", list(dict.fromkeys(bug[0] for bug in BUGS.values())), ids=lambda claim: claim.says[:40]
)
def test_a_lesson_says_so(claim):
    assert claim.says in printed(claim)


@pytest.mark.parametrize("name", BUGS)
def test_a_lesson_does_not_say_so_with_a_bug(name):
    claim, bug = BUGS[name]
    with bug():
        assert claim.says not in printed(claim)
