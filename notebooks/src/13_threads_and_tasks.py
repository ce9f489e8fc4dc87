# %% [markdown]
# # 13 Threads and tasks
#
# **The one-minute version.** Inside one process the cores share memory, so nothing needs to be sent. Still about half
# of them may be idle. The usual way, *fork-join*, cuts every loop among the threads and lets all of them
# meet at its end, hundreds of times in a step. The other way is to let each piece of work, a **task**, say which
# part of which tensor it reads and writes. From that the order follows by itself, with no edge too many, and a task
# runs as soon as what it needs is there. The same graph runs again in every
# iteration, holds messages between ranks as tasks like any other, and lets a rank that waits lend its cores.
#
# You will write each of these, and train GPT-2 with them **equal to autograd**.

# %% tags=["setup"]
import threading
import time
from dataclasses import replace
from functools import partial

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import tasks as exercises
from gpt2lab.lessons.labs import tasks as labs
from gpt2lab.lessons.labs.executors import executors
from gpt2lab.lessons.labs.instruments import seconds_of
from gpt2lab.lessons.labs.tasks import CONFIG, SMALL, elements_of, fastest, gpt2_tasks
from gpt2lab.machine.links import Link
from gpt2lab.model import GPT2
from gpt2lab.planner import metrics
from gpt2lab.plots import tasks as plots
from gpt2lab.ranks import comm, paced, trace
from gpt2lab.ranks.mesh import Axis, Mesh
from gpt2lab.reference import example_batch
from gpt2lab.tasks import check as judge
from gpt2lab.tasks import messages
from gpt2lab.tasks.cores import Cores
from gpt2lab.tasks.gpt2 import Blocks, GPT2Tasks
from gpt2lab.tasks.graph import TaskGraph, reads, reduces, updates, writes
from gpt2lab.tasks.runtime import run_fork_join, run_sequential
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

# %% tags=["setup"]
batch = example_batch(CONFIG, rows=4, length=32)

# %% [markdown]
# ## Fork-join, and who is idle
#
# A port of llm.c at the Barcelona Supercomputing Center began with OpenMP: a `parallel for` before each matrix product,
# attention's forward and the softmax over the words; everything else, as in llm.c, ran on one thread. With 112 CPUs:

# %%
rows = []
for name, seconds in {"sequential": 35.0, "OpenMP": 1.430, "OpenMP over nOS-V": 1.616}.items():
    s = metrics.speedup(35.0, seconds)
    p = 112 if s > 1 else 1
    fraction = f"{metrics.karp_flatt(s, p):.1%}" if s > 1 else ""
    rows.append((name, f"{seconds:g} s", f"{s:.1f}", f"{metrics.efficiency(s, p):.2f}", fraction))
table(rows, ["an iteration (BSC's wiki)", "time", "speed-up", "efficiency", "serial share (Karp-Flatt)"])

# %% [markdown]
# (*nOS-V*: a library through which processes share one scheduler. The wiki's own 24.7 and 21.8: lesson 02.)
# The trace showed "nearly half of the threads working simultaneously". The same on two workers (torch releases
# Python's lock, so threads do compute at the same time):


# %%
def as_in_llmc(loop):  # which loops llm.c runs in parallel
    products = any(word in loop for word in ("attn.c_", "mlp.c_", "head"))
    return products or loop.startswith(("attention", "loss"))


# %% tags=["measured"]
tasks = gpt2_tasks()  # blocks of 64 tokens, two of each loop; float64
joined = fastest(lambda: run_fork_join(tasks.graph, 2, as_in_llmc))
show(
    plots.workers(joined, "Fork-join, parallel where llm.c is"),
    "measured",
    "one iteration on two workers, the fastest of six; pale grey: a worker sleeps at the end of a loop.",
    "Two rows of coloured bars, the second mostly grey; below, a line that jumps between 1 and 2 at work",
)

# %% [markdown]
# **Three reasons to be idle:** loops that nobody cut (Amdahl; above, the updates), loops whose pieces are unequal, and
# a *barrier* at the end of each. The last two belong to fork-join.
#
# ## Say what you touch
#
# A task is a function and a tuple of accesses: (how, tensor, part).
#
# | the task | in OmpSs-2 | may overlap with |
# |---|---|---|
# | `reads` | in | other reads |
# | `writes`, `updates` | out, inout | nothing |
# | `reduces` (adds to) | commutative | other reduces: any order, one at a time |
# | `concurrent` | concurrent | other concurrent ones, at the same time |
#
# The body gets one view for each access and nothing else, so the declaration *is* the argument list.

# %%
graph = TaskGraph({"x": torch.ones(4, 3), "y": torch.zeros(4, 3), "total": torch.zeros(3)})
for a in (0, 2):
    rows = (a, a + 2)
    graph.add(f"double {a}:{a + 2}", lambda x, y: torch.mul(x, 2, out=y), reads("x", rows), writes("y", rows))
graph.add("total", lambda y, t: torch.sum(y, 0, out=t), reads("y"), writes("total"))
graph.add("next x", lambda x, t: x.add_(t), updates("x", (0, 2)), reads("total"))
run_sequential(graph)
print([(graph.tasks[u].name, graph.tasks[v].name) for u, v in graph.edges()])

# %% [markdown]
# Nobody wrote these edges. `double 2:4` and `next x` have none: their rows differ. `double 0:2` and `next x` share
# rows, but `total` stands between.

