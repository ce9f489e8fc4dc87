"""The library's collectives and our algorithms over a sweep of sizes, with the alpha-beta model fitted to them.

Every figure is the median of several trials; a trial lasts from the last rank's arrival to the last rank's end. The
model is fitted to every other size and tested on those it has not seen. Bus bandwidth is nccl-tests' definition.
With more ranks than cores the times contain the machine's scheduler.
"""

import json
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ..algorithms import ALL_REDUCE
from ..planner import links
from ..planner.fit import fit
from ..ranks import comm
from ..ranks.launch import Ranks
from ..ranks.mesh import Mesh

LIBRARY = {
    "all_reduce": lambda x, axis: comm.all_reduce(x, axis),
    "reduce_scatter": lambda x, axis: comm.reduce_scatter_flat(x, axis),
    "all_gather": lambda x, axis: comm.gather_flat(x[: x.numel() // axis.size], axis),
    "broadcast": lambda x, axis: comm.broadcast(x, axis),
}
SIZES = [1 << bits for bits in range(12, 25, 2)]  # 4 KB to 16 MB


def add_arguments(parser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes (default 4 KB to 16 MB)")
    parser.add_argument("--trials", type=int, default=7, help="trials of each (default 7)")
    parser.add_argument(
        "--ours", nargs="*", default=["ring", "rabenseifner", "tree"], help=", ".join(ALL_REDUCE)
    )
    parser.add_argument("--out", default="runs/collectives", help="folder for the figure and the JSON file")


def measure(rank: int, world_size: int, what: str, size: int, trials: int) -> list[tuple[float, float]]:
    """(start, end) of every trial on this rank, after two calls to warm up."""
    axis = Mesh(dp=world_size)["dp"]
    call = LIBRARY.get(what) or ALL_REDUCE[what].all_reduce
    x, found = torch.ones(size // 4), []
    for trial in range(trials + 2):
        comm.barrier(axis)
        start = time.perf_counter()
        call(x, axis)
        if trial >= 2:
            found.append((start, time.perf_counter()))
    return found


def summary(what: str, n: int, size: int, per_rank: list) -> dict:
    """One row: median seconds, spread between the quartiles, bus bandwidth."""
    trials = [max(e for _, e in trial) - max(s for s, _ in trial) for trial in zip(*per_rank, strict=True)]
    middle = statistics.median(trials)
    low, _, high = statistics.quantiles(trials, n=4) if len(trials) > 1 else [middle] * 3
    op = what if what in LIBRARY else "all_reduce"
    bus = links.bandwidths(op, n, size, middle)[1]
    return {"what": what, "ranks": n, "bytes": size, "seconds": middle, "low": low, "high": high, "bus": bus}


def sweep(ranks: list[int], sizes: list[int], what: list[str], trials: int) -> list[dict]:
    """All rows, with a progress bar."""
    rows = []
    with tqdm(total=len(ranks) * len(sizes) * len(what), desc="collectives", leave=False) as bar:
        for n in ranks:
            with Ranks(n, echo=False, timeout=60) as pool:
                for size in sizes:
                    for name in what:
                        bar.set_postfix_str(f"{name}, {n} ranks, {size} bytes")
                        rows.append(summary(name, n, size, pool.run(measure, name, size, trials)))
                        bar.update()
    return rows


def sent(n: int, size: int) -> tuple[int, float]:
    """(messages, bytes) that a rank sends in a ring all-reduce: the two numbers the model multiplies."""
    return 2 * (n - 1), 2 * (n - 1) / n * size


def model(rows: list[dict], what: str, n: int) -> dict | None:
    """Fit the model to every other size, predict the others; None with fewer than five sizes."""
    mine = [row for row in rows if row["what"] == what and row["ranks"] == n]
    if len(mine) < 5:
        return None
    fitted = fit([(*sent(n, row["bytes"]), row["seconds"]) for row in mine[::2]])
    unseen = {row["bytes"]: fitted.predict(*sent(n, row["bytes"])) / row["seconds"] for row in mine[1::2]}
    return {"what": what, "ranks": n, "fit": fitted, "predicted over measured": unseen}


def table(rows: list[dict]) -> str:
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
        link, seen = m["fit"].link, m["predicted over measured"]
        ratios = ", ".join(f"{size}: {ratio:.2f}" for size, ratio in seen.items())
        lines.append(f"{m['what']}, {m['ranks']} ranks (measured, fitted): {m['fit']}")
        lines.append(f"  predicted / measured of the sizes not fitted: {ratios}")
        if link.latency:
            size = links.crossing(1024, link) / 1e6
            lines.append(
                f"  by formula, 1024 such ranks: the ring beats the binomial tree from {size:.1f} MB on"
            )
    return "\n".join(lines)


def run(args) -> int:
    """Print the table and the fits; save the figure and the JSON file."""
    from ..plots.collectives import sweep_figure
    from ..plots.style import save

    unknown = set(args.ours) - set(ALL_REDUCE)
    if unknown:
        raise ValueError(f"no algorithm is called {', '.join(unknown)}. Choose from {', '.join(ALL_REDUCE)}.")
    rows = sweep(args.ranks, sorted(args.sizes), [*LIBRARY, *args.ours], args.trials)
    models = [m for what in ["all_reduce", *args.ours] for n in args.ranks if (m := model(rows, what, n))]
    print(table(rows))
    print(report([m for m in models if m["what"] in ("all_reduce", "ring")]))
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    fits = [m | {"fit": vars(m["fit"]) | {"link": vars(m["fit"].link)}} for m in models]
    (folder / "collectives.json").write_text(json.dumps({"rows": rows, "models": fits}, indent=2))
    path = save(sweep_figure(rows, models), folder / "collectives.png")
    print(f"saved {path} and {folder / 'collectives.json'}")
    return 0
