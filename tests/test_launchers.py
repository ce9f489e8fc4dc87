"""The same command under torchrun, mpirun and srun; a rank that dies costs nothing but time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from slurm import free_ports, slurm

from gpt2lab import checkpoint, pretrained
from gpt2lab.ranks import environment
from gpt2lab.run import read_log

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = ["--batch", "4", "--sequence", "8", "--dtype", "float64", "--sample", "0", "--evaluate", "1000"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def arguments(out, steps, plan="dp=2,tp=2", save=2) -> list[str]:
    return ["train", *TRAIN, "--out", str(out), "--steps", str(steps), "--plan", plan, "--save", str(save)]


def finish(command, env=ENV, timeout=300) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]


def weights(out) -> dict[str, torch.Tensor]:
    (run,) = Path(out).glob("*")
    return pretrained.load(checkpoint.all_in(run)[-1], torch.float64).state_dict()


def losses(out) -> list[float]:
    (run,) = Path(out).glob("*")
    return [e["loss"] for e in read_log(run)]


def meeting_place() -> dict[str, str]:
    """Where ranks that no torchrun brings together find each other."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}


def test_the_environment_says_who_we_are_and_whether_we_were_started_again(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert environment.place() is None
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert environment.place() == environment.Place("torchrun", 3, 4, 1, 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert environment.place() == environment.Place("torchrun", 3, 4, 1, 4, "a job", 2)


MEETS_AND_DIES = """
import os, torch
from gpt2lab.ranks import comm, environment
from gpt2lab.ranks.mesh import Mesh
with environment.joined(environment.place(), timeout=20):
    print(comm.all_reduce(torch.ones(1), Mesh(dp=2)["dp"]).item(), flush=True)
    os._exit(1)
"""


def test_ranks_that_are_started_again_do_not_call_at_the_doors_of_the_dead():
    """torchrun keeps its store through a restart, with the addresses of the ranks that died in it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("0", "1", "2"):
        job = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": attempt}
        job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", MEETS_AND_DIES],
                env=ENV | job | {"RANK": r, "LOCAL_RANK": r},
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in "01"
        ]
        try:
            assert [rank.communicate(timeout=50)[0] for rank in ranks] == ["2.0\n", "2.0\n"], attempt
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through Linux's /proc")
def test_a_rank_killed_under_torchrun_ends_with_the_weights_of_an_undisturbed_run(tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "gpt2lab"]
    finish([*command, *arguments(tmp_path / "calm", 10, "dp=2,zero=1")])
    disturbed = subprocess.Popen([*command, *arguments(tmp_path / "hit", 10, "dp=2,zero=1")], env=ENV)
    until = time.monotonic() + 200
    while not list((tmp_path / "hit").glob("*/checkpoint-*4/state.json")) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(children(disturbed.pid)[-1], signal.SIGKILL)
    assert disturbed.wait(timeout=300) == 0
    calm, hit = weights(tmp_path / "calm"), weights(tmp_path / "hit")
    assert all(torch.equal(calm[n], hit[n]) for n in calm)
    assert losses(tmp_path / "calm") == losses(tmp_path / "hit")
    (run,) = (tmp_path / "hit").glob("*")
    assert len((run / "log.jsonl").read_text().splitlines()) >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_under_mpirun_equal_four_ranks_of_our_own(tmp_path):
    mpirun = shutil.which("mpirun")
    if not mpirun:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    env = ENV | meeting_place()
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ours = [sys.executable, "-m", "gpt2lab"]
    finish([mpirun, "--oversubscribe", "-np", "4", *ours, *arguments(tmp_path / "mpi", 3)], env)
    finish([*ours, *arguments(tmp_path / "own", 3)])
    assert losses(tmp_path / "mpi") == losses(tmp_path / "own")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_under_srun_equal_four_ranks_of_our_own(tmp_path):
    ours = [sys.executable, "-m", "gpt2lab"]
    (tmp_path / "cluster").mkdir()
    with slurm(tmp_path / "cluster") as cluster:
        env = ENV | cluster | meeting_place()
        finish(["srun", "--ntasks", "4", *ours, *arguments(tmp_path / "srun", 3)], env)
    finish([*ours, *arguments(tmp_path / "own", 3)])
    assert losses(tmp_path / "srun") == losses(tmp_path / "own")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_under_torchrun_equal_four_ranks_of_our_own(tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "gpt2lab"]
    finish([*torchrun, *arguments(tmp_path / "torchrun", 3)])
    finish([sys.executable, "-m", "gpt2lab", *arguments(tmp_path / "own", 3)])
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "own")


def test_a_dry_run_prints_the_line_of_every_launcher(capsys):
    from gpt2lab.cli import main

    assert main(["train", "--plan", "dp=2,tp=2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torchrun --standalone --nproc-per-node 4 -m gpt2lab train")
    assert any(line.startswith("torchrun --nnodes 2 --nproc-per-node 2 --max-restarts") for line in lines)
    assert any("srun --nodes 2 --ntasks 4 python -m gpt2lab train" in line for line in lines)
    assert any("mpirun -x MASTER_ADDR -x MASTER_PORT -np 4 python" in line for line in lines)
    assert main(["train", "--dry-run"]) == 0
    assert "torchrun" not in capsys.readouterr().out
