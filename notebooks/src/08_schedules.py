# %% [markdown]
# # 08 Pipeline schedules
#
# **The one-minute version.** A pipeline schedule is a list of operations for every rank. Nothing else changes: the
# same stages, the same messages, the same gradients. So people have searched for better lists. The idea that matters
# most: a backward computes two things, and nobody waits for the second, the gradients of the weights. Split it, and
# weight gradients fill the gaps ("zero bubble"). Others cut thinner stages, fill the pipeline from both ends, or cut
# the sequence. Each buys idle time back with something else: messages, memory or weights.
#
# Every schedule is drawn and timed exactly. One table compares them: live ranks fill in what they held and sent, the
# clock of the simulator the bubbles. At the end you design your own and train with it.

# %% tags=["setup"]
import torch

from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import pipeline as exercises
from gpt2lab.lessons.labs import schedules as lab
from gpt2lab.lessons.labs.instruments import differing
from gpt2lab.model import GPT2
from gpt2lab.parallel.pipeline.split_backward import Work, noting
from gpt2lab.plots import schedule as plots
from gpt2lab.plots.style import COLORS, figure
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import trace
from gpt2lab.reference import CONFIG
from gpt2lab.schedules import NAMES, Cost, ScheduleError, best_slices, from_csv, make, simulate, to_csv
from gpt2lab.schedules import check as check_schedule
from gpt2lab.schedules.formulas import kept_for_weights
from gpt2lab.schedules.terapipe import latency
from gpt2lab.verify import verify

# %% [markdown]
# ## A schedule is data
#
# `2F0` is the forward of micro-batch 0 through stage 2, `2B0` its backward. That is PyTorch's notation; a table in it
# can be read and written. Before a schedule runs it is **checked**: is everything there once, can it
# finish, does it keep its promise of memory? Swap two entries and see. (`1I0`: the part of `1B0` that others wait for.)

# %%
one = make("1f1b", ranks=2, micros=3)
print(to_csv(one))
broken = to_csv(one).replace("1F0,1B0", "1B0,1F0")
try:
    check_schedule(from_csv(broken))
except ScheduleError as error:
    print(error)

# %% [markdown]
# ## Interleaved: thinner stages
#
# The bubble is the time in which the pipeline fills and drains, p - 1 stages long. Give every rank v thin *chunks*
# instead of one thick stage (rank r holds stages r, r + p, ...), and filling takes thin steps: the bubble shrinks to
# $\frac{p-1}{vm+p-1}$, if p divides m. The price: every micro-batch passes every rank v times, so v p - 1 borders
# instead of p - 1, each with its messages, and more micro-batches are under way (Narayanan et al. 2021).

# %%
thin = simulate(make("interleaved", 4, 8, chunks=2), Cost(0.5, 0.5, 0.5))
show(
    plots.schedule(thin, "Interleaved 1F1B, two chunks a rank"),
    "simulated",
    "pale boxes are the second chunk; each box takes half the time of a whole rank's share.",
    "Four rows of boxes, full and pale alternating in groups of four, with less white than in 1F1B",
)

# %%
rows = []
for v in (1, 2, 4):
    t = simulate(make("interleaved", 4, 8, chunks=v), Cost(1 / v, 1 / v, 1 / v))
    messages = sum(t.schedule.messages(r) for r in range(4))
    rows.append((v, f"{t.bubble:.1%}", float(t.schedule.activations(0)), messages))
table(rows, ["chunks", "bubble", "rank 0 holds, micro-batches", "messages"])

# %% [markdown]
# Two chunks send 112<!--above--> messages instead of 48<!--above-->. **The order.** Micro-batches go in groups of p: a
# group passes the rank's first chunk, then the second; backwards the same from the last chunk. With v > 1, rank r
# begins with 2 (p - 1 - r) + (v - 1) p forwards, then one forward and one backward in turn. Groups of p want
# m % p = 0. Megatron by default refuses any other m; ours plays the next multiple and leaves the surplus out, which
# costs:

