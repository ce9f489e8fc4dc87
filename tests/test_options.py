"""All options of all commands: each changes what is done, alone and beside others, or is refused and changes nothing.

Sets of one and two, and sets of more drawn at random. What is done is seen in what is asked of the package and said; of
a training run in its steps, evaluations and checkpoints, of a model that writes in its text.
"""

import ast
import contextlib
import importlib
import inspect
import io
import random
import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpt2lab.generate as continued
from gpt2lab import cli, run
from gpt2lab.benchmarks import everything, races
from gpt2lab.benchmarks.race import over_sizes
from gpt2lab.commands import (
    calibrate,
    convert,
    data,
    export,
    folders,
    grade,
    handout,
    memory,
    plan,
    plans,
    progress,
    schedule,
    train,
    unused,
    verify,
)  # fmt: skip
from gpt2lab.corpus import tokenizer
from gpt2lab.machine import namespaces, patience
from gpt2lab.machine.options import parser_of
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.chunked_loss import ChunkedLoss
from gpt2lab.plots import benchmarks as dashboards
from gpt2lab.plots import style
from gpt2lab.processes import launch
from gpt2lab.storage import checkpoint, huggingface, writing
from gpt2lab.train import Result

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


# of each command, beside or in place of what tests/test_options.py has: with what it is called, other values
MORE = {
    "train": (
        [],
        {
            "--plan": ["dp=2", "pp=2,micro=3,loss=whole", "zero=3"], "--router": ["switch", "deepseek"],
            "--device": ["cpu", "cuda"], "--dtype": ["float64", "bfloat16"], "--experts": ["4"], "--top-k": ["3"],
            "--batch": ["6"],
        },
    ),
    "cluster": (
        ["--", "train", "--plan", "dp=4"],
        {"--machines": ["4x1", "1x4"], "--wire": ["1gbit,2ms"], "command": []},
    ),
    "generate": (["--tokens", "2", "--prompt", "one"], {"--temperature": ["0.5", "0"], "--top-k": ["3", "1"]}),
    "export": (["--out", "a"], {"--run": ["s"]}),
    "plan": (
        ["--config", "nano", "--cluster", "laptop", "--ranks", "1", "--rows", "2"],
        {"--ranks": ["2"], "--memory": ["1GiB"], "--seconds": ["9"]},
    ),
    "memory": (["--config", "nano"], {"--plan": ["dp=2", "zero=1"], "--precision": ["bf16", "bf16-mixed"]}),
    "plans": ([], {}),
    "schedule": (
        ["1f1b"],
        {
            "name": ["gpipe", "interleaved", "terapipe"], "--stages": ["2", "1"], "--chunks": ["3"], "--slices": ["3"],
        },
    ),
    "bench": (
        [],
        {
            "--all": [None], "--quick": [None], "--rounds": ["4"], "--minutes": ["3"], "--out": ["b"],
            "--compare": ["a.json b.json"], "--every": [None], "name": ["data"], "options": [],
        },
    ),
}  # fmt: skip
# limits and permissions, which change something only where they are reached
LIMITS = {
    "generate": ["--slide"],
    "schedule": ["--buffers", "--width"],
    "plan": ["--memory", "--seconds", "--heads"],
}
TINY = GPT2Config(vocab_size=61, n_positions=12, n_layer=1, n_head=1, n_embd=8)


