# %% [markdown]
# # 06 Tensor parallel
#
# **The one-minute version.** A transformer layer is four large matrix products with small things between
# them. Cut the matrices, and every rank does a part of every product, on all tokens. Cut the first
# matrix of a pair by *columns* and the second by *rows*: nothing is sent between them. Attention falls apart into
# heads by itself. What remains are two sums a layer forward and two backward.
#

# %% tags=["setup"]
from dataclasses import replace

import torch
import torch.nn.functional as F

from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check, cuts, travelling_sum
from gpt2lab.lessons.exercises import tensor as exercises
from gpt2lab.lessons.labs import rings, thresholds, typed
from gpt2lab.lessons.labs import tensor as lab
from gpt2lab.lessons.labs.types import GRADIENT
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import sequence, tensor
from gpt2lab.planner import tensor_costs
from gpt2lab.plots import tensor as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import Plan, verify

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)

# %%
two, four = Ranks(2), Ranks(4)
print(verify("tp=2", ranks=two))

# %% [markdown]
# ## A product cut three ways
#
# Y = X W, one row of X for each token. Three dims can be cut; each asks for another message.

# %%
show(
    plots.tilings(),
    "drawing",
    "who holds what when Y = X W is cut on two ranks; grey is whole on both, hatched is a partial sum.",
    "Three tilings of a matrix product: rows of X, columns of W, the inner dim, with the sums each needs",
)

# %% [markdown]
# The second is *column parallel*, the third *row parallel*.

# %%
torch.manual_seed(0)
X, W = torch.randn(6, 4), torch.randn(4, 8)


def three_ways(rank, world_size):
    axis = Mesh(tp=world_size)["tp"]
    part = lambda t, dim: t.tensor_split(world_size, dim)[rank]
    by_rows = part(X, 0) @ W  # some tokens, complete
    by_columns = X @ part(W, 1)  # all tokens, some features, complete
    by_inner = comm.all_reduce(part(X, 1) @ part(W, 0), axis)  # all of it, after a sum
    return by_rows, by_columns, by_inner


(rows0, columns0, inner0), (rows1, columns1, inner1) = two.run(three_ways)
joined = {"rows": torch.cat([rows0, rows1]), "columns": torch.cat([columns0, columns1], 1), "inner": inner1}
for name, y in joined.items():
    print(f"{name:8} equals X W: {torch.allclose(y, X @ W)}")

# %% [markdown]
# Row parallel wants its *input* cut by features: just what column parallel leaves behind. The other order
# needs a sum in the middle: gelu may be applied to a slice of the features, not to a partial sum.

# %%
a, b = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 2.0])
print("gelu of the sum:       ", [round(v, 3) for v in F.gelu(a + b).tolist()])
print("sum of the gelus:      ", [round(v, 3) for v in (F.gelu(a) + F.gelu(b)).tolist()])
print("gelu of slices, joined:", torch.equal(torch.cat([F.gelu(a), F.gelu(b)]), F.gelu(torch.cat([a, b]))))

# %% [markdown]
# ## Columns, then rows: the MLP
#
# Two matrices and gelu, C to 4C to C. Cut the first by columns, the second by rows:
#
# $$h_r=\text{gelu}(x\,W_{1,r})\qquad y=\sum_r h_r\,W_{2,r}$$
#
# and backward, where z is what gelu gets:
#
# $$dW_{2,r}=h_r^T\,dy\qquad dh_r=dy\;W_{2,r}^T\qquad dW_{1,r}=x^T\,dz_r\qquad dx=\sum_r dz_r\,W_{1,r}^T$$
#
# In Megatron **g** stands at the end (sum forward, nothing backward)
# and **f** at the beginning (nothing forward, sum backward).


# %%
def mlp_by_matrices(rank, world_size, x, w1, w2):
    axis = Mesh(tp=world_size)["tp"]
    w1, w2 = w1.tensor_split(world_size, 1)[rank], w2.tensor_split(world_size, 0)[rank]
    comm.clear_log()
    z = x @ w1
    y = comm.all_reduce(F.gelu(z) @ w2, axis)  # g
    dy = 2 * y  # of the loss, the sum of squares
    dz = dy @ w2.T * lab.gelu_slope(z)
    dx = comm.all_reduce(dz @ w1.T, axis)  # f, backward
    return dx, x.T @ dz, F.gelu(z).T @ dy, sum(e.bytes for e in comm.log) // 8


def mlp_by_batch(rank, world_size, x, w1, w2):
    axis, x = Mesh(dp=world_size)["dp"], x.tensor_split(world_size, 0)[rank]
    comm.clear_log()
    z = x @ w1
    dy = 2 * (F.gelu(z) @ w2)
    dz = dy @ w2.T * lab.gelu_slope(z)
    d1, d2 = comm.all_reduce(x.T @ dz, axis), comm.all_reduce(F.gelu(z).T @ dy, axis)
    return dz @ w1.T, d1, d2, sum(e.bytes for e in comm.log) // 8


# %% [markdown]
# Data parallel sums the gradients, 8 C² numbers. Tensor parallel sums activations, B T C numbers twice.

# %%
guess = predict("Below how many tokens does tensor parallelism send less?", "C", "2 C", "4 C", "8 C")

# %%
C = 16
w1, w2 = torch.randn(C, 4 * C) / 4, torch.randn(4 * C, C) / 8
dots = []
for tokens in (C, 4 * C, 8 * C):
    x = torch.randn(tokens, C, requires_grad=True)
    v1, v2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    (F.gelu(x @ v1) @ v2).square().sum().backward()
    ways = mlp_by_batch, mlp_by_matrices
    by_batch, by_matrices = (two.run(way, x.detach(), w1, w2) for way in ways)
    same = [
        torch.allclose(by_batch[0][1], v1.grad),
        torch.allclose(torch.cat([r[1] for r in by_matrices], 1), v1.grad),
        torch.allclose(torch.cat([r[2] for r in by_matrices], 0), v2.grad),
        torch.allclose(by_matrices[0][0], x.grad),
    ]
    dots.append((tokens, by_batch[0][3], by_matrices[0][3]))
    sent = "sent {1} by batch, {2} by matrices".format(*dots[-1])
    print(f"{tokens:4} tokens: gradients equal {all(same)}; {sent}")
guess.beside(f"{next(t for t, batch, matrices in dots if batch == matrices) // C} C", "computed")

# %%
show(
    plots.crossover(C, 2, dots),
    "computed",
    "numbers a rank sends for a two-layer MLP; dots: the sums that live ranks called, each priced as a ring. The lines "
    "cross at B T = 4 C.",
    "A level line and a rising line that cross at four times the width, with dots of live runs on both",
)

