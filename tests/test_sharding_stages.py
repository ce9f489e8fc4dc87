"""Chains cut by Tofu and stages on unlike meshes, on live ranks: equal to the serial run, bytes as predicted."""

import itertools
import random
from functools import cache
from itertools import permutations
from math import prod

import pytest
import torch
from sharding_cases import CONFIG, LENGTH, ROWS, check_program, furthest, graph, layouts, program

from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.planner.alpa import clustered
from gpt2lab.planner.cuts import Assignment, ChainProblem, gpt2_cuts
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.search import PLANNERS, stages_of
from gpt2lab.processes.launch import RankFailed
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.sharding.crossing import Crossing, Side
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.marks import batch, megatron
from gpt2lab.sharding.run_staged import StageRunner
from gpt2lab.sharding.staged import CutStage, Staged
from gpt2lab.sharding.tofu import LinkChain, bytes_of_all

LINE, SQUARE = {"x": 2}, {"x": 2, "y": 2}


@cache
def chain(rows=7, length=11, layers=2, width=24, vocabulary=37):
    """The chain of a GPT-2 of these sizes."""
    config = GPT2Config(vocab_size=vocabulary, n_positions=16, n_layer=layers, n_head=4, n_embd=width)
    return LinkChain(captured_gpt2(config, rows, length))


def test_the_graph_becomes_a_link_for_each_part_of_the_model():
    dims = [sorted({d for of in link.names.values() for d in of}) for link in chain().links]
    assert len(dims) == 2 + 2 * CONFIG.n_layer
    own = [set(d) - {"batch", "seq", "embd", "qkv", "width", "positions"} for d in dims]
    assert own == [{"vocab"}, *[{"heads"}, {"ff"}] * CONFIG.n_layer, {"vocab"}]
    operators = {n for link in chain().links for n, node in link.nodes.items() if node.op != "input"}
    assert operators == {
        n for n, node in chain().graph.nodes.items() if node.op != "input" and "beyond" not in n
    }


SIZES = [(7, 11, 1, 24, 37), (2, 8, 1, 8, 37), (8, 8, 1, 8, 200), (3, 5, 1, 12, 9)]


@pytest.mark.rotates
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_dynamic_program_equals_brute_force(sizes):
    one = chain(*sizes)
    ways = [one.choices(n, (), LINE) for n in range(one.count)]
    best = min(one.cost(list(way), LINE) for way in itertools.product(*ways))
    assert one.cost(one.halve([()] * one.count, LINE), LINE) == best


@pytest.mark.rotates
def test_the_second_halving_also_equals_brute_force():
    one = chain(*SIZES[1])
    first, second = one.recursive("xy")
    ways = [one.choices(n, first[n], SQUARE) for n in range(one.count)]
    assert one.cost(second, SQUARE) == min(one.cost(list(w), SQUARE) for w in itertools.product(*ways))


@pytest.mark.rotates
def test_many_tokens_cut_the_batch_few_cut_the_weights():
    """Lesson 06's crossover, B T = 4 C for an MLP, found by the program: here 28 and 77 tokens, and 24 features."""
    mlps = lambda rows, length: {chain(rows, length).recursive("x")[0][n] for n in (2, 4)}
    assert mlps(7, 16) == {("batch",)} and mlps(7, 4) == {("ff",)}


@pytest.mark.rotates
def test_a_large_vocabulary_is_cut_where_the_blocks_are_not():
    first = chain(8, 8, 1, 8, 370).recursive("x")[0]
    assert first == [("vocab",), ("batch",), ("batch",), ("vocab",)]


@pytest.mark.rotates
def test_the_cost_of_a_chain_is_what_the_whole_program_sends():
    one = chain(2, 11)
    (choices,) = one.recursive("x")
    assert {c for (c,) in choices} == {"vocab", "heads", "ff"}
    assert bytes_of_all(one.program(choices, LINE)) == one.cost(choices, LINE)
    one = chain(7, 16)
    (choices,) = one.recursive("x")
    assert set(choices) == {("batch",)}
    assert bytes_of_all(one.program(choices, LINE)) == one.cost(choices, LINE)


@pytest.mark.rotates
def test_the_price_of_a_mixed_chain_is_above_what_its_program_sends_and_hides_a_better_one():
    one, batch_only = chain(), [("batch",)] * 6
    mixed = [("ff",) if n in (2, 4) else ("batch",) for n in range(6)]
    assert one.recursive("x")[0] == batch_only
    price, sent = one.cost(mixed, LINE), bytes_of_all(one.program(mixed, LINE))
    least = bytes_of_all(one.program(batch_only, LINE))
    assert sent < least == one.cost(batch_only, LINE) < price


