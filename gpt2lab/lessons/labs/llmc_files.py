"""The two binary files of llm.c: a model's weights, and a debug state with the gradients of one batch.

Both begin with 256 int32 whose first two are a magic number and a version; float32 tensors follow, in llm.c's order,
the layers of each kind stacked. The vocabulary is padded to a multiple of 128 in the weights, never in the logits.
"""

from pathlib import Path

import numpy as np
import torch

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

    Raises ValueError for a model with experts.
    """
    c = model.config
    if c.experts:
        raise ValueError(
            f"llm.c's file has one MLP a layer, no {c.experts.experts} experts. Write a dense model."
        )
    sizes = (c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, padded_vocabulary(c.vocab_size))
    with open(path, "wb") as file:
        _header(*WEIGHTS, *sizes).tofile(file)
        for name, ours in file_layout(c):
            for p in ours:
                _floats(model.get_parameter(p)).tofile(file)
            if name == "wte.weight":
                np.zeros(((padded_vocabulary(c.vocab_size) - c.vocab_size), c.n_embd), np.float32).tofile(
                    file
                )


def read_weights(path: Path) -> GPT2:
    """The model of such a file. Raises ValueError for a foreign magic, another version or a wrong length."""
    header = _read_header(path, *WEIGHTS, "weights")
    positions, vocab, layers, heads, width, stored = map(int, header[2:8])
    config = GPT2Config(vocab, positions, layers, heads, width)
    model = GPT2(config)
    wanted = config.parameters + (stored - vocab) * width
    data = _read_floats(path, 4 * HEADER, wanted)
    with torch.no_grad():
        for name, ours in file_layout(config):
            for p in ours:
                values, data = np.split(data, [model.get_parameter(p).numel()])
                model.get_parameter(p).copy_(torch.from_numpy(values).view_as(model.get_parameter(p)))
            if name == "wte.weight":
                data = data[(stored - vocab) * width :]
    return model


def write_debug(path: Path, config: GPT2Config, tokens, targets, logits, loss: float, grads: dict) -> None:
    """Write one batch with its logits (B, T, V), mean loss and gradients by name, as `gpt2_124M_debug_state.bin`."""
    with open(path, "wb") as file:
        _header(*DEBUG, *tokens.shape).tofile(file)
        for ints in (tokens, targets):
            ints.numpy().astype(np.int32).tofile(file)
        _floats(logits).tofile(file)
        np.float32(loss).tofile(file)
        for _, ours in file_layout(config):
            for p in ours:
                _floats(grads[p]).tofile(file)


def read_debug(path: Path, config: GPT2Config) -> tuple:
    """(tokens, targets, logits, loss, gradients by name) of such a file for a model of this configuration."""
    rows, length = map(int, _read_header(path, *DEBUG, "debug state")[2:4])
    count, shapes = rows * length, {n: p.shape for n, p in GPT2(config).named_parameters()}
    ints = np.fromfile(path, np.int32, 2 * count, offset=4 * HEADER).reshape(2, rows, length)
    data = _read_floats(path, 4 * (HEADER + 2 * count), count * config.vocab_size + 1 + config.parameters)
    logits, loss, data = np.split(data, [count * config.vocab_size, count * config.vocab_size + 1])
    grads = {}
    for _, ours in file_layout(config):
        for p in ours:
            values, data = np.split(data, [shapes[p].numel()])
            grads[p] = torch.from_numpy(values).view(shapes[p])
    tokens, targets = torch.from_numpy(ints).long()
    return tokens, targets, torch.from_numpy(logits).view(rows, length, -1), loss.item(), grads


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


def _read_floats(path: Path, offset: int, count: int) -> np.ndarray:
    size, wanted = Path(path).stat().st_size, offset + 4 * count
    if size != wanted:
        raise ValueError(
            f"{path} has {size} bytes, but its header asks for {wanted}: it is cut off or foreign."
        )
    return np.fromfile(path, np.float32, count, offset=offset)
