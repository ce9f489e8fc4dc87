"""The command line: a typo suggests the right name, and what goes wrong is told in words, without a traceback."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from gpt2lab import RankFailed, cli, launch
from gpt2lab.commands import folders, train
from gpt2lab.machine import namespaces
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.run import Options
from gpt2lab.storage import checkpoint
from gpt2lab.train import Recipe, Trainer

pytestmark = pytest.mark.live

SAID = """
    trian                                there is no command 'trian'. Did you mean train?
    xyz                                  there is no command 'xyz'. Choose from train,
    verify --pln dp=2                    there is no --pln here. Did you mean --plan?
    train --xyz=3                        there is no --xyz here. See gpt2lab train --help.
    train --config gpt3                  invalid choice: 'gpt3' (choose from
    train --config nnao                  ). Did you mean nano? See gpt2lab train --help.
    verify --plan zeor=3                 it knows no 'zeor'. Did you mean zero=...?
    schedule 1fb1                        There is no pipeline schedule '1fb1'. Did you mean 1f1b?
    bench stp                            there is no benchmark 'stp'. Did you mean step?
    plan --cluster h100x46               No cluster is called 'h100x46'. Did you mean h100x64?
    plan --config nano --tokens many     'many' is no number of tokens. Use for example 2T or 300B
    plan --config nano --between fast    'fast' is no size. Use for example 4GiB, 800MB or 10gbit
    plan --config nano --cards 0         '0' does not fit. Use a whole number from 1
    cluster --wire 100 -- train          '100' is no wire. Write a rate and a delay such as 100mbit,1ms
    cluster --wire 0mbit -- train        '0mbit' is no wire
    cluster --machines 2 -- train        --machines 2 is not machines x ranks of each. Write for example 2x2
    cluster -- verify                    Only train runs on several machines
    cluster -- train --plan dp=3         2x2 starts 4 ranks, but the plan dp=3 needs 3. Change one of them.
