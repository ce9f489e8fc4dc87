# %% [markdown]
# # 16 Placement and balance
#
# **The one-minute version.** So far you chose who computes what. Now a program shall choose. A model is a graph of
# operators, a machine is a set of devices with links, and a *placement* colours the graph: one colour, one
# device. How fast a placement is, a simulator says; which one is best, is an NP-hard question. Two bounds tell how
# much can still be gained: the *critical path*, which no number of devices shortens, and the *load*, shared out evenly.
# GPT-2's graph is nearly a chain, so placing its operators gains little, and what matters instead is *balance*:
# cutting the chain into stages of equal time. For that a few lines of dynamic programming find the optimum.
#
# You will find a critical path, write that program, watch a policy learn placements, and beat the obvious cut of GPT-2
# on live ranks, with layer times that you measured.

# %% tags=["setup"]
from functools import cache
from itertools import pairwise, permutations

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import placement as exercises
from gpt2lab.lessons.labs import placement as lab
from gpt2lab.machine.links import Link, Network
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.planner import balance
from gpt2lab.planner.balance import ChainStage, best_cut, equal_count, every_cut, every_replicated, slowest
from gpt2lab.planner.events import pipeline_jobs, simulate_jobs
from gpt2lab.planner.graph_stages import piper, stage_options, stages_by_ilp
from gpt2lab.planner.placement import Placing, branch_and_bound, exhaustive_placement, list_schedule
from gpt2lab.planner.problem import Cluster, Device, gpt2_block, gpt2_layers
from gpt2lab.planner.reinforce import reinforce
from gpt2lab.plots import placement as plots
from gpt2lab.schedules import make

# %% tags=["setup"]
torch.set_num_threads(1)
two, three = Ranks(2), Ranks(3)  # live ranks, started when first used

# %% [markdown]
# ## A graph, and devices
#
# One block of GPT-2, as the graph that a placer sees: 11 operators and the input x, which is placed too; an edge
# carries a result of (B, T, C), the MLP's inner one of (B, T, 4 C). An operator of f operations takes launch + f / rate
# seconds, because small products run below the full rate (lesson 02), and a message α + S β (lesson 03). Both are
# lines, so the same fit finds them. Here is the processor that built this page, from square matrix products:

# %% tags=["measured"]
fitted, products = lab.measured_device()
print(f"launch {1e6 * fitted.launch:.1f} us, rate {fitted.rate / 1e9:.0f} GFLOP/s")
table(
    [
        (n, 1e6 * t, 1e6 * fitted.time(2 * n**3), 100 * 2 * n**3 / t / fitted.rate)
        for n, t in products.items()
    ],
    ["size", "measured, us", "fitted, us", "% of the fitted rate"],
)

# %% [markdown]
# From here on the numbers are round ones of a laptop, so that everybody sees the same.

# %%
config = PRESETS["mini"]
device = Device(rate=50e9, launch=20e-6)
laptop = Cluster(3, device, Network(Link(50e-6, 800e6)))
block = Placing(gpt2_block(config, rows=8, length=128), laptop)
names = [op.name for op in block.graph.operators]
table(
    [(op.name, op.flops / 1e6, op.output / 2**20, op.weights / 2**20) for op in block.graph.operators],
    ["operator", "million operations", "MiB of its result", "MiB of weights"],
)

# %%
seconds, path = block.critical_path()
alone = [0] * len(block.graph)
longest = block.simulate(alone)
show(
    plots.placed(block.graph, alone, longest, path, "one device; thick: the critical path"),
    "simulated",
    "one block of GPT-2 forward, all of it on device 0.",
    "A graph of x and 11 operators, a chain except for q, k and v; below, one row of bars without gaps",
)
print("critical path:", " ".join(names[n] for n in path))

# %% [markdown]
# No placement is faster than this path, and none faster than all work shared out evenly over the devices:

# %%
work, load = sum(block.times), block.load()
print(
    f"all work {1e3 * work:.1f} ms, critical path {1e3 * seconds:.1f} ms, a third of the work {1e3 * load:.1f} ms"
)

# %% [markdown]
# Fifteen percent. That is *all* that any number of devices could gain here: only q, k and v are branches, everything
# else waits for what is before it. The critical path is the first thing to compute of any graph; now compute it.


# %% tags=["exercise"]
def critical_path(times, edges):
    """(seconds, [operators]) of the longest path; edges (u, v) with u < v, times[n] of operator n."""
    ### BEGIN SOLUTION
    best = {}
    for n in reversed(range(len(times))):
        after = [best[v] for u, v in edges if u == n]
        length, path = max(after, default=(0, []))
        best[n] = (length + times[n], [n, *path])
    return max(best.values())
    ### END SOLUTION


check("critical path", exercises.critical_path, critical_path)


