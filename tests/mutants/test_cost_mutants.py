"""Bugs in what plans cost and in what is simulated at scale: seen by formulas, by a clock, by bytes counted before."""

from dataclasses import replace
from functools import partial

import pytest
import test_planner_costs as costs
import test_scale as scaled
from planting import bugs, is_killed

from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.zero.costs import bytes_held, zero_bytes_sent
from gpt2lab.plan import Plan
from gpt2lab.planner import choose, cost, failures, kept, memory, scale, seconds, sends
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.memory import of_rank
from gpt2lab.planner.moments import Walk
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.seconds import RankOnCluster
from gpt2lab.planner.sends import AxisTraffic, by_axis
from gpt2lab.planner.share import RankShare

pytestmark = pytest.mark.mutant
CONFIG = GPT2Config(vocab_size=300, n_positions=32, n_layer=4, n_head=4, n_embd=32)
WIDE = replace(CONFIG, vocab_size=9000)


def share(text, config=CONFIG, **place):
    return RankShare(Plan.parse(text), config, 8, 32, **place)


def bytes_sent():
    """ZeRO-3's formula; 1F1B's b T C numbers, m of each; the embedding's two ends, each of which sends half twice."""
    sent = lambda text, **place: by_axis(sends.sends(share(text, **place)))
    sizes = {key[0]: n for key, n in share("dp=4").sizes.items()}
    assert sent("dp=4,zero=3,micro=2")["dp+cp"][0] == zero_bytes_sent(sizes, 3, 4, 2)
    assert sent("pp=4,micro=4", pp=1)["pp"] == (2 * 8 * 32 * 32 * 4, 8)
    assert sent("pp=2,micro=2")["tie"] == (300 * 32 * 4, 2)


def bytes_of_rank():
    """ZeRO-1's formula; probabilities, their gradient and that of the loss; GPipe keeps more than twice as much.

    While a micro-batch's gradient of the embedding is summed (ZeRO-3), the next one has the embedding whole: beside
    shards of weights, gradients and moments.
    """
    found, wte = of_rank(share("dp=4,zero=1")), 4 * 9000 * CONFIG.n_embd
    right = bytes_held({key[0]: n for key, n in share("dp=4").sizes.items()}, 1, 4, 0)
    assert [found.parts[part] for part in ("weights", "optimizer")] == [right["weights"], right["optimizer"]]
    assert of_rank(share("serial", WIDE)).parts["logits"] == 3 * 4 * 8 * 32 * 9000
    assert of_rank(share("pp=2,dp=2,micro=4,zero=3", WIDE)).total >= wte * (0.5 + 1 + 0.5 + 1.5 + 1)
    kept_by = lambda schedule: of_rank(share(f"pp=4,micro=8,schedule={schedule}", pp=1)).parts["activations"]
    assert kept_by("gpipe") > 2 * kept_by("1f1b")


def cards():
    """A sum of S bytes over 16 ranks sends 2 (15 / 16) S: with two cards of 1e6 bytes a second in each of 8 machines
    over both, with one rank in each of 16 machines over one. Groups of 6 in nodes of 8: ranks 6 to 11 lie in two."""
    machine = lambda text, *network: RankOnCluster(Cluster(32, Device(1), Network(*network)), share(text))
    for text, used in (("dp=16", 2), ("dp=16,tp=2", 1)):
        found = machine(text, Link(0, 1e6), Link(0, 2e6), 2)
        taken = found.travel([AxisTraffic("dp+cp", "all_reduce", 2 * 15 * 1000, 30)])["dp+cp"]
        assert taken == pytest.approx(30e3 / (used * 1e6))
    assert machine("dp=4,tp=6", Link(0, 1), Link(0, 9), 8).crosses("tp")


def front():
    every = parallelize(CONFIG, costs.FREE.with_devices(2), Goal(8, 32)).front
    assert all(a.prediction.memory > b.prediction.memory for a, b in zip(every, every[1:], strict=False))


