"""Every exercise against every cheat: `python tests/test_every_cheat.py 07` prints the table of a lesson, or of all.

A cheat is made by rule of an exercise's solution, so that a new exercise meets all of them. It looks for what its judge
knows, and where it finds it, gives what is right; or it gives what is right for what was seen in a first run alone; or
it sends what nobody asked for. All answers of a lesson are judged in one sandbox, as `gpt2lab grade` judges them, and
beside them the control, which does what cheats do besides and gives what is right: it passes, no cheat does.
"""

import ast
import base64
import contextlib
import io
import pickle
import sys
import tempfile

import pytest
from cheats import (
    ANY,
    ASKS,
    CALL,
    CALLED,
    CONTROL,
    DEFINED,
    FLOAT,
    LIVE,
    LOOK,
    MEMORY,
    NONSENSE,
    PATCHED,
    RECORDED,
    TOOLS,
    WRITES,
)

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.classroom.sandbox import Limits, run_judge
from gpt2lab.lessons.answers import exercises, setup
from gpt2lab.lessons.desk import Desk, defined, split
from gpt2lab.lessons.exercises.engine import SEED, Task
from gpt2lab.processes import launch
from gpt2lab.processes.launch import Ranks

pytestmark = [pytest.mark.live, pytest.mark.sandboxed]

BY_WHAT_IS_ASKED = {
    ("which axis gets the fast links", "first shapes"): "it is asked of two axes",
}
"""Why a cheat does not apply to a single exercise."""