# %% [markdown]
# GPT-2's batches had half a million tokens, far more than 4 C: cutting matrices sends *more*. It is done because
# weights, gradients and Adam's moments are cut too: larger models fit.
#
# ## f and g are conjugate
#
# Count a replicated vector once: f copies it to n ranks, g adds n parts into one. Each is the transpose of the
# other, so each is the other's backward: Megatron calls them *conjugate*. Were every rank's copy counted, g's own
# transpose would *sum again*, n times one loss. So a convention stands behind g: **the gradient of a replicated
# value is replicated too.** And x before f is replicated, but each rank uses it in its own way, so its gradient
# is the sum.
#
# ## A layer of GPT-2
#
# Heads do not look at each other, so cut q, k, v by heads (columns) and the
# output projection by rows. GPT-2 stores q, k, v in *one* matrix [Q | K | V]; each third has to be cut by itself.

# %%
show(
    plots.layer(),
    "drawing",
    "one layer on two ranks, with a rank's shape after each part, hatched a partial sum; the words "
    "under f and g say what is sent forward and, below, backward. Lower strip: sequence parallelism (below).",
    "Two strips of boxes from layer norm to residual sum; between f and g the boxes are split among two ranks",
)

# %%
heads = list("ABCD")  # 4 heads, 2 ranks
fused = [f"{part}{h}" for part in "qkv" for h in heads]
whole = torch.arange(12)
right = [torch.cat([third.tensor_split(2)[r] for third in whole.chunk(3)]) for r in range(2)]
table(
    [
        ("cut as one matrix", *(" ".join(fused[i] for i in whole.tensor_split(2)[r]) for r in range(2))),
        ("each third cut", *(" ".join(fused[i] for i in right[r]) for r in range(2))),
    ],
    ["", "rank 0", "rank 1"],
)

# %% [markdown]
# Features and vocabulary may divide unevenly. Heads may not:

# %%
try:
    Plan(tp=4).check(GPT2Config(n_head=6), rows=8, length=16)
except ValueError as error:
    print(error)

# %% [markdown]
# In the package:

# %%
for name, kind in tensor.SWAPS.items():
    print(f"{name:12} becomes {getattr(kind, 'func', kind).__name__}", getattr(kind, "keywords", ""))
show_source(tensor.Edge, tensor.RowLinear)

# %% [markdown]
# ## The vocabulary
#
# The embedding is the largest matrix, and the head is the same. Cut it by *tokens of the vocabulary*.
# An embedding looks up what it has, puts zero for the rest, and sums (g). The head is column parallel (f): every rank
# has logits (B, T, V/n). Gathering them would be absurd:

# %%
B, T, V = 8, 1024, 50257
print(f"logits of {B} x {T} tokens:   {B * T * V * 4 / 2**20:10,.2f} MiB")
print(f"three numbers for each: {B * T * 3 * 4 / 2**20:10,.2f} MiB")

# %% [markdown]
# The loss of a token is $\log\sum_j e^{z_j}-z_\text{target}$. Three numbers cross the ranks: the **maximum**
# (so that exp does not overflow), the **sum of exponentials**, and the **target's logit**, which one rank has
# and the others count as zero. Backward sends nothing: softmax minus one-hot is known where the logit is.

# %%
logits, targets = 50 * torch.randn(5, 37), torch.tensor([0, 18, 19, 36, 7])


def loss_on_a_rank(rank, world_size, whole_softmax):
    axis = Mesh(tp=world_size)["tp"]
    mine = logits.split(comm.split_sizes(37, world_size), -1)[rank]
    if whole_softmax:
        return tensor.VocabLoss(axis, tensor.first_token(37, axis))(mine[None], targets[None]).item()
    place = targets - tensor.first_token(37, axis)
    here = (place >= 0) & (place < mine.size(-1))
    chosen = mine.log_softmax(-1).gather(-1, place.where(here, 0)[:, None])[:, 0]
    return -comm.all_reduce(chosen.where(here, 0).sum(), axis).item()


print(f"serial                 {F.cross_entropy(logits, targets, reduction='sum').item():.6f}")
print(f"cut over 2 ranks       {two.run(loss_on_a_rank, True)[0]:.6f}")
print(f"softmax over the shard {two.run(loss_on_a_rank, False)[0]:.6f}   (bug lab)")

# %% [markdown]
# By hand (the loss's forward is exercise 4):

# %%
weight, dy = torch.randn(37, 4), torch.randn(5, 4)
log_sums = logits.logsumexp(-1)  # the loss's forward leaves it on every rank


def vocabulary_by_hand(rank, world_size):
    axis, sizes = Mesh(tp=world_size)["tp"], comm.split_sizes(37, world_size)
    mine, z = weight.split(sizes)[rank], logits.split(sizes, 1)[rank]
    place = targets - sum(sizes[:rank])
    here = (place >= 0) & (place < len(mine))
    place = place.where(here, 0)
    embedded = comm.all_reduce(mine[place] * here[:, None], axis)  # g: the others add zeros
    d_mine = torch.zeros_like(mine).index_add(0, place, dy * here[:, None])  # to the rows that were looked up
    dz = (z - log_sums[:, None]).exp()  # softmax
    dz[range(5), place] -= here.double()  # minus one-hot
    return embedded, d_mine, dz


leaves = weight.clone().requires_grad_(), logits.clone().requires_grad_()
wanted = F.embedding(targets, leaves[0])
(wanted * dy).sum().backward()
F.cross_entropy(leaves[1], targets, reduction="sum").backward()
embedded, d_rows, d_logits = zip(*two.run(vocabulary_by_hand), strict=True)
same = torch.allclose(embedded[0], wanted), torch.allclose(torch.cat(d_rows), leaves[0].grad)
print("embedding, its gradient, the loss's:", *same, torch.allclose(torch.cat(d_logits, 1), leaves[1].grad))

# %% [markdown]
# ## The calls of a whole step
#
# Four all-reduces of (B, T, C) a layer and step: two forward at g, two backward at f. The log prices each as a ring;
# `==` compares calls and sizes.

# %%
config = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
tokens = torch.randint(37, (3, 12))


def logged_step(rank, world_size, sp, lean=True):
    model, mesh = GPT2(config).double(), Mesh(tp=world_size)
    tensor.apply_tensor(model, mesh)
    if sp:
        sequence.apply_sequence(model, mesh, lean=lean)
    comm.clear_log()
    model.loss(model(tokens), tokens.roll(-1, 1)).backward()
    return {op: (calls, size) for (op, _), (calls, size, _) in comm.traffic().items()}


shape = tensor_costs.Shape(3, 12, 24, 4, ranks=2, itemsize=8)
found = two.run(logged_step, False)[0]
formula = tensor_costs.step_bytes(shape, config.n_layer)
print(found, "formula:", formula["all_reduce"], found["all_reduce"][1] == formula["all_reduce"])

# %% [markdown]
# 16<!--above--> calls = 4 x 3 layers, one for the embedding, one for the head, two for the loss.
#
# PyTorch's own names the two cuts and finds f and g by itself. (Of `c_attn` it would mix q, k and v: reorder rows
# first, as in exercise 1.)


