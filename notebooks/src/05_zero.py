# %% [markdown]
# # 05 ZeRO
#
# **The one-minute version.** In data parallelism every rank holds the same weights, gradients and optimizer state:
# n copies of one thing. ZeRO keeps the *work* of data parallelism and shares out what is *held*. Stage 1: each rank
# keeps the optimizer state of one n-th of the weights. Stage 2: of the gradients too. Stage 3: of the weights too,
# which are gathered block by block when they are needed. The trick costs nothing until stage 3, because a
# ring's all-reduce is a reduce-scatter followed by an all-gather: ZeRO puts the update *between* the two.
#
# The claim of this lesson, on three live ranks and seven rows that do not divide evenly:

# %% tags=["setup"]
import torch
import torch.nn.functional as F

from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import zero as exercises
from gpt2lab.lessons.labs import lecture_zero3, recorded, residency, rewrite, updates
from gpt2lab.lessons.player import play
from gpt2lab.machine import memory
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.recompute import apply_recompute
from gpt2lab.parallel.zero import costs, flat, stages
from gpt2lab.plots import zero as plots
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch, serial_steps
from gpt2lab.train import Recipe
from gpt2lab.verify import verify

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
# Figure 1 of the paper, drawn from the formulas. **Predict** first: 7.5 billion parameters on 64 ranks, how many
# GB in each stage?

# %%
names = plots.STAGES
print([f"{costs.paper_bytes(7.5e9, 64)[stage] / 1e9:.1f} GB" for stage in range(4)])
explore(
    plots.figure_1,
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
# laid out *flat*: its parameters one after the other, padded to a multiple of n. Rank r owns the r-th n-th, wherever
# borders of parameters fall. The parameters are views of this stretch, which is gathered, updated and sent as it
# lies.

# %%
show_source(flat.Flat.lay_out)

# %%
ODD = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8)  # divides by 2, hardly by 3
sizes = costs.parts(GPT2(ODD))
print("elements of the parts:", sizes)
for ranks in (2, 3, 5):
    padding = sum(ranks * costs.shard_length(s, ranks) - s for s in sizes.values())
    print(f"{ranks} ranks: {padding} elements of padding in all")
print(verify("dp=3,zero=2", ODD, ranks=three))

# %% [markdown]
# Weight decay is for matrices only, and a flat stretch is no matrix: so a shard is handed to AdamW as *pieces*, each
# knowing which parameter it is a part of.
#
# May an optimizer be cut at all? AdamW may: what it does to a weight depends on that weight's gradients alone. So
# shard by shard it must give the same *bits*:
# %%
twenty_steps = updates.twenty_steps  # of AdamW on 1003 weights, cut into so many shards
for decay in (0.0, 0.01):
    same = [torch.equal(twenty_steps(n, decay), twenty_steps(1, decay)) for n in (2, 3, 5)]
    print(f"20 steps, decay {decay}: shards of 2, 3, 5 ranks are the whole, bit for bit:", *same)
float32 = [twenty_steps(n, 0.01, torch.float32, fused=True) for n in (1, 5)]
print("float32, fused: equal to 1e-6:", torch.allclose(*float32, rtol=0, atol=1e-6))

# %% [markdown]
# The last line claims less: the *fused* AdamW computes the last elements of a stretch by other instructions, and
# their last bit may differ.
#
# ## The three stages by hand
#
# Here are all three, on parts of a model: its blocks, and the modules outside them. A part can gather its weights,
# free them, sum its gradients, and notice that they are complete. The all-reduce of lesson 04 has come apart, and the
# update stands between the halves.


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
print(
    f"{len(expected):,} weights; serial AdamW holds {2 * len(expected):,} numbers of state, and each of 3 ranks:"
)
table(
    rows, ["rank 0", "against serial", "numbers of state", "whole gradients left", "whole weights in blocks"]
)

# %% [markdown]
# Stage 2 changes *when* the reduce-scatter happens: for each part as soon as backward has finished it, after which
# only the own shard of its gradient stays. The price shows with accumulation: gradients must then be summed in every
# micro-batch, or kept whole. Stage 3 leaves nothing whole in the blocks; embeddings and the last norm stay whole
# here.
#
# The package's `stages.Zero1` and `Zero2` do the same, and overlap: the reduce-scatter runs while backward goes on.

