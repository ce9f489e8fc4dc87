"""Files that others have made: none of them runs code, and no damage of a checkpoint goes unnoticed."""

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.commands import folders
from gpt2lab.experts.mixture import Experts
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.storage import checkpoint, huggingface, reading
from gpt2lab.train import Trainer

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=2, n_embd=8)
FILES = ("state.json", "config.json", "rank0.safetensors")


def trainer() -> Trainer:
    return Trainer(build(Plan(), CONFIG, Mesh(), torch.float64))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two checkpoints, of steps 1 and 2."""
    folder, one = tmp_path_factory.mktemp("run"), trainer()
    for _ in range(2):
        one.step(example_batch(CONFIG, 7, 11))
        checkpoint.save(one, folder, val=1.5)
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """The newer checkpoint, in a run of its own beside the older one."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run" / "checkpoint-0000002"


class Touches:
    """A pickle of this makes a file when it is read."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def state(folder: Path) -> dict:
    """What the state of a checkpoint says, without its seal."""
    said = json.loads((folder / "state.json").read_text())
    return {name: value for name, value in said.items() if name != "seal"}


def sealed_with(folder: Path, **changes) -> None:
    """What a forger does: other words in a state, and a seal for them."""
    (folder / "state.json").write_text(reading.text(state(folder) | changes))


def seal_again(folder: Path) -> None:
    """The same with the digests of files that were changed."""
    sealed_with(folder, sha256={name: reading.digest(folder / name) for name in state(folder)["sha256"]})


def forged(file: Path, side_effect: Path) -> None:
    """A pickle with a side effect in place of a file."""
    file.write_bytes(pickle.dumps(Touches(side_effect)))


def forged_heads(folder: Path, change) -> None:
    """Write what `change` makes of the list of boxes into the file of tensors, whose numbers stay; sealed again."""
    file = folder / "rank0.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])
    seal_again(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("sealed", [True, False])
def test_no_file_of_a_checkpoint_runs_code(name, sealed, copy, tmp_path, capsys):
    effect = tmp_path / "effect"
    forged(copy / name, effect)
    if sealed and name != "state.json":
        seal_again(copy)
    (copy.parent / "options.json").write_text("{}")
    for command in (
        ["generate", "--model", str(copy), "--prompt", "a"],
        ["export", "--run", str(copy), "--out", str(tmp_path / "out")],
        ["train", "--resume", str(copy), "--out", str(tmp_path)],
    ):
        try:
            main(command)
        except Exception as error:  # words are another test's business, and a bare error has run nothing
            assert "Touches" not in str(error)
        assert not effect.exists(), command
    with pytest.raises(Exception):  # noqa: B017
        checkpoint.load(copy, trainer())
    assert not effect.exists()


def test_a_forged_file_would_run_where_an_unpickler_reads_it(copy, tmp_path):
    """The test above can fail."""
    forged(copy / "rank0.safetensors", tmp_path / "effect")
    pickle.loads((copy / "rank0.safetensors").read_bytes())
    assert (tmp_path / "effect").exists()


def test_nothing_of_the_package_unpickles_a_file():
    """Pickles pass only between processes of one launch, in its private folder, and to the process that reads answers.

    torch.load without `weights_only` is an unpickler too.
    """
    package, found = Path(huggingface.__file__).parents[1], {}
    modules = "pickle|cloudpickle|dill|shelve|marshal|joblib"
    unpickles = re.compile(rf"\b(?:{modules})\.(?:loads?|open|Unpickler)\b|torch\.load\(.*")
    for file in package.rglob("*.py"):
        for call in unpickles.findall(file.read_text()):
            found.setdefault(str(file.relative_to(package)), set()).add(call)
    assert found.pop("commands/convert.py") == {"torch.load(io.BytesIO(archive), weights_only=True)"}
    assert set(found) == {
        "classroom/peer.py",
        "classroom/reading.py",
        "processes/rank_process.py",
        "processes/results.py",
    }


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_file_of_an_export_runs_code(name, copy, tmp_path, capsys):
    checkpoint.export(copy, tmp_path / "model")
    forged(tmp_path / "model" / name, tmp_path / "effect")
    with pytest.raises(ValueError):
        huggingface.load(tmp_path / "model")
    assert not (tmp_path / "effect").exists()


def test_no_shard_of_tokens_runs_code(tmp_path):
    from gpt2lab.corpus.shards import Shard

    (tmp_path / "tokens.bin").write_bytes(pickle.dumps(Touches(tmp_path / "effect")) * 99)
    with suppress(ValueError):
        Shard(tmp_path / "tokens.bin")[:5]
    assert not (tmp_path / "effect").exists()


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "other.safetensors"])
def test_files_elsewhere_are_not_read(name, copy):
    (copy.parents[1] / "secret.safetensors").write_bytes((copy / "rank0.safetensors").read_bytes())
    digests = state(copy)["sha256"]
    sealed_with(copy, sha256=digests | {name: digests["rank0.safetensors"]})
    with pytest.raises(checkpoint.BadCheckpoint, match=f"{name} is missing"):
        checkpoint.load(copy, trainer())


WTE = "weight.wte.weight@0,0"  # (37, 8)


def renamed(old: str, new: str):
    """The list of boxes with another name for one of them."""
    return lambda head: {new if name == old else name: said for name, said in head.items()}


NO_BOXES, OUTSIDE = "rank0.safetensors is no file of boxes", "is not inside its shape"
HEADS = {
    "no offsets": (renamed(WTE, "weight.wte.weight"), r"weight.wte.weight is the name of a tensor of shape \(37, 8\)"),
    "offsets that are no numbers": (renamed(WTE, "weight.wte.weight@a,b"), NO_BOXES),
    "too few offsets": (renamed(WTE, "weight.wte.weight@0"), "weight.wte.weight@0 is the name of a tensor of"),
    "below zero": (renamed(WTE, "weight.wte.weight@-1,0"), OUTSIDE),
    "behind the end": (renamed(WTE, "weight.wte.weight@1,0"), OUTSIDE),
    "far behind": (renamed(WTE, f"weight.wte.weight@{10**9},0"), OUTSIDE),
    "a number too long": (renamed(WTE, f"weight.wte.weight@{'9' * 5000},0"), NO_BOXES),
    "a tensor is missing": (renamed(WTE, "weight.more@0,0"), "weight.wte.weight has 296 elements, of which 0 are"),
    "a moment is missing": (renamed("exp_avg.wte.weight@0,0", "x@0,0"), "exp_avg.wte.weight has 296 elements"),
    "two boxes of one tensor": (renamed("exp_avg.wpe.weight@0,0", "weight.wte.weight@5,0"), "in common"),
    "a tensor beyond all memory": (lambda head: head | {WTE: head[WTE] | {"shape": [10**9, 10**6]}}, NO_BOXES),
    "numbers beyond the file": (lambda head: head | {WTE: head[WTE] | {"data_offsets": [0, 10**15]}}, NO_BOXES),
}  # fmt: skip


@pytest.mark.parametrize("change", HEADS)
def test_a_forged_list_of_boxes_is_refused_at_once(change, copy):
    forge, words = HEADS[change]
    forged_heads(copy, forge)
    with pytest.raises(checkpoint.BadCheckpoint, match=words):
        checkpoint.load(copy, trainer())
    if "moment" not in change:
        with pytest.raises(ValueError, match=f"{words}|differ in weight.more"):
            huggingface.load(copy)


def test_a_configuration_with_a_layer_for_every_byte_of_memory_is_refused_at_once(copy):
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(said | {"n_layer": 10**9}))
    seal_again(copy)
    with pytest.raises(ValueError, match="makes a model of 872,000,000,440 param"):
        huggingface.load(copy)
    with pytest.raises(ValueError, match="holds another model"):
        checkpoint.load(copy, trainer())


def test_what_changes_nothing_in_a_configuration_from_before_is_left_out(tmp_path):
    huggingface.save(GPT2(replace(CONFIG, experts=Experts(2))), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["experts"]["speed"] = 0.5  # of a load bias, which this router does not have
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert huggingface.load(tmp_path).config.experts == Experts(2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("experts", [None, Experts(2, every=3)], ids=["dense", "experts"])
@pytest.mark.parametrize("value", [10**9, -1, 2.5, float("inf"), None, "x", [], {}], ids=repr)
def test_a_config_json_of_any_sizes_is_refused_at_once_in_a_sentence(value, experts, tmp_path):
    huggingface.save(GPT2(replace(CONFIG, n_layer=3, experts=experts)), tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    sizes = [*huggingface.SIZES, *(["experts"] if experts and value is not None else [])]
    for name in sizes:
        file.write_text(json.dumps(said | {name: value}))
        with pytest.raises(ValueError, match="config.json.* (Use|Fetch|another model)"):
            huggingface.load(tmp_path)


def test_options_that_were_changed_after_a_checkpoint_are_noticed(copy):
    file = copy.parent / "options.json"
    file.write_text('{"steps": 3}')
    assert folders.options_of(copy).steps == 3  # a checkpoint from before options had a digest
    sealed_with(copy, options_sha256=reading.digest(file))
    assert folders.options_of(copy).steps == 3
    file.write_text('{"steps": 2}')
    with pytest.raises(ValueError, match="options.json is damaged: its sha256 is not the one in"):
        folders.options_of(copy)


def test_a_folder_in_place_of_the_state_makes_no_checkpoint(copy):
    (copy / "state.json").unlink()
    (copy / "state.json").mkdir()
    assert checkpoint.all_in(copy.parent) == [copy.with_name("checkpoint-0000001")]


def refused(folder: Path, file: str) -> None:
    """Reading the checkpoint is refused with the file's name and the older checkpoint."""
    with pytest.raises(checkpoint.BadCheckpoint) as error:
        checkpoint.read_state(folder)
    said = str(error.value)
    assert said.startswith(str(folder / file)) and "damaged" in said, said
    assert said.endswith(f"Go on with an older one: --resume {folder.parent / 'checkpoint-0000001'}."), said


