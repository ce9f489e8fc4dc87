"""GPT-2's tokenizer without a network or a cache: tiktoken gets the published merges, which the package contains."""

from functools import cache

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from .storage import packaged

VOCABULARY = 50257
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_TOKEN = 50256


@cache
def encoding() -> tiktoken.Encoding:
    """GPT-2's byte-pair encoding, ready to use: 50257 tokens, the last one is `<|endoftext|>`."""
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=tokens(packaged("vocab.bpe")),
        special_tokens={END_OF_TEXT: END_OF_TEXT_TOKEN},
        explicit_n_vocab=VOCABULARY,
    )


def tokens(merges: bytes) -> dict[bytes, int]:
    """The number of every token, by its bytes: the 256 single bytes, printable ones first, then what each merge makes.

    In the file a byte that cannot be printed, or is a space, is written as a symbol from U+0100 on.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    pairs = merges.decode().split("\n")[1:-1]  # the first line is a version, the last is empty
    made = [bytes(symbols[symbol] for symbol in pair.replace(" ", "")) for pair in pairs]
    return {token: n for n, token in enumerate([*(bytes([b]) for b in printable + others), *made])}
