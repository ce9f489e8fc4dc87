# %% [markdown]
# # 09 Asynchronous pipelines
#
# **The one-minute version.** A pipeline with a flush waits at the end of every batch until the last gradient is
# there, updates, and fills up again. Leave the wait out and there is no bubble. But now a stage updates while
# other micro-batches are under way, and the forward and the backward of one micro-batch can meet *different
# weights*. Which ones is no accident: it follows from the order of operations and can be written in a table.
# *AMPNet* takes whatever weights are there. *PipeDream* keeps copies, so that a backward finds what its forward
# saw. *PipeDream-2BW* makes do with two copies. All three run here on live ranks, and each is **equal to a serial
# program that reads the table**.
#
# Then the same question without a pipeline: servers that do not wait for slow workers, and replicas that meet every H
# steps.

# %% tags=["setup"]
import json
from functools import partial

import torch

from gpt2lab import Ranks
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import asynchronous as exercises
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.labs import local_sgd, staleness
from gpt2lab.lessons.labs import replicated_stages as replicated
from gpt2lab.lessons.labs import servers_on_arrival as servers
from gpt2lab.lessons.labs import streams as lab
from gpt2lab.lessons.labs.compressed import CODES, CodedSum
from gpt2lab.lessons.labs.instruments import apart
from gpt2lab.lessons.labs.streams import SMALL, compared_with_bug, trained
from gpt2lab.model import GPT2
from gpt2lab.parallel.pipeline import versions
from gpt2lab.parallel.pipeline.versions import Asynchronous, Stash
from gpt2lab.plan import Plan, build
from gpt2lab.plots import asynchronous as plots
from gpt2lab.plots.schedule import schedule as draw_schedule
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.schedules import Cost, Op, make, simulate
from gpt2lab.schedules.asynchronous import flushed, free_running, make_stream
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import verify, worst

# %% tags=["setup"]
torch.set_num_threads(1)  # these models are too small to share
pool = Ranks(4)  # live ranks, started when first used

# %% [markdown]
# ## With a flush, and without
#
# Four stages, three batches of four micro-batches. First, lesson 07's 1F1B: each batch fills and drains the pipeline.
# Then the same order without a flush.

# %%
times_of_ops = Cost(1, backward=2)
with_flush, without = simulate(flushed(4, 3, 4), times_of_ops), simulate(free_running(4, 12), times_of_ops)
show(
    draw_schedule(with_flush, "1F1B, a flush after every batch", end=with_flush.makespan),
    "simulated",
    "three times white at both ends: the bubble is paid for every batch.",
    "Boxes of four ranks in three groups with idle time between the groups",
)
show(
    draw_schedule(without, "the same operations without a flush", end=with_flush.makespan),
    "simulated",
    "the bubble is paid once. (The same time axis as above.)",
    "Boxes of four ranks in one group, with idle time only where it fills and drains",
)

# %% [markdown]
# With m micro-batches in all, the pipeline is busy m / (m + p - 1) of the time: it goes to 1 as data grows. Here
# simulated, and *paced*: two live ranks whose operations are stretched to 30 and 60 ms.

# %%
rows = [
    (m, f"{m / (m + 3):.1%}", f"{float(1 - simulate(free_running(4, m), times_of_ops).bubble):.1%}")
    for m in (4, 16, 64, 256)
]
table(rows, ["micro-batches", "m / (m + 3)", "simulated, p = 4"])

# %% tags=["measured"]
pace = Cost(0.03, backward=0.06)
with Ranks(2) as two:
    for count in (2, 6, 18):
        found = two.run(trained, "pp=2,schedule=pipedream", count, pace)
        busy = count * 0.09 / max(seconds for *_, seconds in found)
        print(f"{count:3} batches, paced on 2 ranks: busy {busy:.0%}, formula {count / (count + 1):.0%}")

# %% [markdown]
# ## Which weights?
#
# A batch is here one micro-batch, and a stage updates right after its backward: version t + 1 contains batches 0
# to t. Which version does each forward and each backward find?

# %%
ampnet = make_stream("ampnet", 4, 12)
show(
    plots.version_map(ampnet, title="AMPNet: the weights that happen to be there"),
    "computed",
    "left halves: the version that the forward reads; right: the backward. Darker: more updates are missing.",
    "A grid of stages and micro-batches; in the upper rows forward and backward read different versions",
)
three = make_stream("ampnet", 3, 4)
for kind, name in {"F": "forward", "B": "backward"}.items():
    print(f"three stages, datum 1, {name}:", [three.reads[Op(kind, stage, 1)] for stage in range(3)])

# %% [markdown]
# The last two lines are the example of the ICML 2022 tutorial on big models. In general stage s of n runs n - 1 - s
# forwards ahead of its backwards. So the forward of batch t finds version max(0, t - (n - 1 - s)): the last stage is
# always up to date, the first lags n - 1 behind. The backward comes later and finds version t. (AMPNet itself runs
# whatever message arrives first. Here every scheme keeps 1F1B's order, so that its table can be written down.)

# %% [markdown]
# Three answers to the two numbers in a cell:
#
# | scheme | forward reads | backward reads | versions kept on stage s |
# |:--|:--|:--|--:|
# | AMPNet (Gaunt et al. 2017) | what is there | what is there | 1 |
# | PipeDream, weight stashing (Narayanan et al. 2019) | what is there | what its forward read | n - s |
# | PipeDream, vertical sync | what stage 0 read | the same | n |
# | PipeDream-2BW (Narayanan et al. 2021) | W(t-1) | W(t-1) | 2 |

