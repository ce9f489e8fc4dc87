"""Streams without a flush: their orders and version tables, live ranks and their emulator, whose gradients they are."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from gpt2lab.emulate import HEAD, Emulator, TwoEnds
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.lessons.labs.staleness import homes_of
from gpt2lab.model import GPT2Config, token_loss
from gpt2lab.parallel.pipeline.versions import Ending, Stash, stream_of
from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks.axis import Axis
from gpt2lab.reference import default_dtype, example_batch, example_weights
from gpt2lab.run import Options, start
from gpt2lab.schedules import Cost, Op, ScheduleError, make, simulate
from gpt2lab.schedules.asynchronous import (
    FREE,
    SCHEMES,
    Stream,
    check_stream,
    flushed,
    free_running,
    make_stream,
)  # fmt: skip
from gpt2lab.storage import checkpoint
from gpt2lab.train import Recipe

SIZES = {"p": st.integers(1, 6), "batches": st.integers(1, 12), "k": st.integers(1, 7)}
ACTIVE = st.integers(1, 6)
QUICK = settings(max_examples=60, deadline=None)


def closed_form(stream: Stream, op: Op) -> int:
    """The version that an operation reads, as the papers have it, from numbers alone.

    A forward on a rank that runs `ahead` forwards ahead of its backwards, of its i-th micro-batch, meets
    max(0, i - ahead) // per_update updates; with n stages `ahead` is n - 1 - s on stage s.
    """
    schedule, scheme = stream.schedule, stream.schedule.name
    if scheme == "2bw" or scheme == "1f1b":
        return max(0, stream.batch(op) - (scheme == "2bw"))
    home = op._replace(stage=0) if scheme == "pipedream_vertical" else op
    ahead = 0 if (scheme, op.kind) == ("ampnet", "B") else schedule.promise[schedule.rank_of(home)] - 1
    return max(0, op.micro // len(schedule.ranks_of(op.stage)) - ahead) // stream.per_update


def versions_held(stream: Stream, rank: int) -> int:
    """The most versions of its weights that a rank holds at a time, in a stream long enough.

    PipeDream: as many as forwards are under way, p - s on stage s, with one micro-batch an update; with k of them
    1 + ceil((p - 1 - s) / k). With vertical sync stage 0's number everywhere.
    """
    scheme = stream.schedule.name
    if scheme in ("pipedream", "pipedream_vertical"):
        ahead = stream.schedule.promise[0 if scheme == "pipedream_vertical" else rank] - 1
        return 1 + -(-ahead // stream.per_update)
    return 2 if scheme == "2bw" else 1


def a_stream(name, p, batches, k, active):
    """A stream; 2BW gets the micro-batches that it needs."""
    active = None if name == "1f1b" else min(active, p)
    return make_stream(name, p, batches, max(k, p) if name == "2bw" else k, active)


@pytest.mark.rotates
@pytest.mark.parametrize("name", SCHEMES)
@given(**SIZES, active=ACTIVE)
@QUICK
def test_every_operation_reads_a_version_that_is_there_and_none_is_kept_too_long(name, p, batches, k, active):
    stream = a_stream(name, p, batches, k, active)
    assert stream.reads == {op: closed_form(stream, op) for order in stream.schedule.orders for op in order}
    if active == 1 or name == "1f1b":  # one micro-batch in flight, or a flush
        assert name == "2bw" or not any(map(stream.staleness, stream.reads))
    for stage, order in enumerate(stream.schedule.orders):
        held, made, kept = stream.held(stage), 0, frozenset({0})
        assert max(map(len, held)) <= versions_held(stream, stage)
        for n, op in enumerate(order):
            assert stream.reads[op] in kept
            assert stream.reads[op] <= made
            made = stream.makes(op) or made
            kept = held[n]
            wanted = {stream.reads[later] for later in order[n + 1 :] if stream.reads[later] <= made}
            assert kept == wanted | {made}
        assert made == batches


@pytest.mark.rotates
@pytest.mark.parametrize("name", SCHEMES)
@given(p=st.integers(1, 6), k=st.integers(1, 7), active=ACTIVE)
@QUICK
def test_versions_held_are_those_of_the_papers(name, p, k, active):
    stream = a_stream(name, p, 2 * p + 2, k, active)
    for stage in range(p):
        most = max(map(len, stream.held(stage)))
        assert most == versions_held(stream, stage)
        if name in ("1f1b", "ampnet", "2bw"):
            assert most == 1 + (name == "2bw")
        if name == "pipedream" and stream.per_update == 1 and active >= p:
            assert most == p - stage


@pytest.mark.parametrize("name", [n for n in SCHEMES if n != "2bw"])
@given(**SIZES, active=ACTIVE)
@QUICK
def test_embedding_and_head_read_the_same_version_for_a_micro_batch(name, p, batches, k, active):
    stream = a_stream(name, p, batches, k, active)
    assert all(v == stream.reads[Op("F", 0, op.micro)] for op, v in stream.tied.items())


@given(p=st.integers(1, 6), m=st.integers(1, 40), f=st.integers(1, 4), b=st.integers(1, 4))
@QUICK
def test_the_bubble_is_paid_once_and_goes_to_zero(p, m, f, b):
    timeline = simulate(free_running(p, m), Cost(f, backward=b))
    assert timeline.makespan == (m + p - 1) * (f + b)
    assert simulate(flushed(p, 3, m), Cost(f, backward=b)).makespan == 3 * (m + p - 1) * (f + b)


REPLICAS = [stages for p in (1, 2, 3) for stages in product((1, 2, 3), repeat=p)]


@pytest.mark.parametrize("name", ["pipedream", "ampnet"])
def test_replicas_take_turns_and_update_together(name):
    for stages in REPLICAS:
        stream, ranks = make_stream(name, stages, 36), sum(stages)
        assert stream.schedule.promise[0] == -(-ranks // stages[0])  # NOAM
        assert all(version == closed_form(stream, op) for op, version in stream.reads.items())
        for s, count in enumerate(stages):
            for rank in stream.schedule.ranks_of(s):
                place = rank - stream.schedule.placement[s]
                assert [op.micro for op in stream.schedule.orders[rank] if op.kind == "F"] == list(
                    range(place, 36, count)
                )
                made = [v for op in stream.schedule.orders[rank] if (v := stream.makes(op))]
                assert made == list(range(1, 36 // count + 1))
                assert max(map(len, stream.held(rank))) == versions_held(stream, rank)


def test_a_round_that_can_never_end_is_found():
    stream = make_stream("pipedream", (2, 1), 4)
    schedule = stream.schedule
    first = tuple(Op(kind, 0, micro) for kind, micro in (("F", 0), ("B", 0), ("F", 2), ("B", 2)))
    last = tuple(Op(kind, 1, micro) for micro in (0, 2, 1, 3) for kind in "FB")
    orders = (first, schedule.orders[1], last)
    with pytest.raises(ScheduleError, match="Deadlock: rank 0 waits at 0F2 for 0I1, .*"):
        check_stream(replace(stream, schedule=replace(schedule, orders=orders)))


def test_the_registry_knows_their_order():
    assert make("PipeDream", 4, 8).orders == make("1f1b", 4, 8).orders
    assert make("ampnet", 4, 8, active=2).promise == (2, 2, 2, 1)


# --- live ranks, and an emulator of their staleness


CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)
BATCHES, LR = [example_batch(CONFIG, 7, 11, t) for t in range(8)], 0.1


@pytest.mark.parametrize(
    "plan",
    ["pp=2,schedule=pipedream,active=1", "pp=3,schedule=ampnet,active=1", "pp=3,micro=2,schedule=1f1b"],
)
def test_with_one_batch_in_flight_or_a_flush_the_emulator_is_serial_training(plan):
    plan, recipe = Plan.parse(plan), Recipe("sgd", lr=0.1, clip=None, weight_decay=0.0)
    batches, start = BATCHES[:4], example_weights(CONFIG)
    homes = {name: i % plan.pp for i, name in enumerate(start)} | {"wte.weight": 0}
    found = Emulator(CONFIG, start, stream_of(plan, len(batches)), homes, recipe).run(batches)
    serial = start
    for batch in batches:
        grads = true_gradient(serial, batch)
        serial = {n: w - 0.1 * grads[n] for n, w in serial.items()}
    assert all(torch.allclose(found.weights[n], w, rtol=0, atol=1e-12) for n, w in serial.items())


@default_dtype(torch.float64)
def stream_and_show(rank, world_size, plan):
    """Train on a stream; what the engine recorded, what it held, and the loss of an evaluation at the end."""
    trainer = trainer_by(plan, CONFIG, Recipe("sgd", lr=0.1, clip=None))
    trainer.stream(BATCHES)
    return trainer.parallel.engine.record, trainer.parallel.engine.held, trainer.evaluate(BATCHES[:1])


def test_versions_activations_and_messages_are_those_of_the_table(pools):
    found = pools[4].run(stream_and_show, "pp=4,schedule=pipedream")
    for stage, (record, held, _) in enumerate(found):
        assert max(len(r.held) for r in record) == 4 - stage
        assert max(held) == 4 - stage
        sizes = {r.bytes // len(r.held) for r in record}
        assert len(sizes) == 1 and record[-1].held == frozenset({8})
        assert all(r.version == max(0, r.op.micro - (3 - stage)) for r in record)
    assert len({after for *_, after in found}) == 1


def test_a_stash_exchanges_copies_and_frees():
    p = torch.nn.Parameter(torch.zeros(3))
    stash = Stash([p])
    for version in (1, 2):
        stash.push()
        p.data.fill_(version)
        stash.used = version
    assert stash.versions == {0, 1, 2} and stash.bytes == 3 * 12
    stash.use(0)
    assert p.tolist() == [0, 0, 0]
    stash.free(frozenset({1, 2}))
    assert stash.versions == {1, 2} and p.tolist() == [2, 2, 2]
    stash.use(1)
    assert p.tolist() == [1, 1, 1]
    with pytest.raises(KeyError):
        stash.use(0)


def ask_for_all_gradients(rank, world_size):
    with pytest.raises(ValueError, match="no moment at which all stages hold a batch's gradients"):
        trainer_by("pp=2,schedule=pipedream", CONFIG).gradients(BATCHES[0])


def test_a_global_gradient_is_refused(pools):
    pools[2].run(ask_for_all_gradients)


def train_and_resume(rank, world_size, folder, plan, cut):
    """Losses of 8 batches with a checkpoint after `cut`, and those of a fresh trainer that goes on from it."""
    first, again = (trainer_by(plan, CONFIG, Recipe(lr=1e-2), torch.float32) for _ in range(2))
    first.stream(BATCHES[:cut])
    path = checkpoint.save(first, folder)
    losses = [r.loss for r in first.stream(BATCHES[cut:])]
    checkpoint.load(path, again)
    return losses, [r.loss for r in again.stream(BATCHES[cut:])]


@pytest.mark.parametrize("plan", ["pp=2,schedule=pipedream", "pp=2,micro=2,schedule=2bw"])
def test_a_drained_run_resumes_with_the_same_losses(pools, tmp_path, plan):
    for before, again in pools[2].run(train_and_resume, str(tmp_path), plan, 3):
        assert before == again


@pytest.mark.parametrize("name", sorted(FREE))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 4)])  # for 2BW m is p at least
def test_a_stream_that_ends_early_is_the_beginning_of_the_longer_one(name, p, m):
    longer = make_stream(name, p, 7, m)
    for batches in range(1, 8):
        stream = make_stream(name, p, batches, m)
        kept = [[op for op in order if op.micro < batches * m] for order in longer.schedule.orders]
        assert kept == list(map(list, stream.schedule.orders))
        assert all(longer.reads[op] == version for op, version in stream.reads.items())
        assert [longer.newest(s, batches) for s in range(p)] == [batches] * p


def test_an_end_is_told_to_every_rank_before_the_batch_and_two_more_run():
    told, asked = [], iter([False, True])
    done = SimpleNamespace(wait=lambda: None)
    first, other = (Ending(9, Axis("all", (0, 1, 2), rank), lambda: next(asked)) for rank in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "isend", lambda ends, axis, to: told.append((to, ends.tolist())) or done)
        assert [first.before(batch) for batch in range(6)] == [9, 3, 3, 3, 3, 3]
        first.finish()
    assert told == [(1, [False]), (2, [False]), (1, [True]), (2, [True])]
    heard = iter([False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "recv", lambda like, axis, source: torch.tensor([next(heard)]))
        assert [other.before(batch) for batch in (0, 0, 1, 0, 2)] == [9, 9, 3, 3, 3]


@default_dtype(torch.float64)
def ask_to_end(rank, world_size, plan, look):
    """Two trainers: a stream that is asked to end at that look, and one over the batches that still run; then more."""
    looks, found = [], []
    asked = lambda: looks.append(0) or len(looks) > look
    for batches, *how in ((BATCHES, asked), (BATCHES[: look + 2],)):
        trainer = trainer_by(plan, CONFIG, Recipe(lr=1e-2))
        results = trainer.stream(batches, *how)
        steps = trainer.steps
        results += trainer.stream(BATCHES[:3])  # no message of the first stream is left
        weights = {name: p.detach().clone() for name, p in trainer.parallel.model.named_parameters()}
        found.append((results, steps, weights))
    return *found, len(looks)


@pytest.mark.parametrize("look", [0, 3, 6])
@pytest.mark.parametrize(
    "plan",
    [
        "pp=2,schedule=pipedream",
        "pp=4,schedule=ampnet,active=2",
        "pp=3,schedule=pipedream_vertical",
        "pp=2,dp=2,micro=2,schedule=2bw",
        "pp=2,tp=2,schedule=pipedream",
    ],
)
def test_a_stream_that_is_asked_to_end_is_the_shorter_stream(pools, plan, look):
    ranks = pools[Plan.parse(plan).world].run(ask_to_end, plan, look)
    for rank, (cut, short, looks) in enumerate(ranks):
        assert cut[:2] == short[:2] and cut[1] == min(look + 2, len(BATCHES))
        assert all(torch.equal(cut[2][name], weight) for name, weight in short[2].items())
        assert looks == (min(look + 1, 6) if rank == 0 else 0)  # the last two batches are not asked about


def a_run(rank, world_size, steps, folder, resume):
    how = {"batch": 2, "sequence": 8, "evaluate": 3, "save": 2, "dtype": "float64", "cosine": False}
    options = Options(plan="pp=2,schedule=pipedream", steps=steps, **how)
    entries = start(rank, world_size, options, folder, resume)
    if folder:  # where a run saves, its file has them all
        entries = map(json.loads, Path(folder, "log.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries]


@pytest.mark.slow
def test_a_whole_run_drains_for_its_checkpoints_and_goes_on_bitwise(pools, tmp_path):
    straight = pools[2].run(a_run, 6, None, False)[0]
    pools[2].run(a_run, 4, str(tmp_path), False)
    assert len(straight) == 6 and pools[2].run(a_run, 6, str(tmp_path), True)[0] == straight


def test_the_emulator_reads_what_the_table_says():
    stream = stream_of(Plan.parse("pp=2,schedule=ampnet"), 4)
    start = example_weights(CONFIG)
    homes = {name: int(name.startswith(("h.2", "h.3", "ln_f"))) for name in start}
    found = Emulator(CONFIG, start, stream, homes, Recipe("sgd", lr=0.1)).run(BATCHES[:4])
    forward, backward = found.read("F", 3), found.read("B", 3)
    assert torch.equal(forward["h.0.ln_1.bias"], found.history[0][2]["h.0.ln_1.bias"])
    assert torch.equal(backward["h.0.ln_1.bias"], found.history[0][3]["h.0.ln_1.bias"])
    assert stream.reads[Op("F", 1, 3)] == 3


# --- of what the gradients of live stages are gradients


@default_dtype(torch.float64)
def every_update(rank, world_size, text):
    """Each update of this stage: its gradients, and its weights before it; the last weights at the end."""
    trainer, seen = trainer_by(text, CONFIG, Recipe("sgd", lr=LR, clip=None, weight_decay=0.0)), []
    parallel = trainer.parallel
    parallel.load(example_weights(CONFIG))
    own, right = [p for p in parallel.sync.pieces if not p.spec.tied_copy], trainer._update

    def update(norm):
        copies = lambda pairs: {p.name: t.detach().clone() for p, t in pairs}
        seen.append((copies((p, p.tensor.grad) for p in own), copies((p, p.tensor) for p in own)))
        return right(norm)

    trainer._update = update
    trainer.stream(BATCHES)
    return seen, {name: p.detach().clone() for name, p in parallel.model.named_parameters()}


def true_gradient(weights, batch):
    """Torch's gradient, by name, of the serial model at these weights; the head may have a version of its own."""
    leaves = {
        name: w.clone().requires_grad_() for name, w in ({HEAD: weights["wte.weight"]} | weights).items()
    }
    logits = functional_call(TwoEnds(CONFIG).double(), leaves, (batch.tokens,))
    loss = token_loss(logits, batch.targets) / batch.total
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return found | {"wte.weight": found["wte.weight"] + found.pop(HEAD)}


