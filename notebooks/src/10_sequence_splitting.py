# %% [markdown]
# # 10 Splitting the sequence
#
# **The one-minute version.** A long sequence needs much memory for activations. So let N ranks share the *tokens* of
# every sequence. Layer norm, MLP and loss work token by token and do not notice. Attention does: token t looks at all
# tokens before it, and most of them live elsewhere. The ranks must exchange keys and values forward, and send their
# gradients home backward. And because later tokens look at more keys, it matters *which* tokens a rank gets.
#
# You will meet four layouts and eight exchanges on live ranks.

# %% tags=["setup"]
import torch
import torch.nn.functional as F

from gpt2lab import Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import context as exercises
from gpt2lab.lessons.labs import context as lab
from gpt2lab.lessons.labs import recorded, thresholds
from gpt2lab.lessons.labs.instruments import asleep, begin, kept_for_backward, seconds_of
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, PRESETS, GPT2Config, causal_attention
from gpt2lab.parallel.context import attention, borrow, costs, tiles
from gpt2lab.parallel.context.exchanges import apply_context
from gpt2lab.parallel.context.layouts import LAYOUTS, layout
from gpt2lab.plan import Plan
from gpt2lab.plots import context as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import verify

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
pool = {n: Ranks(n) for n in (2, 3, 4)}  # live ranks, started when first used

# %% [markdown]
# ## Who owns which token
#
# T tokens, N ranks. Through all layers a token stays with its owner; only attention looks across.

# %%
show(
    plots.layer_stack(layout("contiguous", 24, 3)),
    "drawing",
    "two layers of GPT-2, 24 tokens in slices on three ranks, which talk in attention only.",
    "Rows of cells from embedding to loss, coloured by owner; arrows cross the borders only under attention",
)

# %% [markdown]
# A **token layout** is a table of positions; here the number is the owner.

# %%
show(
    plots.token_owners([layout(name, 24, 3) for name in LAYOUTS]),
    "drawing",
    "24 tokens on three ranks, in the four layouts of this lesson.",
    "Four strips of 24 cells coloured by owner: slices, unequal slices, stripes, and mirrored chunks",
)
table(
    [(name, *(" ".join(map(str, mine)) for mine in layout(name, 11, 3).positions)) for name in LAYOUTS],
    ["11 tokens", "rank 0", "rank 1", "rank 2"],
)

# %% [markdown]
# - **contiguous**: rank i owns the slice from iT/N to (i+1)T/N. (The BSC notes, our source, write "i/T to (i+1)/T".)
# - **unequal**: slices; rank i's ends at T sqrt((i+1)/N).
# - **interleaved**: token t on rank t mod N. (The notes write t % (T/N), which gives T/N values, not ranks.)
# - **zigzag**: 2N chunks; rank r owns chunk r from the front and chunk r from the back.


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


# %% [markdown] tags=["hint"]
# Zigzag: first find the chunk that holds t. There are 2 * ranks chunks, and chunk c and its mirror image from
# the back have the same owner. What is the mirror image of chunk 0?


# %% tags=["wrong"]
# FAIL: Token 3 went to rank 3 of only 3
# MISTAKE: Takes t modulo the slice's length where it should be modulo the ranks (a slip in a published text).
def owner(t, tokens, ranks, name):
    return t % (tokens // ranks)


# %% tags=["wrong"]
# FAIL: zigzag, 12 tokens on 3 ranks
# MISTAKE: Zigzag is taken for interleaved.
def owner(t, tokens, ranks, name):
    return t % ranks


# %% tags=["wrong"]
# FAIL: Zigzag cuts the tokens into twice as many chunks as ranks, and gives each rank two of them
# MISTAKE: Zigzag is taken for contiguous slices.
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t % ranks
    return t // (tokens // ranks)


# %% tags=["wrong"]
# FAIL: Token 10 went to rank 5 of only 3
# MISTAKE: Chunks are numbered, but the second half is not folded back onto the ranks.
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t % ranks
    return t // (tokens // (2 * ranks))


# %% tags=["wrong"]
# FAIL: interleaved, 12 tokens on 3 ranks
# MISTAKE: Interleaved is taken for contiguous slices.
def owner(t, tokens, ranks, name):
    if name == "interleaved":
        return t // (tokens // ranks)
    chunk = t // (tokens // (2 * ranks))
    return min(chunk, 2 * ranks - 1 - chunk)


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's layout is asked.
def owner(t, tokens, ranks, name):
    return layout(name, tokens, ranks).owners[t]


# %% [markdown]
# ## What breaks first
#
# Three things go wrong at the edges of slices. A GPT-2 on two ranks, exchanged correctly,
# with one bug at a time.

# %%
guess = predict(
    "Which bug changes the loss least?",
    "local positions",
    "targets shifted after the split",
    "each rank divides by its own count",
)

# %%
rows = []
for bug in (
    "none",
    "local positions",
    "targets shifted after the split",
    "each rank divides by its own count",
):
    loss, error, trained = pool[2].run(lab.edges, bug)[1]
    off = "below 1e-12" if error < 1e-12 else f"{error:.0%}"
    rows.append((bug, f"{loss:.3f}", off, f"{trained[0]} to {trained[-1]}"))
table(rows, ["bug", "sum of the ranks' losses", "gradient is off by", "rank 1 trains position rows"])
(_, right, *_), *wrong = rows
guess.beside(min(wrong, key=lambda row: abs(float(row[1]) - float(right)))[0], "computed")
print(f"shifted after the split, over the 9 targets that are left: {11 / 9 * float(wrong[1][1]):.3f}")

# %% [markdown]
# Local positions train rows of the position table that belong to rank 0. A shift after the split loses the last target
# of each slice; over those left the loss looks right: 3.909<!--above-->. Dividing by the own count gives N losses
# instead of one. Pass the **true positions**; shift **before** the split; divide **once**, by all target tokens of the
# batch. Large programs met the last two: the label at each border was lost
# ([transformers#36607](https://github.com/huggingface/transformers/pull/36607)), and with masked targets even a mean of
# ranks' means is wrong ([Megatron-LM#7513](https://github.com/NVIDIA/Megatron-LM/pull/7513)). Where gradients are
# averaged over dp and cp, the loss is multiplied by cp first
# ([Megatron-LM#673](https://github.com/NVIDIA/Megatron-LM/issues/673)). The package refuses local positions:


# %%
def local_positions(rank, world_size):
    model = GPT2(GPT2Config(vocab_size=50, n_positions=64, n_layer=1, n_head=4, n_embd=32))
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, layout="interleaved"))(11)
    try:
        model(torch.zeros_like(mine)[None], torch.arange(len(mine)))
    except ValueError as error:
        return str(error)


