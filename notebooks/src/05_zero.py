# %% [markdown]
# # 05 ZeRO
#
# **The one-minute version.** In data parallelism every rank holds the same weights, gradients and optimizer state:
# n copies of one thing. ZeRO keeps the *work* of data parallelism and shares out what is *held*. Stage 1: each rank
# keeps the optimizer state of one n-th of the weights. Stage 2: of the gradients too. Stage 3: of the weights too,
# which are gathered block by block when they are needed. The trick costs nothing until stage 3, because an
# all-reduce always was a reduce-scatter followed by an all-gather: ZeRO puts the update *between* the two.
#
# The claim of this lesson, on three live ranks and seven rows that do not divide evenly:

# %% tags=["setup"]
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpt2lab.exercises import check
from gpt2lab.exercises import zero as exercises
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import data_costs, flat, zero
from gpt2lab.plan import Plan, build
from gpt2lab.plots import zero as plots
from gpt2lab.ranks import comm, memory
from gpt2lab.ranks.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import CONFIG, example_batch, verify

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these models are too small to share

# %%
two, three = Ranks(2), Ranks(3)
print(verify("dp=3,zero=3", ranks=three))

# %% [markdown]
# ## What is held n times
#
# Mixed-precision training with Adam holds 16 bytes for each parameter: 2 for the weight and 2 for the gradient
# (16-bit floats), and K = 12 for the optimizer: a 32-bit master copy of the weight and two 32-bit moments. Figure 1
# of the paper, drawn from the formulas. **Predict** first: 7.5 billion parameters on 64 ranks, how many GB in each
# stage?

# %%
names = {0: "replicas", 1: "stage 1", 2: "stage 2", 3: "stage 3"}


def figure_1(billions, ranks):
    stages = {}
    for stage, total in data_costs.paper_bytes(billions, ranks).items():
        without = data_costs.paper_bytes(billions, ranks, optimizer=0)[stage]
        weights = 2 * billions / (ranks if stage == 3 else 1)
        stages[names[stage]] = {
            "weights": weights,
            "gradients": without - weights,
            "optimizer": total - without,
        }
    return plots.bars(stages, "GB")


print([f"{data_costs.paper_bytes(7.5e9, 64)[stage] / 1e9:.1f} GB" for stage in range(4)])
explore(
    figure_1,
    "computed",
    "bytes a rank holds for {billions} billion parameters on {ranks} ranks (the formulas of the paper's Figure 1).",
    "Four stacked bars for {billions} billion parameters and {ranks} ranks, shrinking from replicas to stage 3",
    posters=[{"billions": 7.5, "ranks": 64}],
    billions=(0.5, 20.0, 7.5),
    ranks=[1, 2, 4, 8, 16, 64, 256, 1024],
)

# %% [markdown]
# ## A flat stretch, cut evenly
#
# Sharding tensor by tensor would be a mess of uneven pieces. So each part of the model (a block, an embedding) is
# laid out *flat*: all its parameters one after the other in one stretch, padded to a multiple of n. Rank r owns the
# r-th n-th, wherever the borders of parameters fall. After one copy, when the model is laid out, the parameters are
# views of the stretch: it is gathered, updated and sent as it lies there.

# %%
show_source(flat.Flat.lay_out, flat.Flat.shares)

# %%
ODD = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8)  # divides by 2, hardly by 3
sizes = data_costs.parts(GPT2(ODD))
print("elements of the parts:", sizes)
for ranks in (2, 3, 5):
    padding = sum(ranks * data_costs.padded(s, ranks) - s for s in sizes.values())
    print(f"{ranks} ranks: {padding} elements of padding in all")
print(verify("dp=3,zero=2", ODD, ranks=three))

# %% [markdown]
# The optimizer does not see one flat stretch, though: weight decay is for matrices only, and a flat stretch is no
# matrix. So a rank's shard is handed to AdamW as *pieces*, each knowing which parameter it is a part of.
#
# ## The three stages by hand
#
# Here are all three, on parts of a model: its blocks, and the modules outside them. A part knows four things: how to
# gather its weights, to free them, to sum its gradients, and to notice that they are complete. Compare with lesson
# 04: the all-reduce has come apart, and the update stands between the halves.


