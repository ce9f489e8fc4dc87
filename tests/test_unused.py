"""A word of a plan that changes nothing is refused where it is typed; each word that is taken changes something."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2lab import cli
from gpt2lab.commands.unused import OF_PIPELINES, refuse_without_effect, without_effect
from gpt2lab.compositions import TESTED, WITHOUT_FLUSH
from gpt2lab.lessons.labs import decisions
from gpt2lab.parallel.context.layouts import layout
from gpt2lab.parallel.pipeline.engine import schedule_of
from gpt2lab.parallel.pipeline.versions import stream_of
from gpt2lab.plan import Plan
from gpt2lab.planner.cost import predict
from gpt2lab.planner.problem import CLUSTERS

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
    assert idle > 200 and active > 100, (idle, active)


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
}


@pytest.mark.parametrize("command", ["train --dry-run", "verify", "memory --config nano"])
@pytest.mark.parametrize("text", TYPED)
def test_commands_refuse_it_with_the_reason(text, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split(), "--plan", text]) == 1
    assert TYPED[text] in capsys.readouterr().err


def test_a_run_that_was_recorded_with_such_a_word_goes_on(tmp_path):
    """What was loaded is not refused: only what is typed."""
    from types import SimpleNamespace

    from gpt2lab.commands import train
    from gpt2lab.run import Options

    (tmp_path / "options.json").write_text(json.dumps({"plan": "dp=2,layout=zigzag"}))
    args = SimpleNamespace(**dict.fromkeys(Options.__dataclass_fields__))
    assert train._options(args, tmp_path / "checkpoint-1").plan == "dp=2,layout=zigzag"
