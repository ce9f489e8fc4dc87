"""`python -m power reach | run | again | planted | table`, see the package's docstring."""

import argparse
import shutil
from collections import Counter, defaultdict
from functools import cache

from .killing import RESULTS, Copy, decided, line, results
from .mutate import SEED, drawn, planted
from .reaching import reached, record


def run(mutants) -> None:
    """Decide those that are not decided yet; a line of the results each."""
    recorded = cache(reached)
    known, copy = results(), Copy()
    try:
        for n, mutant in enumerate(mutants):
            if mutant.name not in known:
                said, killer = known[mutant.name] = decided(mutant, copy, recorded)
                with open(RESULTS, "a") as file:
                    file.write(line(mutant.name, said, killer))
                print(f"{n + 1}/{len(mutants)} {said}: {mutant.name}", flush=True)
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)


def again(mutants) -> None:
    """Run every killed mutant against its killer; what it no longer notices, or has no killer now, is open again."""
    known, copy = results(), Copy()
    known = {m.name: known[m.name] for m in mutants if m.name in known}
    try:
        for n, mutant in enumerate(mutants):
            said, killer = known.get(mutant.name, ("", ""))
            if said == "killed" and not copy.still_dies(mutant, killer):
                del known[mutant.name]
                print(f"{n + 1}/{len(mutants)} open again: {mutant.name}, {killer}", flush=True)
    finally:
        shutil.rmtree(copy.folder, ignore_errors=True)
    RESULTS.write_text("".join(line(name, *found) for name, found in known.items()))


def table(mutants) -> None:
    """The score of each room, and every mutant that is not killed."""
    known, rooms = results(), defaultdict(Counter)
    for mutant in mutants:
        room = mutant.file.split("/")[1].removesuffix(".py")
        rooms[room][known.get(mutant.name, ("not tried",))[0]] += 1
    for room, said in sorted(rooms.items()):
        tried = said.total() - said["not tried"]
        print(
            f"{room:12} {said['killed']:4} of {tried:4} killed   {dict(said - Counter(killed=said['killed']))}"
        )
    for mutant in mutants:
        said, why = known.get(mutant.name, ("", ""))
        if said not in ("", "killed"):
            print(f"{said:12} {mutant.name} (line {mutant.line})", f": {why}" * bool(why))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m power", description=__doc__)
    parser.add_argument("what", choices=["reach", "run", "again", "planted", "table"])
    parser.add_argument("files", nargs="*", default=["tests"], help="whose tests reach runs (default: all)")
    parser.add_argument("--count", type=int, default=400, help="mutants that are drawn (default: 400)")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    if options.what == "reach":
        return record(options.files)
    if options.what == "planted":
        run(planted())
        table(planted())
        return 0
    ways = {"run": run, "again": again, "table": table}
    ways[options.what](drawn(options.count, options.seed, results()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
