# %% [markdown]
# # 10 Splitting the sequence
#
# **The one-minute version.** A long sequence needs much memory for activations. So let N ranks share the *tokens* of
# every sequence. Layer norm, MLP and loss work token by token and do not notice. Attention does: token t looks at all
# tokens before it, and most of them live elsewhere. The ranks must exchange keys and values forward, and send their
# gradients home backward. And because later tokens look at more keys, it matters *which* tokens a rank gets.
#
# You will write the exchange by hand, measure the load triangle, and meet four layouts and eight exchanges,
# some of them compared with serial GPT-2 here, all of them by the package's tests.

# %% tags=["setup"]
import time

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import context as exercises
from gpt2lab.lessons.labs import context as lab
from gpt2lab.lessons.labs import recorded
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, PRESETS, GPT2Config, causal_attention
from gpt2lab.parallel.context import attention, costs, gather, tiles
from gpt2lab.parallel.context.exchanges import apply_context
from gpt2lab.parallel.context.layouts import LAYOUTS, layout
from gpt2lab.plan import Plan
from gpt2lab.plots import context as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import verify

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
pool = {n: Ranks(n) for n in (2, 3, 4)}  # live ranks, started when first used

# %% [markdown]
# ## Who owns which token
#
# A *layout* is a table of positions, nothing more. T tokens, N ranks; in the figure the number is the owner.

# %%
show(
    plots.token_owners([layout(name, 24, 3) for name in LAYOUTS]),
    "drawing",
    "24 tokens on three ranks, in the four layouts of this lesson.",
    "Four strips of 24 cells coloured by owner: slices, unequal slices, stripes, and mirrored chunks",
)

# %%
table(
    [(name, *(" ".join(map(str, mine)) for mine in layout(name, 11, 3).positions)) for name in LAYOUTS],
    ["11 tokens", "rank 0", "rank 1", "rank 2"],
)

# %% [markdown]
# - **contiguous**: rank i owns the slice from iT/N to (i+1)T/N. (The BSC notes, our source for splitting
# llm.c, write
#   "i/T to (i+1)/T"; a slip.)
# - **unequal**: slices that end at T sqrt(i/N).
# - **interleaved**: token t on rank t mod N. (The notes write t % (T/N), which gives T/N values, not
# ranks.)
# - **zigzag**: 2N chunks; rank r owns chunk r from the front and chunk r from the back.
#
# Sizes may be uneven. Nothing in this lesson needs T to divide.


# %% tags=["exercise"]
def owner(t, tokens, ranks, name):
    """The rank that owns token t; name is interleaved or zigzag, and for zigzag 2 * ranks divides tokens."""
    ### BEGIN SOLUTION
    if name == "interleaved":
        return t % ranks
    chunk = t // (tokens // (2 * ranks))
    return min(chunk, 2 * ranks - 1 - chunk)
    ### END SOLUTION


check("owner", exercises.owner, owner)


