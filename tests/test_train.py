"""The training step and the run around it: rates, accumulation, resuming, stopping, refusing."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from slurm import free_ports

from gpt2lab import run
from gpt2lab.cli import main
from gpt2lab.commands.report import short
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.run import Options, read_log, start
from gpt2lab.storage import checkpoint
from gpt2lab.train import LLMC, Recipe, Trainer

pytestmark = pytest.mark.live

TINY = GPT2Config(vocab_size=50257, n_positions=16, n_layer=1, n_head=2, n_embd=8)


@pytest.fixture(autouse=True)
def tiny_nano(monkeypatch):
    from gpt2lab import model

    monkeypatch.setitem(model.PRESETS, "nano", TINY)


def test_rate_warms_up_then_follows_a_cosine_to_a_tenth():
    recipe = Recipe(lr=1.0, warmup=4, decay_steps=12)
    assert [recipe.rate(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert recipe.rate(4) == 1.0
    assert recipe.rate(8) == pytest.approx(0.55)
    assert recipe.rate(12) == recipe.rate(99) == pytest.approx(0.1)
    assert Recipe(lr=0.3).rate(10**6) == 0.3


def test_the_llmc_recipe_is_the_published_one():
    assert (LLMC.lr, LLMC.betas, LLMC.eps, LLMC.weight_decay) == (1e-4, (0.9, 0.999), 1e-8, 0.0)


def test_not_a_number_stops_before_the_update_and_names_step_tensor_and_rank():
    one = trainer_by("serial")
    before = {n: t.clone() for n, t in one.parallel.weights().items()}
    with torch.no_grad():
        one.parallel.model.h["2"].mlp.c_fc.bias[3] = math.nan
    before["h.2.mlp.c_fc.bias"][3] = math.nan
    words = "Step 0: the gradient of wte.weight on rank 0 is not finite"
    with pytest.raises(FloatingPointError, match=words):
        one.step(example_batch(CONFIG, 7, 11))
    for name, t in one.parallel.weights().items():
        assert torch.equal(t, before[name]) or name == "h.2.mlp.c_fc.bias"


@pytest.mark.parametrize(
    ("gradient", "words"),
    [(math.inf, "the gradient of ln_f.bias on"), (1e25, r"the gradient's norm \(its squares overflow\)")],
)
def test_what_is_not_finite_is_named_not_the_loss_which_is(gradient, words):
    """In 32 bits, in which the square of 1e25 is no number."""
    one = Trainer(build(Plan(), CONFIG, Mesh(), torch.float32))
    fill = lambda p: (p.grad.fill_(gradient), None)[1]  # a hook gives nothing
    one.parallel.model.ln_f.bias.register_post_accumulate_grad_hook(fill)
    with pytest.raises(FloatingPointError, match=f"Step 0: {words}.* is not finite"):
        one.step(example_batch(CONFIG, 7, 11))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"tokens": 37}, "The token 37 in row 2, column 3 is outside the vocabulary, 0 to 36"),
        ({"tokens": -1}, "The token -1 in row 2, column 3 is outside"),
        ({"targets": 40}, "The target 40 in row 2, column 3 is outside"),
        ({"targets": -7}, "The target -7 in row 2, column 3 is outside"),
    ],
)
@pytest.mark.parametrize("plan", ["serial", "tp=2"])
def test_a_token_outside_the_vocabulary_is_refused_on_every_plan(wrong, words, plan, pools):
    """Ranks with a slice of the vocabulary would look up nothing for it, and train on."""
    ((name, value),) = wrong.items()
    batch = example_batch(CONFIG, 7, 11)
    getattr(batch, name)[2, 3] = value

    def refused(rank, world_size):
        one, said = trainer_by(plan), []
        for call in (one.step, lambda batch: one.evaluate([batch])):
            with pytest.raises(ValueError) as error:
                call(batch)
            said.append(str(error.value))
        return said

    for said in pools[Plan.parse(plan).world].run(refused):
        assert all(sentence.startswith(words) for sentence in said), said


@pytest.mark.parametrize(
    "columns, total, words", [(0, 5, "7 rows of 0 tokens"), (11, 0, "with 0 targets"), (17, 5, "17 tokens")]
)
def test_an_empty_or_too_long_batch_is_refused(columns, total, words):
    whole = example_batch(replace(CONFIG, n_positions=20), 7, 17)
    batch = replace(whole.columns(torch.arange(columns)), total=total)
    with pytest.raises(ValueError, match=words):
        trainer_by("serial").step(batch)


def a_step(rank, world_size, plan, ends_at=None):
    """Loss, norm and gradients of a step, after one that ended within the backward of micro-batch `ends_at`."""
    one, batch, calls = trainer_by(plan), example_batch(CONFIG, 7, 11), []

    def no_room(*_):
        calls.append(batch)
        if len(calls) == ends_at:
            raise MemoryError

    if ends_at is not None:
        hook = one.parallel.model.h["1"].register_full_backward_hook(no_room)
        with pytest.raises(MemoryError):
            one.gradients(batch)
        hook.remove()
    return *one.gradients(batch), one.parallel.gradients()


@pytest.mark.parametrize("ends_at", [1, 2])
@pytest.mark.parametrize("more", ["", ",data=servers", ",zero=1", ",zero=2", ",zero=3", ",zero=3,refill=on"])
def test_a_step_after_one_that_was_interrupted_has_nothing_of_it(more, ends_at, pools):
    plan = f"dp=2,micro=2{more}"
    pairs = zip(pools[2].run(a_step, plan), pools[2].run(a_step, plan, ends_at), strict=True)
    for (loss, norm, right), (same, as_long, found) in pairs:
        assert abs(loss - same) < 1e-12 and abs(norm - as_long) < 1e-12
        assert all((g - found[name]).abs().max() < 1e-12 for name, g in right.items())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("plan", ["serial", "dp=2,zero=3"])
def test_a_run_that_is_not_finite_is_an_error_and_is_not_saved(value, plan, tmp_path, pools):
    """The last update may spoil the weights, and no step comes after it to notice."""

    def spoiled(rank, world_size):
        one = trainer_by(plan)
        one.step(example_batch(CONFIG, 7, 11))
        checkpoint.save(one, tmp_path)
        if rank == world_size - 1:
            with torch.no_grad():
                one.parallel.sync.pieces[-1].tensor[0] = value
        one.steps += 1
        with pytest.raises(FloatingPointError) as error:
            checkpoint.save(one, tmp_path)
        return str(error.value)

    world = Plan.parse(plan).world
    words = f"After step 2 ln_f.bias on rank {world - 1} is not finite. Nothing was saved."
    assert all(said.startswith(words) for said in pools[world].run(spoiled))
    assert [f.name for f in checkpoint.all_in(tmp_path)] == ["checkpoint-0000001"]


def test_moments_that_are_not_finite_are_not_saved_either(tmp_path):
    one = trainer_by("serial")
    one.step(example_batch(CONFIG, 7, 11))
    one.optimizer.state[one.parallel.sync.pieces[3].tensor]["exp_avg_sq"].fill_(math.inf)
    with pytest.raises(FloatingPointError, match="After step 1 h.0.ln_1.bias on rank 0 is not finite"):
        checkpoint.save(one, tmp_path)


def test_a_loss_in_evaluation_that_is_not_finite_is_an_error():
    one = trainer_by("serial")
    with torch.no_grad():
        one.parallel.sync.pieces[0].tensor[0] = math.inf
    with pytest.raises(FloatingPointError, match="After step 0 the loss in evaluation is nan"):
        one.evaluate([example_batch(CONFIG, 7, 11)])


@pytest.mark.parametrize("name", ["lr", "clip", "weight_decay", "timeout"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_option_that_is_no_finite_number_is_refused(name, value, tmp_path, capsys):
    flag = f"--{name.replace('_', '-')}"
    assert main(["train", "--plan", "dp=2", flag, value, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"gpt2lab train: {flag} {value} is no finite number. Use another.\n"
    assert not list(tmp_path.iterdir())


def test_a_wild_learning_rate_fails_and_saves_nothing_that_is_not_finite(tmp_path, capsys):
    """The update of the only step makes weights of infinity."""
    told = ["--steps=1", "--batch=2", "--sequence=8", "--lr=1e38", "--warmup=0", "--clip=0", "--sample=0"]
    assert main(["train", *told, "--out", str(tmp_path)]) == 1
    assert "After step 1 the loss in evaluation is nan. Try a lower" in capsys.readouterr().err
    assert checkpoint.all_in(next(tmp_path.iterdir())) == []


def options(**changes) -> Options:
    return replace(Options(steps=6, batch=2, sequence=8, evaluate=3, save=2, dtype="float64"), **changes)


def test_a_resumed_run_goes_on_bitwise(tmp_path):
    straight = start(0, 1, options(cosine=False), None, False)
    for steps, resumed in ((4, False), (6, True)):
        (last,) = start(0, 1, options(cosine=False, steps=steps), str(tmp_path), resumed)
        assert last == read_log(tmp_path)[-1]
    assert [e["loss"] for e in read_log(tmp_path)] == [e["loss"] for e in straight]


def test_the_last_step_is_evaluated_wherever_it_falls(tmp_path):
    start(0, 1, options(steps=4), str(tmp_path), False)
    assert [entry["step"] for entry in read_log(tmp_path) if "val" in entry] == [3, 4]


@pytest.mark.parametrize("steps, background", [(1, False), (4, True), (6, False), (6, True)])
def test_a_finished_run_that_is_resumed_changes_no_checkpoint(steps, background, tmp_path):
    told = options(background=background)
    start(0, 1, told, str(tmp_path), False)
    files = lambda: {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    before, newest = files(), checkpoint.all_in(tmp_path)[-1]
    for source in (True, newest, str(newest)):
        assert start(0, 1, replace(told, steps=steps), str(tmp_path), source) == []
        assert files() == before
    assert checkpoint.best(tmp_path) == newest
    elsewhere = tmp_path / "elsewhere"  # a run of its own does save what it has
    start(0, 1, told, str(elsewhere), newest)
    assert len(checkpoint.all_in(elsewhere)) == 1


def test_a_step_is_in_the_log_before_it_is_in_a_checkpoint(tmp_path, monkeypatch):
    logged = []
    right = checkpoint.Saver.save

    def save(self, **state):
        logged.append([entry["step"] for entry in read_log(tmp_path)])
        return right(self, **state)

    monkeypatch.setattr(checkpoint.Saver, "save", save)
    start(0, 1, Options(steps=4, save=2, batch=2, sequence=16, fast=False), str(tmp_path), False)
    assert logged == [[1, 2], [1, 2, 3, 4]]


def test_a_benchmark_neither_validates_nor_writes(tmp_path):
    log = start(0, 1, options(bench=True, evaluate=1, save=1), str(tmp_path), False)
    assert all("val" not in e for e in log) and checkpoint.all_in(tmp_path) == []


def test_too_much_asked_of_the_text_is_refused_with_both_numbers(tmp_path):
    import numpy as np

    from gpt2lab.corpus import shards

    shards.write_shard(tmp_path / "short.bin", [np.arange(50)])
    with pytest.raises(ValueError, match="needs 9 tokens, but the val split here has 5"):
        options(data=str(tmp_path / "short.bin")).check()


COMMAND = [sys.executable, "-m", "gpt2lab", "train", "--sequence", "16", "--batch", "2", "--save", "1000"]


def test_ctrl_c_ends_cleanly_with_a_checkpoint_and_resume_goes_on(tmp_path):
    command = [*COMMAND, "--out", str(tmp_path), "--sample", "4"]
    process = subprocess.Popen(
        [*command, "--steps", "100000"], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )
    threading.Thread(target=process.stderr.read, daemon=True).start()
    logs = []
    while not logs and process.poll() is None:
        time.sleep(0.1)
        logs = list(tmp_path.glob("*/log.jsonl"))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Continue with: gpt2lab train --resume" in out
    done = len(read_log(logs[0].parent))
    steps = str(done + 2)
    again = subprocess.run(
        [*command, "--resume", "--steps", steps],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"MPLBACKEND": "no such"},  # the curve opens no window
    )
    assert again.returncode == 0, again.stderr
    assert len(read_log(logs[0].parent)) == done + 2
    assert (logs[0].parent / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((logs[0].parent / "options.json").read_text())["steps"] == 100000


def losses(steps=20, **options) -> list[float]:
    """Of a few steps of a tiny model under some options."""
    chosen = Options(steps=steps, batch=2, sequence=16, bench=True, fast=False, **options)
    return [entry["loss"] for entry in start(0, 1, chosen, None, False)]


def test_autocast_multiplies_in_bfloat16_and_follows_the_curve_of_float32():
    plain, cast = losses(chunked=False), losses(autocast=True)
    assert plain != cast
    assert cast == pytest.approx(plain, rel=1e-2)
    lab = trainer_by("serial", recipe=Recipe(autocast=True), dtype=torch.float32)
    seen = []
    lab.parallel.model.h["0"].mlp.c_fc.register_forward_hook(lambda module, x, out: seen.append(out.dtype))
    lab.step(example_batch(CONFIG, 7, 11))
    assert seen == [torch.bfloat16]
    assert {piece.tensor.dtype for piece in lab.parallel.sync.pieces} == {torch.float32}


def test_compile_is_refused_where_it_cannot_work(monkeypatch):
    with pytest.raises(ValueError, match="pp=2.*cuts them"):
        Options(plan="pp=2", compile=True, config="gpt2", batch=4, sequence=16).check()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="needs a C"):
        Options(compile=True, batch=2, sequence=16).check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own imports and its own looks at tensors
@pytest.mark.parametrize("chunked", [True, False])
def test_a_compiled_model_gives_the_same_losses(chunked):
    """Its blocks and, where the logits are whole, its end."""
    assert losses(steps=4, compile=True, chunked=chunked) == pytest.approx(losses(steps=4), rel=1e-4)


def test_each_step_says_its_tokens_a_second_and_its_share_of_the_machine(monkeypatch):
    """MFU: operations of the step over seconds, over the measured rate of products; what the progress bar shows."""
    monkeypatch.setattr(run.speed, "matmul_rate", lambda **_: 1e12)
    shown = []
    for entry in start(0, 1, options(steps=2, bench=True), None, False, lambda e: shown.append(short(e))):
        assert entry["tokens_per_s"] == pytest.approx(2 * 8 / entry["seconds"])
        # 6 N + 12 L C T for each of B T tokens
        flops = (6 * (TINY.parameters - 16 * 8) + 12 * 1 * 8 * 8) * 2 * 8
        assert entry["mfu"] == pytest.approx(flops / entry["seconds"] / 1e12)
        text = f"loss {entry['loss']:.3f}, {entry['tokens_per_s']:,.0f} tokens/s, MFU {entry['mfu']:.0%}"
        assert shown.pop(0) == text


def test_no_step_uses_more_than_the_whole_machine(monkeypatch):
    """Where something else slowed the measurement of its rate, the quickest step so far is the whole of it."""
    monkeypatch.setattr(run.speed, "matmul_rate", lambda **_: 1.0)
    entries, least = start(0, 1, options(steps=4, bench=True), None, False), float("inf")
    for entry in entries:
        least = min(least, entry["seconds"])
        assert entry["mfu"] == pytest.approx(least / entry["seconds"])
    assert len(entries) == 4


def test_ctrl_c_under_a_launcher_ends_a_fresh_run_with_a_checkpoint(tmp_path):
    """As torchrun and srun do it: every rank gets the signal, and none knew the run's folder when it started."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    job |= {"GLOO_SOCKET_IFNAME": "lo"}
    command = [*COMMAND, "--plan", "dp=2", "--steps", "100000", "--sample", "0", "--out", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | job | {"RANK": r, "LOCAL_RANK": r}, stdout=subprocess.PIPE, text=True
        )
        for r in "01"
    ]
    try:
        while not list(tmp_path.glob("*/log.jsonl")) and all(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0]
    (folder,) = tmp_path.glob("*")
    assert "Continue with: gpt2lab train --resume" in said[0] and not (folder / run.STOP).exists()
    (saved,) = checkpoint.all_in(folder)
    assert checkpoint.read_state(saved)["step"] == len(read_log(folder))
