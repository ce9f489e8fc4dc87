"""Time something against a rival in the same run. Each benchmark prints a table of medians and ratios.

    gpt2lab bench step          one serial step against transformers, and what each switch for speed gives
    gpt2lab bench generate      tokens a second with and without cache, against transformers
    gpt2lab bench launch        how long live ranks take to start
    gpt2lab bench transport     shared memory against gloo on the same ranks
    gpt2lab bench collectives   our algorithms against the library's
    gpt2lab bench data          data parallel and ZeRO against DDP and fully_shard
    gpt2lab bench tensor        tensor parallel against DTensor
    gpt2lab bench pipeline      our engine against torch.distributed.pipelining
    gpt2lab bench context       sequence splitting against serial attention and PyTorch's ring
    gpt2lab bench tasks         an iteration in six ways: threads, fork-join, tasks, ranks
    gpt2lab bench sharding      the sharding algebra against DTensor: layouts, bytes, a block's seconds
    gpt2lab bench experts       a mixture of experts against transformers' Mixtral block

    gpt2lab bench --all --quick             all of them, small, in rounds: one JSON and one figure
    gpt2lab bench --compare a.json b.json   which numbers changed by more than their spread

On a machine with fewer cores than ranks a stopwatch also measures the scheduler: read the ratios.
"""

import argparse
import importlib
import json
from pathlib import Path

from ..benchmarks import everything
from ..machine.words import choose, did_you_mean
from .numbers import positive, within


def add_arguments(parser) -> None:
    """Options for all benchmarks together; or a name, and what follows it belongs to the benchmark."""
    parser.add_argument("--all", action="store_true", help="every benchmark, in rounds")
    parser.add_argument("--quick", action="store_true", help="with --all: small sizes, under ten minutes")
    parser.add_argument("--rounds", type=positive, default=5, help="with --all (default 5; verdicts need 4)")
    parser.add_argument(
        "--minutes", type=within(0.01), help="with --all: begin no round that may end later (--quick: 9)"
    )
    parser.add_argument("--out", default="runs/bench", help="with --all: folder for JSON, figure and texts")
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="two JSON files, the older one first")
    parser.add_argument("--every", action="store_true", help="with --compare: also what has not changed")
    parser.add_argument("name", nargs="?", help=", ".join(everything.names()))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark; --help explains them")


def run(args) -> int:
    """Compare two files, run all, or hand over to the benchmark."""
    if args.compare:
        print(everything.comparison(*map(everything.read_report, args.compare), every=args.every))
        return 0
    if args.all:
        return run_all(args)
    from ..cli import Parser

    names = everything.names()
    if args.name is None:
        raise ValueError(f"which benchmark? {choose(names)[:-1]}, or use --all.")
    if args.name not in names:
        raise ValueError(
            f"there is no benchmark {args.name!r}. {did_you_mean(args.name, names, choose(names))}"
        )
    benchmark = importlib.import_module(f"gpt2lab.benchmarks.{args.name}")
    parser = Parser(f"gpt2lab bench {args.name}", benchmark.__doc__)
    benchmark.add_arguments(parser)
    parser.register("type", int, positive)  # sizes and counts
    benchmark.run(parser.parse_args(args.options))
    return 0


def run_all(args) -> int:
    """Run every benchmark; save numbers, texts and the dashboard. 1 where one of them failed."""
    from ..plots.benchmarks import dashboard
    from ..plots.style import save_figure

    folder = Path(args.out)
    minutes = args.minutes or (9.0 if args.quick else float("inf"))
    report = everything.collect(folder, args.quick, args.rounds, minutes)
    (folder / "all.json").write_text(json.dumps(report, indent=1))
    save_figure(dashboard(report), folder / "all.png")
    count = sum(map(len, report["seconds"].values()))
    print(
        f"{count} numbers, {report['rounds']} rounds, {report['minutes']} minutes (measured); "
        f"saved {folder / 'all.json'}, {folder / 'all.png'} and each benchmark's own text"
    )
    for name, why in report["failed"].items():
        print(f"  {name} failed: {why}")
    return 1 if report["failed"] else 0
