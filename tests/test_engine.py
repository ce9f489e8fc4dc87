"""The engine of exercises: each slip is named, each observation can fail, and style is no mistake."""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2lab.lessons import answers, exercises
from gpt2lab.lessons.desk import Desk
from gpt2lab.lessons.environment import YOUR_TURN
from gpt2lab.lessons.exercises import engine, guards, pipeline, pretended, verdict, watching
from gpt2lab.lessons.exercises.differences import Between, Most, close, difference, equal
from gpt2lab.lessons.exercises.engine import SEED, Puzzle, Task, by_chance
from gpt2lab.lessons.exercises.pretended import together
from gpt2lab.lessons.exercises.ranked import ALL, ranked, sent
from gpt2lab.lessons.source import read_lesson
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    monkeypatch.setenv(SEED, "0")


def says(task, answer) -> str:
    """PASS, or the words of the verdict."""
    status, why = verdict(task, answer)
    return why if status == "FAIL" else status


AREA = Task(
    lambda height, width: height * width,
    shown={"a square": (3, 3), "a strip": (1, 7)},
    what="{} by {}",
    drawn=lambda chance: (chance.randint(2, 50), chance.randint(2, 50)),
    closed=("gpt2lab.planner",),
)


def test_a_right_answer_passes_in_any_style():
    for style in (lambda a, b: a * b, lambda a, b: np.int64(a * b), lambda a, b: torch.tensor(float(a * b))):
        assert says(AREA, style) == "PASS"


def test_a_generator_is_a_list_and_runs_where_the_package_is_closed():
    halves = Task(lambda n: [n / 2, n], shown=[(3,)])
    assert says(halves, lambda n: (x for x in (n / 2, n))) == "PASS"
    assert "knows the answer" in says(halves, lambda n: (difference(x, x, "") or x for x in (n / 2, n)))


def test_a_puzzle_takes_what_is_no_list_for_a_list():
    most = Puzzle(max, "units", bar=3, best=2, read=lambda found: found if type(found) is list else [9])
    for found in (iter([1, 2]), np.array([1, 2]), range(3), torch.tensor([1, 2]), (np.int64(1), 2)):
        assert verdict(most, lambda found=found: found) == ("PASS", "2 units (bar 3, best known 2)")


def test_what_is_not_written_yet_is_to_do():
    def blank(height, width):
        raise NotImplementedError(YOUR_TURN)

    assert says(AREA, blank) == "TODO"


def on_meta(height, width):
    """What torch itself has not."""
    return torch.ones(height, width, device="meta").cpu()


@pytest.mark.parametrize("layer", [on_meta, torch.nn.Module()])
def test_what_torch_has_not_is_an_error_and_not_to_do(layer):
    said = says(AREA, layer)
    assert said.startswith("a square: NotImplementedError: ") and len(said) > 40
    assert verdict(layer, 3, 3)[0] == "FAIL"


@pytest.mark.live
def test_on_a_rank_too_only_a_blank_exercise_is_to_do():
    def ask(rank, world_size, answer):
        return answer(rank, 2)

    with pytest.raises(AssertionError, match="NotImplementedError: "):
        exercises.live(ask, on_meta, ranks=2)
    assert verdict(lambda: exercises.live(ask, blank_on_a_rank, ranks=2))[0] == "TODO"


def blank_on_a_rank(rank, world_size):
    raise NotImplementedError("your turn")


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda a, b: None, "a square: your function returned None. Is the return missing?"),
        (lambda a, b: a * b + 1, "a square: expected 9, got 10: one too many"),
        (lambda a, b: 2 * a * b, "a square: expected 9, got 18: 2 times what is right"),
        (lambda a, b: a * b / 3, "a square: expected 9, got 3: 1/3 of what is right"),
        (lambda a, b: -a * b, "a square: expected 9, got -9: the sign is turned"),
        (lambda a, b: a + b, "a square: expected 9, got 6"),
        (lambda a, b: a * b if a == b else 1 / (b - 7), "a strip: ZeroDivisionError: division by zero"),
        (lambda a, b: "9", "a square: expected numbers, got '9'"),
        (lambda a, b: [9], "a square: expected shape (), got (1,)"),
    ],
)
def test_the_first_difference_is_said(answer, words):
    assert words in says(AREA, answer)


