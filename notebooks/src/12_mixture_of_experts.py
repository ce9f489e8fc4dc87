# %% [markdown]
# # 12 Mixture of experts
#
# **The one-minute version.** Replace the MLP of a layer by E of them, the *experts*, and let a small *router* send
# each token to k. There are E times the MLP weights, but a token costs only k MLPs. Three things follow. The
# experts must share the work (*balance*). An expert with too much work may refuse some
# (*capacity*, *drops*). And the experts need not live on one rank: give each rank some, and send the tokens to
# them by **all-to-all**, there and back. That is expert parallelism, the word `ep` of a plan; it divides `dp`.

# %% tags=["setup"]
from dataclasses import replace

import torch

from gpt2lab import launch
from gpt2lab.experts.mixture import Experts, Mixture, looped, mixtures
from gpt2lab.lessons import explore, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import experts as exercises
from gpt2lab.lessons.labs import copies
from gpt2lab.lessons.labs import experts as lab
from gpt2lab.lessons.labs.instruments import built
from gpt2lab.machine.checksum import summ
from gpt2lab.plots import experts as plots
from gpt2lab.plots.timeline import timeline
from gpt2lab.ranks import comm, trace
from gpt2lab.reference import CONFIG, EXPERTS, example_batch
from gpt2lab.train import Trainer
from gpt2lab.verify import verify

# %% tags=["setup"]
torch.set_num_threads(1)

# %% [markdown]
# On two live ranks, four of eight experts each:

# %%
print(verify("dp=2,ep=2"))

# %%
show(
    plots.flow(),
    "drawing",
    "tokens of two ranks (colours), each with k = 2 of four experts, two a rank; orange crosses between the ranks.",
    "Tokens at the left, experts in the middle, tokens at the right; arrows show each token's way there and back",
)

# %% [markdown]
# ## One rank: a loop, then rows
#
# Of x (N, C), N tokens, the router makes a score for every expert: softmax(x W). *Mixtral*'s rule: the k largest
# count, divided by their sum. The plainest program lets every expert compute every token and multiplies most
# results by zero.


# %%
def plain(x, router, experts, k):
    p = (x @ router.T).softmax(-1)  # (N, E)
    best = p.topk(k, -1)
    weights = torch.zeros_like(p).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    return sum(weights[:, e, None] * expert(x) for e, expert in enumerate(experts))


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
config = replace(CONFIG, experts=Experts(8, 2, balance=0.0))
moe, x = Mixture(config, 0), torch.randn(3, 11, 24)
by_hand = plain(x.flatten(0, 1), moe.router.weight, moe.experts.values(), 2).view_as(x)
print("plain loop equals the package:", torch.allclose(by_hand, moe(x), rtol=0, atol=1e-12))
print("and the package's own loop:   ", torch.allclose(looped(moe, x), moe(x), rtol=0, atol=1e-12))

# %% [markdown]
# That is E / k times the work needed. So *sort* all pairs (token, expert) by expert, and do one product an expert on
# consecutive rows: the *grouped* form, on GPUs a *grouped GEMM*. Two functions surround it, adjoint but for weights:
# **dispatch** copies each token to its rows, so in backward a token's gradients add up; **combine** adds up rows times
# weights. Here autograd finds their backward; the package derives it by hand.


# %%
def grouped(x, router, experts, k):
    p = (x @ router.T).softmax(-1)
    best = p.topk(k, -1)
    weights = (best.values / best.values.sum(-1, keepdim=True)).flatten()
    order = best.indices.flatten().argsort(stable=True)  # pairs, sorted by expert
    token, counts = order // k, torch.bincount(best.indices.flatten(), minlength=len(experts))
    rows = x[token]  # dispatch: (M, C), M = N k
    parts = zip(experts, rows.split(counts.tolist()), strict=True)
    rows = torch.cat([expert(part) for expert, part in parts])
    combined = torch.zeros_like(x).index_add(0, token, rows * weights[order][:, None])  # (N, C)
    return combined, counts


y, counts = grouped(x.flatten(0, 1), moe.router.weight, moe.experts.values(), 2)
print("grouped equals the loop:", torch.allclose(y.view_as(x), by_hand, rtol=0, atol=1e-12))
print("rows of each expert:", counts.tolist(), "sum", int(counts.sum()), "= 33 tokens x 2")

# %% [markdown]
# PyTorch has these products as one call:

# %%
many, rows = torch.randn(8, 24, 96).float(), torch.randn(66, 24).float()  # (E, C, H), (M, C)
ends = counts.cumsum(0).to(torch.int32)
together = torch.nn.functional.grouped_mm(rows, many, offs=ends)
apart = torch.cat([part @ many[e] for e, part in enumerate(rows.split(counts.tolist()))])
print("grouped_mm equals one product an expert:", torch.allclose(together, apart))

# %% [markdown]
# ### Exercise: the backward of combine
#
# y[token] += weight * row, for every row. Given the gradient of y (N, C), what are those of rows (M, C) and of
# weights (M,)? The second teaches the router.


# %% tags=["exercise"]
def combine_backward(grad, rows, weights, token):
    """(gradient of rows, gradient of weights)."""
    ### BEGIN SOLUTION
    grad = grad[token]
    return grad * weights[:, None], (grad * rows).sum(-1)
    ### END SOLUTION


check("combine_backward", exercises.combine_backward, combine_backward)


