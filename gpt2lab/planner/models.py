"""Networks as data: sizes of GPT-2 and its relatives, from which the planner counts weights, bytes and operations.

What the package builds is a `GPT2Config`, and the same data describes it; a `Transformer` besides has fewer heads of
keys, gated or several MLPs, an own head, or no biases. It is planned for and not built: what is said of it is computed.

Shazeer 2020, "GLU variants improve Transformer"; Ainslie et al. 2023, "GQA"; Jiang et al. 2024, "Mixtral of experts".
"""

import json
import tomllib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from ..machine.arguments import checked
from ..machine.options import Setting, positive, within
from ..machine.words import did_you_mean
from ..model import PRESETS, GPT2Config
from .problem import PRECISIONS


@checked(kv_heads=0, mlp=0, mlps=1, active=1, length=0)
@dataclass(frozen=True)
class Transformer(GPT2Config):
    """The sizes of a transformer; what is not said is as in GPT-2.

    Raises ValueError for heads that do not divide, and for sizes that no network has.
    """

    kv_heads: int = 0  # heads of keys and values; 0: as many as of queries
    mlp: int = 0  # width of the MLP's hidden layer; 0: four times the model's
    gated: bool = False  # a third product gates the hidden layer
    tied: bool = True  # the head's weights are the embedding's
    learned: bool = True  # positions have weights
    bias: bool = True  # products and norms have biases; without, norms are of root mean squares
    mlps: int = 1  # MLPs of a layer
    active: int = 1  # how many of them a token passes

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "kv_heads", self.kv_heads or self.n_head)
        object.__setattr__(self, "mlp", self.mlp or 4 * self.n_embd)
        if self.kv_heads < 1 or self.n_head % self.kv_heads:
            raise ValueError(
                f"{self.n_head} heads cannot share {self.kv_heads} heads of keys "
                f"({self.n_head} % {self.kv_heads} = {self.n_head % max(self.kv_heads, 1)}). Use a divisor."
            )
        if min(self.mlp, self.mlps, self.active) < 1 or self.active > self.mlps:
            raise ValueError(
                f"MLPs of width {self.mlp}, {self.active} of {self.mlps} for a token, make no layer. Use 1 or more."
            )

    @property
    def keys(self) -> int:
        """Width of keys, and of values."""
        return self.n_embd // self.n_head * self.kv_heads

    @property
    def head(self) -> str:
        """The part that has the head's weights."""
        return "wte" if self.tied else "lm_head"

    def check_cut(self, plan) -> None:
        """Raise ValueError where a plan cuts attention into more parts than there are heads of keys."""
        cut = plan.tp * (plan.cp if plan.exchange == "heads" else 1)
        if self.kv_heads % cut:
            raise ValueError(
                f"{self.kv_heads} heads of keys cannot be split over {cut} ranks. Use a divisor."
            )

    @property
    def multiplied(self) -> int:
        """Weights of a block's products that a token passes."""
        return (
            2 * self.n_embd * (self.n_embd + self.keys)
            + self.active * (2 + self.gated) * self.n_embd * self.mlp
        )

    @property
    def block(self) -> int:
        """Weights of a block."""
        c, router = self.n_embd, self.n_embd * self.mlps * (self.mlps > 1)
        more = (self.mlps - self.active) * (2 + self.gated) * c * self.mlp
        biases = 2 * c + 2 * self.keys + self.mlps * ((1 + self.gated) * self.mlp + c) + 2 * c
        return self.multiplied + more + router + 2 * c + biases * self.bias

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = (2 - self.tied) * self.vocab_size + self.learned * self.n_positions
        return tables * self.n_embd + self.n_layer * self.block + (1 + self.bias) * self.n_embd

    @property
    def kept_more(self) -> int:
        """Numbers a token that a block keeps for backward more than one of GPT-2 of its width."""
        hidden = self.active * (4 if self.gated else 2) * self.mlp
        return 2 * self.keys - 2 * self.n_embd + hidden - 8 * self.n_embd

    def flops_per_token(self, length: int) -> int:
        """Operations of a token's forward and backward: 6 N + 12 L C T (PaLM 2022, appendix B), of the N it passes."""
        looked_up = (1 - self.tied) * self.vocab_size + self.learned * self.n_positions
        idle = self.n_layer * (self.mlps - self.active) * (2 + self.gated) * self.n_embd * self.mlp
        passed = self.parameters - looked_up * self.n_embd - idle
        return 6 * passed + 12 * self.n_layer * self.n_embd * length


