# %% [markdown]
# # 04 Data parallel
#
# **The one-minute version.** Copy the model to every rank, give each rank other rows of the batch, and *sum* the
# gradients before the update. Then all replicas make the same step and stay the same. The art is in the sum: every
# rank sends 2(n - 1)/n times the bytes of the model, at every step, so it should travel in large pieces, and while
# backward still computes. Whether backward can hide it depends on machine and tokens of a rank.

# %% tags=["setup"]
from functools import partial
from types import SimpleNamespace

import torch

from gpt2lab.corpus import shakespeare
from gpt2lab.corpus.batches import Batch
from gpt2lab.corpus.loaders import InOrder
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import data as exercises
from gpt2lab.lessons.labs import compressed, recorded, replicas, thresholds, updates
from gpt2lab.lessons.labs import data as lab
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import data
from gpt2lab.parallel.zero import costs
from gpt2lab.plots import data as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.verify import verify

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these models are too small to share

# %% [markdown]
# ## By hand
#
# Three lines make a training loop data-parallel. Here is the whole strategy, on a small GPT-2 and Shakespeare folded
# into 256 tokens, with seven rows a batch:

# %%
config = GPT2Config(vocab_size=256, n_positions=32, n_layer=3, n_head=2, n_embd=32)
batches = replicas.shakespeare_rows(7)


# %% tags=["slide"]
def train(rank, world_size):
    torch.set_default_dtype(torch.float64)
    model, axis = GPT2(config), Mesh(dp=world_size)["dp"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, digests = [], []
    for step in range(8):
        batch = batches.at(step)
        mine = batch.rows(rank, world_size)  # 1: other rows on every rank
        loss = model.loss(model(mine.tokens), mine.targets) / batch.total  # 2: over the tokens of *all*
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, axis)  # 3: the sum of the gradients
        optimizer.step()
        losses.append(loss.item())
        digests.append(replicas.checksum(model))
    return losses, digests, {n: p.data for n, p in model.named_parameters()}


two, four = Ranks(2), Ranks(4)
serial_losses, _, serial_weights = train(0, 1)
runs = four.run(train)
print("the serial weights on each rank:", [replicas.distance(r[2], serial_weights) < 1e-12 for r in runs])
print(verify("dp=4", ranks=four))

# %% [markdown]
# **Losses differ, gradients agree.** A rank's loss is the part of its rows. The parts add up to the serial loss:

# %%
parts = [losses[0] for losses, *_ in runs]
print(*(f"{part:.3f}" for part in parts), f"add up to {sum(parts):.3f}; serial {serial_losses[0]:.3f}")
print("equal in all 8 steps:", replicas.apart(replicas.over_ranks(runs), serial_losses) < 1e-12)
own = {f"rank {r}": [7 / n * part for part in runs[r][0]] for r, n in enumerate((2, 2, 2, 1))}
show(
    plots.loss_lines(own, {"mean, by rows": replicas.over_ranks(runs)}, serial_losses),
    "computed",
    "the mean loss of each rank's own rows; their mean, weighted by rows (crosses), lies on the serial line.",
    "Four thin loss lines that differ at every step, and crosses on the thick serial line between them",
)

# %% [markdown]
# Rank 3 has one row, the others two. Nothing has to be weighted, because no rank divided by a *local* count.
# **Normalise once, sum everywhere**: the rule of this whole package.
#
# Since gradients agree, weights agree. Equal letters mean equal checksums of all weights; beside it a run without
# sums. (`replicas.train` is `train` with a switch for each of its lines.)

# %%
silent = four.run(replicas.train, batches, lambda: GPT2(config), summed=lambda gradient, axis: gradient)
maps = {"gradients summed": [r[1] for r in runs], "no sum": [r[1] for r in silent]}
show(
    plots.checksums(maps),
    "computed",
    "checksums of all weights by rank and step; with the sum, replicas are the same bits at every step.",
    "Two maps of rank by step: left one letter everywhere, right four different letters in every column",
)
print("same bits on all ranks:", {name: all(d == of[0] for d in of) for name, of in maps.items()})

# %% [markdown]
# A lecture of Stanford's CS336 (2024) keeps its sum under `if torch.cuda.is_available()`. On a laptop, then, nothing
# is summed, and its note "parameters are the same" is false.
#
# ## Bug lab: five wrong programs that run
#
# Each finishes, and its loss falls.

# %%
guess = predict(
    "Which of them does a comparison of the replicas' weights find?",
    "no sync",
    "no zero_grad",
    "no sync, weights averaged",
    "all five",
    "none",
)


# %%
def average(model, axis):
    for p in model.parameters():
        p.data = comm.all_reduce(p.data, axis) / axis.size


own = lambda gradient, axis: gradient
bugs = {
    "(none)": {},
    "no sync": {"summed": own},
    "no zero_grad": {"clear": False},  # old gradients stay as where ranks average: they are not summed again
    "mean of means": {"total": lambda batch, mine, n: mine.targets.numel() * n},
    "weights averaged": {"summed": own, "updated": average},
    "lost rows": {"rows": replicas.cut_off},  # the first rows // ranks of each rank
}
rows = []
for bug, wrong in bugs.items():
    found = four.run(replicas.train, batches, lambda: GPT2(config), **wrong)
    first, *_, last = replicas.over_ranks(found)
    off, versions = replicas.distance(found[0][2], serial_weights), {digests[-1] for _, digests, _ in found}
    same = "same" if len(versions) == 1 else f"{len(versions)} versions"
    rows.append((bug, f"{first:.2f} to {last:.2f}", same, "equal" if off < 1e-12 else f"off by {off:.0e}"))
table(rows, ["bug", "sum of losses", "replicas", "weights against serial"])
guess.beside(", ".join(bug for bug, _, replica, _ in rows if replica != "same"), "counted")

# %% [markdown]
# - *no zero_grad*, where ranks average (DDP): old gradients stay and add up; replicas agree. With our *sum* they would
#   be summed again, and the loss explode.
# - *mean of means*: each rank divides by its own tokens. Eight rows on four ranks would be *exactly right*; seven show
#   it. Transformers did so over micro-batches ([#34191](https://github.com/huggingface/transformers/pull/34191)) and
#   ranks ([#34242](https://github.com/huggingface/transformers/issues/34242)), Megatron-LM over cut sequences,
#   unevenly masked ([#7513](https://github.com/NVIDIA/Megatron-LM/pull/7513)). Dividing by all tokens *and* ranks is
#   as wrong ([#40610](https://github.com/huggingface/transformers/pull/40610)).
# - *weights averaged* after each update, no gradient sent. For SGD wrong by a factor, for Adam another algorithm.
# - *lost rows*: `rows // ranks` for everybody. Three of seven rows are never seen, of ten two:

