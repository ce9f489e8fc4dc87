"""The training command on GPUs: bfloat16, compiled blocks, hybrid sharding, and kernels in a trace."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from gpt2lab import RankFailed, Ranks
from gpt2lab.machine import timing
from gpt2lab.machine.device_time import DeviceTime
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.run import read_log
from gpt2lab.train import Recipe, Trainer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPUS, reason="there is no GPU here"),
]
TRAIN = "--batch 8 --sequence 8 --sample 0 --steps 3 --evaluate 1000 --save 1000"


def trained(folder, *more: str) -> list[float]:
    """The losses of a run of the training command."""
    command = [sys.executable, "-m", "gpt2lab", "train", *TRAIN.split(), "--out", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [entry["loss"] for entry in read_log(next(folder.iterdir()))]


@pytest.mark.parametrize(("option", "off"), [("--autocast", 3e-2), ("--compile", 1e-4)])
def test_what_is_faster_on_a_gpu_trains_almost_alike(option, off, tmp_path):
    plain = trained(tmp_path / "plain", "--device", "cuda")
    assert trained(tmp_path / "fast", "--device", "cuda", option) == pytest.approx(plain, rel=off)


def test_hybrid_sharding_on_four_gpus_trains_as_one_process(tmp_path):
    if GPUS < 4:
        pytest.skip(f"dp=4,zero=3,shard=2 needs 4 GPUs, and there are {GPUS}")
    alone = trained(tmp_path / "alone", "--device", "cpu", "--dtype", "float64")
    more = "--device", "cuda", "--dtype", "float64", "--plan", "dp=4,zero=3,shard=2"
    assert trained(tmp_path / "four", *more) == pytest.approx(alone, rel=1e-10)


def die_between_sums(rank, world_size, device):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(2, device=device)
    comm.all_reduce(x, axis)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(x, axis).sum().item()


def test_a_rank_that_is_killed_among_gpus_is_named():
    """On one GPU the only rank, on more the second of two."""
    ranks = min(2, GPUS)
    with Ranks(ranks, backend="nccl", echo=False, timeout=60) as pool, pytest.raises(RankFailed) as failed:
        pool.run(die_between_sums, "cuda")
    assert f"rank {ranks - 1} was killed by SIGKILL" in str(failed.value)


def test_pytorchs_profiler_sees_the_kernels_of_a_step():
    trainer = Trainer(build(Plan(), CONFIG, Mesh(), device="cuda"), Recipe())
    trainer.step(example_batch(CONFIG, 7, 12))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        trainer.step(example_batch(CONFIG, 7, 12))
        torch.cuda.synchronize()
    assert sum(event.self_device_time_total for event in seen.key_averages()) > 0


def test_the_time_of_a_gpu_is_when_it_gets_there_and_not_when_the_host_goes_on():
    x = torch.ones(4096, 4096, device="cuda")
    timing.finish_devices()
    for _ in range(200):
        x = x @ x
    end, went_on = DeviceTime(), time.perf_counter()
    timing.finish_devices()
    assert went_on < float(end) < time.perf_counter()
