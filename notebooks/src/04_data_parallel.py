# %% [markdown]
# # 04 Data parallel
#
# **The one-minute version.** Copy the model to every rank, give each rank other rows of the batch, and *sum* the
# gradients before the update. Then all replicas make the same step and stay the same. The art is in the sum: every
# rank sends 2(n - 1)/n times the bytes of the model, at every step, so it should travel in large pieces, and while
# backward still computes.
#
# Here is the claim of this lesson: the same loss, gradients, norm and weights as the serial run, on four live ranks
# with seven rows that do not divide evenly.

# %% tags=["setup"]
import numpy as np
import torch

from gpt2lab.corpus import Batch, Batches, shakespeare
from gpt2lab.corpus.loaders import SHAPES, InOrder, each_reads, joined, one_reads, steps_per_epoch
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import data as exercises
from gpt2lab.lessons.labs import data as lab
from gpt2lab.lessons.labs import recorded, updates
from gpt2lab.lessons.player import play
from gpt2lab.machine.checksum import summ
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import data
from gpt2lab.parallel.zero import costs
from gpt2lab.plan import Plan, build
from gpt2lab.plots import data as plots
from gpt2lab.plots.tensor import shards
from gpt2lab.plots.timeline import timeline
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm, paced, trace
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
# function below is the whole strategy: lines marked 1 to 3 are all that is parallel about it. What they call are
# arguments, so that further down we can get each of them wrong.

# %%
config = GPT2Config(vocab_size=256, n_positions=32, n_layer=3, n_head=2, n_embd=32)
batches = Batches(np.asarray(shakespeare()[:100_000]) % 256, rows=7, length=16)


def train(
    rank,
    world_size,
    steps=8,
    optimizer=torch.optim.SGD,
    lr=0.3,
    source=batches,
    make=lambda: GPT2(config),
    rows=Batch.rows,
    total=lambda batch, mine, n: batch.total,
    summed=comm.all_reduce,
    clear=True,
    updated=lambda model, axis: None,
):
    torch.set_default_dtype(torch.float64)
    model, axis = make(), Mesh(dp=world_size)["dp"]
    step_with = optimizer(model.parameters(), lr=lr)
    losses, digests = [], []
    for step in range(steps):
        batch = source.at(step)
        mine = rows(batch, rank, world_size)  # 1: other rows on every rank
        loss = model.loss(model(mine.tokens), mine.targets)
        loss = loss / total(batch, mine, world_size)  # 2: over the *global* number of tokens
        old = [0 if clear or p.grad is None else p.grad for p in model.parameters()]
        step_with.zero_grad()
        loss.backward()
        for p, before in zip(model.parameters(), old, strict=True):
            p.grad = summed(p.grad, axis) + before  # 3: sum of the gradients
        step_with.step()
        updated(model, axis)
        losses.append(loss.item())
        digests.append(summ(torch.cat([p.data.flatten() for p in model.parameters()])))
    return losses, digests, {n: p.data for n, p in model.named_parameters()} if rank == 0 else {}


def over_ranks(runs):
    """The sum of the ranks' losses at every step."""
    return [sum(losses) for losses in zip(*(losses for losses, _, _ in runs), strict=True)]


serial_losses, _, serial_weights = train(0, 1)
runs = four.run(train)

# %% [markdown]
# **Losses differ, gradients agree.** What a rank calls its loss is the part of its rows. The parts are different, and
# add up to the serial loss:

# %%
parts = [losses[0] for losses, _, _ in runs]
print("parts of step 0:", " + ".join(f"{part:.3f}" for part in parts), f"= {sum(parts):.3f}")
print("serial loss:    ", f"{serial_losses[0]:.3f}")
apart = lambda some, others: max(abs(a - b) for a, b in zip(some, others, strict=True))
print("largest difference in 8 steps below 1e-12:", apart(over_ranks(runs), serial_losses) < 1e-12)
own = {f"rank {r}": [7 / n * part for part in runs[r][0]] for r, n in enumerate((2, 2, 2, 1))}
show(
    plots.loss_lines(own, {"mean, by rows": over_ranks(runs)}, serial_losses),
    "computed",
    "the mean loss of each rank's own rows; their mean, weighted by rows (crosses), lies on the serial line.",
    "Four thin loss lines that differ at every step, and crosses on the thick serial line between them",
)

