# %% [markdown]
# # 14 Sharding algebra
#
# **The one-minute version.** Data parallelism, ZeRO, Megatron and sequence splitting look like four programs.
# They are one program, GPT-2, in which different tensors are cut. A *layout* says for each tensor who holds
# what. Each operator says which layouts fit together without a message, and for the others there is a table of
# prices. So write the model once, mark three tensors, and let a program work out the rest: which other tensors
# are cut, and where which collective is sent. It finds Megatron's all-reduces by itself.
#
# All of it is in one product, C = A B, on two ranks:

# %% tags=["setup"]
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F

from gpt2lab import launch
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import sharding as exercises
from gpt2lab.lessons.labs import sharding as labs
from gpt2lab.lessons.labs.types import Types
from gpt2lab.model import GPT2, MLP, GPT2Config
from gpt2lab.plots import sharding as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import RECIPES, example_batch, example_weights
from gpt2lab.sharding import cost, named, products, reshard, tofu
from gpt2lab.sharding.capture import capture
from gpt2lab.sharding.describe import analyse
from gpt2lab.sharding.expression import Sum
from gpt2lab.sharding.gpt2 import captured_gpt2, captured_module, plain_attention
from gpt2lab.sharding.interpret import Interpreter
from gpt2lab.sharding.layout import Layout, box, places
from gpt2lab.sharding.marks import batch, megatron, sequence, zero
from gpt2lab.sharding.operators import LIBRARY
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import Mark, propagate

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)

# %%
A, B = torch.randn(4, 6), torch.randn(6, 8)
(rows0, rows1), (left, right) = A.split(2), A.split(3, 1)
(top, bottom), (columns0, columns1) = B.split(3), B.split(4, 1)
four_cases = {
    "rows of A cut, B whole: rows of C, no message": torch.cat([rows0 @ B, rows1 @ B]),
    "A whole, columns of B cut: columns of C, no message": torch.cat([A @ columns0, A @ columns1], 1),
    "columns of A and rows of B cut: a term of C each, to be summed": left @ top + right @ bottom,
    "rows of A and columns of B cut: two quarters of C, so B is gathered first": torch.cat(
        [x @ torch.cat([columns0, columns1], 1) for x in (rows0, rows1)]
    ),
}
for case, C in four_cases.items():
    print(f"{case}; equal: {torch.allclose(C, A @ B)}")

# %% [markdown]
# GPT-2 is hundreds of such operators. Three marks, and the sums of lesson 06: *propagate* spreads marks over the graph,
# *partition* places the messages.

# %%
config = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)
graph = captured_gpt2(config, rows=7, length=11)