print(pool[2].run(local_positions)[1])

# %% [markdown]
# ## Attention by hand
#
# Rank r holds q, k, v of its own tokens. **Forward**: gather k and v; compute its rows.
# **Backward**: the own queries give all of dQ for own rows, but of dK and dV partial sums for *everybody's* keys. Add
# these and keep the own slice: a reduce-scatter.


# %%
def attend_by_hand(rank, world_size, name, q, k, v, grad, mask=None):
    axis, split = Mesh(cp=world_size)["cp"], layout(name, q.size(-2), world_size)
    mine = torch.tensor(split.positions[rank])
    masked = torch.tensor(layout(mask or name, split.tokens, world_size).positions[rank])
    q, grad = q[..., mine, :], grad[..., mine, :]
    order, back = torch.tensor(split.order), torch.tensor(split.inverse)
    gathered = [comm.all_gather(x[..., mine, :], axis, -2, split.sizes) for x in (k, v)]
    k, v = (x[..., back, :] for x in gathered)  # from the order of ranks to the order of positions

    scores = q @ k.mT / q.size(-1) ** 0.5
    weights = scores.masked_fill(masked[:, None] < torch.arange(len(back)), -torch.inf).softmax(-1)
    y = weights @ v

    dv = weights.mT @ grad
    dweights = grad @ v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) / q.size(-1) ** 0.5
    dq, dk = dscores @ k, dscores.mT @ q
    partial = dk  # what this rank adds to each token's dK
    dk, dv = (comm.reduce_scatter(x[..., order, :], axis, -2, split.sizes) for x in (dk, dv))
    return mine, y, dq, dk, dv, partial


def largest_error(results, expected):
    pairs = [
        (got, want, found[0]) for found in results for got, want in zip(found[1:5], expected, strict=False)
    ]
    worst = torch.stack([(got - want[..., mine, :]).abs().max() for got, want, mine in pairs]).max()
    return "below 1e-12" if worst < 1e-12 else f"{worst:.1e}"


q, k, v, grad = torch.randn(4, 2, 4, 11, 8)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
whole = causal_attention(*leaves, torch.arange(11))
whole.backward(grad)
expected = [whole.detach(), *(x.grad for x in leaves)]
for name, mask in (*zip(LAYOUTS, LAYOUTS, strict=True), ("interleaved", "contiguous")):
    off = largest_error(pool[3].run(attend_by_hand, name, q, k, v, grad, mask), expected)
    print(f"{name:11} mask of {mask:11} y, dQ, dK, dV differ from serial attention by {off}")

# %% [markdown]
# The gathered rows arrive rank after rank; `inverse` is the *indirection table* that puts them in order. The last
# line masks stripes as if they were slices. (Gathered along the wrong dimension:
# [torchtitan#3206](https://github.com/pytorch/torchtitan/pull/3206); all tokens counted on each rank:
# [#2983](https://github.com/pytorch/torchtitan/issues/2983).)
#
# ### The adjoint test
#
# Is the reduce-scatter really the backward of the gather? Then <Ax, y> = <x, A'y> for all x and y:


# %%
def adjoint(rank, world_size, scatter_back):
    axis, split = Mesh(cp=world_size)["cp"], layout("zigzag", 11, world_size)
    draw = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (split.sizes[rank], 11))
    there = (comm.all_gather(x, axis, -2, split.sizes) * y).sum()
    summed = comm.reduce_scatter(y, axis, -2, split.sizes)
    back = summed if scatter_back else y.split(split.sizes)[rank]
    return comm.all_reduce(torch.stack((there, (x * back).sum())), axis)


for words, summed in (("reduce-scatter", True), ("own slice, no sum", False)):
    there, back = pool[3].run(adjoint, summed)[0].tolist()
    print(f"{words:17}: <Ax, y> = {there:.3f}, <x, A'y> = {back:.3f}")

# %% [markdown]
# ## Who contributes to whose gradient
#
# In the contiguous layout, keys of rank i are seen by ranks i and later. The others' partial sums are
# zero:

# %%
results = pool[4].run(attend_by_hand, "contiguous", q, k, v, grad)
slices = layout("contiguous", 11, 4).positions
parts = [[found[5][..., list(tokens_of), :].norm().item() for tokens_of in slices] for found in results]
show(
    plots.contributions(parts),
    "computed",
    "what each rank adds to the key gradients of each slice; above the diagonal it is exactly zero.",
    "A four by four table, lower triangle filled, upper triangle zero",
)

