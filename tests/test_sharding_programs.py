"""GPT-2 partitioned from marks equals the serial run, and sends what the handwritten strategies send."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from sharding_cases import (
    CONFIG,
    LENGTH,
    ROWS,
    check_program,
    graph,
    handwritten,
    image,
    layouts,
    program,
    train_program,
)

from gpt2lab.reference import RECIPES, example_batch, example_weights, serial_run
from gpt2lab.sharding import layout
from gpt2lab.sharding.capture import capture
from gpt2lab.sharding.gpt2 import plain_attention
from gpt2lab.sharding.interpret import LOOK_UPS
from gpt2lab.sharding.marks import batch, megatron, sequence, zero
from gpt2lab.sharding.propagate import Mark, propagate

WIDE = CONFIG.n_embd
PARAMETERS = CONFIG.parameters
TOKENS = ROWS * LENGTH
UNUSED = (CONFIG.n_positions - LENGTH) * WIDE  # gradients of positions that no token has


CASES = {
    "nothing": ({}, {"x": 2}),
    "batch": (batch("x"), {"x": 2}),
    "batch over 3": (batch("x"), {"x": 3}),
    "Megatron": (megatron("x"), {"x": 2}),
    "Megatron over 4": (megatron("x"), {"x": 4}),
    "heads unevenly": (megatron("x"), {"x": 3}),
    "sequence": (sequence("x"), {"x": 2}),
    "sequence over 3": (sequence("x"), {"x": 3}),
    "ZeRO-3": (batch("x") | zero(graph(), "x", 2, weights=True), {"x": 2}),
    "batch and Megatron": (batch("x") | megatron("y"), {"x": 2, "y": 2}),
    "sequence and Megatron": (sequence("x") | megatron("y"), {"x": 2, "y": 2}),
    "batch and sequence": ({"tokens": Mark("batch:x, seq:y")}, {"x": 2, "y": 2}),
    "width of the residual": ({"wte.weight": Mark("embd:x")}, {"x": 2}),
    "one bias": ({"h.0.mlp.c_fc.bias": Mark("ff:x")}, {"x": 2}),
    "ZeRO-3 and Megatron": (batch("x") | megatron("y") | {"wpe.weight": Mark("S0R", 1)}, {"x": 2, "y": 2}),
    "batch over both": ({"tokens": Mark("batch:x, batch:y")}, {"x": 2, "y": 2}),
}


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("batch", "Megatron", "batch and Megatron")]
)
def test_marks_of_every_kind_equal_the_serial_run(pools, name):
    """Three of them are compared where their messages are counted."""
    check_program(pools, program(*CASES[name]))


def all_reduces(one, axis):
    """The sizes of the all-reduces over an axis, in elements of the part that is summed."""
    return [
        one.graph.nodes[value].size for kind, a, value in one.changes() if (kind, a) == ("all-reduce", axis)
    ]


def test_megatron_s_marks_give_megatron_s_collectives(pools):
    one = program(megatron("x"), {"x": 2})
    assert {kind for kind, _, _ in one.changes()} == {"all-reduce"}
    sums = all_reduces(one, "x")
    wide = TOKENS * WIDE
    # two forward and two backward a layer, embedding and head
    assert sums.count(wide) == 4 * CONFIG.n_layer + 2
    assert sorted(n for n in sums if n != wide) == [1, TOKENS, TOKENS, TOKENS]  # the loss
    forward = [value for _, _, value in one.changes()[: sums.index(TOKENS)]]
    assert len(forward) == 2 * CONFIG.n_layer + 1
    found = check_program(pools, one)
    ours = pools[2].run(handwritten, "tp=2")
    for (_, size, _, calls), own in zip(found, ours, strict=True):
        own_size = sum(size for (_, axis), (_, size) in own.items() if axis == "tp")
        assert size == own_size + 8  # three numbers a token in both, and here the loss itself, once
        assert list(calls) == ["all_reduce"]


def test_batch_marks_are_data_parallelism(pools):
    one = program(batch("x"), {"x": 2})
    sizes = [graph().nodes[n].size for n in graph().inputs[:-2] if n != "wpe.weight"]
    # positions in use, before they are put
    assert sorted(all_reduces(one, "x")) == sorted([1, LENGTH * WIDE, *sizes])
    found = check_program(pools, one)
    ours = pools[2].run(handwritten, "dp=2")
    own = sum(size for calls in ours for (_, axis), (_, size) in calls.items() if "dp" in axis)
    assert own == 2 * 8 * PARAMETERS
    assert sum(size for _, size, _, _ in found) == own + 2 * 8 * (1 - UNUSED)


def test_two_marks_on_a_square_are_both(pools):
    one = program(batch("x") | megatron("y"), {"x": 2, "y": 2})
    alone = program(megatron("x"), {"x": 2})
    assert sorted(all_reduces(one, "y")) == sorted(all_reduces(alone, "x"))
    assert len(all_reduces(one, "x")) == len(graph().inputs) - 2 + 1
    found = check_program(pools, one)
    ours = pools[4].run(handwritten, "dp=2,tp=2")
    own = sum(
        size for calls in ours for (_, axis), (_, size) in calls.items() if "dp" in axis or axis == "tp"
    )
    losses = 2 * 2 * 8 + 2 * 2 * 8  # one number over y, then over x, in two pairs each
    assert sum(size for _, size, _, _ in found) == own + losses - 2 * 2 * 8 * UNUSED


def test_sequence_marks_gather_keys_and_values_and_scatter_their_gradients():
    one = program(sequence("x"), {"x": 2})
    kinds = [kind for kind, _, value in one.changes() if one.graph.nodes[value].size == TOKENS * WIDE]
    assert kinds.count("all-gather") == 4 * CONFIG.n_layer
    assert kinds.count("reduce-scatter") == 2 * CONFIG.n_layer
    assert len(kinds) == 6 * CONFIG.n_layer


STEPS = {recipe.optimizer: recipe for recipe in RECIPES}


@cache
def trained(config=CONFIG):
    """The serial run: loss, norm and weights after five steps of SGD and of AdamW, by plain PyTorch."""
    return serial_run(config, ROWS, LENGTH)


def check_training(pools, one, optimizer, config=CONFIG):
    """Five steps of a partitioned program are those of the serial run. Returns what each rank sent in a step."""
    batch = example_batch(config, ROWS, LENGTH)
    given = {**example_weights(config), "tokens": batch.tokens, "targets": batch.targets}
    given |= {"total": torch.tensor(float(batch.total), dtype=torch.float64), "step": torch.ones(())}
    names = [n for n in one.graph.inputs if n[:2] in ("m ", "v ")]
    given |= {n: torch.zeros_like(given[n[2:]]) for n in names}
    right = trained(config)
    first = {"loss": right.losses["training"], "norm": right.norm}
    last = {f"new {n}": w for n, w in right.after[list(STEPS).index(optimizer)].items()}
    found = pools[layout.ranks(one.mesh)].run(train_program, one, given, first, last)
    for place, (once, error, sent) in zip(layout.places(one.mesh), found, strict=True):
        assert once <= 1e-10 and error <= 1e-10
        assert sent == [one.cost(place)] * 5
    return [sent[0] for _, _, sent in found]


TRAINED = {
    "batch": lambda whole: (batch("x"), {"x": 3}),
    "Megatron": lambda whole: (megatron("x"), {"x": 3}),
    "sequence": lambda whole: (sequence("x"), {"x": 2}),
    "batch and Megatron": lambda whole: (batch("x") | megatron("y"), {"x": 2, "y": 2}),
    "ZeRO-3": lambda whole: (batch("x") | zero(whole, "x", 3, weights=True), {"x": 3}),
}


@pytest.mark.parametrize(
    "optimizer, name", [*(("adamw", name) for name in TRAINED), ("sgd", "Megatron"), ("sgd", "ZeRO-3")]
)
def test_five_steps_of_training_are_those_of_the_serial_run(pools, name, optimizer):
    """Norm, clipping and update are part of the partitioned program. AdamW has all that SGD has, and moments."""
    whole = graph(STEPS[optimizer])
    check_training(pools, program(*TRAINED[name](whole), whole), optimizer)


def test_zero_s_marks_turn_the_all_reduces_into_reduce_scatters_and_all_gathers(pools):
    whole = graph(STEPS["adamw"])
    plain = program(batch("x"), {"x": 2}, whole)
    assert {kind for kind, _, _ in plain.changes()} == {"all-reduce"}
    one = program(batch("x") | zero(whole, "x", 2), {"x": 2}, whole)
    count = len(graph().inputs) - 2
    kinds = [kind for kind, _, _ in one.changes()]
    assert (kinds.count("reduce-scatter"), kinds.count("all-gather")) == (count, count)
    numbers = [whole.nodes[value].size for kind, _, value in one.changes() if kind == "all-reduce"]
    assert numbers == [1, 1]  # the loss, and the norm
    sent, before = check_training(pools, one, "adamw"), check_training(pools, plain, "adamw")
    extra = 2 * 8 * UNUSED  # of positions the moments need all gradients, also those that are zero
    assert sum(s[0] for s in sent) == sum(s[0] for s in before) + extra + 2 * 8  # and half the moments
    mine = [n for n in one.graph.inputs if n[:2] in ("m ", "v ")]
    kept = sum(one.graph.nodes[n].size for n in mine)
    for place in layout.places(one.mesh):
        held = [layout.local_shape(one.graph.nodes[n].shape, one.layouts[n], one.mesh, place) for n in mine]
        assert sum(torch.Size(s).numel() for s in held) <= 0.6 * kept


def test_zero_3_gathers_each_weight_forward_and_backward():
    one = program(batch("x") | zero(graph(), "x", 2, weights=True), {"x": 2})
    matrices = sorted(n for n in graph().inputs if n.endswith("mlp.c_fc.weight"))
    gathered = [value for kind, _, value in one.changes() if kind == "all-gather"]
    size = graph().nodes[matrices[0]].size
    # c_fc and c_proj
    assert sum(graph().nodes[value].size == size for value in gathered) == 2 * 2 * len(matrices)
    assert "reduce-scatter" in {kind for kind, _, _ in one.changes()}


def shuffled(of, seed):
    """The same graph with its nodes in another order, operands still first."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(len(of.nodes), generator=generator).tolist()
    rank = dict(zip(of.nodes, order, strict=True))
    nodes, todo = {}, dict(of.nodes)
    while todo:
        ready = [n for n, node in todo.items() if all(i in nodes for i in node.inputs)]
        name = min(ready, key=rank.get)
        nodes[name] = todo.pop(name)
    return type(of)(nodes, of.outputs, of.names)


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["Megatron", "sequence", "batch and Megatron"])
def test_propagation_is_idempotent_and_the_order_of_visits_does_not_matter(name):
    marks, mesh = CASES[name]
    once = propagate(graph(), marks, mesh)
    cut = {n: one for n, one in once.layouts.items() if one.axes}
    again = propagate(graph(), {n: Mark(one.text(list(mesh))) for n, one in cut.items()}, mesh)
    assert again.layouts == once.layouts
    for seed in range(3):
        assert propagate(shuffled(graph(), seed), marks, mesh).layouts == once.layouts


