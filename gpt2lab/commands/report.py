"""What `gpt2lab train` prints about a run: a line for some steps, at the end its curve and a text by the model."""

import math
import sys
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


WIDTH, HEIGHT = 60, 8  # of the curve in the terminal, in characters; each is 2 x 4 points of Braille
POINTS = (0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)  # from the top, left and right


def curve(losses: list[float], width: int = WIDTH, height: int = HEIGHT) -> str:
    """The losses as a curve of Braille points, highest and lowest at its left; empty for fewer than two finite ones.

    A column that stands for several steps shows all of them.
    """
    finite = {step: loss for step, loss in enumerate(losses) if math.isfinite(loss)}
    if len(finite) < 2:
        return ""
    low, high = min(finite.values()), max(finite.values())
    cells = [[0] * width for _ in range(height)]
    across, down = (2 * width - 1) / (len(losses) - 1), (4 * height - 1) / ((high - low) or 1)
    for step, loss in finite.items():
        x, y = round(step * across), round((high - loss) * down)
        cells[y // 4][x // 2] |= POINTS[y % 4][x % 2]
    margins = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    rows = ("".join(chr(0x2800 + points) for points in row).rstrip("\u2800") for row in cells)
    return "\n".join(f"{margin:>7} |{row}" for margin, row in zip(margins, rows, strict=True))


def _shown(text: str) -> bool:
    """Whether the terminal has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return bool(text)


def finish(options: Options, folder: Path | None, interrupted: list[str], trained: list[dict]) -> None:
    """The loss curve, the final lines, and a text by the model, unless a signal ended the run that has `trained` so.

    Of a benchmark, which has no folder, the median step.
    """
    by = "".join(f" by {name}" for name in interrupted[:1])
    done = f"All {options.steps} steps were trained before. For more of them: --steps {2 * options.steps}"
    if folder is None and trained:
        median = median_high(entry["seconds"] for entry in trained) * 1e3
        print(f"median step {median:.1f} ms over {len(trained)} steps (measured)")
        return
    if folder is None or not (folder / "log.jsonl").exists():
        stopped = f"Stopped{by} before the first step: {folder} holds what it began with."
        print(stopped if interrupted else done)
        return
    from ..plots import curves, style

    log = read_log(folder)
    style.save_figure(curves.loss_curve(log), folder / "loss.png")
    if _shown(drawn := curve([entry["loss"] for entry in log])):
        print(f"loss of steps {log[0]['step']} to {log[-1]['step']} (measured)\n{drawn}")
    newest = checkpoint.all_in(folder)[-1]
    if interrupted:
        step, way = checkpoint.look(newest, check_files=False)[0]["step"], f"gpt2lab train --resume {folder}"
        print(f"Stopped{by}: saved step {step}. Continue with: {way}")
    elif not trained:
        print(done)
    if vals := [e["val"] for e in log if "val" in e]:
        print(f"validation loss {vals[-1]:.3f} (a fresh model has ln 50257 = 10.825)")
    print(f"log, loss curve and checkpoint: {folder}")
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
