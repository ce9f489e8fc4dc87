"""The kind of a call as one number, which travels with every delivery: a receiver notices a foreign call at once."""

from functools import cache

import torch

MOVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
MOVES += ("all_to_all", "message", "barrier")
DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
WAYS = ("", *COMBINE)  # "": nothing is combined


@cache
def number(move: str, dtype: torch.dtype, combine: str = "") -> int:
    """The number of one kind of call."""
    return (MOVES.index(move) * len(WAYS) + WAYS.index(combine)) * len(DTYPES) + DTYPES.index(dtype)


def describe(kind: int) -> str:
    """The words for a number: `all_reduce SUM float32`."""
    rest, dtype = divmod(kind, len(DTYPES))
    move, combine = divmod(rest, len(WAYS))
    return " ".join(w for w in (MOVES[move], WAYS[combine], str(DTYPES[dtype]).removeprefix("torch.")) if w)
