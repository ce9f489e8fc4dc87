# %% [markdown]
# # 11 Heads and halos
#
# **The one-minute version.** Two ways around the exchange of all keys. (1) Attention heads do not look at each other:
# an *all-to-all* turns "my tokens, all heads" into "all tokens, my heads", and back after attention. (2) If a token
# may look only a *window* of w tokens back, a rank needs just the w tokens in front of its slice: its **halo**, from
# its neighbour. Heads send less as ranks grow but their number is limited; halos send the same few rows for any
# length and any number of ranks, as long as a shard holds w tokens.
#
# Both are in the weather model anemoi, whose authors found halos faster at every number of GPUs. You will build
# both, predict what they send, and count.

# %% tags=["setup"]
import statistics
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpt2lab import RankFailed, Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import context as exercises
from gpt2lab.lessons.labs import context as lab
from gpt2lab.lessons.labs import recorded
from gpt2lab.lessons.labs.instruments import seconds_of
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, GPT2Config, causal_attention
from gpt2lab.parallel.context import costs, halo
from gpt2lab.parallel.context.borrow import Share
from gpt2lab.parallel.context.exchanges import apply_context
from gpt2lab.parallel.context.layouts import check_hops, layout, loans, widths
from gpt2lab.plan import Plan, build
from gpt2lab.plots import halos as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.train import Trainer
from gpt2lab.verify import verify

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
alike = partial(torch.allclose, rtol=0, atol=1e-12)
torch.manual_seed(0)
pool = {n: Ranks(n) for n in (2, 3, 4, 6)}  # live ranks, started when first used

# %% [markdown]
# ## Heads for tokens
#
# A rank holds q, k, v of its t tokens and all H heads. It cuts its heads into N parts and sends part p to rank p.
# What arrives, laid end to end, is *all* tokens of H/N heads. Attention runs as if serial. A second all-to-all takes
# the output back. Backward of an all-to-all is the all-to-all the other way round: it only moves numbers, so its
# adjoint is its inverse.


