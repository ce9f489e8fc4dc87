# %% [markdown]
# # 17 Automatic parallelism
#
# **The one-minute version.** Data, tensor, sequence, pipeline: you know the strategies, and for one model on one
# machine you must still choose. Every operator may have its own cut and its own devices, so there are more plans than
# atoms in the universe. A planner is always the same recipe: a *space* of plans, rules that *prune* it, a *search*, and
# something that *evaluates* a plan. Three families search: by chance (FlexFlow), by learning (ColocRL), by
# optimisation (PipeDream, Tofu, Alpa). Alpa's idea wins on the problem below: cut *inside* operators where links are
# fast, put *stages* where links are slow, and solve each half exactly.
#
# You will count plans, race the planners on one problem, write Alpa's recurrence and a row of its integer program,
# guess the best of five plans, and run all of them live.

# %% tags=["setup"]
import json
import math
import random
import statistics
from functools import cache
from itertools import pairwise, product

import torch

from gpt2lab import Ranks
from gpt2lab.benchmarks.plans import agreement, compared
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import automatic as exercises
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.lessons.labs import explorer
from gpt2lab.model import GPT2, PRESETS
from gpt2lab.planner import alpa, search
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.cuts import ChainProblem, gpt2_cuts
from gpt2lab.planner.problem import Cluster, Device, find_cluster
from gpt2lab.planner.search import PLANNERS, Planner
from gpt2lab.plots import automatic as plots
from gpt2lab.plots.planner import predicted_and_measured
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.staged import Staged
from gpt2lab.sharding.tofu import LinkChain

# %% tags=["setup"]
torch.set_num_threads(1)
four = Ranks(4)  # live ranks, started when first used

# %% [markdown]
# ## One problem
#
# Lesson 16's chain, seen by a planner that may also cut: the embedding, the attentions, the MLPs, the head. Cutting
# rows (*sample*) sums the gradients of the weights; cutting tokens (*attribute*) also gathers keys and values; cutting
# heads, features or words (*parameter*) sums activations. FlexFlow calls these choices SOAP; O, the *operator*, is
# the choice of devices. What each cut sends is a formula, and the tests hold it to the bytes of lesson 14's
# partitioned programs.

# %%
operators = gpt2_cuts(lab.MODEL, rows=4, length=32)
table(
    [
        (op.name, op.flops / 1e6, op.weights / 2**20, sum(op.gathered) / 2**20, sum(op.summed) / 2**20)
        for op in (*operators[:3], operators[-1])
    ],
    ["operator", "million operations", "MiB, sample", "more MiB, attribute", "MiB, parameter"],
)

# %% [markdown]
# The cluster: two nodes of two devices, 2 GB/s inside a node, 50 MB/s between. Operators that stand together join to
# *clusters* of about equal work, because the search gets hard quickly: Alpa does it by a small dynamic program, which
# keeps the largest input of a cluster small.

# %%
problem = lab.problem(slow=50e6)
table(
    [(op.name, op.flops / 1e6, op.links) for op in problem.operators],
    ["cluster", "million operations", "operators"],
)

# %% [markdown]
# ## How many plans?
#
# Count only *pipelines*: neighbouring operators form stages, stages get blocks of devices in order, and each operator
# is cut along some of three dimensions on each axis of its block. A recurrence counts them, without listing any.

# %%
three_rows = search.only(search.submesh)(problem, search.soap(problem))
listed = sum(1 for _ in search.every_pipeline(problem, three_rows))
print(f"4 operators, 4 devices: {listed} listed, {alpa.count_pipelines(4, 4, 2, 3)} counted")
sizes = [2, 4, 8, 16, 32, 64, 98]
show(
    plots.how_many(
        sizes,
        {f"{d} devices": [alpa.count_pipelines(n, d, min(d, 8), 3) for n in sizes] for d in (2, 8, 64, 256)}
        | {"placements on 1,000 devices": [1000**n for n in sizes]},
    ),
    "counted",
    "pipelines with cuts, for nodes of eight devices. GPT-2 XL has 98 operators: on 64 devices and more they have more "
    "plans than the universe has atoms.",
    "Five rising lines over the number of operators; the vertical axis counts powers of ten",
)