# %%
class Part:
    """One module's weights, flat and padded, of which this rank owns a shard: `mine`."""

    def __init__(self, module, axis):
        self.axis, self.parameters = axis, list(module.parameters())
        sizes, self.shapes = [p.numel() for p in self.parameters], [p.shape for p in self.parameters]
        share = -(-sum(sizes) // axis.size)  # rounded up
        self.pad = torch.zeros(share * axis.size - sum(sizes))
        self.cuts = [*sizes, len(self.pad)]
        whole = torch.cat([*(p.detach().flatten() for p in self.parameters), self.pad])
        self.mine = whole[axis.rank * share : (axis.rank + 1) * share].clone()

    def gather(self):
        whole = comm.all_gather(self.mine, self.axis)
        for p, shape, weights in zip(self.parameters, self.shapes, whole.split(self.cuts), strict=False):
            p.data = weights.view(shape)

    def free(self):
        for p, shape in zip(self.parameters, self.shapes, strict=True):
            p.data = torch.zeros(1).expand(shape)  # the shape, and no memory

    def reduce(self):
        grad = torch.cat([*(p.grad.flatten() for p in self.parameters), self.pad])
        self.mine.grad = comm.reduce_scatter(grad, self.axis)
        for p in self.parameters:
            p.grad = None

    def when_complete(self, act):
        def arrived(_):
            if all(p.grad is not None for p in self.parameters):
                act()

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(arrived)


def on_demand(block, part):
    """Stage 3: whole weights only while the block runs; in backward it runs again, and then sums and frees."""
    block.register_forward_pre_hook(lambda *_: part.gather())
    block.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else part.free())
    part.when_complete(lambda: (part.reduce(), part.free()))


def by_hand(rank, world_size, stage, steps=5):
    torch.set_default_dtype(torch.float64)
    axis, model = Mesh(dp=world_size)["dp"], GPT2(CONFIG)
    ends = [Part(m, axis) for m in (model.wte, model.wpe, model.ln_f)]
    blocks = [Part(block, axis) for block in model.h.values()]
    parts = ends + blocks
    for part in ends + blocks * (stage == 2) if stage >= 2 else []:
        part.when_complete(part.reduce)  # in the middle of backward
    if stage == 3:
        model.recompute = True  # keep only the blocks' inputs
        for block, part in zip(model.h.values(), blocks, strict=True):
            on_demand(block, part)
    optimizer = torch.optim.AdamW([part.mine for part in parts], lr=1e-2, eps=1e-6, weight_decay=0)
    batch = example_batch(CONFIG, 7, 11)
    rows = batch.rows(rank, world_size)
    for _ in range(steps):
        for part in ends if stage == 3 else parts:
            part.gather()  # the second half of an all-reduce, of updated weights
        (model.loss(model(rows.tokens), rows.targets) / batch.total).backward()
        whole = sum(p.untyped_storage().nbytes() > 8 for block in blocks for p in block.parameters)
        left = sum(p.grad is not None for p in model.parameters())
        for part in parts if stage == 1 else []:
            part.reduce()  # the first half
        optimizer.step()
    for part in parts:
        part.gather()
    state = sum(m.numel() for s in optimizer.state.values() for m in (s["exp_avg"], s["exp_avg_sq"]))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), (state, left, whole)


