"""What a mixture of experts keeps for backward in place of a block's MLP: each expert is one of GPT-2's MLPs.

How many rows an expert gets is the router's choice. Here each token asks for k experts, or for as many as there is
room for, and every expert gets equally many rows; the tests compare that with what routers chose on live ranks.
"""

from .share import RankShare, has_experts


def rows_of(config, length: int, tokens: int) -> float:
    """Rows (token, expert) of so many tokens, in sequences of `length`, that find room."""
    experts = config.experts
    room = experts.experts * experts.room(length) / length
    return tokens * (room if experts.router == "expert_choice" else min(experts.top_k, room))


def kept_more(share: RankShare, layer: int, rows: int, tokens: int) -> int:
    """Bytes that a block keeps more from forward to backward than with a dense MLP; 0 for a layer without experts.

    Of each row what `kept_of_rows` says. What the router keeps is small, and left out.
    """
    if not has_experts(share.config, layer):
        return 0
    dense = share.itemsize * rows * tokens * 8 * share.config.n_embd
    return kept_of_rows(share, rows * tokens, 2) - dense


def kept_of_rows(share: RankShare, tokens: int, ends: int, hidden: int = 1) -> int:
    """Bytes that experts keep of the rows of so many tokens: of two `ends` input and output; hidden layers, or none."""
    numbers = (ends + 8 * hidden) * share.config.n_embd
    return int(share.itemsize * rows_of(share.config, share.length, tokens) * numbers)


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
