"""Everything public of the four rooms at odd values: functions, constructors and methods that no lesson names.

`public` walks the rooms, so that what is new fails until it has a row here or among those of `test_arguments`, or until
INTERNAL says who has checked what it is given.
"""

import ast
import importlib
import inspect
import pkgutil
import time
import tomllib
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import test_arguments
import test_numbers
import torch
from test_arguments import (
    BALANCED,
    CAPTURED,
    CHAIN,
    LAPTOP,
    NANO,
    NOTES,
    ONE,
    ONE_RANK,
    OURS,
    PLACING,
    SHAPE,
    SPANS,
    SPREAD,
    TWO,
    WHOLE,
    WHOLE_X,
    taken,
)
from test_numbers import ROOMS

import gpt2lab
from gpt2lab.planner import (
    alpa,
    balance,
    choose,
    cost,
    cuts,
    dry,
    events,
    graph_stages,
    metrics,
    models,
    problem,
    published_steps,
    scale,
    search,
    space,
)
from gpt2lab.planner.share import RankShare
from gpt2lab.ranks.axis import Axis
from gpt2lab.schedules import asynchronous, simulate, text
from gpt2lab.schedules.schedule import Op
from gpt2lab.sharding import cost as sharding_cost
from gpt2lab.sharding import (
    interpret,
    layout,
    products,
    propagate,
)
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.staged import Staged
from gpt2lab.sharding.tofu import LinkChain
from gpt2lab.tasks import check as tasks_check
from gpt2lab.tasks import graph as tasks_graph
from gpt2lab.tasks import messages, scheduler

