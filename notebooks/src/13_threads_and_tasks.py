# %% [markdown]
# # 13 Threads and tasks
#
# **The one-minute version.** Inside one process the cores share memory, so nothing needs to be sent. Still most of
# them are idle most of the time. The usual way, *fork-join*, cuts every loop among the threads and lets all of them
# meet at its end, thousands of times in a step. The other way is to let each piece of work, a **task**, say which
# part of which tensor it reads and writes. From that the order follows by itself, with no edge too many, and a task
# runs as soon as what it needs is there, whether a layer is "over" or not. The same graph runs again in every
# iteration, holds messages between ranks as tasks like any other, and lets a rank that waits lend its cores.
#
# You will declare what tasks touch, find the edges that are needless, write the rule by which a scheduler lets tasks
# go, train GPT-2 with it, forward and backward, **equal to autograd**, and turn a receive into a task that gives its
# core back.

# %% tags=["setup"]
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import STATUS, check
from gpt2lab.lessons.exercises import tasks as exercises
from gpt2lab.lessons.labs.tasks import audit, simulate_tasks, torch_threads, turns, uneven
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.planner import metrics
from gpt2lab.planner.links import Link
from gpt2lab.plots import tasks as plots
from gpt2lab.plots.paraver import save_paraver
from gpt2lab.ranks import comm, paced, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.tasks import check as judge
from gpt2lab.tasks import messages
from gpt2lab.tasks.cores import Cores
from gpt2lab.tasks.gpt2 import Blocks, GPT2Tasks
from gpt2lab.tasks.graph import TaskGraph, reads, reduces, updates, writes
from gpt2lab.tasks.runtime import run_fork_join, run_sequential
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

config = GPT2Config(vocab_size=512, n_positions=32, n_layer=2, n_head=4, n_embd=96)
batch = example_batch(config, rows=4, length=32)
small = Blocks(tokens=64, rows=2, weights=20_000, updates=40_000)


def gpt2_tasks(blocks=small, **options):
    """One iteration of GPT-2 in float64 as tasks, always the same weights and batch."""
    give = lambda iteration: (batch.tokens, batch.targets)
    return GPT2Tasks(GPT2(config).double(), 4, 32, give, blocks, total=batch.total, **options)


# %% [markdown]
# ## Fork-join, and who is idle
#
# A port of llm.c at the Barcelona Supercomputing Center began with OpenMP: a `parallel for` before each matrix product
# and before attention's forward; everything else, as in llm.c, ran on one thread. With 112 CPUs:

# %%
rows = []
for name, seconds in {"sequential": 35.0, "OpenMP": 1.430, "OpenMP over nOS-V": 1.616}.items():
    s = metrics.speedup(35.0, seconds)
    fraction = f"{metrics.karp_flatt(s, 112):.1%}" if s > 1 else ""
    rows.append((name, f"{seconds:g} s", f"{s:.1f}", f"{metrics.efficiency(s, 112):.2f}", fraction))
table(rows, ["an iteration (from a paper)", "time", "speed-up", "efficiency", "serial share (Karp-Flatt)"])

# %% [markdown]
# The authors' trace showed "nearly half of the threads working". (*nOS-V* is a threading library through which
# processes share one scheduler; more of that at the end.) Here is the same on two workers: real threads, GPT-2, and
# only the loops that llm.c makes parallel. torch releases Python's lock inside its operations, so threads of one
# Python process do compute at the same time.


# %%
def as_in_llmc(loop):
    """Whether llm.c runs this loop in parallel: matrix products, and attention's forward."""
    return any(word in loop for word in ("attn.c_", "mlp.c_", "head")) or loop.startswith("attention")


# %%
def fastest(run, tries=6):
    """The spans of the fastest of some runs: the one that other programs disturbed least."""
    length = lambda spans: max(s.end for s in spans) - min(s.start for s in spans)
    return min((run() for _ in range(tries)), key=length)


