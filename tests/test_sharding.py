"""Layouts and what their changes cost, descriptions of operators, named dimensions, products; PyTorch's DTensor."""

import itertools
import math
import os
from argparse import Namespace
from unittest.mock import patch

import dtensor_cases as cases
import pytest
import torch
from sharding_cases import CONFIG, einsum, layouts, matrices, one_product, run_program

from gpt2lab.benchmarks import race
from gpt2lab.benchmarks import sharding as bench
from gpt2lab.lessons.labs.sharding import BLOCK as BLOCK_NAMES
from gpt2lab.lessons.labs.sharding import MLP as MLP_NAMES
from gpt2lab.model import MLP, Block, GPT2Config
from gpt2lab.ranks import comm
from gpt2lab.sharding import cost, layout, named, operators, products, reshard
from gpt2lab.sharding.describe import analyse
from gpt2lab.sharding.expression import apply
from gpt2lab.sharding.gpt2 import captured_module, plain_attention
from gpt2lab.sharding.layout import Layout
from gpt2lab.sharding.operators import LIBRARY
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import propagate

SHAPE = (7, 5)
LINE, GRID = {"x": 4}, {"x": 2, "y": 2}


def parse(text, mesh=GRID):
    return Layout.parse(text, list(mesh))


@pytest.mark.parametrize(
    "text", ["RR", "S0R", "RS1", "S01R", "RS10", "S0S1", "RRP0", "S1RP0", "RRP01", "RRM0"]
)
def test_the_text_form_comes_back(text):
    assert parse(text).text(list(GRID)) == text


def test_names_and_digits_say_the_same():
    assert Layout.named("batch:x, ff:y", ("batch", "seq", "ff")) == parse("S0RS1")
    assert Layout.named("", ("batch",)) == parse("R")
    assert parse("-") == Layout(())
    assert parse("P0").text(["x"]) == "P0"


@pytest.mark.parametrize("mesh", [LINE, GRID, {"x": 3, "y": 2}])
def test_boxes_cover_the_tensor_once(mesh):
    for one in layouts(2, list(mesh), partial=()):
        if not layout.fits(one, SHAPE, mesh):
            continue
        seen, copies = torch.zeros(SHAPE), layout.ranks(mesh)
        for cut in one.axes:
            copies //= mesh[cut]
        for place in layout.places(mesh):
            seen[layout.box(SHAPE, one, mesh, place)] += 1
        assert (seen == copies).all(), one


def test_the_textbook_row_by_row():
    """Per rank, M bytes in all and n ranks: the table of syllabus and paper, on even sizes."""
    n, shape = 4, (8, 16)
    size = 8 * 8 * 16
    want = {
        ("S0R", "RR"): (n - 1) / n * size,
        ("S0R", "RS0"): (n - 1) / n**2 * size,
        ("RRP0", "RR"): 2 * (n - 1) / n * size,
        ("RRP0", "S0R"): (n - 1) / n * size,
        ("RR", "S0R"): 0,
        ("RR", "RRP0"): 0,
        ("S0R", "RRP0"): 0,  # own rows, zeros elsewhere: a term of the sum
    }
    for (a, b), sent in want.items():
        way = cost.path(parse(a, LINE), parse(b, LINE), shape, LINE)
        assert len(way.steps) == 1
        assert {way.cost(LINE, p, 8)[0] for p in layout.places(LINE)} == {sent}


def test_the_path_beats_one_axis_after_the_other():
    """Two all-reduces over 2 x 2 send 2 M a rank; summing halves over y between scatter and gather over x 1.5 M."""
    way = cost.path(parse("RRP01"), parse("RR"), (8, 8), GRID)
    assert [s.kind for s in way.steps] == ["reduce-scatter", "all-reduce", "all-gather"]
    assert way.total(GRID) == (4 * 96, 16)


def brute_force(src, dst, shape, mesh, depth=4):
    """The fewest bytes of any walk of at most `depth` steps."""
    best, walks = float("inf"), [(0, src)]
    for _ in range(depth + 1):
        best = min([best, *(sent for sent, at in walks if at == dst)])
        walks = [
            (sent + cost.Path((step,), (at, after), shape).total(mesh)[0], after)
            for sent, at in walks
            if sent < best
            for step, after in cost.steps(at, mesh)
            if layout.fits(after, shape, mesh)
        ]
    return best


