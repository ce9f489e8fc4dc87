"""Which plan to train with: all that fit are predicted, and the best one is named, with its reasons.

    gpt2lab plan --config gpt2-xl --ranks 8 --memory 4GiB
    gpt2lab plan --config gpt2-xl --cluster h100x64 --rows 512 --explain
    gpt2lab plan --config llama3-8b --cluster h100x64 --rows 512 --tokens 15T
    gpt2lab plan --config config.json --cluster mine.toml --cards 4 --between 10gbit
    gpt2lab plan --config mini --ranks 4 --run          train a few steps with it here

Times are predictions: of this machine after `gpt2lab calibrate`, else of a cluster by its data sheets.
"""

import argparse
import json
from dataclasses import replace
from functools import partial

from ..machine.options import Setting, positive, within
from ..model import PRESETS
from ..plan import Plan
from ..planner.choose import LEAST, Goal, in_bytes, in_seconds, parallelize
from ..planner.models import Transformer, model_typed, of_model
from ..planner.problem import CLUSTERS, PRECISIONS, Cluster, find_cluster, size_in_bytes
from ..planner.published_steps import SAID
from ..planner.space import FEW, PRUNED


def size(text: str, **how) -> float:
    """The type of an option that is a number with a unit; `how` `size_in_bytes` reads it."""
    try:
        return size_in_bytes(text, **how)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


THOUSANDS = {letter: 1000**power for power, letter in enumerate(["", *"kmbt"])}
count = partial(size, units=THOUSANDS, what="number of tokens. Use for example 2T or 300B")
OPTIONS = of_model() | {
    "ranks": Setting("most ranks (default: 4 here, else the cluster's devices)", within(1, 65_536)),
    "cluster": Setting(f"here, {', '.join(CLUSTERS)}, or a file such as clusters.toml", default="here"),
    "cards": Setting("GPUs of a machine, in place of the cluster's", positive),
    "between": Setting("what a machine sends to others a second, in place of the cluster's: 10gbit", size),
    "tokens": Setting("say how many days so many tokens take, such as 2T", count),
    "memory": Setting("bytes that a rank may hold, such as 4GiB", size),
    "seconds": Setting("longest time of a step", float, float("inf")),
    "least": Setting("what shall be least", default="time", choices=LEAST),
    "explain": Setting("what was left out, and why", bool),
    "json": Setting("print the answer as JSON", bool),
    "run": Setting("train three steps with it here, and compare", bool),
}


def run(args) -> None:
    """Print the plan, its reasons, and the plans that none beats in both time and memory."""
    from ..benchmarks.calibration import here

    if args.run and args.cluster not in ("here", "laptop"):
        raise ValueError(f"--run trains here, and {args.cluster} is elsewhere. Leave out --run or --cluster.")
    cluster = here() if args.cluster == "here" else find_cluster(args.cluster)
    cluster = wired(cluster.with_devices(args.ranks or cluster.devices), args.cards, args.between)
    args.precision = args.precision or ("float32" if cluster.cores else "bf16-mixed")
    if args.json and args.run:
        raise ValueError("--run prints its own lines, and --json is one table alone. Leave one of them out.")
    if args.explain and args.json:
        raise ValueError("--explain would change nothing: --json tells all. Leave it out.")
    if args.run and args.precision != "float32":
        raise ValueError(f"--run trains in float32, not in {args.precision}. Leave out --run or --precision.")
    config, numbers = model_typed(args), PRECISIONS[args.precision]
    if args.run and isinstance(config, Transformer):
        raise ValueError(f"--run trains GPT-2, and {args.config} is no GPT-2. Leave out --run.")
    args.length = args.length or config.n_positions
    goal = Goal(args.rows, args.length, args.least, args.memory, args.seconds, *numbers)
    choice = parallelize(config, cluster, goal)
    if args.json:
        said = as_json(choice)
        said["best"] |= pace(choice.prediction, args, choice.plan.world)
        print(json.dumps(said, indent=1))
    else:
        print(answer(choice, args, cluster, config))
    if args.run:
        _trained_here(choice, config, goal)


def wired(cluster: Cluster, cards: int | None, between: float | None) -> Cluster:
    """The cluster with so many cards in a machine, and so many bytes a second from machine to machine."""
    network = cluster.network
    node, wire = cards or network.node, network.between
    if between is not None and cluster.devices <= node:
        raise ValueError(
            f"--between would change nothing: {cluster.devices} ranks are on one machine. Leave it out."
        )
    if cards and between is None and (cluster.devices == 1 or not network.inside):
        raise ValueError("--cards would change nothing: all wires are alike. Leave it out, or add --between.")
    link = wire if between is None else replace(wire, bandwidth=between / node)
    return replace(cluster, network=replace(network, inside=network.inside or wire, between=link, node=node))