# %%
rows = []
for rank, order in enumerate(thin.schedule.orders):
    first = next(i for i, op in enumerate(order) if op.kind == "B")
    start = " ".join(map(str, order[:6]))
    rows.append((rank, start, first - 1, 2 * (4 - 1 - rank) + (2 - 1) * 4, thin.schedule.peak(rank)))
table(rows, ["rank", "begins with", "warm-up", "by formula", "chunks held"])
for m in (6, 7, 8):
    found = simulate(make("interleaved", 4, m, chunks=2), Cost(1, 1, 1)).bubble
    print(f"m = {m}, m % p = {m % 4}: bubble {float(found):.1%}, formula {3 / (2 * m + 3):.1%}")

# %% [markdown]
# Six micro-batches idle 26.5 %<!--above--> of the time instead of 20.0 %<!--above-->.
#
# A simpler order: *breadth-first* (Lamy-Poirier 2023) sends all micro-batches through one chunk, then all through the
# next, as GPipe would. The bubble is the same, and each rank needs the weights of
# only one chunk at a time, which suits sharded weights; but like GPipe it holds everything.
#
# ## Zero bubble: why split the backward?
#
# The backward of y = x W does two things. The rank *before* waits for the gradient of x. Nobody waits for the
# gradient of W: it may come any time before the optimizer.
#
# | | formula | who waits |
# | :-- | :-- | :-- |
# | input gradient, I | dx = dy Wᵀ | the stage before |
# | weight gradient, W | dW = xᵀ dy | nobody |
#
# So write I and W as two operations, send dx early, and do W when there is nothing else to do (Qi et al. 2023). Each is
# one matrix product, as the forward is: in a linear layer TF, TI and TW are about equal. (Attention itself has no
# weights, so TW of a block is less.) For a whole GPT-2 stage, every linear layer notes its x in forward and its dy when
# the first half passes. The first half is autograd's, but it stops short of the matrices; the second is one product for
# each of them, by hand:

# %%
show_source(noting, Work.input_gradient, Work.weight_gradient)


