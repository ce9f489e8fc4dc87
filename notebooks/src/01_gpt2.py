# %% [markdown]
# # 01 GPT-2
#
# **The one-minute version.** GPT-2 turns tokens into vectors, lets each token look at those before it (attention)
# and think on its own (MLP), layer after layer, and ends with a score for every token that might come next. Training
# is three phases: forward, backward, update. Everything that later lessons cut is counted here first, exactly:
# parameters, flops, bytes. If you know those three numbers of every part, you can predict what each parallel
# strategy will cost.

# %% tags=["setup"]
import time

import numpy as np
import torch

from gpt2lab import launch
from gpt2lab.corpus import Batches, encoding, shakespeare
from gpt2lab.generate import KVCache, generate
from gpt2lab.lessons import explore, predict, show, show_source, table
from gpt2lab.lessons.exercises import check
from gpt2lab.lessons.exercises import gpt2 as exercises
from gpt2lab.lessons.labs import anatomy as lab
from gpt2lab.lessons.labs.instruments import built
from gpt2lab.lessons.labs.llmc_files import file_layout, padded_vocabulary
from gpt2lab.machine import memory, speed
from gpt2lab.machine.checksum import summ
from gpt2lab.model import GPT2, PRESETS, Attention
from gpt2lab.parallel.chunked_loss import apply_chunked_loss
from gpt2lab.parallel.recompute import apply_recompute
from gpt2lab.plan import Plan, build
from gpt2lab.plots import gpt2 as plots
from gpt2lab.plots.forms import legend_above, patches
from gpt2lab.plots.style import COLORS
from gpt2lab.plots.timeline import timeline
from gpt2lab.plots.zero import bars, memory_over_a_step
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.tasks.gpt2 import GPT2Tasks
from gpt2lab.tasks.runtime import run_sequential
from gpt2lab.train import LLMC, Trainer

# %% tags=["setup"]
config = PRESETS["nano"]
B, T = 4, 64
C, L, H, V = config.n_embd, config.n_layer, config.n_head, config.vocab_size

# %% [markdown]
# B is the batch, T the tokens of a sequence, C the width, L the layers, H the heads, D = C / H the width of a head, V
# the vocabulary. These letters stay the same in all lessons.
#
# ## Tokens
#
# The model never sees letters. Byte-pair encoding knows 50,257 pieces and cuts text into them; a frequent word is one.

# %%
words = encoding()
ids = words.encode("To be, or not to be, that is the question:")
print(ids)
print([words.decode([i]) for i in ids])
print("and back:", words.decode(ids))

# %% [markdown]
# A corpus is tokenised once into a *shard*: a header of 256 numbers, then two bytes a token, mapped into memory
# instead of read. The tokeniser writes it as a stream. A list of Python integers needs some 36 bytes a token, which
# may well be how *the port* ran out of memory on a large text: llm.c as ported at the
# [Barcelona Supercomputing Center](https://gitlab.bsc.es/tchatela/llm.c-gpt2/-/wikis/GPT2-Parallelization-and-porting)
# (BSC). Both ways, on a text that grows:

# %%
peaks = {copies: lab.tokenised(copies) for copies in (2, 4)}
print("the same tokens:", all(same for *_, same in peaks.values()))
print("twice the text, twice the list:", round(peaks[4][0] / peaks[2][0]), "times; the stream:", end=" ")
print(round(peaks[4][1] / peaks[2][1]), "times the memory")
shard = shakespeare()
batch = Batches(shard, rows=B, length=T).at(0)
print(f"{len(shard):,} tokens of Shakespeare in {2 * len(shard) + 1024:,} bytes")
print("tokens ", tuple(batch.tokens.shape), batch.tokens[0, :6].tolist())
print("targets", tuple(batch.targets.shape), batch.targets[0, :6].tolist(), "(each the token that follows)")

# %% [markdown]
# ## The model in shapes

# %%
show(
    plots.anatomy(L),
    "drawing",
    "GPT-2 from bottom to top, with the shape that leaves each part; both halves of a block add to the stream.",
    "A column of twelve parts from tokens to loss, with shapes beside them, blocks bracketed",
)

# %% [markdown]
# A block adds to the *residual stream*, it does not replace it: `x + attn(ln_1(x))`, then `x + mlp(ln_2(x))`. The sum
# is taken from the stream before the norm. Attention is the only place where tokens meet. By hand it is four lines:


# %%
def attention_by_hand(q, k, v):
    """Causal attention of q, k, v (B, H, T, D)."""
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5  # (B, H, T, T)
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights @ v  # (B, H, T, D)


