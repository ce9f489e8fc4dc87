"""How far each family of plans carries a model: predicted steps from 8 to 4,096 GPUs.

The mixture has 64 experts in every layer, of which a token asks for one (Fedus et al. 2021): the dense model's work,
and forty times its weights.
"""

from ...experts.mixture import Experts
from ...model import GPT2Config
from ...plan import Plan
from ...planner.cost import Prediction, predict
from ...planner.problem import CLUSTERS, Cluster

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTH = 2048
MODELS = {
    "GPT-2 XL": GPT2Config(50257, LENGTH, 48, 25, 1600),
    "GPT-2 XL, 64 experts": GPT2Config(50257, LENGTH, 48, 25, 1600, experts=Experts(64, 1, "switch")),
    "7.5B": GPT2Config(51200, LENGTH, 36, 32, 4096),
    "175B": GPT2Config(51200, LENGTH, 96, 96, 12288),
}
FAMILIES = {
    "dp": lambda n, rows: f"dp={n},{_one_row(rows, n)}",
    "ZeRO-1": lambda n, rows: f"dp={n},zero=1,{_one_row(rows, n)}",
    "ZeRO-3": lambda n, rows: f"dp={n},zero=3,{_one_row(rows, n)}",
    "HSDP": lambda n, rows: f"dp={n},zero=3,shard=8,{_one_row(rows, n)}",
    "tp x dp": lambda n, rows: f"tp=8,sp=on,dp={n // 8},zero=1,{_one_row(rows, n // 8)}",
    "tp x pp x dp": lambda n, rows: f"tp=8,pp=8,sp=on,dp={n // 64},zero=1,{_one_row(rows, n // 64)}",
    "cp x dp": lambda n, rows: (
        f"cp=8,exchange=ring,layout=zigzag,dp={n // 8},zero=1,{_one_row(rows, n // 8)}"
    ),
    "ep=8 x dp": lambda n, rows: f"dp={n},ep=8,zero=1,{_one_row(rows, n)}",
    "ep=64 x dp": lambda n, rows: f"dp={n},ep=64,zero=1,{_one_row(rows, n)}",
}
"""Names and the plan for n GPUs and so many rows."""


def _one_row(rows: int, replicas: int) -> str:
    """Micro-batches of one sequence, of which only what a block reads is kept."""
    return f"recompute=on,micro={max(1, rows // max(1, replicas))}"


def a100s(name: str = "a100x64") -> Cluster:
    """4,096 of a kind of GPU."""
    return CLUSTERS[name].with_devices(max(WORLDS))


def family(name: str, model: str, rows, worlds=WORLDS) -> dict[int, Prediction | str]:
    """For each number of GPUs the prediction for `rows(n)` sequences, or in words why there is none."""
    found = {}
    for n in worlds:
        try:
            text = FAMILIES[name](n, rows(n))
            if "dp=0" in text:
                raise ValueError(f"{name} needs more than {n} GPUs")
            plan = Plan.parse(text)
            found[n] = predict(plan, MODELS[model], rows(n), LENGTH, a100s(), 2)
        except ValueError as error:
            found[n] = str(error)
    return found
