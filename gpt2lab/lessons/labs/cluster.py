"""Ranks on machines that are namespaces: one plan in two placements, and the mistakes of a cluster, each made once.

python -m gpt2lab.lessons.labs.cluster    writes cluster.json, for machines on which no networks can be made
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from ...machine import namespaces
from ...machine.links import Link, Network
from ...machine.namespaces import Wire, running
from ...model import GPT2Config
from ...plan import Plan, build
from ...processes import launchers, meeting
from ...ranks import comm, trace
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...train import Trainer
from .node_traffic import BETWEEN, by_class, price

PROGRAM = "gpt2lab.lessons.labs.cluster"
RECORD = Path(__file__).with_suffix(".json")
PLAN = "dp=2,tp=2"
WIRE = "100mbit,0.1ms"
CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_layer=4, n_head=4, n_embd=64)
ROWS, LENGTH, STEPS = 32, 64, 2


def permitted() -> bool:
    """Whether this machine lets us make networks."""
    return len(namespaces.refused()) < len(namespaces.WAYS)


def record(what: str):
    """What `two_placements` or `all_mistakes` gave when the record was written."""
    return json.loads(RECORD.read_text())[what]


def until_the_end(machines, wire: str, seconds: float = 250.0, **options) -> None:
    """Run them to their end. Raises RuntimeError, with what they wrote, where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(i)) for i in range(len(machines))]
        machines = [replace(m, out=str(file)) for m, file in zip(machines, files, strict=True)]
        with running(machines, Wire.parse(wire), **options) as process:
            status = process.wait(seconds)
        if status:
            raise RuntimeError("\n".join(file.read_text()[-2000:] for file in files))


def said_by_rank(folder) -> list:
    """What the ranks wrote, by rank."""
    return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]


def two_placements() -> dict[str, list[dict]]:
    """What four ranks on two machines see of some steps, with tensor parallelism inside a machine and across."""
    with tempfile.TemporaryDirectory() as folder:
        until_the_end(namespaces.torchrun(2, 2, ["-m", PROGRAM, "places", folder]), WIRE)
        return {place: [rank[place] for rank in said_by_rank(folder)] for place in ("inside", "across")}


def the_batch():
    """The global batch of every step."""
    return example_batch(CONFIG, ROWS, LENGTH)


def measured_steps(here: launchers.Launched) -> dict:
    """Some steps of the plan on this rank: losses, seconds a step, bytes that crossed as counted and on the wire."""
    machine, rate = int(os.environ["GROUP_RANK"]), Wire.parse(WIRE).rate
    memory, half_a_wire = Link(0.0, 1e12), Link(0.0, rate / 8 / 2)  # two ranks share the way out
    with launchers.process_group(here):
        mesh = Mesh(**Plan.parse(PLAN).axes)
        one = Trainer(build(Plan.parse(PLAN), CONFIG, mesh, torch.float64))
        losses = [one.step(the_batch()).loss]  # connections are made
        machines = comm.gather_objects(machine, mesh.world)
        comm.barrier(mesh.world)
        comm.clear_log()
        before, begin = namespaces.sent(), time.perf_counter()
        losses += [one.step(the_batch()).loss for _ in range(STEPS)]
        log = list(comm.log)
        comm.barrier(mesh.world)
        seconds, after = time.perf_counter() - begin, namespaces.sent()
    crossing = by_class(log, mesh.rank, machines).items()
    return {
        "machines": machines,
        "losses": losses,
        "seconds": seconds / STEPS,
        "price": price(log, mesh.rank, Network.placed(machines, memory, half_a_wire)) / STEPS,
        "wire": after - before,
        "crossing": {axis: size for (axis, kind), size in crossing if kind == BETWEEN},
    }


def _places(here: launchers.Launched) -> dict:
    """Both placements, one after the other in the same processes.

    Ranks number the places of the mesh, in which tensor parallelism is innermost. torchrun numbers machine by machine,
    so tensor parallelism stays inside; with the ranks dealt out in turn, it goes across. All else is the same.
    """
    across = replace(here, rank=2 * here.local_rank + int(os.environ["GROUP_RANK"]), restarts=1)
    return {"inside": measured_steps(here), "across": measured_steps(across)}


@dataclass(frozen=True)
class Mistake:
    """Something wrong with one of two machines, made once: what was done, what it is, what to do about it."""

    name: str
    rank: int  # who makes it
    commit: Callable  # a context manager around the meeting of this rank
    what: str
    mend: str


def _set(**variables: str):
    return patch.dict(os.environ, variables)


