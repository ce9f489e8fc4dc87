"""The kind of a call as one number, sent with every delivery, so that a receiver notices one of a different call."""

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
OPERATIONS = ("", *COMBINE)  # "": nothing is combined
COUNT = len(MOVES) * len(OPERATIONS) * len(DTYPES)  # kinds of calls that have no root


@cache
def number(move: str, dtype: torch.dtype, combine: str = "", root: int | None = None) -> int:
    """The number of one kind of call."""
    kind = MOVES.index(move) * len(OPERATIONS) + OPERATIONS.index(combine)
    kind = kind * len(DTYPES) + DTYPES.index(dtype)
    return kind if root is None else kind + COUNT * (root + 1)


@cache
def refusal(combine: str, dtype: torch.dtype) -> str:
    """Why tensors of a dtype cannot be combined in this way, as torch says it; empty where they can."""
    try:
        one = torch.ones(1, dtype=dtype)
        COMBINE[combine](one, one, out=one)
        if combine == "AVG":
            one.div_(1)
    except RuntimeError as error:  # also NotImplementedError
        return str(error).splitlines()[0]
    return ""


def kind_name(kind: int) -> str:
    """A kind in words: `all_reduce SUM float32`, `broadcast float32 of root 2`."""
    root, rest = divmod(kind, COUNT)
    rest, dtype = divmod(rest, len(DTYPES))
    move, combine = divmod(rest, len(OPERATIONS))
    words = (MOVES[move], OPERATIONS[combine], str(DTYPES[dtype]).removeprefix("torch."))
    return " ".join(w for w in words if w) + (f" of root {root - 1}" if root else "")
