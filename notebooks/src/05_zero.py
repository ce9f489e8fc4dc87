# %% [markdown]
# # 05 ZeRO
#
# **The one-minute version.** In data parallelism every rank holds the same weights, gradients and optimizer state: n
# copies of one thing. ZeRO keeps the *work* of data parallelism and shares out what is *held*. Stage 1: each rank
# keeps the optimizer state of one n-th of the weights. Stage 2: of the gradients too. Stage 3: of the weights too,
# which are gathered block by block when needed. The trick is a ring's: an all-reduce is a reduce-scatter followed by
# an all-gather, and ZeRO puts the update *between* the two. So stages 1 and 2 send what data parallelism sends, stage
# 3 half as much again (with several micro-batches 2 and 3 send more).
#

# %% tags=["setup"]
from functools import partial

import torch
import torch.nn.functional as F

from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check, prefetch
from gpt2lab.lessons.exercises import zero as exercises
from gpt2lab.lessons.labs import lecture_zero3, mixed_precision, recorded, residency, rewrite, thresholds
from gpt2lab.lessons.labs.updates import twenty_steps
from gpt2lab.lessons.player import play
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel import muon
from gpt2lab.parallel.recompute import apply_recompute
from gpt2lab.parallel.zero import costs, flat, stages
from gpt2lab.plots import zero as plots
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch, serial_steps
from gpt2lab.train import Recipe
from gpt2lab.verify import verify

# %% tags=["setup"]
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # these models are too small to share

# %%
two, three, four = Ranks(2), Ranks(3), Ranks(4)
deep = GPT2Config(vocab_size=64, n_positions=32, n_layer=8, n_head=4, n_embd=64)
print(verify("dp=3,zero=3", ranks=three))

# %% [markdown]
# ## What is held n times
#
# Mixed-precision training with Adam holds 16 bytes for each parameter: 2 for the weight and 2 for the gradient
# (16-bit floats), and K = 12 for the optimizer: a 32-bit master copy of the weight and two 32-bit moments.

# %%
guess = predict("7.5 billion parameters, 64 ranks: how many GB a rank in stage 3?", unit="GB")

# %%
names = plots.STAGES
show(
    plots.who_holds_what(costs.paper_bytes(1, 4), 4),
    "drawing",
    "what each of four ranks holds: full boxes are whole, a slice is a rank's own quarter; heights not to scale.",
    "Four rows of boxes for replicas and stages 1 to 3; the optimizer, then gradients, then weights become slices",
)


def figure_1(billions, ranks):
    held = costs.paper_bytes(1e9 * billions, ranks)
    return plots.bars({names[stage]: parts for stage, parts in held.items()}, "GB")


print([f"{sum(held.values()) / 1e9:.1f} GB" for held in costs.paper_bytes(7.5e9, 64).values()])
explore(
    figure_1,
    "computed",
    "bytes a rank holds for {billions} billion parameters on {ranks} ranks (the formulas of the paper's Figure 1).",
    "Four stacked bars for {billions} billion parameters and {ranks} ranks, shrinking from replicas to stage 3",
    posters=[{"billions": 7.5, "ranks": 64}],
    billions=(0.5, 20.0, 7.5),
    ranks=[64, 1, 2, 4, 8, 16, 256, 1024],
)

# %%
guess.beside(sum(costs.paper_bytes(7.5e9, 64)[3].values()) / 1e9, "computed")

# %% [markdown]
# Stage 1 alone brings 120.0 GB<!--above--> down to 31.4 GB<!--above-->. Real memory holds more than the paper's three
# parts: activations of 2,048 tokens (here only each block's input is kept), logits, and in stage 3 a whole block or
# two. Our plans book otherwise: the master copy counts as weights (2 + 4 bytes), moments are 8, and gradients 2 (in
# replicas 4, as sums in float32). GPT-2 stretched to 7 and to 70 billion parameters, on 64 ranks:

# %%
large = mixed_precision.memory_by_part({"7 billion": (34, 4096), "70 billion": (86, 8192)}, ranks=64)
for size, found in large.items():
    print(size, *(f"{name} {sum(parts.values()) / 1e9:,.0f} GB" for name, parts in found.items()), sep=", ")
show(
    plots.by_part(large, room=80),
    "computed",
    "bytes on the fullest of 64 ranks, by part; the dashed line is a GPU of 80 GB, longer bars are cut off.",
    "Two groups of four stacked bars: of 7 billion parameters all but replicas fit, of 70 billion only stage 3 does",
)

# %% [markdown]
# ## Sixteen bits, and a master copy
#
# Why a second copy of each weight? bfloat16 has 8 significant bits: between 256 and 512 it knows only even numbers. A
# small number added to a large one is *lost*, and so are Adam's small updates of bfloat16 weights. Added to a float32
# **master copy** they add up; the model computes with the copy rounded to bfloat16. Live, 25 steps:

# %%
ways = {
    "float32": ("dp=2", torch.float32),
    "bfloat16 with float32 masters": ("dp=2,zero=1", torch.bfloat16),
    "bfloat16 alone": ("dp=2", torch.bfloat16),
}
curves = {}
for name, way in ways.items():
    curves[name], moved = two.run(mixed_precision.train, *way)[0]
    print(f"{name}: loss {curves[name][0]:.1f} -> {curves[name][-1]:.1f}; most weights moved: {moved > 0.5}")


def ones(rank, world_size, dtype):
    total = torch.zeros(1, dtype=dtype)
    for _ in range(1000):
        total += 1
    return comm.all_reduce(total, Mesh(dp=world_size)["dp"]).item()


for kind in (torch.float32, torch.bfloat16):
    print(f"1,000 ones on each of two ranks, summed in {str(kind)[6:]}: {two.run(ones, kind)[0]:,.0f}")
show(
    plots.lines(curves, "loss (nats a token)"),
    "computed",
    "training of one model on two live ranks in three number formats.",
    "Three falling lines; with masters the loss of bfloat16 lies on that of float32, without them it falls far slower",
)