# %%
def pytorchs_own(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    serial, mlp = (GPT2(config).double().h["0"].mlp for _ in range(2))
    mesh = init_device_mesh("cpu", (world_size,))
    parallelize_module(mlp, mesh, {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})
    x, same = (torch.ones(2, 5, 24, dtype=torch.float64).cumsum(1).requires_grad_() for _ in range(2))
    y, want = mlp(x), serial(same)
    y.square().sum().backward()
    want.square().sum().backward()
    pairs = [(y, want), (x.grad, same.grad)]
    pairs += [
        (p.grad.full_tensor(), dict(serial.named_parameters())[n].grad) for n, p in mlp.named_parameters()
    ]
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)


print("parallelize_module: output and all gradients equal serial:", two.run(pytorchs_own))

# %% [markdown]
# Dropout stands after g, on replicated values: every rank must drop the *same* elements, or the replicas drift
# apart. Where the sequence is cut, different tokens need *different* masks. A mask that depends on
# step, row, token and channel, not on the rank, is right in both:

# %%
dropped = replace(config, dropout=0.2)
for plan in ("tp=2", "tp=2,sp=on"):
    print(plan, "with dropout equals serial:", verify(plan, dropped, ranks=two).ok)

# %% [markdown]
# ### Bug lab: three ways to be wrong

# %%
bugs = "bias added n times", "f is missing", "g sums backward as well"
print(*lab.noticed(two, "tp=2", config, *bugs), sep="\n")

# %% [markdown]
# "f is missing" leaves the first step's loss untouched: only gradients tell. (`verify`'s loss is also that of later
# steps, and it starts from random biases: zero ones hide the first bug.)
#
# The gradient norm is a check of its own: replicated gradients (norms, row biases) count once, slices on every rank;
# else only clipping goes astray.
#
# ## Sequence parallel: less memory, and its price
#
# Between g and f, every rank does the same: residual sum, dropout, layer norm, on whole (B, T, C). These
# work token by token, so cut them **along T** (Korthikanti 2022). An all-reduce is a reduce-scatter followed by an
# all-gather: put the first where g was and the second where f was. The bytes stay, unless memory matters more:

# %%
for lean in (False, True):
    found = two.run(logged_step, True, lean)[0]
    total = sum(size for op, (_, size) in found.items())
    print(
        {op: calls for op, (calls, _) in found.items()},
        f"{total:,} bytes; tensor parallel {formula.total():,}",
    )

# %% [markdown]
# The second line is `lean`, what plans use: it keeps only its own tokens and gathers again in backward, for a
# quarter more bytes. Kept, without dropout and without the T x T matrix: four activations between the parts (inputs
# and outputs of two norms), q, k, v and attention's output,
# and eight around gelu.
#
# | | kept a layer, in B T C numbers | from the paper, 16 bit with dropout |
# |---|---|---|
# | one rank | 16 | 34 bytes (without the T x T part) |
# | tensor parallel | 4 + 12/n | 10 + 24/n bytes |
# | and sequence parallel | 2 + 14/n | |
# | `lean` | 16/n | 34/n bytes |

# %%
counts, kept = [1, 2, 4, 8], {"tensor": [], "tensor and sequence, lean": []}
for n in counts:
    for name, sp in (("tensor", False), ("tensor and sequence, lean", True)):
        alone, shared = (tensor_costs.Shape(4, 1024, 768, 8, ranks) for ranks in (1, n))
        kept[name].append(tensor_costs.kept_bytes(shared, sp=sp) / tensor_costs.kept_bytes(alone))
show(
    plots.memory(kept, counts),
    "computed",
    "activations of one layer that a rank keeps for backward; the tests compare this formula with counted bytes.",
    "Bars for 1, 2, 4 and 8 ranks: tensor parallel falls to about a third, with sequence parallel to an eighth",
)

# %% [markdown]
# Each rank's norms see only their own tokens, so the gradients of norms, row biases and
# positions are **partial sums**. The parameter's `Spec` says so, and the trainer sums them once a step. Forget it:

# %%
print(verify("tp=2,sp=on", config, ranks=two))
print(*lab.noticed(two, "tp=2,sp=on", config, "norms never summed"))

# %% [markdown]
# ## Hiding the sum
#
# Forward, the next product waits for the sum. Backward, f's all-reduce and the weight's gradient do not wait for each
# other: start the sum, multiply, then wait.


# %% tags=["measured"]
def timelines(job, ways, ranks, captions, alt):
    runs = {way: sum(ranks.run(job, how), []) for way, how in ways.items()}
    length = max(max(s.end for s in spans) - min(s.start for s in spans) for spans in runs.values())
    for (way, spans), caption in zip(runs.items(), captions, strict=True):
        show(timeline(spans, way, clock="paced", length=length), "paced", caption, alt)


timelines(
    lab.three_layers_backward,
    {"sum, then multiply": False, "start the sum, multiply, wait": True},
    two,
    ["backward of three column-parallel layers; input gradients, weight gradients, below the sums."] * 2,
    "Two rows of bars for input and weight gradients with communication strips under them",
)

# %% [markdown]
# In the package: `apply_tensor(model, mesh, overlap=True)`; gradients are the same bits.
#
# With sequence parallelism products wait for tokens, or sums for products. So multiply the tokens that are here while
# a ring brings the next
# (PyTorch's
# [async TP](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)):


# %%
def gathered(x, axis, sizes, use):
    """use(place, tokens) for every rank's tokens; mine are x (T_r, C)."""
    for hop in range(axis.size):
        place = (axis.rank - hop) % axis.size
        if hop < axis.size - 1:
            coming = comm.ring_shift(x, axis, async_op=True, shape=(sizes[place - 1], x.size(1)))
        use(place, x)
        x = coming.wait() if hop < axis.size - 1 else None


def column_layer(rank, world_size, x, w, dy, in_parts):
    axis, sizes, y, dw = Mesh(tp=world_size)["tp"], comm.split_sizes(len(x), world_size), {}, []
    mine, w, dy = x.split(sizes)[rank], w.chunk(world_size, 1)[rank], dy.chunk(world_size, 1)[rank]
    comm.clear_log()
    if in_parts:
        gathered(mine, axis, sizes, lambda place, tokens: y.update({place: tokens @ w}))
        dx = rings.scattered(lambda place: dy.split(sizes)[place] @ w.T, axis, sizes)
        gathered(mine, axis, sizes, lambda place, tokens: dw.append(tokens.T @ dy.split(sizes)[place]))
        y, dw = torch.cat([y[place] for place in range(world_size)]), sum(dw)
    else:
        y, dx = comm.all_gather(mine, axis, 0, sizes) @ w, comm.reduce_scatter(dy @ w.T, axis)
        dw = comm.all_gather(mine, axis, 0, sizes).T @ dy
    return y, dx, dw, sum(e.bytes for e in comm.log)


