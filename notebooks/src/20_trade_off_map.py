# %% [markdown]
# # 20 The trade-off map
#
# **The one-minute version.** Every strategy of this series buys memory with messages, or time with memory. So each is a
# point: bytes that a rank *holds*, bytes that it *sends* in a step, how many messages these are, and which operations
# are done twice. Up to 8 ranks they are counted, beyond that computed by formulas that give the same messages to the
# byte, and what is held within a quarter. From the map follows a way to decide: can backward hide the sum of the
# gradients? If not, what is cheaper, a bubble or sums inside every layer? And what buys the memory that is still
# missing?
#
# You will draw the map, find what no strategy beats, derive the one number that decides most, walk to a plan, and in
# the end write a planner that keeps up with a program that tries thousands of plans.

# %% tags=["setup"]
import json
import statistics
import tempfile
from itertools import product
from pathlib import Path

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import trade_off as exercises
from gpt2lab.lessons.labs import decisions, systems
from gpt2lab.lessons.labs import trade_off as lab
from gpt2lab.lessons.labs.decisions import Workload, decide
from gpt2lab.machine import memory as allocator
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.planner.memory import memory
from gpt2lab.planner.problem import find_cluster
from gpt2lab.plots.benchmarks import dashboard
from gpt2lab.plots.style import save_figure
from gpt2lab.plots.systems import systems_table
from gpt2lab.plots.timeline import timeline
from gpt2lab.plots.trade_off import envelopes, trade_off_map
from gpt2lab.ranks import trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.train import Recipe, Trainer

# %% tags=["setup"]
torch.set_num_threads(1)
two, eight = Ranks(2), Ranks(8)  # live ranks, started when first used

# %% [markdown]
# ## Count it
#
# Twelve strategies, each with the same model and the same batch. On every rank we count a step: what the allocator
# gave (the most at any moment), what the log of messages says, and the operations of all matrix products, with the
# formula that PyTorch has for each.

# %%
SMALL, ROWS, TOKENS = lab.SMALL, lab.ROWS, lab.TOKENS
table(
    [(name, text.format(n=8, m=16)) for name, text in lab.STRATEGIES.items()], ["strategy", "plan on 8 ranks"]
)

# %%
show_source(lab.count_step)

# %%
counted = {2: lab.count(lab.STRATEGIES, 2, SMALL, ROWS, TOKENS, two)}
for name, point in counted[2].items():
    print(
        f"{name:18} sends {point.sent:9,} bytes in {point.messages:3} messages, operations x {point.flops:.2f}"
    )

# %% [markdown]
# And four of them on eight ranks. All twelve on 4 and 8 ranks take longer: they were counted once and recorded, and a
# test counts them again.

# %%
FOUR = ("data", "ZeRO-3", "tensor", "pipeline, 1F1B")
eights, record = lab.count(FOUR, 8, SMALL, ROWS, TOKENS, eight), lab.recorded()
for name, point in eights.items():
    print(f"{name:18} sends {point.sent:9,} bytes in {point.messages:3} messages")
same = lambda a, b: (a.sent, a.messages, a.flops) == (b.sent, b.messages, b.flops)
print(
    "as recorded:",
    all(same(p, record[n][s]) for n, points in ((2, counted[2]), (8, eights)) for s, p in points.items()),
)

# %% [markdown]
# Look at the messages before the bytes. ZeRO-1 sends *exactly* what data parallelism sends, and yet holds less: the
# sum of gradients is a reduce-scatter and an all-gather in both cases, and ZeRO puts the update between them.
# A pipeline sends least by far. Only two strategies do operations twice: recomputing, and ZeRO-3, whose blocks run
# again because their weights are gone. That is this package's default: with `refill=on` it gathers them once more for
# backward instead, as PyTorch's FSDP and DeepSpeed do (lesson 05).
#
# ## Compute it
#
# Every strategy of this series came with a formula for its bytes. Added up, they need no ranks at all. First, do they
# give what was counted, for all strategies and sizes?

# %%
computed = {
    n: {name: lab.compute(name, n, SMALL, ROWS, TOKENS) for name in lab.STRATEGIES} for n in lab.RANKS
}
for n, points in (record | counted).items():
    exact = [
        (p.sent, p.messages) == (computed[n][s].sent, computed[n][s].messages) for s, p in points.items()
    ]
    apart = max(abs(computed[n][s].held / p.held - 1) for s, p in points.items())
    print(
        f"{n} ranks: bytes and messages equal in {sum(exact)} of {len(exact)}; bytes held within 25 %:",
        apart < 0.25,
    )

