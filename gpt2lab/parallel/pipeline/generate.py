"""Generation through a pipeline: several streams of rows follow each other, so that no rank waits for one
stream's token.

With one stream a token passes D stages one after the other and every rank is idle (D - 1) / D of the time;
with N streams under way the idle share of a round of N tokens is (D - 1) / (D - 1 + N), and zero once N >= D.
"""

from collections.abc import Sequence

import torch

from ...generate import END_OF_TEXT, KVCache, Sampling
from ...model import picked
from ...ranks import comm, trace


class Stream:
    """Some rows of the batch on their way: their prompts, and the keys and values that this rank has seen."""

    def __init__(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], new: int, device: torch.device):
        self.rows, self.lengths, self.device = list(rows), [len(prompts[r]) for r in rows], device
        self.cache = KVCache(max(self.lengths) + new)
        longest = max(self.lengths)
        padded = [list(prompts[r]) + [0] * (longest - len(prompts[r])) for r in rows]
        self.tokens = torch.tensor(padded, device=device)
        self.positions = torch.arange(longest, device=device)
        self.pick = torch.tensor(self.lengths, device=device) - 1

    def extend(self, tokens: torch.Tensor) -> None:
        """Go on to the next token (B,) of every row."""
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
    **sampling,
) -> list[list[int]]:
    """What `generate.generate` gives, by all ranks of a pipeline together, the rows in `streams` groups.

    Raises ValueError for a schedule with several stages a rank, or with more streams than rows. Bytes per
    rank: B T C numbers for the prompts, then B C a token; the last rank sends the tokens, 8 B bytes, back.
    """
    if len(engine.schedule.placement) != engine.axis.size:
        raise ValueError(
            f"generation wants one stage a rank, but {engine.schedule.name} has {len(engine.parts.mine)}. "
            "Use schedule=1f1b."
        )
    if not 1 <= streams <= len(prompts):
        raise ValueError(f"{len(prompts)} prompts make no {streams} streams. Use 1 to {len(prompts)}.")
    groups = torch.arange(len(prompts)).tensor_split(streams)
    device = next(engine.model.parameters()).device
    flows = [Stream(rows.tolist(), prompts, new, device) for rows in groups]
    return _Round(engine, flows, len(prompts), Sampling(**sampling)).run(prompts, new, stop)


class _Round:
    """Round after round, every stream passes this rank's stage once and gets one token."""

    def __init__(self, engine, flows, rows, choose):
        self.model, self.axis, self.parts = engine.model, engine.axis, engine.parts
        self.flows, self.rows, self.choose, self.leaving = flows, rows, choose, []
        self.number = next(self.model.parameters()).detach().new_zeros(())

    def run(self, prompts, new, stop):
        drawn = self.number.new_zeros(self.rows, new, dtype=torch.long)  # (rows, new)
        for n in range(new):
            for number, flow in enumerate(self.flows):
                if n:
                    flow.extend(self._tokens(flow, drawn[flow.rows, n - 1]))
                with trace.span(f"F{number}", kind="forward"):
                    x = self._stage(flow)
                if self.parts.last:
                    drawn[flow.rows, n] = self._draw(x, flow, drawn)
                    self._send(drawn[flow.rows, n], 0)
                else:
                    self._send(x, self.axis.rank + 1)
        if self.parts.first:
            for flow in self.flows:
                self._receive(drawn[flow.rows, 0], self.axis.size - 1)  # the last token of each, for nobody
        for handle in self.leaving:
            handle.wait()
        drawn = comm.broadcast(drawn, self.axis, self.axis.size - 1)
        return [list(p) + _until(row, stop) for p, row in zip(prompts, drawn.tolist(), strict=True)]

    def _tokens(self, flow, own):
        """The tokens that the last rank chose; ranks in between need only their number."""
        return self._receive(own, self.axis.size - 1) if self.parts.first else own

    def _stage(self, flow):
        if self.parts.first:
            x = self.model.embed(flow.tokens, flow.positions)
        else:
            x = self._receive(
                self.number.expand(*flow.tokens.shape, self.model.config.n_embd), self.axis.rank - 1
            )
        for block in self.model.h.values():
            x = block(x, flow.positions, None, flow.cache)
        return x

    def _draw(self, x, flow, drawn):
        """The next token of each row: random numbers go by the row's number in the whole batch."""
        logits = self.model.head(picked(x, flow.pick))[:, -1]  # (B, V)
        whole, lengths = logits.new_zeros(self.rows, logits.size(-1)), [0] * self.rows
        whole[flow.rows] = logits
        for row, length in zip(flow.rows, flow.lengths, strict=True):
            lengths[row] = length
        return torch.tensor(self.choose.draw(whole, lengths), device=x.device)[flow.rows]

    def _send(self, x, to):
        self.leaving.append(comm.isend(x, self.axis, to))

    def _receive(self, like, source):
        return comm.irecv(like, self.axis, source).wait()


def _until(row: list[int], stop: int | None) -> list[int]:
    return row[: row.index(stop)] if stop in row else row
