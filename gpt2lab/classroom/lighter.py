"""Built pages without what none of them needs: `python -m gpt2lab.classroom.lighter FOLDER`.

A theme brings thousands of icons and styles. Here icons are a few lines of `pages.css`, search is loaded by the page of
results, and of every style sheet those rules are kept that can match something on a page.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import tinycss2

UNUSED = "_static/scripts/fontawesome.js", "_static/scripts/bootstrap.js", "_static/vendor"
"""Scripts and fonts for icons and tooltips."""
SEARCH = "_static/searchtools.js", "_static/language_data.js", "searchindex.js"
TAG = r'\s*<(?:script|link)[^>]*(?:src|href)="(?:{})[^"]*"[^>]*>(?:</script>)?'
PLAIN = r'<span class="(?:n|nn|p|w)">([^<]*)</span>'  # code without a colour of its own: a fifth of all bytes
GROUPS = "media", "supports", "layer", "container"


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
    return "\n".join(_kept(tinycss2.parse_stylesheet(css, True, True), known))


def _kept(rules: list, known: set[str]) -> Iterator[str]:
    for rule in rules:
        body = tinycss2.serialize(rule.content or ())
        if rule.type == "qualified-rule":
            parts = (list(part) for comma, part in groupby(rule.prelude, lambda one: one == ",") if not comma)
            if chosen := [tinycss2.serialize(part).strip() for part in parts if _named(part) <= known]:
                yield f"{','.join(chosen)}{{{body}}}"
        elif rule.type == "at-rule" and rule.lower_at_keyword in GROUPS and rule.content:
            if inner := "\n".join(_kept(tinycss2.parse_rule_list(rule.content, True, True), known)):
                yield f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{inner}}}"
        elif rule.type == "at-rule" and "vendor/" not in body:
            yield rule.serialize()


def _named(selector: list) -> set[str]:
    """The classes and ids that a selector asks for; what stands in brackets may be another way to match."""
    classes = {name.value for dot, name in pairwise(selector) if dot == "." and name.type == "ident"}
    return classes | {token.value for token in selector if token.type == "hash"}


def _words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


if __name__ == "__main__":
    lighten(Path(sys.argv[1]))
