"""Training on GPUs: every strategy keeps to its rank's device, and who asks for GPUs that are not there hears of it."""

import ast
import json
import os
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from planting import bugs, is_killed

from gpt2lab import cli, run
from gpt2lab.corpus.batches import Batch
from gpt2lab.machine import gpus
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.processes import launchers, rank_process
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.run import Options
from gpt2lab.storage import checkpoint
from gpt2lab.train import Recipe, Trainer

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
PLANS = ["serial", "recompute=on", "loss=chunked", "dp=2,data=naive", "dp=2,data=server", "dp=3,data=servers"]
PLANS += ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,data=owner"]
PLANS += ["tp=2", "tp=2,sp=on", "pp=2,micro=2", "pp=2,micro=4,schedule=zb_h1", "pp=2,micro=3,schedule=zb_v"]
PLANS += [f"cp=2,exchange={name}" for name in ("qkv", "kv", "kv-roots", "triangle", "ring", "heads")]
PLANS += ["cp=2,layout=zigzag,exchange=ring", "dp=2,tp=2"]


@pytest.fixture(scope="module")
def steps():
    """What every plan does on a device that does not exist, from a process of its own."""
    command = [sys.executable, str(HERE / "device_steps.py"), *PLANS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_never_mixes_devices(steps, plan):
    assert all(found == ["gpu:0"] for found in steps[plan]), steps[plan]


def test_mutant_that_forgets_to_move_the_batch_is_noticed(steps):
    (found,) = steps["mutant"]
    assert "found at least two devices, gpu:0 and cpu" in found


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs; what is done with them is written down."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: done.append(("set", gpu)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **how: done.append((backend, how["device_id"]))
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    return done


def moved(monkeypatch, device: str) -> list:
    """What is done with each of the four tensors of a batch when it moves."""
    batch, done = example_batch(CONFIG, 2, 3), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: done.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, where, **how: done.append((where, how)) or t)
    batch.to(device)
    return done


def test_a_batch_goes_to_a_gpu_from_pinned_memory_and_the_host_does_not_wait(monkeypatch):
    assert moved(monkeypatch, "cuda") == 4 * ["pinned", ("cuda", {"non_blocking": True})]
    assert moved(monkeypatch, "cpu") == 4 * [("cpu", {})]


def test_gpus_that_are_not_there_are_refused_in_one_sentence(two_gpus, capsys):
    assert cli.main(["train", "--device", "cuda", "--plan", "dp=3", "--steps", "1", "--bench"]) != 0
    said = capsys.readouterr().err
    assert "--device cuda needs a GPU for each of the 3 ranks of this machine, and PyTorch sees 2 (" in said


@pytest.mark.parametrize(
    ("asked", "ranks", "used"),
    [("auto", 2, "cuda"), ("auto", 3, "cpu"), ("cpu", 1, "cpu"), ("cuda", 2, "cuda")],
)
def test_each_rank_has_a_gpu_of_its_own_or_none_has(asked, ranks, used, two_gpus):
    assert Options(device=asked).the_device(ranks) == used


def test_slurm_says_how_many_ranks_share_a_machine(monkeypatch):
    for name, value in {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2),3")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launchers.launched().local_size == 4


def joined(starter, two_gpus, monkeypatch, tmp_path):
    """Rank 3 of 4 joins, the second of its machine."""
    if starter == "launch":
        monkeypatch.setattr(rank_process.status_board, "attach", lambda *_: None)
        rank_process._join_group(3, 4, str(tmp_path), "nccl", 60.0)
    else:
        monkeypatch.setattr(launchers.meeting, "open_store", lambda *_: None)
        monkeypatch.setattr(launchers.meeting, "meet_all", lambda *_: None)
        here = SimpleNamespace(rank=3, world_size=4, local_rank=1, launcher="torchrun")
        with launchers.process_group(here, "cuda"):
            pass
    return two_gpus


@pytest.mark.parametrize("starter", ["launch", "launcher"])
def test_a_rank_names_its_gpu_when_it_joins(starter, two_gpus, monkeypatch, tmp_path):
    """So NCCL connects all ranks at once, and none guesses its device from its number."""
    gpu = torch.device("cuda", 1)
    found = joined(starter, two_gpus, monkeypatch, tmp_path)
    assert found == [("set", gpu), (launchers.WITH_GPUS, gpu)]


def seconds_of_steps(monkeypatch, late: float) -> list[float]:
    """What a run says of its steps, on a device that is done `late` seconds after it was asked to be."""
    ticks, waits = count(1), []
    wait = lambda: waits.append(late)
    clock = SimpleNamespace(perf_counter=lambda: sum(waits) + 1e-3 * next(ticks))
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(run.speed, "matmul_rate", lambda **_: 1.0)
    monkeypatch.setitem(PRESETS, "nano", GPT2Config(50257, 16, 1, 2, 8))
    options = Options(steps=2, batch=2, sequence=8, bench=True, fast=False, device="cpu")
    monkeypatch.setattr(run, "_stopped", lambda *_: False)
    return [entry["seconds"] for entry in run.start(0, 1, options, None, None)]


def test_the_seconds_of_a_step_end_when_the_device_has_finished_it(monkeypatch):
    assert seconds_of_steps(monkeypatch, 5.0) == pytest.approx([5.0, 5.0], abs=0.1)