@pytest.mark.parametrize("turn", [False, True], ids=["as written", "the other way round"])
@pytest.mark.parametrize(
    "first, second", [("S0R", "RS0"), ("S0R", "closed"), ("closed", "S0R"), ("RS0", "S0R")]
)
def test_the_mark_of_the_lower_priority_stands_in_whatever_order_they_are_written(first, second, turn):
    mark = lambda said, priority: (
        Mark("RR", priority, closed=True) if said == "closed" else Mark(said, priority)
    )
    marks = {"wte.weight": mark(first, 0), "wt*": mark(second, 1)}
    found = propagate(graph(), dict(reversed(marks.items())) if turn else marks, {"x": 2})
    assert found.layouts["wte.weight"].text("x") == first.replace("closed", "RR")


def product(x, w):
    return (x @ w,)


MARKS = [layout.text("xy") for layout in layouts(2, "xy", ())]


@pytest.mark.parametrize("k", [2, 3, 5])
def test_any_two_marks_of_a_product_make_a_program_or_a_sentence(k, pools):
    """Of two axes that cut what is summed over, of length 3, only one can be used."""
    x, w = torch.randn(4, k, dtype=torch.float64), torch.randn(k, 4, dtype=torch.float64)
    whole, mesh, ran = capture(product, {"x": x, "w": w}, ["y"]), {"x": 2, "y": 2}, 0
    for of_x in MARKS:
        for of_w in MARKS:
            try:
                one = program({"x": Mark(of_x), "w": Mark(of_w)}, mesh, whole)
            except ValueError as error:
                turned = "S10" in of_x + of_w and "in another order than the mesh" in str(error)
                assert turned or "cannot be cut into" in str(error), (of_x, of_w)
                continue
            ran += 1
            if ran % 20 == 1 or (of_x, of_w) == ("RS0", "S1R"):
                check_program(pools, one, {"x": x, "w": w}, {"y": x @ w})
    assert ran >= 25