# %%
def heads_by_hand(rank, world_size, q, k, v):
    axis, split = Mesh(cp=world_size)["cp"], layout("contiguous", q.size(2), world_size)
    mine = torch.tensor(split.positions[rank])
    B, H, _, D = q.shape
    shards = [x[:, :, mine].requires_grad_() for x in (q, k, v)]
    comm.clear_log()

    parts = [p.contiguous() for p in torch.stack(shards).split(H // world_size, 2)]
    whole = torch.cat(comm.all_to_all(parts, axis, [(3, B, H // world_size, n, D) for n in split.sizes]), 3)
    y = causal_attention(*whole, torch.arange(whole.size(3)))
    parts = [p.contiguous() for p in y.split(split.sizes, 2)]
    y = torch.cat(comm.all_to_all(parts, axis, [(B, H // world_size, len(mine), D)] * world_size), 1)

    sent = sum(e.bytes for e in comm.log) // 8
    y.square().sum().backward()
    return mine, sent, y.detach(), *(x.grad for x in shards)


# %%
q, k, v = torch.randn(3, 2, 6, 11, 4)
for n, qkv in ((2, (q, k, v)), (3, (q, k, v)), (4, torch.randn(3, 1, 8, 37, 4))):
    leaves = [x.clone().requires_grad_() for x in qkv]
    serial = causal_attention(*leaves, torch.arange(leaves[0].size(2)))
    serial.square().sum().backward()
    want = [serial.detach(), *(x.grad for x in leaves)]
    found = pool[n].run(heads_by_hand, *qkv)
    same = all(alike(got, w[:, :, f[0]]) for f in found for got, w in zip(f[2:], want, strict=True))
    print(f"{n} ranks own {[len(f[0]) for f in found]} tokens:", end=" ")
    print(f"output and gradients equal serial attention: {same}; sent forward {[f[1] for f in found]}")

# %% [markdown]
# (552<!--above--> numbers of rank 0 of two, 432 of them q, k, v.) anemoi's text says "2 all-to-all per layer"; its code
# does four (q, k, v, output) in two *phases*. Stacking q, k, v, as above, makes it two calls. The volume is the same:
# on average 4 (N-1)/N² B T C numbers a rank. Tokens may be uneven, heads here not (DeepSpeed's may):

# %%
try:
    Plan.parse("cp=4,exchange=heads").check(
        GPT2Config(n_head=6, n_embd=24, vocab_size=50, n_positions=32), 2, 11
    )
except ValueError as error:
    print(error)


# %% [markdown]
# As three live ranks ran it, each message *paced* to 30 ms, forward and backward. Play it, or step with the arrow
# keys: what does a rank hold before, during and after attention?

# %% tags=["measured"]
play(
    pool[3].run(recorded.heads_steps),
    "paced",
    "twelve tokens, three heads, three live ranks: an all-to-all before attention and one after it, and both again in "
    "backward.",
    "Three ranks as boxes with arrows from each to each, and below what each holds",
)

# %% [markdown]
# **Your turn**, on live ranks. `sizes` are the tokens of each rank. `comm.all_to_all(parts, axis, shapes)`
# sends part p to rank p and gives the list of what arrives, of these shapes; gradients come through it.
# `to_tokens` is also the backward of `to_heads`.


# %% tags=["exercise"]
def to_heads(shard, axis, sizes):
    """(T, H/N, D), all tokens of this rank's heads, from its shard (t, H, D)."""
    ### BEGIN SOLUTION
    parts = [part.contiguous() for part in shard.split(shard.size(1) // axis.size, 1)]
    shapes = [(n, *parts[0].shape[1:]) for n in sizes]
    return torch.cat(comm.all_to_all(parts, axis, shapes))
    ### END SOLUTION


def to_tokens(y, axis, sizes):
    """(t, H, D), this rank's tokens of all heads, from y (T, H/N, D)."""
    ### BEGIN SOLUTION
    mine = (sizes[axis.rank], *y.shape[1:])
    return torch.cat(comm.all_to_all(list(y.split(sizes)), axis, [mine] * axis.size), 1)
    ### END SOLUTION


check("heads for tokens, and back", exercises.to_heads, to_heads, to_tokens)


# %% tags=["wrong"]
# FAIL: Right, but by scatter: the other ranks wait while one sends
# MISTAKE: One rank after the other scatters its heads: the right bytes, while all others wait.
def to_heads(shard, axis, sizes):
    by_head, found = shard.transpose(0, 1).contiguous(), []
    for root, n in enumerate(sizes):
        x = by_head if axis.rank == root else shard.new_zeros(shard.size(1), n, shard.size(2))
        found.append(comm.scatter(x, axis, 0, root).transpose(0, 1))
    return torch.cat(found)


# %% tags=["wrong"]
# FAIL: No gradient comes through your way there
# MISTAKE: The shard is detached: right forward, and nothing learns.
def to_heads(shard, axis, sizes):
    parts = [part.contiguous() for part in shard.detach().split(shard.size(1) // axis.size, 1)]
    return torch.cat(comm.all_to_all(parts, axis, [(n, *parts[0].shape[1:]) for n in sizes]))


# %% [markdown] tags=["hint"]
# There: part p are the heads that rank p will hold, cut from dim 1. What arrives from rank s are *its* tokens,
# `sizes[s]` of them, so the shapes that come differ from rank to rank. Lay them end to end.

# %% [markdown] tags=["hint"]
# Back: now cut the tokens, by `sizes`, and what arrives from each rank has your number of tokens and its heads. Along
# which dimension do you join these?


# %% tags=["wrong"]
# FAIL: A rank should hold all tokens of its own heads, and no others
# MISTAKE: All tokens are gathered, with all heads, where only the rank's own heads belong.
def to_heads(shard, axis, sizes):
    return comm.all_gather(shard, axis, 0, sizes)


# %% tags=["wrong"]
# FAIL: Pass one part per rank
# MISTAKE: Cut into parts of as many heads as there are ranks, not into as many parts as ranks.
def to_heads(shard, axis, sizes):
    parts = [part.contiguous() for part in shard.split(axis.size, 1)]
    shapes = [(n, *parts[0].shape[1:]) for n in sizes]
    return torch.cat(comm.all_to_all(parts, axis, shapes))


# %% tags=["wrong"]
# FAIL: all tokens of its heads on rank 0: expected
# MISTAKE: Parts that arrive are joined in the wrong order.
def to_heads(shard, axis, sizes):
    parts = [part.contiguous() for part in shard.split(shard.size(1) // axis.size, 1)]
    shapes = [(n, *parts[0].shape[1:]) for n in sizes]
    return torch.cat(comm.all_to_all(parts, axis, shapes)[::-1])


# %% tags=["wrong"]
# FAIL: back again on rank 0: expected
# MISTAKE: Parts are joined in the wrong order on the way back.
def to_tokens(y, axis, sizes):
    mine = (sizes[axis.rank], *y.shape[1:])
    return torch.cat(comm.all_to_all(list(y.split(sizes)), axis, [mine] * axis.size)[::-1], 1)


# %% tags=["wrong"]
# FAIL: Only what another rank needs has to leave, there and back
# MISTAKE: Everything is gathered, and what is not wanted thrown away: the right numbers for n times the bytes.
def to_heads(shard, axis, sizes):
    each = shard.size(1) // axis.size
    return comm.all_gather(shard, axis, 0, sizes)[:, axis.rank * each : (axis.rank + 1) * each]


# %% tags=["wrong"]
# FAIL: expected shape (3, 6, 5), got (6, 3, 5)
# MISTAKE: Parts are joined along the tokens, not along the heads.
def to_tokens(y, axis, sizes):
    mine = (sizes[axis.rank], *y.shape[1:])
    return torch.cat(comm.all_to_all(list(y.split(sizes)), axis, [mine] * axis.size))


# %% tags=["wrong"]
# FAIL: 9 heads, (2, 4, 3) tokens
# MISTAKE: The number of heads and their width are written down.
def to_heads(shard, axis, sizes):
    parts = [part.contiguous() for part in shard.split(6 // axis.size, 1)]
    return torch.cat(comm.all_to_all(parts, axis, [(n, 6 // axis.size, 5) for n in sizes]))


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: A rank is taken to have three heads, as in the examples.
def to_heads(shard, axis, sizes):
    parts = [part.contiguous() for part in shard.split(3, 1)]
    return torch.cat(comm.all_to_all(parts, axis, [(n, *parts[0].shape[1:]) for n in sizes]))


# %% tags=["wrong"]
# FAIL: sends that nobody waits for
# MISTAKE: The sizes are also sent to the next rank, which knows them and receives nothing.
def to_heads(shard, axis, sizes):
    comm.isend(torch.tensor(sizes), axis, (axis.rank + 1) % axis.size)
    parts = [part.contiguous() for part in shard.split(shard.size(1) // axis.size, 1)]
    return torch.cat(comm.all_to_all(parts, axis, [(n, *parts[0].shape[1:]) for n in sizes]))


# %% [markdown]
# ## A window, and its halo
#
# In windowed attention a token sees itself and the w tokens before it. GPT-2 becomes a sliding-window model by
# `GPT2Config(window=w)`; with w >= T - 1 it is plain GPT-2. A loop over tokens says what is meant:

# %%
at = torch.arange(11)
for w in (3, 10):
    one = lambda t, w=w: F.scaled_dot_product_attention(
        q[:, :, t : t + 1], *(x[:, :, max(0, t - w) : t + 1] for x in (k, v))
    )
    loop, windowed = torch.cat([one(t) for t in range(11)], 2), causal_attention(q, k, v, at, w)
    plain = alike(windowed, causal_attention(q, k, v, at))
    print(f"window {w:2}: equal to the loop: {alike(loop, windowed)}, to plain attention: {plain}")

# %% [markdown]
# Information still travels far: w tokens a layer, so L layers see w L back.

# %%
show(
    plots.halo_mask(16, 4, 3),
    "drawing",
    "window 3, four ranks: filled keys are the rank's own, hatched ones are its halo. Causal: only a left halo.",
    "A diagonal band in four colours; below each shard border a small hatched triangle",
)

# %%
model = GPT2(GPT2Config(vocab_size=20, n_positions=32, n_layer=3, n_head=2, n_embd=16, window=2))
x = model.embed(torch.zeros(1, 16, dtype=torch.long), torch.arange(16)).detach().requires_grad_()
y = x
for depth, block in enumerate(model.h.values(), 1):
    y = block(y, torch.arange(16))
    (reach,) = torch.autograd.grad(y[0, 15].sum(), x, retain_graph=True)
    print(f"after {depth} layers, token 15 depends on tokens {reach[0].norm(dim=-1).nonzero().min()} to 15")

# %% [markdown]
# ## Halo by hand, there and back

# %%
show(
    plots.halo_arrows((4, 4, 4), 2),
    "drawing",
    "three ranks, window 2. Left: rows travel to the next rank. Right: the gradients of the hatched rows go home and "
    "are added.",
    "Two pictures of three shards with hatched halo cells; arrows to the next rank left, back to the owner right",
)

# %% [markdown]
# Forward, each rank sends its last w rows to the next rank. Backward, the borrower returns the gradients of the
# borrowed rows, and the owner **adds** them: a lent row was used twice, so it has two gradients. Rows below are
# labelled with their positions.


# %%
def halo_by_hand(rank, world_size, tokens, w, add=True):
    axis, mine = Mesh(cp=world_size)["cp"], list(layout("contiguous", tokens, world_size).positions[rank])
    x = torch.tensor(mine, dtype=torch.float64)[:, None]
    first, last = rank == 0, rank == world_size - 1

    sending = None if last else comm.isend(x[-w:], axis, rank + 1)
    wide = x if first else torch.cat([comm.irecv(x.new_empty(w, 1), axis, rank - 1).wait(), x])
    if sending:
        sending.wait()

    grad = torch.full_like(wide, float(rank + 1))  # this rank's gradient of every row it used
    own = (grad if first else grad[w:]).clone()
    sending = None if first else comm.isend(grad[:w], axis, rank - 1)
    if not last:
        returned = comm.irecv(x.new_empty(w, 1), axis, rank + 1).wait()
        own[-w:] = own[-w:] + returned if add else returned
    if sending:
        sending.wait()
    products = torch.stack(((wide * grad).sum(), (x * own).sum()))
    return wide[:, 0].int().tolist(), own[:, 0].int().tolist(), comm.all_reduce(products, axis)


# %%
for rank, (rows, grads, _) in enumerate(pool[3].run(halo_by_hand, 9, 2)):
    print(f"rank {rank}: rows {rows}, gradients of its own rows {grads}")

# %% [markdown]
# ### The adjoint test, and a bug lab
#
# If the map H (no longer the number of heads) makes wide rows from own rows, its backward must be the transpose H':
#
# $$\langle Hx,y\rangle=\langle x,H'y\rangle\quad\text{for all x and y}$$
#
# One line, and it needs no model. anemoi's first version *received into* the gradient instead of adding ("not sure if
# this works yet", says its commit):

# %%
for add in (True, False):
    there, back = pool[3].run(halo_by_hand, 9, 2, add)[0][2].tolist()
    print("added:      " if add else "overwritten:", f"<Hx, y> = {there:.0f}, <x, H'y> = {back:.0f}")


# %% tags=["exercise"]
def give_back(grad, window, axis):
    """The gradient of this rank's own rows from that of its wide rows: `window` halo rows first, none on rank 0.

    Leave `grad` as it is, send before you wait, and wait for what you send.
    """
    ### BEGIN SOLUTION
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone() if first else grad[window:].clone()
    if not last:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own
    ### END SOLUTION


check("give back", exercises.give_back, give_back)


# %% tags=["wrong"]
# FAIL: Rank 1 sends only when its own message has come, so ranks take turns
# MISTAKE: Every rank waits for its neighbour before it sends, so ranks take turns.
def give_back(grad, window, axis):
    wide = grad.clone()
    if axis.rank < axis.size - 1:
        wide[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if axis.rank > 0:
        comm.isend(wide[:window].clone(), axis, axis.rank - 1).wait()
    return wide[window if axis.rank else 0 :]


# %% [markdown] tags=["hint"]
# Three kinds of ranks: the first has no halo, the last has lent nothing. Start your send before you wait for
# anything, and cut the halo off before you add: the last `window` rows of *your own* are those that you lent.


# %% tags=["wrong"]
# FAIL: Lent rows have two gradients, add them
# MISTAKE: The gradient from the neighbour replaces the own one, where they should be added.
def give_back(grad, window, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone() if first else grad[window:].clone()
    if not last:
        own[-window:] = comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% tags=["wrong"]
# FAIL: Return the gradient of the own rows only
# MISTAKE: The halo rows are not taken off the own gradient.
def give_back(grad, window, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone()
    if not last:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% tags=["wrong"]
# FAIL: The halo's gradient goes to its owner and no further
# MISTAKE: Halos are gathered on all ranks, where each goes to one.
def give_back(grad, window, axis):
    own = grad.clone() if axis.rank == 0 else grad[window:].clone()
    halos = comm.all_gather(grad[:window].clone(), axis, 0)
    if axis.rank < axis.size - 1:
        own[-window:] += halos.split(window)[axis.rank + 1]
    return own


# %% tags=["wrong"]
# FAIL: the ranks wait for each other for ever
# MISTAKE: The first rank waits for a message that nobody sends.
def give_back(grad, window, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    if first:
        comm.irecv(grad[:window].clone(), axis, axis.size - 1).wait()
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone() if first else grad[window:].clone()
    if not last:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% tags=["wrong"]
# FAIL: The neighbour borrowed the last rows, so its gradient belongs there
# MISTAKE: The neighbour's gradient is added to the first rows; it belongs to the last.
def give_back(grad, window, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad.clone() if first else grad[window:].clone()
    if not last:
        own[:window] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% tags=["wrong"]
# FAIL: A send counts when it is waited for, and some of yours never are
# MISTAKE: Nobody waits for what is sent, so it may never leave.
def give_back(grad, window, axis):
    own = grad.clone() if axis.rank == 0 else grad[window:].clone()
    if axis.rank > 0:
        comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    if axis.rank < axis.size - 1:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    return own


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: There are taken to be three ranks.
def give_back(grad, window, axis):
    going = comm.isend(grad[:window].clone(), axis, axis.rank - 1) if axis.rank > 0 else None
    own = grad[window * (axis.rank > 0) :].clone()
    if axis.rank < 2:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% tags=["wrong"]
# FAIL: Your function writes into the gradient that it was given: work on a copy
# MISTAKE: What comes is added in place, into a gradient that autograd may give to others too.
def give_back(grad, window, axis):
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    going = None if first else comm.isend(grad[:window].clone(), axis, axis.rank - 1)
    own = grad if first else grad[window:]
    if not last:
        own[-window:] += comm.irecv(grad[:window].clone(), axis, axis.rank + 1).wait()
    if going:
        going.wait()
    return own


# %% [markdown]
# ## The package's halo
#
# `halo_exchange` borrows the neighbours' rows, as `triangle` borrows keys; its backward is the same table of loans,
# turned round. `remove_halos` cuts halos off, `add_halos` puts on some of zeros. Who lends what, all ranks know:

# %%
for w in (2, 5):
    lent = loans(layout("contiguous", 11, 4), w)
    said = (f"rank {a.source} lends {a.stop - a.start} to rank {a.target}" for a in lent)
    print(f"window {w}:", ", ".join(said))
x = torch.randn(5, 3)
print("remove_halos(add_halos(x)) == x:", torch.equal(halo.remove_halos(halo.add_halos(x, 2, 3), 2, 3), x))
show_source(halo.halo_exchange)

# %% [markdown]
# There are four ways to move the rows: blocking send/recv (in one order that all ranks share; with halos on both
# sides two neighbours that both send first would wait forever), isend/irecv, an all-gather of everybody's edges, and
# an all-to-all in which only neighbours have something to say. anemoi measured all four, kept the last. We count (of
# the all-gather, what its ring sends) and name no winner.
# The rows: three from each rank but the last. Torch's `gradcheck` moves each number of all ranks' rows a little, and
# compares the slope with the backward.

# %%
guess = predict("Halos of three rows: which way sends most rows?", *halo.WAYS)


# %%
def send_halos(rank, world_size, way):
    """Halos of three rows: the positions that this rank has then, and the rows and messages that it sends."""
    share = Share(layout("contiguous", 16, world_size), Mesh(cp=world_size)["cp"], 3)
    x = torch.arange(4.0 * rank, 4.0 * rank + 4)[:, None].expand(4, 8)
    comm.clear_log()
    wide = halo.halo_exchange(x, share, 3, 0, dim=0, way=way)
    return wide[:, 0].tolist(), lab.sent(8 * x.element_size()), sum(e.messages for e in comm.log)


rows = []
for way in halo.WAYS:
    found = pool[4].run(send_halos, way)
    split = layout("contiguous", 16, 4)
    formula = [costs.sent(f"halo-x-{way}", split, r, 1, 3)["forward"] for r in range(4)]
    sums = (" ".join(str(f[i]) for f in found) for i in (1, 2))
    slopes = all(pool[4].run(lab.checked_by_autograd, way))
    rows.append((way, *sums, [f[1:] for f in found] == formula, found[2][0] == list(range(5, 12)), slopes))
heads = ["rows sent by ranks 0 to 3", "messages", "as predicted", "rank 2 has rows 5 to 11", "gradcheck"]
table(rows, ["way", *heads])
guess.beside(max(rows, key=lambda row: sum(map(int, row[1].split())))[0], "counted")

# %% [markdown]
# On a ring, an all-gather passes on all nine rows, except those of the next rank.


# %% tags=["measured"]
def time_way(rank, world_size, way):
    share = Share(layout("contiguous", 256, world_size), Mesh(cp=world_size)["cp"], 64)
    x = torch.zeros(128, 512)
    exchange = lambda: halo.halo_exchange(x, share, 64, dim=0, way=way)
    return statistics.median(seconds_of(exchange, 30, warmup=0, ready=lambda: comm.barrier(share.axis)))


for way in halo.WAYS:
    seconds = max(pool[2].run(time_way, way))
    print(f"{way:10} 64 rows of 512 numbers, two ranks: {1e3 * seconds:.2f} ms (measured)")

# %% [markdown]
# ## How wide may the window be?
#
# A halo from the direct neighbour must fit into the neighbour's shard. anemoi first demanded w <= half of the *last*
# shard. That is enough, but too strict: the exact rule looks at the shards that lend. Or take several hops, as the
# package does unless its plan says `hops=1`:

# %%
try:
    check_hops(layout("contiguous", 16, 4), 5)
except ValueError as error:
    print(error)
show(
    plots.legal_windows(32, 8),
    "computed",
    "hops that a causal window needs over 32 tokens; the first rule stops at the line, too early: pale is one hop.",
    "A staircase map over ranks and window; the line of the first rule lies well inside the one-hop area",
)


# %% tags=["exercise"]
def one_hop(sizes, window):
    """Whether a causal window needs only the direct neighbour; sizes are the shards' lengths, rank after rank."""
    ### BEGIN SOLUTION
    return all(size >= min(window, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes[:-1]))
    ### END SOLUTION


check("one hop", exercises.smallest_shard, one_hop)


# %% [markdown] tags=["hint"]
# Walk over the shards that lend. Which one never lends to a causal window? And how much can a shard be asked for, if
# fewer than `window` tokens have come so far?


# %% tags=["wrong"]
# FAIL: Window 2 on shards (4, 3) is forbidden, though one hop is enough
# MISTAKE: Only the last shard is looked at, and it lends nothing.
def one_hop(sizes, window):
    return sizes[-1] // 2 >= window


# %% tags=["wrong"]
# FAIL: Window 3 on shards (3, 2, 2) is allowed, though it needs a second hop
# MISTAKE: One hop is taken to be always enough.
def one_hop(sizes, window):
    return len(sizes) > 1


# %% tags=["wrong"]
# FAIL: Unequal shards (6, 2, 4, 1), window 3: one hop is not enough. Look at each
# MISTAKE: Only the last shard that lends is looked at.
def one_hop(sizes, window):
    return sizes[-2] >= min(window, sum(sizes[:-1]))


# %% tags=["wrong"]
# FAIL: Window 5 on shards (4, 3) is forbidden, though one hop is enough
# MISTAKE: The first rows are forgotten: before them there are fewer tokens than the window is long.
def one_hop(sizes, window):
    return min(sizes[:-1]) >= window


# %% tags=["wrong"]
# FAIL: Window 4 on shards (4, 3) is forbidden, though one hop is enough: the last shard lends nothing
# MISTAKE: The last shard is asked to be long enough, too.
def one_hop(sizes, window):
    return all(size >= min(window, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes))


# %% tags=["wrong"]
# FAIL: a drawn case
# MISTAKE: The window is taken to be 8 at most, as in the examples.
def one_hop(sizes, window):
    return all(size >= min(window, 8, sum(sizes[: rank + 1])) for rank, size in enumerate(sizes[:-1]))


# %% [markdown]
# ## The weather model's block: both sides, any batch
#
# On a globe a point looks to both sides. So exchange x on both, compute q, k, v of the wide rows, attend, and
# drop what the halo's queries gave. `windowed` is the serial program; a rank runs it on its wide rows. In any split
# dW is the *sum* over ranks; here the part of halo rows is on the borrower, which computes their k and v.


# %%
def windowed(x, weight, w):
    q, k, v = (x @ weight).chunk(3, -1)
    at = torch.arange(x.size(1))
    seen = None if w is None else (at[:, None] - at).abs() <= w
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def block_by_hand(rank, world_size, x, weight, w, grad, masked=True):
    share = Share(layout("contiguous", x.size(1), world_size), Mesh(cp=world_size)["cp"], w)
    mine, room = torch.tensor(share.mine), widths(share.table, rank, w, w)
    x, weight = (t.clone().requires_grad_() for t in (x[:, mine], weight))
    wide = halo.halo_exchange(x, share, w, w, dim=1)
    y = halo.remove_halos(windowed(wide, weight, w if masked else None), *room, dim=1)
    y.backward(grad[:, mine])
    return mine, y.detach(), x.grad, weight.grad, comm.all_reduce(weight.grad, share.axis)


# %%
for n, tokens, batch, masked in ((3, 11, 1, True), (4, 37, 3, True), (3, 11, 3, False)):
    x, grad, weight = torch.randn(batch, tokens, 8), torch.randn(batch, tokens, 8), torch.randn(8, 24)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    want = windowed(*leaves, 2)
    want.backward(grad)
    found = pool[n].run(block_by_hand, x, weight, 2, grad, masked)
    equal = [all(alike(f[i], w[:, f[0]]) for f in found) for i, w in ((1, want), (2, leaves[0].grad))]
    equal += [alike(found[0][i], leaves[1].grad) for i in (4, 3)]
    words = zip(("y", "dX", "dW summed", "dW of rank 0 alone"), equal, strict=True)
    print(f"{n} ranks, batch {batch}, {'window' if masked else 'no mask'}:", end=" ")
    print(", ".join(f"{a} {b}" for a, b in words))

# %% [markdown]
# anemoi asked for batch size 1, since its grid and batch were one flattened dimension; where the batch stays a
# dimension, any size works. The last line is a bug that it had: without the flash kernel its code fell back to plain
# attention *without a mask*, with a line in the log. Such a model runs, learns, and is another model. A test with
# T <= w + 1 does not see it.
#
# ## Exchange x, or exchange k and v?
#
# anemoi exchanges the layer's *input* x: one row a token, once forward, once backward. Then q, k, v of the halo are
# computed twice, w N / T more a side. Exchanging k and v costs two rows a token and computes nothing twice.

# %%
guess = predict("32 tokens, four ranks, window 6: what sends fewest rows?", "heads", "halo-x", "halo-kv")


# %%
def rows_of_a_layer(rank, world_size, exchange, tokens, window):
    """Rows of C numbers sent forward in one layer, and tokens that went through c_attn."""
    config = GPT2Config(vocab_size=50, n_positions=128, n_layer=1, n_head=12, n_embd=12, window=window)
    model, seen = GPT2(config), []
    mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, exchange=exchange))(tokens)
    model.h["0"].attn.c_attn.register_forward_hook(lambda module, inputs, output: seen.append(output.size(1)))
    comm.clear_log()
    model(mine[None] % 50, mine)
    return lab.sent(12 * model.wte.weight.element_size()), seen[0]


rows, sums = [], {}
for exchange in ("heads", "halo-x", "halo-kv"):
    found = pool[4].run(rows_of_a_layer, exchange, 32, 6)
    sums[exchange] = sum(sent for sent, _ in found)
    formula = [
        costs.sent(exchange, layout("contiguous", 32, 4), r, 12, 6)["forward"][0] // 12 for r in range(4)
    ]
    rows.append((exchange, *(str([f[i] for f in found]) for i in (0, 1)), [f[0] for f in found] == formula))
table(rows, ["exchange", "rows of C sent, ranks 0 to 3", "tokens through c_attn", "as predicted"])
guess.beside(min(sums, key=sums.get), "counted")

# %% [markdown]
# Which is faster, forward? More computing against more bytes: k and v of a borrowed row take 4 C² / F seconds at F
# operations a second, the extra row C b / W over a link of W bytes a second, b bytes a number. Both grow with w, so
# the window does not matter: k and v win above W = b F / 4 C. (The programs here and anemoi's compute q of the halo
# too and throw it away, 6 C²: then already above b F / 6 C.)

# %%
show(
    plots.anemoi(40_320, 1024, 512, 16),
    "computed",
    "a layer at the weather model's size (40,320 points, width 1024; window 512 is our guess): left, one exchange over "
    "the GPUs, at 50 GB/s and 10 us a message; right, what a halo costs over the link's speed, at 0.59 of an H100's "
    "peak (lesson 19).",
    "Left a falling and a level line of time, halos lowest; right a falling line that crosses two flatter ones",
)

# %% [markdown]
# Left, halos beat heads at every number of GPUs, as anemoi claims: our w is below T/N. (Its times are in images only.)
# On a slow network exchange x, inside a machine k and v.
#
# What the model rests on, the rows, is counted on live ranks: a step of two layers, forward and backward, 144 tokens,
# window 16.


# %%
def both_ways(rank, world_size, tokens=144, window=16):
    """Numbers that this rank sends in a step of two layers, and those of the formula: by heads, by halos of x."""
    config = GPT2Config(vocab_size=50, n_positions=tokens, n_layer=2, n_head=12, n_embd=12, window=window)
    table, ids, found = layout("contiguous", tokens, world_size), torch.arange(tokens)[None] % 50, []
    for exchange in ("heads", "halo-x"):
        model = GPT2(config).double()
        mine = apply_context(model, Mesh(cp=world_size), Plan(cp=world_size, exchange=exchange))(tokens)
        comm.clear_log()
        model.loss(model(ids[:, mine], mine), ids[:, mine]).backward()
        one = costs.sent(exchange, table, rank, config.n_embd, window)
        found.append((lab.sent(), 2 * sum(numbers for numbers, _ in one.values())))
    return found


rows = []
for n in (2, 3, 4):
    found = pool[n].run(both_ways)
    most = [max(sent for sent, _ in way) // 12 for way in zip(*found, strict=True)]
    rows.append(
        (n, *most, all(sent == computed for way in zip(*found, strict=True) for sent, computed in way))
    )
table(rows, ["ranks", "rows sent by the busiest, heads", "halo of x", "all ranks as computed"])

# %% [markdown]
# ## Break-even
#
# Heads: 4 (N-1)/N² T rows a rank. A halo of the input on both sides, as in anemoi: 2w rows.
# Equal at $w=2\,(N-1)\,T/N^2$; causal attention needs one side only, so it wins up to twice that window.
# Below it is run: heads, and halos just that wide. A shard has 12 tokens, so some come from two ranks away.

# %%
guess = predict("The break-even window of 72 tokens on 6 ranks?", unit="tokens")


# %%
def rows_both_sides(rank, world_size, window):
    share = Share(layout("contiguous", 72, world_size), Mesh(cp=world_size)["cp"], window)
    x = torch.zeros(len(share.mine), 1)
    comm.clear_log()
    halo.halo_exchange(x, share, window, window, dim=0)
    return lab.sent(x.element_size())


predicted = int(costs.break_even_window(72, 6))
by_heads = [f[0] for f in pool[6].run(rows_of_a_layer, "heads", 72, 8)]
print(f"72 tokens, 6 ranks: predicted break-even window 2 x 5 x 72 / 36 = {predicted}")
print("rows sent by ranks 0 to 5, heads:                 ", by_heads)
for window in (predicted - 1, predicted, predicted + 1):
    print(
        f"rows sent by ranks 0 to 5, halos of {window} on both sides:",
        pool[6].run(rows_both_sides, window),
    )
guess.beside(predicted, "computed")

# %% [markdown]
# Ranks 2 and 3, with two neighbours on either side, send 40<!--above--> rows, as many as with heads; those near the
# ends of the sequence send fewer, since fewer ranks borrow from them.

# %%
counted = [(n, max(f[0] for f in pool[n].run(rows_of_a_layer, "heads", 72, 8))) for n in (2, 3, 4, 6)]
counted += [(n, max(pool[n].run(rows_both_sides, 8))) for n in (3, 4, 6)]
counted += [(6, max(pool[6].run(rows_both_sides, 20)))]
show(
    plots.break_even(72, 16, (4, 8, 20), counted),
    "counted",
    "rows that an inner rank sends forward, 72 tokens; lines are formulas, dots are counted. Halos do not grow with N.",
    "A falling curve for heads, level lines for three windows, and counted dots on them, one where two of them cross",
)


# %%
explore(
    plots.heads_or_halos,
    "computed",
    "window {window}, {ranks} ranks, {tokens} tokens: rows of C numbers that the busiest rank sends, causal.",
    "Three bars: heads, halo of the input, halo of keys and values",
    window=(1, 64, 16),
    ranks=(2, 8, 4),
    tokens=(64, 512, 256),
)

# %% [markdown]
# ## Any pattern: halos on a graph
#
# (A second sitting may begin here.)
#
# anemoi's graph transformer attends along the edges of a mesh of points; it has halos since 2026. A halo becomes a
# list: which of my rows does each rank look at? One all-to-all fetches them, a second brings their gradients home,
# where they are *added* by index (a row may be lent to several). Twelve points, four a rank, each looks at itself and
# at its neighbours:


# %%
show_source(lab.attend_on_a_graph)
parts = [list(range(r, r + 4)) for r in (0, 4, 8)]
sets = torch.randn(4, 12, 6)
leaves = [x.clone().requires_grad_() for x in sets[:3]]
serial = F.scaled_dot_product_attention(*leaves, attn_mask=lab.NEIGHBOURS)
serial.backward(sets[3])
want = [serial.detach(), *(x.grad for x in leaves)]
found = pool[3].run(lab.attend_on_a_graph, parts, *sets)
same = all(alike(got, w[f[0]]) for f in found for got, w in zip(f[3:], want, strict=True))
print(f"y, dQ, dK, dV equal dense masked attention: {same}")
print(f"rows lent {[f[1] for f in found]}, sent there and back {[f[2] for f in found]}")

# %% [markdown]
# **A puzzle, with a score.** Numbered as they come, the ranks borrow 19 rows. Give the points to the three
# ranks, four each, so that at most 12 are. `lab.NEIGHBOURS[a, b]` is True where point a looks at point b.


# %% tags=["exercise"]
def place():
    """The points 0..11 of each of three ranks, four a rank: a list of three lists."""
    ### BEGIN SOLUTION
    return [[0, 2, 7, 10], [1, 3, 8, 9], [4, 5, 6, 11]]
    ### END SOLUTION


check("points on ranks", exercises.place, place)


# %% tags=["wrong"]
# FAIL: who looks at whom is given
# MISTAKE: The neighbours are changed, not the ranks of the points.
def place():
    lab.NEIGHBOURS.fill_(False)
    return [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# %% [markdown] tags=["hint"]
# The points are a grid of three rows and four columns with mixed-up numbers. Draw it: points with two neighbours are
# corners. What shape of four points has the fewest neighbours outside?


# %% tags=["wrong"]
# FAIL: 19 rows borrowed
# MISTAKE: Runs of numbers; neighbours in the picture have other numbers.
def place():
    return [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# %% tags=["wrong"]
# FAIL: 16 rows borrowed; at most 12 pass
# MISTAKE: Even, but not one neighbour is together.
def place():
    return [[7, 2, 10, 4], [0, 9, 5, 11], [3, 8, 1, 6]]


# %% tags=["wrong"]
# FAIL: four points a rank, and here are [12, 0, 0]
# MISTAKE: All points on one rank.
def place():
    return [list(range(12)), [], []]


# %% tags=["wrong"]
# FAIL: point 7 has 2 owners
# MISTAKE: A point has two owners and another none.
def place():
    return [[0, 2, 7, 10], [1, 3, 8, 7], [4, 5, 6, 11]]


# %% tags=["wrong"]
# FAIL: point 12 is none of 0 to 11
# MISTAKE: Points are counted from 1.
def place():
    return [[12, 2, 7, 10], [1, 3, 8, 9], [4, 5, 6, 11]]


# %% tags=["wrong"]
# FAIL: three lists, one a rank
# MISTAKE: The owner of each point, not the points of each rank.
def place():
    return [0, 1, 0, 1, 2, 2, 2, 0, 1, 1, 0, 2]


# %% [markdown]
# ## Bug lab: group rank is not global rank
#
# Combine two halo groups with data parallelism: ranks {0, 1} and {2, 3}. `dist.send` wants the rank *in
# the world*; the first halo code passed the place *in the group*. Right
# for the first group, wrong for the second:


# %%
def careless(rank, world_size):
    axis = Mesh(dp=2, cp=2)["cp"]
    if axis.rank == 0:
        dist.send(torch.ones(1), dst=1, group=axis.group)  # should be axis.ranks[1]
    else:
        dist.recv(torch.ones(1), src=0, group=axis.group)


def careful(rank, world_size, **sizes):
    axis = Mesh(**sizes)["cp"]
    share = Share(layout("contiguous", 4, 2), axis, 1)
    return axis.ranks, halo.halo_exchange(torch.full((2, 1), float(rank)), share, 1, dim=0)[0].item()


try:
    pool[4].run(careless)
except RankFailed as failure:
    print("careless:", failure.ename, "on a rank of the second group:", failure.rank in (2, 3))
for sizes in ({"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}):
    found = pool[4].run(careful, **sizes)
    print(
        f"{sizes}: "
        + ", ".join(
            f"rank {r} in {ranks} starts with a row of rank {row:.0f}" for r, (ranks, row) in enumerate(found)
        )
    )

# %% [markdown]
# ## What the review taught
#
# anemoi's pull request 67 is also a lesson in interfaces. Three near-identical names became three levels: what callers
# use (`halo_exchange`), the autograd function, the wire. A long if/else became strategies chosen **by name**; a
# wrong name lists the right ones.

# %%
try:
    Plan.parse("cp=2,exchange=shard_heads").check(GPT2Config(), 2, 64)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Equal to serial GPT-2

# %%
small = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=3, n_embd=12, window=4)
for plan in ("cp=3,exchange=heads,layout=zigzag", "cp=3,exchange=halo-x", "cp=3,exchange=halo-kv-sendrecv"):
    report = verify(plan, small, rows=2, ranks=pool[3])
    print(f"{plan}: {len(report.claims)} claims, all equal: {report.ok}")
two_hops = verify("cp=4,exchange=halo-x", replace(small, window=5), rows=2, ranks=pool[4])
print(f"cp=4,exchange=halo-x, window 5 over shards of 3 tokens, two hops: all equal: {two_hops.ok}")


def loss_by(rank, world_size, exchange):
    plan = Plan.parse(f"cp={world_size},exchange={exchange}")
    one = Trainer(build(plan, small, Mesh(**plan.axes), torch.float64))
    return one.gradients(example_batch(small, 2, 11))[0]


for exchange in ("heads", "halo-x", "halo-kv"):
    print(f"one model, {exchange:8}: loss {pool[3].run(loss_by, exchange)[0]:.10f}")

# %% [markdown]
# ## Drill
#
# <details><summary>1. Why is a halo's traffic independent of N?</summary>
# Every inner rank lends w rows to one neighbour (or two), however many ranks there are.
# </details>
#
# <details><summary>2. When are heads impossible?</summary>
# When there are fewer of them (on a tensor-parallel rank) than ranks. Here N must divide them: all work alike.
# </details>
#
# <details><summary>3. Exchanging x moves a part of c_attn's gradient to another rank. Why is the sum right?</summary>
# The borrower computes k, v of borrowed rows; its part of the weight gradient is missing on the owner. The
# sum over ranks has each part once.
# </details>
#
# <details><summary>4. What does the adjoint test not see?</summary>
# A pair that is consistent but wrong together, such as halos from the wrong rows. Labelled rows see that.
# </details>
#
# ## Read on
#
# - Jacobs et al. 2023, *DeepSpeed Ulysses*: heads for tokens, with sequences of a million tokens.
# - ECMWF 2025, anemoi-core, pull request 67 (transformer sequence sharding): the review that this lesson retells.
# - ECMWF 2026, anemoi-core, pull request 1162: the halo of a graph.
# - Beltagy et al. 2020, *Longformer*: why a window is enough when layers are stacked.
# - Fang & Zhao 2024, *USP*: heads inside a machine and a ring between machines, and when which is better.
#
# **Next**: [12 Mixture of experts](12_mixture_of_experts.ipynb).
