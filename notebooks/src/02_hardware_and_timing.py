# %% [markdown]
# # 02 Hardware and timing
#
# **The one-minute version.** A number is fast to reach when it is near: cache, memory, another process, another
# machine, each step several times slower. Parallel training means to move little, and to move it while something
# else computes. To know whether you win you need a stopwatch that does not lie: warm up, start together,
# wait until the work is *done*, repeat, report median and spread. From times follow speed-up, efficiency and the
# serial fraction, which says how far you can go.
#
# Two clocks in this lesson: *measured* numbers come from the machine that built the page, yours will differ. *Paced*
# numbers come from real ranks and real messages whose computing is sleep, so that they look alike everywhere.

# %% tags=["setup"]
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from gpt2lab import Ranks, launch, transport
from gpt2lab.algorithms import ring
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import hardware as exercises
from gpt2lab.lessons.labs import clocks as lab
from gpt2lab.machine.speed import copy_rate, machine
from gpt2lab.machine.timing import alone, together, trials
from gpt2lab.planner import metrics
from gpt2lab.plots import hardware as plots
from gpt2lab.plots.data import bands
from gpt2lab.plots.tasks import workers
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, paced, trace
from gpt2lab.ranks.mesh import Mesh

# %% tags=["setup"]
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
one, other = torch.zeros(2, 1)  # (a tensor copied onto itself would return at once)
empty_call = alone(trials(lambda: [one.copy_(other) for _ in range(1000)])).median / 1000
show(
    plots.memory(rates, lab.PRINTED, empty_call),
    "measured",
    "bytes a second of one core copying. At the fall a cache is left behind; that of smaller caches does not show. "
    "Orange levels are published rates.",
    "Copy rate against bytes touched on log axes: rising, then falling in steps; level lines of GPU hardware",
)

# %% [markdown]
# On the far left the curve *rises*: starting a copy costs about a microsecond, whatever its size, and that is most of
# what is measured there. Every link behaves so: a latency, then a rate.
#
# The GPU numbers are a lecture's (Stanford CS336, 2024). Not all compare. NVLink's 900 GB/s count both ways, the
# others one. The H100 has PCIe 5, not 7. The 200 GB/s for InfiniBand, further down, are NVLink / 4.5 (one NDR port
# carries 50 GB/s each way). And 7.8 TB/s belong to the *pair* of boards that is sold as H100 NVL. So ask of every
# rate: of what, one way or both, measured or printed on the box?
#
# ### From process to process
#
# Two ranks play ping-pong, half of a round trip is one way. Once their messages pass through sockets of the loopback
# device (the backend *gloo*), once they lie in memory that both processes share (our backend *shm*; lesson 03 opens
# it).

# %% tags=["measured"]
ways = {"shared memory": "shm", "loopback": "gloo"} if transport.AVAILABLE else {"loopback": "gloo"}
one_way = {}
for way, backend in ways.items():
    with Ranks(2, backend=backend) as pair:
        for size, count in lab.SIZES.items():
            one_way[way, size] = alone(pair.run(lab.ping_pong, count)[0]).median / 2
table(
    [(*key, f"{1e6 * t:,.0f} us", f"{lab.SIZES[key[1]] / t / 1e9:.3f} GB/s") for key, t in one_way.items()],
    ["through", "message", "one way", "rate"],
)
here = {"cache (best copy)": max(rates.values()), "memory (largest copy)": rates[max(rates)]}
here |= {f"{way}, 16 MiB": lab.SIZES["16 MiB"] / one_way[way, "16 MiB"] for way in ways}
print(
    "each level is slower than the one before it:", list(here.values()) == sorted(here.values(), reverse=True)
)
show(
    plots.ladder(here, lab.LADDER, lab.DERIVED),
    "measured",
    "the ladder here beside the published one, whose 200 GB/s for InfiniBand are derived, not published: other "
    "numbers, the same order. A copy counts bytes read and bytes written, a message counts its own bytes once.",
    "Horizontal bars on a log axis: cache, memory, shared memory, loopback here; memory, NVLink, PCIe, Ethernet",
)

