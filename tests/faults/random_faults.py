"""Random faults in random scenes, one after the other on one pool of ranks: each with the verdict that must come."""

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from held import Held

from gpt2lab import RankFailed, Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

RANKS = 4
HANG = 0.6  # the timeout while a rank is made to hang
ONES = torch.ones(6)
LARGE = 1_200_000  # elements: several rounds of either backend


@dataclass(frozen=True)
class Scene:
    """Where a fault falls: on which axis, in tensors of how many elements, beside what, in what kind of calls."""

    axis: str = "dp"
    size: int = 6
    in_flight: bool = False  # asynchronous calls are under way, and nobody has waited for them
    messages: bool = False  # from rank to rank instead of collectives


SCENES = {
    "six numbers": Scene(),
    "large": Scene(size=LARGE),
    "in flight": Scene(size=LARGE, in_flight=True),
    "half of the ranks": Scene(axis="tp"),
    "half of the ranks, large, in flight": Scene(axis="tp", size=LARGE, in_flight=True),
    "messages": Scene(messages=True),
    "large messages": Scene(size=LARGE, messages=True),
}


def misbehave(rank, world_size, kind, culprit, before, scene="six numbers"):
    """Some good calls, then one in which the culprit does not do what the others do, then another good one."""
    scene, whole = SCENES[scene], Mesh(dp=world_size)["dp"]
    axis = whole if scene.axis == "dp" else Mesh(dp=world_size // 2, tp=2)["tp"]
    x = torch.ones(scene.size)
    for _ in range(before):
        good_calls(axis, x, scene.messages)
    if kind == "unpicklable result":
        return (i for i in range(3)) if rank == culprit else None
    under_way = begun(axis, x) if scene.in_flight else []
    if rank == culprit and kind == "skipped call":
        return None
    if kind in INSIDE:
        if rank == culprit:
            threading.Timer(random.uniform(0.0, 0.02), os.kill, (os.getpid(), INSIDE[kind])).start()
        while True:
            good_calls(axis, torch.ones(LARGE), scene.messages)
            comm.all_reduce(ONES, whole)  # or the other half would go on for ever
    if rank == culprit and kind in ON_ONE:
        ON_ONE[kind](axis, x)
    elif kind == "circle of messages":
        comm.recv(x, axis, (axis.rank + 1) % axis.size)
    elif kind in UNSEEN:
        dist.all_reduce(x, group=axis.group)
        dist.barrier(group=axis.group)
    else:
        good_calls(axis, x, scene.messages)
    for handle in under_way:
        handle.wait()
    comm.all_reduce(ONES, whole)
    return None


def good_calls(axis, x, messages):
    """A sum and a gathering, or a message to the right and one from the left."""
    if messages:
        sending = comm.isend(x, axis, (axis.rank + 1) % axis.size)
        comm.recv(x, axis, (axis.rank - 1) % axis.size)
        sending.wait()
    else:
        comm.all_reduce(x, axis)
        comm.all_gather(x, axis)


def begun(axis, x):
    """The handles of a sum and of messages around the ring, all under way."""
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    return [comm.all_reduce(x, axis, async_op=True), comm.irecv(x, axis, left), comm.isend(x, axis, right)]


def complain(axis, x):
    raise LookupError(f"rank {dist.get_rank()} complains")


ON_ONE = {  # what the culprit does instead of an all-reduce and an all-gather
    "raise": complain,
    "SIGKILL": lambda axis, x: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda axis, x: ctypes.string_at(0),
    "exit code 0": lambda axis, x: os._exit(0),
    "sleep": lambda axis, x: time.sleep(1000),
    "SIGSTOP": lambda axis, x: os.kill(os.getpid(), signal.SIGSTOP),
    "two calls swapped": lambda axis, x: (comm.all_gather(x, axis), comm.all_reduce(x, axis)),
    "another shape": lambda axis, x: comm.all_reduce(x[:4], axis),
    "another dtype": lambda axis, x: comm.all_reduce(x.double(), axis),
    "another operation": lambda axis, x: comm.all_reduce(x, axis, "max"),
    "another collective": lambda axis, x: comm.broadcast(x, axis, 0),
    # The same in torch's own calls, of which no board knows: the transport itself must notice.
    "unseen shape": lambda axis, x: dist.all_reduce(x[:4], group=axis.group),
    "unseen dtype": lambda axis, x: dist.all_reduce(x.double(), group=axis.group),
    "unseen operation": lambda axis, x: dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.group),
    "unseen collective": lambda axis, x: dist.broadcast(x, group_src=axis.rank, group=axis.group),
}
INSIDE = {"SIGKILL inside a call": signal.SIGKILL, "SIGSTOP inside a call": signal.SIGSTOP}
DIED = {
    "SIGKILL": "killed by SIGKILL",
    "SIGKILL inside a call": "killed by SIGKILL",
    "segmentation fault": "killed by SIGSEGV",
    "exit code 0": "exit code 0",
}
HANGS = ("sleep", "SIGSTOP", "SIGSTOP inside a call", "skipped call")
MISMATCHES = {  # what stands in the culprit's line alone
    "two calls swapped": " all_gather dim",
    "another shape": "(4,)",
    "another dtype": "float64",
    "another operation": "max",
    "another collective": "broadcast",
}
UNSEEN = {  # what stands in the text then
    "unseen shape": "16 bytes",
    "unseen dtype": "float64",
    "unseen operation": "MAX",
    "unseen collective": "broadcast",
}
KINDS = [*ON_ONE, *INSIDE, "skipped call", "circle of messages", "unpicklable result"]