# %%
ten = replicas.shakespeare_rows(10).at(0)
ways = {"rows // ranks": replicas.cut_off, "as even as can be": Batch.rows}
rows_of = lambda rank, size, way: way(ten, rank, size).samples.tolist()
dealt = {name: four.run(rows_of, way) for name, way in ways.items()}
print({name: [len(share) for share in shares] for name, shares in dealt.items()}, "rows of ten")
show(
    plots.rows_by_rank(dealt, 10),
    "counted",
    "ten rows dealt to four live ranks in both ways.",
    "Two strips of ten rows in four colours: above, the last two are red and lost; below, all have a rank",
)

# %% [markdown]
# ### The lecture's forgotten `zero_grad`
#
# The lecture trains four layers, x W and gelu, 1024 wide, on 128 rows, and never clears its gradients, so its recorded
# losses *rise* at the end. (Its data had no seed: last digits differ.)

# %%
printed = [0.0130, 0.0032, 0.0021, 0.0023, 0.0024]
toy = {"source": replicas.toy_data(), "make": replicas.Toy}
toy |= {"optimizer": torch.optim.AdamW, "lr": 1e-3, "steps": 5}
toys = {}
for name, clear in (("with zero_grad", True), ("without", False)):
    alone, _, weights = replicas.train(0, 1, clear=clear, **toy)
    found = four.run(replicas.train, clear=clear, **toy)
    toys[name] = losses = replicas.over_ranks(found)  # the mean of what the lecture's ranks print
    equal = replicas.apart(losses, alone) < 1e-12 and replicas.distance(found[0][2], weights) < 1e-9
    print(f"{name + ':':18}", *(f"{loss:.4f}" for loss in losses), " serial and parallel equal:", equal)
print("from the lecture: ", *(f"{loss:.4f}" for loss in printed))
show(
    plots.loss_lines(toys, {"from the lecture": printed}, ylabel="loss (mean square)"),
    "computed",
    "the lecture's network on four live ranks; its own record (crosses) follows the run without `zero_grad`.",
    "Two falling loss curves; from step 2 on one keeps falling, the other rises, and the crosses lie on that one",
)

# %% [markdown]
# Where ranks average, the parallel run with the bug equals the serial run **with the same bug**: equality proofs find
# parallel bugs, not optimisation bugs.
#
# ### One seed for each name
#
# The lecture's layers are all alike, because its seed starts anew for each. In one running stream a rank would have
# to know what the others draw. The package seeds each parameter by its *name*, draws it whole, and cuts. So under any
# plan the shards together are the serial weights, bit for bit:


# %%
def first_weights(rank, world_size, text):
    parallel = lab.built(text, config)
    return sum(piece.tensor.numel() for piece in parallel.sync.pieces), parallel.weights()


fresh = dict(GPT2(config).named_parameters())
for text in ("dp=4", "dp=4,zero=3", "tp=2", "pp=2", "dp=2,tp=2,zero=3"):
    pool = two if text in ("tp=2", "pp=2") else four
    counts, parts = zip(*pool.run(first_weights, text), strict=True)
    joined = {n: w for of_rank in parts for n, w in of_rank.items()}
    same = joined.keys() == fresh.keys() and all(torch.equal(w, fresh[n]) for n, w in joined.items())
    print(f"{text:17} ranks step {' '.join(f'{c:6,}' for c in counts)} weights; joined, serial bits: {same}")
# %% [markdown]
# ### Adam hides it
#
# Suppose gradients are summed twice, or where an *average* is meant: too large, here eight times. SGD then learns
# nothing.

# %%
pairs = {}
for name, how in {"SGD": (torch.optim.SGD, 0.3), "AdamW": (torch.optim.AdamW, 3e-3)}.items():
    run = lambda by, how=how: replicas.train(0, 1, batches, lambda: GPT2(config), 12, *how, summed=by)[0]
    pairs[name] = [run(lambda g, axis, factor=factor: factor * g) for factor in (1, 8)]
gaps = {name: replicas.apart(*pair) for name, pair in pairs.items()}
print("losses differ by more than 0.001 under:", *(name for name, gap in gaps.items() if gap > 1e-3))
show(
    plots.hidden(pairs),
    "computed",
    "Adam divides the gradient by its own size, so a wrong factor leaves hardly a trace in its loss curve.",
    "Two pairs of loss curves: under SGD the wrong one shoots out of the picture, under AdamW they coincide",
)

# %% [markdown]
# Compare gradients, their **norm** before clipping, and trajectories with SGD. `verify` does.
#
# ## The naive form, and where its time goes
#
# One blocking all-reduce for each tensor, after backward. GPT-2's tensors differ wildly in size, and each message
# pays the latency. Beside it buckets of 25 MB, the default of PyTorch's DDP; ours is 1 MiB, for small models.

# %%
eight = replicas.shakespeare_rows(8).at(0)
for form, size in (("naive", 0), ("bucket", 16 << 10)):
    seen = four.run(lab.message_sizes, f"dp=4,data={form},bucket=16", config, eight)
    same = all(seen[r] == costs.messages_sent(GPT2(config), size, 4, r) for r in range(4))
    print(
        f"{form:6} {len(seen[0]):2} messages, {min(seen[0]):,} to {max(seen[0]):,} bytes, by formula: {same}"
    )
with torch.device("meta"):
    large = list(GPT2(GPT2Config()).to(torch.float32).parameters())
in_buckets = [4 * sum(p.numel() for p in one) for one in data.into_buckets(large, 25 << 20)]
show(
    plots.bucket_sizes([4 * p.numel() for p in large], in_buckets),
    "computed",
    "gradient messages of GPT-2 124M: one a tensor, and gathered in buckets of 25 MB. The largest is final last: "
    "nothing is left to hide it behind.",
    "Bars of message sizes on a log scale: 148 of very different size on the left, 17 on the right, one above the rest",
)

