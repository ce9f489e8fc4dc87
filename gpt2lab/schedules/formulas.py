"""The papers' closed formulas; tests show that the simulator gives exactly the same numbers.

p ranks, m micro-batches, v chunks per rank; TF, TI, TW are the times of the forward, the input gradient and the weight
gradient of one rank's whole share of the model, for one micro-batch. All formulas assume zero latency.
"""

from fractions import Fraction

from ..machine.arguments import checked


@checked(p=1, m=1, forward=0, input_grad=0, weight_grad=0, v=1)
def makespan(
    name: str, p: int, m: int, forward: float = 1, input_grad: float = 1, weight_grad: float = 1, v: int = 2
):
    """The time from the first start to the last end, or None where no paper gives it for these sizes."""
    tf, tb = forward, input_grad + weight_grad
    if name == "naive":
        return m * p * (tf + tb)
    if name in ("gpipe", "1f1b"):
        return (m + p - 1) * (tf + tb)
    if name == "interleaved" and m % p == 0 or name == "breadth_first" and m >= p:
        return m * (tf + tb) + Fraction((p - 1) * (tf + tb), v)
    if name == "chimera" and p % 2 == 0 and (tf == tb and m % p == 0 or 2 * tf == tb and m == p):
        return m * (tf + tb) + (p - 2) * tb
    return None


@checked(p=1, m=1, forward=0, input_grad=0, weight_grad=0, joint=0)
def own_idle(
    name: str,
    p: int,
    m: int,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 1,
    joint: float | None = None,
):
    """Idle time in a rank's own span, from its first start to its last end; None where none is published.

    For DualPipe and DualPipeV it is idle time in the makespan. Zero Bubble (Qi et al. 2023, Table 2) needs enough
    micro-batches, p for ZB-H1 and 2p - 1 for ZB-H2, and weight gradients no longer than the gaps that they fill.
    `joint` is DualPipe's time for a forward and a backward that overlap (DeepSeek-V3 2024, Table 2), m even and at
    least 2p; DualPipeV is DualPipe of 2p ranks, folded: its times are those of half a rank's share.
    """
    tf, ti, tw = forward, input_grad, weight_grad
    if name == "1f1b":
        return (p - 1) * (tf + ti + tw)
    if name == "zb_h1" and m >= p and tw <= tf:
        return (p - 1) * (tf + ti - tw)
    if name == "zb_h2" and m >= 2 * p - 1 and tw <= min(tf, ti):
        return (p - 1) * (tf + ti - 2 * tw)
    if name == "zb_v" and m >= 2 * p and tf == ti == tw:
        return 0
    if joint is not None and tw <= tf <= ti and m >= 2 * p:
        if name == "dualpipe" and p % 2 == m % 2 == 0:
            return (Fraction(p, 2) - 1) * (joint + ti + tw - 3 * tw)
        if name == "dualpipe_v":
            return (p - 1) * (joint + ti + tw - 3 * tw)
    return None


@checked(p=1, m=1, rank=0, v=1, slices=1)
def peak_activations(name: str, p: int, m: int, rank: int, v: int = 2, slices: int = 2):
    """The most activations that a rank holds, counted in stages (a chunk, a token slice) and micro-batches.

    Exact where enough micro-batches fill the pipeline: m a multiple of p for interleaved and Chimera, m >= 2p
    for the V-shaped and dual schedules.
    """
    exact = {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(v * m, 2 * (p - 1 - rank) + (v - 1) * p + 1) if v > 1 else min(m, p - rank),
        "breadth_first": v * m,
        "zb_h1": min(m, p),
        "zb_h2": min(m, 2 * p - 1),
        "zb_v": min(2 * m, 2 * p),
        "chimera": min(p // 2, p - rank) + min(p // 2, rank + 1),
        "dualpipe": p + 1,
        "dualpipe_v": 2 * p + 1,
        "terapipe": m * slices,
    }
    return exact[name]


def peak_memory(name: str, p: int, rank: int) -> tuple[int, int] | None:
    """The peak of a rank of a zero-bubble schedule: (whole activations, micro-batches between I and W), or None.

    Qi et al. 2023, section 2.3, (p - i + 1) MB + (i - 1) MW and (2p - 2i + 1) MB + (2i - 2) MW with ranks counted from
    1; for enough micro-batches.
    """
    return {"zb_h1": (p - rank, rank), "zb_h2": (2 * p - 1 - 2 * rank, 2 * rank)}.get(name)


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
    if p == 1:
        return 0
    borders = {
        "interleaved": v * p - 1,
        "breadth_first": v * p - 1,
        "zb_v": 2 * (p - 1),
        "dualpipe_v": 2 * (p - 1),
    }
    return 2 * m * borders.get(name, p - 1) * (slices if name == "terapipe" else 1)
