"""Mesh-TensorFlow: dimensions have names, and a layout says for some names over which mesh axis they are cut.

Every tensor with such a dimension is cut there, and an einsum over it ends in an all-reduce. A layout is legal where
no tensor has two dimensions on one axis. `batch:x` is data parallelism, `heads:y, ff:y, vocab:y` Megatron.

Shazeer et al. 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers", section 3, arXiv:1811.02084.
"""

import itertools
from collections.abc import Mapping, Sequence

from ..machine.arguments import checked
from ..machine.patience import patiently
from .graph import Graph
from .layout import Mesh
from .propagate import Mark

Tensors = Mapping[str, Sequence[str]]  # of each tensor, the names of its dimensions


@checked()
def complaint(tensors: Tensors, layout: Mapping[str, str]) -> str:
    """Why a layout (name of a dimension: mesh axis) is illegal; empty where it is legal."""
    for tensor, dims in tensors.items():
        for axis in sorted(set(layout.values())):
            found = [d for d in dims if layout.get(d) == axis]
            if len(found) > 1:
                return (
                    f"{tensor} has the dimensions {' and '.join(found)}, and both are on mesh axis {axis!r}. "
                    f"Put one of them on another axis."
                )
    return ""


@checked(mesh=1)
def legal_layouts(tensors: Tensors, mesh: Mesh) -> list[dict[str, str]]:
    """Every legal layout: each name on one axis or on none, except `qkv` and `keys`, which stay whole."""
    names = list(dict.fromkeys(d for dims in tensors.values() for d in dims if d not in ("qkv", "keys")))
    every = itertools.product((None, *mesh), repeat=len(names))
    choices = patiently(every, "layouts", (1 + len(mesh)) ** len(names))
    layouts = [{n: a for n, a in zip(names, choice, strict=True) if a} for choice in choices]
    return [layout for layout in layouts if not complaint(tensors, layout)]


@checked()
def marks(graph: Graph, layout: Mapping[str, str], tensors: Tensors | None = None) -> dict[str, Mark]:
    """The marks of all inputs of a graph under a layout by names.

    Raises ValueError for a layout that is illegal, or that names a dimension which nothing has.
    """
    tensors = tensors or graph.names
    if why := complaint(tensors, layout):
        raise ValueError(why)
    known = sorted({d for dims in tensors.values() for d in dims})
    if unknown := sorted(set(layout) - set(known)):
        raise ValueError(f"no tensor has a dimension {unknown[0]!r}. There are {', '.join(known)}.")
    found = {}
    for name, dims in graph.names.items():
        text = ", ".join(f"{d}:{layout[d]}" for d in dims if d in layout)
        if text:
            found[name] = Mark(text)
    return found