given = torch.randn(10, 6), torch.randn(6, 8), torch.randn(10, 8)  # tokens, a matrix, the output's gradient
ways = [four.run(column_layer, *given, in_parts) for in_parts in (False, True)]
alike = lambda whole, parts: all(map(torch.allclose, whole[:3], parts[:3]))
print("forward and backward equal the layer in one:", all(map(alike, *ways)))
print("bytes of each rank:", *([sent for *_, sent in found] for found in ways))

# %% tags=["measured"]
timelines(
    rings.two_layers,
    {"gather, multiply, sum": False, "in parts": True},
    four,
    ("column- and row-parallel, forward.", "in parts, messages travel under all products but two."),
    "Four rows of bars; first long ones between messages, then short ones with messages under them",
)

# %% [markdown]
# ### Exercise: the sum that travels
#
# A row-parallel layer ends with a sum, of which each rank keeps its tokens. Let it travel around the ring while you
# compute the term to add.


# %% tags=["exercise"]
def scattered(term, axis, sizes):
    """The sum of all ranks' term(place) (T_place, C), for this rank's place; sizes are the T of the places."""
    ### BEGIN SOLUTION
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size + 1):
        place = (axis.rank - hop) % axis.size
        coming = comm.ring_shift(total, axis, async_op=True, shape=(sizes[place], total.size(1)))
        own = term(place)
        total = coming.wait() + own
    return total
    ### END SOLUTION


check("the sum that travels", travelling_sum.travelling_sum, scattered)


# %% [markdown] tags=["hint"]
# Your own tokens' sum must arrive last. So which place's sum do you begin, for the next rank to go on with, and at
# which one are you after each hop?


# %% tags=["wrong"]
# FAIL: No message was on its way while a term was made: start the shift, then compute
# MISTAKE: The term is computed when the sum has come: the right sum, and nothing is hidden.
def scattered(term, axis, sizes):
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size + 1):
        place = (axis.rank - hop) % axis.size
        total = comm.ring_shift(total, axis, shape=(sizes[place], total.size(1)))
        total = total + term(place)
    return total


# %% tags=["wrong"]
# FAIL: Keep the sum so far, and send it around the ring while the next term is made
# MISTAKE: All terms are made and handed to reduce_scatter: the right sum after one long wait.
def scattered(term, axis, sizes):
    return comm.reduce_scatter(torch.cat([term(place) for place in range(axis.size)]), axis, 0, sizes)


# %% tags=["wrong"]
# FAIL: This is the sum of another rank's place: begin with the place before your own
# MISTAKE: The ring begins with the own place, so each rank ends with its neighbour's tokens.
def scattered(term, axis, sizes):
    total = term(axis.rank)
    for hop in range(1, axis.size):
        place = (axis.rank - hop) % axis.size
        coming = comm.ring_shift(total, axis, async_op=True, shape=(sizes[place], total.size(1)))
        own = term(place)
        total = coming.wait() + own
    return total


# %% tags=["wrong"]
# FAIL: does not fit its receiver
# MISTAKE: All places are taken to have as many tokens as the own one.
def scattered(term, axis, sizes):
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size + 1):
        coming = comm.ring_shift(total, axis, async_op=True, shape=(sizes[axis.rank], total.size(1)))
        own = term((axis.rank - hop) % axis.size)
        total = coming.wait() + own
    return total


# %% tags=["wrong"]
# FAIL: One term is made twice
# MISTAKE: The first term is added once more at the end.
def scattered(term, axis, sizes):
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size + 1):
        place = (axis.rank - hop) % axis.size
        coming = comm.ring_shift(total, axis, async_op=True, shape=(sizes[place], total.size(1)))
        own = term(place)
        total = coming.wait() + own
    return total + term(axis.rank)


# %% tags=["wrong"]
# FAIL: One term is never made
# MISTAKE: One hop too few: the sum of one rank is left out.
def scattered(term, axis, sizes):
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size):
        place = (axis.rank - hop) % axis.size
        coming = comm.ring_shift(total, axis, async_op=True, shape=(sizes[place], total.size(1)))
        own = term(place)
        total = coming.wait() + own
    return total


# %% [markdown]
# ## How far does it go?
#
# A layer computes 72 B T C² flops in its matrices (the figure adds 12 B T² C in attention) and sends 8 (n-1)/n B T C
# numbers of b bytes. Both grow with B T: no number of tokens makes it free. With F flops and W bytes a second,
# computing takes longer if
#
# $$n-1\le\frac{9\,C\,W}{b\,F}$$
#
# a limit of ranks, which only a wider model or a faster link raises. Precision cancels: half of b, twice F.

# %%
laptop = thresholds.laptop(60e9, 4e9)  # round numbers, of no machine in particular
inside, between = thresholds.machines()
limits = lambda m: [int(thresholds.most_tensor_ranks(m, width)) for width in (768, 2048, 8192)]
faster = lambda m, n: n / (1 + (n - 1) / (thresholds.most_tensor_ranks(m, 2048) - 1))
rows = [
    (m.name, f"{m.rate:.2g}", f"{m.bandwidth:.2g}", *limits(m), round(faster(m, 8), 1))
    for m in (laptop, inside, between)
]
header = ["machine", "F, flop/s", "W, bytes/s", "most ranks at C = 768", "C = 2048", "C = 8192"]
table(rows, [*header, "8 ranks at C = 2048: times faster"])
print("GPUs:", inside.source)

# %% [markdown]
# Past it a rank sends longer than it computes, and gains less and less. At C = 2048, 8 ranks inside a machine are
# 4<!--above--> times as fast as one; on the links between machines they are slower. So tensor parallelism stays
# inside. (The laptop's row: cores and a link for each rank.)


# %%
def times(B, T, C, ranks, link):
    machine = {"inside a machine": inside, "between machines": between}[link]
    return plots.bytes_and_flops(B, T, C, ranks, machine.rate, machine.bandwidth)


explore(
    times,
    "computed",
    "one layer's step on the GPUs of the table, {link}, B={B}, T={T}, C={C}: computing and sending on one rank and on "
    "{ranks}.",
    "Bars for one rank and for {ranks} ranks, computing and sending",
    posters=[{"link": "inside a machine"}, {"link": "between machines"}],
    B=(1, 32, 8),
    T=(64, 2048, 1024),
    C=(256, 8192, 2048),
    ranks=(2, 8, 8),
    link=["inside a machine", "between machines"],
)

# %% [markdown]
# ### Bug lab: all shards alike
#
# Stanford's CS336 (lecture 8) draws each rank's shard with the same seed, scaled by its own width: another
# network (its record: 2.7169, where the same net cut by layers gives 0.0829). SmolLM3's two ranks shared a seed
# too: one trillion tokens in, the loss looked fine and the evaluations did not; training began anew ([Smol
# Training Playbook](https://huggingface.co/spaces/HuggingFaceTB/smol-training-playbook), 2025, mystery 4).

# %%
x, serial = (torch.randn(n, 32, generator=torch.Generator().manual_seed(n - 32)) for n in (33, 32))
serial = serial / 32**0.5


