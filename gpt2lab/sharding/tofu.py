"""Tofu: ranks are halved again and again, and each time a dynamic program cuts every operator of a chain once.

A link of the chain is an operator of two inputs, the activation that comes in and a weight, by its description. In
training each option costs what its activations and their gradients send to get from one link to the next, the sum of
a partial result or gradient, and the sum of a weight's gradient where the weight is whole but the work was cut. One
half may be halved again: the parts are then the shapes.

Wang, Huang & Li 2019, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning", section 5.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .describe import Option, Placement, Rule, analyse
from .expression import Sum

MATMUL = analyse(lambda x, w: lambda n, o: Sum(lambda k: x[n, k] * w[k, o]))


@dataclass(frozen=True)
class ChainOperator:
    """An operator on an activation and a weight of these shapes, with a result of the third."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    rule: Rule = MATMUL

    def options(self) -> list[Option]:
        """All cuts without messages inside: Tofu leaves no operator whole."""
        cuts = [o for o in self.rule.free if o.index not in ("", "partial")]
        places = lambda o: zip(self.shapes, (*o.inputs, o.output), strict=True)
        return [o for o in cuts if all(not isinstance(at, int) or shape[at] >= 2 for shape, at in places(o))]

    def half(self, option: Option) -> "ChainOperator":
        """What one half of the ranks is left with: the larger parts."""
        shorter = lambda shape, at: tuple(-(-n // 2) if d == at else n for d, n in enumerate(shape))
        places = (*option.inputs, option.output)
        return ChainOperator(self.name, tuple(map(shorter, self.shapes, places)), self.rule)


def change(shape: Sequence[int], src: Placement, dst: Placement) -> int:
    """Elements that two halves send to each other to get from one placement to another, together."""
    size = math.prod(shape)
    if src == "sum":
        return 2 * size if dst is None else size
    if src == dst or src is None:
        return 0
    return size if dst is None else size // 2


def inside(link: ChainOperator, option: Option) -> int:
    """Elements for the gradients of one link: of its weight, and of its input where that is whole."""
    incoming, weight, _ = option.inputs[0], option.inputs[1], option.output
    return 2 * math.prod(link.shapes[1]) * (weight is None) + 2 * math.prod(link.shapes[0]) * (
        incoming is None
    )


def between(shape: Sequence[int], src: Placement, dst: Placement) -> int:
    """Elements for an activation from one link to the next, and for its gradient back."""
    back = None if src == "sum" else src
    return change(shape, src, dst) + change(shape, dst, back)


def chain_elements(chain: Sequence[ChainOperator], options: Sequence[Option]) -> int:
    """Elements that two halves send for a chain under these options."""
    edges = zip(chain, options, options[1:], strict=False)
    moved = sum(between(link.shapes[2], a.output, b.inputs[0]) for link, a, b in edges)
    last = change(chain[-1].shapes[2], options[-1].output, None) if options[-1].output == "sum" else 0
    return moved + last + sum(map(inside, chain, options))


def halve(chain: Sequence[ChainOperator]) -> list[Option]:
    """The options of all links with the fewest elements, by dynamic programming along the chain."""
    best = {o: (inside(chain[0], o), (o,)) for o in chain[0].options()}
    for before, link in itertools.pairwise(chain):
        best = {
            o: min(
                (
                    (cost + between(before.shapes[2], p.output, o.inputs[0]) + inside(link, o), (*way, o))
                    for p, (cost, way) in best.items()
                ),
                key=lambda entry: entry[0],
            )
            for o in link.options()
        }
    return list(min((way for _, way in best.values()), key=lambda way: chain_elements(chain, way)))


def brute_force(chain: Sequence[ChainOperator]) -> int:
    """The fewest elements over all choices, for short chains."""
    return min(chain_elements(chain, way) for way in itertools.product(*(link.options() for link in chain)))


def recursive(chain: Sequence[ChainOperator], times: int) -> list[tuple[list[Option], int]]:
    """The options at each halving of 2^times ranks, and the elements that all ranks then send at it."""
    found = []
    for level in range(times):
        options = halve(chain)
        found.append((options, 2**level * chain_elements(chain, options)))
        chain = [link.half(o) for link, o in zip(chain, options, strict=True)]
    return found


def mlp_chain(tokens: int, width: int, layers: int = 1) -> list[ChainOperator]:
    """The products of `layers` MLPs: (tokens, C) times (C, 4 C), then times (4 C, C)."""
    up = ChainOperator("up", ((tokens, width), (width, 4 * width), (tokens, 4 * width)))
    down = ChainOperator("down", ((tokens, 4 * width), (4 * width, width), (tokens, width)))
    return [up, down] * layers
