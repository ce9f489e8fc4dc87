"""Attention in blocks: each block gives an output and a log-sum-exp, and blocks merge without a second look.

Forward and backward by hand, as every exchange of context splitting needs them. Queries and keys carry their
true positions, ascending; pairs that nobody attends to are not computed at all, and what is computed is counted.
Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022, FlashAttention, section 3 and appendix B.
"""

import bisect
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F

work = Counter()  # (query, key) pairs computed by this process, times batch and heads, per kernel


def tiles(positions: list[int], tile: int | None) -> list[slice]:
    """Cut a rank's rows into runs of at most `tile`, and where positions jump more than usual (zigzag's chunks)."""
    steps = [b - a for a, b in zip(positions, positions[1:], strict=False)]
    usual = min(steps, default=1)
    ends, start = [], 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or steps[i - 1] > usual or (tile and i - start == tile):
            ends.append(slice(start, i))
            start = i
    return ends


def strips(
    queries: list[int], keys: list[int], window: int | None = None, tile: int | None = None
) -> Iterator[tuple[slice, slice, bool]]:
    """The parts of the (query, key) rectangle that causal attention touches: (rows, columns, needs a mask).

    A tile of queries sees keys from its first query's window to its last query; the rest is never computed.
    """
    for rows in tiles(queries, tile):
        first, last = queries[rows.start], queries[rows.stop - 1]
        lo = 0 if window is None else bisect.bisect_left(keys, first - window)
        hi = bisect.bisect_right(keys, last)
        if lo < hi:
            whole = keys[hi - 1] <= first and (window is None or keys[lo] >= last - window)
            yield rows, slice(lo, hi), not whole


def pairs_computed(queries, keys, window=None, tile=None) -> int:
    """How many (query, key) pairs `strips` touches; with tile=1 exactly those that are attended to."""
    return sum((r.stop - r.start) * (c.stop - c.start) for r, c, _ in strips(queries, keys, window, tile))


def _scores(q, k, queries, keys, window, masked):
    """Scaled scores (B, H, R, S) of one strip, -inf where a query does not see a key."""
    scores = q @ k.mT * q.size(-1) ** -0.5
    if masked:
        queries, keys = (torch.tensor(at).to(scores.device) for at in (queries, keys))
        behind = queries[:, None] - keys
        scores = scores.masked_fill(
            (behind < 0) if window is None else (behind < 0) | (behind > window), -torch.inf
        )
    return scores


def _count(kernel: str, q, rows: slice, columns: slice):
    work[kernel] += q.size(0) * q.size(1) * (rows.stop - rows.start) * (columns.stop - columns.start)


def merge(out, lse, part, part_lse):
    """Join two blocks of keys: outputs (B, H, R, D) and log-sum-exps (B, H, R, 1) over disjoint keys, out of place.

    With a = sigmoid(part_lse - lse), out becomes (1 - a) out + a part and lse becomes log(exp lse + exp part_lse).
    """
    share = torch.sigmoid(part_lse - lse)
    return out - share * (out - part), lse - F.logsigmoid(lse - part_lse)


def block_forward(state, q, k, v, queries, keys, window=None, tile=None):
    """Attend from q (B, H, R, D) to one block of keys and values (B, H, S, D); merge into state, and return it.

    `state` is None before the first block, which must show every query at least one key (its own block does).
    """
    out, lse = state if state else (torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf))
    out, lse = out.clone(), lse.clone()
    for rows, columns, masked in strips(queries, keys, window, tile):
        scores = _scores(q[:, :, rows], k[:, :, columns], queries[rows], keys[columns], window, masked)
        part_lse = scores.logsumexp(-1, keepdim=True)
        # a query that sees none of these keys has -inf; a finite stand-in makes its weights 0 instead of NaN
        weights = (scores - part_lse.clamp(min=torch.finfo(q.dtype).min)).exp()
        part = weights @ v[:, :, columns]
        if state:
            part, part_lse = merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out[:, :, rows], lse[:, :, rows] = part, part_lse
        _count("forward", q, rows, columns)
    return out, lse


def block_backward(grad, delta, lse, q, k, v, queries, keys, window=None, tile=None):
    """dQ, dK, dV that one block of keys contributes, given the final log-sum-exp of the queries.

    `delta` (B, H, R, 1) is the row sum of grad * out: the only thing softmax's backward needs from other blocks.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns, masked in strips(queries, keys, window, tile):
        scores = _scores(q[:, :, rows], k[:, :, columns], queries[rows], keys[columns], window, masked)
        weights = (scores - lse[:, :, rows]).exp()
        dscores = weights * (grad[:, :, rows] @ v[:, :, columns].mT - delta[:, :, rows]) * q.size(-1) ** -0.5
        dq[:, :, rows] += dscores @ k[:, :, columns]
        dk[:, :, columns] += dscores.mT @ q[:, :, rows]
        dv[:, :, columns] += weights.mT @ grad[:, :, rows]
        _count("dQ", q, rows, columns)
        _count("dK,dV", q, rows, columns)
    return dq, dk, dv


class _BlockAttention(torch.autograd.Function):
    """One block, its gradient by hand; keeps q, k, v, the output and one number per row, never the weights."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, window, tile):
        out, lse = block_forward(None, q, k, v, queries, keys, window, tile)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = queries, keys, window, tile
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        delta = (grad * out).sum(-1, keepdim=True)
        return *block_backward(grad, delta, lse, q, k, v, *ctx.rest), None, None, None, None


def block_attention(q, k, v, queries, keys, window=None, tile=None):
    """Causal attention of q (B, H, R, D) at `queries` over k, v (B, H, S, D) at `keys`, both ascending positions."""
    return _BlockAttention.apply(q, k, v, list(queries), list(keys), window, tile)
