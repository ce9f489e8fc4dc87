"""Splitting the sequence: every layout with every exchange equals serial GPT-2; work, bytes and memory as predicted."""

import itertools
from fractions import Fraction

import context_cases as on_ranks
import pytest
import torch

from gpt2lab import RankFailed, Ranks
from gpt2lab.model import GPT2, PRESETS, GPT2Config, causal_attention
from gpt2lab.parallel import blockwise, context_costs
from gpt2lab.parallel import context as strategy
from gpt2lab.parallel.layouts import LAYOUTS, Layout, contributors, layout, lenders, loans, reach
from gpt2lab.plan import Plan
from gpt2lab.verify import verify

WORLDS = (2, 3, 4)


@pytest.fixture(scope="module")
def pools():
    with Ranks(2, echo=False) as two, Ranks(3, echo=False) as three, Ranks(4, echo=False) as four:
        yield {2: two, 3: three, 4: four}


# Layouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_one_owner_for_any_length_and_any_number_of_ranks(name):
    for tokens, ranks in itertools.product(range(1, 30), range(1, 7)):
        table = layout(name, tokens, ranks)
        assert table.tokens == tokens and len(table.sizes) == ranks
        assert [table.order[i] for i in table.inverse] == list(range(tokens))
        assert all(t in table.positions[table.owners[t]] for t in range(tokens))


def test_the_layouts_of_eleven_tokens():
    assert layout("contiguous", 11, 4).sizes == (3, 3, 3, 2)
    assert layout("interleaved", 11, 4).positions[3] == (3, 7)
    assert layout("zigzag", 12, 3).positions == ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    assert layout("unequal", 1024, 2).sizes == (724, 300) and layout("unequal", 64, 2).sizes == (45, 19)
    assert layout("unequal", 4, 4).sizes == (1, 1, 1, 1)


def test_names_and_tables_that_cannot_be():
    with pytest.raises(ValueError, match="'zickzack'. Use one of contiguous, unequal, interleaved, zigzag"):
        layout("zickzack", 8, 2)
    with pytest.raises(ValueError, match="'rings'. Use one of qkv, kv-allreduce, kv, .*ring, heads, halo-kv"):
        strategy.exchange("rings")
    with pytest.raises(ValueError, match="every token 0..3 exactly once"):
        Layout("mine", ((0, 1), (1, 2)))


@pytest.mark.parametrize("window", [None, 0, 2, 40])
def test_lenders_and_contributors_are_those_of_the_mask(window):
    for name, tokens, ranks in itertools.product(LAYOUTS, (1, 5, 11), (1, 2, 3, 4)):
        table = layout(name, tokens, ranks)
        seen = {
            (table.owners[q], table.owners[k])
            for q in range(tokens)
            for k in range(q + 1)
            if window is None or q - k <= window
        }
        assert seen == {(r, s) for r in range(ranks) for s in lenders(table, window)[r]}
        assert seen == {(r, s) for s in range(ranks) for r in contributors(table, s, window)}


def test_keys_travel_no_further_than_somebody_needs_them():
    assert reach(layout("contiguous", 11, 4)) == (3, 2, 1, 0)
    assert reach(layout("zigzag", 16, 4)) == reach(layout("interleaved", 16, 4)) == (3, 3, 3, 3)
    assert reach(layout("contiguous", 16, 4), 4) == (1, 1, 1, 0)


# Attention in blocks


def attention_of_shards(table, q, k, v, grad, window, tile, order=1):
    """Output and gradients of attention put together from the ranks' shards, in one process."""
    outputs = [torch.zeros_like(q) for _ in range(4)]
    for r, mine in enumerate(table.positions):
        if not mine:
            continue
        mine, state = list(mine), None
        others = [s for s in lenders(table, window)[r] if s != r][::order]
        for s in [r, *others]:
            keys = list(table.positions[s])
            state = blockwise.block_forward(
                state, q[:, :, mine], k[:, :, keys], v[:, :, keys], mine, keys, window, tile
            )
        out, lse = state
        outputs[0][:, :, mine] = out
        delta = (grad[:, :, mine] * out).sum(-1, keepdim=True)
        for s in [r, *others]:
            keys = list(table.positions[s])
            dq, dk, dv = blockwise.block_backward(
                grad[:, :, mine],
                delta,
                lse,
                q[:, :, mine],
                k[:, :, keys],
                v[:, :, keys],
                mine,
                keys,
                window,
                tile,
            )
            outputs[1][:, :, mine] += dq
            outputs[2][:, :, keys] += dk
            outputs[3][:, :, keys] += dv
    return outputs


