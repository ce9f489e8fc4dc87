"""Which plan to train with: all that fit are predicted, and the best one is named, with its reasons.

    gpt2lab plan --config gpt2-xl --ranks 8 --memory 4GiB
    gpt2lab plan --config gpt2-xl --cluster h100x64 --rows 512 --explain
    gpt2lab plan --config mini --ranks 4 --run          train a few steps with it here

Times are predictions: of this machine after `gpt2lab calibrate`, else of a cluster by its data sheets.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..machine.options import Setting, add_options, within
from ..planner.choose import LEAST, PRUNED, Goal, in_bytes, in_seconds, parallelize
from ..planner.models import Network, asked_for, of_model
from ..planner.problem import CLUSTERS, PRECISIONS, find_cluster, size_in_bytes


def size(text: str) -> float:
    """The type of an option that is a size."""
    try:
        return size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


OPTIONS = {
    "ranks": Setting("most ranks (default: 4 here, else the cluster's devices)", within(1, 65_536)),
    "cluster": Setting(f"here, {', '.join(CLUSTERS)}, or a file such as clusters.toml", default="here"),
    "memory": Setting("bytes that a rank may hold, such as 4GiB", size),
    "seconds": Setting("longest time of a step", float, float("inf")),
    "least": Setting("what shall be least", default="time", choices=LEAST),
    "explain": Setting("what was left out, and why", bool),
    "json": Setting("print the answer as JSON", bool),
    "figure": Setting("write the plans' time and memory as a picture to this file"),
    "run": Setting("train three steps with it here, and compare", bool),
}


def add_arguments(parser) -> None:
    """The options of the command."""
    add_options(parser, of_model() | OPTIONS)


def run(args) -> int:
    """Print the plan, its reasons, and the plans that none beats in both time and memory."""
    from ..benchmarks.calibration import here

    if args.run and args.cluster not in ("here", "laptop"):
        raise ValueError(f"--run trains here, and {args.cluster} is elsewhere. Leave out --run or --cluster.")
    cluster = here() if args.cluster == "here" else find_cluster(args.cluster)
    cluster = cluster.with_devices(args.ranks or cluster.devices)
    args.precision = args.precision or ("float32" if cluster.cores else "bf16-mixed")
    if args.run and args.precision != "float32":
        raise ValueError(f"--run trains in float32, not in {args.precision}. Leave out --run or --precision.")
    config, numbers = asked_for(args), PRECISIONS[args.precision]
    if args.run and isinstance(config, Network):
        raise ValueError(
            f"--run trains what the package builds, and {args.config} is no GPT-2. Leave out --run."
        )
    goal = Goal(args.rows, args.length or config.n_positions, args.least, args.memory, args.seconds, *numbers)
    choice = parallelize(config, cluster, goal)
    if args.figure:
        from ..plots import style
        from ..plots.planner import front_figure

        style.save_figure(front_figure(choice), Path(args.figure))
    if args.json:
        print(json.dumps(as_json(choice), indent=1))
    else:
        print(answer(choice, args, cluster))
    return _trained_here(choice, config, goal) if args.run else 0


def answer(choice, args, cluster) -> str:
    """The plan, why, and the front as a table."""
    p = choice.prediction
    rows = f"{args.rows} row{'s' * (args.rows > 1)}"
    lines = [f"{choice.plan}   ({args.config}, {rows}, {args.precision}, {choice.tried} plans predicted)"]
    lines += [f"  {reason};" for reason in choice.reasons[:-1]] + [
        f"  {reason}." for reason in choice.reasons[-1:]
    ]
    lines += ["", "plans that none beats in both time and memory (predicted):"]
    lines += [
        f"  {in_seconds(f.prediction.seconds):>8}  {in_bytes(f.prediction.memory):>10}  {f.plan}"
        for f in choice.front
    ]
    if args.explain:
        lines += ["", "seconds of a step, by part:"]
        lines += [f"  {in_seconds(seconds):>8}  {name}" for name, seconds in p.parts.items() if seconds]
        lines += ["bytes sent a step by the busiest rank:"]
        lines += [f"  {in_bytes(size):>10}  along {axis}" for axis, size in p.sent.items()]
        lines += ["not chosen:"]
        lines += [
            f"  {count:6,}  {why}: {PRUNED[why]}" if why in PRUNED else f"  {count:6,}  {why}"
            for why, count in choice.rejected.items()
        ]
        lines += [f"cluster: {cluster.source}"]
    return "\n".join(lines)


def as_json(choice) -> dict:
    """The answer as numbers and texts."""
    one = lambda plan, p: {
        "plan": str(plan),
        "ranks": plan.world,
        "seconds": p.seconds,
        "memory": p.memory,
        "mfu": p.mfu,
    }
    p = choice.prediction
    best = one(choice.plan, p) | {"parts": p.parts, "sent": p.sent, "held": [asdict(held) for held in p.held]}
    front = [one(f.plan, f.prediction) for f in choice.front]
    return {"best": best, "reasons": choice.reasons, "front": front, "rejected": choice.rejected}


def _trained_here(choice, config, goal: Goal) -> int:
    """Three steps of the plan on live ranks: seconds and bytes beside the prediction."""
    from ..benchmarks.plans import measure

    seconds, most = measure(choice.plan, config, goal.rows, goal.length)
    p = choice.prediction
    print(f"\nhere (measured): {in_seconds(seconds)} a step, predicted {in_seconds(p.seconds)};")
    print(f"fullest rank {in_bytes(most)}, predicted {in_bytes(p.memory)}")
    return 0