# %% tags=["wrong"]
# FAIL: interleaved: token
def owner(t, tokens, ranks, name):
    return t % (tokens // ranks)


# %% tags=["wrong"]
# FAIL: zigzag, 12 tokens on 3 ranks
def owner(t, tokens, ranks, name):
    return t % ranks


# %% tags=["wrong"]
# FAIL: zigzag, 12 tokens on 3 ranks: owners should be
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t % ranks
    return t // (tokens // ranks)


# %% tags=["wrong"]
# FAIL: zigzag: token
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t % ranks
    return t // (tokens // (2 * ranks))


# %% tags=["wrong"]
# FAIL: interleaved, 12 tokens on 3 ranks
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t // (tokens // ranks)
    chunk = t // (tokens // (2 * ranks))
    return min(chunk, 2 * ranks - 1 - chunk)


# %% [markdown]
# ## What breaks first
#
# Before any exchange, three token-by-token things go wrong at slice edges. Bug lab: a small GPT-2, rank 1 of two.

# %%
config = GPT2Config(vocab_size=50, n_positions=64, n_layer=2, n_head=4, n_embd=32)
model, batch = GPT2(config), torch.randint(50, (3, 12))
tokens, targets = batch[:, :-1], batch[:, 1:]
mine = torch.tensor(layout("contiguous", 11, 2).positions[1])

wrong = model.embed(tokens[:, mine], torch.arange(len(mine)))
right = model.embed(tokens, torch.arange(11))[:, mine]
print("1. local positions: embeddings differ:", not torch.allclose(wrong, right))

shifted_here = tokens[:, mine][:, 1:].numel() + tokens[:, : mine[0]][:, 1:].numel()
print(
    "2. targets shifted after the split:",
    targets.numel() - shifted_here,
    "of",
    targets.numel(),
    "targets are lost",
)


def head_gradient(columns, divide_by):
    loss = model.loss(model(tokens)[:, columns], targets[:, columns]) / divide_by
    return torch.autograd.grad(loss, model.ln_f.weight)[0]


first, whole = torch.arange(mine[0]), head_gradient(torch.arange(11), targets.numel())
for words, sizes in (("its own targets", (3 * len(first), 3 * len(mine))), ("all targets", (33, 33))):
    summed = head_gradient(first, sizes[0]) + head_gradient(mine, sizes[1])
    print(
        f"3. each rank divides by {words}: summed gradient over true one {summed.norm() / whole.norm():.2f}"
    )

# %% [markdown]
# So: every rank passes the **true positions** of its tokens; targets are shifted **before** the split; and the summed
# loss is divided **once**, by all target tokens of the whole batch. The package refuses local positions:


# %%
def local_positions(rank, world_size):
    model = GPT2(config)
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, layout="interleaved"))(11)
    try:
        model(tokens[:, mine], torch.arange(len(mine)))
    except ValueError as error:
        return str(error)


print(pool[2].run(local_positions)[1])

# %% [markdown]
# ## Attention by hand
#
# Rank r holds the rows of q, k, v of its own tokens. **Forward**: gather k and v; compute the own rows of attention.
# **Backward**: the own queries give dQ for own rows, complete; but they give dK and dV for *everybody's* keys, as
# partial sums. Add these over ranks and keep the own slice: a reduce-scatter, the adjoint of the gather.


# %%
def attend_by_hand(rank, world_size, name, q, k, v, grad):
    axis, split = Mesh(cp=world_size)["cp"], layout(name, q.size(-2), world_size)
    mine = torch.tensor(split.positions[rank])
    q, grad = q[..., mine, :], grad[..., mine, :]
    order, back = torch.tensor(split.order), torch.tensor(split.inverse)
    gathered = [comm.all_gather(x[..., mine, :], axis, -2, split.sizes) for x in (k, v)]
    k, v = (x[..., back, :] for x in gathered)  # from the order of ranks to the order of positions

    scores = q @ k.mT / q.size(-1) ** 0.5
    weights = scores.masked_fill(mine[:, None] < torch.arange(len(back)), -torch.inf).softmax(-1)
    y = weights @ v

    dv = weights.mT @ grad
    dweights = grad @ v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) / q.size(-1) ** 0.5
    dq, dk = dscores @ k, dscores.mT @ q
    partial = dk.square().sum((0, 1, 3)).sqrt()  # how much this rank adds to each token's dK
    dk, dv = (comm.reduce_scatter(x[..., order, :], axis, -2, split.sizes) for x in (dk, dv))
    return mine, y, dq, dk, dv, partial


def largest_error(results, expected):
    errors = [
        (got - want[..., found[0], :]).abs().max()
        for found in results
        for got, want in zip(found[1:5], expected, strict=False)
    ]
    return "below 1e-12" if max(errors) < 1e-12 else f"{max(errors):.1e}"


q, k, v, grad = torch.randn(4, 2, 4, 11, 8)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
whole = causal_attention(*leaves, torch.arange(11))
whole.backward(grad)
expected = [whole.detach(), *(x.grad for x in leaves)]
for name in LAYOUTS:
    results = pool[3].run(attend_by_hand, name, q, k, v, grad)
    print(f"{name:12} y, dQ, dK, dV differ from serial attention by", largest_error(results, expected))

# %% [markdown]
# The gathered rows arrive rank after rank; `inverse` is the *indirection table* that puts them in order. In a striped
# layout forgetting it mixes up the tokens.
#
# ## Who contributes to whose gradient
#
# In the contiguous layout, keys of rank i are seen by ranks i and later. The others' partial sums are
# exactly zero:

# %%
results = pool[4].run(attend_by_hand, "contiguous", q, k, v, grad)
slices = layout("contiguous", 11, 4).positions
parts = [[found[5][list(tokens_of)].norm().item() for tokens_of in slices] for found in results]
show(
    plots.contributions(parts),
    "computed",
    "what each rank adds to the key gradients of each slice; above the diagonal it is exactly zero.",
    "A four by four table, lower triangle filled, upper triangle zero",
)

# %% [markdown]
# So one all-reduce of everything wastes half: reduce each slice to its owner, its *root*, over the ranks that
# contribute. The notes say: "if the root rank is i, you can remove the ranks with id <= i from the reduction". One
# rank too many! The root's own queries see its own keys. It may stay out of the *communication*, but it must add
# its own part:

# %%
for root in range(3):
    complete = sum(parts[r][root] for r in range(4))
    print(
        f"root {root}: without the ranks <= {root}, {parts[root][root] / complete:.0%} of the parts' size is missing"
    )


# %% tags=["exercise"]
def contributors(root, ranks):
    """The ranks whose queries see keys of `root`, in a contiguous layout."""
    ### BEGIN SOLUTION
    return list(range(root, ranks))
    ### END SOLUTION


check("contributors", exercises.contributors, contributors)


# %% tags=["wrong"]
# FAIL: its own queries see its own keys
def contributors(root, ranks):
    return list(range(root + 1, ranks))


# %% tags=["wrong"]
# FAIL: expected ranks 1 to 1
def contributors(root, ranks):
    return list(range(ranks))


# %% tags=["wrong"]
# FAIL: expected ranks 0 to 1, got [0]
def contributors(root, ranks):
    return [root]


# %% tags=["wrong"]
# FAIL: root 1 of 2: expected ranks 1 to 1, got [0, 1]
def contributors(root, ranks):
    return sorted({*range(root, ranks), *range(root + 1)})


# %% tags=["wrong"]
# FAIL: root 0 of 4: expected ranks 0 to 3, got [0, 1]
def contributors(root, ranks):
    return list(range(root, min(root + 2, ranks)))


# %% [markdown]
# ## Eight ways, counted
#
# The source gathers q, k *and* v and all-reduces all three gradients. But nobody else reads q, and dQ is complete
# at home. **Predict**: how much less does `kv` send than `qkv`? And `triangle`, where each rank sends only to those
# who need it?


# %%
def count(rank, world_size, exchange, name, length):
    model = GPT2(GPT2Config(vocab_size=50, n_positions=64, n_layer=1, n_head=4, n_embd=32))
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, layout=name, exchange=exchange))(
        length
    )
    attention.work.clear()
    comm.clear_log()
    x = torch.arange(length).expand(2, -1)[:, mine]
    logits = model(x, mine)
    forward = sum(e.bytes for e in comm.log) // 4
    model.loss(logits, x).backward()
    return forward, sum(e.bytes for e in comm.log) // 4 - forward, dict(attention.work)


rows = []
split = layout("contiguous", 24, 4)
for exchange in ("qkv", "kv-allreduce", "kv", "kv-roots", "triangle", "ring", "double-ring", "heads"):
    found = pool[4].run(count, exchange, "contiguous", 24)
    predicted = [costs.sent(exchange, split, r, 2 * 32) for r in range(4)]
    equal = all(f[:2] == (p["forward"][0], p["backward"][0]) for f, p in zip(found, predicted, strict=True))
    rows.append((exchange, sum(f[0] for f in found) / 1e3, sum(f[1] for f in found) / 1e3))
    print(
        f"{exchange:13} forward {rows[-1][1]:6.2f}, backward {rows[-1][2]:6.2f} thousand numbers; as predicted: {equal}"
    )

# %%
show(
    plots.volumes(rows),
    "counted",
    "numbers sent by four ranks in one layer, 24 tokens in contiguous slices; every bar equals its formula.",
    "Eight bars: qkv 41, kv-allreduce 28, kv 18, double-ring 16, kv-roots and ring 14, triangle and heads 9 thousand",
)

# %% [markdown]
# With S the size of all keys and values: all-reduce 2(N-1)S, reduce-scatter (N-1)S, triangle (N-1)S/2 over all ranks.
# `heads` belongs to lesson 11, the rings come below. This is all that `kv`, `kv-roots` and `triangle` are made of:

# %%
show_source(gather.gather, gather.point_to_point, gather.by_reduce_scatter, gather.by_roots)

# %% [markdown]
# ## The load triangle
#
# Row t of causal attention costs t + 1 pairs. In contiguous slices rank i has a share of about (2i+1)/N², and the
# last one about (2N-1)/N times the mean (to leading order in T; exactly, the diagonal counts too). Is that real
# work or only a mask? The package hands torch's kernel whole rectangles and triangles of the mask, never a pair
# that nobody attends to, and *counts* the pairs it hands over.

# %%
for name in ("contiguous", "interleaved"):
    found = pool[4].run(count, "kv", name, 32)
    pairs = [f[2]["forward"] // (2 * 4) for f in found]
    print(f"{name:12} pairs computed {pairs}, busiest over mean {costs.imbalance(pairs).__float__():.2f}")
print("predicted for slices:", [costs.pairs(layout("contiguous", 32, 4), r) for r in range(4)])

# %% [markdown]
# A kernel that needs a mask does more. It takes some queries at a time, a *tile*, with the keys that any of them
# sees. With slices that wastes pairs on the diagonal block only; with stripes half of *every* block:

# %%
for tile in (8, 2, 1):
    split = layout("interleaved", 32, 4)
    computed = [
        sum(tiles.pairs_computed(mine, keys, None, tile) for keys in split.positions)
        for mine in split.positions
    ]
    print(f"tile {tile}: computed {sum(computed):4} of {32 * 33 // 2} needed, per rank {computed}")

# %% [markdown]
# Waiting time shows the triangle without any formula. Below, computing is replaced by sleeping in proportion to the
# pairs (*paced*), so that four ranks show their true picture on two cores. Each layer ends with a gather, where the
# fast ones wait.


# %% tags=["measured"]
def paced_layers(rank, world_size, name, layers=3):
    axis, pairs = Mesh(cp=world_size)["cp"], costs.pairs(layout(name, 64, world_size), rank)
    comm.barrier(axis)
    trace.clear()
    for i in range(layers):
        with trace.span(f"layer {i}", kind="forward"):
            time.sleep(pairs * 1e-4)
        with trace.span("", kind="wait"):
            comm.all_gather(torch.zeros(8), axis)
    return trace.spans(with_comm=False)


for name in ("contiguous", "interleaved", "zigzag"):
    show(
        timeline(trace.merge(pool[4].run(paced_layers, name)), name, clock="paced"),
        "paced",
        f"three layers of causal attention, {name}: grey is waiting in the gather that ends a layer.",
        f"Four lanes of blue bars; with the {name} split "
        + ("early ranks mostly wait" if name == "contiguous" else "all ranks wait alike, and little"),
    )

# %% [markdown]
# A layer lasts as long as its busiest rank. So with contiguous slices 1 - mean/busiest = (N-1)/(2N-1) = 3/7 of all
# time is lost. The BSC team saw rank 0 of their cluster wait more than 100 ms in each of the 12 attention layers of
# a backward pass. Does it show on real ranks? Two of them, real attention to 2048 tokens, nothing paced:


# %% tags=["measured"]
for name in ("contiguous", "interleaved", "zigzag"):
    spans = trace.merge(pool[2].run(lab.timed_layers, name))
    show(
        timeline(spans, name, names=False, clock="measured"),
        "measured",
        f"attention of two layers on two ranks, {name}: blue forward, green dQ, dK, dV, grey waiting for rows.",
        f"Two lanes of blue and green bars with grey between them, for the {name} layout",
    )
    waits = [1e3 * sum(s.end - s.start for s in spans if s.rank == r and s.kind == "wait") for r in (0, 1)]
    print(f"{name}: rank 0 waits {waits[0]:.0f} ms, rank 1 {waits[1]:.0f} ms")

# %% [markdown]
# With slices rank 0 is done early and waits; interleaved or zigzag, both do equal work in each kernel, and what is
# left to wait for is the exchange itself and the machine's other business.


# %% tags=["exercise"]
def imbalance(tokens, ranks):
    """The busiest rank's attention work over the mean, for contiguous slices; ranks divides tokens."""
    ### BEGIN SOLUTION
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) * ranks / sum(loads)
    ### END SOLUTION


