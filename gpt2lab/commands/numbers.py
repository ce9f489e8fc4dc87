"""The types of options that are numbers: what is out of range, or no number, gets one sentence with the range."""

import argparse
import contextlib


def within(least: float, most: int = 10**9):
    """The type of an option for argparse: a number from `least` to `most`, a whole one where `least` is whole."""
    kind = type(least)

    def parsed(text: str):
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} does not fit. Use {what} from {least:,} to {most:,}")

    return parsed


positive = within(1)
