"""Bugs in sequence splitting, planted one at a time: each makes a rank differ from serial GPT-2, or raises."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import context_cases as on_ranks

from gpt2lab import RankFailed
from gpt2lab.corpus.batches import Batch
from gpt2lab.model import GPT2, causal_attention
from gpt2lab.parallel.context import attention, borrow, halo, ring, ulysses
from gpt2lab.parallel.context.exchanges import Split
from gpt2lab.parallel.context.layouts import Loan, TokenLayout
from gpt2lab.parallel.context.paths import RingPath
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Axis
from gpt2lab.reference import CONFIG
from gpt2lab.verify import Plan, compare

RING, KV, HALO, HEADS = (
    ("zigzag", "ring", 12, None),
    ("interleaved", "kv", 12, None),
    ("contiguous", "halo-kv-isend", 12, 2),
    ("zigzag", "heads", 12, None),
)
FLASH = ("zigzag", "ring", 12, None, None)  # without a tile, torch's own kernel attends
MUTANTS = {}


def mutant(case, owner, name, sizes=None, raises=None):
    """Register a function that makes the wrong version from the right one.

    A mutant dies of wrong numbers, or of the error that `raises` describes: nothing else counts as noticed.
    """

    def register(make):
        MUTANTS[make.__name__.replace("_", " ")] = (case, (owner, name, make), sizes, raises)
        return make

    return register


@mutant(RING, attention, "merge_blocks")
def blocks_are_averaged_without_their_weights(right):
    return lambda out, lse, part, part_lse: ((out + part) / 2, right(out, lse, part, part_lse)[1])


@mutant(RING, attention, "merge_blocks")
def the_log_sum_exp_of_the_first_block_is_kept(right):
    return lambda out, lse, part, part_lse: (right(out, lse, part, part_lse)[0], lse)


@mutant(RING, attention, "merge_blocks")
def the_merge_weighs_with_the_wrong_sign(right):
    return lambda out, lse, part, part_lse: (
        out - torch.sigmoid(lse - part_lse) * (out - part),
        right(out, lse, part, part_lse)[1],
    )


@mutant(KV, borrow, "block_attention")
def the_mask_of_a_contiguous_split_is_used_for_stripes(right):
    return lambda q, k, v, queries, keys, *rest: right(q, k, v, range(len(queries)), keys, *rest)


@mutant(KV, borrow, "rows_here")
def gathered_keys_stay_in_the_order_of_ranks(right):
    return lambda *args: (*right(*args)[:2], None)


@mutant(KV, comm, "reduce_scatter")
def nobody_sums_the_key_gradients(right):
    return lambda x, axis, dim, sizes: x.split(sizes, dim)[axis.rank]


@mutant(("contiguous", "qkv", 12, None), borrow, "by_all_reduce")
def gradients_are_averaged(right):
    return lambda parts, share, loans: right(parts, share) / share.axis.size


def given_back(case):
    """Register another `give_back`, made from the right one."""

    def register(make):
        swapped = lambda right: lambda *args: right(*args[:-1], make(args[-1]))
        swapped.__name__ = f"{make.__name__} in {case[1]}"
        mutant(case, borrow, "borrow")(swapped)
        return make

    return register


@given_back(("contiguous", "kv-roots", 12, None))
def the_root_drops_its_own_part(right):
    """What the source's `id <= i` says: the reduction to rank i runs over the ranks after i only."""

    def others_only(parts, share, loans):
        mine = share.axis.rank
        return right([torch.zeros_like(p) if s == mine else p for s, p in enumerate(parts)], share, loans)

    return others_only


@given_back(("contiguous", "triangle", 12, None))
@given_back(HALO)
def what_borrowers_send_back_is_not_added(right):
    return lambda parts, share, loans: (right(parts, share, loans), parts[share.axis.rank])[1]


@given_back(HALO)
def returned_gradients_overwrite_the_own_ones(right):
    def overwriting(parts, share, loans):
        own = parts[share.axis.rank].clone()
        for a in loans:
            if a.source == share.axis.rank:
                own[..., a.start : a.stop, :] = 0
        parts[share.axis.rank] = own
        return right(parts, share, loans)

    return overwriting


@mutant(("contiguous", "ring", 12, None), ring, "lenders")
def a_needed_block_is_skipped(right):
    return lambda table, window: tuple(needs[1:] for needs in right(table, window))


@mutant(RING, ring.Trip, "options")
def keys_in_the_ring_get_their_neighbours_positions(right):
    def options(self):
        mine, _, *rest = right.__get__(self)
        return mine, self.share.table.positions[(self.source + 1) % self.axis.size], *rest

    return property(options)


@mutant(RING, ring, "block_backward")
def gradients_of_borrowed_keys_are_lost(right):
    def lossy(grad, out, lse, q, k, v, queries, keys, *rest):
        dq, dk, dv = right(grad, out, lse, q, k, v, queries, keys, *rest)
        return (dq, dk, dv) if keys == queries else (dq, 0 * dk, 0 * dv)

    return lossy


@mutant(RING, ring, "block_backward")
def backward_uses_the_log_sum_exp_of_the_block_alone(right):
    def local(grad, out, lse, q, k, v, queries, keys, *rest):
        _, own = attention.block_forward(None, q, k, v, queries, keys, *rest)
        return right(grad, out, own.clamp(min=-1e3), q, k, v, queries, keys, *rest)

    return local