# %% [markdown]
# Half of what ranks would send each other is zero: reduce each slice to its owner, its *root*, over the ranks that
# contribute. The notes say: "if the root rank is i, you can remove the ranks with id <= i from the reduction". One
# rank too many! The root's own queries see its own keys:

# %%
dk, right, wrong = expected[2], [], []
for root, mine in enumerate(slices):
    of_root = lambda ranks, mine=list(mine): sum((results[r][5] for r in ranks), 0 * dk)[..., mine, :]
    right.append((of_root(range(root, 4)) - dk[..., list(mine), :]).abs().max().item())
    wrong.append((of_root(range(root + 1, 4)) - dk[..., list(mine), :]).abs().max().item())
print("sum over ranks >= root, root 0 to 3: dK off by", "below 1e-12" if max(right) < 1e-12 else max(right))
print("sum over ranks > root, as the notes say: off by", *(f"{off:.2f}" for off in wrong))


# %% tags=["exercise"]
def contributors(root, ranks):
    """The ranks whose queries see keys of `root`, in a contiguous layout."""
    ### BEGIN SOLUTION
    return list(range(root, ranks))
    ### END SOLUTION


check("contributors", exercises.contributors, contributors)


# %% [markdown] tags=["hint"]
# A query at position t sees keys at positions up to t. Whose positions are at or behind those of `root`?


# %% tags=["wrong"]
# FAIL: Its own queries see its own keys
# MISTAKE: A rank is left out of its own sum (a slip in a published text).
def contributors(root, ranks):
    return list(range(root + 1, ranks))


# %% tags=["wrong"]
# FAIL: Rank 0 holds earlier tokens, which see no key of rank 1
# MISTAKE: Every rank is taken to contribute, also those that see no key of the root.
def contributors(root, ranks):
    return list(range(ranks))


# %% tags=["wrong"]
# FAIL: Later ranks see the root's keys, too
# MISTAKE: Only the root itself is taken to contribute.
def contributors(root, ranks):
    return [root]


# %% tags=["wrong"]
# FAIL: The last rank's number is ranks - 1
# MISTAKE: One rank too many: the last rank's number is ranks - 1.
def contributors(root, ranks):
    return list(range(root, ranks + 1))


# %% tags=["wrong"]
# FAIL: All later ranks see the keys of the root, not only the next one
# MISTAKE: Only the next rank is taken to see the keys.
def contributors(root, ranks):
    return list(range(root, min(root + 2, ranks)))


# %% tags=["wrong"]
# FAIL: expected 0 at (0,), got 0.5
# MISTAKE: Middles of slices are given, not the numbers of ranks.
def contributors(root, ranks):
    return [rank + 0.5 for rank in range(root, ranks)]


# %% [markdown]
# ## Eight ways, compared
#
# The source gathers q, k *and* v and all-reduces all three gradients. Nobody else reads q, and dQ is complete
# at home.
#
# | exchange | forward | backward |
# |---|---|---|
# | `qkv` | gather q, k, v | all-reduce dQ, dK, dV |
# | `kv-allreduce` | gather k, v | all-reduce dK, dV |
# | `kv` | gather k, v | reduce-scatter |
# | `kv-roots` | gather k, v | one reduce a root |
# | `triangle` | k, v only to ranks that need them | turned round |
# | `ring`, `double-ring` | k, v pass round (below) | gradients travel along |
# | `heads` | all-to-all (lesson 11) | turned round |

# %%
guess = predict("There and back, `qkv` sends how many times what `triangle` sends?", unit="times")


# %%
rows, exact = [], []
split = layout("contiguous", 24, 4)
for exchange in ("qkv", "kv-allreduce", "kv", "kv-roots", "triangle", "ring", "double-ring", "heads"):
    found = pool[4].run(lab.one_layer, exchange, "contiguous", 24)
    formula = [costs.sent(exchange, split, r, 2 * 32) for r in range(4)]
    rows.append((exchange, *(sum(f[i] for f in found) / 1e3 for i in (0, 1))))
    right = all(f[:2] == (p["forward"][0], p["backward"][0]) for f, p in zip(found, formula, strict=True))
    exact.append((*rows[-1], right, max(f[3] for f in found) < 1e-12, found[3][4]))
same = {digest for *_, digest in exact[:5]}
table(
    [r[:-1] for r in exact],
    ["exchange", "forward, thousand numbers", "backward", "as predicted", "gradients equal"],
)
print("loss of the five that gather or send k and v equal to the last bit:", len(same) == 1)
total = {name: forward + backward for name, forward, backward in rows}
guess.beside(total["qkv"] / total["triangle"], "counted")

# %%
show(
    plots.volumes(rows),
    "computed",
    "numbers that four ranks send in one layer, 24 tokens in contiguous slices, from the calls that live ranks made: "
    "of a send its size, of a collective what its ring sends.",
    "Eight bars: qkv 41, kv-allreduce 28, kv 18, double-ring 16, kv-roots and ring 14, triangle and heads 9 thousand",
)

# %% [markdown]
# With S the size of all keys and values: all-reduce 2(N-1)S, reduce-scatter (N-1)S, triangle (N-1)S/2 over all ranks.
# This is what `kv`, `kv-roots` and `triangle` are made of:

# %%
show_source(borrow.lend_by, borrow.return_by, borrow.by_reduce_scatter, borrow.by_roots)

# %% [markdown]
# ## The load triangle
#
# Row t of causal attention costs t + 1 pairs. In contiguous slices rank i has a share of about (2i+1)/N², and the
# last one about (2N-1)/N times the mean (to leading order in T; exactly, the diagonal counts too). Is that
# work or only a mask? The package gives torch's kernel no pair that nobody attends to, and *counts* the pairs.

# %%
for name in ("contiguous", "interleaved"):
    found = pool[4].run(lab.one_layer, "kv", name, 32)
    pairs = [f[2]["forward"] // (2 * 4) for f in found]
    print(f"{name:12} pairs computed {pairs}, busiest over mean {costs.imbalance(pairs).__float__():.2f}")
print("predicted for slices:", [costs.pairs(layout("contiguous", 32, 4), r) for r in range(4)])

# %% [markdown]
# A kernel that takes some queries at a time, a *tile*, computes all keys that any of them sees. With slices
# that wastes pairs on the diagonal block only; with stripes half of *every* block:

# %%
for tile in (8, 2, 1):
    split = layout("interleaved", 32, 4)
    computed = [
        sum(tiles.pairs_computed(mine, keys, None, tile) for keys in split.positions)
        for mine in split.positions
    ]
    print(f"tile {tile}: computed {sum(computed):4} of {32 * 33 // 2} needed, per rank {computed}")

# %% [markdown]
# Ranks sleep in proportion to their pairs (*paced*); each
# layer ends with a gather, where the fast ones wait.


# %% tags=["measured"]
def paced_layers(rank, world_size, name):
    axis, pairs = Mesh(cp=world_size)["cp"], costs.pairs(layout(name, 64, world_size), rank)
    begin(axis)
    for i in range(3):
        asleep(f"layer {i}", "forward", pairs * 1e-4)
        with trace.span("", kind="wait"):
            comm.all_gather(torch.zeros(8), axis)
    return trace.spans(with_comm=False)


names = ("contiguous", "interleaved", "zigzag")
figures = [timeline(trace.merge(pool[4].run(paced_layers, name)), name, clock="paced") for name in names]
end = max(fig.axes[0].get_xlim()[1] for fig in figures)
for name, fig in zip(names, figures, strict=True):
    fig.axes[0].set_xlim(0, end)
    show(
        fig,
        "paced",
        f"three layers of causal attention, {name}: grey is waiting in the gather that ends a layer.",
        f"Four lanes of blue bars; with the {name} split "
        + ("early ranks mostly wait" if name == "contiguous" else "all ranks wait alike, and little"),
    )

# %% [markdown]
# With contiguous slices 1 - mean/busiest = (N-1)/(2N-1) = 3/7 of all time is lost. The BSC team saw rank 0 wait more
# than 100 ms in each of the 12 layers of a backward pass; after interleaving, "all kernels had the same computation
# time". Here, two real ranks, 2048 tokens, nothing paced:


# %% tags=["measured"]
show(
    plots.kernels({name: trace.merge(pool[2].run(lab.timed_layers, name)) for name in names}),
    "measured",
    "five layers (dots) on two ranks: slices give rank 1 more pairs, the other two layouts do not.",
    "Three panels of dots for attention, MLP and dQ, dK, dV, a pair of ranks for each of three layouts",
)

# %%
for name in names:
    split = layout(name, 2048, 2)
    loads = {kernel: costs.work(split, kernel) for kernel in ("forward", "dK,dV by query", "MLP")}
    over = ", ".join(f"{kernel} {float(costs.imbalance(of)):.3f}" for kernel, of in loads.items())
    print(f"{name:11} busiest over the mean: {over};", end=" ")
    print("million pairs forward:", [round(pairs / 1e6, 2) for pairs in loads["forward"]])


# %% tags=["measured"]
def fastest(queries, keys, count=20):
    x = torch.randn(1, 8, 1024, 32)  # 1024 queries of a rank, or as many keys
    attention.work.clear()
    seconds = min(seconds_of(lambda: attention.block_forward(None, x, x, x, queries, keys), count, warmup=0))
    return f"{attention.work['forward'] / count / 8e6:.2f} million pairs, {1e3 * seconds:.0f} ms"


print("one slice with itself, a triangle:", fastest(range(1024), range(1024)))
print("the second slice with the first, a square:", fastest(range(1024, 2048), range(1024)))
print("interleaved, a triangle:", fastest(range(1, 2048, 2), range(0, 2048, 2)))
print("zigzag, a rectangle:", fastest([*range(512), *range(1536, 2048)], range(512, 1536)))

# %% [markdown]
# Interleaving balances pairs and gains nothing here: its slower rank is no faster than with slices. Zigzag gains. (Rank
# 0 is often slower with equal work: see the MLP.) With slices rank 0 has a triangle of pairs, rank 1 a triangle and a
# square, which has twice the pairs in less than twice the time. Interleaving asks torch's kernel for triangles, zigzag
# mostly for rectangles.


# %% tags=["exercise"]
def imbalance(tokens, ranks):
    """The busiest rank's attention work over the mean, for contiguous slices; ranks divides tokens."""
    ### BEGIN SOLUTION
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) * ranks / sum(loads)
    ### END SOLUTION


check("imbalance", exercises.imbalance, imbalance)


# %% [markdown] tags=["hint"]
# The formula with 2N - 1 is for very long sequences. Write down what each rank's rows cost
# (row t costs t + 1), then divide the largest sum by the mean of the sums.