# %%
show(
    plots.graph(graph, judge.levels(graph), (), "Four tasks"),
    "drawing",
    "each task stands right of what it waits for; the two that double may run at the same time.",
    "Four dots: two at the left, both joined to total, which is joined to next x",
)

# %% [markdown]
# The port has two kinds of such parts: with *blocks of tokens* layers overlap, with *slices of weights* gradients,
# updates and the next forward.
#
# Your turn. An MLP over blocks of tokens a:b, with the gradient of `w2` for a loss of
# sum(y²)/2, summed over the blocks:
#
# | task | computes |
# |---|---|
# | up | h = x w1 |
# | gelu | h = gelu(h), in place |
# | down | y = x + h w2 |
# | grad | d = d + h' y (d has no blocks) |
#
# The bodies take their views in the order in which names appear in "up: x w1 h", "gelu: h", "down: x h w2 y", "grad: h
# y d". Declare no less than they touch, or there is a *race*; and no more, or they wait for nothing.


# %% tags=["exercise"]
def declare(task, a, b):
    """The accesses of a task ("up", "gelu", "down", "grad") on tokens a:b, as a tuple."""
    ### BEGIN SOLUTION
    block = (a, b)
    return {
        "up": (reads("x", block), reads("w1"), writes("h", block)),
        "gelu": (updates("h", block),),
        "down": (reads("x", block), reads("h", block), reads("w2"), writes("y", block)),
        "grad": (reads("h", block), reads("y", block), reduces("d")),
    }[task]
    ### END SOLUTION


check("what the tasks touch", exercises.declare, declare)


# %% tags=["wrong"]
# FAIL: two at the same time lose a sum
# MISTAKE: Sums into one tensor may be added in any order, but not at the same moment.
def declare(task, a, b):
    from gpt2lab.tasks.graph import concurrent

    found = exercises.declared(task, a, b)
    return (*found[:2], concurrent("d")) if task == "grad" else found


# %% tags=["wrong"]
# FAIL: 'up 1:4' has to wait for 'up 0:1'
# MISTAKE: Blocks are taken to have two tokens, whatever b says.
def declare(task, a, b):
    return exercises.declared(task, a, a + 2 if a < 4 else b)


# %% [markdown] tags=["hint"]
# Which of the four tasks only look at a tensor, which overwrite it, which change it in place, and which add into one
# that the others add into too? `reduces` is for the last kind. Weights have no block.


