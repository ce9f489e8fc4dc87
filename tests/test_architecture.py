"""The walls between rooms, the size of files and functions, docstrings, and what the README promises."""

import ast
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path

from code_lines import counted, syntax

import gpt2lab.plan  # noqa: F401
from gpt2lab import model as model_module
from gpt2lab.lessons.source import read_lesson
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.base import Engine

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpt2lab"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE).with_suffix("")) for path in FILES]
README = (ROOT / "README.md").read_text()

# Who stands on whom: a file imports only from its own level or below.
LEVELS = [
    {"transport", "model", "experts", "schedules", "machine"},
    {"ranks", "processes"},
    {"corpus", "parallel", "algorithms", "generate", "tasks", "emulate", "sharding"},
    {"plan"},
    {"train", "storage", "planner"},
    {"reference"},
    {"verify", "plots"},
]


VERBS = (
    r"all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|i?send\w*|i?recv\w*|\w*barrier|batch_isend_irecv"
)


def room(name: str) -> str:
    return name.split("/")[0]


def level(name: str) -> int:
    found = [i for i, rooms in enumerate(LEVELS) if room(name) in rooms]
    return found[0] if found else len(LEVELS)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{name}.py").read_text())


@cache
def imports(name: str) -> frozenset[str]:
    """All modules that a file imports, also inside functions, those of the package as `gpt2lab/...`."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.replace(".", "/") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").replace(".", "/")
            if node.level:
                home = ["gpt2lab", *name.split("/")[:-1]]
                base = "/".join(home[: len(home) - node.level + 1] + ([base] if base else []))
            found |= {base, *(f"{base}/{alias.name}" for alias in node.names)}
    return frozenset(found)


def inside(name: str) -> set[str]:
    """The files of the package that a file imports."""
    return {n for n in NAMES if f"gpt2lab/{n}".removesuffix("/__init__") in imports(name)} - {"__init__"}


def reach(name: str) -> set[str]:
    """Everything that importing a file may import, through files of the package."""
    seen, todo = set(), [name]
    while todo:
        if (n := todo.pop()) not in seen:
            seen.add(n)
            todo += inside(n)
    return {m for n in seen for m in imports(n)}


def test_nothing_imports_upwards():
    upwards = {name: sorted(n for n in inside(name) if level(n) > level(name)) for name in NAMES}
    assert not {name: found for name, found in upwards.items() if found}, "these stand below what they import"


def test_processes_and_ranks_meet_in_one_file():
    assert not {n for m in NAMES if room(m) == "processes" for n in inside(m) if room(n) == "ranks"}
    shared = {n for m in NAMES if room(m) == "ranks" for n in inside(m) if room(n) == "processes"}
    assert shared <= {"processes/__init__", "processes/status_board"}


def test_the_model_imports_nothing_of_the_package():
    assert inside("model") == set()


def replaced_in(name: str) -> set[str]:
    """What a file of `parallel` replaces of a model, its blocks or their attention, modules and numbers apart."""
    model = GPT2(GPT2Config(vocab_size=3, n_positions=2, n_layer=1, n_head=1, n_embd=2))
    parts, found = (model, model.h["0"], model.h["0"].attn), set()
    for node in ast.walk(tree(name)):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for t in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(t, ast.Attribute) and ast.unparse(t.value) in ("model", "block", "block.attn"):
                    values = [getattr(part, t.attr, None) for part in parts]
                    found |= {t.attr} if any(inspect.isroutine(v) for v in values) else set()
    return found


def test_the_model_names_the_seams_that_strategies_replace():
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", model_module.__doc__.split("Parallel strategies")[1]))
    assert named - {"mlp"} == set().union(*(replaced_in(n) for n in NAMES if room(n) == "parallel"))


def test_engines_fill_their_whole_contract():
    """A class that misses a method could not even be made."""
    filled = [c for c in every_subclass(Engine) if c.__module__.startswith("gpt2lab")]
    assert filled and not [c for c in filled if inspect.isabstract(c)]


def every_subclass(of):
    return {c for sub in of.__subclasses__() for c in {sub, *every_subclass(sub)}}


def test_model_schedules_planner_and_plots_know_no_ranks():
    # plans know strategies, which know ranks
    own = {n: imports(n) for n in NAMES if room(n) in ("model", "planner")}
    own |= {n: reach(n) for n in NAMES if room(n) in ("schedules", "plots")}
    assert not [n for n, found in own.items() if any(m.startswith("torch/distributed") for m in found)]


PLAIN = """
    layout cost expression describe operators graph propagate marks partition
    named tofu crossing staged
