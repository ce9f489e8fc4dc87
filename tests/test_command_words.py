"""What commands print, choose and return: each number that they print is the one that it says it is."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpt2lab import cli
from gpt2lab.benchmarks import races
from gpt2lab.commands import export, folders, lines, report, schedule, train
from gpt2lab.commands import generate as generate_command
from gpt2lab.compositions import TESTED, WITHOUT_FLUSH, used
from gpt2lab.plan import Plan
from gpt2lab.run import Options
from gpt2lab.schedules import registry
from gpt2lab.storage import checkpoint, huggingface, reading


def said(capsys, *words) -> str:
    """What a command prints that ends well."""
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def fails(error, monkeypatch) -> int:
    """The status of a command that ends so."""

    def run(args):
        raise error

    monkeypatch.setattr(schedule, "run", run)
    return cli.main(["schedule", "gpipe"])


def test_each_way_to_end_has_its_status(monkeypatch, capsys):
    assert fails(ValueError("No."), monkeypatch) == 2 and fails(FloatingPointError("NaN."), monkeypatch) == 1
    assert fails(KeyboardInterrupt(), monkeypatch) == 130
    assert cli.main(["verfy"]) == 2
    with pytest.raises(SystemExit) as ended:
        cli.main(["schedule", "gpipe", "--micros", "3"])
    assert ended.value.code == 2
    heard = capsys.readouterr().err
    assert "gpt2lab schedule: No.\n" in heard and "interrupted." in heard and "Did you mean --micro" in heard
    with pytest.raises(RuntimeError):
        fails(RuntimeError("ours"), monkeypatch)


def test_an_error_is_told_by_its_own_words():
    assert cli.in_words(FileNotFoundError(2, "No such file", "here")) == "here: No such file. Check its name."
    assert cli.in_words(MemoryError()).startswith("there is not enough memory")
    failed = RuntimeError("rank 2 raised OSError\nTraceback\nOSError: the disk is full")
    failed.ename = "OSError"
    failed.add_note("Resume.")
    assert cli.in_words(failed) == "the disk is full\nResume."


def test_the_schedule_command_shares_a_rank_s_time_among_its_chunks(capsys):
    """A rank's forward takes 1 however many chunks it has: 8 x 3 + bubble of (p - 1)/v x 3."""
    first = said(capsys, "schedule", "interleaved", "--chunks", "2")
    assert "makespan      28.5\n" in first and "15.8 % of the makespan" in first
    doubled = said(capsys, "schedule", "gpipe", "--forward", "2", "--input-grad", "3", "--weight-grad", "1")
    assert f"makespan      {(8 + 3) * 6}\n" in doubled


def test_the_table_of_plans_counts_those_that_use_both(capsys):
    rows = said(capsys, "plans").splitlines()[2:12]
    head, *table = [row.split() for row in [said(capsys, "plans").splitlines()[2], *rows[1:]]]
    plans = [used(Plan.parse(c.plan)) for c in TESTED]
    for name, *counts in table:
        for other, count in zip(head, counts, strict=True):
            assert int(count.replace("-", "0")) == sum(name in p and other in p for p in plans), (name, other)
    listed = said(capsys, "plans", "--list", "--ranks", "4").splitlines()
    assert len(listed) == sum(Plan.parse(c.plan).world <= 4 for c in (*TESTED, *WITHOUT_FLUSH))


def test_a_run_s_newest_and_best_checkpoint_are_chosen(tmp_path, monkeypatch):
    """One that was converted stayed the newest for ever: its name comes after those that are times."""
    for seconds, (run, step) in enumerate([("converted", 9), ("a", 1), ("b", 2), ("b", 3), ("b", 4)]):
        (saved := tmp_path / run / checkpoint.name(step)).mkdir(parents=True)
        (saved / "state.json").write_text("{}")
        os.utime(saved / "state.json", (seconds, seconds))
    (tmp_path / "c" / checkpoint.name(9)).mkdir(parents=True)  # not complete
    shutil.copytree(tmp_path / "b", tmp_path / "b2")
    assert folders.newest(tmp_path).name == "b"
    monkeypatch.setattr(checkpoint, "best", lambda run: run / checkpoint.name(3))
    assert export.chosen(tmp_path / "b", False).name.endswith("4")
    assert export.chosen(tmp_path / "b", True).name.endswith("3")
    args = SimpleNamespace(out=None, resume=str(tmp_path / "b"))
    assert train._source(args).name.endswith("4")