# %% tags=["wrong"]
# FAIL: a graph of 43 operators takes more than
# MISTAKE: Every path is followed to its end: right, and their number doubles with each branch.
def critical_path(times, edges):
    def on(n):
        return [[n, *rest] for u, v in edges if u == n for rest in on(v)] or [[n]]

    path = max(
        (path for n in range(len(times)) for path in on(n)), key=lambda path: sum(times[n] for n in path)
    )
    return sum(times[n] for n in path), path


# %% tags=["wrong"]
# FAIL: [0, 1] has the most operators, but [2, 3] takes longer: 10 against 2
# MISTAKE: The longest path is taken to begin at operator 0.
def critical_path(times, edges):
    best = {}
    for n in reversed(range(len(times))):
        length, path = max((best[v] for u, v in edges if u == n), default=(0, []))
        best[n] = (length + times[n], [n, *path])
    return best[0]


# %% [markdown] tags=["hint"]
# Go through the operators from the last to the first: the longest path that begins at n is its own time and the
# longest of those that begin at an operator after it.


# %% tags=["wrong"]
# FAIL: 12 is all work. Operators that do not wait for each other can run at the same time
# MISTAKE: All work is added, as if one device did it.
def critical_path(times, edges):
    return sum(times), [0]


# %% tags=["wrong"]
# FAIL: [0, 2, 3, 4, 5] has the most operators, but [0, 1, 5] takes longer: 14 against 8
# MISTAKE: The path with the most operators is taken for the longest.
def critical_path(times, edges):
    best = {}
    for n in reversed(range(len(times))):
        after = [best[v] for u, v in edges if u == n]
        best[n] = [n, *max(after, key=len, default=[])]
    path = max(best.values(), key=len)
    return sum(times[n] for n in path), path


# %% tags=["wrong"]
# FAIL: [1, 5] takes 12, but [0, 1, 5] takes 14. Look at all paths
# MISTAKE: Greedy: from the longest operator on, always the longest next one.
def critical_path(times, edges):
    n = max(range(len(times)), key=lambda n: times[n])
    path = [n]
    while after := [v for u, v in edges if u == path[-1]]:
        path.append(max(after, key=lambda v: times[v]))
    return sum(times[n] for n in path), path


# %% tags=["wrong"]
# FAIL: return two things
# MISTAKE: Only the seconds are returned, without the path.
def critical_path(times, edges):
    best = {}
    for n in reversed(range(len(times))):
        best[n] = times[n] + max((best[v] for u, v in edges if u == n), default=0)
    return max(best.values())


# %% tags=["wrong"]
# FAIL: Your path goes from 0 to 3, but no edge does
# MISTAKE: The first and the last operator, whether an edge joins them or not.
def critical_path(times, edges):
    path = [0, len(times) - 1]
    return sum(times[n] for n in path), path


# %% tags=["wrong"]
# FAIL: Graphs of more than ten operators are asked for as well
# MISTAKE: Graphs of more than ten operators are given up.
def critical_path(times, edges):
    best = {}
    for n in reversed(range(len(times))):
        length, path = max([best[v] for u, v in edges if u == n], default=(0, []))
        best[n] = (length + times[n], [n, *path])
    return max(best.values()) if len(times) < 11 else (times[0], [0])


# %% tags=["wrong"]
# FAIL: expected 15, got 11 (a drawn case
# MISTAKE: Each edge is looked at once, in the order in which edges are given.
def critical_path(times, edges):
    best = {n: (t, [n]) for n, t in enumerate(times)}
    for u, v in edges:
        best[v] = max(best[v], (best[u][0] + times[v], [*best[u][1], v]))
    return max(best.values())


# %% [markdown]
# ## Colour it
#
# Three ways to colour. **Brute force** times all $D^n$ placements. **List scheduling** is greedy: operators in the
# order of their longest remaining path, each to the device where it ends first (HEFT, Topcuoglu et al. 2002).
# **Branch and bound** walks through the placements operator by operator, and gives a part up wherever a lower bound
# says that it cannot beat the best placement so far: when the part ends, plus the longest way from there.
#
# Brute force takes 59,049 simulations for ten of them on three devices; on two devices it is 1,024. The *parallel
# block* of GPT-J has ten, with x: its MLP reads what attention reads, so both can run at the same time.

# %%
pair = Cluster(2, device, laptop.network)
beside = Placing(gpt2_block(config, 8, 128, parallel=True), pair)
found = {
    "brute force": exhaustive_placement(beside),
    "branch and bound": branch_and_bound(beside),
    "list scheduling": list_schedule(beside),
}
rows = [(name, 1e3 * p.seconds, p.timed, " ".join(map(str, p.where))) for name, p in found.items()]
table(rows, ["parallel block, 2 devices", "ms", "simulated", "device of each operator"])
least, bounded = (found[name].seconds for name in ("brute force", "branch and bound"))
print(
    f"equal: {least == bounded}; no placement beats the bound: {least >= beside.lower_bound() * (1 - 1e-9)}"
)

