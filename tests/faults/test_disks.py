"""Disks that are full, read-only or damaged, for real: one sentence says so, and nothing that was saved is lost."""

import errno
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.storage import checkpoint
from gpt2lab.train import Trainer

PLAN = "dp=2,zero=1"
MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, in memory, which a test may fill up or make read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    made = mount("-t", "tmpfs", "-o", "size=256m", "gpt2lab", place)
    if made.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def mount(*arguments):
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here")
    return subprocess.run(["mount", *arguments], capture_output=True, text=True)


def leave(disk: Path, room: int) -> None:
    """Fill the disk until `room` bytes are free, in whole pages."""
    (disk / "filler").unlink(missing_ok=True)
    _, _, free = usage = shutil.disk_usage(disk)
    assert usage.total <= 256 * MIB, f"{disk} is no disk of our own"
    with open(disk / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free - room)


@pytest.fixture
def ranks(pools):
    return pools[2]


def trainer(plan=PLAN) -> Trainer:
    plan = Plan.parse(plan)
    return Trainer(build(plan, CONFIG, Mesh(**plan.axes), torch.float64))


def save_twice(rank, world, run, rooms, background=False):
    """A checkpoint, then one for each room that the disk is left with (None: as it is); what every attempt said."""
    one, said = trainer(), []
    for room in (None, *rooms):
        if rank == 0 and room is not None:
            leave(Path(run).parent, room)
        one.step(example_batch(CONFIG, 7, 11))  # also waits for rank 0
        saver = checkpoint.Saver(one, run, background=background)
        try:
            saver.save()
            saver.finish()
            said.append("")
        except checkpoint.CannotSave as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "in the background"])