# %% [markdown]
# Bytes on the wire are equal to the byte; memory is not, because these formulas leave out temporary results at its
# peak (the planner of lesson 17 has them). Now the same formulas for 13 billion parameters, on 2 to 64 ranks.


# %%
def draw(ranks=64, rows=128, width=4096):
    config = GPT2Config(n_positions=1024, n_layer=64, n_head=64, n_embd=width)
    numbers = [n for n in (2, 4, 8, 16, 32, 64) if n <= ranks]
    lines = {s: [(n, lab.compute(s, n, config, rows, 1024)) for n in numbers] for s in lab.STRATEGIES}
    frame = (0.5, 2e4), (1.5, 4e4)  # the same axes wherever the sliders stand
    return trade_off_map(lines, lab.compute("data", 1, config, rows, 1024), mark=numbers[-1], frame=frame)


show(
    draw(),
    "computed",
    "a line for each strategy from 2 ranks to 64 (large mark): bytes held over bytes sent; right, messages and "
    "operations done twice. A colour is a family, a mark a strategy of it. 128 rows of 1,024 tokens, 64 layers, width "
    "4,096, float32.",
    "Pipelines far left, data and ZeRO in the middle, ZeRO-3 lowest, tensor and context parallelism on the right",
)

# %% [markdown]
# Data parallelism sends so many messages because its buckets hold 1 MiB: here every matrix is larger and goes alone,
# where ZeRO sends a block at a time.

# %%
guess = predict(
    "When the batch grows, which lines stand still?", "data, ZeRO", "tensor, context", "pipeline", "none"
)


# %%
wide = GPT2Config(n_positions=1024, n_layer=64, n_head=64, n_embd=4096)
sends = ([lab.compute(s, 64, wide, rows, 1024).sent for s in lab.STRATEGIES] for rows in (128, 512))
still = [s for s, few, many in zip(lab.STRATEGIES, *sends, strict=True) if few == many]
guess.beside(", ".join(dict.fromkeys(s.split(",")[0].split("-")[0] for s in still)), "computed")
explore(
    draw,
    "computed",
    "{ranks} ranks (large marks), {rows} rows of 1,024 tokens, width {width}; all maps here share their axes.",
    "The trade-off map for {ranks} ranks, {rows} rows and width {width}",
    posters=[{"ranks": 64, "rows": 512}, {"ranks": 64, "width": 1024}],
    ranks=[16, 4, 8, 32, 64],
    rows=(128, 512, 128),
    width=[4096, 1024, 2048, 8192],
)

# %% [markdown]
# Gradients do not grow with the batch, activations do: data, ZeRO stand still, tensor, context and pipeline go right.
# With the width all go right, data and ZeRO faster: weights grow with its square, activations with itself.
#
# ## What would you trade?
#
# Nobody should use a strategy that holds more *and* sends more than another one. What is left is the *Pareto front*.


# %% tags=["exercise"]
def unbeaten(points):
    """Names of the strategies that none beats; points[name] is (bytes held, bytes sent).

    One beats another if it is at least as good in both and better in one.
    """
    ### BEGIN SOLUTION
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b
    return [name for name, p in points.items() if not any(beats(q, p) for q in points.values())]
    ### END SOLUTION


check("unbeaten", exercises.unbeaten, unbeaten)


# %% tags=["wrong"]
# FAIL: pipeline has least of one thing, so nothing beats it, and you leave it out
# MISTAKE: The smallest sum is taken for the only good point.
def unbeaten(points):
    return [min(points, key=lambda name: sum(points[name]))]


# %% tags=["wrong"]
# FAIL: ['a', 'b'] is at least as good as c in both and better in one
# MISTAKE: To beat is taken to mean better in both.
def unbeaten(points):
    beats = lambda a, b: a[0] < b[0] and a[1] < b[1]
    return [name for name, p in points.items() if not any(beats(q, p) for q in points.values())]


# %% tags=["wrong"]
# FAIL: a is as good as ['b'] in both. Equal points do not beat each other
# MISTAKE: Of two equal points each is taken to beat the other.
def unbeaten(points):
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1]
    return [n for n, p in points.items() if not any(beats(q, p) for m, q in points.items() if m != n)]


