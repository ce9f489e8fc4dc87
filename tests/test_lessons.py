"""Lessons are built reproducibly from their sources, and refused when they would leak."""

import ast
import inspect
import json
import os
import re
import subprocess
import symtable
import sys
import textwrap
from functools import cache
from pathlib import Path

import nbformat
import pytest

from gpt2lab.lessons import build
from gpt2lab.lessons.build import build_lesson, lessons, main, outdated
from gpt2lab.lessons.environment import static
from gpt2lab.lessons.source import BLANK, read_lesson

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

SOURCE = '''# %% [markdown]
# # A small lesson

# %% tags=["setup"]
from gpt2lab.lessons.exercises import check, close


def test_one(answer):
    close(answer(), 1, "one")


# %% tags=["exercise"]
def one():
    """The number one."""
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION


check("one", test_one, one)

# %% tags=["wrong"]
# FAIL: one: expected 1
def one():
    return 2

# %% tags=["measured"]
import time

print(time.perf_counter())

# %%
print("first")
print("second", flush=True)
print("third")
'''


def small(folder, text=SOURCE):
    """The small lesson, from a source under this folder."""
    path = folder / "src" / "07_small.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return read_lesson(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with one small lesson, built once."""
    folder = tmp_path_factory.mktemp("notebooks")
    build_lesson(small(folder))
    return folder


def copied(built, folder, old="", new=""):
    """Copies of the built notebooks in another folder, perhaps with other words."""
    for path in built.rglob("*.ipynb"):
        copy = folder / path.relative_to(built)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace(old, new))


def notebook(folder, *path):
    return nbformat.read(folder.joinpath(*path, "07_small.ipynb"), 4)


def text(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.rotates
def test_students_get_blanks_and_teachers_solutions(built):
    student, solution = notebook(built).cells, notebook(built, "solutions").cells
    assert BLANK in student[2].source and "return 1" not in student[2].source
    assert "return 1" in solution[2].source and "###" not in solution[2].source
    assert text(student[2]).startswith("TODO  one") and text(solution[2]) == "PASS  one\n"
    assert not any("return 2" in cell.source for cell in student + solution)
    assert [cell.id for cell in student] == [cell.id for cell in solution]


def test_measured_cells_are_ignored_by_nbval_and_prints_are_merged(built):
    cells = notebook(built, "solutions").cells
    assert cells[3].metadata.tags == ["measured", "nbval-ignore-output"]
    assert len(cells[4].outputs) == 1 and text(cells[4]) == "first\nsecond\nthird\n"


@pytest.mark.rotates
def test_a_second_build_gives_the_same_bytes(built):
    paths = sorted(built.rglob("*.ipynb"))
    before = [path.read_bytes() for path in paths]
    build_lesson(small(built))
    assert len(paths) == 2 and [path.read_bytes() for path in paths] == before


def test_an_edit_moves_no_other_id_and_makes_the_notebooks_outdated(built, tmp_path, capsys):
    edited = small(tmp_path, SOURCE.replace("# # A small lesson", "# # A small lesson\n\n# %%\nx = 1"))
    copied(built, tmp_path)
    old = [cell.id for cell in notebook(built).cells]
    assert [i for i in (cell.id for cell in edited.notebook(True).cells) if i in old] == old
    assert len(outdated(edited)) == 2 and outdated(small(built)) == []
    assert main(["--check", "--folder", str(tmp_path)]) == 1 and "make notebooks" in capsys.readouterr().out


def test_where_only_words_have_changed_no_cell_runs(built, tmp_path, monkeypatch):
    copied(built, tmp_path)
    small(tmp_path, SOURCE.replace("# # A small lesson", "# # A lesson in other words"))
    monkeypatch.setattr(build, "execute", lambda *_, **__: pytest.fail("a cell ran"))
    assert main(["--folder", str(tmp_path)]) == 0 and outdated(lessons(tmp_path)[0]) == []
    for path in ((), ("solutions",)):
        old, new = (notebook(folder, *path).cells for folder in (built, tmp_path))
        assert new[0].source == "# A lesson in other words" != old[0].source and new[1:] == old[1:]
    small(tmp_path, SOURCE.replace("return 2", "return 3").replace("return 1", "return 1.0"))
    with pytest.raises(pytest.fail.Exception):
        main(["--folder", str(tmp_path)])


def test_a_notebook_edited_by_hand_is_outdated(built, tmp_path):
    copied(built, tmp_path, "A small lesson", "A smaller lesson")
    assert len(outdated(small(tmp_path))) == 2


def test_a_cell_that_shows_an_address_or_writes_to_stderr_is_refused(tmp_path):
    for bad in ("print(object())", "import sys; print('x', file=sys.stderr)"):
        with pytest.raises(RuntimeError, match="differs elsewhere"):
            build_lesson(small(tmp_path, f"# %%\n{bad}\n"))


@pytest.mark.parametrize(
    "bad, message",
    [
        ("# %% tags=['mesured']\nx = 1", "unknown tag 'mesured'"),
        ("# %% tags=['exercise']\nx = 1", "needs solution markers"),
        ("# %%\nif x:\n    ### BEGIN SOLUTION\n    y = 1\n    ### END SOLUTION", "outside a cell tagged"),
        (
            "# %% tags=['exercise']\ndef f():\n    ### BEGIN SOLUTION\n    y = 1\ncheck()",
            "without its partner",
        ),
    ],
)
def test_a_source_with_a_mistake_is_refused(tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        small(tmp_path, bad)


def test_an_unknown_lesson_is_named(built):
    with pytest.raises(ValueError, match="no lesson starts with '08'. There are: 07_small"):
        lessons(built, ["08"])


def test_imports_stand_in_a_cell_of_their_own_which_is_folded():
    for path in NOTEBOOKS.rglob("*.ipynb"):
        first = next(cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        assert first.metadata.get("jupyter") == {"source_hidden": True}, path.name
        assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(first.source).body)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("solutions/*.ipynb")), ids=lambda path: path.stem)