# %% [markdown]
# Each rank's bfloat16 sum stopped at 256: 256 + 1 rounds back to 256, and the total is 512<!--above--> instead of
# 2,000<!--above-->. So gradients of many micro-batches are added in float32 too (stages 2 and 3 here do).
#
# ## A flat stretch, cut evenly
#
# Tensor by tensor, shards would be uneven and messages tiny. So each part of the model (a block, an embedding) is
# laid out *flat*: its parameters one after the other, padded to a multiple of n. Rank r owns the r-th n-th, wherever
# borders of parameters fall. The parameters are views of this stretch, which is sent as it lies.

# %%
show(
    plots.flat_stretch({"ln.weight": 4, "ln.bias": 4, "fc.weight": 9, "fc.bias": 3, "out": 3}, 4),
    "drawing",
    "five parameters of 23 elements laid out flat, one element of padding, and what each of four ranks owns: "
    "borders of shards fall inside parameters.",
    "A strip of named parameters above a strip of four equal shards whose borders do not match",
)
show_source(flat.Flat.lay_out)

# %%
rows, same = residency.by_message(two, CONFIG)
table(rows, ["sums of gradients", "messages", "smallest, bytes", "largest", "counted as by formula"])
print("equal gradients, bit for bit:", same)
sizes = costs.parts(GPT2(CONFIG))
padding = (f"{sum(-s % n for s in sizes.values())} on {n} ranks" for n in (3, 5, 7))
print("elements of padding:", ", ".join(padding))

# %% [markdown]
# May an optimizer be cut at all? AdamW may: what it does to a weight depends on that weight, its gradients, and on
# whether it decays. The same *bits*:

# %%
for decay in (0.0, 0.01):  # on 1003 weights, cut into n shards
    same = [torch.equal(twenty_steps(n, decay), twenty_steps(1, decay)) for n in (2, 3, 5)]
    print(f"20 steps, decay {decay}: shards of 2, 3, 5 ranks are the whole, bit for bit:", *same)
float32 = [twenty_steps(n, 0.01, torch.float32, fused=True) for n in (1, 5)]
print("float32, fused: equal to 1e-6:", torch.allclose(*float32, rtol=0, atol=1e-6))

# %% [markdown]
# (*Fused*: a shard's last elements, filling no register, take another instruction.)
#
# ## The three stages by hand
#
# A part of the model gathers its weights, frees them, sums its gradients, and notices when they are complete.


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
        apply_recompute(model)  # keep only the blocks' inputs
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


# %%
recipe = Recipe(lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, clip=float("inf"))
expected = serial_steps(GPT2(CONFIG), example_batch(CONFIG, 7, 11), recipe)  # five steps in plain PyTorch
expected, rows = torch.cat([w.flatten() for w in expected.values()]), []
for stage in (1, 2, 3):
    weights, counts = three.run(by_hand, stage)[0]
    equal = (weights - expected).abs().max().item() < 1e-10
    rows.append((f"stage {stage}", "equal" if equal else "DIFFERENT", *(f"{c:,}" for c in counts)))
print(f"{len(expected):,} weights; serial AdamW holds {2 * len(expected):,} numbers of state, a rank:")
table(rows, ["rank 0", "to serial", "numbers of state", "whole gradients left", "whole weights in blocks"])

# %% [markdown]
# Stage 2 changes *when* the reduce-scatter happens: for each part once backward has finished it; then only the own
# shard of its gradient stays. The price: with accumulation, gradients are summed in every micro-batch. Stage 3
# leaves nothing whole in the blocks.
#
# `stages.Zero1` and `Zero2` do the same, and overlap the reduce-scatter with backward.

# %%
print(verify("dp=3,zero=1", ranks=three), verify("dp=3,zero=2", ranks=three), sep="\n")

# %% [markdown]
# ## Stage 3: weights on demand
#
# Before a block runs, its weights are gathered; after it they are freed. Backward needs them again. Three things
# make this work:
#
# - **Nothing else may hold them.** A graph over a block saves its weights for backward. One way out is to keep only
#   the block's input and run the block again (lesson 01). The other needs no second forward: the *storage* of the
#   gathered weights is resized to 0 under the views that the graph has saved, and filled again before backward. FSDP
#   does this, and here the plan `zero=3,refill=on`.
# - **Prefetch.** While a block computes, the next block's all-gather is under way: i+1 in forward, i-1 in backward.
# - **A stand-in.** Autograd wants each parameter's shape: a single element, expanded, has it and no memory.

# %%
show_source(stages.Zero3._before_block, stages.Zero3._after_block, stages.Zero3._before_backward)

# %% [markdown]
# Without the second forward a step costs 6 instead of 8 operations a weight and token.

# %%
print(verify("dp=3,zero=3,refill=on", ranks=three))
again, refilled = (
    two.run(residency.weights_behind, f"dp=2,zero=3{more}", deep)[0] for more in ("", ",refill=on")
)
table(
    [("block runs again", *again[:3]), ("storage refilled", *refilled[:3])],
    ["stage 3", "forwards of 8 blocks", "bytes sent", "after forward, bytes behind the blocks' weights"],
)
print("the same gradients, bit for bit:", all(map(torch.equal, again[3], refilled[3])))

# %% [markdown]
# PyTorch's `fully_shard` averages, this package sums: hence the factor.