def test_who_gives_the_same_as_a_wrong_answer_hears_its_mistake(monkeypatch):
    cases = [words for words, _ in AREA.cases]
    met = engine.digest(cases, [(6, True), (8, True)])
    monkeypatch.setattr(engine, "known", lambda: {met: "That is half of the way round"})
    half = "a square: expected 9, got 6. That is half of the way round"
    for style in (
        lambda a, b: a + b,
        lambda a, b: torch.tensor(float(a + b)),
        lambda a, b: (a + b) * (1 + 1e-12),
    ):
        assert says(AREA, style) == half
    other_in_a_strip = lambda a, b: a + b + (b == 7)
    assert says(AREA, other_in_a_strip) == "a square: expected 9, got 6"
    right_where_shown = lambda a, b: a * b if a * b in (7, 9) else a + b
    assert "half" not in says(AREA, right_where_shown)


def test_what_is_known_of_an_answer_is_no_part_of_what_the_judge_says_by_itself():
    said = {mistake for mistake in engine.known().values() if re.search(r"\bexpected\b|, got \(", mistake)}
    assert not said, "the FAIL words of a wrong answer are not those that the judge says"


def test_a_list_of_tensors_that_want_a_gradient_has_a_digest():
    made = [torch.ones(2, requires_grad=True), torch.ones(3)]
    assert engine.digest([], [made]) == engine.digest([], [[[1, 1], [1, 1, 1]]])


@pytest.mark.rotates
def test_what_is_known_is_said_by_a_wrong_answer_of_its_lesson():
    for number, mistakes in json.loads(engine.KNOWN.read_text()).items():
        (path,) = Path("notebooks/src").glob(f"{number}_*.py")
        said = {
            words
            for exercise in answers.exercises(read_lesson(path))
            for wrong in exercise.wrong
            for words in (answers.words_of(wrong), answers.mistake_of(wrong)[0])
        }
        assert not set(mistakes.values()) - said, f"python -m gpt2lab.lessons.known {number}"


