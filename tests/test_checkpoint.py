"""Checkpoints change shape, are whole or absent whatever is killed while they are written, and say what is wrong."""

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from gpt2lab import model
from gpt2lab.compositions import Composition
from gpt2lab.corpus.storage import replacing
from gpt2lab.experts.mixture import ROUTERS
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.boxes import Box, Entry, entry_of, rectangles, whole
from gpt2lab.parallel.spec import Cut, Spec, slice_of
from gpt2lab.plan import Plan, build
from gpt2lab.processes.launch import RankFailed, Ranks
from gpt2lab.ranks.mesh import Axis, Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.run import Options
from gpt2lab.run import start as run_from
from gpt2lab.storage import checkpoint, huggingface, reading, writing
from gpt2lab.train import Recipe, Trainer

pytestmark = pytest.mark.live

PLANS = (
    "serial", "dp=4,zero=1", "dp=3,zero=3", "dp=2,data=servers", "tp=2,sp=on", "tp=2,dp=2,zero=3",
    "pp=2,micro=2,schedule=interleaved", "pp=2,micro=2,schedule=chimera", "pp=2,dp=2,micro=2,zero=2",
    "pp=2,tp=2,micro=2,sp=on", "cp=2,dp=2,layout=zigzag,exchange=ring",
)  # fmt: skip


def trainer(plan="serial", config=CONFIG, recipe=None) -> Trainer:
    plan = Plan.parse(plan)
    return Trainer(build(plan, config, Mesh(**plan.axes), torch.float64), recipe or Recipe())


def steps(one, count) -> list[float]:
    return [one.step(example_batch(CONFIG, 7, 12 - one.steps % 2)).loss for _ in range(count)]


def train_and_save(rank, world, plan, run, background=False, *model):
    one = trainer(plan, *model)
    saver = checkpoint.Saver(one, run, background=background)
    steps(one, 2)
    folder = saver.save()
    losses = steps(one, 3)
    saver.finish()
    return str(folder), losses


def resume(rank, world, plan, folder, *model):
    one = trainer(plan, *model)
    checkpoint.load(folder, one)
    return steps(one, 3)


def on(pools, plan, fn, *args):
    world = Plan.parse(plan).world
    return fn(0, 1, plan, *args) if world == 1 else pools[world].run(fn, plan, *args)[0]