def test_a_run_says_how_it_goes(capsys, tmp_path):
    entry = {"step": 10, "loss": 2.5, "tokens_per_s": 1234.5, "mfu": 0.251}
    assert report.short(entry) == "loss 2.500, 1,234 tokens/s, MFU 25%"
    for step, more in ((9, {}), (10, {}), (11, {"val": 3.25})):
        report.say_sometimes(entry | {"step": step} | more)
    lines_said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines_said] == ["step 10", "step 11"]
    assert lines_said[1].endswith(", val 3.250")


def test_memory_says_which_moment_it_shows_and_why_parts_are_missing(capsys):
    told = said(capsys, "memory", "--plan", "serial", "--config", "nano", "--length", "32").splitlines()
    assert told[1].endswith("fullest moment") and told[2].endswith("backward")
    assert told[2].split()[2] == "-" and any(line.startswith("  gradients -: no weight") for line in told)
    told = said(capsys, "memory", "--plan", "dp=8,zero=3", "--config", "nano", "--length", "32")
    row = dict(zip(told.splitlines()[1].split(), told.splitlines()[2].split(), strict=False))
    assert float(row["gradients"]) > float(row["weights"]) and "Gradients are more than weights: " in told
    assert told.splitlines()[2].endswith("backward") and " 0.0" not in told
    long = ["memory", "--plan", "pp=4,dp=2,micro=4", "--config", "gpt2", "--length", "128"]
    rows = (told := said(capsys, *long)).splitlines()[2:6]
    assert [row.split()[-1] for row in rows] == ["update", "backward", "backward", "update"]
    assert "optimizer -" not in told


def test_the_schedule_command_without_a_name_lists_the_names(capsys):
    told = [line.split()[0] for line in said(capsys, "schedule").splitlines() if line.startswith("  ")]
    assert told == [one.name for one in (*registry.GENERATORS, *registry.FREE)]


BLOCKED = """
import sys
sys.modules["torch"] = None  # so that importing it fails
import gpt2lab
from gpt2lab import cli
for words in ["--help", "trian", "generate", "bench stp", "schedule", "schedule 1f1b --stages 2 --micro 2"]:
    cli.main(words.split())
"""


def test_what_answers_at_once_imports_no_torch(tmp_path):
    found = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    typo, no_run, no_race = found.stderr.splitlines()
    assert found.stdout.startswith("usage: gpt2lab COMMAND") and "rank 0  | F0 F1" in found.stdout
    assert "Did you mean train?" in typo and no_run.startswith("gpt2lab generate: There is no run")
    assert "Did you mean step?" in no_race
    assert "gpt2lab train." in no_run
    assert "gpt2lab generate --model gpt2." in no_run


@pytest.mark.rotates
def test_a_rank_that_runs_a_lesson_s_answer_loads_no_pictures():
    """Ten times what starting the rank takes."""
    code = "import sys, gpt2lab.lessons.exercises.meshes; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_the_last_validation_is_the_one_that_is_told(capsys, tmp_path):
    (tmp_path / checkpoint.name(2)).mkdir()
    state = {"step": 2, "plan": "serial", "optimizer": "adamw"}
    state["sha256"] = {"config.json": "", "rank0.safetensors": ""}
    (tmp_path / checkpoint.name(2) / "state.json").write_text(reading.text(state))
    step = {"loss": 3.0, "norm": 1.0, "lr": 0.1, "seconds": 1.0, "tokens_per_s": 1.0, "mfu": 0.1}
    entries = [step | {"step": n, "val": 4.0 - n} for n in (1, 2)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    report.finish(Options(sample=0), tmp_path, interrupted=["SIGTERM"], trained=entries)
    told = capsys.readouterr().out
    assert f": {tmp_path / 'loss.png'}\n" in told and (tmp_path / "loss.png").exists()
    assert "Stopped by SIGTERM: saved step 2." in told and "validation loss 2.000" in told


def test_the_lines_of_other_launchers_start_as_many_ranks_as_the_plan_has():
    found = lines.on_machines(Options(plan="dp=3,tp=2"))
    assert any("--nnodes 2 --nproc-per-node 3 " in line for line in found.values())
    assert any("--nodes 2 --ntasks 6 " in line for line in found.values())
    assert any("--host HOST0:3,HOST1:3 " in line and "-np 6 " in line for line in found.values())
    odd = lines.on_machines(Options(plan="dp=3")).values()
    assert any("--nnodes 3 --nproc-per-node 1 " in line for line in odd)
    assert lines.plain_command(Options(plan="dp=3")).startswith("torchrun --standalone --nproc-per-node 3 -m")
    assert lines.plain_command(Options()).startswith("python -m gpt2lab train ")
    assert not lines.on_machines(Options())


def test_options_of_a_resumed_run_are_its_own_below_those_that_are_given(tmp_path):
    (tmp_path / "options.json").write_text(json.dumps({"batch": 3, "seed": 5}))
    none = dict.fromkeys(Options.__dataclass_fields__)
    options = lambda source=None, **given: train._options(SimpleNamespace(**none | given), source)
    assert options(tmp_path / "checkpoint-1", seed=6) == Options(batch=3, seed=6)
    assert (options(recipe="llmc").batch, options(recipe="llmc").sequence) == (4, 64)
    assert options(recipe="llmc", batch=9).batch == 9


def test_only_a_third_ctrl_c_ends_a_run_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt), train._stop_on_interrupt(tmp_path) as interrupted:
        for name in ("SIGTERM", "SIGTERM", "SIGINT", "SIGINT"):
            os.kill(os.getpid(), getattr(signal, name))
            assert interrupted[-1] == name and (tmp_path / train.STOP).exists()
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the third one changed nothing")
    assert not (tmp_path / train.STOP).exists()