# %%
print(verify("dp=3,zero=1", ranks=three), verify("dp=3,zero=2", ranks=three), sep="\n")

# %% [markdown]
# ## Stage 3: weights on demand
#
# Before a block runs, its weights are gathered; after it they are freed. Backward needs them again. Three things
# make this work:
#
# - **Nothing else may hold them.** A graph over a block saves its weights for backward, so setting `.data` to something
#   else frees nothing. One way out is to keep only the block's input and run the block again (lesson 01). The other
#   needs no second forward: the *storage* of the gathered weights is resized to 0 under the views that the graph has
#   saved, and filled again before backward. FSDP does this, and here the plan `zero=3,refill=on`.
# - **Prefetch.** While a block computes, the next block's all-gather is under way: i+1 in forward, i-1 in backward.
# - **A stand-in.** Autograd wants to know each parameter's shape. A single element, expanded, has the shape
#   and no memory.

# %%
show_source(stages.Zero3._before_block, stages.Zero3._after_block, stages.Zero3._before_backward)

# %% [markdown]
# Both ways on live ranks: how often do blocks run in a step, what is sent, and what lies behind the blocks' weights
# between forward and backward? By formula both send 3 S (n-1)/n for the blocks; without the second forward a step
# costs 6 instead of 8 operations a weight and token.

# %%
print(verify("dp=3,zero=3,refill=on", ranks=three))
again, refilled = (
    two.run(residency.weights_behind, f"dp=2,zero=3{more}", deep)[0] for more in ("", ",refill=on")
)
table(
    [("block runs again", *again[:3]), ("storage refilled", *refilled[:3])],
    ["stage 3", "forwards of 8 blocks", "bytes sent", "bytes behind the blocks' weights"],
)
print("the same gradients, bit for bit:", all(map(torch.equal, again[3], refilled[3])))

# %% [markdown]
# PyTorch's own is `fully_shard`, and these are the lines to write at work. It averages over ranks, where this
# package sums, hence the factor:


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
    return max((ours[n] - p.grad.full_tensor()).abs().max().item() for n, p in model.named_parameters())


print("fully_shard has the same gradients, to 1e-12:", max(three.run(fully_sharded)) < 1e-12)

# %% [markdown]
# Which weights are here, and when? One step of a model of eight blocks: with prefetch, without, and where every
# *layer* belongs to one rank, which broadcasts it. **Predict**: how many does a rank hold at most, if it owns four?

# %%
watch = residency.watch
flat_on, flat_off = two.run(watch, "dp=2,zero=3", deep), two.run(watch, "dp=2,zero=3", deep, False)
layers = two.run(watch, "dp=2,zero=3,data=owner", deep)
runs = {"flat, prefetch": flat_on[0], "flat, no prefetch": flat_off[0]}
runs |= {f"layers, rank {rank}": layers[rank] for rank in range(2)}
show(
    plots.residency({name: seen for name, (seen, _, _) in runs.items()}, 8 * deep.parameters),
    "counted",
    "whole weights (blue) on rank 0 of two or on both, on their way (hatched), or owned (grey); below, the bytes of "
    "all weights held: a saw-tooth under the flat line of replicas. The dashed line is where backward begins.",
    "Four charts of parts against events: blocks appear one by one going down, then coming back up, and the token "
    "embedding stays from the start into backward; below each a saw-tooth curve at two thirds of a flat line",
)
block = 8 * costs.parts(GPT2(deep))["h.0"]
row = lambda name, seen, sent: (
    name,
    seen.blocks[0] / block,
    max(seen.blocks) / block,
    seen.under_way(),
    sent,
)
table(
    [row(name, seen, sent) for name, (seen, sent, _) in runs.items()],
    ["blocks on a rank of 2", "its own", "at most held", "fetched while a block computes", "bytes sent"],
)
exact = all(max(seen.blocks) == seen.blocks[0] + block == 5 * block for seen, _, _ in layers + flat_off)
print("without prefetch the peak is one's own and one block, to the byte, on all ranks:", exact)
print("with prefetch the same gradients, bit for bit:", all(map(torch.equal, flat_on[0][2], flat_off[0][2])))

# %% [markdown]
# Its own and one: each block comes twice, and goes before the next one comes. Prefetch buys time with room for one
# more. The tied embedding stays until its second use, as the head, is over.
#
# The same as a recording: four blocks, two ranks, each message paced to 15 ms and each block to 30 ms. Play it, or step
# with the arrow keys. What does a rank hold while `F1` runs, and what is on its way?