# %% [markdown]
# ## Buckets, sent while backward runs
#
# Backward finishes the *last* layer's gradients first. So send them at once. A *hook*, a function that autograd
# calls, tells when a gradient is final. When enough have gathered, they leave as one *asynchronous* all-reduce: the
# call returns at once, backward goes on, and at the end we wait. By hand:


# %% tags=["slide"]
def overlapped(rank, world_size, bucket_elements=4000):
    torch.set_default_dtype(torch.float64)
    model, axis, batch = GPT2(config), Mesh(dp=world_size)["dp"], batches.at(0)
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
    mine = batch.rows(rank, world_size)
    (model.loss(model(mine.tokens), mine.targets) / batch.total).backward()
    started = len(flying)
    if bucket:
        send()
    for parameters, handle in flying:
        parts = handle.wait().split([p.numel() for p in parameters])
        for p, g in zip(parameters, parts, strict=True):
            p.grad = g.view_as(p)
    return started, len(flying), {n: p.grad for n, p in model.named_parameters()}


started, messages, gradients = four.run(overlapped)[0]
print(messages, "messages,", started, "of them sent before backward had returned")
model, batch = GPT2(config), batches.at(0)
(model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
right = {n: p.grad for n, p in model.named_parameters()}
print("equal to the serial gradients:", replicas.distance(gradients, right) < 1e-12)

# %% [markdown]
# `wte` is both embedding and head: autograd adds both gradients before the hook is called, at the very end of
# backward. It is counted once. The package adds a fixed order on all ranks, parameters without gradient, and
# micro-batches.

# %%
show_source(data.Buckets._arrived)

# %%
print(verify("dp=2,data=naive", ranks=two), verify("dp=4,bucket=1", ranks=four), sep="\n")

# %% [markdown]
# ### Does it help? A paced run
#
# Computing is *sleeping* here, and messages keep
# to a link of set latency and bandwidth; processes and strategies are real. Eight layers, 20 ms of backward each; a
# message costs 20 ms of latency, and 8 ms for each layer's gradients in it.

# %%
show_source(costs.backward_and_sums)

# %% tags=["measured"]
seen = {}
for how in ((1, False), (1, True), (2, True), (4, True), (8, True)):  # layers a bucket, overlap
    took, spans = zip(*two.run(lab.backward, *how), strict=True)
    seen[how] = max(took), trace.merge(spans)
for how, name in {(1, False): "naive", (2, True): "overlapped, two layers a bucket"}.items():
    fig = timeline(seen[how][1], title=name, clock="paced")
    fig.axes[0].set_xlim(0, 1e3 * seen[1, False][0])
    show(fig, "paced", f"{name}: backward above, messages below.", f"Timeline of two ranks, {name}")
model = {how: lab.predicted(*how) for how in seen}
rows = [(*how, f"{1e3 * model[how]:.0f} ms", f"{1e3 * took:.0f} ms") for how, (took, _) in seen.items()]
table(rows, ["layers a bucket", "overlap", "predicted", "seen (paced)"])

# %% [markdown]
# Processes wake up late, hence the difference. Step by step: a rank holds its own gradient `g7`, then the sum `s7`.
# When does the link rest, and why?

# %% tags=["measured"]
play(
    two.run(recorded.buckets, 2, True),
    "paced",
    "backward of eight layers on two live ranks (green), all-reduces under way (arrows), and what each rank holds: `g` "
    "a gradient of its own, `s` a sum.",
    "Two ranks as boxes with arrows between them while both run backward",
)

# %% [markdown]
# ### The bucket size: a U
#
# Small buckets pay the latency often. One huge bucket overlaps nothing. What does a slow link want? What does a long
# latency?


# %%
def seconds_by_bucket(latency_us, gigabytes, ranks=8):
    found = []
    for bucket in (2**k for k in range(16, 30)):
        count = max(1, round(500e6 / bucket))
        ring = 2 * (ranks - 1) * (latency_us * 1e-6 + 500e6 / count / ranks / (gigabytes * 1e9))
        found.append((bucket, costs.backward_and_sums(count, 0.2, ring)))  # backward takes 0.2 s
    return found


def u_curve(latency_us, gigabytes_per_s):
    both = (latency_us, gigabytes_per_s), (20, 25)
    return plots.u_curve({f"{a} µs, {w} GB/s": seconds_by_bucket(a, w) for a, w in both})


explore(
    u_curve,
    "computed",
    "backward and sum of 500 MB of gradients on 8 ranks, over that of the best bucket size (star).",
    "U-shaped curves of step time against bucket size for two links, latency {latency_us} µs, {gigabytes_per_s} GB/s",
    latency_us=(10, 1000, 200),
    gigabytes_per_s=[5, 1, 10, 25],
)

# %% [markdown]
# ## From how many tokens on?
#
# Backward computes 4 operations for each of P weights and t tokens of a rank; the ring sends 2(n-1)/n b bytes for
# each weight. With F operations and W bytes a second
#
# $$\frac{4 P t}{F} \ge \frac{2 (n-1)}{n} \frac{P b}{W} \quad\Leftrightarrow\quad t \ge \frac{n-1}{n}\,\frac{b
# F}{2 W}$$
#
# P cancels: machine and tokens of a rank decide whether backward hides the sum (but for the last message, the
# embedding's 154 MB). With fewer tokens, ranks wait.

# %%
guess = predict("Whose ranks need most tokens?", "this laptop", "8 GPUs", "64 GPUs")

# %% tags=["measured"]
flops, bandwidth = min(two.run(lab.rates))
machines = (thresholds.laptop(flops, bandwidth, name="this laptop"), *thresholds.machines())
least = {m.name: thresholds.tokens_per_rank("data", m) for m in machines}
rows = [(*thresholds.row(m), f"{least[m.name]:,.0f}") for m in machines]
table(rows, [*thresholds.HEADER, "tokens a rank, at least"])
show(
    plots.thresholds(least),
    "computed",
    "time of the ring over time of backward against the tokens of a rank; below the dashed line backward hides the "
    f"ring. GPUs by NVIDIA's data sheets for H100, at {thresholds.EFFICIENCY} of their peak (lesson 19); the laptop as "
    "just measured.",
    "Three falling lines on log axes; the laptop's crosses one first, that of 64 GPUs last",
)

# %%
guess.beside(max(least, key=least.get), "computed")

# %% [markdown]
# A GPU computes so fast that its wires are slow: 8 of them on NVLink need 1,135 tokens<!--above--> each, 64 over
# InfiniBand 11,488 tokens<!--above-->. The laptop needs few: its cores are slow, its wire is memory. And beyond a
# *critical batch size* more rows teach little (McCandlish et al. 2018).
#
# ## Accumulation sends nothing until the last micro-batch
#
# Gradients of several micro-batches add up in `.grad` (lesson 01), so one message at the end is enough. Calls are
# counted on live ranks, with the bytes of a ring:

# %%
formula = costs.bucket_bytes_sent(GPT2(config), 16 << 10, 4, 0)
for micro in (1, 2):
    messages = four.run(lab.message_sizes, f"dp=4,bucket=16,micro={micro}", config, eight)[0]
    print(f"{micro} micro-batches: {sum(messages):,} bytes in {len(messages)} sums; formula {formula:,}")

# %% [markdown]
# **Bug: the hook that misses accumulated micro-batches.** A reducer that sends in the *first* backward and never
# again: what later micro-batches add stays at home, and replicas part.


# %%
def sends_once(rank, world_size):
    model, axis = GPT2(config).double(), Mesh(dp=world_size)["dp"]
    for i, micro in enumerate(batches.at(0).rows(rank, world_size).micro(2)):
        (model.loss(model(micro.tokens), micro.targets) / micro.total).backward()
        for p in model.parameters() if i == 0 else []:
            p.grad = comm.all_reduce(p.grad, axis)
    return {n: p.grad for n, p in model.named_parameters()}


print("replicas agree:", replicas.distance(*two.run(sends_once)) < 1e-12)
print("the package, told of the last one too early:", two.run(lab.too_early, config, batches.at(0))[0])

# %% [markdown]
# PyTorch's `DistributedDataParallel` has buckets, hooks, overlap, and `no_sync` (common mistakes with it: lesson 18).
# It averages where we sum, hence the factor:


# %% tags=["slide"]
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


print("DDP has the serial gradients:", [replicas.distance(g, right) < 1e-12 for g in two.run(pytorchs_own)])

# %% [markdown]
# ## The other way: parameter servers
#
# (A second sitting may begin here.)
#
# Before all-reduce there were *servers*: ranks push gradients to the server of a weight and pull the new weight back.
# A server that waits for all (*bulk synchronous*) computes the same. But with S bytes of gradients one server sends
# (n-1) S, while a ring sends 2(n-1)/n S everywhere. With the weights ("keys") shared out over all ranks, servers reach
# the ring's bytes: already ZeRO's idea.

# %%
print(verify("dp=4,data=server", ranks=four), verify("dp=4,data=servers", ranks=four), sep="\n")
forms = {"one server": "server", "keys on all ranks": "servers", "all-reduce": "bucket"}
counted, ns = {}, list(range(2, 17))
for name, form in forms.items():
    sent = four.run(lab.message_sizes, f"dp=4,data={form}", config, eight)
    counted[name] = len(sent), max(map(sum, sent)) / (8 * config.parameters)
print({name: f"{times:.2f} times the model" for name, (_, times) in counted.items()})
ring = [2 * (n - 1) / n for n in ns]
show(
    plots.busiest(dict(zip(counted, ([n - 1 for n in ns], ring, ring), strict=True)), ns, counted),
    "computed",
    "bytes sent by the busiest rank; lines are formulas, marks what the calls of four live ranks account for.",
    "A rising line for one server, two that coincide and stay below 2 for shared keys and all-reduce",
)

# %% [markdown]
# (Keys are whole tensors; the embedding's server has more to do.)
#
# ### Where the time of an update goes
#
# The first design of Barcelona's port was one server: reduce the gradients, update on rank 0, broadcast the weights.
# Four ways, for weights in one flat stretch:

# %%
show_source(updates.sharded)
expected = lab.numbers(0)  # the weights that every way must give: a step along the sum of all gradients
lab.adamw(expected, sum(lab.numbers(1 + rank) for rank in range(4)))
for way in updates.WAYS:
    equal = all((weights - expected).abs().max() < 1e-12 for weights, _ in four.run(lab.update, way))
    print(f"{way:27} all ranks have the serial weights: {equal}")

# %% tags=["measured"]
seen = {way: four.run(lab.update, way, lab.LINK, 0.040)[0][1] for way in updates.WAYS}
show(
    plots.phases(seen, lab.PUBLISHED, ("an update on rank 0", "a step in Barcelona")),
    "paced",
    "left, the parts of an update on four live ranks; right, published by the Barcelona port's wiki for GPT-2 124M, "
    "eight workers and a server (not seen: 5 ms of rest).",
    "Stacked bars: reduce-scatter and all-gather take least; in the published step the reduce dwarfs the rest",
)

# %% [markdown]
# One server pays for everything while others wait.
# Owners share the update; their four chains pay the latency four times. Reduce-scatter and all-gather share both.
#
# AdamW works number by number, so the update may be cut anywhere, for threads or to send what is ready. Small
# blocks pay for each call, large ones leave the cache:

# %% tags=["measured"]
whole, times = lab.adamw_in_blocks(2**22, 2**22)[0], {}
for block in (2**n for n in range(12, 23)):
    weights, times[block] = lab.adamw_in_blocks(2**22, block)
    assert torch.equal(weights, whole)
show(
    plots.u_curve({"AdamW": list(times.items())}, "weights in a block"),
    "measured",
    "one AdamW step of four million weights on this machine, block after block; the weights are always the same bits.",
    "A curve of time against block size: it falls steeply from small blocks and rises again at the end",
)

# %% [markdown]
# ## Who reads the text?
#
# Either every rank reads its own rows (llm.c), or rank 0 reads all and deals them out (the port), because a share may
# then have any shape: rows, stretches of tokens, every n-th token (lesson 10). Both, live:

# %%
rows, owners = replicas.shares(four, batches)
table(rows, ["shape", "both ways the same bits", "together the global batch", "targets are the next tokens"])
show(
    plots.shapes(owners),
    "counted",
    "who got which token of a batch of 7 rows and 16 tokens, from four live ranks.",
    "Three grids of row by token coloured by rank: by rows, in vertical stretches, and in vertical stripes",
)

# %% [markdown]
# Targets are the inputs shifted by one **in the whole sequence**, before anything is dealt. Shift after, and each
# stretch loses the target of its last token.
#
# ### How large may a batch be?
#
# llm.c walks through the text in order, N B T tokens a step on N ranks, and begins anew when what is left does not
# fill a step. A batch larger than the text is refused. Our plays, on more and more ranks of 64 rows of 1,024 tokens:

# %%
plays, stories = shakespeare(), range(925_653_391)  # the second as long as TinyStories (llm.c)
for ranks in (1, 2, 4, 6, 8):
    try:
        steps = [InOrder(text, 64 * ranks, 1024).steps for text in (plays, stories)]
        print(f"{ranks} ranks: {steps[0]} steps an epoch; of TinyStories {steps[1]:,}")
    except ValueError as error:
        print(f"{ranks} ranks: {error}")
source = InOrder(batches.source, rows=7, length=16)
first, again = (four.run(replicas.load, source, step, "rows") for step in (0, source.steps))
anew = all(ok and replicas.same_batch(a, b) for (a, _), (b, ok) in zip(first, again, strict=True))
print(f"after {source.steps} steps both ways begin anew: {anew}")
# %% [markdown]
# ## Exercises
#
# **1.** The strategy itself. `mine` holds this rank's rows, `total` is the number of tokens of *all* ranks. Write
# what stands between the loss and the optimizer's step. The checker runs it on three live ranks for two steps,
# compares every gradient, and counts the bytes.


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

# %% [markdown] tags=["hint"]
# `train`, at the top of the lesson, has all of it. What is the loss divided by before `backward`?

# %% [markdown] tags=["hint"]
# `comm.all_reduce(x, axis)` leaves x as it was and returns the sum.


# %% tags=["wrong"]
# FAIL: Replicas drift apart: each rank steps by the gradient of its own rows, nothing was sent
# MISTAKE: The ranks do not talk: each steps with its own gradient.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    optimizer.step()


# %% tags=["wrong"]
# FAIL: Replicas drift apart although bytes were sent: all_reduce leaves its input as it was, keep its result
# MISTAKE: all_reduce is called, but its result, the sum, is thrown away.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: A third of the right gradient: it is summed, not averaged
# MISTAKE: The sum is divided by the number of ranks, although the loss was divided by all tokens already.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis) / axis.size
    optimizer.step()


# %% tags=["wrong"]
# FAIL: Divide each rank's sum of losses by the tokens of *all* ranks, and sum gradients once
# MISTAKE: Each rank divides by its own tokens and then by the ranks: a mean of means.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / (mine.targets >= 0).sum() / axis.size).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: An all-reduce of each gradient takes fewer bytes
# MISTAKE: The sum is right, but an all-gather sends every rank's gradient to every rank.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_gather(p.grad[None], axis).sum(0)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: A gradient is None: was backward() called?
# MISTAKE: The losses are summed and not the gradients; no backward is called.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    loss = comm.all_reduce(loss.detach() / total, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: the gradients of step 2 on rank 0: wte.weight: expected
# MISTAKE: Old gradients are not cleared, so the second step adds to those of the first.
def parallel_step(model, optimizer, mine, total, axis):
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: all_reduce sends what nobody counts. Use the calls of comm that are counted
# MISTAKE: The sum is right, by a call of torch that goes past what counts the bytes.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    loss = model.loss(model(mine.tokens), mine.targets)
    (loss / total).backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    optimizer.step()


# %% tags=["wrong"]
# FAIL: Each rank has rows of its own, which are given
# MISTAKE: Every rank trains on the lesson's whole example batch, whatever its own rows are.
def parallel_step(model, optimizer, mine, total, axis):
    optimizer.zero_grad()
    from gpt2lab.reference import CONFIG, example_batch

    batch = example_batch(CONFIG, 7, 11)
    loss = model.loss(model(batch.tokens), batch.targets)
    (loss / batch.total / axis.size).backward()
    for p in model.parameters():
        p.grad = comm.all_reduce(p.grad, axis)
    optimizer.step()


# %% [markdown]
# **2.** Write two methods of the bucketed reducer. `ready(name, grad)` is called when a gradient is final: collect it,
# and send the bucket as soon as it holds `full` elements or more. `all_reduce(flat)` returns at once; `.wait()` on
# what it returns gives the sum. `finish()` sends the rest, returns a dict of sums by name, each in its shape, and is
# ready for the next step. Autograd's hooks on two live ranks will call yours.


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

# %% [markdown] tags=["hint"]
# `ready` does two things in this order: the gradient joins the bucket; then its size is looked at.

# %% [markdown] tags=["hint"]
# A summed bucket is flat. `split` cuts it by the sizes of its gradients, `view_as` gives each its shape. What must be
# empty when the next step begins?


# %% tags=["wrong"]
# FAIL: Only 32 of 37 elements were sent: the last bucket is not full, and must go too
# MISTAKE: The last bucket, which never became full, is dropped.
class Reducer(Reducer):
    def finish(self):
        self.bucket = []
        return super().finish()


# %% tags=["wrong"]
# FAIL: Nothing was sent while backward ran: send a bucket as soon as it holds 8 elements or more
# MISTAKE: Everything is collected and sent after backward, so nothing overlaps.
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))


