"""One name, one thing: no two rooms give a public class or function of different meaning the same name."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gpt2lab"
COLLECTIVES = "a collective or message of this name: called, carried out, built by hand, or written as a task"
SHARED = {  # name: what all of that name have in common
    "adjoint": "what a gradient makes on the way back: the call between ranks, or the step of a layout",
    "attention": "an operation of GPT-2: by hand, or as an expression",
    "check": "protocol: raise where an input is not valid",
    "children": "of a node in a tree",
    "interleaved": "the published name of a layout and of a schedule",
    "layer_norm": "an operation of GPT-2: by hand, as an expression, or captured",
    "load": "make ready what lies elsewhere: a checkpoint, published weights, or a notebook's extension",
    "main": "protocol: the command line of a module",
    "memory": "bytes that a rank holds: computed, or drawn over time",
    "play": "go through a schedule, or a recorded run, step by step",
    "predict": "say what will come out, before it runs: the planner of a step, or the reader of a result",
    "run": "protocol of commands and benchmarks: do it",
    "sent": "what a rank sends, by formula",
    "setup": "what comes first: a lesson's cells for its exercises, or the function that Sphinx calls",
    "span": "of time in a trace; in work and span of a task graph",
    "summary": "the numbers below a table or a drawing",
    "work": "the term of work and span; counted in tokens or in seconds",
} | dict.fromkeys(
    [
        *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather"),
        *("recv", "reduce", "reduce_scatter", "scatter", "send"),
    ],
    COLLECTIVES,
)
OWN_NAMES = (
    "lessons/exercises/",
    "lessons/labs/",
)  # a checker is named as its exercise, what a lab runs as in its lesson


def owners(package: Path) -> dict[str, set[str]]:
    """The places of every public name: for a function its room, for a class its file."""
    found = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        if file.as_posix().startswith(OWN_NAMES):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(file.parts[0] if isinstance(node, ast.FunctionDef) else str(file))
    return found


def clashes(package: Path) -> dict[str, set[str]]:
    return {name: places for name, places in owners(package).items() if len(places) > 1}


def test_no_name_stands_for_two_things():
    found = clashes(PACKAGE)
    new = {name: sorted(places) for name, places in found.items() if name not in SHARED}
    assert not new, f"{new}: give one of them another name, or say in SHARED what they have in common"
    assert not set(SHARED) - set(found), "these names are used once by now: take them out of SHARED"


def test_a_second_class_or_a_function_of_another_room_is_noticed(tmp_path):
    for file, text in {
        "a/one.py": "class Link: ...\ndef cost(): ...\ndef _own(): ...\n",
        "a/two.py": "class Link: ...\ndef cost(): ...\ndef _own(): ...\n",
        "b/three.py": "def price(): ...\ndef _own(): ...\n",
        "price.py": "def price(): ...\n",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    assert clashes(tmp_path) == {"Link": {"a/one.py", "a/two.py"}, "price": {"b", "price.py"}}
