"""Labs on sums of gradients: in fewer bytes, in an order of their own, with a bit flipped."""

from functools import partial

import pytest
import torch
from lesson_cells import definitions
from planting import is_killed, under

from gpt2lab.lessons.exercises.replicas import odd_ones
from gpt2lab.lessons.labs import compressed, order, replicas
from gpt2lab.lessons.labs.compressed import CODES, CodedSum, PowerSum, Scaled, sent_and_kept
from gpt2lab.lessons.labs.instruments import bytes_sent
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.plots import data as plots
from gpt2lab.processes.launch import RankFailed
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, EXPERTS, example_batch
from gpt2lab.train import Recipe, Trainer

DTYPES = torch.float32, torch.float64


def numbers(dtype, count=1000):
    """Of very different sizes, zeros and a whole block of zeros among them."""
    generator = torch.Generator().manual_seed(0)
    x, spread = (torch.randn(count, generator=generator, dtype=dtype) for _ in range(2))
    x = x * torch.exp(4 * spread)
    x[:50] = 0
    return x


def sent_and_kept_are_all(code):
    for dtype in DTYPES:
        for scale in (1.0, 1e-30, 1e25):
            x = scale * numbers(dtype)
            message, sent, kept = sent_and_kept(code, x)
            assert message.dtype == torch.uint8 and torch.equal(sent + kept, x) and kept.isfinite().all()
            assert (kept.abs() <= x.abs()).all() or code.most == 1


@pytest.mark.parametrize("name", CODES)
def test_sent_and_kept_are_what_there_was_bit_for_bit(name):
    code = CODES[name]
    if name == "bfloat16":
        code = type("Code", (type(code),), {"most": 0})()
    sent_and_kept_are_all(code)


def test_messages_are_as_short_as_they_should_be():
    lengths = {name: len(code.encode(torch.ones(1000))) for name, code in CODES.items()}
    assert lengths == {"bfloat16": 2000, "float8": 1024 + 32, "int8": 1024 + 32, "2 bits": 256 + 32}


def whole_numbers(rank, step):
    """Gradients whose sums are exact in 64 bits."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-(10**6), 10**6, (5, 41), generator=generator).double()


def in_steps(rank, world_size, summed, steps):
    axis, results = Mesh(dp=world_size)["dp"], []
    for step in range(steps):
        comm.clear_log()
        results.append(summed("w", whole_numbers(rank, step), axis))
    kept = {n: t for n, t in summed.kept.items() if torch.is_tensor(t)}
    return results, kept, bytes_sent()


def nothing_is_lost(pools, name, job=in_steps):
    found = pools[3].run(job, CodedSum(CODES[name], True), 3)
    results = found[0][0]
    assert all(torch.equal(a, b) for other, *_ in found for a, b in zip(other, results, strict=True))
    given = sum(whole_numbers(rank, step) for rank in range(3) for step in range(3)).flatten()
    first = sum(kept["w", "first"] for _, kept, _ in found)
    second = torch.cat([kept["w", "second"] for _, kept, _ in found])
    assert torch.equal(sum(results).flatten() + first + second, given)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**126])
def test_what_a_code_cannot_say_ends_a_run(name, bad):
    x = torch.cat([numbers(torch.float32), torch.tensor([bad])])
    with pytest.raises(FloatingPointError, match=r"A number to send is .*lower learning rate"):
        sent_and_kept(CODES[name], x)
    message, sent, kept = sent_and_kept(CODES[name], torch.tensor([2.0**126 * (1 - 2**-24), -1.0]))
    assert sent.isfinite().all() and (sent + kept).tolist() == [2.0**126 * (1 - 2**-24), -1.0]


@pytest.mark.parametrize("name", CODES)
def test_float16_has_room_for_less(name):
    most = torch.tensor([2.0**15 - 16, -1.0], dtype=torch.float16)
    _, sent, kept = sent_and_kept(CODES[name], most)
    assert sent.isfinite().all() and torch.equal(sent + kept, most)
    with pytest.raises(FloatingPointError, match=r"not finite, or 2\^15 and more. Use a lower"):
        sent_and_kept(CODES[name], -2 * most)


def test_of_products_only_matrices_have_two(pools):
    """A stack of matrices is summed as it is."""
    job = lambda rank, n: PowerSum(1, True)("w", torch.full((3, 4, 5), rank + 1.0), Mesh(dp=n)["dp"])
    assert all(torch.equal(total, torch.full((3, 4, 5), 3.0)) for total in pools[2].run(job))


@pytest.mark.parametrize("name", CODES)
def test_over_steps_nothing_is_lost_and_all_ranks_get_the_same_bits(pools, name):
    nothing_is_lost(pools, name)


def test_coded_sums_send_two_coded_gradients_less_the_own_part(pools):
    found = pools[3].run(in_steps, CodedSum(CODES["bfloat16"], False), 1)
    # 2 (n-1) of 2 bytes a number, all ranks together
    assert sum(size for *_, size in found) == 2 * 2 * 2 * 5 * 41


def test_without_feedback_something_is_lost(pools):
    found = pools[3].run(in_steps, CodedSum(CODES["2 bits"], False), 3)
    assert not any(kept for _, kept, _ in found)


def of_low_rank(rank, world_size, ours, theirs, zeros):
    """The sum of matrices (12, 30) of rank `theirs`, after so many of zeros, by products of rank `ours`."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(world_size, 12, theirs, generator=generator, dtype=torch.float64)
    right = torch.randn(theirs, 30, generator=generator, dtype=torch.float64)
    summed, axis = PowerSum(ours, True), Mesh(dp=world_size)["dp"]
    for _ in range(zeros):
        summed("w", torch.zeros(12, 30, dtype=torch.float64), axis)
    comm.clear_log()
    total = summed("w", left[rank] @ right, axis)
    sent = bytes_sent()
    return total, (left @ right).sum(0), summed.kept["w"], sent


