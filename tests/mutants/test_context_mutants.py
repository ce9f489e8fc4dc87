"""Bugs in sequence splitting, planted one at a time: each makes a rank differ from serial GPT-2, or raises."""

from dataclasses import replace

import context_cases as on_ranks
import pytest
import torch
import torch.distributed as dist
from planting import bugs, is_caught

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

# layout, exchange, tokens, window (and tile: without one, torch's own kernel attends)
RING, KV = ("zigzag", "ring", 12, None), ("interleaved", "kv", 12, None)
HALO, HEADS = ("contiguous", "halo-kv-isend", 12, 2), ("zigzag", "heads", 12, None)
FLASH, DOUBLE = (*RING, None), ("zigzag", "double-ring", 12, None)
TRIANGLE, ROOTS = ("contiguous", "triangle", 12, None), ("contiguous", "kv-roots", 12, None)


def without_window(right):
    return lambda q, k, v, queries, keys, window, tile: right(q, k, v, queries, keys, None, tile)


def given_back(make):
    """Another `give_back`, made from the right one."""
    return lambda right: lambda *args: right(*args[:-1], make(args[-1]))


def others_only(right):
    """What the source's `id <= i` says: the reduction to rank i runs over the ranks after i only."""

    def give_back(parts, share, loans):
        mine = share.axis.rank
        return right([torch.zeros_like(p) if s == mine else p for s, p in enumerate(parts)], share, loans)

    return give_back


def not_added(right):
    return lambda parts, share, loans: (right(parts, share, loans), parts[share.axis.rank])[1]


def overwriting(right):
    def give_back(parts, share, loans):
        own = parts[share.axis.rank].clone()
        for a in loans:
            if a.source == share.axis.rank:
                own[..., a.start : a.stop, :] = 0
        parts[share.axis.rank] = own
        return right(parts, share, loans)

    return give_back


def positions_of(source):
    """Keys get the positions of another rank's tokens."""

    def make(right):
        def options(self):
            mine, _, *rest = right.__get__(self)
            return mine, self.share.table.positions[source(self) % self.axis.size], *rest

        return property(options)

    return make


def own_block_only(right):
    def lossy(grad, out, lse, q, k, v, queries, keys, *rest):
        dq, dk, dv = right(grad, out, lse, q, k, v, queries, keys, *rest)
        return (dq, dk, dv) if keys == queries else (dq, 0 * dk, 0 * dv)

    return lossy


def local_lse(right):
    def local(grad, out, lse, q, k, v, queries, keys, *rest):
        _, own = attention.block_forward(None, q, k, v, queries, keys, *rest)
        return right(grad, out, own.clamp(min=-1e3), q, k, v, queries, keys, *rest)

    return local


def first_rows(right):
    """Their borrower takes them for the last."""
    first = lambda a: Loan(a.source, a.target, 0, a.stop - a.start) if a.source == dist.get_rank() else a
    return lambda rows, share, loans, *ways: right(rows, share, tuple(map(first, loans)), *ways)


def alone(right):
    return lambda self, q, k, v, positions, window: causal_attention(q, k, v, torch.arange(q.size(2)), window)


def local_positions(right):
    return lambda self, tokens, positions, noise=None: right(
        self, tokens, torch.arange(len(positions)), noise
    )


