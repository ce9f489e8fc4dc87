"""What mixtures of experts send, by formula and on live ranks; copies of busy experts."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from planting import all_planted

from gpt2lab.experts.mixture import Experts, Mixture
from gpt2lab.lessons.labs import copies, scaling
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.parallel import expert
from gpt2lab.plan import Plan
from gpt2lab.planner.cost import predict
from gpt2lab.planner.problem import Cluster, Device, find_cluster
from gpt2lab.planner.sends import by_axis, sends
from gpt2lab.planner.share import RankShare
from gpt2lab.processes.launch import RankFailed
from gpt2lab.ranks import comm
from gpt2lab.reference import CONFIG as DENSE
from gpt2lab.reference import example_batch

EVEN = Experts(8, 2, router="expert_choice", balance=0.0, every=2)
MIXED = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=4, n_embd=16, experts=EVEN)
PLANS = {
    2: ("dp=2,ep=2", "dp=2,ep=2,zero=3,micro=2"),
    4: (
        "dp=4,ep=2,bucket=1",
        "dp=4,ep=4,zero=1",
        "dp=4,ep=2,zero=1,recompute=on,micro=2",
        "dp=4,ep=2,zero=2",
    ),
    8: ("dp=8,ep=4", "dp=8,ep=8,zero=1,recompute=on", "dp=8,ep=2,zero=3"),
    16: ("dp=16,ep=4", "dp=16,ep=8,zero=1"),
}


def said(text, config, rows, length, itemsize=4, rank=0):
    """(bytes, messages) by axis that a rank sends in a step, by formula."""
    return by_axis(sends(RankShare(Plan.parse(text), config, rows, length, itemsize, dp=rank)))


def sent_live(rank, world_size, plans, rows):
    """(bytes, messages) of a step by axis, from this rank's log, for each plan."""
    found = []
    for trainer in (trainer_by(plan, MIXED) for plan in plans):
        comm.clear_log()
        trainer.step(example_batch(MIXED, rows, 16))
        sizes, messages = Counter(), Counter()
        for event in comm.log:
            sizes[event.axis] += event.bytes
            messages[event.axis] += event.messages
        found.append({axis: (sizes[axis], messages[axis]) for axis in sizes if sizes[axis] or messages[axis]})
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_every_axis_sends_what_live_ranks_counted(pools, ranks):
    rows = 2 * ranks + 3  # not equally many on every rank
    for rank, found in enumerate(pools[ranks].run(sent_live, PLANS[ranks], rows)):
        for text, sent in zip(PLANS[ranks], found, strict=True):
            assert said(text, MIXED, rows, 16, 8, rank) == sent, (text, rank)


