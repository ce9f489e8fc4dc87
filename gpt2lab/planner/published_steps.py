"""Steps that others have published, and what `cost.predict` says of them: one efficiency for all, no constant of a row.

EFFICIENCY is the share of the data sheet's rate that a very large matrix product reaches. It is `fit` to table 1 of
Narayanan et al. 2021 alone; all other rows are predicted with it, unseen. Launches, element-wise work, bubbles and
messages come on top, from the same functions as everywhere: an operator of f operations reaches E f / (f + E x peak x
launch). Where a source prints operations a second, its seconds follow from Narayanan's equation 3. `assumed` says what
a source does not print and we chose.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from ..machine.arguments import checked
from ..model import GPT2Config
from ..plan import Plan
from .cost import Prediction, predict
from .problem import CLUSTERS, Cluster

EFFICIENCY = 0.59
TABLE_1 = "Narayanan et al. 2021, table 1"
TABLE_2 = "Narayanan et al. 2021, table 2"
KORTHIKANTI = "Korthikanti et al. 2022, tables 3 and 5"
SMITH = "Smith et al. 2022, section 2.4"
BLOOM = "BigScience 2022, training log of tr11-176B-ml, benchmarks of 28 February"
MEGASCALE = "Jiang et al. 2024 (MegaScale), table 2, rows of Megatron-LM"
LLAMA = "Grattafiori et al. 2024, table 4"
ONE_CARD = "ZeRO-3 by DeepSpeed of 2021 sent no more than a ring with one of a machine's eight cards would"
WIDE = "with its bubble of an eighth it reached 0.57 of the peak: products this wide are above our one efficiency"
FSDP = "IBM and PyTorch 2024, README of fms-fsdp: training throughput on 128 A100 with 400 Gbit/s a machine"


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


@dataclass(frozen=True)
class Published:
    """A published run: its model as (layers, width, heads, vocabulary), its plan, and how fast it was.

    `seconds` of a step, or `teraflops` of one GPU, which count the second forward of the blocks where `again`; `held`
    bytes of a GPU, if printed (by nvidia-smi). `between`: bytes a second of a GPU out of its machine, if not the
    cluster's. `reason`: why our prediction is off, where we know it and it is by more than a quarter.
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
    held: float = 0.0
    between: float = 0.0
    assumed: str = ""
    reason: str = ""

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

    def error(self, efficiency: float = EFFICIENCY) -> float:
        """Predicted seconds over published ones, less 1."""
        return self.predicted(efficiency).seconds / self.measured - 1


@cache
def _predicted(row: Published, efficiency: float) -> Prediction:
    return predict(Plan.parse(row.plan), row.config, row.rows, row.length, cluster(row, efficiency), 2)


def cluster(row: Published, efficiency: float) -> Cluster:
    """The machines of a row: its data sheet's, with the one efficiency."""
    found = CLUSTERS[row.cluster].with_devices(row.devices)
    network = found.network
    if row.between:
        network = replace(network, between=replace(network.between, bandwidth=row.between))
    return replace(found, device=replace(found.device, rate=efficiency * found.device.peak), network=network)


def fit(rows, percents=range(50, 81)) -> float:
    """The efficiency, of these percents, whose predictions of the rows have the least sum of squared log errors."""
    off = lambda efficiency: sum(math.log1p(row.error(efficiency)) ** 2 for row in rows)
    return min((percent / 100 for percent in percents), key=off)