def test_a_rank_that_ends_first_leaves_the_stop_file_to_the_one_that_reports(tmp_path):
    with train._stop_on_interrupt(tmp_path, [signal.SIGINT]) as interrupted:
        (tmp_path / train.STOP).write_text("SIGINT")  # by the owner of the machines
        with train._stop_on_interrupt(tmp_path, [signal.SIGINT], clears=False):
            assert (tmp_path / train.STOP).exists()
        assert (tmp_path / train.STOP).exists()
    assert interrupted == ["SIGINT"] and not (tmp_path / train.STOP).exists()


def test_the_generate_command_counts_new_tokens_by_its_stopwatch(capsys, monkeypatch):
    monkeypatch.setattr(huggingface, "load", lambda folder: None)
    monkeypatch.setattr(
        "gpt2lab.generate.generate", lambda model, prompts, *a, **k: [p + [1, 2, 3] for p in prompts]
    )
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(generate_command.time, "perf_counter", lambda: next(clock))
    told = said(capsys, "generate", "--model", "x", "--prompt", "To be", "--prompt", "Not")
    assert "6 tokens in 0.5 s: 12 tokens/s (x, measured)" in told


def test_the_data_command_says_what_became_of_a_text(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n")
    told = said(capsys, "data", "--text", str(text))
    tokens = (len(text.with_suffix(".bin").read_bytes()) - 1024) // 2
    assert f"49 bytes became {tokens} tokens" in told
    assert (
        f"The first {tokens * 9 // 10} are for training, the other {tokens - tokens * 9 // 10} for validation."
        in told
    )


def test_a_prompt_may_say_where_a_text_ends(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(huggingface, "load", lambda folder: None)
    monkeypatch.setattr(
        "gpt2lab.generate.generate", lambda model, prompts, *a, **k: seen.extend(prompts) or prompts
    )
    said(capsys, "generate", "--model", "x", "--prompt", "<|endoftext|>To be")
    assert seen == [[50256, 2514, 307]]


@pytest.mark.parametrize("name", [name for name, race in races.RACES.items() if "out" in race.options])
def test_a_race_says_that_its_folder_is_a_file_before_it_measures(name, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(f"gpt2lab.benchmarks.{name}.run", lambda args: pytest.fail("it was run"))
    assert cli.main(["bench", name, "--quick", "--out", str(tmp_path / "file")]) == 2
    assert "file: File exists. Use another name." in capsys.readouterr().err


class Failing(io.StringIO):
    """A stream whose `write` raises what it is given."""

    def __init__(self, error: OSError):
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize(
    ("error", "ends"),
    [(OSError(errno.ENOSPC, "No space left on device"), []), (BrokenPipeError(), ["a reader of the output"])],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_line_that_cannot_be_written_costs_a_run_its_steps(error, ends, stream, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, stream, Failing(error))
    with train._stop_on_interrupt(tmp_path) as interrupted:
        print("step 10: loss 3", file=getattr(sys, stream), flush=True)
    assert [why[: len(end)] for why, end in zip(interrupted, ends, strict=True)] == ends
    with pytest.raises(OSError), train._stop_on_interrupt(None):  # a benchmark has nothing to lose
        print("median", file=getattr(sys, stream))
    with pytest.raises(OSError):  # told when the run has ended
        print("saved", file=getattr(sys, stream))
