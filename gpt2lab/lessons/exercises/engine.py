"""One judge for exercises: it tries an answer on cases and says the first difference in words.

A `Task` says what is asked. Its *shown* cases are fixed: the words and numbers of a verdict come from them. Its *drawn*
cases only decide whether an answer passes: they are made by chance, so an answer that is right for the shown sizes
alone, or a table of them, does not pass. A verdict on a drawn case names the seed that draws it again.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field

from ..environment import static
from .differences import difference, equal, returned
from .guards import closed

SEED = "GPT2LAB_SEED"
"""The variable of the environment that names the seed of drawn cases."""


def seed() -> int:
    """The seed of drawn cases: the one that is named, 0 where results must repeat, and else a new one each time."""
    if named := os.environ.get(SEED):
        return int(named)
    fixed = static() or os.environ.get("GPT2LAB_STRICT") == "1" or os.environ.get("CI")
    return 0 if fixed else random.SystemRandom().randrange(10**6)


@dataclass(frozen=True, eq=False)
class Task:
    """What an exercise asks for; calling a task judges an answer, so that it is a checker as a function is.

    `right(*arguments)` gives what is right. `shown` are tuples of arguments, described by `what` with the arguments in
    its braces, or a dict of words to arguments. `drawn(chance)` makes the arguments of one of `count` more cases from a
    `random.Random`. `mistakes` are sentences and the wrong answers that they are about, called as `right` is; `like`
    takes (what was returned, words of the case) and gives it in the form of the right answer, or raises AssertionError.
    Modules in `closed` may not be called; with `keep` arguments must stay as they were given.
    """

    right: Callable
    shown: Mapping[str, tuple] | Sequence[tuple]
    what: str = ""
    drawn: Callable[[random.Random], tuple] | None = None
    mistakes: Mapping[str, Callable] = field(default_factory=dict)
    like: Callable | None = None
    closed: tuple[str, ...] = ()
    keep: bool = True
    tolerance: float = 1e-10
    count: int = 25

    def __call__(self, answer) -> None:
        judge(self, answer)

    @property
    def cases(self) -> list[tuple[str, tuple]]:
        """The shown cases: (words, arguments)."""
        if isinstance(self.shown, Mapping):
            return list(self.shown.items())
        return [(self.words(given), given) for given in self.shown]

    def words(self, given: tuple) -> str:
        """A case in words."""
        return self.what.format(*given) if self.what else f"with {', '.join(map(repr, given))}"


def judge(task: Task, answer) -> None:
    """Raise AssertionError with the first difference between an answer and what a task asks for."""
    for words, given in task.cases:
        tried(task, answer, words, given)
    if task.drawn:
        by_chance(lambda chance: _drawn(task, answer, chance), task.count)


def _drawn(task: Task, answer, chance: random.Random) -> None:
    given = task.drawn(chance)
    tried(task, answer, task.words(given), given)


def by_chance(trial: Callable[[random.Random], None], count: int = 25) -> None:
    """Call `trial(chance)` some times; an AssertionError gets the seed that repeats it."""
    number = seed()
    chance = random.Random(number)
    for _ in range(count):
        try:
            trial(chance)
        except AssertionError as error:
            raise AssertionError(f"{error} (a drawn case: {SEED}={number} draws it again)") from None


def tried(task: Task, answer, words: str, given: tuple) -> None:
    """Try an answer on one case."""
    mine, want = deepcopy(given), task.right(*deepcopy(given))
    got = called(answer, mine, words, task.closed)
    if want is not None:
        returned(got, words)
    got = task.like(got, words) if task.like else got
    for sentence, wrong in task.mistakes.items():
        said = wrong(*deepcopy(given))
        right = _alike(said, want, task.tolerance)  # by chance, in this case
        assert right or not _alike(got, said, task.tolerance), f"{words}: {sentence}"
    difference(got, want, words, task.tolerance)
    assert not task.keep or equal(mine, given), (
        f"{words}: right, but your function changed what it was given; work on copies"
    )


def called(answer, given: tuple, words: str, shut: tuple[str, ...] = ()):
    """What an answer gives. What it raises becomes an AssertionError with the case; NotImplementedError stays."""
    try:
        with closed(*shut) if shut else nullcontext():
            return answer(*given)
    except (AssertionError, NotImplementedError):
        raise
    except Exception as error:
        kind = getattr(error, "ename", "") or type(error).__name__
        raise AssertionError(f"{words}: {kind}: {error}") from error


def _alike(got, said, tolerance: float) -> bool:
    try:
        difference(got, said, "", tolerance)
    except AssertionError:
        return False
    return True
