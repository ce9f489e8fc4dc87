"""Every argument of what is public, at odd values: it is taken where it means something, or refused in words.

Of four rooms everything public is called, `public` walks them: with arguments that `USUAL` has by their names, or `OWN`
for one call. What is new fails until its arguments have values there, or until NOT_ASKED has its name. Of the other
rooms CALLS has what a notebook calls.
"""

import importlib
import inspect
import math
import pkgutil
import re
import shutil
import time
import tomllib
import typing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from test_numbers import FUNCTIONS, ROOMS, SOON

from gpt2lab.corpus.batches import Batches
from gpt2lab.corpus.loaders import InOrder
from gpt2lab.corpus.shards import Shard, read_text, tokenise, write_shard
from gpt2lab.experts.mixture import Experts
from gpt2lab.generate import KVCache, Sampling, generate
from gpt2lab.lessons.labs import llmc_files
from gpt2lab.machine import links, speed
from gpt2lab.model import GPT2, PRESETS, GPT2Config
from gpt2lab.parallel.context import costs as context_costs
from gpt2lab.parallel.context import layouts
from gpt2lab.parallel.pipeline.stages import cut_layers
from gpt2lab.parallel.zero import costs as zero_costs
from gpt2lab.plan import Plan, build
from gpt2lab.planner import (
    balance,
    choose,
    cost,
    cuts,
    events,
    failures,
    graph_stages,
    models,
    placement,
    problem,
    published_steps,
    scale,
    search,
    tensor_costs,
)  # fmt: skip
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm, paced
from gpt2lab.ranks.axis import Axis
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.ranks.trace import Span
from gpt2lab.reference import CONFIG, example_batch, example_weights
from gpt2lab.schedules import asynchronous, make, simulate
from gpt2lab.schedules.schedule import Op
from gpt2lab.sharding import cost as sharding_cost
from gpt2lab.sharding import interpret, layout, marks
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import propagate
from gpt2lab.sharding.staged import CutStage, Staged
from gpt2lab.sharding.tofu import LinkChain
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.tasks import graph, scheduler
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import verify