def launching_line(plan: Plan, config, args, cluster: Cluster) -> str:
    """The line that trains with the plan, on each of its machines, or why this package cannot."""
    if config != PRESETS.get(args.config):
        return f"not launched: this package builds {', '.join(PRESETS)} with their own sizes and positions"
    if args.precision.startswith("bf16-mixed") and not plan.zero:
        return (
            "not launched: this package has float32 masters beside bf16 only with ZeRO. Add zero=1 to this plan (one "
            "rank holds as much with it), or use --precision bf16"
        )
    kind = {"float32": "float32", "float64": "float64"}.get(args.precision, "bfloat16")
    said = f"-m gpt2lab train --config {args.config} --plan {plan} --batch {args.rows}"
    whole = " --no-chunked" * (plan.loss == "whole" and plan.tp == 1)
    said += f" --sequence {args.length} --dtype {kind}{whole}"
    if plan.world == 1:
        return f"launch: python {said}"
    each = min(plan.world, cluster.network.node)  # machine by machine, as the prediction has them
    nodes = -(-plan.world // each)
    rest = plan.world - each * (nodes - 1)
    last = f"\n    on the last machine: --nproc-per-node {rest}" if rest < each else ""
    many = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST0:29500"
    meet = many if nodes > 1 else "--standalone"
    # tensor parallelism on GPUs: kernels start in the order of their calls (parallel/tensor.py, _EnteringLinear)
    in_order = "CUDA_DEVICE_MAX_CONNECTIONS=1 " * (plan.tp > 1 and plan.zero < 3 and not cluster.cores)
    return f"launch: {in_order}torchrun {meet} --nproc-per-node {each} {said}{last}"


def pace(p, args, devices: int) -> dict[str, float]:
    """Tokens a second, the share of the peak, and the days that the tokens take that were asked for."""
    rate = args.rows * args.length / p.seconds
    found = {"tokens_a_second": rate, "tokens_a_second_and_rank": rate / devices, "mfu": p.mfu}
    return found | ({"days": args.tokens / rate / 86_400} if args.tokens else {})


def answer(choice, args, cluster, config) -> str:
    """The plan, why, and the front as a table."""
    p = choice.prediction
    rows = f"{args.rows} row{'s' * (args.rows > 1)}"
    lines = [f"{choice.plan}   ({args.config}, {rows}, {args.precision}, {choice.tried} plans predicted)"]
    speed = pace(p, args, choice.plan.world)
    line = f"{speed['tokens_a_second']:,.0f} tokens a second, {speed['tokens_a_second_and_rank']:,.0f} a rank"
    line += f", MFU {p.mfu:.1%} (attention counted whole, as PaLM does; causal: {p.causal:.1%})"
    line += f", {speed['days']:,.3g} days for {args.tokens:.3g} tokens" if args.tokens else ""
    lines += [f"  {line};"]
    lines += [f"  {reason};" for reason in choice.reasons]
    lines[-1] = lines[-1].removesuffix(";") + "."
    if config != PRESETS.get(args.config):
        lines += [
            "  computed: weights, bytes and operations of this model come from its sizes, not from a run."
        ]
    if getattr(config, "mlps", 1) > 1:
        lines += [
            f"  not tried: its {config.mlps} MLPs of a layer spread over ranks (ep); here each rank has all."
        ]
    lines += [f"  clock: {cluster.source if cluster.cores else SAID['clock']}."]
    lines += [f"  {launching_line(choice.plan, config, args, cluster)}"]
    few = "plans" if cluster.devices <= FEW else "of the plans predicted, those"
    lines += ["", f"{few} that none beats in both time and memory (predicted):"]
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
        more = {why: f": {said}" for why, said in PRUNED.items()}
        lines += [f"  {count:6,}  {why}{more.get(why, '')}" for why, count in choice.rejected.items()]
        lines += [f"cluster: {cluster.source}"]
    return "\n".join(lines)


def as_json(choice) -> dict:
    """The answer as numbers and texts."""
    numbers = ("seconds", "memory", "mfu")
    one = lambda plan, p: {"plan": str(plan), "ranks": plan.world} | {n: getattr(p, n) for n in numbers}
    p = choice.prediction
    stages = [{"stage": held.stage} | held.parts for held in p.held]
    best = one(choice.plan, p) | {"parts": p.parts, "sent": p.sent, "held": stages}
    front = [one(f.plan, f.prediction) for f in choice.front]
    return {"best": best, "reasons": choice.reasons, "front": front, "rejected": choice.rejected}


def _trained_here(choice, config, goal: Goal) -> None:
    """Three steps of the plan on live ranks: seconds and bytes beside the prediction."""
    from ..benchmarks.plans import measure

    seconds, most = measure(choice.plan, config, goal.rows, goal.length)
    p = choice.prediction
    print(f"\nhere (measured): {in_seconds(seconds)} a step, predicted {in_seconds(p.seconds)};")
    print(f"fullest rank {in_bytes(most)}, predicted {in_bytes(p.memory)}")
