"""What plans cost: bytes as live ranks count them, memory as their allocator does, time as the clock says."""

import gc
import random
from dataclasses import replace

import pytest
from planting import rewritten

from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS, WITHOUT_FLUSH, Composition
from gpt2lab.machine import memory as measured
from gpt2lab.machine.links import Link, Network
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.planner import experts, kept, pipelines
from gpt2lab.planner.cost import predict
from gpt2lab.planner.dry import dry_run, steps_until_full
from gpt2lab.planner.gathers import WholeWeights
from gpt2lab.planner.memory import has_formula, memory, of_rank
from gpt2lab.planner.moments import Walk
from gpt2lab.planner.problem import CLUSTERS, Cluster, Device
from gpt2lab.planner.seconds import pairs_seen
from gpt2lab.planner.sends import by_axis, sends
from gpt2lab.planner.share import RankShare
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.schedules import Cost, make, simulate
from gpt2lab.train import Trainer

pytestmark = pytest.mark.live

ROWS, LENGTH = 7, 11
MORE = (
    "pp=4,micro=2",
    "pp=2,dp=2,micro=4,schedule=gpipe,zero=3",
    "pp=2,dp=2,micro=3,schedule=interleaved,zero=3",
    "pp=2,dp=2,micro=4,schedule=zb_v,zero=3",
    "pp=2,dp=2,micro=4,schedule=zb_v,zero=2",
    "pp=2,dp=2,micro=3,schedule=dualpipe,zero=3",
    "pp=2,dp=2,micro=4,schedule=chimera,zero=3,recompute=on",
    "pp=2,dp=2,micro=3,zero=3,data=owner",
    "pp=2,tp=2,micro=2,schedule=terapipe,recompute=on",
    "pp=2,tp=2,micro=2,schedule=zb_h1,sp=on,recompute=on",
    "dp=4,zero=3,data=owner",
    "dp=4,zero=3,shard=2",
    "dp=4,zero=2,shard=2,micro=1",
    "dp=4,data=naive",
    "dp=4,data=server",
    "dp=4,data=servers",
    "dp=4,bucket=3",
    "tp=4,sp=on,recompute=on",
    "cp=4,exchange=kv-roots",
    "cp=4,exchange=double-ring",
    "cp=4,exchange=triangle,layout=zigzag",
    "cp=4,exchange=qkv",
    "cp=4,exchange=kv-allreduce,recompute=on",
    "pp=2,dp=2,micro=3,schedule=zb_v,zero=3,recompute=on",
)
CASES = [(c.plan, replace(c.config, dropout=0.0)) for c in PAIRS] + [(text, CONFIG) for text in MORE]
CASES += [(c.plan, replace(c.config, dropout=0.0)) for c in WITHOUT_FLUSH if Plan.parse(c.plan).world == 4]
LARGE = [(c.plan, replace(c.config, dropout=0.0)) for c in (*TRIPLES, *ALL) if not c.router]


def trained(text, config, rows, length):
    """A trainer that has made a step, the batch, and where this rank is."""
    mesh = Mesh(**Plan.parse(text).axes)
    trainer, batch = Trainer(build(Plan.parse(text), config, mesh)), example_batch(config, rows, length)
    trainer.step(batch)
    return trainer, batch, mesh.coordinates()


def counted(rank, world, text, config, rows):
    """The calls of a rank in a step, or in a stream without a flush, and where it is."""
    trainer, batch, place = trained(text, config, rows, LENGTH)
    comm.clear_log()
    trainer.stream([batch] * steps_until_full(trainer.parallel.plan))
    return tuple((e.op, e.axis, e.bytes, e.messages) for e in comm.log), place


def agrees(ranks, text, config):
    """Every call of a dry run is that of the live rank; bytes and messages by axis are those of the formulas."""
    plan = Plan.parse(text)
    for rank, (calls, place) in enumerate(ranks.run(counted, text, config, ROWS)):
        dry = dry_run(plan, config, ROWS, LENGTH, rank=rank)
        assert (dry.calls, dry.place) == (calls, place)
        if not plan.asynchronous:
            assert by_axis(sends(RankShare(plan, config, ROWS, LENGTH, **place))) == dry.sent, place


@pytest.mark.parametrize(("text", "config"), CASES[::2], ids=lambda v: v if isinstance(v, str) else "")
def test_bytes_and_messages_are_those_that_live_ranks_count(pools, text, config):
    agrees(pools[4], text, config)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "config"), CASES[1::2], ids=lambda v: v if isinstance(v, str) else "")
