"""Train GPT-2. Without options: the smallest one (nano), serially, on ten plays of Shakespeare, in a minute or two.

    gpt2lab train
    gpt2lab train --steps 500 --plan dp=2
    gpt2lab train --data my.bin --config mini      (my.bin from: gpt2lab data --text my.txt)
    gpt2lab train --resume                         continue the newest run
    gpt2lab train --resume runs/<time>/checkpoint-0000100    or with one checkpoint (an older one: in a new folder)

A run writes its log, loss curve and checkpoints under runs/<time>/. Ctrl-C or SIGTERM ends it, with a checkpoint.
Under torchrun --max-restarts 3 it continues from its newest checkpoint by itself when a rank has died.
"""

import os
import signal
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ..machine.options import Setting, of_field
from ..machine.words import refuse
from ..processes import launchers
from ..processes.failure import RankFailed
from ..processes.orphans import ASKS_TO_END
from ..ranks import comm
from ..ranks.mesh import Axis
from ..run import STOP, Options, read_log, start
from ..storage import checkpoint
from . import folders
from .lines import on_machines, plain_command
from .report import finish, say_sometimes, short
from .unused import refuse_without_effect

FAILED = "failed"  # file in a run's folder that says why it cannot continue, read when a launcher restarts it
AGAIN = "continue a run (default: the newest), or from one of its checkpoints"
OPTIONS = {f.name: of_field(f) for f in fields(Options)} | {
    "out": Setting("where runs are written (default runs)"),
    "resume": Setting(AGAIN, many="?", bare="newest", metavar="RUN"),
    "dry_run": Setting("print the plain command that does the same, and stop", bool),
}


def run(args) -> int | None:
    """Start or resume a run, show how it goes, and write its curve, sample and checkpoint."""
    source, options = asked_for(args)
    if args.dry_run:
        named = args.resume not in (None, "newest")
        more = [*([] if named else ["--out", args.out]), *(["--resume", args.resume] if args.resume else [])]
        print(plain_command(options, *more))
        for launcher, line in on_machines(options, *more).items():
            print(f"\n{launcher}:\n{line}")
        return None
    here = launchers.launched()
    if here:
        return _as_one_rank(here, options, source, args)
    folder = folders.folder_for(source, options, args.out)
    with folders.occupied(folder), _stop_on_interrupt(folder) as interrupted:
        try:
            trained = _train(options, folder, source)
        except RankFailed as error:
            if folder and checkpoint.all_in(folder):
                error.add_note(f"Resume the newest checkpoint: gpt2lab train --resume {folder}")
            raise
    finish(options, folder, interrupted, trained)


def _as_one_rank(here, options: Options, source: Path | None, args) -> int | None:
    """Take part in a job that torchrun, srun or mpirun started; rank 0 prints for all."""
    if here.world_size != options.the_plan().world:
        raise ValueError(
            f"the plan {options.plan} needs {options.the_plan().world} ranks, but {here.launcher} started "
            f"{here.world_size}. Start as many as the plan needs."
        )
    device = options.the_device(here.local_size)
    world = Axis("world", tuple(range(here.world_size)), here.rank)
    folder = wrong = None
    with launchers.process_group(here, device, options.timeout), ExitStack() as kept:
        if here.rank == 0:
            try:
                folder = folders.folder_for(source, options, args.out, here)
                kept.enter_context(folders.occupied(folder))
                source = _again(here, folder) or source
            except (OSError, ValueError) as error:
                wrong = error
        folder, source, wrong = comm.gather_objects((folder, source, wrong), world)[0]
        if wrong:
            raise wrong
        if here.restarts and folder and (folder / FAILED).exists():
            return 1  # the file says why, and it was printed
        place = str(folder.resolve()) if folder else None
        try:
            # Slurm sends SIGTERM to all ranks, 30 s before it kills them; torchrun to those left when one has failed.
            asks = ASKS_TO_END if here.launcher == "srun" else [signal.SIGINT]
            with _stop_on_interrupt(folder, asks, here.rank == 0) as interrupted:
                trained = start(here.rank, here.world_size, options, place, source, say_sometimes, device)
        except (FloatingPointError, checkpoint.BadCheckpoint) as error:
            # A stage that waits for no other raises alone. Else the sentence is the same on every rank.
            alone = options.the_plan().asynchronous and isinstance(error, FloatingPointError)
            if alone or here.rank == 0:
                print(f"gpt2lab train: {error}", file=sys.stderr, flush=True)
                if folder:  # a restart by the launcher would fail again
                    (folder / FAILED).write_text(f"{error}\n")
            if not alone:
                comm.barrier(world)
            return 2 if isinstance(error, checkpoint.BadCheckpoint) else 1
    if here.rank == 0:
        finish(options, folder, interrupted, trained)


def _again(here, folder: Path | None) -> Path | None:
    """The checkpoint to resume if the launcher has restarted the job; None at its first start."""
    if here.restarts:
        return checkpoint.all_in(folder)[-1] if folder and checkpoint.all_in(folder) else None
    if folder:
        (folder / FAILED).unlink(missing_ok=True)


