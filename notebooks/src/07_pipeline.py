# %% [markdown]
# # 07 Pipeline parallelism
#
# **The one-minute version.** Give the first layers of GPT-2 to rank 0, the next ones to rank 1, and so on. Each
# rank now holds only its share of the weights, and only activations travel, one (rows, tokens, width) tensor per
# border. But while rank 1 works on a batch, rank 0 has nothing to do. So cut the batch into *micro-batches* that
# follow each other through the ranks. The time in which a rank waits is the **bubble**; what decides how much
# memory is needed is the **order** of forwards and backwards.
#
# You will write a pipeline, forward and backward, run it on live ranks in an order of your own, and find its
# gradients equal to the serial ones, all but the embedding's **bit for bit**.

# %% tags=["setup"]
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch

from gpt2lab.benchmarks.pipeline import Stage
from gpt2lab.generate import generate
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import pipeline as exercises
from gpt2lab.lessons.labs import pipeline as lab
from gpt2lab.lessons.labs import recorded
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, PRESETS, GPT2Config
from gpt2lab.parallel.accumulate import Accumulate, Alone
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.pipeline.generate import generate_streams
from gpt2lab.parallel.pipeline.mailbox import Mailbox
from gpt2lab.parallel.pipeline.stages import cut_layers
from gpt2lab.planner.metrics import intersection
from gpt2lab.plots import schedule as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.processes.launch import RankFailed, Ranks, launch
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.schedules import Cost, ScheduleError, draw, make, simulate
from gpt2lab.schedules import check as check_schedule
from gpt2lab.verify import verify

# %% tags=["setup"]
config = GPT2Config(vocab_size=512, n_positions=16, n_layer=4, n_head=4, n_embd=64)
torch.set_num_threads(1)  # as on the ranks, so that sums are added in the same order


def gpt2():
    """The same GPT-2 on every rank, in float64, where equal can mean equal."""
    return GPT2(config).double()


# %% [markdown]
# ## Cutting the model
#
# A *stage* is a run of consecutive layers. Stages should take equally long, because the slowest sets the pace. The
# embedding (a look-up) is nearly free, the head is not: multiplying by 50257 token vectors costs as much as several
# blocks. So the last stage gets fewer of them.

# %%
rows = []
for name in ("gpt2", "gpt2-medium", "gpt2-xl"):
    for stages in (2, 4, 8):
        counts = [len(r) for r in cut_layers(PRESETS[name], stages)]
        rows.append((name, stages, " ".join(map(str, counts))))
table(rows, ["model", "stages", "blocks on each stage (the first embeds, the last has the head)"])

# %% [markdown]
# Here is one stage, by hand. Blocks keep their absolute numbers; the first stage begins with tokens, the last one
# ends in the loss: the *sum* of token losses over the number of targets of the **whole** batch.


# %% tags=["setup"]
def stage(model, rank, world_size, x, micro):
    """Tokens or x (b, T, C) in; y (b, T, C), or this micro-batch's part of the loss, out."""
    if rank == 0:
        x = model.embed(micro.tokens, micro.positions)
    for layer in torch.arange(config.n_layer).tensor_split(world_size)[rank].tolist():
        x = model.h[str(layer)](x, micro.positions)
    if rank == world_size - 1:
        return model.loss(model.head(x), micro.targets) / micro.total
    return x


# %% tags=["slide"]
def forward_only(rank, world_size):
    model, axis = gpt2(), Mesh(pp=world_size)["pp"]
    batch = example_batch(config, rows=8, length=16)
    x = torch.empty(8, 16, config.n_embd, dtype=torch.float64)
    with torch.no_grad():
        if rank > 0:
            x = comm.recv(x, axis, rank - 1)
        y = stage(model, rank, world_size, x, batch)
        if rank < world_size - 1:
            comm.send(y, axis, rank + 1)
            return f"sent {tuple(y.shape)}"
    return y


batch = example_batch(config, rows=8, length=16)
with torch.no_grad():
    model = gpt2()
    serial = model.loss(model(batch.tokens), batch.targets) / batch.total
*sent, loss = launch(forward_only, ranks=4)
print(sent, "then the loss", f"{loss:.6f};", "serial:", f"{serial:.6f};", "equal:", torch.equal(loss, serial))

# %% [markdown]
# Right, and useless: four ranks, one of them busy at any time. Blue is forward, green backward (twice as long), white
# is waiting. Under each rank's row stands what it must *hold*: the activations of micro-batches whose backward has not
# come yet, with a mark at the peak.

# %%
naive = simulate(make("naive", 4, 4))
show(
    plots.schedule(naive, "One micro-batch at a time"),
    "simulated",
    f"four ranks, four micro-batches, one after the other: {float(naive.bubble):.0%} of the time is idle.",
    "Four rows of boxes along a staircase; at any moment only one rank has a box",
)

# %% [markdown]
# ## GPipe, and the bubble
#
# GPipe (Huang et al. 2019) sends all micro-batches forward, then all backward.

# %%
gpipe = simulate(make("gpipe", 4, 8))
show(
    plots.schedule(gpipe, "GPipe"),
    "simulated",
    "all forwards, then all backwards; every rank holds all eight activations before it frees the first.",
    "Four rows; two parallelograms of forwards and of backwards, memory rising to eight on each rank",
)

