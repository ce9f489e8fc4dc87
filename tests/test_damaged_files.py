"""Files and folders that are damaged, foreign or in the way are named in one sentence, before any work is done."""

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from test_bad_input import answer

from gpt2lab import cli
from gpt2lab.benchmarks import calibration
from gpt2lab.commands import train
from gpt2lab.corpus.batches import Batches
from gpt2lab.corpus.shards import write_shard
from gpt2lab.lessons.exercises import KEPT
from gpt2lab.model import GPT2
from gpt2lab.plots.style import figure, save_figure
from gpt2lab.reference import CONFIG
from gpt2lab.run import read_log
from gpt2lab.storage import huggingface

JUNK = b"\xff\xfe\x00junk"
NO_TEXTS = (
    JUNK, b"", b"[1]", b'"text"', b"{}", b'{"cells": 3}', b'{"cells": [{"metadata": []}]}', b"[" * 10**5,
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which the test stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("schedule junk.csv", "junk.csv is no text. "),
        ("schedule missing.csv", "missing.csv: No such file or directory. Check its name."),
        ("schedule folder.csv", "folder.csv: Is a directory. Use the name of a file."),
        ("data --text missing.txt", "missing.txt: No such file or directory. Check its name."),
        ("train --steps 1 --out junk.csv", "junk.csv: File exists. Use another name."),
        ("train --steps 1 --out junk.csv/below", "junk.csv/below: Not a directory. Use the name of a folder."),
        ("train --steps 1 --data folder.csv", "folder.csv: Is a directory. Use the name of a file."),
        ("generate --model folder.csv", "folder.csv has no config.json, so the sizes of the model are unknown. Name"),
        ("export --out x --run folder.csv", "folder.csv is not a checkpoint: it has no state.json. Name a run's"),
        ("bench --compare junk.csv junk.csv", "junk.csv is no report of `gpt2lab bench --all`. Make one"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_named_with_the_way_out(line, words, here, capsys):
    (here / "junk.csv").write_bytes(JUNK)
    (here / "folder.csv").mkdir()
    before = sorted(here.iterdir())
    status, _, said = answer(line, capsys)
    assert status == 2 and words in said and len(said.splitlines()) == 1
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x/log.txt"),
         "x/log.txt: No space left on device. Make room, or use another place."),
        (OSError(errno.EMFILE, "Too many"), "A file or the output: Too many. Allow more of them: ulimit -n 1024."),
        (OSError(errno.EIO, "Input/output error"), "A file or the output: Input/output error."),
        (OSError("Neither can be written. Set XDG_CACHE_HOME."), "Neither can be written. Set XDG_CACHE_HOME."),
    ],
)  # fmt: skip
def test_a_full_disk_and_an_error_without_a_file_are_told(error, words):
    assert cli.in_words(error) == words


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["export", "--out", ""], "--out"),
        (["train", "--plan="], "--plan"),
        (["generate", "--model", "", "--tokens", "2"], "--model"),
        (["handout", "", "--to", "x"], "a word"),
        (["handout", "04", "", "--to", "x"], "a word"),
    ],
)
def test_an_unset_variable_is_told(line, what, here, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(line)
    said = f"gpt2lab {line[0]}: {what} is empty (an unset variable?). Give it a value, or leave it out."
    assert stop.value.code == 2 and capsys.readouterr().err.startswith(said) and not list(here.iterdir())


GPT2LAB = [sys.executable, "-c", "import sys; from gpt2lab.cli import entry; sys.exit(entry())"]


@pytest.mark.parametrize("words", [[], ["schedule", "1f1b", "--micro", "2000"]])
def test_output_that_nobody_reads_ends_in_a_sentence(words):
    reads, writes = os.pipe()
    os.close(reads)
    found = subprocess.run([*GPT2LAB, *words], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert found.returncode == 1 and found.stderr == "gpt2lab: nobody reads the output any more.\n"


def test_what_a_terminal_cannot_show_is_no_error(tmp_path):
    more = {"PYTHONIOENCODING": "ascii", "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [*GPT2LAB, "schedule", "missing\u00e9.csv"]
    found = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=os.environ | more)
    assert found.returncode == 2
    assert found.stderr == "gpt2lab schedule: missing\\xe9.csv: No such file or directory. Check its name.\n"
    shown = "import sys; from gpt2lab import cli; cli.overview = lambda: 'caf\\xe9'; sys.argv = ['x']; cli.entry()"
    found = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, env=os.environ | more
    )
    assert (found.stdout, found.stderr) == ("caf\\xe9\n", "")


@pytest.mark.parametrize("junk", NO_TEXTS)
def test_files_of_other_programs_are_no_notebooks_reports_grades_or_calibrations(
    junk, here, capsys, monkeypatch
):
    (here / "07_pipeline.ipynb").write_bytes(junk)
    (here / "grades.json").write_bytes(junk)
    (here / "report.json").write_bytes(junk)
    monkeypatch.setattr(calibration, "calibration_file", lambda: here / "report.json")
    for line, words in {
        "progress .": "07_pipeline.ipynb is damaged. Fetch it again, or delete it.",
        "grade 07 .": "grades.json is no result of a grading. Use another --out, or move it away.",
        "bench --compare report.json report.json": "report.json is no report of",
        "plan --config nano --ranks 2": "report.json is damaged. Measure again: gpt2lab calibrate",
    }.items():
        status, _, said = answer(line, capsys)
        assert status == 2 and words in said and len(said.splitlines()) == 1, (line, said)
    assert (here / "grades.json").read_bytes() == junk


@pytest.mark.parametrize(
    "report",
    [
        '{"a": 3}', '{"a": {"b": []}}', '{"a": {"b": ["x"]}}', '{"a": {"b": [0]}}', '{"a": {"b": 3}}',
        '{"a": {"b": [NaN]}}', '{"a": {"b": [1, Infinity]}}', '{"a": {"b": [-1, 2]}}', '{"a": {"b": [1e308, 1e308]}}',
        '{"a": {"b": [1%s]}}' % ("0" * 400), '{"a": {"b": [1]}}, "rounds": -1',
        '{"a": {"b": [1]}}, "machine": {"a": [1]}',
    ],
)  # fmt: skip
def test_a_report_is_read_to_its_last_number(report, here, capsys):
    (here / "a.json").write_text(f'{{"machine": {{}}, "rounds": 5, "seconds": {report}}}')
    status, _, said = answer("bench --compare a.json a.json", capsys)
    assert status == 2 and "a.json is no report of" in said


def test_reports_that_have_nothing_in_common_are_not_called_unchanged(here, capsys):
    for name in ("ours", "theirs"):
        (here / name).write_text(f'{{"machine": {{}}, "rounds": 5, "seconds": {{"a": {{"{name}": [1]}}}}}}')
    status, _, said = answer("bench --compare ours theirs", capsys)
    assert status == 2 and "have no number in common. Use reports of the same benchmarks." in said


@pytest.mark.parametrize(
    "line",
    [
        "bench --compare endless.json endless.json", "schedule endless.csv", "plan --config endless.json",
        "plan --cluster endless.toml", "data --text words.txt --out endless.png",
    ],
)  # fmt: skip
def test_a_pipe_that_nobody_writes_or_reads_is_waited_for_by_no_command(line, here, capsys):
    (here / "words.txt").write_text("words")
    for end in ("json", "csv", "toml", "png"):
        os.mkfifo(here / f"endless.{end}")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(20)
    try:
        status, _, said = answer(line, capsys)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert status == 2 and "is no regular file" in said and said.count("\n") == 1
    assert said.endswith(("Use another file.\n", "Use another name.\n"))


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("words", "status"),
    [(["schedule"], 0), (["schedule", "nothing"], 2), ([], 0), (["schedule", "--help"], 0)],
)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full"])
def test_a_closed_stream_is_no_error_and_a_full_one_is_told(closed, words, status):
    found = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *GPT2LAB, *words], capture_output=True, text=True
    )
    full = closed == "> /dev/full" and not status
    assert found.returncode == (1 if full else status) and "Traceback" not in found.stderr
    assert "No space left on device. Make room" in found.stderr or not full