@pytest.mark.parametrize("pair", [("RRP01", "S0S1"), ("S01R", "S10R"), ("S0S1", "S1S0"), ("S0RP1", "RS1")])
def test_no_short_walk_is_cheaper(pair):
    src, dst = map(parse, pair)
    found = cost.path(src, dst, SHAPE, GRID).total(GRID)[0]
    assert found <= brute_force(src, dst, SHAPE, GRID)


def test_a_tensor_without_elements_moves_without_a_byte():
    for src, dst in itertools.product(map(parse, ("RR", "RS0", "RRP0")), repeat=2):
        assert cost.path(src, dst, (0, 5), LINE).total(LINE)[0] == 0


def whole_tensor():
    return torch.arange(35, dtype=torch.float64).view(SHAPE) ** 2


def terms(whole, one, axes):
    """This rank's part where partial sums really differ: the terms are 2/3 and 1/3, or unequal numbers."""
    part = reshard.shard(whole, Layout(one.cuts), axes)
    for axis, op in one.partial:
        n, r = axes[axis].size, axes[axis].rank
        part = part * (r + 1) / (n * (n + 1) / 2) if op == "sum" else part - (n - 1 - r) * 3
    return part


def every_change(rank, world_size, mesh):
    """(from, to, error, gradient's error, counted, backward counted) of every pair of layouts."""
    axes, whole, found = reshard.live_axes(mesh), whole_tensor(), []
    fitting = [one for one in layouts(2, list(mesh)) if layout.fits(one, SHAPE, mesh)]
    for src, dst in itertools.product(fitting, repeat=2):
        x = terms(whole, src, axes).requires_grad_()
        comm.clear_log()
        y = reshard.reshard(x, src, dst, SHAPE, axes)
        sent = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
        back = reshard.shard(whole, dst.dual, axes)
        comm.clear_log()
        y.backward(back)
        returned = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
        total = y.detach()
        for axis, _ in dst.partial:
            total = comm.all_reduce(total, axes[axis])
        error = (total - reshard.shard(whole, Layout(dst.cuts), axes)).abs().max()
        of_x = (x.grad - reshard.shard(whole, src.dual, axes)).abs().max()
        found.append((src, dst, torch.maximum(error, of_x).item() / 1156, sent, returned))
    return found


def wrong_changes(found, mesh) -> list:
    """The changes that are not exact, or whose bytes and messages are not the table's, there or back."""
    costs = lambda src, dst, place: cost.path(src, dst, SHAPE, mesh).cost(mesh, place, 8)
    return [
        (src, dst)
        for place, changes in zip(layout.places(mesh), found, strict=True)
        for src, dst, error, *sent in changes
        if not error < 1e-14 or sent != [costs(src, dst, place), costs(*cost.adjoint(src, dst), place)]
    ]


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, GRID], ids=str)
def test_every_change_is_exact_and_its_bytes_are_the_table_s(pools, mesh):
    found = pools[layout.ranks(mesh)].run(every_change, mesh)
    assert len(found[0]) == {1: 4**2, 2: 18**2}[len(mesh)] and wrong_changes(found, mesh) == []


def maximum(rank, world_size):
    axes = reshard.live_axes(GRID)
    x = torch.full((3,), float(rank))
    return reshard.reshard(x, parse("RM01"), parse("R"), (3,), axes), axes["x"].rank


def test_a_partial_maximum(pools):
    assert all((most == 3).all() for most, _ in pools[4].run(maximum))


def test_a_part_of_the_wrong_shape_is_named(pools):
    def wrong(rank, world_size):
        try:
            axes = reshard.live_axes({"x": 2})
            reshard.reshard(torch.zeros(7, 5), parse("S0R"), parse("RR"), SHAPE, axes)
        except ValueError as error:
            return str(error)

    found = pools[2].run(wrong)
    assert "holds (7, 5), but S0R of (7, 5) is (4, 5) there" in found[0]


# --- what is read off an operator's description


