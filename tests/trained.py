"""A tiny model trained on live ranks: the ground of the tests of data parallelism and ZeRO."""

import torch

from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch
from gpt2lab.train import Recipe

TINY = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8)
NOISY = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=2, n_embd=8, dropout=0.2)


def run(pools, fn, plan, config=TINY, dtype=torch.float64, **options):
    """Call fn(trainer, batch) on every rank of a plan, on 7 ragged rows; returns the results."""

    def on_rank(rank, world_size):
        trainer = trainer_by(plan, config, Recipe(**options), dtype)
        comm.clear_log()
        return fn(trainer, example_batch(config, 7, 11))

    return pools[Plan.parse(plan).world].run(on_rank)