LAPTOP, NANO, TWO = problem.find_cluster("laptop"), PRESETS["nano"], Plan.parse("dp=2")
LINK = links.Link(1e-6, 1e9)
CHAIN = problem.gpt2_layers(NANO, 2, 8)
SHAPE = tensor_costs.Shape(2, 8, 16, 2, 2)
OPERATORS = cuts.gpt2_cuts(NANO, 8, 16)[:3]
PROBLEM = cuts.ChainProblem(OPERATORS, LAPTOP.with_devices(2), 8, 16, NANO.n_embd)
AT, HERE = cuts.Assignment(0, 1), cuts.Assignment(0, 2, ("whole", "sample"))
PLAN = (AT, AT, HERE)
PRICED = choose.PricedPlan(TWO, cost.predict(TWO, NANO, 8, 16, LAPTOP))
JOB = failures.LongJob(8, 1e3, 10.0, 1.0, 1.0, 30.0)
BALANCED = balance.Chain((1.0, 2.0), (1.0, 2.0), (1.0, 1.0), (1.0, 1.0), 1.0)
PLACING = placement.Placing(CHAIN, LAPTOP)
TABLE = tomllib.loads(Path(problem.__file__).with_name("clusters.toml").read_text())["h100x64"]
RANKS = np.array([0, 1])
SPANS = [Span("a", "forward", 0.0, 1.0), Span("b", "wait", 1.0, 2.0)]
CAPTURED, X2 = captured_gpt2(GPT2Config(7, 4, 1, 2, 4), 2, 3), {"x": 2}
SPREAD, ALONE_X = propagate(CAPTURED, marks.batch("x"), X2), propagate(CAPTURED, {}, {"x": 1})
PROGRAM, CHAINED = partition(CAPTURED, SPREAD, X2), LinkChain(CAPTURED)
LINEAR = {"x": ("batch", "embd"), "weight": ("ff", "embd"), "bias": ("ff",)}
ALL_BATCH = [("batch",)] * CHAINED.count
WHOLE = CutStage(0, tuple(ALL_BATCH), (0, 1), X2)
ONE_RANK, WHOLE_X, ONES = {"x": Axis("x", (0,))}, layout.Layout(((), ())), torch.ones(2, 2)
PATH = sharding_cost.path(layout.Layout((("x",), ())), WHOLE_X, (2, 3), X2)
NOTES, FILLED = (graph.TaskGraph({"a": torch.zeros(2)}) for _ in range(2))
FILLED.add("t", lambda x: None, graph.Access("reads", "a", ((0, 1),)))
ONE, F00 = make("1f1b", 2, 2), Op("F", 0, 0)
STREAM = asynchronous.make_stream("pipedream", 2, 3)
USUAL = {  # of each room the values of arguments by their names
    "planner": {
        "config": NANO, "rows": 8, "length": 16, "save": 1.0, "failures": 10.0, "interval": 2.0, "restart": 1.0,
        "a": AT, "again": True, "at": HERE, "b": HERE, "bandwidth": 1.0, "before": AT, "behind": 0, "block": (0, 2),
        "chain": BALANCED, "changes": {(0, 1): [[1.0], [2.0]]}, "chunks": 2, "cluster": LAPTOP, "comm": 1.0,
        "compute": 1.0, "costs": [[1.0, 2.0], [3.0]], "count": 1, "cut": ("whole", "sample"), "device": 0, "devices": 2,
        "each": 1e3, "edges": CHAIN.edges, "fabric": scale.Fabric(), "first": 0, "flops": 1.0, "found": PRICED,
        "goal": choose.Goal(2, 8), "graph": CHAIN, "heads": 2, "itemsize": 4, "job": JOB,
        "jobs": [events.Job("a", 0, 1.0)], "last": 1, "layers": 2, "machines": 8, "mean": 1.0, "micros": 2, "n": 4,
        "name": "a", "near": True, "number": 0, "numbers": 4, "operators": OPERATORS, "output": 1, "plan": TWO,
        "planner": balance.dapple, "policy": "wait", "problem": PROBLEM, "ranks": 2, "rate": 1e9, "repair": 10.0,
        "replicas": 1, "rule": search.one_device, "samples": [(1, 8, 1.0), (2, 8, 2.0), (1, 16, 3.0), (2, 16, 4.0)],
        "schedule": ONE, "seconds": 1.0, "serial": 2.0, "parallel": 1.0, "serial_fraction": 0.5, "shape": SHAPE,
        "size": 64, "source": RANKS, "spans": SPANS, "speedup": 2.0, "spread": 0.1,
        "stages": (balance.ChainStage(0, 1), balance.ChainStage(1, 2)), "table": TABLE, "target": RANKS[::-1],
        "text": "4GiB", "times": [1.0, 2.0, 3.0], "total": 4, "where": [0] * len(CHAIN), "words": models.MODELS["7b"],
        "work": 5.0, "workers": 2, "world": 1, "width": 16, "bounds": (0, 1, 3), "border": 1, "rank": 0,
    },
    "schedules": {
        "batches": 2, "keep": 1, "kind": "F", "layers": 2, "micro": 0, "micros": 2, "name": "1f1b", "op": F00,
        "orders": ONE.orders, "per_update": 2, "placement": ONE.placement, "position": 0, "rank": 0, "ranks": 2,
        "schedule": ONE, "stage": 0, "stages": 2, "stream": STREAM, "text": "0F0,0B0", "time": lambda a, b: a + b,
        "timeline": simulate(ONE), "times": [1.0, 2.0], "tokens": 8, "unit": 0, "width": 4,
    },
    "sharding": {
        "a": ("batch",), "axes": ONE_RANK, "axis": "x", "b": ("batch",), "before": (), "body": lambda i: i,
        "chain": CHAINED, "choice": ("batch",), "choices": ALL_BATCH, "config": GPT2Config(7, 4, 1, 1, 2),
        "cut": ["x"], "describe": lambda a: lambda i: a[i], "dst": WHOLE_X, "first": 0, "function": lambda x: x + x,
        "graph": CAPTURED, "inner": 2, "inputs": {"x": torch.ones(2)}, "k": 4, "last": 1, "layout": WHOLE_X,
        "layouts": PATH.layouts, "length": 3, "link": 0, "m": 4, "marks": marks.batch("x"), "mesh": X2, "micros": 2,
        "module": torch.nn.Linear(2, 2), "n": 4, "name": "x", "names": LINEAR, "numbers": [0, 1], "place": {"x": 0},
        "program": PROGRAM, "rank": 0, "ranks": 2, "results": ["y"], "rows": 2, "shape": (2, 3), "sizes":
        dict.fromkeys("ABC", (4, 4)), "spread": SPREAD, "src": WHOLE_X, "stage": 0, "stages": [WHOLE],
        "steps": PATH.steps, "tensors": LINEAR, "text": "S0R", "whole": torch.ones(2, 3), "x": torch.ones(2, 2),
    },
    "tasks": {
        "axis": Axis("x", (0, 1)), "batches": lambda iteration: None, "body": lambda: None, "graph": NOTES,
        "handle": comm.Handle(None), "length": 2, "model": GPT2(CONFIG), "name": "m", "rows": 1, "source": 1,
        "tensors": {"a": torch.zeros(2)}, "to": 1,
    },
}  # fmt: skip
OWN = {  # of one call, in place of the usual ones
    "Chain": dict.fromkeys(("forward", "backward", "weights"), (1.0,)) | {"activations": ()},
    "ChainProblem": {"operators": cuts.gpt2_cuts(NANO, 8, 16), "width": 4},
    "ChainProblem.change": {"before": ("whole", "sample"), "after": ("whole", "whole")},
    "ChainProblem.enter": {"number": 1, "at": AT},
    "ChainProblem.evaluate": {"plan": PLAN},
    "ChainProblem.held": {"number": 1, "at": AT},
    "ChainProblem.job": {"number": 1},
    "ChainProblem.memory": {"plan": PLAN},
    "ChainProblem.work": {"at": AT},
    "Clock": {"plan": PLAN},
    "Cluster": {"device": problem.Device(1e9)},
    "CutStage": {"choices": (("batch",),), "ranks": (0, 1)},
    "Goal.order": {"size": 2.0},
    "GPT2Tasks": {"rows": 1},
    "Interpreter": {"axes": {"x": Axis("x", (0, 1))}},
    "Interpreter.part": {"name": "wte.weight", "whole": torch.zeros(7, 4)},
    "Layout.named": {"text": "batch:x", "dims": ("batch", "embd")},
    "Layout.parse": {"axes": "xy"},
    "Layout.whole": {"dims": 2},
    "LinkChain.halve": {"before": [()] * CHAINED.count},
    "LinkChain.recursive": {"axes": "x"},
    "LinkChain.tied": {"first": ("batch",), "last": ("batch",)},
    "LongJob": {"interval": 30.0},
    "Mark": {"layout": "batch:x"},
    "OperatorGraph": {"operators": CHAIN.operators},
    "Placing.begin": {"n": 0, "done": {}, "free": [0.0] * 4, "where": {}},
    "Placing.hop": {"n": 0, "source": 0, "target": 1},
    "Published": {"model": (1, 2, 1, 3), "plan": "serial", "rows": 1, "source": "a", "seconds": 1.0},
    "Shape": {"rows": 2, "length": 8},
    "TaskGraph.add": {"name": "b"},
    "Transformer.flops_per_token": {"length": 8},
    "all_reduce": {"axis": Axis("x", (0,)), "graph": graph.TaskGraph({"a": torch.zeros(2)})},
    "box": {"mesh": {"x": 1}},
    "cluster_bounds": {"flops": [1.0, 2.0], "outputs": [1, 1], "layers": 1},
    "complaint": {"layout": {"ff": "x"}},
    "cost_table": {"layouts": [layout.Layout.whole(1)], "shape": (4,)},
    "crossing_bytes": {"stage": frozenset([0])},
    "elements": {"mesh": X2 | {"y": 1, "z": 1}},
    "equal_count": {"layers": 5, "stages": 2},
    "every_cut": {"layers": 4, "stages": 2},
    "every_replicated": {"layers": 3},
    "find_cluster": {"name": "laptop"},
    "find_model": {"name": "nano"},
    "free_running": {"micros": 3},
    "goodput": {"length": 100.0},
    "intersection": {"first": SPANS, "second": SPANS},
    "life": {"failures": [3.0]},
    "live_axes": {"mesh": {"x": 1}},
    "make_stream": {"name": "pipedream", "batches": 3},
    "marks": {"layout": {"batch": "x"}},
    "multiply": {"a": ONES, "b": ONES, "axes": {name: Axis(name, (0,)) for name in "xyz"}},
    "parallelize": {"cluster": LAPTOP.with_devices(2)},
    "path": {"mesh": {"x": 1}},
    "pipeline_jobs": {"forward": [1, 1], "backward": [1, 1]},
    "piper": {"options": graph_stages.stage_options(CHAIN, LAPTOP, 8)},
    "reinforce": {"problem": PLACING, "rounds": 1},
    "reshard": {"x": torch.ones(2, 3)},
    "ring_sum": {"n": 2, "size": 8},
    "run_rounds": {"rounds": list(scale.ring_sum(2, 8))},
    "shares": {"workers": 1},
    "stages_of": {"plan": PLAN},
    "stages_by_ilp": {"times": [1.0] * len(CHAIN), "stages": 2},
    "step_flops": {"rows": 1, "length": 2, "layers": 1, "width": 2, "vocabulary": 3},
    "submeshes": {"devices": 8, "node": 4},
    "best_cut": {"stages": 2},
    "timetable": {"plan": Plan.parse("pp=2,micro=2")},
}  # fmt: skip
OWN |= dict.fromkeys(("exhaustive_placement", "list_schedule", "branch_and_bound"), {"problem": PLACING})
OWN |= {"collective": {"name": "ring", "ranks": 4}, "in_network": {"ranks": 4}}
OWN |= {
    name: {"graph": graph.TaskGraph({"a": torch.zeros(2)}), "tensor": "a"} for name in ("send", "receive")
}
OBJECTS = (
    BALANCED, choose.Goal(8, 16), PROBLEM, cuts.Clock(PROBLEM, PLAN), PLACING, PLACING.simulate([0] * len(CHAIN)),
    published_steps.ROWS[0], models.Transformer(), LAPTOP, LAPTOP.device, scale.Fabric(), search.PLANNERS["Tofu"],
    SHAPE, PATH, interpret.Interpreter(partition(CAPTURED, ALONE_X, {"x": 1}), ONE_RANK), PROGRAM, WHOLE, CHAINED,
    Staged(CHAINED, [WHOLE]), FILLED, scheduler.Scheduler(NOTES), STREAM, ONE, simulate(ONE), simulate(ONE).cost,
)  # fmt: skip
OF_CLASS = {type(one): one for one in OBJECTS}
"""Of each class with methods that are called one of its objects."""
ALONE, BATCH = build(Plan(), CONFIG, Mesh()), example_batch(CONFIG, 2, 3)
PARTS, ZIGZAG = {"rest": 10, "matrices": 20}, layouts.layout("zigzag", 8, 2)
CALLS = [  # of the other rooms
    (GPT2Config, {}),
    (GPT2, {"config": CONFIG}),
    (Plan, {}),
    (build, {"plan": Plan(), "config": CONFIG, "mesh": Mesh()}),
    (Plan().check, {"config": CONFIG, "rows": 2, "length": 4}),
    (Plan.parse, {"text": "serial"}),
    (verify, {"plan": "serial", "config": CONFIG, "rows": 2, "length": 3, "depth": "gradients"}),
    (Mesh, {"pp": 1, "dp": 1, "ep": 1}),
    (Recipe, {"decay_steps": 5}),
    (Experts, {}),
    (Ranks, {"ranks": 1}),
    (Sampling, {"top_k": 1, "top_p": 0.5}),
    (KVCache, {"slots": 3}),
    (generate, {"model": GPT2(CONFIG), "prompts": [[1]], "new": 1}),
    (example_batch, {"config": CONFIG, "rows": 2, "length": 3}),
    (example_weights, {"config": CONFIG}),
    (Batches, {"source": range(1000), "rows": 2, "length": 4}),
    (Batches(range(1000), 2, 4).at, {"step": 0}),
    (InOrder, {"source": range(1000), "rows": 2, "length": 4}),
    (links.Link, {"latency": 1e-6, "bandwidth": 1e9}),
    (links.Network, {"between": LINK, "inside": LINK}),
    (links.all_reduce_time, {"algorithm": "ring", "n": 4, "size": 8, "link": LINK}),
    (links.crossing, {"n": 4, "link": LINK}),
    (links.bandwidths, {"op": "all_reduce", "n": 4, "size": 8, "seconds": 1.0}),
    (speed.flops_per_token, {"config": NANO, "length": 8}),
    (zero_costs.shard_length, {"elements": 10, "ranks": 2}),
    (zero_costs.bytes_held, {"sizes": PARTS, "stage": 1, "ranks": 2, "rank": 0}),
    (zero_costs.all_reduce_bytes, {"elements": 10, "ranks": 2, "rank": 0}),
    (zero_costs.zero_bytes_sent, {"sizes": PARTS, "stage": 1, "ranks": 2}),
    (zero_costs.paper_bytes, {"parameters": 10.0, "ranks": 2}),
    (context_costs.pairs, {"table": ZIGZAG, "rank": 0}),
    (context_costs.break_even_window, {"tokens": 8, "ranks": 2}),
    (context_costs.sent, {"exchange": "kv", "table": ZIGZAG, "rank": 0, "numbers": 4}),
    (layouts.layout, {"name": "zigzag", "tokens": 8, "ranks": 2}),
    (layouts.loans, {"table": layouts.layout("contiguous", 8, 2), "before": 1}),
    (cut_layers, {"config": CONFIG, "stages": 2}),
    (comm.split_sizes, {"total": 7, "parts": 2}),
    (llmc_files.padded_vocabulary, {"vocab_size": 37}),
    (Trainer, {"parallel": ALONE}),
    (Trainer(ALONE).gradients, {"batch": BATCH}),
    (Trainer(ALONE).step, {"batch": BATCH}),
    (Trainer(ALONE).stream, {"batches": [BATCH]}),
    (Trainer(ALONE).evaluate, {"batches": [BATCH]}),
    (checkpoint.Saver, {"trainer": Trainer(ALONE), "run": "run"}),
    (checkpoint.all_in, {"run": "run"}),
    (checkpoint.best, {"run": "run"}),
    (checkpoint.read_state, {"folder": "run/checkpoint-0000000"}),
    (checkpoint.load, {"folder": "run/checkpoint-0000000", "trainer": Trainer(ALONE)}),
    (checkpoint.export, {"folder": "run/checkpoint-0000000", "to": "model"}),
    (huggingface.load, {"source": "model"}),
    (huggingface.save, {"model": ALONE.model, "folder": "model"}),
    (Shard, {"path": "tokens.bin"}),
    (write_shard, {"path": "tokens.bin", "parts": [[1, 2]]}),
    (tokenise, {"texts": ["some text"]}),
    (read_text, {"path": "text.txt"}),
    (paced.use, {"network": LINK}),
]  # fmt: skip
ODD = (0, -1, 2.5, math.nan, math.inf, 10**18, "x", "", None, [], object())
OURS = re.compile(
    "([Uu]se |Leave it out|Name |Give |Ask for |Did you mean |It may say |must be |There are |Add |Cut |Write |List |"
    "allow more )"
)
ALWAYS = {  # what is taken besides usual values, whoever has such an argument
    "comm=0", "compute=0", "dropout=0", "elements=0", "flops=0", "iterations=0", "last=0", "layouts=[]",
    "n_layer=0", "number=0", "output=0", "promise=[]", "rank=0", "restart=0", "save=0", "seed=-1",
    "serial_fraction=0", "size=0", "slack=0", "stage=0", "total=0", "window=0", "write=0",
}  # fmt: skip
MEANS = {  # besides those; and which of those is refused after all
    "Assignment": {"first=0"},
    "Batches.at": {"step=0"},
    "Blocks": {"rows=0", "tokens=0", "updates=0", "weights=0"},
    "Chain": {"activations=[]"},
    "Chain.all_reduce": {"first=0"},
    "Chain.hop": {"border=0"},
    "ChainProblem": {"cuts=[]", "operators=[]"},
    "ChainProblem.held": {"behind=0"},
    "ChainProblem.job": {"before=None"},
    "ChainProblem.mesh": {"first=0"},
    "Cluster": {"call=0", "slowed=[]"},
    "Cluster.node": {"device=0"},
    "Cost": {"backward=0", "forward=0", "input_grad=0", "joint=0", "weight_grad=0"},
    "Cost.time": {"position=0", "unit=0"},
    "CutOperator": {"gathered=[]", "summed=[]"},
    "CutStage": {"choices=[]", "first=0"},
    "Device": {"add=0", "launch=0", "memory=0", "peak=0", "rate=inf", "rates=[]"},
    "Experts": {"balance=0", "z=0"},
    "GPT2Tasks": {"batches=None", "total=0"},
    "Goal": {"memory=inf"},
    "Goal.order": {"seconds=inf", "size=-1"},
    "Job": {"device=0", "needs=[]", "seconds=0"},
    "Layout.whole": {"dims=0"},
    "Link": {"bandwidth=inf", "latency=0"},
    "LinkChain.between_links": {"first=0"},
    "LinkChain.choices": {"before=[]", "link=0"},
    "LinkChain.inside": {"link=0"},
    "LinkChain.marks": {"link=0"},
    "LinkChain.tied": {"last=0"},
    "LongJob": {"repair=0"},
    "Mark": {"priority=-1"},
    "Mesh": {"messages=[]"},
    "OperatorGraph": {"edges=[]"},
    "OperatorGraph.chain": {"operators=[]"},
    "Path": {"shape=[]", "steps=[]"},
    "Placing.begin": {"device=0", "n=0"},
    "Placing.hop": {"n=0", "source=0", "target=0"},
    "Plan": {"bucket=0", "shard=-1", "zero=-1"},
    "Published": {"between=0", "held=0", "seconds=0", "teraflops=0", "tokens=0"},
    "Ranks": {"backend=0", "backend=[]", "echo=0"},
    "Recipe": {"clip=None", "clip=inf", "decay_steps=0", "eps=0", "lr=0", "weight_decay=0"},
    "Schedule": {"orders=[]", "replicas=[]"},
    "Schedule.route": {"micro=0"},
    "Shape": {"length=0", "rows=0"},
    "Shape.chunks": {"numbers=0"},
    "Simulated.busy": {"device=0"},
    "Trainer.stream": {"batches=[]"},
    "Transformer.flops_per_token": {"length=0"},
    "analyse": {"rank=0"},
    "busy": {"spans=[]"},
    "cluster_bounds": {"flops=0"},
    "crossing_bytes": {"stage=0"},
    "efficiency": {"speedup=0"},
    "equal_count": {"layers=0"},
    "example_batch": {"seed=0"},
    "generate": {"new=0", "stop=-1", "stop=0", "stop=None"},
    "in_bytes": {"size=-1", "size=inf"},
    "in_seconds": {"seconds=-1", "seconds=0", "seconds=inf"},
    "intersection": {"first=[]", "second=[]"},
    "intra_operator": {"limit=0"},
    "kept_bytes": {"rank=0"},
    "kept_for_weights": {"layers=0", "tokens=0"},
    "life": {"failures=[]", "work=0"},
    "load": {"dtype=None"},
    "loans": {"before=0"},
    "mcmc": {"heat=0"},
    "paper_bytes": {"parameters=0"},
    "pipedream_stage": {"first=0"},
    "pipeline_jobs": {"size=0"},
    "profile": {"spans=[]"},
    "races": {"before=[]"},
    "receive": {"source=-1", "source=0"},
    "reinforce": {"keep=0", "rate=0", "seed=-1"},
    "run_rounds": {"rounds=[]"},
    "send": {"to=-1", "to=0"},
    "sent": {"numbers=0"},
    "sequential": {"chunks=0"},
    "simulate_jobs": {"jobs=[]"},
    "size_in_bytes": {"text=2.5"},
    "slowest_of": {"mean=0"},
    "span": {"cut=[]", "length=0"},
    "speedup": {"serial=0"},
    "stages_by_ilp": {"memory=[]", "per_byte=0"},
    "step_bytes": {"layers=0", "rank=0"},
    "step_flops": {"vocabulary=0"},
    "tokenise": {"texts=[]"},
    "use": {"network=None"},
    "write_shard": {"parts=[]"},
    "zero_bytes_sent": {"stage=0"},
}  # fmt: skip
ENDLESS = (  # numbers that may be as large as one likes
    "behind chunks count device heads itemsize k length m machines node numbers output position replicas "
    "rows size to total unit vocabulary width workers"
)
LARGE = {  # besides those; and which of those has an end
    "Assignment": "first",
    "ChainProblem.mesh": "first",
    "Cluster": "devices",
    "CutStage": "first",
    "GPT2Tasks": "length rows",
    "Placing.begin": "device",
    "Schedule": "micros",
    "Shape": "ranks",
    "Staged.cost": "micros rank",
    "Stream.newest": "batches",
    "captured_gpt2": "length rows",
    "dapple": "micros",
    "dapple_latency": "micros",
    "equal_count": "layers",
    "fullest_ranks": "length rows",
    "in_network": "ranks",
    "kept_for_weights": "layers tokens",
    "latency": "ranks",
    "least": "n ranks",
    "memory": "length rows",
    "predict": "length rows",
    "pruned": "world",
    "receive": "source",
    "step_flops": "layers",
    "timetable": "length rows",
    "zero": "ranks",
}