# %% [markdown]
# ## The recipe, and three families
#
# `Planner(space, prune, search, evaluate)`: every planner below differs in one or two of the four.

# %%
show_source(Planner)

# %% [markdown]
# | family | space after pruning | search |
# |---|---|---|
# | exhaustive | pipelines on submeshes | all |
# | by chance: FlexFlow | everything | change one operator; worse is kept with chance exp(-Δ / heat) |
# | by learning: ColocRL | one device for each operator | REINFORCE (lesson 16) |
# | optimisation: PipeDream | stages with replicas | dynamic program |
# | optimisation: Tofu | everything over all devices | an axis at a time, dynamic program |
# | optimisation: Alpa | pipelines on submeshes | integer program inside, dynamic program outside |
#
# Which one finds the optimum, and with how many evaluations?

# %%
names = ["every pipeline", "MCMC (FlexFlow)", "learned placement", "PipeDream", "Tofu", "Alpa"]
guess = predict("Which finds the same optimum as trying every pipeline?", *names[1:])

# %%
found = {name: PLANNERS[name].plan(problem) for name in names}
best = found["every pipeline"].seconds
table(
    [
        (name, 1e3 * one.seconds, one.seconds / best, one.evaluations, lab.words(one.plan))
        for name, one in found.items()
    ],
    ["planner", "ms", "of the optimum", "evaluations", "plan (S rows, A tokens, P weights)"],
)
guess.beside(", ".join(n for n in names[1:] if found[n].seconds < best * (1 + 1e-9)), "simulated")
print("nobody beats the exhaustive search:", all(one.seconds >= best * (1 - 1e-9) for one in found.values()))
placements = list(search.every_plan(problem, search.only(search.one_device)(problem, search.soap(problem))))
learned = found["learned placement"].seconds == min(map(problem.evaluate, placements))
print(f"learning found the best of all {len(placements)} placements:", learned)

# %% tags=["measured"]
show(
    plots.searches(found, best),
    "measured",
    "quality against evaluations (a timed plan, or for dynamic programs a priced part of one) and against seconds. "
    "Dots: the end.",
    "Twice: steps that fall for three planners, dots for PipeDream, Tofu and Alpa; exhaustive search and Alpa end on "
    "the dashed line at 1, chance just above it",
)

# %% [markdown]
# In seconds (right) chance is near the optimum before Alpa ends: the problem is small.
#
# *Learning* is stuck: its plan is the best of all placements, and no placement can split an operator over two devices.
# That costs most with one micro-batch, where placed operators never work at once:

# %%
at_once = lab.problem(slow=50e6, micros=1)
stuck, cut = (PLANNERS[name].plan(at_once) for name in ("learned placement", "Alpa"))
print(f"learned: {1e3 * stuck.seconds:.1f} ms ({lab.words(stuck.plan)})")
print(
    f"Alpa: {1e3 * cut.seconds:.1f} ms ({lab.words(cut.plan)}), {stuck.seconds / cut.seconds:.2f} times as fast"
)

# %% [markdown]
# ### A walk by chance
#
# *Chance* comes near, never knows how near. It walks: draw an operator another cut and devices; go there always if that
# is faster, sometimes if not. *scale*: heat times the first plan's seconds.

# %%
show_source(search.accepts)


def walk(steps, heat, draw):
    """Milliseconds at every step of a walk through the plans, by hand."""
    space = search.soap(problem)
    plan = tuple(choices[0] for choices in space)
    now = start = problem.evaluate(plan)
    seen = [now]
    for _ in range(steps):
        n = draw.randrange(len(plan))
        other = (*plan[:n], draw.choice(space[n]), *plan[n + 1 :])
        seconds = problem.evaluate(other)
        if search.accepts(seconds - now, heat * start, draw.random()):
            plan, now = other, seconds
        seen.append(now)
    return [round(1e3 * seconds) for seconds in seen]


