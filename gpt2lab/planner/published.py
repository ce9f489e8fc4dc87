"""What papers and other programs compute of a model: operations with recomputation, activations, memory of ZeRO.

Each function is one published formula, in its own units; the tests hold it against the published table.
"""

from ..machine.arguments import MORE, checked


@checked(rows=1, length=1, layers=1, width=1, vocabulary=0)
def step_flops(
    rows: int, length: int, layers: int, width: int, vocabulary: int, recompute: bool = True
) -> float:
    """Operations of a step, 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation of all layers, else 72 and V/12lh.

    Narayanan et al. 2021, appendix: with it a utilisation counts what the hardware does (HFU), without it what the
    model needs (MFU).
    """
    b, s, n, h, v = rows, length, layers, width, vocabulary
    full, head = (96, 16) if recompute else (72, 12)
    return full * b * s * n * h * h * (1 + s / (6 * h) + v / (head * n * h))


@checked(length=1, rows=1, width=1, heads=1, tensor=1)
def activation_bytes(
    length: int,
    rows: int,
    width: int,
    heads: int,
    tensor: int = 1,
    sequence: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations of one layer in 16 bit, by table 2 of Korthikanti et al. 2022.

    `recompute` is none, selective (attention's matrices alone) or full (the layer's input alone). Raises ValueError
    for another one.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"There is no recomputation called {recompute!r}. Use none, selective or full.")
    sbh, t = length * rows * width, tensor
    if recompute == "full":
        return 2.0 * sbh
    matrices = 0.0 if recompute == "selective" else 5 * heads * length / width / t
    return sbh * (34 / t + matrices if sequence else 10 + 24 / t + matrices)


@checked(parameters=0, largest_layer=0, ranks=1)
def estimated_memory(parameters: float, largest_layer: float, stage: int, ranks: int) -> float:
    """Bytes a GPU for parameters, gradients and optimizer without offload, as DeepSpeed's memory estimators say.

    Stage 2: 4 P + 16 P / n (deepspeed.runtime.zero.stage_1_and_2). Stage 3: 18 P / n and 4 bytes of the largest layer
    (stage3). Mixed precision with Adam; no activations, no buffers. Raises ValueError for another stage.
    """
    if stage == 2:
        return 4 * parameters + 16 * parameters / ranks
    if stage == 3:
        return 4 * largest_layer + 18 * parameters / ranks
    raise ValueError(f"DeepSpeed estimates stages 2 and 3, not {stage}. Use planner.memory for the others.")


@checked(parameters=0, tokens_per_second=0, devices=1, peak=MORE, more=0)
def utilisation(
    parameters: float, tokens_per_second: float, devices: int, peak: float, more: float = 0.0
) -> float:
    """The share of the peak that a run reaches: (6 N + more) operations a token (PaLM 2022, appendix B).

    `more` is 12 L H Q T, attention's; 0 where only N is given.
    """
    return (6 * parameters + more) * tokens_per_second / (devices * peak)
