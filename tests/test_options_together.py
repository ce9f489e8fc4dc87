"""Options of a command together: each changes what is done beside the others, or is refused, and then changes nothing.

Sets of two, and sets of more drawn at random. What is done is seen where the work begins: of a training run its steps,
evaluations and checkpoints, of a model that writes its text.
"""

import contextlib
import random
import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_options import COMMANDS, asked  # noqa: F401

import gpt2lab.generate as continued
from gpt2lab import cli, run
from gpt2lab.benchmarks import everything, races
from gpt2lab.commands import memory, plan, schedule, train, unused
from gpt2lab.corpus import tokenizer
from gpt2lab.machine import namespaces
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.chunked_loss import ChunkedLoss
from gpt2lab.plots import benchmarks as dashboards
from gpt2lab.plots import style
from gpt2lab.processes import launch
from gpt2lab.storage import huggingface
from gpt2lab.train import Result

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
        patch.setattr(run.fast, "switch_on", lambda _: note("fast")())
        patch.setattr(run.speed, "matmul_rate", lambda **_: 1.0)
        patch.setattr(run.checkpoint, "load", lambda source, _: note("load")(source))
        patch.setattr(run.checkpoint, "is_one", lambda _: True)
        patch.setattr(run.checkpoint, "Saver", lambda _, *a: note("saver", self)(*a))
        patch.setattr(train.folders, "options_of", lambda _: run.Options(steps=100))
        patch.setattr(train, "finish", lambda options, *a: note("finish")(options.sample, *a))
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
    words, draw, tally = choices(name), random.Random(name), Counter()
    base = MORE.get(name, COMMANDS.get(name))[0]
    together = [
        dict(zip(pair, values, strict=True))
        for pair in combinations(words, 2)
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
