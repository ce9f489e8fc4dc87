"""What can take more than five seconds says how long the rest takes; what would never end is refused."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpt2lab
from gpt2lab import cli, verify
from gpt2lab.machine import patience
from gpt2lab.machine.patience import patiently
from gpt2lab.model import PRESETS
from gpt2lab.plan import Plan
from gpt2lab.planner import (
    alpa,
    balance,
    choose,
    cuts,
    dry,
    graph_stages,
    placement,
    reinforce,
    scale,
    search,
)
from gpt2lab.planner.problem import find_cluster, gpt2_layers
from gpt2lab.reference import CONFIG, serial_run
from gpt2lab.schedules import check, make
from gpt2lab.schedules.terapipe import best_slices
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.named import legal_layouts
from gpt2lab.sharding.tofu import LinkChain

TWO = find_cluster("laptop").with_devices(2)
NANO = PRESETS["nano"]
CHAIN = gpt2_layers(NANO, 2, 8)
PLACING = placement.Placing(CHAIN, TWO)
LAYERS = balance.Chain((1.0, 2.0), (1.0, 2.0), (1.0, 1.0), (1.0,), 1.0)
CUT = cuts.ChainProblem(cuts.gpt2_cuts(NANO, 8, 16)[:3], TWO, 8, 16, 4)
TABLES = {"x": ("batch", "embd"), "weight": ("ff", "embd")}


def planned(name):
    return lambda: search.PLANNERS[name].plan(CUT)


LONG = {  # where `patiently` stands: what goes through it
    "alpa.fastest_pipeline": planned("Alpa"),
    "balance.best_cut": lambda: balance.best_cut([1.0, 2.0, 3.0], 3),
    "balance.dapple": lambda: balance.dapple(LAYERS, 2, 2),
    "balance.pipedream": lambda: balance.pipedream(LAYERS, 2),
    "choose.PLANS": lambda: choose.parallelize(NANO, TWO, choose.Goal(2, 8)),
    "dry.fullest_ranks": lambda: list(dry.fullest_ranks(Plan(), NANO, 1, 8)),
    "graph_stages.down_sets": lambda: graph_stages.down_sets(CHAIN),
    "graph_stages.piper": lambda: graph_stages.piper(CHAIN, 2, graph_stages.stage_options(CHAIN, TWO, 8)),
    "placement.exhaustive_placement": lambda: placement.exhaustive_placement(PLACING),
    "placement._Search": lambda: placement.branch_and_bound(PLACING),
    "reinforce.reinforce": lambda: reinforce.reinforce(PLACING, rounds=2),
    "scale.run_rounds": lambda: scale.collective("ring", 4, 64, scale.Fabric()),
    "play.Player": lambda: check(make("1f1b", 2, 8)),
    "search.exhaustive": planned("every pipeline"),
    "search.mcmc": planned("MCMC (FlexFlow)"),
    "tofu.LinkChain": lambda: LinkChain(captured_gpt2(NANO, 2, 4)).recursive("x"),
    "named.legal_layouts": lambda: legal_layouts(TABLES, {"x": 2}),
    "verify.run": lambda: cli.main(["verify", "--plan", "serial"]),
    "verify._steps": lambda: verify.verify("serial", depth="steps"),
    "reference.serial_steps": lambda: serial_run(CONFIG, 7, 11, "steps"),
    "emulate.Emulator": lambda: verify.expected(Plan.parse("pp=2,schedule=ampnet"), CONFIG, 7, 11, "steps"),
    "terapipe.best_slices": lambda: best_slices(8, lambda a, b: a + b, 2),
}


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits at all."""
    monkeypatch.setattr(patience, "AFTER", 0)
    monkeypatch.delenv("GPT2LAB_STATIC", raising=False)


@pytest.mark.rotates
@pytest.mark.parametrize("name", LONG)
def test_what_takes_long_says_so(name, impatient, capsys):
    LONG[name]()
    assert " took 0 s; " in capsys.readouterr().err


def test_every_place_that_says_how_long_it_takes_is_among_these():
    found = set()
    for path in Path(gpt2lab.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for top in ast.parse(text).body if "patience import" in text else ():
            if any(isinstance(n, ast.Name) and n.id == "patiently" for n in ast.walk(top)):
                name = top.targets[0].id if isinstance(top, ast.Assign) else getattr(top, "name", "")
                found |= {f"{path.stem}.{name}"} if name else set()
    assert found == set(LONG)


def test_the_rest_is_estimated_from_what_is_done_and_told_once(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(patience, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.delenv("GPT2LAB_STATIC", raising=False)
    for _ in patiently(range(1000), "plans"):
        now[0] += 2.0
    assert capsys.readouterr().err == (
        "3 of 1,000 plans took 6 s; the other 997 take about 33 minutes. Ctrl-C ends it.\n"
    )
    for _ in patiently(range(1000), "plans", falling="most are passed over"):
        now[0] += 2.0
    assert "the other 997 take far less than 33 minutes: most are passed over." in capsys.readouterr().err
    for _ in patiently(iter(range(9)), "plans"):
        now[0] += 2.0
    assert "6 s; nobody knows how many are left." in capsys.readouterr().err
    for seconds in patiently([0.51] * 11, "plans that are nearly over"):
        now[0] += seconds
    monkeypatch.setenv("GPT2LAB_STATIC", "1")
    for _ in patiently(range(9), "plans"):
        now[0] += 2.0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(7.4, "7 s"), (119, "119 s"), (7200, "2 hours"), (1e6, "12 days"), (1e9, "32 years")],
)
def test_seconds_are_told_in_a_unit_that_one_can_imagine(seconds, words):
    assert patience.rounded_time(seconds) == words


def test_what_would_never_end_is_refused():
    with pytest.raises(ValueError, match="Use a step of 49 or more"):
        best_slices(100_000, lambda a, b: a + b, 2)
    with pytest.raises(ValueError, match="100,000 nodes have too many blocks. Use at most 2,000"):
        alpa.submeshes(100_000, 1)
