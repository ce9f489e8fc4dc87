"""Compare a plan with the serial run, in float64, on live ranks.

Loss, every gradient, the gradient norm, and the weights after 5 SGD and 5 AdamW steps must agree to 1e-10.
The table says for each how large the largest relative error is, and in which tensor on which rank.
The exit status is 1 when anything differs.

    gpt2lab verify --plan dp=2
    gpt2lab verify --plan pp=2,tp=2,micro=3 --layers 6
    gpt2lab verify --plan dp=4,ep=4                    with experts, spread over the replicas
    gpt2lab verify --plan tp=2 --device cuda           on GPUs, over NCCL
    gpt2lab verify --plan pp=4,schedule=pipedream      without a flush: against an emulator of its staleness
"""

from dataclasses import replace

from ..machine.options import Setting, within
from ..machine.patience import patiently
from ..machine.words import refuse
from ..plan import Plan
from ..reference import CONFIG, EXPERTS
from ..verify import verify
from .unused import refuse_without_effect

OPTIONS = {
    "plan": Setting("such as dp=2,tp=2; may be given several times", again=True),
    "rows": Setting("rows of the batch", within(1, 500), 7),
    "length": Setting("tokens of a sequence", int, 11),
    "layers": Setting("layers; each takes its time", within(0, 100), CONFIG.n_layer),
    "heads": Setting("heads", int, CONFIG.n_head),
    "dropout": Setting("dropout probability", float, 0.0),
    "experts": Setting("of every second layer; 0: dense (default: 8 where the plan says ep, else 0)", int),
    "window": Setting("sliding window of the attention; without it none", within(0)),
    "device": Setting("cpu, or cuda: GPUs, over NCCL", choices=("cpu", "cuda"), default="cpu"),
}


def run(args) -> int:
    """Print one table a plan."""
    if args.window is not None and args.window >= args.length - 1:
        refuse(["window"], {"window": f"each of {args.length} tokens sees all before it anyway"})
    sizes = {"n_layer": args.layers, "n_head": args.heads, "dropout": args.dropout, "window": args.window}
    given = replace(EXPERTS.experts, experts=args.experts) if args.experts else None
    reports = []
    for plan in patiently(args.plan or ["serial"], "plans"):
        refuse_without_effect(plan)
        dense = args.experts == 0 or Plan.parse(plan).ep == 1
        experts = given or (None if dense else EXPERTS.experts)
        config = replace(CONFIG, **sizes, experts=experts)
        reports.append(verify(plan, config, args.rows, args.length, device=args.device))
    print("\n\n".join(report.table(exact=True) for report in reports))
    return 0 if all(r.ok for r in reports) else 1
