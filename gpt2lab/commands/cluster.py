"""Train on several machines that are network namespaces of this one, with slow wires between them. Linux.

    python -m gpt2lab cluster -- train --plan dp=2,tp=2 --steps 20
    python -m gpt2lab cluster --machines 2x2 --wire 100mbit,1ms -- train --plan dp=2,tp=2 --steps 20
    python -m gpt2lab cluster --machines 4x1 --wire 1gbit -- train --plan pp=4,micro=4 --steps 20

Every machine runs torchrun, as it would on a cluster; the lines are printed. It needs root, or user namespaces.
"""

import argparse
import re
import shlex

from ..cli import Parser
from ..machine import namespaces
from ..plan import Plan
from ..run import Options
from . import train


def add_arguments(parser) -> None:
    """How many machines, how they are wired, and what they run."""
    parser.add_argument("--machines", default="2x2", help="machines x ranks of each (default 2x2)")
    wire = "rate of each machine's wire, and delay between two (default 100mbit,1ms)"
    parser.add_argument("--wire", default="100mbit,1ms", help=wire)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- train and its options")


def run(args) -> int:
    """Check all that can be checked here, then start the machines and wait for them."""
    count, ranks = _machines(args.machines)
    wire = namespaces.Wire.parse(args.wire)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if command[:1] != ["train"]:
        raise ValueError(
            "Only train runs on several machines. Write: gpt2lab cluster -- train --plan dp=2,tp=2"
        )
    parser = Parser(prog="gpt2lab train")
    train.add_arguments(parser)
    said = parser.parse_args(command[1:])
    plan = Plan.parse(said.plan or Options().plan)
    if plan.world != count * ranks and not said.resume:
        raise ValueError(
            f"--machines {count}x{ranks} starts {count * ranks} ranks, but the plan {said.plan or 'serial'} needs "
            f"{plan.world}. Change one of them."
        )
    machines = namespaces.torchrun(count, ranks, ["-m", "gpt2lab", *command])
    namespaces.check()
    for number, machine in enumerate(machines):
        print(f"machine {number}: torchrun {shlex.join(machine.command[3:])}", flush=True)
    with namespaces.running(machines, wire) as process:
        return process.wait()


def _machines(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
    if not found:
        raise ValueError(f"--machines {text} is not machines x ranks of each. Write for example 2x2 or 4x1.")
    return int(found[1]), int(found[2])
