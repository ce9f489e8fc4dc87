"""Experts on other ranks: what travels, that nothing is lost, which groups give the serial result, what is refused."""

from dataclasses import replace

import pytest
import torch
from planting import all_planted

from gpt2lab.experts.mixture import Experts, Mixture, mixtures
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.model import GPT2
from gpt2lab.parallel import expert
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, EXPERTS, example_batch, example_weights
from gpt2lab.verify import verify

FREE = replace(EXPERTS.experts, capacity=None)


@pytest.fixture
def four(pools):
    return pools[4]


def mesh_axes(rank, world_size):
    mesh = Mesh(dp=4, ep=2)
    return mesh["ep"].ranks, mesh["edp"].ranks, mesh["edp", "cp"].ranks, mesh["dp"].ranks


def test_neighbours_of_the_data_axis_share_the_experts(four):
    assert four.run(mesh_axes) == [
        ((0, 1), (0, 2), (0, 2), (0, 1, 2, 3)),
        ((0, 1), (1, 3), (1, 3), (0, 1, 2, 3)),
        ((2, 3), (0, 2), (0, 2), (0, 1, 2, 3)),
        ((2, 3), (1, 3), (1, 3), (0, 1, 2, 3)),
    ]


def a_step(rank, world_size, plan, config):
    """What one step sends over the expert axis, and for each mixture (E,) rows sent from here and computed here."""
    seen, trainer = [], trainer_by(plan, config)
    trainer.parallel.load(example_weights(config))

    def noted(right):
        def grouped(self, rows, counts):
            assert sum(counts) == len(rows)
            seen.append((self.kept.tolist(), counts.tolist()))
            return right(self, rows, counts)

        return grouped

    def combined(right):
        """As many rows come home as were sent."""

        def back(self, rows, way):
            came = right(self, rows, way)
            assert len(came) == sum(seen[-1][0]) and len(rows) == sum(seen[-1][1])
            return came

        return back

    comm.clear_log()
    with all_planted((Mixture, "grouped", noted), (expert.SpreadExperts, "back", combined)):
        trainer.gradients(example_batch(config, 7, 11))
    calls = [e for e in comm.log if e.axis.startswith("ep")]
    return sum(e.bytes for e in calls), sum(e.messages for e in calls), seen, sorted(trainer.parallel.specs)