RING, TREE = (
    (scaled.test_on_equal_links_times_are_those_of_the_closed_forms, name, 16) for name in ("ring", "tree")
)
SPARE = scaled.test_with_a_spare_at_once_goodput_is_the_expected_one
BUGS = {
    "stage 3 gathers once a step": (sends._zero, "+= gathered[key]", "+= 1", bytes_sent),
    "stage 3 sums once a step": (sends._zero, "+= reduced[key]", "+= 1", bytes_sent),
    "no message is sent back": (sends._to_stages, "[message] * back", "[]", bytes_sent),
    "both ends of the embedding are one": (sends.finish_sends, "if elements:", "if False:", bytes_sent),
    "every rank steps all weights":
        (Walk.__init__, 'owned(share, "all")', "sum(p.elements for p in share.parameters)", bytes_of_rank),
    "the loss has no gradient of its own": (Walk._loss, "(1 if self.plan.tp > 1 else 2)", "1", bytes_of_rank),
    "logits hold nothing": (kept.kept_by_stage, "= logits_bytes(share, rows, tokens)", "= 0", bytes_of_rank),
    "a sum under way holds nothing": (Walk.start_sum, "= size *", "= 0 *", bytes_of_rank),
    "gpipe keeps as little as 1F1B":
        (memory._order, "order_of(plan,", 'order_of(replace(plan, schedule="1f1b"),', bytes_of_rank),
    "messages take no time":
        (cost.pipeline_seconds, "hop * (home", "0 * (home",
         partial(costs.test_a_pipeline_takes_as_long_as_its_clock_says, "1f1b")),
    "replicas do all rows":
        (RankShare.micro_rows, "split_sizes(self.rows, self.plan.dp)[self.dp]", "self.rows",
         costs.test_the_parts_of_a_prediction_add_up_and_ideal_ranks_share_the_work),
    "recomputation is free":
        (RankShare.again, "self.plan.recompute", "False",
         costs.test_recomputation_shows_as_a_third_of_the_blocks_work),
    "every rank has a core":
        (RankOnCluster.crowd, "if self.cluster.cores", "if False",
         costs.test_more_ranks_than_cores_share_them),
    "tensor ranks have the slow link":
        (RankOnCluster.link, "if within", "if False", costs.test_tensor_ranks_get_the_link_inside_a_node),
    "a ring has one card of each machine":
        (seconds.groups_on_nodes, "min(min(g.values()) for g in split)", "1", cards),
    "a group of one rank in a machine has all its cards":
        (seconds.groups_on_nodes, "min(min(g.values()) for g in split)", "8", cards),
    "groups never straddle machines":
        (seconds.groups_on_nodes, "distance * i) // node", "distance * i) // block", cards),
    "the front has whatever is fast": (choose.pareto, "if one.prediction.memory < least:", "if True:", front),
    "links have no latency": (scale.Fabric.links, "return latency,", "return 0.0,", TREE),
    "messages have their links alone":
        (scale.Fabric.links, "bandwidth / busy", "bandwidth",
         scaled.test_what_shares_a_card_or_an_uplink_is_slower),
    "a machine begins a rank too early":
        (scale.Fabric.levels, "where(source // machine == target // machine",
         "where((source + 1) // machine == (target + 1) // machine",
         scaled.test_levels_are_machine_rail_and_spine),
    "one part more is larger":
        (scale.equal_parts, "< size % parts", "<= size % parts",
         (scaled.test_counts_are_those_of_the_formulas, "ring", 5)),
    "a ring ends a step too early": (scale._half_ring, "range(n - 1)", "range(n - 2)", RING),
    "a failure loses nothing": (failures._kept, "if lost", "if False", SPARE),
    "a failure loses an interval too much":
        (failures._kept, "return whole *", "return max(0, whole - lost) *", SPARE),
    "Daly's interval is longer by a save":
        (failures.daly_interval, "- save", "+ save",
         scaled.test_dalys_interval_is_youngs_where_failures_are_rare_and_shorter_by_a_save_at_least_where_not),
}  # fmt: skip


@bugs(BUGS)
def test_a_bug_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"