# %% [markdown]
# Where links are slow, let the *switch* add: SHARP sums inside the network. Each rank then sends its S bytes up
# once, where a ring all-reduce sends 2 (n - 1) / n S: for many ranks, twice as much. Live, three ranks with a
# fourth as their switch, and the same three in a ring; S = 4,800 bytes:

# %%
two, four = Ranks(2), Ranks(4)


def adding_switch(rank, world_size):
    mesh, n = Mesh(dp=world_size), world_size - 1
    axis, three, x = mesh["dp"], mesh.axis("ring", [range(n)]), torch.arange(1200.0) * (rank + 1)
    if rank == n:
        total = sum(comm.recv(x, axis, r) for r in range(n))
        for r in range(n):
            comm.send(total, axis, r)
        return True, sum(e.bytes for e in comm.log), 0
    comm.send(x, axis, n)
    total = comm.recv(x, axis, n)
    by_switch = sum(e.bytes for e in comm.log)
    comm.clear_log()
    return torch.equal(total, ring.all_reduce(x, three)), by_switch, sum(e.bytes for e in comm.log)


for rank, (same, switch, around) in enumerate(four.run(adding_switch)):
    name = "switch" if rank == 3 else "rank  "
    print(
        f"{name} {rank}: the same sum {same}; sends {switch:,} bytes with the switch, {around:,} in a ring of three"
    )

# %% [markdown]
# ### What cores share
#
# Do two cores multiply matrices twice as fast as one? Do they also copy twice as fast? Every rank here is a process
# with one thread; all measure at the same moment.


# %%
def rates_of_a_rank(rank, world_size):
    torch.set_num_threads(1)
    axis, a = Mesh(dp=world_size)["dp"], torch.randn(384, 384)
    small, large = torch.ones(2, 1 << 16, dtype=torch.uint8), torch.ones(2, 1 << 26, dtype=torch.uint8)
    works = (
        (lambda: a @ a, 2 * 384**3),
        (lambda: small[0].copy_(small[1]), small.numel()),
        (lambda: large[0].copy_(large[1]), large.numel()),
    )
    return [[lab.in_a_window(step, axis) * work for _ in range(4)] for step, work in works]


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
    "ideal shares nothing that matters; what ranks share does not multiply. Above the ideal: the single rank was "
    "disturbed.",
    "Total rate over the rate of one rank for 1, 2 and 4 ranks, three lines and a dashed ideal",
)

# %% [markdown]
# What is shared depends on what a "core" is. Real cores have arithmetic and first caches of their own and share the
# way to memory. The two cores of a small virtual machine are often two *threads* of one core: they share its
# arithmetic too. With more ranks than cores the ideal grows no more, and a stopwatch measures how the operating
# system deals out turns. That is why later lessons count bytes, pace, or simulate.
#
# ### The roofline: which limit is yours?
#
# A core multiplies faster than memory feeds it. *Machine balance* is the ratio: how many operations it could do for
# each byte that it touches. A product of n x n matrices does n/6 operations for each byte (2n³ on 3n² numbers of 4
# bytes), adding two vectors 1/12. Left of the balance memory decides, right of it arithmetic, and where the work is
# small the call itself.

# %% tags=["measured"]
show(
    plots.roofline(lab.roofline(), rates[max(rates)], max(rates.values())),
    "measured",
    "one core: additions of 16 to 16 million numbers in one column, products of 4 to 512 rows to its right. Full roof: "
    "memory; dashed: the cache, where small vectors and matrices stay. Below both, calls decide.",
    "Two roofs that rise and then are flat, a column of points at its left, and points that climb to the flat part",
)

