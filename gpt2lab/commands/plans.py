"""Which strategies go together: for each two of them, how many plans the tests compare with the serial run.

python -m gpt2lab plans            the table
python -m gpt2lab plans --list     the plans themselves; verify takes any of them
"""

from ..compositions import ALL, PAIRS, TRIPLES, table

ORDER = ("pipeline", "data", "context", "tensor", "sequence", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recompute")


def add_arguments(parser) -> None:
    """The options of the command."""
    parser.add_argument("--list", action="store_true", help="print the tested plans themselves")


def run(args) -> int:
    """Print the table or the plans."""
    if args.list:
        for c in (*PAIRS, *TRIPLES, *ALL):
            extra = f"  (window {c.window})" if c.window else f"  (dropout {c.dropout})" if c.dropout else ""
            print(c.plan + extra)
        return 0
    found = table()
    print("Tested plans that use both (each equals the serial run to 1e-10 in float64):\n")
    print(" " * 11 + "".join(f"{name:>11}" for name in ORDER))
    for a in ORDER:
        print(f"{a:11}" + "".join(f"{len(found.get((a, b), [])) or '-':>11}" for b in ORDER))
    print("\nMesh order, outermost first: pp, dp, cp, tp. Neighbouring ranks are tensor-parallel ranks.")
    return 0
