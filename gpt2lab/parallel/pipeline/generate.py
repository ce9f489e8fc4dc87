"""Generation through a pipeline with several streams of rows, so that no rank waits for the token of a single one.

With one stream a token passes D stages one after the other and every rank is idle (D - 1) / D of the time. With N
streams the idle share of one round of N tokens is (D - 1) / (D - 1 + N); where rounds run into each other (D - N) / D,
and zero once N >= D.
"""

from collections.abc import Callable, Sequence

import torch

from ...generate import END_OF_TEXT, KVCache, Sampling, check_prompts, generating
from ...ranks import comm, trace


class RowGroup:
    """A stream: some rows of the batch, their prompts, and the keys and values that this rank has seen."""

    def __init__(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], new: int, device: torch.device):
        self.rows, self.lengths, self.device = list(rows), [len(prompts[r]) for r in rows], device
        self.cache = KVCache(max(self.lengths) + new)
        longest = max(self.lengths)
        padded = [list(prompts[r]) + [0] * (longest - len(prompts[r])) for r in rows]
        self.tokens = torch.tensor(padded, device=device)
        self.positions = torch.arange(longest, device=device)
        self.pick = torch.tensor(self.lengths, device=device) - 1
        self.coming = None  # the message with the chosen tokens to the first stage

    def extend(self, tokens: torch.Tensor) -> None:
        """Append the next token (B,) of every row."""
        self.tokens, self.pick = tokens[:, None], None
        self.positions = torch.tensor(self.lengths, device=self.device)[:, None]
        self.lengths = [n + 1 for n in self.lengths]


@torch.no_grad()
def generate_streams(
    engine,
    prompts: Sequence[Sequence[int]],
    new: int,
    streams: int,
    stop: int | None = END_OF_TEXT,
    gather: Callable | None = None,
    **sampling,
) -> list[list[int]]:
    """The texts of `generate.generate`, from all ranks of a pipeline together, the rows in `streams` groups.

    Where a rank holds several stages, a token comes to it several times; of a bidirectional schedule only the first
    copy of every stage is used. `gather` makes logits whole where a rank has only a part of the vocabulary. Raises
    ValueError for more streams than rows. Bytes per rank: B T C numbers for the prompts and each border to another
    rank, then B C a token; the last rank sends the tokens, 8 B bytes, back, and at the end all of them to every rank.
    """
    if not 1 <= streams <= len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts cannot be split into {streams} streams. Use 1 to {len(prompts)}."
        )
    check_prompts(engine.model.config, prompts, new)
    groups = torch.arange(len(prompts)).tensor_split(streams)
    device = next(engine.model.parameters()).device
    flows = [RowGroup(rows.tolist(), prompts, new, device) for rows in groups]
    with generating(engine.model):
        drawn = _drawn(engine, flows, len(prompts), new, Sampling(**sampling), gather).tolist()
    ended = [row[: row.index(stop)] if stop in row else row for row in drawn]
    return [[*prompt, *row] for prompt, row in zip(prompts, ended, strict=True)]


def _drawn(engine, flows: list[RowGroup], rows: int, new: int, choose: Sampling, gather) -> torch.Tensor:
    """The new tokens (rows, new): round after round, every stream passes all stages once and gets one token.

    All ranks go through (round, stream, stage) in one order, and each of these waits for an earlier one only.
    """
    model, axis, leaving = engine.model, engine.axis, []
    ranks = engine.schedule.placement[: engine.schedule.depth]  # of each stage, the first copy's
    first, last, mine = ranks[0], ranks[-1], [s for s, rank in enumerate(ranks) if rank == axis.rank]
    drawn = torch.zeros(rows, new, dtype=torch.long, device=flows[0].device)
    for n in range(new):
        for number, flow in enumerate(flows):
            if n:
                flow.extend(flow.coming.wait() if flow.coming else drawn[flow.rows, n - 1])
            x = None
            for stage in mine:
                with trace.span(f"F{number}", kind="forward"):
                    x = _through(engine, flow, stage, ranks, x)
                if stage + 1 < len(ranks) and ranks[stage + 1] != axis.rank:
                    leaving.append(comm.isend(x, axis, ranks[stage + 1]))
            if axis.rank == last:
                logits = model.head(x, flow.pick)[:, -1]  # (B, V), or a part of the vocabulary
                logits = logits if gather is None else gather(logits)
                drawn[flow.rows, n] = drawn.new_tensor(choose.draw(logits, flow.lengths, flow.rows))
            # the first stage needs the chosen tokens, ranks in between only their number
            if axis.rank == last != first:
                leaving.append(comm.isend(drawn[flow.rows, n], axis, first))
            elif axis.rank == first != last:
                flow.coming = comm.irecv(drawn[flow.rows, n], axis, last)
    for handle in [*leaving, *(flow.coming for flow in flows if flow.coming)]:
        handle.wait()
    return comm.broadcast(drawn, axis, last)


def _through(engine, flow: RowGroup, stage: int, ranks: tuple[int, ...], x):
    """A stage's output (B, T, C); x is that of this rank's stage before it, if there was one."""
    model = engine.model
    if stage == 0:
        x = model.embed(flow.tokens, flow.positions)
    elif ranks[stage - 1] != engine.axis.rank:
        rows, columns = flow.tokens.shape
        like = next(model.parameters()).detach().new_zeros(())
        like = like.expand(rows, model.tokens_here(columns), model.config.n_embd)
        x = comm.irecv(like, engine.axis, ranks[stage - 1]).wait()
    for layer in engine.parts.layers[stage]:
        x = model.run_block(model.h[str(layer)], x, flow.positions, None, flow.cache)
    return x
