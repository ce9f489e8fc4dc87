"""Checkers of lesson 14: costs, the rule of einsum, marks that give Megatron, a cheaper path on live ranks."""

import math
from functools import cache

from ...model import GPT2Config
from ...sharding.gpt2 import captured_gpt2
from ...sharding.layout import local_shape, places
from ...sharding.partition import partition
from ...sharding.propagate import propagate
from ...sharding.reshard import live_axes
from ...sharding.tofu import bytes_of_all
from . import Puzzle, Task
from .differences import Most, randoms
from .ranked import ranked, sent

costs = Task(
    lambda n, M: {"S0 -> R": (n - 1) * M / n, "S0 -> S1": (n - 1) * M / n**2, "P -> S0": (n - 1) * M / n},
    shown=[(4, 960), (2, 48), (3, 90)],
    what="n = {}, M = {}",
    drawn=lambda chance: (chance.randint(2, 9), chance.randint(1, 999)),
)
"""Exercise: bytes a rank sends for three changes of layout, of M bytes on n ranks."""


def _einsum(chance) -> tuple[str]:
    """A product of one to three operands of up to four indices each, some of which are summed over."""
    letters = chance.sample("abcdefgxyz", 5)
    operands = ["".join(chance.sample(letters, chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
    used = sorted(set("".join(operands)))
    return (f"{','.join(operands)}->{''.join(chance.sample(used, chance.randint(0, len(used))))}",)


def _cut_along(text: str) -> dict[str, str]:
    inputs, output = text.split("->")
    return {one: f"S{output.find(one)}" if one in output else "P" for one in inputs.replace(",", "")}


einsum_rule = Task(
    _cut_along,
    shown=[
        (text,)
        for text in (
            *("ik,kj->ij", "bik,bkj->bij", "ij,ij->ij", "ij->j", "bthd,bshd->bhts"),
            *("i,i->", "ij,jk->i", "ab,bc,cd->da"),
        )
    ],
    what="{}",
    drawn=_einsum,
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


def _decided(operators, cut) -> dict:
    """{value: dimension}, or where proposals differ their set."""
    found = {}
    for result, (text, inputs) in operators.items():
        values = dict(zip((*inputs, result), text.replace("->", ",").split(","), strict=True))
        letters = {own[cut[value]] for value, own in values.items() if value in cut}
        for value, own in values.items():
            for letter in letters & {*own} if value not in cut else ():
                found.setdefault(value, set()).add(own.index(letter))
    return {value: dims.pop() if len(dims) == 1 else dims for value, dims in found.items()}


def _program(chance) -> tuple[dict, dict]:
    """Three einsums in a row, of values of up to three indices, and two cuts that no two proposals dispute."""
    values, operators = {name: "".join(chance.sample("abcde", chance.randint(1, 3))) for name in "uvw"}, {}
    for result in "xyz":
        inputs = chance.sample(sorted(values), chance.randint(1, 3))
        texts = [values[name] for name in inputs]
        letters = sorted({*"".join(texts)})
        values[result] = "".join(chance.sample(letters, min(len(letters), chance.randint(1, 3))))
        operators[result] = f"{','.join(texts)}->{values[result]}", tuple(inputs)
    cut = {name: chance.randrange(len(values[name])) for name in chance.sample(sorted(values), 2)}
    disputed = any(isinstance(dims, set) for dims in _decided(operators, cut).values())
    return _program(chance) if disputed else (operators, cut)


next_round = Task(
    _decided,
    shown={f"with {cut} cut, which goes {way}": (operators, cut) for operators, cut, way in ROUNDS},
    what="{0} with {1} cut",
    drawn=_program,
)
"""Exercise: what one round of propagation decides, on the einsums of an MLP, forward and backward, and on others."""


_captured = cache(captured_gpt2)  # seconds, where every call is looked at
MEGATRON = {"wte.weight": "vocab:x", "h.*.attn.c_proj.weight": "heads:x", "h.*.mlp.c_fc.weight": "ff:x"}


def _sends(marks: dict[str, str]) -> dict:
    """What the program that these marks make has cut, and what it sends."""
    graph = _captured(GPT2Config(vocab_size=37, n_positions=8, n_layer=2, n_head=4, n_embd=8), 3, 5)
    program = partition(graph, propagate(graph, _a_dict(marks), mesh := {"x": 2}), mesh)
    cut = ("wte.weight", "h.1.attn.c_attn.weight", "h.1.mlp.c_fc.weight")
    kinds = [kind for kind, _, _ in program.changes()]
    return {
        "marks, the rest follows": len(marks),
        **{f"{name} is cut": bool(program.layouts[name].axes) for name in cut},
        "what is sent": set(kinds),
        "all-reduces of (B, T, C)": sum(
            graph.nodes[value].size == 3 * 5 * 8 for *_, value in program.changes()
        ),
        "all-reduces": len(kinds),
        "bytes sent": bytes_of_all(program),
    }


@cache
def _megatrons() -> dict:
    want = _sends(MEGATRON)
    return want | {
        name: Most(want[name]) for name in ("marks, the rest follows", "all-reduces", "bytes sent")
    }


megatron = Task(
    _megatrons, {"your marks": ()}, call=lambda answer: _sends(answer()), closed=("gpt2lab.sharding.marks",)
)
"""Exercise: the fewest marks that make GPT-2 Megatron's, judged by what the partitioned program sends."""


def _sum_on_a_rank(axis, answer, shape) -> tuple:
    axes, (x,) = live_axes({"x": 2, "y": 2}), randoms(axis.rank, shape)
    return answer(x, axes["x"], axes["y"]), x, sent()


cheaper_path = ranked(
    ("the sum", "x as it was given", "bytes sent"),
    # 1.5 M of 8 bytes a rank; two all-reduces send 2 M
    lambda rank, shape: (
        sum(randoms(r, shape)[0] for r in range(4)),
        *randoms(rank, shape),
        12 * math.prod(shape),
    ),
    _sum_on_a_rank,
    4,
    shown=[((8, 4),), ((12, 3),)],
    what="{}",
    drawn=lambda chance: ((4 * chance.randint(1, 9), chance.randint(1, 9)),),
    count=1,
)
"""Exercise: a sum over both axes of 2 x 2 live ranks, with three quarters of the bytes of two all-reduces."""


AXES, ROOM, BAR, BEST = {"x": 2, "y": 2}, 0.3, 200, 179.5
"""The puzzle: the mesh, the share of the weights for which a rank has room, the bar, the least of 600 sets of marks."""


def puzzle():
    """The graph of a GPT-2 of one layer on 4 x 8 tokens."""
    return _captured(GPT2Config(vocab_size=40, n_positions=16, n_layer=1, n_head=4, n_embd=16), 4, 8)


def _a_dict(marks) -> dict:
    assert isinstance(marks, dict), f"marks: return a dict, not {marks!r}"
    return marks


def _partitioned(marks):
    """The puzzle's graph, partitioned by marks."""
    try:
        return partition(puzzle(), propagate(puzzle(), _a_dict(marks), AXES), AXES)
    except ValueError as error:
        raise AssertionError(str(error)) from None


def _too_much(program) -> dict:
    tokens, held = held_of(program, {"tokens": (4, 8)}), share_held(program)
    return {
        f"a rank has {tokens} of 32 tokens: half are enough, so mark them too": tokens > 16,
        f"a rank holds {held:.0%} of the weights, and there is room for {ROOM:.0%}": held > ROOM,
    }


fewest_bytes = Puzzle(
    lambda program: bytes_of_all(program) / 1024,
    "KiB",
    bar=BAR,
    best=BEST,
    read=_partitioned,
    rules=_too_much,
)
"""Puzzle: marks for four ranks with room for part of the weights; the score is what all ranks send."""


def share_held(program) -> float:
    """The largest share of all weights that a rank holds."""
    shapes = {n: program.graph.nodes[n].shape for n in program.layouts if n not in ("tokens", "targets")}
    return held_of(program, shapes) / sum(map(math.prod, shapes.values()))


def held_of(program, shapes: dict) -> int:
    """The most elements of tensors of these shapes that a rank holds."""
    at = lambda place: [local_shape(shape, program.layouts[n], AXES, place) for n, shape in shapes.items()]
    return max(sum(map(math.prod, at(place))) for place in places(AXES))
