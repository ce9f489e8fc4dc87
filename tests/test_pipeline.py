"""Pipelines on live ranks: equal to the serial run, with exactly the memory and messages that schedules promise."""

import gc
import itertools
import weakref
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import is_noticed, planted, under
from test_schedules import messages
from torch.autograd.graph import saved_tensors_hooks

from gpt2lab.benchmarks.pipeline import REASONS, RIVALS, contest
from gpt2lab.benchmarks.race import on_rank
from gpt2lab.lessons.labs import schedules as labs
from gpt2lab.lessons.labs.instruments import apart, trainer_by
from gpt2lab.lessons.labs.instruments import built as built_by
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.accumulate import Accumulate, Alone
from gpt2lab.parallel.pipeline import stages, step
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.pipeline.split_backward import Work, noting
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.parallel.pipeline.token_slices import SliceCache
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, default_dtype, example_batch
from gpt2lab.schedules import NAMES, Cost, Op, Schedule, check, make, registry, simulate
from gpt2lab.schedules.formulas import kept_for_weights

SMALL_FOR_V = GPT2Config(vocab_size=37, n_positions=16, n_layer=8, n_head=2, n_embd=16)
SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=16)


@default_dtype(torch.float64)
def parts(rank, world_size, name, micros, config, rows=7, engine_options=(), **options):
    """What a rank's engine computes on an example batch, beside the serial engine on the same micro-batches."""
    mesh, batch = Mesh(pp=world_size), example_batch(config, rows, 11)
    model, serial = GPT2(config).double(), GPT2(config).double()
    engine = Pipeline(model, mesh, make(name, world_size, micros, **options))
    for option, value in engine_options:
        setattr(engine, option, value)
    comm.clear_log()
    trace.clear()
    engine.run(batch.micro(micros), None, Alone())
    sent = comm.traffic().get(("send", "pp"), (0, 0, 0))
    Accumulate(serial).run(batch.micro(micros), None, Alone())
    theirs = {n: p.grad for n, p in serial.named_parameters()}
    own = {n: p.grad for n, p in model.named_parameters() if n not in engine.shared}
    equal = {n: torch.equal(grad, theirs[n]) for n, grad in own.items()}
    spans = [s for s in trace.spans() if s.kind in ("forward", "backward", "weight")]
    return equal, apart(own, theirs) if own else 0.0, (engine.held, engine.waiting), sent, spans