# %% [markdown]
# ## How to time, and how not to
#
# Five common mistakes. (The lecture's own benchmark makes the second on a laptop: its barrier stands under `if
# cuda`.)
#
# **1. No warm-up.** The first call opens connections, fills caches, allocates. **2. No barrier.** A rank that
# comes early measures its wait. **3. Not done.** An asynchronous call returns at once; the clock stops before the
# work does. On a GPU nearly all calls are asynchronous, hence `synchronize`. **4. Mean.** One hiccup moves it.
# **5. The wrong end**: one rank's clock instead of all ranks'.


# %%
def timed(rank, world_size, warm=True, barrier=True, wait=True, late=0.0, link=None):
    """Seconds of an all-reduce by a stopwatch with a switch for each of its lines; rank 1 is `late` seconds late."""
    axis, x, found = Mesh(dp=world_size)["dp"], torch.ones(1000), []
    with paced.use(link):
        for trial in range(-2 if warm else 0, 8):
            if rank == 1:
                time.sleep(late)
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
early = two.run(timed, barrier=False, late=0.06)[0]
right = two.run(timed, late=0.06)[0]
not_done = two.run(timed, wait=False, link=slow)[0]
done = two.run(timed, link=slow)[0]
median = statistics.median
print("rank 1 is 60 ms late; without a barrier rank 0 counts that:", median(early) > 0.03 > median(right))
print("60 ms of link, of which a clock that does not wait sees half at most:", median(not_done) < 0.03)
print("one that waits sees all:", median(done) >= 0.06)

