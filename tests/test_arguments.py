"""Every argument of what a notebook calls, at odd values: it is taken where it means something, or refused in words."""

import inspect
import math
import re
import shutil
import typing
from itertools import islice

import pytest
import torch

from gpt2lab.corpus.batches import Batches
from gpt2lab.corpus.loaders import InOrder, steps_per_epoch
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
    alpa,
    balance,
    choose,
    cost,
    cuts,
    events,
    failures,
    fit,
    graph_stages,
    metrics,
    placement,
    problem,
    published_steps,
    reinforce,
    scale,
    search,
    tensor_costs,
)
from gpt2lab.planner import memory as planner_memory
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm, paced
from gpt2lab.ranks.axis import Axis
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.ranks.trace import Span
from gpt2lab.reference import CONFIG, example_batch, example_weights
from gpt2lab.schedules import (
    Cost,
    asynchronous,
    check,
    draw,
    formulas,
    from_csv,
    make,
    registry,
    simulate,
    to_csv,
)
from gpt2lab.schedules.terapipe import best_slices, latency
from gpt2lab.sharding import (
    capture,
    describe,
    expression,
    interpret,
    layout,
    marks,
    named,
    products,
    reshard,
    tofu,
)
from gpt2lab.sharding import cost as sharding_cost
from gpt2lab.sharding.gpt2 import captured_gpt2, captured_module
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import Mark, propagate
from gpt2lab.sharding.staged import CutStage, Staged
from gpt2lab.sharding.tofu import LinkChain
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.tasks import check as tasks_check
from gpt2lab.tasks import gpt2 as gpt2_tasks
from gpt2lab.tasks import graph, messages, runtime, scheduler
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import verify

