"""Tofu's dynamic program equals brute force, and finds data and tensor parallelism where each is cheaper."""

import itertools

import pytest

from gpt2lab.sharding import tofu
from gpt2lab.sharding.tofu import ChainOperator


def names(options):
    return "".join(o.index for o in options)


@pytest.mark.parametrize(
    "tokens, width, layers", list(itertools.product((4, 16, 31, 200), (4, 9, 16), (1, 2, 3)))
)
def test_the_dynamic_program_equals_brute_force(tokens, width, layers):
    chain = tofu.mlp_chain(tokens, width, layers)
    assert tofu.chain_elements(chain, tofu.halve(chain)) == tofu.brute_force(chain)


@pytest.mark.parametrize("sizes", [(3, 8, 2, 9), (16, 4, 4, 16, 5), (2, 2, 2, 2, 2, 2), (50, 3, 40, 3, 40)])
def test_also_on_chains_of_uneven_products(sizes):
    rows, *widths = sizes
    pairs = itertools.pairwise(widths)
    chain = [ChainOperator(str(i), ((rows, a), (a, b), (rows, b))) for i, (a, b) in enumerate(pairs)]
    assert tofu.chain_elements(chain, tofu.halve(chain)) == tofu.brute_force(chain)


def test_many_tokens_cut_the_batch_few_cut_the_weights():
    """The crossover of lesson 06, B T = 4 C, found by the program."""
    width = 16
    for tokens in (4 * width - 2, 4 * width + 2):
        found = names(tofu.halve(tofu.mlp_chain(tokens, width)))
        assert found == ("ok" if tokens < 4 * width else "nn")


def test_halving_twice_may_choose_another_cut():
    (first, sent), (second, again) = tofu.recursive(tofu.mlp_chain(100, 16), 2)
    assert (names(first), names(second)) == ("nn", "ok") and sent == 2 * 8 * 16 * 16
    assert again == 2 * 2 * 2 * 50 * 16


def test_options_of_a_product_are_its_three_indices():
    assert {o.index for o in tofu.mlp_chain(8, 8)[0].options()} == {"n", "o", "k"}
    assert {o.index for o in tofu.mlp_chain(1, 8)[0].options()} == {"o", "k"}
