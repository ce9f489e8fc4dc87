"""Servers that apply gradients on arrival, replicas that meet every H steps: equal to emulators; their figures."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import planted, under

from gpt2lab.lessons.labs import local_sgd
from gpt2lab.lessons.labs import replicated_stages as replicated
from gpt2lab.lessons.labs import servers_on_arrival as servers
from gpt2lab.lessons.labs.compressed import CODES, CodedSum
from gpt2lab.lessons.labs.instruments import apart
from gpt2lab.lessons.labs.staleness import LETTERS, homes_of, losses
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.data import Naive, Replicas
from gpt2lab.parallel.pipeline.versions import Embedding
from gpt2lab.plots import asynchronous as plots
from gpt2lab.reference import example_batch, serial_gradients
from gpt2lab.schedules import Cost, simulate
from gpt2lab.schedules.asynchronous import make_stream
from gpt2lab.train import Recipe

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=2, n_embd=16)
DEEP = replace(CONFIG, n_layer=4)
BATCHES = [example_batch(CONFIG, 7, 11, t) for t in range(6)]


def largest_error(found, emulator) -> float:
    """The largest relative error of weights and losses of all ranks; infinite where another version was read."""
    reads = emulator.stream.reads
    if any(r.version != reads[r.op] for *_, record, _ in found for r in record):
        return float("inf")
    losses, want = sum(of for of, *_ in found), torch.tensor(emulator.losses, dtype=torch.float64)
    return max(apart({"": losses}, {"": want}), *(apart(of, emulator.weights) for _, of, *_ in found))


def log_of(events) -> list:
    """What the servers write into their log."""
    read, log = {}, []
    for event in events:
        if event.kind == "pull":
            read[event.worker] = len(log)
        else:
            log.append(servers.Applied(event.worker, event.clock, read[event.worker], len(log)))
    return log


def most_ahead(log) -> int:
    """The most steps by which a worker was ahead of the slowest when it pulled."""
    done = lambda entry: Counter(other.worker for other in log[: entry.read])
    workers = {entry.worker for entry in log}
    return max(entry.clock - min(done(entry)[w] for w in workers) for entry in log)


def missed(log) -> list[int]:
    """Updates between pull and push of every gradient, without those of its own clock."""
    return [sum(other.clock != entry.clock for other in log[entry.read : entry.update]) for entry in log]


@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2), (1, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize("scheme", ["pipedream", "ampnet"])
@pytest.mark.parametrize("recipe", [Recipe("sgd", lr=0.1, clip=0.5), Recipe(lr=1e-2)], ids=["sgd", "adamw"])
def test_replicated_stages_equal_their_emulator(pools, stages, scheme, recipe):
    found = pools[sum(stages)].run(replicated.train, scheme, stages, DEEP, BATCHES, recipe)
    emulator = replicated.emulate(scheme, stages, DEEP, BATCHES, recipe)
    assert largest_error(found, emulator) < 1e-10
    stream = emulator.stream
    for rank, (_, weights, record, traffic) in enumerate(found):
        assert [r.held for r in record] == stream.held(rank)
        (stage,) = stream.schedule.stages_of(rank)
        replicas, own = stages[stage], [n for n, w in weights.items() if n != "wte.weight" or stage == 0]
        size = sum(weights[n].numel() * 8 for n in own)
        calls, sent, _ = traffic.get(("all_reduce", "replicas"), (0, 0, 0))
        assert calls == (replicas > 1) * len(own) * len(BATCHES) // replicas
        assert abs(sent - 2 * (replicas - 1) * size // replicas * (len(BATCHES) // replicas)) <= 8 * calls
    for stage in range(len(stages)):
        same = [found[rank][1] for rank in stream.schedule.ranks_of(stage)]
        assert all(torch.equal(w, other[n]) for other in same for n, w in same[0].items())


def followed_by_the_first_alone(right):
    def deaf(self, version):
        before = self.weight is not None and self.weight.data.clone()
        right(self, version)
        if self.ends.rank > self.last[0]:
            self.weight.data.copy_(before)

    return deaf


def head_of_one_replica_alone(right):
    return lambda self, micro: right(self, micro) * (self.ends.rank == 0)


APART = {  # stages, and the bug
    "first updating apart": ((2, 1), (Naive, "finish", lambda right: Replicas.finish)),
    "last updating apart": ((1, 2), (Naive, "finish", lambda right: Replicas.finish)),
    "new embedding for one": ((1, 2), (Embedding, "pull", followed_by_the_first_alone)),
    "head's gradient from one": ((2, 1), (Embedding, "take", head_of_one_replica_alone)),
}


@pytest.mark.parametrize("stages, bug", APART.values(), ids=APART)
def test_mutants_of_replicated_stages_are_noticed(pools, stages, bug):
    recipe = Recipe("sgd", lr=0.1, clip=None)
    found = pools[sum(stages)].run(under(bug, replicated.train), "pipedream", stages, DEEP, BATCHES, recipe)
    assert largest_error(found, replicated.emulate("pipedream", stages, DEEP, BATCHES, recipe)) > 1e-6


@given(slow=st.integers(1, 6), bound=st.integers(0, 4), seed=st.integers(0, 50), workers=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_worker_is_further_ahead_than_the_bound(slow, bound, seed, workers):
    events = servers.arrivals([1.0] * (workers - 1) + [float(slow)], 8, bound, seed)
    log = log_of(events)
    assert most_ahead(log) <= bound
    assert sorted((e.worker, e.clock) for e in log) == [(w, c) for w in range(workers) for c in range(8)]
    if bound == 0:
        assert all(entry.read == entry.clock * workers for entry in log)


def test_mutant_a_bound_off_by_one_is_seen_in_the_log():
    loose = lambda right: lambda clock, slowest, bound: right(clock, slowest, bound + 1)
    with planted(servers, "may_start", loose):
        assert most_ahead(log_of(servers.arrivals([1.0, 5.0], 8, 2))) == 3


def test_the_slow_worker_makes_the_others_stale_and_the_bound_limits_it():
    logs = [log_of(servers.arrivals([1.0, 1.0, 4.0], 12, bound)) for bound in (0, 1, 3, None)]
    none, one, three, free = (max(missed(log)) for log in logs)
    assert none == 0 < one < three <= free


def test_a_paced_run_is_as_slow_as_its_order_says_and_gives_the_same_bits(pools):
    events = servers.arrivals([1.0, 1.0, 4.0], 2, None, seed=3)
    plain, paced = (pools[4].run(servers.serve, 1, CONFIG, BATCHES, events, 0.1, unit) for unit in (0, 0.02))
    assert torch.equal(plain[0][0], paced[0][0]) and plain[0][1] == paced[0][1]
    for worker, (seconds, *_) in enumerate(paced[1:]):
        assert seconds >= 0.02 * max(e.time for e in events if e.worker == worker)


@pytest.mark.parametrize("count, bound", [(1, 0), (1, 2), (1, None), (2, 1)])
def test_the_log_replays_to_the_same_bits(pools, count, bound):
    workers = 3 if count == 1 else 2
    events = servers.arrivals([1.0] * (workers - 1) + [3.0], len(BATCHES), bound, seed=3)
    found = pools[4].run(servers.serve, count, CONFIG, BATCHES, events, 0.1)
    logs = [log for _, log, _ in found[:count]]
    assert logs == [log_of(events)] * count
    assert bound is None or most_ahead(logs[0]) <= bound
    mine = torch.cat([part for part, *_ in found[:count]])
    # on a rank, where matrix products take the same path as those that are replayed
    replayed = pools[4].run(lambda *_: servers.replay(CONFIG, BATCHES, logs[0], workers, 0.1)[-1])
    assert torch.equal(mine, replayed[0])
    _, size, messages = found[-1][2]["send", "dp"]
    assert (size, messages) == (8 * CONFIG.parameters * len(BATCHES), count * len(BATCHES))


def test_with_a_flush_the_same_engine_is_serial_training(pools):
    recipe = Recipe("sgd", lr=0.1, clip=None, weight_decay=0.0)
    found = pools[3].run(replicated.train, "1f1b", (1, 1, 1), DEEP, BATCHES, recipe)
    assert all(len(read.held) == 1 for *_, record, _ in found for read in record)
    serial = trained_serially(DEEP)
    for _, weights, *_ in found:
        assert all(torch.allclose(w, serial[n], rtol=0, atol=1e-13) for n, w in weights.items())


def trained_serially(config):
    """The serial weights after one step of SGD on each batch, by name."""
    model = GPT2(config).double()
    for batch in BATCHES:
        _, grads, _ = serial_gradients(model, batch)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * grads[name]
    return {name: p.detach() for name, p in model.named_parameters()}


def test_bulk_synchronous_is_serial_training():
    log = log_of(servers.arrivals([1.0, 2.0, 1.5], len(BATCHES), 0))
    found = servers.replay(CONFIG, BATCHES, log, 3, 0.1)[-1]
    serial = torch.cat([w.flatten() for w in trained_serially(CONFIG).values()])
    assert torch.allclose(found, serial, rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks, every", [(2, 3), (4, 2), (2, 1)])
def test_local_sgd_equals_its_emulator_and_sends_every_h_steps(pools, ranks, every):
    found = pools[ranks].run(local_sgd.train, CONFIG, BATCHES, every)
    want, losses = local_sgd.emulate(CONFIG, BATCHES, ranks, every)
    for rank, (weights, mine, traffic) in enumerate(found):
        assert torch.allclose(weights, want, rtol=0, atol=1e-12)
        assert mine == pytest.approx(losses[rank], 1e-12)
        calls, size, _ = traffic["all_reduce", "dp"]
        assert calls == len(BATCHES) // every
        assert abs(size - calls * 2 * (ranks - 1) * 8 * CONFIG.parameters // ranks) < 8 * ranks * calls


class Digits:
    """A code that keeps all digits."""

    def encode(self, x):
        return x.contiguous().view(torch.uint8)

    def decode(self, message, like):
        return message.view(like.dtype)


def off_the_way(pools, code, feedback=True) -> tuple[float, list[int]]:
    """Weights of coded local SGD from the emulator's, in parts of the way of these; bytes that ranks sent."""
    summed = partial(CodedSum(code, feedback), "differences")
    found = pools[2].run(local_sgd.train, CONFIG, BATCHES, 2, summed=summed)
    want, start = local_sgd.emulate(CONFIG, BATCHES, 2, 2)[0], local_sgd.flat(GPT2(CONFIG).double())
    assert all(torch.equal(weights, found[0][0]) for weights, *_ in found)
    sent = [sum(size for _, size, _ in traffic.values()) for *_, traffic in found]
    return ((found[0][0] - want).norm() / (want - start).norm()).item(), sent


