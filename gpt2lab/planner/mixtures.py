"""What a step of a mixture of experts costs and sends: a dense step, tokens to their experts, and fewer replicas.

A token asks for k experts and each expert gets equally many tokens, as expert choice routes; other routers send as
much where they are balanced. Of the dp ranks only dp / ep hold the same experts, and sum their gradients; all else is
summed over dp. The tests compare every byte and message with the log of live ranks.

Lepikhin et al. 2020, "GShard", section 3; Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import chain

from ..parallel.expert import bytes_sent
from ..ranks.traffic import split_sizes
from .cost import Prediction, predict_share
from .memory import of_rank
from .models import Parameter
from .problem import Cluster
from .seconds import UPDATE, RankOnCluster
from .sends import AxisTraffic, by_axis, gradient_sends
from .sends import sends as dense_sends
from .share import EXPERT, MemoryShare, RankShare, check, groups_of


class SharedPart(RankShare):
    """A rank's share of all but the experts: the dense model with a router in place of each MLP that has experts.

    Raises ValueError for another mesh than dp and ep, and for experts that are not GPT-2's MLP.
    """

    kind = 0  # of its groups of parameters

    def __post_init__(self):
        plan, experts = self.plan, self.config.experts
        if plan.pp * plan.cp * plan.tp * plan.node > 1:
            raise ValueError(f"Experts are priced beside dp, zero, micro and recompute alone, not in {plan}.")
        if plan.ep == 1:
            raise ValueError(f"{plan} has all experts on every rank. Use ep=2 or more.")
        if experts.gated or experts.shared or experts.hidden or experts.router == "deepseek":
            raise ValueError(
                "Experts are priced where each is GPT-2's MLP, without a shared one or a load bias."
            )

    @cached_property
    def groups(self) -> dict[tuple[str, bool], tuple[Parameter, ...]]:
        """The parts of the model that ZeRO shards; no axis cuts one."""
        everything = groups_of(*self.groups_key, self.plan.ep)
        return {(part, False): group for (part, kind), group in everything.items() if kind == self.kind}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of this part, in the model's order."""
        return tuple(chain.from_iterable(self.groups.values()))

    @cached_property
    def sizes(self) -> dict[tuple[str, bool], int]:
        """Elements of each of these parts."""
        return {key: sum(p.elements for p in group) for key, group in self.groups.items()}


class ExpertPart(SharedPart):
    """A rank's experts; its plan has the replicas of the experts as dp."""

    kind = EXPERT


class MixtureOnCluster(RankOnCluster):
    """A cluster as ranks see it whose neighbours share out the experts."""

    @cached_property
    def rings(self) -> dict[str, tuple[int, int]]:
        """(ranks, distance of neighbours) of every axis of the mesh."""
        plan = self.share.plan
        return super().rings | {"ep": (plan.ep, 1), "edp+cp": (plan.dp // plan.ep, plan.ep)}


def experts_of(share: SharedPart) -> ExpertPart:
    """The experts of the rank that has this share of all else."""
    plan = replace(share.plan, dp=share.plan.dp // share.plan.ep)
    return ExpertPart(
        plan, share.config, share.rows, share.length, share.itemsize, dp=share.dp // share.plan.ep
    )


def expert_sums(share: SharedPart) -> list[AxisTraffic]:
    """What sums the gradients of this rank's experts, and brings their new weights."""
    return [replace(s, axis="edp+cp") for s in gradient_sends(experts_of(share))]


def exchanges(share: SharedPart) -> list[AxisTraffic]:
    """Tokens to their experts and back, and their gradients, in every layer with experts and micro-batch."""
    plan, experts, n = share.plan, share.config.experts, share.plan.ep
    if n == 1:
        return []
    first, found = share.dp - share.dp % n, []
    of_row = (
        experts.experts
        // n
        * replace(experts, router="expert_choice", top_k=experts.top_k).room(share.length)
    )
    mine = [split_sizes(split_sizes(share.rows, plan.dp)[first + i], plan.micro) for i in range(n)]
    mixtures = sum(experts.at(layer) for layer in range(share.config.n_layer))
    for micro, count in Counter(zip(*mine, strict=True)).items():
        rows = [[r * of_row] * n for r in micro]
        sent = bytes_sent(rows, share.config.n_embd, experts.experts, share.itemsize, 1 + share.again[0])
        found.append(AxisTraffic("ep", "all_to_all", *sent[share.dp - first]).times(count * mixtures))
    return found


def sends(
    plan, config, rows: int, length: int, itemsize: int = 4, rank: int = 0
) -> dict[str, tuple[int, int]]:
    """(bytes, messages) by axis that a rank sends in a step."""
    share = SharedPart(plan, config, rows, length, itemsize, dp=rank)
    return by_axis([*dense_sends(share), *expert_sums(share), *exchanges(share)])


def predict_mixture(plan, config, rows: int, length: int, cluster: Cluster, itemsize: int = 4) -> Prediction:
    """What a step costs on a cluster, as `cost.predict`; sums of experts' gradients hide behind nothing."""
    check(plan, config, rows, length)
    share = SharedPart(plan, config, rows, length, itemsize)
    dense, machine, held = (
        predict_share(share, cluster, MixtureOnCluster),
        MixtureOnCluster(cluster, share),
        experts_of(share),
    )
    experts, tokens = config.experts, -(-rows // plan.dp) * length
    mixtures = sum(experts.at(layer) for layer in range(config.n_layer))
    passes, c = 3 + share.again[0], config.n_embd
    here = experts.experts // plan.ep
    more = Counter(dense.parts) + machine.travel(exchanges(share)) + machine.travel(expert_sums(share))
    # products of the second to k-th expert of a token; three operators an expert; rows gathered and combined
    more["compute"] += mixtures * machine.work(
        passes * 16 * c * c * tokens * (experts.top_k - 1),
        passes * 4 * itemsize * c * tokens * experts.top_k,
        passes * 3 * plan.micro * (here - 1),
    )
    elements = sum(p.elements for p in held.parameters)
    mine = elements / held.sharing[0] if plan.zero else elements
    more["update"] += machine.work(0, UPDATE * share.master * mine, len(held.parameters))
    seconds = sum(more.values())
    sent = dense.sent | {
        a: size for a, (size, _) in by_axis([*expert_sums(share), *exchanges(share)]).items()
    }
    return replace(
        dense,
        seconds=seconds,
        parts=dict(more),
        sent=sent,
        held=(of_rank(MemoryShare(plan, config, rows, length, itemsize)),),
        mfu=dense.mfu * dense.seconds / seconds,
        hfu=dense.hfu * dense.seconds / seconds,
    )