def distance(a, b):
    norm = lambda grads: torch.stack([g.norm() for g in grads.values()]).norm()
    return (norm({name: a[name] - b[name] for name in b}) / norm(b)).item()


READS = {  # version of stage s of n for batch t
    "pp=4,schedule=pipedream": lambda s, n, t: max(0, t - (n - 1 - s)),
    "pp=4,schedule=pipedream_vertical": lambda s, n, t: max(0, t - (n - 1)),
    "pp=2,micro=2,schedule=2bw": lambda s, n, t: max(0, t - 1),
    "pp=3,micro=3,schedule=2bw": lambda s, n, t: max(0, t - 1),
    "pp=4,schedule=ampnet": None,
}


@pytest.mark.parametrize("text", READS)
def test_the_gradient_is_torchs_at_the_weights_of_the_paper_or_that_of_no_weights(pools, text):
    plan, version = Plan.parse(text), READS[text]
    found, homes = pools[plan.pp].run(every_update, text), homes_of(CONFIG, plan.pp)
    last = [weights for _, weights in found]
    assert torch.equal(last[0]["wte.weight"], last[-1]["wte.weight"])  # both ends of the embedding, drained
    whole = lambda read: {name: read(stage)[name] for name, stage in homes.items()}
    at = lambda v: whole(lambda stage: found[stage][0][v][1])
    for t, batch in enumerate(BATCHES):
        gradient = whole(lambda stage, t=t: found[stage][0][t][0])
        for stage, (seen, end) in enumerate(found):  # the update is w(t+1) = w(t) - lr g, on each stage
            after = seen[t + 1][1] if t + 1 < len(seen) else end
            for name, w in seen[t][1].items():
                assert torch.allclose(after[name], w - LR * gradient[name], rtol=0, atol=1e-14), (stage, name)
        if version:
            read = whole(lambda stage, t=t: found[stage][0][version(stage, plan.pp, t)][1])
            head = found[0][0][version(0, plan.pp, t)][1]["wte.weight"]
            assert distance(gradient, true_gradient({**read, HEAD: head}, batch)) < 1e-12
        elif t >= plan.pp:
            every = [at(v) for v in range(t + 1)]
            apart = [distance(gradient, true_gradient(w, batch)) for w in every]
            assert min(apart) > 1e-3, apart
