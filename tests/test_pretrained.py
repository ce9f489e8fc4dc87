"""The Hugging Face layout, against what transformers itself writes and reads."""

import json
from dataclasses import replace
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import as_ours, random_weights, their_model

from gpt2lab.cli import main
from gpt2lab.commands import export
from gpt2lab.corpus import downloads
from gpt2lab.model import GPT2, PRESETS, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)
TOKENS = torch.arange(22).reshape(2, 11)


@pytest.fixture
def folder(tmp_path):
    """What transformers writes for a random model, and the model."""
    theirs = random_weights(their_model(CONFIG), 0.05)
    theirs.save_pretrained(tmp_path)
    return tmp_path, theirs


def rewrite(folder, change):
    """Apply a change to the tensors of a folder's file."""
    file = folder / "model.safetensors"
    tensors = {n: t.contiguous() for n, t in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def reconfigure(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_prefix_and_with_masks(tensors):
    """As the published file is: no prefix, and masks stored beside the weights."""
    plain = {n.removeprefix("transformer."): t for n, t in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(CONFIG.n_layer)}
    more = {"h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": plain["wte.weight"] + 0}
    return plain | masks | more


@pytest.mark.rotates
@pytest.mark.parametrize("change", [lambda t: t, without_prefix_and_with_masks])
def test_what_transformers_writes_is_read_exactly(folder, change):
    path, theirs = folder
    rewrite(path, change)
    ours = huggingface.load(path)
    assert ours.config == CONFIG
    for name, p in theirs.named_parameters():
        name, expected = as_ours(name, p)
        assert torch.equal(ours.get_parameter(name), expected), name
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert huggingface.load(str(path), torch.float64).wte.weight.dtype == torch.float64


def test_what_we_write_is_read_by_transformers_and_by_us(tmp_path):
    from transformers import GPT2LMHeadModel

    ours = random_weights(GPT2(CONFIG))
    huggingface.save(ours, tmp_path / "new" / "folder")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "new" / "folder").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=1e-5)
    again = huggingface.load(tmp_path / "new" / "folder")
    assert again.config == CONFIG
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_dropout_survives_a_round_trip(tmp_path):
    config = replace(CONFIG, dropout=0.2)
    huggingface.save(GPT2(config), tmp_path)
    assert huggingface.load(tmp_path).config == config


def test_a_window_is_no_word_of_the_layout_and_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot say window=3, so its readers would attend to all"):
        huggingface.save(GPT2(replace(CONFIG, window=3)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, words", [("embd_pdrop", "embd_pdrop = 0.3 and resid_pdrop = 0.2"), ("attn_pdrop", "attn")]
)
def test_several_dropouts_are_refused_and_the_published_ones_are_read(name, words, tmp_path):
    huggingface.save(GPT2(replace(CONFIG, dropout=0.2)), tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries | {name: 0.3}))
    with pytest.raises(ValueError, match=words + ".*this GPT-2 has one dropout. Make them equal."):
        huggingface.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(entries | {"attn_pdrop": 0.2}))  # as OpenAI's has it
    assert huggingface.load(tmp_path).config.dropout == 0.2


def cut_off(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


EXTRA = {"transformer.extra": torch.ones(1)}
SHORT = {"transformer.wpe.weight": torch.ones(8, 24)}
REFUSED = [  # what is done to the folder, and what is said
    (lambda p: rewrite(p, lambda t: {n: v for n, v in t.items() if "ln_f" not in n} | EXTRA),
     "lacks ln_f.bias, ln_f.weight and has the unknown extra"),
    (lambda p: rewrite(p, lambda t: t | SHORT),
     r"wpe.weight is \(8, 24\) in the file, but \(16, 24\) by the config"),
    (lambda p: reconfigure(p, activation_function="relu"),
     "asks for activation_function = 'relu'; this GPT-2 knows only 'gelu_new'"),
    (lambda p: reconfigure(p, model_type="llama"), "model_type = 'llama'"),
    (lambda p: reconfigure(p, layer_norm_epsilon=1e-6), "layer_norm_epsilon = 1e-06"),
    (lambda p: reconfigure(p, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    (lambda p: reconfigure(p, tie_word_embeddings=False), "tie_word_embeddings"),
    (lambda p: reconfigure(p, n_layer=99), "makes a model of 716,496 parameters, and the files"),
    (lambda p: reconfigure(p, n_inner=7), "an MLP of width 7; this GPT-2's is 4 x 24"),
    (lambda p: rewrite(p, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1}),
     "has a head of its own, and GPT-2's is its embedding"),
    (cut_off, "model.safetensors is cut off or not a safetensors file"),
    (lambda p: (p / "model.safetensors").unlink(),
     "model.safetensors is missing: weights are read from this one file. Save the model so"),
    (lambda p: (p / "config.json").write_text("{}"), "does not say vocab_size"),
    (lambda p: (p / "config.json").unlink(), "no config.json"),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_is_no_gpt_2_or_is_damaged_is_refused(folder, damage, words):
    damage(folder[0])
    gone = "missing" in words or words.startswith("no ")
    with pytest.raises(FileNotFoundError if gone else ValueError, match=words):
        huggingface.load(folder[0])


def test_a_name_takes_the_published_file(tmp_path, monkeypatch):
    theirs = random_weights(GPT2(CONFIG))
    huggingface.save(theirs, tmp_path)
    monkeypatch.setitem(PRESETS, "gpt2", CONFIG)
    asked, file = [], tmp_path / "model.safetensors"
    monkeypatch.setattr(downloads, "download", lambda name: asked.append(name) or file)
    assert torch.equal(huggingface.load("gpt2").wte.weight, theirs.wte.weight)
    assert asked == ["gpt2"]


def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr(downloads.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(downloads, "cache_dir", lambda name: tmp_path)
    words = "no route to host.* call again with a network .* or copy the file to .*gpt2"
    with pytest.raises(OSError, match=words):
        huggingface.load("gpt2")


def test_generate_command_goes_on_from_the_newest_checkpoint_of_a_run(tmp_path, capsys):
    config = GPT2Config(vocab_size=50257, n_positions=32, n_layer=1, n_head=2, n_embd=8)
    for step in (1, 2):
        one = Trainer(build(Plan(), config, Mesh(), seed=step))
        one.steps = step
        checkpoint.save(one, tmp_path / "run")
    given = ["--prompt", "To be", "--prompt", "", "--tokens", "5", "--top-k", "9"]
    run = str(tmp_path / "run")
    assert main(["generate", "--model", run, *given]) == 0
    out = capsys.readouterr().out
    assert out.startswith("To be") and "10 tokens in" in out and run in out
    assert export.chosen(tmp_path / "run") == tmp_path / "run" / "checkpoint-0000002"
    assert main(["generate", "--model", run, *given, "--tokens", "99"]) == 2
    assert "the model's context is 32" in capsys.readouterr().err
