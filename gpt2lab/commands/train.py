"""Train GPT-2. Without options: the smallest one (nano), serially, on ten plays of Shakespeare, in a minute or two.

    python -m gpt2lab train
    python -m gpt2lab train --steps 500 --plan dp=2
    python -m gpt2lab train --data my.bin --config mini      (my.bin from: python -m gpt2lab data --text my.txt)
    python -m gpt2lab train --resume                         go on with the newest run

A run writes its log, loss curve and checkpoints under runs/<time>/. Ctrl-C ends it cleanly, with a checkpoint.
Under torchrun --max-restarts 3 it goes on from its newest checkpoint by itself when a rank has died.
"""

import json
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from tqdm import tqdm

from .. import checkpoint
from ..ranks import comm, environment
from ..ranks.failure import RankFailed
from ..ranks.mesh import Axis
from ..run import DTYPES, STOP, Options, read_log, start
from . import folders
from .lines import on_machines, plain_command

HELP = {
    "config": "which model: {presets}",
    "plan": "how training is split over ranks, such as dp=2 or pp=2,tp=2",
    "steps": "how many updates",
    "batch": "rows of the global batch",
    "sequence": "tokens of a row",
    "accumulate": "micro-batches whose gradients add up to one update",
    "lr": "highest learning rate",
    "warmup": "steps in which the learning rate rises",
    "cosine": "let the learning rate fall to a tenth along a cosine",
    "clip": "largest norm of the gradient; 0 does not clip",
    "weight_decay": "weight decay of the matrices",
    "recipe": "lab: the options given here; llmc: AdamW as in llm.c's CPU trainer, with B=4, T=64",
    "dtype": f"numbers: {', '.join(DTYPES)}",
    "device": "cpu, cuda, or auto: GPUs where every rank can have one",
    "seed": "of weights, batches and dropout",
    "data": "shakespeare, or a shard made by the data command",
    "evaluate": "validate every so many steps",
    "save": "write a checkpoint every so many steps",
    "keep": "how many checkpoints stay, besides the best by validation",
    "background": "write checkpoints while training goes on",
    "sample": "tokens to write at the end",
    "chunked": "compute the loss in chunks, so that the whole logits are never held",
    "autocast": "matrix products in bfloat16 (faster where the processor has it; see info)",
    "compile": "torch.compile every block (half a minute at the start)",
    "fast": "use what makes this machine faster, where its check passes (see info)",
    "bench": "measure only: no validation, no sample, no checkpoint",
}
CHOICES = {
    "config": None,
    "recipe": ("lab", "llmc"),
    "dtype": tuple(DTYPES),
    "device": ("auto", "cpu", "cuda"),
}


def add_arguments(parser) -> None:
    """One flag for every field of Options, and what to do with them."""
    import argparse

    from ..model import PRESETS

    for f in fields(Options):
        flag, text = f"--{f.name.replace('_', '-')}", HELP[f.name].format(presets=", ".join(PRESETS))
        if f.type is bool:
            parser.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                help=f"{text} (default {f.default})",
                default=None,
            )
        else:
            choices = tuple(PRESETS) if f.name == "config" else CHOICES.get(f.name)
            parser.add_argument(
                flag,
                type=f.type,
                choices=choices,
                metavar=f.name.upper(),
                help=f"{text} (default {f.default})",
            )
    parser.add_argument("--out", default="runs", help="where runs are written (default runs)")
    parser.add_argument(
        "--resume", nargs="?", const="newest", metavar="RUN", help="go on with a run (default: newest)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plain command that does the same, and stop"
    )


def run(args) -> int:
    """Start or resume a run, show how it goes, and write its curve, sample and checkpoint."""
    options, folder = _options(args)
    if args.dry_run:
        print(plain_command(options))
        for launcher, line in on_machines(options).items():
            print(f"\n{launcher}:\n{line}")
        return 0
    options.check()
    here = environment.place()
    if here:
        return _as_one_rank(here, options, folder, args)
    folder = folder or folders.new(options, args.out)
    with _stop_on_interrupt(folder) as interrupted, _way_back(folder):
        _train(options, folder, bool(args.resume))
    if folder:
        _finish(options, folder, interrupted)
    return 0


def _as_one_rank(here, options: Options, folder: Path | None, args) -> int:
    """Take part in a job that torchrun, srun or mpirun started; rank 0 speaks for all."""
    if here.world_size != options.the_plan().world:
        raise ValueError(
            f"the plan {options.plan} needs {options.the_plan().world} ranks, but {here.launcher} started "
            f"{here.world_size}. Start as many as the plan needs."
        )
    device = options.the_device(here.neighbours)
    with environment.joined(here, device):
        if here.rank == 0:
            folder = (
                folder or folders.begun(here, options, args.out) or folders.new(options, args.out, here.job)
            )
        folder = comm.gather_objects(folder, Axis("world", tuple(range(here.world_size)), here.rank))[0]
        place = str(folder.resolve()) if folder else None
        resume = bool(args.resume or (folder and here.restarts and checkpoint.all_in(folder)))
        with _stop_on_interrupt(folder) as interrupted:
            start(here.rank, here.world_size, options, place, resume, _say_sometimes, device)
    if folder and here.rank == 0:
        _finish(options, folder, interrupted)
    return 0