# %% [markdown]
# Rank 3 has one row where the others have two, so its part is half as large. Nothing has to be weighted, because
# nobody divided by a *local* count. **Normalise once, sum everywhere**: the rule of this whole package.
#
# Since gradients agree, parameters agree. `summ` is a checksum of all bits; equal letters in a column mean equal
# weights. Beside it a run whose sums were left out:

# %%
silent = four.run(train, summed=lab.own)
maps = {"gradients summed": [d for _, d, _ in runs], "no sum": [d for _, d, _ in silent]}
show(
    plots.checksums(maps),
    "computed",
    "checksums of all weights by rank and step; with the sum, replicas are the same bits at every step.",
    "Two maps of rank by step: left one letter everywhere, right four different letters in every column",
)
for name, digests in maps.items():
    print(
        f"{name}: same bits on all ranks: {all(len(set(step)) == 1 for step in zip(*digests, strict=True))}"
    )

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


rows = []
for bug, wrong in lab.BUGS.items():
    found = four.run(train, **wrong)
    losses, replicas = over_ranks(found), len({digests[-1] for _, digests, _ in found})
    off = distance(found[0][2], serial_weights)
    same, equal = "same" if replicas == 1 else f"{replicas} versions", f"off by {off:.0e}"
    rows.append((bug, f"{losses[0]:.2f} to {losses[-1]:.2f}", same, "equal" if off < 1e-12 else equal))
table(rows, ["bug", "sum of losses", "replicas", "weights against serial"])

# %% [markdown]
# - *no zero_grad*: the gradients of old steps stay and add up. All replicas agree with each other, so comparing
#   ranks says nothing.
# - *mean of means*: each rank divides by its own tokens. With eight rows on four ranks it would be *exactly right*.
#   Seven rows show it.
# - *weights averaged*: no gradient is sent, the weights are averaged after each update. For plain gradient descent
#   this is an average of gradients, so wrong only by a factor. For Adam it is another algorithm.
# - *lost rows*: `rows // ranks` for everybody. Three of seven rows are never seen; of ten rows, two:

# %%
ten = Batches(batches.source, rows=10, length=16).at(0)
ways = {"rows // ranks": lab.cut_off, "as even as can be": Batch.rows}
dealt = {}
for name, way in ways.items():
    dealt[name] = four.run(lambda rank, n, way=way: way(ten, rank, n).samples.tolist())
    lost = set(range(10)) - {row for share in dealt[name] for row in share}
    print(f"{name}: shares of {[len(share) for share in dealt[name]]} rows, lost {sorted(lost)}")
show(
    plots.rows_by_rank(dealt, 10),
    "counted",
    "ten rows dealt to four live ranks in both ways.",
    "Two strips of ten rows in four colours: above, the last two are red and lost; below, all have a rank",
)

# %% [markdown]
# The lecture's programs either refuse what does not divide (`int_divide`) or cut off; here shares differ by one row
# at most, and the global count does the weighting.
#
# ### The lecture's forgotten `zero_grad`
#
# The lecture trains four layers, x W and gelu, 1024 wide, on 128 rows, with the loss mean(x²) and AdamW. All
# layers begin alike, because each is drawn from seed 0. It never clears its gradients, so its recorded losses
# *rise* at the end. Here is its program by our `train`. Its data had no seed (ours have seed 1) and its weights came
# from a GPU's generator, so the first digits differ from the record.


# %%
toy = {"source": lab.toy_data(), "make": lab.Toy, "optimizer": torch.optim.AdamW, "lr": 1e-3, "steps": 5}
curves = {}
for clear, name in ((True, "with zero_grad"), (False, "without")):
    serial, _, weights = train(0, 1, clear=clear, **toy)
    found = four.run(train, clear=clear, **toy)
    means = [[4 * part for part in losses] for losses, _, _ in found]  # of 32 rows, as each rank prints it
    curves[name] = np.mean(means, axis=0).tolist()
    print(f"{name + ':':18}", *(f"{loss:.4f}" for loss in curves[name]))
    equal = apart(curves[name], serial) < 1e-12 and distance(found[0][2], weights) < 1e-9
    print("  mean of 4 rank losses equals the serial loss, and the weights do:", equal)