# %% tags=["wrong"]
# FAIL: 4 tokens on 2 ranks
# MISTAKE: The formula for very many tokens is used for few.
def imbalance(tokens, ranks):
    return (2 * ranks - 1) / ranks


# %% tags=["wrong"]
# FAIL: one rank is balanced by itself
# MISTAKE: Returns the tokens of a rank, which is no ratio of work.
def imbalance(tokens, ranks):
    return tokens / ranks


# %% tags=["wrong"]
# FAIL: expected 1.4, got 2.33333
# MISTAKE: Compared with the idlest rank and not with the mean.
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) / min(loads)


# %% tags=["wrong"]
# FAIL: expected 1.4, got 1.66667
# MISTAKE: A token is taken not to attend to itself.
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) * ranks / sum(loads)


# %% tags=["wrong"]
# FAIL: expected 1.4, got 0.7
# MISTAKE: Compared with the work of all ranks together and not with their mean.
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * size, (r + 1) * size)) for r in range(ranks)]
    return max(loads) / sum(loads) if ranks > 1 else 1


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's count of pairs is asked.
def imbalance(tokens, ranks):
    split = layout("contiguous", tokens, ranks)
    return float(costs.imbalance([costs.pairs(split, r) for r in range(ranks)]))


# %% tags=["wrong"]
# FAIL: 72 tokens on 9 ranks: expected
# MISTAKE: The tokens of a rank and the number of ranks are exchanged: right where they are equal.
def imbalance(tokens, ranks):
    size = tokens // ranks
    loads = [sum(t + 1 for t in range(r * ranks, (r + 1) * ranks)) for r in range(size)]
    return max(loads) * size / sum(loads) if ranks > 1 else 1


# %% [markdown]
# **A puzzle, with a score.** Cut 96 tokens into 12 blocks of 8. Give each of four ranks three blocks, so that all
# ranks have equally many tokens (the MLP wants that), and make the busiest rank's attention as cheap as you can. The
# score is its pairs: slices give 2,028, interleaved blocks 1,452; at most 1,260 pass.


# %% tags=["exercise"]
def spread():
    """The blocks 0..11 of each of four ranks, three a rank: a list of four lists."""
    ### BEGIN SOLUTION
    return [[0, 5, 11], [1, 6, 9], [2, 7, 8], [3, 4, 10]]
    ### END SOLUTION


check("spread the blocks", exercises.spread, spread)


# %% [markdown] tags=["hint"]
# A block's cost grows evenly with its number, so only the sum of a rank's three numbers counts. What is the mean of
# these four sums, and can a sum of whole numbers reach it?

# %% [markdown] tags=["hint"]
# There and back again (0 to 3, then 7 to 4, then 8 to 11) passes the bar. For the best, no sum may be above 17: start
# with 11, 10, 9 and 8 on four ranks. How much may the other two blocks of each rank add up to?