class Run:
    """What stands in for a run's model, trainer and checkpoints: it writes down what is done."""

    def __init__(self, patch):
        self.said = []
        note = lambda name, result=None: lambda *a, **k: self.said.append(f"{name}{a}{k}") or result
        alone = SimpleNamespace(rank=0, world=SimpleNamespace(size=1))
        block = SimpleNamespace(compile=note("compile"))
        built = SimpleNamespace(
            mesh=alone, device="cpu", model=SimpleNamespace(h={0: block}, loss=ChunkedLoss(None))
        )
        patch.setattr(run, "Mesh", lambda **axes: alone)
        patch.setattr(run, "build", lambda p, c, m, *a: note("build", built)(p, c, *a))
        patch.setattr(run, "Trainer", self)
        patch.setattr(run, "Batches", lambda *a: note("batches", SimpleNamespace(at=lambda i: i))(*a))
        patch.setattr(run.Options, "shard", lambda o: o.data)
        patch.setattr(run.Options, "check", lambda o: o.the_plan())
        patch.setattr(
            run.Options, "the_device", lambda o, _: note(o.device, "cuda" * (o.device == "cuda") or "cpu")()
        )
        patch.setattr(run, "_append", lambda *_: None)
        patch.setattr(run, "_stopped", lambda *_: False)
        patch.setattr(run.fast, "onednn", lambda _: note("fast")())
        patch.setattr(run.speed, "matmul_rate", lambda **_: 1.0)
        patch.setattr(run.checkpoint, "load", lambda source, _: note("load")(source))
        patch.setattr(run.checkpoint, "is_one", lambda _: True)
        patch.setattr(run.checkpoint, "Saver", lambda _, *a: note("saver", self)(*a))
        patch.setattr(train.folders, "options_of", lambda _: run.Options(steps=100))
        patch.setattr(train, "finish", lambda options, *a: note("finish")(a[0] and options.sample, *a))
        patch.setattr(train.folders, "new", lambda options, out, job: Path(out))
        patch.setattr(train.folders, "occupied", contextlib.nullcontext)
        patch.setattr(launch, "launch", lambda f, a, *more, **k: note("ranks")(k) or run.start(0, 2, *more))
        self.note = note

    def __call__(self, parallel, recipe):
        self.parallel, self.recipe, self.steps = parallel, recipe, 0
        self.parallel.plan = SimpleNamespace(asynchronous=False)
        self.note("trainer")(recipe)
        return self

    def step(self, _):
        self.steps += 1
        return Result(1.0, 1.0, self.recipe.rate(self.steps - 1))

    def evaluate(self, batches):
        return self.note("evaluate", 1.0)(self.steps)

    def save(self, **_):
        self.note("save")(self.steps)

    def check_finite(self):
        pass

    finish = check_finite


@pytest.fixture
def done(request, monkeypatch):
    """What a command does with a set of options, in words; ("refused", why) for a sentence."""
    ask, known = request.getfixturevalue("asked"), {}
    name = request.node.callspec.params["name"]
    work = [] if name in ("train", "generate", "bench", "cluster") else COMMANDS[name][1]
    runs, note = [], lambda what, result: lambda *a, **k: runs.append(f"{what}{a}{k}") or result
    if name == "generate":
        monkeypatch.setattr(huggingface, "load", lambda _: GPT2(TINY))
        words = SimpleNamespace(encode=lambda text, **_: [ord(text[0]) % 61], decode=str)
        monkeypatch.setattr(tokenizer, "encoding", lambda: words)
        real, draw = continued.generate, continued.Sampling.draw

        def drawn(self, logits, *at):
            p = self.probabilities(logits)  # what may come, and how probable it is: no text by chance
            note("draw", None)(int((p > 0).sum()), float(p.max()), self.seed * (p.max() < 1))
            return draw(self, logits, *at)

        monkeypatch.setattr(continued.Sampling, "draw", drawn)
        monkeypatch.setattr(
            continued, "generate", lambda *a, **k: note("cache", 0)(k["cache"]) or real(*a, **k)
        )
    if name == "cluster":
        monkeypatch.setattr(namespaces, "check", lambda: None)
        process = contextlib.nullcontext(SimpleNamespace(wait=lambda: 0))
        monkeypatch.setattr(
            namespaces, "running", lambda m, wire: note("on", process)(len(m), len(m) > 1 and wire)
        )
    if name == "bench":
        report = {"seconds": {}, "rounds": 1, "minutes": 1, "failed": {}}
        monkeypatch.setattr(
            everything, "collect", lambda f, *a: f.mkdir(exist_ok=True) or note("all", report)(f, *a)
        )
        monkeypatch.setattr(everything, "read_report", lambda name: name)
        monkeypatch.setattr(everything, "comparison", note("compared", "same"))
        monkeypatch.setattr(dashboards, "dashboard", lambda _: None)
        monkeypatch.setattr(style, "save_figure", lambda *_: None)
        monkeypatch.setattr(races, "run", note("race", None))
    if name == "memory":
        part = SimpleNamespace(stage=0, place={"pp": 0}, parts=dict.fromkeys(memory.NOTHING, 1), moment="")
        monkeypatch.setattr("gpt2lab.planner.dry.fullest_ranks", lambda *a: note("dry", iter([part]))(*a))
        monkeypatch.setattr(memory, "memory", note("formula", [part]))
    if name == "plan":
        real_search, found = plan.parallelize, {}
        search = lambda *a: found.get(repr(a)) or found.setdefault(repr(a), real_search(*a))
        monkeypatch.setattr(plan, "parallelize", search)

    def do(line: tuple, unchecked: bool = False):
        if (line, unchecked) not in known:
            runs.clear()
            with monkeypatch.context() as patch:
                patch.setattr(run.time, "perf_counter", iter(range(10**6)).__next__)
                patch.setattr(patience, "AFTER", float("inf"))  # by this clock all takes long
                one = Run(patch) if name == "train" else None
                for owner in (train, memory, schedule, unused) * unchecked:
                    patch.setattr(owner, "refuse", lambda *_: None)
                status, said = ask(name, list(line), work)
            words = ("refused", said) if status else (said, *runs, *(one.said if one else ()))
            known[line, unchecked] = words
        return known[line, unchecked]

    return do