printed = [0.0130, 0.0032, 0.0021, 0.0023, 0.0024]
print("from the lecture: ", *(f"{loss:.4f}" for loss in printed), "(on GPUs)")
show(
    plots.loss_lines(curves, {"from the lecture": printed}, ylabel="loss"),
    "computed",
    "the lecture's network on four live ranks; its own record (crosses) follows the run without `zero_grad`.",
    "Two falling loss curves; from step 2 on one keeps falling, the other rises, and the crosses lie on that one",
)

# %% [markdown]
# (In the record, too, the mean of four ranks at the last step is the loss of one: 0.0024128.) The parallel run with
# the bug equals the serial run **with the same bug**: equality proofs find parallel bugs, not optimisation bugs.
#
# ### One seed for each name
#
# The lecture's layers are alike because its seed starts anew for each. Drawn from one running stream they would
# differ, but then a rank that builds a part of the model would have to know what the others draw. The package gives
# each parameter a seed made of its *name*, draws it whole, and cuts. So whatever the plan, the shards put together
# are the serial weights, bit for bit:


# %%
fresh = dict(GPT2(config).named_parameters())
for text in ("dp=4", "dp=4,zero=3", "tp=2", "pp=2", "dp=2,tp=2,zero=3"):
    ranks = {2: two, 4: four}[Plan.parse(text).world]
    counts, found = zip(*ranks.run(lab.first_weights, text, config), strict=True)
    whole = {n: w for weights in found for n, w in weights.items()}
    same = whole.keys() == fresh.keys() and all(torch.equal(w, fresh[n]) for n, w in whole.items())
    print(f"{text:17} ranks step {' '.join(f'{c:6,}' for c in counts)} weights; joined, serial bits: {same}")
strip = lambda weights: torch.cat([(w[:12, :16] / w.std()).detach() for w in weights], 1)
layers = list(lab.Toy().layers)[:3], [fresh[f"h.{i}.mlp.c_fc.weight"] for i in range(3)]
show(
    shards([strip(three) for three in layers], ["the lecture: one seed", "a seed by name"]),
    "computed",
    "corners of the weights of three layers side by side, in units of their deviation.",
    "Two heat maps: the left one repeats the same block three times, the right one does not",
)

# %% [markdown]
# ### Adam hides it
#
# Suppose gradients are *averaged* where they should be summed, or summed twice: wrong by a factor. Below all
# gradients are multiplied by 8. SGD's steps are eight times as long then, here too long to learn anything.

# %%
pairs = {}
for name, optimizer, lr in (("SGD", torch.optim.SGD, 0.3), ("AdamW", torch.optim.AdamW, 3e-3)):
    times = lambda factor: {"summed": lambda grad, axis: factor * grad}
    right, wrong = (train(0, 1, 12, optimizer, lr, **times(factor))[0] for factor in (1, 8))
    pairs[name], gap = (right, wrong), apart(right, wrong)
    words = "more than 0.1" if gap > 0.1 else "less than 0.001" if gap < 1e-3 else gap
    print(f"{name:6} losses differ by {words}")
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
eight = Batches(batches.source, rows=8, length=16).at(0)
for form, size in (("naive", 0), ("bucket", 16 << 10)):
    seen = four.run(lab.message_sizes, f"dp=4,data={form},bucket=16", config, eight)
    same = [seen[r] == costs.messages_sent(GPT2(config), size, 4, r) for r in range(4)]
    sizes = f"messages of {min(seen[0]):,} to {max(seen[0]):,} bytes"
    print(f"{form:6} {len(seen[0]):2} {sizes}, as the formula says: {all(same)}")
with torch.device("meta"):
    gpt2 = GPT2(GPT2Config()).to(torch.float32)
