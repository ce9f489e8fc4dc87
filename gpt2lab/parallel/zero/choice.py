"""What a plan says of ZeRO: which stage, over which ranks, and what does not go together."""

from ...ranks.mesh import Axis, Mesh
from .flat import Owned, Refilled
from .stages import Zero1, Zero2, Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


def apply_zero(model, mesh: Mesh, plan) -> Zero1:
    """The ZeRO stage that the plan names, for a model that all other strategies have edited.

    What is spread over the expert axis is shared out among its own replicas.
    """
    inside, across = sharding_groups(mesh, plan.shard)
    if plan.data == "owner":
        sync = Zero3(model, inside, flat=Owned, prefetch=False)
    elif plan.refill:
        sync = Zero3(model, inside, flat=Refilled)
    else:
        sync = STAGES[plan.zero](model, inside, experts=mesh["edp", "cp"] if plan.ep > 1 else None)
    sync.across = across
    return sync


def sharding_groups(mesh: Mesh, shard: int) -> tuple[Axis, Axis | None]:
    """The axis of the `shard` neighbours that share, and that of the same place in other groups; 0: all share.

    All ranks call it together.
    """
    whole = mesh["dp", "cp"]
    if shard in (0, whole.size):
        return whole, None
    lines = mesh.lines(["dp", "cp"])
    inside = [line[first : first + shard] for line in lines for first in range(0, whole.size, shard)]
    across = [line[place::shard] for line in lines for place in range(shard)]
    return mesh.axis(whole.name, inside, messages=False), mesh.axis("replica", across, messages=False)


def check(config, plan, rows: int, length: int) -> None:
    """Any number of ranks can share any number of elements; the stage must exist."""
    if plan.zero not in STAGES:
        raise ValueError(
            f"zero={plan.zero} is no stage of ZeRO. Use zero=1, 2 or 3, or 0 for whole replicas."
        )
    if plan.data not in ("bucket", "owner") or (plan.data == "owner" and plan.zero != 3):
        raise ValueError(
            f"data={plan.data} does not go with zero={plan.zero}. Leave data out, or use data=owner with zero=3."
        )
    if plan.refill:
        _check_refill(config, plan)
    replicas = plan.dp * plan.cp
    if plan.shard and (plan.shard < 2 or replicas % plan.shard):
        fits = [str(n) for n in range(2, replicas) if replicas % n == 0]
        use = f"Use shard={', '.join(fits)}" if fits else "Leave shard out"
        raise ValueError(
            f"dp={plan.dp} x cp={plan.cp} = {replicas} ranks make no groups of shard={plan.shard} that share. {use}."
        )
    if plan.shard and plan.ep > 1:
        raise ValueError(
            f"shard={plan.shard} groups replicas of the whole model, and ep={plan.ep} spreads the experts over them. "
            "Leave one of them out."
        )
    if plan.bucket != type(plan).bucket:
        together = f"bucket={plan.bucket} does not go with zero={plan.zero}, which sends a block's gradients together."
        raise ValueError(f"{together} Leave bucket out, or use zero=0.")


def _check_refill(config, plan) -> None:
    """What is filled again just before a block's backward needs one backward a block, which begins at its output."""
    for other, why in (
        (f"zero={plan.zero}" * (plan.zero != 3), "gathers no weights for backward"),
        (f"data={plan.data}" * (plan.data == "owner"), "broadcasts whole layers"),
        ("recompute=on" * plan.recompute, "runs each block twice, which refill=on avoids"),
        (f"pp={plan.pp}" * (plan.pp > 1), "has an order of backwards of its own"),
        ("a mixture of experts" * bool(config.experts), "has a loss inside the blocks"),
    ):
        if other:
            raise ValueError(f"refill=on does not go with {other}, which {why}. Leave one of them out.")
