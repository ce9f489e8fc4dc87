"""Checkers of lesson 14: costs, the rule of einsum, marks that give Megatron, a cheaper path on live ranks."""

import math
from functools import cache

import torch

from ...model import GPT2Config
from ...ranks import comm
from ...sharding.gpt2 import captured_gpt2
from ...sharding.layout import local_shape, places
from ...sharding.partition import partition
from ...sharding.propagate import propagate
from ...sharding.reshard import live_axes
from ...sharding.tofu import bytes_of_all
from . import Puzzle, Task, close, live, refuse, returned


def _no_costs(found, n: int, M: int) -> dict:
    is_ = lambda change, value: abs(found.get(change, -1) - value) < 1e-9
    part = M / n
    return {
        "a rank need not send to itself what it has (S0 -> R)": is_("S0 -> R", M),
        "S0 -> S1 is no all-gather. Of its M / n a rank sends an n-th to each of the others": (
            n > 2 and is_("S0 -> S1", (n - 1) * part)
        ),
        "P -> S0 is half an all-reduce, because the sum is not needed everywhere": (
            is_("P -> S0", 2 * (n - 1) * part)
        ),
    }


def _a_dict(found, words: str) -> dict:
    assert isinstance(found, dict), f"{words}: return a dict, not {found!r}"
    return found


costs = Task(
    lambda n, M: {"S0 -> R": (n - 1) * M / n, "S0 -> S1": (n - 1) * M / n**2, "P -> S0": (n - 1) * M / n},
    shown=[(4, 960), (2, 48), (3, 90)],
    what="n = {}, M = {}",
    drawn=lambda chance: (chance.randint(2, 9), chance.randint(1, 999)),
    like=_a_dict,
    rules=_no_costs,
)
"""Exercise: bytes a rank sends for three changes of layout, of M bytes on n ranks."""