OPERATORS = cuts.gpt2_cuts(NANO, 8, 16)[:3]
PROBLEM = cuts.ChainProblem(OPERATORS, LAPTOP.with_devices(2), 8, 16, NANO.n_embd)
AT, HERE = cuts.Assignment(0, 1), cuts.Assignment(0, 2, ("whole", "sample"))
PLAN = (AT, AT, HERE)
SHARE = RankShare(TWO, NANO, 8, 16)
PRICED = choose.PricedPlan(TWO, cost.predict(TWO, NANO, 8, 16, LAPTOP))
ROW = published_steps.ROWS[0]
F00 = Op("F", 0, 0)
TIMELINE = simulate(ONE)
STREAM = asynchronous.make_stream("pipedream", 2, 3)
TABLE = tomllib.loads(Path(problem.__file__).with_name("clusters.toml").read_text())["h100x64"]
FABRIC = scale.Fabric()
RANKS = np.array([0, 1])
CHAINED = LinkChain(CAPTURED)
X2 = {"x": 2}
PROGRAM = partition(CAPTURED, SPREAD, X2)
PATH = sharding_cost.path(layout.Layout((("x",), ())), WHOLE_X, (2, 3), X2)
ALONE = propagate.propagate(CAPTURED, {}, {"x": 1})
INTERPRETER = interpret.Interpreter(partition(CAPTURED, ALONE, {"x": 1}), ONE_RANK)
AXES = {name: Axis(name, (0,)) for name in "xyz"}
STAGED = Staged(CHAINED, [WHOLE])
ALL_BATCH = [("batch",)] * CHAINED.count
A = tasks_graph.Access("reads", "a", ((0, 1),))
FILLED = tasks_graph.TaskGraph({"a": torch.zeros(2)})
FURTHER = tasks_graph.TaskGraph({"a": torch.zeros(2)})
FILLED.add("t", lambda x: None, A)
EVERY = {"where": [0] * len(CHAIN)}
CALLS = [
    (alpa.clustered, {"operators": OPERATORS, "layers": 2}),
    (alpa.cluster_bounds, {"flops": [1.0, 2.0], "outputs": [1, 1], "layers": 1}),
    (BALANCED.all_reduce, {"first": 0, "last": 1, "replicas": 1}),
    (BALANCED.hop, {"border": 1}),
    (balance.pipedream_stage, {"chain": BALANCED, "first": 0, "last": 1, "replicas": 1}),
    (choose.Goal(8, 16).order, {"plan": TWO, "seconds": 1.0, "size": 2.0}),
    (choose.Goal(8, 16).key, {"found": PRICED}),
    (cuts.CutOperator, {"name": "a", "flops": 1.0, "output": 1}),
    (cuts.Assignment, {"first": 0, "count": 1}),
    (PROBLEM.mesh, {"first": 0, "count": 1}),
    (PROBLEM.blocks, {}),
    (PROBLEM.assignments, {"number": 0, "block": (0, 2)}),
    (PROBLEM.work, {"number": 0, "at": AT}),
    (PROBLEM.layout, {"cut": ("whole", "sample")}),
    (PROBLEM.change, {"before": ("whole", "sample"), "after": ("whole", "whole"), "block": (0, 2)}),
    (PROBLEM.enter, {"number": 1, "at": AT, "near": True}),
    (PROBLEM.near, {"a": AT, "b": HERE}),
    (PROBLEM.job, {"number": 1, "before": AT, "at": HERE}),
    (PROBLEM.held, {"number": 1, "at": AT, "behind": 0}),
    (PROBLEM.memory, {"plan": PLAN}),
    (PROBLEM.evaluate, {"plan": PLAN}),
    (cuts.Clock, {"problem": PROBLEM, "plan": PLAN}),
    (cuts.Clock(PROBLEM, PLAN).changed, {"number": 0, "at": HERE}),
    (dry.fullest_ranks, {"plan": TWO, "config": NANO, "rows": 8, "length": 16}),
    (events.Job, {"name": "a", "device": 0, "seconds": 1.0}),
    (PLACING.simulate(**EVERY).busy, {"device": 0}),
    (ROW.flops, {"again": True}),
    (graph_stages.crossing_bytes, {"graph": CHAIN, "stage": frozenset([0])}),
    (graph_stages.down_sets, {"graph": CHAIN}),
    (metrics.busy, {"spans": SPANS}),
    (metrics.profile, {"spans": SPANS}),
    (models.Transformer, {}),
    (models.Transformer().check_cut, {"plan": TWO}),
    (models.Transformer().flops_per_token, {"length": 8}),
    (models.network_of, {"words": models.MODELS["7b"], "name": "a"}),
    (PLACING.critical_path, {}),
    (PLACING.load, {}),
    (PLACING.lower_bound, {}),
    (PLACING.simulate, EVERY),
    (PLACING.held, EVERY),
    (PLACING.cost, EVERY),
    (PLACING.fits, EVERY),
    (PLACING.begin, {"n": 0, "device": 0, "done": {}, "free": [0.0] * 4, "where": {}}),
    (PLACING.hop, {"n": 0, "source": 0, "target": 1}),
    (problem.OperatorGraph.chain, {"operators": OPERATORS}),
    (LAPTOP.device.with_numbers, {"itemsize": 4}),
    (LAPTOP.device.time, {"flops": 1.0}),
    (LAPTOP.node, {"device": 0}),
    (LAPTOP.with_devices, {"devices": 2}),
    (problem.size_in_bytes, {"text": "4GiB"}),
    (problem.cluster_from, {"table": TABLE, "name": "a"}),
    (published_steps.Published,
     {"name": "a", "model": (1, 2, 1, 3), "plan": "serial", "rows": 1, "source": "a", "seconds": 1.0}),
    (ROW.predicted, {}),
    (ROW.error, {}),
    (FABRIC.levels, {"source": RANKS, "target": RANKS[::-1]}),
    (FABRIC.links, {"source": RANKS, "target": RANKS[::-1]}),
    (scale.run_rounds, {"ranks": 2, "rounds": list(scale.ring_sum(2, 8)), "fabric": FABRIC}),
    (scale.ring_sum, {"n": 2, "size": 8}),
    (search.PLANNERS["Tofu"].plan, {"problem": PROBLEM}),
    (search.exhaustive, {}),
    (search.replicated, {"planner": balance.dapple}),
    (search.stages_of, {"problem": PROBLEM, "plan": PLAN}),
    (space.pruned, {"world": 1, "cluster": LAPTOP}),
    (SHAPE.share, {"total": 4, "rank": 0}),
    (SHAPE.tokens, {}),
    (SHAPE.chunks, {"numbers": 4}),
    (sharding_cost.Path, {"steps": PATH.steps, "layouts": PATH.layouts, "shape": (2, 3)}),
    (PATH.cost, {"mesh": X2, "place": {"x": 0}}),
    (PATH.total, {"mesh": X2}),

    (INTERPRETER.part, {"name": "wte.weight", "whole": torch.zeros(7, 4)}),
    (layout.ranks, {"mesh": X2}),
    (layout.lines_along, {"mesh": X2, "axis": "x", "numbers": [0, 1]}),
    (layout.check_dims, {"layout": WHOLE_X, "shape": (2, 3)}),
    (layout.check, {"layout": WHOLE_X, "shape": (2, 3), "mesh": X2}),
    (layout.span, {"length": 3, "cut": ["x"], "mesh": X2, "place": {"x": 0}}),
    (layout.local_shape, {"shape": (2, 3), "layout": WHOLE_X, "mesh": X2, "place": {"x": 0}}),
    (layout.fits, {"layout": WHOLE_X, "shape": (2, 3), "mesh": X2}),
    (PROGRAM.changes, {}),
    (PROGRAM.cost, {"place": {"x": 0}}),
    (products.multiply, {"a": torch.ones(2, 2), "b": torch.ones(2, 2), "inner": 2, "axes": AXES}),
    (WHOLE.lines, {"name": "x"}),
    (STAGED.border, {"stage": 0}),
    (STAGED.cost, {"rank": 0, "micros": 2}),
    (CHAINED.between_links, {"first": 0, "last": 1}),
    (CHAINED.marks, {"link": 0, "choice": ("batch",), "mesh": X2}),
    (CHAINED.choices, {"link": 0, "before": (), "mesh": X2}),
    (CHAINED.inside, {"link": 0, "choice": ("batch",), "mesh": X2}),
    (CHAINED.between, {"a": ("batch",), "b": ("batch",), "mesh": X2}),
    (CHAINED.tied, {"first": ("batch",), "last": ("batch",), "mesh": X2}),
    (CHAINED.cost, {"choices": ALL_BATCH, "mesh": X2}),
    (CHAINED.halve, {"before": [()] * CHAINED.count, "mesh": X2}),
    (CHAINED.recursive, {"axes": "x"}),
    (CHAINED.program, {"choices": ALL_BATCH, "mesh": X2}),
    (tasks_check.work, {"graph": NOTES}),
    (tasks_check.span, {"graph": NOTES}),
    (tasks_check.parallelism, {"graph": FILLED}),
    (FURTHER.add, {"name": "a", "body": lambda: None}),
    (NOTES.edges, {}),
    (NOTES.across, {}),
    (messages.all_reduce, {"graph": FURTHER, "name": "m", "axis": Axis("x", (0,))}),
    (scheduler.Scheduler(NOTES).run, {}),
    (STREAM.batch, {"op": F00}),
    (STREAM.update, {"op": F00}),
    (STREAM.makes, {"op": F00}),
    (STREAM.newest, {"stage": 0}),
    (STREAM.staleness, {"op": F00}),
    (STREAM.held, {"rank": 0}),
    (asynchronous.check_stream, {"stream": STREAM}),
    (type(ONE), {"orders": ONE.orders, "placement": ONE.placement, "micros": 2}),
    (ONE.position, {"stage": 0}),
    (ONE.stages_of, {"rank": 0}),
    (ONE.ranks_of, {"stage": 0}),
    (ONE.rank_of, {"op": F00}),
    (ONE.route, {"micro": 0}),
    (ONE.needs, {"op": F00}),
    (ONE.message, {"op": F00}),
    (ONE.held, {"rank": 0}),
    (ONE.waiting, {"rank": 0}),
    (ONE.peak, {"rank": 0}),
    (ONE.activations, {"rank": 0}),
    (ONE.weights, {"rank": 0}),
    (ONE.messages, {"rank": 0}),
    (ONE.without, {"keep": 1}),
    (text.summary, {"timeline": TIMELINE}),
    (TIMELINE.cost.time, {"kind": "F", "position": 0, "unit": 0}),
    (TIMELINE.busy, {"rank": 0}),
    (TIMELINE.span, {"rank": 0}),
    (TIMELINE.memory, {"rank": 0}),
]  # fmt: skip