FREE = {
    "matmul": "i:S0 j:S1 k:sum",
    "add": "i:S0 j:S1",
    "gelu": "i:S0 j:S1",
    "sum of rows": "i:sum j:S0",
    "softmax": "i:S0",
    "layer norm": "i:S0",
    "embedding": "b:S0 c:S2 row0:sum s:S1",
    "attention": "b:S0 e:S3 h:S1 t:S2",
    "cross entropy": "i:sum",
    "convolution": "c:sum n:S0 o:S1",
}
INSIDE = {
    "softmax": {"j": "max i, sum i"},
    "layer norm": {"j": "sum i, sum i"},
    "attention": {"s": "max bht, sum beht, sum bht", "d": "sum bhst"},
    "cross entropy": {"row0": "max i, sum i, sum i"},
}


def test_an_interrupted_search_for_a_way_goes_on():
    ways = lambda: cost.path(parse("S0S1"), parse("S1S0"), SHAPE, GRID)
    want = ways()
    cost._search.cache_clear()
    for turn in range(3):
        broken = patch.object(cost, "fits", side_effect=[True] * turn + [KeyboardInterrupt])
        with broken, pytest.raises(KeyboardInterrupt):
            ways()
    assert ways() == want


@pytest.mark.parametrize("name", LIBRARY)
def test_the_options_of_an_operator_follow_from_its_expression(name):
    rule = analyse(LIBRARY[name])
    cuts = [o for o in rule.options if o.index not in ("", "partial")]
    result = lambda place: f"S{place}" if isinstance(place, int) else place
    assert " ".join(sorted(f"{o.index}:{result(o.output)}" for o in cuts if o.free)) == FREE[name]
    said = lambda messages: ", ".join(sorted(f"{op} {''.join(indices)}" for op, indices in messages))
    assert {o.index: said(o.messages) for o in cuts if o.messages} == INSIDE.get(name, {})
    assert {o.index for o in cuts if o.halos} == ({"h", "v"} if name == "convolution" else set())


def linear_in(name) -> set:
    return {
        tuple(n for n, at in enumerate(o.inputs) if at == "sum")
        for o in analyse(LIBRARY[name]).options
        if o.index == "partial"
    }


def test_where_the_result_is_linear_it_may_stay_partial():
    assert linear_in("matmul") == {(0,), (1,)} and linear_in("add") == {(0, 1)}
    assert linear_in("gelu") == linear_in("softmax") == linear_in("cross entropy") == set()
    assert linear_in("layer norm") == {(1, 2)}
    assert linear_in("attention") == {(2,)}
    assert linear_in("embedding") == {(0,)}


def test_a_bias_is_a_term_of_the_sum():
    rule = operators.rule("addmm", ((4,), (3, 5), (5, 4)), (3, 4))
    (inner,) = [o for o in rule.options if o.index == "k"]
    assert inner.inputs == ("sum", 1, 0) and inner.output == "sum"


def test_a_broadcast_operand_stays_whole():
    rule = operators.rule("mul", ((3, 4), (3, 1)), (3, 4))
    assert rule.inputs == (("i0", "i1"), ("i0", None))
    assert [o.inputs for o in rule.options if o.index == "i1"] == [(1, None)]


def test_a_number_that_is_added_is_no_term():
    assert not [o for o in operators.rule("add", ((3,), None), (3,)).options if o.index == "partial"]
    assert [o for o in operators.rule("mul", ((3,), None), (3,)).options if o.index == "partial"]


def cut_by_hand(option, tensors, parts, function):
    """The result put together from parts that were computed apart, as an option says."""
    cut = lambda t, place, r: t.tensor_split(parts, place)[r] if isinstance(place, int) else t
    found = [
        function(*(cut(t, at, r) for t, at in zip(tensors, option.inputs, strict=True))) for r in range(parts)
    ]
    return torch.cat(found, option.output) if isinstance(option.output, int) else sum(found)


EINSUMS = [
    "ik,kj->ij",
    "bik,bkj->bij",
    "bthd,bshd->bhts",
    "ij,ij->i",
    "ij,j->i",
    "ijk,kl->ijl",
    "i,j->ij",
    "ij->j",
    "iij,jk->ik",  # an index of two dimensions of one tensor, which a cut would part from its diagonal
    "ii->i",
]