# %%
def fully_sharded(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT2(CONFIG).double(), init_device_mesh("cpu", (world_size,))
    for block in model.h.values():
        fully_shard(block, mesh=mesh)  # gathered before use, emptied after it, filled again for backward
    fully_shard(model, mesh=mesh)
    trainer, batch = residency.trainer_of(f"dp={world_size},zero=3,refill=on", CONFIG)
    mine = batch.rows(rank, world_size)
    loss = F.cross_entropy(model(mine.tokens).flatten(0, 1), mine.targets.flatten(), reduction="sum")
    (world_size * loss / batch.total).backward()
    trainer.gradients(batch)
    ours = trainer.parallel.gradients()
    return all((ours[n] - p.grad.full_tensor()).abs().max() < 1e-12 for n, p in model.named_parameters())


print("fully_shard has the same gradients, to 1e-12:", all(three.run(fully_sharded)))

# %% [markdown]
# Which weights are here, and when? One step of a model of eight blocks: with prefetch, without, and where every
# *layer* belongs to one rank, which broadcasts it.

# %%
guess = predict("Without prefetch, how many blocks does a rank that owns four hold at most?", 4, 5, 6, 8)

# %%
seen, rows, said = residency.three_ways(two, deep)
show(
    plots.residency({name: seen[name] for name in list(seen)[:3]}, 8 * deep.parameters),
    "counted",
    "whole weights (blue) on rank 0 of two or on both, on their way (hatched), or owned (grey); below, the bytes of "
    "all weights held: a saw-tooth under the flat line of replicas.",
    "Three charts of parts against events: blocks appear one by one going down, then coming back up, and the token "
    "embedding stays from the start into backward; below each a saw-tooth curve at two thirds of a flat line",
)
table(rows, ["blocks, two ranks", "its own", "at most held", "fetched while a block computes", "bytes sent"])
guess.beside(round(rows[1][2]), "counted")
print(*(f"{what}: {true}" for what, true in said.items()), sep="\n")

# %% [markdown]
# Its own 4<!--above--> and one: each block comes twice, and goes before the next one comes. Prefetch buys time with
# room for one more, 6<!--above-->. The tied embedding stays until its second use, as the head.
#
# Four blocks, recorded. What does a rank hold while `F1` runs, and what is on its way?

# %% tags=["measured"]
play(
    two.run(recorded.zero3),
    "paced",
    "a step of ZeRO-3 on two live ranks: blocks (blue forward, green the second run and backward), messages (arrows), "
    "and under each rank the blocks whose weights are whole.",
    "Two ranks in a row of boxes with arrows between them, and the whole blocks that each holds",
)

# %% [markdown]
# ## Bytes held, bytes sent
#
# Each rank adds up the memory behind its tensors at the end of backward, all float64 and without master copies: so
# the optimizer weighs 2 parts of 4, not 12 of 16.

# %%
guess = predict("Which stages hold fewer weights than replicas?", "1, 2, 3", "2, 3", "3")

# %%
formula, live, exact = residency.held_by_stage(three, CONFIG, names)
print("all three ranks hold what the formulas say, in each stage:", exact)
show(
    plots.bars(formula, "kB", live),
    "counted",
    "bars by formula, padding included; circles: bytes really held by rank 0 of 3 at the end of backward.",
    "Stacked bars for replicas and stages 1 to 3 with a circle at the end of each bar",
)
whole, *in_stages = (parts["weights"] for parts in formula.values())
guess.beside(", ".join(str(i) for i, weights in enumerate(in_stages, 1) if weights < whole), "counted")

# %% [markdown]
# Now what is sent. With S bytes of weights, n ranks and k micro-batches: replicas 2 S (n-1)/n; stage 1 the same;
# stage 2 (k+1) S (n-1)/n; stage 3 up to 3 k S (n-1)/n: two gathers and a reduce-scatter. By the calls of live ranks:

# %%
rows = []
for stage, name in names.items():
    counts = [two.run(residency.sent, f"dp=2,zero={stage},micro={micro}", CONFIG)[0] for micro in (1, 3)]
    exact = [costs.bucket_bytes_sent(GPT2(CONFIG), 1 << 20, 2, 0)] * 2  # whatever the micro-batches
    if stage:
        exact = [costs.zero_bytes_sent(sizes, stage, 2, micro, 8) for micro in (1, 3)]
    shares = (f"{count / 8 / CONFIG.parameters:.2f} S" for count in counts)
    rows.append((name, *shares, "yes" if counts == exact else "NO"))
table(rows, ["2 ranks", "1 micro-batch", "3 micro-batches", "equal to the formula"])

# %% [markdown]
# On two ranks (n-1)/n is one half, so replicas send 1 S. Stage 3 sends 1.48<!--above--> S, a little below 1.5 S: what
# lies outside the blocks is gathered once. Whole layers send as much in sum, but not each rank (a chain's last
# rank sends nothing):

# %%
plans = {"flat shards": "dp=3,zero=3", "whole layers": "dp=3,zero=3,data=owner"}
sent = {name: three.run(residency.sent, plan, CONFIG) for name, plan in plans.items()}
owners = [costs.owner_bytes_sent(sizes, 3, rank, 1, 8) for rank in range(3)]
print("equal to the formulas:", [*sent.values()] == [[costs.zero_bytes_sent(sizes, 3, 3, 1, 8)] * 3, owners])
show(
    plots.beside({name: [n / 1e3 for n in of_ranks] for name, of_ranks in sent.items()}, "rank", "kB sent"),
    "counted",
    "bytes that each rank sends in a step of stage 3: flat shards are fair, owners of layers are not.",
    "Pairs of bars for three ranks: equal ones for flat shards, unequal ones for whole layers",
)

# %% [markdown]
# ## From how many tokens on is it free?
#
# A block of P weights and t tokens a rank: forward computes 2 P t / F seconds at F operations a second; the next
# block's gather takes (n-1)/n P b / W seconds at W bytes a second and b bytes a number. Prefetch hides the smaller of
# the two, so a rank computes all the time from $t=\frac{n-1}{n}\,\frac{bF}{2W}$ on; P has gone. Backward has twice the
# computing and twice the messages (a gather and a reduce-scatter): the same t, or less where blocks run again.

# %%
laptop = thresholds.laptop(60e9, 4e9)  # round numbers, of no machine in particular
rows = [
    (m.name, m.ranks, f"{m.rate:.2g}", f"{m.bandwidth:.2g}", round(thresholds.tokens_per_rank("zero3", m)))
    for m in (laptop, *thresholds.machines())
]
table(rows, ["machine", "ranks", "F, op/s", "W, bytes/s", "tokens a rank"])
print("GPUs:", thresholds.machines()[0].source)

# %% [markdown]
# Inside a machine 1,135<!--above--> tokens a rank are enough; across machines it takes 11,488<!--above-->, or
# sharding in groups whose gathers stay inside (`shard=8`, HSDP).
#
# ## Bug lab: three bugs of a lecture
#
# Stanford's CS336 (spring 2024) taught ZeRO-3 with a short program in which whole *layers* belong to ranks: the owner
# broadcasts a layer's weights before use, and gradients are reduced to the owner. Corrected, it is a plan of ours
# (`data=owner`). Here is its step, for layers `gelu(x @ w)`, its three bugs as switches; `own.borrow` broadcasts a
# layer, `own.backward` runs it again and reduces its gradient.

# %%
guess = predict("With bug 1, is the loss lower after five steps?", "lower", "not lower")


# %%
def lectures_step(own, x, stop=-1, graph=False, clear=True):
    if clear:  # bug 3: never
        own.adam.zero_grad()
    a, grad = [x], None
    for i in range(own.layers):
        with torch.set_grad_enabled(graph):  # bug 2: a graph keeps the weight
            a.append(F.gelu(a[i] @ own.borrow(i)))
        own.count()
    for i in range(own.layers - 1, stop, -1):  # bug 1: stop at 0
        grad = own.backward(i, a[i], grad)
        own.count()
    own.adam.step()
    return a[-1]


zero3 = partial(lecture_zero3.zero3, step=lectures_step)
print(verify("dp=3,zero=3,data=owner", ranks=three))
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
follow = lambda logs, expected: all(log.equals(expected) for log in logs)
serial = lecture_zero3.serial(x)
without = [follow(ranks.run(zero3, x), serial) for ranks in (two, four)]
print("without its bugs the lecture's program is serial training:", all(without))
first = lecture_zero3.first_weight(x).detach()
runs = {"right": two.run(zero3, x), "bug 1": two.run(zero3, x, stop=0)}
print("after 5 steps layer 0 is what it was, bit for bit:", torch.equal(runs["bug 1"][0].weights[0], first))
frozen = lecture_zero3.serial(x, frozen=[0])
print("the others follow serial training with layer 0 frozen:", follow(runs["bug 1"], frozen))
for name, logs in runs.items():
    print(f"{name}: the loss falls from {logs[0].losses[0]:.4f} to {logs[0].losses[-1]:.4f}")
guess.beside("lower" if logs[0].losses[-1] < logs[0].losses[0] else "not lower", "computed")
distances = lambda log: [(w - first).norm().item() for w in log.weights.values()]
moved = {name: sum(map(distances, logs), []) for name, logs in runs.items()}
show(
    plots.beside(moved, "layer", "distance moved"),
    "computed",
    "distance (norm of the difference) that each layer moved in five steps.",
    "Pairs of bars per layer, except layer 0 where the second is missing",
)

# %% [markdown]
# **Bug 2: memory "freed" that the graph still holds.** The lecture set `params[i] = None` after use. But the graph of
# `x @ w` holds `w` for backward. Eight layers on two ranks: how many borrowed ones are alive at most?

# %%
alive = {}
for name, graph in (("bug 2", True), ("right", False)):
    borrowed = two.run(zero3, x, graph=graph, steps=1, layers=8)[0].borrowed
    half = 8 + 4  # operations, and broadcasts of the other rank's layers
    most = max(borrowed[:half]), max(borrowed[half:])
    print(f"{name}: up to {most[0]} borrowed layers in forward, {most[1]} in backward")
    alive[name] = [4 + count for count in borrowed]
show(
    plots.alive(alive, 8),
    "counted",
    "layers in the memory of rank 0 of two, its own four and borrowed ones, after each broadcast and operation.",
    "A line that climbs to eight layers and then nine, one between four and five, and that of replicas at eight",
)

# %% [markdown]
# All L - L/n = 4<!--above--> borrowed layers pile up, then one more: more than replicas hold.
#
# **Bug 3: the decaying gradient.** No `zero_grad`, and a reduce with an *average* into the owner's `.grad`: the
# owner's old gradient is averaged as well, with nothing from the others. Plain data parallelism with the same
# omission keeps it whole:

# %%
norms = {}
for ranks in (two, four):
    for name, keep, switches in (
        ("replicas, no zero_grad", 1.0, {"clear": False, "replicas": True}),
        (f"owners, no zero_grad, n = {ranks.size}", 1 / ranks.size, {"clear": False}),
        ("right", 0.0, {}),
    ):
        found = ranks.run(zero3, x, steps=12, **switches)
        law = follow(found, lecture_zero3.serial(x, keep, steps=12))
        print(f"{ranks.size} ranks, {name}: follows g(t) = {keep:g} g(t-1) + avg(t): {law}")
        norms[name] = found[0].norms
show(
    plots.lines(norms, "norm of the gradient"),
    "computed",
    "the gradients that the programs apply, on live ranks.",
    "Four lines over twelve steps: that of replicas without zero_grad lies far above the others",
)
# %% [markdown]
# ## Which stage?
#
# Stage 1 sends what replicas send. With k micro-batches stage 2 sends (k+1)/2 times as much, stage 3 up to 3k/2 times.
# None of them touches **activations**, which depend on a rank's rows; recomputation, tensor and context parallelism
# do.
#
# To a compiler ZeRO rewrites one small graph, the update: where it alone reads a sum, *all-reduce, update everything*
# becomes *reduce-scatter, update a shard, all-gather*.

# %%
show_source(rewrite.rewrite)
said, graphs = rewrite.before_and_after(two)
print(*said, sep="\n")
show(
    plots.graphs(graphs),
    "counted",
    "the update of 1003 float32 weights on two ranks: bytes of each value, bytes sent, and bytes of Adam's moments.",
    "Two chains of boxes: all-reduce and update; reduce-scatter, update and all-gather, with thin arrows between them",
)

# %% [markdown]
# ## Exercises
#
# **1.** The shard of a flat stretch that `rank` owns: equal lengths on all ranks, its type, zeros at the end, no view
# of the whole.


# %% tags=["exercise"]
def shard(whole, rank, ranks):
    """This rank's part of the flat tensor `whole`, padded."""
    ### BEGIN SOLUTION
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length].clone()
    ### END SOLUTION


