"""Checkers of lesson 19: what crosses between machines, an all-reduce of two levels, work that is kept, spares."""

import math
from dataclasses import replace

import torch

from ...planner.failures import LongJob, goodput
from . import Task, live, refuse, returned, scored


def _crossing(sizes: dict[str, int], machine: int) -> set[str]:
    """The axes of which some group has two neighbours on two machines."""
    world = stride = math.prod(sizes.values())
    found = set()
    for name, size in sizes.items():
        stride //= size
        firsts = [rank for rank in range(world) if rank // stride % size < size - 1]
        if any(rank // machine != (rank + stride) // machine for rank in firsts):
            found.add(name)
    return found


def _machines(chance) -> tuple[dict[str, int], int]:
    """A mesh and machines; often neither divides the other."""
    names = chance.sample(("pp", "dp", "cp", "tp"), chance.randint(1, 4))
    sizes = {axis: chance.choice((1, 2, 2, 3, 4, 6)) for axis in names}
    return sizes, chance.choice((1, 2, 3, 4, 6, 8, 16))


crosses = Task(
    None,
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
    like=lambda got, words: set(got),
    rules=lambda got, sizes, machine: {
        **{
            f"{name} has one rank, which sends nothing to itself": name in got and size == 1
            for name, size in sizes.items()
        },
        **{
            f"messages of {name} leave a machine, and yours says that they stay": name not in got
            for name in sorted(_crossing(sizes, machine))
        },
        f"all ranks of a {', '.join(sorted(got - _crossing(sizes, machine)))} group share a machine, and yours says "
        "that some do not": got - _crossing(sizes, machine),
    },
)
"""Exercise: the axes of a mesh along which messages leave a machine."""


def two_levels(answer) -> None:
    """Exercise: an all-reduce over machines, judged on four live ranks by its sum and by the bytes that cross."""
    for rows in (6, 8):
        for found in live(_two_levels, answer, rows, ranks=4):
            _summed_on_two_levels(rows, returned(found))


def _summed_on_two_levels(rows, found) -> None:
    right, shape, crossed, least, same, calls = found
    assert shape, f"x has {rows} rows: the result has another shape than x"
    assert right, "the result is not the sum over all four ranks"
    assert same, "your function changed x. Return a new tensor"
    assert crossed <= least, (
        f"the sum is right, but a rank sends {crossed} bytes in {calls} to the other machine; {least} are enough. "
        "What is smaller after a reduce-scatter?"
    )
    assert crossed >= least, (
        f"the sum is right, but only {crossed} bytes were counted to the other machine, and it takes {least}: did "
        "some go past comm's tensors, or lose digits?"
    )


def _chances(seed: int, ranks: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 * seed + rank) for rank in range(ranks)]


def _two_levels(rank, world_size, answer, rows):
    from ...ranks import comm
    from ...ranks.mesh import Mesh
    from ...ranks.node_traffic import BETWEEN, by_class

    mesh = Mesh(dp=2, tp=2)
    every = [torch.randint(2**20, (rows, 2), generator=chance).double() for chance in _chances(rows, 4)]
    x, before = every[rank].clone(), every[rank]
    comm.clear_log()
    got = answer(x, mesh["tp"], mesh["dp"])
    if got is None:
        return None
    out = {e.op for e in comm.log if any(kind == BETWEEN for _, kind in by_class([e], rank, 2))}
    crossed = sum(size for (_, kind), size in by_class(comm.log, rank, 2).items() if kind == BETWEEN)
    shape = tuple(got.shape) == (rows, 2)
    right = shape and bool(torch.equal(got, sum(every)))
    return right, shape, crossed, rows * 8, bool(torch.equal(x, before)), ", ".join(sorted(out))


def _kept(n: int, each: float, save: float, restart: float) -> float:
    failures = each / n
    return 1 / (1 + math.sqrt(2 * save / failures) + restart / failures)


def _dearer(answer, n: int, each: float, save: float, restart: float) -> float:
    one = returned(answer(n, each, save, restart))
    refuse(
        "",
        {
            f"a share of work is at most 1, not {one:.3g}. Did you add what is lost, instead of dividing?": one
            > 1,
            "four times as many machines fail four times as often": answer(4 * n, each, save, restart) >= one,
            "a longer restart loses more": answer(n, each, save, 10 * restart) >= one,
        },
    )
    return one


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
    call=_dearer,
    tolerance=1e-6,
)
"""Exercise: the share of work that is kept at the best interval, to first order."""


JOBS = (
    LongJob(2048, 6345.0, 12.0, 1 / 60, 0.25, 1.0),  # Llama 3's failures; saves and restarts assumed
    LongJob(512, 1000.0, 24.0, 0.01, 0.1, 1.0),  # needs three times the spares of the others
    LongJob(64, 500.0, 48.0, 0.2, 0.2, 1.0),
)
"""What the puzzle is judged on: machines, hours between two failures of each, hours of a repair, a save, a restart."""
BAR, BEST = (
    24.0,
    22.5,
)  # the best numbers of spares at Young's interval; one number for all loses 25.2 or more


def spares_and_saves(answer) -> str:
    """Puzzle: of a number of machines how many stand by, and how often to save: least of all machines' work lost."""
    parts = [_lost(answer, job) for job in JOBS]
    mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    total = round(sum(mean.values()), 1)
    most = max(mean, key=mean.get)
    assert total <= BAR, f"{total} % of the work are lost, at most {BAR:g} pass. Most of it goes to {most}."
    return scored(total, "% of the machines' work lost, in the mean of three clusters", bar=BAR, best=BEST)


def _lost(answer, job: LongJob) -> dict[str, float]:
    """What is lost on one cluster, in percent, by reason: simulated lives, always the same ones."""
    got = returned(answer(job.machines, job.each, job.repair, job.save, job.restart))
    spares, interval = got
    assert isinstance(spares, int) and 0 <= spares < job.machines, (
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