model = GPT2(config).double()
q, k, v = torch.randn(3, B, H, T, C // H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
core = model.h["0"].attn.core
apart = (core(q, k, v, torch.arange(T)) - attention_by_hand(q, k, v)).abs().max()
print("equal to the model's core, to 1e-12:", bool(apart < 1e-12))
show_source(Attention)

# %% [markdown]
# `self.core` is a *seam*, made to be replaced: context parallelism will, tensor parallelism will cut `c_attn` and
# `c_proj`, and this file will not know.
#
# The whole model also exists as llm.c has it in C: operation after operation, each backward written by hand, with no
# autograd (`algorithms/kernels.py`). Tensor by tensor its gradients are the model's:

# %%
small = Batches(shard, rows=2, length=16).at(0)
by_hand = GPT2Tasks(model, 2, 16, lambda iteration: (small.tokens, small.targets))
run_sequential(by_hand.graph)
theirs = by_hand.gradients
logits = model(small.tokens)
(model.loss(logits, small.targets) / small.total).backward()
worst = {
    n: ((p.grad - theirs[n]).abs().max() / p.grad.abs().max()).item() for n, p in model.named_parameters()
}
print(len(worst), "gradients, each within 1e-12 of autograd's:", all(off < 1e-12 for off in worst.values()))
padded = torch.nn.functional.pad(logits, (0, padded_vocabulary(V) - V))  # llm.c's rows without a token
more = (padded.logsumexp(-1) - logits.logsumexp(-1)).mean().item()
print(f"logits padded to {padded.size(-1):,}: taken into the softmax, they would move the loss by {more:.4f}")

# %% [markdown]
# llm.c pads the vocabulary to 50,304<!--above--> so that rows align in memory; its softmax leaves the padding out.
#
# ## Every parameter counted

# %%
kinds = {}
for name, p in model.named_parameters():
    kind = ".".join(part for part in name.split(".") if not part.isdigit())
    count, total, _ = kinds.get(kind, (0, 0, ()))
    kinds[kind] = (count + 1, total + p.numel(), tuple(p.shape))
table(
    [(kind, str(shape), n, total) for kind, (n, total, shape) in kinds.items()],
    ["tensor", "shape", "how many", "parameters"],
)
print(len(kinds), "kinds of tensors,", f"{sum(total for _, total, _ in kinds.values()):,} parameters")

# %% [markdown]
# A block has 12 C² parameters in its four matrices and 13 C in biases and norms. The head has none: it is *tied* to
# the token embedding, the same matrix at both ends. (That will matter when the ends live on different ranks.)

# %%
guess = predict(
    "In which models would cutting only the blocks among ranks be a poor idea?",
    "nano, mini",
    "gpt2, gpt2-medium",
    "gpt2-large, gpt2-xl",
)

# %%
rows = []
for name, c in PRESETS.items():
    blocks = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd)
    rows.append((name, c.parameters, c.vocab_size * c.n_embd, blocks, round(100 * blocks / c.parameters)))
table(rows, ["model", "parameters", "token embedding", "blocks", "blocks %"])
guess.beside(", ".join(name for name, *_, percent in rows if percent < 50), "computed")

# %% [markdown]
# In nano and mini every rank would still hold the embedding, most of the model. In gpt2-xl that is 5 %.
#
# ## Fresh weights
#
# Matrices start as N(0, 0.02²), those that write into the stream smaller by √(2L), norms at one, biases at zero. Each
# tensor is drawn from a seed made of its *name*, so any rank can build any part and get the same numbers.

# %%
names = {"wte": "wte.weight", "c_fc": "h.0.mlp.c_fc.weight", "c_proj": "h.0.mlp.c_proj.weight"}
wanted = {"wte": 0.02, "c_fc": 0.02, "c_proj": 0.02 / (2 * L) ** 0.5}
drawn = {k: (model.get_parameter(n).detach().flatten()[:60000].numpy(), wanted[k]) for k, n in names.items()}
show(
    plots.histograms(drawn),
    "computed",
    "fresh weights; dashed lines mark the standard deviation that was intended.",
    "Three bell-shaped histograms, the third one narrower",
)


# %%
def two_ways(rank, world_size):
    axis = Mesh(dp=world_size)["dp"]
    own = GPT2(config).wte.weight.detach()  # each rank builds it
    sent = comm.broadcast(own if rank == 0 else torch.zeros_like(own), axis)  # or rank 0 sends it
    return summ(own), summ(sent), comm.traffic()["broadcast", "dp"][1]


for rank, (own, sent, size) in enumerate(launch(two_ways, ranks=2)):
    print(f"rank {rank}: built {own}  received {sent}  sent {size:,} bytes")

# %% [markdown]
# The same bits both ways; one of them sends nothing.
#
# ## The first loss is ln V
#
# A fresh model knows nothing, so it gives every token about the same probability 1/V. The loss is then
# -ln(1/V) = ln V. If your first loss is far from it, look for a bug before a better learning rate.

# %%
loss = model.loss(model(batch.tokens), batch.targets) / batch.total
print(f"fresh loss {loss.item():.2f}, ln {V} = {np.log(V):.4f}")

# %% [markdown]
# `model.loss` is the **sum** over tokens; it is divided once. A *trained* model's loss means: it hesitates between
# exp(loss) tokens.
#
# ## Flops
#
# A matrix of N weights costs 2N operations a token forward (multiply, add) and 4N backward (one product for the
# input's gradient, one for the weight's). Attention adds 4TC a token and layer forward, which no parameter shows.

# %%
from torch.utils.flop_counter import FlopCounterMode

model = GPT2(config)
counter = FlopCounterMode(display=False)
with counter:
    loss = model.loss(model(batch.tokens), batch.targets) / batch.total
forward = counter.get_total_flops()
with counter:
    loss.backward()
backward = counter.get_total_flops()
matrices = 12 * L * C * C + V * C
table(
    [
        ("forward, matrices", forward, 2 * matrices * B * T),
        ("backward, matrices", backward, 4 * matrices * B * T),
        ("attention, both", "not counted by torch", 3 * 4 * T * C * L * B * T),
    ],
    ["operations of one step", "counted", "formula"],
)
print(f"attention is {100 * 12 * T * C * L / (6 * matrices):.1f} % of the matrices here;", end=" ")
big = PRESETS["gpt2"]
share = 12 * 1024 * big.n_embd * big.n_layer / (6 * (12 * big.n_layer * big.n_embd**2 + V * big.n_embd))
print(f"in gpt2 with T = 1024 it is {100 * share:.0f} %")

