"""Generation through a pipeline with several streams of rows, so that no rank waits for the token of a single one.

With one stream a token passes D stages one after the other and every rank is idle (D - 1) / D of the time; with N
streams at once the idle share of a round of N tokens is (D - 1) / (D - 1 + N), and zero once N >= D.
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
    rank, then B C a token; the last rank sends the tokens, 8 B bytes, back.
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
        return _Round(engine, flows, len(prompts), Sampling(**sampling), gather).run(prompts, new, stop)


class _Round:
    """Round after round, every stream passes all stages once and gets one token.

    All ranks go through (round, stream, stage) in one order, and each of these waits for an earlier one only.
    """

    def __init__(self, engine, flows, rows, choose, gather):
        self.model, self.axis, self.layers = engine.model, engine.axis, engine.parts.layers
        self.flows, self.rows, self.choose, self.gather, self.leaving = flows, rows, choose, gather, []
        self.ranks = engine.schedule.placement[: engine.schedule.depth]  # of each stage, the first copy's
        self.first, self.last = self.ranks[0], self.ranks[-1]
        self.number = next(self.model.parameters()).detach().new_zeros(())

    def run(self, prompts, new, stop):
        drawn = self.number.new_zeros(self.rows, new, dtype=torch.long)  # (rows, new)
        for n in range(new):
            for number, flow in enumerate(self.flows):
                if n:
                    flow.extend(flow.coming.wait() if flow.coming else drawn[flow.rows, n - 1])
                x = None
                for stage in [s for s, rank in enumerate(self.ranks) if rank == self.axis.rank]:
                    with trace.span(f"F{number}", kind="forward"):
                        x = self._stage(flow, stage, x)
                    self._pass_on(x, stage)
                if self.axis.rank == self.last:
                    drawn[flow.rows, n] = self._draw(x, flow, drawn)
                self._return(flow, drawn[flow.rows, n])
        for handle in [*self.leaving, *(flow.coming for flow in self.flows if flow.coming)]:
            handle.wait()
        drawn = comm.broadcast(drawn, self.axis, self.last)
        return [list(p) + _until(row, stop) for p, row in zip(prompts, drawn.tolist(), strict=True)]

    def _return(self, flow, tokens):
        """Send the chosen tokens to the first stage; ranks in between need only their number."""
        if self.axis.rank == self.last != self.first:
            self._send(tokens, self.first)
        elif self.axis.rank == self.first != self.last:
            flow.coming = comm.irecv(tokens, self.axis, self.last)

    def _stage(self, flow, stage, x):
        """A stage's output (B, T, C); x is that of this rank's stage before it, if there was one."""
        model, before = self.model, self.ranks[stage - 1] if stage else None
        if stage == 0:
            x = model.embed(flow.tokens, flow.positions)
        elif before != self.axis.rank:
            rows, columns = flow.tokens.shape
            like = self.number.expand(rows, model.tokens_here(columns), model.config.n_embd)
            x = comm.irecv(like, self.axis, before).wait()
        for layer in self.layers[stage]:
            x = model.run_block(model.h[str(layer)], x, flow.positions, None, flow.cache)
        return x

    def _pass_on(self, x, stage):
        """Send a stage's output to the rank of the next one, where that is another."""
        if stage + 1 < len(self.ranks) and self.ranks[stage + 1] != self.axis.rank:
            self._send(x, self.ranks[stage + 1])

    def _draw(self, x, flow, drawn):
        """The next token of each row: random numbers go by the row's number in the whole batch."""
        logits = self.model.head(x, flow.pick)[:, -1]  # (B, V), or a part of the vocabulary
        logits = logits if self.gather is None else self.gather(logits)
        whole, lengths = logits.new_zeros(self.rows, logits.size(-1)), [0] * self.rows
        whole[flow.rows] = logits
        for row, length in zip(flow.rows, flow.lengths, strict=True):
            lengths[row] = length
        return torch.tensor(self.choose.draw(whole, lengths), device=x.device)[flow.rows]

    def _send(self, x, to):
        self.leaving.append(comm.isend(x, self.axis, to))


def _until(row: list[int], stop: int | None) -> list[int]:
    return row[: row.index(stop)] if stop in row else row
