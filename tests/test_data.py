"""Data parallelism equals the serial run in all its forms, sends what the formulas say, and overlaps."""

import gc
from argparse import Namespace

import pytest
import torch
from equality import spelled_out
from matplotlib.colors import to_hex
from trained import TINY, run

from gpt2lab.benchmarks import data as benchmark
from gpt2lab.benchmarks import race
from gpt2lab.corpus import Batches
from gpt2lab.corpus.loaders import SHAPES, InOrder, each_reads, joined, one_reads
from gpt2lab.lessons.labs import data as lab
from gpt2lab.lessons.labs import replicas
from gpt2lab.lessons.labs.instruments import bytes_sent, trainer_by
from gpt2lab.lessons.labs.updates import WAYS
from gpt2lab.model import GPT2, token_loss
from gpt2lab.parallel.data import into_buckets
from gpt2lab.parallel.finish import Piece, gradient_norm
from gpt2lab.parallel.spec import Spec
from gpt2lab.parallel.zero.costs import all_reduce_bytes, backward_and_sums
from gpt2lab.plots import data as plots
from gpt2lab.ranks import comm, trace
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch

# ---- the same bits


def test_replicas_stay_the_same_bits(pools):
    def train(trainer, batch):
        for _ in range(3):
            trainer.step(batch)
        parallel = trainer.parallel  # `weights` sends one part to all: of stage 3 it compares the two groups
        own = {n: p.detach().clone() for n, p in parallel.model.named_parameters()}
        return parallel.weights() if parallel.plan.zero == 3 else own

    for plan in spelled_out("dp={3,data=bucket|3,data=servers|3,zero=1|3,zero=2|4,zero=3,shard=2}"):
        first, *others = run(pools, train, plan)
        assert all(torch.equal(first[n], other[n]) for other in others for n in first), plan


# ---- bytes and messages


def traffic(trainer, batch):
    trainer.step(batch)
    return {op: numbers for (op, axis), numbers in comm.traffic().items() if axis == "dp+cp"}


@pytest.mark.parametrize(
    ("buckets", "overlap", "seconds"),
    [
        (1, True, 8 + 3),  # nothing to overlap with
        (4, True, 2 + 4 * 3),  # the link is busy from the first bucket on
        (4, False, 8 + 4 * 3),
        (8, True, 1 + 8 * 3),
    ],
)
def test_a_bucket_leaves_when_it_is_full_and_the_link_is_free(buckets, overlap, seconds):
    assert backward_and_sums(buckets, backward=8, message=3, overlap=overlap) == seconds
    assert backward_and_sums(buckets, backward=80, message=3) == 80 + 3  # messages fit in between


def test_one_server_is_the_bottleneck_and_shared_keys_are_not(pools):
    whole = 8 * sum(p.numel() for p in GPT2(TINY).parameters())
    one = [sent["send"][1] for sent in run(pools, traffic, "dp=4,data=server")]
    assert one == [3 * whole, whole, whole, whole]  # weights to three workers; gradients from each
    shared = [sent["send"][1] for sent in run(pools, traffic, "dp=4,data=servers")]
    assert sum(shared) == sum(one) and max(shared) < 1.2 * 2 * 3 / 4 * whole


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_update_gives_the_serial_weights_and_sends_its_formula(pools, world, way):
    size = 37  # divides by no number of ranks

    def gradient(rank):
        return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def live(rank, world_size):
        trace.clear()
        updated = []

        def descend(weights, grad):
            updated.append(len(weights))
            weights -= 0.1 * grad

        weights = WAYS[way](gradient(rank), torch.arange(size).double(), Mesh(dp=world_size)["dp"], descend)
        spans = [s.name for s in trace.spans(with_comm=False)]
        return weights, bytes_sent(), spans, sum(updated)

    expected = torch.arange(size).double() - 0.1 * sum(gradient(rank) for rank in range(world))
    shares = [len(part) for part in expected.tensor_split(world)]
    for rank, (weights, sent, spans, updated) in enumerate(pools[world].run(live)):
        assert (weights - expected).abs().max() < 1e-14
        alone = 8 * size * (1 if rank in (0, world - 1) else 2)  # a chain to rank 0, and one from it
        assert sent == (alone if way == "one server" else all_reduce_bytes(size, world, rank, 8))
        busy = {"one server": size * (rank == 0), "all-reduce": size}
        assert updated == busy.get(way, shares[rank])
        assert spans == ["reduce", "update"] + ["broadcast"] * (way != "all-reduce")


