# %% [markdown]
# # 04 Data parallel
#
# **The one-minute version.** Copy the model to every rank, give each rank other rows of the batch, and *sum* the
# gradients before the update. Then all replicas make the same step and stay the same. The art is in the sum: it
# moves as many bytes as the model has, at every step, so it should travel in large pieces, and while backward still
# computes.
#
# Here is the claim of this lesson: the same loss, gradients, norm and weights as the serial run, on four live ranks
# with seven rows that do not divide evenly.

# %% tags=["setup"]
import time

import numpy as np
import torch

from gpt2lab.corpus import Batches, shakespeare
from gpt2lab.corpus.loaders import each_reads, one_reads
from gpt2lab.exercises import check
from gpt2lab.exercises import data as exercises
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import data, data_costs
from gpt2lab.plan import Plan, build
from gpt2lab.plots import data as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, network, trace
from gpt2lab.ranks.digest import summ
from gpt2lab.ranks.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import verify

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these models are too small to share

# %%
two, four = Ranks(2), Ranks(4)
print(verify("dp=4", ranks=four))

# %% [markdown]
# ## By hand
#
# A small GPT-2, so that a step takes milliseconds, on Shakespeare folded into 256 tokens. Seven rows a batch. The
# function below is the whole strategy: lines marked 1 to 3 are all that is parallel about it.

# %%
config = GPT2Config(vocab_size=256, n_positions=32, n_layer=3, n_head=2, n_embd=32)
batches = Batches(np.asarray(shakespeare()[:100_000]) % 256, rows=7, length=16)


def train(rank, world_size, steps=8, optimizer=torch.optim.SGD, lr=0.3, factor=1):
    torch.set_default_dtype(torch.float64)
    model, axis = GPT2(config), Mesh(dp=world_size)["dp"]
    step_with = optimizer(model.parameters(), lr=lr)
    losses, digests = [], []
    for step in range(steps):
        batch = batches.at(step)
        mine = batch.rows(rank, world_size)  # 1: other rows on every rank
        step_with.zero_grad()
        loss = (
            model.loss(model(mine.tokens), mine.targets) / batch.total
        )  # 2: over the *global* number of tokens
        loss.backward()
        for p in model.parameters():
            p.grad = factor * comm.all_reduce(p.grad, axis)  # 3: sum of the gradients
        step_with.step()
        losses.append(loss.item())
        digests.append(checksum(model))
    return losses, digests, {n: p.data for n, p in model.named_parameters()}


def checksum(model):
    return summ(torch.cat([p.data.flatten() for p in model.parameters()]))


serial_losses, _, serial_weights = train(0, 1)
runs = four.run(train)

# %% [markdown]
# **Losses differ, gradients agree.** What a rank calls its loss is the part of its rows. The parts are different, and
# add up to the serial loss:

# %%
parts = [losses[0] for losses, _, _ in runs]
print("parts of step 0:", " + ".join(f"{part:.3f}" for part in parts), f"= {sum(parts):.3f}")
print("serial loss:    ", f"{serial_losses[0]:.3f}")
summed = [sum(losses[step] for losses, _, _ in runs) for step in range(8)]
apart = max(abs(a - b) for a, b in zip(summed, serial_losses, strict=True))
print("largest difference in 8 steps below 1e-12:", apart < 1e-12)

# %% [markdown]
# Rank 3 has one row where the others have two, so its part is half as large. Nothing has to be weighted, because
# nobody divided by a *local* count. **Normalise once, sum everywhere**: the rule of this whole package.
#
# Since gradients agree, parameters agree. `summ` is a checksum of all bits; equal letters in a column mean equal
# weights. Beside it a run whose sums were left out, by a copy of `train` that knows five ways to be wrong:


# %%
def train_wrong(rank, world_size, bug, steps=8):
    torch.set_default_dtype(torch.float64)
    model, axis = GPT2(config), Mesh(dp=world_size)["dp"]
    step_with = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, digests, piled = [], [], {}
    for step in range(steps):
        batch = batches.at(step)
        mine, total = batch.rows(rank, world_size), batch.total
        if bug == "lost rows":
            each = len(batch.samples) // world_size
            mine = batch._pick(torch.arange(rank * each, (rank + 1) * each))
        if bug == "mean of means":
            total = mine.targets.numel() * world_size
        step_with.zero_grad()
        loss = model.loss(model(mine.tokens), mine.targets) / total
        loss.backward()
        for n, p in model.named_parameters():
            if bug not in ("no sync", "weights averaged"):
                p.grad = comm.all_reduce(p.grad, axis)
            if bug == "no zero_grad":  # the sums of all steps so far stay where they are
                p.grad = piled[n] = p.grad + piled.get(n, 0)
        step_with.step()
        for p in model.parameters() if bug == "weights averaged" else []:
            p.data = comm.all_reduce(p.data, axis) / world_size
        losses.append(loss.item())
        digests.append(checksum(model))
    return losses, digests, {n: p.data for n, p in model.named_parameters()}


# %%
silent = four.run(train_wrong, "no sync")
show(
    plots.checksums(
        {
            "gradients summed": [digests for _, digests, _ in runs],
            "no sum": [digests for _, digests, _ in silent],
        }
    ),
    "computed",
    "checksums of all weights by rank and step; with the sum, replicas are the same bits at every step.",
    "Two maps of rank by step: left one letter everywhere, right four different letters in every column",
)

# %%
print("same bits on all ranks:  ", all(len({d[step] for _, d, _ in runs}) == 1 for step in range(8)))
print("without the sum:         ", all(len({d[step] for _, d, _ in silent}) == 1 for step in range(8)))

# %% [markdown]
# A lecture of Stanford's CS336 keeps its gradient sum under `if torch.cuda.is_available()`. On a laptop, then,
# nothing is summed, and its note "gradients are the same, therefore parameters are the same" is false there. It
# prints plausible losses all the same.
#
# ## Bug lab: five wrong programs that run
#
# Every one of them finishes and its loss falls. **Predict**: which are visible in the loss after eight steps? Which
# in the weights? Which in a comparison of the replicas with each other?


# %%
def distance(weights, others):
    return max((weights[n] - others[n]).abs().max().item() for n in weights)


bugs = ["", "no sync", "no zero_grad", "mean of means", "weights averaged", "lost rows"]
rows = []
for bug in bugs:
    found = four.run(train_wrong, bug)
    losses = [sum(losses[step] for losses, _, _ in found) for step in range(8)]
    replicas = len({digests[-1] for _, digests, _ in found})
    off = distance(found[0][2], serial_weights)
    rows.append(
        (
            bug or "(none)",
            f"{losses[0]:.2f} to {losses[-1]:.2f}",
            "same" if replicas == 1 else f"{replicas} versions",
            "equal" if off < 1e-12 else f"off by {off:.0e}",
        )
    )
table(rows, ["bug", "sum of losses", "replicas", "weights against serial"])

# %% [markdown]
# - *no zero_grad*: the gradients of old steps stay and add up. All replicas agree with each other, so comparing
#   ranks says nothing. Worse, a serial run **with the same bug** equals the parallel one: equality proofs find
#   parallel bugs, not optimisation bugs.
# - *mean of means*: each rank divides by its own tokens. With eight rows on four ranks it would be *exactly right*.
#   Seven rows show it.
# - *weights averaged*: no gradient is sent, the weights are averaged after each update. For plain gradient descent
#   this is an average of gradients, so wrong only by a factor. For Adam it is another algorithm.
# - *lost rows*: `rows // ranks` for everybody. Three of seven rows are never seen.
#
# The serial run with the forgotten `zero_grad` against the parallel run with the same:

# %%
_, _, same_bug = train_wrong(0, 1, "no zero_grad")
found = four.run(train_wrong, "no zero_grad")
print("parallel with the bug equals serial with the bug:", distance(found[0][2], same_bug) < 1e-12)

# %% [markdown]
# ### Adam hides it
#
# Suppose gradients are *averaged* where they should be summed, or summed twice: wrong by a factor. Below all
# gradients are multiplied by 8. SGD's steps are eight times as long then, here too long to learn anything.