def test_verdicts_that_are_damaged_are_named(here, capsys):
    (here / "07_pipeline.ipynb").write_text('{"cells": []}')
    for junk in (JUNK, b"[1]"):
        (here / KEPT).write_bytes(junk)
        status, _, said = answer("progress .", capsys)
        assert status == 2 and f"{KEPT} is damaged. Fetch it again, or delete it." in said


@pytest.mark.parametrize(
    "line", [b"{}", b"[1]}", JUNK + b"}", b'{"step": 2}', b'{"step": [], "loss": 1}', b'"}']
)
def test_a_line_of_a_log_that_is_no_entry_is_named_before_a_run_goes_on(line, here):
    checkpoint = here / "checkpoint-0000001"
    checkpoint.mkdir()
    (checkpoint / "state.json").touch()
    (here / "log.jsonl").write_bytes(b'{"step": 1, "loss": 3.0}\n' + line + b"\n")
    for call in (lambda: read_log(here), lambda: train._source(SimpleNamespace(resume=str(here), out=None))):
        with pytest.raises(
            ValueError, match=f"^{re.escape(str(here))}/log.jsonl is damaged in line 2. Delete"
        ):
            call()
    (here / "log.jsonl").write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert train._source(SimpleNamespace(resume=str(here), out=None)) == checkpoint


def test_an_export_that_finds_no_room_leaves_what_was_there(tmp_path):
    model = GPT2(CONFIG)
    huggingface.save(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with (
        no_room(1000),
        pytest.raises(OSError, match="could not be written: .* Make room, or use another place."),
    ):
        huggingface.save(GPT2(CONFIG, seed=1), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    huggingface.save(GPT2(CONFIG, seed=1), tmp_path)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]


@contextlib.contextmanager
def no_room(size: int):
    """Inside the block no file of this process can grow beyond so many bytes."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_picture_has_one_of_two_endings(tmp_path):
    fig, _ = figure(2, 2)
    for name in ("x.pdf", "x", "x.PNG.txt"):
        with pytest.raises(ValueError, match=f"not as {name}. Use one of these endings."):
            save_figure(fig, tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())
    assert save_figure(fig, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_shard_is_as_open_as_any_new_file_and_a_text_of_a_word_is_too_short(tmp_path):
    mask = os.umask(0o027)
    try:
        shard = write_shard(tmp_path / "x.bin", [[1]])
    finally:
        os.umask(mask)
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o640
    with pytest.raises(ValueError, match="the train split here has 0. Use a longer text.$"):
        Batches(shard, 1, 8)
