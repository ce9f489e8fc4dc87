"""What is proven, as a table in README: `python tests/proven.py` compares every plan of full depth and writes it.

A row is a family of strategies: how many plans the tests compare with the serial run, the largest relative error that
those of full depth (losses, gradients, norm, five updates by SGD and five by AdamW) show here and now, in float64, and
how many planted bugs the tests must catch.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from equality import ROWS
from warm import Pools

from gpt2lab.plan import Plan
from gpt2lab.verify import verify

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- proven -->\n", "<!-- end -->\n"

FAMILIES = {
    "data parallel, ZeRO 1 to 3, HSDP": (("data", "zero"), ("data", "zero")),
    "tensor and sequence parallel": (("tensor",), ("tensor",)),
    "pipelines, all schedules": (("pipeline",), ("pipeline",)),
    "context parallel, all exchanges": (("context",), ("context", "halo")),
    "mixtures of experts": (("experts",), ("expert",)),
    "pipelines without a flush [^1]": (("without a flush",), ("asynchronous",)),
    "two strategies together": (("pairs", "each strategy"), ("composition",)),
}
"""Words of a row -> the groups of the table of equality, and the words in names of files that plant bugs in it."""

KINDS = {
    "loss": ("loss",),
    "every gradient": ("every gradient",),
    "gradient norm": ("gradient norm", "losses and norms"),
    "weights": ("weights after",),
}
"""Column -> how the names of its claims begin."""


def compared(groups: tuple[str, ...]) -> int:
    """How many plans of these groups the tests compare with the serial run, each on its model and batch."""
    return sum(row.group in groups for row in ROWS)


def planted() -> dict[str, int]:
    """How many planted bugs each test file has, as pytest collects them, and tests that all is well without one."""
    named = lambda path: path.parent.name == "mutants" or re.search(r"def test_\w*mutant", path.read_text())
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if named(path))
    call = [sys.executable, "-m", "pytest", *files, "--collect-only", "-q", "-m", "mutant and not browser"]
    said = subprocess.run(
        call, cwd=ROOT, env=os.environ | {"TODAY": "all"}, capture_output=True, text=True
    ).stdout
    counts = defaultdict(int)
    for name, count in re.findall(r"^tests/(?:\w+/)?test_(\w+)\.py: (\d+)$", said, re.M):
        counts[name] += int(count)
    return dict(counts)


def errors(groups: tuple[str, ...], pools: Pools) -> dict[str, float | None]:
    """The largest error in each column over the plans of full depth of these groups; None where nothing is compared."""
    found: dict[str, float | None] = dict.fromkeys(KINDS)
    for row in ROWS:
        if row.group in groups and row.depth == "full":
            ranks = pools[Plan.parse(row.plan).world]
            report = verify(row.plan, row.config, row.rows, row.length, ranks)
            assert report.ok, f"{row}\n{report}"
            for column, names in KINDS.items():
                seen = [claim.error for claim in report.claims if claim.name.startswith(names)]
                found[column] = max([*seen, *[e for e in [found[column]] if e is not None]], default=None)
    return found


def table(measured: dict[str, dict], bugs: dict[str, int]) -> str:
    """The table in Markdown."""
    head = ["strategy", "plans", *KINDS, "bugs caught"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for words, (groups, files) in FAMILIES.items():
        caught = sum(n for name, n in bugs.items() if name.removesuffix("_mutants") in files)
        seen = ["" if e is None else f"{e:.0e}" if e else "0" for e in measured[words].values()]
        lines.append([words, str(compared(groups)), *seen, str(caught)])
    lines.append(["**everything**", f"**{len(ROWS)}**", *[""] * len(KINDS), f"**{sum(bugs.values())}**"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Compare, and write the table into README."""
    pools = Pools()
    measured = {words: errors(groups, pools) for words, (groups, _) in FAMILIES.items()}
    pools.close()
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    made = table(measured, planted())
    print(made)
    readme.write_text(f"{before}{BEGIN}{made}{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