# %% tags=["wrong"]
# FAIL: 'gelu 0:2' has to wait for 'up 2:4'
# MISTAKE: A whole tensor is declared where a block is touched, so tasks wait for nothing.
def declare(task, a, b):
    return (updates("h"),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'gelu 0:2' changes h outside
# MISTAKE: What is changed is declared as read only.
def declare(task, a, b):
    return (reads("h", (a, b)),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'gelu 0:2' uses something that it does not declare to read
# MISTAKE: What is read before it is written is declared as written only.
def declare(task, a, b):
    return (writes("h", (a, b)),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'grad 2:4' has to wait for 'grad 0:2'
# MISTAKE: A sum that may be added to in any order is declared as an update, so tasks run one after the other.
def declare(task, a, b):
    found = exercises.declared(task, a, b)
    return (*found[:2], updates("d")) if task == "grad" else found


# %% tags=["wrong"]
# FAIL: cannot compute with the parts
# MISTAKE: Reads are declared in another order than the task takes them.
def declare(task, a, b):
    up = (reads("w1"), reads("x", (a, b)), writes("h", (a, b)))
    return up if task == "up" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: give a tuple of accesses
# MISTAKE: Names are returned, not accesses.
def declare(task, a, b):
    return {"up": "x w1 h", "gelu": "h", "down": "x h w2 y", "grad": "h y d"}[task].split()


# %% [markdown]
# Two checks ran. The *race finder* looks at every pair of accesses that conflict and asks
# whether a path of edges orders the two tasks. It believes the declarations. The *audit* does not: it runs each task
# with NaN in everything that the task does not declare.

# %%
graph = exercises.mlp(exercises.declared)
print("races:", judge.races(graph), " audit:", labs.audit(graph))
graph.add("peek", lambda y: y.add_(graph.tensors["x"]), updates("y"))
graph.add("scribble", lambda x: x.mul_(2), reads("x"))
print(*labs.audit(graph), sep="\n")

# %% [markdown]
# ## As relaxed as possible
#
# The rule, written out: an edge from u to a later v where accesses overlap, unless both only read (or both reduce, or
# both are concurrent). Others imply many of these.


# %%
def all_edges(graph):
    """For each task every earlier one that conflicts with it, in program order."""
    before = []
    for v in graph.tasks:
        conflict = lambda u, v=v: any(b.conflicts(a) for a in u.accesses for b in v.accesses)
        before.append(tuple(u.number for u in graph.tasks[: v.number] if conflict(u)))
    return before


graph = exercises.mlp(exercises.declared)
every = all_edges(graph)
print(sum(map(len, every)), "conflicting pairs; the package keeps", len(list(graph.edges())), "edges")


# %% [markdown]
# Of 18<!--above--> conflicts 9<!--above--> are kept as edges: an edge can go when a longer way still orders its two
# tasks. What is left is the *transitive reduction*.


# %% tags=["exercise"]
def fewest(before):
    """`before[v]` are the tasks with an edge to v, all smaller than v. The same without edges that others imply."""
    ### BEGIN SOLUTION
    ancestors, kept = [], []
    for firsts in before:
        beyond = set().union(*(ancestors[u] for u in firsts))
        kept.append(tuple(u for u in firsts if u not in beyond))
        ancestors.append(beyond | set(firsts))
    return kept
    ### END SOLUTION


check("edges that can go", exercises.fewest, fewest)

# %% [markdown] tags=["hint"]
# An edge u to v can go when u comes before another task that has an edge to v. So for each task keep the set of all
# that come before it, near or far.


# %% tags=["wrong"]
# FAIL: Of [(), (0,), (0, 1)] the edge (0, 2) can still go: a longer way leads there
# MISTAKE: Nothing is taken away.
def fewest(before):
    return before


# %% tags=["wrong"]
# FAIL: Of [(), (0,), (1,), (2, 0)] the edge (0, 3) can still go: a longer way leads there
# MISTAKE: Only edges that two others imply are taken away, not longer chains.
def fewest(before):
    two = lambda u, firsts: any(u in before[w] for w in firsts)
    return [tuple(u for u in firsts if not two(u, firsts)) for firsts in before]


# %% tags=["wrong"]
# FAIL: Of [(), (0,), (1,), (2, 0)] nothing orders task 3 any more as it was: you keep [(), (0,), (1,), (0,)]
# MISTAKE: Only the last edge of a task is kept.
def fewest(before):
    return [firsts[-1:] for firsts in before]


# %% tags=["wrong"]
# FAIL: (4, 5) was no edge before: only leave some out
# MISTAKE: A chain through all tasks, with edges that were not there.
def fewest(before):
    return [(v - 1,) if v else () for v in range(len(before))]


# %% tags=["wrong"]
# FAIL: 3 tasks go in, 2 come out
# MISTAKE: Tasks without edges are left out of the list.
def fewest(before):
    ancestors, kept = [], []
    for firsts in before:
        beyond = set().union(*(ancestors[u] for u in firsts))
        kept.append(tuple(u for u in firsts if u not in beyond))
        ancestors.append(beyond | set(firsts))
    return [firsts for firsts in kept if firsts]


# %% tags=["wrong"]
# FAIL: tasks.reduced knows the answer
# MISTAKE: The checker's own function is called.
def fewest(before):
    return exercises.reduced(before)


# %% tags=["wrong"]
# FAIL: Of [(), (0,), (0, 1)] you keep the edge (0, 1) twice
# MISTAKE: Each edge is written down once for every reader that asks.
def fewest(before):
    ancestors, kept = [], []
    for firsts in before:
        beyond = set().union(*(ancestors[u] for u in firsts))
        kept.append(tuple(u for u in firsts if u not in beyond for _ in range(2)))
        ancestors.append(beyond | set(firsts))
    return kept


# %% [markdown]
# None is too many: take any edge away, and the race finder names a race.

# %%
graph = exercises.mlp(exercises.declared)
for u, v in list(graph.edges())[:3]:
    fewer = [tuple(w for w in firsts if (w, x) != (u, v)) for x, firsts in enumerate(graph.before)]
    first, then, access = judge.races(graph, fewer)[0]
    print(f"without {u} -> {v}: {then!r} {access} beside {first!r}")

# %% [markdown]
# ## GPT-2 as tasks
#
# One iteration: load, forward, the loss, backward *by hand* (no autograd), AdamW. Blocks of tokens, of
# attention's rows and heads, of columns, of weights. The gradient of a weight is summed over
# the tokens *inside one task*, not by whoever comes first: sums in another order would give other bits.

# %%
show_source(GPT2Tasks._linear_backward)

# %%
tasks, model = gpt2_tasks(), GPT2(CONFIG).double()
run_sequential(tasks.graph)
(model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
worst = labs.apart(tasks.gradients, {name: p.grad for name, p in model.named_parameters()})
print(len(tasks.graph.tasks), "tasks; gradients equal to autograd's:", worst < 1e-12)
print("races:", len(judge.races(tasks.graph)), " needless edges:", len(judge.needless(tasks.graph)))


# %% [markdown]
# How parallel is that? All work over the longest chain, T1 / Tinf: how many workers the graph could keep busy. The
# cost of a task is here the number of elements that it touches.


# %%
whole = labs.one_layer(2, 8, Blocks(tokens=8, rows=1))  # 2 rows of 8 tokens, a block each
drawn = TaskGraph(whole.tensors)
for t in whole.tasks:
    if t.kind in ("forward", "other"):
        drawn.add(t.name, t.body, *t.accesses, kind=t.kind)
path = judge.critical_path(drawn, elements_of)
show(
    plots.graph(drawn, judge.levels(drawn), path, "Forward, two blocks of tokens"),
    "computed",
    "each task stands right of what it needs; the two blocks never meet before the loss. Thick: the critical path.",
    "Dots in two rows joined by lines from left to right, that meet at the last dot",
)

# %% [markdown]
# Smaller blocks keep more workers busy, and every task has its price in the runtime. *Paced*, tasks sleep in
# proportion to what they touch: two cores are as many virtual ones as you like. *Measured*, they compute on two
# workers.

# %% tags=["measured"]
sizes = (4, 8, 16, 32, 64, 128)
measured = {"2 cores, measured": labs.by_block(sizes, 2)}
explore(
    lambda cores, ms: plots.grain(
        {f"{cores} cores, paced": labs.by_block(sizes, cores, ms / 1000)} | measured
    ),
    "paced",
    "block size against parallelism, overhead, time: {cores} virtual cores, {ms} ms of work; and 2 cores, measured.",
    "Three panels over the block size: parallelism and overhead fall, the paced time has a minimum",
    cores=(2, 16, 8),
    ms=(100, 400, 200),
)

# %% [markdown]
# ## A scheduler by hand
#
# Workers, a list of tasks that are ready, a lock. The one rule is yours: which tasks may run *because v is over*?
# `waits[w]` counts what task w still waits for; `after[v]` are the tasks with an edge from v.


# %% tags=["exercise"]
def release(v, waits, after):
    """Task v is over: count that, and return the list of tasks that are ready now and were not before."""
    ### BEGIN SOLUTION
    found = []
    for w in after[v]:
        waits[w] -= 1
        if waits[w] == 0:
            found.append(w)
    return found
    ### END SOLUTION


check("the ready rule", exercises.ready, release)


# %% [markdown] tags=["hint"]
# Count down first, look afterwards: when v is over, each task behind it waits for one less. Which of them wait for
# nothing now?


# %% tags=["wrong"]
# FAIL: was let go while task
# MISTAKE: Every task that follows is let go, though it may wait for others.
def release(v, waits, after):
    return list(after[v])


# %% tags=["wrong"]
# FAIL: never runs
# MISTAKE: The counters are not counted down.
def release(v, waits, after):
    return [w for w in after[v] if waits[w] == 0]


# %% tags=["wrong"]
# FAIL: was let go twice
# MISTAKE: Neighbours by number are looked at, not those that follow.
def release(v, waits, after):
    for w in after[v]:
        waits[w] -= 1
    return [w for w in range(v + 1, min(len(waits), v + 4)) if waits[w] == 0] if after[v] else []


# %% tags=["wrong"]
# FAIL: Look at after[v] alone
# MISTAKE: All tasks are searched, where those that follow are enough.
def release(v, waits, after):
    before = [w for w, n in enumerate(waits) if n == 0]
    for w in after[v]:
        waits[w] -= 1
    return [w for w, n in enumerate(waits) if n == 0 and w not in before]


# %% tags=["wrong"]
# FAIL: takes tasks out of after[v]
# MISTAKE: The list of those that follow is emptied, which others may need.
def release(v, waits, after):
    found = []
    while after[v]:
        w = after[v].pop()
        waits[w] -= 1
        if waits[w] == 0:
            found.append(w)
    return found


# %% tags=["wrong"]
# FAIL: does not fit what is asked for. TypeError: 'int' object is not iterable
# MISTAKE: The number of ready tasks is returned, not which.
def release(v, waits, after):
    for w in after[v]:
        waits[w] -= 1
    return sum(waits[w] == 0 for w in after[v])


# %% tags=["wrong"]
# FAIL: returned None
# MISTAKE: Counts, but does not return what is ready.
def release(v, waits, after):
    for w in after[v]:
        waits[w] -= 1


# %%
def my_scheduler(graph, workers, release):
    """Run all tasks on worker threads, each as soon as it can."""
    after = [[] for _ in graph.tasks]
    for u, v in graph.edges():
        after[u].append(v)
    waits = [len(firsts) for firsts in graph.before]
    ready, left = [v for v, n in enumerate(waits) if n == 0], len(waits)
    changed = threading.Condition()

    def work():
        nonlocal left
        with torch.no_grad():
            while True:
                with changed:
                    while left and not ready:
                        changed.wait()  # asleep: nothing spins
                    if not left:
                        return
                    v = ready.pop()
                task = graph.tasks[v]
                task.body(*task.views)  # our lock is free here; inside torch Python's is, too
                with changed:
                    left -= 1
                    ready.extend(release(v, waits, after))
                    changed.notify_all()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


rule = labs.mine("the ready rule", release, exercises.release)
for workers in (1, 2, 4):
    again = gpt2_tasks()
    my_scheduler(again.graph, workers, rule)
    print(f"{workers} workers: the bits of program order:", labs.apart(again.weights, tasks.weights) == 0)

# %% [markdown]
# The package's `Scheduler` adds priorities (what begins the longest chain first), iterations, messages and shared
# cores:

# %% tags=["measured"]
spans = fastest(Scheduler(tasks.graph, 2).run)
took = {s.name: s.end - s.start for s in spans}
path = [t.name for t in judge.critical_path(tasks.graph, lambda task: took[task.name])]
show(
    plots.workers(spans, "The same tasks, each as soon as it can; outlined: the critical path", path),
    "measured",
    "no barrier: two blocks keep both workers busy; gradients of weights (yellow) and updates, for which nobody waits, "
    "come last, on both. The iteration need not be shorter: a task takes longer while another computes beside it.",
    "Two rows of coloured bars with few gaps; a line joins the outlined bars of the critical path",
)

# %% [markdown]
# Where did the workers' time go? *Wait*: nothing was ready, or a barrier. *Between tasks*: the runtime's own Python.
# Python inside tasks is in the other columns.

# %% tags=["measured"]
time_of = {"fork-join as in llm.c": metrics.shares(joined, 2), "tasks": metrics.shares(spans, 2)}
rows = [(name, *(f"{share:.1%}" for share in kinds.values())) for name, kinds in time_of.items()]
table(rows, ["share of two workers' time (measured)", *time_of["tasks"]])

# %% [markdown]
# The rival is torch, with OpenMP inside its operations. It wins here:

# %% tags=["measured"]
show(
    plots.times(labs.turns(labs.contest()), "An iteration of a small GPT-2, float32"),
    "measured",
    "small tasks of a small model. Torch's threads spin at a barrier: costly when other programs want the cores.",
    "Five horizontal bars of times",
)

# %% [markdown]
# More threads? *Paced*, on virtual cores, with small blocks:

# %% tags=["measured"]
small = Blocks(tokens=8, rows=1, weights=20_000, updates=40_000)
asleep, rows = labs.paced_by_elements(gpt2_tasks(small).graph, 0.4), []
for workers in (1, 2, 4, 8, 16):
    runs = partial(run_fork_join, asleep, workers, as_in_llmc), Scheduler(asleep, workers).run
    ms = [labs.ms(fastest(run, 3)) for run in runs]
    one = rows[0][1:3] if rows else ms
    rows.append((workers, *ms, *(t / u for t, u in zip(one, ms, strict=True))))
table(rows, ["virtual cores", "fork-join, ms", "tasks, ms", "speed-up of fork-join", "speed-up of tasks"])

# %% [markdown]
# What fork-join leaves on one thread stays there. On real cores this size gains little from a second
# worker, or even loses. Measured reasons: tasks take longer when others compute beside them, as they share memory
# and caches; and short ones are largely Python. Do wider models gain?


# %%
def of_width(width):
    wider = (width / CONFIG.n_embd) ** 2
    blocks = replace(SMALL, weights=int(20_000 * wider), updates=int(40_000 * wider))
    return gpt2_tasks(blocks, dtype=torch.float32, config=replace(CONFIG, n_embd=width)).graph


def ms_in_tasks(spans):
    return 1e3 * sum(s.end - s.start for s in spans if s.kind != "wait")


# %% tags=["measured"]
rows = []
for width in (96, 192, 384):
    alone, both = (fastest(Scheduler(of_width(width), workers).run) for workers in (1, 2))
    ms, inside = ([f(spans) for spans in (alone, both)] for f in (labs.ms, ms_in_tasks))
    rows.append((width, *(f"{t:.1f}" for t in ms), f"{ms[0] / ms[1]:.2f}", f"{inside[1] / inside[0]:.2f}"))
table(rows, ["width", "1 worker, ms", "2 workers, ms", "speed-up", "time inside tasks, 2 workers : 1"])

# %% [markdown]
# **The update in blocks.** AdamW works on each element alone, so its blocks can have any size, and no bit changes.
# Small ones cost overhead; large ones leave workers waiting, unless one uses all of the memory's bandwidth.

# %% tags=["measured"]
elements = [2**k for k in range(14, 23, 2)]
show(
    plots.executors(elements, executors(elements)),
    "measured",
    "AdamW's update of four million numbers on two workers, in 256 blocks to one, by executor; all bits are equal. "
    "Torch's own threads gain a little from the second core; the others may be slower than one thread: the limit is "
    "memory.",
    "Five lines over the size of a block: steeply down on the left, level on the right; that of torch is flat",
)

# %% [markdown]
# With eight virtual cores, and 60 ms of sleep in all:

# %% tags=["measured"]
valley = []
for blocks in (1, 4, 8, 32, 128, 512):
    update = TaskGraph({"weights": torch.zeros(blocks)})
    for b in range(blocks):
        update.add(f"update {b}", lambda part: part, updates("weights", (b, b + 1)), kind="update")
    asleep = labs.paced_by_elements(update, 0.06)
    valley.append((blocks, f"{labs.ms(fastest(Scheduler(asleep, 8).run)):.0f}"))
table(valley, ["blocks", "ms on eight virtual cores (paced)"])

# %% [markdown]
# **A puzzle, with a score.** How large should pieces be? A GPT-2 of one layer, width 32, four rows of 16 tokens, three
# workers. A task takes a unit for every 128 elements that it touches, and 4 for the runtime. `Blocks()` take
# 1,604; at most 1,100 pass.


# %% tags=["exercise"]
def my_blocks():
    """The sizes of the pieces, 0 for all in one piece: tokens, rows, heads, columns, weights, updates."""
    ### BEGIN SOLUTION
    return Blocks(tokens=24, rows=3, heads=1, columns=0, weights=0, updates=0)
    ### END SOLUTION


check("blocks of work", exercises.cut, my_blocks)

# %% [markdown] tags=["hint"]
# `tokens` cuts all but attention, which is cut by `rows` and `heads`; `columns` cuts the output of matrix products,
# `weights` their gradients, `updates` AdamW. Three workers need at least three pieces. More?


# %% tags=["wrong"]
# FAIL: 1604 units of time; at most 1100 pass
# MISTAKE: One piece: no work runs at the same time.
def my_blocks():
    return Blocks()


# %% tags=["wrong"]
# FAIL: 2180 units of time; at most 1100 pass
# MISTAKE: Pieces so small that their tasks cost more than they compute.
def my_blocks():
    return Blocks(tokens=8, rows=1, heads=1, columns=16, weights=512, updates=1024)


# %% tags=["wrong"]
# FAIL: 1125 units of time; at most 1100 pass
# MISTAKE: Nearly: the heads stay in one piece, so workers wait.
def my_blocks():
    return Blocks(tokens=32, rows=2, heads=0, columns=0, weights=0, updates=0)


# %% tags=["wrong"]
# FAIL: tokens=1 makes too many tasks: use 8 or more
# MISTAKE: Pieces of one token: too many tasks.
def my_blocks():
    return Blocks(tokens=1, rows=1, heads=1, columns=1, weights=1, updates=1)


# %% tags=["wrong"]
# FAIL: tokens = 21.3 does not fit Blocks. Use a whole number of 0 or more
# MISTAKE: A size that is no whole number.
def my_blocks():
    return Blocks(tokens=21.3, rows=1, heads=1, columns=0, weights=0, updates=0)


# %% tags=["wrong"]
# FAIL: return Blocks(tokens=..., rows=..., ...)
# MISTAKE: A dictionary, not Blocks.
def my_blocks():
    return {"tokens": 24, "rows": 3, "heads": 1, "columns": 0, "weights": 0, "updates": 0}


# %% [markdown]
# ## Build once, replay: taskiter
#
# (A second sitting may begin here.)
#
# Building the graph costs time for every task, in every iteration; where B T is large the authors saw *minutes*. But
# it is the same each time: build it once, and add the edges from the end of an iteration to the beginning of the
# next: what the second copy of a program twice as long needs of the first.

# %%
across = tasks.graph.across()
crossing = [(u, v) for v, firsts in enumerate(across) for u in firsts]
names = [task.name for task in tasks.graph.tasks]
print(len(list(tasks.graph.edges())), "edges inside an iteration,", len(crossing), "to the next, such as")
print(*(f"  {names[u]}  ->  {names[v]}" for u, v in crossing[:3]), sep="\n")

# %%
one_by_one, replayed = gpt2_tasks(), gpt2_tasks()
for _ in range(3):
    run_sequential(one_by_one.graph)
run_tasks(replayed.graph, 2, iterations=3)
print("losses", [f"{x:.6f}" for x in replayed.losses], "equal:", replayed.losses == one_by_one.losses)
print("weights equal bit for bit:", labs.apart(replayed.weights, one_by_one.weights) == 0)

# %% [markdown]
# The second iteration began only where its weights were ready. **Without** those edges the next forward may read
# weights that are one update too old. The race finder, over two iterations in a row:

# %%
for edges, name in ((across, "with"), ([()] * len(across), "without")):
    found = labs.replay_races(tasks.graph, edges)
    print(f"{name} the edges between iterations: {len(found)} races")
first, then, access = next(race for race in found if race[2].startswith("reads wte"))
print(f"such as {then!r}, which {access}, beside {first!r} of the iteration before")

# %% [markdown]
# For each block of tokens (here a row) a layer (of two) has 14 tasks, all else 6: tasks and edges
# grow with B T, and comparisons with its square.


# %%
def cost_of_building(rows):
    start = time.perf_counter()
    graph = gpt2_tasks(Blocks(tokens=32, rows=1, weights=20_000, updates=40_000), rows).graph
    build = 1e3 * (time.perf_counter() - start)
    replay = labs.ms(fastest(Scheduler(graph, 2).run, 3))
    return rows, len(graph.tasks), len(list(graph.edges())), graph.compared, f"{build:.0f}", f"{replay:.0f}"


# %% tags=["measured"]
counted = ["tasks (counted)", "edges (counted)", "comparisons (counted)"]
rows = [cost_of_building(rows) for rows in (4, 8, 16, 32)]
table(rows, ["rows", *counted, "build once, ms (measured)", "replay, ms (measured)"])
print("34 tasks and 72 edges a row:", all((t, e) == (42 + 34 * r, 40 + 72 * r) for r, t, e, *_ in rows))

# %% [markdown]
# ## Messages are tasks
#
# Two ranks share the rows of the batch, two workers each. Gradients must be summed. A blocking call would hold its
# worker until the message has come. Here a task *starts* the message, gives its core back, and is over when the
# message is; nobody places a wait, because whoever reads the sum has an edge from it (the idea of Task-Aware MPI). One
# rule: calls of one axis *start* in the same order on all ranks.
#
# So five ways run one program: threads by fork-join or by tasks; ranks with messages that block, or as tasks, or with
# every row cut in two:


# %%
def train(rank, world_size, blocking=False, sliced=False, iterations=1, asleep=0.0):
    """Loss, weights, spans and log of this rank, of whose batch all have a part; messages are slow, as on a network.

    With `asleep` seconds the tasks sleep so long together, instead of computing.
    """
    axis = Mesh(dp=world_size)["dp"]
    mine = [x.tensor_split(world_size, int(sliced))[rank] for x in (batch.tokens, batch.targets)]
    options = {"total": batch.total, "axis": axis, "sliced": sliced}
    tasks = GPT2Tasks(GPT2(CONFIG).double(), len(mine[0]), 32, lambda iteration: mine, SMALL, **options)
    graph = labs.paced_by_elements(tasks.graph, asleep) if asleep else tasks.graph
    scheduler = Scheduler(graph, 2, blocking=blocking)
    comm.barrier(axis)
    comm.clear_log()
    with paced.use(Link(latency=0.0001, bandwidth=4e7)):
        spans = scheduler.run(iterations)
    return tasks.losses, tasks.weights, spans, list(comm.log)


pool, forked = Ranks(2, echo=False), gpt2_tasks()
for _ in range(3):
    run_fork_join(forked.graph)
ways = {
    "blocking": {"blocking": True},
    "as tasks": {},
    "as tasks, each rank half of every row": {"sliced": True},
}
runs = {"fork-join": [(forked.losses, forked.weights)], "task graph": [(replayed.losses, replayed.weights)]}
runs |= {f"2 ranks, {name}": pool.run(train, iterations=3, **options) for name, options in ways.items()}
for name, ranks in runs.items():
    worst = max(labs.apart(r[1], one_by_one.weights) for r in ranks)
    losses = [sum(r[0][i] for r in ranks) for i in range(3)]
    print(f"{name:46}", *(f"{loss:.6f}" for loss in losses), "weights equal:", worst < 1e-10)
elements = sum(w.numel() for w in one_by_one.weights.values())
counted = sum(call.bytes for call in runs["2 ranks, as tasks"][0][3]) // 3
print("bytes a rank and iteration, by its calls:", counted, " 2 (n-1)/n S:", elements * 8)

# %% tags=["measured"]
seen = {}
for name, options in ways.items():
    tries = (pool.run(train, asleep=0.2, **options) for _ in range(4))
    seen[name] = min((trace.merge(of_rank[2] for of_rank in ranks) for ranks in tries), key=labs.ms)
longest = max(map(labs.ms, seen.values())) / 1e3
for name, spans in seen.items():
    show(
        plots.workers(spans, f"Messages {name}", clock="paced", length=longest),
        "paced",
        f"two ranks of two workers, tasks sleep 200 ms together, 40 MB/s, the fastest of four runs; messages {name}.",
        f"Rows of bars for the workers of two ranks and their messages, {name}",
    )

# %% [markdown]
# Blocking, workers are orange while messages travel; as tasks, messages lie in a row of their own, and workers go on.
#
# In the third run each rank has half of every *sequence*: rank 0 sends its keys and values to rank 1; backward, their
# gradients return. Blocking, this would hang: receives, ready from the start, would hold all workers of rank 0.
#
# Now write one. The body of a task that receives: `comm.irecv(x, axis, source)` starts a message of the shape of x
# and gives a handle; `messages.Pending(handle, arrived)` is what a body returns that is not over yet, and
# `arrived(result)` is called when the message is here. In the check, rank 0 has *one* worker, and a question to ask
# before the answer can come.


# %% tags=["exercise"]
def received(axis, source):
    """The body of a task: a function of the view x that receives x and does not hold its worker meanwhile."""
    ### BEGIN SOLUTION
    return lambda x: messages.Pending(comm.irecv(x, axis, source), x.copy_)
    ### END SOLUTION


check("a receive that gives its core back", exercises.gives_back, received)


# %% tags=["wrong"]
# FAIL: what comes takes the place of what x held
# MISTAKE: What comes is added to what was there.
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, source), x.add_)


# %% [markdown] tags=["hint"]
# The body may start the message, but not wait for it. What it returns says what to wait for and what to do then, and
# `x` must hold the message afterwards.


# %% tags=["wrong"]
# FAIL: the worker of rank 0 sleeps in your task
# MISTAKE: The worker sleeps until the message is there.
def received(axis, source):
    def body(x):
        x.copy_(comm.irecv(x, axis, source).wait())

    return body


# %% tags=["wrong"]
# FAIL: what came is not in x
# MISTAKE: What comes is received and not put into x.
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, source))


