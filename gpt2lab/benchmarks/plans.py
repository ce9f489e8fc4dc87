"""Every plan of 1, 2 and 4 ranks that a small model allows: predicted seconds and bytes of a step beside measured.

    gpt2lab calibrate --again && gpt2lab bench plans      about five minutes on two quiet cores

Plans take turns only once, so let nothing else run. Every plan has processes of its own, so that none finds memory that
another one left. What is measured is written as JSON, which lesson 17 draws; predictions are made when it is read.
"""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..machine.speed import machine
from ..model import PRESETS
from ..plan import Plan
from ..planner.cost import predict
from ..planner.space import candidates
from . import race
from .calibration import cluster_of, known, plan_steps
from .race import Heat


def run(args) -> dict[str, float]:
    """Measure, print how well the predictions hold, and write the table; seconds by plan."""
    from ..plots.planner import predicted_and_measured

    folder, config = Path(args.out), PRESETS[args.config]
    folder.mkdir(parents=True, exist_ok=True)
    record = {"config": args.config, "rows": args.rows, "length": args.length, "machine": machine()}
    record |= {"calibration": known(), "plans": []}
    plans = some_plans(config, cluster_of(record["calibration"]), args.rows, args.length, args.plans)
    for plan in tqdm(plans, desc="plans"):
        record["plans"].append([str(plan), *measure(plan, config, args.rows, args.length, args.rounds)])
        (folder / "plans.json").write_text(json.dumps(record) + "\n")  # what is measured so far is not lost
    rows = compared(record)
    for what, number in agreement(rows).items():
        print(f"{what}: {number}")
    race.save_race(args.out, "plans", record, predicted_and_measured(rows))
    return {row["plan"]: row["measured_seconds"] for row in rows}


def some_plans(config, cluster, rows: int, length: int, count: int) -> list[Plan]:
    """About `count` plans of 1, 2 and 4 ranks, evenly out of all candidates, grouped by ranks."""
    every = [p for p in candidates(config, cluster, rows, length) if p.world in (1, 2, 4)]
    return [every[i * len(every) // count] for i in range(count)] if count < len(every) else every


def compared(record: dict) -> list[dict]:
    """A row for each plan of a record: its text and ranks, seconds and bytes as predicted today and as measured."""
    config, cluster, found = PRESETS[record["config"]], cluster_of(record["calibration"]), []
    for text, seconds, size in record["plans"]:
        plan = Plan.parse(text)
        said = predict(plan, config, record["rows"], record["length"], cluster)
        row = {"plan": text, "ranks": plan.world, "measured_seconds": seconds, "measured_bytes": size}
        found.append(row | {"predicted_seconds": said.seconds, "predicted_bytes": said.memory})
    return found


def measure(plan: Plan, config, rows: int, length: int, steps: int = 3) -> tuple[float, int]:
    """(seconds, bytes) of a step of one plan here, of the slowest and the fullest rank."""
    asked = Namespace(plan=str(plan), config=config, rows=rows, length=length)
    found = race.race(Heat("{}", plan_steps, asked, plan.world), steps, warm_up=1)
    return min(found.times["step"].trials), max(facts["step"]["bytes held"] for facts in found.facts)


def agreement(rows: list[dict]) -> dict[str, float]:
    """Rank correlation of the times (Spearman), errors, and what the chosen plan loses to the best measured.

    One common factor apart: what is left of the errors when a slower or faster day of the whole machine is not counted.
    """
    column = lambda name: np.array([row[name] for row in rows])
    predicted, measured = column("predicted_seconds"), column("measured_seconds")
    sizes = column("predicted_bytes") / column("measured_bytes") - 1
    ratio = predicted / measured
    order = [np.argsort(np.argsort(times)) for times in (predicted, measured)]
    found = {
        "rank correlation": np.corrcoef(*order)[0, 1],
        "median error of the time": np.median(np.abs(ratio - 1)),
        "median error, one common factor apart": np.median(np.abs(ratio / np.median(ratio) - 1)),
        "share with memory within 5 %": np.mean(np.abs(sizes) <= 0.05),
        "largest error of the memory": np.abs(sizes).max(),
        "chosen over best measured": measured[predicted.argmin()] / measured.min(),
    }
    return {"plans": len(rows)} | {what: round(float(number), 3) for what, number in found.items()}