LAPTOP, NANO, TWO = problem.find_cluster("laptop"), PRESETS["nano"], Plan.parse("dp=2")
SIZES = {"config": NANO, "rows": 8, "length": 16}
LINK = links.Link(1e-6, 1e9)
CHAIN = problem.gpt2_layers(NANO, 2, 8)
ONE = make("1f1b", 2, 2)
TABLE = layouts.layout("zigzag", 8, 2)
SHAPE = tensor_costs.Shape(2, 8, 16, 2, 2)
PARTS = {"rest": 10, "matrices": 20}
OPERATORS = cuts.gpt2_cuts(NANO, 8, 16)
JOB = failures.LongJob(8, 1e3, 10.0, 1.0, 1.0, 30.0)
BALANCED = balance.Chain((1.0, 2.0), (1.0, 2.0), (1.0, 1.0), (1.0, 1.0), 1.0)
PLACING = placement.Placing(CHAIN, LAPTOP)
ALONE = build(Plan(), CONFIG, Mesh())
BATCH = example_batch(CONFIG, 2, 3)
CAPTURED = captured_gpt2(GPT2Config(7, 4, 1, 2, 4), 2, 3)
DATA_PARALLEL = {"graph": CAPTURED, "marks": marks.batch("x"), "mesh": {"x": 2}}
SPREAD = propagate(**DATA_PARALLEL)
LINEAR = {"x": ("batch", "embd"), "weight": ("ff", "embd"), "bias": ("ff",)}
WHOLE = CutStage(0, tuple(("batch",) for _ in range(LinkChain(CAPTURED).count)), (0, 1), {"x": 2})
STAGES = (balance.ChainStage(0, 1), balance.ChainStage(1, 2))
SPANS = [Span("a", "forward", 0.0, 1.0), Span("b", "wait", 1.0, 2.0)]
ONE_RANK, WHOLE_X = {"x": Axis("x", (0,))}, layout.Layout(((), ()))
PART = {"shape": (2, 3), "mesh": {"x": 1}}
NOTES = graph.TaskGraph({"a": torch.zeros(2)})
MESSAGE = {
    "graph": graph.TaskGraph({"a": torch.zeros(2)}),
    "name": "m",
    "axis": Axis("x", (0, 1)),
    "tensor": "a",
}
CALLS = [
    (alpa.intra_operator, {"costs": [[1.0, 2.0], [3.0]], "changes": {(0, 1): [[1.0], [2.0]]}}),
    (balance.Chain, {"forward": (1.0,), "backward": (1.0,), "weights": (1.0,), "activations": (), "bandwidth": 1.0}),
    (balance.pipedream_cost, {"chain": BALANCED, "stages": STAGES}),
    (balance.dapple_latency, {"chain": BALANCED, "stages": STAGES, "micros": 2}),
    (events.simulate_jobs, {"jobs": [events.Job("a", 0, 1.0)], "cluster": LAPTOP}),
    (graph_stages.stages_by_ilp, {"graph": CHAIN, "times": [1.0] * len(CHAIN), "stages": 2}),
    (metrics.average_parallelism, {"spans": SPANS}),
    (metrics.intersection, {"first": SPANS, "second": SPANS}),
    (metrics.shares, {"spans": SPANS, "workers": 1}),
    (placement.exhaustive_placement, {"problem": PLACING}),
    (placement.list_schedule, {"problem": PLACING}),
    (placement.branch_and_bound, {"problem": PLACING}),
    (scale.Fabric, {}),
    (search.only, {"rule": search.one_device}),
    (search.mcmc, {}),
    (latency, {"times": [1.0, 2.0], "ranks": 2}),
    (to_csv, {"schedule": ONE}),
    (sharding_cost.path, {"src": WHOLE_X, "dst": WHOLE_X} | PART),
    (sharding_cost.adjoint, {"src": WHOLE_X, "dst": WHOLE_X}),
    (layout.places, {"mesh": {"x": 2}}),
    (layout.box, PART | {"layout": WHOLE_X, "place": {"x": 0}}),
    (reshard.shard, {"whole": torch.ones(2, 3), "layout": WHOLE_X, "axes": ONE_RANK}),
    (reshard.reshard, {"x": torch.ones(2, 3), "src": WHOLE_X, "dst": WHOLE_X, "shape": (2, 3), "axes": ONE_RANK}),
    (expression.Sum, {"body": lambda i: i}),
    (interpret.Interpreter, {"program": partition(CAPTURED, SPREAD, {"x": 2}), "axes": {"x": Axis("x", (0, 1))}}),
    (tofu.bytes_of_all, {"program": partition(CAPTURED, SPREAD, {"x": 2})}),
    (gpt2_tasks.GPT2Tasks, {"model": GPT2(CONFIG), "rows": 1, "length": 2, "batches": lambda iteration: None}),
    (messages.Pending, {"handle": comm.Handle(None)}),
    (messages.send, MESSAGE | {"to": 1}),
    (messages.receive, MESSAGE | {"source": 1}),
    (runtime.run_sequential, {"graph": NOTES}),
    (scheduler.Scheduler, {"graph": NOTES}),
    (tasks_check.critical_path, {"graph": NOTES}),
    (tasks_check.levels, {"graph": NOTES}),
    (tasks_check.needless, {"graph": NOTES}),
    (tasks_check.races, {"graph": NOTES}),
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
    (steps_per_epoch, {"tokens": 100, "batch": 10}),
    (links.Link, {"latency": 1e-6, "bandwidth": 1e9}),
    (links.Network, {"between": LINK, "inside": LINK}),
    (links.all_reduce_time, {"algorithm": "ring", "n": 4, "size": 8, "link": LINK}),
    (links.crossing, {"n": 4, "link": LINK}),
    (links.bandwidths, {"op": "all_reduce", "n": 4, "size": 8, "seconds": 1.0}),
    (speed.flops_per_token, {"config": NANO, "length": 8}),
    (make, {"name": "1f1b", "ranks": 2, "micros": 2}),
    (registry.find, {"name": "1f1b"}),
    (Cost, {}),
    (simulate, {"schedule": ONE, "cost": Cost()}),
    (check, {"schedule": ONE}),
    (draw, {"timeline": ONE}),
    (from_csv, {"text": "0F0,0B0"}),
    (asynchronous.make_stream, {"name": "pipedream", "stages": 2, "batches": 3}),
    (asynchronous.free_running, {"stages": 2, "micros": 3}),
    (asynchronous.flushed, {"ranks": 2, "batches": 2, "per_update": 2}),
    (formulas.kept_for_weights, {"tokens": 8, "width": 4, "layers": 2}),
    (best_slices, {"tokens": 8, "time": lambda a, b: a + b, "ranks": 2}),
    (problem.Operator, {"name": "a", "flops": 1.0, "output": 1}),
    (problem.OperatorGraph, {"operators": CHAIN.operators, "edges": CHAIN.edges}),
    (problem.Device, {"rate": 1e9}),
    (problem.Cluster, {"devices": 2, "device": problem.Device(1e9)}),
    (problem.find_cluster, {"name": "laptop"}),
    (problem.gpt2_layers, SIZES),
    (problem.gpt2_block, SIZES),
    (cost.predict, SIZES | {"plan": TWO, "cluster": LAPTOP}),
    (cost.timetable, SIZES | {"plan": Plan.parse("pp=2,micro=2"), "cluster": LAPTOP}),
    (planner_memory.memory, SIZES | {"plan": TWO}),
    (choose.Goal, {"rows": 8, "length": 16}),
    (choose.parallelize, {"config": NANO, "cluster": LAPTOP.with_devices(2), "goal": choose.Goal(2, 8)}),
    (cuts.gpt2_cuts, SIZES),
    (cuts.ChainProblem, {"operators": OPERATORS, "cluster": LAPTOP, "rows": 8, "length": 16, "width": 4}),
    (alpa.submeshes, {"devices": 8, "node": 4}),
    (balance.best_cut, {"times": [1.0, 2.0, 3.0], "stages": 2}),
    (balance.equal_count, {"layers": 5, "stages": 2}),
    (balance.slowest, {"times": [1.0, 2.0, 3.0], "bounds": (0, 1, 3)}),
    (balance.every_cut, {"layers": 4, "stages": 2}),
    (balance.every_replicated, {"layers": 3, "devices": 2}),
    (balance.pipedream, {"chain": BALANCED, "devices": 2}),
    (balance.dapple, {"chain": BALANCED, "devices": 2, "micros": 2}),
    (events.pipeline_jobs, {"schedule": ONE, "forward": [1, 1], "backward": [1, 1]}),
    (failures.best_interval, {"save": 1.0, "failures": 10.0}),
    (failures.daly_interval, {"save": 1.0, "failures": 10.0}),
    (failures.share_lost, {"interval": 2.0, "save": 1.0, "failures": 10.0}),
    (failures.life, {"interval": 2.0, "save": 1.0, "restart": 1.0, "failures": [3.0], "work": 5.0}),
    (failures.LongJob, {"machines": 8, "each": 1e3, "repair": 10.0, "save": 1.0, "restart": 1.0, "interval": 30.0}),
    (failures.goodput, {"job": JOB, "policy": "wait", "length": 100.0}),
    (fit.fit, {"samples": [(1, 8, 1.0), (2, 8, 2.0), (1, 16, 3.0), (2, 16, 4.0)]}),
    (graph_stages.piper, {"graph": CHAIN, "devices": 2, "options": graph_stages.stage_options(CHAIN, LAPTOP, 8)}),
    (graph_stages.stage_options, {"graph": CHAIN, "cluster": LAPTOP, "rows": 8}),
    (metrics.speedup, {"serial": 2.0, "parallel": 1.0}),
    (metrics.efficiency, {"speedup": 2.0, "workers": 2}),
    (metrics.amdahl, {"serial_fraction": 0.5, "workers": 2}),
    (metrics.gustafson, {"serial_fraction": 0.5, "workers": 2}),
    (metrics.karp_flatt, {"speedup": 2.0, "workers": 2}),
    (metrics.sequential, {"chunks": 2, "compute": 1.0, "comm": 1.0}),
    (metrics.overlapped, {"chunks": 2, "compute": 1.0, "comm": 1.0}),
    (placement.Placing, {"graph": CHAIN, "cluster": LAPTOP}),
    (published_steps.step_flops, {"rows": 1, "length": 2, "layers": 1, "width": 2, "vocabulary": 3}),
    (reinforce.reinforce, {"problem": PLACING, "rounds": 1}),
    (scale.collective, {"name": "ring", "ranks": 4, "size": 64, "fabric": scale.Fabric()}),
    (scale.in_network, {"ranks": 4, "size": 64, "fabric": scale.Fabric()}),
    (scale.slowest_of, {"n": 4, "mean": 1.0, "spread": 0.1}),
    (tensor_costs.Shape, {"rows": 2, "length": 8, "width": 16, "heads": 2, "ranks": 2}),
    (tensor_costs.step_bytes, {"shape": SHAPE, "layers": 2}),
    (tensor_costs.kept_bytes, {"shape": SHAPE}),
    (zero_costs.shard_length, {"elements": 10, "ranks": 2}),
    (zero_costs.bytes_held, {"sizes": PARTS, "stage": 1, "ranks": 2, "rank": 0}),
    (zero_costs.all_reduce_bytes, {"elements": 10, "ranks": 2, "rank": 0}),
    (zero_costs.zero_bytes_sent, {"sizes": PARTS, "stage": 1, "ranks": 2}),
    (zero_costs.paper_bytes, {"parameters": 10.0, "ranks": 2}),
    (context_costs.pairs, {"table": TABLE, "rank": 0}),
    (context_costs.break_even_window, {"tokens": 8, "ranks": 2}),
    (context_costs.sent, {"exchange": "kv", "table": TABLE, "rank": 0, "numbers": 4}),
    (layouts.layout, {"name": "zigzag", "tokens": 8, "ranks": 2}),
    (layouts.loans, {"table": layouts.layout("contiguous", 8, 2), "before": 1}),
    (cut_layers, {"config": CONFIG, "stages": 2}),
    (comm.split_sizes, {"total": 7, "parts": 2}),
    (products.least, {"m": 4, "n": 4, "k": 4, "ranks": 4}),
    (llmc_files.padded_vocabulary, {"vocab_size": 37}),
    (gpt2_tasks.Blocks, {}),
    (graph.TaskGraph, {"tensors": {"a": torch.zeros(2)}}),
    (runtime.run_fork_join, {"graph": graph.TaskGraph({"a": torch.zeros(2)})}),
    (scheduler.run_tasks, {"graph": graph.TaskGraph({"a": torch.zeros(2)})}),
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
    (layout.Layout.whole, {"dims": 2}),
    (layout.Layout.parse, {"text": "S0R", "axes": "xy"}),
    (layout.Layout.named, {"text": "batch:x", "dims": ("batch", "embd")}),
    (sharding_cost.cost_table, {"layouts": [layout.Layout.whole(1)], "shape": (4,), "mesh": {"x": 2}}),
    (Mark, {"layout": "batch:x"}),
    (propagate, DATA_PARALLEL),
    (partition, {"graph": CAPTURED, "spread": SPREAD, "mesh": {"x": 2}}),
    (marks.megatron, {"axis": "x"}),
    (marks.batch, {"axis": "x"}),
    (marks.sequence, {"axis": "x"}),
    (marks.zero, {"graph": CAPTURED, "axis": "x", "ranks": 2}),
    (named.complaint, {"tensors": LINEAR, "layout": {"ff": "x"}}),
    (named.legal_layouts, {"tensors": LINEAR, "mesh": {"x": 2}}),
    (named.marks, {"graph": CAPTURED, "layout": {"batch": "x"}}),
    (products.elements, {"sizes": dict.fromkeys("ABC", (4, 4)), "mesh": {"x": 2, "y": 1, "z": 1}}),
    (reshard.live_axes, {"mesh": {"x": 1}}),
    (capture.capture, {"function": lambda x: x + x, "inputs": {"x": torch.ones(2)}, "results": ["y"]}),
    (captured_gpt2, {"config": GPT2Config(7, 4, 1, 1, 2), "rows": 2, "length": 3}),
    (captured_module, {"module": torch.nn.Linear(2, 2), "x": torch.ones(2, 2), "names": LINEAR}),
    (describe.analyse, {"describe": lambda a: lambda i: a[i]}),
    (CutStage, {"first": 0, "choices": (("batch",),), "ranks": (0, 1), "mesh": {"x": 2}}),
    (Staged, {"chain": LinkChain(CAPTURED), "stages": [WHOLE]}),
    (LinkChain, {"graph": CAPTURED}),
]  # fmt: skip
ODD = (0, -1, 2.5, math.nan, math.inf, 10**18, "x", "", None, [], object())
OURS = re.compile(
    r"([Uu]se |Name |Give |Ask for |Did you mean |It may say |must be |There are |Add |Cut |Write |List |allow more )"
)
MEANS = {  # what is taken besides usual values; each means something
    "intra_operator": {"limit=0"},
    "stages_by_ilp": {"memory=[]", "per_byte=0"},
    "GPT2Tasks": {"batches=None"},
    "races": {"before=[]"},
    "send": {"to=-1", "to=0"},
    "receive": {"source=-1", "source=0"},
    "Chain": {"activations=[]"},
    "simulate_jobs": {"jobs=[]"},
    "intersection": {"first=[]", "second=[]"},
    "mcmc": {"heat=0", "seed=-1"},
    "Mesh": {"messages=[]"},
    "Ranks": {"backend=0", "backend=[]", "echo=0"},  # any other word for no
    "GPT2Config": {"dropout=0", "n_layer=0", "window=0"},
    "GPT2": {"seed=-1"},
    "build": {"seed=-1"},
    "Recipe": {"clip=None", "clip=inf", "decay_steps=0", "eps=0", "lr=0", "seed=-1", "weight_decay=0"},
    "Experts": {"balance=0", "speed=0", "z=0"},
    "Sampling": {"seed=-1", "temperature=0"},
    "generate": {"new=0", "stop=-1", "stop=0", "stop=None"},
    "example_batch": {"seed=-1", "seed=0"},
    "Batches": {"seed=-1"},
    "Batches.at": {"step=0"},
    "steps_per_epoch": {"tokens=0"},
    "Link": {"bandwidth=inf", "latency=0"},
    "all_reduce_time": {"size=0"},
    "bandwidths": {"size=0"},
    "Cost": {"backward=0", "forward=0", "input_grad=0", "joint=0", "weight_grad=0"},
    "check": {"promise=[]"},
    "kept_for_weights": {"layers=0", "tokens=0"},
    "Operator": {"flops=0", "output=0"},
    "step_flops": {"vocabulary=0"},
    "Blocks": {"rows=0", "tokens=0", "updates=0", "weights=0"},
    "Shape": {"length=0", "rows=0"},
    "load": {"dtype=None"},
    "write_shard": {"parts=[]"},
    "tokenise": {"texts=[]"},
    "use": {"network=None"},
    "Trainer.stream": {"batches=[]"},
    "Layout.whole": {"dims=0"},
    "cost_table": {"layouts=[]"},
    "Mark": {"priority=-1"},
    "CutStage": {"choices=[]", "first=0"},  # Staged refuses the first
    "Plan": {"bucket=0", "shard=-1", "zero=-1"},  # Plan.check refuses the last two
    "OperatorGraph": {"edges=[]"},
    "Device": {"add=0", "launch=0", "memory=0", "peak=0", "rate=inf", "rates=[]"},
    "Cluster": {"call=0", "slowed=[]"},
    "Goal": {"memory=inf"},
    "ChainProblem": {"cuts=[]", "operators=[]"},
    "equal_count": {"layers=0"},
    "best_interval": {"save=0"},
    "daly_interval": {"save=0"},
    "share_lost": {"restart=0", "save=0", "write=0"},
    "life": {"failures=[]", "restart=0", "save=0", "work=0", "write=0"},
    "LongJob": {"repair=0", "restart=0", "save=0"},
    "goodput": {"seed=-1"},
    "speedup": {"serial=0"},
    "efficiency": {"speedup=0"},
    "amdahl": {"serial_fraction=0"},
    "gustafson": {"serial_fraction=0"},
    "sequential": {"chunks=0", "comm=0", "compute=0"},
    "overlapped": {"comm=0", "compute=0"},
    "utilisation": {"more=0", "parameters=0", "tokens_per_second=0"},
    "reinforce": {"keep=0", "rate=0"},
    "collective": {"size=0"},
    "in_network": {"size=0"},
    "slowest_of": {"mean=0"},
    "step_bytes": {"layers=0"},
    "shard_length": {"elements=0"},
    "bytes_held": {"rank=0", "stage=0"},
    "all_reduce_bytes": {"elements=0", "rank=0"},
    "paper_bytes": {"parameters=0"},
    "pairs": {"rank=0", "window=0"},
    "sent": {"numbers=0", "rank=0", "window=0"},
    "loans": {"before=0"},
    "split_sizes": {"total=0"},
    "run_tasks": {"iterations=0"},
}  # fmt: skip


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
    return (
        any(
            kind is str
            and isinstance(value, str)
            or kind is float
            and value == 2.5
            or kind is bool
            and value == 0
            for kind in kinds
        )
        or value == 10**18
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that the calls read."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint.save(Trainer(ALONE), folder / "run")
    write_shard(folder / "tokens.bin", [[1, 2]])
    huggingface.save(ALONE.model, folder / "model")
    (folder / "text.txt").write_text("some text")
    return folder


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("call", "given"), CALLS, ids=lambda x: getattr(x, "__qualname__", "-"))
def test_odd_arguments_mean_something_or_are_refused_in_one_sentence(
    call, given, files, tmp_path, monkeypatch
):
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "files"))
    call(**given)
    own = inspect.signature(call).parameters
    means = {said for said in MEANS.get(call.__qualname__, ()) if said.partition("=")[0] in own}
    assert taken(call, given) == means


SHOWN = "a lesson shows its text, and runs what is made of it"
CALLED = "the search calls it for every choice, millions of times; the problem has been looked at"
MADE = "made by the thousand; who takes it looks at it"
UNTRIED = {  # what is public and no odd value is given to, here or in `test_public_calls`, and why
    "balance.ChainStage": MADE,
    "schedule.Op": MADE,
    "layout.Layout": "made by the thousand; its parse, named and whole, which take what is typed, are tried",
    "search.soap": CALLED,
    "search.everything": CALLED,
    "search.one_device": CALLED,
    "search.submesh": CALLED,
    "search.every_pipeline": CALLED,
    "search.every_plan": CALLED,
    "search.Planner": SHOWN,
    "seconds.RankOnCluster": SHOWN,
    "cores.Cores": SHOWN,
    "run_staged.StageRunner": SHOWN,
    "gpt2.plain_attention": "torch looks at tensors, and a window is refused",
}
