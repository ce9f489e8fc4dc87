"""Every benchmark in rounds, one JSON with the machine they ran on, and two of these compared.

A round runs each benchmark once; a number's samples are those of the rounds, minutes apart, so their spread holds what
the machine does besides. A change has a verdict only where all samples of one file lie on one side of all of the other.
"""

import contextlib
import math
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ..corpus.storage import read_json
from ..machine import speed
from ..machine.arguments import MORE, said_in
from ..machine.words import in_a_line
from .races import RACES, arguments, run

LEAST = 0.05  # a smaller change of the median is none, however small the spread


def run_one(name: str, quick: bool, folder: Path) -> dict[str, float]:
    """Seconds by name of one benchmark; what it prints goes to a text file, and torch's switches are set back."""
    args = arguments(name, quick=quick)
    if hasattr(args, "out"):
        args.out = str(folder / name)
    threads, precision = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    try:
        with open(folder / f"{name}.txt", "a") as text, contextlib.redirect_stdout(text):
            return run(name, args)
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = precision


def machine_speed() -> dict[str, float]:
    """Seconds of a matrix product and of a copy on one thread: where these have changed, so has everything else."""
    touched = 1 << 26
    with speed.using_threads(1):
        product, copy = 2 * 1024**3 / speed.matmul_rate(), touched / speed.copy_rate(touched, seconds=0.3)
    return {"matrix product, 1024": product, "copy of 32 MiB": copy}


def fingerprint() -> dict[str, str]:
    """The machine, how busy it was, and the commit, if this is a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "no checkout"
    return speed.machine() | {"load before": f"{os.getloadavg()[0]:.1f}", "commit": commit}


def collect(folder: Path, quick: bool = True, rounds: int = 5, minutes: float = 9.0, chosen=()) -> dict:
    """Run all benchmarks (or the `chosen`) for so many rounds, fewer where the next one might not end in time.

    Returns {"machine", "rounds", "minutes", "seconds": {benchmark: {what: samples}}, "failed": {benchmark: why}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen, begin, longest = chosen or sorted(RACES), time.monotonic(), 0.0
    found, failed, done = {"machine": {}}, {}, 0
    report = {"machine": fingerprint(), "quick": quick}
    with tqdm(total=rounds * len(chosen), desc="benchmarks", disable=None) as bar:
        while done < rounds and (not done or time.monotonic() - begin + longest < 60 * minutes):
            start = time.monotonic()
            add_samples(found["machine"], machine_speed())
            for name in chosen:
                bar.set_postfix_str(f"round {done + 1}, {name}")
                if name not in failed:
                    try:
                        add_samples(found.setdefault(name, {}), run_one(name, quick, folder))
                    except Exception as error:  # the others still count; `failed` is reported at the end
                        failed[name] = in_a_line(error)
                bar.update()
            done, longest = done + 1, max(longest, time.monotonic() - start)
    took = (time.monotonic() - begin) / 60
    return report | {"rounds": done, "minutes": round(took, 2), "seconds": found, "failed": failed}


def add_samples(samples: dict[str, list[float]], once: dict[str, float]) -> None:
    """Append one round's seconds to the samples."""
    for what, seconds in once.items():
        samples.setdefault(what, []).append(seconds)


def verdict(a: list[float], b: list[float]) -> str:
    """Whether b is faster or slower than a: every sample beyond every other, and the medians 5 % apart or more."""
    if chance(len(a), len(b)) > 0.05:
        return "too few rounds"
    if abs(statistics.median(b) / statistics.median(a) - 1) < LEAST:
        return "same"
    return "faster" if max(b) < min(a) else "slower" if min(b) > max(a) else "within the spread"


def chance(a: int, b: int) -> float:
    """How often samples of one distribution, a and b of them, lie apart by chance: 2 of the (a+b over a) orders."""
    return 2 / math.comb(a + b, a)


def changes(a: dict, b: dict) -> list[tuple[str, str, float, float, float, str]]:
    """(benchmark, what, median a, median b, b / a, verdict) of every number that both files have."""
    rows = []
    for name, whats in a["seconds"].items():
        for what, old in whats.items():
            if new := b["seconds"].get(name, {}).get(what):
                one, two = statistics.median(old), statistics.median(new)
                rows.append((name, what, one, two, two / one, verdict(old, new)))
    return rows


def comparison(a: dict, b: dict, every: bool = False) -> str:
    """The comparison as text: how the machines differ, then each change with a verdict (`every`: all numbers)."""
    rows = changes(a, b)
    changed = [row for row in rows if row[-1] in ("faster", "slower")]
    one, two = (report["machine"] | {"quick": report.get("quick")} for report in (a, b))
    lines = [f"{k}: {one.get(k)} -> {two.get(k)}" for k in sorted(one | two) if one.get(k) != two.get(k)]
    if not rows:
        raise ValueError("The two files have no number in common. Use reports of the same benchmarks.")
    by_chance = len(rows) * chance(a["rounds"], b["rounds"])
    lines += [
        f"{len(rows)} numbers, {a['rounds']} and {b['rounds']} rounds: {len(changed)} changed beyond their spread "
        f"(by chance alone: {by_chance:.1f} at most)",
        f"{'benchmark':12} {'what':44} {'ms before':>10} {'ms after':>10} {'ratio':>6}",
    ]
    for name, what, one, two, ratio, word in rows if every else changed:
        lines.append(f"{name:12} {what:44} {1e3 * one:10.3f} {1e3 * two:10.3f} {ratio:6.2f}  {word}")
    if any(row[0] == "machine" for row in changed):
        lines.append("The machine itself runs at another speed: read the other changes against that.")
    if any(row[-1] == "too few rounds" for row in rows):
        lines.append(
            "With fewer than 4 rounds in a file chance alone separates samples too often: no verdicts."
        )
    shown = ("".join(sign if sign.isprintable() else "?" for sign in line) for line in lines)
    return "\n".join(shown)


def read_report(path: str) -> dict:
    """A file that `collect` gave; raises ValueError for any other."""

    def whole(report: dict) -> dict:
        said_in(path, "seconds", report["seconds"], dict[str, dict[str, list[float]]], (MORE, 1e9))
        said_in(path, "rounds", report["rounds"], int, (1, 10_000))
        said_in(path, "machine", report["machine"], dict[str, str])
        return report

    return read_json(path, whole, "is no report of `gpt2lab bench --all`. Make one with --out FOLDER.")
