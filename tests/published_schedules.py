"""What papers promise of schedules, for the simulator to be compared with: idle time and peaks.

p ranks, m micro-batches, v chunks per rank, as in `gpt2lab.schedules.formulas`.
"""

from fractions import Fraction


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