# %% [markdown]
# **Derive it.** A rank works m times on forward and m times on backward: $m\,(t_f+t_b)$. The last rank starts p - 1
# forwards late, and the first rank ends p - 1 backwards after the last one. So the makespan is
# $(m+p-1)(t_f+t_b)$, whatever $t_f$ and $t_b$ are, and the share of it that is idle follows. (Narayanan et al. divide
# by the *ideal* time $m\,(t_f+t_b)$ instead and call that the bubble. Say which one you mean.)


# %% tags=["exercise"]
def bubble(p, m):
    """The idle share of the makespan: p ranks, m micro-batches."""
    ### BEGIN SOLUTION
    return (p - 1) / (m + p - 1)
    ### END SOLUTION


check("bubble of GPipe", exercises.bubble, bubble)

# %% [markdown] tags=["hint"]
# The makespan stands above the exercise. How much of it is a rank at work?


# %% tags=["wrong"]
# FAIL: 2 ranks, 2 micro-batches: expected 0.333333, got 0.5
# MISTAKE: The idle time is divided by the busy time, not by the makespan.
def bubble(p, m):
    return (p - 1) / m


# %% tags=["wrong"]
# FAIL: returned None
# MISTAKE: The result is computed and not returned.
def bubble(p, m):
    (p - 1) / (m + p - 1)


# %% tags=["wrong"]
# FAIL: 2 ranks, 2 micro-batches: expected 0.333333, got 0.25
# MISTAKE: The makespan is taken to be one slot longer than it is.
def bubble(p, m):
    return (p - 1) / (m + p)


# %% tags=["wrong"]
# FAIL: expected 0, got 1
# MISTAKE: One rank too many is counted as waiting.
def bubble(p, m):
    return p / (m + p - 1)


# %% tags=["wrong"]
# FAIL: expected 0.333333, got 0.666667
# MISTAKE: Forward and backward are each counted as a bubble, but the share is the same in both.
def bubble(p, m):
    return 2 * (p - 1) / (m + p - 1)


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: A schedule is simulated, and nothing derived.
def bubble(p, m):
    return float(simulate(make("gpipe", p, m)).bubble)


# %%
guess = predict("With 8 ranks, how many micro-batches keep the bubble under 10 %?", 8, 16, 32, 64)

# %%
table(
    [
        (m, *(f"{float(simulate(make('gpipe', p, m)).bubble):.1%}" for p in (2, 4, 8)))
        for m in (1, 4, 8, 16, 32, 64)
    ],
    ["micro-batches", "2 ranks", "4 ranks", "8 ranks"],
)
enough = (m for m in (8, 16, 32, 64) if simulate(make("gpipe", 8, m)).bubble < 0.1)
guess.beside(next(enough), "simulated")

# %% [markdown]
# ## The homework: a pipeline by hand, both directions
#
# What is sent forward has to come back as a gradient. Each rank keeps the pair (x, y) of each micro-batch: its
# input, as a *leaf*, and its output. When the gradient of y arrives, `y.backward(grad)` adds to the weights'
# gradients and leaves the gradient of x, which goes to the rank before. The order is an argument: a list of
# ("F", i) and ("B", i) for every rank. The frame is here, F and B are yours:


# %% tags=["setup"]
def pipeline(rank, world_size, run, orders, micros, tie=True):
    """Run `orders[rank]`, each entry by `run(kind, i, s)`; returns loss, gradients, most held, traffic."""
    model, mesh = gpt2(), Mesh(pp=world_size)
    comm.clear_log()
    ends = mesh.axis("tie", [(0, world_size - 1)])  # the two ranks that hold the embedding; None elsewhere
    batch = example_batch(config, rows=8, length=16).micro(micros)
    s = SimpleNamespace(rank=rank, last=world_size - 1, axis=mesh["pp"], batch=batch, loss=0.0)
    s.stage = lambda x, i: stage(model, rank, world_size, x, batch[i])
    s.like = lambda i: torch.empty(len(batch[i].samples), 16, config.n_embd, dtype=torch.float64)
    s.kept, s.leaving, most = {}, [], 0
    for kind, i in orders[rank]:
        run(kind, i, s)
        most = max(most, len(s.kept))
    for handle in s.leaving:
        handle.wait()
    sent = *comm.traffic().get(("send", "pp"), (0, 0, 0)), len(s.leaving)
    wte = model.wte.weight  # it embeds and makes logits: its gradient is the sum of both ends
    if ends is not None and tie and wte.grad is not None:
        wte.grad = comm.all_reduce(wte.grad, ends)
    return s.loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, most, sent


def gpipe_order(rank, p, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


def serial_gradients(micros):
    """Loss and gradients of one process that adds up the same micro-batches in the same order."""
    model = gpt2()
    loss = Accumulate(model).run(example_batch(config, rows=8, length=16).micro(micros), None, Alone())
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def on_ranks(run):
    """What `run` gives on p live ranks with m micro-batches, in the order of GPipe or another."""
    return lambda p, m, order=gpipe_order: launch(
        pipeline, run, [order(r, p, m) for r in range(p)], m, ranks=p, timeout=20
    )


# %% [markdown]
# `s.stage(x, i)` runs this rank's stage (x is None on rank 0) and gives y, or the loss on the last rank, where it is
# a part of `s.loss`. `s.like(i)` is an empty tensor of the shape that travels. `comm.isend(t, s.axis, to)` starts a
# message and gives a handle, which belongs into `s.leaving`; `comm.irecv(like, s.axis, source).wait()` receives one.


# %% tags=["exercise"]
def run_op(kind, i, s):
    """Run ("F", i) or ("B", i) on rank s.rank of 0..s.last: F puts (x, y) into s.kept[i], B takes it out."""
    ### BEGIN SOLUTION
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))
    ### END SOLUTION


