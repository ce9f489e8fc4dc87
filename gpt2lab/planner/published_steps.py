"""Steps that others have published, and what `cost.predict` says of them: one efficiency for all, no constant of a row.

EFFICIENCY is the share of the data sheet's rate that a very large matrix product reaches; launches, element-wise work,
bubbles and messages come on top, from the same functions as everywhere. Where a source prints operations a second,
its seconds follow from its own formula: Narayanan et al. 2021, equation 3. Where it does not say how many sequences
a micro-batch has, it has one. Recomputing attention alone ("selective") counts as recomputing nothing.
"""

from dataclasses import dataclass, replace
from functools import cache

from ..model import GPT2Config
from ..plan import Plan
from .cost import Prediction, predict
from .problem import CLUSTERS, Cluster
from .published import step_flops

EFFICIENCY = 2 / 3
MEGATRON = "Narayanan et al. 2021, table 1"
KORTHIKANTI = "Korthikanti et al. 2022, table 5"
LLAMA = "Grattafiori et al. 2024, table 4"


@dataclass(frozen=True)
class Published:
    """A published run: its model as (layers, width, heads, vocabulary), its plan, and how fast it was.

    `seconds` of a step, or `teraflops` of one GPU. `again`: its operations include the second forward of the blocks.
    """

    name: str
    model: tuple[int, int, int, int]
    plan: str
    rows: int
    source: str
    seconds: float = 0.0
    teraflops: float = 0.0
    length: int = 2048
    cluster: str = "a100x64"
    again: bool = True

    @property
    def config(self) -> GPT2Config:
        """Its model in the shape of GPT-2."""
        layers, width, heads, words = self.model
        return GPT2Config(words, self.length, layers, heads, width)

    @property
    def devices(self) -> int:
        """Its GPUs."""
        return Plan.parse(self.plan).world

    @property
    def measured(self) -> float:
        """Seconds of a step, as printed or from the operations a second that were printed."""
        if self.seconds:
            return self.seconds
        layers, width, _, words = self.model
        flops = step_flops(self.rows, self.length, layers, width, words, self.again)
        return flops / (self.devices * self.teraflops * 1e12)

    def predicted(self, efficiency: float = EFFICIENCY) -> Prediction:
        """What our cost model says of the same step."""
        return _predicted(self, efficiency)


@cache
def _predicted(row: Published, efficiency: float) -> Prediction:
    return predict(Plan.parse(row.plan), row.config, row.rows, row.length, cluster(row, efficiency), 2)


def cluster(row: Published, efficiency: float) -> Cluster:
    """The machines of a row: its data sheet's, with the one efficiency."""
    found = CLUSTERS[row.cluster].with_devices(row.devices)
    return replace(found, device=replace(found.device, rate=efficiency * found.device.peak))


def _megatron(name, layers, width, heads, tp, pp, devices, rows, teraflops) -> Published:
    dp = devices // (tp * pp)
    micro = rows // dp
    plan = f"dp={dp},tp={tp},pp={pp},micro={micro},recompute=on"
    model = layers, width, heads, 51200
    return Published(f"GPT {name}", model, plan, rows, MEGATRON, teraflops=teraflops)


def _korthikanti(name, layers, width, heads, pp, rows, seconds, more) -> Published:
    plan = f"tp=8,pp={pp},micro={rows if pp > 1 else 1}{more}"
    return Published(name, (layers, width, heads, 51200), plan, rows, KORTHIKANTI, seconds)


ROWS = (
    _megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    _megatron("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138),
    _megatron("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142),
    _megatron("18B", 40, 6144, 48, 8, 1, 256, 1024, 135),
    _megatron("39B", 48, 8192, 64, 8, 2, 512, 1536, 138),
    _megatron("76B", 60, 10240, 80, 8, 4, 1024, 1792, 140),
    _megatron("146B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    _megatron("310B", 96, 16384, 128, 8, 16, 1920, 2160, 155),
    _megatron("530B", 105, 20480, 128, 8, 35, 2520, 2520, 163),
    _megatron("1T", 128, 25600, 160, 8, 64, 3072, 3072, 163),
    _korthikanti("22B, all again", 48, 6144, 64, 1, 4, 1.42, ",recompute=on"),
    _korthikanti("175B, all again", 96, 12288, 96, 8, 64, 18.13, ",schedule=interleaved,chunks=3,recompute=on"),
    _korthikanti("530B, all again", 105, 20480, 128, 35, 280, 49.05, ",schedule=interleaved,chunks=3,recompute=on"),
    _korthikanti("1T, all again", 128, 25600, 160, 64, 512, 94.42, ",recompute=on"),
    _korthikanti("22B, sp", 48, 6144, 64, 1, 4, 1.10, ",sp=on"),
    _korthikanti("175B, sp", 96, 12288, 96, 8, 64, 13.75, ",schedule=interleaved,chunks=3,sp=on"),
    _korthikanti("530B, sp", 105, 20480, 128, 35, 280, 37.83, ",schedule=interleaved,chunks=3,sp=on"),
    _korthikanti("1T, sp", 128, 25600, 160, 64, 512, 71.49, ",sp=on"),
    Published("MT-NLG 530B", (105, 20480, 128, 51200), "dp=8,tp=8,pp=35,micro=240,recompute=on", 1920,
              "Smith et al. 2022, section 2.4", 60.1),
    Published("BLOOM 176B", (70, 14336, 112, 250880), "dp=8,tp=4,pp=12,micro=128,recompute=on,zero=1", 2048,
              "BigScience 2022, section 3.4", teraflops=156),
    Published("Llama 3 405B", (126, 16384, 128, 128256), "dp=64,tp=8,pp=16,micro=32,sp=on", 2048, LLAMA,
              teraflops=430, length=8192, cluster="h100x64", again=False),
    Published("Llama 3 405B, 16k", (126, 16384, 128, 128256), "dp=128,tp=8,pp=16,micro=16,sp=on", 2048, LLAMA,
              teraflops=400, length=8192, cluster="h100x64", again=False),
)  # fmt: skip
