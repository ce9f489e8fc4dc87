"""Splitting the sequence: every layout with every exchange equals serial GPT-2; work, bytes and memory as predicted."""

import itertools

import context_cases as on_ranks
import pytest
import torch
from planting import planting

from gpt2lab import RankFailed
from gpt2lab.generate import generate
from gpt2lab.lessons.labs.instruments import kept_for_backward
from gpt2lab.model import GPT2, PRESETS, causal_attention
from gpt2lab.parallel.context import attention, borrow, costs, tiles
from gpt2lab.parallel.context import exchanges as strategy
from gpt2lab.parallel.context.layouts import LAYOUTS, contributors, layout, lenders
from gpt2lab.parallel.context.paths import reach
from gpt2lab.plan import Plan
from gpt2lab.ranks.mesh import Axis, Mesh

WORLDS = (2, 3, 4)
EXCHANGES = on_ranks.FULL + on_ranks.HALOS


# Layouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_one_owner_for_any_length_and_any_number_of_ranks(name):
    for tokens, ranks in itertools.product(range(1, 30), range(1, 7)):
        table = layout(name, tokens, ranks)
        assert table.tokens == tokens and len(table.sizes) == ranks
        assert [table.order[i] for i in table.inverse] == list(range(tokens))
        assert all(t in table.positions[table.owners[t]] for t in range(tokens))


def test_a_split_of_another_length_looks_at_the_positions_again():
    split, positions = strategy.Split(Axis(), "contiguous", "qkv", None), torch.arange(5)
    split.attend = lambda *_: True
    x = torch.zeros(1, 1, 5, 2)
    split(5)
    assert split.core(x, x, x, positions, None)
    split(4)
    with pytest.raises(ValueError, match="owns positions 0, 1, 2, 3 but was given 0, 1, 2, 3, 4"):
        split.core(x, x, x, positions, None)


def test_the_layouts_of_eleven_tokens():
    assert layout("contiguous", 11, 4).sizes == (3, 3, 3, 2)
    assert layout("interleaved", 11, 4).positions[3] == (3, 7)
    assert layout("zigzag", 12, 3).positions == ((0, 1, 10, 11), (2, 3, 8, 9), (4, 5, 6, 7))
    assert layout("unequal", 1024, 2).sizes == (724, 300) and layout("unequal", 64, 2).sizes == (45, 19)
    assert layout("unequal", 4, 4).sizes == (1, 1, 1, 1)


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
    for r, mine in enumerate(map(list, table.positions)):
        if not mine:
            continue
        others = [s for s in lenders(table, window)[r] if s != r][::order]
        blocks, state = [list(table.positions[s]) for s in (r, *others)], None
        of = lambda keys, mine=mine: (q[:, :, mine], k[:, :, keys], v[:, :, keys], mine, keys, window, tile)
        for keys in blocks:
            state = attention.block_forward(state, *of(keys))
        outputs[0][:, :, mine] = state[0]
        for keys in blocks:
            found = attention.block_backward(grad[:, :, mine], *state, *of(keys))
            for output, at, part in zip(outputs[1:], (mine, keys, keys), found, strict=True):
                output[:, :, at] += part
    return outputs