@mutant(RING, ring, "block_backward")
def backward_forgets_the_row_sums(right):
    return lambda grad, out, *rest: right(grad, 0 * out, *rest)


@mutant(FLASH, attention, "pieces")
def torchs_kernel_computes_triangles_whole(right):
    return lambda queries, keys: [(rows, columns, False) for rows, columns, _ in right(queries, keys)]


@mutant(FLASH, attention, "FLASH")
def the_log_sum_exp_of_torchs_kernel_is_lost(right):
    def kernel(*args):
        out, lse = right(*args)
        return out, 0 * lse

    return kernel


CIRCLE = r"wait in a circle: .*(\n  rank \d waits .* in (recv|send) #\d+ on axis 'cp' .*){4}"


@mutant(("contiguous", "double-ring", 12, None), RingPath, "source", raises=CIRCLE)
def blocks_of_a_double_ring_are_taken_for_those_of_a_plain_one(right):
    return lambda self, rank, hops: (rank - hops) % self.ranks


@mutant(("zigzag", "double-ring", 12, None), ring.Trip, "options")
def keys_in_a_double_ring_get_the_positions_of_the_plain_ring(right):
    def options(self):
        mine, _, *rest = right.__get__(self)
        return mine, self.share.table.positions[(self.axis.rank - self.step) % self.axis.size], *rest

    return property(options)


@mutant(HEADS, TokenLayout, "inverse")
def heads_see_tokens_in_the_order_of_ranks(right):
    return property(lambda self: tuple(range(self.tokens)))


@mutant(HEADS, comm, "all_to_all")
def heads_come_back_in_the_wrong_order(right):
    return lambda parts, axis, shapes: right(parts, axis, shapes)[::-1]


@mutant(("contiguous", "heads", 12, 2), ulysses, "block_attention")
def heads_attend_without_the_window(right):
    return lambda q, k, v, queries, keys, window, tile: right(q, k, v, queries, keys, None, tile)


@mutant(HALO, borrow, "borrow")
def the_first_rows_of_a_shard_are_lent_instead_of_the_last(right):
    """Their borrower takes them for the last."""
    first = lambda a: Loan(a.source, a.target, 0, a.stop - a.start) if a.source == dist.get_rank() else a
    return lambda rows, share, loans, *ways: right(rows, share, tuple(map(first, loans)), *ways)


@mutant(HALO, borrow, "block_attention")
def the_fallback_attends_globally(right):
    return lambda q, k, v, queries, keys, window, tile: right(q, k, v, queries, keys, None, tile)


@mutant(("contiguous", "halo-x-isend", 12, 2), halo, "remove_halos")
def the_queries_of_the_wrong_end_are_dropped(right):
    return lambda x, before, after, dim=-2: right(x, after, before, dim)


@mutant(HALO, Split, "core")
def no_exchange_at_all(right):
    return lambda self, q, k, v, positions, window: causal_attention(q, k, v, torch.arange(q.size(2)), window)


@mutant(("contiguous", "kv", 12, None), GPT2, "embed")
def position_embeddings_are_those_of_local_positions(right):
    return lambda self, tokens, positions, noise=None: right(
        self, tokens, torch.arange(len(positions)), noise
    )


@mutant(
    ("contiguous", "triangle", 12, None), Axis, "ranks", {"dp": 2, "cp": 2}, r"rank \d is not part of group"
)
def places_in_the_group_are_taken_for_global_ranks(right):
    """As in the first halo code of anemoi: right for the group {0, 1}, wrong for {2, 3}."""
    return property(lambda self: tuple(range(len(self.__dict__["ranks"]))))


@pytest.fixture
def pool(pools):
    return pools[4]


def differs(pool, case, planted, sizes) -> bool:
    per_rank = pool.run(on_ranks.run_all, [case], sizes, planted)
    return any(not found["error"] < 1e-10 for (found,) in per_rank)


def test_without_a_bug_none_of_these_cases_differs(pool):
    for case, _, sizes, _ in MUTANTS.values():
        assert not differs(pool, case, None, sizes)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(pool, name):
    case, planted, sizes, raises = MUTANTS[name]
    if raises is None:
        assert differs(pool, case, planted, sizes), f"nothing notices that {name}"
        return
    with pytest.raises(RankFailed, match=raises):
        pool.run(on_ranks.run_all, [case], sizes, planted)


# Bugs outside of attention, seen by the comparison of whole training steps


def local_normaliser(right):
    return lambda self, index: replace(
        right(self, index), total=int((right(self, index).targets != -100).sum())
    )


def targets_shifted_after_the_split(right):
    """Each slice shifts its own tokens: the last token of every slice loses its target."""

    def columns(self, index):
        part = right(self, index)
        targets = torch.cat([part.tokens[:, 1:], torch.full_like(part.tokens[:, :1], -100)], 1)
        return replace(part, targets=targets)

    return columns


def compare_with_bug(rank, world_size, make):
    with on_ranks.planted(make and (Batch, "columns", make)):
        claims = compare(rank, world_size, Plan(cp=world_size), replace(CONFIG, n_layer=1), 2, 11)
    return all(c.error <= 1e-10 for c in claims)


@pytest.mark.parametrize("make", [local_normaliser, targets_shifted_after_the_split])
def test_training_mutant_is_killed(pool, make):
    assert all(pool.run(compare_with_bug, None))
    assert not all(pool.run(compare_with_bug, make))