marks = {"wte.weight": "vocab:x", "h.*.attn.c_attn.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}
program = partition(graph, propagate(graph, marks, {"x": 2}), {"x": 2})
sizes = Counter((kind, graph.nodes[value].size) for kind, _, value in program.changes())
for (kind, size), count in sizes.items():
    print(f"{count:2} x {kind} of {size:5,} numbers")

# %% [markdown]
# 10 sums<!--above--> of 7 x 11 x 24 = 1,848<!--above--> numbers, (B, T, C): two forward and two backward for each of
# two layers, one for the embedding, one for the head. The other four are the loss over a cut vocabulary: a maximum and
# two sums for each of 77 tokens, then the loss itself. Beside PyTorch:

# %%
tokens = example_batch(config, 7, 11)
inputs = {**example_weights(config), "tokens": tokens.tokens, "targets": tokens.targets}
model = GPT2(config).double()
model.load_state_dict(example_weights(config))
serial_loss = model.loss(model(tokens.tokens), tokens.targets)
serial_loss.backward()
serial = {"loss": serial_loss.detach()} | {f"grad {n}": p.grad for n, p in model.named_parameters()}


def run(rank, world_size, program, given=inputs, want=serial):
    axes = reshard.live_axes(program.mesh)
    interpreter = Interpreter(program, axes)
    comm.clear_log()
    found = interpreter.run(given)
    sent, off = sum(e.bytes for e in comm.log), []
    for result, part in found.items():
        node = program.graph.nodes[program.graph.outputs[result]]
        right = reshard.shard(want[result].reshape(node.shape), program.results[result], axes)
        off.append((part - right.reshape(part.shape)).abs().max() / want[result].abs().max())
    return torch.stack(off).max().item(), sent


for rank, (worst, sent) in enumerate(launch(run, program, ranks=2)):
    promised = program.cost({"x": rank})[0]
    print(
        f"rank {rank}: loss and gradients equal {worst < 1e-12}; bytes by its calls {sent:,}, promised {promised:,}"
    )

# %% [markdown]
# ## Layouts
#
# A mesh has named axes. On each axis a tensor is cut along one dimension (S), or whole (R), or *partial* (P):
# every rank holds a term, and only the sum of the terms is the tensor. `S0R` is Alpa's notation: dimension 0
# is cut over axis 0, dimension 1 whole. `RS01`: dimension 1 is cut over both axes. P is not Alpa's: OneFlow has it
# (S, B for broadcast, P) and PyTorch's DTensor (`Partial`).

# %%
mesh = {"x": 2, "y": 2}
for text in ("S0R", "S0S1", "RS01", "RRP0"):
    layout = Layout.parse(text, list(mesh))
    parts = [" ".join(f"{s.start}:{s.stop}" for s in box((7, 5), layout, mesh, p)) for p in places(mesh)]
    print(f"{text:5}", "   ".join(parts))
for wrong in ("S0S0", "S0RP0"):
    try:
        Layout.parse(wrong, list(mesh))
    except ValueError as error:
        print(f"{wrong:5} {error}")

# %% [markdown]
# ## What a change costs
#
# n ranks, M bytes of the whole tensor. A *slice* is free, and so is becoming a term of a sum: the whole tensor on
# one rank and zeros on the others, or one's own rows and zeros elsewhere. All else is a collective of lesson 03.

# %%
line = {"x": 4}
texts = ["RR", "S0R", "RS0", "RRP0"]
layouts = [Layout.parse(t, ["x"]) for t in texts]
show(
    plots.cost_matrix(texts, cost.cost_table(layouts, (8, 16), line)),
    "computed",
    "bytes that a rank sends to change the layout of 8 x 16 numbers (1,024 bytes) on four ranks.",
    "A table of four layouts against four: zero on the diagonal, from RR and to RRP0; most from a partial sum to RR",
)

# %% [markdown]
# Derive three entries first: n - 1 parts pass through each rank of a ring.


# %% tags=["exercise"]
def costs(n, M):
    """Bytes a rank sends on n ranks for M bytes: {"S0 -> R": ..., "S0 -> S1": ..., "P -> S0": ...}."""
    ### BEGIN SOLUTION
    return {"S0 -> R": (n - 1) / n * M, "S0 -> S1": (n - 1) / n**2 * M, "P -> S0": (n - 1) / n * M}
    ### END SOLUTION


check("costs", exercises.costs, costs)


# %% [markdown] tags=["hint"]
# In a ring everything moves in n parts of M / n bytes. How many parts leave a rank in an all-gather, in a
# reduce-scatter? And of an all-to-all: a rank holds M / n bytes, and how much of that stays at home?


# %% tags=["wrong"]
# FAIL: A rank need not send to itself what it has (S0 -> R)
# MISTAKE: A rank is taken to send its part to itself as well.
def costs(n, M):
    return {"S0 -> R": M, "S0 -> S1": (n - 1) / n**2 * M, "P -> S0": (n - 1) / n * M}


# %% tags=["wrong"]
# FAIL: S0 -> S1 is no all-gather. Of its M / n a rank sends an n-th to each of the others
# MISTAKE: An all-to-all is taken for an all-gather.
def costs(n, M):
    return {"S0 -> R": (n - 1) / n * M, "S0 -> S1": (n - 1) / n * M, "P -> S0": (n - 1) / n * M}


# %% tags=["wrong"]
# FAIL: P -> S0 is half an all-reduce, because the sum is not needed everywhere
# MISTAKE: A reduce-scatter is taken for an all-reduce.
def costs(n, M):
    return {"S0 -> R": (n - 1) / n * M, "S0 -> S1": (n - 1) / n**2 * M, "P -> S0": 2 * (n - 1) / n * M}


# %% tags=["wrong"]
# FAIL: is missing
# MISTAKE: A change is left out.
def costs(n, M):
    return {"S0 -> R": (n - 1) / n * M, "P -> S0": (n - 1) / n * M}


# %% tags=["wrong"]
# FAIL: S0 -> S1: expected 180
# MISTAKE: A rank is taken to send n messages; one of them would go to itself.
def costs(n, M):
    return {"S0 -> R": (n - 1) / n * M, "S0 -> S1": M / n**2, "P -> S0": (n - 1) / n * M}


# %% tags=["wrong"]
# FAIL: a drawn case
# MISTAKE: Parts are whole numbers of bytes here: // where / belongs, right where n divides M.
def costs(n, M):
    part = M // n
    return {"S0 -> R": (n - 1) * part, "S0 -> S1": (n - 1) * M / n**2, "P -> S0": (n - 1) * part}


# %% [markdown]
# `reshard` makes the change on live ranks. 7 rows on 4 ranks are 2, 2, 2, 1: all 16 pairs, there and back, exactly,
# and the calls' bytes are the table's.

# %%
whole = torch.arange(35.0).view(7, 5)


def all_pairs(rank, world_size):
    axes, right = reshard.live_axes(line), []
    for src, dst in product(layouts, repeat=2):
        x, want = (reshard.shard(whole, one, axes) for one in (src, dst.dual))
        comm.clear_log()
        y = reshard.reshard(x.requires_grad_(), src, dst, whole.shape, axes)
        y.backward(want)  # the gradient of a partial sum is whole
        sent = sum(e.bytes for e in comm.log)
        y = comm.all_reduce(y.detach(), axes["x"]) if dst.partial else y
        ways = (src, dst), cost.adjoint(src, dst)
        promised = sum(cost.path(*way, whole.shape, line).cost(line, {"x": rank}, 8)[0] for way in ways)
        back = torch.equal(x.grad, reshard.shard(whole, src.dual, axes))
        right.append(torch.equal(y, want) and back and sent == promised)
    return sum(right)


print("right in value, gradient and bytes, of 16:", launch(all_pairs, ranks=4))

# %% [markdown]
# ### Backward: opposite, with R for P
#
# The gradient of a cut tensor is cut alike. The gradient of a partial sum is *whole* on each rank (every term
# counts fully), and that of a replicated one replicated (lesson 06's I; the gradient of its R is P). So the way
# back from S0R to RR is a slice, and from RRP0 to S0R (a reduce-scatter) an all-gather: the price of the opposite
# change, with RR for RRP0.
#
# ## The cheapest path
#
# On 2 x 2 ranks, a tensor is partial over both axes and is wanted whole. Two all-reduces, one over each axis, send 2 M
# a rank; one over all four ranks 2 · 3/4 M. The table of steps is a graph of layouts. Its shortest path
# finds 1.5 M with messages along single axes, so that one of them may stay inside a machine:

# %%
src, dst = Layout.parse("RRP01", ["x", "y"]), Layout.parse("RR", ["x", "y"])
way = cost.path(src, dst, (8, 16), mesh)
for step, layout in zip(way.steps, way.layouts[1:], strict=True):
    print(f"{step!s:24} then {layout.text(['x', 'y'])}")
print("bytes a rank:", way.cost(mesh, {"x": 0, "y": 0}, 8)[0], "of a tensor of", 8 * 16 * 8)

# %% [markdown]
# By hand: x is this rank's term; shapes are equal, and 4 divides their rows. Use `comm.reduce_scatter(x, axis, 0)`,
# `comm.all_reduce(x, axis)` and `comm.all_gather(x, axis, 0)`.


# %% tags=["exercise"]
def sum_over_both(x, x_axis, y_axis):
    """The sum over all ranks of a 2 x 2 mesh, whole on each, with 1.5 M bytes a rank."""
    ### BEGIN SOLUTION
    half = comm.reduce_scatter(x, x_axis, 0)
    return comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0)
    ### END SOLUTION


check("cheaper path", exercises.cheaper_path, sum_over_both)


# %% tags=["wrong"]
# FAIL: The elements add up, but are not where they belong
# MISTAKE: The halves are put together in the wrong order; the sum of all elements does not see that.
def sum_over_both(x, x_axis, y_axis):
    half = comm.reduce_scatter(x, x_axis, 0)
    return torch.cat(comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0).split(len(half))[::-1])


# %% tags=["wrong"]
# FAIL: all_reduce sends what nobody counts. Use the calls of comm that are counted
# MISTAKE: PyTorch's own call over all ranks: no byte of it is counted.
def sum_over_both(x, x_axis, y_axis):
    x = x.clone()
    torch.distributed.all_reduce(x)
    return x