# %% tags=["wrong"]
# FAIL: at most 1260 pass
# MISTAKE: Contiguous: the last rank has the most pairs.
def spread():
    return [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


# %% tags=["wrong"]
# FAIL: 1452 pairs
# MISTAKE: Interleaved blocks: better, but later blocks still weigh more.
def spread():
    return [[r, r + 4, r + 8] for r in range(4)]


# %% tags=["wrong"]
# FAIL: three blocks a rank, and here are [2, 3, 4, 3]
# MISTAKE: The pairs are even, but the ranks own unequal numbers of blocks.
def spread():
    return [[10, 11], [0, 8, 9], [1, 2, 6, 7], [3, 4, 5]]


# %% tags=["wrong"]
# FAIL: block 5 has 2 owners
# MISTAKE: A block has two owners and another none.
def spread():
    return [[0, 5, 11], [1, 5, 9], [2, 7, 8], [3, 4, 10]]


# %% tags=["wrong"]
# FAIL: block 12 is none of 0 to 11
# MISTAKE: Blocks are counted from 1.
def spread():
    return [[1, 6, 12], [2, 7, 10], [3, 8, 9], [4, 5, 11]]


# %% tags=["wrong"]
# FAIL: four lists, one a rank
# MISTAKE: Owners are listed for each block, not blocks for each rank.
def spread():
    return [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]


# %% [markdown]
# ## Unequal slices, and why they were rejected
#
# Unequal slices hold equal *areas* of the triangle. But the MLP costs a fixed amount a token, and a kernel that sums
# dK, dV *by key* costs T - t.

# %%
show(
    plots.busiest_over_mean(1024, 4),
    "computed",
    "busiest rank over the mean, 1024 tokens on four ranks; the softmax backward is llm.c's, quadratic in a row.",
    "A table of layouts by kernels: unequal slices are best in two columns and worst in two others",
)

# %% [markdown]
# Who sums dK, dV is a choice: our kernel does it with the queries, llm.c's by key, and then the owner of a key
# has one pair for each later query. The package counts that:


# %%
def pairs_by_key(name, tile=1, tokens=32):
    """Pairs that each of four ranks computes, counted in the loop itself."""
    x, everyone, loads = torch.randn(1, 1, tokens, 4), range(tokens), []
    out, lse = attention.block_forward(None, x, x, x, everyone, everyone)
    for keys in layout(name, tokens, 4).positions:
        attention.work.clear()
        held = x[:, :, list(keys)]
        attention.gradients_by_key(x, out, lse, x, held, held, everyone, keys, tile=tile)
        loads.append(attention.work["dK,dV by key"])
    return loads


for name in LAYOUTS:
    loads, formula = pairs_by_key(name), costs.work(layout(name, 32, 4), "dK,dV by key")
    over = float(costs.imbalance(loads))
    print(f"{name:12} pairs by key {loads}, over the mean {over:.2f}; as predicted: {loads == formula}")
print("interleaved, all keys in one tile:", pairs_by_key("interleaved", tile=None))

# %% [markdown]
# Unequal slices move the problem to the sums by key (2.97<!--above--> times the mean) and to the MLP.
# **Interleaving** balances every kernel. **Zigzag** does wherever cost is linear in t; its chunks are solid, so big
# tiles waste little. Price of both: everybody needs everybody's keys. The notes found dK, dV slow after interleaving,
# "probably computing unnecessary tokens": the last line, T²/N pairs, of which half are needed.
#
# ## Ring attention: two blocks become one
#
# Gathering needs all keys in memory at once. A *ring* passes blocks of keys along, and each rank attends to the one
# it holds. But softmax needs the sum over **all** keys. Let block b give its output $o_b$ and $L_b$, the log of its sum
# of exp(scores). Both together are a weighted mean:
#
# $$a=\frac{e^{L_2}}{e^{L_1}+e^{L_2}}=\text{sigmoid}(L_2-L_1)\qquad o=(1-a)\,o_1+a\,o_2$$
# $$L=\log(e^{L_1}+e^{L_2})=L_1-\text{logsigmoid}(L_1-L_2)$$
#
# But a row that sees no key of block 1 has $L_1=-\infty$, and the last form gives
# inf - inf; `torch.logaddexp(L1, L2)` is right there too. A row without a key in both stays (0, -inf): the next block
# may have one. In backward, with the *final* L, each block's
# weights are $e^{\text{score}-L}$.


# %% tags=["exercise"]
def merge(o1, L1, o2, L2):
    """Output (R, D) and log-sum-exp (R, 1) of two blocks of keys together."""
    ### BEGIN SOLUTION
    a = torch.sigmoid(L2 - L1).nan_to_num()  # of two blocks without a key either share will do
    return (1 - a) * o1 + a * o2, torch.logaddexp(L1, L2)
    ### END SOLUTION


check("merge", exercises.merge, merge)


# %% [markdown] tags=["hint"]
# The new output is a weighted mean of the two, row by row, and the share of block 2 is a sigmoid. For L, ask
# torch for a function that adds two numbers given by their logarithms.


# %% tags=["wrong"]
# FAIL: The outputs weigh as much as their sums of exponentials, not equally
# MISTAKE: The two outputs are averaged, whatever their weights.
def merge(o1, L1, o2, L2):
    return (o1 + o2) / 2, torch.logaddexp(L1, L2)


# %% tags=["wrong"]
# FAIL: Scores are huge: does exp overflow?
# MISTAKE: exp without a maximum taken off first: it overflows.
def merge(o1, L1, o2, L2):
    total = L1.exp() + L2.exp()
    return (L1.exp() * o1 + L2.exp() * o2) / total, total.log()


# %% tags=["wrong"]
# FAIL: Each row needs a maximum of its own
# MISTAKE: One maximum for all rows: rows far below it become 0/0.
def merge(o1, L1, o2, L2):
    top = torch.maximum(L1, L2).max()
    a, b = (L1 - top).exp(), (L2 - top).exp()
    return (a * o1 + b * o2) / (a + b), (a + b).log() + top


# %% tags=["wrong"]
# FAIL: a row of which one block sees no key
# MISTAKE: A difference of infinities: a row that sees no key in one block gives nan.
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, L1 - torch.nn.functional.logsigmoid(L1 - L2)


# %% tags=["wrong"]
# FAIL: a row that sees no key in either block
# MISTAKE: inf - inf of two hidden blocks: a row gets nan for ever, though the next block may have a key for it.
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, torch.logaddexp(L1, L2)


# %% tags=["wrong"]
# FAIL: The log-sum-exp of both is more than the larger of the two
# MISTAKE: The larger log-sum-exp is taken for that of both.
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    return (1 - a) * o1 + a * o2, torch.maximum(L1, L2)


# %% tags=["wrong"]
# FAIL: Your function changed the blocks it was given: backward needs them; make new ones
# MISTAKE: Blocks are weighted in place, and backward still needs them.
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1)
    o1 *= 1 - a
    o2 *= a
    o1 += o2
    return o1, torch.logaddexp(L1, L2)


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: The width of the values is written down.
def merge(o1, L1, o2, L2):
    a = torch.sigmoid(L2 - L1).nan_to_num().expand(-1, 3)
    return (1 - a) * o1 + a * o2, torch.logaddexp(L1, L2)


# %% [markdown]
# **Backward, on live ranks.** A rank holds q, k, v, its output o, the final L (t, 1) and the gradient of o. With
# scores $q\,k^T/\sqrt D$, $p=e^{\text{score}-L}$, and δ the sum of grad · o in each row:
#
# $$ds=p\,(\text{grad}\;v^T-\delta)$$
#
# From each block come $p^T\text{grad}$ for dv, $ds\;k/\sqrt D$ for dq and $ds^T q/\sqrt D$ for dk: add them up.
# Autograd is closed here; a block that the mask hides whole is not computed. Keys and values go round the ring, and
# *their gradients travel with them*, so that after n shifts they are home. `comm.ring_shift(x, axis)` gives the left
# neighbour's x.


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


