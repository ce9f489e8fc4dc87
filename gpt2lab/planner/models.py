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

from ..machine.arguments import checked, read_table, said_in
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
        if over := self.n_head % self.kv_heads:
            shared = f"{self.n_head} heads cannot share {self.kv_heads} heads of keys"
            raise ValueError(f"{shared} ({self.n_head} % {self.kv_heads} = {over}). Use a divisor.")
        if self.active > self.mlps:
            raise ValueError(f"A token cannot pass {self.active} of {self.mlps} MLPs. Use fewer.")

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
        return self.n_embd * (2 * (self.n_embd + self.keys) + self.active * (2 + self.gated) * self.mlp)

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
LAYERS = 10_000  # of a network at most: a plan of so many takes about a second
HUGGING_FACE = {  # the words of a config.json: GPT-2's own, BLOOM's, Llama's; the kind, and the least or the range
    "n_layer": ("n_layer num_hidden_layers", int, (1, LAYERS)),
    "n_embd": ("n_embd n_embed hidden_size", int, 1),
    "n_head": ("n_head num_attention_heads", int, 1),
    "vocab_size": ("vocab_size", int, 2),
    "n_positions": ("n_positions n_ctx seq_length max_position_embeddings", int, 1),
    "mlp": ("n_inner intermediate_size", int, 1),
    "kv_heads": ("num_key_value_heads", int, 1),
    "mlps": ("num_local_experts", int, 1),
    "active": ("num_experts_per_tok", int, 1),
    "tied": ("tie_word_embeddings", bool, None),
}
UNCOUNTED = "attention_bias", "mlp_bias", "add_cross_attention"
LLAMA = {"gated": True, "tied": False, "learned": False, "bias": False}
KINDS = {"gpt2": {}, "bloom": {"learned": False}} | dict.fromkeys(("llama", "mistral", "mixtral"), LLAMA)
SAID = {"n_layer", "n_embd", "n_head", "vocab_size", "n_positions"}
MORE_SAID = {"llama": {"mlp"}, "mistral": {"mlp", "kv_heads"}}
MORE_SAID["mixtral"] = MORE_SAID["mistral"] | {"mlps", "active"}
"""What a file of each kind must say, and what that of some must besides: what is left out is not the same for all."""
MODELS = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


@lru_cache(maxsize=256)
def units(config: GPT2Config) -> Transformer:
    """The same sizes as a `Transformer`."""
    if isinstance(config, Transformer):
        return config
    return Transformer(*(getattr(config, name) for name in SIZES))


@checked()
def network_of(words: dict, name: str) -> Transformer:
    """The network of a config.json of GPT-2, BLOOM, Llama, Mistral or Mixtral.

    Raises ValueError for another kind, a missing size, and heads wider than the model.
    """
    kind = words.get("model_type")
    if str(kind) not in KINDS:
        hint = did_you_mean(str(kind), KINDS, f"Use {', '.join(KINDS)}.")
        raise ValueError(f"{name} is of the kind (model_type) {kind!r}, which is not known here. {hint}")
    said = {}
    for size, (known, *fits) in HUGGING_FACE.items():
        found = [word for word in known.split() if words.get(word) is not None]
        if len({repr(words[word]) for word in found}) > 1:
            raise ValueError(f"{name} says {found[0]} and another {found[-1]}. Leave one of them out.")
        if found:
            said[size] = said_in(name, found[0], words[found[0]], *fits)
        elif size in SAID | MORE_SAID.get(kind, set()):
            word = known.split()[0 if kind in ("gpt2", "bloom") else -1]
            raise ValueError(f"{name} does not say {word}. Use the config.json of a {kind}.")
    if more := [word for word in UNCOUNTED if words.get(word)]:
        raise ValueError(f"{name} says {more[0]}, and such weights are not counted here. Leave it out.")
    width = words.get("head_dim")
    if width is not None and said_in(name, "head_dim", width, int, 1) * said["n_head"] != said["n_embd"]:
        raise ValueError(
            f"{name} has {said['n_head']} heads of {width}, which is not its width {said['n_embd']}. "
            "Use a network whose heads fill its width."
        )
    window = words.get("sliding_window")
    if window is not None and said_in(name, "sliding_window", window, int, 1) < said["n_positions"]:
        raise ValueError(
            f"{name} says sliding_window = {window} of {said['n_positions']} positions, and windows are not counted "
            "here. Leave it out to plan with whole attention."
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
        found = network_of(read_table(name, json.loads, "a model"), name)
    else:
        known = [*PRESETS, *MODELS]
        hint = did_you_mean(name, known, f"There are {', '.join(known)}, and files such as config.json.")
        raise ValueError(f"No model is called {name!r}. {hint}")
    if not sizes.keys() <= {*SIZES}:
        found = units(found)
    if sizes.keys() & {"n_embd", "n_head"} and isinstance(found, Transformer):
        sizes = {"kv_heads": 0, "mlp": 0} | sizes  # as GPT-2 has them, unless they are said too
    return replace(found, **sizes | {"n_positions": max(found.n_positions, length)})


OF_SIZES = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size"}
OF_SIZES |= {"kv_heads": "kv_heads", "mlp": "mlp"}
"""Options of a model's sizes, and the fields of `models.Transformer`."""


def of_model() -> dict[str, Setting]:
    """The options of a model and its batch, for commands that predict."""
    names, own = ", ".join([*PRESETS, *MODELS]), "in place of its own"
    return {
        "config": Setting(f"the model: {names}, or Hugging Face's config.json", default="gpt2"),
        **{name: Setting(f"its {name.replace('_', ' ')}, {own}", positive) for name in OF_SIZES},
        "layers": Setting(f"its layers, {own}", within(1, LAYERS)),
        "rows": Setting("sequences of a step", within(1, 100_000), 8, also=("batch",)),
        "length": Setting("tokens of a sequence; without it the model's positions", positive),
        "precision": Setting(
            "bytes of weights, gradients and optimizer, and their rate", choices=[*PRECISIONS]
        ),
    }


def model_typed(args) -> GPT2Config:
    """The model that the options of `of_model` describe."""
    typed = {field: n for option, field in OF_SIZES.items() if (n := getattr(args, option)) is not None}
    return find_model(args.config, args.length or 0, **typed)