MEANS = {  # what is taken besides usual values; each means something
    "clustered": {"slack=0"},
    "cluster_bounds": {"slack=0"},
    "Chain.all_reduce": {"first=0", "last=0"},
    "Chain.hop": {"border=0"},
    "pipedream_stage": {"first=0", "last=0"},
    "Goal.order": {"seconds=inf", "size=-1", "size=0"},
    "CutOperator": {"flops=0", "gathered=[]", "output=0", "summed=[]"},
    "Assignment": {"first=0"},
    "ChainProblem.mesh": {"first=0"},
    "ChainProblem.assignments": {"number=0"},
    "ChainProblem.work": {"number=0"},
    "ChainProblem.enter": {"number=0"},
    "ChainProblem.job": {"before=None", "number=0"},
    "ChainProblem.held": {"behind=0", "number=0"},
    "Clock.changed": {"number=0"},
    "Job": {"device=0", "needs=[]", "seconds=0"},
    "Simulated.busy": {"device=0"},
    "Fit.predict": {"messages=0", "size=0"},
    "busy": {"spans=[]"},
    "profile": {"spans=[]"},
    "Transformer": {"dropout=0", "n_layer=0", "window=0"},
    "Transformer.flops_per_token": {"length=0"},
    "Placing.begin": {"device=0", "n=0"},
    "Placing.hop": {"n=0", "source=0", "target=0"},
    "OperatorGraph.chain": {"operators=[]"},
    "Device.time": {"flops=0"},
    "Cluster.node": {"device=0"},
    "size_in_bytes": {"text=2.5"},
    "Published": {"between=0", "held=0", "seconds=0", "teraflops=0", "tokens=0"},
    "run_rounds": {"rounds=[]", "total=0"},
    "ring_sum": {"size=0"},
    "Shape.share": {"rank=0", "total=0"},
    "Shape.chunks": {"numbers=0"},
    "Path": {"layouts=[]", "shape=[]", "steps=[]"},
    "span": {"cut=[]", "length=0"},
    "Staged.border": {"stage=0"},
    "Staged.cost": {"rank=0"},
    "LinkChain.between_links": {"first=0", "last=0"},
    "LinkChain.marks": {"link=0"},
    "LinkChain.choices": {"before=[]", "link=0"},
    "LinkChain.inside": {"link=0"},
    "Scheduler.run": {"iterations=0"},
    "Stream.newest": {"stage=0"},
    "Stream.held": {"rank=0"},
    "Schedule": {"orders=[]", "promise=[]", "replicas=[]"},
    "Schedule.position": {"stage=0"},
    "Schedule.stages_of": {"rank=0"},
    "Schedule.ranks_of": {"stage=0"},
    "Schedule.route": {"micro=0"},
    "Schedule.held": {"rank=0"},
    "Schedule.waiting": {"rank=0"},
    "Schedule.peak": {"rank=0"},
    "Schedule.activations": {"rank=0"},
    "Schedule.weights": {"rank=0"},
    "Schedule.messages": {"rank=0"},
    "Cost.time": {"position=0", "unit=0"},
    "Timeline.busy": {"rank=0"},
    "Timeline.span": {"rank=0"},
    "Timeline.memory": {"rank=0"},
}  # fmt: skip
LARGE = {  # what may be as large as one likes
    "Chain.all_reduce": "replicas",
    "pipedream_stage": "replicas",
    "CutOperator": "output",
    "Assignment": "first count",
    "ChainProblem.mesh": "first count",
    "ChainProblem.held": "behind",
    "Job": "device",
    "Simulated.busy": "device",
    "Transformer.flops_per_token": "length",
    "Device.with_numbers": "itemsize",
    "Cluster.node": "device",
    "Published": "rows",
    "ring_sum": "size",
    "pruned": "world",
    "Shape.share": "total",
    "Shape.chunks": "numbers",
    "span": "length",
    "Staged.cost": "rank micros",
    "Schedule": "micros",
    "Cost.time": "position unit",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("call", "given"), CALLS, ids=lambda x: getattr(x, "__qualname__", "-"))