def four_layers(rank, world_size, alike):
    axis, width, h = Mesh(tp=world_size)["tp"], 32 // world_size, x
    w = torch.randn(32, width, generator=torch.Generator().manual_seed(0), dtype=x.dtype) / width**0.5
    w = w if alike else serial.tensor_split(world_size, 1)[rank]
    for _ in range(4):  # with one seed its layers are alike too
        h = comm.all_gather(F.gelu(h @ w), axis, 1)
    return w, h


wanted, whole = x, {}
for _ in range(4):
    wanted = F.gelu(wanted @ serial)
for name, alike in {"drawn anew on four ranks": True, "cut from one matrix": False}.items():
    found = four.run(four_layers, alike)
    whole[name] = torch.cat([part for part, _ in found], 1)
    same = all(torch.equal(part, found[0][0]) for part, _ in found)
    more, size = whole[name].var() / serial.var(), found[0][1].square().mean().sqrt()
    print(f"{name}: shards alike {same}, variance {more:.1f} times serial, typical output {size:.4f}")
same = torch.allclose(found[0][1], wanted)
print(f"serial: typical output {wanted.square().mean().sqrt():.4f}, equal to the cut:", same)
show(
    plots.shards(list(whole.values()), list(whole)),
    "computed",
    "the weight that four ranks hold together; with one seed everywhere, the same stripe four times.",
    "Two heat maps: the left one repeats the same block four times, the right one does not",
)

# %% [markdown]
# ## Exercises
#
# **1.** Which rows of `c_attn.weight` (3 C, C) belong to a rank? The first rank has the first heads.


# %% tags=["exercise"]
def qkv_rows(rank, ranks, heads, width):
    """Row numbers of this rank's part of q, then of k, then of v."""
    ### BEGIN SOLUTION
    size = width // ranks
    return [part * width + rank * size + i for part in range(3) for i in range(size)]
    ### END SOLUTION


check("q, k, v by heads", exercises.qkv, qkv_rows)

# %% [markdown] tags=["hint"]
# Rows 0 to C - 1 are q, the next C are k, the last C are v. Which of q's rows belong to head 0?


# %% tags=["wrong"]
# FAIL: the parts should be equally long, and are [12, 9] long
# MISTAKE: The last rank ends one row too early in q, k and v.
def qkv_rows(rank, ranks, heads, width):
    size = width // ranks
    last = size - (rank == ranks - 1)
    return [part * width + rank * size + i for part in range(3) for i in range(last)]


# %% tags=["wrong"]
# FAIL: expected 0 at (0, 0), got 0.5
# MISTAKE: Middles of rows are given, not their numbers.
def qkv_rows(rank, ranks, heads, width):
    size = width // ranks
    return [part * width + rank * size + i + 0.5 for part in range(3) for i in range(size)]


# %% tags=["wrong"]
# FAIL: Rank 0 needs its part of q, of k and of v, not only of q and k
# MISTAKE: A run of 3 C/n rows: rank 0 gets all of q and nothing of v.
def qkv_rows(rank, ranks, heads, width):
    size = 3 * width // ranks
    return list(range(rank * size, (rank + 1) * size))


# %% tags=["wrong"]
# FAIL: Head 0 is cut in two on rank 0
# MISTAKE: Rows are dealt like cards, so every head is cut in pieces.
def qkv_rows(rank, ranks, heads, width):
    return list(range(rank, 3 * width, ranks))


# %% tags=["wrong"]
# FAIL: Rank 0 should begin with row 0
# MISTAKE: Parts are handed out from the last rank to the first.
def qkv_rows(rank, ranks, heads, width):
    size = width // ranks
    return [part * width + (ranks - 1 - rank) * size + i for part in range(3) for i in range(size)]


# %% tags=["wrong"]
# FAIL: Rank 0 should hold its q, then its k, then its v, because chunk(3) cuts them apart
# MISTAKE: Head by head (q, k, v of each) and not all of q, then k, then v.
def qkv_rows(rank, ranks, heads, width):
    size, head = width // ranks, width // heads
    mine = range(rank * size // head, (rank + 1) * size // head)
    return [part * width + h * head + i for h in mine for part in range(3) for i in range(head)]


# %% tags=["wrong"]
# FAIL: The heads of a rank should be neighbours
# MISTAKE: A rank's heads are no neighbours.
def qkv_rows(rank, ranks, heads, width):
    head, each = width // heads, heads // ranks
    mine = [rank * each, *(h for h in range(heads) if h % each and h // each == (rank + 1) % ranks)]
    return [part * width + h * head + i for part in range(3) for h in mine for i in range(head)]


# %% tags=["wrong"]
# FAIL: Some rows are on no rank: a head has several of them
# MISTAKE: The size of a part is taken to be the number of heads.
def qkv_rows(rank, ranks, heads, width):
    return [part * width + rank * heads + i for part in range(3) for i in range(heads)]


# %% [markdown]
# **2.** Write f and g. `comm.all_reduce(x, axis)` sums and changes nothing in place. (`x.view_as(x)` returns
# x as a new tensor, which autograd wants.)


# %% tags=["exercise"]
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ### BEGIN SOLUTION
        ctx.axis = axis
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return comm.all_reduce(grad, ctx.axis), None
        ### END SOLUTION


class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ### BEGIN SOLUTION
        return comm.all_reduce(x, axis)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


check("f and g", exercises.edges, lambda x, axis: MyF.apply(x, axis), lambda x, axis: MyG.apply(x, axis))

# %% [markdown] tags=["hint"]
# f stands where a replicated x is used by every rank in its own way; g where partial sums become a replicated y. What
# is the whole gradient of each, and who has it already?


# %% tags=["wrong"]
# FAIL: for which f has to sum in backward
# MISTAKE: f passes the gradient on: contributions of the other ranks' parts are missing.
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: The gradient of the weights is n times too large: g sums in backward as well
# MISTAKE: g sums in backward as well, so gradients are n times too large.
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return comm.all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, ctx.axis), None


# %% tags=["wrong"]
# FAIL: g has to sum in forward
# MISTAKE: g sums nothing in forward.
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: An all-reduce too many: one forward in g and one backward in f are enough
# MISTAKE: The double sum of g is divided away again: the right numbers for an all-reduce too many.
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return comm.all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, ctx.axis) / ctx.axis.size, None


# %% tags=["wrong"]
# FAIL: Backward must not change what it is given
# MISTAKE: The gradient is overwritten in place, and autograd may still need it.
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.copy_(comm.all_reduce(grad, ctx.axis)), None


# %% tags=["wrong"]
# FAIL: on rank 0: expected -70.1324 at (1, 1), got -50.0384
# MISTAKE: The neighbour's part is added and no other: right on two ranks.
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + comm.ring_shift(grad, ctx.axis), None


# %% tags=["wrong"]
# FAIL: f and g should be MyF and MyG, with your backward
# MISTAKE: The package's f stands in for one's own.
class MyF(torch.autograd.Function):
    apply = staticmethod(comm.copy_to)


# %% tags=["wrong"]
# FAIL: g changed the partial sums that it was given: all_reduce into a new tensor
# MISTAKE: The sum is written over the part, which autograd may still need.
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return comm.all_reduce(x, axis, own=True)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: ctx belongs to one call, a class to all
# MISTAKE: The axis is kept on the class, so backward takes the axis of whichever call came last.
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        MyF.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, MyF.axis), None