# %% [markdown] tags=["hint"]
# Each row has met one token: fetch that token's gradient for it first. Then it is the backward of a product of a
# number with a vector.


# %% tags=["wrong"]
# FAIL: What was its weight?
# MISTAKE: The weight of a row is forgotten in its gradient.
def combine_backward(grad, rows, weights, token):
    return grad[token], (grad[token] * rows).sum(-1)


# %% tags=["wrong"]
# FAIL: A weight is one number, and so is its gradient
# MISTAKE: The gradient of a weight is left as a row, where it is one number.
def combine_backward(grad, rows, weights, token):
    return grad[token] * weights[:, None], grad[token] * rows


# %% tags=["wrong"]
# FAIL: a row times its token's gradient
# MISTAKE: The gradient of a weight is taken without the row that it multiplies.
def combine_backward(grad, rows, weights, token):
    return grad[token] * weights[:, None], grad[token].sum(-1)


# %% tags=["wrong"]
# FAIL: A row has a gradient of its own, also where two rows have one token
# MISTAKE: The gradient of tokens is returned for that of rows.
def combine_backward(grad, rows, weights, token):
    return grad, (grad[token] * rows).sum(-1)


# %% tags=["wrong"]
# FAIL: the gradient of the rows
# MISTAKE: Weights are put through a softmax a second time.
def combine_backward(grad, rows, weights, token):
    return grad[token] * weights.softmax(0)[:, None], (grad[token] * rows).sum(-1)


# %% tags=["wrong"]
# FAIL: autograd would give this in one call
# MISTAKE: autograd gives the gradients: right, but not derived by hand.
def combine_backward(grad, rows, weights, token):
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    y = torch.zeros_like(grad).index_add(0, token, rows * weights[:, None])
    return torch.autograd.grad(y, (rows, weights), grad)


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: Rows are taken to have three features.
def combine_backward(grad, rows, weights, token):
    g = grad[token]
    return g * weights[:, None], sum(g[:, i] * rows[:, i] for i in range(min(3, rows.shape[1])))


# %% [markdown]
# ## Who chooses, and who gets room
#
# | router | a token's experts | weight |
# |---|---|---|
# | Switch (2021) | the best one | its probability |
# | GShard (2020) | the best two; the second may be asked by chance only | divided by their sum |
# | Mixtral (2024) | the best k | divided by their sum |
# | expert choice (2022) | every *expert* takes its best tokens | the probability |
# | DeepSeek-V3 (2024) | the best k of sigmoid + bias | sigmoids divided by their sum, without bias |
#
# A buffer of fixed size wants a **capacity**: an expert takes ceil(k S / E * factor) of a group of S tokens. First
# choices come first, then second ones, each in the order of the tokens. What finds no room is *dropped*: a token that
# loses all choices keeps its residual alone. *Dropless* programs (MegaBlocks, and ours without `capacity`) work with
# uneven counts instead.
#
# Expert choice is balanced by construction, but looks at later tokens: such a model cannot generate.
#
# Six tokens, four experts, k = 2. A factor of 1 gives each expert room for three choices:

# %%
asked = [(0, 1), (0, 2), (0, 1), (0, 3), (1, 0), (2, 1)]
show(
    plots.room(asked, experts=4, room=3),
    "drawing",
    "first and second choices in the order in which they are let in; hatched: no room, dropped. Tokens 3, 4 "
    "and 5 lose one of two choices, and nobody both.",
    "A grid of experts against twelve choices: expert 0 drops the fourth first choice and a second one, "
    "expert 1 a second one",
)

# %% [markdown]
# ### Exercise: top-2 with room
#
# A token's best two experts, best first; their weights (divided by their sum, with room or without); who finds room.


# %% tags=["exercise"]
def gate(p, room):
    """Of scores p (N, E): experts (N, 2), weights (N, 2) and which choices find room, kept (N, 2)."""
    ### BEGIN SOLUTION
    best = p.topk(2, -1)
    weights = best.values / best.values.sum(-1, keepdim=True)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))  # (N, 2, E)
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, weights, place < room
    ### END SOLUTION


check("gate", exercises.gating, gate)


# %% tags=["wrong"]
# FAIL: finds no room at its first expert, but at its second
# MISTAKE: A token whose first choice is full is not let in at its second one.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    kept = ((one.cumsum(0) - one + before) * one).sum(-1) < room
    return best.indices, best.values / best.values.sum(-1, keepdim=True), kept & kept[:, :1]


# %% tags=["wrong"]
# FAIL: is True or False for each choice
# MISTAKE: Zeros and ones are numbers of places here, not a mask.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), (place < room).long()


# %% [markdown] tags=["hint"]
# A choice finds room if fewer than `room` earlier choices went to the same expert. All first choices are earlier than
# all second ones.

# %% [markdown] tags=["hint"]
# With one row of zeros and a single 1 for each choice, `cumsum` over the tokens counts the earlier ones. Subtract the
# choice itself, and add all first choices to the second ones.


# %% tags=["wrong"]
# FAIL: has room for
# MISTAKE: One more than the room is let in: <= for <.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), place <= room


# %% tags=["wrong"]
# FAIL: dropping must not change them
# MISTAKE: Weights of the two best are not made to sum to one.
def gate(p, room):
    best = p.topk(2, -1)
    return best.indices, best.values, torch.ones_like(best.indices, dtype=torch.bool)


