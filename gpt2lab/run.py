"""A training run: options, a folder with its log, loss curve and checkpoints, and the loop between them."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

from .corpus.batches import Batches
from .corpus.shards import Shard, shakespeare
from .experts.mixture import OWN_K, ROUTERS, Experts
from .machine import fast, gpus, speed, timing
from .machine.words import flag
from .model import PRESETS, GPT2Config
from .parallel import compiled
from .plan import Plan, build
from .ranks import comm
from .ranks.mesh import Mesh
from .storage import checkpoint
from .storage.reading import digest
from .train import LLMC, Recipe, Trainer

STOP = "stop"
RECIPES, DEVICES, OPTIMIZERS = ("lab", "llmc"), ("auto", "cpu", "cuda"), ("adamw", "muon")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def option(default, about: str, least=-math.inf, most=math.inf, choices=None):
    """A field of `Options`: its help, the least and the most that make sense, and the names that it takes."""
    return field(default=default, metadata={"about": about, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Everything that decides a run; with the same options it gives the same losses. One field, one flag."""

    config: str = option("nano", "which model", choices=tuple(PRESETS))
    experts: int = option(0, "experts in every layer in place of its MLP; 0: none", 0)
    top_k: int = option(2, "experts that a token asks for (switch: 1, gshard: 2)", 1)
    router: str = option("mixtral", f"who chooses: {', '.join(ROUTERS)}")
    capacity: float = option(0.0, "room of an expert, in even shares of a row's tokens; 0: nothing drops", 0)
    plan: str = option("serial", "how training is split over ranks, such as dp=2 or pp=2,tp=2")
    steps: int = option(200, "how many updates", 1)
    batch: int = option(8, "rows of the global batch", 1)
    sequence: int = option(128, "tokens of a row", 1)
    accumulate: int = option(1, "micro-batches whose gradients add up to one update", 1)
    lr: float = option(2e-3, "highest learning rate", 0)
    warmup: int = option(10, "steps in which the learning rate rises", 0)
    cosine: bool = option(True, "let the learning rate fall to a tenth along a cosine")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip", 0)
    weight_decay: float = option(0.1, "weight decay of the matrices", 0)
    recipe: str = option("lab", "lab: these options; llmc: llm.c's AdamW, B=4, T=64", choices=RECIPES)
    optimizer: str = option("adamw", "adamw, or muon for the matrices of the blocks", choices=OPTIMIZERS)
    dtype: str = option("float32", "kind of numbers", choices=tuple(DTYPES))
    seed: int = option(0, "of weights, batches and dropout", 0, 2**63 - 1)
    device: str = option("auto", "auto: GPUs where every rank can have one", choices=DEVICES)
    data: str = option("shakespeare", "shakespeare, or a shard made by the data command")
    evaluate: int = option(50, "validate every so many steps", 1)
    save: int = option(100, "write a checkpoint every so many steps", 1)
    keep: int = option(2, "how many checkpoints stay, besides the best by validation", 1)
    background: bool = option(False, "write checkpoints while training continues")
    sample: int = option(64, "tokens to write at the end", 0)
    chunked: bool = option(True, "compute the loss in chunks, so that the whole logits are never held")
    autocast: bool = option(False, "matrix products in bfloat16 (faster on some processors; see info)")
    compile: bool = option(False, "torch.compile every block (half a minute at the start)")
    fast: bool = option(True, "use what makes this machine faster, where its check passes (see info)")
    bench: bool = option(False, "measure only: no validation, no sample, no checkpoint")
    timeout: float = option(300.0, "seconds that a rank may keep the others waiting", 1, 1_000_000)

    def the_plan(self) -> Plan:
        """The plan, with the micro-batches of `accumulate` and the way to compute the loss where it says none.

        Raises ValueError where the plan and another option say different things.
        """
        plan, said = Plan.parse(self.plan), Plan.said(self.plan)
        if self.accumulate > 1 and said.get("micro", self.accumulate) != self.accumulate:
            raise ValueError(
                f"The plan says micro={plan.micro} and --accumulate {self.accumulate} says another number of "
                f"micro-batches. Leave one of them out."
            )
        if not self.chunked and plan.loss == "chunked":
            raise ValueError("The plan says loss=chunked and --no-chunked forbids it. Leave one of them out.")
        if self.chunked and plan.tp == 1 and not self.autocast and "loss" not in said:
            plan = replace(plan, loss="chunked")
        return replace(plan, micro=self.accumulate) if self.accumulate > 1 else plan

    def the_recipe(self) -> Recipe:
        """The optimizer's settings: `lab`, ours with the options given, or `llmc`, llm.c's."""
        if self.recipe == "llmc":
            return replace(LLMC, seed=self.seed, autocast=self.autocast)
        names = ("optimizer", "lr", "warmup", "weight_decay", "seed", "autocast")
        decay = max(self.steps, self.warmup) if self.cosine else None
        said = {name: getattr(self, name) for name in names}
        return Recipe(decay_steps=decay, clip=self.clip or None, **said)

    def the_config(self) -> GPT2Config:
        """The sizes of the model."""
        experts = None
        if self.experts:
            k = OWN_K.get(self.router, self.top_k)
            experts = Experts(self.experts, k, self.router, self.capacity or None)
        return replace(PRESETS[self.config], experts=experts)

    def the_device(self, ranks: int) -> str:
        """What `ranks` ranks of one machine compute on: GPUs where each can have its own, unless the CPU is asked for.

        Raises ValueError where GPUs are asked for and there are not enough.
        """
        if self.device not in DEVICES:
            raise ValueError(f"There is no device {self.device!r} here. Use auto, cpu or cuda.")
        lacking, found = gpus.gpus_needed(ranks), gpus.available()
        if self.device == "cuda" and lacking:
            fewer = f", or a plan of at most {found} ranks" if found else ""
            raise ValueError(f"--device cuda needs {lacking}. Use --device cpu{fewer}.")
        return "cpu" if lacking or self.device == "cpu" else "cuda"

    def shard(self) -> Shard:
        """The tokens to train on."""
        return shakespeare() if self.data == "shakespeare" else Shard(self.data)

    def check(self) -> None:
        """Raise ValueError, before any process starts, where these options cannot run."""
        for f in fields(self):
            value, (_, least, most, choices) = getattr(self, f.name), f.metadata.values()
            if choices and value not in choices:
                raise ValueError(f"{flag(f.name)} {value!r} is unknown. Use {', '.join(choices)}.")
            if f.type not in (int, float):
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{flag(f.name)} {value} is no finite number. Use another.")
            if not least <= value <= most:
                way = f"small. Use {least} or more" if value < least else f"large. Use at most {most:,}"
                raise ValueError(f"{flag(f.name)} {value} is too {way}.")
        plan = self.the_plan()
        plan.check(self.the_config(), self.batch, self.sequence)
        self.the_recipe().check(plan)
        if self.compile:
            compiled.check(plan)
        shard = self.shard()
        if self.data != "shakespeare":
            shard.check_vocabulary(self.the_config().vocab_size)
        for split in ("train", "val"):
            Batches(shard, self.batch, self.sequence, self.seed, split)

    def without_effect(self) -> dict[str, str]:
        """The options that change nothing beside the others, by name, each with the reason."""
        whole = replace(self, chunked=True).the_plan().loss == "whole"
        of_recipe = ("optimizer", "lr", "warmup", "cosine", "clip", "weight_decay")
        groups = (
            (self.recipe == "llmc", of_recipe, "--recipe llmc brings its own"),
            (self.bench, ("evaluate", "save", "keep", "background", "sample"), "--bench only measures"),
            (whole, ("chunked",), "cut vocabularies, --autocast and loss=whole need the whole logits"),
            (self.dtype != "float32", ("autocast",), "only products of float32 become bfloat16"),
            ("micro" in Plan.said(self.plan), ("accumulate",), "the plan says micro"),
            (self.device == "cuda", ("fast",), "its switches are the CPU's"),
            (self.the_plan().world == 1, ("timeout",), "one rank keeps nobody waiting"),
            (self.router in OWN_K, ("top_k",), f"the router {self.router} has its own"),
            (not self.experts, ("top_k", "router", "capacity"), "without --experts there are none"),
        )
        return {name: why for idle, names, why in groups if idle for name in names}

    def arguments(self) -> list[str]:
        """The options as command-line arguments, every one that has an effect spelled out."""
        idle, words = self.without_effect(), []
        for name, value in asdict(self).items():
            if name not in idle and isinstance(value, bool):
                words.append(flag(name) if value else flag(f"no_{name}"))
            elif name not in idle:
                words += [flag(name), str(value)]
        return words


