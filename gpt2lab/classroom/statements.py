"""Statements of a student's cells: which of them run with an answer, and which names they set, change and look up."""

import ast
import contextlib
import re
import symtable
import tokenize

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
DEFINITIONS += (ast.TypeAlias,) if hasattr(ast, "TypeAlias") else ()  # of Python 3.12
PARTS = (ast.Subscript, ast.Attribute)
SETS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
COMMAND = re.compile(r"(\s*\w+\s*=\s*)[%!].*|\s*[%!?].*|[^#]*\?\s*")
"""A line for the notebook alone, where a statement begins: name = !ls, %time, ?name or name?"""
LOOK_ONLY = ("check", "print", "display")
"""Functions that change none of the values that they are given."""
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
"""What Python raises for a text that it cannot compile."""


def as_python(source: str) -> str:
    """A cell's text as Python: commands for the notebook alone leave an empty line, or None where a name gets one."""
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for i, line in enumerate(lines):
        if (command := COMMAND.fullmatch(line)) and not _goes_on(lines[:i]):
            lines[i] = f"{command[1]}None" if command[1] else ""
    return "\n".join(lines)


def _goes_on(lines: list[str]) -> bool:
    """Whether the last statement of these lines does not end with them."""
    try:
        list(tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__))
    except tokenize.TokenError:  # a bracket, a text or a line is open
        return True
    except SyntaxError:
        pass
    return False


def parsed(text: str) -> ast.Module:
    """The tree of a cell that Python can compile, which `ast.parse` alone does not tell; raises NOT_PYTHON."""
    compile(text, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return ast.parse(text)


def needed(text: str, nodes: list[ast.stmt], given: set[str]) -> list[ast.stmt]:
    """Of an exercise's cell what defines something, and what changes a value that this reads: no prints, no checks."""
    kinds = (*DEFINITIONS, ast.Assign, ast.AnnAssign)
    found, others = ([n for n in nodes if isinstance(n, kinds) == own] for own in (True, False))
    functions = given | set_names(ast.Module([n for n in found if isinstance(n, DEFINITIONS)], []))
    read = outside_names(text_of(found, text)) - functions
    for node in reversed(others):
        if _changes(node) & read:
            found.append(node)
            read |= outside_names(ast.unparse(node)) - functions - set_names(ast.Module([node], []))
    return found


def _changes(node: ast.stmt) -> set[str]:
    """The names that a statement sets, of whose values it changes a part or calls a method, or gives to a call."""
    inside = list(ast.walk(node))
    parts = [n for n in inside if isinstance(n, PARTS) and not isinstance(n.ctx, ast.Load)]
    calls = [n.value for n in inside if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", "") not in LOOK_ONLY]
    found = set_names(ast.Module([n for n in inside if isinstance(n, ast.stmt)], []))
    for part in parts + [n.func for n in calls if isinstance(n.func, ast.Attribute)]:
        while isinstance(part, PARTS):
            part = part.value
        found |= {part.id} if isinstance(part, ast.Name) else set()
    given = (ast.walk(one) for call in calls for one in (*call.args, *call.keywords))
    return found | {n.id for nodes in given for n in nodes if isinstance(n, ast.Name)}


def left_out(read: set[str], cells: list[dict], own: str) -> list[str]:
    """Of these names those that other cells set or change in a way that `definitions` passes over."""
    found = set()
    for cell in cells:
        with contextlib.suppress(*NOT_PYTHON):
            for node in parsed(cell["source"]).body if cell["source"] != own else ():
                found |= set() if _defines(node) else _changes(node)
    return sorted(read & found)


def _defines(node: ast.stmt) -> bool:
    """Whether a statement of any cell runs with an answer that needs what it sets: it calls nothing."""
    sets = isinstance(node, SETS) and node.value and not _calls(node)
    return isinstance(node, DEFINITIONS) or (sets and bool(set_names(ast.Module([node], []))))


def text_of(nodes: list[ast.stmt], text: str) -> str:
    """The text with only these statements, at their lines."""
    own = {line for node in nodes for line in range(_first(node), node.end_lineno + 1)}
    return "\n".join(line if i in own else "" for i, line in enumerate(text.split("\n"), 1))


def _first(node: ast.stmt) -> int:
    """The line at which a statement begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def definitions(cells: list[dict]) -> dict[str, str]:
    """What the cells define at last: name -> text, in the notebook's order; "*" -> all imports of all names."""
    there = {}
    for cell in cells:
        try:
            nodes = parsed(cell["source"]).body
        except NOT_PYTHON:
            continue
        lines = cell["source"].split("\n")
        for node in nodes:
            if _defines(node):
                one = "\n".join(lines[_first(node) - 1 : node.end_lineno]) + "\n"
                for name in set_names(ast.Module([node], [])):
                    before = there.pop(name, "")
                    if not isinstance(node, ast.AugAssign):
                        there[name] = before + one if name == "*" else one
                    elif before:  # the names that were set together with it stay so
                        same = [name, *(other for other, text in there.items() if text == before)]
                        there |= dict.fromkeys(same, before + one)
    return there


def helpers(text: str, there: dict[str, str], given: set[str]) -> str:
    """Definitions of the notebook's other cells that a text needs, and before them what these need in turn.

    Imports of all names come first, as nobody knows which names these are.
    """
    at = {name: i for i, name in enumerate(there)}
    found, known, new = [], given | set_names(ast.parse(text)), [text]
    while new:
        missing = set().union(*map(outside_names, new)).difference(known) & there.keys()
        new = list(dict.fromkeys(there[name] for name in sorted(missing, key=at.get)))
        known = known.union(missing, *(set_names(ast.parse(one)) for one in new))
        found = new + found
    return "".join([there.get("*", ""), *found])


def _calls(node: ast.AST) -> bool:
    """Whether running a statement calls anything, functions that it only defines apart."""
    look = [node]
    for one in look:  # it grows
        if isinstance(one, ast.Call):
            return True
        look += () if isinstance(one, ast.Lambda) else ast.iter_child_nodes(one)
    return False


def set_names(tree: ast.Module) -> set[str]:
    """The names that a cell sets at its outermost level."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(getattr(node, "name", None), str):
            found.add(node.name)
        else:
            named = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found |= {n.id for n in named if isinstance(n.ctx, ast.Store)}
    return found


def outside_names(text: str) -> set[str]:
    """The names that a text, or a function in it, looks up among those of its module or Python's own."""
    scopes = [symtable.symtable(text, "cell", "exec")]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    found = (s for scope in scopes for s in scope.get_symbols())
    return {s.get_name() for s in found if s.is_referenced() and s.is_global()}