# %% tags=["wrong"]
# FAIL: first choices go first
# MISTAKE: Token after token is let in, where all first choices go before second ones.
def gate(p, room):
    best = p.topk(2, -1)
    flat = torch.nn.functional.one_hot(best.indices.flatten(), p.size(1))
    place = ((flat.cumsum(0) - flat) * flat).sum(-1).view_as(best.indices)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), place < room


# %% tags=["wrong"]
# FAIL: choices fit
# MISTAKE: One less than the room is let in.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), place < room - 1


# %% tags=["wrong"]
# FAIL: should ask for experts
# MISTAKE: The two worst experts are asked.
def gate(p, room):
    worst = p.topk(2, -1, largest=False)
    weights = worst.values / worst.values.sum(-1, keepdim=True)
    return worst.indices, weights, torch.ones_like(worst.indices, dtype=torch.bool)


# %% tags=["wrong"]
# FAIL: and the router cannot learn
# MISTAKE: The scores are detached, so no gradient comes back to the router.
def gate(p, room):
    p = p.detach()
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), place < room


# %% tags=["wrong"]
# FAIL: experts are whole numbers
# MISTAKE: Numbers of experts come as floats, by which nothing can be looked up.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, p.size(1))
    before = torch.stack([torch.zeros(p.size(1), dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices.double(), best.values / best.values.sum(-1, keepdim=True), place < room


# %% tags=["wrong"]
# FAIL: (a drawn case
# MISTAKE: There are taken to be eight experts at most.
def gate(p, room):
    best = p.topk(2, -1)
    one = torch.nn.functional.one_hot(best.indices, 8)
    before = torch.stack([torch.zeros(8, dtype=torch.long), one[:, 0].sum(0)])
    place = ((one.cumsum(0) - one + before) * one).sum(-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True), place < room


# %% [markdown]
# ## Balance
#
# A router that learns only from the loss prefers experts that are already good.
#
# - A **load loss**, E sum_e f_e p_e: f_e is expert e's share of the choices (a count, no gradient), p_e its mean
#   probability. It is 1 when all are even.
# - A **bias** of each expert, added to its score for choosing only. After each step it moves by a fixed speed, down
#   where the expert had too much. No loss, no gradient of the router. (DeepSeek-V3 keeps a very small load loss too,
#   within each sequence.)
#
# Both are sums over tokens: sum everywhere, divide once. The bias is a parameter whose *gradient* is the excess
# load, so buckets, ZeRO and checkpoints carry it.
#
# Serial runs of 200 steps on letters of Shakespeare, eight experts, k = 2, three seeds each.

# %% tags=["measured"]
torch.set_default_dtype(torch.float32)
ways = {
    "nothing": Experts(8, 2, balance=0.0, hidden=64),
    "load loss": Experts(8, 2, balance=0.02, hidden=64),
    "bias": Experts(8, 2, "deepseek", balance=0.0, speed=0.01, hidden=64),
}
seeds = (0, 1, 2)
trained = lab.train_all([(way, seed) for way in ways.values() for seed in seeds])
runs = {name: trained[3 * i : 3 * i + 3] for i, name in enumerate(ways)}
for name, three in runs.items():
    last = [run.shares[-20:].mean(0) * 8 for run in three]  # 1: an even share
    print(f"{name:10} busiest above 2 even shares: {[bool(s.max() > 2) for s in last]}", end=", ")
    print(f"laziest below 0.5: {[bool(s.min() < 0.5) for s in last]}")

# %%
show(
    plots.loads({name: three[0].shares for name, three in runs.items()}),
    "counted",
    "experts' shares of the choices in the last layer, stacked, a running mean over 10 steps, seed 0. Without balance "
    "two experts soon take all: one half each, the most at k = 2.",
    "Three panels of eight stacked bands: without balance two fill the panel and six vanish at first; "
    "with the bias all come to the same height",
)

# %% [markdown]
# What does an expert learn? In 512 *lines* of 50 held-out letters, how often does the letter alone, or the line alone,
# tell the expert that the letter asks for first?


# %% tags=["measured"]
def guessed(expert, known):
    """How often the commonest expert of each known value is right."""
    pairs = torch.stack([known.flatten(), expert.flatten()])
    (values, _), counts = pairs.unique(dim=1, return_counts=True)
    return sum(counts[values == v].max() for v in values.unique()) / counts.sum()


text = torch.tensor(lab.letters(225_600)[200_000:]).view(512, 50).long()  # (lines, letters of a line)
line = torch.arange(512)[:, None].expand_as(text)
models = {"before training": [lab.train(ways["load loss"], seed, steps=0) for seed in seeds], **runs}
first = {name: [] for name in models}
for name, three in models.items():
    for run in three:
        note = lambda m, given, seen=first[name]: seen.append(m.route(given[0])[2][..., 0])
        with torch.no_grad(), mixtures(run.model)[-1].register_forward_pre_hook(note):  # of the last layer
            run.model(text)
for name, three in first.items():
    for what, known in (("anything", text * 0), ("the line", line), ("the letter", text)):
        print(f"{name:15} not knowing" if what == "anything" else f"{'':15} knowing", end=" ")
        print(f"{what:10}", *(f"{guessed(experts, known):.0%}" for experts in three))

# %%
show(
    plots.by_letter({name: first[name][0] for name in ("before training", "load loss", "nothing")}, text),
    "counted",
    "of each letter's first choices, the share of each expert, seed 0. With balance an expert takes certain letters.",
    "Three maps of eight experts against letters: pale before training, then a dark box in most columns, "
    "without balance most in one row",
)

# %% [markdown]
# With balance, the letter tells most, the line (its subject) nearly nothing.

# %% [markdown]
# ### Dense or mixture, for equal flops
#
# The mixture has k = 2 experts of width 64 a token: as many products as one dense MLP of width 128, GPT-2's 4 C
# here, and four times the MLP weights. Three seeds of each:

# %%
dense = lab.train_all([(None, seed) for seed in seeds])
mixed = runs["load loss"]
more = replace(lab.LETTERS, experts=ways["load loss"]).parameters
print(f"parameters: dense {lab.LETTERS.parameters:,}, mixture {more:,}")

# %% tags=["measured"]
for name, three in (("dense", dense), ("mixture", mixed)):
    ends = [sum(run.losses[-20:]) / 20 for run in three]
    each = ", ".join(f"{end:.3f}" for end in ends)
    print(f"{name:8} loss of the last 20 steps, by seed: {each}; mean {sum(ends) / 3:.3f}, apart by", end=" ")
    print(f"{max(ends) - min(ends):.3f}")

# %%
show(
    plots.running_losses({"dense": [r.losses for r in dense], "mixture": [r.losses for r in mixed]}, 8 * 64),
    "computed",
    "loss against data, three seeds each, the same products a token. At this size there is no gain: the means differ "
    "less than the seeds. Switch (figure 4) shows one at scale.",
    "Three falling curves of each colour, close together",
)

# %% [markdown]
# ## Experts on other ranks
#
# With n ranks on the axis `ep`, rank r holds experts r E/n to (r+1) E/n - 1 of every mixture. The ranks are neighbours
# on the data axis, so each has its own rows of the batch. All else is data-parallel; only the experts'
# gradients are summed over fewer replicas, dp / ep of them (axis `edp`).
#
# The rows, sorted by expert, are sorted by rank too. So: tell every rank how many rows will come, send the rows,
# compute, send the results back. In backward the same two exchanges run the other way round: all-to-all is its own
# adjoint.
#
# ### Exercise: there and back on live ranks
#
# `comm.all_to_all(parts, axis, shapes)` sends part p to rank p; `shapes` are the shapes that come. Gradients must
# come through. Bytes are counted: rows that stay must not travel, none twice, counts once.


# %% tags=["exercise"]
def there(rows, counts, axis):
    """Rows (M, C) sorted by expert, counts (E,): (the rows that come, table (n, E/n) of how many from each rank)."""
    ### BEGIN SOLUTION
    by_rank = counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table
    ### END SOLUTION


def back(rows, table, counts, axis):
    """What the experts made of the rows that came, to the ranks that sent them, in their order."""
    ### BEGIN SOLUTION
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes))
    ### END SOLUTION


check("there and back", exercises.exchange, there, back)


# %% tags=["wrong"]
# FAIL: are tensors: send them by all_to_all
# MISTAKE: Everything is sent to all as Python objects, past the count of bytes.
def there(rows, counts, axis):
    each, picked, table = len(counts) // axis.size, [], []
    for theirs, n in comm.gather_objects((rows, counts), axis):
        n = n.tolist()
        first = sum(n[: axis.rank * each])
        table.append(n[axis.rank * each :][:each])
        picked.append(theirs[first : first + sum(table[-1])])
    return torch.cat(picked), torch.tensor(table)


# %% tags=["wrong"]
# FAIL: or with fewer digits
# MISTAKE: Rows travel as float32: half the bytes, and half the digits.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    parts = rows.float().split(by_rank.sum(1).tolist())
    return torch.cat(comm.all_to_all(parts, axis, shapes)).double(), table


# %% tags=["wrong"]
# FAIL: 2 parts for 3 ranks
# MISTAKE: Two ranks are taken for granted.
def there(rows, counts, axis):
    by_rank = counts.view(2, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% [markdown] tags=["hint"]
# The counts are one number an expert; `view(axis.size, -1)` makes one row a rank of them, and an all-to-all of these
# rows is the table. Which of its sums say how many rows come, and which how many leave?


# %% tags=["wrong"]
# FAIL: the rows that have to travel are
# MISTAKE: Everything is gathered on every rank, and the own rows picked out.
def there(rows, counts, axis):
    table = comm.all_gather(counts[None], axis)
    sizes = table.sum(1).tolist()
    everybody = comm.all_gather(rows, axis, 0, sizes).split(sizes)
    mine = slice(axis.rank * 2, axis.rank * 2 + 2)
    picked = [r.split(t.tolist())[e] for r, t in zip(everybody, table, strict=True) for e in range(6)[mine]]
    return torch.cat(picked), table[:, mine]


# %% tags=["wrong"]
# FAIL: your table of counts is
# MISTAKE: The table says what leaves, where it should say what comes.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    coming = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in coming.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), by_rank


# %% tags=["wrong"]
# FAIL: should arrive, got
# MISTAKE: Rows are sent in reverse, so experts get the wrong ones.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.flip(0).split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% tags=["wrong"]
# FAIL: should come home
# MISTAKE: Rows that come home are joined in the wrong order.
def back(rows, table, counts, axis):
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes)[::-1])