# %% tags=["wrong"]
# FAIL: the ranks wait for each other for ever
# MISTAKE: Only the first rank of each pair calls.
def sum_over_both(x, x_axis, y_axis):
    return comm.all_reduce(x, x_axis) if x_axis.rank == 0 else x


# %% [markdown] tags=["hint"]
# Read the path above from top to bottom. The dear step is the sum over the second axis: do it while the tensor is as
# small as it can be.


# %% tags=["wrong"]
# FAIL: Right, but these are two all-reduces, 2 M a rank. Scatter over x first
# MISTAKE: Two all-reduces of the whole: right, for more bytes.
def sum_over_both(x, x_axis, y_axis):
    return comm.all_reduce(comm.all_reduce(x, x_axis), y_axis)


# %% tags=["wrong"]
# FAIL: expected shape (8, 4), got (4, 4)
# MISTAKE: The all-gather at the end is missing.
def sum_over_both(x, x_axis, y_axis):
    return comm.all_reduce(comm.reduce_scatter(x, x_axis, 0), y_axis)


# %% tags=["wrong"]
# FAIL: Every rank's term counts once
# MISTAKE: Only one axis is summed over.
def sum_over_both(x, x_axis, y_axis):
    return comm.all_reduce(x, x_axis)


# %% tags=["wrong"]
# FAIL: Right, but 1.5 M a rank are enough
# MISTAKE: Terms are gathered and added: right, for more bytes.
def sum_over_both(x, x_axis, y_axis):
    pairs = comm.all_gather(x[None].contiguous(), x_axis, 0).sum(0)
    return comm.all_gather(comm.all_reduce(pairs, y_axis)[None] / 2, x_axis, 0).sum(0)


# %% tags=["wrong"]
# FAIL: Is the return missing
# MISTAKE: The result is computed and not returned.
def sum_over_both(x, x_axis, y_axis):
    half = comm.reduce_scatter(x, x_axis, 0)
    comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0)


# %% tags=["wrong"]
# FAIL: Your function writes into the x that it was given; make a new tensor
# MISTAKE: The result is written over the input.
def sum_over_both(x, x_axis, y_axis):
    half = comm.reduce_scatter(x, x_axis, 0)
    x.copy_(comm.all_gather(comm.all_reduce(half, y_axis), x_axis, 0))
    return x


# %% [markdown]
# ## Operators say how they can be cut
#
# An operator is a lambda over indices (Tofu's idea), and its options follow from the expression: an index of the result
# cuts the result, an index of a sum leaves a partial sum.

# %%
rule = analyse(lambda A, B: lambda i, j: Sum(lambda k: A[i, k] * B[k, j]))
show(
    plots.product(rule.options),
    "drawing",
    "the options of C[i, j] = sum over k of A[i, k] B[k, j] on two ranks; grey is whole, hatched a partial sum.",
    "Three tilings of a matrix product, found from its index expression: rows, columns, and the inner index",
)


# %% [markdown]
# Write the rule for any einsum: which result does a cut along each index leave? `S0`, `S1`, ... or `P`.


# %% tags=["exercise"]
def einsum_rule(text):
    """{index: "S0", "S1", ... or "P"} for an einsum such as "ik,kj->ij"."""
    ### BEGIN SOLUTION
    inputs, output = text.split("->")
    return {one: f"S{output.index(one)}" if one in output else "P" for one in set(inputs) - {","}}
    ### END SOLUTION


check("einsum", exercises.einsum_rule, einsum_rule)


# %% tags=["wrong"]
# FAIL: An index of one operand that is not in the result is summed over as well, so k of ij,jk->i gives P
# MISTAKE: Only an index that both operands have is taken to be summed over.
def einsum_rule(text):
    inputs, output = text.split("->")
    both = set.intersection(*map(set, inputs.split(",")))
    rest = {one: "P" if one in both else "S0" for one in set(inputs) - {","}}
    return rest | {one: f"S{place}" for place, one in enumerate(output)}


# %% [markdown] tags=["hint"]
# Two kinds of indices: those that stand behind the arrow, and those that are summed away. The place of one of the
# first kind there is the dimension that is cut.


# %% tags=["wrong"]
# FAIL: Index k can be cut too
# MISTAKE: An index that is summed over is taken not to be cut.
def einsum_rule(text):
    output = text.split("->")[1]
    return {one: f"S{place}" for place, one in enumerate(output)}


# %% tags=["wrong"]
# FAIL: Cut along k the ranks hold different things, so not R
# MISTAKE: An index that is summed over is taken to leave a whole result, where parts are left.
def einsum_rule(text):
    inputs, output = text.split("->")
    return {one: f"S{output.index(one)}" if one in output else "R" for one in set(inputs) - {","}}


# %% tags=["wrong"]
# FAIL: Cut along j the result is S1, because it is dimension 1 of the result; not S0
# MISTAKE: The place of an index in the first operand is taken for that in the result.
def einsum_rule(text):
    inputs, output = text.split("->")
    first = inputs.split(",")[0]
    return {one: f"S{max(first.find(one), 0)}" if one in output else "P" for one in set(inputs) - {","}}


# %% tags=["wrong"]
# FAIL: Cut along k the result is P, because it is summed over; not S0
# MISTAKE: An index that is summed over is taken to cut dimension 0 of the result.
def einsum_rule(text):
    inputs, output = text.split("->")
    return {one: f"S{output.index(one)}" if one in output else "S0" for one in set(inputs) - {","}}


# %% tags=["wrong"]
# FAIL: ',' is no index
# MISTAKE: The comma is taken for an index.
def einsum_rule(text):
    inputs, output = text.split("->")
    return {one: f"S{output.index(one)}" if one in output else "P" for one in set(inputs)}


# %% tags=["wrong"]
# FAIL: 'z' is missing (a drawn case
# MISTAKE: A table of the operators that were seen.
def einsum_rule(text):
    inputs, output = text.split("->")
    letters = set(inputs) & set("ikjbthdsac")
    return {one: f"S{output.index(one)}" if one in output else "P" for one in letters}


# %% [markdown]
# The same analysis of other operators. Where something that is not linear follows a sum inside, the sum must
# be completed first: softmax along a cut axis sends a maximum and a sum for each row, and no more.

# %%
rows = []
for name, description in LIBRARY.items():
    of = [o for o in analyse(description).options if o.index not in ("", "partial")]
    free = " ".join(f"{o.index}{'*' if o.output == 'sum' else ''}" for o in of if o.free)
    inner = [(o.index, ", ".join(f"{op}[{' '.join(i)}]" for op, i in o.messages)) for o in of if o.messages]
    inner += [(o.index, "halo") for o in of if o.halos]
    rows.append((name, free, "; ".join(f"{index}: {sent}" for index, sent in inner)))
