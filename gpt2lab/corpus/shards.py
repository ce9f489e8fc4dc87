"""Tokens in a file: llm.c's shard (256 int32 of header, then uint16), written as a stream, read by mapping.

The header holds 20240520, the version 1, and the number of tokens; the rest of it is zero.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ..machine.arguments import checked
from .storage import cache_dir, packaged, replacing
from .tokenizer import END_OF_TEXT, encoding

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
TRAIN_SHARE = 0.9  # share of the tokens for training; the others are for validation
CHARACTERS = 1 << 20  # characters of text in memory at a time
LONGEST_WORD = 4 * CHARACTERS
MOST_TOKENS = 2**31 - 1  # the header counts in int32


class Shard:
    """The tokens of a shard file, mapped into memory: `len(shard)`, `shard[first:last]` (uint16).

    Pickled as its path, so that every rank maps the file itself. Raises ValueError for a file that is
    truncated, foreign or of another version.
    """

    @checked()
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tokens = np.memmap(self.path, "<u2", "r", HEADER_BYTES, shape=(_count(self.path),))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError where a token is beyond a vocabulary of this size."""
        if len(self) and (most := int(self.tokens.max())) >= size:
            raise ValueError(
                f"{self.path} has the token {most}, and the vocabulary is 0 to {size - 1}. Make it with this "
                "tokenizer: gpt2lab data --text FILE."
            )

    def __reduce__(self):
        return Shard, (self.path,)

    def __repr__(self) -> str:
        return f"Shard({str(self.path)!r}: {len(self):,} tokens)"


def begins_as_shard(path: Path) -> bool:
    """Whether a file begins as a shard does, whole or damaged."""
    return np.fromfile(path, "<i4", 1).tolist() == [MAGIC]


def _count(path: Path) -> int:
    """The number of tokens in a shard, its header and its size checked against each other."""
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(
            f"{path} is not a token shard: it has {size} bytes, but a header alone has {HEADER_BYTES}. {_MAKE}"
        )
    magic, version, count = (int(word) for word in np.fromfile(path, "<i4", 3))
    if magic != MAGIC:
        raise ValueError(f"{path} is not a token shard: it begins with {magic} instead of {MAGIC}. {_MAKE}")
    if version != VERSION:
        raise ValueError(f"{path} is a shard of version {version}, not of version {VERSION}. {_MAKE}")
    held, rest = divmod(size - HEADER_BYTES, 2)
    if held != count or rest:
        raise ValueError(
            f"{path} is damaged: its header says {count} tokens ({HEADER_BYTES + 2 * count} bytes), but the "
            f"file holds {held} ({size} bytes). {_MAKE}"
        )
    return count


_MAKE = "Make it again from its text: gpt2lab data --text FILE."


@checked()
def write_shard(path: str | Path, parts: Iterable) -> Shard:
    """Write parts of a token array, one at a time, as a shard; the file appears only when complete."""
    path, count = Path(path), 0
    with replacing(path) as file:
        file.write(bytes(HEADER_BYTES))
        for part in parts:
            count += len(part)
            if count > MOST_TOKENS:
                raise ValueError(
                    f"A shard holds at most {MOST_TOKENS} tokens, but this text has {count} or more."
                )
            file.write(_as_uint16(part))
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = MAGIC, VERSION, count
        file.seek(0)
        file.write(header)
    return Shard(path)


def _as_uint16(part) -> np.ndarray:
    part = np.asarray(part)
    made = part.astype("<u2")
    if len(changed := part[made != part]):
        raise ValueError(f"Token {changed[0]} does not fit into 16 bits (0 to {0xFFFF}).")
    return made


@checked()
def tokenise(texts: str | Iterable[str]) -> Iterator[np.ndarray]:
    """The tokens of a text that comes in parts of any length, the same as if it were encoded at once.

    `<|endoftext|>` in the text becomes its token. Only one part is in memory at a time.
    """
    encode, rest = encoding().encode_to_numpy, ""
    for text in texts:
        head, rest = _split_before_space(rest + text)
        if len(rest) > LONGEST_WORD:  # not normal text: use bounded memory instead of waiting for a space
            head, rest = head + rest, ""
        if head:
            yield encode(head, allowed_special={END_OF_TEXT})
    if rest:
        yield encode(rest, allowed_special={END_OF_TEXT})


def _split_before_space(text: str) -> tuple[str, str]:
    """Cut at the last position where a space or newline follows a visible character.

    No token contains such a position: GPT-2 first splits a text into words, which may begin with a space, but not end
    with one.
    """
    end = len(text)
    while (end := max(text.rfind(" ", 0, end), text.rfind("\n", 0, end))) > 0:
        end = len(text[:end].rstrip())
        if end and text[end] in " \n":
            return text[:end], text[end:]
    return "", text


@checked(characters=(1, 10**9))
def read_text(path: str | Path, characters: int = CHARACTERS) -> Iterator[str]:
    """A text file in parts of `characters`, with its line ends unchanged. Raises ValueError when it is not UTF-8."""
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
        return write_shard(path, tokenise([plays()]))
