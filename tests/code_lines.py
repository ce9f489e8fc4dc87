"""Lines of code in files and folders, ours or others': `python tests/code_lines.py gpt2lab/parallel/tensor.py`.

A line counts where something stands that is no comment and no docstring.
"""

import io
import sys
import tokenize
from pathlib import Path

BLANK = {
    getattr(tokenize, kind)
    for kind in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}


def syntax(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of Python: comments, line ends, indents and docstrings are none."""
    found, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begins = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type not in BLANK and not (begins and token.type == tokenize.STRING):
            found.append(token)
        before = before if token.type in (tokenize.COMMENT, tokenize.NL) else token.type
    return found


def code_lines(text: str) -> int:
    """How many lines have a token, or lie within one."""
    return len({n for token in syntax(text) for n in range(token.start[0], token.end[0] + 1)})


def counted(*paths: str | Path) -> int:
    """Lines of code of files, and of all Python files in folders."""
    files = {file for path in map(Path, paths) for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sum(code_lines(file.read_text()) for file in files)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(f"{counted(path):6,} {path}")
