# %% [markdown]
# # 03 Collectives
#
# **The one-minute version.** Ranks share no memory, so every parallel strategy ends in messages. Nearly all of them
# are one of seven patterns, the *collectives*: broadcast, scatter, gather, reduce, all-gather, reduce-scatter,
# all-reduce. Six come in pairs, each the other's transpose: gradients go back the way that numbers came. The bytes
# that each needs are known exactly before it runs, and its time nearly: small tensors want an algorithm of few rounds
# (a *tree*, recursive doubling), large ones an algorithm of few bytes (a *ring*, halving and doubling). And when two
# ranks disagree about which call comes next, they wait for ever, unless somebody tells them.

# %% tags=["setup"]
import torch

from gpt2lab import RankFailed, Ranks, launch, transport
from gpt2lab.algorithms import ALL_REDUCE, ring
from gpt2lab.benchmarks import collectives as bench
from gpt2lab.benchmarks.transport import measure
from gpt2lab.lessons import explore, on_ranks, show, show_source, table
from gpt2lab.lessons.exercises import check, predictions
from gpt2lab.lessons.exercises import collectives as exercises
from gpt2lab.lessons.labs import definitions, order, recorded
from gpt2lab.lessons.player import play
from gpt2lab.machine import links
from gpt2lab.machine.links import Link
from gpt2lab.machine.timing import alone, trials
from gpt2lab.plots import collectives as plots
from gpt2lab.ranks import comm, paced
from gpt2lab.ranks.mesh import Mesh

# %% tags=["setup"]
on_ranks.load()

# %% [markdown]
# S is the size of the whole tensor in bytes, n the number of ranks, *place* a rank's position on its axis.
#
# ## What each one does
#
# A cell that begins with `%%ranks 4` runs on four live ranks, which keep their variables (`%%ranks 0,2`: on these).

# %% tags=["ranks 4"]
import torch

from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

axis = Mesh(dp=4)["dp"]
x = torch.arange(4.0) + 10 * axis.rank
x.tolist()

# %% tags=["ranks 4"]
mine = comm.reduce_scatter(x, axis)
mine.tolist()

# %% tags=["ranks 4"]
comm.all_gather(mine, axis).tolist()

# %% [markdown]
# The pictures are made from what four live ranks really held, block by block. A grey block is a sum.


