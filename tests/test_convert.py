"""What the version before has saved and llm.c has written: refused with the way out, converted, read byte for byte."""

import io
import json
import pickle
import random
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_model import random_weights, tokens_and_targets
from test_untrusted import Touches

from gpt2lab.cli import main
from gpt2lab.commands import convert, folders
from gpt2lab.lessons.labs import llmc_files as llmc
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=11, n_positions=6, n_layer=1, n_head=2, n_embd=4)
LOSSES = [2.410140621189461, 2.406564966019724, 2.4032439705488047]  # of the run itself, after its checkpoint
SAVED = Path(__file__).with_name("saved_by_the_version_before.tar.xz")  # on dp=2,zero=1, in float64


def trainer() -> Trainer:
    return Trainer(build(Plan(), CONFIG, Mesh(), torch.float64))


@pytest.fixture
def old(tmp_path) -> Path:
    """A run with one checkpoint, of step 1."""
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "before"


def test_it_is_refused_in_one_sentence_that_names_the_command(old, capsys):
    (folder,) = checkpoint.all_in(old)
    words = f"{folder} was written by the version before, whose files are no longer read. Convert its run: "
    words += f"gpt2lab convert {old} NEW"
    for call in (checkpoint.read_state, huggingface.load, lambda f: checkpoint.load(f, trainer())):
        with pytest.raises(checkpoint.BadCheckpoint) as error:
            call(folder)
        assert str(error.value) == words
    assert main(["train", "--resume", str(old)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gpt2lab train: {words}"


def test_a_converted_run_goes_on_where_it_ended(old, tmp_path, capsys):
    new = tmp_path / "new"
    assert main(["convert", str(old), str(new)]) == 0
    said = f"{old}/checkpoint-0000001 (step 1, plan dp=2,zero=1) is now {new}/check"
    assert said in capsys.readouterr().out
    (folder,) = checkpoint.all_in(new)
    assert checkpoint.best(new) == folder and folders.options_of(folder).steps == 3
    one = trainer()
    assert checkpoint.load(folder, one)["val"] == 2.5 and one.steps == 1
    assert [one.step(example_batch(CONFIG, 5, 6)).loss for _ in LOSSES] == pytest.approx(LOSSES, rel=1e-14)
    assert {f.name for f in new.iterdir()} == {f.name for f in old.iterdir()}
    (new / "options.json").write_text('{"steps": 4}')
    with pytest.raises(ValueError, match=r"options.json is damaged: its sha256"):
        folders.options_of(folder)


def test_one_checkpoint_can_be_converted_and_nothing_is_overwritten(old, tmp_path, capsys):
    (folder,) = checkpoint.all_in(old)
    for status in (0, 2):
        assert main(["convert", str(folder), str(tmp_path / "one")]) == status
    assert checkpoint.read_state(tmp_path / "one")["step"] == 1
    assert main(["convert", str(tmp_path / "one"), str(tmp_path / "two")]) == 2  # it is one of this version
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"gpt2lab convert: {tmp_path / 'one'} exists already. Use the name of a new folder."
    assert said[1].endswith(
        "is no checkpoint of the version before: it has no .metadata. Name one, or a run."
    )
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", ["one.old", "one.partial"])
def test_a_folder_that_stands_beside_the_new_one_stays(name, old, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    assert main(["convert", str(checkpoint.all_in(old)[0]), str(tmp_path / "one")]) == 2
    assert (tmp_path / name / "mine").exists()


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_that_was_being_replaced_is_converted_too(beside, old, tmp_path):
    """It was written under its name for the time of a replacement, and deleted as soon as it had been."""
    (folder,) = checkpoint.all_in(old)
    shutil.copytree(folder, folder.with_suffix(".old"))
    if not beside:
        shutil.rmtree(folder)
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0
    assert [found.name for found in checkpoint.all_in(tmp_path / "new")] == [folder.name]


def test_of_a_run_with_a_damaged_checkpoint_nothing_is_left(old, tmp_path, capsys):
    (folder,) = checkpoint.all_in(old)
    shutil.copytree(folder, old / "checkpoint-0000002")
    (old / "checkpoint-0000002" / "config.json").write_text("{}")
    assert main(["convert", str(old), str(tmp_path / "new")]) == 2
    words = "checkpoint-0000002 is damaged, so it was not converted: the sha256 of config"
    assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", [OSError("No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("source", ["", "checkpoint-0000001"])
def test_a_conversion_that_was_stopped_can_be_tried_again(source, what, old, tmp_path, monkeypatch):
    words = ["convert", str(old / source), str(tmp_path / "new")]
    with monkeypatch.context() as patch:
        patch.setattr(convert.writing, "_replace", Mock(side_effect=what))
        assert main(words) != 0
    assert main(words) == 0


def test_a_run_of_before_checkpoints_had_a_seal_is_converted(old, tmp_path):
    (folder,) = checkpoint.all_in(old)
    state = json.loads((folder / "state.json").read_text())
    del state["seal"], state["options_sha256"]
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0


def seal_again(folder: Path) -> None:
    """What a forger does: new digests for changed files."""
    said = json.loads((folder / "state.json").read_text())
    said["sha256"] = {name: convert.digest(folder / name) for name in said["sha256"]}
    del said["seal"], said["options_sha256"]
    (folder / "state.json").write_text(json.dumps(said))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_no_forged_file_runs_code(name, protocol, old, tmp_path, capsys):
    (folder,) = checkpoint.all_in(old)
    effect, forged = tmp_path / "effect", io.BytesIO()
    with zipfile.ZipFile(forged, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Touches(effect), protocol))
        archive.writestr("archive/version", "3")
    text = pickle.dumps(Touches(effect), protocol) if name == ".metadata" else forged.getvalue()
    (folder / name).write_bytes(text.ljust((folder / name).stat().st_size, b"\0"))
    seal_again(folder)
    assert main(["convert", str(old), str(tmp_path / "new")]) == 2
    assert "is damaged, so it was not converted" in capsys.readouterr().err
    assert not effect.exists() and not (tmp_path / "new").exists()
    pickle.loads(pickle.dumps(Touches(effect), protocol))
    assert effect.exists()  # the test can fail


def test_a_list_that_looks_for_tensors_elsewhere_is_refused(old, tmp_path, capsys):
    (folder,) = checkpoint.all_in(old)
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"/../../secre"))
    seal_again(folder)
    assert main(["convert", str(old), str(tmp_path / "new")]) == 2
    assert "it looks for tensors in '/../../secre'" in capsys.readouterr().err