# %% [markdown] tags=["hint"]
# Let one tensor travel: k, v and room for their gradients, stacked. After s shifts a rank holds what started on rank
# (r - s) mod n; that rank's tokens come later than yours if its number is larger. How many shifts bring it home?

# %% [markdown] tags=["hint"]
# Per step: is the block mine (a triangle of the mask), earlier (no mask) or later (nothing to compute)? Add to dq at
# home and to the two travelling gradients, then shift. Shift also when nothing was computed.


# %% tags=["wrong"]
# FAIL: dq on rank 0
# MISTAKE: The term delta, what the softmax's own normalisation contributes, is left out.
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
# MISTAKE: One shift too many: gradients of keys end at the neighbour.
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
# MISTAKE: Only the rank's own block is used, so other ranks' queries leave no gradient.
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
# MISTAKE: All keys are gathered: the right numbers, without a ring and with all keys in memory.
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
# MISTAKE: A second shift whose result is thrown away: twice the bytes.
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
# MISTAKE: dv is set and not added to, so the contributions of earlier ranks are lost.
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


# %% tags=["wrong"]
# FAIL: what has not left may still change
# MISTAKE: Nobody waits for what is sent: its memory may change before it has left.
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
        comm.isend(moving.clone(), axis, (r + 1) % n)
        moving = comm.irecv(moving.clone(), axis, (r - 1) % n).wait()
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: two live ranks
# MISTAKE: Sizes of one example are written down.
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, t, D = 3, axis.rank, 4, 5
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
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: dq on rank 0 of 2
# MISTAKE: The width of one example is written down.
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, t, D = axis.size, axis.rank, q.size(0), 5
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
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: skip what is masked
# MISTAKE: Blocks that the mask hides altogether are computed as well: nearly twice the work.
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        k, v = moving[:2]
        mask = (torch.arange(t) + r * t)[:, None] < torch.arange(t) + owner * t
        p = ((q @ k.T / D**0.5).masked_fill(mask, -torch.inf) - L).exp()
        ds = p * (grad @ v.T - delta) / D**0.5
        dq += ds @ k
        moving[2] += ds.T @ q
        moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: changed what it was given
# MISTAKE: The queries are scaled in place.
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    q /= D**0.5
    dq, moving = torch.zeros_like(q), torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            k, v = moving[:2]
            scores = q @ k.T
            if owner == r:
                scores = scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (scores - L).exp()
            ds = p * (grad @ v.T - delta)
            dq += ds @ k / D**0.5
            moving[2] += ds.T @ q
            moving[3] += p.T @ grad
        moving = comm.ring_shift(moving, axis)
    return dq, moving[2], moving[3]


# %% tags=["wrong"]
# FAIL: torch would do this in one call
# MISTAKE: autograd differentiates each block: the formulas were to be written.
def ring_backward(q, k, v, o, L, grad, axis):
    n, r, (t, D) = axis.size, axis.rank, q.shape
    delta = (grad * o).sum(-1, keepdim=True)
    moving = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
    dq = torch.zeros_like(q)
    for step in range(n):
        owner = (r - step) % n
        if owner <= r:
            qq, kk, vv = (x.detach().requires_grad_() for x in (q, moving[0], moving[1]))
            s = qq @ kk.T / D**0.5
            if owner == r:
                s = s.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
            p = (s - L).exp()
            a = torch.autograd.grad((p * (grad @ vv.T)).sum() - (p * delta).sum(), (qq, kk, vv))
            dq += a[0]
            moving[2] += a[1]
            moving[3] += a[2]
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

# %% [markdown]
# In the package's backward each block's dK, dV follow k, v *one step behind*, so that messages hide behind computing.
# `double-ring` sends a block round one machine first and then to the next one (Gu et al. 2024).
#
# Both trips as three live ranks made them (*paced*: 30 ms a message, 60 ms a block; orange ends at the wait). Where
# is `kv0` at each step, and which messages of the second trip are gradients?

# %% tags=["measured"]
play(
    pool[3].run(recorded.ring_attention),
    "paced",
    "ring attention on three live ranks, forward (blue) and backward (green): each rank's queries meet one block of "
    "keys and values at a time, which is then passed on to the right.",
    "Three ranks as boxes, arrows around the ring, and under each the block of keys and values it holds",
)

# %% [markdown]
# ### From how many tokens on is it hidden?
#
# A rank of c tokens meets a block of c keys: q kᵀ and weights times v are 2c²C operations each, 4c²C / F
# seconds at F operations a second. Meanwhile the next block arrives: 2cC numbers of b bytes, 2cCb / W seconds at W
# bytes a second. Computing takes longer if c > bF / 2W, and c > bF / W where the causal mask leaves half of each
# block. Neither the width nor the number of ranks matters. (Liu et al. 2023 have F / W: the first, at 16 bit.)

# %%
rows = []
for machine in (thresholds.laptop(60e9, 4e9), *thresholds.machines()):
    full, causal = (thresholds.tokens_per_rank("context", machine, causal=c) for c in (False, True))
    speeds = f"{machine.rate / 1e12:g}", f"{machine.bandwidth / 1e9:g}", machine.itemsize
    rows.append((machine.name, *speeds, round(full), round(causal), round(causal) * machine.ranks))
table(rows, ["machine", "F, Tflop/s", "W, GB/s", "b", "tokens a rank", "causal", "causal, all ranks"])

