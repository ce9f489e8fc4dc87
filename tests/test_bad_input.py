"""Bad input gets one sentence with the way out, whatever its type or size: at the command line and in the package."""

import errno
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2lab import cli
from gpt2lab.benchmarks import races as benchmarks
from gpt2lab.commands import folders, train
from gpt2lab.corpus import shards
from gpt2lab.machine.options import parser_of
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.planner.problem import CLUSTERS
from gpt2lab.processes import launchers
from gpt2lab.processes.launch import RankFailed
from gpt2lab.run import Options, _append, read_log
from gpt2lab.storage import huggingface

LAPTOP = CLUSTERS["laptop"]
TYPED = {
    "schedule gpipe --hop 1/0": "'1/0' is no time to draw",
    "schedule gpipe --hop nan": "'nan' is no time to draw",
    "schedule gpipe --forward -1": "Use 0 to 1000",
    "schedule gpipe --forward 1e-300": "at most in thousandths",
    "schedule gpipe --forward 1/99999999999": "at most in thousandths",
    "schedule gpipe --forward 0 --input-grad 0 --weight-grad 0": "All operations take no time",
    "schedule gpipe --stages 3000 --micro 3000": "make 18,000,000 operations",
    "schedule gpip": "Did you mean gpipe",
    "schedule 1f1b --buffers 0": "Deadlock",
    "schedule gpipe --stages 0": "'0' does not fit. Use a whole number from 1",
    "schedule huge.csv": "Stage 1 of 100000000 has no operation",
    "verify --length 0": "Sequences of 0 tokens do not fit into 16 positions. Use 1 to 16.",
    "verify --heads 0": "n_head = 0 makes no GPT-2. Use a whole number of 1 or more.",
    "verify --heads -2": "n_head = -2 makes no GPT-2",
    "verify --layers -1": "'-1' does not fit. Use a whole number from 0 to 100.",
    "verify --layers 101": "'101' does not fit. Use a whole number from 0 to 100.",
    "verify --rows 501": "'501' does not fit. Use a whole number from 1 to 500.",
    "verify --dropout 2": "Use 0 <= dropout < 1.",
    "verify --dropout nan": "Use 0 <= dropout < 1.",
    "verify --window -1": "'-1' does not fit. Use a whole number from 0 to 1,000,000,000",
    "verify --window 10": "--window would change nothing: each of 11 tokens sees all before it anyway",
    "bench": "which benchmark? Choose from collectives",
    "bench tasks --rows 1": "1 rows, 2 workers",
    "bench tensor --ranks 1": "'1' does not fit. Use a whole number from 2 to",
    "verify --rows 0": "Use a whole number from 1 to 500.",
    "verify --layers 99999999999999999999": "Use a whole number from 0 to 100.",
    "train --batch 99999999999999999999": "e+22 tokens in a batch fit into no machine. Use fewer.",
    "train --experts 99999999999999999999": "parameters fit into no machine. Use fewer.",
    "train --plan dp=2 --timeout 0": "--timeout 0.0 is too small. Use 1 or more.",
    "plan --rows 99999999999": "'99999999999' does not fit. Use a whole number from 1 to 100,000",
    "plan --rows 8 --ranks 99999999999": "'99999999999' does not fit. Use a whole number from 1 to 65,536",
    "plan --config nano --between 10Gb": "'10Gb' may be bits or bytes. Write Gbit or GB.",
    "plan --config nano --between 0gbit": "'0gbit' is no size. Use for example 4GiB, 800MB or 10gbit.",
    "plan --config nano --between 1e400gbit": "'1e400gbit' is no size.",
    "plan --config nano --json --run": "--json is one table alone. Leave one of them out.",
    "plan --config nano --memory 0": "'0' is no size.",
    "plan --config nano --tokens 1e400": "'1e400' is no number of tokens. Use for example 2T or 300B.",
    "plan --config nano --layers 10001": "'10001' does not fit. Use a whole number from 1 to 10,000.",
    "plan --config nano --precision BF16": "Did you mean bf16?",
    "plan --config nano --cluster H100x64": "No cluster is called 'H100x64'. Did you mean h100x64?",
    "plan --config nano --cluster laptop --ranks 2 --rows 4 --seconds 0.0001": "the fastest, tp=2, takes ",
    "plan --config gpt2 --ranks 0": "--ranks: '0' does not fit. Use a whole number from 1 to 65,536",
    "plan --config gpt2 --ranks 2 --rows 0": "--rows/--batch: '0' does not fit. Use a whole number from 1 to 100,000",
    "plan --config nano --cluster laptop --ranks 1 --memory 1MiB": "No plan of up to 1 rank fits into 1 MiB",
    "plan --config gpt2-xl --cluster laptop --ranks 1": "GiB more. Use more memory, more ranks",
    "plan --config llama3-8b --layers 2 --ranks 1 --run": "--run trains GPT-2, and llama3-8b is no GPT-2.",
    "memory --config llama3-8b --experts 4": "--experts is for GPT-2, and llama3-8b has MLPs of its own.",
    "plans --ranks 0": "--ranks: '0' does not fit. Use a whole number from 1 to 1,000,000,000",
    "cluster -- train --plan dp=4 --batch 3": "3 rows cannot be dealt to dp=4 replicas",
    "plan --config gpt2-xl --cluster h100x64 --run": "--run trains here, and h100x64 is elsewhere",
    "train --data foreign.bin --plan dp=2": "foreign.bin has the token 60000, and the vocabulary is 0 to 50256",
    "train --plan dp=9 --dry-run": "8 rows cannot be dealt to dp=9 replicas",
    "cluster -- train --stepps 3": "there is no --stepps here. Did you mean --steps?",
    "train --experts 4 --router switch --top-k 2": "--top-k would change nothing: the router switch has its own",
    "train --recipe llmc --lr 0": "--lr would change nothing: --recipe llmc brings its own",
    "data --text empty.txt": "'empty.txt' is no file with text in it",
    "data --text some.txt --out nowhere/x.bin": "There is no folder nowhere to write x.bin into",
    "train --seed -1": "--seed -1 is too small. Use 0 or more.",
    "train --resume runs/x --out elsewhere": "--out would change nothing: --resume names the run.",
    "train --resume= --steps 1": "--resume is empty (an unset variable?)",
    "train --lr nan": "--lr nan is no finite number",
    "train --out link --steps 1": "link: File exists",
    "generate --model model --temperature nan": "temperature = nan does not fit Sampling. Use a number of 0 or more.",
    "generate --model damaged": "damaged/config.json cannot be read as a model: Expecting value",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the command lines above name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "some.txt").write_text("some text " * 50)
    (tmp_path / "huge.csv").write_text("0F0,99999999F0\n")
    shards.write_shard(tmp_path / "foreign.bin", [range(59_000, 60_001), range(999)])
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"n_embd": ')
    huggingface.save(GPT2(GPT2Config(50257, 16, 1, 1, 2)), tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("line", TYPED)
def test_what_is_typed_wrongly_is_answered_in_one_sentence(line, folder, capsys):
    status, _, err = answer(line, capsys)
    said = [text for text in err.splitlines() if text]
    assert status == 2 and TYPED[line] in said[-1] and len(said) == 1


OURS = re.compile(r"([Uu]se |Give |Leave |Did you mean |It may say |Make |must be |Run what )")
EDGES = ("0", "-1", "99999999999999999999", "nan", "inf")
ENOUGH = "99999999999999999999"
BENCHMARKS = [f"bench {name}" for name in benchmarks.RACES]
BASE = {
    "train": "--config nano --experts 4 --top-k 2 --sequence 8 --out runs",
    "generate": "--model model --tokens 1",
    "schedule": "1f1b --hop 1",
    "grade": "07 .",
    "plan": "--config nano --cluster laptop --ranks 2",
    "memory": "--config nano --experts 4",
}
MEANS = {  # what is taken at the edges; each means something, which the option's help says
    "train": {
        "--capacity 0", f"--capacity {ENOUGH}", f"--steps {ENOUGH}", "--lr 0", f"--lr {ENOUGH}",
        "--warmup 0", f"--warmup {ENOUGH}", "--clip 0", f"--clip {ENOUGH}", "--weight-decay 0",
        f"--weight-decay {ENOUGH}", "--seed 0", f"--evaluate {ENOUGH}", f"--save {ENOUGH}", f"--keep {ENOUGH}",
        "--sample 0", f"--sample {ENOUGH}",
    },
    "generate": {
        "--temperature 0", f"--temperature {ENOUGH}", f"--top-k {ENOUGH}", "--seed 0", "--seed -1", f"--seed {ENOUGH}",
    },
    "verify": {"--layers 0", "--dropout 0", "--experts 0", "--window 0"},
    "memory": {"--experts 0", "--capacity 0"},
    "plan": {f"--memory {ENOUGH}", f"--seconds {ENOUGH}", "--seconds inf", f"--tokens {ENOUGH}"},
    "schedule": {"--forward 0", "--input-grad 0", "--weight-grad 0", "--hop 0"},
}  # fmt: skip


@pytest.mark.rotates
@pytest.mark.parametrize("name", [*(name for name in cli.COMMANDS if name != "cluster"), *BENCHMARKS])
def test_every_number_of_every_command_is_taken_at_its_edges_or_refused(name, folder, capsys, monkeypatch):
    command, _, benchmark = name.partition(" ")
    if benchmark:
        parser = benchmarks.parser(benchmark)
        run = lambda args: pytest.fail(f"{args} would be run")
        monkeypatch.setattr(f"gpt2lab.benchmarks.{benchmark}.run", run)
    else:
        parser = parser_of(importlib.import_module(f"gpt2lab.commands.{command}"))
    for work in ("_train", "finish"):
        monkeypatch.setattr(train, work, lambda *_: print("trained"))
    taken = set()
    for action in parser._actions:
        for edge in EDGES if action.type not in (None, str, Path) and not action.choices else ():
            option = f"{action.option_strings[0]}={edge}"
            status, out, err = answer(f"{name} {BASE.get(name, '')} {option}", capsys)
            if status:
                (sentence,) = err.splitlines()
                assert status == 2 and (OURS.search(sentence) or "See gpt2lab" in sentence), (
                    option,
                    err,
                )
            else:
                assert out, f"{option} says nothing"
                taken.add(option.replace("=", " "))
    assert taken == MEANS.get(name, set())


def answer(line: str, capsys) -> tuple[int, str, str]:
    """The status of a command line, and what it says."""
    try:
        status = cli.main(line.split())
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_debug_shows_where_an_error_came_from(folder):
    with pytest.raises(ValueError, match="n_head = 0"):
        cli.main(["verify", "--heads", "0", "--debug"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[1]", "it holds a list in place of options"),
        ('{"stpes": 3}', "there is no option 'stpes'"),
        ('{"steps": "many"}', "steps is 'many', not int"),
        ('{"fast": 1}', "fast is 1, not bool"),
        ('{"config": "gpt9"}', "there is no model 'gpt9'"),
    ],
)
def test_a_damaged_options_file_is_named_with_what_is_wrong(tmp_path, text, words):
    file = tmp_path / "options.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file} is damaged: {words}')}"):
        folders.options_of(tmp_path / "checkpoint-1")
    file.write_text(json.dumps({"steps": 3, "lr": 1}))
    assert folders.options_of(tmp_path / "checkpoint-1") == Options(steps=3, lr=1)