def test_a_full_disk_costs_only_the_checkpoint_that_did_not_fit(background, disk, ranks):
    run = disk / "run"
    need = sum(f.stat().st_size for f in Path(first(ranks, run, background)).iterdir())
    rooms = [*(i * need // 5 for i in range(5)), need - 8192, 40 * MIB]
    for said in ranks.run(save_twice, str(run), rooms, background):
        assert said[0] == "" and said[-1] == ""
        for step, words in enumerate(said[1:-1], 2):
            place = (
                f"The checkpoint {run}/checkpoint-{step:07d} could not be written: No space left on device"
            )
            assert words.startswith(place) and words.endswith("Older ones are as they were."), words
    found = checkpoint.all_in(run)
    assert [checkpoint.read_state(f)["step"] for f in found] == [1, len(rooms) + 1]
    assert {f.name for f in run.iterdir()} == {f.name for f in found}


def first(ranks, run, background):
    """A checkpoint of the first step, made to see how large it is."""
    ranks.run(save_twice, str(run), [], background)
    return checkpoint.all_in(run)[-1]


TRAIN = ["train", "--batch", "2", "--sequence", "8", "--sample", "0", "--evaluate", "1000", "--no-fast"]


def train(*arguments) -> int:
    return main([*TRAIN, *map(str, arguments)])


def test_the_training_command_on_a_full_disk_says_so_and_goes_on_when_there_is_room(disk, capfd):
    assert train("--out", disk, "--plan", "dp=2", "--steps", 1) == 0
    (run,) = disk.glob("2*")
    leave(disk, 4096)
    capfd.readouterr()
    assert train("--out", disk, "--resume", "--steps", 200) == 1
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("gpt2lab")]
    assert "could not be written: No space left on device" in line, line
    assert checkpoint.read_state(checkpoint.all_in(run)[-1])["step"] == 1
    (disk / "filler").unlink()
    assert train("--out", disk, "--resume", "--steps", 2) == 0
    assert checkpoint.read_state(checkpoint.all_in(run)[-1])["step"] == 2


def test_a_read_only_disk_is_one_sentence_and_still_gives_its_checkpoints(disk, tmp_path, capfd):
    assert train("--out", disk, "--steps", 1) == 0
    (run,) = disk.glob("2*")
    assert mount("-o", "remount,ro", disk).returncode == 0
    with pytest.raises(checkpoint.CannotSave, match="could not be written: Read-only file system"):
        checkpoint.save(trainer("serial"), run)
    for arguments in (["--steps", 1], ["--resume", "--steps", 2]):
        capfd.readouterr()
        assert train("--out", disk, *arguments) == 1
        said = capfd.readouterr().err
        assert "gpt2lab train: " in said and "Read-only file system" in said and "Traceback" not in said
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_flip_anywhere_in_any_file_is_missed_by_nobody(ranks, tmp_path):
    ranks.run(save_twice, str(tmp_path), [])
    (folder,) = checkpoint.all_in(tmp_path)
    files = sorted(f for f in folder.iterdir() if f.name != "state.json")
    assert [f.name for f in files] == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    for file in files:
        data = file.read_bytes()
        places = sorted({round(i * (len(data) - 1) / 16) for i in range(17)})
        for at in places:  # the head, the numbers and the table of contents of a shard are all among them
            file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with pytest.raises(checkpoint.BadCheckpoint, match=f"{file.name} is damaged"):
                checkpoint.read_state(folder)
        for wrong in (b"", data[:-1], data + b"\0"):
            file.write_bytes(wrong)
            with pytest.raises(checkpoint.BadCheckpoint, match=f"{file.name} is damaged"):
                checkpoint.read_state(folder)
        file.write_bytes(data)
    assert checkpoint.read_state(folder)["step"] == 1


def test_the_training_command_names_a_damaged_shard_another_model_and_a_nan(tmp_path, capfd):
    assert train("--out", tmp_path, "--plan", "dp=2", "--steps", 1) == 0
    (run,) = tmp_path.glob("2*")
    folder = checkpoint.all_in(run)[-1]
    capfd.readouterr()
    for status, arguments, words in (
        (2, ["--resume", "--config", "mini"], f"{folder} holds another model: GPT2Config("),
        (
            1,
            ["--resume", "--lr", "1e38", "--clip", "0", "--no-cosine", "--steps", "4"],
            "Step 2: the gradient of wte.weight on rank 0",
        ),
    ):
        assert train("--out", tmp_path, *arguments) == status
        assert one_sentence(capfd).startswith(f"gpt2lab train: {words}")
    (folder / "rank1.safetensors").write_bytes(b"")
    for plan in ("dp=2", "serial"):
        assert train("--out", tmp_path, "--resume", "--plan", plan) == 2
        assert one_sentence(capfd) == (
            f"gpt2lab train: {folder}/rank1.safetensors is damaged: its sha256 is not the one in state.json. "
            "No older one is whole: train again."
        )


def one_sentence(capfd) -> str:
    said = capfd.readouterr().err
    assert "Traceback" not in said
    (line,) = [x for x in said.splitlines() if x.startswith("gpt2lab train: ")]  # beside the progress bar
    return line


@pytest.mark.parametrize("before", [[], [{"step": 1, "loss": 2.0}]], ids=["the first", "another"])
def test_a_log_entry_that_does_not_fit_leaves_no_torn_line(before, tmp_path, monkeypatch):
    from gpt2lab import run

    class Full(io.FileIO):
        def write(self, text):
            super().write(text[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = tmp_path / "log.jsonl"
    for entry in before:
        run._append(log, entry)
    held = b"".join(map(Path.read_bytes, tmp_path.iterdir()))
    monkeypatch.setattr(run, "open", Full, raising=False)
    with pytest.raises(checkpoint.CannotSave, match="log.jsonl could not be written: No space left on dev"):
        run._append(log, {"step": 2, "loss": 1.0})
    assert log.read_bytes() == held
    monkeypatch.undo()
    run._append(log, {"step": 2, "loss": 1.0})
    assert run.read_log(tmp_path) == [*before, {"step": 2, "loss": 1.0}]