def softmax_of_rows(x):
    return (x.softmax(-1),)


def test_softmax_along_a_cut_axis_sends_a_maximum_and_a_sum_a_row(pools):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = capture(softmax_of_rows, {"x": x}, ["y"], {"x": ("row", "column")})
    one = program({"x": Mark("column:x")}, {"x": 3}, whole)
    assert [(kind, whole.nodes[value].shape) for kind, _, value in one.changes()] == [
        ("all-reduce", (5,))
    ] * 2
    assert one.results["y"] == one.layouts["x"]
    check_program(pools, one, {"x": x}, {"y": x.softmax(-1)})


def test_two_proposals_that_do_not_fit_together_are_not_both_taken():
    """Each axis alone may cut a dimension of 3; both make four parts."""

    def both(x, w):
        a, b = x * 2, w * 2
        return a.sum(1) + b.sum(1), a, b

    whole = capture(both, {"x": torch.ones(3, 4), "w": torch.ones(3, 5)}, ["y", "a", "b"])
    spread = propagate(whole, {"x": Mark("S0R"), "w": Mark("S1R")}, {"x": 2, "y": 2})
    assert spread.results["y"].text(["x", "y"]) == "S0"


def test_what_is_there_whole_is_cut_without_a_message(pools):
    """The first product gathers x, which lies by rows; the second needs its columns: a slice of what is there now."""
    drawn = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(size, generator=drawn, dtype=torch.float64)
        for name, size in (("x", (4, 6)), ("w", (6, 64)), ("v", (6, 64)))
    }
    whole = capture(lambda x, w, v: (x @ w, x @ v), given, ["a", "b"])
    marks = {"x": Mark("S0R"), "w": Mark("RS0"), "v": Mark("S0R"), "a": Mark("RS0")}
    one = program(marks, {"x": 2}, whole)
    assert [kind for kind, *_ in one.changes()] == ["all-gather", "reduce-scatter"]
    check_program(pools, one, given, {"a": given["x"] @ given["w"], "b": given["x"] @ given["v"]})