def test_source_that_a_lesson_shows_is_that_of_today(path):
    names = {}
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "code" or cell.source.startswith("%%"):
            continue
        tree, shown = ast.parse(cell.source), json.dumps(cell.outputs)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), path.name, "exec"), names)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for one in (arg for call in calls if ast.unparse(call.func) == "show_source" for arg in call.args):
            source = inspect.getsource(eval(ast.unparse(one), names)).rstrip()
            assert json.dumps(source)[1:-1] in shown, f"build it again: {ast.unparse(one)} has changed"


def test_every_committed_notebook_has_a_source():
    sources = {path.stem for path in NOTEBOOKS.glob("src/*.py")}
    assert {path.stem for path in NOTEBOOKS.rglob("*.ipynb")} == sources


def machines(output) -> list[str]:
    """The paths of the machine that an output names, not looking into its pictures."""
    data = {kind: said for kind, said in output.get("data", {}).items() if not kind.startswith("image/")}
    return re.findall(r"/(?:home|root|tmp|usr|var|work|Users)/[\w./-]*", json.dumps(output | {"data": data}))


def test_committed_notebooks_hold_no_errors_and_no_machine_paths():
    for path in NOTEBOOKS.rglob("*.ipynb"):
        for output in (o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])):
            assert output["output_type"] != "error" and output.get("name") != "stderr", path.name
            assert machines(output) == [], path.name
    shown = {"text": "saved to /tmp/run.png", "data": {"image/png": "a/tmp/b"}}
    assert machines(shown) == ["/tmp/run.png"]


# ---- numbers in the text

MARKED = re.compile(r"(\d[\d,]*(?:\.\d+)?)[^\d<]*<!--above-->")


def strangers(cells) -> list[str]:
    """Numbers that the text marks as found above and that the nearest outputs above it do not hold."""
    missing, above = [], set()
    for cell in cells:
        if cell.cell_type == "code" and cell.outputs:
            said = " ".join(
                output.get("text", "") + "".join(map(str, (output.get("data") or {}).values()))
                for output in cell.outputs
                if "image/png" not in (output.get("data") or {})
            )
            about_a_guess = re.match(r"guess(\.beside\(| = predict\()", cell.source)
            above = above if about_a_guess else set()
            above |= set(re.findall(r"\d+(?:\.\d+)?", said.replace(",", "")))
        elif cell.cell_type == "markdown":
            assert cell.source.count("<!--above-->") == len(MARKED.findall(cell.source)), cell.source
            missing += [n for n in MARKED.findall(cell.source) if n.replace(",", "") not in above]
    return missing


@cache
def solution(lesson):
    """The cells of a lesson's solution, as it is committed."""
    return nbformat.read(NOTEBOOKS / "solutions" / f"{lesson.name}.ipynb", 4).cells