# %% tags=["measured"]
cold, warm = (launch(timed, warm=warm, ranks=2)[0] for warm in (False, True))
panels = {"1 no warm-up": {"cold": cold, "warm": warm}, "2 no barrier": {"without": early, "with": right}}
show(
    plots.mistakes(panels | {"3 not done": {"returned": not_done, "done": done}}),
    "measured",
    "an all-reduce timed wrongly and rightly; 2 and 3 are paced (a late rank, a slow link). Not warmed up, the first "
    "trial counts what happens once: a median forgives it, a mean does not. Lines are medians.",
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
# One trial has moved the mean to 25.1 ms<!--above-->, the median stays at 5.10 ms<!--above-->. The *fastest* trial is
# the machine undisturbed, the median is what you usually get; say which. The mean is right for one question only: how
# long will all of it take?
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
# So even after a barrier ranks start a little apart. A collective lasts from the **last start to the last end**:
# earlier, a rank is missing. The package's stopwatch:

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
# Amdahl keeps the *problem* fixed. **Gustafson** (1988) lets it grow with the workers, as we do when more ranks mean
# a larger batch: S = g + (1 - g) p. Amdahl's f is a share of the *serial* time, Gustafson's g of the *parallel* time.
# The same run has both. Here is one that was published, 24.7 times faster on 112 cores (the appendix has its table):

# %%
guess = predict("The same problem on 1,024 cores: how many times faster than on one?", unit="times")

# %%
p = 112
f = metrics.karp_flatt(24.7, p)
g = f / (f + (1 - f) / p)
print(f"f = {f:.3f} of the serial time is g = {g:.2f} of the time on {p} workers")
print(
    f"Amdahl(f): {metrics.amdahl(f, p):.1f}; Gustafson(g): {metrics.gustafson(g, p):.1f}: one run, one speed-up"
)
table(
    [(p, f"{metrics.amdahl(f, p):.1f}", f"{metrics.gustafson(g, p):.1f}") for p in (112, 224, 448, 1024)],
    ["workers", "the same problem (Amdahl)", "a problem that grows (Gustafson)"],
)
guess.beside(metrics.amdahl(f, 1024), "computed")

# %% [markdown]
# From 112 workers on the two part: the same problem ends at 1 / f = 31.
#
# ## Reading a trace
#
# A time says how long. A trace says who worked when. Each rank notes *spans* (name, kind, start, end); their sum over
# the *makespan*, from first start to last end, is the **average parallelism**. Four ranks, paced, with uneven work and
# a barrier after each of three rounds:


# %%
def uneven(rank, world_size, rounds=3):
    axis = Mesh(dp=world_size)["dp"]
    comm.barrier(axis)
    trace.clear()
    for i in range(rounds):
        with trace.span(f"work {i}", "forward"):
            time.sleep(0.05 * (rank + 1))
        comm.barrier(axis)
    return trace.spans(with_comm=False)


spans = trace.merge(four.run(uneven))
seen = metrics.average_parallelism(spans)
print("ideal: 10 units of work in 4 units of time, 2.5 of 4 ranks; seen between 1.5 and 3:", 1.5 < seen < 3)

# %% tags=["measured"]
show(
    workers(spans, clock="paced"),
    "paced",
    "who works (above) and how many at once (below): rank 3 has four times the work of rank 0.",
    "Bars of four ranks in three rounds above a step curve that falls from four to one in every round",
)

# %% [markdown]
# The same for https://ui.perfetto.dev, saved with `trace.save_chrome(spans, "trace.json")` and read again:

# %%
with tempfile.TemporaryDirectory() as folder:
    saved = json.loads(trace.save_chrome(spans, Path(folder, "trace.json")).read_text())
events = [event for event in saved["traceEvents"] if event["ph"] == "X"]
apart = max(abs(e["dur"] / 1e6 - (s.end - s.start)) for e, s in zip(events, spans, strict=True))
print(f"{len(events)} events, durations as in the spans:", apart < 1e-9)
lanes = {r: sorted((s.start, s.end) for s in spans if s.rank == r) for r in range(4)}
print(
    "no rank does two things at once:",
    all(a[1] <= b[0] for of in lanes.values() for a, b in zip(of[:-1], of[1:], strict=True)),
)

# %% [markdown]
# ## Overlap
#
# Computing takes a, sending b: T = a + b in turn, together never less than **max(a, b)**. With k pieces, c
# to compute and s to send each, and a piece sent while the next is computed:
#
# $$ T = c + (k - 1)\,\max(c, s) + s $$


# %%
explore(
    plots.lanes,
    "computed",
    "{pieces} pieces, {compute} ms to compute and {comm} ms to send each; numbers in bars name the piece.",
    "Two charts of two lanes, compute and send: one after the other, and overlapped, which ends earlier",
    pieces=(1, 12, 4),
    compute=(1, 40, 20),
    comm=(1, 40, 15),
)

# %% [markdown]
# ### On live ranks
#
# Compute is a sleep of 20 ms, the link is held back so that an all-reduce takes 15 ms. With `async_op=True` the call
# returns a handle; `wait()` gives the result. So data parallelism hides the sum of its gradients (lesson 04).


# %%
def pieces_on_ranks(rank, world_size, asynchronous, pieces=4):
    axis, results = Mesh(dp=world_size)["dp"], []
    comm.barrier(axis)
    trace.clear()
    with paced.use(paced.Link(latency=0.0075, bandwidth=1e9)):  # two steps of a ring: 15 ms
        for i in range(pieces):
            with trace.span(f"piece {i}", "backward"):
                time.sleep(0.020)
            results.append(comm.all_reduce(torch.full((10,), float(rank + i)), axis, async_op=asynchronous))
        if asynchronous:
            with trace.span("wait", "wait"):
                results = [handle.wait() for handle in results]
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
length = max(span.end for span in runs[False][2]) - min(span.start for span in runs[False][2])
for asynchronous, (_, _, merged) in runs.items():
    title = "overlapped" if asynchronous else "one after the other"
    show(
        timeline(merged, title, clock="paced", length=length),
        "paced",
        "messages (strip) run while the next piece is computed."
        if asynchronous
        else "each message is waited for.",
        "Timeline of two ranks: four pieces of work, and messages as a strip below",
    )

# %% [markdown]
# ### On a GPU: streams
#
# A CUDA *stream* is a queue: what is in one runs in order, different streams may overlap. The lecture multiplies two
# matrices while another one is copied to the GPU. Its record: 276.9 ms one after the other, 164.3 ms overlapped. Let
# the longer part be a and the shorter b:

# %%
total, both = 276.9, 164.3
print(f"a + b = {total} and T >= a, so b >= {total - both:.1f} ms; T >= a >= {total / 2:.1f} ms")
print(
    f"at least {100 * (total - both) / (total / 2):.0f} % of the shorter part was hidden: {total - both:.1f} ms saved"
)

# %% [markdown]
# The program as published is not safe: a side stream does not wait for what the main stream still has to write, a
# copy from ordinary memory is not asynchronous, and memory of one stream that is used on another may be handed out
# again too early. Three repairs are marked in `labs/clocks.py`. The cell runs where there is a GPU:

# %% tags=["measured"]
if torch.cuda.is_available():
    print("same results: {}\none after the other: {}\noverlapped: {}".format(*lab.streams()))
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

# %% [markdown] tags=["hint"]
# One call and `synchronise()` before everything. Then, for each trial: barrier, clock, call, and what before the
# clock?


# %% tags=["wrong"]
# FAIL: warm up
# MISTAKE: Nothing is warmed up: the first trial pays for what happens only once.
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
# MISTAKE: The clock stops when the work has been started, not when it is done.
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
# MISTAKE: The wait in the barrier is timed as well.
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
# MISTAKE: One barrier before all trials: later on the ranks drift apart.
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
# MISTAKE: The warm-up is still going on when the first trial begins.
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
# MISTAKE: Times are sorted, so nobody sees that they rise.
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
# MISTAKE: One mean of all trials: what varies cannot be seen.
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    barrier()
    start = clock()
    for _ in range(count):
        call()
    synchronise()
    return (clock() - start) / count


# %% tags=["wrong"]
# FAIL: which was never asked
# MISTAKE: Another clock than the one that is given.
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    out = []
    for _ in range(count):
        barrier()
        s = time.perf_counter()
        call()
        synchronise()
        out.append(time.perf_counter() - s)
    return out


# %% tags=["wrong"]
# FAIL: 2 trials were asked for, you returned 3
# MISTAKE: The number of trials of one example is written down.
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    out = []
    for _ in range(3):
        barrier()
        s = clock()
        call()
        synchronise()
        out.append(clock() - s)
    return out


# %% tags=["wrong"]
# FAIL: each trial has a time of its own
# MISTAKE: The fastest trial is returned for all.
def benchmark(call, count, barrier, synchronise, clock):
    call()
    synchronise()
    out = []
    for _ in range(count):
        barrier()
        s = clock()
        call()
        synchronise()
        out.append(clock() - s)
    return [min(out)] * count


# %% [markdown]
# **2.** Every rank reports (start, end) of the same collective, on one clock. How long did it take?


# %% tags=["exercise"]
def lasted(per_rank):
    """Seconds of one collective; `per_rank` lists (start, end)."""
    ### BEGIN SOLUTION
    return max(end for _, end in per_rank) - max(start for start, _ in per_rank)
    ### END SOLUTION


check("one clock for all ranks", exercises.together, lasted)

# %% [markdown] tags=["hint"]
# Draw three bars on one time axis. When could the collective begin, and when is it over for all?


# %% tags=["wrong"]
# FAIL: that wait is not the collective's
# MISTAKE: A rank that came early is taken to have worked while it waited.
def lasted(per_rank):
    return max(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: when the *last* rank is done
# MISTAKE: The quickest rank is looked at, not the last one.
def lasted(per_rank):
    return min(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: expected 1.5, got 6.5
# MISTAKE: Counted from the first rank's start: its wait is taken for work.
def lasted(per_rank):
    return max(end for _, end in per_rank) - min(start for start, _ in per_rank)


# %% tags=["wrong"]
# FAIL: expected 3, got 6
# MISTAKE: Times of ranks that work at once are added.
def lasted(per_rank):
    return sum(end - start for start, end in per_rank)


# %% tags=["wrong"]
# FAIL: expected 1.5, got 1
# MISTAKE: It is taken to be over when the first rank is done.
def lasted(per_rank):
    return min(end for _, end in per_rank) - max(start for start, _ in per_rank)


# %% tags=["wrong"]
# FAIL: a drawn case
# MISTAKE: The rank that is listed last is taken to have started last.
def lasted(per_rank):
    return max(end for _, end in per_rank) - per_rank[-1][0]


# %% [markdown]
# **3.** Which serial fraction explains a speed-up S on p workers?


# %% tags=["exercise"]
def serial_fraction(S, p):
    """Karp and Flatt's metric."""
    ### BEGIN SOLUTION
    return (1 / S - 1 / p) / (1 - 1 / p)
    ### END SOLUTION


check("serial fraction", exercises.serial_fraction, serial_fraction)

# %% [markdown] tags=["hint"]
# Start from 1/S = f + (1 - f)/p and solve for f.


# %% tags=["wrong"]
# FAIL: a speed-up of 2 on 4 workers: expected 0.333333, got 0.5
# MISTAKE: That is the share of the workers that is lost, not the serial fraction.
def serial_fraction(S, p):
    return 1 - S / p


# %% tags=["wrong"]
# FAIL: a speed-up of 4 on 4 workers has no serial part
# MISTAKE: The time left is taken to be all serial.
def serial_fraction(S, p):
    return 1 / S


# %% tags=["wrong"]
# FAIL: a speed-up of 2 on 4 workers: expected 0.333333, got 0.666667
# MISTAKE: Workers that are lost are counted, not seconds.
def serial_fraction(S, p):
    return (p - S) / (p - 1)


# %% tags=["wrong"]
# FAIL: a speed-up of 2 on 4 workers: expected 0.333333, got 0.25
# MISTAKE: The difference is not divided by what could be won at most.
def serial_fraction(S, p):
    return 1 / S - 1 / p


# %% tags=["wrong"]
# FAIL: expected 0, got 1
# MISTAKE: The fraction that was saved, not the one that is serial.
def serial_fraction(S, p):
    return (1 - 1 / S) / (1 - 1 / p)


# %% tags=["wrong"]
# FAIL: half as fast as one worker
# MISTAKE: Cut off at 1, which hides what parallel work costs besides.
def serial_fraction(S, p):
    return min(1.0, (1 / S - 1 / p) / (1 - 1 / p))


# %% tags=["wrong"]
# FAIL: metrics.karp_flatt knows the answer
# MISTAKE: The package's function is called.
def serial_fraction(S, p):
    return metrics.karp_flatt(S, p)


# %% [markdown]
# **4.** k pieces, `c` to compute and `s` to send each; a piece travels while the next one is computed, one at a time.


# %% tags=["exercise"]
def overlapped_time(k, c, s):
    """When the last piece has arrived."""
    ### BEGIN SOLUTION
    return c + (k - 1) * max(c, s) + s
    ### END SOLUTION


check("overlap", exercises.overlap, overlapped_time)

# %% [markdown] tags=["hint"]
# The first piece has to be computed before anything travels, the last one travels alone. What sets the pace between?


# %% tags=["wrong"]
# FAIL: one piece: nothing to overlap with
# MISTAKE: The first piece and the last one have nothing to overlap with.
def overlapped_time(k, c, s):
    return k * max(c, s)


# %% tags=["wrong"]
# FAIL: the last one still has to travel
# MISTAKE: Computing and sending are added: nothing overlaps.
def overlapped_time(k, c, s):
    return k * (c + s)


# %% tags=["wrong"]
# FAIL: now the link is never idle
# MISTAKE: Right only where computing takes longer than sending.
def overlapped_time(k, c, s):
    return k * c + s


# %% tags=["wrong"]
# FAIL: expected 95, got 80
# MISTAKE: Right only where sending takes longer than computing.
def overlapped_time(k, c, s):
    return c + k * s


# %% tags=["wrong"]
# FAIL: one piece: nothing to overlap with: expected 35, got 40
# MISTAKE: Both ends are taken to last as long as the slower of the two.
def overlapped_time(k, c, s):
    return (k + 1) * max(c, s)


# %% tags=["wrong"]
# FAIL: metrics.overlapped knows the answer
# MISTAKE: The package's function is called.
def overlapped_time(k, c, s):
    return metrics.overlapped(k, c, s)


# %% tags=["wrong"]
# FAIL: 7 pieces, 2 to compute, 5 to send
# MISTAKE: Right for one piece and for four.
def overlapped_time(k, c, s):
    return c + 3 * (k > 1) * max(c, s) + s


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

# %% [markdown] tags=["hint"]
# All work of all ranks, over the time from the first start to the last end.


# %% tags=["wrong"]
# FAIL: from the first start
# MISTAKE: Time is counted from zero, not from the first start.
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans) / max(s.end for s in spans)


# %% tags=["wrong"]
# FAIL: 16 s of work within 8 s
# MISTAKE: Right for two ranks only.
def average_parallelism(spans):
    busy = sum(s.end - s.start for s in spans)
    makespan = max(s.end for s in spans) - min(s.start for s in spans)
    return 2 * busy / makespan / len({s.rank for s in spans})


# %% tags=["wrong"]
# FAIL: expected 1, got 2
# MISTAKE: Ranks are counted, also while they wait.
def average_parallelism(spans):
    return len({s.rank for s in spans})


# %% tags=["wrong"]
# FAIL: expected 1, got 2.66667
# MISTAKE: That is the mean length of a piece of work.
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans) / len(spans)


# %% tags=["wrong"]
# FAIL: expected 2, got 1
# MISTAKE: Only the first three pieces are looked at.
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans[:3]) / (max(s.end for s in spans) - min(s.start for s in spans))


