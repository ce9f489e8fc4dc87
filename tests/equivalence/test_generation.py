"""Every composition writes exactly the serial text, on every rank, however tokens are chosen."""

import os

import pytest
from planting import under

from gpt2lab.compositions import ALL, PAIRS, TRIPLES, Composition
from gpt2lab.generate import generate
from gpt2lab.lessons.labs.instruments import built, trainer_by
from gpt2lab.model import GPT2
from gpt2lab.parallel import tensor
from gpt2lab.parallel.pipeline.generate import generate_streams
from gpt2lab.plan import Plan
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.train import Recipe

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
HOW = (
    {"temperature": 0, "stop": True},  # the first, as `check` expects
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "top_k": 5},
    {"seed": 5, "top_p": 0.8, "temperature": 1.5},
)
WITHOUT_PIPELINE = ({"seed": 6, "cache": False}, {"seed": 7, "slide": True}, {"seed": 8, "stop": None})
STREAMS = (2, 1, 5)
NEW, STOP = 5, (0, 24)  # a dense model and one of experts end some texts with these, and not all
TENSOR = (
    Composition("tp=2"),
    Composition("tp=2,sp=on"),
    Composition("dp=2,zero=3"),
    Composition("cp=2"),
    Composition("cp=2,exchange=halo-x", window=2),
)
FEWER = tuple(
    Composition(f"pp=2,micro=2,schedule={name}")
    for name in ("interleaved", "zb_v", "chimera", "dualpipe_v", "terapipe")
)
MORE = tuple(map(Composition, ("pp=3", "tp=4", "tp=4,sp=on")))
EXPERTS = tuple(
    Composition(plan, router="mixtral")
    for plan in (
        "dp=4,ep=4", "dp=4,ep=4,node=2,zero=3", "dp=2,ep=2,cp=2", "dp=2,ep=2,tp=2,sp=on", "pp=2,dp=2,ep=2",
    )
)  # fmt: skip


TOGETHER = (HOW[0], HOW[4])
"""Where two strategies meet: how tokens are chosen is what each of them alone has shown to be equal."""


def cases(plan: Plan) -> list[tuple[dict, int, int]]:
    """(how, new tokens, streams) of every text that a plan writes."""
    every = TOGETHER if (plan.pp > 1) + (plan.dp > 1) + (plan.cp > 1) + (plan.tp > 1) > 1 else HOW
    every = (every[0] | {"stop": STOP[plan.ep > 1]}, *every[1:])
    if plan.pp > 1:
        return [(how, NEW, STREAMS[i % 3]) for i, how in enumerate(every)]
    return [(how, 20 if "slide" in how else NEW, 1) for how in (*every, *WITHOUT_PIPELINE)]


def texts(rank, world_size, plan, config):
    """What a rank writes, and whether its model trains on as before afterwards."""
    parallel = built(plan, config)
    parallel.load(example_weights(config))
    return [parallel.generate(PROMPTS, new, streams, **how) for how, new, streams in cases(parallel.plan)]


def serial(composition) -> list:
    model = GPT2(composition.config).double()
    model.load_state_dict(example_weights(composition.config))
    return [generate(model, PROMPTS, new, **how) for how, new, _ in cases(Plan.parse(composition.plan))]


def check(composition, pools):
    expected, world = serial(composition), Plan.parse(composition.plan).world
    lengths = {len(text) - len(prompt) for text, prompt in zip(expected[0], PROMPTS, strict=True)}
    assert len(lengths) > 1, "some texts end before others"
    for found in pools[world].run(texts, composition.plan, composition.config):
        for mine, right, case in zip(found, expected, cases(Plan.parse(composition.plan)), strict=True):
            assert mine == right, case


def compositions() -> tuple[Composition, ...]:
    """All of one and two strategies; over gloo those whose calls no other test makes there."""
    over_gloo = os.environ.get("GPT2LAB_BACKEND") == "gloo"
    return (MORE[0], EXPERTS[1]) if over_gloo else (*TENSOR, *FEWER, *MORE, *EXPERTS, *PAIRS)


@pytest.mark.parametrize("composition", compositions(), ids=lambda c: c.plan)
def test_the_text_is_the_serial_one(composition, pools):
    check(composition, pools)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", (*TRIPLES, *ALL), ids=lambda c: c.plan)
def test_the_text_is_the_serial_one_on_three_and_four_axes(composition, pools):
    check(composition, pools)


BUGS = {
    "draws from a slice of the vocabulary":
        (tensor, "whole_logits", lambda right: lambda logits, axis, size: logits),
    "no text ends early": (generate_streams, "if stop in row", "if False"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_mutant_that_writes_another_text_is_noticed(pools, bug):
    composition = Composition("pp=2,tp=2,micro=2")
    found = pools[4].run(under(BUGS[bug], texts), composition.plan, composition.config)
    assert serial(composition) not in found


def test_what_cannot_write_is_refused_in_a_sentence():
    chunked = built("loss=chunked", Composition("").config)
    with pytest.raises(ValueError, match="loss=chunked leaves no logits.*Generate with loss=whole"):
        chunked.generate([[1]], 2)


def test_training_goes_on_after_a_text(pools):
    """Context ranks look at whole sequences while they write, and at their own tokens again afterwards."""

    def losses(rank, world_size, plan, config, write):
        trainer, found = trainer_by(plan, config, Recipe(lr=0.1)), []
        for _ in range(3):
            found.append(trainer.step(example_batch(config, 7, 11)).loss)
            write and trainer.parallel.generate(PROMPTS, 3)
        return found

    for composition in TENSOR:
        job = losses, composition.plan, composition.config
        assert pools[2].run(*job, True) == pools[2].run(*job, False), composition.plan