check("imbalance", exercises.imbalance, imbalance)


# %% tags=["wrong"]
# FAIL: 4 tokens on 2 ranks
def imbalance(tokens, ranks):
    return (2 * ranks - 1) / ranks


# %% tags=["wrong"]
# FAIL: one rank is balanced by itself
def imbalance(tokens, ranks):
    return tokens / ranks


# %% tags=["wrong"]
# FAIL: expected 1.4, got 2.33333
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) / min(loads)


# %% tags=["wrong"]
# FAIL: expected 1.4, got 1.66667
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) * ranks / sum(loads)


# %% tags=["wrong"]
# FAIL: expected 1.4, got 0.7
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) / sum(loads) if ranks > 1 else 1


# %% [markdown]
# ## Unequal slices, and why they were rejected
#
# Slices that end at T sqrt(i/N) hold equal *areas* of the triangle. But a rank does more than the forward triangle:
# the MLP costs a fixed amount a token, and a kernel that sums dK, dV *by key* costs T - t.

# %%
show(
    plots.busiest_over_mean(1024, 4),
    "computed",
    "busiest rank over the mean, 1024 tokens on four ranks; the softmax backward is llm.c's, quadratic in a row.",
    "A table of layouts by kernels: unequal slices are best in two columns and worst in two others",
)

# %% [markdown]
# Who sums dK, dV is a choice: our kernel does it with the queries, in the same pass as dQ. llm.c's does it by key,
# and then the owner of a key has one pair for each later query. The package has that loop as well, to count it:

# %%
x, everyone = torch.randn(1, 1, 32, 4), range(32)
out, lse = attention.block_forward(None, x, x, x, everyone, everyone)
for name in LAYOUTS:
    loads = []
    for keys in layout(name, 32, 4).positions:
        attention.work.clear()
        held = x[:, :, list(keys)]
        attention.gradients_by_key(x, out, lse, x, held, held, everyone, keys, tile=1)
        loads.append(attention.work["dK,dV by key"])
    same = loads == costs.work(layout(name, 32, 4), "dK,dV by key")
    print(
        f"{name:12} pairs by key {loads}, over the mean {float(costs.imbalance(loads)):.2f}; as predicted: {same}"
    )

# %% [markdown]
# Unequal slices move the problem: 3.00 for dK, dV by key and 2.00 for the MLP. **Interleaving** balances every
# kernel. **Zigzag** pairs a short chunk with the long one that makes up for it: exactly balanced wherever cost is
# linear in t, though not for the quadratic softmax. Its chunks are solid, so big tiles waste little. Price of both:
# everybody needs everybody's keys, so the triangle's savings are gone. After interleaving, the notes report that all
# kernels took the same time, but that dK, dV became slow, "probably computing unnecessary tokens": a loop over all t
# with a mask does T²/N where the needed pairs are half of that, as you counted.
#
# ## Ring attention: two blocks become one
#
# Gathering needs all keys in memory at once. A *ring* passes blocks of keys along, and each rank attends to the one
# it holds. But softmax needs the sum over **all** keys. Let block b give its output o_b and L_b, the log of its sum
# of exp(scores). Then softmax over both blocks is a weighted mean, weights exp(L_b):
#
# - a = exp(L_2) / (exp(L_1) + exp(L_2)) = sigmoid(L_2 - L_1)
# - o = (1 - a) o_1 + a o_2
# - L = log(exp L_1 + exp L_2) = L_1 - logsigmoid(L_1 - L_2)
#
# No exp of a large number anywhere. But a row that sees no key of block 1 has L_1 = -inf, and the last form gives
# inf - inf; `torch.logaddexp(L1, L2)`, which the package uses, is the same L and right there too. Backward is simpler
# still: with the *final* L, each block's weights are exp(score - L).


# %% tags=["exercise"]
def merge(o1, L1, o2, L2):
    """Output (R, D) and log-sum-exp (R, 1) of two blocks of keys together."""
    ### BEGIN SOLUTION
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, torch.logaddexp(L1, L2)
    ### END SOLUTION


check("merge", exercises.merge, merge)


# %% tags=["wrong"]
# FAIL: merged output
def merge(o1, L1, o2, L2):
    return (o1 + o2) / 2, torch.logaddexp(L1, L2)