def kinds_of(backend: str) -> list[str]:
    """What each backend has a verdict for; gloo waits, or aborts, where it is called with what does not fit."""
    return [kind for kind in KINDS if backend == "shm" or kind not in UNSEEN]


def scenes_of(kind: str) -> list[str]:
    """Where a kind of fault can fall: what does not fit together is a collective."""
    return [name for name, s in SCENES.items() if not s.messages or kind not in {*MISMATCHES, *UNSEEN}]


def right_verdict(kind: str, culprit: int, error: RankFailed) -> bool:
    """Whether an error names the right rank for the right reason."""
    text, named = str(error), error.rank == culprit
    if kind == "raise":
        return named and error.ename == "LookupError" and f"rank {culprit} complains" in text
    if kind in DIED:
        return named and error.ename == "ProcessDied" and DIED[kind] in text
    if kind in HANGS:
        words = {"sleep": "time.sleep(1000)", "skipped call": "has returned"}
        word = words.get(kind, "is stopped (SIGSTOP)")
        line = next((line for line in text.splitlines() if line.startswith(f"  rank {culprit} ")), "")
        return named and error.ename == "TimeoutError" and word in line
    if kind in MISMATCHES:
        lines = [line for line in text.splitlines() if line.startswith(f"  rank {culprit} call")]
        return error.ename == "Mismatch" and any(MISMATCHES[kind] in line.split(" #")[0] for line in lines)
    if kind in UNSEEN:
        pair = re.search(r"rank (\d) and rank (\d) made calls that do not match: (.*)", text)
        return error.ename == "Mismatch" and str(culprit) in pair.groups()[:2] and UNSEEN[kind] in pair[3]
    if kind == "circle of messages":
        circles = "0 -> 1 -> 2 -> 3 -> 0", "0 -> 1 -> 0", "2 -> 3 -> 2"
        return error.ename == "Deadlock" and any(f"a circle: {circle}." in text for circle in circles)
    return named and error.ename == "TypeError" and "cannot be sent back" in text


def total(rank, world_size):
    """What a healthy pool computes."""
    return comm.all_reduce(torch.tensor([2.0**rank]), Mesh(dp=world_size)["dp"]).item()


@dataclass
class Outcome:
    """What a soak found: wrong verdicts, how often what came, what was held early and in the end, slowest verdict."""

    wrong: list[str]
    kinds: Counter
    scenes: Counter
    early: Held
    late: Held
    slowest: float = 0.0


def soak(count: int, backend: str, folder: Path, seed: int = 0) -> Outcome:
    """`count` random faults on one pool, a healthy run after each."""
    draw, possible, wrong = random.Random(seed), kinds_of(backend), []
    kinds, scenes, early, slowest = Counter(), Counter(), None, 0.0
    with Ranks(RANKS, echo=False, backend=backend) as pool:
        pool.run(total)
        for number in range(count):
            kind = possible[number] if number < len(possible) else draw.choice(possible)
            culprit, before, scene = draw.randrange(RANKS), draw.randrange(3), draw.choice(scenes_of(kind))
            pool.timeout = HANG if kind in HANGS else 60.0
            start = time.monotonic()
            try:
                pool.run(misbehave, kind, culprit, before, scene)
                wrong.append(f"{number}: {kind} on rank {culprit} ({scene}) went unnoticed")
            except RankFailed as error:
                if not right_verdict(kind, culprit, error):
                    wrong.append(f"{number}: {kind} on rank {culprit} ({scene}): {error.ename}, {error}")
            slowest = max(slowest, time.monotonic() - start - (HANG if kind in HANGS else 0))
            kinds[kind] += 1
            scenes[scene] += 1
            pool.timeout = 60.0
            if pool.run(total) != [2.0**RANKS - 1] * RANKS:
                wrong.append(f"{number}: after {kind} a wrong sum")
            if number == min(count // 2, 40):
                early = Held.now(folder)
        return Outcome(wrong, kinds, scenes, early, Held.now(folder), slowest)