# %% tags=["wrong"]
# FAIL: too many values to unpack
# MISTAKE: A gradient is taken to be a matrix, but activations have as many dimensions as they like.
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        rows, columns = grad.shape
        return comm.all_reduce(grad.reshape(rows, columns), ctx.axis), None


# %% [markdown]
# **3.** A GPT-2 block's attention, on two and on three live ranks. Every rank holds the whole `attn`: take your rows
# of `attn.c_attn` (3 C x C) and your columns of `attn.c_proj`. `comm.copy_to` and `comm.reduce_from` are f and g.
# Bytes and operations are counted.


# %% tags=["exercise"]
def my_attention(x, attn, axis):
    """The output (B, T, C) of the whole attention, the same on every rank, from x (B, T, C)."""
    n, r, D = axis.size, axis.rank, attn.head_dim
    ### BEGIN SOLUTION
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)  # (3 C / n, C)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    qkv = x @ weight.T + bias
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in qkv.chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias
    ### END SOLUTION


check("attention by heads", exercises.attention, my_attention)

# %% [markdown] tags=["hint"]
# `attn.c_attn.weight.unflatten(0, (3, n, -1))` has the shape (3, n, C / n, C): q, k, v by ranks.

# %% [markdown] tags=["hint"]
# `copy_to` at the beginning, `reduce_from` at the end. Which of the two biases belongs before the sum, which after?


# %% tags=["wrong"]
# FAIL: which every rank's heads read, on rank 0: expected 10.6432 at (1, 0, 21), got 1.17162
# MISTAKE: f at the entrance is forgotten: gradients of x are not summed.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


# %% tags=["wrong"]
# FAIL: the output on rank 0
# MISTAKE: The bias of the second product is added on every rank, so n times.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part + attn.c_proj.bias, axis)


# %% tags=["wrong"]
# FAIL: operations, for its own heads only, on rank 0: 16,960 are enough, got 46,080
# MISTAKE: All heads are computed on every rank, and the sum is divided.
def my_attention(x, attn, axis):
    y = attn(comm.copy_to(x, axis), None)  # all heads on every rank, and a sum that is divided again
    return comm.reduce_from(y, axis) / axis.size


# %% tags=["wrong"]
# FAIL: which every rank's heads read, on rank 0: expected 10.6432 at (1, 0, 21), got 31.9296
# MISTAKE: f stands at the exit too, so gradients are summed once too often.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.copy_to(comm.reduce_from(part, axis), axis) + attn.c_proj.bias


# %% tags=["wrong"]
# FAIL: the output on rank 0: expected -2.2
# MISTAKE: The rows of q, k and v are cut as one run, not each by itself.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.chunk(n)[r].flatten(1).T
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


# %% tags=["wrong"]
# FAIL: expected shape
# MISTAKE: The second product is missing: heads are gathered and handed back.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return comm.all_gather(y, axis, 1).transpose(1, 2)


# %% tags=["wrong"]
# FAIL: n is the number of ranks, axis.size: the second case has two
# MISTAKE: The number of ranks of one example is written down.
def my_attention(x, attn, axis):
    n, r, D = 3, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


# %% tags=["wrong"]
# FAIL: D is the width of a head, attn.head_dim: in the second case it is 2
# MISTAKE: The width of a head is written down.
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, 4
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    part = y.transpose(1, 2).flatten(2) @ attn.c_proj.weight.unflatten(1, (n, -1))[:, r].T
    return comm.reduce_from(part, axis) + attn.c_proj.bias


# %% [markdown]
# **4.** The loss over a cut vocabulary, forward. Rank r has `logits` (N, V_r), for the tokens from `first`
# on; `targets` (N,) are token numbers. Return the sum of the losses, the same on every rank.


# %% tags=["exercise"]
def my_loss(logits, targets, first, axis):
    """Sum of the token losses; `comm.all_reduce(x, axis, "max")` gives the maximum over the ranks."""
    ### BEGIN SOLUTION
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - comm.all_reduce(target, axis)).sum()
    ### END SOLUTION


check("loss over a cut vocabulary", exercises.vocabulary_loss, my_loss)

# %% [markdown] tags=["hint"]
# A loss is log(sum of exp(z - top)) + top - z of the target. Which of the three do all ranks have to agree on first?

# %% [markdown] tags=["hint"]
# A target that lies on another rank counts zero here: `where(here, 0)` also keeps `gather` in range.


# %% tags=["wrong"]
# FAIL: The exponentials overflow. Subtract the largest logit of *all* ranks first
# MISTAKE: exp without a maximum taken off first: it overflows.
def my_loss(logits, targets, first, axis):
    sums = comm.all_reduce(logits.exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: the loss on rank 0
# MISTAKE: Each rank normalises over its own words only.
def my_loss(logits, targets, first, axis):
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    own = logits.log_softmax(-1).gather(-1, place.where(here, 0)[:, None])[:, 0]
    return -comm.all_reduce(own.where(here, 0).sum(), axis)


# %% tags=["wrong"]
# FAIL: The ranks disagree: something was not summed over the ranks
# MISTAKE: The target's logit stays on the rank that has it.
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - target).sum()


# %% tags=["wrong"]
# FAIL: small logits: the loss on rank 0: expected
# MISTAKE: The first word of a rank is left out: > for >=.
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place > 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: out of bounds
# MISTAKE: A word too many: <= for <.
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place <= logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: The logits themselves travelled: each rank has its own part of the maximum and of the sum
# MISTAKE: All logits are gathered: the right loss, and what a cut vocabulary saves is lost.
def my_loss(logits, targets, first, axis):
    sizes = [13, 12, 12]
    whole = comm.all_gather(logits, axis, 1, sizes)
    return torch.nn.functional.cross_entropy(whole, targets, reduction="sum")


