"""One judge for exercises: it tries an answer on cases and says the first difference in words.

A `Task` says what is asked. Its *shown* cases are fixed: the words and numbers of a verdict come from them. Its *drawn*
cases only decide whether an answer passes: they are made by chance, so an answer that is right for the shown sizes
alone, or a table of them, does not pass. A verdict on a drawn case names the seed that draws it again. An answer that
gives in all shown cases what a wrong answer of the lesson gives, also hears the mistake that this one makes.
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb

from ..environment import static, unanswered
from .differences import CHANGED, UNROLLED, difference, equal, listed, plain, returned
from .guards import PACKAGE, closed, unaided

KNOWN = Path(__file__).with_name("known.json")
"""{lesson: {digest of what a wrong answer gives: its mistake}}, which `python -m gpt2lab.lessons.known` writes."""

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

    `shown` are tuples of arguments, described by `what` with the arguments in its braces, or a dict of words to
    arguments. `drawn(chance)` makes the arguments of one of `count` more cases from a `random.Random`. What an answer
    gives is `call(answer, *arguments)`, by default `answer(*arguments)`; `like` takes (that, words of the case) and
    gives it in the form of the right answer, or raises AssertionError. Then it is compared: with `rules(it,
    *arguments)`, a table for `refuse`; with `mistakes`, sentences and wrong answers that differ in the last digits; and
    with `right(*arguments)`. Modules in `closed` may not be called, and nothing of the package by an answer that
    is called as it is, without a `call`. Arguments must stay as they were given.
    A `brief` task, whose cases take long, is over with the first difference.
    """

    right: Callable | None
    shown: Mapping[str, tuple] | Sequence[tuple]
    what: str = ""
    drawn: Callable[[random.Random], tuple] | None = None
    call: Callable | None = None
    like: Callable | None = None
    rules: Callable[..., Mapping] | None = None
    mistakes: Mapping[str, Callable] = field(default_factory=dict)
    closed: tuple[str, ...] = ()
    tolerance: float = 1e-10
    count: int = 25
    brief: bool = False

    def __call__(self, *answers) -> None:
        judge(self, *answers)

    @property
    def cases(self) -> list[tuple[str, tuple]]:
        """The shown cases: (words, arguments)."""
        if isinstance(self.shown, Mapping):
            return list(self.shown.items())
        return [(self.words(given), given) for given in self.shown]

    def words(self, given: tuple) -> str:
        """A case in words."""
        return self.what.format(*given) if self.what else f"with {', '.join(map(repr, given))}"


@dataclass(frozen=True, eq=False)
class Puzzle:
    """A puzzle with a score, less is better: `bar` is what passes, `best` the least that is known.

    `read` takes what the answer gave and gives it in the form that `rules`, a table for `refuse`, and `score` take.
    With `cases`, tuples of arguments, it is a list of what the answer gave for each; else an answer has no arguments.
    """

    score: Callable[..., float]
    unit: str
    bar: float
    best: float
    read: Callable = lambda found: found
    rules: Callable[..., Mapping] | None = None
    cases: Sequence[tuple] = ()
    digits: int = 1

    def __call__(self, answer) -> str:
        found = [listed(returned(answer(*deepcopy(case)))) for case in self.cases or [()]]
        found = self.read(found if self.cases else found[0])
        refuse("", self.rules(found) if self.rules else {})
        return scored(round(float(self.score(found)), self.digits), self.unit, bar=self.bar, best=self.best)


def scored(found: float, unit: str, *, bar: float, best: float) -> str:
    """Words about the score of a puzzle, less is better: `bar` is what passes, `best` the least that is known.

    Raises AssertionError with all three numbers when `found` is above the bar.
    """
    assert found <= bar, f"{found:g} {unit}; at most {bar:g} pass, and the best known answer has {best:g}."
    if found < best:
        return f"{found:g} {unit}, better than the best known answer ({best:g})!"
    return f"{found:g} {unit} (bar {bar:g}, best known {best:g})"


def refuse(words: str, rules: Mapping[str, object]) -> None:
    """Raise AssertionError with the first sentence of `rules` whose value is true; `words`, if any, stand before it.

    A value that can only be had where the sentences before it do not apply is a function without arguments.
    """
    for sentence, broken in rules.items():
        broken = broken() if callable(broken) else broken
        assert not broken, f"{words}: {sentence}" if words else sentence


class Differs(AssertionError):
    """An answer gave something else than what is right."""


