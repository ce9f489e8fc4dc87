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
from gpt2lab.verify import verify

SHAPES = ((1, 2), (1, 3), (2, 2), (4, 1))  # of the ranks: two strategies of several ranks, or one
CHOICES = {  # of each axis, the options that are drawn where it has several ranks; "" is for every plan
    "": {
        "micro": (1, 2, 3, 4),
        "zero": (0, 0, 1, 2, 3),
        "shard": (0, 0, 0, 2),
        "loss": ("whole", "chunked"),
        "recompute": (False, True),
    },
    "dp": {
        "data": (*["bucket"] * 4, *FORMS, "owner"),
        "bucket": (1024, 1024, 1),
        "refill": (False, False, True),
    },
    "pp": {"schedule": NAMES, "chunks": (1, 2, 3)},
    "cp": {"layout": tuple(LAYOUTS), "exchange": tuple(EXCHANGES), "hops": (0, 0, 1)},
    "tp": {"sp": (False, True)},
}


def drawn(chance: Random):
    """(plan, config, rows, length): on 2 to 4 ranks; an option is drawn where its axis has several ranks."""
    sizes = dict(zip(chance.sample(["pp", "dp", "cp", "tp"], 2), chance.choice(SHAPES), strict=True))
    several = [axis for axis in CHOICES if axis == "" or sizes.get(axis, 1) > 1]
    options = {name: chance.choice(values) for axis in several for name, values in CHOICES[axis].items()}
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


def try_plans(pools, seed: int, count: int) -> Counter:
    """Draw until `count` plans have run, every eighth with updates; what ran is counted by option and value."""
    chance, ran = Random(seed), Counter()
    while ran["plans"] < count:
        plan, *given = drawn(chance)
        try:
            plan.check(*given)
        except ValueError as error:
            said = str(error)
            assert "\n" not in said and any(w in said for w in ("Use ", "Leave ", "Give ")), (
                plan,
                given,
                said,
            )
            ran["refused"] += 1
            continue
        depth = "full" if ran["plans"] % 8 == 0 else "gradients"
        report = verify(plan, *given, pools[plan.world], depth)
        assert report.ok, (plan, given, str(report))
        ran["plans"] += 1
        for name, value in asdict(plan).items():
            ran[name, value] += 1
    return ran


def test_a_few_random_plans_are_refused_or_equal(pools):
    assert try_plans(pools, seed=0, count=24)["refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_random_plans_are_refused_or_equal(pools):
    ran = try_plans(pools, seed=1, count=500)
    choices = {name: values for of_axis in CHOICES.values() for name, values in of_axis.items()}
    missing = [(name, value) for name, values in choices.items() for value in values if not ran[name, value]]
    assert not missing, missing
    others = {"active", "ep", "node"}  # of streams and of experts, which have tests of their own
    assert {f.name for f in fields(Plan)} == {*choices, *others, "pp", "dp", "cp", "tp"}