def test_flips_and_cuts_of_any_file_are_refused(old, tmp_path, capsys):
    (folder,) = checkpoint.all_in(old)
    chance = random.Random(3)
    for name in ("state.json", ".metadata", "config.json", "__0_0.distcp", "__1_0.distcp"):
        data = (folder / name).read_bytes()
        for _ in range(8):
            at, bit = chance.randrange(len(data)), chance.randrange(8)
            for wrong in (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], data[:at]):
                (folder / name).write_bytes(wrong)
                assert main(["convert", str(old), str(tmp_path / "new")]) == 2
                assert name in capsys.readouterr().err
        (folder / name).write_bytes(data)
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    "said", [[1, "a", {"b": (2.5, None, True)}], {"x": ["x", "x"]}, ("text" * 100, -(2**20))]
)
def test_an_older_pickle_says_the_same(said):
    assert pickle.loads(convert.older(pickle.dumps(said, 4))) == said


# --- llm.c's files: what is written is read back, byte for byte in the documented places


OF_LLMC = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=4, n_embd=24)


@pytest.fixture
def written(tmp_path):
    model = random_weights(GPT2(OF_LLMC))
    llmc.write_weights(model, tmp_path / "model.bin")
    return model, tmp_path / "model.bin"


def test_a_window_has_no_word_in_llmcs_file(tmp_path):
    with pytest.raises(ValueError, match="no word for a window of 3. Write a model without."):
        llmc.write_weights(GPT2(replace(OF_LLMC, window=3)), tmp_path / "model.bin")


def test_weights_round_trip_and_lie_where_llmc_looks(written):
    model, path = written
    again = llmc.read_weights(path)
    assert again.config == OF_LLMC
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    header = np.fromfile(path, np.int32, 256)
    assert header[:8].tolist() == [20240326, 3, 16, 37, 3, 4, 24, 128] and not header[8:].any()
    floats = np.fromfile(path, np.float32, offset=1024)
    assert len(floats) == OF_LLMC.parameters + (128 - 37) * 24
    assert not floats[37 * 24 : 128 * 24].any()
    first_norms = 128 * 24 + 16 * 24  # ln_1's weights of all layers, stacked
    assert floats[first_norms + 24 : first_norms + 48].tolist() == model.h["1"].ln_1.weight.tolist()
    assert len(llmc.file_layout(OF_LLMC)) == 16
    assert llmc.padded_vocabulary(50257) == 50304


def test_debug_state_round_trips(tmp_path):
    model = random_weights(GPT2(OF_LLMC))
    tokens, targets = tokens_and_targets(OF_LLMC, 3, 11)
    logits = model(tokens)
    loss = model.loss(logits, targets) / targets.numel()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    llmc.write_debug(tmp_path / "debug.bin", OF_LLMC, tokens, targets, logits, loss.item(), grads)
    x, y, z, mean, found = llmc.read_debug(tmp_path / "debug.bin", OF_LLMC)
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
