"""What a mixture of experts has in place of a block's MLP on one rank: parameters, and what it keeps for backward.

How many rows an expert gets is the router's choice. Here each token asks for k experts, or for as many as there is
room for, and every expert gets equally many rows; the tests compare that with what routers chose on live ranks.
"""

from ..ranks.traffic import split_sizes
from .share import RankShare


def rows_of(share: RankShare, tokens: int) -> float:
    """Rows (token, expert) of so many tokens that find room."""
    experts, length = share.config.experts, share.length
    room = experts.experts * experts.room(length) / length
    return tokens * (room if experts.router == "expert_choice" else min(experts.top_k, room))


def kept_more(share: RankShare, layer: int, rows: int, tokens: int) -> int:
    """Bytes that a block keeps more from forward to backward than with a dense MLP; 0 for a layer without experts.

    Of each row what `kept_of_rows` says; of each token the shared expert's hidden layers and, with sequence
    parallelism, its input, which was gathered. What the router keeps is small, and left out.
    """
    if not share.has_experts(layer):
        return 0
    plan, c, count, shared = share.plan, share.config.n_embd, rows * tokens, hidden_of(share)[1]
    each = _inside(share) * shared + c * bool(plan.sp and shared) - 2 * split_sizes(4 * c, plan.tp)[share.tp]
    return share.itemsize * count * each + kept_of_rows(share, count, 2)


def kept_of_rows(share: RankShare, tokens: int, ends: int, hidden: int = 1) -> int:
    """Bytes that experts keep of the rows of so many tokens: of two `ends` input and output; hidden layers, or none."""
    numbers = ends * share.config.n_embd + hidden * _inside(share) * hidden_of(share)[0]
    return int(share.itemsize * rows_of(share, tokens) * numbers)


def in_backward(share: RankShare, size: int, tokens: int, plain: int, late: int) -> tuple[int, int, int]:
    """What a block's backward holds besides: in passing, in experts' gradients, and less, in rows that are over.

    It begins with what experts gave, weighted and summed: that holds each row's gradient three times. Later all
    gradients of its experts are there (`late` bytes), while attention's part is not over. Without experts (`size`
    bytes) it is `plain`.
    """
    if not size:
        return plain, 0, 0
    begins, gone = max(plain, 3 * kept_of_rows(share, tokens, 1, 0)), kept_of_rows(share, tokens, 1)
    return (plain, late, gone) if plain + late - gone > begins else (begins, 0, 0)


def _inside(share: RankShare) -> int:
    """Tensors of the hidden width that autograd keeps."""
    return 4 if share.config.experts.gated else 2


def waits_more(share: RankShare, layer: int, tokens: int) -> int:
    """Bytes more than with a dense MLP that wait for a block's weight gradients: operands of the experts' products."""
    if not share.has_experts(layer):
        return 0
    c, (mine, shared) = share.config.n_embd, hidden_of(share)
    inside = 3 if share.config.experts.gated else 2
    numbers = rows_of(share, tokens) * (2 * c + inside * mine) + tokens * inside * shared
    return int(share.itemsize * (numbers - tokens * 2 * split_sizes(4 * c, share.plan.tp)[share.tp]))


def hidden_of(share: RankShare) -> tuple[int, int]:
    """Hidden features of an expert and of the shared one that are here: tensor parallelism cuts them."""
    experts = share.config.experts
    width = experts.hidden or 4 * share.config.n_embd
    return tuple(split_sizes(n * width, share.plan.tp)[share.tp] for n in (1, experts.shared))
