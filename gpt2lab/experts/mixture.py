"""Mixture of experts: a router sends each token to a few of many MLPs, which takes the place of a block's one MLP.

B is the batch, T the tokens of a sequence, C the embedding width, E the experts, k how many a token asks for,
G the groups of S tokens that compete for room, M the pairs (token, expert) that are computed.

Routers: Fedus et al. 2021, "Switch Transformers"; Lepikhin et al. 2020, "GShard"; Jiang et al. 2024, "Mixtral of
Experts"; Zhou et al. 2022, "Mixture-of-Experts with Expert Choice Routing"; DeepSeek-AI 2024, "DeepSeek-V3".
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import nn

from ..machine.arguments import MORE, checked
from ..model import MLP, GPT2Config, summable
from .rows import Attach, Combine, Dispatch, Expert, by_expert

ROUTERS = ("switch", "gshard", "mixtral", "deepseek", "expert_choice")
GROUPS = ("row", "batch", "rank")
OWN_K = {"switch": 1, "gshard": 2}  # experts a token, by router
UNUSED = -1  # the expert of a choice that was not made


@checked(experts=1, top_k=1, capacity=MORE, balance=0, z=0, speed=0, shared=0, hidden=1, every=1)
@dataclass(frozen=True)
class Experts:
    """What `GPT2Config.experts` says: how many experts, who chooses them, and how their load is balanced.

    A group is the tokens that share the experts' room and are balanced together: a "row" of the batch, the whole
    global "batch", or what one "rank" holds of a micro-batch, which is another model for every plan.
    Raises ValueError for what no router can do.
    """

    experts: int = 8
    top_k: int = 2
    router: str = "mixtral"
    capacity: float | None = None  # room of an expert, in units of an even share; None: no token is dropped
    group: str = "row"
    balance: float = 0.01  # coefficient of the load loss E sum_e f_e p_e (Switch, eq. 4)
    z: float = 0.0  # coefficient of the router's z-loss, the squared log-sum-exp (Zoph et al. 2022, eq. 5)
    speed: float = 1e-3  # of the load bias a step (DeepSeek-V3, section 2.1.2)
    random_second: bool = False  # gshard: the second expert is asked with probability min(1, 2 g_2)
    shared: int = 0  # experts that every token passes
    hidden: int | None = None  # width inside an expert; None: 4 C
    gated: bool = False  # silu(c_gate x) * (c_fc x) without biases, as in Mixtral, in place of GPT-2's gelu
    every: int = 1  # every so many layers has experts, the last of them first

    def __post_init__(self):
        if self.router not in ROUTERS:
            raise ValueError(f"There is no router {self.router!r}. Use {', '.join(ROUTERS)}.")
        if self.group not in GROUPS:
            raise ValueError(f"There is no group {self.group!r}. Use {', '.join(GROUPS)}.")
        if self.top_k > self.experts:
            raise ValueError(
                f"A token cannot ask for top_k = {self.top_k} of {self.experts} experts. "
                f"Use top_k = {self.experts} or less."
            )
        self._check_router()

    def _check_router(self) -> None:
        wanted = OWN_K.get(self.router, self.top_k)
        if self.top_k != wanted:
            raise ValueError(
                f"The router {self.router} asks for {wanted} expert{'s' * (wanted > 1)} a token, not for "
                f"top_k = {self.top_k}. Use top_k = {wanted}, or the router mixtral."
            )
        if self.top_k == 1 and self.router in ("mixtral", "deepseek"):
            raise ValueError(
                f"With top_k = 1 the router {self.router} gives its only expert the weight 1 whatever it learns. "
                "Use top_k = 2 or more, or the router switch."
            )
        if self.random_second and self.router != "gshard":
            raise ValueError(f"random_second is GShard's, not {self.router}'s. Use the router gshard.")
        if self.speed != Experts.speed and self.router != "deepseek":
            raise ValueError(
                f"speed = {self.speed} would change nothing: the router {self.router} has no load bias. Leave it "
                "out, or use the router deepseek."
            )

    def mixture(self, config: GPT2Config, layer: int) -> nn.Module:
        """What stands at `block.mlp` of a layer: a mixture, or the dense MLP between two of them."""
        return Mixture(config, layer) if self.at(layer) else MLP(config)

    def at(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer % self.every == self.every - 1

    def added(self, config: GPT2Config, active: bool = False) -> int:
        """Parameters more than with dense MLPs; `active`: only those that one token meets."""
        c, h = config.n_embd, self.hidden or 4 * config.n_embd
        each = (lambda width: 3 * c * width) if self.gated else (lambda width: 2 * c * width + width + c)
        router = self.experts * (c + (self.router == "deepseek"))
        many = self.top_k if active else self.experts
        layer = router + many * each(h) + (each(self.shared * h) if self.shared else 0) - (8 * c * c + 5 * c)
        return config.n_layer // self.every * layer

    def room(self, tokens: int) -> int:
        """How many tokens of a group an expert takes: ceil(k S / E * factor); all of them where none is dropped.

        Exact for the factor as it is written: in floats 50 * 1.1 is more than 55.
        """
        factor = self.capacity or (1.0 if self.router == "expert_choice" else None)
        if factor is None:
            return tokens
        return min(tokens, math.ceil(self.top_k * tokens * Fraction(str(factor)) / self.experts))


class Here:
    """All experts and all tokens of a group are here. Expert parallelism puts `Spread` in its place."""

    def enter(self, x):
        """What the experts see of a tensor (B, T, ...) of this rank's tokens."""
        return x

    def leave(self, x):
        """What `enter` undoes: this rank's tokens of the experts' sum (B, T, C)."""
        return x

    def loads(self, counts) -> tuple[torch.Tensor, int]:
        """The counts (G, k, E) of all ranks that share groups, in token order, and this rank's place among them."""
        return counts[None], 0

    def send(self, rows, counts):
        """Begin to take rows (M, C), sorted by expert, to their experts; `arrive` gives them."""
        return rows, counts

    def arrive(self, sent):
        """(rows sorted by local expert, how many for each of the local experts, what `back` needs)."""
        return *sent, None

    def back(self, rows, way):
        """The experts' output for the rows as they were given to `send`."""
        return rows


