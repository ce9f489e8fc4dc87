"""Optional downloads: resumable, checked by size and sha256, atomic."""

import fcntl
import hashlib
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .storage import cache_dir

BLOCK = 1 << 20
_HUB = "https://huggingface.co/"
_STORIES = _HUB + "datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-"
_GPT2 = _HUB + "openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e/"


@dataclass(frozen=True)
class Download:
    """A published file: its address, its size in bytes, and its sha256."""

    url: str
    size: int
    sha256: str
    file: str


DOWNLOADS = {
    "tinyshakespeare": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "tinyshakespeare.txt",
    ),
    "tinystories-valid": Download(
        _STORIES + "valid.txt",
        22_502_601,
        "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
        "tinystories-valid.txt",
    ),
    "tinystories-train": Download(
        _STORIES + "train.txt",
        2_227_753_162,
        "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
        "tinystories-train.txt",
    ),
    "gpt2": Download(
        _GPT2 + "model.safetensors",
        548_105_171,
        "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
        "gpt2/model.safetensors",
    ),
}


class NoDownload(OSError):
    """A file could not be fetched; the message says what to do without a network."""


def download(name: str) -> Path:
    """The path of a published file, downloaded if it is missing; a file put there by hand is checked too.

    Raises ValueError for an unknown name, NoDownload when the server cannot be reached or sends something else.
    """
    if name not in DOWNLOADS:
        raise ValueError(f"There is no download {name!r}. Use one of: {', '.join(DOWNLOADS)}.")
    return fetch(DOWNLOADS[name], cache_dir("downloads"))


def fetch(item: Download, folder: Path) -> Path:
    """Download one file into `folder`; an incomplete file is kept and completed by the next call."""
    path = folder / item.file
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a second process waits here, and goes on from what is left
        if path.exists():
            _check(path, item)
            part.unlink(missing_ok=True)
            return path
        if file.seek(0, os.SEEK_END) < item.size:
            _receive(item, file, path)
            file.flush()
        _check(part, item)
        os.replace(part, path)
    return path


def _receive(item: Download, file, path: Path) -> None:
    """Append what is missing to the open file; start again if the server cannot resume."""
    request = urllib.request.Request(item.url, headers={"Range": f"bytes={file.tell()}-"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            if reply.status != 206:
                file.truncate(0)
            done = file.seek(0, os.SEEK_END)
            bar = tqdm(total=item.size, initial=done, unit="B", unit_scale=True, desc=path.name, leave=False)
            with bar:
                while done < item.size and (block := reply.read(min(BLOCK, item.size + 1 - done))):
                    file.write(block)
                    done += len(block)
                    bar.update(len(block))
    except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise NoDownload(
            f"{item.url} cannot be read: {reason}. No lesson needs it. To use it, call again with a "
            f"network (it continues at byte {file.tell()} of {item.size}), or copy the file to {path} yourself."
        ) from None


def _check(path: Path, item: Download) -> None:
    """Compare size and sha256 with the published ones; a part with another sha256 is emptied."""
    size = path.stat().st_size
    if size < item.size and path.suffix == ".part":
        raise NoDownload(f"{item.url} broke off after {size} of {item.size} bytes. Call again to continue.")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (item.size, item.sha256):
        if path.suffix == ".part":
            os.truncate(path, 0)  # not removed: another process may hold it open, and wait for it
        raise NoDownload(
            f"{path.name} is not the published file: {size} bytes with sha256 {digest[:16]}..., expected "
            f"{item.size} bytes with {item.sha256[:16]}... . Remove {path} and call again."
        )
