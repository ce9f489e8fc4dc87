"""Let a model continue a prompt.

gpt2lab generate --prompt "ROMEO."                    the newest run in runs/ writes
gpt2lab generate --model my-gpt2 --temperature 0      another model, always its likeliest token
gpt2lab generate --model gpt2 --prompt "To be"        the published 124M model
"""

import argparse
import time
from pathlib import Path

from . import folders
from .numbers import positive

OR_PUBLISHED = "Or let the published model write, 548 MB fetched once: gpt2lab generate --model gpt2."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--model",
        metavar="FOLDER|gpt2",
        help="a run's folder, any folder with config.json and model.safetensors, or 'gpt2': the published 124M "
        "model, 548 MB fetched once (default: the newest run in runs/)",
    )
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="new tokens, at most (default 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest that sum to P")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default 0)")
    parser.add_argument("--slide", action="store_true", help="past the context, forget the oldest tokens")
    parser.add_argument("--no-cache", action="store_true", help="recompute all keys and values (slow)")


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation, and how fast it came."""
    source = args.model or str(folders.newest(Path("runs"), OR_PUBLISHED))
    from ..corpus.tokenizer import (
        encoding,  # not before it is known that there is a model: torch takes seconds
    )
    from ..generate import END_OF_TEXT, generate
    from ..storage import huggingface

    model, words = huggingface.load(model_folder(source)), encoding()
    prompts = [words.encode(text) or [END_OF_TEXT] for text in args.prompt or [""]]
    start = time.perf_counter()
    texts = generate(
        model,
        prompts,
        args.tokens,
        cache=not args.no_cache,
        slide=args.slide,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    seconds = time.perf_counter() - start
    for text in texts:
        print(words.decode([token for token in text if token != END_OF_TEXT]))
        print("-" * 40)
    new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True))
    print(f"{new} tokens in {seconds:.1f} s: {new / seconds:.0f} tokens/s ({source}, measured)")
    return 0


def model_folder(source: str) -> str:
    """The newest checkpoint, where `source` is a run's folder; anything else as it is."""
    from ..storage import checkpoint

    return str((checkpoint.all_in(source) or [source])[-1])
