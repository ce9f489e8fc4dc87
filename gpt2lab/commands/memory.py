"""What each rank of a plan holds at its fullest moment, and what it is for: its step is run without numbers.

    python -m gpt2lab memory --plan dp=8,zero=3 --config gpt2-xl --batch 8
    python -m gpt2lab memory --plan dp=4,zero=1 --plan dp=4,zero=3 --config mini --length 32
    python -m gpt2lab memory --plan pp=4,schedule=pipedream --config mini     without a flush: several versions
    python -m gpt2lab memory --plan dp=8,ep=8 --config gpt2 --experts 8       with experts, evenly loaded

ZeRO-3 can need more than ZeRO-1: it holds the tied embedding and two blocks whole beside their gradients under way,
which on few ranks, for a small model, is more than the shards save. The bytes are those of a dry run: the plan's own
step, of one rank, on tensors without numbers. 1 MiB is 2**20 bytes.
"""

from itertools import chain

from ..experts.mixture import ROUTERS
from ..model import GPT2Config
from ..plan import Plan
from ..planner.memory import MOMENTS
from ..run import Options
from .numbers import positive, within
from .plan import add_model
from .train import HELP

OF_EXPERTS = {"experts": within(0), "top_k": positive, "router": str, "capacity": within(0.0)}


def add_arguments(parser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", action="append", help="such as dp=2,zero=3; may be given several times")
    parser.add_argument("--optimizer", choices=list(MOMENTS), default="adamw", help="default adamw")
    add_model(parser)
    for name, kind in OF_EXPERTS.items():
        text = HELP[name].format(routers=", ".join(ROUTERS))
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help=f"{text} (default {getattr(Options, name)})")


def config_of(args) -> GPT2Config:
    """The model. Raises ValueError for options of experts that change nothing beside the others."""
    given = {name: getattr(args, name) for name in OF_EXPERTS if getattr(args, name) is not None}
    options = Options(config=args.config, **given)
    for name in given.keys() & options.without_effect().keys():
        why = options.without_effect()[name]
        raise ValueError(f"--{name.replace('_', '-')} changes nothing: {why}. Leave it out.")
    return options.the_config()


def run(args) -> int:
    """Print one table a plan: a line for the fullest rank of each stage of its pipeline, as soon as it is known."""
    from ..planner.dry import fullest_ranks

    config = config_of(args)
    length = args.length or config.n_positions
    for text in args.plan or ["serial"]:
        plan = Plan.parse(text)
        found = fullest_ranks(plan, config, args.rows, length, args.itemsize, args.optimizer)
        first = next(found)
        print(
            f"{plan} on {plan.world} rank{'s' * (plan.world > 1)}, {args.config}, {args.rows} rows, MiB (dry run)"
        )
        print("  stage" + "".join(f"{name:>13}" for name in first.parts) + f"{'together':>13}  fullest in")
        for one in chain([first], found):
            sizes = "".join(f"{size / 2**20:13,.1f}" for size in (*one.parts.values(), one.held))
            print(f"  {one.place['pp']:5}{sizes}  {one.moment}", flush=True)
    return 0