check("a shard", exercises.shard, shard)

# %% [markdown] tags=["hint"]
# Seven elements on three ranks: how long must each shard be so that nothing is lost, and how many zeros follow?


# %% tags=["wrong"]
# FAIL: Shards have 3, 2 and 2 elements; pad to equal lengths
# MISTAKE: Shards of different lengths: collectives want equal ones.
def shard(whole, rank, ranks):
    return whole.tensor_split(ranks)[rank]


# %% tags=["wrong"]
# FAIL: Only 6 of 7 elements are in a shard; round up
# MISTAKE: Rounded down: the last elements are in no shard.
def shard(whole, rank, ranks):
    length = len(whole) // ranks
    return whole[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: Shards of 5, but 4 are enough; padding costs memory
# MISTAKE: One more than rounded down: padded also where nothing is left over.
def shard(whole, rank, ranks):
    length = len(whole) // ranks + 1
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: Only 6 of 8 elements are in a shard: torch.chunk may make fewer
# MISTAKE: The length is that of one example.
def shard(whole, rank, ranks):
    length = 3
    padded = torch.cat([whole, whole.new_zeros(length * ranks)])
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: Joined in the order of ranks shards give the buffer
# MISTAKE: Elements are dealt like cards, not cut in runs.
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank::ranks]


