"""Bugs in sequence splitting, planted one at a time: each makes a rank differ from serial GPT-2, or raises."""

from dataclasses import replace

import context_cases as on_ranks
import pytest
from planting import bugs, is_caught

from gpt2lab import RankFailed
from gpt2lab.corpus.batches import Batch
from gpt2lab.model import GPT2
from gpt2lab.parallel.context import attention, borrow, halo, ring, ulysses
from gpt2lab.parallel.context.exchanges import Split
from gpt2lab.parallel.context.paths import RingPath
from gpt2lab.ranks.mesh import Axis
from gpt2lab.reference import CONFIG

# layout, exchange, tokens, window (and tile: without one, torch's own kernel attends)
RING, KV = ("zigzag", "ring", 12, None), ("interleaved", "kv", 12, None)
HALO, HEADS = ("contiguous", "halo-kv-isend", 12, 2), ("zigzag", "heads", 12, None)
FLASH, DOUBLE = (*RING, None), ("zigzag", "double-ring", 12, None)
TRIANGLE, ROOTS = ("contiguous", "triangle", 12, None), ("contiguous", "kv-roots", 12, None)


def positions_of(source):
    """Keys get the positions of another rank's tokens."""

    def make(right):
        def options(self):
            mine, _, *rest = right.__get__(self)
            return mine, self.share.table.positions[source(self) % self.axis.size], *rest

        return property(options)

    return make


BUGS = {
    "blocks are averaged without their weights":
        (attention.merge_blocks, "out - share * (out - part)", "(out + part) / 2", RING),
    "the log-sum-exp of the first block is kept":
        (attention.merge_blocks, "torch.logaddexp(lse, part_lse)", "lse", RING),
    "the merge weighs with the wrong sign":
        (attention.merge_blocks, "torch.sigmoid(part_lse - lse)", "torch.sigmoid(lse - part_lse)", RING),
    "the mask of a contiguous split is used for stripes":
        (attention.block_attention, "v, queries, keys, window, tile)", "v, range(len(queries)), keys, window, tile)",
         KV),
    "gathered keys stay in the order of ranks":
        (borrow.rows_here, "None if rows == sorted(rows) else order", "None", KV),
    "nobody sums the key gradients":
        (borrow.by_reduce_scatter, "comm.reduce_scatter(torch.cat(parts, -2), share.axis, -2, share.table.sizes)",
         "parts[share.axis.rank]", KV),
    "gradients are averaged":
        (borrow.by_all_reduce, "share.axis)", "share.axis) / share.axis.size",
         ("contiguous", "qkv", 12, None)),
    "the root drops its own part":  # as the source's `id <= i` says: only ranks after i contribute to rank i
        (borrow.by_roots, "reduce(part, axis", "reduce(part * (root != share.axis.rank), axis", ROOTS),
    "what borrowers send back is not added": (borrow.return_by, "+= gradient", "+= 0", HALO),
    "what borrowers of a triangle send back is not added":
        (borrow.return_by, "+= gradient", "+= 0", TRIANGLE),
    "returned gradients overwrite the own ones": (borrow.return_by, "+= gradient", "= gradient", HALO),
    "a needed block is skipped":
        (ring, "lenders",
         lambda right: lambda table, window: tuple(needs[1:] for needs in right(table, window)),
         ("contiguous", "ring", 12, None)),
    "keys in the ring get their neighbours' positions":
        (ring.Trip, "options", positions_of(lambda trip: trip.source + 1), RING),
    "gradients of borrowed keys are lost":
        (ring._RingAttention.backward, "torch.stack(part)", "torch.stack(part) * (step == 0)", RING),
    "gradients of borrowed keys are no numbers":
        (ring._RingAttention.backward, "torch.stack(part)", "torch.stack(part) * float('nan')", RING),
    "backward uses the log-sum-exp of the block alone":
        (ring._RingAttention.backward, "block_backward(grad, out, lse",
         "block_backward(grad, out, block_forward(None, q, *held, *trip.options)[1].clamp(min=-1e3)", RING),
    "backward forgets the row sums":
        (ring._RingAttention.backward, "block_backward(grad, out", "block_backward(grad, 0 * out", RING),
    "torch's kernel computes triangles whole":
        (attention._parts, "(found, True)", "([(r, c, False) for r, c, _ in found], True)", FLASH),
    "the log-sum-exp of torch's kernel is lost":
        (attention.block_forward, "= part_lse.unsqueeze(-1)", "= 0 * part_lse.unsqueeze(-1)", FLASH),
    "keys in a double ring get the positions of the plain ring":
        (ring.Trip, "options", positions_of(lambda trip: trip.axis.rank - trip.step), DOUBLE),
    "heads see tokens in the order of ranks":
        (ulysses.heads, "torch.tensor(table.inverse)", "torch.arange(table.tokens)", HEADS),
    "heads come back in the wrong order":
        (ulysses.heads, "* axis.size), 1)", "* axis.size)[::-1], 1)", HEADS),
    "heads attend without the window":
        (attention.block_attention, "window, tile)", "None, tile)", ("contiguous", "heads", 12, 2)),
    "the first rows of a shard are lent instead of the last":
        (borrow.lend_by, "rows[..., a.start : a.stop, :]", "rows[..., : a.stop - a.start, :]", HALO),
    "the fallback attends globally": (attention.block_attention, "window, tile)", "None, tile)", HALO),
    "the queries of the wrong end are dropped":
        (halo.remove_halos, "narrow(dim, before,", "narrow(dim, after,",
         ("contiguous", "halo-x-isend", 12, 2)),
    "no exchange at all":
        (Split.core, "self.attend(q, k, v, self.share)",
         "causal_attention(q, k, v, torch.arange(q.size(2)), window)", HALO),
    "position embeddings are those of local positions":
        (GPT2.embed, "self.wpe(positions)", "self.wpe(torch.arange(len(positions)))",
         ("contiguous", "kv", 12, None)),
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
        (RingPath.source, "self._moved(rank, -(hops // self.inner), -(hops - hops // self.inner))",
         "(rank - hops) % self.ranks"),
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


TRAINING = {
    "a slice divides by its own tokens":
        (Batch.columns, "replace(self,", 'replace(self, total=int((cut["targets"] != -100).sum()),', "cp=4"),
    "targets are shifted after the split":  # the last token of every slice loses its target
        (Batch.columns, "self.targets[:, index]",
         "torch.nn.functional.pad(self.tokens[:, index[1:]], (0, 1), value=-100)", "cp=4"),
}  # fmt: skip


@bugs(TRAINING)
def test_training_mutant_is_killed(pools, bug, check):
    config = replace(CONFIG, n_layer=1)
    assert is_caught(pools, bug, check, config) and not is_caught(pools, None, check, config, 1e-10)