# %% tags=["wrong"]
# FAIL: You waited while backward ran: keep what all_reduce returns, and wait in finish()
# MISTAKE: Each message is waited for as soon as it is sent, so nothing overlaps.
class Reducer(Reducer):
    def send(self):
        super().send()
        bucket, handle = self.flying.pop()
        total = handle.wait()
        self.flying.append((bucket, type("Done", (), {"wait": lambda self: total})()))


# %% tags=["wrong"]
# FAIL: One message a tensor: let tensors gather until a bucket holds 8 elements or more
# MISTAKE: Every gradient is a message of its own: there are no buckets.
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        self.send()


# %% tags=["wrong"]
# FAIL: Gradients came back flat: give each its shape again
# MISTAKE: Gradients come back flat, without the shapes of their parameters.
class Reducer(Reducer):
    def finish(self):
        return {name: total.flatten() for name, total in super().finish().items()}


# %% tags=["wrong"]
# FAIL: Each bucket leaves one gradient late: look at its size when a gradient has joined it, not before
# MISTAKE: The bucket is looked at before the new gradient is put in, so a full one leaves a gradient late.
class Reducer(Reducer):
    def ready(self, name, grad):
        if sum(g.numel() for _, g in self.bucket) >= self.full:
            self.send()
        self.bucket.append((name, grad))


