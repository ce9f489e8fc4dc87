"""Text from a model, one token after another: sampling, and a cache of keys and values.

Without the cache every new token costs a forward pass over the whole text so far; with it, over one token.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .machine.arguments import MORE, checked
from .machine.few_rows import FewRows
from .machine.words import refuse

END_OF_TEXT = 50256  # <|endoftext|>, the last token of GPT-2's vocabulary


@checked(temperature=0, top_k=1, top_p=(MORE, 1))
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the most likely; `top_k` and `top_p` exclude unlikely ones.

    `top_p` keeps the smallest set of tokens that together have at least this probability (Holtzman et al. 2020, "The
    Curious Case of Neural Text Degeneration"). Random numbers depend only on (seed, row, position). Raises ValueError
    for values that leave no token to choose from, or would change nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        idle = ("top_k", "top_p", "seed") if self.temperature == 0 else ()
        given = [name for name in idle if getattr(self, name) != getattr(Sampling, name)]
        refuse(given, dict.fromkeys(idle, "temperature = 0 takes the likeliest"), str)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The probabilities (B, V), in float64, that the next tokens are drawn with."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # no infinity, however cold
        if self.top_k is not None and self.top_k < logits.size(-1):
            kept = logits.topk(self.top_k, -1)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
        p = logits.softmax(-1)
        if self.top_p is not None:
            ranked, order = p.sort(-1, descending=True)
            before = ranked.cumsum(-1) - ranked  # the probability of all likelier tokens
            p = torch.zeros_like(p).scatter_(-1, order, ranked.where(before < self.top_p, 0.0))
        return p / p.sum(-1, keepdim=True)

    def draw(self, logits: torch.Tensor, lengths: Sequence[int], rows: Sequence[int] = ()) -> list[int]:
        """One token for each row of logits (B, V); lengths[b] is the position that row b fills.

        `rows` are the rows' numbers in a larger batch, on which their random numbers hang. Raises FloatingPointError
        where a row has a NaN or only infinities.
        """
        if not logits.amax(-1).isfinite().all():
            raise FloatingPointError(
                "The logits are not finite: the model's weights are damaged or diverged."
            )
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        sums = self.probabilities(logits).cumsum(-1)  # (B, V)
        numbered = zip(rows or range(len(lengths)), lengths, strict=True)
        uniform = [_uniform(self.seed, row, position) for row, position in numbered]
        marks = torch.tensor(uniform, dtype=torch.float64, device=sums.device)[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, marks, right=True)[:, 0].tolist()


def _uniform(*key: int) -> float:
    """A number in [0, 1) that depends only on the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@checked(slots=1)