# %% tags=["wrong"]
# FAIL: does not fit its receiver
# MISTAKE: As many rows are expected as are sent.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in by_rank.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% tags=["wrong"]
# FAIL: with its name only, and not with all that was in it
# MISTAKE: Only the first feature of a row travels as it is; the others are left at zero.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    firsts = rows * torch.tensor([1.0, 0.0, 0.0], dtype=rows.dtype)
    return torch.cat(comm.all_to_all(firsts.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% tags=["wrong"]
# FAIL: they are counted by nobody
# MISTAKE: The counts are also sent one by one, and nobody receives these messages.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    for other in range(axis.size):
        if other != axis.rank:
            comm.isend(by_rank[other].clone(), axis, other)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% tags=["wrong"]
# FAIL: rank 1 starts 1 messages to rank 0 that it never receives
# MISTAKE: Rank 1 also sends its results to rank 0, which does not receive them.
def back(rows, table, counts, axis):
    if axis.rank == 1:
        comm.isend(rows.detach(), axis, 0)
    shapes = [(int(n), rows.size(1)) for n in counts.view(axis.size, -1).sum(1)]
    return torch.cat(comm.all_to_all(rows.split(table.sum(1).tolist()), axis, shapes))


# %% tags=["wrong"]
# FAIL: is invalid for input of size 8
# MISTAKE: The sizes of one example are written down.
def there(rows, counts, axis):
    by_rank = counts.view(3, 2)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), 3) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% tags=["wrong"]
