"""Measure this machine, so that plans can be predicted for it: a minute or two; the result is kept for this machine.

    gpt2lab calibrate            measured once, then read from the cache
    gpt2lab calibrate --again    measured anew, after a change of the machine or of torch

All cores work while it measures, as they do in a parallel run. What is fitted: operations and bytes per second of a
rank and the launch of an operator, from whole steps of small models; latency and bandwidth between ranks, from sums;
and how much longer steps of 1, 2 and 4 ranks together take, from a few plans. Where other programs keep the cores busy
meanwhile, it says that the numbers cannot be trusted.
"""

import json

import psutil

from ..benchmarks.calibration import calibration_file, known, measured
from ..corpus.storage import replacing
from ..machine.options import Setting

OPTIONS = {"again": Setting("measure even if this machine is known", bool)}
BUSY = 0.25  # cores that other programs may use


def run(args) -> None:
    """Measure, keep, and print what was found."""
    if args.again or not calibration_file().exists():
        before, numbers = _used_by_others(), measured()
        numbers["others"] = max(before, _used_by_others())
        with replacing(calibration_file()) as file:
            file.write(json.dumps(numbers, indent=1).encode())
    found = known()
    print(f"a rank: {found['rate'] / 1e9:.1f} GFLOP/s, {found['copy'] / 1e9:.1f} GB/s, ", end="")
    print(f"{1e6 * found['launch']:.0f} us an operator (fitted to {len(found['steps'])} steps, measured)")
    print(
        f"between ranks: {1e6 * found['latency']:.0f} us, {found['bandwidth'] / 1e9:.2f} GB/s (fitted, measured)"
    )
    factors = ", ".join(f"{factor:.2f} with {ranks}" for ranks, factor in found["slowed"].items())
    print(f"a step takes longer than these say: {factors} ranks (measured over predicted)")
    for step in found["steps"]:
        times = f"measured {1e3 * step['seconds']:8.1f} ms fitted {1e3 * step['fitted']:8.1f} ms"
        print(f"  {step['plan']:14}{step['config']:5} {times}")
    print(f"kept in {calibration_file()}")
    if found.get("others", 0.0) > BUSY:
        print(
            f"Other programs used {found['others']:.1f} of {found['cores']} cores, so these numbers cannot be trusted. "
            "When the machine is quiet: gpt2lab calibrate --again."
        )


def _used_by_others() -> float:
    """Cores that are busy while this process sleeps for a second."""
    return psutil.cpu_percent(1.0) / 100 * psutil.cpu_count()
