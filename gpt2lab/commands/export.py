"""Write the model of a run, trained on any plan, in the Hugging Face layout: config.json and model.safetensors.

    gpt2lab export --out my-gpt2              the newest run's newest checkpoint
    gpt2lab export --out my-gpt2 --best       its checkpoint with the lowest validation loss
    gpt2lab generate --model my-gpt2          so does transformers' GPT2LMHeadModel.from_pretrained

Numbers are written as they were trained, without Adam's moments. One process does it, whatever plan has saved.
A model with experts gets the same files under a `model_type` of its own, which only gpt2lab reads.
"""

from pathlib import Path

from ..machine.options import Setting
from ..storage import checkpoint
from . import folders

OPTIONS = {
    "out": Setting("where the model goes", Path, metavar="FOLDER", needed=True),
    "best": Setting("the lowest validation loss, not the newest step", bool),
    "run": Setting("default: the newest run in runs/", Path, metavar="RUN|CHECKPOINT"),
}


def run(args) -> None:
    """Export one checkpoint and say what became of it."""
    source = chosen(args.run or folders.newest(Path("runs")), args.best)
    if (args.out / "state.json").exists():
        raise ValueError(f"{args.out} is a checkpoint, which an export would damage. Use another --out.")
    state = checkpoint.read_state(source)
    checkpoint.export(source, args.out)
    print(f"{source} (step {state['step']}, plan {state['plan']}) is now the model in {args.out}")
    print(f"Let it write: gpt2lab generate --model {args.out}")


def chosen(run: Path, best: bool = False) -> Path:
    """The newest or the best checkpoint of a run; a checkpoint's own folder as it is."""
    found = checkpoint.all_in(run)
    if best and checkpoint.is_one(run):
        raise ValueError(
            f"{run} is one checkpoint, of which none is best. Leave --best out, or name its run."
        )
    if not found:
        return run  # a checkpoint, or nothing: reading it will say which
    if best and checkpoint.best(run) is None:
        raise ValueError(f"No checkpoint of {run} was validated, so none is best. Leave --best out.")
    return checkpoint.best(run) if best else found[-1]