def _einsum(chance) -> tuple[str]:
    """A product of one to three operands of up to four indices each, some of which are summed over."""
    letters = chance.sample("abcdefgxyz", 5)
    operands = ["".join(chance.sample(letters, chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
    used = sorted(set("".join(operands)))
    return (f"{','.join(operands)}->{''.join(chance.sample(used, chance.randint(0, len(used))))}",)


def _no_rule(found: dict, text: str) -> dict:
    inputs, output = text.split("->")
    labels = sorted(set(inputs) - {","})
    said = {f"index {one} can be cut too": one not in found for one in labels}
    said |= {f"{one!r} is no index": one not in labels for one in found}
    for one in labels:
        got, at = found.get(one), output.find(one)
        want = (
            f"S{at}, because it is dimension {at} of the result"
            if at >= 0
            else "P, because it is summed over"
        )
        said[f"cut along {one} the ranks hold different things, so not R"] = got == "R"
        said[f"cut along {one} the result is {want}; not {got}"] = got != want.split(",")[0]
    return said


einsum_rule = Task(
    None,
    shown=[
        (text,)
        for text in (
            *("ik,kj->ij", "bik,bkj->bij", "ij,ij->ij", "ij->j", "bthd,bshd->bhts"),
            *("i,i->", "ij,jk->i", "ab,bc,cd->da"),
        )
    ],
    what="{}",
    drawn=_einsum,
    like=_a_dict,
    rules=_no_rule,
)
"""Exercise: what the result is when an index of an einsum is cut."""


MLP = {"h": ("bi,fi->bf", ("x", "W1")), "y": ("bf,of->bo", ("h", "W2")), "grad W2": ("bo,bf->of", ("g", "h"))}
LONG = MLP | {"grad h": ("bo,of->bf", ("g", "W2")), "grad W1": ("bf,bi->fi", ("grad h", "x"))}
ROUNDS = (
    ({"y": MLP["y"]}, {"h": 0}, "from an operand to the result"),
    ({"h": MLP["h"]}, {"h": 1}, "from the result to the operands"),
    ({"c": ("ij,jk->ik", ("a", "b"))}, {"a": 1}, "also from one operand to another"),
    ({"s": ("ij->j", ("a",))}, {"a": 1}, "through operators of one operand"),
    (
        {"d": ("ij,jk,kl->il", ("a", "b", "c"))},
        {"b": 1, "d": 0},
        "from every value that is cut, to all operands",
    ),
    (MLP, {"W1": 0}, "on to the next operator in the next round"),
    (LONG, {"W1": 0, "h": 1}, "to every reader of a value"),
    (LONG, {"grad W1": 0}, "to operands, in backward too"),
    (LONG, {"W2": 0, "x": 0}, "to every operand that has the index"),
)


def next_round(answer) -> None:
    """Exercise: what one round of propagation decides, on the einsums of an MLP, forward and backward."""
    for operators, cut, way in ROUNDS:
        want, text, given = _decided(operators, cut), f"with {cut} cut", dict(cut)
        found = answer(dict(operators), given)
        assert isinstance(found, dict), f"{text}: return a dict from values to dimensions"
        if again := sorted(set(found) & set(cut)):
            raise AssertionError(f"{text}: {again[0]} was in cut already, and a mark is never changed")
        further = _decided(operators, cut | want)
        for value in sorted(set(found) - set(want)):
            why = (
                "is two rounds away: use the state before the round"
                if value in further
                else "has no such index"
            )
            raise AssertionError(f"{text}: {value} is decided, but {why}. Find the index by its letter")
        missing = sorted(set(want) - set(found))
        assert not missing, f"{text}: {missing[0]} is missing. Cuts go {way}"
        wrong = [v for v in want if found[v] != want[v]]
        assert given == cut, (
            f"{text}: your function changes `cut`. Return the new cuts, and leave it as it is"
        )
        assert not wrong, (
            f"{text}: {wrong[0]} is cut along dimension {found[wrong[0]]} instead of {want[wrong[0]]}. "
            "Find the index by its letter, not by its place in the other value"
        )


def _decided(operators, cut) -> dict:
    found = {}
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        letters = {own[cut[value]] for value, own in values.items() if value in cut}
        for value, own in values.items():
            for letter in letters if value not in cut else ():
                if letter in own:
                    found[value] = own.index(letter)
    return found


MEGATRON = {"wte.weight": "vocab:x", "h.*.attn.c_proj.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}


def megatron(answer) -> None:
    """Exercise: the fewest marks that make GPT-2 Megatron's, judged by what the partitioned program sends."""
    graph = captured_gpt2(GPT2Config(vocab_size=37, n_positions=8, n_layer=2, n_head=4, n_embd=8), 3, 5)
    marks = _a_dict(returned(answer()), "marks")
    assert len(marks) <= 3, f"{len(marks)} marks: three are enough, the rest follows"
    mesh = {"x": 2}
    program = partition(graph, propagate(graph, marks, mesh), mesh)
    for name, what in (
        ("wte.weight", "vocabulary"),
        ("h.1.attn.c_attn.weight", "heads"),
        ("h.1.mlp.c_fc.weight", "ff"),
    ):
        assert program.layouts[name].axes, f"nothing cuts {name} (its {what}) in every layer"
    kinds = {kind for kind, _, _ in program.changes()}
    assert kinds == {"all-reduce"}, (
        f"the program also sends {', '.join(sorted(kinds - {'all-reduce'}))}: not Megatron"
    )
    wide = [value for _, _, value in program.changes() if graph.nodes[value].size == 3 * 5 * 8]
    assert len(wide) == 10, (
        f"{len(wide)} all-reduces of (B, T, C) instead of 2 x 2 a layer, embedding and head: 10"
    )
    right = partition(graph, propagate(graph, MEGATRON, mesh), mesh)
    more, sent, least = (
        len(program.changes()) - len(right.changes()),
        bytes_of_all(program),
        bytes_of_all(right),
    )
    assert more <= 0 and sent <= least, (
        f"{more} all-reduces more than Megatron's, and {sent:,} bytes instead of {least:,}: a mark cuts a dimension "
        "that is summed over where heads, neurons or words are to be cut"
    )


def cheaper_path(answer) -> None:
    """Exercise: a sum over both axes of 2 x 2 live ranks, with three quarters of the bytes of two all-reduces."""
    for shape in ((6, 4), (10, 3)):
        _summed_over_both(answer, shape)


def _summed_over_both(answer, shape: tuple[int, int]) -> None:
    found = live(_sum_on_a_rank, answer, shape, ranks=4, what=f"{shape}")
    want = sum(_term(rank, shape) for rank in range(4))
    sent, size = sum(size for _, size, _ in found), want.numel() * 8
    for rank, (got, _, same) in enumerate(found):
        returned(got)
        refuse(
            f"rank {rank}",
            {
                "writes into the x that it was given; make a new tensor": not same,
                f"returns shape {tuple(got.shape)} instead of the whole {shape}": got.shape != want.shape,
                f"the elements add up to {got.sum():.4g} instead of {want.sum():.4g}. Every rank's term counts once": (
                    abs(got.sum() - want.sum()) > 1e-6
                ),
            },
        )
        close(got, want, f"rank {rank}: the elements add up, but are not where they belong, or lost digits")
    each = f"{sent / size / 4:g} M"
    refuse(
        "right",
        {
            f"but {each} a rank were counted: use the three calls of comm": sent < 6 * size,
            "but these are two all-reduces, 2 M a rank. Scatter over x first": sent == 8 * size,
            f"but the ranks sent {each} each; 1.5 M are enough": sent > 6 * size,
        },
    )


def _sum_on_a_rank(rank, world_size, answer, shape):
    axes, x = live_axes({"x": 2, "y": 2}), _term(rank, shape)
    comm.clear_log()
    y = answer(x, axes["x"], axes["y"])
    return y, sum(e.bytes for e in comm.log), torch.equal(x, _term(rank, shape))


def _term(rank: int, shape: tuple[int, int]):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


AXES, ROOM, BAR, BEST = {"x": 2, "y": 2}, 0.3, 200, 179.5
"""The puzzle: the mesh, the share of the weights for which a rank has room, the bar, the least of 600 sets of marks."""


@cache
def puzzle():
    """The graph of a GPT-2 of one layer on 4 x 8 tokens."""
    config = GPT2Config(vocab_size=40, n_positions=16, n_layer=1, n_head=4, n_embd=16)
    return captured_gpt2(config, 4, 8)


def _program(marks):
    """The puzzle's graph, partitioned by marks."""
    _a_dict(marks, "marks")
    try:
        return partition(puzzle(), propagate(puzzle(), marks, AXES), AXES)
    except ValueError as error:
        raise AssertionError(str(error)) from None


def _too_much(program) -> dict:
    tokens = max(
        math.prod(local_shape((4, 8), program.layouts["tokens"], AXES, place)) for place in places(AXES)
    )
    held = share_held(program)
    return {
        f"a rank has {tokens} of 32 tokens: half are enough, so mark them too": tokens > 16,
        f"a rank holds {held:.0%} of the weights, and there is room for {ROOM:.0%}": held > ROOM,
    }


fewest_bytes = Puzzle(
    lambda program: bytes_of_all(program) / 1024, "KiB", bar=BAR, best=BEST, read=_program, rules=_too_much
)
"""Puzzle: marks for four ranks with room for part of the weights; the score is what all ranks send."""


def share_held(program) -> float:
    """The largest share of all weights that a rank holds."""
    shapes = {n: program.graph.nodes[n].shape for n in program.layouts if n not in ("tokens", "targets")}
    held = [
        sum(math.prod(local_shape(shape, program.layouts[n], AXES, place)) for n, shape in shapes.items())
        for place in places(AXES)
    ]
    return max(held) / sum(map(math.prod, shapes.values()))