# %% tags=["wrong"]
# FAIL: 8 elements are exactly enough: a bucket leaves as soon as it holds them
# MISTAKE: More than full is demanded where full is enough.
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if sum(g.numel() for _, g in self.bucket) > self.full:
            self.send()


# %% tags=["wrong"]
# FAIL: Count elements, not tensors; 8 are enough
# MISTAKE: Tensors are counted, not elements.
class Reducer(Reducer):
    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if len(self.bucket) == 2:
            self.send()


# %% tags=["wrong"]
# FAIL: In the second step finish() waited for 0 sums, and 1 was under way
# MISTAKE: Sums of the first step are kept and used again in the second.
class Reducer(Reducer):
    def finish(self):
        self.sums = getattr(self, "sums", None) or super().finish()  # made once, then used again
        return self.sums


# %% tags=["wrong"]
# FAIL: In the second step messages of [6] elements have left after 8: what is counted has to begin anew in finish()
# MISTAKE: A running count is not cleared in finish(), so the next step's first bucket leaves early.
class Reducer(Reducer):
    count = 0

    def ready(self, name, grad):
        self.bucket.append((name, grad))
        self.count += grad.numel()
        if self.count >= self.full:
            self.send()
            self.count = 0


# %% tags=["wrong"]
# FAIL: In the second step finish() waited for 5 sums, and 1 was under way
# MISTAKE: What was waited for is kept, and waited for again at every step.
class Reducer(Reducer):
    def finish(self):
        if self.bucket:
            self.send()
        sums = {}
        for bucket, handle in self.flying:
            parts = handle.wait().split([g.numel() for _, g in bucket])
            sums.update({n: part.view_as(g) for (n, g), part in zip(bucket, parts, strict=True)})
        return sums


