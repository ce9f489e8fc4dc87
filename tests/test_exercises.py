"""Blanks are to do, wrong answers fail with their own words; and the proof itself can fail.

That solutions pass is seen where notebooks run strictly, and by `test_every_cheat`, which judges each twice.
"""

import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiers
import torch
from torch.autograd import forward_ad

from gpt2lab.lessons.answers import as_expected, exercises, setup, words_of
from gpt2lab.lessons.desk import Desk, split
from gpt2lab.lessons.exercises import (
    STATUS,
    NotPassed,
    by_hand,
    check,
    close,
    cuts,
    engine,
    trade_off,
    unaided,
    verdict,
)
from gpt2lab.lessons.source import read_lesson
from gpt2lab.planner import metrics
from gpt2lab.verify import verify

pytestmark = pytest.mark.live  # most exercises run on ranks
SOURCES = sorted(Path(__file__).parents[1].joinpath("notebooks", "src").glob("*.py"))

LESSON = '''
# %% tags=["setup"]
from gpt2lab.lessons.exercises import check, close

def test_half(answer):
    {test}

# %% tags=["exercise"]
def half(x):
    """Half of x."""
    ### BEGIN SOLUTION
    return {solution}
    ### END SOLUTION

check("half", test_half, half)

# %% tags=["wrong"]
# FAIL: {words}
def half(x):
    return x
'''


TEST = 'close(answer(4), 2, "half of 4")'


def lesson(tmp_path, solution="x / 2", words="half of 4", test=TEST, edit=lambda text: text):
    path = tmp_path / "07_halves.py"
    path.write_text(edit(LESSON.format(solution=solution, words=words, test=test)))
    return read_lesson(path)