@pytest.mark.parametrize("window", [None, 0, 3, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_merged_blocks_equal_whole_attention_forward_and_backward(name, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 3, 11, 4, dtype=torch.float64, generator=generator) * 3
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = causal_attention(*leaves, torch.arange(11), window)
    whole.backward(grad)
    expected = [whole.detach(), *(t.grad for t in leaves)]
    for ranks, (tile, order) in itertools.product((2, 3, 4, 12), ((None, 1), (1, -1), (2, 1))):
        got = attention_of_shards(layout(name, 11, ranks), q, k, v, grad, window, tile, order)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_huge_scores_neither_overflow_nor_vanish():
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grad = torch.ones_like(q)
    got = attention_of_shards(layout("interleaved", 6, 3), q * 1000, k * 1000, v, grad, None, 1)
    expected = causal_attention(q * 1000, k * 1000, v, torch.arange(6))
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)


def test_gradients_by_hand_pass_gradcheck():
    q, k, v = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    for window in (None, 2):
        run = lambda *qkv, w=window: blockwise.block_attention(*qkv, range(5), range(5), w, 2)
        assert torch.autograd.gradcheck(run, inputs)


def test_with_tiles_of_one_query_exactly_the_needed_pairs_are_computed():
    for name, ranks, window in itertools.product(LAYOUTS, (1, 2, 4), (None, 0, 3)):
        table = layout(name, 13, ranks)
        for r, mine in enumerate(table.positions):
            computed = sum(
                blockwise.pairs_computed(list(mine), list(keys), window, 1) for keys in table.positions
            )
            assert computed == context_costs.pairs(table, r, window)


def test_a_block_without_tiles_computes_what_the_mask_throws_away():
    """Interleaving balances the needed pairs; whole blocks would compute twice as many, zigzag's chunks do not."""

    def pairs(name, tile=None):
        table = layout(name, 64, 4)
        count = lambda mine, keys: blockwise.pairs_computed(list(mine), list(keys), None, tile)
        return [sum(count(mine, keys) for keys in table.positions) for mine in table.positions]

    assert pairs("interleaved") == [(r + 1) * 16 * 16 + (3 - r) * 16 * 15 for r in range(4)]
    assert sum(pairs("interleaved")) > 1.9 * 64 * 65 / 2
    assert pairs("zigzag", tile=8) == [(2 * 4 + 1) * 8 * 8] * 4
    assert pairs("contiguous") == [16 * 16, 2 * 16 * 16, 3 * 16 * 16, 4 * 16 * 16]


# Work, traffic and memory by formula


def test_the_contiguous_imbalance_of_the_source():
    for n, attention, softmax in ((2, 1.5, 1.75), (4, 1.75, 2.3125), (8, 1.875, 2.640625)):
        shares = [context_costs.contiguous_share(i, n) for i in range(n)]
        assert shares == [Fraction(2 * i + 1, n * n) for i in range(n)] and sum(shares) == 1
        assert context_costs.imbalance(shares) == Fraction(2 * n - 1, n) == attention
        quadratic = [context_costs.contiguous_share(i, n, 2) for i in range(n)]
        assert quadratic == [Fraction(3 * i * i + 3 * i + 1, n**3) for i in range(n)]
        assert context_costs.imbalance(quadratic) == softmax
        assert context_costs.idle_in_ring(n) == Fraction(n - 1, 2 * n)


def test_work_of_slices_equals_the_closed_forms():
    for n, m in itertools.product((2, 3, 4), (1, 5, 16)):
        table = layout("contiguous", n * m, n)
        forward = context_costs.work(table, "forward")
        assert forward == [(2 * i + 1) * m * m / 2 + m / 2 for i in range(n)]
        assert context_costs.work(table, "dQ") == context_costs.work(table, "dK,dV by query") == forward
        assert context_costs.work(table, "dK,dV by key") == forward[::-1]
        assert context_costs.work(table, "MLP") == [m] * n
        assert sum(forward) == n * m * (n * m + 1) // 2


def test_unequal_slices_balance_the_forward_and_spoil_the_rest():
    for n, by_key, mlp in ((2, 1.83, 1.41), (4, 3.00, 2.0), (8, 4.66, 2.83)):
        table = layout("unequal", 1024, n)
        load = lambda kernel, t=table: float(context_costs.imbalance(context_costs.work(t, kernel)))
        assert load("forward") < 1.007 and load("dQ") < 1.007
        assert abs(load("dK,dV by key") - by_key) < 0.01 and abs(load("MLP") - mlp) < 0.01


def test_interleaved_and_zigzag_balance_every_kernel():
    for n, kernel in itertools.product((2, 4, 8), context_costs.KERNELS):
        assert context_costs.imbalance(context_costs.work(layout("interleaved", 1024, n), kernel)) <= 1.025
    for n in (2, 4, 8):
        table = layout("zigzag", 1024, n)
        for kernel in ("forward", "dQ", "dK,dV by key", "MLP"):
            assert context_costs.imbalance(context_costs.work(table, kernel)) == 1
        interleaved = layout("interleaved", 1024, n)
        assert context_costs.imbalance(context_costs.work(interleaved, "forward")) <= 1.01


def test_activations_of_the_serial_run_are_the_number_llmc_prints():
    """llm.c's README shows num_activations: 73323776 for GPT-2 124M with B=4, T=64."""
    found = context_costs.activations(PRESETS["gpt2"], 4, layout("contiguous", 64, 1), 0)
    assert len(found) == 23 and sum(found.values()) == 73323776


def test_activations_shrink_with_the_tokens_but_for_gathered_keys():
    config = PRESETS["nano"]
    whole = context_costs.activations(config, 2, layout("contiguous", 64, 1), 0)
    for n in (2, 4):
        part = context_costs.activations(config, 2, layout("contiguous", 64, n), 0)
        assert {name for name in whole if part[name] * n != whole[name]} == {"qkv"}
        assert part["qkv"] == whole["qkv"]
        ring = context_costs.activations(config, 2, layout("contiguous", 64, n), 0, gathered=0)
        assert sum(ring.values()) * n == sum(whole.values())


# On live ranks


def check_against_formulas(table, case, results):
    _, exchange, length, window = case
    for r, found in enumerate(results):
        assert found["error"] < 1e-12, (case, r, found["error"])
        predicted = context_costs.sent(exchange, table, r, on_ranks.ROWS * 24, window)
        assert found["sent"] == predicted, (case, r)
        if exchange == "heads":
            needed = context_costs.pairs(layout("contiguous", length, 1), 0, window) / table.ranks
        else:
            needed = context_costs.pairs(table, r, window)
        for kernel in ("forward", "dQ", "dK,dV"):
            assert found["work"].get(kernel, 0) == needed, (case, r, kernel)


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_and_exchange_equals_serial_and_sends_and_computes_what_the_formulas_say(pools, world):
    wanted = on_ranks.cases(on_ranks.FULL, (11,), (None, 2)) + on_ranks.cases(on_ranks.HALOS, (11,), (2, 5))
    assert len(wanted) == 4 * 7 * 2 + 2 * 8 * 2
    per_rank = pools[world].run(on_ranks.run_all, wanted)
    for case, results in zip(wanted, zip(*per_rank, strict=True), strict=True):
        check_against_formulas(layout(case[0], case[2], world), case, results)


def test_fewer_tokens_than_ranks(pools):
    wanted = on_ranks.cases(on_ranks.FULL + on_ranks.HALOS, (2, 5), (None, 1, 3))
    per_rank = pools[4].run(on_ranks.run_all, wanted)
    for case, results in zip(wanted, zip(*per_rank, strict=True), strict=True):
        assert max(found["error"] for found in results) < 1e-12, case


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}])
def test_groups_of_neighbours_and_groups_with_gaps(pools, sizes):
    """cp ranks {0, 1}, {2, 3} and {0, 2}, {1, 3}: places on the axis are not ranks of the world."""
    wanted = on_ranks.cases(on_ranks.FULL + on_ranks.HALOS, (11,), (3,), ("contiguous", "zigzag"))
    per_rank = pools[4].run(on_ranks.run_all, wanted, sizes)
    assert max(found["error"] for results in per_rank for found in results) < 1e-12