# %% tags=["wrong"]
# FAIL: has it something to send?
# MISTAKE: The last bucket is sent although it may be empty.
class Reducer(Reducer):
    def finish(self):
        self.send()
        sums = {}
        for bucket, handle in self.flying:
            parts = handle.wait().split([g.numel() for _, g in bucket])
            sums.update({n: part.view_as(g) for (n, g), part in zip(bucket, parts, strict=True)})
        self.flying = []
        return sums


# %% tags=["wrong"]
# FAIL: Nobody will ask for sums of the first step again: a reducer that keeps them holds all gradients of all steps
# MISTAKE: Every sum is also put into a list that nobody empties.
class Reducer:
    def __init__(self, all_reduce, full):
        self.all_reduce, self.full, self.every = all_reduce, full, []
        self.bucket, self.flying = [], []

    def send(self):
        flat = torch.cat([grad.flatten() for _, grad in self.bucket])
        self.flying.append((self.bucket, self.all_reduce(flat)))
        self.bucket = []

    def ready(self, name, grad):
        self.bucket.append((name, grad))
        if sum(g.numel() for _, g in self.bucket) >= self.full:
            self.send()

    def finish(self):
        if self.bucket:
            self.send()
        sums = {}
        for bucket, handle in self.flying:
            parts = handle.wait().split([g.numel() for _, g in bucket])
            sums.update({n: part.view_as(g) for (n, g), part in zip(bucket, parts, strict=True)})
        self.flying = []
        self.every.append(sums)
        return sums


# %% [markdown]
# **3.** How many bytes does one rank send in a step of data parallelism? (`elements` divides evenly.)


# %% tags=["exercise"]
def step_bytes(elements, ranks, micro, each):
    """Bytes sent by each rank, of `elements` gradients of `each` bytes, with `micro` micro-batches."""
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * elements * each
    ### END SOLUTION


check("bytes of a step", exercises.step_bytes, step_bytes)

# %% [markdown] tags=["hint"]
# A ring sends (n - 1)/n of the bytes twice. How often does it run in a step, and does that depend on `micro`?


# %% tags=["wrong"]
# FAIL: only the last one's backward sends
# MISTAKE: Every micro-batch is taken to send, not only the last one.
def step_bytes(elements, ranks, micro, each):
    return 2 * (ranks - 1) / ranks * elements * each * micro


# %% tags=["wrong"]
# FAIL: reduce-scatter and all-gather
# MISTAKE: Half of an all-reduce is forgotten: reduce-scatter, then all-gather.
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) / ranks * elements * each


# %% tags=["wrong"]
# FAIL: expected 6000, got 8000
# MISTAKE: The factor (n - 1)/n is left out.
def step_bytes(elements, ranks, micro, each):
    return 2 * elements * each if ranks > 1 else 0


# %% tags=["wrong"]
# FAIL: expected 6000, got 12000
# MISTAKE: Every rank is taken to send its gradients to each of the others.
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) * elements * each


# %% tags=["wrong"]
# FAIL: expected 7000, got 14000
# MISTAKE: The factor (n - 1)/n is mistaken for (n - 1)/2.
def step_bytes(elements, ranks, micro, each):
    return (ranks - 1) / 2 * elements * each


# %% tags=["wrong"]
# FAIL: 16-bit gradients
# MISTAKE: Elements are taken to have 4 bytes, whatever they are.
def step_bytes(elements, ranks, micro, each):
    return 2 * (ranks - 1) / ranks * elements * 4


# %% tags=["wrong"]
# FAIL: which is no power of two
# MISTAKE: Right for powers of two: as many halvings as a tree has levels.
def step_bytes(elements, ranks, micro, each):
    return (2 - 2 / 2 ** (ranks - 1).bit_length()) * elements * each


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's function is called.
def step_bytes(elements, ranks, micro, each):
    return costs.all_reduce_bytes(elements, ranks, 0, each)


# %% [markdown]
# **4.** A library hands you two lists: for each rank the gradient of its *mean* loss, and how many tokens it had.
# Give the gradient of the mean over all tokens, as a new tensor.


# %% tags=["exercise"]
def global_gradient(gradients, counts):
    """The gradient of the mean loss over all tokens of all ranks."""
    ### BEGIN SOLUTION
    return sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts)
    ### END SOLUTION


check("unequal shares", exercises.global_gradient, global_gradient)

