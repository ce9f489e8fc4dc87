"""Where answers to exercises are tried outside a notebook: by CI, which proves every checker, and by the grader.

What a lesson gives (its `setup` cells, its `check` lines) and what an answer defines live in two namespaces. An
answer that sets `check` or the checkers anew changes only its own.
"""

import ast
import linecache

from .exercises import __name__ as exercises
from .exercises import verdict
from .exercises.guards import closed, guarded, restored


class Desk:
    """The `setup` cells of one lesson, run once; answers are then tried one after the other."""

    def __init__(self, lesson: str, setup: list[str]):
        self.lesson, self.count = lesson, 0
        self.names = {"__name__": "__main__"}  # as in a notebook, so that functions reach live ranks by value
        for text in setup:
            self.run(text, self.names)

    def verdicts(self, before: str, answer: str, checks: str) -> list[tuple[str, str, str]]:
        """(name, PASS or TODO or FAIL, words) of every check line, with what `before` and then `answer` define.

        An answer that raises where it is defined fails, with what it raised; so does one that replaces a checker there.
        """
        given, found = dict(self.names), []
        self.run(before, given)
        own, judges = dict(given), guarded()
        try:
            with closed(exercises):  # what judges gives no answer to one that asks where it is defined
                self.run(answer, own)
        except (Exception, SystemExit) as error:
            restored(judges)
            words = f"your cell does not run: {type(error).__name__}: {error}"
            return [(name, "FAIL", words) for name in titles(checks)]
        if replaced := restored(judges):
            words = f"your cell replaces {replaced[0]}, which judges it; leave it as it is"
            return [(name, "FAIL", words) for name in titles(checks)]
        given |= {name: own[name] for name in defined(before) if name in own}

        def check(name, test, *args, **kwargs):
            found.append((name, *verdict(test, *args, **kwargs)))

        self.run(checks, given | {"check": check})
        return found

    def run(self, text: str, names: dict) -> None:
        """Execute a text so that tracebacks and `inspect` find its lines."""
        self.count += 1
        file = f"<{self.lesson} {self.count}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), names)


def split(text: str) -> tuple[str, str]:
    """An exercise's text as (definitions, check lines)."""
    checks = [node for node in ast.parse(text).body if _is_check(node)]
    own = {line for node in checks for line in range(node.lineno - 1, node.end_lineno)}
    lines = text.splitlines()
    return tuple(
        "\n".join(line for i, line in enumerate(lines) if (i in own) == wanted) for wanted in (False, True)
    )


def titles(checks: str) -> list[str]:
    """The names of the exercises that these check lines judge."""
    return [node.value.args[0].value for node in ast.parse(checks).body if _is_check(node)]


def defined(text: str) -> list[str]:
    """The functions and classes that a cell defines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds)]


def _is_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check"