# %% tags=["measured"]
tasks = gpt2_tasks()
show(
    plots.workers(
        fastest(lambda: run_fork_join(tasks.graph, 2, as_in_llmc)), "Fork-join, parallel where llm.c is"
    ),
    "measured",
    "one iteration on two workers, the fastest of six; a column of bars is a loop, and worker 1 waits at its end.",
    "Two rows of coloured bars with many gaps in the second; below, a line that jumps between 1 and 2 at work",
)

# %% [markdown]
# **Three reasons to be idle:** loops that nobody cut (Amdahl), loops whose pieces are unequal, and a *barrier* at the
# end of each. The first is mended by writing more pragmas. The others belong to fork-join.
#
# ## Say what you touch
#
# A task is a function and a tuple of accesses: (how, tensor, part).
#
# | the task | in OmpSs-2 | may overlap with |
# |---|---|---|
# | `reads` | in | other reads |
# | `writes`, `updates` | out, inout | nothing |
# | `reduces` (adds to) | commutative | other reduces, but one at a time |
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
# Nobody wrote these edges. `double 2:4` and `next x` have none, because their rows differ.
#
# Your turn. An MLP over blocks of tokens a:b, with a gradient of `w2` that is summed over the blocks:
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
# FAIL: 'gelu 0:2' has to wait for 'up 2:4'
def declare(task, a, b):
    return (updates("h"),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'gelu 0:2' changes h outside
def declare(task, a, b):
    return (reads("h", (a, b)),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'gelu 0:2' uses something that it does not declare to read
def declare(task, a, b):
    return (writes("h", (a, b)),) if task == "gelu" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: 'grad 2:4' has to wait for 'grad 0:2'
def declare(task, a, b):
    found = exercises.declared(task, a, b)
    return (*found[:2], updates("d")) if task == "grad" else found


# %% tags=["wrong"]
# FAIL: cannot compute with the parts
def declare(task, a, b):
    up = (reads("w1"), reads("x", (a, b)), writes("h", (a, b)))
    return up if task == "up" else exercises.declared(task, a, b)


# %% tags=["wrong"]
# FAIL: give a tuple of accesses
def declare(task, a, b):
    return {"up": "x w1 h", "gelu": "h", "down": "x h w2 y", "grad": "h y d"}[task].split()


# %% [markdown]
# Two checks stood behind that verdict. The *race finder* looks at every pair of accesses that conflict and asks
# whether a path of edges orders the two tasks. It believes the declarations. The *audit* does not: it runs each task
# among tensors filled with NaN wherever nothing was declared, and sees what comes out.

# %%
graph = exercises.mlp(exercises.declared)
print("races:", judge.races(graph), " audit:", audit(graph))
graph.add("peek", lambda y: y.add_(graph.tensors["x"]), updates("y"))
graph.add("scribble", lambda x: x.mul_(2), reads("x"))
print(*audit(graph), sep="\n")

# %% [markdown]
# ## As relaxed as possible
#
# The rule, written out: an edge from u to a later v where accesses overlap, unless both only read (or both reduce, or
# both are concurrent). Of all these edges many are implied by others.


# %%
def all_edges(graph):
    """For each task every earlier one that conflicts with it, in program order."""
    before = []
    for v in graph.tasks:
        conflict = lambda u, v=v: any(b.conflicts(a) for a in u.accesses for b in v.accesses)
        before.append(tuple(u.number for u in graph.tasks[: v.number] if conflict(u)))
    return before


every = all_edges(graph)
print(sum(map(len, every)), "conflicting pairs; the package keeps", len(list(graph.edges())), "edges")


# %% [markdown]
# Which edges can go? Those whose two tasks a longer way still orders. What is left is the *transitive reduction*:
# every edge of it is needed.


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


# %% tags=["wrong"]
# FAIL: can still go
def fewest(before):
    return before


# %% tags=["wrong"]
# FAIL: the edge (0, 3) can still go
def fewest(before):
    two = lambda u, firsts: any(u in before[w] for w in firsts)
    return [tuple(u for u in firsts if not two(u, firsts)) for firsts in before]


# %% tags=["wrong"]
# FAIL: nothing orders task
def fewest(before):
    return [firsts[-1:] for firsts in before]


# %% tags=["wrong"]
# FAIL: was no edge before
def fewest(before):
    return [(v - 1,) if v else () for v in range(len(before))]


# %% tags=["wrong"]
# FAIL: tasks go in
def fewest(before):
    return [firsts for firsts in exercises.reduced(before) if firsts]


# %% [markdown]
# The proof that none is too many: take any edge away, and the race finder names a race.

# %%
graph = exercises.mlp(exercises.declared)
for u, v in list(graph.edges())[:3]:
    fewer = [tuple(w for w in firsts if (w, x) != (u, v)) for x, firsts in enumerate(graph.before)]
    first, then, access = judge.races(graph, fewer)[0]
    print(f"without {u} -> {v}: {then!r} {access} beside {first!r}")

# %% [markdown]
# ## GPT-2 as tasks
#
# One whole iteration: load, forward, the loss, backward *by hand* (no autograd), AdamW. Blocks of tokens, of
# attention's rows and heads, of columns, of weights; you choose how large. The gradient of a weight is summed over
# the tokens *inside one task*, not by whoever comes first: sums in another order would give other bits.

# %%
show_source(GPT2Tasks._linear_backward)

# %%
tasks = gpt2_tasks()
run_sequential(tasks.graph)
model = GPT2(config).double()
(model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
worst = max(
    ((tasks.gradients[n] - p.grad).abs().max() / p.grad.abs().max()).item()
    for n, p in model.named_parameters()
)
print(len(tasks.graph.tasks), "tasks; gradients equal to autograd's:", worst < 1e-12)
print("races:", len(judge.races(tasks.graph)), " needless edges:", len(judge.needless(tasks.graph)))


# %% [markdown]
# How parallel is that? All work over the longest chain: T1 / Tinf, with cores without number. The cost of a task is
# here the number of elements that it touches.


# %%
def touched(task):
    """Elements that a task touches."""
    return sum(view.numel() for view in task.views)


def forward_only(block):
    """The forward of a one-layer GPT-2 on blocks of tokens, small enough to draw."""
    whole = GPT2Tasks(
        GPT2(GPT2Config(vocab_size=64, n_positions=8, n_layer=1, n_head=2, n_embd=16)), 2, 8, None, block
    )
    few = TaskGraph(whole.graph.tensors)
    for t in whole.graph.tasks:
        if t.kind in ("forward", "other"):
            few.add(t.name, t.body, *t.accesses, kind=t.kind)
    return few


drawn = forward_only(Blocks(tokens=8, rows=1))
show(
    plots.graph(
        drawn, judge.levels(drawn), judge.critical_path(drawn, touched), "Forward, two blocks of tokens"
    ),
    "computed",
    "each task stands right of what it needs; the two blocks never meet before the loss. Thick: the critical path.",
    "Dots in two rows joined by lines from left to right, that meet at the last dot",
)

# %%
cost = lambda task: touched(task) / 2e6  # ms: two elements a nanosecond


def by_block(tokens, cores=8, overhead=0.02):
    """(tokens, T1 / Tinf, overhead / work, simulated ms) of an iteration on virtual cores."""
    made = gpt2_tasks(
        Blocks(tokens=tokens, rows=max(1, tokens // 32), columns=0, weights=20_000, updates=20_000)
    )
    plan = simulate_tasks(made.graph, cores, cost, overhead)
    loss = overhead * len(plan) / judge.work(made.graph, cost)
    return tokens, judge.parallelism(made.graph, cost), loss, max(end for *_, end in plan)


explore(
    lambda overhead, cores: plots.grain(
        [by_block(n, cores, overhead / 1000) for n in (4, 8, 16, 32, 64, 128)],
        f"{cores} cores, {overhead} us a task",
    ),
    "simulated",
    "smaller blocks keep more cores busy and cost more overhead; here {cores} virtual cores, {overhead} us a task.",
    "Three curves over the block size: parallelism falls, overhead falls, time has a minimum",
    overhead=(0, 100, 20),
    cores=(1, 32, 8),
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


# %% tags=["wrong"]
# FAIL: was let go while task
def release(v, waits, after):
    return list(after[v])


# %% tags=["wrong"]
# FAIL: never runs
def release(v, waits, after):
    return [w for w in after[v] if waits[w] == 0]


# %% tags=["wrong"]
# FAIL: was let go twice
def release(v, waits, after):
    for w in after[v]:
        waits[w] -= 1
    return [w for w in range(v + 1, min(len(waits), v + 4)) if waits[w] == 0] if after[v] else []


# %% tags=["wrong"]
# FAIL: Look at after[v] alone
def release(v, waits, after):
    before = [w for w, n in enumerate(waits) if n == 0]
    for w in after[v]:
        waits[w] -= 1
    return [w for w, n in enumerate(waits) if n == 0 and w not in before]


# %% tags=["wrong"]
# FAIL: returned None
def release(v, waits, after):
    for w in after[v]:
        waits[w] -= 1


# %% tags=["setup"]
def mine(name, answer, instead):
    """Your answer to an exercise once it passes; until then the package's."""
    if STATUS.get(name) == "PASS":
        return answer
    print(f"(until {name!r} passes, this runs the package's)")
    return instead


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
                task.body(*task.views)  # no lock is held here, not even Python's
                with changed:
                    left -= 1
                    ready.extend(release(v, waits, after))
                    changed.notify_all()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


rule = mine("the ready rule", release, exercises.release)
for workers in (1, 2, 4):
    again = gpt2_tasks()
    my_scheduler(again.graph, workers, rule)
    same = all(torch.equal(again.weights[n], w) for n, w in tasks.weights.items())
    print(f"{workers} workers: the bits of program order after the update: {same}")

# %% [markdown]
# The package's `Scheduler` adds what follows below: priorities (what begins the longest chain first), iterations,
# messages, shared cores. Its trace, on the same two workers as before:

# %% tags=["measured"]
scheduler = Scheduler(tasks.graph, 2)
spans = fastest(scheduler.run)
path = [t.name for t in judge.critical_path(tasks.graph, touched)]
show(
    plots.workers(spans, "The same tasks, each as soon as it can; outlined: the critical path", path),
    "measured",
    "no barrier: gradients of weights (yellow) and updates fill what the chain of the backward leaves free.",
    "Two rows of coloured bars almost without gaps; below, a line that stays near 2 at work",
)

# %% [markdown]
# And in time. The honest rival is torch itself: its operations cut their own loops with OpenMP, fork-join inside.

# %% tags=["measured"]
small_model = GPT2(config)


def autograd_step():
    """Forward, backward and AdamW of torch."""
    (small_model.loss(small_model(batch.tokens), batch.targets) / batch.total).backward()
    optimizer.step()
    optimizer.zero_grad()


optimizer = torch.optim.AdamW(small_model.parameters(), fused=True)
give = lambda iteration: (batch.tokens, batch.targets)
graph = GPT2Tasks(small_model, 4, 32, give, small).graph
replay = Scheduler(graph, 2)
times = turns(
    {
        "tasks, one worker": lambda: run_sequential(graph),
        "fork-join as in llm.c": lambda: run_fork_join(graph, 2, as_in_llmc),
        "fork-join, every loop": lambda: run_fork_join(graph, 2),
        "tasks, two workers": lambda: replay.run(),
        "torch, 1 thread": torch_threads(autograd_step, 1),
        "torch, 2 threads": torch_threads(autograd_step, 2),
    }
)
show(
    plots.times(times, "An iteration of a small GPT-2, float32"),
    "measured",
    "this model is so small that a task takes tens of microseconds; `gpt2lab bench tasks` does GPT-2 itself.",
    "Six horizontal bars of times",
)

# %% [markdown]
# ## Build once, replay: taskiter
#
# Building the graph costs time for every task, in every iteration; with many blocks the authors saw *minutes*. But the
# graph is the same each time. So build it once, and add the edges from the end of an iteration to the beginning of the
# next: what the second copy of a program twice as long needs of the first.

# %%
across = tasks.graph.across()
crossing = [(u, v) for v, firsts in enumerate(across) for u in firsts]
names = [task.name for task in tasks.graph.tasks]
print(len(list(tasks.graph.edges())), "edges inside an iteration,", len(crossing), "to the next, such as")
print(*(f"  {names[u]}  ->  {names[v]}" for u, v in crossing[:3]), sep="\n")
print("any of them a barrier:", any(len(firsts) == len(names) for firsts in across))

# %%
one_by_one, replayed = gpt2_tasks(), gpt2_tasks()
for _ in range(3):
    run_sequential(one_by_one.graph)
run_tasks(replayed.graph, 2, iterations=3)
print("losses", [f"{x:.6f}" for x in replayed.losses], "equal:", replayed.losses == one_by_one.losses)
print(
    "weights equal bit for bit:",
    all(torch.equal(w, one_by_one.weights[n]) for n, w in replayed.weights.items()),
)

# %% [markdown]
# The losses show it: the second iteration began only where its weights were ready. **Without** those edges the next
# forward reads weights that are one update too old, here and there:


# %%
class Forgets(TaskGraph):
    """A graph that knows of no iteration but this one."""

    def across(self):
        return [()] * len(self.tasks)


wrong = gpt2_tasks()
wrong.graph.__class__ = Forgets
try:
    run_tasks(wrong.graph, 2, iterations=3)
    right = all(torch.equal(w, one_by_one.weights[n]) for n, w in wrong.weights.items())
except RuntimeError:
    right = False  # a task was counted ready twice, and another one never
print("right without the edges between iterations:", right)

# %% [markdown]
# How many tasks and edges, and what do they cost? For blocks of b tokens out of B T, a layer has 13 B T / b tasks over
# tokens besides attention, weights and updates, so tasks grow with B T, and building with them:

# %% tags=["measured"]
rows = []
for tokens in (64, 32, 16, 8):
    blocks = Blocks(tokens=tokens, rows=1, weights=20_000, updates=40_000)
    start = time.perf_counter()
    made = gpt2_tasks(blocks)
    build = 1e3 * (time.perf_counter() - start)
    scheduler = Scheduler(made.graph, 2)
    step = statistics.median(turns({"": scheduler.run}, 3)[""])
    edges = len(list(made.graph.edges()))
    rows.append((128 // tokens, len(made.graph.tasks), made.graph.conflicts, edges, build, step))
table(rows, ["blocks of tokens", "tasks", "conflicts", "edges", "build once, ms", "replay, ms"])

# %% [markdown]
# ## Messages are tasks
#
# Two ranks share the rows of the batch, two workers each. Gradients must be summed. A blocking call would hold its
# worker until the message has come. Here a task *starts* the message, gives its core back, and is over when the
# message is; nobody places a wait, because whoever reads the sum has an edge from it. (Task-aware MPI does this for
# OmpSs-2.) The one rule: calls of one axis *start* in the same order on all ranks. They end as they like.


# %%
def train(rank, world_size, blocking, iterations=1):
    """Loss, weights, spans and traffic of this rank; every message is delayed as on a slow network."""
    axis, rows = Mesh(dp=world_size)["dp"], batch.rows(rank, world_size)
    give = lambda iteration: (rows.tokens, rows.targets)
    model, n = GPT2(config).double(), len(rows.tokens)
    tasks = GPT2Tasks(model, n, 32, give, small, total=batch.total, axis=axis)
    scheduler = Scheduler(tasks.graph, 2, blocking=blocking)
    comm.barrier(axis)
    comm.clear_log()
    with paced.use(Link(latency=0.0005, bandwidth=1e8)):
        spans = scheduler.run(iterations)
    return tasks.losses, tasks.weights, spans, comm.traffic()["all_reduce", "dp"]


pool = Ranks(2, echo=False)
runs = {blocking: pool.run(train, blocking) for blocking in (True, False)}
serial = gpt2_tasks()
run_sequential(serial.graph)
for blocking, ranks in runs.items():
    worst = max(
        ((r[1][n] - w).abs().max() / w.abs().max()).item() for r in ranks for n, w in serial.weights.items()
    )
    loss = abs(sum(r[0][0] for r in ranks) - serial.losses[0])
    print("blocking:" if blocking else "as tasks:", "equal to one process:", worst < 1e-10 and loss < 1e-10)
elements = sum(w.numel() for w in serial.weights.values())
print("bytes a rank, counted:", runs[False][0][3][1], " computed, 2 (n-1)/n S:", elements * 8)

# %% tags=["measured"]
for blocking, ranks in runs.items():
    how = "blocking" if blocking else "as tasks"
    show(
        plots.workers(trace.merge(r[2] for r in ranks), f"Sums of gradients, {how}", clock="paced"),
        "paced",
        f"two ranks of two workers on a link of 100 MB/s; messages {how}.",
        f"Rows of bars for the workers of two ranks and their messages, {how}",
    )

# %% [markdown]
# Blocking, a worker's row is orange for as long as its message travels. As tasks, messages lie in a row of their own
# and the workers compute beside them.
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
# FAIL: the worker of rank 0 sleeps in your task
def received(axis, source):
    def body(x):
        x.copy_(comm.irecv(x, axis, source).wait())

    return body


# %% tags=["wrong"]
# FAIL: what came is not in x
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, source))


# %% tags=["wrong"]
# FAIL: rank 0 should end with 41
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, source), x.add_(1).copy_) and x.fill_(1)


# %% tags=["wrong"]
# FAIL: must return the body
def received(axis, source):
    return messages.Pending(comm.irecv(torch.zeros(2), axis, source))


# %% tags=["wrong"]
# FAIL: is this rank itself
def received(axis, source):
    return lambda x: messages.Pending(comm.irecv(x, axis, axis.rank), x.copy_)


# %% [markdown]
# When tasks wait for each other in a circle nothing can ever run; and that is found, with the names of the tasks:


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
    text = str(error)
    print("0 -> 1 -> 0" in text, "of task 'their x'" in text)

# %% [markdown]
# ## Ranks that lend each other cores
#
# Two ranks on two cores. Rank 0 has 48 tasks, rank 1 has 8, then both wait for a sum: uneven, as ranks are. *Pinned*,
# one worker each, rank 1's core idles. *Oversubscribed*, two workers each, four threads fight for two cores as the
# operating system likes. *Lent*: two workers each, but a worker runs only while it holds one of two cores, and
# whoever has no task gives its core back. The cores are two bytes in a pipe, as in the jobserver of `make`: reading
# one takes a core or sleeps.

# %%
show_source(Cores)

# %% tags=["measured"]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "cores")
    keep = Cores(path, 2)
    ways = {"pinned, 1 worker each": (1,), "oversubscribed, 2 each": (2,), "lent, 2 each": (2, path)}
    times = {name: [] for name in ways}
    for _ in range(2):
        for name, arguments in ways.items():
            times[name] += pool.run(uneven, *arguments)[0]
show(
    plots.times(times, "48 tasks on rank 0, 8 on rank 1"),
    "measured",
    "lending does what oversubscription does on two cores, without four threads fighting over their caches.",
    "Three horizontal bars of times; pinned is the longest",
)

# %% [markdown]
# **4 x 28 or 1 x 112?** The authors found four ranks of 28 CPUs faster than one of 112, where the batch is large
# enough. A model: a share s of a step is not parallel inside a process (3.2 %, from the table above), but with r
# ranks each has 1/r of the rows: T = W/r (s + (1 - s) r / 112), plus the sum of the gradients, 2 (r-1)/r of 498 MB
# at, say, 10 GB/s.

# %%
s = metrics.karp_flatt(35.0 / 1.430, 112)
rows = []
for r in (1, 2, 4, 8, 16):
    compute = 35.0 / r * (s + (1 - s) * r / 112)
    total = 2 * (r - 1) / r * 498e6 / 10e9
    rows.append((f"{r} x {112 // r}", f"{compute:.3f} s", f"{total:.3f} s", f"{compute + total:.3f} s"))
table(rows, ["ranks x CPUs (computed)", "step", "sum of gradients", "together"])

# %% [markdown]
# More ranks divide the serial share; rows limit them (B = 4 feeds four). With 2 cores here, one process of two workers
# and two ranks of one worker are nearly the same thing, as `gpt2lab bench tasks --all` shows.
#
# ## Traces for others
#
# Every way of running returns the same spans, one lane a worker. They open in https://ui.perfetto.dev, and in Paraver,
# the viewer that the authors use: `.prv` holds states (1), events (2) and messages (3), times in nanoseconds.

# %%
with tempfile.TemporaryDirectory() as folder:
    trace.save_chrome(spans, Path(folder, "tasks.json"))
    path = save_paraver(spans, Path(folder, "tasks.prv"))
    print(sorted(p.name for p in Path(folder).iterdir()))
    kinds = [line[0] for line in path.read_text().splitlines()[1:]]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
    print(path.with_suffix(".pcf").read_text().split("\n\n")[2])

# %% [markdown]
# ## Where this lives today
#
# A **CUDA graph** is taskiter for one GPU: captured once, replayed without the CPU. **Streams and events** are edges
# placed by hand. PyTorch's **autograd engine** is a task graph with a ready queue and one worker thread a device.
# **XLA** orders a whole step ahead of time, messages included. **StarPU**, **PaRSEC** and **OmpSs-2** find edges from
# declared data, as here. DDP's overlap of sums and backward (lesson 04) is the special case that was wired by hand.
#
# ## Drill
#
# 1. *A task reads rows 0:4, a later one writes 3:6, a third reads 4:6. Which edges?* First to second, second to third;
#    the third shares nothing with the first.
# 2. *Why does a barrier cost more with more threads?* All wait for the slowest, and the expected slowest grows.
# 3. *T1 = 100 ms, Tinf = 20 ms. The best time on 4 cores, and on 16?* At least 25 ms; at least 20 ms.
# 4. *Three tasks `reduce` into one tensor. May the bits differ from run to run?* Yes: the order is free, and floating
#    point addition is not associative. GPT-2's gradients here therefore never use it.
# 5. *Which edge keeps the next iteration from reading stale weights?* From each update to the first readers.
# 6. *A receive blocks a worker, with one worker a rank. When is that a deadlock?* When what it waits for depends on a
#    task of the same rank that has not run.
# 7. *Each task costs 20 us of overhead. How long must tasks be to lose less than 5 %?* 0.4 ms.
#
# **Sources:** the wiki of the port of llm.c (fork join model, task based model, runtime and performances); Alvarez et
# al. 2022 (taskiter); Sala et al. 2019 (task-aware MPI); Alvarez et al. 2024 (nOS-V); Blumofe & Leiserson 1999 (work
# and span); Karp & Flatt 1990. Next: lesson 14, where the layouts themselves are data.