# %% tags=["wrong"]
# FAIL: Your function changed the logits that it was given; make new ones
# MISTAKE: The maximum is taken off in place.
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    logits -= top[:, None]
    sums = comm.all_reduce(logits.exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's loss is called.
def my_loss(logits, targets, first, axis):
    return tensor.VocabLoss(axis, first)(logits[None], targets[None])


# %% tags=["wrong"]
# FAIL: on rank 1: 320 are enough, got 584
# MISTAKE: All logits go to rank 0, which computes the loss as one process does, and tells the others.
def my_loss(logits, targets, first, axis):
    whole = comm.gather(logits, axis, 1, 0, [13, 12, 12])
    loss = torch.zeros((), dtype=logits.dtype)
    if axis.rank == 0:
        loss = torch.nn.functional.cross_entropy(whole, targets, reduction="sum")
    return comm.broadcast(loss, axis)


# %% [markdown]
# ## Appendix: what people do today
#
# ### Types
#
# A letter for each tensor and axis: R is alike, used differently by each rank; I alike, used alike; V varying; P a
# term of a sum. f is I -> R, g is P -> I; an I goes only with I, a P only through linear operations. One process,
# without ranks or numbers, checks a plan's forward and last sums
# ([spmd_types](https://github.com/meta-pytorch/spmd_types/blob/main/DESIGN.md)):

# %%
print("a tensor's letter, and its gradient's:", GRADIENT)
print("f forgotten:", typed.refusal("06", "f is missing"))
for plan in ("tp=2", "tp=2,sp=on", "dp=2,cp=2,tp=2"):
    print(f"{plan}: {typed.typed(Plan.parse(plan), config)}")
table(
    [(*bug, *typed.verify_and_types({2: two, 4: four}, *bug)) for bug in typed.BUGS],
    ["lesson", "planted bug", "verify says, first step", "types say"],
)

# %% [markdown]
# (Here `verify` skips later losses.)
# Types cannot see factors, counts, indices, norms, or what is left out. In the convention below copies are R, the loss
# too: its gradient is P, 1/n a rank.
#
# **5.** The letters, on axis tp, of a weight and of its gradient: "II", "RP" or "VV"?


# %% tags=["exercise"]
def letters(name, sp):
    """The two letters of a weight such as "h.0.mlp.c_fc.bias", with sequence parallelism (sp) or without."""
    ### BEGIN SOLUTION
    whole = "ln_" in name or name == "wpe.weight" or name.endswith("c_proj.bias")
    return "VV" if not whole else "RP" if sp else "II"
    ### END SOLUTION


check("letters of weights", cuts.letters, letters)

# %% [markdown] tags=["hint"]
# Is the weight cut? If it is whole: does every rank use it for all tokens, or only for its own, and so in another way?


# %% tags=["wrong"]
# FAIL: c_proj.bias, sp=False: expected 'II', got 'VV'
# MISTAKE: All of a row-parallel layer is taken to be cut, its bias too.
def letters(name, sp):
    whole = "ln_" in name or name == "wpe.weight"
    return "VV" if not whole else "RP" if sp else "II"


# %% tags=["wrong"]
# FAIL: wpe.weight, sp=True: expected 'RP', got 'II'
# MISTAKE: Sequence parallelism is taken to change nothing of the weights.
def letters(name, sp):
    whole = "ln_" in name or name == "wpe.weight" or name.endswith("c_proj.bias")
    return "II" if whole else "VV"


# %% tags=["wrong"]
# FAIL: That is what is summed in the step with sp alone
# MISTAKE: Every whole weight is taken to be used by each rank in its own way.
def letters(name, sp):
    whole = "ln_" in name or name == "wpe.weight" or name.endswith("c_proj.bias")
    return "RP" if whole else "VV"


# %% tags=["wrong"]
# FAIL: expected 'RP', got 'RR'
# MISTAKE: A gradient is given the letter of its weight, where it is a sum not yet made.
def letters(name, sp):
    whole = "ln_" in name or name == "wpe.weight" or name.endswith("c_proj.bias")
    return "VV" if not whole else "RR" if sp else "II"


# %% tags=["wrong"]
# FAIL: wpe.weight, sp=False: expected 'II', got 'VV'
# MISTAKE: Positions are taken to be cut as the vocabulary is.
def letters(name, sp):
    whole = "ln_" in name or name.endswith("c_proj.bias")
    return "VV" if not whole else "RP" if sp else "II"


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package is asked: the right letters, of a model that is built for them.
def letters(name, sp):
    from gpt2lab.plan import build
    from gpt2lab.reference import CONFIG
    from gpt2lab.transport.pretended import one_of

    plan = Plan(tp=2, sp=sp)
    with one_of(0, 2):
        letter = typed.types_of(build(plan, CONFIG, Mesh(**plan.axes)), name)["tp"]
    return letter + GRADIENT[letter]


# %% [markdown]
# ### AlexNet
#
# "One weird trick" ([Krizhevsky 2014](https://arxiv.org/abs/1404.5997)) gives *each layer its own best cut*.
# Convolutions have few weights and large activations: cut the batch. Dense layers are the other way round: cut the
# matrices. From images to features an all-to-all suffices, 1/n of what an all-gather sends. Live:


# %%
def each_its_own_cut(rank, world_size, x, conv, w1, w2):
    """The convolution by images, the dense layers by rows: gradients, and bytes by operation."""
    axis = Mesh(tp=world_size)["tp"]
    conv, *rows = (
        w.clone().requires_grad_() for w in (conv, *(w.tensor_split(world_size)[rank] for w in (w1, w2)))
    )
    comm.clear_log()
    mine = F.conv2d(x.tensor_split(world_size)[rank], conv).relu().flatten(1)  # my images, all features
    parts = comm.all_to_all([p.contiguous() for p in mine.tensor_split(world_size, 1)], axis)
    z = comm.reduce_scatter(torch.cat(parts) @ rows[0], axis, 1)  # all images, my features
    y = comm.reduce_scatter(F.gelu(z) @ rows[1], axis, 0)  # my images again
    y.square().sum().backward()  # each call's backward is its transpose
    sent = {op: size for (op, _), (_, size, _) in comm.traffic().items()}
    return comm.all_reduce(conv.grad, axis), *(w.grad for w in rows), sent


images, net = torch.randn(8, 3, 8, 8), [torch.randn(4, 3, 3, 3), torch.randn(144, 64), torch.randn(64, 10)]
conv, w1, w2 = leaves = [w.clone().requires_grad_() for w in net]
(F.gelu(F.conv2d(images, conv).relu().flatten(1) @ w1) @ w2).square().sum().backward()
found = four.run(each_its_own_cut, images, *net)
joined = found[0][0], *(torch.cat([r[i] for r in found]) for i in (1, 2))
print("gradients equal serial:", all(torch.allclose(g, w.grad) for g, w in zip(joined, leaves, strict=True)))
print(f"bytes: {found[0][3]}; the activations gathered there and back: {2 * 3 * 2 * 144 * 8}")
show(
    plots.alexnet(),
    "computed",
    "weights and activations of AlexNet by layer, on a log scale: they cross between the fifth and the sixth.",
    "Bars by layer: activations above weights for five convolutions, weights above activations for three dense layers",
)

# %% [markdown]
# ### Every matrix by columns, and another convention
#
# Stanford's CS336 (lecture 8) cuts *every* matrix by columns and gathers after each: x -> all-gather(gelu(x W_r)).
# Its backward (exercise 6) follows another rule: **the parts of a replicated value's gradient add up.** A loss that n
# ranks compute asks n times for the same, so each asks for 1/n, and a column's owner adds up what all ranks ask of it.
# (`torch.distributed.nn.functional.all_reduce` follows this rule too: used as our g it doubles gradients on two
# ranks.)

# %%
guess = predict(
    "Without the 1/n: the gradient of W1 is serial's times what?", "0.500", "1.000", "2.000", "4.000"
)

# %%
X, weights = torch.randn(6, 4), [torch.randn(4, 8), torch.randn(8, 6)]
serial = [w.clone().requires_grad_() for w in weights]
y = F.gelu(F.gelu(X @ serial[0]) @ serial[1])
y.square().sum().backward()
rows = []
for name, how in {"right": (1 / 2, True), "no 1/n": (1.0, True), "no sum": (1.0, False)}.items():
    found = two.run(lab.columns_only, X, weights, *how)
    joined = [torch.cat([r[1][i] for r in found], 1) / w.grad for i, w in enumerate(serial)]
    factors = ["no factor" if g.std() > 1e-9 else f"{g.mean():.3f}" for g in joined]
    rows.append((name, str(torch.allclose(found[0][0], y)), *factors, found[0][2]))
table(rows, ["backward", "output equals serial", "dW1 / serial", "dW2 / serial", "bytes forward"])
guess.beside(rows[1][2], "computed")
print("by formula, (n-1)/n of all gathered numbers:", (2 - 1) * 6 * (8 + 6) * 8 // 2)

# %% [markdown]
# **6.** Columns gathered, and their backward, where every rank's loss asks for 1/n. `y` (B, D/n) holds this rank's
# columns. (`comm.all_gather(y, axis, 1)` works along dim 1.)


# %% tags=["exercise"]
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ### BEGIN SOLUTION
        ctx.axis = axis
        return comm.all_gather(y, axis, 1)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return comm.reduce_scatter(grad, ctx.axis, 1), None
        ### END SOLUTION


check("columns gathered", exercises.gathered_columns, lambda y, axis: MyGather.apply(y, axis))

# %% [markdown] tags=["hint"]
# Every rank computes with all columns, so every rank has a request for each of them. Who should get which requests,
# and in what form?


# %% tags=["wrong"]
# FAIL: Each rank asked for 1/3, and nobody added the requests
# MISTAKE: Backward is taken to be a cut: nobody adds what the ranks ask for.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return comm.all_gather(y, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.axis.size, 1)[ctx.axis.rank], None


# %% tags=["wrong"]
# FAIL: Rank 0 sent 960 bytes backward; 480 are enough
# MISTAKE: An all-reduce and a cut: the right gradient for twice the bytes.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return comm.all_gather(y, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        total = comm.all_reduce(grad, ctx.axis)
        return total.chunk(ctx.axis.size, 1)[ctx.axis.rank], None


# %% tags=["wrong"]
# FAIL: the gradient of matrix 2 on rank 0
# MISTAKE: Averaged and not summed.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return comm.all_gather(y, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.axis, 1) / ctx.axis.size, None


# %% tags=["wrong"]
# FAIL: holds 2 along dim 1
# MISTAKE: A width of one column is fixed, and backward does nothing.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        return comm.all_gather(y, axis, 1, [1, 1, 1])

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: Three all-gathers are 480 bytes
# MISTAKE: A gather made of an all-reduce over zeros: twice the bytes.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        whole = y.new_zeros(len(y), axis.size, y.size(1))
        whole[:, axis.rank] = y
        return comm.all_reduce(whole.flatten(1), axis)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.axis, 1), None


# %% tags=["wrong"]
# FAIL: Put the ranks' columns side by side, in the order of the ranks
# MISTAKE: Columns of the ranks are interleaved, not put side by side.
class MyGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return comm.all_gather(y, axis, 1).unflatten(1, (axis.size, -1)).transpose(1, 2).flatten(1)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.axis, 1), None