def test_a_number_that_is_not_printed_above_is_found():
    code = nbformat.v4.new_code_cell(
        outputs=[nbformat.v4.new_output("stream", text="idle 43 %, 1,024 bytes")]
    )
    text = "It waits 43 %<!--above--> of the time, sends 1024 bytes<!--above-->, then 1.5 MB<!--above-->."
    prose = nbformat.v4.new_markdown_cell(text)
    assert strangers([code, prose]) == ["1.5"]
    beside, other = (
        nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output("stream", text="1.5 MB")])
        for source in ('guess.beside(n, "counted")', "print(n)")
    )
    assert strangers([code, beside, prose]) == [] and strangers([code, other, prose]) == ["43", "1024"]


FALSE_ON_PURPOSE = (
    "same weights on both ranks: False",
    "model.py speaks of torch.distributed: False",
    "all leave at the same moment: False",
    "async_op=False: computing while sending: False",
    "'no sum': False",
    r"\| 1 \| False \| 384 ms",
    "replicas agree: False",
    "bfloat16 alone: .* moved: False",
    "cut from one matrix: shards alike False",
    "to plain attention: False",
    "no mask: y False, dX False, dW summed False",
    "dW of rank 0 alone False",
    r"busiest above 2 even shares: \[False, False, False\], laziest below 0.5: \[False, False, False\]",
    "group=rank   dp=2,ep=2 equals the serial run: False, dp=2: False",
    "gelu of a partial sum: False",
    "softmax of a shard: False",
)
"""What says False in the output, and should."""


def said_false(cells) -> list[str]:
    """The lines of output, and rows of tables, that say False, DIFFER or NO, and should not."""
    outputs = [o for c in cells if c.cell_type == "code" for o in c.outputs]
    lines = [line for o in outputs for line in o.get("text", "").splitlines()]
    told = [line for o in outputs for line in o.get("data", {}).get("text/markdown", "").splitlines()]
    lines += [line for line in told if line.startswith("| ")]
    left = [re.sub("|".join(FALSE_ON_PURPOSE), "", line) for line in lines]
    return [line for line in left if re.search(r"(?<!=)\bFalse\b|DIFFER|\| NO \|", line)]


def test_a_claim_that_came_out_false_is_found_in_output_and_in_a_table():
    made = nbformat.v4.new_output
    table = made(
        "display_data", {"text/markdown": "| way | equal |\n| :-- | :-- |\n| ring | False |\n| a | NO |"}
    )
    lines = made("stream", text="replicas agree: False, weights equal: False\nreplicas agree: False\n")
    cell = nbformat.v4.new_code_cell(outputs=[table, lines])
    assert said_false([cell]) == [", weights equal: False", "| ring | False |", "| a | NO |"]


def ragged(lesson) -> list[str]:
    """The tables with a row that has not as many cells as its header."""
    shown = [
        o.get("data", {}).get("text/markdown", "") for c in solution(lesson) for o in c.get("outputs", ())
    ]
    widths = lambda text: {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines()}
    return [text for text in shown if text.startswith("| ") and len(widths(text)) > 1]


# ---- a prediction needs its question


def unasked(lesson) -> list[str]:
    """The predictions without a `**Predict` in the text since the code cell before them."""
    found, told = [], ""
    for cell in lesson.cells:
        if cell.kind == "markdown":
            told += cell.text
        elif "wrong" not in cell.tags:
            found += re.findall(r'check\("(predict: [^"]+)"', cell.text) if "**Predict" not in told else []
            told = ""
    return found


def test_a_prediction_without_a_question_is_found(tmp_path):
    assert unasked(small(tmp_path, SOURCE.replace('check("one"', 'check("predict: one"'))) == ["predict: one"]


# ---- how long a lesson may be

LIMITS = {"words": 1_800, "code": 350, "shown": 40}


def question(text) -> str:
    """What a cell asks that does nothing else but collect a guess: words to read, not code; else nothing."""
    asked = re.fullmatch(r"\w+ = (predict\(.+\))\s*", text, re.S)
    return ast.literal_eval(ast.parse(asked[1]).body[0].value.args[0]) if asked else ""


