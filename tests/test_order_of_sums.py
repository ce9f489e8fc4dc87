"""The order of a sum: the same order gives the same bits, on any number of ranks."""

import pytest
import torch
from planting import under

from gpt2lab.lessons.labs import order

BLOCKS = 8


def factors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 64, generator=generator), torch.randn(64, 24, generator=generator)


def by_tree(pools, job) -> dict[int, torch.Tensor]:
    found = {}
    for n in (1, 2, 4):
        every = pools[n].run(job, *factors(), BLOCKS)
        assert all(torch.equal(one[2], every[0][2]) for one in every)
        found[n] = every[0][2]
    return found


def the_bits_are_the_same(pools, job=order.row_parallel):
    found = by_tree(pools, job)
    assert torch.equal(found[1], found[2]) and torch.equal(found[1], found[4])


def test_a_tree_over_fixed_blocks_gives_the_same_bits_on_1_2_and_4_ranks(pools):
    the_bits_are_the_same(pools)
    x, w = factors()
    right = x.double() @ w.double()
    assert (by_tree(pools, order.row_parallel)[4] - right).abs().max() < 1e-4


def test_a_plain_sum_does_not_and_the_bytes_are_counted(pools):
    plain, sent, _, by_tree_sent = pools[4].run(order.row_parallel, *factors(), BLOCKS)[0]
    assert not torch.equal(plain, pools[1].run(order.row_parallel, *factors(), BLOCKS)[0][0])
    assert sent == 2 * 3 * 5 * 24 * 4 // 4 and by_tree_sent == 2 * 5 * 24 * 4


def test_algorithms_differ_in_bits_and_their_ranks_agree(pools):
    rows = order.differing(pools[4].run(order.sums, 1000))
    shares = {name: share for name, share, _ in rows}
    assert (
        shares["in the order of the ranks"] == 0
        and shares["ring"] > 0.05
        and shares["recursive doubling"] > 0.05
    )
    assert all(agree for *_, agree in rows)
    assert all(share == 0 for _, share, _ in order.differing(pools[2].run(order.sums, 1000)))  # a + b = b + a


WRONG = {
    "blocks of another size on each number of ranks": (order.product_by_tree, "blocks // axis.size", "2"),
    "one after the other and not as a tree": (order.product_by_tree, "tree(parts)", "sum(parts)"),
    "the first with the last": (order.tree, "parts[::2], parts[1::2]", "parts[::2], parts[::-2]"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG)
def test_a_mutant_in_another_order_is_noticed(pools, mutant):
    with pytest.raises(AssertionError):
        the_bits_are_the_same(pools, under(WRONG[mutant], order.row_parallel))