# %% tags=["wrong"]
# FAIL: huge scores
def merge(o1, L1, o2, L2):
    total = L1.exp() + L2.exp()
    return (L1.exp() * o1 + L2.exp() * o2) / total, total.log()


# %% tags=["wrong"]
# FAIL: each row needs a maximum of its own
def merge(o1, L1, o2, L2):
    top = torch.maximum(L1, L2).max()
    a, b = (L1 - top).exp(), (L2 - top).exp()
    return (a * o1 + b * o2) / (a + b), (a + b).log() + top


# %% tags=["wrong"]
# FAIL: a row of which one block sees no key
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, L1 - torch.nn.functional.logsigmoid(L1 - L2)


# %% tags=["wrong"]
# FAIL: merged log-sum-exp
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, torch.maximum(L1, L2)


# %% [markdown]
# **Backward, on three live ranks.** A rank holds q, k, v, its output o, the final L (t, 1) and the gradient of o. With
# p = exp(score - L), δ the sum of grad · o in each row, ds = p (grad vᵀ - δ) and scores q kᵀ / √D: dv += pᵀ grad,
# dq += ds k / √D, dk += dsᵀ q / √D. Keys and values go round the ring, and *their gradients travel with them*, so that
# after n shifts they are home. `comm.ring_shift(x, axis)` gives the left neighbour's x.


# %% tags=["exercise"]
def ring_backward(q, k, v, o, L, grad, axis):
    """(dq, dk, dv) of this rank's t tokens (t, D), contiguous slices, causal."""
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    ### BEGIN SOLUTION
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:  # later tokens are not seen
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]
    ### END SOLUTION


check("ring attention, backward", exercises.ring_backward, ring_backward)


# %% tags=["wrong"]
# FAIL: dq on rank 0
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: dk on rank 0
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: dk on rank 0: expected -0.0566269 at (1, 1), got -0.487
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner == r:
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: on a ring only neighbours talk
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    k, v = comm.all_gather(k, axis), comm.all_gather(v, axis)
    hidden = torch.ones(n * t, n * t).triu(1)[r * t : (r + 1) * t] > 0
    p = ((q @ k.T / D**0.5).masked_fill(hidden, -torch.inf) - L).exp()
    ds = p * (grad @ v.T - delta) / D**0.5
    return ds @ k, comm.reduce_scatter(ds.T @ q, axis), comm.reduce_scatter(p.T @ grad, axis)


# %% tags=["wrong"]
# FAIL: k, v and two gradients once round are
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        comm.ring_shift(moving, axis)
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: dv on rank 0
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            k, v = moving[:2]
            scores = q @ k.T / D**0.5
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta) / D**0.5
            dq += ds @ k
            moving[2] += ds.T @ q
            moving[3] = p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %%
def ring_by_hand(rank, world_size, q, k, v):
    axis, split = Mesh(cp=world_size)["cp"], layout("interleaved", q.size(-2), world_size)
    mine, n = list(split.positions[rank]), world_size
    q, held, state = q[..., mine, :], torch.stack((k, v))[..., mine, :], None
    for step in range(n):
        source = (rank - step) % n
        if step < n - 1:  # start passing on, then compute: the messages travel meanwhile
            going = comm.isend(held, axis, (rank + 1) % n)
            shape = (*held.shape[:-2], split.sizes[(source - 1) % n], held.size(-1))
            coming = comm.irecv(held.new_empty(shape), axis, (rank - 1) % n)
        state = attention.block_forward(state, q, *held, mine, list(split.positions[source]))
        if step < n - 1:
            going.wait()
            held = coming.wait()
    return torch.tensor(mine), state[0]


results = pool[3].run(ring_by_hand, q, k, v)
print("ring by hand differs from serial attention by", largest_error(results, expected[:1]))
show_source(attention.merge_blocks)

# %% [markdown]
# Backward is a second trip: k, v go round again, and each block's dK, dV follow *one step behind*, growing on the
# way, to arrive at the owner at the end. In a contiguous ring, blocks that nobody further on needs are not sent at
# all; blocks that a rank does not need are passed on but not computed. Where ranks sit in several machines,
# `double-ring` sends a block round one machine first and then to the next one, from all ranks at once (Gu et al.
# 2024, LoongTrain).
#
# Both trips as three live ranks made them (*paced*: 30 ms a message, 60 ms a block). Play it, or step with the
# arrow keys: where is `kv0` at each step, and which messages of the second trip are gradients?

