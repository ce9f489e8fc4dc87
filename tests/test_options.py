"""All options of all commands, from their parsers: each changes what is asked of the package, or is refused."""

import ast
import contextlib
import importlib
import inspect
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpt2lab.generate as continued
from gpt2lab import cli
from gpt2lab.benchmarks import races
from gpt2lab.benchmarks.race import over_sizes
from gpt2lab.commands import (
    calibrate,
    convert,
    data,
    export,
    folders,
    grade,
    handout,
    plan,
    plans,
    progress,
    train,
    verify,
)
from gpt2lab.machine.options import parser_of
from gpt2lab.storage import checkpoint, huggingface, writing

RESULT = {"student": "ann", "exercises": [], "notes": [], "error": ""}
MODEL = SimpleNamespace(ok=True, table=lambda **_: "")
SPEEDS = dict.fromkeys(("rate", "copy", "launch", "latency", "bandwidth"), 1.0) | {"steps": [], "slowed": {}}
KNOWN = SimpleNamespace(exists=lambda: True)
# of each command: how it is called, what stands in for the work and what that returns, and another value of each option
COMMANDS = {
    "train": (
        ["--plan", "dp=2", "--experts", "4", "--chunked", "--cosine", "--fast"],
        [(train, "_train", None), (train, "finish", None)],
        {
            "--config": "mini", "--experts": "2", "--top-k": "1", "--router": "choice", "--capacity": "2.5",
            "--plan": "dp=4", "--steps": "7", "--batch": "4", "--sequence": "8", "--accumulate": "2",
            "--lr": "0.5", "--warmup": "3", "--cosine": "--no-cosine", "--clip": "0.5", "--weight-decay": "0.2",
            "--recipe": "llmc", "--optimizer": "muon", "--dtype": "float64", "--seed": "3", "--device": "cpu",
            "--data": "some.bin",
            "--evaluate": "5", "--save": "5", "--keep": "7", "--background": None, "--sample": "7",
            "--chunked": "--no-chunked", "--autocast": None, "--compile": None, "--fast": "--no-fast",
            "--bench": None, "--timeout": "77", "--out": "elsewhere", "--resume": "run", "--dry-run": None,
        },
    ),
    "cluster": ([], [], {"--machines": "3x1", "--wire": "1gbit,2ms", "command": "verify"}),
    "generate": (
        ["--model", "a", "--prompt", "one"],
        [(export, "chosen", Path("a")), (huggingface, "load", "model"), (continued, "generate", [[1]])],
        {
            "--model": "b", "--prompt": "two", "--tokens": "3", "--temperature": "0.5", "--top-k": "3",
            "--top-p": "0.5", "--seed": "3", "--slide": None, "--no-cache": None,
        },
    ),
    "export": (
        ["--out", "a", "--run", "r"],
        [
            (export, "chosen", Path("c")), (checkpoint, "export", None),
            (checkpoint, "read_state", {"step": 1, "plan": "serial"}),
        ],
        {"--out": "b", "--run": "s", "--best": None},
    ),
    "convert": (
        ["a", "b"],
        [(convert, "read_before", ({}, {}, {"step": 1, "plan": "serial"})), (writing, "write", None)],
        {"old": "c", "new": "d"},
    ),
    "verify": (
        [],
        [(verify, "verify", MODEL)],
        {
            "--plan": "dp=2", "--rows": "3", "--length": "5", "--layers": "1", "--heads": "1", "--dropout": "0.5",
            "--experts": "3", "--window": "2", "--device": "cuda",
        },
    ),
    "plan": (
        ["--config", "nano", "--cluster", "laptop", "--ranks", "2", "--rows", "8"],
        [(plan, "_trained_here", 0)],
        {
            "--layers": "2", "--width": "64", "--heads": "64", "--kv-heads": "1", "--mlp": "100", "--vocab": "99",
            "--config": "mini", "--rows": "4", "--length": "16", "--precision": "bf16",
            "--ranks": "1", "--cards": "1", "--between": "1kbit", "--tokens": "2T", "--cluster": "v100x64",
            "--memory": "1KiB", "--seconds": "1e-9", "--least": "memory", "--explain": None,
            "--json": None, "--run": None,
        },
    ),
    "memory": (
        ["--config", "nano", "--experts", "4"],
        [],
        {
            "--layers": "2", "--width": "64", "--heads": "64", "--kv-heads": "1", "--mlp": "100", "--vocab": "99",
            "--plan": "dp=2", "--optimizer": "sgd", "--config": "mini", "--rows": "4", "--length": "16",
            "--precision": "bf16", "--experts": "2",
            "--top-k": "3", "--router": "switch", "--capacity": "0.5",
        },
    ),
    "calibrate": (
        [],
        [
            (calibrate, "measured", SPEEDS),
            (calibrate, "_used_by_others", 0.0),
            (calibrate, "calibration_file", KNOWN),
            (calibrate, "replacing", contextlib.nullcontext(io.BytesIO())),
            (calibrate, "known", SPEEDS),
        ],
        {"--again": None},
    ),
    "plans": (["--ranks", "4"], [(plans, "_verified", True)], {"--list": None, "--verify": None, "--ranks": "2"}),
    "schedule": (
        ["1f1b", "--buffers", "9"],
        [],
        {
            "name": "gpipe", "--stages": "2", "--micro": "2", "--chunks": "2", "--slices": "2", "--forward": "2",
            "--input-grad": "3", "--weight-grad": "3", "--hop": "2", "--blocking": None, "--recompute": None,
            "--buffers": "0", "--width": "30", "--csv": None,
        },
    ),
    "data": (
        ["--text", "some.txt"],
        [(data.downloads, "download", Path("some.txt"))],
        {"--text": "other.txt", "--download": "shakespeare", "--out": "b.bin"},
    ),
    "info": ([], [], {}),
    "handout": (
        ["04", "--to", "a"],
        [(handout, "lessons_named", ["04"]), (handout, "handout", [])],
        {"lessons": "05", "--to": "b", "--notebooks": "c"},
    ),
    "grade": (
        ["07", "class"],
        [
            (grade, "lessons_named", [SimpleNamespace(name="07")]), (grade, "submissions", {"ann": Path("ann.ipynb")}),
            (grade, "grade", [RESULT]), (grade.report, "known_results", [RESULT]),
            (grade.report, "write_results", None),
        ],
        {
            "lesson": "08", "folder": "other", "--out": "b.csv", "--jobs": "3", "--seconds": "5", "--memory": "5",
            "--again": None, "--notebooks": "c", "--csv": "canvas",
        },
    ),
    "progress": (["a"], [(progress, "rows", [("00", "1 of 1", "-")])], {"folder": "b"}),
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch, tmp_path, capfd):
    """What a command line asks of the package, in words: its calls, what it writes and says, and its status."""
    for name in ("some", "other"):
        Path(tmp_path, f"{name}.txt").write_text(f"{name} text " * (40 + len(name)))
    monkeypatch.setattr(folders, "new", lambda options, out, job="": Path(out))
    monkeypatch.setattr("gpt2lab.run.Options.check", lambda self: None)

    def ask(name: str, arguments: list[str], work: list) -> tuple[int, str]:
        said = []
        with monkeypatch.context() as patch, contextlib.chdir(tmp_path):
            for owner, work_name, result in work:
                note = lambda *a, _=(work_name, result), **k: said.append(f"{_[0]}{a}{k}") or _[1]
                patch.setattr(owner, work_name, note)
            try:
                status = cli.main([name, *arguments])
            except SystemExit as stop:
                status = stop.code
            made = sorted(str(file) for file in Path().rglob("*.bin"))
            for file in made:
                Path(file).unlink()
        out, err = capfd.readouterr()
        out = "\n".join(line for line in out.splitlines() if " s)" not in line and "tokens/s" not in line)
        return status, f"{said}{made}{out}" if not status else err

    return ask