def test_the_cut_that_is_found_for_four_ranks_runs_and_sends_less_than_known_strategies(pools):
    one = chain()
    choices = one.recursive("xy")[-1]
    found = one.program(choices, SQUARE)
    sent = sum(size for _, size, _, _ in check_program(pools, found))
    assert sent == bytes_of_all(found) == one.cost(choices, SQUARE)
    others = {
        "batch over both": ({"tokens": "batch:x, batch:y"}, SQUARE),
        "Megatron over four": (megatron("x"), {"x": 4}),
        "Megatron over both": (
            {
                "wte.weight": "vocab:x",
                "h.*.attn.c_attn.weight": "heads:x, heads:y",
                "h.*.mlp.c_fc.weight": "ff:x, ff:y",
            },
            SQUARE,
        ),
        "batch and Megatron": (batch("x") | megatron("y"), SQUARE),
    }
    assert sent <= min(bytes_of_all(program(marks, mesh, graph())) for marks, mesh in others.values())


# --- stages on meshes of unlike shape, cut in unlike ways


@cache
def batches(micros):
    whole = example_batch(CONFIG, ROWS * micros, LENGTH)
    pairs = zip(whole.tokens.split(ROWS), whole.targets.split(ROWS), strict=True)
    return [{"tokens": t, "targets": g} for t, g in pairs]


@cache
def serial(micros):
    """The summed loss and every gradient of plain PyTorch."""
    model = GPT2(CONFIG).double()
    model.load_state_dict(example_weights(CONFIG))
    loss = sum(model.loss(model(b["tokens"]), b["targets"]) for b in batches(micros))
    loss.backward()
    return {"loss": loss.detach()} | {f"grad {n}": p.grad for n, p in model.named_parameters()}


def run_stages(rank, world_size, staged, weights, given, want):
    """(largest relative error, names of results, bytes sent, messages sent) of one rank."""
    runner = StageRunner(staged)
    comm.clear_log()
    found = runner.step(weights, given)
    sent = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    return furthest(runner.program, runner.axes, found, want), set(found), *sent


def check_staged(pools, staged, micros):
    ranks = sum(len(stage.ranks) for stage in staged.stages)
    found = pools[ranks].run(run_stages, staged, example_weights(CONFIG), batches(micros), serial(micros))
    for rank, (error, _, size, messages) in enumerate(found):
        assert error <= 1e-10
        assert (size, messages) == staged.cost(rank, micros)
    assert set.union(*(names for _, names, _, _ in found)) == set(serial(micros))
    return found


