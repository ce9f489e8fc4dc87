"""Let a model continue a prompt.

gpt2lab generate --prompt "ROMEO."                    the newest run in runs/ writes
gpt2lab generate --model my-gpt2 --temperature 0      another model, always its likeliest token
gpt2lab generate --model gpt2 --prompt "To be"        the published 124M model
"""

import time
from pathlib import Path

from ..machine.options import Setting, positive
from ..machine.words import refuse
from . import folders

OR_PUBLISHED = "Or let the published model write, 548 MB fetched once: gpt2lab generate --model gpt2."
OPTIONS = {
    "model": Setting(
        "a run's folder, any folder with config.json and model.safetensors, or 'gpt2': the published 124M model, 548 "
        "MB fetched once (default: the newest run in runs/)",
        metavar="FOLDER|gpt2",
    ),
    "prompt": Setting("text to continue; may be given several times", again=True),
    "tokens": Setting("new tokens, at most", positive, 64, metavar="N"),
    "temperature": Setting("0: always the likeliest", float, 0.8),
    "top_k": Setting("choose among the K likeliest tokens", int, metavar="K"),
    "top_p": Setting("choose among the likeliest that sum to P", float, metavar="P"),
    "seed": Setting("another seed, another text", int, 0),
    "slide": Setting("past the context, forget the oldest tokens", bool),
    "no_cache": Setting("recompute all keys and values (slow)", bool),
}


def run(args) -> None:
    """Print each prompt with its continuation, and how fast it came."""
    if args.temperature == 0 or args.top_k == 1:
        idle = ("seed", "top_p", "temperature" if args.temperature else "top_k")
        typed = [name for name in idle if getattr(args, name) != OPTIONS[name].default]
        refuse(typed, dict.fromkeys(idle, "only the likeliest token may come"))
    source = args.model or str(folders.newest(Path("runs"), OR_PUBLISHED))
    # not before it is known that there is a model: torch takes seconds
    from ..corpus.tokenizer import encoding
    from ..generate import END_OF_TEXT, generate
    from ..storage import huggingface
    from .export import chosen

    model, words = huggingface.load(chosen(Path(source))), encoding()
    prompts = [words.encode(text, allowed_special="all") or [END_OF_TEXT] for text in args.prompt or [""]]
    how = {name: getattr(args, name) for name in ("slide", "temperature", "top_k", "top_p", "seed")}
    start = time.perf_counter()
    texts = generate(model, prompts, args.tokens, cache=not args.no_cache, **how)
    seconds = time.perf_counter() - start
    for text in texts:
        print(words.decode([token for token in text if token != END_OF_TEXT]))
        print("-" * 40)
    new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True))
    print(f"{new} tokens in {seconds:.1f} s: {new / seconds:.0f} tokens/s ({source}, measured)")