def taken(call, given) -> set[str]:
    """The odd values that a call takes, argument by argument; what it refuses, it must refuse in our words."""
    found = set()
    for p in inspect.signature(call).parameters.values():
        for value in ODD if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) else ():
            said = f"{p.name}={value!r}"
            try:
                result = call(**{**given, p.name: value})
                result = list(islice(result, 100)) if inspect.isgenerator(result) else result
            except OSError as error:  # a place at which there is nothing
                assert value in ("", "x") and (error.filename is not None or "Name " in str(error)), (
                    f"{said}: {error}"
                )
                continue
            except (ValueError, TypeError) as error:
                assert OURS.search(str(error)) and "\n" not in str(error), f"{said}: {error}"
                continue
            assert "nan" not in repr(result)[:10_000], f"{said} gives {result}"
            found |= {said} if said != f"{p.name}={p.default!r}" and not usual(value, p.annotation) else set()
    return found


def usual(value, annotation) -> bool:
    """Whether a value is as good as any other of its type."""
    kinds = typing.get_args(annotation) or (annotation,)
    one_of = (
        (str in kinds and isinstance(value, str)),
        (float in kinds and value == 2.5),
        (bool in kinds and value == 0),
    )
    return any(one_of) or value == 10**18


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that the calls read."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint.save(Trainer(ALONE), folder / "run")
    write_shard(folder / "tokens.bin", [[1, 2]])
    huggingface.save(ALONE.model, folder / "model")
    (folder / "text.txt").write_text("some text")
    return folder