def serial(steps=5):
    model, batch = GPT2(CONFIG), example_batch(CONFIG, 7, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for _ in range(steps):
        optimizer.zero_grad()
        (model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# %%
expected, rows = serial(), []
for stage in (1, 2, 3):
    weights, counts = three.run(by_hand, stage)[0]
    equal = (weights - expected).abs().max().item() < 1e-10
    rows.append((f"stage {stage}", "equal" if equal else "DIFFERENT", *(f"{c:,}" for c in counts)))
print(
    f"{len(expected):,} weights; serial AdamW holds {2 * len(expected):,} numbers of state, each of 3 ranks a third"
)
table(
    rows,
    [
        "rank 0",
        "after 5 steps, to serial",
        "numbers of state",
        "whole gradients after backward",
        "whole in blocks",
    ],
)

# %% [markdown]
# Stage 2 changes *when* the reduce-scatter happens: for each part as soon as backward has finished it, after which
# only the own shard of its gradient stays. The price shows with accumulation: gradients must then be summed in
# every micro-batch, or kept whole. Stage 3 leaves nothing whole in the blocks; embeddings and the last norm stay whole
# here, to keep it short.
#
# Stages 1 and 2 of the package, each in one class. Besides, they overlap: the reduce-scatter runs while backward goes
# on.

# %%
show_source(zero.Zero1, zero.Zero2)

# %%
for plan in ("dp=3,zero=1", "dp=3,zero=2"):
    print(verify(plan, ranks=three))

# %% [markdown]
# ## Stage 3: weights on demand
#
# Before a block runs, its weights are gathered; after it they are freed. Backward needs them again. Three things make
# this work:
#
# - **Recomputation.** A graph over a block would hold its weights until backward, whatever we free. So forward keeps
#   only the block's input, and backward runs the block again (lesson 01).
# - **Prefetch.** While a block computes, the next block's all-gather is under way: i+1 in forward, i-1 in backward.
# - **A stand-in.** Autograd wants to know each parameter's shape. A single element, expanded, has the shape and no
#   memory.

# %%
show_source(zero.Zero3)

# %% [markdown]
# Which weights are here, and when? The next cell notes each gather and release of one step.


# %%
def watch(rank, world_size, plan):
    parallel = build(Plan.parse(plan), CONFIG, Mesh(dp=world_size), torch.float64)
    events, clock, marks = [], [0], {}
    for f in parallel.sync.flats:

        def note(what, right, f=f):
            state = f.full is None, f.coming is None
            right()
            if state != (f.full is None, f.coming is None):
                clock[0] += 1
                events.append((clock[0], what, flat.part_of(f.names[0])))

        f.start_gather = partial(note, "asked", f.start_gather)
        f.gather, f.drop = partial(note, "here", f.gather), partial(note, "gone", f.drop)
    batch = example_batch(CONFIG, 7, 11)
    micro = parallel.mine(batch)[0]
    loss = parallel.model.loss(parallel.model(micro.tokens), micro.targets) / batch.total
    marks["backward begins"] = clock[0] + 0.5
    parallel.sync.last_micro()
    loss.backward()
    parallel.sync.finish()
    return events, marks


events, marks = two.run(watch, "dp=2,zero=3")[0]
rows, since = {}, {}
for when, what, part in events:
    rows.setdefault(part, [])
    asked, here = since.pop(part, (when, when))
    if what == "asked":
        since[part] = when, None
    elif what == "here":
        since[part] = asked, when
    else:
        rows[part].append((asked, here, when))
show(
    plots.residency(rows, marks),
    "counted",
    "each part's weights on rank 0, whole (filled) or on their way (hatched): every block comes twice, and the next "
    "is under way while one computes. The embedding stays until its second use, as the head, is over.",
    "A chart of parts against events: blocks appear one after the other going down, then coming back up, each after a "
    "hatched bar; the token embedding reaches from the start into backward",
)
block_rows = [spans for part, spans in rows.items() if part.startswith("h.")]
together = max(sum(here <= t < gone for spans in block_rows for _, here, gone in spans) for t in range(99))
print("blocks whole at the same time, prefetched ones apart:", together)

# %% [markdown]
# ## Bytes held: formula and live ranks
#
# Each rank adds up the memory behind its tensors at the end of backward: weights, gradients, and Adam's two moments.
# All are float64 here, 8 bytes each, without master copies: so the optimizer weighs 2 parts of 4, not 12 of 16 as
# above. **Predict**: which stages differ in the first column?


# %%
def held(rank, world_size, stage):
    trainer = Trainer(
        build(Plan.parse(f"dp={world_size},zero={stage}"), CONFIG, Mesh(dp=world_size), torch.float64)
    )
    batch = example_batch(CONFIG, 7, 11)
    trainer.step(batch)  # makes the moments
    trainer.optimizer.zero_grad()
    parallel = trainer.parallel
    parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    found = memory.held(parallel.model, parallel.sync, trainer.optimizer)
    parallel.sync.finish()
    return found


sizes = data_costs.parts(GPT2(CONFIG))
found = {stage: three.run(held, stage) for stage in range(4)}
table(
    [
        (
            names[stage],
            *(f"{found[stage][0][k]:,}" for k in plots.THREE),
            "yes"
            if all(found[stage][r] == data_costs.bytes_held(sizes, stage, 3, r, 8) for r in range(3))
            else "NO",
        )
        for stage in range(4)
    ],
    ["rank 0 of 3", *plots.THREE, "all ranks equal the formula"],
)

# %%
in_kb = {
    names[s]: {k: v / 1e3 for k, v in data_costs.bytes_held(sizes, s, 3, 0, 8).items()} for s in range(4)
}
show(
    plots.bars(in_kb, "kB", {names[s]: sum(found[s][0].values()) / 1e3 for s in range(4)}),
    "counted",
    "bars by formula, padding included; circles: bytes really held by rank 0 of 3 at the end of backward.",
    "Stacked bars for replicas and stages 1 to 3 with a circle at the end of each bar",
)

# %% [markdown]
# ## Bytes sent
#
# With S bytes of weights, n ranks and k micro-batches: replicas 2 S (n-1)/n; stage 1 the same; stage 2 the same for
# one micro-batch, (k+1) S (n-1)/n in general; stage 3 sends up to 3 k S (n-1)/n: two gathers and a reduce-scatter.
# (The paper drops the factor (n-1)/n and says 2 S, 2 S, 3 S.) Counted:


# %%
def sent(rank, world_size, stage, micro):
    plan = Plan.parse(f"dp={world_size},zero={stage},micro={micro}")
    trainer = Trainer(build(plan, CONFIG, Mesh(dp=world_size), torch.float64))
    comm.clear_log()
    trainer.step(example_batch(CONFIG, 7, 11))
    return sum(size for (_, axis), (_, size, _) in comm.traffic().items() if axis == "dp+cp")


whole = 8 * CONFIG.parameters
rows = []
for stage in range(4):
    counts = [two.run(sent, stage, micro)[0] for micro in (1, 3)]
    exact = [data_costs.bucket_bytes_sent(GPT2(CONFIG), 1 << 20, 2, 0)] * 2  # whatever the micro-batches
    if stage:
        exact = [data_costs.zero_bytes_sent(sizes, stage, 2, micro, 8) for micro in (1, 3)]
    rows.append((names[stage], *(f"{c / whole:.2f} S" for c in counts), "yes" if counts == exact else "NO"))
table(rows, ["2 ranks", "1 micro-batch", "3 micro-batches", "equal to the formula"])

# %% [markdown]
# On two ranks (n-1)/n is one half, so replicas send 1 S. Stage 3 stays a little below 1.5 S a micro-batch: what lies
# outside the blocks is gathered once only. The tied embedding, which both ends use, simply stays in between.
#
# ## Memory over a step, event by event
#
# What is held at rest is one thing; the peak is another. The profiler reports every allocation; we keep those of a
# KiB or more. A model of eight blocks:

# %%
deep = GPT2Config(vocab_size=64, n_positions=32, n_layer=8, n_head=4, n_embd=64)


def record(rank, world_size, plan):
    trainer = Trainer(build(Plan.parse(plan), deep, Mesh(dp=world_size), torch.float64))
    batch = example_batch(deep, 7, 11)
    trainer.step(batch)
    trainer.optimizer.zero_grad()  # memory from before the record must not be freed inside
    before = sum(memory.held(trainer.parallel.model, trainer.parallel.sync, trainer.optimizer).values())
    with memory.allocations() as events:
        trainer.step(batch)
    return [before + e.held for e in events if abs(e.bytes) >= 1024]


curves = {
    "replicas": two.run(record, "dp=2,recompute=on")[0],
    "stage 2": two.run(record, "dp=2,zero=2,recompute=on")[0],
    "stage 3": two.run(record, "dp=2,zero=3")[0],
}
peaks = {name: max(curve) for name, curve in curves.items()}
block = 8 * data_costs.parts(GPT2(deep))["h.0"]
drops = sum(a - b >= block / 2 for a, b in zip(curves["stage 3"], curves["stage 3"][1:], strict=False))
print("the peak falls from stage to stage:", peaks["replicas"] > peaks["stage 2"] > peaks["stage 3"])
print("teeth of the saw, at least two a block:", drops >= 16)

# %% tags=["measured"]
show(
    plots.over_a_step(curves),
    "measured",
    "bytes held on rank 0 over one step of eight blocks on two ranks; triangles mark the peaks.",
    "Three curves over a step: replicas on top with a ramp in backward, stage 3 lowest with many small teeth",
)

# %% [markdown]
# All three recompute, as stage 3 must, so that only what is shared out differs. Replicas pile up gradients during
# backward. In stage 2 a block's gradients are whole for a moment, while they are joined and summed: spikes on a line
# that rises by half a block each time. In stage 3 each block's weights come and go as well: a saw-tooth.
#
# ## Bug lab: three bugs of a lecture
#
# Stanford's CS336 taught ZeRO-3 with a short program in which whole *layers* belong to ranks: the owner broadcasts a
# layer's weights before use, and gradients are reduced to the owner. It is simple, and balances badly: one root sends
# while the others wait, and the number of ranks must divide the layers. Our corrected version is a plan of its own:

# %%
print(verify("dp=3,zero=3,data=owner", ranks=three))

# %%
show_source(flat.Owned)

# %% [markdown]
# **Bug 1: layer 0 never learns.** The lecture's backward loop was `range(num_layers - 1, 0, -1)`: it stops at 1.
# Clearing the gradients of layer 0 before each update has the same effect. **Predict**: does the loss tell?


# %%
def distances(rank, world_size, forget_layer_0):
    parallel = build(Plan.parse("dp=2,zero=3,data=owner"), CONFIG, Mesh(dp=2), torch.float64)
    trainer, batch = Trainer(parallel, Recipe("sgd", lr=0.1, weight_decay=0.0)), example_batch(CONFIG, 7, 11)
    before, losses = {n: w.clone() for n, w in parallel.weights().items()}, []
    for _ in range(5):
        losses.append(trainer.gradients(batch)[0])
        for p in parallel.sync.pieces:
            if forget_layer_0 and p.name.startswith("h.0."):
                p.tensor.grad.zero_()
        trainer.optimizer.step()
        parallel.sync.updated()
    after = parallel.weights()
    layers = range(CONFIG.n_layer)
    moved = lambda i: torch.cat([(after[n] - before[n]).flatten() for n in after if n.startswith(f"h.{i}.")])
    return [moved(i).norm().item() for i in layers], losses


found = {"loop to layer 0": two.run(distances, False)[0], "loop to layer 1": two.run(distances, True)[0]}
steps = {name: moved for name, (moved, _) in found.items()}
for name, (moved, losses) in found.items():
    print(f"{name}: layer 0 moved: {moved[0] > 0}; the loss falls from {losses[0]:.4f} to {losses[-1]:.4f}")
show(
    plots.moved(steps),
    "computed",
    "distance (norm of the difference) that each layer moved in five steps; under the bug the others make up for "
    "layer 0.",
    "Pairs of bars per layer, except layer 0 where the second is empty; in the others the second is somewhat longer",
)

# %% [markdown]
# **Bug 2: memory "freed" that the graph still holds.** The lecture set `params[i] = None` after use. But `x @ w`
# saves `w` for backward, so the memory stays. Count the weights that are alive after forward:


# %%
def alive_after_forward(layers, with_graph):
    x, storages = torch.ones(1, 4, requires_grad=True), []
    for _ in range(layers):
        w = torch.randn(4, 4)  # "broadcast by its owner"
        storages.append(StorageWeakRef(w.untyped_storage()))
        with torch.set_grad_enabled(with_graph):
            x = torch.tanh(x @ w)
        del w  # "free memory"
    return sum(not storage.expired() for storage in storages), x


print("weights alive after 8 layers, with a graph:   ", alive_after_forward(8, True)[0])
print("weights alive after 8 layers, without a graph:", alive_after_forward(8, False)[0])

# %% [markdown]
# That is why stage 3 needs recomputation, and why a test of this package asks for the *storage* and not for the name.
#
# **Bug 3: the decaying gradient.** The lecture never calls `zero_grad`, and reduces with an *average* into the
# owner's `.grad`. So the owner's old gradient is averaged as well, with zeros from the others: g(t) = g(t-1) / n +
# avg(t). Plain data parallelism with the same omission has g(t) = g(t-1) + avg(t). Two different wrong optimizers:

# %%
averages = [1.0] * 12
piled, decayed = [0.0], [0.0]
for average in averages:
    piled.append(piled[-1] + average)
    decayed.append(decayed[-1] / 4 + average)
show(
    plots.lines(
        {"replicas, no zero_grad": piled[1:], "owner, no zero_grad (n = 4)": decayed[1:], "right": averages},
        "step",
        "effective gradient",
    ),
    "computed",
    "a constant gradient of 1, as two wrong programs and a right one would apply it on four ranks.",
    "Three lines: one rises without end, one settles at 4/3, one stays at 1",
)
print(f"owner's gradient settles at {decayed[-1]:.4f} = n / (n - 1)")


# %%
def lecture_gradient(rank, world_size, steps=6):
    axis, grad = Mesh(dp=world_size)["dp"], torch.zeros(1)
    seen = []
    for _ in range(steps):
        grad = grad + 1.0 if rank == 0 else torch.ones(1)  # others drop theirs with the layer
        grad = comm.all_reduce(grad, axis) / world_size if rank == 0 else comm.all_reduce(grad, axis) * 0
        seen.append(grad.item())
    return seen


print("on live ranks:", [f"{g:.3f}" for g in three.run(lecture_gradient)[0]], "-> n / (n - 1) =", 3 / 2)

# %% [markdown]
# ## Which stage?
#
# Stages 1 and 2 cost no traffic, so there is little reason against them, except that stage 2 and accumulation do
# not go well together. Stage 3 sends half as much again, and waits for weights in the forward pass, where nothing
# can be hidden unless a block's computing takes longer than its gather: large batches, fast links. What none of
# them touches are **activations**: they depend on the rows of a rank (recomputation, tensor and context parallelism
# do touch them).
#
# Seen from compilers, ZeRO is a rewrite of one small graph: *all-reduce, then update everything* becomes
# *reduce-scatter, update a shard, all-gather*. Same bytes, one n-th of the state.
#
# ## Exercises
#
# **1.** Give the shard of a flat stretch that `rank` owns: equal lengths for all ranks, zeros as padding at the end.


# %% tags=["exercise"]
def shard(whole, rank, ranks):
    """This rank's part of the flat tensor `whole`, padded."""
    ### BEGIN SOLUTION
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]
    ### END SOLUTION


check("a shard", exercises.shard, shard)


# %% tags=["wrong"]
# FAIL: pad to equal lengths
def shard(whole, rank, ranks):
    return whole.tensor_split(ranks)[rank]


# %% tags=["wrong"]
# FAIL: round up
def shard(whole, rank, ranks):
    length = len(whole) // ranks
    return whole[rank * length : (rank + 1) * length]


# %% [markdown]
# **2.** Write a step of ZeRO-2 with plain gradient descent. `weights` and `gradient` are whole and flat, and divide
# evenly. `reduce_scatter(x)` gives this rank's shard of the sum over ranks; `all_gather(x)` joins everybody's
# shards.


# %% tags=["exercise"]
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """The whole weights after one step; this rank updates only its own shard."""
    ### BEGIN SOLUTION
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine - rate * reduce_scatter(gradient))
    ### END SOLUTION


