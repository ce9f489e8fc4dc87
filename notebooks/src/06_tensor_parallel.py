# %% [markdown]
# # 06 Tensor parallel
#
# **The one-minute version.** A transformer layer is four large matrix products with small things between
# them. Cut the matrices, and every rank does a part of every product, on all tokens. Two things make it
# cheap. Cut the first matrix of a pair by *columns* and the second by *rows*, and nothing has to be sent
# between them. And attention falls apart into heads by itself. What remains are two sums a layer forward and
# two backward.
#
# Here is the claim of this lesson, run on two live ranks:

# %% tags=["setup"]
import torch
import torch.nn.functional as F

from gpt2lab import launch
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import tensor as exercises
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import sequence, tensor
from gpt2lab.planner import tensor_costs
from gpt2lab.plots import tensor as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import Plan, compare, verify

torch.set_default_dtype(torch.float64)

# %%
print(verify("tp=2"))

# %% [markdown]
# ## A product cut three ways
#
# Y = X W, where X holds one row for each token. There are three dims to cut, and each asks for another message.

# %%
show(
    plots.tilings(),
    "drawing",
    "who holds what when Y = X W is cut on two ranks; grey is whole on both, hatched is a partial sum.",
    "Three tilings of a matrix product: rows of X, columns of W, the inner dim, with the sums each needs",
)

# %% [markdown]
# By hand, on live ranks. The second function is *column parallel*, the third *row parallel*.

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


(rows0, columns0, inner0), (rows1, columns1, inner1) = launch(three_ways, ranks=2)
joined = {"rows": torch.cat([rows0, rows1]), "columns": torch.cat([columns0, columns1], 1), "inner": inner1}
for name, y in joined.items():
    print(f"{name:8} equals X W: {torch.allclose(y, X @ W)}")

# %% [markdown]
# Row parallel wants its *input* cut by features, and that is just what column parallel leaves behind. So:
# columns first, then rows, and a sum at the end. The other order would need the sum in the middle, because of
# gelu: it may be applied to a slice of the features, but not to a partial sum.

# %%
a, b = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 2.0])
print("gelu of the sum:       ", [round(v, 3) for v in F.gelu(a + b).tolist()])
print("sum of the gelus:      ", [round(v, 3) for v in (F.gelu(a) + F.gelu(b)).tolist()])
print("gelu of slices, joined:", torch.equal(torch.cat([F.gelu(a), F.gelu(b)]), F.gelu(torch.cat([a, b]))))

# %% [markdown]
# ## The first form: columns only
#
# The simplest version (Stanford's CS336, lecture 8) cuts *every* matrix by columns and gathers after each
# one: x -> all-gather(gelu(x W_r)). The lecture leaves the backward as homework. Here it is.
#
# The adjoint of an all-gather is a **reduce-scatter**: every rank used all columns, so each column's owner
# must add up what all ranks ask of it. And there is a trap. The loss is computed on *every* rank, so n copies
# of the same request arrive. Each must ask for 1/n: the seed of backward is 1/n.


# %%
class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, axis):
        ctx.axis = axis
        return comm.all_gather(y, axis, 1)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.axis, 1), None


def columns_only(rank, world_size, x, weights, seed):
    axis = Mesh(tp=world_size)["tp"]
    mine = [w.tensor_split(world_size, 1)[rank].clone().requires_grad_() for w in weights]
    for w in mine:
        x = GatherColumns.apply(F.gelu(x @ w), axis)
    x.square().sum().backward(torch.tensor(seed))
    return [w.grad for w in mine]


# %%
weights = [torch.randn(4, 8), torch.randn(8, 6)]
serial = [w.clone().requires_grad_() for w in weights]
F.gelu(F.gelu(X @ serial[0]) @ serial[1]).square().sum().backward()
for seed in (1 / 2, 1.0):
    grads = launch(columns_only, X, weights, seed, ranks=2)
    factors = [(torch.cat(parts, 1) / w.grad).mean().item() for *parts, w in zip(*grads, serial, strict=True)]
    print(f"seed {seed}: gradients are {', '.join(f'{f:.3f}' for f in factors)} times the serial ones")

