"""Draw a pipeline schedule in the terminal, check it and say what it costs.

gpt2lab schedule                              the names of all schedules
gpt2lab schedule 1f1b --stages 4 --micro 8    one of them
"""

import argparse
from fractions import Fraction

from ..machine.arguments import contents
from ..machine.options import Setting, positive, within
from ..machine.words import refuse
from ..schedules import registry, text
from ..schedules.play import check, simulate
from ..schedules.timeline import Cost

MOST = 30_000  # operations that are laid out, checked and simulated: some seconds


def _time(text: str) -> Fraction:
    """A time that can be drawn: 0 to 1000, such as 2, 0.5 or 1/3."""
    try:
        time = Fraction(text)
    except (ValueError, ZeroDivisionError):
        time = None
    if time is None or not 0 <= time <= 1000 or time.denominator > 1000:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time to draw. Use 0 to 1000, at most in thousandths, such as 2, 0.5 or 1/3"
        )
    return time


ONE = Fraction(1)
OPTIONS = {
    "name": Setting("its name, or the path of a .csv file (default: list all names)", many="?", placed=True),
    "stages": Setting("ranks of the pipeline, p", positive, 4),
    "micro": Setting("micro-batches, m", positive, 8),
    "chunks": Setting("model chunks a rank, v (interleaved, breadth_first)", positive),
    "slices": Setting("token slices of a micro-batch (terapipe)", positive),
    "forward": Setting("time of a rank's forward", _time, ONE),
    "input_grad": Setting("time of its input gradient", _time, ONE),
    "weight_grad": Setting("time of its weight gradient", _time, ONE),
    "hop": Setting("latency between two ranks", _time, Fraction(0)),
    "blocking": Setting("senders wait for the hop too", bool, False),
    "recompute": Setting("a backward runs the forward again first", bool, False),
    "buffers": Setting("check for deadlock with so many unread messages a link", within(0)),
    "width": Setting("longest line, in characters", within(32), 160),
    "csv": Setting("print it in PyTorch's notation instead", bool, False),
}


def run(args) -> None:
    """Print the schedule that the arguments describe, if it is right. Without a name: all names."""
    if args.name is None:
        return print(all_names())
    _refuse_without_effect(args)
    if not args.forward + args.input_grad + args.weight_grad:
        raise ValueError(
            "All operations take no time, so there is nothing to draw. Give one of them more than 0."
        )
    operations = 2 * args.stages * args.micro * (args.chunks or 1) * (args.slices or 1)
    if operations > MOST and not args.name.endswith(".csv"):
        raise ValueError(
            f"{args.stages} stages and {args.micro} micro-batches make {operations:,} operations; this command lays "
            f"out at most {MOST:,}. Use fewer of them."
        )
    schedule = check(_load(args), args.buffers)
    if args.csv:
        return print(text.to_csv(schedule), end="")
    share = Fraction(schedule.ranks, schedule.depth * schedule.slices)
    cost = Cost(
        args.forward * share,
        args.input_grad * share,
        args.weight_grad * share,
        hop=args.hop,
        blocking=args.blocking,
        recompute=args.recompute,
    )
    timeline = simulate(schedule, cost)
    print(text.draw(timeline, args.width))
    print(text.summary(timeline))


def all_names() -> str:
    """All schedules with their papers, those without a flush apart."""
    line = lambda one: f"  {one.name:20}{one.source}"
    flushed, free = (map(line, group) for group in (registry.GENERATORS, registry.FREE))
    head = "Without a flush between steps, so that weights are of several versions:"
    ask = "Draw one: gpt2lab schedule 1f1b --stages 4 --micro 8"
    return "\n".join(["Schedules:", *flushed, head, *free, ask])


def _refuse_without_effect(args) -> None:
    """Raise ValueError for options that would change nothing beside the others."""
    why = {} if args.hop else {"blocking": "without --hop no message takes time"}
    if args.stages == 1:
        why |= dict.fromkeys(("hop", "blocking"), "one stage sends nothing")
    if args.csv:
        shown = ("forward", "input_grad", "weight_grad", "hop", "blocking", "recompute", "width")
        why |= dict.fromkeys(shown, "--csv prints the order alone")
    if args.name.endswith(".csv"):
        why |= dict.fromkeys(("stages", "micro", "chunks"), "the file says it")
    refuse([name for name in why if getattr(args, name) != OPTIONS[name].default], why)


def _load(args):
    if args.name.endswith(".csv"):
        try:
            words = contents(args.name).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{args.name} is no text. Write a schedule with --csv to see one.") from None
        return text.from_csv(words, args.slices)
    options = {"chunks": args.chunks, "slices": args.slices}
    chosen = {name: value for name, value in options.items() if value is not None}
    return registry.make(args.name, args.stages, args.micro, **chosen)
