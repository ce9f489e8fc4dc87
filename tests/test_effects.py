"""References of their own for dropout and sampling; how strict verification is; options by their effect on a run."""

import hashlib
import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from planting import planted

from gpt2lab import verify
from gpt2lab.cli import main
from gpt2lab.corpus.batches import Batches
from gpt2lab.generate import Sampling
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.model import GPT2, PRESETS, Dropout, GPT2Config, Noise
from gpt2lab.parallel import finish, tensor
from gpt2lab.parallel.accumulate import Accumulate, Alone
from gpt2lab.parallel.finish import CHUNK, Piece
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.parallel.spec import Spec
from gpt2lab.parallel.zero.flat import Flat, into_groups
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Axis, Mesh
from gpt2lab.run import Options, read_log, start
from gpt2lab.schedules import make
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.train import Recipe, Trainer
from gpt2lab.verify import CONFIG, Claim, Report, example_batch

# ---- dropout, by integers of Python's own


def mixed(h: int) -> int:
    """MurmurHash3's finaliser on 31 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & 0x7FFFFFFF
    return h ^ (h >> 16)


def drawn(seed, step, site, sample, position, channel) -> float:
    """The number in [0, 1) that decides about one element."""
    start = int.from_bytes(hashlib.blake2b(repr((seed, step, site)).encode(), digest_size=3).digest(), "big")
    h = mixed(mixed(mixed(sample + start) + position * 0x9E3779B1) + channel * 0x85EBCA6B)
    return (h & 0xFFFFFF) / 2**24


def test_dropout_is_the_reference_element_by_element():
    """Also where the number is exactly p: that element stays."""
    samples, positions, channels = torch.tensor([9, 5]), torch.arange(3, 6), torch.arange(7)
    noise = Noise(2, 7, samples)
    for site in (0, 3):
        numbers = [[[drawn(2, 7, site, s, t, c) for c in range(7)] for t in (3, 4, 5)] for s in (9, 5)]
        for p in (0.1, 0.5, numbers[1][2][3], numbers[0][0][0]):
            keep = noise.keep(p, site, positions, channels)
            assert keep.tolist() == [[[n >= p for n in row] for row in rows] for rows in numbers]
            assert torch.equal(noise.keep(p, site, positions, channels[4:]), keep[..., 4:])
            x = torch.randn(2, 3, 7, dtype=torch.float64)
            right = torch.where(keep, x / (1 - p), 0.0) if p < 1 else x
            torch.testing.assert_close(Dropout(p, site)(x, positions, noise), right)


def test_every_dropout_of_the_model_has_a_site_of_its_own():
    sites = [module.site for module in GPT2(CONFIG).modules() if isinstance(module, Dropout)]
    assert sorted(sites) == [*range(1 + 2 * CONFIG.n_layer)]


def test_the_dropout_of_a_step_depends_on_seed_and_step():
    config, losses = replace(CONFIG, dropout=0.3), set()
    for seed, steps in ((0, 0), (1, 0), (0, 1)):
        one = trainer_by("serial", config, Recipe(seed=seed))
        one.steps = steps
        losses.add(one.gradients(example_batch(config, 7, 11))[0])
    assert len(losses) == 3


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("engine", ["accumulate", "pipeline"])
def test_an_evaluation_draws_no_dropout(engine, micro):
    config, batch = replace(CONFIG, dropout=0.3), example_batch(CONFIG, 7, 11)
    model = GPT2(config).double()
    right = model.loss(model(batch.tokens, batch.positions), batch.targets) / batch.total
    if engine == "pipeline":  # of one stage, on one rank
        found = Pipeline(model, Mesh(), make("1f1b", 1, micro)).evaluate(batch.micro(micro))
    else:
        found = Accumulate(model).evaluate(batch.micro(micro))
    assert found.item() == pytest.approx(right.item(), rel=1e-12)


# ---- sampling, by sorting lists


def probabilities(logits: list[float], temperature, top_k, top_p) -> list[float]:
    """Temperature, then the k likeliest, then the smallest set that reaches top_p."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: top_k or len(scaled)]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total, kept, reached = sum(weights.values()), {}, 0.0
    for i in order:
        if top_p is None or reached < top_p:
            kept[i] = weights[i] / total
        reached += weights[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(scaled))]