# %% tags=["wrong"]
# FAIL: metrics.average_parallelism knows the answer
# MISTAKE: The package's function is called.
def average_parallelism(spans):
    return metrics.average_parallelism(spans)


# %% tags=["wrong"]
# FAIL: spans in no order of time
# MISTAKE: The first and the last span of the list are taken for the first and the last in time.
def average_parallelism(spans):
    return sum(s.end - s.start for s in spans) / (spans[-1].end - spans[0].start)


# %% [markdown]
# ## Appendix: a published speed-up, and ours
#
# A group at the Barcelona Supercomputing Center ran GPT-2 124M
# (llm.c) on 112 cores, 40 iterations: with threads by *OpenMP*, which shares out loops, and with the
# same threads scheduled by the library *nOS-V*.

# %%
minutes = {"sequential": 24.1, "OpenMP": 58 / 60, "OpenMP over nOS-V": 66 / 60}
print("40 x 35 s =", f"{40 * 35 / 60:.1f} min of the 24.1: the rest is outside the iterations, or rounding")
print("40 x 1.430 s =", f"{40 * 1.430:.1f} s of 58;  40 x 1.616 s = {40 * 1.616:.1f} s of 66")
rows = []
for name, t in minutes.items():
    S = metrics.speedup(minutes["sequential"], t)
    p = 1 if name == "sequential" else 112
    f = f"{metrics.karp_flatt(S, p):.3f}" if p > 1 else "-"
    rows.append((name, f"{t:.2f}", f"{S:.1f}", f"{metrics.efficiency(S, p):.2f}", f))