def judge(task: Task, *answers) -> None:
    """Raise AssertionError with the first difference between an answer and what a task asks for."""
    first, seen = None, []
    for words, given in task.cases:
        try:
            tried(task, answers, words, given, seen)
        except Differs as error:
            first = first or error
            if task.brief:
                break
        except Exception as error:
            if not first:
                raise
            seen.append(type(error).__name__)
    if first:
        mistake = known().get(digest([words for words, _ in task.cases], seen))
        raise AssertionError(f"{first}. {mistake}" if mistake else str(first))
    if task.drawn:
        by_chance(lambda chance: _drawn(task, answers, chance), task.count)


@cache
def known() -> dict[str, str]:
    """The mistakes of all lessons' wrong answers, by the digest of what these give."""
    lessons = json.loads(KNOWN.read_text())
    return {key: mistake for mistakes in lessons.values() for key, mistake in mistakes.items()}


def digest(cases: list[str], seen: list) -> str:
    """A name for what an answer gave in some cases; the last digits of numbers do not matter."""
    return hashlib.sha256(repr((cases, [plain(value) for value in seen])).encode()).hexdigest()[:12]


def _drawn(task: Task, answers: tuple, chance: random.Random) -> None:
    given = task.drawn(chance)
    tried(task, answers, task.words(given), given, [])


def by_chance(trial: Callable[[random.Random], None], count: int = 25) -> None:
    """Call `trial(chance)` some times; an AssertionError gets the seed that repeats it."""
    number = seed()
    chance = random.Random(number)
    for _ in range(count):
        try:
            trial(chance)
        except AssertionError as error:
            raise AssertionError(f"{error} (a drawn case: {SEED}={number} draws it again)") from None


def tried(task: Task, answers: tuple, words: str, given: tuple, seen: list) -> None:
    """Try an answer, which may consist of several functions, on one case; what it gave is put into `seen`."""
    mine = deepcopy(given)
    shut = task.closed or (() if task.call else (PACKAGE,))
    answers = [unaided(answer, *shut) for answer in answers] if shut else answers
    call = partial(task.call, *answers) if task.call else answers[0]
    got = called(call, mine, words)
    want = task.right(*deepcopy(given)) if task.right else None
    if want is not None or not task.right:
        returned(got, words)
    but = getattr(got, "but", "")
    got = task.like(got, words) if task.like else got
    same = equal(mine, given)
    seen.append((got, same))
    try:
        refuse(words, task.rules(got, *given) if task.rules else {})
        for sentence, wrong in task.mistakes.items():
            said = wrong(*deepcopy(given))
            right = equal(said, want, task.tolerance)  # by chance, in this case
            assert right or not equal(got, said, task.tolerance), f"{words}: {sentence}"
        if task.right:
            difference(got, want, words, task.tolerance)
        assert same, f"{words}: right, but {CHANGED}"
        assert not but, f"{words}: right, but {but}"
    except AssertionError as error:
        raise Differs(str(error)) from None


def called(answer, given: tuple, words: str, shut: tuple[str, ...] = ()):
    """What an answer gives. What it raises becomes an AssertionError with the case; a blank exercise stays one."""
    try:
        with closed(*shut) if shut else nullcontext():
            found = answer(*given)
            return list(found) if isinstance(found, UNROLLED) else found
    except Exception as error:
        if unanswered(error):
            raise
        said = sentence(error)
        raise AssertionError(said if said.startswith(words) else f"{words}: {said}") from error


def run_there(run: Callable, answer, *given):
    """What `run(answer, *given)` gives, in the process of the answer: what is no plain value need not leave it.

    `given` and what `run` gives must be plain values (`classroom.values`), where that is another process.
    """
    there = getattr(answer, "run_there", None)
    return there(run, *given) if there else run(answer, *given)


def sentence(error: BaseException) -> str:
    """What an error says. Where a checker raised it, the answer does not fit."""
    if isinstance(error, AssertionError):
        return str(error) or "an assertion without words; run the checker by hand to see which"
    if hasattr(error, "ename"):
        return spoken(error) if "Traceback" in str(error) else f"{error.ename}: {error}"
    said = f"{type(error).__name__}: {error}"
    *_, (frame, _) = walk_tb(error.__traceback__)
    ours = isinstance(error, Exception) and frame.f_globals.get("__name__", "").startswith(__package__)
    return f"your function, or what it gives, does not fit what is asked for. {said}" if ours else said


def spoken(error) -> str:
    """What the error of a rank says, without the rank's traceback."""
    words = str(error).strip().rpartition("Traceback (most recent call last):\n")[2]
    return re.sub(r"\A( .*\n)*(AssertionError: |[\w.]+\.Mismatch: )?", "", words)
