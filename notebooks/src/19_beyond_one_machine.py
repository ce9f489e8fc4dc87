# %% [markdown]
# # 19 Beyond one machine
#
# **The one-minute version.** No strategy of this course knows how many machines there are: a launcher starts the
# ranks, and they find each other through an address. What changes is the *wire*: between machines it is ten to a
# hundred times slower than inside one. So the same plan is fast or slow by the axis that crosses it.
# What also changes is how things go wrong: ranks that never meet, and machines that fail every few hours
# because there are thousands of them.
#
# You will train on two namespaces of this machine, simulate 4,096 GPUs, predict steps that others have published, and
# choose what to do when a machine is gone.

# %% tags=["setup"]
import dataclasses
import math
import time

import numpy as np
import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import cluster as exercises
from gpt2lab.lessons.labs import cluster as lab
from gpt2lab.lessons.labs import scaling
from gpt2lab.plan import Plan, build
from gpt2lab.planner import failures, scale
from gpt2lab.planner import published_steps as published
from gpt2lab.planner.problem import EFFICIENCY
from gpt2lab.plots import scale as plots
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.train import Trainer

# %% tags=["setup"]
pool = Ranks(4, timeout=60, echo=False)

# %% [markdown]
# ## Two machines on one
#
# Linux can give a process a network of its own: a *namespace*. Two of them, joined by a wire, are two machines to every
# program in them. One command does it, in a terminal:
#
# `gpt2lab cluster --machines 2x2 --wire 100mbit,1ms -- train --plan dp=2,tp=2 --steps 20`
#
# It needs root or user namespaces, and says so where neither is there. Each machine runs torchrun. The cell below
# does the same with a small model in two **placements**: ranks numbered machine by machine, so that tensor parallelism
# stays inside a machine, and dealt out in turn, so that it goes across. *Where this machine does not permit it, the
# cell shows the record of such a run; counts and losses are the same, and a test compares the two.*

# %%
found = lab.two_placements() if lab.permitted() else lab.record("placements")
for place, ranks in found.items():
    print(f"tensor parallelism {place}: rank r is on machine", ranks[0]["machines"])

# %% tags=["measured"]
print("run live just now" if lab.permitted() else "from the record: no networks can be made here")
for place, ranks in found.items():
    print(f"{place:7} {max(r['seconds'] for r in ranks):.2f} s a step")

# %% [markdown]
# Both train exactly as one process does.

# %%
guess = predict("How many times the bytes leave a machine when tensor parallelism crosses?", unit="times")

# %%
alone = Trainer(build(Plan(), lab.CONFIG, Mesh(), torch.float64))
serial = [alone.step(lab.the_batch()).loss for _ in range(1 + lab.STEPS)]
for place, ranks in found.items():
    off = max(abs(a / b - 1) for r in ranks for a, b in zip(r["losses"], serial, strict=True))
    print(f"{place:7} losses equal the serial ones:", off < 1e-10)

# %%
by_axis = {
    f"tp {place}": {
        axis: sum(r["crossing"].get(axis, 0) for r in ranks[:2]) / lab.STEPS for axis in ("dp+cp", "tp")
    }
    for place, ranks in found.items()
}
show(
    plots.crossed(by_axis),
    "counted",
    "bytes that two ranks send out of their machine in a step. Gradients (dp+cp) cross once, activations (tp) in every "
    "layer.",
    "Two bars: under two megabytes of gradients with tensor parallelism inside, about nineteen of activations across",
)
inside, across = (sum(found[p][0]["crossing"].values()) for p in ("inside", "across"))
print(f"{across / inside:.1f} times the bytes")
guess.beside(across / inside, "counted")

# %% [markdown]
# 11.1<!--above--> times. The kernel's own counter of the network card agrees to within a tenth.
#
# **Your turn.** A mesh numbers its ranks with the last axis innermost. Machines take neighbouring ranks. Along which
# axes do messages leave a machine? Sizes need not divide: of tp=3 on machines of 4 the second group *straddles* two.


