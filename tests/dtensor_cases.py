"""Random einsums with random layouts on 2 x 2 ranks, by DTensor and by the algebra: where results lie, what is sent.

DTensor plans and calls as rank 0 of four whose messages go nowhere. All sizes divide, so every rank sends as many.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product

import torch
from plan_cases import pretended
from sharding_cases import einsum, layouts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from gpt2lab.benchmarks.sharding import Sent
from gpt2lab.sharding import partition
from gpt2lab.sharding.cost import Path, path
from gpt2lab.sharding.layout import Layout, fits, local_shape, places

MESH = {"x": 2, "y": 2}
RANKS = 4
EINSUMS = (
    *("ik,kj->ij", "bik,bkj->bij", "ki,kj->ij", "i,j->ij"),
    *("bti,io->bto", "bto,io->bti", "bti,bto->io", "bhtd,bhsd->bhts"),
)
SIZE = 8


@dataclass(frozen=True)
class Case:
    """An einsum and the layouts of its two operands."""

    text: str
    layouts: tuple[Layout, Layout]

    @property
    def terms(self) -> list[str]:
        """The indices of the operands and of the result."""
        return self.text.replace("->", ",").split(",")


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many random pairs; of the orders in which two axes cut one dimension only the one that DTensor can write."""
    pick, axes = random.Random(seed), list(MESH)
    plain = lambda one: all(list(cut) == sorted(cut) for cut in one.cuts)
    legal = {n: [one for one in layouts(n, axes) if plain(one)] for n in range(1, 5)}
    texts = [pick.choice(EINSUMS) for _ in range(count)]
    return [
        Case(t, tuple(pick.choice(legal[len(term)]) for term in t.split("->")[0].split(","))) for t in texts
    ]


def results(rule, given, shapes, out, mesh) -> dict[Layout, list[Path]]:
    """Every layout in which an operator's result can lie, and the cheapest changes of its inputs for that.

    `given` and `shapes` are the layouts and shapes of its inputs, `out` the shape of the result.
    """
    found: dict[Layout, list[Path]] = {}
    cost = lambda ways: sum(way.total(mesh)[0] for way in ways)
    for options in product([o for o in rule.options if o.free], repeat=len(mesh)):
        needs = [
            partition._joined(len(s), mesh, [o.inputs[n] for o in options]) for n, s in enumerate(shapes)
        ]
        made = partition._joined(len(out), mesh, [o.output for o in options])
        if all(fits(one, s, mesh) for one, s in zip((*needs, made), (*shapes, out), strict=True)):
            ways = [path(a, b, s, mesh) for a, b, s in zip(given, needs, shapes, strict=True)]
            found[made] = min(ways, found.get(made, ways), key=cost)
    return found


EQUAL = "the same layout, the same bytes"
OTHER = "the same bytes for DTensor's layout; another layout would cost less"
DIRECT = "fewer: an all-to-all, where DTensor on CPUs gathers all and keeps a part"
SHORTER = "fewer: the shortest path over both axes, where DTensor goes axis by axis"
REFUSED = "DTensor refuses the pair, depending on how Python hashes in this process; ours runs"
KINDS = (EQUAL, OTHER, DIRECT, SHORTER, REFUSED)


def kind(case: Case, lies: Layout | None, elements: int) -> str:
    """How DTensor's result (its layout, and the elements that all ranks sent) compares with what the algebra says.

    `lies` is None where DTensor refused.
    Raises ValueError where DTensor sent less, or where the algebra does not know the layout.
    """
    if lies is None:
        return REFUSED
    *shapes, out = ((SIZE,) * len(term) for term in case.terms)
    known = results(einsum(case.text), case.layouts, shapes, out, MESH)
    cost = {layout: sum(way.total(MESH)[0] for way in ways) for layout, ways in known.items()}
    if cost.get(lies, elements + 1) > elements:
        raise ValueError(f"{case}: DTensor sent {elements} elements for {lies}, and we {cost.get(lies)}.")
    if cost[lies] == elements:
        return EQUAL if elements == min(cost.values()) else OTHER
    steps = {step.kind for way in known[lies] for step in way.steps}
    return DIRECT if "all-to-all" in steps else SHORTER


def dtensor_placements(layout: Layout) -> list:
    """The same layout as DTensor writes it: for each axis of the mesh what it does."""
    on = [layout.on(axis) for axis in MESH]
    return [Replicate() if at is None else Partial() if at == "sum" else Shard(at) for at in on]


def layout_of(placed, dims: int) -> Layout:
    """A layout from DTensor's placements."""
    found = Layout.whole(dims)
    for axis, one in zip(MESH, placed, strict=True):
        if one.is_shard():
            found = found.cut(one.dim, (*found.cuts[one.dim], axis))
        elif one.is_partial():
            found = found.summed(axis, "sum")
    return found


def dtensor_results(chosen: list[Case]) -> list[tuple[Layout | None, int, int]]:
    """(layout of the result, elements that this rank sent, collectives) of each case, by DTensor.

    Where DTensor refuses, which it does before it sends the case's last message, the layout is None.
    """
    mesh = DeviceMesh("cpu", torch.arange(RANKS).view(*MESH.values()))
    found = []
    for case in chosen:
        *terms, out = case.terms
        parts = [
            DTensor.from_local(
                torch.ones(local_shape((SIZE,) * len(term), one, MESH, places(MESH)[0])),
                mesh,
                dtensor_placements(one),
                run_check=False,
            )
            for term, one in zip(terms, case.layouts, strict=True)
        ]
        with CommDebugMode() as counted, Sent(2) as sent:
            try:
                y = torch.einsum(case.text, *parts)
            except RuntimeError:
                found.append((None, 0, 0))
                continue
        found.append((layout_of(y.placements, len(out)), sent.elements, counted.get_total_counts()))
        assert counted.get_total_counts() == sum(sent.calls.values())
    return found


def count_kinds(chosen: list[Case]) -> Counter:
    """How many of the cases are of each kind."""
    with pretended(0, RANKS):
        found = dtensor_results(chosen)
    return Counter(
        kind(case, lies, RANKS * elements) for case, (lies, elements, _) in zip(chosen, found, strict=True)
    )