# %% [markdown]
# (*Computed*; GPUs at 0.59 of their peak.) Between machines a rank needs 23,340<!--above-->
# tokens: one reason for a *hybrid*, heads (lesson 11) inside a machine and the ring between machines.
#
# ## Memory
#
# In llm.c's 23 activation tensors T becomes T/N, but for gathered k, v (all of T) and the attention matrix (T/N rows
# of T).

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
# Our attention keeps no matrix. What autograd really holds for one block on 1, 2 and 4 live ranks, and the formula:


# %%
def kept(rank, world_size, exchange, length=24):
    model = GPT2(GPT2Config(vocab_size=50, n_positions=64, n_layer=1, n_head=4, n_embd=32)).double()
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, exchange=exchange))(length)
    x = model.embed(torch.arange(length).expand(2, -1)[:, mine], mine)
    y, found = kept_for_backward(lambda: model.h["0"](x, mine), model.parameters(), torch.float64)
    found.pop(y.untyped_storage().data_ptr(), None)  # the result is not kept for this backward
    table = layout("contiguous", length, world_size)
    return sum(found.values()) // 8, costs.kept_numbers(model.config, 2, table, rank, exchange)


pool[1] = Ranks(1)
rows = []
for exchange in ("kv", "ring"):
    held = [pool[n].run(kept, exchange)[0] for n in (1, 2, 4)]
    rows.append((exchange, *(f"{found:,}" for found, _ in held), all(a == b for a, b in held)))
table(rows, ["numbers kept by rank 0", "1 rank", "2 ranks", "4 ranks", "equal to the formula"])

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
# Loss, gradients, norm, and weights after SGD and AdamW steps, 11 tokens on three ranks:

# %%
small = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=3, n_embd=12)
for plan in ("cp=3,exchange=kv,layout=interleaved", "cp=3,exchange=ring,layout=zigzag"):
    report = verify(plan, small, rows=2, ranks=pool[3])
    print(f"{plan}: {len(report.claims)} claims, all equal: {report.ok}")

# %% [markdown]
# Generation is **not** split (`unsplit(model)`).
#
# ## Appendix: packed documents, fewer keys
#
# Training packs several documents into one sequence; a token must not see another one. And in **grouped-query
# attention** several heads of queries share one head of keys and values:


# %%
def packed(rank, world_size, name, q, k, v, grad, document, right=True):
    axis, split = Mesh(cp=world_size)["cp"], layout(name, q.size(-2), world_size)
    mine, order, back = map(torch.tensor, (split.positions[rank], split.order, split.inverse))
    comm.clear_log()
    k, v = (comm.all_gather(x[..., mine, :], axis, -2, split.sizes)[..., back, :] for x in (k, v))
    own = document[mine] if right else document[: len(mine)]  # by the position in the whole sequence
    seen = (mine[:, None] >= torch.arange(len(back))) & (own[:, None] == document)
    leaves = [x.requires_grad_() for x in (q[..., mine, :], k, v)]
    y = F.scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(y, leaves, grad[..., mine, :])
    dk, dv = (comm.reduce_scatter(x[..., order, :], axis, -2, split.sizes) for x in (dk, dv))
    return mine, y.detach(), dq, dk, dv, lab.sent(), int(seen.sum())


document = torch.tensor([0] * 4 + [1] * 5 + [2] * 2)
same = (document[:, None] == document).tril()
for shared in (4, 2):
    leaves = [x.clone().requires_grad_() for x in (q, k[:, :shared], v[:, :shared])]
    whole = F.scaled_dot_product_attention(*leaves, attn_mask=same, enable_gqa=True)
    whole.backward(grad)
    serial = [whole.detach(), *(x.grad for x in leaves)]
    for name, right in (("contiguous", True), ("zigzag", True), ("contiguous", False)):
        found = pool[3].run(packed, name, *(x.detach() for x in leaves), grad, document, right)
        print(
            f"{shared} heads of keys, {name:10} off by {largest_error(found, serial):11} pairs "
            f"{[f[6] for f in found]}, sent {[f[5] for f in found]}" + ("" if right else "  <- wrong offset")
        )

# %% [markdown]
# Half the heads of keys, half the numbers. Read the document at a token's true position. Zigzag balances one long
# document, not three short ones: trainers split *each document* by zigzag. Heads for tokens (next lesson) are bounded
# by the heads of keys, unless repeated.
#
# ## Drill
#
# <details><summary>1. Why is only dK, dV reduced and not dQ?</summary>
# A query belongs to one rank, and all its scores are computed there. A key is used by many ranks' queries.
# </details>
#
# <details><summary>2. Contiguous ring of 4, forward: which messages are never sent?</summary>
# Any from rank 3 to rank 0: nobody before needs later keys. Block s makes N-1-s hops. (Backward, a gradient does.)
# </details>
#
# ## Read on
#
# - BSC, wiki of llm.c-gpt2, "Various informations": where this began.
# - Milakov & Gimelshein 2018, *Online normalizer calculation for softmax*: the running maximum.
# - Liu, Zaharia & Abbeel 2023, *Ring Attention*: section 3: when messages are hidden.
# - Brandon et al. 2023, *Striped Attention*: an interleaved ring, 1.45 and 1.65 times as fast.
# - Li et al. 2023, *LightSeq* (DistFlashAttn): its triangle exchange.
# - Dao et al. 2022, *FlashAttention*, appendix B: the backward pass.
# - Gu et al. 2024, *LoongTrain*: the double ring.
#
# **Next**: [11 Heads and halos](11_heads_and_halos.ipynb).