# %% tags=["exercise"]
def crosses(sizes, machine):
    """The axes, of sizes such as {"pp": 2, "dp": 2, "tp": 2}, of which a group is on two machines of so many ranks."""
    ### BEGIN SOLUTION
    world = stride = math.prod(sizes.values())
    found = set()
    for name, size in sizes.items():
        stride //= size  # to the next rank of the group
        pairs = [(rank, rank + stride) for rank in range(world) if rank // stride % size < size - 1]
        if any(a // machine != b // machine for a, b in pairs):
            found.add(name)
    return found
    ### END SOLUTION


check("what crosses", exercises.crosses, crosses)


# %% tags=["wrong"]
# FAIL: pp has one rank, which sends nothing to itself
# MISTAKE: An axis of one rank is taken to send.
def crosses(sizes, machine):
    found, stride = set(), math.prod(sizes.values())
    for name, size in sizes.items():
        if stride > machine:
            found.add(name)
        stride //= size
    return found


# %% [markdown] tags=["hint"]
# To the next rank of its group it is a stride, the product of the sizes further inside. Rank r is on machine
# r // machine. Of all pairs of neighbours, is one on two machines?


# %% tags=["wrong"]
# FAIL: All ranks of a dp group share a machine, and yours says that some do not
# MISTAKE: Every axis but the last is taken to leave the machine.
def crosses(sizes, machine):
    return set(list(sizes)[:-1])


# %% tags=["wrong"]
# FAIL: Messages of pp leave a machine, and yours says that they stay
# MISTAKE: An axis is compared with the machine by its size, not by how far apart its ranks are.
def crosses(sizes, machine):
    return {name for name, size in sizes.items() if size > machine}


# %% tags=["wrong"]
# FAIL: Messages of dp leave a machine, and yours says that they stay
# MISTAKE: The axis's own size is taken off too early: it is off by one axis.
def crosses(sizes, machine):
    found, stride = set(), math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        if size > 1 and stride >= machine:
            found.add(name)
    return found


# %% tags=["wrong"]
# FAIL: Messages of tp leave a machine of 8, and yours says that they stay
# MISTAKE: Only the outermost axis is taken to leave the machine.
def crosses(sizes, machine):
    return set(list(sizes)[:1]) if math.prod(sizes.values()) > machine else set()


# %% tags=["wrong"]
# FAIL: Machines of 4 end inside groups of 3, so messages of tp leave a machine
# MISTAKE: A group that is small enough for a machine is taken to be in one, also where the sizes do not divide.
def crosses(sizes, machine):
    found, stride = set(), math.prod(sizes.values())
    for name, size in sizes.items():
        if size > 1 and stride > machine:
            found.add(name)
        stride //= size
    return found


# %% tags=["wrong"]
# FAIL: All ranks of a dp, tp group share a machine, and yours says that some do not
# MISTAKE: Every axis is taken to leave, as soon as there are several machines.
def crosses(sizes, machine):
    return {name for name, size in sizes.items() if size > 1 and math.prod(sizes.values()) > machine}


# %% [markdown]
# When an axis must cross, let less of it cross. **Your turn**: an all-reduce over both axes in which each rank sends
# only its share of the bytes to the other machine. Four live ranks, `inside` = 0 1 and 2 3; every byte is counted.


# %% tags=["exercise"]
def two_levels(x, inside, across):
    """The sum of x over all ranks; x has two rows or more for each rank of `inside`. Use comm's collectives."""
    ### BEGIN SOLUTION
    mine = comm.reduce_scatter(x, inside)
    return comm.all_gather(comm.all_reduce(mine, across), inside)
    ### END SOLUTION


check("two levels", exercises.two_levels, two_levels)


# %% tags=["wrong"]
# FAIL: Half of the bytes cross, and half of the digits
# MISTAKE: What crosses is sent as float32: half the bytes, and half the digits.
def two_levels(x, inside, across):
    mine = comm.reduce_scatter(x, inside)
    return comm.all_gather(comm.all_reduce(mine.float(), across).double(), inside)


# %% tags=["wrong"]
# FAIL: all_reduce sends what nobody counts. Use the calls of comm that are counted
# MISTAKE: PyTorch's own call over all ranks: no byte of it is counted.
def two_levels(x, inside, across):
    x = x.clone()
    torch.distributed.all_reduce(x)
    return x


# %% tags=["wrong"]
# FAIL: 8 rows: the sum on rank 0: expected shape (8, 2), got (6, 2)
# MISTAKE: Three rows for each rank are written down.
def two_levels(x, inside, across):
    mine = comm.reduce_scatter(x[:6], inside)
    return comm.all_gather(comm.all_reduce(mine[:3], across), inside)


# %% [markdown] tags=["hint"]
# `comm.reduce_scatter(x, axis)` leaves each rank one part of the sum. Which sum is still missing, and how large is it?


# %% tags=["wrong"]
# FAIL: The result is the sum of one machine, not over all four ranks
# MISTAKE: The sum stays inside each machine.
def two_levels(x, inside, across):
    return comm.all_gather(comm.reduce_scatter(x, inside), inside)


# %% tags=["wrong"]
# FAIL: All of x crosses: what is smaller after a reduce-scatter?
# MISTAKE: The whole tensor is sent to the other machine, where a part is enough.
def two_levels(x, inside, across):
    return comm.all_reduce(comm.all_reduce(x, inside), across)


# %% tags=["wrong"]
# FAIL: 6 rows: the sum on rank 0: expected shape (6, 2), got (3, 2)
# MISTAKE: The all-gather at the end is missing.
def two_levels(x, inside, across):
    return comm.all_reduce(comm.reduce_scatter(x, inside), across)


# %% tags=["wrong"]
# FAIL: Inside and across are exchanged: the large messages cross
# MISTAKE: Inside and across are exchanged, so the large messages take the slow link.
def two_levels(x, inside, across):
    mine = comm.reduce_scatter(x, across)
    return comm.all_gather(comm.all_reduce(mine, inside), across)


# %% tags=["wrong"]
# FAIL: Whole sums are gathered across: what is smaller after a reduce-scatter?
# MISTAKE: Whole sums are gathered across machines.
def two_levels(x, inside, across):
    both = comm.all_gather(comm.all_reduce(x, inside), across)
    return both[: len(x)] + both[len(x) :]


# %% tags=["wrong"]
# FAIL: Your function changed x. Return a new tensor
# MISTAKE: The given tensor is overwritten.
def two_levels(x, inside, across):
    mine = comm.reduce_scatter(x, inside)
    x.copy_(comm.all_gather(comm.all_reduce(mine, across), inside))
    return x.clone()


# %% [markdown]
# ## The first day on a cluster
#
# The training command runs unchanged under torchrun, Slurm and Open MPI (tests run all three and compare losses with
# ranks of our own). `--dry-run` prints their lines:

# %%
from gpt2lab.cli import main

_ = main(["train", "--plan", "dp=2,tp=2", "--steps", "20", "--dry-run"])
# %% [markdown]
# What to set, and who needs it:
#
# | what | where | why |
# |:--|:--|:--|
# | `MASTER_ADDR`, `MASTER_PORT` | the first machine, a free port | ranks meet in a *store* there |
# | `GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME` | the card to the others | unset: the one towards the store |
# | `--out` | a folder that all machines see | rank 0 names the run; every rank writes its checkpoint |
# | open ports | all, between machines of a job | each pair of ranks has a connection on any free port |
# | `OMP_NUM_THREADS`, affinities | 1; cores near the rank's GPU and card | otherwise ranks fight for cores |
#
# And what goes wrong. PyTorch alone waits (30 minutes by default) and then names a socket. Here all ranks first
# *meet*: rank 0 sees who has come and whether all have the same versions, and each rank knocks at its neighbour's
# door. A test makes each of these mistakes on two live namespaces and compares with this table:

# %%
table(lab.record("mistakes"), ["what was done", "what you see", "what it is", "what to do"])

# %% [markdown]
# Clocks deserve a second look: each machine's clock starts when it boots, so spans of two machines do not line up. If
# all ranks meet, then the first reads its clock, then all continue, the reading lies *between* two readings of every
# other rank. Five rounds narrow it down, and the method knows its own error:

# %%
show_source(trace.clock_behind)


# %%
def two_clocks(rank, world_size):
    real = time.perf_counter
    if rank > 1:  # the second machine booted 1000 seconds later
        time.perf_counter = lambda: real() - 1000
    try:
        return trace.clock_behind(Mesh(dp=world_size)["dp"])
    finally:
        time.perf_counter = real


for rank, (behind, within) in enumerate(pool.run(two_clocks)):
    print(
        f"rank {rank}: behind by {abs(round(behind)):4} s, the truth is within the stated error:",
        abs(behind - 1000 * (rank > 1)) <= within,
    )

# %% [markdown]
# ## 4,096 ranks, simulated
#
# Large clusters have three levels: inside a machine (NVLink), a **rail** (GPUs with the same place in the machines of
# a **pod** share a switch), and a **spine** that joins everything else. A message takes latency + bytes / bandwidth;
# what leaves or enters a rank at the same time shares its card, and what leaves a pod shares its uplinks. With numpy
# that is a few lines for all ranks at once. Here by hand, on equal links:


# %%
def ring_clock(n, size, latency, bandwidth):
    """Seconds of a ring all-reduce: every rank sends when it has received what it sends."""
    clock = np.zeros(n)
    for _ in range(2 * (n - 1)):
        sent = clock + size / n / bandwidth
        clock = np.maximum(sent, np.roll(sent + latency, 1))
    return clock.max()


link = scale.Link(10e-6, 25e9)
flat = scale.Fabric(1, 1 << 20, link, link, link)
ours, package = ring_clock(64, 2**26, 10e-6, 25e9), scale.collective("ring", 64, 2**26, flat).seconds
formula = 2 * 63 * 10e-6 + 2 * 63 / 64 * 2**26 / 25e9
print(f"by hand {1e3 * ours:.3f} ms, the package {1e3 * package:.3f} ms, the formula {1e3 * formula:.3f} ms")

# %% [markdown]
# Can it be trusted? Its *messages* are compared with those of live ranks (here four, in two machines). Its *times*
# agree with closed forms on equal links, and on unequal ones with an exact event clock.


# %%
def sent_live(rank, world_size):
    from gpt2lab.algorithms import hierarchical

    axis = Mesh(dp=world_size)["dp"]
    comm.clear_log()
    hierarchical.all_reduce(torch.ones(1001, dtype=torch.float64), axis, node=2)
    sends = [e for e in comm.log if e.op == "send"]
    return len(sends), sum(e.bytes for e in sends)


simulated = scale.collective("hierarchical", 4, 8 * 1001, scale.Fabric(machine=2), itemsize=8)
live = pool.run(sent_live)
rows = zip(
    range(4), *zip(*live, strict=True), simulated.messages.tolist(), simulated.bytes.tolist(), strict=True
)
table(rows, ["rank", "messages, live", "bytes, live", "messages, simulated", "bytes, simulated"])
print("equal:", live == list(zip(simulated.messages.tolist(), simulated.bytes.tolist(), strict=True)))

# %% [markdown]
# Which all-reduce for a gigabyte of gradients, and which for four kilobytes?

# %%
guess = predict(
    "Four kilobytes on 4,096 GPUs: which is fastest?",
    "ring",
    "tree",
    "double tree",
    "hierarchical",
    "in the switches",
)

# %%
WORLDS = (8, 64, 512, 4096)


def seconds_of(megabytes, taper, worlds):
    fabric, size = scale.Fabric(taper=float(taper)), int(megabytes * 2**20) // 4 * 4
    cut = {"double tree": {"chunks": max(1, int(megabytes / 16))}}  # of 16 MB, which follow each other
    seconds = {
        name: [scale.collective(name, n, size, fabric, **cut.get(name, {})).seconds for n in worlds]
        for name in ("ring", "tree", "double tree", "hierarchical")
    }
    return seconds | {"in the switches": [scale.in_network(n, size, fabric)[0] for n in worlds]}


def all_reduces(megabytes=1024.0, taper=1, worlds=WORLDS):
    """Milliseconds of every algorithm against the number of GPUs; a pod's uplinks carry 1 / taper."""
    return plots.all_reduces(worlds, seconds_of(megabytes, taper, worlds), f"{megabytes:g} MB on every GPU")


# %%
small = seconds_of(0.004, 1, WORLDS[-1:])
guess.beside(min(small, key=small.get), "simulated")
explore(
    all_reduces,
    "simulated",
    "an all-reduce of {megabytes:g} MB; machines of 8, NVLink 450 GB/s, cards 50 GB/s, 3 to 10 us assumed.",
    "Lines of five algorithms against 8 to 4096 GPUs, both axes logarithmic",
    posters=[{"megabytes": 1024.0}, {"megabytes": 0.004}],
    megabytes=[1024.0, 1.0, 0.004],
    taper=[1, 4],
)

# %% [markdown]
# Large tensors: the hierarchy wins, because only an eighth of the bytes uses each card; switches that add (SHARP)
# halve even that. Small tensors: latencies decide, and a ring has 2 x 4,095 of them. Libraries therefore choose by
# size.
#
# Here ring and double tree use one of eight cards. Libraries run eight at once, each through another card with its
# part.

# %% tags=["measured"]
begin = time.perf_counter()
scale.collective("ring", 4096, 2**30, scale.Fabric())
print(f"33 million messages of a ring over 4,096 ranks, simulated in {time.perf_counter() - begin:.1f} s")

# %% [markdown]
# ## How far does each plan carry?
#
# Now whole training steps, by the cost model that lesson 17 searches with: operations, memory traffic, messages, a
# schedule on a clock. A sum takes the fastest of three ways:

# %%
from gpt2lab.planner.seconds import RankOnCluster

show_source(RankOnCluster._collective)

# %% [markdown]
# **Strong scaling**: the same 4,096 sequences of 2,048 tokens on more and more A100s, in micro-batches of one
# sequence. A hollow mark does not fit into 80 GB.


# %%
def curves(model, names, rows, value):
    """For each family of plans {GPUs: (value, whether it fits)}."""
    found = {name: scaling.family(name, model, rows, GPUS) for name in names}
    return {
        name: {n: (value(n, p), p.memory <= room) for n, p in curve.items() if not isinstance(p, str)}
        for name, curve in found.items()
    }


GPUS, room = (8, 16, 64, 256, 1024, 4096), scaling.a100s().device.memory
seconds = lambda n, step: step.seconds
strong = curves("GPT-2 XL", ("dp", "ZeRO-1", "ZeRO-3", "cp x dp"), lambda n: 4096, seconds)
strong |= curves("GPT-2 XL, 64 experts", ("ep=8 x dp", "ep=64 x dp"), lambda n: 4096, seconds)
show(
    plots.scaling(
        strong, "seconds a step", "GPT-2 XL, 4,096 sequences", lambda n: 8 * strong["dp"][8][0] / n
    ),
    "computed",
    "data parallelism scales until each GPU has few sequences; then its gradients are all that is left. ep: the same "
    "model with 64 experts in each layer, forty times the weights. Hollow: above 80 GB, at 2 bytes for every number.",
    "Falling lines that leave the ideal one between 256 and 1024 GPUs; that of data parallelism rises at 4096. Context "
    "parallelism begins at twice the ideal, experts over 64 GPUs above it; experts over 8 meet these at 1024",
)

# %% [markdown]
# The mixture has 64 experts a layer, a token asks for one. Over 8 neighbours (`ep=8`) tokens stay inside a machine, and
# each GPU holds 8 experts: too much for few GPUs. Over 64 neighbours a GPU holds one, and every all-to-all crosses
# machines. All other weights are summed over dp ranks, an expert's over dp / ep only. These bytes and messages equal
# those of live ranks exactly, up to 16 in the tests:

# %%
for ep in (8, 64):
    step = scaling.family(f"ep={ep} x dp", "GPT-2 XL, 64 experts", lambda n: 4096, (64,))[64]
    sent = ", ".join(f"{axis} {size / 1e9:.1f}" for axis, size in step.sent.items() if size > 1e6)
    print(
        f"64 GPUs, ep={ep}: {step.seconds:.1f} s, {step.memory / 1e9:.0f} GB held; GB sent by a GPU: {sent}"
    )

# %%
large = curves("175B", ("ZeRO-3", "tp x dp", "tp x pp x dp", "cp x dp"), lambda n: 4096, seconds)
alone = 8 * large["ZeRO-3"][8][0]
slower = {name: {n: (s * n / alone, fits) for n, (s, fits) in curve.items()} for name, curve in large.items()}
show(
    plots.scaling(slower, "seconds of a step / ideal", "175B, 4,096 sequences"),
    "computed",
    "ideal: the time of ZeRO-3 on eight GPUs, shared out evenly. It gathers all weights for every micro-batch, and a "
    "sequence of 2,048 tokens is work enough to hide that, if all eight cards of a machine carry it. Hollow: above 80 "
    "GB, at 2 bytes for every number.",
    "Filled marks for ZeRO-3, level and lowest, and for tensor, pipeline and data parallelism together; the others "
    "are hollow",
)
for name, curve in large.items():
    print(name, {n: f"{seconds:.0f} s" + ", too large" * (not fits) for n, (seconds, fits) in curve.items()})

# %% [markdown]
# For 175B nothing beats ZeRO-3 by this prediction. (For that of 2021 it is up to 76 % too fast, see below.) Why do the
# largest runs cut matrices and layers? With fewer rows than GPUs ZeRO-3 has nothing to deal out, and its gathers must
# be hidden.
#
# **Weak scaling**: every GPU brings two sequences of its own. What falls now is what grows with the
# ranks. **HSDP** (`zero=3,shard=8`) shards inside machines, with replicas across.

# %%
mfu = lambda n, step: 100 * step.mfu
weak = curves("7.5B", ("dp", "ZeRO-1", "ZeRO-3", "HSDP", "tp x dp", "tp x pp x dp"), lambda n: 2 * n, mfu)
show(
    plots.scaling(weak, "% of the GPUs' peak", "7.5B, two sequences a GPU"),
    "computed",
    "sums over all ranks have more and more latencies: data parallelism and ZeRO-3 fall in the end, ZeRO-1 "
    "throughout, since its sum begins when backward is over. HSDP gathers inside a machine, and what it sums across "
    "is an eighth, hidden by backward.",
    "Level lines of HSDP near 42 and of tensor and pipeline parallelism near 24 percent; ZeRO-3 is level up to 1024 "
    "GPUs; data parallelism falls from 41 to 22 percent, ZeRO-1 from 40 to 30",
)
for name, curve in weak.items():
    print(name, {n: f"{share:.1f} %" for n, (share, _) in curve.items()})

# %% [markdown]
# ## Beside what others measured
#
# A model is worth what it predicts. Below are steps that papers, a README and a training log have published, beside
# ours. One number is chosen: the share of the data sheet's rate that a very large matrix product reaches. It is fitted
# to *one* table, the first below, and then the others are predicted, unseen. Launches, element-wise work, bubbles and
# messages follow from the plan.

# %%
print(f"a very large product reaches {EFFICIENCY} of the data sheet's rate")
show(
    plots.beside_published(
        [(r.name, r.source, r.error()) for r in published.ROWS],
        marked=[r.name for r in published.ROWS if r.reason],
    ),
    "from a paper",
    "a dot: our prediction above (right) or below (left) the published seconds; named is the worst of each source. The "
    "band: 20 %. An orange diamond is off by more than a quarter, for a reason that we know.",
    "Eight lines of dots, one a source, nearly all of them within twenty percent of zero; six diamonds, four of "
    "them far left",
)

# %%
gigabytes = lambda size: f"{size / 1e9:.0f} GB" if size else ""
table(
    [
        (
            r.name,
            f"{r.measured:.2f} s",
            f"{r.predicted().seconds:.2f} s",
            f"{r.error():+.0%}",
            gigabytes(r.held),
            gigabytes(r.predicted().memory),
        )
        for r in published.ROWS
    ],
    ["run", "published", "predicted", "error", "held, published", "held, predicted"],
)
table(
    [(r.name, r.plan.replace(",", ", "), r.source, r.assumed, r.reason) for r in published.ROWS],
    ["run", "plan", "source", "not printed, so assumed", "why it is off"],
    folded="The same rows: their plans, their sources, what we assumed, and why some are off",
)
for name, rows in (("fitted", published.FITTED), ("unseen", published.UNSEEN)):
    errors = sorted(abs(r.error()) for r in rows)
    print(f"{name}: {len(rows)} rows, median error {np.median(errors):.0%}, largest {errors[-1]:.0%}")
for r in published.ROWS:
    if r.reason or r.source == published.FSDP:
        print(f"{r.name}: {r.error():+.0%}")

# %% [markdown]
# Of the 42<!--above--> unseen rows half are within 9 %<!--above-->, and they range from 8 to 16,384 GPUs. Where is
# it wrong? Small models come out too fast: their many small operators are slower than one efficiency says; the widest
# come out too slow. DeepSpeed's ZeRO-3 of 2021 gained nothing from 768 to 1,536 GPUs: it was slower than with one of a
# machine's eight cards. PyTorch's FSDP on 128 GPUs is within 22 %<!--above-->. A prediction says what links permit, not
# what a library makes of them.
#
# Llama 3's row of 128k tokens: its paper prints operations a second. If these count attention whole, our step is 29
# %<!--above--> too fast; if by halves, as a causal one computes, it fits. Memory is half of what nvidia-smi showed for
# BLOOM, which counts float32 gradients, buffers, the allocator's rest. More than a GPU has: Llama 3's 292
# GB<!--above-->, without its FSDP and what it frees early; ZeRO-3's 97 GB<!--above--> on 640 GPUs, we do not know why.
#
# ## Somebody is always broken
#
# Llama 3's 16,384 GPUs met 419 unexpected interruptions in 54 days: one every 3.1 hours (lesson 18). With saves at
# Young's interval, each costs half an interval and a restart. **Your turn**: what share of the work is kept?


# %% tags=["exercise"]
def kept(machines, each, save, restart):
    """The share of work kept at Young's interval, if each machine fails once in `each` hours: 1 / (1 + lost)."""
    ### BEGIN SOLUTION
    failures = each / machines
    interval = math.sqrt(2 * save * failures)
    return 1 / (1 + save / interval + (interval / 2 + restart) / failures)
    ### END SOLUTION


check("work that is kept", exercises.kept, kept)

# %% [markdown] tags=["hint"]
# Lost for each hour of work: saves, save / interval, and at every failure half an interval and a restart. How often
# does *any* of the machines fail?


# %% tags=["wrong"]
# FAIL: A longer restart loses more
# MISTAKE: The time of a restart is forgotten.
def kept(machines, each, save, restart):
    return 1 / (1 + math.sqrt(2 * save * machines / each))


# %% tags=["wrong"]
# FAIL: Four times as many machines fail four times as often
# MISTAKE: One machine's time between failures is taken for that of all.
def kept(machines, each, save, restart):
    return 1 / (1 + math.sqrt(2 * save / each) + restart / each)


# %% tags=["wrong"]
# FAIL: A share of work is at most 1, not 1.11. Did you add what is lost, instead of dividing?
# MISTAKE: The inverse of the share.
def kept(machines, each, save, restart):
    failures = each / machines
    return 1 + math.sqrt(2 * save / failures) + restart / failures


# %% tags=["wrong"]
# FAIL: got 0.890557
# MISTAKE: The loss is taken off, where the work is divided by 1 + loss.
def kept(machines, each, save, restart):
    failures = each / machines
    return 1 - math.sqrt(2 * save / failures) - restart / failures


# %% tags=["wrong"]
# FAIL: got 0.923152
# MISTAKE: The 2 in Young's formula is forgotten.
def kept(machines, each, save, restart):
    failures = each / machines
    return 1 / (1 + math.sqrt(save / failures) + restart / failures)


# %% [markdown]
# That assumes a replacement at once. A broken machine is away for hours. *Wait* for it? Keep **hot spares**? Or be
# *elastic* and go on with fewer, as [lesson 18](18_faults_and_checkpoints.ipynb) did live? Simulated lives of 2,048
# machines, of which one breaks every 3.1 hours and is away for 12:

# %%
between = 54 * 24 / 419
save, restart = 1 / 60, 0.25  # hours; assumed
job = failures.LongJob(2048, between * 2048, 12.0, save, restart, failures.best_interval(save, between))
SPARES = (0, 1, 2, 4, 6, 8, 12, 16)
with_spares = {"hot spares": [failures.goodput(job, "hot spare", 3000.0, n) for n in SPARES]}
without = {p: failures.goodput(job, p, 3000.0) for p in ("elastic", "wait")}
show(
    plots.goodputs(SPARES, with_spares, without),
    "simulated",
    "3,000 hours; a save takes a minute, a restart a quarter of an hour. Eight to ten spares beside the 2,048 machines "
    "are enough.",
    "A rising curve that levels off near eight spares; the elastic level just below it, waiting far below",
)
print(
    f"kept with spares {with_spares['hot spares'][-1]:.0%}, elastic {without['elastic']:.0%}, "
    f"waiting {without['wait']:.0%}"
)
at_once = failures.goodput(dataclasses.replace(job, restart=0.0), "hot spare", 3000.0, 16)
print(f"with 16 spares and restarts that take no time: {at_once:.1%}")
print(
    f"save every {60 * job.interval:.0f} min (Young) or {60 * failures.daly_interval(save, between):.0f} min (Daly)"
)

# %% [markdown]
# With spares 83 %<!--above--> is kept. Llama 3's team reports more than 90 %. Restarts that take no time would give
# 90.0 %<!--above-->: so their saves must have cost less than our minute, too. Elastic restarts twice for each failure:
# to leave and to return.
#
# **Puzzle.** Spares do not compute. Of `machines` in all, how many shall stand by, and how often shall the others save?
# Judged on three clusters by simulated lives; the score is what all machines together lose.


# %% tags=["exercise"]
def spares_and_saves(machines, each, repair, save, restart):
    """(spares, hours between two saves); `each` machine fails once in so many hours and is away for `repair`."""
    ### BEGIN SOLUTION
    broken = machines * repair / each  # at any time, in the mean; Poisson: its spread is the square root
    spares = math.ceil(broken + 2 * math.sqrt(broken))
    return spares, math.sqrt(2 * save * each / (machines - spares))
    ### END SOLUTION


check("spares and saves", exercises.spares_and_saves, spares_and_saves)

# %% [markdown] tags=["hint"]
# How many machines are away at any time, in the mean? A few more may be.


# %% tags=["wrong"]
# FAIL: Too much goes to waiting for repairs
# MISTAKE: No spares, so every repair is waited for.
def spares_and_saves(machines, each, repair, save, restart):
    return 0, math.sqrt(2 * save * each / machines)


# %% tags=["wrong"]
# FAIL: Too much goes to spares that stand idle
# MISTAKE: A quarter of the machines stand idle as spares.
def spares_and_saves(machines, each, repair, save, restart):
    return machines // 4, math.sqrt(2 * save * each / machines)


# %% tags=["wrong"]
# FAIL: Too much goes to saves, restarts and repeated work
# MISTAKE: Saves too often: every second thing done is a save.
def spares_and_saves(machines, each, repair, save, restart):
    return machines // 7, 2 * save


# %% tags=["wrong"]
# FAIL: the first of the two is a whole number
# MISTAKE: The two results are exchanged.
def spares_and_saves(machines, each, repair, save, restart):
    return math.sqrt(2 * save * each / machines), machines // 7


# %% tags=["wrong"]
# FAIL: hours is no help: one of
# MISTAKE: The interval of one machine alone, so saves are too rare.
def spares_and_saves(machines, each, repair, save, restart):
    return machines // 7, math.sqrt(2 * save * each)  # the interval of one machine alone


# %% [markdown]
# ### Stragglers: the slowest of n
#
# A synchronous step ends when the *last* rank is ready. If each rank's time varies by only a few percent, the slowest
# of thousands is late in every step:

# %%
NUMBERS = (1, 8, 64, 512, 4096, 16384)
late = {f"each varies by {s:.0%}": [scale.slowest_of(n, 1.0, s) for n in NUMBERS] for s in (0.01, 0.03, 0.1)}
show(
    plots.stragglers(NUMBERS, late),
    "computed",
    "the expected time of the slowest of n ranks whose times are normal, above the mean.",
    "Three slowly rising curves; at 16384 ranks about four standard deviations",
)

# %% [markdown]
# ## With GPUs
#
# The same functions; NCCL carries what lies on GPUs, one rank a GPU (from 2.30 on ranks may share one:
# `NCCL_MULTI_RANK_GPU_ENABLE=1`). Kernels are *started*, not waited for: a stopwatch must synchronise first, and the
# host of a waiting rank may be anywhere in its program. Messages run on *streams* of their own. Here is every path
# that differs, each with a test (`make test-gpu` runs the last kind).

# %%
TESTED = {
    "on PyTorch's meta device (no numbers)": {
        "every strategy keeps weights, batch and gradients on its device": "test_a_step_never_mixes_devices",
        "the batch moves to the device": "test_mutant_that_forgets_to_move_the_batch_is_noticed",
    },
    "with a pretended number of GPUs": {
        "each rank has one of its own, or all take the CPU": "test_each_rank_has_a_gpu_of_its_own_or_none_has",
        "they are shared where NCCL can": "test_ranks_share_gpus_where_nccl_can_and_is_told_so",
        "too few are refused in a sentence": "test_gpus_that_are_not_there_are_refused_in_one_sentence",
        "Slurm says how many ranks share a machine": "test_slurm_says_how_many_ranks_share_a_machine",
    },
    "on GPUs": {
        "losses equal those of the CPU in float64": "test_a_gpu_trains_as_the_cpu_does",
        "the table of equality, over NCCL": "test_a_plan_on_gpus_equals_the_serial_run",
        "the command, HSDP among its plans": "test_the_training_command_on_gpus_trains_as_one_process",
        "`--autocast` and `--compile`": "test_what_is_faster_on_a_gpu_trains_almost_alike",
        "a rank that dies": "test_a_rank_that_is_killed_among_gpus_is_named",
        "a rank that hangs": "test_a_hang_names_the_call_that_a_gpu_is_in_although_its_host_is_elsewhere",
        "streams and kernels in a trace": "test_pytorchs_profiler_sees_the_kernels_of_a_step",
    },
}
table(
    [(path, how) for how, tests in TESTED.items() for path in tests],
    ["path", "tested"],
)

# %%
pool.close()

# %% [markdown]
# ## Questions
#
# 1. dp=4, tp=8 on four machines of 8 GPUs. What crosses, how often in a step?
#    <details><summary>answer</summary>Only gradients, once: each tensor group fills a machine.</details>
# 2. A ring over 512 machines of 8, ranks numbered machine by machine: how many of its 4,096 edges leave a machine?
#    <details><summary>answer</summary>512: one out of each machine. The ring is as slow as they are;
#    seven more rings use the other cards.</details>
# 3. Switches that add halve the bytes of a card. Why not the latencies of a ring?
#    <details><summary>answer</summary>They do better: up and down a tree of switches is a handful of latencies
#    instead of 2(n - 1).</details>
# 4. Rank 0 says that rank 5 did not come. What do you look at first?
#    <details><summary>answer</summary>Rank 5's own output: it may have failed before it could meet. Then whether it
#    was given the same MASTER_ADDR.</details>
# 5. Twice the machines: what happens to the best interval and to the work that is kept?
#    <details><summary>answer</summary>The interval shrinks by the square root of 2; what saves and repetition lose
#    grows by it, and what restarts lose doubles.</details>
#
# ## Read on
#
# - Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters*: the table predicted above.
# - Korthikanti et al. 2022, *Reducing activation recomputation*: seconds with and without a second forward.
# - Grattafiori et al. 2024, *The Llama 3 herd of models*, section 3.3: network, plans, faults of 16,384 GPUs.
# - Graham et al. 2016, *Scalable hierarchical aggregation protocol*: sums in switches.
# - Daly 2006, *A higher order estimate of the optimum checkpoint interval*: Young's, where failures are frequent.
# - NVIDIA, *NCCL user guide* (2025), environment variables: which card, which algorithm.
#
# **Next**: [20 The trade-off map](20_trade_off_map.ipynb).
