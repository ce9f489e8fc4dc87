"""Steps that others have published, and what `cost.predict` says of them: one efficiency for all, no constant of a row.

`problem.EFFICIENCY` is the share of the data sheet's rate that a very large matrix product reaches, in all that is
planned here. It is `fit` to table 1 of Narayanan et al. 2021 alone; all other rows are predicted with it, unseen.
Launches, element-wise work, bubbles and messages come on top, from the same functions as everywhere: an operator of f
operations reaches E f / (f + E x peak x launch). Where a source prints operations a second, its seconds follow from
Narayanan's equation 3. `assumed` says what a source does not print and we chose.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..machine.arguments import MORE, checked
from ..model import GPT2Config
from ..plan import Plan
from .cost import Prediction, predict
from .models import find_model
from .problem import CLUSTERS, EFFICIENCY, Cluster

TABLE = tomllib.loads(Path(__file__).with_name("published_steps.toml").read_text())
SOURCES, REASONS, SAID = (TABLE[word] for word in ("sources", "reasons", "said"))
FSDP = SOURCES["FSDP"]


@checked(rows=1, length=1, layers=1, width=1, vocabulary=0)
def step_flops(
    rows: int, length: int, layers: int, width: int, vocabulary: int, recompute: bool = True
) -> float:
    """Operations of a step, 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation of all layers, else 72 and V/12lh.

    Narayanan et al. 2021, appendix: with it a utilisation counts what the hardware does (HFU), without it what the
    model needs (MFU).
    """
    b, s, n, h, v = rows, length, layers, width, vocabulary
    full, head = (96, 16) if recompute else (72, 12)
    return full * b * s * n * h * h * (1 + s / (6 * h) + v / (head * n * h))


@checked(rows=1, length=1, seconds=0, teraflops=0, held=0, between=0, tokens=0, efficiency=(MORE, 1))
@dataclass(frozen=True)
class Published:
    """A published run: its model, a name or (layers, width, heads, vocabulary) of GPT-2's shape; its plan and speed.

    `seconds` of a step, or `tokens` a second of one GPU, or its `teraflops`, which count the second forward of the
    blocks where `again`; `held` bytes of a GPU, if printed (by nvidia-smi). `between`: bytes a second of a GPU out of
    its machine, if not the cluster's. `reason`: why our prediction is off, where we know it and it is by more than a
    quarter.
    """

    name: str
    model: tuple[int, int, int, int] | str
    plan: str
    rows: int
    source: str
    seconds: float = 0.0
    teraflops: float = 0.0
    length: int = 2048
    cluster: str = "a100x64"
    again: bool = True
    held: float = 0.0
    between: float = 0.0
    assumed: str = ""
    reason: str = ""
    tokens: float = 0.0

    @property
    def config(self) -> GPT2Config:
        """Its model."""
        if isinstance(self.model, str):
            return find_model(self.model, self.length)
        layers, width, heads, words = self.model
        return GPT2Config(words, self.length, layers, heads, width)

    @property
    def devices(self) -> int:
        """Its GPUs."""
        return Plan.parse(self.plan).world

    @property
    def measured(self) -> float:
        """Seconds of a step, as printed or from the tokens or operations a second that were printed."""
        if self.seconds:
            return self.seconds
        if self.tokens:
            return self.rows * self.length / (self.devices * self.tokens)
        return self.flops(self.again) / (self.devices * self.teraflops * 1e12)

    def flops(self, again: bool) -> float:
        """Operations of a step, with or without the second forward of its blocks."""
        c = self.config
        return step_flops(self.rows, self.length, c.n_layer, c.n_embd, c.vocab_size, again)

    def predicted(self, efficiency: float = EFFICIENCY) -> Prediction:
        """What our cost model says of the same step."""
        return _predicted(self, efficiency)

    def error(self, efficiency: float = EFFICIENCY) -> float:
        """Predicted seconds over published ones, less 1."""
        return self.predicted(efficiency).seconds / self.measured - 1


@cache
def _predicted(row: Published, efficiency: float) -> Prediction:
    return predict(Plan.parse(row.plan), row.config, row.rows, row.length, cluster(row, efficiency), 2)


def cluster(row: Published, efficiency: float) -> Cluster:
    """The machines of a row: its data sheet's, with the one efficiency."""
    found = CLUSTERS[row.cluster].with_devices(row.devices)
    wire = found.network.between
    network = replace(found.network, between=replace(wire, bandwidth=row.between or wire.bandwidth))
    return replace(found, device=replace(found.device, rate=efficiency * found.device.peak), network=network)


def fit(rows, percents=range(50, 81)) -> float:
    """The efficiency, of these percents, whose predictions of the rows have the least sum of squared log errors."""
    off = lambda efficiency: sum(math.log1p(row.error(efficiency)) ** 2 for row in rows)
    return min((percent / 100 for percent in percents), key=off)


def _published(runs: dict) -> list[Published]:
    """The rows of a table of `published_steps.toml`, which explains its words."""
    common = {word: value for word, value in runs.items() if word not in ("fitted", "columns", "rows")}
    found = []
    for row in runs["rows"]:
        said = common | dict(zip(runs["columns"], row, strict=False))
        plan = said["plan"].format(*said.pop("numbers", ()))
        model = said["model"] if isinstance(said["model"], str) else tuple(said["model"])
        whole = said | {"model": model, "plan": plan, "source": SOURCES[said["source"]]}
        found.append(Published(**whole | {"reason": REASONS.get(said.get("reason"), "")}))
    return found


FITTED = tuple(row for runs in TABLE["runs"] if "fitted" in runs for row in _published(runs))
"""The rows that the efficiency is chosen on."""
UNSEEN = tuple(row for runs in TABLE["runs"] if "fitted" not in runs for row in _published(runs))
ROWS = FITTED + UNSEEN