def test_a_log_whose_last_line_was_cut_off_is_read_and_continued(tmp_path):
    log = tmp_path / "log.jsonl"
    _append(log, {"step": 1, "loss": 3.0})
    log.write_text(log.read_text() + '{"step": 2, "lo')
    assert [e["step"] for e in read_log(tmp_path)] == [1]
    _append(log, {"step": 2, "loss": 2.0})
    assert read_log(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]


def test_memory_that_is_not_there_is_told_in_one_sentence():
    torchs = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate memory: ..."
    )
    for error in (torchs, MemoryError()):
        assert cli.in_words(error).startswith("there is not enough memory. Use a smaller")
    for words, said in {
        f"rank 1 raised RuntimeError\n{torchs}": "rank 1: there is not enough memory. Use a smaller",
        "rank 1 was killed by SIGKILL (often the system, out of memory).": "rank 1 was killed",
    }.items():
        failed = RankFailed(words, 1, "ProcessDied")
        failed.add_note("Resume.")
        found = cli.in_words(failed)
        assert found.startswith(said) and "more micro-batches, or a plan of more ranks.\nResume." in found
    assert cli.in_words(RuntimeError("a bug of ours")) is None


def test_processes_and_threads_that_are_not_allowed_are_told_in_one_sentence():
    """A fork says so by errno, a thread of a rank in Python's words."""
    no_thread = RankFailed("rank 0 raised RuntimeError\ncan't start new thread", 0, "RuntimeError")
    for error in (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), no_thread):
        assert cli.in_words(error).endswith(
            "more processes or threads are allowed. Allow them: ulimit -u 4096."
        )


