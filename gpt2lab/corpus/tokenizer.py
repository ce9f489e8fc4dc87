"""GPT-2's tokenizer without a network: `tiktoken.get_encoding("gpt2")` finds two files that this module writes.

tiktoken looks in the folder TIKTOKEN_CACHE_DIR for files named after the sha1 of their address, checks their sha256
itself, and downloads what is missing. The package contains the merges, from which encoder.json is rebuilt.
"""

import hashlib
import json
import os
from pathlib import Path

import tiktoken

from .storage import cache_dir, packaged, replacing

ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
VOCABULARY = 50257
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_TOKEN = 50256


def encoding() -> tiktoken.Encoding:
    """GPT-2's byte-pair encoding, ready to use: 50257 tokens, the last one is `<|endoftext|>`."""
    install()
    return tiktoken.get_encoding("gpt2")


def install() -> Path:
    """Put tiktoken's two files for "gpt2" into its cache folder and name that folder in TIKTOKEN_CACHE_DIR.

    A folder that the user set is used if it can be written. An *empty* setting would make tiktoken download each time,
    so it is replaced by the package's own folder.
    """
    chosen = os.environ.get("TIKTOKEN_CACHE_DIR")
    folder = Path(chosen) if chosen else cache_dir("tiktoken")
    try:
        _fill(folder)
    except OSError:
        folder = cache_dir("tiktoken")
        _fill(folder)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return folder


def _fill(folder: Path) -> None:
    """Write the files that are missing or damaged, atomically, because other processes may read them meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in SHA256.items():
        path = folder / hashlib.sha1((ADDRESS + name).encode()).hexdigest()
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            continue
        merges = packaged("vocab.bpe")
        with replacing(path) as file:
            file.write(merges if name == "vocab.bpe" else encoder_json(merges))


def encoder_json(merges: bytes) -> bytes:
    """GPT-2's encoder.json, byte for byte: the 256 byte symbols, each merge as one symbol, then `<|endoftext|>`."""
    pairs = merges.decode().split("\n")[1:-1]  # the first line is a version, the last is empty
    symbols = [*byte_symbols(), *(pair.replace(" ", "") for pair in pairs), END_OF_TEXT]
    return json.dumps({symbol: token for token, symbol in enumerate(symbols)}).encode()


def byte_symbols() -> list[str]:
    """Printable symbols for the 256 bytes, in GPT-2's order: printable bytes first, the others from U+0100 on."""
    printable = [chr(byte) for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    return printable + [chr(256 + i) for i in range(256 - len(printable))]