BUGS = {
    "blocks are averaged without their weights":
        (attention.merge_blocks, "out - share * (out - part)", "(out + part) / 2", RING),
    "the log-sum-exp of the first block is kept":
        (attention.merge_blocks, "torch.logaddexp(lse, part_lse)", "lse", RING),
    "the merge weighs with the wrong sign":
        (attention.merge_blocks, "torch.sigmoid(part_lse - lse)", "torch.sigmoid(lse - part_lse)", RING),
    "the mask of a contiguous split is used for stripes":
        (borrow, "block_attention",
         lambda right: lambda q, k, v, queries, *rest: right(q, k, v, range(len(queries)), *rest), KV),
    "gathered keys stay in the order of ranks":
        (borrow, "rows_here", lambda right: lambda *args: (*right(*args)[:2], None), KV),
    "nobody sums the key gradients":
        (comm, "reduce_scatter", lambda right: lambda x, axis, dim, sizes: x.split(sizes, dim)[axis.rank],
         KV),
    "gradients are averaged":
        (borrow.by_all_reduce, "share.axis)", "share.axis) / share.axis.size",
         ("contiguous", "qkv", 12, None)),
    "the root drops its own part": (borrow, "borrow", given_back(others_only), ROOTS),
    "what borrowers send back is not added": (borrow, "borrow", given_back(not_added), HALO),
    "what borrowers of a triangle send back is not added":
        (borrow, "borrow", given_back(not_added), TRIANGLE),
    "returned gradients overwrite the own ones": (borrow, "borrow", given_back(overwriting), HALO),
    "a needed block is skipped":
        (ring, "lenders",
         lambda right: lambda table, window: tuple(needs[1:] for needs in right(table, window)),
         ("contiguous", "ring", 12, None)),
    "keys in the ring get their neighbours' positions":
        (ring.Trip, "options", positions_of(lambda trip: trip.source + 1), RING),
    "gradients of borrowed keys are lost": (ring, "block_backward", own_block_only, RING),
    "backward uses the log-sum-exp of the block alone": (ring, "block_backward", local_lse, RING),
    "backward forgets the row sums":
        (ring, "block_backward", lambda right: lambda grad, out, *rest: right(grad, 0 * out, *rest), RING),
    "torch's kernel computes triangles whole":
        (attention, "pieces", lambda right: lambda *at: [(r, c, False) for r, c, _ in right(*at)], FLASH),
    "the log-sum-exp of torch's kernel is lost":
        (attention, "FLASH", lambda right: lambda *args: (lambda out, lse: (out, 0 * lse))(*right(*args)),
         FLASH),
    "keys in a double ring get the positions of the plain ring":
        (ring.Trip, "options", positions_of(lambda trip: trip.axis.rank - trip.step), DOUBLE),
    "heads see tokens in the order of ranks":
        (TokenLayout, "inverse", lambda right: property(lambda self: tuple(range(self.tokens))), HEADS),
    "heads come back in the wrong order":
        (comm, "all_to_all", lambda right: lambda parts, axis, shapes: right(parts, axis, shapes)[::-1],
         HEADS),
    "heads attend without the window":
        (ulysses, "block_attention", without_window, ("contiguous", "heads", 12, 2)),
    "the first rows of a shard are lent instead of the last": (borrow, "borrow", first_rows, HALO),
    "the fallback attends globally": (borrow, "block_attention", without_window, HALO),
    "the queries of the wrong end are dropped":
        (halo, "remove_halos", lambda right: lambda x, before, after, dim=-2: right(x, after, before, dim),
         ("contiguous", "halo-x-isend", 12, 2)),
    "no exchange at all": (Split, "core", alone, HALO),
    "position embeddings are those of local positions":
        (GPT2, "embed", local_positions, ("contiguous", "kv", 12, None)),
}  # fmt: skip


def differs(pools, case, bug=None, sizes=None) -> bool:
    per_rank = pools[4].run(on_ranks.run_all, [case], sizes, bug)
    return any(not found["error"] < 1e-10 for (found,) in per_rank)


@bugs(BUGS)
def test_mutant_is_killed(pools, bug, check):
    assert differs(pools, check, bug), "nothing notices it"


def test_without_a_bug_none_of_these_cases_differs(pools):
    for case in {check for *_, check in BUGS.values()}:
        assert not differs(pools, case)


RAISE = {  # the bug, the case, the mesh, and the words of the error that notices it
    "blocks of a double ring are taken for those of a plain one": (
        (RingPath, "source", lambda right: lambda self, rank, hops: (rank - hops) % self.ranks),
        ("contiguous", "double-ring", 12, None), None,
        r"wait in a circle: .*(\n  rank \d waits .* in (recv|send) #\d+ on axis 'cp' .*){4}",
    ),
    "places in the group are taken for global ranks": (  # as in anemoi's first halos: right for {0, 1}, not for {2, 3}
        (Axis, "ranks", lambda right: property(lambda self: tuple(range(len(self.__dict__["ranks"]))))),
        TRIANGLE, {"dp": 2, "cp": 2}, r"rank \d is not part of group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISE)
def test_mutant_is_killed_by_an_error(pools, name):
    bug, case, sizes, words = RAISE[name]
    assert not differs(pools, case, None, sizes)
    with pytest.raises(RankFailed, match=words):
        differs(pools, case, bug, sizes)


# Bugs outside of attention, seen by the comparison of whole training steps


def own_total(right):
    return lambda self, index: replace(part := right(self, index), total=int((part.targets != -100).sum()))


def targets_shifted_after_the_split(right):
    """Each slice shifts its own tokens: the last token of every slice loses its target."""

    def columns(self, index):
        part = right(self, index)
        targets = torch.cat([part.tokens[:, 1:], torch.full_like(part.tokens[:, :1], -100)], 1)
        return replace(part, targets=targets)

    return columns


TRAINING = {
    "a slice divides by its own tokens": (Batch, "columns", own_total, "cp=4"),
    "targets are shifted after the split": (Batch, "columns", targets_shifted_after_the_split, "cp=4"),
}


@bugs(TRAINING)
def test_training_mutant_is_killed(pools, bug, check):
    config = replace(CONFIG, n_layer=1)
    assert is_caught(pools, bug, check, config) and not is_caught(pools, None, check, config, 1e-10)