check("F and B by hand", exercises.by_hand, on_ranks(run_op), serial_gradients)

# %% [markdown] tags=["hint"]
# F: where does x come from on rank 0, and elsewhere? x must be a *leaf* that wants a gradient, or nothing can be sent
# back.

# %% [markdown] tags=["hint"]
# B: `y.backward(grad)` on all ranks but the last, `y.backward()` there. What it leaves in `x.grad` belongs to the
# rank before.


# %% tags=["wrong"]
# FAIL: rank 0 has no gradient
# MISTAKE: Only forward is written; nothing is kept for backward.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait() if s.rank > 0 else None
        y = s.stage(x, i)
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()


# %% tags=["wrong"]
# FAIL: gradient of wte.weight on rank 0
# MISTAKE: The gradient is divided by the micro-batches, although the loss was divided by all targets already.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        s.kept[i] = x, s.stage(x, i)
        if s.rank < s.last:
            s.leaving.append(comm.isend(s.kept[i][1].detach(), s.axis, s.rank + 1))
        else:
            s.loss += s.kept[i][1].item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad / len(s.batch), s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: B takes its pair out
# MISTAKE: The pair (x, y) is read and not taken out, so no memory is freed.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        x, y = s.kept[i]
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: two neighbours that both send
# MISTAKE: Sends wait until they have arrived: two neighbours wait for each other.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            comm.send(y.detach(), s.axis, s.rank + 1)
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            comm.send(x.grad, s.axis, s.rank - 1)


# %% tags=["wrong"]
# FAIL: a handle that is not in s.leaving is never waited for
# MISTAKE: The handle of a send is dropped, so nobody waits until the message has left.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            comm.isend(y.detach(), s.axis, s.rank + 1)
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            comm.isend(x.grad, s.axis, s.rank - 1)


# %% tags=["wrong"]
# FAIL: the loss, on the last rank in s.loss
# MISTAKE: The loss is set and not added up over micro-batches.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss = y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: add y.item()
# MISTAKE: The losses are added with their graphs, so no activation is ever freed.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: backward belongs into B
# MISTAKE: The last rank runs its backward at once, in F, whatever the order says.
def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
            y.backward()
    else:
        x, y = s.kept.pop(i)
        if s.rank < s.last:
            y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait())
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: the gradient that rank 1 sends does not matter
# MISTAKE: Every rank computes the whole model for itself, and the messages are zeros that nobody looks at.
def run_op(kind, i, s):
    whole, world = gpt2(), s.last + 1
    if kind == "F":
        x = None
        with torch.no_grad():
            for r in range(s.rank):
                x = stage(whole, r, world, x, s.batch[i])
        if s.rank > 0:
            comm.irecv(s.like(i), s.axis, s.rank - 1).wait()
            x.requires_grad_()
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(torch.zeros_like(y), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        if s.rank < s.last:
            comm.irecv(s.like(i), s.axis, s.rank + 1).wait()
            z = leaf = y.detach().requires_grad_()
            for r in range(s.rank + 1, world):
                z = stage(whole, r, world, z, s.batch[i])
            y.backward(torch.autograd.grad(z, leaf)[0])
        else:
            y.backward()
        if s.rank > 0:
            s.leaving.append(comm.isend(torch.zeros_like(x), s.axis, s.rank - 1))


# %% tags=["wrong"]
# FAIL: is there a second list that keeps it?
# MISTAKE: Every pair is also put into a list of its own, which frees none: the memory of GPipe.
pairs = []


def run_op(kind, i, s):
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        pairs.append((x, y))
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


# %% [markdown]
# `isend` starts a message and goes on. The loss was divided by the *global* number of targets, so gradients of
# micro-batches simply add up; nothing else divides. And GPT-2's embedding is **tied**: the same matrix embeds tokens on
# rank 0 and makes logits on the last rank. Each has a part of its gradient.


# %%
two, four = Ranks(2), Ranks(4)
run = lab.mine("F and B by hand", run_op, exercises.run_op)
for ranks in (two, four):
    print(f"GPipe on {ranks.size} ranks")
    found = ranks.run(pipeline, run, [gpipe_order(r, ranks.size, 4) for r in range(ranks.size)], 4)
    lab.compared(found, *serial_gradients(4))

# %% [markdown]
# The gradients that are equal only to rounding are those of the embedding: its two parts meet after all
# micro-batches rather than in each. All others are added in the same order as in one process.
#
# ## 1F1B: the same bubble, less memory
#
# GPipe holds m activations on each rank, so more micro-batches cost memory. But the last rank could run
# the backward of micro-batch 0 at once. In **1F1B** rank r first runs p - 1 - r forwards, then alternates one
# forward and one backward in order, and ends with the backwards that are left.

# %%
one = simulate(make("1f1b", 4, 8))
show(
    plots.schedule(one, "1F1B"),
    "simulated",
    "rank 0 holds four activations, rank 3 one, however many micro-batches there are; the time is GPipe's.",
    "Four rows; forwards and backwards alternate in the middle, memory peaks are 4, 3, 2 and 1",
)


# %% tags=["exercise"]
def one_f_one_b(rank, p, m):
    """The order of a rank as a list of ("F", i) and ("B", i)."""
    ### BEGIN SOLUTION
    warm_up = min(m, p - 1 - rank)
    order = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm_up, m)]
    ### END SOLUTION