@pytest.mark.parametrize("ours, theirs, zeros", [(2, 2, 0), (3, 2, 0), (1, 2, 0), (2, 2, 1)])
def test_low_rank_is_exact_up_to_its_rank_and_keeps_the_rest(pools, ours, theirs, zeros):
    found = pools[2].run(of_low_rank, ours, theirs, zeros)
    total, right, _, sent = found[0]
    off = ((total - right).norm() / right.norm()).item()
    assert off < 1e-13 if ours >= theirs else off > 0.1
    kept = sum(one[2] for one in found)
    assert (total + kept - right).abs().max() < 1e-12 * right.abs().max()
    assert sent == (12 + 30) * ours * 8


def both_gathers(rank, world_size, length):
    axis, code = Mesh(dp=world_size)["dp"], Scaled(block=32)
    shard = numbers(torch.float32, world_size * length)[rank * length :][:length]
    whole, message = comm.all_gather(shard, axis), code.encode(shard)
    messages = comm.all_gather(message, axis).split(len(message))  # ZeRO++'s gather of weights
    return torch.equal(torch.cat([code.decode(m, shard) for m in messages]), sent_and_kept(code, whole)[1])


@pytest.mark.parametrize("length, same", [(64, True), (50, False)])
def test_a_coded_gather_is_the_gathered_coded_where_shards_end_with_blocks(pools, length, same):
    assert pools[2].run(both_gathers, length) == [same, same]


def test_with_feedback_weights_end_nearer_to_the_exact_ones(pools):
    make = partial(GPT2, GPT2Config(vocab_size=256, n_positions=16, n_layer=1, n_head=2, n_embd=16))
    ways = "all", *CODES, "rank 1"
    found = compressed.compared(pools[2], ways, replicas.shakespeare_rows(4), make, 8, 0.1)
    off = {key: distance for key, (_, _, distance) in found.items()}
    assert off.pop(("all", True)) == off.pop(("all", False)) == 0
    assert all(2 * off[way, True] < off[way, False] for way in ("bfloat16", "float8", "int8")), off
    assert off["2 bits", True] < off["2 bits", False], off
    sent = {way: found[way, True][0] for way in ways}
    assert sent["bfloat16"] * 4 == sent["all"]
    assert max(7 * sent["int8"], 24 * sent["2 bits"]) < sent["all"]