# %% [markdown]
# With T = 1024, attention is 15 %<!--above--> of GPT-2's matrices. This counts all T² pairs of tokens, as PaLM's
# appendix B does; the causal half would do, and llm.c counts so. When somebody quotes an MFU (the share of the
# machine's flops that a step uses), ask which.

# %% tags=["measured"]
rate, fresh = speed.matmul_rate(), GPT2(config)
begin = time.perf_counter()
for _ in range(3):
    (fresh.loss(fresh(batch.tokens), batch.targets) / batch.total).backward()
step_seconds = (time.perf_counter() - begin) / 3
reached = speed.flops_per_token(config, T) * batch.total / step_seconds / rate
print(
    f"matrices multiply at {rate / 1e9:.0f} GFLOP/s; forward and backward reach {100 * reached:.0f} % of it"
)

# %% [markdown]
# ## Memory, by formula and by count
#
# Four things are held: weights, gradients, the optimizer's state, and *activations*: what forward saves for
# backward. The first three follow from the parameters (4 + 4 + 8 bytes each in float32 with AdamW). Activations
# follow from the batch. Per layer forward saves 16 B T C numbers: the input of ln_1, its output, q, k, v,
# attention's output, the input of ln_2, its output, and what goes into the gelu and comes out, each four times as
# wide. And small ones: means and
# deviations of two norms, 4 B T, sums of H softmaxes, B H T. torch can be asked:

# %%
show_source(lab.activation_bytes)
rows = []
for rows_, length in ((4, 64), (2, 128), (3, 50)):
    saved = lab.saved_bytes(model.float(), Batches(shard, rows=rows_, length=length).at(0))
    rows.append((f"B={rows_}, T={length}", saved, lab.activation_bytes(config, rows_, length)))
table(rows, ["batch", "counted", "formula"])


# %%
def budget(batch_rows, model_name):
    chosen, held = PRESETS[model_name], {}
    for way, recompute in {"save all": False, "recompute": True}.items():
        n, length = chosen.parameters, min(256, chosen.n_positions)
        activations = lab.activation_bytes(chosen, batch_rows, length, recompute)
        held[way] = {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n, "activations": activations}
    return bars(held, "MB", where="(computed)")


explore(
    budget,
    "computed",
    "what training {model_name} holds with {batch_rows} rows of up to 256 tokens, in float32.",
    "Stacked bars of weights, gradients, optimizer state and activations for {model_name}",
    batch_rows=(1, 32, 8),
    model_name=["gpt2", "nano", "mini", "gpt2-medium", "gpt2-large", "gpt2-xl"],
)

# %% [markdown]
# (The bars count the logits once; at the loss they exist three times, see the appendix.)
#
# ### Recomputation
#
# Save only each block's input and run the block again during backward: about a sixteenth of the numbers (the bars leave
# out the block being rebuilt), for about a third more work. The gradients must be the same *bits*, since the same
# operations run on the same numbers.