def _interleaved(pp: int, layers: int) -> str:
    """Section 5.1 of Narayanan et al. interleaves, and does not print how often: the fewest equal chunks of a stage."""
    chunks = next(n for n in range(2, layers + 1) if layers // pp % n == 0)
    return f"pp={pp},schedule=interleaved,chunks={chunks}"


def _table_1(name, layers, width, heads, tp, pp, devices, rows, teraflops) -> Published:
    dp = devices // (tp * pp)
    depth = _interleaved(pp, layers) if pp > 1 else "pp=1"
    plan = f"dp={dp},tp={tp},{depth},micro={rows // dp},recompute=on"
    assumed = "micro-batches of one sequence" + "; the fewest chunks" * (pp > 1)
    model = layers, width, heads, 51200
    return Published(f"GPT {name}", model, plan, rows, TABLE_1, teraflops=teraflops, assumed=assumed)


GPT3, MT = (96, 12288, 96, 51200), (105, 20480, 128, 51200)


def _table_2(model, devices, rows, each, teraflops) -> Published:
    """Without model parallelism where `each` (sequences of a micro-batch) is not 0, else 96 or 280 ways."""
    name = "GPT 175B" if model is GPT3 else "GPT 530B"
    if each:
        plan, what, assumed = f"dp={devices},zero=3,micro={rows // devices // each}", "ZeRO-3", ""
        reason = ONE_CARD if each < 4 else ""
    else:
        pp = 12 if model is GPT3 else 35
        dp = devices // (8 * pp)
        plan, what = f"dp={dp},tp=8,{_interleaved(pp, model[0])},micro={rows // dp},recompute=on", "tp x pp"
        assumed, reason = "tp=8; interleaved as in table 1, the fewest chunks", ""
    title = f"{name}, {what}, {devices:,}"
    return Published(title, model, plan, rows, TABLE_2, teraflops=teraflops, assumed=assumed, reason=reason)


def _korthikanti(name, layers, width, heads, pp, rows, seconds, more, reason="") -> Published:
    plan = f"tp=8,pp={pp},micro={rows if pp > 1 else 1}{more}"
    assumed = "" if "recompute" in more else "recomputing attention alone costs nothing"
    model = layers, width, heads, 51200
    return Published(name, model, plan, rows, KORTHIKANTI, seconds, assumed=assumed, reason=reason)


def _smith(dp, seconds) -> Published:
    plan = f"dp={dp},tp=8,pp=35,micro={1920 // dp},recompute=on"
    return Published(f"MT-NLG 530B, {280 * dp:,}", MT, plan, 1920, SMITH, seconds,
                     assumed="1F1B, not interleaved; recomputation of all blocks")  # fmt: skip


def _bloom(heads, dp, tp, each, seconds, held) -> Published:
    plan = f"dp={dp},tp={tp},pp=12,micro={2048 // dp // each},recompute=on,zero=1"
    name = f"BLOOM 176B, {heads} heads, tp={tp}, {each} rows"
    # four links of 100 Gbit/s for the eight GPUs of a machine
    return Published(name, (70, 14336, heads, 250880), plan, 2048, BLOOM, seconds, held=held, between=6.25e9)


def _megascale(devices, rows, seconds) -> Published:
    dp = devices // 64
    plan = f"dp={dp},tp=8,pp=8,micro={rows // dp},schedule=interleaved,chunks=6,sp=on"
    return Published(f"Megatron-LM 175B, {devices:,}", (96, 12288, 128, 64000), plan, rows, MEGASCALE, seconds,
                     assumed="micro-batches of one sequence; sp; blocks run once")  # fmt: skip


def _llama(devices, micro, teraflops) -> Published:
    # section 3.3.2: the first chunk of the first stage holds the embedding only, so that a chunk is one of 128 layers
    plan = f"dp={devices // 128},tp=8,pp=16,micro={micro},schedule=interleaved,chunks=8"
    return Published(f"Llama 3 405B, {devices:,}", (126, 16384, 128, 128256), plan, 2048, LLAMA, 0.0, teraflops, 8192,
                     "h100x64", again=False, assumed="a chunk is one block; no sp")  # fmt: skip


def _fsdp(name, layers, width, heads, each, more, tokens, assumed="") -> Published:
    """Llama 2 under FSDP with sequences of 4,096 tokens; `tokens` a second and GPU."""
    plan = f"dp=128,zero=3,{more}"
    return Published(f"Llama 2 {name}, FSDP, 128", (layers, width, heads, 32000), plan, 128 * each, FSDP,
                     each * 4096 / tokens, length=4096, between=6.25e9, assumed=assumed)  # fmt: skip


FITTED = (
    _table_1("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    _table_1("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138),
    _table_1("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142),
    _table_1("18B", 40, 6144, 48, 8, 1, 256, 1024, 135),
    _table_1("39B", 48, 8192, 64, 8, 2, 512, 1536, 138),
    _table_1("76B", 60, 10240, 80, 8, 4, 1024, 1792, 140),
    _table_1("146B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    _table_1("310B", 96, 16384, 128, 8, 16, 1920, 2160, 155),
    _table_1("530B", 105, 20480, 128, 8, 35, 2520, 2520, 163),
    _table_1("1T", 128, 25600, 160, 8, 64, 3072, 3072, 163),
)
"""The rows that the efficiency is chosen on."""

UNSEEN = (
    *(_table_2(GPT3, n, 1536, each, rate) for n, each, rate in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
    *(_table_2(MT, n, rows, each, rate) for n, rows, each, rate in
      ((640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48))),
    *(_table_2(GPT3, n, 1536, 0, rate) for n, rate in ((384, 153), (768, 149), (1536, 141))),
    *(_table_2(MT, n, 2240, 0, rate) for n, rate in ((560, 171), (1120, 167), (2240, 159))),
    _korthikanti("22B, all again", 48, 6144, 64, 1, 4, 1.42, ",recompute=on"),
    _korthikanti("175B, all again", 96, 12288, 96, 8, 64, 18.13, ",schedule=interleaved,chunks=3,recompute=on"),
    _korthikanti("530B, all again", 105, 20480, 128, 35, 280, 49.05, ",schedule=interleaved,chunks=3,recompute=on"),
    _korthikanti("1T, all again", 128, 25600, 160, 64, 512, 94.42, ",recompute=on", WIDE),
    _korthikanti("22B, sp", 48, 6144, 64, 1, 4, 1.10, ",sp=on"),
    _korthikanti("175B, sp", 96, 12288, 96, 8, 64, 13.75, ",schedule=interleaved,chunks=3,sp=on"),
    _korthikanti("530B, sp", 105, 20480, 128, 35, 280, 37.83, ",schedule=interleaved,chunks=3,sp=on"),
    _korthikanti("1T, sp", 128, 25600, 160, 64, 512, 71.49, ",sp=on"),
    *(_smith(dp, seconds) for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))),
    _bloom(64, 4, 8, 2, 121.63, 40e9),
    _bloom(64, 8, 4, 2, 102.03, 59e9),
    _bloom(112, 8, 4, 2, 104.50, 59e9),
    _bloom(64, 8, 4, 4, 102.27, 73e9),
    *(_megascale(n, 768, s) for n, s in ((256, 40.0), (512, 21.2), (768, 15.2), (1024, 11.9))),
    *(_megascale(n, 6144, s) for n, s in ((3072, 29.02), (6144, 14.78), (8192, 12.24), (12288, 8.57))),
    _llama(8192, 32, 430),
    _llama(16384, 16, 400),
    _fsdp("7B", 32, 4096, 32, 2, "shard=8,refill=on", 3760, "its gated MLP as 4 C wide; shards inside machines"),
    _fsdp("13B", 40, 5120, 40, 1, "shard=8,refill=on", 1700, "its gated MLP as 4 C wide; shards inside machines"),
    _fsdp("34B", 41, 8192, 64, 8, "recompute=on", 772, "48 gated layers as 41 of GPT-2's, equally many weights"),
    _fsdp("70B", 85, 8192, 64, 6, "recompute=on", 380, "80 gated layers as 85 of GPT-2's, equally many weights"),
)  # fmt: skip
ROWS = FITTED + UNSEEN