@pytest.mark.rotates
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
        for tile in (2, None):
            run = lambda *qkv, w=window, t=tile: attention.block_attention(*qkv, range(5), range(5), w, t)
            assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchs_kernel_gets_rectangles_and_triangles_that_cover_the_mask_once(name):
    for tokens, ranks in itertools.product((1, 2, 7, 11, 16, 24), (1, 2, 3, 4)):
        table = layout(name, tokens, ranks)
        for mine, keys in itertools.product(table.positions, (*table.positions, tuple(range(tokens)))):
            found = tiles.pieces(mine, keys)
            covered = [
                (q, k)
                for rows, columns, triangle in found or ()
                for i, q in enumerate(mine[rows])
                for j, k in enumerate(keys[columns])
                if not triangle or j <= i
            ]
            assert found is None or sorted(covered) == [(q, k) for q in mine for k in keys if k <= q]
            assert found is not None or (name == "zigzag" and tokens < 4 * ranks), (tokens, ranks, mine, keys)


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchs_kernel_is_used_and_equals_the_blocks_by_hand(name, monkeypatch):
    """Both are given a part of the keys, as in a ring; then windows and tiles are done by hand."""
    generator, used = torch.Generator().manual_seed(0), []
    q, k, v, grad = torch.randn(4, 2, 3, 24, 4, dtype=torch.float64, generator=generator) * 3
    for kernel in ("FLASH", "FLASH_BACKWARD"):
        right = getattr(attention, kernel)
        spy = lambda *args, r=right, kernel=kernel: (used.append(kernel), r(*args))[1]
        monkeypatch.setattr(attention, kernel, spy)
    table, counts = layout(name, 24, 3), []
    for tile in (1, None):
        assert not used
        attention.work.clear()
        counts.append((attention_of_shards(table, q, k, v, grad, None, tile), dict(attention.work)))
    (by_hand, pairs), (by_torch, same_pairs) = counts
    assert set(used) == {"FLASH", "FLASH_BACKWARD"} and pairs == same_pairs
    assert pairs["forward"] == pairs["backward"] == 2 * 3 * 24 * 25 // 2
    for a, b in zip(by_hand, by_torch, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    used.clear()
    monkeypatch.setattr(attention, "TILE", 2)
    attention.work.clear()
    attention_of_shards(table, q, k, v, grad, 5, None)
    pairs = sum(
        tiles.pairs_computed(mine, keys, 5, 2) for mine in table.positions for keys in table.positions
    )
    assert not used and attention.work["forward"] == 2 * 3 * pairs


@pytest.mark.parametrize("window", [None, 3])
def test_summing_by_key_gives_the_same_gradients_for_the_triangle_upside_down(window):
    """B18: who sums dK, dV decides whose work they are; counted on the owners of keys and of queries."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 1, 12, 4, dtype=torch.float64, generator=generator)
    everyone = tuple(range(12))
    out, lse = attention.block_forward(None, q, k, v, everyone, everyone, window, 1)
    _, *expected = attention.block_backward(grad, out, lse, q, k, v, everyone, everyone, window, 1)
    for name in LAYOUTS:
        table, found = layout(name, 12, 3), []
        for keys in table.positions:
            attention.work.clear()
            own = k[:, :, list(keys)], v[:, :, list(keys)]
            parts = attention.gradients_by_key(grad, out, lse, q, *own, everyone, keys, window, 1)
            for part, whole in zip(parts, expected, strict=True):
                torch.testing.assert_close(part, whole[:, :, list(keys)], rtol=0, atol=1e-12)
            found.append(attention.work["dK,dV by key"])
        longest = lambda t: 12 - t if window is None else min(12 - t, window + 1)
        assert found == [sum(map(longest, keys)) for keys in table.positions]
        assert window is not None or found == costs.work(table, "dK,dV by key")


def test_with_tiles_of_one_query_exactly_the_needed_pairs_are_computed():
    for name, ranks, window in itertools.product(LAYOUTS, (1, 2, 4), (None, 0, 3)):
        table = layout(name, 13, ranks)
        for r, mine in enumerate(table.positions):
            computed = sum(tiles.pairs_computed(mine, keys, window, 1) for keys in table.positions)
            assert computed == costs.pairs(table, r, window)


def test_a_block_without_tiles_computes_what_the_mask_throws_away():
    """Interleaving balances the needed pairs; whole blocks would compute twice as many, zigzag's chunks do not."""

    def pairs(name, tile=None):
        table = layout(name, 64, 4)
        count = lambda mine, keys: tiles.pairs_computed(mine, keys, None, tile)
        return [sum(count(mine, keys) for keys in table.positions) for mine in table.positions]

    assert pairs("interleaved") == [(r + 1) * 16 * 16 + (3 - r) * 16 * 15 for r in range(4)]
    assert sum(pairs("interleaved")) > 1.9 * 64 * 65 / 2
    assert pairs("zigzag", tile=8) == [(2 * 4 + 1) * 8 * 8] * 4
    assert pairs("contiguous") == [16 * 16, 2 * 16 * 16, 3 * 16 * 16, 4 * 16 * 16]


# Work, traffic and memory by formula


def test_work_of_slices_equals_the_closed_forms():
    for n, m in itertools.product((2, 3, 4), (1, 5, 16)):
        table = layout("contiguous", n * m, n)
        forward = costs.work(table, "forward")
        assert forward == [(2 * i + 1) * m * m / 2 + m / 2 for i in range(n)]
        assert costs.work(table, "dQ") == costs.work(table, "dK,dV by query") == forward
        assert costs.work(table, "dK,dV by key") == forward[::-1]
        assert costs.work(table, "MLP") == [m] * n
        assert sum(forward) == n * m * (n * m + 1) // 2


def test_unequal_slices_balance_the_forward_and_spoil_the_rest():
    for n, by_key, mlp in ((2, 1.83, 1.41), (4, 3.00, 2.0), (8, 4.66, 2.83)):
        table = layout("unequal", 1024, n)
        load = lambda kernel, t=table: float(costs.imbalance(costs.work(t, kernel)))
        assert load("forward") < 1.007 and load("dQ") < 1.007
        assert abs(load("dK,dV by key") - by_key) < 0.01 and abs(load("MLP") - mlp) < 0.01


def test_interleaved_and_zigzag_balance_every_kernel():
    for n, kernel in itertools.product((2, 4, 8), costs.KERNELS):
        assert costs.imbalance(costs.work(layout("interleaved", 1024, n), kernel)) <= 1.025
    for n in (2, 4, 8):
        table = layout("zigzag", 1024, n)
        for kernel in ("forward", "dQ", "dK,dV by key", "MLP"):
            assert costs.imbalance(costs.work(table, kernel)) == 1
        interleaved = layout("interleaved", 1024, n)
        assert costs.imbalance(costs.work(interleaved, "forward")) <= 1.01


def test_activations_of_the_serial_run_are_the_number_llmc_prints():
    """llm.c's README shows num_activations: 73323776 for GPT-2 124M with B=4, T=64."""
    found = costs.activations(PRESETS["gpt2"], 4, layout("contiguous", 64, 1), 0)
    assert len(found) == 23 and sum(found.values()) == 73323776


def test_activations_shrink_with_the_tokens_but_for_gathered_keys():
    config = PRESETS["nano"]
    whole = costs.activations(config, 2, layout("contiguous", 64, 1), 0)
    for n in (2, 4):
        part = costs.activations(config, 2, layout("contiguous", 64, n), 0)
        assert {name for name in whole if part[name] * n != whole[name]} == {"qkv"}
        assert part["qkv"] == whole["qkv"]
        ring = costs.activations(config, 2, layout("contiguous", 64, n), 0, gathered=0)
        assert sum(ring.values()) * n == sum(whole.values())


# On live ranks


def equals_serial_and_formulas(pools, world, wanted):
    """Every case is equal to the serial run; each rank sends and computes what the formulas say."""
    per_rank = pools[world].run(on_ranks.run_all, wanted)
    for case, results in zip(wanted, zip(*per_rank, strict=True), strict=True):
        name, exchange, length, window = case
        table, whole = layout(name, length, world), layout("contiguous", length, 1)
        for r, found in enumerate(results):
            assert found["error"] < 1e-12, (case, r, found["error"])
            assert found["sent"] == costs.sent(exchange, table, r, on_ranks.ROWS * 24, window), (case, r)
            pairs = (
                costs.pairs(whole, 0, window) / world
                if exchange == "heads"
                else costs.pairs(table, r, window)
            )
            for kernel in ("forward", "backward"):
                assert found["work"].get(kernel, 0) == pairs, (case, r, kernel)
            tokens = on_ranks.config().n_layer * table.sizes[r]
            assert found["mlp rows"] == tokens == costs.work(table, "MLP")[r]


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_and_exchange_equals_serial_and_sends_and_computes_what_the_formulas_say(pools, world):
    wanted = on_ranks.cases(on_ranks.FULL, (11,), (None, 2)) + on_ranks.cases(on_ranks.HALOS, (11,), (2, 5))
    assert len(wanted) == 4 * 8 * 2 + 2 * 8 * 2
    equals_serial_and_formulas(pools, world, wanted)


def test_fewer_tokens_than_ranks(pools):
    equals_serial_and_formulas(pools, 4, on_ranks.paired(EXCHANGES, (2, 5), (None, 1, 3)))


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}])
def test_groups_of_neighbours_and_groups_with_gaps(pools, sizes):
    """cp ranks {0, 1}, {2, 3} and {0, 2}, {1, 3}: places on the axis are not ranks of the world."""
    wanted = on_ranks.cases(EXCHANGES, (11,), (3,), ("contiguous", "zigzag"))
    per_rank = pools[4].run(on_ranks.run_all, wanted, sizes)
    assert max(found["error"] for results in per_rank for found in results) < 1e-12


