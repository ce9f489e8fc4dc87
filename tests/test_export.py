"""A checkpoint of any plan becomes the model that transformers reads."""

import pytest
import torch
from transformers import GPT2LMHeadModel

from gpt2lab.cli import main
from gpt2lab.plan import Plan, build
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.storage import checkpoint
from gpt2lab.train import Trainer

TOKENS = torch.arange(22).reshape(2, 11) % CONFIG.vocab_size


def trained(rank, world_size, plan, run):
    """Two steps on a plan, with a checkpoint after each; the first one validates better."""
    plan = Plan.parse(plan)
    trainer = Trainer(build(plan, CONFIG, Mesh(**plan.axes), torch.float64))
    for val in (1.0, 2.0):
        trainer.step(example_batch(CONFIG, 7, 11))
        checkpoint.save(trainer, run, val=val)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: `0-serial` and, newer by its name, `1-parallel` of the same steps on four ranks."""
    folder = tmp_path_factory.mktemp("runs")
    trained(0, 1, "serial", folder / "0-serial")
    with Ranks(4, echo=False, timeout=120) as ranks:
        ranks.run(trained, "pp=2,tp=2,micro=2", str(folder / "1-parallel"))
    return folder


def answers(folder):
    model = GPT2LMHeadModel.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    assert model.dtype == torch.float64
    with torch.no_grad():
        return model(TOKENS).logits


def test_transformers_answers_the_same_from_every_plan(runs, tmp_path, capsys):
    for run in runs.iterdir():
        assert main(["export", "--run", str(run), "--out", str(tmp_path / run.name)]) == 0
    said = capsys.readouterr().out
    assert "(step 2, plan pp=2,tp=2,micro=2)" in said and "generate --model" in said
    serial, parallel = answers(tmp_path / "0-serial"), answers(tmp_path / "1-parallel")
    assert (serial - parallel).abs().max() < 1e-12 and serial.abs().max() > 1e-3


def test_the_newest_run_is_the_default_and_best_means_the_lowest_validation_loss(
    runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(runs)
    assert main(["export", "--out", "newest"]) == 0 and main(["export", "--out", "best", "--best"]) == 0
    newest, best = capsys.readouterr().out.splitlines()[::2]
    assert newest.startswith("runs/1-parallel/checkpoint-0000002 (step 2")
    assert best.startswith("runs/1-parallel/checkpoint-0000001 (step 1")
    assert not torch.equal(answers("newest"), answers("best"))


def test_what_cannot_be_exported_is_one_sentence(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint.all_in(runs / "0-serial")[-1]
    for arguments, words in (
        (["--out", "x"], "There is no run with a checkpoint in runs/. Say where one is"),
        (["--out", "x", "--run", str(folder), "--best"], "is one checkpoint, of which none is best. Leave"),
        (["--out", "x", "--run", "nowhere"], "nowhere is not a checkpoint: it has no state.json."),
        (["--out", str(folder), "--run", str(runs / "0-serial")], "an export would damage. Use another"),
    ):
        assert main(["export", *arguments]) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    checkpoint.read_state(folder)