def test_probabilities_are_those_of_an_independent_sampler():
    chance = Random(0)
    for _ in range(300):
        logits = [chance.gauss(0, 2) for _ in range(chance.randint(1, 12))]
        how = {
            "temperature": chance.choice([0.3, 1.0, 2.5]),
            "top_k": chance.choice([None, 1, 3, 20]),
            "top_p": chance.choice([None, 0.2, 0.6, 0.95, 1.0]),
        }
        found = Sampling(**how).probabilities(torch.tensor([logits], dtype=torch.float64))[0].tolist()
        assert found == pytest.approx(probabilities(logits, **how), abs=1e-12), how


def test_every_row_position_and_seed_draws_a_number_of_its_own():
    flat = torch.zeros(1, 10**6, dtype=torch.float64)
    tokens = [Sampling(seed=s).draw(flat, [n])[0] for s in range(4) for n in range(6)]
    tokens += Sampling(seed=9).draw(flat.expand(4, -1), [3] * 4)
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize(
    "flag, value, name", [("--top-p", "0.5", "top_p"), ("--top-k", "3", "top_k"), ("--seed", "4", "seed")]
)
def test_what_the_generate_command_is_told_reaches_the_sampler(flag, value, name, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("gpt2lab.generate.generate", lambda *args, **how: seen.append(how) or args[1])
    huggingface.save(GPT2(TINY), tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a", flag, value]) == 0
    assert seen[0][name] == float(value)


# ---- verification itself


@pytest.mark.parametrize("error, holds", [(9e-11, True), (1.1e-10, False), (math.nan, False)])
def test_the_tolerance_is_what_is_promised(error, holds):
    assert verify.TOLERANCE == 1e-10
    assert Report(Plan(), [Claim("every gradient", error)]).ok is holds


@pytest.mark.parametrize("name", verify.EXACT)
def test_where_there_is_no_arithmetic_not_a_bit_may_differ(name):
    assert Report(Plan(), [Claim(name, 0.0)]).ok and not Report(Plan(), [Claim(name, 1e-17)]).ok


def test_the_worst_rank_and_the_worst_element_count():
    found = [[Claim("loss", 1e-16, rank=0)], [Claim("loss", 0.5, rank=1)], [Claim("loss", 0.1, rank=2)]]
    assert verify.worst(found)[0].rank == 1
    right = torch.ones(1000, dtype=torch.float64)
    wrong = right.clone()
    wrong[7] += 1e-9
    assert verify._claim("x", {"t": wrong}, {"t": right}, 0).error == pytest.approx(1e-9)
    wrong[7] = math.nan
    assert max(0.0, verify.relative_error(wrong, right), 0.1) == math.inf
    assert verify.relative_error(*torch.zeros(2, 3, dtype=torch.float32)) == 0


def test_the_command_fails_where_a_plan_differs():
    with planted(finish, "clip", lambda right: lambda pieces, norm, limit: None):
        assert main(["verify"]) == 1
    assert main(["verify"]) == 0


# ---- a step, by what is there after it


def test_the_norm_counts_every_element_of_a_large_tensor():
    for size in (1, CHUNK, 2 * CHUNK + 1):
        for last in (0, size - 1):
            p = torch.zeros(size, dtype=torch.float64)
            p.grad = torch.zeros_like(p)
            p.grad[last] = 3.0
            assert finish.gradient_norm([Piece("p", p, Spec(), True)], Mesh()) == 3.0


def test_each_step_takes_its_own_rate_and_gives_it_to_the_optimizer():
    recipe = Recipe(lr=1e-3, warmup=3, decay_steps=6)
    one = trainer_by("serial", recipe=recipe)
    for step in range(6):
        assert one.step(example_batch(CONFIG, 7, 11)).lr == recipe.rate(step)
        assert {group["lr"] for group in one.optimizer.param_groups} == {recipe.rate(step)}


def test_an_evaluation_is_the_mean_over_its_batches_under_autocast_too():
    one = trainer_by("serial", recipe=Recipe(autocast=True), dtype=torch.float32)
    batches, seen = [example_batch(CONFIG, rows, 11) for rows in (7, 3)], []
    one.parallel.model.h["0"].mlp.c_fc.register_forward_hook(lambda module, x, y: seen.append(y.dtype))
    alone = [one.evaluate([batch]) for batch in batches]
    assert one.evaluate(batches) == pytest.approx(sum(alone) / 2) and alone[0] != alone[1]
    assert set(seen) == {torch.bfloat16}


def test_losses_of_many_micro_batches_of_16_bits_add_up_in_64():
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    model = lambda *_: weight
    model.loss = lambda logits, _: logits * 1
    micros = [SimpleNamespace(tokens=None, positions=None, targets=None, total=1024)] * 1024
    assert Accumulate(model).run(micros, None, Alone()) == Accumulate(model).evaluate(micros) == 1


def test_gradients_of_16_bits_add_up_in_32_under_32_bit_masters():
    flat = Flat(into_groups(GPT2(CONFIG).to(torch.bfloat16))[0], Axis())
    flat.lay_out()
    for value in (1.0, 2.0**-10):
        flat.add(torch.full_like(flat.shard, value).to(torch.bfloat16))
    assert flat.grad.dtype == torch.float32 and flat.grad[0] == 1 + 2.0**-10


def test_the_loss_over_a_cut_vocabulary_sums_in_32_bits():
    loss = tensor.VocabLoss(Axis(), 0)(torch.randn(1, 3, 8, dtype=torch.bfloat16), torch.tensor([[1, 2, 3]]))
    assert loss.dtype == torch.float32


# ---- options, by their effect on a run

TINY = GPT2Config(vocab_size=50257, n_positions=16, n_layer=1, n_head=2, n_embd=8)
BASE = Options(
    steps=6, batch=4, sequence=8, evaluate=2, save=9, dtype="float64", warmup=2, lr=0.1, fast=False
)


@pytest.fixture
def nano(monkeypatch):
    monkeypatch.setitem(PRESETS, "nano", TINY)


def losses(**changes) -> list[float]:
    return [e["loss"] for e in start(0, 1, replace(BASE, bench=True, **changes), None, None)]


EFFECTS = {
    "seed": 1, "lr": 0.05, "warmup": 0, "cosine": False, "clip": 0.01, "weight_decay": 0.0, "recipe": "llmc",
    "batch": 3, "sequence": 7, "dtype": "float32", "autocast": True,
}  # fmt: skip


@pytest.mark.rotates
@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_changes_the_run(name, nano):
    assert losses(**{name: EFFECTS[name]}) != losses()


def test_the_seed_is_that_of_weights_and_of_batches(nano):
    """Each for itself: the first loss is that of the model of this seed on the batch of this seed."""
    for seed in (0, 3):
        batch = Batches(BASE.shard(), 4, 8, seed, "train").at(0)
        one = Trainer(build(Plan(), TINY, Mesh(), torch.float64, seed), Recipe())
        assert losses(seed=seed, steps=1)[0] == pytest.approx(one.gradients(batch)[0], rel=1e-12)


def test_validation_is_on_five_batches_of_the_other_split(nano, monkeypatch):
    seen = []
    right = Batches.at
    monkeypatch.setattr(Batches, "at", lambda self, n: seen.append((self.split, n)) or right(self, n))
    start(0, 1, replace(BASE, steps=2), None, None)
    assert [n for split, n in seen if split == "val"] == [0, 1, 2, 3, 4]
    assert [n for split, n in seen if split == "train"] == [0, 1]


@pytest.mark.rotates
def test_accumulate_makes_so_many_micro_batches(nano):
    assert replace(BASE, accumulate=2).the_plan().micro == 2
    assert losses(accumulate=2) == pytest.approx(losses(), rel=1e-9)


def test_the_later_entry_of_a_step_counts(tmp_path):
    """And none of a later step from before the resume."""
    logged = [(1, 5), (2, 4), (3, 9), (2, 3)]
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {n}, "loss": {x}}}\n' for n, x in logged))
    assert [(e["step"], e["loss"]) for e in read_log(tmp_path)] == [(1, 5), (2, 3)]


# ---- checkpoints


def test_a_resumed_sgd_goes_on_at_its_step_and_an_export_keeps_its_numbers(tmp_path):
    one, again = (trainer_by("serial", recipe=Recipe("sgd"), dtype=torch.float32) for _ in range(2))
    one.step(example_batch(CONFIG, 7, 11))
    folder = checkpoint.save(one, tmp_path)
    assert checkpoint.load(folder, again)["step"] == again.steps == 1
    checkpoint.export(folder, tmp_path / "out")
    assert huggingface.load(tmp_path / "out", dtype=None).wte.weight.dtype == torch.float32


def test_a_copy_for_the_background_has_memory_of_its_own():
    one = trainer_by("serial")
    one.step(example_batch(CONFIG, 7, 11))
    for entry in checkpoint.entries(one).values():
        for mine, copy in zip(entry.boxes, entry.copy().boxes, strict=True):
            assert mine.tensor.data_ptr() != copy.tensor.data_ptr() and torch.equal(mine.tensor, copy.tensor)