@pytest.mark.parametrize(
    "name", ["naive", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_v"]
)
def test_gradients_are_bitwise_those_of_accumulation(pools, name):
    """Micro-batches pass every stage in the same order; only the embedding, used at both ends, is added up
    otherwise.
    """
    for equal, *_ in pools[3].run(parts, name, 5, CONFIG):
        assert all((equal | {"wte.weight": True}).values()), equal


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_and_send_exactly_what_the_schedule_says(pools, name):
    schedule = make(name, 4, 8)
    found = pools[4].run(parts, name, 8, SMALL, rows=9)
    for rank, (_, _, (held, waiting), (_, _, count), _) in enumerate(found):
        assert held == schedule.held(rank) and max(held) == schedule.promise[rank]
        assert waiting == schedule.waiting(rank)
        assert count == schedule.messages(rank)
    total = sum(size for *_, (_, size, _), _ in found)
    assert sum(count for *_, (_, _, count), _ in found) == messages(name, 4, 8)
    assert total == messages(name, 4, 8) * 9 * 11 * 16 * 8 // (8 * schedule.slices)  # b T C float64 a message


def messages_of_an_evaluation(rank, world_size):
    """Only one that was waited for is in the log."""
    trainer = trainer_by("pp=2,micro=3")
    comm.clear_log()
    trainer.evaluate([example_batch(CONFIG, 7, 11)])
    return comm.traffic().get(("send", "pp"), (0, 0, 0))[2]


def test_a_lesson_counts_the_sums_of_what_two_ranks_hold_beside_the_messages_of_stages(pools):
    found, small = pools[2].run(labs.live, [make("chimera", 2, 8), make("1f1b", 2, 8)]), labs.SMALL
    summed = [8 * small.parameters, 8 * small.vocab_size * small.n_embd]
    assert [[sums for *_, sums, _, _ in of_rank] for of_rank in found] == [summed, summed]


def test_an_evaluation_waits_for_all_that_it_sends(pools):
    assert pools[2].run(messages_of_an_evaluation) == [3, 0]


def test_a_paced_run_takes_its_set_times_and_hops(pools):
    cost = Cost(0.02, 0.01, 0.03, hop=0.05)
    found = pools[2].run(parts, "zb_h1", 3, SMALL, engine_options=[("pace", cost)])
    spans = [{s.name: s for s in spans} for *_, spans in found]
    for name, span in (item for of_rank in spans for item in of_rank.items()):
        assert span.end - span.start >= {"F": 0.02, "I": 0.01, "W": 0.03}[name[0]]
    for micro in range(3):
        assert spans[1][f"F{micro}"].start >= spans[0][f"F{micro}"].end + 0.05
        assert spans[0][f"I{micro}"].start >= spans[1][f"I{micro}"].end + 0.05


@pytest.mark.parametrize("cost", [Cost(blocking=True), Cost(joint=3)])
def test_what_live_ranks_cannot_pace_is_refused(pools, cost):
    with pytest.raises(RuntimeError, match="is only simulated: live ranks cannot pace it"):
        pools[2].run(parts, "1f1b", 3, SMALL, engine_options=[("pace", cost)])


@pytest.mark.parametrize("again", [False, True])
def test_uneven_token_slices_give_the_serial_gradients(pools, again):
    chosen = [("lengths", (6, 3, 2)), ("keep_inputs_only", again)]
    found = pools[2].run(parts, "terapipe", 2, CONFIG, engine_options=chosen, slices=3)
    for rank, (_, error, (held, _), *_) in enumerate(found):
        assert held == make("terapipe", 2, 2, slices=3).held(rank) and error < 1e-12


def test_token_slices_that_do_not_add_up_are_refused(pools):
    with pytest.raises(RuntimeError, match="Slices of 6, 3 tokens make 9 in 2 slices"):
        pools[2].run(parts, "terapipe", 2, CONFIG, engine_options=[("lengths", (6, 3))], slices=3)


@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 60), st.integers(8, 200))
@settings(max_examples=50, deadline=None)
def test_layers_are_cut_so_that_the_slowest_stage_is_as_fast_as_can_be(layers, count, vocab, length):
    config = GPT2Config(vocab_size=vocab * 50, n_positions=length, n_layer=layers, n_head=2, n_embd=16)
    embed, block, head = stages.costs(config, length)

    def slowest(counts):
        times = [n * block for n in counts]
        times[0] += embed
        times[-1] += head
        return max(times)

    cut = stages.cut_layers(config, count)
    assert [i for r in cut for i in r] == list(range(layers)) and len(cut) == count
    every = (c for c in itertools.product(range(layers + 1), repeat=count) if sum(c) == layers)
    assert slowest([len(r) for r in cut]) == pytest.approx(min(map(slowest, every)))


def test_the_two_halves_of_a_backward_equal_the_whole_bitwise():
    torch.manual_seed(0)
    whole, halves = GPT2(SMALL).double(), GPT2(SMALL).double()
    batch = example_batch(SMALL, 3, 11)

    def work(model):
        x = y = model.embed(batch.tokens, batch.positions).detach().requires_grad_()
        with noting() as linears:
            for block in model.h.values():
                y = block(y, batch.positions)
            loss = model.loss(model.head(y), batch.targets) / batch.total
        return Work(x, loss, linears=linears, parameters=model.parameters())

    one, two = work(whole), work(halves)
    grad = one.backward(None)
    assert torch.equal(two.input_gradient(None), grad)
    assert all(p.grad is None for p in halves.parameters()), "the first half leaves weights alone"
    two.weight_gradient()
    for (name, a), b in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert a.grad is b.grad is None and name == "wpe.weight" or torch.equal(a.grad, b.grad), name