def start(
    rank: int,
    world_size: int,
    options: Options,
    folder: str | None,
    source: str | Path | bool | None,
    tell=None,
    device="cpu",
) -> list[dict]:
    """Train on this rank until the last step, or until the file `stop` appears; returns the log's entries.

    `folder` None writes nothing; of a saved run, whose log `read_log` reads, the latest entries are returned.
    `source` is the checkpoint to go on from (True: the newest in `folder`). `tell(entry)` is called on rank 0 after
    every step. `device` is cpu, or cuda for the GPU that this process has chosen.
    """
    plan, config = options.the_plan(), options.the_config()
    mesh = Mesh(**plan.axes)
    if options.fast and device == "cpu":
        fast.onednn(lambda on: bool(comm.all_reduce(torch.tensor(int(on)), mesh.world, "min")))
    parallel = build(plan, config, mesh, DTYPES[options.dtype], options.seed, device)
    if options.compile:
        compiled.compile_model(parallel.model)
    trainer = Trainer(parallel, options.the_recipe())
    folder = Path(folder) if folder else None
    saver = saved = None
    if source:
        source = checkpoint.all_in(folder)[-1] if source is True else Path(source)
        checkpoint.load(source, trainer)
        saved = trainer.steps if folder and source.resolve().parent == folder.resolve() else None
    if folder and not options.bench:
        saver = checkpoint.Saver(trainer, folder, options.keep, options.background)
    try:
        return _loop(trainer, options, folder, saver, tell if rank == 0 else None, saved)
    except FloatingPointError:
        if saver:
            saver.finish()  # what is being saved in the background is from before
        raise


