"""Muon: cut matrices are orthogonalised exactly or refused, what it sends is counted."""

from dataclasses import replace

import pytest
import torch
from equality import MODELS

from gpt2lab.lessons.labs.instruments import built, trainer_by
from gpt2lab.parallel import muon
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.axis import Axis
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, MUON, example_batch
from gpt2lab.train import Recipe

TINY, ALONE = MODELS["tiny"], Axis()


def matrices():
    """A square, a flat and a tall one."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((64, 64), (10, 40), (41, 12))]


def apart(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_singular_values_come_near_one_and_vectors_stay():
    for x in matrices():
        (y,) = muon.orthogonalised([x], [None], ALONE)
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        turned = u.mT @ y @ v.mT  # diagonal where the singular vectors are the same
        wide = s > 0.05 * s.norm()
        assert ((turned.diagonal()[wide] > 0.6) & (turned.diagonal()[wide] < 1.25)).all()
        assert apart(turned.diagonal().diag(), turned) < 1e-12


def test_halves_orthogonalised_apart_are_off_by_what_the_refusal_says():
    whole, halves = matrices()[0], matrices()[0].chunk(2)
    found = torch.cat(muon.orthogonalised(list(halves), [None, None], ALONE))
    off = apart(found, muon.orthogonalised([whole], [None], ALONE)[0])
    assert f"off by {off:.2f}" in muon.OFF


def slices(rank, world_size, dims):
    axis = Mesh(tp=world_size)["tp"]
    mine = [
        x if d is None else x.tensor_split(world_size, d)[rank] for x, d in zip(matrices(), dims, strict=True)
    ]
    comm.clear_log()
    return muon.orthogonalised(mine, dims, axis), [(e.op, e.bytes) for e in comm.log]


@pytest.mark.parametrize("dims", [(0, 1, 0), (1, 0, 1), (1, None, None), (None, None, None)])
def test_slices_are_those_of_the_whole_and_what_is_sent_is_counted(pools, dims):
    found = pools[2].run(slices, list(dims))
    for i, (whole, dim) in enumerate(zip(matrices(), dims, strict=True)):
        parts = [y[i] for y, _ in found]
        right = muon.orthogonalised([whole], [None], ALONE)[0]
        assert apart(parts[0] if dim is None else torch.cat(parts, dim), right) < 1e-14
    sides = [x.size(1 - dim) for x, dim in zip(matrices(), dims, strict=True) if dim is not None]
    sums = [len(sides), *[sum(side**2 for side in sides)] * muon.ITERATIONS] if sides else []
    assert [sum(sent[i][1] for _, sent in found) for i in range(len(sums))] == [2 * 8 * n for n in sums]
    assert len(found[0][1]) == len(sums)


def sent_in_an_update(rank, world_size, plan, recipe):
    trainer = trainer_by(plan, TINY, recipe)
    _, norm = trainer.gradients(example_batch(TINY, 7, 11))
    comm.clear_log()
    trainer._update(norm)
    return sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3,data=owner", "pp=2,micro=2", "cp=2"])
def test_a_matrix_with_an_owner_sends_what_adamw_sends(pools, plan):
    ours, adamws = (pools[2].run(sent_in_an_update, plan, recipe) for recipe in (MUON, Recipe(clip=0.5)))
    assert ours == adamws


def test_under_tensor_parallelism_twenty_products_a_layer_are_sent(pools):
    (size, messages), _ = pools[2].run(sent_in_an_update, "tp=2", MUON)
    layers, c = TINY.n_layer, TINY.n_embd
    assert size == 8 * (5 * 4 * layers * c**2 + 4 * layers)
    assert messages == 2 * 6  # an all-reduce on 2 ranks is 2


def test_flat_pieces_are_refused_by_name():
    pieces = built("zero=1", CONFIG).sync.pieces
    piece = next(p for p in pieces if p.name == "h.0.attn.c_attn.weight")
    half = replace(piece, tensor=piece.tensor[:100])
    with pytest.raises(ValueError, match=r"h.0.attn.c_attn.weight \(72, 24\) is cut flat"):
        muon.Muon([{"params": [half.tensor]}], [half], ALONE, lr=1e-3)


def test_experts_are_offered_no_owner():
    with pytest.raises(ValueError, match=r"off by 0.53. Use zero=0.$"):
        muon.check(Plan.parse("dp=2,ep=2,zero=1"))
