"""What each rank of a plan holds at its fullest moment, and what it is for: its step is run without numbers.

    gpt2lab memory --plan dp=8,zero=3 --config gpt2-xl --batch 8
    gpt2lab memory --plan dp=4,zero=1 --plan dp=4,zero=3 --config mini --length 32
    gpt2lab memory --plan pp=4,schedule=pipedream --config mini     without a flush: several versions
    gpt2lab memory --plan dp=8,ep=8 --config gpt2 --experts 8       with experts, evenly loaded

The moment is that at which the rank holds most; `-` says that of this it holds nothing then. ZeRO-3 can need more than
ZeRO-1: it holds the tied embedding and two blocks whole beside their gradients under way, which on few ranks, for a
small model, is more than the shards save. The bytes are those of a dry run: the plan's own step, of one rank, on
tensors without numbers; mixed precision, and more than 100 layers, are computed by formula. 1 MiB is 2**20 bytes.
"""

from dataclasses import fields, replace
from itertools import chain

from ..machine.options import Setting, of_field, within
from ..machine.words import flag, refuse
from ..model import GPT2Config
from ..plan import Plan
from ..planner.memory import MOMENTS, memory
from ..planner.models import Transformer, model_typed, of_model
from ..planner.problem import PRECISIONS
from ..run import Options
from .unused import refuse_without_effect

NOTHING = {  # why a part is missing at the fullest moment
    "weights": "the stage has none",
    "gradients": "no weight of the stage has one yet",
    "optimizer": "it keeps nothing (sgd), or no weight has been updated yet",
    "activations": "all have been used and freed",
    "logits": "they are on the last stage, used and freed, or computed in chunks (buffers)",
    "buffers": "nothing is being summed, sent or computed in chunks",
}
MORE = (
    "Gradients are more than weights: the embedding is used twice, in the first layer and the head, and has a gradient "
    "of\n  each use beside their sum; and under ZeRO a gradient is whole until it has been summed over the ranks."
)
LAYERS_RUN = 100  # in a dry run at most: each takes about 0.1 s; of more the formulas tell in seconds
OF_EXPERTS = ("experts", "top_k", "router", "capacity")
OPTIONS = {
    "plan": Setting("such as dp=2,zero=3; may be given several times", again=True),
    "optimizer": Setting("which optimizer", default="adamw", choices=list(MOMENTS)),
    **of_model(),
}
OPTIONS |= {
    f.name: of_field(f, None if f.type is str else within(f.type(f.metadata["least"])))
    for f in fields(Options)
    if f.name in OF_EXPERTS
}


def config_of(args) -> GPT2Config:
    """The model. Raises ValueError for options of experts that change nothing beside the others."""
    given = {name: getattr(args, name) for name in OF_EXPERTS if getattr(args, name) is not None}
    config = model_typed(args)
    if not given:
        return config
    if isinstance(config, Transformer):
        raise ValueError(
            f"{flag(min(given))} is for GPT-2, and {args.config} has MLPs of its own. Leave it out."
        )
    options = Options(config=args.config, **given)
    refuse(given, options.without_effect())
    return replace(config, experts=options.the_config().experts)


def run(args) -> None:
    """Print one table a plan: a line for the fullest rank of each stage of its pipeline, as soon as it is known."""
    from ..planner.dry import fullest_ranks

    config, precision = config_of(args), args.precision or "float32"
    itemsize, mixed = PRECISIONS[precision]
    length = args.length or config.n_positions
    for text in args.plan or ["serial"]:
        refuse_without_effect(text, narrow=itemsize == 2 and not mixed)
        plan = Plan.parse(text)
        asked = plan, config, args.rows, length, itemsize, args.optimizer
        if mixed or isinstance(config, Transformer) or config.n_layer > LAYERS_RUN:
            found, how = ((one.stage, one.parts, "") for one in memory(*asked, mixed)), "computed"
        else:
            fullest, how = fullest_ranks(*asked), "dry run"
            found = ((one.place["pp"], one.parts, one.moment) for one in fullest)
        first = next(found)
        ranks = f"{plan.world} rank{'s' * (plan.world > 1)}"
        print(f"{plan} on {ranks}, {args.config}, {args.rows} rows, {precision}, MiB ({how})")
        print("  stage" + "".join(f"{name:>13}" for name in (*first[1], "together")) + "   fullest moment")
        stages = []
        for stage, parts, when in chain([first], found):
            numbers = (*parts.values(), sum(parts.values()))
            print(f"  {stage:5}{''.join(f'{_mebibytes(n):>13}' for n in numbers)}   {when}", flush=True)
            stages.append(parts)
        print(*_explained(stages), sep="\n")


def _explained(stages: list[dict[str, int]]) -> list[str]:
    """What the numbers of all stages leave open: why a part is missing, why gradients can be more than weights."""
    missing = [name for name in NOTHING if any(not parts[name] for parts in stages)]
    more = any(parts["gradients"] > parts["weights"] for parts in stages)
    return [f"  {name} -: {NOTHING[name]}" for name in missing] + [f"  {MORE}"] * more


def _mebibytes(size: int) -> str:
    few = f"{size / 2**20:.1g}" if size >= 2**10 else "<0.001" if size else "-"
    return f"{size / 2**20:,.1f}" if size >= 2**20 / 20 else few
