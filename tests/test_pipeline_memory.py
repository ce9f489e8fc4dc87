"""What a pipeline keeps in memory on live ranks: after every operation exactly what its schedule says, and no byte of a
micro-batch that is over.
"""

import gc
import weakref

import pytest
import torch
from published_schedules import peak_memory
from torch.autograd.graph import saved_tensors_hooks

from gpt2lab.model import GPT2Config
from gpt2lab.parallel.accumulate import Alone
from gpt2lab.parallel.pipeline import step
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.token_slices import SliceCache
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.schedules import NAMES, make
from gpt2lab.schedules.formulas import kept_for_weights

SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=5, n_head=2, n_embd=16)
ROWS, LENGTH, MICROS = 7, 11, 5
NUMBER = 4  # bytes of a float32


@pytest.fixture
def three(pools):
    return pools[3]


class Seen:
    """What was in memory after each operation of one rank."""

    def __init__(self):
        self.saved: list[int] = []  # bytes of activations that autograd keeps: no weights, no tokens
        self.between: list[int] = []  # bytes that wait for weight gradients
        self.caches: list[int] = []  # token slices' key and value caches alive


def watched(rank, world_size, text):
    """Run a step of the plan; returns what `Seen` says, and the layers of each position."""
    plan = Plan.parse(text)
    built = build(plan, SMALL, Mesh(pp=world_size))
    weights = {p.data_ptr() for p in built.model.parameters()}
    graph, caches, seen, run_one = weakref.WeakSet(), weakref.WeakSet(), Seen(), PipelineStep.run

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        box = Box(tensor)
        graph.add(box)
        return box

    class Cache(SliceCache):
        def __init__(self):
            super().__init__()
            caches.add(self)

    def run(self, op):
        run_one(self, op)
        gc.collect()
        activations = (b.tensor for b in graph if b.tensor.is_floating_point())
        seen.saved.append(sum(t.nbytes for t in activations if t.data_ptr() not in weights))
        late = sum(grad.nbytes for grad in self.late.values())
        seen.between.append(late + bytes_between(self.held.values()))
        seen.caches.append(len(caches))

    gc.collect()
    gc.freeze()  # what is here by now is not looked through after every operation
    with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(pack, lambda box: box.tensor):
        patch.setattr(PipelineStep, "run", run)
        patch.setattr(step, "SliceCache", Cache)
        built.engine.run(example_batch(SMALL, ROWS, LENGTH).micro(plan.micro), None, Alone())
    gc.unfreeze()
    return seen, built.engine.parts.layers


def bytes_between(held) -> int:
    """Of what is held, the bytes of all that has passed the first half of its backward; shared memory counts once."""
    halved = [w for w in held if not isinstance(w, torch.Tensor) and w is not None and w.output is None]
    tensors = [t for w in halved for linear in w.linears for t in (linear.x, linear.dy)]
    tensors += [g for w in halved for g in w.kept.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", NAMES)
def test_after_every_operation_a_rank_keeps_what_the_schedule_says_and_nothing_else(three, name):
    """A forward adds the bytes of its graph, which leave with the backward or its first half; in between only what
    weight gradients are made of stays, as many bytes as the formula says. (The first stage does all in W.)
    """
    schedule = make(name, 3, MICROS)
    for rank, (seen, layers) in enumerate(three.run(watched, f"pp=3,micro={MICROS},schedule={name}")):
        sizes, before = {}, 0
        for op, saved in zip(schedule.orders[rank], seen.saved, strict=True):
            if op.kind == "F":
                sizes[op.stage, op.micro] = saved - before
            before = saved
        kept = between = 0
        for op, saved, waiting in zip(schedule.orders[rank], seen.saved, seen.between, strict=True):
            position = schedule.position(op.stage)
            kept += sizes[op.stage, op.micro] * ((op.kind == "F") - (op.kind in ("BI" if position else "BW")))
            one = waiting_bytes(rows_of(op.micro), layers, position)
            between += one * ((op.kind == "I") - (op.kind == "W"))
            assert (saved, waiting) == (kept, between), (rank, op)
        assert kept == between == 0


def rows_of(micro):
    return -(-(ROWS - micro) // MICROS)  # 7 rows in 5 micro-batches: 2, 2, 1, 1, 1


def waiting_bytes(rows, layers, position):
    """What the formula says of one micro-batch on the stage at this position; the first keeps its output's gradient."""
    vocabulary = SMALL.vocab_size if position == len(layers) - 1 else 0
    tokens, width = rows * LENGTH, SMALL.n_embd
    return NUMBER * (
        kept_for_weights(tokens, width, len(layers[position]), vocabulary) if position else tokens * width
    )


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_the_peak_in_bytes_is_the_promised_number_of_micro_batches(three, name):
    """Seven micro-batches of one row each; zero-bubble schedules hold some of the promised ones between I and W."""
    schedule = make(name, 3, ROWS)
    for rank, (seen, layers) in enumerate(three.run(watched, f"pp=3,micro={ROWS},schedule={name}")):
        one, waits = seen.saved[0], waiting_bytes(1, layers, rank)
        whole, between = peak_memory(name, 3, rank) or (schedule.promise[rank], 0)
        assert whole + between == schedule.promise[rank]
        assert max(seen.saved) == whole * one
        assert max(seen.between) == max(schedule.waiting(rank)) * waits
        if rank:  # the first keeps its whole graph and the gradient that came for it
            assert max(map(sum, zip(seen.saved, seen.between, strict=True))) <= (whole + between) * max(
                one, waits
            )


def test_keys_and_values_do_not_outlive_the_last_backward_of_their_micro_batch(three):
    schedule = make("terapipe", 3, 2, slices=3)
    for rank, (seen, _) in enumerate(three.run(watched, "pp=3,micro=2,schedule=terapipe,chunks=3")):
        held, caches = set(), []
        for op in schedule.orders[rank]:
            (held.add if op.kind == "F" else held.remove)(op.micro)
            caches.append(len({unit // 3 for unit in held}))
        assert seen.caches == caches


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "terapipe"])
def test_with_recompute_a_pipeline_keeps_the_stages_inputs_alone(three, schedule):
    for seen, _ in three.run(watched, f"pp=3,micro=4,schedule={schedule},recompute=true"):
        assert not any(seen.saved)