@pytest.mark.parametrize(
    ("dp", "ep", "again"), [(8, 8, False), (64, 8, False), (64, 64, True), (4096, 64, True)]
)
def test_the_closed_form_of_an_evenly_routed_mixture(dp, ep, again):
    """k tokens C numbers go and come in forward and in backward, all but the own part; experts sum over dp / ep."""
    c, k, rows, length = 32, 2, 2 * dp, 64
    config = GPT2Config(64, length, 6, 4, c, experts=Experts(64, k, every=2))
    plan = f"dp={dp},ep={ep},zero=1,recompute={'on' if again else 'off'}"
    found = said(plan, config, rows, length, 2)
    tokens, out = k * rows // dp * length, ep - 1
    counts = 8 * 64 // ep * out
    size = 3 * ((4 + 2 * again) * tokens * c * 2 * out // ep + (1 + again) * counts)
    assert found["ep"] == (size, 3 * out * (5 + 3 * again))
    of_experts, copies = 3 * 64 // ep * (8 * c * c + 5 * c), dp // ep
    block = 6 * (4 * c * c + 8 * c) + 3 * (8 * c * c + 5 * c)
    shared = 64 * c + length * c + 2 * c + block + 3 * 64 * c
    sums = 2 * 2 * of_experts * (copies - 1) / copies
    assert found.get("edp+cp", (0, 0))[0] == pytest.approx(sums, rel=0.01)
    if dp < 4096:  # where shards are mostly padding
        assert found["dp+cp"][0] == pytest.approx(4 * shared * (dp - 1) / dp, rel=0.2)


def test_more_ranks_for_the_experts_hold_less_and_send_more():
    rows = lambda n: 1024
    near, far = (scaling.family(f"ep={ep} x dp", "GPT-2 XL, 64 experts", rows, (8, 64))[64] for ep in (8, 64))
    assert near.parts["ep"] < far.parts["ep"] and near.memory > far.memory
    assert scaling.a100s().device.memory >= near.memory > 2 * far.memory
    assert near.parts["edp+cp"] > 0 == far.parts.get("edp+cp", 0)
    assert sum(near.parts.values()) == pytest.approx(near.seconds)
    small = scaling.family("ep=64 x dp", "GPT-2 XL, 64 experts", rows, (8,))[8]
    assert "ep=64 does not divide the replicas dp=8" in small


def test_one_expert_a_token_computes_what_the_dense_model_does():
    config = GPT2Config(256, 64, 4, 4, 64, experts=Experts(8, 1, "switch"))
    cluster = find_cluster("a100x64").with_devices(8)
    fast = replace(cluster, device=replace(cluster.device, launch=0.0, copy=float("inf")))
    found = predict(Plan.parse("dp=8,ep=8"), config, 16, 64, fast, 2)
    dense = predict(Plan.parse("dp=8"), replace(config, experts=None), 16, 64, fast, 2)
    assert found.parts["compute"] == pytest.approx(dense.parts["compute"])
    two = replace(config, experts=Experts(8, 2))
    more = predict(Plan.parse("dp=8,ep=8"), two, 16, 64, fast, 2).parts["compute"]
    per_token = 4 * 3 * 16 * 64**2 / fast.device.rate
    assert more - found.parts["compute"] == pytest.approx(2 * 64 * per_token)


def test_no_backward_hides_the_sums_of_experts_gradients():
    slow = Cluster(4, Device(1e6), Network(Link(0, 1e6)))
    found = predict(Plan(dp=4, ep=2), MIXED, 8, 16, slow)
    assert found.parts["compute"] > 10 * found.parts["edp+cp"]
    assert found.parts["edp+cp"] == pytest.approx(found.sent["edp+cp"] / 1e6)


# --- copies of busy experts


CONFIG = replace(DENSE, experts=Experts(8, 2, balance=0.0, shared=1))
ROUTERS = {
    "deepseek": Experts(8, 2, "deepseek", balance=0.0),  # counts its load, too
    "room for half": Experts(8, 2, capacity=0.5, balance=0.0),
    "a batch with little room": Experts(8, 1, "switch", 1.0, group="batch", balance=0.0),
    "experts choose": Experts(8, 2, "expert_choice", balance=0.0),
}


def serial(config=CONFIG):
    """A mixture, tokens that look alike so that some experts are busy, a gradient; output and gradients of all."""
    torch.manual_seed(0)
    mixture = Mixture(config, 0).double()
    x, grad = (torch.randn(7, 11, 24, dtype=torch.float64) for _ in "xg")
    x = (x + 1).requires_grad_()
    y = mixture(x)
    y.backward(grad)
    right = {n: p.grad for n, p in mixture.named_parameters()} | {"x": x.grad}
    mixture.zero_grad()
    return mixture, x.detach(), grad, y.detach(), right


def with_bugs(rank, world_size, bugs, *given):
    with all_planted(*bugs):
        return copies.run(rank, world_size, *given)


def error(pool, room, *bugs, config=CONFIG) -> float:
    """The largest difference from the serial mixture of outputs and of all gradients that any rank holds."""
    mixture, x, grad, y, right = serial(config)
    found = pool.run(with_bugs, bugs, config, mixture, x, grad, room)
    off = [(torch.cat([ours for ours, *_ in found]) - y).abs().max()]
    for rank, (_, gradients, *_) in enumerate(found):
        mine = right | {"x": right["x"].tensor_split(len(found))[rank]}
        off += [(g - mine[n]).abs().max() for n, g in gradients.items()]
    return torch.stack(off).max().nan_to_num(math.inf).item()


def test_every_expert_has_a_place_and_none_two_on_a_rank():
    chance = random.Random(0)
    for _ in range(200):
        ranks, count = chance.randint(1, 5), chance.randint(1, 9)
        room = chance.randint(-(-count // ranks), count)
        load = [int(chance.paretovariate(1)) for _ in range(count)]
        held = copies.dealt(load, ranks, room)
        assert all(len(set(experts)) == len(experts) == room for experts in held)
        assert set().union(*held) == set(range(count))
    assert copies.dealt([60, 10, 10, 10, 10, 10, 5, 5], 4, 3) == [[0, 2, 1], [0, 3, 1], [0, 4, 6], [0, 5, 7]]


@pytest.mark.parametrize(
    "given, words",
    [
        (([3, 4], 0, 1), "ranks = 0 does not fit dealt"),
        (([3, 4], 2, 0), "room = 0 does not fit dealt"),
        (([], 2, 1), r"load = \[\] does not fit dealt"),
    ],
)
def test_experts_for_no_ranks_are_refused_in_a_sentence(given, words):
    with pytest.raises(ValueError, match=words):
        copies.dealt(*given)


@pytest.mark.parametrize("room", [0, 2, 3, 4])
def test_output_and_gradients_are_those_of_the_mixture_without_copies(pools, room):
    assert error(pools[4], room) < 1e-12


@pytest.mark.parametrize("router", ROUTERS)
def test_copies_change_nothing_whoever_chooses_and_however_little_room_there_is(pools, router):
    config = replace(CONFIG, experts=ROUTERS[router])
    assert max(error(pools[2], room, config=config) for room in (0, 5)) < 1e-12


def test_experts_that_ranks_cannot_share_are_refused_in_a_sentence(pools):
    words = r"8 experts cannot be shared out over ep=3 ranks .8 % 3 = 2.. Use ep=1, or 9"
    with pytest.raises(RankFailed, match=words):
        pools[3].run(with_bugs, (), CONFIG, *serial()[:3], 3)


def test_copies_balance_the_ranks_and_what_travels_is_as_computed(pools):
    mixture, x, grad, *_ = serial()
    before, after = (pools[4].run(with_bugs, (), CONFIG, mixture, x, grad, room) for room in (0, 3))
    load = before[0][2]
    held = copies.dealt(load, 4, 3)
    assert load == after[0][2] and sum(load) == 7 * 11 * 2
    most = [max(rows for *_, rows, _ in found) / (sum(load) / 4) for found in (before, after)]
    assert most[0] > 1.5 and most[1] < 1.15
    weights = sum(p.numel() for p in mixture.experts["0"].parameters()) * 8
    owners = [[r for r in range(4) if e in held[r]] for e in range(8)]
    for rank, (*_, sent) in enumerate(after):
        assert sent[0] == weights * sum(len({*owners[e]} - {rank}) for e in (2 * rank, 2 * rank + 1))
        shared = sum(2 * (len(owners[e]) - 1) / len(owners[e]) for e in held[rank])
        assert sent[2] == pytest.approx(weights * shared, abs=8 * 8 * 8)  # stretches of a ring may be uneven
    asked = [mixture.route(part)[2].flatten().bincount(minlength=8).tolist() for part in x.tensor_split(4)]
    for places, found in (([[2 * r, 2 * r + 1] for r in range(4)], before), (held, after)):
        rows = [[0] * 4 for _ in range(4)]
        for rank in range(4):
            for e, count in enumerate(asked[rank]):
                homes = [r for r in range(4) if e in places[r]]
                for i, home in enumerate(homes[-rank % len(homes) :] + homes[: -rank % len(homes)]):
                    rows[rank][home] += count // len(homes) + (i < count % len(homes))
        assert [sum(column) for column in zip(*rows, strict=True)] == [computed for *_, computed, _ in found]
        sizes = expert.bytes_sent(rows, 24, 4 * len(places[0]), 8)
        assert [size for size, _ in sizes] == [sent[1] for *_, sent in found]


def in_the_order_of_places(right):
    return lambda self, rows, way: super(copies.CopiedExperts, self).back(rows, way[0])


def to_the_first_place(right):
    return lambda self, e, n: torch.full((n,), self.places[(e + 1) % 8][0])


def nothing(right):
    return lambda *given: None


BUGS = {
    "gradients of copies are not summed": (copies, "sum_copies", nothing),
    "a copy keeps the weights of another expert": (copies, "vector_to_parameters", nothing),
    "rows come back in the order of places": (copies.CopiedExperts, "back", in_the_order_of_places),
    "every row goes to all copies' first place": (copies.CopiedExperts, "shares", to_the_first_place),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(pools, bug):
    assert not error(pools[4], 3, BUGS[bug]) < 1e-6