NUMBERS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_variable_of_a_launcher_that_is_no_number_is_named(name, monkeypatch):
    right = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for key, value in (right | {name: "x"}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=f"^{name}=x is no whole number"):
        launchers.launched()


HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("given", "rank", "words"),
    [
        ({}, 2, "There is no rank 2 of 2."),
        ({}, -1, "There is no rank -1 of 2."),
        ({"MASTER_PORT": "abc"}, 0, "MASTER_PORT=abc is no whole number"),
        ({"MASTER_PORT": "99999"}, 0, "MASTER_PORT=99999 is no port. Use 1 to 65535."),
        ({"OMP_NUM_THREADS": "many"}, 0, "OMP_NUM_THREADS=many is no whole number"),
        ({"MASTER_ADDR": "nowhere.invalid"}, 0, "There is no machine MASTER_ADDR=nowhere.invalid"),
        ({"MASTER_ADDR": "::1"}, 0, "There is no machine MASTER_ADDR=::1 that this one can find by IPv4"),
    ],
)
def test_a_wrong_rank_or_address_is_told_before_the_ranks_meet(given, rank, words, monkeypatch):
    for key, value in (HERE | given).items():
        monkeypatch.setenv(key, value)
    here = launchers.Launched("torchrun", rank, 2, 0, 2)
    with pytest.raises(ValueError, match=words), launchers.process_group(here, timeout=1):
        pass


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_no_threads_at_all_are_one_for_a_launcher_s_rank(threads, monkeypatch):
    """OpenMP itself takes them for no number; torch raised an error of its own."""
    for key, value in (HERE | {"OMP_NUM_THREADS": threads, "MASTER_ADDR": "nowhere.invalid"}).items():
        monkeypatch.setenv(key, value)
    before = torch.get_num_threads()
    here = launchers.Launched("torchrun", 0, 2, 0, 2)
    with pytest.raises(ValueError, match="There is no machine"), launchers.process_group(here, timeout=1):
        pass
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_a_deleted_folder_and_a_python_without_torch_are_told(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"{sys.executable} -c 'import sys; from gpt2lab.cli import entry; sys.exit(entry())' info"
    home = os.path.dirname(os.path.dirname(cli.__file__))
    shell = ["bash", "-c", f"cd {gone} && rmdir {gone} && PYTHONPATH={home} {line}"]
    found = subprocess.run(shell, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == "gpt2lab: the current folder has been deleted. Change to another one.\n"
    bare = [sys.executable, "-S", "-P", "-c", "import gpt2lab; gpt2lab.launch"]  # -S: no installed packages
    found = subprocess.run(bare, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": home})
    assert "which " in found.stderr
    assert "Use the Python of the environment that `make lab` builds" in found.stderr
