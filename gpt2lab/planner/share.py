"""What a plan gives one rank: its layers, parameters, rows and tokens. Plain Python, no process."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..model import GPT2Config
from ..parallel.context.layouts import TokenLayout, layout
from ..parallel.pipeline.engine import schedule_of
from ..parallel.pipeline.stages import Parts, parts_of
from ..parallel.zero.costs import shard_length
from ..parallel.zero.flat import part_of
from ..plan import Plan
from ..ranks.traffic import split_sizes
from ..schedules import Schedule
from .models import Parameter, Transformer, units
from .tensor_costs import Shape

EXPERT = 2  # what the key of a part of the experts has besides


def frame(plan: Plan) -> Schedule:
    """The plan's schedule for a single micro-batch: which rank holds which stage does not depend on their number."""
    return order_of(plan, 1)


def order_of(plan: Plan, micro: int) -> Schedule:
    """The plan's schedule for so many micro-batches; a single stage takes one after the other."""
    return _schedule(plan.pp, plan.schedule if plan.pp > 1 else "1f1b", plan.chunks, micro)


@lru_cache(maxsize=4096)
def _schedule(pp: int, name: str, chunks: int, micro: int) -> Schedule:
    return schedule_of(Plan(pp=pp, schedule=name, chunks=chunks, micro=micro))


def check(plan: Plan, config: GPT2Config, rows: int, length: int) -> None:
    """`Plan.check`, quickly: where rows suffice, two micro-batches are refused for the same reasons as thousands."""
    if rows >= plan.dp * plan.micro and plan.micro > 2 and not plan.asynchronous:
        plan = replace(plan, micro=2)
    plan.check(config, rows, length)
    if isinstance(config, Transformer):
        config.check_cut(plan)


def rank_parts(plan: Plan, config: GPT2Config, rank: int) -> Parts:
    """The layers of each position of the plan's pipeline, and the positions of one rank of it."""
    return _parts(plan.pp, plan.schedule if plan.pp > 1 else "1f1b", plan.chunks, config, rank)


@lru_cache(maxsize=1024)
def _parts(pp: int, schedule: str, chunks: int, config: GPT2Config, rank: int) -> Parts:
    return parts_of(_schedule(pp, schedule, chunks, 1), rank, config)


