"""Attention in blocks: each block gives an output and a log-sum-exp, and blocks merge without a second look.

Forward and backward by hand, as every exchange of context splitting needs them. Queries and keys come with their true
positions, ascending; masked pairs are skipped where possible, and the pairs that are computed are counted.
Of 16-bit queries and keys the scores, weights and log-sum-exps are float32, as in torch's own kernel.
Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022, FlashAttention, section 3 and appendix B.
"""

import bisect
from collections import Counter

import torch

from ...model import summable
from ...ranks import trace
from .tiles import pieces, strips, tiles

# torch's own kernel, under the name that returns the log-sum-exp as well
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

TILE = 128  # queries at a time where torch's kernel cannot help: more are fewer calls, fewer skip more of the mask

work = Counter()  # (query, key) pairs computed by this process, times batch and heads, per kernel


def merge_blocks(out, lse, part, part_lse):
    """Join two blocks of keys: outputs (B, H, R, D) and log-sum-exps (B, H, R, 1) over disjoint keys, out of place.

    With a = sigmoid(part_lse - lse), out becomes (1 - a) out + a part and lse becomes log(exp lse + exp part_lse).
    """
    share = torch.sigmoid(part_lse - lse)
    return out - share * (out - part), torch.logaddexp(lse, part_lse)


def _parts(q, queries, keys, window, tile):
    """The parts to compute, and whether torch's kernel computes them: no mask but a triangle, no window, on the CPU."""
    queries, keys = tuple(queries), tuple(keys)
    found = pieces(queries, keys) if tile is None and window is None and q.device.type == "cpu" else None
    return (strips(queries, keys, window, tile or TILE), False) if found is None else (found, True)


def _scores(q, k, queries, keys, window, masked):
    """Scaled scores (B, H, R, S) of one strip, of 32 bits or more, -inf where a query does not see a key."""
    scores = summable(q @ k.mT) * q.size(-1) ** -0.5
    if masked:
        queries, keys = (torch.tensor(at).to(scores.device) for at in (queries, keys))
        behind = queries[:, None] - keys
        hidden = behind < 0 if window is None else (behind < 0) | (behind > window)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _count(kernel: str, q, k, triangle: bool = False):
    """Count the pairs of q (B, H, R, D) with k (B, H, S, D); in a triangle row i has i + 1 of them, at most S."""
    rows, columns, corner = q.size(-2), k.size(-2), min(q.size(-2), k.size(-2))
    pairs = corner * (corner + 1) // 2 + (rows - corner) * columns if triangle else rows * columns
    work[kernel] += q.size(0) * q.size(1) * pairs


@trace.span("attention", kind="forward")
def block_forward(state, q, k, v, queries, keys, window=None, tile=None):
    """Attend from q (B, H, R, D) to one block of keys and values (B, H, S, D); merge into state, and return it.

    `state` is None before the first block, which must show every query at least one key (its own block does). With a
    `tile` everything is done by hand, that many queries at a time; without, torch's kernel does what it can.
    """
    new = torch.zeros_like(q), summable(q.new_full((*q.shape[:-1], 1), -torch.inf))
    out, lse = (t.clone() for t in state) if state else new
    empty = None if state else 0  # the first row that holds nothing yet; parts come row after row
    parts, flash = _parts(q, queries, keys, window, tile)
    for rows, columns, masked in parts:
        here = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        if flash:
            part, part_lse = FLASH(*here, 0.0, masked)
            part_lse = part_lse.unsqueeze(-1)
        else:
            part, part_lse = _by_hand(*here, queries[rows], keys[columns], window, masked)
        if rows.start == empty:
            empty = rows.stop
        else:
            part, part_lse = merge_blocks(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out[:, :, rows], lse[:, :, rows] = part, part_lse
        _count("forward", *here[:2], flash and masked)
    return out, lse


def _by_hand(q, k, v, queries, keys, window, masked):
    """Output and log-sum-exp of one strip."""
    scores = _scores(q, k, queries, keys, window, masked)
    lse = scores.logsumexp(-1, keepdim=True)
    # a query that sees none of these keys has -inf; a finite stand-in makes its weights 0 instead of NaN
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    return weights.to(v.dtype) @ v, lse


@trace.span("dQ, dK, dV", kind="backward")
def block_backward(grad, out, lse, q, k, v, queries, keys, window=None, tile=None):
    """dQ, dK, dV that one block of keys contributes, in one pass over its pairs.

    `out` and `lse` are those of *all* blocks merged: they are all that softmax's backward needs from the others.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    parts, flash = _parts(q, queries, keys, window, tile)
    for rows, columns, masked in parts:
        of_rows = grad[:, :, rows], out[:, :, rows], lse[:, :, rows]
        here = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        if flash:
            found = FLASH_BACKWARD(of_rows[0], *here, of_rows[1], of_rows[2].squeeze(-1), 0.0, masked)
        else:
            weights, dscores = _score_gradients(*of_rows, *here, queries[rows], keys[columns], window, masked)
            found = dscores @ here[1], dscores.mT @ here[0], weights.mT @ of_rows[0]
        dq[:, :, rows] += found[0]
        dk[:, :, columns] += found[1]
        dv[:, :, columns] += found[2]
        _count("backward", *here[:2], flash and masked)
    return dq, dk, dv


def _score_gradients(grad, out, lse, q, k, v, queries, keys, window, masked):
    """Softmax weights (B, H, R, S) of one strip, and the gradient of its q k' products."""
    weights = (_scores(q, k, queries, keys, window, masked) - lse).exp()
    # (B, H, R, 1): what other keys add to softmax's backward
    delta = summable(grad * out).sum(-1, keepdim=True)
    dscores = weights * (summable(grad @ v.mT) - delta) * q.size(-1) ** -0.5
    return weights.to(q.dtype), dscores.to(q.dtype)


@trace.span("dK, dV by key", kind="backward")
def gradients_by_key(grad, out, lse, q, k, v, queries, keys, window=None, tile=None):
    """dK, dV of `keys`, complete, from all `queries` that see them: the loop turned round, as llm.c has it.

    The owner of a key does its work, one pair for each query from it on: T - t, the load triangle upside down.
    """
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for columns in tiles(keys, tile):
        first, last = keys[columns.start], keys[columns.stop - 1]
        end = len(queries) if window is None else bisect.bisect_right(queries, last + window)
        rows = slice(bisect.bisect_left(queries, first), end)
        of_rows = grad[:, :, rows], out[:, :, rows], lse[:, :, rows]
        here = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        weights, dscores = _score_gradients(*of_rows, *here, queries[rows], keys[columns], window, True)
        dk[:, :, columns], dv[:, :, columns] = dscores.mT @ here[0], weights.mT @ of_rows[0]
        _count("dK,dV by key", *here[:2])
    return dk, dv


class _BlockAttention(torch.autograd.Function):
    """One block with its gradient by hand; keeps q, k, v, the output and one number per row, never the weights."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, window, tile):
        out, lse = block_forward(None, q, k, v, queries, keys, window, tile)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = queries, keys, window, tile
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        return *block_backward(grad, out, lse, q, k, v, *ctx.rest), None, None, None, None


def block_attention(q, k, v, queries, keys, window=None, tile=None):
    """Causal attention of q (B, H, R, D) at `queries` over k, v (B, H, S, D) at `keys`, both ascending positions."""
    return _BlockAttention.apply(q, k, v, queries, keys, window, tile)
