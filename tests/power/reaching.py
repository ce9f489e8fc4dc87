"""Which tests enter which functions: recorded once, with all ranks, and kept in `build/power` of the checkout."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/power"
LEFT_OUT = ("mutants", "browser", "test_architecture.py", "test_names.py", "test_tiers.py")
"""Tests that read the code's text, plant bugs by its words, or need a browser: they say nothing of what code does."""


def record(files: list[str]) -> int:
    """Run the tests of these files and folders, one after the other, and note what they enter; pytest's exit code."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in [*KEPT.glob("*.seen"), KEPT / "tests.jsonl"]:
        old.unlink(missing_ok=True)
    (KEPT / "now").write_bytes(struct.pack("Q", 0))
    recorder = Path(__file__).parent / "recorder"
    path = [str(recorder), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PYTHONPATH": os.pathsep.join(path),
        "POWER_REACH": str(KEPT),
        "POWER_ROOT": str(ROOT),
        "TODAY": "all",
    }
    ignored = [f"--ignore={ROOT}/tests/{name}" for name in LEFT_OUT]
    call = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-p",
        "power_reach",
        *ignored,
        "-m",
        MARKS,
        "--timeout",
        "900",
    ]
    return subprocess.run(call, cwd=ROOT, env=os.environ | env).returncode


MARKS = "not mutant and not browser and not slow and not gpu"


def reached() -> tuple[dict[str, dict], dict[str, list[str]]]:
    """Tests by their name, with `seconds` and `functions` (how many they enter), and the tests of each function."""
    tests, name = {}, {}
    if not (KEPT / "tests.jsonl").exists():
        raise FileNotFoundError(
            "Nothing is recorded of what the tests enter: run python -m power reach first."
        )
    for line in (KEPT / "tests.jsonl").read_text().splitlines():
        test = json.loads(line)
        name[test["number"]] = test["test"]
        if test["passed"]:
            tests[test["test"]] = {"seconds": test["seconds"], "functions": 0}
    entered = defaultdict(set)
    for file in KEPT.glob("*.seen"):
        for line in file.read_text().splitlines():
            number, path, function = line.split("\t")
            entered[f"{path} {function.replace('.<locals>', '')}"].add(name.get(int(number)))
    by_function = {}
    for function, found in entered.items():
        by_function[function] = sorted(found & tests.keys())
        for test in by_function[function]:
            tests[test]["functions"] += 1
    return tests, by_function