def _version(torch: str):
    return patch.object(meeting, "versions", lambda: {"torch": torch})


_another_version, _this_version = partial(_version, "2.12.1"), partial(_version, "2.13.0")


@contextmanager
def _stays_away():
    raise InterruptedError
    yield


def _booted_later():
    real = time.perf_counter
    return patch.object(time, "perf_counter", lambda: real() - 1000)


CARDS = "name the card that leads to the others: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
MISTAKES = (
    Mistake("another version", 1, _another_version, "two environments", "install one environment everywhere"),
    Mistake("no such card", 1, lambda: _set(GLOO_SOCKET_IFNAME="ib0"), "a setting for other machines", CARDS),
    Mistake("the wrong card", 1, lambda: _set(GLOO_SOCKET_IFNAME="eth1"), "a card that leads elsewhere", CARDS),
    Mistake("an unreachable host", 1, lambda: _set(MASTER_ADDR="10.77.0.9"), "another first machine",
            "the same MASTER_ADDR on all: the machine of rank 0"),
    Mistake("a machine that comes late", 1, _stays_away, "a queue, a slow disk, a crash before the start",
            "look there, or --timeout"),
    Mistake("clocks apart", 1, _booted_later, "each machine's clock starts when it boots",
            "spans(later=clock_behind(axis)[0])"),
)  # fmt: skip
WALL = Mistake("a firewall that eats packets", 1, lambda: _set(), "only the store's port is open",
               "open all ports between the machines of a job")  # fmt: skip


def all_mistakes() -> list[list[str]]:
    """Every mistake committed on two machines: [what was done, what each rank saw, what it is, what to do]."""
    rows = []
    for made, options in ((MISTAKES, {}), ((WALL,), {"let_through": [namespaces.PORT]})):
        with tempfile.TemporaryDirectory() as folder:
            which = "errs" if made is MISTAKES else "walled"
            until_the_end(namespaces.by_hand(2, ["-m", PROGRAM, which, folder]), WIRE, **options)
            said = said_by_rank(folder)
        rows += [[m.name, _seen([s[m.name] for s in said]), m.what, m.mend] for m in made]
    return rows


def _seen(said: Sequence[str]) -> str:
    """What the ranks saw, once where both saw the same."""
    return said[0] if len(set(said)) == 1 else " / ".join(f"rank {i}: {s}" for i, s in enumerate(said) if s)


def _errs(here: launchers.Launched, made=MISTAKES) -> dict[str, str]:
    """Commit each mistake on its rank, and write down what this rank saw."""
    found = {}
    for number, mistake in enumerate(made):
        port, patience = str(namespaces.PORT + number), 2.0 if "late" in mistake.name else 60.0
        innocent = _this_version if mistake.commit is _another_version else _set
        with _set(MASTER_PORT=port), patch.object(meeting, "PATIENCE", 1.0):
            patience = 2.0 if "unreachable" in mistake.name else patience
            commit = mistake.commit if here.rank == mistake.rank else innocent
            found[mistake.name] = _try(here, commit, patience)
    return found


def _try(here: launchers.Launched, commit, patience: float) -> str:
    """Meet, and send one message; what was seen."""
    try:
        with commit(), launchers.process_group(here, timeout=patience):
            axis = Mesh(dp=2)["dp"]
            trace.clear()
            behind, within = trace.clock_behind(axis)
            comm.all_reduce(torch.ones(1), axis)
            ends = [comm.gather_objects(trace.spans(later=s)[-1].end, axis) for s in (0.0, behind)]
            return _apart(*ends, within)
    except InterruptedError:
        return ""
    except (ValueError, TimeoutError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}"


def _apart(ends: Sequence[float], mended: Sequence[float], within: float) -> str:
    """What the ends of one call on two ranks say of their clocks."""
    gap = abs(mended[1] - mended[0])
    said = "together" if gap < 1 and within < 1 else f"{gap:.1f} s apart"
    return f"one all-reduce ends {ends[0] - ends[1]:,.0f} s earlier on rank 1; with clock_behind, {said}"


JOBS = {"places": _places, "errs": _errs, "walled": lambda here: _errs(here, (WALL,))}


def main(arguments: Sequence[str]) -> None:
    """One rank's part, or, without arguments, the record."""
    if arguments:
        job, folder = arguments
        here = launchers.launched()
        Path(folder, f"rank{here.rank}.json").write_text(json.dumps(JOBS[job](here)))
    else:
        found = {"placements": two_placements(), "mistakes": all_mistakes()}
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