CHOSEN = [
    "cp=2,exchange=qkv",
    "cp=3,exchange=kv,layout=interleaved",
    "cp=2,exchange=kv-allreduce,layout=unequal",
    "cp=3,exchange=kv-roots",
    "cp=4,exchange=triangle",
    "cp=3,exchange=ring,layout=zigzag",
    "cp=4,exchange=heads,layout=zigzag",
    "dp=2,cp=2,exchange=ring,layout=interleaved,micro=2",
    "cp=2,exchange=ring,recompute=true",
]


@pytest.mark.parametrize("plan", CHOSEN)
def test_training_equals_serial(pools, plan):
    config = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24, dropout=0.1)
    report = verify(plan, config, rows=4, ranks=pools[Plan.parse(plan).world])
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("exchange", on_ranks.FULL)
@pytest.mark.parametrize("name", on_ranks.LAYOUTS)
def test_verify_passes_for_every_layout_and_exchange(pools, world, exchange, name):
    for window in (None, 3):
        report = verify(
            f"cp={world},layout={name},exchange={exchange}", on_ranks.config(window), 2, 11, pools[world]
        )
        assert report.ok, str(report)


def test_a_rank_keeps_for_backward_what_the_formula_says(pools):
    for world in (2, 4):
        for exchange in ("qkv", "kv", "triangle", "ring", "heads"):
            for name in ("contiguous", "zigzag"):
                kept = pools[world].run(kept_numbers, name, exchange)
                table = layout(name, 11, world)
                expected = [
                    context_costs.kept(on_ranks.config(), on_ranks.ROWS, table, r, exchange)
                    for r in range(world)
                ]
                assert kept == expected, (exchange, name, world)


