"""What a step of a mixture of experts costs: a dense step, and besides what a dry run says that it sends and holds.

Each expert gets equally many tokens. Of the dp ranks only dp / ep hold the same experts, and sum their gradients; all
else is summed over dp.

Lepikhin et al. 2020, "GShard", section 3; Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cached_property
from itertools import product

from ..machine.speed import flops_per_token
from .cost import Prediction, exposed, predict_share
from .dry import dry_run
from .memory import Held
from .problem import Cluster
from .seconds import UPDATE, RankOnCluster
from .sends import AxisTraffic, by_axis
from .share import RankShare, check


class MixtureOnCluster(RankOnCluster):
    """A cluster as ranks see it whose neighbours share out the experts."""

    @cached_property
    def rings(self) -> dict[str, tuple[int, int]]:
        """(ranks, distance of neighbours) of every axis of the mesh."""
        plan = self.share.plan
        return super().rings | {"ep": (plan.ep, 1), "edp+cp": (plan.dp // plan.ep, plan.ep)}


def predict_mixture(plan, config, rows: int, length: int, cluster: Cluster, itemsize: int = 4) -> Prediction:
    """What a step costs on a cluster, as `cost.predict`; sums of experts' gradients hide behind nothing.

    Raises ValueError for another mesh than dp and ep, and for experts that are not GPT-2's MLP.
    """
    check(plan, config, rows, length)
    _check_experts(plan, config.experts)
    calls, held = _run_dry(plan, config, rows, length, itemsize)
    share = RankShare(plan, replace(config, experts=None), rows, length, itemsize)
    dense, machine = predict_share(share, cluster, MixtureOnCluster), MixtureOnCluster(cluster, share)
    parts = Counter({name: dense.parts[name] for name in ("compute", "recompute") if name in dense.parts})
    parts += machine.travel(calls)
    if sums := sum(one.calls for one in calls if one.axis == "dp+cp"):
        parts["dp+cp"] = exposed(machine, parts["dp+cp"], sums)
    experts, tokens, c = config.experts, -(-rows // plan.dp) * length, config.n_embd
    mixtures, here = sum(map(experts.at, range(config.n_layer))), experts.experts // plan.ep
    passes = 3 + share.again[0]
    # products of the second to k-th expert of a token; three operators an expert; rows gathered and combined
    parts["compute"] += mixtures * machine.work(
        passes * 16 * c * c * tokens * (experts.top_k - 1),
        passes * 4 * itemsize * c * tokens * experts.top_k,
        passes * 3 * plan.micro * (here - 1),
    )
    # a router, and experts of four parameters for an MLP of four
    operators = len(share.parameters) + mixtures * (4 * here - 3)
    parts["update"] = machine.work(0, UPDATE * held["optimizer"] / 2, operators)  # of two moments
    seconds = sum(parts.values())
    faster = dense.seconds / seconds * flops_per_token(config, length) / flops_per_token(share.config, length)
    return replace(
        dense,
        seconds=seconds,
        parts=dict(parts),
        sent={axis: size for axis, (size, _) in by_axis(calls).items()},
        held=(Held(0, **held),),
        flops=flops_per_token(config, length) * rows * length,
        mfu=dense.mfu * faster,
        hfu=dense.hfu * faster,
    )


def _run_dry(plan, config, rows: int, length: int, itemsize: int) -> tuple[list[AxisTraffic], Counter]:
    """What a dry run sends, and what is held by part; of many layers and micro-batches by runs of few of them.

    Two layers more, or a micro-batch as large as others, add what those before added. Buckets do not end at layers.
    """
    calls, held = Counter(), defaultdict(Counter)
    layers = _grown(config.n_layer, 2 * config.experts.every) if plan.zero else {config.n_layer: 1}
    micros = _grown(plan.micro) if rows % (plan.dp * plan.micro) == 0 else {plan.micro: 1}
    for (layer, a), (micro, b) in product(layers.items(), micros.items()):
        small = replace(plan, micro=micro), replace(config, n_layer=layer), rows * micro // plan.micro
        dry = dry_run(*small, length, itemsize)
        for call, count in Counter(dry.calls).items():
            calls[call] += a * b * count
        for moment, parts in dry.moments.items() if micro == max(micros) else ():
            for part, size in parts.items():
                held[moment][part] += a * size
    sent = [AxisTraffic(axis, op, *one).times(count) for (op, axis, *one), count in calls.items()]
    return sent, max(held.values(), key=Counter.total)


def _grown(count: int, step: int = 1) -> dict[int, int]:
    """The numbers, and how often each is taken, from which `count` follows where all grows evenly in steps."""
    more = count // step - 1
    return {count: 1} if count % step or more < 2 else {step: 1 - more, 2 * step: more}


def _check_experts(plan, experts) -> None:
    """Raise ValueError for a mixture whose seconds are not known."""
    if plan.pp * plan.cp * plan.tp * plan.node > 1:
        raise ValueError(f"Experts are priced beside dp, zero, micro and recompute alone, not in {plan}.")
    if plan.ep == 1:
        raise ValueError(f"{plan} has all experts on every rank. Use ep=2 or more.")
    if experts.gated or experts.shared or experts.hidden or experts.router == "deepseek":
        raise ValueError("Experts are priced where each is GPT-2's MLP, without a shared one or a load bias.")