# %%
grads = {}
for recompute in (False, True):
    model = GPT2(config)
    if recompute:
        apply_recompute(model)
    formula = lab.activation_bytes(config, B, T, recompute)
    print(f"recompute={recompute}: {lab.saved_bytes(model, batch):,} bytes saved, formula {formula:,}")
    (model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
    grads[recompute] = torch.cat([p.grad.flatten() for p in model.parameters()])
print("gradients bitwise equal:", torch.equal(grads[False], grads[True]))

# %% [markdown]
# Of 60,153,348<!--above--> bytes most are the logits, B T V numbers, with or without recomputation: with a vocabulary
# of 50,257 and a small model they dominate.
#
# ## The loop
#
# Forward, backward, update: every strategy has to reproduce what these three phases do.

# %%
batches = Batches(shard, rows=B, length=T)


def train(steps):
    model = GPT2(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        batch = batches.at(step)
        with trace.span("forward", "forward"):
            loss = model.loss(model(batch.tokens), batch.targets) / batch.total
        with trace.span("backward", "backward"):
            loss.backward()
        with trace.span("update", "update"):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


train(1)  # the first step of a process also fetches memory
trace.clear()
print("losses:", ", ".join(f"{x:.4f}" for x in train(4)))
phases = [s.name for s in trace.spans()]
print("phases:", " ".join(name[0] for name in phases))

# %% tags=["measured"]
show(
    timeline(trace.merge([trace.spans()]), clock="measured"),
    "measured",
    "four steps of one process; backward has twice the operations of forward, and takes two to four times as long.",
    "A timeline of one rank: forward, backward, update, four times",
)

# %% [markdown]
# llm.c wraps this loop in a *recipe*: B = 4, T = 64, learning rate 1e-4, no decay; every 10 steps the loss
# of five batches of validation, every 20 a sample of 64 tokens. The port's advice: measure without validation and
# inference. Here both are counted, as the recipe has it and without (`bench`):


# %%
def recipe_of_llmc(bench, steps):
    trainer = Trainer(build(Plan.parse("serial"), config, Mesh()), LLMC)
    training, validation = (Batches(shard, rows=4, length=64, split=split) for split in ("train", "val"))
    losses, checked, made = [], {}, 0
    trace.clear()
    for step in range(1, steps + 1):
        with trace.span("step", "forward"):
            losses.append(trainer.step(training.at(step - 1)).loss)
        if not bench and step % 10 == 0:
            with trace.span("validate", "wait"):
                checked[step] = trainer.evaluate(validation.at(i) for i in range(5))
        if not bench and step % 20 == 0:
            with trace.span("generate", "update"):
                made += len(generate(trainer.parallel.model, [[50256]], 64, stop=None)[0]) - 1
    return losses, checked, made, trace.merge([trace.spans()])


golden, losses, lanes = [10.8, 10.4], {}, {}
for bench, steps in ((False, 20), (True, 10)):
    losses[bench], checked, made, lanes[bench] = recipe_of_llmc(bench, steps)
    print(f"bench={bench!s:5} {steps} steps, {5 * len(checked)} batches validated", end=" ")
    print(f"{ {n: round(v, 1) for n, v in checked.items()} }, {made} tokens generated")
print(
    "our own losses of steps 1 and 14 as when this was written:",
    [round(x, 1) for x in losses[False][::13]] == golden,
)
print("ten losses with bench, the same bits as without:", losses[True] == losses[False][:10])

# %% tags=["measured"]
length = max(s.end for s in lanes[False]) - min(s.start for s in lanes[False])
keys = {"step": COLORS["forward"], "validation": COLORS["wait"], "sample of text": COLORS["update"]}
for bench, name, said in (
    (False, "as the recipe has it", "20 steps, validation after every 10, a sample of text at the end"),
    (True, "with bench", "10 steps, and nothing else"),
):
    whole = [s for s in lanes[bench] if s.name in ("step", "validate", "generate")]
    fig = timeline(whole, name, clock="measured", names=False, length=length)
    legend_above(fig.axes[0], 3, handles=patches(keys))  # in place of the parts of a step
    show(fig, "measured", f"{name}: {said}.", f"A timeline of one rank, {name}")

# %% [markdown]
# The losses are the same: validation and samples change no weight.
#
# ## AdamW
#
# The optimizer keeps two running means for each weight, of the gradient and of its square, and divides one by the
# root of the other. In the first step, with one gradient in each, nearly all weights move by the learning rate, however
# small their gradient:


# %%
def first_update(optimizer_of):
    model, batch = GPT2(config), Batches(shakespeare(), rows=4, length=16).at(0)
    optimizer = optimizer_of(model.parameters())
    (model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
    w = model.h["0"].mlp.c_fc.weight
    before = w.detach().clone()
    optimizer.step()
    sizes = w.grad.abs().flatten()[:4000], (w.detach() - before).abs().flatten()[:4000]
    return [x.clamp(min=1e-12).numpy() for x in sizes]


gradient, adam = first_update(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0))
_, sgd = first_update(lambda p: torch.optim.SGD(p, lr=1e-3))
show(
    plots.normalised(gradient, {"AdamW": adam, "SGD": sgd}, 1e-3),
    "computed",
    "first updates of 4000 weights: SGD's follow the gradient over orders of magnitude, AdamW's do not.",
    "A flat line of dots at the learning rate for AdamW, a rising diagonal for SGD",
)

# %% [markdown]
# A consequence: a gradient that is wrong by a *constant factor* leaves AdamW's loss curve
# where it was (lesson 04 shows it). That is why we compare gradients, and steps with SGD too.
#
# ## Gradient accumulation
#
# A batch that does not fit is cut into micro-batches whose gradients add up. Each loss is a sum over its own tokens,
# divided by the tokens of the *whole* batch. Then uneven micro-batches are no problem.

# %%
model, short = GPT2(config).double(), Batches(shard, rows=4, length=16).at(0)
rows, whole = [], None
for k in (1, 2, 3, 4):
    model.zero_grad()
    for micro in short.micro(k):
        (model.loss(model(micro.tokens), micro.targets) / micro.total).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    whole = grads if whole is None else whole
    sizes = [len(m.samples) for m in short.micro(k)]
    equal = "equal" if (grads - whole).abs().max() < 1e-12 else "DIFFERS"
    rows.append((k, str(sizes), equal, max(lab.saved_bytes(model, micro) for micro in short.micro(k))))
table(rows, ["micro-batches", "rows of each", "gradient", "most bytes saved, float64, counted"])

# %% [markdown]
# With data parallelism, only the last micro-batch has to talk: bytes sent do not depend on their number.
#
# ## Generating: the KV cache
#
# To add one token, a plain loop computes *all* positions again. But keys and values of old tokens do not change, so a
# cache keeps them and only the new token is computed. The logits must not change.

# %%
model, prompt = GPT2(config).double(), words.encode("To be, or")
cache, ids = KVCache(slots=32), torch.tensor([prompt])
whole = model(ids)[:, -1]
first = model(ids[:, :-1], torch.arange(len(prompt) - 1), cache=cache)
last = model(ids[:, -1:], torch.tensor([len(prompt) - 1]), cache=cache)[:, 0]
print("logits with and without cache differ by less than 1e-12:", bool((whole - last).abs().max() < 1e-12))
computed, texts = {True: [], False: []}, []
for cached, seen in computed.items():
    hook = model.wte.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].numel()))
    texts.append(generate(model, [prompt], 20, cache=cached, seed=1)[0])
    hook.remove()
counts = f"{sum(computed[False])} without, {sum(computed[True])} with"
print("same 20 tokens:", texts[0] == texts[1], "| positions computed:", counts)

# %% tags=["measured"]
show(
    plots.per_token(
        {"no cache": lab.per_token(config, prompt, False), "cache": lab.per_token(config, prompt, True)}
    ),
    "measured",
    "milliseconds for each new token, the fastest of four runs; without a cache the cost grows with the text.",
    "Two lines over 100 new tokens: the one without cache rises, the one with cache is flat",
)

# %% [markdown]
# llm.c also computes B rows and uses one. A *batch* of prompts decodes together. And in a pipeline of p stages a token
# passes one stage after the other; with N *streams*, groups of rows in turn, a stage works on one while others hold the
# rest: with equal stages idle max(0, (p - N) / p) of the time instead of (p - 1) / p. Ranks of tensor parallelism
# (lesson 06) share each token. On two live ranks:

# %%
prompts = [
    words.encode(text) for text in ("To be, or", "My kingdom for a", "If music be", "Now is the winter of")
]
alone = [generate(model, [p], 6, stop=None, temperature=0)[0] for p in prompts]
print(
    "a batch has the tokens of single rows:", generate(model, prompts, 6, stop=None, temperature=0) == alone
)


def together(rank, world_size, text, streams):
    return built(text, config).generate(prompts, 6, streams, stop=None, temperature=0)


for plan, streams in (("pp=2", 2), ("pp=2", 4), ("tp=2", 1)):
    texts = launch(together, plan, streams, ranks=2)
    print(f"so have two ranks of {plan}, streams: {streams}:", texts == [alone, alone])


# %% tags=["measured"]
def tokens_a_second(rank, world_size, text, rows, streams):
    plan, many = Plan.parse(text), [prompts[i % 4] for i in range(rows)]
    parallel = build(plan, config, Mesh(**plan.axes), torch.float32)
    parallel.generate(many, 2, streams, stop=None, temperature=0)  # warm-up: the first call pays for more
    start = time.perf_counter()
    parallel.generate(many, 16, streams, stop=None, temperature=0)
    return 16 * rows / (time.perf_counter() - start)


ways = [("serial", rows, 1) for rows in (1, 4, 16)] + [("pp=2", 16, streams) for streams in (1, 2, 4)]
rates = [launch(tokens_a_second, *way, ranks=1 + (way[0] != "serial"))[0] for way in ways]
table(
    [(*way, round(rate)) for way, rate in zip(ways, rates, strict=True)],
    ["plan", "rows", "streams", "tokens a second"],
)
print(f"a step of 4 rows takes {4e3 / rates[1]:.1f} ms, one of 16 rows {16e3 / rates[2]:.1f} ms")

# %% [markdown]
# (Here one run, above the fastest of four.) nano's second stage is the head alone, seven times the first: more streams
# only cost.
#
# ## Files
#
# `huggingface.save(model, folder)` writes the Hugging Face layout. llm.c has two of its own: weights, a header of
# 256 integers and 16 tensors in a row, the layers of each kind stacked; and a *debug state*, one batch with its
# logits and gradients, to compare programs with. Ours are read back bit for bit, and what is foreign is refused:

# %%
size = 1024 + 4 * (config.parameters + (padded_vocabulary(V) - V) * C)
print(f"{len(file_layout(config))} tensors, by formula {size:,} bytes")
table(lab.files(GPT2(config), small).items(), ["llm.c's files of nano", ""])

# %% [markdown]
# ## Appendix: the same step in less memory
#
# A *chunked loss* never holds the B T V logits: head and loss together, some tokens at a time, each chunk over the
# last one's memory, the gradient by hand. (`gpt2lab bench step` measures this and other switches.)


# %%
def one_step(chunked):
    """Bytes held after every allocation of a KiB or more in forward and backward, and all gradients."""
    model = GPT2(config)
    if chunked:
        apply_chunked_loss(model, rows=32)
    with memory.allocations() as events:
        (model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
    held = [event.held for event in events if abs(event.bytes) >= 1024]
    return held, torch.cat([p.grad.flatten() for p in model.parameters()])


whole, chunked = one_step(False), one_step(True)
print("gradients agree to float32's rounding:", torch.allclose(whole[1], chunked[1], rtol=1e-4, atol=1e-7))
ratio = max(whole[0]) / max(chunked[0])
print(f"{ratio:.1f} times less at the peak; the logits alone are {4 * B * T * V / 1e6:.0f} MB")

# %% tags=["measured"]
show(
    memory_over_a_step({"whole logits": whole[0], "32 tokens at a time": chunked[0]}, legend="upper center"),
    "measured",
    "bytes held above the weights through one forward and backward of nano; triangles mark the peaks.",
    "Two curves: with whole logits three jumps to a peak at the loss; in chunks one small one, and one at the end",
)

# %% [markdown]
# At the loss the whole logits are there three times: themselves, their softmax, their gradient. In chunks the
# peak comes at the very end, where the embedding's gradient, as large as the head's, is added to it: they share
# one weight.

# %% [markdown]
# ## Exercises
#
# **1.** Count the parameters of any GPT-2.


# %% tags=["exercise"]
def parameters(vocab, positions, layers, width):
    """All parameters, the tied head counted once."""
    ### BEGIN SOLUTION
    return (vocab + positions) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    ### END SOLUTION


check("parameters", exercises.parameters, parameters)

# %% [markdown] tags=["hint"]
# The table of kinds above lists every tensor of a block. Which of them are squares of the width?

# %% [markdown] tags=["hint"]
# Outside the blocks stand two embeddings and one norm.


# %% tags=["wrong"]
# FAIL: the head is tied, count it once
# MISTAKE: The head is counted, although it is the embedding again.
def parameters(vocab, positions, layers, width):
    return (2 * vocab + positions) * width + layers * (12 * width**2 + 13 * width) + 2 * width


# %% tags=["wrong"]
# FAIL: 13 C in biases and norms
# MISTAKE: Biases and norms of the blocks are forgotten.
def parameters(vocab, positions, layers, width):
    return (vocab + positions) * width + layers * 12 * width**2 + 2 * width


# %% tags=["wrong"]
# FAIL: expected 32, got 24
# MISTAKE: The table of positions is forgotten.
def parameters(vocab, positions, layers, width):
    return vocab * width + layers * (12 * width**2 + 13 * width) + 2 * width


# %% tags=["wrong"]
# FAIL: expected 32, got 28
# MISTAKE: The last norm is forgotten.
def parameters(vocab, positions, layers, width):
    return (vocab + positions) * width + layers * (12 * width**2 + 13 * width)


# %% tags=["wrong"]
# FAIL: expected 106, got 90
# MISTAKE: 8 C squared in a block: the second matrix of the MLP is forgotten.
def parameters(vocab, positions, layers, width):
    return (vocab + positions) * width + layers * (8 * width**2 + 13 * width) + 2 * width


# %% tags=["wrong"]
# FAIL: was it float32 on the way
# MISTAKE: Counted in float32, whose whole numbers end at 2^24.
def parameters(vocab, positions, layers, width):
    C = torch.tensor(width, dtype=torch.float32)
    return (vocab + positions) * C + layers * (12 * C**2 + 13 * C) + 2 * C


# %% [markdown]
# **2.** One step of AdamW, where m and v are running means of the gradient and of its square, and the hats divide by
# $1-\text{beta}^t$, because both start at zero:
#
# $$w \leftarrow w-\text{lr}\left(\text{decay}\;w+\frac{\hat m}{\sqrt{\hat v}+\text{eps}}\right)$$
#
# `t` counts from 1. Return the new (w, m, v).


# %% tags=["exercise"]
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    """The new weight and moments."""
    ### BEGIN SOLUTION
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    step = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return w - lr * (decay * w + step), m, v
    ### END SOLUTION


check("AdamW by hand", exercises.adamw, adamw)

# %% [markdown] tags=["hint"]
# Five lines, in this order: new m, new v, both hats, the step, the new w. The running means are returned without
# hats.


# %% tags=["wrong"]
# FAIL: 20 steps without decay, after step 1
# MISTAKE: Moments are not corrected for starting at zero.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    return w - lr * (decay * w + m / (v.sqrt() + eps)), m, v


# %% tags=["wrong"]
# FAIL: 20 steps with decay 0.1, after step 1
# MISTAKE: Decay is put into the gradient: that is Adam, not AdamW.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    grad = grad + decay * w
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    return w - lr * m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps), m, v