"""


def test_schedules_and_the_plain_half_of_sharding_are_plain_python():
    plain = [
        n for n in NAMES if room(n) == "schedules" or n in {f"sharding/{part}" for part in PLAIN.split()}
    ]
    assert not [n for n in plain if any(m.split("/")[0] == "torch" for m in reach(n))]


def test_only_comm_calls_collectives():
    calls = re.compile(rf"\b(?:dist|distributed)\.({VERBS})\(")
    found = {n: calls.findall(path.read_text()) for n, path in zip(NAMES, FILES, strict=True)}
    found = {n: names for n, names in found.items() if names and n != "ranks/comm"}
    assert not found, "go through gpt2lab.ranks.comm, where bytes are counted"


def test_no_file_reaches_into_the_private_parts_of_another():
    private = [(n, m) for n in NAMES for m in imports(n) if re.match(r"gpt2lab/.*\b_\w*(?<!__)$", m)]
    assert not private


def test_the_walls_are_seen():
    """The test's own eyes: comm does reach torch.distributed, train does import plan."""
    assert "torch/distributed" in reach("parallel/spec")
    assert "plan" in inside("train")
    assert level("cli") > level("verify")


def test_files_and_functions_stay_short():
    lines = {n: path.read_text().count("\n") for n, path in zip(NAMES, FILES, strict=True)}
    assert not {n: count for n, count in lines.items() if count > 320}, "two ideas: make two files"
    functions = [(n, node) for n in NAMES for node in ast.walk(tree(n)) if isinstance(node, ast.FunctionDef)]
    assert not [(n, node.name) for n, node in functions if node.end_lineno - node.lineno >= 60]


CORE = ("the root", "parallel", "schedules", "ranks", "processes", "storage")
BUDGETS = {
    "tasks": 1_000,
    "classroom": 700,
    "sharding": 1_500,
    "planner": 2_000,
    "core": 10_000,
    "the package": 25_000,
}
OVER = {
    "tasks": 1_057,
    "sharding": 3_141,
    "planner": 5_922,
    "classroom": 2_631,
    "core": 12_446,
    "the package": 49_748,
}  # too large today: these may only shrink


def elsewhere() -> dict[str, tuple[int, int]]:
    """(lines, tokens) of what is read as code beside the package; of toml and js all words and marks are tokens."""
    sources = [cell for path in ROOT.glob("notebooks/src/*.py") for cell in read_lesson(path).cells]
    cells = [cell.solved() for cell in sources if cell.kind == "code" and "wrong" not in cell.tags]
    tests = [path.read_text() for path in ROOT.glob("tests/**/*.py")]
    others = [p.read_text() for end in ("toml", "js") for p in PACKAGE.rglob(f"*.{end}")]
    marks = lambda text: re.findall(r"\w+|[^\w\s]", text)
    every = ("code cells", cells, syntax), ("tests", tests, syntax), ("toml and js", others, marks)
    height = lambda text: len(text.splitlines())
    return {name: (sum(map(height, texts)), sum(len(of(t)) for t in texts)) for name, texts, of in every}


def test_rooms_stay_within_their_budgets():
    """Lines and tokens of every room, printed beside its budget in lines (pytest -s).

    `core` is what a reader of strategies opens.
    """
    lines, tokens = Counter(), Counter()
    for name, path in zip(NAMES, FILES, strict=True):
        text, r = path.read_text(), room(name) if "/" in name else "the root"
        lines[r], tokens[r] = lines[r] + text.count("\n"), tokens[r] + len(syntax(text))
    for count in (lines, tokens):
        count |= {"core": sum(count[r] for r in CORE), "the package": count.total()}
    rows = [(r, n, tokens[r]) for r, n in lines.most_common()] + [(r, *n) for r, n in elsewhere().items()]
    print("", *(f"{r:12} {n:6,} {t:8,} {BUDGETS.get(r, ''):>8}" for r, n, t in rows), sep="\n")
    limits = BUDGETS | OVER
    assert not {r: n for r, n in lines.items() if n > limits.get(r, n)}
    assert not {r for r in OVER if lines[r] <= BUDGETS[r]}, "within the budget by now: take it out of OVER"


