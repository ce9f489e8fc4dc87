"""The library's collectives and our algorithms over a sweep of sizes, with the alpha-beta model fitted to them.

All calls and sizes take turns, so that a machine that is busy for a moment does not bend the curve in one place. The
model is fitted to every other size and tested on those it has not seen. Bus bandwidth is nccl-tests' definition. With
more ranks than cores the times contain the machine's scheduler.
"""

import contextlib
import ctypes
from argparse import Namespace
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from ..algorithms import ALL_REDUCE
from ..machine import links
from ..machine.timing import Times
from ..planner.fit import fit
from ..ranks import comm
from ..ranks.mesh import Mesh
from . import race
from .race import Contest, Heat
from .races import RACES

LIBRARY = {
    "all_reduce": lambda x, axis: comm.all_reduce(x, axis),
    "reduce_scatter": lambda x, axis: comm.reduce_scatter_flat(x, axis),
    "all_gather": lambda x, axis: comm.gather_flat(x[: x.numel() // axis.size], axis),
    "broadcast": lambda x, axis: comm.broadcast(x, axis),
}
SIZES = RACES["collectives"].options["sizes"]  # 4 KB to 16 MB


def run(args) -> dict[str, float]:
    """Print times, bus bandwidths and ratios to the library's all-reduce, then the fits; save figure and numbers."""
    from ..plots.collectives import sweep_figure

    rows = sweep(args.ranks, sorted(args.sizes), [*LIBRARY, *args.ours], args.rounds, show=print)
    models = [m for what in ["all_reduce", *args.ours] for n in args.ranks if (m := model(rows, what, n))]
    print(report(models))
    fits = [m | {"fit": vars(m["fit"]) | {"link": vars(m["fit"].link)}} for m in models]
    race.save_race(args.out, "collectives", {"rows": rows, "models": fits}, sweep_figure(rows, models))
    return {named(r["what"], r["ranks"], r["bytes"]): r["seconds"] for r in rows}


def named(what: str, n: int, size: int) -> str:
    """The name of a row."""
    return f"{what}, {n} ranks, {size / 1024:g} KiB"


def keep_pages() -> None:
    """Let results use memory that this process has had before, where the C library has a setting for it (glibc).

    It gives larger blocks back to the system at once, from a size that changes while a program runs; every result is a
    new tensor, so the first touch of its pages would be timed as well, for some sizes and not for others.
    """
    with contextlib.suppress(OSError, AttributeError):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; 32 MiB is the most that is allowed
            ctypes.CDLL(None).mallopt(option, 1 << 25)


def contest(rank: int, world_size: int, args) -> Contest:
    """Every call with every size, each just before its turn once to warm up."""
    keep_pages()
    axis, ways = Mesh(dp=world_size)["dp"], {}
    tensors = {size: torch.ones(size // 4) for size, _ in args.calls}
    for size, what in args.calls:
        call = LIBRARY.get(what) or ALL_REDUCE[what].all_reduce
        ways[named(what, world_size, size)] = partial(call, tensors[size], axis)
    return Contest(ways, before=lambda way: ways[way]())


def sweep(ranks: list[int], sizes: list[int], what: list[str], trials: int, show=None) -> list[dict]:
    """A row for each number of ranks, size and call, with a progress bar; `show` gets the table as text."""
    rows, calls = [], list(product(sizes, what))
    for n in tqdm(ranks, desc="collectives", leave=False, disable=None):
        against = {named(w, n, size): (named("all_reduce", n, size),) for size, w in calls if w in ALL_REDUCE}
        work = {named(w, n, size): (bus(w, n, size, 1.0) / 1e9, "GB/s of bus") for size, w in calls}
        heat = Heat("{}", contest, Namespace(calls=calls), n, against, work)
        found = race.race(heat, trials, warm_up=0)
        rows += [summary_row(w, n, size, t) for (size, w), t in zip(calls, found.times.values(), strict=True)]
        if show:
            show(heat.rows(found))
    return rows


def summary_row(what: str, n: int, size: int, times: Times) -> dict:
    """One row: median seconds, quartiles, bus bandwidth."""
    row = {"what": what, "ranks": n, "bytes": size, "seconds": times.median}
    return row | {"low": times.low, "high": times.high, "bus": bus(what, n, size, times.median)}


def bus(what: str, n: int, size: int, seconds: float) -> float:
    """The bus bandwidth of a call that takes so long; our algorithms all reduce."""
    return links.bandwidths(what if what in LIBRARY else "all_reduce", n, size, seconds)[1]


def cost(what: str, n: int, size: float) -> tuple[float, float]:
    """(messages, bytes) that follow one another: by the algorithm's formula; the library counts as a ring."""
    return links.longest_path("ring" if what == "all_reduce" else what, n, size)


def model(rows: list[dict], what: str, n: int) -> dict | None:
    """Fit the model to every other size, predict the others; None with fewer than five sizes, or without a formula."""
    mine = sorted((r for r in rows if (r["what"], r["ranks"]) == (what, n)), key=lambda row: row["bytes"])
    if len(mine) < 5 or what not in {"all_reduce", *links.ALL_REDUCE}:
        return None
    fitted = fit([(*cost(what, n, row["bytes"]), row["seconds"]) for row in mine[::2]])
    predicted = {row["bytes"]: fitted.link.time(*reversed(cost(what, n, row["bytes"]))) for row in mine}
    unseen = {row["bytes"]: predicted[row["bytes"]] / row["seconds"] for row in mine[1::2]}
    found = {"what": what, "ranks": n, "fit": fitted, "predicted": predicted}
    return found | {"predicted over measured": unseen}


def report(models: list[dict]) -> str:
    """The fits, and how well they predict sizes that they have not seen."""
    lines = []
    for m in models:
        ratios = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in m["predicted over measured"].items())
        lines.append(f"{m['what']}, {m['ranks']} ranks (measured, fitted): {m['fit']}")
        lines.append(f"  predicted / measured of the sizes not fitted: {ratios}")
    return "\n".join(lines)