def test_odd_arguments_mean_something_or_are_refused_in_one_sentence(call, given):
    call(**given)
    own = inspect.signature(call).parameters
    means = {said for said in MEANS.get(call.__qualname__, ()) if said.partition("=")[0] in own}
    begin = time.perf_counter()
    assert taken(call, given) == means
    assert time.perf_counter() - begin < test_numbers.SOON
    large = {
        name for name, value in given.items() if type(value) is int and answers(call, given | {name: 10**18})
    }
    assert large == {*LARGE.get(call.__qualname__, "").split()} & given.keys(), (
        "what is beyond the last one is refused"
    )


def answers(call, given) -> bool:
    """Whether a call that refuses in our words is answered with a value."""
    try:
        result = call(**given)
        return bool(list(islice(result, 100)) if inspect.isgenerator(result) else True)
    except (ValueError, TypeError) as error:
        assert OURS.search(str(error))
        return False


SHARE = "reads the part of a rank, RankShare, of a plan and sizes that `memory` or `predict` have checked"
SPACE = "looks at plans of a goal and a cluster that `parallelize` has checked"
SEARCH = "reads a ChainProblem, which is checked, and the space that the planner has made of it"
PUBLISHED = "reads rows of `published_steps.toml`"
DRY = "runs inside a dry run, whose plan is checked"
RECORD = "is what a call gives back, which reads nothing of it again"
MADE = "is made by the thousand of what has been checked; who takes it looks at its kind"
SYMBOLS = "is a description: `analyse` calls it with symbols, and whatever is no symbol is a constant"
TRACED = "is called by torch while it captures a function"
ON_RANKS = "reads parts and axes at which Interpreter and StageRunner have looked"
TASKS = "runs inside a Scheduler, which has checked graph, workers and cores"
ORDERS = "makes the orders of a generator, which has checked how many ranks and micro-batches there are"
INTERNAL = {  # what is public by name and is given only what others have checked: why, and who else calls it
    "planner.alpa.Stages": (SEARCH, ""),
    "planner.alpa.fastest_pipeline": (SEARCH, "planner.search"),
    "planner.bounds": (SPACE, "planner.choose"),
    "planner.choose.Choice": (RECORD, ""),
    "planner.choose.PricedPlan": (RECORD, ""),
    "planner.choose.pareto": (SPACE, ""),
    "planner.cost.Prediction": (RECORD, ""),
    "planner.cost.classes": (SHARE, ""),
    "planner.cuts.merged": (SEARCH, "planner.alpa"),
    "planner.dry.DryRank": (RECORD, ""),
    "planner.dry.dry_run": (SHARE, "planner.memory"),
    "planner.dry.steps_until_full": (DRY, ""),
    "planner.events.Sending": (RECORD, ""),
    "planner.events.Simulated": (RECORD, ""),
    "planner.experts": (SHARE, "planner.dry planner.kept planner.moments"),
    "planner.failures.Phase": (RECORD, ""),
    "planner.fit.Fit": (RECORD, ""),
    "planner.gathers": (SHARE, "planner.moments planner.sends"),
    "planner.graph_stages.StagePlan": (RECORD, ""),
    "planner.graph_stages.integer_program": (SEARCH, "planner.alpa"),
    "planner.kept": (SHARE, "planner.bounds planner.moments planner.seconds"),
    "planner.memory.Held": (RECORD, ""),
    "planner.memory.fullest": (SHARE, "lessons.labs.trade_off planner.cost"),
    "planner.memory.has_formula": (SHARE, ""),
    "planner.memory.of_rank": (SHARE, ""),
    "planner.models.Parameter": (RECORD, "planner.share"),
    "planner.models.model_typed": ("reads what the command line has parsed", "commands.memory commands.plan"),
    "planner.models.of_model": ("takes nothing", "commands.memory commands.plan"),
    "planner.models.units": (SHARE, "planner.bounds planner.share"),
    "planner.moments": (SHARE, "planner.memory"),
    "planner.numberless": (DRY, "planner.dry"),
    "planner.pipelines.pipeline_seconds": (SHARE, "planner.cost"),
    "planner.pipelines.time_of_1f1b": (SHARE, "lessons.exercises.placement"),
    "planner.placement.Placed": (RECORD, "planner.reinforce"),
    "planner.published_steps.cluster": (PUBLISHED, ""),
    "planner.published_steps.fit": (PUBLISHED, ""),
    "planner.reinforce.Learned": (RECORD, ""),
    "planner.scale.Counted": (RECORD, ""),
    "planner.search.Judge": (SEARCH, ""),
    "planner.search.halved": (SEARCH, ""),
    "planner.search.whole_cluster": (SEARCH, ""),
    "planner.seconds": (SHARE, "planner.bounds planner.cost"),
    "planner.sends": (
        SHARE,
        "lessons.labs.trade_off planner.cost planner.dry planner.moments planner.seconds",
    ),
    "planner.share": (
        SHARE,
        "lessons.labs.trade_off planner.bounds planner.choose planner.cost planner.experts planner.gathers "
        "planner.memory planner.pipelines planner.sends planner.space",
    ),
    "planner.space.candidates": (SPACE, "benchmarks.plans"),
    "planner.space.proposals": (SPACE, "planner.choose"),
    "planner.space.runs": (SPACE, "planner.choose"),
    "planner.tensor_costs.enter_cost": (SHARE, "planner.sends"),
    "planner.tensor_costs.leave_cost": (SHARE, "planner.sends"),
    "planner.tensor_costs.loss_cost": (SHARE, "planner.sends"),
    "schedules.asynchronous.Stream": (RECORD, ""),
    "schedules.gpipe_1f1b.alternate": (ORDERS, "schedules.asynchronous"),
    "schedules.phases.play": (ORDERS, "schedules.chimera_dualpipe schedules.zero_bubble"),
    "schedules.play.Player": (ORDERS, "schedules.asynchronous"),
    "schedules.registry.Generator": (RECORD, ""),
    "schedules.timeline.TimedOp": (RECORD, "schedules.play"),
    "schedules.timeline.Timeline": (RECORD, "schedules.play"),
    "schedules.timeline.exact_ratio": (ORDERS, "schedules.play"),
    "sharding.capture": (TRACED, ""),
    "sharding.cost.Step": (MADE, ""),
    "sharding.cost.added": (MADE, "sharding.crossing sharding.partition sharding.staged"),
    "sharding.cost.steps": (MADE, ""),
    "sharding.cost.step_cost": (MADE, "planner.cuts"),
    "sharding.crossing": (MADE, "sharding.staged"),
    "sharding.describe.Option": (MADE, "sharding.graph sharding.tofu"),
    "sharding.describe.Rule": (MADE, ""),
    "sharding.expression": (SYMBOLS, "sharding.describe sharding.operators"),
    "sharding.graph": (TRACED, "sharding.capture sharding.tofu"),
    "sharding.halo": (MADE, "sharding.partition sharding.reshard"),
    "sharding.interpret": (ON_RANKS, "sharding.run_staged"),
    "sharding.operators": (SYMBOLS, "sharding.capture"),
    "sharding.partition.Change": (MADE, ""),
    "sharding.partition.Program": (RECORD, ""),
    "sharding.partition.Run": (MADE, ""),
    "sharding.propagate.Spread": (RECORD, ""),
    "sharding.propagate.level": (MADE, ""),
    "sharding.propagate.read_layout": ("reads a mark of which `propagate` has looked at graph and mesh", ""),
    "sharding.reshard": (ON_RANKS, "sharding.interpret sharding.run_staged"),
    "sharding.staged.Passed": (RECORD, ""),
    "tasks.check.ancestors_of": (TASKS, "lessons.exercises.tasks"),
    "tasks.check.independent_loops": (TASKS, "tasks.runtime"),
    "tasks.cores": (TASKS, "tasks.scheduler"),
    "tasks.gpt2.adamw": (TASKS, "benchmarks.tasks lessons.labs.executors"),
    "tasks.gpt2.tokens_of": (TASKS, ""),
    "tasks.graph.Access": (MADE, ""),
    "tasks.graph.Task": (MADE, ""),
    "tasks.runtime": (TASKS, "tasks.scheduler"),
}