def undocumented(name: str) -> list[str]:
    """What of a file is public and has no docstring, the file itself included."""
    overrides, missing = {"forward", "backward", "setup_context"}, []
    for scope in [tree(name), *(n for n in tree(name).body if isinstance(n, ast.ClassDef))]:
        if isinstance(scope, ast.ClassDef) and scope.name.startswith("_"):
            continue
        inner = [n for n in scope.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        public = [n for n in inner if not n.name.startswith("_") and n.name not in overrides]
        missing += [f"{name}: {n.name}" for n in public if not ast.get_docstring(n)]
    return missing + [name] * bool(tree(name).body and not ast.get_docstring(tree(name)))


def test_everything_public_has_a_docstring():
    assert not [found for name in NAMES for found in undocumented(name)]


TRACKED = [
    *FILES,
    *ROOT.glob("tests/**/*.py"),
    *ROOT.glob("notebooks/src/*.py"),
    ROOT / "Makefile",
    ROOT / "README.md",
]


def test_no_notes_to_self_and_no_machine_paths():
    wrong = re.compile(r"#\s*(?:TODO|FIXME|XXX)\b.*|(?<![\w.])/(?:work|root|home)/\w+.*")
    found = {path: wrong.findall(path.read_text()) for path in TRACKED if path != Path(__file__)}
    assert not {path: lines for path, lines in found.items() if lines}


IDS = {"L": 34, "I": 45, "A": 16, "B": 32, "P": 14}


def covered() -> list[str]:
    """Ids of the syllabus in the table of lessons and items, ranges such as L03-L08 written out."""
    found = []
    for line in (ROOT / "notebooks/syllabus.md").read_text().splitlines():
        if re.match(r"\| (\*\*|\[)?\d\d", line):
            for letter, first, last in re.findall(r"\b([LIABP])(\d\d)(?:-[LIABP](\d\d))?", line):
                found += [f"{letter}{i:02d}" for i in range(int(first), int(last or first) + 1)]
    return found


def test_the_lessons_cover_the_whole_syllabus():
    wanted = {f"{letter}{i:02d}" for letter, count in IDS.items() for i in range(1, count + 1)}
    assert set(covered()) == wanted, sorted(wanted ^ set(covered()))


def test_the_readme_tells_lessons_that_are_here_from_planned_ones():
    rows = {m[1]: m[0] for m in re.finditer(r"^\| \[?(\d\d) .*$", README, re.M)}
    here = {path.stem[:2]: path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert sorted(rows) == [f"{i:02d}" for i in range(21)]
    for number, row in rows.items():
        if number in here:
            assert f"(notebooks/{here[number]}.ipynb)" in row and "planned" not in row, row
        else:
            assert "planned" in row, row


def test_the_readme_maps_every_room_of_the_package():
    rooms = {
        path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    missing = [
        r for r in rooms if not r.startswith("__") and f"{r}{'' if r.endswith('.py') else '/'}" not in README
    ]
    assert not missing, missing


def test_the_readme_says_how_many_lines_a_reader_opens():
    """Printed (pytest -s), so that a change of the code is a change of one number."""
    said = README.split("**Small where you read.**")[1].split("<!-- end -->")[0]
    words, table = said.split("<!-- lines -->")
    rows = [row.split("|")[2:4] for row in table.splitlines() if "`" in row]
    number = re.search(r"([\d,]+) lines", words)[1]
    rows.append((words[words.index(number) : words.index("Beside")], number))
    for paths, lines in rows:
        files = [PACKAGE / path for path in re.findall(r"`([\w./]+)`", paths)]
        print(f"{counted(*files):6,} {lines.strip():>6} {paths}")
        assert f"{counted(*files):,}" == lines.strip(), paths


MADE_BY = {  # pages of the repository where it is published
    "actions/workflows/ci.yml": ".github/workflows/ci.yml",
    "actions/workflows/ci.yml/badge.svg": ".github/workflows/ci.yml",
    "deployments/github-pages": ".github/workflows/pages.yml",
    "codespaces": ".devcontainer/devcontainer.json",
    "releases": ".github/workflows/release.yml",
}


def test_the_links_of_the_readme_lead_somewhere():
    for link, picture in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", README):
        target = MADE_BY[link.removeprefix("../../")] if link.startswith("../../") else link or picture
        assert (ROOT / target).exists(), target
