"""What cannot be is refused in a sentence with the way out: calls of the whole package, one table.

A line is a call and words of the sentence; `...` is for any. Plans are in `test_refused`, wrong types and numbers
out of range in `test_arguments` and `test_numbers`, what users type in `test_bad_input`.
"""

from argparse import Namespace
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from planting import planted
from sharding_cases import CONFIG as CUT
from sharding_cases import graph
from test_refused import matches
from torch.func import grad

from gpt2lab.algorithms import hierarchical
from gpt2lab.benchmarks import context, races
from gpt2lab.corpus import Batches, downloads
from gpt2lab.corpus.loaders import InOrder, each_reads
from gpt2lab.experts.mixture import Experts
from gpt2lab.generate import Sampling, generate
from gpt2lab.lessons.labs import copies
from gpt2lab.lessons.labs.sharding import MLP as MLP_NAMES
from gpt2lab.machine.links import Link, Network
from gpt2lab.machine.timing import together
from gpt2lab.model import GPT2, MLP, PRESETS, GPT2Config
from gpt2lab.parallel.context import costs, exchanges, halo
from gpt2lab.parallel.context.borrow import Share
from gpt2lab.parallel.context.layouts import TokenLayout, loans
from gpt2lab.parallel.context.layouts import layout as tokens
from gpt2lab.plan import Plan, build
from gpt2lab.planner import alpa, balance, choose, failures, memory, metrics, placement, problem, scale
from gpt2lab.planner.balance import best_cut
from gpt2lab.planner.cost import predict, timetable
from gpt2lab.planner.events import Job, simulate_jobs
from gpt2lab.planner.fit import fit
from gpt2lab.planner.placement import Placing, list_schedule
from gpt2lab.planner.problem import Cluster, Device, Operator, OperatorGraph
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Axis, Mesh
from gpt2lab.run import Options
from gpt2lab.schedules import check, from_csv, make, to_csv
from gpt2lab.schedules.asynchronous import make_stream
from gpt2lab.schedules.phases import v_placement
from gpt2lab.schedules.registry import NAMES
from gpt2lab.sharding import cost, named, operators, propagate
from gpt2lab.sharding.capture import capture
from gpt2lab.sharding.describe import analyse
from gpt2lab.sharding.gpt2 import captured_gpt2, captured_module
from gpt2lab.sharding.layout import Layout
from gpt2lab.sharding.layout import check as check_layout
from gpt2lab.sharding.propagate import Mark
from gpt2lab.sharding.staged import CutStage, Staged
from gpt2lab.sharding.tofu import LinkChain
from gpt2lab.storage import huggingface
from gpt2lab.tasks.gpt2 import GPT2Tasks
from gpt2lab.tasks.graph import TaskGraph, reads
from gpt2lab.train import Recipe, Trainer

EVEN = Experts(8, 2, router="expert_choice", balance=0.0, every=2)
SMALL = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
FREE = Cluster(8, Device(1e9), Network(Link(0, float("inf"))))
GRID, LINE = {"x": 2, "y": 2}, {"x": 2}
ONE, IMAGE, KERNEL = torch.zeros(4, 6), torch.zeros(1, 2, 6, 6), torch.zeros(2, 2, 3, 3)
ROWS = torch.zeros(2, 2, dtype=torch.long)
TWO = OperatorGraph.chain([Operator("a", 1, 1, kept=3 * 2**20), Operator("b", 1, 1, kept=2**20)])
LONG_JOB = failures.LongJob(1000, 1e9, 24.0, 0.01, 0.1, 1.0)

PAIR, X = Axis("dp", (0, 1), 0), torch.ones(4)
LAPTOP, MODEL = problem.find_cluster("laptop"), GPT2(CUT)
TRAINER = Trainer(build(Plan(), CUT, Mesh()))
TASKS = TaskGraph({"a": torch.zeros(4, 6)})
MLP_GRAPH = captured_module(MLP(CUT), torch.ones(3, 5, CUT.n_embd), MLP_NAMES)


def placing(model: str | GPT2Config, devices: int):
    """The layers of a model, to be placed on laptops."""
    layers = problem.gpt2_layers(PRESETS.get(model, model), 1, 64)
    return placement.Placing(layers, LAPTOP.with_devices(devices))


def searched(most: int):
    """The best placement of a large model, by a search that ends after so many parts of placements."""
    with planted(placement, "MOST", lambda _: most):
        placement.branch_and_bound(placing("gpt2-xl", 4))


