# %% [markdown]
# # 17 Automatic parallelism
#
# **The one-minute version.** Data, tensor, sequence, pipeline: you know the strategies, and for one model on one
# machine you must still choose. Every operator may have its own cut and its own devices, so there are more plans than
# atoms in the universe. A planner is always the same recipe: a *space* of plans, rules that *prune* it, a *search*, and
# something that *evaluates* a plan. Three families search: by chance (FlexFlow), by learning (ColocRL), by
# optimisation (PipeDream, Tofu, Alpa). Alpa's idea wins here: cut *inside* operators where links are fast, put *stages*
# where links are slow, and solve each half exactly.
#
# You will count plans, race the planners on one problem, write Alpa's recurrence and a row of its integer program,
# guess the best of five plans, and then run all of them on live ranks.

# %% tags=["setup"]
import math
from functools import cache

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import automatic as exercises
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.labs import automatic as lab
from gpt2lab.model import PRESETS
from gpt2lab.planner import alpa, search
from gpt2lab.planner.choose import Goal, parallelize
from gpt2lab.planner.cuts import gpt2_cuts
from gpt2lab.planner.problem import find_cluster
from gpt2lab.planner.search import PLANNERS, Planner
from gpt2lab.plots import automatic as plots

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
    "pipelines with cuts, for nodes of eight devices. The dotted line is far below GPT-2 XL's 98 operators.",
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
# Which one finds the optimum, and with how many evaluations? **Predict** before you run the cell.

# %%
names = ["every pipeline", "MCMC (FlexFlow)", "learned placement", "PipeDream", "Tofu", "Alpa"]
found = {name: PLANNERS[name].plan(problem) for name in names}
best = found["every pipeline"].seconds
table(
    [
        (name, 1e3 * one.seconds, one.seconds / best, one.evaluations, lab.words(one.plan))
        for name, one in found.items()
    ],
    ["planner", "ms", "of the optimum", "evaluations", "plan (S rows, A tokens, P weights)"],
)
print("nobody beats the exhaustive search:", all(one.seconds >= best * (1 - 1e-9) for one in found.values()))

# %%
show(
    plots.searches(found, best),
    "simulated",
    "quality against evaluations: a timed plan, or for the dynamic programs a priced part of one. Dots: the end.",
    "Falling steps for six planners; exhaustive search and Alpa end on the dashed line at 1",
)

# %% tags=["measured"]
table([(name, one.took) for name, one in found.items()], ["planner", "seconds of searching"])

# %% [markdown]
# *Learning* is stuck: placements alone cannot split an operator over two devices, and the tests construct a case in
# which its best plan is provably the best of all placements and still more than twice the optimum. *Chance* comes
# near, never knows how near, and each of its steps times a plan. FlexFlow makes that cheap by **delta simulation**:
# only jobs that the change can reach are timed again.

# %%
one = Planner(search.soap, search.everything, search.mcmc(steps=400, seed=3)).plan(
    lab.problem(50e6, micros=2)
)
print(f"jobs of 400 plans: {400 * 4 * 2} in full, {one.jobs} by delta simulation")
show_source(search.accepts)

# %% [markdown]
# And its limit: the more operators, the more steps it takes to come near the optimum, which Alpa's program gives.

# %%
rows = []
for layers in (2, 4, 6, 10):
    larger = lab.problem(50e6, layers=layers, cuts=("sample", "parameter"))
    goal = PLANNERS["Alpa"].plan(larger)
    walk = Planner(search.soap, search.everything, search.mcmc(2000, seed=1)).plan(larger)
    within = [n for n, seconds in walk.trace if seconds <= 1.05 * goal.seconds]
    rows.append(
        (layers, goal.evaluations, within[0] if within else "not in 2,000", walk.seconds / goal.seconds)
    )
table(rows, ["operators", "Alpa's evaluations", "MCMC within 5 % after", "MCMC's best / Alpa's"])

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
# FAIL: needs a stage slower than t_max
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices)


# %% tags=["wrong"]
# FAIL: is less than any plan that uses all
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        ways = [(i, m) for i, m in ways if cost(k, i, m) <= t_max]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices)


