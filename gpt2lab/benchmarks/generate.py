"""Tokens a second of generation: with the cache, on two tensor ranks, without the cache, and transformers' `generate`.

All take the likeliest token of the same random weights, so they write the same text. The last line says what bounds a
single text: every new token reads every weight once.
"""

import tempfile
from functools import cache

import torch

from ..generate import generate
from ..machine.timing import stopwatch
from ..model import GPT2, PRESETS
from ..plan import Plan, build
from ..processes.launch import Ranks
from ..ranks.mesh import Mesh
from ..storage import huggingface
from . import race
from .race import Contest, Heat

GREEDY = {"temperature": 0.0, "stop": None}


def run(args) -> dict[str, float]:
    """Print seconds and tokens a second of each, ratios to transformers, and how long reading the weights takes."""
    torch.set_num_threads(args.threads)
    ranks = Ranks(2, timeout=600, echo=False)
    model, ways = contestants(args.config, args.rows, args.prompt, args.tokens, ranks)
    size, reading = sum(p.numel() * p.element_size() for p in model.parameters()), reading_time(model)
    count, texts = args.rows * args.tokens, {}
    same = lambda: str(all(text == texts["transformers"] for text in texts.values()))
    facts = lambda: {"transformers": {"all wrote the same text:": same()}}
    contest = Contest(ways, after=texts.__setitem__, facts=facts)
    against = {way: ("transformers",) for way in ways if way != "transformers"}
    with ranks:
        heat = Heat("{}", contest, rivals=against, work=dict.fromkeys(ways, (count, "tokens/s")))
        seconds = race.run([heat], args.rounds)
    per_token = seconds["ours, with the cache"] / args.tokens
    limit = seconds["transformers"] / args.tokens / reading
    print(
        f"  a token of each text takes ours {1e3 * per_token:.1f} ms; reading the weights once, "
        f"{size / 1e6:.0f} MB at {size / reading / 1e9:.0f} GB/s, takes {1e3 * reading:.1f} ms:\n"
        f"  whoever reads them once a token in float32 reaches {limit:.2f} x transformers at most"
    )
    return seconds


def reading_time(model) -> float:
    """Seconds of the fastest of some readings of all weights: a product of each with itself, which writes nothing."""
    flat = [p.detach().flatten() for p in model.parameters()]
    return min(stopwatch(lambda: [torch.dot(p, p) for p in flat]) for _ in range(20))


def contestants(config: str, rows: int, prompt: int, tokens: int, ranks: Ranks):
    """Our model, and {name: a function that writes the texts}, all with its weights."""
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    ours = GPT2(PRESETS[config])
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save(ours, folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    text = torch.randint(ours.config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
    fixed = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    everyone = torch.ones_like(text)
    ways = {
        "transformers": lambda: theirs.generate(text, attention_mask=everyone, **fixed).tolist(),
        "ours, with the cache": lambda: generate(ours, text.tolist(), tokens, **GREEDY),
        "ours, tp=2": lambda: ranks.run(_together, config, text.tolist(), tokens)[0],
        "ours, without": lambda: generate(ours, text.tolist(), tokens, cache=False, **GREEDY),
    }
    return ours, ways


def _together(rank: int, world_size: int, config: str, text: list[list[int]], tokens: int) -> list[list[int]]:
    return _part(config, world_size).generate(text, tokens, **GREEDY)


@cache
def _part(config: str, ranks: int):
    """This rank's part of the model, of the same weights, which it keeps between turns."""
    return build(Plan(tp=ranks), PRESETS[config], Mesh(tp=ranks))