class Mixture(nn.Module):
    """Router, experts and, where the configuration says so, a shared expert; drops what finds no room.

    Its two losses join the backward here, so that they pass through no pipeline: the value of `model.loss` is the
    token loss alone. They are sums over tokens, divided once by `total`, the global number of target tokens.
    """

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.config, self.layer = config.experts, layer
        c, hidden, gated = config.n_embd, self.config.hidden or 4 * config.n_embd, self.config.gated
        self.router = nn.Linear(c, self.config.experts, bias=self.config.router == "deepseek")
        self.experts = nn.ModuleDict(
            {str(e): Expert(config, hidden, gated) for e in range(self.config.experts)}
        )
        self.shared = Expert(config, self.config.shared * hidden, gated) if self.config.shared else None
        self.ranks = Here()  # seam: expert, tensor and context parallelism replace it
        self.total: int | None = None  # None: the tokens of the call
        # (E,) of the last call on this rank: tokens that asked for and got an expert
        self.chosen = self.kept = None

    def forward(self, x, positions=None, noise=None):  # (B, T, C)
        logits, scores, choice, weights = self.route(x, positions, noise)
        entered, experts = self.ranks.enter(x), self.ranks.enter(choice)  # (B, T, C), (B, T, k)
        kept, share = self.room(experts)
        pairs, counts = by_expert(experts.where(kept, UNUSED), self.config.experts)
        self.chosen, self.kept = by_expert(experts, self.config.experts)[1], counts
        flat, token = entered.flatten(0, 1), pairs // experts.size(-1)
        under_way = self.ranks.send(Dispatch.apply(flat, token), counts)
        shared = self.shared(flat) if self.shared is not None else 0  # while the rows travel
        rows, local, way = self.ranks.arrive(under_way)
        rows = self.ranks.back(self.grouped(rows, local), way)
        weights = self.ranks.enter(weights).flatten()[pairs]
        y = (Combine.apply(rows, weights, token, len(flat)) + shared).view_as(entered)
        return Attach.apply(self.ranks.leave(y), self.losses(logits, scores, choice, share))

    def route(self, x, positions=None, noise=None):
        """Logits and scores (B, T, E) of tokens x (B, T, C), their experts (B, T, k), UNUSED for none, and weights."""
        config, logits = self.config, summable(F.linear(x, self.router.weight))
        scores = logits.sigmoid() if config.router == "deepseek" else logits.softmax(-1)
        if config.router == "expert_choice":
            return logits, scores, self._picked_by_experts(scores.detach()), scores.to(x.dtype)
        ranked = scores.detach() + (self.router.bias.detach() if config.router == "deepseek" else 0)
        experts = ranked.topk(config.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if config.router != "switch":
            weights = weights / weights.sum(-1, keepdim=True)
        if config.random_second and noise is not None:
            never = 1 - 2 * weights[..., 1:].detach()  # the second is asked with probability 2 g_2
            asked = noise.keep(
                never, -1 - self.layer, positions, torch.zeros(1, dtype=torch.long).to(x.device)
            )
            experts = torch.cat([experts[..., :1], experts[..., 1:].where(asked, UNUSED)], -1)
        return logits, scores, experts, weights.to(x.dtype)

    def _picked_by_experts(self, scores):
        """Every expert takes the tokens of a group with its highest scores: (B, T, E), a token's own expert or none."""
        if not self.training:
            raise ValueError(
                "With expert choice a token's experts depend on later tokens, which generation does not have. "
                "Train with another router to generate."
            )
        grouped = self._grouped(scores)
        best = grouped.topk(self.config.room(grouped.size(1)), 1).indices  # (G, room, E)
        taken = torch.zeros_like(grouped, dtype=torch.bool).scatter_(1, best, True).view_as(scores)
        return torch.arange(self.config.experts, device=scores.device).where(taken, UNUSED)

    def _grouped(self, x):
        """x (B, T, ...) as (G, S, ...)."""
        return x if self.config.group == "row" else x.flatten(0, 1)[None]

    def room(self, experts):
        """Which choices (B, T, k) find room, and what share of its group's choices each expert got, (G, 1, E).

        All first choices come before all second ones, each in token order (GShard, algorithm 1). Without gradients
        asked for and capacity nothing is counted, and generation (`eval()`) drops nothing.
        """
        config, made = self.config, experts != UNUSED
        limited = config.capacity is not None and self.training and config.router != "expert_choice"
        if not limited and not (config.balance and torch.is_grad_enabled()):
            return made, None
        one = self._grouped(experts)[..., None] == torch.arange(config.experts, device=experts.device)
        # (R, G, k, E) of the ranks that share groups
        everywhere, place = self.ranks.loads(one.sum(1))
        total = everywhere.sum(0)
        share = total.sum(1, keepdim=True).double() / total.sum((1, 2), keepdim=True)
        if not limited:
            return made, share
        # earlier choices, then earlier ranks' tokens
        before = total.cumsum(1) - total + everywhere[:place].sum(0)
        queue = one.cumsum(1) - one.long() + before[:, None]  # (G, S, k, E)
        tokens = int(total[:1, 0].sum())  # S on all ranks together: every token has a first choice
        return (one & (queue < config.room(tokens))).any(-1).view_as(made), share

    def grouped(self, rows, counts):
        """One product an expert: rows (M, C), sorted by expert, of which the experts here have `counts`."""
        parts = zip(self.experts.values(), rows.split(counts.tolist()), strict=True)
        return torch.cat([expert(part) for expert, part in parts])

    def losses(self, logits, scores, choice, share):
        """The router's own losses over this rank's tokens, divided by `total`; their value enters no message."""
        if not torch.is_grad_enabled():
            return None
        config, loss = self.config, scores.new_zeros(())
        if share is not None and config.balance:
            p = scores / scores.sum(-1, keepdim=True)
            loss = loss + config.balance * config.experts * (share.to(p.dtype) * self._grouped(p)).sum()
        if config.z:
            loss = loss + config.z * logits.logsumexp(-1).square().sum()
        loss = loss / (self.total or scores[..., 0].numel())
        if config.router == "deepseek":  # not a loss: its gradient is E times the excess load, an integer
            asked = by_expert(choice, config.experts)[1]
            loss = loss + (self.router.bias * (config.experts * asked - asked.sum())).sum()
        return loss


def looped(mixture: Mixture, x):
    """The mixture's output by a plain loop: every expert computes every token, and the weight is mostly zero."""
    _, _, experts, weights = mixture.route(x)
    kept, _ = mixture.room(experts)
    y = mixture.shared(x) if mixture.shared is not None else torch.zeros_like(x)
    for e, expert in mixture.experts.items():
        y = y + (weights * (kept & (experts == int(e)))).sum(-1, keepdim=True) * expert(x)
    return y


def mixtures(model) -> list[Mixture]:
    """The mixtures of a model, in order of the layers that are here."""
    return [block.mlp for block in model.h.values() if isinstance(block.mlp, Mixture)]


def set_total(model, tokens: int) -> None:
    """Tell a model's routers the number of target tokens of the global batch, by which their losses are divided."""
    for mixture in mixtures(model):
        mixture.total = tokens
