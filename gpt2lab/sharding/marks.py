"""Marks that make GPT-2's known strategies, for one mesh axis each; on a mesh with several axes they are joined by `|`.

propagate(graph, batch("x") | megatron("y"), {"x": 2, "y": 2})
"""

from ..machine.arguments import checked
from .graph import Graph
from .propagate import Mark


@checked()
def megatron(axis: str) -> dict[str, Mark]:
    """Tensor parallel: the vocabulary, the heads and the hidden features are cut; everything else follows."""
    return {
        "wte.weight": Mark(f"vocab:{axis}"),
        "h.*.attn.c_attn.weight": Mark(f"heads:{axis}"),
        "h.*.mlp.c_fc.weight": Mark(f"ff:{axis}"),
    }


@checked()
def batch(axis: str) -> dict[str, Mark]:
    """Data parallel: the rows of the batch are cut."""
    return {"tokens": Mark(f"batch:{axis}")}


@checked()
def sequence(axis: str) -> dict[str, Mark]:
    """Context parallel: the tokens of each sequence are cut, and keys and values are gathered."""
    return {"tokens": Mark(f"seq:{axis}")}


@checked(ranks=1)
def zero(graph: Graph, axis: str, ranks: int, weights: bool = False) -> dict[str, Mark]:
    """ZeRO: the moments of AdamW (or with `weights` the weights themselves) lie cut, on their first long dimension.

    They spread after the marks of the batch. Without `weights`, the weights stay whole between steps.
    """
    found = {}
    for name in graph.inputs:
        if name in ("tokens", "targets"):
            continue
        if name.startswith(("m ", "v ")) or weights:
            shape = graph.nodes[name].shape
            dim = next((d for d, n in enumerate(shape) if n >= ranks), None)
            if dim is not None:
                found[name] = Mark(f"{graph.names[name][dim]}:{axis}", priority=1)
        else:
            found[name] = Mark("", priority=1, closed=True)
    return found
