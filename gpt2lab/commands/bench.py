"""Time something against a rival in the same run. Each benchmark prints a table of medians and ratios.

    gpt2lab bench data                        one of them; --help explains its options, --quick takes small sizes
    gpt2lab bench --all --quick               all of them, small, in rounds: one JSON and one figure
    gpt2lab bench --compare a.json b.json     which numbers changed by more than their spread

On a machine with fewer cores than ranks a stopwatch also measures the scheduler: read the ratios.
"""

import argparse
import json
from pathlib import Path

from ..benchmarks import races
from ..machine.options import Setting, positive, within
from ..machine.words import choose, did_you_mean, flag, refuse

OPTIONS = {
    "all": Setting("every benchmark, in rounds", bool),
    "quick": Setting("with --all: small sizes, under ten minutes", bool),
    "rounds": Setting("with --all; verdicts need 4", positive, 5),
    "minutes": Setting("with --all: begin no round that may end later (--quick: 9)", within(0.01)),
    "out": Setting("with --all: folder for JSON, figure and texts", default="runs/bench"),
    "compare": Setting("two JSON files, the older one first", many=2, metavar="FILE"),
    "every": Setting("with --compare: also what has not changed", bool),
    "name": Setting("which one, of those below", many="?", placed=True),
    "options": Setting("of the benchmark; --help explains them", many=argparse.REMAINDER, placed=True),
}
EPILOG = "\n".join(["benchmarks:", *(f"  {name:12}{race.about}" for name, race in races.RACES.items())])


def run(args) -> int | None:
    """Compare two files, run all, or hand over to the benchmark."""
    idle = {"all": "--compare runs none"} if args.compare else {"every": "it is for --compare"}
    if args.compare or not args.all:
        of_all = ("quick", "rounds", "minutes", "out")
        idle |= dict.fromkeys(of_all, "it is for --all, and options of one benchmark stand behind its name")
    if args.compare or args.all:
        idle["name"] = "--all and --compare run no single one"
    typed = lambda option: args.name if option == "name" else flag(option)
    refuse([n for n in idle if getattr(args, n) not in (None, False, OPTIONS[n].default)], idle, typed)
    if args.compare:
        from ..benchmarks import everything

        return print(everything.comparison(*map(everything.read_report, args.compare), every=args.every))
    if args.all:
        return run_all(args)
    known = sorted(races.RACES)
    if args.name is None:
        raise ValueError(f"which benchmark? {choose(known)[:-1]}, or use --all.")
    if args.name not in known:
        raise ValueError(
            f"there is no benchmark {args.name!r}. {did_you_mean(args.name, known, choose(known))}"
        )
    races.run(args.name, races.arguments(args.name, args.options))


def run_all(args) -> int:
    """Run every benchmark; save numbers, texts and the dashboard. 1 where one of them failed."""
    from ..benchmarks import everything
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
