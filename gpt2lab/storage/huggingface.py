"""GPT-2 in the Hugging Face layout: a folder with config.json and model.safetensors, read and written.

The folder of a run's checkpoint, whose weights lie in one file a rank, is read as well.

The published files differ in three ways from a plain `state_dict`: names may start with `transformer.`, masks
are stored as if they were weights, and the matrices of a layer are transposed (called Conv1D there).
"""

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..experts.mixture import Experts
from ..machine.arguments import checked, read_table
from ..model import GPT2, PRESETS, GPT2Config
from ..parallel.boxes import whole
from . import reading, writing

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored (in, out); nn.Linear holds (out, in)
MASKS = (".attn.bias", ".attn.masked_bias")
SIZES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
FIXED = {  # what our model always does; another value would mean another function
    "model_type": ("gpt2", "gpt2_experts"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


@checked()
def load(source: str | Path, dtype: torch.dtype | None = torch.float32) -> GPT2:
    """The model in a folder, or the published one of a name: "gpt2" (fetched once, 548 MB); `dtype` None: as stored.

    Dropout is what the configuration says for the residual stream; our attention weights have none.
    Raises ValueError or FileNotFoundError with the names and shapes that do not fit.
    """
    folder = Path(source)
    parts = reading.was_one(folder)
    if parts:
        reading.read_state(folder)  # before anything of it is read
    if folder.is_dir():
        config, file = read_config(folder), folder / "model.safetensors"
        held = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
        if config.parameters > held > 0 and (parts or file.exists()):
            raise ValueError(
                f"{folder / 'config.json'} makes a model of {config.parameters:,} parameters, and the files "
                f"beside it have {held:,} bytes. Fetch or export the model again."
            )
    else:
        config, file = PRESETS.get(str(source)), published(str(source))
    model = GPT2(config)
    if parts:
        _fill(model, folder, dtype)
    else:
        tensors = _translated(_read(file), model, file)
        model.to(dtype or next(iter(tensors.values())).dtype).load_state_dict(tensors)
    return model


def _fill(model: GPT2, folder: Path, dtype: torch.dtype | None) -> None:
    """Give a model the weights of a checkpoint, in `dtype` or as they are stored. Raises ValueError."""
    there = reading.stored(folder)
    weights = {name: boxes for name, boxes in there.items() if name.startswith("weight.")}
    differ = sorted(weights.keys() ^ {f"weight.{name}" for name in model.state_dict()})
    if differ:
        raise ValueError(f"{folder} and its config.json differ in {_few(differ)}; is one of another model?")
    first = weights["weight.ln_f.bias"][0]
    model.to(dtype or first.tensor[tuple(slice(0, 1) for _ in first.sizes)].dtype)
    reading.read(folder, {f"weight.{name}": whole(t) for name, t in model.state_dict().items()})


@checked()
def save(model: GPT2, folder: str | Path) -> None:
    """Write config.json and model.safetensors, so that `transformers` and `load` read the same model back.

    A model with experts has a `model_type` of its own: `load` reads it, transformers refuses it. Raises ValueError for
    a model with a window, which the layout has no word for.
    """
    if model.config.window is not None:
        raise ValueError(
            f"The layout of Hugging Face cannot say window={model.config.window}, so its readers would attend to all. "
            "Generate from the checkpoint's own folder, or export a model without a window."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{name}": (t.T if name.endswith(TRANSPOSED) else t).contiguous()
        for name, t in model.state_dict().items()
    }
    files = [folder / "config.json", folder / "model.safetensors"]
    config, weights = partial = [file.with_name(f"{file.name}.partial") for file in files]
    try:
        config.write_text(config_text(model))
        writing.save_tensors(tensors, weights, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        for file in partial:
            file.unlink(missing_ok=True)
        raise OSError(
            f"The model {folder} could not be written: {error}. What was there is as it was. "
            "Make room, or use another place."
        ) from None
    for old, new in zip(files, partial, strict=True):
        new.replace(old)


def read_config(folder: Path) -> GPT2Config:
    """The configuration of a folder; ValueError where the file asks for something our GPT-2 does not do."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} has no config.json, so the sizes of the model are unknown. Name a run's folder, or a model's."
        )
    entries = read_table(file, json.loads, "a model")
    missing = [name for name in SIZES if name not in entries]
    if missing:
        raise ValueError(f"{file} does not say {', '.join(missing)}: it is not the configuration of a GPT-2.")
    for name, allowed in FIXED.items():
        if entries.get(name, allowed[0]) not in allowed:
            raise ValueError(
                f"{file} asks for {name} = {entries[name]!r}; this GPT-2 knows only {allowed[0]!r}."
            )
    dropout = entries.get("resid_pdrop", 0.0)
    for name, allowed in (("embd_pdrop", (dropout,)), ("attn_pdrop", (dropout, 0.0))):
        if entries.get(name, dropout) not in allowed:
            raise ValueError(
                f"{file} asks for {name} = {entries[name]} and resid_pdrop = {dropout}; this GPT-2 has one dropout. "
                f"Make them equal."
            )
    sizes, words = {name: entries[name] for name in SIZES}, [f.name for f in fields(Experts)]
    experts = entries.get("experts", {})
    if not isinstance(experts, dict) or not experts.keys() <= set(words):
        raise ValueError(f"{file} asks for experts = {experts!r}. Use a table of {', '.join(words)}.")
    try:
        if experts.get("router") != "deepseek":  # a run from before may say what changes nothing
            experts = {name: value for name, value in experts.items() if name != "speed"}
        experts = Experts(**experts) if "experts" in entries else None
        config = GPT2Config(**sizes, dropout=dropout, window=entries.get("window"), experts=experts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    if entries.get("n_inner") not in (None, 4 * config.n_embd):
        raise ValueError(
            f"{file} asks for an MLP of width {entries['n_inner']}; this GPT-2's is 4 x {config.n_embd}."
        )
    return config


def config_text(model: GPT2) -> str:
    """The text of config.json for a model, whole or in parts."""
    config = model.config
    entries = {name: allowed[0] for name, allowed in FIXED.items()}
    entries |= {name: getattr(config, name) for name in SIZES}
    entries |= {"architectures": ["GPT2LMHeadModel"], "n_inner": None, "attn_pdrop": 0.0}
    entries |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout}
    entries["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    last = config.vocab_size - 1  # <|endoftext|> is GPT-2's last token
    entries |= {"bos_token_id": last, "eos_token_id": last}
    entries |= {} if config.window is None else {"window": config.window}
    if config.experts:  # no reader may take it for a GPT-2 whose experts are surplus tensors
        entries |= {"model_type": "gpt2_experts", "architectures": ["GPT2ExpertsLMHeadModel"]}
        entries |= {"experts": asdict(config.experts)}
    return json.dumps(entries, indent=2, sort_keys=True) + "\n"


def _read(file: Path) -> dict[str, torch.Tensor]:
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing: weights are read from this one file. Save the model so: save_pretrained(folder, "
            'max_shard_size="100GB").'
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is cut off or not a safetensors file ({error}). Fetch it again.") from None


def _translated(tensors: dict, model: GPT2, file: Path) -> dict[str, torch.Tensor]:
    """The tensors under our names, in our layout; ValueError names what is missing, foreign or misshapen."""
    ours, head = {}, None
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name == "lm_head.weight":  # the head is wte, kept once
            head = tensor
        elif not name.endswith(MASKS):
            ours[name] = tensor.T if name.endswith(TRANSPOSED) else tensor
    wanted = model.state_dict()
    missing, foreign = sorted(wanted.keys() - ours.keys()), sorted(ours.keys() - wanted.keys())
    if missing or foreign:
        parts = [f"lacks {_few(missing)}"] if missing else []
        parts += [f"has the unknown {_few(foreign)}"] if foreign else []
        raise ValueError(f"{file} {' and '.join(parts)}; is config.json that of another model?")
    for name, tensor in ours.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{file}: {name} is {tuple(tensor.shape)} in the file, but {tuple(wanted[name].shape)} "
                f"by the configuration."
            )
    if head is not None and not torch.equal(head, ours["wte.weight"]):
        raise ValueError(f"{file} has a head of its own, and GPT-2's is its embedding. Use a tied model.")
    return ours


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def published(name: str) -> Path:
    """The weights file of a published model, fetched at the first call; says what to do without a network."""
    from ..corpus import downloads  # only when asked for: loading a folder needs no network code

    if name != "gpt2":
        raise ValueError(
            f"There is no folder {name!r}, and the only published model fetched by name is 'gpt2'. "
            f"Give a folder with config.json and model.safetensors."
        )
    return downloads.download("gpt2")