def public():
    """(room.file.name, object) of every function and class to call, and of the classes' own public methods."""
    for room in ROOMS:
        for info in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            for name, one in vars(importlib.import_module(info.name)).items():
                if name.startswith("_") or getattr(one, "__module__", "") != info.name or not callable(one):
                    continue
                if not inspect.isclass(one) and one.__name__ != "<lambda>":
                    yield f"{info.name[8:]}.{name}", one
                elif inspect.isclass(one) and not issubclass(one, BaseException):
                    yield f"{info.name[8:]}.{name}", one
                    for method, own in vars(one).items():
                        own = getattr(own, "__func__", own)
                        data = method in getattr(one, "__dataclass_fields__", ())
                        if inspect.isfunction(own) and not method.startswith("_") and not data:
                            yield f"{info.name[8:]}.{name}.{method}", own


def plain(call):
    return inspect.unwrap(getattr(call, "__func__", call)) if not inspect.isclass(call) else call


def internal(name: str) -> str:
    """The key of INTERNAL for a name: its own, or that of its class or file; empty where it has none."""
    parts = name.split(".")
    return next((key for n in (4, 3, 2) if (key := ".".join(parts[:n])) in INTERNAL), "")


def shown(name: str) -> str:
    """The file and the first name in it."""
    return ".".join(name.split(".")[1:3])