# %% tags=["measured"]
play(
    two.run(recorded.zero3),
    "paced",
    "a step of ZeRO-3 on two live ranks: blocks (blue forward, green the second run and backward), messages (arrows), "
    "and under each rank the blocks whose weights are whole.",
    "Two ranks in a row of boxes with arrows between them, and the whole blocks that each holds",
)

# %% [markdown]
# ## Bytes held: formula and live ranks
#
# Each rank adds up the memory behind its tensors at the end of backward: weights, gradients, and Adam's two moments,
# all float64 and without master copies: the optimizer weighs 2 parts of 4, not 12 of 16. **Predict**: which stages
# hold fewer weights?

# %%
held = lambda rank, world_size, plan: memory.after_backward(*residency.trainer_of(plan, CONFIG))
sizes = costs.parts(GPT2(CONFIG))
found = {stage: three.run(held, f"dp=3,zero={stage}") for stage in range(4)}
for stage, ranks in found.items():
    exact = [held == costs.bytes_held(sizes, stage, 3, rank, 8) for rank, held in enumerate(ranks)]
    print(f"{names[stage]}: all three ranks hold what the formula says:", all(exact))
show(
    plots.bars(
        {names[stage]: costs.bytes_held(sizes, stage, 3, 0, 8) for stage in found},
        "kB",
        {names[stage]: sum(ranks[0].values()) for stage, ranks in found.items()},
    ),
    "counted",
    "bars by formula, padding included; circles: bytes really held by rank 0 of 3 at the end of backward.",
    "Stacked bars for replicas and stages 1 to 3 with a circle at the end of each bar",
)

# %% [markdown]
# ## Bytes sent
#
# With S bytes of weights, n ranks and k micro-batches: replicas 2 S (n-1)/n; stage 1 the same; stage 2 the same for
# one micro-batch, (k+1) S (n-1)/n in general; stage 3 sends up to 3 k S (n-1)/n: two gathers and a reduce-scatter.
# Counted:
# %%
whole = 8 * CONFIG.parameters
rows = []
for stage in range(4):
    counts = [two.run(residency.sent, f"dp=2,zero={stage},micro={micro}", CONFIG)[0] for micro in (1, 3)]
    exact = [costs.bucket_bytes_sent(GPT2(CONFIG), 1 << 20, 2, 0)] * 2  # whatever the micro-batches
    if stage:
        exact = [costs.zero_bytes_sent(sizes, stage, 2, micro, 8) for micro in (1, 3)]
    rows.append((names[stage], *(f"{c / whole:.2f} S" for c in counts), "yes" if counts == exact else "NO"))
table(rows, ["2 ranks", "1 micro-batch", "3 micro-batches", "equal to the formula"])

# %% [markdown]
# On two ranks (n-1)/n is one half, so replicas send 1 S. Stage 3 stays a little below 1.5 S a micro-batch: what lies
# outside the blocks is gathered once only.
#
# Whole layers send as much in sum, but not each rank. (A broadcast goes along a chain, whose last rank sends nothing;
# a sum likewise, to its owner.) On three ranks:

# %%
by_rank = {"flat shards": three.run(residency.sent, "dp=3,zero=3", CONFIG)}
by_rank["whole layers"] = three.run(residency.sent, "dp=3,zero=3,data=owner", CONFIG)
formulas = [costs.zero_bytes_sent(sizes, 3, 3, 1, 8)] * 3
owners = [costs.owner_bytes_sent(sizes, 3, rank, 1, 8) for rank in range(3)]
print("equal to the formulas:", list(by_rank.values()) == [formulas, owners])
show(
    plots.beside({name: [b / 1e3 for b in found] for name, found in by_rank.items()}, "rank", "kB sent"),
    "counted",
    "bytes that each rank sends in a step of stage 3: flat shards are fair, owners of layers are not.",
    "Pairs of bars for three ranks: equal ones for flat shards, unequal ones for whole layers",
)

# %% [markdown]
# ## Memory over a step, event by event
#
# The profiler reports every allocation of a KiB or more, in the model of eight blocks:

# %%
record = lambda rank, world_size, plan: memory.over_a_step(*residency.trainer_of(plan, deep), least=1024)
plans = {"replicas": "dp=2,recompute=on", "stage 2": "dp=2,zero=2,recompute=on", "stage 3": "dp=2,zero=3"}
plans["stage 3, refilled"] = "dp=2,zero=3,refill=on"
curves = {name: two.run(record, plan)[0] for name, plan in plans.items()}
peaks = {name: max(curve) for name, curve in curves.items()}
drops = sum(a - b >= block / 2 for a, b in zip(curves["stage 3"], curves["stage 3"][1:], strict=False))
print("the peak falls from stage to stage:", peaks["replicas"] > peaks["stage 2"] > peaks["stage 3"])
print("teeth of the saw, at least two a block:", drops >= 16)
print("without a second forward the peak is higher:", peaks["stage 3, refilled"] > peaks["stage 3"])

# %% tags=["measured"]
show(
    plots.memory_over_a_step(curves),
    "measured",
    "bytes held on rank 0 over one step of eight blocks on two ranks; triangles mark the peaks.",
    "Four curves over a step: replicas on top with a ramp in backward, stage 3 lowest with many small teeth",
)

# %% [markdown]
# All but the last recompute, so that only what is shared out differs. Replicas pile up gradients during backward. In
# stage 2 a block's gradients are whole for a moment, while they are joined and summed: spikes. In stage 3 each block's
# weights come and go as well: a saw-tooth. Refilled, it rises in forward by the activations that are kept.
#
# ## Bug lab: three bugs of a lecture
#
# Stanford's CS336 (spring 2024) taught ZeRO-3 with a short program in which whole *layers* belong to ranks: the owner
# broadcasts a layer's weights before use, and gradients are reduced to the owner. It is simple, and balances badly:
# one root sends while the others wait. Our corrected version is a plan of its own:

# %%
print(verify("dp=3,zero=3,data=owner", ranks=three))

# %% [markdown]
# Here is the lecture's program on its toy: layers `gelu(x @ w)`, loss mean(x²). Its three
# bugs are switches, all off at first; `serial_toy` is what it ought to be.

# %%
lecture, serial_toy = lecture_zero3.zero3, lecture_zero3.serial
follow = lambda found, expected: all(
    log.equals(expected) for log in found
)  # losses, norms, weights, to 1e-12
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
right = two.run(lecture, x)
print(
    "without the bugs equal to serial, on 2 and 4 ranks:", follow(right + four.run(lecture, x), serial_toy(x))
)

# %% [markdown]
# **Bug 1: layer 0 never learns.** The lecture's backward loop was `range(num_layers - 1, 0, -1)`: it stops at 1.
# **Predict**: does the loss tell?

# %%
wrong, first = two.run(lecture, x, stop=0), lecture_zero3.first_weight(x).detach()
print("after 5 steps layer 0 is what it was, bit for bit:", torch.equal(wrong[0].weights[0], first))
print("the others follow the serial run with layer 0 frozen:", follow(wrong, serial_toy(x, frozen=[0])))
moved = {}
for name, found in (("loop to layer 0", right), ("loop to layer 1", wrong)):
    print(f"{name}: the loss falls from {found[0].losses[0]:.4f} to {found[0].losses[-1]:.4f}")
    moved[name] = [(w - first).norm().item() for log in found for w in log.weights.values()]
show(
    plots.beside(moved, "layer", "distance moved"),
    "computed",
    "distance (norm of the difference) that each layer moved in five steps.",
    "Pairs of bars per layer, except layer 0 where the second is missing",
)

# %% [markdown]
# **Bug 2: memory "freed" that the graph still holds.** The lecture set `params[i] = None` after use. But the graph of
# `x @ w` holds `w` for backward, so the memory stays. Eight layers on two ranks; count the borrowed ones that are
# alive after each broadcast. **Predict** both numbers.

# %%
alive = {}
for name, graph in (("with a graph", True), ("without", False)):
    borrowed = two.run(lecture, x, graph=graph, steps=1, layers=8)[
        0
    ].borrowed  # 12 entries for each direction
    print(f"{name}: up to {max(borrowed[:12])} borrowed layers in forward, {max(borrowed[12:])} in backward")
    alive[name] = [4 + count for count in borrowed]
show(
    plots.alive(alive, 8),
    "counted",
    "layers in the memory of rank 0 of two, its own four and borrowed ones, after each broadcast and operation.",
    "A line that climbs to eight layers and then nine, one between four and five, and that of replicas at eight",
)