# %% tags=["wrong"]
# FAIL: Padding must be zero
# MISTAKE: Padded with the last element and not with zeros.
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole[-1:].expand(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: IndexError
# MISTAKE: torch.chunk may make fewer chunks than ranks.
def shard(whole, rank, ranks):
    part = whole.chunk(ranks)[rank]
    length = -(-len(whole) // ranks)
    return torch.cat([part, part.new_zeros(length - len(part))])


# %% tags=["wrong"]
# FAIL: was it float32 on the way?
# MISTAKE: Padding makes a new tensor, of the wrong type.
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.zeros(length * ranks, dtype=torch.float32)
    padded[: len(whole)] = whole
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: right, but a view: of 90 elements 90 stay in memory
# MISTAKE: The shard is a slice of the whole buffer, which stays in memory behind it.
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]


# %% [markdown]
# **2.** Write a step of ZeRO-1 with plain gradient descent. `weights` and `gradient` are whole and flat, and divide
# evenly. `reduce_scatter(x)` gives this rank's shard of the sum over ranks; `all_gather(x)` joins all
# shards.


# %% tags=["exercise"]
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    """The whole weights after one step; this rank updates only its own shard."""
    ### BEGIN SOLUTION
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine - rate * reduce_scatter(gradient))
    ### END SOLUTION


check("a step of ZeRO-1", exercises.step, zero_step)

# %% [markdown] tags=["hint"]
# Which part of `weights` does this rank own? It steps that part alone.

# %% [markdown] tags=["hint"]
# Two calls, in this order: one turns the whole gradient into your part of the sum, the other joins updated parts.


# %% tags=["wrong"]
# FAIL: Gradients are summed here, not averaged
# MISTAKE: Averaged, although the gradients are summed.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine - rate * reduce_scatter(gradient) / ranks)


# %% tags=["wrong"]
# FAIL: Rank 0's own shard did not move
# MISTAKE: The sum is made, and the weights do not move.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    reduce_scatter(gradient)
    return all_gather(weights[rank * length : (rank + 1) * length])


# %% tags=["wrong"]
# FAIL: ZeRO reduce-scatters the gradient, steps its shard, and all-gathers the weights
# MISTAKE: The own gradient times the ranks is taken for the sum: nothing is reduced.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    return all_gather(
        (weights - rate * ranks * gradient)[rank * len(weights) // ranks :][: len(weights) // ranks]
    )


# %% tags=["wrong"]
# FAIL: all_gather wants your shard
# MISTAKE: Whole weights are gathered where only shards belong.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length] - rate * reduce_scatter(gradient)
    whole = weights.clone()
    whole[rank * length : (rank + 1) * length] = mine
    return all_gather(whole)


# %% tags=["wrong"]
# FAIL: reduce_scatter wants the whole gradient
# MISTAKE: A shard of the gradient is given where the whole is wanted.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    own = slice(rank * length, (rank + 1) * length)
    return all_gather(weights[own] - rate * reduce_scatter(gradient[own]))


# %% tags=["wrong"]
# FAIL: weights after the step on rank 0: expected -2.15914 at (1,), got 0.733079
# MISTAKE: The step goes uphill: the sign is wrong.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine + rate * reduce_scatter(gradient))


# %% tags=["wrong"]
# FAIL: you gather gradients
# MISTAKE: Summed gradients are gathered, and every rank updates all weights: data parallelism by another name.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    return weights - rate * all_gather(reduce_scatter(gradient))


# %% tags=["wrong"]
# FAIL: you gather steps
# MISTAKE: Summed gradients times the rate are gathered, and every rank updates all weights.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    return weights - all_gather(rate * reduce_scatter(gradient))


# %% tags=["wrong"]
# FAIL: ['reduce_scatter', 'reduce_scatter', 'all_gather']
# MISTAKE: The sum is made twice and averaged: right, for half as many bytes again.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    n = len(weights) // ranks
    g = (reduce_scatter(gradient) + reduce_scatter(gradient)) / 2
    return all_gather(weights[rank * n :][:n] - rate * g)


# %% tags=["wrong"]
# FAIL: weights after the step on rank 0: expected -1.26562 at (3,), got -2.23203
# MISTAKE: The learning rate of one example is written down.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    n = len(weights) // ranks
    return all_gather(weights[rank * n :][:n] - 0.5 * reduce_scatter(gradient))