per_tensor = [4 * p.numel() for p in gpt2.parameters()]
per_bucket = [sum(4 * p.numel() for p in b) for b in data.into_buckets(list(gpt2.parameters()), 25 << 20)]
sizes = f"{len(per_tensor)} tensors from {min(per_tensor):,} to {max(per_tensor):,} bytes"
print(f"{sizes}; {len(per_bucket)} buckets")
show(
    plots.bucket_sizes(per_tensor, per_bucket),
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
right = {n: p.grad for n, p in model.named_parameters()}
print("equal to the serial gradients:", distance(gradients, right) < 1e-12)

# %% [markdown]
# `wte` is both embedding and head, and one tensor: autograd adds both gradients before the hook is called, at the
# very end of backward. It is counted once. The package's version adds what a real run needs: a fixed order on all
# ranks, parameters without gradient, and micro-batches.

# %%
show_source(data.Buckets._arrived)

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
show_source(costs.backward_and_sums)

# %% tags=["measured"]
captions = {
    (1, False): "every message waits for backward.",
    (2, True): "buckets of two layers leave while backward runs.",
}
seen = {}
for how in ((1, False), (1, True), (2, True), (4, True), (8, True)):
    took, spans = zip(*two.run(lab.backward, *how), strict=True)
    seen[how] = max(took)
    if how in captions:
        show(
            timeline(trace.merge(spans), title="overlapped" if how[1] else "naive", clock="paced"),
            "paced",
            captions[how],
            "Timeline of two ranks: backward of eight layers above, messages as a strip below",
        )
model = {how: lab.predicted(*how) for how in seen}
table(
    [
        (n, "yes" if o else "no", f"{1e3 * model[n, o]:.0f} ms", f"{1e3 * t:.0f} ms")
        for (n, o), t in seen.items()
    ],
    ["layers a bucket", "overlap", "predicted", "seen (paced)"],
)
gains = [times[1, False] / times[2, True] for times in (model, seen)]
print(
    "gain of buckets of two layers over the naive form: predicted {:.2f} times, seen {:.2f} times".format(
        *gains
    )
)
points = lambda times: [(n * lab.SIZE, times[n, True]) for n in (1, 2, 4, 8)]
show(
    plots.u_curve({"predicted": points(model), "seen (paced)": points(seen)}),
    "paced",
    "backward and sum with buckets of one, two, four and eight layers; a star marks the best.",
    "Two U-shaped lines close together over four bucket sizes, highest at both ends",
)

# %% [markdown]
# The run with buckets of two layers, step by step. A rank holds its own gradient `g7`, then the sum `s7`. Play it,
# or step with the arrow keys: from which step on does the link never rest?

# %% tags=["measured"]
play(
    two.run(recorded.buckets, 2, True),
    "paced",
    "backward of eight layers on two live ranks (green), all-reduces under way (arrows), and what each rank holds: `g` "
    "a gradient of its own, `s` a sum.",
    "Two ranks as boxes with arrows between them while both run backward",
)

# %% [markdown]
# What is seen lies above what is predicted: processes wake up a little late, and a chain of blocking messages pays
# for that once a message.
#
# ### The bucket size: a U
#
# Small buckets pay the latency often. One huge bucket starts when backward is over: no overlap at all. The best size
# lies between, and depends on the link. Move the sliders: what does a slow link want? What does a long latency?


# %%
def u_curve(latency_us, gigabytes):
    curves = {}
    for latency, speed in ((latency_us, gigabytes), (20, 25)):
        points = [(2**k, lab.step_time(2**k, latency * 1e-6, speed * 1e9)) for k in range(16, 30)]
        curves[f"{latency} µs, {speed} GB/s"] = points
    return plots.u_curve(curves)


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
# ### The update's block: another U
#
# AdamW computes each weight from that weight's gradient and state, and nothing else. So one flat stretch of weights
# may be updated in blocks of any size, one after another, or a shard on each rank, which is ZeRO (lesson 05). The
# bits are the same. Of 10,000 weights, 3334 are the shard of one of three ranks:


# %%
whole, _ = lab.adamw_in_blocks(10_000, 10_000)
for block in (3334, 1000, 64, 7):
    print(f"blocks of {block:4}: the same bits:", torch.equal(lab.adamw_in_blocks(10_000, block)[0], whole))

# %% tags=["measured"]
curve = [(2**k, lab.adamw_in_blocks(1 << 21, 2**k)[1]) for k in range(12, 22)]
show(
    plots.u_curve({"AdamW": curve}, "weights in a block", highest=10),
    "measured",
    "AdamW on two million weights, one core; a star marks the best block.",
    "A curve that is high for small blocks, lowest in the middle, and higher again for the largest",
)

# %% [markdown]
# Small blocks pay the overhead of each call often. AdamW is about ten passes over its numbers: a block that fits into
# the cache is read from memory once, a huge one in each pass.
#
# ## Accumulation sends nothing until the last micro-batch
#
# Gradients of several micro-batches add up in `.grad` (lesson 01). Summing over ranks commutes with summing over
# micro-batches, so one message at the end is enough. The calls are counted on live ranks; the bytes of a call are
# those of a ring:

# %%
formula = costs.bucket_bytes_sent(GPT2(config), 16 << 10, 4, 0)
for micro in (1, 2):
    messages = four.run(lab.message_sizes, f"dp=4,bucket=16,micro={micro}", config, eight)[0]
    total = f"{sum(messages):,} bytes in {len(messages)} all-reduces"
    print(f"{micro} micro-batches: {total}; formula {formula:,}")

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


found = two.run(sends_once)
print("replicas agree:", distance(*found) < 1e-12)
print("equal to the serial gradients:", [distance(grads, right) < 1e-12 for grads in found])

# %% [markdown]
# PyTorch's own is `DistributedDataParallel`: buckets, hooks and overlap as above, and `no_sync` for all
# micro-batches but the last. It averages over ranks where this package sums, hence the factor:


# %%
def pytorchs_own(rank, world_size):
    from torch.nn.parallel import DistributedDataParallel

    torch.set_default_dtype(torch.float64)
    model, batch = DistributedDataParallel(GPT2(config), bucket_cap_mb=0.01), batches.at(0)
    first, last = batch.rows(rank, world_size).micro(2)
    loss = lambda micro: world_size * model.module.loss(model(micro.tokens), micro.targets) / batch.total
    with model.no_sync():  # gradients add up, nothing is sent
        loss(first).backward()
    loss(last).backward()
    return {n: p.grad for n, p in model.module.named_parameters()}


print("DDP has the serial gradients:", [distance(grads, right) < 1e-12 for grads in two.run(pytorchs_own)])

# %% [markdown]
# Our package, said too early that the last micro-batch begins, refuses:


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
# everywhere. Below only what is sent counts. With the weights ("keys") shared out over all ranks, the servers reach
# the ring's bytes: that is already ZeRO's idea.

# %%
print(verify("dp=4,data=server", ranks=four))
print(verify("dp=4,data=servers", ranks=four))


# %%
counted = {}
names = {"server": "one server", "servers": "keys on all ranks", "bucket": "all-reduce"}
for form, name in names.items():
    most = max(sum(messages) for messages in four.run(lab.message_sizes, f"dp=4,data={form}", config, eight))
    counted[name] = (4, most / (8 * config.parameters))
    print(f"{name:18} busiest of 4 ranks sends {counted[name][1]:.2f} times the model")
ns = list(range(2, 17))
ring = [2 * (n - 1) / n for n in ns]
show(
    plots.busiest(
        {"one server": [n - 1 for n in ns], "keys on all ranks": ring, "all-reduce": ring}, ns, counted
    ),
    "counted",
    "bytes sent by the busiest rank; lines are formulas, marks what the calls of four live ranks account for.",
    "A rising line for one server, two flat coinciding ones below 2 for shared keys and all-reduce",
)

# %% [markdown]
# (Keys are whole tensors, and the embedding is a large one. So its server has a little more to do than the others.)
#
# ### Where the time of an update goes
#
# The first design of Barcelona's port was one server: reduce the gradients, update on rank 0, broadcast the weights.
# The package has it in four ways, for weights that lie in one flat stretch:

# %%
show_source(updates.sharded)


# %%
expected = lab.updated_serially(4)
for way in updates.WAYS:
    equal = all((weights - expected).abs().max() < 1e-12 for weights, _ in four.run(lab.update, way))
    print(f"{way:27} all ranks have the serial weights: {equal}")

# %% [markdown]
# Now paced: the weights take 60 ms on a link, and AdamW on all of them 40 ms. One server pays everything one after
# the other, while three ranks wait for it. Owners share the update, but their four chains pay the latency four times.
# Reduce-scatter and all-gather share both. Beside it what the port's wiki publishes for GPT-2 124M with eight workers
# and a server, about 720 ms a step: the bottleneck is the update, not the model.

# %% tags=["measured"]
link = paced.Link(0.001, 8 * lab.WEIGHTS / 0.060)
seen = {way: four.run(lab.update, way, link, 0.040)[0][1] for way in updates.WAYS}
wiki = {"forward, backward": 100, "reduce": 500, "broadcast": 115, "rest": 5}
show(
    plots.phases(seen, wiki, ("an update on rank 0", "a step in Barcelona")),
    "paced",
    "left, the parts of an update on four live ranks; right, published by the Barcelona port's wiki.",
    "Stacked bars: reduce-scatter and all-gather take least; in the published step the reduce dwarfs the rest",
)

# %% [markdown]
# ## Who reads the text?
#
# Either every rank reads its own rows, or rank 0 reads all and deals them out. llm.c does the first; the port made
# at Barcelona did the second, because a share may then have any shape: rows, stretches of tokens, every n-th token
# (that is lesson 10's subject). All of them both ways on four live ranks, put together again:


# %%
def same_batch(a, b):
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)