for heat in (0.0, 0.03, 0.1):
    way = walk(300, heat, random.Random(9))
    slower = sum(b > a for a, b in zip(way, way[1:], strict=False))
    print(f"heat {heat:4}: every 30th step {way[::30]}, {slower} times to a slower plan, best {min(way)} ms")

# %% [markdown]
# Without heat this walk stays in a valley; a little heat leads out, with much it never rests.
#
# FlexFlow makes its steps cheap by **delta simulation**: only jobs that the change can reach are timed again.

# %%
shorter = lab.problem(50e6, micros=2)
one = Planner(search.soap, search.everything, search.mcmc(steps=400, seed=3)).plan(shorter)
print(f"jobs of 400 plans: {400 * 4 * 2} in full, {one.jobs} by delta simulation;", end=" ")
print("the best one takes as long in full:", one.seconds == shorter.evaluate(one.plan))

# %% [markdown]
# Here that saves little: in a chain a change reaches all that comes after it. And the limit of chance: the more
# operators, the more steps it takes to come near the optimum, which Alpa's program gives.

# %%
rows = []
for layers in (2, 4, 6, 10):
    larger = lab.problem(50e6, layers=layers, cuts=("sample", "parameter"))
    goal = PLANNERS["Alpa"].plan(larger)
    walks = [
        Planner(search.soap, search.everything, search.mcmc(2000, seed=s)).plan(larger) for s in range(5)
    ]
    within = ([n for n, seconds in w.trace if seconds <= 1.05 * goal.seconds] + [math.inf] for w in walks)
    steps = statistics.median(first for first, *_ in within)
    best = statistics.median(w.seconds for w in walks) / goal.seconds
    rows.append((layers, goal.evaluations, steps if steps < math.inf else "not in 2,000", best))
table(
    rows,
    [
        "operators",
        "Alpa's evaluations",
        "MCMC within 5 % after (median of 5)",
        "MCMC's best / Alpa's (median)",
    ],
)

# %% [markdown]
# ## Outside: stages on submeshes
#
# Alpa's step of B micro-batches through stages of $t_i$ seconds takes $\sum t_i + (B - 1) \max t_j$. The maximum
# couples all stages, so Alpa *enumerates* it: for each possible $t_{max}$, find the least sum of stages none of which
# is slower,
#
# $F(k, d) = \min_{i, m}\; t(k..i, m) + F(i, d - m)$, over stages with $t(k..i, m) \le t_{max}$
#
# where stages hold operators k..i-1 on m devices, and all d devices must be used. Values of $t_{max}$ come in rising
# order, and once $B\, t_{max}$ is no better than the best plan, the rest cannot be: that is early pruning. Write F.


# %% tags=["exercise"]
def pipeline(cost, operators, devices, t_max):
    """The least sum of seconds of stages on blocks of 1, 2 or 4 devices; math.inf where there is none.

    cost(k, i, m): seconds of the operators k..i-1 on m devices.
    """
    ### BEGIN SOLUTION

    @cache
    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        found = math.inf
        for i in range(k + 1, operators + 1):
            for m in (1, 2, 4):
                if m <= d and cost(k, i, m) <= t_max:
                    found = min(found, cost(k, i, m) + least(i, d - m))
        return found

    return least(0, devices)
    ### END SOLUTION


check("Alpa's recurrence", exercises.recurrence, pipeline)

# %% [markdown] tags=["hint"]
# Write a function least(k, d) of the first operator that is left and the devices that are left. Nothing left of both
# costs 0; operators without devices, or devices without operators, cost math.inf.


# %% tags=["wrong"]
# FAIL: 20 needs a stage slower than t_max; leave such stages out
# MISTAKE: The bound t_max is not looked at.
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices)


# %% tags=["wrong"]
# FAIL: 14 is less than any plan that uses all 4 devices, 20
# MISTAKE: Devices may be left over.
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        ways = [(i, m) for i, m in ways if cost(k, i, m) <= t_max]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices)