# %% [markdown]
# ### Bug lab: all shards alike
#
# The lecture draws each rank's shard with the same seed, and scales it by its own width. Every rank then holds the
# *same* numbers. It trains, but another network: in the lecture's own record the output is 2.7169 where the same net,
# cut by layers, gives 0.0829. Cut the serial weight instead.

# %%
dim, n = 32, 4
one = torch.randn(dim, dim // n, generator=torch.Generator().manual_seed(0)) / (dim // n) ** 0.5
drawn = torch.cat([one] * n, 1)
cut = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)) / dim**0.5
print(
    "variance drawn on the ranks / variance cut from one matrix:", round((drawn.var() / cut.var()).item(), 1)
)
show(
    plots.shards([drawn, cut], ["drawn anew on four ranks", "cut from one matrix"]),
    "computed",
    "the weight that four ranks hold together; with one seed everywhere, the same stripe four times.",
    "Two heat maps: the left one repeats the same block four times, the right one does not",
)

# %% [markdown]
# ## Columns, then rows: the MLP
#
# Two matrices and gelu, C to 4C to C. Cut the first by columns, the second by rows:
#
# - forward: h_r = gelu(x W1_r), y = **sum over ranks** of h_r W2_r
# - backward: dW2_r = h_r^T dy; dh_r = dy W2_r^T; dW1_r = x^T dz_r; dx = **sum over ranks** of dz_r W1_r^T
#
# One sum each way. In Megatron's words, a function **g** stands at the end (sum forward, nothing backward)
# and **f** at the beginning (nothing forward, sum backward).


# %%
def gelu_slope(z):
    z = z.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(z).sum(), z)[0]


def mlp_by_matrices(rank, world_size, x, w1, w2):
    axis = Mesh(tp=world_size)["tp"]
    w1, w2 = w1.tensor_split(world_size, 1)[rank], w2.tensor_split(world_size, 0)[rank]
    comm.clear_log()
    z = x @ w1
    y = comm.all_reduce(F.gelu(z) @ w2, axis)  # g
    dy = 2 * y  # of the loss, the sum of squares
    dz = dy @ w2.T * gelu_slope(z)
    dx = comm.all_reduce(dz @ w1.T, axis)  # f, backward
    return dx, x.T @ dz, F.gelu(z).T @ dy, sum(e.bytes for e in comm.log) // 8


def mlp_by_batch(rank, world_size, x, w1, w2):
    axis = Mesh(dp=world_size)["dp"]
    x = x.tensor_split(world_size, 0)[rank]
    comm.clear_log()
    z = x @ w1
    dy = 2 * (F.gelu(z) @ w2)
    dz = dy @ w2.T * gelu_slope(z)
    d1, d2 = comm.all_reduce(x.T @ dz, axis), comm.all_reduce(F.gelu(z).T @ dy, axis)
    return dz @ w1.T, d1, d2, sum(e.bytes for e in comm.log) // 8


# %% [markdown]
# **Predict** before you run: data parallel sums the gradients, 8 C² numbers. Tensor parallel sums
# activations, B T C numbers twice. Below how many tokens does the second send less?

# %%
C = 16
w1, w2 = torch.randn(C, 4 * C) / 4, torch.randn(4 * C, C) / 8
counted = []
for tokens in (C, 4 * C, 8 * C):
    x = torch.randn(tokens, C, requires_grad=True)
    v1, v2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    (F.gelu(x @ v1) @ v2).square().sum().backward()
    by_batch, by_matrices = (launch(f, x.detach(), w1, w2, ranks=2) for f in (mlp_by_batch, mlp_by_matrices))
    same = [
        torch.allclose(by_batch[0][1], v1.grad),
        torch.allclose(torch.cat([r[1] for r in by_matrices], 1), v1.grad),
        torch.allclose(torch.cat([r[2] for r in by_matrices], 0), v2.grad),
        torch.allclose(by_matrices[0][0], x.grad),
    ]
    counted.append((tokens, by_batch[0][3], by_matrices[0][3]))
    _, sent, sent_by_matrices = counted[-1]
    print(
        f"{tokens:4} tokens: gradients equal {all(same)}; sent {sent} by batch, {sent_by_matrices} by matrices"
    )