class KVCache:
    """Keys and values (B, H, slots, D) of every attention layer, each in the slot of its position.

    So rows of different length need no padding on the left: a row's unused slots are after its last position, where
    causal attention does not look, and are filled as the row grows.
    Bytes held: 2 L B slots C times the bytes of a number.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.layers: dict[torch.nn.Module, torch.Tensor] = {}
        self._positions, self._end, self._where = None, 0, None

    def extend(self, attn, k, v, positions):
        """Store k and v (B, H, T, D) at positions (T,) or (B, T); return all up to the last of them."""
        if positions is not self._positions:  # the first layer computes the slots, the others use them again
            self._positions, self._end = positions, int(positions.max()) + 1
            self._where = _slots(positions, k.size(0))
        end = self._end
        if end > self.slots:
            raise ValueError(f"The cache has {self.slots} slots, but position {end - 1} was asked for.")
        if attn not in self.layers:
            batch, heads, _, width = k.shape
            self.layers[attn] = k.new_zeros(2, batch, self.slots, heads, width)
        kept = self.layers[attn]  # (2, B, slots, H, D)
        rows, slots = self._where
        kept[0, rows, slots], kept[1, rows, slots] = k.transpose(1, 2), v.transpose(1, 2)
        return kept[0, :, :end].transpose(1, 2), kept[1, :, :end].transpose(1, 2)

    def bytes(self) -> int:
        """Bytes that the cache holds."""
        return sum(kept.numel() * kept.element_size() for kept in self.layers.values())


def _slots(positions, rows: int):
    """The slots, in (B, slots), of keys at positions (T,) or (B, T); where possible as a slice, which is faster."""
    if positions.numel() == 1:
        return slice(None), slice(int(positions), int(positions) + 1)
    return torch.arange(rows, device=positions.device)[:, None], positions


@checked()
@torch.no_grad()
def generate(
    model,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    cache: bool = True,
    slide: bool = False,
    stop: int | None = END_OF_TEXT,
    gather: Callable | None = None,
    **sampling,
) -> list[list[int]]:
    """Prompts of any lengths, each with up to `new` tokens after it; a row ends before the token `stop`.

    `sampling` is temperature, top_k, top_p and seed of `Sampling`. With `slide` the oldest tokens of a text longer
    than the context are dropped. `gather` makes logits whole where a rank has only a part of the vocabulary. Raises
    ValueError for a text longer than the context without `slide`, an empty prompt, or a token outside the vocabulary.
    """
    choose, rows, ended = Sampling(**sampling), [list(p) for p in prompts], [False] * len(prompts)
    check_prompts(model.config, rows, new, slide)
    context = model.config.n_positions
    kept = KVCache(min(max(map(len, rows)) + new, context)) if cache else None
    with generating(model):
        for _ in range(new):
            if max(map(len, rows)) > context:
                kept = None  # every position has changed, so old keys cannot be used
            logits = next_logits(model, rows, kept)
            logits = logits if gather is None else gather(logits)
            for b, token in enumerate(choose.draw(logits, list(map(len, rows)))):
                ended[b] = ended[b] or token == stop
                if not ended[b]:
                    rows[b].append(token)
            if all(ended):
                break
    return rows


@contextmanager
def generating(model):
    """The model as it generates: experts take every token that asks for them, as they cannot see who else will."""
    was = model.training
    model.eval()
    try:
        with FewRows():
            yield
    finally:
        model.train(was)


@torch.no_grad()
def next_logits(model, rows: list[list[int]], cache: KVCache | None = None) -> torch.Tensor:
    """Logits (B, V) of the token after each row; a cache that is not empty holds all tokens but the last."""
    device = model.wte.weight.device
    if cache is not None and cache.layers:
        tokens = torch.tensor([[row[-1]] for row in rows], device=device)
        last = [len(row) - 1 for row in rows]
        same = min(last) == max(last)  # then one position serves all rows
        positions = torch.tensor(last[:1] if same else [[n] for n in last], device=device)  # (1,) or (B, 1)
        return model(tokens, positions, cache=cache)[:, 0]
    rows = [row[-model.config.n_positions :] for row in rows]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return model(tokens, cache=cache, pick=last)[:, 0]


def check_prompts(config, rows: Sequence[Sequence[int]], new: int, slide: bool = False) -> None:
    """Raise ValueError where prompts are empty, have foreign tokens or leave no room for `new` tokens."""
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"Prompt {i} is empty. Begin with at least one token, such as {END_OF_TEXT}.")
        if not 0 <= min(row) <= max(row) < config.vocab_size:
            raise ValueError(f"Prompt {i} has a token outside 0 to {config.vocab_size - 1}, the vocabulary.")
    if not rows or new < 0:
        raise ValueError(f"{len(rows)} prompts and {new} new tokens. Give at least 1 prompt and 0 tokens.")
    longest = max(map(len, rows))
    if longest + new > config.n_positions and not slide:
        room = config.n_positions - longest
        way = f"Ask for at most {room} new ones" if room > 0 else "Shorten the prompt"
        raise ValueError(
            f"{longest} tokens and {new} new ones make {longest + new}, but the model's context is "
            f"{config.n_positions}. {way}, or slide."
        )
