"""1-D, SUMMA and 3-D products on live ranks: equal to serial, forward and backward; bytes beside the lower bound."""

import itertools
import math

import pytest
import torch
from sharding_cases import matrices, one_product

from gpt2lab.sharding import layout, products, reshard

CASES = [(ranks, name) for ranks, grids in products.GRIDS.items() for name in grids]
UNEVEN = [(7, 5, 9), (8, 8, 8), (16, 9, 8)]


def sizes(m, n, k):
    return {"A": (m, k), "B": (k, n), "C": (m, n)}


@pytest.mark.parametrize("ranks, name", CASES)
def test_products_are_equal_and_send_what_the_layouts_say(pools, ranks, name):
    mesh = dict(zip("xyz", products.GRIDS[ranks][name], strict=True))
    for shape in UNEVEN:
        whole = sizes(*shape)
        if not all(layout.fits(products.LAYOUTS[m], whole[m], mesh) for m in "ABC"):
            continue
        found = pools[ranks].run(one_product, mesh, matrices(*shape))
        assert max(error for error, _, _ in found) < 1e-13
        promised = products.elements(whole, mesh)
        assert [sum(f[i] for f in found) for i in (1, 2)] == [promised, promised]
        assert promised >= products.least(*shape, ranks)


def test_on_eight_ranks_two_and_a_half_dimensions_reach_the_lower_bound():
    n, cube = 16, sizes(16, 16, 16)
    sent = lambda grid: products.elements(cube, dict(zip("xyz", grid, strict=True)))
    grids = {ranks: {name: sent(grid) for name, grid in of.items()} for ranks, of in products.GRIDS.items()}
    assert grids[8] == {"1-D": 7 * n**2, "SUMMA": 4 * n**2, "3-D": 3 * n**2}
    assert grids[8]["3-D"] / 8 == pytest.approx(products.least(n, n, n, 8), rel=1e-12)
    assert grids[4]["1-D"] == 3 * n**2 and grids[4]["SUMMA"] == grids[4]["1-D, two layers"] == 2 * n**2
    assert products.least(n, n, n, 4) == pytest.approx(3 * n**2 / 4 ** (2 / 3) - 3 * n**2 / 4)


def test_one_long_matrix_is_best_cut_along_one_dimension():
    """The bound's first case: rows of A and C stay, and the small B is gathered."""
    found = products.elements(sizes(64, 4, 4), {"x": 4, "y": 1, "z": 1})
    assert found / 4 == products.least(64, 4, 4, 4) == 12


@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_no_grid_is_below_either_bound(ranks):
    cube = sizes(24, 24, 24)
    for grid in itertools.product(range(1, ranks + 1), repeat=3):
        mesh = dict(zip("xyz", grid, strict=True))
        if layout.ranks(mesh) == ranks and all(
            layout.fits(products.LAYOUTS[m], cube[m], mesh) for m in "ABC"
        ):
            sent = products.elements(cube, mesh) / ranks
            held = [
                layout.local_shape(cube[m], products.USED[m], mesh, dict.fromkeys(mesh, 0)) for m in "ABC"
            ]
            memory = sum(map(math.prod, held))
            assert sent >= products.least(24, 24, 24, ranks) - 1e-9
            # each with room for so much: Irony, Toledo & Tiskin 2004
            assert 2 * sent >= 24**3 / (2 * math.sqrt(2) * ranks * math.sqrt(memory)) - memory


def wrong_part(rank, world_size):
    axes = reshard.live_axes({"x": 2, "y": 1, "z": 1})
    try:
        products.multiply(torch.zeros(4, 8), torch.zeros(8, 8), 8, axes)
    except ValueError as error:
        return str(error)


def test_parts_of_the_wrong_shape_get_a_sentence(pools):
    assert "gives this rank 8 columns of A and 4 rows of B, not 8 and 8" in pools[2].run(wrong_part)[0]
