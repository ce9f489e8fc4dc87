"""Cutting the model into pipeline stages: layers balanced by cost, other ranks' parts removed, shared weights tied."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from torch import nn

from ...machine.arguments import checked
from ...model import GPT2, GPT2Config
from .. import spec

MOST_STAGES = 4096


def costs(config: GPT2Config, length: int) -> tuple[float, float, float]:
    """Forward operations per token of the embedding, of one block and of the head with its loss.

    Two for every weight of a matrix, 24 C^2 per block, and 4 T C for attention's two products; 2 C V for the head.
    """
    c = config.n_embd
    return 2.0 * c, 24.0 * c * c + 4.0 * length * c, 2.0 * c * config.vocab_size


@checked(stages=(1, MOST_STAGES))
@lru_cache(maxsize=1024)
def cut_layers(config: GPT2Config, stages: int) -> tuple[range, ...]:
    """The blocks of each stage, in order, so that the slowest stage is as fast as can be.

    The embedding counts for the first stage, the head for the last. Among equally fast cuts the evenest is
    taken (least sum of squares). With more stages than blocks some stages hold none and pass their input on.
    """
    embed, block, head = costs(config, config.n_positions)
    ends = [embed * (stage == 0) + head * (stage == stages - 1) for stage in range(stages)]
    counts = [0] * stages
    for _ in range(config.n_layer):  # one block more for the fastest stage, of equals the last
        counts[min(range(stages), key=lambda s: (ends[s] + counts[s] * block, -s))] += 1
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


def homes_of(config: GPT2Config, stages: int) -> dict[str, int]:
    """Which stage owns which parameter: blocks as the pipeline cuts them, the embedding first, the norm last."""
    layers = cut_layers(config, stages)
    stage_of = {f"h.{i}": s for s, blocks in enumerate(layers) for i in blocks}
    last = {"ln_f": stages - 1}
    names = [name for name, _ in GPT2(config).named_parameters()]
    return {n: (stage_of | last).get(".".join(n.split(".")[: 1 + n.startswith("h.")]), 0) for n in names}


@dataclass(frozen=True)
class Parts:
    """Which blocks belong to each position of the pipeline, and which positions one rank holds."""

    layers: tuple[range, ...]
    mine: tuple[int, ...]

    @property
    def first(self) -> bool:
        """Whether this rank holds the embedding."""
        return 0 in self.mine

    @property
    def last(self) -> bool:
        """Whether this rank holds the head."""
        return len(self.layers) - 1 in self.mine

    @cached_property
    def blocks(self) -> list[int]:
        """All blocks on this rank."""
        return sorted(i for position in set(self.mine) for i in self.layers[position])


def parts_of(schedule, rank: int, config: GPT2Config) -> Parts:
    """The parts that a schedule gives to a rank."""
    mine = tuple(map(schedule.position, schedule.stages_of(rank)))
    return Parts(cut_layers(config, schedule.depth), mine)


def keep_parts(model, parts: Parts) -> None:
    """Remove from the model what other ranks hold; blocks keep their names."""
    model.h = nn.ModuleDict({str(i): model.h[str(i)] for i in parts.blocks})
    if not parts.first:
        model.wpe = None
    if not parts.last:
        model.ln_f = None
    if not parts.first and not parts.last:
        model.wte = None


def sharers(schedule) -> list[tuple[int, ...]]:
    """Ranks of a pipeline that hold the same parameters: copies of a stage, or both ends of the tied embedding."""
    if schedule.copies == 2:
        return [(rank, schedule.ranks - 1 - rank) for rank in range(schedule.ranks // 2)]
    first, last = schedule.ranks_of(0), schedule.ranks_of(schedule.depth - 1)
    return [] if first == last else [(*first, *last)]


def mark_ties(model, schedule, rank: int) -> set[str]:
    """Names of the parameters here that another rank holds too; the second holder's are marked as copies."""
    mine = next((line for line in sharers(schedule) if rank in line), ())
    second = mine[1:] if schedule.copies == 2 else mine[len(schedule.ranks_of(0)) :]
    every = {name for name, _ in model.named_parameters()} if schedule.copies == 2 else {"wte.weight"}
    shared = every if mine else set()
    for name, p in model.named_parameters():
        if rank in second and name in shared:
            spec.mark(p, tied_copy=True)
    return shared
