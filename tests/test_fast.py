"""Switches for speed: exact where they say so, off where their check fails."""

from dataclasses import replace

import pytest
import torch

from gpt2lab import fast
from gpt2lab.chunked_loss import apply_chunked_loss
from gpt2lab.model import GPT2, token_loss
from gpt2lab.verify import CONFIG, example_batch, verify


@pytest.mark.parametrize("rows", [1, 5, 77, 1000])
def test_the_chunked_loss_and_all_gradients_equal_the_whole(rows):
    batch, found = example_batch(CONFIG, 7, 11), []
    for chunked in (False, True):
        model = GPT2(CONFIG).double()
        if chunked:
            apply_chunked_loss(model, rows)
        loss = 0.3 * model.loss(model(batch.tokens), batch.targets)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for whole, part in zip(*found, strict=True):
        assert (whole - part).abs().max() <= 1e-13 * whole.abs().max()


def test_a_bug_in_the_chunked_loss_would_be_seen(monkeypatch):
    monkeypatch.setattr("gpt2lab.chunked_loss.IGNORED", 1)
    batch, model = example_batch(CONFIG, 7, 11), GPT2(CONFIG).double()
    whole = token_loss(model(batch.tokens), batch.targets)
    apply_chunked_loss(model, 5)
    with pytest.raises((AssertionError, RuntimeError)):
        assert torch.isclose(model.loss(model(batch.tokens), batch.targets), whole, rtol=1e-6)


@pytest.mark.parametrize("plan", ["loss=chunked", "loss=chunked,micro=3,recompute=on"])
def test_plans_with_the_chunked_loss_equal_serial(plan):
    report = verify(plan, replace(CONFIG, dropout=0.1))
    assert report.ok, report


def test_the_whole_logits_are_never_held():
    config = replace(CONFIG, vocab_size=5003)
    batch, largest = example_batch(config, 7, 11), []
    model = GPT2(config)
    apply_chunked_loss(model, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (largest.append(t.numel()), t)[1], lambda t: t):
        model.loss(model(batch.tokens), batch.targets).backward()
    assert model.loss.buffer.shape == (8, 5003)
    assert max(largest) < 77 * 5003


def test_onednn_stays_off_where_its_error_is_too_large(monkeypatch):
    before, errors = torch.backends.mkldnn.matmul.fp32_precision, iter([1e-5, 1e-1])
    monkeypatch.setattr(fast, "_matmul_error", lambda: next(errors))
    rates = iter([1.0, 9.0])
    monkeypatch.setattr(fast, "_matmul_rate", lambda: next(rates))
    switch = fast.onednn()
    assert not switch.on
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_onednn_stays_off_where_it_is_not_faster(monkeypatch):
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(fast, "_matmul_error", lambda: 1e-5)
    rates = iter([1.0, 0.9])
    monkeypatch.setattr(fast, "_matmul_rate", lambda: next(rates))
    assert not fast.onednn().on
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_huge_pages_are_asked_for_beside_other_tunables(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert fast.ask_for_huge_pages() and fast.huge_pages().on
    import os

    assert os.environ["GLIBC_TUNABLES"] == "glibc.pthread.rseq=0:glibc.malloc.hugetlb=1"
    assert not fast.ask_for_huge_pages()