NOT_ASKED = """
planner.alpa Stages fastest_pipeline; planner.balance ChainStage; planner.bounds Bounds; planner.choose
PricedPlan Choice pareto; planner.cost Prediction timed classes pipeline_seconds; planner.cuts merged;
planner.dry DryRank dry_run steps_until_full; planner.events Sending Simulated; planner.experts rows_of
kept_more kept_of_rows in_backward; planner.failures Phase; planner.fit Fit; planner.gathers reduce_counts
gather_counts WholeWeights; planner.graph_stages StagePlan integer_program; planner.kept inputs_only
stream_bytes logits_bytes largest_matrix kept_by_stage kept_by_head kept_by_block kept_by_dense_block
part_elements weights_held kept_between made_at_once transient in_attention Holding; planner.memory Held
fullest of_rank has_formula; planner.models Parameter units of_model model_typed; planner.moments Walk;
planner.numberless numberless Numberless; planner.placement Placed; planner.published_steps cluster fit;
planner.reinforce Learned; planner.scale Counted; planner.search Judge Planner soap everything one_device
whole_cluster submesh every_pipeline every_plan halved; planner.seconds Lies groups_on_nodes RankOnCluster
routed block_work pairs_seen causal_pairs embedding_work head_work; planner.sends AxisTraffic all_reduce
stage_ways gradient_sends finish_sends tied owned exchanges sends by_axis; planner.share frame order_of
check rank_parts RankShare has_experts why_no_price check_price; planner.space candidates
proposals runs; planner.tensor_costs enter_cost leave_cost loss_cost; schedules.asynchronous Stream;
schedules.chimera_dualpipe chimera dualpipe dualpipe_v; schedules.gpipe_1f1b alternate naive gpipe
one_forward_one_backward; schedules.interleaved interleaved breadth_first; schedules.phases play;
schedules.play Player; schedules.registry Generator; schedules.schedule Op; schedules.terapipe terapipe;
schedules.timeline TimedOp Timeline exact_ratio; schedules.zero_bubble zb_h1 zb_h2 zb_v; sharding.capture
layer_norm convolution convolution_backward AtenCall Value; sharding.cost Step steps step_cost added;
sharding.crossing Side Crossing; sharding.describe Option Rule; sharding.expression Index Window Expr lift
Tensor apply same where Max children; sharding.gpt2 plain_attention; sharding.graph Node Graph Builder;
sharding.halo Halo Halo.of overlap; sharding.interpret real_shape Interpreter.run Interpreter.begin
Interpreter.put Interpreter.advance Interpreter.results Interpreter.call; sharding.layout Layout;
sharding.operators softmax layer_norm attention cross_entropy pointwise reduction moves rule;
sharding.partition Change Run Program; sharding.propagate Spread read_layout level; sharding.reshard sizes
place follow take_step exchange_rows; sharding.run_staged StageRunner; sharding.staged Passed; tasks.check
ancestors_of independent_loops; tasks.cores Cores Holder; tasks.gpt2 tokens_of adamw; tasks.graph Access
Task; tasks.runtime Recorder one_thread in_threads
"""
NOT_ASKED = {f"{file}.{name}" for file, *names in map(str.split, NOT_ASKED.split(";")) for name in names}
"""What is public by name, but is given only what others have checked, or is what a call gives back: by its file."""


