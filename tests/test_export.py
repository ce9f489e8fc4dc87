"""A checkpoint of any plan becomes the model that transformers reads."""

import pytest
import torch

from gpt2lab.cli import main
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.storage import checkpoint, huggingface
from gpt2lab.train import Trainer

pytestmark = pytest.mark.live

TOKENS = torch.arange(22).reshape(2, 11) % CONFIG.vocab_size


def trained(rank, world_size, plan, run):
    """Two steps on a plan, with a checkpoint after each; the first one validates better."""
    plan = Plan.parse(plan)
    trainer = Trainer(build(plan, CONFIG, Mesh(**plan.axes), torch.float64))
    for val in (1.0, 2.0):
        trainer.step(example_batch(CONFIG, 7, 11))
        checkpoint.save(trainer, run, val=val)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pools):
    """A folder of runs: `0-serial` and, newer by its name, `1-parallel` of the same steps on four ranks."""
    folder = tmp_path_factory.mktemp("runs")
    trained(0, 1, "serial", folder / "0-serial")
    pools[4].run(trained, "pp=2,tp=2,micro=2", str(folder / "1-parallel"))
    return folder


def answers(folder):
    from transformers import GPT2LMHeadModel

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
        assert main(["export", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    checkpoint.read_state(folder)


def test_a_run_with_experts_on_two_ranks_goes_on_alone_writes_and_is_exported(tmp_path, capsys, monkeypatch):
    """As a user would: train on dp=2,ep=2, resume on one rank, generate, export, read the export."""
    monkeypatch.chdir(tmp_path)
    small = ["--experts", "4", "--batch", "4", "--sequence", "16", "--evaluate", "100", "--sample", "0"]
    assert main(["train", "--plan", "dp=2,ep=2", "--steps", "2", "--save", "2", *small]) == 0
    assert main(["train", "--resume", "--plan", "dp=1", "--steps", "3", "--save", "3"]) == 0
    steps = [
        checkpoint.read_state(folder) for folder in checkpoint.all_in(next((tmp_path / "runs").iterdir()))
    ]
    plans = [(state["step"], state["plan"].removesuffix(",loss=chunked")) for state in steps]
    assert plans == [(2, "dp=2,ep=2"), (3, "loss=chunked")]
    assert main(["export", "--out", "moe"]) == 0
    texts = []
    for place in ([], ["--model", "moe"]):
        capsys.readouterr()
        assert main(["generate", "--prompt", "ROMEO.", "--temperature", "0", "--tokens", "5", *place]) == 0
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert texts[0] == texts[1] and texts[0].startswith("ROMEO.")
    source = huggingface.load(checkpoint.all_in(next((tmp_path / "runs").iterdir()))[-1])
    exported = huggingface.load("moe")
    assert exported.config == source.config and exported.config.experts.experts == 4
    assert all(torch.equal(t, exported.state_dict()[n]) for n, t in source.state_dict().items())
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="gpt2_experts"):  # transformers must not read it as a dense model
        AutoModelForCausalLM.from_pretrained("moe")