# %% tags=["wrong"]
# FAIL: Gather by MyGather, with a backward of your own
# MISTAKE: The package's all-gather brings a backward of its own.
class MyGather(torch.autograd.Function):
    apply = staticmethod(lambda y, axis: comm.all_gather(y, axis, 1))


# %% [markdown]
# **7. A puzzle: AlexNet on 8 ranks.** Cut each layer by "batch" (and sum its gradients), "columns" (needs whole
# inputs, leaves features) or "rows" (needs features, leaves partial sums). Between layers activations change hands,
# forward and backward, by the table. The first input costs nothing; the last output is wanted by images. At most 45 MB
# of float32 pass, for 128 images.


# %% tags=["exercise"]
def my_cuts():
    """Eight words, for conv1 to conv5 and fc6 to fc8."""
    ### BEGIN SOLUTION
    return ["batch"] * 5 + ["rows", "columns", "rows"]
    ### END SOLUTION


table([(*pair, times) for pair, times in cuts.CHANGES.items()], ["there", "next", "x activations x 7/8"])
check("AlexNet's cuts", cuts.choose, my_cuts)

# %% [markdown] tags=["hint"]
# An all-to-all is by far the cheapest change: where does it stand in the table?


# %% tags=["wrong"]
# FAIL: 436.6 MB; at most 45 pass
# MISTAKE: All layers are cut by batch, and the large weights of fc6 to fc8 are summed.
def my_cuts():
    return ["batch"] * 8


# %% tags=["wrong"]
# FAIL: 72.4 MB; at most 45 pass
# MISTAKE: Columns after columns: activations are gathered each time.
def my_cuts():
    return ["batch"] * 5 + ["columns"] * 3


# %% tags=["wrong"]
# FAIL: 459 MB; at most 45 pass
# MISTAKE: Convolutions have few weights and large activations: here they are cut by weights.
def my_cuts():
    return ["columns", "rows"] * 4


# %% tags=["wrong"]
# FAIL: AlexNet has 8 layers, and you cut 3
# MISTAKE: Only the last three layers are given.
def my_cuts():
    return ["rows", "columns", "rows"]


# %% tags=["wrong"]
# FAIL: 'heads' is no cut
# MISTAKE: A word of another model's layers.
def my_cuts():
    return ["batch"] * 5 + ["rows", "heads", "rows"]


# %% [markdown]
# ## Questions
#
# 1. Which parameters are replicated under tensor parallelism, and how does their gradient become the same
#    on all ranks?
# 2. Sequence parallelism (not `lean`) sends the bytes of tensor parallelism in more calls: where, and when does that
#    hurt?
#
# <details><summary>Answers</summary>
#
# 1. Norms, row biases, positions. Their outputs meet f on the way, and f's backward sums the ranks' parts.
# 2. Two calls for each all-reduce: each has its cost, and short sums lose the algorithms of few rounds (lesson 03).
#
# </details>
#
# ## Read on
#
# - Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053): section 3 draws f and g.
# - Korthikanti et al. 2022, "Reducing Activation Recomputation" (arXiv:2205.05198): section 4: what is kept.
# - Wang et al. 2023 (doi:10.1145/3567955.3567959): products in parts.
#
# **Next**: [07 Pipeline parallelism](07_pipeline.ipynb).