def test_a_rank_keeps_for_backward_what_the_formula_says(pools):
    wanted = on_ranks.cases(
        (*on_ranks.FULL, "halo-kv", "halo-x"), (11,), (None, 2, 6), ("contiguous", "zigzag")
    )
    for world in (2, 4):
        for case, *kept in zip(wanted, *pools[world].run(kept_numbers, wanted), strict=True):
            name, exchange, length, window = case
            table, config = layout(name, length, world), on_ranks.config(window)
            formula = [costs.kept_numbers(config, on_ranks.ROWS, table, r, exchange) for r in range(world)]
            assert kept == formula, (case, world)


def kept_numbers(rank, world_size, wanted):
    """Numbers that one block's forward keeps for backward, for each case: every storage once, parameters not."""
    mesh = Mesh(cp=world_size)
    return [kept_in_case(mesh, *case) for case in wanted]


def kept_in_case(mesh, name, exchange, length, window):
    model = GPT2(on_ranks.config(window)).double()
    plan = Plan(cp=mesh["cp"].size, layout=name, exchange=exchange)
    mine = strategy.apply_context(model, mesh, plan)(length)
    x = model.embed(on_ranks.data(length)[0][:, mine], mine)
    y, kept = kept_for_backward(lambda: model.h["0"](x, mine), model.parameters(), torch.float64)
    kept.pop(y.untyped_storage().data_ptr(), None)
    return sum(kept.values()) // 8