# %% tags=["wrong"]
# FAIL: 12 is the slowest stage. A micro-batch goes through all of them: add up their seconds
# MISTAKE: Returns the slowest stage and not the sum.
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return (0, 0) if d == 0 else (math.inf, math.inf)
        ways = [(math.inf, math.inf)]
        for i in range(k + 1, operators + 1):
            for m in (1, 2, 4):
                if m <= d and cost(k, i, m) <= t_max:
                    total, slow = least(i, d - m)
                    ways.append((cost(k, i, m) + total, max(cost(k, i, m), slow)))
        return min(ways)

    return least(0, devices)[1]


# %% tags=["wrong"]
# FAIL: 32 is 20 + t_max. The factor B - 1 comes later, outside the recurrence
# MISTAKE: Adds t_max inside the recurrence; it belongs to the loop over t_max around it.
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        ways = [(i, m) for i, m in ways if cost(k, i, m) <= t_max]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices) + t_max


# %% tags=["wrong"]
# FAIL: 36 is one stage for everything; other stages may be faster, or the only ones within t_max
# MISTAKE: One stage on all devices, whatever the bound.
def pipeline(cost, operators, devices, t_max):
    return cost(0, operators, devices)


# %% tags=["wrong"]
# FAIL: stages hold at least one
# MISTAKE: A stage may be empty, and every stage is taken to have all devices.
def pipeline(cost, operators, devices, t_max):
    return min(cost(0, i, devices) + cost(i, operators, devices) for i in range(operators + 1))


# %% [markdown]
# ## Inside: an integer program
#
# Where do $t(k..i, m)$ come from? Inside a stage each operator picks one of its cuts. $s_v$ is *one-hot*: a 1 at the
# cut that operator v picks. The cost is $\sum_v s_v^T c_v + \sum_{(v,u)} s_v^T R_{vu} s_u$, where $R$ prices each
# change of layout (lesson 14). The second term multiplies variables, which an integer *linear* program cannot. So
# every product gets a variable of its own, $e_{ij} = s_{v,i}\, s_{u,j}$, tied by two kinds of rows: row i of e sums to
# $s_{v,i}$, column j to $s_{u,j}$.
#
# Variables stand in this order: the a numbers of $s_v$, the b of $s_u$, and $e_{ij}$ at a + b + i b + j. Write the
# coefficients of "row i of e, minus $s_{v,i}$, is 0".


# %% tags=["exercise"]
def program_row(i, a, b):
    """The a + b + a b coefficients of: sum over j of e[i, j], minus s_v[i], is 0."""
    ### BEGIN SOLUTION
    row = [0] * (a + b + a * b)
    row[i] = -1
    for j in range(b):
        row[a + b + i * b + j] = 1
    return row
    ### END SOLUTION


check("a row of the integer program", exercises.program_row, program_row)

# %% [markdown] tags=["hint"]
# Start with a + b + a b zeros. The places of e[i, 0], e[i, 1], ... stand next to each other, and begin at a + b + i b.


# %% tags=["wrong"]
# FAIL: All your rows are the same. Row i speaks of strategy i of v alone
# MISTAKE: Every variable gets a coefficient, whatever the row.
def program_row(i, a, b):
    return [-1] * a + [0] * b + [1] * (a * b)


