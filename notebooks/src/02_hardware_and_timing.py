# %% [markdown]
# # 02 Hardware and timing
#
# **The one-minute version.** A number is fast to reach when it is near: cache, memory, another process, another
# machine, each step several times slower. Parallel training is a game of moving little, and of moving it while
# something else computes. To know whether you win you need a stopwatch that does not lie: warm up, start together,
# wait until the work is *done*, repeat, report median and spread. From times follow speed-up, efficiency and the
# serial fraction, which says how far you can go.
#
# Two clocks in this lesson: *measured* numbers come from the machine that built the page, yours will differ. *Paced*
# numbers come from real ranks and real messages whose computing is sleep, so that they look alike everywhere.

# %% tags=["setup"]
import statistics
import time

import torch

from gpt2lab import Ranks, launch, transport
from gpt2lab.corpus import Batches, shakespeare
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import hardware as exercises
from gpt2lab.machine.speed import copy_rate, machine
from gpt2lab.machine.timing import alone, together, trials
from gpt2lab.model import GPT2, PRESETS
from gpt2lab.planner import metrics
from gpt2lab.plots import hardware as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, paced, trace
from gpt2lab.ranks.mesh import Mesh

torch.set_num_threads(1)  # threads are switched on where they are the subject

# %% [markdown]
# ## How far away is a number?
#
# The machine at hand, then one experiment: copy a block of memory again and again. A small block stays in the first
# cache, a larger one in the second or third, a large one has to come from memory every time.

# %% tags=["measured"]
table(list(machine().items()), ["this machine", ""])

# %% tags=["measured"]
rates = {2**bits: copy_rate(2**bits, seconds=0.06) for bits in range(13, 28)}
tiny = torch.zeros(1)
empty_call = alone(trials(lambda: [tiny.copy_(tiny) for _ in range(1000)])).median / 1000
published = {
    "H100 NVL, pair of boards, 7.8 TB/s": 7.8e12,
    "NVLink 4, 18 links, 900 GB/s": 900e9,
    "PCIe 7.0 x16, 242 GB/s": 242e9,
    "Ethernet, 0.2 GB/s": 0.2e9,
}
show(
    plots.memory(rates, published, empty_call),
    "measured",
    "bytes a second of one core copying; each fall is a cache left behind. Orange levels are published rates.",
    "Copy rate against bytes touched on log axes: rising, then falling in steps; level lines of GPU hardware",
)

# %% [markdown]
# On the far left the curve *rises*: starting a copy costs about a microsecond, whatever its size, and that is most of
# what is measured there. (The dotted line is the time of an empty call alone; a copy of a few bytes takes longer.)
# Every link behaves so: a latency, then a rate.
#
# The GPU numbers are those of a lecture (Stanford CS336, 2024). Not all compare. NVLink's 900 GB/s count both ways, the
# other rates one. PCIe 7.0 is younger than the H100 beside it, which has PCIe 5. The 200 GB/s for InfiniBand, further
# down, are NVLink / 4.5 (one NDR port carries 50 GB/s each way). And 7.8 TB/s belong to the *pair* of boards that is
# sold as H100 NVL; one board has 3.9. So ask of every rate: of what, one way or both, measured or printed on the box?
#
# ### From process to process
#
# Two ranks play ping-pong, half of a round trip is one way. Once their messages pass through sockets of the loopback
# device (the backend *gloo*), once they lie in memory that both processes share (our backend *shm*; lesson 03 opens
# it).

# %%
two, four = Ranks(2), Ranks(4)


