"""Ranks that somebody else started (torchrun, Slurm's srun, Open MPI's mpirun): the environment says who we are."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

LAUNCHERS = {  # name: where it writes the global rank, the number of ranks, the rank on this machine
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
NEIGHBOURS = {  # name: where it writes how many ranks a machine has (Slurm: such as 4(x2),3)
    "torchrun": "LOCAL_WORLD_SIZE",
    "srun": "SLURM_TASKS_PER_NODE",
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
def joined(here: Place, device: str = "cpu", timeout: float = 60.0):
    """Join the job's process group; leave it at the end.

    gloo carries tensors of the CPU; where the device is cuda, NCCL carries those of the GPUs, one for each rank.

    Ranks find each other under the number of this start: torchrun keeps its store through a restart, with the
    addresses of the ranks that have died in it.
    Raises ValueError where the launcher did not say where the ranks meet (MASTER_ADDR, MASTER_PORT).
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
    span = timedelta(seconds=timeout)
    store = next(dist.rendezvous("env://", here.rank, here.world_size, timeout=span))[0]
    store = dist.PrefixStore(f"start {here.restarts}", store)
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=span)
    try:
        yield here
    finally:
        dist.destroy_process_group()
