"""What an option is, said once: the commands' and benchmarks' tables of options, from which parsers are made."""

import argparse
import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass

from .words import did_you_mean, flag


def within(least: float, most: int = 10**9):
    """The type of an option for argparse: a number from `least` to `most`, a whole one where `least` is whole.

    What is out of range, or no number, gets one sentence with the range.
    """
    kind = type(least)

    def parsed(text: str):
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} does not fit. Use {what} from {least:,} to {most:,}")

    return parsed


positive = within(1)


@dataclass(frozen=True)
class Setting:
    """An option: its help, the type of its value (`bool`: a flag), its default, and the names that it takes.

    `many` is argparse's nargs; `again`: it may be given several times. `also` are other names by which it is known.
    `bare` is its value where it is typed without one. With `placed` it is typed without its name; without `needed` it
    may be left out. Of those of one `group` only one may be typed, and one must be if they are needed. A flag that is
    `either` has its opposite beside it, and is None where neither is typed.
    """

    help: str
    kind: Callable = str
    default: object = None
    choices: Collection | None = None
    many: str | int | None = None
    again: bool = False
    also: tuple[str, ...] = ()
    metavar: str | None = None
    bare: object = None
    placed: bool = False
    needed: bool = False
    group: str = ""
    either: bool = False

    def add(self, parser, name: str) -> None:
        """Add it to a parser under this name; its default is told behind its help."""
        flags = [flag(word) for word in (name, *self.also)]
        if self.kind is bool:
            action = argparse.BooleanOptionalAction if self.either else "store_true"
            default = None if self.either else False
            parser.add_argument(*flags, dest=name, action=action, default=default, help=self.help)
            return
        shown = " ".join(map(str, self.default)) if isinstance(self.default, list | tuple) else self.default
        about = self.help + ("" if self.default is None else f" (default {shown})")
        how = {"type": self.kind, "default": self.default, "choices": self.choices, "metavar": self.metavar}
        how |= {"nargs": self.many, "const": self.bare} if self.many else {}
        if self.placed:
            parser.add_argument(name, help=about, **how)
            return
        how |= {"required": self.needed and not self.group, "action": "append" if self.again else None}
        parser.add_argument(*flags, dest=name, help=about, **how)


def add_options(parser, options: Mapping[str, Setting]) -> None:
    """Add a table of options to a parser."""
    groups = {}
    for name, option in options.items():
        if option.group and option.group not in groups:
            groups[option.group] = parser.add_mutually_exclusive_group(required=option.needed)
        option.add(groups.get(option.group, parser), name)


def of_field(f: Field, kind=None) -> Setting:
    """The option of a field of `run.Options`; what is not typed is None. `kind` takes the place of the field's type."""
    about, choices = f"{f.metadata['about']} (default {f.default})", f.metadata["choices"]
    metavar = None if choices else f.name.upper()
    return Setting(about, kind or f.type, choices=choices, metavar=metavar, either=f.type is bool)


def parser_of(command, prog: str = "gpt2lab") -> "Parser":
    """The parser of a command: its docstring and its table OPTIONS say all."""
    made = Parser(prog, command.__doc__)
    made.epilog = getattr(command, "EPILOG", None)
    add_options(made, command.OPTIONS)
    return made


CHOICES, NAME = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)"), r"[^', ]+"


class Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest name for a misspelled one; `about` is shown as it is written."""

    def __init__(self, prog: str = "gpt2lab", about: str | None = None):
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=about, formatter_class=as_written, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):
        """Like argparse's, but an unknown option is answered with the nearest known one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [o for o in self._option_string_actions if o.startswith("--")]
            self.error(f"there is no {name} here. {did_you_mean(name, known)}")
        return found

    def print_help(self, file=None):
        """Like argparse's, but an output that is full is an error."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str):
        """One sentence and where the options are explained, in place of argparse's list of all options."""
        wrong, known = CHOICES.search(message).groups() if CHOICES.search(message) else ("", "")
        sentence = f"{message}. {did_you_mean(wrong, re.findall(NAME, known))}".rstrip(" .")
        end = "" if sentence.endswith("?") else "."
        self.exit(2, f"{self.prog}: {sentence}{end} See {self.prog} --help.\n")
