"""Bugs in what plans cost: each is noticed by a closed form, by the clock of schedules, or by bytes counted before."""

from collections import Counter
from dataclasses import replace

import pytest
from planting import planted

from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.zero.costs import bytes_held, zero_bytes_sent
from gpt2lab.plan import Plan
from gpt2lab.planner import choose, cost, kept, memory, moments, pipelines, seconds, sends, share
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.memory import of_rank
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.sends import AxisTraffic, by_axis
from gpt2lab.planner.share import RankShare
from gpt2lab.schedules import Cost, make, simulate

pytestmark = pytest.mark.mutant
CONFIG = GPT2Config(vocab_size=300, n_positions=32, n_layer=4, n_head=4, n_embd=32)
FREE = Cluster(8, Device(1e9), Network(Link(0, float("inf"))))


def whole(text, **more):
    return RankShare(Plan.parse(text), CONFIG, 8, 32, **more)


def zero_bytes_are_wrong():
    found = by_axis(sends.sends(whole("dp=4,zero=3,micro=2")))["dp+cp"][0]
    sizes = {key[0]: n for key, n in whole("dp=4").sizes.items()}
    return found != zero_bytes_sent(sizes, 3, 4, 2)


def messages_are_wrong():
    """1F1B sends an activation and a gradient over each border: b T C numbers, m of each."""
    found = by_axis(sends.sends(whole("pp=4,micro=4", pp=1)))["pp"]
    return found != (2 * 8 * 32 * 32 * 4, 8)


def tied_is_wrong():
    found = by_axis(sends.sends(whole("pp=2,micro=2"))).get("tie")
    return found != (300 * 32 * 4, 2)  # two ranks: each sends half of it twice


def memory_is_wrong():
    found = of_rank(whole("dp=4,zero=1"))
    right = bytes_held({key[0]: n for key, n in whole("dp=4").sizes.items()}, 1, 4, 0)
    return found.weights != right["weights"] or found.optimizer != right["optimizer"]


def logits_are_wrong():
    """The loss holds the logits' probabilities, their gradient and that of the loss."""
    wide = RankShare(Plan(), replace(CONFIG, vocab_size=9000), 8, 32)
    return of_rank(wide).logits != 3 * 4 * 8 * 32 * 9000


def sums_under_way_hold_nothing():
    """While a micro-batch's gradient of the embedding is summed, the next one has the embedding whole."""
    share = RankShare(Plan.parse("pp=2,dp=2,micro=4,zero=3"), replace(CONFIG, vocab_size=9000), 8, 32)
    wte = 4 * 9000 * CONFIG.n_embd
    return of_rank(share).total < wte * (
        0.5 + 1 + 0.5 + 1.5 + 1
    )  # shards of weights, moments, gradients; sum; whole


def gpipe_holds_no_more_than_1f1b():
    many = lambda schedule: of_rank(whole(f"pp=4,micro=8,schedule={schedule}", pp=1)).activations
    return many("gpipe") <= 2 * many("1f1b")


def clock_is_wrong():
    times = [1.0, 2.0, 1.5, 1.0]
    right = simulate(make("1f1b", 4, 7), Cost(times, backward=times, hop=0.25)).makespan
    return abs(pipelines.time_of_1f1b(times, times, 0.25, 7) - right) > 1e-9


def parts_do_not_add_up():
    found = cost.predict(Plan(dp=2, zero=1), CONFIG, 8, 32, FREE)
    alone = cost.predict(Plan(), CONFIG, 8, 32, FREE)
    return abs(found.parts["compute"] * 2 / alone.parts["compute"] - 1) > 0.01


def recompute_is_free():
    found = cost.predict(Plan(recompute=True), replace(CONFIG, vocab_size=2), 8, 32, FREE)
    return not 0.3 < found.parts.get("recompute", 0) / found.parts["compute"] < 0.36


def cores_are_free():
    two = replace(FREE, cores=2, network=Network(Link(0, float("inf")), node=8))
    fast, slow = (cost.predict(Plan(dp=4), CONFIG, 8, 32, c).seconds for c in (FREE, two))
    return abs(slow / fast - 2) > 1e-6


def uplinks_are_free():
    one = Cluster(8, Device(1e15), Network(Link(0, 1e6), Link(0, 1e12), 4), uplinks=1)
    found = (
        cost.predict(Plan(dp=2, tp=4), CONFIG, 8, 32, c).parts["dp+cp"]
        for c in (one, replace(one, uplinks=0))
    )
    return abs(next(found) / next(found) - 4) > 1e-6


