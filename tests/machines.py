"""Two "machines" on one: network namespaces, a slow wire between them, and torchrun in each. Linux, as root."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
WIRES = ("wire0", "wire1")  # the two ends of the cable, one in each machine
COUNT = itertools.count()
BITS_PER_SECOND = 100_000_000
NOT_HERE = (
    "not permitted",
    "Permission denied",
    "not supported",
    "Unknown device type",
    "qdisc kind is unknown",
)
BURST = 64 * 1024  # bytes that may pass at once


@contextlib.contextmanager
def two_machines():
    """The names of two namespaces with a limited wire between them; skips where that is not permitted.

    Whatever happens inside, the processes in them, the wire and the namespaces are gone afterwards.
    """
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            pytest.skip(f"there is no {tool} command here (Debian: apt-get install iproute2)")
    pair = f"gpt2lab-{os.getpid()}-{next(COUNT)}"
    names = [f"{pair}-{i}" for i in (0, 1)]
    try:
        for line in _wiring(names):
            did = subprocess.run(line.split(), capture_output=True, text=True)
            if did.returncode and any(words in did.stderr for words in NOT_HERE):
                pytest.skip(f"`{line}` is not permitted here: {did.stderr.strip()}")
            assert not did.returncode, f"`{line}` failed: {did.stderr.strip()}"
        yield names
    finally:
        end_processes(names)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _wiring(names: list[str]) -> list[str]:
    """The commands that make the machines; a wire vanishes with the namespaces of its ends."""
    a, b = names
    lines = [f"ip netns add {a}", f"ip netns add {b}"]
    lines += [f"ip link add {WIRES[0]} netns {a} type veth peer name {WIRES[1]} netns {b}"]
    for name, wire, address in zip(names, WIRES, ADDRESSES, strict=True):
        lines += [f"ip -n {name} addr add {address}/24 dev {wire}", f"ip -n {name} link set lo up"]
        lines += [f"ip -n {name} link set {wire} up"]
        limit = f"tbf rate {BITS_PER_SECOND}bit burst {BURST} latency 100ms"
        lines += [f"tc -n {name} qdisc add dev {wire} root {limit}"]
    return lines


def processes(name: str) -> list[int]:
    """The processes that live in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def end_processes(names: list[str], patience: float = 20.0) -> None:
    """Kill what lives in the namespaces and wait until it is gone."""
    until = time.monotonic() + patience
    while (left := [pid for name in names for pid in processes(name)]) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def torchrun(names: list[str], arguments: list, timeout: float, port: int = 29511) -> None:
    """`torchrun ARGUMENTS` with two ranks in each machine, to its end; AssertionError with what a failed one wrote."""
    nodes = []
    for node, (name, wire) in enumerate(zip(names, WIRES, strict=True)):
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        run += ["--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", str(port)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": wire}
        command = ["ip", "netns", "exec", name, *run, *map(str, arguments)]
        nodes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [node.communicate(timeout=timeout)[0] for node in nodes]
    finally:
        end_processes(names)
        for node in nodes:
            node.communicate()
    for node, words in zip(nodes, said, strict=True):
        assert node.returncode == 0, words[-3000:]


def read(folder: Path) -> list[dict]:
    """What the ranks of `machine_rank.py` wrote, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
