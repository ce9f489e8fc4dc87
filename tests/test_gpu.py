"""On GPUs: every strategy over NCCL, faults, and what only there is faster.

One GPU is enough where NCCL is 2.30 or newer: ranks share it (`gpt2lab.machine.gpus`). What an older one cannot try is
skipped, and says what it would need.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from equality import one_of_each_kind
from warm import Pools

from gpt2lab import RankFailed, Ranks
from gpt2lab.machine import gpus, timing
from gpt2lab.machine.device_time import DeviceTime
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.run import read_log
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not gpus.available(), reason="there is no GPU here"),
]
TRAIN = "--batch 8 --sequence 8 --sample 0 --steps 3 --evaluate 1000 --save 1000"


def needs(ranks: int) -> None:
    """Skip where so many ranks cannot have GPUs."""
    if lacking := gpus.gpus_needed(ranks):
        pytest.skip(f"needs {lacking}")


@pytest.fixture(scope="module")
def on_gpus():
    """Live ranks by their number, whose collectives NCCL carries."""
    made = Pools("nccl")
    yield made
    made.close()


@pytest.mark.parametrize("row", one_of_each_kind(), ids=str)
def test_a_plan_on_gpus_equals_the_serial_run(on_gpus, row):
    world = Plan.parse(row.plan).world
    needs(world)
    report = verify(row.plan, row.config, row.rows, row.length, on_gpus[world], row.depth, "cuda")
    assert report.ok, f"{row}\n{report}"


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


@pytest.mark.parametrize(
    "plan", ["recompute=on", "dp=2,zero=3", "dp=2,tp=2", "pp=3,micro=4", "dp=4,zero=3,shard=2"]
)
def test_the_training_command_on_gpus_trains_as_one_process(plan, tmp_path):
    needs(Plan.parse(plan).world)
    alone = trained(tmp_path / "alone", "--device", "cpu", "--dtype", "float64")
    found = trained(tmp_path / "gpus", "--device", "cuda", "--dtype", "float64", "--plan", plan)
    assert found == pytest.approx(alone, rel=1e-10)


def die_between_sums(rank, world_size, device):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(2, device=device)
    comm.all_reduce(x, axis)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(x, axis).sum().item()


def test_a_rank_that_is_killed_among_gpus_is_named():
    """On one GPU that is not shared the only rank, else the second of two."""
    ranks = 1 if gpus.gpus_needed(2) else 2
    with Ranks(ranks, backend="nccl", echo=False, timeout=60) as pool, pytest.raises(RankFailed) as failed:
        pool.run(die_between_sums, "cuda")
    assert f"rank {ranks - 1} was killed by SIGKILL" in str(failed.value)


def late_for_the_second_sum(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(3, device="cuda")
    comm.all_reduce(x, axis)
    if rank == 1:
        time.sleep(1000)  # laggard
    comm.all_reduce(x, axis)
    time.sleep(1000)  # elsewhere: the host does not wait for a GPU


def test_a_hang_names_the_call_that_a_gpu_is_in_although_its_host_is_elsewhere():
    needs(2)
    with Ranks(2, backend="nccl", echo=False, timeout=5) as pool, pytest.raises(RankFailed) as failed:
        pool.run(late_for_the_second_sum)
    assert failed.value.rank == 1 and "# laggard" in failed.value.states[1], failed.value
    assert re.search(
        r"waits .*all_reduce #2 on axis 'dp' sum \(3,\) float32 for rank 1", failed.value.states[0]
    )


def test_pytorchs_profiler_sees_the_kernels_of_a_step():
    trainer = Trainer(build(Plan(), CONFIG, Mesh(), device="cuda"), Recipe())
    trainer.step(example_batch(CONFIG, 7, 12))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
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
