"""Plans: read, printed back, refused in one sentence; a word that changes nothing is refused where it is typed."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from gpt2lab import cli, verify
from gpt2lab.cli import main
from gpt2lab.commands.unused import OF_PIPELINES, refuse_without_effect, without_effect
from gpt2lab.compositions import PAIRS, TESTED, WITH_EXPERTS, WITHOUT_FLUSH
from gpt2lab.lessons.labs import decisions
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.context.layouts import layout
from gpt2lab.parallel.pipeline.engine import schedule_of
from gpt2lab.parallel.pipeline.versions import stream_of
from gpt2lab.plan import Plan, build
from gpt2lab.planner.cost import predict
from gpt2lab.planner.problem import CLUSTERS
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_weights
from gpt2lab.run import Options
from gpt2lab.schedules.registry import FREE, GENERATORS
from gpt2lab.verify import Claim

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)


def test_serial_has_three_spellings():
    assert Plan.parse("serial") == Plan.parse("") == Plan.parse(" dp=1 ") == Plan()


@pytest.mark.parametrize("name", [generator.name for generator in GENERATORS + FREE])
def test_every_spelling_of_a_schedule_is_the_same_plan(name):
    plan = Plan(pp=2, micro=4, schedule=name)
    for said in (name.upper(), name.title(), name.replace("_", "-"), name.replace("_", "-").upper()):
        assert Plan.parse(f"pp=2,micro=4,schedule={said}") == plan == Plan(pp=2, micro=4, schedule=said)
        assert str(replace(plan, schedule=said)) == str(plan)


def test_what_the_plan_says_of_loss_and_micro_batches_is_not_overruled():
    assert Options(plan="loss=whole").the_plan().loss == "whole"
    assert Options(plan="dp=2").the_plan().loss == "chunked"
    twice = Options(plan="micro=2", accumulate=2)
    assert twice.the_plan().micro == 2 and twice.without_effect()["accumulate"] == "the plan says micro"
    for options in ({"plan": "micro=4", "accumulate": 2}, {"plan": "loss=chunked", "chunked": False}):
        with pytest.raises(ValueError, match="Leave one of them out"):
            Options(**options).the_plan()


def test_a_serial_build_is_the_serial_model():
    parallel = build(Plan(), CONFIG, Mesh())
    assert sum(p.tensor.numel() for p in parallel.sync.pieces) == CONFIG.parameters


def test_weights_of_another_shape_are_not_taken_in_part():
    parallel = build(Plan(zero=2), CONFIG, Mesh())
    before, other = parallel.weights(), example_weights(replace(CONFIG, vocab_size=41))
    with pytest.raises(ValueError, match=r"wte.weight has the shape \(37, 24\) here and \(41, 24\) among"):
        parallel.load(other)
    assert all(torch.equal(before[name], weight) for name, weight in parallel.weights().items())


@pytest.mark.parametrize("error", [2e-16, 0.5, math.nan])
def test_plans_verify_prints_each_plan_with_its_largest_error_and_fails_when_one_differs(
    error, monkeypatch, capsys
):
    claims = [Claim("loss", 1e-16, "loss"), Claim("every gradient", error, "wpe.weight", 3)]
    monkeypatch.setattr(verify, "verify", lambda plan, config: verify.Report(Plan.parse(plan), claims))
    assert main(["plans", "--verify", "--ranks", "4"]) == (0 if error < 1e-10 else 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PAIRS) + len(WITH_EXPERTS) + len(WITHOUT_FLUSH)
    assert all("every gradient, wpe.weight on rank 3" in line for line in lines)
    assert all(line.startswith("equal" if error < 1e-10 else "DIFFERS") for line in lines)


# --- words that change nothing


ROOT = Path(__file__).parents[1]
VALUES = {  # other values of each word that could change nothing
    "schedule": ("gpipe", "interleaved", "zb_h1"),
    "chunks": (3,),
    "active": (1,),
    "layout": ("zigzag",),
    "exchange": ("ring", "heads", "halo-kv"),
    "hops": (1,),
    "node": (2,),
    "data": ("naive", "server"),
    "bucket": (1,),
    "zero": (1, 2, 3),
    "refill": (True,),
    "shard": (2, 4),
    "sp": (True,),
    "loss": ("chunked",),
    "recompute": (True,),
    "micro": (2,),
}
LIMITS = ("hops",)  # changes nothing that runs: it refuses windows that reach further
CLUSTER = replace(CLUSTERS["h100x64"], devices=64)


def seen(composition, plan: Plan):
    """What a plan does, as far as a prediction and a schedule can tell; ValueError where it cannot run."""
    plan.check(composition.config, 8, 16)
    orders = repr(schedule_of(plan)) if plan.pp > 1 else ""
    if plan.asynchronous:
        return repr(stream_of(plan, 6).schedule)
    tokens = repr(layout(plan.layout, 16, plan.cp))
    return orders, tokens * (plan.cp > 1), repr(predict(plan, composition.config, 8, 16, CLUSTER))


def test_a_word_is_refused_or_changes_something_and_what_is_refused_changes_nothing():
    """Every word on top of every tested plan: neither list of words may hold one of the other."""
    idle = active = 0
    assert {*VALUES, "pp", "dp", "ep", "cp", "tp"} == {field.name for field in fields(Plan)}
    for composition in (*TESTED, *WITHOUT_FLUSH):
        plan = Plan.parse(composition.plan)
        try:
            before = seen(composition, plan)
        except ValueError:
            continue  # needs other rows
        for word, values in VALUES.items():
            for value in values:
                other = replace(plan, **{word: value})
                try:
                    now = seen(composition, other)
                except ValueError:
                    continue  # refused anyway
                if word in without_effect(other):
                    assert now == before, (composition.plan, word, value)
                    idle += 1
                elif value != getattr(plan, word) and not (other.asynchronous and word not in OF_PIPELINES):
                    assert now != before or word in LIMITS, (composition.plan, word, value)
                    active += 1
    assert idle > 200 and active > 180, (idle, active)


@pytest.mark.parametrize("composition", [*TESTED, *WITHOUT_FLUSH], ids=lambda c: c.plan)
def test_no_tested_plan_says_such_a_word(composition):
    refuse_without_effect(composition.plan)


PLAN = re.compile(r"--plan[= ]([\w=,-]+)")


def test_no_plan_that_a_reader_is_told_to_type_says_such_a_word():
    texts = [
        (ROOT / "README.md").read_text(),
        *(f.read_text() for f in (ROOT / "notebooks" / "src").glob("*.py")),
    ]
    texts += [f.read_text() for f in (ROOT / "gpt2lab").rglob("*.py")]
    found = {text for one in texts for text in PLAN.findall(one) if "=" in text}
    for text in found:
        refuse_without_effect(text)
    assert len(found) > 10


def test_recorded_plans_are_read_and_say_no_such_word():
    for plan in decisions.recorded().values():
        assert not {w for w in Plan.said(str(plan)) if w in without_effect(plan)}


TYPED = {
    "pp=1,schedule=gpipe": "schedule=gpipe would change nothing: pp=1 has no pipeline",
    "pp=2,micro=2,chunks=3": "chunks=3 would change nothing: schedule=1f1b has one way",
    "dp=2,layout=zigzag": "layout=zigzag would change nothing: cp=1 leaves sequences whole",
    "cp=2,hops=1": "hops=1 would change nothing: exchange=kv has no halo",
    "dp=2,node=2": "node=2 would change nothing: ep=1 sends no rows",
    "tp=2,data=naive": "data=naive would change nothing: one replica",
    "dp=2,data=naive,bucket=4": "bucket=4 would change nothing: data=naive has none",
    "zero=1": "zero=1 would change nothing: one replica has nobody to share its optimizer with",
    "dp=2,cp=2,zero=2,shard=4": "shard=4 would change nothing: all 4 replicas share without it",
    "dp=2,zero=3,recompute=on": "recompute would change nothing: zero=3 runs blocks again",
}


@pytest.mark.parametrize("command", ["train --dry-run", "verify", "memory --config nano"])
@pytest.mark.parametrize("text", TYPED)
def test_commands_refuse_it_with_the_reason(text, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split(), "--plan", text]) == 2
    assert TYPED[text] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "train --dry-run --dtype bfloat16 --plan zero=1",  # 32-bit masters
        "train --dry-run --optimizer muon --plan zero=3,data=owner",  # whole matrices
        "train --dry-run --plan zero=2",  # a block's gradients are collected
        "train --dry-run --plan zero=3",  # blocks are run again
        "memory --config nano --length 16 --precision bf16 --plan zero=1",
    ],
)
def test_what_zero_still_does_on_one_replica_may_be_typed(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 0, capsys.readouterr().err


def test_a_run_that_was_recorded_with_such_a_word_goes_on(tmp_path):
    """What was loaded is not refused: only what is typed."""
    from types import SimpleNamespace

    from gpt2lab.commands import train
    from gpt2lab.run import Options

    (tmp_path / "options.json").write_text(json.dumps({"plan": "dp=2,layout=zigzag"}))
    args = SimpleNamespace(**dict.fromkeys(Options.__dataclass_fields__))
    assert train._options(args, tmp_path / "checkpoint-1").plan == "dp=2,layout=zigzag"