table(rows, ["version", "minutes", "speed-up", "efficiency", "Karp-Flatt"])

# %% [markdown]
# The page says 24.7 (so f = 0.032) and 21.8: other roundings of the same runs. The finding stands: 3 % that does not
# split costs 78 % of the node, and no number of cores would get beyond 1 / 0.032 = 31.
#
# ### The same protocol here
#
# GPT-2 nano on one and two threads: several iterations a run, without the first, and nothing but the step.


# %% tags=["measured"]
runs = lambda threads: [launch(lab.step_times, threads, 6, ranks=1)[0][0][1:] for _ in range(2)]
ours = {threads: sum(runs(threads), []) for threads in (1, 2)}
show(
    plots.box_plot({"1 thread": ours[1], "2 threads": ours[2]}),
    "measured",
    "training steps of GPT-2 nano, two runs of five steps each.",
    "Two box plots of step times in milliseconds, one thread and two threads, with all steps as dots",
)
gained = metrics.speedup(*(statistics.median(ours[threads]) for threads in (1, 2)))
print(f"speed-up {gained:.2f} on 2 threads, efficiency {metrics.efficiency(gained, 2):.2f}")
show(
    plots.speedups(
        {"ours": (2, gained), "OpenMP": (112, 24.7), "nOS-V": (112, 21.8)}, (0.5, 0.1, 0.032, 0.01)
    ),
    "measured",
    "Amdahl's curves with our point (measured) and two from the Barcelona page; right, the fractions behind them.",
    "Speed-up against workers on log axes with four Amdahl curves and three points; bars of serial fractions",
)

