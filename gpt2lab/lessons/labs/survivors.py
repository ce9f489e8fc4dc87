"""Ranks that outlive each other: each is a pool of its own, and they meet in a process group for one run.

`Ranks` ends all of its ranks when one of them dies. Here a death ends one pool, and what the others `kept` stays.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...processes import status_board
from ...processes.launch import RankFailed, Ranks
from ...ranks import comm
from ...storage import checkpoint
from ...train import Trainer, moments_of


def apart(count: int) -> list[Ranks]:
    """Pools of one rank each, started here: only the main thread may start the process that starts them."""
    pools = [Ranks(1, timeout=300, echo=False, backend="gloo") for _ in range(count)]
    for one in pools:
        one.run(lambda rank, world_size: None)
    return pools


def together(pools: list[Ranks], fn, *args) -> list:
    """What `fn(rank, world_size, *args)` returns on each of these ranks, or how it ended, in words.

    They make a process group anew, so one that was started again takes the place of a dead one. A rank that catches the
    RuntimeError of a call to a dead one lives on.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(pools)) as threads:
        given = len(pools), folder, fn, *args
        return list(threads.map(lambda rank: _result(pools[rank], rank, *given), range(len(pools))))


def _result(pool: Ranks, *given):
    try:
        return pool.run(_met, *given)[0]
    except RankFailed as failed:
        return str(failed).splitlines()[-1].removeprefix("rank 0 ").partition(" (")[0]


def _met(_, __, rank: int, size: int, folder: str, fn, *args):
    """Leave the process group that a pool begins with, join a new one, call `fn` in it, and leave that one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    board = Path(folder, f"board {rank}")  # of its own: nobody compares calls, as a new rank has made fewer
    status_board.Board(board, size, create=True).close()
    status_board.attach(board, rank, size)
    how = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), **how)
    try:
        return fn(rank, size, *args)
    finally:
        dist.destroy_process_group()  # who waits for this rank hears that it has left


def held(one: Trainer) -> list[torch.Tensor]:
    """What is lost with this rank: its parts of weights and moments, as views of its memory."""
    return [box.tensor for entry in checkpoint.entries(one).values() for box in entry.boxes]


@torch.no_grad()
def fill(one: Trainer, flat: torch.Tensor, step: int) -> None:
    """Let a new trainer go on from what a rank of the same plan held after a step, joined; all ranks call this."""
    for piece in one.parallel.sync.pieces:
        moments = {kind: torch.zeros_like(piece.tensor) for kind in moments_of(piece, one.recipe)}
        one.optimizer.state[piece.tensor] = {"step": torch.tensor(float(step)), **moments}
    parts = held(one)
    for x, values in zip(parts, flat.split([x.numel() for x in parts]), strict=True):
        x.copy_(values.view_as(x))
    one.parallel.sync.updated()
    one.steps = step


def take_back(one: Trainer, copies: dict[int, tuple]) -> None:
    """Go on from the newest step that all ranks know of {step: (own shard, that of the rank before)}."""
    axis = one.parallel.mesh["dp"]
    every = comm.gather_objects(list(copies), axis)
    known = [set(steps) for steps in every if steps]
    for rank, steps in enumerate(every):
        if known and not steps and not every[(rank + 1) % axis.size]:
            raise ValueError(f"The shard of rank {rank} is lost, and its copy. Resume from the disk.")
    if known:  # one that was started again knows none, and gets its shard from the rank after it
        step = max(set.intersection(*known))
        own, other = copies.get(step, (None, torch.empty(0, dtype=torch.float64)))
        lengths = comm.gather_objects(len(other), axis)
        back = comm.ring_shift(other, axis, by=-1, shape=(lengths[(axis.rank + 1) % axis.size],))
        fill(one, back if own is None else own, step)
