"""Small GPT-2s trained on Shakespeare's letters with the staleness of each asynchronous scheme, by the emulator."""

import torch

from ...corpus.batches import Batch
from ...corpus.shards import plays
from ...emulate import Emulator
from ...model import GPT2, GPT2Config
from ...parallel.pipeline.stages import cut_layers
from ...schedules.asynchronous import make_stream
from ...train import Recipe

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


def homes_of(config: GPT2Config, stages: int) -> dict[str, int]:
    """Which stage owns which parameter: blocks as the pipeline cuts them, the embedding first, the norm last."""
    layers = cut_layers(config, stages)
    stage_of = {f"h.{i}": s for s, blocks in enumerate(layers) for i in blocks}
    last = {"ln_f": stages - 1}
    names = [name for name, _ in GPT2(config).named_parameters()]
    return {n: (stage_of | last).get(".".join(n.split(".")[: 1 + n.startswith("h.")]), 0) for n in names}


def losses(scheme: str, rate: float, updates: int, stages: int = 4, warmup: int = 0) -> list[float]:
    """The loss of every batch of a run of the scheme, with plain SGD; 2BW makes each update from `stages` parts."""
    recipe = Recipe("sgd", lr=rate, clip=1.0, weight_decay=0.0)
    parts = stages if scheme in ("2bw", "1f1b") else 1
    stream = make_stream(scheme, stages, updates, parts)
    start = {n: p.detach().double() for n, p in GPT2(LETTERS).named_parameters()}
    emulator = Emulator(LETTERS, start, stream, homes_of(LETTERS, stages), recipe)
    return emulator.run(letter_batches(updates)).losses


def several(rank: int, world_size: int, runs: list[tuple], updates: int) -> dict[tuple, list[float]]:
    """The runs (scheme, rate) that fall to this rank."""
    return {run: losses(*run, updates) for run in runs[rank::world_size]}
