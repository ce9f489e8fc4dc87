"""Ranks that somebody else started (torchrun, Slurm's srun, Open MPI's mpirun): the environment says who we are."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from . import status_board

LAUNCHERS = {  # name: where it writes the global rank, the number of ranks, the rank on this machine
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a plain sbatch script is no step
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
NEIGHBOURS = {  # name: where it writes how many ranks a machine has (Slurm: such as 4(x2),3)
    "torchrun": "LOCAL_WORLD_SIZE",
    "srun": "SLURM_STEP_TASKS_PER_NODE",
    "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
WITH_GPUS = "cpu:gloo,cuda:nccl"  # the backend of ranks of which each has a GPU
RESTARTS = {  # name: where it writes what the job is called, and how often it was started again
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "srun": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
}


@dataclass(frozen=True)
class Place:
    """Who this process is: its launcher, global rank, number of ranks, rank on this machine, and of how many there.

    `job` is what the launcher calls the job, also after it has started it again for the `restarts`-th time.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    neighbours: int
    job: str = ""
    restarts: int = 0


def place() -> Place | None:
    """Who this process is in a job started from outside; None when it was started plainly."""
    for launcher, names in LAUNCHERS.items():
        if all(n in os.environ for n in names):
            rank, world_size, local_rank = (int(os.environ[n]) for n in names)
            if world_size > 1:
                job, restarts = RESTARTS.get(launcher, ("", ""))
                again = int(os.environ.get(restarts, "0"))
                said = os.environ.get(NEIGHBOURS[launcher], str(world_size))
                most = max(int(part.split("(")[0]) for part in said.split(","))
                return Place(launcher, rank, world_size, local_rank, most, os.environ.get(job, ""), again)
    return None


@contextmanager
def joined(here: Place, device: str = "cpu", timeout: float = 300.0):
    """Join the job's process group; leave it at the end.

    gloo carries tensors of the CPU; where the device is cuda, NCCL carries those of the GPUs, one for each rank.

    Ranks find each other under the number of this start: torchrun keeps its store through a restart, with the
    addresses of the ranks that have died in it.
    Raises ValueError where the launcher did not say where the ranks meet (MASTER_ADDR, MASTER_PORT), TimeoutError where
    others do not come or keep this rank waiting for `timeout` seconds, and ConnectionError where one has gone.
    """
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ValueError(
            f"{here.launcher} started {here.world_size} ranks, but {' and '.join(missing)} is not set. Export the "
            f"first machine's address as MASTER_ADDR and a free port as MASTER_PORT."
        )
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(here.local_rank)
        backend = WITH_GPUS
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        _meet(here, backend, timedelta(seconds=timeout))
    except dist.DistError as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TimeoutError(
            f"rank {here.rank} waited {timeout:g} s at {meeting}, and not all {here.world_size} ranks came. "
            f"Look for one that could not start, or give them longer: --timeout."
        ) from error
    try:
        yield here
    except RuntimeError as error:
        raise _in_words(error, here.rank, timeout) from error
    finally:
        dist.destroy_process_group()


def _meet(here: Place, backend: str, span: timedelta) -> None:
    """Find the other ranks and form the process group of all."""
    store = next(dist.rendezvous("env://", here.rank, here.world_size, timeout=span))[0]
    store = dist.PrefixStore(f"start {here.restarts}", store)
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=span)


def _in_words(error: RuntimeError, rank: int, timeout: float) -> Exception:
    """What a rank that lost the others can say by itself: no parent watches it, and torch's error names an address."""
    said = str(error).lower()
    if "timed out" in said:
        return TimeoutError(
            f"rank {rank} waited {timeout:g} s in {status_board.last_words()}, and nobody came. One of them hangs or "
            f"is slow; --timeout gives it longer."
        )
    if "connection" in said or "socket" in said:
        return ConnectionError(
            f"rank {rank} lost its connection in {status_board.last_words()}. One of them has died or left: see what "
            "it said."
        )
    return error