def test_a_result_lies_as_its_own_mark_says_and_else_as_its_input():
    whole = capture(lambda x: (2 * x,), {"x": torch.ones(4, 4)}, ["new x"])
    for marks, lies in (({}, "RS0"), ({"new x": Mark("S0R")}, "S0R")):
        spread = propagate(whole, {"x": Mark("RS0")} | marks, {"x": 2})
        assert spread.results["new x"].text(["x"]) == lies


ODD = {
    "a split into one piece": lambda x: x.split(8)[0] * 2,
    "one tensor joined": lambda x: torch.cat([x]) * 2,
    "numbers from their place in two dimensions": lambda x: x + torch.arange(32.0).view(8, 4),
    "windows over the last dimension": lambda x: x.unfold(-1, 2, 1),
    "a norm over two dimensions": lambda x: F.layer_norm(x, (8, 4), x.tanh(), 2 * x),
    "a norm without weights": lambda x: F.layer_norm(x, (4,)),
    "a norm without a bias": lambda x: F.layer_norm(x, (4,), x.sum(0)),
    "a sum rounded down": lambda x: torch.div(x @ torch.ones(4, 3, dtype=x.dtype), 3, rounding_mode="floor"),
    "a sum as whole numbers": lambda x: (x @ torch.full((4, 3), 0.3, dtype=x.dtype)).int() * 1.0,
    "a look-up in a table of two dimensions joined": lambda x: F.embedding(some(), x.reshape(32, 1)),
    "a gather of two dimensions joined": lambda x: x.reshape(1, 32).gather(1, some().view(1, 5)),
    "a gather of one row": lambda x: x.gather(1, torch.arange(4).view(1, 4)),
    "a gather of one column": lambda x: x.gather(0, torch.arange(8).view(8, 1)),
    "one window over all rows": lambda x: x.unfold(0, 8, 1),
    "a product plus one number": lambda x: torch.addmm(torch.ones(1).double(), torch.ones(3, 8).double(), x),
    "a scatter to two dimensions joined": lambda x: (
        (2 * x).reshape(1, 32).scatter(1, some(1).view(1, 1), 0.0)
    ),
    "a gradient of two dimensions joined": lambda x: (
        x + torch.ops.aten.embedding_dense_backward(torch.ones(5, 1), some(), 32, -1, False).view(8, 4)
    ),
}


def some(count: int = 5):
    """Places in 32, in each quarter of them."""
    return 7 * torch.arange(count) + 2


