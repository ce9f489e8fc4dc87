"""Answers in `exam.md` that are numbers, computed again by the package; each must stand in the answer's own words."""

import re
from math import log

import pytest

from gpt2lab.classroom import NOTEBOOKS
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.context import costs, layouts
from gpt2lab.parallel.zero.costs import bytes_held
from gpt2lab.planner import balance, metrics
from gpt2lab.planner.failures import best_interval
from gpt2lab.ranks.traffic import all_reduce_cost
from gpt2lab.schedules import simulate
from gpt2lab.schedules.registry import make

EXAM = (NOTEBOOKS / "exam.md").read_text()
ANSWERS = {
    (lesson, int(number)): text
    for lesson, part in re.findall(r"^## (\d\d)[^\n]*\n(.*?)(?=^## |\Z)", EXAM, re.M | re.S)
    for number, text in re.findall(r"^(\d)\..*?\*Answer:\* (.*?)\s*(?=^\d\.|\Z)", part, re.M | re.S)
}


def embeddings():
    model = GPT2(GPT2Config(vocab_size=1000, n_positions=32, n_embd=64, n_head=4, n_layer=1))
    return (
        f"{sum(p.numel() for name, p in model.named_parameters() if name in ('wte.weight', 'wpe.weight')):,}"
    )


def ring():
    size, messages = all_reduce_cost([10] * 8, 0)
    return f"{size} MB in {messages} messages"


def states(stage):
    """GB on a rank for a billion parameters on 8 ranks, without padding."""
    return f"{sum(bytes_held({'all': 8_000_000}, stage, 8, 0).values()) / 8e6:.3g}"


def loads(name):
    table = layouts.layout(name, 8000, 4)
    pairs = [costs.pairs(table, rank) for rank in range(4)]
    return [round(p / pairs[0]) for p in pairs]


def cuts():
    times = [1, 1, 1, 3]
    return [
        balance.slowest(times, f(*a))
        for f, a in ((balance.equal_count, (4, 2)), (balance.best_cut, (times, 2)))
    ]


COMPUTED = [
    (("00", 1), lambda: f"{(4 * 2.0 + 1 * 1.0) / 5:g}"),
    (("01", 1), embeddings),
    (("01", 2), lambda: f"ln 1000 = {log(1000):.1f}"),
    (("01", 3), lambda: f"{sum(bytes_held({'all': 8}, 0, 1, 0).values()) // 8} bytes"),
    (("02", 1), lambda: f"{metrics.karp_flatt(10 / 3, 4):.3f}"),
    (("02", 1), lambda: f"{metrics.efficiency(10 / 3, 4):.2f}"),
    (("03", 1), ring),
    (("05", 1), lambda: f"{states(0)};"),
    (("05", 1), lambda: f"= {states(1)};"),
    (("05", 1), lambda: f"= {states(2)};"),
    (("05", 1), lambda: f"; {states(3)} GB"),
    (("07", 1), lambda: f"{float(simulate(make('gpipe', 4, 12)).bubble):.0%}".replace("%", " %")),
    (("10", 1), lambda: " : ".join(map(str, loads("contiguous")))),
    (("13", 1), lambda: f"= {max(120 / 3, 30):g} ms"),
    (("16", 1), lambda: f"= {(100 - 30) / 4 + 30} ms"),
    (("16", 2), lambda: "= {} ms; {} ms".format(*cuts())),
    (("17", 1), lambda: f"= {sum([3, 4]) + (5 - 1) * balance.slowest([3, 4], (0, 1, 2))} ms"),
    (("18", 1), lambda: f"{best_interval(1, 200):g} minutes"),
]


@pytest.mark.parametrize(
    "question, compute", COMPUTED, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else ""
)
def test_the_number_in_the_answer_is_the_computed_one(question, compute):
    assert compute() in ANSWERS[question]


def test_what_answers_say_of_orders_and_places():
    assert len(set(loads("zigzag"))) == 1  # lesson 10: each pair has the same load
    run = simulate(make("1f1b", 4, 12))  # lesson 07: the first rank holds p micro-batches
    assert [max(held for _, held in run.memory(rank)) for rank in range(4)] == [4, 3, 2, 1]
    sizes = {"pp": 2, "dp": 2, "tp": 2}  # lesson 15: the partners of rank 5
    place = {rank: dict(zip(sizes, (rank // 4, rank // 2 % 2, rank % 2), strict=True)) for rank in range(8)}
    partner = lambda axis: [
        r for r in place if r != 5 and all(place[r][a] == place[5][a] for a in sizes if a != axis)
    ]
    assert (partner("tp"), partner("pp")) == ([4], [1])