# %% [markdown]
# With the graph all L - L/n borrowed layers pile up: this ZeRO-3 ends up with more than replicas hold. That is why
# stage 3 has to recompute or to empty the storage that the graph has saved, and why our tests ask for the *storage*
# and not for the name.
#
# **Bug 3: the decaying gradient.** The lecture never calls `zero_grad`, and reduces with an *average* into the
# owner's `.grad`. So the owner's old gradient is averaged as well, with nothing from the others: g(t) = g(t-1) / n +
# avg(t). Plain data parallelism with the same omission has g(t) = g(t-1) + avg(t). Two different wrong optimizers:

# %%
norms = {}
for ranks in (two, four):
    n = ranks.size
    for name, keep, switches in (
        ("replicas, no zero_grad", 1.0, {"clear": False, "replicas": True}),
        (f"owners, no zero_grad, n = {n}", 1 / n, {"clear": False}),
        ("right", 0.0, {}),
    ):
        found = ranks.run(lecture, x, steps=12, **switches)
        equal = follow(found, serial_toy(x, keep, steps=12))
        print(f"{n} ranks, {name}: follows its recursion: {equal}")
        norms[name] = found[0].norms
show(
    plots.lines(norms, "norm of the gradient"),
    "computed",
    "the gradients that the programs apply, on live ranks.",
    "Four lines over twelve steps: that of replicas without zero_grad lies far above the others",
)

# %% [markdown]
# **All at once**, at the lecture's size: batch 128, width 1024, four ranks, float32, no `zero_grad`, no layer 0.

# %%
losses, printed = lecture_zero3.all_at_once(four)
for name, series in (losses | printed).items():
    print(f"{name:31}", *(f"{loss:.4f}" for loss in series))
show(
    plots.lines(losses, "loss", printed),
    "computed",
    "losses of the lecture's two programs, here and from the lecture's recorded output, and of a right one.",
    "Falling lines in three groups: ZeRO-3 falls more slowly at first, replicas turn up again, the right one is lowest",
)

# %% [markdown]
# Digits differ by up to 0.0003 (the lecture's data had no seed), but over thirty seeds the first loss varies from
# 0.0120 to 0.0130: the bugs explain what the lecture recorded. Its two programs are two different optimisations, and
# neither is right.
#
# ## Which stage?
#
# Stages 1 and 2 cost no traffic; only stage 2 and accumulation do not go well together. Stage 3 sends half as much
# again, and prefetching hides the smaller one of a block's computing and the next block's gather. None of them
# touches **activations**, which depend on a rank's rows; recomputation, tensor and context parallelism do.
#
# Seen from compilers, ZeRO is a rewrite of one small graph, the update: where a sum is read by the update alone,
# *all-reduce, update everything* becomes *reduce-scatter, update a shard, all-gather*. Same bytes, one n-th of the
# state.

# %%
before, after = rewrite.UPDATE, rewrite.rewrite(rewrite.UPDATE)
costs = {"before": rewrite.account(before, 1003, 2, 0), "after": rewrite.account(after, 1003, 2, 0)}
for decay in (0.0, 0.01):
    one, other = (two.run(rewrite.twenty_updates, graph, decay)[0] for graph in (before, after))
    print(f"the same bits after 20 steps, decay {decay}:", torch.equal(one[0], other[0]))
for name, (_, *counted) in (("before", one), ("after", other)):
    exact = counted == [sum(row.sent for row in costs[name]), sum(row.state for row in costs[name])]
    print(f"{name}:", *(f"{row.op.input} -> {row.op.kind} ->" for row in costs[name]), "new weights")
    print(f"  {counted[0]:,} bytes sent, {counted[1]:,} of moments held, as accounted for: {exact}")
show(
    plots.graphs(costs),
    "counted",
    "the update of 1003 float32 weights on two ranks: bytes of each value, bytes sent, and bytes of Adam's moments.",
    "Two chains of boxes: all-reduce and update; reduce-scatter, update and all-gather, with thin arrows between them",
)

# %% [markdown]
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