@pytest.mark.parametrize(
    "one, other, alike",
    [
        (1.0, 1 + 1e-9, True),
        (1.0, 1 + 1e-5, False),
        ([1, 2], np.array([1.0, 2.0]), True),
        ([1, 2], [2, 1], False),
        ({"a": 1, "b": [2]}, {"b": (2,), "a": 1.0}, True),
        ({3, 1}, {1, 3}, True),
        ([1.0, math.nan], [1.0, math.inf], False),
        ([1.0, 1e-12], [1.0, 0.0], True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        ("a", None, False),
    ],
)
def test_a_digest_sees_what_an_answer_gave_and_no_last_digits(one, other, alike):
    assert (engine.digest([], [one]) == engine.digest([], [other])) == alike


def test_an_answer_that_knows_the_shown_cases_only_fails_and_the_seed_is_said():
    table = {(3, 3): 9, (1, 7): 7}
    said = says(AREA, lambda *given: table.get(given, 0))
    assert "by" in said and said.endswith(f"(a drawn case: {SEED}=0 draws it again)")
    assert said == says(AREA, lambda *given: table.get(given, 0))


def test_drawn_cases_change_unless_results_must_repeat(monkeypatch):
    monkeypatch.delenv(SEED)
    for name in ("GPT2LAB_STATIC", "GPT2LAB_STRICT", "CI"):
        monkeypatch.setenv(name, "0" if name.startswith("GPT2LAB") else "")
    assert len({engine.seed() for _ in range(20)}) > 10
    for name in ("GPT2LAB_STATIC", "GPT2LAB_STRICT", "CI"):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            assert {engine.seed() for _ in range(5)} == {0}


def test_an_answer_may_not_ask_what_is_closed():
    from gpt2lab.planner import metrics

    assert "metrics.karp_flatt knows the answer" in says(AREA, lambda a, b: metrics.karp_flatt(2.0, 4))


def test_what_was_given_stays_as_it_was():
    total = Task(lambda x: x.sum(), shown={"ones": (torch.ones(3),)})
    said = says(total, lambda x: x.sum() + x.zero_().sum())
    assert said == "ones: right, but your function changed what it was given; work on copies"
    assert says(total, lambda x: x.sum()) == "PASS"


def test_trials_by_chance_stop_at_the_first_failure_and_name_the_seed():
    seen = []

    def trial(chance: random.Random):
        seen.append(chance.random())
        assert len(seen) < 3, "the third"

    with pytest.raises(AssertionError, match=rf"the third(?s:.*)\(a drawn case: {SEED}=0"):
        by_chance(trial)
    assert len(set(seen)) == 3


GRID = torch.arange(9.0, dtype=torch.float64).view(3, 3) ** 2


@pytest.mark.parametrize(
    "got, want, words",
    [
        (GRID.T, GRID, "it is transposed"),
        (GRID[:2].T, GRID[:2], "got (3, 2), which is transposed"),
        (GRID.roll(1, 0), GRID, "one place too far along dimension 0"),
        (GRID.flip(0, 1), GRID, "the right numbers, in another order"),
        (3 * GRID, GRID, "3 times what is right"),
        (GRID / 4, GRID, "1/4 of what is right"),
        (-GRID, GRID, "the sign is turned"),
        (GRID.float(), GRID, "come as float32"),
        ((GRID / 3).float().double(), GRID / 3, "was it float32 on the way?"),
        (GRID + torch.eye(3), GRID, "expected 0 at (0, 0), got 1"),
        ("18", 18, "expected numbers, got '18'"),
        (["1", "2"], [1, 2], "expected numbers, got ['1', '2']"),
        (float("inf"), 3.0, "expected 3, got inf"),
        (None, 1.0, "returned None"),
        ([1.0, 2.0], [1.0], "expected shape (1,), got (2,)"),
        ([[1.0, 5.0]], [[1.0, 2.0]], "expected 2 at (0, 1), got 5"),
        (float("nan"), 2.0, "expected 2, got nan"),
        (1 + 1e-9, 1.0, "expected 1, got 1"),
        (1e-9, 0.0, "expected 0, got 1e-09"),
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0, 4.0]], "equally long, and are [2, 1] long"),
        (1 + 3e-8, 1.0, "was it float32 on the way?"),
        ("three", 3.0, "expected numbers, got 'three'"),
    ],
)
def test_slips_of_numbers_are_named(got, want, words):
    with pytest.raises(AssertionError) as error:
        close(got, want, "x")
    assert words in str(error.value)
    close(want, want, "x")


def test_what_is_nearly_right_is_no_slip():
    with pytest.raises(AssertionError, match="was it float32 on the way[?]$"):
        close(GRID * (1 + 5e-10), GRID, "x")
    with pytest.raises(AssertionError, match="^x: expected 1, got 1.001$"):
        close(1.001, 1.0, "x")
    close(np.zeros(0), [], "nothing")
    close(1e-16, 0.0, "rounding where nothing is right")


@pytest.mark.parametrize(
    "got, want, words",
    [
        ({"a": 1}, {"a": 1, "b": 2}, "'b' is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "there is no 'b'"),
        ({"a": 2}, {"a": 1}, "x: a: expected 1, got 2"),
        ([1], {"a": 1}, "expected a dict"),
        (["a"], {"a", "b"}, "expected ['a', 'b'], got ['a']"),
        ([(1, "F")], [(1, "F"), (2, "F")], "expected 2 things, got 1"),
        ([("F", 1), ("F", 3)], [("F", 1), ("F", 2)], "number 1, number 1: expected 2, got 3"),
        (False, True, "expected True, got False"),
        ("b", "a", "expected 'a', got 'b'"),
        (3, None, "expected None, got 3"),
        (None, [1, 2], "returned None"),
        (7, Between(3, 6), "x: 6 are enough, got 7"),
        (2, Between(3, 6), "x: at least 3 are needed, got 2"),
        ("many", Most(3), "expected a number, got 'many'"),
        ([4, 5], [4, 5, 6], "expected shape (3,), got (2,): 4 5 in place of 4 5 6"),
    ],
)
def test_the_first_difference_of_other_values_is_said(got, want, words):
    with pytest.raises(AssertionError) as error:
        difference(got, want, "x")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "one, other",
    [
        ((1, 2), [1, np.int64(2)]),
        (np.array([1.0, 2.0]), (1, 2)),
        (torch.tensor([1.0, 2.0]), [1, 2]),
        ({"b": (1, "x"), "a": 2}, {"a": 2, "b": [1, "x"]}),
        (["a", "b"], {"b", "a"}),
        (np.array(["a", "b"]), {"b", "a"}),
        (np.bool_(True), True),
        ([torch.tensor(1.0), torch.tensor(2.0)], [1.0, 2.0]),
        ([], ()),
        (float("inf"), float("inf")),
        (6, Most(6)),
    ],
)
def test_style_makes_no_difference(one, other):
    assert equal(one, other)


