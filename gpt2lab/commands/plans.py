"""Which strategies go together: for each two of them, how many plans the tests compare with the serial run.

Plans without a flush are listed and verified too; they are equal to a serial emulator of their staleness.

gpt2lab plans                    the table
gpt2lab plans --list             the plans themselves
gpt2lab plans --verify           compare each with the serial run, on up to 8 ranks; --ranks 16 for all
"""

from ..compositions import TESTED, WITHOUT_FLUSH, plans_by_pair
from ..machine.options import Setting, positive
from ..plan import Plan

ORDER = "pipeline data context tensor expert sequence ZeRO-1 ZeRO-2 ZeRO-3 recompute".split()  # noqa: SIM905
OPTIONS = {
    "list": Setting("print the tested plans themselves", bool, group="what"),
    "verify": Setting("run them all and print each one's largest error", bool, group="what"),
    "ranks": Setting("leave out plans of more ranks (default 8 with --verify, 16 otherwise)", positive),
}


def run(args) -> int:
    """Print the table, the plans, or what comparing them with the serial run finds; 1 where one differs."""
    most = args.ranks or (8 if args.verify else 16)
    small = lambda c: Plan.parse(c.plan).world <= most
    tested, free = (list(filter(small, plans)) for plans in (TESTED, WITHOUT_FLUSH))
    if args.verify:
        return 1 if [c for c in (*tested, *free) if not _verified(c)] else 0
    if args.list:
        for c in (*tested, *free):
            print(c.plan + _extra(c))
        return 0
    found = plans_by_pair(tested)
    print("Tested plans that use both (each equals the serial run to 1e-10 in float64):\n")
    print(" " * 11 + "".join(f"{name:>11}" for name in ORDER))
    for a in ORDER:
        print(f"{a:11}" + "".join(f"{len(found.get((a, b), [])) or '-':>11}" for b in ORDER))
    print(
        f"\nBesides, {len(free)} plans without a flush equal an emulator of their staleness (--list names them)."
    )
    print("Mesh order, outermost first: pp, dp, cp, tp. Neighbouring ranks are tensor-parallel ranks.")
    return 0


def _verified(composition) -> bool:
    """Print one line about a plan: the largest error of all that was compared, and where it is."""
    from ..verify import verify

    report = verify(composition.plan, composition.config)
    worst = max(report.claims, key=lambda claim: claim.size)
    where = f"{worst.name}, {worst.tensor} on rank {worst.rank}"
    verdict = "equal  " if report.ok else "DIFFERS"
    print(f"{verdict} {worst.error:.1e}  {composition.plan}{_extra(composition)}: {where}", flush=True)
    return report.ok


def _extra(c) -> str:
    said = {"window": c.window, "dropout": c.dropout, "router": c.router}
    words = ", ".join(f"{name} {value}" for name, value in said.items() if value)
    return f"  ({words})" if words else ""