# %%
show(
    plots.version_map(make_stream("pipedream", 4, 12), title="PipeDream: both halves agree, stages do not"),
    "computed",
    "within a cell the two numbers are equal; down a column they differ.",
    "A grid of stages and micro-batches whose cells hold the same number twice",
)
show(
    plots.version_map(make_stream("pipedream_vertical", 4, 12), title="vertical sync: a column agrees too"),
    "computed",
    "one version for all stages, at the price of the greatest lag everywhere.",
    "A grid whose columns hold one number each",
)

# %% [markdown]
# Other schemes, more stages, more micro-batches an update. When does 1F1B win? What does a stage more cost?


# %%
def explorer(scheme, stages, per_update):
    per_update = max(per_update, stages) if scheme == "2bw" else per_update
    stream = make_stream(scheme, stages, max(3, 12 // per_update), per_update)
    clock = simulate(stream.schedule, times_of_ops)
    late = max(map(stream.staleness, stream.reads))
    kept = ", ".join(str(max(map(len, stream.held(stage)))) for stage in range(stages))
    busy = f"{plots.TITLES[scheme]}, {per_update} an update: busy {1 - float(clock.bubble):.0%}"
    return plots.in_time(stream, clock, f"{busy}, at most {late} updates missed\nversions kept {kept}")


explore(
    explorer,
    "simulated",
    "{scheme} on {stages} stages; numbers are the versions read, dark where updates are missed; backwards take 2.",
    "Rows of boxes for {stages} stages of {scheme}, each with a version number, and the versions kept over time",
    posters=[{"scheme": "ampnet"}, {"scheme": "2bw", "per_update": 4}],
    scheme=["pipedream", "pipedream_vertical", "ampnet", "2bw", "1f1b"],
    stages=(2, 6, 4),
    per_update=(1, 6, 1),
)

# %% [markdown]
# Say it as a function. Walk along a stage's own order, as the simulator drew it, and count its backwards.


# %% tags=["exercise"]
def version(scheme, p, s, t, kind):
    """The version that micro-batch t's "F" or "B" reads on stage s of p, with an update after every backward; scheme is
    "ampnet", "pipedream" or "pipedream_vertical".
    """
    ### BEGIN SOLUTION
    if scheme == "ampnet" and kind == "B":
        return t
    lag = p - 1 if scheme == "pipedream_vertical" else p - 1 - s
    return max(0, t - lag)
    ### END SOLUTION


check("the version that is read", exercises.version, version)

# %% [markdown] tags=["hint"]
# How many backwards has stage s done when the forward of micro-batch t begins? In the warm-up it has done none. Then
# ask which version the backward uses: the newest, or that of its own forward.


# %% tags=["wrong"]
# FAIL: 0F0 cannot read version -1: the first version is 0
# MISTAKE: Versions before the first one.
def version(scheme, p, s, t, kind):
    return t if (scheme, kind) == ("ampnet", "B") else t - (p - 1 - s)


# %% tags=["wrong"]
# FAIL: Nothing is stashed, so 0B1 finds version 1, not 0
# MISTAKE: AMPNet is taken to stash weights, as PipeDream does.
def version(scheme, p, s, t, kind):
    return max(0, t - (p - 1 if scheme == "pipedream_vertical" else p - 1 - s))


# %% tags=["wrong"]
# FAIL: 0B1 must read version 0, which its forward read
# MISTAKE: Backward is taken to read the newest version, as if nothing were stashed.
def version(scheme, p, s, t, kind):
    return t if kind == "B" else max(0, t - (p - 1 - s))


# %% tags=["wrong"]
# FAIL: Vertical sync, all stages read what stage 0 reads; 1F1: 0, not 1
# MISTAKE: The vertical scheme is taken for the plain one: stages would read different versions.
def version(scheme, p, s, t, kind):
    return t if (scheme, kind) == ("ampnet", "B") else max(0, t - (p - 1 - s))


# %% tags=["wrong"]
# FAIL: Before 0F1 the stage has updated once. Walk along its order
# MISTAKE: One version too old: in flight are p - s, but one of them is the micro-batch itself.
def version(scheme, p, s, t, kind):
    return t if (scheme, kind) == ("ampnet", "B") else max(0, t - (p - s))


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's table is asked.
def version(scheme, p, s, t, kind):
    from gpt2lab.schedules import Op

    return make_stream(scheme, p, 9).reads[Op(kind, s, t)]


# %% [markdown]
# ## What a gradient without a stash is a gradient of
#
# A backward multiplies the incoming gradient by the weights. If the forward used others, the result is no derivative
# of anything. Train four versions, then mix: forward at version 0, backward at version 3. How far is the result from
# the true gradient at each version?

# %%
batch, path = example_batch(SMALL, 7, 11), [example_weights(SMALL)]
for _ in range(3):
    grads = lab.gradient_at(path[-1], path[-1], batch)
    path.append({name: w - 0.1 * grads[name] for name, w in path[-1].items()})
mixed, stashed = lab.gradient_at(path[0], path[3], batch), lab.gradient_at(path[0], path[0], batch)
rows = []
for v, weights in enumerate(path):
    true = lab.gradient_at(weights, weights, batch)
    rows.append((v, f"{lab.apart(mixed, true):.1%}", f"{lab.apart(stashed, true):.1%}"))
table(rows, ["true gradient at version", "forward 0, backward 3: apart", "forward 0, backward 0: apart"])

# %% [markdown]
# Without a stash the gradient belongs to *no* version: it is 29.0 %<!--above--> apart from the nearest. With one
# it is the gradient at the mixture of versions that the stages read: f(w₁⁽ᵗ⁻ⁿ⁺¹⁾, ..., wₙ⁽ᵗ⁾). On four live
# stages batch 3 reads version s on stage s, and SGD tells its gradient, (W(3) - W(4)) / rate:


# %%
def after(rank, world_size, count):
    """The weights of all stages when live PipeDream has trained on `count` batches."""
    plan = Plan.parse("pp=4,schedule=pipedream")
    parallel = build(plan, SMALL, Mesh(**plan.axes), torch.float64)
    parallel.load(example_weights(SMALL))
    Trainer(parallel, Recipe("sgd", lr=0.05, clip=None, weight_decay=0)).stream(stream_batches[:count])
    return parallel.weights()


stream_batches = [example_batch(SMALL, 7, 11, t) for t in range(12)]
joined = lambda stages: {name: w for of_stage in reversed(stages) for name, w in of_stage.items()}
version_of = [example_weights(SMALL), *(joined(pool.run(after, count)) for count in (1, 2, 3, 4))]
live = {n: (version_of[3][n] - version_of[4][n]) / 0.05 for n in version_of[0]}
homes = staleness.homes_of(SMALL, 4)
reads = {"that mixture": homes, **{f"version {v} everywhere": dict.fromkeys(homes, v) for v in (0, 3)}}
for name, of_weight in reads.items():
    weights = {n: version_of[v][n] for n, v in of_weight.items()}
    print(
        f"apart from the gradient at {name}:",
        f"{lab.apart(live, lab.gradient_at(weights, weights, stream_batches[3])):.1%}",
    )

# %% [markdown]
# PyTorch knows the danger. It counts changes of every tensor, and refuses:

# %%
w, x = torch.nn.Parameter(torch.eye(3)), torch.ones(2, 3, requires_grad=True)
loss = torch.nn.functional.linear(x, w).sum()
with torch.no_grad():
    w.mul_(2)  # another micro-batch has updated
try:
    loss.backward()
except RuntimeError as error:
    print(str(error).split(":")[0])

# %% [markdown]
# So an engine must say what it means. Ours writes values through `Tensor.data`; whatever a graph has saved then
# sees the version *in use*. The others are kept beside it. `push` keeps a copy of the version in use, before
# the optimizer overwrites it; `use` exchanges it with a kept one; `free` forgets. Write them; three live
# stages train with your stash and are compared with the emulator: weights, versions read, bytes kept after every
# operation.


# %% tags=["exercise"]
class MyStash(Stash):
    """`parameters`: a list; `used`: the version in them; `kept`: version -> list of tensors, the others."""

    def push(self):
        """Keep a copy of the version in use."""
        ### BEGIN SOLUTION
        self.kept[self.used] = [p.data.clone() for p in self.parameters]
        ### END SOLUTION

    def use(self, version):
        """Write a kept version into the parameters (p.data.copy_), and keep what was there in its place."""
        ### BEGIN SOLUTION
        if version != self.used:
            values = self.kept.pop(version)
            self.push()
            for p, value in zip(self.parameters, values, strict=True):
                p.data.copy_(value)
            self.used = version
        ### END SOLUTION

    def free(self, wanted):
        """Forget all versions that are not in the set `wanted`; if the one in use is not, use the newest wanted."""
        ### BEGIN SOLUTION
        if self.used not in wanted:
            self.use(max(wanted))
        self.kept = {v: values for v, values in self.kept.items() if v in wanted}
        ### END SOLUTION


def on_live_ranks(stash):
    """The claims of three stages of PipeDream that use this stash."""
    with Ranks(3) as three:
        return worst(
            three.run(compared_with_bug, versions, "Stash", lambda right: stash, "pp=3,schedule=pipedream")
        )


check("a stash", exercises.stash, MyStash, on_live_ranks)

# %% [markdown] tags=["hint"]
# A tensor that is kept must be a copy: `p.data` itself changes with the next update. And no version may be lost in an
# exchange: what was in use has to be kept before it is overwritten.

# %% [markdown] tags=["hint"]
# `push` and `use` are enough to write `free`: first make sure that what is in use is wanted, then drop the rest.


# %% tags=["wrong"]
# FAIL: use(0) must bring back the zeros that push saw: keep copies
# MISTAKE: The tensors are kept, not copies, and the next step changes them.
class MyStash(MyStash):
    def push(self):
        self.kept[self.used] = [p.data for p in self.parameters]


# %% tags=["wrong"]
# FAIL: Version 2 is lost. Exchange what is in use and what is kept
# MISTAKE: The version in use is overwritten and not kept.
class MyStash(MyStash):
    def use(self, version):
        if version != self.used:
            for p, value in zip(self.parameters, self.kept.pop(version), strict=True):
                p.data.copy_(value)
            lost = [torch.zeros_like(p.data) for p in self.parameters]
            self.kept[self.used], self.used = lost, version


# %% tags=["wrong"]
# FAIL: A version is there twice
# MISTAKE: A version that is put in use stays among the kept ones: it is there twice.
class MyStash(MyStash):
    def use(self, version):
        if version != self.used:
            self.push()
            for p, value in zip(self.parameters, self.kept[version], strict=True):
                p.data.copy_(value)
            self.used = version


# %% tags=["wrong"]
# FAIL: free() forgets nothing: version 1 is no longer wanted
# MISTAKE: Nothing is forgotten, so memory grows.
class MyStash(MyStash):
    def free(self, wanted):
        pass


# %% tags=["wrong"]
# FAIL: Version 0 is freed while it is in use: the newest must take its place
# MISTAKE: The version in use is forgotten, though nobody wants it any more.
class MyStash(MyStash):
    def free(self, wanted):
        self.kept = {v: values for v, values in self.kept.items() if v in wanted}


# %% tags=["wrong"]
# FAIL: After two pushes versions 0, 1 and 2 are there
# MISTAKE: A version is kept under the number of the next one.
class MyStash(MyStash):
    def push(self):
        self.kept[self.used + 1] = [p.data.clone() for p in self.parameters]


# %% tags=["wrong"]
# FAIL: are closed here
# MISTAKE: The package's stash does the work.
class MyStash(Stash):
    def push(self):
        super().push()

    def use(self, version):
        super().use(version)

    def free(self, wanted):
        super().free(wanted)


# %% tags=["wrong"]
# FAIL: The newest of those that are wanted takes the place of what was in use
# MISTAKE: The oldest wanted version takes the place of the one in use.
class MyStash(Stash):
    def push(self):
        self.kept[self.used] = [p.data.clone() for p in self.parameters]

    def use(self, version):
        if version != self.used:
            values = self.kept.pop(version)
            self.push()
            for p, value in zip(self.parameters, values, strict=True):
                p.data.copy_(value)
            self.used = version

    def free(self, wanted):
        if self.used not in wanted:
            self.use(min(wanted))
        self.kept = {v: x for v, x in self.kept.items() if v in wanted}


# %% [markdown]
# ## On live ranks
#
# The engine follows the table: before each operation it *uses* the version that the table says, after the last
# backward of a batch the stage finishes its gradient, clips it, and updates.

# %%
show_source(Asynchronous._update)

# %%
found = {}
for scheme, micro in (("ampnet", 1), ("pipedream", 1), ("pipedream_vertical", 1), ("2bw", 4)):
    found[scheme] = pool.run(trained, f"pp=4,micro={micro},schedule={scheme}", 8)
show(
    plots.kept({scheme: [record for record, *_ in ranks] for scheme, ranks in found.items()}),
    "counted",
    "versions that four live stages hold after each of their operations, eight batches (lines are shifted a little).",
    "Four panels of step lines: always 1; 4, 3, 2, 1 by stage; 4 for all; 2 for all",
)

# %% [markdown]
# Two questions that every stage must answer alone:
#
# - **The tied embedding.** The first stage owns it. The last one sends its gradient there, and before it runs a
#   micro-batch it pulls the version that this micro-batch met on the first stage. The price, each way and update: all
#   of it, in GPT-2 50,257 x 768 x 4 bytes = 154 MB.
# - **Clipping.** The norm of the whole gradient is known to nobody in time. Each stage clips by its own.
#
# A plan in which the question has no answer is refused:

# %%
for text in (
    "pp=2,dp=2,schedule=pipedream,zero=3",
    "pp=4,micro=2,schedule=2bw",
    "pp=2,schedule=ampnet,recompute=true",
):
    try:
        Plan.parse(text).check(SMALL, 7, 11)
    except ValueError as error:
        print(error)

# %% [markdown]
# The proof: twelve updates on seven rows (which do not divide), against one process that keeps every version of every
# stage and does what the table says, in plain PyTorch.

# %%
print(verify("pp=4,schedule=pipedream", SMALL, ranks=pool))
print(verify("pp=4,schedule=ampnet", SMALL, ranks=pool))
print(verify("pp=2,dp=2,micro=2,schedule=2bw", SMALL, ranks=pool))

# %% [markdown]
# And with only one micro-batch in flight (`active=1`) nothing is stale: the same engine is then serial training.

# %%
stream = make_stream("ampnet", 4, 8, active=1)
print("most updates missed:", max(stream.staleness(op) for op in stream.reads))
print(verify("pp=4,schedule=ampnet,active=1", SMALL, ranks=pool).ok)

# %% [markdown]
# ## A slow stage on two ranks
#
# PipeDream may give a slow stage several ranks. They take the micro-batches *in turn*, add up their gradients when
# each has one, and make the same update: a version for each round. A rank of the first stage starts NOAM = ⌈ranks /
# ranks of the first stage⌉ micro-batches before its first backward.

# %%
recipe = Recipe("sgd", lr=0.05)
rows = []
for stages in ((1, 1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 3), (2, 2)):
    live = pool.run(replicated.train, "pipedream", stages, SMALL, stream_batches, recipe)
    serial = replicated.emulate("pipedream", stages, SMALL, stream_batches, recipe)
    versions_read = [
        read.version == serial.stream.reads[read.op] for *_, record, _ in live for read in record
    ]
    errors = [apart(weights, serial.weights) for _, weights, *_ in live]
    losses, want = sum(of for of, *_ in live), torch.tensor(serial.losses, dtype=torch.float64)
    errors.append(((losses - want).abs().max() / want.abs().max()).item())
    equal = all(versions_read) and max(errors) < 1e-10
    kept = [max(len(read.held) for read in record) for *_, record, _ in live]
    rows.append((str(stages), -(-4 // stages[0]), " ".join(map(str, kept)), "equal" if equal else "DIFFERS"))
table(rows, ["ranks of each stage", "NOAM", "versions kept, rank by rank", "live against the emulator"])

# %% [markdown]
# **A puzzle, with a score.** Ten layers, at most four ranks, PipeDream's order, 16 micro-batches. A rank has room for
# 60 units of weights, every kept version counted. How many layers has each stage, and how many micro-batches
# (`active`) may be in progress? Fewer make fewer versions, and wait. At most 500 units pass.


# %% tags=["exercise"]
def my_stages():
    """(layers of each stage, active); the least time within the room."""
    ### BEGIN SOLUTION
    return [2, 3, 3, 2], 4
    ### END SOLUTION


print("forward:", exercises.TIMES, "weights:", exercises.WEIGHTS)
check("stages within the room", exercises.stages, my_stages)

# %% [markdown] tags=["hint"]
# The first stage keeps the most versions, so its layers are the dearest: with four stages each counts four times. Begin
# with stages that take equally long, and move layers away from the stage that does not fit.


# %% tags=["wrong"]
# FAIL: stage 0 keeps 4 versions of 18 units
# MISTAKE: As many versions as stages, where stage 0 has the largest layers: no room.
def my_stages():
    return [3, 2, 2, 3], 4


# %% tags=["wrong"]
# FAIL: 528 units of time; at most 500 pass
# MISTAKE: One micro-batch less in flight: it fits and waits.
def my_stages():
    return [1, 3, 3, 3], 3


# %% tags=["wrong"]
# FAIL: your stages have 11 layers
# MISTAKE: A layer too many.
def my_stages():
    return [2, 3, 3, 3], 4


# %% tags=["wrong"]
# FAIL: 5 stages need as many ranks
# MISTAKE: A stage too many: there are four ranks.
def my_stages():
    return [2, 2, 2, 2, 2], 4


# %% tags=["wrong"]
# FAIL: active=5: 4 stages have 1 to 4
# MISTAKE: More in flight than there are stages.
def my_stages():
    return [2, 3, 3, 2], 5


# %% tags=["wrong"]
# FAIL: every stage needs a layer
# MISTAKE: A stage without a layer.
def my_stages():
    return [0, 4, 4, 2], 4


# %% tags=["wrong"]
# FAIL: return two things
# MISTAKE: How many are in flight is missing.
def my_stages():
    return [2, 3, 3, 2]


# %% [markdown]
# ## Two buffers are enough
#
# 2BW collects the gradients of m >= p micro-batches for one update, so versions are rare. The whole batch t uses
# version t - 1: by then it is on every stage. $W_{t+1}=W_t-\text{lr}\,\nabla f(W_{t-1})$: a delay of one, the same
# everywhere.


# %% tags=["exercise"]
def update(old, new, gradient, lr):
    """One update of 2BW: from the versions (old, new) to the next two. `gradient(w)` is the batch's gradient at w."""
    ### BEGIN SOLUTION
    return new, new - lr * gradient(old)
    ### END SOLUTION


check("the update of 2BW", exercises.double_buffered, update)

# %% [markdown] tags=["hint"]
# Two things are asked: which of the two versions does the gradient belong to, and which one is changed by it?
# They are not the same, and that is the whole staleness of 2BW.


# %% tags=["wrong"]
# FAIL: Your gradient is at the newest weights: that is a pipeline with a flush. Which does 2BW read?
# MISTAKE: The gradient is taken at the new weights, for which the pipeline would have to be emptied.
def update(old, new, gradient, lr):
    return new, new - lr * gradient(new)


# %% tags=["wrong"]
# FAIL: The gradient is right, but it must be added to the newest weights, not to the old ones
# MISTAKE: The gradient is added to the old weights, so an update is lost.
def update(old, new, gradient, lr):
    return new, old - lr * gradient(old)


# %% tags=["wrong"]
# FAIL: After the update the version before it becomes the old one
# MISTAKE: The old version is handed on again, so it grows older and older.
def update(old, new, gradient, lr):
    return old, new - lr * gradient(old)


# %% tags=["wrong"]
# FAIL: An update needs one gradient, yours computed 2
# MISTAKE: The same gradient is computed twice.
def update(old, new, gradient, lr):
    return new, new - lr * (gradient(old) + gradient(old)) / 2


# %% tags=["wrong"]
# FAIL: Return two versions, (old, new); yours has 3
# MISTAKE: A third version is kept.
def update(old, new, gradient, lr):
    return old, new, new - lr * gradient(old)


# %% tags=["wrong"]
# FAIL: The version before it is a tensor of its own: change nothing in place
# MISTAKE: The new version is made in place, so that the old one is the same tensor.
def update(old, new, gradient, lr):
    g = gradient(old)
    old = new
    new -= lr * g
    return old, new


# %% tags=["wrong"]
# FAIL: and another rate
# MISTAKE: The learning rate of one example is written down.
def update(old, new, gradient, lr):
    return new, new - 0.5 * gradient(old)


# %% tags=["wrong"]
# FAIL: Your function writes into a version that it was given, from which a micro-batch may still read
# MISTAKE: The new weights are written into the buffer of the old ones, which others still read.
def update(old, new, gradient, lr):
    made = new - lr * gradient(old)
    if hasattr(old, "copy_"):
        old.copy_(made)
    return new, made


# %% [markdown]
# ## What it costs in learning
#
# A small GPT-2 learns Shakespeare's letters, four stages, 200 batches, three learning rates, three seeds (of
# weights and batches). Upper row: loss by data; lower: by time, where a batch with a flush (m = 4) takes 1 + 3/4 of a
# batch without. Recorded by `python -m gpt2lab.lessons.labs.staleness`; the first 20 batches run again here.

# %%
recorded = json.loads(staleness.RECORD.read_text())
losses = {tuple(run): seeds for *run, seeds in recorded["losses"]}  # run: scheme, rate, warm-up
times_by_micros = dict(recorded["times"])
times = times_by_micros[4]
show(
    plots.curves(losses, times, recorded["every"]),
    "computed",
    "by the emulators that live ranks equal; means over ten batches and three seeds, bands from the least seed to the "
    "largest; time simulated, without messages.",
    "Loss curves of four schemes at three rates: by data 1F1B is lowest; by time the curves are close together",
)


def several(rank, world_size, runs):
    return {run: staleness.losses(*run, updates=20) for run in runs[rank::world_size]}


short, again = [(scheme, 0.4, 0, 0) for scheme in times], {}
for part in pool.run(several, short):
    again |= part
same = all(abs(sum(again[run][:10]) / 10 - losses[run[:3]][0][0]) < 1e-3 for run in short)
print("the recorded curves begin as the runs of this minute do:", same)

# %%
show(
    plots.tradeoff(losses, times),
    "computed",
    "right is busier, low has learnt more (three dots: seeds): no scheme is in the lower right corner.",
    "Three panels of dots: 1F1B busy 57 % with the least loss, the others busy 99 % with more",
)


# %%
def ahead_of_1f1b(scheme, rate, micros, until):
    """Its loss minus 1F1B's after so much time, means of 30 batches: the least and the most of the seeds."""
    gaps = []
    for seed in staleness.SEEDS:
        mine, other = (
            sum(losses[name, rate, 0][seed][end - 3 : end]) / 3
            for name in (scheme, "1f1b")
            for end in [int(until / times_by_micros[micros][name]) // recorded["every"]]
        )
        gaps.append(mine - other)
    return f"{min(gaps):+.2f} to {max(gaps):+.2f}"


rows = [
    (until, micros, scheme, *(ahead_of_1f1b(scheme, rate, micros, until) for rate in staleness.RATES))
    for until, schemes in ((100, ["2bw"]), (200, ["2bw", "pipedream", "ampnet"]))
    for scheme in schemes
    for micros in times_by_micros
]
rates = (f"loss minus 1F1B's, rate {rate}" for rate in staleness.RATES)
table(rows, ["time", "micro-batches of 1F1B", "scheme", *rates])

# %% [markdown]
# At equal *data* the flush ends lowest, at every rate and in every seed: staleness costs. At equal *time* it depends
# on m. With m = p = 4 the flush costs most: 2BW is ahead in all seeds at the smallest rate, at time 100 with m = 8
# too, nowhere else. With 8 or 16 micro-batches 1F1B is ahead of all at time 200, at every rate and in every seed. A
# warm-up (triangle: the rate rises over 100 batches) does not help 2BW at the largest rate.
#
# ## Bug lab: no stash, and a curve that looks fine
#
# Someone "simplifies" PipeDream: no stash. That is AMPNet, and at the smallest rate its curve lies on PipeDream's:

# %%
mixed, right = losses["ampnet", 0.1, 0], losses["pipedream", 0.1, 0]
pairs = [pair for seeds in zip(mixed, right, strict=True) for pair in zip(*seeds, strict=True)]
gap = max(abs(a - b) for a, b in pairs)
print(f"largest gap between the two loss curves, three seeds: {gap:.3f} of {right[0][0]:.2f}")

# %% [markdown]
# A gap of 0.015<!--above--> in a loss of 4.57<!--above-->: nobody sees it. Only a comparison of *gradients* or
# *versions* tells.

# %%
guess = predict(
    "Which bug changes no loss?", "newest always", "stashed too late", "never freed", "head silent"
)


# %%
def newest_always(right):
    return lambda self, version: right(self, max(self.versions))


def stashed_too_late(right):
    def late(self, stash, version, wanted, update):
        right(self, stash, version, frozenset(), update)
        if version - 1 in wanted:
            stash.kept[version - 1] = [p.data.clone() for p in stash.parameters]

    return late


def never_freed(right):
    return lambda self, wanted: None


def head_silent(right):
    def tie(self, pieces, mesh):
        for piece in pieces:
            if piece.spec.tied_copy:
                piece.tensor.grad.zero_()
        right(self, pieces, mesh)

    return tie


bugs = {
    newest_always: (Stash, "use"),
    stashed_too_late: (Asynchronous, "_update"),
    never_freed: (Stash, "free"),
    head_silent: (Asynchronous, "tie"),
}
silent = []
for bug, where in bugs.items():
    claims = worst(pool.run(compared_with_bug, *where, bug, "pp=4,schedule=pipedream"))
    differ = "; ".join(c.name for c in claims if c.error > 1e-10)
    print(f"{bug.__name__:17}", differ)
    silent += [bug.__name__.replace("_", " ")] * ("losses" not in differ)
guess.beside(", ".join(silent), "computed")

# %% [markdown]
# ## The table, by counters
#
# Four stages. Versions and activations are the most that live ranks held; utilisation is simulated for 12
# micro-batches (backward twice a forward).


# %%
semantics = {
    "gpipe": "serial",
    "1f1b": "serial",
    "ampnet": "of no single weights",
    "pipedream": "f(w1(t-3), ..., w4(t))",
    "pipedream_vertical": "f(W(t-3))",
    "2bw": "f(W(t-1))",
}
rows = []
for name, meaning in semantics.items():
    ranks = found.get(name) or pool.run(trained, f"pp=4,micro=4,schedule={name}", 1)
    kept = [max((len(read.held) for read in record), default=1) for record, *_ in ranks]
    order = free_running(4, 12) if name in found else make(name, 4, 4)
    numbers = (" ".join(map(str, n)) for n in (kept, [held for _, held, _ in ranks]))
    rows.append((name, f"{float(1 - simulate(order, times_of_ops).bubble):.0%}", *numbers, meaning))
table(rows, ["schedule", "busy", "versions, stages 0-3", "activations", "the gradient is that of"])

# %% [markdown]
# (GPipe and 1F1B: batches of four micro-batches, a flush after each. The 2BW paper calls this 1F1B PipeDream-Flush.)
#
# ## Servers that do not wait
#
# (A second sitting may begin here.)
#
# The same question in data parallelism. Lesson 04's parameter server waited for all workers: *bulk synchronous*, BSP.
# If it applies each gradient on arrival, nobody waits for the slow one: *asynchronous*, ASP; the gradient may be old
# by as many updates as others made meanwhile. *Stale synchronous*, SSP (Ho et al. 2013), lies between: a worker may
# start its next step only while it is at most s steps ahead of the slowest. Write the rule.


# %% tags=["exercise"]
def may_start(clock, slowest, bound):
    """Whether a worker that has done `clock` steps may start the next, when the slowest has done `slowest`; `bound`
    None: no bound.
    """
    ### BEGIN SOLUTION
    return bound is None or clock - slowest <= bound
    ### END SOLUTION


check("stale synchronous", exercises.bounded, may_start)

# %% [markdown] tags=["hint"]
# A worker that may start although it is s ahead will then be s + 1 ahead when it is done. Try bound 0: who may start
# when nobody has done anything?


# %% tags=["wrong"]
# FAIL: Nobody would ever start, a deadlock
# MISTAKE: Less than the bound is demanded: with bound 0 nobody starts.
def may_start(clock, slowest, bound):
    return bound is None or clock - slowest < bound


# %% tags=["wrong"]
# FAIL: It is 1 ahead and must not start, that is one too many
# MISTAKE: One step too many is allowed.
def may_start(clock, slowest, bound):
    return bound is None or clock - slowest <= bound + 1


# %% tags=["wrong"]
# FAIL: Without a bound nobody waits
# MISTAKE: No bound is taken for the bound 0.
def may_start(clock, slowest, bound):
    return clock - slowest <= (bound or 0)


# %% tags=["wrong"]
# FAIL: It is 5 ahead and must not start
# MISTAKE: Nobody ever waits.
def may_start(clock, slowest, bound):
    return True


# %% tags=["wrong"]
# FAIL: It is 1 ahead and must start
# MISTAKE: The worker's own steps are compared with the bound, not its lead.
def may_start(clock, slowest, bound):
    return bound is None or clock <= bound or clock == slowest


# %% tags=["wrong"]
# FAIL: knows the answer
# MISTAKE: The package's rule is called.
def may_start(clock, slowest, bound):
    return servers.may_start(clock, slowest, bound)


# %% tags=["wrong"]
# FAIL: bound 2: a worker
# MISTAKE: Only the bounds of the examples are known; any other is taken for none.
def may_start(clock, slowest, bound):
    return bound not in (0, 1, 3) or clock - slowest <= bound


# %% [markdown]
# Three workers, one of them four times slower, one server; who arrives when follows from a seed. Live ranks pull,
# compute GPT-2's gradient and push. The server writes a log: whose gradient, read at which version, applied as which
# update. (Missed: those between pull and push, but not of the same step, which a serial step lacks too.)

# %%
batches = [example_batch(SMALL, 7, 11, t) for t in range(8)]
logs, rows = {}, []
for name, bound in (("BSP", 0), ("SSP, s = 2", 2), ("ASP", None)):
    events = servers.arrivals([1.0, 1.0, 4.0], len(batches), bound, seed=1)
    (weights, log, _), *_ = pool.run(servers.serve, 1, SMALL, batches, events, 0.05)
    again = pool.run(lambda *_, log=log: servers.replay(SMALL, batches, log, 3, 0.05)[-1])
    fast = max(e.time for e in events if e.worker == 0)
    same = "the same bits" if torch.equal(weights, again[0]) else "DIFFERS"
    logs[name] = [sum(other.clock != one.clock for other in log[one.read : one.update]) for one in log]
    done = [[sum(other.worker == w for other in log[: one.read]) for w in range(3)] for one in log]
    ahead = max(one.clock - min(steps) for one, steps in zip(log, done, strict=True))
    most = [
        max(n for n, one in zip(logs[name], log, strict=True) if one.worker in who) for who in ((0, 1), (2,))
    ]
    rows.append((name, round(fast, 1), *most, ahead, same))
    if bound == 0:
        model = GPT2(SMALL).double()
        at = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        for batch in batches:
            at = at - 0.05 * servers.rows_gradient(model, at, batch)
        serial = torch.allclose(weights, at, rtol=0, atol=1e-12)
missed = "most updates that a fast worker's gradient missed", "the slow one's"
table(rows, ["rule", "a fast worker is done at", *missed, "most steps ahead", "replay"])
print("BSP equals serial SGD on the whole batches:", serial)

# %% [markdown]
# Free of waiting, the fast worker is done at 7.8<!--above--> instead of 28.7<!--above-->. Its gradients missed up to
# 2<!--above--> updates, the slow one's 8<!--above-->.

# %%
show(
    plots.staleness(logs),
    "computed",
    "how many updates each gradient had missed when it was applied, by the seed's order, which the servers followed.",
    "Three bar charts: only 0 for BSP, more for SSP, most for ASP",
)

# %% [markdown]
# What is it worth? The letters from above, 40 steps of three workers, one four times slower; three seeds.

# %%
race = {}
for name, bound in (("BSP", 0), ("SSP, s = 2", 2), ("ASP", None)):
    race[name] = []
    for seed in range(3):
        events = servers.arrivals([1.0, 1.0, 4.0], 40, bound, seed)
        data, test = staleness.letter_batches(40, seed=seed), staleness.letter_batches(1, seed=99)[0]
        model = GPT2(staleness.LETTERS, seed).double()
        read, log, loss = {}, [], []
        for event in events:
            if event.kind == "pull":
                read[event.worker] = len(log)
            else:
                log.append(servers.Applied(event.worker, event.clock, read[event.worker], len(log)))
        for weights in servers.replay(staleness.LETTERS, data, log, 3, 0.4, model)[::6]:
            torch.nn.utils.vector_to_parameters(weights, model.parameters())
            with torch.no_grad():
                loss.append(model.loss(model(test.tokens), test.targets).item() / test.total)
        race[name].append(([0.0, *(e.time for e in events if e.kind == "push")][::6], loss))
show(
    plots.loss_by_rule(race),
    "computed",
    "the loss on unseen text by updates and by the simulated time; lines are means of three seeds, bands their range.",
    "Two panels of three falling curves with bands, by updates and by time",
)

# %% [markdown]
# By updates the three are alike here, by time ASP leads. Now in real time, *paced*: the workers sleep, the slow one
# four times as long; *two* servers hold half of the weights each, and still take gradients in the seed's order.

# %% tags=["measured"]
for name, bound in (("BSP", 0), ("SSP, s = 2", 2), ("ASP", None)):
    events = servers.arrivals([1.0, 4.0], 5, bound, seed=1)
    halves = pool.run(servers.serve, 2, SMALL, batches, events, 0.05, 0.05)
    fast, slow = (seconds for seconds, *_ in halves[2:])
    print(f"{name:11} fast worker done after {fast:.2f} s, slow one after {slow:.2f} s")

# %%
weights, log = torch.cat([part for part, *_ in halves[:2]]), halves[0][1]
print(
    "replayed to the same bits:",
    torch.equal(weights, pool.run(lambda *_: servers.replay(SMALL, batches, log, 2, 0.05)[-1])[0]),
)

# %% [markdown]
# ## The modern cousin: meet every H steps
#
# DiLoCo (Douillard et al. 2023) trains replicas that do not talk at all for H steps of AdamW. Then they average
# how far they went and take one step of Nesterov along it: H times fewer bytes, and fewer yet in lesson 04's coded
# messages ([Streaming DiLoCo](https://arxiv.org/abs/2501.18512)). Live, beside a loop over replicas in one process:

# %%
batches = [example_batch(SMALL, 8, 11, t) for t in range(8)]
rows, start = [], local_sgd.flat(GPT2(SMALL).double())
for ranks in (2, 4):
    with Ranks(ranks) as replicas:
        for every, code in ((1, ""), (4, ""), (4, "int8"), (4, "2 bits")):
            coded = partial(CodedSum(CODES[code], True), "differences") if code else comm.all_reduce
            (weights, _, traffic), *_ = replicas.run(local_sgd.train, SMALL, batches, every, summed=coded)
            want, _ = local_sgd.emulate(SMALL, batches, ranks, every)
            size = sum(size for _, size, _ in traffic.values()) // 1024
            off = (weights - want).norm() / (want - start).norm()
            rows.append(
                (ranks, every, code or "float64", size, "equal" if off < 1e-10 else f"off by {off:.1%}")
            )
table(rows, ["replicas", "H", "sums of", "KiB sent by a rank", "way of the weights, against the emulator"])

# %% [markdown]
# (Weights that never moved are off by 100 %.)
#
# ## What is used today
#
# The flush won. Interleaving and zero bubble (lesson 08) took most of the bubble away without touching the
# mathematics; versions cost memory that large models do not have, and checking a run takes an emulator with every
# version of every stage. Remedies were tried: a rate that falls with the delay (PipeMare), weights predicted
# ahead (SpecTrain, XPipe). Staleness lives on where waiting is expensive: between data centres (local SGD,
# DiLoCo), and in reinforcement learning, where samplers use weights that are a few versions old.
#
# For a checkpoint the pipeline is *drained* first.

# %%
pool.close()

# %% [markdown]
# ## Drill
#
# <details><summary>1. PipeDream, 8 stages: how many versions does stage 2 keep, and how many with four micro-batches
# an update?</summary>8 - 2 = 6; 1 + ⌈5 / 4⌉ = 3.</details>
# <details><summary>2. Which stage's gradient is never stale in PipeDream?</summary>
# None: the last one's own weights are up to date, but its input was computed with old weights.</details>
# <details><summary>3. Why does 2BW need m >= p?</summary>
# Batch t needs version t - 1 on stage 0, made by backward (t - 1) m - 1; forward t m runs after backward t m - p.
# So m = p - 1 would do in this order. The paper, and our plans, ask for p.</details>
# <details><summary>4. What is SSP with s = 0?</summary>
# Bulk synchronous: nobody starts before all are done.</details>
#
# ## Read on
#
# - Gaunt et al. 2017, *AMPNet*: the freest pipeline, made for models that differ from sample to sample.
# - Narayanan et al. 2019, *PipeDream*: where stashing comes from.
# - Narayanan et al. 2021, *Memory-Efficient Pipeline-Parallel DNN Training*: why two versions are enough.
# - Ho et al. 2013, *More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server*: why a bound on
#   staleness is enough to converge.
# - Douillard et al. 2023, *DiLoCo*: local steps between rare sums.
#
# **Next**: [10 Splitting the sequence](10_sequence_splitting.ipynb).