ORDERS = {  # where PyTorch's tables differ from ours, with 8 micro-batches
    (2, "1f1b"): "part on rank 1 at operation 0: ours 1F0, theirs 1F1",
    (4, "1f1b"): "part on rank 3 at operation 0: ours 3F0, theirs 3F1",
    (4, "zb_v"): "part on rank 3 at operation 43: ours 3W5, theirs 4W6",
}


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_and_orders_compare_with_those_of_pytorchs_own_pipelines(pools, pp, name):
    asked = Namespace(schedules=name, config=SMALL_FOR_V, micro=8, length=8, over="gloo")
    for _, facts in pools[pp].run(on_rank, contest, asked, 1, 0):
        assert facts["torch's"]["gradients differ by"] < 1e-4  # float32 on both sides
        if (pp, name) in ORDERS:
            assert facts["torch's"]["orders:"] == f"{ORDERS[pp, name]} ({REASONS[name]})"
        else:
            assert facts["torch's"]["orders:"] == "the same"


# --- after every operation exactly what the schedule says is in memory


FIVE = GPT2Config(vocab_size=37, n_positions=16, n_layer=5, n_head=2, n_embd=16)
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
    built = built_by(text, FIVE, torch.float32)
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
        built.engine.run(example_batch(FIVE, ROWS, LENGTH).micro(built.plan.micro), None, Alone())
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
    vocabulary = FIVE.vocab_size if position == len(layers) - 1 else 0
    tokens, width = rows * LENGTH, FIVE.n_embd
    return NUMBER * (
        kept_for_weights(tokens, width, len(layers[position]), vocabulary) if position else tokens * width
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


# --- what is over holds no memory, though Python's collector never comes


def in_circles(rank, world_size, text):
    """Shapes of the tensors that a step and an evaluation leave in circles of references."""
    trainer, batch = trainer_by(text, SMALL_FOR_V), example_batch(SMALL_FOR_V, 7, 11)
    trainer.stream([batch])
    gc.collect()
    gc.disable()
    try:
        trainer.stream([batch])
        trainer.evaluate([batch])
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(t.shape) for t in gc.garbage if isinstance(t, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


KINDS = ["pp=2,micro=3", "pp=2,micro=3,schedule=zb_v", "pp=2,schedule=pipedream", "dp=2,zero=3", "tp=2,sp=on"]


@pytest.mark.parametrize("text", [*KINDS, "cp=2,exchange=ring"])
def test_what_a_step_has_held_goes_with_it(pools, text):
    assert pools[2].run(in_circles, text) == [[], []]


CIRCLE = PipelineStep.__init__, "*inputs", "self.units, self.model, self.number"


def test_mutant_whose_messages_refer_to_their_step_outlives_it(pools):
    assert any(pools[2].run(under(CIRCLE, in_circles), KINDS[0]))


# --- a new schedule is a generator and a line of the registry, as CONTRIBUTING promises


def by_pairs(ranks: int, micros: int) -> Schedule:
    """Two forwards, then their two backwards, and so on: between `naive` and `gpipe`."""
    pairs = [range(i, min(i + 2, micros)) for i in range(0, micros, 2)]
    order = [(kind, i) for pair in pairs for kind in "FB" for i in pair]
    orders = tuple(tuple(Op(kind, s, i) for kind, i in order) for s in range(ranks))
    return Schedule(orders, tuple(range(ranks)), micros, name="by_pairs", promise=(min(micros, 2),) * ranks)


LINE = registry, "GENERATORS", lambda known: (*known, registry.Generator("by_pairs", by_pairs, "this test"))


def test_a_schedule_that_is_one_line_of_the_registry_is_checked_simulated_planned_and_run(pools):
    plan = Plan.parse("pp=2,micro=5,schedule=by-pairs")
    with planted(*LINE):
        plan.check(CONFIG, 7, 11)
        found = registry.make("by_pairs", 2, 5)
        check(found)
        assert simulate(found).makespan == 3 * 5 + 3 * 3  # of three rounds each waits for the other stage
        assert not is_noticed(pools[2], LINE, plan, CONFIG)