def test_coded_local_sgd_is_the_plain_one_with_all_digits_and_near_it_with_eight_bits(pools):
    plain, whole = off_the_way(pools, Digits())
    coded, sent = off_the_way(pools, CODES["int8"])
    assert plain < 1e-10 and 1e-6 < coded < 0.02
    rounds, half = len(BATCHES) // 2, -(-CONFIG.parameters // 2)
    message = -(-half // 32) * (32 + 1)  # whole blocks, each with its scale
    assert max(abs(size - rounds * 2 * message) for size in sent) <= rounds * 2 * 33
    assert max(sent) < max(whole) / 7


def test_coded_sums_that_lose_what_a_rank_says_are_noticed(pools):
    class First(Digits):
        """Says only the first half of the digits' numbers."""

        def encode(self, x):
            return super().encode(x * (torch.arange(len(x)) < len(x) // 2))

    assert off_the_way(pools, First(), feedback=False)[0] > 0.1


OUTER = {
    "outer gradient with the wrong sign": lambda right: lambda self, difference: right(self, -difference),
    "mean taken twice": lambda right: lambda self, difference: right(self, difference / 2),
}


@pytest.mark.parametrize("make", OUTER.values(), ids=OUTER)
def test_mutants_of_the_outer_step_are_noticed(pools, make):
    job = under((local_sgd.Outer, "step", make), local_sgd.train)
    (weights, *_), _ = pools[2].run(job, CONFIG, BATCHES[:4], 2)
    assert not torch.allclose(weights, local_sgd.emulate(CONFIG, BATCHES[:4], 2, 2)[0], rtol=0, atol=1e-6)


# --- figures


def test_the_clock_says_which_version_is_read_and_how_many_are_kept():
    stream = make_stream("ampnet", 3, 5)
    clock = simulate(stream.schedule, Cost(1, backward=2))
    above, below = plots.in_time(stream, clock).axes
    boxes = [(float(b.start + b.end) / 2, s + 0.5, b.op) for s, row in enumerate(clock.rows) for b in row]
    assert [(*t.get_position(), int(t.get_text())) for t in above.texts] == [
        (x, y, stream.reads[op]) for x, y, op in boxes
    ]
    shades = [c for of_stage in above.collections for c in of_stage.get_facecolors()]
    for (_, _, op), shade in zip(boxes, shades, strict=True):
        assert (shade[1] < 0.9) == (stream.staleness(op) > 0), op
    for stage, line in enumerate(below.lines):
        assert list(line.get_ydata()) == [1, *map(len, stream.held(stage))]


def test_letters_are_learnt_with_every_parameter_at_home():
    homes = homes_of(LETTERS, 4)
    assert set(homes) == {n for n, _ in GPT2(LETTERS).named_parameters()}
    assert set(homes.values()) == set(range(4))
    found = losses("1f1b", 0.2, 0, 0, 12, stages=2)
    assert found[-1] < found[0] - 0.5