@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 4, 2)])
def test_rectangles_are_the_stretch_in_its_order(shape):
    t = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(t.numel() + 1):
        for stop in range(start, t.numel() + 1):
            found = []
            for offsets, sizes in rectangles(shape, start, stop):
                found += t[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
            assert [int(x) for x in found] == list(range(start, stop))


@pytest.mark.parametrize("dim, groups", [(0, 1), (1, 1), (0, 3)])
def test_boxes_of_stretches_of_slices_cover_the_whole_once(dim, groups):
    whole = torch.arange(9.0 * 4).view(9, 4)
    seen = torch.full_like(whole, -1)
    spec = Spec(cuts=(Cut("tp", dim, whole.size(dim), groups),))
    for rank in range(2):
        mesh = {"tp": Axis("tp", (0, 1), rank)}
        part = slice_of(whole, rank, 2, dim, groups)
        half = part.numel() // 2 + 1
        for start, stretch in ((0, part.flatten()[:half]), (half, part.flatten()[half:])):
            for box in entry_of(stretch, part.shape, start, spec, mesh).boxes:
                ends = zip(box.offsets, box.tensor.shape, strict=True)
                view = seen[tuple(slice(o, o + s) for o, s in ends)]
                assert (view == -1).all()
                view.copy_(box.tensor)
    assert torch.equal(seen, whole)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """For each plan: its checkpoint after two steps, and the losses of the three steps that follow."""
    return {p: on(pools, p, train_and_save, str(tmp_path_factory.mktemp("run"))) for p in PLANS}


def test_a_run_that_is_saved_before_its_first_step_goes_on_from_there(tmp_path):
    folder = checkpoint.Saver(trainer(), tmp_path).save()
    for recipe in (Recipe(), Recipe("sgd", lr=0.1)):  # without a step there is nothing of an optimizer
        again = trainer(recipe=recipe)
        assert checkpoint.load(folder, again)["step"] == again.steps == 0 and not again.optimizer.state
        assert steps(again, 2) == steps(trainer(recipe=recipe), 2)


def writers(reader: str) -> list[str]:
    """Whose checkpoints a plan goes on from: its own and another's. With SLOW in the environment, everybody's."""
    chosen = {reader, PLANS[PLANS.index(reader) - 4]}
    return [plan for plan in PLANS if plan in chosen or os.environ.get("SLOW")]


@pytest.mark.parametrize("reader", PLANS)
def test_saved_on_any_plan_resumed_on_any_other_with_the_same_next_losses(reader, saved, pools):
    for writer in writers(reader):
        folder, expected = saved[writer]
        found = on(pools, reader, resume, folder)
        assert found == pytest.approx(expected, rel=1e-12), writer
        if reader == writer:
            assert found == expected


def tensors(folder) -> dict[str, torch.Tensor]:
    """Every whole tensor in a folder, weights and moments, in the type in which it was stored."""
    found = {}
    for name, boxes in reading.stored(Path(folder)).items():
        ends = [map(sum, zip(b.offsets, b.sizes, strict=True)) for b in boxes]
        shape = tuple(map(max, zip(*ends, strict=True)))
        dtype = boxes[0].tensor[tuple(slice(0, 1) for _ in shape)].dtype
        found[name] = torch.full(shape, torch.nan, dtype=dtype)
    reading.read(Path(folder), {name: whole(t) for name, t in found.items()})
    return found


def saved_again(rank, world, plan, folders, run, *model):
    """Load one checkpoint after the other into the same trainer, and save each again."""
    one, again = trainer(plan, *model), []
    for folder in folders:
        checkpoint.load(folder, one)
        again.append(str(checkpoint.save(one, f"{run}/{len(again)}")))
    return again


@pytest.fixture(scope="module")
def more(saved, pools, tmp_path_factory):
    """Checkpoints of the plans above, of two levels of data parallelism, and of a pipeline without a flush."""
    plans = "dp=4,zero=3,shard=2", "pp=2,dp=2,micro=2,schedule=2bw"
    made = {p: on(pools, p, train_and_save, str(tmp_path_factory.mktemp("run"))) for p in plans}
    return {plan: (folder, tensors(folder)) for plan, (folder, _) in (saved | made).items()}


@pytest.mark.parametrize("reader", [*PLANS, "dp=4,zero=3,shard=2", "pp=2,dp=2,micro=2,schedule=2bw"])
def test_every_plan_reads_exactly_what_every_plan_has_written(reader, more, pools, tmp_path):
    again = on(pools, reader, saved_again, [folder for folder, _ in more.values()], str(tmp_path))
    for (writer, (_, right)), folder in zip(more.items(), again, strict=True):
        found = tensors(folder)
        assert found.keys() == right.keys() and len(found) == 3 * len([*build(Plan(), CONFIG, Mesh()).specs])
        same = lambda one, other: one.dtype == other.dtype and torch.equal(one, other)
        assert not [name for name, t in right.items() if not same(t, found[name])], writer


MODELS = [(router, "adamw") for router in ("", *ROUTERS)]
MODELS += [(router, optimizer) for router in ("", "gshard") for optimizer in ("sgd", "muon")]


@pytest.mark.parametrize("router, optimizer", MODELS)
def test_every_model_goes_on_on_its_own_plan_bit_for_bit_and_on_others(router, optimizer, pools, tmp_path):
    whole = optimizer == "muon"  # Muon needs whole matrices
    if router:
        config = replace(Composition("", router=router).config, n_layer=3)
        plans = ("serial", "dp=2,ep=2", "dp=2,ep=2,tp=2" if whole else "dp=2,ep=2,zero=3", "pp=2")
    else:
        config = CONFIG
        plans = ("serial", "tp=2,sp=on", "dp=3,zero=3" + ",data=owner" * whole, "pp=2,schedule=interleaved")
    said = config, Recipe(optimizer, lr=1e-2)
    saved = {p: on(pools, p, train_and_save, str(tmp_path / p), False, *said) for p in plans}
    for reader, writer in zip((*plans, *plans), (*plans, *plans[1:], plans[0]), strict=True):
        folder, expected = saved[writer]
        found = on(pools, reader, resume, folder, *said)
        right = expected if reader == writer else pytest.approx(expected, rel=1e-12)
        assert found == right, (reader, writer)


KINDS = {
    "0-d": torch.tensor(2.5),
    "one number": torch.tensor([7.0]),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).view(2, 3) / 3,
    "float16": torch.arange(6, dtype=torch.float16),
    "float64": torch.arange(6, dtype=torch.float64).view(1, 2, 3) / 3,
    "not a number": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]),
    "columns": torch.arange(12.0).view(3, 4)[:, 1:3],
    "integers": torch.tensor([2**62 + 1]),
}