check("a step of ZeRO-2", exercises.step, zero_step)


# %% tags=["wrong"]
# FAIL: gradients are summed here, not averaged
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine - rate * reduce_scatter(gradient) / ranks)


# %% tags=["wrong"]
# FAIL: own shard did not move
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    reduce_scatter(gradient)
    return all_gather(weights[rank * length : (rank + 1) * length])


# %% [markdown]
# **3.** How many bytes does a rank hold in the stages 0 to 3, with 2-byte weights and gradients and 12 bytes of
# optimizer state for each parameter?


# %% tags=["exercise"]
def bytes_held(parameters, ranks, stage):
    """Bytes a rank holds in a ZeRO stage (0: replicas)."""
    ### BEGIN SOLUTION
    share = lambda from_stage: 1 / ranks if stage >= from_stage else 1
    return parameters * (12 * share(1) + 2 * share(2) + 2 * share(3))
    ### END SOLUTION


check("bytes held", exercises.bytes_held, bytes_held)


# %% tags=["wrong"]
# FAIL: gradients too
def bytes_held(parameters, ranks, stage):
    return parameters * (12 / (ranks if stage else 1) + 2 + 2 / (ranks if stage == 3 else 1))


# %% tags=["wrong"]
# FAIL: nothing is shared
def bytes_held(parameters, ranks, stage):
    return parameters * 16 / ranks


# %% [markdown]
# ## Drill
#
# 1. GPT-2 XL (1.56 billion) in mixed precision on 4 ranks: which stage is the first to fit into 12 GB, activations
# apart?
# 2. Why does stage 1 send no more than data parallelism?
# 3. Stage 3 without recomputation: what goes wrong with memory?
# 4. Two ranks own shards of the same norm weight. May both count it in the gradient norm?
# 5. Why is the last rank's shard the one with padding, and does it matter for AdamW?
#
# <details><summary>Answers</summary>
#
# 1. Replicas 24.9 GB, stage 1 10.9 GB: stage 1 (K = 12 is what weighs). 2. An all-reduce already consists of the
# two halves between which the update moved. 3. The graph of each block holds its gathered weights until backward.
# 4. Yes, each its own elements: every element is on exactly one rank. 5. Shards are dealt in order, so what is
# missing is missing at the end; padding has zero gradient and is no part of any piece, so nothing happens to it.
#
# </details>
#
# ## Further reading
#
# - Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (sections 5 and
#   7).
# - Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
# - Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training" (the compiler's
#   view).
# - Next: lesson 06 cuts the matrices themselves.
