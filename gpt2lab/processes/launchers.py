"""Ranks started by torchrun, Slurm's srun or Open MPI's mpirun, which describe each rank in environment variables."""

import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..machine import gpus
from . import meeting, status_board

LAUNCHERS = {  # name: the variables for the global rank, the number of ranks, the rank on this machine
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a plain sbatch script is no step
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
LOCAL_SIZES = {  # name: the variable for the number of ranks of each machine (Slurm: for example 4(x2),3)
    "torchrun": "LOCAL_WORLD_SIZE",
    "srun": "SLURM_STEP_TASKS_PER_NODE",
    "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
WITH_GPUS = "cpu:gloo,cuda:nccl"  # the backend where each rank has a GPU
RESTARTS = {  # name: the variables for the job's name and the number of restarts so far
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "srun": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
}


@dataclass(frozen=True)
class Launched:
    """A rank as its launcher describes it: global rank of `world_size`, `local_rank` of `local_size` on its machine.

    `job` is the launcher's name for the job, the same after each of its `restarts`.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    job: str = ""
    restarts: int = 0


def launched() -> Launched | None:
    """This process as a rank of a launcher's job; None when no launcher started it."""
    for launcher, names in LAUNCHERS.items():
        if all(n in os.environ for n in names):
            rank, world_size, local_rank = (_number(n) for n in names)
            if world_size > 1:
                job, restarts = RESTARTS.get(launcher, ("", ""))
                again = _number(restarts, 0)
                sizes = os.environ.get(LOCAL_SIZES[launcher], str(world_size))
                most = max(_number(LOCAL_SIZES[launcher], 0, s.split("(")[0]) for s in sizes.split(","))
                return Launched(launcher, rank, world_size, local_rank, most, os.environ.get(job, ""), again)
    return None


def _number(name: str, default: int | None = None, part: str | None = None) -> int:
    """A whole number from the environment, or `part` of one. Raises ValueError, with its name, for anything else."""
    said = os.environ.get(name, default)
    try:
        return int(part or said)
    except ValueError:
        raise ValueError(f"{name}={said} is no whole number. Set it to one, or unset it.") from None


JOINED: list[int] = []
"""The rank of this process, once it has joined a job that a launcher started."""


@contextmanager
def process_group(here: Launched, device: str = "cpu", timeout: float = 300.0):
    """Join the job's process group; leave it at the end.

    gloo carries CPU tensors; with device cuda, NCCL carries the tensors of the GPUs, one for each rank.

    Raises ValueError where the launcher did not set the store's address (MASTER_ADDR, MASTER_PORT) or machines have
    different versions, TimeoutError where other ranks do not come or keep this one waiting for `timeout` seconds, and
    ConnectionError where one cannot be reached or has gone.
    """
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ValueError(
            f"{here.launcher} started {here.world_size} ranks, but {' and '.join(missing)} is not set. Export the "
            f"first machine's address as MASTER_ADDR and a free port as MASTER_PORT."
        )
    backend, gpu = (WITH_GPUS, gpus.take_gpu(here.local_rank)) if device == "cuda" else ("gloo", None)
    torch.set_num_threads(max(1, _number("OMP_NUM_THREADS", 1)))  # 0 of them, to OpenMP, is no number
    address = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    if not 0 < address[1] < 2**16:
        raise ValueError(f"MASTER_PORT={address[1]} is no port. Use 1 to 65535.")
    if not 0 <= here.rank < here.world_size:
        raise ValueError(
            f"There is no rank {here.rank} of {here.world_size}. Let the launcher use 0 to one less."
        )
    try:
        socket.getaddrinfo(address[0], None, socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"There is no machine MASTER_ADDR={address[0]} that this one can find by IPv4 ({error.strerror}). "
            "Use a name that every machine knows, or an IPv4 address, such as 10.0.0.1."
        ) from None
    try:
        store = meeting.open_store(here, *address, timeout)
    except dist.DistError as error:
        if "address already in use" not in str(error).lower():
            raise
        raise ValueError(
            f"The port MASTER_PORT={address[1]} is taken by another program. Use another one."
        ) from None
    meeting.meet_all(store, here, address[0], timeout)
    try:
        sizes = {"rank": here.rank, "world_size": here.world_size, "timeout": timedelta(seconds=timeout)}
        dist.init_process_group(backend, store=store, **sizes, device_id=gpu)
    except RuntimeError as error:
        raise ConnectionError(f"rank {here.rank} found all others, but no way to them: {error}") from error
    JOINED.append(here.rank)
    try:
        yield here
    except RuntimeError as error:
        raise _explained(error, here.rank, timeout) from error
    finally:
        dist.destroy_process_group()


def _explained(error: RuntimeError, rank: int, timeout: float) -> Exception:
    """The error of a rank that lost the others, with its call: torch's own error names only an address."""
    said = str(error).lower()
    if "timed out" in said:
        return TimeoutError(
            f"rank {rank} waited {timeout:g} s in {status_board.current_call()}, and nobody came. One of them hangs or "
            f"is slow; --timeout allows more time."
        )
    if "connection" in said or "socket" in said:
        return ConnectionError(
            f"rank {rank} lost its connection in {status_board.current_call()}. One of them has died or left: see its "
            "output."
        )
    return error