# %%
best = found["branch and bound"].where
run, way = beside.simulate(best), beside.critical_path()[1]
show(
    plots.placed(beside.graph, best, run, way, "the parallel block", length=longest.makespan),
    "simulated",
    "attention and MLP beside each other: the critical path is reached; device 1 waits for more than a third of it.",
    "A graph with two branches in two colours, and two rows of bars with gaps in the second",
)
used = sum(run.busy(d) for d in range(2)) / (2 * run.makespan)
print(
    f"{sum(beside.times) / run.makespan:.2f} times as fast as one device, {100 * used:.0f} % of both devices used"
)

# %% [markdown]
# And GPT-2's own block, on three devices?

# %%
optimum, greedy = branch_and_bound(block), list_schedule(block)
run = block.simulate(optimum.where)
show(
    plots.placed(
        block.graph, optimum.where, run, path, "GPT-2's block, placed best", length=longest.makespan
    ),
    "simulated",
    "the best of 531,441 placements of a block on three devices: q, k or v elsewhere is all that pays.",
    "The same graph with one operator, k, in a second colour, and a row that is nearly empty",
)
used = sum(run.busy(d) for d in range(3)) / (3 * run.makespan)
print(f"{work / run.makespan:.2f} times as fast as one device, {100 * used:.0f} % of three devices used")
print(f"list scheduling: {work / greedy.seconds:.3f} times, devices", *greedy.where)

# %% [markdown]
# List scheduling gains nearly nothing: it sends the input of k *and* v away, counts each message as if it were alone,
# and both leave by the one port of device 0. Branch and bound moves only one of them.
#
# The ICML 2022 tutorial *Big Model* says the same of placing branches: it works for nets that have branches, and even
# then the devices are poorly used. And it is real: below every operator runs on the rank where it was placed, forward
# and backward, and a result is sent once to each rank that reads it. The lines that matter:

# %%
show_source(lab.PlacedBlock.forward)


# %%
def bytes_of_placement(graph, where):
    """Bytes that every rank sends: a result, or its gradient, once for each other rank that reads it."""
    sent = [0] * (max(where) + 1)
    for n, op in enumerate(graph.operators):
        for reader in {where[v] for v in graph.after[n]} - {where[n]}:
            sent[where[n]] += op.output
            sent[reader] += op.output
    return sent