# ---- buckets


def test_buckets_run_backwards_and_hold_every_parameter_once():
    model = GPT2(TINY).double()
    buckets = into_buckets(list(model.parameters()), 3000)
    flat = [p for b in buckets for p in b]
    assert len(flat) == len(set(flat)) == len(list(model.parameters()))
    assert all(len(b) == 1 or sum(p.numel() * 8 for p in b) <= 3000 for b in buckets)
    small = [p for b in buckets if len(b) > 1 for p in b]
    order = {p: i for i, p in enumerate(model.parameters())}
    assert [order[p] for p in small] == sorted((order[p] for p in small), reverse=True)


def test_a_gradient_that_comes_too_late_is_refused(pools):
    def late(trainer, batch):
        parallel = trainer.parallel
        parallel.sync.last_micro()
        with pytest.raises(RuntimeError, match=r"shape \(8,\) changed after its bucket was full"):
            for micro in parallel.mine(batch):
                parallel.model.loss(parallel.model(micro.tokens), micro.targets).backward()
        parallel.sync.finish()

    run(pools, late, "dp=2,micro=2,bucket=1")


def test_a_parameter_without_gradient_counts_as_zero(pools):
    """A rank whose rows do not reach a parameter still takes part in its bucket."""

    def partly(trainer, batch):
        sync, rank = trainer.parallel.sync, trainer.parallel.mesh.rank
        sync.last_micro()
        if rank == 0:
            trainer.parallel.model.ln_f.weight.sum().backward()
        sync.finish()
        return trainer.parallel.model.ln_f.weight.grad.sum().item()

    assert run(pools, partly, "dp=2") == [8.0, 8.0]


def test_a_norm_in_32_bits_keeps_six_digits():
    """Squares of ten million equal numbers, added up one by one in 32 bits, would stop to grow."""
    grad = torch.full((10_000_000,), 1.1)
    tensor = torch.zeros_like(grad)
    tensor.grad = grad
    norm = gradient_norm([Piece("w", tensor, Spec(), True)], Mesh(alone=True))
    assert norm == pytest.approx(1.1 * 10_000_000**0.5, rel=1e-6)


# ---- PyTorch's own as a second oracle


def parameters_left(rank, world, plan):
    """How many parameters outlive the trainer of a plan."""

    def alive():
        gc.collect()
        return sum(isinstance(thing, torch.nn.Parameter) for thing in gc.get_objects())

    before, trainer = alive(), trainer_by(plan, TINY)
    trainer.step(example_batch(TINY, 7, 8))
    trainer = None
    return alive() - before


@pytest.mark.parametrize(
    "plan", ["dp=2,data=naive", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,refill=on"]
)
def test_a_trainer_that_is_let_go_leaves_nothing_behind(pools, plan):
    pools[2].run(parameters_left, plan)  # frees what the run before it has left
    assert pools[2].run(parameters_left, plan) == [0, 0]


def replicated(model, world):
    """PyTorch's data parallelism."""
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)