check("1F1B", exercises.order, one_f_one_b)

# %% [markdown] tags=["hint"]
# Three parts: p - 1 - r forwards (but not more than m); then a forward and a backward in turn; then the backwards
# that are left. Which micro-batch does the k-th backward belong to?


# %% tags=["wrong"]
# FAIL: Deadlock: rank 0 waits at 0B0 for 0F0
# MISTAKE: Backward stands before forward.
def one_f_one_b(rank, p, m):
    return [op for i in range(m) for op in (("B", i), ("F", i))]


# %% tags=["wrong"]
# FAIL: 4 ranks, 8 micro-batches: rank 0 holds 8 activations, 1F1B only 4
# MISTAKE: That is GPipe: all forwards first, so every activation is held.
def one_f_one_b(rank, p, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


# %% tags=["wrong"]
# FAIL: 4 ranks, 8 micro-batches: rank 0 holds 5 activations, 1F1B only 4
# MISTAKE: One forward too many in the warm-up: p - 1 - rank is enough.
def one_f_one_b(rank, p, m):
    warm_up = min(m, p - rank)
    order = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm_up, m)]


# %% tags=["wrong"]
# FAIL: makespan of
# MISTAKE: One forward too few in the warm-up: the first rank waits.
def one_f_one_b(rank, p, m):
    warm_up = max(0, min(m, p - 2 - rank))
    order = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm_up, m)]


# %% tags=["wrong"]
# FAIL: stage 0 runs micro-batch 5 with F=1 B=0
# MISTAKE: The cool-down is missing: the last backwards are never run.
def one_f_one_b(rank, p, m):
    warm_up = min(m, p - 1 - rank)
    order = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order


# %% tags=["wrong"]
# FAIL: schedules.registry.make knows the answer
# MISTAKE: The package's schedule is copied.
def one_f_one_b(rank, p, m):
    return [(op.kind, op.micro) for op in make("1f1b", p, m).orders[rank]]


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: Written down for the sizes that one has seen.
def one_f_one_b(rank, p, m):
    warm_up = (
        min(m, p - 1 - rank) if (p, m) in [(1, 1), (2, 2), (2, 5), (4, 4), (4, 8), (3, 7), (8, 2)] else 0
    )
    order = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm_up, m)]


# %% tags=["exercise"]
def in_flight(rank, p, m):
    """The most activations that this rank holds in 1F1B."""
    ### BEGIN SOLUTION
    return min(m, p - rank)
    ### END SOLUTION


check("activations of 1F1B", exercises.in_flight, in_flight)

# %% [markdown] tags=["hint"]
# A rank holds its warm-up and one more. What if there are fewer micro-batches than that?


# %% tags=["wrong"]
# FAIL: rank 0 of 2, 2 micro-batches
# MISTAKE: Ranks are counted from the wrong end: the first rank holds the most.
def in_flight(rank, p, m):
    return min(m, rank + 1)


# %% tags=["wrong"]
# FAIL: rank 0 of 8, 2 micro-batches
# MISTAKE: More activations than micro-batches.
def in_flight(rank, p, m):
    return p - rank


# %% tags=["wrong"]
# FAIL: expected 1, got 0
# MISTAKE: One too few: the micro-batch at work is held as well.
def in_flight(rank, p, m):
    return min(m, p - 1 - rank)


# %% tags=["wrong"]
# FAIL: rank 1 of 2, 2 micro-batches: expected 1, got 2
# MISTAKE: That is GPipe, which holds all micro-batches.
def in_flight(rank, p, m):
    return m


# %% tags=["wrong"]
# FAIL: rank 1 of 2, 5 micro-batches: expected 1, got 2
# MISTAKE: Every rank is taken to hold as many as rank 0.
def in_flight(rank, p, m):
    return min(m, p) if m > 2 else min(m, p - rank)


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's schedule is asked.
def in_flight(rank, p, m):
    return make("1f1b", p, m).peak(rank)


# %% [markdown]
# Your F and B in your order, on live ranks:

# %%
order = lab.mine("1F1B", one_f_one_b, exercises.one_f_one_b)
for name, of_rank in {"GPipe": gpipe_order, "1F1B": order}.items():
    found = four.run(pipeline, run, [of_rank(r, 4, 8) for r in range(4)], 8)
    print(f"{name}: held at most", [held for _, _, held, _ in found])
    lab.compared(found, *serial_gradients(8))

# %% [markdown]
# GPipe held 8<!--above--> activations on every rank, 1F1B 4<!--above--> on rank 0 and one less on each rank after it.
# Four, each of a quarter of the layers: as much as one process keeps of one micro-batch. So a pipeline cuts weights,
# but not its first rank's activations.
#
# **Folklore, refuted.** Many notes say that 1F1B has a smaller bubble than GPipe. It has not. Its backwards start
# earlier, but the last rank is busy without a pause in both, and the others wait for it:

# %%
rows = []
for p, m in ((4, 4), (4, 8), (8, 8), (8, 32)):
    pair = [simulate(make(name, p, m), Cost(forward=1, backward=1)) for name in ("gpipe", "1f1b")]
    rows.append((p, m, *(int(t.makespan) for t in pair), *(t.schedule.peak(0) for t in pair)))
table(rows, ["ranks", "micro", "GPipe slots", "1F1B slots", "GPipe holds", "1F1B holds"])

# %% [markdown]
# What 1F1B buys: with its memory, more micro-batches fit, and *those* shrink the bubble.