def test_bytes_of_the_other_plans(pools, text, config):
    agrees(pools[4], text, config)


@pytest.mark.parametrize("composition", WITH_EXPERTS, ids=lambda c: c.plan)
def test_calls_of_a_mixture_of_experts(pools, composition):
    """How many rows travel is the router's choice, but not which calls are made, nor what else is sent."""
    plan, config = Plan.parse(composition.plan), replace(composition.config, dropout=0.0)
    exact = composition.router == "expert_choice"
    known = lambda call: call if exact or not call[1].startswith("ep") else call[:2]
    for rank, (calls, _) in enumerate(pools[4].run(counted, composition.plan, config, 8)):
        dry = dry_run(plan, config, 8, LENGTH, rank=rank)
        assert list(map(known, dry.calls)) == list(map(known, calls))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("text", "config"), LARGE, ids=lambda v: v if isinstance(v, str) else "")
def test_bytes_of_plans_of_three_and_four_axes(text, config):
    with Ranks(Plan.parse(text).world, echo=False, timeout=120) as ranks:
        agrees(ranks, text, config)


NARROW = replace(PRESETS["mini"], vocab_size=3000, n_layer=3)


def held(rank, world, text, config, rows, length):
    """The most bytes that a rank held in a step, or in a stream of several without a flush, and where it is."""
    trainer, batch, place = trained(text, config, rows, length)
    plan = trainer.parallel.plan
    most = max(measured.over_a_step(trainer, batch, steps=steps_until_full(plan)))
    trainer = None
    gc.collect()
    return most, place