def sharded(model, world):
    """PyTorch's ZeRO-3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for part in (*model.h.values(), model):
        fully_shard(part, mesh=mesh)
    return model


PYTORCHS = dict.fromkeys(spelled_out("dp={2|3|4},bucket=1"), replicated)
PYTORCHS |= dict.fromkeys(spelled_out("dp={2|3},zero=3"), sharded)


@pytest.mark.parametrize("plan, make", PYTORCHS.items(), ids=PYTORCHS)
def test_same_weights_as_pytorchs_own(pools, plan, make):
    def both(trainer, batch):
        axis, model = trainer.parallel.mesh["dp"], GPT2(TINY).double()
        theirs, mine = make(model, axis.size), batch.rows(axis.rank, axis.size)
        groups = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
        options = [{"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True)]
        optimizer = torch.optim.AdamW(options, lr=1e-2, betas=trainer.recipe.betas, eps=1e-6)
        for _ in range(5):
            trainer.step(batch)
            optimizer.zero_grad()
            loss = token_loss(theirs(mine.tokens), mine.targets)
            (loss * axis.size / batch.total).backward()  # it divides by the number of ranks: undo that
            optimizer.step()
        ours = trainer.parallel.weights()
        whole = {n: getattr(p, "full_tensor", p.detach)() for n, p in model.named_parameters()}
        return all((w - whole[n]).abs().max() < 1e-10 for n, w in ours.items())

    assert all(run(pools, both, plan, lr=1e-2, eps=1e-6, clip=None))


# ---- the benchmark


def test_the_benchmark_times_both_of_a_pair_and_says_where_the_time_goes(pools):
    for pair, loss in zip(benchmark.PAIRS.items(), ("whole", "chunked"), strict=True):
        given = Namespace(config="nano", pairs=pair[0], rows=1, length=8, bucket=256, loss=loss, over="gloo")
        found = race.Outcome.of(pools[2].run(race.on_rank, benchmark.contest, given, 2))
        assert set(found.times) == set(pair) and found.ratio(*pair).median > 0
        for of_rank in found.facts:
            assert set(of_rank) == set(pair)
            for name, ms in of_rank.items():
                worked = ms["forward"], ms["backward"], ms["update"]
                assert min(*worked, ms["messages under way"]) > 0
                assert sum(worked) > 20 * found.times[name].low  # 1000 in calm: milliseconds of one step
        assert all("messages under way" in found.told(name) for name in pair)


# ---- who reads the text


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [Batches, InOrder])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_both_loaders_give_the_same_batch(pools, world, make, shape):
    """What the rank reads itself and what rank 0 deals out are the same bits, and make up the whole."""

    def load(rank, world_size):
        axis = Mesh(dp=world_size)["dp"]
        text = torch.arange(500).numpy() if rank == 0 else NotRead(500)
        own = each_reads(make(torch.arange(500).numpy(), rows=4, length=7), 3, axis, shape)
        comm.clear_log()
        dealt = one_reads(make(text, rows=4, length=7), 3, axis, shape)
        sent = bytes_sent()
        fields = ("tokens", "targets", "samples", "positions")
        same = all(torch.equal(getattr(own, f), getattr(dealt, f)) for f in fields)
        return same and own.total == dealt.total == 28, own, sent

    same, parts, sent = zip(*pools[world].run(load), strict=True)
    assert all(same)
    found, owners = joined(parts)
    whole = make(torch.arange(500).numpy(), rows=4, length=7).at(3)
    for name in ("tokens", "targets", "samples", "positions"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name
    assert torch.equal(found.targets[:, :-1], found.tokens[:, 1:])  # also from one share to the next
    assert owners.tolist() == OWNERS[shape](world)
    assert sent[0] == 16 * (28 - parts[0].tokens.numel()) and not any(sent[1:])


def dealt(count, world):
    """The owners of `count` things in a row, as even as can be."""
    return [place for place in range(world) for _ in range(count // world + (place < count % world))]


OWNERS = {
    "rows": lambda world: [[owner] * 7 for owner in dealt(4, world)],
    "contiguous": lambda world: [dealt(7, world)] * 4,
    "interleaved": lambda world: [[t % world for t in range(7)]] * 4,
}


class NotRead:
    """A text that has a length but must not be read."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, _):
        raise AssertionError("it was read")


