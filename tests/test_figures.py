"""The pictures in figures/ are what our code draws, and the picture of all strategies tells the truth."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2lab import Ranks
from gpt2lab.experts.mixture import Experts
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.plots.draw import PICTURES, draw_all
from gpt2lab.plots.strategies import RANKS, STRATEGIES, strategies
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch

FIGURES = Path(__file__).parents[1] / "figures"
PLANS = {
    "data parallel": "dp=4",
    "ZeRO": "dp=4,zero=3",
    "context parallel": "cp=4",
    "tensor parallel": "tp=4",
    "pipeline parallel": "pp=4,micro=4",
    "expert parallel": "dp=4,ep=4",
}
CONFIG = GPT2Config(vocab_size=64, n_positions=16, n_layer=8, n_head=4, n_embd=32)


def test_the_pictures_are_fresh(tmp_path):
    drawn = {path.name: path.read_bytes() for path in draw_all(tmp_path)}
    committed = {path.name: path.read_bytes() for path in FIGURES.iterdir()}
    assert drawn == committed, "run `make figures`"


def test_every_picture_is_used():
    texts = [path.read_text() for path in FIGURES.parent.glob("*.md")]
    texts += [path.read_text() for path in FIGURES.parent.glob("notebooks/src/*.py")]
    for name in PICTURES:
        assert any(f"figures/{name}" in text for text in texts), name


@pytest.fixture(scope="module")
def ranks():
    with Ranks(RANKS) as pool:
        yield pool


def held(rank, world_size, text):
    """Shares of a batch's tokens, of the weights and of the optimizer's state that this rank holds."""
    plan = Plan.parse(text)
    config = replace(CONFIG, experts=Experts(4)) if plan.ep > 1 else CONFIG
    parallel = build(plan, config, Mesh(**plan.axes), torch.float64)
    batch = example_batch(config, 8, 16)
    data = sum(micro.tokens.numel() for micro in parallel.mine(batch)) / batch.tokens.numel()
    pieces = [piece.tensor for piece in parallel.sync.pieces]
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*parallel.model.parameters(), *pieces)
    }
    weights = sum(memory.values()) / 8 / config.parameters  # whatever shapes say: ZeRO-3 frees whole weights
    state = sum(t.numel() for t in pieces) / config.parameters
    return data, weights, state


@pytest.mark.parametrize("cut", STRATEGIES, ids=lambda cut: cut.name)
def test_declared_shares_are_what_ranks_hold(cut, ranks):
    for share in ranks.run(held, PLANS[cut.name]):
        assert share == pytest.approx((cut.data, cut.weights, cut.state), abs=0.1)


def test_no_two_strategies_are_drawn_alike():
    drawn = {}
    for ax in strategies().axes:
        name, *labels = (text.get_text() for text in ax.texts)
        drawn[name] = str(labels), b"".join(p.get_path().vertices.tobytes() for p in ax.patches)
    cubes = {(labels, shapes) for labels, shapes in drawn.values()}
    assert len(cubes) == len(STRATEGIES)
    assert drawn["ZeRO"][1] != drawn["data parallel"][1]
