"""Layouts and what their changes cost: exact against slicing, bytes and messages equal to the table."""

import itertools

import pytest
import torch

from gpt2lab.ranks import comm
from gpt2lab.sharding import cost, layout, reshard
from gpt2lab.sharding.layout import Layout

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
    assert (
        Layout.named("", ("batch",)) == parse("R")
        and parse("-") == Layout(())
        and parse("P0").text(["x"]) == "P0"
    )


@pytest.mark.parametrize("mesh", [LINE, GRID, {"x": 3, "y": 2}])
def test_boxes_cover_the_tensor_once(mesh):
    for one in layout.layouts(2, list(mesh), partial=()):
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
    fitting = [one for one in layout.layouts(2, list(mesh)) if layout.fits(one, SHAPE, mesh)]
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
        error = (total - reshard.shard(whole, Layout(dst.cuts), axes)).abs().max().item()
        of_x = (x.grad - reshard.shard(whole, src.dual, axes)).abs().max().item()
        found.append((src, dst, max(error, of_x) / 1156, sent, returned))
    return found


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, GRID], ids=str)
def test_every_change_is_exact_and_its_bytes_are_the_table_s(pools, mesh):
    found = pools[layout.ranks(mesh)].run(every_change, mesh)
    assert len(found[0]) == {1: 4**2, 2: 18**2}[len(mesh)]
    for place, changes in zip(layout.places(mesh), found, strict=True):
        for src, dst, error, sent, returned in changes:
            assert error < 1e-14, (src, dst)
            assert sent == cost.path(src, dst, SHAPE, mesh).cost(mesh, place, 8), (src, dst)
            assert returned == cost.path(*cost.adjoint(src, dst), SHAPE, mesh).cost(mesh, place, 8), (
                src,
                dst,
            )


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
