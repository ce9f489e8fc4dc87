"""Several machines on one: network namespaces with wires of a chosen rate and delay between them. Linux.

Each machine has two network cards: eth0 leads to the others (10.77.0.1, 10.77.0.2, ...), eth1 leads nowhere. Whatever
happens, processes and networks are gone afterwards: they live in namespaces without a name, which end with their
first process, and that one ends when its parent closes a pipe or dies.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from . import switch

WAYS = {"as this user": (), "in a user namespace": ("--user", "--map-root-user")}
"""What `unshare` is told in order to be permitted to make networks."""

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MEETING = "10.77.0.1"  # the first machine's address
PORT = 29511
CARD = "eth0"  # the card that leads to the others


@dataclass(frozen=True)
class Wire:
    """Between a machine and the switch: `rate` bits a second in each direction; `delay` seconds to another machine."""

    rate: float = math.inf
    delay: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Wire":
        """From text such as 100mbit,1ms or 1gbit. Raises ValueError for anything else."""
        found = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)(?:,([\d.]+)(us|ms|s))?", text)
        try:
            rate, delay = float(found[1]) * UNITS[found[2]], float(found[3] or 0) * UNITS[found[4] or "s"]
            return cls(rate / (rate > 0), delay)
        except (TypeError, ValueError, ZeroDivisionError):
            raise ValueError(
                f"{text!r} is no wire. Write a rate and a delay such as 100mbit,1ms (kbit, mbit, gbit; us, ms, s)."
            ) from None


@dataclass(frozen=True)
class Machine:
    """What a machine runs, with variables on top of ours; its output goes to the file `out`, or where ours goes."""

    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    out: str | None = None


@cache
def refused() -> dict[str, str]:
    """Why each of the two ways to make networks is closed here, up to the first that is open."""
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if not shutil.which(tool):
            why = f"there is no `{tool}` command; Linux has it (Debian: apt-get install {package})"
            return dict.fromkeys(WAYS, why)
    found = {}
    for name, flags in WAYS.items():
        line = f"unshare {' '.join(flags)} --net --pid --fork ip link add wire0 type veth peer name wire1"
        done = subprocess.run(line.split(), capture_output=True, text=True)
        if not done.returncode:
            break
        found[name] = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
    return found


def check() -> None:
    """Raise PermissionError, with what is missing and the ways out, where no networks can be made."""
    if len(refused()) == len(WAYS):
        whys = "; ".join(f"{name}: {why}" for name, why in refused().items())
        raise PermissionError(
            f"several machines on one need networks of their own, and they are refused ({whys}). Run this as root; or "
            "allow user namespaces: sysctl -w user.max_user_namespaces=10000, on Debian also "
            "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a "
            "container: docker run --privileged."
        )


@contextmanager
def running(machines: Sequence[Machine], wire: Wire = Wire(), let_through=None, way: str | None = None):
    """The machines at work, as a subprocess.Popen whose status is the first that is not 0; at the end all are gone.

    `let_through`: a firewall drops every TCP packet that is neither from nor to one of these ports.
    """
    check()
    way = way or next(name for name in WAYS if name not in refused())
    rate = min(wire.rate, 1e15)
    said = {"machines": [asdict(m) for m in machines], "rate": rate, "delay": wire.delay}
    program = [sys.executable, "-I", switch.__file__, json.dumps(said | {"let_through": let_through})]
    line = ["unshare", *WAYS[way], "--net", "--pid", "--fork", "--kill-child", *program]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def torchrun(count: int, ranks: int, arguments: Sequence) -> list[Machine]:
    """`count` machines that run `torchrun ARGUMENTS` with so many ranks each."""
    found = []
    for number in range(count):
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", count, "--nproc-per-node", ranks]
        line += ["--node-rank", number, "--master-addr", MEETING, "--master-port", PORT, *arguments]
        found.append(Machine([str(word) for word in line], variables()))
    return found


def by_hand(count: int, arguments: Sequence) -> list[Machine]:
    """`count` machines with one rank each, `python ARGUMENTS`, with the variables that torchrun would set."""
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"} | variables()
    world |= {"MASTER_ADDR": MEETING, "MASTER_PORT": str(PORT)}
    command = [sys.executable, *map(str, arguments)]
    return [Machine(command, world | {"RANK": str(number)}) for number in range(count)]


def variables() -> dict[str, str]:
    """The variables that tell gloo and NCCL which network card to use; one thread a rank, no warnings of names."""
    quiet = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return quiet | {"GLOO_SOCKET_IFNAME": CARD, "NCCL_SOCKET_IFNAME": CARD}


def sent() -> int:
    """Bytes that have left this machine for the others so far."""
    line = re.search(rf"^\s*{CARD}:(.*)$", Path("/proc/net/dev").read_text(), re.MULTILINE)
    return int(line[1].split()[8])