"""


@pytest.mark.parametrize("typed, hint", [re.split("  +", line.strip()) for line in SAID.strip().split("\n")])
def test_what_is_no_command_is_told_with_the_way_out(typed, hint, capsys):
    try:
        status = cli.main(typed.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and hint in capsys.readouterr().err


NO_PLACE = {  # what a rank would refuse when all machines have started
    "--device cuda": "--device cuda needs a GPU for each of the 2 ranks",
    "--out file": "file: File exists. Use ",
    "--out file/runs": "file/runs: Not a directory. Use the name of a folder.",
    "--out \udcff": "is not valid UTF-8",
    "--resume": "Another process is training in runs/",
}


@pytest.mark.parametrize("words", NO_PLACE)
def test_a_cluster_is_refused_before_its_machines_start(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(namespaces, "check", lambda: None)
    monkeypatch.setattr(namespaces, "running", lambda *_: pytest.fail("machines started"))
    Path("file").touch()
    run = folders.new(Options(plan="dp=4"), "runs")
    checkpoint.save(Trainer(build(Plan(), GPT2Config(37, 16, 1, 2, 8), Mesh()), Recipe()), run)
    with folders.occupied(run):
        assert cli.main(["cluster", "--", "train", "--plan", "dp=4", "--steps", "3", *words.split()]) == 2
    assert NO_PLACE[words] in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith(f"usage: gpt2lab {name}")
    assert cli.main([]) == 0 and f"  {name} " in capsys.readouterr().out


def kill(axis):
    if axis.rank:
        os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {  # what a rank does to the training, and how the command's words begin
    "ProcessDied": (kill, "rank 1 was killed by SIGKILL"),
    "Deadlock": (
        lambda axis: comm.recv(torch.ones(1), axis, 1 - axis.rank),
        "The ranks wait in a circle: 0 -> 1",
    ),
    "Mismatch": (
        lambda axis: comm.broadcast(torch.ones(1), axis, axis.rank),
        "Two ranks made calls that do not match:",
    ),
    "TimeoutError": (
        lambda axis: None if axis.rank else comm.barrier(axis),
        "The ranks are stuck: nothing moved",
    ),
}


@pytest.mark.parametrize("ename", FAILURES)
def test_a_rank_that_fails_is_told_without_a_traceback_and_with_the_way_back(
    ename, capsys, tmp_path, monkeypatch
):
    fault, words = FAILURES[ename]

    def broken(options, folder, resume):
        (folder / "checkpoint-0000001").mkdir()
        (folder / "checkpoint-0000001" / "state.json").write_text("{}")
        launch(lambda rank, world: fault(Mesh(dp=world)["dp"]), ranks=2, timeout=2, echo=False)

    monkeypatch.setattr(train, "_train", broken)
    assert cli.main(["train", "--plan", "dp=2", "--out", str(tmp_path)]) == 1
    told, (run,) = capsys.readouterr().err, tmp_path.glob("*")
    assert told.startswith(f"gpt2lab train: {words}") and "Traceback" not in told
    assert told.endswith(f"Resume the newest checkpoint: gpt2lab train --resume {run}\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train, "_train", lambda *_: launch(lambda rank, world: 1 / 0, ranks=1, echo=False))
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        cli.main(["train", "--bench"])


WITHOUT_EFFECT = [
    *(f"train --recipe llmc --{name} 1" for name in ("lr", "warmup", "clip", "weight-decay")),
    *(f"train --bench --{name} 1" for name in ("evaluate", "save", "keep", "sample")),
    *("train --recipe llmc --cosine", "train --bench --background", "train --plan tp=2 --chunked"),
    *("train --autocast --chunked", "train --plan loss=whole --chunked"),
    *(f"schedule 1f1b --csv --{option}" for option in ("hop 2", "width 99", "blocking")),
    *(f"schedule some.csv --{name} 2" for name in ("stages", "micro", "chunks")),
]


@pytest.mark.parametrize("typed", WITHOUT_EFFECT)
def test_an_option_that_would_change_nothing_is_refused(typed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = typed.split()
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    flag = [word for word in words if word.startswith("--")][-1]
    assert said.startswith(f"gpt2lab {words[0]}: {flag} would change nothing: ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_plain_command_of_a_recipe_says_nothing_that_is_refused(capsys):
    assert cli.main(["train", "--recipe", "llmc", "--bench", "--plan", "tp=2", "--dry-run"]) == 0
    plain = capsys.readouterr().out.splitlines()[0].partition("gpt2lab train ")[2].split()
    assert "--lr" not in plain and "--recipe" in plain
    assert cli.main(["train", *plain, "--dry-run"]) == 0


def test_plans_lists_those_of_so_many_ranks(capsys):
    assert cli.main(["plans", "--list", "--ranks", "4"]) == 0
    four = capsys.readouterr().out
    assert cli.main(["plans", "--list"]) == 0
    assert len(four.splitlines()) < len(capsys.readouterr().out.splitlines())
    assert cli.main(["plans", "--ranks", "4"]) == 0
    table = capsys.readouterr().out
    assert cli.main(["plans"]) == 0 and capsys.readouterr().out != table
    with pytest.raises(SystemExit):
        cli.main(["plans", "--list", "--verify"])


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.time, "strftime", lambda _: "20260101-000000")
    made = [folders.new(Options(), tmp_path / "runs").name for _ in range(3)]
    assert made == ["20260101-000000", "20260101-000000-1", "20260101-000000-2"] == sorted(made)


def test_a_folder_whose_name_no_checkpoint_could_have_is_refused_before_a_run_begins(tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/runs\xff")
    with pytest.raises(ValueError, match=r"runs\\udcff' is not valid UTF-8.*Use another name"):
        folders.new(Options(), name)
    assert not list(tmp_path.iterdir())
