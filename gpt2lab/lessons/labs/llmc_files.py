"""The two binary files of llm.c: a model's weights, and a debug state with the gradients of one batch.

Both begin with 256 int32 whose first two are a magic number and a version; float32 tensors follow, in llm.c's order,
the layers of each kind stacked. The vocabulary is padded to a multiple of 128 in the weights, never in the logits.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ...machine.arguments import checked
from ...model import GPT2, GPT2Config

HEADER = 256
WEIGHTS = (20240326, 3)  # magic, version
DEBUG = (20240327, 2)
LAYER_TENSORS = [
    f"{part}.{kind}"
    for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]


def file_layout(config: GPT2Config) -> list[tuple[str, list[str]]]:
    """The 16 tensors of the file, in order: llm.c's line for each, and our parameters that are stacked in it."""
    layers = range(config.n_layer)
    inner = [(f"h.*.{name}", [f"h.{i}.{name}" for i in layers]) for name in LAYER_TENSORS]
    ends = ("ln_f.weight", "ln_f.bias")
    return [(n, [n]) for n in ("wte.weight", "wpe.weight")] + inner + [(n, [n]) for n in ends]


@checked(vocab_size=1)
def padded_vocabulary(vocab_size: int) -> int:
    """The vocabulary as llm.c stores it: a multiple of 128."""
    return -(-vocab_size // 128) * 128


def write_weights(model: GPT2, path: Path) -> None:
    """Write a model as llm.c's `gpt2_124M.bin`; the padding rows of the embedding are zero.

    Raises ValueError for a model with experts or a window, for which it has no word.
    """
    c = model.config
    if c.experts:
        raise ValueError(
            f"llm.c's file has one MLP a layer, no {c.experts.experts} experts. Write a dense model."
        )
    if c.window is not None:
        raise ValueError(f"llm.c's file has no word for a window of {c.window}. Write a model without.")
    vocabulary = padded_vocabulary(c.vocab_size)
    weights = dict(model.named_parameters())
    weights["wte.weight"] = F.pad(model.wte.weight, (0, 0, 0, vocabulary - c.vocab_size))
    with open(path, "wb") as file:
        _header(*WEIGHTS, c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, vocabulary).tofile(file)
        for name in _in_order(c):
            _floats(weights[name]).tofile(file)


def read_weights(path: Path) -> GPT2:
    """The model of such a file. Raises ValueError for a foreign magic, another version or a wrong length."""
    header = _read_header(path, *WEIGHTS, "weights")
    positions, vocab, layers, heads, width, stored = map(int, header[2:8])
    model = GPT2(GPT2Config(vocab, positions, layers, heads, width))
    wider = GPT2(replace(model.config, vocab_size=stored))
    found = _named(_read_floats(path, 4 * HEADER, wider.config.parameters), wider)
    model.load_state_dict(found | {"wte.weight": found["wte.weight"][:vocab]})
    return model


def write_debug(path: Path, config: GPT2Config, tokens, targets, logits, loss: float, grads: dict) -> None:
    """Write one batch with its logits (B, T, V), mean loss and gradients by name, as `gpt2_124M_debug_state.bin`."""
    with open(path, "wb") as file:
        _header(*DEBUG, *tokens.shape).tofile(file)
        for ints in (tokens, targets):
            ints.numpy().astype(np.int32).tofile(file)
        for floats in (logits, torch.tensor(loss), *(grads[name] for name in _in_order(config))):
            _floats(floats).tofile(file)


def read_debug(path: Path, config: GPT2Config) -> tuple:
    """(tokens, targets, logits, loss, gradients by name) of such a file for a model of this configuration."""
    rows, length = map(int, _read_header(path, *DEBUG, "debug state")[2:4])
    count = rows * length
    ints = np.fromfile(path, np.int32, 2 * count, offset=4 * HEADER).reshape(2, rows, length)
    data = _read_floats(path, 4 * (HEADER + 2 * count), count * config.vocab_size + 1 + config.parameters)
    logits, loss, data = data.split([count * config.vocab_size, 1, config.parameters])
    tokens, targets = torch.from_numpy(ints).long()
    return tokens, targets, logits.view(rows, length, -1), loss.item(), _named(data, GPT2(config))


def _named(floats: torch.Tensor, model: GPT2) -> dict[str, torch.Tensor]:
    """What a file holds for each parameter of a model, by name."""
    ours = {name: model.get_parameter(name) for name in _in_order(model.config)}
    parts = floats.split([p.numel() for p in ours.values()])
    return {name: x.view_as(p) for (name, p), x in zip(ours.items(), parts, strict=True)}


def _in_order(config: GPT2Config) -> list[str]:
    """The names of our parameters in the order of the file."""
    return [name for _, ours in file_layout(config) for name in ours]


def _header(*values: int) -> np.ndarray:
    header = np.zeros(HEADER, np.int32)
    header[: len(values)] = values
    return header


def _floats(t: torch.Tensor) -> np.ndarray:
    return t.detach().float().numpy()


def _read_header(path: Path, magic: int, version: int, what: str) -> np.ndarray:
    header = np.fromfile(path, np.int32, HEADER)
    if len(header) < HEADER or header[0] != magic:
        found = header[0] if len(header) else "nothing"
        raise ValueError(f"{path} is not llm.c's {what}: its magic number is {found}, expected {magic}.")
    if header[1] != version:
        raise ValueError(f"{path} is version {header[1]} of llm.c's {what}; only version {version} is read.")
    return header


def _read_floats(path: Path, offset: int, count: int) -> torch.Tensor:
    size, wanted = Path(path).stat().st_size, offset + 4 * count
    if size != wanted:
        raise ValueError(
            f"{path} has {size} bytes, but its header asks for {wanted}: it is cut off or foreign."
        )
    return torch.from_numpy(np.fromfile(path, np.float32, count, offset=offset))