def _loop(trainer: Trainer, options: Options, folder: Path | None, saver, tell, saved) -> list[dict]:
    """Steps with their measurements, one entry each; evaluations and checkpoints, but not of step `saved` again."""
    sizes = options.shard(), options.batch, options.sequence, options.seed
    train, val = Batches(*sizes, "train"), Batches(*sizes, "val")
    mesh, log = trainer.parallel.mesh, []
    tokens = options.batch * options.sequence
    work = speed.flops_per_token(options.the_config(), options.sequence) * tokens
    kind = torch.bfloat16 if options.autocast else DTYPES[options.dtype]
    rate = speed.matmul_rate(dtype=kind, device=trainer.parallel.device) if mesh.rank == 0 else math.inf
    limit, notes = rate * mesh.world.size, {"options": asdict(options)}
    asked = folder and (folder / STOP).exists
    if saver and mesh.rank == 0 and (folder / "options.json").exists():
        notes["options_sha256"] = digest(folder / "options.json")
    while trainer.steps < options.steps and not _stopped(asked, mesh):
        batches = [train.at(trainer.steps + i) for i in range(_together(trainer, options))]
        first, begin = trainer.steps + 1, time.perf_counter()
        done = trainer.stream(batches, asked) if len(batches) > 1 else [trainer.step(batches[0])]
        timing.finish_devices()
        seconds = (time.perf_counter() - begin) / len(done)
        limit = max(limit, work / seconds)  # whose measurement something else may have slowed down
        pace = {"seconds": seconds, "tokens_per_s": tokens / seconds, "mfu": work / seconds / limit}
        entries = [
            {"step": i, "loss": r.loss, "norm": r.norm, "lr": r.lr} | pace for i, r in enumerate(done, first)
        ]
        if not options.bench and (trainer.steps % options.evaluate == 0 or trainer.steps == options.steps):
            entries[-1]["val"] = trainer.evaluate(val.at(i) for i in range(5))
        # Logged before it is saved: who is killed in between repeats a step, and loses none.
        log = entries if saver else log + entries  # where there is a saver, the file has the others
        for entry in entries if folder and mesh.rank == 0 else ():
            _append(folder / "log.jsonl", entry)
        if saver and trainer.steps % options.save == 0:
            saver.save(**notes, val=entries[-1].get("val"))
            saved = trainer.steps
        for entry in entries if tell else ():
            tell(entry)
    trainer.check_finite()
    if saver and saved != trainer.steps:
        saver.save(**notes, val=log[-1].get("val") if log else None)
    if saver:
        saver.finish()
    return log


def _together(trainer: Trainer, options: Options) -> int:
    """How many steps run in one go: one; without a flush, all until the pipeline must drain (or a run shall end).

    An evaluation needs one version of the weights. So does a checkpoint: then any plan can resume it.
    """
    if not trainer.parallel.plan.asynchronous:
        return 1
    every = [options.save] if options.bench else [options.save, options.evaluate]
    return min(options.steps - trainer.steps, *(n - trainer.steps % n for n in every))


def _append(log: Path, entry: dict) -> None:
    """Add an entry to the log, whole or not at all. Raises CannotSave, as on a full disk."""
    size = log.stat().st_size if log.exists() else 0
    try:
        with open(log, "ab+") as file:
            file.seek(max(size - 1, 0))
            torn = file.read() not in (b"", b"\n")  # its last line was cut off when an earlier run was killed
            file.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")
    except OSError as error:
        if log.exists():
            os.truncate(log, size)
        raise checkpoint.CannotSave(
            f"The log {log} could not be written: {error.strerror}. Checkpoints are unchanged; continue with --resume."
        ) from None


def _stopped(asked: Callable[[], bool] | None, mesh: Mesh) -> bool:
    """Whether the run was asked to end; all ranks agree, so that all end after the same step."""
    ends = asked is not None and mesh.rank == 0 and asked()
    return bool(comm.all_reduce(torch.tensor(float(ends)), mesh.world, "max").item())


def read_log(folder: str | Path) -> list[dict]:
    """The entries of a run's log, one a step; what a resumed run has logged takes the place of all from there on.

    Raises ValueError with the line that is no entry.
    """
    entries, file = [], Path(folder) / "log.jsonl"
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.endswith(b"}"):  # not cut off when its run was killed
            try:
                entry = json.loads(line)
                while entries and entries[-1]["step"] >= entry["step"]:
                    entries.pop()
                entries.append(entry | {"loss": float(entry["loss"])})
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{file} is damaged in line {number}. Delete that line.") from None
    return entries