class Lesson:
    """A lesson, its desk, and ranks that are kept."""

    def __init__(self, number: str):
        (self.of,) = lessons_named(NOTEBOOKS, [number])
        self.desk, self.ranks = Desk(self.of.name, setup(self.of)), {}

    def launch(self, fn, *args, ranks: int = 4, **_):
        """In place of new ranks."""
        if ranks not in self.ranks:
            self.ranks[ranks] = Ranks(ranks, timeout=2, echo=False)
        return self.ranks[ranks].run(fn, *args)

    def beside(self, body: str, cheat: str, checks: str, seed: str) -> list:
        """The verdicts on an answer, as a notebook gives them."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(SEED, seed)
            patched.setattr(launch, "launch", self.launch)
            with contextlib.redirect_stdout(io.StringIO()):
                return self.desk.verdicts(body, answer(body, cheat), checks)


def answer(body: str, cheat: str) -> str:
    """The text of an answer: the solution, with a cheat around its functions, and the methods of its classes."""
    return "\n".join([body, TOOLS, cheat, *(f"{name} = cheat({name})" for name in defined(body))])


def recorded(lesson: Lesson, body: str, checks: str) -> tuple[list, list]:
    """The verdicts on the solution in a run with other drawn cases, and its calls: (function, rank, given, ...)."""
    with tempfile.NamedTemporaryFile() as file:
        said, calls = lesson.beside(body, f"FILE = {file.name!r}\n{RECORDED}", checks, "77"), []
        while file.peek(1):
            calls.append(pickle.load(file))
    return said, calls


def reference(checker) -> Task | None:
    """The task by which a checker compares: itself, or the first that it calls; None where it has rules or a score."""
    code = getattr(checker, "__code__", None)
    tasks = [checker.__globals__.get(name) for name in code.co_names] if code else [checker]
    return next((one for one in tasks if isinstance(one, Task) and one.right), None)


def on_the_reference(task: Task | None, live: bool) -> dict[str, str]:
    """The cheats that look for what the checker compares with."""
    if not task:
        return dict.fromkeys([*DEFINED, *CALLED], "N/A its checker keeps no reference, but rules or a score")
    modules = [(n, m) for n, m in sys.modules.items() if n.startswith("gpt2lab")]
    room, name = next((n, k) for n, m in modules for k, v in vars(m).items() if v is task)
    words, test = str(next(iter(task.shown))), f"sys.modules[{room!r}].{name}"
    asks = ASKS.format(room=room, name=name, what=task.what, words=words)
    found = {n: f"{asks}{ask}\n{CALL('pass')}" for n, ask in DEFINED.items()}
    found |= {n: f"{asks}{kept}{CALL(ask)}" for n, (kept, ask) in CALLED.items()}
    if live:  # new ranks take seconds: all ways in one answer, but those that fail before
        found |= dict.fromkeys(CALLED, f"{asks}KEPT = TASK.right\n{ANY}")
    return {n: text.replace("TASK", test) for n, text in found.items()}


def on_what_was_seen(title: str, words: str, calls: list, task) -> dict[str, str]:
    """The cheats that are right for what the first run saw."""
    first, alone = {}, all(c[2] == "[]" for c in calls)
    for name, rank, given, shape, result, *_ in calls:
        first.setdefault((name, rank), (result, {}, shape))[1].setdefault(given, result)
    kept = f"TABLE = {base64.b64encode(pickle.dumps(first))!r}\n{LOOK}"
    rules = {  # a cheat: (where it does not apply, because)
        "constant": [(len({c[4] for c in calls}) < 2, "one result is right")],
        "table": [
            (alone, "it has no arguments"),
            ("best known" in words, "a puzzle asks for a table"),
        ],
        "first shapes": [(not any(c[3][1:] for c in calls), "it gets numbers alone")],
        "float32": [
            (alone, "a guess, which need not be exact"),
            ("best known" in words, "a puzzle is scored"),
            (isinstance(task, Task) and task.tolerance > 1e-8, "float32 is enough"),
            (not any(c[5] for c in calls), "float32 holds what it gives"),
        ],
    }
    no = {name: next((because for rule, because in found if rule), "") for name, found in rules.items()}
    no |= {name: because for (of, name), because in BY_WHAT_IS_ASKED.items() if of == title}
    texts = {name: kept + text for name, text in MEMORY.items()} | {"float32": FLOAT}
    return {name: f"N/A {no[name]}" if no[name] else text for name, text in texts.items()}


def cheats(lesson: Lesson, exercise) -> tuple[str, dict[str, str], dict[str, tuple]]:
    """The name of an exercise, the texts of all cheats, and what was said in the first run."""
    body, checks = split(exercise.cell.solved())
    said, calls = recorded(lesson, body, checks)
    (title, *first), live = said[0], any(c[6] is not None for c in calls)
    test = ast.unparse(ast.parse(checks).body[0].value.args[1])
    task = eval(test, lesson.desk.names)
    texts = {"control": CONTROL} | on_the_reference(reference(task), live)
    texts["patches"] = PATCHED + NONSENSE.format("patch()")
    texts["writes a verdict"] = f"{WRITES.replace('TITLE', title)}write()\n{NONSENSE.format('write()')}"
    texts |= on_what_was_seen(title, first[1], calls, task)
    texts |= LIVE if live else dict.fromkeys(LIVE, "N/A no live ranks")
    texts |= {} if any(c[6] for c in calls) else {"garbage sent": "N/A it sends nothing"}
    if not any(isinstance(node, ast.FunctionDef) for node in ast.parse(body).body):
        alone = "N/A a class, whose objects no other rank can make"
        texts |= {name: alone for name in LIVE if live and name.startswith("serial")}
    return title, texts, {"first run": tuple(first)}


def table(number: str) -> dict[str, dict[str, tuple]]:
    """(status, words) of every cheat, by exercise and cheat; (N/A, why) for one that does not apply."""
    lesson, job, places, found = Lesson(number), [], {}, {}
    for exercise in exercises(lesson.of):
        body, checks = split(exercise.cell.solved())
        title, texts, found[title] = cheats(lesson, exercise)
        for name, text in texts.items():
            if text.startswith("N/A"):
                found[title][name] = ("N/A", text[4:])
            elif name in (*MEMORY, "float32", *LIVE):
                found[title][name] = tuple(lesson.beside(body, text, checks, "0")[0][1:])
            elif (title, text) in places:
                places[title, text].append(name)
            else:
                places[title, text] = [name]
                job.append((len(job), (split(exercise.cell.blank())[0], answer(body, text), checks)))
    names = [(title, of) for (title, _), of in places.items()]
    given = {"lesson": lesson.of.name, "setup": setup(lesson.of), "answers": job}
    for step in run_judge(given, Limits(seconds=180)):
        assert "broke" not in step, step
        if "end" in step:
            title, of = names[step["end"]]
            assert step["apart"] or step["verdicts"][0][1] != "PASS", f"{title} is judged beside its checker"
            found[title] |= dict.fromkeys(of, tuple(step["verdicts"][0][1:]))
    for ranks in lesson.ranks.values():
        ranks.close()
    return found


@pytest.mark.parametrize("lesson", lessons_named(NOTEBOOKS, []), ids=lambda lesson: lesson.name)
def test_no_cheat_passes_and_what_is_right_does(lesson):
    for title, row in table(lesson.name[:2]).items():
        passed = {name for name, (status, *_) in row.items() if status == "PASS"}
        assert passed == {"first run", "control"}, (
            title,
            {n: row[n] for n in ("first run", "control", *passed)},
        )
        assert all(words for status, words in row.values() if status != "PASS"), (title, row)


if __name__ == "__main__":
    for number in sys.argv[1:] or [lesson.name[:2] for lesson in lessons_named(NOTEBOOKS, [])]:
        for title, row in table(number).items():
            print(f"{number} {title}")
            for name, (status, words) in row.items():
                print(f"    {name:20} {status:4} {words[:100]}", flush=True)
