"""Switches for speed: exact where they say so, off where their check fails."""

import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from planting import planted

from gpt2lab import launch
from gpt2lab.machine import fast, huge_pages
from gpt2lab.machine.huge_pages import TUNABLE
from gpt2lab.model import GPT2, token_loss
from gpt2lab.parallel.chunked_loss import apply_chunked_loss
from gpt2lab.reference import CONFIG, example_batch

pytestmark = pytest.mark.live


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


def test_the_chunked_loss_of_another_type_or_length_is_right_too():
    batch, model = example_batch(CONFIG, 7, 11), GPT2(CONFIG)
    whole = token_loss(model(batch.tokens), batch.targets).item()
    apply_chunked_loss(model, 5)
    for dtype, rows in ((torch.float32, 7), (torch.float64, 7), (torch.float64, 3), (torch.float32, 7)):
        loss = model.to(dtype).loss(model(batch.tokens[:rows]), batch.targets[:rows])
        assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(whole, rel=1e-5)


def test_the_whole_logits_are_never_held():
    config = replace(CONFIG, vocab_size=5003)
    batch, largest = example_batch(config, 7, 11), []
    model = GPT2(config)
    apply_chunked_loss(model, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (largest.append(t.numel()), t)[1], lambda t: t):
        model.loss(model(batch.tokens), batch.targets).backward()
    assert model.loss.buffer.shape == (8, 5003)
    assert max(largest) < 77 * 5003


ONEDNN = {  # the error of products with it, beside 1e-5 without; their rate beside 1 without; whether it is on
    "just exact enough": (3.9e-5, 9.0, True),
    "not exact enough": (4.1e-5, 9.0, False),
    "not faster": (1e-5, 0.9, False),
}


@pytest.mark.parametrize("error, rate, on", ONEDNN.values(), ids=ONEDNN)
def test_onednn_is_on_up_to_four_times_the_usual_error_where_it_is_faster(error, rate, on, monkeypatch):
    """A second look finds the same."""
    setting = torch.backends.mkldnn.matmul
    chosen = lambda usual, with_it: with_it if setting.fp32_precision == "bf16" else usual
    monkeypatch.setattr(fast, "_matmul_error", lambda: chosen(1e-5, error))
    monkeypatch.setattr(fast, "_matmul_rate", lambda: chosen(1.0, rate))
    for _ in range(2):
        assert fast.onednn().on is on
        assert setting.fp32_precision == ("bf16" if on else "none")


def test_huge_pages_are_asked_for_beside_other_tunables_but_not_against_the_users_word(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert huge_pages.ask_for_huge_pages()
    assert os.environ["GLIBC_TUNABLES"].startswith("glibc.pthread.rseq=0:glibc.malloc.hugetlb=1:")
    assert not huge_pages.ask_for_huge_pages()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert not huge_pages.ask_for_huge_pages()
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not huge_pages.ask_for_huge_pages()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory when told to")
@pytest.mark.parametrize("asked", [True, False])
def test_the_switch_for_huge_pages_sees_what_is_really_on(asked):
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", "from gpt2lab.machine import fast; print(fast.huge_pages().on)"]
    env |= {"GLIBC_TUNABLES": TUNABLE} if asked else {}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(asked)


@pytest.mark.parametrize("gains", [(2.0, 0.5, 2.0), (0.5, 2.0, 2.0), (2.0, 2.0, 2.0)])
def test_replicas_multiply_in_one_way_whatever_each_ones_stopwatch_says(gains):
    """What a run does at its start, on ranks of which some find oneDNN faster and some slower."""

    def work(rank, world_size):
        from gpt2lab.run import Options, start

        setting = fast.torch.backends.mkldnn.matmul  # named so, nothing of it travels by value
        rate = lambda: gains[rank] if setting.fp32_precision == "bf16" else 1.0
        with (
            planted(fast, "_matmul_error", lambda _: lambda: 1e-5),
            planted(fast, "_matmul_rate", lambda _: rate),
        ):
            start(rank, world_size, Options(plan="dp=3", steps=1, batch=3, sequence=16), None, False)
        return setting.fp32_precision

    assert launch(work, ranks=3, echo=False) == ["bf16" if min(gains) > 1 else "none"] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_with_all_switches_is_the_plain_step_up_to_rounding(dtype):
    config, found = replace(CONFIG, vocab_size=503), []
    for switched in (False, True):
        batch, model = example_batch(config, 7, 11), GPT2(config).to(dtype)
        if switched:
            fast.onednn()
            apply_chunked_loss(model, 32)
        (model.loss(model(batch.tokens), batch.targets) / batch.targets.numel()).backward()
        found.append([p.grad for p in model.parameters()])
    limit = 1e-12 if dtype is torch.float64 else 1e-5
    for plain, fast_one in zip(*found, strict=True):
        assert (plain - fast_one).abs().max() <= limit * plain.abs().max()


def test_without_gradients_the_chunked_loss_computes_none(monkeypatch):
    batch, model = example_batch(CONFIG, 7, 11), GPT2(CONFIG)
    apply_chunked_loss(model, 5)
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: products.append(1) or mm(*args, **kwargs))
    with torch.no_grad():
        model.loss(model(batch.tokens), batch.targets)
    assert len(products) == -(-batch.targets.numel() // 5)  # the logits of each chunk, and nothing else