# %% tags=["wrong"]
# FAIL: s_v does not appear in a row i, so e would not follow what v chooses
# MISTAKE: The sum over e is there, but not the choice it should equal.
def program_row(i, a, b):
    return [0] * (a + b) + [int(n // b == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: A row speaks of s_u. The rows of e sum to s_v, its columns to s_u: that is another equation
# MISTAKE: A row that ties s_u and e, not s_v and e.
def program_row(i, a, b):
    row = [int(n == i) for n in range(a)] + [1] * b
    return row + [-2 * int(n // b == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: A row finds e at place j a + i. e[i, j] is variable a + b + i b + j
# MISTAKE: The table e is read by columns.
def program_row(i, a, b):
    row = [-int(n == i) for n in range(a)] + [0] * b
    return row + [int(n % a == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: A row has a number for each of 2 + 2 + 4 variables, yours has 4
# MISTAKE: The coefficients of e are missing.
def program_row(i, a, b):
    return [-int(n == i) for n in range(a)] + [1] * b


# %% tags=["wrong"]
# FAIL: A row is not 0 where the equation holds: it is with the sign against s_v
# MISTAKE: The sign of s_v is wrong: the sum would be its negative.
def program_row(i, a, b):
    row = [int(n == i) for n in range(a)] + [0] * b
    return row + [int(n // b == i) for n in range(a * b)]


# %% [markdown]
# HiGHS, SciPy's solver, does the rest. On random graphs of up to six operators the tests compare it with all
# combinations; here is a graph in which the cheapest cut of each operator alone is not the cheapest together:

# %%
costs, change = [[1, 3], [4, 2], [1, 3]], [[0, 5], [5, 0]]
value, chosen = alpa.intra_operator(costs, {(0, 1): change, (1, 2): change})
alone = [row.index(min(row)) for row in costs]
total = lambda s: sum(map(list.__getitem__, costs, s)) + sum(change[a][b] for a, b in pairwise(s))
least = min(map(total, product(range(2), repeat=3)))
print(f"each for itself {alone}: {total(alone)}; together {chosen}: {value}; least of all eight: {least}")

# %% [markdown]
# Afterwards Alpa rewrites what data parallelism left: an all-reduce of a gradient becomes a reduce-scatter before the
# update and an all-gather of the weights after it. The same bytes, and the optimizer is cut: that is ZeRO (lesson 05).
#
# ## Partition, place, schedule
#
# The plan that Alpa found, in the three steps of the ICML 2022 tutorial *Big Model*: clusters of operators, their
# devices with the cuts inside, and what runs when. The orange line is the slow link.

# %%
show(
    plots.three_panels(problem, operators, found["Alpa"].plan),
    "simulated",
    "two stages, one on each node, each cut by rows inside (S); solid lines: the border of stages, orange: the slow "
    "link; eight micro-batches.",
    "Bars of ten operators in four groups, a grid of four devices with letters, and a Gantt chart",
)

# %% [markdown]
# ## The slider
#
# Slow links want stages, which send only activations, once; fast links want cuts. Where does it flip? Each line is the
# best plan of a family, by exhaustive search.

# %%
links = [5e6, 15e6, 50e6, 150e6, 500e6, 2e9]
families, winners = {}, []
for slow in links:
    case = lab.problem(slow, cuts=("sample", "parameter"))
    plans = search.every_pipeline(case, search.only(search.submesh)(case, search.soap(case)))
    least = {}
    for plan in plans:
        least[lab.plan_family(plan)] = min(least.get(lab.plan_family(plan), math.inf), case.evaluate(plan))
    for family, seconds in least.items():
        families.setdefault(family, []).append(seconds)
    winners.append(min(least, key=least.get))
show(
    plots.by_bandwidth(links, families, winners),
    "simulated",
    "the best plan of each family; a dot where it is the best of all.",
    "Three lines that fall with bandwidth; the dots change from the line of stages to that of cuts",
)


# %%
def best_plan(slow_MBps):
    case = lab.problem(slow_MBps * 1e6)
    plan = PLANNERS["Alpa"].plan(case).plan
    return plots.plan_and_clock(case, plan, lab.plan_family(plan), length=450)


explore(
    best_plan,
    "simulated",
    "Alpa's plan when nodes (orange: their border) are joined by {slow_MBps} MB/s; S, A, P: cut by rows, tokens, "
    "weights.",
    "A grid of devices and operators with letters for cuts, beside a Gantt chart",
    posters=[{"slow_MBps": 20}, {"slow_MBps": 150}],
    slow_MBps=[50, 5, 20, 150, 500, 2000],
)

# %% [markdown]
# ## A puzzle: little memory
#
# The same four clusters of operators, slower links inside (200 MB/s; between nodes 50 as before), only 24 MB a device:
# the plans from above do not fit. Write stages as (devices, cuts), a cut as two letters, the first for between nodes
# and the second for inside one: `(2, ["-S", "-P"])` are two operators on the two devices of a node. `puzzle_step`
# says the milliseconds and the megabytes of every device.


# %% tags=["exercise"]
def my_stages():
    """The stages in order, each (devices, [the cut of each operator])."""
    ### BEGIN SOLUTION
    given, tried = exercises.puzzle(), []
    for plan in search.every_pipeline(given, search.only(search.submesh)(given, search.soap(given))):
        tried.append((given.evaluate(plan), plan))
    plan = min(tried, key=lambda one: one[0])[1]
    firsts = [n for n, at in enumerate(plan) if n == 0 or plan[n - 1].devices != at.devices]
    letters = ["".join(lab.WORDS[cut] for cut in at.cut) for at in plan]
    return [(plan[a].count, letters[a:b]) for a, b in zip(firsts, [*firsts[1:], None], strict=True)]
    ### END SOLUTION


check("little memory", exercises.staged, my_stages)

# %% [markdown] tags=["hint"]
# `exercises.puzzle_step([(2, ["-S", "-S"]), (2, ["-P", "-P"])])` gives the numbers of one answer. Which cut leaves
# fewer weights on a device, which one sends less?


# %% tags=["wrong"]
# FAIL: a row cut copies the weights
# MISTAKE: Cutting rows is taken to save memory; weights are copied.
def my_stages():
    return [(2, ["-S", "-S"]), (2, ["-S", "-S"])]


# %% tags=["wrong"]
# FAIL: one stage over both nodes
# MISTAKE: Cuts everything over all devices, also over the slow link.
def my_stages():
    return [(4, ["PP"] * 4)]


# %% tags=["wrong"]
# FAIL: devices, and there are 4
# MISTAKE: A device is left without work.
def my_stages():
    return [(2, ["-P", "-P"]), (1, ["--"] * 2)]


# %% tags=["wrong"]
# FAIL: your stages have cuts for 3 operators
# MISTAKE: An operator has no cut.
def my_stages():
    return [(2, ["-P", "-P"]), (2, ["-P"])]


# %% tags=["wrong"]
# FAIL: is no cut of an operator on 2 devices
# MISTAKE: Cuts between nodes where the stage lies inside one.
def my_stages():
    return [(2, ["P-", "P-"]), (2, ["P-", "P-"])]


# %% tags=["wrong"]
# FAIL: return a list of stages
# MISTAKE: Returns text where a list of stages is asked for.
def my_stages():
    return "-P -P | -P -P"


# %% tags=["wrong"]
# FAIL: best known answer has
# MISTAKE: Fits, but a faster plan is known.
def my_stages():
    return [(2, ["-P", "-P"]), (2, ["-P", "-P"])]


# %% [markdown]
# ## Five plans, live
#
# Now it is earnest. Four ranks, two nodes, 2 MB/s between them and 40 MB/s inside, a small GPT-2 with six operators,
# two micro-batches.

# %%
six = gpt2_cuts(lab.LIVE, rows=4, length=16, itemsize=8)
cluster = Cluster(4, Device(1e9, launch=2e-3), lab.LIVE_NETWORK)
cuts = "sample", "parameter"
live = ChainProblem(six, cluster, 4, 16, lab.LIVE.n_embd, micros=2, itemsize=8, cuts=cuts, shared=1)
five = lab.five_plans(live)
for name, plan in five.items():
    print(f"{name:30} {lab.words(plan)}")

# %%
guess = predict("Which of the five is the fastest?", *five, mine="tensor parallel")  # change it

# %% [markdown]
# Plans like these no strategy of the earlier lessons could run when stages are cut differently, or lie on meshes of
# unlike shape. Lesson 14's interpreter can: each stage is a partitioned program, and between stages only boxes that
# overlap are sent. Where the next stage wants copies, each of its ranks first gets a part, and they gather the rest on
# their own fast links.

# %%
show_source(lab.StageRunner._receive)

# %% [markdown]
# Beside the five run Alpa's plan, FlexFlow's, and three others, drawn by chance.

# %%
plans = five | {name: PLANNERS[name].plan(live).plan for name in ("Alpa", "MCMC (FlexFlow)")}
draw, choices = random.Random(1), search.soap(live)  # all choices of each operator
for n in range(3):
    half = draw.choice([0, 0, 2, 3, 4])  # so many operators on the first two ranks; 0: all on all four
    blocks = [(0, 2)] * half + [(2, 2)] * (len(live) - half) if half else [(0, 4)] * len(live)
    of_blocks = [
        [a for a in some if (a.first, a.count) == at] for some, at in zip(choices, blocks, strict=True)
    ]
    plans[f"drawn {n + 1}"] = tuple(map(draw.choice, of_blocks))

chain = LinkChain(captured_gpt2(lab.LIVE, live.rows, live.length))
staged = {name: Staged(chain, search.stages_of(live, plan)) for name, plan in plans.items()}
answers = four.run(lab.run_plans, staged, live.rows, live.length, live.micros)
model, batch = GPT2(lab.LIVE).double(), example_batch(lab.LIVE, live.rows * live.micros, live.length)
model.load_state_dict(example_weights(lab.LIVE))
serial = model.loss(model(batch.tokens), batch.targets).item()  # summed over all targets
for name in plans:
    losses = [a[name][1] for a in answers if a[name][1] is not None]
    equal = all(abs(loss / serial - 1) < 1e-10 for loss in losses)
    print(f"{name:30} loss equal to serial: {equal}, bytes as predicted: {all(a[name][3] for a in answers)}")

# %% tags=["measured"]
seen = {name: (live.evaluate(plan), max(a[name][0] for a in answers)) for name, plan in plans.items()}
order = sorted(seen, key=lambda name: seen[name][1])
sent = {name: max(a[name][2] for a in answers) / 1e3 for name in plans}
table(
    [(name, *(1e3 * t for t in seen[name]), seen[name][1] / seen[name][0], sent[name]) for name in order],
    ["plan", "ms predicted", "ms live, paced", "live / predicted", "KB sent by the busiest rank"],
)
guess.beside(next(name for name in order if name in five), "paced")
show(
    plots.predicted_measured(seen, [*five, "Alpa", "MCMC (FlexFlow)"]),
    "paced",
    "a step of ten plans on four live ranks, predicted and seen; grey: drawn by chance; the line is equality.",
    "Points that rise from left to right, roughly along the diagonal",
)

# %% [markdown]
# The fastest is FlexFlow's: two stages on one node, the other node idle. Alpa must use all devices, and here messages
# cost more than two more devices win.
#
# The device of the prediction is a guess, 1 GFLOP/s and 2 ms an operator; it knows nothing of cores that four processes
# share. Plans that send little take as long as predicted or less; those that send most, up to twice as long.

# %% [markdown]
# ## From a goal to a plan
#
# (A second sitting may begin here.)
#
# The strategies of all earlier lessons are a space too: dp, ZeRO, tp, pp with its schedules, micro-batches,
# recomputation. `parallelize(config, cluster, goal)` predicts time and memory of each plan and says why it takes one;
# on the command line it is `gpt2lab plan`. Two GPUs, a GPT-2, 8 sequences, ever less memory. The rate of these GPUs is
# that of bfloat16, so every number has 2 bytes:

# %%
for gib in (16, 1.5, 1, 0.5):
    goal = Goal(rows=8, length=1024, memory=gib * 2**30, itemsize=2)
    try:
        choice = parallelize(PRESETS["gpt2"], find_cluster("h100x64").with_devices(2), goal)
    except ValueError as error:
        print(f"{gib} GiB: {error}")
    else:
        held = choice.prediction.memory / 2**30
        print(f"{gib} GiB: {choice.plan}: {1e3 * choice.prediction.seconds:.1f} ms, {held:.2f} GiB")

# %% [markdown]
# ## Explore
#
# Two nodes of equally many devices, GPUs for GPT-2, cores for nano. Where is a plan feasible, what is the best one, and
# what *binds*: how much faster would a step be if one thing were twice as good? `run_it` runs nano's plan on live
# ranks, over links paced to what you chose. The prediction gives each device a core; four live ranks on two cores take
# two to three times as long.

# %% tags=["measured"]
explore(
    explorer.explorer,
    "simulated",
    "{model} on {devices} devices of {memory_GB} GB, {link_GBps} GB/s between nodes, {rows} rows of {length} tokens. "
    "Forward and backward include the sums inside layers.",
    "Four panels: plans by memory and time, bars of what binds, the mesh of ranks, and the clock of the stages",
    posters=[
        {},
        {"model": "nano", "memory_GB": 1, "link_GBps": 0.1, "rows": 4, "length": 64, "run_it": "yes"},
    ],
    model=["gpt2", "gpt2-xl", "nano"],
    devices=[4, 8, 2],
    memory_GB=[4, 1, 80],
    link_GBps=[10, 0.1, 50],
    rows=[8, 64, 4],
    length=[128, 64, 1024],
    run_it=["no", "yes"],
)

# %% [markdown]
# ## Are the predictions right?
#
# `gpt2lab bench plans` ran 110 plans of 1, 2 and 4 ranks of `mini`, and kept seconds, bytes and what `calibrate`
# had found on that machine. From the latter alone each plan is predicted again:

# %%
record = json.loads(explorer.RECORD.read_text())
rows = compared(record)
for what, number in agreement(rows).items():
    print(f"{what}: {number:g}")
show(
    predicted_and_measured(rows),
    "measured",
    f"a step of {record['config']} on a machine of {record['machine']['cores']} cores, predicted and measured; "
    "the line is equality.",
    "Two clouds of points along the diagonal, seconds on the left, bytes on the right",
)

# %% [markdown]
# The *order* is nearly right (rank correlation 0.903<!--above-->), and that is what a planner needs most: the plan it
# chooses takes 1.04<!--above--> times as long as the best measured. The median error is 0.105<!--above-->. What the
# model must know for that: ranks share the cores; a sum amid work waits until other ranks have woken up; adding the
# gradients of one more micro-batch passes the whole embedding through memory; and a core that works alone is faster
# than one of many.
#
# Memory needs no stopwatch, only the allocator's count: the largest error is 0.004<!--above-->. Stages 2 and 3 of ZeRO
# need care there: while a micro-batch's gradient of the embedding is still being summed, the next one already gathers
# the embedding's weights.
#
# ## Drill
#
# <details><summary>1. Why is a placement-only search stuck on a chain with one micro-batch?</summary>
# Nothing of a chain can run at the same time, so every placement takes at least the sum of all operators. Only cuts
# inside operators use more than one device.</details>
#
# <details><summary>2. Stages of 2, 5 and 3 ms, eight micro-batches. How long is a step?</summary>
# 2 + 5 + 3 + 7 · 5 = 45 ms.</details>
#
# <details><summary>3. Alpa has a plan of 60 ms for B = 8. Which t_max need not be tried?</summary>
# Those of 7.5 ms and more: 8 · 7.5 = 60 already.</details>
#
# <details><summary>4. Why are submeshes only parts of a node by powers of two, or whole nodes?</summary>
# Such shapes can always be laid out so that they fill the cluster, and the slow links are crossed by whole nodes
# only.</details>
#
# <details><summary>5. An edge joins operators with 4 and 6 cuts. How many variables and rows does it add?</summary>
# 24 variables e, 4 + 6 rows.</details>
#
# <details><summary>6. Metropolis with heat 10 ms: a plan is 7 ms worse. Kept how often?</summary>
# exp(-0.7), every second time. A search that never accepts worse plans may end in the first valley.</details>
#
# ## Read on
#
# - Zheng et al. 2022, *Alpa*, sections 4 and 5: the two levels of this lesson, with real clusters.
# - Jia, Zaharia & Aiken 2019, *Beyond data and model parallelism*: SOAP, delta simulation, and where chance is enough.
# - Wang, Huang & Li 2019, *Tofu*, section 5: recursive halving, which never looks back.
# - Zhuang et al. 2022, *On optimizing the communication of model parallelism*: boxes between meshes of unlike shape.
# - Mirhoseini et al. 2018, *A hierarchical model for device placement*: learning to cluster and to place.
# - Zhang, Zheng, Li & Stoica, ICML 2022 tutorial *Big Model*, part 3: the three families on slides.
#
# **Next**: [18 Faults and checkpoints](18_faults_and_checkpoints.ipynb).