@pytest.mark.parametrize("text", EINSUMS)
def test_every_free_cut_of_an_einsum_gives_its_result(text):
    inputs, output = text.split("->")
    terms, sizes = inputs.split(","), dict(zip("bijklthsd", (3, 4, 5, 6, 4, 3, 5, 4, 6), strict=True))
    tensors = [torch.randn([sizes[i] for i in term], dtype=torch.float64) for term in terms]
    rule = einsum(text)
    cuts = [o for o in rule.options if o.free and o.index not in ("", "partial")]
    assert len(cuts) == len({i for i in inputs if max(term.count(i) for term in terms) == 1} - {","})
    for option, parts in itertools.product(cuts, (2, 3)):
        found = cut_by_hand(option, tensors, parts, lambda *t: torch.einsum(text, *t))
        assert torch.allclose(found, torch.einsum(text, *tensors), rtol=1e-13, atol=1e-13)


def test_two_indices_of_the_result_over_one_dimension_cannot_be_cut():
    outer = analyse(lambda x: lambda i, j: apply(x[i], x[j]))
    assert [o.index for o in outer.options] == [""]


# --- Mesh-TensorFlow: every legal layout of the MLP and of a block


MESH = {"x": 2, "y": 2}


def prepared(kind):
    """A module with weights of its own, its graph, its inputs, and what serial PyTorch gives."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    module, others = (MLP(CONFIG), tuple) if kind == "mlp" else (Block(CONFIG, 0), lambda: (torch.arange(5),))
    module = module.double()
    if kind == "block":
        module.attn.core = plain_attention
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(draw(*p.shape) / 4)
    x, of_y = draw(3, 5, CONFIG.n_embd).requires_grad_(), draw(3, 5, CONFIG.n_embd)
    table = MLP_NAMES if kind == "mlp" else BLOCK_NAMES
    params = dict(module.named_parameters())
    graph = captured_module(module, x, {n: table[n] for n in ("x", *params)}, others)
    y = module(x, *others())
    y.backward(of_y)
    given = {"x": x.detach(), "grad y": of_y} | {n: p.detach() for n, p in params.items()}
    want = {"y": y.detach(), "grad x": x.grad} | {f"grad {n}": p.grad for n, p in params.items()}
    return table, graph, given, want


def run_all(rank, world_size, programs, given, want):
    return [run_program(rank, world_size, one, given, want)[:2] for one in programs]


LEGAL = [("mlp", 21, 1), ("block", 63, 9), pytest.param("block", 63, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind, count, step", LEGAL)
def test_every_legal_layout_equals_the_serial_run(pools, kind, count, step):
    """All of the MLP's; of the block's every ninth, and all where slow tests are asked for."""
    table, graph, given, want = prepared(kind)
    layouts = named.legal_layouts(table, MESH)
    assert len(layouts) == count
    layouts = layouts[::step]
    programs = [
        partition(graph, propagate(graph, named.marks(graph, one, table), MESH), MESH) for one in layouts
    ]
    for found in pools[4].run(run_all, programs, given, want):
        assert len(found) == len(layouts) and all(error <= 1e-10 for error, _ in found)


# --- beside PyTorch's DTensor


PAIRS = 300 if "SLOW" in os.environ else 48


@pytest.mark.rotates
def test_dtensor_never_sends_less_and_each_difference_has_a_reason():
    """DTensor's result layout is always one of ours, for as many bytes or more."""
    found = cases.count_kinds(cases.cases(PAIRS))
    assert found.total() == PAIRS and set(cases.KINDS) - set(found) <= {cases.REFUSED}
    assert found[cases.EQUAL] > PAIRS / 2 and found[cases.REFUSED] < PAIRS / 20


def test_a_result_that_the_algebra_does_not_know_is_refused():
    case = cases.cases(1)[0]
    dims = len(case.terms[-1])
    with pytest.raises(ValueError, match="DTensor sent -1 elements"):
        cases.kind(case, cases.Layout.whole(dims), -1)


def test_placements_are_layouts_in_other_words():
    for one in layouts(3, list(cases.MESH)):
        if all(list(cut) == sorted(cut) for cut in one.cuts):
            assert cases.layout_of(cases.dtensor_placements(one), 3) == one