def lengths(lesson) -> dict[str, int]:
    """Words of a lesson's text and questions, lines of its code without exercises, and of package source it shows."""
    told = [c.text for c in lesson.cells if c.kind == "markdown" and "hint" not in c.tags]
    told += [question(c.text) for c in lesson.cells if c.kind == "code"]
    built = NOTEBOOKS / f"{lesson.name}.ipynb"
    cells = nbformat.read(built, 4).cells if built.exists() else ()
    shown = [
        output.data["text/markdown"]
        for cell in cells
        for output in cell.get("outputs", ())
        if "```python" in output.get("data", {}).get("text/markdown", "")
    ]
    return {
        "words": sum(any(letter.isalnum() for letter in word) for text in told for word in text.split()),
        "code": sum(
            bool(line.strip())
            for text in code(lesson, "exercise", "wrong")
            for line in text.splitlines() * (not question(text))
        ),
        "shown": sum(text.split("```python\n")[1].count("\n") for text in shown),
    }


def too_long(lesson) -> list:
    """What there is too much of, or too few words."""
    found = lengths(lesson)
    return [(what, n) for what, n in found.items() if n > LIMITS[what] or what == "words" and n < 900]


def late(text, names=None):
    """The global names that the functions and lambdas of a cell read (or those of these names), and what it sets."""
    table = symtable.symtable(text, "cell", "exec")
    inner, reads = [c for c in table.get_children() if names is None or c.get_name() in names], set()
    for scope in inner:  # it grows
        inner += scope.get_children()
        reads |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
    return reads, {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def changed_below(cells):
    """Names that the function of an explorer reads when a reader moves it, and that a cell further down sets again."""
    found = []
    for at, cell in enumerate(cells):
        if "explore(" not in cell:
            continue
        reads, known = late(cell)[0] | late(f"def cell():\n{textwrap.indent(cell, ' ')}")[0], set()
        while new := reads - known:
            known |= new
            reads = reads.union(*(late(c, new)[0] for c in cells[: at + 1]))
        found += [(name, below) for below in cells[at + 1 :] for name in sorted(late(below)[1] & reads)]
    return found


def code(lesson, *but) -> list[str]:
    """The solved code cells of a lesson, without those with one of these tags."""
    return [c.solved() for c in lesson.cells if c.kind == "code" and not {*but} & {*c.tags}]


RULES = {  # what holds of every lesson: what breaks it
    "its notebooks are those of its source": outdated,
    "no cell swallows the marker of the next": lambda x: [c.text for c in x.cells if "# %%" in c.text],
    "numbers in its text are those printed above": lambda x: strangers(solution(x)),
    "what it claims came out true": lambda x: said_false(solution(x)),
    "a row of a table has as many cells as its header": ragged,
    "it has something to vary": lambda x: not any("explore(" in text for text in code(x)),
    "every prediction has its question above it": unasked,
    "it is no longer than it may be": too_long,
    "an explorer still works when all cells have run": lambda x: changed_below(code(x, "wrong")),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lesson", lessons(NOTEBOOKS), ids=lambda lesson: lesson.name)
def test_a_rule_holds_of_every_lesson(lesson, rule):
    assert not RULES[rule](lesson), rule


def test_a_name_that_is_set_again_below_its_explorer_is_found():
    cells = ["rows = {}", "def draw(n):\n    return rows[n]", "explore(draw, n=(1, 2, 1))", "rows = []"]
    assert changed_below(cells) == [("rows", "rows = []")]
    assert changed_below([*cells[:3], "[rows for rows in range(3)]"]) == []
    assert changed_below(["explore(lambda n: rows[n], n=[1])", cells[3]]) == [("rows", "rows = []")]


@pytest.mark.rotates
@pytest.mark.parametrize(
    "typed, lessons", [("--nbval notebooks/solutions", 21), ("--nbval-lax notebooks", 21)]
)
def test_nbval_takes_the_notebooks_as_its_users_type_it(typed, lessons):
    call = [sys.executable, "-m", "pytest", "--collect-only", "-q", *typed.split()]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(call, cwd=NOTEBOOKS.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}) == lessons


@pytest.mark.parametrize(
    "said, under_pytest, found", [("1", 0, True), ("0", 1, False), (None, 1, True), (None, 0, False)]
)
def test_sliders_are_pictures_where_notebooks_are_compared(monkeypatch, said, under_pytest, found):
    monkeypatch.delenv("GPT2LAB_STATIC", raising=False)
    if said:
        monkeypatch.setenv("GPT2LAB_STATIC", said)
    if not under_pytest:
        monkeypatch.delenv("PYTEST_VERSION")
    assert static() is found
