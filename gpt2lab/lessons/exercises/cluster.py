"""Checkers of lesson 19: what crosses between machines, an all-reduce of two levels, work that is kept, spares."""

import math
from dataclasses import replace
from numbers import Integral

import numpy as np

from ...planner.failures import LongJob, goodput
from ...ranks import comm
from ...ranks.mesh import Mesh
from ..labs.node_traffic import BETWEEN, INSIDE, by_class
from . import Task, returned, scored
from .differences import ANY, Most, listed, named, randoms
from .meshes import drawn_sizes
from .ranked import ranked, start_counting


def _crossing(sizes: dict[str, int], machine: int) -> set[str]:
    """The axes of which some group is on two machines."""
    machines = np.arange(math.prod(sizes.values())).reshape(*sizes.values()) // machine
    return {name for dim, name in enumerate(sizes) if (machines.min(dim) != machines.max(dim)).any()}


def _machines(chance) -> tuple[dict[str, int], int]:
    """A mesh and machines; often neither divides the other."""
    return drawn_sizes(chance), chance.choice((1, 2, 3, 4, 6, 8, 16))


crosses = Task(
    _crossing,
    shown=[
        ({"pp": 2, "dp": 2, "tp": 2}, 4),
        ({"pp": 2, "dp": 2, "tp": 4}, 8),
        ({"dp": 4, "cp": 2, "tp": 2}, 8),
        ({"dp": 2, "tp": 16}, 8),
        ({"dp": 8, "tp": 1}, 8),
        ({"pp": 4, "dp": 2, "tp": 1}, 1),
        ({"pp": 1, "dp": 4, "tp": 2}, 4),
        ({"dp": 2, "tp": 3}, 4),
        ({"dp": 4, "tp": 6}, 8),
    ],
    what="{}, machines of {}",
    drawn=_machines,
)
"""Exercise: the axes of a mesh along which messages leave a machine."""


def _on_two_levels(axis, answer, rows: int) -> tuple:
    mesh, (x,) = Mesh(dp=2, tp=2), randoms(axis.rank, (rows, 2))
    start_counting()
    got = answer(x, mesh["tp"], mesh["dp"])
    traffic = by_class(comm.log, axis.rank, 2).items()
    sent = {place: sum(size for (_, kind), size in traffic if kind == place) for place in (INSIDE, BETWEEN)}
    calls = {e.op for e in comm.log if any(kind == BETWEEN for _, kind in by_class([e], axis.rank, 2))}
    return got, sent[BETWEEN], x, sent[INSIDE], calls


def _summed(rank: int, rows: int) -> tuple:
    terms = [x for r in range(4) for x in randoms(r, (rows, 2))]
    return sum(terms), 8 * rows, terms[rank], Most(16 * rows), ANY


two_levels = ranked(
    ("the sum", "bytes sent to the other machine", "x as it was given", "bytes sent inside", "calls"),
    _summed,
    _on_two_levels,
    4,
    shown=[(6,), (8,)],
    what="{} rows",
    drawn=lambda chance: (2 * chance.randint(5, 20),),
    count=1,
)
"""Exercise: an all-reduce over machines, judged on four live ranks by its sum and by the bytes that cross."""


def _kept(n: int, each: float, save: float, restart: float) -> float:
    failures = each / n
    return 1 / (1 + math.sqrt(2 * save / failures) + restart / failures)


kept = Task(
    _kept,
    shown=[(1000, 5000.0, 0.02, 0.1), (2048, 6300.0, 1 / 60, 0.25)],
    what="{} machines, each fails every {:g} h, saves of {:.3g} h, restarts of {:g} h",
    drawn=lambda chance: (
        chance.randint(10, 4000),
        100.0 * chance.randint(20, 99),
        chance.randint(1, 20) / 100,
        chance.randint(1, 20) / 20,
    ),
    tolerance=1e-6,
)
"""Exercise: the share of work that is kept at the best interval, to first order."""


JOBS = (
    LongJob(2048, 6345.0, 12.0, 1 / 60, 0.25, 1.0),  # Llama 3's failures; saves and restarts assumed
    LongJob(512, 1000.0, 24.0, 0.01, 0.1, 1.0),  # needs three times the spares of the others
    LongJob(64, 500.0, 48.0, 0.2, 0.2, 1.0),
)
"""What the puzzle is judged on: machines, hours between two failures of each, hours of a repair, a save, a restart."""
BAR, BEST = 24.0, 22.5  # one number of spares for all loses 25.2 or more
LEAST = {"spares that stand idle": 6.2, "waiting for repairs": 0.5, "saves, restarts and repeated work": 15.9}
"""What the best numbers of spares, at Young's interval, lose by reason."""


def spares_and_saves(answer) -> str:
    """Puzzle: of a number of machines how many stand by, and how often to save: least of all machines' work lost."""
    parts = [_lost(answer, job) for job in JOBS]
    mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    total = round(sum(mean.values()), 1)
    most = max(mean, key=lambda name: mean[name] - LEAST[name])
    assert total <= BAR, f"{total} % of the work are lost, at most {BAR:g} pass. Too much goes to {most}."
    return scored(total, "% of the machines' work lost, in the mean of three clusters", bar=BAR, best=BEST)


def _lost(answer, job: LongJob) -> dict[str, float]:
    """What is lost on one cluster, in percent, by reason: simulated lives, always the same ones."""
    got = listed(returned(answer(job.machines, job.each, job.repair, job.save, job.restart)))
    spares, interval = named("spares", "hours between two saves")(got, f"{job.machines} machines").values()
    assert isinstance(spares, Integral) and 0 <= spares < job.machines, (
        f"of {job.machines} machines {spares!r} cannot stand by: the first of the two is a whole number of spares"
    )
    work = job.machines - spares
    assert 0 < interval < job.each / work, (
        f"a save every {interval:.3g} hours is no help: one of {work} machines fails every {job.each / work:.3g} hours"
    )
    one, share = replace(job, machines=work, interval=interval), 100 * work / job.machines
    kept, never_waits = (
        share * sum(goodput(one, "hot spare", 4000.0, n, seed) for seed in range(3)) / 3
        for n in (spares, job.machines)
    )
    return {
        "spares that stand idle": 100 - share,
        "waiting for repairs": never_waits - kept,
        "saves, restarts and repeated work": share - never_waits,
    }