def ping_pong(rank, world_size, size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(size, dtype=torch.uint8)

    def round_trip():
        if rank == 0:
            comm.send(x, axis, 1)
            comm.recv(x, axis, 1)
        else:
            back = comm.recv(x, axis, 0)
            comm.send(back, axis, 0)

    return trials(round_trip, count=9, ready=lambda: comm.barrier(axis))


# %% tags=["measured"]
sizes = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
ways = {"shared memory": "shm", "loopback": "gloo"} if transport.AVAILABLE else {"loopback": "gloo"}
one_way = {}
for way, backend in ways.items():
    with Ranks(2, backend=backend) as pair:
        for name, size in sizes.items():
            one_way[way, name] = alone(pair.run(ping_pong, size)[0]).median / 2
table(
    [(*key, f"{1e6 * t:,.0f} us", f"{sizes[key[1]] / t / 1e9:.3f} GB/s") for key, t in one_way.items()],
    ["through", "message", "one way", "rate"],
)
levels = sorted(rates)
ends = ("1 KiB", "16 MiB")
show(
    plots.ladder(
        {
            "cache (best copy)": max(rates.values()),
            "memory (largest copy)": rates[levels[-1]],
            **{f"{way}, {end}": sizes[end] / one_way[way, end] for way in ways for end in ends},
        },
        {
            "H100 NVL memory, one board": 3.9e12,
            "NVLink 4, both directions": 900e9,
            "PCIe 7.0 x16": 242e9,
            "InfiniBand (NVLink / 4.5)": 200e9,
            "Ethernet": 0.2e9,
        },
    ),
    "measured",
    "the ladder here beside the published one: other numbers, the same order for large blocks. A small message pays "
    "for its start, whatever the way.",
    "Horizontal bars on a log axis: cache, memory, shared memory, loopback here; memory, NVLink, PCIe, Ethernet",
)

# %% [markdown]
# Where links are slow, let the *switch* add: SHARP sums inside the network. Each rank then sends its S bytes up once,
# where a ring all-reduce sends 2 (n - 1) / n S: for many ranks, twice as much.

# %%
for n in (2, 4, 8, 1024):
    print(f"{n:5} ranks: a ring sends {2 * (n - 1) / n:.3f} S a rank, the adding switch 1 S")

# %% [markdown]
# ### What cores share
#
# Do two cores multiply matrices twice as fast as one? Do they also copy twice as fast? **Predict**, then look. Every
# rank here is a process with one thread; all measure at the same moment.


# %%
def rates_of_a_rank(rank, world_size):
    torch.set_num_threads(1)
    axis, found, a = Mesh(dp=world_size)["dp"], [], torch.randn(384, 384)
    small, large = torch.ones(2, 1 << 16, dtype=torch.uint8), torch.ones(2, 1 << 26, dtype=torch.uint8)
    for step, work in (
        (lambda: a @ a, 2 * 384**3),
        (lambda: small[0].copy_(small[1]), small.numel()),
        (lambda: large[0].copy_(large[1]), large.numel()),
    ):
        step()
        moments = []
        for _ in range(4):
            # one and the same window for all; each goes on until it is over, so that nobody is alone in it
            begin = max(comm.gather_objects(time.perf_counter(), axis)) + 0.01
            count, now = 0.0, time.perf_counter()
            while now < begin + 0.15:
                start = now
                step()
                now = time.perf_counter()
                inside = min(now, begin + 0.15) - max(start, begin)
                count += max(inside, 0.0) / (now - start)
            moments.append(count * work / 0.15)
        found.append(moments)
    return found


# %% tags=["measured"]
things = ("matrix product", "copy, 128 KiB (cache)", "copy, 128 MiB (memory)")
totals = {thing: {} for thing in things}
for n in (1, 2, 4):
    per_rank = launch(rates_of_a_rank, ranks=n)
    for i, thing in enumerate(things):
        totals[thing][n] = max(map(sum, zip(*(found[i] for found in per_rank), strict=True)))
show(
    plots.scaling(totals, int(machine()["cores"])),
    "measured",
    "what ranks do together over what one does, in the best of four common windows of 0.15 s. A line that keeps to the "
    "ideal shares nothing that matters; what ranks share does not multiply.",
    "Total rate over the rate of one rank for 1, 2 and 4 ranks, three lines and a dashed ideal",
)
flops = totals["matrix product"][1]
print(
    f"one core: {flops / 1e9:.0f} GFLOP/s, {rates[levels[-1]] / 1e9:.1f} GB/s from memory:",
    f"{4 * flops / rates[levels[-1]]:.0f} operations for every float32 it reads or writes",
)

# %% [markdown]
# What is shared depends on what a "core" is. Real cores have arithmetic and first caches of their own and share the way
# to memory: products multiply, copies only until that way is full. The two cores of a small virtual machine are often
# two *threads* of one core: they share its arithmetic and its caches, and multiply only where one alone would wait, as
# for memory. So which of your three lines falls short of the ideal says what your cores share.
#
# The last ratio printed is the *machine balance*. A product of n x n matrices does 2n/3 operations for each number it
# touches and can keep the core busy; adding two vectors does a third of one and cannot. With more ranks than cores
# nothing grows any more, and a stopwatch measures how the operating system deals out turns. That is why later lessons
# count bytes, pace, or simulate.
#
# ## How to time, and how not to
#
# Five mistakes, four of them live. They are common: the lecture's own benchmark puts its barrier under `if cuda`, so
# that it is missing on a laptop, and calls `torch.cuda.synchronize()` always, which crashes there.
#
# **1. No warm-up.** The first call opens connections, fills caches, allocates. **2. No barrier.** A rank that comes
# early measures its wait. **3. Not done.** An asynchronous call returns at once; the clock stops before the work
# does. On a GPU *every* call is asynchronous, hence `synchronize`. **4. Mean.** One hiccup moves it. **5. The wrong
# end**: one rank's clock instead of all ranks'.


# %%
def by_hand(rank, world_size, warm, barrier, wait, count=8, late=0.06, link=None):
    axis, x, found = Mesh(dp=world_size)["dp"], torch.ones(1000), []
    with paced.use(link):
        for trial in range(-2 if warm else 0, count):
            if rank == 1:
                time.sleep(late)  # this rank always has something else to finish first
            if barrier:
                comm.barrier(axis)
            start = time.perf_counter()
            handle = comm.all_reduce(x, axis, async_op=True)
            if wait:
                handle.wait()
            end = time.perf_counter()
            handle.wait()
            if trial >= 0:
                found.append(end - start)
    return found


slow = paced.Link(latency=0.03, bandwidth=1e9)  # an all-reduce over two ranks takes two steps: 60 ms
early = two.run(by_hand, warm=True, barrier=False, wait=True)[0]
right = two.run(by_hand, warm=True, barrier=True, wait=True)[0]
not_done = two.run(by_hand, warm=True, barrier=True, wait=False, link=slow, late=0)[0]
done = two.run(by_hand, warm=True, barrier=True, wait=True, link=slow, late=0)[0]
median = statistics.median
print(
    "rank 1 comes 60 ms late, and rank 0 without a barrier counts that:", median(early) > 0.03 > median(right)
)
print("60 ms of link, of which a clock that does not wait sees half at most:", median(not_done) < 0.03)
print("one that waits sees all:", median(done) >= 0.06)

# %% tags=["measured"]
cold = launch(by_hand, warm=False, barrier=True, wait=True, late=0, ranks=2)[0]
warm = launch(by_hand, warm=True, barrier=True, wait=True, late=0, ranks=2)[0]
show(
    plots.mistakes(
        {
            "1 no warm-up": {"cold": cold, "warm": warm},
            "2 no barrier": {"without": early, "with": right},
            "3 not done": {"returned": not_done, "done": done},
        }
    ),
    "measured",
    "an all-reduce timed wrongly and rightly; 2 and 3 are paced (a late rank, a slow link). Lines are medians.",
    "Three panels of eight trials each on a log scale: cold and warm, without and with barrier, returned and done",
)

# %% [markdown]
# **4**, the mean. Ten trials of a job of 5 ms, one of them disturbed:

# %%
disturbed = [5.1, 5.0, 5.2, 5.0, 205.1, 5.1, 5.3, 5.0, 5.1, 5.2]
low, middle, high = statistics.quantiles(disturbed, n=4)
print(
    f"mean {statistics.mean(disturbed):.1f} ms; median {middle:.2f} ms, quartiles {low:.2f} and {high:.2f} ms"
)

# %% [markdown]
# The *fastest* trial is the machine undisturbed, the median is what you usually get; say which. The mean is right for
# one question only: how long will all of it take?
#
# **5**, the wrong end. What does a barrier promise? That *nobody leaves before everybody has arrived*. All processes
# of a machine share one clock, so we can look:


# %%
def through_a_barrier(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    time.sleep(0.01 * rank)
    arrived = time.perf_counter()
    comm.barrier(axis)
    return arrived, time.perf_counter()


arrivals, leavings = zip(*four.run(through_a_barrier), strict=True)
print("last arrival before first leaving:", max(arrivals) <= min(leavings))
print("all leave at the same moment:", len(set(leavings)) == 1)

# %% [markdown]
# So even after a barrier ranks start a little apart. A collective lasts from the **last start to the last end**.
# The package's stopwatch, which all lessons use:

# %%
show_source(trials, together)


# %%
def reduce_a_megabyte(rank, world_size):
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(1 << 18)
    return trials(lambda: comm.all_reduce(x, axis), ready=lambda: comm.barrier(axis))


# %% tags=["measured"]
for n, ranks in ((2, two), (4, four)):
    found = ranks.run(reduce_a_megabyte)
    print(
        f"all-reduce of 1 MiB, {n} ranks: {together(found)}; rank 0 alone says {1e3 * alone(found[0]).median:.2f} ms"
    )

# %% [markdown]
# ## Speed-up, efficiency, serial fraction
#
# With p workers, S = T1 / Tp is the *speed-up* and E = S / p the *efficiency*. If a fraction f of the work cannot be
# split, **Amdahl** (1967) says S = 1 / (f + (1 - f) / p), so never more than 1 / f. Turn it round: which f would
# explain what I measured? That is **Karp and Flatt**'s metric (1990),
#
# $$ f = \frac{1/S - 1/p}{1 - 1/p} $$
#
# A group at the Barcelona Supercomputing Center ran GPT-2 124M (llm.c) on a node of 112 cores: 40 iterations, the
# mean of several runs.

# %%
minutes = {"sequential": 24.1, "OpenMP": 58 / 60, "OpenMP over nOS-V": 66 / 60}
print("40 x 35 s =", f"{40 * 35 / 60:.1f} min of the 24.1: the rest is outside the iterations")
print("40 x 1.430 s =", f"{40 * 1.430:.1f} s of 58;  40 x 1.616 s = {40 * 1.616:.1f} s of 66")
rows = []
for name, t in minutes.items():
    S = metrics.speedup(minutes["sequential"], t)
    p = 1 if name == "sequential" else 112
    f = f"{metrics.karp_flatt(S, p):.3f}" if p > 1 else "-"
    rows.append((name, f"{t:.2f}", f"{S:.1f}", f"{metrics.efficiency(S, p):.2f}", f))
table(rows, ["version", "minutes", "speed-up", "efficiency", "Karp-Flatt"])

# %% [markdown]
# The page says 24.7 and 21.8: other roundings of the same runs. The finding stands: 3 % that does not split costs
# 78 % of the node, and no number of cores would get beyond 1 / 0.032 = 31.
#
# Amdahl keeps the *problem* fixed. **Gustafson** (1988) lets it grow with the workers, as we do when more ranks mean
# a larger batch: S = g + (1 - g) p. Amdahl's f is a share of the *serial* time, Gustafson's g a share
# of the *parallel* time. The same run has both. Of the 35 s of a serial iteration 3.2 % do not split; on 112 cores
# these are most of what is left:

# %%
f, p = 0.032, 112
g = f / (f + (1 - f) / p)
print(f"f = {f} of the serial time is g = {g:.2f} of the time on {p} workers")
print(
    f"Amdahl(f): {metrics.amdahl(f, p):.1f}; Gustafson(g): {metrics.gustafson(g, p):.1f}: one run, one speed-up"
)
table(
    [(p, f"{metrics.amdahl(f, p):.1f}", f"{metrics.gustafson(g, p):.1f}") for p in (112, 224, 448, 1024)],
    ["workers", "the same problem (Amdahl)", "a problem that grows (Gustafson)"],
)

# %% [markdown]
# From 112 workers on the two part: a fixed problem has hardly anything left to gain, a larger one has.

# %% [markdown]
# ### The same protocol here
#
# GPT-2 nano on one and two threads: several runs of several iterations, the first of each left out, everything that
# is not the step switched off.


# %%
def step_times(rank, world_size, threads, count, touch=True, warm=True, rehearse=False):
    """Seconds and losses of `count` training steps; the last three options are the subject of the next section."""
    torch.set_num_threads(threads)
    if rehearse:  # a whole step of another model, which nobody looks at
        step_times(rank, world_size, threads, 1, touch=False, warm=False)
    batches, model = Batches(shakespeare(), rows=2, length=32), GPT2(PRESETS["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    if touch:  # gradients and both moments exist, and their pages are in memory, before the first step
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    if warm:  # the threads of the pool have started
        x = torch.randn(256, 256)
        for _ in range(20):
            x = torch.tanh(x @ x)
    times, losses = [], []
    for step in range(count):
        batch = batches.at(step)
        start = time.perf_counter()
        loss = model.loss(model(batch.tokens), batch.targets) / batch.total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return times, losses


# %% tags=["measured"]
ours = {
    threads: [t for _ in range(2) for t in launch(step_times, threads, 6, ranks=1)[0][0][1:]]
    for threads in (1, 2)
}
show(
    plots.box_plot({f"{threads} thread{'s'[: threads > 1]}": times for threads, times in ours.items()}),
    "measured",
    "training steps of GPT-2 nano, two runs of five steps each.",
    "Two box plots of step times in milliseconds, one thread and two threads, with all steps as dots",
)
gained = metrics.speedup(*(statistics.median(ours[threads]) for threads in (1, 2)))
print(f"speed-up {gained:.2f} on 2 threads, efficiency {metrics.efficiency(gained, 2):.2f}")
show(
    plots.speedups(
        {"ours": (2, gained), "OpenMP": (112, 24.7), "OpenMP over nOS-V": (112, 21.8)},
        (0.5, 0.1, 0.032, 0.01),
    ),
    "measured",
    "Amdahl's curves with our point (measured) and two from the Barcelona page; right, the fractions behind them.",
    "Speed-up against workers on log axes with four Amdahl curves and three points; bars of serial fractions",
)

# %% [markdown]
# ## The first iteration
#
# The same page leaves a question open: the first iteration was *faster* than the rest in the sequential version, and
# *slower* in the threaded ones. Two suspects: gradients and moments are allocated inside iteration 1, and a pool of
# threads has to start. Each is taken away in turn. The last condition is a control: a whole step of another model
# comes first, so that all that happens once has happened. Three runs of each, every one in a process of its own:

# %% tags=["measured"]
conditions = {
    "as it comes": (False, False, False),
    "memory touched": (True, False, False),
    "threads warm": (False, True, False),
    "a step before": (False, False, True),
}
first = {
    name: [launch(step_times, 2, 4, *how, ranks=1)[0][0] for _ in range(3)]
    for name, how in conditions.items()
}
show(
    plots.iterations({name: of_one[0] for name, of_one in first.items()}),
    "measured",
    "time of every iteration on two threads, the first one large; one run of each condition.",
    "Four lines of four iterations on a log scale; the first iteration is a large dot",
)
excess = {name: sorted(1e3 * (t[0] - statistics.median(t[1:])) for t in runs) for name, runs in first.items()}
table(
    [(name, *(f"{ms:+.0f} ms" for ms in sorted_runs)) for name, sorted_runs in excess.items()],
    ["first iteration minus the median of the others", "lowest of three runs", "middle", "highest"],
)

# %% [markdown]
# Now judge. A suspect is guilty if the excess goes away with it, by more than three runs of one condition differ among
# themselves. If it goes only with the control, a first iteration pays for something that neither names: autograd starts
# a thread of its own, kernels choose their code, activations get their memory. If even the control does not take it
# away, this experiment cannot tell.
#
# Preparing must not change what is computed:

# %%
losses = [launch(step_times, 1, 2, *how, ranks=1)[0][1] for how in conditions.values()]
print("equal losses in all four conditions:", all(run == losses[0] for run in losses))

# %% [markdown]
# A first iteration that is *faster* than the rest needs another suspect: caches and memory bandwidth that are still
# free, a processor that has not heated up, or something the first iteration leaves out.
#
# ## Reading a trace
#
# A time says how long. A trace says who worked when. Each rank notes *spans* (name, kind, start, end); their sum over
# the makespan is the **average parallelism**. Four ranks, paced, with uneven work and a barrier after each of three
# rounds:


# %%
def uneven(rank, world_size, rounds=3):
    axis = Mesh(dp=world_size)["dp"]
    comm.barrier(axis)
    trace.clear()
    for i in range(rounds):
        with trace.span(f"work {i}", "forward"):
            time.sleep(0.02 * (rank + 1))
        comm.barrier(axis)
    return trace.spans(with_comm=False)


spans = trace.merge(four.run(uneven))
seen = metrics.average_parallelism(spans)
print(
    "ideal: 10 units of work in 4 units of time, 2.5 of 4 ranks; seen between 1.5 and 2.5:", 1.5 < seen <= 2.5
)

# %% tags=["measured"]
show(
    plots.parallelism_profile(spans),
    "paced",
    "who works (above) and how many at once (below): rank 3 has four times the work of rank 0.",
    "Bars of four ranks in three rounds above a step curve that falls from four to one in every round",
)

# %% [markdown]
# `trace.save_chrome(spans, "trace.json")` writes the same for https://ui.perfetto.dev. More workers than work that
# can be done at once lower the efficiency, not the time.
#
# ## Overlap
#
# Sending costs nothing if something useful happens meanwhile. One piece: T = a + b. Cut in two independent lanes:
# never less than **max(a, b)**. With k pieces, each sent while the next is computed:
#
# $$ T = c + (k - 1)\,\max(c, s) + s $$


# %%
def lanes(pieces, compute, send):
    return plots.lanes(pieces, compute, send)


explore(
    lanes,
    "computed",
    "{pieces} pieces, {compute} ms to compute and {send} ms to send each; numbers in bars name the piece.",
    "Two charts of two lanes, compute and send: one after the other, and overlapped, which ends earlier",
    posters=[{"pieces": 4, "compute": 20, "send": 15}],
    pieces=(1, 12, 4),
    compute=(1, 40, 20),
    send=(1, 40, 15),
)

# %% [markdown]
# ### On live ranks
#
# Compute is a sleep of 20 ms, the link is held back so that an all-reduce takes 15 ms. With `async_op=True` the call
# returns a handle; `wait()` gives the result. This is how data parallelism hides its gradients (lesson 04).


# %%
def pieces_on_ranks(rank, world_size, asynchronous, pieces=4):
    axis, flying, results = Mesh(dp=world_size)["dp"], [], []
    comm.barrier(axis)
    trace.clear()
    with paced.use(paced.Link(latency=0.0075, bandwidth=1e9)):  # two steps of a ring: 15 ms
        for i in range(pieces):
            with trace.span(f"piece {i}", "backward"):
                time.sleep(0.020)
            flying.append(comm.all_reduce(torch.full((10,), float(rank + i)), axis, async_op=True))
            if not asynchronous:
                flying[-1].wait()
        with trace.span("wait", "wait"):
            results = [handle.wait() for handle in flying]
    return results, trace.spans()


runs = {}
for asynchronous in (False, True):
    results, spans_of = zip(*two.run(pieces_on_ranks, asynchronous), strict=True)
    runs[asynchronous] = results[0], spans_of[0], trace.merge(spans_of)
for asynchronous, (_, spans, _) in runs.items():
    work, sent = ([s for s in spans if s.kind == kind] for kind in ("backward", "comm"))
    shared = metrics.intersection(work, sent)
    print(f"async_op={asynchronous!s:5}: computing while sending:", shared > 0)
print("same results:", all(torch.equal(a, b) for a, b in zip(runs[False][0], runs[True][0], strict=True)))
print("by formula:", metrics.sequential(4, 20, 15), "ms and", metrics.overlapped(4, 20, 15), "ms")

# %% tags=["measured"]
for asynchronous, (_, _, merged) in runs.items():
    show(
        timeline(merged, title="overlapped" if asynchronous else "one after the other", clock="paced"),
        "paced",
        "messages (strip) run while the next piece is computed."
        if asynchronous
        else "each message is waited for.",
        "Timeline of two ranks: four pieces of work, and messages as a strip below",
    )

# %% [markdown]
# ### On a GPU: streams
#
# A CUDA stream is a queue: what is in one stream runs in order, different streams may overlap. The lecture's example
# multiplies two matrices while another one is copied to the GPU. Its record: 276.9 ms one after the other, 164.3 ms
# overlapped. What can we conclude without a GPU? Let the longer part be a and the shorter b:

# %%
total, both = 276.9, 164.3
print(f"a + b = {total} and T >= a, so b >= {total - both:.1f} ms; T >= a >= {total / 2:.1f} ms")
print(
    f"at least {100 * (total - both) / (total / 2):.0f} % of the shorter part was hidden: {total - both:.1f} ms saved"
)

# %% [markdown]
# The program as published is not safe: a side stream does not wait for what the main stream still has to write, a
# copy from ordinary memory is not asynchronous, and memory of one stream that is used on another may be handed out
# again too early. Three repairs, marked below. The cell runs where there is a GPU:


# %% tags=["measured"]
def streams(n=8192):
    X, main = torch.randn(n, n, device="cuda"), torch.cuda.current_stream()
    Y = torch.randn(n, n).pin_memory()  # 1: only from pinned memory can a copy run by itself
    lanes = torch.cuda.Stream(), torch.cuda.Stream()

    def sequential():
        return X @ X, Y.to("cuda", non_blocking=True)

    def overlapped():
        results = []
        for stream, work in zip(lanes, (lambda: X @ X, lambda: Y.to("cuda", non_blocking=True)), strict=True):
            stream.wait_stream(main)  # 2: X has to be there first
            with torch.cuda.stream(stream):
                results.append(work())
        for stream, result in zip(lanes, results, strict=True):
            main.wait_stream(stream)
            result.record_stream(main)  # 3: this memory is in use on the main stream too
        return tuple(results)

    same = all(torch.equal(a, b) for a, b in zip(sequential(), overlapped(), strict=True))
    return same, alone(trials(sequential)), alone(trials(overlapped))  # `trials` synchronises


if torch.cuda.is_available():
    print("same results: {}\none after the other: {}\noverlapped: {}".format(*streams()))
else:
    print("There is no GPU here: see the paced ranks above for the same idea.")

# %%
two.close()
four.close()

# %% [markdown]
# ## Exercises
#
# **1.** Write the stopwatch. `synchronise()` returns when all work is done, `barrier()` when all ranks are there,
# `clock()` is the time in seconds. Return `count` times; the very first call must not be one of them.


# %% tags=["exercise"]
def benchmark(call, count, barrier, synchronise, clock):
    """A list of `count` durations of `call()`."""
    ### BEGIN SOLUTION
    call()
    synchronise()
    times = []
    for _ in range(count):
        barrier()
        start = clock()
        call()
        synchronise()
        times.append(clock() - start)
    return times
    ### END SOLUTION


check("a stopwatch", exercises.benchmark, benchmark)


# %% tags=["wrong"]
# FAIL: warm up
def benchmark(call, count, barrier, synchronise, clock):
    times = []
    for _ in range(count):
        barrier()
        start = clock()
        call()
        synchronise()
        times.append(clock() - start)
    return times


# %% tags=["wrong"]
# FAIL: the clock stopped before the work was done
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    times = []
    for _ in range(count):
        barrier()
        start = clock()
        call()
        times.append(clock() - start)
        synchronise()
    return times


# %% tags=["wrong"]
# FAIL: waiting in the barrier are among your times
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    times = []
    for _ in range(count):
        start = clock()
        barrier()
        call()
        synchronise()
        times.append(clock() - start)
    return times


# %% tags=["wrong"]
# FAIL: a barrier before *every* trial
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    barrier()
    times = []
    for _ in range(count):
        start = clock()
        call()
        synchronise()
        times.append(clock() - start)
    return times


# %% tags=["wrong"]
# FAIL: still going on in the first trial
def benchmark(call, count, barrier, synchronise, clock):
    call()
    times = []
    for _ in range(count):
        barrier()
        start = clock()
        call()
        synchronise()
        times.append(clock() - start)
    return times


# %% tags=["wrong"]
# FAIL: keep their order
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    times = []
    for _ in range(count):
        barrier()
        start = clock()
        call()
        synchronise()
        times.append(clock() - start)
    return sorted(times)


# %% tags=["wrong"]
# FAIL: return the list of all durations
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    barrier()
    start = clock()
    for _ in range(count):
        call()
    synchronise()
    return (clock() - start) / count


# %% [markdown]
# **2.** Every rank reports (start, end) of the same collective, on one clock. How long did it take?


# %% tags=["exercise"]
def lasted(per_rank):
    """Seconds of one collective; `per_rank` lists (start, end)."""
    ### BEGIN SOLUTION
    return max(end for _, end in per_rank) - max(start for start, _ in per_rank)
    ### END SOLUTION


check("one clock for all ranks", exercises.together, lasted)


# %% tags=["wrong"]
# FAIL: that wait is not the collective's
def lasted(per_rank):
    return max(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: when the *last* rank is done
def lasted(per_rank):
    return min(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: expected 1.5, got 6.5
def lasted(per_rank):
    return max(end for _, end in per_rank) - min(start for start, _ in per_rank)


# %% tags=["wrong"]
# FAIL: expected 3, got 6
def lasted(per_rank):
    return sum(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: expected 1.5, got 1
def lasted(per_rank):
    return min(end for _, end in per_rank) - max(start for start, _ in per_rank)


# %% [markdown]
# **3.** Which serial fraction explains a speed-up S on p workers?


# %% tags=["exercise"]
def serial_fraction(S, p):
    """Karp and Flatt's metric."""
    ### BEGIN SOLUTION
    return (1 / S - 1 / p) / (1 - 1 / p)
    ### END SOLUTION


check("serial fraction", exercises.serial_fraction, serial_fraction)


# %% tags=["wrong"]
# FAIL: no speed-up: all is serial
def serial_fraction(S, p):
    return 1 - S / p


# %% tags=["wrong"]
# FAIL: a speed-up of 4 on 4 workers has no serial part
def serial_fraction(S, p):
    return 1 / S


# %% tags=["wrong"]
# FAIL: 24.7 on 112
def serial_fraction(S, p):
    return (p - S) / (p - 1)


# %% tags=["wrong"]
# FAIL: expected 1, got 0.75
def serial_fraction(S, p):
    return 1 / S - 1 / p


# %% tags=["wrong"]
# FAIL: expected 0, got 1
def serial_fraction(S, p):
    return (1 - 1 / S) / (1 - 1 / p)


# %% [markdown]
# **4.** k pieces, `c` to compute and `s` to send each; a piece travels while the next one is computed, one at a time.


# %% tags=["exercise"]
def overlapped_time(k, c, s):
    """When the last piece has arrived."""
    ### BEGIN SOLUTION
    return c + (k - 1) * max(c, s) + s
    ### END SOLUTION


check("overlap", exercises.overlap, overlapped_time)


# %% tags=["wrong"]
# FAIL: one piece: nothing to overlap with
def overlapped_time(k, c, s):
    return k * max(c, s)


# %% tags=["wrong"]
# FAIL: the last one still has to travel
def overlapped_time(k, c, s):
    return k * (c + s)


# %% tags=["wrong"]
# FAIL: now the link is never idle
def overlapped_time(k, c, s):
    return k * c + s


# %% tags=["wrong"]
# FAIL: expected 95, got 80
def overlapped_time(k, c, s):
    return c + k * s


# %% tags=["wrong"]
# FAIL: one piece: nothing to overlap with: expected 35, got 40
def overlapped_time(k, c, s):
    return (k + 1) * max(c, s)


# %% [markdown]
# **5.** Average parallelism of a trace: spans with `.rank`, `.start`, `.end`; no rank does two things at once.


# %% tags=["exercise"]
def average_parallelism(spans):
    """How many ranks work at the same time, on average."""
    ### BEGIN SOLUTION
    makespan = max(s.end for s in spans) - min(s.start for s in spans)
    return sum(s.end - s.start for s in spans) / makespan
    ### END SOLUTION


check("average parallelism", exercises.average_parallelism, average_parallelism)


# %% tags=["wrong"]
# FAIL: from the first start
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans) / max(s.end for s in spans)


# %% tags=["wrong"]
# FAIL: 16 s of work within 8 s
def average_parallelism(spans):
    busy = sum(s.end - s.start for s in spans)
    makespan = max(s.end for s in spans) - min(s.start for s in spans)
    return 2 * busy / makespan / len({s.rank for s in spans})


# %% tags=["wrong"]
# FAIL: expected 1, got 2
def average_parallelism(spans):
    return len({s.rank for s in spans})


# %% tags=["wrong"]
# FAIL: expected 1, got 2.66667
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans) / len(spans)


# %% tags=["wrong"]
# FAIL: expected 2, got 1
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans[:3]) / (max(s.end for s in spans) - min(s.start for s in spans))


# %% [markdown]
# ## Questions
#
# 1. Rank 0 reports that an all-reduce took 40 ms, rank 1 reports 2 ms. Which is right?
#    <details><summary>answer</summary>Perhaps neither: rank 0 came early and counts its wait. Last start to last end
#    decides, or put a barrier in front.</details>
# 2. A matrix product on a GPU "takes 20 microseconds" at any size. What happened?
#    <details><summary>answer</summary>Only the launch was timed. Synchronise before the clock stops.</details>
# 3. A speed-up of 6 on 8 workers: efficiency, serial fraction, the most that any number of workers can reach?
#    <details><summary>answer</summary>0.75; (1/6 - 1/8) / (7/8) = 0.048; 21.</details>
# 4. Karp-Flatt grows as you add workers. What does that say?
#    <details><summary>answer</summary>The loss is not a fixed serial part but overhead that grows: communication,
#    imbalance, shared memory bandwidth.</details>
# 5. Computing takes 30 ms, sending 10. Your overlapped program takes 28. What do you check first?
#    <details><summary>answer</summary>The measurement: nothing gets below max(a, b) = 30.</details>
#
# **Next**: 03 collectives. Read also: Amdahl 1967; Gustafson 1988; Karp and Flatt 1990; Hoefler and Belli
# 2015 (scientific benchmarking of parallel systems); the CUDA programming guide on streams; Stanford CS336
# 2024, lecture 8.
