"""The model against transformers and against a loop."""

import math

import pytest
import torch
from planting import planted
from tensor_cases import bytes_kept, tokens_and_targets

from gpt2lab import model as model_module
from gpt2lab.model import GPT2, PRESETS, GPT2Config, Noise, causal_attention, token_loss
from gpt2lab.parallel.recompute import apply_recompute
from gpt2lab.storage.huggingface import TRANSPOSED

SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
SHAPES = [  # vocabulary, positions, layers, heads, width, rows, tokens
    (37, 16, 3, 4, 24, 3, 11),
    (50, 9, 1, 1, 8, 1, 9),
    (101, 32, 2, 5, 40, 2, 1),
    (64, 8, 5, 2, 6, 7, 8),
]


def random_weights(model, scale=0.2):
    """Weights far from initialisation, so that no bias is zero and no norm is one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale)
    return model


def their_model(config):
    """GPT2LMHeadModel of the same sizes, without dropout."""
    from transformers import GPT2Config as TheirConfig  # takes seconds, which few workers need to pay
    from transformers import GPT2LMHeadModel

    sizes = {n: getattr(config, n) for n in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    last = config.vocab_size - 1
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(TheirConfig(**sizes, **off, bos_token_id=last, eos_token_id=last))


def as_ours(name, tensor):
    """A tensor of theirs under our name and in our layout."""
    return name.removeprefix("transformer."), tensor.T if name.endswith(TRANSPOSED) else tensor


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance):
    config, (rows, length) = GPT2Config(*shape[:5]), shape[5:]
    theirs = random_weights(their_model(config).to(dtype), 0.05)
    ours = GPT2(config).to(dtype)
    ours.load_state_dict(dict(as_ours(n, p.detach()) for n, p in theirs.named_parameters()))
    tokens, targets = tokens_and_targets(config, rows, length)
    our_logits, their_logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=tolerance, atol=tolerance)
    (ours.loss(our_logits, targets) / targets.numel()).backward()
    torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten()).backward()
    expected = dict(as_ours(n, p.grad) for n, p in theirs.named_parameters())
    assert expected.keys() == {n for n, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        error = (p.grad - expected[name]).abs().max() / max(expected[name].abs().max().item(), 1.0)
        assert error <= tolerance, name


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168}
    published |= {"gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    # nothing is drawn: `initialise` needs real memory, counting does not
    with torch.device("meta"), planted(model_module, "initialise", lambda right: lambda *_: None):
        counted = sum(p.numel() for p in GPT2(PRESETS[name]).parameters())
    assert PRESETS[name].parameters == counted == published.get(name, counted)


def test_a_fresh_model_knows_nothing():
    config = GPT2Config(vocab_size=50257, n_positions=32, n_layer=2, n_head=2, n_embd=64)
    tokens, targets = tokens_and_targets(config, 8, 32)
    model = GPT2(config)
    with torch.no_grad():
        loss = model.loss(model(tokens), targets) / targets.numel()
    assert loss.item() == pytest.approx(math.log(50257), abs=0.05)


def test_initial_weights_have_gpt2s_spread_and_depend_on_the_name_and_the_seed_only():
    one, two, other = GPT2(SMALL, 1), GPT2(SMALL, 1), GPT2(SMALL, 2)
    named = dict(one.named_parameters())
    for name, p in two.named_parameters():
        assert torch.equal(p, named[name])
    assert not torch.equal(other.wte.weight, one.wte.weight)
    blocks = [b.mlp.c_fc.weight for b in one.h.values()]
    assert not torch.equal(blocks[0], blocks[1])
    wide = GPT2(GPT2Config(vocab_size=2000, n_layer=2, n_head=4, n_embd=128, n_positions=16))
    assert wide.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert wide.h["0"].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
    deeper = GPT2(GPT2Config(**{**SMALL.__dict__, "n_layer": 5}), 1)
    assert torch.equal(deeper.h["1"].attn.c_attn.weight, one.h["1"].attn.c_attn.weight)


def test_loss_is_a_sum_that_skips_ignored_targets():
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (2, 5))
    targets[0, 3:] = -100
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    assert token_loss(logits, targets).item() == pytest.approx(-chosen[targets >= 0].sum().item())


def test_sixteen_bit_models_train_and_their_loss_is_summed_in_float32():
    tokens, targets = tokens_and_targets(SMALL, 3, 11)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = random_weights(GPT2(SMALL), 0.05).to(dtype)
        loss = model.loss(model(tokens), targets)
        loss.backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("window", [None, 0, 1, 3, 20])
def test_windowed_attention_equals_a_loop(window):
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    got = causal_attention(q, k, v, torch.arange(9), window)
    for t in range(9):
        first = 0 if window is None else max(0, t - window)
        scores = (k[:, :, first : t + 1] @ q[:, :, t, :, None])[..., 0] / math.sqrt(4)
        want = (scores.softmax(-1)[..., None] * v[:, :, first : t + 1]).sum(-2)
        torch.testing.assert_close(got[:, :, t], want, rtol=1e-12, atol=1e-12)


def test_a_single_query_sees_the_keys_up_to_its_position_and_no_other():
    q, k, v = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    for at in (0, 5, 8):
        got = causal_attention(q, k, v, torch.tensor([at]))
        alone = causal_attention(q, k[:, :, : at + 1], v[:, :, : at + 1], torch.tensor([[at], [at]]))
        torch.testing.assert_close(got, alone)


def test_picked_columns_are_the_columns_of_the_whole_logits():
    model = GPT2(SMALL).double()
    tokens, _ = tokens_and_targets(SMALL, 3, 11)
    pick = torch.tensor([10, 0, 4])
    picked, whole = model(tokens, pick=pick)[:, 0], model(tokens)[torch.arange(3), pick]
    torch.testing.assert_close(picked, whole, rtol=1e-13, atol=1e-13)


def noise(samples, seed=0, step=0):
    return Noise(seed, step, torch.as_tensor(samples))


def keep(samples, p=0.1, site=3, length=64, width=96, **key):
    return noise(samples, **key).keep(p, site, torch.arange(length), torch.arange(width))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_right_share_and_is_uncorrelated(p):
    kept = keep(range(40), p).double()
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 4 * spread
    centred = kept - (1 - p)
    pairs = [(centred.narrow(d, 0, n - 1), centred.narrow(d, 1, n - 1)) for d, n in enumerate(kept.shape)]
    others = keep(range(40), p, site=4), keep(range(40), p, step=1), keep(range(40), p, seed=1)
    pairs += [(centred, other.double() - (1 - p)) for other in others]
    for a, b in pairs:
        assert abs((a * b).mean().item()) < 4 * p * (1 - p) / math.sqrt(kept.numel())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_gives_bitwise_the_same_gradients(dropout):
    config = GPT2Config(**{**SMALL.__dict__, "dropout": dropout})
    tokens, targets = tokens_and_targets(config, 3, 11)
    grads = []
    for recompute in (False, True):
        model = random_weights(GPT2(config))
        if recompute:
            apply_recompute(model)
        model.loss(model(tokens, noise=noise(range(3))), targets).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recomputation_saves_the_inputs_of_the_blocks_and_nothing_else(dtype):
    rows, length, size = 3, 11, dtype.itemsize
    b_t_c = rows * length * SMALL.n_embd * size
    model = GPT2(SMALL).to(dtype)
    tokens, _ = tokens_and_targets(SMALL, rows, length)
    x = model.embed(tokens, torch.arange(length)).detach().requires_grad_()

    def blocks():
        y = x
        for block in model.h.values():
            y = model.run_block(block, y, torch.arange(length))
        return y

    # Each block keeps 16 tensors of (B, T, C): its input, ln_1's output, q k v, attention's output, the sum after
    # attention, ln_2's output, and 4 + 4 around gelu; besides mean and deviation of two norms and the softmax's sums.
    small = rows * length * (4 + SMALL.n_head) * size
    assert bytes_kept(model, blocks) == SMALL.n_layer * (16 * b_t_c + small)
    apply_recompute(model)
    assert bytes_kept(model, blocks) == SMALL.n_layer * b_t_c