# %%
show(
    plots.crossover(C, 2, counted),
    "counted",
    "numbers a rank sends for a two-layer MLP; dots are counted on live ranks. The lines cross at B T = 4 C.",
    "A level line and a rising line that cross at four times the width, with counted dots on both",
)

# %% [markdown]
# A batch of GPT-2 has far more than 4 C tokens. Then cutting matrices sends *more*. It is done all the same:
# the weights, their gradients and Adam's moments are cut too, so that a model fits which otherwise would not.
#
# ## f and g are adjoints
#
# Let n ranks hold x_1 ... x_n, stacked as one long vector. g maps every stack to (s, s, ...), s = sum of x_r.
# As a matrix, that is a block of ones, and its transpose is itself: a true adjoint would *sum again*
# backward. But what follows g is computed identically on every rank, and each rank already has the whole
# gradient of the one loss. Summing n equal gradients would count it n times. That is the convention behind g:
# **the gradient of a replicated value is replicated too.** Likewise x before f is replicated, each rank uses
# it in its own way, so its gradient is the sum. (`torch.distributed.nn.functional.all_reduce` follows the
# other convention: use it as g and gradients double.)
#
# ## A layer of GPT-2
#
# Attention needs no idea beyond this. Heads do not look at each other, so cut q, k, v by heads (columns) and the
# output projection by rows. GPT-2 stores q, k, v in *one* matrix [Q | K | V]; each third has to be cut by itself.

