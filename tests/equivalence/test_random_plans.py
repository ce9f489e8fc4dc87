"""Plans drawn from the whole grammar: refused in one sentence, or equal to the serial run, evaluation included."""

from collections import Counter
from dataclasses import asdict, fields
from random import Random

import pytest

from gpt2lab.model import GPT2Config
from gpt2lab.parallel.context.exchanges import EXCHANGES
from gpt2lab.parallel.context.layouts import LAYOUTS
from gpt2lab.parallel.data import FORMS
from gpt2lab.plan import Plan
from gpt2lab.schedules.registry import NAMES
from gpt2lab.verify import Report, compare, worst

SHAPES = ((1, 2), (1, 3), (2, 2), (4, 1))  # of the ranks: two strategies of several ranks, or one
CHOICES = {
    "micro": (1, 2, 3, 4),
    "data": (*["bucket"] * 4, *FORMS, "owner"),
    "bucket": (1024, 1024, 1),
    "zero": (0, 0, 1, 2, 3),
    "refill": (False, False, True),
    "shard": (0, 0, 0, 2),
    "schedule": NAMES,
    "chunks": (1, 2, 3),
    "layout": tuple(LAYOUTS),
    "exchange": tuple(EXCHANGES),
    "hops": (0, 0, 1),
    "sp": (False, True),
    "loss": ("whole", "chunked"),
    "recompute": (False, True),
}
NEEDS = {
    "data": "dp",
    "refill": "dp",
    "bucket": "dp",
    "schedule": "pp",
    "chunks": "pp",
    "layout": "cp",
    "exchange": "cp",
    "hops": "cp",
    "sp": "tp",
}


def drawn(chance: Random):
    """(plan, config, rows, length): on 2 to 4 ranks; an option is drawn where its axis has several ranks."""
    sizes = dict(zip(chance.sample(["pp", "dp", "cp", "tp"], 2), chance.choice(SHAPES), strict=True))
    options = {
        name: chance.choice(values)
        for name, values in CHOICES.items()
        if sizes.get(NEEDS.get(name, "micro"), 2) > 1 and NEEDS.get(name) in (None, *sizes)
    }
    heads = chance.choice([1, 2, 3, 4, 5, 6])
    config = GPT2Config(
        vocab_size=chance.choice([11, 12]),
        n_positions=12,
        n_layer=chance.randint(1, 6),
        n_head=heads,
        n_embd=8 * heads,
        window=chance.choice([None, None, 2, 5]),
        dropout=chance.choice([0.0, 0.0, 0.1]),
    )
    return Plan(**sizes, **options), config, chance.randint(4, 8), chance.randint(5, 12)


def refusal(case) -> str:
    """Why the plan is refused; empty where it may run."""
    plan, config, rows, length = case
    try:
        plan.check(config, rows, length)
    except ValueError as error:
        return str(error)
    return ""


def try_plans(pools, seed: int, count: int) -> Counter:
    """Draw until `count` plans have run, every eighth with updates; what ran is counted by option and value."""
    chance, ran = Random(seed), Counter()
    while ran["plans"] < count:
        case = drawn(chance)
        if text := refusal(case):
            assert "\n" not in text and any(w in text for w in ("Use ", "Leave ", "Give ")), (case, text)
            ran["refused"] += 1
            continue
        depth = "full" if ran["plans"] % 8 == 0 else "gradients"
        report = Report(case[0], worst(pools[case[0].world].run(compare, *case, depth)))
        assert report.ok, (case, str(report))
        ran["plans"] += 1
        for name, value in asdict(case[0]).items():
            ran[name, value] += 1
    return ran


def test_a_few_random_plans_are_refused_or_equal(pools):
    assert try_plans(pools, seed=0, count=24)["refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_random_plans_are_refused_or_equal(pools):
    ran = try_plans(pools, seed=1, count=500)
    missing = [(name, value) for name, values in CHOICES.items() for value in values if not ran[name, value]]
    assert not missing, missing
    others = {
        "active",
        "ep",
        "node",
    }  # of schedules without a flush and of experts, which have tests of their own
    assert {f.name for f in fields(Plan)} == {*CHOICES, *others, "pp", "dp", "cp", "tp"}
