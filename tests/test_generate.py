"""Generation: the cache changes nothing, sampling is what it says, and what cannot be is refused."""

import pytest
import torch
import torch.nn.functional as F

from gpt2lab.generate import KVCache, Sampling, generate, generating, next_logits
from gpt2lab.model import GPT2, GPT2Config

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9]]


@pytest.fixture(scope="module")
def model():
    generator = torch.Generator().manual_seed(3)
    made = GPT2(CONFIG).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.2)
    return made


@pytest.mark.parametrize("window", [None, 2])
def test_logits_with_and_without_the_cache_are_equal_row_by_row(model, window):
    for block in model.h.values():
        block.attn.window = window
    rows, cache = [list(p) for p in PROMPTS], KVCache(16)
    for step in range(9):
        cached = next_logits(model, rows, cache)
        alone = torch.cat([next_logits(model, [row]) for row in rows])
        whole = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows]).detach()
        torch.testing.assert_close(cached, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone, whole, rtol=1e-12, atol=1e-12)
        for b, row in enumerate(rows):
            row.append((7 * step + b) % 37)
    for block in model.h.values():
        block.attn.window = None


def test_a_cache_with_stale_keys_would_show(model):
    """The check above can fail: with one key of one layer zeroed, the logits differ."""
    rows, cache = [list(p) for p in PROMPTS], KVCache(16)
    next_logits(model, rows, cache)
    for row in rows:
        row.append(0)
    cache.layers[model.h["1"].attn][0, :, 0] = 0
    cached = next_logits(model, rows, cache)
    assert not torch.allclose(cached, next_logits(model, rows), rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.7, "temperature": 2.0}])
def test_text_is_the_same_with_and_without_the_cache_and_alone_in_its_batch(model, how):
    how = {"seed": 1, **how} if how.get("temperature") != 0 else how
    texts = generate(model, PROMPTS, 9, **how)
    assert texts == generate(model, PROMPTS, 9, cache=False, **how)
    assert [len(t) for t in texts] == [len(p) + 9 for p in PROMPTS]
    assert all(t[: len(p)] == p for t, p in zip(texts, PROMPTS, strict=True))
    assert texts[0] == generate(model, PROMPTS[:1], 9, **how)[0]
    if "seed" in how:
        assert texts != generate(model, PROMPTS, 9, **how | {"seed": 2})


def test_temperature_zero_takes_the_likeliest(model):
    (text,) = generate(model, PROMPTS[:1], 6, temperature=0)
    for n in range(5, 11):
        assert text[n] == model(torch.tensor([text[:n]]))[0, -1].argmax()


def test_a_row_ends_before_the_stop_token_while_others_go_on(model):
    full = generate(model, PROMPTS, 9, seed=1)
    stop = full[0][7]  # the third new token of row 0
    for cache in (True, False):
        texts = generate(model, PROMPTS, 9, seed=1, stop=stop, cache=cache)
        for text, whole, prompt in zip(texts, full, PROMPTS, strict=True):
            new = whole[len(prompt) :]
            assert text == prompt + new[: new.index(stop) if stop in new else None]
        assert len(texts[0]) < len(full[0])


def test_sliding_forgets_the_oldest_tokens(model):
    slid = generate(model, PROMPTS, 20, seed=1, slide=True)
    assert slid == generate(model, PROMPTS, 20, seed=1, slide=True, cache=False)
    for n in (17, 24):
        last16 = model(torch.tensor([slid[2][n - 16 : n]]))[:, -1]
        logits = last16.expand(3, -1)  # rows are keyed by their place in the batch
        assert Sampling(seed=1).draw(logits, [0, 0, n])[2] == slid[2][n]


def test_past_the_context_is_refused_with_the_numbers(model):
    words = "7 tokens and 10 new ones make 17, .* context is 16. Ask for at most 9"
    with pytest.raises(ValueError, match=words):
        generate(model, PROMPTS, 10)
    with pytest.raises(ValueError, match="context is 16. Shorten the prompt, or slide."):
        generate(model, [[1] * 16], 1)
    with pytest.raises(ValueError, match="Prompt 1 is empty"):
        generate(model, [[1], []], 2)
    with pytest.raises(ValueError, match="Prompt 0 has a token outside 0 to 36"):
        generate(model, [[37]], 2)


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([3.0, 1.0, -torch.inf, 2.0, 2.0]).double()
    p, rows = logits.softmax(-1), 4000
    drawn = torch.tensor(Sampling(seed=4).draw(logits.expand(rows, -1), [0] * rows))
    share = torch.bincount(drawn, minlength=5) / rows
    assert share[2] == 0
    assert ((share - p).abs() <= 4 * (p * (1 - p) / rows).sqrt()).all()


def test_the_cache_holds_what_its_formula_says_and_refuses_more(model):
    cache = KVCache(12)
    next_logits(model, PROMPTS, cache)
    assert cache.bytes() == 2 * CONFIG.n_layer * len(PROMPTS) * 12 * CONFIG.n_embd * 8
    with pytest.raises(ValueError, match="The cache has 12 slots, but position 12 was asked for"):
        next_logits(model, [[1] * 13, [2], [3]], cache)


WEIGHTS = {  # what a linear layer's weight may be like: (outputs, inputs)
    "even": torch.Size((24, 10)),
    "of one row": torch.Size((1, 10)),
    "a vocabulary": torch.Size((37, 10)),
    "a prime that is cut into no blocks": torch.Size((131, 10)),
}


@pytest.mark.parametrize("size", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_few_rows_is_the_same_while_text_is_generated(model, size, bias):
    make = torch.Generator().manual_seed(1)
    weight, b = (torch.randn(shape, generator=make, dtype=torch.double) for shape in (size, size[:1]))
    laid_out = {"by outputs": weight, "by inputs": weight.t().contiguous().t()}
    for shape in ((1, 1, 10), (1, 10), (10,), (2, 1, 10), (2, 4, 10), (9, 10)):
        x = torch.randn(shape, generator=make, dtype=torch.double)
        for way, w in laid_out.items():
            expected = F.linear(x, w, b if bias else None)
            with generating(model):
                found = F.linear(x, w, b if bias else None)
            assert found.shape == expected.shape, way
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_cached_step_reads_its_weights_in_blocks_and_a_long_prompt_does_not(model, monkeypatch):
    calls, usual = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda w, x: calls.append(tuple(w.shape)) or usual(w, x))
    generate(model, [[1] * 9], 1)
    assert calls == [(37, 1, 24)]  # the head, of the last token alone
    calls.clear()
    generate(model, [[1] * 9], 2)
    threads = max(2, torch.get_num_threads())
    assert len(calls) == 2 + 4 * CONFIG.n_layer and calls[1] == (threads, 72 // threads, 24)
    calls.clear()
    F.linear(torch.ones(1, 24).double(), model.wte.weight)
    assert calls == [], "after it a linear layer is computed as usual"


def test_the_coldest_temperature_takes_the_likeliest_token():
    """Divided by so little a logit was infinite, and the token drawn was beyond the vocabulary."""
    logits = torch.tensor([[1.0, 900.0, -3.0, 899.0]])
    for temperature in (5e-324, 1e-300, 1e-3):
        assert Sampling(temperature=temperature).draw(logits, [1]) == [1]