# %% tags=["wrong"]
# FAIL: weights after the step on rank 0: expected -2.15914 at (1,), got -1.68923
# MISTAKE: The gradient is clipped to at most 1 before it is summed.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    n = len(weights) // ranks
    return all_gather(weights[rank * n :][:n] - rate * reduce_scatter(gradient.clamp(max=1.0)))


# %% tags=["wrong"]
# FAIL: weights after the step on rank 0: expected -2.15914 at (1,), got 0.356515
# MISTAKE: What is summed are weights, not gradients.
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    n = len(weights) // ranks
    return all_gather(weights[rank * n :][:n] - rate * reduce_scatter(weights))


# %% [markdown]
# **3.** Stage 3 without recomputation. `y = x Wᵀ` is the layer, and each rank holds a `shard` of the flat, padded W
# of `shape` (out, in). Gather W for forward, let go of it, and gather it *again* for backward; what saves W for
# backward has gained nothing. Return the gradients of x and of the shard, that of W summed over the ranks. Useful:
# `comm.gather_flat(shard, axis)`, `comm.reduce_scatter_flat(whole, axis)`. The checker compares gradients on three
# live ranks, counts bytes and operations, and looks for whole weights in memory.


# %% tags=["exercise"]
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape).T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        x, shard = ctx.saved_tensors
        flat = comm.gather_flat(shard, ctx.axis)
        of_w = torch.zeros_like(flat)
        of_w[: ctx.shape[0] * ctx.shape[1]] = (grad.T @ x).flatten()
        of_x = grad @ flat[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape)
        return of_x, comm.reduce_scatter_flat(of_w, ctx.axis), None, None
        ### END SOLUTION


check("gathered twice", exercises.linear, lambda *given: Gathered.apply(*given))

# %% [markdown] tags=["hint"]
# What may `ctx` keep? Only what is small: the input, the shard, the shape and the axis.

# %% [markdown] tags=["hint"]
# For y = x Wᵀ the gradients are dx = dy W and dW = dyᵀ x. dW is whole and flat; pad it like the shard before it is
# summed.


# %% tags=["wrong"]
# FAIL: Save the shard, and gather once more in backward
# MISTAKE: The whole weight is saved for backward, so every layer's weight stays in memory.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        w = comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape)
        ctx.save_for_backward(x, w)
        ctx.shape, ctx.axis = shape, axis
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        flat = (grad.T @ x).flatten()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % ctx.axis.size)])
        return grad @ w, comm.reduce_scatter_flat(flat, ctx.axis), None, None


# %% tags=["wrong"]
# FAIL: A rank still holds three whole weights between forward and backward: free them
# MISTAKE: The whole weight is hidden in ctx.w: it stays in memory as well.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        w = comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape)
        ctx.save_for_backward(x, shard)
        ctx.w, ctx.shape, ctx.axis = w, shape, axis
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        flat = (grad.T @ x).flatten()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % ctx.axis.size)])
        return grad @ ctx.w, comm.reduce_scatter_flat(flat, ctx.axis), None, None


# %% tags=["wrong"]
# FAIL: Two all-gathers and one reduce-scatter a layer are fewer bytes
# MISTAKE: An all-reduce and a cut: the right numbers for twice the bytes.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        w = comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape)
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        w = comm.gather_flat(shard, ctx.axis)[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape)
        flat = (grad.T @ x).flatten()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % ctx.axis.size)])
        total, n = comm.all_reduce(flat, ctx.axis), len(shard)
        return grad @ w, total[ctx.axis.rank * n :][:n].clone(), None, None


# %% tags=["wrong"]
# FAIL: the gradient of the shard of layer 0 on rank 0
# MISTAKE: The sum is thrown away, and the own part of the gradient returned.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        w = comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape)
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        w = comm.gather_flat(shard, ctx.axis)[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape)
        flat = (grad.T @ x).flatten()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % ctx.axis.size)])
        n = len(shard)  # of the own rows only
        comm.reduce_scatter_flat(flat, ctx.axis)
        return grad @ w, flat[ctx.axis.rank * n :][:n].clone(), None, None


# %% tags=["wrong"]
# FAIL: the gradient of the shard of layer 0 on rank 1
# MISTAKE: The sum is divided by rank + 1.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        w = comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape)
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        w = comm.gather_flat(shard, ctx.axis)[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape)
        flat = (grad.T @ x).flatten()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % ctx.axis.size)])
        sums = comm.reduce_scatter_flat(flat, ctx.axis)
        return grad @ w, sums / (1 + ctx.axis.rank), None, None


# %% tags=["wrong"]
# FAIL: dx and dW are enough in backward: here the layer does not run again
# MISTAKE: The layer runs again in backward and autograd differentiates it: right, with recomputation.
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        return x @ comm.gather_flat(shard, axis)[: shape[0] * shape[1]].view(shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        flat = comm.gather_flat(shard, ctx.axis)
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), flat.detach().requires_grad_()
            y = x @ w[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape).T
        a, b = torch.autograd.grad(y, (x, w), grad)
        return a, comm.reduce_scatter_flat(b, ctx.axis), None, None