# %% tags=["wrong"]
# FAIL: Nothing is better than b in both, and you leave it out
# MISTAKE: Only the two ends of the front are found.
def unbeaten(points):
    least = [min(p[i] for p in points.values()) for i in (0, 1)]
    best = [min((p for p in points.values() if p[i] == least[i]), key=sum) for i in (0, 1)]
    return [name for name, p in points.items() if p in best]


# %% tags=["wrong"]
# FAIL: Return names of strategies, got [(20, 15), (50, 1)]
# MISTAKE: Points are returned, not names.
def unbeaten(points):
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b
    return [p for p in points.values() if not any(beats(q, p) for q in points.values())]


# %%
for n, points in computed.items():
    front = {s: (p.held, p.sent) for s, p in points.items()}
    better = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b
    kept = [s for s, p in front.items() if not any(better(q, p) for q in front.values())]
    print(f"{n} ranks, the small model: {'; '.join(kept)}")

# %% [markdown]
# Tensor parallelism is never on this front, and still most very large models use it. So two numbers are not enough:
# *when* bytes travel counts (can anything hide them?), and over *which wire*. Time decides.
#
# ## The number that decides most
#
# Data parallelism sums P gradients with a ring: 2 P numbers a rank, however large the batch. Backward computes 4 P
# operations for each token. So whether backward hides the sum depends on the tokens of a device alone, not on the
# model. How many must it have?


# %% tags=["exercise"]
def tokens_to_hide(rate, bandwidth, itemsize):
    """Tokens a device needs so that backward takes as long as the ring's sum of all gradients, many ranks.

    `rate` in operations a second, `bandwidth` in bytes a second, `itemsize` bytes a number.
    """
    ### BEGIN SOLUTION
    return (2 * itemsize / bandwidth) / (4 / rate)
    ### END SOLUTION


check("tokens to hide", exercises.tokens, tokens_to_hide)


# %% tags=["wrong"]
# FAIL: The forward is over before there is a gradient: only the backward, 4 P a token, can hide it
# MISTAKE: The forward is counted too, when there is no gradient to send yet.
def tokens_to_hide(rate, bandwidth, itemsize):
    return (2 * itemsize / bandwidth) / (6 / rate)


# %% tags=["wrong"]
# FAIL: A ring sends every gradient twice: once to sum it, once to share the sum
# MISTAKE: A ring is taken to send each gradient once: the way back is forgotten.
def tokens_to_hide(rate, bandwidth, itemsize):
    return (itemsize / bandwidth) / (4 / rate)


# %% tags=["wrong"]
# FAIL: Bandwidth is in bytes a second, so count bytes, not numbers
# MISTAKE: Numbers are counted, not bytes.
def tokens_to_hide(rate, bandwidth, itemsize):
    return (2 / bandwidth) / (4 / rate)


# %% tags=["wrong"]
# FAIL: Backward is two products for each of forward's: 4 P operations a token
# MISTAKE: Backward is taken to cost as much as forward, not twice as much.
def tokens_to_hide(rate, bandwidth, itemsize):
    return (2 * itemsize / bandwidth) / (2 / rate)


# %% tags=["wrong"]
# FAIL: expected 100, got 0.01
# MISTAKE: The fraction is upside down.
def tokens_to_hide(rate, bandwidth, itemsize):
    return (4 / rate) / (2 * itemsize / bandwidth)


# %%
rows = []
for name in ("h100x64", "a100x64", "v100x64"):
    device, network = find_cluster(name).device, find_cluster(name).network
    inside, card = network.inside.bandwidth, network.between.bandwidth
    wires = inside, min(inside, network.node * card), card
    rows.append((name, *(f"{2 * device.rate / (2 * wire):,.0f}" for wire in wires)))
table(
    rows,
    [
        "cluster",
        "tokens a device: ring in a machine",
        "over whole machines",
        "over one device of each machine",
    ],
)

# %% [markdown]
# (Computed, 16-bit gradients, rates as `planner/problem.py` states them.) A ring over whole machines has all their
# cards: on H100s and A100s its sum hides behind a thousand tokens or so. With tensor parallelism inside, a ring has one
# card in each machine, but also an eighth of the gradients, and each device an eighth of the work for a token: the same
# bytes leave a machine. On V100s with 25 Gbit/s a machine it takes 23,600<!--above--> tokens, more than most batches
# give a device. Which axis should cross there?

