"""Runs that go on, as they are typed: with other options, from an older checkpoint, while another process trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpt2lab import cli, model
from gpt2lab.commands import folders, report
from gpt2lab.model import GPT2Config
from gpt2lab.run import Options, read_log
from gpt2lab.storage import checkpoint

STEPS = ["--steps", "4", "--save", "2", "--batch", "2", "--sequence", "8", "--sample", "0", "--no-fast"]


@pytest.fixture
def tiny(monkeypatch):
    """The smallest preset, smaller still."""
    config = GPT2Config(vocab_size=50257, n_positions=16, n_layer=1, n_head=2, n_embd=8)
    monkeypatch.setitem(model.PRESETS, "nano", config)


@pytest.fixture
def run(tiny, tmp_path, capsys):
    """A run of four steps, with checkpoints of steps 2 and 4."""
    assert cli.main(["train", *STEPS, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    return next(tmp_path.iterdir())


def files(folder) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def resumed(place, *words) -> int:
    return cli.main(["train", "--resume", str(place), *words])


def steps_of(run) -> list[int]:
    return [checkpoint.look(folder)[0]["step"] for folder in checkpoint.all_in(run)]


@pytest.mark.rotates
def test_from_an_older_checkpoint_a_run_goes_on_in_a_folder_of_its_own(run, capsys):
    """Its newest checkpoint, the oldest in the run's folder, was deleted there as soon as it had been written."""
    before = files(run)
    assert resumed(run / checkpoint.name(2), "--steps", "3", "--keep", "1", "--lr", "0.1") == 0
    (new,) = set(run.parent.iterdir()) - {run}
    assert files(run) == before
    assert steps_of(new) == [3] and [entry["step"] for entry in read_log(new)] == [3]
    said = capsys.readouterr().out
    assert f"{run} has newer checkpoints than {checkpoint.name(2)}, so this run goes on in {new}\n" in said
    assert f"validation loss {read_log(new)[-1]['val']:.3f}" in said


@pytest.mark.rotates
def test_the_newest_checkpoint_goes_on_in_its_run_by_whatever_name(run, monkeypatch):
    (run.parent / "last").symlink_to(run / checkpoint.name(4))
    assert resumed(run.parent / "last", "--steps", "5") == 0 and steps_of(run)[-1] == 5
    monkeypatch.chdir(run / checkpoint.name(5))
    assert resumed(".", "--steps", "6") == 0 and steps_of(run)[-1] == 6
    assert {run, run.parent / "last"} == set(run.parent.iterdir())


def test_a_job_that_is_started_again_goes_on_in_the_run_that_it_had(tmp_path):
    """The largest name was taken: "-9" for "-10", and a later run with the same options for one that is resumed."""
    here = SimpleNamespace(job="none", restarts=1)  # as torchrun calls every job
    runs = [folders.new(Options(), tmp_path, here.job) for _ in range(12)]
    for seconds, run in enumerate(runs):
        os.utime(run / "job", (seconds, seconds))
    assert folders.folder_for(None, Options(), tmp_path, here) == runs[-1]
    (saved := runs[3] / checkpoint.name(2)).mkdir()
    (saved / "state.json").touch()
    assert folders.folder_for(saved, Options(), tmp_path, here) == runs[3]


def test_who_is_stopped_at_once_is_told_what_the_folder_holds(run, capsys):
    """It said "the fresh model" of a folder that holds a trained one."""
    (run / "log.jsonl").unlink()
    report.finish(Options(), run, ["SIGINT"], [])
    said = f"Stopped by SIGINT before the first step: {run} holds what it began with.\n"
    assert capsys.readouterr().out == said
    report.finish(Options(steps=2), run, [], [])  # as in a folder of its own, from an older checkpoint
    assert capsys.readouterr().out == "All 2 steps were trained before. For more of them: --steps 4\n"


@pytest.mark.rotates
def test_a_run_goes_on_with_the_options_with_which_it_was_trained_last(run, capsys):
    """The line that is printed when a run is stopped says `--resume` and no option."""
    assert resumed(run, "--steps", "6", "--lr", "0.01", "--no-cosine") == 0
    shutil.copytree(run, run.parent / "copy")
    assert resumed(run, "--steps", "7") == 0
    assert read_log(run)[-1]["step"] == 7 and read_log(run)[-1]["lr"] == pytest.approx(0.007)
    assert json.loads((run / "options.json").read_text())["steps"] == 4
    capsys.readouterr()
    assert resumed(run.parent / "copy") == 0
    said = capsys.readouterr().out
    assert "All 6 steps were trained before. For more of them: --steps 12\n" in said


def test_fewer_steps_than_there_are_are_refused(run, capsys):
    before = files(run.parent)
    assert resumed(run, "--steps", "3") == 2
    said = f"gpt2lab train: {run / checkpoint.name(4)} has 4 steps already, more than --steps 3 in all. Use --steps 4"
    assert capsys.readouterr().err.startswith(said)
    assert files(run.parent) == before


@pytest.mark.rotates
def test_a_resumed_benchmark_writes_nothing(run, capsys):
    before = files(run.parent)
    assert resumed(run, "--steps", "6", "--bench") == 0
    assert "median step" in capsys.readouterr().out
    assert files(run.parent) == before


@pytest.mark.live
def test_a_benchmark_tells_its_median_step_on_ranks_too(tiny, capfd):
    assert (
        cli.main(["train", *STEPS[:2], "--batch", "2", "--sequence", "8", "--plan", "dp=2", "--bench"]) == 0
    )
    assert " ms over 4 steps (measured)\n" in capfd.readouterr().out


@pytest.mark.rotates
def test_what_a_run_had_logged_after_its_checkpoint_counts_no_more(run):
    shutil.rmtree(run / checkpoint.name(4))  # as if it had been killed while it saved
    assert resumed(run, "--steps", "3") == 0
    assert [entry["step"] for entry in read_log(run)] == [1, 2, 3]


HOLD = """
import sys
from pathlib import Path
from gpt2lab.commands import folders

with folders.occupied(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.rotates
def test_one_process_trains_in_a_folder(run, capsys):
    """Two deleted each other's checkpoints and wrote into one log. Who is killed keeps nobody out."""
    before = files(run)
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], **how) as other:
        assert other.stdout.readline() == "held\n"
        assert resumed(run, "--steps", "6") == 2
        said = f"gpt2lab train: Another process is training in {run}. Wait for its end, or start"
        assert capsys.readouterr().err.startswith(said)
        assert files(run) == before
        os.kill(other.pid, signal.SIGKILL)
    assert resumed(run, "--steps", "6") == 0 and steps_of(run)[-1] == 6