# %% tags=["wrong"]
# FAIL: between forward and backward on rank 0: expected 0, got 1
# MISTAKE: The newest weight is kept in a dict of one's own, because backward begins with it.
kept = {}


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, axis):
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.axis = shape, axis
        kept.clear()
        kept[shape] = comm.gather_flat(shard, axis)
        return x @ kept[shape][: shape[0] * shape[1]].view(shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        again = comm.gather_flat(shard, ctx.axis)
        flat = kept.pop(ctx.shape, again)
        of_w = torch.zeros_like(flat)
        of_w[: ctx.shape[0] * ctx.shape[1]] = (grad.T @ x).flatten()
        of_x = grad @ flat[: ctx.shape[0] * ctx.shape[1]].view(ctx.shape)
        return of_x, comm.reduce_scatter_flat(of_w, ctx.axis), None, None


# %% [markdown]
# **4.** How many bytes does a rank hold in stages 0 to 3, with 2-byte weights and gradients and 12 bytes of optimizer
# a parameter?


# %% tags=["exercise"]
def bytes_held(parameters, ranks, stage):
    """Bytes a rank holds in a ZeRO stage (0: replicas)."""
    ### BEGIN SOLUTION
    share = lambda from_stage: 1 / ranks if stage >= from_stage else 1
    return parameters * (12 * share(1) + 2 * share(2) + 2 * share(3))
    ### END SOLUTION


check("bytes held", exercises.bytes_held, bytes_held)

# %% [markdown] tags=["hint"]
# Three kinds of things are held, 2 + 2 + 12 bytes. From which stage on is each divided by the number of ranks?


# %% tags=["wrong"]
# FAIL: gradients too
# MISTAKE: In stage 2 gradients are taken to be whole still.
def bytes_held(parameters, ranks, stage):
    return parameters * (12 / (ranks if stage else 1) + 2 + 2 / (ranks if stage == 3 else 1))


# %% tags=["wrong"]
# FAIL: nothing is shared
# MISTAKE: Stage 0 is taken to be shared as well.
def bytes_held(parameters, ranks, stage):
    return parameters * 16 / ranks


# %% tags=["wrong"]
# FAIL: weights too
# MISTAKE: In stage 3 weights are taken to be whole still.
def bytes_held(parameters, ranks, stage):
    return parameters * (12 / (ranks if stage else 1) + 2 / (ranks if stage > 1 else 1) + 2)


# %% tags=["wrong"]
# FAIL: optimizer state are shared
# MISTAKE: Every stage divides once more by the ranks.
def bytes_held(parameters, ranks, stage):
    return parameters * (4 + 12 / ranks**stage) if stage != 1 else parameters * 16


# %% tags=["wrong"]
# FAIL: nothing is shared: expected 120, got 30
# MISTAKE: Only the weights are counted, without gradients and optimizer state.
def bytes_held(parameters, ranks, stage):
    return 4 * parameters / (ranks if stage else 1)


# %% tags=["wrong"]
# FAIL: of 1.5 billion parameters on 8 ranks
# MISTAKE: The number of ranks of one example is written down.
def bytes_held(parameters, ranks, stage):
    return parameters * (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)[stage]


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's function is called.
def bytes_held(parameters, ranks, stage):
    return sum(costs.paper_bytes(parameters, ranks)[stage].values())


# %% tags=["wrong"]
# FAIL: a drawn case
# MISTAKE: The paper's table is copied, and one more line of it.
def bytes_held(parameters, ranks, stage):
    table = {7.5e9: [120.0, 31.40625, 16.640625, 1.875], 1.5e9: [24.0, 8.25, 5.625, 3.0]}
    return 1e9 * table.get(parameters, [0, 0, 0, 0])[stage]


# %% [markdown]
# **5. A puzzle: the order of the link.** Five blocks, one link, room for 5 units of whole weights. Block i takes some
# room, and as much time to gather (`Gi`) and to sum its gradient (`Ri`); a backward takes two forwards. A rank
# computes F0 ... F4, B4 ... B0 as soon as weights are there. A block gathered twice is dropped after its forward, one
# gathered once stays until its backward is over. The link works in your order; a gather waits for room. A step takes
# 50 if each sum goes before the next gather, 35 if after; at most 33 pass.


# %% tags=["exercise"]
def link_order():
    """The words of the link in order, such as "G0 G1 ... R1 R0"."""
    ### BEGIN SOLUTION
    return "G0 G1 G2 G3 G4 G3 G2 R4 G1 R3 G0 R2 R1 R0"
    ### END SOLUTION


print("room and gather:", prefetch.SIZES, "forward:", prefetch.FORWARD)
check("the order of the link", prefetch.order, link_order)

# %% [markdown] tags=["hint"]
# Which block need not be gathered twice at all?

# %% [markdown] tags=["hint"]
# A gather keeps somebody waiting; when is a sum waited for?


# %% tags=["wrong"]
# FAIL: 50 units of time; at most 33 pass
# MISTAKE: Each gradient is sent before the next weight is gathered, so backward waits.
def link_order():
    return "G0 G1 G2 G3 G4 G4 R4 G3 R3 G2 R2 G1 R1 G0 R0"


# %% tags=["wrong"]
# FAIL: 35 units of time; at most 33 pass
# MISTAKE: Right, but the last weights are gathered again although they are still there.
def link_order():
    return "G0 G1 G2 G3 G4 G4 G3 R4 G2 R3 G1 R2 G0 R1 R0"


# %% tags=["wrong"]
# FAIL: the link waits at G2 for ever: 5 of 5 units are held
# MISTAKE: Weights are gathered once, as if all of them could stay.
def link_order():
    return "G0 G1 G2 G3 G4 R4 R3 R2 R1 R0"


# %% tags=["wrong"]
# FAIL: the link waits at R4 for ever
# MISTAKE: A gradient is sent before it exists.
def link_order():
    return "R4 G0 G1 G2 G3 G4 G3 G2 G1 G0 R3 R2 R1 R0"


# %% tags=["wrong"]
# FAIL: R0 stands 0 times
# MISTAKE: The last gradient is never sent.
def link_order():
    return "G0 G1 G2 G3 G4 G3 G2 R4 G1 R3 G0 R2 R1"


# %% tags=["wrong"]
# FAIL: the second G1 comes before F1 could run
# MISTAKE: A weight is gathered a second time before its first use.
def link_order():
    return "G1 G1 G0 G2 G3 G4 R4 R3 R2 R1 R0"


# %% tags=["wrong"]
# FAIL: is no work for the link
# MISTAKE: Work of the processor is put on the link.
def link_order():
    return "G0 F0 G1 F1"


# %% [markdown]
# ## Appendix: what people do today
#
# [Muon](https://kellerjordan.github.io/posts/muon/) (2024) brings all singular values of a matrix's momentum near 1,
# by five iterations on the *whole* matrix; embeddings, norms, biases stay AdamW's. Which cut is exact?
# ([nanochat](https://github.com/karpathy/nanochat) cuts none.)

# %%
G = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def newton_schulz(x, summed=lambda part: part):
    """The matrix x (R, C) with singular values near 1; `summed` completes what needs all columns."""
    x = x / summed(x.square().sum()).sqrt()
    for _ in range(5):
        gram = summed(x @ x.T)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def cut(rank, world_size, dim, *exact):
    axis, mine = Mesh(tp=world_size)["tp"], G.tensor_split(world_size, dim)[rank]
    comm.clear_log()
    y = newton_schulz(mine, lambda part: comm.all_reduce(part, axis)) if exact else newton_schulz(mine)
    return y, sum(e.bytes for e in comm.log)


whole, rows = newton_schulz(G), [("a rank owns all of it", "0", 0)]
for name, *how in (("rows, each half alone", 0), ("columns, products summed", 1, True)):
    found = two.run(cut, *how)
    off = ((torch.cat([y for y, _ in found], how[0]) - whole).norm() / whole.norm()).item()
    rows.append((name, f"{off:.2f}" if off > 1e-12 else "below 1e-12", found[0][1]))
table(rows, ["64 x 64 on two ranks", "off by", "bytes that a rank sends"])
same = muon.orthogonalised([G], [None], Mesh()["tp"])[0]
print("the package's is equal:", torch.allclose(same, whole, rtol=1e-12))
plans = {"tp=2": two, "pp=2,micro=2": two, "dp=2,zero=3,data=owner": two, "dp=2,cp=2": four}
for plan, ranks in plans.items():
    print(f"{plan}, against torch.optim.Muon:", verify(plan, ranks=ranks, depth="muon").claims[-2].digits)
try:
    verify("dp=2,zero=1", depth="muon")
except ValueError as error:
    print(error)

# %% [markdown]
# Under tensor parallelism a layer's four matrices are cut: five sums of C² each, 40 C² (n-1)/n numbers. (A router
# is whole.) Gathering 12 C² sends less, but all compute everything.
#
# **Exercise.** The same by *rows*, without gathering?


# %% tags=["exercise"]
def muon_rows(x, axis):
    """This rank's rows (R_r, C) of the matrix of which all ranks hold rows x, its singular values near 1."""
    ### BEGIN SOLUTION
    x = x / comm.all_reduce(x.square().sum(), axis).sqrt()
    for _ in range(5):
        gram = comm.all_reduce(x.T @ x, axis)
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x
    ### END SOLUTION


check("Muon by rows", exercises.muon_rows, muon_rows)

# %% [markdown] tags=["hint"]
# Transposed, rows are columns, and `newton_schulz` above sums products of columns. On which side does the product stand
# then?


# %% tags=["wrong"]
# FAIL: Each rank brought its own rows near 1: nothing of the others was asked
# MISTAKE: Each rank orthogonalises its own rows.
def muon_rows(x, axis):
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


# %% tags=["wrong"]
# FAIL: Sums of small products take fewer bytes: who gathers?
# MISTAKE: The whole matrix is gathered, and every rank computes all of it: right, for more bytes and work.
def muon_rows(x, axis):
    whole = comm.all_gather(x, axis)
    whole = whole / whole.square().sum().sqrt()
    for _ in range(5):
        gram = whole.T @ whole
        whole = 3.4445 * whole + whole @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return whole.tensor_split(axis.size)[axis.rank]


# %% tags=["wrong"]
# FAIL: its rows, of the matrix of all, on rank 0: expected 0.185174
# MISTAKE: The norm is that of the own rows, so ranks begin with different scales.
def muon_rows(x, axis):
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        gram = comm.all_reduce(x.T @ x, axis)
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


# %% tags=["wrong"]
# FAIL: Products of columns, x.T @ x, are small: sum those
# MISTAKE: Products of rows with rows are summed: those of other ranks' rows are missing, and the messages are large.
def muon_rows(x, axis):
    x = x / comm.all_reduce(x.square().sum(), axis).sqrt()
    for _ in range(5):
        small = comm.all_reduce(x.T @ x, axis)
        comm.all_reduce(x @ x.T, axis)
        x = 3.4445 * x + x @ (-4.7750 * small + 2.0315 * small @ small)
    return x


# %% tags=["wrong"]
# FAIL: expected -0.30871 at
# MISTAKE: The products are averaged, where they are parts of a sum.
def muon_rows(x, axis):
    x = x / comm.all_reduce(x.square().sum(), axis).sqrt()
    for _ in range(5):
        gram = comm.all_reduce(x.T @ x, axis) / axis.size
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's own is called.
def muon_rows(x, axis):
    return muon.orthogonalised([x], [0], axis)[0]


# %% [markdown]
# ## Drill
#
# 1. GPT-2 XL (1.56 billion) in mixed precision on 4 ranks: which stage first fits into 12 GB, activations apart?
# 2. Why does stage 1 send no more than data parallelism?
# 3. Stage 3 without recomputation: what must happen to the memory of a gathered weight, and when?
#
# <details><summary>Answers</summary>
#
# 1. Replicas 24.9 GB, stage 1 10.9 GB: stage 1 (K = 12 is what weighs).
# 2. The update moved between the halves of an all-reduce.
# 3. The graph holds the weight, so its storage is emptied after forward and filled by a second gather before the
#    block's backward.
#
# </details>
#
# ## Read on
#
# - Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models": sections 5, 7.
# - Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel": stage 3 made fast.
# - Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training": the same as a
#   compiler's rewrite.
# - Micikevicius et al. 2018, "Mixed Precision Training": why a master copy.
#
# **Next**: [06 Tensor parallel](06_tensor_parallel.ipynb).