# %% tags=["wrong"]
# FAIL: 20 steps without decay, at the end
# MISTAKE: Corrected moments are kept, so they are corrected again at the next step.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return w - lr * (decay * w + m / (v.sqrt() + eps)), m, v


# %% tags=["wrong"]
# FAIL: eps outside the root)
# MISTAKE: eps stands inside the root.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return w - lr * (decay * w + m_hat / (v_hat + eps).sqrt()), m, v


# %% tags=["wrong"]
# FAIL: 20 steps with decay 0.1
# MISTAKE: Decay is not multiplied by the learning rate.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * grad**2
    step = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return w - decay * w - lr * step, m, v


# %% tags=["wrong"]
# FAIL: torch would do this in one call
# MISTAKE: torch's own function makes the step.
def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    from torch.optim.adamw import adamw as f

    f(
        [w],
        [grad],
        [m],
        [v],
        [],
        [torch.tensor(float(t - 1))],
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=decay,
        eps=eps,
        maximize=False,
    )
    return w, m, v


# %% tags=["wrong"]
# FAIL: of two that step in turn
# MISTAKE: Moments are kept outside the arguments, so two weights share them.
state = {}


def adamw(w, grad, m, v, t, lr, betas, eps, decay):
    if t == 1:
        state.update(m=0, v=0)
    m = state["m"] = betas[0] * state["m"] + (1 - betas[0]) * grad
    v = state["v"] = betas[1] * state["v"] + (1 - betas[1]) * grad**2
    step = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return w - lr * (decay * w + step), m, v


# %% [markdown]
# **3.** Backward by hand. A layer norm computes $n=(x-\text{mean})/\text{std}$ over the last dim and returns
# n · weight + bias, with $\text{std}=\sqrt{\text{var}+\text{eps}}$. Given the gradient of its output, return the
# gradient of x. (Let g = grad · weight; take off what moves the mean, and what moves the standard deviation.)