# %% [markdown] tags=["hint"]
# Undo the division of each rank first: what is the gradient of its *sum* of losses?


# %% tags=["wrong"]
# FAIL: That is the mean of means: ranks with more tokens must weigh more
# MISTAKE: Means over unequal shares are averaged as if shares were equal.
def global_gradient(gradients, counts):
    return sum(gradients) / len(gradients)


# %% tags=["wrong"]
# FAIL: That is the sum of means: weigh each by its share of all tokens
# MISTAKE: Means are added, and nothing is divided.
def global_gradient(gradients, counts):
    return sum(gradients)


# %% tags=["wrong"]
# FAIL: got -0.178519
# MISTAKE: Shares are divided by their tokens a second time, where they should be weighted with them.
def global_gradient(gradients, counts):
    return sum(g / c for g, c in zip(gradients, counts, strict=True))


# %% tags=["wrong"]
# FAIL: shares of 30, 20 and 20 tokens
# MISTAKE: Weighted correctly, but the division by all tokens is missing.
def global_gradient(gradients, counts):
    return sum(g * c for g, c in zip(gradients, counts, strict=True))


# %% tags=["wrong"]
# FAIL: function returned None
# MISTAKE: The result is computed and not returned.
def global_gradient(gradients, counts):
    sum(g * c for g, c in zip(gradients, counts, strict=True)) / sum(counts)


# %% tags=["wrong"]
# FAIL: shares of 1 and 5 tokens
# MISTAKE: The number of tokens of one example is written down.
def global_gradient(gradients, counts):
    return sum(g * c for g, c in zip(gradients, counts, strict=True)) / 70


# %% tags=["wrong"]
# FAIL: right, but your function changed what it was given
# MISTAKE: The library's gradients are weighted in place.
def global_gradient(gradients, counts):
    for g, c in zip(gradients, counts, strict=True):
        g *= c / sum(counts)
    return sum(gradients)


# %% tags=["wrong"]
# FAIL: a Tensor with 3 elements cannot be converted
# MISTAKE: A gradient is taken to be a vector of three numbers.
def global_gradient(gradients, counts):
    total = torch.zeros(3, dtype=torch.float64)
    for g, c in zip(gradients, counts, strict=True):
        for i in range(3):
            total[i] += g[i].item() * c / sum(counts) if g.dim() == 1 else g[i][0].item()
    return total


# %% [markdown]
# **5.** A puzzle with a score. Gradient i, of `sizes[i]` kB, is final after `ready[i]` milliseconds of backward. A
# message takes `latency` ms and `rate` kB a ms, and the link carries one at a time. Return buckets as lists of
# gradients, in the order in which they leave. The score is the time *exposed* after backward, in three cases
# together. At most 108 ms pass.


# %% tags=["exercise"]
def group_gradients(ready, sizes, latency, rate):
    """Buckets with little exposed time, such as [[0], [1, 2], [3]]."""
    ### BEGIN SOLUTION
    best = [(0.0, [])]  # when the first j gradients are summed at the earliest, and by which buckets
    for j in range(1, len(sizes) + 1):
        ways = []
        for i in range(j):  # the last bucket holds gradients i to j - 1
            done, groups = best[i]
            done = max(done, ready[j - 1]) + latency + sum(sizes[i:j]) / rate
            ways.append((done, [*groups, list(range(i, j))]))
        best.append(min(ways))
    return best[-1][1]
    ### END SOLUTION


check("buckets for three links", exercises.group_gradients, group_gradients)

# %% [markdown] tags=["hint"]
# Try several sizes of buckets for each link, compute the exposed time of each as the checker does, and keep the best.
# That passes.

# %% [markdown] tags=["hint"]
# For the best score: the last bucket holds gradients i to the end. If the first i are summed as early as possible,
# which i is best? Ask the same question for every shorter backward first.


# %% tags=["wrong"]
# FAIL: each gradient by itself pays the latency
# MISTAKE: One bucket a gradient: each pays the latency.
def group_gradients(ready, sizes, latency, rate):
    return [[i] for i in range(len(sizes))]


# %% tags=["wrong"]
# FAIL: all in one bucket overlaps nothing
# MISTAKE: One bucket for all: it leaves only when backward is over.
def group_gradients(ready, sizes, latency, rate):
    return [list(range(len(sizes)))]


# %% tags=["wrong"]
# FAIL: 110 ms exposed; at most 108
# MISTAKE: One bucket size for all links, whatever their latency.
def group_gradients(ready, sizes, latency, rate):
    groups, held = [[]], 0
    for i, size in enumerate(sizes):
        if held >= 200:  # one size for all links
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += size
    return groups


# %% tags=["wrong"]
# FAIL: 121 ms exposed; at most 108
# MISTAKE: Greedy: whenever the link is free, all that is ready leaves.
def group_gradients(ready, sizes, latency, rate):
    groups, i, free = [], 0, 0.0
    while i < len(sizes):  # whenever the link is free, all that has gathered leaves
        start = max(free, ready[i])
        groups.append([k for k in range(i, len(sizes)) if ready[k] <= start])
        free = start + latency + sum(sizes[k] for k in groups[-1]) / rate
        i = groups[-1][-1] + 1
    return groups


# %% tags=["wrong"]
# FAIL: equal layers: the gradients [6, 7] never leave
# MISTAKE: The last gradients are in no bucket: the range ends early.
def group_gradients(ready, sizes, latency, rate):
    return [[i, i + 1] for i in range(0, len(sizes) - 2, 2)]


# %% tags=["wrong"]
# FAIL: are in two buckets
# MISTAKE: Neighbouring buckets overlap: a gradient is sent twice.
def group_gradients(ready, sizes, latency, rate):
    return [[i, i + 1] for i in range(len(sizes) - 1)]


# %% tags=["wrong"]
# FAIL: 395 ms exposed
# MISTAKE: Buckets in the order of forward, though backward makes the last gradients first.
def group_gradients(ready, sizes, latency, rate):
    pairs = [list(range(i, min(i + 2, len(sizes)))) for i in range(0, len(sizes), 2)]
    return pairs[::-1]  # in the order of forward


# %% [markdown]
# ## Appendix: what people do today
#
# A gradient may travel in few bits with a scale a block, or as two thin factors
# ([PowerSGD](https://arxiv.org/abs/1905.13727); here a column and a row: *rank 1*). *Error feedback* (Seide 2014,
# [proof](https://arxiv.org/abs/1901.09847) 2019) adds to the next gradient what a message left out.