def flip(file: Path, data: bytes, at: int, bit: int) -> None:
    file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


def test_any_flip_and_cut_of_the_state_is_noticed(copy):
    """Every byte; of each byte one bit, another one every time."""
    data = (copy / "state.json").read_bytes()
    for at in range(len(data)):
        flip(copy / "state.json", data, at, at % 8)
        refused(copy, "state.json")
        (copy / "state.json").write_bytes(data[:at])
        refused(copy, "state.json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_bit_of_the_small_files_and_many_of_the_large_are_noticed(copy):
    chance = random.Random(5)
    for name in FILES:
        data = (copy / name).read_bytes()
        places = [(at, bit) for at in range(len(data)) for bit in range(8)]
        if name == "rank0.safetensors":
            places = chance.sample(places, 5000)
        for at, bit in places:
            flip(copy / name, data, at, bit)
            refused(copy, name)
        (copy / name).write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_flip_cut_or_swap_of_each_file_is_noticed(name, copy, run):
    data, chance = (copy / name).read_bytes(), random.Random(1)
    for _ in range(40):
        flip(copy / name, data, chance.randrange(len(data)), chance.randrange(8))
        refused(copy, name)
        (copy / name).write_bytes(data[: chance.randrange(len(data))])
        refused(copy, name)
    (copy / name).write_bytes(data + b"\0")
    refused(copy, name)
    other = (run / "checkpoint-0000001" / name).read_bytes()
    (copy / name).write_bytes(other)
    if other != data and name != "state.json":  # that of another step names files that differ
        refused(copy, name)
    elif other != data:
        with pytest.raises(checkpoint.BadCheckpoint, match="damaged"):
            checkpoint.read_state(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name, copy):
    (copy / name).unlink()
    with pytest.raises(checkpoint.BadCheckpoint, match=f"no {name}|{name} is missing"):
        checkpoint.load(copy, trainer())
    with pytest.raises(checkpoint.BadCheckpoint):
        huggingface.load(copy)


CHANGES = {
    "another step": {"step": 7},
    "no digests": {"sha256": {}},
    "a step that is no number": {"step": "2"},
    "a step below zero": {"step": -1},
    "no optimizer": {"optimizer": None},
    "digests that are a list": {"sha256": []},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_changed_state_is_refused(change, sealed, copy):
    if sealed:
        sealed_with(copy, **CHANGES[change])
    else:  # the old seal on a new text
        said = json.loads((copy / "state.json").read_text()) | CHANGES[change]
        (copy / "state.json").write_text(json.dumps(said, indent=2) + "\n")
    if sealed and change == "another step":  # who forges the seal too is not kept out by a digest
        assert checkpoint.read_state(copy)["step"] == 7
    else:
        refused(copy, "state.json")


def test_every_file_of_tensors_needs_its_digest(copy):
    digests = state(copy)["sha256"]
    for name in digests:
        sealed_with(copy, sha256={other: right for other, right in digests.items() if other != name})
        refused(copy, "state.json")


def test_a_state_without_a_seal_is_refused(copy):
    (copy / "state.json").write_text(json.dumps(state(copy), indent=2) + "\n")
    refused(copy, "state.json")


@pytest.mark.parametrize(
    "junk", [b"", b"[]", b"3", b'"seal"', b"{}", b"[" * 10**5, b"\xff\xfe\x00", b'{"seal": "0"}']
)
def test_what_is_no_state_is_refused(junk, copy):
    (copy / "state.json").write_bytes(junk)
    refused(copy, "state.json")


def test_the_older_one_that_is_named_is_whole(copy, tmp_path):
    one = trainer()
    one.steps = 3
    third = checkpoint.save(one, copy.parent, keep=9)
    (copy / "config.json").write_text("{}")
    with pytest.raises(checkpoint.BadCheckpoint, match="--resume .*checkpoint-0000001.$"):
        checkpoint.read_state(copy)  # the third is whole, and newer
    (third / "rank0.safetensors").write_bytes(b"")
    with pytest.raises(checkpoint.BadCheckpoint, match="--resume .*checkpoint-0000001.$"):
        checkpoint.read_state(third)
    (copy.with_name("checkpoint-0000001") / "config.json").write_text("{}")
    with pytest.raises(checkpoint.BadCheckpoint, match="in state.json. No older one is whole: train again.$"):
        checkpoint.load(third, one)


def test_a_damaged_older_state_does_not_stop_a_save(copy):
    (copy.parent / "checkpoint-0000001" / "state.json").write_text("{")
    one = trainer()
    one.steps = 3
    checkpoint.save(one, copy.parent, keep=1)
    assert checkpoint.best(copy.parent) == copy


@pytest.mark.rotates
@pytest.mark.parametrize("started", ["module", "command"])
def test_the_command_imports_nothing_from_the_current_folder(started, tmp_path):
    """A student's torch.py, or a file that somebody has left there.

    What `python -m` itself imports (runpy, and reprlib for it) it takes from that folder before any line of ours runs.
    """
    pythons_own = ["reprlib"] if started == "command" else []
    for name in ("torch", "json", "tqdm", "numpy", "argparse", "signal", "enum", "random", *pythons_own):
        effect = f"open('effect-of-{name}', 'w')\nraise SystemExit('ran {name}')\n"
        (tmp_path / f"{name}.py").write_text(effect)
    module = [sys.executable, "-m", "gpt2lab"]
    command = module if started == "module" else [str(Path(sys.executable).with_name("gpt2lab"))]
    run = [*command, "train", "--dry-run", "--plan", "dp=2"]
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=env)
    assert found.returncode == 0 and "torchrun" in found.stdout, found.stderr
    assert not list(tmp_path.glob("effect*"))


def test_a_device_is_not_replaced_by_a_file(tmp_path, capsys):
    """As root, `--out /dev/full` would have become a regular file."""
    pipe, text = tmp_path / "pipe", tmp_path / "text.txt"
    os.mkfifo(pipe)
    text.write_text("To be, or not to be " * 9)
    assert main(["data", "--text", str(text), "--out", str(pipe)]) == 2
    assert f"{pipe} is no regular file, so nothing was written" in capsys.readouterr().err
    assert pipe.is_fifo()
    pipe.unlink()
    pipe.symlink_to(text)
    assert main(["data", "--text", str(text), "--out", str(tmp_path)]) == 2
    assert tmp_path.is_dir()
