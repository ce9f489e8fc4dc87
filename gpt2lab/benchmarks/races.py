"""The races: of each what is ours, what is the rival, at which sizes, and which plain options it has.

`gpt2lab.benchmarks.NAME` makes the contestants: its `run(args)` prints what was found and returns seconds by name.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from ..machine.options import Parser, Setting, positive, within
from ..machine.words import flag, refuse


@dataclass(frozen=True)
class Race:
    """What a benchmark compares, its options with their defaults, and those that `--quick` gives it in their place."""

    about: str
    options: dict[str, object]
    quick: dict[str, object]


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]
VERSIONS = ("sequential", "torch threads", "fork-join", "tasks", "taskiter", "ranks x tasks")
PAIRS, LOSSES = ["bucket", "zero=3"], ["whole", "chunked"]
SPLITS = "contiguous:kv,contiguous:ring,interleaved:ring,zigzag:ring,zigzag:kv,contiguous:heads"
OPTIONS = {  # an older name belongs to the first option that claims it: --steps to iterations, where a race has them
    "iterations": Setting(
        "steps of a turn, or iterations of a run, the first apart", positive, also=("steps",)
    ),
    "rounds": Setting(
        "turns of each contestant", positive, also=("steps", "trials", "repeat", "runs", "turns")
    ),
    "config": Setting("the model"),
    "ranks": Setting("numbers of ranks", within(2), also=("worlds",), many="+"),
    "rows": Setting("sequences in a step, or of each rank", positive, metavar="B"),
    "length": Setting("tokens of each", positive, metavar="T"),
    "threads": Setting("threads of torch", positive),
    "over": Setting("what carries the bytes of PyTorch's own: gloo, as it is shipped, or our transport"),
    "out": Setting("folder for the figure and the JSON file"),
    "sizes": Setting("bytes", positive, many="+"),
    "ours": Setting("our algorithms", many="*"),
    "bucket": Setting("KiB of gradients in a message", positive),
    "pairs": Setting("what to time", many="+", choices=PAIRS),
    "loss": Setting("ours computes it whole, as PyTorch's own, or chunked, as `train` does", choices=LOSSES),
    "vocab": Setting("size of the vocabulary", positive),
    "micro": Setting("micro-batches, one row each", positive),
    "schedules": Setting("which schedules", many="+", choices=SCHEDULES),
    "lengths": Setting("tokens of the sequence", positive, many="+"),
    "heads": Setting("heads of the attention", positive),
    "width": Setting("width of the embedding, or of a head", positive, metavar="C"),
    "window": Setting("tokens that a token sees before itself; without it all", positive),
    "splits": Setting("layout:exchange, with commas between"),
    "experts": Setting("how many", positive),
    "top_k": Setting("how many a token asks for", positive),
    "tokens": Setting("tokens of the batch, or tokens to generate", positive),
    "hidden": Setting("hidden width of an expert; without it 4 C", positive),
    "prompt": Setting("tokens of each prompt", positive),
    "workers": Setting("worker threads, or ranks", positive),
    "versions": Setting("which to run", many="+", choices=VERSIONS),
    "plans": Setting("how many plans, evenly chosen", positive),
}
NAMES = {  # those of what takes seconds to import
    "config": lambda: list(import_module("gpt2lab.model").PRESETS),
    "over": lambda: ["gloo", import_module("gpt2lab.transport").NAME],
    "ours": lambda: list(import_module("gpt2lab.algorithms").ALL_REDUCE),
}
LLMC = {"config": "gpt2", "rows": 4, "length": 64}  # llm.c's batch and the smallest published model
MINI = {"config": "mini", "ranks": [2, 4], "rows": 4, "length": 64, "rounds": 5, "over": "gloo"}
NANO = {"config": "nano", "rows": 2, "rounds": 3, "ranks": [2]}

RACES = {
    "step": Race(
        "one serial step against transformers, and what each switch for speed gives",
        LLMC | {"iterations": 3, "rounds": 2, "threads": 2, "out": "runs/step"},
        {"config": "nano", "rows": 2, "iterations": 5, "rounds": 1},
    ),
    "generate": Race(
        "tokens a second with and without cache, against transformers",
        {"config": "gpt2", "rows": 1, "prompt": 32, "tokens": 32, "rounds": 3, "threads": 2},
        {"config": "mini", "prompt": 16, "tokens": 16},
    ),
    "launch": Race(
        "how long live ranks take to start",
        {"ranks": [2, 4, 8], "rounds": 5},
        {"ranks": [2, 4]},
    ),
    "transport": Race(
        "shared memory against gloo on the same ranks",
        {"ranks": [2, 4], "sizes": [1 << bits for bits in (10, 14, 17, 20, 23, 26)], "rounds": 9}
        | {"out": "runs/transport"},
        {"ranks": [2], "sizes": [1024, 131072, 1048576], "rounds": 3},
    ),
    "collectives": Race(
        "our algorithms against the library's",
        {"ranks": [2, 4], "sizes": [1 << bits for bits in range(12, 25)], "rounds": 7}
        | {"ours": ["ring", "rabenseifner", "tree"], "out": "runs/collectives"},
        {"ranks": [2], "sizes": [1 << bits for bits in range(12, 21, 2)], "rounds": 3, "ours": ["ring"]},
    ),
    "data": Race(
        "data parallel and ZeRO against DDP and fully_shard",
        MINI | {"bucket": 1024, "pairs": PAIRS, "loss": "whole"},
        NANO,
    ),
    "tensor": Race("tensor parallel against DTensor", MINI, NANO),
    "pipeline": Race(
        "our engine against torch.distributed.pipelining",
        {name: MINI[name] for name in ("config", "ranks", "length", "rounds", "over")}
        | {"vocab": 4096, "micro": 8, "schedules": SCHEDULES},
        {"config": "nano", "vocab": 256, "micro": 4, "rounds": 3, "ranks": [2]}
        | {"schedules": ["1f1b", "interleaved"]},
    ),
    "context": Race(
        "sequence splitting against serial attention and PyTorch's ring",
        {"ranks": [2, 4], "lengths": [1024, 2048, 4096, 8192], "heads": 4, "width": 32, "window": None}
        | {"rounds": 3, "splits": SPLITS, "over": "gloo"},
        {"ranks": [2], "lengths": [512], "splits": "zigzag:ring,contiguous:kv,contiguous:heads"},
    ),
    "tasks": Race(
        "an iteration in six ways: threads, fork-join, tasks, ranks",
        LLMC | {"rounds": 3, "iterations": 5, "workers": 2, "versions": VERSIONS[:5]} | {"out": "runs/tasks"},
        {"config": "nano", "rows": 2, "rounds": 1, "iterations": 6},
    ),
    "sharding": Race(
        "a block by the sharding algebra against DTensor: messages, bytes, seconds",
        {"width": 256, "rows": 4, "length": 64, "rounds": 15, "ranks": [2], "over": "gloo"},
        {"width": 128, "rows": 2, "rounds": 5},
    ),
    "experts": Race(
        "a mixture of experts against transformers' Mixtral block",
        {"experts": 8, "top_k": 2, "tokens": 1024, "width": 256, "hidden": None, "threads": 2, "rounds": 20},
        {"tokens": 256, "width": 64, "rounds": 5},
    ),
    "plans": Race(
        "predicted seconds and bytes of every plan of a small model beside measured",
        {"config": "mini", "rows": 4, "length": 64, "plans": 110, "rounds": 5, "out": "runs/plans"},
        {"plans": 6, "config": "nano", "length": 32, "rounds": 2},
    ),
}

IDLE = {  # options that change nothing beside the others, and why
    "data": lambda o: {} if "bucket" in o.pairs else {"bucket": "only --pairs bucket has buckets"},
    "context": lambda o: {} if o.window is None else {"over": "PyTorch's ring has no window and is left out"},
}


def parser(name: str) -> Parser:
    """The parser of a race's options; `--quick` is for small sizes."""
    about = import_module(f"{__package__}.{name}").__doc__
    made, taken = Parser(f"gpt2lab bench {name}", about), set()
    made.add_argument("--quick", action="store_true", help="small sizes")
    for option, said in OPTIONS.items():
        if option in RACES[name].options:
            also = tuple(word for word in said.also if word not in taken)
            taken |= {option, *said.also}
            names = NAMES[option]() if option in NAMES else said.choices
            replace(said, also=also, default=RACES[name].options[option], choices=names).add(made, option)
    return made


def arguments(name: str, words: Sequence[str] = (), quick: bool = False) -> Namespace:
    """The options of a race, from the words on the command line."""
    made = parser(name)
    if quick or "--quick" in words:
        made.set_defaults(**RACES[name].quick)
    given = made.parse_args(words)
    idle = IDLE.get(name, lambda _: {})(given)
    refuse([o for o in idle if getattr(given, o) != made.get_default(o)], idle)
    return given


def run(name: str, args: Namespace) -> dict[str, float]:
    """Print which race it is, with all its options, and run it; seconds by name."""
    carrier = import_module("gpt2lab.transport").default()
    shown = lambda value: " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    given = {o: shown(v) for o, v in vars(args).items() if o != "quick" and v not in (None, False)}
    if "out" in given:  # before anything is measured
        Path(args.out).mkdir(parents=True, exist_ok=True)
    typed = " ".join(f"{flag(o)}" if value is True else f"{flag(o)} {value}" for o, value in given.items())
    print(f"gpt2lab bench {name} {typed}\nfloat32, one thread a rank, our bytes over {carrier} (measured)")
    return import_module(f"{__package__}.{name}").run(args)
