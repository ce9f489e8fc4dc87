"""What `gpt2lab train` prints about a run: a line for some steps, and at the end where it is and what it writes."""

from pathlib import Path
from statistics import median_high

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


def finish(options: Options, folder: Path | None, interrupted: list[str], trained: list[dict]) -> None:
    """Draw the loss curve and print the final lines, with a text by the model unless a signal ended the run.

    Of a benchmark, which has no folder, the median step.
    """
    by = "".join(f" by {name}" for name in interrupted[:1])
    done = f"All {options.steps} steps were trained before. For more of them: --steps {2 * options.steps}"
    if folder is None and trained:
        median = median_high(entry["seconds"] for entry in trained) * 1e3
        print(f"median step {median:.1f} ms over {len(trained)} steps (measured)")
        return
    if folder is None or not (folder / "log.jsonl").exists():
        held = f": {folder} holds what it began with." if folder else "."
        print(f"Stopped{by} before the first step{held}" if interrupted else done)
        return
    from ..plots import curves, style

    log = read_log(folder)
    style.save_figure(curves.loss_curve(log), folder / "loss.png")
    newest = checkpoint.all_in(folder)[-1]
    if interrupted:
        step, way = checkpoint.look(newest, check_files=False)[0]["step"], f"gpt2lab train --resume {folder}"
        print(f"Stopped{by}: saved step {step}. Continue with: {way}")
    elif not trained:
        print(done)
    if vals := [e["val"] for e in log if "val" in e]:
        print(f"validation loss {vals[-1]:.3f} (a fresh model has ln 50257 = 10.825)")
    print(f"loss curve, beside log and checkpoint: {folder / 'loss.png'}")
    print(f"Let it write: gpt2lab generate --model {folder}")
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
