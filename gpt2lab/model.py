"""GPT-2 in pure torch, with the checkpoint's own names. It knows nothing of ranks and imports nothing of the package.

B is the batch, T the tokens of a sequence, C the embedding width, H the heads, D = C / H the width of a head,
V the vocabulary.

Parallel strategies replace these seams and no others: `attn.core`, `block.mlp`, and of the model `embed`,
`tokens_here`, `run_block`, `head` and `loss`.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import hashlib
import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; the names are those of the published config.json.

    Raises ValueError for sizes that no model has, and when the width does not divide by the heads.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    window: int | None = None  # a token attends to itself and this many before it; None: to all before it
    experts: object = None  # an `experts.Experts`, which makes the mixtures in place of MLPs; None: dense

    def __post_init__(self):
        least = {"vocab_size": 2, "n_positions": 1, "n_layer": 0, "n_head": 1, "n_embd": 1, "window": 0}
        for name, fewest in least.items():
            value = getattr(self, name)
            if not (isinstance(value, Integral) and value >= fewest or name == "window" and value is None):
                raise ValueError(
                    f"{name} = {value!r} makes no GPT-2. Use a whole number of {fewest} or more."
                )
        if not isinstance(self.dropout, Real) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout = {self.dropout!r} is no share that can be dropped. Use 0 <= dropout < 1."
            )
        if self.experts is not None and not hasattr(self.experts, "mixture"):
            raise ValueError(f"experts = {self.experts!r} makes no mixtures. Use Experts(...), or None.")
        if self.experts is not None and 0 < self.n_layer < self.experts.every:
            raise ValueError(
                f"Of n_layer = {self.n_layer} layers none is an every = {self.experts.every}th with experts. Use "
                f"every = {self.n_layer} or less."
            )
        if self.n_embd % self.n_head:
            rest, low = self.n_embd % self.n_head, range(1, min(math.isqrt(self.n_embd), 10**5) + 1)
            fits = {h for d in low if self.n_embd % d == 0 for h in (d, self.n_embd // d)}
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:3])
            raise ValueError(
                f"width {self.n_embd} cannot be split over {self.n_head} heads "
                f"({self.n_embd} % {self.n_head} = {rest}). Use n_head = {', '.join(map(str, near))}."
            )

    @property
    def parameters(self) -> int:
        """How many parameters, the tied head counted once: V C + n_positions C + L (12 C^2 + 13 C) + 2 C."""
        c, more = self.n_embd, self.experts.added(self) if self.experts else 0
        return (self.vocab_size + self.n_positions) * c + self.n_layer * (12 * c * c + 13 * c) + 2 * c + more

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers, for dropout or for a second expert."""
        return bool(self.dropout or (self.experts and self.experts.random_second))


PRESETS = {
    "nano": GPT2Config(n_positions=128, n_layer=4, n_head=4, n_embd=128),
    "mini": GPT2Config(n_positions=256, n_layer=4, n_head=8, n_embd=256),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}