def options(parser) -> list[str]:
    """The options and arguments of a parser, by the name that is typed."""
    return [(a.option_strings or [a.dest])[0] for a in parser._actions if a.dest != "help"]


@pytest.mark.rotates
@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "bench"])
def test_every_option_changes_what_is_asked_for_or_is_refused(name, asked):
    base, work, values = COMMANDS[name]
    known = options(parser_of(importlib.import_module(f"gpt2lab.commands.{name}")))
    assert sorted(known) == sorted(values), "an option without a value here, or one that is no more"
    status, plain = asked(name, base, work) if values else (0, "")
    for option, value in values.items():
        if option.startswith("--"):
            flags = [option] if value is None else [value] if value.startswith("--") else [option, value]
            line = without(base, option) + flags
        else:
            line = [value, *base[1:]] if option != "folder" or len(base) == 1 else [base[0], value]
        changed_status, changed = asked(name, line, work)
        refused = changed_status == 2 and changed.startswith(f"gpt2lab {name}: ") and changed.count("\n") == 1
        assert refused or (changed_status == 0 and changed != plain), (option, changed_status, changed)


def without(line: list[str], option: str) -> list[str]:
    """A command line without an option and its value."""
    if option not in line:
        return line
    at = line.index(option)
    return line[:at] + line[at + (1 if line[at + 1 :][:1] == [] or line[at + 1].startswith("--") else 2) :]


def attributes(thing) -> set[str]:
    """The names of all attributes in a module or a function."""
    every = ast.walk(ast.parse(inspect.getsource(thing)))
    return {node.attr for node in every if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("name", ["commands.bench", *(f"benchmarks.{name}" for name in races.RACES)])
def test_every_option_of_a_benchmark_is_read(name):
    module, race = importlib.import_module(f"gpt2lab.{name}"), name.removeprefix("benchmarks.")
    read = attributes(module)
    read |= attributes(over_sizes) if "over_sizes" in read else set()
    parser = races.parser(race) if race in races.RACES else parser_of(module)
    assert not [a.dest for a in parser._actions if a.dest not in {"help", "quick", *read}]


def test_every_option_of_the_table_belongs_to_a_benchmark():
    assert set(races.OPTIONS) == {option for race in races.RACES.values() for option in race.options}


def test_out_beside_a_run_that_is_named_is_refused(capsys):
    assert cli.main(["train", "--resume", "runs/x", "--out", "elsewhere"]) == 2
    assert "--out would change nothing: --resume names the run." in capsys.readouterr().err
