"""Built pages without what none of them needs: `python -m gpt2lab.classroom.lighter FOLDER`.

A theme brings thousands of icons and styles. Here icons are a few lines of `pages.css`, search is loaded by the page of
results, and of every style sheet those rules are kept that can match something on a page.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

UNUSED = "_static/scripts/fontawesome.js", "_static/scripts/bootstrap.js", "_static/vendor"
"""Scripts and fonts for icons and tooltips."""
SEARCH = "_static/searchtools.js", "_static/language_data.js", "searchindex.js"
TAG = r'\s*<(?:script|link)[^>]*(?:src|href)="(?:{})[^"]*"[^>]*>(?:</script>)?'
PLAIN = r'<span class="(?:n|nn|p|w)">([^<]*)</span>'  # code without a colour of its own: a fifth of all bytes
MARK = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\\.|[(){}\[\],;]""", re.S)
GROUPS = "@media", "@supports", "@layer", "@container"


def lighten(folder: Path) -> None:
    """Change the built pages and style sheets under a folder, and remove files that no page asks for."""
    known: set[str] = set()
    for page in folder.glob("*.html"):
        files = map(re.escape, UNUSED if page.name == "search.html" else UNUSED + SEARCH)
        text = re.sub(TAG.format("|".join(files)), "", page.read_text(encoding="utf-8"))
        text = re.sub(PLAIN, r"\1", text)
        page.write_text(text, encoding="utf-8")
        known |= {name for found in re.findall(r'\b(?:class|id)="([^"]*)"', text) for name in found.split()}
        known |= {
            word for script in re.findall(r"<script.*?</script>", text, re.S) for word in _words(script)
        }
    for name in UNUSED:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for file in folder.rglob("*.map"):
        file.unlink()
    for script in folder.rglob("*.js"):
        known |= set() if script.name in SEARCH else set(_words(script.read_text(encoding="utf-8")))
    for sheet in folder.rglob("*.css"):
        sheet.write_text(needed(sheet.read_text(encoding="utf-8"), known), encoding="utf-8")


def needed(css: str, known: set[str]) -> str:
    """The rules of a style sheet whose selectors name only classes and ids that are known."""
    kept = []
    for rule in _cut(re.sub(r"/\*.*?\*/", "", css, flags=re.S), ";}"):
        head, brace, body = rule.strip().partition("{")
        if head.startswith(GROUPS):
            inner = needed(body[:-1], known)
            kept += [f"{head}{{{inner}}}"] if inner else []
        elif head.startswith("@"):
            kept += [] if "vendor/" in body else [head + brace + body]
        elif chosen := [one.strip(", \n") for one in _cut(head, ",") if _named(one) <= known]:
            kept.append(",".join(chosen) + brace + body)
    return "\n".join(kept)


def _cut(text: str, marks: str) -> Iterator[str]:
    """The parts of a style sheet that end in one of these marks, outside of strings and brackets."""
    depth = start = 0
    for found in MARK.finditer(text):
        one = found[0]
        depth += (one in "([{") - (one in ")]}")
        if depth == 0 and one in marks:
            yield text[start : found.end()]
            start = found.end()
    if text[start:].strip():
        yield text[start:]


def _named(selector: str) -> set[str]:
    """The classes and ids that a selector asks for; what stands in brackets may be another way to match."""
    while (plain := re.sub(r"\[[^\[\]]*\]|\([^()]*\)", "", selector)) != selector:
        selector = plain
    return {re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"[.#]((?:\\.|[\w-])+)", selector)}


def _words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


if __name__ == "__main__":
    lighten(Path(sys.argv[1]))