def leaving_the_machine(rank, world_size, plan, config):
    """What `a_step` finds, and (bytes, messages) of the exchanges that went to another machine of two ranks."""
    found = a_step(rank, world_size, plan, config)
    calls = [e for e in comm.log if e.axis.startswith("ep")]
    away = [size for e in calls for target, size in e.targets if target // 2 != rank // 2]
    return found[2], sum(away), len(away)


@pytest.mark.parametrize("plan, passes", [("dp=4,ep=4", 1), ("dp=4,ep=4,recompute=on", 2)])
def test_bytes_and_messages_are_those_of_the_formula_and_no_row_is_lost(four, plan, passes):
    config = replace(CONFIG, experts=FREE)
    found = four.run(a_step, plan, config)
    sizes, messages = [0] * 4, [0] * 4
    for m in range(2):  # two mixtures
        sent = [seen[m][0] for _, _, seen, _ in found]  # rank, expert
        computed = [n for _, _, seen, _ in found for n in seen[m][1]]
        assert [sum(column) for column in zip(*sent, strict=True)] == computed
        assert sum(computed) == 7 * 11 * 2
        rows = [[sum(s[2 * j : 2 * j + 2]) for j in range(4)] for s in sent]
        for i, (size, count) in enumerate(expert.bytes_sent(rows, 24, 8, 8, passes)):
            sizes[i], messages[i] = sizes[i] + size, messages[i] + count
    assert sizes == [size for size, *_ in found] and messages == [count for _, count, *_ in found]


def test_a_hierarchical_exchange_sends_the_same_bytes_in_half_of_the_messages_between_machines(four):
    """Counts, rows, results and two of gradients: from each rank to both of the other machine, or to one alone."""
    config = replace(
        CONFIG, experts=replace(FREE, router="expert_choice")
    )  # whose experts get some of every row
    straight, placed = (
        four.run(leaving_the_machine, plan, config) for plan in ("dp=4,ep=4", "dp=4,ep=4,node=2")
    )
    assert [seen for seen, *_ in straight] == [seen for seen, *_ in placed]  # kept here, computed here
    width, element, mixtures_here = 24, 8, 2
    rows = [[[sum(s[m][0][2 * j : 2 * j + 2]) for j in range(4)] for s, *_ in straight] for m in range(2)]
    assert min(n for m in rows for i in m for n in i) > 0  # so no message is left out as empty
    assert [count for *_, count in straight] == [mixtures_here * 2 * 5] * 4
    assert [count for *_, count in placed] == [mixtures_here * 5] * 4
    there = sum(rows[m][i][j] for m in range(2) for i in range(4) for j in range(4) if i // 2 != j // 2)
    counts = mixtures_here * 4 * 4 * 8  # each rank tells the other machine of its four experts
    for found in (straight, placed):
        assert sum(size for _, size, _ in found) == 4 * there * width * element + counts


def test_a_hierarchical_exchange_gives_the_same_numbers_to_the_last_bit(four):
    for config in (EXPERTS, replace(EXPERTS, experts=replace(FREE, router="deepseek"))):
        straight, placed = (four.run(gradients, plan, config) for plan in ("dp=4,ep=4", "dp=4,ep=4,node=2"))
        for (loss, norm, grads), (other, same, others) in zip(straight, placed, strict=True):
            assert (loss, norm) == (other, same)
            assert all(torch.equal(g, others[n]) for n, g in grads.items())


def in_order(rank, world_size, plan):
    """What one step does, in order, with the only mixture of a model: exchanges of rows, and the shared expert."""
    seen = []
    noted = lambda word: lambda right: lambda *given: (right(*given), seen.append(word))[0]
    config = replace(CONFIG, n_layer=1, experts=replace(FREE, every=1, shared=1))
    trainer = trainer_by(plan, config)
    shared = mixtures(trainer.parallel.model)[0].shared
    shared.register_forward_hook(lambda *_: seen.append("shared"))
    shared.register_full_backward_hook(lambda *_: seen.append("shared"))
    exchange = expert.RowExchange
    with all_planted(
        (exchange, "start", noted("begin")),
        (exchange, "wait", noted("end")),
        (Mixture, "grouped", noted("experts")),
    ):
        trainer.gradients(example_batch(config, 7, 11))
    return seen


def test_the_shared_expert_computes_while_rows_travel_there_and_their_gradients_back(four):
    forward = ["begin", "shared", "end", "experts", "begin", "end"]
    assert four.run(in_order, "dp=4,ep=4") == [forward + ["begin", "end", "begin", "shared", "end"]] * 4
    hop = ["begin", "end"]  # within the machine; the slow hop, between machines, is the one that overlaps
    placed = [*hop, *forward, *hop, *hop, "begin", "end", "begin", "shared", "end", *hop]
    assert four.run(in_order, "dp=4,ep=4,node=2") == [placed] * 4


def test_a_rank_holds_its_experts_alone_under_their_own_names(four):
    found = four.run(a_step, "dp=4,ep=2", EXPERTS)
    for rank, (_, _, _, names) in enumerate(found):
        here = sorted({int(n.split(".")[4]) for n in names if ".experts." in n})
        assert here == [[0, 1, 2, 3], [4, 5, 6, 7]][rank % 2]


def test_groups_decide_whether_a_plan_with_drops_equals_the_serial_run(four):
    for group, same in (("row", True), ("batch", True), ("rank", False)):
        config = replace(EXPERTS, experts=replace(FREE, group=group, capacity=1.0))
        report = verify("dp=4,ep=2", config, ranks=four)
        assert report.ok is same, report


def gradients(rank, world_size, plan, config, order=None, numbers=None):
    """Loss, norm and gradients of a step; `order` deals the rows to other ranks, `numbers` the experts."""
    trainer = trainer_by(plan, config)
    trainer.parallel.load(renumbered(example_weights(config), numbers or range(8)))
    batch = example_batch(config, 7, 11)
    if order is not None:
        batch = replace(batch, **{n: getattr(batch, n)[order] for n in ("tokens", "targets", "samples")})
    return *trainer.gradients(batch), trainer.parallel.gradients()


def equal(found, right):
    """Loss, norm and the gradients that a rank holds are those of another run, up to rounding."""
    (loss, norm, grads), (other, same, others) = found, right
    assert abs(loss - other) < 1e-12 and abs(norm - same) < 1e-12 * norm
    assert all((g - others[n]).abs().max() <= 1e-12 * others[n].abs().max() for n, g in grads.items())


def test_groups_by_rank_equal_a_serial_model_with_the_same_groups(four):
    """Four micro-batches on one rank are the same groups as the rows of four ranks."""
    config = replace(EXPERTS, experts=replace(FREE, group="rank", capacity=1.0))
    spread, serial = four.run(gradients, "dp=4,ep=2", config), gradients(0, 1, "micro=4", config)
    for found in spread:
        equal(found, serial)


def test_whichever_rank_holds_a_row_the_result_is_the_same(four):
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    straight, mixed = (four.run(gradients, "dp=4,ep=4", EXPERTS, rows) for rows in (None, order))
    for found, right in zip(mixed, straight, strict=True):
        equal(found, right)


@pytest.mark.parametrize("group", ["row", "batch"])
def test_a_replica_without_rows_takes_part(four, group):
    config, two = replace(EXPERTS, experts=replace(EXPERTS.experts, group=group)), torch.tensor([0, 3])
    serial = gradients(0, 1, "serial", config, two)
    for found in four.run(gradients, "dp=4,ep=2", config, two):
        equal(found, serial)


def renumbered(weights, numbers):
    """The same model with expert e under the number numbers[e]."""
    found = {}
    for name, value in weights.items():
        head, is_expert, tail = name.partition(".experts.")
        if is_expert:
            number, _, rest = tail.partition(".")
            name = f"{head}.experts.{numbers[int(number)]}.{rest}"
        if ".router." in name:
            value = value[torch.tensor([list(numbers).index(e) for e in range(8)])]
        found[name] = value
    return found


def test_whichever_rank_holds_an_expert_the_result_is_the_same(four):
    numbers = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    straight, mixed = (four.run(gradients, "dp=4,ep=4", EXPERTS, None, n) for n in (None, numbers))
    whole, others = ({n: g for *_, grads in found for n, g in grads.items()} for found in (straight, mixed))
    whole = renumbered(whole, numbers)
    assert whole.keys() == others.keys() and len([n for n in whole if ".experts." in n]) == 2 * 8 * 4
    equal((*straight[0][:2], whole), (*mixed[0][:2], others))


def test_the_mixtures_of_a_model_are_every_other_layer():
    assert [m.layer for m in mixtures(GPT2(EXPERTS))] == [1, 3] and Experts(every=3).at(2)
