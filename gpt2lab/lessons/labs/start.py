"""What lesson 00 runs on live ranks besides its own code: notes, starts, ways to train, and what ranks hold."""

import io
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import torch

from ...algorithms import ring
from ...experts.mixture import Experts
from ...model import PRESETS, GPT2Config
from ...parallel.pipeline.stages import cut_layers
from ...processes.launch import RankFailed, launch
from ...ranks import comm, trace
from ...ranks.mesh import Mesh
from ...reference import CONFIG, example_batch
from ...run import Options, read_log, start
from ...train import Recipe
from .instruments import begin, built, bytes_sent, seconds_of, trainer_by


def notes(rank: int, world_size: int) -> list:
    """Three notes of each rank as spans, at moments that differ from rank to rank."""
    begin(Mesh(dp=world_size)["dp"])
    for i in range(3):
        with trace.span(f"note {i}", "other"):
            time.sleep(0.004 * (1 + (rank + i) % world_size))
    return trace.spans(with_comm=False)


def start_times(ranks: int = 2, trials: int = 3) -> dict[str, list[float]]:
    """Seconds until `ranks` processes with torch have started and ended: spawned, and by a running forkserver."""

    def spawn():
        for child in [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(ranks)]:
            child.wait()

    fork = lambda: launch(_nothing, ranks=ranks)  # its first call starts the forkserver
    return {"spawn": seconds_of(spawn, trials, warmup=0), "forkserver": seconds_of(fork, trials)}


def _nothing(rank, world_size):
    return rank


def left_after_a_failure(ranks: int = 4) -> tuple[int, int]:
    """(ranks that ran, processes of theirs that are left) after rank 2 raised and `launch` has returned."""
    with tempfile.TemporaryDirectory() as folder:
        with suppress(RankFailed):
            launch(_note_and_fail, folder, ranks=ranks, echo=False)
        numbers = [int(path.name) for path in Path(folder).iterdir()]
    return len(numbers), sum(map(_lives, numbers))


def _note_and_fail(rank, world_size, folder):
    Path(folder, str(os.getpid())).touch()
    comm.barrier(Mesh(dp=world_size)["dp"])
    if rank == 2:
        raise ZeroDivisionError("rank 2 divided by zero")
    comm.all_reduce(torch.ones(1), Mesh(dp=world_size)["dp"])


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
        return True
    except OSError:
        return False


def three_steps(rank: int, world_size: int, text: str) -> list[float]:
    """The losses of three steps of a small model by a plan, on seven rows."""
    trainer = trainer_by(text, CONFIG, Recipe(lr=1e-2, warmup=0))
    return [trainer.step(example_batch(CONFIG, 7, 11, seed)).loss for seed in range(3)]


WIDE = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=64)


def held(rank: int, world_size: int, text: str, experts: int) -> tuple[int, int, int]:
    """What this rank has under a plan: tokens of a batch, weights of the blocks, and optimizer state for how many."""
    config = replace(WIDE, experts=Experts(experts) if experts else None)
    parallel = built(text, config)
    tokens = sum(micro.tokens.numel() for micro in parallel.mine(example_batch(config, rows=8, length=16)))
    owned = sum(p.tensor.numel() for p in parallel.sync.pieces if p.name.startswith("h."))
    if parallel.plan.zero == 3:
        return tokens, owned, owned
    blocks = sum(p.numel() for n, p in parallel.model.named_parameters() if n.startswith("h."))
    return tokens, blocks, owned


def of_a_block(c: GPT2Config) -> int:
    """The weights of one block: four matrices of 12 C² in all, their biases, and two norms."""
    return 12 * c.n_embd**2 + 13 * c.n_embd


def first_stage(name: str, stages: int = 4) -> float:
    """The share of a preset's weights that the first stage of a pipeline holds: both embeddings and its blocks."""
    c = PRESETS[name]
    blocks = len(cut_layers(c, stages)[0]) * of_a_block(c)
    return ((c.vocab_size + c.n_positions) * c.n_embd + blocks) / c.parameters


def shares_held(text: str, ranks: int = 4) -> tuple[float, ...]:
    """A live rank's largest shares under a plan: of the tokens, the blocks' weights, their optimizer state."""
    experts = ranks if "ep=" in text else 0
    whole, found = held(0, 1, "dp=1", experts), launch(held, text, experts, ranks=ranks, echo=False)
    return tuple(max(of) / all_of for of, all_of in zip(zip(*found, strict=True), whole, strict=True))


def ring_bytes(rank: int, world_size: int, numbers: int) -> int:
    """Bytes of the messages that leave this rank when a ring adds up so many float64 numbers of all ranks."""
    comm.clear_log()
    ring.all_reduce(torch.zeros(numbers, dtype=torch.float64), Mesh(dp=world_size)["dp"])
    return bytes_sent()


def dry_run(main, options: Options) -> tuple[str, list[float], list[float]]:
    """The command that `gpt2lab train --dry-run` prints, its losses as a shell runs it, and those of ranks of ours.

    `main` is the command line's.
    """
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(io.StringIO()) as printed:
            main(["train", *options.arguments(), "--out", folder, "--dry-run"])
        line = printed.getvalue().splitlines()[0]
        subprocess.run(line, shell=True, check=True, capture_output=True, env=os.environ | {"PATH": programs})
        (run,) = Path(folder).iterdir()
        executed = read_log(run)
    here = launch(start, options, None, False, ranks=options.the_plan().world, echo=False)[0]
    return line, *([entry["loss"] for entry in log] for log in (executed, here))
