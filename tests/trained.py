"""A tiny model trained on live ranks: the ground of the tests of data parallelism and ZeRO."""

import torch

from gpt2lab.model import GPT2Config
from gpt2lab.parallel.zero.flat import part_of
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.train import Recipe, Trainer

TINY = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8)
NOISY = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=2, n_embd=8, dropout=0.2)


def run(pools, fn, plan, config=TINY, dtype=torch.float64, **options):
    """Call fn(trainer, batch) on every rank of a plan, on 7 ragged rows; returns the results."""
    plan = Plan.parse(plan)

    def on_rank(rank, world_size):
        parallel = build(plan, config, Mesh(**plan.axes), dtype)
        trainer = Trainer(parallel, Recipe(**options))
        comm.clear_log()
        return fn(trainer, example_batch(config, 7, 11))

    return pools[plan.world].run(on_rank)


def in_flight(trainer, batch):
    """Of a step of ZeRO-3: each block as it computes, and the parts whose gather is under way just then."""
    sync, seen = trainer.parallel.sync, []
    for i, block in trainer.parallel.model.h.items():
        block.mlp.register_forward_pre_hook(
            lambda _, x, i=i: seen.append(
                (f"h.{i}", [part_of(f.names[0]) for f in sync.flats if f.coming is not None])
            )
        )
    trainer.step(batch)
    return seen