def load(rank, world_size, source, step, shape):
    axis = Mesh(dp=world_size)["dp"]
    own, dealt = each_reads(source, step, axis, shape), one_reads(source, step, axis, shape)
    return own, same_batch(own, dealt)


owners, rows = {}, []
for shape in SHAPES:
    shares, same = zip(*four.run(load, batches, 0, shape), strict=True)
    batch, owners[shape] = joined(shares)
    shifted = torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
    rows.append((shape, all(same), same_batch(batch, batches.at(0)), shifted))
table(rows, ["shape", "both ways the same bits", "together the global batch", "targets are the next tokens"])
show(
    plots.shapes(owners),
    "counted",
    "who got which token of a batch of 7 rows and 16 tokens, from four live ranks.",
    "Three grids of row by token coloured by rank: by rows, in vertical stretches, and in vertical stripes",
)

# %% [markdown]
# Targets are the inputs shifted by one **in the whole sequence**, before anything is dealt, so they are right at the
# edges of a share too. Shift after, and each stretch loses the target of its last token.
#
# ### How large may a batch be?
#
# llm.c walks through the text in order, N B T tokens a step on N ranks, and begins anew when what is left does not
# fill a step and the target of its last token. A batch larger than the text is refused. Of its two texts
# tinyshakespeare has 305,260 tokens to train on, TinyStories 925,653,391:

# %%
texts = {"tinyshakespeare": 305_260, "TinyStories": 925_653_391}
for rows in (298, 299):  # N B, for T = 1024
    try:
        steps = InOrder(range(305_260), rows, 1024).steps
        print(f"{rows} rows of 1024: N B T = {rows * 1024:,} tokens, {steps} step an epoch")
    except ValueError as error:
        print(error)
in_order = InOrder(batches.source, rows=7, length=16)
first, again = (four.run(load, in_order, step, "rows") for step in (0, in_order.steps))
same = all(ok and same_batch(a, b) for (a, _), (b, ok) in zip(first, again, strict=True))
print(f"after {in_order.steps} steps both ways begin anew: {same}")
show(
    plots.epochs(texts, steps_per_epoch, [int(2 ** (8 + k / 8)) for k in range(180)]),
    "computed",
    "an epoch against the size of a step, from llm.c's 4 rows of 64 tokens on; it ends where no step fits.",
    "Left, steps an epoch fall to one at the size of the text; right, the share seen falls to a half before",
)

# %% [markdown]
# ## Exercises
#
# **1.** The strategy itself. `mine` holds this rank's rows, `total` is the number of tokens of *all* ranks. Write what
# stands between the loss and the optimizer's step. The checker runs it on three live ranks with seven rows, for two
# steps, compares every gradient with one process, and counts the bytes.