def kept_numbers(rank, world_size, name, exchange):
    """Numbers that one block's forward keeps for backward: every storage once, parameters not."""
    from gpt2lab.ranks.mesh import Mesh

    model = GPT2(on_ranks.config()).double()
    split = strategy.apply_context(
        model, Mesh(cp=world_size), Plan(cp=world_size, layout=name, exchange=exchange)
    )
    mine = split(11)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own and t.dtype == torch.float64:
            kept[storage.data_ptr()] = storage.nbytes() // 8
        return t

    x = model.embed(on_ranks.data(11)[0][:, mine], mine)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model.h["0"](x, mine)
    kept.pop(y.untyped_storage().data_ptr(), None)
    return sum(kept.values())


# What is refused


def test_plans_that_cannot_be_are_refused_before_any_rank_starts():
    config = on_ranks.config()
    for plan, words in (
        ("cp=2,layout=diagonal", "no layout called 'diagonal'. Use one of contiguous"),
        ("cp=2,exchange=post", "no exchange called 'post'. Use one of qkv"),
        ("cp=5,exchange=heads", r"12 attention heads .* cp=5 .*12 % 5 = 2.*Use cp=1, 2, 3, 4, 6, 12"),
        ("cp=2,exchange=halo-kv", "windowed attention, and this model attends to all 11 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan.parse(plan).check(config, 4, 11)
    with pytest.raises(ValueError, match="zigzag layout rank 0 owns tokens 0 to 10 with gaps"):
        Plan.parse("cp=2,exchange=halo-x,layout=zigzag").check(on_ranks.config(3), 4, 11)
    with pytest.raises(ValueError, match="sp=true has cut .* Use exchange=halo-kv"):
        Plan.parse("cp=2,tp=2,sp=true,exchange=halo-x").check(on_ranks.config(3), 4, 12)


def generate_split(rank, world_size):
    from gpt2lab.generate import generate
    from gpt2lab.ranks.mesh import Mesh

    model = GPT2(on_ranks.config()).double()
    strategy.apply_context(model, Mesh(cp=world_size), Plan(cp=world_size))(4)
    try:
        generate(model, [[1, 2, 3, 4]], 2, temperature=0)
    except ValueError as error:
        refused = str(error)
    strategy.unsplit(model)
    return refused, generate(model, [[1, 2, 3, 4]], 2, temperature=0)


def test_generation_is_not_split_and_says_so(pools):
    (said, text), (_, same) = pools[2].run(generate_split)
    assert "generation" in said and "unsplit" in said
    assert text == same


def local_positions(rank, world_size):
    from gpt2lab.ranks.mesh import Mesh

    model = GPT2(on_ranks.config()).double()
    split = strategy.apply_context(model, Mesh(cp=world_size), Plan(cp=world_size))
    mine = split(11)
    model(on_ranks.data(11)[0][:, mine], torch.arange(len(mine)))


def test_local_positions_are_refused(pools):
    with pytest.raises(RankFailed, match="rank 1 of cp=2 owns positions 6, 7.* given 0, 1.* true positions"):
        pools[2].run(local_positions)


def test_halo_loans_are_named_in_one_order():
    assert [(a.source, a.target) for a in loans(layout("contiguous", 16, 4), 5)] == [
        (0, 1),
        (2, 3),
        (1, 2),
        (0, 2),
        (1, 3),
    ]