def replaced(answer):
    pipeline.BAR = answer()
    assert pipeline.BAR > 0, "less than nothing"


def test_what_an_answer_replaces_in_a_checker_is_put_back_and_does_not_pass():
    before = pipeline.BAR
    status, why = verdict(replaced, lambda: 10**6)
    assert status == "FAIL" and "replaces pipeline.BAR" in why and before == pipeline.BAR
    status, why = verdict(replaced, lambda: -1)
    assert status == "FAIL" and "less than nothing" in why and before == pipeline.BAR


def test_a_cell_that_replaces_a_checker_where_it_is_defined_does_not_pass():
    desk = Desk("lesson", ["from gpt2lab.lessons.exercises import check, close"])
    checks = "check('half', lambda f: close(f(4), 2, 'half of 4'), half)"
    right = "def half(x):\n    return x / 2"
    assert desk.verdicts(right, right, checks) == [("half", "PASS", "")]
    patched = f"from gpt2lab.lessons import exercises\nexercises.close = print\n{right}"
    ((_, status, why),) = desk.verdicts(right, patched, checks)
    assert status == "FAIL" and "your cell replaces exercises.close" in why and exercises.close is close


def test_guarded_sees_every_module_that_judges():
    assert {"gpt2lab.lessons.exercises", pipeline.__name__, engine.__name__} <= set(guards.guarded())


def talk(rank, world_size, wait: bool, read: bool, keep: bool):
    """Rank 0 sends two tensors to rank 1."""
    axis, kept = Mesh(pp=world_size)["pp"], []
    with watching.watched() as seen:
        if rank == 0:
            going = [comm.isend(torch.full((4,), float(i)), axis, 1) for i in range(2)]
            for handle in going[: 2 if wait else 1]:
                handle.wait()
        else:
            for _ in range(2 if read else 1):
                x = comm.irecv(torch.empty(4), axis, 0).wait()
                kept += [x] if keep else []
            x = None
        left = seen.held.bytes() // 16
    return seen.sent, seen.asked, seen.unwaited, left


def louder(rank, world_size):
    """What rank 1 hears of ones, by both ways to receive, while messages are twice as loud and after that."""
    axis, heard = Mesh(pp=world_size)["pp"], []
    for _ in range(2):
        with watching.received(lambda message: message.mul_(2)) if not heard else watching.watched():
            if rank == 0:
                comm.send(torch.ones(1), axis, 1)
                comm.isend(torch.ones(1), axis, 1).wait()
                heard.append(None)
            else:
                handle = None
                one = comm.recv(torch.empty(1), axis, 0).item()
                handle = comm.irecv(torch.empty(1), axis, 0)
                handle.wait()
                heard.append((one, handle.wait().item()))
    return heard


@pytest.mark.live
def test_messages_on_a_rank_are_seen_and_can_be_made_louder():
    with Ranks(2, echo=False, timeout=20) as ranks:
        (sent, _, unwaited, _), (_, asked, _, left) = ranks.run(talk, True, True, False)
        assert [(to, x.tolist()) for to, x in sent] == [(1, [0.0] * 4), (1, [1.0] * 4)]
        assert (asked, unwaited, left) == ([0, 0], 0, 0)
        (_, _, unwaited, _), (_, _, _, left) = ranks.run(talk, False, True, True)
        assert (unwaited, left) == (1, 2)
        assert ranks.run(louder) == [[None, None], [(2.0, 2.0), (1.0, 1.0)]]


