"""What `gpt2lab train` prints about a run: a line for some steps, at the end its curve and a text by the model."""

from pathlib import Path

from ..run import Options, read_log
from ..storage import checkpoint


def short(entry: dict) -> str:
    """A step as one short line."""
    text = f"loss {entry['loss']:.3f}, {entry['tokens_per_s']:,.0f} tokens/s, MFU {entry['mfu']:.0%}"
    return text + (f", val {entry['val']:.3f}" if "val" in entry else "")


def say_sometimes(entry: dict) -> None:
    """Print every tenth step, and those with a validation."""
    if entry["step"] % 10 == 0 or "val" in entry:
        print(f"step {entry['step']}: {short(entry)}", flush=True)


def finish(options: Options, folder: Path, interrupted: list[str]) -> None:
    """The loss curve, the final lines, and a text by the trained model, if no signal is named that ended the run."""
    from ..plots import style, training

    by = "".join(f" by {name}" for name in interrupted[:1])
    if not (folder / "log.jsonl").exists():
        print(f"Stopped{by} before the first step: {folder} holds the fresh model.")
        return
    log = read_log(folder)
    style.save_figure(training.loss_curve(log), folder / "loss.png")
    newest = checkpoint.all_in(folder)[-1]
    if interrupted:
        step, way = log[-1]["step"], f"python -m gpt2lab train --resume {folder}"
        print(f"Stopped{by}: saved step {step}. Continue with: {way}")
    vals = [e["val"] for e in log if "val" in e]
    if vals:
        print(f"validation loss {vals[-1]:.3f} (a fresh model has ln 50257 = 10.825)")
    print(f"log, loss curve and checkpoint: {folder}")
    print(f"Let it write: python -m gpt2lab generate --model {folder}")
    if options.sample and not interrupted:
        print("\n" + _sample(newest, options))


def _sample(folder: Path, options: Options) -> str:
    """What the model writes after the first words of a play."""
    from ..corpus.tokenizer import encoding
    from ..generate import generate
    from ..storage import huggingface

    model, text = huggingface.load(folder), encoding()
    prompt = text.encode("ROMEO.")
    new = min(options.sample, model.config.n_positions - len(prompt))
    return text.decode(generate(model, [prompt], new, temperature=0.8, top_k=40, seed=options.seed)[0])
