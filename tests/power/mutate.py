"""Mutants by rule: small edits of one expression or statement, drawn with a fixed seed from the functions of a room."""

import ast
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = 2026

SHARES = {
    "parallel": 1 / 3,
    "ranks transport": 1 / 5,
    "planner": 1 / 10,
    "schedules": 1 / 12,
    "sharding tasks": 1 / 12,
    "storage processes": 1 / 10,
    "train plan run generate model": 1 / 10,
}
"""The part of all mutants that each group of rooms gets."""

OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
}
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}


@dataclass(frozen=True)
class Mutant:
    """A piece of a file, from `start` to `end` in characters, that is replaced by `wrong`."""

    file: str  # from the root of the checkout
    function: str  # its qualified name
    line: int
    kind: str  # operator, comparison, constant, and-or, not, statement, arguments; a planted one's own words
    start: int
    end: int
    right: str
    wrong: str
    killer: str = ""  # a test that is known to notice it: it is tried first
    turn: int = 1  # the first, second, ... of its function with the same words

    @property
    def name(self) -> str:
        """Where and what, in words that survive edits elsewhere in the file."""
        which = f" ({self.turn})" if self.turn > 1 else ""
        return " ".join(
            f"{self.file} {self.function} {self.kind}: {self.right} -> {self.wrong}{which}".split()
        )

    def text(self) -> str:
        """The file with the bug in it."""
        text = (ROOT / self.file).read_text()
        return text[: self.start] + self.wrong + text[self.end :]


def mutants_of(file: str) -> list[Mutant]:
    """All that the rules make of a file, in the order of its text."""
    text = (ROOT / file).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, found, met = text.encode(), [], Counter()

    def ends(node: ast.AST) -> tuple[int, int]:
        """In bytes."""
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def segment(node: ast.AST) -> str:
        start, end = ends(node)
        return data[start:end].decode()

    for function, node in _inside(ast.parse(text)):
        for kind, old, wrong in _edits(node, segment):
            if segment(old) != wrong:
                start, end = (len(data[:byte].decode()) for byte in ends(old))
                words = segment(old), wrong
                met[function, kind, *words] += 1
                turn = met[function, kind, *words]
                found.append(Mutant(file, function, old.lineno, kind, start, end, *words, turn=turn))
    return found


def planted() -> list[Mutant]:
    """The bugs by hand of `planted.toml`. Raises ValueError where the text that one replaces is not there once."""
    found, files = [], tomllib.loads((Path(__file__).parent / "planted.toml").read_text())
    for file, what, bug in ((file, what, bug) for file, bugs in files.items() for what, bug in bugs.items()):
        text, right = (ROOT / file).read_text(), bug["right"]
        if text.count(right) != 1:
            raise ValueError(f"{file} has changed: {right!r} is not there once. {what}")
        start = text.index(right)
        function = _around(_parsed(text), line := text.count("\n", 0, start) + 1)
        edit = start, start + len(right), right, bug["wrong"]
        found.append(Mutant(file, function, line, what, *edit, bug.get("killer", "")))
    return found


_parsed = cache(ast.parse)


def _around(tree: ast.AST, line: int) -> str:
    """The qualified name of the innermost function around a line."""
    scopes = ast.FunctionDef | ast.ClassDef
    around = [n for n in ast.walk(tree) if isinstance(n, scopes) and n.lineno <= line <= n.end_lineno]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def drawn(count: int, seed: int = SEED, kept: Collection[str] = ()) -> list[Mutant]:
    """So many mutants, spread over the rooms by SHARES and over the functions of a room evenly.

    Those whose names are `kept` and still in the code stay; a hash orders the others, so an edit changes few of them.
    """
    chosen = []
    for rooms, share in SHARES.items():
        by_name = {m.name: m for room in rooms.split() for f in _files(room) for m in mutants_of(f)}
        stay = [by_name.pop(name) for name in kept if name in by_name]
        turns, others = Counter((m.file, m.function) for m in stay), []
        for order, mutant in sorted((sha256(f"{seed} {n}".encode()).digest(), m) for n, m in by_name.items()):
            turn = turns[mutant.file, mutant.function] = turns[mutant.file, mutant.function] + 1
            others.append((turn, order, mutant))
        chosen += [*stay, *(m for *_, m in sorted(others))][: round(count * share)]
    return chosen


def _files(room: str) -> list[str]:
    path = ROOT / "gpt2lab" / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [str(f.relative_to(ROOT)) for f in files]


def _inside(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node inside functions with the function's name; not texts, annotations, decorators and what only raises."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}" if name else child.name
            for statement in child.body:
                if isinstance(child, ast.FunctionDef):
                    yield from _below(statement, inner)
                yield from _inside(ast.Module([statement], []), inner)
        elif isinstance(child, ast.stmt) and not name:
            yield from _inside(child, name)


def _below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    skipped = (
        ast.FunctionDef | ast.ClassDef | ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom
    )
    if isinstance(node, skipped):
        return
    yield name, node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(child, name)


def _edits(node: ast.AST, text) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, the node that is replaced, what stands there instead)."""

    def whole(part: ast.AST) -> str:
        """Its text, in brackets where it has parts that an operator could tear apart."""
        simple = ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript
        return text(part) if isinstance(part, simple) else f"({text(part)})"

    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and not isinstance(left, ast.JoinedStr):
            yield "operator", node, f"{whole(left)} {OPERATORS[type(op)]} {whole(right)}"
        case ast.Compare(left, [op], [right]):
            yield "comparison", node, f"{whole(left)} {COMPARISONS[type(op)]} {whole(right)}"
        case ast.BoolOp(op, values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield "and-or", node, f"({word.join(map(whole, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", node, f"bool({text(operand)})"
        case ast.Constant(bool() as value):
            yield "constant", node, str(not value)
        case ast.Constant(int() as value):
            yield "constant", node, str(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "statement", node, "pass"
        case ast.Call(_, [first, second, *_]) if not any(isinstance(a, ast.Starred) for a in node.args):
            whole = text(node)
            a, b = text(first), text(second)
            head = whole[: whole.index(a, len(text(node.func)))]
            rest = whole[len(head) + len(a) :]
            between = rest[: rest.index(b)]
            yield "arguments", node, head + b + between + a + rest[len(between) + len(b) :]
