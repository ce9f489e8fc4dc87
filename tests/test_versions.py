"""Pipelines without a flush on live ranks: equal to an emulator of their staleness, with exactly the versions said."""

import json
from pathlib import Path

import pytest
import torch

from gpt2lab.emulate import HEAD, Emulator, TwoEnds, mixed_gradient
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.pipeline.versions import Stash, stream_of
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import default_dtype, example_batch, example_weights
from gpt2lab.run import Options, start
from gpt2lab.schedules import Op
from gpt2lab.storage import checkpoint
from gpt2lab.train import Recipe, Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)


@pytest.mark.parametrize(
    "plan",
    ["pp=2,schedule=pipedream,active=1", "pp=3,schedule=ampnet,active=1", "pp=3,micro=2,schedule=1f1b"],
)
def test_with_one_batch_in_flight_or_a_flush_the_emulator_is_serial_training(plan):
    plan, recipe = Plan.parse(plan), Recipe("sgd", lr=0.1, clip=None, weight_decay=0.0)
    batches, start = [example_batch(CONFIG, 7, 11, t) for t in range(4)], example_weights(CONFIG)
    homes = {name: i % plan.pp for i, name in enumerate(start)} | {"wte.weight": 0}
    found = Emulator(CONFIG, start, stream_of(plan, len(batches)), homes, recipe).run(batches)
    serial = start
    for batch in batches:
        _, grads = gradient_at(serial, serial, batch)
        serial = {n: w - 0.1 * grads[n] for n, w in serial.items()}
    assert all(torch.allclose(found.weights[n], w, rtol=0, atol=1e-12) for n, w in serial.items())


def gradient_at(forward, backward, batch):
    """The gradient where forward and backward read these weights, with both ends of the embedding summed."""
    ends = [{**w, HEAD: w["wte.weight"]} for w in (forward, backward)]
    ends = [{n: t.detach() for n, t in w.items()} for w in ends]
    loss, grads = mixed_gradient(TwoEnds(CONFIG).double(), *ends, batch.tokens, batch.targets, batch.total)
    grads["wte.weight"] = grads["wte.weight"] + grads.pop(HEAD)
    return loss, grads


@default_dtype(torch.float64)
def stream_and_show(rank, world_size, plan, batches, start):
    """Train on a stream in float64; what the engine recorded, and what is left in memory."""
    plan = Plan.parse(plan)
    parallel = build(plan, CONFIG, Mesh(**plan.axes), torch.float64)
    parallel.load(start)
    trainer = Trainer(parallel, Recipe("sgd", lr=0.1, clip=None))
    found = [r.loss for r in trainer.stream(batches)]
    after = trainer.evaluate(batches[:1])
    return parallel.engine.record, parallel.engine.held, found, after, dict(comm.traffic())


def test_versions_activations_and_messages_are_those_of_the_table(pools):
    batches, start = [example_batch(CONFIG, 7, 11, t) for t in range(8)], example_weights(CONFIG)
    found = pools[4].run(stream_and_show, "pp=4,schedule=pipedream", batches, start)
    for stage, (record, held, *_) in enumerate(found):
        assert max(len(r.held) for r in record) == 4 - stage
        assert max(held) == 4 - stage
        sizes = {r.bytes // len(r.held) for r in record}
        assert len(sizes) == 1 and record[-1].held == frozenset({8})
        for r in record:
            late = max(0, r.op.micro - (3 - stage))
            assert r.version == late
    assert len({after for *_, after, _ in found}) == 1


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


def test_autograd_itself_refuses_what_ampnet_does():
    w, x = torch.nn.Parameter(torch.eye(3)), torch.ones(2, 3, requires_grad=True)
    loss = torch.nn.functional.linear(x, w).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_mixed_gradient_is_the_gradient_at_no_version():
    """Without a stash: far from the gradient at every single version; with it: torch's gradient, to the last bit."""
    batch, start = example_batch(CONFIG, 7, 11), example_weights(CONFIG)
    path = [start]
    for _ in range(3):
        _, grads = gradient_at(path[-1], path[-1], batch)
        path.append({n: w - 0.1 * grads[n] for n, w in path[-1].items()})
    norm = lambda d: torch.stack([t.norm() for t in d.values()]).norm().item()
    apart = lambda a, b: norm({n: a[n] - b[n] for n in a}) / norm(b)
    _, mixed = gradient_at(path[0], path[3], batch)
    pure = [gradient_at(w, w, batch)[1] for w in path]
    assert min(apart(mixed, g) for g in pure) > 1e-2
    _, same = gradient_at(path[0], path[0], batch)
    assert apart(same, pure[0]) == 0


def ask_for_all_gradients(rank, world_size):
    parallel = build(Plan.parse("pp=2,schedule=pipedream"), CONFIG, Mesh(pp=2))
    with pytest.raises(ValueError, match="no moment at which all stages hold a batch's gradients"):
        Trainer(parallel).gradients(example_batch(CONFIG, 7, 11))


def test_a_global_gradient_is_refused(pools):
    pools[2].run(ask_for_all_gradients)


def train_and_resume(rank, world_size, folder, plan, cut):
    """Losses of 8 batches with a checkpoint after `cut`, and those of a fresh trainer that goes on from it."""
    batches, recipe = [example_batch(CONFIG, 8, 11, t) for t in range(8)], Recipe(lr=1e-2)
    plan = Plan.parse(plan)
    first = Trainer(build(plan, CONFIG, Mesh(**plan.axes)), recipe)
    first.stream(batches[:cut])
    path = checkpoint.save(first, folder)
    losses = [r.loss for r in first.stream(batches[cut:])]
    again = Trainer(build(plan, CONFIG, Mesh(**plan.axes), seed=1), recipe)
    checkpoint.load(path, again)
    return losses, [r.loss for r in again.stream(batches[cut:])]


@pytest.mark.parametrize("plan", ["pp=2,schedule=pipedream", "pp=2,micro=2,schedule=2bw"])
def test_a_drained_run_resumes_with_the_same_losses(pools, tmp_path, plan):
    for losses, again in pools[2].run(train_and_resume, str(tmp_path), plan, 3):
        assert losses == again


def a_run(rank, world_size, steps, folder, resume):
    how = {
        "steps": steps,
        "batch": 2,
        "sequence": 8,
        "evaluate": 3,
        "save": 2,
        "dtype": "float64",
        "cosine": False,
    }
    options = Options(plan="pp=2,schedule=pipedream", **how)
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
    found = Emulator(CONFIG, start, stream, homes, Recipe("sgd", lr=0.1)).run(
        [example_batch(CONFIG, 7, 11, t) for t in range(4)]
    )
    forward, backward = found.read("F", 3), found.read("B", 3)
    assert torch.equal(forward["h.0.ln_1.bias"], found.history[0][2]["h.0.ln_1.bias"])
    assert torch.equal(backward["h.0.ln_1.bias"], found.history[0][3]["h.0.ln_1.bias"])
    assert stream.reads[Op("F", 1, 3)] == 3