# %%
block = GPT2(lab.SMALL).double().h["0"]
x = torch.randn(2, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
with noting() as linears:
    y = block(x, torch.arange(16))
work, dy = Work(x, y, linears=linears, parameters=block.parameters()), torch.ones_like(y)
dx = work.input_gradient(dy)
print("after I: gradients on weights:", sum(p.grad is not None for p in block.parameters()))
waits = sum(t.numel() for linear in work.linears for t in (linear.x, linear.dy))
waits += sum(t.numel() for t in work.kept.values())
print("kept for W:", waits, "numbers, computed:", kept_for_weights(2 * 16, width=32, layers=1))
work.weight_gradient()
halves = [p.grad.clone() for p in block.parameters()]
block.zero_grad()
block(x, torch.arange(16)).backward(dy)
same = all(map(torch.equal, halves, (p.grad for p in block.parameters()))) and torch.equal(dx, x.grad)
print("after W: all 12 gradients, and the input's, equal to the whole backward, bit for bit:", same)

# %% [markdown]
# **ZB-H1** keeps 1F1B's peak of activations: a weight gradient is put off only until its rank holds p activations.
# **ZB-H2** spends almost twice the memory on a longer warm-up. Putting W off is not free: the rest of the graph goes
# with I, but x and dy of every matrix stay, 16 C numbers a token and layer. At its peak rank r of ZB-H1 holds p - r
# whole activations and r that wait for W; in ZB-H2 it is 2p - 1 - 2r and 2r (Qi et al. 2023, section 2.3). On the first
# stage nobody waits for dx: our engine does nothing there in I, and all in W.

# %%
three = {name: simulate(make(name, 4, 8)) for name in ("1f1b", "zb_h1", "zb_h2")}
words = {
    "1f1b": "whole backwards",
    "zb_h1": "yellow weight gradients fill the end",
    "zb_h2": "more forwards first, and no white between a rank's first box and its last",
}
for name, t in three.items():
    title = plots.TITLES[name]
    show(
        plots.schedule(t, title, end=max(t.makespan for t in three.values())),
        "simulated",
        f"{title}: {words[name]}; idle {float(t.span_bubble):.0%} of a rank's own time.",
        f"The schedule {title} on four ranks: {words[name]}",
    )

# %% [markdown]
# In ZB-H2 ranks start late and end late: over the *makespan* there is idle time, inside each rank's **own span**
# there is none. The paper counts the span: the next step may begin where a rank stops, *if* nothing needs all ranks
# in between. A global norm or a check for NaN does (this trainer has both), so the paper updates at once and checks
# afterwards, undoing the update where it must. Derive: in 1F1B the first rank idles for p - 1 forwards and whole
# backwards. In ZB-H1 it does p - 1 weight gradients in that time, and the backward that it waits for is only I.


# %% tags=["exercise"]
def idle(name, p, f, i, w):
    """Idle time of the first rank, "1f1b" or "zb_h1": f, i, w are the times of F, I and W, with w <= f."""
    ### BEGIN SOLUTION
    return (p - 1) * (f + i + w) if name == "1f1b" else (p - 1) * (f + i - w)
    ### END SOLUTION


check("idle time", exercises.idle, idle)

# %% [markdown] tags=["hint"]
# Compare rank 0 in the figures of 1F1B and ZB-H1. In 1F1B it waits for p - 1 backwards before its first one, and
# for p - 1 forwards in the gaps at the end. In ZB-H1 the first gap is shorter by p - 1 W, and W fill the gaps at the
# end.


# %% tags=["wrong"]
# FAIL: zb_h1, 4 ranks, times 4, 5, 3: expected 18, got 27
# MISTAKE: The weight-gradients, which fill the gap in ZB-H1, are not taken off.
def idle(name, p, f, i, w):
    return (p - 1) * (f + i + w) if name == "1f1b" else (p - 1) * (f + i)


# %% tags=["wrong"]
# FAIL: 1f1b, 4 ranks, times 4, 5, 3
# MISTAKE: The weight-gradient is forgotten in 1F1B, where it belongs to backward.
def idle(name, p, f, i, w):
    return (p - 1) * (f + i) if name == "1f1b" else (p - 1) * (f + i - w)


# %% tags=["wrong"]
# FAIL: expected 18, got 21
# MISTAKE: One weight-gradient too many is added.
def idle(name, p, f, i, w):
    return (p - 1) * (f + i + w) if name == "1f1b" else (p - 1) * (f + i - w) + w


# %% tags=["wrong"]
# FAIL: expected 18, got 9
# MISTAKE: Weight-gradients are taken off twice.
def idle(name, p, f, i, w):
    return (p - 1) * (f + i + w) if name == "1f1b" else (p - 1) * (f + i - 2 * w)


# %% tags=["wrong"]
# FAIL: expected 18, got 12
# MISTAKE: Only forward is taken to wait.
def idle(name, p, f, i, w):
    return (p - 1) * (f + i + w) if name == "1f1b" else (p - 1) * f


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: A schedule is simulated, and nothing derived.
def idle(name, p, f, i, w):
    t = simulate(make(name, p, 2 * p), Cost(f, i, w))
    return float(t.span(0) - t.busy(0))


# %% [markdown]
# One row of the paper has times measured on real GPUs: 8 ranks, 24 micro-batches, TF = 18.522, TI = 18.086, TW = 9.337
# ms and 0.601 ms a hop. Our clock gives their published numbers to the last digit:

# %%
published = {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083}
cost = Cost(18.522, 18.086, 9.337, hop=0.601)
rows = [(n, round(simulate(make(n, 8, 24), cost).span_bubble, 4), paper) for n, paper in published.items()]
table(rows, ["schedule", "simulated", "from the paper"])

# %% [markdown]
# **ZB-V** needs no extra memory: two chunks a rank, laid out as a V. The first rank holds the first *and* the last
# stage, so the backward begins where the forward began.


# %% tags=["exercise"]
def v_rank(stage, p):
    """The rank that holds this stage, of 2 p stages that go down the p ranks and back up."""
    ### BEGIN SOLUTION
    return stage if stage < p else 2 * p - 1 - stage
    ### END SOLUTION


check("placement of a V", exercises.v_rank, v_rank)

# %% [markdown] tags=["hint"]
# Write down the stages 0 to 2p - 1 for p = 3 in two lines, one down and one back up.


# %% tags=["wrong"]
# FAIL: stage 2 of 4
# MISTAKE: That is the interleaved placement: back at rank 0, not back up.
def v_rank(stage, p):
    return stage % p


# %% tags=["wrong"]
# FAIL: stage 1 of 2
# MISTAKE: One rank too far: the two middle stages belong to the last rank.
def v_rank(stage, p):
    return stage if stage < p else 2 * p - stage


# %% tags=["wrong"]
# FAIL: stage 1 of 2 on 1 ranks: expected 0, got -1
# MISTAKE: The second half is counted from the wrong end.
def v_rank(stage, p):
    return stage if stage < p else p - 1 - stage


# %% tags=["wrong"]
# FAIL: stage 0 of 4
# MISTAKE: The V is upside down.
def v_rank(stage, p):
    return abs(p - 1 - stage) if stage < p else stage - p


# %% tags=["wrong"]
# FAIL: stage 1 of 4
# MISTAKE: Neighbouring stages in pairs.
def v_rank(stage, p):
    return stage // 2


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's schedule is asked.
def v_rank(stage, p):
    return make("zb_v", p, 2 * p).placement[stage]


# %% tags=["wrong"]
# FAIL: twice as many as
# MISTAKE: A table of the placements that were shown, for up to four ranks.
def v_rank(stage, p):
    return {1: "00", 2: "0110", 3: "012210", 4: "01233210"}.get(p, "0" * 99)[stage : stage + 1] and int(
        {1: "00", 2: "0110", 3: "012210", 4: "01233210"}.get(p, "0" * 99)[stage]
    )


# %%
t = simulate(make("zb_v", 4, 8), Cost(0.5, 0.5, 0.5))
show(
    plots.schedule(t, "ZB-V"),
    "simulated",
    "no white inside any rank's span, at the memory of 1F1B's first rank.",
    "Four fully packed rows of blue, green and yellow boxes, half of them pale",
)

# %% [markdown]
# ## Two directions: Chimera and DualPipe
#
# Keep **two copies** of the model, one running down the ranks and one up: where one direction waits, the other works.
# Rank r holds stage r of one and stage p - 1 - r of the other. After the step both copies' gradients are summed.
# Chimera (Li & Hoefler 2021) lays two 1F1B pipelines over each other: give one the even slots of time on each rank and
# the other the odd ones, and they never meet (then every box moves forward). Its bubble is (p - 2) / (2m + p - 2) if
# the even p divides m and forward and backward take equally long: 11 % for p = 4, m = 8. With a backward of two
# forwards, as in the table at the end, it is larger.

# %%
t = simulate(make("chimera", 4, 4), Cost(backward=1))
show(
    plots.schedule(t, "Chimera"),
    "simulated",
    f"two copies in opposite directions; {float(t.bubble):.0%} idle (GPipe: {3 / 7:.0%}); inner ranks hold more.",
    "Four rows, full boxes going down and pale ones going up, crossing in the middle",
)

# %% [markdown]
# Before it came GEMS (Jain et al. 2020): two copies, but one micro-batch after the other, a forward of one direction
# right behind the backward of the other. One activation, and most of the time idle. With a backward of two forwards
# and m = p, Chimera's bubble is $\frac{p-2}{1.5\,m+p-2}$. After the sum over both copies, replicas must be equal:

# %%
two, four = Ranks(2), Ranks(4)
heads = ["4 ranks, m = 4, TB = 2 TF", "bubble", "by formula", "weights", "activations"]
table(lab.both_ways(), heads)
seen, same = {}, []
for ((*_, grads),) in four.run(lab.live, [make("chimera", 4, 4)]):
    same += [torch.equal(grad, seen[name]) for name, grad in grads.items() if name in seen]
    seen |= grads
print(f"{len(same)} gradients that two live ranks hold are the same bits: {all(same)}")
print(f"two ranks, m = 2: bubble {float(simulate(make('chimera', 2, 2)).bubble):.0%};", end=" ")
print("gradients and training equal serial:", verify("pp=2,micro=2,schedule=chimera", ranks=two).ok)

# %% [markdown]
# DualPipe (DeepSeek-V3 2024) combines two directions with split backwards, and pairs, where it can, a forward of one
# direction with a backward of the other, so that one computes while the other communicates. A bubble remains of
# (p/2 - 1)(F&B + B - 3W), where F&B is the time of such a pair. Cutting it in half and folding it to a V (Qi et al.
# 2025) saves the second copy.

# %%
t = simulate(make("dualpipe", 4, 8), Cost(1, 1, 1, joint=3))
show(
    plots.schedule(t, "DualPipe"),
    "simulated",
    "two directions; the forward (F) and the backward (B) in a frame run as one; "
    f"{max(t.makespan - t.busy(r) for r in range(4))} = (4/2 - 1)(3 + 2 - 3) idle, {float(t.bubble):.1%}. In the "
    "table below it idles less, because there the two of a pair need not begin together.",
    "Four rows, symmetric top to bottom, nearly without white",
)

# %% [markdown]
# ## TeraPipe: slices of one sequence
#
# With a single long sequence there are no micro-batches. But attention is causal: tokens 0..k need nothing of the
# later ones. So *slices of tokens* can follow each other (Li et al. 2021). A slice attends to the earlier slices'
# keys and values; in backward, it leaves gradients in them, and slices go from last to first. **Your turn**: slices
# take the times t, the same on each of p ranks, and a rank begins a slice when it has come. When is the last one
# done?


# %% tags=["exercise"]
def slices_latency(times, p):
    """Forward latency of one sequence whose slices take these times on each of p ranks."""
    ### BEGIN SOLUTION
    return sum(times) + (p - 1) * max(times)
    ### END SOLUTION


check("latency of slices", exercises.slicing, slices_latency)

# %% [markdown] tags=["hint"]
# Draw two ranks and slices of 1, 3 and 2. By how much are the slices after the longest one late on the second rank,
# and on a third?


# %% tags=["wrong"]
# FAIL: slices of [3, 1] on 2 ranks: expected 7
# MISTAKE: The whole sequence is taken to wait on each rank: nothing overlaps.
def slices_latency(times, p):
    return p * sum(times)


# %% tags=["wrong"]
# FAIL: slices of [4] on 3 ranks: expected 12
# MISTAKE: Only one rank is counted.
def slices_latency(times, p):
    return sum(times)


# %% tags=["wrong"]
# FAIL: slices of [3, 1] on 2 ranks: expected 7, got 5
# MISTAKE: The quickest slice sets the pace, where the slowest does.
def slices_latency(times, p):
    return sum(times) + (p - 1) * min(times)


# %% tags=["wrong"]
# FAIL: slices of [4] on 1 ranks
# MISTAKE: The pipeline is taken to be one rank longer.
def slices_latency(times, p):
    return sum(times) + p * max(times)


# %% tags=["wrong"]
# FAIL: expected 7, got 6
# MISTAKE: The mean slice sets the pace, where the slowest does.
def slices_latency(times, p):
    return sum(times) + (p - 1) * sum(times) / len(times)


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's function is called.
def slices_latency(times, p):
    return latency(times, p)


# %% [markdown]
# Later slices look back further, so equal lengths are not equal times. Below, a token alone takes 1, and each slice 60
# more. A dynamic programme finds the best lengths: for each bound on the slowest slice, S(i) = min over k of S(i - k) +
# t(k, i - k), with no slice above the bound.

# %%
tokens, ranks = 256, 8
time_of = lambda length, context, fixed=60: fixed + length * (1 + (context + length / 2) / 64)


def times_of(lengths, **more):
    return [time_of(n, sum(lengths[:k]), **more) for k, n in enumerate(lengths)]


def every_cut(length):
    """All ways to cut a sequence, 2^(length - 1)."""
    return [[length]] + [[first, *rest] for first in range(1, length) for rest in every_cut(length - first)]


for p in (2, 4, 8):
    found = latency(times_of(best_slices(16, lambda n, context: time_of(n, context, fixed=2), p), fixed=2), p)
    least = min(latency(times_of(lengths, fixed=2), p) for lengths in every_cut(16))
    print(f"16 tokens, {p} ranks: the programme's {found:.3f}, least of all 32,768 cuts {least:.3f}")
best = best_slices(tokens, time_of, ranks, step=8)
fig, (ax, curve) = figure(8, 2.8, cols=2)
ax.bar(range(len(best)), best, color=COLORS["forward"])
ax.set(xlabel="slice", ylabel="tokens", title="best lengths")
counts = [1, 2, 4, 8, 16, 32]
even = [latency(times_of([tokens // k] * k), ranks) for k in counts]
curve.plot(counts, even, "o-", label="equal slices")
curve.axhline(latency(times_of(best), ranks), color="black", ls="--", label="dynamic programme")
curve.set(xlabel="slices", xscale="log", xticks=counts, xticklabels=counts)
curve.set(title="forward latency", ylabel="time (a token alone: 1)", ylim=0)
curve.legend()
show(
    fig,
    "computed",
    "left, tokens per slice, fewer as the context grows; right, latency of equal slices against the optimum.",
    "Falling bars of slice lengths; a curve with a minimum that stays above a dashed line",
)

# %% [markdown]
# Four live ranks, one sequence of 64 tokens, slices as the programme says. The run is *paced* to the same kind of
# times, and its gradients are compared with the serial ones.

# %% tags=["measured"]
lengths = tuple(best_slices(64, lambda n, context: time_of(n, context, fixed=20), ranks=4, step=4))
times = [t / 2000 for t in times_of(lengths, fixed=20)]  # seconds
errors, spans = zip(*four.run(lab.sliced, lengths, Cost(1, backward=2, factors=times)), strict=True)
print(f"slices of {', '.join(map(str, lengths))} tokens; gradients equal:", max(errors) < 1e-10)
t = simulate(make("terapipe", 4, 1, slices=len(lengths)), Cost(1000, backward=2000, factors=times))
seen = [(s.rank, 1000 * s.start, 1000 * s.end) for s in trace.merge(spans)]
show(
    plots.schedule(t, "TeraPipe", memory=False, seen=seen, unit="ms"),
    "paced",
    "one sequence in slices; colours are the prediction, dark boxes four live ranks. Backward starts with the last.",
    "Slices of one sequence follow each other down four ranks and back, live boxes under the predicted ones",
)

# %% [markdown]
# ## Explore
#
# Try: where does interleaving stop paying once a hop costs something? When does ZB-V have a bubble again? Times are in
# units of a rank's forward; a message is one sequence of 1024 tokens of GPT-2's smallest model in float32, 3 MiB.


# %%
def explorer(name, ranks, micros, chunks, inputs, weight, hop):
    option = {"chunks": chunks} if name in ("interleaved", "breadth_first") else {}
    schedule = make(name, ranks, micros, **option)
    share = schedule.ranks / (schedule.depth * schedule.slices)
    t = simulate(schedule, Cost(share, inputs * share, weight * share, hop=hop))
    most = max(float(schedule.activations(r)) for r in range(ranks))
    sent = sum(schedule.messages(r) for r in range(ranks))
    title = f"{plots.TITLES[name]}: bubble {t.bubble:.1%} ({t.span_bubble:.1%} of spans), time {float(t.makespan):g}"
    holds = f"holds {most:g}, weights {schedule.weights(0)}x"
    return plots.schedule(t, f"{title}\n{holds}, {sent} messages = {sent * 3 / schedule.slices:g} MiB")


explore(
    explorer,
    "simulated",
    "{name}, {ranks} ranks, {micros} micro-batches, TI = {inputs} TF, TW = {weight} TF, hop = {hop} TF.",
    "The schedule {name} with its numbers in the title",
    posters=[{"name": "interleaved", "hop": 0.3}, {"name": "zb_v", "weight": 0.5}],
    name=list(NAMES),
    ranks=(2, 8, 4),
    micros=(1, 16, 8),
    chunks=(1, 4, 2),
    inputs=(0.5, 2.0, 1.0),
    weight=(0.0, 2.0, 1.0),
    hop=(0.0, 1.0, 0.0),
)

# %% [markdown]
# ## All of them, on live ranks
#
# Four ranks, eight micro-batches. What each held and what was sent is *counted by the ranks*, and so is the most that
# waited for its W (after an I, one more than above); the bubble is computed for TF = TI = TW. Gradients are
# compared with serial accumulation.

# %%
every, rows, points = [make(name, 4, 8) for name in NAMES], [], []
for schedule, on_ranks in zip(every, zip(*four.run(lab.live, every), strict=True), strict=True):
    share = 4 / (schedule.depth * schedule.slices)
    timeline, weights = (
        simulate(schedule, Cost(share, share, share)),
        int(max(map(schedule.weights, range(4)))),
    )
    held, waiting, messages, sizes, sums, errors, _ = zip(*on_ranks, strict=True)
    held, waiting = ([float(n * share) for n in of_ranks] for of_ranks in (held, waiting))
    bubbles, listed = (timeline.bubble, timeline.span_bubble), lambda ns: "\u00a0".join(f"{n:g}" for n in ns)
    sent = sum(messages), sum(sizes) // 1024, sum(sums) // 1024
    equal = "equal" if max(errors) < 1e-10 else "DIFFERS"
    row = schedule.name, *(f"{b:.1%}" for b in bubbles), f"{weights}x", listed(held), listed(waiting)
    rows.append((*row, *sent, equal))
    points.append((schedule.name, *map(float, bubbles), max(held), weights, sum(sizes) / 1024))
words = "schedule, bubble, span, weights, held, for W, sent, KiB, sums KiB, gradients"
table(rows, words.split(", "))

# %%
show(
    plots.side_by_side(points, "4 ranks, 8 micro-batches"),
    "simulated",
    "bubbles simulated for equal times; activations (in shares of one rank and micro-batch) and KiB sent between "
    "stages counted live.",
    "Four columns of bars for twelve schedules: bubble, peak activations, weights, KiB sent",
)

# %% [markdown]
# No row is best in every column. GPipe, breadth-first and TeraPipe hold everything. Between stages interleaved and
# breadth-first send most. Chimera and DualPipe store the weights twice, and sum the gradients of both copies, the
# others at most the embedding's. Of those with one copy only ZB-V is best in both bubbles, while the three times are
# equal.
#
# ## A puzzle: design your own
#
# Four ranks, eight micro-batches, room for four activations on each rank. TF = TI = TW = 1, and a message takes 1
# as well. 1F1B takes 49 units of time, ZB-H1 41. Write the words of each rank; at most 40 units pass. Then four
# live ranks train with your schedule, and their gradients must be the serial ones.


# %% tags=["exercise"]
def my_schedule(rank):
    """The operations of this rank in order, such as "F0 F1 I0 W0" (or B0 for I0 and W0 at once)."""
    ### BEGIN SOLUTION
    kinds = [
        "FFFFIWFIWIFWFIWFIWIWIWIW",
        "FFFFIWIWIWFIFFWFIIWIIWWW",
        "FFFIIWFIWIFWFFWIFIWIWIWW",
        "FIFIFIFIWWFIWFIFWIFIWWWW",
    ][rank]
    return [f"{kind}{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
    ### END SOLUTION


check("your schedule", exercises.design, my_schedule)

# %% [markdown] tags=["hint"]
# Other ranks wait for F and I only. Whenever one of these can run, run it; put a W where a rank would stand still,
# but before the memory is full.

# %% [markdown] tags=["hint"]
# A message under way is time in which a rank could do something else: what can rank 1 do while the first gradient is
# still two hops away? Start from `make("zb_h1", 4, 8)`.


# %% tags=["wrong"]
# FAIL: 49 units of time; at most 40 pass
# MISTAKE: Plain 1F1B with whole backwards.
def my_schedule(rank):
    return [f"{op.kind}{op.micro}" for op in make("1f1b", 4, 8).orders[rank]]


# %% tags=["wrong"]
# FAIL: 41 units of time; at most 40 pass
# MISTAKE: ZB-H1 as published is one unit too slow here.
def my_schedule(rank):
    return [f"{op.kind}{op.micro}" for op in make("zb_h1", 4, 8).orders[rank]]


# %% tags=["wrong"]
# FAIL: the limit is 4
# MISTAKE: ZB-H2 holds more activations than are allowed.
def my_schedule(rank):
    return [f"{op.kind}{op.micro}" for op in make("zb_h2", 4, 8).orders[rank]]


# %% tags=["wrong"]
# FAIL: It needs one F
# MISTAKE: Only two micro-batches, where all eight are to run.
def my_schedule(rank):
    return "F0 B0 F1 B1"


# %% tags=["wrong"]
# FAIL: is no operation
# MISTAKE: A word that is no operation.
def my_schedule(rank):
    return ["F0", "stop"]


# %% [markdown]
# ## Bug lab
#
# Four bugs of real pipelines, planted in live ranks. Each trains happily.

# %%
guess = predict("In how many is the loss wrong?", 0, 1, 2, 3, 4)

# %%
found = {}
for bug, (*place_and_text, schedule) in lab.BUGS.items():
    plan = f"pp=2,micro=4,schedule={schedule}"
    found[bug] = differing(two, place_and_text, plan, CONFIG, 8, 11, "gradients")
    print(f"{bug}, first step:", found[bug])
guess.beside(sum("loss" in claims for claims in found.values()), "computed")

# %% [markdown]
# The loss is right in three of the four: only the *gradients* tell. And the check that has to run on every schedule,
# uneven layers and micro-batches included:

# %%
print(verify("pp=2,micro=3,schedule=zb_v"))
print(verify("pp=4,micro=5,schedule=chimera"))

# %% [markdown]
# ## Drill
#
# 1. Interleaving with v = 4 on p = 4 ranks: what happens to bubble and messages?
#    <details><summary>answer</summary>The bubble's time is a quarter; there are (v p - 1) / (p - 1) = 15 / 3 = five
#    times as many messages, as in the table above.</details>
# 2. Why does no rank of ZB-H1 hold more than 1F1B's first?
#    <details><summary>answer</summary>It frees an activation, by its W, whenever p are held.</details>
# 3. When is a rank of ZB-V idle within its span?
#    <details><summary>answer</summary>When TF, TI and TW differ, hops cost time, or m < 2p.</details>
# 4. What does Chimera pay?
#    <details><summary>answer</summary>A second copy of the weights, and a sum of gradients between the
#    copies.</details>
# 5. Why do later slices of TeraPipe have fewer tokens?
#    <details><summary>answer</summary>They look back further, so each token takes longer.</details>
# 6. Why can surplus micro-batches be crossed out of any schedule?
#    <details><summary>answer</summary>Micro-batches never wait for each other.</details>
#
# ## Read on
#
# - Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters": interleaving, section 2.2.
# - Qi et al. 2023, "Zero Bubble Pipeline Parallelism": the split backward, H1, H2 and the V; 2024, "Pipeline
#   Parallelism with Controllable Memory": other Vs, with less memory.
# - Li & Hoefler 2021, "Chimera": two directions, and a table of all schedules before it.
# - DeepSeek-AI 2024, "DeepSeek-V3 Technical Report": DualPipe, section 3.2.1.
# - Li et al. 2021, "TeraPipe": slices of tokens and the dynamic programme.
# - Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism": why its order suits sharded weights.
#
# **Next**: [09 Asynchronous pipelines](09_asynchronous_pipelines.ipynb).