def public():
    """(room.file.name, class or None, call) of every function and class, and of the classes' own public methods."""
    for room in ROOMS:
        for info in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            for name, one in vars(importlib.import_module(info.name)).items():
                if name.startswith("_") or getattr(one, "__module__", "") != info.name or not callable(one):
                    continue
                full, a_class = f"{info.name[8:]}.{name}", inspect.isclass(one)
                if a_class and issubclass(one, BaseException) or one.__name__ == "<lambda>":
                    continue
                yield full, None, one
                for method, own in vars(one).items() if a_class else ():
                    own = getattr(own, "__func__", own)
                    data = method in getattr(one, "__dataclass_fields__", ())
                    if inspect.isfunction(own) and not method.startswith("_") and not data:
                        yield f"{full}.{method}", one, getattr(OF_CLASS.get(one, one), method)


def needed(call) -> set[str]:
    """The arguments that a call must have, and those that OWN gives it."""
    known = inspect.signature(call).parameters.values()
    must = {p.name for p in known if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return must | {*OWN.get(call.__qualname__, ())}


def values(name: str, call) -> dict:
    """Those of arguments in the room of a name, and of a call's own."""
    return USUAL[name.partition(".")[0]] | OWN.get(call.__qualname__, {})


def asked() -> dict:
    """What is public and called at odd values here, by name; what asks for numbers alone is in `test_numbers`."""
    numbers, found = {function for function, _ in FUNCTIONS.values()}, {}
    for name, of, call in public():
        # a class that is no argument may have methods to call
        bound = of in OF_CLASS or inspect.isclass(getattr(call, "__self__", None))
        left = {name} if bound else {name, name.rpartition(".")[0]}
        known = call not in numbers or needed(call) <= {*values(name, call)}
        if not left & NOT_ASKED and known:
            found[name] = call
    return found


ASKED_FOR = asked()


def tries(call, given) -> None:
    """Try a call at odd values: what it takes is known, and it answers soon."""
    call(**given)
    begin = time.perf_counter()
    own, name = inspect.signature(call).parameters, call.__qualname__
    means = {said for said in ALWAYS ^ MEANS.get(name, set()) if said.partition("=")[0] in own}
    assert taken(call, given) == means
    assert time.perf_counter() - begin < SOON


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ASKED_FOR)
def test_odd_arguments_mean_something_or_are_refused_in_one_sentence(name):
    call = ASKED_FOR[name]
    missing = needed(call) - {*values(name, call)}
    assert not missing, "give them values in USUAL or OWN, or NOT_ASKED its name"
    given = {p: values(name, call)[p] for p in needed(call)}
    tries(call, given)
    numbers = {name for name, value in given.items() if type(value) is int}
    large = {name for name in numbers if answers(call, given | {name: 10**18})}
    beyond = {*ENDLESS.split()} ^ {*LARGE.get(call.__qualname__, "").split()}
    assert large == beyond & numbers, "what is beyond the last one is refused"


@pytest.mark.parametrize(("call", "given"), CALLS, ids=lambda x: getattr(x, "__qualname__", "-"))
def test_odd_arguments_in_other_rooms(call, given, files, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "files"))
    tries(call, given)


def answers(call, given) -> bool:
    """Whether a call that refuses in our words is answered with a value."""
    try:
        result = call(**given)
        return bool(list(islice(result, 100)) if inspect.isgenerator(result) else True)
    except (ValueError, TypeError) as error:
        assert OURS.search(str(error))
        return False


def test_what_is_not_asked_is_there():
    assert not NOT_ASKED - {name for name, *_ in public()}