# %% tags=["exercise"]
def norm_backward(grad, x, weight, eps):
    """The gradient of x (..., C)."""
    ### BEGIN SOLUTION
    std = (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    g = grad * weight
    return (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) / std
    ### END SOLUTION


check("layer norm backward", exercises.norm_backward, norm_backward)

# %% [markdown] tags=["hint"]
# Compute std and n again from x. `var` needs `unbiased=False`.

# %% [markdown] tags=["hint"]
# What moves the mean is g's own mean over the last dim; what moves the standard deviation is n times the mean of g n.


# %% tags=["wrong"]
# FAIL: g over the standard deviation is only the first of three terms
# MISTAKE: Mean and standard deviation are taken for constants.
def norm_backward(grad, x, weight, eps):
    return grad * weight / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()


# %% tags=["wrong"]
# FAIL: x also moves the standard deviation, so a second term is taken off g
# MISTAKE: Only the mean is taken to move with x.
def norm_backward(grad, x, weight, eps):
    g = grad * weight
    return (g - g.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()


# %% tags=["wrong"]
# FAIL: The gradient passes through `weight` first: g = grad * weight
# MISTAKE: The gradient does not pass through the weight.
def norm_backward(grad, x, weight, eps):
    std = (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    g = grad
    return (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) / std


# %% tags=["wrong"]
# FAIL: The variance is divided by C, not by C - 1
# MISTAKE: The variance is divided by C - 1, not by C.
def norm_backward(grad, x, weight, eps):
    std = (x.var(-1, keepdim=True, unbiased=True) + eps).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    g = grad * weight
    return (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) / std


# %% tags=["wrong"]
# FAIL: A constant added to x changes nothing, so gradients sum to zero
# MISTAKE: The term that takes off the mean is missing.
def norm_backward(grad, x, weight, eps):
    std = (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    g = grad * weight
    return (g - n * (g * n).mean(-1, keepdim=True)) / std


# %% tags=["wrong"]
# FAIL: autograd would give this in one call
# MISTAKE: autograd gives the gradient: right, but not derived by hand.
def norm_backward(grad, x, weight, eps):
    norm = lambda x: torch.nn.functional.layer_norm(x, weight.shape, weight, eps=eps)
    return torch.func.vjp(norm, x)[1](grad)[0]


# %% tags=["wrong"]
# FAIL: `eps` is given; it is not always 1e-5
# MISTAKE: The default of torch stands where the argument belongs.
def norm_backward(grad, x, weight, eps):
    std = (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    g = grad * weight
    return (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) / std


# %% tags=["wrong"]
# FAIL: changed what it was given
# MISTAKE: The given gradient is multiplied in place, and its owner still needs it.
def norm_backward(grad, x, weight, eps):
    std = (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    n = (x - x.mean(-1, keepdim=True)) / std
    grad *= weight
    return (grad - grad.mean(-1, keepdim=True) - n * (grad * n).mean(-1, keepdim=True)) / std


# %% [markdown]
# **4.** Accumulate: for each micro-batch (x, y) of a linear model with squared error, call backward so that `w.grad`
# gains the gradient of the *mean* over all `rows` rows.


# %% tags=["exercise"]
def accumulate(w, micros, rows):
    """Adds into w.grad; returns nothing."""
    for x, y in micros:
        errors = (x @ w - y) ** 2  # (rows of this micro-batch,)
        ### BEGIN SOLUTION
        (errors.sum() / rows).backward()
        ### END SOLUTION


check("accumulation", exercises.accumulation, accumulate)

# %% [markdown] tags=["hint"]
# `backward` adds to `.grad` by itself. By how many rows is each sum divided, by its own or by all?


# %% tags=["wrong"]
# FAIL: micro-batches of [4, 3] rows
# MISTAKE: A mean of means: micro-batches of unequal size weigh equally.
def accumulate(w, micros, rows):
    for x, y in micros:
        (((x @ w - y) ** 2).mean() / len(micros)).backward()


# %% tags=["wrong"]
# FAIL: w.grad is None
# MISTAKE: The loss is computed, and no backward is called.
def accumulate(w, micros, rows):
    sum(((x @ w - y) ** 2).sum() for x, y in micros) / rows


# %% tags=["wrong"]
# FAIL: call backward() before the next micro-batch begins
# MISTAKE: One backward at the end: all micro-batches stay in memory.
def accumulate(w, micros, rows):
    (sum(((x @ w - y) ** 2).sum() for x, y in micros) / rows).backward()


# %% tags=["wrong"]
# FAIL: add, do not clear
# MISTAKE: Earlier gradients are cleared, where this should add to them.
def accumulate(w, micros, rows):
    w.grad = None
    for x, y in micros:
        (((x @ w - y) ** 2).sum() / rows).backward()


# %% tags=["wrong"]
# FAIL: micro-batches of [7] rows
# MISTAKE: The division by all rows is missing.
def accumulate(w, micros, rows):
    for x, y in micros:
        ((x @ w - y) ** 2).sum().backward()


# %% tags=["wrong"]
# FAIL: not from a formula of yours
# MISTAKE: The formula of this one loss is written down: no other loss would have its gradient added up.
def accumulate(w, micros, rows):
    for x, y in micros:
        grad = 2 * x.T @ (x @ w.detach() - y) / rows
        w.grad = grad if w.grad is None else w.grad + grad


# %% tags=["wrong"]
# FAIL: micro-batches of [2, 3] rows
# MISTAKE: The number of rows of one example is written down.
def accumulate(w, micros, rows):
    for x, y in micros:
        (((x @ w - y) ** 2).sum() / 7).backward()


# %% tags=["wrong"]
# FAIL: backward() came to w 2 times: once for each of 1 micro-batches is enough
# MISTAKE: Every micro-batch runs twice, with half of its loss: right, for twice the work.
def accumulate(w, micros, rows):
    for x, y in [*micros, *micros]:
        (((x @ w - y) ** 2).sum() / rows / 2).backward()


# %% tags=["wrong"]
# FAIL: what backward() brought is not what w.grad got
# MISTAKE: A formula gives the gradient, and a backward of nothing pretends.
def accumulate(w, micros, rows):
    for x, y in micros:
        (((x @ w - y) ** 2).sum() * 0).backward()
        w.grad = w.grad + 2 * x.T @ (x @ w.detach() - y) / rows


# %% [markdown]
# **5.** How many bytes does a KV cache hold?


# %% tags=["exercise"]
def cache_bytes(layers, width, batch, tokens, each):
    """Bytes of all keys and values; `each` is the bytes of a number."""
    ### BEGIN SOLUTION
    return 2 * layers * width * batch * tokens * each
    ### END SOLUTION


check("bytes of a KV cache", exercises.cache_bytes, cache_bytes)

# %% [markdown] tags=["hint"]
# In each layer every token leaves two vectors. How wide are they?


# %% tags=["wrong"]
# FAIL: a key and a value
# MISTAKE: Keys are counted and values not, or the other way round.
def cache_bytes(layers, width, batch, tokens, each):
    return layers * width * batch * tokens * each


# %% tags=["wrong"]
# FAIL: mind batch and bytes of a number
# MISTAKE: The batch is forgotten.
def cache_bytes(layers, width, batch, tokens, each):
    return 2 * layers * width * tokens * each


# %% tags=["wrong"]
# FAIL: GPT-2 small, one text
# MISTAKE: One layer is counted, not all.
def cache_bytes(layers, width, batch, tokens, each):
    return 2 * width * batch * tokens * each


# %% tags=["wrong"]
# FAIL: eight texts in 16 bit: mind batch and bytes of a number: expected 3.0199e+08, got 6.0398e+08
# MISTAKE: Numbers are taken to have 4 bytes.
def cache_bytes(layers, width, batch, tokens, each):
    return 2 * layers * width * batch * tokens * (4 if tokens > 1 else 1)


# %% tags=["wrong"]
# FAIL: expected 2, got 3
# MISTAKE: Queries are counted as well; nobody reads them again.
def cache_bytes(layers, width, batch, tokens, each):
    return 3 * layers * width * batch * tokens * each


# %% [markdown]
# **6. A puzzle: what to keep.** Keep all 16 B T C numbers of a block, or its input alone? There is something
# between: what is not kept is rebuilt in backward, once, by the operations in the table (norms and gelu cost next
# to nothing). There is room for 8 B T C, the input included. What do you keep, for T tokens and C = 768? The
# score is the rebuilding at T = 256, 1024 and 8192 together, in C² operations a token; at most 16 pass. One answer for
# all three does not. (x2 is the stream after attention, wide what goes into the gelu.)


# %% tags=["exercise"]
def what_to_keep(T):
    """Names of the table: what is kept besides the block's input."""
    ### BEGIN SOLUTION
    from itertools import combinations

    sizes = {name: size for name, (size, *_) in exercises.PARTS.items()}
    choices = (list(c) for n in range(len(sizes) + 1) for c in combinations(sizes, n))
    fitting = [c for c in choices if 1 + sum(sizes[name] for name in c) <= exercises.ROOM]
    return min(fitting, key=lambda kept: exercises.rebuilding(kept, T))
    ### END SOLUTION


parts = [(name, size, f"{a} C² + {b} T C") for name, (size, a, b) in exercises.PARTS.items()]
table(parts, ["kept or not", "B T C", "operations a token to rebuild it"])
check("what to keep", exercises.what_to_keep, what_to_keep)

# %% [markdown] tags=["hint"]
# Three of the seven cost nothing to rebuild. How much room do the others take, and which of them becomes dearer as T
# grows?


# %% tags=["wrong"]
# FAIL: 97.3 C² operations a token; at most 16 pass
# MISTAKE: Nothing is kept, all is computed again.
def what_to_keep(T):
    return []


# %% tags=["wrong"]
# FAIL: T = 256: input and kept are 16 B T C, and there is room for 8
# MISTAKE: Everything is kept, and there is no room for it.
def what_to_keep(T):
    return list(exercises.PARTS)


# %% tags=["wrong"]
# FAIL: 18 C² operations a token
# MISTAKE: The choice for long texts is taken for short ones.
def what_to_keep(T):
    return ["attention", "x2", "wide"]


# %% tags=["wrong"]
# FAIL: 55.3 C² operations a token
# MISTAKE: What costs most by width alone, whatever the length.
def what_to_keep(T):
    return ["wide", "qkv"]  # what costs most in C²


# %% tags=["wrong"]
# FAIL: 16.7 C² operations a token
# MISTAKE: The right idea with the border between short and long at a wrong place.
def what_to_keep(T):
    return ["wide", "qkv"] if T < 2048 else ["attention", "x2", "wide"]


# %% tags=["wrong"]
# FAIL: ['mlp'] is none of ln_1, qkv, attention, x2, ln_2, wide, gelu
# MISTAKE: A name that is not in the table.
def what_to_keep(T):
    return ["qkv", "mlp"]


# %% tags=["wrong"]
# FAIL: return a list of names
# MISTAKE: Text is returned, not a list of names.
def what_to_keep(T):
    return "wide"


# %% [markdown]
# ## Questions
#
# 1. GPT-2 XL has 1.56 billion parameters. How many bytes do weights, gradients and AdamW's state take in float32?
#    <details><summary>answer</summary>16 bytes each: 24.9 GB (1e9), before any activation.</details>
# 2. Your first loss is 9.0, the vocabulary 50,257. What do you suspect?
#    <details><summary>answer</summary>Targets leak into the input, or are not shifted, or some targets do not
#    count.</details>
# 3. Why does backward cost twice the forward?
#    <details><summary>answer</summary>Each matrix needs two products: one for its input's gradient, one for its
#    own.</details>
# 4. Which activations does recomputation keep, and what does it cost?
#    <details><summary>answer</summary>The input of each block; one more forward, about a third more work.</details>
# 5. Doubling T doubles which terms, and quadruples which?
#    <details><summary>answer</summary>Matrix flops and saved bytes double; attention's flops quadruple.</details>
# 6. AdamW's curve is right although gradients are eight times too large. Which two checks see it?
#    <details><summary>answer</summary>Comparing gradients (or their norm), and a few steps with SGD.</details>
#
# ## Read on
#
# - Radford et al. 2019, *Language models are unsupervised multitask learners*: GPT-2 itself, in two pages of method.
# - Karpathy 2024, *llm.c*: forward and backward of the same model in 1,000 lines of C, worth reading once in full.
# - Chen et al. 2016, *Training deep nets with sublinear memory cost*: where recomputation comes from.
# - Loshchilov and Hutter 2019, *Decoupled weight decay regularization*: what the W in AdamW changes.
# - Chowdhery et al. 2022, *PaLM*, appendix B: how flops and their utilisation are counted.
#
# **Next**: [02 Hardware and timing](02_hardware_and_timing.ipynb).