PAIR = {"y": 2}
CASES = {
    "two stages on two ranks": [
        CutStage(0, ((),) * 3, (0,), {}),
        CutStage(3, ((),) * 3, (1,), {}),
    ],
    "one rank, then two that cut differently": [
        CutStage(0, ((),) * 2, (2,), {}),
        CutStage(2, (("batch",), ("seq",), ("ff",), ("vocab",)), (0, 1), PAIR),
    ],
    "two ranks, two ranks, other cuts": [
        CutStage(0, (("vocab",), ("seq",), ("ff",)), (0, 1), PAIR),
        CutStage(3, (("batch",), ("ff",), ("batch",)), (2, 3), PAIR),
    ],
    "three ranks, then one": [
        CutStage(0, (("batch",), ("seq",), ("batch",), ("",), ("ff",)), (0, 1, 2), {"x": 3}),
        CutStage(5, ((),), (3,), {}),
    ],
    "one stage on a square": [
        CutStage(
            0,
            (
                ("batch", "vocab"),
                ("batch", "heads"),
                ("ff", "ff"),
                ("seq", "batch"),
                ("", "ff"),
                ("seq", "vocab"),
            ),
            (0, 1, 2, 3),
            SQUARE,
        ),
    ],
    "one, two and one": [
        CutStage(0, ((),), (3,), {}),
        CutStage(1, (("heads",), ("ff",), ("heads",), ("seq",)), (0, 2), PAIR),
        CutStage(5, ((),), (1,), {}),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_stages_of_any_shape_equal_the_serial_run_and_send_what_is_predicted(pools, name):
    check_staged(pools, Staged(chain(), CASES[name]), 1 if "square" in name else 3)


@pytest.mark.parametrize("mesh", [PAIR, {"x": 3}, SQUARE], ids=str)
def test_ranks_in_any_order_equal_the_serial_run_or_are_refused(mesh, pools):
    cuts = (
        [("seq", "ff")[: len(mesh)]] * 2
        + [("ff", "batch")[: len(mesh)]]
        + [("batch",) + ("",) * (len(mesh) - 1)] * 3
    )
    run = []
    for order in permutations(range(prod(mesh.values()))):
        try:
            staged = Staged(chain(), [CutStage(0, tuple(cuts), order, mesh)])
        except ValueError as error:
            assert "in ascending order. Use (" in str(error) and order != tuple(sorted(order))
            continue
        check_staged(pools, staged, 1)
        run.append(order)
    assert run == ([(0, 1, 2, 3), (0, 2, 1, 3)] if mesh is SQUARE else [tuple(range(prod(mesh.values())))])


def problem(memory=float("inf"), layers=6) -> ChainProblem:
    """The same model on two nodes of two devices with a slow link between, in double precision."""
    cluster = Cluster(4, Device(1e8, memory, 1e-6), Network(Link(1e-5, 2e6), Link(1e-6, 1e9), 2))
    operators = clustered(gpt2_cuts(CONFIG, ROWS, LENGTH, 8), layers)
    cuts = "sample", "attribute"
    return ChainProblem(operators, cluster, ROWS, LENGTH, CONFIG.n_embd, micros=3, itemsize=8, cuts=cuts)


@pytest.mark.parametrize("memory, sizes", [(9e5, [2, 2]), (5e5, [1, 1, 2])])
def test_the_plan_that_alpa_finds_runs(pools, memory, sizes):
    """The slow link makes two stages, cut along unlike dimensions; little memory makes stages of unlike shape."""
    given = problem(memory, layers=4)
    plan = PLANNERS["Alpa"].plan(given).plan
    stages = stages_of(given, plan)
    assert [len(stage.ranks) for stage in stages] == sizes
    check_staged(pools, Staged(chain(), stages), given.micros)


def test_a_plan_by_hand_becomes_stages():
    given = problem()
    plan = [Assignment(0, 1)] * 2 + [Assignment(1, 1)] + [Assignment(2, 2, ("whole", "attribute"))] * 3
    found = stages_of(given, tuple(plan))
    assert [(s.first, s.ranks, s.mesh) for s in found] == [
        (0, (0,), {}),
        (2, (1,), {}),
        (3, (2, 3), {"y": 2}),
    ]
    assert found[2].choices == (("seq",),) * 3
    names = stages_of(given, (Assignment(0, 4, ("sample", "parameter")),) * 6)[0].choices
    assert names == tuple(("batch", name) for name in ("vocab", "heads", "ff", "heads", "ff", "vocab"))


def test_every_place_receives_each_box_once_and_only_boxes_that_overlap_are_sent():
    draw, shape = random.Random(2), (5, 7)
    every = layouts(2, "xy", ())
    for _ in range(60):
        sides = [Side(ranks, SQUARE, draw.choice(every)) for ranks in (range(4), range(4, 8))]
        crossing = Crossing(shape, 8, *sides)
        wants = crossing.arrival.boxes(shape)
        came = {rank: torch.zeros(shape, dtype=torch.long) for rank in wants}
        for source, to, piece in crossing.pieces():
            where = tuple(slice(*one) for one in piece)
            came[to][where] += 1
            has = sides[0].boxes(shape)[source]
            assert all(a >= c and b <= d for (a, b), (c, d) in zip(piece, has, strict=True))
        for rank, box in wants.items():
            where = tuple(slice(*one) for one in box)
            assert came[rank][where].eq(1).all() and came[rank].sum() == came[rank][where].numel()


def test_scattering_sends_each_number_once_over_the_border():
    whole, cut = layouts(2, "y", ())[:2]
    sides = Side((0, 1), PAIR, cut), Side((2, 3), PAIR, whole)
    crossing = Crossing((6, 4), 8, *sides)
    assert sum(crossing.cost(rank)[0] for rank in range(2)) == 6 * 4 * 8
    assert [crossing.cost(rank) for rank in (2, 3)] == [(6 * 4 * 8 // 2, 1)] * 2


def test_stages_in_float32_send_half_and_refuse_weights_of_another_type(pools):
    narrow = LinkChain(captured_gpt2(CONFIG, ROWS, LENGTH, dtype=torch.float32))
    for name in ("two ranks, two ranks, other cuts", "one, two and one"):
        staged, wide = Staged(narrow, CASES[name]), Staged(chain(), CASES[name])
        right = {n: t.float() for n, t in serial(2).items()}
        weights = {n: t.float() for n, t in example_weights(CONFIG).items()}
        for rank, found in enumerate(pools[4].run(run_stages, staged, weights, batches(2), right)):
            assert found[0] <= 1e-4 and found[2:] == staged.cost(rank, 2)
            assert 2 * found[2] == wide.cost(rank, 2)[0]
    for one, other, kind in ((staged, torch.float64, "float32"), (wide, torch.float32, "float64")):
        weights = {n: t.to(other) for n, t in weights.items()}
        with pytest.raises(RankFailed, match=f"is {other}, but its stage was captured for torch.{kind}"):
            pools[4].run(run_stages, one, weights, batches(2), right)


def test_copies_at_the_source_share_out_what_is_sent():
    whole, cut = layouts(2, "x", ())[:2]
    crossing = Crossing((6, 4), 8, Side((0, 1), LINE, whole), Side((2, 3), LINE, cut))
    assert [(source, to) for source, to, _ in crossing.pieces()] == [(0, 2), (1, 3)]
    assert [crossing.cost(rank) for rank in (0, 1)] == [(3 * 4 * 8, 1)] * 2
