"""llm.c's files: what is written is read back, byte for byte in the documented places."""

import numpy as np
import pytest
import torch
from test_model import random_weights, tokens_and_targets

from gpt2lab.lessons.labs import llmc_files as llmc
from gpt2lab.model import GPT2, GPT2Config

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)


@pytest.fixture
def written(tmp_path):
    model = random_weights(GPT2(CONFIG))
    llmc.write_weights(model, tmp_path / "model.bin")
    return model, tmp_path / "model.bin"


def test_weights_round_trip_and_lie_where_llmc_looks(written):
    model, path = written
    again = llmc.read_weights(path)
    assert again.config == CONFIG
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    header = np.fromfile(path, np.int32, 256)
    assert header[:8].tolist() == [20240326, 3, 16, 37, 3, 4, 24, 128] and not header[8:].any()
    floats = np.fromfile(path, np.float32, offset=1024)
    assert len(floats) == CONFIG.parameters + (128 - 37) * 24
    assert not floats[37 * 24 : 128 * 24].any()
    first_norms = 128 * 24 + 16 * 24  # ln_1's weights of all layers, stacked
    assert floats[first_norms + 24 : first_norms + 48].tolist() == model.h["1"].ln_1.weight.tolist()
    assert len(llmc.file_layout(CONFIG)) == 16
    assert llmc.padded_vocabulary(50257) == 50304


def test_debug_state_round_trips(tmp_path):
    model = random_weights(GPT2(CONFIG))
    tokens, targets = tokens_and_targets(CONFIG, 3, 11)
    logits = model(tokens)
    loss = model.loss(logits, targets) / targets.numel()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    llmc.write_debug(tmp_path / "debug.bin", CONFIG, tokens, targets, logits, loss.item(), grads)
    x, y, z, mean, found = llmc.read_debug(tmp_path / "debug.bin", CONFIG)
    assert torch.equal(x, tokens) and torch.equal(y, targets) and torch.equal(z, logits)
    assert mean == loss.item() and found.keys() == grads.keys()
    assert all(torch.equal(found[n], grads[n]) for n in grads)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(0, 7, "magic number is 7, expected 20240326"), (1, 2, "version 2 of llm.c's weights; only version 3")],
)
def test_foreign_files_are_refused(written, place, value, message):
    _, path = written
    raw = np.fromfile(path, np.int32)
    raw[place] = value
    raw.tofile(path)
    with pytest.raises(ValueError, match=message):
        llmc.read_weights(path)


def test_a_cut_off_file_is_refused_with_both_sizes(written):
    _, path = written
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=f"has {len(whole) - 4} bytes, but its header asks for {len(whole)}"):
        llmc.read_weights(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="magic number is nothing"):
        llmc.read_weights(path)