# %% tags=["exercise"]
def parallel_step(model, optimizer, mine, total, axis):
    """One step of this rank; afterwards all ranks hold the same gradients and weights."""
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)  # the sum over this rank's tokens
    ### BEGIN SOLUTION
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    ### END SOLUTION
    optimizer.step()


check("a step of data parallelism", exercises.three_lines, parallel_step)


# %% tags=["wrong"]
# FAIL: nothing was sent
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    optimizer.step()


# %% tags=["wrong"]
# FAIL: keep its result
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: a third of the right gradient
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis) / axis.size
    optimizer.step()


# %% tags=["wrong"]
# FAIL: divide each rank's sum of losses by the tokens of *all* ranks
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / (mine.targets >= 0).sum() / axis.size).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: An all-reduce of each gradient takes
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_gather(p.grad[None], axis).sum(0)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: a gradient is None
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    loss = comm.all_reduce(loss.detach() / total, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: step 2, the gradient of
def parallel_step(model, optimizer, mine, total, axis):
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% [markdown]
# **2.** Write two methods of the bucketed reducer. `ready(name, grad)` is called for each gradient when it is
# final: collect it, and send the bucket as soon as it holds `full` elements or more. `send` starts
# `all_reduce(flat)`, which returns at once; `.wait()` on what it returns gives the summed tensor. `finish()` sends
# the rest, returns the sums by name, each in its shape, and is ready for the next step. The checker looks at each
# message, then lets autograd's hooks on two live ranks call yours.


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
        self.flying = []
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
# FAIL: was sent while backward ran
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


# %% tags=["wrong"]
# FAIL: give each its shape again
class Reducer(Reducer):
    def finish(self):
        return {name: total.flatten() for name, total in super().finish().items()}


# %% tags=["wrong"]
# FAIL: each bucket leaves one gradient late
class Reducer(Reducer):
    def ready(self, name, grad):
        if sum(g.numel() for _, g in self.bucket) >= self.full:
            self.send()
        self.bucket.append((name, grad))


# %% tags=["wrong"]
# FAIL: after 2 gradients of [6, 2] elements messages of [] have left
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if sum(g.numel() for _, g in self.bucket) > self.full:
            self.send()


# %% tags=["wrong"]
# FAIL: after 3 gradients of [6, 2, 9] elements messages of [8] have left
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if len(self.bucket) == 2:
            self.send()


# %% tags=["wrong"]
# FAIL: two live ranks, step 2
class Reducer(Reducer):
    def finish(self):
        self.sums = getattr(self, "sums", None) or super().finish()  # made once, then used again
        return self.sums


# %% [markdown]
# **3.** How many bytes does one rank send in a step of data parallelism? (`elements` divides evenly.)


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


# %% tags=["wrong"]
# FAIL: expected 6000, got 8000
def step_bytes(elements, ranks, micro, each):
    return 2 * elements * each if ranks > 1 else 0


# %% tags=["wrong"]
# FAIL: expected 6000, got 12000
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) * elements * each


# %% tags=["wrong"]
# FAIL: expected 7000, got 14000
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) / 2 * elements * each


# %% tags=["wrong"]
# FAIL: 16-bit gradients
def step_bytes(elements, ranks, micro, each):
    return 2 * (ranks - 1) / ranks * elements * 4


# %% [markdown]
# **4.** A library hands you, for each rank, the gradient of its *mean* loss, and how many tokens it had. Give the
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


# %% tags=["wrong"]
# FAIL: got -0.178519
def global_gradient(gradients, counts):
    return sum(g / c for g, c in zip(gradients, counts, strict=True))


# %% tags=["wrong"]
# FAIL: shares of 30, 20 and 20 tokens
def global_gradient(gradients, counts):
    return sum(g * c for g, c in zip(gradients, counts, strict=True))


# %% tags=["wrong"]
# FAIL: function returned None
def global_gradient(gradients, counts):
    sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts)


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
# - Goyal et al. 2017, "Accurate, Large Minibatch SGD" (what a large batch does to training; section 3
#   on normalising).
# - Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
# - Next: lesson 05 shares out what every replica holds in full.
