"""RankFailed: the one exception that a launch raises, and its text."""

import linecache
import re
import signal
import sys
import sysconfig
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


class RankFailed(RuntimeError):
    """A rank raised, died or got stuck.

    `rank` is the rank that caused the failure and `ename` the name of its exception type (`ProcessDied`, `Deadlock` or
    `TimeoutError` for ranks that could not raise); the text holds the rank's own traceback with its source.
    `states` says what every rank was doing then: its last call, how long it waited, and for which ranks.
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
    """The name that the notebook shows for a cell: `Cell In[3]` where IPython knows the number, else `Cell`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return "Cell" if number is None else f"Cell In[{number}]"


def with_source(frame: str) -> str:
    """A stack line `File "name", line 3 ...` followed by the text of that source line."""
    found = re.match(r'File "([^"]+)", line (\d+)', frame)
    if found is None:
        return frame
    source = linecache.getline(found[1], int(found[2])).strip()
    return f"{frame}: `{source}`" if source else frame


def outside_python(frame: str) -> bool:
    """Whether a stack line is in no file of Python's own library."""
    return not re.match(rf'File "(<frozen|{re.escape(sysconfig.get_path("stdlib"))}/(?!.*-packages/))', frame)


def own_frame(frames: list[str]) -> str:
    """The innermost stack line outside the standard library and installed packages."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE_PARENT / "gpt2lab"))
    return next((f for f in frames if not f.removeprefix('File "').startswith(libraries)), frames[0])


def how_it_ended(exitcode: int | None, returned: bool) -> str:
    """An exit code in words, a signal by its name; `returned`: the rank's result was here already."""
    if exitcode is None:
        return "ended without an exit code"
    if exitcode >= 0:
        return (
            f"left with exit code {exitcode} {'after it had' if returned else 'before it'} returned a result"
        )
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