X = torch.randn(3, 7, config.n_embd, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
cases = {"q, k, v on ranks 0, 1, 2": ((0, 0, 0, 1, 2, *[0] * 7), 1, False)}
cases["attention 0, MLP 1"] = ((0, 0, 0, 0, 0, 0, 0, 1, 1, 2), 1, True)
cases["heads in two groups"] = ((0, 0, *[1] * 4, *[2] * 4, *[0] * 4, 2, 0)[:16], 2, False)
for name, (where, groups, parallel) in cases.items():
    answers = three.run(lab.run_placed, where, config, X, groups, parallel)
    error = lab.furthest(answers, lab.run_serially(config, X, parallel))
    graph = gpt2_block(config, 3, 7, groups, parallel, itemsize=8)
    sent = [a[3] for a in answers]
    print(f"{name}: equal to the serial block: {error < 1e-10}; bytes {sent},", end=" ")
    print("as predicted:", sent == bytes_of_placement(graph, where))

# %% [markdown]
# ## Learn it
#
# What if the search does not know a bound, only how long a placement took? Mirhoseini et al. (2017) let a policy
# draw placements and reward the fast ones. Theirs is a recurrent network; here it is a table of logits, whose softmax
# gives each of them its chances on 3 devices. *REINFORCE with a baseline* updates it after every 16 draws:
#
# `logits += rate * mean((reward - baseline) * (chosen - chances))`
#
# A reward is minus the time of a draw (in units of one device's time), the baseline its recent average, `chosen` is 1
# at the device that was drawn. So a draw better than the average becomes likelier.

# %%
guess = predict("How many of four seeds find the best of 531,441 placements in 1,600 draws?", 0, 1, 2, 3, 4)

# %%
learned = reinforce(block, seed=0)
show(
    plots.learning(learned, optimum.seconds, greedy.seconds),
    "simulated",
    "a policy learns to place GPT-2's block on three devices; branch and bound needs only "
    f"{optimum.timed} simulations for the dashed line.",
    "Two falling curves: the best draw drops to the dashed line of the optimum, the mean stays at list scheduling",
)

# %%
print(f"optimum {1e3 * optimum.seconds:.2f} ms, list scheduling {1e3 * greedy.seconds:.2f} ms")
found = [reinforce(block, seed=seed).best.seconds for seed in range(4)]
print(*(f"REINFORCE, seed {seed}: {1e3 * seconds:.2f} ms" for seed, seconds in enumerate(found)), sep="\n")
guess.beside(sum(seconds < optimum.seconds * (1 + 1e-9) for seconds in found), "simulated")

# %% [markdown]
# A seed decides what it finds, and it never knows how good that is. Compare the two curves as well: with seed 0 the
# *policy* settles where list scheduling is, and the optimum was one lucky draw that it did not learn from. Its strength
# lies elsewhere: it needs no model of the machine, a stopwatch is enough. The price: every draw is a run, and a new
# graph is learned from scratch. Followers draw groups of operators (Mirhoseini et al. 2018: graphs of 80,000) or learn
# from many graphs to place unseen ones (*Placeto*, 2019).
#
# A device's **memory** is limited. A placement that exceeds it is no placement; searches cut it off, and the
# learner pays a penalty that grows with the excess. With seed 0, where little fits it finds little:

# %%
need = sum(block.memory)
for share in (1.1, 0.5, 0.36, 0.2):
    small = Placing(block.graph, Cluster(3, Device(50e9, share * need, 20e-6), laptop.network))
    try:
        fits = branch_and_bound(small)
        held = ", ".join(f"{h / 2**20:.0f}" for h in small.held(fits.where))
        print(f"{share * need / 2**20:.0f} MiB each: {1e3 * fits.seconds:.2f} ms, {held} MiB held", end="; ")
        print(f"learned: {1e3 * reinforce(small, seed=0).best.seconds:.2f} ms")
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Balance a chain
#
# Seen from further away GPT-2 *is* a chain: the embedding, the blocks, the head. A pipeline of it (lesson 07) is as
# fast as its slowest stage, once for every micro-batch. Are layers equal, then? Look.

# %% tags=["measured"]
small = GPT2Config(vocab_size=6000, n_positions=64, n_layer=6, n_head=4, n_embd=96)
measured = lab.layer_times(small, rows=4, length=64)
layers = ["embed", *(f"h.{i}" for i in range(small.n_layer)), "head"]
both = [f + b for f, b in measured]
cuts = {"equal counts": equal_count(len(both), 2), "best": best_cut(both, 2)}
show(
    plots.layers(both, cuts, layers, "measured"),
    "measured",
    "two stages of a small GPT-2 with 6,000 words: the head with its loss costs as much as several blocks, the "
    "embedding nearly nothing.",
    "Two rows with two stages each; the black line of the slowest stage is further left in the second row",
)

# %% [markdown]
# There are $\binom{L-1}{S-1}$ ways to cut L layers into S stages: seven here, but 1.9 million for 50 layers in 6. Yet
# the best cut of the first j layers into s stages needs to know only the best cuts into s - 1:
# slowest(j, s) = min over i of max(slowest(i, s - 1), sum of times i..j).


# %% tags=["exercise"]
def cut(times, stages):
    """The bounds (0, ..., len(times)) of non-empty stages whose slowest is as fast as can be."""
    ### BEGIN SOLUTION
    best = {(j, 1): (sum(times[:j]), (0, j)) for j in range(1, len(times) + 1)}
    for s in range(2, stages + 1):
        for j in range(s, len(times) + 1):
            options = [
                (max(best[i, s - 1][0], sum(times[i:j])), (*best[i, s - 1][1], j)) for i in range(s - 1, j)
            ]
            best[j, s] = min(options)
    return best[len(times), stages][1]
    ### END SOLUTION


check("the best cut", exercises.cut, cut)


# %% tags=["wrong"]
# FAIL: 32 layers in 7 stages takes more than
# MISTAKE: All cuts are tried: right, for eight layers in two stages.
def cut(times, stages):
    from itertools import combinations

    layers = len(times)
    every = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    return min(every, key=lambda c: max(sum(times[a:b]) for a, b in zip(c, c[1:], strict=False)))


# %% tags=["wrong"]
# FAIL: bounds are whole numbers of layers
# MISTAKE: Bounds are computed as shares, not as places.
def cut(times, stages):
    return tuple(len(times) * s / stages for s in range(stages + 1))


# %% tags=["wrong"]
# FAIL: best_cut knows the answer
# MISTAKE: The package's own program is called: it is what is to be written.
def cut(times, stages):
    return best_cut(times, stages)


# %% [markdown] tags=["hint"]
# Keep, for every pair (j, s), the slowest stage of the best cut of the first j layers into s stages, and its bounds.
# One stage is easy; s stages follow from s - 1.


# %% tags=["wrong"]
# FAIL: [2, 6] are equal numbers of layers, not equal times
# MISTAKE: Equal numbers of layers, whatever they take.
def cut(times, stages):
    return tuple(len(times) * s // stages for s in range(stages + 1))


# %% tags=["wrong"]
# FAIL: What is best for the first layers depends on where the cut after them is: try all of them
# MISTAKE: Greedy: a stage is closed as soon as it has its share.
def cut(times, stages):
    bounds, share = [0], sum(times) / stages
    for s in range(1, stages):
        j = bounds[-1] + 1
        while sum(times[:j]) < s * share and j < len(times) - (stages - s):
            j += 1
        bounds.append(j)
    return (*bounds, len(times))


# %% tags=["wrong"]
# FAIL: is a time
# MISTAKE: Returns the time of the slowest stage, not the bounds.
def cut(times, stages):
    return max(sum(times) / stages, max(times))


# %% tags=["wrong"]
# FAIL: so that no layer is lost
# MISTAKE: The last layer is left out.
def cut(times, stages):
    return tuple((len(times) - 1) * s // stages for s in range(stages + 1))


# %% tags=["wrong"]
# FAIL: bounds, yours are
# MISTAKE: One stage for all layers.
def cut(times, stages):
    return 0, len(times)


# %% [markdown]
# Here, in the simulator too, no other cut's step is shorter:

# %%
graph = gpt2_layers(small, rows=4, length=64)
computed = [device.time(3 * op.flops) for op in graph.operators]


def jobs_of(bounds, micros, size=0):
    """1F1B of micro-batches through the stages: forward a third of a layer's time, backward two thirds."""
    stages = [sum(computed[a:b]) for a, b in pairwise(bounds)]
    order = make("1f1b", len(stages), micros)
    return pipeline_jobs(order, [t / 3 for t in stages], [2 * t / 3 for t in stages], size)


step_of = lambda bounds: simulate_jobs(jobs_of(bounds, 8), Cluster(3, device))
every = list(every_cut(len(computed), 3))
found = best_cut(computed, 3)
print(f"{len(every)} cuts; slowest stage of the DP's cut is the smallest of all:", end=" ")
print(slowest(computed, found) == min(slowest(computed, c) for c in every))
print("no step is shorter:", step_of(found).makespan <= (1 + 1e-9) * min(step_of(c).makespan for c in every))

# %%
both_ways = {"equal counts": equal_count(8, 3), "dynamic program": found}
show(
    plots.cost_surface(computed, both_ways, "computed"),
    "computed",
    "the slowest stage of every cut into three stages. The last stage should be the head alone; then three places "
    "of the other bound are equally good.",
    "A triangle of 21 squares, lighter towards its lower edge; one on that edge is dashed, one above is framed",
)
show(
    plots.simulated_steps({f"{name} {c}": step_of(c) for name, c in both_ways.items()}),
    "simulated",
    "a step of eight micro-batches (1F1B) through three stages, cut by count and by the program; gaps are idle.",
    "Two charts of three devices on one time axis; in the second one the gaps are smaller and the step ends earlier",
)

# %% [markdown]
# How much there is to gain depends on the model: the larger the blocks and the more of them, the less the head weighs.


# %%
def cut_of(stages, model):
    """The layers of a GPT-2 preset, computed for the made-up device, cut by count and by time."""
    graph = gpt2_layers(PRESETS[model], 1, 128)
    times = [device.time(3 * op.flops) for op in graph.operators]
    cuts = {"equal counts": equal_count(len(times), stages), "best": best_cut(times, stages)}
    return plots.layers(times, cuts, [op.name for op in graph.operators], "computed")


explore(
    cut_of,
    "computed",
    "{model} in {stages} stages, by count and by time.",
    "Two rows of stages of {model}; the slowest of the second row is shorter",
    stages=(2, 8, 4),
    model=["gpt2", "gpt2-medium", "gpt2-xl"],
)

# %% [markdown]
# **Now beat equal counts on live ranks.** You get the (forward, backward) times of every layer, the embedding first
# and the head last, and say which *blocks* each stage holds; the embedding always lives on the first stage, the head on
# the last. The checker wants the best cut, trains your stages live and compares the loss.


# %% tags=["exercise"]
def split(times, stages):
    """[range of blocks] for each stage, from (forward, backward) seconds of embed, h.0, h.1, ..., head."""
    ### BEGIN SOLUTION
    bounds = best_cut([f + b for f, b in times], stages)
    last = len(times) - 2
    return [range(max(a - 1, 0), min(b - 1, last)) for a, b in pairwise(bounds)]
    ### END SOLUTION


check("beat equal counts, live", exercises.split, split)


# %% tags=["wrong"]
# FAIL: Your slowest stage takes 15, as with equal counts; 12 is possible. The head is not like a block
# MISTAKE: Equal numbers of blocks, though the head takes longer.
def split(times, stages):
    return [range(0, 2), range(2, 5)]


# %% tags=["wrong"]
# FAIL: Your slowest stage takes 13, 12 is possible: backward takes time too, not always twice forward
# MISTAKE: Only forward is balanced.
def split(times, stages):
    bounds = best_cut([f for f, _ in times], stages)
    return [range(0, bounds[1] - 1), range(bounds[1] - 1, len(times) - 2)]


# %% tags=["wrong"]
# FAIL: are no blocks
# MISTAKE: Positions in the list, where embed stands first, are taken for blocks.
def split(times, stages):
    bounds = best_cut([f + b for f, b in times], stages)
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


# %% tags=["wrong"]
# FAIL: return a range of blocks
# MISTAKE: Bounds are returned, not ranges.
def split(times, stages):
    return best_cut([f + b for f, b in times], stages)


# %% tags=["wrong"]
# FAIL: Your slowest stage takes 16, but 12 is possible
# MISTAKE: A stage without a block.
def split(times, stages):
    return [range(0, 5), range(5, 5)]


# %% tags=["wrong"]
# FAIL: for each of 3 stages
# MISTAKE: The cut of one example is written down instead of found.
def split(times, stages):
    return [range(0, 3), range(3, 5)]  # right for five alike blocks, and written down instead of found


# %% tags=["wrong"]
# FAIL: Your slowest stage takes 18, but 13.5 is possible
# MISTAKE: Only backward is balanced.
def split(times, stages):
    bounds = best_cut([b for _, b in times], stages)
    last = len(times) - 2
    return [range(max(a - 1, 0), min(b - 1, last)) for a, b in zip(bounds, bounds[1:], strict=False)]


# %% [markdown]
# And with the times that you measured above, on two live ranks: first on free links, then paced to 1 ms and 200 MB/s,
# which the dynamic program does not know.

# %% tags=["measured"]
blocks = [lab.blocks_of(bounds) for bounds in cuts.values()]
seconds = {}
for name, links in {"free links": None, "paced links": Link(1e-3, 200e6)}.items():
    answers = two.run(lab.steps_with_cuts, blocks, small, 16, 64, 4, links)
    seconds[name] = tuple(1e3 * max(times[i] for times, _ in answers) for i in range(2))
    losses = {f"{loss:.4f}" for _, found in answers for loss in found}
    print(f"{name}: the loss is the same for both cuts: {len(losses) == 1}")
show(
    plots.two_bars(seconds, tuple(cuts), "ms a step"),
    "paced",
    "a step of four micro-batches on two live ranks; the upper pair is measured on free links, the lower one "
    "paced; the fastest of six turns each.",
    "Two pairs of bars, each with equal counts above and the best cut below",
)

# %% [markdown]
# ## Replicas, pivots, integer programs
#
# A stage may also have *several* devices. Three of these planners decide how many, each by its own idea of what a plan
# costs; the integer program gives every stage one:
#
# | planner | minimises | by |
# |---|---|---|
# | PipeDream 2019 | the slowest stage, computing or summing gradients, or border | DP over (layers, devices) |
# | DAPPLE 2021 | warm-up + steady phase + ending around the *pivot* stage | here a DP that keeps what no other beats |
# | Tarnawski 2020 | slowest stage of any *graph* | integer program |
# | Piper 2021 | slowest stage, each with its (dp, tp, recompute), under a memory limit | DP over down-sets |
#
# PipeDream's stage on m devices takes max(time, 2 (m - 1) weights / bandwidth) / m: replicas take turns with the
# micro-batches, and sum their gradients meanwhile. (So the paper;
# [its code](https://github.com/msr-fiddle/pipedream/blob/master/optimizer/optimizer_graph_hierarchical.py) adds
# 4 (m - 1) weights / (m bandwidth) to the time, and shares a border's message out among the replicas.) DAPPLE's own
# search also decides on which machines replicas stand; here only how many. All are tried on one chain, the eight
# layers of above with links of 50 MB/s, and held to exhaustive search. PipeDream's is written out: `A(j, m)` is the
# best plan of the first j layers on m devices. Its last stage has the layers from i on, on `here` devices; before it
# stands the best plan of i layers on the other devices.

# %%
chain = balance.Chain(
    tuple(t / 3 for t in computed),
    tuple(2 * t / 3 for t in computed),
    tuple(op.weights for op in graph.operators),
    tuple(op.output for op in graph.operators[:-1]),
    bandwidth=50e6,
)
plans = list(every_replicated(len(chain), 4))


def words(stages):
    return ", ".join(
        f"{s.first}-{s.last - 1}" + (f" x{s.replicas}" if s.replicas > 1 else "") for s in stages
    )


@cache
def A(j, m):
    found = [(balance.pipedream_stage(chain, 0, j, m), (ChainStage(0, j, m),))]  # one stage
    for i in range(1, j):
        for here in range(1, m):
            before, stages = A(i, m - here)
            value = max(before, 2 * chain.hop(i), balance.pipedream_stage(chain, i, j, here))
            found.append((value, (*stages, ChainStage(i, j, here))))
    return min(found, key=lambda plan: plan[0])


value, stages = min((A(len(chain), m) for m in range(1, 5)), key=lambda plan: plan[0])
print("the package's plan:", (value, stages) == balance.pipedream(chain, 4))
least = min(balance.pipedream_cost(chain, plan) for plan in plans)
rows = [("PipeDream (a micro-batch)", words(stages), 1e3 * value, 1e3 * least)]
value, stages = balance.dapple(chain, 4, micros=8)
least = min(balance.dapple_latency(chain, plan, 8) for plan in plans)
rows.append(("DAPPLE (a step of 8)", words(stages), 1e3 * value, 1e3 * least))
value, members = stages_by_ilp(graph, computed, 4)
least = min(slowest(computed, bounds) for s in range(1, 5) for bounds in every_cut(8, s))
stages = [ChainStage(m[0], m[-1] + 1) for m in members if m]
rows.append(("integer program (a micro-batch)", words(stages), 1e3 * value, 1e3 * least))
print(f"{len(plans)} plans of stages with replicas on at most four devices")
table(rows, ["planner", "layers of each stage", "cost in ms", "exhaustive search"])

# %% [markdown]
# Piper also looks at memory. The less a device has, the more it must cut, or compute twice:

# %%
for memory in (40e6, 12e6, 9e6):
    options = stage_options(graph, Cluster(4, Device(50e9, memory, 20e-6), laptop.network), rows=4)
    try:
        value, plan = piper(graph, 4, options)
    except ValueError as error:
        print(f"{memory / 1e6:.0f} MB: {error}")
        continue
    said = [
        f"{s.operators[0]}-{s.operators[-1]}: dp={s.dp} tp={s.tp}{' recompute' if s.recompute else ''}"
        for s in plan
    ]
    print(f"Piper, {memory / 1e6:.0f} MB a device: {1e3 * value:.2f} ms a micro-batch;", "; ".join(said))

# %% [markdown]
# The tests compare every planner with exhaustive
# search on chains of one to ten layers, and the integer program and the down-sets on random graphs as well.

# %% [markdown]
# ## A puzzle: devices that are not alike
#
# GPT-2, 14 layers with embedding and head, in four stages: two *fast* devices (10 TFLOP/s, 1.1 GB) and two *slow*
# ones (5 TFLOP/s, 1.4 GB). Eight micro-batches by 1F1B: stage 0 keeps the activations of four at once, the last stage
# of one. Which layers, and on which device? `unlike_step` says the milliseconds and the gigabytes of each stage; try
# as often as you like, or let a loop try. The lower the better.


# %% tags=["exercise"]
def stages_and_devices():
    """(the five bounds of the stages, the device of each stage: "fast" or "slow")."""
    ### BEGIN SOLUTION
    tried = []
    for bounds in every_cut(len(exercises.LAYERS), 4):
        for devices in set(permutations(["fast", "fast", "slow", "slow"])):
            milliseconds, held = exercises.unlike_step(bounds, devices)
            if all(h <= exercises.UNLIKE[d].memory / 1e9 for h, d in zip(held, devices, strict=True)):
                tried.append((milliseconds, bounds, devices))
    return min(tried)[1:]
    ### END SOLUTION


check("unlike devices", exercises.unlike, stages_and_devices)

# %% [markdown] tags=["hint"]
# `exercises.unlike_step((0, 4, 7, 10, 14), ["slow", "slow", "fast", "fast"])` gives the numbers of one answer. Where do
# activations pile up, and who has the memory for them? Which layer is the heaviest?


# %% tags=["wrong"]
# FAIL: equal numbers of layers
# MISTAKE: Equal numbers of layers, whatever the devices.
def stages_and_devices():
    return (0, 3, 7, 10, 14), ["slow", "slow", "fast", "fast"]


# %% tags=["wrong"]
# FAIL: stage 0 holds 2.52 GB on a fast device of 1.1 GB
# MISTAKE: The fast devices get the most layers, and have no room for them.
def stages_and_devices():
    return (0, 7, 10, 12, 14), ["fast", "slow", "slow", "fast"]


# %% tags=["wrong"]
# FAIL: GB on a slow device of 1.4 GB: weights, and the activations of 4 micro-batches
# MISTAKE: Balanced as if all devices were alike.
def stages_and_devices():
    return best_cut([op.flops for op in exercises.LAYERS], 4), ["slow", "slow", "fast", "fast"]


# %% tags=["wrong"]
# FAIL: there are two fast devices and two slow ones
# MISTAKE: Three fast devices; there are two.
def stages_and_devices():
    return (0, 3, 5, 10, 14), ["fast", "fast", "fast", "slow"]


# %% tags=["wrong"]
# FAIL: 4 stages have 5 bounds
# MISTAKE: A bound is missing.
def stages_and_devices():
    return (0, 5, 10, 14), ["slow", "slow", "fast", "fast"]


# %% tags=["wrong"]
# FAIL: return two things
# MISTAKE: Another form than the one asked for.
def stages_and_devices():
    return [(0, 3, "slow"), (3, 5, "slow"), (5, 10, "fast"), (10, 14, "fast")]


# %% tags=["wrong"]
# FAIL: best known answer has
# MISTAKE: Fits, but a faster answer is known.
def stages_and_devices():
    return (0, 2, 6, 10, 14), ["slow", "slow", "fast", "fast"]


# %% [markdown]
# ## Partition, place, schedule
#
# Three steps lead from a graph to a running plan. Where devices and links are alike, it does not matter
# which stage stands where. Give the cluster two nodes with a slow link between, and it does.

# %%
nodes = Cluster(4, device, Network(between=Link(1e-3, 10e6), inside=Link(50e-6, 2e9), node=2))
size = graph.operators[1].output


def place(bounds):
    return min(permutations(range(4)), key=lambda where: schedule(bounds, where).makespan)


def schedule(bounds, where):
    jobs = jobs_of(bounds, 6, size)
    moved = [type(job)(job.name, where[job.device], job.seconds, job.needs) for job in jobs]
    return simulate_jobs(moved, nodes)


bounds = best_cut(computed, 4)  # partition
where = place(bounds)
show(
    plots.three_steps(computed, bounds, where, schedule(bounds, where)),
    "simulated",
    "the layers in four stages, the stages on two nodes, and six micro-batches through them.",
    "Three panels: bars of layers in four groups, four squares joined in a row, and a Gantt chart",
)

# %%
print(f"three steps {1e3 * schedule(bounds, where).makespan:.1f} ms")
print(
    f"the same stages dealt round robin to the nodes {1e3 * schedule(bounds, (0, 2, 1, 3)).makespan:.1f} ms"
)
places = [where for where in permutations(range(4)) if where[0] == 0]  # the nodes are alike
at_once = min((schedule(c, w).makespan, c) for c in every_cut(8, 4) for w in places)
print(f"all cuts and places at once {1e3 * at_once[0]:.1f} ms, with the cut {at_once[1]}")

# %% [markdown]
# Three steps need not reach what one search over everything reaches, here 158.1 ms<!--above--> for
# 167.6<!--above-->, and never beat it: the cut was fixed before anybody looked at the slow link. Lesson 17 searches all
# at once, and cuts *inside* operators too, which no placement can do.
#
# ## Drill
#
# <details><summary>1. Eight devices, a critical path of 9 ms, 16 ms of work. Which bound holds?</summary>
# The load is 2 ms, the path 9 ms: no placement is faster than 9 ms. Two devices may already be enough.</details>
#
# <details><summary>2. Why does placing operators gain so little for GPT-2?</summary>
# Its graph is almost a chain: only q, k, v (or groups of heads) can run at the same time. Pipelining gains because it
# puts <em>several</em> micro-batches into the graph.</details>
#
# <details><summary>3. Why may branch and bound ignore that messages share links?</summary>
# A bound must never be too large. Sharing only makes messages later, so the time without it is a lower bound.</details>
#
# <details><summary>4. The learner's mean is still above the optimum, its best is on it. Is it done?</summary>
# Nobody can say without a bound: the best draw was luck as much as learning. That is the weakness of a search
# without a bound.</details>
#
# <details><summary>5. Embedding 0, twelve blocks 1 each, head 4: cut for four stages?</summary>
# 16 / 4 = 4: four blocks each for the first three stages, the head alone on the last.</details>
#
# <details><summary>6. Why does PipeDream's stage take a maximum, where DAPPLE adds?</summary>
# Without a flush the sum of gradients overlaps with computing, so the longer one decides. With a flush (DAPPLE) it
# comes at the end, behind the last backward.</details>
#
# ## Read on
#
# - Mirhoseini et al. 2017, *Device placement optimization with reinforcement learning*; 2018, *A hierarchical model
#   for device placement*; Addanki et al. 2019, *Placeto* (arXiv:1906.08879): who learned to place.
# - Topcuoglu et al. 2002 (HEFT): the list scheduler used here.
# - Narayanan et al. 2019, *PipeDream*, section 3.1: stages and replicas by dynamic programming.
# - Fan et al. 2021, *DAPPLE*, section 4: the same with a flush, where the first batches count.
# - Tarnawski et al. 2020, *Efficient algorithms for device placement of DNN graph operators*: graphs, not chains.
# - Tarnawski et al. 2021, *Piper*: memory, recomputing and replicas decided together, on graphs.
# - Zhang, Zheng, Li & Stoica, ICML 2022 tutorial *Big Model*, parts 2.1 and 2.4: both questions on slides.
#
# **Next**: [17 Automatic parallelism](17_automatic_parallelism.ipynb).
