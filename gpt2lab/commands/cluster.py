"""Train on several machines that are network namespaces of this one, with slow wires between them. Linux.

    gpt2lab cluster -- train --plan dp=2,tp=2 --steps 20
    gpt2lab cluster --machines 2x2 --wire 100mbit,1ms -- train --plan dp=2,tp=2 --steps 20
    gpt2lab cluster --machines 4x1 --wire 1gbit -- train --plan pp=4,micro=4 --steps 20

Every machine runs torchrun, as it would on a cluster; the lines are printed. It needs root, or user namespaces.
"""

import argparse
import re
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ..machine import namespaces
from ..machine.options import Setting, parser_of
from ..run import STOP
from . import folders, train

OPTIONS = {
    "machines": Setting("machines x ranks of each", default="2x2"),
    "wire": Setting("rate of each machine's wire, and delay between two", default="100mbit,1ms"),
    "command": Setting("-- train and its options", many=argparse.REMAINDER, placed=True),
}


def run(args) -> int:
    """Check all that can be checked here, then start the machines and wait for them."""
    count, ranks = _machines(args.machines)
    wire = namespaces.Wire.parse(args.wire)
    if count == 1 and args.wire != OPTIONS["wire"].default:
        raise ValueError("--wire would change nothing: one machine sends to no other. Leave it out.")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if command[:1] != ["train"]:
        raise ValueError(
            "Only train runs on several machines. Write: gpt2lab cluster -- train --plan dp=2,tp=2"
        )
    said = parser_of(train, "gpt2lab train").parse_args(command[1:])
    source, options = train.asked_for(said)
    world = options.the_plan().world
    if world != count * ranks:
        raise ValueError(
            f"--machines {count}x{ranks} starts {count * ranks} ranks, but the plan {options.plan} needs {world}. "
            "Change one of them."
        )
    options.the_device(ranks)
    job = uuid4().hex[:8]
    machines = namespaces.torchrun(count, ranks, ["--rdzv-id", job, "-m", "gpt2lab", *command])
    namespaces.check()
    folders.check_place(source, options, said.out)
    for number, machine in enumerate(machines):
        print(f"machine {number}: torchrun {shlex.join(machine.command[3:])}", flush=True)
    out = source.parent.parent if source else Path(said.out)
    begun = [source.parent] if source and folders.is_newest(source) and not options.bench else []
    with _saved_at_a_signal(begun, out, job), namespaces.running(machines, wire) as process:
        return process.wait()


@contextmanager
def _saved_at_a_signal(begun: list[Path], out: Path, job: str):
    """Make Ctrl-C, SIGTERM or a closed terminal end the run after its step, saved; the next one ends the machines.

    The run is the one that had `begun` before, or that rank 0 has made under `out` for this job.
    """
    asked = []

    def ask(number, _):
        runs = begun or [file.parent for file in out.glob("*/job") if file.read_text() == job]
        if asked or not runs:
            raise KeyboardInterrupt
        asked.append(number)
        (runs[0] / STOP).write_text(signal.Signals(number).name)

    kept = {s: signal.signal(s, ask) for s in train.heeded()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _machines(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
    if not found:
        raise ValueError(f"--machines {text} is not machines x ranks of each. Write for example 2x2 or 4x1.")
    return int(found[1]), int(found[2])