# %%
guess = predict(
    "Without feedback, which way of sending is off most?", "bfloat16", "float8", "int8", "2 bits", "rank 1"
)

# %%
g = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def whole_numbers(x):
    """The message: x (P,) as int8, and one scale; a power of two, so that x minus what was sent is a float again."""
    scale = 2.0 ** (x.abs().max() / 127).log2().ceil()
    return (x / scale).round().to(torch.int8), scale


message, scale = whole_numbers(g)
kept = g - message * scale
same = torch.equal(message * scale + kept, g)
print(f"{g.nbytes} bytes become {message.nbytes + 1}; sent + kept = g, bit for bit:", same)
small = GPT2Config(vocab_size=256, n_positions=16, n_layer=2, n_head=2, n_embd=32)
ways = "all", *compressed.CODES, "rank 1"
found = compressed.compared(two, ways, batches, partial(GPT2, small), 12, 0.2)
table(
    [(way, found[way, True][0], *(f"{found[way, kept][2]:.2%}" for kept in (True, False))) for way in ways],
    ["sent", "bytes a step", "12 steps with feedback: off, of the way that weights went", "without"],
)
guess.beside(max(ways, key=lambda way: found[way, False][2]), "computed")

# %% [markdown]
# Ranks sum coded stretches and code the sums again: 2 (n-1)/n coded gradients (float64 above: 8 bytes a number).
# [ZeRO++](https://arxiv.org/abs/2306.10209) gathers weights in such blocks. One batch, again and again, five seeds:

# %%
tiny = GPT2Config(vocab_size=256, n_positions=16, n_layer=1, n_head=2, n_embd=32)
ways = {"all": ("all", True), "factors, feedback": ("rank 1", True), "factors": ("rank 1", False)}
curves = {name: [] for name in ways}
for seed in range(5):
    one = replicas.shakespeare_rows(7, seed).at(0)
    for name, how in ways.items():
        again = SimpleNamespace(at=lambda _, one=one: one)
        runs = two.run(compressed.trained, *how, again, partial(GPT2, tiny, seed), 40, 0.15)
        curves[name].append(replicas.over_ranks([run for run, _ in runs]))
show(
    plots.bands(curves),
    "computed",
    "losses, means of five seeds, and pale from the least to the most. With feedback factors go on learning.",
    "Three falling curves with pale bands: all lowest, factors with feedback between, without it highest",
)

# %% [markdown]
# **6.** Error feedback. `code(x)` gives the numbers that a message says.


# %% tags=["exercise"]
def feedback(gradients, code):
    """What is sent of each gradient (P,) in turn, as `code` says it: a list."""
    ### BEGIN SOLUTION
    sent, kept = [], 0
    for gradient in gradients:
        whole = gradient + kept
        sent.append(code(whole))
        kept = whole - sent[-1]
    return sent
    ### END SOLUTION


check("error feedback", exercises.feedback, feedback)

# %% [markdown] tags=["hint"]
# Sent and kept are, together, the gradient and what was kept before.


# %% tags=["wrong"]
# FAIL: is ever sent
# MISTAKE: Each gradient is coded by itself, without feedback.
def feedback(gradients, code):
    return [code(gradient) for gradient in gradients]


# %% tags=["wrong"]
# FAIL: say all digits
# MISTAKE: Everything is sent, so nothing has to be kept: right sums, and no byte is saved.
def feedback(gradients, code):
    return list(gradients)


# %% tags=["wrong"]
# FAIL: before is lost
# MISTAKE: Kept is what this gradient alone would lose; what was kept before is forgotten.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        sent.append(code(gradient + kept))
        kept = gradient - code(gradient)
    return sent


# %% tags=["wrong"]
# FAIL: grows for ever
# MISTAKE: What was sent of the kept part is not taken off.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        sent.append(code(gradient + kept))
        kept = kept + gradient - code(gradient)
    return sent


# %% tags=["wrong"]
# FAIL: is sent uncoded
# MISTAKE: The kept part is added to the message, past the code.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        sent.append(code(gradient) + kept)
        kept = gradient - code(gradient)
    return sent


# %% tags=["wrong"]
# FAIL: in another code, their signs and mean size
# MISTAKE: Rounded to whole numbers, whatever the code is.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        whole = gradient + kept
        sent.append(whole.round())
        kept = whole - sent[-1]
    return sent


# %% tags=["wrong"]
# FAIL: at (5, 2), got
# MISTAKE: At the end what is kept is sent as well, in the last message.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        whole = gradient + kept
        sent.append(code(whole))
        kept = whole - sent[-1]
    sent[-1] = sent[-1] + code(kept)
    return sent


# %% tags=["wrong"]
# FAIL: right, but your function changed what it was given
# MISTAKE: What was kept is added to the gradient itself, which the update may still need.
def feedback(gradients, code):
    sent, kept = [], 0
    for gradient in gradients:
        gradient += kept
        sent.append(code(gradient))
        kept = gradient - sent[-1]
    return sent


# %% [markdown]
# ## Drill
#
# 1. All-reduce 30 ms, backward 50 ms: what can overlap make of the 80 ms at best?
# 2. Why must all ranks send their buckets in the same order?
# 3. Gradients are clipped to norm 1. May each rank clip its own before the sum?
#
# <details><summary>Answers</summary>
#
# 1. A little over 50 ms: the last bucket cannot start before backward ends.
# 2. An all-reduce pairs the n-th call of one rank with the n-th of the others; swapped, unlike things are added.
# 3. No: the norm of the sum is not the sum of norms; clip after, by the global norm.
#
# </details>
#
# ## Read on
#
# - Li et al. 2020, *PyTorch Distributed*, section 3: DDP's buckets, hooks and overlap.
# - Li et al. 2014, *Scaling distributed machine learning with the parameter server*: servers done well, keys and all.
# - Goyal et al. 2017, *Accurate, large minibatch SGD*, section 3: how normalising goes wrong.
# - McCandlish et al. 2018, *An empirical model of large-batch training*: when more rows
#   are wasted.
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*: no algorithm sends
#   fewer bytes.
#
# **Next**: [05 ZeRO](05_zero.ipynb).