# %%
explore(
    lambda name, ranks, micros, backward: plots.schedule(
        simulate(make(name, ranks, micros), Cost(forward=1, backward=backward)), plots.TITLES[name]
    ),
    "simulated",
    "{name} on {ranks} ranks with {micros} micro-batches; a backward takes {backward} forwards.",
    "The schedule {name} as boxes on {ranks} rows",
    name=["1f1b", "gpipe", "naive"],
    ranks=(1, 8, 4),
    micros=(1, 24, 6),
    backward=(1, 3, 2),
)

# %% [markdown]
# ## Predicted, then seen
#
# With more ranks than cores a stopwatch would measure the operating system. So this run is **paced**: real processes
# and real messages, but each forward is stretched to 20 ms and each backward to 40 ms by sleeping.

# %%
guess = predict("1F1B, 8 micro-batches, 8 ranks: how many ms?", unit="ms")

# %% tags=["measured"]
rows, seen = [], {}
for p in (2, 4, 8):
    job = recorded.pipeline_spans, "1f1b", 8, Cost(forward=0.02, backward=0.04)
    seen[p] = trace.merge(launch(*job, ranks=p, timeout=60))
    predicted, took = 1000 * (8 + p - 1) * 0.06, 1000 * max(s.end for s in seen[p])
    rows.append((p, round(predicted), round(took), f"{took / predicted - 1:+.1%}"))
table(rows, ["ranks", "predicted, ms", "paced, ms", "difference"])

# %%
guess.beside(rows[-1][1], "computed")

# %% [markdown]
# It is (m + p - 1) 60 ms. Four ranks:

# %% tags=["measured"]
show(
    plots.schedule(
        simulate(make("1f1b", 4, 8), Cost(forward=20, backward=40)),
        "1F1B on four live ranks",
        memory=False,
        seen=[(s.rank, 1000 * s.start, 1000 * s.end) for s in seen[4] if s.lane == "work"],
        unit="ms",
    ),
    "paced",
    "colours are the prediction, the dark boxes under them what four live processes did.",
    "Predicted boxes of 1F1B on four ranks, and under each the box of the live run at nearly the same time",
)

# %% [markdown]
# Step through both schedules as three live ranks ran them: play them, or use the arrow keys. Under each rank stand
# the micro-batches whose activations it holds. In which step does rank 0 of GPipe hold more than 1F1B ever does?

# %% tags=["measured"]
for name, words in (("gpipe", "GPipe, all forwards first"), ("1f1b", "1F1B")):
    run_of = launch(recorded.pipeline_steps, name, 5, Cost(0.03, backward=0.03), ranks=3, timeout=60)
    play(
        run_of,
        "paced",
        f"{words}: five micro-batches on three live ranks.",
        f"Three ranks as boxes running {words}",
    )

# %% [markdown]
# ## Overlap: let messages travel while you work
#
# (A second sitting may begin here.)
#
# So far a message cost nothing. Let a message, a forward and a backward each take 20 ms, and run GPipe on two ranks
# twice: once waiting for each message to arrive before going on (*blocking*), once as above, where a send is only
# started and receives are posted ahead, two for each neighbour (*double buffering*). What does each of the six sends
# cost rank 0?

# %%
guess = predict("Blocking: how many ms does the step take?", unit="ms")


# %%
def give_and_wait(self, op, value, give=Mailbox.give):
    give(self, op, value)
    for line in self.leaving.values():  # of messages that have not arrived
        while line:
            line.popleft().wait()


def two_steps(rank, world_size, cost, blocking):
    model = GPT2(recorded.DEEPER).double()
    with patch.object(Mailbox, "give", give_and_wait) if blocking else nullcontext():
        spans = recorded.pipeline_spans(rank, world_size, "gpipe", 6, cost, model)
    return spans, {n: p.grad for n, p in model.named_parameters() if n != "wte.weight"}


rows, spans, grads = [], {}, []
for way, blocking in (("blocking", True), ("double-buffered", False)):
    predicted = simulate(make("gpipe", 2, 6), Cost(20, backward=20, hop=20, blocking=blocking))
    steps = two.run(two_steps, Cost(0.02, backward=0.02, hop=0.02), blocking)
    spans[way] = trace.merge([seen for seen, _ in steps])
    grads += [of_rank for _, of_rank in steps]
    work, sent = ([s for s in spans[way] if s.rank == 0 and s.lane == lane] for lane in ("work", "comm"))
    took, both = max(s.end for s in spans[way] if s.lane == "work"), intersection(work, sent)
    rows.append((way, int(predicted.makespan), round(1000 * took), round(1000 * both)))
serial, six = GPT2(recorded.DEEPER).double(), example_batch(recorded.DEEPER, rows=6, length=8).micro(6)
for _ in range(2):
    Accumulate(serial).run(six, None, Alone())
want = {n: p.grad for n, p in serial.named_parameters()}
same = all(torch.equal(g, want[n]) for of_rank in grads for n, g in of_rank.items() if g is not None)
print("both ways the serial gradients, bit for bit:", same)
guess.beside(rows[0][1], "simulated")

# %% tags=["measured"]
table(rows, ["messages", "simulated, ms", "paced, ms", "both working and sending on rank 0, ms"])
length = max(max(s.end for s in of_way) for of_way in spans.values())
for way, of_way in spans.items():
    show(
        timeline(of_way, f"GPipe on two ranks, {way}", names=False, length=length),
        "paced",
        f"{way}: the strip under each rank shows when its messages travel.",
        f"Two rows of boxes with strips of messages under them, {way}",
    )