def cards_are_wrong():
    """A sum of S bytes over 16 ranks sends 2 (15 / 16) S: with two cards of 1e6 bytes a second in each of 8 machines

    over both, with one rank in each of 16 machines over one.
    """
    network = Network(Link(0, 1e6), Link(0, 2e6), 2)
    for plan, axis, cards in (("dp=16", "dp+cp", 2), ("dp=16,tp=2", "dp+cp", 1)):
        machine = seconds.RankOnCluster(Cluster(32, Device(1), network), whole(plan))
        found = machine.travel([AxisTraffic(axis, "all_reduce", 2 * 15 * 1000, 30)])[axis]
        if abs(found - 30e3 / (cards * 1e6)) > 1e-9:
            return True
    return False


def straddling_is_not_seen():
    """Groups of 6 in nodes of 8: ranks 6 to 11 lie in two of them."""
    machine = seconds.RankOnCluster(
        Cluster(24, Device(1), Network(Link(0, 1), Link(0, 9), 8)), whole("dp=4,tp=6")
    )
    return not machine.crosses("tp")


def the_front_is_beaten():
    every = parallelize(CONFIG, FREE.with_devices(2), Goal(8, 32)).front
    return any(a.prediction.memory <= b.prediction.memory for a, b in zip(every, every[1:], strict=False))


def a_limit_is_exceeded():
    limit = 700_000
    return parallelize(CONFIG, FREE.with_devices(2), Goal(8, 32, memory=limit)).prediction.memory > limit


def nothing(right):
    return lambda *args, **more: 0


def one_gather(right):
    return lambda s: Counter(dict.fromkeys(s.sizes, 1))


BUGS = {
    "stage 3 gathers once a step": (sends, "gather_counts", one_gather, zero_bytes_are_wrong),
    "stage 3 sums once a step": (sends, "reduce_counts", one_gather, zero_bytes_are_wrong),
    "no message is sent back": (
        sends,
        "_to_stages",
        lambda right: lambda *args: (right(*args)[0], []),
        messages_are_wrong,
    ),
    "both ends of the embedding are one": (sends, "tied", lambda right: lambda s: (0, 0), tied_is_wrong),
    "every rank steps all weights": (
        moments,
        "owned",
        lambda right: lambda s, wanted: sum(p.elements for p in s.parameters),
        memory_is_wrong,
    ),
    "the loss has no gradient of its own": (
        moments,
        "logits_bytes",
        lambda right: lambda *args: right(*args) // 2,
        logits_are_wrong,
    ),
    "logits have half their bytes": (kept, "logits_bytes", nothing, logits_are_wrong),
    "a sum under way holds nothing": (moments.Walk, "start_sum", nothing, sums_under_way_hold_nothing),
    "gpipe keeps as little as 1F1B": (
        memory,
        "order_of",
        lambda right: lambda plan, micro: right(replace(plan, schedule="1f1b"), micro),
        gpipe_holds_no_more_than_1f1b,
    ),
    "messages take no time": (
        pipelines,
        "time_of_1f1b",
        lambda right: lambda f, b, hop, m: right(f, b, 0.0, m),
        clock_is_wrong,
    ),
    "replicas do all rows": (
        share,
        "split_sizes",
        lambda right: lambda total, parts: right(total, 1) * parts,
        parts_do_not_add_up,
    ),
    "recomputation is free": (
        share.RankShare,
        "again",
        lambda right: property(lambda self: (0, 0)),
        recompute_is_free,
    ),
    "every rank has a core": (seconds.RankOnCluster, "crowd", lambda right: 1.0, cores_are_free),
    "rings do not share an uplink": (
        seconds.RankOnCluster,
        "link",
        lambda right: lambda self, axis: self.cluster.network.between,
        uplinks_are_free,
    ),
    "a ring has one card of each machine": (
        seconds,
        "groups_on_nodes",
        lambda right: lambda *args: replace(right(*args), fewest=1),
        cards_are_wrong,
    ),
    "a group of one rank in a machine has all its cards": (
        seconds,
        "groups_on_nodes",
        lambda right: lambda *args: replace(right(*args), fewest=8),
        cards_are_wrong,
    ),
    "groups never straddle machines": (
        seconds,
        "groups_on_nodes",
        lambda right: lambda ranks, distance, node, world: right(ranks, distance, ranks * distance, world),
        straddling_is_not_seen,
    ),
    "the front has whatever is fast": (
        choose,
        "pareto",
        lambda right: lambda found: sorted(found, key=lambda f: f.prediction.seconds),
        the_front_is_beaten,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_mutant_is_killed(name):
    where, attribute, make_wrong, is_wrong = BUGS[name]
    assert not is_wrong(), "the right code fails this check too"
    sends.gradient_sends.cache_clear()
    with planted(where, attribute, make_wrong):
        assert is_wrong()
    sends.gradient_sends.cache_clear()


def test_a_limit_is_kept():
    assert not a_limit_is_exceeded()