# %%
SEVEN = GPT2Config(n_positions=2048, n_layer=32, n_head=32, n_embd=4096)
ACROSS = {"replicas": "dp=64,zero=2", "stages": "pp=8,dp=8,micro=8,schedule=zb_v,zero=1"}
for name in ("h100x64", "a100x64", "v100x64"):
    job = Workload(SEVEN, find_cluster(name), rows=64, length=2048)
    seconds = {what: f"{job.seconds(Plan.parse(text)):.2f} s" for what, text in ACROSS.items()}
    print(name, "8 machines, 7 billion parameters, 64 rows; between machines:", seconds)

# %% [markdown]
# So with fast cards do without stages where memory permits: a sum hides behind backward, a bubble does not. Where there
# are stages, most programs (Megatron-LM, DeepSpeed, this one) put *tensor parallelism inside a machine, replicas next,
# stages outermost*, because a border sends least. Llama 3 puts replicas outermost: with ZeRO they can wait best.
#
# ## The decision path
#
# Four costs, each against the computing time, on the back of an envelope:
#
# 1. *Gradients*, over the cards that a ring has: without stages, what backward (two thirds of the computing) does not
#    hide; with stages all of it. Too slow? Then one machine may do it.
# 2. *Tensor parallelism*: 8 (t - 1) / t numbers a token and channel in each layer; nothing hides them. The wider the
#    model, the less they matter: a share of 8 (t - 1) e F / (72 C W), e bytes a number, F operations, W bytes a second.
# 3. *Bubble*: (p - 1) / 3m, where ZB-H1 fills it with weight gradients ([lesson 08](08_schedules.ipynb)), less with
#    ZB-V, which the path takes; all wait for the last stage, whose head weighs V / 12 C layers, and for 2 (p - 1 + m)
#    messages.
# 4. *Launches*: small micro-batches leave a device waiting for its own program.
#
# First the cheapest shape; then memory for it, in the order of its price: ZeRO's shards (no byte more), smaller
# micro-batches (launches; without stages also a sum after the last of them, which nothing hides), computing twice (a
# third). Where nothing helps, or the next shape has become cheaper, the next shape.

# %%
show_source(decisions.memory_ladder)

# %%
case = Workload(SEVEN, find_cluster("h100x64"), rows=32, length=2048)
plan, passed = decide(case)
show(
    envelopes(decisions.mesh_shapes(case)[:8], (plan.pp, plan.dp, plan.tp)),
    "computed",
    f"7 billion parameters on 64 H100, 32 rows of 2,048 tokens: the eight cheapest shapes; the path ends at {plan}. "
    "(A small batch: real runs have millions of tokens, and their costs are smaller.)",
    "Stacked bars for eight shapes; those with much tensor parallelism have small bubbles and large tensor sums",
)

# %% [markdown]
# Is a path that fits on an envelope any good? `gpt2lab plan` looks at thousands of plans for each case, by prediction.
# What it chooses for two models, three clusters and two batches is recorded (a test chooses again):

# %%
choices, rows = decisions.recorded(), []
for name, one in decisions.GRID.items():
    mine = decide(one)[0]
    rows.append((name, str(mine), str(choices[name]), one.seconds(mine) / one.seconds(choices[name])))
table(
    [(name, *(text.replace(",", ", ") for text in plans), f"{ratio:.2f}") for name, *plans, ratio in rows],
    ["case", "the path", "gpt2lab plan", "seconds, ratio"],
)
ratios = [ratio for *_, ratio in rows]
print(
    f"median {statistics.median(ratios):.2f}, within 10 %: {sum(r <= 1.1 for r in ratios)} of {len(ratios)}"
)
alike = sum(Plan.parse(one).axes == Plan.parse(other).axes for _, one, other, _ in rows)
print(f"same mesh: {alike} of {len(rows)}, worst {max(ratios):.2f}")

# %% [markdown]
# Where the path loses more than a tenth, at worst a factor of 1.29<!--above-->, it is because it knows no HSDP, and
# only all machines or one. On H100s with few rows HSDP wins: it gathers weights while forward and backward compute,
# where ZeRO-2 sends all of them after the update, when nothing hides it. For the small model on V100s four machines
# would be best.
#
# ## Who did it first
#
# The systems of this series, by the models that they are best for, and the techniques that they use. A blue mark is a
# plan of this package that a test compares with serial; a grey one a place in a paper, named in
# `lessons/labs/systems.toml`.