def test_a_batch_with_holes_or_copies_is_not_joined():
    batch = Batches(range(99), 3, 4).at(0)
    first, second = batch.rows(0, 2), batch.rows(1, 2)
    assert torch.equal(joined([second, first])[0].tokens, batch.tokens)
    with pytest.raises(ValueError, match="batch's 12 tokens, 0 are in no share and 8 are in more"):
        joined([batch, first])
    with pytest.raises(ValueError, match="4 are in no share"):
        joined([first, second.columns(torch.tensor([], dtype=torch.int64))])


def test_in_order_a_rank_reads_at_its_offset_and_an_epoch_begins_anew():
    """Row i of a step begins i T tokens after the first, as rank i of llm.c with one row each; 41 tokens: 3 steps."""
    text = InOrder(range(100, 141), rows=3, length=4)
    assert text.steps == 3
    assert text.at(1, range(2, 3)).tokens.tolist() == [[120, 121, 122, 123]]
    assert text.at(2).targets[-1].tolist() == [133, 134, 135, 136]
    wrapped = text.at(3)
    assert torch.equal(wrapped.tokens, text.at(0).tokens) and wrapped.samples.tolist() == [9, 10, 11]


def test_the_smallest_text_holds_a_batch_and_one_token_more():
    assert InOrder(range(13), rows=3, length=4).at(0).targets[-1, -1] == 12
    with pytest.raises(ValueError, match="3 rows of 4 tokens needs 13 tokens, .* has 12. .* at most 2 rows"):
        InOrder(range(12), rows=3, length=4)
    assert [InOrder(range(n), 3, 4).steps for n in (13, 24, 25)] == [1, 1, 2]


# ---- lesson 04: what it runs, and its figures


def test_the_lectures_network_has_four_equal_layers_and_its_record_follows_the_forgotten_zero_grad():
    model, batch = replicas.Toy(), replicas.toy_data().at(0)
    assert len(model.layers) == 4 and all(torch.equal(model.layers[0], w) for w in model.layers)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(5):
        loss = model.loss(model(batch.tokens), batch.targets) / batch.total
        loss.backward()  # and no gradient is cleared
        optimizer.step()
        seen.append(loss.item())
    assert seen == pytest.approx([0.0130, 0.0032, 0.0021, 0.0023, 0.0024], abs=4e-4) and seen[4] > seen[2]


def test_each_row_lost_by_integer_division_is_red():
    batch = Batches(range(99), 10, 4).at(0)
    shares = [replicas.cut_off(batch, rank, 4).samples.tolist() for rank in range(4)]
    assert shares == [[0, 1], [2, 3], [4, 5], [6, 7]]
    even = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    ax = plots.rows_by_rank({"rows // ranks": shares, "even": even}, 10).axes[0]
    red = [i for i, bar in enumerate(ax.patches) if to_hex(bar.get_facecolor()) == plots.WRONG.lower()]
    assert red == [8, 9] == [i for i, text in enumerate(ax.texts) if text.get_text() == "lost"]


def test_adamw_in_blocks_gives_the_same_bits_for_any_block():
    whole, _ = lab.adamw_in_blocks(1000, 1000)
    assert all(torch.equal(lab.adamw_in_blocks(1000, block)[0], whole) for block in (7, 334, 999))
    before, _ = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    assert 3e-3 < (whole - before).abs().max() < 5e-3  # four steps of the learning rate, and some decay


def test_bars_and_lines_show_the_numbers_they_are_given():
    server = {"reduce": 5.0, "update": 4.0, "broadcast": 3.0}
    ways = {"one server": server, "all": {"reduce": 8.0, "update": 4.0}}
    left, right = plots.phases(ways, {"reduce": 500.0, "rest": 5.0}, ("a", "b")).axes
    assert [(p.get_x(), p.get_width()) for p in left.patches] == [(0, 5), (5, 4), (9, 3), (0, 8), (8, 4)]
    assert [text.get_text() for text in right.texts] == ["500"]
    ax = plots.loss_lines({"rank 0": [3.0, 2.0]}, {"mean": [2.5, 2.0]}, [2.5, 2.0]).axes[0]
    assert [line.get_label() for line in ax.lines] == ["serial", "rank 0", "mean"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[2.5, 2], [3, 2], [2.5, 2]]