table(rows, ["operator", "free cuts (* leaves a partial sum)", "cuts with messages inside"])

# %% [markdown]
# Attention cut along its keys s (t: queries; row0: words) is what long-context decoding does. A convolution cut along
# the height of its image needs rows of its neighbours, a halo (lesson 11). Some cuts, live:

# %%
draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
step = lambda y, x: (y, *torch.autograd.grad(y.square().sum(), x))  # the result, and the gradient of x
image = {"x": draw(2, 3, 9, 9).requires_grad_(), "filters": draw(4, 3, 3, 3)}
line = {"x": draw(5, 8).requires_grad_(), "weight": draw(8), "bias": draw(1, 8)[0]}
qkv = {name: t.requires_grad_() for name, t in zip("qkv", draw(3, 2, 2, 8, 4), strict=True)}
convolve = lambda x, w: step(F.conv2d(x, w), x)
normalise = lambda x, weight, bias: step(F.layer_norm(x, (8,), weight, bias), x)
attend = lambda q, k, v: step(plain_attention(q, k, v, torch.arange(8)), k)
for name, function, given, cuts in (
    ("convolution, filters cut", convolve, image, {"filters": "S0RRR"}),
    ("convolution, channels cut", convolve, image, {"x": "RS0RR"}),
    ("convolution, height cut", convolve, image, {"x": "RRS0R"}),
    ("layer norm, width cut", normalise, line, {"x": "RS0"}),
    ("attention, keys cut", attend, qkv, {"k": "RRS0R", "v": "RRS0R"}),
):
    results = ["y", "grad k" if function is attend else "grad x"]
    of, want = capture(function, given, results), dict(zip(results, function(*given.values()), strict=True))
    given, want = ({n: t.detach() for n, t in some.items()} for some in (given, want))
    one = partition(of, propagate(of, cuts, {"x": 2}), {"x": 2})
    ranks = launch(run, one, given, want, ranks=2)
    found = [w < 1e-12 and sent == one.cost({"x": r})[0] for r, (w, sent) in enumerate(ranks)]
    kinds = Counter(kind for kind, _, _ in one.changes())
    print(f"{name:26} equal, also in bytes: {all(found)};", *(f"{kind} x {n}" for kind, n in kinds.items()))

# %% [markdown]
# ### Bug lab: two ways to forget a message
#
# gelu of a partial sum; and softmax of the columns that happen to be here.

# %%
torch.manual_seed(0)
X, W = torch.randn(6, 8), torch.randn(8, 4)


def forgotten(rank, world_size):
    axis = Mesh(tp=world_size)["tp"]
    partial = X.tensor_split(2, 1)[rank] @ W.tensor_split(2, 0)[rank]
    bug = comm.all_reduce(F.gelu(partial), axis)
    right = F.gelu(comm.all_reduce(partial, axis))
    columns = (X @ W).tensor_split(2, 1)[rank]
    e = (columns - comm.all_reduce(columns.amax(1), axis, "max")[:, None]).exp()
    return bug, right, columns.softmax(1), e / comm.all_reduce(e.sum(1), axis)[:, None]


(bug, right, local0, soft0), (_, _, local1, soft1) = launch(forgotten, ranks=2)
gelu, soft = F.gelu(X @ W), (X @ W).softmax(1)
own, summed = torch.cat([local0, local1], 1), torch.cat([soft0, soft1], 1)
print("gelu of a partial sum:", torch.allclose(bug, gelu), "  after the sum:", torch.allclose(right, gelu))
print("softmax of a shard:", torch.allclose(own, soft), "  with max and sum:", torch.allclose(summed, soft))
print("rows of the shards' softmax add up to", round(own.sum(1).mean().item(), 6))

# %%
with Types() as types:  # of lesson 06: layouts that know no dimensions, on one process
    term, shard = types.give(X[:, :4] @ W[:4], tp="P"), types.give((X @ W)[:, :2], tp="V")
    print("the two, as types:", types.said(F.gelu, term), types.said(torch.softmax, shard, 1), sep="\n- ")

# %% [markdown]
# ## Names: Mesh-TensorFlow
#
# Give dimensions names, and say which name is cut over which mesh axis. A layout is illegal where a tensor
# would be cut twice over one axis.

# %%
print("legal layouts of the MLP on 2 x 2:  ", len(named.legal_layouts(labs.MLP, mesh)))
print("legal layouts of a block on 2 x 2: ", len(named.legal_layouts(labs.BLOCK, mesh)))
print(named.complaint(labs.MLP, {"batch": "x", "ff": "x"}))


# %%
def tiles(x, y):
    tensors = {name: labs.MLP[name] for name in ("x", "c_fc.weight", "hidden", "c_proj.weight")}
    layout = {name: axis for name, axis in ((x, "x"), (y, "y")) if name != "none"}
    words = named.complaint(tensors, layout) or ", ".join(map(":".join, layout.items())) + " alone" * (x == y)
    return plots.who_holds(tensors, layout, {"x": 2, "y": 2}, words)


explore(
    tiles,
    "drawing",
    "the MLP, where {x} is to be cut over x and {y} over y, on 2 x 2 ranks: each tensor in halves, the numbers are "
    "ranks; two colours: both hold it, grey: all do.",
    "Four tensors in tiles, whose colours and numbers say which ranks hold them",
    posters=[{}, {"y": "seq"}],
    x=["batch", "seq", "embd", "ff"],
    y=["ff", "embd", "seq", "none"],
)

# %% [markdown]
# All 21 of the MLP run on 2 x 2 ranks, forward and backward, equal to serial. Fewest bytes is not yet best:
# `{}` sends nothing, since every rank does all the work.

# %%
mlp, x = MLP(config).double(), torch.randn(3, 5, config.n_embd, requires_grad=True)
weights, y = dict(mlp.named_parameters()), mlp(x)
y.backward(torch.ones_like(y))
given = {"x": x, "grad y": torch.ones_like(y)} | weights
want = {"y": y, "grad x": x.grad} | {f"grad {name}": p.grad for name, p in weights.items()}
given, want = ({name: t.detach() for name, t in of.items()} for of in (given, want))
mlp_graph, programs = captured_module(mlp, x, {name: labs.MLP[name] for name in ("x", *weights)}), []
for layout in named.legal_layouts(labs.MLP, mesh):
    spread = propagate(mlp_graph, named.marks(mlp_graph, layout, labs.MLP), mesh)
    programs.append((layout, partition(mlp_graph, spread, mesh)))