def written(folder: Path, *ranks: dict[str, Entry]) -> Path:
    """The folder that these ranks write together, each in a thread of its own."""
    meet, values = threading.Barrier(len(ranks)), [None] * len(ranks)

    def of(rank):
        def gather(value):
            values[rank] = value
            meet.wait()
            everywhere = list(values)
            meet.wait()
            return everywhere

        writing.write(folder, ranks[rank], {"config.json": "{}"}, STATE, rank, gather)

    threads = [threading.Thread(target=of, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder


STATE = {"step": 1, "plan": "serial", "optimizer": "adamw"}


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    folder = written(tmp_path / "one", {name: whole(t) for name, t in KINDS.items()})
    assert {name: value for name, value in reading.read_state(folder).items() if name != "sha256"} == STATE
    back = {name: torch.zeros_like(t) for name, t in KINDS.items()}
    reading.read(folder, {name: whole(t) for name, t in back.items()})
    bits = lambda t: t.contiguous().view(-1).view(torch.uint8)
    for name, right in KINDS.items():
        assert torch.equal(bits(back[name]), bits(right)), name
        stored = reading.stored(folder)[name][0].tensor[tuple(slice(0, n) for n in right.shape)]
        assert stored.dtype == right.dtype


def test_two_holders_of_one_tensor_and_one_with_nothing(tmp_path):
    """A tied copy is written once, who has an empty shard takes part, and a load may want a cut that no rank had."""
    tied, flat = torch.arange(12.0).view(4, 3), torch.arange(10.0)
    halves = [Box((0,), (7,), flat[:7]), Box((7,), (3,), flat[7:])]
    first = {"tied": whole(tied), "flat": Entry((10,), halves[:1])}
    last = {"tied": whole(tied.clone()), "flat": Entry((10,), halves[1:])}
    folder = written(tmp_path / "one", first, {}, last)
    assert {name: len(boxes) for name, boxes in reading.stored(folder).items()} == {"tied": 1, "flat": 2}
    assert len(list(folder.glob("rank*.safetensors"))) == 3
    middle, empty = torch.zeros(2, 2), torch.zeros(0)
    inner, none = Box((1, 1), (2, 2), middle), Box((3,), (0,), empty)
    reading.read(folder, {"tied": Entry((4, 3), [inner]), "flat": Entry((10,), [none])})
    assert torch.equal(middle, tied[1:3, 1:3])
    across = torch.zeros(5)
    reading.read(folder, {"flat": Entry((10,), [Box((4,), (5,), across)])})
    assert torch.equal(across, flat[4:9])


def test_a_file_is_as_open_as_its_folder(tmp_path):
    mask = os.umask(0o027)
    try:
        written(tmp_path / "one", {"a": whole(torch.ones(3))})
        huggingface.save(model.GPT2(CONFIG), tmp_path / "two")
    finally:
        os.umask(mask)
    files = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*")}
    names = ("config.json", "rank0.safetensors", "state.json", "model.safetensors")
    assert files == dict.fromkeys(names, 0o640)


def test_a_file_system_without_modes_keeps_what_is_saved(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refuse)  # pathlib and shutil call this one too
    checkpoint.read_state(checkpoint.save(trainer(), tmp_path))
    checkpoint.export(tmp_path / checkpoint.name(0), tmp_path / "exported")
    with replacing(tmp_path / "file") as file:
        file.write(b"text")
    assert (tmp_path / "file").read_bytes() == b"text"


def go_on(rank, world, plan, run):
    """Save after two updates and after four, in one go and with a resume in between."""
    batches = [example_batch(CONFIG, 8, 12, t) for t in range(4)]
    one, two = trainer(plan), trainer(plan)
    one.stream(batches[:2])
    middle = checkpoint.save(one, f"{run}/straight")
    one.stream(batches[2:])
    checkpoint.load(middle, two)
    two.stream(batches[2:])
    return str(checkpoint.save(one, f"{run}/straight")), str(checkpoint.save(two, f"{run}/resumed"))


@pytest.mark.parametrize("plan", ["pp=2,schedule=pipedream", "pp=3,micro=2,schedule=pipedream_vertical"])
def test_moments_of_a_tied_weight_are_those_of_the_stage_that_updates_it(plan, pools, tmp_path):
    """The other stage's are as old as its last resume."""
    straight, resumed = map(tensors, on(pools, plan, go_on, str(tmp_path)))
    assert straight.keys() == resumed.keys()
    assert not [name for name, t in straight.items() if not torch.equal(t, resumed[name])]


def test_no_rank_writes_everything_and_replicas_share_the_writing(saved):
    for plan in PLANS[1:]:
        sizes = [f.stat().st_size for f in Path(saved[plan][0]).glob("*.safetensors")]
        assert len(sizes) == Plan.parse(plan).world
        assert max(sizes) < 0.8 * sum(sizes), plan


def test_the_exported_model_is_the_same_from_every_plan(saved, tmp_path):
    models = {}
    for plan, (folder, _) in saved.items():
        checkpoint.export(folder, tmp_path / "out")
        models[plan] = huggingface.load(tmp_path / "out", torch.float64).state_dict()
        direct = huggingface.load(folder, torch.float64).state_dict()
        assert all(torch.equal(direct[n], t) for n, t in models[plan].items())
    one = trainer()
    checkpoint.load(saved["serial"][0], one)
    for found in (one.parallel.weights(), *models.values()):
        for n, t in models["serial"].items():
            assert (found[n] - t).abs().max() <= 1e-12


def test_a_save_in_the_background_holds_the_step_at_which_it_was_asked_for(saved, pools, tmp_path):
    folder, expected = on(pools, "dp=3,zero=3", train_and_save, str(tmp_path), True)
    assert expected == saved["dp=3,zero=3"][1]
    assert on(pools, "dp=3,zero=3", resume, folder) == expected


class WhenJoined:
    """A thread that runs only when somebody waits for it."""

    def __init__(self, target, args, daemon):
        self.join = lambda: target(*args)

    def start(self):
        pass


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "Thread", WhenJoined)
    one = trainer()
    saver = checkpoint.Saver(one, tmp_path, keep=9, background=True)
    for one.steps in range(3):
        saver.save()
    saver.finish()
    assert [int(f.name[-1]) for f in checkpoint.all_in(tmp_path)] == [0, 1, 2]


def test_a_rank_seals_only_what_it_wrote(tmp_path):
    """What another rank is still writing has no digest yet; what it says later is in the state."""
    one, said = trainer(), []

    def gather(mine):
        said.append(mine)
        if len(said) < 3:
            (tmp_path / "one.partial" / "rank1.safetensors").write_bytes(b"half")
        other = {0: {}, 1: ("rank1.safetensors", "its digest"), 2: None}[len(said) - 1]
        return [mine, (other, "")]

    writing.write(tmp_path / "one", checkpoint.entries(one), {"config.json": ""}, {"step": 1}, 0, gather)
    (file, right), _ = said[1]
    assert file == "rank0.safetensors" and right == reading.digest(tmp_path / "one" / file)
    sealed = json.loads((tmp_path / "one" / "state.json").read_text())["sha256"]
    assert sealed["rank1.safetensors"] == "its digest"
    assert sorted(sealed) == ["config.json", file, "rank1.safetensors"]


def test_what_several_ranks_hold_is_written_once_by_whom_has_least_to_write():
    rows = lambda *which: ((4, 3), [((row, 0), (1, 3)) for row in which])
    every = rows(0, 1, 2, 3)
    held = [{"b": every, "a": rows(0, 1)}, {"b": every, "a": rows(2)}, {"a": rows(2, 3)}]
    assert [len(mine) for mine in writing.who_writes(held)] == [3, 3, 2]
    written = [box for mine in writing.who_writes(held) for box in mine]
    assert sorted(written) == [(name, (row, 0)) for name in "ab" for row in range(4)]


def test_boxes_that_do_not_make_up_a_tensor_are_not_written():
    right = [((0, 0), (3, 1)), ((0, 1), (2, 3)), ((2, 1), (1, 3))]  # of 3 x 4
    writing.who_writes([{"x": ((3, 4), right)}, {"one number": ((), [((), ())])}])
    for found, words in (
        (right[:2], "12 elements, of which 9"),
        ([*right[:2], ((2, 2), (1, 3))], "not inside"),
        ([((-1, 0), (3, 1)), *right[1:]], "not inside"),
        ([right[0], ((0, 1), (1, 3)), ((1, 0), (1, 3)), right[2]], "in common"),
        ([((0, 0), (2, 2)), ((0, 2), (1, 2)), ((1, 1), (1, 3)), ((2, 0), (1, 3))], "in common"),
        ([((0,), (12,))], "not inside"),
    ):
        with pytest.raises(ValueError, match=words):
            writing.who_writes([{"x": ((3, 4), found[:1])}, {"x": ((3, 4), found[1:])}])


def resumed_in_16_bits(rank, world, run):
    """The losses of two steps after a save, twice: of the run itself, and of one that resumes; the moments' types."""

    def fresh():
        return Trainer(build(Plan(dp=2, zero=1), CONFIG, Mesh(dp=2), torch.bfloat16))

    one = fresh()
    one.step(example_batch(CONFIG, 7, 11))
    folder, again = checkpoint.save(one, run), fresh()
    checkpoint.load(folder, again)
    types = {t.dtype for state in again.optimizer.state.values() for t in state.values() if t.dim()}
    return [[t.step(example_batch(CONFIG, 7, 11)).loss for _ in range(2)] for t in (one, again)], types


def test_the_moments_of_32_bit_masters_are_resumed_in_32_bits(pools, tmp_path):
    for (straight, resumed), types in pools[2].run(resumed_in_16_bits, str(tmp_path)):
        assert straight == resumed and types == {torch.float32}


def test_the_best_by_validation_stays_beside_the_newest(tmp_path):
    one = trainer()
    saver = checkpoint.Saver(one, tmp_path, keep=2)
    for step, val in enumerate([3.0, 1.0, 2.0, None, 2.5]):
        one.steps = step
        saver.save(val=val)
    assert [int(f.name[-1]) for f in checkpoint.all_in(tmp_path)] == [1, 3, 4]
    assert checkpoint.best(tmp_path).name.endswith("1")
    assert checkpoint.best(tmp_path / "none") is None


def test_a_run_s_checkpoints_are_those_it_named_in_the_order_of_their_steps(tmp_path):
    """A copy beside them was deleted, kept in place of a newer one, or resumed; eight digits came before seven."""
    one, copies = trainer(), [tmp_path / f"checkpoint-{name}" for name in ("0000001-mine", "keep", "1")]
    saver = checkpoint.Saver(one, tmp_path, keep=2)
    for one.steps in (1, 9_999_999, 10_000_000):
        saved = saver.save(val=1.0 + (one.steps == 1))
        for copy in copies if one.steps == 1 else ():
            shutil.copytree(saved, copy)
    before, newest = checkpoint.all_in(tmp_path)
    assert (before.name, newest.name) == (checkpoint.name(9_999_999), checkpoint.name(10_000_000))
    for damaged, way in ((newest, f"--resume {before}."), (copies[0], "No older one is whole: train again.")):
        (damaged / "config.json").write_text("{}")
        with pytest.raises(checkpoint.BadCheckpoint, match=f"{re.escape(way)}$"):
            checkpoint.read_state(damaged)
    assert all(checkpoint.read_state(copy)["step"] == 1 for copy in copies[1:])


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_the_best_is_never_one_whose_loss_is_no_number(worst, tmp_path):
    one = trainer()
    saver = checkpoint.Saver(one, tmp_path, keep=9)
    for step, val in enumerate([worst, 2.0, 1.5]):
        one.steps = step
        saver.save(val=val)
    assert checkpoint.best(tmp_path).name.endswith("2")


def save_until_killed(rank, world, run, background):
    one = trainer("dp=2,zero=1")
    saver = checkpoint.Saver(one, run, background=background)
    Path(run, f"pid.{rank}").write_text(str(os.getpid()))
    while True:
        steps(one, 1)
        saver.save()
        if rank == 0:  # in the background, the save before has now ended
            Path(run, "told").write_text(str(one.steps - background))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("background", [False, True])
def test_twenty_kills_during_saves_never_tear_or_lose_a_checkpoint(background, tmp_path):
    chance = random.Random(8)
    with Ranks(2, echo=False, timeout=60) as pool:
        for trial in range(20):
            run = tmp_path / str(trial)
            run.mkdir()
            victims = chance.choice([(0,), (1,), (0, 1)])

            later = chance.uniform(0, 0.6)

            def kill(run=run, victims=victims, later=later):
                while not ((run / "told").exists() and (run / "told").read_text() > "0"):  # one is whole
                    time.sleep(0.01)
                time.sleep(later)
                for rank in victims:
                    os.kill(int((run / f"pid.{rank}").read_text()), signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(RankFailed):
                pool.run(save_until_killed, str(run), background)
            killer.join()
            found = checkpoint.all_in(run)
            told = (run / "told").read_text()
            assert checkpoint.read_state(found[-1])["step"] >= int(told or 1), trial
            for folder in found:
                checkpoint.read_state(folder)
            checkpoint.load(found[-1], trainer())


@pytest.mark.parametrize(
    "call, after",
    [("rename", 0), ("rename", 1), ("rmtree", 1), ("rmtree", 2), ("fsync", 0), ("fsync", 3), ("fsync", 4)],
)
def test_stopping_inside_the_exchange_of_two_checkpoints_of_one_step_keeps_one(
    call, after, tmp_path, monkeypatch
):
    one, left = trainer(), [after]
    checkpoint.save(one, tmp_path)

    def stop(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return right(*args, **kwargs)

    owner = {"rename": Path, "rmtree": writing.shutil, "fsync": writing.os}[call]
    right = getattr(owner, call)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, stop)
        with pytest.raises((KeyboardInterrupt, checkpoint.CannotSave)):
            checkpoint.save(one, tmp_path)
    assert checkpoint.read_state(checkpoint.all_in(tmp_path)[-1])["step"] == 0
    checkpoint.save(one, tmp_path)
    assert len(checkpoint.all_in(tmp_path)) == 1


def test_what_a_killed_save_or_removal_has_left_goes_with_the_next_save(tmp_path, monkeypatch):
    def stop(*_, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    one, own = trainer(), ["checkpoint-1.partial", "checkpoint-mine.partial"]
    saver = checkpoint.Saver(one, tmp_path, keep=1)
    for name in own:
        (tmp_path / name).mkdir()
    saver.save()
    for one.steps, (owner, call) in enumerate([(writing, "_replace"), (writing.shutil, "rmtree")], 1):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, call, stop)
            saver.save()
    one.steps += 1
    saver.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0000003", *own]


def save_with_a_full_disk(rank, world, run):
    one = trainer("dp=2,zero=1")
    steps(one, 1)
    checkpoint.save(one, run)
    steps(one, 1)
    if rank == 1:

        def full(*_):
            raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})")

        writing.save_file = full
    try:
        checkpoint.save(one, run)
    except checkpoint.CannotSave as error:
        return str(error)


