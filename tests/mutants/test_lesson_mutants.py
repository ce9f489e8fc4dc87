"""What lessons print as proof says something else when what it proves is broken: cells run with a bug planted.

Only claims whose cells compute in this process; those made on live ranks have mutants in the files of their rooms.
"""

import contextlib
import io
from unittest.mock import patch

import pytest
from lesson_cells import lesson
from planting import bugs, is_killed

from gpt2lab.lessons.answers import setup
from gpt2lab.lessons.desk import Desk
from gpt2lab.planner import alpa, balance, reinforce
from gpt2lab.planner.cuts import Clock
from gpt2lab.planner.placement import Placing
from gpt2lab.planner.search import PLANNERS, Planner, every_pipeline, exhaustive, one_device, only, soap
from gpt2lab.sharding import tofu

# what a lesson prints: its number, and of each cell that this takes, in order, the unique text from which on it is run
RACE = "problem = lab.problem(slow", "names = [", "found = {name: PLANNERS"
PLACING = (
    "equal: True; no placement beats the bound: True", "16", 'config = PRESETS["mini"]', "pair = Cluster(2",
)  # fmt: skip
CUTS = ("slowest stage of the DP's cut is the smallest of all: True\nno step is shorter: True", "16",
        'config = PRESETS["mini"]', "small = GPT2Config(", "graph = gpt2_layers(small")  # fmt: skip
NOBODY = "nobody beats the exhaustive search: True", "17", *RACE
LEARNED = "learning found the best of all 256 placements: True", "17", *RACE
DELTA = "the best one takes as long in full: True", "17", "shorter = lab.problem("
INSIDE = "together [0, 0, 0]: 6; least of all eight: 6", "17", "costs, change = "
TOFU = "finds the least of all: True", "14", "config = GPT2Config(", "short = tofu.LinkChain("


def printed(words, number, *cells):
    """The cells of a claim print its words; names are their own."""
    of = lesson(number)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        desk = Desk(of.name, setup(of))
        for text in cells:
            (cell,) = (c for c in of.cells if c.kind == "code" and "wrong" not in c.tags and text in c.text)
            desk.run(cell.text[cell.text.index(text) :], desk.names)
    assert words in out.getvalue()


PLACEMENTS = Planner(soap, only(one_device), exhaustive(every_pipeline))
BUGS = {
    "the bound is too large": (Placing.lower_bound, "return max(", "return 1.2 * max(", PLACING),
    "the cut has equal counts":
        (balance.best_cut, "total = [0", "return equal_count(len(times), stages)\n    total = [0", CUTS),
    "all is drawn for one device":
        (reinforce._softmax, "return grown / grown.sum(1, keepdims=True)",
         "return (np.arange(logits.shape[1]) == 0) * np.ones_like(logits)", LEARNED),
    "only the changed operator is timed again":
        (Clock.__init__, " or not moved.isdisjoint(needs)", "", DELTA),
    "the integer program ignores changes of layout":
        (alpa.intra_operator, "target += [matrix[i][j]", "target += [0 * matrix[i][j]", INSIDE),
    "the dynamic program takes last choices":
        (tofu.LinkChain.halve, "return min(ways, key=lambda way: (self.cost(way, mesh), way))",
         "return [self.choices(n, before[n], mesh)[-1] for n in range(self.count)]", TOFU),
}  # fmt: skip


@bugs(BUGS)
def test_a_lesson_does_not_say_so_with_a_bug(bug, check):
    assert is_killed(bug, (printed, *check)), "nobody noticed"


def test_a_lesson_does_not_say_so_where_the_exhaustive_search_does_not_cut():
    printed(*NOBODY)
    # four are as fast as what it takes for the optimum, or faster
    others = "learned placement, PipeDream, Alpa' is none of the answers"
    with patch.dict(PLANNERS, {"every pipeline": PLACEMENTS}), pytest.raises(ValueError, match=others):
        printed(*NOBODY)
