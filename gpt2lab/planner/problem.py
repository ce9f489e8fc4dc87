"""One problem for every planner: the operators of GPT-2 as a graph, and the devices that they may run on.

Every number is of one batch (or micro-batch): operations, bytes of results, weights and kept activations.
"""

import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ..machine.arguments import MORE, checked, read_table, said_in
from ..machine.links import Link, Network
from ..machine.words import did_you_mean

STATE = 4
"""Weights, gradients and AdamW's two moments: bytes held for each byte of weights."""


@checked(flops=0, output=0, weights=0, kept=0)
@dataclass(frozen=True)
class Operator:
    """A node of the graph: floating-point operations forward (backward: twice as many), and bytes."""

    name: str
    flops: float
    output: int  # bytes of its result: what an edge to another device carries
    weights: int = 0  # bytes of its parameters
    kept: int = 0  # bytes that it keeps from forward to backward


@checked()
@dataclass(frozen=True)
class OperatorGraph:
    """Operators in an order in which they can run, and edges (from, to) between their numbers.

    Raises ValueError for an edge that does not lead forward.
    """

    operators: tuple[Operator, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self):
        for u, v in self.edges:
            if not 0 <= u < v < len(self.operators):
                raise ValueError(
                    f"An edge leads from operator {u} to {v} of {len(self.operators)}. "
                    "List operators in an order in which they can run: edges go from lower to higher numbers."
                )

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def before(self) -> list[list[int]]:
        """For each operator those whose results it reads."""
        return [[u for u, v in self.edges if v == n] for n in range(len(self))]

    @cached_property
    def after(self) -> list[list[int]]:
        """For each operator those that read its result."""
        return [[v for u, v in self.edges if u == n] for n in range(len(self))]

    @classmethod
    @checked()
    def chain(cls, operators: Sequence[Operator]) -> "OperatorGraph":
        """The graph in which each operator reads the one before it."""
        return cls(tuple(operators), tuple(pairwise(range(len(operators)))))


@checked(rate=(MORE, float("inf")), memory=(0, float("inf")), launch=0, copy=(MORE, float("inf")), peak=0, add=0,
         itemsize=1, flops=0)  # fmt: skip
@dataclass(frozen=True)
class Device:
    """A processor: an operator takes `launch` + flops / rate seconds, so small products run below the full rate.

    The share of `rate` that a product of f operations reaches is f / (f + launch x rate). `fit.fit` finds both numbers
    from measured times, as it finds a link's.
    """

    rate: float  # floating-point operations per second
    memory: float = float("inf")  # bytes
    launch: float = 0.0  # seconds
    copy: float = float("inf")  # bytes per second that work element by element reads and writes
    peak: float = 0.0  # floating-point operations per second of the data sheet; 0: `rate`
    add: float = 0.0  # times that adding up gradients passes their bytes; 0: the product itself adds
    rates: tuple[tuple[int, float], ...] = ()  # (bytes of a number, its rate over `rate`); (): one for all

    def with_numbers(self, itemsize: int) -> "Device":
        """The device at the rate of numbers of so many bytes. Raises ValueError where that is not known."""
        if not self.rates:
            return self
        if itemsize not in dict(self.rates):
            known = " or ".join(str(size) for size, _ in self.rates)
            raise ValueError(
                f"No rate is known here for numbers of {itemsize} bytes. Use numbers of {known} bytes."
            )
        factor = dict(self.rates)[itemsize]
        return replace(self, rate=self.rate * factor, peak=self.peak * factor, rates=())

    def time(self, flops: float) -> float:
        """Seconds of an operator of so many operations."""
        return self.launch + flops / self.rate


@checked(devices=1, cores=0, call=0, device=0)
@dataclass(frozen=True)
class Cluster:
    """Equal devices on a network, each with its own way out of its node; devices of a node share its `cores`.

    0 means enough for all: then each device has its own. `call`: seconds that a send or a sum costs a rank amid its
    work, besides its messages: ranks of one machine do not arrive together, and have to be woken up. `slowed`: (ranks,
    factor) from few to many, how many times as long a step of at least so many ranks takes as all else says: cores
    that work at the same time share caches and memory.
    """

    devices: int
    device: Device
    network: Network = field(default_factory=lambda: Network(Link(0, float("inf"))))
    cores: int = 0
    source: str = "made up"
    call: float = 0.0
    slowed: tuple[tuple[int, float], ...] = ()

    def node(self, device: int) -> int:
        """The node of a device."""
        return device // self.network.node

    @checked(devices=(1, 10**6))
    def with_devices(self, devices: int) -> "Cluster":
        """The same kind of cluster with another number of devices."""
        return replace(self, devices=devices)


