"""Where the package keeps its own files, and how it reads and writes them.

They are written atomically, because several processes may write, and read with an eye on damage.
"""

import contextlib
import json
import lzma
import os
import stat
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from ..machine.arguments import contents


def cache_dir(name: str) -> Path:
    """A private folder of this user, made if missing: ~/.cache/gpt2lab/name, or a temporary one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    spare = os.path.join(tempfile.gettempdir(), f"gpt2lab-{os.getuid()}")
    for root in (os.path.join(home, "gpt2lab"), spare):
        folder = Path(root, name)
        with contextlib.suppress(OSError):
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode is for the last folder alone
            folder.mkdir(mode=0o700, exist_ok=True)
            if _made_private(Path(root)) and os.access(folder, os.W_OK):
                return folder
    raise OSError(f"Neither {home} nor {spare} can be written. Set XDG_CACHE_HOME to one of your folders.")


def _made_private(folder: Path) -> bool:
    """Take the right to write from this user's own group, which a umask of 002 gives.

    Returns whether the folder is this user's and nobody else may write there (another could have made it).
    """
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if ours and found.st_gid == os.getgid() and found.st_mode & 0o022 == stat.S_IWGRP:
        folder.chmod(found.st_mode & 0o755)
        found = folder.lstat()
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def replacing(path: Path):
    """Open a new file that replaces `path` when the block ends without an error; until then it is unchanged.

    Raises ValueError where `path` is a device, a pipe or a folder.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is no regular file, so nothing was written. Use another name.")
    if not Path(path).parent.is_dir():
        raise ValueError(
            f"There is no folder {Path(path).parent} to write {Path(path).name} into. Make it first."
        )
    handle, draft = tempfile.mkstemp(prefix=f".{Path(path).name}.", dir=Path(path).parent)
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    try:
        with contextlib.suppress(PermissionError):  # a file system that has no modes
            os.chmod(draft, 0o666 & ~mask)
        with os.fdopen(handle, "w+b") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def read_json(path: Path, part: Callable, otherwise: str):
    """`part` of what a JSON file says. Raises ValueError, `path` and then `otherwise`, where the two do not fit."""
    said = contents(path)
    try:
        return part(json.loads(said))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise ValueError(f"{path} {otherwise}") from None


def packaged(name: str) -> bytes:
    """The contents of a compressed file of this package, `name` as it was before compression."""
    return lzma.decompress((files(__package__) / "data" / f"{name}.xz").read_bytes())