WRONG = {
    "the second error is dropped": (CodedSum.__call__, "kept), kept_of_total", "kept), 0 * kept_of_total"),
    "the kept is added once more": (CodedSum.__call__, '+ self.kept[name, "first"]', '+ 2 * self.kept[name, "first"]'),
    "own numbers are not coded":
        (CodedSum.__call__, "sum(self.code.decode(message, mine) for message in came)",
         "sum(self.code.decode(message, mine) for message in came[1:]) + mine"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG)
def test_a_mutant_that_loses_numbers_is_noticed(pools, mutant):
    with pytest.raises(AssertionError):
        nothing_is_lost(pools, "int8", under(WRONG[mutant], in_steps))


def test_a_mutant_whose_scale_is_no_power_of_two_is_noticed():
    wrong = (Scaled.encode, "torch.exp2(exponents.to(x.dtype))", "(torch.exp2(exponents.to(x.dtype)) * 1.1)")
    assert is_killed(wrong, lambda: the_largest_numbers_are_close(CODES["int8"]))
    lossy = (sent_and_kept, "x - sent", "(x - sent).bfloat16().to(x.dtype)")
    assert is_killed(lossy, lambda: sent_and_kept_are_all(CODES["int8"]))


def the_largest_numbers_are_close(code):
    x = numbers(torch.float32)
    _, sent, _ = sent_and_kept(code, x)
    assert (sent - x).abs().max() <= x.abs().max() / 127


def test_bands_reach_from_the_least_to_the_most_around_the_mean():
    ax = plots.bands({"all": [[3.0, 1.0], [5.0, 2.0]], "rank 1": [[4.0, 3.0]]}).axes[0]
    assert [line.get_ydata().tolist() for line in ax.lines] == [[4, 1.5], [4, 3]]
    corners = ax.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == 1 and corners[:, 1].max() == 5


# --- the order of a sum


BLOCKS = 8


def factors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 64, generator=generator), torch.randn(64, 24, generator=generator)


def by_tree(pools, job) -> dict[int, torch.Tensor]:
    found = {}
    for n in (1, 2, 4):
        every = pools[n].run(job, *factors(), BLOCKS)
        assert all(torch.equal(one[2], every[0][2]) for one in every)
        found[n] = every[0][2]
    return found


def the_bits_are_the_same(pools, job=order.row_parallel):
    found = by_tree(pools, job)
    assert torch.equal(found[1], found[2]) and torch.equal(found[1], found[4])


def test_a_tree_over_fixed_blocks_gives_the_same_bits_on_1_2_and_4_ranks(pools):
    the_bits_are_the_same(pools)
    x, w = factors()
    right = x.double() @ w.double()
    assert (by_tree(pools, order.row_parallel)[4] - right).abs().max() < 1e-4


@pytest.mark.parametrize(
    "ranks, features, blocks", [(3, 12, 12), (3, 24, 8), (1, 12, 8), (2, 38, 4), (1, 24, 12)]
)
def test_blocks_that_would_have_another_order_are_refused(pools, ranks, features, blocks):
    x, w = torch.ones(2, features), torch.ones(features, 3)
    with pytest.raises(RankFailed, match=rf"{features // ranks} of .*{blocks} blocks.*Use"):
        pools[ranks].run(order.row_parallel, x, w, blocks)


def test_a_plain_sum_does_not_and_the_bytes_are_counted(pools):
    plain, sent, _, by_tree_sent = pools[4].run(order.row_parallel, *factors(), BLOCKS)[0]
    assert not torch.equal(plain, pools[1].run(order.row_parallel, *factors(), BLOCKS)[0][0])
    assert sent == 2 * 3 * 5 * 24 * 4 // 4 and by_tree_sent == 2 * 5 * 24 * 4


def test_algorithms_differ_in_bits_and_their_ranks_agree(pools):
    rows = order.differing(pools[4].run(order.sums, 1000))
    shares = {name: share for name, share, _ in rows}
    assert shares["in the order of the ranks"] == 0
    assert min(shares["ring"], shares["recursive doubling"]) > 0.05
    assert all(agree for *_, agree in rows)
    assert all(share == 0 for _, share, _ in order.differing(pools[2].run(order.sums, 1000)))  # a + b = b + a


