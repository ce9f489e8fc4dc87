"""What a schedule that splits its backwards keeps, by the paper's formula; tests count the same on live ranks."""

from ..machine.arguments import checked


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