@dataclass(frozen=True)
class Noise:
    """The random numbers of dropout: a pure function of seed, step, sample, site, position and channel.

    They do not depend on a rank, so every way of splitting the work draws the same mask for the same element.
    """

    seed: int
    step: int
    samples: torch.Tensor  # (B,) global sample indices

    def keep(self, p: float, site: int, positions: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
        """Which elements (B, T, C) stay, each with probability 1 - p; `site` numbers the model's dropouts."""
        h = _mix(self.samples.long() + _mix_int(self.seed, self.step, site))[:, None, None]
        h = _mix(h + positions.long()[..., :, None] * 0x9E3779B1)
        h = _mix(h + channels.long() * 0x85EBCA6B)
        return (h & 0xFFFFFF).to(torch.float64) * 2.0**-24 >= p


def _mix(h: torch.Tensor) -> torch.Tensor:
    """A hash of int64 values, so that neighbours become unrelated (MurmurHash3's finaliser, on 31 bits)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & 0x7FFFFFFF
    return h ^ (h >> 16)


def _mix_int(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=3).digest(), "big")


class Dropout(nn.Module):
    """Dropout on (B, T, C) whose mask depends only on `Noise`; without noise, or at p = 0, the identity."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x, positions, noise: Noise | None):
        if not self.p or noise is None:
            return x
        keep = noise.keep(self.p, self.site, positions, torch.arange(x.size(-1), device=x.device))
        return x * keep.to(x.dtype) / (1 - self.p)


def causal_attention(q, k, v, positions, window: int | None = None):
    """Causal attention of q (B, H, T, D), at `positions`, over k and v (B, H, S, D), at 0..S-1: (B, H, T, D).

    `positions` is (T,), or (B, T) where rows differ, as in generation. With a window w, a token sees itself
    and the w tokens before it.
    """
    if k.size(-2) == q.size(-2) and window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if positions.numel() == 1 and window is None and int(positions) >= k.size(-2) - 1:
        return F.scaled_dot_product_attention(q, k, v)  # a single query after all keys attends to all of them
    keys = torch.arange(k.size(-2), device=q.device)
    behind = positions[..., :, None] - keys  # (..., T, S): how many tokens before the query the key is
    seen = behind >= 0 if window is None else (behind >= 0) & (behind <= window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen if seen.dim() == 2 else seen[:, None])


class Attention(nn.Module):
    """Multi-head causal attention with GPT-2's fused q, k, v; the weight's shape says how many heads."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.window = config.window
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.core = causal_attention  # seam: context parallelism replaces it

    def forward(self, x, positions, cache=None):  # (B, T, C)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        if cache is not None:
            k, v = cache.extend(self, k, v, positions)  # (B, H, S, D)
        y = self.core(q, k, v, positions, self.window)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with tanh-GELU between them, four times as wide inside."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x, positions=None, noise=None):  # (B, T, C); a mixture of experts may draw by position
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a layer norm, each added to the residual stream."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = config.experts.mixture(config, layer) if config.experts else MLP(config)  # seam
        self.drop_attn = Dropout(config.dropout, 2 * layer + 1)
        self.drop_mlp = Dropout(config.dropout, 2 * layer + 2)

    def forward(self, x, positions, noise: Noise | None = None, cache=None):  # (B, T, C)
        x = x + self.drop_attn(self.attn(self.ln_1(x), positions, cache), positions, noise)
        return x + self.drop_mlp(self.mlp(self.ln_2(x), positions, noise), positions, noise)


def token_loss(logits, targets):
    """Sum, not mean, of the token losses of logits (B, T, V); targets (B, T) of -100 do not count."""
    return F.cross_entropy(summable(logits).flatten(0, 1), targets.flatten(), reduction="sum")


def summable(x):
    """x in a dtype in which many numbers can be summed: 16-bit floats become float32, others do not change."""
    return x.float() if x.element_size() < 4 else x


class GPT2(nn.Module):
    """The whole model; on a pipeline stage the parts of other stages are None, and blocks keep their names."""

    def __init__(self, config: GPT2Config, seed: int = 0):
        super().__init__()
        if not isinstance(config, GPT2Config) or not isinstance(seed, Integral):
            raise ValueError(f"GPT2({config!r}, {seed!r}): use a GPT2Config and a whole number as the seed.")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = Dropout(config.dropout, 0)
        self.h = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layer)})
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.loss = token_loss  # seam: a vocabulary-parallel or chunked loss replaces it
        initialise(self, seed)

    def forward(self, tokens, positions=None, noise: Noise | None = None, cache=None, pick=None):
        """Logits (B, T, V) of tokens (B, T); `positions` default to 0..T-1.

        With `pick` (B,), one column for each row, only the logits of those columns are computed: (B, 1, V).
        """
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embed(tokens, positions, noise)
        for block in self.h.values():
            x = self.run_block(block, x, positions, noise, cache)
        return self.head(x, pick)

    def embed(self, tokens, positions, noise: Noise | None = None):
        """Token plus position embeddings (B, T, C)."""
        return self.drop(self.wte(tokens) + self.wpe(positions), positions, noise)

    def run_block(self, block, x, positions, noise: Noise | None = None, cache=None):
        """A block's output (B, T, C); recomputation replaces this to keep only x for backward."""
        return block(x, positions, noise, cache)

    def tokens_here(self, length: int) -> int:
        """How many of a sequence's tokens are between two blocks: all; with sequence parallelism, some."""
        return length

    def head(self, x, pick=None):
        """Logits (B, T, V) of the last block's output: the head is tied to the token embedding."""
        return F.linear(picked(self.ln_f(x), pick), self.wte.weight)


def picked(x, pick):
    """Of x (B, T, C) only column pick[b] of each row b: (B, 1, C); all of x where pick is None."""
    return x if pick is None else x[torch.arange(len(x), device=x.device), pick][:, None]


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """GPT-2's initialisation, drawn by each parameter's *name*, so that every way of cutting gives the same weights.

    N(0, 0.02) for matrices, divided by sqrt(2 L) where they write to the residual stream; norms 1, biases 0.
    """
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(float("ln_" in name and name.endswith("weight")))
        else:
            std = 0.02 / (math.sqrt(2 * model.config.n_layer) if name.endswith("c_proj.weight") else 1)
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) * std)