# %%
data = systems.registry()
show(
    systems_table(systems.systems(), data["techniques"], data["models"]),
    "from a paper",
    "systems with the year of their paper, by techniques; grey: said in that paper; blue: tested here.",
    "A table of dots: 13 techniques, systems in five groups by kind of model, and this package in each group",
)

# %% [markdown]
# ### PyTorch's own beside ours
#
# At work you will write `DistributedDataParallel` and `fully_shard`. Both average over ranks where this package sums,
# hence the factor. Three steps of each, in float64, with plain SGD, since AdamW would hide a wrong factor (lesson 04):


# %%
def beside_torch(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch, mesh, found = example_batch(SMALL, ROWS, TOKENS), init_device_mesh("cpu", (world_size,)), {}
    for text, name in (("dp=2", "DistributedDataParallel"), ("dp=2,zero=3", "fully_shard")):
        plan, model = Plan.parse(text), GPT2(SMALL).double()
        ours = Trainer(build(plan, SMALL, Mesh(**plan.axes), torch.float64), PLAIN)
        for block in model.h.values() if plan.zero else ():
            fully_shard(block, mesh=mesh)
        theirs = fully_shard(model, mesh=mesh) if plan.zero else DistributedDataParallel(model)
        sgd, mine = torch.optim.SGD(theirs.parameters(), PLAIN.lr), batch.rows(rank, world_size)
        for _ in range(3):
            ours.step(batch)
            sgd.zero_grad()
            (world_size * model.loss(theirs(mine.tokens), mine.targets) / batch.total).backward()
            sgd.step()
        weights = {n: p.full_tensor() if plan.zero else p for n, p in model.named_parameters()}
        found[name] = all((w - weights[n]).abs().max() < 1e-12 for n, w in ours.parallel.weights().items())
    return found


PLAIN = Recipe("sgd", lr=0.1, weight_decay=0.0, clip=None)
for name, equal in two.run(beside_torch)[0].items():
    print(f"{name:24} and ours have the same weights after three steps: {equal}")

# %% [markdown]
# ## Look inside: three traces of one step
#
# Numbers that you cannot explain need a trace. Ours records spans, rank by rank, on one clock. Each span is also a
# range in PyTorch's profiler, so operations show up *inside* it.


# %%
def profiled(rank, world_size):
    plan = Plan.parse("pp=2,micro=3")
    trainer = Trainer(build(plan, SMALL, Mesh(**plan.axes)))
    batch = example_batch(SMALL, 6, TOKENS)
    trace.clear()
    with allocator.profiled() as profile:
        trainer.step(batch)
    spans = trace.spans()
    own = {s.name for s in spans if s.lane == "work"}
    inside = {e.cpu_parent.name for e in profile.events() if e.name == "aten::linear" and e.cpu_parent}
    return spans, sorted(own), sorted(own & {e.name for e in profile.events()}), sorted(inside & own)


found = two.run(profiled)
for rank, (_, own, theirs, inside) in enumerate(found):
    print(
        f"rank {rank}: {len(own)} kinds of span, {len(theirs)} seen by the profiler; products inside", *inside
    )

# %% tags=["measured"]
show(
    timeline(trace.merge(spans for spans, *_ in found), clock="measured"),
    "measured",
    "our spans of one step of pp=2, three micro-batches, under PyTorch's profiler (which slows it); `wait 0I2`: stage "
    "0 waits for what it needs for the backward of micro-batch 2 (I: input gradient, F: forward). Thin: a call in "
    "progress, waiting included.",
    "Two rows of bars for each of two ranks: forwards, backwards, waiting and messages",
)

# %% [markdown]
# - *Our trace*: `trace.save_chrome(trace.merge(...), "step.json")`, opened in ui.perfetto.dev, has spans and messages
#   of all ranks.
# - *PyTorch's profiler*: `export_chrome_trace` makes a file for Perfetto too, with every operation below our spans.
# - *Nsight Systems*: run the step inside of `torch.autograd.profiler.emit_nvtx()` under `nsys profile -t cuda,nvtx`,
#   and our spans are NVTX ranges above the GPU's kernels.
#
# ## Time everything again
#
# `gpt2lab bench --all --quick` runs every benchmark of the package in rounds, in under ten minutes: one JSON with the
# machine's fingerprint, one figure. After a change run it again, and let `gpt2lab bench --compare before.json
# after.json` say what really changed: a number counts only if *all* its new samples lie on one side of *all* the old,
# and the medians are 5 % apart or more.

# %%
from gpt2lab.benchmarks import everything

before = [1.00, 1.04, 1.02, 1.01, 1.03]
for after in ([0.90, 0.93, 0.91, 0.92, 0.90], [0.90, 0.93, 1.01, 0.92, 0.90], [1.05, 1.06, 1.05, 1.07, 1.05]):
    print(after, everything.verdict(before, after))
print(
    f"by chance alone: {everything.chance(5, 5):.4f} of all numbers; with three rounds {everything.chance(3, 3):.1f}"
)

# %% [markdown]
# The second one is faster on average, and nobody can say whether it is faster. Now one of the benchmarks for real, one
# round of it, as `--all` does with each:

# %%
with tempfile.TemporaryDirectory() as folder:
    report = everything.collect(Path(folder), rounds=1, chosen=["transport"])
    Path(folder, "all.json").write_text(json.dumps(report))
    again = everything.read_report(str(Path(folder, "all.json")))
    save_figure(dashboard(again), Path(folder, "all.png"))
    written = sorted(file.name for file in Path(folder).iterdir())
print("benchmarks:", *sorted(everything.RACES))
print(
    f"numbers of transport: {len(again['seconds']['transport'])}, failed: {len(again['failed'])}; written:",
    *written,
)

# %% [markdown]
# The JSON names the machine, so that nobody compares two machines unawares.
#
# ## Where the sources are
#
# The wiki of BSC's port, which began this series, page by page:
#
# | page of the wiki | lesson |
# |:--|:--|
# | Distributed Model | 04 data parallel, 10 sequence splitting |
# | Fork Join Model | 13 threads and tasks |
# | Task Based Model | 13 threads and tasks |
# | Runtime and performances | 02 hardware and timing, 13 threads and tasks |
# | Metrics | 02 hardware and timing |
# | GPT2 Parallelization and porting | 01 GPT-2, 02 hardware and timing, 13 threads and tasks, 20 the trade-off map |
# | Various informations | 10 sequence splitting, 04 data parallel |
#
# ## Capstone: a planner of your own
#
# Three jobs: a model, a cluster, a batch. For each return a plan that fits into its devices and takes at most 10 %
# longer (by prediction) than the plan that `gpt2lab plan` chooses. Then yours runs, scaled down, on live ranks, and
# must equal serial GPT-2: no stale gradients. `case.fits(plan)` says whether ranks hold it, `case.seconds(plan)`
# predicts a step; what to try, in 100 seconds, is yours. Two more jobs, which you do not see, are judged in the same
# way. The score is the worst of the five.

# %% tags=["setup"]
for name, job in decisions.CAPSTONE.items():
    print(
        f"{name}: {job.config.parameters / 1e9:.1f} billion parameters, {job.cluster.devices} devices of ",
        end="",
    )
    print(f"{job.cluster.device.memory / 1e9:.0f} GB, {job.rows} rows of {job.length} tokens")


# %% tags=["exercise"]
def plan_for(case):
    """A plan, or its text, for the case's .config, .cluster, .rows and .length; see case.fits and case.seconds."""
    ### BEGIN SOLUTION
    n, found = case.cluster.devices, []
    for tp, pp in product((1, 2, 4, 8), (1, 2)):
        for micro, zero in product({1, 4 * pp}, (0, 2)):
            schedule = "zb_v" if pp > 1 else "1f1b"
            mesh = {"pp": pp, "tp": tp, "dp": max(1, n // (tp * pp)), "sp": tp > 1}
            plan = Plan(**mesh, micro=micro, zero=zero, schedule=schedule)
            if plan.world <= n and case.fits(plan):
                found.append((case.seconds(plan), str(plan)))
    return min(found)[1]
    ### END SOLUTION


check("a planner", exercises.capstone, plan_for)


# %% tags=["wrong"]
# FAIL: GB on a device of 16 GB
# MISTAKE: Pure data parallelism, whether it fits or not.
def plan_for(case):
    return f"dp={case.cluster.devices}"


# %% tags=["wrong"]
# FAIL: times as long as
# MISTAKE: One recipe for every job, whatever the links are.
def plan_for(case):
    return f"dp={case.cluster.devices // 8},tp=8,sp=on"


# %% tags=["wrong"]
# FAIL: attention heads cannot be split over tp=3
# MISTAKE: A number of ranks that does not divide the heads.
def plan_for(case):
    return f"dp={case.cluster.devices // 3},tp=3"


# %% tags=["wrong"]
# FAIL: without a flush gradients are stale
# MISTAKE: A schedule that uses stale gradients, which the job does not allow.
def plan_for(case):
    return f"dp={case.cluster.devices // 2},pp=2,micro=4,schedule=2bw"


# %% tags=["wrong"]
# FAIL: needs 32 devices, and there are 16
# MISTAKE: More ranks than there are devices.
def plan_for(case):
    return f"dp={2 * case.cluster.devices}"


# %% tags=["wrong"]
# FAIL: as long as dp=16,zero=3,refill=true,loss=chunked
# MISTAKE: The answer to the first job, written down and not searched for.
def plan_for(case):
    return (
        "pp=2,dp=8,micro=8,zero=1,schedule=zb_v"  # right for the first job, and written down instead of found
    )


# %% tags=["wrong"]
# FAIL: It leaves 8 devices idle
# MISTAKE: The second recipe that was written down leaves half of the devices idle.
def plan_for(case):
    return "pp=2,dp=4,micro=16,zero=2"


# %% tags=["wrong"]
# FAIL: return a plan, got
# MISTAKE: Returns what the plan costs, not the plan.
def plan_for(case):
    return memory(Plan(), case.config, case.rows, case.length)


# %% tags=["wrong"]
# FAIL: decisions.recorded knows the answer
# MISTAKE: The recorded answers are looked up instead of a plan being chosen.
def plan_for(case):
    known = decisions.recorded()  # what the checker compares with, looked up
    return next(known[name] for name, job in decisions.CAPSTONE.items() if job.config == case.config)


# %% tags=["wrong"]
# FAIL: one of two H100 machines: dp=16,zero=2,loss=chunked needs 16 devices
# MISTAKE: A plan for each of the jobs is written down, and another job is none of them.
def plan_for(case):
    known = {
        "two V100 machines": "pp=2,dp=8,micro=8,zero=1,schedule=zb_v",
        "two H100 machines": "dp=16,zero=2,loss=chunked",
        "two A100 machines, few rows": "dp=16,zero=2",
    }
    return next(known[name] for name, job in decisions.CAPSTONE.items() if job.config == case.config)


# %%
two.close()
eight.close()

# %% [markdown]
# ## Drill
#
# 1. ZeRO-1 and data parallelism send the same bytes. Why is data parallelism ever used?
#    <details><summary>answer</summary>Only where memory is no question and simplicity counts: the state is replicated
#    for nothing. ZeRO-1 also needs two calls a part instead of one.</details>
# 2. You double the batch. Which strategies send more?
#    <details><summary>answer</summary>Those that send activations: tensor, sequence, context, pipeline, experts. Data
#    parallelism and ZeRO send weights and gradients.</details>
# 3. Why does the number of tokens that hides the gradients not depend on the model?
#    <details><summary>answer</summary>Bytes and operations both grow with P, so P cancels.</details>
# 4. A pipeline sends least. Why not use 64 stages?
#    <details><summary>answer</summary>The bubble (p - 1) / m needs hundreds of micro-batches, launches grow with them,
#    and there may not be so many layers.</details>
# 5. Where does tensor parallelism go, where the pipeline, where the replicas?
#    <details><summary>answer</summary>Tensor parallelism on the fastest links, since nothing hides it; replicas next;
#    stages outermost, since a border sends least. Without stages, replicas outermost: backward hides their
#    sums.</details>
# 6. After a change a benchmark's median is 8 % lower, and one of five samples is as before. What do you report?
#    <details><summary>answer</summary>Nothing yet: within the spread. Run more rounds on a quieter machine.</details>
#
# ## Read on
#
# - Zhang, Zheng, Li & Stoica, ICML 2022 tutorial *Big Model*: the table of systems that this lesson rebuilds.
# - Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters*, section 3: the same envelope
#   for three axes, with measurements.
# - Zhao et al. 2023, *PyTorch FSDP*: what sharding costs when it is done well.
# - Biderman et al. 2022, *GPT-NeoX-20B*: choices of a real run, with reasons.
# - Austin et al. 2025, *How to scale your model*: thresholds as in this lesson, for TPUs.
# - NVIDIA 2025, *NCCL user guide*: what a collective really does on your wires.
#
# **Next**: your own model.