@dataclass(frozen=True)
class Parameter:
    """A parameter as one rank has it: elements, whether tensor parallelism cuts it, or sums its gradient at the end.

    `expert`: it is one of the experts that are shared out.
    """

    name: str
    elements: int
    cut: bool = False
    partial: bool = False
    expert: bool = False


SIZES = tuple(f.name for f in fields(GPT2Config))
HUGGING_FACE = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "mlps": "num_local_experts",
    "active": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
}
KINDS = {
    "gpt2": {},
    "bloom": {"learned": False},
    "llama": {"gated": True, "tied": False, "learned": False, "bias": False},
}
KINDS |= {"mistral": KINDS["llama"], "mixtral": KINDS["llama"]}
MODELS = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


@lru_cache(maxsize=256)
def units(config: GPT2Config) -> Transformer:
    """The same sizes as a `Transformer`."""
    return (
        config if isinstance(config, Transformer) else Transformer(*(getattr(config, name) for name in SIZES))
    )


@checked()
def network_of(words: dict, name: str) -> Transformer:
    """The network of a config.json of GPT-2, BLOOM, Llama, Mistral or Mixtral.

    Raises ValueError for another kind, a missing size, and heads wider than the model.
    """
    kind = words.get("model_type")
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS, f"Use {', '.join(KINDS)}.")
        raise ValueError(f"{name} is of the kind (model_type) {kind!r}, which is not known here. {hint}")
    known = (
        {"mlp": "n_inner"} | {field: field for field in SIZES} if kind in ("gpt2", "bloom") else HUGGING_FACE
    )
    said = {field: words[word] for field, word in known.items() if words.get(word) is not None}
    if missing := [known[size] for size in ("n_layer", "n_embd", "n_head", "vocab_size") if size not in said]:
        raise ValueError(f"{name} does not say {missing[0]}. Use the config.json of a {kind}.")
    width = words.get("head_dim") or said["n_embd"] // said["n_head"]
    if width * said["n_head"] != said["n_embd"]:
        raise ValueError(
            f"{name} has {said['n_head']} heads of {width}, which is not its width {said['n_embd']}. "
            "Use a network whose heads fill its width."
        )
    return Transformer(**KINDS[kind] | said)


@checked(length=0)
def find_model(name: str, length: int = 0, **sizes) -> GPT2Config:
    """The model of a preset's name, of a name in `models.toml`, or of a config.json, with some `sizes` of its own.

    It gets positions for sequences of `length`. Raises ValueError for a name that nobody knows, a file that is no
    config, and for sizes that no network has.
    """
    if name in PRESETS:
        found = PRESETS[name]
    elif name in MODELS:
        found = network_of(MODELS[name], name)
    elif name.endswith(".json"):
        try:
            found = network_of({**json.loads(Path(name).read_text())}, name)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError) as error:
            raise ValueError(f"{name} cannot be read as a model: {error}. Use a config.json.") from None
    else:
        known = [*PRESETS, *MODELS]
        hint = did_you_mean(name, known, f"There are {', '.join(known)}, and files such as config.json.")
        raise ValueError(f"No model is called {name!r}. {hint}")
    if not sizes.keys() <= {*SIZES}:
        found = units(found)
    if sizes.keys() & {"n_embd", "n_head"} and isinstance(found, Transformer):
        sizes = {"kv_heads": 0, "mlp": 0} | sizes  # as GPT-2 has them, unless they are said too
    return replace(found, **sizes | {"n_positions": max(found.n_positions, length)})


OF_SIZES = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "kv_heads": "kv_heads",
    "mlp": "mlp",
    "vocab": "vocab_size",
}
"""Options of a model's sizes, and the fields of `models.Transformer`."""


def of_model() -> dict[str, Setting]:
    """The options of a model and its batch, for commands that predict."""
    names = ", ".join([*PRESETS, *MODELS])
    return {
        "config": Setting(f"the model: {names}, or Hugging Face's config.json", default="gpt2"),
        **{
            name: Setting(f"its {name.replace('_', ' ')}, in place of its own", positive) for name in OF_SIZES
        },
        "rows": Setting("sequences of a step", within(1, 100_000), 8, also=("batch",)),
        "length": Setting("tokens of a sequence; without it the model's positions", positive),
        "precision": Setting(
            "bytes of weights, gradients and optimizer, and their rate", choices=list(PRECISIONS)
        ),
    }


def model_typed(args) -> GPT2Config:
    """The model that the options of `of_model` describe."""
    given = {field: getattr(args, option) for option, field in OF_SIZES.items()}
    return find_model(
        args.config, args.length or 0, **{field: n for field, n in given.items() if n is not None}
    )
