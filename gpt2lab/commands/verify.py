"""Compare a plan with the serial run, in float64, on live ranks.

Loss, every gradient, the gradient norm, and the weights after 5 SGD and 5 AdamW steps must agree to 1e-10.
The table says for each how large the largest relative error is, and in which tensor on which rank.
The exit status is 1 when anything differs.

    gpt2lab verify --plan dp=2
    gpt2lab verify --plan pp=2,tp=2,micro=3 --layers 6
    gpt2lab verify --plan dp=4,ep=4                    with experts, spread over the replicas
    gpt2lab verify --plan pp=4,schedule=pipedream      without a flush: against an emulator of its staleness
"""

from dataclasses import replace

from ..plan import Plan
from ..reference import CONFIG, EXPERTS
from ..verify import verify
from .numbers import within


def add_arguments(parser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", action="append", help="such as dp=2,tp=2; may be given several times")
    parser.add_argument("--rows", type=int, default=7, help="rows of the batch (default 7)")
    parser.add_argument("--length", type=int, default=11, help="tokens of a sequence (default 11)")
    parser.add_argument(
        "--layers", type=int, default=CONFIG.n_layer, help=f"layers (default {CONFIG.n_layer})"
    )
    parser.add_argument("--heads", type=int, default=CONFIG.n_head, help=f"heads (default {CONFIG.n_head})")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout probability (default 0)")
    parser.add_argument(
        "--experts",
        type=int,
        help="experts of every second layer; 0: dense (default: 8 where the plan says ep, else 0)",
    )
    parser.add_argument("--window", type=within(0), help="sliding window of the attention (default: none)")


def run(args) -> int:
    """Print one table a plan."""
    sizes = {"n_layer": args.layers, "n_head": args.heads, "dropout": args.dropout, "window": args.window}
    given = replace(EXPERTS.experts, experts=args.experts) if args.experts else None
    reports = []
    for plan in args.plan or ["serial"]:
        dense = args.experts == 0 or Plan.parse(plan).ep == 1
        experts = given or (None if dense else EXPERTS.experts)
        config = replace(CONFIG, **sizes, experts=experts)
        reports.append(verify(plan, config, args.rows, args.length))
    print("\n\n".join(report.table(exact=True) for report in reports))
    return 0 if all(r.ok for r in reports) else 1