OTHER_ORDERS = {
    "blocks of another size on each number of ranks": (order.product_by_tree, "blocks // axis.size", "2"),
    "one after the other and not as a tree": (order.product_by_tree, "tree(parts)", "sum(parts)"),
    "the first with the last": (order.tree, "parts[::2], parts[1::2]", "parts[::2], parts[::-2]"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", OTHER_ORDERS)
def test_a_mutant_in_another_order_is_noticed(pools, mutant):
    with pytest.raises(AssertionError):
        the_bits_are_the_same(pools, under(OTHER_ORDERS[mutant], order.row_parallel))


AGAIN = [
    *("dp=4", "dp=2,data=servers", "dp=2,zero=3", "dp=2,tp=2,zero=1", "tp=2,sp=on", "cp=2,exchange=ring"),
    *("pp=2,micro=3,schedule=zb_h1", "pp=2,schedule=ampnet", "pp=2,cp=2,micro=2", "dp=2,ep=2"),
]


def trained(rank, world_size, text):
    """This rank's weights after three steps in 32 bits."""
    plan, config = Plan.parse(text), EXPERTS if "ep" in text else CONFIG
    one = Trainer(build(plan, config, Mesh(**plan.axes), torch.float32), Recipe(lr=1e-2))
    batches = [example_batch(config, 8, 11, step) for step in range(3)]
    if plan.asynchronous:
        one.stream(batches)
    else:
        [one.step(batch) for batch in batches]
    return one.parallel.weights()


@pytest.mark.parametrize("plan", AGAIN)
def test_a_plan_gives_the_same_bits_when_run_again(pools, plan):
    first, again = (pools[Plan.parse(plan).world].run(trained, plan) for _ in range(2))
    for of_rank, other in zip(first, again, strict=True):
        assert all(torch.equal(weight, other[name]) for name, weight in of_rank.items())


def test_another_number_of_ranks_gives_other_bits(pools):
    two, four = (pools[n].run(trained, f"dp={n}")[0] for n in (2, 4))
    assert not all(torch.equal(weight, four[name]) for name, weight in two.items())


# --- a flipped bit


NAME = "h.2.mlp.c_fc.weight"
SEEN = ["0", "1", "1"]  # where each rank repeats the one before it, and rank 1 is broken


def three(pools, *bugs):
    """Per place of the bit: what the replicas hold, as digests, and the bytes sent by each."""
    run = definitions("18", "def steps(", "def three_replicas(", bugs=bugs)["three_replicas"]
    found = {where: pools[3].run(run, where) for where in ("nothing", "a weight", "a local gradient")}
    for of_ranks in found.values():
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    return {where: of_ranks[0] for where, of_ranks in found.items()}


def test_digests_find_a_weight_and_no_gradient(pools):
    found = three(pools)
    held = {where: digests for where, (digests, _) in found.items()}
    said = {where: odd_ones.right(digests) for where, digests in held.items()}
    assert said == {"nothing": [], "a weight": [(1, NAME)], "a local gradient": []}
    assert held["a local gradient"][0][NAME] != held["nothing"][0][NAME]
    assert {size for _, size in found.values()} == {2 * 8 * len(held["nothing"][0])}


def differing(pools, micro, *bugs):
    """How many gradients differ where each rank repeats the one before it, with rank 1 broken."""
    run = definitions("18", "def three_replicas(", "def again(", bugs=bugs)["again"]
    return [said.split(": ")[1].split()[0] for said in pools[3].run(run, micro)]


def test_computing_again_finds_the_gradient_and_the_rank_and_needs_equal_bits(pools):
    assert differing(pools, 1) == SEEN
    assert differing(pools, 2) == ["most"] * 3


def test_mutant_digests_that_do_not_read_the_first_number_see_no_weight(pools):
    digests, _ = three(pools, (".tobytes()", ".tobytes()[8:]"))["a weight"]
    assert odd_ones.right(digests) == []


BROKEN = {
    "the rows of another rank": ("(rank - 1) % world_size", "(rank + 1) % world_size"),
    "a sound chip": ("(NAME).register_hook(lab.flipped)", "(NAME).register_hook(torch.clone)"),
    "digests of the sum":
        ("return digests(p.tensor.grad for",
         "one.parallel.sync.finish()\n        return digests(p.tensor.grad for"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BROKEN.values(), ids=BROKEN)
def test_mutant_of_computing_again_says_something_else(pools, bug):
    assert differing(pools, 1, bug) != SEEN