def dry_is_exact(found, text, *sizes, within=0.01):
    """A dry run holds what live ranks held: the first rank, one in the middle, the last."""
    for rank in {0, len(found) // 2, len(found) - 1}:
        dry = dry_run(Plan.parse(text), *sizes, rank=rank)
        assert dry.place == found[rank][1]
        assert abs(dry.held / found[rank][0] - 1) < within, (rank, dry, found[rank][0])


def within_five_percent(found, text, config, rows, length):
    if not config.experts:
        dry_is_exact(found, text, config, rows, length)
    for most, place in found:
        one = of_rank(RankShare(Plan.parse(text), config, rows, length, **place))
        assert abs(one.total / most - 1) < 0.05, (place, one, most)


WIDE = replace(
    NARROW, vocab_size=12_000, n_layer=2
)  # the fullest moment is where the embedding's gradients meet
DEEPER = replace(WIDE, n_layer=4)
WITHIN = [  # the model, rows, tokens, plans
    (
        NARROW,
        8,
        48,
        "pp=2,tp=2,micro=3,sp=on dp=2,tp=2,zero=2,recompute=on,sp=on pp=4,micro=4,schedule=gpipe",
    ),
    (NARROW, 8, 48, "cp=2,tp=2,layout=zigzag,exchange=ring"),
    (WIDE, 4, 48, "dp=2,zero=1 dp=2,zero=3,refill=on tp=2,sp=on,loss=whole pp=2,micro=2,schedule=zb_h1"),
    (WIDE, 4, 48, "dp=2,loss=chunked dp=2,zero=3,loss=chunked dp=2,micro=2,zero=3,loss=chunked"),
    (WIDE, 4, 48, "dp=2,micro=2,zero=2,loss=chunked"),
    # stages 2 and 3: the embedding is gathered for a micro-batch while its gradient of the one before is summed
    (DEEPER, 8, 24, "pp=2,dp=2,micro=4,zero=3 dp=2,tp=2,micro=2,zero=3,sp=on"),
    (DEEPER, 8, 24, "pp=2,dp=2,micro=4,zero=3,schedule=interleaved,loss=chunked,recompute=on"),
    (DEEPER, 8, 24, "cp=2,tp=2,micro=3,zero=2,layout=zigzag,exchange=ring,sp=on"),
]
SIZED = [(text, *sizes) for *sizes, texts in WITHIN for text in texts.split()]


@pytest.mark.parametrize("text, config, rows, length", SIZED, ids=lambda v: v if isinstance(v, str) else "")
def test_memory_is_within_five_percent(pools, text, config, rows, length):
    found = pools[Plan.parse(text).world].run(held, text, config, rows, length)
    within_five_percent(found, text, config, rows, length)


@pytest.mark.parametrize("text", ["serial", "micro=2", "recompute=on,micro=2", "loss=chunked"])
def test_memory_of_one_rank(text):
    within_five_percent([held(0, 1, text, NARROW, 4, 48)], text, NARROW, 4, 48)


def test_memory_where_the_logits_of_a_chunk_are_most_of_it():
    """192 tokens, of which a chunk has 128."""
    sizes = replace(NARROW, vocab_size=12_000, n_layer=1, n_embd=8, n_head=1), 4, 48
    within_five_percent([held(0, 1, "loss=chunked", *sizes)], "loss=chunked", *sizes)


def test_memory_where_what_the_last_norm_keeps_is_most_of_it():
    """The last of two stages of one block holds its input and its output of both micro-batches, and no logits."""
    plan = Plan.parse("pp=2,micro=2,schedule=gpipe,loss=chunked")
    asked = plan, GPT2Config(8, 64, 1, 1, 16), 64, 64
    last = memory(*asked)[1]
    assert last.total == pytest.approx(dry_run(*asked, rank=1).held, rel=0.02)


UNEVEN = [  # what replicas hold differs, or the keys and values of slices add up
    "dp=4,zero=3,data=owner",
    "dp=4,data=server",
    "dp=4,data=servers",
    "pp=2,dp=2,micro=3,zero=3,data=owner",
    "pp=2,tp=2,micro=2,schedule=terapipe,chunks=8",
]


@pytest.mark.parametrize("text", UNEVEN)
def test_memory_that_only_a_dry_run_knows(pools, text):
    found = pools[4].run(held, text, NARROW, 8, 48)
    dry_is_exact(found, text, NARROW, 8, 48)


BLOCKS = {  # 1,000 words: the blocks are most of the model
    text: (replace(NARROW, vocab_size=1000, n_layer=4), 4, 48)
    for text in [
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "dp=2,zero=3,refill=on",
        "dp=2,micro=2,loss=chunked",
        "dp=2,micro=2,zero=2,loss=chunked",
        "dp=2,micro=2,zero=3,loss=chunked",
    ]
}


SPLIT = "pp=2,dp=2,micro=2,schedule=zb_h1,zero=3", (replace(NARROW, vocab_size=1000, n_layer=8), 4, 48)


def test_memory_between_the_halves_of_a_backward(pools):
    text, sizes = SPLIT
    assert most_wrong({text: pools[4].run(held, text, *sizes)}, {text: sizes}) < 0.02


@pytest.fixture(scope="module")
def held_by_blocks(pools):
    return {text: pools[2].run(held, text, *sizes) for text, sizes in BLOCKS.items()}


def test_memory_where_the_blocks_are_most_of_the_model(held_by_blocks):
    for text, sizes in BLOCKS.items():
        within_five_percent(held_by_blocks[text], text, *sizes)


LEFT_OUT = {
    "the shard that a sum gives": ("_blocks", "+ self.sums[after] * (not new)", ""),
    "the second and the last but one": (
        "_blocks",
        "0, min(1, others), max(0, others - 1), others",
        "0, others",
    ),
    "the last but one": ("_blocks", "min(1, others), max(0, others - 1), others", "min(1, others), others"),
    "what is gathered beforehand": ("_whole", "self.here.coming.union(self.here.users)", "self.here.users"),
    "a block's joined gradients": ("_blocks", "if again else block * sharded)", "if again else 0)"),
    "and those of one that ran again": ("_blocks", "block * (1 + sharded) * again", "0"),
    "blocks that are over": ("_blocks", "sum(kept[others + 1 - done :])", "0"),
    "gradients that were there before": ("_blocks", "- done :]) * new", "- done :])"),
    "a block's sum under way": ("_blocks", "summed * (done > 0)", "0"),
    "the copy that joins": ("_join", "ranks if copied else", ""),
}


def most_wrong(found, plans):
    """The largest relative error of what these plans are said to hold."""
    shares = [
        (RankShare(Plan.parse(text), *sizes, **place), most)
        for text, sizes in plans.items()
        for most, place in found[text]
    ]
    return max(abs(of_rank(share).total / most - 1) for share, most in shares)


def notices(found, plans, bug, right, wrong):
    """What plans are said to hold is wrong by less than `right`; with a bug (method, its text, wrong text) by more."""
    assert most_wrong(found, plans) < right
    with rewritten(*bug):
        assert most_wrong(found, plans) > wrong


@pytest.mark.mutant
@pytest.mark.parametrize("what", LEFT_OUT)
def test_mutant_that_leaves_out_a_part_of_memory(held_by_blocks, what):
    method, right, wrong = LEFT_OUT[what]
    notices(held_by_blocks, BLOCKS, (getattr(Walk, method), right, wrong), 0.02, 0.025)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", [c for c in PAIRS if not c.router], ids=lambda c: c.plan)
def test_memory_of_every_pair_of_axes_on_mini(pools, composition):
    mini = replace(PRESETS["mini"], window=composition.window)
    if "pp" in composition.plan and "sp" in composition.plan:  # a layer on every stage: the head weighs less
        mini = replace(mini, vocab_size=3000)
    found = pools[4].run(held, composition.plan, mini, 8, 64)
    within_five_percent(found, composition.plan, mini, 8, 64)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", (TRIPLES[0], *TRIPLES[2:5]), ids=lambda c: c.plan)
def test_memory_of_three_axes(composition):
    plan = Plan.parse(composition.plan)
    layers = 4 * plan.pp * plan.chunks if plan.sp else 4  # a layer on every stage
    mini = replace(PRESETS["mini"], vocab_size=3000, n_layer=layers, window=composition.window)
    with Ranks(plan.world, echo=False, timeout=120) as ranks:
        found = ranks.run(held, composition.plan, mini, 8, 64)
    within_five_percent(found, composition.plan, mini, 8, 64)


STREAMS = {
    text: (replace(PRESETS["mini"], vocab_size=3000), 8, 48)
    for text in [
        "pp=4,schedule=pipedream",
        "pp=4,micro=4,schedule=2bw",
        "pp=2,dp=2,micro=2,schedule=pipedream",
        "pp=2,tp=2,schedule=ampnet",
    ]
}


@pytest.fixture(scope="module")
def held_by_streams(pools):
    return {text: pools[4].run(held, text, *sizes) for text, sizes in STREAMS.items()}


def test_memory_of_streams_without_a_flush(held_by_streams):
    for text, sizes in STREAMS.items():
        dry_is_exact(held_by_streams[text], text, *sizes, within=0.02)  # the batch's tokens are in no count


def run_dry(text, *sizes):
    """What each rank of a plan holds, and its place."""
    plan = Plan.parse(text)
    runs = [dry_run(plan, *sizes, 4, "adamw", rank) for rank in range(plan.world)]
    return [(run.held, run.place) for run in runs]


PIPELINES = {
    text: (GPT2Config(1000, 64, n_layer=8, n_head=4, n_embd=64), 8, 64)
    for text in [
        "pp=4,micro=8",
        "pp=4,micro=8,schedule=gpipe",
        "pp=4,micro=4,schedule=zb_h1",
        "pp=2,micro=4,schedule=chimera",
        "pp=2,micro=4,schedule=zb_v,loss=chunked",
        "pp=2,micro=4,schedule=interleaved,recompute=on",
    ]
}
SHARDED_PIPELINES = {
    text: (GPT2Config(1000, 64, n_layer=8, n_head=4, n_embd=width), rows, 64)
    for text, width, rows in [
        ("pp=2,dp=2,micro=4,zero=2", 64, 8),
        ("pp=4,dp=2,micro=4,zero=2", 64, 8),
        ("pp=4,dp=2,micro=5,zero=2", 128, 10),
        ("pp=2,dp=2,micro=4,zero=2,schedule=zb_h1", 64, 8),
        ("pp=2,dp=2,tp=2,micro=4,zero=2", 64, 16),
    ]
} | {"pp=2,dp=2,micro=4,zero=2,schedule=interleaved,loss=chunked,recompute=on": (DEEPER, 8, 24)}
OF_SHARDED = {
    "a block's sum beside the next unit": (Walk._arrive, "self.start_sum(self.e *", "self.start_sum(0 *"),
    "what tensor parallelism cuts has left before": (
        Walk._arrive,
        "self.sizes[last]",
        "self.whole[last[0]] // self.e",
    ),
    "the head's sum waits for it": (Walk._loss, "self.start_sum(0)  # it leaves", "pass  # it leaves"),
}
OF_PIPELINES = {
    "messages under way": (Walk.travel, "sum(stream_bytes", "0 * sum(stream_bytes"),
    "the output that a unit holds": (
        Walk._keeps,
        "self.placement[after] != self.placement[op.stage]",
        "False",
    ),
    "both gradients of a first half": (kept.transient, "(matrix or hidden)", "matrix"),
    "what the head frees": (Walk._loss, "kept_by_head(self.share, rows, tokens)", "0"),
}


@pytest.fixture(scope="module")
def pipelines_run_dry():
    return {text: run_dry(text, *sizes) for text, sizes in PIPELINES.items()}


@pytest.mark.mutant
@pytest.mark.parametrize("what", OF_PIPELINES)
def test_mutant_that_leaves_out_a_part_of_a_pipeline_s_memory(pipelines_run_dry, what):
    notices(pipelines_run_dry, PIPELINES, OF_PIPELINES[what], 0.007, 0.009)


@pytest.fixture(scope="module")
def sharded_pipelines_run_dry():
    return {text: run_dry(text, *sizes) for text, sizes in SHARDED_PIPELINES.items()}


@pytest.mark.mutant
@pytest.mark.parametrize("what", OF_SHARDED)
def test_mutant_that_forgets_a_sum_under_way_beside_a_pipeline(sharded_pipelines_run_dry, what):
    """The last stage of four held 12 % more than was said: a block's gradients, while the next loss is computed."""
    notices(sharded_pipelines_run_dry, SHARDED_PIPELINES, OF_SHARDED[what], 0.02, 0.023)


LONG, DEEP = GPT2Config(500, 256, n_layer=6, n_head=4, n_embd=64), GPT2Config(3000, 64, 5, 4, 256)
WORDY = GPT2Config(12_000, 64, n_layer=4, n_head=4, n_embd=64)
MENDED = {  # plans of which the formulas once said up to 18 % too much or too little; now all are within 2 %
    text: (config, rows, length)
    for config, rows, length, texts in [
        (DEEP, 8, 64, "pp=2,micro=4,schedule=gpipe,recompute=on,loss=chunked"),
        (DEEP, 8, 64, "pp=2,dp=2,micro=4,schedule=interleaved,zero=3"),
        (DEEP, 8, 64, "pp=2,dp=2,tp=2,micro=2,zero=3,schedule=zb_h1,sp=on"),
        (
            DEEP,
            8,
            64,
            "pp=2,dp=2,micro=2,schedule=zb_h1,zero=1,loss=chunked pp=2,dp=2,micro=2,schedule=zb_v,zero=3",
        ),
        (GPT2Config(1000, 64, 9, 4, 128), 16, 32, "pp=2,dp=2,tp=2,micro=4,zero=2 tp=4,sp=on"),
        (GPT2Config(1000, 64, 8, 4, 64), 16, 64, "pp=2,dp=2,tp=2,micro=4,zero=3,schedule=zb_h1"),
        (WORDY, 8, 48, "pp=2,dp=2,micro=4,schedule=dualpipe,zero=3 pp=3,micro=3,schedule=zb_h2,loss=chunked"),
        (LONG, 8, 256, "pp=2,dp=2,micro=4,schedule=zb_h1,zero=3,recompute=on cp=2,recompute=on"),
        (LONG, 8, 256, "pp=2,dp=2,tp=2,micro=2,zero=3,schedule=interleaved,sp=on"),
        (LONG, 8, 256, "cp=2,dp=2,zero=3,layout=zigzag,exchange=ring pp=2,dp=2,micro=2,zero=3,loss=chunked"),
        (WORDY, 8, 48, "pp=4,dp=2,micro=4,schedule=interleaved,zero=3"),
        (WORDY, 8, 64, "pp=2,dp=2,micro=4,schedule=zb_v,zero=2,loss=chunked"),
    ]
    for text in texts.split()
}
OF_MENDED = {
    "the head's sum in a second half waits for what was before": (
        Walk._head_again,
        "self.start_sum(0)",
        "pass",
    ),
    "that sum has left when the blocks' products are over": (
        Walk._second_half,
        "self.plan.zero != 2",
        "True",
    ),
    "a chunked loss's gradient is added to what was there": (
        Walk._loss,
        "half or sent and (self.plan.zero > 1 or not self._is_first(self.last))",
        "half",
    ),
    "of a block's groups only the last is still being summed": (
        Walk.__init__,
        "key[1] == self.cut_last  #",
        "key[1] < EXPERT  #",
    ),
    "what is gathered before it is used": (WholeWeights.prefetch, "i >= 0", "False"),
    "the sum of an embedding's gradient, of which a rank has both ends": (
        Walk._arrive,
        "0 if first else self.wte_shard",
        "0 if new else self.wte_shard",
    ),
    "the positions' gradients come before the embedding's": (
        Walk._arrive,
        "self.start_sum(0)  # the positions'",
        "pass  #",
    ),
    "a first half's own gradients wait": (
        Walk._blocks,
        "kept_between(self.share, position, rows, tokens, done) if half else 0",
        "0",
    ),
    "a head of tensor ranks waits with its part of the words": (
        kept.kept_between,
        "kept_for_weights(n, c, layers, words) + more - whole) // plan.tp",
        "kept_for_weights(n, c, layers, words * plan.tp) + more - whole) // plan.tp",
    ),
    "attention's own backward after the MLP's": (
        kept.transient,
        "- kept_by_dense_block(share, rows, tokens)",
        "",
    ),
    "messages that are copies": (Walk.travel, "self.plan.sp and not position and rows > 1", "False"),
    "the gradient that came to a stage": (Walk._blocks, "stream * (done > 0 and position < self.last)", "0"),
    "gradients that the products of a second half make": (Walk._products, "return there", "return 0"),
    "tokens that the head gathers again": (Walk._loss, "n_embd * self.plan.sp", "n_embd * 0"),
    "a chunk's buffer has the tokens of its micro-batch": (Walk.forward, "rows * tokens)", "CHUNK)"),
}


def run_first_dry(text, *sizes):
    """What the first and the last rank of each stage hold, but for the batch's tokens and targets; their places."""
    plan, found, (_, rows, length) = Plan.parse(text), [], sizes
    beside = plan.world // plan.pp
    for rank in {stage * beside + one for stage in range(plan.pp) for one in (0, (plan.cp - 1) * plan.tp)}:
        run = dry_run(plan, *sizes, 4, "adamw", rank)
        found.append((run.held - 2 * 8 * rows * length, run.place))
    return found


@pytest.fixture(scope="module")
def mended_run_dry():
    return {text: run_first_dry(text, *sizes) for text, sizes in MENDED.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", MENDED)
def test_memory_is_within_two_percent_of_a_dry_run(mended_run_dry, text):
    assert most_wrong(mended_run_dry, {text: MENDED[text]}) < 0.02


@pytest.mark.mutant
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", OF_MENDED)
def test_mutant_that_forgets_what_was_mended(mended_run_dry, what):
    notices(mended_run_dry, MENDED, OF_MENDED[what], 0.02, 0.02)


ROWS_WEIGH = {"every": 1, "capacity": None}  # more than weights, and none is dropped
MIXTURES = {
    c.plan: (replace(PRESETS["mini"], vocab_size=words, experts=replace(c.config.experts, **more)), rows, 64)
    for words, rows, more, c in (
        (3000, 8, {"shared": 0}, Composition("dp=4,ep=2,zero=1", router="gshard")),
        (3000, 8, {"shared": 0}, Composition("dp=4,ep=4,zero=3", router="gshard")),
        (500, 24, ROWS_WEIGH | {"shared": 0, "gated": False}, Composition("dp=4,ep=2", router="mixtral")),
        (3000, 8, {}, Composition("dp=4,ep=4,node=2,zero=2", router="gshard")),
        (3000, 8, {}, Composition("pp=2,dp=2,ep=2,micro=3,schedule=zb_h1,zero=2", router="deepseek")),
        (3000, 8, {}, Composition("dp=2,ep=2,tp=2,micro=2,sp=on,zero=2", router="deepseek")),
        (500, 24, ROWS_WEIGH, Composition("tp=4,sp=on", router="deepseek")),
    )
}
ALONE = (replace(MIXTURES["tp=4,sp=on"][0], n_layer=1), 8, 64)


@pytest.fixture(scope="module")
def held_by_mixtures(pools):
    found = {text: pools[4].run(held, text, *sizes) for text, sizes in MIXTURES.items()}
    return found | {"serial": [held(0, 1, "serial", *ALONE)]}


def test_memory_of_mixtures_of_experts(held_by_mixtures):
    for text, found in held_by_mixtures.items():
        sizes = MIXTURES.get(text, ALONE)
        dry_is_exact(found, text, *sizes, within=0.05)  # routers are not even
        if has_formula(Plan.parse(text), sizes[0]):
            within_five_percent(found, text, *sizes)


OF_MIXTURES = {
    "fewer replicas of experts": (RankShare.sharers, "part[1] >= EXPERT", "False"),
    "experts without replicas are not gathered": (Walk.__init__, "share.sharers(key) > 1", "True"),
    "nor summed with a block's last part": (Walk.__init__, "key[1] == self.cut_last  #", "True  #"),
    "rows of experts": (experts.kept_of_rows, "rows_of(share.config, share.length, tokens)", "0"),
    "their hidden layers": (experts.kept_of_rows, "8 * hidden", "0"),
    "experts' gradients before those of attention": (
        experts.in_backward,
        "plain + late - gone > begins",
        "False",
    ),
}


@pytest.fixture(scope="module")
def mixtures_run_dry():
    """What each rank holds where routers are even, as formulas take them: (bytes, its place)."""
    plans = {text: sizes for text, sizes in MIXTURES.items() if has_formula(Plan.parse(text), sizes[0])}
    return {text: run_dry(text, *sizes) for text, sizes in plans.items()}, plans


@pytest.mark.mutant
@pytest.mark.parametrize("what", OF_MIXTURES)
def test_mutant_that_leaves_out_a_part_of_a_mixture(mixtures_run_dry, what):
    notices(*mixtures_run_dry, OF_MIXTURES[what], 0.005, 0.009)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "composition", [*WITHOUT_FLUSH, *WITH_EXPERTS, *(c for c in TRIPLES if c.router)], ids=lambda c: c.plan
)
def test_memory_of_every_stream_and_mixture_on_mini(pools, composition):
    plan = Plan.parse(composition.plan)
    mini = replace(PRESETS["mini"], experts=composition.config.experts)
    if plan.pp > 1 and plan.sp:  # a layer on every stage: the head weighs less
        mini = replace(mini, vocab_size=3000)
    found = pools[plan.world].run(held, composition.plan, mini, 8, 16)
    within_five_percent(found, composition.plan, mini, 8, 16)


def test_1f1b_by_slots_takes_as_long_as_its_clock_says():
    chance = random.Random(0)
    for _ in range(40):
        p, m = chance.randint(1, 9), chance.randint(1, 20)
        forward, backward = ([chance.random() for _ in range(p)] for _ in range(2))
        hop = chance.choice([0, 0.1, 1.0])
        clock = simulate(make("1f1b", p, m), Cost(forward, backward=backward, hop=hop)).makespan
        found = pipelines.time_of_1f1b(forward, backward, hop, m)
        assert found == pytest.approx(clock, rel=1e-12)


@pytest.mark.parametrize(
    "name",
    ["gpipe", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_v", "chimera", "dualpipe", "dualpipe_v"],
)
@pytest.mark.parametrize(("hop", "micro"), [(0.0, 32), (0.25, 32), (0.0, 35)])
def test_a_long_pipeline_takes_as_long_as_its_clock_says(name, hop, micro, monkeypatch):
    if micro == 35 and name not in ("interleaved", "zb_v"):
        micro = 34  # two copies of a model share out an even number
    plan = Plan(pp=4, micro=micro, schedule=name)
    depth = 8 if name in ("interleaved", "breadth_first", "zb_v", "dualpipe_v") else 4
    forward, first, second = [1.0] * (depth - 1) + [1.5], [1.0] * depth, [0.75] * depth
    whole = float(simulate(make(name, 4, micro), Cost(forward, first, second, hop=hop)).makespan)
    monkeypatch.setattr(pipelines, "MOST", 0)
    times = tuple(forward), tuple(first), tuple(second)
    found = pipelines.pipeline_seconds(plan, *times, hop, (1.0,) * micro)
    assert found == pytest.approx(whole, rel=1e-9)


FREE = Cluster(8, Device(1e9), Network(Link(0, float("inf"))))


def test_the_parts_of_a_prediction_add_up_and_ideal_ranks_share_the_work():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    alone = predict(Plan(), config, 8, 16, FREE)
    for text in ("serial", "dp=4", "tp=4", "dp=2,tp=2", "dp=2,zero=3", "pp=2,micro=4", "cp=2,layout=zigzag"):
        plan = Plan.parse(text)
        found = predict(plan, config, 8, 16, FREE)
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        work = found.parts["compute"] * plan.world
        assert work == pytest.approx(alone.seconds, rel=0.25 if plan.pp > 1 else 0.01), text


def test_uneven_micro_batches_take_as_long_as_their_rows():
    """7 rows in three micro-batches are 3, 2 and 2: longer than three of 2, shorter than three of 3."""
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    six, seven, nine = (predict(Plan(pp=2, micro=3), config, rows, 16, FREE).seconds for rows in (6, 7, 9))
    assert six < seven < nine


def test_recomputation_shows_as_a_third_of_the_blocks_work():
    config = GPT2Config(vocab_size=2, n_positions=16, n_layer=4, n_head=4, n_embd=64)
    found = predict(Plan(recompute=True), config, 8, 16, FREE)
    assert found.parts["recompute"] / found.parts["compute"] == pytest.approx(1 / 3, rel=0.01)


def test_more_ranks_than_cores_share_them():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    cores = replace(FREE, cores=2, network=Network(Link(0, float("inf")), node=8))
    for text in ("dp=4", "tp=4", "pp=4,micro=4"):
        free, shared = (predict(Plan.parse(text), config, 8, 16, c).seconds for c in (FREE, cores))
        if "pp" in text:
            assert free < shared < 2 * free  # a pipeline waits anyway
        else:
            assert shared == pytest.approx(2 * free)


def test_everything_takes_longer_where_many_ranks_were_measured_to_be_slow():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    network = Network(Link(1e-5, 1e9), node=8)
    fast = replace(FREE, cores=2, network=network, call=1e-5)
    slow = replace(fast, slowed=((1, 0.5), (4, 1.5)))
    for text, factor in (("serial", 0.5), ("dp=2,zero=1", 0.5), ("dp=2,tp=2", 1.5), ("pp=4,micro=4", 1.5)):
        before, after = (predict(Plan.parse(text), config, 8, 16, c).seconds for c in (fast, slow))
        assert after == pytest.approx(factor * before), text


def test_adding_up_gradients_passes_their_bytes_for_all_micro_batches_but_the_first():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    weights = 4 * (4 * (12 * 16**2 + 13 * 16) + 64 * 16)  # bytes of the blocks and the embedding
    for micro in (1, 2, 4):
        free, slow = (
            predict(Plan(micro=micro), config, 8, 16, replace(FREE, device=Device(1e9, copy=1e9, add=add)))
            for add in (0, 3)
        )
        assert slow.seconds - free.seconds == pytest.approx((micro - 1) * 3 * weights / 1e9, abs=1e-12)


def test_tensor_ranks_get_the_link_inside_a_node():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=2, n_head=4, n_embd=16)
    wide = Cluster(8, Device(1e15), Network(Link(0, 1e6), Link(0, 1e12), 4))
    one = predict(Plan(dp=2, tp=4), config, 8, 16, wide)
    assert one.parts["tp"] < 1e-3 * one.parts["dp+cp"]


@pytest.mark.parametrize(
    ("layout", "ranks", "most"), [("contiguous", 2, 1552), ("zigzag", 2, 1040), ("zigzag", 3, 737)]
)
def test_the_context_rank_with_most_pairs_decides(layout, ranks, most):
    """Of 64 tokens' 2,080 (query, key) pairs; where 64 does not divide, zigzag is not even."""
    plan = Plan(cp=ranks, layout=layout, exchange="ring")
    assert pairs_seen(RankShare(plan, PRESETS["nano"], 4, 64), 64 // ranks) == most


def test_a_long_backward_hides_sums_but_not_those_of_zero_1_which_come_after_it():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=4, n_head=4, n_embd=16)
    slow = Cluster(2, Device(1e3), Network(Link(0, 1e6)))
    one, two = (predict(Plan(dp=2, zero=zero), config, 8, 16, slow) for zero in (1, 2))
    whole = sum(one.sent.values()) / 1e6
    assert one.parts["dp+cp"] == pytest.approx(whole, rel=1e-3) and two.parts["dp+cp"] < 0.1 * whole


def test_memory_says_for_each_stage_what_it_holds_and_for_what():
    config = GPT2Config(vocab_size=64, n_positions=16, n_layer=8, n_head=4, n_embd=16)
    stages = memory(Plan(pp=4, micro=8), config, 8, 16)
    assert [s.stage for s in stages] == [0, 1, 2, 3]
    assert all(s.total == sum(s.parts.values()) for s in stages)
    adamw, sgd = (memory(Plan(), config, 8, 16, optimizer=name)[0] for name in ("adamw", "sgd"))
    assert adamw.total - sgd.total == adamw.parts["optimizer"] == 2 * 4 * config.parameters


def test_a_plan_for_4096_devices_is_answered_without_visiting_them(monkeypatch):
    """No rank is looked at twice: five classes of stages, however many devices."""
    seen = []
    right = of_rank
    monkeypatch.setattr(
        "gpt2lab.planner.memory.of_rank", lambda share, o="adamw": seen.append(share) or right(share, o)
    )
    large = GPT2Config(vocab_size=51200, n_positions=2048, n_layer=96, n_head=96, n_embd=12288)
    found = predict(
        Plan(pp=64, dp=8, tp=8, micro=512), large, 4096, 2048, CLUSTERS["a100x64"].with_devices(4096), 2
    )
    assert len(seen) <= 10 and 0.1 < found.mfu < 0.5