# FAIL: and counts, told once, 32
# MISTAKE: The counts are told twice, and what came first is not read.
def there(rows, counts, axis):
    by_rank = counts.view(axis.size, -1)
    comm.all_to_all(list(by_rank), axis)
    table = torch.stack(comm.all_to_all(list(by_rank), axis))
    shapes = [(int(n), rows.size(1)) for n in table.sum(1)]
    return torch.cat(comm.all_to_all(rows.split(by_rank.sum(1).tolist()), axis, shapes)), table


# %% [markdown]
# The package's version starts the exchange, lets the *shared* expert (which every token passes) compute meanwhile,
# and then waits. In backward `_Wait` starts, the shared expert's
# backward runs, `_Start` waits.

# %%
from gpt2lab.parallel import expert

show_source(expert._Start)
show_source(expert._Wait)

# %% [markdown]
# On live ranks, with a slow link and computing that sleeps. Thin: messages, counts, rows there and back.

# %% tags=["measured"]
spans = trace.merge(launch(lab.beside_shared, ranks=2, echo=False))
for rank in range(2):
    mine = [s for s in spans if s.rank == rank]
    shared = [s for s in mine if s.name == "shared"]
    under_way = [any(m.start < s.start < m.end for m in mine if m.lane == "comm") for s in shared]
    print(
        f"rank {rank}: a message is under way when the shared expert starts, forward and backward: {under_way}"
    )
show(
    timeline(spans, clock="paced"),
    "paced",
    "a mixture with a shared expert on two ranks, forward and backward: rows travel while the shared expert computes.",
    "Two rows of blocks, shared, experts, experts, shared; over the shared ones lies a message",
)

# %% [markdown]
# ### Two hops
#
# Among machines of m ranks, n - 1 messages are many. **Hierarchical**: give the rows for
# position p of *any* machine to position p of your own, then send each machine's together. Every *row* crosses the
# network once, as before, in n/m - 1 messages. The word is `node=m`.