# %% [markdown]
# The same bytes, the same gradients; only the waiting is gone, but for the two hops that nobody can hide: one until
# rank 1 has something to do, one until rank 0 gets its first gradient back.
#
# ## How small should micro-batches be?
#
# More of them mean less bubble, but each is smaller, and small matrices use the processor badly. The product of
# both efficiencies has a peak. Below, one block's forward and backward are *measured* on this machine for each
# size; 32 rows, 4 ranks.

# %% tags=["measured"]
block = GPT2(GPT2Config(vocab_size=8, n_positions=16, n_layer=1, n_head=4, n_embd=128)).h["0"]
sizes = {micros: torch.randn(32 // micros, 16, 128) for micros in (1, 2, 4, 8, 16, 32)}
took = dict.fromkeys(sizes, float("inf"))
for _ in range(40):  # all sizes in turn, so that a busy moment of the machine hits all alike
    for micros, x in sizes.items():
        begin = time.perf_counter()
        block(x, torch.arange(16)).sum().backward()
        took[micros] = min(took[micros], time.perf_counter() - begin)
speed = {micros: 32 / micros / seconds for micros, seconds in took.items()}  # rows a second
show(
    plots.micro_batches(speed, ranks=4),
    "measured",
    "smaller micro-batches shrink the bubble and slow the processor down; the product has a peak.",
    "Three curves over the number of micro-batches: one falls, one rises, their product has a maximum",
)

# %% [markdown]
# ## Deadlock
#
# Two ranks that both *send* first wait for each other forever: a plain send returns when the other side receives.
# 1F1B invites this in its steady state, where a rank sends an activation down while its neighbour sends a gradient
# up. The checker sees it in the schedule itself, and live ranks show it:

# %%
try:
    check_schedule(make("1f1b", 2, 4), buffers=0)
except ScheduleError as error:
    print(error)


# %% tags=["slide"]
def both_send_first(rank, world_size, send):
    axis, other, x = Mesh(pp=world_size)["pp"], 1 - rank, torch.full((4,), float(rank))
    handle = send(x, axis, other)
    y = comm.recv(x, axis, other)
    if handle is not None:
        handle.wait()
    return y[0].item()


print("isend, then recv:", two.run(both_send_first, comm.isend))
try:
    launch(both_send_first, comm.send, ranks=2, timeout=2)
except RankFailed as error:
    print(str(error).splitlines()[0].split(":")[0])

# %% [markdown]
# The package's engine posts its receives ahead, in the order in which the neighbour's schedule sends, and starts its
# sends without waiting, unless two are still unread. Then it waits, but for a reader that is known to come: the
# schedule was checked with two buffers.
#
# ## Less memory still: recompute
#
# A held micro-batch need not hold every intermediate of its layers. Keep the stage's *input* only and run the
# forward again just before the backward: the inputs of what is held and one micro-batch's insides, for about a third
# more work. Autograd tells us what it keeps and when it lets go; here rank 1 of four works through its orders:


# %%
class Kept:
    """A tensor that is kept for backward: `now` bytes of them live, `most` is the peak."""

    live, now, most = Counter(), 0, 0

    def __init__(self, tensor):
        self.tensor, self.memory = tensor, tensor.untyped_storage()
        Kept.live[self.memory.data_ptr()] += 1
        if Kept.live[self.memory.data_ptr()] == 1:
            Kept.now += self.memory.nbytes()
            Kept.most = max(Kept.most, Kept.now)

    def __del__(self):
        Kept.live[self.memory.data_ptr()] -= 1
        if Kept.live[self.memory.data_ptr()] == 0:
            Kept.now -= self.memory.nbytes()


def most_kept(order, recompute):
    model, batch, held, most = gpt2(), example_batch(config, rows=8, length=16).micro(8), {}, 0
    weights = [Kept(p.data) for p in model.parameters()]  # counted once, before the peak
    Kept.most = before = Kept.now

    def forward(x, i):
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            return stage(model, 1, 4, x, batch[i])

    for kind, i in order:
        if kind == "F":
            x = torch.ones(1, 16, config.n_embd, dtype=torch.float64, requires_grad=True)
            with torch.set_grad_enabled(not recompute):
                y = forward(x, i)
            held[i] = Kept(x), None if recompute else y
            most = max(most, len(held))
        else:
            x, y = held.pop(i)
            y = forward(x.tensor, i) if recompute else y
            y.backward(torch.ones_like(y))
            del x, y
    return most, f"{(Kept.most - before) / 1024:.0f} KiB", len(weights)


rows = []
for name, of_rank in {"GPipe": gpipe_order, "1F1B": order}.items():
    (most, whole, _), (_, inputs, _) = (most_kept(of_rank(1, 4, 8), again) for again in (False, True))
    rows.append((f"{name}, rank 1", most, whole, inputs))
table(rows, ["schedule, 4 ranks, 8 micro-batches", "held", "everything kept", "inputs only, one rebuilt"])

# %% [markdown]
# In a plan, `recompute=true` does this. The clock charges every backward a forward more:

# %%
for again in (False, True):
    t = simulate(make("1f1b", 4, 8), Cost(1, 1, 1, recompute=again))
    print(f"recompute={again}: makespan {t.makespan}, bubble {float(t.bubble):.1%}")
print(verify("pp=2,micro=3,recompute=true"))

# %% [markdown]
# ## What travels
#
# One activation and one gradient per micro-batch and border, each of b T C numbers (the sum of the tied embedding not
# counted).


# %% tags=["exercise"]
def bytes_sent(p, m, b, T, C):
    """Bytes of one step, all ranks together: m micro-batches of b rows, T tokens, width C, float32."""
    ### BEGIN SOLUTION
    return (p - 1) * 2 * m * b * T * C * 4
    ### END SOLUTION


check("bytes of a pipeline", exercises.traffic, bytes_sent)

# %% [markdown] tags=["hint"]
# How many borders have p ranks? Over each, every micro-batch passes twice.


# %% tags=["wrong"]
# FAIL: one number forward and one back
# MISTAKE: Gradients that travel back are forgotten.
def bytes_sent(p, m, b, T, C):
    return (p - 1) * m * b * T * C * 4


# %% tags=["wrong"]
# FAIL: one rank sends nothing
# MISTAKE: There is a border less than there are ranks.
def bytes_sent(p, m, b, T, C):
    return p * 2 * m * b * T * C * 4


# %% tags=["wrong"]
# FAIL: expected 8, got 2
# MISTAKE: Numbers are counted, not bytes.
def bytes_sent(p, m, b, T, C):
    return (p - 1) * 2 * m * b * T * C


# %% tags=["wrong"]
# FAIL: 4 ranks, 8 micro-batches
# MISTAKE: Only one micro-batch is counted.
def bytes_sent(p, m, b, T, C):
    return (p - 1) * 2 * b * T * C * 4


# %% tags=["wrong"]
# FAIL: expected 8, got 16
# MISTAKE: float32 is taken to have 8 bytes.
def bytes_sent(p, m, b, T, C):
    return (p - 1) * 2 * m * b * T * C * 8


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: All rows are taken to make one text's length: right only where m b = T.
def bytes_sent(p, m, b, T, C):
    return (p - 1) * 2 * T * T * C * 4


# %% [markdown]
# The live ranks above counted too (float64, so twice the bytes):

# %%
table([(r, n, size) for r, (*_, (_, size, n, _)) in enumerate(found)], ["rank", "messages", "bytes"])
print("counted", sum(size for *_, (_, size, *_) in found), "predicted", 2 * (4 - 1) * 2 * 8 * 1 * 16 * 64 * 4)

# %% [markdown]
# ## Bug lab
#
# Three wrong pipelines. None crashes, and none shows in the loss of the first step. Which line catches each? (The
# third is akin to PyTorch's: [torchtitan#800](https://github.com/pytorch/torchtitan/pull/800) recalls a wrong scale
# of all gradients that hardly shows in loss curves, because AdamW divides any scale away.)

# %%
orders = [gpipe_order(r, 2, 4) for r in range(2)]
swapped = [orders[0], [*orders[1][:4], ("B", 1), ("B", 0), ("B", 2), ("B", 3)]]
for bug, job in {
    "the tied embedding is not summed": (run, orders, 4, False),
    "rank 1 runs its backwards in another order than rank 0 expects": (run, swapped, 4),
    "the gradient is divided by the number of micro-batches once more": (lab.divided(run), orders, 4),
}.items():
    print(bug)
    lab.compared(two.run(pipeline, *job), *serial_gradients(4))

# %% [markdown]
# ## The package's version
#
# `Pipeline` does the same for any schedule: the order comes from `gpt2lab.schedules`, and one loop runs it. (`sync`
# is the data-parallel partner, which wants to know when the last backward comes.)

# %%
show_source(Pipeline.run)

# %%
for plan in ("pp=2,micro=3,schedule=gpipe", "pp=4,micro=5,schedule=1f1b"):
    print(verify(plan))

# %% [markdown]
# Five layers on four stages, seven rows in five micro-batches: nothing divides, and everything is equal.
#
# PyTorch's own is `torch.distributed.pipelining`: a module for each stage, a schedule by name, `step`. Here it runs
# our stages and finds our gradients. The tied embedding is yours to sum, and only the last rank knows the losses.


# %%
def pytorchs_own(rank, world_size, micros):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, batch, got = gpt2(), example_batch(config, rows=8, length=16), []
    mine = Stage(config, range(2 * rank, 2 * rank + 2), rank == 0, rank == world_size - 1).double()
    split = PipelineStage(mine, rank, world_size, torch.device("cpu"))
    loss = lambda logits, target: whole.loss(logits, target) / batch.total
    schedule = Schedule1F1B(split, micros, loss_fn=loss, scale_grads=False)
    last = {"target": batch.targets} if rank == world_size - 1 else {}
    schedule.step(*([batch.tokens] if rank == 0 else []), losses=got, **last)
    return len(got), {n: p.grad for n, p in mine.named_parameters() if "wte" not in n}


_, want = serial_gradients(4)
for rank, (known, grads) in enumerate(two.run(pytorchs_own, 4)):
    same = all((g - want[n]).abs().max() / want[n].abs().max() < 1e-12 for n, g in grads.items())
    print(f"rank {rank}: {known} losses; its {len(grads)} gradients are equal to 1e-12: {same}")

# %% [markdown]
# Generation passes the stages too. One stream of rows keeps one of p ranks busy. Of a round in which N streams
# follow each other (p - 1) / (p - 1 + N) is idle; where rounds run into each other (p - N) / p, and nothing once
# N >= p. Each stream gets the tokens of the serial model:


# %%
def streamed(rank, world_size, streams):
    engine = Pipeline(gpt2(), Mesh(pp=world_size), make("1f1b", world_size, 1))
    return generate_streams(engine, prompts, 5, streams, temperature=0)


prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
serial = generate(gpt2(), prompts, 5, temperature=0)
for streams in (1, 2, 4):
    same = four.run(streamed, streams) == [serial] * 4
    idle = f"{3 / (3 + streams):.0%} of one round idle, {max(0, 4 - streams) / 4:.0%} of many (computed)"
    print(f"{streams} streams: {idle}, serial tokens: {same}")

# %% [markdown]
# In a terminal, `python -m gpt2lab schedule 1f1b --stages 4 --micro 8` draws any schedule:

# %%
print(draw(simulate(make("1f1b", 3, 4))))

# %% [markdown]
# ## A puzzle: room for three
#
# Four ranks, eight micro-batches, a backward of two forwards, and room for three activations on each rank. 1F1B
# holds four on rank 0; with warm-ups of at most two forwards it holds three, and takes 48 units of time
# instead of 33. Write the words of each rank. At most 42 units pass.


# %% tags=["exercise"]
def in_three(rank):
    """The operations of this rank in order, such as "F0 F1 B0 B1"."""
    ### BEGIN SOLUTION
    kinds = ["FFFBFBFBFBFBFBBB", "FFFBBFBFFBBFBFBB", "FFFBBBFFBFBBFFBB", "FBFBFBFBFBFBFBFB"][rank]
    return [f"{kind}{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
    ### END SOLUTION


check("room for three", exercises.squeezed, in_three)

# %% [markdown] tags=["hint"]
# Draw what you have: `plots.schedule(simulate(exercises.written(in_three, 4, 8), Cost(1, backward=2)))`. Which rank
# waits longest, and for whom?

# %% [markdown] tags=["hint"]
# Ranks 1 and 2 may hold three as well. What do they gain from running forwards early?


# %% tags=["wrong"]
# FAIL: rank 0 holds 4 activations at its peak
# MISTAKE: Plain 1F1B, whose first rank holds four.
def in_three(rank):
    return [f"{kind}{i}" for kind, i in exercises.one_f_one_b(rank, 4, 8)]


# %% tags=["wrong"]
# FAIL: 48 units of time; at most 42 pass
# MISTAKE: The warm-up is cut to two, and the pipeline waits.
def in_three(rank):
    warm_up = min(2, 3 - rank)
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(8 - warm_up):
        order += [f"F{warm_up + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(8 - warm_up, 8)]


# %% tags=["wrong"]
# FAIL: 51 units of time; at most 42 pass
# MISTAKE: The same order on every rank, in blocks of three: all wait for each other.
def in_three(rank):
    return "F0 F1 F2 B0 B1 B2 F3 F4 F5 B3 B4 B5 F6 F7 B6 B7"


# %% tags=["wrong"]
# FAIL: is half a backward
# MISTAKE: Backward is split in halves, which this puzzle does not have.
def in_three(rank):
    return [word for i in range(8) for word in (f"F{i}", f"I{i}", f"W{i}")]


# %% tags=["wrong"]
# FAIL: runs micro-batch 6 with F=0 B=0
# MISTAKE: Two micro-batches are never run.
def in_three(rank):
    return "F0 F1 F2 B0 B1 B2 F3 F4 F5 B3 B4 B5"


# %% tags=["wrong"]
# FAIL: Deadlock
# MISTAKE: Backward of a micro-batch stands before its forward.
def in_three(rank):
    return ["B0", "F0", *(word for i in range(1, 8) for word in (f"F{i}", f"B{i}"))]


# %% [markdown]
# ## Drill
#
# 1. Eight ranks, bubble at most 20 %: how many micro-batches?
#    <details><summary>answer</summary>(p - 1)/(m + p - 1) <= 1/5 gives m >= 28.</details>
# 2. Does the bubble depend on how long a backward takes?
#    <details><summary>answer</summary>No: a rank waits for p - 1 forwards and backwards of m + p - 1.</details>
# 3. Why does rank 0 hold the most in 1F1B?
#    <details><summary>answer</summary>Its backward of micro-batch 0 comes last, p - 1 hops away and back.</details>
# 4. Twice the micro-batches at the same batch size: what happens to the bytes?
#    <details><summary>answer</summary>Nothing: twice as many messages, half as large.</details>
# 5. Which gradient needs a message of its own after the last backward?
#    <details><summary>answer</summary>That of the tied embedding.</details>
# 6. Which is larger, the activations at a border or the weights of a layer? <details><summary>answer</summary>b T
#    C against 12 C^2: the weights, as long as a micro-batch has fewer than 12 C tokens. But a step sends every
#    micro-batch, both ways: 2 B T C numbers a border. With half a million tokens and C = 768 that is 805 million,
#    more than an all-reduce of GPT-2 (2 x 124 million). ZeRO-3 sends 3 x 124 million in every micro-batch,
#    so from the third on it sends more. A pipeline's messages go to one neighbour and hide behind work.</details>
#
# ## Read on
#
# - Huang et al. 2019, "GPipe": where micro-batches and the bubble come from, with recomputation.
# - Narayanan et al. 2019, "PipeDream": 1F1B, at first without a flush (lesson 09).
# - Fan et al. 2021, "DAPPLE": 1F1B with a flush, and the memory that it saves.
# - Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters": bubbles over ideal
#   time, and how pipelines combine with tensor and data parallelism.
#
# **Next**: [08 Pipeline schedules](08_schedules.ipynb).