# %%
def every_collective(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    x = torch.arange(4.0) + 10 * rank
    return {
        "before": x,
        "broadcast from 1": comm.broadcast(x, axis, 1),
        "scatter from 1": comm.scatter(x, axis, 0, 1),
        "gather to 1": comm.gather(x[rank : rank + 1], axis, 0, 1),
        "reduce to 1": comm.reduce(x, axis, 1)[: 4 if rank == 1 else 0],
        "all-gather": comm.all_gather(x[rank : rank + 1], axis),
        "reduce-scatter": comm.reduce_scatter(x, axis),
        "all-reduce": comm.all_reduce(x, axis),
        "all-to-all": torch.cat(comm.all_to_all(list(x.tensor_split(world_size)), axis)),
        "ring shift": comm.ring_shift(x, axis),
    }


held = launch(every_collective)
before = [h["before"].tolist() for h in held]
SUMS = ("reduce to 1", "reduce-scatter", "all-reduce")
OWN = {"all-gather": "before", "gather to 1": "before", "reduce-scatter": "after", "scatter from 1": "after"}


def picture(collective="all-gather"):
    after = [h[collective].tolist() for h in held]
    owners = None if collective in SUMS else [[int(v) // 10 for v in row] for row in after]
    return plots.blocks(before, after, collective, owners, OWN.get(collective, ""))


CAPTION = "{collective} on four live ranks; colours say whose number it was, grey is a sum."
ALT = "Two grids of blocks, one row a rank: what each holds before and after {collective}"
for name in ("broadcast from 1", "all-gather", "reduce-scatter"):
    show(picture(name), "counted", CAPTION.format(collective=name), ALT.format(collective=name))

# %%
others = [name for name in held[0] if name not in ("before", "all-to-all")]
explore(picture, "counted", CAPTION, ALT, collective=["all-to-all", *others])

# %% [markdown]
# *Reduce* is any operation that may be done in any order (sum, max). Broadcast and scatter start at one rank, gather
# and reduce end at one; *all* means that every rank is a destination. Each is a line of NumPy, with which 1 to 4 live
# ranks are compared, from every root, with uneven sizes:


# %%
show_source(definitions.expected)
for n in (1, 2, 3, 4):
    same = launch(definitions.calls, ranks=n) == definitions.expected(n)
    print(f"{n} ranks: {len(definitions.expected(n)[0])} calls as defined, bit for bit: {same}")

# %% [markdown]
# ## A well-known demo, reproduced
#
# Stanford's CS336 (spring 2024, lecture 8) shows three calls on four GPUs. The same values come out here:


# %%
def lecture(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    x = torch.tensor([0.0, 1, 2, 3]) + rank
    summed = comm.all_reduce(x, axis)
    mine = comm.reduce_scatter(torch.arange(4.0) + rank, axis)
    return summed.tolist(), mine.tolist(), comm.all_gather(mine, axis).tolist()


for rank, (summed, mine, gathered) in enumerate(launch(lecture)):
    print(f"rank {rank}: all_reduce {summed}  reduce_scatter {mine}  all_gather {gathered}")

# %% [markdown]
# The last column equals the first:
#
# **all-reduce = reduce-scatter + all-gather.**
#
# It also costs the same (*computed*, for rings):


# %%
def both_ways(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    x = torch.arange(1003.0) * (rank + 1)
    at_once = comm.all_reduce(x, axis)
    first = sum(e.bytes for e in comm.log)
    comm.clear_log()
    mine = comm.reduce_scatter(x, axis)
    joined = comm.all_gather(mine, axis, 0, comm.split_sizes(1003, world_size))
    return torch.equal(at_once, joined), first, sum(e.bytes for e in comm.log)


rows = [(rank, *found) for rank, found in enumerate(launch(both_ways))]
table(rows, ["rank", "equal", "bytes of all-reduce", "bytes of both"])

# %% [markdown]
# ## Forward and backward
#
# Each call is a linear map A, its backward the transpose, ⟨A x, y⟩ = ⟨x, Aᵀ y⟩, summed over ranks. Broadcast and
# all-gather count every rank's copy of their result, because each rank may use it in its own way. Two calls keep
# another convention: what `copy_to` takes and `reduce_from` gives is *one* value that all ranks hold, and counts
# once. The pairs:
#
# | forward | backward | because |
# |---|---|---|
# | broadcast | reduce | whoever got a copy has a say in the gradient |
# | scatter | gather | a cut is undone by joining |
# | all-gather | reduce-scatter | every rank used every shard |
# | identity (`copy_to`) | all-reduce | one tensor was used on n ranks |
# | all-reduce (`reduce_from`) | identity | each addend moves the sum alike |
# | all-to-all | all-to-all | the way back |
#
# Every row of the table on three live ranks, with integers so that equality is exact:


# %%
def both_sides(rank, world_size):
    """This rank's part of <Ax, y> and of <x, A'y> for every call with a backward."""
    axis, found = Mesh(dp=world_size)["dp"], {}
    x, alike = torch.arange(6.0) + rank, torch.arange(6.0)
    for name, start, call in (
        ("broadcast", x, comm.broadcast),
        ("scatter", x, comm.scatter),
        ("all-gather", x, comm.all_gather),
        ("reduce-scatter", x, comm.reduce_scatter),
        ("copy_to", alike, comm.copy_to),
        ("reduce_from", x, comm.reduce_from),
        ("all-to-all", x, lambda t, axis: torch.cat(comm.all_to_all(list(t.tensor_split(axis.size)), axis))),
    ):
        t = start.clone().requires_grad_()
        ax = call(t, axis)
        y = torch.arange(float(ax.numel())) * (1 if name == "reduce_from" else rank + 1)
        (aty,) = torch.autograd.grad(ax, t, y)
        found[name] = (ax * y).sum().item(), (start * aty).sum().item()
    return found


per_rank = launch(both_sides, ranks=3)
for name in per_rank[0]:
    left, right = (sum(of[name][side] for of in per_rank) for side in (0, 1))
    left = per_rank[0][name][0] if name == "reduce_from" else left  # one value, held by all: once
    right = per_rank[0][name][1] if name == "copy_to" else right
    print(f"{name:14} <Ax, y> = {left:5.0f}   <x, A'y> = {right:5.0f}")

# %% [markdown]
# **A bug to commit.** A backward that sums the incoming gradient *in place* looks right until a tensor is used
# twice: autograd hands one and the same gradient to both branches.


# %%
class CopyToInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, ctx.axis, own=True), None  # own: the buffer is overwritten


show_source(exercises.used_twice)
for name, copy in {"right": comm.copy_to, "in place": CopyToInPlace.apply}.items():
    print(f"{name}: {launch(exercises.used_twice, copy, ranks=2)}")

# %% [markdown]
# f(x) + x on two ranks has the gradient 3.0<!--above-->; in place the sum went into both branches.
#
# ## Every byte, before it is sent
#
# With a ring, each rank sends S − S/n bytes for a reduce-scatter and as many for an all-gather, so 2 (n−1)/n S for an
# all-reduce (Patarasuk & Yuan 2009). The 2 is these two halves; the lecture takes it for "send and receive".
#
# **Predict first.** An all-reduce of 1,000,000 float32 numbers on 4 ranks: how many bytes does each rank send?


# %% tags=["exercise"]
def bytes_sent():
    """Bytes that leave each rank."""
    ### BEGIN SOLUTION
    return 2 * 3 / 4 * 4_000_000
    ### END SOLUTION


check("predict: bytes", predictions.sent, bytes_sent)

# %% [markdown] tags=["hint"]
# 4 bytes a number. How large is a chunk, and how many chunks leave a rank in the two halves?


# %% tags=["wrong"]
# FAIL: too small by a factor of 1.5
# MISTAKE: A rank is taken to send its tensor once.
def bytes_sent():
    return 4_000_000


# %% tags=["wrong"]
# FAIL: too large by a factor of 1.33
# MISTAKE: The factor (n - 1)/n is left out.
def bytes_sent():
    return 2 * 4_000_000


# %% tags=["wrong"]
# FAIL: too small by a factor of 2
# MISTAKE: Half of it is forgotten: the sum has to come back.
def bytes_sent():
    return 3 / 4 * 4_000_000


# %% tags=["wrong"]
# FAIL: too large by a factor of 2
# MISTAKE: The tensor is taken to go to each of the others.
def bytes_sent():
    return 3 * 4_000_000


# %% tags=["wrong"]
# FAIL: too small by a factor of 4
# MISTAKE: Numbers are counted, not bytes.
def bytes_sent():
    return 2 * 3 / 4 * 1_000_000


# %% tags=["wrong"]
# FAIL: exercises.predictions._live knows the answer
# MISTAKE: The checker is asked what it will count.
def bytes_sent():
    return predictions._live(4, 1_000_000)[0][0]


# %% [markdown]
# ### Bandwidth, of which size?
#
# *Algorithm bandwidth* is S/t. *Bus bandwidth* (nccl-tests) multiplies by what must cross the wires, so that it
# compares with the hardware: 2(n−1)/n for all-reduce, (n−1)/n for reduce-scatter and all-gather, of the **whole**
# array S. The lecture takes the *output* of the reduce-scatter for S, which is n times too small. Both formulas for a
# live reduce-scatter (its time cancels), and the lecture's record:


# %%
def seconds_of_a_reduce_scatter(rank, world_size, size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(size // 4, dtype=torch.float32)
    step, ready = lambda: comm.reduce_scatter(x, axis), lambda: comm.barrier(axis)
    return alone(trials(step, count=3, ready=ready)).median


size, live = 1 << 20, {n: launch(seconds_of_a_reduce_scatter, 1 << 20, ranks=n)[0] for n in (2, 4)}
for n, seconds in live.items():
    ours = links.bandwidths("reduce_scatter", n, size, seconds)[1]
    lectures = size / n * (n - 1) / n / seconds  # the bytes that are left on a rank, taken for S
    print(f"{n} live ranks: bus bandwidth over the lecture's number = {ours / lectures:.0f}")
lecture_times = [(2, 15e-3, 132), (4, 36e-3, 83)]
table(
    [(n, f"{t * 1e3:.0f}", printed, printed * n, {2: 320, 4: 335}[n]) for n, t, printed in lecture_times],
    ["GPUs", "ms", "reduce-scatter as printed, GiB/s", "times n", "its own all-reduce, GiB/s"],
)

# %% [markdown]
# *From the lecture's record:* corrected, reduce-scatter reaches on 4 GPUs what all-reduce does, 332 GiB/s<!--above-->;
# on 2, with 264 GiB/s<!--above-->, a sixth less.
#
# ## A ring by hand
#
# Cut the tensor into n chunks. For n−1 steps pass a partial sum to the right and add your own chunk to the one that
# arrives: then every rank has one finished chunk. For n−1 more steps pass the finished chunks around.


# %%
def my_ring(x, axis):
    n, r, chunks = axis.size, axis.rank, list(x.tensor_split(axis.size))
    right, left = (r + 1) % n, (r - 1) % n

    def step(piece, like):
        going = comm.isend(piece, axis, right)
        coming = comm.irecv(like, axis, left).wait()
        going.wait()
        return coming

    for s in range(n - 1):  # reduce-scatter
        out, into = (r - s) % n, (r - s - 1) % n
        chunks[into] = chunks[into] + step(chunks[out], chunks[into])
    for s in range(n - 1):  # all-gather
        out, into = (r + 1 - s) % n, (r - s) % n
        chunks[into] = step(chunks[out], chunks[into])
    return torch.cat(chunks)


def compare(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.arange(10.0) ** (rank + 1)
    mine = my_ring(x, axis)
    sent = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    packaged = ring.all_reduce(x, axis)
    library = comm.all_reduce(x, axis)
    last = comm.log[-1]
    return torch.equal(mine, library), torch.equal(packaged, library), sent, (last.bytes, last.messages)


for rank, (mine, packaged, sent, formula) in enumerate(launch(compare)):
    print(
        f"rank {rank}: mine {mine}, the package's {packaged}; sent {sent}, accounted for the library {formula}"
    )

# %% [markdown]
# Ten numbers do not divide by four, so it matters with which chunk a rank ends: mine with r + 1, the library's with r.
#
# **Predict:** how many messages does each rank send in a ring all-reduce on 5 ranks?


# %% tags=["exercise"]
def messages_sent():
    """Messages that leave each of 5 ranks."""
    ### BEGIN SOLUTION
    return 2 * (5 - 1)
    ### END SOLUTION


check("predict: messages", predictions.messages, messages_sent)

# %% [markdown] tags=["hint"]
# One message a step. How many steps has a half?


# %% tags=["wrong"]
# FAIL: too small by a factor of 2
# MISTAKE: Half of it is forgotten: n - 1 messages add up, n - 1 hand out.
def messages_sent():
    return 5 - 1


# %% tags=["wrong"]
# FAIL: too large by a factor of 1.25
# MISTAKE: One message too many each way: a rank keeps a chunk.
def messages_sent():
    return 2 * 5


# %% tags=["wrong"]
# FAIL: too small by a factor of 1.6
# MISTAKE: One message for each rank is taken.
def messages_sent():
    return 5


# %% tags=["wrong"]
# FAIL: too small by a factor of 2.67
# MISTAKE: As many messages as a tree has levels.
def messages_sent():
    return 3


# %% tags=["wrong"]
# FAIL: too large by a factor of 2.5
# MISTAKE: A message from each rank to each other.
def messages_sent():
    return 5 * (5 - 1)


# %% tags=["wrong"]
# FAIL: a number of messages above 0 is asked for, not 0
# MISTAKE: Neighbours in a ring are taken to share their memory.
def messages_sent():
    return 0


# %% [markdown]
# The ring step by step on four live ranks, each message *paced* to 30 ms. Under a rank, `2: 013` is chunk 2, so far
# the sum of ranks 0, 1 and 3. In which step are the first chunks complete, and which on which rank?

# %% tags=["measured"]
play(
    launch(recorded.ring_steps),
    "paced",
    "ring all-reduce on four live ranks: arrows are messages, below each rank its four chunks and whose numbers are in "
    "them. Three steps add up, three hand out.",
    "Four ranks as boxes, an arrow from each to the next, and under each its four chunks",
)

# %% [markdown]
# ## Seven algorithms, one table
#
# The package has seven, all on messages alone. Live, on four ranks and 1,000 numbers: is the sum right, and what
# did the busiest rank send?


# %%
def all_of_them(rank, world_size):
    axis, found = Mesh(dp=world_size)["dp"], {}
    x = torch.arange(1000.0) + rank
    right = comm.all_reduce(x, axis)
    for name, module in ALL_REDUCE.items():
        comm.clear_log()
        same = torch.equal(module.all_reduce(x, axis), right)
        found[name] = same, sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    return found


per_rank = launch(all_of_them)
best = {name: [*zip(*(found[name] for found in per_rank), strict=True)] for name in ALL_REDUCE}
rows = [(name, all(same), max(size), max(messages)) for name, (same, size, messages) in best.items()]
table(rows, ["algorithm", "right", "bytes of the busiest rank", "messages of the busiest rank"])

# %% [markdown]
# *Naive* goes through rank 0. A *tree* adds up towards rank 0 and hands out; the *double tree* sends each half of the
# tensor in four pieces through a tree of its own. *Recursive doubling* exchanges everything with partners at distance
# 1, 2, 4; *Rabenseifner* halves what it exchanges each time; *hierarchical* works inside nodes first. The shortest:

# %%
show_source(ALL_REDUCE["recursive doubling"].all_reduce)

# %% [markdown]
# Which one is best? A message of S bytes takes about α + S β: latency plus bytes over bandwidth (Hockney 1994). Then
#
# $$T_\text{ring}=2(n-1)\,\alpha+\frac{2(n-1)}{n}\,S\beta\qquad T_\text{tree}=2\,\lceil\log_2n\rceil\,(\alpha+S\beta)$$
#
# For small S latency decides, for large S bytes.
# **Predict:** on 64 ranks, α = 5 µs, 1/β = 25 GB/s, from how many bytes on is the ring faster than the tree?


# %% tags=["exercise"]
def ring_wins_from():
    """Bytes at which ring and tree take the same time."""
    ### BEGIN SOLUTION
    more_latency, fewer_bytes = (2 * 63 - 2 * 6) * 5e-6, 2 * 6 - 2 * 63 / 64
    return more_latency * 25e9 / fewer_bytes
    ### END SOLUTION


check("predict: crossing", predictions.crossing, ring_wins_from)

# %% [markdown] tags=["hint"]
# Write both times as a α + b S β, set them equal, and solve for S. The tree of 64 ranks is 6 deep.


# %% tags=["wrong"]
# FAIL: too small by a factor of 11
# MISTAKE: Latency times bandwidth, whatever the algorithm.
def ring_wins_from():
    return 5e-6 * 25e9


# %% tags=["wrong"]
# FAIL: too large by a factor of 2
# MISTAKE: The tree is taken to send the tensor once, not down and up.
def ring_wins_from():
    return (2 * 63 - 2 * 6) * 5e-6 * 25e9 / (6 - 63 / 64)


# %% tags=["wrong"]
# FAIL: too small by a factor of 1.4
# MISTAKE: 64 ranks are taken to have seven levels.
def ring_wins_from():
    return (2 * 63 - 2 * 6) * 5e-6 * 25e9 / (2 * 7)


# %% tags=["wrong"]
# FAIL: too large by
# MISTAKE: The tree is taken to have no latency.
def ring_wins_from():
    return 2 * 63 * 5e-6 * 25e9 / (2 * 6 - 2 * 63 / 64)


# %% tags=["wrong"]
# FAIL: too small by a factor of 2.5e+10
# MISTAKE: Bandwidth is forgotten.
def ring_wins_from():
    return (2 * 63 - 2 * 6) * 5e-6 / (2 * 6 - 2 * 63 / 64)


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's function is asked, and nothing predicted.
def ring_wins_from():
    return links.crossing(64, Link(5e-6, 25e9))


# %%
explore(
    plots.compared_by_formula,
    "computed",
    "alpha-beta times of six algorithms on {ranks} ranks; at the vertical line, if any, the ring overtakes the tree.",
    "Six lines of time over size on {ranks} ranks, latency-bound left, bandwidth-bound right",
    ranks=(2, 1024, 64),
    latency_us=(1, 50, 5),
    gigabytes_per_s=(1, 300, 25),
)

# %%
link = Link(5e-6, 25e9)
table(
    [(n, round(links.crossing(n, link) / 1e3)) for n in (4, 16, 64, 1024)],
    ["ranks", "ring beats tree from, kB"],
)
for n in (63, 64):
    ms = {name: round(1e3 * links.all_reduce_time(name, n, 1e9, link)) for name in ("ring", "rabenseifner")}
    print(f"1 GB on {n} ranks, in ms:", ms)

# %% [markdown]
# On 64 ranks the ring is nowhere the fastest: Rabenseifner has its bytes in 2 log₂ n rounds. That
# holds for powers of two; on 63 the ranks beyond 32 first hand all they have to a partner, and the ring is
# twice as fast. A ring takes any n, and its ranks talk to two neighbours, so it can be laid along the fast
# wires; partners 2, 4, 8 ... apart share wires.
#
# ### Fitted on this machine
#
# `bench.sweep` times calls from 4 KB to 16 MB; the model is fitted to every other size, and has to predict the rest.
# All go through the package's transport in shared memory. Where an algorithm changes with the size (its `all_reduce`
# is one exchange, not a ring, on two ranks or up to 128 KiB), or the machine was busy, a line fits badly: look at r2.

# %% tags=["measured"]
swept = bench.sweep([2, 4], bench.SIZES, ["all_reduce", "ring", "tree"], trials=3)
models = [bench.model(swept, what, n) for what in ("all_reduce", "ring", "tree") for n in (2, 4)]
show(
    plots.sweep_figure([row for row in swept if row["ranks"] == 4], models),
    "measured",
    "three ways to all-reduce on four ranks: time, bus bandwidth, below predicted over measured. Full marks "
    "were fitted, hollow ones predicted. Ranks share one memory, no message has its own link: the ring never wins.",
    "Three panels over bytes: times with dashed fits, bus bandwidth that rises to a plateau, ratios around one",
)
rows = []
for m in models:
    off = max(max(ratio, 1 / ratio) for ratio in m["predicted over measured"].values())
    line = m["fit"].link
    rows.append((m["what"], m["ranks"], line.latency * 1e6, line.bandwidth / 1e9, m["fit"].r2, off))
table(rows, ["call", "ranks", "latency, µs", "bandwidth, GB/s", "r2", "unseen sizes within a factor"])

# %% [markdown]
# α is mostly Python and wake-ups: on a cluster, measure there, with `gpt2lab bench collectives`.
#
# **Predict:** how many seconds does a ring all-reduce of 100 kB take on 4 ranks, over links of 50 ms and 1 MB/s?


# %% tags=["exercise", "measured"]
def ring_seconds():
    """Seconds of the all-reduce."""
    ### BEGIN SOLUTION
    return 2 * 3 * 0.050 + 2 * 3 / 4 * 1e5 / 1e6
    ### END SOLUTION


check("predict: seconds", predictions.seconds, ring_seconds)

# %% [markdown] tags=["hint"]
# Six steps. What does each carry, and what does each pay besides?


# %% tags=["wrong"]
# FAIL: messages pay the latency
# MISTAKE: Latency is forgotten.
def ring_seconds():
    return 2 * 3 / 4 * 1e5 / 1e6


# %% tags=["wrong"]
# FAIL: too large by a factor of
# MISTAKE: Every message is taken to carry the whole tensor.
def ring_seconds():
    return 2 * 3 * (0.050 + 1e5 / 1e6)


# %% tags=["wrong"]
# FAIL: too small by a factor of 1.2
# MISTAKE: Half of the bytes are forgotten: the sum has to come back.
def ring_seconds():
    return 2 * 3 * 0.050 + 3 / 4 * 1e5 / 1e6


# %% tags=["wrong"]
# FAIL: too small by a factor of 1.1
# MISTAKE: The factor 2 (n - 1)/n is taken for 1.
def ring_seconds():
    return 2 * 3 * 0.050 + 1e5 / 1e6


# %% tags=["wrong"]
# FAIL: too small by a factor of 2.25
# MISTAKE: Latency is paid once, not for every message.
def ring_seconds():
    return 0.050 + 2 * 3 / 4 * 1e5 / 1e6


# %% [markdown]
# Now two nodes of two ranks: 1 ms inside, 20 ms between:


# %%
def topology(rank, world_size):
    import time
    from itertools import pairwise

    axis, found = Mesh(dp=world_size)["dp"], {}
    slow, fast = paced.Link(0.02, 1e8), paced.Link(0.001, 1e9)
    x = torch.ones(1000)
    for name in ("ring", "hierarchical"):  # a flat ring crosses the slow links in 6 steps, the hierarchy in 2
        times = [time.perf_counter()]
        with paced.use(paced.Network(slow, inside=fast, node=2)):
            for _ in range(3):
                ALL_REDUCE[name].all_reduce(x, axis)
                times.append(time.perf_counter())
        found[name] = min(end - start for start, end in pairwise(times))
    return found


seconds = launch(topology)
slowest = {name: max(s[name] for s in seconds) for name in seconds[0]}
print("paced: hierarchical is faster:", slowest["hierarchical"] < slowest["ring"])

# %% [markdown]
# ## The deadlock lab
#
# Ranks of one axis must make the same calls, in the same order, with shapes that fit. In plain PyTorch mistakes end in
# wrong numbers, an abort without a traceback, or 30 minutes of silence (10 with NCCL). Ranks of ours write what they
# do on a *board* in shared memory, and read their peers' entries before any data moves.


# %%
def shapes_differ(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    comm.all_reduce(torch.ones(3 + rank), axis)


def order_differs(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(2)
    calls = [lambda: comm.all_reduce(x, axis), lambda: comm.all_gather(x, axis)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def autopsy(fn, **options):
    """Run fn and show what the error says of both sides."""
    try:
        launch(fn, ranks=2, **options)
    except RankFailed as error:
        sides = [line.split(";")[0].strip() for line in str(error).splitlines() if " on axis " in line]
        print(fn.__name__, *sorted(side.replace(" calls ", " called ") for side in sides), sep="\n    ")


autopsy(shapes_differ)
autopsy(order_differs)


# %% [markdown]
# The board also knows who is blocked by whom: where this goes round, the launcher says so
# long before the timeout. A rank that never comes ends with the timeout, which is short:


# %%
def both_send_first(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(4)
    comm.send(x, axis, 1 - rank)
    comm.recv(x, axis, 1 - rank)


def three_receive_first(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(4)
    comm.recv(x, axis, (rank + 1) % world_size)
    comm.send(x, axis, (rank - 1) % world_size)


def one_skips(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    if rank == 0:
        comm.barrier(axis)


for fn, ranks, timeout in ((both_send_first, 2, 60), (three_receive_first, 3, 60), (one_skips, 2, 1)):
    try:
        launch(fn, ranks=ranks, timeout=timeout)
    except RankFailed as error:
        first, *lines = str(error).splitlines()
        print(f"{fn.__name__}: {error.ename}. {first}")
        for line in lines:
            if "waits" in line:
                who, rest = line.strip().split(" waits ")
                print("  ", who, "waits in", rest.split(" in ", 1)[1].split(";")[0])
            elif "returned" in line:
                print("  ", line.strip())

# %% [markdown]
# The cure for the first: start the send (`isend`), receive, then wait for the send, as `step` in the ring does.

# %% [markdown]
# ## Exercises
#
# Your function gets `wire`: `wire.rank`, `wire.size`, `wire.send(x, to)`, `wire.isend(x, to)`, which gives a
# handle to `.wait()` for, and `wire.recv(like, source)`, which gives a tensor of the shape of `like`. Rank n is
# rank 0. The checkers run it on live ranks **and play your messages again**: a right result by a wrong schedule
# fails.
#
# **1.** All-reduce by a ring.


# %% tags=["exercise"]
def ring_all_reduce(x, wire):
    """The sum of every rank's x; each rank sends to its right neighbour only, chunks of 1/n."""
    ### BEGIN SOLUTION
    n, r, chunks = wire.size, wire.rank, list(x.tensor_split(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks)
    ### END SOLUTION


check("ring all-reduce", exercises.ring, ring_all_reduce)

# %% [markdown] tags=["hint"]
# `my_ring` above is nearly it. In step s, rank r sends chunk (r - s) % n; which one does it receive?

# %% [markdown] tags=["hint"]
# Start the send, receive, then wait for the send. In the first n - 1 steps what comes is added, later it replaces.


# %% tags=["wrong"]
# FAIL: n-1 steps add up, n-1 hand out
# MISTAKE: Whole tensors go round: the right sum for twice the bytes or more.
def ring_all_reduce(x, wire):
    total, piece = x.clone(), x
    for _ in range(wire.size - 1):
        going = wire.isend(piece, wire.rank + 1)
        piece = wire.recv(x, wire.rank - 1)
        going.wait()
        total = total + piece
    return total


# %% tags=["wrong"]
# FAIL: On a ring a rank sends to its right neighbour only
# MISTAKE: Everyone sends to everyone, not to the right neighbour only.
def ring_all_reduce(x, wire):
    total = x.clone()
    going = [wire.isend(x, p) for p in range(wire.size) if p != wire.rank]
    for p in range(wire.size):
        if p != wire.rank:
            total = total + wire.recv(x, p)
    [g.wait() for g in going]
    return total


# %% tags=["wrong"]
# FAIL: wait for each other for ever
# MISTAKE: Every rank sends first and waits: nobody receives.
def ring_all_reduce(x, wire):
    wire.send(x, wire.rank + 1)
    return x + wire.recv(x, wire.rank - 1)


# %% tags=["wrong"]
# FAIL: On a ring all ranks send at the same time
# MISTAKE: One chunk after the other goes round, so most ranks wait.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.tensor_split(wire.size))
    for first in range(n):  # one chunk after the other goes round, and round again
        for step in range(2 * (n - 1)):
            if r == (first + step) % n:
                wire.send(chunks[first], r + 1)
            elif r == (first + step + 1) % n:
                came = wire.recv(chunks[first], r - 1)
                chunks[first] = came + chunks[first] if step < n - 1 else came
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: Half of the bytes were sent, and half of the digits
# MISTAKE: Numbers are rounded to 32 bit on the way.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.float().tensor_split(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks).double()


# %% tags=["wrong"]
# FAIL: 4 ranks, 9 numbers of 8 bytes: IndexError
# MISTAKE: torch.chunk may make fewer chunks than ranks.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.chunk(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: What has not left may still change: wait for every send
# MISTAKE: The handle of a send is dropped and never waited for.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.tensor_split(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: the sum on rank
# MISTAKE: Added also in the second half, where finished chunks are handed out.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.tensor_split(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into] = coming + chunks[into]
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: Your function changed its input x; work on a copy
# MISTAKE: The given tensor is overwritten.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, x.tensor_split(wire.size)
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out].clone(), r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into].copy_(coming + chunks[into] if s < n - 1 else coming)
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: was it float32 on the way?
# MISTAKE: Numbers are rounded to 32 bits and sent as 64.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, list(x.tensor_split(wire.size))
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out].float().double(), r + 1)
        coming = wire.recv(chunks[into], r - 1)
        going.wait()
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: wrote into a tensor between isend and wait
# MISTAKE: What is on its way is overwritten: it may leave with the new numbers.
def ring_all_reduce(x, wire):
    n, r, chunks = wire.size, wire.rank, [c.clone() for c in x.tensor_split(wire.size)]
    for s in range(2 * (n - 1)):
        out, into = (r - s) % n, (r - s - 1) % n
        going = wire.isend(chunks[out], r + 1)
        coming = wire.recv(chunks[into], r - 1)
        chunks[out] += 0.5 if s == 0 else 0.0
        going.wait()
        chunks[into] = coming + chunks[into] if s < n - 1 else coming
    return torch.cat(chunks)


# %% tags=["wrong"]
# FAIL: What counts is what goes over `wire`
# MISTAKE: A ring of messages for show, and the sum from one call of comm beside it.
def ring_all_reduce(x, wire):
    chunks = list(x.tensor_split(wire.size))
    for s in range(2 * (wire.size - 1)):
        going = wire.isend(chunks[(wire.rank - s) % wire.size], wire.rank + 1)
        wire.recv(chunks[(wire.rank - s - 1) % wire.size], wire.rank - 1)
        going.wait()
    return comm.all_reduce(x, wire.axis)


# %% tags=["wrong"]
# FAIL: a drawn case
# MISTAKE: The sum comes from a formula of the inputs that were shown, and garbage goes round.
def ring_all_reduce(x, wire):
    chunks = [torch.zeros_like(c) for c in x.tensor_split(wire.size)]
    for s in range(2 * (wire.size - 1)):
        going = wire.isend(chunks[(wire.rank - s) % wire.size], wire.rank + 1)
        wire.recv(chunks[(wire.rank - s - 1) % wire.size], wire.rank - 1)
        going.wait()
    own = torch.arange(len(x), dtype=x.dtype) / 3
    return sum(own + 100 * r**2 + r for r in range(wire.size))


# %% [markdown]
# **2.** Broadcast rank 0's tensor by a tree: n−1 messages in ⌈log₂ n⌉ rounds, so whoever has the tensor sends in every
# round, while a rank lacks it. (Return the tensor; x of the others only says its shape.)


# %% tags=["exercise"]
def tree_broadcast(x, wire):
    """Rank 0's x on every rank."""
    ### BEGIN SOLUTION
    distance = 1
    while distance < wire.size:
        if wire.rank < distance:
            if wire.rank + distance < wire.size:
                wire.send(x, wire.rank + distance)
        elif wire.rank < 2 * distance:
            x = wire.recv(x, wire.rank - distance)
        distance *= 2
    return x
    ### END SOLUTION


check("tree broadcast", exercises.tree, tree_broadcast)

# %% [markdown] tags=["hint"]
# In round k the ranks below 2^k have the tensor. Each sends to the one 2^k further on, if there is one.


# %% tags=["wrong"]
# FAIL: Whoever has the tensor should send in every round
# MISTAKE: A chain, not a tree: only one rank sends at a time.
def tree_broadcast(x, wire):
    if wire.rank:
        x = wire.recv(x, wire.rank - 1)
    if wire.rank + 1 < wire.size:
        wire.send(x, wire.rank + 1)
    return x


# %% tags=["wrong"]
# FAIL: All ranks should have the tensor in the end
# MISTAKE: Only rank 1 receives.
def tree_broadcast(x, wire):
    if wire.rank == 0 and wire.size > 1:
        wire.send(x, 1)
    elif wire.rank == 1:
        x = wire.recv(x, 0)
    return x


# %% tags=["wrong"]
# FAIL: In a tree nobody sends more often than there are rounds
# MISTAKE: Rank 0 sends to all, one after the other.
def tree_broadcast(x, wire):
    if wire.rank == 0:
        for p in range(1, wire.size):
            wire.send(x, p)
        return x
    return wire.recv(x, 0)


# %% tags=["wrong"]
# FAIL: Each of the others needs exactly one message
# MISTAKE: Everyone sends to everyone.
def tree_broadcast(x, wire):
    going = [wire.isend(x, p) for p in range(wire.size) if p != wire.rank]
    came = [wire.recv(x, p) for p in range(wire.size) if p != wire.rank]
    for handle in going:
        handle.wait()
    return came[0] if wire.rank else x


# %% tags=["wrong"]
# FAIL: wait for each other for ever
# MISTAKE: Rank 0 waits for a message that nobody sends.
def tree_broadcast(x, wire):
    if wire.rank:
        x = wire.recv(x, wire.rank // 2)
    for child in (2 * wire.rank, 2 * wire.rank + 1):
        if wire.rank < child < wire.size:
            wire.send(x, child)
    return wire.recv(x, wire.size - 1) if wire.rank == 0 else x


# %% tags=["wrong"]
# FAIL: What has not left may still change: wait for every send
# MISTAKE: The handle of a send is dropped and never waited for.
def tree_broadcast(x, wire):
    distance = 1
    while distance < wire.size:
        if wire.rank < distance:
            if wire.rank + distance < wire.size:
                wire.isend(x, wire.rank + distance)
        elif wire.rank < 2 * distance:
            x = wire.recv(x, wire.rank - distance)
        distance *= 2
    return x


# %% tags=["wrong"]
# FAIL: was it float32 on the way?
# MISTAKE: The tensor travels in 32 bits and comes with their digits.
def tree_broadcast(x, wire):
    x, distance = x.float(), 1
    while distance < wire.size:
        if wire.rank < distance:
            if wire.rank + distance < wire.size:
                wire.send(x, wire.rank + distance)
        elif wire.rank < 2 * distance:
            x = wire.recv(x, wire.rank - distance)
        distance *= 2
    return x.double()


# %% tags=["wrong"]
# FAIL: The tensor has 24 bytes, and two copies of it travel
# MISTAKE: Two copies travel and one is used.
def tree_broadcast(x, wire):
    distance = 1
    x = torch.stack([x, x])
    while distance < wire.size:
        if wire.rank < distance:
            if wire.rank + distance < wire.size:
                wire.send(x, wire.rank + distance)
        elif wire.rank < 2 * distance:
            x = wire.recv(x, wire.rank - distance)
        distance *= 2
    return x[0]


# %% tags=["wrong"]
# FAIL: 3 are enough, got 4 (a drawn case
# MISTAKE: A binary tree in which each rank feeds two: one round too many from eight ranks on.
def tree_broadcast(x, wire):
    if wire.rank:
        x = wire.recv(x, (wire.rank - 1) // 2)
    for child in (2 * wire.rank + 1, 2 * wire.rank + 2):
        if child < wire.size:
            wire.send(x, child)
    return x


# %% [markdown]
# **3.** All-to-all from messages: cut x into n chunks with `tensor_split`; chunk p goes to rank p. Return the list
# of the chunks that came, in order of their senders, your own among them.


# %% tags=["exercise"]
def all_to_all(x, wire):
    """What every rank has for this one, as a list."""
    ### BEGIN SOLUTION
    chunks = list(x.tensor_split(wire.size))
    others = [p for p in range(wire.size) if p != wire.rank]
    going = [wire.isend(chunks[p], p) for p in others]
    mine = chunks[wire.rank]
    came = [mine if p == wire.rank else wire.recv(mine, p) for p in range(wire.size)]
    for handle in going:
        handle.wait()
    return came
    ### END SOLUTION


check("all-to-all", exercises.to_all, all_to_all)

# %% [markdown] tags=["hint"]
# What comes has the size of *your* chunk, whoever sends it. Start all sends before the first receive.


# %% tags=["wrong"]
# FAIL: Send each of the others its chunk, straight, and nothing else
# MISTAKE: Every rank gets all chunks and keeps one: n times the bytes.
def all_to_all(x, wire):
    others = [p for p in range(wire.size) if p != wire.rank]
    going = [wire.isend(x, p) for p in others]
    whole = [x if p == wire.rank else wire.recv(x, p) for p in range(wire.size)]
    [g.wait() for g in going]
    return [w.tensor_split(wire.size)[wire.rank] for w in whole]


# %% tags=["wrong"]
# FAIL: The chunks are not in the order of their senders
# MISTAKE: Chunks that came are in the wrong order.
def all_to_all(x, wire):
    chunks = list(x.tensor_split(wire.size))
    going = [wire.isend(chunks[p], p) for p in range(wire.size) if p != wire.rank]
    came = [wire.recv(chunks[wire.rank], p) for p in range(wire.size) if p != wire.rank]
    [g.wait() for g in going]
    return [chunks[wire.rank], *came[::-1]]


# %% tags=["wrong"]
# FAIL: invalid for input of size
# MISTAKE: Lengths that do not divide are not thought of.
def all_to_all(x, wire):
    chunks = list(x.view(wire.size, -1))
    others = [p for p in range(wire.size) if p != wire.rank]
    going = [wire.isend(chunks[p], p) for p in others]
    came = [chunks[p] if p == wire.rank else wire.recv(chunks[p], p) for p in range(wire.size)]
    [g.wait() for g in going]
    return came


# %% tags=["wrong"]
# FAIL: Start all sends before you receive
# MISTAKE: One rank sends at a time, where all can.
def all_to_all(x, wire):
    chunks = list(x.tensor_split(wire.size))
    came = [chunks[wire.rank]] * wire.size
    for sender in range(wire.size):  # one at a time
        if sender == wire.rank:
            for p in range(wire.size):
                if p != sender:
                    wire.send(chunks[p], p)
        else:
            came[sender] = wire.recv(chunks[wire.rank], sender)
    return came


# %% tags=["wrong"]
# FAIL: What has not left may still change: wait for every send
# MISTAKE: The handles of the sends are dropped and never waited for.
def all_to_all(x, wire):
    chunks = list(x.tensor_split(wire.size))
    for p in range(wire.size):
        if p != wire.rank:
            wire.isend(chunks[p], p)
    mine = chunks[wire.rank]
    return [mine if p == wire.rank else wire.recv(mine, p) for p in range(wire.size)]


# %% tags=["wrong"]
# FAIL: does not fit its receiver
# MISTAKE: Room is made for the chunk that leaves, not for the one that comes.
def all_to_all(x, wire):
    chunks = list(x.tensor_split(wire.size))
    others = [p for p in range(wire.size) if p != wire.rank]
    going = [wire.isend(chunks[p], p) for p in others]
    came = [chunks[p] if p == wire.rank else wire.recv(chunks[p], p) for p in range(wire.size)]
    for handle in going:
        handle.wait()
    return came


# %% tags=["wrong"]
# FAIL: Return a list of chunks, not one tensor
# MISTAKE: The chunks are joined, and nobody can tell any more whose is whose.
def all_to_all(x, wire):
    chunks = list(x.tensor_split(wire.size))
    others = [p for p in range(wire.size) if p != wire.rank]
    going = [wire.isend(chunks[p], p) for p in others]
    mine = chunks[wire.rank]
    came = [mine if p == wire.rank else wire.recv(mine, p) for p in range(wire.size)]
    for handle in going:
        handle.wait()
    return torch.cat(came)


# %% [markdown]
# **4.** Bus bandwidth of a reduce-scatter that leaves `out` bytes on each of n ranks after t seconds.


# %% tags=["exercise"]
def bus_bandwidth(n, out, t):
    """Bytes per second that each rank's wire had to carry."""
    ### BEGIN SOLUTION
    return (n - 1) / n * (n * out) / t
    ### END SOLUTION


check("bus bandwidth", exercises.bus, bus_bandwidth)

# %% [markdown] tags=["hint"]
# How large was the whole array before it was reduced and scattered?


# %% tags=["wrong"]
# FAIL: the whole array is n times the output
# MISTAKE: The output is taken for the whole array.
def bus_bandwidth(n, out, t):
    return (n - 1) / n * out / t


# %% tags=["wrong"]
# FAIL: n=4, 100 bytes out, 1 s
# MISTAKE: The factor 2 of an all-reduce is put into an all-gather.
def bus_bandwidth(n, out, t):
    return 2 * (n - 1) / n * n * out / t


# %% tags=["wrong"]
# FAIL: expected 300, got 400
# MISTAKE: The own part is taken to travel as well.
def bus_bandwidth(n, out, t):
    return n * out / t


# %% tags=["wrong"]
# FAIL: n=2, 8e9 bytes out, 0.5 s
# MISTAKE: The time is forgotten.
def bus_bandwidth(n, out, t):
    return (n - 1) * out


# %% tags=["wrong"]
# FAIL: expected 300, got 100
# MISTAKE: Only the output is divided by the time.
def bus_bandwidth(n, out, t):
    return out / t


# %% [markdown]
# **5. A puzzle with a score.** Rank 0 of eight has four chunks that all want. In a round a rank sends one chunk to one
# rank and receives one at the same time; it sends only what it held before the round. A tree for one
# chunk after the other takes 12, a chain 10; at most 7 pass.


# %% tags=["exercise"]
def in_rounds():
    """Rounds, each a list of messages (from, to, chunk)."""
    ### BEGIN SOLUTION
    held, rounds = [set(range(4)), *(set() for _ in range(7))], []
    for t in range(6):
        messages = []
        for rank in range(8):
            partner = rank ^ 2 ** (t % 3)  # at distance 1, 2, 4, 1, ...
            new = held[rank] - held[partner]
            if new:
                rare = min(new, key=lambda chunk: sum(chunk in of for of in held))
                messages.append((rank, partner, rare))
        for _, to, chunk in messages:
            held[to].add(chunk)
        rounds.append(messages)
    return rounds
    ### END SOLUTION


check("four chunks in few rounds", exercises.in_rounds, in_rounds)

# %% [markdown] tags=["hint"]
# A rank that holds something and sends nothing wastes a round. Pair ranks at distance 1, then 2, then 4, then 1
# again: both of a pair can send.

# %% [markdown] tags=["hint"]
# Rank 0 sends a chunk that nobody else has, as long as there is one. The others send what their partner lacks: of two
# such chunks, which one do fewer ranks have?


# %% tags=["wrong"]
# FAIL: 12 rounds; at most 7 pass
# MISTAKE: One chunk after the other goes down the tree.
def in_rounds():
    return [[(r, r + d, c) for r in range(d)] for c in range(4) for d in (1, 2, 4)]


# %% tags=["wrong"]
# FAIL: 10 rounds; at most 7 pass
# MISTAKE: A chain: each chunk needs n - 1 rounds, and others follow it.
def in_rounds():
    return [[(r, r + 1, t - r) for r in range(7) if 0 <= t - r < 4] for t in range(10)]


# %% tags=["wrong"]
# FAIL: round 1: rank 0 sends 4 chunks; one is allowed
# MISTAKE: Rank 0 sends four chunks in one round.
def in_rounds():
    return [[(0, 1 + c, c) for c in range(4)]]


# %% tags=["wrong"]
# FAIL: round 1: rank 1 sends chunk 0, which it did not hold before
# MISTAKE: A chunk is sent on in the round in which it comes.
def in_rounds():
    return [[(r, r + 1, c) for r in range(7)] for c in range(4)]


# %% tags=["wrong"]
# FAIL: round 4: rank 7 receives 2 chunks; one is allowed
# MISTAKE: A rank receives two chunks in one round.
def in_rounds():
    return [[(0, 1, 0)], [(0, 2, 1)], [(0, 3, 2)], [(1, 7, 0), (2, 7, 1)]]


# %% tags=["wrong"]
# FAIL: after 3 rounds rank 1 lacks chunk 1
# MISTAKE: Only the first chunk is sent.
def in_rounds():
    return [[(r, r + d, 0) for r in range(d)] for d in (1, 2, 4)]


# %% tags=["wrong"]
# FAIL: is no (from, to, chunk)
# MISTAKE: A message without its chunk.
def in_rounds():
    return [[(0, 1)]]


# %% [markdown]
# ## Appendix: what carries the bytes
#
# With **gloo** a message goes through the kernel and a socket. The
# backend **shm** of this package lets ranks of one machine share memory: the sender copies a tensor in, the receivers
# read it there.
#
# No strategy knows on which of the two it runs:


# %%
def same_calls(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.arange(1000.0) + rank
    return [comm.all_reduce(x, axis), comm.all_gather(x, axis), comm.reduce_scatter(x, axis)]


backends = ["shm", "gloo"] if transport.AVAILABLE else ["gloo"]  # macOS and Windows lack what "shm" stands on
over = {name: launch(same_calls, backend=name) for name in backends}
results = {name: [x for of_one in ranks for x in of_one] for name, ranks in over.items()}
print("the same bits:", all(map(torch.equal, results[backends[0]], results["gloo"])))

# %% tags=["measured"]
found = [
    {"ranks": n, "bytes": size, "call": call, "seconds": seconds}
    for n in (2, 4)
    for size in (1 << 10, 1 << 15, 1 << 20, 1 << 23)
    for call, seconds in launch(measure, size, 5, ranks=n, backend=backends[0])[0].items()
]
show(
    plots.transports_figure(found),
    "measured",
    "the same calls on the same ranks over shared memory (full lines) and over gloo (dashed), on the machine that "
    "built this notebook.",
    "Two panels, two and four ranks: time of a call over its size, on two backends",
)

# %% [markdown]
# Shared memory saves small tensors system calls, large ones copies.
#
# Why compare bits? JAX's reduce-scatter over gloo gave wrong values on one rank and no error
# ([jax#40830](https://github.com/jax-ml/jax/issues/40830)). PyTorch's gloo misreads strided
# tensors in a broadcast, silently ([pytorch#192920](https://github.com/pytorch/pytorch/issues/192920)).

# %% [markdown]
# ## Appendix: trouble before the first call
#
# The lecture's `spawn` hands keyword arguments on by *position*: in another order, a call silently runs with the
# wrong ones:


# %%
def spawn_by_position(fn, world_size, **options):
    return [fn(rank, world_size, *options.values()) for rank in range(world_size)]


def settings(rank, world_size, rows, steps):
    return f"{rows} rows, {steps} steps"


print("by position:", spawn_by_position(settings, 1, steps=10, rows=64)[0])
print("by name:    ", launch(settings, ranks=1, steps=10, rows=64)[0])


# %% [markdown]
# And its ranks meet at a fixed TCP port: a second job fails there, or joins the first. Here ranks
# meet in a private folder:


# %%
def total(rank, world_size, base):
    return comm.all_reduce(torch.tensor([base + rank]), Mesh(dp=world_size)["dp"]).item()


with Ranks(2) as one, Ranks(2) as other:  # two jobs at the same time
    print("each its own sum:", one.run(total, 0), other.run(total, 100))

# %% [markdown]
# ## Appendix: what people do today
#
# Float addition depends on the order: (a + b) + c is not a + (b + c). All ranks of a call get the same bits; another
# algorithm, or number of ranks, gives others. [Fixed blocks, added as one tree](https://arxiv.org/abs/2511.17826)
# (Zhang 2025) within and between ranks, give the same:

# %%
rows = [(name, f"{share:.0%}", agree) for name, share, agree in order.differing(launch(order.sums, 100_000))]
table(rows, ["float32 sum of four ranks", "numbers unlike those in order", "ranks agree"])
generator = torch.Generator().manual_seed(0)
factors = torch.randn(5, 64, generator=generator), torch.randn(64, 24, generator=generator)
found = {n: launch(order.row_parallel, *factors, 8, ranks=n)[0] for n in (1, 2, 4)}
for way, place in {"a plain sum": 0, "a tree over 8 blocks": 2}.items():
    same = [n for n in (2, 4) if torch.equal(found[n][place], found[1][place])]
    print(
        f"{way}: the bits of one rank on {same or 'no other number of'} ranks; bytes on 4: {found[4][place + 1]:,}"
    )

# %% [markdown]
# The price: log2(n) T C numbers a rank, not 2 (n−1)/n T C.
#
# *Deterministic* can mean the same bits again (all our plans; not servers on arrival, lesson 09), on all ranks, or on
# any number (no plan).
#
# **Exercise.** Such a sum, of 2, 4, 8 ... tensors: neighbours first.


# %% tags=["exercise"]
def fixed_order(parts):
    """The sum of tensors; the bits are the same when each half of them was summed elsewhere, in this way too."""
    ### BEGIN SOLUTION
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
    ### END SOLUTION


check("a fixed order", predictions.fixed_order, fixed_order)

# %% [markdown] tags=["hint"]
# Half as many tensors remain when each was added to its neighbour. And then?


# %% tags=["wrong"]
# FAIL: one after the other
# MISTAKE: Added from the first to the last: no rank can begin with its own half.
def fixed_order(parts):
    return sum(parts[1:], parts[0])


# %% tags=["wrong"]
# FAIL: nearer, but other bits
# MISTAKE: More digits on the way: a better sum, whose bits no tree of float32 gives.
def fixed_order(parts):
    return sum(part.double() for part in parts).float()


# %% tags=["wrong"]
# FAIL: the two halves added first
# MISTAKE: The first half is added to the second one, so partners are far apart.
def fixed_order(parts):
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


# %% tags=["wrong"]
# FAIL: the order hangs on the numbers
# MISTAKE: The smallest first, as for a good sum: another order for other numbers.
def fixed_order(parts):
    parts = sorted(parts, key=lambda part: part.abs().sum())
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# %% tags=["wrong"]
# FAIL: changed what it was given
# MISTAKE: The right tree, written into the tensors that were given.
def fixed_order(parts):
    parts = list(parts)
    while len(parts) > 1:
        parts = [a.add_(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# %% tags=["wrong"]
# FAIL: 8 tensors
# MISTAKE: Right for four tensors only.
def fixed_order(parts):
    return (
        sum(parts[2:], parts[0] + parts[1])
        if len(parts) != 4
        else (parts[0] + parts[1]) + (parts[2] + parts[3])
    )


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The lab's tree is called.
def fixed_order(parts):
    return order.tree(parts)


# %% [markdown]
# ## Drill
#
# <details><summary>Why does an all-gather's backward sum, while scatter's backward does not?</summary>
# After an all-gather every rank used every shard, so a shard's gradient is a sum over ranks. After a scatter each
# chunk was used on one rank only.</details>
#
# <details><summary>A ring all-reduce of 1 GB on 1,000 ranks: how many bytes does each rank send, compared with 4
# ranks?</summary> 1.998 GB against 1.5 GB. Bytes hardly grow; the latency, 2 (n−1) α, does.</details>
#
# <details><summary>Two ranks call <code>send</code> first, and it works with small tensors. Is it right?</summary>
# No. It works only as long as some buffer takes the message; here it hangs even with 16
# bytes.</details>
#
# ## Read on
#
# - Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce algorithms*: no algorithm sends fewer bytes.
# - Thakur, Rabenseifner & Gropp 2005, *Optimization of collective communication operations in MPICH*: which algorithm
#   for which size.
# - Sanders, Speck & Träff 2009, *Two-tree algorithms*: the double tree.
# - NVIDIA 2024, *nccl-tests*, on performance: bus bandwidth, exactly defined.
#
# **Next**: [04 Data parallel](04_data_parallel.ipynb).