def test_a_full_disk_is_one_sentence_on_every_rank_and_costs_nothing(tmp_path):
    with Ranks(2, echo=False) as pool:
        for said in pool.run(save_with_a_full_disk, str(tmp_path)):
            assert "checkpoint-0000002 could not be written: No space left on device (rank 1)." in said
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint-0000001"]
    assert checkpoint.read_state(tmp_path / "checkpoint-0000001")["step"] == 1


def test_what_is_flushed_is_closed_again(tmp_path):
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    checkpoint.save(trainer(), tmp_path)
    with open(os.devnull) as lowest:
        assert lowest.fileno() == free


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    run = tmp_path / "run"
    run.write_text("a file stands where the folder should be")  # root may write to read-only folders
    with pytest.raises(checkpoint.CannotSave, match="could not be written: (Not a directory|File exists)"):
        checkpoint.save(trainer(), run)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(checkpoint.CannotSave, match="could not be written: Permission denied"):
        checkpoint.save(trainer(), tmp_path)


@pytest.mark.parametrize("where", ["write", "remove"])
def test_what_stops_a_save_in_the_background_is_raised_by_finish(where, tmp_path, monkeypatch):
    def stop(*_):
        raise RuntimeError("a peer is gone")

    one = trainer()
    saver = checkpoint.Saver(one, tmp_path, keep=1, background=True)
    saver.save()
    saver.finish()
    one.steps += 1
    monkeypatch.setattr(writing, where, stop)
    saver.save()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        saver.finish()
    saver.finish()  # told once