# %% tags=["wrong"]
# FAIL: but 2 are enough
def shard(whole, rank, ranks):
    length = len(whole) // ranks + 1
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: shards of 3, but 2 are enough; padding costs
def shard(whole, rank, ranks):
    length = 3
    padded = torch.cat([whole, whole.new_zeros(length * ranks)])
    return padded[rank * length : (rank + 1) * length]


# %% tags=["wrong"]
# FAIL: shards joined in the order of ranks
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(length * ranks - len(whole))])
    return padded[rank::ranks]


# %% tags=["wrong"]
# FAIL: padding must be zero
def shard(whole, rank, ranks):
    length = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole[-1:].expand(length * ranks - len(whole))])
    return padded[rank * length : (rank + 1) * length]


# %% [markdown]
# **2.** Write a step of ZeRO-1 with plain gradient descent. `weights` and `gradient` are whole and flat, and divide
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


check("a step of ZeRO-1", exercises.step, zero_step)


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


# %% tags=["wrong"]
# FAIL: ZeRO reduce-scatters the gradient, steps its shard
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    return all_gather(
        (weights - rate * ranks * gradient)[rank * len(weights) // ranks :][: len(weights) // ranks]
    )


# %% tags=["wrong"]
# FAIL: all_gather wants your shard
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length] - rate * reduce_scatter(gradient)
    whole = weights.clone()
    whole[rank * length : (rank + 1) * length] = mine
    return all_gather(whole)


# %% tags=["wrong"]
# FAIL: reduce_scatter wants the whole gradient
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    own = slice(rank * length, (rank + 1) * length)
    return all_gather(weights[own] - rate * reduce_scatter(gradient[own]))


# %% tags=["wrong"]
# FAIL: weights after the step, on rank 0
def zero_step(weights, gradient, rank, ranks, rate, reduce_scatter, all_gather):
    length = len(weights) // ranks
    mine = weights[rank * length : (rank + 1) * length]
    return all_gather(mine + rate * reduce_scatter(gradient))


# %% [markdown]
# **3.** Stage 3 without recomputation. `y = x Wᵀ` is the layer, and each rank holds a `shard` of the flat, padded W of
# `shape` (out, in). Gather W for forward, let go of it, and gather it *again* for backward; what saves W for backward
# has gained nothing. Return the gradients of x and of the shard, that of W summed over the ranks. Useful:
# `comm.gather_flat(shard, axis)`, `comm.reduce_scatter_flat(whole, axis)`. Three live ranks run three such layers; the
# checker compares gradients, counts bytes, and looks for whole weights in memory.


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


# %% tags=["wrong"]
# FAIL: save the shard, and gather once more
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
# FAIL: still holds 3 whole weights
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
# FAIL: Two all-gathers and one reduce-scatter
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
# FAIL: the gradient of rank 0's shard
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
# FAIL: the gradient of rank 1's shard
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


# %% [markdown]
# **4.** How many bytes does a rank hold in the stages 0 to 3, with 2-byte weights and gradients and 12 bytes of
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


# %% tags=["wrong"]
# FAIL: weights too
def bytes_held(parameters, ranks, stage):
    return parameters * (12 / (ranks if stage else 1) + 2 / (ranks if stage > 1 else 1) + 2)


# %% tags=["wrong"]
# FAIL: optimizer state are shared
def bytes_held(parameters, ranks, stage):
    return parameters * (4 + 12 / ranks**stage) if stage != 1 else parameters * 16


# %% tags=["wrong"]
# FAIL: nothing is shared: expected 120, got 30
def bytes_held(parameters, ranks, stage):
    return 4 * parameters / (ranks if stage else 1)


# %% [markdown]
# ## Drill
#
# 1. GPT-2 XL (1.56 billion) in mixed precision on 4 ranks: which stage is the first to fit into 12 GB, activations
# apart?
# 2. Why does stage 1 send no more than data parallelism?
# 3. Stage 3 without recomputation: what must happen to the memory of a gathered weight, and when?
#
# <details><summary>Answers</summary>
#
# 1. Replicas 24.9 GB, stage 1 10.9 GB: stage 1 (K = 12 is what weighs). 2. An all-reduce already consists of the
# two halves between which the update moved. 3. The graph holds the weight, so its storage is emptied after forward and
# filled by a second gather before the block's backward.
#
# </details>
#
# ## Further reading
#
# - Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
#   (sections 5 and 7).
# - Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
# - Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training" (the
#   compiler's view).
# - Next: lesson 06 cuts the matrices themselves.
