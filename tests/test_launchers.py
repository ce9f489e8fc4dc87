"""The same command under torchrun, mpirun and srun; a rank that dies costs nothing but time."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from slurm import free_ports, slurm

from gpt2lab.commands import folders
from gpt2lab.machine import checksum
from gpt2lab.processes import launchers, meeting
from gpt2lab.run import read_log
from gpt2lab.storage import checkpoint, huggingface

pytestmark = pytest.mark.live
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
    return huggingface.load(checkpoint.all_in(run)[-1], torch.float64).state_dict()


def losses(out) -> list[float]:
    (run,) = Path(out).glob("*")
    return [e["loss"] for e in read_log(run)]


def meeting_place() -> dict[str, str]:
    """Where ranks that no torchrun brings together find each other."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}


@contextlib.contextmanager
def ranks_of(command, ranks="01", **job):
    """Two ranks as a launcher starts them: the environment says who each is. Whatever happens, they end."""
    job = {"WORLD_SIZE": "2", **meeting_place(), **job}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = [subprocess.Popen(command, env=ENV | job | {"RANK": r, "LOCAL_RANK": r}, **how) for r in ranks]
    try:
        yield found
    finally:
        for rank in found:
            rank.kill()
            rank.communicate()


TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
AGAIN = TORCH | {"TORCHELASTIC_RUN_ID": "a job", "TORCHELASTIC_RESTART_COUNT": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = BATCH | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
WHO = {
    "nobody": ({}, None),
    "a rank of torchrun": (TORCH, launchers.Launched("torchrun", 3, 4, 1, 4)),
    "one that was started again": (AGAIN, launchers.Launched("torchrun", 3, 4, 1, 4, "a job", 2)),
    "no rank but a batch script of Slurm": (BATCH, None),
    "a rank in a step that srun starts": (STEP, launchers.Launched("srun", 0, 4, 0, 2)),
}


@pytest.mark.parametrize("who", WHO)
def test_the_environment_says_who_we_are(who, monkeypatch):
    says, found = WHO[who]
    for name in TORCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in says.items():
        monkeypatch.setenv(name, value)
    assert launchers.launched() == found


LOSES_THE_OTHER = """
import os, sys, time, torch
from pathlib import Path
from gpt2lab.processes import launchers, meeting
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
Path(sys.argv[2], os.environ["RANK"]).touch()  # imported: from here on the ranks are seldom far from each other
while sys.argv[1] != "does not come" and len(list(Path(sys.argv[2]).iterdir())) < 2:
    time.sleep(0.01)
with launchers.process_group(launchers.launched(), timeout=8):
    axis = Mesh(dp=2)["dp"]
    comm.all_reduce(torch.ones(1), axis)
    if axis.rank == 1:
        os._exit(1) if sys.argv[1] == "dies" else time.sleep(60)
    comm.all_reduce(torch.ones(1), axis)
"""
SAID = {
    "hangs": "TimeoutError: rank 0 waited 8 s in all_reduce #2 on axis 'dp' with rank 1 (File",
    "dies": "ConnectionError: rank 0 lost its connection in all_reduce #2 on axis 'dp' with rank 1 (File",
    "does not come": "TimeoutError: rank 1 of 2 did not come within 8 s. Look there for a program",
}


@pytest.mark.parametrize("how", SAID)
def test_a_rank_that_loses_the_others_says_in_which_call_and_whom(how, tmp_path):
    """Beyond one machine no parent watches the ranks: each can only speak for itself."""
    command = [sys.executable, "-c", LOSES_THE_OTHER, how, tmp_path]
    with ranks_of(command, "0" if how == "does not come" else "01") as ranks:
        assert SAID[how] in ranks[0].communicate(timeout=200)[1].splitlines()[-1]


def test_a_rank_that_no_rank_0_answers_says_where_it_has_asked(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here, (port,) = launchers.Launched("Slurm", 1, 2, 1, 2), free_ports(1)
    words = f"rank 1 on .* waited 0.2 s at 127.0.0.1:{port}, and no rank 0 answered .Connection refused"
    with pytest.raises(TimeoutError, match=words):
        meeting.open_store(here, "127.0.0.1", port, 0.2)


@pytest.mark.parametrize("why", ["is damaged: it is not the text", "Another process is training in"])
def test_what_a_launcher_s_ranks_cannot_do_as_typed_ends_with_2_on_each(why, tmp_path):
    """A folder that another process trains in, which only rank 0 notices; a damaged checkpoint."""
    folder = tmp_path / "run" / checkpoint.name(1)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{")
    (folder.parent / "options.json").write_text('{"plan": "dp=2", "batch": 2, "sequence": 8}')
    command = [sys.executable, "-m", "gpt2lab", "train", "--resume", folder]
    with folders.occupied(folder.parent if why.startswith("Another") else None), ranks_of(command) as ranks:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [2, 2], said
    assert why in said[0] and "Traceback" not in said[0] + said[1]


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([1, 2], "ranks 1 to 2"), ([0, 4, 5, 6, 9], "ranks 0, 4 to 6, 9")]
)
def test_missing_ranks_are_named_in_few_words(ranks, words):
    assert meeting.ranks_in_words(ranks) == words


def test_the_card_is_the_one_that_leads_to_the_first_machine_unless_another_is_named(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("other systems have other names for cards")
    monkeypatch.delenv(meeting.CARD, raising=False)
    assert meeting.own_address("127.0.0.1") == "127.0.0.1" and os.environ[meeting.CARD] == "lo"
    cards = meeting.cards()
    monkeypatch.setenv(meeting.CARD, ",".join(cards))  # as gloo takes them
    assert meeting.own_address("127.0.0.1") == [*cards.values()][0]
    for names in ("ib0", "lo,ib0"):
        monkeypatch.setenv(meeting.CARD, names)
        words = rf"{names}, but .* has no network card ib0 with an address. It has .*lo \(127.0.0.1\)"
        with pytest.raises(ValueError, match=words):
            meeting.own_address("127.0.0.1")


def test_what_all_machines_must_share_sees_a_changed_file(tmp_path, monkeypatch):
    seen = []
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "machine").mkdir(exist_ok=True)
        (tmp_path / "model.py").write_text(text)
        monkeypatch.setattr(checksum, "__file__", str(tmp_path / "machine" / "checksum.py"))
        seen.append(meeting.versions())
    assert seen[0] != seen[1] and set(seen[0]) == {"Python", "torch", "gpt2lab's files"}


MEETS_AND_DIES = """
import os, torch
from gpt2lab.processes import launchers, meeting
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
with launchers.process_group(launchers.launched(), timeout=200):
    print(comm.all_reduce(torch.ones(1), Mesh(dp=2)["dp"]).item(), flush=True)
    os._exit(1)
"""


def test_ranks_that_are_started_again_do_not_call_at_the_doors_of_the_dead():
    """torchrun keeps its store through a restart, with the addresses of the ranks that died in it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in ("0", "1", "2"):
        job = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": attempt}
        job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        with ranks_of([sys.executable, "-c", MEETS_AND_DIES], **job) as ranks:
            assert [rank.communicate(timeout=200)[0] for rank in ranks] == ["2.0\n", "2.0\n"], attempt


def children(pid: int) -> list[int]:
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        return []
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
    first = children(disturbed.pid)
    os.kill(first[-1], signal.SIGKILL)
    while not set(children(disturbed.pid)) - set(first) and disturbed.poll() is None:
        time.sleep(0.02)
    assert not set(children(disturbed.pid)) & set(first), "the run ended before its rank was killed"
    assert disturbed.wait(timeout=300) == 0
    calm, hit = weights(tmp_path / "calm"), weights(tmp_path / "hit")
    assert all(torch.equal(calm[n], hit[n]) for n in calm)
    assert losses(tmp_path / "calm") == losses(tmp_path / "hit")


def test_ranks_that_slurm_asks_to_end_save_their_newest_step(tmp_path):
    """Two processes with what srun tells its tasks; scancel and the end of a job's time send SIGTERM to both."""
    command = [sys.executable, "-m", "gpt2lab", *arguments(tmp_path, 100_000, "dp=2", save=100_000)]
    task = 'export SLURM_PROCID=$RANK SLURM_LOCALID=$RANK; unset RANK; exec "$0" "$@"'
    with ranks_of(["sh", "-c", task, *command], SLURM_STEP_NUM_TASKS="2") as running:
        until = time.monotonic() + 200
        while not any(path.stat().st_size for path in tmp_path.glob("*/log.jsonl")):
            assert time.monotonic() < until and not any(process.poll() for process in running)
            time.sleep(0.02)
        for process in running:
            process.send_signal(signal.SIGTERM)
        texts = ["".join(process.communicate(timeout=200)) for process in running]
    assert [process.returncode for process in running] == [0, 0], texts
    (run,) = tmp_path.glob("*")
    newest = checkpoint.read_state(checkpoint.all_in(run)[-1])["step"]
    assert f"Stopped by SIGTERM: saved step {newest}" in texts[0] and newest == len(losses(tmp_path)) > 0
    assert not any("Traceback" in text for text in texts) and not (run / "stop").exists()


@pytest.mark.slow
def test_a_run_that_becomes_not_a_number_under_torchrun_says_so_once_and_is_not_trained_again(tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "gpt2lab"]
    wild = ["--lr", "1e30", "--clip", "0", "--warmup", "0", "--no-cosine"]
    done = subprocess.run(
        [*torchrun, *arguments(tmp_path, 10, "dp=2"), *wild],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = re.findall(
        r"^gpt2lab train: (Step \d+: .* on rank 0, .* on rank 1 is not finite.*)$", done.stderr, re.M
    )
    assert done.returncode and len(said) == 1, done.stderr[-3000:]
    (run,) = tmp_path.glob("*")
    assert (run / "failed").read_text() == said[0] + "\n"
    logged = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert logged == sorted(set(logged)), "steps were done again"


DIVERGES = """
import math, os, sys
from gpt2lab import cli
from gpt2lab.train import Trainer
right = Trainer._finish
diverged = lambda one: os.environ["RANK"] == "1" and one.steps == 2
Trainer._finish = lambda one: (right(one), math.inf)[1] if diverged(one) else right(one)
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_stage_that_diverges_alone_says_why_while_others_wait_for_it(tmp_path):
    words = arguments(tmp_path, 10, "pp=2,schedule=pipedream", save=10)
    with ranks_of([sys.executable, "-c", DIVERGES, *words]) as running:
        said = running[1].communicate(timeout=200)[1]
    assert running[1].returncode == 1 and "Step 2: the norm of stage 1's gradient is inf." in said, said
    assert [file.read_text() in said for file in tmp_path.glob("*/failed")] == [True]


def test_ranks_under_torchrun_equal_ranks_of_our_own(tmp_path):
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "gpt2lab"]
    finish([*torchrun, *arguments(tmp_path / "torchrun", 3, "tp=2")])
    finish([sys.executable, "-m", "gpt2lab", *arguments(tmp_path / "own", 3, "tp=2")])
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "own")


def test_a_dry_run_prints_the_line_of_every_launcher(capsys):
    from gpt2lab.cli import main

    assert main(["train", "--plan", "dp=2,tp=2", "--out", "my runs", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torchrun --standalone --nproc-per-node 4 -m gpt2lab train")
    assert any(line.startswith("torchrun --nnodes 2 --nproc-per-node 2 --max-restarts") for line in lines)
    assert any(
        "srun --nodes 2 --ntasks 4 --distribution=block python -m gpt2lab train" in line for line in lines
    )
    assert any("mpirun --host HOST0:2,HOST1:2 --map-by slot -np 4 -x MASTER_ADDR" in line for line in lines)
    assert sum(line.endswith("--out 'my runs'") for line in lines) == 4
    assert main(["train", "--dry-run"]) == 0
    assert "torchrun" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["torchrun", "Slurm", "Open MPI"])
def test_the_printed_line_does_what_the_command_does(launcher, tmp_path):
    """B08: copied from --dry-run into a shell, with the names of the machines filled in."""
    plain = [sys.executable, "-m", "gpt2lab", *arguments(tmp_path / "own", 3)]
    finish(plain)
    other = [str(tmp_path / "printed") if a == str(tmp_path / "own") else a for a in plain]
    said = subprocess.run(
        [*other, "--dry-run"], env=ENV, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    line = said[0] if launcher == "torchrun" else said[said.index(f"{launcher}:") + 1]
    port = free_ports(1)[0]
    env = ENV | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with contextlib.ExitStack() as stack:
        if launcher == "Slurm":
            (tmp_path / "cluster").mkdir()
            env |= stack.enter_context(slurm(tmp_path / "cluster")) | {"PATH": env["PATH"]}
            line = line.replace("--nodes 2", "--nodes 1")
        if launcher == "Open MPI" and not shutil.which("mpirun"):
            pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
        line = (
            line.replace("HOST0:2,HOST1:2", "localhost:4")
            .replace("HOST0", "127.0.0.1")
            .replace("29500", str(port))
        )
        finish(["bash", "-c", line], env)
    assert losses(tmp_path / "printed") == losses(tmp_path / "own")


@pytest.mark.parametrize("joined", [True, False])
def test_a_rank_that_has_done_its_work_is_not_aborted_by_what_happens_at_the_end_of_its_process(joined):
    text = "import atexit, os, sys; from gpt2lab import cli; from gpt2lab.processes import launchers; "
    text += f"atexit.register(os.abort); launchers.JOINED += [0] * {joined}; sys.argv = ['gpt2lab']; "
    text += "cli.main = lambda: print('done') or 3; sys.exit(cli.entry())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == (3 if joined else -signal.SIGABRT)
    assert done.stdout == "done\n" or not joined