def test_a_block_cut_by_two_marks_sends_what_dtensor_sends(pools):
    config = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=4, n_embd=24)
    asked = Namespace(config=config, rows=3, length=5, over="gloo")
    for ranks in (2, 4):
        for _, found in pools[ranks].run(race.on_rank, bench.contest, asked, 1, 0):
            apart = found["DTensor"].pop("results differ by")
            all_reduce = 2 * (ranks - 1) * 3 * 5 * 24 // ranks
            assert found["ours"] == found["DTensor"] == bench.counted(4 * all_reduce, 4)
            assert apart < 1e-4


# --- 1-D, SUMMA and 3-D products


CASES = [(ranks, name) for ranks, grids in products.GRIDS.items() for name in grids]
UNEVEN = [(7, 5, 9), (8, 8, 8), (16, 9, 8)]


def sizes(m, n, k):
    return {"A": (m, k), "B": (k, n), "C": (m, n)}


@pytest.mark.parametrize("ranks, name", CASES)
def test_products_are_equal_and_send_what_the_layouts_say(pools, ranks, name):
    mesh = dict(zip("xyz", products.GRIDS[ranks][name], strict=True))
    for shape in UNEVEN:
        whole = sizes(*shape)
        if not all(layout.fits(products.LAYOUTS[m], whole[m], mesh) for m in "ABC"):
            continue
        found = pools[ranks].run(one_product, mesh, matrices(*shape))
        assert max(error for error, _, _ in found) < 1e-13
        promised = products.elements(whole, mesh)
        assert [sum(f[i] for f in found) for i in (1, 2)] == [promised, promised]
        assert promised >= products.least(*shape, ranks)


def test_a_layer_without_a_part_of_the_inner_index_adds_nothing(pools):
    found = pools[2].run(one_product, {"x": 1, "y": 1, "z": 2}, matrices(4, 3, 1))
    assert max(error for error, _, _ in found) < 1e-13


def test_on_eight_ranks_two_and_a_half_dimensions_reach_the_lower_bound():
    n, cube = 16, sizes(16, 16, 16)
    sent = lambda grid: products.elements(cube, dict(zip("xyz", grid, strict=True)))
    grids = {ranks: {name: sent(grid) for name, grid in of.items()} for ranks, of in products.GRIDS.items()}
    assert grids[8] == {"1-D": 7 * n**2, "SUMMA": 4 * n**2, "3-D": 3 * n**2}
    assert grids[8]["3-D"] / 8 == pytest.approx(products.least(n, n, n, 8), rel=1e-12)
    assert grids[4]["1-D"] == 3 * n**2 and grids[4]["SUMMA"] == grids[4]["1-D, two layers"] == 2 * n**2
    assert products.least(n, n, n, 4) == pytest.approx(3 * n**2 / 4 ** (2 / 3) - 3 * n**2 / 4)


def test_one_long_matrix_is_best_cut_along_one_dimension():
    """The bound's first case: rows of A and C stay, and the small B is gathered."""
    found = products.elements(sizes(64, 4, 4), {"x": 4, "y": 1, "z": 1})
    assert found / 4 == products.least(64, 4, 4, 4) == 12


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_no_grid_is_below_either_bound(ranks):
    cube = sizes(24, 24, 24)
    for grid in itertools.product(range(1, ranks + 1), repeat=3):
        mesh = dict(zip("xyz", grid, strict=True))
        if layout.ranks(mesh) == ranks and all(
            layout.fits(products.LAYOUTS[m], cube[m], mesh) for m in "ABC"
        ):
            sent = products.elements(cube, mesh) / ranks
            held = [
                layout.local_shape(cube[m], products.USED[m], mesh, dict.fromkeys(mesh, 0)) for m in "ABC"
            ]
            memory = sum(map(math.prod, held))
            assert sent >= products.least(24, 24, 24, ranks) - 1e-9
            # each with room for so much: Irony, Toledo & Tiskin 2004
            assert 2 * sent >= 24**3 / (2 * math.sqrt(2) * ranks * math.sqrt(memory)) - memory


def wrong_part(rank, world_size):
    axes = reshard.live_axes({"x": 2, "y": 1, "z": 1})
    try:
        products.multiply(torch.zeros(4, 8), torch.zeros(8, 8), 8, axes)
    except ValueError as error:
        return str(error)


def test_parts_of_the_wrong_shape_get_a_sentence(pools):
    assert "gives this rank 8 columns of A and 4 rows of B, not 8 and 8" in pools[2].run(wrong_part)[0]
