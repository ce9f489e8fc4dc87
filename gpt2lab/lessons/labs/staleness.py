"""Small GPT-2s trained on Shakespeare's letters with the staleness of each asynchronous scheme, by the emulator.

python -m gpt2lab.lessons.labs.staleness    writes staleness.json, which lesson 09 draws (some minutes)
"""

import json
from pathlib import Path

import torch

from ...corpus.batches import Batch
from ...corpus.shards import plays
from ...emulate import Emulator
from ...model import GPT2, GPT2Config
from ...parallel.pipeline.stages import homes_of
from ...schedules import Cost, simulate
from ...schedules.asynchronous import make_stream
from ...train import Recipe

SCHEMES = "1f1b", "2bw", "pipedream", "ampnet"
RATES = 0.1, 0.4, 1.0
SEEDS, MICROS = (0, 1, 2), (4, 8, 16)
RUNS = [(scheme, rate, 0) for scheme in SCHEMES for rate in RATES] + [("2bw", RATES[-1], 100)]
FLUSHED_OR_TWO = "1f1b", "2bw"  # make an update of several micro-batches; the others one of each
RECORD = Path(__file__).with_suffix(".json")
LETTERS = GPT2Config(vocab_size=128, n_positions=32, n_layer=4, n_head=2, n_embd=32)


def letter_batches(count: int, rows: int = 8, length: int = 32, seed: int = 0) -> list[Batch]:
    """Batches of windows of the plays, a token a letter."""
    text = torch.tensor([min(ord(c), 127) for c in plays()[:200_000]])
    dice = torch.Generator().manual_seed(seed)
    found = []
    for n in range(count):
        starts = torch.randint(len(text) - length - 1, (rows,), generator=dice)
        windows = torch.stack([text[s : s + length + 1] for s in starts])
        samples = torch.arange(rows) + n * rows
        found.append(Batch(windows[:, :-1], windows[:, 1:], torch.arange(length), samples, rows * length))
    return found


def losses(scheme: str, rate: float, warmup: int, seed: int, updates: int, stages: int = 4) -> list[float]:
    """The loss of every batch of a run with plain SGD; `seed` draws the weights and the batches.

    2BW and 1F1B make each update from `stages` micro-batches: how many changes the time, not the losses, because a
    whole batch reads one version. In the first `warmup` updates the learning rate rises from zero.
    """
    recipe = Recipe("sgd", lr=rate, clip=1.0, weight_decay=0.0, warmup=warmup)
    stream = make_stream(scheme, stages, updates, stages if scheme in FLUSHED_OR_TWO else 1)
    start = {n: p.detach().double() for n, p in GPT2(LETTERS, seed).named_parameters()}
    emulator = Emulator(LETTERS, start, stream, homes_of(LETTERS, stages), recipe)
    return emulator.run(letter_batches(updates, seed=seed)).losses


def batch_times(updates: int, micros: int, stages: int = 4) -> dict[str, float]:
    """The simulated time of a batch, in batches of a pipeline without a bubble; a backward is twice a forward.

    1F1B and 2BW cut a batch into `micros` micro-batches.
    """
    found = {}
    for scheme in SCHEMES:
        stream = make_stream(scheme, stages, updates, micros if scheme in FLUSHED_OR_TWO else 1)
        cost = Cost(1 / stream.per_update, backward=2 / stream.per_update)
        found[scheme] = float(simulate(stream.schedule, cost).makespan) / 3 / updates
    return found


def record(updates: int = 200, every: int = 10) -> dict:
    """A long run of every scheme, rate and seed: losses averaged over `every` batches."""
    times = [[micros, batch_times(updates, micros)] for micros in MICROS]
    found = {"batches": updates, "every": every, "times": times, "losses": []}
    for run in RUNS:
        seeds = []
        for seed in SEEDS:
            values = losses(*run, seed, updates)
            means = [sum(values[i : i + every]) / every for i in range(0, updates, every)]
            seeds.append([round(mean, 4) for mean in means])
        found["losses"].append([*run, seeds])
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record()).replace("]], [", "]],\n[") + "\n")
