"""From how many tokens a rank on computing takes longer than the messages that it can hide, for several machines.

P weights, t tokens a rank, n ranks, F operations a second, W bytes a second each way, b bytes a number. Times are those
of the alpha-beta model without latency, and of matrix products alone: 2 operations forward and 4 backward for each
weight and token. Austin et al. 2025, "How to scale your model", derives such thresholds for TPUs.
"""

from dataclasses import dataclass

from ...planner.problem import EFFICIENCY, find_cluster


@dataclass(frozen=True)
class Machine:
    """`ranks` that compute `rate` operations and send `bandwidth` bytes a second each, numbers of `itemsize` bytes."""

    name: str
    ranks: int
    rate: float
    bandwidth: float
    itemsize: int
    source: str


HEADER = ["machine", "ranks", "TFLOP/s a rank", "GB/s a rank", "bits"]


def row(machine: Machine) -> tuple:
    """A machine in numbers, under HEADER."""
    m = machine
    return m.name, m.ranks, f"{m.rate / 1e12:.3g}", f"{m.bandwidth / 1e9:.3g}", 8 * m.itemsize


def laptop(rate: float, bandwidth: float, ranks: int = 2, name: str = "a laptop (round numbers)") -> Machine:
    """A laptop: operations a second of a rank, bytes a second between two; float32."""
    return Machine(name, ranks, rate, bandwidth, 4, "given by the caller")


def machines() -> tuple[Machine, Machine]:
    """One machine of 8 H100 GPUs on NVLink, and 8 of them on InfiniBand, in bfloat16, at the planner's rate."""
    found = find_cluster("h100x64")
    network, rate = found.network, found.device.rate
    source = f"{found.source}; {EFFICIENCY} of that rate, fitted in lesson 19"
    return (
        Machine("8 GPUs", network.node, rate, network.inside.bandwidth, 2, source),
        Machine("64 GPUs", found.devices, rate, network.between.bandwidth, 2, source),
    )


def tokens_per_rank(strategy: str, machine: Machine, ranks: int = 0, causal: bool = False) -> float:
    """The fewest tokens a rank (and micro-batch, for zero3) at which a strategy's messages hide behind its computing.

    data     backward 4 P t / F, all-reduce 2 (n-1)/n P b / W: t = (n-1)/n b F / 2 W
    zero3    forward 2 P t / F, a gather (n-1)/n P b / W; backward twice of both: the same t
    context  a block of t keys and values, 2 t C b / W, meets t queries, 4 t^2 C / F: t = b F / 2 W, and twice that
             where the `causal` mask leaves half of each block (Liu et al. 2023, section 3: F / W at 16 bit)
    Tensor parallelism has no such number, see `most_tensor_ranks`: ValueError.
    """
    n, ratio = ranks or machine.ranks, machine.itemsize * machine.rate / machine.bandwidth
    if strategy in ("data", "zero3"):
        return (n - 1) / n * ratio / 2
    if strategy == "context":
        return ratio if causal else ratio / 2
    raise ValueError(
        f"{strategy!r} has no threshold of tokens. Use data, zero3 or context, or most_tensor_ranks."
    )


def most_tensor_ranks(machine: Machine, width: int) -> float:
    """The most ranks at which tensor parallelism computes longer than it sends, whatever the tokens.

    A layer: 72 C^2 t / n F against four all-reduces, 8 (n-1)/n t C b / W, forward and backward; t cancels, and
    n - 1 = 9 C W / b F (4.5 C W / F at 16 bit). Attention's own products, not counted, allow a few more.
    """
    return 1 + 9 * width * machine.bandwidth / (machine.itemsize * machine.rate)
