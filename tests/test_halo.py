"""Halos: who lends what, the exact condition on the window, four ways of exchanging, and the adjoint."""

import itertools
from contextlib import nullcontext
from fractions import Fraction

import context_cases as on_ranks
import pytest
import torch
from planting import all_planted, rewritten, under

from gpt2lab.lessons.labs import context as lab
from gpt2lab.parallel.context import borrow, costs, halo
from gpt2lab.parallel.context.borrow import Share
from gpt2lab.parallel.context.layouts import Loan, check_hops, hops, layout, loans, widths
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

# Arithmetic of halos, in one process


def extended(shards, table, rank, before, after):
    """What the exchange must give, by indexing the whole sequence."""
    mine = table.positions[rank]
    return torch.cat(shards)[max(0, mine[0] - before) : mine[-1] + 1 + after] if mine else shards[rank]


@pytest.mark.parametrize("name", ["contiguous", "unequal"])
def test_loans_fill_the_halos_and_nothing_else(name):
    for tokens, ranks, before, after in itertools.product((1, 5, 11), (1, 2, 3, 4), (0, 1, 3, 12), (0, 2)):
        table = layout(name, tokens, ranks)
        shards = [torch.tensor(mine, dtype=torch.float64) for mine in table.positions]
        for r in range(ranks):
            deals = [a for a in loans(table, before, after) if a.target == r]
            rows = {a.source: shards[a.source][a.start : a.stop] for a in deals}
            left = [rows[s] for s in sorted(rows) if s < r]
            right = [rows[s] for s in sorted(rows) if s > r]
            got = torch.cat([*left, shards[r], *right])
            assert torch.equal(got, extended(shards, table, r, before, after))
            assert widths(table, r, before, after) == (sum(map(len, left)), sum(map(len, right)))


def test_adding_and_removing_halos_is_the_identity():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for dim, before, after in itertools.product((0, 1, 2, -1), (0, 2), (0, 1)):
        wide = halo.add_halos(x, before, after, dim)
        assert wide.size(dim) == x.size(dim) + before + after
        assert torch.equal(halo.remove_halos(wide, before, after, dim), x)
        assert wide.sum() == x.sum()


def test_blocking_sends_in_the_order_of_the_loans_never_wait_in_a_circle():
    """Simulated rendezvous: a message moves when both ends have it as their next one."""
    for ranks, before, after in itertools.product((2, 3, 4, 5, 8), (1, 3, 9), (0, 2)):
        deals = loans(layout("contiguous", 2 * ranks + 1, ranks), before, after)
        queue = {r: [a for a in deals if r in (a.source, a.target)] for r in range(ranks)}
        while any(queue.values()):
            ready = [a for a in deals if queue[a.source][:1] == [a] == queue[a.target][:1]]
            assert ready, "a deadlock"
            for a in ready:
                queue[a.source].pop(0)
                queue[a.target].pop(0)


def test_the_exact_window_condition_at_its_boundary():
    table = layout("contiguous", 16, 4)
    check_hops(table, 4)
    with pytest.raises(ValueError, match="window of 5 tokens .* shard of 4 tokens.*2 ranks away.*at most 4"):
        check_hops(table, 5)
    check_hops(table, 5, allowed=2)
    plan = Plan.parse("cp=4,exchange=halo-kv,hops=1")
    plan.check(on_ranks.config(4), 4, 16)
    with pytest.raises(ValueError, match="window of 5 tokens .* 2 ranks away, and 1 is allowed"):
        plan.check(on_ranks.config(5), 4, 16)
    with pytest.raises(ValueError, match="3 ranks away.*at most 4"):
        check_hops(table, 10**18)  # far too wide: found in a few looks
    Plan.parse("cp=4,exchange=halo-kv").check(on_ranks.config(5), 4, 16)
    assert [hops(table, w) for w in (0, 1, 4, 5, 8, 9, 12, 15)] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_anemois_first_rule_is_sufficient_and_not_necessary():
    """Half of the last shard: it forbids windows that need only the neighbour, and never allows too much."""
    for tokens, ranks, window in itertools.product(range(4, 24), (2, 3, 4), range(1, 12)):
        table = layout("contiguous", tokens, ranks)
        if table.sizes[-1] // 2 >= window:
            check_hops(table, window)
    table = layout("contiguous", 7, 2)
    assert table.sizes[-1] // 2 == 1
    check_hops(table, 4)


