"""Tofu on GPT-2's graph: the dynamic program equals brute force, and what it finds runs and equals the serial run."""

import itertools
from functools import cache

import pytest
from sharding_cases import CONFIG, check_program, graph, program

from gpt2lab.model import GPT2Config
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.marks import batch, megatron
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


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_dynamic_program_equals_brute_force(sizes):
    one = chain(*sizes)
    ways = [one.choices(n, (), LINE) for n in range(one.count)]
    best = min(one.cost(list(way), LINE) for way in itertools.product(*ways))
    assert one.cost(one.halve([()] * one.count, LINE), LINE) == best


def test_the_second_halving_also_equals_brute_force():
    one = chain(*SIZES[1])
    first, second = one.recursive("xy")
    ways = [one.choices(n, first[n], SQUARE) for n in range(one.count)]
    assert one.cost(second, SQUARE) == min(one.cost(list(w), SQUARE) for w in itertools.product(*ways))


def test_many_tokens_cut_the_batch_few_cut_the_weights():
    """Lesson 06's crossover, B T = 4 C for an MLP, found by the program: here 28 and 77 tokens, and 24 features."""
    mlps = lambda rows, length: {chain(rows, length).recursive("x")[0][n] for n in (2, 4)}
    assert mlps(7, 16) == {("batch",)} and mlps(7, 4) == {("ff",)}


def test_a_large_vocabulary_is_cut_where_the_blocks_are_not():
    first = chain(8, 8, 1, 8, 370).recursive("x")[0]
    assert first == [("vocab",), ("batch",), ("batch",), ("vocab",)]


def test_the_cost_of_a_chain_is_what_the_whole_program_sends():
    one = chain(2, 11)
    (choices,) = one.recursive("x")
    assert {c for (c,) in choices} == {"vocab", "heads", "ff"}
    assert bytes_of_all(one.program(choices, LINE)) == one.cost(choices, LINE)
    one = chain(7, 16)
    (choices,) = one.recursive("x")
    assert set(choices) == {("batch",)}
    assert bytes_of_all(one.program(choices, LINE)) == one.cost(choices, LINE)


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
