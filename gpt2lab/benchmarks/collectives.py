"""The library's collectives and our algorithms over a sweep of sizes, with the alpha-beta model fitted to them.

Every figure is the median of several trials; a trial lasts from the last rank's arrival to the last rank's end. Trials
go round: each of all calls and sizes once, then all of them again, so that a machine that is busy for a moment does
not bend the curve in one place. The model is fitted to every other size and tested on those it has not seen. Bus
bandwidth is nccl-tests' definition. With more ranks than cores the times contain the machine's scheduler.
"""

import contextlib
import ctypes
from functools import partial

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
    """Print the table and the fits; save the figure and the JSON file."""
    from ..plots.collectives import sweep_figure

    rows = sweep(args.ranks, sorted(args.sizes), [*LIBRARY, *args.ours], args.rounds)
    models = [m for what in ["all_reduce", *args.ours] for n in args.ranks if (m := model(rows, what, n))]
    print(rows_as_text(rows))
    print(report(models))
    fits = [m | {"fit": vars(m["fit"]) | {"link": vars(m["fit"].link)}} for m in models]
    race.save_race(args.out, "collectives", {"rows": rows, "models": fits}, sweep_figure(rows, models))
    return {f"{r['what']}, {r['ranks']} ranks, {r['bytes'] >> 10} KiB": r["seconds"] for r in rows}


def keep_pages() -> None:
    """Let results use memory that this process has had before, where the C library has a setting for it (glibc).

    It gives larger blocks back to the system at once, from a size that changes while a program runs; every result is a
    new tensor, so the first touch of its pages would be timed as well, for some sizes and not for others.
    """
    with contextlib.suppress(OSError, AttributeError):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; 32 MiB is the most that is allowed
            ctypes.CDLL(None).mallopt(option, 1 << 25)


def contest(rank: int, world_size: int, what: list[str], sizes: list[int]) -> Contest:
    """Every call with every size, each just before its turn once to warm up; ways are (name, bytes)."""
    keep_pages()
    axis = Mesh(dp=world_size)["dp"]
    ways = {}
    for size in sizes:
        x = torch.ones(size // 4)
        for name in what:
            call = LIBRARY.get(name) or ALL_REDUCE[name].all_reduce
            ways[name, size] = partial(call, x, axis)
    return Contest(ways, before=lambda way: ways[way]())


def summary_row(what: str, n: int, size: int, times: Times) -> dict:
    """One row: median seconds, quartiles, bus bandwidth."""
    op = what if what in LIBRARY else "all_reduce"
    bus = links.bandwidths(op, n, size, times.median)[1]
    row = {"what": what, "ranks": n, "bytes": size, "seconds": times.median}
    return row | {"low": times.low, "high": times.high, "bus": bus}


def sweep(ranks: list[int], sizes: list[int], what: list[str], trials: int) -> list[dict]:
    """All rows, with a progress bar in a terminal."""
    rows = []
    for n in tqdm(ranks, desc="collectives", leave=False, disable=None):
        found = race.race(Heat("{}", contest, (what, sizes), n), trials, warm_up=0)
        rows += [summary_row(name, n, size, times) for (name, size), times in found.times.items()]
    return rows


def cost(what: str, n: int, size: float) -> tuple[float, float]:
    """(messages, bytes) that follow one another: by the algorithm's formula; the library counts as a ring."""
    return links.longest_path("ring" if what == "all_reduce" else what, n, size)


def model(rows: list[dict], what: str, n: int) -> dict | None:
    """Fit the model to every other size, predict the others; None with fewer than five sizes, or without a formula."""
    mine = sorted((r for r in rows if (r["what"], r["ranks"]) == (what, n)), key=lambda row: row["bytes"])
    if len(mine) < 5 or what not in {"all_reduce", *links.ALL_REDUCE}:
        return None
    fitted = fit([(*cost(what, n, row["bytes"]), row["seconds"]) for row in mine[::2]])
    predicted = {row["bytes"]: fitted.predict(*cost(what, n, row["bytes"])) for row in mine}
    unseen = {row["bytes"]: predicted[row["bytes"]] / row["seconds"] for row in mine[1::2]}
    found = {"what": what, "ranks": n, "fit": fitted, "predicted": predicted}
    return found | {"predicted over measured": unseen}


def rows_as_text(rows: list[dict]) -> str:
    """All rows as text; the ratio is to the library's all-reduce at the same size (below 1: faster)."""
    base = {(r["ranks"], r["bytes"]): r["seconds"] for r in rows if r["what"] == "all_reduce"}
    lines = [
        f"{'ranks':>5} {'bytes':>10} {'what':20}{'median ms':>10} {'quartiles':>17} {'bus GB/s':>9} {'ratio':>6}"
    ]
    for r in rows:
        ratio = "" if r["what"] in LIBRARY else f"{r['seconds'] / base[r['ranks'], r['bytes']]:.2f}"
        spread = f"{r['low'] * 1e3:.2f} .. {r['high'] * 1e3:.2f}"
        first = f"{r['ranks']:5} {r['bytes']:10} {r['what']:20}{r['seconds'] * 1e3:10.2f} {spread:>17}"
        lines.append(f"{first} {r['bus'] / 1e9:9.2f} {ratio:>6}")
    return "\n".join(lines)


def report(models: list[dict]) -> str:
    """The fits, how well they predict sizes that they have not seen, and what they say of 1024 ranks."""
    lines = []
    for m in models:
        ratios = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in m["predicted over measured"].items())
        lines.append(f"{m['what']}, {m['ranks']} ranks (measured, fitted): {m['fit']}")
        lines.append(f"  predicted / measured of the sizes not fitted: {ratios}")
        if m["what"] == "ring":
            lines += [f"  {line}" for line in at_scale(m["fit"].link)]
    return "\n".join(lines)


def at_scale(link: links.Link, n: int = 1024) -> list[str]:
    """What ring, tree and Rabenseifner would take over n ranks, all joined by such a link, in milliseconds."""
    lines = [f"by formula, {n} ranks on such links: the ring beats the tree from "]
    lines[0] += f"{links.crossing(n, link) / 1e6:.1f} MB on"
    for size in (1 << 12, 1 << 20, 1 << 24, 1 << 30):
        times = [
            (name, links.all_reduce_time(name, n, size, link)) for name in ("ring", "tree", "rabenseifner")
        ]
        lines.append(f"{size:11} bytes: " + ", ".join(f"{name} {1e3 * t:,.1f} ms" for name, t in times))
    return lines
