"""Checkers of lesson 20: what no strategy beats, tokens that hide a sum of gradients, and a planner of one's own."""

from dataclasses import replace

from ...plan import Plan
from ...planner.memory import memory
from ...verify import verify
from ..labs.decisions import CAPSTONE, Workload, recorded
from . import Task, refuse, scored, unaided

POINTS = (  # {strategy: (bytes held, bytes sent)}
    {"data": (100, 10), "ZeRO-1": (60, 10), "ZeRO-3": (20, 15), "tensor": (40, 60), "pipeline": (50, 1)},
    {"a": (5, 5), "b": (5, 5), "c": (6, 5), "d": (5, 6)},
    {"alone": (9, 9)},
    {"a": (1, 9), "b": (2, 8), "c": (3, 7), "d": (2, 9)},
)


def _points(chance) -> tuple[dict[str, tuple[int, int]]]:
    names = "abcdefgh"[: chance.randint(1, 8)]
    return ({name: (chance.randint(1, 6), chance.randint(1, 6)) for name in names},)


def _unbeaten(points: dict[str, tuple[int, int]]) -> set[str]:
    beats = lambda q, p: q[0] <= p[0] and q[1] <= p[1] and q != p
    return {name for name, p in points.items() if not any(beats(q, p) for q in points.values())}


unbeaten = Task(
    _unbeaten,
    shown=[(points,) for points in POINTS],
    what="{}",
    drawn=_points,
    like=lambda found, words: [found] if isinstance(found, str) else found,
)
"""Exercise: the strategies that no other beats in both numbers."""


tokens = Task(
    lambda rate, bandwidth, itemsize: itemsize * rate / (2 * bandwidth),
    shown=[(50e9, 1e9, 4), (495e12, 50e9, 2), (62.5e12, 3.125e9 / 8, 2)],
    what="rate {:.3g}, bandwidth {:.3g}, {} bytes",
    drawn=lambda chance: (
        1e12 * chance.randint(1, 900),
        1e9 * chance.randint(1, 90),
        chance.choice((1, 2, 4, 8)),
    ),
    tolerance=1e-6,
)
"""Exercise: tokens a device must have so that backward hides the sum of gradients."""


SLACK = 10  # percent

OTHERS = {
    "one of two H100 machines": Plan.parse("dp=8,zero=3,refill=true,loss=chunked"),
    "another job": Plan.parse("pp=2,dp=4,tp=2,micro=16,zero=1,schedule=zb_v,sp=true"),  # on V100s
}
"""What `gpt2lab plan` chooses for two jobs that are none of the CAPSTONE."""

CHOOSE = (
    "gpt2lab.planner.choose",
    *(f"{Workload.__module__}.{name}" for name in ("decide", "chosen", "recorded")),
)
"""What plans in the answer's place."""


def _legal(answer, name: str, case) -> Plan:
    """The plan that the answer gives for a job, which must fit."""
    text = answer(replace(case))  # a copy
    assert isinstance(text, str | Plan), f"{name}: return a plan, got {text!r}"
    try:
        plan = Plan.parse(text) if isinstance(text, str) else text
        plan.check(case.config, case.rows, case.length)
    except ValueError as error:
        raise AssertionError(f"{name}: {error}") from None
    devices, limit = case.cluster.devices, case.cluster.device.memory
    refuse(
        name,
        {
            f"{plan}: without a flush gradients are stale. Use a schedule with one": plan.asynchronous,
            f"{plan} needs {plan.world} devices, and there are {devices}": plan.world > devices,
        },
    )
    size = max(one.total for one in memory(plan, case.config, case.rows, case.length, case.itemsize))
    assert size <= limit, f"{name}: {plan} holds {size / 1e9:.1f} GB on a device of {limit / 1e9:.0f} GB"
    return plan


def capstone(answer, ranks=None) -> str:
    """Puzzle: plans within memory and near what `gpt2lab plan` chooses; then run small, on live ranks."""
    answer, choices, worst = unaided(answer, *CHOOSE), recorded() | OTHERS, 0.0
    v100, h100, a100 = CAPSTONE.values()
    one = replace(h100, cluster=h100.cluster.with_devices(8), rows=128)
    more = zip(OTHERS, (one, replace(a100, cluster=v100.cluster, rows=64, length=1024)), strict=True)
    for name, case in (CAPSTONE | dict(more)).items():
        plan = _legal(answer, name, case)
        mine, best = case.seconds(plan), case.seconds(choices[name])
        idle = f". It leaves {case.cluster.devices - plan.world} devices idle" * (
            plan.world < case.cluster.devices
        )
        slower = round(100 * (mine / best - 1), 1)
        assert slower <= SLACK, (
            f"{name}: {plan} takes {mine / best:.1f} times as long as {choices[name]}, which `gpt2lab plan` chooses "
            f"(predicted){idle}"
        )
        worst = max(worst, slower)
        small = scaled(plan)
        report = verify(small, ranks=ranks if ranks and small.world == 4 else None)
        assert report.ok, f"{name}: scaled down to {small}, it differs from the serial run"
    return scored(worst, "% slower than `gpt2lab plan`, in the worst of the cases", bar=SLACK, best=0.0)


def scaled(plan: Plan) -> Plan:
    """The same strategies on at most two ranks an axis, so that live ranks can run them."""
    small = {axis: min(2, getattr(plan, axis)) for axis in ("pp", "dp", "cp", "tp")}
    micro = min(plan.micro, 7 // small["dp"])
    return replace(plan, **small, micro=micro if small["pp"] == 1 else max(2, min(3, micro)), shard=0)