# %%
pairs = {}
for name, optimizer, lr in (("SGD", torch.optim.SGD, 0.3), ("AdamW", torch.optim.AdamW, 3e-3)):
    right, wrong = (train(0, 1, steps=12, optimizer=optimizer, lr=lr, factor=f)[0] for f in (1, 8))
    pairs[name] = (right, wrong)
    gap = max(abs(a - b) for a, b in zip(right, wrong, strict=True))
    print(
        f"{name:6} losses differ by {'more than 0.1' if gap > 0.1 else 'less than 0.001' if gap < 1e-3 else gap}"
    )
show(
    plots.hidden(pairs),
    "computed",
    "Adam divides the gradient by its own size, so a wrong factor leaves no trace in its loss curve.",
    "Two pairs of loss curves: under SGD the wrong one shoots out of the picture, under AdamW they coincide",
)

# %% [markdown]
# So compare gradients, compare the gradient's **norm** before clipping, and compare trajectories with SGD as well.
# That is what `verify` does.
#
# ## The naive form, and where its time goes
#
# One blocking all-reduce for each tensor, after backward. GPT-2's tensors differ wildly in size: biases of a few
# kilobytes, an embedding of 154 MB. Each message pays the latency. Beside it what buckets of 25 MB make of them, the
# default of PyTorch's DDP for models of this size; ours is 1 MiB, for the small models of these lessons.

# %%
show_source(data.Naive)

# %%
with torch.device("meta"):
    gpt2 = GPT2(GPT2Config()).to(torch.float32)
per_tensor = [4 * p.numel() for p in gpt2.parameters()]
per_bucket = [sum(4 * p.numel() for p in b) for b in data.into_buckets(list(gpt2.parameters()), 25 << 20)]
print(
    f"{len(per_tensor)} tensors from {min(per_tensor):,} to {max(per_tensor):,} bytes;",
    len(per_bucket),
    "buckets",
)
show(
    plots.sizes(per_tensor, per_bucket),
    "counted",
    "gradient messages of GPT-2 124M: one a tensor, and gathered in buckets of 25 MB.",
    "Bars of message sizes on a log scale: 148 of very different size on the left, 17 of similar size on the right",
)

# %% [markdown]
# ## Buckets, sent while backward runs
#
# Backward finishes the *last* layer's gradients first. Nothing stops us from sending them at once. A hook on each
# parameter notes that its gradient is final; when all gradients of a **bucket** are there, it leaves as one
# asynchronous all-reduce, and backward goes on. At the end we wait for what is still under way. By hand:


# %%
def overlapped(rank, world_size, bucket_elements=4000):
    torch.set_default_dtype(torch.float64)
    model, axis = GPT2(config), Mesh(dp=world_size)["dp"]
    bucket, flying = [], []

    def send():
        flat = torch.cat([p.grad.flatten() for p in bucket])
        flying.append((list(bucket), comm.all_reduce(flat, axis, async_op=True)))
        bucket.clear()

    def ready(p):  # called by autograd when p.grad is complete
        bucket.append(p)
        if sum(q.numel() for q in bucket) >= bucket_elements:
            send()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready)
    batch = batches.at(0)
    mine = batch.rows(rank, world_size)
    (model.loss(model(mine.tokens), mine.targets) / batch.total).backward()
    started = len(flying)
    if bucket:
        send()
    for parameters, handle in flying:
        flat = handle.wait()
        for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
    return started, len(flying), {n: p.grad for n, p in model.named_parameters()}