@cache
def tried() -> set:
    """What has a row."""
    rows = [*CALLS, *test_arguments.CALLS, *test_numbers.FUNCTIONS.values()]
    return {plain(call) for call, _ in rows}


def untried() -> list[str]:
    """What is public, has no row, and no reason in UNTRIED."""
    left = [name for name, one in public() if plain(one) not in tried()]
    return [name for name in left if shown(name) not in test_arguments.UNTRIED]


def test_everything_public_is_tried_at_odd_values_or_is_given_only_what_has_been_checked():
    assert [name for name in untried() if not internal(name)] == []
    assert {internal(name) for name in untried()} == set(INTERNAL), "has rows by now: take it out of INTERNAL"
    assert {*test_arguments.UNTRIED} <= {shown(name) for name, one in public() if plain(one) not in tried()}


def callers() -> dict[str, set[str]]:
    """For each key of INTERNAL the files of the package, other than its own, in which it is called."""
    names, found = set(untried()), {key: set() for key in INTERNAL}
    root = Path(gpt2lab.__file__).parent
    for path in root.rglob("*.py"):
        parts, tree, known = path.relative_to(root).with_suffix("").parts, ast.parse(path.read_text()), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                home = [*parts[: len(parts) - node.level], *(node.module or "").split(".")]
                known |= {
                    one.asname or one.name: ".".join(filter(None, [*home, one.name])) for one in node.names
                }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                outer, _, inner = ast.unparse(node.func).partition(".")
                name = ".".join(filter(None, [known.get(outer), inner]))
                key = internal(name) if name in names else ""
                if key and ".".join(parts) != ".".join(name.split(".")[:2]):
                    found[key].add(".".join(parts))
    return found


def test_what_is_given_only_what_has_been_checked_is_called_nowhere_else():
    assert callers() == {key: set(files.split()) for key, (_, files) in INTERNAL.items()}