TORCH_ADDS = 4
"""torch's own way: memory for the new gradient is cleared, two are read, one is written; Megatron-LM's product adds."""

PRECISIONS = {
    "float64": (8, 0),
    "float32": (4, 0),
    "bf16": (2, 0),
    "bf16-mixed": (2, 2),
    "bf16-mixed-fp32-grads": (2, 4),
}
"""(bytes of weights, activations and messages; of kept gradients, if float32 masters and moments are beside them, else
0). Mixed are 16 bytes a parameter as in Rajbhandari et al. 2020, section 3.1, or 18 as in Megatron-LM."""
EFFICIENCY = 0.59
"""The share of the data sheet's rate that a very large product reaches, fitted in `published_steps`."""
UNITS = {f"{prefix}{word}": scale ** (1 + power) / bits
         for word, scale, bits in (("b", 1000, 1), ("ib", 1024, 1), ("bit", 1000, 8))
         for power, prefix in enumerate("kmgt")} | {"": 1, "b": 1}  # fmt: skip
SIZE = "size. Use for example 4GiB, 800MB or 10gbit"


@checked()
def size_in_bytes(text, where: str = "", units: dict = UNITS, what: str = SIZE) -> float:
    """The bytes of a number or a text: 4GiB, 800MB, 1.5 GiB; 10gbit are 1.25e9.

    Raises ValueError, with `where` it is said and `what` it is not, for any other, for none and for infinitely many.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    if found and re.fullmatch("[KMGT]b", found[2]):
        raise ValueError(f"{where}{text!r} may be bits or bytes. Write {found[2]}it or {found[2][0]}B.")
    with suppress(TypeError, KeyError, ValueError):
        if 0 < (size := float(found[1]) * units[found[2].lower()]) < float("inf"):
            return size
    raise ValueError(f"{where}{text!r} is no {what}.")


TIMES = {"launch": 5e-6, "inside_latency": 10e-6, "between_latency": 10e-6}  # seconds, if not said
OF_CLUSTER = dict.fromkeys(("machines", "cards"), (int, (1, 65_536))) | dict.fromkeys(TIMES, (float, 0))
OF_CLUSTER |= {"peak": (dict[str, float], MORE), "efficiency": (float, (MORE, 1)), "source": (str, None)}
SIZES = "memory", "copy", "inside", "between"


@checked()
def cluster_from(table: dict, name: str) -> Cluster:
    """The cluster of a table of words, which `clusters.toml` explains.

    Raises ValueError for a word that is missing or unknown, and for a value that no cluster has.
    """
    said = TIMES | {"efficiency": EFFICIENCY, "source": name} | table
    known = "machines", "cards", *SIZES, "peak", *TIMES, "efficiency", "source"
    if wrong := [word for word in table if word not in known] or [word for word in known if word not in said]:
        does = "cannot say" if wrong[0] in table else "does not say"
        raise ValueError(f"{name} {does} {wrong[0]!r}. Use the words {', '.join(known)}, without a heading.")
    for word, (kind, limits) in OF_CLUSTER.items():
        said_in(name, word, said[word], kind, limits)
    memory, copy, inside, between = (size_in_bytes(said[word], f"{name}, {word}: ") for word in SIZES)
    peaks, cards = said["peak"], said["cards"]
    if {*peaks} - {*PRECISIONS} or not peaks:
        raise ValueError(f"{name} has the precisions {[*peaks]}. Use one or more of {', '.join(PRECISIONS)}.")
    peak = next(iter(peaks.values()))
    slower = tuple((PRECISIONS[word][0], rate / peak) for word, rate in peaks.items())
    device = Device(said["efficiency"] * peak, memory, said["launch"], copy, peak, rates=slower)
    wires = Link(said["between_latency"], between / cards), Link(said["inside_latency"], inside)
    return Cluster(said["machines"] * cards, device, Network(*wires, cards), source=said["source"])


LAPTOP = Cluster(
    4,
    Device(60e9, 4 * 2**30, 20e-6, 8e9, add=TORCH_ADDS),
    Network(Link(50e-6, 4e9), node=64),
    cores=2,
    source="two cores that share memory; round numbers of the order that lessons 02 and 03 measure",
    call=3e-4,
)
CLUSTERS = {
    name: cluster_from(table, name)
    for name, table in tomllib.loads(Path(__file__).with_name("clusters.toml").read_text()).items()
} | {"laptop": LAPTOP}
"""Clusters by name, with the source of their numbers."""


@checked()
def find_cluster(name: str) -> Cluster:
    """The cluster of this name or of this file with a table, or ValueError with the names that there are."""
    if name.endswith(".toml"):
        return cluster_from(read_table(name, tomllib.loads, "a cluster"), name)
    if name not in CLUSTERS:
        hint = did_you_mean(name, CLUSTERS, f"There are {', '.join(CLUSTERS)}.")
        raise ValueError(f"No cluster is called {name!r}. {hint}")
    return CLUSTERS[name]


@checked(rows=1, length=1, itemsize=1)
def gpt2_layers(config, rows: int, length: int, itemsize: int = 4) -> OperatorGraph:
    """GPT-2 as a chain of layers: the embedding, the blocks, the head with its loss.

    2 operations for every weight of a matrix and token, 4 T C for attention's two products. Kept: the embedding keeps
    nothing, a block 16 C + 4 + H numbers a token (`tensor_costs.kept_bytes`), the head C + 2 and its logits.
    """
    c, v, tokens = config.n_embd, config.vocab_size, rows * length
    stream = itemsize * tokens * c
    kept = itemsize * tokens * (16 * c + 4 + config.n_head)
    embed = Operator("embed", 2 * c * tokens, stream, itemsize * (v + config.n_positions) * c)
    flops, weights = tokens * (24 * c + 4 * length) * c, itemsize * (12 * c + 13) * c
    block = Operator("", flops, stream, weights, kept)
    blocks = [replace(block, name=f"h.{i}") for i in range(config.n_layer)]
    head = Operator("head", 2 * c * v * tokens, itemsize, itemsize * 2 * c, itemsize * tokens * (c + 2 + v))
    return OperatorGraph.chain([embed, *blocks, head])


@checked(rows=1, length=1, groups=1, itemsize=1)
def gpt2_block(config, rows: int, length: int, groups: int = 1, parallel: bool = False, itemsize: int = 4):
    """One block of GPT-2 as 12 operators, of which x is its input; heads in `groups`, each with its q, k, v and core.

    With `parallel` the MLP reads what attention reads, beside it and not after it: the block of GPT-J (Wang &
    Komatsuzaki 2021), 10 operators. Raises ValueError for heads that do not split into the groups.
    """
    if config.n_head % groups:
        fits = [g for g in range(1, config.n_head + 1) if config.n_head % g == 0]
        raise ValueError(f"{config.n_head} heads cannot form {groups} groups. Use groups = {fits}.")
    c, tokens = config.n_embd, rows * length
    part = c // groups
    nodes: list[Operator] = []
    edges: list[tuple[int, int]] = []

    def add(name, inputs, width, flops, weights=0) -> int:
        edges.extend((u, len(nodes)) for u in inputs)
        size = itemsize * tokens * width
        nodes.append(Operator(name, tokens * flops, size, itemsize * weights, size))
        return len(nodes) - 1

    def matrix(name, inputs, rows_in, width) -> int:
        return add(name, inputs, width, 2 * rows_in * width, rows_in * width + width)

    x = add("x", [], c, 0)
    ln_1, cores = add("ln_1", [x], c, 8 * c, 2 * c), []
    for g in range(groups):
        mark = f".{g}" if groups > 1 else ""
        qkv = [matrix(name + mark, [ln_1], c, part) for name in "qkv"]
        cores.append(add(f"core{mark}", qkv, part, 4 * length * part))
    proj = matrix("attn.c_proj", cores, c, c)
    if parallel:
        start = ln_1
    else:
        middle = add("add", [x, proj], c, c)
        start = add("ln_2", [middle], c, 8 * c, 2 * c)
    down = matrix("mlp.c_proj", [matrix("mlp.c_fc", [start], c, 4 * c)], 4 * c, c)
    add("out", [x, proj, down] if parallel else [middle, down], c, c)
    return OperatorGraph(tuple(nodes), tuple(edges))