SUM = ranked(
    ("the sum", "bytes sent", f"calls {ALL}"),
    lambda rank, n: ([n], Most(16), 1),
    lambda axis, answer, n: (answer(torch.ones(1), axis), sent(), len(comm.log)),
    lambda n: n,
    "torch.functional",
    shown={"two ranks": (2,)},
)


@pytest.mark.live
@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x, axis: comm.all_reduce(x, axis), "PASS"),
        (lambda x, axis: 2 * x, f"two ranks: calls {ALL}: expected 2, got 0"),
        (lambda x, axis: x + axis.rank, "two ranks: the sum on rank 0: expected 2 at (0,), got 1"),
        (lambda x, axis: comm.all_reduce(torch.ones(9), axis)[:1], "two ranks: bytes sent on rank 0: 16 are enough"),
        (lambda x, axis: torch.norm(x), "torch would do this in one call"),
        (lambda x, axis: comm.recv(x, axis, 1 - axis.rank), "two ranks: the ranks wait for each other for ever"),
        (lambda x, axis: x / axis, "two ranks: TypeError"),
    ],
)  # fmt: skip
def test_a_task_on_live_ranks_compares_what_each_rank_gives(answer, words):
    assert words in says(SUM, answer)


def of_two_lines(x, axis):
    raise ValueError("first\nsecond")


@pytest.mark.live
@pytest.mark.parametrize(
    "answer, words",
    [
        (
            lambda x, axis: comm.recv(comm.send(x, axis, 1) or x if axis.rank == 0 else x[:0], axis, 0),
            "calls that do not match",
        ),
        (of_two_lines, "two ranks: ValueError: first\nsecond"),
        (lambda x, axis: exercises.close(1, 2, "a sum"), "two ranks: a sum: expected 2, got 1"),
    ],
)
def test_what_a_rank_raises_is_said_whole_and_without_its_traceback(answer, words):
    for said in (says(SUM, answer), says(lambda answer: ranks_run(answer), answer)):
        assert words.removeprefix("two ranks: ") in said and "Traceback" not in said, said
    assert words in says(SUM, answer)


def ranks_run(answer):
    """The same by a lesson's own ranks, for whose errors no checker cares."""
    with Ranks(2, echo=False) as two:
        two.run(lambda rank, world_size: answer(torch.ones(1), Mesh(dp=2)["dp"]))


def test_messages_that_nobody_read_are_found():
    one, two = watching.Seen(sent=[(1, torch.ones(1))] * 3), watching.Seen(asked=[0, 0])
    assert watching.unread([one, two]) == [(0, 1, 1)] and watching.unread([one, two, two])[0] == (0, 1, 1)
    assert not watching.unread([watching.Seen(), two])


def test_pretended_ranks_answer_for_what_all_of_them_give():
    total = lambda rank, exchange: (sum(exchange(rank)), exchange(10 * rank)[0])
    assert together(total, 4) == [(6, 0)] * 4


def one_leaves(rank, exchange):
    return exchange(rank) if rank else None


def one_raises(rank, exchange):
    if rank == 2:
        raise NotImplementedError("rank 2 gives none")
    return exchange(rank)


def test_a_pretended_rank_that_raises_or_leaves_does_not_hold_up_the_others(monkeypatch):
    with pytest.raises(NotImplementedError, match="rank 2"):
        together(one_raises, 3)
    monkeypatch.setattr(pretended, "TIMEOUT", 0.2)
    with pytest.raises(AssertionError, match="some ranks wait for others"):
        together(one_leaves, 3)


def test_memory_that_tensors_use_is_found_wherever_it_is_kept():
    before, kept = watching.memories(4000), {"a": [torch.ones(1000)]}
    assert len(watching.memories(4000) - before) == 1 and not watching.memories(4001) - before
    kept.clear()
    assert not watching.memories(4000) - before