# %%
started, messages, gradients = four.run(overlapped)[0]
print(messages, "messages,", started, "of them sent before backward had returned")
model, batch = GPT2(config), batches.at(0)
(model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
worst = max((gradients[n] - p.grad).abs().max().item() for n, p in model.named_parameters())
print("equal to the serial gradients:", worst < 1e-12)

# %% [markdown]
# `wte` is both embedding and head, and one tensor: autograd adds both gradients before the hook is called, at the
# very end of backward. It is counted once. The package's version adds what a real run needs: a fixed order on all
# ranks, parameters without gradient, and micro-batches.

# %%
show_source(data.Buckets)

# %%
print(verify("dp=2,data=naive", ranks=two))
print(verify("dp=4,bucket=1", ranks=four))

# %% [markdown]
# ### Does it help? A paced run
#
# With more ranks than cores, a stopwatch would measure the scheduler. So here computing is *sleeping*, and messages
# are held back to a link of set latency and bandwidth; processes, messages and the package's strategies are real.
# Eight layers, 20 ms of backward each; a message costs 20 ms of latency, and 8 ms for each layer's gradients in it.

# %%
LAYERS, BACKWARD, SIZE = 8, 0.020, 100_000
LATENCY, BANDWIDTH = 0.020, SIZE / 0.008


class SlowLayer(torch.autograd.Function):
    """A layer whose backward takes a set time."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with trace.span("B", "backward"):
            time.sleep(BACKWARD)
        return grad, torch.ones_like(ctx.weight)


def paced(rank, world_size, layers_per_bucket, overlap):
    axis, model = Mesh(dp=world_size)["dp"], torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.zeros(SIZE // 8).double() for _ in range(LAYERS))
    sync = data.Buckets(model, axis, layers_per_bucket * SIZE) if overlap else data.Naive(model, axis)
    x = torch.zeros(1, requires_grad=True)
    comm.barrier(axis)
    trace.clear()
    start = time.perf_counter()
    with network.links(network.Link(LATENCY / 2, BANDWIDTH)):  # two steps of a ring: twice the latency
        sync.last_micro()
        for weight in model.weights:
            x = SlowLayer.apply(x, weight)
        x.sum().backward()
        with trace.span("wait", "wait"):
            sync.finish()
    return time.perf_counter() - start, trace.spans()


def predicted(layers_per_bucket, overlap):
    """Seconds by the alpha-beta model: a bucket starts when it is full and the link is free."""
    link_free = 0.0
    for bucket in range(LAYERS // layers_per_bucket):
        full = ((bucket + 1) * layers_per_bucket if overlap else LAYERS) * BACKWARD
        link_free = max(full, link_free) + LATENCY + layers_per_bucket * SIZE / BANDWIDTH
    return link_free


# %% tags=["measured"]
seen = {}
for layers, overlap in ((1, False), (1, True), (2, True), (4, True), (8, True)):
    took, spans = zip(*two.run(paced, layers, overlap), strict=True)
    seen[layers, overlap] = max(took)
    if (layers, overlap) in ((1, False), (2, True)):
        show(
            timeline(trace.merge(spans), title="overlapped" if overlap else "naive", clock="paced"),
            "paced",
            "buckets of two layers leave while backward runs."
            if overlap
            else "every message waits for backward.",
            "Timeline of two ranks: backward of eight layers above, messages as a strip below",
        )
table(
    [
        (layers, "yes" if o else "no", f"{1e3 * predicted(layers, o):.0f} ms", f"{1e3 * t:.0f} ms")
        for (layers, o), t in seen.items()
    ],
    ["layers a bucket", "overlap", "predicted", "seen (paced)"],
)
gain = lambda time_of: time_of((1, False)) / time_of((2, True))
print(
    f"gain of buckets of two layers over the naive form: predicted {gain(lambda how: predicted(*how)):.2f} times,",
    f"seen {gain(seen.get):.2f} times",
)
layers_each = (1, 2, 4, 8)
show(
    plots.u_curve(
        {
            "predicted": [(n * SIZE, predicted(n, True)) for n in layers_each],
            "seen (paced)": [(n * SIZE, seen[n, True]) for n in layers_each],
        }
    ),
    "paced",
    "backward and sum with buckets of one, two, four and eight layers; a star marks the best.",
    "Two U-shaped lines close together over four bucket sizes, highest at both ends",
)

# %% [markdown]
# What is seen lies above what is predicted: processes wake up a little late, and a chain of blocking messages pays
# for that once a message.
#
# ### The bucket size: a U
#
# Small buckets pay the latency often. One huge bucket starts when backward is over: no overlap at all. The best
# size lies between, and depends on the link. Move the sliders: what does a slow link want? What does a long
# latency?


# %%
def step_time(bucket, latency, bandwidth, backward=0.2, model_bytes=500e6, ranks=8):
    """Backward of a model whose gradients come evenly, in buckets of `bucket` bytes; ring all-reduce on the link."""
    buckets = max(1, round(model_bytes / bucket))
    link_free = 0.0
    for i in range(buckets):
        full = backward * (i + 1) / buckets
        each = 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * (model_bytes / buckets) / bandwidth
        link_free = max(full, link_free) + each
    return link_free


def u_curve(latency_us, gigabytes):
    bucket_sizes = [2**k for k in range(16, 30)]
    line = lambda latency, speed: [(b, step_time(b, latency, speed)) for b in bucket_sizes]
    return plots.u_curve(
        {
            f"{latency_us} µs, {gigabytes} GB/s": line(latency_us * 1e-6, gigabytes * 1e9),
            "20 µs, 25 GB/s": line(20e-6, 25e9),
        }
    )


explore(
    u_curve,
    "computed",
    "backward and sum of 500 MB of gradients on 8 ranks, over that of the best bucket size (star).",
    "U-shaped curves of step time against bucket size for two links, latency {latency_us} µs, {gigabytes} GB/s",
    posters=[{"latency_us": 200, "gigabytes": 5}],
    latency_us=(10, 1000, 200),
    gigabytes=[1, 5, 10, 25],
)

# %% [markdown]
# ## Accumulation sends nothing until the last micro-batch
#
# Gradients of several micro-batches add up in `.grad` (lesson 01). Summing over ranks commutes with summing over
# micro-batches, so one message at the end is enough. Counted on live ranks:


# %%
def traffic(rank, world_size, plan):
    parallel = build(Plan.parse(plan), config, Mesh(dp=world_size), torch.float64)
    comm.clear_log()
    parallel.engine.run(parallel.mine(Batches(np.arange(999) % 256, 8, 16).at(0)), None, parallel.sync)
    parallel.sync.finish()
    return sum(e.bytes for e in comm.log), len(comm.log)


formula = data_costs.bucket_bytes_sent(GPT2(config), 16 << 10, 4, 0)
for micro in (1, 2):
    sent, messages = four.run(traffic, f"dp=4,bucket=16,micro={micro}")[0]
    print(f"{micro} micro-batches: {sent:,} bytes in {messages} all-reduces; formula {formula:,}")

# %% [markdown]
# **Bug: the hook that misses accumulated micro-batches.** A reducer that sends in the *first* backward and never
# again: what later micro-batches add stays at home, and replicas part.


# %%
def sends_once(rank, world_size):
    torch.set_default_dtype(torch.float64)
    model, axis = GPT2(config), Mesh(dp=world_size)["dp"]
    for i, micro in enumerate(batches.at(0).rows(rank, world_size).micro(2)):
        (model.loss(model(micro.tokens), micro.targets) / micro.total).backward()
        for p in model.parameters() if i == 0 else []:
            p.grad = comm.all_reduce(p.grad, axis)
    return {n: p.grad for n, p in model.named_parameters()}


right = {n: p.grad for n, p in model.named_parameters()}  # the serial gradients from above
found = two.run(sends_once)
print("replicas agree:", distance(*found) < 1e-12)
print("equal to the serial gradients:", [distance(grads, right) < 1e-12 for grads in found])

# %% [markdown]
# The package refuses to begin with:


# %%
def too_early(rank, world_size):
    parallel = build(Plan.parse("dp=2"), config, Mesh(dp=2), torch.float64)
    parallel.sync.last_micro()  # said before the first of two backwards
    try:
        for micro in batches.at(0).rows(rank, 2).micro(2):
            parallel.model.loss(parallel.model(micro.tokens), micro.targets).backward()
    except RuntimeError as error:
        parallel.sync.finish()
        return str(error)


print(two.run(too_early)[0])

# %% [markdown]
# ## The other way: parameter servers
#
# Before all-reduce there were *servers*: ranks push gradients to the server of a weight and pull the new weight
# back. Synchronous, it computes the same. What differs is who is busy. With P bytes of gradients and n ranks: one
# server sends (n-1) P (and receives as much, so 2 (n-1) P pass through it), while a ring sends 2 (n-1)/n P
# everywhere. Below only what is sent counts. With the weights ("keys") shared out over all
# ranks, the servers reach the ring's bytes: that is already ZeRO's idea.

# %%
print(verify("dp=4,data=server", ranks=four))
print(verify("dp=4,data=servers", ranks=four))


# %%
def sent_in_a_step(rank, world_size, form):
    parallel = build(Plan.parse(f"dp={world_size},data={form}"), config, Mesh(dp=world_size), torch.float64)
    comm.clear_log()
    parallel.engine.run(parallel.mine(batches.at(0)), None, parallel.sync)
    parallel.sync.finish()
    parallel.sync.updated()
    return sum(e.bytes for e in comm.log)


whole = 8 * config.parameters
counted = {}
names = {"server": "one server", "servers": "keys on all ranks", "bucket": "all-reduce"}
for form, name in names.items():
    counted[name] = (4, max(four.run(sent_in_a_step, form)) / whole)
    print(f"{name:18} busiest of 4 ranks sends {counted[name][1]:.2f} times the model")
ns = list(range(2, 17))
show(
    plots.busiest(
        {
            "one server": [n - 1 for n in ns],
            "keys on all ranks": [2 * (n - 1) / n for n in ns],
            "all-reduce": [2 * (n - 1) / n for n in ns],
        },
        ns,
        counted,
    ),
    "counted",
    "bytes sent by the busiest rank; lines are formulas, rings were counted on four live ranks.",
    "A rising line for one server, two flat coinciding ones below 2 for shared keys and all-reduce",
)

# %% [markdown]
# (Keys are whole tensors, and the embedding is a large one. So its server has a little more to do than the others.)
#
# ## Who reads the text?
#
# Either every rank reads its own rows, or rank 0 reads all and deals them out. llm.c does the first; the port made
# at Barcelona did the second, because a share may then have any shape: rows, stretches of tokens, every n-th token
# (that is lesson 10's subject).


# %%
def load(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    own, dealt = each_reads(batches, 0, axis), one_reads(batches, 0, axis)
    return torch.equal(own.tokens, dealt.tokens) and torch.equal(own.targets, dealt.targets), own.tokens


same, tokens = zip(*four.run(load), strict=True)
print("both ways give the same bits:", all(same))
print("together they are the global batch:", torch.equal(torch.cat(tokens), batches.at(0).tokens))

# %%
rows, columns = np.indices((4, 12))
show(
    plots.shapes({"rows": rows, "contiguous": columns // 3, "interleaved": columns % 4}),
    "drawing",
    "three shapes of a rank's share of a batch of 4 rows and 12 tokens.",
    "Three grids of row by token coloured by rank: by rows, in vertical stretches, and in vertical stripes",
)

# %% [markdown]
# Targets are the inputs shifted by one **in the whole sequence**, before anything is dealt. Shift after, and each
# stretch loses the target of its last token. And a batch larger than the text is refused with both numbers:

# %%
try:
    Batches(np.arange(1000), rows=8, length=1000)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Exercises
#
# **1.** Write two methods of the bucketed reducer. `ready(name, grad)` is called for each gradient when it is
# final: collect it, and send the bucket as soon as it holds `full` elements or more. `send` starts
# `all_reduce(flat)`, which returns at once; `.wait()` on what it returns gives the summed tensor. `finish()` sends
# the rest and returns the sums.


# %% tags=["exercise"]
class Reducer:
    """Gathers gradients in buckets and sums them over ranks while backward goes on."""

    def __init__(self, all_reduce, full):
        self.all_reduce, self.full = all_reduce, full
        self.bucket, self.flying = [], []

    def send(self):
        flat = torch.cat([grad.flatten() for _, grad in self.bucket])
        self.flying.append((self.bucket, self.all_reduce(flat)))
        self.bucket = []

    def ready(self, name, grad):
        """A gradient is final."""
        ### BEGIN SOLUTION
        self.bucket.append((name, grad))
        if sum(g.numel() for _, g in self.bucket) >= self.full:
            self.send()
        ### END SOLUTION

    def finish(self):
        """Backward is over: the sums by name."""
        ### BEGIN SOLUTION
        if self.bucket:
            self.send()
        sums = {}
        for bucket, handle in self.flying:
            parts = handle.wait().split([g.numel() for _, g in bucket])
            sums.update({n: part.view_as(g) for (n, g), part in zip(bucket, parts, strict=True)})
        return sums
        ### END SOLUTION


check("the bucketed reducer", exercises.reducer, Reducer)


# %% tags=["wrong"]
# FAIL: the last bucket is not full
class Reducer(Reducer):
    def finish(self):
        self.bucket = []
        return super().finish()


# %% tags=["wrong"]
# FAIL: nothing was sent while backward ran
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))


# %% tags=["wrong"]
# FAIL: you waited while backward ran
class Reducer(Reducer):
    def send(self):
        super().send()
        bucket, handle = self.flying.pop()
        total = handle.wait()
        self.flying.append((bucket, type("Done", (), {"wait": lambda self: total})()))


# %% tags=["wrong"]
# FAIL: one message a tensor
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        self.send()


# %% [markdown]
# **2.** How many bytes does one rank send in a step of data parallelism? (`elements` divides evenly.)


# %% tags=["exercise"]
def step_bytes(elements, ranks, micro, each):
    """Bytes sent by each rank, of `elements` gradients of `each` bytes, with `micro` micro-batches."""
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * elements * each
    ### END SOLUTION


check("bytes of a step", exercises.step_bytes, step_bytes)


# %% tags=["wrong"]
# FAIL: only the last one's backward sends
def step_bytes(elements, ranks, micro, each):
    return 2 * (ranks - 1) / ranks * elements * each * micro


# %% tags=["wrong"]
# FAIL: reduce-scatter and all-gather
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) / ranks * elements * each


# %% [markdown]
# **3.** A library hands you, for each rank, the gradient of its *mean* loss, and how many tokens it had. Give the
# gradient of the mean over all tokens.


# %% tags=["exercise"]
def global_gradient(gradients, counts):
    """The gradient of the mean loss over all tokens of all ranks."""
    ### BEGIN SOLUTION
    return sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts)
    ### END SOLUTION


check("unequal shares", exercises.global_gradient, global_gradient)


# %% tags=["wrong"]
# FAIL: mean of means
def global_gradient(gradients, counts):
    return sum(gradients) / len(gradients)


# %% tags=["wrong"]
# FAIL: sum of means
def global_gradient(gradients, counts):
    return sum(gradients)


# %% [markdown]
# ## Drill
#
# 1. Eight replicas, each with a batch of 4 rows. Which serial batch size does this equal?
# 2. The all-reduce of a step takes 30 ms, backward 50 ms. What is the least that overlap can make of the 80 ms?
# 3. Why must all ranks send their buckets in the same order?
# 4. Why is the embedding's gradient the last to leave, although the head used it first?
# 5. Gradients are clipped to norm 1. May each rank clip its own before the sum?
#
# <details><summary>Answers</summary>
#
# 1. 32 rows. 2. A little over 50 ms: the last bucket cannot start before backward ends. 3. An all-reduce pairs the
# n-th call of one rank with the n-th of the others; swapped, equal sizes would add unlike things without any error.
# 4. The tied tensor gets its second part from the embedding, at the very end of backward. 5. No: the norm of the
# sum is not the sum of norms; clip after, by the global norm.
#
# </details>
#
# ## Further reading
#
# - Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (buckets, overlap).
# - Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
# - Goyal et al. 2017, "Accurate, Large Minibatch SGD" (what a large batch does to training; section 3 on
#   normalising).
# - Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
# - Next: lesson 05 shares out what every replica holds in full.
