"""`%%ranks 4`: a cell whose body runs on live ranks, which keep their variables from cell to cell.

    %%ranks 4         on four ranks, which start at the first such cell; each knows its `rank` and the `world_size`
    %%ranks 0,2       on these of the running ranks (one alone: `0,`)
    %ranks status     the ranks, and the variables of each
    %ranks stop       end them all

What they print, and the value of the last line, is a column for each, or where that is too wide, line by line. Errors
are those of `launch`, and end the ranks.
"""

import ast
import linecache
import re
import sys
from types import ModuleType

from ..processes.launch import RankFailed, Ranks, kept

USE = "Write %%ranks 4 for four ranks, %%ranks 0,2 for these of them, %ranks status, or %ranks stop"
GONE = "The ranks have ended, and their variables with them: run the %%ranks cells again from the first one."
PLAIN = "No rank has run any of it, and variables are as they were. Use plain Python in %%ranks cells, without magics."


class RankCells:
    """What is behind the magic: the ranks of a notebook."""

    def __init__(self):
        self.ranks, self.cells = None, 0

    def ranks_magic(self, line: str, cell: str | None = None) -> None:
        """Run a cell, or one of the commands. Raises ValueError for another line, RankFailed as `launch`."""
        __tracebackhide__ = True
        word = line.strip()
        if cell is None and word == "stop":
            self.stop()
        elif cell is None and word == "status":
            print(self._status())
        elif cell is not None and re.fullmatch(r"\d{1,3}(\s*,\s*(\d{1,3})?)*", word):
            self._run(cell, [int(number) for number in re.findall(r"\d+", word)], "," in word)
        else:
            raise ValueError(f"%ranks {word!r} says nothing that ranks can do. {USE}.")

    def stop(self) -> None:
        """End the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None

    def _status(self) -> str:
        if self.ranks is None or not self.ranks.alive:
            return f"No ranks are running. {USE}."
        found = enumerate(self.ranks.run(_variables))
        return "\n".join(f"rank {rank} has {', '.join(names) or 'no variables'}" for rank, names in found)

    def _run(self, text: str, numbers: list[int], listed: bool) -> None:
        __tracebackhide__ = True
        if listed and (self.ranks is None or max(numbers) >= self.ranks.size):
            there = f"{self.ranks.size} ranks are" if self.ranks else "no rank is"
            raise ValueError(f"Rank {max(numbers)} is asked for, and {there} running. {USE}.")
        self.cells += 1
        try:
            code = compiled(text, self.cells)
        except (SyntaxError, ValueError) as error:
            error.add_note(PLAIN)
            raise
        before, same = self.ranks, listed or (self.ranks and self.ranks.size == numbers[0])
        self.ranks = before if same else Ranks(numbers[0], echo="columns")
        if before and not (same and before.alive):
            print(GONE)
            before.close()
        try:
            self.ranks.run(run_cell, code, numbers if listed else range(numbers[0]))
        except RankFailed as error:
            error.add_note(GONE)
            raise


def compiled(text: str, number: int) -> tuple:
    """A cell as code, and as code that shows its last line's value. Raises SyntaxError or ValueError for no Python.

    Tracebacks find its lines under the name of its number; line 1 is that of the magic.
    """
    name, lines = f"<ranks cell {number}>", ["\n", *text.splitlines(keepends=True)]
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    body, last = ast.parse("\n" + text, name).body, []
    if body and isinstance(body[-1], ast.Expr):
        line = text.encode().splitlines()[body[-1].end_lineno - 2]
        if not line[body[-1].end_col_offset :].lstrip().startswith(b";"):
            last = [body.pop()]
    return compile(ast.Module(body, []), name, "exec"), compile(ast.Interactive(last), name, "single")


def run_cell(rank: int, world_size: int, codes: tuple, chosen) -> None:
    """Run a cell on this rank, in the namespace that it keeps; print the value of its last line, as notebooks do."""
    if rank not in chosen:
        return
    if "cells" not in kept:
        kept["cells"] = ModuleType("cells")
        sys.modules["cells"] = kept["cells"]  # where pickle and inspect look for what cells define
    names = vars(kept["cells"])
    names |= {"rank": rank, "world_size": world_size}
    for code in codes:
        exec(code, names)


def _variables(rank: int, world_size: int) -> list[str]:
    """The names that cells have set on this rank, modules apart."""
    names = vars(kept["cells"]) if "cells" in kept else {}
    own = {n for n, v in names.items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    return sorted(own - {"rank", "world_size"})


def load_ipython_extension(ipython) -> None:
    """Give a notebook `%%ranks` (`%load_ext gpt2lab.lessons.on_ranks`)."""
    ipython.register_magic_function(RankCells().ranks_magic, "line_cell", "ranks")


def load() -> None:
    """The same for the notebook that calls this, if it is one."""
    if (ipython := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
        load_ipython_extension(ipython)
