"""What lesson 00 runs on live ranks besides its own code: notes, starts, what ranks hold, and a dry run."""

import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from ...experts.mixture import Experts
from ...model import GPT2Config
from ...processes.launch import launch
from ...ranks import trace
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...run import Options, read_log, start
from .instruments import asleep, begin, built, seconds_of


def notes(rank: int, world_size: int) -> list:
    """Three notes of each rank as spans, at moments that differ from rank to rank."""
    begin(Mesh(dp=world_size)["dp"])
    for i in range(3):
        asleep(f"note {i}", "other", 0.004 * (1 + (rank + i) % world_size))
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