def choices(name: str) -> dict[str, list]:
    """The options of a command, each with its other values as words of a command line."""
    values = {option: [value] for option, value in COMMANDS.get(name, ((), (), {}))[2].items()}
    values |= MORE.get(name, ((), {}))[1]
    words = {}
    for option, some in values.items():
        for value in some:
            typed = () if value is None else tuple(value.split()) if name == "bench" else (value,)
            flags = typed if value and value.startswith("--") else (option, *typed)
            words.setdefault(option, []).append(flags if option.startswith("--") else typed)
    return words


def line_of(base: list[str], chosen: dict[str, tuple]) -> tuple:
    """The command line: what is chosen in place of what the base says of it."""
    placed = [word for option, words in chosen.items() if not option.startswith("--") for word in words]
    named = [word for option, words in chosen.items() if option.startswith("--") for word in words]
    left, skip = [], False
    for word in base:
        skip = word in chosen or (skip and not word.startswith("--"))
        left += [] if skip else [word]
    if placed and left and not left[0].startswith("--"):
        left[: len(placed)] = []
    if "--" in left:
        return (*named, *left)
    return (*placed, *left, *named)


@pytest.mark.rotates
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_options_together_each_change_something_or_are_refused(name, done):
    if name in COMMANDS:
        known = options(parser_of(importlib.import_module(f"gpt2lab.commands.{name}")))
        assert sorted(known) == sorted(COMMANDS[name][2]), (
            "an option without a value here, or one that is no more"
        )
    words, draw, tally = choices(name), random.Random(name), Counter()
    base = MORE.get(name, COMMANDS.get(name))[0]
    together = [
        dict(zip(pair, values, strict=True))
        for pair in (*combinations(words, 1), *combinations(words, 2))
        for values in product(*(words[option] for option in pair))
    ]
    for _ in range(100 if len(words) > 5 and name != "plan" else 0):
        some = draw.sample(sorted(words), draw.randint(3, 6) if len(words) > 6 else 3)
        together.append({option: draw.choice(words[option]) for option in some if words[option]})
    wrong = []
    for chosen in together:
        said = done(line_of(base, chosen))
        if said[0] == "refused":
            tally["refused"] += 1
            if not (re.match(rf"gpt2lab {name}( data)?: ", said[1]) and said[1].count("\n") == 1):
                wrong.append((line_of(base, chosen), said))
            idle = re.findall("(--[a-z-]+) would change nothing", said[1])
            less = {o: w for o, w in chosen.items() if o not in idle}
            if name == "train" and idle and idle[0] not in ("--autocast", "--out"):
                tally["idle"] += 1
                if done(line_of(base, chosen), True) != done(line_of(base, less), True):
                    wrong.append(("not idle", *idle, line_of(base, chosen)))
            continue
        tally["done"] += 1
        for option in chosen:
            less = {o: w for o, w in chosen.items() if o != option}
            if option not in LIMITS.get(name, ()) and done(line_of(base, less)) == said:
                wrong.append((option, line_of(base, chosen)))
    seen = Counter(w[0] for w in wrong)
    assert not wrong, "\n".join(map(str, [seen, *wrong[:60]]))
    print(tally)


@pytest.mark.parametrize(
    "name, option", [(name, option) for name, limits in LIMITS.items() for option in limits]
)
def test_a_limit_changes_something_where_it_is_reached(name, option, asked):
    base, work, values = COMMANDS[name]
    status, changed = asked(name, [*base, option, *([values[option]] if values[option] else [])], work)
    refused = status == 2 and changed.startswith(f"gpt2lab {name}: ") and changed.count("\n") == 1
    assert refused or status == 0 and changed != asked(name, base, work)[1], (status, changed)


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