# %%
def leaving(rank, world_size, plan):
    config = replace(lab.SMALL, experts=replace(lab.SMALL.experts, router="expert_choice"))
    parallel = built(plan, config)
    comm.clear_log()
    Trainer(parallel).gradients(example_batch(config, 8, 11))
    calls = [event for event in comm.log if event.axis.startswith("ep")]
    sizes = [n for e in calls for target, n in e.targets if target // 2 != rank // 2]  # to the other machine
    return len(sizes), sum(sizes), summ(torch.cat([g.flatten() for g in parallel.gradients().values()]))


gradients = set()
for plan in ("dp=4,ep=4", "dp=4,ep=4,node=2"):
    messages, size, digests = zip(*launch(leaving, plan, ranks=4, echo=False), strict=True)
    print(f"{plan:17} between two machines of 2 ranks: {sum(messages)} messages, {sum(size):,} bytes")
    gradients.add(digests)
print("gradients equal to the last bit:", len(gradients) == 1)

# %% [markdown]
# Half the messages, 40<!--above--> for 80<!--above-->, and the same bytes; equal to the last bit, since the rows
# arrive in the same order. DeepEP saves bytes too: a *token* whose experts share a machine crosses
# once, and is copied there. 256 experts on eight machines, k = 8, even choices; DeepSeek-V3 lets a
# token ask at most four machines.

# %%
scores = torch.rand(
    10_000, 8, 32, generator=torch.Generator().manual_seed(0)
)  # (tokens, machines, their experts)
for at_most in (8, 4):
    asked = (
        scores.topk(2, -1).values.sum(-1).topk(at_most, -1).indices
    )  # by the two best experts of a machine
    open_to = torch.zeros(10_000, 8).scatter(1, asked, 1.0)[..., None]
    machines = (scores * open_to).flatten(1).topk(8, -1).indices // 32
    away = (machines != 0).sum(1).float().mean()  # the token's own machine is 0
    once = sum((machines == m).any(1).float().mean() for m in range(1, 8))
    print(
        f"at most {at_most} machines: {away:.1f} rows of a token leave, {once:.1f} if each machine gets it once"
    )

# %%
print(verify("dp=4,ep=4,node=2"))

# %% [markdown]
# ### Skewed choices
#
# Four ranks of 256 tokens; expert e is asked for with a weight of 1 / (e + 1)^skew. Who has no room, and which rank
# sends most?


# %%
def spread(experts, top_k, capacity, skew):
    found = lab.routed(experts, top_k, capacity, skew)
    busiest = found.rows.sum(0).max() / found.rows.sum(0).mean()
    title = f"dropped {found.dropped:.0%}; busiest rank {busiest:.2f} even shares"
    return plots.spread(found, 2048, title)


explore(
    spread,
    "computed",
    "{experts} experts on four ranks, k = {top_k}, capacity {capacity:.2f}, skew {skew:.2f}; hatched: dropped. A row "
    "is 1,024 numbers of two bytes.",
    "Bars of choices for {experts} experts, higher at the left, and bars of KiB for four ranks",
    posters=[{}, {"skew": 1.2, "capacity": 3.0}],
    experts=[8, 4, 16, 32],
    top_k=(1, 4, 2),
    capacity=(0.5, 3.0, 1.25),
    skew=(0.0, 2.0, 0.6),
)

# %% [markdown]
# ### The hottest expert twice
#
# A busy expert may have copies, as in DeepSeek's [EPLB](https://github.com/deepseek-ai/EPLB): copies by load, then all
# dealt out anew, the busiest first. Rows are shared out evenly among the copies, whose gradients are summed.

# %%
show_source(copies.dealt)
chance = torch.Generator().manual_seed(0)
x, grad = (torch.randn(8, 32, 24, generator=chance, dtype=torch.float64) for _ in "xg")
x = (x + 1).requires_grad_()  # tokens that have something in common
y = moe(x)
y.backward(grad)
right, rows = {name: p.grad for name, p in moe.named_parameters()}, []
for room, what in ((0, "in order"), (3, "12 places")):
    outputs, grads, load, computed, sent = zip(
        *launch(copies.run, config, moe, x.detach(), grad, room, ranks=4, echo=False), strict=True
    )
    pairs = [(torch.cat(outputs), y), (torch.cat([g.pop("x") for g in grads]), x.grad)]
    pairs += [(g, right[name]) for mine in grads for name, g in mine.items()]
    same = all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)
    busiest = f"{max(computed) / (sum(computed) / 4):.2f}"
    rows.append((what, computed, busiest, same, *(f"{sum(part):,}" for part in zip(*sent, strict=True))))
print("rows of each expert:", *load[0], "; experts of the ranks:", *copies.dealt(load[0], 4, 3))
header = ["experts", "rows of the ranks", "busiest, in even shares", "all equal serial"]
table(rows, [*header, "bytes: weights, once", "rows", "gradients, each step"])

# %% [markdown]
# Sampling has no gradients to sum: there copies are cheap.
#
# **A puzzle, with a score.** A rank has room for three experts, copies or not;
# its rows stay if their expert is at home; else that expert's copies share them evenly. A layer takes a unit for each
# row of the busiest rank, and two for each on the busiest link (one a rank; the larger of the rows that leave and those
# that come counts). In order, without copies, it takes 1,632; at most 900 pass.


# %% tags=["exercise"]
def my_ranks():
    """The experts of each of four ranks: four lists."""
    ### BEGIN SOLUTION
    return [[0, 3, 6], [0, 2, 5], [1, 3, 4], [0, 2, 7]]
    ### END SOLUTION


for rank, asked in enumerate(exercises.ASKED):
    print(f"rows of rank {rank} for experts 0 to 7:", *asked)
check("places of experts", exercises.placed, my_ranks)

# %% [markdown] tags=["hint"]
# Twelve places, eight experts: which four copies help most? An expert that many ranks ask for often wants to be at home
# on several. Begin with the two busiest, then look at which rank computes most and which link is busiest.


# %% tags=["wrong"]
# FAIL: 1632 units of time; at most 900 pass
# MISTAKE: Experts in order, as if all were asked equally often.
def my_ranks():
    return [[0, 1], [2, 3], [4, 5], [6, 7]]


# %% tags=["wrong"]
# FAIL: 1320 units of time; at most 900 pass
# MISTAKE: Every expert once, though the busy ones may stand on several ranks.
def my_ranks():
    return [[0, 3], [1, 5], [2, 4], [6, 7]]


# %% tags=["wrong"]
# FAIL: expert 7 is on no rank
# MISTAKE: An expert stands nowhere.
def my_ranks():
    return [[0, 3, 6], [0, 2, 5], [1, 3, 4], [0, 2, 6]]


# %% tags=["wrong"]
# FAIL: rank 0 has room for 3 experts
# MISTAKE: All experts on every rank: there is no room.
def my_ranks():
    return [list(range(8))] * 4


# %% tags=["wrong"]
# FAIL: expert 0 is twice on rank 1
# MISTAKE: An expert stands twice on one rank.
def my_ranks():
    return [[3, 6, 7], [0, 0, 5], [1, 3, 4], [0, 2, 7]]