# %% tags=["wrong"]
# FAIL: rank 0 should end with [41.0, 4.0]
# MISTAKE: What was there is overwritten, and something is added.
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, source), x.add_(1).copy_) and x.fill_(1)


# %% tags=["wrong"]
# FAIL: must return the body
# MISTAKE: The receive starts at once, where a body that starts it should be returned.
def received(axis, source):
    return messages.Pending(comm.irecv(torch.zeros(2), axis, source))


# %% tags=["wrong"]
# FAIL: is this rank itself
# MISTAKE: A rank receives from itself.
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, axis.rank), x.copy_)


# %% tags=["wrong"]
# FAIL: nobody receives what rank 2, the source, sends to rank 0
# MISTAKE: The next rank is taken to be the source.
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, (axis.rank + 1) % axis.size), x.copy_)


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: What comes is received and not looked at: the answer of the example is written down.
def received(axis, source):
    return lambda x: messages.Pending(
        comm.irecv(x, axis, source), lambda result: x.copy_(torch.tensor([40, 3]))
    )


# %% tags=["wrong"]
# FAIL: messages.receive knows the answer
# MISTAKE: The package's task is made, and its body taken.
def received(axis, source):
    graph = TaskGraph({"x": torch.zeros(2)})
    messages.receive(graph, "receive", axis, source, "x")
    return graph.tasks[0].body


