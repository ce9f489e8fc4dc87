"""A mixture of experts on one rank: routers, room, losses, and equality with plain loops and with transformers."""

import math
import re
from dataclasses import replace

import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.experts.mixture import ROUTERS, Experts, Mixture, looped, mixtures, set_total
from gpt2lab.generate import generate
from gpt2lab.model import GPT2, GPT2Config, Noise
from gpt2lab.verify import relative_error as error

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)
KINDS = {
    "switch": Experts(5, 1, "switch", capacity=1.0),
    "gshard": Experts(6, 2, "gshard", capacity=0.7, shared=1, z=0.1),
    "mixtral": Experts(4, 3, gated=True, group="batch", capacity=1.0),
    "deepseek": Experts(8, 3, "deepseek", shared=2, hidden=17),
    "expert_choice": Experts(4, 2, "expert_choice", group="batch"),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)


def mixture(experts: Experts, seed: int = 0) -> Mixture:
    torch.manual_seed(seed)
    made = Mixture(replace(CONFIG, experts=experts), 1)
    for p in made.parameters():
        p.data = torch.randn_like(p) * 0.4
    return made


def rows(seed: int = 1, shape=(3, 11, 24)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("kind", ROUTERS)
def test_grouped_products_equal_the_plain_loop_forward_and_backward(kind):
    moe, x = mixture(replace(KINDS[kind], balance=0.0, z=0.0)), rows()
    weights = [p for n, p in moe.named_parameters() if n != "router.bias"]
    y, plain, seed = moe(x), looped(moe, x), torch.randn(3, 11, 24)
    assert error(y, plain) < 1e-12
    mine, right = (torch.autograd.grad(out, [x, *weights], seed) for out in (y, plain))
    assert max(error(a, b) for a, b in zip(mine, right, strict=True)) < 1e-12


def token_by_token(moe: Mixture, x):
    """The whole layer with its losses, in Python, one token after the other; routers with top-k only."""
    c = moe.config
    logits = x @ moe.router.weight.T
    scores = logits.sigmoid() if c.router == "deepseek" else logits.softmax(-1)
    groups = [range(b * 11, b * 11 + 11) for b in range(3)] if c.group == "row" else [range(33)]
    flat, p, y, loss = x.view(33, 24), scores.view(33, -1), [None] * 33, 0.0
    for group in groups:
        room = len(group) if c.capacity is None else math.ceil(c.top_k * len(group) / c.experts * c.capacity)
        order = p + moe.router.bias if c.router == "deepseek" else p
        asked = {t: order[t].sort(descending=True).indices[: c.top_k].tolist() for t in group}
        taken, served = [0] * c.experts, {t: [] for t in group}
        for choice in range(c.top_k):
            for t in group:
                e = asked[t][choice]
                served[t] += [e] * (taken[e] < room)
                taken[e] += 1
        for t in group:
            chosen = sum(p[t, e] for e in asked[t]) if c.router != "switch" else 1.0
            parts = [p[t, e] / chosen * moe.experts[str(e)](flat[t : t + 1])[0] for e in served[t]]
            y[t] = sum(parts, moe.shared(flat[t : t + 1])[0] if c.shared else torch.zeros(24))
        share = [sum(e in asked[t] for t in group) / len(group) / c.top_k for e in range(c.experts)]
        even = p[group[0] : group[-1] + 1]
        even = even / even.sum(-1, keepdim=True)
        loss = loss + c.balance * c.experts * sum(f * even[:, e].sum() for e, f in enumerate(share))
    return torch.stack(y).view_as(x), loss + c.z * logits.logsumexp(-1).square().sum()


@pytest.mark.parametrize("kind", ["switch", "gshard", "mixtral", "deepseek"])
def test_every_token_gets_its_experts_and_the_losses_enter_backward_once(kind):
    moe, x = mixture(replace(KINDS[kind], balance=0.3, z=0.2)), rows()
    moe.total = 29  # the target tokens of a batch, not all of its tokens
    seed, weights = torch.randn(3, 11, 24), [p for n, p in moe.named_parameters() if n != "router.bias"]
    y, (plain, loss) = moe(x), token_by_token(moe, x)
    assert error(y, plain) < 1e-12
    mine = torch.autograd.grad(y, [x, *weights], seed)
    right = torch.autograd.grad((plain * seed).sum() + loss / 29, [x, *weights])
    assert max(error(a, b) for a, b in zip(mine, right, strict=True)) < 1e-12


def test_every_expert_that_chooses_takes_an_even_share_and_the_best():
    moe, x = mixture(Experts(4, 2, "expert_choice")), rows()
    _, scores, experts, _ = moe.route(x)
    room = math.ceil(2 * 11 / 4)
    for b in range(3):
        for e in range(4):
            best = scores[b, :, e].topk(room).indices.sort().values
            assert torch.equal(best, (experts[b, :, e] == e).nonzero()[:, 0])


@pytest.mark.parametrize("percent", [70, 110, 120, 125, 140])
def test_an_experts_room_is_the_least_whole_number_that_holds_its_share(percent):
    for experts in (6, 8, 10):
        right = [min(n, -(-2 * n * percent // (100 * experts))) for n in range(1, 300)]
        assert [Experts(experts, 2, capacity=percent / 100).room(n) for n in range(1, 300)] == right


def test_the_load_bias_has_the_excess_load_as_its_gradient_and_leaves_the_weights_alone():
    moe, x = mixture(Experts(4, 2, "deepseek", balance=0.0)), rows()
    (moe(x) * 0).sum().backward()
    assert moe.router.bias.grad.tolist() == [4 * n - 2 * 33 for n in moe.chosen.tolist()]
    before = moe.route(x)
    moe.router.bias.data += 5.0  # the same for all: the choice cannot change
    assert all(torch.equal(a, b) for a, b in zip(before, moe.route(x), strict=True))


def test_the_second_expert_is_asked_as_often_as_its_weight_says_whatever_the_grouping():
    moe, x = mixture(Experts(4, 2, "gshard", random_second=True)), rows(shape=(64, 16, 24))
    samples, positions = torch.arange(64), torch.arange(16)
    experts, weights = moe.route(x, positions, Noise(0, 3, samples))[2:]
    expected = (2 * weights[..., 1]).clamp(max=1).mean().item()
    assert abs((experts[..., 1] >= 0).double().mean().item() - expected) < 0.03
    part = moe.route(x[40:, 5:9], positions[5:9], Noise(0, 3, samples[40:]))[2]
    assert torch.equal(part, experts[40:, 5:9])
    assert (moe.route(x)[2] >= 0).all()  # without noise, as in generation: always


def test_what_a_row_drops_depends_on_its_row_alone_and_not_so_in_other_groups():
    x = rows()
    for group, same in (("row", True), ("batch", False)):
        moe = mixture(Experts(4, 2, capacity=0.8, group=group))
        whole, alone = moe(x), torch.cat([moe(x[b : b + 1]) for b in range(3)])
        assert (error(alone, whole) < 1e-12) is same


def test_it_equals_the_mixtral_block_of_transformers():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 2}
    torch.set_default_dtype(torch.float32)  # their router computes in 32 bits
    theirs = MixtralSparseMoeBlock(MixtralConfig(**sizes))
    ours = mixture(Experts(8, 2, gated=True, hidden=40, balance=0.0))
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        for e, expert in enumerate(ours.experts.values()):
            theirs.experts.gate_up_proj[e] = torch.cat([expert.c_gate.weight, expert.c_fc.weight])
            theirs.experts.down_proj[e] = expert.c_proj.weight
    x = rows()
    y, z = ours(x), theirs(x)
    assert error(y, z) < 2e-6
    seed = torch.randn_like(y)
    mine = torch.autograd.grad(y, [x, ours.router.weight], seed)
    right = torch.autograd.grad(z, [x, theirs.gate.weight], seed)
    assert max(error(a, b) for a, b in zip(mine, right, strict=True)) < 2e-5


def test_the_benchmark_compares_with_both_of_their_ways_and_with_the_products_alone(capsys):
    torch.set_default_dtype(torch.float32)
    threads, sizes = torch.get_num_threads(), ["--tokens", "9", "--width", "16", "--steps", "1"]
    assert main(["bench", "experts", "--threads", str(threads), *sizes]) == 0
    said = capsys.readouterr().out
    assert "transformers, grouped_mm" in said and "the products alone" in said
    assert float(re.search(r"apart by (\S+)", said)[1]) < 1e-5
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


@pytest.mark.parametrize("kind", ROUTERS)
def test_parameters_are_counted_and_learned_and_stay_under_their_names(kind):
    config = replace(CONFIG, n_layer=3, experts=replace(KINDS[kind], every=2, balance=0.01))
    model = GPT2(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert [int(m.layer) for m in mixtures(model)] == [1]
    assert "h.1.mlp.experts.3.c_proj.weight" in dict(model.named_parameters())
    tokens = torch.randint(37, (3, 11))
    set_total(model, 33)
    model.loss(model(tokens), tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert mixtures(model)[0].router.weight.grad.abs().max() > 0


def test_generation_drops_nothing_and_expert_choice_cannot_generate():
    model = GPT2(replace(CONFIG, experts=Experts(4, 2, capacity=0.5)))
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    with_cache = generate(model, prompts, 5, stop=None, temperature=0)
    assert with_cache == generate(model, prompts, 5, stop=None, temperature=0, cache=False)
    assert with_cache[1] == generate(model, prompts[1:], 5, stop=None, temperature=0)[0] and model.training
    with pytest.raises(ValueError, match="depend on later tokens"):
        generate(GPT2(replace(CONFIG, experts=Experts(4, 2, "expert_choice"))), prompts, 1)