def prove(lesson, chosen=lambda text: True, solution: bool = True) -> list[str]:
    """Complaints about the exercises of a lesson; empty when all is well.

    Of the wrong answers those are `chosen`; the `solution` is left out where it is judged elsewhere.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        desk, complaints = Desk(lesson.name, setup(lesson)), []
        for exercise in exercises(lesson):
            name = exercise.cell.text.split("\n")[0]
            if not exercise.wrong:
                complaints.append(f"{name}: no wrong answer shows that its checker can fail")
            body, checks = split(exercise.cell.solved())
            said = []
            for answer, expected in [
                *[(body, "PASS")] * solution,
                (split(exercise.cell.blank())[0], "TODO"),
                *((cell.text, words_of(cell)) for cell in exercise.wrong if chosen(cell.text)),
            ]:
                found = desk.verdicts(body, answer, checks)
                if not as_expected(found, expected):
                    complaints.append(f"{name}: expected {expected!r}, but check said {found}")
                elif found in said:
                    complaints.append(f"{name}: two answers get the same verdict: {found}")
                said.append(found)
    return complaints


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_blanks_are_todo_and_wrong_answers_fail(source, monkeypatch, pools):
    # warm ranks, for which the serial run is computed once
    warm = lambda plan, ranks: verify(plan, ranks=ranks or pools[plan.world])
    monkeypatch.setattr(trade_off, "verify", warm)
    own = tiers.touched(source.relative_to(tiers.ROOT).as_posix())
    number, known = source.name[:2], Mock(**{"get.side_effect": engine.known().get})
    monkeypatch.setattr(engine, "known", lambda: known)
    assert prove(read_lesson(source), lambda text: own or tiers.drawn(text), solution=False) == []
    written = set(json.loads(engine.KNOWN.read_text())[number])
    asked = {call.args[0] for call in known.get.call_args_list}
    surplus = written - asked if own or tiers.today() == "all" else set()
    assert not asked - written and not surplus, f"python -m gpt2lab.lessons.known {number}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_lesson_has_exercises_each_with_five_wrong_answers_in_words_of_their_own(source):
    found = exercises(read_lesson(source))
    assert found
    for exercise in found:
        words = [words_of(cell) for cell in exercise.wrong]
        assert len(words) >= 5, f"{exercise.cell.text.splitlines()[0]}: {sorted(words)}"
        assert len(set(words)) == len(words), (
            f"{exercise.cell.text.splitlines()[0]} says twice: {sorted(words)}"
        )


BLIND = f"""try:
        {TEST}
    except NotImplementedError:
        raise AssertionError("half of 4")"""
AGAIN = '\n# %% tags=["wrong"]\n# FAIL: expected 2, got 4\ndef half(x):\n    return 4\n'
PROVED = {  # what is wrong with a lesson: (its parts, what is said of it)
    "nothing": ({}, []),
    "the solution":
        ({"solution": "x / 3"}, ["expected 'PASS'", "half of 4: expected 2, got 1.33"]),
    "a checker that cannot fail": ({"test": "answer(4)"}, ["expected 'half of 4'", "PASS"]),
    "words of another verdict": ({"words": "a third of 9"}, ["expected 'a third of 9'"]),
    "a blank that fails instead of being to do": ({"test": BLIND}, ["expected 'TODO'"]),
    "no wrong answer": ({"edit": lambda text: text.split('# %% tags=["wrong"]')[0]}, ["no wrong answer"]),
    "two wrong answers with one verdict":
        ({"edit": lambda text: text + AGAIN}, ["two answers get the same verdict"]),
    "two wrong answers with two verdicts": ({"edit": lambda text: text + AGAIN.replace("4", "5")}, []),
}  # fmt: skip


@pytest.mark.parametrize("wrong", PROVED)
def test_a_mistake_of_a_lesson_is_one_complaint(wrong, tmp_path):
    parts, words = PROVED[wrong]
    complaints = prove(lesson(tmp_path, **parts))
    assert len(complaints) == bool(words) and all(word in complaints[0] for word in words)


def test_a_wrong_answer_must_say_what_the_verdict_contains(tmp_path):
    with pytest.raises(ValueError, match="must start with"):
        prove(lesson(tmp_path, edit=lambda text: text.replace("# FAIL: ", "# ")))


def test_split_keeps_decorators_with_their_functions():
    body, checks = split("@cache\ndef f():\n    pass\n\ncheck('f',\n      test, f)")
    assert body.strip() == "@cache\ndef f():\n    pass" and checks == "check('f',\n      test, f)"


class FromARank(RuntimeError):
    ename = "NotImplementedError"


def raises(error):
    raise error


@pytest.mark.parametrize(
    "error, line",
    [
        (NotImplementedError("your turn"), "TODO  x: write it, then run this cell again\n"),
        (FromARank("rank 2: your turn"), "TODO  x: write it, then run this cell again\n"),
        (NotImplementedError("no such kernel"), "FAIL  x: NotImplementedError: no such kernel\n"),
        (FromARank("no such kernel"), "FAIL  x: NotImplementedError: no such kernel\n"),
        (AssertionError("too long"), "FAIL  x: too long\n"),
        (ZeroDivisionError("division by zero"), "FAIL  x: ZeroDivisionError: division by zero\n"),
    ],
)
def test_check_prints_one_line_and_raises_in_strict_mode_only(error, line, capsys, monkeypatch):
    monkeypatch.delenv("GPT2LAB_STRICT", raising=False)
    check("x", raises, error)
    assert capsys.readouterr().out == line and STATUS["x"] == line[:4]
    monkeypatch.setenv("GPT2LAB_STRICT", "1")
    with pytest.raises(NotPassed, match="x: "):
        check("x", raises, error)


def endless():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def test_an_answer_that_never_ends_fails_with_a_sentence(capsys, monkeypatch):
    monkeypatch.delenv("GPT2LAB_STRICT", raising=False)
    monkeypatch.setattr("gpt2lab.lessons.exercises.LIMIT", 0.1)
    check("x", endless)
    assert capsys.readouterr().out == "FAIL  x: no end after 0.1 s. Does a loop of yours never stop?\n"
    time.sleep(0.15)  # no alarm is left


def test_an_answer_that_leaves_python_does_not_end_run_all(capsys, monkeypatch):
    monkeypatch.delenv("GPT2LAB_STRICT", raising=False)
    check("x", sys.exit, 3)
    assert capsys.readouterr().out == "FAIL  x: SystemExit: 3\n"


def test_check_passes_arguments_on(capsys):
    check("sum", lambda a, b: close(a, b, "sum"), 2, b=2.0)
    assert capsys.readouterr().out == "PASS  sum\n"


NAME = engine.Task(lambda x: "ab", [(1,)])


@pytest.mark.parametrize(
    "test, answer, words",
    [
        (cuts.choose, lambda: 3, "does not fit what is asked for. TypeError: 'int' object is not iterable"),
        (NAME, lambda: "ab", "does not fit what is asked for. TypeError: "),
        (NAME, lambda x: 1 / 0, "with 1: ZeroDivisionError: division by zero"),
        (NAME, lambda x: "ba", "with 1: expected 'ab', got 'ba'"),
    ],
)
def test_a_checker_that_stumbles_over_an_answer_says_that_it_does_not_fit(test, answer, words):
    status, why = verdict(test, answer)
    assert status == "FAIL" and words in why
    assert ("does not fit" in why) == ("does not fit" in words)


def test_what_knows_the_answer_is_closed_while_an_answer_is_checked_and_open_again_afterwards():
    before = sys.getprofile()
    with pytest.raises(AssertionError, match="metrics.karp_flatt knows the answer"):
        unaided(lambda: metrics.karp_flatt(2.0, 4), "gpt2lab.planner")()
    assert unaided(lambda: abs(-3), "gpt2lab.planner")() == 3
    assert metrics.karp_flatt(4.0, 4) == 0 and sys.getprofile() is before


def squares(x):
    return (x * x).sum()


def backward(x):
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.clone().requires_grad_()
        squares(leaf).backward()
    return leaf.grad


def tangents(x):
    with forward_ad.dual_level():
        every = [squares(forward_ad.make_dual(x, one)) for one in torch.eye(len(x))]
        return torch.stack([forward_ad.unpack_dual(y).tangent for y in every])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch does it for tangents
@pytest.mark.parametrize(
    "ask",
    [
        backward,
        torch.func.grad(squares),
        lambda x: torch.func.vjp(squares, x)[1](torch.tensor(1.0))[0],
        lambda x: torch.autograd.functional.jacobian(squares, x),
        lambda x: torch.ops.aten.threshold_backward(2 * x, x, 0),
        lambda x: torch.ops.aten.threshold_backward.default(2 * x, x, 0),
        tangents,
    ],
)
def test_by_hand_is_without_autograd_whichever_way_it_is_asked(ask):
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(AssertionError, match="autograd would give this"), by_hand():
        ask(x)
    assert ask(x).tolist() == [2, 4]
    with by_hand(), torch.no_grad():
        assert (2 * x).tolist() == [2, 4]


def test_a_python_that_leaves_checks_out_passes_nothing():
    said = "from gpt2lab.lessons.exercises import close, verdict; print(*verdict(close, 1.0, {}, 'x'))"
    for flags, answer, words in (
        ([], 1, "PASS"),
        ([], 2, "FAIL x: expected"),
        (["-O"], 2, "FAIL"),
        (["-O"], 1, "FAIL"),
    ):
        line = [sys.executable, *flags, "-c", said.format(float(answer))]
        found = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        assert found.startswith(words) and ("PYTHONOPTIMIZE" in found) == bool(flags)
