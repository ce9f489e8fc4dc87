"""Tables of what is done here and by others: each tick names a test that exists; README's table is that of today."""

import ast
import copy
from pathlib import Path

import pytest
from equality import ROWS
from proven import BEGIN, END, FAMILIES, KINDS, ROOT, planted, table

from gpt2lab.lessons.labs import systems as lab
from gpt2lab.plots.systems import systems_table
from gpt2lab.verify import TOLERANCE

TESTS = Path(__file__).parent
OURS = [(m, t, one) for m, ticks in lab.registry()["ours"].items() for t, one in ticks.items()]


def mistakes(data) -> list[str]:
    """What is wrong with a registry: ticks without a test, a plan or a source, and unknown words."""
    found, plans = [], {row.plan for row in ROWS}
    for model, ticks in data["ours"].items():
        found += [f"no model {model}"] * (model not in data["models"])
        for technique, one in ticks.items():
            file, _, name = one["test"].partition("::")
            text = (TESTS / file).read_text() if (TESTS / file).exists() else ""
            defined = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
            found += [f"no technique {technique}"] * (technique not in data["techniques"])
            found += [f"no test {one['test']}"] * (name not in defined)
            tested = one["plan"] in plans or f'"{one["plan"]}"' in text or "=" not in one["plan"]
            found += [f"no tested plan {one['plan']}"] * (not tested)
    for one in data["system"]:
        found += [f"{one['name']}: no model {one['model']}"] * (one["model"] not in data["models"])
        found += [f"{one['name']}: no year in its paper"] * (
            not any(c.isdigit() for c in one["paper"] + one["name"])
        )
        for technique, source in one["ticks"].items():
            found += [f"{one['name']}: no technique {technique}"] * (technique not in data["techniques"])
            found += [f"{one['name']}: no source for {technique}"] * (len(source) < 6)
    return found


def test_every_tick_is_backed():
    data = lab.registry()
    assert mistakes(data) == []
    names = [one["name"] for one in data["system"]]
    assert len(names) == len(set(names)) >= 25
    assert {t for one in lab.systems() for t in one.ticks} == set(data["techniques"])


@pytest.mark.parametrize(
    "path, value, said",
    [
        (
            ("ours", "moe", "expert", "test"),
            "test_sharding_stages.py::test_all_is_well",
            "no test test_sharding_stages.py::test_all_is_well",
        ),
        (("ours", "moe", "expert", "test"), "test_none.py::test_x", "no test test_none.py::test_x"),
        (("ours", "moe", "expert", "plan"), "dp=64,ep=64", "no tested plan dp=64,ep=64"),
        (("system", 0, "ticks", "server"), "", "Parameter server: no source for server"),
        (("system", 0, "ticks", "magic"), "section 3", "Parameter server: no technique magic"),
        (("system", 0, "model"), "trees", "Parameter server: no model trees"),
        (("system", 0, "paper"), "somebody", "Parameter server: no year in its paper"),
    ],
)
def test_a_tick_without_backing_is_noticed(path, value, said):
    data = copy.deepcopy(lab.registry())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert said in mistakes(data) and said not in mistakes(lab.registry())


@pytest.mark.parametrize("model, technique, one", OURS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_tick_of_ours_says_what_its_plan_does(model, technique, one):
    words = {
        "data": "dp=", "server": "data=server", "zero": "zero=", "tensor": "tp=", "sequence": "cp=",
        "expert": "ep=", "flush": "pp=", "free": "schedule=2bw", "recompute": "recompute=on",
    }  # fmt: skip
    assert "=" not in one["plan"] or words[technique] in one["plan"]
    assert "=" not in one["plan"] or (model == "moe") == ("ep=" in one["plan"])


def test_the_figure_has_a_mark_for_every_tick():
    data, every = lab.registry(), lab.systems()
    ax = systems_table(every, data["techniques"], data["models"]).axes[0]
    assert sum(len(c.get_offsets()) for c in ax.collections) == sum(len(one.ticks) for one in every)
    assert [t.get_text() for t in ax.get_yticklabels()].count("gpt2lab") == len(data["ours"])


# --- the table of what is proven in README


@pytest.mark.rotates
def test_the_table_in_readme_is_that_of_today():
    shown = (ROOT / "README.md").read_text().split(BEGIN)[1].split(END)[0]
    one = {words: dict.fromkeys(KINDS, 1e-15) for words in FAMILIES}
    lines = zip(shown.splitlines(), table(one, planted()).splitlines(), strict=True)
    for line, today in ((line.split("|"), today.split("|")) for line, today in lines):
        errors = slice(3, 3 + len(KINDS))
        assert line[:3] + line[7:] == today[:3] + today[7:], "run python tests/proven.py"
        if "e-15" in today[3]:
            assert all(float(error) <= TOLERANCE for error in line[errors] if error.strip())