# %% tags=["wrong"]
# FAIL: 8 is none of the experts 0 to 7
# MISTAKE: Experts are counted from 1.
def my_ranks():
    return [[1, 2, 3], [4, 5, 6], [7, 8, 1], [2, 3, 4]]


# %% tags=["wrong"]
# FAIL: return four lists of experts
# MISTAKE: The rank of each expert, not the experts of each rank.
def my_ranks():
    return [0, 0, 1, 1, 2, 2, 3, 3]


# %% [markdown]
# ### Exercise: predict the bytes
#
# `rows[i][j]` rows of rank i have their expert on rank j. How many bytes does rank i send in one forward and
# backward of a mixture, with width C, E experts, `element` bytes a number and 8 bytes a count?


# %% tags=["exercise"]
def sent(rows, i, width, experts, element):
    """Bytes that rank i sends, forward and backward."""
    ### BEGIN SOLUTION
    n = len(rows)
    away = sum(rows[i][j] + rows[j][i] for j in range(n) if j != i)
    return 2 * away * width * element + 8 * (experts - experts // n)
    ### END SOLUTION


check("sent", exercises.traffic, sent)


# %% tags=["wrong"]
# FAIL: 2 bytes a number (and still 8 a count): expected 544, got 496
# MISTAKE: A count is taken to have as many bytes as a number of a row.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return 2 * away * width * element + element * (experts - experts // len(rows))


# %% tags=["wrong"]
# FAIL: 2 bytes a number (and still 8 a count): expected 544, got 1984
# MISTAKE: Eight bytes a number are written into the answer.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return 8 * (2 * away * width + experts - experts // len(rows))


# %% [markdown] tags=["hint"]
# What leaves rank i, forward and then backward? Counts to every other rank, its own rows that have their expert
# elsewhere, and, on the way back, the results of rows that came from others. Which row and which column of the table
# are these?


# %% tags=["wrong"]
# FAIL: leaves out the counts
# MISTAKE: The counts that travel first are forgotten.
def sent(rows, i, width, experts, element):
    return 2 * sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i) * width * element


# %% tags=["wrong"]
# FAIL: is the forward alone
# MISTAKE: Only the forward is counted.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return away * width * element + 8 * (experts - experts // len(rows))