# %% tags=["measured"]
play(
    pool[3].run(recorded.ring_attention),
    "paced",
    "ring attention on three live ranks, forward (blue) and backward (green): each rank's queries meet one block of "
    "keys and values at a time.",
    "Three ranks as boxes, arrows around the ring, and under each the block of keys and values it holds",
)

# %% [markdown]
# When does the ring hide its messages? A block of c tokens a rank costs about 4c²C operations and brings 2cC
# numbers: communication is hidden when c exceeds roughly flops per second over bytes per second (Liu et al. 2023;
# *from the paper*), for numbers of 16 bits, two bytes each.
#
# ## Memory
#
# llm.c keeps 23 activation tensors, each with a factor T. Split, T becomes T/N, but for gathered k, v (all of T) and
# the attention matrix (T/N rows of T).

# %%
show(
    plots.memory(PRESETS["gpt2"], 1, 1024),
    "computed",
    "llm.c's activation tensors of GPT-2 124M, one sequence of 1024 tokens, keys and values gathered.",
    "Three stacked bars that shrink almost by half each time ranks double",
)
whole = sum(costs.activations(PRESETS["gpt2"], 4, layout("contiguous", 64, 1), 0).values())
print(f"B=4, T=64, one rank: {whole:,} numbers; llm.c prints num_activations: 73323776")

# %% [markdown]
# ## Pick a layout and an exchange


# %%
explore(
    lambda name, exchange, ranks: plots.picker(name, exchange, ranks, 96),
    "computed",
    "{name} layout with {exchange} on {ranks} ranks: whose rows the mask has, the balance of work, and the traffic.",
    "A causal mask coloured by rank, work bars, and bars of bytes, for {name} and {exchange}",
    posters=[
        {"name": "contiguous", "exchange": "triangle", "ranks": 4},
        {"name": "zigzag", "exchange": "ring", "ranks": 4},
    ],
    name=["zigzag", *(n for n in LAYOUTS if n != "zigzag")],
    exchange=["ring", "qkv", "kv-allreduce", "kv", "kv-roots", "triangle", "double-ring", "heads"],
    ranks=(2, 8, 4),
)

# %% [markdown]
# ## Equal to serial GPT-2
#
# Loss, every gradient, the norm, and the weights after SGD and AdamW steps, for 11 tokens on three ranks:

# %%
small = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=3, n_embd=12)
for plan in ("cp=3,exchange=kv,layout=interleaved", "cp=3,exchange=ring,layout=zigzag"):
    report = verify(plan, small, rows=2, ranks=pool[3])
    print(f"{plan}: {len(report.claims)} claims, all equal: {report.ok}")

# %% [markdown]
# Generation is **not** split: new tokens come one at a time, there is nothing to share out. Every rank holds all
# weights, so `unsplit(model)` and generate.
#
# ## Drill
#
# <details><summary>1. Why is only dK, dV reduced and not dQ?</summary>
# A query belongs to one rank, and all its scores are computed there. A key is used by many ranks' queries.
# </details>
#
# <details><summary>2. Which single number must all ranks agree on for the loss?</summary>
# The number of target tokens of the whole batch: divide once by it, then sum.
# </details>
#
# <details><summary>3. Contiguous ring of 4: which messages are never sent?</summary>
# Any from rank 3 to rank 0: nobody before needs later keys. Block s makes N-1-s hops.
# </details>
#
# <details><summary>4. Why may unequal slices be balanced in the forward and still be slow?</summary>
# The MLP and sums by key are proportional to other things: the tokens, and T - t.
# </details>
#
# ## Sources
#
# BSC, wiki of llm.c-gpt2, "Various informations" (token splitting) · Liu, Zaharia & Abbeel 2023, Ring Attention ·
# Brandon et al. 2023, Striped Attention · Li et al. 2023, LightSeq (causal balance) · Milakov & Gimelshein 2018,
# online softmax · Dao et al. 2022, FlashAttention. Next: **11 Heads and halos**.