# %% tags=["wrong"]
# FAIL: is the slowest stage
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
# FAIL: comes later, outside the recurrence
def pipeline(cost, operators, devices, t_max):
    def least(k, d):
        if k == operators:
            return 0 if d == 0 else math.inf
        ways = [(i, m) for i in range(k + 1, operators + 1) for m in (1, 2, 4) if m <= d]
        ways = [(i, m) for i, m in ways if cost(k, i, m) <= t_max]
        return min((cost(k, i, m) + least(i, d - m) for i, m in ways), default=math.inf)

    return least(0, devices) + t_max


# %% tags=["wrong"]
# FAIL: is one stage for everything
def pipeline(cost, operators, devices, t_max):
    return cost(0, operators, devices)


# %% tags=["wrong"]
# FAIL: stages hold at least one
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
# FAIL: all your rows are the same
def program_row(i, a, b):
    return [-1] * a + [0] * b + [1] * (a * b)


# %% tags=["wrong"]
# FAIL: s_v does not appear
def program_row(i, a, b):
    return [0] * (a + b) + [int(n // b == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: speaks of s_u
def program_row(i, a, b):
    row = [int(n == i) for n in range(a)] + [1] * b
    return row + [-2 * int(n // b == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: finds e at place j a + i
def program_row(i, a, b):
    row = [-int(n == i) for n in range(a)] + [0] * b
    return row + [int(n % a == i) for n in range(a * b)]


# %% tags=["wrong"]
# FAIL: yours has
def program_row(i, a, b):
    return [-int(n == i) for n in range(a)] + [1] * b


# %% tags=["wrong"]
# FAIL: with the sign against s_v
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
print(f"each for itself {alone}: {sum(map(min, costs)) + 5 + 5}; together {chosen}: {value}")

# %% [markdown]
# Afterwards Alpa rewrites what data parallelism left: an all-reduce of a gradient becomes a reduce-scatter before the
# update and an all-gather of the weights after it. The same bytes, and the optimizer is cut: that is ZeRO (lesson 05).
# A test runs the rewritten program on live ranks.
#
# ## Partition, place, schedule
#
# The plan that Alpa found, in the three steps of the tutorial: clusters of operators, their devices with the cuts
# inside, and what runs when. The orange line is the slow link.

# %%
show(
    plots.three_panels(problem, operators, found["Alpa"].plan),
    "simulated",
    "two stages, one on each node, each cut by rows inside; eight micro-batches.",
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
    return plots.plan_and_clock(case, plan, lab.plan_family(plan))


explore(
    best_plan,
    "simulated",
    "Alpa's plan when nodes are joined by {slow_MBps} MB/s.",
    "A grid of devices and operators with letters for cuts, beside a Gantt chart",
    posters=[{"slow_MBps": 20}, {"slow_MBps": 2000}],
    slow_MBps=[50, 5, 20, 150, 500, 2000],
)

# %% [markdown]
# ## Explore
#
# Choose model, devices, memory, link and batch. The map shows which family is best at each memory and link, and where
# nothing fits; the title says what *binds*: how much faster a step would be if one thing were twice as good.


# %%
def explorer(model, devices, memory_MB, link_MBps, micros):
    config = lab.MODEL if model == "4 layers" else PRESETS[model]
    make = lambda memory, slow: lab.problem(
        slow, devices, memory, micros=micros, config=config, layers=3, cuts=("sample", "parameter")
    )
    state = sum(4 * op.weights + op.kept for op in make(math.inf, 1e6).operators) / devices
    memories = sorted({2 * state, 1.3 * state, 0.8 * state, memory_MB * 1e6})
    slows, map_ = sorted({5e6, 50e6, 500e6, link_MBps * 1e6}), {}
    framed = memories.index(memory_MB * 1e6), slows.index(link_MBps * 1e6)
    for i, memory in enumerate(memories):
        for j, slow in enumerate(slows):
            case = make(memory, slow)
            one = PLANNERS["every pipeline"].plan(case)
            map_[i, j] = (lab.plan_family(one.plan), 1e3 * one.seconds) if one.plan else ("", 0)
    case = make(memory_MB * 1e6, link_MBps * 1e6)
    one = PLANNERS["every pipeline"].plan(case)
    said = f"nothing fits {memory_MB} MB: an even share of everything is {state / 1e6:.0f} MB"
    if one.plan:
        won = ", ".join(f"{what} {won:.0f} %" for what, won in lab.binding(case, one.plan).items())
        said = f"framed: {lab.words(one.plan)}; twice as good would win: {won}"
    return plots.feasible(memories, slows, map_, framed, said)


explore(
    explorer,
    "simulated",
    "{model} on {devices} devices, {micros} micro-batches: ms a step of the best plan; framed: {memory_MB} MB, "
    "{link_MBps} MB/s.",
    "A map of 16 fields coloured by family of plans, some white",
    model=["4 layers", "mini"],
    devices=[4, 2, 8],
    memory_MB=[40, 20, 400],
    link_MBps=[100, 10, 1000],
    micros=[8, 2],
)

# %% [markdown]
# ## Five plans, live
#
# Now it is earnest. Four ranks, two nodes, 2 MB/s between them and 40 MB/s inside, a small GPT-2 with six operators,
# two micro-batches. **Predict** first: which of these is fastest, and which slowest? Write your guess down.

# %%
live = lab.live_problem()
five = lab.five_plans(live)
for name, plan in five.items():
    print(f"{name:30} {lab.words(plan)}")
guess = "tensor parallel"  # yours

# %% [markdown]
# Plans like these no strategy of the earlier lessons could run when stages are cut differently, or lie on meshes of
# unlike shape. Lesson 14's interpreter can: each stage is a partitioned program, and between stages only boxes that
# overlap are sent. Where the next stage wants copies, each of its ranks first gets a part, and they gather the rest on
# their own fast links.

# %%
show_source(lab.StageRunner._receive)

# %% [markdown]
# Beside the five run Alpa's plan and four others, drawn by chance.

# %%
plans = five | lab.more_plans(live, 4)
staged = lab.staged_plans(lab.chain(live), live, plans)
answers = four.run(lab.run_plans, staged, live.rows, live.length, live.micros)
serial = lab.summed_loss(live.rows, live.length, live.micros)
for name in plans:
    losses = [a[name][1] for a in answers if a[name][1] is not None]
    equal = all(abs(loss / serial - 1) < 1e-10 for loss in losses)
    print(f"{name:30} loss equal to serial: {equal}, bytes as predicted: {all(a[name][3] for a in answers)}")

# %% tags=["measured"]
seen = {name: (live.evaluate(plan), max(a[name][0] for a in answers)) for name, plan in plans.items()}
order = sorted(seen, key=lambda name: seen[name][1])
table([(name, *(1e3 * t for t in seen[name])) for name in order], ["plan", "ms predicted", "ms live, paced"])
print(f"you guessed {guess}; of the five the fastest was {next(n for n in order if n in five)}")
show(
    plots.predicted_measured(seen, [*five, "Alpa"]),
    "paced",
    "a step of ten plans on four live ranks, predicted and seen; the line is equality.",
    "Points that rise from left to right, roughly along the diagonal",
)

# %% [markdown]
# The order is what a planner needs. The prediction knows nothing of two cores that four processes share, nor of what
# hundreds of small operators cost Python. With times measured for each operator, as FlexFlow and Alpa do, points come
# closer to the line.
#
# ## From a goal to a plan
#
# The strategies of all earlier lessons are a space too: dp, ZeRO, tp, pp with its schedules, micro-batches,
# recomputation. `parallelize(config, cluster, goal)` predicts time and memory of each plan and says why it takes one;
# on the command line it is `gpt2lab plan`. Two GPUs, a GPT-2, 8 sequences, ever less memory:

# %%
for gib in (16, 3, 1.5, 1):
    goal = Goal(rows=8, length=1024, memory=gib * 2**30)
    try:
        choice = parallelize(PRESETS["gpt2"], find_cluster("h100x64").with_devices(2), goal)
    except ValueError as error:
        print(f"{gib} GiB: {error}")
    else:
        held = choice.prediction.memory / 2**30
        print(f"{gib} GiB: {choice.plan}: {1e3 * choice.prediction.seconds:.1f} ms, {held:.2f} GiB")

# %% [markdown]
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
# exp(-0.7), every second time. A search that never accepts worse plans ends in the first valley.</details>
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
# **Next**: **18 Faults and checkpoints**.