# %% tags=["wrong"]
# FAIL: also counts rows whose expert is at home
# MISTAKE: Rows whose expert is at home are taken to travel.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)))
    return 2 * away * width * element + 8 * (experts - experts // len(rows))


# %% tags=["wrong"]
# FAIL: 8 bytes a number: counted bytes
# MISTAKE: The way back is taken to be as full as the way there.
def sent(rows, i, width, experts, element):
    away = sum(2 * rows[i][j] for j in range(len(rows)) if j != i)
    return 2 * away * width * element + 8 * experts


# %% tags=["wrong"]
# FAIL: 24 bytes of it are counts
# MISTAKE: Counts are taken to have 4 bytes.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return 2 * away * width * element + 4 * (experts - experts // len(rows))


# %% tags=["wrong"]
# FAIL: 16 bytes of it are counts
# MISTAKE: The counts of experts are sent to one rank, where each other rank needs its own.
def sent(rows, i, width, experts, element):
    away = sum(rows[i][j] + rows[j][i] for j in range(len(rows)) if j != i)
    return 2 * away * width * element + 8 * (experts // len(rows))  # right on two ranks only


# %% [markdown]
# ## Drops depend on the group
#
# Which tokens compete for an expert's room? If it is what one *rank* holds of a micro-batch, every plan is another
# model. If it is one *row*, or the whole *batch* (whose counts are then gathered, 8 k E bytes a rank), the plan
# does not matter.


# %%
def dropped_alike(rank, world_size):
    tight = replace(lab.SMALL, experts=replace(lab.SMALL.experts, capacity=1.0, group="rank"))
    batch = example_batch(tight, 8, 11)
    found = lab.gradients_apart(tight, batch, serial="micro=2", alone_config=tight)
    return max(off for _, off in found.values())


for group in ("row", "batch", "rank"):
    tight = replace(EXPERTS, n_layer=2, experts=replace(EXPERTS.experts, capacity=1.0, group=group))
    same = [verify(plan, tight).ok for plan in ("dp=2,ep=2", "dp=2")]
    print(f"group={group:6} dp=2,ep=2 equals the serial run: {same[0]}, dp=2: {same[1]}")
off = max(launch(dropped_alike, ranks=2, echo=False))
print(f"group=rank   dp=2,ep=2 equals one rank with two micro-batches of these rows: {off < 1e-12}")

# %% [markdown]
# With tensor parallelism, which cuts each expert's hidden features:

# %%
print(verify("dp=2,ep=2,tp=2"))

# %% [markdown]
# ## Habits that go wrong
#
# An expert's gradient is already a sum over the tokens of *all* ranks of `ep`: they came to it. All else has seen only
# its own rank's tokens. Programs that treat both alike go wrong:

# %%
for habit, kinds in launch(lab.habits, ranks=2, echo=False)[0].items():
    found = (f"{kind} {along:.2f} of serial, off by {off:.0%}" for kind, (along, off) in kinds.items())
    print(f"{habit:21}" + "; ".join(found))

# %% [markdown]
# - *averaged*: each rank's mean loss, gradients averaged over `dp`. The experts' are ep times too large
#   ([pytorch#160285](https://github.com/pytorch/pytorch/issues/160285)).
# - *divided*: the experts' gradients divided by ep. Wrong where the loss is divided once by the tokens of all ranks, as
#   here; right where each rank averages its own ([megablocks#86](https://github.com/databricks/megablocks/issues/86)).
# - *detached*: the load loss is logged, but has no graph: the router gets no gradient of it
#   ([Automodel#1408](https://github.com/NVIDIA-NeMo/Automodel/issues/1408)).
# - *of each rank*: every rank balances its own tokens: another rule for each plan.
#
# No loss curve shows the first two: Adam divides a gradient by its own size. Under tensor parallelism the experts'
# output bias was added on every rank ([torchtitan#4245](https://github.com/pytorch/torchtitan/pull/4245)), and
# gradients *below* the experts were not summed ([#4054](https://github.com/pytorch/torchtitan/pull/4054)).
#
# ## When does it pay?
#
# For one row, forward and backward, an expert of w matrices of C H numbers does 6 w C H flops: w = 2 as in GPT-2, 3
# where it is gated (Mixtral, DeepSeek). Its row travels four times, C numbers of e bytes, (n-1)/n of which leave the
# rank, or the box, of n. C cancels: only H counts.
#
# $$\frac{\text{wire time}}{\text{compute time}}=
# \frac{n-1}{n}\cdot\frac{4\,e}{\text{wire bytes/s}}\cdot\frac{\text{flop/s}}{6\,w\,H}$$
#
# | machine | flop/s a rank, at peak | bytes/s a rank | source |
# |---|---|---|---|
# | a laptop, 2 ranks | 6e10 | 4e9 | lesson 06's round numbers |
# | 8 H100 in one box | 989e12 | 450e9 | NVIDIA's data sheet: 1,979 TFLOP/s if sparse, 900 GB/s both ways |
# | 64 H100 in 8 boxes | 989e12 | 50e9 | DeepEP's README: ConnectX-7, 400 Gbit/s a GPU |

# %%
machines = {
    "a laptop, 2 ranks": (6e10, 4e9, 2, 4),
    "8 GPUs, NVLink": (989e12, 450e9, 8, 2),
    "8 boxes of 8, network": (989e12, 50e9, 8, 2),
}
for name, (flops, wire, n, element) in machines.items():
    border = [4 * element * (n - 1) / n / wire * flops / (6 * w) for w in (2, 3)]
    print(f"{name:22} wire time = compute time at H = {border[0]:6,.0f}, gated {border[1]:6,.0f}")
show(
    plots.pays(machines),
    "computed",
    "wire time per compute time of a gated expert (w = 3), from the formula above.",
    "Three falling lines against the hidden width: a laptop lowest, 8 GPUs, 64 GPUs in 8 boxes highest",
)

# %% [markdown]
# On the network even wide experts wait: at peak, below H = 7,692<!--above--> (gated) the wire decides, in one box below
# 855<!--above-->. So a token goes to few machines, in two hops, and computing runs beside it.
#
# And without `ep`? Every rank holds all experts and sums their gradients: 2 (n-1)/n * E * w C H numbers
# a step, whatever the tokens. With `ep` = n it is 4 (n-1)/n k C numbers a token. They are equal at
# **(w/2) E H / k tokens a rank**:

# %%
table(
    [
        (name, e, h, k, w, w * e * h // (2 * k))
        for name, e, h, k, w in (
            ("this lesson's, C = 24", 8, 96, 2, 2),
            ("Mixtral 8x7B", 8, 14336, 2, 3),
            ("DeepSeek-V2-Lite", 64, 1408, 6, 3),
            ("DeepSeek-V3", 256, 2048, 8, 3),
        )
    ],
    ["model", "experts", "hidden width", "k", "matrices w", "tokens a rank below which ep sends less"],
)

# %% [markdown]
# And memory decides first: DeepSeek-V3's 58 layers of 256<!--above--> experts do not fit on one GPU.
#
# ## Questions
#
# 1. Why does the combine's weight, and not the choice, give the router its gradient?
# 2. dp=8, ep=4: how many ranks hold expert 0, over how many ranks is its gradient summed, and that of the router?
# 3. Why must counts travel before rows, and when could that be left out?
#
# <details><summary>Answers</summary>
#
# 1. The choice is a comparison: it is constant nearly everywhere. The weight is smooth in the scores.
# 2. Two; over those two; the router is held by all and summed over all eight.
# 3. The receiver needs to know how much memory and which rank's rows. With a fixed capacity and padding, nothing
#    needs to be said, and zeros travel.
#
# </details>
#
# ## Read on
#
# - Lepikhin et al. 2020, *GShard* (arXiv:2006.16668), algorithm 1: the two-choice router.
# - Fedus et al. 2021, *Switch* (arXiv:2101.03961), section 2: one choice a token.
# - Zhou et al. 2022, expert choice (arXiv:2202.09368): balance without a loss, and what it costs a causal model.
# - Gale et al. 2022, *MegaBlocks* (arXiv:2211.15841): products of uneven blocks.
# - Rajbhandari et al. 2022, *DeepSpeed-MoE* (arXiv:2201.05596), section 5: the hierarchical exchange.
# - DeepSeek-AI 2024, *DeepSeek-V3* (arXiv:2412.19437), section 3.2: DeepEP's exchange, explained.
#
# **Next**: [13 Threads and tasks](13_threads_and_tasks.ipynb).
