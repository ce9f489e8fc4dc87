"""Tokens in a file: llm.c's shard (256 int32 of header, then uint16), written as a stream, read by mapping.

The header holds 20240520, the version 1, and the number of tokens; the rest of it is zero.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .storage import cache_dir, packaged, replacing
from .tokenizer import END_OF_TEXT, encoding

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
TRAIN_SHARE = 0.9  # of the tokens; the others are for validation
CHARACTERS = 1 << 20  # of text in memory at a time
LONGEST_WORD = 4 * CHARACTERS
MOST_TOKENS = 2**31 - 1  # the header counts in int32


class Shard:
    """The tokens of a shard file, mapped into memory: `len(shard)`, `shard[first:last]` (uint16).

    Pickled as its path, so that every rank maps the file itself. Raises ValueError for a file that is
    truncated, foreign or of another version.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tokens = np.memmap(self.path, "<u2", "r", HEADER_BYTES, shape=(_count(self.path),))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]

    def __reduce__(self):
        return Shard, (self.path,)

    def __repr__(self) -> str:
        return f"Shard({str(self.path)!r}: {len(self):,} tokens)"


def _count(path: Path) -> int:
    """The number of tokens in a shard, its header and its size checked against each other."""
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(
            f"{path} is no token shard: it has {size} bytes, a header alone has {HEADER_BYTES}. {_MAKE}"
        )
    magic, version, count = (int(word) for word in np.fromfile(path, "<i4", 3))
    if magic != MAGIC:
        raise ValueError(f"{path} is no token shard: it begins with {magic} instead of {MAGIC}. {_MAKE}")
    if version != VERSION:
        raise ValueError(f"{path} is a shard of version {version}, not of version {VERSION}. {_MAKE}")
    held, rest = divmod(size - HEADER_BYTES, 2)
    if held != count or rest:
        raise ValueError(
            f"{path} is damaged: its header promises {count} tokens ({HEADER_BYTES + 2 * count} bytes), "
            f"the file holds {held} ({size} bytes). {_MAKE}"
        )
    return count


_MAKE = "Make it anew from its text: python -m gpt2lab data --text FILE."


def write(path: str | Path, pieces: Iterable[np.ndarray]) -> Shard:
    """Write pieces of tokens, one at a time, as a shard; the file appears only when complete."""
    path, count = Path(path), 0
    with replacing(path) as file:
        file.write(bytes(HEADER_BYTES))
        for piece in pieces:
            count += len(piece)
            if count > MOST_TOKENS:
                raise ValueError(
                    f"A shard holds at most {MOST_TOKENS} tokens, this text has {count} or more."
                )
            file.write(_as_uint16(piece))
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = MAGIC, VERSION, count
        file.seek(0)
        file.write(header)
    return Shard(path)


def _as_uint16(piece) -> np.ndarray:
    piece = np.asarray(piece)
    if len(piece) and (piece.min() < 0 or piece.max() > 0xFFFF):
        raise ValueError(f"Token {piece.max()} does not fit into 16 bits (0 to {0xFFFF}).")
    return piece.astype("<u2")


def tokenise(texts: Iterable[str]) -> Iterator[np.ndarray]:
    """The tokens of a text that arrives in parts of any length, the same as if it were encoded in one go.

    `<|endoftext|>` in the text becomes its token. Only one part is in memory at a time.
    """
    encode, rest = encoding().encode_to_numpy, ""
    for text in texts:
        head, rest = _split_before_space(rest + text)
        if len(rest) > LONGEST_WORD:  # no text: stay within the memory rather than wait for a space
            head, rest = head + rest, ""
        if head:
            yield encode(head, allowed_special={END_OF_TEXT})
    if rest:
        yield encode(rest, allowed_special={END_OF_TEXT})


def _split_before_space(text: str) -> tuple[str, str]:
    """Cut at the last place where a space or newline follows something visible.

    No token spans such a place: GPT-2 first splits a text into words that may begin with a space, but not end
    in one.
    """
    end = len(text)
    while (end := max(text.rfind(" ", 0, end), text.rfind("\n", 0, end))) > 0:
        end = len(text[:end].rstrip())
        if end and text[end] in " \n":
            return text[:end], text[end:]
    return "", text


def read_text(path: str | Path, characters: int = CHARACTERS) -> Iterator[str]:
    """A text file in parts of `characters`, line ends as they are. Raises ValueError when it is not UTF-8."""
    with open(path, encoding="utf-8", newline="") as file:
        try:
            while part := file.read(characters):
                yield part
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} cannot be read. "
                f"Convert it first, for example: iconv -f latin1 -t utf-8 {path}"
            ) from None


def plays() -> str:
    """The ten plays of Shakespeare that come with the package (1,271,816 characters)."""
    return packaged("shakespeare.txt").decode()


def shakespeare() -> Shard:
    """The ten plays as a shard of 397,272 tokens, tokenised once and kept in the user's cache."""
    path = cache_dir("shards") / "shakespeare.bin"
    try:
        return Shard(path)
    except (OSError, ValueError):
        return write(path, tokenise([plays()]))