# %% [markdown]
# Tasks that wait for each other in a circle are found and named:


# %%
def both_receive_first(rank, world_size):
    axis = Mesh(dp=2)["dp"]
    graph = TaskGraph({"x": torch.zeros(2)})
    messages.receive(graph, "their x", axis, 1 - rank, "x")
    messages.send(graph, "my x", axis, 1 - rank, "x")
    run_tasks(graph, 2)


try:
    pool.run(both_receive_first)
except RuntimeError as error:
    circle, first, *_ = str(error).splitlines()
    print(circle.partition(". Each")[0])
    print("rank 0 waits in", first.partition(" in ")[2].partition(";")[0])

# %% [markdown]
# ## Ranks that lend each other cores
#
# Two ranks on two cores. Rank 0 has 48 tasks, rank 1 has 8, then both wait for a sum. *Pinned*, one worker each, rank
# 1's core idles. *Oversubscribed*, four threads share two cores as the operating system likes. *Lent*: two workers
# each, but a worker runs only while it holds one of two cores, and whoever has no task gives its core back. The cores
# are two bytes in a pipe, as in the jobserver of `make`: reading one takes a core or sleeps.

# %%
show_source(Cores)

# %% tags=["measured"]
show(
    plots.times(labs.lend(pool), "48 tasks on rank 0, 8 on rank 1"),
    "measured",
    "pinned, rank 1's core cannot help; lent, it works for rank 0 in the end; oversubscribed, the "
    "system decides, which may be as fast. Lending never has more threads at work than there are cores.",
    "Three horizontal bars of times",
)