# %% tags=["measured"]
one_thread = [[1e3 * t for t in launch(lab.step_times, 1, 8, ranks=1)[0][0][1:]] for _ in range(4)]
show(
    bands({"1 thread": one_thread}, 2, xlabel="iteration", ylabel="ms (measured)", ylim=(0, None)),
    "measured",
    "the same measurement again, four new runs, by iteration: their mean, and a band from the fastest to the "
    "slowest. Barcelona's sequential iterations, of GPT-2 124M, took a constant 35 s (mean of four runs).",
    "A line of step times in milliseconds over seven iterations with a band",
)

# %% [markdown]
# ### The first iteration
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
runs = lambda how: [launch(lab.step_times, 2, 4, *how, ranks=1)[0][0] for _ in range(3)]
excess = lambda t: 1e3 * (t[0] - statistics.median(t[1:]))
found = {name: sorted(map(excess, runs(how))) for name, how in conditions.items()}
table(
    [(name, *(f"{ms:+.0f} ms" for ms in times)) for name, times in found.items()],
    ["first iteration minus the median of the others", "lowest of three runs", "middle", "highest"],
)
plain, *others = found.items()
helps = [name for name, times in others if times[-1] < plain[1][0]]  # all its runs below all as it comes
print("the excess is smaller, by more than runs differ, with:", ", ".join(helps) or "nothing. No verdict")

# %% [markdown]
# A suspect is guilty if the excess goes away with it, by more than runs of one condition differ. If it goes only with
# the control, a first iteration pays for something else: autograd starts a thread, activations get their memory. If
# even the control does not help, this experiment cannot tell.
#
# Preparing must not change what is computed:

# %%
losses = [launch(lab.step_times, 1, 2, *how, ranks=1)[0][1] for how in conditions.values()]
print("equal losses in all four conditions:", all(run == losses[0] for run in losses))

# %% [markdown]
# A first iteration that is *faster* needs another suspect: memory bandwidth that is still free, or a cool processor.

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
# ## Read on
#
# - Hoefler and Belli 2015, *Scientific benchmarking of parallel computing systems*: twelve rules for honest numbers.
# - Williams, Waterman and Patterson 2009, *Roofline*: where the picture with the roof comes from.
# - Karp and Flatt 1990, *Measuring parallel processor performance*: the serial fraction, and what it shows.
# - Gustafson 1988, *Reevaluating Amdahl's law*: why large machines are worth having after all.
# - NVIDIA 2024, *CUDA C++ programming guide*, on streams: what may overlap on a GPU, and what waits.
#
# **Next**: [03 Collectives](03_collectives.ipynb).