def asked_for(args) -> tuple[Path | None, Options]:
    """The checkpoint to resume, if any, and the options of this call. Raises ValueError where they cannot run."""
    source = _source(args)
    options = _options(args, source)
    if options.bench and args.out != "runs" and not source:
        raise ValueError("--out would change nothing: --bench only measures. Leave it out.")
    options.check()
    done = checkpoint.look(source, check_files=False)[0].get("step", 0) if source else 0
    if done > options.steps:
        raise ValueError(
            f"{source} has {done} steps already, more than --steps {options.steps} in all. Use --steps {done} or more."
        )
    return source, options


def _source(args) -> Path | None:
    """The checkpoint that --resume means: its own folder, or the newest of a run; None without --resume."""
    if args.out and args.resume not in (None, "newest"):
        raise ValueError("--out would change nothing: --resume names the run. Leave one of them out.")
    args.out = args.out or "runs"
    if args.resume is None:
        return None
    place = Path(args.resume) if args.resume != "newest" else folders.newest(Path(args.out))
    found = [place.resolve()] if checkpoint.is_one(place) else checkpoint.all_in(place)
    if not found:
        raise ValueError(f"{place} has no checkpoint to resume. Start again: gpt2lab train.")
    if (found[-1].parent / "log.jsonl").exists():
        read_log(found[-1].parent)  # a damaged one is told now, not when the curve is drawn
    return found[-1]


def _options(args, source: Path | None) -> Options:
    """The options of this call, on top of those of the run that it resumes."""
    base = folders.options_of(source) if source else Options()
    given = {f.name: getattr(args, f.name) for f in fields(Options) if getattr(args, f.name) is not None}
    if given.get("recipe") == "llmc":
        given = {"batch": 4, "sequence": 64} | given
    options = Options(**asdict(base) | given)
    refuse(given, options.without_effect())
    if "plan" in given:
        refuse_without_effect(given["plan"], options.dtype == "bfloat16", options.optimizer == "muon")
    return options


def heeded(signals=ASKS_TO_END) -> list[int]:
    """Those of the signals that this process does not ignore; nohup has it ignore SIGHUP."""
    return [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]


class _Output:
    """A stream that ends no run of `folder` by an error: where nobody reads any more it asks the run to end, saved.

    What does not fit on a disk is left out: the run's own log has it.
    """

    def __init__(self, stream, folder: Path | None):
        self.stream, self.folder = stream, folder

    def __getattr__(self, name: str):
        found = getattr(self.stream, name)
        return partial(self._tried, found) if name in ("write", "flush") and self.folder else found

    def _tried(self, call, *args):
        try:
            return call(*args)
        except BrokenPipeError:
            (self.folder / STOP).write_text("a reader of the output that went away")
        except OSError:
            return None


@contextmanager
def _stop_on_interrupt(folder: Path | None, signals=ASKS_TO_END, clears: bool = True):
    """Make Ctrl-C end the run after the current step, which is saved; a third Ctrl-C ends it at once.

    SIGTERM and a closed terminal do the same, however often; under nohup, where SIGHUP is ignored, the run goes on.
    Gives the names of the signals that came. The stop file lies where all ranks see it, and one of them `clears` it.
    """
    interrupted = []
    if folder and clears:  # a run that was killed while ending left its stop file
        (folder / STOP).unlink(missing_ok=True)

    def ask(number, _):
        interrupted.append(signal.Signals(number).name)
        if folder is None or interrupted.count("SIGINT") > 2:
            raise KeyboardInterrupt
        if interrupted.count("SIGINT") == 2:
            os.write(
                2, b"\nThe step under way ends and is saved. Ctrl-C once more: end at once, without it.\n"
            )
        (folder / STOP).touch()

    before = {s: signal.signal(s, ask) for s in heeded(signals)}
    try:
        with redirect_stdout(_Output(sys.stdout, folder)), redirect_stderr(_Output(sys.stderr, folder)):
            yield interrupted
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        if folder and clears:
            with suppress(FileNotFoundError):  # who else asked: a rank, the owner of the machines
                interrupted += filter(None, [(folder / STOP).read_text()])
            (folder / STOP).unlink(missing_ok=True)


def _on_rank(rank: int, world_size: int, asks: list[int], options: Options, place: str | None, *more):
    """`start` on a rank: a signal to it alone that `asks` a run to end does so like one to the main process."""
    ask = lambda number, _: Path(place, STOP).write_text(f"{signal.Signals(number).name} to rank {rank}")
    for number in asks if place else ():
        signal.signal(number, ask)
    return start(rank, world_size, options, place, *more)


def _train(options: Options, folder: Path | None, source: Path | None) -> list[dict]:
    """Run it here, with a progress bar, or on ranks, with a line now and then; returns what `start` does."""
    world = options.the_plan().world
    device = options.the_device(world)
    place = str(folder.resolve()) if folder else None
    if world > 1:
        from ..processes.launch import launch

        source = source and source.resolve()
        job = (_on_rank, heeded(), options, place, source, say_sometimes, device)
        backend = "nccl" if device == "cuda" else None
        return launch(*job, ranks=world, echo="live", timeout=options.timeout, backend=backend)[0]
    with tqdm(total=options.steps, unit="step", file=sys.stderr, dynamic_ncols=True) as bar:

        def tell(entry):
            bar.set_postfix_str(short(entry), refresh=False)
            bar.update(entry["step"] - bar.n)

        return start(0, 1, options, place, source, tell, device)