def live_activations(rank, world_size, name):
    """How many numbers of llm.c's activation tensors this rank's split model really makes, as far as it makes them."""
    model, seen = GPT2(on_ranks.config()).double(), {}
    mine = strategy.apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, layout=name))(11)
    block = model.h["0"]

    def watch(module, into, out):
        note = lambda names, x: seen.update({name: x.numel() for name in names.split()})
        module.register_forward_hook(lambda m, inputs, x: (note(into, inputs[0]), note(out, x))[0])

    for module, into, out in (
        (block, "encoded", "residual3"),
        (block.ln_1, "", "ln1"),
        (block.attn.c_proj, "atty", "attproj"),
        (block.ln_2, "residual2", "ln2"),
        (block.mlp.c_fc, "", "fch"),
        (block.mlp.c_proj, "fch_gelu", "fcproj"),
        (model.ln_f, "", "lnf"),
    ):
        watch(module, into, out)

    def attend(right):
        def watched(q, k, v, *rest):
            seen["qkv"] = q.numel() + k.numel() + v.numel()
            seen["att"] = q[..., 0].numel() * k.size(-2)
            return right(q, k, v, *rest)

        return watched

    with planting((borrow, "block_attention", attend)):
        seen["logits"] = model(on_ranks.data(11)[0][:, mine], mine).numel()
    return seen


@pytest.mark.parametrize("world", WORLDS)
def test_live_tensors_have_the_sizes_of_the_activation_formula(pools, world):
    for name in ("contiguous", "zigzag"):
        for r, found in enumerate(pools[world].run(live_activations, name)):
            formula = costs.activations(
                on_ranks.config(), on_ranks.ROWS, layout(name, 11, world), r, gathered=2
            )
            assert len(found) == 14 and found == {tensor: formula[tensor] for tensor in found}, (name, r)


# What is refused


def generate_split(rank, world_size):
    model = GPT2(on_ranks.config()).double()
    strategy.apply_context(model, Mesh(cp=world_size), Plan(cp=world_size))(4)
    with pytest.raises(ValueError, match="generation.*unsplit"):
        generate(model, [[1, 2, 3, 4]], 2, temperature=0)
    strategy.unsplit(model)
    return generate(model, [[1, 2, 3, 4]], 2, temperature=0)


def test_generation_is_not_split_and_says_so(pools):
    serial = generate(GPT2(on_ranks.config()).double(), [[1, 2, 3, 4]], 2, temperature=0)
    assert pools[2].run(generate_split) == [serial, serial]


def local_positions(rank, world_size):
    model = GPT2(on_ranks.config()).double()
    split = strategy.apply_context(model, Mesh(cp=world_size), Plan(cp=world_size))
    mine = split(11)
    model(on_ranks.data(11)[0][:, mine], torch.arange(len(mine)))


def test_local_positions_are_refused(pools):
    with pytest.raises(RankFailed, match="rank 1 of cp=2 owns positions 6, 7.* given 0, 1.* true positions"):
        pools[2].run(local_positions)