def run_each(rank, world_size):
    return [run(rank, world_size, one, given, want) for _, one in programs]


found = list(zip(*launch(run_each, ranks=4), strict=True))  # of each layout, what each rank found
equal = sum(all(worst < 1e-12 for worst, _ in each) for each in found)
print(f"equal to serial: {equal} of {len(programs)}")
sent = sorted((sum(f[1] for f in each), str(p[0])) for p, each in zip(programs, found, strict=True))
for size, layout in [*sent[:3], *sent[-2:]]:
    print(f"{size:8,} bytes  {layout}")

# %% [markdown]
# ## Marks spread: GSPMD
#
# GSPMD lets you mark a few tensors. In rounds, each operator looks at its operands
# and its result: where one of them is cut along an index, the others are cut along it too, until nothing
# changes. First from operands to results, then also backwards. Only `c_fc.weight` is marked.

# %%
one_mark = propagate(mlp_graph, {"c_fc.weight": "ff:x"}, {"x": 2})


def spreading(step):
    return plots.spreading(mlp_graph, one_mark.rounds, ["x"], step)


explore(
    spreading,
    "computed",
    "the MLP's operators in the order of the program, forward and backward, after round {step}.",
    "Boxes for the operators of an MLP, of which those that are decided after round {step} show their layout",
    posters=[{"step": 1}, {"step": 4}, {"step": len(one_mark.rounds)}],
    step=(1, len(one_mark.rounds), len(one_mark.rounds)),
)

# %% [markdown]
# The mark reached the hidden values, `c_fc.bias`, `c_proj.weight` (cut along its inputs, as Megatron does it)
# and their gradients.
#
# Now all of GPT-2, from the three marks above.

# %%
spread = propagate(graph, marks, {"x": 2})
recorded, cut = spread.rounds, {n: Mark(one.text(["x"])) for n, one in spread.layouts.items() if one.axes}
print("with all cuts as marks nothing changes:", propagate(graph, cut, {"x": 2}).layouts == spread.layouts)

# %%
chain = tofu.LinkChain(graph)
parts = ["embedding", "attention 0", "MLP 0", "attention 1", "MLP 1", "head"]
part_rows = {part: list(link.nodes) for part, link in zip(parts, chain.links, strict=True)}


def over_gpt2(step):
    return plots.spreading_model(part_rows, recorded, step)


explore(
    over_gpt2,
    "computed",
    "GPT-2's operators, forward then backward, after round {step} from three marks.",
    "Six rows of squares, one for each part of GPT-2; marks reach more and more of them, both in forward and backward",
    posters=[{"step": 1}, {"step": 6}, {"step": len(recorded)}],
    step=(1, len(recorded), 6),
)

# %% [markdown]
# **Propagate one step by hand.** Operators are einsums: `"h": ("bi,fi->bf", ("x", "W1"))` makes h from x and W1.
# `cut` says along which dimension a value is cut. Where an operand or the result is cut along an index, propose
# to cut there every other of its values that has the index and is not in `cut`. All proposals of a round are made
# from the same state. Return only the new cuts. Two proposals for one value never differ here.


# %% tags=["exercise"]
def next_round(operators, cut):
    """{value: dimension} of what one round of propagation decides."""
    ### BEGIN SOLUTION
    found = {}
    for result, (text, inputs) in operators.items():
        labels = text.replace("->", ",").split(",")
        values = dict(zip((*inputs, result), labels, strict=True))
        for value, own in values.items():
            for other, theirs in values.items() if value in cut else ():
                index = own[cut[value]]
                if other not in cut and index in theirs:
                    found[other] = theirs.index(index)
    return found
    ### END SOLUTION


check("one round", exercises.next_round, next_round)


# %% tags=["wrong"]
# FAIL: Your function changes `cut`. Return the new cuts, and leave it as it is
# MISTAKE: The new cuts are written into `cut`, too, where the caller still needs the old state.
def next_round(operators, cut):
    before = dict(cut)
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        for value, own in values.items():
            for other, theirs in values.items() if value in before else ():
                if other not in before and own[before[value]] in theirs:
                    cut[other] = theirs.index(own[before[value]])
    return {value: place for value, place in cut.items() if value not in before}


# %% tags=["wrong"]
# FAIL: from every value that is cut, to all operands
# MISTAKE: Of an operator only the first value that is cut proposes something.
def next_round(operators, cut):
    found = {}
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        value = next((value for value in values if value in cut), None)
        for other, theirs in values.items() if value else ():
            if other not in cut and values[value][cut[value]] in theirs:
                found[other] = theirs.index(values[value][cut[value]])
    return found


# %% [markdown] tags=["hint"]
# Treat operands and result alike: for each operator, pair every value with its letters. For a value in `cut`, which
# letter is at its dimension, and where does that letter stand in the others?

# %% [markdown] tags=["hint"]
# Collect the new cuts in a dict of their own. Were they written into `cut` at once, the next operator would see them,
# and two rounds would become one.


# %% tags=["wrong"]
# FAIL: from the result to the operands
# MISTAKE: Cuts pass only from operands to results.
def next_round(operators, cut):
    found = {}
    for result, (text, inputs) in operators.items():
        labels = text.replace("->", ",").split(",")
        for value, own in zip(inputs, labels, strict=False):
            if value in cut and own[cut[value]] in labels[-1] and result not in cut:
                found[result] = labels[-1].index(own[cut[value]])
    return found


# %% tags=["wrong"]
# FAIL: W2 is decided, but is two rounds away: use the state before the round
# MISTAKE: What this round decides is used in the same round.
def next_round(operators, cut):
    found, known = {}, dict(cut)
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        for value, own in values.items():
            for other, theirs in values.items():
                if value in known and other not in known and own[known[value]] in theirs:
                    found[other] = known[other] = theirs.index(own[known[value]])
    return found


# %% tags=["wrong"]
# FAIL: h was in cut already, and a mark is never changed
# MISTAKE: What was decided before is returned again.
def next_round(operators, cut):
    found = {}
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        for value, own in values.items():
            for other, theirs in values.items():
                if value in cut and own[cut[value]] in theirs:
                    found[other] = theirs.index(own[cut[value]])
    return found