@dataclass(frozen=True)
class RankShare:
    """The part of one rank, at (pp, dp, cp, tp) of the mesh, in a step of `rows` sequences of `length` tokens.

    `itemsize` and `mixed` are those of `problem.PRECISIONS`.
    """

    plan: Plan
    config: GPT2Config
    rows: int
    length: int
    itemsize: int = 4
    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0
    mixed: int = 0

    @property
    def place(self) -> int:
        """Position on the joined axis of data and context, which shares gradients."""
        return self.dp * self.plan.cp + self.cp

    @property
    def number(self) -> int:
        """The global rank."""
        plan = self.plan
        return ((self.pp * plan.dp + self.dp) * plan.cp + self.cp) * plan.tp + self.tp

    @property
    def master(self) -> int:
        """Bytes of what the optimizer steps: with ZeRO or in mixed precision 4 or more, whatever the weights have."""
        return max(4, self.itemsize) if self.plan.zero or self.mixed else self.itemsize

    @property
    def gradient(self) -> int:
        """Bytes of a gradient that is kept and summed."""
        return self.mixed or self.itemsize

    @cached_property
    def net(self) -> Transformer:
        """The model's sizes."""
        return units(self.config)

    @cached_property
    def parts(self) -> Parts:
        """Layers by position, and this rank's positions."""
        return rank_parts(self.plan, self.config, self.pp)

    @cached_property
    def depth(self) -> int:
        """Positions of the pipeline."""
        return len(self.parts.layers)

    @cached_property
    def table(self) -> TokenLayout | None:
        """Which token is on which context rank."""
        plan = self.plan
        return layout(plan.layout, self.length, plan.cp) if plan.cp > 1 else None

    @property
    def tokens(self) -> int:
        """How many tokens of a sequence this rank computes, before tensor and sequence parallelism."""
        return self.table.sizes[self.cp] if self.table else self.length

    @cached_property
    def micro_rows(self) -> list[int]:
        """Rows of each micro-batch."""
        mine = split_sizes(self.rows, self.plan.dp)[self.dp]
        return split_sizes(mine, self.plan.micro)

    @cached_property
    def slices(self) -> list[int]:
        """Tokens of each slice of a sequence: TeraPipe cuts it."""
        return split_sizes(self.tokens, frame(self.plan).slices)

    def micros(self, stage: int) -> list[int]:
        """Rows of the micro-batches that pass a stage: with two copies of the model every other one."""
        there = frame(self.plan)
        return self.micro_rows[stage // there.depth :: there.copies]

    @cached_property
    def stages(self) -> dict[int, int]:
        """The stages of this rank and their positions."""
        return dict(zip(frame(self.plan).stages_of(self.pp), self.parts.mine, strict=True))

    def parts_at(self, position: int) -> set[str]:
        """The parts of the weights to which a backward of a position gives gradients."""
        blocks = {f"h.{layer}" for layer in self.parts.layers[position]}
        ends = {0: {"wte", "wpe"}}, {self.depth - 1: {"ln_f", self.net.head}}
        return blocks.union(*(end.get(position, ()) for end in ends))

    def units(self, stage: int) -> Counter:
        """How many units of (rows, tokens) pass a stage in a step."""
        return Counter((rows, tokens) for rows in self.micros(stage) for tokens in self.slices)

    def shape(self, rows: int, tokens: int) -> Shape:
        """The sizes of one unit as tensor parallelism sees them."""
        return Shape(rows, tokens, self.config.n_embd, self.config.n_head, self.plan.tp, self.itemsize)

    @cached_property
    def again(self) -> tuple[int, int]:
        """How often a forward runs again before its backward: that of blocks, that of embedding and head."""
        zero3, once = self.plan.zero == 3 and not self.plan.refill, self.plan.recompute
        return (once + zero3, int(once)) if self.plan.pp > 1 else (int(once or zero3), 0)

    @cached_property
    def _key(self) -> tuple:
        """What decides which parameters are here."""
        here, plan = self.parts, self.plan
        return self.config, here.first, here.last, tuple(here.blocks), plan.tp, self.tp, plan.sp, plan.ep

    @property
    def groups(self) -> dict[tuple[str, bool], tuple[Parameter, ...]]:
        """The parts that ZeRO shards, as `zero.flat.into_groups` forms them: (part, cut by tensor parallelism)."""
        return _groups(*self._key)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters here, in the model's order."""
        return _parameters(*self._key)

    @cached_property
    def sizes(self) -> dict[tuple[str, bool], int]:
        """Elements of each of these parts."""
        return {part: sum(p.elements for p in group) for part, group in self.groups.items()}

    @cached_property
    def shards(self) -> dict[tuple[str, bool], int]:
        """Elements of this rank's shard of each part."""
        return {part: shard_length(size, self.sharers(part)) for part, size in self.sizes.items()}

    @property
    def mixtures(self) -> list[int]:
        """The layers here that have experts."""
        return [layer for layer in self.parts.blocks if has_experts(self.config, layer)]

    def sharers(self, part: tuple[str, int]) -> int:
        """How many ranks share out a part: experts have fewer replicas."""
        return self.replicas(part[1] >= EXPERT)[1]

    def replicas(self, experts: bool) -> tuple[str, int, int]:
        """The axis over which gradients are summed, of experts or of all else, its ranks, and this rank's place.

        Of dp ranks only dp / ep hold the same experts: Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.
        """
        if experts:
            return "edp+cp", self.sharing[0] // self.plan.ep, self.sharing[1] // self.plan.ep
        return "dp+cp", *self.sharing

    @cached_property
    def sharing(self) -> tuple[int, int]:
        """How many ranks share out what ZeRO shards, and this rank's place among them."""
        ranks = self.plan.shard or self.plan.dp * self.plan.cp
        return ranks, self.place % ranks


def has_experts(config: GPT2Config, layer: int) -> bool:
    """Whether a layer has experts."""
    return config.experts is not None and config.experts.at(layer)


def why_no_price(plan: Plan, config: GPT2Config) -> str:
    """Why no formula says what a step of the plan sends and takes; empty where one does."""
    experts = config.experts
    if plan.asynchronous:
        return (
            f"schedule={plan.schedule} has no step that all stages make together, so no step's cost. "
            "Use a schedule with a flush, such as 1f1b."
        )
    if experts and plan.pp * plan.cp * plan.tp * plan.node > 1:
        return f"Experts are priced beside dp, zero, micro and recompute alone, not in {plan}."
    if experts and plan.ep == 1:
        return f"{plan} has all experts on every rank. Use ep=2 or more."
    if experts and (experts.gated or experts.shared or experts.hidden or experts.router == "deepseek"):
        return "Experts are priced where each is GPT-2's MLP, without a shared one or a load bias."
    return ""


def check_price(plan: Plan, config: GPT2Config) -> None:
    """Raise ValueError where `why_no_price` has a reason."""
    if why := why_no_price(plan, config):
        raise ValueError(why)


@lru_cache(maxsize=1024)
def _parameters(
    config, first: bool, last: bool, blocks: tuple, n: int, rank: int, sp: bool, ep: int
) -> tuple[Parameter, ...]:
    """The parameters of some blocks and ends, of which this is rank `rank` of n tensor-parallel ones.

    `ep` ranks share out the experts.
    """
    net, c, cut = units(config), config.n_embd, n > 1
    hidden, biased, many = split_sizes(net.mlp, n)[rank], 1 + net.bias, net.mlps
    both = lambda name, weight, bias: [(f"{name}.weight", *weight), (f"{name}.bias", *bias)][:biased]
    norm = lambda name: both(name, (c, False, sp), (c, False, sp))
    column = lambda name, width: both(name, (width * c, cut), (width, cut))
    row = lambda name, width, bias: both(name, (width * c, cut), (bias, False, sp))
    attention = column("attn.c_attn", (c + 2 * net.keys) // n) + row("attn.c_proj", c // n, c)
    block = norm("ln_1") + attention + norm("ln_2")
    dense = [("mlp.router.weight", many * c)] * (many > 1)
    dense += column("mlp.c_fc", many * (1 + net.gated) * hidden) + row("mlp.c_proj", many * hidden, many * c)
    mlps = lambda layer: _mixture(config, ep) if has_experts(config, layer) else dense
    words = split_sizes(config.vocab_size, n)[rank] * c
    found = [Parameter("wte.weight", words, cut)] * (first or (last and net.tied))
    found += [Parameter("wpe.weight", config.n_positions * c, partial=sp)] * (first and net.learned)
    for layer in blocks:
        found += [Parameter(f"h.{layer}.{name}", *rest) for name, *rest in block + mlps(layer)]
    found += [Parameter(*one) for one in norm("ln_f") * last]
    return tuple(found + [Parameter("lm_head.weight", words, cut)] * (last and not net.tied))


def _mixture(config: GPT2Config, ep: int) -> list[tuple]:
    """The router and the experts that are here, each GPT-2's MLP, of a layer."""
    c, count = config.n_embd, config.experts.experts
    parts = ("c_fc.weight", 4 * c * c), ("c_proj.weight", 4 * c * c), ("c_fc.bias", 4 * c), ("c_proj.bias", c)
    expert = [(name, n, False, False, ep > 1) for name, n in parts]
    here = [(f"mlp.experts.{e}.{name}", *rest) for e in range(count // ep) for name, *rest in expert]
    return [("mlp.router.weight", count * c), *here]


@lru_cache(maxsize=1024)
def _groups(*key) -> dict[tuple[str, bool], tuple[Parameter, ...]]:
    """The groups of parameters of a `RankShare._key`."""
    found: dict[tuple[str, bool], tuple[Parameter, ...]] = {}
    for p in _parameters(*key):
        key = part_of(p.name), p.cut + EXPERT * p.expert
        found[key] = *found.get(key, ()), p
    return found
