"""From training to sampling: weights pass from the layout of one plan to that of another, on the ranks of both.

Reinforcement learning does this each step: a model that trains by one plan writes texts by another, with the new
weights. Parts are boxes of whole tensors, so neither layout knows the other, and nobody gathers a tensor.

Sheng et al. 2024, "HybridFlow" (veRL), arXiv:2409.19256; Hu et al. 2024, "OpenRLHF", arXiv:2405.11143.
"""

import math
from collections import defaultdict
from itertools import chain, product

import torch

from ...corpus.batches import IGNORED, Batch
from ...parallel.boxes import Box, fill
from ...plan import Parallel
from ...ranks import comm
from ...train import Trainer


def held(parallel: Parallel) -> dict[str, list[Box]]:
    """What this rank holds of each weight: boxes of its own memory."""
    pieces = [piece for piece in parallel.sync.pieces if piece.tensor.numel()]
    return {piece.name: parallel.entry_of(piece, piece.tensor).boxes for piece in pieces}


def moves(have: list[list[tuple]], want: list[list[tuple]]) -> list[tuple]:
    """(from rank, to rank, name, offsets, sizes) of all that is sent, by the (name, offsets, sizes) that ranks have.

    Each rank is sent what it lacks, once, by the one of those who hold it that has the least to send so far.
    """
    holders, load, found = defaultdict(lambda: defaultdict(list)), [0] * len(have), []
    for rank, boxes in enumerate(have):
        for name, *box in boxes:
            holders[name][tuple(box)].append(rank)
    for to, boxes in enumerate(want):
        for name, begin, length in boxes:
            for (first, size), ranks in holders[name].items():
                low = tuple(map(max, begin, first))
                ends = zip(low, begin, length, first, size, strict=True)
                sizes = tuple(min(b + n, f + m) - start for start, b, n, f, m in ends)
                if to not in ranks and min(sizes, default=1) > 0:
                    source = min(ranks, key=load.__getitem__)
                    load[source] += math.prod(sizes)
                    found.append((source, to, name, low, sizes))
    return found


class Handover:
    """Takes the weights of one model to another on the same ranks, in one all-to-all, as often as it is called.

    Who sends what is settled once, alike on all ranks.
    Bytes: together, the elements that a rank wants and does not hold, summed over the ranks; each sends its share.
    """

    def __init__(self, source: Parallel, target: Parallel):
        self.source, self.target, self.world = source, target, source.mesh.world
        listed = [
            [(n, b.offsets, b.sizes) for n, of in held(m).items() for b in of] for m in (source, target)
        ]
        kinds = [piece.tensor.dtype for piece in source.sync.pieces][:1]  # none on a stage without weights
        have, want, kinds = zip(*comm.gather_objects((*listed, kinds), self.world), strict=True)
        self.moves, self.dtype = moves(have, want), next(chain(*kinds))

    def __call__(self) -> None:
        mine, wanted, me = held(self.source), held(self.target), self.world.rank
        numbers = torch.empty(0, dtype=self.dtype)
        going, coming = ([[] for _ in self.world.ranks] for _ in range(2))
        for source, to, name, offsets, sizes in self.moves:
            if me in (source, to):
                part = name, Box(offsets, sizes, numbers.new_empty(sizes))
                (going[to] if me == source else coming[source]).append(part)
        for name, part in chain(*going):
            for box in mine[name]:
                fill(part, box)
        sent = [torch.cat([numbers, *(b.tensor.flatten() for _, b in parts)]) for parts in going]
        counts = [sum(box.tensor.numel() for _, box in parts) for parts in coming]
        came = comm.all_to_all(sent, self.world, [(count,) for count in counts])
        for flat, parts in zip(came, coming, strict=True):
            torch.nn.utils.vector_to_parameters(flat, [box.tensor for _, box in parts])
        for name, part in chain(*coming):
            mine.setdefault(name, []).append(part)
        for name, boxes in wanted.items():
            for box, source in product(boxes, mine[name]):
                fill(box, source)
        self.target.sync.updated()


def log_probabilities(trainer: Trainer, texts: list[list[int]]) -> list[float]:
    """The log-probability of each text, all of one length, after its first token; all ranks call this."""
    rows, found = torch.tensor(texts), []
    for row in range(len(rows)):
        targets = torch.full_like(rows[:, 1:], IGNORED)
        targets[row], total = rows[row, 1:], rows.size(1) - 1
        batch = Batch(rows[:, :-1], targets, torch.arange(total), torch.arange(len(rows)), total)
        found.append(-total * trainer.evaluate([batch]))
    return found
