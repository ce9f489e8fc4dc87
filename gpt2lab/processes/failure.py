"""RankFailed: the one exception that a launch raises, and the words in it."""

import linecache
import re
import signal
import sys
import sysconfig
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


class RankFailed(RuntimeError):
    """A rank raised, died or got stuck.

    `rank` is the rank to blame and `ename` the name of the exception type there (`ProcessDied`, `Deadlock` and
    `TimeoutError` for ranks that could not raise); the text holds the rank's own traceback with its source.
    `states` says of every rank what it was doing then: its last call, for how long it waited, and for whom.
    """

    def __init__(self, message: str, rank: int | None = None, ename: str = "", states=None):
        super().__init__(readable(message))
        self.rank = rank
        self.ename = ename
        self.states = {r: readable(state) for r, state in (states or {}).items()}


def readable(text: str) -> str:
    """Replace the file names of notebook cells by `Cell In[n]` and long installation paths by short ones."""
    text = re.sub(r'File "([^"]*ipykernel_\d+[^"]*)"', lambda found: cell_name(found[1]), text)
    text = text.replace(f"{PACKAGE_PARENT}/", "")
    return re.sub(r'"[^"]*/site-packages/', '"', text)


def cell_name(filename: str) -> str:
    """The name that the notebook shows for a cell: `Cell In[3]` where IPython knows it, else `Cell`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    compiler = getattr(shell, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(filename)
    return "Cell" if number is None else f"Cell In[{number}]"


def place(frame: str) -> str:
    """A stack line `File "name", line 3 ...` with the text of that source line behind it."""
    found = re.match(r'File "([^"]+)", line (\d+)', frame)
    if found is None:
        return frame
    source = linecache.getline(found[1], int(found[2])).strip()
    return f"{frame}: `{source}`" if source else frame


def own_frame(frames: list[str]) -> str:
    """The innermost stack line that is not the standard library's or an installed package's."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE_PARENT / "gpt2lab"))
    return next((f for f in frames if not f.removeprefix('File "').startswith(libraries)), frames[0])


def how_it_ended(exitcode: int | None) -> str:
    """Say an exit code in words, signals by their name."""
    if exitcode is None:
        return "vanished without an exit code"
    if exitcode >= 0:
        return f"left with exit code {exitcode} before it returned a result"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