def test_break_even_window():
    assert costs.break_even_window(1024, 4) == 384
    assert costs.break_even_window(1024, 2) == 512
    assert costs.break_even_window(11, 3) == Fraction(44, 9)
    for ranks in (2, 4):  # heads and a two-sided halo of the input cost the same at the break-even
        sent, _ = costs.sent("heads", layout("contiguous", 64, ranks), 1, 24)["forward"]
        assert sent == 2 * costs.break_even_window(64, ranks) * 24


# On live ranks


def exchange(rank, world_size, tokens, before, after, way, name="contiguous"):
    """Labelled rows out, labelled gradients back, and what they were given."""
    axis = Mesh(cp=world_size)["cp"]
    table = layout(name, tokens, world_size)
    share = Share(table, axis, before)
    labels = torch.tensor(share.mine, dtype=torch.float64)
    x = torch.stack((labels, 100 + labels), -1)[:, None, None].requires_grad_()  # (t, 1, 1, 2)
    wide = halo.halo_exchange(x, share, before, after, dim=0, way=way)
    generator = torch.Generator().manual_seed(rank)
    y = torch.randn(wide.shape, dtype=torch.float64, generator=generator)
    wide.backward(y)
    return [t[:, 0, 0, 0].tolist() for t in (wide, x.grad, y)]


@pytest.mark.parametrize("way", halo.WAYS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_gradients_and_adjoint(pools, way, world):
    for tokens, before, after in ((11, 2, 0), (11, 2, 2), (11, 5, 0), (11, 0, 3), (3, 2, 1), (8, 0, 0)):
        table = layout("contiguous", tokens, world)
        found = pools[world].run(exchange, tokens, before, after, way)
        expected = [0.0] * tokens
        for r, (wide, _, y) in enumerate(found):
            mine = table.positions[r]
            around = range(max(0, mine[0] - before), min(tokens, mine[-1] + 1 + after)) if mine else ()
            assert wide == list(around)
            for t, gradient in zip(around, y, strict=True):
                expected[t] += gradient
        got = [g for _, grads, _ in found for g in grads]
        assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("way", halo.WAYS)
@pytest.mark.parametrize("after", [0, 1])
def test_the_gradient_is_the_slope(pools, way, after):
    assert pools[3].run(lab.checked_by_autograd, way, after) == [True] * 3


@pytest.mark.parametrize("way", halo.WAYS)
def test_a_mutant_that_overwrites_a_gradient_has_another_slope(pools, way):
    line = "own[..., a.start : a.stop, :] {} gradient"
    job = under((borrow.return_by, line.format("+="), line.format("=")), lab.checked_by_autograd)
    assert not any(pools[3].run(job, way))


def never_awaited(rank, world_size, exchange, bug=None):
    """How many messages this rank began to send or to receive in a step, and for how many of them it never waited."""
    begun, awaited = [], []
    begin = lambda right: lambda *args: (begun.append(right(*args)), begun[-1])[1]
    wait = lambda right: lambda handle: (awaited.append(handle), right(handle))[1]
    bugs = (comm, "isend", begin), (comm, "irecv", begin), (comm.Handle, "wait", wait)
    with all_planted(*bugs), rewritten(borrow.isend_irecv, *bug) if bug else nullcontext():
        on_ranks.run_all(rank, world_size, [("contiguous", exchange, 12, 3)])
    return len(begun), sum(not any(handle is other for other in awaited) for handle in begun)


@pytest.mark.parametrize("exchange", ["triangle", "halo-kv-isend", "halo-x-isend"])
def test_a_rank_waits_for_all_that_it_sends(pools, exchange):
    assert all(begun and not left for begun, left in pools[3].run(never_awaited, exchange))
    bug = "handle.wait()\n    return", "pass\n    return"
    assert any(left for _, left in pools[3].run(never_awaited, exchange, bug))


def test_a_loan_is_rows_of_a_shard():
    assert loans(layout("contiguous", 11, 4), 2) == (Loan(0, 1, 1, 3), Loan(2, 3, 1, 3), Loan(1, 2, 1, 3))
    pairs = [(a.source, a.target) for a in loans(layout("contiguous", 16, 4), 5)]
    assert pairs == [(0, 1), (2, 3), (1, 2), (0, 2), (1, 3)]
