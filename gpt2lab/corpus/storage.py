"""Where the package keeps files of its own, and how it writes them: atomically, as several may at once."""

import contextlib
import lzma
import os
import stat
import tempfile
from importlib.resources import files
from pathlib import Path


def cache_dir(name: str) -> Path:
    """A folder of this user alone, made when missing: ~/.cache/gpt2lab/name, or a private temporary one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    spare = os.path.join(tempfile.gettempdir(), f"gpt2lab-{os.getuid()}")
    for root in (os.path.join(home, "gpt2lab"), spare):
        folder = Path(root, name)
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _private(Path(root)) and os.access(folder, os.W_OK):
                return folder
    raise OSError(f"Neither {home} nor {spare} can be written. Set XDG_CACHE_HOME to a folder of yours.")


def _private(folder: Path) -> bool:
    """Whether the folder is ours and only we may write there (a stranger could have laid a temporary one)."""
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def replacing(path: Path):
    """Open a new file that takes the place of `path` when the block ends well; until then `path` stays.

    Raises ValueError where `path` is a device, a pipe or a folder.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is no regular file, so nothing was written. Use another name.")
    handle, draft = tempfile.mkstemp(prefix=f".{Path(path).name}.", dir=Path(path).parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def packaged(name: str) -> bytes:
    """The contents of a compressed file of this package, `name` as it was before compression."""
    return lzma.decompress((files(__package__) / "data" / f"{name}.xz").read_bytes())