@pytest.mark.parametrize("name", ODD)
def test_rare_forms_of_an_operator_are_equal_along_every_cut(pools, name):
    given = {"x": torch.arange(32, dtype=torch.float64).view(8, 4)}
    whole = capture(lambda x: (ODD[name](x),), given, ["y"])
    for mark in ("S0R", "RS0"):
        check_program(pools, program({"x": Mark(mark)}, {"x": 2}, whole), given, {"y": ODD[name](given["x"])})


def test_what_a_look_up_does_not_name_does_not_count():
    """Rows 4 and 5 of a table are here; token 0 is elsewhere, and what is not finite stays where it is."""
    table, tokens, endless = (
        torch.tensor([[torch.inf], [1.0]]),
        torch.tensor([0, 5]),
        torch.tensor([torch.inf, 2]),
    )
    assert LOOK_UPS["embedding"]((table, tokens), torch.tensor([4, 5])).tolist() == [[0], [1]]
    grad = LOOK_UPS["embedding_dense_backward"]((endless[:, None], tokens), torch.tensor([4, 5]))
    assert grad.tolist() == [[0], [2]]


# --- operators whose cut needs messages inside


IMAGES = [
    ({"x": "h:x"}, {"x": 2}, 11, (3, 3)),
    ({"x": "h:x"}, {"x": 3}, 11, (3, 2)),
    ({"x": "h:x"}, {"x": 4}, 13, (2, 3)),
    ({"x": "h:x"}, {"x": 4}, 9, (5, 1)),  # the halo reaches over more than one neighbour
    ({"x": "h:x, w:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "h:x, n:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "h:x", "weight": "o:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "c:x"}, {"x": 2}, 7, (3, 3)),
]


@pytest.mark.parametrize("marks, mesh, height, kernel", IMAGES, ids=str)
def test_a_convolution_is_equal_along_every_cut(pools, marks, mesh, height, kernel):
    whole, given, want = image(height, kernel)
    one = program(marks, mesh, whole)
    check_program(pools, one, given, want)
    halos = [axis for kind, axis, _ in one.changes() if kind == "halo"]
    assert halos.count("x") == (3 if "h:x" in marks["x"] else 0)  # forward, again for the filters, and back


def test_a_halo_of_three_rows_sends_two_rows_at_each_border():
    whole, _, _ = image(12, (3, 3))
    one = program({"x": "h:x"}, {"x": 2}, whole)
    row = 2 * 4 * 9 * 8
    halos = [
        [step.cost(one.mesh, {"x": r}) for step in one.steps if getattr(step, "halo", None)] for r in (0, 1)
    ]
    both = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(*halos, strict=True)]
    assert both == [(2 * row, 2)] * 3  # 6 + 6 rows make 5 + 5: one row up, one down, forward and backward


def attention(q, k, v, grad):
    y = plain_attention(q, k, v, torch.arange(7))
    return y, *torch.autograd.grad(y, (q, k, v), grad)


def test_attention_along_the_keys_sends_a_maximum_and_sums(pools):
    """Keys and values lie cut, queries whole: a maximum and a sum a query, and the result as a partial sum."""
    generator = torch.Generator().manual_seed(0)
    given = {
        n: torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64)
        for n in ("q", "k", "v", "grad y")
    }
    leaves = [given[n].requires_grad_() for n in "qkv"]
    names = {n: ("b", "h", "s" if n in "kv" else "t", "d") for n in given}
    whole = capture(attention, given, ["y", "grad q", "grad k", "grad v"], names)
    right = F.scaled_dot_product_attention(*leaves, is_causal=True)
    want = dict(
        zip(["grad q", "grad k", "grad v"], torch.autograd.grad(right, leaves, given["grad y"]), strict=True)
    )
    given, want = {n: v.detach() for n, v in given.items()}, want | {"y": right.detach()}
    for ranks in (2, 3):
        one = program({"k": Mark("s:x"), "v": Mark("s:x"), "q": Mark("", closed=True)}, {"x": ranks}, whole)
        shapes = [(kind, whole.nodes[value].shape) for kind, _, value in one.changes()]
        row, wide = ("all-reduce", (2, 3, 7)), ("all-reduce", (2, 3, 7, 4))
        assert shapes == [
            row,
            row,
            wide,
            row,
            wide,
        ]  # maximum, sum, y; the row sum of softmax's backward, grad q
        check_program(pools, one, given, want)