# %% tags=["wrong"]
# FAIL: W2 is decided, but has no such index. Find the index by its letter
# MISTAKE: The number of a dimension is taken over, where its letter counts.
def next_round(operators, cut):
    found = {}
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        for value in values:
            for other, theirs in values.items():
                if value in cut and other not in cut and cut[value] < len(theirs):
                    found[other] = cut[value]
    return found


# %% tags=["wrong"]
# FAIL: also from one operand to another
# MISTAKE: Cuts do not pass from one operand to another.
def next_round(operators, cut):
    found = {}
    for result, (text, inputs) in operators.items():
        *terms, output = text.replace("->", ",").split(",")
        for value, own in zip(inputs, terms, strict=True):
            if value in cut and result not in cut and own[cut[value]] in output:
                found[result] = output.index(own[cut[value]])
            if result in cut and value not in cut and output[cut[result]] in own:
                found[value] = own.index(output[cut[result]])
    return found


# %% [markdown]
# Three marks were enough for GPT-2. Find them again: at most three, with * for "any layer".

# %%
h = "h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight"
for name in ("wte.weight", *h, "tokens"):
    print(f"{name:24}", " ".join(graph.names[name]))


# %% tags=["exercise"]
def my_marks():
    """Marks, {name: "dimension:x"}, that make GPT-2 Megatron's on the axis x."""
    ### BEGIN SOLUTION
    return {"wte.weight": "vocab:x", "h.*.attn.c_proj.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}
    ### END SOLUTION


check("Megatron's marks", exercises.megatron, my_marks)


# %% [markdown] tags=["hint"]
# One mark for the embedding, one for attention, one for the MLP. In attention, c_attn's outputs *or* c_proj's inputs
# carry the heads: the mark spreads from either to the other.


# %% tags=["wrong"]
# FAIL: Three marks are enough, the rest follows
# MISTAKE: Marks for every block by name, and for what follows by itself: right, and more than are needed.
def my_marks():
    both = {f"h.{i}.mlp.{w}.weight": "ff:x" for i in range(2) for w in ("c_fc", "c_proj")}
    return both | {"wte.weight": "vocab:x", "h.*.attn.c_attn.weight": "heads:x"}


# %% tags=["wrong"]
# FAIL: Nothing cuts wte.weight (its vocabulary) in every layer
# MISTAKE: The embedding is not marked.
def my_marks():
    return {"h.*.attn.c_attn.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}


# %% tags=["wrong"]
# FAIL: Nothing cuts h.1.attn.c_attn.weight (its heads) in every layer
# MISTAKE: A name instead of a pattern: only the first block is marked.
def my_marks():
    return {"wte.weight": "vocab:x", "h.0.attn.c_attn.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}


# %% tags=["wrong"]
# FAIL: The program also sends all-gather, all-to-all, reduce-scatter: not Megatron's
# MISTAKE: The wrong dimensions are cut: not Megatron's.
def my_marks():
    return {"wte.weight": "vocab:x", "h.*.attn.c_attn.weight": "width:x", "h.*.mlp.c_proj.weight": "embd:x"}


# %% tags=["wrong"]
# FAIL: Nothing cuts h.1.mlp.c_fc.weight (its ff) in every layer
# MISTAKE: The MLP is not marked.
def my_marks():
    return {"wte.weight": "vocab:x", "h.*.attn.c_attn.weight": "heads:x"}


# %% tags=["wrong"]
# FAIL: marks.megatron knows the answer
# MISTAKE: The package's own marks are called: they are what is to be found.
def my_marks():
    return megatron("x")


# %% tags=["wrong"]
# FAIL: A mark cuts a dimension that is summed over, where heads, neurons or words are to be cut
# MISTAKE: The inputs of c_attn are cut, which are summed over: heads follow, and a sum for each q, k, v with them.
def my_marks():
    return {"wte.weight": "vocab:x", "h.*.attn.c_attn.weight": "width:x", "h.*.mlp.c_fc.weight": "ff:x"}


# %% [markdown]
# ## The partitioner
#
# Propagation says how values *should* lie. For each operator the partitioner picks one of its options, among
# those along which something is cut already, with the fewest bytes; and inserts changes of layout. A partial
# sum is completed at once, unless its one reader is linear and completing later costs no more (so the two
# gradients of the tied embedding become one message).
#
# The same graph under four kinds of marks, and two at once on 2 x 2:

# %%
step_graph = captured_gpt2(config, 7, 11, RECIPES[1])
cases = {
    "batch": (graph, batch("x"), {"x": 2}),
    "Megatron": (graph, megatron("x"), {"x": 2}),
    "sequence": (graph, sequence("x"), {"x": 2}),
    "ZeRO-3": (graph, batch("x") | zero(graph, "x", 2, weights=True), {"x": 2}),
    "ZeRO-1": (step_graph, batch("x") | zero(step_graph, "x", 2), {"x": 2}),
    "both": (graph, batch("x") | megatron("y"), {"x": 2, "y": 2}),
}
made = {name: partition(g, propagate(g, m, axes), axes) for name, (g, m, axes) in cases.items()}
rows = []
for name, one in made.items():
    calls = Counter(kind for kind, _, _ in one.changes())
    rows.append(
        (name, *(calls[k] for k in plots.KINDS if k != "all-to-all"), f"{one.cost(places(one.mesh)[0])[0]:,}")
    )
table(rows, ["marks", "all-reduce", "all-gather", "reduce-scatter", "bytes, rank 0"])

# %%
place = {name: number for number, name in enumerate(graph.nodes)}
where = {
    name: [(place[value], kind, graph.nodes[value].size) for kind, _, value in made[name].changes()]
    for name in ("batch", "Megatron", "sequence", "ZeRO-3")
}
first_backward = place[graph.outputs["loss"]]
show(
    plots.program_messages(where, first_backward),
    "computed",
    "what four programs send, made from one graph; heights are elements of the whole tensor.",
    "Four strips: batch sends only in backward, Megatron evenly, sequence splitting per layer, ZeRO-3 everywhere",
)

# %% [markdown]
# - **batch**: one all-reduce for each gradient, and the loss. Data parallelism.
# - **sequence**: keys and values are gathered, forward and again backward; their gradients reduce-scattered.
#   Lesson 10's `kv`; all else as **batch**.
# - **ZeRO-3**: 8 matrices of blocks are gathered twice, `wte` three times, 18 norms and biases once; gradients are
#   reduce-scattered. The loss and the read rows of `wpe` are all-reduced. Marks of weights have a lower *priority*:
#   they spread after those of the batch.
# - **ZeRO-1**: only AdamW's moments are marked. Then the gradient is wanted cut, the all-reduce becomes a
#   reduce-scatter, and the new weights are gathered: the rewrite of lesson 05.
#
# All run, equal to serial:

# %%
step = labs.adamw_step(config, 7, 11, RECIPES[1])  # with torch's AdamW: loss, norm, weights and moments
for name, one in made.items():
    pair = step if name == "ZeRO-1" else (inputs, serial)
    same = all(error < 1e-12 for error, _ in launch(run, one, *pair, ranks=len(places(one.mesh))))
    print(f"{name:9} on {len(places(one.mesh))} ranks equals serial: {same}")

# %% [markdown]
# `make_fx` captures the graph: it runs loss and `autograd.grad` once on tensors without numbers and writes down every
# operator, backward's too.

# %%
show_source(Interpreter._change, Interpreter.run)

# %% [markdown]
# ## Who places the marks? Tofu
#
# Tofu lets a program choose. GPT-2's graph becomes a chain: embedding, attention, MLP, ..., head, each with its
# backward. At each halving of the ranks a dynamic program cuts every link along one dimension, so that the links, and
# the changes of layout between them, send the fewest bytes. C is 24. Beside the price stands what the program sends:

# %%
for rows_of_batch in (2, 7, 12):
    this = tofu.LinkChain(captured_gpt2(config, rows_of_batch, 11))
    for level, choices in enumerate(this.recursive("xy")):
        cut = " ".join(
            f"{part.split()[0]}:{c[-1]}" for part, c in zip(parts, choices, strict=True) if "1" not in part
        )
        halved = dict.fromkeys("xy"[: level + 1], 2)
        price, sent = this.cost(choices, halved), tofu.bytes_of_all(this.program(choices, halved))
        print(
            f"{rows_of_batch * 11:3} tokens, halving {level + 1}: {cut:48} {price:7,}; program {sent:7,} bytes"
        )
short = tofu.LinkChain(captured_gpt2(replace(config, n_layer=1), 7, 11))
ways = list(product(*(short.choices(n, (), {"x": 2}) for n in range(short.count))))
least = min(short.cost(list(way), {"x": 2}) for way in ways)
found = short.cost(short.recursive("x")[0], {"x": 2})
print(f"one layer, {len(ways)} ways to cut it: the dynamic program finds the least of all: {found == least}")

# %%
two_parts = [("ff",) if part.startswith("MLP") else ("batch",) for part in parts]
price, sent = chain.cost(two_parts, {"x": 2}), tofu.bytes_of_all(chain.program(two_parts, {"x": 2}))
print(f"77 tokens, batch and in MLPs ff: price {price:,}; program {sent:,} bytes")
one_each = [tofu.bytes_of_all(made[name]) for name in ("batch", "Megatron")]
print(f"batch and Megatron send the same at {77 * one_each[0] / one_each[1]:.0f} tokens")

# %% [markdown]
# Few tokens: Megatron. Many: the batch. The whole model's border is at 64<!--above--> tokens; an MLP's,
# B T = 4 C = 96 (lesson 06), is higher. So with 77 tokens, MLPs cut along ff and all else along the batch send less,
# 245,392<!--above--> bytes against 250,384. The dynamic program does not see that: it prices a border as if
# each link first completed its sums, where the partitioner goes directly to the next layout. Here no program sends more
# than its price; with other cuts some do.
#
# At the second halving each half has fewer tokens, and of 77 it cuts all weights: the marks called *both* above. On
# four ranks:

# %%
found_cut = chain.program(chain.recursive("xy")[-1], {"x": 2, "y": 2})
all_batch = partition(graph, propagate(graph, {"tokens": "batch:x, batch:y"}, mesh), mesh)
same = all(error < 1e-12 for error, _ in launch(run, found_cut, ranks=4))
print(f"the cut that was found equals serial: {same}")
print(f"bytes: {tofu.bytes_of_all(found_cut):,}; batch over both axes {tofu.bytes_of_all(all_batch):,}")

# %% [markdown]
# **A puzzle, with a score.** You place the marks: a GPT-2 of one layer and 4 x 8 tokens, four ranks, each with room for
# 30 % of the weights and half of the tokens. `"vocab:x, embd:y"` cuts two dimensions. Let all ranks together send
# least. The marks called *both* send 117 KiB, and need room for 55 %.


# %% tags=["exercise"]
def cheapest_marks():
    """Marks on the axes x and y, two ranks each: {name: "dimension:axis, ..."}."""
    ### BEGIN SOLUTION
    follows = {"h.*.attn.c_attn.weight": "heads:y", "h.*.mlp.c_fc.weight": "ff:y"}
    return {"tokens": "batch:x", "wte.weight": "embd:x, vocab:y"} | follows
    ### END SOLUTION


check("the cheapest marks", exercises.fewest_bytes, cheapest_marks)

# %% [markdown] tags=["hint"]
# Megatron's marks on y halve the weights, and x has to halve them again, as ZeRO-3 does it, along a dimension that
# y leaves whole. A mark spreads: on which weight does one do for all?


# %% tags=["wrong"]
# FAIL: a rank holds 55% of the weights
# MISTAKE: Right, and it holds too much: the embedding is cut on one axis only.
def cheapest_marks():
    return batch("x") | megatron("y")


# %% tags=["wrong"]
# FAIL: KiB; at most 200 pass
# MISTAKE: The embedding is cut along its width on both axes: more bytes.
def cheapest_marks():
    return {
        "tokens": "batch:x",
        "wte.weight": "embd:x, embd:y",
        "h.*.attn.c_attn.weight": "heads:y",
        "h.*.mlp.c_fc.weight": "ff:y",
    }


# %% tags=["wrong"]
# FAIL: a rank has 32 of 32 tokens
# MISTAKE: No mark on tokens: every rank has the whole batch.
def cheapest_marks():
    both = ("x", "y")
    return {"wte.weight": "vocab:x, vocab:y", "h.*.attn.c_attn.weight": "heads:x, heads:y"} | {
        "h.*.mlp.c_fc.weight": ", ".join(f"ff:{axis}" for axis in both)
    }


# %% tags=["wrong"]
# FAIL: does not fit a tensor with dimensions
# MISTAKE: A dimension that this tensor does not have.
def cheapest_marks():
    return {"tokens": "batch:x", "wte.weight": "heads:y"}


# %% tags=["wrong"]
# FAIL: the program has no such value
# MISTAKE: A name that the program does not have.
def cheapest_marks():
    return {"tokens": "batch:x", "wte": "vocab:y"}


# %% tags=["wrong"]
# FAIL: marks: return a dict
# MISTAKE: Returns text, not marks.
def cheapest_marks():
    return "batch:x"


# %% [markdown]
# ## One product on a grid of ranks
#
# A mesh x, y, z for C = A B: x cuts the rows of C, y its columns, z the inner index. One axis alone is 1-D. x and y
# are SUMMA, which broadcasts panels of A and B. z adds layers, each with its part of the inner index: a term of C.
# As many layers as rows and columns is 3-D, fewer is 2.5-D. No algorithm that makes all n³ products, evenly dealt, from
# matrices dealt evenly once, sends less than the bound, whatever its memory.


# %%
def on_grid(rank, world_size, grid, a, b):
    axes = reshard.live_axes(dict(zip("xyz", grid, strict=True)))
    part = lambda name, whole: reshard.shard(whole, products.LAYOUTS[name], axes)
    mine, other = part("A", a).requires_grad_(), part("B", b).requires_grad_()
    comm.clear_log()
    c = products.multiply(mine, other, a.size(1), axes)
    c.backward(torch.ones_like(c))
    gradient = part("A", b.sum(1).expand(a.shape))
    equal = torch.allclose(c, part("C", a @ b)) and torch.allclose(mine.grad, gradient)
    return equal, sum(event.bytes for event in comm.log) / a.element_size()


n, rows = 24, []
a, b = torch.randn(2, n, n)
for ranks, grids in products.GRIDS.items():
    for name, grid in grids.items():
        equal, sent = zip(*launch(on_grid, grid, a, b, ranks=ranks), strict=True)
        numbers = f"{sum(sent) / 2 / ranks / n**2:.3f}", f"{products.least(n, n, n, ranks) / n**2:.3f}"
        rows.append((ranks, name, " x ".join(map(str, grid)), all(equal), *numbers))
table(rows, ["ranks", "algorithm", "x y z", "equal", "sent a rank, of n², by its calls", "lower bound"])

# %% [markdown]
# On eight ranks 2 x 2 x 2 reaches the bound. Backward sends the same again.
#
# ## Cut operators, or place them?
#
# Everything above is *intra*-operator: each operator is cut. *Inter*-operator parallelism gives whole operators
# to ranks. Take Y = X W1, Z = Y W2, with a *narrow* Y, as between two blocks. Cut: columns, then rows, and an
# all-reduce of Z. Placed: W1 on rank 0, W2 on rank 1, and Y is sent once; but each rank waits while the other works.

# %%
SECONDS = 0.04  # a product's pretended time on one rank


def both_cut(rank, world_size, x, w1, w2):
    axis = Mesh(tp=world_size)["tp"]
    part = x @ w1.tensor_split(2, 1)[rank]
    time.sleep(SECONDS)  # two halves of a product
    return comm.all_reduce(part @ w2.tensor_split(2, 0)[rank], axis)


def one_each(rank, world_size, x, w1, w2):
    axis = Mesh(pp=world_size)["pp"]
    if rank == 0:
        time.sleep(SECONDS)
        return comm.send(x @ w1, axis, 1)
    y = comm.recv(x.new_empty(len(x), w1.size(1)), axis, 0)
    time.sleep(SECONDS)
    return y @ w2


def timed(rank, world_size, way, *matrices):
    axis = Mesh(dp=world_size)["dp"]
    comm.barrier(axis)
    comm.clear_log()
    start = time.perf_counter()
    z = way(rank, world_size, *matrices)
    sent = sum(event.bytes for event in comm.log)
    comm.barrier(axis)
    return z, sent, 1 - SECONDS / (time.perf_counter() - start)


# %% tags=["measured"]
X, W1, W2 = torch.randn(6, 32), torch.randn(32, 8), torch.randn(8, 32)
bytes_sent, idle = {}, {}
for name, way in (("cut (intra)", both_cut), ("placed (inter)", one_each)):
    found = launch(timed, way, X, W1, W2, ranks=2)
    print(f"{name} equals serial: {torch.allclose(found[1][0], X @ W1 @ W2)}")
    bytes_sent[name] = sum(f[1] for f in found)
    idle[name] = 100 * sum(f[2] for f in found) / 2
show(
    plots.intra_inter(bytes_sent, idle),
    "paced",
    "two products with a narrow middle on two ranks, X on both; work is slept. Idle is what remains of the time.",
    "W1 and W2 in two colours each, or one each; bars: placing sends an eighth here, and idles half the time",
)

# %% [markdown]
# Placing sends little and idles; micro-batches fill its idle time (lesson 07). Cutting keeps everybody busy and sends
# more (less, where the middle is wide).
#
# ## Questions
#
# 1. Why is RR to RRP0 free, and what do the ranks hold afterwards?
# 2. A tensor lies S0 over x, and is wanted S1 over x. Compare all-to-all with all-gather and slice.
# 3. Which options does `C[i] = max over k of A[i, k]` have? May the partial result wait for a later sum?
# 4. Why does ZeRO-3 by marks need a *priority*: batch first, weights later?
#
# <details><summary>Answers</summary>
#
# 1. One rank keeps the tensor, the others hold zeros; the sum is right, and nothing travels.
# 2. All-to-all sends (n-1)/n² M a rank, all-gather (n-1)/n M: n times as much, and needs the whole in memory.
# 3. i: cut result. k: partial *maximum*. It is not linear, so it is completed before anything is added.
# 4. On one axis an operator can be cut along one index. If weights spread first, activations would be cut along
#    features, and that is tensor parallelism.
#
# </details>
#
# ## Read on
#
# - Shazeer et al. 2018, *Mesh-TensorFlow*, arXiv:1811.02084: dimensions with names.
# - Xu et al. 2021, *GSPMD*, arXiv:2105.04663: how marks spread.
# - Wang, Huang & Li 2019, *Tofu*, arXiv:1807.08887: cuts in turn.
# - Zheng et al. 2022, *Alpa*, arXiv:2201.12023, section 4: as an integer program.
# - Yuan et al. 2021, *OneFlow*, arXiv:2110.15032: S, B and P, and the table of prices between them.
# - van de Geijn & Watts 1997, *SUMMA*; Agarwal 1995 (3-D); Solomonik & Demmel 2011 (2.5-D); Al Daas et al.
#   2022, arXiv:2205.13407: bounds on bytes.
#
# **Next**: [15 Device meshes](15_device_meshes.ipynb).