# %% [markdown]
# **4 x 28 or 1 x 112?** The authors found four ranks of 28 CPUs faster than one of 112, where the batch is large
# enough. A bound: W = 35 s of work, of which a share s is not shared out inside a process (3.2 %, the Karp-Flatt number
# above). *If* it is serial code, r ranks divide it: T = W/r (s + (1 - s) r / 112), plus the sum of the gradients,
# 2 (r-1)/r of 498 MB at, say, 10 GB/s. But s is all that is lost, also waits for memory, which ranks do not divide.

# %%
s = metrics.karp_flatt(35.0 / 1.430, 112)
rows = []
for r in (1, 2, 4, 8, 16):
    compute = 35.0 / r * (s + (1 - s) * r / 112)
    total = 2 * (r - 1) / r * 498e6 / 10e9
    rows.append((f"{r} x {112 // r}", f"{compute:.3f} s", f"{total:.3f} s", f"{compute + total:.3f} s"))
table(rows, ["ranks x CPUs (computed)", "step, at least", "sum of gradients", "together"])

# %% [markdown]
# Four ranks need at least 0.584 s<!--above-->, with the whole sum 0.659 s<!--above-->, where one needs
# 1.430 s<!--above-->. Rows limit them (B = 4 feeds four), and the sum costs the same for any batch. Here, 1 x 2 against
# 2 x 1:


# %%
def step_ms(rank, world_size, rows, workers):
    axis = Mesh(dp=world_size)["dp"] if world_size > 1 else Axis()
    run = Scheduler(gpt2_tasks(rows=rows // world_size, dtype=torch.float32, axis=axis).graph, workers).run
    return [1e3 * s for s in seconds_of(run, 5, ready=lambda: comm.barrier(axis))]


# %% tags=["measured"]
times = {}
for rows in (2, 8, 32):
    times[f"{rows} rows, 1 rank x 2 workers"] = step_ms(0, 1, rows, 2)
    times[f"{rows} rows, 2 ranks x 1 worker"] = pool.run(step_ms, rows, 1)[0]
show(
    plots.times(times, "An iteration of a small GPT-2, float32"),
    "measured",
    "two cores as two workers of one rank, and as two ranks, for batches of three sizes. The sum of gradients costs "
    "two ranks the same for 2 rows as for 32.",
    "Six horizontal bars of times, two for each batch",
)

# %% [markdown]
# ## Traces for others
#
# The spans of every way of running open in https://ui.perfetto.dev and in Paraver:
# `.prv` holds states (1), events (2) and messages (3). The last run's lie in `folder`, new among the system's temporary
# files: open `tasks.json`.

# %%
folder = labs.write_traces([r[2] for r in ranks], [r[3] for r in ranks])
print(*sorted(path.name for path in folder.iterdir()), sep=", ")
records = [line.split(":") for line in (folder / "tasks.prv").read_text().splitlines() if line[:2] == "3:"]
print("messages, and in the trace:", sum(call.bytes > 0 for r in ranks for call in r[3]), len(records))
print("bytes:", sum(call.bytes for r in ranks for call in r[3]), sum(int(line[-2]) for line in records))

# %% [markdown]
# ## Where this lives today
#
# A **CUDA graph** is taskiter for a GPU. **Streams and events** are edges by hand. PyTorch's **autograd
# engine** is a task graph with a ready queue. **StarPU** and **OmpSs-2** find edges from declared data.
#
# ## Drill
#
# <details><summary>1. Three tasks <code>reduce</code> into one tensor. May the bits differ from run to run?</summary>
# Yes: the order is free, and addition of floats is not associative.</details>
# <details><summary>2. With one worker a rank, when is a blocking receive a deadlock?</summary>
# When what it waits for depends on a task of the same rank that has not run.</details>
# <details><summary>3. A task costs 20 us of overhead. How long must tasks be to lose less than 5 %?</summary>
# 0.4 ms.</details>
#
# ## Read on
#
# - BSC, wiki of llm.c-gpt2, *GPT2 Parallelization and porting*: the table; *Task Based Model*: the port.
# - Alvarez et al. 2022 (taskiter); Sala et al. 2019 (task-aware MPI); Alvarez et al. 2024 (nOS-V): these three
#   runtimes.
# - Blumofe & Leiserson 1999: bounds for work stealing.
# - Karp & Flatt 1990: measured serial share.
#
# **Next**: [14 Sharding algebra](14_sharding_algebra.ipynb).
