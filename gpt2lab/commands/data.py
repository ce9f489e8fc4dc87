"""Turn a text of your own, or a published one, into tokens to train on: a shard.

    gpt2lab data --text my.txt                    writes my.bin
    gpt2lab train --data my.bin                   trains on it
    gpt2lab data --download tinystories-valid     fetches 22 MB, then the same

Nine tenths of the tokens are for training, the rest for validation.
"""

import time
from pathlib import Path

from tqdm import tqdm

from ..corpus import downloads, shards
from ..machine.options import Setting

TEXTS = [name for name in downloads.DOWNLOADS if name != "gpt2"]
FETCH = "fetch a published text (needs a network; size and sha256 are checked)"
OPTIONS = {
    "text": Setting("a UTF-8 text file of your own", Path, metavar="FILE", group="source", needed=True),
    "download": Setting(FETCH, choices=TEXTS, group="source", needed=True),
    "out": Setting("where the shard goes (default: FILE with .bin)", Path, metavar="SHARD"),
}


def run(args) -> None:
    """Tokenise the text into a shard, say what is in it and how to train on it."""
    text = downloads.download(args.download) if args.download else args.text
    if text.is_dir() or (text.exists() and not text.stat().st_size):
        raise ValueError(f"{str(text)!r} is no file with text in it. Name one after --text.")
    out = args.out or text.with_suffix(".bin")
    if out.exists() and out.samefile(text):
        raise ValueError(f"The shard would overwrite its own text {text}. Use --out with another name.")
    if not args.out and out.is_file() and not shards.begins_as_shard(out):
        raise ValueError(f"{out} is there already and is no shard of tokens. Use --out with another name.")
    start = time.perf_counter()
    shard = shards.write_shard(out, shards.tokenise(_with_progress(text)))
    size, seconds = text.stat().st_size, time.perf_counter() - start
    border = int(len(shard) * shards.TRAIN_SHARE)
    print(f"{text}: {size:,} bytes became {len(shard):,} tokens in {out} ({seconds:.1f} s)")
    print(f"The first {border:,} are for training, the other {len(shard) - border:,} for validation.")
    print(f"Train on it: gpt2lab train --data {out}")


def _with_progress(text: Path):
    """The parts of a text while a bar shows the characters read (a byte or more each)."""
    with tqdm(total=text.stat().st_size, unit="B", unit_scale=True, desc=text.name, leave=False) as bar:
        for part in shards.read_text(text):
            yield part
            bar.update(len(part))