def resumed_on(monkeypatch, device: str) -> set[str]:
    """The devices of an optimizer's state after a checkpoint was loaded for a piece on this device."""
    state = {"step": 3, "optimizer": "adamw"}
    monkeypatch.setattr(checkpoint, "read_state", lambda *_: state)
    monkeypatch.setattr(checkpoint.huggingface, "read_config", lambda _: CONFIG)
    monkeypatch.setattr(checkpoint, "entries", lambda *_: {})
    monkeypatch.setattr(checkpoint.reading, "read", lambda *_: None)
    piece = SimpleNamespace(tensor=torch.empty(3, device=device), spec=SimpleNamespace(load=False))
    sync = SimpleNamespace(pieces=[piece], updated=lambda: None)
    parallel = SimpleNamespace(mesh=Mesh(), model=SimpleNamespace(config=CONFIG), sync=sync)
    trainer = object.__new__(Trainer)
    vars(trainer).update(parallel=parallel, recipe=Recipe(), optimizer=SimpleNamespace(state={}), steps=0)
    checkpoint.load("anywhere", trainer)
    return {t.device.type for t in trainer.optimizer.state[piece.tensor].values()}


def test_a_resumed_optimizer_has_its_state_where_its_weights_are(monkeypatch):
    """Fused AdamW refuses a step count on the CPU beside weights on a GPU; meta stands for any other device."""
    assert resumed_on(monkeypatch, "meta") == {"meta"}


MUTANTS = {
    "a batch is copied from memory that may move":
        (Batch.to, "t.pin_memory().to(", "t.to(",
         test_a_batch_goes_to_a_gpu_from_pinned_memory_and_the_host_does_not_wait),
    "launch forgets the GPU of a rank":
        (rank_process._join_group, '"device_id": gpu', '"device_id": None',
         (test_a_rank_names_its_gpu_when_it_joins, "launch")),
    "a launcher's rank forgets its GPU":
        (launchers.process_group, "device_id=gpu", "device_id=None",
         (test_a_rank_names_its_gpu_when_it_joins, "launcher")),
    "a step does not wait for the device":
        (run._loop, "timing.finish_devices()", "pass",
         test_the_seconds_of_a_step_end_when_the_device_has_finished_it),
    "steps are counted on the CPU":
        (checkpoint.load, ", device=piece.tensor.device", "",
         test_a_resumed_optimizer_has_its_state_where_its_weights_are),
}  # fmt: skip


@bugs(MUTANTS)
def test_mutant_is_killed(bug, check):
    assert is_killed(bug, check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("plan", ["serial", "recompute=on", "loss=chunked"])
def test_a_gpu_trains_as_the_cpu_does(plan):
    losses = {}
    for device in ("cpu", "cuda"):
        parallel = build(Plan.parse(plan), CONFIG, Mesh(), torch.float64, device=device)
        trainer = Trainer(parallel, Recipe(lr=1e-3))
        losses[device] = [trainer.step(example_batch(CONFIG, 7, 12)).loss for _ in range(5)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-10)


def test_more_ranks_than_gpus_are_refused_in_one_sentence(two_gpus):
    needs = "needs a GPU for each of the 3 ranks of this machine, and PyTorch sees 2 (ranks share GPUs with NCCL 2.30"
    with pytest.raises(ValueError, match=re.escape(needs)):
        Ranks(3, backend="nccl")


@pytest.mark.parametrize(
    ("said", "version", "used"),
    [("1", (2, 30, 4), "cuda"), ("1", (2, 29, 7), "cpu"), ("0", (2, 30, 4), "cpu")],
)
def test_ranks_share_gpus_where_nccl_can_and_is_told_so(said, version, used, two_gpus, monkeypatch):
    monkeypatch.setattr(gpus, "nccl_version", lambda: version)
    monkeypatch.setenv(gpus.SHARE, said)
    assert Options().the_device(3) == used
    assert [gpus.take_gpu(rank).index for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(("said", "used"), [(None, "EAGER"), ("LAZY", "LAZY")])
def test_kernels_are_loaded_before_a_receive_can_keep_the_gpu_busy(said, used, monkeypatch):
    """CUDA reads the variable when it starts, and the first thing that starts it is the question for GPUs."""
    seen = []
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    if said:
        monkeypatch.setenv("CUDA_MODULE_LOADING", said)
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: not seen.append(os.environ["CUDA_MODULE_LOADING"])
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    for ask in (gpus.available, lambda: Options().the_device(1), lambda: gpus.take_gpu(0)):
        ask()
    assert set(seen) == {used}


def test_every_path_of_a_machine_with_gpus_names_a_test_that_is_there():
    """The table of lesson 19; what is tested on GPUs carries the mark that `make test-gpu` runs."""
    lesson = (HERE.parent / "notebooks/src/19_beyond_one_machine.py").read_text()
    told = ast.literal_eval(re.search(r"^TESTED = (\{.*?^\})", lesson, re.M | re.S)[1])
    files = [(HERE / name).read_text() for name in ("test_devices.py", "test_gpu.py")]
    for how, names in told.items():
        for name in names.values():
            (before,) = [text.partition(f"def {name}(")[0] for text in files if f"def {name}(" in text]
            on_gpus = (
                "mark.gpu" in before.split("\n\n\n")[-1] or "pytestmark = [\n    pytest.mark.gpu" in before
            )
            assert (how == "on GPUs") == on_gpus, name