def _options(args) -> tuple[Options, Path | None]:
    """The options of this call, on top of those of the run that it resumes."""
    folder, base = None, Options()
    if args.resume:
        folder = Path(args.resume) if args.resume != "newest" else folders.newest(Path(args.out))
        if not checkpoint.all_in(folder):
            raise ValueError(
                f"{folder} has no checkpoint to go on from. Start anew: python -m gpt2lab train."
            )
        base = Options(**json.loads((folder / "options.json").read_text()))
    given = {f.name: getattr(args, f.name) for f in fields(Options) if getattr(args, f.name) is not None}
    if given.get("recipe") == "llmc":
        given = {"batch": 4, "sequence": 64} | given
    return Options(**asdict(base) | given), folder


@contextmanager
def _stop_on_interrupt(folder: Path | None):
    """Let Ctrl-C ask for an orderly end after the step under way; a second Ctrl-C ends at once."""
    interrupted = []
    if folder:  # who was killed while ending left the request behind
        (folder / STOP).unlink(missing_ok=True)

    def ask(*_):
        if interrupted or folder is None:
            raise KeyboardInterrupt
        interrupted.append(True)
        (folder / STOP).touch()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        if folder:
            (folder / STOP).unlink(missing_ok=True)


@contextmanager
def _way_back(folder: Path | None):
    """Add to what a failed rank says how to go on from the newest checkpoint, where there is one."""
    try:
        yield
    except RankFailed as error:
        if folder and checkpoint.all_in(folder):
            error.add_note(f"Go on from the newest checkpoint: python -m gpt2lab train --resume {folder}")
        raise


def _train(options: Options, folder: Path | None, resume: bool) -> None:
    """Run it here, with a progress bar, or on ranks, with a line now and then."""
    world = options.the_plan().world
    device = options.the_device(world)
    place = str(folder.resolve()) if folder else None
    if world > 1:
        from ..ranks.launch import launch

        job = (start, options, place, resume, _say_sometimes, device)
        launch(*job, ranks=world, echo="live", timeout=300, backend="nccl" if device == "cuda" else None)
        return
    with tqdm(total=options.steps, unit="step", file=sys.stderr, dynamic_ncols=True) as bar:

        def tell(entry):
            bar.set_postfix_str(_short(entry))
            bar.update(entry["step"] - bar.n)

        log = start(0, 1, options, place, resume, tell, device)
    if options.bench and log:
        seconds = sorted(e["seconds"] for e in log)
        print(f"median step {seconds[len(seconds) // 2] * 1e3:.1f} ms over {len(seconds)} steps (measured)")


def _short(entry: dict) -> str:
    text = f"loss {entry['loss']:.3f}, {entry['tokens_per_s']:,.0f} tokens/s, MFU {entry['mfu']:.0%}"
    return text + (f", val {entry['val']:.3f}" if "val" in entry else "")


def _say_sometimes(entry: dict) -> None:
    if entry["step"] % 10 == 0 or "val" in entry:
        print(f"step {entry['step']}: {_short(entry)}", flush=True)


def _finish(options: Options, folder: Path, interrupted) -> None:
    """The loss curve, a last word, and a text by the trained model."""
    from ..plots import style, training

    if not (folder / "log.jsonl").exists():
        print(f"Interrupted before the first step: {folder} holds the fresh model.")
        return
    log = read_log(folder)
    style.save(training.loss_curve(log), folder / "loss.png")
    newest = checkpoint.all_in(folder)[-1]
    if interrupted:
        print(
            f"Interrupted after step {log[-1]['step']}. Go on with: python -m gpt2lab train --resume {folder}"
        )
    vals = [e["val"] for e in log if "val" in e]
    if vals:
        print(f"validation loss {vals[-1]:.3f} (a fresh model has ln 50257 = 10.825)")
    print(f"log, loss curve and checkpoint: {folder}")
    print(f"Let it write: python -m gpt2lab generate --model {folder}")
    if options.sample and not interrupted:
        print("\n" + _sample(newest, options))


def _sample(folder: Path, options: Options) -> str:
    """What the model writes after the first words of a play."""
    from .. import pretrained
    from ..corpus.tokenizer import encoding
    from ..generate import generate

    model, text = pretrained.load(folder), encoding()
    prompt = text.encode("ROMEO.")
    new = min(options.sample, model.config.n_positions - len(prompt))
    return text.decode(generate(model, [prompt], new, temperature=0.8, top_k=40, seed=options.seed)[0])