@pytest.fixture
def tiny(monkeypatch):
    """The smallest preset, smaller still."""
    config = GPT2Config(vocab_size=50257, n_positions=16, n_layer=1, n_head=2, n_embd=8)
    monkeypatch.setitem(model.PRESETS, "nano", config)


def test_a_run_that_becomes_not_a_number_still_ends_the_save_under_way(tiny, tmp_path, monkeypatch):
    right = checkpoint.Saver._write
    monkeypatch.setattr(checkpoint.Saver, "_write", lambda *args: (time.sleep(0.5), right(*args)))
    options = Options(steps=9, batch=2, sequence=8, save=1, background=True, fast=False)
    wild = replace(options, lr=1e30, clip=0.0, warmup=0, cosine=False)
    with pytest.raises(FloatingPointError):
        run_from(0, 1, wild, str(tmp_path), None)
    assert checkpoint.read_state(checkpoint.all_in(tmp_path)[-1])["step"] >= 1


def test_a_run_goes_on_with_the_checkpoint_that_is_named(tiny, tmp_path):
    from gpt2lab.cli import main

    said = ["train", "--batch", "2", "--sequence", "8", "--sample", "0", "--save", "1", "--no-fast"]
    assert main([*said, "--out", str(tmp_path), "--steps", "2"]) == 0
    (run,) = tmp_path.iterdir()
    older, newest = checkpoint.all_in(run)
    (newest / "config.json").write_text("{}")
    assert main(["train", "--resume", str(run)]) == 2  # damaged
    assert main(["train", "--resume", str(older)]) == 0
    (beside,) = set(tmp_path.iterdir()) - {run}
    assert [checkpoint.read_state(found)["step"] for found in checkpoint.all_in(beside)] == [2]
    assert checkpoint.all_in(run) == [older, newest] and (newest / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["rank1.safetensors", "rank2.safetensors"])
def test_damage_is_told_on_every_rank(name, pools, saved, tmp_path):
    """Also where there are more files than ranks to check them."""
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(saved["dp=3,zero=3"][0], folder)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def refused(rank, world, folder):
        try:
            checkpoint.load(folder, trainer("dp=3"))
        except checkpoint.BadCheckpoint as error:
            return str(error)

    for said in pools[3].run(refused, str(folder)):
        assert f"{name} is damaged" in said


def test_another_model_and_another_optimizer_are_refused(saved):
    folder = saved["serial"][0]
    with pytest.raises(checkpoint.BadCheckpoint, match="holds another model: .*n_layer=5"):
        checkpoint.load(folder, trainer(config=replace(CONFIG, n_layer=2)))
    with pytest.raises(checkpoint.BadCheckpoint, match="trained with adamw, whose state sgd cannot go on"):
        checkpoint.load(folder, trainer(recipe=Recipe("sgd")))