# %%
show(
    plots.layer(),
    "drawing",
    "one layer on two ranks; the words under f and g say what is sent forward and, below, backward.",
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
# Hidden features and vocabulary may divide unevenly. Heads may not:

# %%
try:
    Plan(tp=4).check(GPT2Config(n_head=6), rows=8, length=16)
except ValueError as error:
    print(error)

# %% [markdown]
# The whole strategy in the package: a table that says what becomes of which layer, and f and g.

# %%
for name, kind in tensor.SWAPS.items():
    print(f"{name:12} becomes {getattr(kind, 'func', kind).__name__}", getattr(kind, "keywords", ""))
show_source(tensor.Edge, tensor.RowLinear)

# %% [markdown]
# ## The vocabulary
#
# The embedding is the largest matrix of all, and the head is the same matrix. Cut it by *tokens of the vocabulary*.
# An embedding then looks up what it has, puts zero for the rest, and sums (g). The head is column parallel (f), so
# every rank has the logits of its tokens: (B, T, V/n). Gathering them would be absurd:

# %%
B, T, V = 8, 1024, 50257
print(f"logits of {B} x {T} tokens:   {B * T * V * 4 / 2**20:10,.2f} MiB")
print(f"three numbers for each: {B * T * 3 * 4 / 2**20:10,.2f} MiB")

# %% [markdown]
# The loss of a token is log(sum of exp z) - z_target. Three numbers have to cross the ranks: the **maximum**
# (so that exp does not overflow), the **sum of exponentials**, and the **target's logit**, which one rank has
# and the others count as zero. Backward sends nothing: softmax minus one-hot is known where the logit is.

# %%
logits, targets = 50 * torch.randn(5, 37), torch.tensor([0, 18, 19, 36, -100])


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
print(f"cut over 2 ranks       {launch(loss_on_a_rank, True, ranks=2)[0]:.6f}")
print(f"softmax over the shard {launch(loss_on_a_rank, False, ranks=2)[0]:.6f}   (bug lab)")

# %% [markdown]
# ## The whole of it, counted
#
# Four all-reduces of (B, T, C) a layer and step: two forward at g, two backward at f. The formula is exact,
# so it is compared with `==`.

# %%
config = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
tokens = torch.randint(37, (3, 12))


def counted_step(rank, world_size, sp, lean=True):
    model, mesh = GPT2(config).double(), Mesh(tp=world_size)
    tensor.apply_tensor(model, mesh)
    if sp:
        sequence.apply_sequence(model, mesh, lean=lean)
    comm.clear_log()
    model.loss(model(tokens), tokens.roll(-1, 1)).backward()
    return {op: (calls, size) for (op, _), (calls, size, _) in comm.traffic().items()}


shape = tensor_costs.Shape(3, 12, 24, 4, ranks=2, itemsize=8)
found = launch(counted_step, False, ranks=2)[0]
formula = tensor_costs.step_bytes(shape, config.n_layer)
print(found, "formula:", formula["all_reduce"], found["all_reduce"][1] == formula["all_reduce"])

# %% [markdown]
# 16 calls = 4 x 3 layers, one for the embedding, one for the head, two for the loss.
#
# PyTorch's own names the two cuts and finds f and g by itself. (In attention its cut of `c_attn` would mix q, k
# and v: reorder the rows first, as in exercise 1.)


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


print("parallelize_module: output and all gradients equal serial:", launch(pytorchs_own, ranks=2))

# %% [markdown]
# ### Bug lab: three ways to be wrong
#
# We plant each on the ranks and ask which checks of `verify` notice.


# %%
def planted(rank, world_size, plan, bugs):
    found = []
    for _, owner, name, bug in bugs:
        right = getattr(owner, name)
        setattr(owner, name, bug)
        try:
            found.append(compare(rank, world_size, Plan.parse(plan), config, 7, 11))
        finally:
            setattr(owner, name, right)
    return found


def lab(plan, *bugs):
    ranks = launch(planted, plan, bugs, ranks=2)
    for i, (title, *_) in enumerate(bugs):
        claims = [
            max(c, key=lambda claim: claim.error) for c in zip(*(found[i] for found in ranks), strict=True)
        ]
        print(f"{title}: noticed by", ", ".join(c.name for c in claims if c.error > 1e-10) or "nobody")


def bias_everywhere(self, x):
    return self.edge.leave(F.linear(x, self.weight) + self.bias)


def g_both_ways(self, x):
    return comm.copy_to(comm.reduce_from(x, self.axis), self.axis)


lab(
    "tp=2",
    ("bias added n times", tensor.RowLinear, "forward", bias_everywhere),
    ("f is missing", tensor.Edge, "enter", lambda self, x: x),
    ("g sums backward as well", tensor.Edge, "leave", g_both_ways),
)

# %% [markdown]
# "f is missing" leaves the loss untouched at the first step. Only gradients tell. (The bias shows nowhere at
# the start of a training, when all biases are zero; `verify` starts from random ones.)
#
# Why is a gradient norm a check of its own? Norms and row biases are *replicated*. Their gradient is the same on
# every rank, and must count once; slices count on every rank. Get this wrong, and only clipping goes astray.
#
# ## Sequence parallel: the same bytes, less memory
#
# Between g and f, every rank does the same: residual sum, dropout, layer norm, on whole (B, T, C). That costs
# memory n times over. But these work token by token, so cut them **along T** (Korthikanti 2022). An
# all-reduce is a reduce-scatter followed by an all-gather: put the first where g was and the second where f
# was. The bytes stay.

# %%
for lean in (False, True):
    found = launch(counted_step, True, lean, ranks=2)[0]
    total = sum(size for op, (_, size) in found.items())
    print(
        {op: calls for op, (calls, _) in found.items()},
        f"{total:,} bytes; tensor parallel {formula.total():,}",
    )

# %% [markdown]
# The second line is `lean`: it keeps only its own tokens of what was gathered, and gathers again in backward.
# That costs one more all-gather a column-parallel layer, and saves B T C numbers. Now count what is kept.
# Without dropout, and with attention that keeps no T x T matrix, one rank keeps 16 activations of (B, T, C) a
# layer: four between the parts (inputs and outputs of two norms), q, k, v and attention's output, and eight
# around gelu.
#
# | | kept a layer, in B T C numbers | from the paper, 16 bit with dropout |
# |---|---|---|
# | one rank | 16 | 34 bytes (without the T x T part) |
# | tensor parallel | 4 + 12/n | 10 + 24/n bytes |
# | and sequence parallel | 16/n | 34/n bytes |

# %%
counts, kept = [1, 2, 4, 8], {"tensor": [], "tensor and sequence": []}
for n in counts:
    for name, sp in (("tensor", False), ("tensor and sequence", True)):
        alone, shared = (tensor_costs.Shape(4, 1024, 768, 8, ranks) for ranks in (1, n))
        kept[name].append(tensor_costs.kept_bytes(shared, sp=sp) / tensor_costs.kept_bytes(alone))
show(
    plots.memory(kept, counts),
    "computed",
    "activations of one layer that a rank keeps for backward; the tests compare this formula with counted bytes.",
    "Bars for 1, 2, 4 and 8 ranks: tensor parallel falls to about a third, with sequence parallel to an eighth",
)

# %% [markdown]
# One thing is new. Each rank's norms now see only their own tokens, so the gradients of norms, row biases and
# positions are **partial sums**. The parameter's `Spec` says so, and the trainer sums them once a step. Forget it:

# %%
print(verify("tp=2,sp=on", config))
lab("tp=2,sp=on", ("norms never summed", sequence, "_partial", lambda axis, *modules, biases=(): None))

# %% [markdown]
# ## Hiding the sum
#
# Backward, f's all-reduce and the gradient of the weight both wait for the same thing, and not for each
# other. Start the sum, multiply, then wait. We slow the links down so that it shows on any machine.

# %% tags=["measured"]
import time

from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import paced, trace


def three_layers_backward(rank, world_size, overlap):
    axis, grad = Mesh(tp=world_size)["tp"], torch.ones(64, 1024)
    comm.all_reduce(grad, axis)  # connect, and begin together
    trace.clear()
    with paced.use(paced.Link(latency=0.001, bandwidth=30e6)):
        for layer in (2, 1, 0):
            with trace.span(f"dX{layer}", "backward"):
                time.sleep(0.02)
            under_way = comm.all_reduce(grad, axis, async_op=True)
            if not overlap:
                grad = under_way.wait()
            with trace.span(f"dW{layer}", "weight"):
                time.sleep(0.02)
            if overlap:
                grad = under_way.wait()
    return trace.spans()


for overlap in (False, True):
    spans = [s for one in launch(three_layers_backward, overlap, ranks=2) for s in one]
    title = "start the sum, multiply, wait" if overlap else "sum, then multiply"
    show(
        timeline(spans, title, clock="paced"),
        "paced",
        "backward of three column-parallel layers; input gradients, weight gradients, and below the sums.",
        "Two rows of bars for input and weight gradients with communication strips under them",
    )

# %% [markdown]
# In the package this is `apply_tensor(model, mesh, overlap=True)`; the gradients are the same bits.
#
# ## Generation
#
# A KV cache falls apart by heads as well: each rank keeps the keys and values of its own. Only the logits of
# the last token are gathered, so that all ranks draw the same one.

# %%
from gpt2lab.generate import generate

prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def generated(rank, world_size):
    model, mesh = GPT2(config).double(), Mesh(tp=world_size)
    tensor.apply_tensor(model, mesh)
    return generate(model, prompts, 6, gather=lambda z: tensor.whole_logits(z, mesh["tp"], config.vocab_size))


print(
    "the serial text on every rank:", launch(generated, ranks=2) == [generate(GPT2(config), prompts, 6)] * 2
)

# %% [markdown]
# ## How far does it go?
#
# A layer computes 72 B T C² flops in its matrices (and 12 B T² C in attention, masked pairs counted too; the figure
# includes them) and sends 8 (n-1)/n B T C numbers, here of 16 bits. Both grow with B T. Only
# a wider model or a faster link helps. So tensor parallel stays inside one machine.


# %%
def times(B, T, C, ranks, link):
    gbytes = {"inside a machine, 300 GB/s": 300e9, "between machines, 25 GB/s": 25e9}[link]
    return plots.bytes_and_flops(B, T, C, ranks, link=gbytes)


explore(
    times,
    "computed",
    "one layer's step at 100 Tflop/s, {link}, B={B}, T={T}, C={C}: computing and sending on one rank and on {ranks}.",
    "Bars for one rank and for {ranks} ranks, computing and sending",
    posters=[{"link": "inside a machine, 300 GB/s"}, {"link": "between machines, 25 GB/s"}],
    B=(1, 32, 8),
    T=(64, 2048, 1024),
    C=(256, 8192, 2048),
    ranks=(2, 16, 8),
    link=["inside a machine, 300 GB/s", "between machines, 25 GB/s"],
)

# %% [markdown]
# ## The first of its kind
#
# AlexNet was cut over two graphics cards in 2012, because it did not fit into one. The insight behind its later form
# ("One weird trick", Krizhevsky 2014): *each layer has its own best cut*. Convolutions have few weights and large
# activations: cut the batch. Dense layers are the other way round: cut the matrices.

# %%
weights_of = {name: w for name, w, _ in plots.ALEXNET}
dense = sum(w for name, w in weights_of.items() if name.startswith("fc"))
print(f"dense layers hold {dense / sum(weights_of.values()):.0%} of the weights")
show(
    plots.alexnet(),
    "computed",
    "weights and activations of AlexNet by layer, on a log scale: they cross between the fifth and the sixth.",
    "Bars by layer: activations above weights for five convolutions, weights above activations for three dense layers",
)

# %% [markdown]
# That is the rule 8 C² against 2 B T C again, taken layer by layer.
#
# ## Exercises
#
# **1.** Which rows of `c_attn.weight` (3 C, C) belong to a rank? Heads of a rank are neighbours, the first
# rank has the first.


# %% tags=["exercise"]
def qkv_rows(rank, ranks, heads, width):
    """Row numbers of this rank's part of q, then of k, then of v."""
    ### BEGIN SOLUTION
    size = width // ranks
    return [part * width + rank * size + i for part in range(3) for i in range(size)]
    ### END SOLUTION


check("q, k, v by heads", exercises.qkv, qkv_rows)


# %% tags=["wrong"]
# FAIL: rank 0 needs its part of q, of k and of v
def qkv_rows(rank, ranks, heads, width):
    size = 3 * width // ranks
    return list(range(rank * size, (rank + 1) * size))


# %% tags=["wrong"]
# FAIL: is cut in two on rank
def qkv_rows(rank, ranks, heads, width):
    return list(range(rank, 3 * width, ranks))


# %% tags=["wrong"]
# FAIL: should begin with row
def qkv_rows(rank, ranks, heads, width):
    size = width // ranks
    return [part * width + (ranks - 1 - rank) * size + i for part in range(3) for i in range(size)]


# %% tags=["wrong"]
# FAIL: should hold its q, then its k, then its v
def qkv_rows(rank, ranks, heads, width):
    size, head = width // ranks, width // heads
    mine = range(rank * size // head, (rank + 1) * size // head)
    return [part * width + h * head + i for h in mine for part in range(3) for i in range(head)]


# %% tags=["wrong"]
# FAIL: are no neighbours
def qkv_rows(rank, ranks, heads, width):
    head, each = width // heads, heads // ranks
    mine = [rank * each, *(h for h in range(heads) if h % each and h // each == (rank + 1) % ranks)]
    return [part * width + h * head + i for part in range(3) for h in mine for i in range(head)]


# %% tags=["wrong"]
# FAIL: some rows are on no rank or on two
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


# %% tags=["wrong"]
# FAIL: for which f has to sum in backward
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: n times too large: g sums in backward as well
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
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# %% tags=["wrong"]
# FAIL: one all-reduce forward (g) and one backward (f)
class MyG(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return comm.all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, ctx.axis) / ctx.axis.size, None


# %% tags=["wrong"]
# FAIL: backward must not change what it is given
class MyF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.copy_(comm.all_reduce(grad, ctx.axis)), None


# %% [markdown]
# **3.** A GPT-2 block's attention, on three live ranks with six heads. Every rank holds the whole `attn` here (take
# your rows of `attn.c_attn`, a linear layer 3 C x C, and your columns of `attn.c_proj`), and computes its own heads.
# `comm.copy_to` and `comm.reduce_from` are f and g. The checker compares output and gradients, and counts bytes and
# floating-point operations.


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


# %% tags=["wrong"]
# FAIL: every rank's heads read x
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
# FAIL: not a third: only its own heads
def my_attention(x, attn, axis):
    y = attn(comm.copy_to(x, axis), None)  # all heads on every rank, and a sum that is divided again
    return comm.reduce_from(y, axis) / axis.size


# %% tags=["wrong"]
# FAIL: every rank's heads read x: expected 10.6432 at (1, 0, 21), got 31.9
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
def my_attention(x, attn, axis):
    n, r, D = axis.size, axis.rank, attn.head_dim
    x = comm.copy_to(x, axis)
    weight = attn.c_attn.weight.unflatten(0, (3, n, -1))[:, r].flatten(0, 1)
    bias = attn.c_attn.bias.unflatten(0, (3, n, -1))[:, r].flatten()
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (x @ weight.T + bias).chunk(3, -1))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return comm.all_gather(y, axis, 1).transpose(1, 2)


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


# %% tags=["wrong"]
# FAIL: the exponentials overflow
def my_loss(logits, targets, first, axis):
    sums = comm.all_reduce(logits.exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: the loss on rank 0
def my_loss(logits, targets, first, axis):
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    own = logits.log_softmax(-1).gather(-1, place.where(here, 0)[:, None])[:, 0]
    return -comm.all_reduce(own.where(here, 0).sum(), axis)


# %% tags=["wrong"]
# FAIL: the ranks disagree
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - target).sum()


# %% tags=["wrong"]
# FAIL: small logits: the loss on rank 0: expected
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place > 0) & (place < logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: out of bounds
def my_loss(logits, targets, first, axis):
    top = comm.all_reduce(logits.amax(-1), axis, "max")
    sums = comm.all_reduce((logits - top[:, None]).exp().sum(-1), axis)
    place = targets - first
    here = (place >= 0) & (place <= logits.size(-1))
    target = logits.gather(-1, place.where(here, 0)[:, None])[:, 0].where(here, 0)
    return (sums.log() + top - comm.all_reduce(target, axis)).sum()


# %% tags=["wrong"]
# FAIL: the logits themselves travelled
def my_loss(logits, targets, first, axis):
    sizes = [13, 12, 12]
    whole = comm.all_gather(logits, axis, 1, sizes)
    return torch.nn.functional.cross_entropy(whole, targets, reduction="sum")


# %% [markdown]
# ## Questions
#
# 1. Why must the bias of a row-parallel layer be added after the sum, but that of a column-parallel layer
#    before gelu?
# 2. Which parameters are replicated under tensor parallelism, and how does their gradient become the same
#    on all ranks?
# 3. Sequence parallelism sends the same bytes as tensor parallelism. Where does it send more messages, and
#    when would that hurt?
# 4. Why does dropout after g need the same mask on all ranks in tensor parallelism, and different ones in
#    sequence parallelism?
#
# <details><summary>Answers</summary>
#
# 1. A row-parallel layer's partial results are summed: a bias inside would count n times. A column-parallel
#    layer owns complete features, and gelu needs the bias inside.
# 2. Norms, row biases, positions. Their outputs meet f on the way, and f's backward sums the ranks' parts.
# 3. Two calls for each all-reduce, each with its latency: it hurts for short sequences and slow links.
# 4. Replicated activations must stay equal, or the replicas drift apart. Cut activations are different
#    tokens, and equal masks would repeat the same pattern n times.
#
# </details>
#
# **Read on.** Shoeybi et al. 2019 (arXiv:1909.08053), section 3 · Korthikanti et al. 2022 (arXiv:2205.05198),
# section 4 · Krizhevsky 2014 (arXiv:1404.5997) · Stanford CS336 (2025), lecture 8.
