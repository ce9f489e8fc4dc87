"""The papers' closed formulas; tests show that the simulator gives exactly the same numbers.

p ranks, m micro-batches, v chunks per rank; TF, TI, TW are the times of the forward, the input gradient and the weight
gradient of one rank's whole share of the model, for one micro-batch. All formulas assume zero latency.
"""

from fractions import Fraction

from ..machine.arguments import checked
from .registry import find


@checked(p=1, m=1, forward=0, input_grad=0, weight_grad=0, v=1)
def makespan(
    name: str, p: int, m: int, forward: float = 1, input_grad: float = 1, weight_grad: float = 1, v: int = 2
):
    """The time from the first start to the last end, or None where no paper gives it for these sizes."""
    name, tf, tb = find(name).name, forward, input_grad + weight_grad
    if name == "naive":
        return m * p * (tf + tb)
    if name in ("gpipe", "1f1b"):
        return (m + p - 1) * (tf + tb)
    if name == "interleaved" and m % p == 0 or name == "breadth_first" and m >= p:
        return m * (tf + tb) + Fraction((p - 1) * (tf + tb), v)
    if name == "chimera" and p % 2 == 0 and (tf == tb and m % p == 0 or 2 * tf == tb and m == p):
        return m * (tf + tb) + (p - 2) * tb
    return None


@checked(tokens=0, width=1, layers=0, vocabulary=0)
def kept_for_weights(tokens: int, width: int, layers: int, vocabulary: int = 0) -> int:
    """Numbers that a stage keeps of one micro-batch from I to W: x and dy of each matrix, 16 C per token and layer.

    Their widths are x: C, C, C, 4C and dy: 3C, C, 4C, C; Qi et al. 2023, Table 1, has 32 s b h bytes for it. In
    addition 13 C per layer, the gradients of biases and norms. The last stage keeps x and dy of the head, which
    has `vocabulary` outputs, and two vectors of its norm. (The first stage computes everything in W and keeps its
    whole graph.)
    """
    head = tokens * (width + vocabulary) + 2 * width if vocabulary else 0
    return layers * (16 * tokens + 13) * width + head


@checked(p=1, m=1, v=1, slices=1)
def messages(name: str, p: int, m: int, v: int = 2, slices: int = 2) -> int:
    """Activations and gradients sent from rank to rank in one step, over the whole pipeline.

    One of each for every micro-batch and every border between stages on different ranks: p - 1 borders; v p - 1 with v
    chunks; 2 (p - 1) along a V, whose middle border is inside a rank.
    """
    name = find(name).name
    borders = dict.fromkeys(("interleaved", "breadth_first"), v * p - 1)
    borders |= dict.fromkeys(("zb_v", "dualpipe_v"), 2 * (p - 1))
    return (p > 1) * 2 * m * borders.get(name, p - 1) * (slices if name == "terapipe" else 1)