def staged(*stages):
    """Stages of a chain, each of its first link, cuts, ranks and mesh."""
    return Staged(LinkChain(graph()), [CutStage(*one) for one in stages])


parse = lambda text: Layout.parse(text, list(GRID))
marked = lambda marks, mesh: propagate.propagate(graph(), marks, mesh)
timed = lambda *split, window=None: context.check(
    Namespace(splits=[split], ranks=2, heads=4, lengths=64, width=8, window=window)
)
predicted = lambda text, rows=8: predict(Plan.parse(text), SMALL, rows, 16, FREE)
mixed = lambda text, experts: predict(Plan.parse(text), replace(SMALL, experts=experts), 8, 16, FREE)

CALLS = [
    # the model, its data, its training
    (lambda: GPT2Config(n_embd=24, n_head=5),
     "width 24 cannot be split over 5 heads (24 % 5 = 4). Use n_head = 3, 4, 6"),
    (lambda: Trainer(build(Plan(), CUT, Mesh()), Recipe("adan")),
     "There is no optimizer 'adan' here. Use adamw, muon or"),
    (lambda: huggingface.load("gtp2"),
     "no folder 'gtp2', and the only published model fetched by name is 'gpt2'"),
    (lambda: downloads.download("tinyshakespear"), "'tinyshakespear'...tinyshakespeare, tinystories-valid"),
    (lambda: Batches(np.arange(1000), 1, 100, split="val"), "val split ... 100"),
    (lambda: Batches(np.arange(1000), 1, 8, split="test"), "'test'"),
    (lambda: each_reads(Batches(range(99), 2, 4), 0, Mesh(alone=True)["dp"], "columns"),
     "no shape 'columns' ... rows, contiguous, interleaved"),
    (lambda: InOrder(range(3), 1, 10), "needs 11 tokens...the text has 3. Use a longer text."),
    (lambda: InOrder(range(30), 4, 10), "Use a longer text, or at most 2 rows."),
    (lambda: Sampling(top_p=1.5), "top_p"),
    (lambda: Sampling(temperature=0, top_k=3), "top_k would change nothing: temperature = 0"),
    (lambda: Sampling(temperature=0, seed=3), "seed would change nothing: temperature = 0"),
    (lambda: Recipe("sgd", eps=1e-6), "eps would change nothing: sgd keeps no moments. Leave it out."),
    (lambda: Recipe("sgd", betas=(0.9, 0.99)), "betas would change nothing: sgd"),
    (lambda: GPT2Config(n_layer=2, experts=Experts(every=5)), "every = 2 or less"),
    (lambda: Recipe(warmup=6, decay_steps=5), "Use a warmup of at most 5."),
    (lambda: Recipe(clip=-1), "clip = -1"),
    (lambda: TRAINER.evaluate([]), "There is no batch to evaluate. Give at least 1."),
    *((lambda given=given: generate(MODEL, *given), words) for given, words in (
        (([], 2), "Give at least"), (([[1]], -2), "Give at least"), (([[]], 2), "Begin with"),
        (([[99]], 2), "outside 0 to 36"))),
    *((lambda one=one: Options(**one).check(), f"{said} is unknown. Use")
      for one, said in (({"config": "micro"}, "--config 'micro'"), ({"dtype": "float16"}, "--dtype 'float16'"),
                        ({"optimizer": "adan"}, "--optimizer 'adan'"), ({"recipe": "ours"}, "--recipe 'ours'"))),
    # ranks
    (lambda: Mesh(dp=3, tp=2), "is a mesh of 6 ranks, but the world has 1"),
    (lambda: Mesh(xp=2), "No axis is called xp. The axes are pp, dp, cp, tp."),
    (lambda: hierarchical.node_size(6, 4),
     "6 ranks cannot be split into nodes of 4 (6 % 4 = 2). Use 1, 2, 3, 6"),
    (lambda: together([[(0.0, 1.0)], []]), "argument 2 is shorter than argument 1"),
    (lambda: trace.span("x", kind="forwards").__enter__(), "'forwards'...forward, backward"),
    (lambda: GPT2Tasks(GPT2(SMALL), 2, 3, lambda n: None, axis=Axis("dp", (0, 1, 2, 3), 0)),
     "4 ranks have rows of their own. Give total"),
    (lambda: GPT2Tasks(GPT2(SMALL), 2, 3, lambda n: None, axis=Axis("dp", (0, 1, 2, 3), 0), sliced=True),
     "3 tokens cannot be spread over 4 ranks. Use at most 3."),
    *((lambda more=more: GPT2Tasks(GPT2(replace(SMALL, **more)), 2, 3, None),
       "Tasks are made of a dense GPT-2 that sees all tokens, without dropout")
      for more in ({"window": 0}, {"dropout": 0.1}, {"experts": EVEN})),
    *((lambda call=call: call(X, PAIR, root=2), "root=2 is no position on axis 'dp'. Use 0 to 1.")
      for call in (comm.broadcast, comm.reduce, comm.scatter, comm.gather)),
    (lambda: comm.broadcast(X, PAIR, "a"), "root='a' is no position"),
    *((lambda call=call: call(X, PAIR, 9), "to=9 is no position") for call in (comm.isend, comm.send)),
    *((lambda call=call: call(X, PAIR, 2), "=2 is no position") for call in (comm.isend, comm.irecv)),
    (lambda: comm.isend(X, PAIR, None), "to=None is no position"),
    (lambda: comm.ring_shift(X, PAIR, 0.5), "to=0.5 is no position"),
    *((lambda call=call: call(X, PAIR, -3), "source=-3 is no position") for call in (comm.irecv, comm.recv)),
    *((lambda call=call: call(3.0, PAIR), "is a float, not a tensor. Use torch.tensor") for call in (
        comm.all_reduce, comm.all_gather, comm.gather_replicated, comm.reduce_scatter, comm.scatter_to,
        comm.gather_flat, comm.reduce_scatter_flat, comm.copy_to, comm.reduce_from, comm.ring_shift)),
    *((lambda call=call: call(3.0, PAIR, 1), "is a float, not a tensor. Use torch.tensor")
      for call in (comm.send, comm.recv)),
    (lambda: comm.all_to_all([1.0, 2.0], PAIR), "its parts are no tensors. Use 2"),
    (lambda: comm.all_to_all([X, X.double()], PAIR), "parts are of torch.float32 and torch.float64"),
    (lambda: comm.all_to_all([X], PAIR), "Pass one part per rank"),
    (lambda: comm.all_to_all([X, X], PAIR, [(4,)]), "Pass one part per rank"),
    *((call, "is a str, not an axis. Use one of a mesh") for call in (
        lambda: comm.all_reduce(X, "dp"), lambda: comm.barrier("dp"), lambda: comm.all_to_all([X, X], "dp"))),
    *((lambda call=call: call(X, PAIR, dim=1), "dim=1 is no dimension of a tensor of shape (4,). Use 0 to 0.")
      for call in (comm.all_gather, comm.reduce_scatter, comm.scatter_to)),
    (lambda: comm.all_gather(torch.tensor(1.0), PAIR), "dim=0 is no dimension of a tensor of shape (). Use x.view(1)."),
    (lambda: comm.scatter(X, PAIR, sizes=[1, 1]), "do not cut length 4 into 2 parts"),
    (lambda: comm.scatter_to(X, PAIR, 0, [1, 1]), "do not cut length 4 into 2 parts"),
    (lambda: comm.reduce_scatter(X, PAIR, 0, [4]), "do not cut length 4 into 2 parts"),
    (lambda: comm.reduce_scatter(X, PAIR, 0, [5, -1]), "do not fit length 4 on 2 ranks. Use one length"),
    *((lambda call=call: call(X, PAIR, sizes=[4]), "rank 0 of 2 holds 4 along dim 0, but sizes=[4]")
      for call in (comm.gather, comm.all_gather)),
    (lambda: comm.gather_objects(lambda: 1, PAIR), "Send numbers, strings, tensors"),
    (lambda: TASKS.add("t", print, reads("z")), "'t' reads 'z', which is none"),
    (lambda: TASKS.add("t", print, reads("a", (0, 5))), "'t' reads a[0:5...shape (4, 6)"),
    # context
    (lambda: tokens("zickzack", 8, 2), "'zickzack'. Use one of contiguous, unequal, interleaved, zigzag"),
    (lambda: exchanges.exchange("rings"),
     "'rings'. Use one of qkv, kv-allreduce, kv, ...ring, heads, halo-kv"),
    (lambda: TokenLayout("mine", ((0, 1), (1, 2))), "every token 0..3 exactly once"),
    (lambda: costs.kept_numbers(SMALL, 1, tokens("zigzag", 11, 2), 0, "rings"),
     "no formula for an exchange called 'rings'"),
    (lambda: exchanges.Split(Mesh()["cp"], "zigzag", "kv-roots", None),  # it would sum nothing
     "one axis of contributors for each of 1 roots, and here are 0. Give"),
    (lambda: loans(tokens("interleaved", 11, 2), 1),
     "interleaved layout rank 0 owns tokens 0 to 10 with gaps"),
    (lambda: halo.halo_exchange(ONE, Share(tokens("contiguous", 4, 2), Mesh()["cp"], 1), 1, way="pigeon"),
     "'pigeon'. Use one of sendrecv, isend, allgather, alltoall"),
    (lambda: timed("contiguous", "halo-kv"), "halo-kv is for windowed attention"),
    (lambda: timed("spiral", "kv"), "no layout called 'spiral'"),
    (lambda: timed("zigzag", "post"), "no exchange called 'post'"),
    (lambda: timed("zigzag"), "no exchange called ''"),
    (lambda: timed("contiguous", "halo-x", window=3), "halo-x exchanges a layer's input...Use halo-kv"),
    (lambda: timed("contiguous", "halo-kv", window=63), "A window of 63 hides none of 64 tokens. Leave it out"),
    # options of a benchmark beside each other
    *((lambda line=line: races.arguments(line.split()[0], line.split()[1:]), word) for line, word in (
        ("data --pairs zero=3 --bucket 7", "--bucket would change nothing: only --pairs bucket"),
        ("context --window 5 --over shm", "--over would change nothing: PyTorch's ring has no window"))),
    # experts
    (lambda: Experts(router="best"), "There is no router 'best'. Use switch, gshard"),
    (lambda: Experts(group="rows"), "There is no group 'rows'. Use row, batch, rank"),
    (lambda: Experts(experts=4, top_k=5), "cannot ask for top_k = 5 of 4 experts. Use top_k = 4 or less"),
    (lambda: Experts(router="switch"), "asks for 1 expert a token, not for top_k = 2. Use top_k = 1"),
    (lambda: Experts(router="gshard", top_k=3), "asks for 2 experts a token, not for top_k = 3"),
    (lambda: Experts(top_k=1), "weight 1 whatever it learns. Use top_k = 2 or more, or the router switch"),
    (lambda: Experts(speed=0.5), "speed = 0.5 would change nothing: the router mixtral has no load bias"),
    (lambda: Experts(random_second=True), "random_second is GShard's, not mixtral's"),
    (lambda: copies.dealt([1] * 8, 4, 1), "4 ranks with room for 1 do not fit 8 experts. Use 2."),
    (lambda: copies.dealt([1] * 8, 4, 9), "4 ranks with room for 9 do not fit 8 experts. Use 2."),
    (lambda: mixed("dp=2,ep=2,tp=2", EVEN), "beside dp, zero, micro and recompute alone, not in"),
    (lambda: mixed("dp=4,ep=4,node=2", EVEN), "beside dp, zero, micro and recompute alone, not in"),
    (lambda: mixed("dp=4", EVEN), "has all experts on every rank. Use ep=2 or more"),
    (lambda: mixed("dp=2,ep=2", Experts(8, 2, shared=1)), "where each is GPT-2's MLP"),
    # schedules
    (lambda: check(make("1f1b", 4, 8), buffers=0), "Deadlock: rank 0 cannot send 0F3 (no free buffer)"),
    (lambda: check(make("breadth_first", 4, 8), buffers=1), "Deadlock"),
    (lambda: check(make("gpipe", 4, 8), promise=(4, 3, 2, 1)),
     "rank 0 holds 8 activations at its peak, but 4 were promised"),
    (lambda: make("chimaera", 4, 8), "Did you mean chimera"),
    (lambda: make("1f1b", 4, 8, chunks=2), "no option 'chunks'. It takes no options"),
    *[(partial(make, name, 0, 8), "stages = 0: a pipeline needs at least 1") for name in NAMES],
    (lambda: v_placement(0), "stages = 0: a pipeline needs at least 1. Use stages = 1 or more"),
    *[(partial(make, name, 4, 0), "micro-batches = 0: a pipeline needs at least 1") for name in NAMES],
    (lambda: to_csv(make_stream("pipedream", (2, 1), 4).schedule), "stage on several ranks cannot be written"),
    (lambda: from_csv("0X0"), "'0X0' is not an operation"),
    (lambda: from_csv("\n"), "There is no operation"),
    (lambda: make_stream("pipedream", (2, 1), 7),
     "7 batches make no whole rounds over 2 ... Use a multiple of 2"),
    (lambda: make_stream("2bw", (2, 1), 4, 3), "schedule=2bw with micro=3 cannot have replicas"),
    (lambda: make_stream("2bw", 4, 2, 3),
     "at least pp=4 micro-batches, and here are 3...Use micro=4 or more"),
    (lambda: make_stream("ampnet", 4, 2, active=5), "active=5 ... pp=4 ... Use active=1 to 4"),
    (lambda: make_stream("gpipe", 4, 2), "There is no asynchronous schedule 'gpipe'"),
    # planner
    (lambda: choose.Goal(8, 32, least="money"),
     "A goal cannot be the least 'money'. Use time, memory, devices."),
    (lambda: choose.parallelize(SMALL, FREE, choose.Goal(8, 99)),
     "Sequences of 99 tokens do not fit into 16 positions. Use 1 to"),
    (lambda: memory.memory(Plan(), SMALL, 8, 16, optimizer="lion"),
     "There is no optimizer 'lion' here. Use adamw or sgd."),
    (lambda: predicted("dp=16", 16), "needs 16 devices and the cluster has 8"),
    (lambda: predicted("tp=3"), "4 attention heads cannot be split over tp=3"),
    (lambda: predicted("pp=2,schedule=pipedream"), "no step that all stages make together"),
    (lambda: simulate_jobs([Job("a", 0, 1, ((1, 0),)), Job("b", 0, 1)], Cluster(1, Device(1))),
     "2 of 2 jobs never start, a first"),
    (lambda: problem.gpt2_block(PRESETS["nano"], 2, 32, groups=3), "4 heads cannot form 3 groups"),
    (lambda: OperatorGraph((Operator("a", 1, 1), Operator("b", 1, 1)), ((1, 0),)), "from operator 1 to 0"),
    (lambda: problem.find_cluster("h200"), "No cluster is called 'h200'"),
    (lambda: list_schedule(Placing(TWO, Cluster(2, Device(1, memory=2 * 2**20)))),
     "a alone needs 3 MiB, a device has 2 MiB: 1 MiB are short"),
    (lambda: best_cut([1, 2], 3), "2 layers cannot be cut into 3 stages"),
    (lambda: alpa.cluster_bounds([5, 5, 5], [1, 1, 1], 2, slack=0.1),
     "3 operators cannot form 2 layers ... Allow more slack"),
    (lambda: scale.collective("rings", 8, 8, scale.Fabric()),
     "No collective is called 'rings'. Use one of: ring, tree"),
    (lambda: scale.collective("hierarchical", 12, 96, scale.Fabric()),
     "12 ranks make no machines of 8 (12 % 8 = 4)"),
    (lambda: failures.goodput(LONG_JOB, "hope", 1.0),
     "No policy is called 'hope'. Use one of: wait, hot spare, elastic"),
    (lambda: metrics.karp_flatt(1.0, 1), "Measure 2 or more"),
    (lambda: metrics.average_parallelism([]), "no spans"),
    (lambda: fit([(1, 2, 3), (1, 3, 4)]), "A line through 2 points"),
    (lambda: fit([(2, 10, 1), (2, 10, 2), (4, 20, 3)]), "same bytes per message"),
    (lambda: balance.slowest([1, 2], [0, 5]), "Use rising ones, 0 to 2"),
    (lambda: scale.equal_parts(-5, 2), "size = -5 does not fit"),
    (lambda: scale.equal_parts(5, 0), "parts = 0 does not fit"),
    (lambda: alpa.cluster_bounds([1, 2], [1], 1), "2 operators have 1 outputs"),
    (lambda: alpa.count_pipelines(-1, 4, 2, 1), "operators = -1 does not fit"),
    (lambda: timetable(Plan(pp=2), CUT, 8, 10**9, LAPTOP), "Sequences of 1000000000 tokens do not fit"),
    (lambda: placement.exhaustive_placement(placing("gpt2", 4)), "take too long"),
    (lambda: placement.exhaustive_placement(placing(GPT2Config(n_layer=600), 4)), "1.0e+300 placements take too"),
    (lambda: searched(1000), "1,000 parts of placements were tried, and more are left. Use list_"),
    (lambda: LAPTOP.with_devices(10**12), "devices = 1000000000000 does not fit"),
    # sharding
    (lambda: parse("S0S0"), "mesh axis 'x' is used 2 times"),
    (lambda: parse("S0RP0"), "mesh axis 'x' is used 2 times"),
    (lambda: parse("S2R"), "names axis 2, but the mesh has 2"),
    (lambda: parse("Q"), "layout 'Q' is not understood"),
    (lambda: parse("S0-R"), "layout 'S0-R' is not understood"),
    (lambda: parse("P0R"), "layout 'P0R' is not understood"),
    (lambda: cost.adjoint(parse("RM0"), parse("RR")), "from a partial maximum has no gradient. Give"),
    (lambda: Layout.named("width:x", ("batch", "ff")), "does not fit a tensor with dimensions batch, ff"),
    (lambda: check_layout(parse("S01R"), (3, 5), GRID),
     "a dimension of 3 cannot be cut into 4 parts over x x y"),
    (lambda: check_layout(parse("S0"), (3, 5), GRID), "1 dimensions does not fit a tensor of 2"),
    (lambda: check_layout(Layout((("z",),)), (3,), GRID), "no axis 'z'. Its axes are x, y"),
    (lambda: cost.path(parse("RR"), parse("RRM0"), (7, 5), GRID), "no steps lead from RR to RRM0"),
    (lambda: analyse(lambda x: lambda i: x[i] + x[i, i]), "read with different numbers of indices"),
    (lambda: operators.rule("sort", ((3,),), (3,)), "operator 'sort' has no description"),
    (lambda: capture(lambda x: (x.cumsum(0),), {"x": ONE}, ["y"]), "operator 'cumsum' has no description"),
    (lambda: capture(lambda x: (x.reshape(3, 8),), {"x": ONE}, ["y"]),
     "a reshape from 4 x 6 to 3 x 8 mixes dimensions"),
    (lambda: capture(lambda x, w: (F.conv2d(x, w, padding=1),), {"x": IMAGE, "w": KERNEL}, ["y"]),
     "padding [1, 1]... is not captured. Use stride 1"),
    *((lambda form=form: capture(form, {"x": ONE, "at": ROWS}, ["y"]), words) for form, words in (
        (lambda x, at: x.unfold(0, 2, 2), "unfold is captured only with windows one step apart"),
        (lambda x, at: x.scatter(1, at, 1.0), "scatter is captured only with a number at one place of each row"),
        (lambda x, at: x.scatter(1, at, x), "scatter is captured only with a number at one place of each row"),
        (lambda x, at: x.scatter(1, at.sum((0, 1), keepdim=True), 1.0), "captured only with a number at one place"),
        (lambda x, at: x.scatter(1, at, 1.0, reduce="add"), "scatter is captured only with a number at one place"),
        (lambda x, at: torch.addmm(x, x, torch.eye(6)), "addmm is captured only with a bias of one dimension"),
        (lambda x, at: x.view(torch.int64), "view is captured only with a shape"),
        (lambda x, at: x * torch.tensor([2.0]), "reads a tensor that is none of its inputs. Make it one of them"),
        (lambda x, at: x.gather(1, at), "an operator reads a part of a dimension. Give it all of it"),
        (lambda x, at: grad(lambda w: F.embedding(at, w, padding_idx=0).sum())(x),
         "embedding_dense_backward is captured only with neither padding_idx nor scale_grad_by_freq"))),
    (lambda: capture(lambda x: (2 * x,), {"x": ONE[:0]}, ["y"]), "x of shape (0, 6) has no elements"),
    (lambda: graph(None, replace(CUT, n_layer=1, window=3)), "attention with a window is not captured"),
    (lambda: graph(None, replace(CUT, n_layer=1, dropout=0.1)), "dropout is not captured. Use"),
    *((lambda recipe=recipe: graph(recipe, replace(CUT, n_layer=1)), "captured with sgd or adamw, at one rate")
      for recipe in (Recipe(warmup=5), Recipe(decay_steps=9), Recipe(autocast=True), Recipe("muon"))),
    (lambda: LinkChain(replace(graph(), aliases={})), "no chain of links. Use captured_gpt2"),
    (lambda: marked({"h.0.mlp.fc.weight": Mark("ff:x")}, {"x": 4}),
     "no such value. Did you mean 'h.0.mlp.c_fc.weight'"),
    (lambda: marked({"wte.weight": Mark("width:x")}, {"x": 4}),
     "does not fit a tensor with dimensions vocab, embd"),
    (lambda: marked({"wte.weight": Mark("S0S0")}, {"x": 4}), "mesh axis 'x' is used 2 times"),
    (lambda: marked({"wte.weight": Mark("S3R")}, {"x": 4}), "names axis 3, but the mesh has 1"),
    (lambda: marked({"h.0.attn.c_attn.weight": Mark("qkv:x")}, {"x": 4}),
     "a dimension of 3 cannot be cut into 4 parts over"),
    (lambda: marked({"addmm": Mark("batch:x")}, {"x": 4}), "the dimensions of 'addmm' have no names"),
    (lambda: marked({"wte.weight": Mark("RRP0")}, LINE),
     "terms of a sum over 'x', which only operators make. Use RR"),
    (lambda: marked({"wte.weight": Mark("S0RP1")}, GRID), "terms of a sum over 'y'... Use S0R"),
    (lambda: marked({"wte.weight": Mark("RRM0")}, LINE),
     "terms of a max over 'x', which only operators make. Use RR"),
    (lambda: marked({"wte.weight": Mark("S0R"), "wt*": Mark("RS0")}, LINE),
     "'wte.weight' say that axis 'x' leaves it cut along 0 and cut along 1. Leave one out"),
    (lambda: marked({"wte.weight": Mark("RR", closed=True), "wt*": Mark("S0R")}, LINE),
     "leaves it whole and cut along 0"),
    (lambda: marked({"wte.weight": Mark("S0R"), "wt*": Mark("", closed=True)}, LINE),
     "leaves it cut along 0 and whole"),
    (lambda: marked({"tokens": Mark("batch:x"), "tok*": Mark("batch:y")}, {"x": 3, "y": 3}),
     "together make S01R, more parts than its shape (7, 11) has. Use fewer ranks"),
    (lambda: marked({"wte.weight": Mark("S10R")}, GRID),
     "mark 'S10R' of 'wte.weight' cuts a dimension by axes in another order than the mesh has. Use S01R."),
    (lambda: marked({}, {"x": 0}), "Use a dict of which each is a whole number of 1 or more"),
    (lambda: marked({}, {"x": 2, "y": "2"}), "Use a dict of which each is a whole number of 1 or more"),
    (lambda: captured_gpt2(PRESETS["nano"], 2, 10**6), "Use at most the model's"),
    (lambda: named.marks(MLP_GRAPH, {"batch": "x", "ff": "x"}, MLP_NAMES),
     "hidden has the dimensions batch and ff, and both are on mesh axis 'x'"),
    (lambda: named.marks(MLP_GRAPH, {"colour": "x"}, MLP_NAMES),
     "no tensor has a dimension 'colour'. There are batch, embd"),
    (lambda: LinkChain(graph()).halve([()] * 6, {"x": 64}), "link 0 cannot be cut once more ... Use fewer ranks"),
    (lambda: staged((0, (), (0,), {})), "A stage of 0 links begins with link 0"),
    (lambda: staged((1, ((),) * 5, (0,), {})), "link 1, but link 0 comes next"),
    (lambda: staged((0, ((),) * 3, (0,), {}), (2, ((),) * 4, (1,), {})), "link 2, but link 3 comes next"),
    (lambda: staged((0, ((),) * 5, (0,), {})), "the chain has 6 links. Add a stage"),
    (lambda: staged((0, (("batch",),) * 6, (0,), {"y": 2})), "has 1 ranks, but its mesh ... has 2"),
    (lambda: staged((0, ((),) * 3, (0,), {}), (3, ((),) * 3, (0,), {})), "Rank 0 belongs to two stages"),
    (lambda: staged((0, (("",), ("heads",), *((("",),) * 4)), tuple(range(5)), {"y": 5})),
     "link 1 cannot be cut along heads"),
]  # fmt: skip


@pytest.mark.parametrize("call, words", CALLS, ids=[words[:50] for _, words in CALLS])
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=matches(words)):
        call()


def test_logits_that_are_not_finite_and_an_axis_that_is_missing_are_told():
    broken = GPT2(CUT)
    torch.nn.init.constant_(broken.wte.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="The logits are not finite"):
        generate(broken, [[1]], 2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis'"):
        comm.all_reduce(X)
